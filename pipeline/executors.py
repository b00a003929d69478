"""Where the work of a command runs: in this process, or in a pool of processes.

A `Job` is a frozen, picklable description; each worker opens it once and calls the result with one item
after the other. Items and results are small frozen dataclasses: tensor bytes move between a worker and
the stores only. `on_ray.py` runs the same jobs in actors. Whatever runs them, results are the same.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Generic, Protocol, TypeVar

from operators.errors import ArchiveError, ChangedError, DeniedError, InternalError, NotFoundError, StoreError

HANDED_OUT = 2
"""Groups of items that each worker of a pool has, one of them at work; a group is this many times `in_flight`."""

Item = TypeVar("Item")
Result = TypeVar("Result")
_Item_contra = TypeVar("_Item_contra", contravariant=True)
_Result_co = TypeVar("_Result_co", covariant=True)


class Job(Protocol[_Item_contra, _Result_co]):
    """What a worker needs to know before its first item; pickled once per worker."""

    def open(self) -> Callable[[_Item_contra], _Result_co]:
        """Open stores, load the prior; called once in each worker.

        What it returns may be called from several threads. It computes in one of them at a time, and lets the others
        wait for their stores meanwhile.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Item, Result]):
    """What became of one item, after so many attempts: a result, or the error that it failed with in the end."""

    item: Item
    result: Result | None
    error: ArchiveError | None
    attempts: int = 1


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
        return Outcome(item, None, without_frames(error))
    except Exception:  # noqa: BLE001 -- a worker goes on after any fault; the text of it reaches the report
        return Outcome(item, None, InternalError("no fault in a worker", traceback.format_exc()))


def without_frames(error: ArchiveError) -> ArchiveError:
    """Return `error` without what it came from: frames hold all memory of the work that failed."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def each_attempt(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, retries: int = 0
) -> Iterator[Outcome[Item, Result]]:
    """Yield the outcome of every item in order, with as many of them begun as there are `threads`."""

    def attempts(item: Item) -> Outcome[Item, Result]:
        outcome = attempt(work, item)
        while outcome.error is not None and may_retry(outcome.error) and outcome.attempts <= retries:
            outcome = replace(attempt(work, item), attempts=outcome.attempts + 1)
        return outcome

    if threads == 1:
        yield from map(attempts, items)
        return
    begun: deque[Future[Outcome[Item, Result]]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            if len(begun) == threads:
                yield begun.popleft().result()
            begun.append(pool.submit(attempts, item))
        while begun:
            yield begun.popleft().result()
    finally:
        # Told to stop, what runs is finished and what waits is not begun.
        pool.shutdown(wait=True, cancel_futures=True)


def collect_seldom() -> None:
    """Let the collector of this process look for cycles seldom: a search makes many objects, and few cycles.

    At the interpreter's own setting it takes a quarter of the time of a calibration.
    """
    gc.set_threshold(20_000)


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
    in_flight : int
        Items begun and not yet done.
    """

    retries: int
    in_flight: int = 1

    def run(self, job: Job[Item, Result], items: Sequence[Item]) -> Iterator[Outcome[Item, Result]]:
        work = opened(job)
        if isinstance(work, ArchiveError):
            raise work
        yield from each_attempt(work, items, self.in_flight, self.retries)


