"""Small records in one call: a program as a list of steps, over words that the caller has whole in memory.

A step does what one node of the program does: it cuts a field out of words, takes differences, parts rows, writes a
literal. Words between steps lie in one array, those of up to 16 bits in two bytes each, wider ones in four or eight, at
places that `operators.fields` has given them. What is written is what `operators.writing` writes, byte for byte.
"""

# mypy: disable-error-code="no-any-return, arg-type, assignment, return-value"
from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from operators.kernels.fields import join_field, join_three, join_two, split_field, split_three, split_two
from operators.kernels.folding import fold, unfold
from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length, both, pick
from operators.kernels.leaves import (
    MIDDLE_BITS,
    NARROW_BITS,
    NO_ROOM,
    OTHERWISE,
    code_narrow,
    code_wide,
    count_live,
    put_bytes,
    take_narrow,
    take_wide,
)
from operators.kernels.varints import MOST_BYTES, put_varint, take_varint

LEAF, OTHER_LEAF, CUT, CUT_SOME, CONST, ADD, XOR, ZIGZAG, SCAN_ADD, SCAN_XOR, PARTITION, DICTIONARY = range(12)
"""Kinds of steps. All have the number of their words, the bits of these, and where they lie; then

- `LEAF`: the code of the encoding, or that none is decided; streams, lanes and gain as `choose_narrow` takes them.
- `OTHER_LEAF`: nothing. Its payload is made and read elsewhere, from words in their smallest container.
- `CUT`: where the words lie that the field is cut from, or `ROOT`; their bytes; the lowest bit of the field.
- `CUT_SOME`: the same but for the lowest bit, that of the first field of a word; then the bits of the second and where
  it lies, and of the third, or 0. Both have up to 16 bits, the words two bytes or four: one pass for all.
- `CONST`, `ADD`, `XOR`: the constant, as a number with a sign. `ZIGZAG`: nothing.
- `SCAN_ADD`, `SCAN_XOR`: the lag, and where the differences lie. The first words stay where they are.
- `PARTITION`: words of a row, rows that are marked, low bits; where the mask, the other and the marked rows lie.
- `DICTIONARY`: how many values; where they and the indices lie.
"""
ROOT: Final = -1
"""In place of where words lie: they are those of the record."""
COLUMNS: Final = 10
"""Numbers of a step."""
SLACK_WORDS: Final = 1
"""Words beyond those of a partition that may be written to, and are looked at."""
RUN_WORDS = 16
"""From so many words on, they are worth a loop."""
LEFT = -3
"""`encode_steps` returns this less the step of a literal that is to be written elsewhere."""


@inlined
def _narrow(arena: Any, at: Any, n_words: Any) -> Any:
    return arena[at : at + 2 * n_words].view(np.uint16)


@inlined
def _middle(arena: Any, at: Any, n_words: Any) -> Any:
    return arena[at : at + 4 * n_words].view(np.uint32)


@inlined
def _wide(arena: Any, at: Any, n_words: Any) -> Any:
    return arena[at : at + 8 * n_words].view(np.uint64)


@inlined
def _cut_root(words: Any, word_bytes: Any, shift: Any, width_bits: Any, out: Any) -> None:
    """Cut a field of up to 16 bits out of words of any width."""
    if word_bytes == 1:
        split_field(words, shift, width_bits, out)
    elif word_bytes == 2:
        split_field(words.view(np.uint16), shift, width_bits, out)
    elif word_bytes == 4:
        split_field(words.view(np.uint32), shift, width_bits, out)
    else:
        split_field(words.view(np.uint64), shift, width_bits, out)


