"""The path that writes block by block, against one that makes all targets first; words that are lent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import BLOCK_WORDS, Conditioned, Encoding, Operator, Source, Stream
from operators.errors import FormatError
from operators.kernels.fields import fields_of, join_fields, split_fields
from operators.literals.profile import Profiler, choose
from operators.ops.merge import Merge
from operators.program import Literal, Node, parse
from operators.record import record_head, take_record
from operators.registry import ENCODINGS_BY_NAME
from operators.run import Encoded, digest_of, encode, execute, open_source
from operators.words import Words, container, mask_of
from tests.operators.test_registry import EVERY_OPERATOR, PIECES, ArraySource, assert_same, read_in_pieces
from tests.strategies import Case, applications, cases

SCALED = "scaled[64,5,2,1,2,1]"
PROGRAMS = (
    f"merge[16,16](raw, {SCALED})",
    f"merge[8,8,16](raw, raw, {SCALED})",
    f"merge[8,8,16](huffman, raw, {SCALED})",
    f"merge[16,16](merge[1,15](rans, bitpack), {SCALED})",
    f"rotate[16](merge[16,16]({SCALED}, raw))",
    "merge[16,16](raw, rotate[1](scaled_huffman[64,4,2,1,2,1]))",
    f"merge[16,16](deal[1,1](raw, lit), {SCALED})",
    f"partition[64,MARKED,16](lz, merge[16,16](raw, {SCALED}), merge[16,16](huffman, {SCALED}))",
    "partition[64,MARKED,16](lit, lit, merge[16,16](const[0], lit))",
    "partition[1,ZEROS,32](bitpack, merge[8,24](raw, lit), const[0])",
    "merge[13,8,10,1](bitpack, raw, huffman, bitpack)",
    "xor[77](merge[16,16](lit, xor[5](merge[7,9](lit, huffman))))",
    "scan_xor[64](lit, merge[6,26](rans, lit))",
    "merge[16,16](lz, raw)",
    "merge[8,24](raw, const[1])",
    "raw",
)


def f32(n_words: int) -> Words:
    """Return words of an F32 matrix with rows of 64; a tenth of them end in 16 zeros, some words are zero."""
    rng = np.random.default_rng(31)
    words = (rng.standard_normal(n_words) * 0.02).astype("<f4").view("<u4")
    rows = words[: n_words // 64 * 64].reshape(-1, 64)
    rows[rng.random(len(rows)) < 0.1] &= np.uint32(0xFFFF0000)
    words[rng.random(n_words) < 0.01] = 0
    words[0] = 0
    return words


def plain_record(program: Node, words: Words) -> bytes | None:
    """Return the record of `program` by way of all targets of all nodes, one after the other."""
    literals: list[Literal] = []
    payloads: list[bytes] = []

    def visit(node: Node, words: Words, stream: Stream) -> bool:
        if not isinstance(node.op, Literal):
            targets = node.op.targets(words, stream)
            pairs = zip(node.children, targets or (), node.op.children(stream), strict=targets is not None)
            return targets is not None and all(visit(*each) for each in pairs)
        literals.append(node.op)
        coder = node.op.coder if node.op.encoding else None
        if isinstance(coder, Conditioned):
            out = np.zeros(words.nbytes, np.uint8)
            n_bytes = coder.write(words, out)
            payloads.append(out[: max(n_bytes, 0)].tobytes())
            return n_bytes >= 0
        profiler = Profiler(stream, node.op.encoding)
        for block in blocks(words):
            profiler.add(block)
        profile = profiler.finish()
        if isinstance(coder, Encoding):
            plan = coder.plan(profile)
            assert plan is not None
        else:
            name, plan = choose(profile)
            literals[-1] = Literal(name)
        writer = plan.writer()
        for block in blocks(words):
            writer.add(block)
        payloads.append(bytes(writer.finish()))
        return True

    stream = Stream(8 * words.itemsize, words.size)
    if not visit(program, words, stream):
        return None
    head = record_head(stream, program.with_literals(iter(literals)), digest_of(words), list(map(len, payloads)))
    return bytes(head) + b"".join(payloads)


def blocks(words: Words) -> Iterator[Words]:
    for start in range(0, words.size, BLOCK_WORDS):
        yield words[start : start + BLOCK_WORDS]


@pytest.mark.parametrize("n_words", [640, 8192, 2 * BLOCK_WORDS + 64])
@pytest.mark.parametrize("text", PROGRAMS)
def test_blocks_are_written_as_whole_streams_are(text: str, n_words: int) -> None:
    words = f32(n_words)
    n_marked = int(((words.reshape(-1, 64) & 0xFFFF) == 0).all(axis=1).sum())
    program = parse(text.replace("MARKED", str(n_marked)).replace("ZEROS", str(int((words == 0).sum()))))
    words.flags.writeable = False
    expected = plain_record(program, words)
    assert expected is not None or n_words == 640 or "const[1]" in text
    # The bytes are the same in buffers that are large enough, and too small for one payload or another.
    rooms = [2 * words.nbytes + 4096, words.nbytes // 2 + 200, words.nbytes // 5, 0]
    for out in (None, *(np.full(n_bytes, 0xA5, np.uint8) for n_bytes in rooms)):
        encoded = encode(program, words, out=out)
        assert (encoded is None) == (expected is None)
        if encoded is not None:
            assert bytes(encoded.record) == expected
            assert encoded.body_bytes == sum(map(len, take_record(encoded.record).payloads))
            assert_same(execute(encoded.record), words)


@EVERY_OPERATOR
@given(case=cases(), pieces=PIECES)
def test_late_targets_are_the_targets(operator: type[Operator], case: Case, pieces: list[int]) -> None:
    words, stream = case.words, case.stream
    for op in applications(operator, case):
        targets, late = op.targets(words, stream), op.late_targets(words, stream)
        assert targets is not None
        assert late is not None
        for target, later, child in zip(targets, late, op.children(stream), strict=True):
            if isinstance(later, np.ndarray):
                assert_same(later, target)
            else:
                for _ in range(2):
                    assert_same(read_in_pieces(later.source(), child, pieces), target)


def taken_in_pieces(source: Source, stream: Stream, pieces: Sequence[int]) -> Words:
    """As `read_in_pieces`, but by `Source.take`, each piece into a new scratch."""
    taken, done = [stream.empty()[:0]], 0
    while done < stream.n_words:
        scratch = np.empty(min(pieces[len(taken) % len(pieces)], stream.n_words - done), container(stream.width_bits))
        taken.append(source.take(scratch).copy())
        done += scratch.size
    return np.concatenate(taken)


@cache
def small_record(text: str) -> Encoded:
    encoded = encode(parse(text), f32(8192))
    assert encoded is not None
    return encoded


@given(st.sampled_from(PROGRAMS[:7]), st.lists(st.integers(99, 9000), min_size=1, max_size=3), st.booleans())
def test_words_are_lent_as_they_are_read(text: str, pieces: list[int], is_odd: bool) -> None:
    words, encoded = f32(8192), small_record(text)
    # In one of the two payloads are unaligned. Bytes: whoever writes to what is lent fails.
    record = memoryview(bytes(is_odd) + bytes(encoded.record))[is_odd:]
    for get in (read_in_pieces, taken_in_pieces):
        assert_same(get(open_source(take_record(record)), encoded.stream, pieces), words)


@pytest.mark.parametrize("width_bits", [8, 16, 32, 64])
@pytest.mark.parametrize("start", [0, 1])
def test_raw_words_are_lent_where_they_are_aligned(width_bits: int, start: int) -> None:
    words = np.arange(100, dtype=f"u{width_bits // 8}")
    memory = np.zeros(words.nbytes + 1, np.uint8)
    memory[start : start + words.nbytes] = words.view(np.uint8)
    source = ENCODINGS_BY_NAME["raw"].source(memory[start : start + words.nbytes].data, Stream(width_bits, 100))
    scratch = np.empty(60, words.dtype)
    taken = source.take(scratch)
    assert_same(taken, words[:60])
    is_aligned = width_bits == 8 or start == 0
    assert np.shares_memory(taken, memory if is_aligned else scratch)
    with pytest.raises(FormatError, match="a read of at most"):
        source.take(scratch)


@given(
    st.sampled_from((8, 16, 32, 64)),
    st.lists(st.integers(1, 63), min_size=1, max_size=8),
    st.integers(0, 99),
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_fields_are_split_and_joined(width_bits: int, cuts: list[int], n_words: int, wanted: list[bool]) -> None:
    cuts = sorted({cut for cut in cuts if cut < width_bits} | {width_bits // 2})
    widths = [stop - start for start, stop in pairwise((0, *cuts, width_bits))]
    values = np.random.default_rng(n_words).integers(0, mask_of(width_bits), n_words, np.uint64, endpoint=True)
    words = values.astype(f"u{width_bits // 8}")
    fields = fields_of(widths)
    expected = [((words >> shift) & mask_of(width)).astype(container(width)) for shift, width in fields]
    some = [index for index in range(len(fields)) if wanted[index % 9]]
    out = [np.full_like(expected[index], 0xA5) for index in some]
    split_fields(words, [fields[index] for index in some], out)
    for index, field in zip(some, out, strict=True):
        assert_same(field, expected[index])
    joined = np.full_like(words, 0xA5)
    join_fields(expected, widths, joined)
    assert_same(joined, words)


def test_merges_of_merges_join_once() -> None:
    children = [ArraySource(np.arange(9, dtype=np.uint8) % 4) for _ in range(3)]
    inner = Merge((2, 2)).source(children[:2], Stream(4, 9))
    source = Merge((4, 4)).source([inner, children[2]], Stream(8, 9))
    assert source.children == children  # type: ignore[attr-defined]
