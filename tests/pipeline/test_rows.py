"""Rows as Parquet: exact, deterministic, and refused when anything in them changed."""

from __future__ import annotations

import contextlib
import io
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import DamageError, FormatError, LimitError
from operators.limits import RECORD_BYTES, SEGMENT_BYTES
from pipeline import parquet as rows_module
from pipeline.parquet import content_digest, from_parquet, to_parquet
from pipeline.rows import SCHEMA, Row, Rows
from tests.strategies import damage

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
COUNT = st.integers(0, 1 << 40)
DIGEST = st.binary(min_size=32, max_size=32)


@st.composite
def some_rows(draw: st.DrawFn) -> Row:
    stored = draw(st.integers(0, RECORD_BYTES))
    offset = draw(COUNT)
    return Row(
        file=draw(TEXT),
        offset_bytes=draw(COUNT),
        n_bytes=draw(st.integers(1, SEGMENT_BYTES)),
        tensor=draw(st.none() | TEXT),
        dtype=draw(st.none() | TEXT),
        shape=draw(st.none() | st.lists(COUNT, max_size=4).map(tuple)),
        row_start=draw(COUNT),
        n_rows=draw(COUNT),
        row_words=draw(COUNT),
        n_tensors=draw(COUNT),
        format=draw(TEXT),
        reason=draw(st.none() | TEXT),
        task=draw(COUNT),
        digest=draw(st.none() | DIGEST),
        program=draw(st.none() | TEXT),
        stored_bytes=draw(st.none() | st.just(stored)),
        stored_digest=draw(st.none() | DIGEST),
        pack=draw(st.none() | DIGEST),
        pack_bytes=draw(st.none() | st.just(stored + offset + 1)),
        pack_offset=draw(st.none() | st.just(offset)),
        fingerprint=draw(st.none() | st.binary(min_size=8, max_size=8)),
    )


def row(index: int) -> Row:
    digest = index.to_bytes(32, "little")
    return Row(
        f"model-{index // 40}.safetensors", 4096 * index, 4096, f"layers.{index}.weight", "BF16", (2, 1024), 0, 2, 1024,
        1, "safetensors", None, index // 10, digest, "merge(lit,lit)", 3000, digest, digest, 100_000,
        3000 * index % 90_000,
    )  # fmt: skip


ROWS = [row(index) for index in range(120)]
DATA = to_parquet(ROWS)


@given(st.lists(some_rows(), max_size=8))
def test_rows_come_back(rows: list[Row]) -> None:
    data = to_parquet(rows)
    assert from_parquet(data) == rows
    assert to_parquet(iter(rows)) == data


def test_the_schema_is_the_row() -> None:
    assert SCHEMA.names == [field.name for field in fields(Row)]
    assert {field.name for field in SCHEMA if field.nullable} == {
        field.name for field in fields(Row) if "None" in str(field.type)
    }


def test_several_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "GROUP_ROWS", 50)
    data = to_parquet(ROWS)
    assert pq.ParquetFile(io.BytesIO(data)).metadata.num_row_groups == 3
    assert from_parquet(data) == ROWS
    monkeypatch.setattr(rows_module, "GROUP_ROWS", 49)
    with pytest.raises(LimitError):
        from_parquet(data)


def test_too_many_rows_are_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_MAX", len(ROWS) - 1)
    with pytest.raises(LimitError):
        to_parquet(ROWS)
    with pytest.raises(LimitError):
        from_parquet(DATA)


def test_there_is_no_clock_in_the_bytes_and_pages_are_checked() -> None:
    file = pq.ParquetFile(io.BytesIO(DATA))
    assert set(file.metadata.metadata or {}) == {b"brevis.rows"}
    assert not file.metadata.row_group(0).column(0).is_stats_set


def test_pages_have_checksums_that_are_checked() -> None:
    """T29: they are written, and it is they that notice a bit of a page, in every column."""
    group = pq.ParquetFile(io.BytesIO(DATA)).metadata.row_group(0)
    for number in range(group.num_columns):
        column = group.column(number)
        start = column.dictionary_page_offset or column.data_page_offset
        position = start + column.total_compressed_size - 1  # the last byte of the last page
        with pytest.raises(FormatError, match="CRC checksum verification failed"):
            from_parquet(DATA[:position] + bytes([DATA[position] ^ 1]) + DATA[position + 1 :])


def test_flipped_bits_are_noticed() -> None:
    data = to_parquet(ROWS[:3])
    for position in range(len(data)):  # one bit of each byte; which, moves along
        damaged = data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        with contextlib.suppress(DamageError):  # some bits say nothing, as those in the name of the writer
            assert from_parquet(damaged) == ROWS[:3]


