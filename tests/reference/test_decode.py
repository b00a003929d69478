"""A decoder written from the two pages alone reads what we write (T20), and refuses what was changed."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import numpy as np
import pytest

from operators.base import Stream
from operators.program import Literal, Node, parse
from operators.record import FORMAT_VERSION
from operators.registry import CONDITIONED
from operators.run import encode
from operators.words import words_of
from tests import cases
from tests.golden.make import Line, encode_line, read
from tests.pipeline.commands import Capture, Ran, files_of, objects_of, write
from tests.reference import bits, decode, records, tiles
from tests.strategies import BOOKS, Case, conditions

LINES = [line for version in range(FORMAT_VERSION + 1) for line in read(version)]


def books() -> dict[int, records.Book]:
    found = [records.Book.take(book.to_bytes()) for book in BOOKS]
    return {book.number: book for book in found}


@pytest.mark.parametrize("module", [bits, decode, records, tiles])
def test_nothing_of_ours_is_used(module: object) -> None:
    tree = ast.parse(Path(module.__file__ or "").read_text())  # type: ignore[attr-defined]
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in names if name.partition(".")[0] in ("operators", "synth", "configs", "pipeline", "tests")}
    assert all(name.startswith("tests.reference.") for name in ours)


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.program}-{line.case.stream}")
def test_golden_records_are_read(line: Line) -> None:
    assert records.decode_record(line.record, books()) == line.case.words.tobytes()


LARGE = [
    ("skewed", 8, 140_000, "huffman"),  # two blocks of four streams
    ("skewed", 16, 5_000, "huffman"),
    ("constant", 16, 9_000, "huffman"),
    ("skewed", 16, 70_000, "rans"),  # 64 lanes
    ("skewed", 8, 3_000, "rans"),  # 8 lanes
    ("skewed", 32, 3_000, "lz"),
    ("skewed", 16, 9_000, "merge[7,9](huffman, bitpack)"),
    ("skewed", 16, 9_000, "merge[3,9,4](bitpack, rans, lz)"),
]


@pytest.mark.parametrize(("kind", "width_bits", "n_words", "program"), LARGE)
def test_larger_records_are_read(kind: str, width_bits: int, n_words: int, program: str) -> None:
    case = Case(kind, Stream(width_bits, n_words), 1)
    line = encode_line("", parse(program), case)
    assert line is not None
    assert records.decode_record(line.record) == case.words.tobytes()


@pytest.mark.parametrize("code", sorted(CONDITIONED))
def test_conditioned_records_are_read(code: int) -> None:
    """Every tenth or so of the conditions that we test, on words with more than one tile, and on bell-shaped ones."""
    encoding = CONDITIONED[code]
    streams = [Stream(16, 2500), Stream(8, 1800)]
    bell = {16: words_of(cases.bf16(3, 2500), 16), 8: words_of(cases.bf16(4, 900), 8)}
    tried = 0
    for stream in streams:
        found = list(conditions(encoding, stream))
        for one in random.Random(stream.width_bits).sample(found, min(24, len(found))):
            for words in (bell[stream.width_bits], Case("skewed", stream, 2).words):
                encoded = encode(Node(Literal(encoding.name, one.params)), words, books=BOOKS)
                if encoded is not None:
                    assert records.decode_record(bytes(encoded.record), books()) == words.tobytes(), one
                    tried += 1
    assert tried >= 6


@pytest.mark.parametrize("name", ["scaled", "scaled_huffman"])
@pytest.mark.parametrize("params", ["2,5,2,1,1,0", "40,5,2,2,2,1", "16,5,2,2,2,3", "96,5,2,1,2,3", "96,5,2,1,1,0"])
@pytest.mark.parametrize("n_words", [645, 1000, 2500, 128 * 40 + 5])
def test_shapes_of_tiles_are_read(name: str, params: str, n_words: int) -> None:
    """Tiles without a tail, a tail without tiles, both, and words behind them."""
    words = words_of(cases.bf16(6, n_words), 16)
    encoded = encode(parse(f"{name}[{params}]"), words)
    assert encoded is not None
    assert records.decode_record(bytes(encoded.record)) == words.tobytes()


@pytest.mark.parametrize("name", ["scaled", "scaled_huffman"])
def test_many_lanes_and_groups_are_read(name: str) -> None:
    """128 lanes from 2^17 words on; more than one group of tiles; a tail."""
    words = words_of(cases.bf16(5, (1 << 17) + 3000), 16)
    encoded = encode(parse(f"{name}[96,5,2,1,2,3]"), words)
    assert encoded is not None
    assert records.decode_record(bytes(encoded.record)) == words.tobytes()


# -- archives -----------------------------------------------------------------------------------

SOURCE = {
    "a.safetensors": cases.safetensors(
        [
            ("w", "BF16", [160, 128], cases.bf16(1, 20_480)),
            ("twin", "BF16", [160, 128], cases.bf16(1, 20_480)),
            ("ids", "I64", [700], np.arange(700, dtype="<i8").tobytes()),
            ("f", "F32", [40, 32], np.linspace(0, 1, 1280, dtype="<f4").tobytes()),
            ("b", "F32", [3], bytes(12)),
        ]
    ),
    "config.json": b'{"a": [1, 2, 3]}' * 40,
    "empty.txt": b"",
    "sub/noise.bin": cases.noise(1, 5000),
}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pipeline.cli import main

    folder = tmp_path_factory.mktemp("reference")
    write(folder / "my model", SOURCE)
    assert main(["archive", str(folder / "my model"), str(folder / "archive"), "--workers", "1", "-q"]) == 0
    write(folder / "my model", {"sub/noise.bin": cases.noise(2, 6000)})
    assert main(["archive", str(folder / "my model"), str(folder / "archive"), "--workers", "1", "-q"]) == 0
    return folder / "archive"


def test_an_archive_is_read(archive: Path, tmp_path: Path) -> None:
    assert decode.decode_archive(archive, "my model", 1) == SOURCE
    changed = SOURCE | {"sub/noise.bin": cases.noise(2, 6000)}
    assert decode.decode_archive(archive, "my model", 2) == changed
    decode.main([str(archive), "my model/2", str(tmp_path)])
    assert files_of(tmp_path) == changed


def test_a_changed_archive_is_refused(archive: Path, capsys: Capture) -> None:
    """Any bit of what a snapshot needs: the reference refuses it, and so do we; neither gives other bytes."""
    chosen = random.Random(7)
    for path in objects_of(archive, "packs", "manifests", "snapshots"):
        data = path.read_bytes()
        for place in chosen.sample(range(len(data)), 3):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chosen.randrange(8)]) + data[place + 1 :])
            refused = 0
            for seq in (1, 2):
                try:
                    decode.decode_archive(archive, "my model", seq)
                except (bits.WrongError, ArithmeticError, ValueError, KeyError, OSError):
                    refused += 1
            assert refused, f"{path}@{place}"
        path.write_bytes(data)
    assert Ran(capsys, "verify", archive).code == 0
