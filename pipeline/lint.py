"""Warnings about a set of files: an index of shards that names what is not there.

Nothing here decides what is archived, which is every object that is listed; see `pipeline.segments` for the
faults of single files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from operators.errors import DamageError, StoreError
from pipeline.plan import Finding
from pipeline.reading import ArchivedFile, range_of
from pipeline.segments.base import LayoutError
from pipeline.segments.header import Header
from pipeline.store import ObjectInfo, SourceStore

INDEX_BYTES_MAX = 64 << 20
HEADER_BYTES_MAX = 16 << 20
"""Headers beyond this are not read for a warning."""
NAMES_SHOWN = 40


def lint(files: Sequence[ObjectInfo], read: Callable[[ObjectInfo, int, int], bytes]) -> list[Finding]:
    """Return warnings about every ``*.index.json`` among `files`.

    Parameters
    ----------
    files : sequence of ObjectInfo
    read : callable
        ``read(info, offset_bytes, n_bytes)`` of the source.

    Returns
    -------
    list of Finding
        `index_missing_shards` names files, `index_missing_tensors` names tensors that their shard lacks.
        A file that cannot be read gives none: it will fail, or not, when it is archived.
    """
    known = {info.key: info for info in files}
    findings: list[Finding] = []
    for info in files:
        if info.key.endswith(".index.json") and 0 < info.n_bytes <= INDEX_BYTES_MAX:
            try:
                findings += _lint_index(info, known, read)
            except (DamageError, StoreError):
                continue
    return findings


def lint_archived(archive: SourceStore, files: Sequence[ArchivedFile]) -> list[Finding]:
    """Return what `lint` says of the files of a snapshot, all of them, as they are in the archive."""
    by_key = {file.entry.key: file for file in files}

    def read(info: ObjectInfo, offset: int, n_bytes: int) -> bytes:
        return range_of(archive, by_key[info.key], offset, offset + n_bytes)

    return lint([ObjectInfo(key, file.n_bytes, "") for key, file in by_key.items()], read)


def _lint_index(
    index: ObjectInfo, known: dict[str, ObjectInfo], read: Callable[[ObjectInfo, int, int], bytes]
) -> Iterator[Finding]:
    folder = index.key[: index.key.rfind("/") + 1]
    tensors: dict[str, set[str]] = {}
    for name, shard in _weight_map(read(index, 0, index.n_bytes)).items():
        if isinstance(shard, str):
            tensors.setdefault(shard, set()).add(name)
    missing = [shard for shard in sorted(tensors) if folder + shard not in known]
    if missing:
        yield Finding(index.key, "index_missing_shards", _names(missing))
    lacking = [
        name
        for shard in sorted(tensors.keys() - missing)
        for name in sorted(tensors[shard] - _tensor_names(known[folder + shard], read, tensors[shard]))
    ]
    if lacking:
        yield Finding(index.key, "index_missing_tensors", _names(lacking))


def _weight_map(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    names = content.get("weight_map") if isinstance(content, dict) else None
    return names if isinstance(names, dict) else {}


def _tensor_names(info: ObjectInfo, read: Callable[[ObjectInfo, int, int], bytes], unknown: Iterable[str]) -> set[str]:
    """Return the names in a shard; `unknown`, so that nothing is missed, where it has no header to look at."""
    if not info.key.endswith(".safetensors") or info.n_bytes < 8:
        return set(unknown)
    n_bytes = int.from_bytes(read(info, 0, 8), "little")
    if n_bytes > min(info.n_bytes - 8, HEADER_BYTES_MAX):
        return set(unknown)
    try:
        return {tensor.name for tensor in Header(read(info, 8, n_bytes))}
    except LayoutError:
        return set(unknown)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
