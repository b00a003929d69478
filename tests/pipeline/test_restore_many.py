"""One large file written by many workers: stretches in any order, published once all are there and right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import ArchiveError, DamageError, ExistsError, FormatError, InternalError, StoreError
from pipeline import restore
from pipeline.archive import find_snapshot, load_manifest
from pipeline.cli import main
from pipeline.executors import Executor, Outcome, PoolExecutor, SerialExecutor
from pipeline.locations import open_source, open_store
from pipeline.packs import pack_key
from pipeline.reading import ArchivedFile, archived_files
from pipeline.restore import Restored, RestoreItem, RestoreJob, cut, restore_files
from pipeline.rows import Row
from pipeline.snapshots import FileEntry
from pipeline.store import Store
from pipeline.store_local import LocalStore
from tests.cases import bf16, safetensors
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, write
from tests.processes import ROOT
from tests.s3server import S3Server, s3_server

STRETCH_BYTES, PART_BYTES = 30_000, 1 << 14
LARGE, SMALL = "model.safetensors", "config.json"
FILES = {
    LARGE: safetensors([(f"w{i}", "BF16", [50, 100], bf16(i, 5000)) for i in range(40)]),
    SMALL: b'{"hidden": 64}' * 20,
}
N_BYTES = len(FILES[LARGE])


@dataclass(frozen=True)
class Place:
    """An archive, and where its files are restored to."""

    archive: str
    target: str
    options: dict[str, str]

    @property
    def store(self) -> Store:
        return open_store(self.target, self.options)

    @property
    def job(self) -> RestoreJob:
        return RestoreJob(self.archive, self.target, self.options, False)

    @property
    def files(self) -> list[ArchivedFile]:
        archive = open_source(self.archive)
        snapshot = find_snapshot(archive)
        return archived_files(snapshot, load_manifest(archive, snapshot))

    def restore(self, executor: Executor | None = None, job: Any = None) -> dict[str, Outcome[ArchivedFile, Restored]]:
        """Restore all files; what became of each. Every byte is told to be done once."""
        done: list[int] = []
        outcomes = restore_files(job or self.job, self.files, executor or SerialExecutor(1, 2), 1, done.append)
        found = {outcome.item.entry.key: outcome for outcome in outcomes}
        assert sum(done) == sum(map(len, FILES.values()))
        return found

    def there(self) -> dict[str, bytes]:
        """What is at the target; nothing that is half there, ever."""
        assert self.store.unfinished() == []
        return {info.key: self.store.get(info.key, max_bytes=info.n_bytes) for info in self.store.list()}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def archived(folder: Path) -> Path:
    """Archive `FILES` in a folder; the archive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", sys.stderr)
        arguments = ["archive", write(folder / "source", FILES), folder / "archive", *QUICK, "-q"]
        assert main(list(map(str, arguments))) == 0
    return folder / "archive"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archived(tmp_path_factory.mktemp("many"))


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, archive: Path, tmp_path: Path, monkeypatch: Patch) -> Place:
    """A target on which the large file is many stretches, and many parts."""
    monkeypatch.setattr(restore, "SEGMENT_BYTES", STRETCH_BYTES)
    monkeypatch.setattr(restore, "STEPPED_STRETCHES", 1)
    monkeypatch.setattr("pipeline.store_s3.part_bytes", lambda _: PART_BYTES)
    if request.param == "local":
        return Place(str(archive), str(tmp_path / "out"), {})
    server: S3Server = request.getfixturevalue("server")
    return Place(str(archive), server.url(f"{tmp_path.name}/out"), server.options)


local = pytest.mark.parametrize("place", ["local"], indirect=True)


# -- round trips --------------------------------------------------------------------------------


def test_a_file_of_many_stretches_comes_back(place: Place, monkeypatch: Patch) -> None:
    items: list[RestoreItem] = []

    class Watched(SerialExecutor):
        def run(self, job: Any, some: Any) -> Any:
            items.extend(some)
            return super().run(job, list(reversed(some)))  # in any order

    found = place.restore(Watched(0, 2))
    assert {key: outcome.result for key, outcome in found.items()} == dict.fromkeys(FILES, Restored(False))
    assert place.there() == FILES
    stretches = [item for item in items if item.staged]
    assert len(stretches) > 8
    assert {item.file.entry.key for item in stretches} == {LARGE}
    assert sum(len(item.file.rows) for item in stretches) < 2 * len(place.files[1].rows)
    assert [item.staged for item in items if item.file.entry.key == SMALL] == [None]


