"""Files that are stored as bytes, and what can be told from their first bytes and their names."""

from __future__ import annotations

from pipeline.segments.base import Hold, Layout, byte_segments

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".onnx",
    ".h5",
    ".npz",
    ".npy",
    ".msgpack",
    ".tflite",
    ".pb",
    ".mar",
    ".distcp",
)
"""Names that promise weights: empty ones and pointers in their place are worth a warning."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAGIC = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x1f\x8b", b"GGUF", b"\x89HDF", b"\x93NUMPY")
_PRINTABLE = bytes({7, 8, 9, 10, 12, 13, 27} | set(range(0x20, 0x7F)))


def layout(n_bytes: int, segment_bytes: int, reason: str | None = None, detail: str = "", hold: Hold = tuple) -> Layout:
    """Return the file as plain bytes."""
    return Layout("opaque", reason, detail, hold(byte_segments(0, n_bytes, segment_bytes)))


def is_weights(key: str) -> bool:
    """Whether the name promises weights."""
    return key.lower().endswith(WEIGHT_SUFFIXES)


def is_lfs_pointer(head: bytes) -> bool:
    """Whether the file is the text that Git LFS keeps in place of a large file."""
    return head.startswith(_LFS_POINTER)


def is_other_format(head: bytes) -> bool:
    """Whether the first bytes are text or a well-known signature, so no length of a header."""
    return head.startswith(_MAGIC) or not head[:8].translate(None, _PRINTABLE)
