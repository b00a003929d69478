"""Tables over the rows of a comparison. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tests.bench.compare import OTHERS
from tests.bench.contests import FORCED
from tests.bench.peers import ALONE_MB_S
from tests.bench.report import Table
from tests.bench.results import Results, Row
from tests.bench.walls import REPEATED, TIMES, WORKERS

ZIPNN, ZIPNN_BY_TENSOR = "ZipNN", "ZipNN by tensor"
SMALL_NETS = ("fracast", "silero", "musicnn", "musicvgg")
"""Checkpoints of many small tensors."""


def is_small(file: str) -> bool:
    """Whether a checkpoint is one of `SMALL_NETS`."""
    return file.startswith(SMALL_NETS)


class View:
    """The rows of a run, by what tables ask for.

    Parameters
    ----------
    results : Results
    with_archives : bool
        Whether sizes of ours are those of archives only. Where none was made at all (``--quick``), records stand for
        them otherwise.
    """

    def __init__(self, results: Results, *, with_archives: bool = False) -> None:
        self.records_only = not with_archives and not results.archives
        self.results = results
        self.rows = {(row.file, row.name): row for row in results.rows}
        self.files = list(dict.fromkeys(row.file for row in results.rows))
        self.recipes = list(dict.fromkeys(
            row.name.removeprefix("brevis ") for row in results.rows if row.kind == "ours" and "," not in row.name
        ))  # fmt: skip
        self.others = list(dict.fromkeys(row.name for row in results.rows if row.kind in ("peer", "computed")))
        self.peers = list(dict.fromkeys(row.name for row in results.rows if row.kind == "peer"))
        self.archives = {(one["file"], one["recipe"]): int(one["compared"]) for one in results.archives}
        self.n_bytes = {row.file: row.n_bytes for row in results.rows}

    def size(self, file: str, name: str) -> int | None:
        """Return the bytes of a recipe's archive, or of a peer; None where it is not known or wrong."""
        if name in self.recipes:
            if not self.records_only:
                return self.archives.get((file, name))
            name = f"brevis {name}"
        row = self.rows.get((file, name))
        return row.size if row is not None and (row.verified or row.kind == "computed") else None

    def percent(self, file: str, name: str) -> float | None:
        """Return `size` in per cent of the file."""
        size = self.size(file, name)
        return None if size is None else 100 * size / self.n_bytes[file]

    def mb_s(self, file: str, name: str, direction: str) -> float | None:
        """Return CPU MB/s of ``compress`` or ``decompress``."""
        row = self.rows.get((file, name))
        seconds = getattr(row, f"{direction}_s", None)
        return self.n_bytes[file] / 1e6 / seconds if seconds else None

    def ratio(self, file: str, name: str, direction: str, to: str = ZIPNN) -> float | None:
        """Return the speed in that of another compressor of the same turns."""
        ours, theirs = self.mb_s(file, name, direction), self.mb_s(file, to, direction)
        return ours / theirs if ours and theirs else None

    def fastest(self, file: str, names: Sequence[str], over_mb_s: float = 0) -> tuple[float, str] | None:
        """Return the smallest per cent among peers that compress the file faster than so many MB/s, and whose."""
        found = [
            (percent, name)
            for name in names
            if (percent := self.percent(file, name)) is not None
            and (not over_mb_s or (self.mb_s(file, name, "compress") or 0) > over_mb_s)
        ]
        return min(found, default=None)


def tables(results: Results) -> list[Table]:
    """Return all tables of a run."""
    view = View(results)
    made = [
        summary(view),
        sizes(view),
        savings(view),
        speeds(view, "compress"),
        speeds(view, "decompress"),
        small_nets(view),
        file_to_file(view),
    ]
    made += [forced(view), search(view), roles(view), settings(view)]
    return [table for table in made if table.rows]


def summary(view: View) -> Table:
    """Return what a reader wants first: our sizes, the best peer, and the speed of the first recipe."""
    columns = ["checkpoint", "bytes", *view.recipes, "best peer", "", "ZipNN", "compress", "decompress"]
    table = Table("Size, % of the file, and speed in that of ZipNN", columns)
    for file in view.files:
        best = view.fastest(file, view.peers)
        least = min((value for name in view.recipes if (value := view.percent(file, name)) is not None), default=101.0)
        least = min(least, best[0] if best else 101)
        first = f"brevis {view.recipes[0]}" if view.recipes else ""
        table.rows.append([
            file + (" *" if file in OTHERS else ""), view.n_bytes[file],
            *(_percent_cell(view.percent(file, name), least) for name in view.recipes),
            _percent_cell(best[0], least) if best else "", best[1] if best else "",
            _percent_cell(view.percent(file, ZIPNN), least),
            *(_number(view.ratio(file, first, direction), 2) for direction in ("compress", "decompress")),
        ])  # fmt: skip
    table.rows.append(
        ["total", sum(view.n_bytes.values()), *_totals(view, view.recipes), "", "", *_totals(view, [ZIPNN])]
    )
    table.rows[-1] += ["", ""]
    table.notes = [
        f"speed: CPU time in memory, one thread, recipe {view.recipes[0] if view.recipes else 'none'}, unverified",
        "\\* of the same kind as the others, and nothing was tuned to it",
    ]
    return table