@kernel("arena")
def cut(words: NDArray[np.uint8], word_bytes: int, step: NDArray[np.int64], arena: NDArray[np.uint8]) -> None:
    """Cut a field out of `words`, the bytes of the root, or out of others."""
    n, width, at, source, source_bytes, shift = step[1], step[2], step[3], step[4], step[5], step[6]
    if source == ROOT:
        if width <= NARROW_BITS:
            _cut_root(words, word_bytes, shift, width, _narrow(arena, at, n))
        elif word_bytes == 4:
            split_field(words.view(np.uint32), shift, width, _middle(arena, at, n))
        elif width <= MIDDLE_BITS:
            split_field(words.view(np.uint64), shift, width, _middle(arena, at, n))
        else:
            split_field(words.view(np.uint64), shift, width, _wide(arena, at, n))
    elif source_bytes == 2:
        split_field(_narrow(arena, source, n), shift, width, _narrow(arena, at, n))
    elif source_bytes == 4:
        if width <= NARROW_BITS:
            split_field(_middle(arena, source, n), shift, width, _narrow(arena, at, n))
        else:
            split_field(_middle(arena, source, n), shift, width, _middle(arena, at, n))
    elif width <= NARROW_BITS:
        split_field(_wide(arena, source, n), shift, width, _narrow(arena, at, n))
    elif width <= MIDDLE_BITS:
        split_field(_wide(arena, source, n), shift, width, _middle(arena, at, n))
    else:
        split_field(_wide(arena, source, n), shift, width, _wide(arena, at, n))


@inlined
def _cut_some(words: Any, step: Any, arena: Any, first: Any) -> None:
    n, a, b = words.size, step[2], step[6]
    second, third = _narrow(arena, step[7], n), _narrow(arena, step[9], n)
    if step[8] == 0:
        split_two(words, (np.int64(0), a), (a, b), first, second)
    else:
        split_three(words, (np.int64(0), a, a + b), (a, b, step[8]), first, second, third)


@inlined
def _cut_middle(words: Any, step: Any, arena: Any) -> None:
    if step[2] <= NARROW_BITS:
        _cut_some(words, step, arena, _narrow(arena, step[3], words.size))
    else:
        _cut_some(words, step, arena, _middle(arena, step[3], words.size))


@kernel("arena")
def cut_some(words: NDArray[np.uint8], word_bytes: int, step: NDArray[np.int64], arena: NDArray[np.uint8]) -> None:
    """As `cut` for the first two or three fields of words of two bytes or four."""
    n, source, source_bytes = step[1], step[4], step[5]
    if source == ROOT:
        if word_bytes == 2:
            _cut_some(words.view(np.uint16), step, arena, _narrow(arena, step[3], n))
        else:
            _cut_middle(words.view(np.uint32), step, arena)
    elif source_bytes == 2:
        _cut_some(_narrow(arena, source, n), step, arena, _narrow(arena, step[3], n))
    else:
        _cut_middle(_middle(arena, source, n), step, arena)


@inlined
def _join_some(arena: Any, step: Any, first: Any, out: Any) -> None:
    n, a, b = out.size, step[2], step[6]
    second, third = _narrow(arena, step[7], n), _narrow(arena, step[9], n)
    if step[8] == 0:
        join_two(first, second, a, out)
    else:
        join_three(first, second, third, a, a + b, out)


@inlined
def _join_middle(arena: Any, step: Any, out: Any) -> None:
    if step[2] <= NARROW_BITS:
        _join_some(arena, step, _narrow(arena, step[3], out.size), out)
    else:
        _join_some(arena, step, _middle(arena, step[3], out.size), out)


@kernel("arena", "out")
def join_some(arena: NDArray[np.uint8], word_bytes: int, step: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Inverse of `cut_some`; what there was is replaced."""
    n, source, source_bytes = step[1], step[4], step[5]
    if source == ROOT:
        if word_bytes == 2:
            _join_some(arena, step, _narrow(arena, step[3], n), out.view(np.uint16))
        else:
            _join_middle(arena, step, out.view(np.uint32))
    elif source_bytes == 2:
        _join_some(arena, step, _narrow(arena, step[3], n), _narrow(arena, source, n))
    else:
        _join_middle(arena, step, _middle(arena, source, n))


@inlined
def _join_any(arena: Any, at: Any, n_words: Any, width_bits: Any, shift: Any, out: Any) -> None:
    """Put a field of any width into words."""
    if width_bits <= NARROW_BITS:
        join_field(_narrow(arena, at, n_words), shift, out)
    elif width_bits <= MIDDLE_BITS:
        join_field(_middle(arena, at, n_words), shift, out)
    else:
        join_field(_wide(arena, at, n_words), shift, out)


@kernel("arena", "out")
def join(arena: NDArray[np.uint8], word_bytes: int, step: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Inverse of `cut`: the field at shift 0 comes first, and replaces what there was."""
    n, width, at, source, source_bytes, shift = step[1], step[2], step[3], step[4], step[5], step[6]
    if source == ROOT:
        if word_bytes == 1:
            join_field(_narrow(arena, at, n), shift, out)
        elif word_bytes == 2:
            join_field(_narrow(arena, at, n), shift, out.view(np.uint16))
        elif word_bytes == 4:
            _join_any(arena, at, n, width, shift, out.view(np.uint32))
        else:
            _join_any(arena, at, n, width, shift, out.view(np.uint64))
    elif source_bytes == 2:
        join_field(_narrow(arena, at, n), shift, _narrow(arena, source, n))
    elif source_bytes == 4:
        _join_any(arena, at, n, width, shift, _middle(arena, source, n))
    else:
        _join_any(arena, at, n, width, shift, _wide(arena, source, n))


@inlined
def _mask(words: Any, width_bits: Any) -> Any:
    return words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits))


