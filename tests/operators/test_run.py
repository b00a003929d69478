"""Records: every program that can produce the words restores them, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import BLOCK_WORDS
from operators.errors import ArchiveError, DamageError, DigestError, FormatError, UnsupportedError
from operators.program import LIT, parse
from operators.record import (
    PACK_FOOTER_BYTES,
    PACK_HEADER_BYTES,
    index_range,
    pack_footer,
    pack_header,
    take_record,
)
from operators.run import digest_of, encode, execute
from operators.words import DTYPES, Words, words_of

NOISE = np.random.default_rng(7)
SIZES = (0, 1, 2, 7, 1000, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 3 * BLOCK_WORDS + 5)


def bf16(n_words: int) -> Words:
    values = (NOISE.standard_normal(n_words) * 0.02).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2")


@pytest.mark.parametrize("n_words", SIZES)
@pytest.mark.parametrize(
    "text",
    [
        "lit",
        "merge[5,10,1](lit, lit, lit)",
        "merge[8,8](lit, lit)",
        "rotate[1](merge[6,10](lit, lit))",
        "merge[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]" + "(" + ", ".join(["lit"] * 16) + ")",
        "unpack[8](lit)",
        "unpack[4](lit)",
        "xor[4660](add[22136](gray(reverse(zigzag(lit)))))",
        "merge[8,8](unpack[4](lit), merge[3,5](gray(lit), lit))",
    ],
)
def test_total_programs_restore_anything(text: str, n_words: int) -> None:
    words = bf16(n_words)
    before = words.copy()
    words.flags.writeable = False
    encoded = encode(parse(text), words)
    assert encoded is not None
    assert np.array_equal(words, before)
    assert np.array_equal(execute(encoded.record, n_bytes=words.nbytes), words)
    assert encode(parse(str(encoded.program)), words) == encoded


@pytest.mark.parametrize("n_words", [0, 5, 1000, 3 * BLOCK_WORDS + 5])
@pytest.mark.parametrize("text", ["lit", "merge[5,10,1](lit, lit, lit)", "rotate[1](lit)", "scan_xor[1](lit, lit)"])
def test_records_are_compared_with_what_was_written(text: str, n_words: int) -> None:
    """One that holds other words is found, whatever digest it carries."""
    n_words += 2  # of fewer there is no scan
    words = bf16(n_words)
    encoded = encode(parse(text), words)
    assert encoded is not None
    assert np.array_equal(execute(encoded.record, expected=words), words)
    for at in {0, n_words // 2, n_words - 1}:
        others = words.copy()
        others[at] ^= 1
        lying = encode(parse(text), others, digest_of(words))
        assert lying is not None
        with pytest.raises(DamageError):
            execute(lying.record, n_bytes=words.nbytes, digest=digest_of(words), expected=words.tobytes())
    for wrong in (bf16(n_words + 1), words[: n_words // 2]):
        with pytest.raises(DamageError):
            execute(encoded.record, expected=wrong)


@pytest.mark.parametrize("lag", [1, 2, 7, 1000, BLOCK_WORDS, BLOCK_WORDS + 3])
@pytest.mark.parametrize("name", ["scan_add", "scan_xor"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
def test_scans_of_any_lag(name: str, lag: int, dtype: str) -> None:
    words = words_of(NOISE.bytes((2 * BLOCK_WORDS + 11) * np.dtype(dtype).itemsize), np.dtype(dtype).itemsize * 8)
    encoded = encode(parse(f"{name}[{lag}](lit, zigzag(lit))"), words)
    assert encoded is not None
    assert np.array_equal(execute(encoded.record), words)


def test_sequences_cost_a_few_bytes() -> None:
    ramp = (np.arange(1_000_000, dtype="<u8") * np.uint64(64)) - np.uint64(1000)
    for text, words in [
        ("scan_add[1](lit, const[64])", ramp),
        ("const[3]", np.full(1_000_000, 3, "<u4")),
        ("repeat[2](lit)", np.tile(np.array([1, 9], "<u2"), 500_000)),
        ("concat[700000](const[1], const[2])", np.repeat(np.array([1, 2], "<u1"), [700_000, 300_000])),
        ("repeat[500000](concat[499999](const[4], lit))", np.tile(np.array([4] * 499_999 + [8], "<u2"), 2)),
    ]:
        encoded = encode(parse(text), words)
        assert encoded is not None
        assert len(encoded.record) < 80
        assert np.array_equal(execute(encoded.record), words)


@pytest.mark.parametrize("text", ["const[1]", "repeat[3](lit)", "dictionary[2](lit, lit)"])
def test_partial_operators_refuse_other_words(text: str) -> None:
    assert encode(parse(text), np.array([1, 2, 3, 4, 5], "<u2")) is None


def test_dictionary() -> None:
    values = np.sort(NOISE.choice(1 << 32, 300, replace=False).astype("<u4"))
    words = values[NOISE.integers(0, 300, BLOCK_WORDS + 99)]
    encoded = encode(parse("dictionary[300](lit, lit)"), words)
    assert encoded is not None
    assert len(encoded.record) < words.size * 9 / 8 + 2000
    assert np.array_equal(execute(encoded.record), words)


@given(st.sampled_from(sorted(DTYPES)), st.binary(max_size=256))
def test_every_dtype_is_words(name: str, data: bytes) -> None:
    word_bytes = DTYPES[name].word_bits // 8
    data = data[: len(data) // word_bytes * word_bytes]
    words = words_of(data, DTYPES[name].word_bits)
    encoded = encode(LIT, words)
    assert encoded is not None
    assert execute(encoded.record).tobytes() == data


def test_unaligned_input() -> None:
    """H08."""
    data = bytes(1) + bf16(1000).tobytes()
    words = words_of(memoryview(data)[1:], 16)
    encoded = encode(parse("merge[5,10,1](lit, lit, lit)"), words)
    assert encoded is not None
    assert execute(encoded.record).tobytes() == data[1:]


def test_random_words_hardly_grow() -> None:
    for dtype in ("u1", "u2", "u4", "u8"):
        words = np.frombuffer(NOISE.bytes(80_000), np.dtype(dtype))
        encoded = encode(LIT, words)
        assert encoded is not None
        assert len(encoded.record) <= words.nbytes + 64


@pytest.fixture(scope="module")
def record() -> bytes:
    encoded = encode(parse("rotate[1](merge[6,10](lit, scan_xor[3](lit, lit)))"), bf16(600))
    assert encoded is not None
    return bytes(encoded.record)


def test_every_flipped_bit_is_noticed(record: bytes) -> None:
    for position in range(len(record)):
        for bit in range(8):
            damaged = bytearray(record)
            damaged[position] ^= 1 << bit
            with pytest.raises((DamageError, UnsupportedError)):
                execute(damaged, n_bytes=1200)


def test_every_truncation_is_noticed(record: bytes) -> None:
    for length in range(len(record)):
        with pytest.raises(ArchiveError):
            execute(record[:length])


def test_foreign_bytes_are_refused(record: bytes) -> None:
    with pytest.raises(FormatError):
        execute(record, n_bytes=1202)
    with pytest.raises(FormatError):
        execute(record + b"\0")
    with pytest.raises(UnsupportedError):
        execute(record[:4] + b"\x63" + record[5:])
    wrong = bytearray(record)
    start = bytes(record).index(take_record(record).digest)
    wrong[start] ^= 1
    with pytest.raises(DigestError):
        execute(wrong)


def test_pack_frame() -> None:
    body = pack_header() + b"records" + b"index"
    pack = body + pack_footer(PACK_HEADER_BYTES + 7, 5)
    start, stop = index_range(pack[:PACK_HEADER_BYTES], pack[-PACK_FOOTER_BYTES:], len(pack))
    assert pack[start:stop] == b"index"
    for position in [*range(PACK_HEADER_BYTES), *range(len(body), len(pack))]:
        damaged = bytearray(pack)
        damaged[position] ^= 0x81
        with pytest.raises(ArchiveError):
            index_range(damaged[:PACK_HEADER_BYTES], damaged[-PACK_FOOTER_BYTES:], len(damaged))


def test_digest_is_of_bytes() -> None:
    assert digest_of(np.array([1, 2], "<u2")) == digest_of(b"\x01\x00\x02\x00")
    assert digest_of(b"") == digest_of(np.empty(0, "<u4"))
