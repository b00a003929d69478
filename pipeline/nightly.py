"""One archive run for each checkpoint below a source, and one object that tells of them all.

A checkpoint that fails does not keep the others; one that is still being written waits for the next time; one that is
archived already costs a listing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from configs.recipe import Config
from operators.errors import ArchiveError, ExistsError, NothingMatchedError
from pipeline.archive import create_archive
from pipeline.checkpoints import TRACKER_BYTES_MAX, Found, find_checkpoints, why_unfinished
from pipeline.driver import ArchiveRun, Order, inside_source
from pipeline.executors import Executor
from pipeline.locations import open_source, open_store, source_folder
from pipeline.progress import Progress
from pipeline.snapshots import time_text
from pipeline.store import SourceStore, Store
from pipeline.summary import Summary

OUTCOMES = ("archived", "unchanged", "incomplete", "unfinished", "failed", "stopped")
ARCHIVED, UNCHANGED, INCOMPLETE, UNFINISHED, FAILED, STOPPED = OUTCOMES
"""What came of a checkpoint: committed; nothing to do; committed without items that failed; still written; nothing;
nothing yet, as the run was told to stop."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What came of one checkpoint.

    Attributes
    ----------
    checkpoint : str
        Its name in the archive: its key below the source.
    outcome : str
        One of `OUTCOMES`.
    reason : str
        Why it is unfinished or failed.
    summary : Summary or None
        Of its run, where that came to its end.
    """

    checkpoint: str
    outcome: str
    reason: str = ""
    summary: Summary | None = None


@dataclass(slots=True)
class NightSummary:
    """What came of all checkpoints; stored in the archive as ``jobs/<time>.json``."""

    source: str
    started: str
    seconds: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Return how many checkpoints ended so."""
        return sum(entry.outcome == outcome for entry in self.entries)

    def as_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        done = [entry.summary for entry in self.entries if entry.summary is not None]
        new = [summary for summary in done if not summary.unchanged]
        return {
            "command": "archive",
            "source": self.source,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "outcomes": {name: self.count(name) for name in OUTCOMES},
            "source_bytes": sum(summary.source_bytes for summary in new),
            "stored_bytes": sum(summary.stored_bytes for summary in new),
            "checkpoints": [
                {
                    "checkpoint": entry.checkpoint,
                    "outcome": entry.outcome,
                    "reason": entry.reason,
                    "summary": None if entry.summary is None else entry.summary.as_json(),
                }
                for entry in self.entries
            ],
        }

    def text(self) -> str:
        """Return the summary in a line."""
        counts = [f"{self.count(name)} {name}" for name in OUTCOMES]
        return f"archive: {len(self.entries)} checkpoints: {', '.join(counts)}, {self.seconds:.1f} s"


class ArchiveNight:
    """An ``archive`` command over many checkpoints.

    Parameters
    ----------
    order : Order
        Its source is what the checkpoints lie below; its filters choose among their objects, by keys below that
        checkpoint. Its name of a checkpoint is not used.
    pattern : str
        As of `find_checkpoints`.
    config : Config
    """

    def __init__(self, order: Order, pattern: str, config: Config) -> None:
        self._order = order
        self._pattern = pattern
        self._config = config
        options = config.run.storage_options
        self._source: SourceStore = open_source(order.source_url, options)
        self._archive: Store = open_store(order.archive_url, options, single_writer=order.single_writer)

    def find(self) -> list[tuple[Found, str | None]]:
        """Return the checkpoints, each with what shows that it is still being written, in the order of their keys.

        Raises
        ------
        NothingMatchedError
            There is none.
        """
        inside = inside_source(self._order.source_url, self._order.archive_url)
        dated = {item.key: item for item in self._source.dated() if inside is None or not item.key.startswith(inside)}
        now = self._source.now()
        keys = frozenset(dated)
        found = find_checkpoints(sorted(keys), self._pattern)
        if not found:
            step = "the pattern matches names below SRC, part by part: see --dry-run"
            raise NothingMatchedError(
                f"checkpoints named {self._pattern}", f"none among {len(keys)} objects", self._order.source_url, step
            )
        return [
            (
                checkpoint,
                why_unfinished(
                    checkpoint,
                    keys,
                    lambda key: self._source.get(key, max_bytes=TRACKER_BYTES_MAX),
                    max(0, now - max(dated[key].written for key in checkpoint.keys)),
                    self._config.run.settle_seconds,
                ),
            )
            for checkpoint in found
        ]

    def run(
        self, found: Sequence[tuple[Found, str | None]], executor: Executor, progress: Callable[[str], Progress]
    ) -> NightSummary:
        """Archive each of `found` that is whole; store and return what came of them."""
        started = time.monotonic()
        create_archive(self._archive, single_writer=self._order.single_writer)
        night = NightSummary(self._order.source_url, time_text(datetime.now(UTC)))
        try:
            for checkpoint, unfinished in found:
                if unfinished is not None:
                    night.entries.append(Entry(checkpoint.name, UNFINISHED, unfinished))
                    continue
                with progress(checkpoint.name) as shown:
                    night.entries.append(self._archive_one(checkpoint, executor, shown))
        finally:  # also where the run is told to stop: the summary says how far it came
            night.entries += [Entry(one.name, STOPPED, "run again") for one, _ in found[len(night.entries) :]]
            night.seconds = time.monotonic() - started
            self._store(night)
        return night

    def _archive_one(self, checkpoint: Found, executor: Executor, progress: Progress) -> Entry:
        url = f"{source_folder(self._order.source_url)}/{checkpoint.name}"
        order = replace(self._order, source_url=url, checkpoint=checkpoint.name)
        try:
            summary = ArchiveRun(order, self._config).run(executor, progress)
        except ArchiveError as error:
            return Entry(checkpoint.name, FAILED, str(error))
        if summary.failures:
            return Entry(checkpoint.name, INCOMPLETE, f"{len(summary.failures)} items failed", summary)
        return Entry(checkpoint.name, UNCHANGED if summary.unchanged else ARCHIVED, "", summary)

    def _store(self, night: NightSummary) -> None:
        """Put the summary under the time at which the run began; two runs of one second are told apart."""
        content = json.dumps(night.as_json(), indent=1).encode()
        for attempt in range(100):
            suffix = f"-{attempt}" if attempt else ""
            try:
                self._archive.put_new(f"jobs/{night.started}{suffix}.json", content)
            except ExistsError:
                continue
            return
