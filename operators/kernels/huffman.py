"""Canonical Huffman codes of at most 14 bits: lengths, tables, blocks of interleaved streams.

A code of length l is written with its most significant bit first, into bytes filled from the least
significant bit; so the bits of a canonical code are stored reversed, and a decoder finds the next
bits of a stream, up to `PRIMARY_BITS`, by one unaligned load and a mask.

The decoding table maps these bits to all the whole codes in them, up to 48 bits of words:

=======  ===============================================================
bits
=======  ===============================================================
0-47     the words, in their container
48-53    bits of the whole codes
56-58    bytes of the words
=======  ===============================================================

The last two are 0 where not even the first code is whole: it is a longer one.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.alphabet import peek
from operators.kernels.jit import inlined, kernel
from operators.kernels.memory import copy_bytes, item_bytes, load_u64, store_u64

MAX_LENGTH = 14
"""Bits of the longest code: four of them and 7 more bits fit into 64."""
PRIMARY_BITS = 12
"""Bits that index a decoding table at most: 2 to the power of this is 32 KiB, all of a first-level cache."""
STREAMS = 4
"""Streams of a block that is split."""
SPLIT_WORDS = 1 << 12
"""Words of the smallest block that is split into streams."""
LONG_CODE_GAIN = 4096
"""Codes longer than `PRIMARY_BITS` take a second look-up, but words that need one are rare: the writer uses them
to save one part in this many."""
_LOOKUPS = 4  # of PRIMARY_BITS each from one load of at least 57 bits
_ROUND_IN = 8  # bytes that the codes of a round take at most: 4 * 12 bits, and an escape's
_ROUND_OUT = 26  # bytes that a round writes at most: 8 at each of 4 look-ups, up to 6 of them words


@kernel("lengths")
def limited_lengths(counts: NDArray[np.int64], limit: int, lengths: NDArray[np.int64]) -> None:
    """Set the lengths of the best code of at most `limit` bits, by package-merge.

    Parameters
    ----------
    counts : int64 array, shape (m,)
        Ascending, positive, at most ``2**limit`` of them.
    limit : int
        1 to `MAX_LENGTH`.
    lengths : int64 array, shape (m,)
        Set, descending. A single symbol gets length 0.

    Notes
    -----
    Source: Larmore and Hirschberg, A fast algorithm for optimal length-limited Huffman codes, 1990.
    Of equal weights the leaf goes before the package, so the lengths depend on the counts alone.
    """
    m = counts.size
    lengths[:] = 0
    if m == 1:
        return
    is_leaf = np.zeros((limit, 2 * m), np.uint8)
    before, items = np.zeros(2 * m, np.int64), np.zeros(2 * m, np.int64)
    n_before = 0
    for level in range(limit):
        n_packages = n_before >> 1
        i, j, n_items = 0, 0, 0
        while i < m or j < n_packages:
            if j == n_packages or (i < m and counts[i] <= before[2 * j] + before[2 * j + 1]):
                items[n_items] = counts[i]
                is_leaf[level, n_items] = 1
                i += 1
            else:
                items[n_items] = before[2 * j] + before[2 * j + 1]
                j += 1
            n_items += 1
        before, items = items, before
        n_before = n_items
    taken = 2 * m - 2
    for level in range(limit - 1, -1, -1):
        n_leaves = 0
        for k in range(taken):
            n_leaves += np.int64(is_leaf[level, k])
        for k in range(n_leaves):
            lengths[k] += 1
        taken = 2 * (taken - n_leaves)


@kernel("lengths")
def huffman_lengths(counts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Set the lengths of the best code, however long: as `limited_lengths` for 2 and more ascending counts.

    Notes
    -----
    Source: Moffat and Katajainen, In-place calculation of minimum-redundancy codes, 1995. `lengths` holds
    the weights of packages, then their parents, then their depths.
    """
    m = counts.size
    for i in range(m):
        lengths[i] = counts[i]
    lengths[0] += lengths[1]
    root, leaf = 0, 2
    for package in range(1, m - 1):
        if leaf >= m or lengths[root] < lengths[leaf]:
            lengths[package] = lengths[root]
            lengths[root] = package
            root += 1
        else:
            lengths[package] = lengths[leaf]
            leaf += 1
        if leaf >= m or (root < package and lengths[root] < lengths[leaf]):
            lengths[package] += lengths[root]
            lengths[root] = package
            root += 1
        else:
            lengths[package] += lengths[leaf]
            leaf += 1
    lengths[m - 2] = 0
    for package in range(m - 3, -1, -1):
        lengths[package] = lengths[lengths[package]] + 1
    free, depth, root, leaf = 1, 0, m - 2, m - 1
    while free > 0:
        n_packages = 0
        while root >= 0 and lengths[root] == depth:
            n_packages += 1
            root -= 1
        for _ in range(free - n_packages):
            lengths[leaf] = depth
            leaf -= 1
        free = 2 * n_packages
        depth += 1


