"""Where a command speaks."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from operators.errors import ArchiveError, StoreError
from pipeline.progress import Progress, escaped, lead_nowhere, tell
from pipeline.summary import Summary

SHOWN_CHARACTERS = 200


class ReaderGoneError(Exception):
    """Nobody reads standard output any more, as in ``brevis cat ... | head``: not a fault."""


class Report:
    """JSON alone on standard output if asked for, everything else on standard error."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._out = sys.stdout  # also where a command lets everything else go to standard error
        self.json = bool(getattr(arguments, "json", False))
        self.quiet = bool(getattr(arguments, "quiet", False))
        self.verbose = bool(getattr(arguments, "verbose", False))
        self.progress_shown = not (self.quiet or getattr(arguments, "no_progress", False))

    def say(self, text: str) -> None:
        """Print a line for people."""
        if not self.quiet:
            tell(text)

    def give(self, content: Any, lines: Sequence[str]) -> None:
        """Print the result: `content` as JSON, or `lines`."""
        if self.json:
            self._give_json(content)
        else:
            with output():
                for line in lines:
                    _write(self._out, line)

    def error(self, error: ArchiveError, seconds: float) -> None:
        """Print why the command failed."""
        tell(f"brevis: {error}")
        if self.json:
            failure = {"kind": error.kind, "message": str(error), "next_step": error.next_step}
            with contextlib.suppress(StoreError, ReaderGoneError):  # the exit code tells
                self._give_json({"error": failure, "seconds": round(seconds, 3)})

    def _give_json(self, content: Any) -> None:
        with output():
            self._out.write(json.dumps(content, indent=2) + "\n")
            self._out.flush()

    def progress(self, title: str, interval_seconds: int, total_bytes: int = 0) -> Progress:
        """Return a progress display for a command; the total may be told later."""
        return Progress(
            title, total_bytes, shown=self.progress_shown, interval_seconds=interval_seconds, verbose=self.verbose
        )

    def summary(self, summary: Summary) -> None:
        """Print the summary of a command."""
        for warning in summary.warnings:
            self.say(
                f"warning: {printable(warning.key)}: {warning.reason}"
                + (f": {warning.detail}" if warning.detail else "")
            )
        for failure in summary.failures:
            told = failure.message.startswith(failure.key)  # an error mostly begins with where it happened
            tell(f"failed: {failure.message}" if told else f"failed: {failure.key}: {failure.message}")
        self.give(summary.as_json(), [summary.text()])


def printable(name: str) -> str:
    """Return a name from an archive for a terminal: escapes for what does not print, cut where it is long."""
    text = escaped(name)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(name)} characters)"


def prepare_streams() -> None:
    """Let standard streams that are closed lead nowhere, and escape what the encoding of the output lacks."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Turn an OSError of standard output into a StoreError, or a ReaderGoneError."""
    try:
        yield
    except BrokenPipeError as error:
        lead_nowhere(1)
        raise ReaderGoneError from error
    except OSError as error:
        lead_nowhere(1)
        step = "give it room; what the command wrote elsewhere, or committed, stays"
        raise StoreError("an output that takes the result", os.strerror(error.errno or 0), "stdout", step) from error


def _write(stream: TextIO, line: str) -> None:
    stream.write(escaped(line) + "\n")
    stream.flush()
