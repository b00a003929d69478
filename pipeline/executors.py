"""Where the work of a command runs: in this process, or in a pool of spawned processes.

A `Job` is a frozen, picklable description; each worker opens it once and calls the result with one item
after the other. Items and results are small frozen dataclasses: tensor bytes move between a worker and
the stores only. `on_ray.py` runs the same jobs in actors. Whatever runs them, results are the same.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from operators.errors import ArchiveError, ChangedError, DeniedError, InternalError, NotFoundError, StoreError

Item = TypeVar("Item")
Result = TypeVar("Result")
_Item_contra = TypeVar("_Item_contra", contravariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)


class Job(Protocol[_Item_contra, _Result_co]):
    """What a worker needs to know before its first item; pickled once per worker."""

    def open(self) -> Callable[[_Item_contra], _Result_co]:
        """Open stores, load the prior; called once in each worker."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Item, Result]):
    """What became of one item: a result, or the error that it failed with in the end."""

    item: Item
    result: Result | None
    error: ArchiveError | None


class Executor(Protocol):
    """Runs the items of a job."""

    def run(self, job: Job[Item, Result], items: Sequence[Item]) -> Iterator[Outcome[Item, Result]]:
        """Yield the outcome of every item, in any order.

        Raises
        ------
        ArchiveError
            The job cannot be opened.
        """
        ...


def attempt(work: Callable[[Item], Result], item: Item) -> Outcome[Item, Result]:
    """Call `work`; an error becomes an outcome that pickles."""
    try:
        return Outcome(item, work(item), None)
    except ArchiveError as error:
        return Outcome(item, None, error)
    except Exception:  # noqa: BLE001 -- a worker goes on after any fault; the text of it reaches the report
        return Outcome(item, None, InternalError("no fault in a worker", traceback.format_exc()))


def opened(job: Job[Item, Result]) -> Callable[[Item], Result] | ArchiveError:
    """Open `job`; an error is returned, for a worker has nobody to raise it to."""
    outcome = attempt(lambda job: job.open(), job)
    if outcome.error is not None:
        return outcome.error
    assert outcome.result is not None
    return outcome.result


def may_retry(error: ArchiveError) -> bool:
    """Whether another attempt can end otherwise: a store that failed, a worker that died."""
    lasting = isinstance(error, ChangedError | DeniedError | NotFoundError)
    return isinstance(error, InternalError) or (isinstance(error, StoreError) and not lasting)


@dataclass(frozen=True, slots=True)
class SerialExecutor:
    """Runs in this process.

    Attributes
    ----------
    retries : int
        How often a failed item is tried again.
    """

    retries: int

    def run(self, job: Job[Item, Result], items: Sequence[Item]) -> Iterator[Outcome[Item, Result]]:
        work = opened(job)
        if isinstance(work, ArchiveError):
            raise work
        for item in items:
            outcome = attempt(work, item)
            for _ in range(self.retries):
                if outcome.error is None or not may_retry(outcome.error):
                    break
                outcome = attempt(work, item)
            yield outcome


@dataclass(frozen=True, slots=True)
class PoolExecutor:
    """Runs in spawned processes, so that nothing of this process is shared by accident.

    Attributes
    ----------
    workers : int
        Number of processes.
    retries : int
        How often a failed item is tried again; an item whose worker died counts as failed.
    in_flight : int
        Items handed out and not yet done, per worker.
    """

    workers: int
    retries: int
    in_flight: int

    def run(self, job: Job[Item, Result], items: Sequence[Item]) -> Iterator[Outcome[Item, Result]]:
        if len(items) == 1:  # a pool would only take its time to start
            yield from SerialExecutor(self.retries).run(job, items)
            return
        waiting = deque((item, 0) for item in items)
        suspects: deque[tuple[Item, int]] = deque()
        while waiting or suspects:
            if suspects:  # one alone, so that its death is its own
                yield from self._one_pool(job, deque([suspects.popleft()]), suspects)
            else:
                yield from self._one_pool(job, waiting, suspects)

    def _one_pool(
        self, job: Job[Item, Result], waiting: deque[tuple[Item, int]], suspects: deque[tuple[Item, int]]
    ) -> Iterator[Outcome[Item, Result]]:
        """Serve `waiting` until it is empty or a worker dies, which breaks the pool.

        Whose fault that was cannot be known, so the items in flight become `suspects`; an item that was alone in
        its pool has failed once.
        """
        alone = len(waiting) == 1
        workers = min(self.workers, len(waiting))
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _open_in_worker, (job,))
        running: dict[Future[Outcome[Item, Result] | ArchiveError], tuple[Item, int]] = {}
        broken = False
        try:
            while running or (waiting and not broken):
                while waiting and not broken and len(running) < workers * self.in_flight:
                    item, tries = waiting.popleft()
                    try:
                        running[pool.submit(_work_in_worker, item)] = (item, tries)
                    except BrokenProcessPool:
                        waiting.appendleft((item, tries))
                        broken = True
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    item, tries = running.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenProcessPool:
                        broken = True
                        if not alone:
                            suspects.append((item, tries))
                            continue
                        died = InternalError("a worker that ends its item", "one that died", "", "see its log")
                        outcome = Outcome(item, None, died)
                    if isinstance(outcome, ArchiveError):
                        raise outcome
                    if outcome.error is not None and may_retry(outcome.error) and tries < self.retries:
                        (suspects if broken else waiting).append((item, tries + 1))
                    else:
                        yield outcome
        finally:
            # Told to stop, what runs is finished and what waits is not begun.
            pool.shutdown(wait=True, cancel_futures=True)


_work: Callable[[Any], Any] | ArchiveError | None = None
"""The opened job of this pool worker, or why it cannot be opened; a pool runs one job."""


def _open_in_worker(job: Job[Any, Any]) -> None:
    global _work  # noqa: PLW0603 -- a pool hands state to its workers through globals only
    _work = opened(job)  # an error raised here would look like a worker that died


def _work_in_worker(item: Any) -> Outcome[Any, Any] | ArchiveError:
    assert _work is not None
    return _work if isinstance(_work, ArchiveError) else attempt(_work, item)


def local_executor(workers: int, retries: int, in_flight: int) -> Executor:
    """Return the executor for `workers` processes on this machine; 0 takes one per CPU, 1 this process."""
    workers = workers or len(os.sched_getaffinity(0))
    return SerialExecutor(retries) if workers == 1 else PoolExecutor(workers, retries, in_flight)