@kernel("order")
def ascending_order(counts: NDArray[np.int64], order: NDArray[np.int64]) -> None:
    """Set the indices of `counts` (not negative) in ascending order, ties in theirs."""
    m = counts.size
    before = np.empty(m, np.int64)
    largest = np.int64(0)
    for i in range(m):
        order[i] = i
        largest = max(largest, counts[i])
    shift = 0
    while largest >> shift:
        starts = np.zeros(257, np.int64)
        for i in range(m):
            before[i] = order[i]
            starts[((counts[i] >> shift) & 255) + 1] += 1
        for k in range(256):
            starts[k + 1] += starts[k]
        for k in range(m):
            i = before[k]
            digit = (counts[i] >> shift) & 255
            order[starts[digit]] = i
            starts[digit] += 1
        shift += 8


@kernel("lengths")
def code_lengths(counts: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Set the length of the code of each word, and return the bits of all words.

    Parameters
    ----------
    counts : int64 array, shape (m,)
        Positive, 1 to ``2**MAX_LENGTH`` of them, in any order.
    lengths : int64 array, shape (m,)
    """
    m = counts.size
    if m == 1:
        lengths[0] = 0
        return 0
    order, ascending = np.empty(m, np.int64), np.empty(m, np.int64)
    ascending_order(counts, order)
    for k in range(m):
        ascending[k] = counts[order[k]]
    best = np.empty(m, np.int64)
    huffman_lengths(ascending, best)
    n_bits = np.int64(0)
    if best[0] > PRIMARY_BITS:
        other = np.empty(m, np.int64)
        limited_lengths(ascending, MAX_LENGTH, other)
        best, other = other, best
        if m <= 1 << PRIMARY_BITS:
            limited_lengths(ascending, PRIMARY_BITS, other)
            most = np.int64(0)
            for k in range(m):
                most += ascending[k] * other[k]
                n_bits += ascending[k] * best[k]
            if n_bits >= most - most // LONG_CODE_GAIN:
                best = other
            n_bits = np.int64(0)
    for k in range(m):
        lengths[order[k]] = best[k]
        n_bits += ascending[k] * best[k]
    return n_bits


@kernel("codes")
def canonical_codes(lengths: NDArray[np.int64], codes: NDArray[np.int64]) -> int:
    """Set the code of each symbol, its bits reversed; return -1 unless the lengths make a complete code.

    Parameters
    ----------
    lengths : int64 array, shape (m,)
        0 to 15 each; m = 1 needs length 0, any more need 1 to `MAX_LENGTH`.
    codes : int64 array, shape (m,)
    """
    m = lengths.size
    if m == 1:
        codes[0] = 0
        return 0 if lengths[0] == 0 else -1
    n_of = np.zeros(16, np.int64)
    for i in range(m):
        n_of[lengths[i]] += 1
    if n_of[0] or n_of[MAX_LENGTH + 1]:
        return -1
    following = np.zeros(MAX_LENGTH + 1, np.int64)
    code = 0
    for length in range(1, MAX_LENGTH + 1):
        following[length] = code
        code = (code + n_of[length]) << 1
    if code != 2 << MAX_LENGTH:
        return -1
    for i in range(m):
        length = lengths[i]
        code = following[length]
        following[length] += 1
        reverse = np.int64(0)
        for _ in range(length):
            reverse = (reverse << 1) | (code & 1)
            code >>= 1
        codes[i] = reverse
    return 0


@kernel("table")
def encoding_table(
    symbols: NDArray[np.int64], lengths: NDArray[np.int64], codes: NDArray[np.int64], table: NDArray[np.uint64]
) -> None:
    """Set ``table[word] = code << (64 - length) | length``, for lengths from 1 on."""
    for i in range(symbols.size):
        table[symbols[i]] = (np.uint64(codes[i]) << np.uint64(64 - lengths[i])) | np.uint64(lengths[i])


@kernel("single")
def single_table(
    symbols: NDArray[np.int64], lengths: NDArray[np.int64], codes: NDArray[np.int64], single: NDArray[np.uint32]
) -> None:
    """Set the first word in the bits that index `single`, as `decoding_tables` does, from a complete code."""
    for i in range(symbols.size):
        entry = np.uint32(symbols[i] << 8 | lengths[i])
        for index in range(codes[i], single.size, 1 << lengths[i]):
            single[index] = entry


@kernel("single", "many")
def decoding_tables(
    symbols: NDArray[np.int64],
    lengths: NDArray[np.int64],
    codes: NDArray[np.int64],
    word_bytes: int,
    single: NDArray[np.uint32],
    many: NDArray[np.uint64],
) -> None:
    """Set the tables of a decoder from a complete code of at least two symbols.

    Parameters
    ----------
    symbols, lengths, codes : int64 arrays, shape (m,)
    word_bytes : int
        1 or 2: bytes of a word's container.
    single : uint32 array, shape (2**longest,), where no code is longer than `longest` >= `PRIMARY_BITS`
        For each `longest` bits the first code in them, ``symbol << 8 | length``.
    many : uint64 array, shape (2**bits,), bits <= PRIMARY_BITS
        As in the module's docstring.
    """
    single_table(symbols, lengths, codes, single)
    most = 6 // word_bytes
    word_bits = np.uint64(8 * word_bytes)
    n_bits = 0
    while 1 << n_bits < many.size:
        n_bits += 1
    for index in range(many.size):
        rest, left, n = index, n_bits, 0
        entry = np.uint64(0)
        at = np.uint64(0)
        while n < most:
            found = np.int64(single[rest])
            length = found & 255
            if length > left:
                break
            entry |= np.uint64(found >> 8) << at
            at += word_bits
            n += 1
            rest >>= length
            left -= length
        many[index] = entry | (np.uint64(n_bits - left | n * word_bytes << 8) << np.uint64(48))


@inlined
def _append(words: Any, i: Any, table: Any, held: Any, n: Any) -> Any:
    """Put a code above those held, which lie at the top of 64 bits; `n` counts them in its low 6 bits.

    What the entry leaves in the low bits falls out with the next code.
    """
    entry = table[words[i]]
    return (held >> (entry & np.uint64(63))) | entry, n + entry


@inlined
def _append4(words: Any, i: Any, table: Any, held: Any, n: Any, out: Any, o: Any) -> Any:
    """Append four codes, at most 56 bits to the 7 held, and store the whole bytes."""
    low = np.uint64(63)
    held, n = _append(words, i, table, held, n)
    held, n = _append(words, i + np.uint64(1), table, held, n)
    held, n = _append(words, i + np.uint64(2), table, held, n)
    # The fourth code may bring the codes down to bit 1: nothing of an entry's length may lie there.
    entry = table[words[i + np.uint64(3)]]
    held = ((held & ~low) >> (entry & low)) | (entry & ~low)
    n = (n + entry) & low
    store_u64(out, o, held >> ((np.uint64(0) - n) & low))
    return held, n & np.uint64(7), o + (n >> np.uint64(3))


@inlined
def _append_rest(words: Any, i: Any, table: Any, held: Any, n: Any, out: Any, o: Any) -> Any:
    """Append the last codes of a stream; return the byte after its end."""
    low = np.uint64(63)
    for k in range(i, words.size):
        held, n = _append(words, np.uint64(k), table, held, n)
        held &= ~low
        n &= low
        store_u64(out, o, held >> ((np.uint64(0) - n) & low))
        o += n >> np.uint64(3)
        n &= np.uint64(7)
    return o + np.uint64(1) if n > np.uint64(0) else o


@kernel("out", "scratch", "sizes")
def encode_block(
    words: NDArray[Any],
    table: NDArray[np.uint64],
    out: NDArray[np.uint8],
    scratch: NDArray[np.uint8],
    sizes: NDArray[Any],
) -> int:
    """Write the streams of one block to `out`, one after the other; return their bytes.

    Parameters
    ----------
    words : Words, shape (n,)
        One block. With 4 `sizes`, stream k has the words from ``k * ceil(n / 4)`` on.
    table : uint64 array
        Of `encoding_table`.
    out : uint8 array
        Has room for all of it.
    scratch : uint8 array, shape (STREAMS * (2 * ceil(n / len(sizes)) + 16),)
    sizes : integer array, shape (4,) or (1,)
        Set to the bytes of each stream.
    """
    n_words = words.size
    zero = np.uint64(0)
    step = (n_words + sizes.size - 1) // sizes.size
    area = np.uint64(2 * step + 16)
    if sizes.size == STREAMS:
        b, c, d = step, 2 * step, 3 * step
        oa, ob, oc, od = zero, area, area * np.uint64(2), area * np.uint64(3)
        ha, hb, hc, hd = zero, zero, zero, zero
        na, nb, nc, nd = zero, zero, zero, zero
        wa, wb, wc, wd = words[:b], words[b:c], words[c:d], words[d:]
        for k in range(0, wd.size - 3, 4):
            i = np.uint64(k)
            ha, na, oa = _append4(wa, i, table, ha, na, scratch, oa)
            hb, nb, ob = _append4(wb, i, table, hb, nb, scratch, ob)
            hc, nc, oc = _append4(wc, i, table, hc, nc, scratch, oc)
            hd, nd, od = _append4(wd, i, table, hd, nd, scratch, od)
        done = wd.size & ~3
        sizes[0] = _append_rest(wa, done, table, ha, na, scratch, oa)
        sizes[1] = _append_rest(wb, done, table, hb, nb, scratch, ob) - area
        sizes[2] = _append_rest(wc, done, table, hc, nc, scratch, oc) - area * np.uint64(2)
        sizes[3] = _append_rest(wd, done, table, hd, nd, scratch, od) - area * np.uint64(3)
    else:
        sizes[0] = _append_rest(words, 0, table, zero, zero, scratch, zero)
    end = 0
    for k in range(sizes.size):
        size = np.int64(sizes[k])
        start = k * np.int64(area)
        copy_bytes(out, end, scratch, start, size)
        end += size
    return end


@inlined
def _one(payload: Any, bit: Any, single: Any) -> Any:
    """Decode one word; return it and the bit after it."""
    entry = np.int64(single[peek(payload, np.int64(bit)) & np.uint64(single.size - 1)])
    return entry >> 8, bit + np.uint64(entry & 255)


@inlined
def _open(payload: Any, bit: Any, o: Any) -> Any:
    """Return the next bits of a stream, 57 or more, and what counts: bytes written, above 8 bits for the bits taken."""
    return load_u64(payload, bit >> np.uint64(3)) >> (bit & np.uint64(7)), o << np.uint64(8)


@inlined
def _look_up(bits: Any, at: Any, many: Any, mask: Any, out: Any) -> Any:
    """Decode the whole codes of a look-up; return the bits after them, the count, and 0 where there was none."""
    entry = many[bits & mask]
    store_u64(out, at >> np.uint64(8), entry)
    step = entry >> np.uint64(48)
    return bits >> (step & np.uint64(63)), at + step, step


@inlined
def _close(bit: Any, at: Any) -> Any:
    """Return the bit and the byte reached."""
    return bit + (at & np.uint64(255)), at >> np.uint64(8)


@inlined
def _rounds(payload: Any, bit: Any, o: Any, end: Any) -> Any:
    """Return how often `_many` and `_longer` can certainly run before they leave the payload or the stream's words."""
    bytes_left = payload.size - 8 - np.int64(bit >> np.uint64(3))
    room = end - _ROUND_OUT - np.int64(o)
    return min(bytes_left // _ROUND_IN + 1, room // _ROUND_OUT + 1) if bytes_left >= 0 and room >= 0 else 0


@inlined
def _longer(payload: Any, bit: Any, single: Any, words: Any, o: Any) -> Any:
    """Decode the code that stopped `_many`."""
    word, bit = _one(payload, bit, single)
    words[np.int64(o) // item_bytes(words)] = word
    return bit, o + np.uint64(item_bytes(words))


@inlined
def _is_end(payload: Any, bit: Any, end_byte: Any) -> Any:
    """Whether a stream that was read to `bit` ends with its last byte, in zeros."""
    stop = np.uint64(8 * end_byte)
    if bit > stop or stop - bit > np.uint64(7):
        return False
    return peek(payload, np.int64(bit)) & ((np.uint64(1) << (stop - bit)) - np.uint64(1)) == np.uint64(0)


@inlined
def _finish(
    payload: Any,
    bit: Any,
    end_byte: Any,
    many: Any,
    single: Any,
    out: Any,
    words: Any,
    o: Any,
    end: Any,
) -> Any:
    """Decode the rest of a stream; return 0, or -1 unless it ends where it should, with zero bits."""
    word_bytes, mask = item_bytes(words), np.uint64(many.size - 1)
    while True:
        rounds = _rounds(payload, bit, o, end)
        if not rounds:
            break
        for _ in range(rounds):
            bits, at = _open(payload, bit, o)
            step = np.uint64(0)
            for _ in range(_LOOKUPS):
                bits, at, step = _look_up(bits, at, many, mask, out)
            bit, o = _close(bit, at)
            if not step:
                bit, o = _longer(payload, bit, single, words, o)
    stop = np.uint64(8 * end_byte)
    i = np.int64(o) // word_bytes
    while i < end // word_bytes and bit < stop:
        words[i], bit = _one(payload, bit, single)
        i += 1
    return 0 if i == end // word_bytes and _is_end(payload, bit, end_byte) else -1


@kernel("out", "words")
def decode_block(
    payload: NDArray[np.uint8],
    starts: NDArray[np.int64],
    many: NDArray[np.uint64],
    single: NDArray[np.uint32],
    out: NDArray[np.uint8],
    words: NDArray[Any],
) -> int:
    """Decode one block; return 0, or -1 where the streams cannot be those of a block of this size.

    Parameters
    ----------
    payload : uint8 array
        Holds the streams; nothing outside it is read.
    starts : int64 array, shape (5,) or (2,)
        Byte where each stream starts and where the last one ends, ascending, all inside `payload`.
    many, single
        Of `decoding_tables`.
    out, words : uint8 array and Words of the same memory
        The block; all of it is written on success, nothing outside it ever.
    """
    if starts.size != STREAMS + 1:
        return _finish(payload, np.uint64(8 * starts[0]), starts[1], many, single, out, words, np.uint64(0), out.size)
    word_bytes, mask = item_bytes(words), np.uint64(many.size - 1)
    step = (words.size + STREAMS - 1) // STREAMS * word_bytes
    pa, pb, pc, pd = (
        np.uint64(8 * starts[0]),
        np.uint64(8 * starts[1]),
        np.uint64(8 * starts[2]),
        np.uint64(8 * starts[3]),
    )
    oa, ob, oc, od = np.uint64(0), np.uint64(step), np.uint64(2 * step), np.uint64(3 * step)
    while True:
        # As many rounds as every stream has room for: no other check is needed inside.
        rounds = min(
            _rounds(payload, pa, oa, step),
            _rounds(payload, pb, ob, 2 * step),
            _rounds(payload, pc, oc, 3 * step),
            _rounds(payload, pd, od, out.size),
        )
        if not rounds:
            break
        for _ in range(rounds):
            # By turns, so that a CPU that looks some hundred steps ahead has all four streams before it.
            xa, ta = _open(payload, pa, oa)
            xb, tb = _open(payload, pb, ob)
            xc, tc = _open(payload, pc, oc)
            xd, td = _open(payload, pd, od)
            sa = sb = sc = sd = np.uint64(0)
            for _ in range(_LOOKUPS):
                xa, ta, sa = _look_up(xa, ta, many, mask, out)
                xb, tb, sb = _look_up(xb, tb, many, mask, out)
                xc, tc, sc = _look_up(xc, tc, many, mask, out)
                xd, td, sd = _look_up(xd, td, many, mask, out)
            pa, oa = _close(pa, ta)
            pb, ob = _close(pb, tb)
            pc, oc = _close(pc, tc)
            pd, od = _close(pd, td)
            if not sa:
                pa, oa = _longer(payload, pa, single, words, oa)
            if not sb:
                pb, ob = _longer(payload, pb, single, words, ob)
            if not sc:
                pc, oc = _longer(payload, pc, single, words, oc)
            if not sd:
                pd, od = _longer(payload, pd, single, words, od)
    bits, ends = (pa, pb, pc, pd), (oa, ob, oc, od)
    status = 0
    for k in range(STREAMS):
        end = min((k + 1) * step, out.size)
        status |= _finish(payload, bits[k], starts[k + 1], many, single, out, words, ends[k], end)
    return status


@inlined
def _four(payload: Any, bit: Any, single: Any, words: Any, i: Any) -> Any:
    """Decode four words, at most 56 bits; return the bit after them."""
    mask, low, eight = np.uint64(single.size - 1), np.uint64(63), np.uint64(8)
    bits = load_u64(payload, bit >> np.uint64(3)) >> (bit & np.uint64(7))
    a = np.uint64(single[bits & mask])
    bits >>= a & low
    b = np.uint64(single[bits & mask])
    bits >>= b & low
    c = np.uint64(single[bits & mask])
    bits >>= c & low
    d = np.uint64(single[bits & mask])
    words[i] = a >> eight
    words[i + np.uint64(1)] = b >> eight
    words[i + np.uint64(2)] = c >> eight
    words[i + np.uint64(3)] = d >> eight
    return bit + ((a + b + c + d) & np.uint64(255))


@inlined
def _fours(payload: Any, bit: Any, n_words: Any) -> Any:
    """Return how often `_four` can certainly run before it leaves the payload or the words."""
    bytes_left = payload.size - 8 - np.int64(bit >> np.uint64(3))
    return min(bytes_left // 7 + 1, n_words >> 2) if bytes_left >= 0 else 0


@inlined
def _singles(payload: Any, bit: Any, end_byte: Any, single: Any, words: Any, done: Any) -> Any:
    """Decode the words of a stream from `done` on; return whether it ends where it should."""
    i = done
    while True:
        rounds = _fours(payload, bit, words.size - i)
        if not rounds:
            break
        for _ in range(rounds):
            bit = _four(payload, bit, single, words, np.uint64(i))
            i += 4
    stop = np.uint64(8 * end_byte)
    while i < words.size and bit < stop:
        words[i], bit = _one(payload, bit, single)
        i += 1
    return i == words.size and _is_end(payload, bit, end_byte)


@kernel("words")
def decode_singles(
    payload: NDArray[np.uint8], starts: NDArray[np.int64], single: NDArray[np.uint32], words: NDArray[Any]
) -> int:
    """As `decode_block`, word by word: for small blocks, which take less time than its table of many.

    `single` is that of `single_table`, shape (2**longest,), where `longest` is the longest code.
    """
    if starts.size != STREAMS + 1:
        return 0 if _singles(payload, np.uint64(8 * starts[0]), starts[1], single, words, 0) else -1
    b = (words.size + STREAMS - 1) // STREAMS
    c, d = 2 * b, 3 * b
    wa, wb, wc, wd = words[:b], words[b:c], words[c:d], words[d:]
    pa, pb, pc, pd = (
        np.uint64(8 * starts[0]),
        np.uint64(8 * starts[1]),
        np.uint64(8 * starts[2]),
        np.uint64(8 * starts[3]),
    )
    i = 0
    while True:
        rounds = min(
            _fours(payload, pa, wd.size - i),
            _fours(payload, pb, wd.size - i),
            _fours(payload, pc, wd.size - i),
            _fours(payload, pd, wd.size - i),
        )
        if not rounds:
            break
        for _ in range(rounds):
            at = np.uint64(i)
            pa = _four(payload, pa, single, wa, at)
            pb = _four(payload, pb, single, wb, at)
            pc = _four(payload, pc, single, wc, at)
            pd = _four(payload, pd, single, wd, at)
            i += 4
    good = _singles(payload, pa, starts[1], single, wa, i)
    good &= _singles(payload, pb, starts[2], single, wb, i)
    good &= _singles(payload, pc, starts[3], single, wc, i)
    good &= _singles(payload, pd, starts[4], single, wd, i)
    return 0 if good else -1
