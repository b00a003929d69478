"""``python -m tests.bench compare``: every recipe of ours beside every peer, on real checkpoints.

Three phases. Alone, in one process: recipes and the peers that are fast enough, in alternating turns. Alone,
through the command line: file to file with one and two workers. Two processes side by side: what is slow is
measured once, archives of the other recipes are made, and sizes are computed from published formats. Every row
is verified by a round trip, but for those that are computed. A peer that restores other bytes, fails or is not
installed stays in the tables as such.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zstandard

from tests.bench import ours, published
from tests.bench.peers import EVERY, ZIPNN, Peer
from tests.bench.report import cpu_seconds, machine
from tests.bench.roles import role_of
from tests.bench.sizes import Archived, archive, archive_file, dtype_of
from tests.checkpoints import ELEMENT_BITS, Tensor, path, read, write
from tests.processes import ROOT

NAMED = (
    "minilm-bf16", "minilm-f16", "minilm-f8", "minilm-f32", "mpnet-bf16", "mpnet-f8", "mpnet-f32", "wordllama-f16",
    "whisper-f16", "musicnn-msd-f32",
)  # fmt: skip
"""Checkpoints that the comparison is about."""
OTHERS = ("fracast-f32", "fracast-i8", "silero-f32", "musicnn-mtt-f32", "musicvgg-msd-f32", "musicvgg-mtt-f32")
"""Of the same kinds, and nothing was ever tuned to them."""
RESULTS = ROOT / "results"
FILE = RESULTS / "compare.json"
MOST_SECONDS = 120
"""A slow peer is left out where it would take longer for one file, unless ``--patient`` is given."""
COMPUTED: Mapping[str, tuple[str, Callable[[Mapping[str, Tensor]], int | None]]] = {
    "DFloat11": ("tensor", published.dfloat11_bytes),
    "Brevis, published": ("tensor", published.brevis_bytes),
}
"""Systems whose sizes follow from their format: name, unit, bytes of all tensors."""
AVX2_RECIPE = "portable"
AVX2_ENVIRONMENT = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+bmi,+bmi2,+fma,+lzcnt,+popcnt"}
FORCED = ", AVX2 forced"
WORKERS = (1, 2)
LARGE_BYTES = 40_000_000
"""Size from which a checkpoint is archived by two workers too."""
REPEATED = ("mpnet-bf16",)
COPIES = 8
TIMES = f" x{COPIES}"
FEW_SECONDS = 10


@dataclass
class Row:
    """One compressor on one file.

    Attributes
    ----------
    file : str
    n_bytes : int
    name : str
        Of the peer, or ``brevis RECIPE``.
    kind : {"ours", "peer", "computed", "paired"}
        Paired: a peer once more, in the turns of `on_avx2`.
    unit : {"file", "tensor", "segment"}
    settings, version : str
    size : int or None
        Bytes, in memory; those of an archive stand in `Results.archives`.
    compress_s, decompress_s : float or None
        CPU time: the median of `rounds` turns.
    rounds : int
    verified : bool
        What came back was compared, and equal.
    note : str
        Why there is no figure, or what is wrong.
    """

    file: str
    n_bytes: int
    name: str
    kind: str
    unit: str
    settings: str = ""
    version: str = ""
    size: int | None = None
    compress_s: float | None = None
    decompress_s: float | None = None
    rounds: int = 0
    verified: bool = False
    note: str = ""


@dataclass
class Results:
    """All of a run; ``results/compare.json``.

    Attributes
    ----------
    about : dict
        Machine, versions, date, command.
    rows : list of Row
    archives : list of dict
        Recipe, file, bytes stored and compared, and how it was checked.
    wall : list of dict
        File to file: command, workers, seconds, peak memory.
    roles : list of dict
        Bytes by file, role and dtype: source, ours, ZipNN by tensor.
    curves : list of dict
        Size against expansions.
    shares : list of dict
        Part of the search in the CPU time of large tensors, and what calibration took.
    missing : dict of str to str
        Peers that could not be used, and why.
    """

    about: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    archives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    wall: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    roles: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    curves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    shares: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    def save(self, file: Path = FILE) -> None:
        """Write the file anew."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        partial.replace(file)

    @staticmethod
    def load(file: Path = FILE) -> Results:
        """Read what `save` wrote."""
        content = json.loads(file.read_text("utf-8"))
        return Results(**{**content, "rows": [Row(**row) for row in content["rows"]]})

    def row(self, file: str, name: str) -> Row | None:
        """Return the row of a compressor on a file, if there is one."""
        return next((row for row in self.rows if (row.file, row.name) == (file, name)), None)


