"""Encodings of literals: round trips, exact plans, the bytes of a plain second implementation, damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.base import BLOCK_WORDS, Encoding, Plan, Stream
from operators.errors import ArchiveError, DamageError, FormatError
from operators.kernels.order0 import order_0_q16
from operators.literals import lz
from operators.literals.profile import LZ_GAIN, RANS_GAIN, Profiler, choose
from operators.registry import ENCODINGS, ENCODINGS_BY_NAME
from operators.words import Words, container
from tests.cases import noise
from tests.operators import oracle
from tests.strategies import KINDS, Case, cases, make_words

NAMES = sorted(ENCODINGS_BY_NAME)
ROOT = Path(__file__).parents[2]


def blocks(words: Words) -> list[Words]:
    return [words[start : start + BLOCK_WORDS] for start in range(0, words.size, BLOCK_WORDS)]


def plan_of(encoding: Encoding, words: Words, stream: Stream) -> Plan | None:
    profiler = Profiler(stream)
    for block in blocks(words):
        profiler.add(block)
    return encoding.plan(profiler.finish())


def payload_of(plan: Plan, words: Words) -> bytes:
    writer = plan.writer()
    for block in blocks(words):
        writer.add(block)
    return bytes(writer.finish())


def decode(encoding: Encoding, payload: bytes, stream: Stream, pieces: int = BLOCK_WORDS) -> Words:
    source = encoding.source(memoryview(payload), stream)
    words = stream.empty()
    for start in range(0, words.size, pieces):
        source.read(words[start : start + pieces])
    return words


def encoded(encoding: Encoding, words: Words, stream: Stream) -> bytes | None:
    """Encode, check the plan and that nothing was written to the words, decode."""
    before = words.tobytes()
    plan = plan_of(encoding, words, stream)
    if plan is None:
        return None
    payload = payload_of(plan, words)
    # A block leaves at most 7 bits in each of 4 streams; a lane of rANS ends in 3 to 4 bytes.
    slack = 8 * len(blocks(words)) if encoding.name == "huffman" else 0
    if encoding.name == "rans":
        slack = 2 * 64 + 8 + len(payload) // 1024
    assert plan.n_bytes - slack <= len(payload) <= plan.n_bytes
    decoded = decode(encoding, payload, stream)
    np.testing.assert_array_equal(decoded, words)
    assert words.tobytes() == before
    return payload


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(widths=tuple(range(1, 65))), pieces=st.integers(1, 4000))
def test_any_words_come_back_in_pieces_of_any_size(name: str, case: Case, pieces: int) -> None:
    encoding = ENCODINGS_BY_NAME[name]
    payload = encoded(encoding, case.words, case.stream)
    if payload is not None:
        np.testing.assert_array_equal(decode(encoding, payload, case.stream, pieces), case.words)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_words", [0, 1, 2, 7, 4095, 4096, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1])
@pytest.mark.parametrize("width_bits", [1, 4, 8, 10, 16, 24, 64])
def test_edges_of_blocks(name: str, n_words: int, width_bits: int) -> None:
    words = make_words("skewed", width_bits, n_words, 7)
    encoded(ENCODINGS_BY_NAME[name], words, Stream(width_bits, n_words))


@pytest.mark.parametrize("name", ["bitpack", "huffman", "rans"])
def test_several_blocks_and_their_shorter_last_one(name: str) -> None:
    n_words = 3 * BLOCK_WORDS + 5003
    for width_bits in (6, 10):
        words = make_words("skewed", width_bits, n_words, 11)
        assert encoded(ENCODINGS_BY_NAME[name], words, Stream(width_bits, n_words)) is not None


def test_a_second_run_of_rans() -> None:
    n_words = oracle.RUN_WORDS + 5000
    words = make_words("skewed", 8, n_words, 3)
    encoded(ENCODINGS_BY_NAME["rans"], words, Stream(8, n_words))


@given(case=cases(widths=(1, 2, 3, 5, 8, 9, 12, 16)))
def test_bytes_are_those_of_the_plain_implementation(case: Case) -> None:
    words = [int(word) for word in case.words]
    assert encoded(ENCODINGS_BY_NAME["bitpack"], case.words, case.stream) == oracle.bitpack(
        words, case.stream.width_bits
    )
    payload = encoded(ENCODINGS_BY_NAME["huffman"], case.words, case.stream)
    if payload is not None:
        assert payload == oracle.huffman(words)
    payload = encoded(ENCODINGS_BY_NAME["rans"], case.words, case.stream)
    if payload is not None:
        assert payload == oracle.rans(words, payload[0])


@pytest.mark.parametrize(("width_bits", "n_words"), [(5, 4099), (10, 6000), (8, 70001)])
def test_bytes_of_split_blocks_and_many_lanes(width_bits: int, n_words: int) -> None:
    words = make_words("skewed", width_bits, n_words, 5) + make_words("few", width_bits, n_words, 6)
    words &= (1 << width_bits) - 1
    plain = [int(word) for word in words]
    stream = Stream(width_bits, n_words)
    assert encoded(ENCODINGS_BY_NAME["huffman"], words, stream) == oracle.huffman(plain)
    payload = encoded(ENCODINGS_BY_NAME["rans"], words, stream)
    assert payload is not None
    assert payload == oracle.rans(plain, payload[0])


def test_codes_longer_than_the_primary_table() -> None:
    """Counts that double give lengths up to the limit: the slow path of the decoder."""
    words = np.repeat(np.arange(18, dtype=np.uint16) * 57, 1 << np.arange(18))
    words = np.random.default_rng(1).permutation(words)
    for n_words in (words.size, 3000):
        part, stream = words[:n_words], Stream(10, n_words)
        payload = encoded(ENCODINGS_BY_NAME["huffman"], part, stream)
        assert payload == oracle.huffman([int(word) for word in part])


def test_codes_of_all_lengths_side_by_side() -> None:
    rng = np.random.default_rng(2)
    words = np.concatenate((rng.permutation(12000), rng.permutation(12000), np.minimum(rng.geometric(0.5, 60000), 99)))
    words = rng.permutation(words.astype(np.uint16))
    payload = encoded(ENCODINGS_BY_NAME["huffman"], words, Stream(16, words.size))
    assert payload == oracle.huffman([int(word) for word in words])


@pytest.mark.parametrize("name", NAMES)
def test_words_of_every_alignment_and_read_only(name: str) -> None:
    encoding, stream = ENCODINGS_BY_NAME[name], Stream(16, 5000)
    words = make_words("skewed", 16, 5000, 2)
    payload = encoded(encoding, words, stream)
    assert payload == encoded(encoding, words.copy(), stream)
    if payload is not None:
        shifted = memoryview(b"x" + payload + b"y")[1:-1]
        source, out = encoding.source(shifted, stream), stream.empty()
        source.read(out)
        np.testing.assert_array_equal(out, words)


def test_small_literals_carry_no_overhead() -> None:
    words = np.arange(10, dtype=np.uint8)
    assert len(encoded(ENCODINGS_BY_NAME["raw"], words, Stream(8, 10)) or b"") == 10
    assert len(encoded(ENCODINGS_BY_NAME["bitpack"], words, Stream(8, 10)) or b"") == 5
    assert encoded(ENCODINGS_BY_NAME["bitpack"], np.zeros(1000, np.uint8), Stream(8, 1000)) == b""


@pytest.mark.parametrize("width_bits", [8, 10, 16])
def test_tables_cost_a_byte_per_word_or_less(width_bits: int) -> None:
    rng = np.random.default_rng(4)
    normal = np.clip(rng.normal(1 << (width_bits - 1), 1 << (width_bits - 5), 1 << 16), 0, (1 << width_bits) - 1)
    scattered = rng.permutation(1 << width_bits)[: 1 << (width_bits - 3)]
    scattered = scattered[rng.integers(0, scattered.size, 1 << 16)]
    for values in (normal, scattered):
        words = values.astype(container(width_bits))
        stream = Stream(width_bits, words.size)
        live = np.unique(words).size
        plans: list[Any] = [plan_of(ENCODINGS_BY_NAME[name], words, stream) for name in ("huffman", "rans")]
        assert len(plans[0].table) <= live + 4
        # A frequency has up to 13 bits below its leading one.
        assert plans[1] is None or len(plans[1].head) <= 2 * live + 4


def test_choice_is_the_smallest_within_the_margins() -> None:
    rng = np.random.default_rng(5)
    for words, width_bits, name in (
        (np.zeros(500, np.uint8), 8, "bitpack"),
        (rng.integers(0, 256, 5000).astype(np.uint8), 8, "raw"),
        (rng.integers(0, 32, 5000).astype(np.uint8), 8, "bitpack"),
        (rng.geometric(0.5, 50000).astype(np.uint8), 8, "huffman"),
        (np.minimum(rng.geometric(0.95, 50000), 9).astype(np.uint8), 8, "rans"),
        (np.tile(rng.integers(0, 256, 700).astype(np.uint8), 90), 8, "lz"),
    ):
        stream = Stream(width_bits, words.size)
        profiler = Profiler(stream)
        profiler.add(words)
        profile = profiler.finish()
        chosen, plan = choose(profile)
        assert chosen == name
        sizes = {other.name: made.n_bytes for other in ENCODINGS.values() if (made := other.plan(profile)) is not None}
        assert plan.n_bytes <= min(sizes.values()) * (1 + 1 / LZ_GAIN) * (1 + 1 / RANS_GAIN) + 1


# -- damage -----------------------------------------------------------------------------------------


def assert_refused_or_decoded(encoding: Encoding, payload: bytes, stream: Stream) -> None:
    try:
        decode(encoding, payload, stream)
    except DamageError:
        return


SAMPLES = [
    (name, kind, width_bits, n_words)
    for name in NAMES
    for kind, width_bits, n_words in (("skewed", 8, 300), ("few", 10, 5000), ("periodic", 16, 4096))
]


@pytest.mark.parametrize(("name", "kind", "width_bits", "n_words"), SAMPLES)
@settings(max_examples=150)
@given(data=st.data())
def test_damaged_payloads_are_refused_or_decode(
    name: str, kind: str, width_bits: int, n_words: int, data: st.DataObject
) -> None:
    encoding, stream = ENCODINGS_BY_NAME[name], Stream(width_bits, n_words)
    plan = plan_of(encoding, make_words(kind, width_bits, n_words, 1), stream)
    if plan is None:
        return
    payload = bytearray(payload_of(plan, make_words(kind, width_bits, n_words, 1)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, min(40, len(payload) - 1)), st.integers(0, len(payload) - 1)))
        payload[at] ^= data.draw(st.integers(1, 255))
    assert_refused_or_decoded(encoding, bytes(payload), stream)
    assert_refused_or_decoded(encoding, bytes(payload[: data.draw(st.integers(0, len(payload)))]), stream)


@pytest.mark.parametrize("name", NAMES)
@given(payload=st.binary(max_size=300), case=cases())
def test_arbitrary_payloads_are_refused_or_decode(name: str, payload: bytes, case: Case) -> None:
    assert_refused_or_decoded(ENCODINGS_BY_NAME[name], payload, case.stream)


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_and_any_more_bytes_are_refused(name: str) -> None:
    encoding = ENCODINGS_BY_NAME[name]
    for kind, n_words in (("skewed", 97), ("periodic", 5000)):
        stream = Stream(16, n_words)
        plan = plan_of(encoding, make_words(kind, 16, n_words, 1), stream)
        if plan is None:
            continue
        payload = payload_of(plan, make_words(kind, 16, n_words, 1))
        lengths = range(len(payload)) if len(payload) < 500 else range(0, len(payload), 37)
        shorter = [payload[:n] for n in lengths]
        for damaged in (*shorter, payload + b"\0", payload + payload):
            if name == "bitpack" and len(damaged) * 8 // n_words != len(payload) * 8 // n_words:
                continue  # the length is the width
            with pytest.raises(DamageError):
                decode(encoding, damaged, stream)


@pytest.mark.parametrize("name", ["bitpack", "huffman", "rans"])
def test_every_flip_of_a_bit_changes_the_words_or_is_refused(name: str) -> None:
    """No two payloads decode to the same words: no bit is without a meaning."""
    stream = Stream(7, 901)
    words = make_words("skewed", 7, 901, 1)
    payload = encoded(ENCODINGS_BY_NAME[name], words, stream)
    assert payload is not None
    for at in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[at >> 3] ^= 1 << (at & 7)
        try:
            decoded = decode(ENCODINGS_BY_NAME[name], bytes(damaged), stream)
        except DamageError:
            continue
        assert not np.array_equal(decoded, words), at


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_coded_by_no_bytes_alone(name: str) -> None:
    encoding = ENCODINGS_BY_NAME[name]
    payloads = [
        payload_of(plan, words)
        for words in (np.zeros(9, np.uint8), np.arange(9, dtype=np.uint8))
        if (plan := plan_of(encoding, words, Stream(8, 9))) is not None
    ]
    for payload in [*payloads, b"\0", b"\0" * 9]:
        if payload:
            with pytest.raises(FormatError):
                encoding.source(memoryview(payload), Stream(8, 0))
    if name in ("raw", "bitpack"):
        assert not decode(encoding, b"", Stream(8, 0)).size


def test_frames_beyond_the_promise_are_refused() -> None:
    encoding, stream = ENCODINGS_BY_NAME["lz"], Stream(8, 1000)

    def frame(n_bytes: int, **options: int) -> bytes:
        parameters = zstandard.ZstdCompressionParameters.from_level(3, **{"write_content_size": 1, **options})
        return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(n_bytes))

    assert not decode(encoding, frame(1000), stream).any()
    bomb = frame(1 << 24)
    for payload in (
        frame(999),
        bomb,
        frame(1000, write_content_size=0),
        frame(1000, write_checksum=1),
        frame(1000) + frame(1000),
        frame(1000) + frame(0),
        frame(1000) + b"\x50\x2a\x4d\x18" + bytes(4),  # a skippable frame
        # A frame that lies: it states 1000 bytes, but its blocks hold 16 MiB.
        b"\x28\xb5\x2f\xfd\x60" + (1000 - 256).to_bytes(2, "little") + bomb[10:],
    ):
        with pytest.raises(FormatError):
            decode(encoding, payload, stream)
    with pytest.raises(FormatError):
        decode(encoding, zstandard.ZstdCompressor().compress(b"\x10" * 1000), Stream(4, 1000))
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=28, write_content_size=True)
    compressor = zstandard.ZstdCompressor(compression_params=window).compressobj()
    with pytest.raises(FormatError):
        decode(encoding, compressor.compress(bytes(1000)) + compressor.flush(), stream)


def test_lz_gives_up_on_what_only_starts_well() -> None:
    words = np.random.default_rng(1).integers(0, 16, 40 * BLOCK_WORDS).astype(np.uint8)
    for n_good, n_most in ((lz.TRIAL_BYTES, 2), (BLOCK_WORDS, 3)):
        words[:n_good] = 0
        trial = lz.LzTrial(Stream(8, words.size))
        n_started = 0
        for block in blocks(words):
            trial.add(block)
            n_started += trial._compressor is not None
        assert n_started <= n_most
        assert trial.finish() is None


def test_lz_writes_the_same_whatever_it_wrote_before() -> None:
    """Compressors of a thread are used again, those of literals that come in blocks are not."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 1 + seed % 5, 20 << seed % 13).astype(np.uint8).tobytes() * 3 for seed in range(26)]
    streams = [Stream(8, len(text)) if seed % 2 else Stream(9, len(text) // 2) for seed, text in enumerate(texts)]
    first = [lz.compressor_of(stream).compress(text) for stream, text in zip(streams, texts, strict=True)]
    for index in rng.permutation(len(texts)):
        text, stream = texts[index], streams[index]
        made = lz.compressor_of(stream).compress(text), lz._new_compressor(stream).compress(text)
        assert made == (first[index], first[index])


def test_lz_of_two_literals_in_turn() -> None:
    stream = Stream(8, 3 * BLOCK_WORDS)
    words = [np.resize(np.frombuffer(noise(seed, 4096), np.uint8), stream.n_words) for seed in (1, 2)]
    trials = [lz.LzTrial(stream) for _ in words]
    for pair in zip(*map(blocks, words), strict=True):
        for trial, block in zip(trials, pair, strict=True):
            trial.add(block)
    for trial, whole in zip(trials, words, strict=True):
        payload = trial.finish()
        assert payload is not None
        assert decode(ENCODINGS_BY_NAME["lz"], payload, stream).tobytes() == whole.tobytes()


def test_order_0_is_the_entropy_of_words_or_of_planes() -> None:
    words = np.random.default_rng(3).integers(0, 2000, 999).astype(np.uint16)
    for planes, n_planes in (([words], 1), ([words.view(np.uint8)[k::2] for k in (0, 1)], 2)):
        bits = 0.0
        for plane in planes:
            counts = np.unique(plane, return_counts=True)[1]
            bits += plane.size * np.log2(plane.size) - float(counts @ np.log2(counts))
        found = order_0_q16(words if n_planes == 1 else words.view(np.uint8), n_planes) / 65536
        assert abs(found - bits) < 0.05


def test_reads_beyond_the_end_are_refused() -> None:
    for encoding in ENCODINGS.values():
        stream = Stream(8, 100)
        words = make_words("periodic", 8, 100, 1)
        payload = encoded(encoding, words, stream)
        if payload is not None:
            with pytest.raises(ArchiveError):
                encoding.source(memoryview(payload), stream).read(np.empty(101, np.uint8))


# -- without the JIT ----------------------------------------------------------------------------------

READ_DAMAGE = """
from operators.errors import DamageError
from tests.operators.test_literals import ENCODINGS_BY_NAME, NAMES, Stream, decode, make_words, payload_of, plan_of
refused = 0
for name in NAMES:
    for kind, width_bits, n_words in (("skewed", 8, 90), ("few", 11, 70), ("skewed", 7, 4100)):
        encoding, stream = ENCODINGS_BY_NAME[name], Stream(width_bits, n_words)
        words = make_words(kind, width_bits, n_words, 4)
        plan = plan_of(encoding, words, stream)
        payload = b"" if plan is None else payload_of(plan, words)
        step = 1 if n_words < 100 else len(payload) // 5 + 1
        for at in range(0, len(payload), step):
            flipped = bytearray(payload)
            flipped[at] ^= 0x41
            for damaged in (payload[:at], bytes(flipped)):
                try:
                    decode(encoding, damaged, stream)
                except DamageError:
                    refused += 1
assert refused > 100, refused
"""


def test_interpreted_kernels_stay_inside_damaged_payloads() -> None:
    """Compiled kernels would read beyond an array unseen; interpreted ones check every access."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", READ_DAMAGE], env=environment, cwd=ROOT, check=True)


PRINT_DIGESTS = """
import hashlib
from tests.operators.test_literals import KINDS, NAMES, ENCODINGS_BY_NAME, Stream, encoded, make_words
digest = hashlib.sha256()
for name in NAMES:
    for width_bits in (3, 8, 11, 16, 21, 64):
        for kind in KINDS:
            for n_words in (40, 300):
                words = make_words(kind, width_bits, n_words, 9)
                digest.update(encoded(ENCODINGS_BY_NAME[name], words, Stream(width_bits, n_words)) or b"-")
    words = make_words("skewed", 9, 4200, 9)
    digest.update(encoded(ENCODINGS_BY_NAME[name], words, Stream(9, 4200)) or b"-")
print(digest.hexdigest())
"""


def test_interpreted_kernels_and_those_of_a_plain_cpu_give_the_same_bytes() -> None:
    assert KINDS
    plain_cpu = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    digests = {
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PRINT_DIGESTS],
            env=os.environ | environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for environment in ({"NUMBA_DISABLE_JIT": "0"}, {"NUMBA_DISABLE_JIT": "1"}, plain_cpu)
    }
    assert len(digests) == 1
