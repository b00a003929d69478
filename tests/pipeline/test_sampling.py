"""The planning pass: which bytes it reads, how few requests it takes, and fingerprints that say what they may."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import StoreError
from pipeline import sampling
from pipeline.plan import Part, make_plan
from pipeline.rooms import Room
from pipeline.sampling import (
    REQUEST_WORTH_BYTES,
    SAMPLE_BYTES,
    Fingerprints,
    files_of,
    region_of,
    sample_files,
    sample_plan,
    stretches_of,
)
from pipeline.segments import Layout, Segment
from pipeline.store import Buffers, ObjectInfo, Range
from pipeline.store_base import coalesce
from tests.memory_store import MemoryStore

MIB = 1 << 20
SIZES = st.one_of(st.integers(1, 40_000), st.integers(1 << 18, 64 << 20))


def file_of(sizes: list[int], key: str = "f", dtype: str | None = "BF16") -> Part:
    segments, offset = [], 0
    for index, n_bytes in enumerate(sizes):
        segments.append(Segment(offset, n_bytes, f"t{index}", dtype, (n_bytes,), 0, 1, n_bytes, 1))
        offset += n_bytes
    return Part(ObjectInfo(key, offset, "tag"), "safetensors", None, tuple(segments))


class Endless(MemoryStore):
    """Objects of any size, whose bytes are their offsets; counts what a server would be asked for."""

    requests = 0
    n_bytes = 0

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[Range], room: Room | None = None) -> Buffers:
        for start, stop, _ in coalesce(ranges):
            self.requests += 1
            self.n_bytes += stop - start
        return [memoryview((np.arange(start, stop) % 251).astype(np.uint8).tobytes()) for start, stop in ranges]


@given(st.lists(SIZES, min_size=1, max_size=60), st.randoms())
def test_no_more_requests_than_the_bytes_pay_for(sizes: list[int], shuffle: random.Random) -> None:
    part = file_of(sizes)
    stretches = stretches_of(part)
    assert 1 <= len(stretches) <= 1 + part.n_bytes // REQUEST_WORTH_BYTES
    assert all(first.stop <= second.first for first, second in pairwise(stretches))
    sampled = {index for one in stretches for index in range(one.first, one.stop)}
    assert sampled >= {i for i, n_bytes in enumerate(sizes) if n_bytes >= REQUEST_WORTH_BYTES}
    for one in stretches:
        for index in range(one.first, one.stop):
            segment = part.segments[index]
            start, stop = region_of(segment.n_bytes)
            assert 0 <= start < stop <= segment.n_bytes
            assert stop - start == min(SAMPLE_BYTES, segment.n_bytes)
            assert one.range[0] <= segment.offset_bytes + start
            assert segment.offset_bytes + stop <= one.range[1]


@pytest.mark.parametrize("n_bytes", [4 << 10, 100_000, MIB, 40 * MIB])
def test_few_requests_and_few_bytes(n_bytes: int) -> None:
    part = file_of([n_bytes] * max(20, 200 * MIB // n_bytes))
    store = Endless()
    n_samples = len(list(sample_files(store, [part])))
    assert store.requests <= 1 + part.n_bytes // REQUEST_WORTH_BYTES
    assert store.n_bytes <= part.n_bytes // 6
    assert n_samples >= store.requests


def test_every_tensor_of_a_large_model_and_no_word_is_torn() -> None:
    part = file_of([30 * MIB, 8192, 20 * MIB, 8192, 64 * MIB, 8192])
    for sample in sample_files(Endless(), [part]):
        start = sample.segment.offset_bytes + region_of(sample.segment.n_bytes)[0]
        assert sample.words.dtype == np.uint16
        assert start % 2 == 0
        assert np.array_equal(sample.words.view(np.uint8), np.arange(start, start + sample.words.nbytes) % 251)
        assert sample.words.base is None
    assert [one.index for one in sample_files(Endless(), [part])] == [0, 1, 2, 3, 4, 5]


def test_a_plan_is_sampled_by_files_whatever_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [file_of([MIB] * 40, "a"), file_of([3 * MIB] * 9, "b")]
    layouts = [Layout(part.format, None, "", part.segments) for part in parts]
    expected = [(s.part.info.key, s.index, s.words.tobytes()) for s in sample_files(Endless(), parts)]
    for task_bytes in (2 * MIB, 400 * MIB):
        plan = make_plan([part.info for part in parts], layouts, task_bytes, {})
        assert files_of(plan) == parts
        assert [(s.part.info.key, s.index, s.words.tobytes()) for s in sample_plan(Endless(), plan)] == expected
    monkeypatch.setattr(sampling, "BATCH_BYTES", 1)
    assert [(s.part.info.key, s.index, s.words.tobytes()) for s in sample_files(Endless(), parts)] == expected


def test_many_small_files_cost_no_request() -> None:
    few, many = ([file_of([1000], f"{i}") for i in range(n)] for n in (64, 65))
    assert len(list(sample_files(Endless(), few))) == 64
    store = Endless()
    assert next(sample_files(store, [*many, file_of([2 * MIB], "large")])).part.info.key == "large"
    assert store.requests == 1


def fingerprints(files: dict[str, bytes], sizes: list[int]) -> dict[str, tuple[bytes, ...]]:
    store, found = MemoryStore(dict(files)), Fingerprints()
    parts = [Part(store.head(key), "safetensors", None, file_of(sizes).segments) for key in files]
    for _ in found.watch(sample_files(store, parts)):
        pass
    return {part.info.key: found.of(part) for part in parts}


def test_equal_segments_have_equal_fingerprints() -> None:
    sizes = [300_000] * 90
    data = random.Random(1).randbytes(300_000 * 88)
    tail = data[:600_000]
    same = fingerprints({"a": data + tail, "b": data + tail}, sizes)
    assert same["a"] == same["b"]
    assert len(same["a"]) == 90
    assert len(set(same["a"])) > 80
    sampled = {i for one in stretches_of(file_of(sizes)) for i in range(one.first, one.stop)}
    assert 10 < len(sampled) < 90  # of both kinds
    other = fingerprints({"a": data + tail, "c": data[300_000:] + data[:300_000] + tail}, sizes)
    shifted = [i for i in range(1, 88) if {i, i - 1} <= sampled]
    assert shifted
    assert all(other["a"][i] == other["c"][i - 1] for i in shifted)
    assert all(other["a"][i] != other["c"][i] for i in sampled if i < 88)


def test_a_file_that_cannot_be_read_is_passed_over_and_a_store_that_fails_is_not() -> None:
    data = bytes(2 * MIB)
    store = MemoryStore({"a": data, "b": data})
    parts = [Part(store.head(key), "opaque", None, file_of([MIB, MIB]).segments) for key in "ab"]
    store.objects["a"] += b"grown"
    assert {sample.part.info.key for sample in sample_files(store, parts)} == {"b"}
    found = Fingerprints()
    assert found.of(parts[0]) == ()

    class Failing(MemoryStore):
        def get_ranges(self, *_: object) -> Buffers:
            raise StoreError("an answer", "none")

    with pytest.raises(StoreError):
        list(sample_files(Failing(), parts))
