"""What a field of words would gain if it were coded given an earlier sibling: ``python -m tests.bench.siblings``.

Each pair is a field and the one that it could be coded in the context of, both as programs of real tensors have them.
The gain is the mutual information of the two in bits, less what a table for each context takes, as part of all bits
of the tensors. A table is charged half the logarithm of the words for each of its free parameters: what any code of
that many words has to pay for them (Rissanen, 1978). Without that, noise would gain too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.words import Words, dtype_of, words_of
from tests.checkpoints import path, read

MIN_WORDS = 1 << 14
"""Words of a tensor that is looked at."""
MAX_WORDS = 1 << 20
"""Words that are counted, spread over a tensor."""
DISTINCT = 2
"""Wide words of which fewer than one in so many are distinct repeat others: matches and dictionaries take them."""
WORTH_PERCENT = 0.1
"""Gain from which a context would be worth building."""
CHECKPOINTS = (
    "minilm-f32", "minilm-f16", "wordllama-f16", "whisper-f16", "silero-f32", "musicnn-msd-f32", "musicvgg-msd-f32",
)  # fmt: skip
Field = tuple[int, int]
"""Lowest bit and width."""


@dataclass(frozen=True)
class Pair:
    """A field and its context."""

    name: str
    field: Field
    context: Field


FLOATS = {
    "F32": (
        Pair("mantissa 3-8 | exponent, mantissa 1-2", (15, 6), (21, 10)),
        Pair("mantissa 3-4 | exponent, mantissa 1-2", (19, 2), (21, 10)),
        Pair("mantissa 9-16 | mantissa 1-8", (7, 8), (15, 8)),
        Pair("mantissa 16-23 | mantissa 8-15", (0, 8), (8, 8)),
        Pair("mantissa 20-23 | exponent", (0, 4), (23, 8)),
        Pair("sign | exponent, mantissa 1-2", (31, 1), (21, 10)),
    ),
    "F16": (
        Pair("mantissa 3-4 | exponent, mantissa 1-2", (6, 2), (8, 7)),
        Pair("mantissa 3-6 | exponent, mantissa 1-2", (4, 4), (8, 7)),
        Pair("mantissa 7-10 | exponent", (0, 4), (10, 5)),
        Pair("sign | exponent, mantissa 1-2", (15, 1), (8, 7)),
    ),
}
"""Of floats: `scaled` codes the exponent with two bits of the mantissa already."""


def cut(words: Words, field: Field) -> NDArray[np.int64]:
    """Return a field of words."""
    low, width = field
    values: NDArray[np.int64] = (words >> words.dtype.type(low)).astype(np.int64) & ((1 << width) - 1)
    return values


def gain_bits(field: NDArray[np.int64], context: NDArray[np.int64]) -> float:
    """Return the bits that a field is shorter by given its context; tables are charged, rare contexts share one."""
    _, contexts = np.unique(context, return_inverse=True)
    _, symbols = np.unique(field, return_inverse=True)
    m = int(symbols.max()) + 1
    counts = np.bincount(contexts * m + symbols, minlength=(int(contexts.max()) + 1) * m).reshape(-1, m).astype(float)
    pooled = counts.sum(axis=0)
    n = pooled.sum()
    # A context has a table of its own where that gains more than it takes.
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.where(counts > 0, counts * np.log2(counts / counts.sum(axis=1, keepdims=True) * n / pooled), 0)
    tables = (np.count_nonzero(counts, axis=1) - 1) * np.log2(np.maximum(2, counts.sum(axis=1))) / 2
    return float(np.maximum(0, own.sum(axis=1) - tables).sum())


def measure(name: str) -> Iterator[tuple[str, str, float, float, str]]:
    """Yield group, pair, gain in percent of all bits, that of the tensor that gains most, and its name."""
    gains: dict[tuple[str, str], list[tuple[float, int, str]]] = {}
    for key, tensor in read(path(name)).items():
        dtype = dtype_of(tensor.dtype)
        words = words_of(tensor.data, dtype.word_bits)
        if tensor.dtype not in FLOATS or words.size < MIN_WORDS:
            continue
        words = words[:: max(1, words.size // MAX_WORDS)]
        others = words[words != 0]
        if not others.size or (dtype.word_bits > 16 and np.unique(others).size * DISTINCT < others.size):
            continue
        group = "optimiser" if "Adam" in key else tensor.dtype
        for pair in FLOATS[tensor.dtype]:
            gain = gain_bits(cut(others, pair.field), cut(others, pair.context))
            gains.setdefault((group, pair.name), []).append((gain / words.size, len(tensor.data), key))
    for (group, pair_name), found in gains.items():
        word_bits = dtype_of("F32" if group == "optimiser" else group).word_bits
        mean = sum(gain * n_bytes for gain, n_bytes, _ in found) / sum(n_bytes for _, n_bytes, _ in found)
        most, _, key = max(found)
        yield group, pair_name, 100 * mean / word_bits, 100 * most / word_bits, key


def main(names: Iterable[str]) -> None:
    """Print the gains of the named checkpoints."""
    print(f"{'':70}   of all  at most")
    for name in names:
        for group, pair, percent, most, key in measure(name):
            where = key if most >= WORTH_PERCENT else ""
            print(f"{name:18} {group:10} {pair:40} {percent:7.3f} %{most:7.3f} %  {where}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", default=CHECKPOINTS)
    main(parser.parse_args().checkpoints)
