"""Kernels: against plain Python, and the way they are compiled, cached and called."""

from __future__ import annotations

import itertools
import os
import pickle
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import BLOCK_WORDS
from operators.fields import MOST_WORDS
from operators.kernels import parts
from operators.kernels.alphabet import put_table, table_symbols, take_table
from operators.kernels.bits import pack, packed_bytes, unpack
from operators.kernels.cache import KernelCache, directories
from operators.kernels.histogram import Histogram, count_u8
from operators.kernels.huffman import canonical_codes, limited_lengths
from operators.kernels.jit import kernel
from operators.kernels.rans import MAX_BITS, MIN_BITS, encoding_table, log2_q16, normalise
from operators.program import parse
from operators.run import encode, execute
from operators.warm import JOBS
from operators.words import container
from tests.operators import oracle
from tests.strategies import make_words

ROOT = Path(__file__).parents[2]
SIZES = (0, 1, 2, 7, 8, 9, 63, 200)


# -- bits and counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width_bits", range(1, 65))
def test_packed_words_are_the_bits_of_one_large_integer(width_bits: int) -> None:
    containers = {container(width_bits)} | ({np.dtype("u2")} if width_bits <= 16 else set())
    for n_words, dtype in itertools.product(SIZES, containers):
        words = make_words("random", width_bits, n_words, n_words).astype(dtype)
        out = np.full(packed_bytes(n_words, width_bits), 0xFF, np.uint8)
        pack(words, width_bits, out)
        bits = oracle.Bits()
        for word in words:
            bits.put(int(word), width_bits)
        assert out.tobytes() == bits.to_bytes()
        out.flags.writeable = False
        back = np.full(n_words, 0x55, dtype)
        unpack(out, width_bits, back)
        np.testing.assert_array_equal(back, words)


@given(seed=st.integers(0, 1 << 32), width_bits=st.integers(1, 64), n_words=st.integers(1, 300))
def test_any_packed_bytes_unpack_to_words_of_the_width(seed: int, width_bits: int, n_words: int) -> None:
    packed = make_words("random", 8, packed_bytes(n_words, width_bits), seed)
    out = np.empty(n_words, container(width_bits))
    unpack(packed, width_bits, out)
    number = int.from_bytes(packed.tobytes(), "little")
    assert [int(word) for word in out] == [number >> i * width_bits & (1 << width_bits) - 1 for i in range(n_words)]


@pytest.mark.parametrize("width_bits", range(1, 17))
def test_histograms(width_bits: int) -> None:
    counted = Histogram(width_bits)
    expected = np.zeros(1 << width_bits, np.int64)
    for n_words in (*SIZES, 5000):
        words = make_words("skewed", width_bits, n_words, n_words)
        expected += np.bincount(words, minlength=1 << width_bits)
        counted.add(words)
        alone = Histogram(width_bits, n_words)
        alone.add(words)
        np.testing.assert_array_equal(alone.counts(), np.bincount(words, minlength=1 << width_bits))
    np.testing.assert_array_equal(counted.counts(), expected)


# -- Huffman and rANS tables ----------------------------------------------------------------------------


def best_cost(counts: list[int], limit: int) -> int:
    """Bits of the best code by trying all lengths that fill the code space exactly."""
    counts = sorted(counts, reverse=True)
    best = 1 << 62

    def descend(i: int, shortest: int, space: int, cost: int) -> None:
        nonlocal best
        if i == len(counts):
            best = min(best, cost if space == 0 else best)
            return
        for length in range(shortest, limit + 1):
            if space >= 1 << (limit - length):
                descend(i + 1, length, space - (1 << (limit - length)), cost + length * counts[i])

    descend(0, 1, 1 << limit, 0)
    return best


@given(counts=st.lists(st.integers(1, 1000), min_size=2, max_size=7), limit=st.integers(3, 6))
def test_code_lengths_are_optimal(counts: list[int], limit: int) -> None:
    ascending = np.array(sorted(counts), np.int64)
    lengths = np.empty_like(ascending)
    limited_lengths(ascending, limit, lengths)
    assert lengths.min() >= 1
    assert lengths.max() <= limit
    assert int(ascending @ lengths) == best_cost(counts, limit)
    assert canonical_codes(lengths, np.empty_like(lengths)) == 0


@given(counts=st.lists(st.integers(1, 1 << 26), min_size=1, max_size=300), limit=st.sampled_from([9, 12, 14]))
def test_code_lengths_are_those_of_the_plain_package_merge(counts: list[int], limit: int) -> None:
    ascending = np.array(sorted(counts), np.int64)
    lengths = np.empty_like(ascending)
    limited_lengths(ascending, limit, lengths)
    expected = oracle.code_lengths(dict(enumerate(ascending.tolist())), limit)
    assert lengths.tolist() == [expected[i] for i in range(lengths.size)]


