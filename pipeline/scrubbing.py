"""Receipts of verification: evidence that an archive was looked at, and which part of it is next."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.loader import canonical_json
from operators.errors import LimitError, NotFoundError, UsageError
from pipeline.snapshots import Snapshot
from pipeline.store import SourceStore, Store
from pipeline.summary import Summary
from pipeline.verify import Part, parse_part

RECEIPT_BYTES_MAX = 64 << 20

_NEXT = re.compile(r"next/([1-9][0-9]{0,5})")
_RECEIPT = re.compile(r"verify/([0-9]{8}T[0-9]{6}Z)-([a-z]+)-([0-9]+)-([0-9]+)\.json")


@dataclass(frozen=True, slots=True)
class Looked:
    """What was verified, for its receipt.

    Attributes
    ----------
    level : str
    part : Part or None
        None for everything.
    snapshots : sequence of str
        ``<checkpoint>/<seq>`` and digest of the manifest of each.
    started, ended : str
        ``YYYYMMDDTHHMMSSZ``, in UTC.
    writer : str
        Version of the package.
    """

    level: str
    part: Part | None
    snapshots: Sequence[tuple[str, str]]
    started: str
    ended: str
    writer: str

    @property
    def key(self) -> str:
        """The key of the receipt: everything is part 1 of 1."""
        part = self.part or Part(1, 1)
        return f"verify/{self.ended}-{self.level}-{part.number}-{part.total}.json"


def put_receipt(store: Store, looked: Looked, summary: Summary) -> None:
    """Store the receipt of a verification that came to its end, whatever it found."""
    content = {
        "level": looked.level,
        "part": [looked.part.number, looked.part.total] if looked.part else [1, 1],
        "snapshots": [list(pair) for pair in looked.snapshots],
        "started": looked.started,
        "ended": looked.ended,
        "writer": looked.writer,
        "files": summary.files,
        "segments": summary.segments,
        "verified": summary.verified,
        "failures": [[failure.key, failure.reason] for failure in summary.failures],
    }
    store.put_new(looked.key, canonical_json(content) + b"\n")


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt that is there.

    Attributes
    ----------
    key : str
    written : int
        When, by the clock of the store.
    level : str
    part : Part
    content : mapping
        What it says; empty where it cannot be read.
    """

    key: str
    written: int
    level: str
    part: Part
    content: Mapping[str, Any]

    def fault_for(self, snapshot: Snapshot) -> str | None:
        """Return why it does not show that its part of `snapshot` decodes, or None."""
        if self.level != "decode":
            return f"of level {self.level}"
        if not self.is_of(snapshot):
            return "of other snapshots"
        return "it found faults" if self.has_faults else None

    def is_of(self, snapshot: Snapshot) -> bool:
        """Whether `snapshot` was looked at."""
        looked = self.content.get("snapshots")
        return isinstance(looked, list) and [snapshot.name, snapshot.manifest] in looked

    @property
    def has_faults(self) -> bool:
        """Whether faults were found, or it does not tell."""
        return self.content.get("failures") != []


def receipts(store: SourceStore) -> Iterator[Receipt]:
    """Yield the receipts of an archive, the oldest first."""
    for item in sorted(store.dated("verify/"), key=lambda item: (item.written, item.key)):
        match = _RECEIPT.fullmatch(item.key)
        if match is not None and 1 <= int(match[3]) <= int(match[4]):
            content: Any = None
            with contextlib.suppress(ValueError, RecursionError, NotFoundError, LimitError):
                content = json.loads(store.get(item.key, max_bytes=RECEIPT_BYTES_MAX))
            content = content if isinstance(content, dict) else {}
            yield Receipt(item.key, item.written, match[2], Part(int(match[3]), int(match[4])), content)


def chosen_part(store: SourceStore, text: str | None, sample: str | None, level: str) -> Part | None:
    """Return the part that a user means; of ``next/T``, the one whose receipt of this level is oldest.

    One without a receipt comes first, so that a night that was missed or stopped is made up for.
    """
    match = _NEXT.fullmatch(text or "")
    if match is None:
        return parse_part(text, sample)
    if sample is not None:
        raise UsageError("--part or --sample", "both", "verify")
    total = int(match[1])
    last = dict.fromkeys(range(1, total + 1), "")
    for info in store.list("verify/"):
        found = _RECEIPT.fullmatch(info.key)
        if found and found[2] == level and int(found[4]) == total and int(found[3]) in last:
            last[int(found[3])] = max(last[int(found[3])], found[1])
    return Part(min(last, key=lambda number: (last[number], number)), total)
