"""What is fuzzed: each target makes one damaged input of sound ones and reads it.

A target returns where the input was taken for sound, and checks then what it can; where it was refused, the
`ArchiveError` comes out. Digests are made right again where they would keep damage from what lies behind them.
"""

from __future__ import annotations

import json
import os.path
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

from blake3 import blake3

from operators.books import Books
from operators.errors import FormatError
from operators.program import parse
from operators.record import FORMAT_VERSION, take_record
from operators.run import digest_of, encode, execute
from operators.words import words_of
from pipeline import salvage
from pipeline.archive import find_snapshot, load_manifest, manifest_key, snapshot_key
from pipeline.canonical import digest_of_json
from pipeline.keys import clashing_keys, safe_local_path
from pipeline.packs import pack_key
from pipeline.reading import Tensors, archived_files, check_files, range_bytes
from pipeline.retention import Policy, decide_kept, read_kept
from pipeline.rows import Row
from pipeline.scrubbing import chosen_part, receipts
from pipeline.segments import layout_of, tensors_of
from pipeline.segments.header import Header
from pipeline.snapshots import from_json
from pipeline.store import Dated
from pipeline.verify import Verifier, pack_items
from synth.prior import Prior
from tests import forge
from tests.cases import CASES, bf16, noise, safetensors
from tests.golden.make import Line, read
from tests.memory_store import MemoryStore
from tests.strategies import BOOKS

MOST_FILE_BYTES = 20_000
"""Of a file whose header is damaged: reading a larger one takes longer and shows no more."""
NAMES = (
    "w.bin",
    "../x",
    "/x",
    "a//b",
    "a\0b",
    "é",
    "x" * 300,
    "opaque",
    "safetensors",
    "BF16",
    "F4",
    "U8",
    "X9",
    "\n",
    "",
)
NUMBERS = (0, 1, 2, 3, 8, 63, 64, 255, 4096, (64 << 20) - 1, 64 << 20, (64 << 20) + 1, 1 << 31, 1 << 40, (1 << 62) - 1)


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return `data` with one to six changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        position = rng.randrange(len(changed) + 1)
        # The header and the tables come first and matter most.
        if rng.random() < 0.5:
            position = min(position, rng.randrange(64))
        kind = rng.randrange(7)
        if kind == 0 and position < len(changed):
            changed[position] ^= 1 << rng.randrange(8)
        elif kind == 1 and position < len(changed):
            changed[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del changed[position : position + rng.randrange(1, 9)]
        elif kind == 3:
            changed[position:position] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            part = other[start : start + rng.randrange(1, 40)]
            changed[position : position + len(part)] = part
        elif kind == 5:
            del changed[position:]
        elif kind == 6:
            changed[position:position] = changed[position : position + rng.randrange(1, 20)]
    return bytes(changed)


@dataclass(frozen=True)
class Corpus:
    """Sound inputs."""

    lines: list[Line] = field(default_factory=lambda: read(FORMAT_VERSION))

    @cached_property
    def records(self) -> list[bytes]:
        return [line.record for line in self.lines]

    @cached_property
    def programs(self) -> list[bytes]:
        return [line.program.encode() for line in self.lines]

    @cached_property
    def files(self) -> list[bytes]:
        files = (data for case in CASES if case.format == "safetensors" for data in case.files.values())
        return [data for data in files if len(data) <= MOST_FILE_BYTES]

    @cached_property
    def segments(self) -> list[tuple[Row, bytes]]:
        """Of three files, in the order of a manifest: an opaque one, one with tensors, and its twin."""
        data = safetensors([("w", "BF16", [20, 16], bf16(1, 320)), ("s", "F32", [], bytes(4))], {"format": "pt"})
        layout = layout_of(lambda offset, n_bytes: data[offset : offset + n_bytes], "m.safetensors", len(data))
        found = [forge.sound(noise(1, 300), "a.bin")]
        for key in ("m.safetensors", "n.safetensors"):
            for segment in layout.segments:
                own = data[segment.offset_bytes : segment.end_bytes]
                encoded = encode(parse("lit"), words_of(own, 8), digest_of(own))
                assert encoded is not None
                values = {one.name: getattr(segment, one.name) for one in fields(segment)}
                row = replace(forge.ROW, file=key, format="safetensors", digest=digest_of(own), **values)
                found.append((row, bytes(encoded.record)))
        return found

    @cached_property
    def archive(self) -> dict[str, bytes]:
        return forge.archive(self.segments)

    def stored(self, folder: str) -> bytes:
        """The object of the archive below a folder."""
        [data] = (data for key, data in self.archive.items() if key.startswith(folder))
        return data

    @cached_property
    def prior(self) -> bytes:
        return Prior.shipped().pruned(2000).dump()


# -- records and programs -----------------------------------------------------------------------


def record(rng: random.Random, corpus: Corpus) -> None:
    """A record with any damage, executed as the manifest would have it executed: with the size that it promises."""
    line = rng.choice(corpus.lines)
    _restored(mutate(rng, line.record, corpus.records), line)


def payloads(rng: random.Random, corpus: Corpus) -> None:
    """Payloads of the right lengths with other bytes: what every operator and encoding makes of them."""
    line = rng.choice(corpus.lines)
    damaged = bytearray(line.record)
    n_bytes = sum(len(payload) for payload in take_record(line.record).payloads)
    for _ in range(rng.choice((1, 1, 2, 4, 40)) if n_bytes else 0):
        position = len(damaged) - n_bytes + min(rng.randrange(n_bytes), rng.choice((7, 63, n_bytes)))
        damaged[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, damaged[position] ^ 1 << rng.randrange(8)))
    _restored(bytes(damaged), line)


