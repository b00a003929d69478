"""The kernels of tiles for AVX-512 give the bytes of the plain coder, and stand any bytes.

Where the CPU has no AVX-512 the portable ones stand in for them, as they do in use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from operators.kernels import tiles, tiles_avx512
from operators.kernels.tile_coder import tile_coder
from operators.kernels.vectors import HAS_AVX512
from tests.operators import scaled_oracle as oracle
from tests.operators.scaled_cases import Case, cases, make_case
from tests.operators.tile_kernels import decode, encode

ROOT = Path(__file__).parents[2]
family: Any = tiles_avx512 if HAS_AVX512 else tiles
BF16 = oracle.Geometry(16, 5, 2, 1, 3, 2)
GEOMETRIES = [
    oracle.Geometry(width, low, fraction, signed, (low + fraction) % 4, 1 + (low + signed) % 2)
    for width in (8, 16)
    for signed in range(3)
    for low in range(width - (signed > 0))
    for fraction in {0, min(2, width - (signed > 0) - low), width - (signed > 0) - low}
]


def assert_same(case: Case, coder: Any = family) -> None:
    sections = encode(coder, case)
    assert sections == encode(tiles, case)
    assert sections is not None
    words = decode(coder, case, sections)
    assert words is not None
    np.testing.assert_array_equal(words, case.words)


def test_this_cpu_takes_these_kernels() -> None:
    assert tile_coder().encode_tiles is family.encode_tiles


@settings(max_examples=100, deadline=None)
@given(cases())
def test_bytes_are_those_of_the_plain_coder(case: Case) -> None:
    assert encode(family, case) == case.sections()
    assert_same(case)


def test_all_ways_to_cut_a_word() -> None:
    for i, geometry in enumerate(GEOMETRIES):
        assert_same(make_case(geometry, 2 + 2 * (i % 3), i % 2, 130 + i, ("skewed", "flat", "escapes")[i % 3], i))


@pytest.mark.parametrize("width_bits", [8, 16])
@pytest.mark.parametrize("columns", [62, 64, 66, 96, 98, 126, 128, 130, 300])
def test_blocks_of_columns(columns: int, width_bits: int) -> None:
    for signed in range(3):
        geometry = oracle.Geometry(width_bits, 3, 2, signed, 3, 2)
        assert_same(make_case(geometry, columns, 2, 64 * 70 + columns, "skewed", columns))


def test_the_encoder_divides() -> None:
    """States where the quotient changes, and any others, for every frequency, against division by the processor."""
    rng = np.random.default_rng(0)
    tables = np.empty((1, family.ENCODER_BYTES), np.uint8)
    scratch = np.empty(family.SCRATCH_BYTES + 2 * family.SCRATCH_BYTES_PER_COLUMN, np.uint8)
    columns, none = np.arange(2, dtype=np.int32), np.zeros(2, np.uint8)
    words = np.full(128, 255 - 7, np.uint8)
    for frequency in range(1, 4096):
        frequencies = np.zeros((1, 64), np.uint16)
        frequencies[0, 7], frequencies[0, 60] = frequency, 4096 - frequency
        family.encoder_tables(frequencies, tables)
        start = 0 if frequency >= 2048 else 4096 - frequency
        highest = frequency << 20
        multiples = rng.integers(1, 1 << 20, 40) * frequency
        states = np.concatenate((multiples, multiples - 1, [0, highest - 1], rng.integers(0, 1 << 32, 46)))
        states = np.clip(states, 1 << 16, (1 << 32) - 1)
        found, stream = states.astype(np.uint32), np.zeros(1024, np.uint8)
        family.encode_tiles(
            words, 2, np.arange(64, dtype=np.int32), np.zeros(1, np.int32), columns, np.zeros(2, np.int32), none, none,
            np.array([0, 8, 8, 0, 0]), tables, np.zeros(64, np.uint8), stream, 960, found, np.zeros(512, np.uint16),
            512, scratch, False,
        )  # fmt: skip
        full = states >= highest
        left = np.where(full, states >> 16, states)
        np.testing.assert_array_equal(found, (left // frequency << 12) + left % frequency + start)
        np.testing.assert_array_equal(stream[960 - 2 * full.sum() : 960].view("<u2"), states[full] & 0xFFFF)


# -- the memory that is used -----------------------------------------------------------------------------


NO_ACCESS = 0


class Guarded:
    """Kernels whose arrays end where the next page cannot be read, or start where the one before cannot."""

    ENCODER_BYTES, DECODER_BYTES = family.ENCODER_BYTES, family.DECODER_BYTES
    SCRATCH_BYTES, SCRATCH_BYTES_PER_COLUMN = family.SCRATCH_BYTES, family.SCRATCH_BYTES_PER_COLUMN
    encoder_tables, decoder_tables = staticmethod(family.encoder_tables), staticmethod(family.decoder_tables)

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.maps: list[mmap.mmap] = []

    def array(self, source: NDArray[Any]) -> NDArray[Any]:
        page = mmap.PAGESIZE
        n_pages = -(-max(source.nbytes, 1) // page)
        area = mmap.mmap(-1, (n_pages + 2) * page)
        self.maps.append(area)
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        for guard in (base, base + (n_pages + 1) * page):
            assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), page, NO_ACCESS) == 0
        offset = page + (n_pages * page - source.nbytes if self.at_end else 0)
        copy = np.frombuffer(area, source.dtype, source.size, offset).reshape(source.shape)
        copy[...] = source
        return copy

    def call(self, kernel: Any, arguments: tuple[Any, ...]) -> tuple[int, int]:
        guarded = [self.array(value) if isinstance(value, np.ndarray) else value for value in arguments]
        result: tuple[int, int] = kernel(*guarded)
        for value, copy in zip(arguments, guarded, strict=True):
            if isinstance(value, np.ndarray) and value.flags.writeable:
                value[...] = copy
        return result

    def encode_tiles(self, *arguments: Any) -> tuple[int, int]:
        return self.call(family.encode_tiles, arguments)

    def decode_tiles(self, *arguments: Any) -> tuple[int, int]:
        return self.call(family.decode_tiles, arguments)


@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_beyond_the_arrays_is_touched(at_end: bool) -> None:
    for width_bits, columns, kind in ((16, 2, "skewed"), (16, 34, "escapes"), (16, 98, "flat"), (8, 98, "escapes")):
        for signed in range(3):
            case = make_case(oracle.Geometry(width_bits, 3, 2, signed, 3, 2), columns, 1, 300, kind, columns)
            assert_same(case, Guarded(at_end))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32), kind=st.sampled_from(["skewed", "escapes"]), columns=st.integers(1, 40))
def test_any_bytes_stay_inside(seed: int, kind: str, columns: int) -> None:
    """And both families make the same of them."""
    case = make_case(replace(BF16, groups=1 + seed % 2), 2 * columns, 1, 300, kind, seed)
    rng = np.random.default_rng(seed)
    sections = encode(family, case)
    assert sections is not None
    stream, n_states = np.array(sections.stream, np.uint16), len(sections.states)
    damaged = stream ^ np.uint16(1 << rng.integers(0, 16)) * (rng.random(stream.size) < 0.05)
    for changed in (
        replace(sections, stream=tuple(damaged.tolist())),
        replace(sections, stream=sections.stream[: int(rng.integers(0, stream.size))]),
        replace(sections, escapes=tuple(rng.integers(0, 1 << 16, rng.integers(0, case.words.size)).tolist())),
        replace(sections, stream=(0xFFFF,) * stream.size, states=(0xFFFFFFFF,) * n_states),
        replace(sections, states=tuple(rng.integers(0, 1 << 32, n_states).tolist())),
    ):
        guarded: Any = Guarded(at_end=True)
        words, expected = decode(guarded, case, changed), decode(tiles, case, changed)
        assert (words is None) == (expected is None)
        np.testing.assert_array_equal(words, expected)


def test_gives_up_where_the_portable_kernels_do() -> None:
    case = make_case(BF16, 8, 2, 0, "escapes")
    for room in range(0, 4096, 32):
        assert encode(family, case, room) == encode(tiles, case, room)


CACHED = """
from numba.core import compiler
from tests.operators.test_tiles_avx512 import BF16, encode, family, make_case
case = make_case(BF16, 4, 1, 300)
{before}
assert encode(family, case) is not None
"""
REFUSE = "compiler.compile_extra = None"


def test_a_fresh_process_loads_them_from_the_cache(tmp_path: Path) -> None:
    environment = os.environ | {"BREVIS_CACHE_DIR": str(tmp_path)}
    for before in ("", REFUSE):
        command = [sys.executable, "-c", CACHED.format(before=before)]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
