"""Peak memory of the process tree on checkpoints much larger than the memory of a worker."""

from __future__ import annotations

import filecmp
import tempfile
from pathlib import Path

from tests.bench.report import Table
from tests.processes import brevis
from tests.synthetic import write_bf16

SIZES = (2_000_000_000, 6_000_000_000)
LIMIT_BYTES = 5 << 29
"""2.5 GiB for two workers of 768 MiB, the driver and the interpreters of all three."""
OPTIONS = ("--workers", "2", "--memory", "768MiB", "--no-progress")


def table() -> Table:
    """Archive and restore synthetic checkpoints of 2 and 6 GB and compare."""
    result = Table("Memory", ["checkpoint", "command", "wall s", "CPU s", "peak MiB"])
    for n_bytes in SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            file, place, target = (Path(scratch, name) for name in ("model.safetensors", "archive", "target"))
            write_bf16(file, n_bytes)
            for command, arguments in (("archive", (file, place)), ("restore", (place, target))):
                finished = brevis(command, *arguments, *OPTIONS)
                cells = (finished.wall_seconds, finished.cpu_seconds, finished.peak_bytes / (1 << 20))
                result.rows.append([f"{n_bytes // 10**9} GB BF16", command, *(round(cell, 1) for cell in cells)])
                bar = f"{command} of {n_bytes // 10**9} GB stays below 2.5 GiB"
                result.passed[bar] = finished.peak_bytes <= LIMIT_BYTES
            assert filecmp.cmp(file, target / file.name, shallow=False), "not restored bit for bit"
    result.notes = [" ".join(OPTIONS), "sum of resident memory over the process tree, sampled every 20 ms"]
    return result
