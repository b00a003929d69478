"""Local folders: create-only by hard link, durable by fsync, contained by walking directory descriptors.

What is written leaves the page cache once it is on the disk: nobody reads it soon, others need the memory, and a
kernel that is asked for ever new pages spends more time on them than all coding takes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from operators.errors import DeniedError, ExistsError, NotFoundError, PathError, StoreError
from pipeline.keys import clashing_keys, key_order, safe_local_path
from pipeline.locations import absolute_url
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
from pipeline.store_base import (
    SPOOL_PREFIX,
    SPOOL_SUFFIX,
    StoreBase,
    changed,
    check_ranges,
    check_tiles,
    exactly,
    get_whole,
    is_spooled,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STAGED_FILE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_CREAT | os.O_EXCL | _STAGED_FILE
SYNC_BYTES = 64 << 20
"""Bytes after which what was written is sent to the disk, so that publishing a large file does not wait for all."""
_Pending: TypeAlias = list[tuple[str, frozenset[tuple[int, int]]]]
"""Folders to be listed, each with device and inode of all above it."""
_NO_FILE = "not a file: "
"""How the change token of a listed entry begins that cannot be read; what it is follows."""


class LocalSource:
    """Reads files below a folder, a single file, or the files whose path starts with a stem.

    Symbolic links are followed when reading: a model cache is made of them.

    Parameters
    ----------
    path : str
        Folder, file, or a path that ends in ``*``.
    """

    _absent_is_empty = False
    _shows_folders = True

    def __init__(self, path: str) -> None:
        self.url = absolute_url(path)  # a worker may stand in another folder
        with _typed(self.url):
            self._scope = self._resolve()

    def _resolve(self) -> Scope:
        path = Path(self.url)
        if self.url.endswith("*") and not os.path.lexists(self.url):
            folder, _, stem = self.url[:-1].rpartition("/")
            return Scope(folder + "/", stem)
        if path.is_file():
            return Scope(f"{path.parent}/".replace("//", "/"), path.name, single=True)
        return Scope(self.url.rstrip("/") + "/")

    def list(self, prefix: str = "") -> Listing:
        """See `SourceStore.list`. A folder without entries is listed as an empty object ``folder/``.

        What is no file, such as a dangling link, a pipe or a folder that may not be read, is listed too, and refused
        when it is read: the loss is that of one key, which a filter may leave out, and never silent. Below a prefix,
        as archives are read, such a folder raises DeniedError. Only what a killed writer of ours left of a
        file, ``.brevis-<16 hex digits>.part``, is not listed, for a source may be a target too.
        """
        wanted = self._scope.narrow(prefix)
        if wanted is None:
            return []
        with _typed(self._scope.folder):
            if not Path(self._scope.folder).is_dir():
                if self._absent_is_empty:
                    return []
                raise NotFoundError("a file or a folder", "nothing", self.url, "check the path")
            found = [info for info in self._walk(wanted, told=not prefix) if self._scope.selects(info.key)]
        return sorted(found, key=key_order)

    def _walk(self, wanted: str, *, told: bool) -> Iterator[ObjectInfo]:
        """Yield what lies below `wanted`; with `told`, a folder that may not be read is listed as no file."""
        pending: _Pending = [("", frozenset())]
        while pending:
            folder, above = pending.pop()
            try:
                yield from self._entries(folder, above, wanted, pending)
            except PermissionError:
                if not (told and folder and folder.startswith(wanted)):
                    raise
                yield _no_file(folder.removesuffix("/"), "a folder that may not be read")

    def _entries(
        self, folder: str, above: frozenset[tuple[int, int]], wanted: str, pending: _Pending
    ) -> Iterator[ObjectInfo]:
        here = Path(self._scope.folder + folder).stat()
        if (here.st_dev, here.st_ino) in above:
            if folder.startswith(wanted):
                yield _no_file(folder.removesuffix("/"), "a link to a folder above it")
            return
        above |= {(here.st_dev, here.st_ino)}
        n_entries = 0
        with os.scandir(self._scope.folder + folder) as entries:
            for entry in entries:
                n_entries += 1
                key = folder + entry.name
                if is_spooled(entry.name) and entry.is_file(follow_symlinks=False):
                    continue
                if not (key.startswith(wanted) or wanted.startswith(key)):
                    continue
                status = _status(entry)
                if status is None:
                    continue  # removed since the folder was read
                if isinstance(status, str):
                    if key.startswith(wanted):
                        yield _no_file(key, status)
                elif stat.S_ISDIR(status.st_mode):
                    if wanted.startswith(f"{key}/") or f"{key}/".startswith(wanted):
                        pending.append((f"{key}/", above))
                elif key.startswith(wanted):
                    yield _info(key, status)
        if self._shows_folders and not n_entries and folder and folder.startswith(wanted):
            yield _info(folder, here)

    def now(self) -> int:
        """See `SourceStore.now`: that of this machine, which dates its files."""
        return int(time.time())

    def dated(self, prefix: str = "") -> Iterator[Dated]:
        """See `SourceStore.dated`."""
        for info in self.list(prefix):
            path = Path(self._path(info.key))
            try:
                with _typed(info.key):
                    status = path.lstat() if info.etag.startswith(_NO_FILE) else path.stat()
            except NotFoundError:  # removed since it was listed
                continue
            yield Dated(info.key, info.n_bytes, int(status.st_mtime))

    def head(self, key: str) -> ObjectInfo:
        """See `SourceStore.head`."""
        with _typed(key):
            status = Path(self._path(key)).stat()
        if stat.S_ISDIR(status.st_mode) is not key.endswith("/"):
            raise NotFoundError("an object", "a folder" if stat.S_ISDIR(status.st_mode) else "a file", key)
        return _info(key, status)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `SourceStore.get`."""
        return get_whole(self, key, max_bytes)

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[Range], room: Room | None = None) -> Buffers:
        """See `SourceStore.get_ranges`; every range has an aligned buffer of its own."""
        check_ranges(info, ranges)
        if info.etag.startswith(_NO_FILE):
            step = "repair or remove it, or leave it out with --exclude"
            raise NotFoundError("a file", info.etag.removeprefix(_NO_FILE), info.key, step)
        if info.key.endswith("/"):
            self.head(info.key)
            return [memoryview(b"") for _ in ranges]
        buffers = []
        with _typed(info.key):
            fd = os.open(self._path(info.key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
            try:
                _check_unchanged(info, os.fstat(fd))
                for start, stop in ranges:
                    buffer = taken(room, stop - start)
                    _read_into(fd, buffer, start, info)
                    buffers.append(buffer.toreadonly())
                _check_unchanged(info, os.fstat(fd))
            finally:
                os.close(fd)
        return buffers

    def first(self, info: ObjectInfo, n_bytes: int) -> None:
        """See `SourceStore.first`: modes, times and what else a file system knows are not kept."""

    def _path(self, key: str) -> str:
        return self._scope.folder + "/".join(safe_local_path(self._scope.folder, key))


class LocalStore(StoreBase, LocalSource):
    """Reads and writes files below a folder, which need not exist yet.

    Parameters
    ----------
    path : str
        The folder.
    """

    _absent_is_empty = True
    _shows_folders = False

    def _resolve(self) -> Scope:
        if Path(self.url).is_file():
            raise PathError("a folder", "a file", self.url, "choose another path")
        return Scope(self.url.rstrip("/") + "/")

    def put_new(self, key: str, data: bytes) -> None:
        """See `Store.put_new`: a temporary file, fsync, hard link, fsync of the folder."""
        self.write(key, [data], n_bytes=len(data), overwrite=False)

    def write(self, key: str, data: Iterable[Data], *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> None:
        """See `Store.write`; the object that marks a folder holds no bytes, and is a folder."""
        if not key.endswith("/"):
            super().write(key, data, n_bytes=n_bytes, overwrite=overwrite)
            return
        parts = safe_local_path(self._scope.folder, key)
        if n_bytes:
            raise PathError("no bytes in a folder", f"{n_bytes}", key, "use an object store as the target")
        if not overwrite and Path(self._scope.folder, *parts).exists():
            raise ExistsError("a free key", "an object", key)
        with _typed(key, "a folder to write to"):
            os.close(_open_folder(self._scope.folder, parts, key))

    def stage(self, key: str, *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> Staged:
        """See `Store.stage`: a temporary file in the folder of the target, which no symbolic link may lead to."""
        staged = Staged(key, n_bytes, overwrite, 1, _temporary_name())
        with self._folder_of(staged) as (folder, name):
            if not overwrite and _exists(name, folder):
                raise ExistsError("a free key", "an object", key)  # before the work, not after; publishing decides
            os.close(os.open(staged.name, _NEW_FILE, 0o666, dir_fd=folder))
        return staged

    def write_stretch(self, staged: Staged, begin: int, end: int, data: Iterable[Data]) -> tuple[Stretch, ...]:
        """See `Store.write_stretch`."""
        with self._folder_of(staged) as (folder, _):
            try:
                file = os.open(staged.name, _STAGED_FILE, dir_fd=folder)
            except FileNotFoundError as error:
                step = "restore into a folder that every worker sees"
                raise NotFoundError("the file that is being written", "none", staged.key, step) from error
        try:
            place, synced = begin, begin
            for view in exactly(data, end - begin, staged.key):
                with _typed(staged.key):
                    _write_at(file, view, place)
                    place += len(view)
                    if place - synced >= SYNC_BYTES:  # while others may have something to compute
                        _settle(file, synced, place)
                        synced = place
            with _typed(staged.key):
                _settle(file, synced, place)
        finally:
            os.close(file)
        return (Stretch(begin, end),)

    def publish(self, staged: Staged, stretches: Iterable[Stretch]) -> None:
        """See `Store.publish`: linked into place, or renamed where it may replace a file."""
        check_tiles(staged, stretches)
        with self._folder_of(staged) as (folder, name):
            if staged.overwrite:
                os.rename(staged.name, name, src_dir_fd=folder, dst_dir_fd=folder)
            else:
                os.link(staged.name, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                os.unlink(staged.name, dir_fd=folder)
            os.fsync(folder)

    def abandon(self, staged: Staged) -> None:
        """See `Store.abandon`."""
        with contextlib.suppress(StoreError), self._folder_of(staged) as (folder, _):
            os.unlink(staged.name, dir_fd=folder)

    @contextlib.contextmanager
    def _folder_of(self, staged: Staged) -> Iterator[tuple[int, str]]:
        """Open the folder of a staged file, and make it where it is absent; the name that the file will have."""
        parts = safe_local_path(self._scope.folder, staged.key)
        if staged.key.endswith("/"):
            raise PathError("a key that names a file", "that of a folder", staged.key)
        with _typed(staged.key, "a folder to write to"):
            folder = _open_folder(self._scope.folder, parts[:-1], staged.key)
            try:
                yield folder, parts[-1]
            finally:
                os.close(folder)

    def spool(self, scratch_dir: str) -> Path:
        """See `Store.spool`: without a folder of the user's choice it is a file beside the objects."""
        if scratch_dir:
            return super().spool(scratch_dir)
        Path(self._scope.folder).mkdir(parents=True, exist_ok=True)
        path = Path(self._scope.folder, _temporary_name())
        os.close(os.open(path, _NEW_FILE, 0o666))
        return path

    def put(self, key: str, data: Whole) -> None:
        """See `Store.put`: a file beside the objects is moved into its place."""
        if not isinstance(data, Path) or data.parent != Path(self._scope.folder):
            super().put(key, data)
            return
        parts = safe_local_path(self._scope.folder, key)
        with _typed(key):
            folder = _open_folder(self._scope.folder, parts[:-1], key)
            try:
                with data.open("rb") as spooled:
                    _settle(spooled.fileno(), 0, 0)
                os.rename(data, parts[-1], dst_dir_fd=folder)
                os.fsync(folder)
            finally:
                os.close(folder)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with contextlib.suppress(NotFoundError), _typed(key):
            Path(self._path(key)).unlink()

    def delete_generation(self, info: ObjectInfo) -> None:
        """See `Store.delete_generation`: the file is looked at right before it goes."""
        path = Path(self._path(info.key))
        with _typed(info.key):
            leads_to = os.path.realpath(path, strict=True)  # a loop of links is an OSError here, and none of pathlib's
            if leads_to != f"{os.path.realpath(self._scope.folder)}/{info.key}".replace("//", "/"):
                raise PathError("a file", "a link to one", info.key, "remove what it leads to by hand")
            _check_unchanged(info, path.lstat())
            path.unlink()
            _sync(path.parent)

    def unfinished(self) -> Leftovers:
        """See `Store.unfinished`: the files of `spool` and of writers that were killed."""
        found = []
        for folder, _, names in os.walk(self._scope.folder):
            for name in names:
                if is_spooled(name):
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        key = str(path.relative_to(self._scope.folder))
                        found.append(Dated(key, status.st_size, int(status.st_mtime)))
        return found

    def discard(self, left: Dated) -> None:
        """See `Store.discard`."""
        self.delete(left.key)

    def refused_keys(self, keys: Sequence[str]) -> dict[str, PathError]:
        """See `Store.refused_keys`."""
        refused = {}
        for key in keys:
            try:
                safe_local_path(self._scope.folder, key)
            except PathError as error:
                refused[key] = error
        rest = [key for key in keys if key not in refused]
        for key, other in clashing_keys(rest, fold_case=self._folds_case()).items():
            refused[key] = PathError("a name of its own", f"the place of {other!r}", key, "restore it elsewhere")
        return refused

    def _folds_case(self) -> bool:
        """Whether two names that differ in case are one file here, found by asking for one of them."""
        name = _temporary_name()
        with _typed(self._scope.folder):
            folder = _open_folder(self._scope.folder, [], "")
            try:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=folder))
                try:
                    os.stat(name.upper(), dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    return False
                finally:
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)
        return True


def _temporary_name() -> str:
    return f"{SPOOL_PREFIX}{secrets.token_hex(8)}{SPOOL_SUFFIX}"


def _write_at(file: int, view: memoryview, place: int) -> None:
    while view:
        n_written = os.pwrite(file, view, place)
        view, place = view[n_written:], place + n_written


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _settle(file: int, begin: int, end: int) -> None:
    """Wait until a file is on the disk; what lies from `begin` to `end`, or else all, leaves the page cache."""
    os.fsync(file)
    with contextlib.suppress(OSError):  # it is advice
        os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _open_folder(root: str, parts: Sequence[str], key: str) -> int:
    """Open, and make where absent, the folders from `root` down; a descriptor that no rename can redirect."""
    Path(root).mkdir(parents=True, exist_ok=True)
    folder = os.open(root, _FOLDER)
    for part in parts:
        try:
            try:
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
                os.fsync(folder)
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise PathError("a folder", f"a link or file named {part!r}", key, "move it out of the way") from error
            raise
        finally:
            os.close(folder)
        folder = below
    return folder


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _status(entry: os.DirEntry[str]) -> os.stat_result | str | None:
    """Status of the file or folder that an entry leads to; else what it is, or None where it is gone."""
    try:
        status = entry.stat()
    except OSError as error:
        if not entry.is_symlink():
            if error.errno == errno.ENOENT:
                return None
            raise
        names = {errno.ENOENT: "a dangling link", errno.ENOTDIR: "a dangling link", errno.ELOOP: "a loop of links"}
        return names.get(error.errno or 0, f"a link that cannot be followed ({error.strerror})")
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return status
    return {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(status.st_mode), "a device")


def _no_file(key: str, what: str) -> ObjectInfo:
    # One byte, so that it is never taken for an empty file, which nobody needs to read.
    return ObjectInfo(key, 1, _NO_FILE + what)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    if stat.S_ISDIR(status.st_mode):
        return ObjectInfo(key, 0, "folder")
    return ObjectInfo(key, status.st_size, f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}")


def _check_unchanged(info: ObjectInfo, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotFoundError("a file", "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or device", info.key)
    if info.etag not in {"", _info(info.key, status).etag}:
        raise changed(info.key)


def _read_into(fd: int, buffer: memoryview, offset: int, info: ObjectInfo) -> None:
    filled = 0
    while filled < len(buffer):
        n_read = os.preadv(fd, [buffer[filled:]], offset + filled)
        if n_read == 0:
            _check_unchanged(info, os.fstat(fd))
            raise StoreError(f"{len(buffer)} bytes", f"the end after {filled}", f"{info.key}@{offset}", "verify it")
        filled += n_read


@contextlib.contextmanager
def _typed(where: str, wanted: str = "an object") -> Iterator[None]:
    """Turn an OSError into the error tree; `wanted` is what is not there where something is not."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        found = os.strerror(code)
        if code in {errno.ENOENT, errno.ENOTDIR}:
            raise NotFoundError(wanted, found, where, "check the path") from error
        if code == errno.EEXIST:
            raise ExistsError("a free key", "an object", where) from error
        if code in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise DeniedError("access", found, where, "check permissions; the file system must know links") from error
        if code in {errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}:
            raise PathError("a path to a file", found, where, "choose another path") from error
        step = "make room" if code in {errno.ENOSPC, errno.EDQUOT} else "check the disk and run again"
        raise StoreError("a working file system", found, where, step) from error
