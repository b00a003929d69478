"""File to file through the command line: wall time, CPU time, peak memory, and the bytes of archives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.bench.results import Results
from tests.bench.sizes import Archived, archive, archive_file
from tests.checkpoints import ELEMENT_BITS, Tensor, path, read, write

WORKERS = (1, 2)
LARGE_BYTES = 40_000_000
"""Size from which a checkpoint is archived by two workers too."""
REPEATED = ("mpnet-bf16",)
COPIES = 8
TIMES = f" x{COPIES}"
MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory."""
TOUCHED_BYTES = 1 << 30
"""Memory of the processes themselves."""


def file_to_file(results: Results, file: str, recipe: str) -> None:
    """Archive, verify, restore and compare through the command line, with one recipe and each number of workers.

    A large checkpoint is repeated too, so that the time of a process can be told from that of bytes.
    """
    with mock.patch.object(tempfile, "tempdir", _folder(path(file).stat().st_size)):
        _file_to_file(results, file, recipe)


def _folder(n_bytes: int) -> str | None:
    """Return a folder in memory where there is room, so that no disk is measured; else that of temporary files."""
    room = os.statvfs(MEMORY) if MEMORY.is_dir() else None
    enough = room is not None and room.f_bavail * room.f_frsize >= 4 * COPIES * n_bytes
    return str(MEMORY) if enough else None


def _touch(n_bytes: int) -> None:
    """Use as much memory as a command will write to, and give it back.

    A host takes unused memory away from a virtual machine, and its faults would count as the time of the command.
    """
    subprocess.run([sys.executable, "-c", f"import numpy; numpy.empty({n_bytes}, numpy.uint8).fill(1)"], check=True)


def _file_to_file(results: Results, file: str, recipe: str) -> None:
    n_bytes = path(file).stat().st_size
    for workers in WORKERS if n_bytes >= LARGE_BYTES else WORKERS[:1]:
        options = ("--config", recipe, "--workers", str(workers))
        archived = archive(file, *options, before=lambda: _touch(2 * n_bytes + TOUCHED_BYTES))
        results.wall += _wall_rows(recipe, workers, archived)
        if workers == WORKERS[0]:
            results.archives.append(archive_row(file, recipe, archived))
    if file not in REPEATED:
        return
    with tempfile.TemporaryDirectory() as scratch:
        copies = Path(scratch, path(file).name)
        repeat(file, copies)
        for workers in WORKERS:
            options = ("--config", recipe, "--workers", str(workers))
            archived = archive_file(
                f"{file}{TIMES}", copies, *options, before=lambda: _touch(2 * COPIES * n_bytes + TOUCHED_BYTES)
            )
            results.wall += _wall_rows(recipe, workers, archived)


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


def archive_row(file: str, recipe: str, archived: Archived) -> dict[str, Any]:
    """Return what stands in `Results.archives`."""
    return {
        "file": file, "recipe": recipe, "n_bytes": archived.source_bytes, "stored": archived.stored_bytes,
        "packs": archived.pack_bytes, "compared": archived.compared_bytes,
    }  # fmt: skip
