"""An archive in a folder, decoded slowly, as `pipeline/ARCHIVE.md` says: nothing of ours is used.

::

    python -m tests.reference.decode ARCHIVE CHECKPOINT/SEQ TARGET
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import zstandard
from blake3 import blake3

from tests.reference.bits import need
from tests.reference.records import Book, decode_record

COLUMNS = [
    *("file", "offset_bytes", "n_bytes", "tensor", "dtype", "shape", "row_start", "n_rows", "row_words", "n_tensors"),
    *("format", "reason", "task", "digest", "program", "stored_bytes", "stored_digest"),
    *("pack", "pack_bytes", "pack_offset", "fingerprint"),
]
PLACE = {"task", "pack", "pack_bytes", "pack_offset", "fingerprint"}
SNAPSHOT = [
    *("layout_version", "features", "checkpoint", "seq", "base", "run", "recipe", "inventory", "writer", "manifest"),
    *("manifest_bytes", "content", "files", "failures", "totals", "time", "digest"),
]
Row = dict[str, Any]


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


class Pack:
    """An object of records; `books` are those that its records name, by number."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        need(data[:8] == b"BRVP" + bytes(4) and data[-4:] == b"BRVE", "no pack")
        start = int.from_bytes(data[-20:-12], "little")
        stop = start + int.from_bytes(data[-12:-4], "little")
        need(8 <= start <= stop <= len(data) - 20, "an index beyond the pack")
        self.index = rows_of(zstandard.ZstdDecompressor().decompress(data[start:stop]))
        self.books: dict[int, Book] = {}
        left = data[stop:-20]
        need(len(left) <= 1 << 20, "too many codebooks")
        while left:
            book = Book.take(left)
            need(self.books.setdefault(book.number, book).id == book.id, "two codebooks with one number")
            left = left[book.n_bytes :]


def rows_of(data: bytes) -> list[Row]:
    """Return the rows of a table, whose digest is in its footer."""
    file = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
    need(file.schema_arrow.names == COLUMNS, "other columns")
    rows = [row for batch in file.iter_batches() for row in batch.to_pylist()]
    need(digest(lines(rows, COLUMNS)) == file.metadata.metadata[b"brevis.rows"].decode(), "other rows")
    return rows


def lines(rows: list[Row], columns: list[str]) -> bytes:
    """Return the canonical JSON of the values of each row, a line each."""

    def plain(value: Any) -> Any:
        return value.hex() if isinstance(value, bytes) else value

    return b"".join(canonical([plain(row[name]) for name in columns]) + b"\n" for row in rows)


def escape(checkpoint: str) -> str:
    text = "".join(
        chr(byte) if re.fullmatch(rb"[A-Za-z0-9._-]", bytes([byte])) else f"%{byte:02X}"
        for byte in checkpoint.encode("utf-8", "surrogateescape")
    )
    return "%2E" + text[1:] if text.startswith(".") else text


def decode_archive(archive: Path, checkpoint: str, seq: int) -> dict[str, bytes]:
    """Return the files of a snapshot."""
    need((archive / "FORMAT").read_bytes() == b"brevis archive, layout 0\n", "no archive")
    snapshot = read_snapshot((archive / "snapshots" / escape(checkpoint) / f"{seq:08d}.json").read_bytes())
    need((snapshot["checkpoint"], snapshot["seq"]) == (checkpoint, seq), "a snapshot from elsewhere")
    manifest = (archive / "manifests" / f"{snapshot['manifest']}.parquet").read_bytes()
    need(len(manifest) == snapshot["manifest_bytes"], "a manifest of another size")
    need(digest(manifest) == snapshot["manifest"], "another manifest")
    rows = rows_of(manifest)
    need(rows == sorted(rows, key=lambda row: (row["file"].encode(), row["offset_bytes"])), "rows in another order")
    need(digest(lines(rows, [name for name in COLUMNS if name not in PLACE])) == snapshot["content"], "other content")
    packs: dict[bytes, Pack] = {}
    segments: dict[str, list[tuple[Row, bytes]]] = {}
    for row in rows:
        name = row["pack"].hex()
        if row["pack"] not in packs:
            data = (archive / "packs" / name[:2] / name).read_bytes()
            need(digest(data) == name and len(data) == row["pack_bytes"], "another pack")
            packs[row["pack"]] = Pack(data)
        segments.setdefault(row["file"], []).append((row, segment(row, packs[row["pack"]])))
    return {entry[0]: whole(entry, segments.get(entry[0], [])) for entry in snapshot["files"]}


def read_snapshot(data: bytes) -> dict[str, Any]:
    snapshot: dict[str, Any] = json.loads(data)
    need(sorted(snapshot) == sorted(SNAPSHOT), "other fields")
    need((snapshot["layout_version"], snapshot["features"]) == (0, []), "another layout")
    need(canonical(snapshot) + b"\n" == data, "another spelling")
    rest = {name: value for name, value in snapshot.items() if name != "digest"}
    need(digest(canonical(rest)) == snapshot["digest"], "another digest")
    return snapshot


def segment(row: Row, pack: Pack) -> bytes:
    record = pack.data[row["pack_offset"] :][: row["stored_bytes"]]
    need(blake3(record).digest() == row["stored_digest"], "another record")
    data = decode_record(record, pack.books)
    need(len(data) == row["n_bytes"] and blake3(data).digest() == row["digest"], "another segment")
    return data


def whole(entry: list[Any], segments: list[tuple[Row, bytes]]) -> bytes:
    """Return a file from its segments, which tile it."""
    _, n_bytes, _, _, _, _, wanted, *headers = entry
    need(len(headers) <= 1 and [] not in headers, "another entry")
    hasher, data = blake3(), b""
    for row, part in segments:
        need(row["offset_bytes"] == len(data), "a gap")
        hasher.update(len(part).to_bytes(8, "little") + row["digest"])
        data += part
    need(len(data) == n_bytes and hasher.hexdigest() == wanted, "another file")
    return data


def main(arguments: list[str]) -> None:
    archive, name, target = arguments
    checkpoint, _, seq = name.rpartition("/")
    for key, data in decode_archive(Path(archive), checkpoint, int(seq)).items():
        path = Path(target) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1:])
