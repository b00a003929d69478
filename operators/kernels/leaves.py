"""Literals of at most a run of rANS in one call: words to payloads and back.

Words lie in 16, 32 or 64 bits, and are coded by the kernels of the encodings: what is written is what
`operators.literals` writes, byte for byte. Words wider than 16 bits are packed or kept as they are.
"""

# mypy: disable-error-code="no-any-return, arg-type, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS
from operators.kernels.alphabet import MAX_SYMBOLS, put_table, table_symbols, take_table
from operators.kernels.bits import pack_any, pack_u16, pack_u32, unpack_any, unpack_u16, unpack_wide
from operators.kernels.histogram import count_u16
from operators.kernels.huffman import (
    STREAMS,
    ascending_order,
    canonical_codes,
    code_lengths,
    decode_singles,
    encode_block,
    single_table,
)
from operators.kernels.huffman import encoding_table as huffman_table
from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length
from operators.kernels.memory import copy_bytes, item_bytes
from operators.kernels.rans import (
    MAX_BITS,
    MIN_BITS,
    START,
    best_frequencies,
    decode_words,
    decoding_table,
    encode_run,
)
from operators.kernels.rans import encoding_table as rans_tables
from operators.kernels.repeats import WIDE_WINDOW, repeats, window_of

UNDECIDED, RAW, BITPACK, HUFFMAN, RANS = 0, 64, 65, 66, 67
"""Codes of the encodings."""
OTHERWISE, NO_ROOM = -1, -2
"""What there is in place of a code where a literal is to be coded in another way, or `out` is too small."""
NARROW_BITS, MIDDLE_BITS = 16, 32
"""Bits of the widest words in two and in four bytes. Those in two are counted."""
_SPARSE = 4  # a field of fewer words than one in so many of its values is sorted rather than counted in a table


@kernel("symbols", "counts")
def count_live(
    words: NDArray[np.uint16], width_bits: int, symbols: NDArray[np.int64], counts: NDArray[np.int64]
) -> int:
    """Set the words that occur, ascending, and how often each does; return how many there are.

    `symbols` and `counts` have room for as many as there are words, or values of `width_bits` bits.
    """
    n = words.size
    m = 0
    if _SPARSE * n < 1 << width_bits:
        values, order = np.empty(n, np.int64), np.empty(n, np.int64)
        for i in range(n):
            values[i] = words[i]
        ascending_order(values, order)
        for k in range(n):
            word = values[order[k]]
            if k == 0 or word != symbols[m - 1]:
                symbols[m] = word
                counts[m] = 0
                m += 1
            counts[m - 1] += 1
        return m
    tables = np.zeros((4 if n >= 1 << width_bits else 1, 1 << width_bits), np.uint32)
    count_u16(words.view(np.uint8), tables)
    for word in range(1 << width_bits):
        count = np.int64(0)
        for t in range(tables.shape[0]):
            count += np.int64(tables[t, word])
        if count:
            symbols[m] = word
            counts[m] = count
            m += 1
    return m


@inlined
def _entropy_bits(counts: Any, n_words: Any, less: Any) -> Any:
    """Return bits that no code of single words goes below: log2 of counts from straight lines above and below it.

    Each word occurs `less` times less than `counts` say, and at all in `n_words`, which is 0 where none is left.
    """
    log = bit_length(n_words) - 1 if n_words else 0
    # log2(1 + f) >= f, and at most 5700 / 65536 above it.
    total = n_words * ((log << 16) + ((n_words << 16 >> log) - (1 << 16)))
    for i in range(counts.size):
        count = counts[i] - less
        if count:
            log = bit_length(count) - 1
            total -= count * ((log << 16) + min((count << 16 >> log) - (1 << 16) + 5701, 1 << 16))
    return max(total >> 16, 0)


