"""Checkpoints of any size that look like a transformer's weights to a compressor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = 4096
CHUNK_ROWS = 2048


def write_bf16(file: Path, n_bytes: int, seed: int = 0) -> None:
    """Write a safetensors file of about `n_bytes` of BF16 matrices, at most 64 MiB of it in memory.

    Values are normal with a scale of their own per row, truncated to BF16. Shapes alternate between a
    square projection, one four times as high, and a vector, so that some tensors exceed a segment and some are tiny.
    """
    shapes: list[tuple[int, ...]] = []
    left = n_bytes // 2
    while left > 0:
        kind = len(shapes) % 3
        shape: tuple[int, ...] = (
            (COLUMNS,) if kind == 2 else (min((COLUMNS, 4 * COLUMNS)[kind], -(-left // COLUMNS)), COLUMNS)
        )
        shapes.append(shape)
        left -= int(np.prod(shape))
    header: dict[str, Any] = {}
    offset = 0
    for index, shape in enumerate(shapes):
        stop = offset + 2 * int(np.prod(shape))
        header[f"layers.{index // 3}.{('q', 'up', 'norm')[index % 3]}.weight"] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": (offset, stop),
        }
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.Generator(np.random.SFC64(seed))
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes:
            rows = shape[0] if len(shape) == 2 else 1
            for start in range(0, rows, CHUNK_ROWS):
                count = min(CHUNK_ROWS, rows - start)
                scale = rng.uniform(0.01, 0.04, (count, 1)).astype(np.float32)
                values = rng.standard_normal((count, COLUMNS), np.float32) * scale
                out.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())
