"""A short fuzz run of the decoder, interpreted, in a process of its own; and that it would notice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from operators.literals.raw import Raw
from tests import fuzz
from tests.processes import ROOT

SECONDS = 20


def test_damaged_records_and_programs_end_in_typed_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", str(SECONDS), "1"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    refused, restored = (int(part.split()[0]) for part in done.stdout.splitlines()[-1].split(", ")[:2])
    assert refused > 500
    assert restored > 10


def test_an_error_of_another_type_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def careless(self: Raw, payload: memoryview, stream: object) -> object:
        return payload[10**6]

    monkeypatch.setattr(Raw, "source", careless)
    assert fuzz.run(60, 1).failed == 10  # it ends there: kernels may have to be compiled first
    assert "IndexError" in capsys.readouterr().out
