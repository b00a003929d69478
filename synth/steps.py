"""Steps: operators as far as the shape of the data decides them.

A step still finds the data-dependent parameters of its operator in the words at hand (the value of a
constant, the size of a dictionary, a period), so that the program of a tensor fits each of its segments.
On a sample it gives the holes below it; the inverse is always that of the operator itself.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from operators.base import Operator, Stream
from operators.kernels.costing import first_change, first_period, last_change
from operators.kernels.fields import split_field
from operators.ops.add import Add
from operators.ops.concat import Concat
from operators.ops.const import Const
from operators.ops.dictionary import Dictionary
from operators.ops.merge import Merge
from operators.ops.repeat import Repeat
from operators.ops.scan import ScanAdd, ScanXor
from operators.ops.unpack import Unpack
from operators.words import Dtype, Words, container
from synth.cost import node_q8
from synth.features import count_distinct
from synth.hole import Field, Hole, Region
from synth.sample import Sample, take_sample

MAX_DICTIONARY = 4096
"""Most values of a dictionary that is offered."""
DEEP_REGION_WORDS = 1 << 20
"""Most words that are computed in full on the mere chance of exact structure, or of matches."""
MIN_RUN_WORDS = 16
"""Fewest words of a constant or periodic end that is set apart; of a long stream a part in 256."""

Expansion = tuple[int, list[Hole]]
"""Cost of the operator on the wire, in 1/256 bit, and the holes below it."""


class Step(ABC):
    """An operator, as far as the shape of the data decides it.

    Attributes
    ----------
    fixed : bool
        Whether the operator is the same for all words of a shape; otherwise it has to be fitted.
    part : int
        On a large stream it has to save one part in this many of what it replaces, for the time that it takes
        of every writer and reader; 0 where it takes next to none.
    """

    fixed: ClassVar[bool] = False
    part: ClassVar[int] = 0

    @property
    @abstractmethod
    def label(self) -> str:
        """Name, from which the tags of the holes below are made."""

    @property
    def without(self) -> int | None:
        """The child that stands for all words where the step does not apply to them, as in some segments."""
        return None

    @abstractmethod
    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        """Return the operator for `words`, the whole of `stream`, or None where it does not apply."""

    def detect(self, hole: Hole) -> Operator | None:
        """Return the operator for all words of a hole, or None where it does not apply or not all are at hand."""
        words = hole.whole()
        return None if words is None else self.operator(words, hole.stream, hole.columns)

    @abstractmethod
    def expand(self, hole: Hole) -> Expansion | None:
        """Return what remains to be produced, or None where the step does not apply."""

    def columns_below(self, slot: int, columns: int, stream: Stream, below: Stream) -> int:
        """Return the words of a row of a child, 0 where it has none: of narrower words a row has more."""
        return columns * max(1, below.n_words // stream.n_words)

    def _tag(self, slot: int) -> str:
        return f"{self.label}/{slot}"


@dataclass(frozen=True, slots=True)
class Split(Step):
    """Bit fields, lowest first."""

    fixed = True
    widths: tuple[int, ...]
    label: str
    keeps_float: bool = False
    """Whether the uppermost field has sign, exponent and the top of the mantissa."""
    keeps_matches: bool = False
    """Whether the lowest field is looked at whole, as it may repeat what a sample does not show."""

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        return Merge(self.widths)

    def expand(self, hole: Hole) -> Expansion | None:
        children = []
        shift = 0
        for slot, width in enumerate(self.widths):
            field = hole.field.part(shift, width)
            origin = None if hole.origin is None else (hole.origin[0], hole.origin[1] + shift)
            is_float = self.keeps_float and slot == len(self.widths) - 1
            layout = _upper(hole.layout, shift) if is_float else None
            region = _lowest(hole, width) if self.keeps_matches and not slot else None
            children.append(
                Hole(
                    hole.setting, field, self._tag(slot), hole.depth + 1,
                    region=region, is_float=is_float, layout=layout, origin=origin,
                )
            )  # fmt: skip
            shift += width
        return node_q8(Merge(self.widths)), children


@functools.cache
def _upper(layout: Dtype, shift: int) -> Dtype:
    """Return the layout of floats without their low `shift` bits."""
    bits = layout.word_bits - shift
    return Dtype(layout.name, bits, bits, layout.exponent_bits, layout.mantissa_bits - shift)


@dataclass(frozen=True, slots=True)
class Narrow(Step):
    """Narrower words."""

    fixed = True
    part = 64
    width_bits: int

    @property
    def label(self) -> str:
        return f"unpack.{self.width_bits}"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        return Unpack(self.width_bits)

    def expand(self, hole: Hole) -> Expansion | None:
        op = Unpack(self.width_bits)
        narrow = hole.setting.memo.once(hole.sample, ("unpacked", op), lambda: hole.sample.unpacked(op))
        return node_q8(op), [Hole(hole.setting, narrow, self._tag(0), hole.depth + 1)]


@dataclass(frozen=True, slots=True)
class Map(Step):
    """A bijection of words without parameters of its own."""

    fixed = True
    part = 64
    op: Operator

    @property
    def label(self) -> str:
        return self.op.name

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        return self.op

    def expand(self, hole: Hole) -> Expansion | None:
        return _mapped(hole, self.op, self._tag(0))


@dataclass(frozen=True, slots=True)
class Offset(Step):
    """The smallest word, added to all."""

    label = "offset"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        smallest = int(words.min()) if words.size else 0
        return Add(smallest) if smallest else None

    def expand(self, hole: Hole) -> Expansion | None:
        op = self.operator(hole.sample.words, hole.stream, hole.columns)
        return None if op is None else _mapped(hole, op, self._tag(0))


@dataclass(frozen=True, slots=True)
class Delta(Step):
    """A scan along the words or along the columns of a matrix."""

    fixed = True
    part = 64
    kind: type[ScanAdd | ScanXor]
    by_row: bool

    @property
    def label(self) -> str:
        return f"{self.kind.name}.{'row' if self.by_row else 'word'}"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        lag = columns if self.by_row else 1
        return self.kind(lag) if 0 < lag < stream.n_words else None

    def expand(self, hole: Hole) -> Expansion | None:
        lag = hole.columns if self.by_row else 1
        if not 0 < lag < hole.stream.n_words:
            return None
        op, memo, (base, shift, width) = self.kind(lag), hole.setting.memo, hole.field
        if shift and self.kind is ScanAdd:
            base, shift = hole.sample, 0  # what is borrowed from the bits below does not belong to the field
        deltas = memo.once(base, ("deltas", op), lambda: base.lagged(op, lag))
        if deltas is None:
            return None
        words = hole.whole()
        below = Hole(hole.setting, Field(deltas, shift, width), self._tag(1), hole.depth + 1)
        if words is not None and not below.exact and _nearly_constant(below):
            below.region = _deltas(op, words, hole.stream)
        first: Sample | Field
        if hole.region is None:
            first = Field(memo.once(base, ("first", lag), lambda: _first(base.words, base.stream, lag)), shift, width)
        else:
            first = _first(hole.region(), hole.stream, lag)
        return node_q8(op), [Hole(hole.setting, first, self._tag(0), hole.depth + 1, closed=True), below]


@dataclass(frozen=True, slots=True)
class Constant(Step):
    """One word."""

    label = "const"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        if words.size == 0 or first_change(words, 1) < words.size:
            return None
        return Const(int(words[0]))

    def expand(self, hole: Hole) -> Expansion | None:
        op = hole.detect(self) if hole.whole() is not None else self.operator(hole.sample.words, hole.stream, 0)
        return None if op is None else (node_q8(op), [])


@dataclass(frozen=True, slots=True)
class Lookup(Step):
    """A dictionary of the distinct words."""

    label = "dictionary"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        counted = count_distinct(words, MAX_DICTIONARY)
        return Dictionary(counted[0].size) if counted is not None and words.size else None

    def expand(self, hole: Hole) -> Expansion | None:
        if not 0 < hole.summary.live <= MAX_DICTIONARY:
            return None
        op, sampled, memo = Dictionary(hole.summary.live), hole.sample, hole.setting.memo
        values, indices = memo.once(sampled, ("dictionary",), lambda: _looked_up(op, sampled))
        return node_q8(op), [
            Hole(hole.setting, values, self._tag(0), hole.depth + 1, closed=True),
            Hole(hole.setting, indices, self._tag(1), hole.depth + 1),
        ]


@dataclass(frozen=True, slots=True)
class Period(Step):
    """The same words again and again."""

    label = "repeat"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        period = _period(words, columns)
        return Repeat(period) if period else None

    def expand(self, hole: Hole) -> Expansion | None:
        words = hole.whole()
        op = hole.detect(self)
        if words is None or op is None:
            return None
        return node_q8(op), [_part(hole, words[: op.params[0]], self._tag(0))]


@dataclass(frozen=True, slots=True)
class Ends(Step):
    """A constant or periodic end, set apart: padding rows, zeros behind the last used token."""

    at_start: bool

    @property
    def label(self) -> str:
        return "head" if self.at_start else "tail"

    @property
    def without(self) -> int | None:
        return 1 if self.at_start else 0

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        least = max(MIN_RUN_WORDS, words.size // 256)
        if words.size < 4 * MIN_RUN_WORDS:
            return None
        if self.at_start:
            cut = first_change(words, 1)
            return Concat((cut,)) if least <= cut < words.size else None
        cut = last_change(words, 1)
        if words.size - cut < least:
            if not 1 < columns < words.size // 2:
                return None
            # All rows from some row on are equal: the tail begins with the first of them.
            cut = last_change(words, columns) - columns + 1
            least = max(least, 2 * columns)
        return Concat((cut,)) if cut > 0 and words.size - cut >= least else None

    def expand(self, hole: Hole) -> Expansion | None:
        words = hole.whole()
        op = hole.detect(self)
        if words is None or op is None:
            return None
        cut = op.params[0]
        return node_q8(op), [_part(hole, words[:cut], self._tag(0)), _part(hole, words[cut:], self._tag(1))]


# -- what steps share ---------------------------------------------------------------------------------------


def _mapped(hole: Hole, op: Operator, tag: str) -> Expansion:
    sample = hole.sample

    def mapped() -> Sample:
        targets = op.targets(sample.words, Stream(hole.stream.width_bits, sample.words.size))
        assert targets is not None
        return sample.with_words(targets[0], hole.stream.width_bits)

    below = hole.setting.memo.once(sample, ("mapped", op), mapped)
    return node_q8(op), [Hole(hole.setting, below, tag, hole.depth + 1)]


def _first(words: Words, stream: Stream, lag: int) -> Sample:
    """Return the first words of a stream, or what a sample has of them."""
    first = words[:lag]
    return Sample(first, Stream(stream.width_bits, lag), 0, None if first.size == lag else (1, 1, 1, first.size))


def _looked_up(op: Dictionary, sample: Sample) -> tuple[Sample, Sample]:
    """Return the words that a dictionary holds, and the index of each word."""
    targets = op.targets(sample.words, Stream(sample.stream.width_bits, sample.words.size))
    assert targets is not None
    values = Sample(targets[0], Stream(sample.stream.width_bits, targets[0].size), 0, None)
    return values, sample.with_words(targets[1], op.index_bits)


def _deltas(op: Operator, words: Words, stream: Stream) -> Region:
    """Return what computes all deltas of a scan, once."""

    @functools.cache
    def region() -> Words:
        targets = op.targets(words, stream)
        assert targets is not None
        return targets[1]

    return region


def _lowest(hole: Hole, width_bits: int) -> Region | None:
    """Return what cuts the lowest field out of all words, once, or None where they are not at hand or do not repeat."""
    words = hole.whole()
    if words is not None and words.size > DEEP_REGION_WORDS and not hole.has_matches():
        return None

    @functools.cache
    def region() -> Words:
        assert words is not None
        field = np.empty(words.size, container(width_bits))
        split_field(words, 0, width_bits, field)
        return field

    return None if words is None else region


def _part(hole: Hole, words: Words, tag: str) -> Hole:
    """Return the hole of a part of the words, at the same depth: parts do not make a program deeper."""
    setting = hole.setting
    sample = take_sample(words, hole.stream.width_bits, hole.columns, setting.sample_words, setting.exact_words)
    return Hole(setting, sample, tag, hole.depth, region=lambda: words, is_float=hole.is_float)


def _period(words: Words, columns: int) -> int:
    """Return the smallest period among those that real data has, or 0."""
    n = words.size
    if n < 4:
        return 0
    return int(first_period(words, _lags(n, columns), 4 * n))


@functools.lru_cache(maxsize=1 << 10)
def _lags(n: int, columns: int) -> NDArray[np.int64]:
    rows, parts = (columns, columns + 1, 2 * columns), (-(-n // 4), -(-n // 3), -(-n // 2))
    return np.array((*range(2, 65), 128, 256, 512, 1024, *rows, *parts), np.int64)


def _nearly_constant(hole: Hole) -> bool:
    summary = hole.summary
    return (
        hole.stream.n_words <= DEEP_REGION_WORDS
        and summary.live <= 16
        and summary.entropy_q20 < summary.n_words << 16  # a sixteenth of a bit per word
    )
