"""Codebooks in an archive: learned from the planning pass, chosen where they pay, carried by packs that need them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import Stream
from operators.books import Book, Books
from operators.program import LIT, Literal, Node
from operators.run import Encoded
from pipeline import carried, encoder
from pipeline.archive import find_snapshot, load_manifest
from pipeline.calibration import Pupil
from pipeline.carried import LEAST_GAIN_BYTES, Carried, Settled
from pipeline.locations import open_store
from pipeline.packs import pack_index
from pipeline.parquet import to_parquet
from pipeline.plan import Plan
from pipeline.planning import fresh_plan
from pipeline.rows import Row
from pipeline.sampling import sample_plan
from synth.prior import Prior
from tests import checkpoints
from tests.cases import safetensors
from tests.memory_store import MemoryStore
from tests.pipeline.commands import Capture, Ran, files_of, objects_of, write

BOOKS = [Book(8, first, b"\2\2\2", 2) for first in range(4)]
BOOK_BYTES = len(BOOKS[0].to_bytes())
BOOKED = Node(Literal("fixed", (5, 3)))
ROW = Row("a", 0, 1, "t", "I8", (1,), 0, 1, 1, 1, "safetensors", None, 0)
LEARNED = ("--workers", "1", "--set", "synth.prior=learned", "--set", "synth.budget=8", "--set", "task_bytes=500KiB")


def encoded(name: int, n_bytes: int) -> Encoded:
    return Encoded(name.to_bytes(4, "little") + bytes(n_bytes - 4), Stream(8, 1), LIT, (), 0)


# -- what a pack carries ------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(20, 90), st.integers(LEAST_GAIN_BYTES, 15), st.integers(-1, 3)), max_size=60),
    st.sampled_from([200, 1 << 20]),
)
def test_no_pack_is_larger_for_its_books(records: list[tuple[int, int, int]], room_bytes: int) -> None:
    """Each record is a size, what a book saves of it, and the book, -1 for none."""
    pack, without, stored, most = Carried(), 0, [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carried, "WAITING_BYTES", room_bytes)
        for index, (n_bytes, gain, book) in enumerate(records):
            without += n_bytes
            booked = None if book < 0 else (encoded(index, n_bytes - gain), BOOKS[book])
            stored += list(pack.settle(index.to_bytes(4, "little"), encoded(index, n_bytes), booked))
            most = max(most, pack._n_bytes)
        stored += list(pack.rest())
    assert [digest for digest, _ in stored] == [i.to_bytes(4, "little") for i in range(len(records))]
    assert all(bytes(one.record[:4]) == digest for digest, one in stored)
    assert most <= room_bytes
    assert pack.is_idle
    assert not pack._n_bytes
    n_booked = sum(len(one.record) < n_bytes for (_, one), (n_bytes, *_) in zip(stored, records, strict=True))
    saved = without - sum(len(one.record) for _, one in stored)
    assert saved >= len(pack.books.to_bytes()) + n_booked * LEAST_GAIN_BYTES
    assert saved > 0 or not len(pack.books)
    possible = {k: sum(gain - LEAST_GAIN_BYTES for _, gain, book in records if book == k) for k in range(4)}
    if room_bytes > 1 << 10:
        assert {book.id for book in pack.books} == {BOOKS[k].id for k in range(4) if possible[k] > BOOK_BYTES}


# -- an archive of small tensors ----------------------------------------------------------------


def small(dtype: str, seed: int, n_tensors: int = 100) -> bytes:
    """Return a file of tensors of 4 to 5 KiB, like real ones in that each has a scale of its own."""
    rng, tensors = np.random.default_rng(seed), []
    for index in range(n_tensors):
        values = rng.standard_normal(int(rng.integers(4100, 5000)))
        if dtype == "I8":
            data = np.clip(np.rint(values * rng.uniform(20, 30)), -127, 127).astype(np.int8).tobytes()
        else:
            scaled = (values[: values.size // 2 + 1] * 2.0 ** rng.integers(-8, 0)).astype("<f4")
            data = (scaled.view("<u4") >> 16).astype("<u2").tobytes()
        tensors.append((f"t{index}", dtype, (len(data) // (1 if dtype == "I8" else 2),), data))
    return safetensors(tensors)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", {"a.safetensors": small("BF16", 1), "b.safetensors": small("I8", 2)})


def programs(archive: Path) -> list[str]:
    store = open_store(str(archive))
    return [row.program or "" for row in load_manifest(store, find_snapshot(store))]


def stored_bytes(archive: Path) -> int:
    return sum(file.stat().st_size for file in objects_of(archive, "packs", "manifests"))


def test_books_are_taken_where_they_pay_and_restoring_needs_nothing_but_packs(
    tmp_path: Path, source: Path, capsys: Capture
) -> None:
    with_books, without, disabled = (tmp_path / name for name in ("with", "without", "disabled"))
    for archive, options in (
        (with_books, LEARNED),
        (without, (*LEARNED, "--set", "synth.prior=shipped")),
        (disabled, (*LEARNED, "--set", 'synth.disable=["fixed"]')),
    ):
        assert Ran(capsys, "archive", source, archive, *options).code == 0
    named = [program for program in programs(with_books) if "fixed[" in program]
    assert len(named) > 80
    assert {"fixed", "merge"} == {program.partition("[")[0] for program in named}
    assert not any("fixed" in program for program in (*programs(without), *programs(disabled)))
    assert stored_bytes(with_books) < stored_bytes(disabled)
    shutil.rmtree(with_books / "runs")
    assert Ran(capsys, "verify", with_books).json["verified"] == len(programs(with_books))
    assert Ran(capsys, "restore", with_books, tmp_path / "out").code == 0
    assert files_of(tmp_path / "out") == files_of(source)


@pytest.mark.parametrize("name", ["fracast-f32", "silero-f32"])
def test_no_archive_of_a_checkpoint_is_larger_for_its_books(tmp_path: Path, name: str, capsys: Capture) -> None:
    """In the first of them eight records wait for books, in vain."""
    with_books, without = tmp_path / "with", tmp_path / "without"
    source = checkpoints.path(name)
    for archive, options in ((with_books, ()), (without, ("--set", 'synth.disable=["fixed"]'))):
        assert Ran(capsys, "archive", source, archive, "--name", "x", "--workers", "1", *options).code == 0
    assert stored_bytes(with_books) <= stored_bytes(without)


def test_a_pack_that_is_larger_for_its_books_is_made_again_without(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is no smaller by a book, and here taken even so: what a pack adds up to decides."""
    noise = [(f"t{i}", "I8", (4500,), np.random.default_rng(i).bytes(4500)) for i in range(60)]
    source = write(tmp_path / "source", {"a.safetensors": safetensors(noise)})
    for module in (carried, encoder):
        monkeypatch.setattr(module, "LEAST_GAIN_BYTES", -50)
    with_books, without = tmp_path / "with", tmp_path / "without"
    for archive, options in ((with_books, LEARNED), (without, (*LEARNED, "--set", 'synth.disable=["fixed"]'))):
        assert Ran(capsys, "archive", source, archive, "--name", "x", *options).code == 0
    assert [path.name for path in objects_of(with_books, "packs")] == [
        path.name for path in objects_of(without, "packs")
    ]


