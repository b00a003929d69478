"""What a collection of garbage is about to remove, and how a commit stays clear of it. `ARCHIVE.md` is the norm.

Between the moment when a commit has seen its packs and the moment when it is published nobody may remove one. No lock
is needed: what is to be removed stands in a list for a day before, longer than any such moment, and one create-only
object decides, once for each list, whether it is swept or void. A commit that needs an object of a list makes it void,
or finds that it came too late and fails.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from blake3 import blake3

from operators.errors import ConflictError, DigestError, NotFoundError
from pipeline.archive import ROWS_BYTES_MAX, put_once
from pipeline.store import SourceStore, Store

VOID = b"void\n"

DECISION_BYTES_MAX = 1 << 10
_FOLDER = "gc/"
_LIST = re.compile(r"gc/([0-9]{8})-([0-9a-f]{64})")
_DECISION = ".decision"


@dataclass(frozen=True, slots=True)
class CondemnedList:
    """A list of keys: `key` is its own, with a number and the digest of its bytes."""

    key: str
    written: int
    decided: int | None
    """When its decision was written, by the clock of the store; None where there is none yet."""


def condemned_lists(store: Store) -> list[CondemnedList]:
    """Return the lists of an archive, in the order of their numbers."""
    found = {item.key: item.written for item in store.dated(_FOLDER)}
    return [CondemnedList(key, found[key], found.get(key + _DECISION)) for key in sorted(found) if _LIST.fullmatch(key)]


def condemn(store: Store, keys: Iterable[str]) -> str:
    """Store a list of `keys` under the next number; return its own key."""
    data = "".join(f"{key}\n" for key in keys).encode("utf-8", "surrogateescape")
    numbers = [int(match[1]) for info in store.list(_FOLDER) if (match := _LIST.match(info.key))]
    key = f"{_FOLDER}{max(numbers, default=0) + 1:08d}-{blake3(data).hexdigest()}"
    put_once(store, key, data, len(data))
    return key


def read_list(store: SourceStore, key: str) -> set[str]:
    """Return the keys of a list.

    Raises
    ------
    DamageError
        It is not what was written.
    NotFoundError
        It is gone.
    """
    data = store.get(key, max_bytes=ROWS_BYTES_MAX)
    match = _LIST.fullmatch(key)
    if match is None or blake3(data).hexdigest() != match[2]:
        raise DigestError(
            "a list of the digest in its name", "other bytes", key, "remove it; the next gc makes another"
        )
    return set(data.decode("utf-8", "surrogateescape").split("\n")[:-1])


def take(store: Store, key: str) -> bool:
    """Whether the caller, and nobody else, may remove what the list `key` names: it decided first."""
    # Of its own, since a second pass must not remove what a commit may need once the first one has retired the list.
    mine = b"sweep %s\n" % secrets.token_hex(16).encode()
    # Retired meanwhile, a list has no decision either.
    return put_once(store, key + _DECISION, mine) == mine and any(info.key == key for info in store.list(key))


def is_void(store: SourceStore, key: str) -> bool:
    """Whether a list that is decided on is void."""
    return store.get(key + _DECISION, max_bytes=DECISION_BYTES_MAX) == VOID


def retire(store: Store, key: str) -> None:
    """Remove a list, and then its decision, so that no list is ever without one that it had."""
    store.delete(key)
    store.delete(key + _DECISION)


def remove_orphans(store: Store, before: int) -> None:
    """Remove decisions whose list is gone and that were written before `before`."""
    found = {item.key: item.written for item in store.dated(_FOLDER)}
    for key, written in found.items():
        if key.endswith(_DECISION) and key.removesuffix(_DECISION) not in found and written < before:
            store.delete(key)


def spare(store: Store, keys: Collection[str]) -> None:
    """Make sure that none of `keys` is removed any more; to be called before they are looked for, and then committed.

    Raises
    ------
    ConflictError
        A collection has begun to remove some of them.
    """
    for info in store.list(_FOLDER):
        if not _LIST.fullmatch(info.key):
            continue
        try:
            condemned = read_list(store, info.key)
        except NotFoundError:
            continue  # its sweep is over: what it took will not be found
        if condemned.isdisjoint(keys):
            continue
        if put_once(store, info.key + _DECISION, VOID) != VOID:
            named = min(condemned.intersection(keys))
            raise ConflictError("objects that stay", "a gc that removes them", named, "run again when it is through")
