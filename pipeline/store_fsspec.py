"""Any other fsspec URL, with the promises that fsspec can keep.

Whole puts only (its file-like writers publish a half-written object when a block raises), exact keys, and a look at
the change token before and after a read in place of a pin. `memory://` is the store of many tests.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import fsspec.core

from operators.errors import DeniedError, ExistsError, NotFoundError, PathError, StoreError, UsageError
from pipeline.keys import key_order, safe_local_path
from pipeline.rooms import Room
from pipeline.store import Buffers, Data, Dated, Headers, Leftovers, Listing, ObjectInfo, Range, Scope
from pipeline.store_base import StoreBase, changed, check_ranges, coalesce, exactly, get_whole

_TOKENS = ("ETag", "etag", "sha256", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_SPOOL_BYTES = 16 << 20


class FsspecSource:
    """Reads objects below a URL.

    Parameters
    ----------
    url : str
        A URL of any protocol that fsspec knows.
    options : mapping of str to str
        Passed to the file system as they are.
    """

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url
        self._options = dict(options)
        self._scope: Scope | None = None
        self._client: tuple[int, Any, str] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def list(self, prefix: str = "") -> Listing:
        """See `SourceStore.list`."""
        # A listing may carry other tokens than a look at the object, and only equal tokens can be compared.
        return sorted(map(self.head, self._keys(prefix)), key=key_order)

    def _keys(self, prefix: str) -> Iterator[str]:
        scope = self._resolved()
        wanted = scope.narrow(prefix)
        if wanted is None:
            return
        files, _ = self._connected()
        with _typed(self.url):
            try:
                names = files.find(scope.folder.rstrip("/") or "/")
            except FileNotFoundError:
                names = []
        keys = (name[len(scope.folder) :] for name in names)
        yield from (key for key in keys if key.startswith(wanted) and scope.selects(key))

    def now(self) -> int:
        """See `SourceStore.now`: that of this machine, as fsspec tells no other."""
        return int(time.time())

    def dated(self, prefix: str = "") -> Iterator[Dated]:
        """See `SourceStore.dated`.

        Raises
        ------
        StoreError
            The file system does not tell when a file was written.
        """
        for key in self._keys(prefix):
            found = self._look(key)
            written = next((found[name] for name in _TIMES if found.get(name) is not None), None)
            if isinstance(written, datetime):
                written = written.replace(tzinfo=written.tzinfo or UTC).timestamp()
            if not isinstance(written, int | float):
                raise StoreError("a time of writing", f"{written!r}", key, "keep the archive in S3 or in a folder")
            yield Dated(key, _info(key, found).n_bytes, int(written))

    def head(self, key: str) -> ObjectInfo:
        """See `SourceStore.head`."""
        return _info(key, self._look(key))

    def _look(self, key: str) -> Mapping[str, Any]:
        files, _ = self._connected()
        with _typed(key):
            info: Mapping[str, Any] = files.info(self._full(key))
        if info["type"] != "file":
            raise NotFoundError("an object", "a folder", key)
        return info

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `SourceStore.get`."""
        return get_whole(self, key, max_bytes)

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[Range], room: Room | None = None) -> Buffers:
        """See `SourceStore.get_ranges`; fsspec makes the buffers."""
        check_ranges(info, ranges)
        files, _ = self._connected()
        views = [memoryview(b"")] * len(ranges)
        self._check_unchanged(info)
        for first, last, members in coalesce(ranges):
            with _typed(f"{info.key}@{first}"):
                data = files.cat_file(self._full(info.key), start=first, end=last)
            if len(data) != last - first:
                raise StoreError(f"{last - first} bytes", f"{len(data)}", f"{info.key}@{first}", "run again")
            for i in members:
                views[i] = memoryview(data)[ranges[i][0] - first : ranges[i][1] - first]
        self._check_unchanged(info)
        return views

    def first(self, info: ObjectInfo, n_bytes: int) -> None:
        """See `SourceStore.first`: fsspec tells nothing of it that all its stores agree on."""

    def _check_unchanged(self, info: ObjectInfo) -> None:
        now = self.head(info.key)
        if info.n_bytes != now.n_bytes or info.etag not in {"", now.etag}:
            raise changed(info.key)

    def _full(self, key: str) -> str:
        if not key or key.endswith("/"):
            raise PathError("a key that names a file", repr(key), self.url, "use S3 or a local folder")
        return self._resolved().folder + key

    def _resolved(self) -> Scope:
        if self._scope is None:
            self._scope = self._resolve()
        return self._scope

    def _resolve(self) -> Scope:
        files, root = self._connected()
        if self.url.endswith("*"):
            folder, _, stem = root.removesuffix("*").rpartition("/")
            return Scope(f"{folder}/", stem)
        with _typed(self.url):
            if files.isfile(root):
                folder, _, name = root.rpartition("/")
                return Scope(f"{folder}/", name, single=True)
            if root.strip("/") and not files.exists(root):
                raise NotFoundError("an object or a folder", "nothing", self.url, "check the URL")
        return Scope(root.rstrip("/") + "/")

    def _connected(self) -> tuple[Any, str]:
        if self._client is None or self._client[0] != os.getpid():
            with _typed(self.url):  # some connect, or open a file, as they are made
                try:
                    found = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **self._options)
                except (ImportError, ValueError, TypeError) as error:  # TypeError: of options that lack, or are unknown
                    step = "check the URL and the storage options"
                    raise UsageError("a store that fsspec knows", str(error), self.url, step) from error
            self._client = (os.getpid(), *found)
        return self._client[1:]


