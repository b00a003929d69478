"""Rows: one schema for the plan, receipts, the index of a pack and the manifest; `parquet.py` has them as bytes.

A row is a segment. The plan fills the columns that describe the source, a receipt the rest, the index of a
pack all that the pack itself does not say, and a manifest is the receipts in the order of files and offsets.

A driver holds rows by the million, so it holds them as columns: `Rows` is a sequence that makes a `Row` when it is
asked for one. An object of Python for each row would take five times the memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain, groupby, islice, starmap
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.segments.base import Segment

BATCH_ROWS = 1 << 16
"""Most rows of a batch of columns, and of a row group of Parquet."""
OBJECT_ROWS = 1 << 10
"""Rows that are objects at once, while all are walked."""
MADE_ROWS = 1 << 13
"""Rows that are objects at once, while columns are made of them."""
FEW_ROWS = 64
"""So few take no less as columns."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A segment and, once it is stored, its record; the fields are the columns, in their order.

    Attributes
    ----------
    file : str
        Key of the source object, relative to the source.
    offset_bytes ... n_tensors
        As in `pipeline.segments.Segment`.
    format, reason : str, str or None
        As in `pipeline.segments.Layout`; the same in all rows of a file.
    task : int
        Ordinal of the task that stores the segment, in a plan and a receipt; 0 elsewhere.
    digest : bytes or None
        BLAKE3-256 of the bytes of the segment. None, like all that follow, in a plan.
    program : str or None
        The program of the record, as text.
    stored_bytes, stored_digest : int or None, bytes or None
        Size and BLAKE3-256 of the record.
    pack, pack_bytes, pack_offset : bytes or None, int or None, int or None
        Where the record is: BLAKE3-256 and size of the pack, and offset in it. Equal segments share a record.
    fingerprint : bytes or None
        Of a sample of the segment, as in `pipeline.sampling`; filled by the plan, None where it was not sampled.
    """

    file: str
    offset_bytes: int
    n_bytes: int
    tensor: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    row_start: int
    n_rows: int
    row_words: int
    n_tensors: int
    format: str
    reason: str | None
    task: int
    digest: bytes | None = None
    program: str | None = None
    stored_bytes: int | None = None
    stored_digest: bytes | None = None
    pack: bytes | None = None
    pack_bytes: int | None = None
    pack_offset: int | None = None
    fingerprint: bytes | None = None

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte of the file after the segment."""
        return self.offset_bytes + self.n_bytes

    @property
    def segment(self) -> Segment:
        """The columns of the source, without file."""
        return Segment(
            self.offset_bytes,
            self.n_bytes,
            self.tensor,
            self.dtype,
            self.shape,
            self.row_start,
            self.n_rows,
            self.row_words,
            self.n_tensors,
        )

    def with_digest(self, digest: bytes) -> Row:
        """Return this row with a digest, in half the time of `dataclasses.replace`: small tensors are many."""
        values = list(_values_of(self))
        values[_DIGEST_AT] = digest
        return Row(*values)

    @property
    def where(self) -> str:
        """``key@offset/tensor``, for messages."""
        return f"{self.file}@{self.offset_bytes}" + ("" if self.tensor is None else f"/{self.tensor}")


_DIGEST = pa.binary(32)
SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("offset_bytes", pa.int64(), nullable=False),
        pa.field("n_bytes", pa.int64(), nullable=False),
        pa.field("tensor", pa.string()),
        pa.field("dtype", pa.string()),
        pa.field("shape", pa.list_(pa.field("element", pa.int64(), nullable=False))),
        pa.field("row_start", pa.int64(), nullable=False),
        pa.field("n_rows", pa.int64(), nullable=False),
        pa.field("row_words", pa.int64(), nullable=False),
        pa.field("n_tensors", pa.int64(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("task", pa.int64(), nullable=False),
        pa.field("digest", _DIGEST),
        pa.field("program", pa.string()),
        pa.field("stored_bytes", pa.int64()),
        pa.field("stored_digest", _DIGEST),
        pa.field("pack", _DIGEST),
        pa.field("pack_bytes", pa.int64()),
        pa.field("pack_offset", pa.int64()),
        pa.field("fingerprint", pa.binary(8)),
    ]
)
COLUMNS = tuple(field.name for field in fields(Row))
_DIGEST_AT = COLUMNS.index("digest")
_values_of = attrgetter(*COLUMNS)
SEGMENT_COLUMNS = tuple(field.name for field in fields(Segment))
TEXTS = frozenset(field.name for field in SCHEMA if field.type == pa.string())
_FEW = TEXTS | {"pack"}
"""Columns with few values, or long ones: in memory each value is there once."""


