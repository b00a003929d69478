"""Run jobs in the actors of a Ray cluster; the only importer of ray.

The driver hands out items and takes back rows. A job, with the prior that it carries, is put into the object store
once; tensor bytes never enter it: each actor reads and writes the stores itself. An actor gets items only once it has
opened its job, so that one which the cluster cannot place yet holds nothing up, and a bounded number of them, so that
a long list of tasks does not stall the head. A worker that dies, or whose node is lost, is replaced; its items go to
whoever is free. It may still finish what it was doing: every write of a task is named by its content or create-only.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from operators.errors import ArchiveError, InternalError, UsageError
from pipeline.executors import Executor, Job, Outcome, attempt, may_retry

Item = TypeVar("Item")
Result = TypeVar("Result")

WAIT_SECONDS = 1.0
"""A signal to the driver is seen at least this often."""


class Worker:
    """An actor that serves one job.

    Parameters
    ----------
    job : Job
        Travels by the object store, once for all actors of a node.
    """

    def __init__(self, job: Job[Any, Any]) -> None:
        self._job = job
        self._work: Callable[[Any], Any] | None = None

    def open(self) -> ArchiveError | None:
        """Open stores and load the prior; the error that this failed with."""
        outcome = attempt(lambda job: job.open(), self._job)
        self._work = outcome.result
        return outcome.error

    def run(self, item: Any) -> tuple[Any, ArchiveError | None]:
        """Return the result of one item, or the error that it failed with."""
        assert self._work is not None, "items are handed out to open workers only"
        outcome = attempt(self._work, item)
        return outcome.result, outcome.error


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Runs in actors, one CPU each.

    Attributes
    ----------
    address : str
        Of a running cluster; ``auto`` takes that of ``RAY_ADDRESS``, of the job that this is, or of this machine.
    workers : int
        Number of actors; 0 takes one per CPU of the cluster.
    retries : int
        How often a failed item is tried again; an item whose worker died counts as failed.
    in_flight : int
        Items handed out and not yet done, per worker.
    memory_bytes : int
        What a node must have free to be given a worker.
    """

    address: str
    workers: int
    retries: int
    in_flight: int
    memory_bytes: int

    def run(self, job: Job[Item, Result], items: Sequence[Item]) -> Iterator[Outcome[Item, Result]]:
        """Yield the outcome of every item, in any order.

        Raises
        ------
        UsageError
            There is no cluster at this address, or it has no CPU.
        InternalError
            Workers die as soon as they start.
        ArchiveError
            Workers cannot open the job.
        """
        if not items:
            return
        n_cpus = connect(self.address)
        waiting = deque((item, 0) for item in items)
        staff = _Staff(job, self.memory_bytes)
        running: dict[ray.ObjectRef, tuple[int, Item, int]] = {}
        try:
            n_workers = min(self.workers or n_cpus, len(waiting))
            n_starts_left = n_workers * (self.retries + 1)
            while waiting or running:
                while staff.size < min(n_workers, len(waiting) + len(running)):
                    if not n_starts_left:
                        raise InternalError("workers that live", "one death after another", "", "see the logs of Ray")
                    n_starts_left -= 1
                    staff.start()
                while waiting and (free := staff.least_busy(self.in_flight)) is not None:
                    item, tries = waiting.popleft()
                    running[staff.hand_out(free, item)] = (free, item, tries)
                done, _ = ray.wait([*running, *staff.opening], num_returns=1, timeout=WAIT_SECONDS)
                for ref in done:
                    if ref in staff.opening:
                        staff.opened(ref)
                        continue
                    name, item, tries = running.pop(ref)
                    result, error = staff.result(name, ref)
                    if error is not None and may_retry(error) and tries < self.retries:
                        waiting.append((item, tries + 1))
                    else:
                        yield Outcome(item, result, error)
        finally:
            staff.dismiss()


@dataclass
class _Staff:
    """The actors of one run: those being opened, and those at work with the number of their items."""

    job: Job[Any, Any]
    memory_bytes: int
    opening: dict[ray.ObjectRef, int] = field(default_factory=dict)
    _actors: dict[int, Any] = field(default_factory=dict)
    _load: dict[int, int] = field(default_factory=dict)
    _names: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._job_ref = ray.put(self.job)
        options = {"num_cpus": 1, "memory": self.memory_bytes, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._new = ray.remote(**options)(Worker)

    @property
    def size(self) -> int:
        """Actors that are at work or on their way."""
        return len(self._actors)

    def start(self) -> None:
        """Ask the cluster for one more."""
        name = next(self._names)
        self._actors[name] = self._new.remote(self._job_ref)
        self.opening[self._actors[name].open.remote()] = name

    def opened(self, ref: ray.ObjectRef) -> None:
        """Put an actor that has opened its job to work; one that died meanwhile is gone."""
        name = self.opening.pop(ref)
        try:
            error = ray.get(ref)
        except RayError:
            self._remove(name)
            return
        if error is not None:
            raise error
        self._load[name] = 0

    def least_busy(self, limit: int) -> int | None:
        """The actor with the fewest items, if that is less than `limit`."""
        name = min(self._load, key=self._load.__getitem__, default=None)
        return None if name is None or self._load[name] >= limit else name

    def hand_out(self, name: int, item: Any) -> ray.ObjectRef:
        """Give one more item to an actor."""
        self._load[name] += 1
        return self._actors[name].run.remote(item)

    def result(self, name: int, ref: ray.ObjectRef) -> tuple[Any, ArchiveError | None]:
        """Take back one item of an actor, which may have died over it."""
        if name in self._load:
            self._load[name] -= 1
        try:
            result, error = ray.get(ref)
        except RayActorError:
            self._remove(name)
            return None, InternalError("a worker that ends its item", "one that died", "", "see the logs of Ray")
        except RayError as failure:
            return None, InternalError("an answer of a worker", str(failure), "", "see the logs of Ray")
        return result, error

    def _remove(self, name: int) -> None:
        self._load.pop(name, None)
        actor = self._actors.pop(name, None)
        if actor is not None:
            ray.kill(actor)  # one that is only out of reach would go on for nothing

    def dismiss(self) -> None:
        """End all of them."""
        for name in [*self._actors]:
            self._remove(name)


def connect(address: str) -> int:
    """Connect this process to a running cluster, once; the number of its CPUs.

    It never starts a cluster: Ray would choose an authentication mode for it, and leave it to the next ones.

    Raises
    ------
    UsageError
        There is none, or it has no CPU.
    """
    if not ray.is_initialized():
        step = "start one (`ray start --head`, with RAY_AUTH_MODE set), or leave out --ray"
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            found = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UsageError("a running Ray cluster", found, f"--ray {address}", step) from error
    n_cpus = int(ray.cluster_resources().get("CPU", 0))
    if not n_cpus:
        raise UsageError("a cluster with CPUs", "none", f"--ray {address}", "add a node")
    return n_cpus


def ray_executor(address: str, workers: int, retries: int, in_flight: int, memory_bytes: int) -> Executor:
    """Return the executor for `workers` actors of the cluster at `address`; 0 takes one per CPU."""
    return RayExecutor(address, workers, retries, in_flight, memory_bytes)
