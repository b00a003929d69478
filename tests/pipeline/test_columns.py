"""Rows as columns are the rows that they are made of, however they are cut, taken, joined or sent."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import rows as rows_module
from pipeline.parquet import to_parquet
from pipeline.rows import Row, Rows, held_segments
from tests.pipeline.test_rows import ROWS, some_rows

ROW_LISTS = st.lists(some_rows(), max_size=8)


def row_order(row: Row) -> tuple[bytes, int]:
    """Sort key of a manifest: the bytes of the key, then the offset."""
    return row.file.encode("utf-8", "surrogateescape"), row.offset_bytes


@given(ROW_LISTS, ROW_LISTS, st.integers(0, 8), st.integers(0, 8))
def test_they_are_a_sequence_of_the_same_rows(first: list[Row], second: list[Row], start: int, stop: int) -> None:
    both, rows = first + second, Rows.joined((first, Rows.of(second)))
    assert list(rows) == both
    assert rows[start:stop] == both[start:stop]
    assert [rows[index] for index in range(len(rows))] == both
    assert list(pickle.loads(pickle.dumps(rows[start:stop]))) == both[start:stop]
    assert rows.ordered() == sorted(both, key=row_order)
    assert rows.where(row.n_bytes % 2 == 0 for row in both) == [row for row in both if row.n_bytes % 2 == 0]
    assert rows.of_files([row.file for row in first]) == [row for row in both if row.file in {r.file for r in first}]
    assert [row for _, group in rows.by("file", "task") for row in group] == both
    assert to_parquet(rows) == to_parquet(both)


def test_many_are_columns_in_another_process_too_and_only_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "FEW_ROWS", 4)
    rows = Rows.joined((ROWS[:50], ROWS[50:]))
    sent = pickle.loads(pickle.dumps(rows[40:60]))
    assert isinstance(sent, Rows)
    assert sent == ROWS[40:60]
    assert len(pickle.dumps(rows[40:60])) < len(pickle.dumps(rows))


def test_equal_records_are_new_once() -> None:
    rows = Rows.of([*ROWS, *ROWS[:7]])
    seen = set()
    wanted = []
    for row in rows:
        wanted.append((row.pack, row.pack_offset) not in seen)
        seen.add((row.pack, row.pack_offset))
    assert rows.have_new_records().tolist() == wanted
    assert rows.in_packs() == sorted(rows, key=lambda row: (row.pack or b"", row.pack_offset or 0, *row_order(row)))


def test_segments_are_held_as_they_come() -> None:
    segments = [row.segment for row in ROWS]
    held = held_segments(iter(segments))
    assert not isinstance(held, tuple)
    assert held == segments
    assert held[5:9] == segments[5:9]
    assert pickle.loads(pickle.dumps(held)) == tuple(segments)
