"""Sizes that are computed from a published format, not measured: nothing here writes or reads a byte.

DFloat11 (Zhang et al. 2025, its package of version 0.5) decodes on a GPU alone. The language of Brevis (Xie et
al.) has no package; ours grew out of it, so our own search, restricted to its productions, finds the programs,
and every literal is charged as its authors write it: 13 bytes, 5 for each entry of a Huffman table or 8 of a
rANS table, the codes; or bit-packed words; or raw ones. Where a figure had to be chosen, the one that is better
for the published system was: rANS codes cost the entropy, framing of archives costs nothing.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from configs.recipe import load
from operators.base import Stream
from operators.errors import FormatError
from operators.program import Literal, Node
from operators.words import Words, dtype_of, words_of
from synth.grammar import PRODUCTIONS
from synth.options import SearchOptions
from synth.prior import Prior
from synth.steps import Split
from synth.synthesis import synthesise
from synth.template import Template, fit
from tests.checkpoints import Tensor

BREVIS_FAMILIES = frozenset({"const", "ramp", "repeat", "ends", "float", "cut", "planes", "scan", "map"})
"""Families of our grammar that the published language can express; every other one is switched off."""
BREVIS_BUDGET = 512
BREVIS_ALPHABET = 1 << 16
"""Most distinct words for which its authors try an entropy code."""
HUFFMAN_ENTRY_BYTES, RANS_ENTRY_BYTES, TABLE_FIXED_BYTES = 5, 8, 13
NODE_BYTES = 3
"""An operator with its parameters."""
SHORTLIST = 3
"""Programs that are charged on all words; the others lose on a part already."""
PART_WORDS = 1 << 20
DFLOAT_BLOCK_BYTES = 4096
"""Coded bytes of a block of threads: 512 of 8 bytes, with a gap of 5 bits for each thread and one position."""


# -- the language of Brevis ---------------------------------------------------------------------


def brevis_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of all tensors in the published language, framing left out."""
    return sum(brevis_tensor_bytes(tensor) for tensor in tensors.values())


def brevis_options() -> SearchOptions:
    """Return the options that restrict our search to the published language."""
    others = sorted({production.family for production in PRODUCTIONS} - BREVIS_FAMILIES)
    recipe = load().recipe.synth
    return dataclasses.replace(recipe, budget=BREVIS_BUDGET, min_gain_ppm=0, disable=(*recipe.disable, *others))