def _restored(damaged: bytes, line: Line) -> None:
    # Its digest is part of the record, so a record that decodes is one of another writer, not a wrong one.
    n_bytes = execute(damaged, BOOKS, n_bytes=line.case.words.nbytes).nbytes
    assert n_bytes == line.case.words.nbytes, f"{n_bytes} bytes restored instead of {line.case.words.nbytes}"


def text(rng: random.Random, corpus: Corpus) -> None:
    """The text of a program; what parses must print as what it parsed to."""
    damaged = mutate(rng, rng.choice(corpus.programs), corpus.programs).decode("latin1")
    program = parse(damaged)
    assert parse(str(program)) == program, f"{damaged!r} does not survive printing"


def books(rng: random.Random, _corpus: Corpus) -> None:
    """Codebooks as packs carry them."""
    stored = BOOKS.to_bytes()
    found = Books.from_bytes(mutate(rng, stored, [stored]))
    for book in found:
        for shift in (0, 3):
            with suppress(FormatError):
                book.tables(shift)


# -- files and paths ----------------------------------------------------------------------------


def header(rng: random.Random, corpus: Corpus) -> None:
    """A file with a damaged header: any file is tiled; both parsers agree."""
    data = mutate(rng, rng.choice(corpus.files), corpus.files)
    layout = layout_of(lambda offset, n_bytes: data[offset : offset + n_bytes], "x.safetensors", len(data))
    ends = [0, *(segment.end_bytes for segment in layout.segments)]
    assert [segment.offset_bytes for segment in layout.segments] == ends[:-1]
    assert ends[-1] == len(data)
    n_bytes = 8 + int.from_bytes(data[:8], "little")
    assert layout.format == "opaque" or n_bytes <= len(data)
    found = tensors_of(data[: min(n_bytes, len(data))])
    assert list(found) == list(Header(data[8:n_bytes], fast=False))
    assert all(isinstance(value, str) for value in found.metadata.values())


def path(rng: random.Random, _corpus: Corpus) -> None:
    """Keys of files that are to be restored; what is accepted stays inside and clashes with nothing unnoticed."""
    parts = ("a", "A", "..", ".", "/", "//", "\\", "\0", "\n", "é", "e\u0301", "x" * 250, "\udce9", "~", "C:", " ", "")
    keys = sorted({"".join(rng.choice(parts) for _ in range(rng.randrange(1, 7))) for _ in range(4)})
    taken = [key for key in keys if key not in clashing_keys(keys, fold_case=False)]
    places = ["/base/" + "/".join(safe_local_path("/base", key)) for key in taken]
    for place in places:
        assert os.path.normpath(place) == place.removesuffix("/")
        assert place.startswith("/base/")
        assert "\0" not in place
    assert len(set(places)) == len(places)


# -- archives -----------------------------------------------------------------------------------


def snapshot(rng: random.Random, corpus: Corpus) -> None:
    """A snapshot whose text or values are others, under the right digest; what is taken is spelt as it would be."""
    stored = corpus.stored("snapshots/")
    if rng.random() < 0.2:
        damaged = mutate(rng, stored, [stored])
    else:
        content = json.loads(stored)
        del content["digest"]
        content = _edited(rng, content)
        if isinstance(content, dict):
            with suppress(TypeError):  # floats, which no digest is made of
                content["digest"] = digest_of_json(content)
        damaged = json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    store = MemoryStore(corpus.archive | {snapshot_key("forged", 1): damaged})
    assert from_json(damaged, "").to_json() == damaged
    _read_all(store)


def manifest(rng: random.Random, corpus: Corpus) -> None:
    """Rows that say other things of sound records, or a damaged table, under the right digests."""
    if rng.random() < 0.3:
        stored = corpus.stored("manifests/")
        damaged = mutate(rng, stored, [stored])
        content = from_json(corpus.stored("snapshots/"), "").content
        objects = forge.archive(corpus.segments, manifest=damaged, content=content)
    else:
        chosen = rng.randrange(len(corpus.segments))
        edited = [
            (_edited_row(rng, row) if place == chosen else row, data)
            for place, (row, data) in enumerate(corpus.segments)
        ]
        objects = forge.archive(sorted(edited, key=lambda pair: (pair[0].file.encode(), pair[0].offset_bytes)))
    _read_all(MemoryStore(objects))


