"""An archive of several packs is whole for every level of verify."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest

from tests.checkpoints import path
from tests.processes import brevis


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("many") / "archive"
    brevis("archive", path("fracast-f32"), place, "--set", "task_bytes=64KiB", "--set", "synth.prior=shipped")
    assert len(list((place / "packs").rglob("*/*"))) > 2
    return place


@pytest.mark.parametrize("level", ["manifest", "bytes", "decode"])
def test_verify_finds_nothing(archive: Path, level: str) -> None:
    assert json.loads(brevis("verify", archive, "--level", level, "--json").stdout)["failures"] == []


def test_restore_gives_the_file(archive: Path, tmp_path: Path) -> None:
    brevis("restore", archive, tmp_path)
    assert filecmp.cmp(path("fracast-f32"), tmp_path / "fracast-f32.safetensors", shallow=False)