@kernel("words")
def shift_words(words: Any, width_bits: int, kind: int, constant: int) -> None:
    """Add `constant` to words, modulo ``2**width_bits``, or xor them with it."""
    mask, by = _mask(words, width_bits), words.dtype.type(np.uint64(constant))
    if kind == XOR:
        for i in range(words.size):
            words[i] = words.dtype.type(words[i] ^ by)
    else:
        for i in range(words.size):
            words[i] = both(words.dtype.type(words[i] + by), mask)


@kernel()
def are_all(words: Any, constant: int) -> bool:
    """Whether all words are `constant`."""
    value = words.dtype.type(np.uint64(constant))
    other = words.dtype.type(0)
    for i in range(words.size):
        other |= words.dtype.type(words[i] ^ value)
    return other == words.dtype.type(0)


@kernel("deltas")
def take_deltas(words: Any, width_bits: int, lag: int, kind: int, deltas: Any) -> None:
    """Set `deltas` to what changes each word from the one `lag` words before."""
    mask = _mask(words, width_bits)
    before, after = words[: deltas.size], words[lag:]
    if kind == SCAN_XOR:
        for i in range(deltas.size):
            deltas[i] = words.dtype.type(after[i] ^ before[i])
    else:
        for i in range(deltas.size):
            deltas[i] = both(words.dtype.type(after[i] - before[i]), mask)


@kernel("words")
def apply_deltas(deltas: Any, width_bits: int, lag: int, kind: int, words: Any) -> None:
    """Inverse of `take_deltas`; the first `lag` words are there."""
    mask = _mask(words, width_bits)
    if lag < RUN_WORDS:
        for i in range(deltas.size):
            if kind == SCAN_XOR:
                words[i + lag] = words.dtype.type(words[i] ^ deltas[i])
            else:
                words[i + lag] = both(words.dtype.type(words[i] + deltas[i]), mask)
        return
    for start in range(0, deltas.size, lag):
        # Words a lag away do not depend on one another.
        n = min(lag, deltas.size - start)
        before, after, by = words[start : start + n], words[start + lag : start + lag + n], deltas[start : start + n]
        if kind == SCAN_XOR:
            for i in range(n):
                after[i] = words.dtype.type(before[i] ^ by[i])
        else:
            for i in range(n):
                after[i] = both(words.dtype.type(before[i] + by[i]), mask)


@kernel("flags", "plain", "marked")
def part(words: Any, row_words: int, n_marked: int, low_bits: int, flags: Any, plain: Any, marked: Any) -> bool:
    """Set the mask of rows that end in `low_bits` zeros, and deal them out; return whether they are `n_marked`.

    `plain` and `marked` have a word more than they get.
    """
    mask, zero = _mask(words, low_bits), words.dtype.type(0)
    count = np.int64(0)
    for row in range(flags.size):
        used = zero
        for i in range(row * row_words, (row + 1) * row_words):
            used |= both(words[i], mask)
        flags[row] = used == zero
        count += used == zero
    if count != n_marked:
        return False
    j, k = np.int64(0), np.int64(0)
    if row_words == 1:
        for i in range(flags.size):
            # Written to both, and kept where it counts: a branch would be guessed wrong.
            flag = np.int64(flags[i])
            plain[j] = words[i]
            marked[k] = words[i]
            j += 1 - flag
            k += flag
        return True
    for row in range(flags.size):
        for i in range(row * row_words, (row + 1) * row_words):
            if flags[row]:
                marked[k] = words[i]
                k += 1
            else:
                plain[j] = words[i]
                j += 1
    return True