def test_a_pool_restores_it_too(place: Place) -> None:
    """Workers are told which stretches, so that they need not have cut them."""
    assert all(outcome.error is None for outcome in place.restore(PoolExecutor(2, 1, 2)).values())
    assert place.there() == FILES


def flipped(position: int) -> bytes:
    """The large file with one bit changed."""
    return FILES[LARGE][:position] + bytes([FILES[LARGE][position] ^ 1]) + FILES[LARGE][position + 1 :]


def test_what_is_there_is_left_alone_refused_or_replaced(place: Place) -> None:
    store = place.store
    store.put(LARGE, FILES[LARGE])
    before = store.head(LARGE)
    assert place.restore()[LARGE].result == Restored(True)
    assert store.head(LARGE) == before
    middle = N_BYTES // 2
    for position in (middle, middle + 10_000):  # in two neighbours, one of which is not the first of its stretch
        store.put(LARGE, flipped(position))
        assert isinstance(place.restore()[LARGE].error, ExistsError)
    for data in (flipped(N_BYTES - 1), FILES[LARGE][:-1]):
        store.put(LARGE, data)
        assert isinstance(place.restore()[LARGE].error, ExistsError)
        assert place.there() == {**FILES, LARGE: data}
        replaced = place.restore(job=replace(place.job, overwrite=True))
        assert (replaced[LARGE].result, replaced[SMALL].result) == (Restored(False), Restored(True))
        assert place.there() == FILES


def test_a_store_of_one_writer_gets_it_whole(archive: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(restore, "SEGMENT_BYTES", STRETCH_BYTES)
    place = Place(str(archive), f"memory://many-{os.getpid()}/out", {})
    assert all(outcome.error is None for outcome in place.restore().values())
    assert place.there() == FILES
    place.store.put(LARGE, bytes(N_BYTES))
    assert isinstance(place.restore()[LARGE].error, ExistsError)
    assert place.restore(job=replace(place.job, overwrite=True))[LARGE].result == Restored(False)
    assert place.there() == FILES


@given(
    st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 2000), st.sampled_from([1, 7, 64, 512])
)  # fmt: skip
def test_stretches_tile_a_file(sizes: list[int], stretch_bytes: int, step_bytes: int) -> None:
    row = Row("f", 0, 1, None, None, None, 0, 0, 0, 0, "opaque", None, 0)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = tuple(replace(row, offset_bytes=start, n_bytes=size) for start, size in zip(starts, sizes, strict=True))
    file = ArchivedFile(FileEntry("f", sum(sizes), "", None, "opaque", None, ""), rows)
    end = 0
    for item in cut(file, stretch_bytes, step_bytes):
        assert item.begin == end
        assert item.begin % step_bytes == 0
        assert item.n_bytes >= min(stretch_bytes, file.n_bytes - item.begin)
        assert item.file.rows == file.touched(item.begin, item.end)
        end = item.end
        if step_bytes == 1:
            assert item.file.rows[-1].end_bytes == end
    assert end == file.n_bytes


# -- faults -------------------------------------------------------------------------------------


