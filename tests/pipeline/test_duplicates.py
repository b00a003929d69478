"""What is not stored again: unchanged files, and equal segments of files, tasks and snapshots."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import duplicates, planning, sampling
from pipeline.archive import find_snapshot, load_manifest, plan_key, prior_key
from pipeline.cli import main
from pipeline.duplicates import GATHERED_TASKS, Earlier, gathered
from pipeline.parquet import from_parquet, to_parquet
from pipeline.plan import Plan, adopt, make_plan
from pipeline.rooms import Room
from pipeline.rows import Row
from pipeline.sampling import region_of
from pipeline.segments import Layout, Segment
from pipeline.store import Buffers, ObjectInfo
from pipeline.store_base import coalesce
from tests.cases import bf16, noise, safetensors
from tests.invariants import Watched
from tests.memory_store import FaultyStore, Killed, MemoryStore, kill, reach
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, objects_of, write

PLAIN = ("--workers", "1", "--set", "synth.prior=uniform", "--set", "synth.budget=0", "--set", "task_bytes=64KiB")
SMALL = {"REQUEST_WORTH_BYTES": 40_000, "STRETCH_BYTES": 30_000, "DENSE_STRETCH_BYTES": 60_000, "DENSE_BYTES": 60_000}
"""The settings of the planning pass, for files of some kilobytes."""
TENSOR_BYTES = 40_000


@dataclass
class Counting(MemoryStore):
    """Counts the requests and bytes that a server would answer, by key."""

    requests: Counter[str] = field(default_factory=Counter)
    n_bytes: Counter[str] = field(default_factory=Counter)

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[tuple[int, int]], room: Room | None = None) -> Buffers:
        for start, stop, _ in coalesce(ranges):
            self.requests[info.key] += 1
            self.n_bytes[info.key] += stop - start
        return super().get_ranges(info, ranges, room)


class Bench:
    """A source and an archive in memory, and commands over them."""

    def __init__(self, patch: Patch, capsys: Capture) -> None:
        self.source = Counting()
        self.archive = MemoryStore()
        self._capsys = capsys
        reach(patch, {"test://source": self.source, "test://archive": self.archive})

    def archived(self, *options: str) -> dict[str, Any]:
        """Archive; the summary. What is there afterwards is whole and restores the source."""
        self.source.requests.clear()
        self.source.n_bytes.clear()
        ran = Ran(self._capsys, "archive", "test://source", "test://archive", *PLAIN, *options)
        assert (ran.code, ran.json["failures"]) == (0, [])
        return ran.json

    @property
    def packs(self) -> dict[str, bytes]:
        return {key: data for key, data in self.archive.objects.items() if key.startswith("packs/")}

    @property
    def pack_bytes(self) -> int:
        return sum(map(len, self.packs.values()))


@pytest.fixture
def small(monkeypatch: Patch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(sampling, name, value)
    monkeypatch.setattr(duplicates, "MOVED_BYTES", 8_000)


@pytest.fixture
def bench(monkeypatch: Patch, capsys: Capture, small: None) -> Bench:
    return Bench(monkeypatch, capsys)


def file_of(*contents: bytes) -> bytes:
    return safetensors([(f"t{i}", "U8", [len(data)], data) for i, data in enumerate(contents)])


# -- equal segments of one plan -----------------------------------------------------------------


def test_e13_equal_files_larger_than_a_task_are_stored_once(bench: Bench) -> None:
    data = file_of(*(noise(i, TENSOR_BYTES) for i in range(8)))
    bench.source.objects = {"model.safetensors": data}
    bench.archived()
    once = bench.pack_bytes
    bench.source.objects = {"model.safetensors": data, "original/copy.safetensors": data, "other.bin": noise(99, 9)}
    bench.archive.objects.clear()
    summary = bench.archived()
    assert summary["deduplicated_bytes"] == len(data)
    assert len(bench.packs) > 4
    assert once < bench.pack_bytes < once + TENSOR_BYTES // 10  # rows of the copy in the indices of packs
    Watched(bench.archive).check(bench.source.objects)


def test_a_sample_is_no_proof(bench: Bench) -> None:
    """Equal size and sample, other bytes elsewhere: in one source, and over that of the night before."""
    first = [noise(i, TENSOR_BYTES) for i in range(6)]
    start, stop = region_of(TENSOR_BYTES)
    assert stop - start < TENSOR_BYTES // 2
    second = []
    for data in first:
        other = bytearray(data)
        other[start - 1] ^= 1
        second.append(bytes(other))
    a, b = file_of(*first), file_of(*second)
    bench.source.objects = {"a.safetensors": a, "b.safetensors": b}
    assert bench.archived()["deduplicated_bytes"] < 1000  # the header
    [snapshot] = Watched(bench.archive).check(bench.source.objects)
    rows = load_manifest(bench.archive, snapshot)
    alike = Counter(row.fingerprint for row in rows if row.tensor)
    assert set(alike.values()) == {2}
    planned = from_parquet(bench.archive.objects[plan_key(snapshot.run)])
    tasks = {row.task for row in planned if row.file == "b.safetensors"}
    assert len(tasks) > 1  # each beside its likeness
    assert tasks <= {row.task for row in planned if row.file == "a.safetensors"}
    night = {"a.safetensors": b, "b.safetensors": file_of(*reversed(first))}
    before = dict(bench.source.objects)
    bench.source.objects = night
    assert bench.archived()["deduplicated_bytes"] > 11 * TENSOR_BYTES
    Watched(bench.archive).check(before, night)


POOL = [noise(i, n_bytes) for i, n_bytes in enumerate([40_000, 40_000, 40_000, 20_000, 9_000, 5_000])]
POOL += [bytes([*POOL[0][:30_000], *POOL[1][30_000:]]), bytes(40_000), bf16(1, 20_000), b"scalar"]
FILES = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=9), min_size=1
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES, FILES, st.sampled_from([30_000, 100_000, 400_000]))
def test_any_files_come_back_and_take_no_more_than_they_would(
    small: None, first: dict[str, list[int]], second: dict[str, list[int]], task_bytes: int
) -> None:
    nights = [{key: file_of(*(POOL[i] for i in picks)) for key, picks in night.items()} for night in (first, second)]
    sizes = []
    for sharing in (False, True):
        store, source = MemoryStore(), MemoryStore()
        with pytest.MonkeyPatch.context() as patch:
            reach(patch, {"test://source": source, "test://archive": store})
            if not sharing:
                patch.setattr(planning, "gathered", lambda plan, _: plan)
                patch.setattr(Earlier, "of", lambda *_: Earlier())
            for files in nights:
                source.objects = files
                options = [*PLAIN[:-1], f"task_bytes={task_bytes}", "-q"]
                assert main(["archive", "test://source", "test://archive", *options]) == 0
            assert len(Watched(store).check(*nights)) in (1, 2)
            assert main(["verify", "test://archive", "--workers", "1", "-q"]) == 0
        records = {(row.pack, row.pack_offset): row.stored_bytes or 0 for row in from_manifests(store)}
        sizes.append(sum(records.values()))
    assert sizes[1] <= sizes[0]


def from_manifests(store: MemoryStore) -> list[Row]:
    return [
        row for key, data in store.objects.items() if key.startswith("manifests/") for row in from_parquet(data, key)
    ]


def plan_of(files: dict[str, list[tuple[int, int]]], task_bytes: int) -> Plan:
    """Return the plan of files that are given as sizes and likenesses of their segments."""
    infos, layouts, fingerprints = [], [], {}
    for key, found in sorted(files.items()):
        segments, offset = [], 0
        for n_bytes, _ in found:
            segments.append(Segment(offset, n_bytes, None, None, None, 0, 1, n_bytes))
            offset += n_bytes
        infos.append(ObjectInfo(key, offset, "tag"))
        layouts.append(Layout("opaque", None, "", tuple(segments)))
        fingerprints[key] = tuple(bytes([size % 251, like, 0, 0, 0, 0, 0, 0]) for size, like in found)
    return make_plan(infos, layouts, task_bytes, fingerprints)


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.lists(st.tuples(st.sampled_from([10, 70, 90]), st.integers(0, 2)), min_size=1, max_size=12),
        min_size=1,
    ),
    st.integers(50, 900),
)
def test_a_gathered_plan_is_the_same_work(files: dict[str, list[tuple[int, int]]], task_bytes: int) -> None:
    plan = plan_of(files, task_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "MOVED_BYTES", 50)
        found = gathered(plan, task_bytes)

    def work(plan: Plan) -> list[tuple[object, ...]]:
        return sorted((row.file, row.offset_bytes, row.n_bytes, row.fingerprint) for row in plan.rows())

    assert work(found) == work(plan)
    assert [task.ordinal for task in found.tasks] == list(range(len(found.tasks)))
    for task in found.tasks:
        assert len({part.info.key for part in task.parts}) == len(task.parts)
        for part in task.parts:
            offsets = [segment.offset_bytes for segment in part.segments]
            assert offsets == sorted(offsets)
        assert task.n_bytes <= max(GATHERED_TASKS * task_bytes, *(task.n_bytes for task in plan.tasks))
    assert adopt(found.files, from_parquet(to_parquet(found.rows()))).tasks == found.tasks


def test_equal_segments_without_end_share_tasks_of_bounded_size() -> None:
    plan = plan_of({"a": [(64 << 20, 0)] * 100}, 256 << 20)
    tasks = gathered(plan, 256 << 20).tasks
    assert len(tasks) == 7
    assert max(task.n_bytes for task in tasks) == 1 << 30


def test_a_run_asks_less_than_once_for_four_mebibytes(monkeypatch: Patch, capsys: Capture) -> None:
    """Apart from one request for each object: with the planning pass, and tensors that would each be worth a sample."""
    bench = Bench(monkeypatch, capsys)
    tensors = [noise(i, 1 << 20) for i in range(32)] + [noise(99, 20 << 20)]
    bench.source.objects = {"a.safetensors": file_of(*tensors), "b.safetensors": file_of(*tensors[16:])}
    bench.archived("--set", "task_bytes=16MiB")
    n_bytes = sum(map(len, bench.source.objects.values()))
    assert sum(bench.source.requests.values()) - len(bench.source.objects) < n_bytes / (4 << 20)
    assert sum(bench.source.n_bytes.values()) < 1.3 * n_bytes


# -- the base -----------------------------------------------------------------------------------


def test_one_changed_file_of_ten_is_read_and_stored_alone(bench: Bench) -> None:
    files = {f"{i}.safetensors": file_of(*(noise(10 * i + j, TENSOR_BYTES) for j in range(3))) for i in range(10)}
    bench.source.objects = dict(files)
    bench.archived()
    packs = bench.packs
    changed = file_of(*(noise(1000 + j, TENSOR_BYTES) for j in range(3)))
    bench.source.objects = {**files, "4.safetensors": changed}
    summary = bench.archived()
    assert set(bench.source.n_bytes) == {"4.safetensors"}
    assert bench.source.n_bytes["4.safetensors"] <= 2 * len(changed)
    assert summary["unchanged_bytes"] == sum(map(len, files.values())) - len(changed)
    assert summary["deduplicated_bytes"] < 1000
    new = {key: data for key, data in bench.packs.items() if key not in packs}
    assert bench.packs.items() >= packs.items()
    assert sum(map(len, new.values())) < len(changed) + 10_000
    Watched(bench.archive).check(files, bench.source.objects)
    assert bench.archived()["unchanged"]
    assert not bench.source.n_bytes
    assert main(["verify", "test://archive", "--workers", "1", "-q"]) == 0


def test_renamed_and_moved_tensors_take_the_records_of_the_night_before(bench: Bench) -> None:
    tensors = [noise(j, TENSOR_BYTES) for j in range(6)]
    bench.source.objects = {"a.safetensors": file_of(*tensors)}
    bench.archived()
    before, packs = dict(bench.source.objects), bench.pack_bytes
    bench.source.objects = {"b.safetensors": file_of(*reversed(tensors), noise(77, 5000))}
    summary = bench.archived()
    assert summary["unchanged_bytes"] == 0
    assert summary["deduplicated_bytes"] == 6 * TENSOR_BYTES
    assert bench.pack_bytes - packs < 10_000
    Watched(bench.archive).check(before, bench.source.objects)
    assert main(["verify", "test://archive", "--workers", "1", "-q"]) == 0


def test_o22_a_file_of_the_same_size_with_other_bytes_is_noticed(bench: Bench) -> None:
    nights = [{"a.bin": noise(i, 5000), "same.bin": noise(9, 5000)} for i in range(3)]
    for night in nights:
        bench.source.objects = dict(night)
        assert bench.archived()["unchanged_bytes"] in (0, 5000)
        assert set(bench.source.n_bytes) >= {"a.bin"}
    snapshots = Watched(bench.archive).check(*nights)
    digests = [[entry.digest for entry in snapshot.files] for snapshot in snapshots]
    assert [len(set(column)) for column in zip(*digests, strict=True)] == [3, 1]


def test_another_recipe_takes_nothing(bench: Bench) -> None:
    bench.source.objects = {"a.bin": noise(1, 50_000), "b.bin": noise(2, 500)}
    bench.archived()
    summary = bench.archived("--set", "synth.finalists=2")
    assert (summary["snapshot"], summary["unchanged_bytes"], summary["deduplicated_bytes"]) == ("source/2", 0, 0)
    assert set(bench.source.n_bytes) == {"a.bin", "b.bin"}


def test_a_lost_pack_of_the_base_costs_its_files_alone(bench: Bench) -> None:
    files = {f"{i}.bin": noise(i, 50_000) for i in range(4)}
    bench.source.objects = dict(files)
    bench.archived()
    [snapshot] = Watched(bench.archive).check(files)
    row = load_manifest(bench.archive, snapshot)[2]
    assert row.pack is not None
    lost = next(key for key in bench.packs if row.pack.hex() in key)
    del bench.archive.objects[lost]
    bench.source.objects["new.bin"] = noise(9, 100)
    summary = bench.archived()
    assert [item["key"] for item in summary["warnings"]] == [lost]
    assert set(bench.source.n_bytes) == {"2.bin", "new.bin"}
    assert summary["unchanged_bytes"] == 150_000
    Watched(bench.archive).check(files, bench.source.objects)
    assert bench.archived()["unchanged"]


def test_a_run_that_is_killed_and_loses_a_pack_of_its_base_ends_well(bench: Bench, monkeypatch: Patch) -> None:
    """What the first attempt planned to take is gone when the second begins: another run, not one that never ends."""
    files = {f"{i}.bin": noise(i, 50_000) for i in range(4)}
    bench.source.objects = dict(files)
    bench.archived()
    bench.source.objects["new.bin"] = noise(9, 100)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.driver.commit", die)
        with pytest.raises(Killed):
            bench.archived()
    del bench.archive.objects[min(bench.packs)]
    bench.archived()
    assert main(["verify", "test://archive", "--snapshot", "source/2", "--workers", "1", "-q"]) == 0


def test_a_night_that_is_killed_anywhere_ends_as_if_it_were_not(bench: Bench, monkeypatch: Patch) -> None:
    """The plan, what is taken from the base and what moved between tasks are the same in the run that goes on."""
    tensors = [noise(j, TENSOR_BYTES) for j in range(5)]
    first = {"a.safetensors": file_of(*tensors), "b.bin": noise(8, 5000), "c.bin": noise(9, 5000)}
    second = {
        **first,
        "b.bin": noise(10, 5000),
        "d.safetensors": file_of(*tensors[1:4], *[noise(11, TENSOR_BYTES)] * 2),
    }
    second["e.safetensors"] = second["d.safetensors"]
    bench.source.objects = first
    bench.archived()
    before = dict(bench.archive.objects)
    bench.source.objects = second
    content = bench.archived()["content"]
    reached, call = True, 0
    while reached:
        store = MemoryStore(dict(before))
        faulty = FaultyStore(store, call, after=call % 2 == 1, fault=kill)
        reach(monkeypatch, {"test://source": bench.source, "test://archive": faulty})
        with contextlib.suppress(Killed):
            main(["archive", "test://source", "test://archive", *PLAIN, "-q"])
        reach(monkeypatch, {"test://source": bench.source, "test://archive": store})
        assert main(["archive", "test://source", "test://archive", *PLAIN, "-q"]) == 0
        assert find_snapshot(store, "source/2").content == content
        reached, call = faulty.reached, call + 3
    assert call > 30
    Watched(store).check(first, second)


def test_what_is_taken_from_the_base_is_a_receipt(bench: Bench) -> None:
    bench.source.objects = {"a.bin": noise(1, 50_000)}
    bench.archived()
    bench.source.objects["b.bin"] = noise(2, 50_000)
    run = bench.archived()["run"]
    taken = [
        from_parquet(bench.archive.objects[key]) for key in bench.archive.objects if key.startswith(f"runs/{run}/r")
    ]
    snapshot = find_snapshot(bench.archive, "source/2")
    rows = load_manifest(bench.archive, snapshot)
    assert sorted((row for some in taken for row in some), key=lambda row: row.file) == rows


def test_a_small_change_is_coded_with_the_prior_of_the_base(bench: Bench, monkeypatch: Patch) -> None:
    learned: list[int] = []
    learn = planning_learn()

    def counted(*arguments: Any) -> Any:
        learned.append(1)
        return learn(*arguments)

    monkeypatch.setattr("pipeline.driver.learn_prior", counted)
    options = ("--set", "synth.prior=learned")
    bench.source.objects = {f"{i}.safetensors": file_of(noise(i, 9000)) for i in range(4)}
    first = bench.archived(*options)["run"]
    bench.source.objects["0.safetensors"] = file_of(noise(10, 9000))
    second = bench.archived(*options)["run"]
    assert bench.archive.objects[prior_key(first)] == bench.archive.objects[prior_key(second)]
    assert len(learned) == 1
    bench.source.objects |= {f"{i}.safetensors": file_of(noise(20 + i, 9000)) for i in range(3)}
    bench.archived(*options)
    assert len(learned) == 2


def planning_learn() -> Any:
    from pipeline.calibration import learn_prior

    return learn_prior


# -- through the command line -------------------------------------------------------------------


def test_checksum_reads_what_the_store_says_is_unchanged(tmp_path: Path, capsys: Capture) -> None:
    """O22: a tool that keeps size and time while it changes bytes is found out by reading."""
    files = {"a.safetensors": safetensors([("w", "BF16", [300, 100], bf16(1, 30_000))]), "b.bin": noise(2, 5000)}
    folder, archive = write(tmp_path / "source", files), tmp_path / "archive"
    Ran(capsys, "archive", folder, archive, *QUICK)
    assert Ran(capsys, "archive", folder, archive, *QUICK, "--checksum").json["unchanged"]
    os.utime(folder / "b.bin", (1, 1))  # another generation of the same bytes
    packs = objects_of(archive, "packs")
    touched = Ran(capsys, "archive", folder, archive, *QUICK).json
    assert (touched["snapshot"], touched["deduplicated_bytes"]) == ("source/2", 5000)
    assert objects_of(archive, "packs") == packs
    (folder / "b.bin").write_bytes(noise(3, 5000))
    checked = Ran(capsys, "archive", folder, archive, *QUICK, "--checksum").json
    assert (checked["snapshot"], checked["unchanged_bytes"]) == ("source/3", 0)
    assert len(objects_of(archive, "packs")) == len(packs) + 1
    Ran(capsys, "restore", archive, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    Ran(capsys, "restore", archive, tmp_path / "first", "--snapshot", "source/1")
    assert files_of(tmp_path / "first") == files


def test_two_nights_are_the_same_for_any_workers(tmp_path: Path, capsys: Capture, small: None) -> None:
    shared = [bf16(j, 20_000) for j in range(5)]
    nights = [
        {
            f"{night}-{i}.safetensors": safetensors(
                [(f"w{j}", "BF16", [200, 100], data) for j, data in enumerate(some)]
            )
            for i, some in enumerate(picks)
        }
        for night, picks in enumerate([[shared, shared[1:4]], [shared[::-1], [bf16(50 + j, 20_000) for j in range(4)]]])
    ]
    folder = tmp_path / "source"
    contents: set[tuple[Any, ...]] = set()
    for workers in ("1", "2"):
        archive = tmp_path / f"archive-{workers}"
        for path in folder.glob("*"):
            path.unlink()
        for night in nights:
            write(folder, night)
            for path in folder.glob("*"):
                os.utime(path, (1, 1))
            options = ["--workers", workers, "--set", "task_bytes=100KiB", "--set", "synth.budget=8"]
            ran = Ran(capsys, "archive", folder, archive, *options)
            assert ran.code == 0
        contents.add((ran.json["content"], ran.json["deduplicated_bytes"], ran.json["unchanged_bytes"]))
        contents.add(tuple(path.name for path in objects_of(archive, "packs", "manifests")))
        Ran(capsys, "verify", archive)
        Ran(capsys, "restore", archive, tmp_path / f"out-{workers}")
        assert files_of(tmp_path / f"out-{workers}") == files_of(folder)
    assert len(contents) == 2
