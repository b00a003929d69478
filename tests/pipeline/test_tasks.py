"""Records of segments: whatever the search says, a task stores the segment."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from weakref import ref

import numpy as np
import pytest
from numpy.typing import NDArray

from operators import limits
from operators.books import Book
from operators.errors import NotFoundError, StoreError
from operators.program import LIT, Node, parse
from operators.registry import OPERATORS_BY_NAME
from operators.run import Encoded, digest_of, encode, execute
from operators.words import Bytes, Words
from pipeline import carried, encoder, tasks
from pipeline.encoder import Encoder, search_segment, segment_words
from pipeline.executors import attempt
from pipeline.packs import read_records
from pipeline.plan import make_plan
from pipeline.rooms import Room, taken
from pipeline.rows import Row
from pipeline.segments import opaque
from pipeline.store import Buffers, ObjectInfo, Whole
from pipeline.tasks import TaskWorker
from synth.learn import OPTIONS
from synth.prior import Prior, Remembered
from synth.roles import role_of
from synth.template import RAW
from tests.cases import noise
from tests.memory_store import MemoryStore

TASK_BYTES = 1 << 28
ROW = Row("a", 0, 1, "t", "U8", None, 0, 1, 1, 1, "safetensors", None, 0)
BITS = Node(OPERATORS_BY_NAME["merge"].from_params((1,) * 64), (LIT,) * 64)


def stored(program: Node, dtype: str, data: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
    """Store `data` as if the search had found `program`; return the program of the record."""
    encoder = Encoder(OPTIONS, Prior.uniform())
    row = replace(ROW, dtype=dtype, n_bytes=len(data), digest=digest_of(data))
    found = search_segment(row, data, OPTIONS, Prior.uniform())
    found = replace(found, program=program, template=None, runners_up=(), expansions=7)
    monkeypatch.setattr("synth.roles.synthesise", lambda *_, **__: found)
    encoded, expansions = encoder.record(row, memoryview(data))
    assert expansions == 7
    assert encoder.alarms == []
    assert execute(encoded.record).tobytes() == data
    return str(encoded.program)


def test_a_recalled_program_stays_where_a_search_finds_none_that_is_smaller() -> None:
    words = (np.random.default_rng(0).standard_normal(9000) * 0.02).astype("<f4").view("<u4") >> 16
    data = words.astype("<u2").tobytes()
    row = replace(ROW, dtype="BF16", n_bytes=len(data), digest=digest_of(data))
    role = role_of(row.tensor, segment_words(row.dtype, data), "BF16", 0)
    program = "merge[7,8,1](bitpack, huffman, bitpack)"
    prior = replace(Prior.uniform(), programs={role: (Remembered(program, 0, 0, 0),)})
    encoder = Encoder(replace(OPTIONS, budget=0, share=True), prior)
    for _ in range(2):
        encoded, _ = encoder.record(row, memoryview(data))
        assert str(encoded.program) == program
        assert execute(encoded.record).tobytes() == data


@pytest.mark.parametrize(
    ("program", "dtype", "n_bytes"),
    [
        (parse("rotate[9](raw)"), "U8", 5000),
        (parse("merge[8,9](raw, raw)"), "U16", 5000),
        (parse("bitpack"), "U64", 5000),
        (BITS, "U64", 8 * ((1 << 20) + 1)),  # more work than a reader does
    ],
)
def test_a_program_that_the_format_refuses_is_stored_as_a_literal(
    program: Node, dtype: str, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.resize(np.frombuffer(noise(1, 1 << 16), np.uint8), n_bytes).tobytes()
    assert "(" not in stored(program, dtype, data, monkeypatch)


def test_a_program_whose_encodings_need_too_much_memory_is_stored_as_a_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    n_words = 80_000
    data = np.resize(np.frombuffer(noise(1, 2_000), np.uint8), 2 * n_words).tobytes()
    program = parse("merge[8,8](lit, lit)")
    assert stored(program, "U16", data, monkeypatch) == "merge[8,8](lz, lz)"
    monkeypatch.setattr(limits, "SCRATCH_FIXED_BYTES", n_words)  # enough for one window, not for two and their blocks
    assert stored(program, "U16", data[16:], monkeypatch) == "lz"  # of another length: what was checked is remembered


def test_a_program_that_was_misjudged_gives_way_to_a_finalist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The further segments of the tensor follow the finalist."""
    data = np.repeat(np.frombuffer(noise(1, 1 << 12), np.uint8), 16).tobytes()
    row = replace(ROW, dtype="U8", n_bytes=len(data), digest=digest_of(data))
    encoder = Encoder(OPTIONS, Prior.uniform())
    right = search_segment(row, data, OPTIONS, Prior.uniform())
    assert right.template is not None
    wrong = replace(right, template=RAW, winner=replace(right.winner, cost_q8=1), runners_up=(right.winner,))
    monkeypatch.setattr("synth.roles.synthesise", lambda *_, **__: replace(wrong, program=parse("raw")))
    first, expansions = encoder.record(row, memoryview(data))
    assert expansions == right.expansions
    assert first.body_bytes < len(data) // 8
    program = first.program
    second, expansions = encoder.record(row, memoryview(data))
    assert (second.program, expansions) == (program, 0)


