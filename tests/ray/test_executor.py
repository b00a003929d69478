"""The executor by itself: every item has one outcome, whatever dies."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import ray

from operators.errors import ChangedError, DeniedError, InternalError, UsageError
from pipeline import on_ray, restore
from pipeline.executors import SerialExecutor
from pipeline.on_ray import RayExecutor, why_waiting
from tests.pipeline.test_restore_many import FILES, STRETCH_BYTES, Place, archived
from tests.processes import ROOT
from tests.ray.cluster import Cluster
from tests.ray.jobs import Deadly, Faulty, Loaded, Meeting, Refused, Squares

MEMORY = 256 << 20


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> Iterator[str]:
    """The address of the cluster, with this process as a driver."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, cluster.env[name])
        ray.init(cluster.address, log_to_driver=False)
        yield cluster.address
        ray.shutdown()


def test_every_item_has_one_outcome(address: str) -> None:
    executor = RayExecutor(address, 0, 2, 2, MEMORY)
    items = list(range(40))
    outcomes = list(executor.run(Squares(), items))
    assert sorted((outcome.item, outcome.result[0]) for outcome in outcomes if outcome.result) == [
        (i, i * i) for i in items
    ]
    assert list(executor.run(Squares(), [])) == []


def test_nodes_work_side_by_side(address: str, tmp_path: Path) -> None:
    """Each item waits until another worker has one."""
    outcomes = list(RayExecutor(address, 0, 2, 1, MEMORY).run(Meeting(str(tmp_path), 2), range(2)))
    assert len({outcome.result for outcome in outcomes}) == 2


def test_actors_write_one_file_together(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "SEGMENT_BYTES", STRETCH_BYTES)
    place = Place(str(archived(tmp_path)), str(tmp_path / "out"), {})
    assert all(outcome.error is None for outcome in place.restore(RayExecutor(address, 2, 1, 2, MEMORY)).values())
    assert place.there() == FILES


@pytest.mark.parametrize("in_flight", [1, 3])
def test_faults_are_retried_or_reported_as_in_one_process(address: str, tmp_path: Path, in_flight: int) -> None:
    executor = RayExecutor(address, 2, 3, in_flight, MEMORY)
    outcomes = {outcome.item: outcome for outcome in executor.run(Faulty(str(tmp_path)), range(12))}
    assert sorted(outcomes) == list(range(12))
    assert {item: outcomes[item].result for item in (0, 3, 5, 11)} == {0: 0, 3: 9, 5: 25, 11: 121}
    assert isinstance(outcomes[7].error, InternalError)
    assert isinstance(outcomes[8].error, ChangedError)
    assert isinstance(outcomes[9].error, InternalError)
    assert "not one of ours" in str(outcomes[9].error)
    tries = {item: (tmp_path / f"item-{item}").stat().st_size for item in outcomes}
    assert 4 <= tries[7] <= 7  # an answer that was lost with its worker may put the blame on another
    assert tries[8] == 1  # no attempt can end otherwise
    safe = [item for item in range(12) if item not in {5, 7}]
    serial = {outcome.item: outcome for outcome in SerialExecutor(3).run(Faulty(str(tmp_path / "..")), safe)}
    assert {item: outcome.result for item, outcome in serial.items()} == {i: outcomes[i].result for i in serial}


def test_a_worker_killed_from_outside_is_replaced(cluster: Cluster, address: str) -> None:
    executor = RayExecutor(address, 2, 2, 2, MEMORY)
    outcomes = executor.run(Squares(0.1), range(16))
    first = [outcome.result for outcome in islice(outcomes, 3)]
    victim = first[0][1] if first[0] else 0
    assert victim in cluster.workers()
    os.kill(victim, signal.SIGKILL)
    found = [result for result in [*first, *(outcome.result for outcome in outcomes)] if result]
    assert sorted(square for square, _ in found) == [i * i for i in range(16)]
    assert victim not in {pid for _, pid in found[8:]}
    assert victim not in cluster.workers()


def test_a_job_that_cannot_be_opened_fails_as_a_whole(address: str) -> None:
    with pytest.raises(DeniedError):
        list(RayExecutor(address, 2, 2, 2, MEMORY).run(Refused(), range(4)))
    with pytest.raises(InternalError, match="actor died"):
        list(RayExecutor(address, 2, 1, 2, MEMORY).run(Deadly(), range(4)))


def test_workers_that_cannot_be_placed_hold_nothing_up(address: str) -> None:
    """Four are asked for, and the cluster has two CPUs."""
    outcomes = list(RayExecutor(address, 4, 2, 2, MEMORY).run(Squares(0.05), range(16)))
    assert len(outcomes) == 16
    assert all(outcome.error is None for outcome in outcomes)


