"""Executors: every item has one outcome, whatever happens to the workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

import pytest

from operators.errors import ArchiveError, ChangedError, DeniedError, InternalError, StoreError
from pipeline.executors import Executor, PoolExecutor, SerialExecutor, may_retry


@dataclass(frozen=True)
class Misbehaving:
    """A job whose items say how they end; `folder` counts attempts across processes."""

    folder: str

    def open(self) -> Callable[[str], str]:
        def work(item: str) -> str:
            attempt = len(list(Path(self.folder).glob(f"{item}.*")))
            (Path(self.folder) / f"{item}.{attempt}").touch()
            if item.startswith("die") and attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if item == "orphan" and attempt == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            if item.startswith("flaky") and attempt < 2:
                raise StoreError("a reply", "none", item)
            if item.startswith("changed"):
                raise ChangedError("the planned generation", "another", item)
            if item.startswith("bug"):
                raise ZeroDivisionError(item)
            return item.upper()

        return work


EXECUTORS: list[Executor] = [SerialExecutor(2), PoolExecutor(2, 2, 2), SerialExecutor(2, 3)]


@pytest.mark.parametrize("executor", EXECUTORS, ids=["serial", "pool", "threads"])
def test_every_item_has_one_outcome(executor: Executor, tmp_path: Path) -> None:
    items = ["a", "flaky", "changed", "bug", "b"]
    outcomes = {outcome.item: outcome for outcome in executor.run(Misbehaving(str(tmp_path)), items)}
    assert sorted(outcomes) == sorted(items)
    assert {item: outcome.result for item, outcome in outcomes.items() if outcome.error is None} == {
        "a": "A", "b": "B", "flaky": "FLAKY",
    }  # fmt: skip
    kinds = {item: outcome.error.kind for item, outcome in outcomes.items() if outcome.error is not None}
    assert kinds == {"changed": "changed_during_read", "bug": "internal"}
    assert "ZeroDivisionError" in str(outcomes["bug"].error)
    attempts = {item: len(list(tmp_path.glob(f"{item}.*"))) for item in items}
    assert attempts == {"a": 1, "b": 1, "flaky": 3, "changed": 1, "bug": 3}
    assert {item: outcome.attempts for item, outcome in outcomes.items()} == attempts


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    items = [f"item{i}" for i in range(6)] + ["die1", "die2"]
    outcomes = {outcome.item: outcome for outcome in PoolExecutor(2, 8, 2).run(Misbehaving(str(tmp_path)), items)}
    assert {item: outcome.result for item, outcome in outcomes.items()} == {item: item.upper() for item in items}


def test_the_process_that_forks_workers_is_replaced_when_it_is_killed(tmp_path: Path) -> None:
    items = ["a", "orphan", "b", "c"]
    outcomes = {outcome.item: outcome for outcome in PoolExecutor(2, 8, 1).run(Misbehaving(str(tmp_path)), items)}
    assert {item: outcome.result for item, outcome in outcomes.items()} == {item: item.upper() for item in items}


@dataclass(frozen=True)
class Looking:
    """A job that tells what a worker has: its parent, the files of the driver that it has open, and its environment."""

    inode: int

    def open(self) -> Callable[[str], tuple[int, int, str | None]]:
        def work(_item: str) -> tuple[int, int, str | None]:
            places = list(Path("/proc/self/fd").iterdir())
            n_open = sum(place.stat().st_ino == self.inode for place in places if place.exists())
            return os.getppid(), n_open, os.environ.get("BREVIS_TEST")

        return work


def test_workers_share_nothing_of_the_driver_but_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = set()
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        for value in ("one", "other"):
            monkeypatch.setenv("BREVIS_TEST", value)
            job = Looking(os.fstat(file.fileno()).st_ino)
            for outcome in PoolExecutor(2, 0, 1).run(job, list("abcd")):
                assert outcome.result is not None
                parent, n_open, found = outcome.result
                parents.add(parent)
                assert (n_open, found) == (0, value)
    assert len(parents) == 1  # all are forks of one process
    assert parents != {os.getpid()}


def test_a_worker_that_always_dies_is_given_up() -> None:
    outcomes = list(PoolExecutor(2, 0, 1).run(AlwaysDying(), ["x", "y"]))
    assert [outcome.error is not None and outcome.error.kind for outcome in outcomes] == ["internal"] * 2


@dataclass(frozen=True)
class AlwaysDying:
    """A job whose worker never survives an item."""

    def open(self) -> Callable[[str], str]:
        def work(_item: str) -> str:
            os.kill(os.getpid(), signal.SIGKILL)
            return ""

        return work


def test_lasting_faults_are_not_retried() -> None:
    assert may_retry(StoreError("a reply", "none"))
    assert not may_retry(ChangedError("the planned generation", "another"))


@dataclass(frozen=True)
class Poisoned:
    """A job with one item that always kills its worker."""

    def open(self) -> Callable[[str], str]:
        def work(item: str) -> str:
            if item == "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            return item.upper()

        return work


def test_a_poisonous_item_costs_its_neighbours_nothing() -> None:
    items = ["a", "b", "poison", "c", "d"]
    outcomes = {outcome.item: outcome for outcome in PoolExecutor(2, 1, 2).run(Poisoned(), items)}
    assert outcomes["poison"].error is not None
    assert [outcomes[item].result for item in "abcd"] == ["A", "B", "C", "D"]


@dataclass(frozen=True)
class Unopened:
    """A job that cannot be opened; `folder` counts how often that was tried."""

    folder: str
    is_ours: bool

    def open(self) -> Callable[[str], str]:
        (Path(self.folder) / str(os.getpid())).touch()
        if self.is_ours:
            raise DeniedError("access", "none", "the archive", "check credentials")
        raise ZeroDivisionError("a bug in open")


@pytest.mark.parametrize("executor", EXECUTORS, ids=["serial", "pool", "threads"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_job_that_cannot_be_opened_fails_as_a_whole(executor: Executor, is_ours: bool, tmp_path: Path) -> None:
    job = Unopened(str(tmp_path), is_ours)
    kind: type[ArchiveError] = DeniedError if is_ours else InternalError
    with pytest.raises(kind) as caught:
        list(executor.run(job, ["a", "b", "c"]))
    if is_ours:
        assert caught.value.args == ("access", "none", "the archive", "check credentials")
    else:
        assert "a bug in open" in str(caught.value)
    assert len(list(tmp_path.iterdir())) <= 2  # once per worker, whatever the retries


@dataclass(frozen=True)
class Meeting:
    """A job whose items wait for each other."""

    def open(self) -> Callable[[str], str]:
        both = Barrier(2, timeout=60)

        def work(item: str) -> str:
            both.wait()
            return item.upper()

        return work


@pytest.mark.parametrize("executor", [SerialExecutor(0, 2), PoolExecutor(1, 0, 2)], ids=["serial", "pool"])
def test_a_worker_begins_as_many_items_as_it_may(executor: Executor) -> None:
    outcomes = list(executor.run(Meeting(), list("abcdefgh")))
    assert [(outcome.item, outcome.result) for outcome in outcomes] == [(item, item.upper()) for item in "abcdefgh"]
