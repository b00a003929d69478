"""LZ77 with long-distance matching: zstandard."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import zstandard
from numpy.typing import NDArray

from operators.base import Encoding, Plan, Profile, Source, Stream, Writer
from operators.errors import FormatError
from operators.kernels.order0 import order_0_q16
from operators.literals.frames import MAX_WINDOW_LOG, check_frame
from operators.words import Bytes, Words, mask_of

TRIAL_BYTES = 16 << 10
"""Bytes that are tried first: they decide whether the rest is worth trying."""
TRIAL_GAIN = 32
"""LZ has to save one part in this many of what coding words, or planes of bytes, by their frequencies takes."""
_TRIAL_LEVEL = 1
_COUNTED_BITS = 16
"""Words of up to so many bits are counted, wider ones byte by byte."""
_FAST = {"strategy": zstandard.STRATEGY_DFAST, "hash_log": 17, "chain_log": 17}
_FAIR = {"strategy": zstandard.STRATEGY_LAZY2, "hash_log": 16, "chain_log": 16, "search_log": 6, "target_length": 16}
_BEST = {
    "strategy": zstandard.STRATEGY_BTOPT, "hash_log": 13, "chain_log": 14, "search_log": 3, "target_length": 16,
    "min_match": 3,
}  # fmt: skip
_KINDS = ((4 << 10, _BEST), (32 << 10, _FAIR), (2 << 20, _FAST), (1 << 62, {**_FAST, "enable_ldm": 1}))
"""How literals of up to so many bytes are searched, the largest for long matches far apart too.

