"""Layouts: every odd file gets its verdict, and segments tile every file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import FormatError, PathError
from operators.limits import SEGMENT_BYTES
from operators.words import dtype_of
from pipeline.segments import GROUP_BYTES, SMALL_BYTES, Layout, layout_of, tensors_of
from pipeline.segments.base import LayoutError
from pipeline.segments.header import Header
from pipeline.segments.safetensors import row_elements
from tests import cases
from tests.cases import CASES, Case
from tests.strategies import damage, safetensors_files

ROOT = Path(__file__).parent.parent.parent


def look(data: bytes, key: str = "model.safetensors", segment_bytes: int = SEGMENT_BYTES) -> Layout:
    def read(offset: int, n_bytes: int) -> bytes:
        assert 0 <= offset <= offset + n_bytes <= len(data), "a read beyond the file"
        return data[offset : offset + n_bytes]

    return layout_of(read, key, len(data), segment_bytes)


def check_tiling(layout: Layout, n_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
    ends = [0, *(segment.end_bytes for segment in layout.segments)]
    assert [segment.offset_bytes for segment in layout.segments] == ends[:-1]
    assert ends[-1] == n_bytes
    for segment in layout.segments:
        assert 0 < segment.n_bytes <= segment_bytes
        assert segment.n_rows * segment.row_words * dtype_of(segment.dtype).word_bits == 8 * segment.n_bytes
        assert (segment.tensor is None) == (segment.shape is None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_file_gets_its_verdict_and_is_tiled(case: Case) -> None:
    for key, data in case.files.items():
        layout = look(data, key)
        assert (layout.format, layout.reason) == (case.format, case.reason)
        assert bool(layout.detail) or layout.reason in (None, "empty_header")
        for segment_bytes in (64, 4096, SEGMENT_BYTES):
            check_tiling(look(data, key, segment_bytes), len(data), segment_bytes)


@pytest.mark.parametrize("case", [case for case in CASES if case.format == "safetensors"], ids=lambda case: case.id)
def test_sound_files_have_the_tensors_that_the_library_sees(case: Case) -> None:
    for data in case.files.values():
        layout = look(data)
        tensors = tensors_of(data[: 8 + int.from_bytes(data[:8], "little")])
        assert sum(segment.n_tensors for segment in layout.segments) == len(tensors)
        if case.reason is None and b'":null' not in data[:200]:
            theirs = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
            assert {tensor.name: bytes(theirs[tensor.name]["data"]) for tensor in tensors} == {
                tensor.name: data[tensor.begin : tensor.end] for tensor in tensors
            }
            assert all(list(tensor.shape) == theirs[tensor.name]["shape"] for tensor in tensors)
            assert len(theirs) == len(tensors)


@given(safetensors_files(), st.sampled_from([64, 512, SEGMENT_BYTES]))
def test_segments_tile_any_sound_file(data: bytes, segment_bytes: int) -> None:
    layout = look(data, segment_bytes=segment_bytes)
    assert (layout.format, layout.reason) == ("safetensors", None)
    check_tiling(layout, len(data), segment_bytes)
    header = Header(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert sum(segment.n_tensors for segment in layout.segments) == len(header)


@given(safetensors_files().flatmap(damage))
def test_damaged_files_are_tiled_and_named(data: bytes) -> None:
    layout = look(data)
    check_tiling(layout, len(data))
    assert layout.format == "safetensors" or layout.reason is not None


def outcome(text: bytes, *, fast: bool) -> tuple[Any, ...]:
    try:
        header = Header(text, fast)
    except LayoutError as error:
        return error.args
    return list(header), header.dtype_names, header.dtypes.tolist()


@given(safetensors_files().flatmap(lambda data: st.just(data) | damage(data)))
def test_the_fast_header_parser_equals_the_plain_one(data: bytes) -> None:
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    assert outcome(text, fast=True) == outcome(text, fast=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_fast_header_parser_equals_the_plain_one_on_odd_files(case: Case) -> None:
    for data in case.files.values():
        text = data[8 : 8 + int.from_bytes(data[:8], "little")]
        assert outcome(text, fast=True) == outcome(text, fast=False)


@given(safetensors_files())
def test_plain_json_agrees_with_the_header_parser(data: bytes) -> None:
    n_bytes = int.from_bytes(data[:8], "little")
    expected = {name: value for name, value in json.loads(data[8 : 8 + n_bytes]).items() if name != "__metadata__"}
    found = list(tensors_of(data[: 8 + n_bytes]))
    assert {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin - 8 - n_bytes, tensor.end - 8 - n_bytes],
        }
        for tensor in found
    } == expected


ESCAPES = [
    b"\\n",
    b"\\/",
    b'\\"',
    b"\\\\",
    b"\\u0041",
    b"\\ud83d\\ude00",
    b"\\\\u",
    b"\\u",
    b"\\u004",
    b"\\q",
    b"\\\n",
    b"\n",
]


@pytest.mark.parametrize("text", [b"a" + escape + after for escape in ESCAPES for after in (b"", b"b")])
@pytest.mark.parametrize(
    "entry", [b'{"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b'{"__metadata__":{"k":"%s"}}']
)
def test_a_string_is_what_json_takes_for_one(entry: bytes, text: bytes) -> None:
    header = entry % text
    try:
        json.loads(header)
        sound = True
    except ValueError:
        sound = False
    found = outcome(header, fast=True)
    assert isinstance(found[0], list) == sound
    assert sound or found[0] == "header_syntax"


# -- how tensors are cut ------------------------------------------------------------------------


def test_large_tensors_are_cut_evenly_at_whole_rows() -> None:
    data = cases.safetensors([("w", "BF16", [100, 50], bytes(10_000)), ("v", "F32", [3, 1000], bytes(12_000))])
    segments = look(data, segment_bytes=4096).segments[1:]
    assert [(s.tensor, s.row_start, s.n_rows, s.row_words, s.n_tensors) for s in segments] == [
        ("w", 0, 34, 50, 1),
        ("w", 34, 34, 50, 0),
        ("w", 68, 32, 50, 0),
        ("v", 0, 1, 1000, 1),
        ("v", 1, 1, 1000, 0),
        ("v", 2, 1, 1000, 0),
    ]


def test_a_row_longer_than_a_segment_is_cut_by_itself() -> None:
    data = cases.safetensors([("w", "F32", [2, 1500], bytes(12_000)), ("v", "U8", [9000], bytes(9000))])
    segments = look(data, segment_bytes=4096).segments[1:]
    assert [(s.row_start, s.n_rows, s.row_words) for s in segments] == [
        *((0, 1, 1024), (0, 1, 476), (1, 1, 1024), (1, 1, 476)),
        *((0, 1, 4096), (0, 1, 4096), (0, 1, 808)),
    ]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), 1), ((7,), 7), ((320, 64), 64), ((64, 3, 3), 9), ((64, 64, 3, 3), 576), ((1, 1, 99, 99), 99), ((5, 2), 2)],
)
def test_rows_are_trailing_dimensions(shape: tuple[int, ...], expected: int) -> None:
    assert row_elements(shape) == expected


def small(dtype: str, count: int, n_bytes: int) -> list[cases.Entry]:
    return [
        (f"{dtype}.{i}", dtype, [n_bytes * 8 // dtype_of(dtype).element_bits], bytes(n_bytes)) for i in range(count)
    ]


def test_small_neighbours_share_a_segment_with_their_dtype() -> None:
    data = cases.safetensors([*small("F32", 10, 1000), *small("BF16", 3, 1000), *small("U8", 2, 10)])
    groups = look(data).segments[1:]
    assert [(s.tensor, s.dtype, s.n_bytes, s.n_tensors) for s in groups] == [
        (None, "F32", 10_000, 10),  # long enough to be its own
        (None, None, 3020, 5),  # dtypes mixed: bytes
    ]


def test_one_small_tensor_keeps_its_name() -> None:
    data = cases.safetensors([("w", "F32", [100, 100], bytes(40_000)), ("scale", "F32", [], bytes(4))])
    assert [(s.tensor, s.shape) for s in look(data).segments[1:]] == [("w", (100, 100)), ("scale", ())]


def test_groups_are_bounded() -> None:
    data = cases.safetensors(small("U8", 3 * GROUP_BYTES // 4000, 4000))
    sizes = [s.n_bytes for s in look(data).segments[1:]]
    assert max(sizes) <= GROUP_BYTES
    assert len(sizes) == 3


def test_tensors_from_the_bound_up_stand_alone() -> None:
    data = cases.safetensors(small("U8", 3, SMALL_BYTES))
    assert [s.tensor for s in look(data).segments[1:]] == ["U8.0", "U8.1", "U8.2"]


def test_gaps_and_tails_are_bytes() -> None:
    data = next(case for case in CASES if case.id == "B05-hole").files.popitem()[1] + b"tail"
    layout = look(data)
    assert layout.reason == "hole"
    assert "after the last" in layout.detail
    assert [s.tensor for s in layout.segments] == [None, "a", None, "b", None]


# -- names and content --------------------------------------------------------------------------

_SOUND = cases.safetensors([("w", "BF16", [300, 300], cases.bf16(1, 90_000))])


@pytest.mark.parametrize(
    ("key", "data", "verdict"),
    [
        ("large.bin", _SOUND, ("safetensors", None)),
        ("LARGE.SAFETENSORS", _SOUND, ("safetensors", None)),
        ("no-suffix", _SOUND, ("safetensors", None)),
        ("large.bin", _SOUND[:-1], ("opaque", None)),  # it never claimed to be one
        ("pytorch_model.bin", cases.lfs_pointer(), ("opaque", "lfs_pointer")),
        ("tokenizer.json", cases.lfs_pointer(), ("opaque", "lfs_pointer")),
        ("notes.txt", b"", ("opaque", None)),
        ("a.pt", b"", ("opaque", "empty_weights_file")),
        ("folder/", b"", ("opaque", None)),
    ],
)
def test_files_are_known_by_content_and_by_name(key: str, data: bytes, verdict: tuple[str, str | None]) -> None:
    layout = look(data, key)
    assert (layout.format, layout.reason) == verdict


def test_a_name_that_is_not_text_is_refused() -> None:
    with pytest.raises(PathError, match="rename"):
        look(b"abc", "caf\udce9.bin")
    assert look(b"abc", "caf\u00e9.bin").segments


def test_most_plain_files_cost_no_request() -> None:
    def refuse(offset: int, n_bytes: int) -> bytes:
        raise AssertionError("a read")

    assert layout_of(refuse, "config.json", 30_000).segments
    assert layout_of(refuse, "empty.safetensors", 0).reason == "empty_file"


def test_a_header_over_the_limit_is_not_read() -> None:
    n_bytes = 1 << 40

    def read(offset: int, count: int) -> bytes:
        assert (offset, count) == (0, 1024)
        return (300 << 20).to_bytes(8, "little") + b'{"a":'.ljust(count - 8)

    layout = layout_of(read, "x.safetensors", n_bytes)
    assert layout.reason == "header_over_limit"
    check_tiling(layout, n_bytes)


def test_a20_a_tensor_of_six_gib_is_cut() -> None:
    n_bytes = 6 << 30
    text = cases.raw(f'{{"w":{cases.entry(chr(34) + "BF16" + chr(34), "[786432,4096]", f"[0,{n_bytes}]")}}}')
    layout = layout_of(lambda offset, count: text[offset : offset + count], "x.safetensors", len(text) + n_bytes)
    check_tiling(layout, len(text) + n_bytes)
    assert len(layout.segments) == 1 + n_bytes // SEGMENT_BYTES
    assert all(second.row_start == first.row_start + first.n_rows for first, second in pairwise(layout.segments[1:]))


_MEASURE = """
import re, sys
from pathlib import Path
from pipeline.segments import layout_of
file = open(sys.argv[1], "rb")
def read(offset, n_bytes):
    file.seek(offset)
    return file.read(n_bytes)
layout = layout_of(read, "model.safetensors", Path(sys.argv[1]).stat().st_size)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(layout.format, len(layout.segments), sum(s.n_tensors for s in layout.segments), int(peak[1]) >> 10)
"""


@pytest.mark.parametrize(
    ("build", "n_tensors", "n_segments"),
    [
        pytest.param(lambda: cases.many_tensors(1_290_000, 132_095_296), 1_290_000, 4, id="A18"),
        pytest.param(lambda: cases.small_tensors(1_000_000), 1_000_000, 40, id="A19"),
    ],
)
def test_a_million_tensors_are_planned_in_bounded_memory(
    build: Callable[[], bytes], n_tensors: int, n_segments: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(build())
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    kind, segments, tensors, peak_mib = done.stdout.split()
    assert (kind, int(tensors)) == ("safetensors", n_tensors)
    assert int(segments) <= n_segments
    assert int(peak_mib) < 400


def test_a_stored_header_that_is_none_is_a_typed_error() -> None:
    with pytest.raises(FormatError, match="duplicate_key"):
        tensors_of(cases.raw(f'{{"a":{cases.entry()},"a":{cases.entry()}}}'))
