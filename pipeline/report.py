"""Where a command speaks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from operators.errors import ArchiveError
from pipeline.progress import Progress, escaped
from pipeline.summary import Summary

SHOWN_CHARACTERS = 200


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
            _write(sys.stderr, text)

    def give(self, content: Any, lines: Sequence[str]) -> None:
        """Print the result: `content` as JSON, or `lines`."""
        if self.json:
            self._give_json(content)
        else:
            for line in lines:
                _write(self._out, line)

    def error(self, error: ArchiveError, seconds: float) -> None:
        """Print why the command failed."""
        _write(sys.stderr, f"brevis: {error}")
        if self.json:
            failure = {"kind": error.kind, "message": str(error), "next_step": error.next_step}
            self._give_json({"error": failure, "seconds": round(seconds, 3)})

    def _give_json(self, content: Any) -> None:
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
            _write(sys.stderr, f"failed: {failure.message}" if told else f"failed: {failure.key}: {failure.message}")
        self.give(summary.as_json(), [summary.text()])


def printable(name: str) -> str:
    """Return a name from an archive for a terminal: escapes for what does not print, cut where it is long."""
    text = escaped(name)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(name)} characters)"


def _write(stream: TextIO, line: str) -> None:
    stream.write(escaped(line) + "\n")
    stream.flush()