def one_row_less(data: bytes) -> bytes:
    """Change the number of rows in the footer from three to two: one bit, under no checksum of Parquet."""
    assert data.count(b"\x16\x06&\x08") == 1
    return data.replace(b"\x16\x06&\x08", b"\x16\x04&\x08")


def test_a_bit_of_the_footer_that_parquet_lets_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match="digest"):
        from_parquet(one_row_less(to_parquet(ROWS[:3])))
    monkeypatch.setattr(rows_module._Digest, "hex", lambda _: "constant")
    assert from_parquet(one_row_less(to_parquet(ROWS[:3]))) == ROWS[:2]  # so it is the digest that notices


def test_every_cut_is_noticed() -> None:
    for n_bytes in range(len(DATA)):
        with pytest.raises(DamageError):
            from_parquet(DATA[:n_bytes])


@given(damage(DATA))
def test_damage_is_noticed_or_says_nothing(data: bytes) -> None:
    with contextlib.suppress(DamageError):
        assert from_parquet(data) == ROWS


def foreign(schema: pa.Schema, columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pydict(columns, schema=schema), sink)
    return sink.getvalue()


def test_other_tables_are_refused() -> None:
    with pytest.raises(FormatError, match="columns"):
        from_parquet(foreign(pa.schema([("a", pa.int64())]), {"a": [1]}))
    reordered = pa.schema([*list(SCHEMA)[1:], SCHEMA.field(0)])
    with pytest.raises(FormatError, match="columns"):
        from_parquet(foreign(reordered, {name: [] for name in reordered.names}))
    with pytest.raises(FormatError, match="digest"):
        from_parquet(foreign(SCHEMA, {name: [] for name in SCHEMA.names}))
    for data in (b"", b"PAR1", b"x" * 100):
        with pytest.raises(FormatError):
            from_parquet(data, "where")


@pytest.mark.parametrize(
    "values",
    [
        {"offset_bytes": -1},
        {"offset_bytes": 1 << 62},
        {"n_bytes": 0},
        {"n_bytes": SEGMENT_BYTES + 1},
        {"row_words": -1},
        {"n_rows": -1},
        {"task": -1},
        {"shape": (-1,)},
        {"shape": (1,) * 33},
        {"stored_bytes": -1},
        {"stored_bytes": RECORD_BYTES + 1, "pack_bytes": 1 << 40},
        {"stored_bytes": RECORD_BYTES + 1, "pack_bytes": None},
        {"pack_bytes": 0},
        {"pack_bytes": -1, "pack_offset": None, "stored_bytes": None},
        {"pack_bytes": (1 << 62) + 1},
        {"pack_offset": 1 << 62, "pack_bytes": None},
        {"pack_offset": -1},
        {"pack_offset": 99_999},  # the record would end after its pack
    ],
)
def test_values_that_no_segment_has_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="within its file and pack"):
        from_parquet(to_parquet([replace(ROWS[0], **values)]))


def test_a_shape_of_millions_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = to_parquet([replace(ROWS[0], shape=(0,) * (rows_module.GROUP_ROWS * 32 + 1))])
    assert len(bomb) < 20_000
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    with pytest.raises(LimitError, match="values in a row group"):
        from_parquet(bomb)


def test_the_content_digest_leaves_out_place_alone() -> None:
    place: dict[str, Any] = {"task": 7, "pack": bytes(32), "pack_bytes": 200_000, "pack_offset": 1}
    place |= {"fingerprint": bytes(8)}
    for name, value in place.items():
        assert content_digest([replace(ROWS[0], **{name: value}), *ROWS[1:]]) == content_digest(ROWS)
    others: dict[str, Any] = {
        "file": "x",
        "offset_bytes": 1,
        "n_bytes": 1,
        "tensor": None,
        "dtype": "F16",
        "shape": None,
    }
    others |= {"row_start": 1, "n_rows": 1, "row_words": 1, "n_tensors": 0, "format": "opaque", "reason": "hole"}
    others |= {"digest": bytes(31) + b"x", "program": "lit", "stored_bytes": 1, "stored_digest": None}
    assert others.keys() | place.keys() == set(SCHEMA.names)
    digests = {content_digest([replace(ROWS[0], **{name: value}), *ROWS[1:]]) for name, value in others.items()}
    assert len(digests | {content_digest(ROWS)}) == len(others) + 1


def test_the_content_digest_is_pinned() -> None:
    assert content_digest(ROWS[:2]) == "ec4e6cd5fa16c7c8d85e136960bd235c9cd7567d5180d4c96aa9fb97ea76f38a"
    assert content_digest([]) == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_manifests_are_in_the_order_of_bytes() -> None:
    names = ["b", "a/b", "a", "\U0001f600", "\uffff", "a0"]
    ordered = Rows.of([replace(ROWS[0], file=name) for name in names]).ordered()
    assert [row.file for row in ordered] == ["a", "a/b", "a0", "b", "\uffff", "\U0001f600"]
