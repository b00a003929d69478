"""The encoding `scaled` as a literal of a record: its planner, its sections, damage, and what it gives up on."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.base import BLOCK_WORDS, Stream
from operators.check import check
from operators.errors import ArchiveError, DamageError, FormatError
from operators.kernels import scales as kernels
from operators.kernels.bits import pack, packed_bytes
from operators.kernels.tile_coder import tile_coder
from operators.literals import scaled as module
from operators.literals.scaled import Scaled, view_columns
from operators.program import Literal, Node, parse
from operators.run import encode, execute
from operators.words import Words
from tests.strategies import Case, cases, conditions, damage

PLAIN = Scaled(64, 5, 2, 1, 2, 3)


def weights(n_words: int, columns: int, seed: int = 0, width_bits: int = 16) -> Words:
    """Return floats whose rows and columns have scales: BF16, or the upper 8 bits of them."""
    rng = np.random.Generator(np.random.PCG64(seed))
    rows = -(-n_words // columns)
    scales = np.exp2(rng.normal(0, 1, (rows, 1)) + rng.normal(0, 1, (1, columns))) / 64
    floats = (rng.standard_normal((rows, columns)) * scales).astype(np.float32).ravel()[:n_words]
    words = floats.view(np.uint32) >> np.uint32(32 - width_bits)
    return words.astype(np.uint16 if width_bits == 16 else np.uint8)


def program(scaled: Scaled) -> Node:
    return Node(Literal(Scaled.name, scaled.params))


def round_trip(scaled: Scaled, words: Words) -> int:
    """Return the bytes of the record."""
    encoded = encode(program(scaled), words)
    assert encoded is not None
    check(encoded.program, encoded.stream)
    assert execute(encoded.record, n_bytes=words.nbytes).tobytes() == words.tobytes()
    assert parse(str(encoded.program)) == encoded.program
    return len(encoded.record)


@settings(max_examples=60, deadline=None)
@given(
    width_bits=st.sampled_from((8, 16)),
    n_words=st.integers(0, 9000),
    columns=st.integers(1, 40).map(lambda half: 2 * half),
    numbers=st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)),
    seed=st.integers(0, 1 << 20),
)
def test_weights_come_back(
    width_bits: int, n_words: int, columns: int, numbers: tuple[int, ...], seed: int
) -> None:
    scaled = Scaled(columns, *numbers)
    words = weights(n_words, columns, seed, width_bits)
    try:
        scaled.check(Stream(width_bits, n_words))
    except FormatError:
        with pytest.raises(FormatError):
            encode(program(scaled), words)
        return
    encoded = encode(program(scaled), words)
    if encoded is not None:
        assert execute(encoded.record).tobytes() == words.tobytes()


@settings(max_examples=60, deadline=None)
@given(case=cases((8, 16), 4000), data=st.data())
def test_any_words_come_back_or_are_given_up(case: Case, data: st.DataObject) -> None:
    fitting = list(conditions(Scaled, case.stream))
    scaled = data.draw(st.sampled_from(fitting))
    encoded = encode(program(scaled), case.words)
    if encoded is not None:
        assert encoded.body_bytes <= case.words.nbytes
        assert execute(encoded.record).tobytes() == case.words.tobytes()


@pytest.mark.parametrize("n_words", [1 << 17, (1 << 17) + 8191, (1 << 17) - 64, 64 * 768 * 5 + 63 * 768 + 5])
@pytest.mark.parametrize("signed", [1, 2])
def test_large_literals_and_their_tails(n_words: int, signed: int) -> None:
    round_trip(Scaled(768, 5, 2, signed, 2, 3), weights(n_words, 768))


def test_scales_are_worth_their_bytes() -> None:
    words = weights(1024 * 128, 128)
    sizes = [round_trip(Scaled(128, 5, 2, 1, scales, 3), words) for scales in (0, 1, 2)]
    assert sizes[2] < 0.99 * sizes[1] < 0.98 * sizes[0]


def test_signs_that_lean_by_column_are_used() -> None:
    words = weights(64 * 512, 512)
    leaning = np.tile(np.arange(512) % 2 == 0, 64)
    words[leaning] |= 0x8000
    words[~leaning] &= 0x7FFF
    assert round_trip(Scaled(512, 5, 2, 2, 2, 2), words) < 0.96 * round_trip(Scaled(512, 5, 2, 1, 2, 2), words)


def test_below_a_split_the_words_are_gathered_block_by_block() -> None:
    n_words = BLOCK_WORDS + 777
    wide = weights(n_words, 64).astype(np.uint32) << np.uint32(16) | np.arange(n_words, dtype=np.uint32) & 0xFFFF
    tree = Node(parse("merge[16,16](lit, lit)").op, (Node(Literal()), program(PLAIN)))
    encoded = encode(tree, wide)
    assert encoded is not None
    assert execute(encoded.record).tobytes() == wide.tobytes()


def test_noise_is_given_up() -> None:
    rng = np.random.Generator(np.random.PCG64(5))
    noise = rng.integers(0, 1 << 16, 1 << 16, np.uint16)
    assert encode(program(PLAIN), noise) is None


@pytest.mark.parametrize("n_words", [4096, 4096 + 700, 1 << 17])
def test_every_family_writes_and_reads_the_same(n_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = weights(n_words, 64)
    records = []
    for portable in (False, True):
        monkeypatch.setattr(module, "tile_coder", lambda portable=portable: tile_coder(portable=portable))
        encoded = encode(program(PLAIN), words)
        assert encoded is not None
        records.append(bytes(encoded.record))
    assert records[0] == records[1]
    assert execute(records[0]).tobytes() == words.tobytes()


def test_the_interpreter_writes_and_reads_the_same() -> None:
    code = (
        "from tests.operators.test_scaled import *\n"
        "words = weights(64 * 40 + 700, 20)\n"
        "encoded = encode(program(Scaled(20, 5, 2, 2, 2, 3)), words)\n"
        "assert execute(encoded.record).tobytes() == words.tobytes()\n"
        "print(bytes(encoded.record).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "NUMBA_DISABLE_JIT": flag}, capture_output=True, check=True
        ).stdout
        for flag in ("0", "1")
    }
    assert len(found) == 1


@settings(max_examples=150, deadline=None)
@given(data=st.data(), signed=st.sampled_from((1, 2)))
def test_a_damaged_payload_is_refused_or_decodes_to_words(data: st.DataObject, signed: int) -> None:
    words = weights(64 * 64 * 2 + 700, 64)
    scaled = Scaled(64, 5, 2, signed, 2, 3)
    out = np.empty(words.nbytes, np.uint8)
    payload = out[: scaled.write(words, out)].tobytes()
    damaged = data.draw(damage(payload))
    found = np.empty_like(words)
    try:
        scaled.source(memoryview(damaged), Stream(16, words.size)).read(found)
    except DamageError:
        return
    assert found.size == words.size


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_damaged_record_is_refused(data: st.DataObject) -> None:
    words = weights(64 * 64, 64)
    encoded = encode(program(PLAIN), words)
    assert encoded is not None
    with pytest.raises(ArchiveError):
        execute(data.draw(damage(bytes(encoded.record))), n_bytes=words.nbytes)


@settings(max_examples=200, deadline=None)
@given(counts=st.lists(st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 1 << 30)), min_size=64, max_size=64))
def test_tables_are_such_as_readers_take(counts: list[int]) -> None:
    frequencies = np.zeros((1, 64), np.uint16)
    wanted = np.array(counts, np.int64)
    spare = kernels.fit_table(wanted, wanted, frequencies[0])
    assert int(frequencies.sum()) == kernels.SLOTS
    assert frequencies[0, kernels.ESCAPE] > 0
    assert int(frequencies[frequencies < kernels.MAIN_SLOTS].sum()) <= kernels.RARE_SLOTS
    none32, none8 = np.empty(0, np.int32), np.empty(0, np.uint8)
    out = np.zeros(300, np.uint8)
    n_bytes = kernels.put_head(none32, none32, -77, none8, none8, frequencies, np.array([spare]), out)
    found, numbers = np.empty((1, 64), np.uint16), np.empty(1, np.int64)
    assert kernels.take_head(out[:n_bytes], none32, none32, none8, none8, found, numbers) == n_bytes
    assert (found == frequencies).all()
    assert numbers[0] == -77


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-16000, 16000), min_size=1, max_size=80),
    columns=st.lists(st.integers(-300, 300), min_size=1, max_size=80),
)
def test_scales_come_back(rows: list[int], columns: list[int]) -> None:
    frequencies = np.zeros((1, 64), np.uint16)
    frequencies[0, [0, 63]] = 2048
    levels = np.arange(len(columns), dtype=np.uint8) % 5
    flips = levels & 1
    out = np.zeros(6 * (len(rows) + len(columns)) + 300, np.uint8)
    row_scales, column_scales = np.array(rows, np.int32), np.array(columns, np.int32)
    n_bytes = kernels.put_head(row_scales, column_scales, 5, levels, flips, frequencies, np.array([63]), out)
    found = np.empty_like(row_scales), np.empty_like(column_scales), np.empty_like(levels), np.empty_like(flips)
    assert kernels.take_head(out[:n_bytes], *found, frequencies, np.empty(1, np.int64)) == n_bytes
    for one, other in zip(found, (row_scales, column_scales, levels, flips), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    ("n_words", "columns", "expected"),
    [(384 * 384, 384, 384), (100 * 768, 768, 768 // 16), (30522 * 384, 384, 384), (64 * 27, 27, 26), (5000, 0, 78)],
)
def test_views(n_words: int, columns: int, expected: int) -> None:
    found = view_columns(n_words, columns)
    assert found == expected
    assert found % 2 == 0


def test_a_frame_of_escapes_is_never_as_long_as_their_bits() -> None:
    rng = np.random.default_rng(2)
    ties = 0
    for n_escapes in range(module.MIN_ZSTD_ESCAPES, 300):
        escapes = rng.choice(rng.integers(0, 1 << 10, 16), n_escapes).astype(np.uint16)
        plain = np.empty(packed_bytes(n_escapes, 10), np.uint8)
        pack(escapes, 10, plain)
        ties += len(module._BUFFERS.compressor.compress(escapes.data)) == plain.size
        section = module._escape_bytes(escapes, 10)
        assert len(section) < plain.size or section == plain.tobytes()
    assert ties
