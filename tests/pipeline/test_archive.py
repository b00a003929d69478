"""The commit protocol: what every reader sees at every instant, whoever is killed and whoever races."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from operators.errors import (
    ArchiveError,
    ChangedError,
    ConflictError,
    DamageError,
    DeniedError,
    FormatError,
    NotFoundError,
    StoreError,
)
from pipeline import archive
from pipeline import commit as commit_module
from pipeline.archive import (
    checkpoints,
    create_archive,
    find_snapshot,
    load_snapshot,
    plan_key,
    put_once,
    receipt_key,
    snapshot_key,
)
from pipeline.canonical import digest_of_json
from pipeline.commit import Draft, adopt_plan, commit, find_base, find_receipt, find_receipts, is_unchanged
from pipeline.packs import pack_key
from pipeline.parquet import to_parquet
from pipeline.plan import Finding, make_plan
from pipeline.rows import Row
from pipeline.segments import layout_of
from pipeline.snapshots import Snapshot
from pipeline.store import ObjectInfo
from tests import cases
from tests.invariants import publish_before_manifest
from tests.memory_store import FaultyStore, Killed, MemoryStore, at_every_call, kill
from tests.pipeline.runs import (
    LATER,
    OTHER_RECIPE,
    RECIPE,
    SteppedStore,
    Turns,
    check,
    drive,
    plan_of,
    restore,
    source,
    work,
)


@pytest.fixture(autouse=True)
def _serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests one after the other, so that calls can be counted."""
    for module in (archive, commit_module):
        monkeypatch.setattr(module, "each", lambda call, items: [call(item) for item in items])


# -- a run --------------------------------------------------------------------------------------


def test_a_run_commits_what_it_archived() -> None:
    archived, origin = MemoryStore(), source()
    snapshot = drive(archived, origin)
    assert check(archived, origin) == 1
    assert find_snapshot(archived) == snapshot == find_snapshot(archived, "model") == find_snapshot(archived, "model/1")
    assert (snapshot.name, snapshot.base, snapshot.failures) == ("model/1", 0, ())
    totals = snapshot.totals
    assert (totals.files, totals.tensors) == (4, 2)
    assert totals.source_bytes == sum(map(len, origin.objects.values())) == totals.stored_bytes
    assert [entry.key for entry in snapshot.files] == list(origin.objects)


def test_a_second_run_writes_nothing() -> None:
    archived, origin = MemoryStore(), source()
    first = drive(archived, origin)
    archived.log.clear()
    assert drive(archived, origin) == first
    assert {verb for verb, _ in archived.log} <= {"get", "list"}


def test_the_snapshot_is_written_last_and_packs_before_their_receipts() -> None:
    archived = MemoryStore()
    drive(archived, source())
    writes = [key for verb, key in archived.log if verb in ("put", "put_new")]
    assert writes[-1] == snapshot_key("model", 1)
    assert writes[-2].startswith("manifests/")
    kinds = [key.split("/")[-2] for key in writes if "receipts" in key or key.startswith("packs/")]
    assert all(
        first != "receipts" and second == "receipts" for first, second in zip(kinds[::2], kinds[1::2], strict=True)
    )


def test_another_recipe_or_another_source_is_a_snapshot_on_top() -> None:
    archived, origin = MemoryStore(), source()
    first, second = drive(archived, origin), drive(archived, origin, OTHER_RECIPE)
    assert (second.name, second.base, second.content) == ("model/2", 1, first.content)
    origin.objects["new.txt"] = b"new"
    third = drive(archived, origin, OTHER_RECIPE)
    assert (third.name, third.totals.files) == ("model/3", 5)
    assert restore(archived, third) == origin.objects


def test_time_and_place_do_not_change_the_content() -> None:
    snapshots = [drive(MemoryStore(), source(), time=time) for time in ("2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z")]
    assert snapshots[0].content == snapshots[1].content
    assert snapshots[0].manifest == snapshots[1].manifest
    assert snapshots[0] == replace(snapshots[1], time=snapshots[0].time)


