"""The compressors that the benchmark compares with, each as a pair of functions over bytes."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

SIZES_FILE = Path(__file__).parent / "peer_sizes.json"


@dataclass(frozen=True)
class Peer:
    """A compressor.

    Attributes
    ----------
    name : str
    compress : callable of (bytes, dtype)
        The dtype is the one that most of the bytes have, as safetensors writes it.
    decompress : callable of (bytes, dtype)
    """

    name: str
    compress: Callable[[bytes, str], bytes]
    decompress: Callable[[bytes, str], bytes]


def _zstd(level: int) -> Peer:
    # One thread and the size in the header: what `zstd -LEVEL` writes, without the checksum.
    return Peer(
        f"zstd -{level}",
        lambda data, _: zstandard.ZstdCompressor(level=level).compress(data),
        lambda data, _: zstandard.ZstdDecompressor().decompress(data),
    )


def zipnn(dtype: str, threads: int = 1) -> Any:
    """Return ZipNN for a dtype; it must be given a buffer of its own, since it reorders that in place."""
    from zipnn import ZipNN

    names: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16"}
    return ZipNN(input_format="byte", bytearray_dtype=names.get(dtype, "float32"), threads=threads)


def _lz4_compress(data: bytes, _: str) -> bytes:
    import lz4.frame

    return bytes(lz4.frame.compress(data))


def _lz4_decompress(data: bytes, _: str) -> bytes:
    import lz4.frame

    return bytes(lz4.frame.decompress(data))


def _snappy_compress(data: bytes, _: str) -> bytes:
    import cramjam

    return bytes(cramjam.snappy.compress(data))


def _snappy_decompress(data: bytes, _: str) -> bytes:
    import cramjam

    return bytes(cramjam.snappy.decompress(data))


ZIPNN = Peer(
    "ZipNN",
    lambda data, dtype: bytes(zipnn(dtype).compress(bytearray(data))),
    lambda data, dtype: bytes(zipnn(dtype).decompress(data)),
)
GENERAL = (
    _zstd(19),
    _zstd(3),
    Peer("xz -6", lambda data, _: lzma.compress(data, preset=6), lambda data, _: lzma.decompress(data)),
    Peer("gzip", lambda data, _: gzip.compress(data, 6, mtime=0), lambda data, _: gzip.decompress(data)),
)
"""Compressors that need nothing beyond what the package needs."""
ALL = (
    ZIPNN,
    *GENERAL,
    Peer("lz4", _lz4_compress, _lz4_decompress),
    Peer("snappy", _snappy_compress, _snappy_decompress),
)


def recorded_sizes() -> dict[str, dict[str, int]]:
    """Return the bytes that each peer needs for each checkpoint, as ``python -m tests.bench peers`` recorded them."""
    sizes: dict[str, dict[str, int]] = json.loads(SIZES_FILE.read_text("utf-8"))
    return sizes


def record_sizes(sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Write the sizes for `recorded_sizes`."""
    SIZES_FILE.write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n", "utf-8")
