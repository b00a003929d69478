"""Codebooks on files of small tensors: what archives take with them and without, and what tables could save at most."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from blake3 import blake3

from operators.check import check
from operators.literals.rans import lanes_of
from operators.literals.tables import take_alphabet
from operators.record import take_record
from pipeline.archive import find_snapshot, load_manifest
from pipeline.locations import open_store
from pipeline.packs import read_records
from tests.bench.report import Table
from tests.checkpoints import ELEMENT_BITS, Tensor, path, read, write
from tests.processes import brevis

SMALL_BYTES = 16 << 10
N_TENSORS = 1500
"""Of each checkpoint."""
FILES: Mapping[str, tuple[str, str]] = {
    "BF16": ("minilm-bf16", "mpnet-bf16"),
    "F16": ("minilm-f16", "whisper-f16"),
    "F32": ("minilm-f32", "mpnet-f32"),
    "F8_E4M3": ("minilm-f8", "mpnet-f8"),
    "I8": ("minilm-f32", "mpnet-f32"),
}
DISABLED = ("--set", 'synth.disable=["fixed"]')


def table() -> Table:
    """Archive thousands of slices of real tensors, each below `SMALL_BYTES`, with books and without."""
    columns = ["dtype", "tensors", "bytes", "records", "with books", "tables %", "saved %", "of the archive %"]
    result = Table("Codebooks on small tensors", columns)
    for dtype, names in FILES.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            found = read(path(name))
            found = quantised(found) if dtype == "I8" else found
            tensors |= {f"{name}.{key}": one for key, one in slices(found, dtype)}
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch, "small.safetensors")
            write(file, tensors)
            before, all_before, tables = _archived(file, Path(scratch, "without"), DISABLED)
            after, all_after, _ = _archived(file, Path(scratch, "with"), ())
        n_bytes, saved = sum(len(one.data) for one in tensors.values()), 100 * (1 - after / before)
        shares = [round(share, 2) for share in (100 * tables / before, saved, 100 * (1 - all_after / all_before))]
        result.rows.append([dtype, len(tensors), n_bytes, before, after, *shares])
        result.passed[f"{dtype}: never larger with books"] = all_after <= all_before
        result.passed[f"{dtype}: at least 5 % smaller"] = saved >= 5
    result.notes = [
        "slices of 256 bytes to 16 KiB; those below 4 KiB share a segment with their neighbours, as in any file",
        "records: of segments up to 16 KiB; tables: of codes and frequencies, with rANS states",
    ]
    return result


def slices(tensors: Mapping[str, Tensor], dtype: str) -> list[tuple[str, Tensor]]:
    """Return `N_TENSORS` pieces of the tensors of one dtype, none of them twice, in turns."""
    item = ELEMENT_BITS[dtype] // 8
    left = {key: tensor for key, tensor in tensors.items() if tensor.dtype == dtype}
    starts = dict.fromkeys(left, 0)
    found: list[tuple[str, Tensor]] = []
    for key in cycle(list(left)):
        if len(found) == N_TENSORS or not left:
            return found
        start = starts[key]
        seed = int.from_bytes(blake3(f"{key} {start}".encode()).digest(8), "little")
        n_bytes = 256 << seed % 6
        n_words = min(n_bytes + (seed >> 8) % n_bytes, SMALL_BYTES - 1) // item
        data = tensors[key].data[start * item : (start + n_words) * item] if key in left else b""
        if data:
            found.append((f"{key}.{start}", Tensor(dtype, (len(data) // item,), data)))
            starts[key] += n_words
        else:
            left.pop(key, None)
    return found


def quantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return F32 tensors as int8, each with a scale of its own."""
    found = {}
    for key, tensor in tensors.items():
        if tensor.dtype == "F32":
            values = np.frombuffer(tensor.data, "<f4")
            scale = float(np.abs(values).max(initial=0)) or 1.0
            found[key] = Tensor("I8", tensor.shape, np.rint(values / scale * 127).astype(np.int8).tobytes())
    return found


def _archived(file: Path, archive: Path, options: Sequence[str]) -> tuple[int, int, int]:
    """Return the bytes of the records of small segments, of the archive, and of tables and states in those records."""
    done = brevis("archive", file, archive, "--json", "--workers", "1", *options)
    store = open_store(str(archive))
    records = tables = 0
    for row, record in read_records(store, load_manifest(store, find_snapshot(store))):
        if row.dtype is None or row.n_bytes > SMALL_BYTES:
            continue
        records += len(record)
        parsed = take_record(record)
        streams = check(parsed.program, parsed.stream)
        for node, stream, payload in zip(parsed.program.literals(), streams, parsed.payloads, strict=True):
            encoding = node.op.encoding  # type: ignore[union-attr]
            if encoding == "huffman":
                tables += take_alphabet(payload, stream.width_bits, with_values=False)[3]
            elif encoding == "rans":
                tables += 1 + take_alphabet(payload[1:], stream.width_bits, with_values=True)[3]
                tables += 4 * lanes_of(stream.n_words)
    return records, json.loads(done.stdout)["stored_bytes"], tables
