"""The search of one tensor, from its words to a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from operators.base import Stream
from operators.kernels.costing import first_change
from operators.ops.const import Const
from operators.program import Node
from operators.words import Words
from synth.cost import BYTE_Q8
from synth.hole import Hole, Setting
from synth.options import SearchOptions
from synth.prior import Prior
from synth.search import Improvement, Search
from synth.template import Template, Weighed, fit, weigh

MIN_BUDGET = 4
BAND = 1024
"""Finalists within one part in so many of the best are weighed by exact bytes."""
MAX_EXACT = 2
"""Finalists whose exact bytes are worked out: planning tables takes longer than the search of a small tensor."""
CLEAR = 200
"""A finalist that is smaller than all others by one part in so many needs no larger sample: none errs by as much."""
SMALL = 16
"""Nor does one that differs from others in less than this part of the whole: a sample that errs there costs little."""
MISSED_PERCENT, MISSED_BYTES = 103, 64
"""A program that takes more than this part of what it was expected to, and so many bytes, was misjudged."""
FULL_BYTES = 32 << 10
"""A smaller tensor has fewer expansions, in proportion: one takes as long as it takes to code half a megabyte."""


@dataclass(frozen=True, slots=True)
class Synthesis:
    """What a search has found.

    Attributes
    ----------
    program : Node
        For the words that were searched; `lit` where the emitter is to choose an encoding.
    template : Template or None
        The program with its data-dependent parameters open; None for a literal.
    winner : Weighed
        The program, its costs node by node.
    literal_q8 : int
        Cost of the words as one literal, in 1/256 bit.
    runners_up : tuple of Weighed
        Other finalists, the cheapest first.
    expansions, budget : int
        Used and allowed.
    stopped : {"budget", "exhausted", "satisfied", "max_holes"}
        Why the search ended.
    trace : tuple of Improvement
        Every better program, with the expansions it took to find it.
    columns : int
        Words of a row, 0 where there are none.
    """

    program: Node
    template: Template | None
    winner: Weighed
    literal_q8: int
    runners_up: tuple[Weighed, ...]
    expansions: int
    budget: int
    stopped: str
    trace: tuple[Improvement, ...]
    columns: int

    def program_for(self, words: Words) -> Node:
        """Return the program for other words of the same tensor: one of its segments."""
        if words.size > 1 and first_change(words, 1) == words.size:
            return Node(Const(int(words[0])))  # whatever the rest of the tensor is
        return fit(self.template, words, Stream(words.dtype.itemsize * 8, words.size), self.columns)

    def is_missed(self, n_bytes: int) -> bool:
        """Whether a program of `n_bytes` is so much larger than expected that the sample has misled the search."""
        return n_bytes > MISSED_PERCENT * self.winner.cost_q8 // (100 * BYTE_Q8) + MISSED_BYTES

    def others(self) -> Iterator[Synthesis]:
        """Yield the runners-up, each as the winner it might have been, the one expected to be smallest first."""
        for other in self.runners_up:
            yield replace(self, template=other.template, winner=other, runners_up=())


def budget_of(n_bytes: int, options: SearchOptions) -> int:
    """Return the expansions that a tensor of `n_bytes` may take."""
    return min(options.budget, max(MIN_BUDGET, options.budget * n_bytes // FULL_BYTES))


def synthesise(
    words: Words, *, dtype: str | None, rows: int, columns: int, options: SearchOptions, prior: Prior
) -> Synthesis:
    """Search the program of a tensor.

    Parameters
    ----------
    words : Words
        The region that a task holds. Read only. Exact structure is looked for in all of it, everything else
        in a sample.
    dtype : str or None
        Of safetensors; None for bytes that are no tensor.
    rows, columns : int
        Shape of the words as a matrix: the first dimension and the product of the others, in words. 0 or 1
        where there are no rows.
    options : SearchOptions
    prior : Prior
        Orders the search; what it finds at an unlimited budget does not depend on it.

    Returns
    -------
    Synthesis
        The same for the same arguments, on any machine.
    """
    columns = columns if rows > 1 and 1 < columns < words.size else 0
    setting = Setting.of(dtype, options)
    search = Search(setting.root(words, columns), options)
    budget = budget_of(words.nbytes, options)
    search.run(prior, budget)
    return finish(search, setting, words, columns, budget)


def finish(
    search: Search, setting: Setting, words: Words, columns: int, budget: int, *, release: bool = True
) -> Synthesis:
    """Weigh the last programs that a search has found, and the literal; return the smallest.

    Small tensors are weighed whole, large ones on a larger sample than was searched where it may decide.
    """
    options = search.options
    root = search.root
    last_first = [improvement.template for improvement in reversed(search.improvements)]
    candidates = [*last_first[: options.finalists], None]
    found = _ranked(root, candidates, exact=False)
    if not root.exact and any(_is_close(found[0], other) for other in found[1:]):
        larger = replace(setting, sample_words=options.finish_words, exact_words=options.finish_words)
        root = larger.root(words, columns)
        root.detected = search.root.detected
        found = _ranked(root, candidates, exact=False)
    close = [one.template for one in found if one.cost_q8 - found[0].cost_q8 <= found[0].cost_q8 // BAND]
    if root.exact and len(close) > 1:
        found = _ranked(root, close[:MAX_EXACT], exact=True) + found[min(len(close), MAX_EXACT) :]
    winner = found[0]
    literals = [one for one in found if one.template is None or one.template.is_literal]
    synthesis = Synthesis(
        fit(winner.template, words, root.stream, columns, root.detected),
        winner.template,
        winner,
        root.literal.bits_q8 if not literals else literals[0].cost_q8,
        tuple(found[1:]),
        search.expansions,
        budget,
        search.stopped,
        tuple(search.improvements),
        columns,
    )
    if release:
        search.release()
    return synthesis


def _is_close(best: Weighed, other: Weighed) -> bool:
    """Whether a larger sample may prefer `other`, and by enough to be worth it."""
    return other.cost_q8 - best.cost_q8 <= best.cost_q8 // CLEAR and _apart_q8(best, other) * SMALL > best.cost_q8


def _apart_q8(best: Weighed, other: Weighed) -> int:
    """Return the cost of what is not the same in both programs."""
    if best.template == other.template:
        return 0
    if not best.children or [child.tag for child in best.children] != [child.tag for child in other.children]:
        return best.cost_q8
    return sum(map(_apart_q8, best.children, other.children))


def _ranked(root: Hole, templates: list[Template | None], *, exact: bool) -> list[Weighed]:
    """Return the distinct programs that are left after pruning, the cheapest first, of equals the earliest."""
    weighed: list[Weighed] = []
    for template in dict.fromkeys(templates):
        candidate = weigh(root, template, exact=exact)
        if candidate.template not in [other.template for other in weighed]:
            weighed.append(candidate)
    return sorted(weighed, key=lambda candidate: candidate.cost_q8)
