"""The encodings of tiles as literals of a record: their planner, their sections, damage, and what they give up on."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, Stream
from operators.check import check
from operators.errors import ArchiveError, DamageError, FormatError
from operators.kernels import tile_heads as kernels
from operators.kernels.bits import pack, packed_bytes
from operators.kernels.jit import kernel
from operators.kernels.scales import ESCAPE, SLOTS
from operators.kernels.tile_coder import tile_coder
from operators.kernels.tile_payloads import HEAD_BYTES
from operators.literals import scaled, tiled
from operators.literals.scaled import Scaled
from operators.literals.scaled_huffman import ScaledHuffman
from operators.literals.tiled import Tiled, view_columns
from operators.program import Literal, Node, parse
from operators.record import take_record
from operators.run import encode, execute, open_source
from operators.words import Words
from tests.strategies import Case, cases, conditions, damage

PLAIN = (64, 5, 2, 1, 2, 3)
every_kind = pytest.mark.parametrize("kind", [Scaled, ScaledHuffman])


def weights(n_words: int, columns: int, seed: int = 0, width_bits: int = 16) -> Words:
    """Return floats whose rows and columns have scales: BF16, or the upper 8 bits of them."""
    rng = np.random.Generator(np.random.PCG64(seed))
    rows = -(-n_words // columns)
    scales = np.exp2(rng.normal(0, 1, (rows, 1)) + rng.normal(0, 1, (1, columns))) / 64
    floats = (rng.standard_normal((rows, columns)) * scales).astype(np.float32).ravel()[:n_words]
    words = floats.view(np.uint32) >> np.uint32(32 - width_bits)
    return words.astype(np.uint16 if width_bits == 16 else np.uint8)


def magnitudes(rows: int, columns: int, mean: float, seed: int = 0) -> Words:
    """Return zigzag codes of bytes about zero; rows and columns differ by an octave either way."""
    rng = np.random.Generator(np.random.PCG64(seed))
    scales = np.exp2(rng.uniform(-1, 1, (rows, 1)) + rng.uniform(-0.5, 0.5, (1, columns))) * mean
    values = np.clip(np.rint(rng.standard_normal((rows, columns)) * scales), -127, 127).astype(np.int64)
    return (values << 1 ^ values >> 63).astype(np.uint8).ravel()


def program(one: Tiled) -> Node:
    return Node(Literal(one.name, one.params))


def round_trip(one: Tiled, words: Words) -> int:
    """Return the bytes of the record."""
    encoded = encode(program(one), words)
    assert encoded is not None
    check(encoded.program, encoded.stream)
    assert execute(encoded.record, n_bytes=words.nbytes).tobytes() == words.tobytes()
    assert parse(str(encoded.program)) == encoded.program
    return len(encoded.record)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from((Scaled, ScaledHuffman)),
    width_bits=st.sampled_from((8, 16)),
    n_words=st.integers(0, 9000),
    columns=st.integers(1, 40).map(lambda half: 2 * half),
    numbers=st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)),
    seed=st.integers(0, 1 << 20),
)
def test_weights_come_back(
    kind: type[Tiled], width_bits: int, n_words: int, columns: int, numbers: tuple[int, ...], seed: int
) -> None:
    one = kind(columns, *numbers)
    words = weights(n_words, columns, seed, width_bits)
    try:
        one.check(Stream(width_bits, n_words))
    except FormatError:
        with pytest.raises(FormatError):
            encode(program(one), words)
        return
    encoded = encode(program(one), words)
    if encoded is not None:
        assert execute(encoded.record).tobytes() == words.tobytes()


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from((Scaled, ScaledHuffman)), case=cases((8, 16), 4000), data=st.data())
def test_any_words_come_back_or_are_given_up(kind: type[Tiled], case: Case, data: st.DataObject) -> None:
    fitting = list(conditions(kind, case.stream))
    one = data.draw(st.sampled_from(fitting))
    assert isinstance(one, kind)
    encoded = encode(program(one), case.words)
    if encoded is not None:
        assert encoded.body_bytes <= case.words.nbytes
        assert execute(encoded.record).tobytes() == case.words.tobytes()


@pytest.mark.parametrize("n_words", [1 << 17, (1 << 17) + 8191, (1 << 17) - 64, 64 * 768 * 5 + 63 * 768 + 5])
@pytest.mark.parametrize("signed", [1, 2])
@every_kind
def test_large_literals_and_their_tails(kind: type[Tiled], n_words: int, signed: int) -> None:
    round_trip(kind(768, 5, 2, signed, 2, 3), weights(n_words, 768))


@every_kind
def test_scales_are_worth_their_bytes(kind: type[Tiled]) -> None:
    words = weights(1024 * 128, 128)
    sizes = [round_trip(kind(128, 5, 2, 1, scales, 3), words) for scales in (0, 1, 2)]
    assert sizes[2] < 0.99 * sizes[1] < 0.98 * sizes[0]


@pytest.mark.parametrize(("low_bits", "mean"), [(0, 8), (1, 20), (2, 40)])
@every_kind
def test_integers_have_scales_by_their_magnitudes(kind: type[Tiled], low_bits: int, mean: float) -> None:
    words = magnitudes(640, 128, mean)
    one, rows, both = [round_trip(kind(128, low_bits, 0, 0, scales, 3), words) for scales in (0, 1, 2)]
    assert both < rows < 0.992 * one


@pytest.mark.parametrize("shape", [(64, 16), (128, 300), (700, 64)])
def test_scales_of_integers_are_thirds_of_octaves(shape: tuple[int, int]) -> None:
    words = magnitudes(*shape, mean=20)
    n_rows, columns = shape
    n_rows = n_rows // 64 * 64
    grid = words.reshape(shape)[:n_rows].astype(np.int64)
    scales = Scaled(columns, 1, 0, 0, 2, 3).scales_of(words)
    stride = columns // 4 if columns > 256 else 64
    judged = np.concatenate([grid[:, first : min(first + 64, columns)] for first in range(0, columns, stride)], axis=1)

    def logs(sums: NDArray[np.int64], count: int) -> list[int]:
        means = ((64 * sums + 16 * count) // count).tolist()
        return [sum(mean**3 >= 1 << k for k in range(1, 3 * 16)) for mean in means]  # floor(3 log2)

    rows = np.array(logs(judged.sum(axis=1), judged.shape[1]))
    middle = int(np.floor(rows.sum() / n_rows + 0.5))
    assert scales.rows.tolist() == (500 + np.clip(rows - middle, -3, 2)).tolist()
    sampled = grid[:: max(1, n_rows // 128)]
    by_column = np.array(logs(sampled.sum(axis=0), sampled.shape[0]))
    middle = int(np.floor(by_column.mean() + 0.5))
    assert scales.columns.tolist() == np.clip(by_column - middle, -1, 1).tolist()


def test_huffman_codes_are_hardly_longer() -> None:
    words = weights(1024 * 128, 128)
    plain = round_trip(Scaled(128, 5, 2, 1, 2, 2), words)
    assert plain < round_trip(ScaledHuffman(128, 5, 2, 1, 2, 2), words) < 1.01 * plain


@every_kind
def test_signs_that_lean_by_column_are_used(kind: type[Tiled]) -> None:
    words = weights(64 * 512, 512)
    leaning = np.tile(np.arange(512) % 2 == 0, 64)
    words[leaning] |= 0x8000
    words[~leaning] &= 0x7FFF
    assert round_trip(kind(512, 5, 2, 2, 2, 2), words) < 0.96 * round_trip(kind(512, 5, 2, 1, 2, 2), words)


@every_kind
def test_below_a_split_the_words_are_gathered_block_by_block(kind: type[Tiled]) -> None:
    n_words = BLOCK_WORDS + 777
    wide = weights(n_words, 64).astype(np.uint32) << np.uint32(16) | np.arange(n_words, dtype=np.uint32) & 0xFFFF
    tree = Node(parse("merge[16,16](lit, lit)").op, (Node(Literal()), program(kind(*PLAIN))))
    encoded = encode(tree, wide)
    assert encoded is not None
    assert execute(encoded.record).tobytes() == wide.tobytes()


@every_kind
def test_noise_is_given_up(kind: type[Tiled]) -> None:
    rng = np.random.Generator(np.random.PCG64(5))
    noise = rng.integers(0, 1 << 16, 1 << 16, np.uint16)
    assert encode(program(kind(*PLAIN)), noise) is None


@every_kind
def test_scales_that_no_payload_can_hold_are_given_up(kind: type[Tiled]) -> None:
    for value in (7, 2000, 2100, (1 << 15) - 1):
        words = np.full(4096, value, np.uint16)
        encoded = encode(program(kind(16, 0, 0, 1, 2, 0)), words)
        assert (encoded is None) == (value > 2048)
        assert encoded is None or execute(encoded.record).tobytes() == words.tobytes()


@every_kind
def test_nothing_beyond_the_payload_and_the_room_is_written(kind: type[Tiled]) -> None:
    words = weights(64 * 64 + 700, 64)
    n_bytes = kind(*PLAIN).write(words, np.empty(words.nbytes, np.uint8))
    payloads = set()
    for room in (words.nbytes, words.nbytes + 999, 2 * words.nbytes):
        out = np.full(room + 64, 0xA5, np.uint8)
        assert kind(*PLAIN).write(words, out[:room]) == n_bytes
        assert (out[room:] == 0xA5).all()
        payloads.add(out[:n_bytes].tobytes())
    assert len(payloads) == 1


@pytest.mark.parametrize("n_words", [4096, 4096 + 700, 1 << 17])
def test_every_family_writes_and_reads_the_same(n_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = weights(n_words, 64)
    records = []
    for portable in (False, True):
        monkeypatch.setattr(scaled, "tile_coder", lambda portable=portable: tile_coder(portable=portable))
        encoded = encode(program(Scaled(*PLAIN)), words)
        assert encoded is not None
        records.append(bytes(encoded.record))
    assert records[0] == records[1]
    assert execute(records[0]).tobytes() == words.tobytes()


@pytest.mark.parametrize("lower", ["merge[16,16](raw, {})", "merge[8,8,16](raw, huffman, {})"])
@pytest.mark.parametrize(("columns", "n_words"), [(34, 64 * 34), (70, 2048 * 70 + 5), (96, 100 * 96 + 37)])
@pytest.mark.parametrize("signed", [1, 2])
@every_kind
def test_upper_halves_are_decoded_where_they_belong(
    kind: type[Tiled], columns: int, n_words: int, signed: int, lower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(n_words + signed)
    floats = rng.standard_normal(n_words).astype("<f4")
    floats[rng.integers(0, n_words, 40)] *= np.float32(1e-9)  # escapes
    words = floats.view("<u4")
    encoded = encode(parse(lower.format(f"{kind.name}[{columns},5,2,{signed},2,3]")), words)
    assert encoded is not None
    unaligned = memoryview(b"." + bytes(encoded.record))[1:]
    for record in (encoded.record, unaligned):
        memory = np.full(n_words + 32, 0xA5A5A5A5, np.uint32)
        found = execute(record, out=memory[16:-16].view(np.uint8))
        assert_array_equal(found, words)
        assert_array_equal(memory[:16], memory[-16:])
        assert memory[0] == 0xA5A5A5A5
    # By the general path at once and block by block, and by portable kernels.
    memory = np.empty(n_words, np.uint32)
    open_source(take_record(encoded.record)).read(memory)
    assert_array_equal(memory, words)
    source = open_source(take_record(encoded.record))
    sizes = [1000] * (n_words // 1000) + [n_words % 1000]
    assert_array_equal(np.concatenate([source.take(np.empty(size, np.uint32)).copy() for size in sizes]), words)
    monkeypatch.setattr(scaled, "tile_coder", lambda: tile_coder(portable=True))
    assert_array_equal(execute(encoded.record), words)


class Exact:
    """Scratch that ends where it is said to, with bytes behind it that nobody is to write."""

    def __init__(self) -> None:
        self.held: list[NDArray[np.uint8]] = []

    def take(self, _: str, n_bytes: int) -> NDArray[np.uint8]:
        self.held.append(np.full(n_bytes + 4096, 0xA5, np.uint8))
        return self.held[-1][:n_bytes]


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from((Scaled, ScaledHuffman)),
    portable=st.booleans(),
    case=cases((8, 16), 4000),
    columns=st.integers(1, 20).map(lambda half: 2 * half),
    data=st.data(),
)
def test_decoding_stays_in_its_scratch(
    kind: type[Tiled], portable: bool, case: Case, columns: int, data: st.DataObject
) -> None:
    one = data.draw(st.sampled_from(list(conditions(kind, case.stream))))
    assert isinstance(one, kind)
    encoded = encode(program(replace(one, columns=columns)), case.words)
    if encoded is None:
        return
    exact = Exact()
    with (
        mock.patch.object(scaled, "tile_coder", return_value=tile_coder(portable=portable)),
        mock.patch.object(tiled, "BUFFERS", exact),
    ):
        assert execute(encoded.record).tobytes() == case.words.tobytes()
    assert exact.held
    assert all((memory[-4096:] == 0xA5).all() for memory in exact.held)


@every_kind
def test_the_interpreter_writes_and_reads_the_same(kind: type[Tiled]) -> None:
    code = (
        "from tests.operators.test_scaled import *\n"
        "words = weights(64 * 40 + 700, 20)\n"
        f"encoded = encode(program({kind.__name__}(20, 5, 2, 2, 2, 3)), words)\n"
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
@every_kind
def test_a_damaged_payload_is_refused_or_decodes_to_words(kind: type[Tiled], data: st.DataObject, signed: int) -> None:
    words = weights(64 * 64 * 2 + 700, 64)
    one = kind(64, 5, 2, signed, 2, 3)
    out = np.empty(words.nbytes, np.uint8)
    payload = out[: one.write(words, out)].tobytes()
    damaged = data.draw(damage(payload))
    found = np.empty_like(words)
    try:
        one.source(memoryview(damaged), Stream(16, words.size)).read(found)
    except DamageError:
        return
    assert found.size == words.size


@settings(max_examples=80, deadline=None)
@given(data=st.data())
@every_kind
def test_a_damaged_record_is_refused(kind: type[Tiled], data: st.DataObject) -> None:
    words = weights(64 * 64, 64)
    encoded = encode(program(kind(*PLAIN)), words)
    assert encoded is not None
    with pytest.raises(ArchiveError):
        execute(data.draw(damage(bytes(encoded.record))), n_bytes=words.nbytes)


ONE_OF_TWO = np.array((1, 0), np.uint8)
"""Of two tables the first is used."""
some_counts = st.lists(
    st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 1 << 30)), min_size=64, max_size=64
).map(lambda counts: np.array(counts, np.int64))


@settings(max_examples=200, deadline=None)
@given(counts=some_counts)
def test_frequencies_are_such_as_readers_take(counts: NDArray[np.int64]) -> None:
    frequencies, spare = np.empty((2, 64), np.uint16), np.empty(2, np.int64)
    kernels.fit_frequencies(np.array((counts, counts)), ONE_OF_TWO, frequencies, spare)
    assert frequencies.sum(axis=1).tolist() == [SLOTS, 0]
    assert frequencies[0, ESCAPE] > 0
    assert int(frequencies[frequencies < kernels.MAIN_SLOTS].sum()) <= kernels.RARE_SLOTS
    out = np.zeros(400, np.uint8)
    n_bytes = kernels.put_frequencies(frequencies, spare, out, 3)
    found = np.empty_like(frequencies)
    assert kernels.take_frequencies(out[:n_bytes], 3, ONE_OF_TWO, found) == n_bytes
    assert (found == frequencies).all()
    assert kernels.take_frequencies(out[:n_bytes], 3, np.ones(2, np.uint8), found) == -1


@settings(max_examples=200, deadline=None)
@given(counts=some_counts)
def test_codes_are_such_as_readers_take(counts: NDArray[np.int64]) -> None:
    lengths = np.empty((2, 64), np.uint8)
    kernels.fit_lengths(np.array((counts, counts)), ONE_OF_TWO, lengths)
    assert not lengths[1].any()
    there = lengths[0][lengths[0] > 0].astype(int)
    assert sum(1 << kernels.MAX_LENGTH - length for length in there) == 1 << kernels.MAX_LENGTH
    assert lengths[0, ESCAPE] > 0
    out = np.zeros(400, np.uint8)
    n_bytes = kernels.put_lengths(lengths, out, 3)
    found = np.empty_like(lengths)
    assert kernels.take_lengths(out[:n_bytes], 3, ONE_OF_TWO, found) == n_bytes
    assert (found == lengths).all()
    assert kernels.take_lengths(out[:n_bytes], 3, np.ones(2, np.uint8), found) == -1


@pytest.mark.parametrize(
    "lengths",
    [
        {0: 1, 1: 2, ESCAPE: 3},  # room is left
        {0: 1, 1: 1, ESCAPE: 1},  # more than there is room for
        {0: 1, 1: 1},  # no escape
        {i: i + 1 for i in range(12)} | {12: 13, ESCAPE: 13},
        {ESCAPE: 1},
    ],
)
def test_lengths_of_no_code_are_refused(lengths: dict[int, int]) -> None:
    one = ScaledHuffman(64, 5, 2, 1, 0, 0)
    words = weights(64 * 64, 64)
    payload = np.empty(words.nbytes, np.uint8)
    payload = payload[: one.write(words, payload)]
    scales, contexts, counts, plan, bit = one.plan(words)
    _, n_bytes = one.put_tables(counts, contexts.used, plan, bit)
    table = np.array([[lengths.get(symbol, 0) for symbol in range(64)]], np.uint8)
    head = np.zeros(200, np.uint8)
    none32, none8 = np.empty(0, np.int32), np.empty(0, np.uint8)
    assert put_scales(none32, none32, scales.tail, none8, none8, head) == bit
    n_head = kernels.put_lengths(table, head, bit)
    changed = (payload[:HEAD_BYTES], head[:n_head], payload[HEAD_BYTES + n_bytes :])
    source = one.source(memoryview(np.concatenate(changed).tobytes()), Stream(16, words.size))
    with pytest.raises(FormatError):
        source.read(np.empty_like(words))


@kernel("out")
def put_scales(
    row_scales: NDArray[np.int32], column_scales: NDArray[np.int32], tail_scale: int, levels: NDArray[np.uint8],
    flips: NDArray[np.uint8], out: NDArray[np.uint8],
) -> int:  # fmt: skip
    return kernels.put_scales(row_scales, column_scales, tail_scale, levels, flips, out)  # type: ignore[no-any-return]


@kernel("row_scales", "column_scales", "levels", "flips")
def take_scales(
    buffer: NDArray[np.uint8], row_scales: NDArray[np.int32], column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8], flips: NDArray[np.uint8],
) -> tuple[int, int]:  # fmt: skip
    return kernels.take_scales(buffer, row_scales, column_scales, levels, flips)  # type: ignore[no-any-return]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-16000, 16000), min_size=1, max_size=80),
    columns=st.lists(st.integers(-300, 300), min_size=1, max_size=80),
)
def test_scales_come_back(rows: list[int], columns: list[int]) -> None:
    levels = (np.arange(len(columns)) % 5).astype(np.uint8)
    flips = (np.arange(len(columns)) % 2).astype(np.uint8)
    out = np.zeros(6 * (len(rows) + len(columns)) + 300, np.uint8)
    row_scales, column_scales = np.array(rows, np.int32), np.array(columns, np.int32)
    bit = put_scales(row_scales, column_scales, -77, levels, flips, out)
    found = np.empty_like(row_scales), np.empty_like(column_scales), np.empty_like(levels), np.empty_like(flips)
    assert take_scales(out[: (bit + 7) // 8], *found) == (bit, -77)
    for one, other in zip(found, (row_scales, column_scales, levels, flips), strict=True):
        np.testing.assert_array_equal(one, other)


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
    for n_escapes in range(tiled.MIN_ZSTD_ESCAPES, 300):
        escapes = rng.choice(rng.integers(0, 1 << 10, 16), n_escapes).astype(np.uint16)
        plain = np.empty(packed_bytes(n_escapes, 10), np.uint8)
        pack(escapes, 10, plain)
        ties += len(tiled.BUFFERS.compressor.compress(escapes.data)) == plain.size
        section = tiled._escape_section(escapes, 10, 0)
        assert section.size < plain.size or section.tobytes() == plain.tobytes()
        assert tiled._escape_section(escapes, 10, 1 << 20).tobytes() == plain.tobytes()
    assert ties


def test_escapes_that_claim_much_are_refused_by_their_frame() -> None:
    """A frame states what it will take: more than the escapes is refused before it is decompressed."""
    source = Scaled(*PLAIN).source(memoryview(b""), Stream(16, 4096))
    bomb = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(1 << 24)), np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="a frame of 200 bytes"):
            source._decompress(bomb, 100, np.empty(0, np.uint8))  # type: ignore[attr-defined]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
