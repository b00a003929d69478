"""Bytes that are integers about zero, folded into magnitudes and coded in the context of rows and columns.

Weights of 8 bits are such integers. Their zigzag codes are small where they are near zero and hold the sign in the
lowest bit: a window of 63 symbols takes small weights whole, larger ones without their sign, or in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from operators.base import Stream
from operators.ops.zigzag import Zigzag
from operators.program import LIT, Node
from operators.words import Dtype, Words
from synth.conditioned import KINDS, MIN_WORDS, Condition, cheapest
from synth.cost import node_q8
from synth.features import FLAT
from synth.hole import Hole

CENTRED = 60
"""Mean magnitude of bytes about zero, at most: that of noise is 64."""
JUDGED_ROWS = 2048
"""Rows that are folded to be judged: a multiple of a tile, and enough of them to be seen as rows."""
LAYOUTS = tuple(Dtype("", 8, 8, 8 - low_bits, low_bits) for low_bits in range(3))
"""Of folded integers, by the bits that are left as they are: none, the sign, the sign and one more."""
_ZIGZAG = Zigzag()


@dataclass(frozen=True, slots=True)
class Folded(Condition):
    """Zigzag codes in the context of the magnitudes of their rows and columns."""

    def node(self, stream: Stream, columns: int) -> Node:
        leaf = Condition.node(self, stream, columns)
        return LIT if leaf is LIT else Node(_ZIGZAG, (leaf,))

    def words(self, hole: Hole) -> tuple[Words, int] | None:
        whole, columns = hole.whole(), hole.columns
        if whole is None:
            return None

        def folded() -> Words:
            step = max(1, whole.size // max(1, columns) // JUDGED_ROWS)
            return _folded(whole if step == 1 else whole.reshape(-1, columns)[: step * JUDGED_ROWS : step].reshape(-1))

        return hole.setting.memo.once(whole, ("folded", columns), folded), 0

    def costs(self, hole: Hole) -> list[int] | None:
        costs = Condition.costs(self, hole)
        return None if costs is None else [node_q8(_ZIGZAG) + cost for cost in costs]

    def exact_q8(self, words: Words, stream: Stream, columns: int) -> int | None:
        cost = Condition.exact_q8(self, _folded(words), stream, columns)
        return None if cost is None else node_q8(_ZIGZAG) + cost


def is_integer(hole: Hole) -> bool:
    """Whether the words are signed bytes in rows, and no noise."""
    is_small = hole.stream.n_words < MIN_WORDS
    return (
        hole.tag == "root" and hole.setting.dtype.name == "I8" and not is_small
        and hole.columns > 1 and hole.features[0] < FLAT
    )  # fmt: skip


def is_centred(hole: Hole) -> bool:
    """Whether signed bytes lie about zero."""
    magnitudes = np.abs(hole.sample.words.view(np.int8).astype(np.int16))
    return int(magnitudes.sum()) < CENTRED * magnitudes.size


def swept_integers(hole: Hole) -> Condition | None:
    """Return the condition that costs least: by rows and columns, rows or nothing, and with how many raw bits."""
    kind = KINDS[hole.setting.coder]
    by_both = cheapest(hole, [Folded(2, 0, 0, layout, kind) for layout in LAYOUTS])
    if by_both is None:
        return None
    return cheapest(hole, [Folded(scales, 0, 0, by_both.layout, kind) for scales in (2, 1, 0)])


def _folded(words: Words) -> Words:
    targets = _ZIGZAG.targets(words, Stream(8, words.size))
    assert targets is not None
    return targets[0]
