"""Which snapshots stay, and how one goes: `prune`. What only they needed is left to `gc`.

The rules are those of restic's ``forget``, so that nobody has to learn others. Each takes the snapshots of one
checkpoint from the newest to the oldest: ``last`` keeps N, ``daily``, ``weekly`` and ``monthly`` keep the newest of
each of the last N days, ISO weeks and months that have any, in UTC, and the oldest of all where they could keep more. A
snapshot stays if any rule keeps it. Beyond restic, the newest stays always, and so do the newest that lacks no file and
those whose source was freed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from blake3 import blake3

from configs.loader import canonical_json
from operators.errors import ArchiveNotFoundError, ConflictError, DamageError, DigestError, FormatError, NotFoundError
from pipeline.archive import (
    SNAPSHOT_BYTES_MAX,
    each_snapshot,
    escape,
    load_manifest,
    manifest_key,
    missing_packs,
    pack_sizes,
    put_once,
    snapshot_key,
    snapshot_numbers,
    unescape,
)
from pipeline.condemned import spare
from pipeline.packs import pack_key
from pipeline.snapshots import from_json
from pipeline.store import SourceStore, Store

_COPY = re.compile(r"[0-9a-f]{64}(?:-([0-9]+))?\.json")
RELEASED = "released"
"""Tag of a snapshot whose source was freed: it may be the last copy, so that it goes by name alone."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How many snapshots each rule keeps, and the tags that keep one."""

    last: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    tags: frozenset[str] = frozenset()

    def is_empty(self) -> bool:
        """Whether no rule is given."""
        return self == Policy()


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a snapshot, and why it stays.

    Attributes
    ----------
    checkpoint, seq, time, tags : str, int, str, frozenset of str
    complete : bool
        It lacks no file.
    reasons : tuple of str
        None where it goes.
    """

    checkpoint: str
    seq: int
    time: str
    tags: frozenset[str]
    complete: bool
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``<checkpoint>/<seq>``."""
        return f"{self.checkpoint}/{self.seq}"


def decide_kept(snapshots: Sequence[Kept], policy: Policy) -> list[Kept]:
    """Return the snapshots of one checkpoint with the reasons for which they stay, the newest first.

    Parameters
    ----------
    snapshots : sequence of Kept
        In any order. One that cannot be read has no `time`; it stays, and counts for no rule.
    policy : Policy
    """
    newest_first = sorted(snapshots, key=lambda one: -one.seq)
    known = [one for one in newest_first if one.time]
    reasons: dict[int, list[str]] = {one.seq: [] if one.time else ["unreadable"] for one in newest_first}
    rules: list[tuple[str, int, Callable[[Kept], Hashable]]] = [
        ("last", policy.last, lambda one: one.seq),
        ("daily", policy.daily, lambda one: _time(one).date()),
        ("weekly", policy.weekly, lambda one: _time(one).isocalendar()[:2]),
        ("monthly", policy.monthly, lambda one: (_time(one).year, _time(one).month)),
    ]
    for name, count, period in rules:
        before: Hashable = None
        for one in known:
            if count and (period(one) != before or one is known[-1]):
                reasons[one.seq].append(name)
                before, count = period(one), count - 1
    for one in known:
        reasons[one.seq] += [f"tag {tag}" for tag in sorted((policy.tags | {RELEASED}) & one.tags)]
    for name, found in (("newest", known[:1]), ("newest complete", [one for one in known if one.complete][:1])):
        for one in found:
            reasons[one.seq].append(name)
    return [replace(one, reasons=tuple(reasons[one.seq])) for one in newest_first]


def _time(one: Kept) -> datetime:
    return datetime.fromisoformat(one.time)


def read_kept(store: SourceStore, checkpoint: str) -> list[Kept]:
    """Return what `decide_kept` needs to know of the snapshots of a checkpoint."""
    tags = tags_of(store, checkpoint)
    found = []
    for seq, snapshot in each_snapshot(store, checkpoint, snapshot_numbers(store, checkpoint)):
        mine = frozenset(tags.get(seq, ()))
        try:
            if isinstance(snapshot, DamageError):
                raise snapshot
            datetime.fromisoformat(snapshot.time)
        except (DamageError, ValueError):
            found.append(Kept(checkpoint, seq, "", mine, complete=False))
        else:
            found.append(Kept(checkpoint, seq, snapshot.time, mine, not snapshot.failures))
    return found


# -- one goes, or comes back --------------------------------------------------------------------