@local
def test_a_damaged_segment_fails_its_file_alone(place: Place, tmp_path: Path) -> None:
    [large] = [file for file in place.files if file.entry.key == LARGE]
    row = large.rows[20]
    damaged = tmp_path / "damaged"
    write(damaged, files_of(Path(place.archive)))
    pack = damaged / pack_key(row.pack or b"")
    data = bytearray(pack.read_bytes())
    data[(row.pack_offset or 0) + (row.stored_bytes or 0) // 2] ^= 1
    pack.write_bytes(data)
    found = place.restore(job=replace(place.job, archive_url=str(damaged)))
    assert isinstance(found[LARGE].error, DamageError)
    assert "w" in str(found[LARGE].error)
    assert place.there() == {SMALL: FILES[SMALL]}


def test_rows_of_another_file_are_refused_before_anything_is_written(place: Place, monkeypatch: Patch) -> None:
    files = place.files
    lying = [replace(file, rows=(replace(file.rows[0], digest=bytes(32)), *file.rows[1:])) for file in files]
    lying = [false if false.entry.key == LARGE else file for false, file in zip(lying, files, strict=True)]
    monkeypatch.setattr(Place, "files", property(lambda _: lying))
    assert isinstance(place.restore()[LARGE].error, FormatError)
    assert place.there() == {SMALL: FILES[SMALL]}


@local
def test_the_record_of_another_segment_is_not_published(place: Place, monkeypatch: Patch) -> None:
    """A record that is whole, and of the right size, where another one is meant."""
    files = place.files
    [large] = [file for file in files if file.entry.key == LARGE]
    first, second = (row for row in large.rows if row.tensor in {"w20", "w21"})
    other = replace(first, pack=second.pack, pack_bytes=second.pack_bytes, pack_offset=second.pack_offset)
    other = replace(other, stored_bytes=second.stored_bytes)
    lying = replace(large, rows=tuple(other if row == first else row for row in large.rows))
    lies = [file if file.entry.key != LARGE else lying for file in files]
    monkeypatch.setattr(Place, "files", property(lambda _: lies))
    assert isinstance(place.restore()[LARGE].error, DamageError)
    assert place.there() == {SMALL: FILES[SMALL]}


def losing_the_first(monkeypatch: Patch, place: Place) -> list[int]:
    """Let the first stretch of the large file fail; where those begin that are written."""
    written: list[int] = []
    real = type(place.store).write_stretch

    def faulty(self: Any, staged: Any, begin: int, end: int, data: Any) -> Any:
        if (staged.key, begin) == (LARGE, 0):
            raise StoreError("room", "none", LARGE)
        done = real(self, staged, begin, end, data)
        written.extend([begin] * (staged.key == LARGE))
        return done

    monkeypatch.setattr(type(place.store), "write_stretch", faulty)
    return written


def test_when_a_stretch_has_failed_no_other_is_written(place: Place, monkeypatch: Patch) -> None:
    written = losing_the_first(monkeypatch, place)
    assert isinstance(place.restore(SerialExecutor(0, 1))[LARGE].error, StoreError)
    assert written == []
    assert place.there() == {SMALL: FILES[SMALL]}


def test_what_could_not_be_abandoned_at_once_is_when_all_have_ended(place: Place, monkeypatch: Patch) -> None:
    """A store that did not answer, or a worker that was still writing."""
    calls: list[object] = []
    real = type(place.store).abandon

    def deaf(self: Any, staged: Any) -> None:
        calls.append(staged)
        if len(calls) > 1:
            real(self, staged)

    monkeypatch.setattr(type(place.store), "abandon", deaf)
    assert losing_the_first(monkeypatch, place) == []
    assert isinstance(place.restore(SerialExecutor(0, 1))[LARGE].error, StoreError)
    assert place.there() == {SMALL: FILES[SMALL]}


def failing(monkeypatch: Patch, place: Place, verb: str, times: int, error: ArchiveError) -> list[object]:
    """Let a verb of the target fail so often, after it has done its work."""
    met: list[object] = []
    real = getattr(type(place.store), verb)

    def faulty(self: Store, *arguments: Any, **named: Any) -> Any:
        done = real(self, *arguments, **named)
        if len(met) < times:
            met.append(arguments)
            raise error
        return done

    monkeypatch.setattr(type(place.store), verb, faulty)
    return met


def test_a_stretch_may_be_written_twice(place: Place, monkeypatch: Patch) -> None:
    met = failing(monkeypatch, place, "write_stretch", 3, StoreError("an answer", "none", LARGE))
    assert all(outcome.error is None for outcome in place.restore(SerialExecutor(3, 2)).values())
    assert len(met) == 3
    assert place.there() == FILES


@pytest.mark.parametrize("verb", ["write_stretch", "publish"])
def test_a_target_that_takes_no_more_is_left_as_it_was(place: Place, monkeypatch: Patch, verb: str) -> None:
    store = place.store
    store.put(LARGE, b"old")

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("room", "none", LARGE)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), verb, refuse)
        patch.setattr(type(store), "put_new", lambda *_: None)
        found = place.restore(job=replace(place.job, overwrite=True))
    assert isinstance(found[LARGE].error, StoreError)
    assert place.there()[LARGE] == b"old"
    assert place.restore(job=replace(place.job, overwrite=True))[LARGE].error is None
    assert place.there() == FILES