def test_failed_files_are_named_and_the_next_run_tries_again() -> None:
    archived, origin = MemoryStore(), source()
    create_archive(archived)
    files = tuple(origin.list())
    failures = (Finding("original/model.bin", "denied", "no access"),)
    draft = Draft("model", 0, RECIPE, files, failures, "1")
    plan = plan_of(origin)
    rows = [row for task in plan.tasks for row in work(archived, origin, draft.run, task)]
    snapshot = commit(archived, draft, rows, origin.list, "")
    assert snapshot.failures == failures
    assert "original/model.bin" not in restore(archived, snapshot)
    assert not is_unchanged(find_base(archived, "model"), files, RECIPE)
    assert drive(archived, origin).name == "model/2"


# -- killed at any point ------------------------------------------------------------------------


def sweep() -> None:
    """Kill a run before and after each of its calls; check, run again, check."""
    calls = 0
    for archived, faulty in at_every_call(kill):
        origin = source()
        try:
            drive(faulty, origin)
        except Killed:
            calls += 1
        assert check(archived, origin) <= 1
        snapshot = drive(archived, origin)
        assert snapshot.seq == 1
        assert check(archived, origin) == 1
    assert calls > 30


def test_a_run_killed_at_any_call_leaves_the_old_state_or_the_new() -> None:
    sweep()


def test_the_sweep_notices_a_snapshot_before_its_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    publish_before_manifest(monkeypatch)
    with pytest.raises((AssertionError, DamageError)):
        sweep()


def test_the_sweep_notices_a_receipt_before_its_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_later(store: MemoryStore, key: str, data: bytes) -> None:
        if key.startswith("packs/"):
            late[key] = data
        else:
            real(store, key, data)

    def put_new_then_packs(store: MemoryStore, key: str, data: bytes) -> None:
        real_new(store, key, data)
        if "receipts" in key:
            kill_point(store)
            store.objects.update(late)

    late: dict[str, bytes] = {}
    real, real_new = MemoryStore.put, MemoryStore.put_new
    monkeypatch.setattr(MemoryStore, "put", put_later)
    monkeypatch.setattr(MemoryStore, "put_new", put_new_then_packs)

    def kill_point(store: MemoryStore) -> None:
        check(store, source())

    with pytest.raises(AssertionError):
        drive(MemoryStore(), source())


def test_a_resumed_run_does_no_task_twice() -> None:
    archived, origin = MemoryStore(), source()
    faulty = FaultyStore(archived, 17, after=True, fault=kill)
    with pytest.raises(Killed):
        drive(faulty, origin)
    done = {key for key in archived.objects if "receipts" in key}
    assert 0 < len(done) < len(plan_of(origin).tasks)
    archived.log.clear()
    drive(archived, origin)
    written = {key for verb, key in archived.log if verb == "put_new"}
    assert not written & done
    assert sum(verb == "put" and key.startswith("packs/") for verb, key in archived.log) == len(
        [key for key in written if "receipts" in key]
    )


# -- lost replies -------------------------------------------------------------------------------


def lose(store: MemoryStore) -> None:
    raise StoreError("an answer", "a closed connection")


def test_any_lost_reply_is_an_error_of_the_store_or_no_matter_but_never_a_conflict() -> None:
    finished = 0
    for archived, faulty in at_every_call(lose):
        origin = source()
        try:
            drive(faulty, origin)
            finished += 1
        except StoreError as error:
            assert type(error) is StoreError  # noqa: PT017 -- a lost reply is not taken for another outcome
        check(archived, origin)
        assert drive(archived, origin).seq == 1
        assert check(archived, origin) == 1
    assert finished > 15  # every create-only put settles itself


