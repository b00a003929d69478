"""What no snapshot needs, and how it goes: `gc`. `ARCHIVE.md` is the norm.

Mark: every snapshot is a root, one that was dropped lately too, and every run that wrote lately. Sweep: what is not
reachable and old is condemned, and removed by a pass a day later if that still holds. Only objects whose names are
those of an archive are ever looked at.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

from operators.errors import ConflictError, DamageError, NotFoundError
from pipeline.archive import (
    ROWS_BYTES_MAX,
    SNAPSHOT_BYTES_MAX,
    checkpoints,
    each,
    manifest_bytes,
    manifest_key,
    open_archive,
    snapshot_key,
)
from pipeline.condemned import (
    CondemnedList,
    condemn,
    condemned_lists,
    is_void,
    read_list,
    remove_orphans,
    retire,
    take,
)
from pipeline.packs import pack_key
from pipeline.parquet import packs_in
from pipeline.snapshots import from_json
from pipeline.store import Dated, Leftovers, Store

HOUR = 3600
FLOOR_SECONDS = 72 * HOUR
"""Nothing younger is removed: more than the longest run takes."""
WAIT_SECONDS = 24 * HOUR
"""Between condemning and removing: more than a commit takes from looking at its packs to being published."""
SWEEP_SECONDS = 12 * HOUR
"""A pass removes no longer than this, so that the next may take a list for left behind after `WAIT_SECONDS`."""
BATCH = 1000
"""Objects that are removed between two looks at the commits."""

_RUN = re.compile(r"runs/([0-9a-f]{64})/.")
_KINDS = (
    # In the order of removal: what refers goes before what it refers to.
    re.compile(r"runs/[0-9a-f]{64}/receipts/.+"),
    re.compile(r"runs/[0-9a-f]{64}/.+"),
    re.compile(r"expired/[^/]+/[0-9]{8}-[0-9a-f]{64}(-[0-9]+)?(\.tags)?\.json"),
    re.compile(r"manifests/[0-9a-f]{64}\.parquet"),
    re.compile(r"packs/([0-9a-f]{2})/\1[0-9a-f]{62}"),
)


@dataclass(slots=True)
class Marked:
    """What there is at one time.

    Attributes
    ----------
    snapshots : tuple of str
        Keys of the commits that were the roots.
    live, live_bytes, young, young_bytes : int
        Objects that are reachable; that are not, but not old enough.
    garbage : dict of str to int
        Size of each object that is neither, in the order of removal.
    left : list of Dated
        Uploads and files that were begun long ago and never published.
    """

    snapshots: tuple[str, ...]
    live: int = 0
    live_bytes: int = 0
    young: int = 0
    young_bytes: int = 0
    garbage: dict[str, int] = field(default_factory=dict)
    left: Leftovers = field(default_factory=list)


@dataclass(slots=True)
class Collected:
    """What a pass did.

    Attributes
    ----------
    marked : Marked
        As it was when the pass ended, or would have begun.
    removed, removed_bytes : int
    condemned : str
        Key of the list that a later pass may remove; empty where nothing is condemned.
    ready : int
        When that pass may come, in seconds since 1970; 0 where none is needed.
    """

    marked: Marked
    removed: int = 0
    removed_bytes: int = 0
    condemned: str = ""
    ready: int = 0


def mark(store: Store, floor_seconds: int = FLOOR_SECONDS) -> Marked:
    """Tell reachable objects from garbage.

    Memory is for the names of live packs and of garbage, whatever the number of rows.

    Raises
    ------
    DamageError, UnsupportedError, NotFoundError
        A root cannot be read, so that nobody knows what it needs: nothing may be removed.
    """
    border = store.now() - floor_seconds
    commits = _commits(store)
    live: set[str] = set()
    runs: set[str] = set()
    for key in commits:
        _reach(store, key, live, runs)
    for item in store.dated("expired/"):
        if item.written >= border and (named := _KINDS[2].fullmatch(item.key)) and named[2] is None:
            with contextlib.suppress(DamageError, NotFoundError):  # it cannot come back, whatever is kept
                _reach(store, item.key, live, runs)
    runs |= _working(store, border, live, runs)
    marked = Marked(commits, left=[item for item in store.unfinished() if item.written < border])
    found: tuple[dict[str, int], ...] = tuple({} for _ in _KINDS)
    for item in _objects(store):
        kind = _kind_of(item.key)
        if kind is None:
            continue
        run = _RUN.match(item.key)
        if item.key in live or (run and run[1] in runs):
            marked.live, marked.live_bytes = marked.live + 1, marked.live_bytes + item.n_bytes
        elif item.written >= border:
            marked.young, marked.young_bytes = marked.young + 1, marked.young_bytes + item.n_bytes
        else:
            found[kind][item.key] = item.n_bytes
    marked.garbage = {key: n_bytes for part in found for key, n_bytes in sorted(part.items())}
    return marked


def _kind_of(key: str) -> int | None:
    """Return the place of the kind of an object in `_KINDS`, None where its name is none of an archive."""
    return next((number for number, name in enumerate(_KINDS) if name.fullmatch(key)), None)


def _reach(store: Store, key: str, live: set[str], runs: set[str]) -> None:
    """Add what the snapshot `key` needs."""
    snapshot = from_json(store.get(key, max_bytes=SNAPSHOT_BYTES_MAX), key)
    runs.add(snapshot.run)
    manifest = manifest_key(snapshot.manifest)
    if manifest not in live:
        live.update(map(pack_key, packs_in(manifest_bytes(store, snapshot), manifest, checked=True)))
        live.add(manifest)


def _commits(store: Store) -> tuple[str, ...]:
    return tuple(snapshot_key(name, number) for name, numbers in checkpoints(store).items() for number in numbers)


def _working(store: Store, border: int, live: set[str], done: set[str]) -> set[str]:
    """Return the runs that wrote after `border`; the packs of their receipts become live."""
    runs = {match[1] for item in store.dated("runs/") if item.written >= border and (match := _RUN.match(item.key))}
    for run in sorted(runs - done):
        for info in store.list(f"runs/{run}/receipts/"):
            data = store.get(info.key, max_bytes=ROWS_BYTES_MAX)
            live.update(map(pack_key, packs_in(data, info.key, checked=False)))
    return runs


def _objects(store: Store) -> Iterator[Dated]:
    for folder in ("runs/", "expired/", "manifests/", "packs/"):
        yield from store.dated(folder)


# -- a pass -------------------------------------------------------------------------------------


def collect(
    store: Store,
    floor_seconds: int = FLOOR_SECONDS,
    note: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Remove what an earlier pass has condemned and is still garbage, and condemn what is garbage now.

    Parameters
    ----------
    store : Store
        The archive.
    floor_seconds : int
        Age below which nothing is removed.
    note : callable
        Takes the key of each object that was removed.

    Raises
    ------
    ConflictError
        Another pass is removing, or was killed while it did, less than a day ago.
    DamageError, UnsupportedError, NotFoundError
        See `mark`; whatever was removed until then was garbage.
    """
    open_archive(store)
    ripe: list[CondemnedList] = []
    for condemned in condemned_lists(store):
        if condemned.decided is None:
            if store.now() - condemned.written < WAIT_SECONDS:
                marked = mark(store, floor_seconds)
                return Collected(marked, condemned=condemned.key, ready=condemned.written + WAIT_SECONDS)
            ripe.append(condemned)
        elif is_void(store, condemned.key) or store.now() - condemned.decided >= WAIT_SECONDS:
            retire(store, condemned.key)  # what is left of it will be condemned again
        else:
            raise ConflictError("no other gc", "one that removes, or was killed", condemned.key, "run again in a day")
    remove_orphans(store, store.now() - FLOOR_SECONDS)
    result = Collected(Marked(()))
    for condemned in ripe:
        _sweep(store, condemned.key, floor_seconds, result, note)
    result.marked = mark(store, floor_seconds)
    for item in result.marked.left:
        store.discard(item)
        note(item.key)
    if result.marked.garbage:
        result.condemned = condemn(store, result.marked.garbage)
        result.ready = WAIT_SECONDS + max(item.written for item in store.dated(result.condemned))
    return result


