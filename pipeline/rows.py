"""Rows: one schema for the plan, receipts, the index of a pack and the manifest. The only importer of pyarrow.

A row is a segment. The plan fills the columns that describe the source, a receipt the rest, the index of a
pack all that the pack itself does not say, and a manifest is the receipts in the order of files and offsets.

As bytes, rows are Parquet written with fixed settings, so that equal rows are equal bytes, with a checksum
on each page. Pages alone leave the footer unprotected (9 of 1,500 single-bit flips there changed values
silently), so a digest over all rows stands in the footer and is checked on every read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3

from operators.errors import ArchiveError, FormatError, LimitError
from operators.limits import RECORD_BYTES, SEGMENT_BYTES
from pipeline.segments.base import Segment
from pipeline.segments.header import RANK_MAX

GROUP_ROWS = 1 << 16
"""Rows of a Parquet row group: what is in memory beside the rows themselves while they are read or written."""
ROWS_MAX = 1 << 24
GROUP_BYTES_MAX = 1 << 29
GROUP_TEXT_BYTES_MAX = 1 << 29
"""Most bytes of the texts of a row group, each counted in every row that has it: a file holds it once."""
DIGEST_ROWS = 1 << 10
"""Rows that are hashed at once: their texts are in memory thrice then."""
OFFSET_BYTES_MAX = 1 << 62
"""Beyond any offset and size; two of them still add up within an int64."""
FOOTER_STRING_BYTES_MAX = 1 << 20
FOOTER_ITEMS_MAX = 1 << 20


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
_COLUMNS = tuple(field.name for field in fields(Row))
_TEXTS = {field.name for field in SCHEMA if field.type == pa.string()}
_SHAPE = _COLUMNS.index("shape")
"""The one list: any other column has a value per row."""
_PLACE = {"task", "pack", "pack_bytes", "pack_offset", "fingerprint"}
_ROWS_DIGEST = b"brevis.rows"


class _Digest:
    """Running digest over some columns of rows, one canonical JSON line each: the same on every machine."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._values = attrgetter(*columns)
        self._hash = blake3()
        self._encode = json.JSONEncoder(separators=(",", ":"), default=bytes.hex).encode

    def add(self, rows: Iterable[Row]) -> None:
        """Take the next rows."""
        encode, values = self._encode, self._values
        lines = (f"{encode(values(row))}\n" for row in rows)
        while some := "".join(islice(lines, DIGEST_ROWS)):
            self._hash.update(some.encode())

    def hex(self) -> str:
        """Return the digest of all rows so far."""
        return self._hash.hexdigest()


def content_digest(rows: Iterable[Row]) -> str:
    """Return the digest of what the rows say, without where it is stored: what "the same archive" means.

    Two runs over the same source with the same recipe have the same one, whatever ran them.

    Parameters
    ----------
    rows : iterable of Row
        In the order of files and offsets.
    """
    digest = _Digest(column for column in _COLUMNS if column not in _PLACE)
    for batch in _batches(rows):
        digest.add(batch)
    return digest.hex()


def row_order(row: Row) -> tuple[bytes, int]:
    """Sort key of a manifest: the bytes of the key, then the offset."""
    return row.file.encode("utf-8", "surrogateescape"), row.offset_bytes


def to_parquet(rows: Iterable[Row], *, compress: bool = True) -> bytes:
    """Return `rows` as bytes, the same for equal rows.

    Parameters
    ----------
    rows : iterable of Row
    compress : bool
        False for a caller who compresses the whole: one frame of all columns is smaller than a frame of each.

    Raises
    ------
    LimitError
        More rows than a reader takes.
    """
    sink, digest, n_rows = io.BytesIO(), _Digest(_COLUMNS), 0
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        version="2.6",
        data_page_version="1.0",
        compression="zstd" if compress else "none",
        compression_level=3 if compress else None,
        use_dictionary=sorted(_TEXTS) if compress else False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for batch in _batches(rows):
            n_rows += len(batch)
            if n_rows > ROWS_MAX:
                raise LimitError(f"at most {ROWS_MAX} segments", "more", "", "archive parts of the source separately")
            digest.add(batch)
            columns = [pa.array(map(attrgetter(field.name), batch), field.type) for field in SCHEMA]
            _refuse_wordy(sum(_text_bytes(column) for column in columns if column.type == pa.string()), "")
            writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=GROUP_ROWS)
        writer.add_key_value_metadata({_ROWS_DIGEST: digest.hex()})
    return sink.getvalue()


def from_parquet(data: bytes, where: str = "") -> list[Row]:
    """Return the rows that `to_parquet` wrote.

    Parameters
    ----------
    data : bytes
        Read, not kept.
    where : str
        Key of the object, for messages.

    Raises
    ------
    FormatError
        Damaged, of another schema, or with values that no segment has.
    LimitError
        Beyond the limits of a reader.
    """
    try:
        return list(_read(data, where))
    except ArchiveError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise FormatError("rows as Parquet", f"{type(error).__name__}: {str(error)[:200]}", where) from error


