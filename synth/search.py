"""Best-first search over the graph of holes.

One expansion is one production applied to one hole and costed on its sample; the budget counts
expansions, never seconds. The key of an open production is

    max(0, size of the best program forced through it - size of the best program)
    + lambda * size of the literal * -log2 of the chance of the path

and that of exact structure comes before all others. Lambda is 0.01 for the first 64 expansions, then 0.03
(measured: any constant is worse somewhere). Keys are computed again when popped and pushed back if they have
grown. One expansion in four goes to the first level, so that a few dozen miss no program of one level.
Ties go to the older hole, then to the order of the catalogue. All of it is integers, so the same
words, options and prior give the same program.

Bounds, both admissible: a hole cannot save more than its own cost; at the last level, splits and maps
cannot go below the entropy of the words. A hole that the first rules out waits until an improvement
elsewhere could matter to it.
"""

from __future__ import annotations

import heapq
import zlib
from dataclasses import dataclass

from synth.cost import BYTE_Q8
from synth.grammar import Production, offers
from synth.hole import Edge, Hole
from synth.options import SearchOptions
from synth.prior import Belief, Prior
from synth.template import Template, template_of

LAMBDA_Q16 = (655, 1966)
"""Weight of the prior, 0.01 and 0.03: before and after `ANNEAL_EXPANSIONS`."""
ANNEAL_EXPANSIONS = 64
TOP_EVERY = 4
"""Of so many expansions one goes to the first level of the best program, whatever is expected below: a prior that is
wrong about a tensor would else keep it at what it knows, and a program of one level would be missed."""
NODE_Q8 = 2 * BYTE_Q8
"""Least cost of an operator on the wire."""
LEAST_GAIN_Q8 = 24 * BYTE_Q8
"""What an expansion has to save beside a part of the tensor: it takes as long for a small one."""
SPREAD_BITS = 4
"""Steps of one kind differ by about ``2**-SPREAD_BITS`` of what they gain."""
SATISFIED_Q8 = 24 * BYTE_Q8
"""A program that is smaller than the header of its record is not worth improving."""
ACCEPT_EXACT_Q8 = BYTE_Q8
"""Saving from which a step is accepted on exact words."""
ACCEPT_SAMPLED_Q8 = 4 * BYTE_Q8
"""On a sample a step has to save this and 3 parts in 10,000 of its hole: less is noise, and noise adds up."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A better program, found."""

    expansions: int
    cost_q8: int
    template: Template | None


@dataclass(slots=True, eq=False)
class _Open:
    """A hole with productions left to try, those of the better chance first."""

    hole: Hole
    serial: int
    left: list[tuple[Belief, Production]]


