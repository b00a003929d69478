"""CPU time in memory on the weights of a real checkpoint, beside ZipNN with one thread; the search is included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.recipe import load
from operators.limits import SEGMENT_BYTES
from operators.program import LIT
from operators.run import encode, execute
from operators.words import Bytes, Words
from synth.prior import Prior
from synth.synthesis import synthesise
from tests.bench.peers import zipnn
from tests.bench.report import Table, Timed, alternate
from tests.checkpoints import path, read, stacked_layers

COLUMNS = 768
SEGMENT_WORDS = SEGMENT_BYTES // 2 // COLUMNS * COLUMNS


def compress(tensors: Sequence[tuple[Words, int]]) -> list[Bytes]:
    """Search and encode tensors, each as (words, columns), as a task does: one search for all segments of a tensor."""
    options = load().recipe.synth
    prior = Prior.shipped()
    records = []
    for words, columns in tensors:
        rows = words.size // columns
        segments = [words[start : start + SEGMENT_WORDS] for start in range(0, words.size, SEGMENT_WORDS)]
        found = synthesise(
            segments[0],
            dtype="BF16",
            rows=min(rows, segments[0].size // columns),
            columns=columns,
            options=options,
            prior=prior,
        )
        for segment in segments:
            encoded = encode(found.program_for(segment), segment) or encode(LIT, segment)
            assert encoded is not None
            records.append(encoded.record)
    return records


def decompress(records: Sequence[Bytes]) -> list[Words]:
    """Restore records; digests are checked."""
    return [execute(record) for record in records]


def table(rounds: int = 5) -> Table:
    """Compare on one segment of stacked layers, on all of them, and tensor by tensor."""
    stacked = stacked_layers("mpnet-bf16", SEGMENT_BYTES)
    tensors = [
        (np.frombuffer(tensor.data, "<u2"), tensor.shape[-1])
        for tensor in read(path("minilm-bf16")).values()
        if tensor.dtype == "BF16"
    ]
    inputs = {
        "mpnet BF16 layers, one segment": [(stacked[:SEGMENT_WORDS], COLUMNS)],
        "mpnet BF16 layers, all": [(stacked, COLUMNS)],
        "MiniLM BF16, tensor by tensor": tensors,
    }
    columns = [
        "input",
        "bytes",
        "brevis %",
        "ZipNN %",
        "compress MB/s",
        "ZipNN",
        "ratio",
        "decompress MB/s",
        "ZipNN",
        "ratio",
    ]
    result = Table("CPU speed in memory, one thread", columns)
    for name, words in inputs.items():
        row = _measure(name, words, rounds)
        result.rows.append(row)
        if row[1] >= SEGMENT_BYTES // 2 and "layers" in name:
            result.passed[f"{name}: compress at least as fast as ZipNN"] = row[6] >= 1
            result.passed[f"{name}: decompress at least 0.8x as fast as ZipNN"] = row[9] >= 0.8
    result.notes = [
        f"medians of {rounds} alternating turns of process CPU time; search, digests and their checks included",
        "brevis: default recipe and shipped prior; ZipNN: threads=1",
    ]
    return result


def _measure(name: str, tensors: Sequence[tuple[Words, int]], rounds: int) -> list[Any]:
    data = [words.tobytes() for words, _ in tensors]
    n_bytes = sum(map(len, data))
    coder = zipnn("BF16")
    records = compress(tensors)
    assert b"".join(words.tobytes() for words in decompress(records)) == b"".join(data)
    peers = [bytes(coder.compress(bytearray(part))) for part in data]
    assert [bytes(coder.decompress(part)) for part in peers] == data
    ours, theirs, ours_back, theirs_back = alternate(
        [
            Timed(lambda _: compress(tensors)),
            # ZipNN reorders its input in place, so that each turn needs a fresh one.
            Timed(lambda parts: [coder.compress(part) for part in parts], lambda: [bytearray(part) for part in data]),
            Timed(lambda _: decompress(records)),
            Timed(lambda _: [coder.decompress(part) for part in peers]),
        ],
        rounds,
    )
    sizes = [round(100 * sum(map(len, parts)) / n_bytes, 2) for parts in (records, peers)]
    speeds = [round(n_bytes / 1e6 / seconds) for seconds in (ours, theirs, ours_back, theirs_back)]
    return [
        name,
        n_bytes,
        *sizes,
        speeds[0],
        speeds[1],
        round(theirs / ours, 2),
        speeds[2],
        speeds[3],
        round(theirs_back / ours_back, 2),
    ]