def test_code_lengths_of_the_largest_alphabet() -> None:
    counts = np.sort(np.random.default_rng(1).integers(1, 100, 1 << 14))
    lengths = np.empty_like(counts)
    limited_lengths(counts, 14, lengths)
    assert set(lengths.tolist()) == {14}


@pytest.mark.parametrize(
    "lengths", [[1], [0, 1], [0, 1, 1], [1, 1, 1], [2, 2, 2], [1, 2], [14, 14], [1, 2, 3, 4], [*range(1, 16), 15]]
)
def test_incomplete_and_oversubscribed_codes_are_refused(lengths: list[int]) -> None:
    assert canonical_codes(np.array(lengths), np.empty(len(lengths), np.int64)) == -1


@given(lengths=st.lists(st.integers(0, 15), min_size=2, max_size=40))
def test_codes_are_accepted_exactly_where_they_are_complete(lengths: list[int]) -> None:
    complete = 0 < min(lengths) and max(lengths) < 15 and sum(1 << 15 - length for length in lengths) == 1 << 15
    codes = np.empty(len(lengths), np.int64)
    assert (canonical_codes(np.array(lengths), codes) == 0) == complete
    if complete:
        digits = oracle.canonical(dict(enumerate(lengths)))
        assert codes.tolist() == [int(digits[i][::-1], 2) for i in range(len(lengths))]


