"""Leaves in the context of their rows and columns, as the search weighs them: encodings, but chosen as steps.

A step names how a leaf is conditioned; how many tables are worth their bytes is swept inside it. Costs come
from the planner of the encoding itself (`operators.literals.tiled`), run on a sample of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from operators.base import Operator, Stream
from operators.kernels.scales import CHUNK, LEVELS, STEPS, SYMBOLS, TILE_ROWS, sign_spread
from operators.kernels.tile_costs import table_costs
from operators.kernels.tile_heads import scale_bits
from operators.literals.scaled import Scaled
from operators.literals.scaled_huffman import ScaledHuffman
from operators.literals.tiled import THOROUGH, USUAL, Scales, Tiled, view_columns
from operators.program import LIT, Literal, Node
from operators.words import Dtype, Words
from synth.cost import BYTE_Q8, Q8, literal_q8, node_q8
from synth.hole import Hole
from synth.logs import LOGS, SMOOTH_LOGS
from synth.steps import Expansion, Step

KINDS: dict[str, type[Tiled]] = {"rans": Scaled, "huffman": ScaledHuffman}
"""The encoding of each coder."""
MIN_WORDS = 1 << 11
"""Fewest words that are conditioned: tables and states take a few hundred bytes."""
LEAN_ROWS = 128
"""Rows whose signs are looked at."""
LEAN_GAIN_Q20 = (1 << 20) // 64
"""Bits of a word, in 2**-20, that the lowest bit of the mantissa gains where it is coded and signs are not."""
_LOG_E_Q20 = 1512775
"""log2(e) in units of 2**-20."""


@dataclass(frozen=True, slots=True)
class Condition(Step):
    """A leaf in the context of scales.

    Attributes
    ----------
    scales : int
        0 none, 1 of rows, 2 of rows and columns.
    signed : int
        2 where the sign relative to its column's is coded, 1 otherwise, 0 for integers, which have none.
    fraction_bits : int
        Bits of the mantissa that are coded with the exponent.
    layout : Dtype
        Of the words.
    kind : type of Tiled
        The encoding.
    tables : int or None
        ``2**tables`` tables an octave; None while they are to be swept.
    thorough : bool
        Whether the leaf is planned from all words.
    """

    fixed = True
    scales: int
    signed: int
    fraction_bits: int
    layout: Dtype
    kind: type[Tiled]
    tables: int | None = None
    thorough: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind.name}[{self.scales},{self.signed},{self.fraction_bits},{self.tables}]"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        return None

    def encoding(self, stream: Stream, columns: int) -> Tiled:
        """Return the encoding of a leaf whose rows have `columns` words, 0 where it has none."""
        view = view_columns(stream.n_words, columns if self.scales else 0)
        low_bits = self.layout.mantissa_bits - self.fraction_bits
        return self.kind(view, low_bits, self.fraction_bits, self.signed, self.scales, self.tables or 0)

    def node(self, stream: Stream, columns: int) -> Node:
        """Return the node of a leaf, a literal that the emitter is to choose where the words are too few."""
        if stream.n_words < MIN_WORDS:
            return LIT
        return Node(Literal(self.kind.name, self.encoding(stream, columns).params, self.thorough))

    def expand(self, hole: Hole) -> Expansion | None:
        costs = self.costs(hole)
        return None if costs is None else (costs[self.tables or 0], [])

    def exact_q8(self, words: Words, stream: Stream, columns: int) -> int | None:
        """Return the cost by the bytes that the encoding writes, or None where it gives up."""
        encoding = self.encoding(stream, columns)
        n_bytes = encoding.write(words, np.empty(words.nbytes, np.uint8), thorough=self.thorough)
        return None if n_bytes < 0 else _node_q8(encoding) + literal_q8(n_bytes * BYTE_Q8)

    def words(self, hole: Hole) -> tuple[Words, int] | None:
        """Return words whose upper bits are those that are coded, and the bits below, or None where none are at hand.

        They are all, or a sample without rows where rows do not matter.
        """
        return _words_of(hole, flat=not self.scales)

    def costs(self, hole: Hole) -> list[int] | None:
        """Return what a leaf would cost with 1, 2, 4 and 8 tables an octave, or None where it cannot be judged."""
        found = self.words(hole)
        if found is None:
            return None
        words, below = found
        stream = hole.stream
        encoding = self.encoding(Stream(stream.width_bits, words.size), hole.columns)
        key = ("conditioned", below, stream.n_words, hole.setting.sample_words, encoding)
        return hole.setting.memo.once(words, key, lambda: self._costs(encoding, hole, words, below))

    def _costs(self, encoding: Tiled, hole: Hole, words: Words, below: int) -> list[int] | None:
        stream = hole.stream
        n_sampled = hole.setting.sample_words
        n_rows = words.size // encoding.columns // TILE_ROWS * TILE_ROWS
        step = max(1, n_rows * CHUNK // n_sampled)
        scales = _scales_of(encoding, hole, words, below, step)
        rows = np.arange(0, n_rows, step, dtype=np.int32)
        counts = encoding.counts_of(words, scales, rows, scales.rows, n_sampled, below)
        counts = counts if self.signed == 2 else counts[:STEPS]
        counted = int(counts.sum())
        if not counted:
            return None
        sums = np.empty((STEPS * LEVELS, SYMBOLS), np.int64)
        costs = np.empty((4, 2), np.int64)
        field_bits = encoding.field_bits(stream.width_bits)
        table_costs(counts, self.fraction_bits, field_bits, LOGS, SMOOTH_LOGS, sums, costs, encoding.max_length)
        raw_bits = encoding.low_bits + (self.signed > 0)
        fixed = 8 * 14 + raw_bits * stream.n_words
        if self.scales:
            fixed += int(scale_bits(scales.rows)) * step * stream.n_words // max(1, words.size)
        if self.scales == 2:
            fixed += int(scale_bits(scales.columns))
        if self.signed == 2:
            fixed += 4 * encoding.columns
        node = _node_q8(encoding)
        result = []
        for tables, (bits, head) in enumerate(costs.tolist()):
            extra_bits = 8 * encoding.extra_bytes(stream, (LEVELS if self.signed == 2 else 1) << tables)
            payload_q8 = (bits * stream.n_words // counted >> 12) + (fixed + head + extra_bits) * Q8
            result.append(node + literal_q8(payload_q8))
        return result


def _scales_of(encoding: Tiled, hole: Hole, words: Words, below: int, step: int) -> Scales:
    """Return the scales of a leaf. Those of rows and columns, and signs, are measured once for all conditions."""
    memo, effort = hole.setting.memo, THOROUGH if hole.setting.thorough else USUAL

    def measure(part: Tiled) -> Scales:
        return memo.once(words, ("scales", below, step, part), lambda: part.scales_of(words, below, step, effort))

    scales = measure(replace(encoding, signed=min(encoding.signed, 1), scales=2 if encoding.scales else 0))
    if encoding.scales == 1:
        scales = scales._replace(columns=np.zeros_like(scales.columns))
    if encoding.signed == 2:
        signs = measure(replace(encoding, scales=0))
        scales = scales._replace(levels=signs.levels, flips=signs.flips)
    return scales


def swept(hole: Hole, signed: int, fraction_bits: int) -> Condition | None:
    """Return the condition that costs least: by rows and columns, rows, or nothing, and with how many tables."""
    kind = KINDS[hole.setting.coder]
    return cheapest(
        hole,
        [
            Condition(scales, signed, fraction_bits, hole.layout, kind)
            for scales in ((2, 1, 0) if hole.columns > 1 else (0,))
            if scales or signed < 2
        ],
    )


def cheapest(hole: Hole, steps: Iterable[Condition]) -> Condition | None:
    """Return the step that costs least, of equals the first, with as many tables as are worth it."""
    best: tuple[int, Condition] | None = None
    for step in steps:
        costs = step.costs(hole)
        if costs is not None and (best is None or min(costs) < best[0]):
            best = min(costs), replace(step, tables=costs.index(min(costs)), thorough=hole.setting.thorough)
    return None if best is None else best[1]


def is_conditioned(hole: Hole, signed: int, fraction_bits: int) -> bool:
    """Whether the words are floats of 8 or 16 bits, whose signs lean by column where they are to be coded."""
    return (
        hole.is_float
        and hole.layout.word_bits == hole.stream.width_bits
        and hole.stream.n_words >= MIN_WORDS
        and fraction_bits <= hole.layout.mantissa_bits
        and (signed < 2 or (hole.columns > 1 and leans(hole)))
    )


def leans(hole: Hole) -> bool:
    """Whether the signs of columns lean to one side so far that coding them pays for what they take the place of."""
    found = _words_of(hole, flat=False)
    if found is None:
        return False
    words = found[0]
    columns = view_columns(words.size, hole.columns)
    rows = words.size // columns
    step = max(1, rows // LEAN_ROWS)
    looked_at = -(-rows // step)
    spread = int(sign_spread(words, columns, rows, step, np.empty(columns, np.uint32)))
    # A column whose signs are set with chance 1/2 + d takes about 2.89 d**2 bit a word less, chance alone 0.72 / rows.
    gain_q20 = (spread * _LOG_E_Q20 // (2 * looked_at * columns) - _LOG_E_Q20 // 2) // looked_at
    return gain_q20 > LEAN_GAIN_Q20


def _words_of(hole: Hole, *, flat: bool) -> tuple[Words, int] | None:
    """Return words whose upper bits are those of the hole, all of them or a sample without rows, and the bits below."""
    if hole.origin is not None:
        region, shift = hole.origin
        words = region()
        return (words, shift) if shift + hole.stream.width_bits == 8 * words.itemsize else None
    words_or_none = hole.whole()
    if words_or_none is not None:
        return words_or_none, 0
    return (hole.sample.words, 0) if flat else None


def _node_q8(encoding: Tiled) -> int:
    """Return what the parameters take on the wire; the code is counted with any literal."""
    return node_q8(encoding) - BYTE_Q8
