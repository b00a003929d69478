"""Tables and targets over the rows of a comparison. Nothing is measured here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.bench.compare import FORCED, OTHERS, REPEATED, TIMES, WORKERS, Results, Row
from tests.bench.peers import ALONE_MB_S
from tests.bench.report import Table

ZIPNN = "ZipNN"
HOLDS, MISSED = "holds", "MISSED"


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
    made = [sizes(view), savings(view), speeds(view, "compress"), speeds(view, "decompress"), file_to_file(view)]
    made += [forced(view), search(view), roles(view), settings(view)]
    return [table for table in made if table.rows]


def sizes(view: View) -> Table:
    """Return size in per cent of the file, the smallest of each row in bold; totals where a peer did every file."""
    names = [*view.recipes, *view.others]
    table = Table("Size, % of the file", ["checkpoint", "bytes", *(_label(view, name) for name in names)])
    for file in view.files:
        found = {name: view.percent(file, name) for name in names}
        least = min((value for value in found.values() if value is not None), default=0)
        cells = [_percent_cell(found[name], least) or _why(view.rows.get((file, name))) for name in names]
        table.rows.append([file + (" *" if file in OTHERS else ""), view.n_bytes[file], *cells])
    total = sum(view.n_bytes.values())
    sums: list[str] = []
    for name in names:
        found_sizes = [view.size(file, name) for file in view.files]
        whole = [size for size in found_sizes if size is not None]
        sums.append(f"{100 * sum(whole) / total:.2f}" if len(whole) == len(view.files) else "")
    table.rows.append(["total", total, *sums])
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


# -- targets ------------------------------------------------------------------------------------

SIZE_BARS: Mapping[str, tuple[float, float]] = {
    "mpnet-bf16": (65.80, 65.70),
    "minilm-bf16": (65.85, 65.75),
    "minilm-f16": (84.65, 84.55),
    "wordllama-f16": (84.50, 84.42),
    "whisper-f16": (83.00, 82.85),
    "minilm-f8": (81.80, 81.65),
    "mpnet-f32": (82.60, 82.52),
    "minilm-f32": (81.90, 81.75),
    "musicnn-msd-f32": (74.0, 73.3),
}
"""Most per cent of the file in the recipes default and max."""
FAST_BARS = {"mpnet-bf16": 65.95}
STRETCH = {"mpnet-bf16": 65.60, "wordllama-f16": 84.33, "musicnn-msd-f32": 72.0}
FAST_PEER_MB_S = 100
SMALL_NETS = ("fracast", "silero", "musicnn", "musicvgg")


def _is_small(file: str) -> bool:
    return file.startswith(SMALL_NETS)


SPEED_BARS: Sequence[tuple[str, str, Callable[[str], bool], float, float]] = (
    ("BF16 and F16", "default", lambda file: file.endswith("f16") and not _is_small(file), 2.5, 2.2),
    (
        "BF16 and F16, AVX2 alone",
        f"portable{FORCED}",
        lambda file: file.endswith("f16") and not _is_small(file),
        1.6,
        1.2,
    ),
    ("many small tensors", "default", _is_small, 1.5, 1.3),
    ("F32", "default", lambda file: file.endswith("f32") and not _is_small(file), 2.2, 2.0),
    ("8-bit", "default", lambda file: file.endswith("8") and not _is_small(file), 1.5, 1.2),
)
"""Group of files, recipe, which files, least ratio to ZipNN to compress and to decompress."""
ARCHIVE_GB_S, RESTORE_GB_S, TWO_WORKERS = 0.7, 1.2, 1.05
SEARCH_SHARE = 0.25
CALIBRATION_S = 5.0


def targets(results: Results) -> Table:
    """Return every bar with what was measured. One that was not measured is missed."""
    table = Table("Targets", ["bar", "at most / least", "measured", ""])
    for bar, limit, measured, holds in _bars(View(results, with_archives=True)):
        table.rows.append([bar, limit, measured, HOLDS if holds else MISSED])
    return table


def _bars(view: View) -> Iterator[tuple[str, str, str, bool]]:
    yield from _size_bars(view)
    yield from _speed_bars(view)
    yield from _other_bars(view)


def _size_bars(view: View) -> Iterator[tuple[str, str, str, bool]]:
    limits = [
        (file, recipe, bar)
        for file, both in SIZE_BARS.items()
        for recipe, bar in zip(("default", "max"), both, strict=True)
    ]
    for file, recipe, bar in limits + [(file, "fast", bar) for file, bar in FAST_BARS.items()]:
        percent = view.percent(file, recipe)
        yield f"size of {file}, {recipe}", f"<= {bar:.2f} %", _shown(percent, 2, " %"), _at_most(percent, bar)
    for file, bar in STRETCH.items():
        found = [value for recipe in view.recipes if (value := view.percent(file, recipe)) is not None]
        percent = min(found, default=None)
        yield f"stretch: size of {file}", f"<= {bar:.2f} %", _shown(percent, 2, " %"), _at_most(percent, bar)
    for file in view.files:
        for recipe, over in (("max", 0), ("default", FAST_PEER_MB_S)):
            best = view.fastest(file, view.others, over)
            percent = view.percent(file, recipe)
            which = f"every peer faster than {over} MB/s" if over else "every peer"
            limit = f"< {best[0]:.2f} % {best[1]}" if best else "no peer"
            holds = best is None or (percent is not None and percent < best[0])
            yield f"{recipe} smaller than {which}: {file}", limit, _shown(percent, 2, " %"), holds


def _speed_bars(view: View) -> Iterator[tuple[str, str, str, bool]]:
    for group, recipe, belongs, *bars in SPEED_BARS:
        for direction, bar in zip(("compress", "decompress"), bars, strict=True):
            for file in filter(belongs, view.files):
                plain, forced, _ = recipe.partition(FORCED)
                ratio = view.ratio(file, f"brevis {recipe}", direction, ZIPNN + forced)
                verified = view.ratio(file, f"brevis {plain}, verified{forced}", direction, ZIPNN + forced)
                measured = f"{_shown(ratio, 2, 'x')}, verified {_shown(verified, 2, 'x')}"
                bar_name = f"{direction} against ZipNN, {group}: {file}"
                yield bar_name, f">= {bar}x", measured, ratio is not None and ratio >= bar


def _wall(view: View, file: str, command: str, workers: int) -> dict[str, Any] | None:
    key = (file, command, workers)
    return next((one for one in view.results.wall if (one["file"], one["command"], one["workers"]) == key), None)


def marginal_gb_s(view: View, file: str, command: str, workers: int) -> float | None:
    """Return the GB/s of wall time of the bytes alone: of a checkpoint repeated, less the same once."""
    once, often = _wall(view, file, command, workers), _wall(view, f"{file}{TIMES}", command, workers)
    if once is None or often is None or often["wall_s"] <= once["wall_s"]:
        return None
    return float((often["n_bytes"] - once["n_bytes"]) / 1e9 / (often["wall_s"] - once["wall_s"]))


def _other_bars(view: View) -> Iterator[tuple[str, str, str, bool]]:
    for file in REPEATED:
        for command, bar in (("archive", ARCHIVE_GB_S), ("restore", RESTORE_GB_S)):
            speed = marginal_gb_s(view, file, command, 1)
            holds = speed is not None and speed >= bar
            yield f"{command} file to file, one worker: {file}", f">= {bar} GB/s", _shown(speed, 2, " GB/s"), holds
        one, two = (_wall(view, f"{file}{TIMES}", "archive", workers) for workers in (1, 2))
        ratio = two["cpu_s"] / one["cpu_s"] if one and two else None
        holds = _at_most(ratio, TWO_WORKERS)
        yield f"CPU of two workers in that of one: {file}{TIMES}", f"<= {TWO_WORKERS}x", _shown(ratio, 2, "x"), holds
    for share in view.results.shares:
        if share["recipe"] == "default" and share["share"] is not None:
            part = share["share"]
            limit = f"<= {SEARCH_SHARE:.0%}"
            yield (
                f"search in the CPU time of large tensors: {share['file']}",
                limit,
                f"{part:.1%}",
                part <= SEARCH_SHARE,
            )
        if share["recipe"] == "default":
            seconds = share["calibration_s"]
            yield (
                f"calibration: {share['file']}",
                f"<= {CALIBRATION_S:.0f} s",
                f"{seconds:.1f} s",
                (seconds <= CALIBRATION_S),
            )


def _at_most(value: float | None, bar: float) -> bool:
    return value is not None and value <= bar + 1e-9


def _shown(value: float | None, digits: int, unit: str) -> str:
    return "not measured" if value is None or math.isnan(value) else f"{value:.{digits}f}{unit}"


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
