"""A source that others write to while it is archived: all of a file is of one moment, or the file has failed (T12)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.store import ObjectInfo
from pipeline.store_local import LocalSource, LocalStore
from tests.cases import bf16, noise, safetensors
from tests.invariants import Watched
from tests.pipeline.commands import Capture, Patch, Ran, objects_of, write

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


Read = Callable[[Path, str], None]
"""Called with the folder and the key before each read of the source."""


def archived(
    folder: Path, archive: Path, mode: str, at_read: Read, capsys: Capture, monkeypatch: Patch, *options: str
) -> Ran:
    """Archive `folder`, one task for each part of a file."""
    read = LocalSource.get_ranges

    def get_ranges(self: LocalSource, info: ObjectInfo, *arguments: Any) -> Any:
        if self.url == str(folder):
            at_read(folder, info.key)
        return read(self, info, *arguments)

    monkeypatch.setattr(LocalSource, "get_ranges", get_ranges)
    ran = Ran(capsys, "archive", folder, archive, *PLAIN, "--on-changing", mode, *options)
    monkeypatch.undo()
    return ran


def once(change: str, k: int) -> tuple[Read, Iterator[int]]:
    """Return what makes the change before read number `k` of any file, and how many there were."""
    calls = itertools.count()

    def at_read(folder: Path, key: str) -> None:
        if next(calls) == k:
            replace(folder / CHANGED, LATER[change])

    return at_read, calls


@pytest.mark.parametrize("change", ["same size", *SLOW, pytest.param("deleted", marks=pytest.mark.slow)])
def test_o23_an_object_that_changed_is_read_again(
    change: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Whenever it changes: all that is there then is archived, nothing is a mix, and only what is gone is left out."""
    before = OTHERS | {CHANGED: WEIGHTS}
    after = {key: data for key, data in (before | {CHANGED: LATER[change]}).items() if data is not None}
    again = 0
    for k in itertools.count():
        folder = write(tmp_path / "source", before)
        at_read, calls = once(change, k)
        archive = tmp_path / f"archive-{k}"
        ran = archived(folder, archive, "retry", at_read, capsys, monkeypatch, "--set", "task_bytes=400")
        watched = Watched(LocalStore(str(archive)))
        snapshot = watched.check(before, after)[-1]
        assert ran.code == (3 if ran.json["failures"] else 0)
        if change != "deleted":
            assert ran.code == 0
        if LATER[change] is not None and any(warning["reason"] == "read_again" for warning in ran.json["warnings"]):
            assert {entry.key: entry.n_bytes for entry in snapshot.files} == {key: len(after[key]) for key in after}
            assert Ran(capsys, "archive", folder, archive, *PLAIN, "--set", "task_bytes=400").json["unchanged"]
            again += 1
        if next(calls) <= k:
            break
    assert k > 5
    assert again > (2 if LATER[change] is not None else -1)


def test_o23_what_did_not_change_is_not_stored_twice(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """The second attempt is a run apart, and has the tasks that the first has done."""
    folder = write(tmp_path / "source", OTHERS | {CHANGED: WEIGHTS})
    reads: list[str] = []

    def at_read(folder: Path, key: str) -> None:
        reads.append(key)
        if key == "z.bin" and (folder / CHANGED).read_bytes() == WEIGHTS and reads.count(key) == 3:  # in its task
            replace(folder / CHANGED, LATER["same size"])

    ran = archived(folder, tmp_path / "archive", "retry", at_read, capsys, monkeypatch, "--set", "task_bytes=400")
    assert ran.code == 0
    assert ran.json["warnings"] == [{"key": CHANGED, "reason": "read_again", "detail": "it changed during the run"}]
    assert ran.json["resumed_tasks"] == 2
    store = LocalStore(str(tmp_path / "archive"))
    runs = {info.key.split("/")[1] for info in store.list("runs/")}
    assert len(runs) == 2
    assert len({info.key for info in store.list("runs/") if "/prior" in info.key}) == 2
    fresh = Ran(capsys, "archive", folder, tmp_path / "fresh", *PLAIN, "--set", "task_bytes=400")
    assert fresh.json["run"] not in runs
    assert fresh.json["content"] == ran.json["content"]


@pytest.mark.parametrize("mode", ["skip", "retry"])
def test_o23_an_object_that_never_rests_fails_alone(
    mode: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    folder = write(tmp_path / "source", OTHERS | {CHANGED: WEIGHTS})
    moments = itertools.count(1)

    def at_read(folder: Path, _key: str) -> None:
        (folder / CHANGED).write_bytes(WEIGHTS + bytes(next(moments)))

    ran = archived(folder, tmp_path / "archive", mode, at_read, capsys, monkeypatch)
    assert ran.code == 3
    assert [(failure["key"], failure["reason"]) for failure in ran.json["failures"]] == [
        (CHANGED, "changed_during_read")
    ]
    assert any(warning["reason"] == "read_again" for warning in ran.json["warnings"]) == (mode == "retry")
    assert ran.json["files"] == len(OTHERS)


def test_o23_a_run_ends_without_a_commit(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """Whenever it changes, and the message names what did."""
    ended = 0
    for k in itertools.count():
        folder = write(tmp_path / "source", OTHERS | {CHANGED: WEIGHTS})
        at_read, calls = once("same size", k)
        archive = tmp_path / f"archive-{k}"
        ran = archived(folder, archive, "fail", at_read, capsys, monkeypatch, "--set", "task_bytes=400")
        if ran.code:
            ended += 1
            assert ran.code == 1
            assert ran.json["error"]["kind"] == "changed_during_read"
            assert CHANGED in ran.json["error"]["message"]
            assert not objects_of(archive, "snapshots")
            assert Ran(capsys, "archive", folder, archive, *PLAIN, "--set", "task_bytes=400").code == 0
        if next(calls) <= k:
            break
    assert ended > 5


def test_o23_a_file_that_was_read_and_is_gone_is_not_lost(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """What is archived may be the last copy: nothing is read again that would leave it out."""
    folder = write(tmp_path / "source", OTHERS | {CHANGED: WEIGHTS})
    reads: list[str] = []

    def at_read(folder: Path, key: str) -> None:
        reads.append(key)
        if key == "z.bin" and reads.count(key) == 3:
            replace(folder / CHANGED, LATER["same size"])
            replace(folder / "a.bin", None)

    ran = archived(folder, tmp_path / "archive", "retry", at_read, capsys, monkeypatch)
    assert (ran.code, [failure["key"] for failure in ran.json["failures"]]) == (3, [CHANGED])
    assert ran.json["files"] == len(OTHERS)
