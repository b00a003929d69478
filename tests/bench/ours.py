"""One checkpoint through the encoder and the decoder of the pipeline, in memory, in one thread.

The same plan, prior, encoder and interpreter as those of a task of `brevis archive` and of a restore; what is
left out is reading, writing packs, and the commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import operators.run
from configs.recipe import Recipe, load
from operators.limits import SEGMENT_BYTES
from operators.run import digest_of, execute
from operators.words import Bytes
from pipeline.calibration import learn_prior
from pipeline.encoder import Encoder, record_room
from pipeline.locations import open_source
from pipeline.plan import make_plan
from pipeline.rows import Row
from pipeline.segments import layout_of
from synth.options import SearchOptions
from synth.prior import Prior
from synth.roles import Roles
from tests.bench.report import cpu_seconds
from tests.processes import ROOT

LARGE_BYTES = 16 << 20
"""A tensor from which the search has to be a small part of its compression."""
WITHOUT_EFFECT: Mapping[str, Any] = {"budget": 0, "min_gain_ppm": 0}
"""Options that calibration does not look at."""
_LEARNED: dict[tuple[Path, SearchOptions], tuple[float, Prior]] = {}


@dataclass(frozen=True, slots=True)
class Record:
    """A stored segment: its row and its record."""

    row: Row
    data: Bytes


@dataclass(frozen=True)
class Checkpoint:
    """A file as a run has planned it, its bytes in memory.

    Attributes
    ----------
    segments : list of list of (Row, memoryview)
        One list for each task.
    data : bytes
        The whole file.
    prior : Prior
        What the run orders its searches by.
    recipe : Recipe
    calibration_s : float
        CPU time that the prior took.
    """

    segments: list[list[tuple[Row, memoryview]]]
    data: bytes
    prior: Prior
    recipe: Recipe
    calibration_s: float


def recipes() -> dict[str, Recipe]:
    """Return the recipes that ship, by name: every file of ``configs/`` that can be loaded, `default` first."""
    names = sorted(
        (file.stem for file in (ROOT / "configs").glob("*.toml")), key=lambda name: (name != "default", name)
    )
    found: dict[str, Recipe] = {}
    for name in names:
        recipe = load(name).recipe
        if recipe not in found.values():  # some profiles differ in what cannot change a byte
            found[name] = recipe
    return found


@lru_cache(maxsize=1)
def content_of(file: Path) -> bytes:
    """Return the bytes of a file, the same ones to all who ask for it in turn."""
    return file.read_bytes()


def open_checkpoint(file: Path, recipe: Recipe) -> Checkpoint:
    """Plan a file as a run of `recipe` does, learn its prior, and read all of it."""
    source = open_source(str(file))
    (info,) = source.list()
    data = content_of(file)
    layout = layout_of(lambda offset, n_bytes: data[offset : offset + n_bytes], info.key, info.n_bytes)
    plan = make_plan([info], [layout], recipe.task_bytes, {})
    base = Prior.uniform() if recipe.synth.prior == "uniform" else Prior.shipped()
    calibration_s, prior = 0.0, base
    if recipe.synth.prior == "learned":
        same = replace(recipe.synth, **WITHOUT_EFFECT)  # recipes that differ in these alone learn the same prior
        if (file, same) not in _LEARNED:
            _LEARNED[file, same] = cpu_seconds(lambda: learn_prior(source, plan, recipe.synth, base))
        calibration_s, prior = _LEARNED[file, same]
    view = memoryview(data)
    segments = [[(row, view[row.offset_bytes : row.end_bytes]) for row in task.rows()] for task in plan.tasks]
    return Checkpoint(segments, data, prior, recipe, calibration_s)


class _Trusting(Encoder):
    """An encoder that does not decode what it has written."""

    def _restores(self, *_: Any, **__: Any) -> bool:
        return True


class _NoHash:
    """Stands where BLAKE3 does while verification is off: every digest is zero."""

    def __init__(self, data: Any = b"") -> None:
        pass

    def update(self, data: Any) -> None:
        """Look at nothing."""

    def digest(self) -> bytes:
        """Return zero."""
        return bytes(32)

    def hexdigest(self) -> str:
        """Return zero."""
        return bytes(32).hex()


@contextlib.contextmanager
def unverified() -> Iterator[None]:
    """Neither make nor check digests inside: what no other compressor of the comparison does."""
    with mock.patch.object(operators.run, "blake3", _NoHash):
        yield


def compress(checkpoint: Checkpoint, *, verify: bool) -> list[Record]:
    """Search, encode and, with `verify`, hash, decode and compare every segment.

    Segments with the bytes of an earlier one of their task share its record where digests tell. Records lie in memory
    that is used again in the next turn, as those of a task are written to its pack.
    """
    store, end = _written(len(checkpoint.data)), 0
    first = store.ctypes.data
    encoder = (Encoder if verify else _Trusting)(checkpoint.recipe.synth, checkpoint.prior)
    records = []
    for task in checkpoint.segments:
        encoder.start()
        known: dict[bytes, Record] = {}
        for row, data in task:
            digest = digest_of(data)
            if verify and digest in known:
                records.append(Record(row.with_digest(digest), known[digest].data))
                continue
            row = row.with_digest(digest)
            encoded, _ = encoder.record(row, data, store[end : end + record_room(len(data))])
            made = np.frombuffer(encoded.record, np.uint8)
            if not np.may_share_memory(made, store):
                made = store[end : end + made.size]
                made[:] = np.frombuffer(encoded.record, np.uint8)
            end = made.ctypes.data + made.size - first
            record = known[digest] = Record(row, made.data)
            records.append(record)
        assert encoder.alarms == [], encoder.alarms
    return records


@lru_cache(maxsize=1)
def _written(n_bytes: int) -> NDArray[np.uint8]:
    """Return the memory for the records of a file of `n_bytes`."""
    return np.zeros(n_bytes + n_bytes // 4 + record_room(SEGMENT_BYTES), np.uint8)


def warm_up(file: Path, recipe: Recipe) -> None:
    """Go through a checkpoint once, untimed: kernels are loaded, compiled at worst."""
    records = compress(open_checkpoint(file, recipe), verify=True)
    decompress(records, targets_of(records))
    _LEARNED.clear()


def targets_of(records: Sequence[Record]) -> list[NDArray[np.uint8]]:
    """Return the memory of a caller of `decompress`: an aligned buffer for each segment, the same in each turn."""
    sizes = tuple(record.row.n_bytes for record in records)
    return list(_memory(sizes))


@lru_cache(maxsize=1)
def _memory(sizes: tuple[int, ...]) -> tuple[NDArray[np.uint8], ...]:
    starts = list(accumulate((-(-size // 64) * 64 for size in sizes), initial=0))
    memory = np.zeros(starts[-1] + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    return tuple(memory[start : start + size] for start, size in zip(starts, sizes, strict=False))


def decompress(records: Sequence[Record], targets: Sequence[NDArray[np.uint8]]) -> None:
    """Restore every segment into its target."""
    for record, target in zip(records, targets, strict=True):
        execute(record.data, n_bytes=record.row.n_bytes, digest=record.row.digest, out=target)


def search_share(checkpoint: Checkpoint) -> float | None:
    """Return the part of the CPU time of compressing tensors of `LARGE_BYTES` and up that choosing programs takes.

    Searches, and recalling programs that calibration or an earlier tensor has found. None where there is no such
    tensor. Verification is off, so that the part is as large as it can be.
    """
    large: dict[tuple[str, str], list[tuple[Row, memoryview]]] = {}
    for row, data in (pair for task in checkpoint.segments for pair in task):
        if row.tensor is not None:
            large.setdefault((row.file, row.tensor), []).append((row, data))
    large = {key: rows for key, rows in large.items() if sum(row.n_bytes for row, _ in rows) >= LARGE_BYTES}
    if not large:
        return None
    only = replace(checkpoint, segments=list(large.values()))
    chosen_s: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seconds, result = cpu_seconds(lambda: method(*args))
            chosen_s.append(seconds)
            return result

        return run

    with (
        unverified(),
        mock.patch.object(Roles, "search", timed(Roles.search)),
        mock.patch.object(Roles, "recall", timed(Roles.recall)),
    ):
        total, _ = cpu_seconds(lambda: compress(only, verify=False))
    return sum(chosen_s) / total