Measured on what LZ wins of real checkpoints: 80 ns a byte for the smallest, then 20 ns, 8 ns for others, which take 3
to 8 % fewer bytes with the next better strategies and 4 to 10 times as long. As the parts above, revisions of the
writer may change them.
"""
_LONG_MATCH = 7
"""Bytes of the shortest match in large literals of single bytes. Weights repeat a few of them by chance, and to say
where takes more than to code them: with matches of 4 bytes the same literals take 4 % more, and 3 times as long."""
_MOST_FAIR_BYTES = 8 << 10
"""More single bytes are large: planes of 12 to 32 KiB take 2 to 12 % less by long matches alone, and an eighth of the
time. Text of as many bytes, such as headers, takes 14 % more."""
_READ_BYTES = 128 << 10


class LzTrial:
    """Makes the payload while the literal is profiled, if a trial on its first bytes makes it worth while.

    Parameters
    ----------
    stream : Stream
        Type of the literal.
    always : bool
        Make it whatever it takes.
    """

    def __init__(self, stream: Stream, *, always: bool = False) -> None:
        self._stream = stream
        self._always = always
        self._compressor: zstandard.ZstdCompressionObj | None = None
        self._tried = False
        self._made_bytes = 0
        self._most_bytes = 0
        self._parts: list[bytes] = []

    def add(self, words: Words) -> None:
        """Compress the next words; `words` is not kept."""
        data = words.view(np.uint8).data
        if not self._tried and words.size:
            self._tried = True
            start = words[: TRIAL_BYTES // words.itemsize]
            if not self._always and not _is_worth_while(start, self._stream.width_bits):
                return
            n_bytes = self._stream.n_bytes
            if words.size == self._stream.n_words:
                self._parts.append(compressor_of(self._stream).compress(data))
                return
            self._compressor = _new_compressor(self._stream).compressobj(size=n_bytes)  # other literals come between
        if self._compressor is not None:
            self._parts.append(self._compressor.compress(data))
            if self._always:
                return
            self._made_bytes += len(self._parts[-1])
            # The first block was no example of the rest: stop before noise takes seconds. What was made lags
            # behind what was taken by a block.
            if self._made_bytes > self._most_bytes > 0:
                self._compressor = None
                self._parts.clear()
            self._most_bytes += _most_bytes(words, self._stream.width_bits)

    def finish(self) -> bytes | None:
        """Return the payload, or None."""
        if self._compressor is not None:
            self._parts.append(self._compressor.flush())
        return b"".join(self._parts) or None


def _is_worth_while(words: Words, width_bits: int) -> bool:
    n_bytes = len(_COMPRESSORS.trial.compress(words.view(np.uint8).data))
    # Words of frequencies that differ take fewer bytes than packed ones: not to be counted for noise.
    return 8 * n_bytes < words.size * width_bits and n_bytes < _most_bytes(words, width_bits)


def _most_bytes(words: Words, width_bits: int) -> int:
    """Return what LZ may take of `words`."""
    counted, n_planes = (words, 1) if width_bits <= _COUNTED_BITS else (words.view(np.uint8), words.itemsize)
    order_0_bytes = order_0_q16(counted, n_planes) >> 19
    return order_0_bytes - order_0_bytes // TRIAL_GAIN


class _Compressors(threading.local):
    """Those of a thread: costly to make, and not to be shared. What one writes does not depend on what it wrote."""

    def __init__(self) -> None:
        self.trial = zstandard.ZstdCompressor(level=_TRIAL_LEVEL)
        self.of_kinds: dict[tuple[int, bool], zstandard.ZstdCompressor] = {}


_COMPRESSORS = _Compressors()


def _kind_of(stream: Stream) -> tuple[int, bool]:
    """Return the most bytes of literals that are searched as `stream` is, and whether for long matches alone."""
    is_bytes = stream.width_bits <= 8
    is_large = is_bytes and stream.n_bytes > _MOST_FAIR_BYTES
    most = next(most for most, kind in _KINDS if stream.n_bytes <= most and not (is_large and kind is _FAIR))
    return most, is_bytes


def compressor_of(stream: Stream) -> zstandard.ZstdCompressor:
    """Return the compressor of this thread for literals like `stream`. One literal at a time: it has one state."""
    kind = _kind_of(stream)
    compressor = _COMPRESSORS.of_kinds.get(kind)
    if compressor is None:
        compressor = _COMPRESSORS.of_kinds[kind] = _new_compressor(stream)
    return compressor


def _new_compressor(stream: Stream) -> zstandard.ZstdCompressor:
    """Return a compressor that makes its window and tables as small as the literal allows.

    Matches have four bytes and more, but in the smallest: words of 32 bits that repeat one at a time are worth finding.
    """
    most, is_bytes = _kind_of(stream)
    kind = dict(_KINDS)[most]
    min_match = _LONG_MATCH if kind is _FAST and is_bytes else 4
    parameters = zstandard.ZstdCompressionParameters(
        window_log=MAX_WINDOW_LOG,
        write_content_size=True,
        write_checksum=False,
        write_dict_id=False,
        **{"min_match": min_match, **kind},
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


@dataclass(frozen=True, slots=True)
class _Plan(Plan):
    payload: bytes = field(repr=False)
    n_bytes: int

    def writer(self, out: NDArray[np.uint8] | None = None) -> Writer:
        if out is not None:
            out[:] = np.frombuffer(self.payload, np.uint8)
        return _Writer(self.payload)


class _Writer(Writer):
    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def add(self, words: Words) -> None:
        """Do nothing: the payload was made in the first pass."""

    def finish(self) -> Bytes:
        return self._payload


def _new_decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=1 << MAX_WINDOW_LOG)


class _Decompressors(threading.local):
    """One for each thread that decodes literals at once: to make one takes longer than to decode a small literal."""

    def __init__(self) -> None:
        self.whole = _new_decompressor()


_DECOMPRESSORS = _Decompressors()


class _Source(Source):
    """Words of a frame that `check_frame` has passed."""

    def __init__(self, payload: memoryview, stream: Stream) -> None:
        self._payload = payload
        self._left = self._n_bytes = stream.n_bytes
        self._largest = mask_of(stream.width_bits)
        self._reader: zstandard.ZstdDecompressionReader | None = None

    def read(self, out: Words) -> None:
        if out.nbytes > self._left:
            raise FormatError(f"a read of at most {self._left} bytes", str(out.nbytes))
        try:
            if out.nbytes == self._n_bytes:
                self._read_whole(out)
            else:
                self._read_next(out)
        except zstandard.ZstdError as error:
            raise FormatError("a zstandard frame", str(error), "literal") from error
        self._left -= out.nbytes
        if out.size and int(out.max()) > self._largest:
            raise FormatError(f"words up to {self._largest}", str(out.max()), "literal")

    def _read_whole(self, out: Words) -> None:
        data = _DECOMPRESSORS.whole.decompress(self._payload)
        if len(data) != out.nbytes:
            raise FormatError(f"{out.nbytes} bytes", str(len(data)), "zstandard frame")
        out.view(np.uint8)[:] = np.frombuffer(data, np.uint8)

    def _read_next(self, out: Words) -> None:
        if self._reader is None:
            self._reader = _new_decompressor().stream_reader(self._payload, read_size=_READ_BYTES)
        target, done = out.view(np.uint8).data, 0
        while done < out.nbytes:
            n_bytes = self._reader.readinto(target[done:])
            if not n_bytes:
                raise FormatError(f"{self._left - done} more bytes", "the end", "zstandard frame")
            done += n_bytes
        if done == self._left and self._reader.read(1):
            raise FormatError("the end of the words", "more of them", "zstandard frame")


class Lz(Encoding):
    """Words of any width by zstandard.

    Payload: one zstandard frame (RFC 8878) of the little-endian words, each in the smallest container of 8,
    16, 32 or 64 bits. The frame states its content size, which is that of the words; it has no checksum, no
    dictionary, a window of at most 2**27 bytes, and ends with the payload. The bits of a container beyond
    the word are zero.
    """

    code = 68
    name = "lz"

    def plan(self, profile: Profile) -> Plan | None:
        payload = profile.lz_payload
        return None if payload is None else _Plan(payload, len(payload))

    def source(self, payload: memoryview, stream: Stream) -> Source:
        check_frame(payload, stream.n_bytes)
        return _Source(payload, stream)

    def scratch_bytes(self, stream: Stream) -> int:
        """The window, which the decoder keeps beside the words."""
        return min(1 << MAX_WINDOW_LOG, stream.n_bytes)
