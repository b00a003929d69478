"""Frames of zstandard in payloads: what is looked at before one is decompressed."""

from __future__ import annotations

import zstandard

from operators.errors import FormatError

MAX_WINDOW_LOG = 27
"""A reader grants 2 to this many bytes of window, and no more than the content has."""
_SINGLE_SEGMENT_FLAG = 32


def check_frame(payload: memoryview, n_bytes: int) -> None:
    """Verify that `payload` is one plain frame that states `n_bytes` of content, before anything is allocated for it.

    Raises
    ------
    FormatError
        It is not.
    """
    try:
        frame = zstandard.get_frame_parameters(payload)
    except (zstandard.ZstdError, ValueError) as error:
        raise FormatError("a zstandard frame", str(error), "literal") from error
    if frame.content_size != n_bytes or not n_bytes:
        raise FormatError(f"a frame of {n_bytes} bytes", str(frame.content_size), "literal")
    if frame.window_size > 1 << MAX_WINDOW_LOG or frame.dict_id or frame.has_checksum:
        raise FormatError("a plain frame and its window", f"window {frame.window_size}", "literal")
    if _frame_bytes(payload) != len(payload):
        raise FormatError("one whole frame", f"{len(payload)} bytes", "literal")


def _frame_bytes(payload: memoryview) -> int:
    """Return the bytes of a frame from the sizes of its blocks, or -1 where they go beyond `payload`."""
    descriptor = payload[4]
    single = descriptor & _SINGLE_SEGMENT_FLAG > 0
    content_size_bytes = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    at = 5 + (0 if single else 1) + content_size_bytes
    last = 0
    while not last:
        if at + 3 > len(payload):
            return -1
        head = int.from_bytes(payload[at : at + 3], "little")
        last, kind, size = head & 1, head >> 1 & 3, head >> 3
        at += 3 + (1 if kind == 1 else size)
    return at
