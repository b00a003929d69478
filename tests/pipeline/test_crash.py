"""The real driver, killed at every call of a store and of the file system; each time the next run finishes the work.

T5, and the mutations that show that the check can fail. What is left behind is checked whole by `tests.invariants`.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from operators.errors import DamageError, NotFoundError, StoreError
from operators.program import Literal, Node
from operators.run import encode
from pipeline import archive, commit, encoder, planning, sampling, store_local, tasks
from pipeline.cli import main
from pipeline.executors import SerialExecutor
from pipeline.store import Store, Whole
from pipeline.store_local import LocalStore
from tests import cases
from tests.invariants import Watched, publish_before_manifest
from tests.memory_store import FaultyStore, Killed, MemoryStore, at_every_call, bytes_of, kill, reach
from tests.pipeline.commands import Capture, Patch, Ran

SETTINGS = ("tasks_in_flight=1", "task_bytes=6000", "retries=0", "synth.prior=uniform", "synth.budget=0")
PLAIN = ("--workers", "1", *(word for setting in SETTINGS for word in ("--set", setting)))
"""One call of a store after the other, and hardly a search."""


def source() -> MemoryStore:
    return MemoryStore(
        {
            "empty.txt": b"",
            "model.safetensors": cases.safetensors([("w", "BF16", [40, 60], cases.bf16(1, 2400))]),
            "original/model.bin": cases.noise(1, 5000),
        }
    )


class Nights:
    """Runs over one source and one archive, each under a URL of its own."""

    def __init__(self, patch: Patch, origin: MemoryStore) -> None:
        self.origin = origin
        self.stores: dict[str, Any] = {"test://source": origin}
        reach(patch, self.stores)
        patch.setattr(archive, "REQUESTS", 1)
        patch.setattr(planning, "LAYOUT_REQUESTS", 1)
        patch.setattr(sampling, "READERS", 1)

    def run(self, store: Any, *options: str) -> int:
        """Archive into `store`; return the exit code. The source is only ever read."""
        self.stores["test://archive"] = store
        code = main(["archive", "test://source", "test://archive", *PLAIN, *options, "-q"])
        assert {verb for verb, _ in self.origin.log} <= {"list", "get_ranges"}
        return code


@pytest.fixture
def nights(monkeypatch: Patch) -> Nights:
    return Nights(monkeypatch, source())


def undisturbed(nights: Nights) -> str:
    store = MemoryStore()
    assert nights.run(store) == 0
    return Watched(store).check(nights.origin.objects)[0].content


def sweep(nights: Nights, make: Callable[[], Store] = MemoryStore) -> int:
    """Kill a run before each of its calls, and after it; return how many there are."""
    content = undisturbed(nights)
    for turn in itertools.count():
        call, after, store = turn // 2, turn % 2 == 1, make()
        faulty, watched = FaultyStore(store, call, after=after, fault=kill), Watched(store)
        try:
            nights.run(faulty)
        except Killed:
            assert len(watched.check(nights.origin.objects)) <= 1
            assert nights.run(store) == 0
        snapshots = watched.check(nights.origin.objects)
        assert [(snapshot.seq, snapshot.content) for snapshot in snapshots] == [(1, content)]
        if not faulty.reached and after:
            return call
    raise AssertionError


def test_a_run_killed_at_any_call_of_a_store_in_memory(nights: Nights) -> None:
    assert sweep(nights) > 15


def test_a_run_killed_at_any_call_of_a_local_store(nights: Nights, tmp_path: Path) -> None:
    names = itertools.count()
    assert sweep(nights, lambda: LocalStore(str(tmp_path / str(next(names))))) > 15


# -- killed inside the calls of a local store ----------------------------------------------------


class FaultyOs:
    """The module ``os`` as a store sees it, whose process dies at change number `call` of the file system."""

    CHANGES = ("write", "pwrite", "fsync", "link", "rename", "unlink", "mkdir")

    def __init__(self, call: int) -> None:
        self._left = call

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(real) if name in self.CHANGES else real

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise Killed
            return real(*args, **named)

        return called

    @property
    def reached(self) -> bool:
        return self._left < 0


def kill_at_changes(nights: Nights, folder: Path, step: int, monkeypatch: Patch) -> int:
    """Kill a run at every `step`-th change of the file system; return how many were tried."""
    content = undisturbed(nights)
    for turn in itertools.count():
        place = str(folder / str(turn))
        faulty = FaultyOs(turn * step)
        with monkeypatch.context() as patch:
            patch.setattr(store_local, "os", faulty)
            try:
                nights.run(LocalStore(place))
            except Killed:
                pass
            else:
                assert not faulty.reached
        watched = Watched(LocalStore(place))
        assert len(watched.check(nights.origin.objects)) <= 1
        assert nights.run(LocalStore(place)) == 0
        assert [found.content for found in watched.check(nights.origin.objects)] == [content]
        if not faulty.reached:
            return turn
    raise AssertionError


def test_a_run_killed_inside_some_calls_of_a_local_store(nights: Nights, tmp_path: Path, monkeypatch: Patch) -> None:
    assert kill_at_changes(nights, tmp_path, 5, monkeypatch) > 8


@pytest.mark.slow
def test_a_run_killed_inside_any_call_of_a_local_store(nights: Nights, tmp_path: Path, monkeypatch: Patch) -> None:
    assert kill_at_changes(nights, tmp_path, 1, monkeypatch) > 40


# -- damaged while nobody looked ----------------------------------------------------------------


def test_damage_of_what_a_killed_run_left_is_told_or_does_no_harm(nights: Nights, capsys: Capture) -> None:
    """T3: any bit of a plan, prior or receipt. The next run is whole, or says which object to remove, and is then."""
    left = MemoryStore()
    with pytest.raises(Killed):
        nights.run(FaultyStore(left, undisturbed_calls(nights) - 4, after=True, fault=kill))
    draw, refused = random.Random(1), 0
    for key in [key for key in left.objects if key.startswith("runs/")]:
        for _ in range(12):
            store, data = MemoryStore(dict(left.objects)), bytearray(left.objects[key])
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            store.objects[key] = bytes(data)
            nights.stores["test://archive"] = store
            ran = Ran(capsys, "archive", "test://source", "test://archive", *PLAIN)
            if ran.code == 4:
                refused += 1
                assert key in ran.json["error"]["message"]
                assert ran.json["error"]["next_step"] == "remove it and run again"
                del store.objects[key]
                assert nights.run(store) == 0
            assert ran.code in (0, 4), ran.err
            assert len(Watched(store).check(nights.origin.objects)) == 1
    assert {key.split("/")[2] for key in left.objects if key.startswith("runs/")} == {"plan", "prior", "receipts"}
    assert refused > 20


def undisturbed_calls(nights: Nights) -> int:
    """How many calls a run makes."""
    faulty = FaultyStore(MemoryStore(), 1 << 30, after=False, fault=kill)
    assert nights.run(faulty) == 0
    return (1 << 30) - faulty._left


# -- the check can fail -------------------------------------------------------------------------

NOTICED = (AssertionError, NotFoundError, DamageError, KeyError)


def test_packs_after_the_snapshot_are_noticed(nights: Nights) -> None:
    class PacksLate(MemoryStore):
        """Tells of packs as stored that come only after the snapshot."""

        late: ClassVar[dict[str, bytes]] = {}

        def put(self, key: str, data: Whole) -> None:
            if key.startswith("packs/"):
                self.late[key] = bytes_of(data)
            else:
                super().put(key, data)

        def put_new(self, key: str, data: bytes) -> None:
            super().put_new(key, data)
            if key.startswith("snapshots/"):
                self.objects.update(self.late)

        def head(self, key: str) -> Any:
            return MemoryStore(self.objects | self.late).head(key)

    assert nights.run(PacksLate()) == 0  # undisturbed nobody would notice
    with pytest.raises(NOTICED):
        sweep(nights, PacksLate)


def test_a_manifest_after_the_snapshot_is_noticed(nights: Nights, monkeypatch: Patch) -> None:
    publish_before_manifest(monkeypatch)
    assert nights.run(MemoryStore()) == 0
    with pytest.raises(NOTICED):
        sweep(nights)


class Garbling(MemoryStore):
    """Stores another manifest than it was given, and says that all is well."""

    def put(self, key: str, data: Whole) -> None:
        super().put(key, data)
        if key.startswith("manifests/"):
            self.objects[key] = self.objects[key][:-1]


def test_what_a_store_garbles_is_read_back_before_the_commit(nights: Nights, monkeypatch: Patch) -> None:
    store = Garbling()
    assert nights.run(store) == 4
    assert not any(key.startswith("snapshots/") for key in store.objects)
    monkeypatch.setattr(
        commit, "_put_manifest", lambda store, snapshot, data: store.put(archive.manifest_key(snapshot.manifest), data)
    )
    store = Garbling()
    assert nights.run(store) == 0
    with pytest.raises(NOTICED):  # without the read-back
        Watched(store).check(nights.origin.objects)


def survived(nights: Nights) -> int:
    """Lose the reply of each call in turn; return how many runs were none the worse. The next run always is whole."""
    count = 0
    for store, faulty in at_every_call(lose):
        count += nights.run(faulty) == 0
        watched = Watched(store)
        watched.check(nights.origin.objects)
        assert nights.run(store) == 0
        snapshots = watched.check(nights.origin.objects)
        assert len(snapshots) == 1 + bool(snapshots[0].failures)  # a receipt that is lost for good fails its files
        assert not snapshots[-1].failures
    return count


def lose(_store: object) -> None:
    raise StoreError("an answer", "a closed connection")


def test_lost_replies_of_create_only_puts_are_settled_by_reading(nights: Nights, monkeypatch: Patch) -> None:
    assert survived(nights) >= 12

    def put_blindly(store: Store, key: str, data: bytes, _max_bytes: int = 0) -> bytes:
        store.put_new(key, data)
        return data

    for module in (archive, commit):
        monkeypatch.setattr(module, "put_once", put_blindly)
    with pytest.raises(AssertionError):  # without the read-back the next run stops at what it has stored itself
        survived(nights)


# -- any history --------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """A source that changes, runs of the real driver that are killed or lose replies, against the states it had."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.nights = Nights(self.patch, source())
        self.store = MemoryStore()
        self.watched = Watched(self.store)
        self.states: list[dict[str, bytes]] = [dict(self.nights.origin.objects)]
        self.committed = 0

    def teardown(self) -> None:
        self.patch.undo()

    @rule(key=st.sampled_from(["new.txt", "original/model.bin"]), seed=st.integers(0, 2))
    def change(self, key: str, seed: int) -> None:
        self.nights.origin.objects[key] = cases.noise(seed, 3000 * seed)
        self.states.append(dict(self.nights.origin.objects))

    @rule(key=st.sampled_from(["new.txt", "empty.txt"]))
    def remove(self, key: str) -> None:
        self.nights.origin.objects.pop(key, None)
        self.states.append(dict(self.nights.origin.objects))

    @rule()
    def archive(self) -> None:
        assert self.nights.run(self.store) == 0
        newest = self.watched.check(*self.states)[-1]
        assert Watched(self.store).check(*self.states)[-1] == newest
        assert newest.totals.source_bytes == sum(map(len, self.nights.origin.objects.values()))
        self.committed = newest.seq

    @rule(call=st.integers(0, 30), dies=st.booleans(), after=st.booleans())
    def disturbed(self, call: int, dies: bool, after: bool) -> None:
        faulty = FaultyStore(self.store, call, after=after, fault=kill if dies else lose)
        try:
            self.nights.run(faulty)
        except Killed:
            assert dies
        numbers = [snapshot.seq for snapshot in self.watched.check(*self.states)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) in (self.committed, self.committed + 1)
        self.committed = len(numbers)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=15, stateful_step_count=8, suppress_health_check=[HealthCheck.too_slow], deadline=None
)


