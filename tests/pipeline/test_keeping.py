"""Retention and the collection of garbage: what stays is whole, what is young stays, what nobody needs goes (T25)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from operators.errors import ArchiveError, ArchiveNotFoundError, ConflictError, DamageError, NotFoundError, StoreError
from pipeline import archive, commit, garbage
from pipeline.archive import checkpoints, load_manifest, load_snapshot, manifest_key, snapshot_key
from pipeline.condemned import condemned_lists
from pipeline.garbage import HOUR, collect
from pipeline.packs import pack_key
from pipeline.retention import Policy, decide_kept, expire, read_kept, revive
from pipeline.snapshots import inventory_digest
from tests.cases import noise
from tests.memory_store import Killed, MemoryStore
from tests.pipeline.runs import drive, restore

FLOOR_HOURS, WAIT_HOURS = 72, 24


@dataclass
class Vault(MemoryStore):
    """An archive that does something at a chosen call, and lets nobody remove what was young when it was last listed.

    What is put again in between may go: whoever put it finds out before the commit.

    Attributes
    ----------
    whole : dict of str to dict
        By the key of a snapshot that restored its source, the objects that restoring it read.
    """

    meanwhile: Callable[[], object] | None = None
    dead: bool = False
    left_calls: int = -1
    seen: dict[str, int] = field(default_factory=dict)
    whole: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def _called(self, verb: str, key: str) -> None:
        if self.dead:
            raise Killed
        super()._called(verb, key)
        action = self.meanwhile
        if action is not None:
            self.left_calls -= 1
            if self.left_calls < 0:
                self.meanwhile = None
                action()
        if verb == "dated":
            self.seen = dict(self.written)
        if verb == "delete" and key.startswith(("packs/", "manifests/", "runs/", "expired/")):
            assert self.clock - self.seen[key] >= FLOOR_HOURS * HOUR, f"{key} is young"

    @contextlib.contextmanager
    def at_call(self, number: int, action: Callable[[], object]) -> Iterator[None]:
        """Do `action`, as another process would, before call `number`."""
        self.meanwhile, self.left_calls = action, number
        try:
            yield
        finally:
            self.meanwhile, self.dead = None, False

    def die(self) -> None:
        """End the process that made this call: it makes no more."""
        self.dead = True
        raise Killed

    def pass_hours(self, hours: int) -> None:
        self.clock += hours * HOUR


def origin(*numbers: int) -> MemoryStore:
    """A source whose parts are those of others: packs are met again."""
    return MemoryStore({f"{place}.bin": noise(number, 3500) for place, number in enumerate(numbers)})


SOURCES = [origin(1, 2), origin(1, 3), origin(4, 2), origin(4, 3, 5)]
KNOWN = {inventory_digest(one.list()): one.objects for one in SOURCES}


def time_of(store: MemoryStore) -> str:
    return datetime.fromtimestamp(store.clock, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def night(store: MemoryStore, source: MemoryStore) -> None:
    drive(store, source, time=time_of(store))


def check_whole(store: Vault) -> int:
    """Check that every commit restores its source, and return their number.

    One that did so before does so again as long as all that it read then is there, unchanged.
    """
    committed = [(name, seq) for name, numbers in checkpoints(store).items() for seq in numbers]
    for name, seq in committed:
        read = store.whole.get(snapshot_key(name, seq))
        if read is None or any(store.objects.get(key) != data for key, data in read.items()):
            store.whole[snapshot_key(name, seq)] = _check_one(store, name, seq)
    return len(committed)


def _check_one(store: Vault, checkpoint: str, seq: int) -> dict[str, bytes]:
    begin = len(store.log)
    snapshot = load_snapshot(store, checkpoint, seq)
    assert restore(store, snapshot) == KNOWN[snapshot.inventory], snapshot.name
    return {key: store.objects[key] for _, key in store.log[begin:] if key in store.objects}


def needed(store: MemoryStore) -> set[str]:
    """What the commits refer to, found without the code under test."""
    keys: set[str] = set()
    for checkpoint, numbers in checkpoints(store).items():
        for seq in numbers:
            snapshot = load_snapshot(store, checkpoint, seq)
            rows = load_manifest(store, snapshot)
            keys |= {manifest_key(snapshot.manifest), *(pack_key(row.pack or b"") for row in rows)}
            keys |= {key for key in store.objects if key.startswith(f"runs/{snapshot.run}/")}
    return keys


def collectable(store: MemoryStore) -> set[str]:
    return {key for key in store.objects if key.startswith(("packs/", "manifests/", "runs/", "expired/"))}


def collect_all(store: Vault) -> None:
    store.pass_hours(FLOOR_HOURS + 1)
    for _ in range(3):
        collect(store)
        store.pass_hours(WAIT_HOURS)


@pytest.fixture(autouse=True)
def _serial(monkeypatch: pytest.MonkeyPatch) -> None:
    serialise(monkeypatch)


def serialise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests one after the other, so that calls can be counted."""
    for module in (archive, commit, garbage):
        monkeypatch.setattr(module, "each", lambda call, items: [call(item) for item in items])


