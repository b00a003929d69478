"""Commands, run in this process: exit code and JSON, and the files around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.store_base import is_spooled

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
QUICK = ("--workers", "1", "--set", "synth.budget=8", "--set", "synth.prior=shipped")


class Ran:
    """Exit code and JSON of a command."""

    def __init__(self, capsys: Capture, *arguments: object) -> None:
        capsys.readouterr()
        words = [*map(str, arguments), "--json", "--no-progress"]
        # One process unless a test is about more: starting a pool takes longer than most of the work here.
        self.code = main(words if "--workers" in words else [*words, "--workers", "1"])
        captured = capsys.readouterr()
        self.json: dict[str, Any] = json.loads(captured.out)
        self.err = captured.err


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def objects_of(archive: Path, *parts: str) -> list[Path]:
    """Files, without the halves of those that a killed writer left."""
    files = (path for part in parts for path in sorted((archive / part).rglob("*")) if path.is_file())
    return [path for path in files if not is_spooled(path.name)]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for key, data in files.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