@kernel("words")
def unpart(flags: Any, row_words: int, n_marked: int, plain: Any, marked: Any, words: Any) -> bool:
    """Inverse of `part`; return whether the mask marks `n_marked` rows."""
    count = np.int64(0)
    for row in range(flags.size):
        count += np.int64(flags[row])
    if count != n_marked:
        return False
    j, k = np.int64(0), np.int64(0)
    if row_words == 1:
        for i in range(flags.size):
            flag = np.int64(flags[i])
            words[i] = words.dtype.type(pick(flag != 0, np.uint64(marked[k]), np.uint64(plain[j])))
            j += 1 - flag
            k += flag
        return True
    for row in range(flags.size):
        for i in range(row * row_words, (row + 1) * row_words):
            if flags[row]:
                words[i] = marked[k]
                k += 1
            else:
                words[i] = plain[j]
                j += 1
    return True


@kernel("values", "indices")
def rank(words: NDArray[np.uint16], width_bits: int, values: NDArray[np.uint16], indices: NDArray[np.uint16]) -> bool:
    """Set the values that occur, ascending, and which of them each word is; return whether there are as many."""
    most = min(words.size, 1 << width_bits)
    symbols, counts = np.empty(most, np.int64), np.empty(most, np.int64)
    if count_live(words, width_bits, symbols, counts) != values.size:
        return False
    ranks = np.empty(1 << width_bits, np.uint16)  # only words that occur are looked up
    for k in range(values.size):
        values[k] = symbols[k]
        ranks[symbols[k]] = k
    for i in range(words.size):
        indices[i] = ranks[words[i]]
    return True


@kernel("words")
def look_up(indices: NDArray[np.uint16], values: NDArray[np.uint16], words: NDArray[np.uint16]) -> bool:
    """Inverse of `rank`; return whether all indices are those of a value."""
    largest = np.uint16(0)
    for i in range(indices.size):
        largest = max(largest, indices[i])
    if np.int64(largest) >= values.size:
        return False
    for i in range(words.size):
        words[i] = values[indices[i]]
    return True


@kernel("arena")
def to_bytes(arena: NDArray[np.uint8], at: int, n_words: int) -> None:
    """Put words of two bytes into one each, in place."""
    words = _narrow(arena, at, n_words)
    for i in range(n_words):
        arena[at + i] = words[i]


@kernel("arena")
def from_bytes(arena: NDArray[np.uint8], at: int, n_words: int) -> None:
    """Inverse of `to_bytes`."""
    words = _narrow(arena, at, n_words)
    for i in range(n_words - 1, -1, -1):
        words[i] = arena[at + i]


@inlined
def _split(words: Any, step: Any, deltas: Any) -> Any:
    """Do what an operator does to `words`; return whether it can produce them."""
    kind, width = step[0], step[2]
    if kind == CONST:
        return are_all(words, step[4])
    if kind == ZIGZAG:
        fold(words, width)
    elif kind == SCAN_ADD or kind == SCAN_XOR:
        take_deltas(words, width, step[4], kind, deltas)
    else:
        shift_words(words, width, kind, -step[4] if kind == ADD else step[4])
    return True


@inlined
def _merge(words: Any, step: Any, deltas: Any) -> None:
    """Inverse of `_split`."""
    kind, width = step[0], step[2]
    if kind == CONST:
        words[:] = words.dtype.type(np.uint64(step[4]))
    elif kind == ZIGZAG:
        unfold(words, width)
    elif kind == SCAN_ADD or kind == SCAN_XOR:
        apply_deltas(deltas, width, step[4], kind, words)
    else:
        shift_words(words, width, kind, step[4])