@dataclass(frozen=True)
class Choice:
    """What to measure.

    Attributes
    ----------
    files : sequence of str
    peers : sequence of Peer
    computed : sequence of str
    recipes : sequence of str
    quick : bool
        One turn, no slow peer, no command line.
    patient : bool
        No peer is too slow.
    reuse : Results or None
        An earlier run, whose slow rows are taken where version and settings are the same.
    """

    files: Sequence[str]
    peers: Sequence[Peer]
    computed: Sequence[str]
    recipes: Sequence[str]
    quick: bool = False
    patient: bool = False
    reuse: Results | None = None


def choose(
    files: Sequence[str] = (), peers: Sequence[str] = (), recipes: Sequence[str] = (), *, quick: bool = False,
    patient: bool = False, reuse: Results | None = None,
) -> Choice:  # fmt: skip
    """Return what the names select; nothing selects all.

    Raises
    ------
    ValueError
        A name is unknown.
    """
    known = {peer.name: peer for peer in EVERY}
    ships = list(ours.recipes())
    for wanted, names in ((peers, [*known, *COMPUTED]), (recipes, ships)):
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise ValueError(f"unknown: {unknown}; known: {names}")
    return Choice(
        files or (*NAMED, *OTHERS),
        [known[name] for name in peers or known if name in known],
        [name for name in peers or COMPUTED if name in COMPUTED],
        recipes or ships,
        quick,
        patient,
        reuse,
    )


# -- one compressor on one file -----------------------------------------------------------------


@dataclass
class Contest:
    """A compressor on a file, taking part in alternating turns.

    `compress` and `decompress` return CPU seconds; `check` compares what came back with the source.
    """

    row: Row
    compress: Callable[[], float]
    decompress: Callable[[], float]
    check: Callable[[], tuple[int, bool]]


def parts_of(peer: Peer, file: str) -> tuple[list[tuple[bytes, str]], int]:
    """Return what a peer is given of a file, each with its dtype, and the bytes that the rest of the file takes."""
    if peer.unit == "file":
        return [(path(file).read_bytes(), dtype_of(file))], 0
    tensors = [tensor for tensor in read(path(file)).values() if len(tensor.data)]
    return [(bytes(tensor.data), tensor.dtype) for tensor in tensors], header_bytes(file)


def header_bytes(file: str) -> int:
    """Return what the header of a checkpoint takes beside tensors that are coded one by one: zstd at its best."""
    with path(file).open("rb") as stream:
        length = stream.read(8)
        return len(zstandard.compress(length + stream.read(int.from_bytes(length, "little")), 19))


def of_peer(peer: Peer, file: str) -> Contest:
    """Return a peer's part in the turns."""
    parts, rest = parts_of(peer, file)
    packed: list[Any] = []
    back: list[Any] = []

    def compress() -> float:
        packed.clear()
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
        size = rest + sum(map(peer.size, packed))
        back.clear()
        return size, same

    n_bytes = path(file).stat().st_size
    row = Row(file, n_bytes, peer.name, "peer", peer.unit, peer.settings, peer.version)
    return Contest(row, compress, decompress, check)


def of_ours(checkpoint: ours.Checkpoint, file: str, recipe: str, *, verify: bool) -> Contest:
    """Return the part of a recipe of ours in the turns, with or without digests and decoding what was written."""
    records: list[ours.Record] = []
    targets: list[Any] = []

    def inside() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if verify else ours.unverified()

    def compress() -> float:
        with inside():
            seconds, found = cpu_seconds(lambda: ours.compress(checkpoint, verify=verify))
        records[:] = found
        return seconds

    def decompress() -> float:
        if len(targets) != len(records):
            targets[:] = ours.targets_of(records)
        with inside():
            seconds, _ = cpu_seconds(lambda: ours.decompress(records, targets))
        return seconds

    def check() -> tuple[int, bool]:
        view = memoryview(checkpoint.data)
        same = all(
            target.data == view[record.row.offset_bytes : record.row.segment.end_bytes]
            for record, target in zip(records, targets, strict=True)
        )
        return sum(len(record.data) for record in records), same

    settings = "verified" if verify else "unverified"
    name = f"brevis {recipe}" + (", verified" if verify else "")
    row = Row(file, len(checkpoint.data), name, "ours", "segment", settings)
    return Contest(row, compress, decompress, check)


def take_turns(contests: Sequence[Contest], rounds: int) -> list[Row]:
    """Let all compress and decompress in turn, `rounds` times after one that is not counted but verified."""
    taken: dict[int, list[tuple[float, float]]] = {index: [] for index in range(len(contests))}
    for turn in range(rounds + 1):
        for index, contest in enumerate(contests):
            row = contest.row
            if row.note:
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


# -- the run ------------------------------------------------------------------------------------