def pack(rng: random.Random, corpus: Corpus) -> None:
    """A pack that is named by its digest and holds other bytes, when nothing else is left."""
    stored = corpus.stored("packs/")
    damaged = mutate(rng, stored, [stored])
    store = MemoryStore({pack_key(blake3(damaged).digest()): damaged})
    [key] = store.objects
    rows = salvage.pack_rows(store, Dated(key, len(damaged), 0))
    assert all(row.pack is not None for row in rows)
    salvage.Packs(store).whole_files()


def receipt(rng: random.Random, _corpus: Corpus) -> None:
    """A receipt of verification; none is an error, and the next part is one of those there are."""
    sound = {"failures": [], "snapshots": [["forged/1", forge.NO_DIGEST]], "part": [1, 2], "files": 1}
    data = json.dumps(_edited(rng, sound)).encode()
    if rng.random() < 0.5:
        data = mutate(rng, data, [data, b"[" * 4000])
    names = [f"verify/20260101T00000{n}Z-decode-{n}-2.json" for n in (1, 2)]
    store = MemoryStore({names[0]: data, names[1]: b"[" * 200_000})
    store.written.update(dict.fromkeys(names, 0))
    part = chosen_part(store, "next/2", None, "decode")
    assert part is not None
    assert part.number in (1, 2)
    for found in receipts(store):
        found.fault_for(cast("Any", SimpleNamespace(name="forged/1", manifest=forge.NO_DIGEST)))


def prior(rng: random.Random, corpus: Corpus) -> None:
    """A prior of a user, or of a run."""
    if rng.random() < 0.5:
        Prior.load(mutate(rng, corpus.prior, [corpus.prior]))
    else:
        Prior.load(json.dumps(_edited(rng, json.loads(corpus.prior))).encode())


def _edited(rng: random.Random, content: Any) -> Any:
    """Return JSON with one value replaced, left out or doubled, at any depth."""
    if rng.random() < 0.7 and isinstance(content, dict) and content:
        key = rng.choice(list(content))
        rest = {name: value for name, value in content.items() if name != key}
        return rest if rng.random() < 0.1 else rest | {key: _edited(rng, content[key])}
    if rng.random() < 0.7 and isinstance(content, list) and content:
        place = rng.randrange(len(content))
        middle = rng.choice(([], [content[place]] * 2, [_edited(rng, content[place])]))
        return [*content[:place], *middle, *content[place + 1 :]]
    odd: list[Any] = [
        None,
        True,
        -1,
        1 << 63,
        1 << 80,
        0.5,
        "\ud800",
        "2026",
        "2026-01-01T00:00:00+99:99",
        [],
        {},
        [[[[]]]],
    ]
    return rng.choice([*odd, *NAMES, *NUMBERS])


def _edited_row(rng: random.Random, row: Row) -> Row:
    """Return a row with other values, each of a type that its column has."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice([one.name for one in fields(Row) if one.name not in {"pack", "pack_bytes"}])
        value: Any = getattr(row, name)
        if name in {"digest", "stored_digest"}:
            value = rng.choice((bytes(32), rng.randbytes(32)))
        elif name == "fingerprint":
            value = rng.choice((None, bytes(8), rng.randbytes(8)))
        elif name == "shape":
            value = rng.choice((None, (), *((number, 2) for number in NUMBERS), (1,) * 33))
        elif name in {"file", "tensor", "dtype", "format", "reason", "program"}:
            value = rng.choice([*NAMES, *([] if name in {"file", "format"} else [None])])
        elif isinstance(value, int) or value is None:
            value = rng.choice(NUMBERS)
        row = replace(row, **{name: value})
    return row


def _read_all(store: MemoryStore) -> None:
    """Read all that commands read of an archive."""
    kept = read_kept(store, "forged")
    decide_kept(kept, Policy(last=1, daily=1, weekly=1, monthly=1))
    found = find_snapshot(store)
    rows = load_manifest(store, found)
    check_files(found, rows)
    salvage.Packs(store).of_snapshot(found)
    Verifier(store, decode=True)(pack_items(rows, None, whole=True)[0])
    files = archived_files(found, rows)
    for file in files:
        data = b"".join(map(bytes, range_bytes(store, file, 0, file.n_bytes)))
        assert len(data) == file.n_bytes
    Tensors(store, files).names()
    assert manifest_key(found.manifest) in store.objects


Target = Callable[[random.Random, Corpus], None]
TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (record, payloads, text, books, header, path, snapshot, manifest, pack, receipt, prior)
}