# -- a task that keeps failing, and one that comes late ---------------------------------------


def test_a_task_that_keeps_failing_fails_its_files_alone(nights: Nights, monkeypatch: Patch, capsys: Capture) -> None:
    """Attempts are limited and counted; the rest is committed, and the next night has it all."""
    read, attempts = tasks.read_segments, []

    def refuse(source: Any, part: Any, room: Any) -> Any:
        if part.info.key == "original/model.bin":
            attempts.append(part)
            raise StoreError("an answer", "none", part.info.key)
        return read(source, part, room)

    monkeypatch.setattr(tasks, "read_segments", refuse)
    store = nights.stores["test://archive"] = MemoryStore()
    ran = Ran(capsys, "archive", "test://source", "test://archive", *PLAIN, "--set", "retries=2")
    assert (ran.code, len(attempts), ran.json["retries"]) == (3, 3, 2)
    assert [(item["key"], item["reason"]) for item in ran.json["failures"]] == [("original/model.bin", "store")]
    watched = Watched(store)
    assert watched.check(nights.origin.objects)[0].totals.files == 2
    monkeypatch.setattr(tasks, "read_segments", read)
    assert nights.run(store) == 0
    assert watched.check(nights.origin.objects)[-1].totals.files == 3


@pytest.mark.parametrize("same_bytes", [True, False])
@pytest.mark.parametrize("kept", [True, False], ids=["receipts there", "receipts gone"])
def test_a_late_duplicate_of_a_task_does_no_harm(
    nights: Nights, monkeypatch: Patch, same_bytes: bool, kept: bool
) -> None:
    """Y04: a worker that outlives its node ends after the commit, perhaps with a library that writes other bytes."""
    handed: list[tuple[Any, Any]] = []
    run = SerialExecutor.run

    def noted(self: SerialExecutor, job: Any, items: Any) -> Any:
        handed.extend((job, item) for item in items)
        return run(self, job, items)

    monkeypatch.setattr(SerialExecutor, "run", noted)
    store = MemoryStore()
    assert nights.run(store) == 0
    watched = Watched(store)
    before = watched.check(nights.origin.objects)
    if not kept:
        for key in [key for key in store.objects if "/receipts/" in key]:
            del store.objects[key]
        watched = Watched(store)
    if not same_bytes:
        monkeypatch.setattr(encoder, "encode", lambda _, *rest, **named: encode(Node(Literal("raw")), *rest, **named))
    assert len(handed) > 1
    for job, item in handed:
        assert job.open()(item).resumed is kept
    assert watched.check(nights.origin.objects) == before
    assert nights.run(store) == 0
    assert watched.check(nights.origin.objects) == before


# -- what a command says ------------------------------------------------------------------------


def test_the_source_is_never_written_by_any_command(nights: Nights, tmp_path: Path) -> None:
    """T11: the store of the source sees reads alone, and that of the archive only while it is written to."""
    store = MemoryStore()
    nights.run(store)
    store.log.clear()
    for command in (["verify"], ["list"], ["info"], ["cat", "--file", "empty.txt"], ["restore", str(tmp_path / "out")]):
        assert main([command[0], "test://archive", *command[1:], "-q", "--workers", "1"]) == 0
    assert {verb for verb, _ in nights.origin.log} == {"list", "get_ranges"}
    assert {verb for verb, _ in store.log} == {"list", "get", "get_ranges", "head"}