@given(st.lists(st.tuples(st.integers(20, 90), st.integers(LEAST_GAIN_BYTES, 15), st.integers(-1, 3)), max_size=60))
def test_a_pack_pays_where_it_and_its_rows_are_no_larger(records: list[tuple[int, int, int]]) -> None:
    """The rows without books are those that a pack would have had; each second record has two rows."""
    pack, sizes, settled = Carried(), dict[bytes, int](), list[Settled]()
    for number, (n_bytes, gain, book) in enumerate(records):
        plain, digest = encoded(number, n_bytes), number.to_bytes(32, "little")
        booked = None if book < 0 else (replace(encoded(number, n_bytes - gain), program=BOOKED), BOOKS[book])
        settled += list(pack.settle(digest, plain, booked))
        sizes[digest] = n_bytes
    settled += list(pack.rest())
    rows, plain_rows, at, plain_at = list[Row](), list[Row](), 0, 0
    for digest, one in settled:
        row = replace(ROW, tensor=digest.hex(), digest=digest, program=str(one.program), stored_bytes=len(one.record))
        for copy in range(1 + digest[0] % 2):
            rows.append(replace(row, pack_offset=at, tensor=f"{row.tensor} {copy}"))
            plain_rows.append(replace(rows[-1], program=str(LIT), stored_bytes=sizes[digest], pack_offset=plain_at))
        at, plain_at = at + len(one.record), plain_at + sizes[digest]
    elsewhere = replace(ROW, digest=bytes(32), pack=bytes(32), program="x", stored_bytes=1, pack_offset=0)
    assert pack._without_books([*rows, elsewhere]) == [*plain_rows, elsewhere]
    index = pack_index(rows)
    room = plain_at + len(pack_index(plain_rows)) + len(to_parquet(plain_rows))
    taken = at + len(index) + len(to_parquet(rows)) + len(pack.books.to_bytes())
    assert pack.pays(rows, index) == (taken <= room or not len(pack.books))


