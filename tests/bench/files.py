"""File to file through the command line: wall time, CPU time and peak memory of the whole process tree."""

from __future__ import annotations

import filecmp
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.report import Table
from tests.checkpoints import path
from tests.processes import Finished, brevis

NAMES = ("minilm-bf16", "minilm-f32", "wordllama-f16", "silero-f32")


def table(names: Sequence[str] = NAMES, options: Sequence[str] = ()) -> Table:
    """Archive, verify and restore each checkpoint with a new process for each command."""
    columns = ["checkpoint", "command", "bytes", "wall s", "CPU s", "MB/s of wall", "peak MiB"]
    result = Table("File to file", columns)
    for name in names:
        file = path(name)
        n_bytes = file.stat().st_size
        with tempfile.TemporaryDirectory() as scratch:
            place, target = Path(scratch, "archive"), Path(scratch, "target")
            for command, arguments in (
                ("archive", (file, place, "--json")),
                ("archive again", (file, place, "--json")),
                ("verify", (place,)),
                ("restore", (place, target)),
            ):
                finished = brevis(command.split()[0], *arguments, *options)
                result.rows.append([name, command, n_bytes, *_cells(n_bytes, finished)])
                if command == "archive again":
                    result.passed[f"{name}: a second run has nothing to do"] = json.loads(finished.stdout)["unchanged"]
            assert filecmp.cmp(file, target / file.name, shallow=False), f"{name} was not restored bit for bit"
    result.notes = ["start of the interpreter and loading of compiled kernels are included"]
    return result


def _cells(n_bytes: int, finished: Finished) -> list[float]:
    speed = n_bytes / 1e6 / finished.wall_seconds
    peak_mib = finished.peak_bytes / (1 << 20)
    return [round(value, 2) for value in (finished.wall_seconds, finished.cpu_seconds, speed, peak_mib)]
