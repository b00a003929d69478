"""The coder of tiles for this CPU: AVX-512 where it has that, else code for any CPU, with AVX2 if there; same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class TileCoder:
    """One family of kernels; see `operators.kernels.tiles` for their arguments.

    Attributes
    ----------
    encoder_bytes, decoder_bytes : int
        Of the prepared form of one table.
    """

    encoder_tables: Callable[..., None]
    encode_tiles: Callable[..., tuple[int, int]]
    decode_literal: Callable[..., tuple[int, int, int]]
    encoder_bytes: int
    decoder_bytes: int
    fixed_bytes: int
    column_bytes: int

    def scratch_bytes(self, columns: int) -> int:
        """Return the bytes of scratch that tiles of `columns` take."""
        return self.fixed_bytes + self.column_bytes * columns


def _family(module: ModuleType | Any) -> TileCoder:
    return TileCoder(
        module.encoder_tables,
        module.encode_tiles,
        module.decode_literal,
        module.ENCODER_BYTES,
        module.DECODER_BYTES,
        module.SCRATCH_BYTES,
        module.SCRATCH_BYTES_PER_COLUMN,
    )


@cache
def tile_coder(*, portable: bool = False) -> TileCoder:
    """Return the kernels for this CPU, or the portable ones."""
    # At the first use: most commands code no tiles, and their start should not wait for it.
    from operators.kernels import tiles, tiles_avx512
    from operators.kernels.vectors import HAS_AVX512

    return _family(tiles_avx512 if HAS_AVX512 and not portable else tiles)
