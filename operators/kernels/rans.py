"""rANS with 32-bit states: tables, and runs of words over interleaved lanes that share one stream.

Lane j codes the words ``j, j + lanes, j + 2 * lanes ...`` of a run. A state x lies in ``[2**16, 2**32)``;
with frequencies that add up to ``2**bits``, decoding a word takes the low `bits` of x as its slot, then
``x = frequency * (x >> bits) + slot - start``, and below 2**16 the next 16 bits of the stream come in from
the right. The order of the stream is that of the words, so a vector of lanes can decode the same bytes.

Source: Duda, Asymmetric numeral systems, 2013; Giesen, Interleaved entropy coders, 2014.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length, pick
from operators.kernels.memory import load_u16, store_u16

MIN_BITS, MAX_BITS = 12, 14
"""Frequencies add up to 2 to the power of one of these."""
START = 1 << 16
"""State of every lane before its first word is encoded, and so after its last is decoded."""


@kernel("frequencies")
def normalise(counts: NDArray[np.int64], bits: int, frequencies: NDArray[np.int64]) -> None:
    """Set frequencies that add up to ``2**bits``, at least 1 each, close to the proportions of `counts`.

    Parameters
    ----------
    counts : int64 array, shape (m,)
        Positive, 2 to ``2**bits`` of them, their sum at most 2**40.
    bits : int
        12 to 14.
    frequencies : int64 array, shape (m,)

    Notes
    -----
    Words that are too rare for a slot get one; what is left is shared among the others in proportion, which
    may make more of them too rare. Shares are rounded to the nearest. Every step then gives a slot to the
    word that gains most by it, or takes one from the word that loses least: words are compared by
    ``count / (2 * frequency +- 1)``, the slope of ``count * log(frequency)`` half-way, exactly and with ties
    to the first.
    """
    m = counts.size
    total = np.int64(0)
    for i in range(m):
        frequencies[i] = 0
        total += counts[i]
    slots = np.int64(1) << bits
    n_rare = -1
    while n_rare != 0:
        n_rare, rare = 0, np.int64(0)
        for i in range(m):
            if frequencies[i] == 0 and counts[i] * slots < total:
                frequencies[i] = 1
                n_rare += 1
                rare += counts[i]
        slots -= n_rare
        total -= rare
    left = slots
    for i in range(m):
        if frequencies[i] == 0:
            frequencies[i] = (2 * counts[i] * slots + total) // (2 * total)
            left -= frequencies[i]
    while left != 0:
        # Several words a round where many slots are to move; the last ones go one by one.
        step = max(abs(left) // m, np.int64(1))
        best = -1
        for i in range(m):
            if left < 0 and frequencies[i] <= step:
                continue
            if best < 0:
                best = i
            elif left > 0:
                if counts[i] * (2 * frequencies[best] + 1) > counts[best] * (2 * frequencies[i] + 1):
                    best = i
            elif counts[i] * (2 * frequencies[best] - 1) < counts[best] * (2 * frequencies[i] - 1):
                best = i
        frequencies[best] += step if left > 0 else -step
        left -= step if left > 0 else -step


@inlined
def log2_of(value: Any) -> Any:
    """Return ``floor(log2(value) * 2**16)`` of an integer from 1 on; of one from 2**32 on by its first 32 bits."""
    log = bit_length(value) - 1
    mantissa = np.uint64(value) << np.uint64(31 - log) if log < 32 else np.uint64(value) >> np.uint64(log - 31)
    for _ in range(16):
        square = (mantissa * mantissa) >> np.uint64(31)
        carry = square >> np.uint64(32)
        log = 2 * log + np.int64(carry)
        mantissa = square >> carry
    return log


@kernel("logs")
def log2_q16(values: NDArray[np.int64], logs: NDArray[np.int64]) -> None:
    """Set ``floor(log2(value) * 2**16)`` of integers from 1 to 2**31, by squaring: the same on every machine."""
    for i in range(values.size):
        logs[i] = log2_of(values[i])


@kernel("frequencies", "levels")
def best_frequencies(
    counts: NDArray[np.int64], frequencies: NDArray[np.int64], levels: NDArray[np.int64]
) -> tuple[int, int]:
    """Set the frequencies that take the fewest bits of words and table; return theirs and the bits of all words.

    Parameters
    ----------
    counts : int64 array, shape (m,)
        Positive, 2 to ``2**MAX_BITS`` of them.
    frequencies, levels : int64 arrays, shape (m,)
        Frequencies that add up to 2 to the power of what is returned, and their bit lengths less one.
    """
    m = counts.size
    made, logs = np.empty(m, np.int64), np.empty(m, np.int64)
    best_bits, best_words, least = 0, np.int64(0), np.int64(1) << 62
    for bits in range(MIN_BITS, MAX_BITS + 1):
        if m > 1 << bits:
            continue
        normalise(counts, bits, made)
        log2_q16(made, logs)
        words_q16, n_table = np.int64(0), np.int64(0)
        for i in range(m):
            words_q16 += counts[i] * ((bits << 16) - logs[i])
            n_table += logs[i] >> 16
        n_words = (words_q16 + 0xFFFF) >> 16
        if n_words + n_table < least:
            best_bits, best_words, least = bits, n_words, n_words + n_table
            for i in range(m):
                frequencies[i] = made[i]
                levels[i] = logs[i] >> 16
    return best_bits, best_words


@kernel("reciprocals", "rows")
def encoding_table(
    symbols: NDArray[np.int64],
    frequencies: NDArray[np.int64],
    bits: int,
    reciprocals: NDArray[np.uint64],
    rows: NDArray[np.uint64],
) -> None:
    """Set the two numbers per word that `encode_run` needs.

    ``x // f`` is ``(x * reciprocal) >> (32 + bits)`` for every state x below ``f << (32 - bits)``: with
    ``r = 2**(32 + bits) // f + 1`` the product exceeds ``x / f`` by at most ``x / 2**(32 + bits) < 1 / f``,
    and stays below 2**64 (tested for every frequency).
    """
    start = np.int64(0)
    for i in range(symbols.size):
        f = frequencies[i]
        reciprocals[symbols[i]] = np.uint64((np.int64(1) << (32 + bits)) // f + 1)
        rows[symbols[i]] = (
            np.uint64(f << (32 - bits))
            | (np.uint64(start) << np.uint64(32))
            | (np.uint64((np.int64(1) << bits) - f) << np.uint64(48))
        )
        start += f


@kernel("table")
def decoding_table(symbols: NDArray[np.int64], frequencies: NDArray[np.int64], table: NDArray[np.uint64]) -> None:
    """Set ``table[slot] = word | frequency << 16 | (slot - start) << 32``."""
    slot = 0
    for i in range(symbols.size):
        for k in range(frequencies[i]):
            table[slot] = np.uint64(symbols[i]) | np.uint64(frequencies[i] << 16) | np.uint64(np.int64(k) << 32)
            slot += 1


@kernel("states", "out")
def encode_run(
    words: NDArray[Any],
    bits: int,
    reciprocals: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    states: NDArray[np.uint64],
    out: NDArray[np.uint8],
) -> int:
    """Encode a run backwards from the end of `out`; return the byte where the stream starts.

    Parameters
    ----------
    words : Words, shape (n,)
    bits, reciprocals, rows
        As in `encoding_table`.
    states : uint64 array, shape (lanes,), lanes a power of two
        `START` each; set to the states that the decoder starts from.
    out : uint8 array, shape (at least 2 * n + 2,)
    """
    lane_mask = np.uint64(states.size - 1)
    shift = np.uint64(32 + bits)
    low16, low32 = np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
    at = np.uint64(out.size - 2)
    for k in range(words.size):
        i = np.uint64(words.size - 1 - k)
        word = words[i]
        row = rows[word]
        x = states[i & lane_mask]
        store_u16(out, at, np.uint16(x & low16))
        is_full = x >= (row & low32)
        x = pick(is_full, x >> np.uint64(16), x)
        at = pick(is_full, at - np.uint64(2), at)
        q = (x * reciprocals[word]) >> shift
        states[i & lane_mask] = x + ((row >> np.uint64(32)) & low16) + q * (row >> np.uint64(48))
    return np.int64(at) + 2


@inlined
def _step(x: Any, table: Any, mask: Any, bits: Any) -> Any:
    """Return the entry of a state and the state after it, before bits come in."""
    entry = table[x & mask]
    return entry, ((entry >> np.uint64(16)) & np.uint64(0xFFFF)) * (x >> bits) + (entry >> np.uint64(32))


@inlined
def _lane(payload: Any, at: Any, table: Any, mask: Any, bits: Any, states: Any, j: Any, words: Any, first: Any) -> Any:
    """Decode the next word of lane `j`; return the byte after the bits that came in."""
    entry, x = _step(states[j], table, mask, bits)
    words[first + j] = entry & np.uint64(0xFFFF)
    empty = x < np.uint64(START)
    states[j] = pick(empty, (x << np.uint64(16)) | np.uint64(load_u16(payload, at)), x)
    return pick(empty, at + np.uint64(2), at)


@kernel("states", "words")
def decode_words(
    payload: NDArray[np.uint8],
    start: int,
    end: int,
    bits: int,
    table: NDArray[np.uint64],
    states: NDArray[np.uint64],
    words: NDArray[Any],
) -> int:
    """Decode the next words of a run; return the byte after the bits they took, or -1 beyond `end`.

    Parameters
    ----------
    payload : uint8 array
        Nothing outside ``[start, end)`` is used.
    bits, table
        Of `decoding_table`.
    states : uint64 array, shape (lanes,)
        Below 2**32 each, advanced.
    words : Words
        Starts at lane 0; all of it is written on success.
    """
    lanes = states.size
    b = np.uint64(bits)
    mask = (np.uint64(1) << b) - np.uint64(1)
    low = np.uint64(START)
    at = np.uint64(start)
    i = 0
    # A round takes at most 2 bytes a lane, and looks at the next 2.
    while lanes >= 4 and i + lanes <= words.size and np.int64(at) + 2 * lanes + 2 <= end:
        first = np.uint64(i)
        for k in range(0, lanes, 4):
            j = np.uint64(k)
            at = _lane(payload, at, table, mask, b, states, j, words, first)
            at = _lane(payload, at, table, mask, b, states, j + np.uint64(1), words, first)
            at = _lane(payload, at, table, mask, b, states, j + np.uint64(2), words, first)
            at = _lane(payload, at, table, mask, b, states, j + np.uint64(3), words, first)
        i += lanes
    for k in range(i, words.size):
        entry, x = _step(states[k - i & lanes - 1], table, mask, b)
        words[k] = entry & np.uint64(0xFFFF)
        if x < low:
            if np.int64(at) + 2 > end:
                return -1
            x = (x << np.uint64(16)) | np.uint64(load_u16(payload, at))
            at += np.uint64(2)
        states[k - i & lanes - 1] = x
    return np.int64(at)
