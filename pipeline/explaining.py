"""``explain``: the stored program of a tensor, and a search for it, done again from the archive alone.

A snapshot does not keep the settings of its search: it is done with those of this command, and finds another program
where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from operators.errors import NotFoundError, UsageError
from pipeline.archive import prior_key
from pipeline.commit import PRIOR_BYTES_MAX
from pipeline.encoder import search_segment
from pipeline.reading import ArchivedFile, Decoder, Tensors
from pipeline.rows import Row
from pipeline.snapshots import Snapshot
from pipeline.store import SourceStore
from synth.explain import explain
from synth.options import SearchOptions
from synth.prior import Prior


def explain_tensor(
    store: SourceStore, snapshot: Snapshot, files: Sequence[ArchivedFile], name: str, options: SearchOptions
) -> tuple[dict[str, Any], list[str]]:
    """Search the first segment of a tensor again, with the prior of its run; return JSON and lines.

    Parameters
    ----------
    store : SourceStore
    snapshot : Snapshot
    files : sequence of ArchivedFile
    name : str
        Of the tensor.
    options : SearchOptions
        Of this command: those of the snapshot are not kept.

    Raises
    ------
    UsageError
        No tensor, or several, of that name; or one without bytes.
    """
    found = Tensors(store, files).find(name)
    if not found.rows:
        raise UsageError("a tensor with bytes", "an empty one", name)
    row = found.rows[0]
    [(_, data)] = Decoder(store).segments([row])
    prior, origin = _prior(store, snapshot)
    told = explain(search_segment(row, data, options, prior))
    content = told.to_json() | {
        "tensor": found.tensor.name,
        "file": row.file,
        "stored_program": row.program,
        "stored_bytes": row.stored_bytes,
        "segment_bytes": row.n_bytes,
        "prior": origin,
    }
    lines = [
        *_heading(row, found.tensor.name),
        f"prior       {origin}",
        "settings    of this command",
        *told.text().splitlines(),
    ]
    return content, lines


def _prior(store: SourceStore, snapshot: Snapshot) -> tuple[Prior, str]:
    try:
        return Prior.load(store.get(prior_key(snapshot.run), max_bytes=PRIOR_BYTES_MAX)), f"of run {snapshot.run[:12]}"
    except NotFoundError:
        return Prior.shipped(), "shipped with the package; that of the run is gone"


def _heading(row: Row, tensor: str) -> list[str]:
    shared = "" if row.tensor is not None else ", in a segment that it shares with its neighbours"
    return [
        f"{row.file}: {tensor}{shared}",
        f"stored      {row.program}",
        f"            {row.stored_bytes or 0:,} of {row.n_bytes:,} bytes",
    ]