def test_no_more_is_in_flight_than_is_asked_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Y03 of the field cases: two workers with two items each, while a hundred wait."""
    hand_out, in_flight = on_ray._Staff.hand_out, list[int]()

    def counted(self: Any, *arguments: Any) -> None:
        hand_out(self, *arguments)
        in_flight.append(len(self.running))

    monkeypatch.setattr(on_ray._Staff, "hand_out", counted)
    assert len(list(RayExecutor(address, 2, 0, 2, MEMORY).run(Squares(0.02), range(100)))) == 100
    assert (len(in_flight), max(in_flight)) == (100, 4)


class StopWaiting(BaseException):
    """As a signal would."""


def test_a_run_that_cannot_begin_says_so(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No node has 32 TiB; the third notice ends the wait."""

    def stop_at_third(_record: logging.LogRecord) -> bool:
        if len(caplog.records) == 2:
            raise StopWaiting
        return True

    monkeypatch.setattr(on_ray, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(on_ray, "NOTICE_SECONDS", 0.5)
    log = logging.getLogger("pipeline.on_ray")
    log.addFilter(stop_at_third)
    started = time.monotonic()
    try:
        with pytest.raises(StopWaiting):
            list(RayExecutor(address, 2, 0, 1, 1 << 45).run(Squares(), range(4)))
    finally:
        log.removeFilter(stop_at_third)
    assert time.monotonic() - started >= 1.5
    assert all("waiting for 2 workers of 1 CPU and 33554432MiB" in text for text in caplog.messages)
    assert all("no node is so large" in text for text in caplog.messages)
    outcomes = RayExecutor(address, 1, 0, 1, MEMORY).run(Squares(0.8), range(4))
    next(outcomes)
    caplog.clear()
    assert len(list(outcomes)) == 3
    assert caplog.messages == []  # the worker is at work


def test_a_cluster_that_grows_from_nothing_is_used_as_it_grows(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `deploy/kubernetes/cluster.yaml` begins: a head without CPUs, no worker, an autoscaler that sees demand."""
    seen, real = iter([0, 0, 1]), ray.cluster_resources
    monkeypatch.setattr(on_ray, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": n} if (n := next(seen, 2)) < 2 else real())
    outcomes = list(RayExecutor(address, 0, 2, 1, MEMORY).run(Squares(0.1), range(60)))
    assert all(outcome.error is None for outcome in outcomes)
    workers = [outcome.result[1] for outcome in outcomes if outcome.result]
    assert len(set(workers[:3])) == 1
    assert len(set(workers)) == 2


def test_why_a_run_waits() -> None:
    def node(cpus: float, memory_bytes: float, alive: bool = True) -> dict[str, object]:
        return {"Alive": alive, "Resources": {"CPU": cpus, "memory": memory_bytes}}

    assert "busy" in why_waiting(100, [node(1, 99), node(1, 100)])
    assert "largest has 99B" in why_waiting(100, [node(1, 99), node(0, 500), node(4, 500, alive=False)])
    assert "no node has a CPU" in why_waiting(100, [node(0, 500), {"Alive": True, "Resources": {}}])


def test_an_abandoned_run_ends_its_workers(cluster: Cluster, address: str) -> None:
    outcomes = RayExecutor(address, 2, 2, 2, MEMORY).run(Squares(0.1), range(1000))
    while len(cluster.workers()) < 2:
        assert next(outcomes).error is None
    outcomes.close()  # type: ignore[attr-defined]  # it is a generator
    deadline = time.monotonic() + 20
    while cluster.workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cluster.workers() == []


def test_a_prior_is_sent_once(cluster: Cluster, address: str) -> None:
    before = cluster.object_store_bytes()
    outcomes = list(RayExecutor(address, 1, 2, 2, MEMORY).run(Loaded(os.urandom(4 << 20)), range(50)))
    assert {outcome.result for outcome in outcomes} == {4 << 20}
    assert cluster.object_store_bytes() - before < 3 * (4 << 20)  # put once, copied to one node


def test_no_cluster_is_a_usage_error() -> None:
    """In a process of its own: this one is connected."""
    import subprocess
    import sys

    code = "from pipeline.on_ray import connect; connect('127.0.0.1:9')"
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=90
    )
    assert finished.returncode == 1
    assert f"{UsageError.__module__}.{UsageError.__name__}" in finished.stderr
    assert "check the address" in finished.stderr
