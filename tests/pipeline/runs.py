"""Runs of a driver over stores in memory, whose records are the bytes themselves, and what must hold of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from blake3 import blake3

from pipeline.archive import checkpoints, create_archive, load_manifest, load_snapshot
from pipeline.canonical import digest_of_json
from pipeline.commit import (
    Draft,
    adopt_plan,
    adopt_prior,
    adopt_receipt,
    commit,
    find_base,
    find_receipt,
    find_receipts,
    is_unchanged,
)
from pipeline.packs import pack_key
from pipeline.parquet import from_parquet
from pipeline.plan import Plan, Task, make_plan
from pipeline.rows import Row
from pipeline.segments import layout_of
from pipeline.snapshots import Snapshot
from pipeline.store import ObjectInfo, Store
from tests import cases
from tests.memory_store import MemoryStore

RECIPE = digest_of_json("a recipe")
OTHER_RECIPE = digest_of_json("another")
LATER = "2026-01-02T00:00:00Z"
TASK_BYTES = 6000


def source() -> MemoryStore:
    tensors: list[cases.Entry] = [("w", "BF16", [40, 100], cases.bf16(1, 4000)), ("b", "F32", [3], bytes(12))]
    return MemoryStore(
        {
            "config.json": b'{"a": 1}',
            "empty.txt": b"",
            "model.safetensors": cases.safetensors(tensors),
            "original/model.bin": cases.noise(1, 5000),
        }
    )


def plan_of(store: MemoryStore) -> Plan:
    files = store.list()

    def read(info: ObjectInfo) -> Callable[[int, int], bytes]:
        return lambda start, count: bytes(store.get_ranges(info, [(start, start + count)])[0])

    layouts = [layout_of(read(info), info.key, info.n_bytes, 4096) for info in files]
    return make_plan(files, layouts, TASK_BYTES, {})


def work(archived: Store, origin: MemoryStore, run: str, task: Task) -> Sequence[Row]:
    """What a worker does, with records that are the bytes themselves."""
    stored = find_receipt(archived, run, task)
    if stored is not None:
        return stored
    pack, rows = b"", []
    for part in task.parts:
        for row in part.rows(task.ordinal):
            data = bytes(origin.get_ranges(part.info, [(row.offset_bytes, row.offset_bytes + row.n_bytes)])[0])
            digest = blake3(data).digest()
            place: dict[str, Any] = {
                "digest": digest,
                "stored_digest": digest,
                "stored_bytes": len(data),
                "pack_offset": len(pack),
            }
            rows.append(replace(row, program="raw", **place))
            pack += data
    digest = blake3(pack).digest()
    archived.put(pack_key(digest), pack)
    return adopt_receipt(archived, run, task, [replace(row, pack=digest, pack_bytes=len(pack)) for row in rows])


def drive(archived: Store, origin: MemoryStore, recipe: str = RECIPE, time: str = "2026-01-01T00:00:00Z") -> Snapshot:
    """One run, as the driver does it."""
    create_archive(archived)
    files = origin.list()
    base = find_base(archived, "model")
    if base.snapshot is not None and is_unchanged(base, files, recipe):
        return base.snapshot
    draft = Draft("model", base.seq, recipe, tuple(files), (), "1")
    plan = adopt_plan(archived, draft.run, plan_of(origin), files)
    adopt_prior(archived, draft.run, b"prior")
    done = find_receipts(archived, draft.run, plan.tasks)
    rows = [row for task in plan.tasks for row in done.get(task.ordinal) or work(archived, origin, draft.run, task)]
    return commit(archived, draft, rows, origin.list, time)


def check(archived: MemoryStore, origin: MemoryStore) -> int:
    """Check every invariant of a store at rest, and return the number of snapshots."""
    for key, data in archived.objects.items():
        kind, _, name = key.partition("/")
        if kind == "packs":
            assert name == f"{blake3(data).hexdigest()[:2]}/{blake3(data).hexdigest()}"
        elif kind == "manifests":
            assert name == f"{blake3(data).hexdigest()}.parquet"
        elif "/receipts/" in key:
            assert all(pack_key(row.pack or b"") in archived.objects for row in from_parquet(data))
    count = 0
    for checkpoint, numbers in checkpoints(archived).items():
        assert numbers == list(range(1, len(numbers) + 1))
        for seq in numbers:
            snapshot = load_snapshot(archived, checkpoint, seq)
            assert restore(archived, snapshot) == origin.objects
            count += 1
    assert not {verb for verb, _ in origin.log} - {"list", "get_ranges"}
    return count


def restore(archived: MemoryStore, snapshot: Snapshot) -> dict[str, bytes]:
    files = {entry.key: b"" for entry in snapshot.files}
    for row in load_manifest(archived, snapshot):
        assert row.pack is not None
        assert row.pack_offset is not None
        files[row.file] += archived.objects[pack_key(row.pack)][row.pack_offset : row.pack_offset + row.n_bytes]
    return files


class Turns:
    """Lets one of several threads run at a time; which, is drawn at every call of a store."""

    def __init__(self, seed: int, count: int) -> None:
        self._random = random.Random(seed)
        self._alive = list(range(count))
        self._current = 0
        self._changed = threading.Condition()

    def pass_on(self, me: int, *, leave: bool = False) -> None:
        with self._changed:
            if leave:
                self._alive.remove(me)
            if self._alive:
                self._current = self._random.choice(self._alive)
            self._changed.notify_all()
            if not leave:
                assert self._changed.wait_for(lambda: self._current == me, timeout=30)


class SteppedStore(MemoryStore):
    """A view of shared objects whose every call waits for its turn."""

    def __init__(self, objects: dict[str, bytes], turns: Turns, me: int) -> None:
        super().__init__(objects)
        self.turns, self.me = turns, me

    def _called(self, verb: str, key: str) -> None:
        self.turns.pass_on(self.me)
        super()._called(verb, key)
