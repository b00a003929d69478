"""The graph of the search: holes to be filled, and edges that fill them.

A hole is a stream that some program has to produce, known by a sample. Holes do not depend on each
other: given its words, the best program of a hole is the same wherever it stands. So a hole keeps its best
cost and best edge, an improvement is pushed up, and the program is read off the best edges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from operators.base import Operator, Stream
from operators.kernels.fields import split_field
from operators.words import Dtype, Words, container, dtype_of
from synth.cost import (
    BYTE_Q8,
    NOT_COUNTED,
    Counted,
    LiteralCost,
    LzProbe,
    Verdict,
    bytes_q8,
    counts_of,
    exact_literal,
    is_whole,
    judge,
)
from synth.features import NARROW_BITS
from synth.options import SearchOptions
from synth.sample import Sample, take_sample

if TYPE_CHECKING:
    from synth.steps import Step

MIXED_BITS = 16
"""Width from which words have bytes of several kinds."""
MIN_LZ_BYTES = 64
"""Fewest bytes of a stream for which LZ is looked at."""
Region = Callable[[], Words]
"""Gives the whole words of a hole."""
T = TypeVar("T")


class Memo:
    """What a search has worked out already: many steps make the same of the same words.

    Keys begin with the id of what was looked at, which the value keeps alive.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], tuple[object, Any]] = {}

    def once(self, owner: object, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """Return what `make` makes of `owner`; `key` says what that is. Made once."""
        full = (id(owner), *key)
        if full not in self._known:
            self._known[full] = owner, make()
        made: T = self._known[full][1]
        return made


@dataclass(frozen=True, slots=True)
class Setting:
    """What all holes of one search share."""

    dtype: Dtype
    sample_words: int
    exact_words: int
    coder: str = "rans"
    thorough: bool = False
    """Of conditioned leaves, as in `SearchOptions`."""
    probe: LzProbe = field(default_factory=LzProbe)
    memo: Memo = field(default_factory=Memo)
    counted: dict[int, tuple[Sample, Counted]] = field(default_factory=dict)
    """By the id of a sample of narrow words it and its counts, where they are fewer than the words."""

    @classmethod
    def of(cls, dtype: str | None, options: SearchOptions) -> Setting:
        """Return the setting of a search of words of `dtype`."""
        return cls(dtype_of(dtype), options.sample_words, options.exact_words, options.coder, options.thorough)

    def root(self, words: Words, columns: int) -> Hole:
        """Return the hole of a whole region, whose rows have `columns` words (0 for none)."""
        width_bits = words.dtype.itemsize * 8
        sample = take_sample(words, width_bits, columns, self.sample_words, self.exact_words)
        is_float = self.dtype.exponent_bits > 0 and self.dtype.word_bits == width_bits
        region: Region = lambda: words  # noqa: E731
        return Hole(self, sample, "root", 0, region=region, is_float=is_float, origin=(region, 0))


class Field(NamedTuple):
    """Bits `shift` to ``shift + width_bits`` of the words of a sample: cut out only when needed.

    The sample is no field itself, so that the same field of the same words is always the same.
    """

    sample: Sample
    shift: int
    width_bits: int

    def part(self, shift: int, width_bits: int) -> Field:
        """Return a field of this field."""
        return Field(self.sample, self.shift + shift, width_bits)

    def cut_out(self) -> Sample:
        """Return the field as a sample of its own."""
        words = np.empty(self.sample.words.size, container(self.width_bits))
        split_field(self.sample.words, self.shift, self.width_bits, words)
        return self.sample.with_words(words, self.width_bits)


class Hole:
    """A stream to be produced.

    Parameters
    ----------
    setting : Setting
    source : Sample or Field
    tag : str
        The step and slot that made this hole, ``root`` for the whole.
    depth : int
        Operators above that count.
    region : callable, optional
        Gives the whole words of a hole that is only sampled, so that exact structure is looked for in them.
    is_float : bool
        Whether the words still have sign, exponent and mantissa on top.
    layout : Dtype, optional
        Of the words, where they are the upper part of the tensor's; that of the tensor otherwise.
    origin : (callable, int), optional
        Gives whole words that hold those of this hole, and the bit at which they start in them.
    closed : bool
        Whether no production is offered: the first words of a scan, the values of a dictionary.

    Attributes
    ----------
    field : Field
        Where the words are found.
    best_q8 : int
        Cost of the best program known, a literal at first.
    best_edge : Edge or None
        The root of that program; None for a literal.
    parent : Edge or None
    path_q10 : int
        Bits of the prior for the edges above.
    edges : list of Edge
        Tried so far.
    refused : list of str
        Productions that were tried and did not apply.
    exact : bool
        Whether the sample is the whole stream.
    detected : dict of Step to Operator or None
        Exact structure that was looked for in all words.
    plain_q8 : int
        Cost of a literal without LZ.
    """

    __slots__ = (
        "best_edge", "best_q8", "closed", "columns", "depth", "detected", "edges", "exact", "features", "field",
        "is_float", "layout", "literal", "origin", "parent", "path_q10", "plain_q8", "refused", "region", "setting",
        "stream", "summary", "tag",
    )  # fmt: skip

    def __init__(
        self,
        setting: Setting,
        source: Sample | Field,
        tag: str,
        depth: int,
        *,
        region: Region | None = None,
        is_float: bool = False,
        closed: bool = False,
        layout: Dtype | None = None,
        origin: tuple[Region, int] | None = None,
    ) -> None:
        whole = source if isinstance(source, Field) else Field(source, 0, source.stream.width_bits)
        sample, shift, width = whole
        self.setting = setting
        self.field = whole
        self.tag = tag
        self.depth = depth
        self.is_float = is_float
        self.closed = closed
        self.layout = layout or setting.dtype
        self.origin = origin
        self.parent: Edge | None = None
        self.path_q10 = 0
        self.stream = sample.stream if source is sample else Stream(width, sample.stream.n_words)
        self.columns = sample.columns
        self.region = region
        self.exact = sample.layout is None
        # What is looked at whole may be worth matching, whatever its sample says.
        if region is None:
            verdict, literal = setting.memo.once(sample, ("judged", shift, width, closed), self._judged)
        else:
            verdict, literal = self._judged()
        self.summary, self.features = verdict.summary, verdict.features
        self.literal = literal
        self.plain_q8 = verdict.literal.bits_q8
        self.best_q8 = self.literal.bits_q8
        self.best_edge: Edge | None = None
        self.edges: list[Edge] = []
        self.refused: list[str] = []
        self.detected: dict[Step, Operator | None] = {}

    @property
    def sample(self) -> Sample:
        """The words as a sample of their own, cut out of wider ones at the first use."""
        sample, shift, width = self.field
        if width == sample.stream.width_bits:
            return sample
        return self.setting.memo.once(sample, ("cut", shift, width), self.field.cut_out)

    @property
    def look(self) -> tuple[object, ...]:
        """What most detectors see of this hole: all but its words and counts."""
        stream, dtype = self.stream, self.setting.dtype.name
        return (
            dtype, self.tag, stream.width_bits, self.features, stream.n_words, self.columns, self.depth, self.is_float,
            self.layout.mantissa_bits, self.exact, self.closed, self.region is None, self.literal.encoding,
            self.summary.live == 1,
        )  # fmt: skip

    def take(self, edge: Edge) -> None:
        """Make `edge`, which is cheaper, the root of the best program; the edge above costs less by that."""
        if self.parent is not None:
            self.parent.cost_q8 -= self.best_q8 - edge.cost_q8
        self.best_q8, self.best_edge = edge.cost_q8, edge

    def whole(self) -> Words | None:
        """Return all words, or None where only a sample is at hand."""
        if self.region is not None:
            return self.region()
        return self.sample.words if self.exact else None

    def detect(self, step: Step) -> Operator | None:
        """Return the operator of `step` for all words, or None; looked for once, as the words may be many."""
        if step not in self.detected:
            self.detected[step] = step.detect(self)
        return self.detected[step]

    def has_matches(self) -> bool:
        """Return whether words repeat others, as far as a sample tells of what is large."""
        whole, probe = self.whole(), self.setting.probe
        words = self.sample.words if whole is None else whole
        looked_at = words if is_whole(words, self.stream) else self.sample.words
        return self.setting.memo.once(words, ("matches",), lambda: probe.has_matches(looked_at))

    def exact_literal(self) -> tuple[int, str]:
        """Return cost and encoding of a literal as the emitter will write it; `exact` is required."""
        sample, with_lz, memo = self.sample, self.literal.encoding == "lz", self.setting.memo
        return memo.once(
            sample, ("planned", with_lz), lambda: exact_literal(sample.words, self.stream, with_lz=with_lz)
        )

    def _judged(self) -> tuple[Verdict, LiteralCost]:
        """Return the verdict on the words, and the cheapest literal."""
        (sample, shift, width), counted = self.field, self.setting.counted
        counts = counted[id(sample)][1] if id(sample) in counted else NOT_COUNTED
        verdict = judge(
            sample.words, shift, self.stream, row_below=sample.row_below, closed=self.closed, counted=counts
        )
        found = counts_of(verdict) if width == sample.stream.width_bits and width <= NARROW_BITS else None
        if found is not None:
            counted[id(sample)] = (sample, found)
        return verdict, self._with_lz(verdict)

    def _with_lz(self, verdict: Verdict) -> LiteralCost:
        """Return the cheapest literal, LZ included where words repeat, and in any case where matches may lie apart."""
        literal = verdict.literal
        is_looked_at = self.region is not None and (self.depth == 0 or self.tag.startswith("sign"))
        if not is_looked_at and not verdict.summary.repeats:
            return literal
        if self.stream.n_bytes < MIN_LZ_BYTES or literal.bits_q8 <= 8 * BYTE_Q8:
            return literal
        if not is_looked_at and self.stream.width_bits > NARROW_BITS and not verdict.summary.varying & 1:
            return literal  # matches are looked for where the bits that never change are cut off
        if self.is_float and self.stream.width_bits >= MIXED_BITS and not self.has_matches():
            # Fields of a float will have better codes than its bytes together: an estimate is good enough.
            return literal.or_lz(bytes_q8(self.sample.words, self.stream), self.stream)
        whole, probe = self.whole(), self.setting.probe
        words = self.sample.words if whole is None else whole
        lz_q8 = probe.payload_q8(words, self.stream, literal.bits_q8)
        return literal if lz_q8 is None else literal.or_lz(lz_q8, self.stream)


@dataclass(slots=True, eq=False)
class Edge:
    """A step applied to a hole.

    Attributes
    ----------
    name : str
        Of the production that took the step.
    step : Step
    overhead_q8 : int
        Cost of the operator on the wire.
    children : sequence of Hole
    prior_q10 : int
        What the prior took this step for, -log2 p.
    cost_q8 : int
        Cost of the best program that begins with this step.
    """

    hole: Hole
    name: str
    step: Step
    overhead_q8: int
    children: Sequence[Hole]
    prior_q10: int
    cost_q8: int = field(init=False)

    def __post_init__(self) -> None:
        self.cost_q8 = self.overhead_q8 + sum([child.best_q8 for child in self.children])