@dataclass(frozen=True, slots=True)
class PoolExecutor:
    """Runs in processes that share nothing of this one by accident.

    They are forks of one that was started anew, imports what the job needs and does nothing else, so that this takes a
    second once and not in each. It has no client, no open file, and of threads only the idle ones of OpenBLAS and
    jemalloc, which are made for that.

    Attributes
    ----------
    workers : int
        Number of processes.
    retries : int
        How often a failed item is tried again; an item whose worker died counts as failed.
    in_flight : int
        Items begun and not yet done, per worker.
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
            if suspects:
                yield from self._one_pool(job, suspects, suspects, alone=True)
            else:
                yield from self._one_pool(job, waiting, suspects, alone=len(waiting) == 1)

    def _one_pool(
        self,
        job: Job[Item, Result],
        waiting: deque[tuple[Item, int]],
        suspects: deque[tuple[Item, int]],
        *,
        alone: bool,
    ) -> Iterator[Outcome[Item, Result]]:
        """Serve `waiting` until it is empty or a worker dies, which breaks the pool.

        Whose fault that was cannot be known, so the items in flight become `suspects`. Those are served one `alone`
        after the other, so that a death is that of its item, which has failed once.
        """
        workers = 1 if alone else min(self.workers, len(waiting))
        most_handed_out = 1 if alone else workers * HANDED_OUT
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([type(job).__module__])  # the server stays for the jobs that come after the first
        pool = ProcessPoolExecutor(workers, forks, _open_in_worker, (job, dict(os.environ)))
        running: dict[Future[list[Outcome[Item, Result]] | ArchiveError], list[tuple[Item, int]]] = {}
        broken = False
        try:
            while running or (waiting and not broken):
                while waiting and not broken and len(running) < most_handed_out:
                    n_handed = 1 if alone else self._group(len(waiting), workers)
                    handed = [waiting.popleft() for _ in range(n_handed)]
                    try:
                        future = pool.submit(_work_in_worker, [item for item, _ in handed], self.in_flight)
                        running[future] = handed
                    except BrokenProcessPool:
                        waiting.extendleft(reversed(handed))
                        broken = True
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    handed = running.pop(future)
                    try:
                        outcomes = future.result()
                    except BrokenProcessPool:
                        broken = True
                        if not alone:
                            suspects.extend(handed)
                            continue
                        died = InternalError("a worker that ends its item", "one that died", "", "see its log")
                        outcomes = [Outcome(handed[0][0], None, died)]
                    if isinstance(outcomes, ArchiveError):
                        raise outcomes
                    for outcome, (item, tries) in zip(outcomes, handed, strict=True):
                        if outcome.error is not None and may_retry(outcome.error) and tries < self.retries:
                            (suspects if broken else waiting).append((item, tries + 1))
                        else:
                            yield replace(outcome, attempts=tries + 1)
        finally:
            # Told to stop, what runs is finished and what waits is not begun.
            pool.shutdown(wait=True, cancel_futures=True)

    def _group(self, n_items: int, workers: int) -> int:
        """Return how many of the items that wait are handed out together: fewer at the end, so that all end together.

        There are always as many as a worker begins at once, unless another one would have nothing to do.
        """
        shared = max(self.in_flight, n_items // (workers * HANDED_OUT))
        return min(shared, HANDED_OUT * self.in_flight, -(-n_items // workers))


_work: Callable[[Any], Any] | ArchiveError | None = None
"""The opened job of this pool worker, or why it cannot be opened; a pool runs one job."""


def _open_in_worker(job: Job[Any, Any], environment: dict[str, str]) -> None:
    Thread(target=_end_with_driver, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)  # as it is now, and not as it was when the first pool was made
    collect_seldom()
    global _work  # noqa: PLW0603 -- a pool hands state to its workers through globals only
    _work = opened(job)  # an error raised here would look like a worker that died


def _end_with_driver() -> None:
    """End this process when its driver was killed: nobody is left to hand out work or to tell it to stop."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


def _work_in_worker(items: Sequence[Any], threads: int) -> list[Outcome[Any, Any]] | ArchiveError:
    assert _work is not None
    return _work if isinstance(_work, ArchiveError) else list(each_attempt(_work, items, threads))


def local_executor(workers: int, retries: int, in_flight: int) -> Executor:
    """Return the executor for `workers` processes on this machine; 0 takes one per CPU, 1 this process."""
    workers = workers or len(os.sched_getaffinity(0))
    return SerialExecutor(retries, in_flight) if workers == 1 else PoolExecutor(workers, retries, in_flight)
