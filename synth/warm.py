"""Compile what archiving and restoring run, before the first of either: ``python -m synth.warm``.

Compiled kernels are kept (`operators.kernels.cache`); an image that ran this starts its workers warm. The jobs compile
few kernels in common, so several processes do them at once; one that is compiled twice is kept once.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace

from operators.warm import JOBS as OPERATORS
from operators.warm import run
from synth.booked import LEAST_SAMPLES, Lessons, Shelf
from synth.calibrate import TensorSample, calibrate
from synth.learn import OPTIONS
from synth.prior import Prior
from synth.structured import structured
from synth.synthesis import synthesise

N_WORDS, BUDGET = 1 << 16, 64
MOST_PROCESSES = 4
"""The longest job takes about a third of all time."""


def search() -> None:
    """Search programs for words with structure, and learn a prior from them."""
    options, prior = replace(OPTIONS, budget=BUDGET), Prior.shipped()
    tensors = [TensorSample(one.words, one.dtype, one.rows, one.columns, one.name) for one in structured(N_WORDS)]
    calibrate(tensors, options, prior)
    for one in tensors:
        synthesise(one.words, dtype=one.dtype, rows=one.rows, columns=one.columns, options=options, prior=prior)


def shelves() -> None:
    """Learn codebooks for words of several widths, and choose one."""
    lessons = Lessons()
    tensors = [(one.words, one.dtype) for seed in range(LEAST_SAMPLES) for one in structured(4096, seed)]
    for words, dtype in tensors:
        lessons.add(words, dtype)
    shelf = Shelf(lessons.learn())
    for words, dtype in tensors:
        found = shelf.choose(words, dtype)
        if found is not None:
            run(found.program, words, shelf.books)


JOBS: tuple[Callable[[], None], ...] = (*OPERATORS[:1], search, *OPERATORS[1:], shelves)


def warm() -> None:
    """Compile or load all kernels, in as many processes as there are CPUs, at most `MOST_PROCESSES`."""
    n_processes = min(os.cpu_count() or 1, MOST_PROCESSES)
    with multiprocessing.get_context("spawn").Pool(n_processes) as pool:
        for _ in pool.imap_unordered(_do, range(len(JOBS)), chunksize=1):
            pass


def _do(index: int) -> None:
    JOBS[index]()


if __name__ == "__main__":
    warm()
