"""What a command reports: the same object for people and, as JSON, for machines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from operators.errors import ArchiveError
from pipeline.plan import Finding
from pipeline.snapshots import Snapshot

DONE, FAILED_ALL, FAILED_ITEMS, MISMATCH = 0, 1, 3, 4
"""Exit codes of a command that came to its end; `operators.errors` has the others."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An item that failed while the rest went on."""

    key: str
    reason: str
    message: str
    next_step: str

    @classmethod
    def of(cls, key: str, error: ArchiveError) -> Failed:
        """Describe `error` as the failure of `key`."""
        return cls(key, error.kind, str(error), error.next_step)


@dataclass(slots=True)
class Summary:
    """Result of a command.

    Attributes
    ----------
    command : str
    source_bytes, stored_bytes : int
        Bytes of the source files; bytes of the packs, manifest and snapshot that hold them.
    files, tensors, segments : int
    seconds : float
        Wall time.
    snapshot, run, content : str
        ``<checkpoint>/<seq>``, the run that made it, and its content digest: equal for equal archives.
    resumed_tasks : int
        Tasks that an earlier attempt had finished.
    retries : int
        Attempts at tasks beyond the first of each.
    unchanged_bytes : int
        Source bytes of files that did not change since the last snapshot; they were not read.
    deduplicated_bytes : int
        Source bytes of the others that share the record of another segment, or of the last snapshot.
    verified : int
        Segments that were decoded and compared.
    unchanged : bool
        There was nothing to do.
    """

    command: str
    source_bytes: int = 0
    stored_bytes: int = 0
    files: int = 0
    tensors: int = 0
    segments: int = 0
    seconds: float = 0.0
    snapshot: str = ""
    run: str = ""
    content: str = ""
    resumed_tasks: int = 0
    retries: int = 0
    unchanged_bytes: int = 0
    deduplicated_bytes: int = 0
    verified: int = 0
    unchanged: bool = False
    warnings: list[Finding] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)

    @property
    def saved_percent(self) -> float:
        """Share of the source bytes that need not be stored."""
        return round(100 * (1 - self.stored_bytes / self.source_bytes), 2) if self.source_bytes else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        content = dataclasses.asdict(self)
        content["seconds"] = round(self.seconds, 3)
        content["saved_percent"] = self.saved_percent
        return content

    def text(self) -> str:
        """Return the summary in a line."""
        if self.unchanged:
            return f"{self.command}: nothing to do, {self.snapshot} is up to date ({self.files} files)"
        parts = [f"{self.files} files, {self.tensors} tensors, {self.source_bytes:,} bytes"]
        if self.stored_bytes:
            share = 100 * self.stored_bytes / self.source_bytes if self.source_bytes else 100
            parts.append(f"stored in {self.stored_bytes:,} ({share:.2f} %)")
        if self.unchanged_bytes:
            parts.append(f"{self.unchanged_bytes:,} not read, for they did not change")
        if self.deduplicated_bytes:
            parts.append(f"{self.deduplicated_bytes:,} stored before")
        if self.verified:
            parts.append(f"{self.verified} segments verified")
        if self.retries:
            parts.append(f"{self.retries} attempts repeated")
        if self.snapshot:
            parts.append(f"snapshot {self.snapshot}")
        if self.failures:
            parts.append(f"{len(self.failures)} failures")
        return f"{self.command}: {', '.join(parts)}, {self.seconds:.1f} s"


def stored_bytes_of(snapshot: Snapshot) -> int:
    """Return the bytes of the packs, the manifest and the snapshot itself."""
    return snapshot.totals.stored_bytes + snapshot.manifest_bytes + len(snapshot.to_json())