# -- any history --------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Nights, losses of processes, retention and collections, in any order and into one another."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Vault()

    @initialize(number=st.integers(0, 3))
    def begin(self, number: int) -> None:
        night(self.store, SOURCES[number])

    @rule(hours=st.sampled_from([1, 24, 25, 73]))
    def wait(self, hours: int) -> None:
        self.store.pass_hours(hours)

    @rule(number=st.integers(0, 3))
    def archive(self, number: int) -> None:
        self._try(lambda: night(self.store, SOURCES[number]))

    @rule(number=st.integers(0, 3), call=st.integers(0, 40))
    def archive_killed(self, number: int, call: int) -> None:
        with self.store.at_call(call, self.store.die):
            self._try(lambda: night(self.store, SOURCES[number]))

    @rule(number=st.integers(0, 3), call=st.integers(0, 40), hours=st.sampled_from([0, 0, 23]))
    def archive_beside_a_collection(self, number: int, call: int, hours: int) -> None:
        def meanwhile() -> None:
            self.store.pass_hours(hours)
            self._try(lambda: collect(self.store))

        with self.store.at_call(call, meanwhile):
            self._try(lambda: night(self.store, SOURCES[number]))

    @rule()
    def collect(self) -> None:
        self._try(lambda: collect(self.store))

    @rule(call=st.integers(0, 60))
    def collect_killed(self, call: int) -> None:
        with self.store.at_call(call, self.store.die):
            self._try(lambda: collect(self.store))

    @rule(number=st.integers(0, 3), call=st.integers(0, 60))
    def collect_beside_a_night(self, number: int, call: int) -> None:
        with self.store.at_call(call, lambda: self._try(lambda: night(self.store, SOURCES[number]))):
            self._try(lambda: collect(self.store))

    @rule(call=st.integers(0, 60))
    def collect_beside_a_collection(self, call: int) -> None:
        with self.store.at_call(call, lambda: self._try(lambda: collect(self.store))):
            self._try(lambda: collect(self.store))

    @rule(last=st.integers(1, 2))
    def prune(self, last: int) -> None:
        for one in decide_kept(read_kept(self.store, "model"), Policy(last=last)):
            if not one.reasons:
                expire(self.store, "model", one.seq)

    @rule(pick=st.integers(0, 9))
    def drop(self, pick: int) -> None:
        numbers = checkpoints(self.store).get("model", [])
        if numbers:
            expire(self.store, "model", numbers[pick % len(numbers)])

    @rule(seq=st.integers(1, 4), call=st.integers(0, 30))
    def undo(self, seq: int, call: int) -> None:
        collecting = self.store.at_call(call, lambda: self._try(lambda: collect(self.store)))
        with collecting, contextlib.suppress(DamageError):  # its manifest was collected
            self._try(lambda: revive(self.store, "model", seq))

    @invariant()
    def every_commit_is_whole(self) -> None:
        check_whole(self.store)

    def teardown(self) -> None:
        collect_all(self.store)
        check_whole(self.store)
        assert collectable(self.store) == needed(self.store)
        assert not condemned_lists(self.store)

    def _try(self, action: Callable[[], object]) -> None:
        """Do it; it may be killed, and may refuse for the reasons that it may have."""
        with contextlib.suppress(Killed, ConflictError, NotFoundError, ArchiveNotFoundError):
            action()


HISTORIES = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def test_any_history() -> None:
    run_state_machine_as_test(Histories, settings=HISTORIES)


