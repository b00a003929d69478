"""``python -m tests.bench compare``: every recipe of ours beside every peer, on real checkpoints.

Three phases. Alone, in one process: recipes and the peers that are fast enough, in alternating turns. Alone,
through the command line: file to file with one and two workers. Two processes side by side: what is slow is
measured once, archives of the other recipes are made, and sizes are computed from published formats. Every row
is verified by a round trip, but for those that are computed. A peer that restores other bytes, fails or is not
installed stays in the tables as such.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.bench import ours, synthesis
from tests.bench.aside import Job, in_background
from tests.bench.contests import AVX2_ENVIRONMENT, AVX2_RECIPE, COMPUTED, of_ours, of_peer, on_avx2, take_turns
from tests.bench.peers import EVERY, ZIPNN, Peer
from tests.bench.report import machine
from tests.bench.results import Results, Row
from tests.bench.roles import role_of
from tests.bench.sizes import dtype_of
from tests.bench.walls import file_to_file
from tests.checkpoints import path, read

NAMED = (
    "minilm-bf16", "minilm-f16", "minilm-f8", "minilm-f32", "mpnet-bf16", "mpnet-f8", "mpnet-f32", "wordllama-f16",
    "whisper-f16", "musicnn-msd-f32",
)  # fmt: skip
"""Checkpoints that the comparison is about."""
OTHERS = ("fracast-f32", "fracast-i8", "silero-f32", "musicnn-mtt-f32", "musicvgg-msd-f32", "musicvgg-mtt-f32")
"""Of the same kinds, and nothing was ever tuned to them."""
MOST_SECONDS = 120
"""A slow peer is left out where it would take longer for one file, unless ``--patience`` says more."""
CURVE_FILES = ("minilm-bf16", "minilm-f32", "musicnn-msd-f32", "silero-f32")


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
    patience_s : float
        Seconds that a slow peer may take for one file.
    reuse : Results or None
        An earlier run, whose slow rows are taken where version and settings are the same.
    """

    files: Sequence[str]
    peers: Sequence[Peer]
    computed: Sequence[str]
    recipes: Sequence[str]
    quick: bool = False
    patience_s: float = MOST_SECONDS
    reuse: Results | None = None


def choose(
    files: Sequence[str] = (), peers: Sequence[str] = (), recipes: Sequence[str] = (), *, quick: bool = False,
    patience_s: float = MOST_SECONDS, reuse: Results | None = None,
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
        patience_s,
        reuse,
    )


def measure(choice: Choice, say: Callable[[str], None] | None = None) -> Results:
    """Measure what was chosen; ``results/compare.json`` grows as rows come, so that a run may be cut short."""
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    command = " ".join(["python -m tests.bench", *sys.argv[1:]])
    about = {**machine(), "date": time.strftime("%Y-%m-%d"), "command": command}
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
    smallest = min(map(path, choice.files), key=lambda file: file.stat().st_size)
    for name in choice.recipes:
        ours.warm_up(smallest, ours.recipes()[name])
    for file in choice.files:
        keep(_alternating(choice, results, fast, file))
    if not choice.quick:
        if AVX2_RECIPE in choice.recipes and ZIPNN in peers:
            keep(_forced([file for file in choice.files if dtype_of(file) in ("BF16", "F16")]))
        for file in choice.files:
            file_to_file(results, file, choice.recipes[0])
            results.save()
            say(f"{time.monotonic() - started:6.0f} s  {file:17} file to file")
        results.curves = list(curves([file for file in CURVE_FILES if file in choice.files]))
    jobs = list(_jobs(choice, [peer for peer in peers if peer.is_slow]))
    for kept in [job for job in jobs if isinstance(job, Row)]:
        keep([kept])
    in_background([job for job in jobs if not isinstance(job, Row)], results, keep)
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


def _jobs(choice: Choice, slow: Sequence[Peer]) -> Iterator[Job | Row]:
    """Yield what is left to do, or the row where it was done before or would take too long."""
    for file in choice.files:
        n_bytes = path(file).stat().st_size
        for peer in () if choice.quick else slow:
            old = choice.reuse.row(file, peer.name) if choice.reuse else None
            seconds = n_bytes / 1e6 / peer.mb_s
            if old is not None and (old.version, old.settings, old.verified) == (peer.version, peer.settings, True):
                yield old
            elif seconds > choice.patience_s:
                row = Row(file, n_bytes, peer.name, "peer", peer.unit, peer.settings, peer.version)
                yield dataclasses.replace(row, note=f"not measured: about {seconds / 60:.0f} minutes, see --patience")
            else:
                yield Job("peer", peer.name, file, seconds)
        for name in choice.computed:
            yield Job("computed", name, file, 2 + n_bytes / 1e6 / 15)
        for name in () if choice.quick else choice.recipes[1:]:
            yield Job("archive", name, file, 6 + n_bytes / 1e6 / 100)


def curves(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield, for each file and order, the estimated size at each budget, over some tensors of it."""
    for file in files:
        yield from synthesis.size_curves(file)
