"""Archives as an attacker would write them: every digest is right, and what they say is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from blake3 import blake3

from operators.base import Stream
from operators.program import Literal, Node
from operators.record import pack_footer, pack_header, record_head
from operators.run import digest_of, encode
from operators.words import words_of
from pipeline.archive import FORMAT_KEY, manifest_key, snapshot_key
from pipeline.packs import pack_index, pack_key
from pipeline.parquet import content_digest, to_parquet
from pipeline.rows import Row
from pipeline.snapshots import FileEntry, Snapshot, Totals

ROW = Row("w.bin", 0, 1, None, None, None, 0, 1, 1, 0, "opaque", None, 0)
NO_DIGEST = "0" * 64


def record(program: Node, n_words: int, payloads: Sequence[bytes] = (), width_bits: int = 8) -> bytes:
    """Return a record of any program and payloads, whatever they give."""
    head = record_head(Stream(width_bits, n_words), program, bytes(32), [len(payload) for payload in payloads])
    return bytes(head) + b"".join(payloads)


def archive(rows: Iterable[tuple[Row, bytes]], manifest: bytes | None = None, **snapshot: object) -> dict[str, bytes]:
    """Return the objects of an archive of one pack and one snapshot.

    Parameters
    ----------
    rows : iterable of (Row, bytes)
        Segments in order, each with its record. What a row says of its record is filled in where it is None.
    manifest : bytes, optional
        In place of those rows.
    **snapshot
        Fields of the snapshot that are to say something else.
    """
    pack, placed = bytearray(pack_header()), []
    for row, data in rows:
        placed.append(
            replace(
                row,
                digest=row.digest or bytes(32),
                program=row.program or "raw",
                stored_digest=digest_of(data),
                stored_bytes=len(data) if row.stored_bytes is None else row.stored_bytes,
                pack_offset=len(pack) if row.pack_offset is None else row.pack_offset,
            )
        )
        pack += data
    index = pack_index(placed)
    pack += index + pack_footer(len(pack), len(index))
    digest = blake3(pack).digest()
    placed = [replace(row, pack=digest, pack_bytes=len(pack)) for row in placed]
    written = to_parquet(placed) if manifest is None else manifest
    entries = tuple(_entries(placed))
    committed = Snapshot(
        checkpoint="forged",
        seq=1,
        base=0,
        run=NO_DIGEST,
        recipe=NO_DIGEST,
        inventory=NO_DIGEST,
        writer="0",
        features=(),
        manifest=blake3(written).hexdigest(),
        manifest_bytes=len(written),
        content=content_digest(placed) if manifest is None else NO_DIGEST,
        files=entries,
        failures=(),
        totals=Totals(len(entries), 0, len(placed), sum(entry.n_bytes for entry in entries), 1, len(pack)),
        time="2026-01-01T00:00:00Z",
    )
    committed = replace(committed, **snapshot)  # type: ignore[arg-type]
    return {
        FORMAT_KEY: b"brevis archive, layout 0\n",
        pack_key(digest): bytes(pack),
        manifest_key(committed.manifest): written,
        snapshot_key("forged", 1): committed.to_json(),
    }


def _entries(rows: Iterable[Row]) -> Iterable[FileEntry]:
    for key, group in groupby(rows, lambda row: row.file):
        segments = list(group)
        digest = blake3()
        for row in segments:
            digest.update(row.n_bytes.to_bytes(8, "little") + (row.digest or b""))
        n_bytes = sum(row.n_bytes for row in segments)
        yield FileEntry(key, n_bytes, "tag", None, segments[0].format, segments[0].reason, digest.hexdigest())


def sound(data: bytes = b"sound", key: str = "w.bin") -> tuple[Row, bytes]:
    """Return a segment and a record that are right, under any key."""
    encoded = encode(Node(Literal("raw")), words_of(data, 8), digest_of(data))
    assert encoded is not None
    return replace(ROW, file=key, n_bytes=len(data), digest=digest_of(data)), bytes(encoded.record)


def objects_at(objects: Mapping[str, bytes], folder: str) -> None:
    """Write the objects below a folder."""
    for key, data in objects.items():
        path = Path(folder, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
