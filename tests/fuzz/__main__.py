"""Fuzz for some seconds, all targets or some: see `tests.fuzz`."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from operators.errors import ArchiveError
from tests.fuzz.targets import TARGETS, Corpus

MOST_SECONDS = 5
"""For one input; interpreted kernels are slow, an endless loop is slower."""
MOST_BYTES = 768 << 20
"""Address space beyond what is in use at the start."""
FEWEST_INPUTS = 30
"""Of one target, however slow the machine."""
MOST_FAILURES = 10
"""Of one target: it ends there."""


@dataclass
class Counts:
    """What became of the inputs of a target."""

    refused: int = 0
    restored: int = 0
    failed: int = 0

    @property
    def tried(self) -> int:
        return self.refused + self.restored + self.failed


def run(seconds: float, seed: int, names: Sequence[str] = tuple(TARGETS)) -> dict[str, Counts]:
    """Fuzz each target for its part of the time; print every failure. The same seed gives the same inputs."""
    corpus = Corpus()
    return {name: _run(name, seconds / len(names), seed, corpus) for name in names}


def _run(name: str, seconds: float, seed: int, corpus: Corpus) -> Counts:
    counts, deadline = Counts(), time.monotonic() + seconds
    for number in itertools.count():
        if counts.failed == MOST_FAILURES or (counts.tried >= FEWEST_INPUTS and time.monotonic() > deadline):
            return counts
        signal.alarm(MOST_SECONDS if signal.getsignal(signal.SIGALRM) is _too_long else 0)
        try:
            TARGETS[name](random.Random(f"{seed} {name} {number}"), corpus)
            counts.restored += 1
        except ArchiveError:
            counts.refused += 1
        except Exception:  # noqa: BLE001 -- any exception here is the finding
            counts.failed += 1
            print(f"seed {seed}, {name} {number}:\n{traceback.format_exc()}")
        finally:
            signal.alarm(0)
    raise AssertionError


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"one input took over {MOST_SECONDS} s")


def main() -> int:
    """Fuzz; return 1 if anything but an `ArchiveError` escaped."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _too_long)
    found = run(seconds, int(sys.argv[2]) if len(sys.argv) > 2 else 0, sys.argv[3:] or list(TARGETS))
    for name, counts in found.items():
        print(f"{name}: {counts.refused} refused, {counts.restored} restored, {counts.failed} failed")
    return 1 if any(counts.failed for counts in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
