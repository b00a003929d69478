"""One search for tensors of one role: who shares, who does not, and what calibration remembers."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from operators.errors import FormatError
from operators.fields import payload_bytes
from operators.kernels.looks import look
from operators.program import Node, parse
from operators.run import Encoded, encode, execute
from operators.words import Words
from synth import Prior
from synth.calibrate import BYTES_PER_EXPANSION, SHUFFLED_TENSORS, TensorSample, calibrate
from synth.prior import Remembered
from synth.roles import MAX_KNOWN, MOST_VAIN, Recalled, Roles, role_of, with_raw_joined
from synth.search import Search
from synth.synthesis import Synthesis
from tests.processes import run
from tests.synth.support import options

ROWS, COLUMNS = 256, 128


def weights(seed: int) -> Words:
    rng = np.random.Generator(np.random.PCG64(seed))
    floats = (rng.standard_normal(ROWS * COLUMNS) * 0.02).astype(np.float32)
    return (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def roles(prior: Prior | None = None, *, share: bool = True) -> Roles:
    return Roles(options(share=share, budget=16), prior or Prior.shipped())


def searched(found: Roles, name: str, words: Words, dtype: str = "BF16", rows: int = ROWS) -> Synthesis:
    """Search `words` and let `found` remember it as a task does."""
    columns = words.size // rows
    program = found.search(words, dtype, rows, columns)
    encoded = encode(program.program, words)
    assert encoded is not None
    found.remember(name, words, dtype, columns if rows > 1 else 0, program, encoded)
    return program


def record_of(recalled: Recalled | None, words: Words) -> Encoded:
    """Return the record of `words` by a program that was recalled, having read it."""
    assert recalled is not None
    encoded = encode(recalled.program, words)
    assert encoded is not None
    assert execute(encoded.record).tobytes() == words.tobytes()
    return encoded


def test_a_tensor_of_the_same_role_takes_the_program_of_the_first() -> None:
    found = roles()
    searched(found, "layer.0.q", weights(0))
    recalled = found.recall("layer.1.q", weights(1), "BF16", COLUMNS)
    record = record_of(recalled, weights(1))
    assert recalled is not None
    assert not recalled.is_missed(record.body_bytes)
    assert recalled.is_missed(2 * record.body_bytes)
    assert str(record.program) == str(recalled.program), "with the encodings that were chosen"


def test_others_do_not() -> None:
    found = roles()
    searched(found, "layer.0.q", weights(0))
    half_zero = weights(1)
    half_zero[::2] = 0
    assert found.recall("layer.0.k", weights(1), "BF16", COLUMNS) is None
    assert found.recall("layer.1.q", weights(1), "F16", COLUMNS) is None
    assert found.recall("layer.1.q", weights(1), "BF16", ROWS) is None
    assert found.recall("layer.1.q", half_zero, "BF16", COLUMNS) is None
    found.clear()
    assert found.recall("layer.1.q", weights(1), "BF16", COLUMNS) is None


def test_without_sharing_nothing_is_remembered() -> None:
    found = roles(share=False)
    searched(found, "layer.0.q", weights(0))
    assert found.recall("layer.1.q", weights(1), "BF16", COLUMNS) is None


def test_calibration_remembers_programs_by_role() -> None:
    sample = TensorSample(weights(0), "BF16", ROWS, COLUMNS, "layer.0.q")
    prior = Prior.load(calibrate([sample], options(), Prior.shipped()).dump())
    assert list(prior.programs) == [role_of("layer.7.q", weights(0), "BF16", COLUMNS)]
    recalled = roles(prior).recall("layer.1.q", weights(1), "BF16", COLUMNS)
    record = record_of(recalled, weights(1))
    assert recalled is not None
    assert not recalled.is_missed(record.body_bytes)
    assert calibrate([sample], options(share=False), Prior.shipped()).programs == {}


def test_calibration_spares_what_teaches_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two orders for the first tensors of a role, one for the others; small tensors have fewer expansions."""
    taken: list[tuple[int, bool, int]] = []
    original = Search.run

    def counted(search: Search, prior: Prior, budget: int, *, shuffle: int | None = None) -> None:
        before = search.expansions
        original(search, prior, budget, shuffle=shuffle)
        taken.append((search.root.stream.n_words, shuffle is not None, search.expansions - before))

    monkeypatch.setattr(Search, "run", counted)
    few = BYTES_PER_EXPANSION * 8
    large = [TensorSample(weights(i), "BF16", ROWS, COLUMNS, f"layer.{i}.q") for i in range(SHUFFLED_TENSORS + 2)]
    calibrate([*large, TensorSample(weights(9)[:few], "BF16", 1, few, "norm")], options(), Prior.shipped())
    orders = [shuffled for n_words, shuffled, _ in taken if n_words == ROWS * COLUMNS]
    assert orders == [False, True] * SHUFFLED_TENSORS + [False, False]
    assert sum(n for n_words, _, n in taken if n_words == few) == 2 * (2 * few // BYTES_PER_EXPANSION)


def test_small_tensors_of_a_dtype_take_the_smallest_of_a_few_programs() -> None:
    found = roles()
    small, noise_like = weights(0)[:700], np.random.default_rng(0).integers(0, 1 << 16, 700).astype(np.uint16)
    assert role_of("a.bias", small, "BF16", 0) == role_of("b.weight", noise_like, "BF16", 0)
    for words in (noise_like, small, noise_like):
        searched(found, "a.bias", words, rows=1)
    for words in (weights(1)[:900], np.random.default_rng(1).integers(0, 1 << 16, 900).astype(np.uint16)):
        alone = found.search(words, "BF16", 1, words.size).program
        expected = encode(alone, words)
        assert expected is not None
        record = record_of(found.recall("b.weight", words, "BF16", 0), words)
        assert record.body_bytes <= expected.body_bytes + 8
    for seed in range(2 * MAX_KNOWN):
        searched(found, "a.bias", weights(seed)[:500], rows=1)
    assert [len(known) for known in found._found.values()] == [MAX_KNOWN]


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("merge[8,8,16](raw, raw, huffman)", "merge[16,16](raw, huffman)"),
        ("merge[16,8,8](huffman, raw, raw)", "merge[16,16](huffman, raw)"),
        ("merge[8,8,8,8](raw, raw, raw, raw)", "raw"),
        ("merge[16,16](merge[8,8](raw, raw), rans)", "merge[16,16](raw, rans)"),
        ("merge[8,16,8](raw, raw, huffman)", "merge[8,16,8](raw, raw, huffman)"),
        ("merge[8,8,16](raw, bitpack, huffman)", "merge[8,8,16](raw, bitpack, huffman)"),
    ],
)
def test_fields_that_are_stored_as_they_are_become_one(text: str, joined: str) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 1000).astype(np.uint32)
    apart, together = encode(parse(text), words), encode(with_raw_joined(parse(text)), words)
    assert str(with_raw_joined(parse(text))) == joined
    assert apart is not None
    assert together is not None
    assert (together.body_bytes, len(together.record)) <= (apart.body_bytes, len(apart.record))
    assert np.array_equal(execute(together.record), words)


