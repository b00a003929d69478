"""LZ77 with long-distance matching: zstandard."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import zstandard
from numpy.typing import NDArray

from operators.base import Encoding, Plan, Profile, Source, Stream, Writer
from operators.errors import FormatError
from operators.kernels.histogram import histogram
from operators.literals.frames import MAX_WINDOW_LOG, check_frame
from operators.literals.tables import log2_q16
from operators.words import Bytes, Words, mask_of

TRIAL_BYTES = 16 << 10
"""Bytes that are tried first; then the first block decides whether the rest is worth trying."""
TRIAL_GAIN = 32
"""LZ has to save one part in this many of what coding words, or planes of bytes, by their frequencies takes."""
_TRIAL_LEVEL = 1
_LEVELS = ((2 << 20, 19), (1 << 62, 12))
"""Level of literals up to so many bytes. As the parts above, revisions of the writer may change them."""
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
        if not self._tried and words.size:
            self._tried = True
            start = words[: TRIAL_BYTES // words.itemsize]
            width_bits = self._stream.width_bits
            if self._always or (_is_worth_while(start, width_bits) and _is_worth_while(words, width_bits)):
                self._compressor = _compressor(self._stream.n_bytes).compressobj(size=self._stream.n_bytes)
        if self._compressor is not None:
            self._parts.append(self._compressor.compress(words.view(np.uint8).data))
            self._made_bytes += len(self._parts[-1])
            # The first block was no example of the rest: stop before noise takes seconds. What was made lags
            # behind what was taken by a block.
            if not self._always and self._made_bytes > self._most_bytes > 0:
                self._compressor = None
            self._most_bytes += _most_bytes(words, self._stream.width_bits)

    def finish(self) -> bytes | None:
        """Return the payload, or None."""
        return b"".join((*self._parts, self._compressor.flush())) if self._compressor is not None else None


def _is_worth_while(words: Words, width_bits: int) -> bool:
    made = zstandard.ZstdCompressor(level=_TRIAL_LEVEL).compress(words.view(np.uint8).data)
    return len(made) < _most_bytes(words, width_bits)


def _most_bytes(words: Words, width_bits: int) -> int:
    """Return what LZ may take of `words`."""
    planes = [words]
    if width_bits > 16:
        width_bits = 8
        bytes_of_words = words.view(np.uint8).reshape(-1, words.itemsize)
        planes = [np.ascontiguousarray(bytes_of_words[:, k]) for k in range(words.itemsize)]
    log_total = int(log2_q16(np.array([words.size]))[0])
    bits_q16 = 0
    for plane in planes:
        counts = histogram(plane, width_bits)
        live = counts[counts > 0]
        bits_q16 += words.size * log_total - int(live @ log2_q16(live))
    order_0_bytes = bits_q16 >> 19
    return order_0_bytes - order_0_bytes // TRIAL_GAIN


def _compressor(n_bytes: int) -> zstandard.ZstdCompressor:
    level = next(level for most, level in _LEVELS if n_bytes <= most)
    window_log = min(max((n_bytes - 1).bit_length(), 10), MAX_WINDOW_LOG)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=n_bytes,
        window_log=window_log,
        enable_ldm=window_log > 20,
        write_content_size=True,
        write_checksum=False,
        write_dict_id=False,
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


class _Source(Source):
    def __init__(self, payload: memoryview, stream: Stream) -> None:
        self._left = stream.n_bytes
        self._largest = mask_of(stream.width_bits)
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << MAX_WINDOW_LOG)
        self._reader = decompressor.stream_reader(payload, read_size=_READ_BYTES)

    def read(self, out: Words) -> None:
        if out.nbytes > self._left:
            raise FormatError(f"a read of at most {self._left} bytes", str(out.nbytes))
        self._left -= out.nbytes
        target = out.view(np.uint8).data
        try:
            done = 0
            while done < out.nbytes:
                n_bytes = self._reader.readinto(target[done:])
                if not n_bytes:
                    raise FormatError(f"{self._left + out.nbytes - done} more bytes", "the end", "zstandard frame")
                done += n_bytes
            if not self._left and self._reader.read(1):
                raise FormatError("the end of the words", "more of them", "zstandard frame")
        except zstandard.ZstdError as error:
            raise FormatError("a zstandard frame", str(error), "literal") from error
        if out.size and int(out.max()) > self._largest:
            raise FormatError(f"words up to {self._largest}", str(out.max()), "literal")


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
