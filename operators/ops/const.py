"""``const[v]``: every word is `v`.

Type: ``const[v] : b[n]`` with v < 2**b. No children.

Example: ``const[0]`` as ``b16[4]`` is 0, 0, 0, 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from operators.base import Operator, Source, Stream
from operators.errors import FormatError
from operators.words import Words, mask_of


@dataclass(frozen=True, slots=True)
class Const(Operator):
    """Constant words."""

    opcode = 1
    name = "const"
    pointwise = True
    value: int

    @property
    def arity(self) -> int:
        return 0

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if self.value > mask_of(stream.width_bits):
            raise FormatError(f"a constant of {stream.width_bits} bits", str(self.value))
        return ()

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        return () if bool((words == self.value).all()) else None

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _ConstSource(self.value)


class _ConstSource(Source):
    def __init__(self, value: int) -> None:
        self.value = value

    def read(self, out: Words) -> None:
        out.fill(self.value)