def packs_in(data: bytes, where: str = "", *, checked: bool) -> set[bytes]:
    """Return the packs that rows refer to, in memory for packs and one row group.

    Parameters
    ----------
    data : bytes
    where : str
        Key of the object, for messages.
    checked : bool
        The caller has checked the digest of `data`, so that one column is enough; else all of it is read and checked.

    Raises
    ------
    FormatError
        They cannot be read.
    """
    packs: set[bytes] = set()
    try:
        if not checked:
            return {row.pack for row in _read(data, where) if row.pack is not None}
        for batch in _opened(data).iter_batches(GROUP_ROWS, columns=["pack"], use_threads=False):
            packs.update(pack for pack in batch.column(0).unique().to_pylist() if pack is not None)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise FormatError("rows as Parquet", f"{type(error).__name__}: {str(error)[:200]}", where) from error
    return packs


def _opened(data: bytes, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        pa.BufferReader(data),
        **options,
        page_checksum_verification=True,
        thrift_string_size_limit=FOOTER_STRING_BYTES_MAX,
        thrift_container_size_limit=FOOTER_ITEMS_MAX,
    )


def _read(data: bytes, where: str) -> Iterator[Row]:
    file = _opened(data)
    if not file.schema_arrow.remove_metadata().equals(SCHEMA):
        raise FormatError(f"the columns {', '.join(_COLUMNS)}", f"{', '.join(file.schema_arrow.names)}", where)
    if file.metadata.num_rows > ROWS_MAX:
        raise LimitError(f"at most {ROWS_MAX} rows", f"{file.metadata.num_rows}", where)
    # Raises for damaged facts of the column, where asking for them alone would end the process. It holds one batch.
    file.scan_contents(columns=["shape"])
    file = _opened(data, metadata=file.metadata, read_dictionary=sorted(_TEXTS))
    digest, known = _Digest(_COLUMNS), dict[str, str]()
    for group in range(file.metadata.num_row_groups):
        facts = file.metadata.row_group(group)
        if facts.num_rows > GROUP_ROWS or facts.total_byte_size > GROUP_BYTES_MAX:
            raise LimitError(f"row groups of at most {GROUP_ROWS} rows", f"{facts.num_rows}", where)
        n_values = facts.column(_SHAPE).num_values
        if n_values > GROUP_ROWS * RANK_MAX:
            raise LimitError(f"at most {GROUP_ROWS * RANK_MAX} values in a row group", f"{n_values}", where)
        table = file.read_row_group(group, use_threads=False)
        wordy = {name: table.column(name).unify_dictionaries().combine_chunks() for name in _TEXTS}
        _refuse_wordy(sum(_text_bytes(array.dictionary, array.indices) for array in wordy.values()), where)
        columns: list[Any] = []
        for name in _COLUMNS:
            if name in _TEXTS:  # one object per distinct text, not per row
                distinct = [known.setdefault(text, text) for text in wordy[name].dictionary.to_pylist()]
                values = [None if at is None else distinct[at] for at in wordy[name].indices.to_pylist()]
            elif name == "shape":
                values = [None if shape is None else tuple(shape) for shape in table.column(name).to_pylist()]
            else:
                values = table.column(name).to_pylist()
            columns.append(values)
        rows = [Row(*values) for values in zip(*columns, strict=True)]
        digest.add(rows)
        _check(rows, where)
        yield from rows
    found = (file.metadata.metadata or {}).get(_ROWS_DIGEST, b"").decode("ascii", "replace")
    if found != digest.hex():
        raise FormatError(f"rows of the digest {digest.hex()}", found or "none", where)


def _text_bytes(texts: Any, indices: Any = None) -> int:
    """Return the bytes of all `texts`, or of those that `indices` take, without taking them."""
    n_bytes = pc.binary_length(texts).cast(pa.int64())
    total = pc.sum(n_bytes if indices is None else n_bytes.take(indices)).as_py()
    return total or 0


def _refuse_wordy(n_bytes: int, where: str) -> None:
    if n_bytes > GROUP_TEXT_BYTES_MAX:
        expected = f"names and other texts of at most {GROUP_TEXT_BYTES_MAX} bytes in {GROUP_ROWS} rows"
        raise LimitError(expected, f"{n_bytes}", where, "archive parts of the source separately")


def _check(rows: list[Row], where: str) -> None:
    """Refuse values that no segment has, before anybody computes with them."""
    for row in rows:
        stored_bytes, pack_offset = row.stored_bytes or 0, row.pack_offset or 0
        pack_bytes = OFFSET_BYTES_MAX if row.pack_bytes is None else row.pack_bytes
        if not (
            0 <= row.offset_bytes < OFFSET_BYTES_MAX
            and 0 < row.n_bytes <= SEGMENT_BYTES
            and min(row.row_start, row.n_rows, row.row_words, row.n_tensors, row.task) >= 0
            and (row.shape is None or (len(row.shape) <= RANK_MAX and min(row.shape, default=0) >= 0))
            and 0 <= stored_bytes <= RECORD_BYTES
            and 0 <= pack_offset
            and pack_offset + stored_bytes <= pack_bytes <= OFFSET_BYTES_MAX
        ):
            raise FormatError("a segment within its file and pack", f"{row}"[:400], where)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, GROUP_ROWS)):
        yield batch