@pytest.mark.parametrize("n_words", [50, 300_000])
def test_a_record_of_other_words_is_an_alarm(n_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment is stored as plain bytes then."""
    words = np.random.default_rng(1).integers(0, 99, n_words).astype(np.uint16)
    data = memoryview(words.tobytes())
    row = replace(ROW, dtype="U16", n_bytes=words.nbytes, digest=digest_of(data))

    def wrong(program: Node, words: Words, digest: bytes, **options: Any) -> Encoded | None:
        others = words.copy()
        if str(program) != "raw":
            others[-1] ^= 1
        return encode(program, others, digest, **options)

    monkeypatch.setattr("pipeline.encoder.encode", wrong)
    encoder = Encoder(OPTIONS, Prior.uniform())
    encoded, _ = encoder.record(row, data)
    assert encoder.alarms == [row.where]
    assert execute(encoded.record).tobytes() == data


def test_what_follows_is_read_while_a_segment_is_encoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bytes that are encoded are never those of another window, and each next one is there when it is wanted."""
    monkeypatch.setattr(tasks, "READ_BYTES", 1000)
    monkeypatch.setattr(tasks, "GATHERED_BYTES", 1000)
    data = noise(1, 10_000)
    read = [Event() for _ in range(11)]

    class Source(MemoryStore):
        def get_ranges(self, info: ObjectInfo, ranges: Sequence[tuple[int, int]], room: Room | None = None) -> Buffers:
            buffers = []
            for start, stop in ranges:
                buffer = taken(room, stop - start)
                buffer[:] = data[start:stop]
                buffers.append(buffer)
            read[ranges[0][0] // 1000].set()
            return buffers

    read[10].set()
    write, checked = Encoder.write, Encoder.checked

    def waits(encoder: Encoder, row: Row, words: memoryview, out: NDArray[np.uint8]) -> tuple[Encoded, int]:
        assert read[row.offset_bytes // 1000 + 1].wait(10)
        assert digest_of(words) == row.digest
        return write(encoder, row, words, out)

    def same(encoder: Encoder, row: Row, words: memoryview, record: Bytes, out: NDArray[np.uint8]) -> Encoded | None:
        assert digest_of(words) == row.digest
        return checked(encoder, row, words, record, out)

    monkeypatch.setattr(Encoder, "write", waits)
    monkeypatch.setattr(Encoder, "checked", same)
    source, archive = Source({"a": data}), MemoryStore()
    [task] = make_plan([source.head("a")], [opaque.layout(len(data), 1000)], TASK_BYTES, {}).tasks
    rows = TaskWorker(source, archive, "run", new_encoder, str(tmp_path))(task).rows
    assert [row.digest for row in rows] == [digest_of(data[i : i + 1000]) for i in range(0, 10_000, 1000)]


def new_encoder() -> Encoder:
    return Encoder(OPTIONS, Prior.uniform())


class Rooms(MemoryStore):
    """A store that reads into rooms, and lacks an object whose key begins with "gone"."""

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[tuple[int, int]], room: Room | None = None) -> Buffers:
        buffers = []
        for read in super().get_ranges(info, ranges):
            buffer = taken(room, len(read))
            buffer[:] = read
            buffers.append(buffer)
        if info.key.startswith("gone"):
            buffers[0][:] = bytes(len(buffers[0]))
            raise NotFoundError("an object", "none", info.key)
        return buffers


@pytest.mark.parametrize("gathered_bytes", [0, 2500, 1 << 20])
def test_a_file_that_fails_leaves_the_room_alone_in_which_others_are_used(
    gathered_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And windows of several files hold the bytes of each."""
    monkeypatch.setattr(tasks, "GATHERED_BYTES", gathered_bytes)
    files = {f"{name}{i}": noise(i, 1000) for i in range(6) for name in ("a", "gone")}
    source, archive, checked = Rooms(files), MemoryStore(), []

    def late(encoder: Encoder, row: Row, data: memoryview, record: Bytes, out: NDArray[np.uint8]) -> Encoded | None:
        time.sleep(0.02)  # what comes next has been read
        checked.append((row.file, bytes(data)))
        assert execute(record).tobytes() == bytes(data)
        return None

    monkeypatch.setattr(Encoder, "checked", late)
    infos = source.list()
    [task] = make_plan(infos, [opaque.layout(1000, 1000) for _ in infos], TASK_BYTES, {}).tasks
    receipt = TaskWorker(source, archive, "run", new_encoder, str(tmp_path))(task)
    assert [key for key, _ in receipt.failures] == [key for key in sorted(files) if key.startswith("gone")]
    assert checked == [(key, files[key]) for key in sorted(files) if key.startswith("a")]
    assert [row.file for row in receipt.rows] == [key for key, _ in checked]


@pytest.mark.parametrize("waiting_bytes", [0, 2500, 1 << 20])
@pytest.mark.parametrize("memory_bytes", [1 << 20, 1200])
def test_records_that_do_not_restore_are_replaced_in_the_pack(
    memory_bytes: int, waiting_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The segments that share one as well; whether or not the pack holds all of them in memory, or they wait."""
    monkeypatch.setattr(tasks, "RECORDS_BYTES", memory_bytes)
    monkeypatch.setattr(encoder, "RECORD_SLACK_BYTES", 200)
    monkeypatch.setattr(carried, "WAITING_BYTES", waiting_bytes)
    book = Book(8, 0, b"\2\2\2", 2)

    def booked(encoder: Encoder, row: Row, data: memoryview, plain: Encoded) -> tuple[Encoded, Book] | None:
        return (plain, book) if waiting_bytes and bytes(data) == parts[1] else None

    monkeypatch.setattr(Encoder, "booked", booked)
    parts = [noise(i % 4, 1000) for i in range(8)]
    source, archive = MemoryStore({"a": b"".join(parts)}), MemoryStore()
    restores = Encoder._restores
    failed: list[memoryview] = []

    def sabotaged(encoder: Encoder, record: Bytes, data: memoryview, *options: Any, **memory: Any) -> bool:
        assert restores(encoder, record, data, *options, **memory)
        if failed or bytes(data) != parts[2]:
            return True
        failed.append(data)
        return False

    monkeypatch.setattr(Encoder, "_restores", sabotaged)
    [task] = make_plan([source.head("a")], [opaque.layout(8000, 1000)], TASK_BYTES, {}).tasks
    receipt = TaskWorker(source, archive, "run", new_encoder, str(tmp_path))(task)
    assert receipt.alarms == ("a@2000",)
    offsets = [row.pack_offset or 0 for row in receipt.rows]
    assert offsets[:4] == offsets[4:]
    assert len(set(offsets)) == 4
    if memory_bytes > 8000 and not waiting_bytes:
        assert offsets[2] > offsets[3], "another record, behind all of its window"
    if waiting_bytes > 8000:
        assert offsets[:4] == sorted(offsets[:4]), "in its place, where it waited"
    for row, (_, record) in zip(receipt.rows, read_records(archive, receipt.rows), strict=True):
        assert execute(record).tobytes() == parts[row.offset_bytes // 1000]
        assert digest_of(record) == row.stored_digest


def test_what_failed_once_is_told_where_the_pack_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Codebooks that do not pay are left out, and nothing fails the second time."""
    monkeypatch.setattr(carried, "LEAST_GAIN_BYTES", -50)  # records that are no smaller seem to be worth a book

    def booked(encoder: Encoder, row: Row, data: memoryview, plain: Encoded) -> tuple[Encoded, Book]:
        return plain, Book(8, 0, b"\2\2\2", 2)

    restores, failed = Encoder._restores, list[str]()

    def sabotaged(encoder: Encoder, record: Bytes, data: memoryview, *options: Any, **memory: Any) -> bool:
        assert restores(encoder, record, data, *options, **memory)
        failed.append("once")
        return len(failed) > 1

    monkeypatch.setattr(Encoder, "booked", booked)
    monkeypatch.setattr(Encoder, "_restores", sabotaged)
    work, works = TaskWorker._work, list[str]()

    def counted(*arguments: Any, **options: Any) -> tasks.Receipt:
        works.append("once")
        return work(*arguments, **options)

    monkeypatch.setattr(TaskWorker, "_work", counted)
    source = MemoryStore({"a": b"".join(noise(i, 1000) for i in range(4))})
    [task] = make_plan([source.head("a")], [opaque.layout(4000, 1000)], TASK_BYTES, {}).tasks
    receipt = TaskWorker(source, MemoryStore(), "run", new_encoder, str(tmp_path))(task)
    assert len(works) == 2
    assert receipt.alarms == ("a@0",)


def test_a_task_leaves_no_memory_to_the_collector(tmp_path: Path) -> None:
    """It looks seldom: what waits for it adds up, record by record. In a process that has run nothing else."""
    code = "import sys; from tests.pipeline.test_tasks import leftovers; print(*map(leftovers, sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["0", "0"]


def leftovers(scratch_dir: str) -> int:
    """Return how many objects a task of tensors of many sizes, and of a file that fails, leaves to the collector."""
    rng = np.random.default_rng(1)
    files = {f"a{n}": rng.normal(size=n).astype(np.float32).tobytes() for n in (300, 5_000, 1 << 18)}
    files["gone"] = bytes(8)
    source, archive, infos = Rooms(files), MemoryStore(), [ObjectInfo(key, len(files[key]), "") for key in files]
    [task] = make_plan(infos, [opaque.layout(info.n_bytes, 1 << 19) for info in infos], TASK_BYTES, {}).tasks
    work = TaskWorker(source, archive, "run", new_encoder, scratch_dir)
    assert work(task).failures  # what is loaded and made once is there now
    archive.objects.clear()
    gc.collect()
    gc.disable()
    assert work(task).failures
    found = gc.collect()
    gc.enable()
    return found


def test_memory_of_a_task_that_fails_is_used_again(tmp_path: Path) -> None:
    """Though its error is kept."""

    class Full(MemoryStore):
        def put(self, key: str, data: Whole) -> None:
            raise StoreError("room", "none", key)

    made: list[ref[Encoder]] = []

    def counted() -> Encoder:
        encoder = new_encoder()
        made.append(ref(encoder))
        return encoder

    source = Rooms({"a": noise(1, 1000)})
    [task] = make_plan(source.list(), [opaque.layout(1000, 1000)], TASK_BYTES, {}).tasks
    work = TaskWorker(source, Full(), "run", counted, str(tmp_path))
    gc.disable()
    try:
        outcomes = [attempt(work, task) for _ in range(3)]
        assert len(made) == 1
        del work
        assert made[0]() is None
    finally:
        gc.enable()
    assert [isinstance(outcome.error, StoreError) for outcome in outcomes] == [True] * 3
