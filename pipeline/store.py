"""Stores: where source objects are read, and where archive objects and restored files are written.

A store is a flat map from keys to bytes below a root. Keys are exact strings, never patterns and never normalised;
what a local folder cannot hold is refused by one function, `safe_local_path` of `keys.py`. A source has no write verbs
at all, so that no code path can touch what is being archived.

::

    store.py         the two protocols, and the data that go in and out
    store_base.py    what stores are made of
    store_local.py   folders and files; needs nothing but the standard library
    store_s3.py      S3 and its lookalikes over s3fs; store_s3_client.py sets the client up and names its errors,
                     store_s3_body.py sends the bytes of a request from where they lie
    store_fsspec.py  any other fsspec URL, with the promises that fsspec can keep

Only these modules import fsspec, s3fs, botocore or aiohttp, and only once `locations.py` opens such a URL. Stores are
pickled as URL and explicit options; clients are built lazily inside the process that uses them, and credentials come
from its environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from operators.errors import PathError
from pipeline.rooms import Room

TAG_COUNT = "x-amz-tagging-count"
"""Of `Headers`: stands in place of tags that could not be read."""
_HEADER_NAME = re.compile(r"[!-9;-@\[-~]+")
_NO_HEADER_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

Listing: TypeAlias = "list[ObjectInfo]"
Leftovers: TypeAlias = "list[Dated]"
Buffers: TypeAlias = list[memoryview]
Data: TypeAlias = bytes | memoryview
Whole: TypeAlias = "bytes | Path | Sequence[Data]"
"""An object whole: its bytes, a file, or pieces in order."""
Range: TypeAlias = tuple[int, int]
Headers: TypeAlias = tuple[tuple[str, str], ...]
"""What a store keeps of an object beside its bytes: names and values as S3 has them on the wire, by name."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One generation of one object.

    Attributes
    ----------
    key : str
        Relative to the root of the store, exact.
    n_bytes : int
        Size.
    etag : str
        Change token: another value means other bytes; equal values prove nothing about other objects. Empty where a
        caller knows the object only by its name and wants no check.
    version : str or None
        Version id, in a bucket that keeps versions.
    """

    key: str
    n_bytes: int
    etag: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Dated:
    """An object, or what a writer began and never published, with its age.

    Attributes
    ----------
    key : str
    n_bytes : int
        Size; 0 where the store does not say.
    written : int
        When, in seconds since 1970 by the clock of the store; for an upload, when it began.
    upload : str
        Id of an upload in parts; empty otherwise.
    """

    key: str
    n_bytes: int
    written: int
    upload: str = ""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a URL selects: every key below `folder` that starts with `stem`, or the single object of that name."""

    folder: str
    stem: str = ""
    single: bool = False

    def narrow(self, prefix: str) -> str | None:
        """Longest common prefix to ask the backend for, or None where nothing can match."""
        if prefix.startswith(self.stem):
            return prefix
        return self.stem if self.stem.startswith(prefix) else None

    def selects(self, key: str) -> bool:
        """Whether `key` belongs to this scope."""
        return key == self.stem if self.single else key.startswith(self.stem)


