"""One search for tensors that play the same role.

The layers of a network repeat: tensors whose names differ by numbers alone nearly always want the same program, and
small tensors of a dtype nearly always one of a few. They are taken from the prior, where calibration has searched
such a tensor, or from those before in the task. A tensor takes one if nothing that shows at once is different
(`operators.kernels.looks`); whoever writes it compares the bytes with what the program took before
(`Recalled.is_missed`), and searches where it took more.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from operators.base import Stream
from operators.errors import DamageError
from operators.fields import payload_bytes
from operators.kernels.costing import first_change
from operators.kernels.looks import look
from operators.ops.const import Const
from operators.ops.merge import Merge
from operators.program import Literal, Node, parse
from operators.run import Encoded, encode
from operators.words import Words
from synth.options import SearchOptions
from synth.prior import Prior, Remembered
from synth.synthesis import MISSED_PERCENT, Synthesis, synthesise
from synth.template import fit

SMALL_WORDS = 1 << 12
"""Up to so many words tensors go by their dtype: a search takes longer than its result is worth."""
TEXT_BYTES = 1 << 12
"""First bytes by which text is known."""
NOT_TEXT = 64
"""One byte in so many may be none of ASCII: a header begins with its length."""
MAX_KNOWN = 4
"""Programs that are remembered for tensors of one kind."""
CLEARLY = 16
"""One part in so many."""
MOST_VAIN = 4
"""A program that was larger than others for so many small tensors in turn is not tried again in the task."""
FORGIVEN_BYTES = 192
"""What a recalled program may take beyond `MISSED_PERCENT` of what it took before: to search takes longer than to code
half a megabyte."""
RAW_BITS = (16, 32, 64)
"""Words of so many bits have a raw form, and consist of parts that have one."""
_RAW = Node(Literal("raw"))
_NUMBER = re.compile(r"\d+")
_TEXT = Remembered("lz", 3 << 18, 0, 0)
"""Of text, such as headers, which needs no search if LZ takes three bits a byte or less: no other code does."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """A program for a tensor, found for another.

    Attributes
    ----------
    program : Node
        For the words that it was recalled for.
    expected_bits : int
        What it would take if it did as well as before.
    found : Synthesis or None
        The search of the other, where the program has to be fitted to words.
    others : tuple of Recalled
        Programs of more tensors of the role, to be written before the tensor is searched.
    encoded : Encoded or None
        The record of the program, where it had to be written to be chosen.
    """

    program: Node
    expected_bits: int
    found: Synthesis | None = None
    others: tuple[Recalled, ...] = ()
    encoded: Encoded | None = None

    def program_for(self, words: Words) -> Node:
        """Return the program for other words of the same tensor: one of its segments."""
        if self.found is not None:
            return self.found.program_for(words)
        return _constant(words) or self.program

    def is_missed(self, n_bytes: int) -> bool:
        """Whether a program of `n_bytes` is so much larger than before that the tensor is to be searched."""
        return n_bytes > MISSED_PERCENT * self.expected_bits // 800 + FORGIVEN_BYTES


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
        self._found: dict[str, list[tuple[Remembered, Synthesis | None]]] = {}
        self._vain: Counter[Node] = Counter()

    def clear(self) -> None:
        """Forget what tasks have found: one must not depend on those before it."""
        self._found.clear()
        self._vain.clear()

    def search(self, words: Words, dtype: str | None, rows: int, columns: int) -> Synthesis:
        """Search a tensor as `synth.synthesis.synthesise` does."""
        return synthesise(words, dtype=dtype, rows=rows, columns=columns, options=self._options, prior=self._prior)

    def remember(
        self, name: str | None, words: Words, dtype: str | None, columns: int, found: Synthesis, encoded: Encoded
    ) -> None:
        """Keep what was found for a tensor, and the encodings with which it was written, for others of its role."""
        if not self._options.share:
            return
        role = role_of(name, words, dtype, columns)
        known = self._known(role)
        if len(known) - len(self._prior.programs.get(role, ())) < MAX_KNOWN:
            remembered = remembered_as(found, words, columns, encoded)
            if is_fitted(found):
                known.append((replace(remembered, n_words=0), found))
            else:
                known.append((remembered, None))

    def _known(self, role: str) -> list[tuple[Remembered, Synthesis | None]]:
        """Return the programs of a role, those of the prior first; what is appended to the list is remembered."""
        known = self._found.get(role)
        if known is None:
            known = self._found[role] = [(one, None) for one in self._prior.programs.get(role, ())]
        return known

    def recall(
        self, name: str | None, words: Words, dtype: str | None, columns: int, digest: bytes | None = None
    ) -> Recalled | None:
        """Return the program of a tensor of this role that looks like this one, or None.

        Parameters
        ----------
        name : str or None
            Of the tensor.
        words : Words
        dtype : str or None
        columns : int
            Words of a row, 0 where there are none.
        digest : bytes, optional
            BLAKE3 of the bytes of `words`, where the caller has it already.
        """
        if not self._options.share or not words.size:
            return None
        known = self._known(role_of(name, words, dtype, columns))
        known = [pair for pair in known if pair[0].fits(words.size, columns)]
        if not known:
            constant = _constant(words)
            if constant is not None:
                return Recalled(constant, 0)
            return _recalled(_TEXT, None, words) if _is_text(words, dtype) else None
        if words.size > SMALL_WORDS:
            last, found = known[-1]  # the one that was found last is the likeliest
            settled = {
                one.program: one for one, search in known[-2::-1] if search is None and one.program != last.program
            }
            others = tuple(_recalled(one, None, words) for one in settled.values())
            return _recalled(last, found, words, others)
        recalled = [_recalled(remembered, found, words) for remembered, found in reversed(known)]
        return recalled[0] if len(recalled) == 1 else self._smallest(recalled, words, digest)

    def _smallest(self, recalled: list[Recalled], words: Words, digest: bytes | None) -> Recalled:
        """Return the program that takes the fewest bytes of small `words`.

        Those that only their record can tell of are written where they took clearly less of others than the best of
        the rest takes of these. Tensors of several kinds look alike: what is expected is what the largest of them took.
        """
        best, best_bytes, record = recalled[0], words.nbytes, None
        tried, others = [], []
        promising = [one for one in recalled if self._vain[one.program] < MOST_VAIN]
        counted = payload_bytes([one.program for one in promising], words)
        for one, n_bytes in zip(promising, counted, strict=True):
            if n_bytes is None:
                others.append(one)
                continue
            tried.append(one)
            if n_bytes < best_bytes:
                best, best_bytes = one, n_bytes
        for one in others:
            if one.expected_bits < 8 * (best_bytes - best_bytes // CLEARLY):
                tried.append(one)
                encoded = written(one.program, words, digest)
                if encoded is not None and encoded.body_bytes < best_bytes:
                    best, best_bytes, record = one, encoded.body_bytes, encoded
        for one in tried:
            self._vain[one.program] = 0 if one is best else self._vain[one.program] + 1
        return Recalled(best.program, max([one.expected_bits for one in recalled]), best.found, encoded=record)


def _recalled(
    remembered: Remembered, found: Synthesis | None, words: Words, others: tuple[Recalled, ...] = ()
) -> Recalled:
    program = _parsed(remembered.program) if found is None else found.program_for(words)
    return Recalled(program, remembered.bits_q18 * words.size >> 18, found, others)


_parsed = functools.lru_cache(1 << 12)(parse)


def written(program: Node, words: Words, digest: bytes | None = None) -> Encoded | None:
    """Return the record of a program that was found for other words, or None where it cannot produce these.

    Parameters as for `operators.run.encode`.
    """
    try:
        return encode(program, words, digest)
    except DamageError:
        return None


def smallest(
    found: Synthesis, encoded: Encoded | None, words: Words, write: Callable[[Node], Encoded | None]
) -> tuple[Synthesis, Encoded | None]:
    """Return the first finalist that takes what it promised, or the smallest; further segments follow it.

    Parameters
    ----------
    found : Synthesis
        A search that its sample has misled (`Synthesis.is_missed`).
    encoded : Encoded or None
        What its program gives.
    words : Words
    write : callable
        Returns what another program gives; what it gave before may be lost then.
    """
    best = None if encoded is None else replace(encoded, record=bytes(encoded.record))
    chosen = found
    for other in found.others():
        tried = write(other.program_for(words))
        if tried is not None and (best is None or tried.body_bytes < best.body_bytes):
            best, chosen = replace(tried, record=bytes(tried.record)), other
            if not other.is_missed(tried.body_bytes):
                break  # those that follow were expected to be larger
    return chosen, best


def _constant(words: Words) -> Node | None:
    return Node(Const(int(words[0]))) if words.size > 1 and first_change(words, 1) == words.size else None


def _is_text(words: Words, dtype: str | None) -> bool:
    start = words[:TEXT_BYTES]
    return dtype is None and words.itemsize == 1 and int(np.count_nonzero(start > 127)) * NOT_TEXT <= start.size


def remembered_as(found: Synthesis, words: Words, columns: int, encoded: Encoded) -> Remembered:
    """Return what a prior keeps of a search: the program as it was written, and what it took for a word."""
    template, nothing, stream = found.template, words[:0], Stream(8 * words.itemsize, words.size)
    n_words = words.size if is_fitted(found) else 0
    program, *others = (fit(template, nothing, stream, seen) for seen in (columns, 0, 2 * columns))
    is_by_row = n_words or any(program != other for other in others)
    bits_q18 = (encoded.body_bytes << 21) // words.size
    return Remembered(str(with_raw_joined(encoded.program)), bits_q18, columns if is_by_row else 0, n_words)


def with_raw_joined(program: Node) -> Node:
    """Return a program in which fields of a word that are stored as they are, side by side, are one: no bit more.

    A search looks at planes one by one. Two that turn out to be noise take a pass over the words each.
    """
    children = tuple(map(with_raw_joined, program.children))
    if not isinstance(program.op, Merge):
        return Node(program.op, children)
    fields: list[tuple[int, Node]] = []
    for width, child in zip(program.op.widths, children, strict=True):
        fields.append((width, child))
        while len(fields) > 1 and fields[-1][1] == fields[-2][1] == _RAW and fields[-1][0] + fields[-2][0] in RAW_BITS:
            (low, _), (high, _) = fields[-2:]
            fields[-2:] = [(low + high, _RAW)]
    widths, children = zip(*fields, strict=True)
    return Node(Merge(widths), children) if len(fields) > 1 else children[0]


def is_fitted(found: Synthesis) -> bool:
    """Whether a program depends on more than the shape of the words."""
    return found.template is not None and not found.template.fixed


def role_of(name: str | None, words: Words, dtype: str | None, columns: int) -> str:
    """Return the role of a tensor: its dtype, how it looks, and name without numbers and rows unless it is small."""
    kind = f"{kind_of(name or '')}|{columns}" if words.size > SMALL_WORDS else ""
    return f"{kind}|{dtype}|{look(words, columns):o}"


@functools.lru_cache(1 << 16)
def kind_of(name: str) -> str:
    """Return a name without its numbers."""
    return _NUMBER.sub("#", name)