class Puts:
    """A store whose create-only puts follow a script."""

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.stored: bytes | None = None

    def put_new(self, key: str, data: bytes) -> None:
        step = self.script.pop(0)
        if step in ("ok", "lost"):
            self.stored = data
        if step == "denied":
            raise DeniedError("access", "none", key)
        if step != "ok":
            raise StoreError("an answer", "none", key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if self.script and self.script[0] == "deaf":
            raise StoreError("an answer", "none", key)
        if self.stored is None:
            raise NotFoundError("an object", "none", key)
        return self.stored


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (("ok",), None),
        (("lost",), None),  # stored, though it looked like a failure
        (("failed", "ok"), None),  # certainly not stored: sent again
        (("failed", "failed", "lost"), None),
        (("failed", "failed", "failed"), StoreError),  # certainly not stored, for good
        (("lost", "deaf"), StoreError),  # unknown
        (("denied",), DeniedError),
    ],
)
def test_the_outcome_of_a_create_only_put(script: tuple[str, ...], expected: type[ArchiveError] | None) -> None:
    store: Any = Puts(*script)
    if expected is None:
        assert put_once(store, "key", b"data") == b"data"
    else:
        with pytest.raises(expected) as caught:
            put_once(store, "key", b"data")
        assert type(caught.value) is expected


def test_an_unknown_outcome_says_so() -> None:
    store: Any = Puts("lost", "deaf")
    with pytest.raises(StoreError, match="to know whether the object is stored"):
        put_once(store, "key", b"data")


# -- two writers --------------------------------------------------------------------------------


def test_a_twin_that_runs_at_any_point_changes_nothing() -> None:
    for archived, faulty in at_every_call(lambda store: drive(store, source(), time="2027-01-01T00:00:00Z")):
        origin = source()
        snapshot = drive(faulty, origin)
        assert snapshot.seq == 1
        assert check(archived, origin) == 1
        assert find_snapshot(archived) == snapshot


def test_another_run_that_commits_first_is_a_conflict_and_the_rerun_goes_on_top() -> None:
    conflicts = 0
    for archived, faulty in at_every_call(lambda store: drive(store, source(), OTHER_RECIPE)):
        origin = source()
        try:
            drive(faulty, origin)
        except ConflictError as error:
            assert error.exit_code == 11  # noqa: PT017 -- some points conflict, others do not
            conflicts += 1
            assert find_snapshot(archived).recipe == OTHER_RECIPE
            assert drive(archived, origin).name == "model/2"
        assert check(archived, origin) in (1, 2)
        assert {load_snapshot(archived, "model", seq).recipe for seq in checkpoints(archived)["model"]} >= {RECIPE}
    assert conflicts > 20


def race(store: SteppedStore, recipe: str, outcomes: list[Snapshot | ConflictError]) -> None:
    """One of several drivers: waits for its first turn, and gives way when it is done."""
    store.turns.pass_on(store.me)
    try:
        outcomes.append(drive(store, source(), recipe, f"2026-01-01T00:00:0{store.me}Z"))
    except ConflictError as error:
        outcomes.append(error)
    finally:
        store.turns.pass_on(store.me, leave=True)