def measure(choice: Choice, say: Callable[[str], None] | None = None) -> Results:
    """Measure what was chosen; ``results/compare.json`` grows as rows come, so that a run may be cut short."""
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    about = {**machine(), "date": time.strftime("%Y-%m-%d"), "command": "make bench BENCH=compare"}
    results = Results(about)
    results.missing = {peer.name: why for peer in choice.peers if (why := peer.missing())}
    peers = [peer for peer in choice.peers if peer.name not in results.missing]
    started = time.monotonic()

    def keep(rows: Sequence[Row]) -> None:
        results.rows += rows
        results.save()
        for row in rows:
            percent = row.note or f"{100 * (row.size or 0) / row.n_bytes:.2f} %"
            speeds = [f"{row.n_bytes / 1e6 / s:,.0f} MB/s" for s in (row.compress_s, row.decompress_s) if s]
            say(f"{time.monotonic() - started:6.0f} s  {row.file:17} {row.name:28} {percent:12} {' '.join(speeds)}")

    fast = [peer for peer in peers if not peer.is_slow]
    for name in choice.recipes:  # kernels are loaded, compiled at worst, before anything is timed
        smallest = min(map(path, choice.files), key=lambda file: file.stat().st_size)
        ours.decompress(warm := ours.compress(ours.open_checkpoint(smallest, ours.recipes()[name]), verify=True),
                        ours.targets_of(warm))  # fmt: skip
    for file in choice.files:
        keep(_alternating(choice, results, fast, file))
    if not choice.quick:
        if AVX2_RECIPE in choice.recipes and ZIPNN in peers:
            keep(_forced([file for file in choice.files if dtype_of(file) in ("BF16", "F16")]))
        for file in choice.files:
            _file_to_file(choice, results, file)
            results.save()
            say(f"{time.monotonic() - started:6.0f} s  {file:17} file to file")
        results.curves = list(curves([file for file in CURVE_FILES if file in choice.files]))
    jobs = list(_jobs(choice, [peer for peer in peers if peer.is_slow]))
    for kept in [job for job in jobs if isinstance(job, Row)]:
        keep([kept])
    _in_background([job for job in jobs if not isinstance(job, Row)], results, keep)
    results.about["minutes"] = round((time.monotonic() - started) / 60, 1)
    results.save()
    return results


def _alternating(choice: Choice, results: Results, fast: Sequence[Peer], file: str) -> list[Row]:
    """Measure the fast ones on one file."""
    n_bytes = path(file).stat().st_size
    rounds = 1 if choice.quick else 7 if n_bytes < 5e6 else 5 if n_bytes < 50e6 else 3 if n_bytes < 300e6 else 2
    opened = {name: ours.open_checkpoint(path(file), ours.recipes()[name]) for name in choice.recipes}
    contests = [of_peer(peer, file) for peer in fast]
    for name, checkpoint in opened.items():
        contests += [of_ours(checkpoint, file, name, verify=verify) for verify in (False, True)]
    rows = take_turns(contests, rounds)
    for name, checkpoint in opened.items():
        share = ours.search_share(checkpoint)
        results.shares.append(
            {"file": file, "recipe": name, "share": share, "calibration_s": round(checkpoint.calibration_s, 3)}
        )
    first = next(iter(opened), None)
    if first is not None:
        results.roles += _roles(file, opened[first], [peer for peer in fast if peer.unit == "tensor"])
    return rows


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


def _forced(files: Sequence[str]) -> list[Row]:
    """Run `on_avx2` in one new process, for which the kernels are compiled anew."""
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, AVX2_ENVIRONMENT), ProcessPoolExecutor(1, mp_context=context) as pool:
        return [row for rows in pool.map(on_avx2, files) for row in rows]


def _roles(file: str, checkpoint: ours.Checkpoint, peers: Sequence[Peer]) -> Iterator[dict[str, Any]]:
    """Yield bytes by role and dtype of ours and of one peer that works tensor by tensor."""
    found: dict[tuple[str, str], dict[str, int]] = {}

    def add(tensor: str | None, dtype: str | None, **sizes: int) -> None:
        cell = found.setdefault((role_of(tensor), dtype or "bytes"), {})
        for key, size in sizes.items():
            cell[key] = cell.get(key, 0) + size

    with ours.unverified():
        for record in ours.compress(checkpoint, verify=False):
            add(record.row.tensor, record.row.dtype, source=record.row.n_bytes, brevis=len(record.data))
    for peer in peers[:1]:
        for name, tensor in read(path(file)).items():
            if len(tensor.data):
                packed = peer.compress(peer.prepare(bytes(tensor.data)), tensor.dtype)
                add(name, tensor.dtype, peer=peer.size(packed))
    for (role, dtype), sizes in sorted(found.items()):
        yield {"file": file, "role": role, "dtype": dtype, "peer_name": peers[0].name if peers else "", **sizes}


