"""Small records in one call: the bytes of the general path both ways, and no word that it would not read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import operators.run
from operators import limits
from operators.base import BLOCK_WORDS, Operator, Stream
from operators.errors import ArchiveError, DamageError, LimitError
from operators.fields import MOST_WORDS, PLAIN, encode_small, execute_small, payload_bytes, steps_of
from operators.kernels import leaves
from operators.kernels.repeats import repeats, window_of
from operators.kernels.steps import CUT_SOME
from operators.literals.huffman import Huffman
from operators.literals.profile import Profiler, choose
from operators.ops.add import Add
from operators.ops.const import Const
from operators.ops.dictionary import Dictionary
from operators.ops.merge import Merge
from operators.ops.partition import Partition, marks
from operators.ops.scan import ScanAdd, ScanXor
from operators.ops.xor import Xor
from operators.ops.zigzag import Zigzag
from operators.program import LIT, Literal, Node, parse
from operators.record import take_record
from operators.run import Encoded, encode, execute, open_source
from operators.words import Words
from tests.operators.test_program import scratch_bytes
from tests.strategies import KINDS, damage, make_words

WORD_BITS = (8, 16, 32, 64)
KINDS_OF_NODES = (Merge, Merge, Merge, ScanAdd, ScanXor, Partition, Dictionary, Zigzag, Add, Xor, Const)
NAMES = (*PLAIN, *PLAIN, "lz")


@contextmanager
def general_path() -> Iterator[None]:
    """Write and read by the general path alone."""
    with (
        mock.patch.object(operators.run, "encode_small", return_value=None),
        mock.patch.object(operators.run, "execute_small", return_value=None),
    ):
        yield


def generally(program: Node, words: Words) -> Encoded | None:
    """Return what the general path writes, or None where it refuses to."""
    with general_path():
        try:
            return encode(program, words)
        except ArchiveError:
            return None


@st.composite
def trees(draw: st.DrawFn, words: Words, width_bits: int, names: tuple[str, ...] = NAMES, depth: int = 3) -> Node:
    """A program for `words` of all operators that there are steps for, over literals."""
    stream = Stream(width_bits, words.size)
    rest = words.size - 1
    if depth == 0 or not rest or draw(st.integers(0, 3)) == 0:
        return Node(Literal(draw(st.sampled_from(names))))
    op: Operator
    kind = draw(
        st.sampled_from((Merge, Merge, Merge, ScanAdd, ScanXor, Partition, Dictionary, Zigzag, Add, Xor, Const))
    )
    if kind is Merge and width_bits > 1:
        cuts = draw(st.sets(st.integers(1, width_bits - 1), min_size=1, max_size=3))
        ends = [0, *sorted(cuts), width_bits]
        op = Merge(tuple(stop - start for start, stop in pairwise(ends)))
    elif kind in (ScanAdd, ScanXor):
        op = kind(draw(st.integers(1, rest) | st.integers(1, min(rest, 100))))
    elif kind is Partition:
        row = draw(st.sampled_from([row for row in (1, 2, 3, 7, 64) if words.size % row == 0]))
        low_bits = draw(st.integers(1, width_bits))
        n_marked = marks(words, row, low_bits)[1]
        op = Partition(row, n_marked if 0 < n_marked < words.size // row else 1, low_bits)
        if op.n_marked >= words.size // row:
            op = Zigzag()
    elif kind is Dictionary:
        op = Dictionary(np.unique(words).size)
    elif kind is Const:
        op = Const(int(words[0]))
    else:
        constant = draw(st.integers(0, (1 << width_bits) - 1))
        op = kind(constant) if kind in (Add, Xor) else Zigzag()
    targets = op.targets(words, stream)
    children = op.children(stream)
    if targets is None:  # a program that cannot produce them
        targets = tuple(child.empty() for child in children)
        for target in targets:
            target.fill(0)
    below = (trees(target, child.width_bits, names, depth - 1) for target, child in zip(targets, children, strict=True))
    return Node(op, tuple(map(draw, below)))


@st.composite
def weights(draw: st.DrawFn) -> Words:
    """Words of any kind, or numbers as weights are, some of them repeated."""
    width_bits = draw(st.sampled_from(WORD_BITS))
    n_words = draw(st.sampled_from((1, 2, 7, 64, 192, 768, 4095, 4096, 5000)) | st.integers(1, 3000))
    seed = draw(st.integers(0, 1 << 32))
    if width_bits == 8 or draw(st.booleans()):
        return make_words(draw(st.sampled_from(KINDS)), width_bits, n_words, seed)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n_words) * 0.03
    words = values.view("<u8") if width_bits == 64 else values.astype("<f4").view("<u4")
    if width_bits == 16:
        words = (words >> 16).astype("<u2")
    if draw(st.booleans()):
        start = draw(st.integers(0, n_words - 1))
        words[start:] = np.resize(words[:start], n_words - start) if start else words[0]
    words.flags.writeable = False
    return words


@given(data=st.data(), words=weights())
@settings(max_examples=300)
def test_the_bytes_of_the_general_path(data: st.DataObject, words: Words) -> None:
    program = data.draw(trees(words, 8 * words.itemsize))
    expected = generally(program, words)
    small = encode_small(program, words, operators.run.digest_of(words), None)
    (n_bytes,) = payload_bytes([program], words)
    steps = steps_of(program, 8 * words.itemsize, words.size)
    if small is None:
        # There are no steps, the program cannot produce the words, or a named encoding takes more than they are.
        too_large = expected is not None and expected.body_bytes > words.nbytes // 2
        assert expected is None or steps is None or too_large
        return
    assert expected is not None
    assert (bytes(small[0]), *small[1:]) == (
        bytes(expected.record), expected.stream, expected.program, expected.literals, expected.body_bytes
    )  # fmt: skip
    if n_bytes is not None:
        assert expected.body_bytes <= n_bytes <= expected.body_bytes + 8 * len(small[3]) + (expected.body_bytes >> 6)
    read = execute_small(small[0], words.nbytes, None)
    assert read is not None
    assert np.array_equal(read[0], words)
    with general_path():
        assert np.array_equal(execute(small[0], n_bytes=words.nbytes), words)


@pytest.mark.parametrize("n_words", [4096, BLOCK_WORDS // 2, BLOCK_WORDS, BLOCK_WORDS + 999, 3 * BLOCK_WORDS])
@pytest.mark.parametrize(
    "text",
    [
        "lit",
        "merge[3,13](lit, rans)",
        "merge[6,9,1](bitpack, huffman, rans)",
        "merge[8,8](raw, huffman)",
        "scan_add[1](raw, lit)",
    ],
)
def test_blocks(text: str, n_words: int) -> None:
    words = (np.random.default_rng(n_words).standard_normal(n_words).astype("<f4").view("<u4") >> 16).astype("<u2")
    expected = generally(parse(text), words)
    small = encode_small(parse(text), words, operators.run.digest_of(words), None)
    assert expected is not None
    assert small is not None
    assert bytes(small[0]) == bytes(expected.record)
    assert np.array_equal(execute(small[0]), words)


@pytest.mark.parametrize("is_general", [False, True])
def test_encodings_that_are_chosen_are_checked(is_general: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program within the limits may need more than they allow with the encodings of its literals."""
    words = np.tile(np.random.default_rng(2).integers(0, 1 << 16, 90).astype(np.uint16), 90)  # LZ has a window
    program = parse("merge[8,8](lit, lit)")
    undecided = scratch_bytes(program, Stream(16, words.size))
    monkeypatch.setattr(limits, "SCRATCH_FIXED_BYTES", undecided - 2 * words.nbytes)
    with general_path() if is_general else nullcontext(), pytest.raises(LimitError):
        encode(program, words)


