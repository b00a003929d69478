"""Stores: where source objects are read, and where archive objects and restored files are written.

A store is a flat map from keys to bytes below a root. Keys are exact strings, never patterns and never normalised;
what a local folder cannot hold is refused by one function, `safe_local_path`. A source has no write verbs at all, so
that no code path can touch what is being archived.

::

    store.py         the two protocols, what all stores share, and the way in: `open_source`, `open_store`
    store_local.py   folders and files; needs nothing but the standard library
    store_s3.py      S3 and its lookalikes over s3fs; store_s3_client.py sets the client up and names its errors
    store_fsspec.py  any other fsspec URL, with the promises that fsspec can keep

Only these modules import fsspec or s3fs, and only once such a URL is opened. Stores are pickled as URL and explicit
options; clients are built lazily inside the process that uses them, and credentials come from its environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from operators.errors import DeniedError, ExistsError, LimitError, PathError, StoreError, UsageError

MAX_REQUEST_BYTES = 16 << 20
"""Ranges are fetched in requests of at most this size: large enough to hide latency, small enough to share a link."""
MAX_GAP_BYTES = 256 << 10
"""Two ranges this close are fetched as one; the bytes between cost less than a request."""
ALIGNED_BYTES = 64
COPY_BYTES = 8 << 20
"""Size of the pieces in which a file is put."""
TAG_COUNT = "x-amz-tagging-count"
"""Of `Headers`: stands in place of tags that could not be read."""
PROBE_KEY = ".create-only-probe"
_HEADER_NAME = re.compile(r"[!-9;-@\[-~]+")
_NO_HEADER_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
SPOOL_PREFIX, SPOOL_SUFFIX = ".brevis-", ".part"
"""Names of files that are no objects yet; no listing shows them."""

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


class StoreBase:
    """What every `Store` builds from its own ``put_new``, ``delete`` and the four verbs of a staged object."""

    def write(
        self: Store, key: str, data: Iterable[Data], *, n_bytes: int, overwrite: bool, headers: Headers = ()
    ) -> None:
        """See `Store.write`: a staged object that one process writes."""
        staged = self.stage(key, n_bytes=n_bytes, overwrite=overwrite, headers=headers)
        assert staged is not None
        try:
            self.publish(staged, self.write_stretch(staged, 0, n_bytes, data))
        except BaseException:
            self.abandon(staged)
            raise

    def stage(self, key: str, *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> Staged | None:
        """See `Store.stage`: a store of one writer, which has a `write` of its own."""
        return None

    def _of_nothing_staged(self, *_: Any, **__: Any) -> Any:
        """Never called, for `stage` gives nothing that could be written to, published or abandoned."""
        raise NotImplementedError

    write_stretch = publish = abandon = _of_nothing_staged

    def put(self: Store, key: str, data: Whole) -> None:
        """Write a content-named object whole."""
        if isinstance(data, Path):
            self.write(key, pieces_of(data), n_bytes=data.stat().st_size, overwrite=True)
            return
        pieces = [data] if isinstance(data, bytes) else data
        self.write(key, pieces, n_bytes=sum(map(len, pieces)), overwrite=True)

    def spool(self, scratch_dir: str) -> Path:
        """Make an empty file that only this user may read."""
        handle, name = tempfile.mkstemp(SPOOL_SUFFIX, SPOOL_PREFIX, scratch_dir or None)
        os.close(handle)
        return Path(name)

    def supports_create_only(self: Store) -> bool:
        """Whether ``put_new`` really refuses a taken key."""
        try:
            self.put_new(PROBE_KEY, b"written once\n")
        except ExistsError:
            return True  # left by a role that may not delete, or another run's that just looks
        try:
            self.put_new(PROBE_KEY, b"written twice\n")
        except ExistsError:
            return True
        else:
            return False
        finally:
            with contextlib.suppress(DeniedError):
                self.delete(PROBE_KEY)


def is_header(name: str, value: str) -> bool:
    """Whether a name in lower case and a value can be a header of a request: neither ends its line."""
    return bool(_HEADER_NAME.fullmatch(name)) and not _NO_HEADER_VALUE.search(value)


def get_whole(store: SourceStore, key: str, max_bytes: int) -> bytes:
    """A small object by its size and its range, for stores without a call of their own; see `SourceStore.get`."""
    info = store.head(key)
    if info.n_bytes > max_bytes:
        raise LimitError(f"at most {max_bytes} bytes", f"{info.n_bytes}", key)
    return bytes(store.get_ranges(info, [(0, info.n_bytes)])[0])


def pieces_of(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file; each piece lasts until the next is asked for."""
    buffer = memoryview(bytearray(COPY_BYTES))
    with path.open("rb", buffering=0) as file:
        while n_read := file.readinto(buffer):
            yield buffer[:n_read]


