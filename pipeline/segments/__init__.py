"""How source files are cut into segments: one module per container format, all sniffed here.

A file is looked at by content and by name. What claims to be safetensors and is not sound is stored as
bytes under a named reason; what never claimed it is stored as bytes without one. Reasons:

==================== =========================================================================
`empty_file`         a .safetensors of no bytes
`empty_weights_file` another weights file of no bytes
`too_short`          fewer than the eight bytes of a header length
`empty_header`       the header length is zero
`header_beyond_file` the header would end after the file
`header_over_limit`  header, number of tensors or rank beyond what is read
`header_syntax`      the header is not JSON
`header_type`        a field of the header is not of the type that it must have
`duplicate_key`      a name occurs twice
`invalid_offsets`    a tensor that ends before it begins, or beyond any file
`size_mismatch`      a range that does not hold what dtype and shape say
`truncated`          tensors beyond the end of the file
`overlap`            two tensors share bytes
`lfs_pointer`        the text that Git LFS keeps in place of a large file
`not_safetensors`    something else under that name
`hole`               bytes between tensors belong to none; still cut by tensors
`trailing_bytes`     bytes after the last tensor; still cut by tensors
`unknown_dtype`      a dtype that is not in the table; still cut by tensors, coded as bytes
==================== =========================================================================
"""

from __future__ import annotations

from operators.errors import PathError
from operators.limits import SEGMENT_BYTES
from pipeline.segments import opaque, safetensors
from pipeline.segments.base import GROUP_BYTES, SMALL_BYTES, Hold, Layout, LayoutError, Read, Segment
from pipeline.segments.header import HEADER_BYTES_MAX, Header, Tensor, tensors_of

__all__ = [
    "GROUP_BYTES",
    "HEAD_BYTES",
    "SEGMENT_BYTES",
    "SMALL_BYTES",
    "Layout",
    "Read",
    "Segment",
    "Tensor",
    "layout_of",
    "tensors_of",
]

HEAD_BYTES = 1 << 10
"""What is looked at first."""
LOOK_BYTES = 64 << 10


def layout_of(read: Read, key: str, n_bytes: int, segment_bytes: int = SEGMENT_BYTES, hold: Hold = tuple) -> Layout:
    """Return how a file is cut, from at most its first bytes and its header.

    Parameters
    ----------
    read : callable
        ``read(offset_bytes, n_bytes)`` of the pinned object.
    key : str
        Its name, for the suffix.
    n_bytes : int
        Its size.
    segment_bytes : int
        Smaller than the constant of the format only in tests; a multiple of 8.
    hold : callable
        Makes a sequence of the segments as they come; there may be millions.

    Raises
    ------
    PathError
        The name is not UTF-8, as a local name may be: no row can hold it.
    StoreError
        From `read`; a fault of the format is a reason, never an error.
    """
    if any("\ud800" <= symbol <= "\udfff" for symbol in key):
        raise PathError("a name in UTF-8", ascii(key)[:200], key, "rename the file")
    claims = key.lower().endswith(".safetensors")
    try:
        if n_bytes == 0:
            _refuse_empty(key, claims)
        if not _worth_a_look(key, n_bytes):
            return opaque.layout(n_bytes, segment_bytes, hold=hold)
        return _look(read, n_bytes, segment_bytes, hold)
    except LayoutError as fault:
        known = claims or fault.reason in ("lfs_pointer", "empty_weights_file")
        reason, detail = (fault.reason, fault.detail) if known else (None, "")
        return opaque.layout(n_bytes, segment_bytes, reason, detail, hold)


def _refuse_empty(key: str, claims: bool) -> None:
    if opaque.is_weights(key):
        raise LayoutError("empty_file" if claims else "empty_weights_file", "0 bytes")


def _worth_a_look(key: str, n_bytes: int) -> bool:
    """Whether to spend a request: on weights, on what may be a pointer, on what is large whatever its name."""
    return n_bytes > 0 and (opaque.is_weights(key) or n_bytes <= HEAD_BYTES or n_bytes >= LOOK_BYTES)


def _look(read: Read, n_bytes: int, segment_bytes: int, hold: Hold) -> Layout:
    head = read(0, min(n_bytes, HEAD_BYTES))
    if opaque.is_lfs_pointer(head):
        raise LayoutError("lfs_pointer", "a pointer of Git LFS: the weights were never fetched")
    if n_bytes < 8:
        raise LayoutError("too_short", f"{n_bytes} bytes")
    header_bytes = int.from_bytes(head[:8], "little")
    data_begin = 8 + header_bytes
    if header_bytes == 0:
        raise LayoutError("empty_header")
    if data_begin > n_bytes:
        if opaque.is_other_format(head):
            raise LayoutError("not_safetensors", f"it begins with {head[:8]!r}")
        raise LayoutError("header_beyond_file", f"a header of {header_bytes} bytes in a file of {n_bytes}")
    if head[8:9] != b"{":
        raise LayoutError("not_safetensors", "no header")
    if header_bytes > HEADER_BYTES_MAX:
        raise LayoutError("header_over_limit", f"a header of {header_bytes} bytes")
    text = head[8:data_begin] if data_begin <= len(head) else head[8:] + read(len(head), data_begin - len(head))
    return safetensors.layout(Header(text), data_begin, n_bytes, segment_bytes, hold)