@pytest.mark.parametrize("is_general", [False, True])
def test_records_beyond_the_limit_are_refused(is_general: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.arange(900, dtype=np.uint16)
    written = encode(parse("lit"), words)
    assert written is not None
    for module in (limits, operators.fields):
        monkeypatch.setattr(module, "RECORD_BYTES", len(written.record) - 1)
    with general_path() if is_general else nullcontext(), pytest.raises(LimitError, match="record"):
        execute(written.record)


def test_programs_are_counted_together_as_one_by_one() -> None:
    words = (np.random.default_rng(1).standard_normal(900).astype("<f4").view("<u4") >> 16).astype("<u2")
    texts = (
        "merge[7,8,1](lit, lit, lit)", "merge[8,8](raw, lit)", "merge[7,8,1](bitpack, lz, bitpack)",
        "merge[8,8](lit, scan_xor[1](lit, rans))", "const[7]", "merge[6,9,1](bitpack, huffman, bitpack)",
    )  # fmt: skip
    programs = [*map(parse, texts)]
    alone = [payload_bytes([program], words) for program in programs]
    assert [one is None for (one,) in alone] == [False, False, True, False, True, False]
    for some in (programs, programs[:4], programs[2:3], programs[4:], []):
        assert payload_bytes(some, words) == [alone[programs.index(program)][0] for program in some]


@pytest.mark.parametrize("n_words", [0, MOST_WORDS + 1])
def test_what_is_not_small_is_left_to_the_general_path(n_words: int) -> None:
    words = np.arange(n_words, dtype="<u2") % 7
    assert steps_of(LIT, 16, n_words) is None
    assert payload_bytes([LIT], words) == [None]
    encoded = encode(LIT, words)
    assert encoded is not None
    assert execute_small(encoded.record, None, None) is None


@pytest.mark.parametrize(
    "text",
    [
        "lz", "xor[9](lz)", "zigzag(rans)", "const[7]", "merge[8,8](const[1], scaled[16,1,2,1,2,2])",
        "merge[5,11](lz, bitpack)", "scan_add[64](raw, huffman)", "scaled[16,5,2,1,2,2]", "merge[8,8](lz, lz)",
        "scan_xor[1](bitpack, scan_add[3](raw, lz))", "scaled_huffman[16,5,2,1,2,2]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("n_words", [4096, 20_000])
def test_literals_of_other_encodings_come_between(text: str, n_words: int) -> None:
    words = (np.random.default_rng(n_words).standard_normal(n_words).astype("<f4").view("<u4") >> 16).astype("<u2")
    if text.startswith("merge[5,11](lz"):
        words = np.resize(words[:100], n_words)
    if text == "const[7]":
        words[:] = 7
    if "const[1]" in text:
        words = (words & 0xFF00) | 1
    program = parse(text)
    expected = generally(program, words)
    small = encode_small(program, words, operators.run.digest_of(words), None)
    assert expected is not None
    assert small is not None
    assert (bytes(small[0]), *small[1:]) == (
        bytes(expected.record), expected.stream, expected.program, expected.literals, expected.body_bytes
    )  # fmt: skip
    read = execute_small(small[0], words.nbytes, None)
    assert read is not None
    assert np.array_equal(read[0], words)


@pytest.mark.parametrize("text", ["gray(lit)", "deal[1,1](lit, lit)", "repeat[16](lit)", "unpack[8](lit)"])
def test_other_programs_are_left_to_the_general_path(text: str) -> None:
    assert steps_of(parse(text), 16, 256) is None


@pytest.mark.parametrize("text", ["merge[8,9](lit, lit)", "merge[4,4](lit, lit)"])
def test_programs_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(DamageError):
        encode(parse(text), np.zeros(10, "<u2"))


@given(data=st.data(), words=weights().filter(lambda words: words.size < 1000))
@settings(max_examples=300)
def test_damage_never_reads_as_other_words(data: st.DataObject, words: Words) -> None:
    names = (*PLAIN[1:], "lz")
    program = data.draw(trees(words, 8 * words.itemsize, names, depth=2))
    encoded = generally(program, words)
    if encoded is None:
        return
    record = bytes(encoded.record)
    damaged = data.draw(damage(record))
    # The digest of the words is left out of it: what one path takes for words, the other has to as well.
    small = execute_small(damaged, None, None)
    if small is not None:
        parsed = take_record(damaged)
        general = parsed.stream.empty()
        open_source(parsed).read(general)
        assert np.array_equal(small[0], general)
    with suppress(ArchiveError):
        assert np.array_equal(execute(damaged), words)


@pytest.mark.parametrize("text", ["merge[6,9,1](bitpack, huffman, rans)", "merge[8,8](raw, huffman)"])
def test_every_flipped_byte_and_every_cut_is_found(text: str) -> None:
    words = (np.random.default_rng(5).standard_normal(200).astype("<f4").view("<u4") >> 16).astype("<u2")
    encoded = encode(parse(text), words)
    assert encoded is not None
    record = bytes(encoded.record)
    for position in range(len(record)):
        flipped = record[:position] + bytes((record[position] ^ 0x11,)) + record[position + 1 :]
        for damaged in (flipped, record[:position], record + flipped[position:]):
            with pytest.raises(ArchiveError):
                execute(damaged)


def test_the_caller_says_what_a_record_holds() -> None:
    words = np.arange(300, dtype="<u2") % 11
    encoded = encode(parse("merge[4,12](huffman, bitpack)"), words)
    assert encoded is not None
    out = np.empty(600, np.uint8)
    assert np.shares_memory(execute(encoded.record, n_bytes=600, digest=operators.run.digest_of(words), out=out), out)
    for wrong in ({"n_bytes": 602}, {"out": np.empty(602, np.uint8)}, {"digest": bytes(32)}):
        with pytest.raises(DamageError):
            execute(encoded.record, **wrong)


def test_a_buffer_that_is_too_small_is_not_written_to() -> None:
    words = np.arange(3000, dtype="<u2")
    short = np.zeros(100, np.uint8)
    encoded = encode(parse("merge[4,12](lit, lit)"), words, out=short)
    assert encoded is not None
    assert not short.any()
    assert np.array_equal(execute(encoded.record), words)


def test_named_encodings_that_need_more_room_than_words() -> None:
    words = np.random.default_rng(1).permutation(1 << 10).astype("<u2")
    program = parse("merge[10,6](rans, huffman)")
    expected, encoded = generally(program, words), encode(program, words)
    assert expected is not None
    assert encoded is not None
    assert encoded.body_bytes > words.nbytes // 2
    assert bytes(encoded.record) == bytes(expected.record)


@pytest.mark.parametrize("width_bits", WORD_BITS)
def test_unaligned_and_read_only_words(width_bits: int) -> None:
    """H08."""
    data = bytes(1) + np.random.default_rng(2).bytes(width_bits * 32)
    words = np.frombuffer(data, f"<u{width_bits // 8}", offset=1)
    encoded = encode_small(LIT, words, operators.run.digest_of(words), None)
    assert encoded is not None
    assert np.array_equal(execute(encoded[0]), words)


def test_a_planted_fault_is_caught() -> None:
    """A field that is cut one bit too high differs from that of the general path, and does not read as the words."""
    words = np.arange(500, dtype="<u2") * 3
    program = parse("merge[5,11](bitpack, bitpack)")
    good = encode(program, words)
    of = steps_of(program, 16, 500)
    assert good is not None
    assert of is not None
    assert of.down[0, 0] == CUT_SOME
    of.down[0, 2] += 1
    try:
        bad = encode(program, words)
    finally:
        of.down[0, 2] -= 1
    assert bad is not None
    assert bytes(bad.record) != bytes(good.record)
    with pytest.raises(DamageError):
        execute(bad.record)


@given(seed=st.integers(0, 1 << 32), n_values=st.integers(1, 300), n_words=st.integers(64, 3000))
def test_repeats_are_told_from_chance(seed: int, n_values: int, n_words: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, n_values, n_words).astype("<u2")
    window = window_of(np.bincount(words))
    if n_values == 1:
        assert window > n_words
        return
    assert not repeats(words, window)
    again = np.concatenate((words[:500], words[:500]))
    window = window_of(np.bincount(again))
    assert repeats(again, window) or 2 * window > again.size


@given(words=weights())
def test_the_choice_is_that_of_all_plans(words: Words) -> None:
    if words.itemsize > 2:
        words = words.view("<u2")[:5000]
    width_bits = 8 * words.itemsize
    small = encode_small(LIT, words, bytes(32), None)
    profiler = Profiler(Stream(width_bits, words.size))
    profiler.add(words)
    profile = profiler.finish()
    name, plan = choose(profile)
    assert small is not None
    assert str(small[2]) == name
    is_for_lz = repeats(words, window_of(np.bincount(words)))
    assert payload_bytes([LIT], words) == [None if is_for_lz else plan.n_bytes]
    huffman = Huffman().plan(profile)
    assert huffman is None or payload_bytes([Node(Literal("huffman"))], words) == [huffman.n_bytes]


def test_codes_are_those_of_the_encodings() -> None:
    from operators.registry import ENCODINGS_BY_NAME

    codes = leaves.RAW, leaves.BITPACK, leaves.HUFFMAN, leaves.RANS
    assert codes == tuple(ENCODINGS_BY_NAME[name].code for name in PLAIN[1:])
