"""What is done by two processes side by side: slow peers, archives, computed sizes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from tests.bench.contests import computed, once
from tests.bench.peers import EVERY
from tests.bench.results import Results, Row
from tests.bench.sizes import archive
from tests.bench.walls import archive_row
from tests.checkpoints import path

FEW_SECONDS = 10


@dataclass(frozen=True)
class Job:
    """Work for one of two processes: a slow peer, an archive, or a computed size."""

    kind: str
    name: str
    file: str
    seconds: float

    def __call__(self) -> Any:
        """Do it: a `Row`, or what stands in `Results.archives`."""
        if self.kind == "peer":
            return once(next(peer for peer in EVERY if peer.name == self.name), self.file)
        if self.kind == "computed":
            return computed(self.name, self.file)
        options = ("--config", self.name, "--workers", "1")
        return archive_row(self.file, self.name, archive(self.file, *options, verify=False))

    def failed(self, why: str) -> Row:
        """Return the row of a job that has raised, or ended its process."""
        return Row(self.file, path(self.file).stat().st_size, self.name, self.kind, "file", note=f"fails: {why[:120]}")


def in_background(jobs: Sequence[Job], results: Results, keep: Callable[[Sequence[Row]], None]) -> None:
    """Do all jobs, the longest first, two at a time; few of them here, since a process takes seconds to start."""

    def done(outcome: Any) -> None:
        if isinstance(outcome, Row):
            keep([outcome])
        else:
            results.archives.append(outcome)
            results.save()

    if sum(job.seconds for job in jobs) < FEW_SECONDS:
        for job in jobs:
            done(job())
        return
    left: list[Job] = []
    _run(sorted(jobs, key=lambda job: -job.seconds), 2, done, left.append)
    for job in left:  # a process has died, and with it what others had to do: whose fault it was shows alone
        _run([job], 1, done, lambda job: done(job.failed("its process died")))


def _run(jobs: Sequence[Job], workers: int, done: Callable[[Any], None], lost: Callable[[Job], None]) -> None:
    """Do jobs in new processes; hand those whose process died to `lost`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=16) as pool:
        futures = {pool.submit(job): job for job in jobs}
        for future in as_completed(futures):
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                lost(futures[future])
            else:
                done(futures[future].failed(f"{type(error).__name__}: {error}") if error else future.result())