@given(
    symbols=st.sets(st.integers(0, 65535), min_size=1, max_size=200),
    seed=st.integers(0, 1 << 32),
    with_values=st.booleans(),
)
def test_tables(symbols: set[int], seed: int, with_values: bool) -> None:
    rng = np.random.default_rng(seed)
    words = np.array(sorted(symbols), np.int64)
    levels = rng.integers(0, int(rng.integers(1, 17)), words.size)
    values = (1 << levels) + rng.integers(0, 1 << 15, words.size) % (1 << levels) if with_values else words[:0]
    out = np.zeros(8 * words.size + 16, np.uint8)
    n_bytes = put_table(words, levels, values, out)
    assert out[:n_bytes].tobytes() == oracle.table(words.tolist(), levels.tolist(), values.tolist())
    for room in (n_bytes, n_bytes + 9):
        buffer = np.concatenate((out[:n_bytes], np.full(room - n_bytes, 0xAA, np.uint8)))
        back = np.empty_like(words), np.empty_like(levels), np.empty_like(values)
        assert table_symbols(buffer) == words.size
        assert take_table(buffer, 16, *back) == n_bytes
        for found, expected in zip(back, (words, levels, values), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert take_table(out[: n_bytes - 1], 16, *back) == -1
    if words[-1] > 0:
        assert take_table(out[:n_bytes], int(words[-1]).bit_length() - 1, *back) == -1


@pytest.mark.parametrize("bits", range(MIN_BITS, MAX_BITS + 1))
def test_reciprocals_divide_exactly_for_every_frequency(bits: int) -> None:
    every = np.arange(1, 1 << bits)
    reciprocals, rows = np.zeros(1 << bits, np.uint64), np.zeros(1 << bits, np.uint64)
    encoding_table(every, every, bits, reciprocals, rows)
    shift = np.uint64(32 + bits)
    f = every.astype(np.uint64)
    below = f << np.uint64(32 - bits)
    assert (rows[1:] & np.uint64(0xFFFFFFFF) == below).all()
    rng = np.random.default_rng(bits)
    quotients = [
        np.zeros_like(f),
        np.ones_like(f),
        below // f - np.uint64(1),
        *rng.integers(0, below // f, (40, f.size)),
    ]
    for quotient in quotients:
        for rest in (np.zeros_like(f), f - np.uint64(1), rng.integers(0, f, f.size, np.uint64)):
            x = quotient.astype(np.uint64) * f + rest
            assert (x < below).all()
            np.testing.assert_array_equal(x * reciprocals[1:] >> shift, quotient)


@given(counts=st.lists(st.integers(1, 1 << 22), min_size=2, max_size=60), bits=st.integers(12, 14))
def test_frequencies(counts: list[int], bits: int) -> None:
    made = np.empty(len(counts), np.int64)
    normalise(np.array(counts), bits, made)
    assert made.min() >= 1
    assert made.sum() == 1 << bits
    assert made.tolist() == oracle.frequencies(counts, bits)


def test_frequencies_of_the_largest_alphabet() -> None:
    counts = np.ones(1 << MAX_BITS, np.int64)
    counts[5] = 1 << 20
    made = np.empty_like(counts)
    normalise(counts, MAX_BITS, made)
    assert (made == 1).all()


def test_logarithms_are_exact_to_the_last_bit() -> None:
    values = np.unique(np.concatenate((np.arange(1, 5000), ((1 << np.arange(31)) + np.arange(-1, 2)[:, None]).ravel())))
    values = values[values > 0]
    logs = np.empty_like(values)
    log2_q16(values, logs)
    for value, log in zip(values.tolist(), logs.tolist(), strict=True):
        # 2**log <= value**65536 < 2**(log + 1), up to what 31-bit squaring loses.
        assert abs(np.log2(value) * 65536 - log) < 1.01
        if value & (value - 1) == 0:
            assert log == (value.bit_length() - 1) << 16


# -- compilation, cache, calls --------------------------------------------------------------------------


def test_read_only_and_writable_arrays_share_one_specialisation() -> None:
    words = make_words("skewed", 8, 100, 1)
    tables = np.zeros((4, 256), np.uint32)
    count_u8(words, tables)
    count_u8(words.copy(), tables)
    assert tables.sum() == 200
    kernel: Any = count_u8
    assert len(kernel.overloads) == 1


@kernel("out")
def add_one(words: Any, out: Any) -> None:
    for i in range(words.size):
        out[i] = words[i] + 1


def test_threads_that_call_a_cold_kernel_at_once() -> None:
    def call(seed: int) -> bool:
        words = make_words("random", 8 if seed & 1 else 16, 1000, seed) >> 1
        words.flags.writeable = bool(seed & 2)
        out = np.zeros_like(words)
        add_one(words, out)
        return np.array_equal(out, words + 1)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(call, range(64)))
    cold: Any = add_one
    assert len(cold.overloads) == 2


@pytest.mark.parametrize(
    ("words", "tables"),
    [
        (np.zeros(8, np.uint8)[::2], np.zeros((4, 256), np.uint32)),
        (np.zeros(8, np.uint8), np.frombuffer(bytes(4096), np.uint32).reshape(4, 256)),
    ],
    ids=["strided", "read-only output"],
)
def test_arrays_that_kernels_do_not_take(words: Any, tables: Any) -> None:
    with pytest.raises(TypeError, match="contiguous"):
        count_u8(words, tables)


def test_nothing_is_left_to_compile_after_warming(monkeypatch: pytest.MonkeyPatch) -> None:
    for job in JOBS:
        job()
    monkeypatch.setattr(KernelCache, "load_overload", lambda self, types, _: pytest.fail(f"{self._name} of {types}"))
    texts = ("lit", "merge[5,10,1](lit, lit, lit)", "merge[8,8](huffman, rans)", "merge[6,10](bitpack, lz)")
    for text, n_words in itertools.product(texts, (3 * BLOCK_WORDS, MOST_WORDS + 1)):
        words = make_words("few", 16, n_words, 1)
        encoded = encode(parse(text), words)
        assert encoded is not None
        np.testing.assert_array_equal(execute(encoded.record), words)


COUNT = """
import sys, numpy as np
from pathlib import Path
import operators
assert Path(operators.__file__).is_relative_to(sys.argv[1]), operators.__file__
from operators.kernels.histogram import Histogram
counted = Histogram(8, 1000)
counted.add(np.arange(1000, dtype=np.uint8))
assert counted.counts().sum() == 1000
print("numba.np.linalg" in sys.modules)
"""


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """A copy of the package without its caches, as an image would hold it."""
    shutil.copytree(ROOT / "operators", tmp_path / "lib" / "operators", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "lib"


def start(install: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-B", "-c", COUNT, str(install)]
    environment = {"PYTHONPATH": str(install), "PATH": os.environ["PATH"], **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd="/", text=True, stdout=pipe, stderr=pipe)


def assert_works(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    return output


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kernel"))


def test_kernels_are_kept_beside_the_sources(install: Path) -> None:
    assert assert_works(start(install, {})) == "True\n"
    (kept,) = files(install)
    assert not list(install.rglob("*.tmp"))
    machine_code, to_link = pickle.loads(kept.read_bytes()[32:])[0][2]
    assert len(to_link) < len(machine_code) // 2  # names
    assert assert_works(start(install, {})) == "False\n"  # a kernel that is there needs nothing of what compiles one


def test_a_read_only_install_without_a_home(install: Path, tmp_path: Path) -> None:
    # Files stand where directories should be: what root cannot write either.
    (install / "operators" / "kernels" / "__pycache__").write_bytes(b"")
    (tmp_path / "home").write_bytes(b"")
    (tmp_path / "tmp").mkdir()
    environment = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    assert_works(start(install, environment))
    assert len(files(tmp_path / "tmp")) == 1
    assert files(install) == []
    directory = files(tmp_path / "tmp")[0].parent
    assert directory.stat().st_mode & 0o777 == 0o700
    # Nor is a directory used that somebody else could have filled.
    directory.chmod(0o777)
    files(tmp_path / "tmp")[0].write_bytes(b"planted")
    assert_works(start(install, environment))
    assert files(tmp_path / "tmp")[0].read_bytes() == b"planted"


def test_a_user_id_without_a_name_or_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BREVIS_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    first, last = directories()
    assert first.parent.name == "kernels"
    assert last.parent == Path(tempfile.gettempdir())


def test_a_job_finds_what_its_node_has_compiled_and_keeps_the_rest_itself(install: Path, tmp_path: Path) -> None:
    node, job, other = (tmp_path / name for name in ("node", "job", "other"))
    assert_works(start(install, {"NUMBA_CACHE_DIR": str(node)}))
    assert_works(start(install, {"BREVIS_CACHE_DIR": str(job), "NUMBA_CACHE_DIR": str(node)}))
    assert len(files(node)) == 1
    assert files(job) == []
    assert_works(start(install, {"BREVIS_CACHE_DIR": str(job), "NUMBA_CACHE_DIR": str(other)}))
    assert len(files(job)) == 1
    assert files(other) == files(install) == []


def test_nowhere_to_write_is_no_error(install: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"")
    assert_works(start(install, {"BREVIS_CACHE_DIR": str(blocked)}))
    assert files(tmp_path) == []


def test_cold_processes_at_once_and_a_damaged_cache(install: Path, tmp_path: Path) -> None:
    environment = {"BREVIS_CACHE_DIR": str(tmp_path / "cache")}
    for process in [start(install, environment) for _ in range(2)]:
        assert_works(process)
    (kept,) = files(tmp_path / "cache")
    assert files(install) == []
    good = kept.read_bytes()
    for damaged in (b"", good[:100], good[:-1], good[:3000] + bytes([good[3000] ^ 1]) + good[3001:]):
        kept.write_bytes(damaged)
        assert_works(start(install, environment))
        assert len(kept.read_bytes()) == len(good)


def test_an_edited_callee_is_noticed(install: Path, tmp_path: Path) -> None:
    environment = {"BREVIS_CACHE_DIR": str(tmp_path / "cache")}
    assert_works(start(install, environment))
    with (install / "operators" / "kernels" / "memory.py").open("a") as source:
        source.write("# edited\n")
    assert_works(start(install, environment))
    assert len(files(tmp_path / "cache")) == 2


@pytest.mark.parametrize("rare", [64, 512, 4096])
def test_runs_of_the_longest_codes_are_whole(rare: int) -> None:
    """Four codes of 14 bits and 7 more fill 63 of the 64 bits of the encoder: none may be lost."""
    noise = np.random.default_rng(rare)
    common = noise.integers(0, 4, 60_000)
    words = np.concatenate([common, 4 + noise.permutation(rare), common, 4 + noise.permutation(rare)]).astype("<u2")
    program = parse("huffman")
    encoded = encode(program, words)
    assert encoded is not None
    assert np.array_equal(execute(encoded.record), words)


def test_the_inside_of_numba_is_used_of_the_pinned_version_alone() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"numba=={parts.NUMBA}" in pins
    assert parts.LINKED == (numba.__version__ == parts.NUMBA)


OTHER_NUMBA = """
import numba, numpy as np
numba.__version__ = "0.0"
from operators.kernels import jit, parts
assert not parts.LINKED

@jit.inlined
def double(word):
    return word + word

@jit.kernel()
def total(words):
    found = 0
    for word in words:
        found += double(word)
    return found

@jit.kernel("out")
def put(words, out):
    out[0] = total(words)

assert isinstance(double, numba.core.registry.CPUDispatcher) and not isinstance(double, parts.Part)
assert put.part is None
out = np.zeros(1, np.int64)
put(np.arange(5), out)
assert out[0] == 20
"""


def test_another_numba_compiles_in_its_own_way(tmp_path: Path) -> None:
    source = tmp_path / "other.py"
    source.write_text(OTHER_NUMBA)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BREVIS_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, str(source)], check=True, env=environment)
    assert len(files(tmp_path)) == 2  # `total` is a kernel of its own there