@kernel("arena")
def split_step(step: NDArray[np.int64], arena: NDArray[np.uint8]) -> bool:
    """Do what an operator does to its words; return whether it can produce them."""
    kind, n, width, at = step[0], step[1], step[2], step[3]
    if kind == PARTITION:
        row, n_marked, low_bits, plain, marked = step[4], step[5], step[6], step[8], step[9]
        flags = _narrow(arena, step[7], n // row)
        some, others = n_marked * row + SLACK_WORDS, n - n_marked * row + SLACK_WORDS
        if width <= NARROW_BITS:
            parts = _narrow(arena, plain, others), _narrow(arena, marked, some)
            return part(_narrow(arena, at, n), row, n_marked, low_bits, flags, *parts)
        if width <= MIDDLE_BITS:
            halves = _middle(arena, plain, others), _middle(arena, marked, some)
            return part(_middle(arena, at, n), row, n_marked, low_bits, flags, *halves)
        return part(
            _wide(arena, at, n), row, n_marked, low_bits, flags, _wide(arena, plain, others), _wide(arena, marked, some)
        )
    if kind == DICTIONARY:
        values, indices = _narrow(arena, step[5], step[4]), _narrow(arena, step[6], n)
        return rank(_narrow(arena, at, n), width, values, indices)
    n_deltas = n - step[4] if kind == SCAN_ADD or kind == SCAN_XOR else 0
    if width <= NARROW_BITS:
        return _split(_narrow(arena, at, n), step, _narrow(arena, step[5], n_deltas))
    if width <= MIDDLE_BITS:
        return _split(_middle(arena, at, n), step, _middle(arena, step[5], n_deltas))
    return _split(_wide(arena, at, n), step, _wide(arena, step[5], n_deltas))


@kernel("arena")
def merge_step(step: NDArray[np.int64], arena: NDArray[np.uint8]) -> bool:
    """Inverse of `split_step`; return whether there can be such words."""
    kind, n, width, at = step[0], step[1], step[2], step[3]
    if kind == PARTITION:
        row, n_marked, plain, marked = step[4], step[5], step[8], step[9]
        flags = _narrow(arena, step[7], n // row)
        some, others = n_marked * row + SLACK_WORDS, n - n_marked * row + SLACK_WORDS
        if width <= NARROW_BITS:
            parts = _narrow(arena, plain, others), _narrow(arena, marked, some)
            return unpart(flags, row, n_marked, *parts, _narrow(arena, at, n))
        if width <= MIDDLE_BITS:
            halves = _middle(arena, plain, others), _middle(arena, marked, some)
            return unpart(flags, row, n_marked, *halves, _middle(arena, at, n))
        return unpart(
            flags, row, n_marked, _wide(arena, plain, others), _wide(arena, marked, some), _wide(arena, at, n)
        )
    if kind == DICTIONARY:
        return look_up(_narrow(arena, step[6], n), _narrow(arena, step[5], step[4]), _narrow(arena, at, n))
    n_deltas = n - step[4] if kind == SCAN_ADD or kind == SCAN_XOR else 0
    if width <= NARROW_BITS:
        _merge(_narrow(arena, at, n), step, _narrow(arena, step[5], n_deltas))
    elif width <= MIDDLE_BITS:
        _merge(_middle(arena, at, n), step, _middle(arena, step[5], n_deltas))
    else:
        _merge(_wide(arena, at, n), step, _wide(arena, step[5], n_deltas))
    return True


@kernel("found", "arena", "out")
def encode_steps(
    words: NDArray[np.uint8],
    word_bytes: int,
    steps: NDArray[np.int64],
    first: int,
    head: NDArray[np.uint8],
    places: NDArray[np.int64],
    digest: NDArray[np.uint8],
    found: NDArray[np.int64],
    arena: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> int:
    """Write the record of a program; return the byte of `out` where it starts.

    Parameters
    ----------
    words : uint8 array
        The bytes of one or more words of `word_bytes`.
    steps : int64 array, shape (s, COLUMNS)
        Nodes in pre-order.
    first : int
        The step to begin with, or to go on with after a literal that was written elsewhere.
    head : uint8 array
        The record up to its program and with it.
    places : int64 array, shape (k,)
        Where the codes of the encodings are in it.
    digest : uint8 array, shape (32,)
    found : int64 array, shape (2 * k + 2,)
        Set to the codes of the encodings, the bytes of the payloads, the end of the record, and the literals written.
        Whoever writes one of them elsewhere, from this end on, sets its code and bytes.
    arena : uint8 array
        Words between steps; the same until the record is written.
    out : uint8 array
        None of its bytes if only `found` is asked for; payloads of Huffman codes and rANS are then as planned.

    Returns
    -------
    int
        `OTHERWISE` where the program is to be written in another way, or not at all; `NO_ROOM` where `out` is too
        small; `LEFT` less its step where a literal is to be written elsewhere, its words in their smallest container.
    """
    k = places.size
    begin = head.size + MOST_BYTES * k + digest.size
    if first == 0:
        found[2 * k], found[2 * k + 1] = begin, 0
    if 0 < out.size < begin:
        return NO_ROOM
    for s in range(first, steps.shape[0]):
        step = steps[s]
        kind, n, width, at = step[0], step[1], step[2], step[3]
        if kind == CUT:
            cut(words, word_bytes, step, arena)
        elif kind == CUT_SOME:
            cut_some(words, word_bytes, step, arena)
        elif kind == LEAF or kind == OTHER_LEAF:
            f = found[2 * k + 1]
            code, n_bytes = OTHERWISE, 0
            if kind == LEAF:
                if width <= NARROW_BITS:
                    code, n_bytes = code_narrow(_narrow(arena, at, n), width, step[4], step[5:8], out, found[2 * k])
                elif width <= MIDDLE_BITS:
                    code, n_bytes = code_wide(_middle(arena, at, n), width, step[4], out, found[2 * k])
                else:
                    code, n_bytes = code_wide(_wide(arena, at, n), width, step[4], out, found[2 * k])
            if code == NO_ROOM:
                return NO_ROOM
            if code == OTHERWISE:
                if at != ROOT and width <= 8:
                    to_bytes(arena, at, n)
                return LEFT - s
            found[f], found[k + f] = code, n_bytes
            found[2 * k] += n_bytes
            found[2 * k + 1] = f + 1
        elif not split_step(step, arena):
            return OTHERWISE
    if out.size == 0:
        return 0
    head_bytes = head.size + digest.size
    for f in range(k):
        head_bytes += (bit_length(found[k + f] | 1) + 6) // 7
    begin -= head_bytes
    at = put_bytes(out, begin, head, head.size)
    for f in range(k):
        out[begin + places[f]] = found[f]
        at = put_varint(out, at, found[k + f])
    put_bytes(out, at, digest, digest.size)
    return begin


@kernel("sizes")
def take_sizes(record: NDArray[np.uint8], start: int, digest_bytes: int, sizes: NDArray[np.int64]) -> int:
    """Read the bytes of payloads from byte `start` on; return where the digest starts, -1 where they do not fit."""
    at = np.int64(start)
    total = np.int64(digest_bytes)
    for f in range(sizes.size):
        sizes[f], at = take_varint(record, at)
        if sizes[f] < 0:
            return -1
        total += sizes[f]
    return at if at + total == record.size else -1


@kernel("arena", "out")
def decode_steps(
    record: NDArray[np.uint8],
    start: int,
    sizes: NDArray[np.int64],
    steps: NDArray[np.int64],
    word_bytes: int,
    arena: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> bool:
    """Decode a record of `encode_steps`; return whether it can be one.

    Parameters
    ----------
    record : uint8 array
        All of it, of any content: nothing beyond it is read.
    start : int
        Where its payloads begin.
    sizes : int64 array, shape (k,)
        Their bytes, as `take_sizes` reads them.
    steps : int64 array, shape (s, COLUMNS)
        Nodes in post-order, no encoding undecided.
    word_bytes : int
    arena : uint8 array
        Words between steps; those of other literals are there, in their smallest container.
    out : uint8 array
        The bytes of the words; nothing beyond it is written.
    """
    f = np.int64(0)
    payload_at = np.int64(start)
    for s in range(steps.shape[0]):
        step = steps[s]
        kind, n, width, at = step[0], step[1], step[2], step[3]
        good = True
        if kind == CUT:
            join(arena, word_bytes, step, out)
        elif kind == CUT_SOME:
            join_some(arena, word_bytes, step, out)
        elif kind == LEAF or kind == OTHER_LEAF:
            payload = record[payload_at : payload_at + sizes[f]]
            payload_at += sizes[f]
            f += 1
            if kind == OTHER_LEAF:
                if at != ROOT and width <= 8:
                    from_bytes(arena, at, n)
            elif width <= NARROW_BITS:
                good = take_narrow(payload, width, step[4], step[5:8], _narrow(arena, at, n))
            elif width <= MIDDLE_BITS:
                good = take_wide(payload, width, step[4], _middle(arena, at, n))
            else:
                good = take_wide(payload, width, step[4], _wide(arena, at, n))
        else:
            good = merge_step(step, arena)
        if not good:
            return False
    return True
