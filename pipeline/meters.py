"""Figures of a run for those who watch it: bytes, tasks, retries, seconds by stage. Nothing of them reaches an archive.

Counting costs nothing until somebody publishes: on Ray `on_ray.py` does, as metrics that Prometheus scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

METERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "brevis_source_bytes": ("Source bytes that are done, failed ones among them.", ("command",)),
    "brevis_stored_bytes": ("Bytes of the packs that `archive` has stored.", ()),
    "brevis_tasks": ("Tasks that ended, done or failed.", ("outcome",)),
    "brevis_retries": ("Attempts that failed and were tried again.", ()),
    "brevis_stage_seconds": ("Wall time that workers spent, by stage: read, encode, check, store.", ("stage",)),
}
"""Counters by name: what they count, and their labels."""
Sink = Callable[[str, float, Mapping[str, str]], None]

_sinks: list[Sink] = []


def publish(sink: Sink) -> None:
    """Hand every count of this process to `sink` from now on, as ``sink(name, amount, labels)``, and to no other."""
    _sinks[:] = [sink]


def count(name: str, amount: float = 1, **labels: str) -> None:
    """Add `amount` to a counter of `METERS`."""
    for sink in _sinks:
        sink(name, amount, labels)


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Count the wall time of the block, whether it succeeds or not."""
    started = time.monotonic()
    try:
        yield
    finally:
        count("brevis_stage_seconds", time.monotonic() - started, stage=stage)
