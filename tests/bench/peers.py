"""The compressors that the benchmark compares with, each as functions over bytes, imported when first used.

A peer works as its own users run it: on the whole file, or tensor by tensor where its interface takes arrays of
one type. One thread always.
"""

from __future__ import annotations

import gzip
import importlib
import json
import lzma
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zstandard

SIZES_FILE = Path(__file__).parent / "peer_sizes.json"
ALONE_MB_S = 150
"""A peer that compresses more slowly is measured once, outside of the alternating turns."""
MEMORY_FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where files stand that a peer must be given as files."""


@dataclass(frozen=True)
class Peer:
    """A compressor.

    Attributes
    ----------
    name : str
    compress : callable of (prepared, dtype)
        Of one unit. The dtype is that of the tensor, or the one that most bytes of the file have, as
        safetensors writes it.
    decompress : callable of (compressed, dtype)
    unit : {"file", "tensor"}
        What it is given.
    settings : str
        What was asked of it.
    package : str
        Distribution that brings it; empty for the standard library.
    module : str
        What has to be importable.
    mb_s : float
        About how fast it compresses: decides how often it is measured, and on which files at all.
    prepare : callable of (bytes,)
        Makes the argument of `compress`, outside of the time that is taken.
    size : callable
        Bytes of what `compress` returned.
    content : callable
        Bytes of what `decompress` returned.
    """

    name: str
    compress: Callable[[Any, str], Any]
    decompress: Callable[[Any, str], Any]
    unit: Literal["file", "tensor"] = "file"
    settings: str = ""
    package: str = ""
    module: str = ""
    mb_s: float = 200
    prepare: Callable[[bytes], Any] = bytes
    size: Callable[[Any], int] = len
    content: Callable[[Any], bytes] = bytes

    @property
    def is_slow(self) -> bool:
        """Whether it is measured once only."""
        return self.mb_s < ALONE_MB_S

    @property
    def version(self) -> str:
        """Version of its distribution."""
        return metadata.version(self.package) if self.package else "standard library"

    def missing(self) -> str:
        """Return why the peer cannot be used here, empty where it can."""
        try:
            importlib.import_module(self.module or self.package or "zlib")
        except (ImportError, OSError) as error:
            return f"{self.package} is not installed ({error}); it is in the extra `bench`"
        return ""


def _zstd(level: int, mb_s: float) -> Peer:
    # One thread and the size in the header: what `zstd -LEVEL` writes, without the checksum.
    return Peer(
        f"zstd -{level}",
        lambda data, _: zstandard.ZstdCompressor(level=level).compress(data),
        lambda data, _: zstandard.ZstdDecompressor().decompress(data),
        settings=f"level {level}",
        package="zstandard",
        mb_s=mb_s,
    )


# -- general ------------------------------------------------------------------------------------


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


def _brotli(quality: int, mb_s: float) -> Peer:
    def compress(data: bytes, _: str) -> bytes:
        import brotli

        return bytes(brotli.compress(data, quality=quality))

    def decompress(data: bytes, _: str) -> bytes:
        import brotli

        return bytes(brotli.decompress(data))

    settings = f"quality {quality}"
    return Peer(f"brotli -{quality}", compress, decompress, settings=settings, package="brotli", mb_s=mb_s)


# -- for weights --------------------------------------------------------------------------------


ZIPNN_NAMES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}


def zipnn(dtype: str, threads: int = 1) -> Any:
    """Return ZipNN for a dtype; it must be given a buffer of its own, since it reorders that in place."""
    from zipnn import ZipNN

    return ZipNN(input_format="byte", bytearray_dtype=ZIPNN_NAMES.get(dtype, "float32"), threads=threads)


def _zipnn(name: str, unit: Literal["file", "tensor"]) -> Peer:
    def kept(dtype: str) -> bool:
        # Told that it is float32, ZipNN ends the process on tensors of less than one word.
        return unit == "tensor" and dtype not in ZIPNN_NAMES

    return Peer(
        name,
        lambda data, dtype: data if kept(dtype) else zipnn(dtype).compress(data),
        lambda data, dtype: data if kept(dtype) else zipnn(dtype).decompress(data),
        unit,
        "threads=1, dtype given" + ("; dtypes that it has no name for are kept" if unit == "tensor" else ""),
        "zipnn",
        prepare=bytearray,
        mb_s=400,
    )


def _lmz_prepare(data: bytes) -> Path:
    file = Path(_memory_folder(), "peer.safetensors")
    file.write_bytes(data)
    return file


def _lmz_compress(file: Path, _: str) -> Path:
    import lmz

    packed = file.with_suffix(".lmz")
    packed.unlink(missing_ok=True)
    lmz.compress(str(file), str(packed), workers=1)
    return packed


def _lmz_decompress(packed: Path, _: str) -> Path:
    import lmz

    back = packed.with_suffix(".back")
    back.unlink(missing_ok=True)
    lmz.decompress(str(packed), str(back), workers=1)
    return back


@cache
def _memory_folder() -> str:
    folder = tempfile.TemporaryDirectory(dir=MEMORY_FOLDER)
    _FOLDERS.append(folder)
    return folder.name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


def _glyd_compress(data: bytes, _: str) -> bytes:
    import glyd

    return bytes(glyd.compress(data, level="max", threads=1))


def _glyd_decompress(data: bytes, _: str) -> bytes:
    import glyd

    return bytes(glyd.decompress(data))


def _z4ai_compress(data: bytes, _: str) -> bytes:
    from z4ai import safetensors

    return bytes(safetensors.compress_bytes(data, threads=1, workers=1))


def _z4ai_decompress(data: bytes, _: str) -> bytes:
    from z4ai import safetensors

    return bytes(safetensors.decompress_bytes(data, workers=1))


def _z4ai_max_compress(data: bytes, dtype: str) -> bytes:
    import z4ai

    names = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8_e4m3"}
    return bytes(z4ai.compress(data, dtype=names.get(dtype), threads=1, effort="max"))


def _z4ai_max_decompress(data: bytes, _: str) -> bytes:
    import z4ai

    return bytes(z4ai.decompress(data))


WORDS: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2",
}  # fmt: skip
"""Types of numpy for dtypes of safetensors; bytes for any other."""


def _pcodec(level: int, mb_s: float) -> Peer:
    def compress(data: bytes, dtype: str) -> bytes:
        from pcodec import ChunkConfig, standalone

        config = ChunkConfig(compression_level=level, enable_8_bit=True)
        return bytes(standalone.simple_compress(np.frombuffer(data, WORDS.get(dtype, "u1")), config))

    def decompress(data: bytes, _: str) -> Any:
        from pcodec import standalone

        return standalone.simple_decompress(data)

    settings = f"level {level}, enable_8_bit; BF16 as U16"
    return Peer(
        f"pcodec -{level}", compress, decompress, "tensor", settings, "pcodec", mb_s=mb_s, content=lambda a: a.tobytes()
    )


@cache
def _openzl_context(dtype: str, generic: bool) -> tuple[Any, Any]:
    """Return a compression context of OpenZL for a dtype, and the compressor that it refers to."""
    import openzl.ext as zl

    compressor = zl.Compressor()
    nodes = {
        "F32": zl.nodes.Float32Deconstruct, "F16": zl.nodes.Float16Deconstruct, "BF16": zl.nodes.BFloat16Deconstruct,
    }  # fmt: skip
    if generic or dtype not in nodes:
        graph = zl.graphs.Compress()(compressor)
    else:
        entropy = zl.graphs.Entropy()(compressor)
        graph = nodes[dtype]()(compressor, zl.nodes.TransposeSplit()(compressor, entropy), entropy)
    compressor.select_starting_graph(graph)
    context = zl.CCtx()
    context.ref_compressor(compressor)
    context.set_parameter(zl.CParam.StickyParameters, 1)
    context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
    return context, compressor


def _openzl(name: str, settings: str, *, generic: bool, mb_s: float) -> Peer:
    def compress(data: bytes, dtype: str) -> bytes:
        import openzl.ext as zl

        width = np.dtype(WORDS.get(dtype, "u1")).itemsize
        context, _ = _openzl_context(dtype, generic)
        return bytes(context.compress([zl.Input(zl.Type.Numeric, np.frombuffer(data, f"<u{width}"))]))

    def decompress(data: bytes, _: str) -> Any:
        import openzl.ext as zl

        return zl.DCtx().decompress(data)

    return Peer(
        name, compress, decompress, "tensor", settings, "openzl", "openzl.ext", mb_s=mb_s,
        content=lambda outputs: outputs[0].content.as_nparray().tobytes(),
    )  # fmt: skip


ZIPNN = _zipnn("ZipNN", "file")
ZIPNN_BY_TENSOR = _zipnn("ZipNN by tensor", "tensor")
GENERAL = (
    _zstd(19, 3),
    _zstd(3, 250),
    Peer(
        "xz -6",
        lambda data, _: lzma.compress(data, preset=6),
        lambda data, _: lzma.decompress(data),
        settings="preset 6",
        mb_s=4,
    ),
    Peer(
        "gzip",
        lambda data, _: gzip.compress(data, 6, mtime=0),
        lambda data, _: gzip.decompress(data),
        settings="level 6",
        mb_s=25,
    ),
)
"""Compressors that need nothing beyond what the package needs."""
ALL = (
    ZIPNN,
    *GENERAL,
    Peer("lz4", _lz4_compress, _lz4_decompress, settings="frame, default", package="lz4", mb_s=600),
    Peer("snappy", _snappy_compress, _snappy_decompress, settings="framed", package="cramjam", mb_s=600),
)
"""What every checkpoint of CI was measured with: `recorded_sizes`."""
EVERY = (
    ZIPNN,
    ZIPNN_BY_TENSOR,
    Peer(
        "lmz", _lmz_compress, _lmz_decompress, settings="workers=1, files in memory", package="lmzip", module="lmz",
        mb_s=250, prepare=_lmz_prepare, size=lambda file: file.stat().st_size, content=lambda file: file.read_bytes(),
    ),
    Peer("glyd max", _glyd_compress, _glyd_decompress, settings="level max, threads=1", package="glyd", mb_s=60),
    _openzl("OpenZL floats", "float fields, each byte plane entropy-coded", generic=False, mb_s=220),
    _openzl("OpenZL generic", "its generic numeric graph", generic=True, mb_s=30),
    _pcodec(8, 50),
    _pcodec(12, 4),
    Peer("z4ai", _z4ai_compress, _z4ai_decompress, settings="its safetensors container, threads=1", package="z4ai",
         mb_s=25),
    Peer("z4ai max", _z4ai_max_compress, _z4ai_max_decompress, "tensor", "effort=max, threads=1", "z4ai", mb_s=0.4),
    *ALL[1:],
    _brotli(5, 60),
    _brotli(11, 0.3),
)  # fmt: skip
"""All peers of the comparison."""


def recorded_sizes() -> dict[str, dict[str, int]]:
    """Return the bytes that each peer needs for each checkpoint, as ``python -m tests.bench peers`` recorded them."""
    sizes: dict[str, dict[str, int]] = json.loads(SIZES_FILE.read_text("utf-8"))
    return sizes


def record_sizes(sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Write the sizes for `recorded_sizes`."""
    SIZES_FILE.write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n", "utf-8")