class Rows(Sequence[Row]):
    """Rows as columns, some 150 bytes each; never changed.

    A slice shares the columns. Equal to any other sequence of the same rows.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        As `compact` makes them.
    part : (list of int, int, int), optional
        Of a slice, whose batches are the list of another: where each starts, its own first row and its end.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch] = (), part: tuple[list[int], int, int] | None = None) -> None:
        if part is not None and isinstance(batches, list):
            self._batches, (self._starts, self._begin, self._end) = batches, part
            return
        self._batches = [batch for batch in batches if batch.num_rows]
        self._starts = list(accumulate((batch.num_rows for batch in self._batches), initial=0))
        self._begin, self._end = 0, int(self._starts[-1])

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Rows:
        """Return `rows` as columns, themselves where they are that already."""
        return rows if isinstance(rows, Rows) else cls.of_values(COLUMNS, map(_values_of, rows))

    @classmethod
    def of_values(cls, columns: Sequence[str], values: Iterable[tuple[Any, ...]]) -> Rows:
        """Return rows of some columns, made of their values row by row."""
        return cls(compact(_arrays(columns, some), columns) for some in batched(values, MADE_ROWS))

    @classmethod
    def joined(cls, parts: Iterable[Iterable[Row]]) -> Rows:
        """Return the rows of all `parts`, one part after the other."""
        return cls(batch for part in parts for batch in cls.of(part).batches(BATCH_ROWS))

    def __len__(self) -> int:
        return self._end - self._begin

    def __iter__(self) -> Iterator[Row]:
        return starmap(Row, self.values(*COLUMNS))

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice without a step, not one of {step}")
            return Rows(self._batches, (self._starts, self._begin + start, self._begin + max(start, stop)))
        return Row(*self.at(index, *COLUMNS))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment] # as of a list

    def __reduce__(self) -> tuple[Any, ...]:
        if len(self) <= FEW_ROWS:
            return tuple, (list(self),)
        # Of columns that they share with others, no more travels than their own part.
        starts = range(0, len(self), BATCH_ROWS)
        own = [self._taken(np.arange(start, min(start + BATCH_ROWS, len(self)))) for start in starts]
        return Rows, (list(map(compact, own)),)

    def batches(self, n_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most so many rows; they share the columns."""
        place = self._begin
        while place < self._end:
            at = bisect_right(self._starts, place) - 1
            stop = min(self._starts[at + 1], self._end, place + n_rows)
            yield self._batches[at].slice(place - self._starts[at], stop - place)
            place = stop

    def values(self, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the values of some columns, row by row."""
        for batch in self.batches(OBJECT_ROWS):
            yield from zip(*(_values(batch.column(name)) for name in columns), strict=True)

    def at(self, index: int, *columns: str) -> tuple[Any, ...]:
        """Return the values of some columns of one row."""
        place = range(self._begin, self._end)[index]
        at = bisect_right(self._starts, place) - 1
        row = place - self._starts[at]
        values = (self._batches[at].column(name)[row].as_py() for name in columns)
        return tuple(tuple(value) if type(value) is list else value for value in values)

    def integers(self, column: str) -> NDArray[np.int64]:
        """Return a column of integers, 0 in place of None."""
        parts = [np.asarray(_filled(batch.column(column))) for batch in self.batches(BATCH_ROWS)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def is_none(self, column: str) -> NDArray[np.bool_]:
        """Tell for each row whether a column of integers has no value."""
        parts = [np.asarray(batch.column(column).is_null()) for batch in self.batches(BATCH_ROWS)]
        return np.concatenate([np.empty(0, np.bool_), *parts])

    def ranks(self, column: str, distinct: Sequence[Any] | None = None) -> NDArray[np.int64]:
        """Return for each row the place of its text or pack among `distinct` ones, by default all in their order.

        The order is that of bytes; what is not among them, and None, has the place -1.
        """
        found = [batch.column(column) for batch in self.batches(BATCH_ROWS)]
        if distinct is None:
            known = {value for part in found for value in part.unique().to_pylist() if value is not None}
            distinct = sorted(known, key=_bytes)
        places = {value: place for place, value in enumerate(distinct)}
        parts = [np.empty(0, np.int64)]
        for part in found:
            held = [*(places.get(value, -1) for value in part.dictionary.to_pylist()), -1]
            parts.append(np.array(held, np.int64)[np.asarray(part.indices.fill_null(len(held) - 1))])
        return np.concatenate(parts)

    def take(self, order: NDArray[np.int64]) -> Rows:
        """Return the rows of these places, in this order."""
        if order.size == len(self) and np.array_equal(order, np.arange(order.size)):
            return self
        starts = range(0, order.size, BATCH_ROWS)
        return Rows(compact(self._taken(order[start : start + BATCH_ROWS])) for start in starts)

    def where(self, wanted: Iterable[bool]) -> Rows:
        """Return the rows for which `wanted` has True."""
        return self.take(np.flatnonzero(np.fromiter(wanted, np.bool_, len(self))))

    def _taken(self, order: NDArray[np.int64]) -> list[Any]:
        """Return the plain columns of some rows, at least one; they may lie in any batches."""
        places = order + self._begin
        held_by = np.searchsorted(self._starts, places, "right") - 1
        tables, taken = [], []
        for at in np.unique(held_by).tolist():
            mine = np.flatnonzero(held_by == at)
            tables.append(plain(self._batches[at].take(pa.array(places[mine] - self._starts[at]))))
            taken.append(mine)
        back = np.argsort(np.concatenate(taken), kind="stable")
        table = pa.concat_tables(tables)
        if len(tables) > 1:
            table = table.take(pa.array(back))
        return [column.combine_chunks() for column in table.columns]

    def ordered(self) -> Rows:
        """Return the rows in the order of a manifest: of the bytes of the key, then of the offset."""
        return self.take(np.lexsort((self.integers("offset_bytes"), self.ranks("file"))))

    def in_packs(self) -> Rows:
        """Return the rows in the order of packs and of offsets in them, equal ones in that of a manifest."""
        keys = (self.integers("offset_bytes"), self.ranks("file"), self.integers("pack_offset"), self.ranks("pack"))
        return self.take(np.lexsort(keys))

    def of_files(self, files: Collection[str]) -> Rows:
        """Return the rows of these files."""
        return self.take(np.flatnonzero(self.ranks("file", list(files)) >= 0))

    def by(self, *columns: str) -> Iterator[tuple[tuple[Any, ...], Rows]]:
        """Yield the values of some columns with the neighbours that have them, as slices."""
        first = 0
        for values, group in groupby(self.values(*columns)):
            stop = first + sum(1 for _ in group)
            yield values, self[first:stop]
            first = stop

    def have_new_records(self) -> NDArray[np.bool_]:
        """Tell for each row whether none before it has the same record."""
        packs, offsets = self.ranks("pack"), self.integers("pack_offset")
        order = np.lexsort((offsets, packs))  # stable, so that the first comes first
        new = np.ones(len(self), np.bool_)
        new[order[1:]] = (np.diff(packs[order]) != 0) | (np.diff(offsets[order]) != 0)
        return new

    def with_task(self, task: int) -> Rows:
        """Return the rows with this ordinal in place of their own."""
        column = COLUMNS.index("task")
        return Rows(
            batch.set_column(column, "task", _compact("task", pa.repeat(pa.scalar(task, pa.int64()), len(batch))))
            for batch in self.batches(BATCH_ROWS)
        )


class View(Sequence[T], Generic[T]):
    """What is made of some columns of rows, when it is asked for; to another process it travels as a tuple.

    Parameters
    ----------
    rows : Rows
    columns : sequence of str
    make : callable
        Takes the values of the columns of a row.
    """

    __slots__ = ("_columns", "_make", "_rows")

    def __init__(self, rows: Rows, columns: Sequence[str], make: Callable[..., T]) -> None:
        self._rows, self._columns, self._make = rows, columns, make

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[T]:
        return starmap(self._make, self._rows.values(*self._columns))

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> View[T]: ...

    def __getitem__(self, index: int | slice) -> T | View[T]:
        if isinstance(index, slice):
            return View(self._rows[index], self._columns, self._make)
        return self._make(*self._rows.at(index, *self._columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)

    def integers(self, column: str) -> NDArray[np.int64]:
        """Return a column of integers."""
        return self._rows.integers(column)


def segments_of(rows: Rows) -> View[Segment]:
    """Return the segments of `rows`."""
    return View(rows, SEGMENT_COLUMNS, Segment)


class Span(NamedTuple):
    """Where a segment lies in its file."""

    offset_bytes: int
    n_bytes: int

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte after the segment."""
        return self.offset_bytes + self.n_bytes


def spans_of(rows: Sequence[Row]) -> Sequence[Row] | View[Span]:
    """Return what has the places of `rows`, without any more of them."""
    return View(rows, ("offset_bytes", "n_bytes"), Span) if isinstance(rows, Rows) else rows


def fingerprints_of(rows: Rows) -> View[bytes]:
    """Return the fingerprints of `rows` that all have one."""
    return View(rows, ("fingerprint",), bytes)


def held_segments(segments: Iterable[Segment]) -> Sequence[Segment]:
    """Return `segments` as columns, where they are many; few are objects at once."""
    if isinstance(segments, View):
        return segments
    coming = iter(segments)
    few = tuple(islice(coming, FEW_ROWS + 1))
    if len(few) <= FEW_ROWS:
        return few
    values = map(attrgetter(*SEGMENT_COLUMNS), chain(few, coming))
    return segments_of(Rows.of_values(SEGMENT_COLUMNS, values))


def held_fingerprints(fingerprints: Sequence[bytes]) -> Sequence[bytes]:
    """Return `fingerprints` as a column, where they are many."""
    if len(fingerprints) <= FEW_ROWS or isinstance(fingerprints, View):
        return fingerprints
    return fingerprints_of(Rows.of_values(("fingerprint",), zip(fingerprints, strict=True)))


def values_of(rows: Iterable[Row], *columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns, at least two, row by row."""
    return rows.values(*columns) if isinstance(rows, Rows) else map(attrgetter(*columns), rows)


def batched(items: Iterable[T], n_items: int) -> Iterator[list[T]]:
    """Yield lists of so many items, the last one of what is left."""
    iterator = iter(items)
    while batch := list(islice(iterator, n_items)):
        yield batch


# -- columns ------------------------------------------------------------------------------------


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Return the plain columns of at most `BATCH_ROWS` rows."""
    if isinstance(rows, Rows):
        return pa.concat_tables(map(plain, rows.batches(BATCH_ROWS))).combine_chunks()
    return pa.Table.from_arrays(_arrays(COLUMNS, list(map(_values_of, rows))), schema=SCHEMA)


def plain(batch: pa.RecordBatch) -> pa.Table:
    """Return a batch that `compact` made as the schema has it."""
    return pa.Table.from_arrays([_plain(batch.column(field.name), field.type) for field in SCHEMA], schema=SCHEMA)


def _plain(column: Any, kind: Any) -> Any:
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    return column.cast(kind) if column.type != kind else column


def compact(columns: Iterable[Any], names: Sequence[str] = COLUMNS) -> pa.RecordBatch:
    """Return columns of the schema as they are held in memory: narrow where their values allow it."""
    return pa.RecordBatch.from_arrays(list(map(_compact, names, columns)), names)


def _compact(name: str, column: Any) -> Any:
    if name in _FEW:
        return column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    if column.null_count == len(column):
        return pa.nulls(len(column))
    if column.type == pa.int64():
        most = pc.min_max(column).as_py()
        return column.cast(pa.int32()) if -(1 << 31) <= most["min"] and most["max"] < 1 << 31 else column
    return column


def _arrays(columns: Sequence[str], values: list[tuple[Any, ...]]) -> list[Any]:
    types = [SCHEMA.field(name).type for name in columns]
    return [pa.array(column, kind) for column, kind in zip(zip(*values, strict=True), types, strict=True)]


def _values(column: Any) -> list[Any]:
    """Return the values of a column; equal texts are one object where there are few."""
    if pa.types.is_dictionary(column.type):
        if len(column.dictionary) > len(column):
            return list(column.dictionary_decode().to_pylist())
        distinct = column.dictionary.to_pylist()
        return [None if place is None else distinct[place] for place in column.indices.to_pylist()]
    values = list(column.to_pylist())
    if pa.types.is_list(column.type):
        return [None if value is None else tuple(value) for value in values]
    return values


def _filled(column: Any) -> Any:
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64)
    return column.cast(pa.int64()).fill_null(0)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
