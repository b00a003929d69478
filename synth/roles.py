"""One search for tensors that play the same role.

The layers of a network repeat: tensors whose names differ by numbers alone, of one dtype and shape, nearly
always want the same program. It is taken from the prior, where calibration has searched one of them, or from
the first of a task. A tensor takes it if it looks alike; whoever writes it compares the bytes with what the
program took of the first (`synth.synthesis.Synthesis.is_missed`).
"""

from __future__ import annotations

import re
from dataclasses import replace

from operators.base import Stream
from operators.program import parse
from operators.words import Words
from synth.cost import judge
from synth.options import SearchOptions
from synth.prior import Prior, Remembered
from synth.sample import take_sample
from synth.synthesis import Synthesis, synthesise
from synth.template import Weighed

GLANCE_WORDS = 4096
"""Words by which tensors look alike."""
SMALL_WORDS = 1 << 12
"""Up to so many words a search takes longer than its result is worth."""
_NUMBER = re.compile(r"\d+")

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
        self._found: dict[str, tuple[tuple[int, ...], Synthesis]] = {}

    def clear(self) -> None:
        """Forget all roles: a task must not depend on those before it."""
        self._found.clear()

    def search(self, name: str | None, words: Words, dtype: str | None, rows: int, columns: int) -> Synthesis:
        """Search a tensor as `synth.synthesis.synthesise` does."""
        found = synthesise(words, dtype=dtype, rows=rows, columns=columns, options=self._options, prior=self._prior)
        if self._options.share:
            role = role_of(name, words.size, dtype, rows, columns)
            if role not in self._found:
                self._found[role] = glance(words, columns), found
        return found

    def recall(self, name: str | None, words: Words, dtype: str | None, rows: int, columns: int) -> Synthesis | None:
        """Return what was found for a tensor of this role that looks like this one, fitted to it, or None."""
        if not self._options.share:
            return None
        role = role_of(name, words.size, dtype, rows, columns)
        known = self._found.get(role)
        remembered = self._prior.programs.get(role)
        if known is None and remembered is None:
            return None
        seen = glance(words, columns)
        if known is not None and known[0] == seen:
            found = known[1]
            return replace(found, program=found.program_for(words), expansions=0, trace=(), runners_up=())
        if known is None and remembered is not None and remembered.alike == seen:
            return _recalled(remembered, words, columns)
        return None


def _recalled(remembered: Remembered, words: Words, columns: int) -> Synthesis:
    stream = Stream(8 * words.itemsize, words.size)
    cost_q8 = remembered.bits_q18 * words.size >> 10
    winner = Weighed(None, "root", stream, cost_q8, "", ())
    return Synthesis(
        parse(remembered.program), None, winner, cost_q8, (), expansions=0, budget=0, stopped="recalled", trace=(),
        columns=columns,
    )  # fmt: skip


def role_of(name: str | None, n_words: int, dtype: str | None, rows: int, columns: int) -> str:
    """Return the role of a tensor: its name without numbers, dtype and shape. Small ones go by the latter alone."""
    kind = _NUMBER.sub("#", name or "") if n_words > SMALL_WORDS else ""
    return f"{kind}|{dtype}|{n_words}|{rows}|{columns}"


def glance(words: Words, columns: int) -> tuple[int, ...]:
    """Return the buckets of a small sample of a tensor."""
    width_bits = 8 * words.itemsize
    sample = take_sample(words, width_bits, columns, GLANCE_WORDS, GLANCE_WORDS)
    verdict = judge(sample.words, 0, sample.stream, row_below=sample.row_below)
    *seen, near, row_near = verdict.features
    return (*seen, near >> 1, row_near >> 1)  # a little nearer than chance may be chance