def _file_to_file(choice: Choice, results: Results, file: str) -> None:
    """Archive, verify, restore and compare through the command line, with the first recipe and each number of workers.

    A large checkpoint is repeated too, so that the time of a process can be told from that of bytes.
    """
    for recipe in choice.recipes[:1]:
        large = path(file).stat().st_size >= LARGE_BYTES
        for workers in WORKERS if large else WORKERS[:1]:
            archived = archive(file, "--config", recipe, "--workers", str(workers))
            results.wall += _wall_rows(recipe, workers, archived)
            if workers == WORKERS[0]:
                results.archives.append(_archive_row(file, recipe, archived))
        if file not in REPEATED:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            copies = Path(scratch, path(file).name)
            repeat(file, copies)
            for workers in WORKERS:
                options = ("--config", recipe, "--workers", str(workers))
                results.wall += _wall_rows(recipe, workers, archive_file(f"{file}{TIMES}", copies, *options))


def _wall_rows(recipe: str, workers: int, archived: Archived) -> Iterator[dict[str, Any]]:
    for command, finished in archived.finished.items():
        yield {
            "file": archived.name, "recipe": recipe, "command": command, "workers": workers,
            "n_bytes": archived.source_bytes, "wall_s": round(finished.wall_seconds, 3),
            "cpu_s": round(finished.cpu_seconds, 3), "peak_mib": round(finished.peak_bytes / (1 << 20), 1),
        }  # fmt: skip


def repeat(file: str, target: Path) -> None:
    """Write a checkpoint whose tensors are those of `file`, `COPIES` times, the rows turned so that none are equal."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in read(path(file)).items():
        words = np.frombuffer(tensor.data, f"<u{ELEMENT_BITS[tensor.dtype] // 8}").reshape(tensor.shape)
        for copy in range(COPIES):
            turned = np.roll(words, 7 * copy, 0) if words.ndim else words
            tensors[f"copy.{copy}.{name}"] = Tensor(tensor.dtype, tensor.shape, turned.tobytes())
    write(target, dict(sorted(tensors.items())))


def _archive_row(file: str, recipe: str, archived: Archived) -> dict[str, Any]:
    return {
        "file": file, "recipe": recipe, "n_bytes": archived.source_bytes, "stored": archived.stored_bytes,
        "packs": archived.pack_bytes, "compared": archived.compared_bytes,
    }  # fmt: skip


# -- side by side -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Work for one of two processes: a slow peer, an archive, or a computed size."""

    kind: str
    name: str
    file: str
    seconds: float

    def __call__(self) -> Any:
        """Do it: a `Row`, or what stands in `Results.archives`."""
        if self.kind == "peer":
            return once(next(peer for peer in EVERY if peer.name == self.name), self.file)
        if self.kind == "computed":
            return computed(self.name, self.file)
        return _archive_row(self.file, self.name, archive(self.file, "--config", self.name, "--workers", "1"))


def _jobs(choice: Choice, slow: Sequence[Peer]) -> Iterator[Job | Row]:
    """Yield what is left to do, or the row where it was done before or would take too long."""
    for file in choice.files:
        n_bytes = path(file).stat().st_size
        for peer in () if choice.quick else slow:
            old = choice.reuse.row(file, peer.name) if choice.reuse else None
            seconds = n_bytes / 1e6 / peer.mb_s
            if old is not None and (old.version, old.settings, old.verified) == (peer.version, peer.settings, True):
                yield old
            elif seconds > MOST_SECONDS and not choice.patient:
                row = Row(file, n_bytes, peer.name, "peer", peer.unit, peer.settings, peer.version)
                yield dataclasses.replace(row, note=f"not measured: about {seconds / 60:.0f} minutes, see --patient")
            else:
                yield Job("peer", peer.name, file, seconds)
        for name in choice.computed:
            yield Job("computed", name, file, 2 + n_bytes / 1e6 / 15)
        for name in () if choice.quick else choice.recipes[1:]:
            yield Job("archive", name, file, 6 + n_bytes / 1e6 / 100)


def _in_background(jobs: Sequence[Job], results: Results, keep: Callable[[Sequence[Row]], None]) -> None:
    """Do all jobs, the longest first, two at a time; few of them here, since a process takes seconds to start."""

    def done(outcome: Any) -> None:
        if isinstance(outcome, Row):
            keep([outcome])
        else:
            results.archives.append(outcome)
            results.save()

    if sum(job.seconds for job in jobs) < FEW_SECONDS:
        for job in jobs:
            done(job())
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=16) as pool:
        futures = {pool.submit(job): job for job in sorted(jobs, key=lambda job: -job.seconds)}
        for future in as_completed(futures):
            done(future.result())


# -- size against expansions --------------------------------------------------------------------

CURVE_FILES = ("minilm-bf16", "minilm-f32", "musicnn-msd-f32", "silero-f32")


def curves(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield, for each file and order, the estimated size at each budget, over some tensors of it."""
    from tests.bench import synthesis

    for file in files:
        yield from synthesis.size_curves(file)
