"""A source that others write to while it is archived: all of a file is of one moment, or the file has failed (T12)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.store_local import LocalSource, LocalStore
from tests.cases import bf16, noise, safetensors
from tests.invariants import Watched
from tests.pipeline.test_jobs import Capture, Patch, Ran, write

PLAIN = ("--workers", "1", "--set", "synth.prior=uniform", "--set", "synth.budget=0", "--set", "retries=0")
CHANGED = "w.safetensors"
WEIGHTS = safetensors([(f"w{i}", "BF16", [200, 100], bf16(i, 20_000)) for i in range(3)])
OTHERS = {"a.bin": noise(1, 300), "z.bin": noise(2, 300)}
LATER: dict[str, bytes | None] = {
    "same size": safetensors([(f"w{i}", "BF16", [200, 100], bf16(9 + i, 20_000)) for i in range(3)]),
    "another size": WEIGHTS + b"more",
    "cut": WEIGHTS[:-1],
    "deleted": None,
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("another size", "cut")]


@pytest.mark.parametrize("change", ["same size", "deleted", *SLOW])
def test_a_source_that_changes_is_never_a_mix(change: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """G01, G02: after the k-th read of the source, for every k from none on; the next run takes what is there then."""
    folder = write(tmp_path / "source", OTHERS)
    before = OTHERS | {CHANGED: WEIGHTS}
    after = {key: data for key, data in (before | {CHANGED: LATER[change]}).items() if data is not None}
    options, read, seen = (*PLAIN, "--set", "task_bytes=60000"), LocalSource.get_ranges, set[str]()
    for k in itertools.count():
        (folder / CHANGED).write_bytes(WEIGHTS)
        calls = itertools.count()

        def get_ranges(self: LocalSource, *arguments: Any, k: int = k, calls: Iterator[int] = calls) -> Any:
            if self.url != str(folder):
                return read(self, *arguments)
            number = next(calls)
            if k == number == 0:
                replace(folder / CHANGED, LATER[change])
            found = read(self, *arguments)
            if number == k - 1:
                replace(folder / CHANGED, LATER[change])
            return found

        monkeypatch.setattr(LocalSource, "get_ranges", get_ranges)
        archive = tmp_path / f"archive-{k}"
        ran = Ran(capsys, "archive", folder, archive, *options)
        monkeypatch.undo()
        reasons = {(failure["key"], failure["reason"]) for failure in ran.json["failures"]}
        seen |= {reason for _, reason in reasons}
        assert (ran.code, {key for key, _ in reasons}) in ((0, set()), (3, {CHANGED}))
        watched = Watched(LocalStore(str(archive)))
        watched.check(before, after)
        if next(calls) < k:
            break
        assert Ran(capsys, "archive", folder, archive, *options).code == 0
        assert watched.check(before, after)[-1].totals.source_bytes == sum(map(len, after.values()))
    assert k > 5
    assert seen <= {"changed_during_read", "not_found"}
    assert seen


def replace(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