def test_any_number_of_workers_gives_the_same_books_and_packs(tmp_path: Path, source: Path, capsys: Capture) -> None:
    found = []
    for workers in ("1", "2"):
        archive = tmp_path / workers
        assert Ran(capsys, "archive", source, archive, *LEARNED, "--workers", workers).code == 0
        [prior] = [path for path in objects_of(archive, "runs") if path.name == "prior"]
        found.append((prior.read_bytes(), [path.name for path in objects_of(archive, "packs", "manifests")]))
    assert found[0] == found[1]
    assert len(Prior.load(found[0][0]).books) > 1


def test_another_attempt_takes_the_books_that_are_there(
    tmp_path: Path, source: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    Ran(capsys, "archive", source, first, *LEARNED)
    [prior] = [path for path in objects_of(first, "runs") if path.name == "prior"]
    [run] = (first / "runs").iterdir()
    (second / "runs" / run.name).mkdir(parents=True)
    for path in (first / "FORMAT", run / "plan", run / "prior"):
        target = second / path.relative_to(first)
        shutil.copy(path, target)

    def never(self: Pupil, *_: object) -> Books:
        raise AssertionError("the books are there")

    monkeypatch.setattr(Pupil, "books", never)
    assert Ran(capsys, "archive", source, second, *LEARNED).code == 0
    assert [path.name for path in objects_of(second, "packs")] == [path.name for path in objects_of(first, "packs")]
    assert (second / prior.relative_to(first)).read_bytes() == prior.read_bytes()


# -- what they are learned from -----------------------------------------------------------------


def planned(files: dict[str, bytes]) -> tuple[MemoryStore, Plan]:
    store = MemoryStore(dict(files))
    plan, failures, _ = fresh_plan(store, store.list(), 100_000)
    assert not failures
    return store, plan


def test_a_pass_that_was_watched_and_one_of_its_own_teach_the_same() -> None:
    store, plan = planned({"a.safetensors": small("BF16", 1), "b.safetensors": small("I8", 2)})
    watching, own = Pupil(), Pupil()
    samples = list(watching.watch(sample_plan(store, plan)))
    n_calls = len(store.log)
    taught = watching.books(store, plan)
    assert len(store.log) == n_calls  # nothing is read a second time
    assert taught.to_bytes() == own.books(store, plan).to_bytes()
    assert len(taught) > 1
    assert len(samples) >= 120


def test_large_tensors_teach_no_books() -> None:
    rng = np.random.default_rng(1)
    tensors = [(f"t{i}", "BF16", (80_000,), rng.bytes(160_000)) for i in range(12)]
    store, plan = planned({"a.safetensors": safetensors(tensors)})
    assert len(Pupil().books(store, plan)) == 0


def test_a_prior_keeps_its_books() -> None:
    books = Books(BOOKS[:2])
    prior = replace(Prior.uniform(), books=books)
    assert Prior.load(prior.dump()).books.to_bytes() == books.to_bytes()
    assert b'"books"' not in Prior.uniform().dump()
    assert Prior.uniform().plus(prior).books.to_bytes() == books.to_bytes()
    assert prior.plus(Prior.uniform()).books.to_bytes() == books.to_bytes()
