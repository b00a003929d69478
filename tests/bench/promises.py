"""What is promised of any input, measured: how much of an archive is read for a range, and how far a file may grow."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from operators.words import DTYPES
from pipeline.archive import find_snapshot, load_manifest
from pipeline.cli import main
from pipeline.locations import open_source
from pipeline.reading import archived_files, range_bytes
from pipeline.rooms import Room
from pipeline.store import Buffers, ObjectInfo, Range
from pipeline.store_local import LocalSource
from tests.cases import noise, raw, safetensors
from tests.processes import brevis
from tests.synthetic import COLUMNS, write_bf16

TENSOR_BYTES = 6_000_000_000
MIDDLE_BYTES = 256_000_000
"""Of the large tensor as many bytes around its middle are weights; the others are zero, which no disk need hold."""
RANGE_BYTES = 1 << 20
GROWTH_PARTS, GROWTH_BYTES = 1000, 4 << 10
"""No input grows by more than one part in so many, and so many bytes."""
NOISE_BYTES = 3_000_000
SHIPPED = ("--set", "synth.prior=shipped")

Found = tuple[str, str, str, bool]
"""A bar, its limit, what was measured, and whether it holds."""


def found() -> Iterator[Found]:
    """Measure all of it; takes a minute, and scratch space for the large file."""
    yield range_of_a_large_tensor()
    yield from growth()


def range_of_a_large_tensor() -> Found:
    """Read 1 MiB out of the middle of a tensor of 6 GB, and count the bytes that are asked of the archive."""
    with tempfile.TemporaryDirectory() as scratch:
        file, place = Path(scratch, "large.safetensors"), Path(scratch, "archive")
        begin = _write_large(file)
        brevis("archive", file, place, "--no-progress", *SHIPPED)
        store = _Counting(str(place))
        snapshot = find_snapshot(open_source(str(place)))
        item = archived_files(snapshot, load_manifest(store, snapshot))[0]
        middle = begin + TENSOR_BYTES // 2
        segment = next(row for row in item.rows if row.offset_bytes <= middle < row.end_bytes)
        assert segment.stored_bytes is not None
        start = segment.offset_bytes + (segment.n_bytes - RANGE_BYTES) // 2  # the middle itself is where two meet
        store.n_bytes = 0
        data = b"".join(map(bytes, range_bytes(store, item, start, start + RANGE_BYTES)))
        with file.open("rb") as source:
            assert data == os.pread(source.fileno(), RANGE_BYTES, start), "not the bytes of the tensor"
        limit = f"<= {segment.stored_bytes:,} bytes, its segment"
        return (
            "1 MiB out of the middle of a tensor of 6 GB", limit, f"{store.n_bytes:,} bytes read",
            store.n_bytes <= segment.stored_bytes,
        )  # fmt: skip


def _write_large(file: Path) -> int:
    """Write a checkpoint of one tensor; return where the tensor begins."""
    rows = TENSOR_BYTES // (2 * COLUMNS)
    entry = {"dtype": "BF16", "shape": [rows, COLUMNS], "data_offsets": [0, 2 * rows * COLUMNS]}
    head = raw(json.dumps({"large": entry}))
    weights = file.with_suffix(".middle")
    write_bf16(weights, MIDDLE_BYTES)
    with file.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + 2 * rows * COLUMNS)
        out.seek(len(head) + (2 * rows * COLUMNS - MIDDLE_BYTES) // 2)
        out.write(weights.read_bytes()[-MIDDLE_BYTES:])
    weights.unlink()
    return len(head)


class _Counting(LocalSource):
    """A folder that counts the bytes that are asked of it."""

    n_bytes = 0

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[Range], room: Room | None = None) -> Buffers:
        self.n_bytes += sum(stop - start for start, stop in ranges)
        return super().get_ranges(info, ranges, room)


def growth() -> Iterator[Found]:
    """Archive what cannot be made smaller."""
    for name, data in _adversaries():
        limit = len(data) + len(data) // GROWTH_PARTS + GROWTH_BYTES
        n_bytes = _stored_bytes(data)
        yield f"growth of {name}", f"<= {limit:,} bytes", f"{n_bytes:,} bytes", n_bytes <= limit


def _stored_bytes(data: bytes) -> int:
    """Archive a file, restore and compare it; return the bytes of the packs.

    Manifest and snapshot are left out, as they are wherever small files are compared: 4 to 5 KB for one file, whatever
    is in it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file, place, target = (Path(scratch, name) for name in ("model.safetensors", "archive", "target"))
        file.write_bytes(data)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["archive", str(file), str(place), "--workers", "1", *SHIPPED]) == 0
            assert main(["restore", str(place), str(target), "--workers", "1"]) == 0
        assert (target / file.name).read_bytes() == data, "not restored bit for bit"
        return sum(pack.stat().st_size for pack in (place / "packs").rglob("*") if pack.is_file())


def _adversaries() -> Iterator[tuple[str, bytes]]:
    for place, dtype in enumerate(DTYPES.values()):
        yield (
            f"noise, {dtype.name}",
            safetensors([("x", dtype.name, [NOISE_BYTES * 8 // dtype.element_bits], noise(place, NOISE_BYTES))]),
        )
    for n_bytes in (0, 1, 100, 5000):
        yield f"a file of {n_bytes} bytes", noise(n_bytes, n_bytes)
    many = np.frombuffer(noise(99, 40_000), "<u4")
    yield "10,000 scalars", safetensors([(f"{i:05}", "F32", [], word.tobytes()) for i, word in enumerate(many)])
    # A record has a digest and its row a name; neither compresses.
    vectors = [(noise(-1 - i, 12).hex(), "BF16", [2048], noise(i, 4096)) for i in range(2000)]
    yield "2,000 vectors of 4 KiB", safetensors(vectors)
