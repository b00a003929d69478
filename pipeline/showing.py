"""What ``info`` shows of a snapshot: from its manifest alone, and with ``-v`` from headers and indexes in packs too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.lint import lint_archived
from pipeline.reading import ArchivedFile, Decoder, archived_files, read_header
from pipeline.report import Report, printable
from pipeline.rows import Row
from pipeline.segments import tensors_of
from pipeline.snapshots import Snapshot
from pipeline.store import SourceStore


def show(
    store: SourceStore,
    snapshot: Snapshot,
    rows: Sequence[Row],
    include: Sequence[str],
    exclude: Sequence[str],
    report: Report,
) -> None:
    """Show files and their tensors; with ``-v`` the metadata of headers, and shards and tensors that an index lacks."""
    shown = []
    lines = [f"{snapshot.name}  {snapshot.time}  written by {snapshot.writer}"]
    for file in archived_files(snapshot, rows, include, exclude):
        content = _content(file)
        reason = f"  {file.entry.reason}" if file.entry.reason else ""
        stored = f"{content['stored_bytes']:>14,}"
        lines.append(f"{file.n_bytes:>16,} {stored}  {printable(file.entry.key)}  {file.entry.format}{reason}")
        if report.verbose and file.entry.headers:
            content["headers"] = dict(file.entry.headers)
            lines.append(f"{'':>31}    headers {printable(json.dumps(content['headers'], ensure_ascii=False))}")
        if report.verbose and file.entry.format == "safetensors":
            content["metadata"] = tensors_of(read_header(Decoder(store), file)).metadata
            lines.append(f"{'':>31}    metadata {printable(json.dumps(content['metadata'], ensure_ascii=False))}")
        lines += [_line(row) for row in file.rows if row.tensor is not None]
        shown.append(content)
    told: dict[str, Any] = {"snapshot": snapshot.name, "files": shown}
    if report.verbose:
        keys = {content["key"] for content in shown}
        findings = [found for found in lint_archived(store, archived_files(snapshot, rows)) if found.key in keys]
        lines += [f"warning: {printable(found.key)}: {found.reason}: {printable(found.detail)}" for found in findings]
        told["warnings"] = [{"key": found.key, "reason": found.reason, "detail": found.detail} for found in findings]
    report.give(told, lines)


def _content(file: ArchivedFile) -> dict[str, Any]:
    entry = file.entry
    return {
        "key": entry.key,
        "n_bytes": entry.n_bytes,
        "stored_bytes": sum(row.stored_bytes or 0 for row in file.rows),
        "format": entry.format,
        "reason": entry.reason,
        "digest": entry.digest,
        "segments": [
            {
                "tensor": row.tensor,
                "dtype": row.dtype,
                "shape": None if row.shape is None else list(row.shape),
                "offset_bytes": row.offset_bytes,
                "n_bytes": row.n_bytes,
                "stored_bytes": row.stored_bytes,
                "program": row.program,
            }
            for row in file.rows
        ],
    }


def _line(row: Row) -> str:
    name, shape = printable(row.tensor or ""), list(row.shape or ())
    return f"{row.n_bytes:>16,} {row.stored_bytes or 0:>14,}    {name}  {row.dtype} {shape}  {row.program}"