@inlined
def packed_bits(n_bytes: Any, width_bits: Any, n_words: Any) -> Any:
    """Return the widest packing of words that fills `n_bytes`."""
    return min(width_bits, 8 * n_bytes // n_words)


@inlined
def put_bytes(out: Any, at: Any, part: Any, n_bytes: Any) -> Any:
    """Copy the first bytes of `part`; return the byte after them."""
    copy_bytes(out, np.int64(at), part, np.int64(0), np.int64(n_bytes))
    return at + n_bytes


@kernel("lengths", "frequencies", "levels", "table")
def choose_narrow(
    width_bits: int,
    n_words: int,
    wanted: int,
    symbols: NDArray[np.int64],
    counts: NDArray[np.int64],
    traits: NDArray[np.int64],
    lengths: NDArray[np.int64],
    frequencies: NDArray[np.int64],
    levels: NDArray[np.int64],
    table: NDArray[np.uint8],
) -> tuple[int, int, int, int]:
    """Return the code of the encoding of a field, the bytes of its payload and of its table, and bits of frequencies.

    Parameters
    ----------
    width_bits : int
        1 to 16.
    wanted : int
        Code of an encoding, or `UNDECIDED`: then the one that `operators.literals.profile.choose` takes.
    symbols, counts : int64 arrays, shape (m,)
        Of `count_live`.
    traits : int64 array, shape (3,)
        Of as many words: Huffman streams; lanes of rANS; one part of how many rANS has to save, 0 for none.
    lengths, frequencies, levels : int64 arrays, shape (m,)
        Lengths are set for Huffman codes, the others for rANS.
    table : uint8 array, shape (8 * m + 17,)
        Zeros; set to what a payload with a table starts with.
    """
    m = symbols.size
    n_streams, lanes, rans_gain = (traits[0] if m > 1 else 0), traits[1], traits[2]
    undecided = wanted == UNDECIDED
    none = symbols[:0]
    code, n_bytes, table_bytes, bits = BITPACK, (n_words * bit_length(symbols[m - 1]) + 7) >> 3, 0, 0
    raw_bytes = n_words * width_bits >> 3
    if (width_bits == 8 or width_bits == 16) and (wanted == RAW or (undecided and raw_bytes <= n_bytes)):
        code, n_bytes = RAW, raw_bytes
    # What no table and no code goes below: a bit for each gap and each level.
    least = (2 * m + (_entropy_bits(counts, n_words, 0) if undecided else 0)) >> 3
    if m <= MAX_SYMBOLS and (wanted == HUFFMAN or (undecided and least < n_bytes)):
        n_bits = code_lengths(counts, lengths)
        size = put_table(symbols, lengths, none, table)
        made = size + 2 * max(n_streams - 1, 0) + ((n_bits + 7 * n_streams) >> 3)
        if made < n_bytes or not undecided:
            code, n_bytes, table_bytes = HUFFMAN, made, size
    most = n_bytes - (n_bytes // rans_gain if rans_gain else 0)
    # A frequency f of 2**b takes floor(log2(f)) > log2(f) - 1 bits of the table, and each of c words b - log2(f).
    # Over all that is least where f goes with c - 1: their entropy, and b - 1 bits. A gap and a level take two more.
    if undecided:
        least = ((_entropy_bits(counts, n_words - m, 1) + m * (MIN_BITS + 1)) >> 3) + 4 * lanes + 3
    if 2 <= m <= MAX_SYMBOLS and (wanted == RANS or (undecided and least < most)):
        found, word_bits = best_frequencies(counts, frequencies, levels)
        other = np.zeros(table.size, np.uint8)
        other[0] = found
        size = 1 + put_table(symbols, levels, frequencies, other[1:])
        made = size + 4 * lanes + 2 + ((word_bits + (word_bits >> 12) + 7) >> 3)
        if made < most or not undecided:
            code, n_bytes, table_bytes, bits = RANS, made, size, found
            put_bytes(table, 0, other, size)
    return code, n_bytes, table_bytes, bits


@kernel("out")
def put_packed(words: NDArray[np.uint16], width_bits: int, out: NDArray[np.uint8]) -> None:
    """Pack words of up to 16 bits, as `operators.kernels.bits.pack` does."""
    if width_bits == 16:
        put_bytes(out, 0, words.view(np.uint8), out.size)
    elif width_bits:
        done = pack_u16(words.view(np.uint8), width_bits, out)
        if done < words.size:
            pack_any(words, width_bits, done, out)


@kernel("out")
def put_wide(words: NDArray[Any], width_bits: int, out: NDArray[np.uint8]) -> None:
    """As `put_packed` for wider words."""
    done = 0
    if width_bits == 8 * item_bytes(words):
        put_bytes(out, 0, words.view(np.uint8), out.size)
        return
    if 0 < width_bits <= 28:
        done = pack_u32(words, width_bits, out)
    if width_bits and done < words.size:
        pack_any(words, width_bits, done, out)


@kernel("out")
def put_huffman(
    words: NDArray[np.uint16],
    width_bits: int,
    symbols: NDArray[np.int64],
    lengths: NDArray[np.int64],
    n_streams: int,
    out: NDArray[np.uint8],
) -> int:
    """Write the directory and the streams of Huffman codes; return their bytes."""
    codes = np.empty(symbols.size, np.int64)
    canonical_codes(lengths, codes)
    table = np.empty(1 << width_bits, np.uint64)  # only words that occur are looked up
    huffman_table(symbols, lengths, codes, table)
    sizes = np.zeros(n_streams, np.int64)
    scratch = np.empty(2 * min(words.size, BLOCK_WORDS) + 18 * STREAMS, np.uint8)
    end = np.int64(2 * (n_streams - 1))
    for first in range(0, n_streams, STREAMS):
        start = first // STREAMS * BLOCK_WORDS
        block = words[start : min(start + BLOCK_WORDS, words.size)]
        end += encode_block(block, table, out[end:], scratch, sizes[first : min(first + STREAMS, n_streams)])
    for k in range(n_streams - 1):
        out[2 * k] = sizes[k] & 255
        out[2 * k + 1] = sizes[k] >> 8
    return end


@kernel("out")
def put_rans(
    words: NDArray[np.uint16],
    width_bits: int,
    symbols: NDArray[np.int64],
    frequencies: NDArray[np.int64],
    bits: int,
    lanes: int,
    out: NDArray[np.uint8],
) -> int:
    """Write the states and the stream of a run; return their bytes, or -1 where `out` is too small."""
    reciprocals, rows = np.empty(1 << width_bits, np.uint64), np.empty(1 << width_bits, np.uint64)
    rans_tables(symbols, frequencies, bits, reciprocals, rows)
    states = np.full(lanes, START, np.uint64)
    scratch = np.empty(2 * words.size + 2, np.uint8)
    start = encode_run(words, bits, reciprocals, rows, states, scratch)
    n_bytes = 4 * lanes + scratch.size - start
    if n_bytes > out.size:
        return -1
    for j in range(lanes):
        for k in range(4):
            out[4 * j + k] = np.uint8((states[j] >> np.uint64(8 * k)) & np.uint64(255))
    put_bytes(out, 4 * lanes, scratch[start:], scratch.size - start)
    return n_bytes


@kernel("out")
def code_narrow(
    narrow: NDArray[np.uint16], width_bits: int, wanted: int, traits: NDArray[np.int64], out: NDArray[np.uint8], at: int
) -> tuple[int, int]:
    """Write the payload of words of up to 16 bits to byte `at` of `out`; return its code and its bytes.

    Parameters
    ----------
    narrow : uint16 array
        The words, as many as a run of rANS has at most.
    width_bits : int
    wanted : int
        As for `choose_narrow`.
    traits : int64 array, shape (3,)
        As for `choose_narrow`.
    out : uint8 array
        None of its bytes if only what would be written is asked for; payloads of Huffman codes and rANS are then as
        planned.
    at : int

    Returns
    -------
    (int, int)
        `OTHERWISE` in place of a code where LZ is to be tried or an encoding does not apply, `NO_ROOM` where `out` is
        too small.
    """
    n = narrow.size
    most = min(n, 1 << width_bits)
    symbols, counts = np.empty(most, np.int64), np.empty(most, np.int64)
    m = 1
    if wanted == UNDECIDED and n > BLOCK_WORDS:
        return OTHERWISE, 0  # LZ is tried on the first block
    if wanted == RAW or wanted == BITPACK:
        symbols[0], counts[0] = np.int64(narrow.max()), n
    else:
        m = count_live(narrow, width_bits, symbols, counts)
    symbols, counts = symbols[:m], counts[:m]
    if (wanted == HUFFMAN and m > MAX_SYMBOLS) or (wanted == RANS and not 2 <= m <= MAX_SYMBOLS):
        return OTHERWISE, 0
    if wanted == UNDECIDED and repeats(narrow, window_of(counts)):
        return OTHERWISE, 0
    lengths, frequencies, levels = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    table = np.zeros(8 * m + 17, np.uint8)
    code, n_bytes, table_bytes, bits = choose_narrow(
        width_bits, n, wanted, symbols, counts, traits, lengths, frequencies, levels, table
    )
    if wanted == RAW and code != RAW:
        return OTHERWISE, 0
    if out.size == 0:
        return code, n_bytes
    if at + n_bytes > out.size:
        return NO_ROOM, 0
    if table_bytes == 0:
        put_packed(narrow, packed_bits(n_bytes, width_bits, n), out[at : at + n_bytes])
        return code, n_bytes
    start = put_bytes(out, at, table, table_bytes)
    made = 0
    if code == RANS:
        made = put_rans(narrow, width_bits, symbols, frequencies, bits, traits[1], out[start:])
    elif m > 1:
        made = put_huffman(narrow, width_bits, symbols, lengths, traits[0], out[start:])
    return (code if made >= 0 else NO_ROOM), table_bytes + made


@kernel("out")
def code_wide(words: NDArray[Any], width_bits: int, wanted: int, out: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """As `code_narrow` for wider words."""
    n = words.size
    may_be_raw = width_bits == 32 or width_bits == 64
    if wanted >= HUFFMAN or (wanted == RAW and not may_be_raw):
        return OTHERWISE, 0
    if wanted == UNDECIDED and (n > BLOCK_WORDS or repeats(words, WIDE_WINDOW)):
        return OTHERWISE, 0
    largest = np.uint64(words.max())
    packed = bit_length(np.int64(largest >> np.uint64(1))) + (1 if largest else 0)
    code, n_bytes = BITPACK, (n * packed + 7) >> 3
    raw_bytes = n * width_bits >> 3
    if may_be_raw and (wanted == RAW or (wanted == UNDECIDED and raw_bytes <= n_bytes)):
        code, n_bytes = RAW, raw_bytes
    if out.size == 0:
        return code, n_bytes
    if at + n_bytes > out.size:
        return NO_ROOM, 0
    put_wide(words, packed_bits(n_bytes, width_bits, n), out[at : at + n_bytes])
    return code, n_bytes


@inlined
def _packed_bits(payload: Any, width_bits: Any, n_words: Any, code: Any) -> Any:
    """Return the bits of each word of a payload of `RAW` or `BITPACK`, or -1 where it cannot be one."""
    size = payload.size
    if code == RAW:
        is_word = width_bits == 8 or width_bits == 16 or width_bits == 32 or width_bits == 64
        return width_bits if is_word and 8 * size == n_words * width_bits else -1
    packed = packed_bits(size, width_bits, n_words)
    n_bits = n_words * packed
    if code != BITPACK or size != (n_bits + 7) >> 3 or (n_bits & 7 and payload[size - 1] >> (n_bits & 7)):
        return -1
    return packed


@kernel("words")
def take_huffman(payload: NDArray[np.uint8], width_bits: int, n_streams: int, words: NDArray[np.uint16]) -> bool:
    """Decode a payload of Huffman codes; return whether it can be one."""
    m = table_symbols(payload)
    if m < 1:
        return False
    symbols, lengths, codes = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    at = take_table(payload, width_bits, symbols, lengths, symbols[:0])
    if at < 1 or canonical_codes(lengths, codes):
        return False
    if m == 1:
        for i in range(words.size):
            words[i] = symbols[0]
        return at == payload.size
    starts = np.empty(n_streams + 1, np.int64)
    start = at + 2 * (n_streams - 1)
    if start > payload.size:
        return False
    for k in range(n_streams - 1):
        starts[k] = start
        start += np.int64(payload[at + 2 * k]) | np.int64(payload[at + 2 * k + 1]) << 8
    if start > payload.size:
        return False
    starts[n_streams - 1], starts[n_streams] = start, payload.size
    longest = np.int64(0)
    for i in range(m):
        longest = max(longest, lengths[i])
    single = np.empty(1 << longest, np.uint32)
    single_table(symbols, lengths, codes, single)
    for first in range(0, n_streams, STREAMS):
        start = first // STREAMS * BLOCK_WORDS
        block = words[start : min(start + BLOCK_WORDS, words.size)]
        if decode_singles(payload, starts[first : min(first + STREAMS, n_streams) + 1], single, block):
            return False
    return True


@kernel("words")
def take_rans(payload: NDArray[np.uint8], width_bits: int, lanes: int, words: NDArray[np.uint16]) -> bool:
    """Decode a payload of rANS of one run; return whether it can be one."""
    bits = np.int64(payload[0]) if payload.size else 0
    if not MIN_BITS <= bits <= MAX_BITS:
        return False
    head = payload[1:]
    m = table_symbols(head)
    if m < 2:
        return False
    symbols, levels, frequencies = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    at = take_table(head, width_bits, symbols, levels, frequencies)
    total = np.int64(0)
    for i in range(m):
        total += frequencies[i]
    if at < 1 or total != 1 << bits or 1 + at + 4 * lanes > payload.size:
        return False
    table = np.empty(1 << bits, np.uint64)
    decoding_table(symbols, frequencies, table)
    states = np.zeros(lanes, np.uint64)
    at += 1
    for j in range(lanes):
        for k in range(4):
            states[j] |= np.uint64(payload[at + 4 * j + k]) << np.uint64(8 * k)
    if decode_words(payload, at + 4 * lanes, payload.size, bits, table, states, words) != payload.size:
        return False
    for j in range(lanes):
        if states[j] != np.uint64(START):
            return False
    return True


@kernel("narrow")
def take_narrow(
    payload: NDArray[np.uint8], width_bits: int, code: int, traits: NDArray[np.int64], narrow: NDArray[np.uint16]
) -> bool:
    """Decode words of up to 16 bits; return whether `payload` can be that of a literal of them."""
    n = narrow.size
    if code == HUFFMAN:
        return take_huffman(payload, width_bits, traits[0], narrow)
    if code == RANS:
        return take_rans(payload, width_bits, traits[1], narrow)
    packed = _packed_bits(payload, width_bits, n, code)
    if packed == 16:
        put_bytes(narrow.view(np.uint8), 0, payload, 2 * n)
    elif packed > 0:
        done = unpack_u16(payload, packed, narrow.view(np.uint8))
        if done < n:
            unpack_any(payload, packed, done, narrow)
    else:
        for i in range(n):
            narrow[i] = 0
    return packed >= 0


@kernel("words")
def take_wide(payload: NDArray[np.uint8], width_bits: int, code: int, words: NDArray[Any]) -> bool:
    """As `take_narrow` for wider words."""
    packed = _packed_bits(payload, width_bits, words.size, code)
    if packed == 8 * item_bytes(words):
        put_bytes(words.view(np.uint8), 0, payload, payload.size)
    elif packed > 0:
        done = 0
        if packed <= 56:
            done = unpack_wide(payload, packed, words)
        if done < words.size:
            unpack_any(payload, packed, done, words)
    else:
        for i in range(words.size):
            words[i] = 0
    return packed >= 0
