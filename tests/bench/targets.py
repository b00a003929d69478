"""``python -m tests.bench targets``: the bars, each with what a comparison or `promises` has measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.bench import promises
from tests.bench.compared import ZIPNN, ZIPNN_BY_TENSOR, View, is_small, marginal_gb_s
from tests.bench.contests import FORCED
from tests.bench.report import Table
from tests.bench.results import Results
from tests.bench.walls import REPEATED

HOLDS, MISSED = "holds", "MISSED"
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
SPEED_BARS: Sequence[tuple[str, str, str, Callable[[str], bool], float, float]] = (
    ("BF16 and F16", "default", ZIPNN, lambda file: file.endswith("f16") and not is_small(file), 2.5, 2.2),
    (
        "BF16 and F16, AVX2 alone",
        f"portable{FORCED}",
        ZIPNN,
        lambda file: file.endswith("f16") and not is_small(file),
        1.6,
        1.2,
    ),
    ("many small tensors", "default", ZIPNN, is_small, 1.5, 1.3),
    ("many small tensors, each on its own", "default", ZIPNN_BY_TENSOR, is_small, 1.5, 1.3),
    ("F32", "default", ZIPNN, lambda file: file.endswith("f32") and not is_small(file), 2.2, 2.0),
    ("8-bit", "default", ZIPNN, lambda file: file.endswith("8") and not is_small(file), 1.5, 1.2),
)
"""Group of files, recipe, what it is compared with, which files, least ratio to compress and to decompress.

Nets of many small tensors stand twice: ZipNN takes the whole file as one buffer, where it is fast but no tensor can be
read on its own, or tensor by tensor, which is what records are."""
ARCHIVE_GB_S, RESTORE_GB_S, TWO_WORKERS = 0.7, 1.2, 1.05
SEARCH_SHARE = 0.25
CALIBRATION_S = 5.0


def table(results: Results) -> Table:
    """Return every bar with what was measured. One that was not measured is missed."""
    result = Table("Targets", ["bar", "at most / least", "measured", ""])
    for bar, limit, measured, holds in _bars(View(results, with_archives=True)):
        result.rows.append([bar, limit, measured, HOLDS if holds else MISSED])
    return result


def _bars(view: View) -> Iterator[tuple[str, str, str, bool]]:
    yield from _size_bars(view)
    yield from _speed_bars(view)
    yield from _other_bars(view)
    yield from promises.found()


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
    for group, recipe, peer, belongs, *bars in SPEED_BARS:
        for direction, bar in zip(("compress", "decompress"), bars, strict=True):
            for file in filter(belongs, view.files):
                plain, forced, _ = recipe.partition(FORCED)
                ratio = view.ratio(file, f"brevis {recipe}", direction, peer + forced)
                verified = view.ratio(file, f"brevis {plain}, verified{forced}", direction, peer + forced)
                measured = f"{_shown(ratio, 2, 'x')}, verified {_shown(verified, 2, 'x')}"
                bar_name = f"{direction} against ZipNN, {group}: {file}"
                yield bar_name, f">= {bar}x", measured, ratio is not None and ratio >= bar


def _other_bars(view: View) -> Iterator[tuple[str, str, str, bool]]:
    for file in REPEATED:
        for command, bar in (("archive", ARCHIVE_GB_S), ("restore", RESTORE_GB_S)):
            speed = marginal_gb_s(view, file, command, 1)
            holds = speed is not None and speed >= bar
            yield f"{command} file to file, one worker: {file}", f">= {bar} GB/s", _shown(speed, 2, " GB/s"), holds
            one, two = (marginal_gb_s(view, file, command, workers, "cpu_s") for workers in (1, 2))
            ratio = one / two if one and two else None
            name = f"{command} file to file, CPU per byte of two workers in that of one: {file}"
            yield name, f"<= {TWO_WORKERS}x", _shown(ratio, 2, "x"), _at_most(ratio, TWO_WORKERS)
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
    return "not measured" if value is None else f"{value:.{digits}f}{unit}"
