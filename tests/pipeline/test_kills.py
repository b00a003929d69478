"""Processes that are killed or told to stop, at moments that a seed draws, over a local store.

T8, H01, H02, H05: no object at its final key is ever damaged, and the next run finishes with the same content digest.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from pipeline.archive import checkpoints
from pipeline.store_local import LocalStore
from tests.cases import bf16, noise, safetensors
from tests.invariants import Watched
from tests.pipeline.commands import Capture, Ran, objects_of, write
from tests.processes import ROOT, children, tree

OPTIONS = ("--set", "task_bytes=60000", "--set", "synth.prior=uniform", "--set", "synth.budget=4")
FILES = {
    **{f"{i}.bin": noise(i, 50_000) for i in range(8)},
    "model.safetensors": safetensors([("w", "BF16", [300, 100], bf16(1, 30_000))]),
}
PRELOADED = ["pipeline.driver", "pipeline.tasks", "tests.warm"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("kills") / "source", FILES)


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.ForkServerContext:
    """Processes that start at once: each is a fork of one that has all modules already."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    return forks


def _run(arguments: list[str]) -> None:
    from pipeline.cli import main

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(main(arguments))


# -- one process --------------------------------------------------------------------------------


def kill_at_moments(
    forks: multiprocessing.context.ForkServerContext, source: Path, folder: Path, seed: int, kills: int
) -> None:
    """Kill `kills` runs at drawn moments, each of which goes on where the last one ended; begin anew when one ends."""
    draw = random.Random(seed)

    def started(archive: Path) -> ForkServerProcess:
        arguments = ["archive", str(source), str(archive), "--workers", "1", *OPTIONS, "-q"]
        process = forks.Process(target=_run, args=(arguments,))
        process.start()
        return process

    def finished(archive: Path) -> float:
        start = time.monotonic()
        process = started(archive)
        process.join()
        assert process.exitcode == 0
        return time.monotonic() - start

    finished(folder / "warm")  # the first process compiles what no cache has
    seconds = finished(folder / "undisturbed")
    content = Watched(LocalStore(str(folder / "undisturbed"))).check(FILES)[0].content
    archives, done = [folder / "0"], 0
    watched = Watched(LocalStore(str(archives[-1])))
    while done < kills:
        process = started(archives[-1])
        time.sleep(draw.uniform(0, seconds))
        process.kill()
        process.join()
        snapshots = watched.check(FILES)
        done += process.exitcode == -signal.SIGKILL
        if snapshots:
            assert [snapshot.content for snapshot in snapshots] == [content]
            archives.append(folder / str(len(archives)))
            watched = Watched(LocalStore(str(archives[-1])))
    finished(archives[-1])
    assert [snapshot.content for snapshot in watched.check(FILES)] == [content]


def test_a_driver_killed_at_some_moments(
    context: multiprocessing.context.ForkServerContext, source: Path, tmp_path: Path
) -> None:
    kill_at_moments(context, source, tmp_path, 1, 20)


@pytest.mark.slow
def test_a_driver_killed_at_many_moments(
    context: multiprocessing.context.ForkServerContext, source: Path, tmp_path: Path
) -> None:
    kill_at_moments(context, source, tmp_path, 2, 200)


# -- a pool -------------------------------------------------------------------------------------


def started(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pipeline", *map(str, arguments), "--workers", "2", "-q"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "archive"
    watched = Watched(LocalStore(str(tmp_path / "archive")))
    assert len(watched.check(FILES)) == 1


def finish(source: Path, archive: Path, capsys: Capture) -> Ran:
    ran = Ran(capsys, "archive", source, archive, *OPTIONS)
    whole = Ran(capsys, "archive", source, archive.parent / "undisturbed", *OPTIONS)
    assert ran.code == 0
    assert ran.json["content"] == whole.json["content"]
    return ran


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told", "killed"])
def test_a_pool_whose_driver_ends(number: int, source: Path, archive: Path, capsys: Capture) -> None:
    """H02, H05: its workers end too, and what they have stored is not done again."""
    driver = started("archive", source, archive, *OPTIONS)
    wait_for(lambda: len(objects_of(archive, "runs")) > 3)  # plan, prior and two receipts
    processes = list(tree(driver.pid))
    driver.send_signal(number)
    assert driver.wait(60) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    assert checkpoints(LocalStore(str(archive))) == {}
    receipts = {path for path in objects_of(archive, "runs") if "receipts" in path.parts}
    before = {path: path.stat().st_mtime_ns for path in receipts}
    assert finish(source, archive, capsys).json["resumed_tasks"] == len(receipts) > 1
    assert {path: path.stat().st_mtime_ns for path in receipts} == before


def test_a_worker_of_a_pool_that_is_killed_is_replaced(source: Path, archive: Path, capsys: Capture) -> None:
    """H01: by its process id, in mid task."""
    driver = started("archive", source, archive, *OPTIONS)
    wait_for(lambda: len(objects_of(archive, "runs")) > 2)
    workers = [pid for child in children(driver.pid) for pid in children(child)]
    os.kill(workers[0], signal.SIGKILL)
    assert driver.wait(60) == 0
    assert finish(source, archive, capsys).json["unchanged"]


# -- restoring ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told", "killed"])
def test_restoring_that_ends_midway_leaves_whole_files(
    number: int, source: Path, archive: Path, tmp_path: Path, capsys: Capture
) -> None:
    """H05: no file is half there, and the next command restores the rest."""
    assert Ran(capsys, "archive", source, archive, *OPTIONS).code == 0
    out = tmp_path / "out"
    process = started("restore", archive, out)
    wait_for(lambda: any((out / name).exists() for name in FILES))
    process.send_signal(number)
    assert process.wait(60) in (0, 143 if number == signal.SIGTERM else -signal.SIGKILL)
    there = {path.name: path.read_bytes() for path in out.iterdir() if path.name in FILES}
    assert there.items() <= FILES.items()
    assert there
    before = {name: (out / name).stat().st_mtime_ns for name in there}
    assert Ran(capsys, "restore", archive, out).code == 0
    assert {name: (out / name).read_bytes() for name in FILES} == FILES
    assert {name: (out / name).stat().st_mtime_ns for name in there} == before
