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
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.metrics import Counter

from configs.loader import format_bytes
from operators.errors import ArchiveError, InternalError, UsageError
from pipeline.executors import Job, Outcome, attempt, collect_seldom, may_retry
from pipeline.meters import METERS, count, publish

Item = TypeVar("Item")
Result = TypeVar("Result")

WAIT_SECONDS = 1.0
"""A signal to the driver is seen at least this often."""
NOTICE_SECONDS = 10.0
"""So long nobody is at work before that is said, and said again."""

_log = logging.getLogger(__name__)


class Worker:
    """An actor that serves one job.

    Parameters
    ----------
    job : Job
        Travels by the object store, once for all actors of a node.
    """

    def __init__(self, job: Job[Any, Any]) -> None:
        collect_seldom()
        _publish_metrics()
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
        Number of actors; 0 takes one per CPU of the cluster, and more as it grows. One that no node has room for yet
        is what an autoscaler adds a node for, so there is always one.
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
            There is no cluster at this address.
        InternalError
            Workers die as soon as they start.
        ArchiveError
            Workers cannot open the job.
        """
        if not items:
            return
        connect(self.address)
        waiting = deque((item, 0) for item in items)
        staff = _Staff(job, self.memory_bytes)
        try:
            while waiting or staff.running:
                n_workers = self.workers or max(1, staff.n_cpus)
                while staff.size < min(n_workers, len(waiting) + len(staff.running)):
                    if staff.n_stillborn > n_workers * self.retries:
                        step = "install the package on every node, or send it with deploy/submit.sh"
                        raise InternalError("workers that live", staff.last_death, "", step)
                    staff.start()
                while waiting and (free := staff.least_busy(self.in_flight)) is not None:
                    staff.hand_out(free, *waiting.popleft())
                done, _ = ray.wait([*staff.running, *staff.opening], num_returns=1, timeout=WAIT_SECONDS)
                for ref in done:
                    if ref in staff.opening:
                        staff.opened(ref)
                        continue
                    for item, tries, outcome in staff.settle(ref):
                        if outcome is None:
                            waiting.appendleft((item, tries))
                        elif outcome.error is not None and may_retry(outcome.error) and tries < self.retries:
                            count("brevis_retries")
                            waiting.append((item, tries + 1))
                        else:
                            count("brevis_tasks", outcome="done" if outcome.error is None else "failed")
                            yield replace(outcome, attempts=tries + 1)
                staff.look_around()
        finally:
            staff.dismiss()


@dataclass
class _Staff:
    """The actors of one run: those being opened, and those at work, each with its items in the order of their turn."""

    job: Job[Any, Any]
    memory_bytes: int
    n_stillborn: int = 0
    last_death: str = ""
    n_cpus: int = 0
    opening: dict[ray.ObjectRef, int] = field(default_factory=dict)
    running: dict[ray.ObjectRef, int] = field(default_factory=dict)
    _actors: dict[int, Any] = field(default_factory=dict)
    _held: dict[int, dict[ray.ObjectRef, tuple[Any, int]]] = field(default_factory=dict)
    _names: Iterator[int] = field(default_factory=itertools.count)
    _looked: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._job_ref = ray.put(self.job)
        self._title = f"brevis {type(self.job).__name__}"  # what the dashboard counts tasks by
        options = {"num_cpus": 1, "memory": self.memory_bytes, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._new = ray.remote(**options)(Worker)
        self.n_cpus = int(ray.cluster_resources().get("CPU", 0))

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
        except RayError as failure:
            self.n_stillborn += 1
            self.last_death = _shortened(str(failure))
            self._remove(name)
            return
        if error is not None:
            raise error
        self.n_stillborn = 0
        self._held[name] = {}

    def look_around(self) -> None:
        """Count the CPUs now and then, and log where nobody is at work yet: a cluster that is busy, small, or grows.

        It goes on waiting even where no node could ever hold a worker: only an autoscaler knows what may still come.
        """
        now = time.monotonic()
        if now - self._looked < NOTICE_SECONDS:
            return
        self._looked = now
        self.n_cpus = int(ray.cluster_resources().get("CPU", 0))
        if not self._held:
            worker = f"{len(self.opening)} workers of 1 CPU and {format_bytes(self.memory_bytes)} of memory each"
            _log.warning("waiting for %s; %s", worker, why_waiting(self.memory_bytes, ray.nodes()))

    def least_busy(self, limit: int) -> int | None:
        """The actor with the fewest items, if that is less than `limit`."""
        name = min(self._held, key=lambda name: len(self._held[name]), default=None)
        return None if name is None or len(self._held[name]) >= limit else name

    def hand_out(self, name: int, item: Any, tries: int) -> None:
        """Give one more item to an actor."""
        ref = self._actors[name].run.options(name=self._title).remote(item)
        self._held[name][ref] = (item, tries)
        self.running[ref] = name

    def settle(self, ref: ray.ObjectRef) -> list[tuple[Any, int, Outcome[Any, Any] | None]]:
        """Take back an item that has ended, or all items of an actor that has died.

        An actor takes its items in turn, so it died over the first without an answer; those behind it have no part in
        that and have no outcome.
        """
        name = self.running[ref]
        item, tries = self._held[name][ref]
        try:
            outcome = _answer(item, ref)
        except RayActorError:
            return list(self._bury(name))
        del self._held[name][ref], self.running[ref]
        return [(item, tries, outcome)]

    def _bury(self, name: int) -> Iterator[tuple[Any, int, Outcome[Any, Any] | None]]:
        guilty = True
        for ref, (item, tries) in self._remove(name).items():
            try:
                yield item, tries, _answer(item, ref)
            except RayActorError as failure:
                found = _shortened(str(failure))
                error = InternalError("a worker that ends its item", found, "", "see the logs of Ray")
                yield item, tries, Outcome(item, None, error) if guilty else None
                guilty = False

    def _remove(self, name: int) -> dict[ray.ObjectRef, tuple[Any, int]]:
        ray.kill(self._actors.pop(name))  # one that is only out of reach would go on for nothing
        held = self._held.pop(name, {})
        for ref in held:
            del self.running[ref]
        return held

    def dismiss(self) -> None:
        """End all of them."""
        for name in [*self._actors]:
            self._remove(name)


def _answer(item: Any, ref: ray.ObjectRef) -> Outcome[Any, Any]:
    try:
        result, error = ray.get(ref)
    except RayActorError:
        raise
    except RayError as failure:
        result, error = (
            None,
            InternalError("an answer of a worker", _shortened(str(failure)), "", "see the logs of Ray"),
        )
    return Outcome(item, result, error)


def why_waiting(memory_bytes: int, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Why no worker can be placed, as far as the size of the nodes tells.

    Parameters
    ----------
    memory_bytes : int
        What a worker reserves, with one CPU.
    nodes : sequence of mapping
        As `ray.nodes` gives them.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if any(node.get("CPU", 0) >= 1 and node.get("memory", 0) >= memory_bytes for node in alive):
        return "the nodes are busy, or the workers still start"
    largest = max((int(node.get("memory", 0)) for node in alive if node.get("CPU", 0) >= 1), default=0)
    if not largest:
        return "no node has a CPU: add one"
    return f"no node is so large, the largest has {format_bytes(largest)}: use less --memory, or add a larger node"


def _shortened(text: str) -> str:
    """What Ray tells of a death begins with who and ends with why, and is long in between."""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m|\^{2,}", "", text).split())
    return line if len(line) <= 600 else f"{line[:200]} ... {line[-400:]}"


def _look(address: str) -> None:
    """Refuse an address where nothing listens at once; Ray tries for minutes and then ends the process."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise UsageError("a running Ray cluster", str(error), f"--ray {address}", "check the address") from error


def _publish_metrics() -> None:
    """Let Ray export what this process counts."""
    counters = {name: Counter(name, text, labels) for name, (text, labels) in METERS.items()}
    publish(lambda name, amount, labels: counters[name].inc(amount, dict(labels)) if amount > 0 else None)


def connect(address: str) -> None:
    """Connect this process to a running cluster, once.

    It never starts a cluster: Ray would choose an authentication mode for it, and leave it to the next ones.

    Raises
    ------
    UsageError
        There is none.
    """
    if not ray.is_initialized():
        _look(address)
        step = "start one (`ray start --head`, with RAY_AUTH_MODE set), or leave out --ray"
        stop = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            found = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UsageError("a running Ray cluster", found, f"--ray {address}", step) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stop)  # Ray's own handler would end the process with its own code
        _publish_metrics()
