"""The error tree, grouped by what a caller would do next.

::

    ArchiveError                     anything this package refuses on purpose
    ├── UsageError            2      correct the command or the setting
    ├── DamageError           4      the bytes are not those that were written: take another copy
    │   ├── FormatError              malformed record, program, pack or manifest
    │   ├── LimitError               well formed, but beyond a limit of the format
    │   └── DigestError              decodes, but to other bytes
    ├── UnsupportedError      1      written by a newer writer: upgrade the reader
    ├── StoreError            1      the store failed: retry later, or repair access
    │   ├── NotFoundError            the object is not there
    │   ├── DeniedError              credentials or policy refuse it
    │   ├── ExistsError              create-only write refused: somebody wrote it first
    │   ├── ChangedError             the object is no longer the planned generation
    │   └── PathError                the key cannot be a path in this store: use another target
    ├── NothingMatchedError   5      widen the filters
    ├── ArchiveNotFoundError  10     check the location of the archive
    ├── EvidenceError         1      what must be known before anything is removed is not: provide it
    ├── InternalError         1      a fault of ours, or a worker that died: report it
    ├── ConflictError         11     another run committed first: run again
    └── StoppedError          143    the run was told to stop: run again to resume

Every class takes positional arguments only, so that each survives pickling between processes.
``kind`` is a stable code for machines; the number is the exit code of the command line.
"""

from __future__ import annotations

from typing import ClassVar


class ArchiveError(Exception):
    """Base of every error that this package raises on purpose.

    Parameters
    ----------
    expected, found : str
        What should have been there and what was.
    where : str
        ``key@offset/tensor``, as much of it as is known.
    next_step : str
        What the reader of the message should do.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, expected: str, found: str = "", where: str = "", next_step: str = "") -> None:
        super().__init__(expected, found, where, next_step)
        self.expected = expected
        self.found = found
        self.where = where
        self.next_step = next_step

    def __str__(self) -> str:
        text = f"expected {self.expected}, found {self.found}" if self.found else self.expected
        if self.where:
            text = f"{self.where}: {text}"
        return f"{text}; {self.next_step}" if self.next_step else text


class UsageError(ArchiveError):
    """The command, a setting or an argument is wrong."""

    kind = "usage"
    exit_code = 2


class DamageError(ArchiveError):
    """Stored bytes are not those that were written."""

    kind = "damaged"
    exit_code = 4


class FormatError(DamageError):
    """A record, program, pack or manifest is malformed."""

    kind = "malformed"


class LimitError(DamageError):
    """A well-formed item asks for more than the format allows."""

    kind = "over_limit"


class DigestError(DamageError):
    """Bytes do not have the digest that was recorded for them."""

    kind = "digest_mismatch"


class UnsupportedError(ArchiveError):
    """Written by a newer writer than this reader understands."""

    kind = "unsupported_version"


class StoreError(ArchiveError):
    """A store failed."""

    kind = "store"


class NotFoundError(StoreError):
    """An object is not in the store."""

    kind = "not_found"


class DeniedError(StoreError):
    """The store refuses access."""

    kind = "denied"


class ExistsError(StoreError):
    """A create-only write found the key taken."""

    kind = "exists"


class ChangedError(StoreError):
    """An object is no longer the generation that was planned."""

    kind = "changed_during_read"


class PathError(StoreError):
    """A key cannot be held by this store: it leaves the root, clashes or is too long."""

    kind = "unsafe_path"


class NothingMatchedError(ArchiveError):
    """The filters leave nothing to do."""

    kind = "nothing_matched"
    exit_code = 5


class ArchiveNotFoundError(ArchiveError):
    """No archive, checkpoint or snapshot at that place."""

    kind = "archive_not_found"
    exit_code = 10


class EvidenceError(ArchiveError):
    """Something that must be shown before a source is removed is not."""

    kind = "no_evidence"


class InternalError(ArchiveError):
    """A worker raised something that is not an `ArchiveError`, or died."""

    kind = "internal"


class ConflictError(ArchiveError):
    """Another run committed first."""

    kind = "conflict"
    exit_code = 11


class StoppedError(ArchiveError):
    """The run was told to stop."""

    kind = "stopped"
    exit_code = 143
