"""Coding by a fixed codebook: blocks of Huffman streams with escapes, and the planes of words.

A block is, after a varint m:

=======  ==========================================================================================
m        what follows
=======  ==========================================================================================
0        the words as they are, with as many bits as they have, the first one lowest
1        one word: all are equal
2 + e    the bytes of each stream as varints, the streams (`operators.kernels.huffman`), e escaped words
=======  ==========================================================================================

Words that the book has no code for are contiguous, modulo the alphabet, so one comparison tells them.
"""

# mypy: disable-error-code="no-any-return, return-value"
from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS
from operators.kernels.bits import pack_any, unpack_any
from operators.kernels.huffman import SPLIT_WORDS, STREAMS, decode_block, encode_block
from operators.kernels.jit import inlined, kernel
from operators.kernels.memory import copy_bytes, item_bytes
from operators.kernels.varints import put_varint, take_varint

HEAD_BYTES: Final = 20
"""Most bytes of a block before its streams: five varints of at most 2**18."""
CHUNK: Final = 256
"""Words that are looked at together for escapes."""
STREAM_BYTES: Final = 2
"""Most bytes that a word takes in a stream."""


@inlined
def _gather_escapes(words: Any, first: Any, span: Any, mask: Any, escapes: Any) -> Any:
    """Set `escapes` to the words outside ``first .. first + span - 1``; return their number."""
    n = 0
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        found = np.uint32(0)
        for i in range(chunk.size):
            found += np.uint32(((np.uint32(chunk[i]) - np.uint32(first)) & np.uint32(mask)) >= np.uint32(span))
        if found:
            for i in range(chunk.size):
                if ((np.int64(chunk[i]) - first) & mask) >= span:
                    escapes[n] = chunk[i]
                    n += 1
    return n


@inlined
def _all_equal(words: Any) -> Any:
    for i in range(words.size):
        if words[i] != words[0]:
            return False
    return True


@inlined
def _width_of(mask: Any) -> Any:
    width = np.int64(0)
    while mask >> width:
        width += 1
    return width


