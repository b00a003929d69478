"""Tables of measurements, as JSON for machines and Markdown for people."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
PACKAGES = (
    "numba", "numpy", "zstandard", "zipnn", "lmzip", "glyd", "openzl", "pcodec", "z4ai", "brotli", "cramjam", "lz4",
)  # fmt: skip


@dataclass
class Table:
    """One table.

    Attributes
    ----------
    title : str
    columns : list of str
    rows : list of list
        Numbers or texts, one list per row.
    notes : list of str
        How it was measured.
    passed : dict of str to bool
        Bars that the table shows to hold, or not.
    """

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    passed: dict[str, bool] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the table in Markdown: texts left, numbers right."""
        lines = [f"## {self.title}", ""]
        numeric = [all(_is_number(row[index]) for row in self.rows) for index in range(len(self.columns))]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|" + "|".join("--:" if number else "---" for number in numeric) + "|")
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)]
        lines += [f"- {'holds' if holds else 'DOES NOT HOLD'}: {bar}" for bar, holds in self.passed.items()]
        return "\n".join(lines) + "\n"


def _is_number(value: Any) -> bool:
    """Whether a cell is a number, one in a text with or without emphasis, or empty."""
    return isinstance(value, (int, float)) or not str(value).strip("*-+.,x% 0123456789")


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def cpu_seconds(action: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU time that `action` took in this process, and its result."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


@dataclass(frozen=True)
class Timed:
    """An action to time, and what makes its argument anew before each turn, outside of the time."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


def alternate(actions: Sequence[Timed], rounds: int) -> list[float]:
    """Run `actions` in turn, `rounds` times, and return the median CPU seconds of each.

    Turns share whatever else the machine does, so the figures of one call can be compared with each other.
    One round before is not counted: kernels compile, caches fill.
    """
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 1):
        for action, taken in zip(actions, times, strict=True):
            argument = action.prepare()
            seconds, _ = cpu_seconds(lambda action=action, argument=argument: action.run(argument))  # type: ignore[misc]
            if turn:
                taken.append(seconds)
    return [statistics.median(taken) for taken in times]


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {"cpu": cpu, "cpus": os.cpu_count(), "python": platform.python_version(), **versions}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def save(tables: Sequence[Table], folder: Path) -> Path:
    """Write ``bench.json`` and ``bench.md`` into `folder`; return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    about = machine()
    content = {"machine": about, "tables": [asdict(table) for table in tables]}
    (folder / "bench.json").write_text(json.dumps(content, indent=1, default=_plain), "utf-8")
    file = folder / "bench.md"
    file.write_text(page(tables, about), "utf-8")
    return file


def page(tables: Sequence[Table], about: Mapping[str, Any]) -> str:
    """Return tables as one page of Markdown that begins with what the figures depend on."""
    text = "# Benchmark\n\n" + ", ".join(f"{key} {value}" for key, value in about.items()) + "\n\n"
    return text + "\n".join(table.markdown() for table in tables)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} in a table")
