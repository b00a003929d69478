"""What grows with a checkpoint, and what must not: CPU time per byte, memory, requests, and the way over S3."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import s3fs

from tests.bench.report import Table
from tests.bench.walls import MEMORY
from tests.faultproxy import fault_proxy
from tests.processes import Finished, brevis
from tests.radosgw import PROGRAMS, radosgw
from tests.s3server import S3Server, s3_server
from tests.synthetic import write_bf16

GB = 10**9
SIZES_GB = (1, 2, 4, 8)
TURNS = 2
MOST_SPREAD = 1.1
"""The CPU time of one size may be so many times what the line through all of them says."""
N_FILES, FILE_BYTES = 20_000, 2_000
N_TENSORS, TENSOR_BYTES = 1_000_000, 64
FEW_SEGMENTS, MANY_SEGMENTS, SEGMENT_BYTES = 100_000, 300_000, 4_096
"""Tensors from 4 KiB on are segments of their own, each a row of the manifest. Two numbers tell what one takes."""
MOST_DRIVER_BYTES = 1 << 30
"""What a driver may take of a million segments."""
LARGE_BYTES = 2 * GB
LEAST_MEMORY = "705MiB"
LINK_BYTES = 500_000_000
REQUESTED_BYTES = GB
REQUEST_BYTES = 4 << 20
"""Of source for each request, beside one for each object; about 35 of them do not depend on the size."""
MOST_OVER_FILES = 1.6
"""Wall time from bucket to bucket, as a multiple of that from file to file."""
ROUNDS = 3
MIB = 1 << 20


def tables() -> Iterator[Table]:
    """Measure all of it, one table after the other; takes some 20 minutes and 14 GB of scratch space."""
    for table in TABLES.values():
        yield table()


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


# -- CPU time -----------------------------------------------------------------------------------


def per_byte(sizes_gb: tuple[int, ...] = SIZES_GB) -> Table:
    """Archive checkpoints of several sizes, and compare their CPU time with a line: a start, and as much for each byte.

    The whole of a small checkpoint takes more CPU time a byte than that of a large one, since a command starts and
    calibrates; what must not be is a size that takes more than its bytes account for.
    """
    result = Table("CPU time by size", ["checkpoint", "wall s", "CPU s", "ns a byte", "of the line"])
    taken = [_archived(size * GB) for size in sizes_gb]
    seconds = np.array([finished.cpu_seconds for finished in taken])
    each_gb, start = np.polyfit(sizes_gb, seconds, 1, w=1 / seconds)
    for size, finished, share in zip(sizes_gb, taken, seconds / (start + each_gb * np.array(sizes_gb)), strict=True):
        cells = finished.wall_seconds, finished.cpu_seconds, finished.cpu_seconds / size, share
        result.rows.append([f"{size} GB BF16", *(round(float(cell), 2) for cell in cells)])
        bar = f"{size} GB: {share:.3f} of the line, at most {MOST_SPREAD}"
        result.passed[bar] = 1 / MOST_SPREAD <= share <= MOST_SPREAD
    whole = seconds / sizes_gb
    spread = f"{whole.max() / whole.min():.2f}, at most {MOST_SPREAD}"
    result.passed[f"whole commands, start and all: largest / smallest {spread}"] = (
        whole.max() <= MOST_SPREAD * whole.min()
    )
    result.notes = [
        f"--workers 1; the process and all below it; least of {TURNS} turns",
        f"the line: {start:.2f} s and {each_gb:.2f} ns a byte",
    ]
    return result


def _archived(n_bytes: int) -> Finished:
    """Return the turn that took least CPU time."""
    with _scratch() as folder:
        source = folder / "model.safetensors"
        write_bf16(source, n_bytes)
        finished = []
        for turn in range(TURNS):
            target = folder / f"archive-{turn}"
            finished.append(brevis("archive", source, target, "--workers", "1", "--no-progress"))
            shutil.rmtree(target)
        return min(finished, key=lambda one: one.cpu_seconds)


# -- many and large -----------------------------------------------------------------------------


def many() -> Table:
    """Archive and restore sources of many files and tensors, and a tensor larger than a worker."""
    result = _many("Many and large")
    _measure(result, f"{N_FILES:,} files of {FILE_BYTES:,} bytes", write_files)
    _measure(result, f"{N_TENSORS:,} tensors of {TENSOR_BYTES} bytes in one file", write_tensors)
    _measure(result, f"one tensor of {LARGE_BYTES:,} bytes", write_large)
    return result


def segments(few: int = FEW_SEGMENTS, many: int = MANY_SEGMENTS) -> Table:
    """Archive and restore two numbers of segments, and tell what a million of them would take of the driver."""
    result = _many("Many segments")
    peaks: dict[str, list[int]] = {}
    for number in (few, many):
        title = f"{number:,} tensors of {SEGMENT_BYTES:,} bytes in one file"
        for command, finished in _measure(result, title, partial(write_segments, n_segments=number)).items():
            peaks.setdefault(command, []).append(finished.own_peak_bytes)
    for command, (first, last) in peaks.items():
        each = (last - first) / (many - few)
        million = last + each * (1_000_000 - many)
        bar = f"{command}: {each:.0f} bytes a segment, so {million / MIB:,.0f} MiB for a million, at most 1 GiB"
        result.passed[bar] = million <= MOST_DRIVER_BYTES
    return result


def _many(title: str) -> Table:
    result = Table(title, ["source", "command", "wall s", "CPU s", "driver MiB", "largest worker MiB"])
    result.notes = [
        f"--workers 2 --memory {LEAST_MEMORY}",
        "resident memory, sampled every 20 ms; where there is but one task the driver runs it and there is no worker",
    ]
    return result


def _measure(result: Table, title: str, write: Callable[[Path], None]) -> dict[str, Finished]:
    """Archive and restore what `write` writes; add rows and bars to `result`."""
    limit_bytes = int(LEAST_MEMORY.removesuffix("MiB")) * MIB
    done: dict[str, Finished] = {}
    with _scratch() as folder:
        source, archive, target = folder / "source", folder / "archive", folder / "target"
        source.mkdir()
        write(source)
        for command, places in (("archive", (source, archive)), ("restore", (archive, target))):
            finished = brevis(command, *places, "--workers", "2", "--memory", LEAST_MEMORY, "--no-progress")
            done[command] = finished
            memory = finished.own_peak_bytes / MIB, finished.child_peak_bytes / MIB
            cells = finished.wall_seconds, finished.cpu_seconds, *memory
            result.rows.append([title, command, *(round(cell, 1) for cell in cells)])
            result.passed[f"{command}, {title}: a worker within {LEAST_MEMORY}"] = (
                finished.child_peak_bytes <= limit_bytes
            )
        for path in source.iterdir():
            assert filecmp.cmp(path, target / path.name, shallow=False), "not restored bit for bit"
    return done


def write_files(folder: Path) -> None:
    """Write small files, no two of them equal."""
    rng = np.random.Generator(np.random.SFC64(1))
    for number in range(N_FILES):
        weights = rng.standard_normal(FILE_BYTES // 2, np.float32) * np.float32(0.02)
        (folder / f"shard-{number:05}.bin").write_bytes((weights.view(np.uint32) >> 16).astype("<u2").tobytes())


def write_tensors(folder: Path) -> None:
    """Write a checkpoint whose header is as long as all that it describes."""
    _write_many(folder, N_TENSORS, TENSOR_BYTES)


def write_segments(folder: Path, n_segments: int = MANY_SEGMENTS) -> None:
    """Write a checkpoint of as many segments as tensors."""
    _write_many(folder, n_segments, SEGMENT_BYTES)


def _write_many(folder: Path, n_tensors: int, n_bytes: int) -> None:
    entries = (
        f'"model.layers.{i // 512}.experts.{i % 512}.scale":'
        f'{{"dtype":"BF16","shape":[{n_bytes // 2}],"data_offsets":[{i * n_bytes},{(i + 1) * n_bytes}]}}'
        for i in range(n_tensors)
    )
    header = ("{" + ",".join(entries) + "}").encode()
    rng = np.random.Generator(np.random.SFC64(2))
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        left = n_tensors * n_bytes
        while left:
            n_words = min(left // 2, 1 << 24)
            weights = rng.standard_normal(n_words, np.float32) * np.float32(0.02)
            out.write((weights.view(np.uint32) >> 16).astype("<u2").tobytes())
            left -= 2 * n_words


def write_large(folder: Path) -> None:
    """Write a checkpoint of one tensor that no worker has room for."""
    weights = folder / "weights"
    write_bf16(weights, LARGE_BYTES)
    with weights.open("rb") as read, (folder / "model.safetensors").open("wb") as out:
        read.seek(8 + int.from_bytes(read.read(8), "little"))
        n_bytes = weights.stat().st_size - read.tell()
        rows = n_bytes // 8192
        header = json.dumps({"large": {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, rows * 8192]}})
        out.write(len(header).to_bytes(8, "little") + header.encode())
        while data := read.read(64 * MIB):
            out.write(data)
        out.truncate(8 + len(header) + rows * 8192)
    weights.unlink()


# -- S3 -----------------------------------------------------------------------------------------


def requests() -> Table:
    """Count what is asked of a server while a checkpoint is archived from it to it, and restored."""
    result = Table("Requests", ["command", "source bytes", "requests", "beside one for each object", "allowed"])
    with _scratch() as folder, s3_server() as server, fault_proxy(server.endpoint) as proxy:
        file = folder / "model.safetensors"
        write_bf16(file, REQUESTED_BYTES)
        _put(server, file, "source/model.safetensors")
        near = S3Server(proxy.endpoint, server.bucket)
        for command, places in _from_to(near):
            proxy.requests.clear()
            brevis(command, *places, "--workers", "2", "--no-progress", env=near.env)
            n_requests, allowed = len(proxy.requests), file.stat().st_size // REQUEST_BYTES
            result.rows.append([command, file.stat().st_size, n_requests, n_requests - 1, allowed])
            result.passed[f"{command}: fewer than one request per 4 MiB of source, beside one for each object"] = (
                n_requests - 1 < allowed
            )
    result.notes = ["of the driver and two workers, counted by a proxy: those to list, to commit and to read back too"]
    return result


def link() -> Table:
    """Archive and restore from bucket to bucket and from file to file, by turns."""
    result = Table("From bucket to bucket", ["server", "command", "files, wall s", "S3, wall s", "ratio"])
    servers: dict[str, Callable[[], AbstractContextManager[S3Server]]] = {"ministack": s3_server}
    if _is_installed():
        servers["radosgw"] = radosgw
    with mock.patch.object(tempfile, "tempdir", str(MEMORY) if MEMORY.is_dir() else None), _scratch() as folder:
        file = folder / "source" / "model.safetensors"
        file.parent.mkdir()
        write_bf16(file, LINK_BYTES)
        for name, serve in servers.items():
            with serve() as server:
                _put(server, file, "source/model.safetensors")
                taken = _turns(folder, server)
            for command, seconds in taken.items():
                plain, over = (statistics.median(part) for part in seconds)
                result.rows.append([name, command, round(plain, 2), round(over, 2), round(over / plain, 2)])
                result.passed[f"{command}, {name}: at most {MOST_OVER_FILES} of file to file"] = (
                    over <= MOST_OVER_FILES * plain
                )
    result.notes = [f"{LINK_BYTES:,} bytes of BF16, --workers 1, files in memory, medians of {ROUNDS} turns"]
    return result


def _turns(folder: Path, server: S3Server) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of each command, from file to file and from bucket to bucket."""
    taken: dict[str, tuple[list[float], list[float]]] = {"archive": ([], []), "restore": ([], [])}
    for turn in range(ROUNDS):
        local = {
            "archive": (folder / "source", folder / f"archive-{turn}"),
            "restore": (folder / f"archive-{turn}", folder / f"target-{turn}"),
        }
        for command, places in _from_to(server, turn):
            for way, (source, target), env in ((0, local[command], {}), (1, places, _env(server))):
                finished = brevis(command, source, target, "--workers", "1", "--no-progress", env=env)
                taken[command][way].append(finished.wall_seconds)
    return taken


def _from_to(server: S3Server, turn: int = 0) -> list[tuple[str, tuple[str, str]]]:
    source, archive, target = (server.url(prefix) for prefix in ("source", f"archive-{turn}", f"target-{turn}"))
    return [("archive", (source, archive)), ("restore", (archive, target))]


def _env(server: S3Server) -> dict[str, str]:
    """Return the environment of a client of any of the servers."""
    options = server.options
    return server.env | {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}


def _put(server: S3Server, file: Path, key: str) -> None:
    options = server.options
    client = s3fs.S3FileSystem(
        key=options["key"],
        secret=options["secret"],
        endpoint_url=options["endpoint_url"],
        client_kwargs={"region_name": options["region"]},
    )
    client.put_file(str(file), f"{server.bucket}/{key}")


def _is_installed() -> bool:
    return all(any(os.access(Path(folder, name), os.X_OK) for folder in os.get_exec_path()) for name in PROGRAMS)


TABLES: dict[str, Callable[[], Table]] = {
    "per_byte": per_byte,
    "many": many,
    "segments": segments,
    "requests": requests,
    "link": link,
}
"""Each by its name: ``python -m tests.bench per_byte``."""