def _totals(view: View, names: Sequence[str]) -> list[str]:
    """Return per cent of all files together, empty for who did not do every file."""
    total = sum(view.n_bytes.values())
    cells = []
    for name in names:
        found = [size for file in view.files if (size := view.size(file, name)) is not None]
        cells.append(f"{100 * sum(found) / total:.2f}" if len(found) == len(view.files) else "")
    return cells


def sizes(view: View) -> Table:
    """Return size in per cent of the file, the smallest of each row in bold; totals where a peer did every file."""
    names = [*view.recipes, *view.others]
    table = Table("Size, % of the file", ["checkpoint", "bytes", *(_label(view, name) for name in names)])
    for file in view.files:
        found = {name: view.percent(file, name) for name in names}
        least = min((value for value in found.values() if value is not None), default=0)
        cells = [_percent_cell(found[name], least) or _why(view.rows.get((file, name))) for name in names]
        table.rows.append([file + (" *" if file in OTHERS else ""), view.n_bytes[file], *cells])
    table.rows.append(["total", sum(view.n_bytes.values()), *_totals(view, names)])
    table.notes = [
        "brevis: records in memory, no archive was made"
        if view.records_only
        else "brevis: packs, manifest and snapshot of an archive of that file alone; below 16 MB of source its packs",
        "peers: their output; by tensor, the sum over tensors and the header in zstd -19, no index",
        "\\* of the same kind as the others, and nothing was tuned to it",
        "computed: from the published format, in favour of it; all other figures were decompressed and compared",
    ]
    table.notes += [f"{name}: not measured, {why}" for name, why in view.results.missing.items()]
    table.notes += sorted({
        f"{row.name} on {row.file}: {row.note}" for row in view.results.rows if row.kind == "peer" and row.note
    })  # fmt: skip
    return table


def savings(view: View) -> Table:
    """Return what each recipe saves against each peer: mean, best and worst over the files that both did."""
    columns = ["against", "files"]
    for recipe in view.recipes:
        columns += [f"{recipe}: mean %", "best %", "worst %", "losses"]
    table = Table("Saving against each peer, % of its output", columns)
    for name in view.others:
        cells: list[str | int] = []
        n_files = 0
        for recipe in view.recipes:
            pairs = [(view.size(file, recipe), view.size(file, name)) for file in view.files]
            saved = [100 * (1 - mine / theirs) for mine, theirs in pairs if mine is not None and theirs]
            n_files = max(n_files, len(saved))
            if saved:
                losses = sum(one < 0 for one in saved)
                cells += [f"{statistics.fmean(saved):.2f}", f"{max(saved):.2f}", f"{min(saved):.2f}", losses]
            else:
                cells += ["", "", "", ""]
        if n_files:
            table.rows.append([name, n_files, *cells])
    return table


def speeds(view: View, direction: str) -> Table:
    """Return CPU MB/s in memory and, for ours, the ratio to ZipNN."""
    ours = [row for recipe in view.recipes for row in (f"brevis {recipe}", f"brevis {recipe}, verified")]
    peers = [name for name in view.peers if any(view.mb_s(file, name, direction) for file in view.files)]
    columns = ["checkpoint", *(column for name in ours for column in (name, "x ZipNN")), *peers]
    table = Table(f"Speed to {direction}, CPU MB/s in memory, one thread", columns)
    for file in view.files:
        cells: list[str] = []
        for name in ours:
            cells += [_number(view.mb_s(file, name, direction)), _number(view.ratio(file, name, direction), 2)]
        cells += [_number(view.mb_s(file, name, direction)) for name in peers]
        table.rows.append([file, *cells])
    table.notes = [
        "process CPU time; medians of alternating turns in one process, the search included; calibration is apart",
        f"peers that compress below {ALONE_MB_S} MB/s: one turn, two processes side by side",
        "verified: digests made and checked, every record decoded and compared when written; ZipNN checks nothing",
        "ours decode into memory of the caller, peers into memory that they return, as their interfaces are",
    ]
    return table


def forced(view: View) -> Table:
    """Return the speed of the portable recipe where kernels may use AVX2 and nothing newer."""
    columns = ["checkpoint", "recipe", "compress MB/s", "x ZipNN", "decompress MB/s", "x ZipNN"]
    table = Table("Speed with AVX2 alone, CPU MB/s in memory, one thread", columns)
    for row in view.results.rows:
        if row.name.endswith(FORCED) and row.kind == "ours":
            cells = [
                cell
                for direction in ("compress", "decompress")
                for cell in (
                    _number(view.mb_s(row.file, row.name, direction)),
                    _number(view.ratio(row.file, row.name, direction, ZIPNN + FORCED), 2),
                )
            ]
            table.rows.append([row.file, row.name.removesuffix(FORCED), *cells])
    return table