@kernel("streams", "scratch", "escapes", "out")
def encode_words(
    words: NDArray[Any],
    data: NDArray[np.uint8],
    table: NDArray[np.uint64],
    first: int,
    span: int,
    mask: int,
    streams: NDArray[np.uint8],
    scratch: NDArray[np.uint8],
    escapes: NDArray[Any],
    out: NDArray[np.uint8],
) -> int:
    """Code all words; return the bytes written.

    Parameters
    ----------
    words, data : Words of 8 or 16 bits, shape (n,), and uint8 array of the same memory
    table : uint64 array, shape (mask + 1,)
        Of `operators.kernels.huffman.encoding_table`; words without a code have that of the escape.
    first, span, mask : int
        Words ``first`` to ``first + span - 1``, modulo ``mask + 1``, have codes of their own.
    streams, scratch : uint8 arrays
        Of `STREAM_BYTES` for each word of a block, and 64 more.
    escapes : array like words, shape (words of a block,)
    out : uint8 array
        Has room for the bits of the words, and `HEAD_BYTES` for each block.
    """
    item = item_bytes(words)
    width = _width_of(mask)
    end = 0
    for start in range(0, words.size, BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        n_bytes = (block.size * width + 7) >> 3
        if _all_equal(block):
            out[end] = 1
            copy_bytes(out, end + 1, data, start * item, item)
            end += 1 + item
            continue
        n_escapes = _gather_escapes(block, first, span, mask, escapes)
        if 8 * n_escapes < block.size:
            sizes = np.zeros(STREAMS if block.size >= SPLIT_WORDS else 1, np.int64)
            n_coded = encode_block(block, table, streams, scratch, sizes)
            at = put_varint(out, end, np.int64(2 + n_escapes))
            for k in range(sizes.size):
                at = put_varint(out, at, sizes[k])
            if at - end + n_coded + n_escapes * item <= n_bytes:
                copy_bytes(out, at, streams, 0, n_coded)
                at += n_coded
                for i in range(n_escapes):
                    out[at] = np.int64(escapes[i]) & 255
                    if item == 2:
                        out[at + 1] = np.int64(escapes[i]) >> 8
                    at += item
                end = at
                continue
        out[end] = 0
        if width == 8:
            copy_bytes(out, end + 1, data, start, n_bytes)
        else:
            pack_any(block, width, 0, out[end + 1 : end + 1 + n_bytes])
        end += 1 + n_bytes
    return end


@inlined
def _restore_escapes(
    block: Any, blank: Any, payload: Any, at: Any, n_escapes: Any, first: Any, span: Any, mask: Any
) -> Any:
    """Replace each `blank` by the next escaped word; return 0, or -1 unless there are `n_escapes` without codes."""
    n = 0
    for start in range(0, block.size, CHUNK):
        chunk = block[start : start + CHUNK]
        found = np.uint32(0)
        for i in range(chunk.size):
            found += np.uint32(np.int64(chunk[i]) == blank)
        if found:
            if n + np.int64(found) > n_escapes:
                return -1
            for i in range(chunk.size):
                if np.int64(chunk[i]) == blank:
                    word = np.int64(payload[at])
                    if item_bytes(block) == 2:
                        word |= np.int64(payload[at + 1]) << 8
                    if word > mask or ((word - first) & mask) < span:
                        return -1
                    chunk[i] = word
                    at += item_bytes(block)
                    n += 1
    return 0 if n == n_escapes else -1


@kernel("out", "words")
def decode_words(
    payload: NDArray[np.uint8],
    many: NDArray[np.uint64],
    single: NDArray[np.uint32],
    blank: int,
    first: int,
    span: int,
    mask: int,
    out: NDArray[np.uint8],
    words: NDArray[Any],
) -> int:
    """Inverse of `encode_words`; return the bytes read, or -1 where they are none of that.

    Parameters
    ----------
    payload : uint8 array
        May be longer; nothing outside it is read.
    many, single
        Of `operators.kernels.huffman.decoding_tables`; the escape decodes to `blank`, a word without a code.
    first, span, mask : int
    out, words : uint8 array and Words of the same memory
    """
    item = item_bytes(words)
    width = _width_of(mask)
    at = np.int64(0)
    for start in range(0, words.size, BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        begin, n_bytes = start * item, block.size * item
        head, at = take_varint(payload, at)
        if head < 0 or head - 2 > block.size:
            return -1
        if head < 2:
            n_raw = item if head else (block.size * width + 7) >> 3
            if payload.size - at < n_raw:
                return -1
            if head:
                copy_bytes(out, begin, payload, at, item)
                if np.int64(words[start]) > mask:
                    return -1
                for i in range(block.size):
                    block[i] = words[start]
            elif width == 8:
                copy_bytes(out, begin, payload, at, n_raw)
            else:
                unpack_any(payload[at : at + n_raw], width, 0, block)
                n_used = (block.size * width) & 7
                if n_used and np.int64(payload[at + n_raw - 1]) >> n_used:
                    return -1
            at += n_raw
            continue
        n_streams = STREAMS if block.size >= SPLIT_WORDS else 1
        starts = np.empty(n_streams + 1, np.int64)
        total = np.int64(0)
        for k in range(n_streams):
            size, at = take_varint(payload, at)
            if size < 0:
                return -1
            starts[k] = total
            total += size
        for k in range(n_streams):
            starts[k] += at
        starts[n_streams] = at + total
        at = starts[n_streams]
        if at + (head - 2) * item > payload.size:
            return -1
        if decode_block(payload, starts, many, single, out[begin : begin + n_bytes], block):
            return -1
        if _restore_escapes(block, blank, payload, at, head - 2, first, span, mask):
            return -1
        at += (head - 2) * item
    return at


# -- words and the byte that is coded -------------------------------------------------------------------


@kernel("coded", "rest")
def split_top(words: NDArray[Any], rotate: int, coded: NDArray[np.uint8], rest: NDArray[Any]) -> None:
    """Rotate words of 16 bits left; write their upper bytes to `coded`, the lower ones to `rest`, a uint8 array."""
    left, right = np.uint16(rotate), np.uint16(16 - rotate)
    for i in range(words.size):
        word = np.uint16(words[i] << left) | np.uint16(words[i] >> right)
        coded[i] = np.uint8(word >> np.uint16(8))
        rest[i] = np.uint8(word & np.uint16(255))


@kernel("words")
def join_top(coded: NDArray[np.uint8], rest: NDArray[Any], rotate: int, words: NDArray[Any]) -> None:
    """Inverse of `split_top`."""
    left, right = np.uint16(16 - rotate), np.uint16(rotate)
    for i in range(words.size):
        word = np.uint16(np.uint16(coded[i]) << np.uint16(8)) | np.uint16(rest[i])
        words[i] = np.uint16(word >> right) | np.uint16(word << left)


@kernel("coded", "rest", "low")
def split_top_wide(
    words: NDArray[np.uint32], rotate: int, coded: NDArray[np.uint8], rest: NDArray[np.uint8], low: NDArray[np.uint16]
) -> None:
    """Rotate words of 32 bits left; write their highest bytes, the next ones, and the lower halves."""
    left, right = np.uint32(rotate), np.uint32(32 - rotate)
    for i in range(words.size):
        word = np.uint32(words[i] << left) | np.uint32(words[i] >> right)
        coded[i] = np.uint8(word >> np.uint32(24))
        rest[i] = np.uint8((word >> np.uint32(16)) & np.uint32(255))
        low[i] = np.uint16(word & np.uint32(0xFFFF))


@kernel("words")
def join_top_wide(
    coded: NDArray[np.uint8], rest: NDArray[np.uint8], low: NDArray[np.uint16], rotate: int, words: NDArray[np.uint32]
) -> None:
    """Inverse of `split_top_wide`."""
    left, right = np.uint32(32 - rotate), np.uint32(rotate)
    for i in range(words.size):
        word = (
            np.uint32(np.uint32(coded[i]) << np.uint32(24))
            | np.uint32(np.uint32(rest[i]) << np.uint32(16))
            | np.uint32(low[i])
        )
        words[i] = np.uint32(word >> right) | np.uint32(word << left)


@kernel("out")
def rotate_bytes(data: NDArray[np.uint8], rotate: int, out: NDArray[np.uint8]) -> None:
    """Rotate every byte left."""
    left, right = np.uint8(rotate), np.uint8(8 - rotate)
    for i in range(data.size):
        out[i] = np.uint8(data[i] << left) | np.uint8(data[i] >> right) if rotate else data[i]