@dataclass(frozen=True)
class Deadly:
    """A restore job whose worker is killed over the stretch at `begin`, half written, so many times."""

    job: RestoreJob
    begin: int
    folder: str
    times: int

    def open(self) -> Callable[[RestoreItem], Restored]:
        restorer = self.job.open()

        def work(item: RestoreItem) -> Restored:
            is_due = item.begin <= self.begin < item.end and len(list(Path(self.folder).iterdir())) < self.times
            if item.staged and is_due:
                Path(self.folder, str(time.monotonic_ns())).touch()
                if item.staged.step_bytes == 1:
                    half = bytes(item.n_bytes // 2)
                    restorer._target.write_stretch(item.staged, item.begin, item.begin + len(half), [half])
                os.kill(os.getpid(), signal.SIGKILL)
            return restorer(item)

        return work

    def open_target(self) -> Store:
        return self.job.open_target()

    @property
    def overwrite(self) -> bool:
        return self.job.overwrite


@local
@pytest.mark.parametrize("times", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_a_worker_killed_midway(place: Place, tmp_path: Path, times: int) -> None:
    """Its stretch is done again; where it dies over it every time, the file has failed and nothing of it is left."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    found = place.restore(PoolExecutor(2, 2, 1), Deadly(place.job, N_BYTES // 2, str(deaths), times))
    assert len(list(deaths.iterdir())) >= min(times, 3)
    if times == 1:
        assert all(outcome.error is None for outcome in found.values())
        assert place.there() == FILES
    else:
        assert isinstance(found[LARGE].error, InternalError)
        assert place.there() == {SMALL: FILES[SMALL]}


def test_a_command_that_fails_or_is_left_abandons_what_it_began(place: Place) -> None:
    outcomes = restore_files(place.job, place.files, SerialExecutor(0, 1), 0, lambda _: None)
    assert next(outcomes).item.entry.key == SMALL
    assert len(place.store.unfinished()) == 1
    outcomes.close()  # type: ignore[attr-defined]
    assert place.there() == {SMALL: FILES[SMALL]}


TOLD = """
import sys, time
from pipeline import restore, store_local
from pipeline.cli import main
restore.SEGMENT_BYTES = int(sys.argv[1])
real = store_local.LocalStore.write_stretch
def slow(*arguments):
    time.sleep(0.3)
    return real(*arguments)
store_local.LocalStore.write_stretch = slow
sys.exit(main(sys.argv[2:]))
"""


@local
def test_told_to_stop_it_leaves_nothing(place: Place) -> None:
    """H05."""
    arguments = ["restore", place.archive, place.target, "--include", LARGE, "--workers", "1", "-q"]
    process = subprocess.Popen([sys.executable, "-c", TOLD, str(STRETCH_BYTES), *arguments], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (Path(place.target).is_dir() and any(left.n_bytes for left in LocalStore(place.target).unfinished())):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert place.there() == {}


def test_the_command_tells_all_of_it(place: Place, capsys: Capture) -> None:
    options = [word for option in place.options.items() for word in ("--storage-option", "=".join(option))]
    ran = Ran(capsys, "restore", place.archive, place.target, *options)
    assert ran.code == 0
    rows = [row for file in place.files for row in file.rows]
    assert (ran.json["files"], ran.json["segments"], ran.json["verified"]) == (2, len(rows), len(rows))
    assert ran.json["source_bytes"] == sum(map(len, FILES.values()))
    place.store.put(LARGE, b"theirs")
    assert Ran(capsys, "restore", place.archive, place.target, *options).code == 1
    again = Ran(capsys, "restore", place.archive, place.target, *options, "--keep-going")
    assert (again.code, [failure["key"] for failure in again.json["failures"]]) == (3, [LARGE])
    assert place.there() == {**FILES, LARGE: b"theirs"}