def small_nets(view: View) -> Table:
    """Return the speed of the first recipe on nets of many small tensors, in that of ZipNN used in both ways."""
    pairs = [(peer, direction) for direction in ("compress", "decompress") for peer in (ZIPNN, ZIPNN_BY_TENSOR)]
    table = Table(
        "Nets of many small tensors, speed in that of ZipNN",
        [
            "checkpoint",
            *(f"{direction}, {'tensor by tensor' if peer != ZIPNN else 'whole file'}" for peer, direction in pairs),
        ],
    )
    for file in filter(is_small, view.files if view.recipes else ()):
        ratios = [view.ratio(file, f"brevis {view.recipes[0]}", direction, peer) for peer, direction in pairs]
        if any(ratio is not None for ratio in ratios):
            table.rows.append([file, *(_number(ratio, 2) for ratio in ratios)])
    table.notes = [
        "a whole file is one buffer to ZipNN, out of which no tensor can be read on its own; ours always can",
    ]
    return table


def file_to_file(view: View) -> Table:
    """Return wall time, CPU time and memory through the command line."""
    columns = ["checkpoint", "command", "workers", "wall s", "CPU s", "GB/s of wall", "peak MiB"]
    table = Table("File to file, with verification", columns)
    for one in view.results.wall:
        speed = one["n_bytes"] / 1e9 / one["wall_s"]
        table.rows.append([
            one["file"], one["command"], one["workers"], one["wall_s"], one["cpu_s"], round(speed, 3), one["peak_mib"],
        ])  # fmt: skip
    table.notes = [
        "a process for each command: start of the interpreter, loading of kernels and calibration are included",
        "memory: the largest sum of resident memory over the process tree",
    ]
    for file in REPEATED:
        for workers in WORKERS:
            for command in ("archive", "verify", "restore"):
                speed = marginal_gb_s(view, file, command, workers)
                if speed is not None:
                    table.notes.append(f"{file}, {command}, workers {workers}: {speed:.2f} GB/s without the start")
    return table


def wall(view: View, file: str, command: str, workers: int) -> dict[str, Any] | None:
    """Return what a command took of a checkpoint."""
    key = (file, command, workers)
    return next((one for one in view.results.wall if (one["file"], one["command"], one["workers"]) == key), None)


def marginal_gb_s(view: View, file: str, command: str, workers: int, clock: str = "wall_s") -> float | None:
    """Return the GB/s of wall or CPU time of the bytes alone: of a checkpoint repeated, less the same once."""
    once, often = wall(view, file, command, workers), wall(view, f"{file}{TIMES}", command, workers)
    if once is None or often is None or often[clock] <= once[clock]:
        return None
    return float((often["n_bytes"] - once["n_bytes"]) / 1e9 / (often[clock] - once[clock]))


def search(view: View) -> Table:
    """Return what the search takes of the compression of large tensors, and calibration."""
    table = Table(
        "The search", ["checkpoint", "recipe", "% of the CPU time on tensors of 16 MiB and up", "calibration s"]
    )
    for one in view.results.shares:
        share = "" if one["share"] is None else f"{100 * one['share']:.1f}"
        table.rows.append([one["file"], one["recipe"], share, one["calibration_s"]])
    table.notes = ["verification off, so that the part is as large as it can be; calibration is once a checkpoint"]
    return table


def roles(view: View) -> Table:
    """Return size by what tensors are for."""
    table = Table("Size by dtype and role, % of the bytes", ["dtype", "role", "bytes", "brevis", "peer by tensor"])
    for (dtype, role), cell in by_role(view.results).items():
        peer = f"{100 * cell['peer'] / cell['source']:.2f}" if cell.get("peer") else ""
        table.rows.append([dtype, role, cell["source"], f"{100 * cell['brevis'] / cell['source']:.2f}", peer])
    names = {one["peer_name"] for one in view.results.roles} - {""}
    table.notes = [
        f"all checkpoints together; brevis: records of the first recipe, in memory; peer: {', '.join(names)}"
    ]
    return table


def by_role(results: Results) -> dict[tuple[str, str], dict[str, int]]:
    """Return bytes of the source, of ours and of the peer by dtype and role, over all files."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for one in results.roles:
        cell = found.setdefault((one["dtype"], one["role"]), {})
        for key in ("source", "brevis", "peer"):
            cell[key] = cell.get(key, 0) + one.get(key, 0)
    return {key: found[key] for key in sorted(found) if found[key]["source"]}


def settings(view: View) -> Table:
    """Return how each compressor was used."""
    table = Table("How each was used", ["compressor", "version", "works on", "settings"])
    for row in {row.name: row for row in view.results.rows if row.kind in ("peer", "computed")}.values():
        table.rows.append([row.name, row.version, row.unit, row.settings])
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}" if value >= 10 or digits else f"{value:.1f}"


def _percent_cell(value: float | None, least: float) -> str:
    if value is None:
        return ""
    return f"**{value:.2f}**" if value <= least else f"{value:.2f}"


def _why(row: Row | None) -> str:
    return "" if row is None or not row.note else row.note if row.note.isupper() else "-"


def _label(view: View, name: str) -> str:
    if name in view.recipes:
        return f"brevis {name}"
    return name + ("" if name in view.peers else " (computed)")