def expire(store: Store, checkpoint: str, seq: int, *, released: bool = False) -> None:
    """Drop a commit, after a copy of it has a place in ``expired/``.

    Parameters
    ----------
    store : Store
    checkpoint : str
    seq : int
    released : bool
        Also where its source was freed.

    Raises
    ------
    ArchiveNotFoundError
        There is none of that number.
    ConflictError
        Its source is being freed; the commit is back in its place.
    """
    key = snapshot_key(checkpoint, seq)
    try:
        data = store.get(key, max_bytes=SNAPSHOT_BYTES_MAX)
    except NotFoundError as error:
        raise ArchiveNotFoundError("a snapshot", "none", key, "see `brevis list`") from error
    # A copy of its own for each drop: gc counts its age from there, and the last one is what comes back.
    number = 1 + max(_copies(store, checkpoint, seq), default=0)
    copy = f"{_expired_prefix(checkpoint, seq)}{blake3(data).hexdigest()}-{number}.json"
    if put_once(store, copy, data, SNAPSHOT_BYTES_MAX) != data:
        raise DigestError("a copy of the snapshot", "other bytes", copy, "remove it and run again")
    store.delete(key)
    tags = tags_of(store, checkpoint).get(seq, ())
    if RELEASED in tags and not released:
        # `release-source` puts the tag, then looks for the commit: one of both sees the other, whatever the order.
        revive(store, checkpoint, seq)
        raise ConflictError("a snapshot to drop", "one whose source is being freed", key, "run again: it stays")
    if tags:
        put_once(store, _tags_of_copy(copy), canonical_json(sorted(tags)), SNAPSHOT_BYTES_MAX)
    for tag in tags:
        store.delete(tag_key(checkpoint, seq, tag))


def revive(store: Store, checkpoint: str, seq: int) -> None:
    """Bring back the last dropped commit of a number, and its tags; gc keeps what it needs as long as it has a copy.

    Raises
    ------
    ArchiveNotFoundError
        No copy.
    ConflictError
        The number is taken, or a collection has begun to remove what it needs.
    DamageError, NotFoundError
        Its manifest, or a pack of it, is gone.
    """
    copies = _copies(store, checkpoint, seq)
    if not copies:
        raise ArchiveNotFoundError("a dropped snapshot", "none", f"{checkpoint}/{seq}", "see expired/")
    copy = copies[max(copies)]
    data = store.get(copy, max_bytes=SNAPSHOT_BYTES_MAX)
    snapshot = from_json(data, copy)
    key = snapshot_key(checkpoint, seq)
    if (snapshot.checkpoint, snapshot.seq) != (checkpoint, seq):
        raise FormatError(f"the snapshot {checkpoint}/{seq}", snapshot.name, copy, "it was copied from elsewhere")
    tags = _stored_tags(store, _tags_of_copy(copy))
    sizes = pack_sizes(load_manifest(store, snapshot))
    spare(store, {manifest_key(snapshot.manifest), *map(pack_key, sizes)})
    load_manifest(store, snapshot)  # again: it may have been removed before it was spared
    if gone := missing_packs(store, sizes):
        raise NotFoundError("the packs of this snapshot", gone[0].detail, gone[0].key, "restore them from another copy")
    if put_once(store, key, data, SNAPSHOT_BYTES_MAX) != data:
        raise ConflictError("a free number", "another snapshot", key, "prune that one first")
    add_tags(store, checkpoint, seq, tags)


def _copies(store: SourceStore, checkpoint: str, seq: int) -> dict[int, str]:
    """Return the copies of commits of a number, by the drops that made them."""
    prefix = _expired_prefix(checkpoint, seq)
    found = ((_COPY.fullmatch(info.key.removeprefix(prefix)), info.key) for info in store.list(prefix))
    return {int(match[1] or 1): key for match, key in found if match}


def _stored_tags(store: SourceStore, key: str) -> tuple[str, ...]:
    try:
        found = json.loads(store.get(key, max_bytes=SNAPSHOT_BYTES_MAX))
    except NotFoundError:
        return ()
    except ValueError as error:
        raise FormatError("tags as JSON", str(error), key, "remove it, and tag the snapshot again") from error
    if not isinstance(found, list) or not all(isinstance(tag, str) for tag in found):
        raise FormatError("a list of tags", repr(found)[:100], key, "remove it, and tag the snapshot again")
    return checked_tags(found)


def _tags_of_copy(copy: str) -> str:
    return copy.removesuffix(".json") + ".tags.json"


def _expired_prefix(checkpoint: str, seq: int) -> str:
    return f"expired/{escape(checkpoint)}/{seq:08d}-"


# -- tags ---------------------------------------------------------------------------------------


def tag_key(checkpoint: str, seq: int, tag: str) -> str:
    """Return the key of the object that says that a snapshot has a tag."""
    return f"{_tags_prefix(checkpoint)}{seq:08d}/{escape(tag)}"


def add_tags(store: Store, checkpoint: str, seq: int, tags: Iterable[str]) -> None:
    """Tag a snapshot: objects of their own, so that a tag may come later and changes no digest."""
    for tag in tags:
        put_once(store, tag_key(checkpoint, seq, tag), b"tag\n")


def checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Return `tags` once each. Raises UsageError where one cannot be a tag."""
    for tag in tags:
        escape(tag)
    return tuple(dict.fromkeys(tags))


def tags_of(store: SourceStore, checkpoint: str) -> dict[int, list[str]]:
    """Return the tags of each tagged snapshot of a checkpoint."""
    found: dict[int, list[str]] = {}
    prefix = _tags_prefix(checkpoint)
    for info in store.list(prefix):
        number, _, name = info.key.removeprefix(prefix).partition("/")
        tag = unescape(name)
        if number.isdecimal() and tag is not None:
            found.setdefault(int(number), []).append(tag)
    return found


def _tags_prefix(checkpoint: str) -> str:
    return f"tags/{escape(checkpoint)}/"