@pytest.mark.parametrize("recipes", [(RECIPE, RECIPE), (RECIPE, OTHER_RECIPE), (RECIPE, OTHER_RECIPE, RECIPE)])
def test_racing_drivers_leave_whole_snapshots(recipes: tuple[str, ...]) -> None:
    for seed in range(25):
        objects: dict[str, bytes] = {}
        turns = Turns(seed, len(recipes))
        outcomes: list[Snapshot | ConflictError] = []
        threads = [
            threading.Thread(target=race, args=(SteppedStore(objects, turns, me), recipe, outcomes))
            for me, recipe in enumerate(recipes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == len(recipes)
        archived = MemoryStore(objects)
        count = check(archived, source())
        committed = [load_snapshot(archived, "model", seq) for seq in range(1, count + 1)]
        assert {outcome for outcome in outcomes if isinstance(outcome, Snapshot)} == set(committed)
        assert len(committed) >= len(set(recipes)) - sum(isinstance(found, ConflictError) for found in outcomes)


# -- a source that changes ----------------------------------------------------------------------


def test_a_file_that_changed_after_it_was_read_is_not_committed() -> None:
    archived, origin = MemoryStore(), source()
    listing = origin.list

    def changed() -> list[ObjectInfo]:
        return [replace(info, etag="other") if info.key == "config.json" else info for info in listing()]

    create_archive(archived)
    draft = Draft("model", 0, RECIPE, tuple(listing()), (), "1")
    rows = [row for task in plan_of(origin).tasks for row in work(archived, origin, draft.run, task)]
    with pytest.raises(ChangedError, match=r"config\.json"):
        commit(archived, draft, rows, changed, "")
    assert not checkpoints(archived)
    assert commit(archived, draft, rows, lambda: listing()[1:], "").seq == 1  # gone, but read whole before


def test_a_run_on_a_changed_source_is_another_run() -> None:
    origin = source()
    before = Draft("model", 0, RECIPE, tuple(origin.list()), (), "1").run
    origin.objects["config.json"] += b" "
    assert Draft("model", 0, RECIPE, tuple(origin.list()), (), "1").run != before
    assert Draft("model", 1, RECIPE, tuple(source().list()), (), "1").run != before
    assert Draft("other", 0, RECIPE, tuple(source().list()), (), "1").run != before
    assert Draft("model", 0, OTHER_RECIPE, tuple(source().list()), (), "1").run != before


# -- what a commit refuses ----------------------------------------------------------------------


@pytest.fixture
def ready() -> tuple[MemoryStore, Draft, list[Row]]:
    archived, origin = MemoryStore(), source()
    draft = Draft("model", 0, RECIPE, tuple(origin.list()), (), "1")
    return archived, draft, [row for task in plan_of(origin).tasks for row in work(archived, origin, draft.run, task)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows[:-1],
        lambda rows: rows[1:],
        lambda rows: [*rows, rows[0]],
        lambda rows: [replace(rows[0], n_bytes=rows[0].n_bytes - 1), *rows[1:]],
        lambda rows: [replace(rows[0], pack=None), *rows[1:]],
        lambda rows: [replace(rows[0], digest=None), *rows[1:]],
        lambda rows: [replace(row, pack_bytes=(row.pack_bytes or 0) + place) for place, row in enumerate(rows)],
    ],
)
def test_rows_that_do_not_tile_are_not_committed(
    ready: tuple[MemoryStore, Draft, list[Row]], spoil: Callable[[list[Row]], list[Row]]
) -> None:
    archived, draft, rows = ready
    with pytest.raises(FormatError):
        commit(archived, draft, spoil(rows), lambda: draft.inventory, "")
    assert not checkpoints(archived)


@pytest.mark.parametrize("change", [lambda _: None, lambda data: data[:-1]])
def test_a_pack_that_is_gone_or_short_is_not_committed(
    ready: tuple[MemoryStore, Draft, list[Row]], change: Callable[[bytes], bytes | None]
) -> None:
    archived, draft, rows = ready
    key = pack_key(rows[-1].pack or b"")
    data = change(archived.objects.pop(key))
    if data is not None:
        archived.objects[key] = data
    with pytest.raises(NotFoundError, match="packs/"):
        commit(archived, draft, rows, lambda: draft.inventory, "")
    assert not checkpoints(archived)


def test_a_manifest_that_reads_back_otherwise_is_not_committed(
    ready: tuple[MemoryStore, Draft, list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    archived, draft, rows = ready
    monkeypatch.setattr(MemoryStore, "get", lambda *_, **__: b"other bytes")
    with pytest.raises(DamageError):
        commit(archived, draft, rows, lambda: draft.inventory, "")
    monkeypatch.undo()
    assert not checkpoints(archived)


def test_a_receipt_of_other_segments_is_refused() -> None:
    archived, origin = MemoryStore(), source()
    run, tasks = digest_of_json("run"), plan_of(origin).tasks
    work(archived, origin, run, tasks[0])
    archived.objects[receipt_key(run, tasks[1].id)] = archived.objects[receipt_key(run, tasks[0].id)]
    with pytest.raises(FormatError, match="segments of this task"):
        find_receipt(archived, run, tasks[1])


@pytest.mark.parametrize("kind", ["plan", "receipt"])
def test_damaged_evidence_of_a_run_says_what_to_do(kind: str) -> None:
    archived, origin = MemoryStore(), source()
    with pytest.raises(Killed):
        drive(FaultyStore(archived, 17, after=True, fault=kill), origin)
    key = next(key for key in archived.objects if kind in key)
    archived.objects[key] = archived.objects[key][:-9]
    with pytest.raises(FormatError, match=f"{key}.*remove it and run again"):
        drive(archived, origin)
    del archived.objects[key]
    assert drive(archived, origin).seq == 1
    assert check(archived, origin) == 1


def test_an_adopted_plan_is_the_stored_one_and_names_what_it_leaves_out() -> None:
    archived, origin = MemoryStore(), source()
    files, ours = origin.list(), plan_of(origin)
    others = make_plan(files[:3], [layout_of(lambda *_: b"", info.key, info.n_bytes) for info in files[:3]], 10_000, {})
    archived.objects[plan_key("run")] = to_parquet(others.rows())
    adopted = adopt_plan(archived, "run", ours, files)
    assert adopted.tasks == others.tasks
    assert [finding.key for finding in adopted.failures] == ["original/model.bin"]
    assert adopted.files == tuple(files[:3])
    assert adopt_plan(MemoryStore(), "run", ours, files) is ours


def test_receipts_are_found_under_another_plan() -> None:
    archived, origin = MemoryStore(), source()
    plan = plan_of(origin)
    moved = replace(plan.tasks[0], ordinal=7)
    rows = work(archived, origin, "run", plan.tasks[0])
    assert find_receipt(archived, "run", moved) == [replace(row, task=7) for row in rows]
    assert find_receipt(archived, "run", plan.tasks[1]) is None
    assert set(find_receipts(archived, "run", [plan.tasks[1], moved])) == {7}
    changed = replace(moved, parts=(replace(moved.parts[0], info=replace(moved.parts[0].info, etag="new")),))
    assert find_receipt(archived, "run", changed) is None


# -- any history --------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """A source that changes, runs that are killed or overtaken: each snapshot is the source of its run."""

    def __init__(self) -> None:
        super().__init__()
        self.archived, self.origin = MemoryStore(), source()
        self.expected: dict[int, dict[str, bytes]] = {}

    def committed(self) -> None:
        for seq in checkpoints(self.archived).get("model", []):
            self.expected.setdefault(seq, dict(self.origin.objects))

    @rule(key=st.sampled_from(["config.json", "new.txt", "model.safetensors"]), seed=st.integers(0, 2))
    def change(self, key: str, seed: int) -> None:
        self.origin.objects[key] = cases.noise(seed, 3000 * seed)

    @rule(key=st.sampled_from(["config.json", "new.txt", "empty.txt"]))
    def remove(self, key: str) -> None:
        self.origin.objects.pop(key, None)

    @rule(recipe=st.sampled_from([RECIPE, OTHER_RECIPE]))
    def run(self, recipe: str) -> None:
        snapshot = drive(self.archived, self.origin, recipe)
        self.committed()
        assert self.expected[snapshot.seq] == self.origin.objects
        assert snapshot.recipe == recipe

    @rule(call=st.integers(0, 40), after=st.booleans())
    def killed(self, call: int, after: bool) -> None:
        faulty = FaultyStore(self.archived, call, after=after, fault=kill)
        with contextlib.suppress(Killed):
            drive(faulty, self.origin)
        self.committed()

    @rule(call=st.integers(0, 40), recipe=st.sampled_from([RECIPE, OTHER_RECIPE]))
    def overtaken(self, call: int, recipe: str) -> None:
        other = FaultyStore(
            self.archived, call, after=True, fault=lambda store: drive(store, self.origin, recipe, LATER)
        )
        with contextlib.suppress(ConflictError):
            drive(other, self.origin)
        self.committed()

    @invariant()
    def every_snapshot_is_whole(self) -> None:
        for seq, objects in self.expected.items():
            assert restore(self.archived, load_snapshot(self.archived, "model", seq)) == objects
        assert sorted(self.expected) == checkpoints(self.archived).get("model", [])


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=12, stateful_step_count=10)
