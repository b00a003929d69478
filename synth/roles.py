"""One search for the tensors of a task that play the same role.

The layers of a network repeat: tensors whose names differ by numbers alone, of one dtype and shape, nearly
always want the same program. The first is searched. Another one takes its program if it looks alike; whoever
writes it compares the bytes with what the program took of the first (`synth.synthesis.Synthesis.is_missed`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeAlias

from operators.base import Stream
from operators.words import Words
from synth.cost import judge
from synth.options import SearchOptions
from synth.prior import Prior
from synth.sample import take_sample
from synth.synthesis import Synthesis, synthesise

GLANCE_WORDS = 4096
"""Words by which tensors look alike."""
_NUMBER = re.compile(r"\d+")

Role: TypeAlias = tuple[str, str | None, int, int, int]


class Roles:
    """Searches tensors, and remembers what was found for each role.

    Parameters
    ----------
    options : SearchOptions
        `share` says whether anything is remembered.
    prior : Prior
    """

    def __init__(self, options: SearchOptions, prior: Prior) -> None:
        self._options = options
        self._prior = prior
        self._found: dict[Role, tuple[tuple[int, ...], Synthesis]] = {}

    def clear(self) -> None:
        """Forget all roles: a task must not depend on those before it."""
        self._found.clear()

    def search(self, name: str | None, words: Words, dtype: str | None, rows: int, columns: int) -> Synthesis:
        """Search a tensor as `synth.synthesis.synthesise` does."""
        found = synthesise(words, dtype=dtype, rows=rows, columns=columns, options=self._options, prior=self._prior)
        if name is not None and self._options.share:
            role = _role(name, words, dtype, rows, columns)
            self._found.setdefault(role, (_glance(words, columns), found))
        return found

    def recall(self, name: str | None, words: Words, dtype: str | None, rows: int, columns: int) -> Synthesis | None:
        """Return what was found for a tensor of this role that looks like this one, fitted to it, or None."""
        if name is None or not self._options.share:
            return None
        known = self._found.get(_role(name, words, dtype, rows, columns))
        if known is None or known[0] != _glance(words, columns):
            return None
        found = known[1]
        return replace(found, program=found.program_for(words), expansions=0, trace=(), runners_up=())


def _role(name: str, words: Words, dtype: str | None, rows: int, columns: int) -> Role:
    return _NUMBER.sub("#", name), dtype, words.size, rows, columns


def _glance(words: Words, columns: int) -> tuple[int, ...]:
    """Return the buckets of a small sample."""
    width_bits = 8 * words.itemsize
    sample = take_sample(words, width_bits, columns, GLANCE_WORDS, GLANCE_WORDS)
    verdict = judge(sample.words, 0, Stream(width_bits, words.size), row_below=sample.row_below)
    *seen, near, row_near = verdict.features
    return (*seen, near >> 1, row_near >> 1)  # a little nearer than chance may be chance