@dataclass(frozen=True, slots=True)
class Staged:
    """An object that processes write, each stretches of it, and one publishes: plain data, which travels.

    Attributes
    ----------
    key : str
    n_bytes : int
        Size of the whole object.
    overwrite : bool
        Whether publishing may replace an object.
    step_bytes : int
        Where one stretch ends and another begins is a multiple of this.
    name : str
        Of the temporary file, or id of the upload in parts.
    write_id : str
        Tells this object from one that another writer publishes under the key, where the store keeps such an id.
    headers : Headers
        What it keeps beside its bytes.
    """

    key: str
    n_bytes: int
    overwrite: bool
    step_bytes: int
    name: str
    write_id: str = ""
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `begin` to `end` of a staged object, which are stored; `etag` is what the store calls them."""

    begin: int
    end: int
    etag: str = ""


class SourceStore(Protocol):
    """Reads objects; it cannot write."""

    url: str

    def list(self, prefix: str = "") -> Listing:
        """Every object of the store whose key starts with `prefix`, sorted by the UTF-8 bytes of the keys.

        The URL names a folder unless it ends in ``*``; a URL that names one object lists it by its base name.
        """

    def now(self) -> int:
        """Return the time by the clock that dates the objects, in seconds since 1970."""

    def dated(self, prefix: str = "") -> Iterator[Dated]:
        """Yield every object whose key starts with `prefix`, in any order, with the time of its last write."""

    def head(self, key: str) -> ObjectInfo:
        """Size and change token now.

        Raises
        ------
        NotFoundError
            No such object.
        """

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """A small object, whole.

        Raises
        ------
        LimitError
            It is larger than `max_bytes`.
        NotFoundError
            No such object.
        """

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[Range], room: Room | None = None) -> Buffers:
        """Bytes ``[start, stop)`` of each range, of the generation that `info` describes.

        Parameters
        ----------
        info : ObjectInfo
        ranges : sequence of Range
        room : Room, optional
            Memory to read into, where the store can; what is returned may then last until the caller clears it.

        Returns
        -------
        list of memoryview
            Read-only, in the order asked. Near ranges may share a buffer.

        Raises
        ------
        ChangedError
            The object is another generation now.
        NotFoundError
            It is gone.
        StoreError
            Anything else, a short answer included.
        """

    def first(self, info: ObjectInfo, n_bytes: int) -> tuple[bytes, Headers] | None:
        """First bytes of an object and what is kept beside them, of one request; None where nothing ever is.

        What it raises is that of `get_ranges`.
        """


class Store(SourceStore, Protocol):
    """Reads and writes objects."""

    def put_new(self, key: str, data: bytes) -> None:
        """Create a small object; atomic, durable, and refused where the key is taken.

        Raises
        ------
        ExistsError
            Somebody else wrote the key first.
        """

    def put(self, key: str, data: Whole) -> None:
        """Write a content-named object whole; writing it again writes the same bytes.

        Parameters
        ----------
        key : str
        data : Whole
            A file is one of `spool`, and taken; pieces stay as they are meanwhile.
        """

    def spool(self, scratch_dir: str) -> Path:
        """Make an empty file for the caller to fill and then `put`, or remove.

        It lies in `scratch_dir`; where that is empty, in a place from which `put` need not copy it, or else in the
        temporary directory of the system.

        Raises
        ------
        OSError
            The folder is missing or full: it is no fault of the store.
        """

    def write(self, key: str, data: Iterable[Data], *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> None:
        """Write one object; nothing is visible under its key before all of it is there, or if `data` raises.

        Parameters
        ----------
        key : str
        data : iterable of bytes-like
            `n_bytes` in order; each piece may change once the next is asked for.
        n_bytes : int
        overwrite : bool
        headers : Headers
            Kept beside the bytes, where the store can.

        Raises
        ------
        ExistsError
            The key is taken and `overwrite` is false.
        PathError
            The key cannot be a path below the root.
        StoreError
            `data` has another size.
        """

    def stage(self, key: str, *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> Staged | None:
        """Begin an object that several processes write, or return None where the store knows one writer alone.

        Parameters are as of `write`.

        Raises
        ------
        ExistsError, PathError
            As of `write`.
        """

    def write_stretch(self, staged: Staged, begin: int, end: int, data: Iterable[Data]) -> tuple[Stretch, ...]:
        """Write bytes `begin` to `end` of a staged object; once more writes the same bytes to the same place.

        Returns
        -------
        tuple of Stretch
            What is stored, durably; it tiles `begin` to `end`.

        Raises
        ------
        NotFoundError
            It was published or abandoned.
        StoreError
            `data` has another size.
        """

    def publish(self, staged: Staged, stretches: Iterable[Stretch]) -> None:
        """Make a staged object visible, atomically and durably.

        Raises
        ------
        ExistsError
            The key is taken and `overwrite` was false.
        StoreError
            The stretches are not all of it.
        """

    def abandon(self, staged: Staged) -> None:
        """Leave nothing of a staged object that is not published; harmless a second time."""

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine. Only for a caller's own probes, files it may overwrite, prune and gc."""

    def delete_generation(self, info: ObjectInfo) -> None:
        """Remove an object as long as it is the generation that `info` describes. Only for `release-source`.

        Raises
        ------
        ChangedError
            It is another generation now, and stays.
        NotFoundError
            It is gone.
        PathError
            A link leads to it: others may lead there too.
        StoreError
            Anything else; a store that cannot tell generations apart refuses.
        """

    def unfinished(self) -> Leftovers:
        """Return what writers began and did not publish: no listing shows it, and it takes room."""

    def discard(self, left: Dated) -> None:
        """Remove one item of `unfinished`; gone is fine."""

    def refused_keys(self, keys: Sequence[str]) -> dict[str, PathError]:
        """Which of `keys` this store cannot hold, each with its reason, before anything is written."""

    def supports_create_only(self) -> bool:
        """Whether `put_new` really refuses a taken key. A store that ignores it cannot hold a commit safely."""


def is_header(name: str, value: str) -> bool:
    """Whether a name in lower case and a value can be a header of a request: neither ends its line."""
    return bool(_HEADER_NAME.fullmatch(name)) and not _NO_HEADER_VALUE.search(value)
