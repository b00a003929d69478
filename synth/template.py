"""Programs whose data-dependent parameters are still open: what the search finds and segments are fitted with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from operators.base import Operator, Stream
from operators.errors import FormatError
from operators.program import LIT, Literal, Node
from operators.words import Words, container
from synth.conditioned import Condition
from synth.features import FLAT, NARROW_BITS
from synth.grammar import CONSTANT
from synth.hole import Hole
from synth.prior import CERTAIN
from synth.steps import Constant, Step


@dataclass(frozen=True, slots=True)
class Template:
    """A step and what is below it; None stands for a literal whose encoding the emitter chooses.

    Attributes
    ----------
    name : str
        The production.
    step : Step or None
        None for a literal whose encoding the search has settled: its name is that of the template.
    prior_q10 : int
        -log2 of the chance that the prior gave it, in 1/1024 bit.
    """

    name: str
    step: Step | None
    children: tuple[Template | None, ...]
    prior_q10: int

    @property
    def is_literal(self) -> bool:
        """Whether this is no operator but a literal with a settled encoding."""
        return self.step is None

    @property
    def fixed(self) -> bool:
        """Whether the program is the same for all words of a shape."""
        return (self.step is None or self.step.fixed) and all(child is None or child.fixed for child in self.children)

    def __str__(self) -> str:
        if self.step is None:
            return self.name
        below = ", ".join("lit" if child is None else str(child) for child in self.children)
        return f"{self.step.label}({below})" if below else self.step.label


LZ, RAW, BITPACK = (Template(encoding, None, (), 0) for encoding in ("lz", "raw", "bitpack"))
_SMALL = {encoding: Template(encoding, None, (), 0) for encoding in ("raw", "bitpack", "huffman", "rans")}
SETTLED_WORDS = 1 << 12
"""Up to so many words the encoding that is expected to be smallest is taken."""
LZ_INSIST = 48
"""The emitter tries matches on its own where the first words promise some. The search insists on them where they
are expected to save one part in this many: the least that they must, and what a sample may err."""


def template_of(hole: Hole) -> Template | None:
    """Return the best program known for `hole`."""
    edge = hole.best_edge
    if edge is None:
        return None
    return Template(edge.name, edge.step, tuple(map(template_of, edge.children)), edge.prior_q10)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A program with its cost, node by node.

    Attributes
    ----------
    template : Template or None
    tag : str
        Where it stands: the step and slot above.
    stream : Stream
    cost_q8 : int
        Of the node and all below it, in 1/256 bit.
    encoding : str
        Of a literal, empty otherwise.
    children : tuple of Weighed
    """

    template: Template | None
    tag: str
    stream: Stream
    cost_q8: int
    encoding: str
    children: tuple[Weighed, ...]


def weigh(hole: Hole, template: Template | None, *, exact: bool = False) -> Weighed:
    """Weigh a program for `hole`, pruned: a literal wherever what is below it is no smaller.

    Parameters
    ----------
    hole : Hole
    template : Template or None
    exact : bool
        Weigh literals by the bytes that the emitter will write. All words of `hole` must be at hand; a plan for
        each literal is made.
    """
    if hole.exact and hole.summary.live == 1:
        template = _CONST
    if exact:
        literal_q8, encoding = hole.exact_literal()
    else:
        literal_q8, encoding = hole.literal.bits_q8, hole.literal.encoding
    literal = Weighed(_settled(hole, literal_q8, encoding), hole.tag, hole.stream, literal_q8, encoding, ())
    expansion = None if template is None or template.step is None else template.step.expand(hole)
    if template is None or expansion is None:
        return literal
    cost_q8, holes = expansion
    encoding = ""
    if isinstance(template.step, Condition):
        encoding = template.step.kind.name
        exact_q8 = template.step.exact_q8(hole.sample.words, hole.stream, hole.columns) if exact else cost_q8
        if exact_q8 is None:
            return literal
        cost_q8 = exact_q8
    children = tuple(weigh(child, below, exact=exact) for child, below in zip(holes, template.children, strict=True))
    cost_q8 += sum(child.cost_q8 for child in children)
    part = 0 if hole.exact or template.step is None else template.step.part
    if cost_q8 >= literal_q8 - (literal_q8 // part if part else 0):
        return literal
    pruned = Template(template.name, template.step, tuple(child.template for child in children), template.prior_q10)
    return Weighed(pruned, hole.tag, hole.stream, cost_q8, encoding, children)


def _settled(hole: Hole, literal_q8: int, encoding: str) -> Template | None:
    """Return a literal whose encoding the emitter need not choose, or None.

    Matches far apart show on the sample, not in the first block that the emitter tries. Noise in a large
    stream is not worth counting again. To compare all encodings of a small stream takes longer than to write it.
    Anything else depends on the segment.
    """
    if encoding == "lz":
        return LZ if literal_q8 <= hole.plain_q8 - hole.plain_q8 // LZ_INSIST else None
    if hole.exact and hole.stream.n_words <= SETTLED_WORDS:
        return _SMALL.get(encoding)
    width_bits = hole.stream.width_bits
    is_noise = hole.features[0] == (FLAT if width_bits <= NARROW_BITS else 3)
    if (
        hole.exact
        or not is_noise
        or hole.summary.largest.bit_length() < width_bits
        or encoding not in ("raw", "bitpack")
    ):
        return None
    return RAW if width_bits in (8, 16, 32, 64) else BITPACK


def fit(
    template: Template | None,
    words: Words,
    stream: Stream,
    columns: int,
    detected: Mapping[Step, Operator | None] | None = None,
) -> Node:
    """Return the program of `template` for the words at hand, a literal wherever a step does not apply to them.

    Parameters
    ----------
    template : Template or None
    words : Words
        The whole of `stream`; not looked at where the program is the same for all words.
    stream : Stream
    columns : int
        Words of a row, 0 where there are none.
    detected : mapping of Step to Operator or None, optional
        What is known of these words already.
    """
    if template is None or stream.n_words == 0:
        return LIT
    if template.step is None:
        return Node(Literal(template.name))
    step = template.step
    if isinstance(step, Condition):
        return step.node(stream, columns)
    op = detected[step] if detected and step in detected else step.operator(words, stream, columns)
    if op is None:
        rest = None if step.without is None else template.children[step.without]
        return fit(rest, words, stream, columns, detected)
    try:
        streams = op.children(stream)
    except FormatError:
        return LIT  # fields of an index that has another width here
    if all(child is None or child.fixed for child in template.children):
        targets: tuple[Words, ...] | None = tuple(np.empty(0, container(below.width_bits)) for below in streams)
    else:
        targets = op.targets(words, stream)
    if targets is None:
        return LIT
    children = []
    for slot, (child, target, below) in enumerate(zip(template.children, targets, streams, strict=True)):
        children.append(fit(child, target, below, step.columns_below(slot, columns, stream, below)))
    return Node(op, tuple(children))


_CONST = Template(CONSTANT.name, Constant(), (), CERTAIN.bits_q10)