def exactly(data: Iterable[Data], n_bytes: int, where: str) -> Iterator[memoryview]:
    """Yield `data` as long as it has `n_bytes`. Raises StoreError where it has more or fewer."""
    found = 0
    for piece in data:
        found += len(piece)
        if found > n_bytes:
            break
        yield memoryview(piece).cast("B")
    if found != n_bytes:
        more = "or more" if found > n_bytes else "in all"
        raise StoreError(f"{n_bytes} bytes", f"{found} {more}", where, "it changed while read: run again")


def check_tiles(staged: Staged, stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the stretches in order. Raises StoreError unless they are all of the object."""
    tiles = sorted(stretches, key=lambda stretch: stretch.begin)
    end = 0
    for tile in tiles:
        if tile.begin != end:
            break
        end = tile.end
    if end != staged.n_bytes:
        raise StoreError(f"all of {staged.n_bytes} bytes", f"none at {end}", staged.key, "run again")
    return tiles


# -- keys and ranges ----------------------------------------------------------------------------


def name_order(key: str) -> bytes:
    """Sort key: the bytes of the name, the same on every machine and in every locale."""
    return key.encode("utf-8", "surrogateescape")


def key_order(info: ObjectInfo) -> bytes:
    """Sort key: that of its name."""
    return name_order(info.key)


def safe_local_path(root: str, key: str) -> list[str]:
    """Parts of the path below `root` that a key names; the one place that decides what a folder may hold.

    A trailing slash (an object that marks a folder) is dropped: the caller looks for it.

    Raises
    ------
    PathError
        The key is empty or absolute, leaves the root, has an empty or dot part or a NUL, or is too long.
    """

    def refuse(found: str) -> PathError:
        return PathError("a key that is a path below the target", found, key, "use an object store as the target")

    parts = key.removesuffix("/").split("/")
    if "\0" in key:
        raise refuse("a NUL")
    if key.startswith("/"):
        raise refuse("an absolute path")
    if any(part in {"", ".", ".."} for part in parts):
        raise refuse("an empty, '.' or '..' part")
    if any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts):
        raise refuse("a name of more than 255 bytes")
    if len(f"{root}/{key}".encode("utf-8", "surrogateescape")) > 4095:
        raise refuse("a path of more than 4095 bytes")
    return parts


def clashing_keys(keys: Sequence[str], *, fold_case: bool) -> dict[str, str]:
    """Keys that cannot be files beside an earlier one of `keys`, with that one.

    Two names that differ only in case clash where the file system folds case; ``a`` and ``a/b`` always do.
    """

    def fold(key: str) -> str:
        return key.removesuffix("/").casefold() if fold_case else key.removesuffix("/")

    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    clashes: dict[str, str] = {}
    for key in keys:
        name = fold(key)
        parents = [name[: match.start()] for match in re.finditer("/", name)]
        if key.endswith("/"):
            parents.append(name)
        blocking = next((files[parent] for parent in parents if parent in files), None)
        if blocking is None and not key.endswith("/"):
            blocking = files.get(name) or folders.get(name)
        if blocking is not None:
            clashes[key] = blocking
            continue
        for parent in parents:
            folders.setdefault(parent, key)
        if not key.endswith("/"):
            files[name] = key
    return clashes


class Room:
    """Memory for what is read, used again once it is cleared: fresh memory costs more than to read into it.

    It holds as much as was asked for between two calls of `clear`, so that its owner decides how much that is.

    Parameters
    ----------
    n_bytes : int
        What will be asked for, where the owner knows: it need not grow then. It takes up what is written to, no more.
    """

    def __init__(self, n_bytes: int = 0) -> None:
        self._block = aligned_buffer(n_bytes)
        self._used = 0

    def clear(self) -> None:
        """Give all of it back: what `take` returned must not be used any more."""
        if self._used > len(self._block):
            self._block = memoryview(b"")  # first, so that both are never there at once
            self._block = aligned_buffer(self._used + self._used // 8)  # the next may be a little larger
        self._used = 0

    def take(self, n_bytes: int) -> memoryview:
        """Return `n_bytes` on a cache line of their own, to be written."""
        start = self._used
        self._used += -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return self._block[start : start + n_bytes] if self._used <= len(self._block) else aligned_buffer(n_bytes)


def taken(room: Room | None, n_bytes: int) -> memoryview:
    """Return a buffer of `n_bytes` from `room`, or a fresh one."""
    return aligned_buffer(n_bytes) if room is None else room.take(n_bytes)


def aligned_buffer(n_bytes: int) -> memoryview:
    """A fresh writable buffer that starts on a cache line, so that any word width may view it."""
    raw = np.empty(n_bytes + ALIGNED_BYTES, np.uint8)
    start = -int(raw.__array_interface__["data"][0]) % ALIGNED_BYTES
    return raw[start : start + n_bytes].data


def check_ranges(info: ObjectInfo, ranges: Sequence[Range]) -> None:
    """Refuse ranges outside the object before anything is asked of a server.

    Raises
    ------
    StoreError
        A range is reversed, negative or beyond the end.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop <= info.n_bytes:
            where = f"{info.key}@{start}"
            raise StoreError(f"a range within {info.n_bytes} bytes", f"[{start}, {stop})", where, "verify the archive")


def coalesce(ranges: Sequence[Range]) -> list[tuple[int, int, list[int]]]:
    """Group ranges that are near each other.

    Returns
    -------
    list of (start, stop, members)
        Disjoint or touching stretches in ascending order with the indices of the ranges that each holds. Only a single
        range may make a stretch longer than `MAX_REQUEST_BYTES`; empty ranges belong to none.
    """
    order = sorted((i for i, (start, stop) in enumerate(ranges) if start < stop), key=lambda i: ranges[i])
    stretches: list[tuple[int, int, list[int]]] = []
    for i in order:
        start, stop = ranges[i]
        if stretches:
            first, last, members = stretches[-1]
            if start <= last + MAX_GAP_BYTES and max(stop, last) - first <= MAX_REQUEST_BYTES:
                stretches[-1] = (first, max(stop, last), [*members, i])
                continue
        stretches.append((start, stop, [i]))
    return stretches


# -- the way in ---------------------------------------------------------------------------------


def open_source(
    url: str, options: Mapping[str, str] | None = None, *, versions: bool = False, as_of: str | None = None
) -> SourceStore:
    """A store that can only be read.

    Parameters
    ----------
    url : str
        Local path, ``file://``, ``s3://bucket/prefix`` or any fsspec URL. A folder; one object; or, ending in ``*``,
        everything whose key starts so.
    options : mapping of str to str, optional
        Storage options ``key=value``; a local path, which may stand beside a bucket in one command, has none.
    versions : bool
        List each object with its version, where the store keeps some and says so; reading takes the newest alone.
    as_of : str, optional
        List what was there at the end of this second, in UTC, ``YYYY-MM-DDTHH:MM:SSZ``.

    Raises
    ------
    UsageError
        The URL or an option is not understood, or the store knows no other time than now.
    """
    protocol, rest = split_url(url)
    if as_of is not None and protocol != "s3":
        raise UsageError("a bucket that keeps versions", "another place", url, "leave out --as-of")
    if protocol == "file":
        from pipeline.store_local import LocalSource

        return LocalSource(rest)
    if protocol == "s3":
        from pipeline.store_s3 import S3Source

        return S3Source(rest, options or {}, versions=versions, as_of=as_of)
    from pipeline.store_fsspec import FsspecSource

    return FsspecSource(url, options or {})


def open_store(url: str, options: Mapping[str, str] | None = None, *, single_writer: bool = False) -> Store:
    """A store that can be written; parameters as for `open_source`.

    Parameters
    ----------
    single_writer : bool
        The caller promises to be the only writer: create-only writes become a look and a write, for stores that know
        no conditional write. Weaker, and refused unless asked for.
    """
    protocol, rest = split_url(url)
    if protocol == "file":
        from pipeline.store_local import LocalStore

        return LocalStore(rest)
    if protocol == "s3":
        from pipeline.store_s3 import S3Store

        return S3Store(rest, options or {}, single_writer=single_writer)
    from pipeline.store_fsspec import FsspecStore

    return FsspecStore(url, options or {}, single_writer=single_writer)


def absolute_url(url: str) -> str:
    """The URL as any process of any working folder understands it.

    Raises
    ------
    UsageError
        The URL is empty or names no bucket.
    """
    protocol, rest = split_url(url)
    if protocol != "file":
        return url
    path = str(Path(rest).absolute())
    return path if path == "/" or not rest.endswith("/") else f"{path}/"


def folder_url(url: str) -> str:
    """The one spelling of a folder, however links and slashes spell it, with a slash at its end."""
    protocol, rest = split_url(url)
    path = str(Path(rest).resolve()) if protocol == "file" else rest
    return f"{protocol}://{path.rstrip('/')}/"


def split_url(url: str) -> tuple[str, str]:
    """Protocol and the rest of a URL: ``file`` for bare paths, ``s3`` for ``s3a`` as well.

    Raises
    ------
    UsageError
        Empty, or a bucket without a name.
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", url, re.DOTALL)
    protocol, rest = (match[1].lower(), match[2]) if match else ("file", url)
    protocol = {"s3a": "s3", "local": "file"}.get(protocol, protocol)
    if not rest or (protocol == "s3" and rest.startswith("/")):
        raise UsageError("a path or a URL such as s3://bucket/prefix", repr(url))
    return protocol, rest
