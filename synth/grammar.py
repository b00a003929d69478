"""The grammar of the search: what may fill a hole, when it is offered, and with which parameters.

A `Production` offers a step to the holes that its detectors admit, the best of a sweep where it has
parameters. What cannot apply is never offered, and so never costs an expansion. Most detectors see of a hole
no more than its `look`: what they say is remembered for all holes that look the same.

Maps of words above an entropy-coded literal change nothing, so an offset is offered only where a literal is
bit-packed, and zigzag only under a scan. The other maps of the language have never won on real tensors and
are not offered at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from operators.kernels.costing import LOG_SCALE_BITS, is_ramp
from operators.ops.concat import Concat
from operators.ops.deal import Deal
from operators.ops.partition import Partition
from operators.ops.scan import ScanAdd, ScanXor
from operators.ops.zigzag import Zigzag
from synth.conditioned import is_conditioned, swept
from synth.features import FLAT, MAX_CUT_WORDS, cut_entropies
from synth.hole import Hole
from synth.integers import is_centred, is_integer, swept_integers
from synth.parts import Rows, Turns, Zeros
from synth.sample import Sample
from synth.steps import MAX_DICTIONARY, Constant, Delta, Ends, Lookup, Map, Narrow, Offset, Period, Split, Step

Detector: TypeAlias = Callable[[Hole], bool]
Maker: TypeAlias = Callable[[Hole], Step | None]
MASKED = 50
"""Words get a mask of their zeros where that many are one in so many, and as many are not."""
FEW = 16
"""No mask where no more words than that are different: any code names them."""
SETTLED = 128
"""Ends are parted before all else where they are one part in so many, rows where that part of all bits are zeros at
the ends of their words."""
TOP_BITS = 12
"""Sign, exponent and a little of the mantissa, by which words are alike."""
DEAD = -1
"""For the low bits of a float split: those that are the same in all words."""


@dataclass(frozen=True, slots=True, eq=False)
class Production:
    """One rule of the grammar.

    Attributes
    ----------
    name : str
        With the bucket of its parameter; what priors count and what `SearchOptions.disable` names.
    family : str
        What `SearchOptions.disable` may name instead.
    offered : callable
        Detector: whether the rule can apply to a hole, by its `look` alone.
    step : callable
        Returns the step for a hole, or None where a sweep finds none.
    applies : callable or None
        A second detector, which may look at words and counts.
    certain : bool
        Exact structure, read off the whole words: tried before anything that only may help.
    order0 : bool
        Whether it only splits or renames words, so that codes of single words cannot gain from it more than
        the empirical entropy allows.
    follow : str
        Family of which the likeliest production is tried at the last hole below at once.
    """

    name: str
    family: str
    offered: Detector
    step: Maker
    applies: Detector | None = None
    certain: bool = False
    follow: str = ""

    @property
    def order0(self) -> bool:
        return self.family in ("float", "cut", "planes", "map", "dictionary")


Offered: TypeAlias = tuple[Production, ...]
_MENUS: dict[tuple[object, ...], tuple[Offered, bool]] = {}
_MAX_MENUS = 1 << 14
_PARTING = ("ends", "rows", "zeros")


def offers(hole: Hole, depth: int, disable: frozenset[str] = frozenset()) -> Offered:
    """Return the productions that may fill `hole`, in the order of the catalogue.

    Parameters
    ----------
    hole : Hole
    depth : int
        Levels of operators that a program may have; a constant below them is free.
    disable : frozenset of str
        Names and families that are not offered.
    """
    key = (hole.look, depth, disable)
    menu = _MENUS.get(key)
    if menu is None:
        if len(_MENUS) >= _MAX_MENUS:
            _MENUS.clear()
        offered = tuple(menu_of(hole, depth, disable))
        menu = _MENUS[key] = offered, any(production.applies is not None for production in offered)
    offered, has_more_to_see = menu
    if not has_more_to_see:
        return offered
    offered = tuple([one for one in offered if one.applies is None or one.applies(hole)])
    # Words of two kinds are parted before anything else is tried, which would be tried again of both.
    return next(((one,) for one in offered if one.family in _PARTING and _is_settled(hole, one)), offered)


def menu_of(hole: Hole, depth: int, disable: frozenset[str]) -> Iterator[Production]:
    """Yield the productions that are offered to all holes with the look of `hole` to which they apply."""
    if hole.stream.n_words < 2:
        return
    if hole.summary.live == 1:
        # Where the sample is constant but the words are not, the rest of the catalogue follows.
        catalogue = PRODUCTIONS if not hole.exact else (CONSTANT,)
    else:
        catalogue = PRODUCTIONS if hole.is_float else _NOT_FLOAT
    if hole.closed or hole.depth >= depth:
        catalogue = (CONSTANT,)
    for production in catalogue:
        if production.name not in disable and production.family not in disable and production.offered(hole):
            yield production


def _is_settled(hole: Hole, production: Production) -> bool:
    """Whether `production` parts words of two kinds, and what it saves is so much that nothing else can win."""
    stream, summary = hole.stream, hole.summary
    if summary.live <= FEW:
        return False
    if production.family == "ends":
        step = HEAD if production.name == "head" else TAIL
        op = hole.detect(step)
        assert isinstance(op, Concat), "offered where it applies"
        cut = op.lengths[0]
        return (cut if step.at_start else stream.n_words - cut) * SETTLED >= stream.n_words
    if production.family == "rows":
        op = hole.detect(Rows(production.name == "rows.zero"))
        assert isinstance(op, Partition), "offered where it applies"
        return op.n_marked * op.row_words * op.low_bits * SETTLED >= stream.n_words * stream.width_bits
    is_wide = hole.is_float and stream.width_bits >= 32
    return production.family == "zeros" and is_wide and not _is_matched_apart(hole) and not _is_near(hole.sample)


def _is_matched_apart(hole: Hole) -> bool:
    """Whether words other than zero repeat too, so that LZ takes less than they would: a mask is no better then."""
    n_others = int(np.count_nonzero(hole.sample.words))
    return 4 * hole.literal.bits_q8 * hole.sample.words.size < 3 * hole.plain_q8 * n_others


def _is_near(sample: Sample) -> bool:
    """Whether words other than zero are like those before or above: a scan may do more than a mask."""
    words = sample.words
    lag, block = sample.row_below
    pairs = [(words[:-1], words[1:])]
    if block:
        halves = words.reshape(-1, 2, lag)
        pairs.append((halves[:, 0].ravel(), halves[:, 1].ravel()))
    elif lag:
        pairs.append((words[:-lag], words[lag:]))
    for before, after in pairs:
        are_there = (before != 0) & (after != 0)
        top = words.dtype.type(sample.stream.width_bits - TOP_BITS)
        if np.count_nonzero(before[are_there] == after[are_there]) * SETTLED > words.size:
            return True
        near, word = before[are_there] >> top, after[are_there] >> top
        equal, far = (int(np.count_nonzero(near[k:] == word[: word.size - k])) for k in (0, min(7, word.size)))
        if 32 * equal > 64 * far + word.size:
            return True
    return False


def _structured(hole: Hole) -> bool:
    """Whether exact structure is looked for: always in the whole, in parts of it where words repeat at all."""
    if hole.tag == "root" or hole.region is not None:
        return True
    return hole.exact and (hole.features[1] > 0 or hole.stream.width_bits > 16)


def _detects(step: Step) -> Detector:
    return lambda hole: hole.detect(step) is not None


def _exact(name: str, family: str, step: Step, not_below: tuple[str, ...] = ()) -> Production:
    """Return the production of a `step` that applies to all words of a hole, which no step `not_below` has made."""
    return Production(
        name,
        family,
        lambda hole: _structured(hole) and not hole.tag.startswith(not_below),
        _always(step),
        _detects(step),
        certain=True,
    )


def _divisible(hole: Hole) -> bool:
    """Whether fields of the words could be worth more than the words: not where they are noise."""
    return hole.stream.width_bits > 1 and (hole.features[0] < FLAT or hole.tag == "root")


def _wide(hole: Hole) -> bool:
    return hole.stream.width_bits > 1


def _constant(hole: Hole) -> bool:
    """Whether the words are constant, or the sample is and a literal of the words would not be small."""
    return hole.summary.live == 1 and (hole.exact or hole.tag == "root" or hole.literal.encoding != "huffman")


def _is_worth_naming(hole: Hole) -> bool:
    """Whether a literal of the words is larger than the operator: one of zeros is not."""
    return hole.summary.largest > 0 or hole.tag == "root"


def _uncoded(hole: Hole) -> bool:
    """Whether no entropy code names the words as well as indices would."""
    return hole.stream.width_bits > 4 and (hole.tag == "root" or hole.literal.encoding not in ("huffman", "rans"))


def _saturated(hole: Hole) -> bool:
    """Whether the sample shows all words there are, and they are few."""
    summary = hole.summary
    return (
        1 < summary.live <= min(MAX_DICTIONARY, summary.n_words // 4)
        and 4 * summary.live < 1 << hole.stream.width_bits
        and (hole.exact or 8 * summary.chao <= 9 * summary.live)
    )


def _codeless(hole: Hole) -> bool:
    """Whether the literal has no entropy code, so that a map of its words can change its cost."""
    return hole.literal.encoding == "bitpack" or (hole.literal.encoding == "raw" and hole.tag.startswith("scan"))


def _has_zeros(hole: Hole) -> bool:
    """Whether enough words are zero, but not all, and a code of whole words could not make use of it."""
    if hole.summary.live <= FEW:
        return False
    n = hole.summary.n_words
    n_zeros = n - int(np.count_nonzero(hole.sample.words))
    return n < MASKED * n_zeros and n_zeros * MASKED < (MASKED - 1) * n


def _is_dealt(hole: Hole) -> bool:
    """Whether words are no numbers of a matrix, or parts of numbers, and so may differ by where they stand."""
    dtype = hole.setting.dtype
    is_number = (hole.is_float or is_integer(hole)) and dtype.element_bits == dtype.word_bits
    return hole.tag == "root" and hole.features[0] < FLAT and not is_number


def _deal(hole: Hole) -> Step | None:
    op = hole.detect(Turns())
    return Turns(op.widths) if isinstance(op, Deal) else None


def _is_ramp(hole: Hole) -> bool:
    words = hole.whole()
    return words is not None and bool(is_ramp(words))


def _float_name(top_bits: int, low_bits: int) -> str:
    """Name a split after the mantissa bits that go with the exponent and those that are set apart."""
    return f"float.{top_bits}" + (f".{'dead' if low_bits == DEAD else low_bits}" if low_bits else "")


def _float_widths(hole: Hole, top_bits: int, low_bits: int) -> tuple[int, ...] | None:
    """Return the widths of low bits, mantissa, exponent with its top bits and sign, or None where they do not fit."""
    dtype = hole.layout
    low = _trailing(hole) if low_bits == DEAD else low_bits
    mantissa = dtype.mantissa_bits - top_bits - low
    if not hole.is_float or mantissa <= 0 or (low_bits and low < 4):
        return None
    rest = (mantissa, dtype.exponent_bits + top_bits, 1)
    return (low, *rest) if low else rest


def _trailing(hole: Hole) -> int:
    """Return how many low bits are the same in all words."""
    varying = hole.summary.varying
    return (varying & -varying).bit_length() - 1


def _float(top_bits: int, low_bits: int) -> Production:
    name, split = _float_name(top_bits, low_bits), _float_split(top_bits, low_bits)
    if low_bits == DEAD:
        # Bits that never change are free once they are set apart, whatever is known of the kind of tensor.
        is_split: Detector = lambda hole: split(hole) is not None  # noqa: E731
        return Production(name, "float", lambda hole: hole.is_float, split, is_split, certain=True)
    return Production(name, "float", lambda hole: split(hole) is not None, split)


def _float_split(top_bits: int, low_bits: int) -> Maker:
    def make(hole: Hole) -> Step | None:
        widths = _float_widths(hole, top_bits, low_bits)
        return None if widths is None else Split(widths, _float_name(top_bits, low_bits))

    return make


def _is_matched(hole: Hole) -> bool:
    """Whether floats repeat others: they may do so in more places but for their sign, as waves do."""
    return hole.is_float and hole.tag == "root" and hole.literal.encoding == "lz"


def _sign(hole: Hole) -> Step:
    return Split((hole.stream.width_bits - 1, 1), "sign", keeps_matches=True)


def _upper_part(label: str, *low_widths: int) -> Production:
    """Return the split of wide floats that leaves their upper 16 bits whole."""
    width_bits = sum(low_widths) + 16
    step = Split((*low_widths, 16), label, keeps_float=True)
    return Production(
        label,
        "upper",
        lambda hole: hole.is_float and hole.stream.width_bits == width_bits,
        _always(step),
        follow="scaled",
    )


def _condition(name: str, signed: int, fraction_bits: int) -> Production:
    """Return the rule of leaves in the context of scales; which of them, and how many tables, is swept."""
    return Production(
        name,
        "scaled",
        lambda hole: hole.is_float and hole.stream.width_bits in (8, 16),
        lambda hole: swept(hole, signed, fraction_bits),
        lambda hole: is_conditioned(hole, signed, fraction_bits),
    )


def _cut(rank: int) -> Maker:
    """Return the maker of the cut that is at `rank` among all, by the entropies of both halves."""

    def step(hole: Hole) -> Step | None:
        sample, shift, width = hole.field
        ranked = hole.setting.memo.once(sample, ("cuts", shift, width), lambda: _ranked_cuts(hole))
        return Split((ranked[rank], width - ranked[rank]), f"cut.{ranked[rank]}")

    return step


def _ranked_cuts(hole: Hole) -> list[int]:
    """Return where the words may be cut in two, the best cut first."""
    width = hole.stream.width_bits
    sampled = -(-hole.summary.n_words // -(-hole.summary.n_words // MAX_CUT_WORDS))
    flat = sampled << LOG_SCALE_BITS
    ranked = sorted(
        (
            (flat * cut if low < 0 else min(low, flat * cut))
            + (flat * (width - cut) if high < 0 else min(high, flat * (width - cut))),
            cut,
        )
        for cut, (low, high) in enumerate(cut_entropies(hole.sample.words, width), 1)
    )
    return [cut for _, cut in ranked]


def _has_cuts(rank: int) -> Detector:
    return lambda hole: _divisible(hole) and hole.stream.width_bits > rank + 1


def _divides(least: int, most: int, width_bits: int) -> Detector:
    """Return a detector: whether the words have `least` to `most` bits and whole parts of `width_bits`."""
    return lambda hole: (
        least <= hole.stream.width_bits <= most and not hole.stream.width_bits % width_bits and _divisible(hole)
    )


def _planes(width_bits: int) -> Maker:
    label = "bytes" if width_bits == 8 else "bits"
    return lambda hole: Split((width_bits,) * (hole.stream.width_bits // width_bits), label)


def _scannable(step: Delta) -> Detector:
    """Return a detector: sums of single bits are their exclusive or, and rows have to be there."""
    return lambda hole: (
        (step.kind is ScanXor or _wide(hole)) and (not step.by_row or 1 < hole.columns < hole.stream.n_words)
    )


def _always(step: Step) -> Maker:
    return lambda _hole: step


TAIL, HEAD = Ends(at_start=False), Ends(at_start=True)
CONSTANT = Production("const", "const", _constant, _always(Constant()), _is_worth_naming, certain=True)
PRODUCTIONS: tuple[Production, ...] = (
    CONSTANT,
    Production(
        "ramp", "ramp", lambda hole: hole.stream.n_words >= 3 and _structured(hole),
        _always(Delta(ScanAdd, by_row=False)), _is_ramp, certain=True,
    ),
    _exact("repeat", "repeat", Period()),
    _exact("tail", "ends", TAIL, ("tail",)),
    _exact("head", "ends", HEAD, ("tail", "head")),
    *(
        Production(
            step.label, "rows", lambda hole: _structured(hole) and hole.stream.width_bits >= 16,
            _always(step), _detects(step), certain=True,
        )
        for step in (Rows(all_bits=True), Rows(all_bits=False))
    ),
    Production(
        "zeros", "zeros", lambda hole: hole.stream.width_bits > 15 + (not hole.is_float), _always(Zeros()), _has_zeros,
        certain=True,
    ),
    Production("deal", "deal", _is_dealt, _deal, _detects(Turns()), certain=True),
    *(
        _float(top, low)
        for top, low in (
            (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (3, 16), (2, DEAD),
        )
    ),
    Production("sign", "sign", _is_matched, _sign),
    _upper_part("upper.8", 8, 8),
    _upper_part("upper.16", 16),
    _upper_part("upper.48", 16, 16, 16),
    _condition("scaled", 1, 2),
    _condition("scaled.signs", 2, 2),
    _condition("scaled.wide", 1, 0),
    Production("scaled.integers", "scaled", is_integer, swept_integers, is_centred, certain=True),
    *(
        Production(f"cut.{name}", "cut", _has_cuts(rank), _cut(rank))
        for rank, name in enumerate(("best", "second", "third"))
    ),
    Production("bytes", "planes", _divides(17, 64, 8), _planes(8)),
    Production("bits", "planes", _divides(2, 4, 1), _planes(1)),
    Production("unpack.4", "unpack", _divides(8, 64, 4), _always(Narrow(4))),
    Production("unpack.8", "unpack", _divides(9, 64, 8), _always(Narrow(8))),
    Production("dictionary", "dictionary", _uncoded, _always(Lookup()), _saturated),
    *(
        Production(step.label, "scan", _scannable(step), _always(step))
        for step in (
            Delta(ScanAdd, by_row=False), Delta(ScanAdd, by_row=True),
            Delta(ScanXor, by_row=False), Delta(ScanXor, by_row=True),
        )
    ),
    Production("zigzag", "map", lambda hole: _wide(hole) and hole.tag.startswith("scan_add"), _always(Map(Zigzag()))),
    Production("offset", "map", lambda hole: hole.exact and hole.depth <= 1 and _codeless(hole), _always(Offset())),
)  # fmt: skip
"""The catalogue, in the order in which ties are broken."""
_NOT_FLOAT = tuple(production for production in PRODUCTIONS if production.family != "float")
