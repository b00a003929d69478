"""The runbook says what the program does: its commands parse, and it knows every exit code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from operators import errors
from pipeline.cli import INTERRUPTED, parser
from pipeline.summary import DONE, FAILED_ITEMS, MISMATCH

PAGES = [Path(__file__).parents[2] / name for name in ("deploy/runbook.md", "README.md", "deploy/README.md")]
RUNBOOK = PAGES[0].read_text()


def commands() -> list[str]:
    found = []
    for page in PAGES:
        text = page.read_text()
        inline = re.findall(r"`(?:time )?(brevis [a-z-]+ [^`|]*)`", text)
        fenced = "\n".join(re.findall(r"(?s)```.*?```", text))
        blocks = re.findall(r"^(?:deploy/submit\.sh|brevis) .*", fenced, re.MULTILINE)
        found += inline + [line.replace("deploy/submit.sh", "brevis") for line in blocks]
    return sorted({command.split("#")[0].strip() for command in found})


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one(command: str) -> None:
    parser().parse_args(shlex.split(command)[1:])


def test_the_runbook_has_commands() -> None:
    verbs = {command.split()[1] for command in commands()}
    assert {"archive", "verify", "prune", "gc", "rebuild", "release-source", "restore", "list"} <= verbs


def test_every_exit_code_is_explained() -> None:
    known = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.ArchiveError)
    }
    rows = re.findall(r"^\| ([0-9, ]+) \|", RUNBOOK, re.MULTILINE)
    explained = {int(code) for row in rows for code in row.split(",")}
    assert known | {DONE, FAILED_ITEMS, MISMATCH, INTERRUPTED} == explained
