"""A store in memory that watches its writers, one around any store that fails at a chosen call, and URLs for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from operators.errors import ChangedError, ExistsError, LimitError, NotFoundError, PathError
from pipeline.rooms import Room
from pipeline.store import Buffers, Data, Dated, Headers, Leftovers, Listing, ObjectInfo, Store, Whole
from pipeline.store_base import StoreBase


@dataclass
class MemoryStore(StoreBase):
    """Objects in a dictionary; refuses, as a fault of the caller, to let an object change.

    Attributes
    ----------
    log : list of (verb, key)
        Every call so far.
    clock, written : int, dict of str to int
        The time that whoever tests sets, and that of each object's last write.
    left : list of Dated
        What `unfinished` shows.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    url: str = "test:"
    create_only: bool = True
    clock: int = 0
    written: dict[str, int] = field(default_factory=dict)
    left: Leftovers = field(default_factory=list)

    def _called(self, verb: str, key: str) -> None:
        self.log.append((verb, key))

    def list(self, prefix: str = "") -> Listing:
        self._called("list", prefix)
        return [_info(key, data) for key, data in sorted(self.objects.items()) if key.startswith(prefix)]

    def head(self, key: str) -> ObjectInfo:
        self._called("head", key)
        return _info(key, self._find(key))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._called("get", key)
        data = self._find(key)
        if len(data) > max_bytes:
            raise LimitError(f"at most {max_bytes} bytes", f"{len(data)}", key)
        return data

    def get_ranges(self, info: ObjectInfo, ranges: Sequence[tuple[int, int]], room: Room | None = None) -> Buffers:
        self._called("get_ranges", info.key)
        data = self._find(info.key)
        if info.etag not in ("", _info(info.key, data).etag):
            raise ChangedError("the planned generation", "another one", info.key)
        assert all(0 <= start <= stop <= len(data) for start, stop in ranges)
        return [memoryview(data)[start:stop] for start, stop in ranges]

    def first(self, info: ObjectInfo, n_bytes: int) -> None:
        """Nothing is kept beside the bytes."""

    def put_new(self, key: str, data: bytes) -> None:
        self._called("put_new", key)
        if key in self.objects and self.create_only:
            raise ExistsError("a free key", "an object", key)
        self.objects[key] = data
        self.written[key] = self.clock

    def put(self, key: str, data: Whole) -> None:
        self._called("put", key)
        content = bytes_of(data)
        assert self.objects.get(key, content) == content, f"{key} was modified"
        self.objects[key] = content
        self.written[key] = self.clock

    def delete(self, key: str) -> None:
        self._called("delete", key)
        self.objects.pop(key, None)

    def delete_generation(self, info: ObjectInfo) -> None:
        self._called("delete_generation", info.key)
        if _info(info.key, self._find(info.key)) != info:
            raise ChangedError("the planned generation", "another one", info.key)
        del self.objects[info.key]

    def write(self, key: str, data: Iterable[Data], *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> None:
        raise AssertionError("the commit protocol restores no files")

    def now(self) -> int:
        return self.clock

    def dated(self, prefix: str = "") -> Iterator[Dated]:
        self._called("dated", prefix)
        objects = sorted(self.objects.items())
        return (Dated(key, len(data), self.written.get(key, 0)) for key, data in objects if key.startswith(prefix))

    def unfinished(self) -> Leftovers:
        return list(self.left)

    def discard(self, left: Dated) -> None:
        self.left.remove(left)

    def refused_keys(self, keys: Sequence[str]) -> dict[str, PathError]:
        return {}

    def _find(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise NotFoundError("an object", "none", key) from None


def bytes_of(whole: Whole) -> bytes:
    """Return what `Store.put` was given."""
    if isinstance(whole, Path):
        return whole.read_bytes()
    return whole if isinstance(whole, bytes) else b"".join(whole)


def _info(key: str, data: bytes) -> ObjectInfo:
    return ObjectInfo(key, len(data), f"{hash(data):x}")


class Killed(BaseException):
    """A process that ends here; no handler of the code under test may catch it."""


VERBS = ("list", "head", "get", "get_ranges", "put_new", "put", "delete", "delete_generation")


class FaultyStore:
    """A store that does something else at call number `call`, before or after the real one.

    Parameters
    ----------
    store : Store
    call : int
        From 0.
    after : bool
        The call happens, then the fault: what a lost reply looks like.
    fault : callable
        Takes the store; raises, or does what another process does meanwhile. After `Killed` there are no more calls,
        whatever the code under test does on its way out.
    """

    def __init__(self, store: Store, call: int, *, after: bool, fault: Callable[[Any], object]) -> None:
        self._store = store
        self._left = call
        self._after = after
        self._fault = fault
        self._dead = False
        self.reached = False

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._store, verb)
        return self._wrapped(real) if verb in VERBS else real

    def supports_create_only(self) -> bool:
        return StoreBase.supports_create_only(self)

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            if self._dead:
                raise Killed
            now = self._left == 0
            self._left -= 1
            self.reached |= now
            if now and not self._after:
                self._meet()
            result = real(*args, **named)
            if now and self._after:
                self._meet()
            return result

        return called

    def _meet(self) -> None:
        try:
            self._fault(self._store)
        except Killed:
            self._dead = True
            raise


def kill(_store: object) -> NoReturn:
    """End the process under test."""
    raise Killed


def at_every_call(fault: Callable[[Any], object]) -> Iterator[tuple[MemoryStore, FaultyStore]]:
    """Yield an empty store with its faulty view, for every call before and after, until a run makes no more calls."""
    for after in (False, True):
        call = 0
        reached = True
        while reached:
            store = MemoryStore()
            faulty = FaultyStore(store, call, after=after, fault=fault)
            yield store, faulty
            call, reached = call + 1, faulty.reached


def reach(monkeypatch: pytest.MonkeyPatch, stores: Mapping[str, Any]) -> None:
    """Let every command of this process find `stores` under their URLs, such as ``test://archive``."""
    for kind in ("FsspecSource", "FsspecStore"):
        monkeypatch.setattr(f"pipeline.store_fsspec.{kind}", lambda url, *_, **__: stores[url])
