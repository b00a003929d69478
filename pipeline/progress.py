"""Progress for people: a bar on a terminal, a line per interval elsewhere, nothing when asked for nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from pipeline.meters import count


class Progress:
    """Counts source bytes that are done.

    Parameters
    ----------
    title : str
        What is being done.
    total_bytes : int
        Bytes in all.
    shown : bool
        False shows nothing.
    interval_seconds : int
        Time between lines where standard error is not a terminal.
    verbose : bool
        Print a line for each item too.
    """

    def __init__(
        self, title: str, total_bytes: int, *, shown: bool, interval_seconds: int, verbose: bool = False
    ) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self.shown = shown
        self.interval_seconds = interval_seconds
        self.verbose = verbose
        self.done_bytes = 0
        self._bar: tqdm[None] | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self.shown and sys.stderr.isatty():
            self._bar = tqdm(desc=self.title, total=self.total_bytes, unit="B", unit_scale=True, file=sys.stderr)
        return self

    def expect(self, total_bytes: int) -> None:
        """Tell the total once it is known."""
        self.total_bytes = total_bytes
        if self._bar is not None:
            self._bar.total = total_bytes
            with contextlib.suppress(OSError):
                self._bar.refresh()

    def note(self, text: str) -> None:
        """Say what became of an item, where the user wants to know."""
        if self.verbose:
            if self._bar is None:
                tell(f"{self.title}: {text}")
            else:
                with contextlib.suppress(OSError):
                    tqdm.write(escaped(f"{self.title}: {text}"), file=sys.stderr)

    def add(self, n_bytes: int) -> None:
        """Count `n_bytes` more."""
        self.done_bytes += n_bytes
        count("brevis_source_bytes", n_bytes, command=self.title)
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(n_bytes)
        elif self.shown and time.monotonic() - self._last_line >= self.interval_seconds:
            self._last_line = time.monotonic()
            tell(f"{self.title}: {self.done_bytes:,} of {self.total_bytes:,} bytes")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


def tell(line: str) -> None:
    """Print a line for people; that nobody reads it is no failure of a command."""
    try:
        sys.stderr.write(escaped(line) + "\n")
        sys.stderr.flush()
    except OSError:  # what the buffer still holds would change the exit code at the end of the process
        lead_nowhere(2)


def lead_nowhere(number: int) -> None:
    """Let a standard stream lead nowhere from here on, with what it still holds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def escaped(text: str) -> str:
    """Return a line for a terminal or a log, with escapes for what does not print: no name writes lines of its own."""
    return "".join(symbol if symbol.isprintable() else symbol.encode("unicode_escape").decode() for symbol in text)