class Search:
    """One search; `run` may be called again to go on under another prior.

    Parameters
    ----------
    root : Hole
    options : SearchOptions
        `budget` and `prior` are `run`'s matter.
    """

    def __init__(self, root: Hole, options: SearchOptions) -> None:
        self.root = root
        self.options = options
        self.expansions = 0
        self.held_bytes = 0
        self._held: set[int] = set()
        self.improvements = [Improvement(0, root.best_q8, None)]
        self.stopped = "budget"
        self._depth, self._disable = options.depth, frozenset(options.disable)
        if options.order == "depth1":
            # A leaf in the context of scales is a split and a condition: no program of one level.
            self._depth, self._disable = min(options.depth, 1), self._disable | {"scaled"}
        self._queue: list[tuple[int, int, _Open]] = []
        self._top: list[_Open] = []
        self._waiting: list[_Open] = []
        self._serial = 0
        self._prior = Prior.uniform()
        self._shuffle: int | None = None
        self._is_thrifty = False
        self.holes: list[Hole] = [root]

    def run(self, prior: Prior, budget: int, *, shuffle: int | None = None) -> None:
        """Expand until `budget` expansions are made in all, or nothing worth one is left.

        Parameters
        ----------
        prior : Prior
        budget : int
        shuffle : int, optional
            Seed by which productions of equal chance are tried in another order than the catalogue's.
        """
        self._prior = prior
        self._shuffle = shuffle
        self._is_thrifty = prior.informed and self.options.min_gain_ppm > 0 and not self.root.summary.repeats
        self._queue.clear()
        self._top.clear()
        self._waiting.clear()
        self.held_bytes = 0
        self._held.clear()
        for hole in self.holes:
            self._offer(hole)
        while self.expansions < budget:
            if not self._queue:
                self.stopped = "exhausted"
                return
            if self.root.best_q8 <= SATISFIED_Q8:
                self.stopped = "satisfied"
                return
            if len(self.holes) >= self.options.max_holes:
                self.stopped = "max_holes"
                return
            if self.options.order == "default" and self.expansions % TOP_EVERY == TOP_EVERY - 1:
                top = self._at_the_top()
                if top is not None:
                    belief, production = top.left.pop()
                    self._expand(top.hole, production, belief)
                    continue
            key, _, item = heapq.heappop(self._queue)
            forced = forced_q8(item.hole)
            if self._cannot_matter(item.hole, forced):
                self._waiting.append(item)
                continue
            self._drop_vain(item, max(0, forced - self.root.best_q8))
            if not item.left:
                continue
            now = self._key(item, forced)
            if now > key and self._queue and now > self._queue[0][0]:
                heapq.heappush(self._queue, (now, item.serial, item))
                continue
            belief, production = item.left.pop()
            self._expand(item.hole, production, belief)
            if item.left:
                self._push(item)
        self.stopped = "budget"

    def release(self) -> None:
        """Let go of the graph: its holes and edges refer to each other, and hold samples."""
        for hole in self.holes:
            hole.edges.clear()
            hole.best_edge = hole.parent = None
        self.holes.clear()
        self._queue.clear()
        self._top.clear()
        self._waiting.clear()

    # -- expansion --------------------------------------------------------------------------------------

    def _expand(self, hole: Hole, production: Production, belief: Belief) -> None:
        if self._cannot_win(hole, production):
            return
        self.expansions += 1
        step = production.step(hole)
        expansion = step.expand(hole) if step is not None else None
        if step is None or expansion is None:
            hole.refused.append(production.name)
            return
        edge = Edge(hole, production.name, step, expansion[0], expansion[1], belief.bits_q10)
        hole.edges.append(edge)
        for child in edge.children:
            child.parent = edge
            child.path_q10 = hole.path_q10 + belief.bits_q10
        self._improve(edge)
        self.holes.extend(edge.children)
        if production.follow:
            self._follow(edge.children[-1], production.follow)
        for child in edge.children:
            self._offer(child)

    def _at_the_top(self) -> _Open | None:
        """Return the hole of the first level to be tried next: one of the best program, with productions left."""
        best: tuple[int, int, _Open] | None = None
        for item in self._top:
            forced = forced_q8(item.hole)
            if not item.left or forced > self.root.best_q8 or self._cannot_matter(item.hole, forced):
                continue
            self._drop_vain(item, 0)
            if item.left:
                entry = self._key(item, forced), item.serial, item
                best = entry if best is None else min(best, entry)
        return None if best is None else best[2]

    def _follow(self, hole: Hole, family: str) -> None:
        """Try the likeliest production of a family at a hole that is worth nothing as a literal.

        Its place in the queue would be that of the literal.
        """
        ranked = self._prior.ranked(hole, offers(hole, self._depth, self._disable))
        likeliest = next((entry for entry in reversed(ranked) if entry[1].family == family), None)
        if likeliest is not None:
            self._expand(hole, likeliest[1], likeliest[0])

    def _cannot_matter(self, hole: Hole, forced: int) -> bool:
        """Whether a hole could cost nothing but an operator, and the whole would still be no smaller."""
        return forced - hole.best_q8 + NODE_Q8 >= self.root.best_q8

    def _cannot_win(self, hole: Hole, production: Production) -> bool:
        """Whether the entropy of the words rules the production out at the last level."""
        return (
            hole.depth == self.options.depth - 1
            and production.order0
            and hole.stream.width_bits not in (8, 16, 32, 64)
            and hole.best_q8 - hole.literal.floor_q8 <= NODE_Q8 + ACCEPT_EXACT_Q8
        )

    def _drop_vain(self, item: _Open, slack_q8: int) -> None:
        """Drop the next productions of a hole that cannot be expected to save what an expansion costs.

        A step that wins takes a hole to about the literal less the gain of the prior. Where the hole is there
        already, it may still be a little better than others of its kind. The longer nothing better was
        found, the more a step has to promise: the prior has been wrong about this tensor so often.

        Words that repeat are searched to the end of the budget: of exact structure no statistics tell. The
        likeliest production is tried in any case: few bytes may be all that a small tensor can save.
        """
        if not self._is_thrifty or self.expansions == 0:
            return
        literal_q8, best_q8 = item.hole.literal.bits_q8, item.hole.best_q8
        in_vain = self.expansions - self.improvements[-1].expansions
        least_q8 = self.root.literal.bits_q8 * self.options.min_gain_ppm // 1_000_000 + LEAST_GAIN_Q8
        least_q8 *= 1 + in_vain + in_vain * in_vain // 2
        while item.left:
            belief = item.left[-1][0]
            usual_q8 = literal_q8 * belief.gain_q10 >> 10
            saving_q8 = max(best_q8 - literal_q8 + usual_q8, usual_q8 >> SPREAD_BITS) - slack_q8
            if saving_q8 * belief.chance_q20 >> 20 >= least_q8:
                return
            item.left.pop()

    def _improve(self, edge: Edge) -> None:
        """Make `edge` the best of its hole and push the improvement up; holes that waited may matter now."""
        before = self.root.best_q8
        above: Edge | None = edge
        while above is not None and _is_better(above):
            above.hole.take(above)
            above = above.hole.parent
        if above is edge:
            return
        if self.root.best_q8 < before:
            self.improvements.append(Improvement(self.expansions, self.root.best_q8, template_of(self.root)))
        for item in self._waiting:
            if item.left:
                self._push(item)
        self._waiting.clear()

    # -- the queue --------------------------------------------------------------------------------------

    def _offer(self, hole: Hole) -> None:
        """Queue what may be tried at `hole` and has not been."""
        left = self._prior.ranked(hole, offers(hole, self._depth, self._disable))
        if hole.edges or hole.refused:
            tried = {edge.name for edge in hole.edges} | set(hole.refused)
            left = [entry for entry in left if entry[1].name not in tried]
        if not left:
            return
        if id(hole.field.sample) not in self._held:
            n_bytes = hole.field.sample.words.nbytes
            if self.held_bytes + n_bytes > self.options.max_held_bytes:
                return
            self._held.add(id(hole.field.sample))
            self.held_bytes += n_bytes
        if self._shuffle is None:
            left = left.copy()
        else:
            seed = self._shuffle
            left = sorted(left, key=lambda one: (one[0].bits_q10, _shuffled(seed, hole.tag, one[1].name)), reverse=True)
        self._serial += 1
        item = _Open(hole, self._serial, left)
        if hole.depth == 0:
            self._top.append(item)
        self._push(item)

    def _push(self, item: _Open) -> None:
        heapq.heappush(self._queue, (self._key(item, forced_q8(item.hole)), item.serial, item))

    def _key(self, item: _Open, forced: int) -> int:
        hole = item.hole
        belief, production = item.left[-1]
        if production.certain:
            return -1
        bits = hole.path_q10 + belief.bits_q10
        order = self.options.order
        if order == "paper":
            return bits
        slack = max(0, forced - self.root.best_q8)
        if order == "greedy":
            return slack
        weight = LAMBDA_Q16[self.expansions >= ANNEAL_EXPANSIONS]
        return slack + (self.root.literal.bits_q8 * bits * weight >> 26)


def _is_better(edge: Edge) -> bool:
    """Whether an edge saves enough to become the best of its hole, or is that and has become better."""
    hole = edge.hole
    least = 1
    if edge is not hole.best_edge:
        least = ACCEPT_EXACT_Q8
        if not hole.exact:
            least = hole.best_q8 * 3 // 10000 + ACCEPT_SAMPLED_Q8
            least = max(least, hole.best_q8 // edge.step.part if edge.step.part else 0)
    return edge.cost_q8 <= hole.best_q8 - least


def forced_q8(hole: Hole) -> int:
    """Return the cost of the best program of the whole that goes through `hole`."""
    cost = hole.best_q8
    while hole.parent is not None:
        edge = hole.parent
        cost += edge.cost_q8 - hole.best_q8
        hole = edge.hole
    return cost


def _shuffled(seed: int, tag: str, name: str) -> int:
    return zlib.crc32(f"{seed} {tag} {name}".encode())
