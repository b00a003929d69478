"""One compressor on one file: it takes part in alternating turns, is measured once, or its size is computed."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import zstandard

from tests.bench import ours, published
from tests.bench.peers import ZIPNN, Peer
from tests.bench.report import cpu_seconds
from tests.bench.results import Row
from tests.bench.sizes import dtype_of
from tests.checkpoints import Tensor, path, read

COMPUTED: Mapping[str, tuple[str, Callable[[Mapping[str, Tensor]], int | None]]] = {
    "DFloat11": ("tensor", published.dfloat11_bytes),
    "Brevis language": ("tensor", published.brevis_bytes),
}
"""Systems whose sizes follow from their format: name, unit, bytes of all tensors."""
LONG_SECONDS = 10.0
POISON = 0xA5
AVX2_RECIPE = "portable"
AVX2_ENVIRONMENT = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+bmi,+bmi2,+fma,+lzcnt,+popcnt"}
FORCED = ", AVX2 forced"


@dataclass
class Contest:
    """A compressor on a file, taking part in alternating turns.

    `compress` and `decompress` return CPU seconds; `check` compares what came back with the source; `release` frees
    what the turn has made.
    """

    row: Row
    compress: Callable[[], float]
    decompress: Callable[[], float]
    check: Callable[[], tuple[int, bool]]
    release: Callable[[], None]


@lru_cache(maxsize=2)
def parts_of(unit: str, file: str) -> tuple[list[tuple[bytes, str]], int]:
    """Return what peers are given of a file, each with its dtype, and the bytes that the rest of the file takes."""
    if unit == "file":
        return [(ours.content_of(path(file)), dtype_of(file))], 0
    tensors = [tensor for tensor in read(path(file)).values() if len(tensor.data)]
    return [(bytes(tensor.data), tensor.dtype) for tensor in tensors], header_bytes(file)


def header_bytes(file: str) -> int:
    """Return what the header of a checkpoint takes beside tensors that are coded one by one: zstd at its best."""
    with path(file).open("rb") as stream:
        length = stream.read(8)
        return len(zstandard.compress(length + stream.read(int.from_bytes(length, "little")), 19))


def of_peer(peer: Peer, file: str) -> Contest:
    """Return a peer's part in the turns."""
    parts, rest = parts_of(peer.unit, file)
    packed: list[Any] = []
    back: list[Any] = []

    def compress() -> float:
        seconds = 0.0
        for data, dtype in parts:
            argument = peer.prepare(data)
            taken, one = cpu_seconds(lambda argument=argument, dtype=dtype: peer.compress(argument, dtype))  # type: ignore[misc]
            packed.append(one)
            seconds += taken
        return seconds

    def decompress() -> float:
        seconds, found = cpu_seconds(
            lambda: [peer.decompress(one, dtype) for one, (_, dtype) in zip(packed, parts, strict=True)]
        )
        back[:] = found
        return seconds

    def check() -> tuple[int, bool]:
        same = all(peer.content(one) == data for one, (data, _) in zip(back, parts, strict=True))
        return rest + sum(map(peer.size, packed)), same

    def release() -> None:
        packed.clear()
        back.clear()

    n_bytes = path(file).stat().st_size
    row = Row(file, n_bytes, peer.name, "peer", peer.unit, peer.settings, peer.version)
    return Contest(row, compress, decompress, check, release)


def of_ours(checkpoint: ours.Checkpoint, file: str, recipe: str, *, verify: bool) -> Contest:
    """Return the part of a recipe of ours in the turns, with or without digests and decoding what was written."""
    records: list[ours.Record] = []

    def inside() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if verify else ours.unverified()

    def compress() -> float:
        with inside():
            seconds, found = cpu_seconds(lambda: ours.compress(checkpoint, verify=verify))
        records[:] = found
        return seconds

    def decompress() -> float:
        targets = ours.targets_of(records)
        with inside():
            seconds, _ = cpu_seconds(lambda: ours.decompress(records, targets))
        return seconds

    def check() -> tuple[int, bool]:
        view = memoryview(checkpoint.data)
        same = all(
            target.data == view[record.row.offset_bytes : record.row.end_bytes]
            for record, target in zip(records, ours.targets_of(records), strict=True)
        )
        for target in ours.targets_of(records):
            target.fill(POISON)  # the next to decompress must write every byte
        return sum(len(record.data) for record in records), same

    settings = "verified" if verify else "unverified"
    name = f"brevis {recipe}" + (", verified" if verify else "")
    row = Row(file, len(checkpoint.data), name, "ours", "segment", settings)
    return Contest(row, compress, decompress, check, records.clear)


def take_turns(contests: Sequence[Contest], rounds: int) -> list[Row]:
    """Let all compress and decompress in turn, `rounds` times after one that is not counted but verified.

    Whoever takes longer than `LONG_SECONDS` has fewer turns, but one.
    """
    taken: dict[int, list[tuple[float, float]]] = {index: [] for index in range(len(contests))}
    for turn in range(rounds + 1):
        for index, contest in enumerate(contests):
            row = contest.row
            if row.note or sum(map(sum, taken[index])) > LONG_SECONDS:
                continue
            try:
                times = contest.compress(), contest.decompress()
                if turn == 0:
                    row.size, row.verified = contest.check()
                    row.note = "" if row.verified else "RESTORES OTHER BYTES"
                else:
                    taken[index].append(times)
            except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
                row.note = f"fails: {type(error).__name__}: {str(error)[:120]}"
            contest.release()
    for index, contest in enumerate(contests):
        if taken[index] and contest.row.verified:
            contest.row.compress_s, contest.row.decompress_s = map(statistics.median, zip(*taken[index], strict=True))
            contest.row.rounds = len(taken[index])
    return [contest.row for contest in contests]


def once(peer: Peer, file: str) -> Row:
    """Measure a slow peer: one compression, one decompression."""
    warm = of_peer(peer, "fracast-i8")
    with contextlib.suppress(Exception):  # imports and tables of a first call are not the file's
        warm.compress()
        warm.decompress()
    contest = of_peer(peer, file)
    row = contest.row
    try:
        times = contest.compress(), contest.decompress()
        row.size, row.verified = contest.check()
        if row.verified:
            row.compress_s, row.decompress_s, row.rounds = *times, 1
        else:
            row.note = "RESTORES OTHER BYTES"
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
        row.note = f"fails: {type(error).__name__}: {str(error)[:120]}"
    return row


def computed(name: str, file: str) -> Row:
    """Return the row of a published format, its size computed."""
    unit, size_of = COMPUTED[name]
    tensors = read(path(file))
    n_bytes = path(file).stat().st_size
    row = Row(file, n_bytes, name, "computed", unit, "computed from its format", "")
    size = size_of(tensors)
    if size is None:
        row.note = "BF16 only"
    else:
        row.size = size + header_bytes(file)
    return row


def on_avx2(file: str) -> list[Row]:
    """Let the portable recipe and ZipNN take turns in a process whose kernels know no more than AVX2."""
    contests = [of_peer(ZIPNN, file)]
    contests[0].row.kind = "paired"
    opened = ours.open_checkpoint(path(file), ours.recipes()[AVX2_RECIPE])
    contests += [of_ours(opened, file, AVX2_RECIPE, verify=verify) for verify in (False, True)]
    rows = take_turns(contests, 3)
    for row in rows:
        row.name += FORCED
    return rows
