"""Packing words of any width into bits and back.

Word i takes bits ``i * width`` to ``(i + 1) * width`` of the stream, least significant bit first. Eight
words of `width` bits are `width` bytes, so narrow words go eight at a time through one 64-bit register,
by one instruction or a few shifts; what is left of them, and wide words, go through an accumulator.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import HAS_BIT_GATHER, gather_bits, scatter_bits
from operators.kernels.memory import item_bytes, load_u64, store_u64

_EACH_8 = np.uint64(0x0101010101010101)
_EACH_16 = np.uint64(0x0001000100010001)
_EACH_32 = np.uint64(0x0000000100000001)
_EVEN_8 = np.uint64(0x00FF00FF00FF00FF)
_EVEN_16 = np.uint64(0x0000FFFF0000FFFF)
_EVEN_32 = np.uint64(0x00000000FFFFFFFF)


@inlined
def pack_8(eight: Any, w: Any) -> Any:
    """Return eight words of `w` bits (up to 7), one per byte of `eight`, side by side."""
    if HAS_BIT_GATHER:
        return gather_bits(eight, ((np.uint64(1) << w) - np.uint64(1)) * _EACH_8)
    eight = (eight & _EVEN_8) | ((eight & ~_EVEN_8) >> (np.uint64(8) - w))
    eight = (eight & _EVEN_16) | ((eight & ~_EVEN_16) >> (np.uint64(16) - w - w))
    return (eight & _EVEN_32) | ((eight & ~_EVEN_32) >> (np.uint64(32) - np.uint64(4) * w))


@kernel("out")
def pack_u8(words: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> int:
    """Pack whole groups of 8 words of 1 to 7 bits while 8 bytes of `out` are left; return the words packed."""
    w = np.uint64(width)
    n_groups = 0
    if out.size >= 8:
        n_groups = min(words.size >> 3, (out.size - 8) // width + 1)
    for g in range(n_groups):
        store_u64(out, np.uint64(g * width), pack_8(load_u64(words, np.uint64(g * 8)), w))
    return n_groups * 8


@kernel("out")
def unpack_u8(packed: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> int:
    """Inverse of `pack_u8`: unpack while 8 bytes of `packed` can be read; return the words unpacked."""
    w = np.uint64(width)
    s8, s16, s32 = np.uint64(8) - w, np.uint64(16) - w - w, np.uint64(32) - np.uint64(4) * w
    one = np.uint64(1)
    m32 = (one << (np.uint64(4) * w)) - one
    m16 = ((one << (w + w)) - one) * np.uint64(0x0000000100000001)
    m8 = ((one << w) - one) * np.uint64(0x0001000100010001)
    h32, h16, h8 = m32 << (np.uint64(4) * w), m16 << (w + w), m8 << w
    n_groups = 0
    if packed.size >= 8:
        n_groups = min(out.size >> 3, (packed.size - 8) // width + 1)
    if HAS_BIT_GATHER:
        mask = ((one << w) - one) * _EACH_8
        for g in range(n_groups):
            store_u64(out, np.uint64(g * 8), scatter_bits(load_u64(packed, np.uint64(g * width)), mask))
    else:
        for g in range(n_groups):
            x = load_u64(packed, np.uint64(g * width))
            x = (x & m32) | ((x & h32) << s32)
            x = (x & m16) | ((x & h16) << s16)
            x = (x & m8) | ((x & h8) << s8)
            store_u64(out, np.uint64(g * 8), x)
    return n_groups * 8


@kernel("out")
def pack_u16(words: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> int:
    """As `pack_u8` for words of two bytes and 1 to 15 bits, given as a view of their bytes; 16 bytes at a time."""
    w = np.uint64(width)
    s16, s32, four_w = np.uint64(16) - w, np.uint64(32) - w - w, np.uint64(4) * w
    back = np.uint64(64) - four_w
    n_groups = 0
    if out.size >= 16:
        n_groups = min(words.size >> 4, (out.size - 16) // width + 1)
    mask = ((np.uint64(1) << w) - np.uint64(1)) * _EACH_16
    for g in range(n_groups):
        a = load_u64(words, np.uint64(g * 16))
        b = load_u64(words, np.uint64(g * 16 + 8))
        if HAS_BIT_GATHER:
            a = gather_bits(a, mask)
            b = gather_bits(b, mask)
        else:
            a = (a & _EVEN_16) | ((a & ~_EVEN_16) >> s16)
            b = (b & _EVEN_16) | ((b & ~_EVEN_16) >> s16)
            a = (a & _EVEN_32) | ((a & ~_EVEN_32) >> s32)
            b = (b & _EVEN_32) | ((b & ~_EVEN_32) >> s32)
        store_u64(out, np.uint64(g * width), a | (b << four_w))
        store_u64(out, np.uint64(g * width + 8), b >> back)
    return n_groups * 8


@kernel("out")
def unpack_u16(packed: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> int:
    """Inverse of `pack_u16`; `out` is a view of the bytes of the words."""
    w = np.uint64(width)
    s16, s32, four_w = np.uint64(16) - w, np.uint64(32) - w - w, np.uint64(4) * w
    back = np.uint64(64) - four_w
    one = np.uint64(1)
    m32 = (one << (w + w)) - one
    m16 = ((one << w) - one) * np.uint64(0x0000000100000001)
    h32, h16 = m32 << (w + w), m16 << w
    n_groups = 0
    if packed.size >= 16:
        n_groups = min(out.size >> 4, (packed.size - 16) // width + 1)
    mask = ((one << w) - one) * _EACH_16
    for g in range(n_groups):
        a = load_u64(packed, np.uint64(g * width))
        b = (a >> four_w) | (load_u64(packed, np.uint64(g * width + 8)) << back)
        if HAS_BIT_GATHER:
            a = scatter_bits(a, mask)
            b = scatter_bits(b, mask)
        else:
            a = (a & m32) | ((a & h32) << s32)
            b = (b & m32) | ((b & h32) << s32)
            a = (a & m16) | ((a & h16) << s16)
            b = (b & m16) | ((b & h16) << s16)
        store_u64(out, np.uint64(g * 16), a)
        store_u64(out, np.uint64(g * 16 + 8), b)
    return n_groups * 8


@inlined
def _whole_groups(n_bits: Any, words_per_piece: Any, n_words: Any, n_bytes: Any) -> Any:
    """Return how many words, in groups of 8, go in pieces of `n_bits` that are loaded or stored as 8 bytes."""
    if n_bytes < 8:
        return 0
    # The last of n pieces starts at bit (n - 1) * n_bits.
    n_pieces = (8 * (n_bytes - 8) + 7) // n_bits + 1
    return min(n_words, n_pieces * words_per_piece) & ~7


@kernel("out")
def pack_u32(words: NDArray[Any], width: int, out: NDArray[np.uint8]) -> int:
    """Pack words of up to 28 bits, two at once, while 8 bytes of `out` are left; return the words packed."""
    w, eight = np.uint64(width), np.uint64(8)
    if item_bytes(words) == 4 and width > 16:
        return _pack_eights(words.view(np.uint8), width, out)
    bit, carry = np.uint64(0), np.uint64(0)
    n = _whole_groups(2 * width, 2, words.size, out.size)
    for i in range(0, n, 2):
        piece = np.uint64(words[i]) | (np.uint64(words[i + 1]) << w)
        held = (piece << (bit & np.uint64(7))) | carry
        at = bit >> np.uint64(3)
        store_u64(out, at, held)
        bit += w + w
        carry = held >> (((bit >> np.uint64(3)) - at) * eight)
    return n


@inlined
def _pair(words: Any, at: Any, w: Any) -> Any:
    """Return two words of four bytes from byte `at` on, side by side."""
    two = load_u64(words, at)
    if HAS_BIT_GATHER:
        return gather_bits(two, ((np.uint64(1) << w) - np.uint64(1)) * _EACH_32)
    return (two & _EVEN_32) | ((two >> np.uint64(32)) << w)


@kernel("out")
def _pack_eights(words: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> int:
    """Pack words of 17 to 28 bits in four bytes each, given as a view of these, while 32 bytes of `out` are left.

    Eight words are whole bytes, so that groups of them do not wait for one another.
    """
    w, eight, four = np.uint64(width), np.uint64(8), np.uint64(4)
    w2, word = w + w, np.uint64(64)
    n_groups = min(words.size >> 5, (out.size - 32) // width + 1) if out.size >= 32 else 0
    for g in range(n_groups):
        at, to = np.uint64(32 * g), np.uint64(g * width)
        a, b = _pair(words, at, w), _pair(words, at + eight, w)
        c, d = _pair(words, at + eight + eight, w), _pair(words, at + eight + eight + eight, w)
        store_u64(out, to, a | (b << w2))
        second = (b >> (word - w2)) | (c << (four * w - word))
        if width <= 21:
            store_u64(out, to + eight, second | (d << (w2 * np.uint64(3) - word)))
            store_u64(out, to + eight + eight, d >> (word + word - w2 * np.uint64(3)))
        else:
            store_u64(out, to + eight, second)
            third = (c >> (word + word - four * w)) | (d << (w2 * np.uint64(3) - word - word))
            store_u64(out, to + eight + eight, third)
            store_u64(out, to + eight + eight + eight, d >> (word + word + word - w2 * np.uint64(3)))
    return n_groups << 3


@kernel("out")
def _unpack_eights(packed: NDArray[np.uint8], width: int, out: NDArray[np.uint8]) -> int:
    """Inverse of `_pack_eights`, while 32 bytes of `packed` can be read."""
    w, seven, three, half = np.uint64(width), np.uint64(7), np.uint64(3), np.uint64(32)
    mask = (np.uint64(1) << w) - np.uint64(1)
    n_groups = min(out.size >> 5, (packed.size - 32) // width + 1) if packed.size >= 32 else 0
    for g in range(n_groups):
        for pair in range(4):
            bit = np.uint64(2 * pair) * w
            two = load_u64(packed, np.uint64(g * width) + (bit >> three)) >> (bit & seven)
            store_u64(out, np.uint64(32 * g + 8 * pair), (two & mask) | (((two >> w) & mask) << half))
    return n_groups << 3


@kernel("out")
def unpack_wide(packed: NDArray[np.uint8], width: int, out: NDArray[Any]) -> int:
    """Unpack words of up to 56 bits while 8 bytes of `packed` can be read; return the words unpacked."""
    w, one = np.uint64(width), np.uint64(1)
    if item_bytes(out) == 4 and 16 < width <= 28:
        return _unpack_eights(packed, width, out.view(np.uint8))
    mask = (one << w) - one
    bit = np.uint64(0)
    if width > 28:
        n = _whole_groups(width, 1, out.size, packed.size)
        for i in range(n):
            out[i] = (load_u64(packed, bit >> np.uint64(3)) >> (bit & np.uint64(7))) & mask
            bit += w
        return n
    n = _whole_groups(2 * width, 2, out.size, packed.size)
    for i in range(0, n, 2):
        piece = load_u64(packed, bit >> np.uint64(3)) >> (bit & np.uint64(7))
        out[i] = piece & mask
        out[i + 1] = (piece >> w) & mask
        bit += w + w
    return n


@kernel("out")
def pack_any(words: NDArray[Any], width: int, first: int, out: NDArray[np.uint8]) -> None:
    """Pack `words` from `first` on (a multiple of 8) to the end of `out`; width 1 to 64."""
    w, full = np.uint64(width), np.uint64(64)
    held, n = np.uint64(0), np.uint64(0)
    o = (first >> 3) * width
    for i in range(first, words.size):
        x = np.uint64(words[i])
        held |= x << n
        n += w
        if n >= full:
            store_u64(out, np.uint64(o), held)
            o += 8
            n -= full
            held = x >> (w - n) if n > np.uint64(0) else np.uint64(0)
    while o < out.size:
        out[o] = np.uint8(held & np.uint64(255))
        held >>= np.uint64(8)
        o += 1


@kernel("out")
def unpack_any(packed: NDArray[np.uint8], width: int, first: int, out: NDArray[Any]) -> None:
    """Unpack words from `first` on (a multiple of 8) from `packed`, which holds all bits of `out`; width 1 to 64."""
    w, full, one = np.uint64(width), np.uint64(64), np.uint64(1)
    mask = (((one << (w - one)) - one) << one) | one
    held, n = np.uint64(0), np.uint64(0)
    o = (first >> 3) * width
    for i in range(first, out.size):
        if n < w:
            x = np.uint64(0)
            if o + 8 <= packed.size:
                x = load_u64(packed, np.uint64(o))
            else:
                for k in range(packed.size - o):
                    x |= np.uint64(packed[o + k]) << np.uint64(8 * k)
            o += 8
            word = held | (x << n) if n > np.uint64(0) else x
            taken = w - n
            held = x >> taken if taken < full else np.uint64(0)
            n = full - taken
        else:
            word = held
            held >>= w
            n -= w
        out[i] = word & mask


def packed_bytes(n_words: int, width_bits: int) -> int:
    """Bytes of `n_words` words of `width_bits`."""
    return (n_words * width_bits + 7) >> 3


def pack(words: NDArray[Any], width_bits: int, out: NDArray[np.uint8]) -> None:
    """Pack `words`, each below ``2**width_bits`` (1 to 64), into `out` of `packed_bytes`; the last bits are zero."""
    done = 0
    if width_bits == 8 * words.itemsize:
        out[:] = words.view(np.uint8)
        return
    if words.itemsize == 1:
        done = pack_u8(words, width_bits, out)
    elif words.itemsize == 2:
        done = pack_u16(words.view(np.uint8), width_bits, out)
    elif width_bits <= 28:
        done = pack_u32(words, width_bits, out)
    if done < words.size:
        pack_any(words, width_bits, done, out)


def unpack(packed: NDArray[np.uint8], width_bits: int, out: NDArray[Any]) -> None:
    """Inverse of `pack`; `packed` has the `packed_bytes` of `out`, any bytes decode."""
    done = 0
    if width_bits == 8 * out.itemsize:
        out.view(np.uint8)[:] = packed
        return
    if out.itemsize == 1:
        done = unpack_u8(packed, width_bits, out)
    elif out.itemsize == 2:
        done = unpack_u16(packed, width_bits, out.view(np.uint8))
    elif width_bits <= 56:
        done = unpack_wide(packed, width_bits, out)
    if done < out.size:
        unpack_any(packed, width_bits, done, out)
