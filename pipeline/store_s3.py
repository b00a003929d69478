"""S3 and its lookalikes, over s3fs.

s3fs supplies the client, its credentials and its retries; the requests are ours, one exact call each, because the
file-like layer above them publishes half-written objects, reads ranges without pinning a generation and takes keys
for patterns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import fsspec.asyn
import s3fs
from botocore.exceptions import IncompleteReadError
from s3fs.core import S3_RETRYABLE_ERRORS

from operators.errors import (
    DeniedError,
    ExistsError,
    LimitError,
    NotFoundError,
    PathError,
    StoreError,
    UsageError,
)
from pipeline.keys import key_order
from pipeline.rooms import Room, taken
from pipeline.store import (
    Buffers,
    Data,
    Dated,
    Headers,
    Leftovers,
    Listing,
    ObjectInfo,
    Range,
    Scope,
    Staged,
    Stretch,
    Whole,
)
from pipeline.store_base import MAX_REQUEST_BYTES, StoreBase, changed, check_ranges, check_tiles, coalesce, exactly
from pipeline.store_s3_body import Body
from pipeline.store_s3_client import (
    BUSY,
    EXPIRED,
    REQUESTS_AT_ONCE,
    WRITE_ID,
    arguments_of,
    client_options,
    code_of,
    etag_of,
    headers_of,
    tags_of,
    typed,
)

Result = TypeVar("Result")

PART_BYTES = 24 << 20
"""Objects up to this size are one PUT; larger ones go up in parts that start at this size."""
PUT_BYTES = 72 << 20
"""What lies in memory as a whole is one PUT up to this size, as the pack of a task nearly always does."""
MAX_PARTS = 10_000
MAX_KEY_BYTES = 1024
_PARTS_AT_ONCE = 2
_READ_BYTES = 1 << 20
_TRIES = 5

_BROKEN_BODY = (*S3_RETRYABLE_ERRORS, IncompleteReadError, ConnectionError)

_clients: WeakValueDictionary[tuple[Any, ...], s3fs.S3FileSystem] = WeakValueDictionary()
"""Those in use: each takes a sixth of a second to make, and a command opens four or five stores."""


class S3Source:
    """Reads objects below ``bucket/prefix``.

    Parameters
    ----------
    path : str
        ``bucket`` or ``bucket/prefix``. The prefix is a folder; one object, where no folder has that name; or, ending
        in ``*``, whatever starts so.
    options : mapping of str to str
        ``endpoint_url, addressing_style, anon, key, secret, token, region, profile, sse, sse_kms_key_id,
        requester_pays, connect_timeout, read_timeout``; what is absent comes from the usual environment variables.
    versions, as_of
        See `open_source`.

    Raises
    ------
    UsageError
        An option is unknown.
    """

    def __init__(
        self, path: str, options: Mapping[str, str], *, versions: bool = False, as_of: str | None = None
    ) -> None:
        self.url = f"s3://{path}"
        self._options = dict(options)
        client_options(self._options)  # refuses a wrong option here rather than at the first request
        self._bucket, _, self._prefix = path.partition("/")
        self._reads_newest = versions and as_of is None
        self._as_of = None if as_of is None else int(datetime.fromisoformat(as_of).timestamp())
        self._versions: bool | None = None if versions or as_of else False  # None: not known yet
        self._scope: Scope | None = None
        self._client: s3fs.S3FileSystem | None = None
        self._client_pid = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Clients hold sockets, a thread and secrets; the process that unpickles makes its own.
        return {**self.__dict__, "_client": None, "_client_pid": 0}

    # -- reading --------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Listing:
        """See `SourceStore.list`. An empty object that is named like the folder itself is that folder, not listed."""
        scope = self._resolved()
        wanted = scope.narrow(prefix)
        if wanted is None:
            return []
        listed = (self._list_versions if self._keeps_versions() else self._list)(scope.folder + wanted, scope.folder)
        found = [info for info in listed if scope.selects(info.key)]
        for info in found:
            if not info.key and info.n_bytes:
                raise UsageError("names below the folder", "an object named like it", self.url, "archive its parent")
        return sorted((info for info in found if info.key), key=key_order)

    def now(self) -> int:
        """See `SourceStore.now`: the ``Date`` of an answer."""
        answer = self._run(self._request("list_objects_v2", self.url, {"Prefix": self._full(""), "MaxKeys": 1}))
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            raise StoreError("an answer with a date", "none", self.url, "check the endpoint")
        return int(parsedate_to_datetime(date).timestamp())

    def dated(self, prefix: str = "") -> Iterator[Dated]:
        """See `SourceStore.dated`."""
        folder = self._full("")
        for entry in self._entries(folder + prefix):
            if len(entry["Key"]) > len(folder):
                yield Dated(entry["Key"][len(folder) :], entry["Size"], int(entry["LastModified"].timestamp()))

    def head(self, key: str) -> ObjectInfo:
        """See `SourceStore.head`."""
        answer = self._call("head_object", key)
        return _info(key, answer, answer["ContentLength"])

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `SourceStore.get`."""
        return self._run(self._get(self._full(key), key, max_bytes))[0]

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[Range], room: Room | None = None) -> Buffers:
        """See `SourceStore.get_ranges`; requests of at most 16 MiB run side by side."""
        check_ranges(info, ranges)
        stretches = coalesce(ranges)
        if not stretches:
            version = self._version(info)
            if info.etag and etag_of(self._call("head_object", info.key, **version)) != info.etag:
                raise changed(info.key)
            return [memoryview(b"") for _ in ranges]
        buffers = [taken(room, stop - start) for start, stop, _ in stretches]
        pieces = [
            (first + offset, buffer[offset : offset + MAX_REQUEST_BYTES])
            for (first, _, _), buffer in zip(stretches, buffers, strict=True)
            for offset in range(0, len(buffer), MAX_REQUEST_BYTES)
        ]
        self._run(self._fetch_all(self._full(info.key), info, pieces))
        views = [memoryview(b"")] * len(ranges)
        for (first, _, members), buffer in zip(stretches, buffers, strict=True):
            for i in members:
                views[i] = buffer[ranges[i][0] - first : ranges[i][1] - first].toreadonly()
        return views

    def first(self, info: ObjectInfo, n_bytes: int) -> tuple[bytes, Headers]:
        """See `SourceStore.first`; tags are asked for where the answer says that there are some."""
        target = bytearray(n_bytes)
        answer = self._run(self._fetch(self._full(info.key), info, 0, memoryview(target)))
        tags = None
        if answer.get("TagCount"):
            with contextlib.suppress(DeniedError):  # their number stays in the record
                tags = self._call("get_object_tagging", info.key, **self._version(info))["TagSet"]
        return bytes(target), headers_of(answer, tags)

    async def _fetch_all(self, full: str, info: ObjectInfo, pieces: Sequence[tuple[int, memoryview]]) -> None:
        gate = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def fetch(offset: int, target: memoryview) -> None:
            async with gate:
                await self._fetch(full, info, offset, target)

        tasks = [asyncio.ensure_future(fetch(offset, target)) for offset, target in pieces]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the first failure ends the rest, so that none writes into a dropped buffer
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, full: str, info: ObjectInfo, offset: int, target: memoryview) -> Mapping[str, Any]:
        """Fill `target`, all of an object where it is empty; return the answer."""
        where = f"{info.key}@{offset}"
        request: dict[str, Any] = {"Key": full}
        if target:
            request["Range"] = f"bytes={offset}-{offset + len(target) - 1}"
        if info.etag:
            request["IfMatch"] = info.etag
        request |= self._version(info)
        for attempt in range(_TRIES):
            answer: Mapping[str, Any] = await self._request("get_object", where, request)
            async with answer["Body"] as body:
                if info.etag not in {"", etag_of(answer)}:  # some stores do not know If-Match
                    raise changed(where)
                if int(answer["ContentLength"]) != len(target):
                    raise StoreError(f"{len(target)} bytes", f"{answer['ContentLength']}", where, "verify it")
                n_bytes = 0
                try:
                    while n_bytes < len(target) and (data := await body.read(_READ_BYTES)):
                        target[n_bytes : n_bytes + len(data)] = data
                        n_bytes += len(data)
                except _BROKEN_BODY as error:
                    reason = type(error).__name__
                else:
                    reason = f"{n_bytes}"
            if n_bytes == len(target):
                return answer
            await asyncio.sleep(0.1 * 2**attempt)
        raise StoreError(f"{len(target)} bytes", reason, where, "check the network and run again")

    def _version(self, info: ObjectInfo) -> dict[str, str]:
        """Return what asks for the version: the newest is asked for by its ETag, which takes no right of its own."""
        return {"VersionId": info.version} if info.version and not self._reads_newest else {}

    async def _get(self, full: str, key: str, max_bytes: int) -> tuple[bytes, Mapping[str, str]]:
        for attempt in range(_TRIES):
            answer = await self._request("get_object", key, {"Key": full})
            async with answer["Body"] as body:
                n_bytes = int(answer["ContentLength"])
                if n_bytes > max_bytes:
                    raise LimitError(f"at most {max_bytes} bytes", f"{n_bytes}", key)
                try:
                    data: bytes = await body.read()
                    reason = f"{len(data)}"
                    if len(data) == n_bytes:
                        return data, answer.get("Metadata", {})
                except _BROKEN_BODY as error:
                    reason = type(error).__name__
            await asyncio.sleep(0.1 * 2**attempt)
        raise StoreError(f"{n_bytes} bytes", reason, key, "check the network and run again")

    def _list(self, prefix: str, folder: str) -> Listing:
        entries = self._entries(prefix)
        return [ObjectInfo(entry["Key"][len(folder) :], entry["Size"], etag_of(entry)) for entry in entries]

    def _keeps_versions(self) -> bool:
        """Whether the bucket tells versions, if that is wanted; a run asks once, so that its listings are alike."""
        if self._versions is None:
            try:
                answer = self._run(self._request("get_bucket_versioning", self.url, {}))
            except StoreError:  # no right to ask, or no such request
                if self._as_of is not None:
                    raise
                answer = {}
            self._versions = answer.get("Status") == "Enabled"
            if self._as_of is not None and not self._versions:
                found = "one that does not, or no longer"
                raise UsageError("a bucket that keeps versions", found, self.url, "leave out --as-of")
        return self._versions

    def _list_versions(self, prefix: str, folder: str) -> Listing:
        """Return of each key the newest version, or the newest of the time; a marker of deletion is none."""
        newest: dict[str, tuple[tuple[datetime, bool], Mapping[str, Any]]] = {}
        for entry in self._version_entries(prefix):
            if self._as_of is None and not entry["IsLatest"]:
                continue
            if self._as_of is not None and int(entry["LastModified"].timestamp()) > self._as_of:
                continue
            # Times have seconds: of one second the latest of all is newer, then what comes first.
            rank = (entry["LastModified"], entry["IsLatest"])
            if entry["Key"] not in newest or rank > newest[entry["Key"]][0]:
                newest[entry["Key"]] = rank, entry
        found = []
        for key, ((_, is_latest), entry) in newest.items():
            if "ETag" in entry:
                version = None if is_latest and entry["VersionId"] == "null" else entry["VersionId"]
                found.append(ObjectInfo(key[len(folder) :], entry["Size"], etag_of(entry), version))
        return found

    def _version_entries(self, prefix: str, limit: int | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield versions and markers of deletion: of one key in one answer its versions first, the newest before."""
        request: dict[str, Any] = {"Prefix": prefix} | ({"MaxKeys": limit} if limit else {})
        while True:
            answer = self._run(self._request("list_object_versions", self.url, request))
            yield from answer.get("Versions", [])
            yield from answer.get("DeleteMarkers", [])
            if limit or not answer.get("IsTruncated"):
                return
            request["KeyMarker"] = answer["NextKeyMarker"]
            request["VersionIdMarker"] = answer["NextVersionIdMarker"]

    def _entries(self, prefix: str, limit: int | None = None) -> Iterator[Mapping[str, Any]]:
        request: dict[str, Any] = {"Prefix": prefix} | ({"MaxKeys": limit} if limit else {})
        while True:
            answer = self._run(self._request("list_objects_v2", self.url, request))
            yield from answer.get("Contents", [])
            if limit or not answer.get("IsTruncated"):
                return
            request["ContinuationToken"] = answer["NextContinuationToken"]

    def _resolved(self) -> Scope:
        if self._scope is None:
            self._scope = self._resolve()
        return self._scope

    def _resolve(self) -> Scope:
        parent, _, name = self._prefix.rpartition("/")
        above = f"{parent}/" if parent or self._prefix.startswith("/") else ""
        if name.endswith("*"):
            return Scope(above, name[:-1])
        entries = self._entries if self._as_of is None else self._version_entries
        if not name or any(entries(f"{self._prefix}/", 1)):
            return Scope(self._prefix if not name else f"{self._prefix}/")
        if any(entry["Key"] == self._prefix for entry in entries(self._prefix, 1)):  # the first of all that start so
            return Scope(above, name, single=True)
        raise NotFoundError("objects", "none", self.url, "check bucket, prefix and endpoint")

    # -- requests -------------------------------------------------------------------------------

    def _call(self, method: str, key: str, **request: Any) -> Any:
        return self._run(self._request(method, key, {"Key": self._full(key), **request}))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        result: Result = fsspec.asyn.sync(self._connected().loop, _awaited, work)
        return result

    async def _request(self, method: str, where: str, request: Mapping[str, Any]) -> Any:
        client = self._connected()
        for attempt in range(2):
            body = {"Body": Body(request["Body"])} if "Body" in request else {}
            try:
                return await client._call_s3(method, Bucket=self._bucket, **{**request, **body})
            except Exception as error:
                if attempt == 0 and code_of(error) in EXPIRED:
                    await client.set_session(refresh=True)  # credentials were renewed behind a client that kept them
                    continue
                raise typed(error, where, creates="IfNoneMatch" in request) from error
        raise AssertionError("unreachable")

    def _full(self, key: str) -> str:
        return self._resolved().folder + key

    def _connected(self) -> s3fs.S3FileSystem:
        if self._client is None or self._client_pid != os.getpid():
            self._client = _client_of(self._options)
            self._client_pid = os.getpid()
        return self._client


class S3Store(StoreBase, S3Source):
    """Reads and writes objects below ``bucket/prefix``, always a folder.

    Parameters
    ----------
    path, options
        As for `S3Source`.
    single_writer : bool
        See `open_store`.
    """

    def __init__(self, path: str, options: Mapping[str, str], *, single_writer: bool = False) -> None:
        super().__init__(path, options)
        self._single_writer = single_writer

    def _resolve(self) -> Scope:
        return Scope(self._prefix if not self._prefix or self._prefix.endswith("/") else f"{self._prefix}/")

    def put_new(self, key: str, data: bytes) -> None:
        """See `Store.put_new`: ``If-None-Match: *``."""
        self._put_object(key, [data], overwrite=False)

    def put(self, key: str, data: Whole) -> None:
        """See `Store.put`. Memory of up to `PUT_BYTES` is one PUT: parts are more requests, hashed twice and joined."""
        pieces = [data] if isinstance(data, bytes) else data
        if isinstance(pieces, Path) or sum(map(len, pieces)) > PUT_BYTES:
            super().put(key, data)
        else:
            self._put_object(key, pieces, overwrite=True)

    def _put_object(self, key: str, data: Sequence[Data], *, overwrite: bool, headers: Headers = ()) -> None:
        """One PUT. A refused create is looked at before anything is concluded.

        A retry by the client after a lost reply is refused because the first try won; the id that each write carries
        tells our object from another's.
        """
        write_id = secrets.token_hex(16)
        request = {"Key": self._full(key), "Body": data, **arguments_of(headers, write_id)}
        if not overwrite and self._single_writer and self._exists(key):
            raise ExistsError("a free key", "an object", key)
        try:
            self._run(self._put_patiently(key, request | self._condition(overwrite=overwrite)))
        except DeniedError:
            raise
        except StoreError as failure:
            try:
                found, metadata = self._run(self._get(self._full(key), key, sum(map(len, data))))
            except (NotFoundError, LimitError):
                raise failure from None
            if metadata.get(WRITE_ID) != write_id or found != b"".join(data):
                raise

    def _condition(self, *, overwrite: bool) -> dict[str, Any]:
        return {} if overwrite or self._single_writer else {"IfNoneMatch": "*"}

    async def _put_patiently(self, key: str, request: Mapping[str, Any]) -> None:
        """A conditional write may meet another in flight: 409 means that neither is decided yet."""
        for attempt in range(_TRIES):
            try:
                await self._request("put_object", key, request)
            except StoreError as error:
                if attempt == _TRIES - 1 or code_of(error.__cause__) not in BUSY:
                    raise
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                return

    def write(self, key: str, data: Iterable[Data], *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> None:
        """See `Store.write`. One PUT, or an upload in parts that a failure aborts."""
        if n_bytes > part_bytes(n_bytes):
            super().write(key, data, n_bytes=n_bytes, overwrite=overwrite, headers=headers)
            return
        self._check_key(key, overwrite=overwrite)
        whole = b"".join(map(bytes, exactly(data, n_bytes, key)))
        self._put_object(key, [whole], overwrite=overwrite, headers=headers)

    def stage(self, key: str, *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> Staged:
        """See `Store.stage`: an upload in parts, in which each byte has its part from the start."""
        self._check_key(key, overwrite=overwrite)
        step_bytes, write_id = part_bytes(n_bytes), secrets.token_hex(16)
        upload = self._call("create_multipart_upload", key, **arguments_of(headers, write_id))["UploadId"]
        return Staged(key, n_bytes, overwrite, step_bytes, upload, write_id, headers)

    def write_stretch(self, staged: Staged, begin: int, end: int, data: Iterable[Data]) -> tuple[Stretch, ...]:
        """See `Store.write_stretch`; parts are sent while the next ones are made."""
        target = {"Key": self._full(staged.key), "UploadId": staged.name}
        loop = self._connected().loop
        pending: deque[tuple[int, int, Future[Any]]] = deque()
        stored: list[Stretch] = []

        def settle() -> None:
            start, stop, part = pending[0]
            stored.append(Stretch(start, stop, etag_of(part.result())))
            pending.popleft()

        start = begin
        try:
            for body in _parts(exactly(data, end - begin, staged.key), staged.step_bytes, end - begin):
                if len(pending) == _PARTS_AT_ONCE:
                    settle()
                request = {**target, "PartNumber": start // staged.step_bytes + 1, "Body": [body]}
                work = self._request("upload_part", f"{staged.key}@{start}", request)
                pending.append((start, start + len(body), asyncio.run_coroutine_threadsafe(work, loop)))
                start += len(body)
            while pending:
                settle()
        finally:
            for _, _, part in pending:
                part.cancel()
            for _, _, part in pending:
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    part.result()
        return tuple(stored)

    def publish(self, staged: Staged, stretches: Iterable[Stretch]) -> None:
        """See `Store.publish`: the upload is completed."""
        tiles = check_tiles(staged, stretches)
        parts = [{"PartNumber": tile.begin // staged.step_bytes + 1, "ETag": tile.etag} for tile in tiles]
        request = {"UploadId": staged.name, "MultipartUpload": {"Parts": parts}}
        request |= self._condition(overwrite=staged.overwrite)
        if not staged.overwrite and self._exists(staged.key):  # radosgw does not know the condition on this request
            raise ExistsError("a free key", "an object", staged.key)
        try:
            self._call("complete_multipart_upload", staged.key, **request)
        except (NotFoundError, ExistsError):
            # Where the reply to a first try was lost, the upload is gone because it was completed.
            if self._call("head_object", staged.key).get("Metadata", {}).get(WRITE_ID) != staged.write_id:
                raise
        if tags := tags_of(staged.headers):  # said when the upload began, which some stores forget
            self._call("put_object_tagging", staged.key, Tagging={"TagSet": tags})

    def abandon(self, staged: Staged) -> None:
        """See `Store.abandon`; the bucket's rule for unfinished uploads is the second line."""
        with contextlib.suppress(StoreError):
            self._call("abort_multipart_upload", staged.key, UploadId=staged.name)

    def _check_key(self, key: str, *, overwrite: bool) -> None:
        for error in self.refused_keys([key]).values():
            raise error
        if not overwrite and self._exists(key):
            raise ExistsError("a free key", "an object", key)  # before the work, not after; publishing decides

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._call("delete_object", key)

    def delete_generation(self, info: ObjectInfo) -> None:
        """See `Store.delete_generation`: ``If-Match``, and a look before it, for stores that do not know that."""
        found = self.head(info.key)
        if (found.n_bytes, found.etag) != (info.n_bytes, info.etag):
            raise changed(info.key)
        self._call("delete_object", info.key, IfMatch=info.etag)

    def unfinished(self) -> Leftovers:
        """See `Store.unfinished`: uploads in parts that were neither completed nor aborted."""
        folder, found = self._full(""), []
        request: dict[str, Any] = {"Prefix": folder}
        while True:
            answer = self._run(self._request("list_multipart_uploads", self.url, request))
            for entry in answer.get("Uploads", []):
                begun = int(entry["Initiated"].timestamp())
                found.append(Dated(entry["Key"][len(folder) :], 0, begun, entry["UploadId"]))
            if not answer.get("IsTruncated"):
                return found
            request |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def discard(self, left: Dated) -> None:
        """See `Store.discard`."""
        with contextlib.suppress(NotFoundError):
            self._call("abort_multipart_upload", left.key, UploadId=left.upload)

    def refused_keys(self, keys: Sequence[str]) -> dict[str, PathError]:
        """See `Store.refused_keys`: S3 takes any name of up to 1,024 bytes."""
        refused = {}
        for key in keys:
            n_bytes = len(self._full(key).encode("utf-8", "surrogateescape"))
            if not key or n_bytes > MAX_KEY_BYTES:
                found = f"{n_bytes} bytes" if key else "none"
                refused[key] = PathError(f"a key of 1 to {MAX_KEY_BYTES} bytes", found, key, "use a shorter prefix")
        return refused

    def _exists(self, key: str) -> bool:
        try:
            self.head(key)
        except NotFoundError:
            return False
        return True


def part_bytes(n_bytes: int) -> int:
    """Return the size of all parts but the last of an upload of `n_bytes`; some stores want one size."""
    mib = 1 << 20
    return max(PART_BYTES, -(-n_bytes // (MAX_PARTS - 1) // mib) * mib)


def _parts(data: Iterable[memoryview], step_bytes: int, n_bytes: int) -> Iterator[memoryview]:
    """Yield `data` in parts of `step_bytes`, the last may be smaller; each lasts until it must have been sent."""
    rooms = cycle([memoryview(bytearray(min(step_bytes, n_bytes))) for _ in range(_PARTS_AT_ONCE + 1)])
    room, n_filled = next(rooms), 0
    for view in data:
        rest = view
        while rest:
            n_taken = min(len(rest), step_bytes - n_filled)
            room[n_filled : n_filled + n_taken] = rest[:n_taken]
            rest, n_filled = rest[n_taken:], n_filled + n_taken
            if n_filled == step_bytes:
                yield room
                room, n_filled = next(rooms), 0
    if n_filled:
        yield room[:n_filled]


def _client_of(options: Mapping[str, str]) -> s3fs.S3FileSystem:
    """Return the client of this process for such options and such an environment, as long as a store uses it."""
    environment = sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))
    key = s3fs.S3FileSystem, os.getpid(), repr((sorted(options.items()), environment))
    client = _clients.get(key)
    if client is None:
        client = _clients[key] = s3fs.S3FileSystem(**client_options(options))
    return client


async def _awaited(work: Coroutine[Any, Any, Result]) -> Result:
    return await work


def _info(key: str, answer: Mapping[str, Any], n_bytes: int) -> ObjectInfo:
    version = answer.get("VersionId")
    return ObjectInfo(key, n_bytes, etag_of(answer), None if version == "null" else version)
