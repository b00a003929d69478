"""Structured tensors as checkpoints have them, generated: for learning the shipped prior and for tests.

Constants, upcasts, tied halves, padding, positions, masks, quantised weights, codebooks, waves, flags and noise;
each is small, and the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.words import Words

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Structured:
    """A tensor with structure.

    Attributes
    ----------
    name : str
    dtype : str
        Of safetensors.
    rows, columns : int
    words : Words
    """

    name: str
    dtype: str
    rows: int
    columns: int
    words: Words


def bf16(values: Any) -> Words:
    """Return float32 values as BF16 words, rounded to nearest even; NaN is not expected."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def f16(values: Any) -> Words:
    """Return values as F16 words."""
    with np.errstate(over="ignore"):  # what is too large becomes infinite, as in any cast
        return np.ascontiguousarray(values, np.float16).reshape(-1).view(np.uint16)


def f32(values: Any) -> Words:
    """Return values as F32 words."""
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)


def upcast_bf16(values: Any) -> Words:
    """Return values as F32 words that are exact BF16."""
    return bf16(values).astype(np.uint32) << np.uint32(16)


def packed(nibbles: NDArray[Any], per_word: int, dtype: Any) -> Words:
    """Pack nibbles into words, the first lowest."""
    words = np.zeros(nibbles.size // per_word, dtype)
    for place in range(per_word):
        words |= nibbles[place::per_word].astype(dtype) << dtype(4 * place)
    return words


def structured(n_words: int = 1 << 18, seed: int = 7) -> Iterator[Structured]:
    """Yield the tensors; matrices have 512 rows of ``n_words // 512`` words.

    Parameters
    ----------
    n_words : int
        A multiple of 4096.
    seed : int
    """
    rng = np.random.default_rng(seed)
    columns = n_words // 512

    def weights(rows: int, width: int) -> Floats:
        return (rng.standard_normal((rows, width)) * 0.02).astype(np.float32)

    yield Structured("zeros", "BF16", 512, columns, np.zeros(n_words, np.uint16))
    yield Structured("ones", "F32", 1, n_words, f32(np.ones(n_words)))
    yield Structured("nan", "F32", 1, n_words, np.full(n_words, 0x7FC00000, np.uint32))
    yield Structured("alternating", "F32", 1, n_words, f32(np.tile([1.0, -2.0], n_words // 2)))
    yield Structured("all patterns", "BF16", 1, 65536, np.arange(65536).astype(np.uint16))
    yield Structured("all bytes", "F8_E4M3", 1, 256, np.arange(256).astype(np.uint8))
    matrix = weights(512, columns)
    yield Structured("upcast of BF16", "F32", 512, columns, upcast_bf16(matrix))
    yield Structured("upcast of F16", "F32", 512, columns, f32(matrix.astype(np.float16).astype(np.float32)))
    mixed = f32(matrix).reshape(512, columns).copy()
    mixed[::2] = upcast_bf16(matrix[::2]).reshape(256, columns)
    yield Structured("rows of BF16 and F32", "F32", 512, columns, mixed.reshape(-1))
    yield Structured("exp_avg", "F32", 512, columns, f32(matrix * np.float32(1e-4)))
    yield Structured("exp_avg_sq", "F32", 512, columns, f32((matrix * np.float32(1e-4)) ** 2))
    yield Structured("step", "I64", 1, 1, np.array([12345], np.uint64))
    half = bf16(weights(256, columns))
    yield Structured("tied halves", "BF16", 512, columns, np.concatenate((half, half)))
    padded = bf16(weights(512, columns)).reshape(512, columns)
    padded[400:] = 0
    yield Structured("rows of zeros", "BF16", 512, columns, padded.reshape(-1).copy())
    padded[400:] = padded[399]
    yield Structured("repeated row", "BF16", 512, columns, padded.reshape(-1).copy())
    padded[400:] = bf16(weights(1, columns))
    yield Structured("mean row", "BF16", 512, columns, padded.reshape(-1).copy())
    frequencies = 10000.0 ** (-np.arange(64) / 64)
    yield Structured("inverse frequencies", "F32", 1, 64, f32(frequencies))
    yield Structured("sines", "F32", 1024, 64, f32(np.sin(np.outer(np.arange(1024), frequencies))))
    yield Structured("positions", "I64", 1, 4096, np.arange(4096).astype(np.uint64))
    yield Structured("positions reversed", "I64", 1, 4096, np.arange(4096)[::-1].astype(np.uint64))
    yield Structured("offsets of 64", "I32", 1, 4096, (64 * np.arange(4096)).astype(np.uint32))
    lower = np.tril(np.ones((512, 512), np.uint8))
    yield Structured("causal mask", "BOOL", 512, 512, lower.reshape(-1))
    yield Structured("causal mask in F16", "F16", 512, 512, f16(np.where(lower > 0, np.float16(0), np.float16(-65504))))
    uniform = rng.uniform(-0.015, 0.015, (8, n_words // 8))
    yield Structured("LoRA A", "F32", 8, n_words // 8, f32(uniform))
    yield Structured("LoRA B", "F32", n_words // 8, 8, np.zeros(n_words, np.uint32))
    nibbles = np.clip(np.rint(rng.standard_normal(2 * n_words) * 2.5 + 8), 0, 15)
    yield Structured("qweight", "I32", 256, n_words // 4 // 256, packed(nibbles, 8, np.uint32))
    yield Structured("qzeros", "I32", 32, n_words // 1024, np.full(n_words // 32, 0x77777777, np.uint32))
    yield Structured("g_idx", "I32", 1, 4096, (np.arange(4096) // 128).astype(np.uint32))
    yield Structured("skewed nibbles", "U8", 512, columns, packed(nibbles, 2, np.uint8))
    sparse = weights(512, columns)
    np.put_along_axis(sparse.reshape(-1, 4), rng.random((sparse.size // 4, 4)).argsort(1)[:, :2], 0, 1)
    yield Structured("2 of 4 zero", "BF16", 512, columns, bf16(sparse))
    sparse = np.where(rng.random((512, columns)) < 0.9, np.float32(0), weights(512, columns))
    yield Structured("90 % zero", "BF16", 512, columns, bf16(sparse))
    book = bf16(weights(1, 256))
    yield Structured("codebook of 256", "BF16", 512, columns, book[rng.integers(0, 256, n_words)])
    book = f32(weights(1, 16))
    yield Structured("codebook of 16", "F32", 512, columns, book[rng.integers(0, 16, n_words)])
    scales = rng.integers(118, 125, n_words // 16).astype(np.uint8)
    yield Structured("E8M0 scales", "F8_E8M0", 512, columns // 16, scales)
    blocks = rng.integers(0, 256, (n_words // 32, 17)).astype(np.uint8)
    blocks[:, 0] = scales[: blocks.shape[0]]
    yield Structured("MXFP4 blocks", "U8", 1, blocks.size, blocks.reshape(-1))
    for dtype, word in (("U8", np.uint8), ("BF16", np.uint16), ("F32", np.uint32), ("I64", np.uint64)):
        noise = rng.integers(0, (1 << 64) - 1, n_words // 4, dtype=np.uint64, endpoint=True)
        yield Structured(f"noise in {dtype}", dtype, 1, noise.size, noise.astype(word))
    scales_2d = np.exp(rng.standard_normal((512, 1)) * 0.5) * np.exp(rng.standard_normal(columns) * 0.5)
    scaled = weights(512, columns) * scales_2d
    yield Structured("rows and columns of own scale", "BF16", 512, columns, bf16(scaled))
    rounded = np.rint(scaled / np.abs(scaled).max(1, keepdims=True) * 127).astype(np.int8)
    yield Structured("weights in I8", "I8", 512, columns, rounded.view(np.uint8).reshape(-1))
    yield Structured("weights in F64", "F64", 512, columns, scaled.reshape(-1).view(np.uint64))
    positive = np.abs(scaled) * np.where(rng.random(scaled.shape) < 0.95, 1, -1)
    yield Structured("mostly positive weights", "BF16", 512, columns, bf16(positive))
    turns = 2 * np.pi / 256 * np.outer(np.arange(129), np.arange(256))
    waves = np.concatenate((np.cos(turns), np.sin(turns))) * np.hanning(256)
    yield Structured("windowed Fourier basis", "F32", 258, 256, f32(waves))
    nibbles = np.clip(np.rint(rng.standard_normal(n_words // 32) * 1.2 + 8), 0, 15)
    yield Structured("zero points", "I32", 32, nibbles.size // 8 // 32, packed(nibbles, 8, np.uint32))
    walk = (1 << 20) + np.cumsum(rng.integers(-60, 60, n_words // 8))
    yield Structured("walk of both signs", "I32", 1, walk.size, walk.astype(np.uint32))
    places, draws = np.arange(n_words // 4), rng.random((2, n_words // 4))
    flags = places >> 3 & 1 | (draws[0] < 0.5) << 1 | (places >> 9 & 1) << 2 | (draws[1] < 0.02) << 3
    yield Structured("flags", "U8", 1, flags.size, flags.astype(np.uint8))
