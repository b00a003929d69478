"""Jobs that a worker can import; items are numbers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from operators.errors import ChangedError, DeniedError, StoreError


@dataclass(frozen=True)
class Squares:
    """Squares of the items, slowly if asked."""

    seconds: float = 0.0

    def open(self) -> Callable[[int], tuple[int, int]]:
        return self._work

    def _work(self, item: int) -> tuple[int, int]:
        time.sleep(self.seconds)
        return item * item, os.getpid()


@dataclass(frozen=True)
class Faulty:
    """The squares of the items, but 3 fails twice, 5 kills its worker once, 7 always, 8 and 9 fail for good."""

    folder: str

    def open(self) -> Callable[[int], int]:
        return self._work

    def _work(self, item: int) -> int:
        tries = self._count(item)
        if item == 3 and tries < 3:
            raise StoreError("an answer", "none", "3")
        if (item == 5 and tries == 1) or item == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if item == 8:
            raise ChangedError("the planned generation", "another", "8")
        if item == 9:
            raise ValueError("not one of ours")
        return item * item

    def _count(self, item: int) -> int:
        """Count this attempt at `item` in a file, since a worker forgets when it dies."""
        with Path(self.folder, f"item-{item}").open("a+b") as file:
            file.write(b".")
            return file.tell()


@dataclass(frozen=True)
class Meeting:
    """Each item waits until so many processes have come, and returns its own id."""

    folder: str
    size: int

    def open(self) -> Callable[[int], int]:
        return self._work

    def _work(self, item: int) -> int:
        Path(self.folder, str(os.getpid())).touch()
        deadline = time.monotonic() + 100
        while len(list(Path(self.folder).iterdir())) < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
        return os.getpid()


@dataclass(frozen=True)
class Refused:
    """Cannot be opened."""

    def open(self) -> Callable[[int], int]:
        raise DeniedError("access", "none", "the archive")


@dataclass(frozen=True)
class Deadly:
    """Kills whoever opens it."""

    def open(self) -> Callable[[int], int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@dataclass(frozen=True)
class Loaded:
    """Carries a prior; an item asks for its size."""

    prior: bytes

    def open(self) -> Callable[[int], int]:
        return lambda _: len(self.prior)
