"""A short fuzz run of all targets, interpreted, in processes of their own; and that it would notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from operators.literals.raw import Raw
from pipeline.snapshots import _Reader
from tests.fuzz.__main__ import run
from tests.fuzz.targets import TARGETS
from tests.processes import ROOT

DECODERS, READERS = ("record", "payloads"), tuple(name for name in TARGETS if name not in {"record", "payloads"})
FEWEST = 3
"""Inputs that each target must at least refuse, and take for sound, in its two seconds on a busy machine."""


def fuzzed(seconds: int, seed: int, names: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", str(seconds), str(seed), *names],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\w+): (\d+) refused, (\d+) restored, 0 failed$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in found] == list(names)
    for name, refused, restored in found:
        assert int(restored) >= FEWEST, name
        assert int(refused) >= FEWEST or name == "receipt", name  # one that says nothing is passed over


def test_damaged_records_end_in_typed_errors() -> None:
    fuzzed(12, 1, DECODERS)


def test_whatever_is_read_ends_in_typed_errors() -> None:
    """T19: texts, books, headers, paths, snapshots, manifests, packs, receipts, priors."""
    fuzzed(2 * len(READERS), 1, READERS)


@pytest.mark.slow
def test_long_runs_of_all_targets() -> None:
    fuzzed(1200, 2, DECODERS + READERS)


def test_an_error_of_another_type_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def careless(self: Raw, payload: memoryview, stream: object) -> object:
        return payload[10**6]

    monkeypatch.setattr(Raw, "source", careless)
    assert run(60, 1, ["record"])["record"].failed == 10  # it ends there: kernels may have to be compiled first
    assert "IndexError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "place", "careless", "told"),
    [
        ("snapshot", (_Reader, "_time"), lambda _, value: str(value), "ValueError"),
        ("receipt", (json, "loads"), lambda data: {"snapshots": data[9**9]}, "IndexError"),
    ],
)
def test_a_careless_reader_is_noticed(
    target: str,
    place: tuple[object, str],
    careless: object,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(*place, careless)
    assert run(5, 1, [target])[target].failed > 0
    assert told in capsys.readouterr().out