def test_programs_that_depend_on_rows_serve_tensors_with_such_rows() -> None:
    known = Remembered("scan_add[50](lit, lit)", 1 << 18, 50, 0)
    prior = dataclasses.replace(Prior.uniform(), programs={role_of("a", weights(0)[:1000], "BF16", 50): (known,)})
    assert roles(prior).recall("b", weights(1)[:1000], "BF16", 50) is not None
    assert roles(prior).recall("b", weights(1)[:1000], "BF16", 40) is None


def test_programs_that_were_made_for_words_are_fitted_to_others() -> None:
    found = roles()
    tables = []
    for seed, n_values in ((0, 5), (1, 6)):
        rng = np.random.default_rng(seed)
        tables.append(rng.integers(0, 1 << 32, n_values).astype(np.uint32)[rng.integers(0, n_values, 20_000)])
    first = searched(found, "a.0", tables[0], "U32", 1)
    recalled = found.recall("a.1", tables[1], "U32", 0)
    record = record_of(recalled, tables[1])
    assert record.body_bytes < tables[1].nbytes // 6
    assert (str(first.program)[:13], str(record.program)[:13]) == ("dictionary[5]", "dictionary[6]")


def test_a_program_that_lost_for_small_tensors_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [weights(seed)[:1000] for seed in range(9)]
    good, bad = "merge[7,8,1](bitpack, huffman, bitpack)", "merge[8,8](raw, raw)"
    known = tuple(Remembered(program, 16 << 18, 0, 0) for program in (good, bad))
    prior = dataclasses.replace(Prior.uniform(), programs={role_of("a", one, "BF16", 0): known for one in small})
    found = roles(prior)
    tried: list[str] = []

    def counted(programs: Sequence[Node], words: Words) -> list[int | None]:
        tried.extend(map(str, programs))
        return payload_bytes(programs, words)

    monkeypatch.setattr("synth.roles.payload_bytes", counted)
    for _ in range(2):
        for words in small:
            recalled = found.recall("a", words, "BF16", 0)
            assert recalled is not None
            assert str(recalled.program) == good
        assert (tried.count(good), tried.count(bad)) == (len(small), MOST_VAIN)
        found.clear()
        tried.clear()


