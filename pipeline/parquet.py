"""Rows as bytes: Parquet written with fixed settings, so that equal rows are equal bytes, with a checksum on each page.

Pages alone leave the footer unprotected (9 of 1,500 single-bit flips there changed values silently), so a digest over
all rows stands in the footer and is checked on every read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3

from operators.errors import FormatError, LimitError
from operators.limits import RECORD_BYTES, SEGMENT_BYTES
from pipeline.rows import BATCH_ROWS, COLUMNS, SCHEMA, TEXTS, Row, Rows, batched, compact, table_of, values_of
from pipeline.segments.header import RANK_MAX

GROUP_ROWS = BATCH_ROWS
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

_SHAPE = COLUMNS.index("shape")
"""The one list: any other column has a value per row."""
_PLACE = {"task", "pack", "pack_bytes", "pack_offset", "fingerprint"}
_ROWS_DIGEST = b"brevis.rows"


class _Digest:
    """Running digest over some columns of rows, one canonical JSON line each: the same on every machine."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._columns = tuple(columns)
        self._hash = blake3()
        self._encode = json.JSONEncoder(separators=(",", ":"), default=bytes.hex).encode

    def add(self, rows: Iterable[Row]) -> None:
        """Take the next rows."""
        encode = self._encode
        lines = (f"{encode(values)}\n" for values in values_of(rows, *self._columns))
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
    digest = _Digest(column for column in COLUMNS if column not in _PLACE)
    digest.add(rows)
    return digest.hex()


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
    sink, digest, n_rows = io.BytesIO(), _Digest(COLUMNS), 0
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        version="2.6",
        data_page_version="1.0",
        compression="zstd" if compress else "none",
        compression_level=3 if compress else None,
        use_dictionary=sorted(TEXTS) if compress else False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for group in _groups(rows):
            n_rows += len(group)
            if n_rows > ROWS_MAX:
                raise LimitError(f"at most {ROWS_MAX} segments", "more", "", "archive parts of the source separately")
            digest.add(group)
            table = table_of(group)
            _refuse_wordy(sum(_text_bytes(table.column(name).combine_chunks()) for name in TEXTS), "")
            writer.write_table(table, row_group_size=GROUP_ROWS)
        writer.add_key_value_metadata({_ROWS_DIGEST: digest.hex()})
    return sink.getvalue()


def from_parquet(data: bytes, where: str = "") -> Rows:
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
    with _parquet(where):
        return Rows.joined(_read(data, where))


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
    with _parquet(where):
        if not checked:
            read = (rows.values("pack", "task") for rows in _read(data, where))
            return {pack for values in read for pack, _ in values if pack is not None}
        for batch in _opened(data).iter_batches(GROUP_ROWS, columns=["pack"], use_threads=False):
            packs.update(pack for pack in batch.column(0).unique().to_pylist() if pack is not None)
    return packs


@contextmanager
def _parquet(where: str) -> Iterator[None]:
    """Say of what pyarrow refuses that it is no Parquet of rows."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise FormatError("rows as Parquet", f"{type(error).__name__}: {str(error)[:200]}", where) from error


def _groups(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    if isinstance(rows, Rows):
        return (rows[start : start + GROUP_ROWS] for start in range(0, len(rows), GROUP_ROWS))
    return batched(rows, GROUP_ROWS)


def _opened(data: bytes, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        pa.BufferReader(data),
        **options,
        page_checksum_verification=True,
        thrift_string_size_limit=FOOTER_STRING_BYTES_MAX,
        thrift_container_size_limit=FOOTER_ITEMS_MAX,
    )


def _read(data: bytes, where: str) -> Iterator[Rows]:
    """Yield the rows of each row group."""
    file = _opened(data)
    if not file.schema_arrow.remove_metadata().equals(SCHEMA):
        raise FormatError(f"the columns {', '.join(COLUMNS)}", f"{', '.join(file.schema_arrow.names)}", where)
    if file.metadata.num_rows > ROWS_MAX:
        raise LimitError(f"at most {ROWS_MAX} rows", f"{file.metadata.num_rows}", where)
    # Raises for damaged facts of the column, where asking for them alone would end the process. It holds one batch.
    file.scan_contents(columns=["shape"])
    file = _opened(data, metadata=file.metadata, read_dictionary=sorted(TEXTS))
    digest = _Digest(COLUMNS)
    for group in range(file.metadata.num_row_groups):
        facts = file.metadata.row_group(group)
        if facts.num_rows > GROUP_ROWS or facts.total_byte_size > GROUP_BYTES_MAX:
            raise LimitError(f"row groups of at most {GROUP_ROWS} rows", f"{facts.num_rows}", where)
        n_values = facts.column(_SHAPE).num_values
        if n_values > GROUP_ROWS * RANK_MAX:
            raise LimitError(f"at most {GROUP_ROWS * RANK_MAX} values in a row group", f"{n_values}", where)
        table = file.read_row_group(group, use_threads=False)
        columns = {name: table.column(name).unify_dictionaries().combine_chunks() for name in COLUMNS}
        _refuse_wordy(sum(_text_bytes(columns[name].dictionary, columns[name].indices) for name in TEXTS), where)
        rows = Rows([compact(columns.values())])
        digest.add(rows)
        _check(rows, columns["shape"], where)
        yield rows
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


def _check(rows: Rows, shapes: Any, where: str) -> None:
    """Refuse values that no segment has, before anybody computes with them."""
    of = {field.name: rows.integers(field.name) for field in SCHEMA if field.type == pa.int64()}
    stored_bytes, pack_offset = of["stored_bytes"], of["pack_offset"]
    pack_bytes = np.where(rows.is_none("pack_bytes"), OFFSET_BYTES_MAX, of["pack_bytes"])
    n_values = np.asarray(pc.list_value_length(shapes).fill_null(0))
    sizes = np.asarray(pc.list_flatten(shapes))
    negative = np.zeros(len(rows), np.bool_)
    negative[np.asarray(pc.list_parent_indices(shapes))[sizes < 0]] = True
    sound = (
        (of["offset_bytes"] >= 0)
        & (of["offset_bytes"] < OFFSET_BYTES_MAX)
        & (of["n_bytes"] > 0)
        & (of["n_bytes"] <= SEGMENT_BYTES)
        & np.all([of[name] >= 0 for name in ("row_start", "n_rows", "row_words", "n_tensors", "task")], axis=0)
        & (n_values <= RANK_MAX)
        & ~negative
        & (stored_bytes >= 0)
        & (stored_bytes <= RECORD_BYTES)
        & (pack_bytes >= 0)
        & (pack_bytes <= OFFSET_BYTES_MAX)
        & (pack_offset >= 0)
        & (pack_offset <= pack_bytes - stored_bytes)
    )
    if not sound.all():
        raise FormatError("a segment within its file and pack", f"{rows[int(sound.argmin())]}"[:400], where)