@pytest.mark.slow
def test_many_histories() -> None:
    run_state_machine_as_test(Histories, settings=settings(HISTORIES, max_examples=2000, derandomize=False))


def test_a_collection_that_forgets_a_root_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = garbage._commits
    monkeypatch.setattr(garbage, "_commits", lambda store: commits(store)[1:])
    with pytest.raises((AssertionError, ArchiveError, KeyError)):
        run_state_machine_as_test(Histories, settings=settings(HISTORIES, phases=[Phase.generate]))


def test_a_pass_that_fails_leaves_the_next_one_free_and_one_that_is_killed_does_not() -> None:
    def fail() -> None:
        raise StoreError("an answer", "none", "x")

    store = abandoned()
    store.log.clear()
    collect(store)
    first_removal = [verb for verb, _ in store.log].index("delete")
    for stop, error in ((fail, StoreError), (None, Killed)):
        store = abandoned()
        with store.at_call(first_removal, stop or store.die), pytest.raises(error):
            collect(store)
        assert check_whole(store) == 1
        if stop is None:
            with pytest.raises(ConflictError, match="in a day"):
                collect(store)
            store.pass_hours(WAIT_HOURS)
        assert collect(store).condemned
        store.pass_hours(WAIT_HOURS)
        assert collect(store).removed
        assert collectable(store) == needed(store)


def test_a_strange_name_below_a_run_goes_with_it() -> None:
    store = abandoned()
    strange = f"runs/{'0' * 64}/\u00fc\u2028\x85\udcff"
    store.objects[strange], store.written[strange] = b"", 0
    collect_all(store)
    assert strange not in store.objects
    assert collectable(store) == needed(store)


# -- a collection and a commit at once ----------------------------------------------------------


def abandoned() -> Vault:
    """An archive with a run that stored everything and was killed before its commit, long ago and condemned."""
    store = Vault()
    drive(store, SOURCES[0])
    drive(store, SOURCES[3])
    store.delete(snapshot_key("model", 2))  # as if it had been killed just before
    store.pass_hours(FLOOR_HOURS + 1)
    assert collect(store).condemned
    store.pass_hours(WAIT_HOURS)
    return store


def race(inner: Callable[[Vault], object], outer: Callable[[Vault], object]) -> Iterator[tuple[Vault, int]]:
    """Yield the archive after `outer` ran with `inner` before its call number 0, 1, 2 and so on."""
    for call in itertools.count():
        store = abandoned()
        outcomes: list[str] = []

        def attempt(action: Callable[[Vault], object], store: Vault = store, outcomes: list[str] = outcomes) -> None:
            try:
                action(store)
            except (ConflictError, NotFoundError) as error:
                outcomes.append(error.kind)

        with store.at_call(call, lambda attempt=attempt: attempt(inner)):  # type: ignore[misc]
            attempt(outer)
        if store.left_calls >= 0:
            return  # it made no more calls
        yield store, len(outcomes)


def resume(store: Vault) -> None:
    night(store, SOURCES[3])


@pytest.mark.parametrize(
    ("inner", "outer"), [(collect, resume), (resume, collect)], ids=["in a commit", "in a collection"]
)
def test_a_collection_meets_a_commit_that_needs_what_it_removes(
    inner: Callable[[Vault], object], outer: Callable[[Vault], object]
) -> None:
    n_committed = n_refused = 0
    for store, n_failed in race(inner, outer):
        count = check_whole(store)
        n_committed += count == 2
        n_refused += n_failed
        assert count == 2 or n_failed, "a night may be refused, but not silently lost"
        night(store, SOURCES[3])  # the next one
        assert check_whole(store) == 2
        collect_all(store)
        assert check_whole(store) == 2
        assert collectable(store) == needed(store)
    assert n_committed > 5
    assert n_refused > 0


@pytest.mark.parametrize(
    ("inner", "outer"), [(collect, resume), (resume, collect)], ids=["in a commit", "in a collection"]
)
def test_without_a_word_to_the_collection_a_commit_would_lose_its_packs(
    inner: Callable[[Vault], object], outer: Callable[[Vault], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "spare", lambda *_: None)
    broken = 0
    for store, _ in race(inner, outer):
        try:
            check_whole(store)
        except (DamageError, NotFoundError, KeyError):
            broken += 1
    assert broken