class FsspecStore(StoreBase, FsspecSource):
    """Reads and writes objects below a URL, always a folder.

    Parameters
    ----------
    url, options
        As for `FsspecSource`.
    single_writer : bool
        See `open_store`.
    """

    def __init__(self, url: str, options: Mapping[str, str], *, single_writer: bool = False) -> None:
        super().__init__(url, options)
        self._single_writer = single_writer

    def _resolve(self) -> Scope:
        return Scope(self._connected()[1].rstrip("/") + "/")

    def _full(self, key: str) -> str:
        # Many of these file systems know folders and would follow '..' out of the target.
        safe_local_path(self._resolved().folder, key)
        return super()._full(key)

    def put_new(self, key: str, data: bytes) -> None:
        """See `Store.put_new`: the file system's own create mode, or a look before the write."""
        self._put(key, data, overwrite=False)

    def _put(self, key: str, data: bytes, *, overwrite: bool) -> None:
        files, _ = self._connected()
        path = self._full(key)
        with _typed(key):
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if overwrite:
                files.pipe_file(path, data)
            elif not self._single_writer:
                files.pipe_file(path, data, mode="create")
            elif files.exists(path):
                raise ExistsError("a free key", "an object", key)
            else:
                files.pipe_file(path, data)

    def write(self, key: str, data: Iterable[Data], *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> None:
        """See `Store.write`: gathered here, beyond 16 MiB in a temporary file, and put whole."""
        files, _ = self._connected()
        path = self._full(key)
        with _typed(key):
            if not overwrite and files.exists(path):
                raise ExistsError("a free key", "an object", key)
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            for piece in exactly(data, n_bytes, key):
                spool.write(piece)
            spool.seek(0)
            self._put(key, spool.read(), overwrite=overwrite)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        files, _ = self._connected()
        with contextlib.suppress(NotFoundError), _typed(key):
            files.rm_file(self._full(key))

    def delete_generation(self, info: ObjectInfo) -> None:
        """See `Store.delete_generation`; what fsspec tells of an object may be its size alone."""
        raise StoreError("a local folder or S3", "another store", info.key, "remove it by hand")

    def unfinished(self) -> Leftovers:
        """See `Store.unfinished`: whole puts leave nothing that could be seen."""
        return []

    def discard(self, left: Dated) -> None:
        """See `Store.discard`."""

    def refused_keys(self, keys: Sequence[str]) -> dict[str, PathError]:
        """See `Store.refused_keys`."""
        refused = {}
        for key in keys:
            try:
                self._full(key)
            except PathError as error:
                refused[key] = error
        return refused


def _info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    token = next((info[name] for name in _TOKENS if info.get(name) is not None), info["size"])
    return ObjectInfo(key, info["size"], str(token))


@contextlib.contextmanager
def _typed(where: str) -> Iterator[None]:
    """Turn what file systems raise into the error tree."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError("an object", "nothing", where) from error
    except FileExistsError as error:
        raise ExistsError("a free key", "an object", where) from error
    except PermissionError as error:
        raise DeniedError("access", str(error), where, "check credentials and policy") from error
    except (OSError, ValueError, NotImplementedError) as error:
        raise StoreError("an answer from the store", str(error), where, "check the URL and run again") from error
