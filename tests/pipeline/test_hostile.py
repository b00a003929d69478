"""T18, P12: archives that an attacker wrote, one per limit: a typed error, soon, in bounded memory, and nothing else.

Each is read by a process that may take 1 GiB of address space beyond what it had and 20 seconds of CPU.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from operators import limits
from operators.errors import LimitError
from operators.program import Literal, Node, parse
from operators.registry import OPERATORS_BY_NAME
from pipeline import parquet
from pipeline.archive import SNAPSHOT_BYTES_MAX, find_snapshot, load_manifest, snapshot_key
from pipeline.parquet import OFFSET_BYTES_MAX, to_parquet
from pipeline.rows import Row
from pipeline.segments.header import RANK_MAX
from tests.forge import ROW, archive, objects_at, record, sound
from tests.memory_store import MemoryStore
from tests.pipeline.commands import files_of

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 20
SEGMENT = limits.SEGMENT_BYTES
Objects = dict[str, bytes]
RAW = Literal("raw")


def program(text: str, n_words: int, payloads: tuple[bytes, ...] = (), width_bits: int = 8) -> Objects:
    """An archive of one record with this program."""
    return of_node(parse(text), n_words, payloads, width_bits)


def of_node(node: Node, n_words: int, payloads: tuple[bytes, ...] = (), width_bits: int = 8) -> Objects:
    row = replace(ROW, n_bytes=n_words * width_bits // 8)
    return archive([(row, record(node, n_words, payloads, width_bits))])


def nested(name: str, params: tuple[int, ...], depth: int) -> Node:
    node = Node(RAW)
    for _ in range(depth):
        node = Node(OPERATORS_BY_NAME[name].from_params(params), (node,))
    return node


def wide(n_literals: int) -> Node:
    merge = OPERATORS_BY_NAME["merge"].from_params((1,) * 64)
    concat = OPERATORS_BY_NAME["concat"]
    node = Node(merge, (Node(RAW),) * 64)
    for _ in range(n_literals // 64 - 1):
        node = Node(concat.from_params((1,)), (Node(merge, (Node(RAW),) * 64), node))
    return node


def changed(row: Row, data: bytes, **values: object) -> Objects:
    return archive([(replace(row, **values), data)])  # type: ignore[arg-type]


def rows_of(**values: object) -> Objects:
    """An archive with a sound record, in whose row a value is another."""
    row, data = sound()
    return changed(row, data, **values)


def texts(column: str, n_bytes: int, n_rows: int) -> Objects:
    """A manifest of few bytes, whose texts are many when each row has its own."""
    row, data = sound()
    wordy = replace(row, **{column: "x" * n_bytes})  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "GROUP_TEXT_BYTES_MAX", 1 << 40)
        patch.setattr(parquet._Digest, "add", lambda *_: None)  # it is refused before its digest could matter
        return archive([(row, data)], manifest=to_parquet([wordy] * n_rows))


def columns(count: int) -> bytes:
    """A table of so many columns, none of which we know."""
    sink = io.BytesIO()
    pq.write_table(pa.table({f"c{number}": pa.array([number]) for number in range(count)}), sink)
    return sink.getvalue()


def with_snapshot(data: bytes) -> Objects:
    """A sound archive, but for what is in the place of its snapshot."""
    return archive([sound()]) | {snapshot_key("forged", 1): data}


def frame_of(n_bytes: int) -> bytes:
    """A frame that claims so many bytes, of which it holds some."""
    return zstandard.ZstdCompressor().compressobj(size=n_bytes).compress(bytes(1 << 17))


HOSTILE: dict[str, Callable[[], Objects]] = {
    "a record that gives less than its row": lambda: changed(
        replace(ROW, n_bytes=SEGMENT), record(Node(RAW), 1, (b"x",))
    ),
    "a record that gives more than its row": lambda: changed(
        replace(ROW, n_bytes=1), record(parse("const[7]"), SEGMENT)
    ),
    "a record of more words than any segment": lambda: changed(
        replace(ROW, n_bytes=SEGMENT), record(parse("const[7]"), 1 << 50)
    ),
    "a payload that is not there": lambda: changed(replace(ROW, n_bytes=SEGMENT), record(Node(RAW), SEGMENT, (b"x",))),
    "a program too deep": lambda: of_node(nested("gray", (), limits.PROGRAM_DEPTH), 4, (bytes(4),)),
    "a program of thousands of levels": lambda: of_node(nested("gray", (), 900), 4, (bytes(4),)),
    "a program of too many nodes": lambda: of_node(wide(256), 8, (b"",) * 256, 64),
    "a program of too many literals": lambda: of_node(wide(128), 2, (b"",) * 128, 64),
    "repeats of repeats": lambda: of_node(nested("repeat", (1 << 20,), 20), SEGMENT, (b"x",)),
    "a repeat beyond the segment": lambda: program("repeat[18446744073709551615](raw)", 8, (bytes(8),)),
    "more work than words": lambda: of_node(wide(64), SEGMENT // 8, (bytes(1 << 20),) * 64, 64),
    "more windows than memory": lambda: program("merge[2,2,2,2](lz, lz, lz, lz)", SEGMENT, (frame_of(SEGMENT),) * 4),
    "a frame that claims a terabyte": lambda: program("lz", SEGMENT, (frame_of(1 << 40),)),
    "a table of lengths that is none": lambda: program("huffman", 4096, (b"\xff" * 600,)),
    "frequencies that are none": lambda: program("rans", 4096, (b"\xff" * 600,)),
    "a record longer than any": lambda: rows_of(stored_bytes=limits.RECORD_BYTES + 1),
    "a segment longer than any": lambda: rows_of(n_bytes=SEGMENT + 1),
    "an offset beyond all": lambda: rows_of(offset_bytes=OFFSET_BYTES_MAX),
    "a negative offset": lambda: rows_of(offset_bytes=-1),
    "a place before its pack": lambda: rows_of(pack_offset=-8),
    "a place after its pack": lambda: rows_of(pack_offset=1 << 40),
    "a shape of too many dimensions": lambda: rows_of(shape=(1,) * (RANK_MAX + 1)),
    "shapes of millions": lambda: archive([sound()], manifest=to_parquet([replace(ROW, shape=(1,) * 4_000_000)])),
    "a negative dimension": lambda: rows_of(shape=(-1,)),
    "names of half a gigabyte in all": lambda: texts("file", 1 << 20, 520),
    "a manifest that is none": lambda: archive([sound()], manifest=b"PAR1" + bytes(1000) + b"PAR1"),
    "a manifest larger than any": lambda: archive([sound()], manifest_bytes=1 << 40),
    "a manifest of thousands of columns": lambda: archive([sound()], manifest=columns(4000)),
    "a snapshot larger than any": lambda: with_snapshot(b" " * (SNAPSHOT_BYTES_MAX + 1)),
    "a snapshot of a million levels": lambda: with_snapshot(b"[" * 1_000_000),
    "a snapshot of a reader to come": lambda: archive([sound()], features=("to come",)),
}


def read(commands: list[list[str]], folder: str) -> None:
    """Run commands with little memory and time; what each says is in files of `folder`, and its exit code at last."""
    from pipeline.cli import main

    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for turn, arguments in enumerate(commands):
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}-{turn}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        Path(folder, f"code-{turn}").write_text(str(main(arguments)))


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.ForkServerContext:
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.warm"])
    return forks


class Readers:
    """Commands on one archive, each in a process of its own."""

    def __init__(self, forks: multiprocessing.context.ForkServerContext, folder: Path, objects: Objects) -> None:
        self.forks, self.folder = forks, folder
        objects_at(objects, str(folder / "archive"))

    def ran(self, *commands: tuple[object, ...]) -> list[tuple[int, dict[str, Any], str]]:
        """Run commands; return of each its exit code, its JSON and what it printed beside it."""
        words = [
            [str(command), str(self.folder / "archive"), *map(str, arguments), "--workers", "1", "--json"]
            for command, *arguments in commands
        ]
        process = self.forks.Process(target=read, args=(words, str(self.folder)))
        process.start()
        process.join()
        assert process.exitcode == 0
        said = []
        for turn in range(len(words)):
            code, out, err = ((self.folder / f"{name}-{turn}").read_text() for name in ("code", "out", "err"))
            said.append((int(code), json.loads(out), err))
        return said


def check_refused(code: int, said: dict[str, Any], err: str) -> None:
    assert code in (1, 3, 4), (code, err[-2000:])
    assert "Traceback" not in err
    error, failures = said.get("error"), said.get("failures") or []
    kinds = {failure["reason"] for failure in failures} | ({error["kind"]} if error else set())
    assert kinds <= {"malformed", "over_limit", "digest_mismatch", "unsupported_version", "store"}, err


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused(
    name: str, context: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    readers = Readers(context, tmp_path, HOSTILE[name]())
    for said in readers.ran(("verify",), ("restore", tmp_path / "out-of-it", "--keep-going")):
        check_refused(*said)
    assert not (tmp_path / "out-of-it").exists() or files_of(tmp_path / "out-of-it") == {}


def test_the_forge_makes_archives_that_are_sound_where_it_tells_no_lie(
    context: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    readers = Readers(context, tmp_path, archive([sound(b"one", "a.bin"), sound(b"two", "b/c.bin")]))
    assert [code for code, _, _ in readers.ran(("verify",), ("restore", tmp_path / "out-of-it"))] == [0, 0]
    assert files_of(tmp_path / "out-of-it") == {"a.bin": b"one", "b/c.bin": b"two"}


@pytest.mark.parametrize(("column", "n_bytes", "n_rows"), [("tensor", 1 << 10, 2048), ("reason", 1 << 21, 1)])
def test_texts_are_counted_before_there_is_memory_for_them(
    column: str, n_bytes: int, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(texts(column, n_bytes, n_rows))
    monkeypatch.setattr(parquet, "GROUP_TEXT_BYTES_MAX", 1 << 20)
    with pytest.raises(LimitError, match="names and other texts"):
        load_manifest(store, find_snapshot(store))
    row, _ = sound()
    with pytest.raises(LimitError, match="names and other texts"):
        to_parquet([replace(row, **{column: "x" * n_bytes})] * n_rows)  # type: ignore[arg-type]


ESCAPES = ["../x", "a/../../x", "/x", "a//b", "./x", "a/./b", "..", "a\0b", "link/x", "x" * 256, ""]


@pytest.mark.parametrize("key", ESCAPES)
def test_no_key_leads_out_of_the_target(
    key: str, context: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    """T21, K02, K07: refused and named, while its neighbour is restored."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target/link").symlink_to(tmp_path / "elsewhere")
    both = sorted([sound(b"theirs", key), sound(b"fine", "fine.bin")], key=lambda pair: pair[0].file.encode())
    readers = Readers(context, tmp_path, archive(both))
    code, said, err = readers.ran(("restore", tmp_path / "target", "--keep-going"))[0]
    assert code == 3, err
    assert [failure["reason"] for failure in said["failures"]] == ["unsafe_path"]
    assert files_of(tmp_path / "target") == {"fine.bin": b"fine"}
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "x").exists()


def test_a_reader_without_limits_is_found_out(
    context: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    """What the limits of the process are for: a command that takes as much as it is told to."""
    process = context.Process(target=_greedy, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode != 0


def _greedy(folder: str) -> None:
    sys.modules["pipeline.cli"].main = lambda _: len(bytearray(2 * MEMORY_BYTES)) * 0  # type: ignore[attr-defined]
    read([[]], folder)
