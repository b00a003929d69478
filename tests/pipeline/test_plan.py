"""Plans: the same source and recipe give the same tasks, every segment is in one, and odd sets are told."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import ChangedError, StoreError
from pipeline import plan as plan_module
from pipeline.lint import lint
from pipeline.parquet import from_parquet, to_parquet
from pipeline.plan import Finding, Plan, adopt, make_plan, matches, select
from pipeline.segments import Read, layout_of
from pipeline.segments.opaque import layout as opaque_layout
from pipeline.store import ObjectInfo
from tests import cases
from tests.cases import CASES


def planned(sizes: dict[str, int], task_bytes: int, segment_bytes: int = 64) -> Plan:
    files = select(ObjectInfo(key, n_bytes, "tag") for key, n_bytes in sizes.items())
    return make_plan(files, [opaque_layout(info.n_bytes, segment_bytes) for info in files], task_bytes, {})


sources = st.dictionaries(st.text("abc/", min_size=1, max_size=5), st.integers(0, 3000), max_size=12)


@given(sources, st.integers(64, 2000))
def test_every_segment_is_in_one_task(sizes: dict[str, int], task_bytes: int) -> None:
    plan = planned(sizes, task_bytes)
    assert [task.ordinal for task in plan.tasks] == list(range(len(plan.tasks)))
    found = sorted((row.file, row.offset_bytes, row.n_bytes) for row in plan.rows())
    for key, n_bytes in sizes.items():
        ranges = [(offset, count) for file, offset, count in found if file == key]
        assert [offset for offset, _ in ranges] == list(range(0, n_bytes, 64))
        assert sum(count for _, count in ranges) == n_bytes
    assert plan.n_bytes == sum(sizes.values()) == sum(task.n_bytes for task in plan.tasks)


@given(sources, st.integers(64, 2000))
def test_tasks_are_about_as_large_as_asked(sizes: dict[str, int], task_bytes: int) -> None:
    tasks = planned(sizes, task_bytes).tasks
    assert all(task.n_bytes <= task_bytes + 64 for task in tasks)
    shared = [task for task in tasks if all(2 * part.info.n_bytes <= task_bytes for part in task.parts)]
    assert all(first.n_bytes + second.n_bytes > task_bytes for first, second in pairwise(shared))


@given(sources, st.integers(64, 2000), st.randoms())
def test_the_order_of_the_listing_does_not_matter(sizes: dict[str, int], task_bytes: int, random: object) -> None:
    keys = list(sizes)
    random.shuffle(keys)  # type: ignore[attr-defined]
    assert planned({key: sizes[key] for key in keys}, task_bytes) == planned(sizes, task_bytes)


@given(sources, st.integers(64, 2000))
def test_a_stored_plan_gives_the_same_tasks(sizes: dict[str, int], task_bytes: int) -> None:
    plan = planned(sizes, task_bytes)
    adopted = adopt(plan.files, from_parquet(to_parquet(plan.rows())))
    assert (adopted.tasks, adopted.files, adopted.failures) == (plan.tasks, plan.files, ())
    assert pickle.loads(pickle.dumps(plan.tasks)) == plan.tasks


def test_another_small_file_leaves_the_tasks_of_large_ones_as_they_were() -> None:
    sizes = {"a.txt": 10, "m.bin": 3000, "z.txt": 20}
    before, after = planned(sizes, 500), planned({**sizes, "b.txt": 200, "a.txt": 90}, 500)
    assert [task.parts for task in before.tasks[:-1]] == [task.parts for task in after.tasks[: len(before.tasks) - 1]]


def test_a_stored_plan_of_another_source_is_refused() -> None:
    plan = planned({"a": 100}, 500)
    rows = list(plan.rows())
    with pytest.raises(ChangedError):
        adopt([], rows)
    with pytest.raises(ChangedError):
        adopt([replace(plan.files[0], n_bytes=99)], rows)


def reader(data: bytes) -> Read:
    return lambda start, count: data[start : start + count]


def test_an_adopted_plan_keeps_the_warnings() -> None:
    files, layouts = [], []
    for case in CASES:
        for key, data in case.files.items():
            files.append(ObjectInfo(f"{case.id}/{key}", len(data), ""))
            layouts.append(layout_of(reader(data), key, len(data)))
    plan = make_plan(files, layouts, 1 << 20, {})
    adopted = adopt(files, plan.rows())
    assert {(found.key, found.reason) for found in adopted.warnings} == {
        (found.key, found.reason) for found in plan.warnings
    }
    assert {found.reason for found in plan.warnings} == {case.reason for case in CASES} - {None}


def test_the_segments_of_a_task_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "TASK_SEGMENTS", 3)
    tasks = planned({"a": 64 * 10, "b": 64 * 2, "c": 64 * 2, "d": 1}, 64 * 100).tasks
    assert [len(task.rows()) for task in tasks] == [3, 3, 3, 3, 3]


def test_e12_ten_thousand_small_files_share_tasks() -> None:
    plan = planned({f"data/{i:05d}.json": 1000 + i % 99_000 for i in range(10_000)}, 256 << 20, 64 << 20)
    assert len(plan.tasks) == 1
    assert len(plan.tasks[0].parts) == 10_000


# -- filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("*.safetensors", "model.safetensors", True),
        ("*.safetensors", "a/b/model.safetensors", True),
        ("*.safetensors", "model.safetensors.index.json", False),
        ("original", "original/model.bin", True),
        ("original/", "original/model.bin", True),
        ("original/*", "original/model.bin", True),
        ("original", "original", True),
        ("original", "original-2/model.bin", False),
        ("original", "a/original/model.bin", False),
        ("*/original", "a/original/model.bin", True),
        ("step-1", "step-10/x", False),
        ("step-?", "step-1/x", True),
        ("model", "Model/x", False),
        ("config.json", "config.json", True),
        ("config.json", "a/config.json", False),
        ("br[[]ack]et", "br[ack]et", True),
        ("[ab].bin", "a.bin", True),
        ("a", "/a", False),
        ("/a", "/a/b", True),
        ("folder", "folder/", True),
        ("*", "any/thing", True),
    ],
)
def test_patterns(pattern: str, key: str, expected: bool) -> None:
    assert matches(key, [pattern]) is expected


def test_filters_select() -> None:
    listing = [ObjectInfo(key, 1, "") for key in ("c/x.bin", "a.bin", "b.txt", "c/d/y.bin")]

    def keys(include: list[str], exclude: list[str]) -> list[str]:
        return [info.key for info in select(listing, include, exclude)]

    assert keys([], []) == ["a.bin", "b.txt", "c/d/y.bin", "c/x.bin"]
    assert keys(["*.bin"], []) == ["a.bin", "c/d/y.bin", "c/x.bin"]
    assert keys(["*.bin"], ["c/d"]) == ["a.bin", "c/x.bin"]
    assert keys([], ["c", "*.txt"]) == ["a.bin"]
    assert keys(["*.bin", "b.txt"], ["*"]) == []


# -- indexes of shards --------------------------------------------------------------------------


def read_from(files: dict[str, bytes]) -> Callable[[ObjectInfo, int, int], bytes]:
    return lambda info, offset, count: files[info.key][offset : offset + count]


def lint_of(files: dict[str, bytes]) -> list[Finding]:
    return lint([ObjectInfo(key, len(data), "") for key, data in files.items()], read_from(files))


SHARD = cases.safetensors([("w", "U8", [2], b"ab"), ("u", "U8", [1], b"c")])


def test_e02_missing_shards_are_named() -> None:
    names = {"w": "a-1.safetensors", "v": "a-2.safetensors", "t": "a-3.safetensors"}
    found = lint_of(
        {"m/x.safetensors.index.json": cases.index_of(names), "m/a-1.safetensors": SHARD, "a-2.safetensors": b""}
    )
    assert found == [Finding("m/x.safetensors.index.json", "index_missing_shards", "a-2.safetensors, a-3.safetensors")]


def test_e02_tensors_that_their_shard_lacks_are_named() -> None:
    files = {"i.index.json": cases.index_of({"w": "s.safetensors", "z": "s.safetensors", "y": "s.safetensors"})}
    assert lint_of({**files, "s.safetensors": SHARD}) == [Finding("i.index.json", "index_missing_tensors", "y, z")]


@pytest.mark.parametrize(
    "files",
    [
        {"i.index.json": cases.index_of({"w": "s.safetensors"}), "s.safetensors": SHARD},
        {"i.index.json": cases.index_of({"w": "s.bin"}), "s.bin": b"pickle"},
        {"i.index.json": cases.index_of({"w": "s.safetensors"}), "s.safetensors": SHARD[:20]},
        {"i.index.json": cases.index_of({"w": "s.safetensors"}), "s.safetensors": b"short"},
        {"i.index.json": cases.index_of({"w": "s.safetensors"}), "s.safetensors": cases.raw("not json")},
        {"i.index.json": b"{not json"},
        {"i.index.json": b"[]"},
        {"i.index.json": b'{"weight_map": [1]}'},
        {"i.index.json": b'{"weight_map": {"w": 1}}'},
        {"i.index.json": b"[" * 100_000},
        {"i.index.json": b""},
        {"other.json": cases.index_of({"w": "gone.safetensors"})},
    ],
)
def test_whole_sets_and_other_files_give_no_warning(files: dict[str, bytes]) -> None:
    assert lint_of(files) == []


def test_many_missing_names_are_cut() -> None:
    found = lint_of({"i.index.json": cases.index_of({str(i): f"s{i:03d}" for i in range(50)})})
    assert found[0].detail.endswith("s039 and 10 more")


def test_a_store_that_fails_gives_no_warning() -> None:
    def fail(info: ObjectInfo, offset: int, count: int) -> bytes:
        raise StoreError("an answer", "none")

    assert lint([ObjectInfo("i.index.json", 10, "")], fail) == []