def test_a_record_that_was_written_to_choose_a_program_is_kept() -> None:
    repeated = np.tile(weights(0)[:90], 10)
    texts = "merge[7,8,1](bitpack, huffman, bitpack)", "lz"
    known = tuple(Remembered(text, 1 << 18, 0, 0) for text in texts)
    for words, chosen in ((repeated, "lz"), (weights(1)[:900], texts[0])):
        prior = dataclasses.replace(Prior.uniform(), programs={role_of("a", words, "BF16", 0): known})
        recalled, expected = roles(prior).recall("a", words, "BF16", 0), encode(parse(chosen), words)
        assert recalled is not None
        assert str(recalled.program) == chosen
        assert recalled.encoded == (expected if chosen == "lz" else None)


def test_constants_and_text_need_no_search() -> None:
    found = roles()
    constant = np.full(5000, 7, np.uint16)
    recalled = found.recall("a", constant, "BF16", 0)
    assert record_of(recalled, constant).body_bytes == 0
    almost = constant.copy()
    almost[-1] = 8
    assert found.recall("a", almost, "BF16", 0) is None
    header = b"\xf8\x10\0\0\0\0\0\0" + b"".join(b'"layer.%d.weight":{"dtype":"BF16"},' % k for k in range(99))
    text = np.frombuffer(header, np.uint8)
    recalled = found.recall(None, text, None, 0)
    record = record_of(recalled, text)
    assert recalled is not None
    assert str(record.program) == "lz"
    assert not recalled.is_missed(record.body_bytes)
    assert recalled.is_missed(text.size // 2)
    assert found.recall(None, np.random.default_rng(0).integers(0, 256, 9999).astype(np.uint8), None, 0) is None


LOOKS = [
    (np.full(2000, 5, np.uint16), 0o1, 0o7),
    (np.arange(2000, dtype=np.uint16) % 16, 0o2, 0o7),
    (np.arange(64, dtype=np.uint16) * 5000, 0o3, 0o7),
    (np.arange(2000, dtype=np.uint16) - (np.arange(2000) % 4 == 1).astype(np.uint16), 0o10, 0o70),
    (np.arange(2000, dtype=np.uint16) // 3, 0o20, 0o70),
    (np.arange(2000, dtype=np.uint16) // 40, 0o20, 0o70),
    (np.arange(2000, dtype=np.uint16) * np.uint16(7919), 0o0, 0o70),
    (np.where(np.arange(2000) % 3, np.arange(2000), 0).astype(np.uint16), 0o100, 0o700),
    (np.where(np.arange(2000) % 3, 0, np.arange(2000)).astype(np.uint16), 0o200, 0o700),
    (weights(0).astype(np.uint32) << np.uint32(16), 0o2000, 0o7000),
    (weights(0) & np.uint16(0x7FFF), 0o00000, 0o70000),
    (weights(0) & np.uint16(0x00FF), 0o10000, 0o70000),
    (np.arange(2000, dtype=np.uint32), 0o20000, 0o70000),
    (np.arange(2000, dtype=np.uint16) % 17 * 999, 0o3, 0o7),
    (np.arange(2000, dtype=np.uint32) % 17, 0o2, 0o7),
    (np.sin(np.arange(3000) / 300).astype(np.float32).view(np.uint32), 0o100000, 0o100000),
    (np.tile(np.random.default_rng(0).integers(0, 1 << 30, 100).astype(np.uint32), 41), 0o200000, 0o300000),
]


@pytest.mark.parametrize(("words", "digit", "mask"), LOOKS)
def test_what_shows_of_words(words: Words, digit: int, mask: int) -> None:
    assert look(words, 100) & mask == digit
    assert look(weights(0), 100) == look(weights(1)[:3000], 100) == 0o3


def test_looks_are_the_same_without_the_compiler() -> None:
    code = (
        "from operators.kernels.looks import look; from tests.synth.test_roles import LOOKS; "
        "print(*(look(words, 100) for words, _, _ in LOOKS))"
    )
    plain = run([sys.executable, "-c", code], {"NUMBA_DISABLE_JIT": "1"})
    assert [int(one) for one in plain.stdout.split()] == [look(words, 100) for words, _, _ in LOOKS]


@pytest.mark.parametrize(
    "bad",
    [[], {"a": 1}, {"a": [1]}, {"a": [["lit", -1, 0, 0]]}, {"a": [["lit", 1, 0]]}, {"a": [["no such(", 5, 0, 0]]}],
)
def test_a_prior_with_other_programs_is_refused(bad: object) -> None:
    good = dataclasses.replace(Prior.uniform(), programs={"role": (Remembered("lit", 7, 0, 5),)})
    assert Prior.load(good.dump()).programs == good.programs
    text = good.dump().decode()
    start = text.index('"programs":') + len('"programs":')
    end = text.index(',"provenance"')
    with pytest.raises(FormatError):
        Prior.load((text[:start] + json.dumps(bad) + text[end:]).encode())