def _sweep(store: Store, key: str, floor_seconds: int, result: Collected, note: Callable[[str], None]) -> None:
    """Remove what the list `key` names and is still garbage, unless a commit has made the list void."""
    condemned = read_list(store, key)
    if not take(store, key):
        return
    try:
        _remove(store, condemned, floor_seconds, result, note)
    finally:  # whoever failed removes no more; one that was killed leaves the list to a pass of the next day
        retire(store, key)


def _remove(
    store: Store, condemned: set[str], floor_seconds: int, result: Collected, note: Callable[[str], None]
) -> None:
    begun = store.now()
    while store.now() - begun < SWEEP_SECONDS:
        marked = mark(store, floor_seconds)  # after the decision: whoever commits from now on knows of it
        victims = ((name, n_bytes) for name, n_bytes in marked.garbage.items() if name in condemned)
        for batch in _batches(victims):
            if _commits(store) != marked.snapshots or store.now() - begun >= SWEEP_SECONDS:
                break  # somebody committed: look again
            for group in _by_kind(batch):  # a receipt is gone before its pack goes
                each(store.delete, group)
            for name, n_bytes in batch:
                result.removed, result.removed_bytes = result.removed + 1, result.removed_bytes + n_bytes
                note(name)
        else:
            return


def _batches(victims: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    iterator = iter(victims)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _by_kind(batch: list[tuple[str, int]]) -> Iterator[list[str]]:
    """Group neighbours of a batch, which is in the order of removal, by kind."""
    for _, group in groupby((key for key, _ in batch), _kind_of):
        yield list(group)