def brevis_tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of one tensor: of the best program among a literal, splits of it, and what the search found."""
    words = words_of(tensor.data, dtype_of(tensor.dtype).word_bits)
    if words.size < 2:
        return len(tensor.data) + 1
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    columns = words.size // max(1, rows)
    found = synthesise(
        words, dtype=tensor.dtype, rows=rows, columns=columns, options=brevis_options(), prior=Prior.shipped()
    )
    templates = dict.fromkeys([None, found.template, *(one.template for one in found.trace), *_splits(tensor)])
    stream = Stream(words.dtype.itemsize * 8, words.size)
    by_row = columns if rows > 1 and 1 < columns < words.size else 0
    part = words[: max(1, PART_WORDS // columns) * columns] if words.size > PART_WORDS else words

    def program_bytes(template: Template | None, some: Words, of_words: int) -> int:
        some_stream = Stream(stream.width_bits, some.size)
        return charged_bytes(fit(template, some, some_stream, by_row), some, some_stream, of_words)

    ranked = sorted(templates, key=lambda template: program_bytes(template, part, words.size))
    return min(program_bytes(template, words, words.size) for template in ranked[:SHORTLIST])


def _splits(tensor: Tensor) -> list[Template]:
    """Return programs that only split the words: as float fields, in bytes, in two at any bit."""
    dtype = dtype_of(tensor.dtype)
    width = dtype.word_bits
    widths: list[tuple[int, ...]] = [(cut, width - cut) for cut in range(1, width)] if width <= 16 else []
    widths += [(8,) * (width // 8)] if width > 8 else []
    if dtype.exponent_bits:
        widths += [
            (dtype.mantissa_bits - top, dtype.exponent_bits + top, 1) for top in range(min(5, dtype.mantissa_bits))
        ]
    return [Template("split", Split(one, "split"), (None,) * len(one), 0) for one in widths]


def charged_bytes(program: Node, words: Words, stream: Stream, of_words: int) -> int:
    """Return the bytes of `program` for `words`, scaled to a root of `of_words` words, as the authors charge."""
    if isinstance(program.op, Literal):
        return literal_bytes(words, stream, max(1, of_words))
    try:
        streams = program.op.children(stream)
    except FormatError:
        return literal_bytes(words, stream, of_words)
    targets = program.op.targets(words, stream)
    if targets is None:
        return literal_bytes(words, stream, of_words)
    below = zip(program.children, targets, streams, strict=True)
    return NODE_BYTES + sum(
        charged_bytes(child, target, child_stream, of_words * child_stream.n_words // max(1, stream.n_words))
        for child, target, child_stream in below
    )


def literal_bytes(words: Words, stream: Stream, of_words: int) -> int:
    """Return the bytes of a literal by the published wire format."""
    if words.size == 0:
        return 1
    raw = 1 + of_words * words.itemsize
    best = min(raw, 2 + -(-of_words * max(1, int(words.max()).bit_length()) // 8))
    counts = _counts(words)
    if counts is None:
        return best
    frequencies = counts / counts.sum()
    code_bits = of_words * float(-(frequencies * np.log2(frequencies)).sum())
    rans = TABLE_FIXED_BYTES + RANS_ENTRY_BYTES * counts.size + int(code_bits / 8)
    huffman = TABLE_FIXED_BYTES + HUFFMAN_ENTRY_BYTES * counts.size
    if huffman + code_bits / 8 < min(best, rans):  # no code is shorter than the entropy
        huffman += int(huffman_bits(counts) * of_words / words.size / 8)
        best = min(best, huffman)
    return min(best, rans)


def _counts(words: Words) -> NDArray[np.int64] | None:
    """Return how often each word that occurs does, or None where there are more of them than the authors code."""
    if words.dtype.itemsize <= 2:
        counts = np.bincount(words)
        return counts[counts > 0]
    if words.size > PART_WORDS and np.unique(words[:PART_WORDS]).size > BREVIS_ALPHABET:
        return None
    counts = np.unique(words, return_counts=True)[1]
    return counts if counts.size <= BREVIS_ALPHABET else None


def huffman_bits(counts: NDArray[np.int64]) -> int:
    """Return the bits of all codes of a Huffman code without a limit on its lengths."""
    if counts.size == 1:
        return int(counts[0])
    heap = [int(count) for count in counts]
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        bits += merged
        heapq.heappush(heap, merged)
    return bits


# -- DFloat11 -----------------------------------------------------------------------------------


def dfloat11_bytes(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the bytes of a BF16 checkpoint: matrices coded by layer, all else as it is. None for other dtypes."""
    if not any(tensor.dtype == "BF16" and len(tensor.shape) >= 2 for tensor in tensors.values()):
        return None
    groups: dict[str, list[Tensor]] = {}
    n_bytes = 0
    for name, tensor in tensors.items():
        if tensor.dtype == "BF16" and len(tensor.shape) >= 2:
            groups.setdefault(layer_of(name), []).append(tensor)
        else:
            n_bytes += len(tensor.data)
    return n_bytes + sum(map(_dfloat11_group, groups.values()))


def layer_of(name: str) -> str:
    """Return what of a tensor's name tells its layer: up to the first number, or all of it."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def _dfloat11_group(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the matrices of one layer, which share a code of their exponents."""
    counts = np.zeros(256, np.int64)
    for tensor in tensors:
        counts += np.bincount(np.frombuffer(tensor.data, "<u2") >> 7 & 255, minlength=256)
    lengths = code_lengths(np.append(counts[counts > 0], 1))  # the code has a symbol for the end
    n_words = int(counts.sum())
    coded = -(-int((lengths[:-1] * counts[counts > 0]).sum()) // 8)
    blocks = -(-coded // DFLOAT_BLOCK_BYTES)
    luts = 256 * (2 + int((lengths.max() - 1) // 8))  # one for each byte of a code, about, and the lengths
    return coded + n_words + -(-blocks * 512 * 5 // 8) + 4 * (blocks + 1) + luts


def code_lengths(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lengths of a Huffman code, symbol by symbol."""
    lengths = np.zeros(counts.size, np.int64)
    heap: list[tuple[int, int, list[int]]] = [(int(count), symbol, [symbol]) for symbol, count in enumerate(counts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, _, left), (b, serial, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (a + b, serial, left + right))
    return lengths
