"""What stores are made of: writes from stages, probes, checks of what they are asked for."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from operators.errors import ChangedError, DeniedError, ExistsError, LimitError, StoreError
from pipeline.store import Data, Headers, ObjectInfo, Range, SourceStore, Staged, Store, Stretch, Whole

MAX_REQUEST_BYTES = 16 << 20
"""Ranges are fetched in requests of at most this size: large enough to hide latency, small enough to share a link."""
MAX_GAP_BYTES = 256 << 10
"""Two ranges this close are fetched as one; the bytes between cost less than a request."""
COPY_BYTES = 8 << 20
"""Size of the pieces in which a file is put."""
PROBE_KEY = ".create-only-probe"
SPOOL_PREFIX, SPOOL_SUFFIX = ".brevis-", ".part"
"""Names of files that are no objects yet; no listing shows those beside objects, which 16 hex digits tell apart."""
_SPOOLED = re.compile(re.escape(SPOOL_PREFIX) + "[0-9a-f]{16}" + re.escape(SPOOL_SUFFIX))


def is_spooled(name: str) -> bool:
    """Whether a file of this name is the half of a write that is not published, or never was."""
    return _SPOOLED.fullmatch(name) is not None


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


def changed(where: str) -> ChangedError:
    """The error for another generation than the planned one."""
    return ChangedError("the planned generation", "another one", where, "run again when it is at rest")


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
