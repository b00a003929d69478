"""The command line: parses, runs a command, returns the exit code."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from operators.errors import ArchiveError, StoppedError
from pipeline import commands
from pipeline.executors import collect_seldom
from pipeline.locations import absolute_url
from pipeline.report import ReaderGoneError, Report, prepare_streams
from pipeline.summary import DONE

INTERRUPTED = 130
AGAIN = "run again to resume"
Command = Callable[[argparse.Namespace, Report], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    prepare_streams()
    arguments = parser().parse_args(argv)
    report = Report(arguments)
    collect_seldom()
    signal.signal(signal.SIGTERM, _stop)
    started = time.monotonic()
    try:
        for place in ("source", "archive", "target"):
            if getattr(arguments, place, None) is not None:  # workers need not stand where the user stands
                setattr(arguments, place, absolute_url(getattr(arguments, place)))
        command: Command = arguments.run_command
        return command(arguments, report)
    except ArchiveError as error:
        report.error(error, time.monotonic() - started)
        return error.exit_code
    except _Stop as stop:
        stopped = StoppedError("the run goes on", str(stop), "", AGAIN)
        report.error(stopped, time.monotonic() - started)
        return stopped.exit_code
    except KeyboardInterrupt:
        report.error(StoppedError("the run goes on", "an interrupt", "", AGAIN), time.monotonic() - started)
        return INTERRUPTED
    except ReaderGoneError:
        return DONE


class _Stop(BaseException):
    """The process was told to stop: no failure of the item in work, so nothing that handles failures may catch it."""


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, lambda *_: None)  # told once is enough: what it does from here on is to end
    raise _Stop(f"signal {number}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, found {text!r}")
    return int(text)


def _option(text: str) -> str:
    if not text.partition("=")[0] or "=" not in text:
        raise argparse.ArgumentTypeError(f"expected K=V, found {text!r}")
    return text


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE|NAME", help="settings file, or a profile of the package")
    common.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="one setting")
    common.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help="run on a Ray cluster")
    common.add_argument("--workers", type=int, metavar="N", help="processes or actors; 0 = one per CPU")
    common.add_argument("--memory", metavar="SIZE", help="memory of one worker, such as 768MiB")
    common.add_argument(
        "--storage-option", type=_option, action="append", default=[], metavar="K=V", help="passed to the stores"
    )
    common.add_argument("--json", action="store_true", help="JSON alone on standard output")
    common.add_argument("--no-progress", action="store_true")
    common.add_argument("-q", "--quiet", action="store_true", help="errors only")
    common.add_argument("-v", "--verbose", action="store_true", help="a line for each task or file")
    filters = argparse.ArgumentParser(add_help=False)
    filters.add_argument("--include", action="append", default=[], metavar="GLOB", help="take only keys or folders")
    filters.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="leave out keys or folders")
    snapshot = argparse.ArgumentParser(add_help=False)
    snapshot.add_argument("--snapshot", metavar="CHECKPOINT[/SEQ]", help="by default the newest one")
    as_of = argparse.ArgumentParser(add_help=False)
    as_of.add_argument("--as-of", metavar="TIME", help="the newest of YYYY-MM-DD[THH:MM:SSZ] or before")

    root = argparse.ArgumentParser("brevis", description="Lossless archives of model checkpoints.")
    subparsers = root.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Command, help_text: str, *parents: Any) -> Any:
        command = subparsers.add_parser(name, help=help_text, description=help_text, parents=[common, *parents])
        command.set_defaults(run_command=run)
        return command

    archive = add("archive", commands.archive, "compress, verify and commit a checkpoint", filters)
    archive.add_argument("source", metavar="SRC")
    archive.add_argument("archive", metavar="ARCHIVE")
    archive.add_argument("--name", help="name of the checkpoint; by default the last part of SRC")
    archive.add_argument(
        "--checkpoint-glob", metavar="GLOB", help="a snapshot of each checkpoint below SRC that matches"
    )
    archive.add_argument("--dry-run", action="store_true", help="list what would be archived, write nothing")
    archive.add_argument("--checksum", action="store_true", help="read files, too, that the store says are unchanged")
    help_text = "read the packs of the last snapshot, too, and store again what is in damaged ones"
    archive.add_argument("--repair", action="store_true", help=help_text)
    archive.add_argument("--as-of", metavar="TIME", help="the source as it was then; of a bucket that keeps versions")
    help_text = "leave out an object that changes meanwhile, read it once more, or end the run; by default skip"
    archive.add_argument("--on-changing", choices=("skip", "retry", "fail"), help=help_text)
    archive.add_argument("--prior", metavar="FILE", help="prior of another checkpoint, instead of learning one")
    archive.add_argument("--strict-format", action="store_true", help="a file with a faulty format or an alarm fails")
    archive.add_argument("--tag", action="append", default=[], help="tag the snapshot, for `prune --keep-tag`")
    archive.add_argument("--single-writer", action="store_true", help="accept a store that cannot refuse a taken key")

    restore = add("restore", commands.restore, "bring files or one tensor back, bit for bit", filters, snapshot, as_of)
    restore.add_argument("archive", metavar="ARCHIVE")
    restore.add_argument("target", metavar="TARGET")
    restore.add_argument("--tensor", metavar="[FILE:]NAME", help="one tensor, as a safetensors file")
    restore.add_argument("--dry-run", action="store_true", help="list what would be restored, write nothing")
    restore.add_argument("--overwrite", action="store_true", help="replace files that differ")
    restore.add_argument("--keep-going", action="store_true", help="restore the rest where a file fails")

    verify = add("verify", commands.verify, "check an archive without its source", filters, snapshot)
    verify.add_argument("archive", metavar="ARCHIVE")
    verify.add_argument("--level", choices=("manifest", "bytes", "decode", "source"), default="decode")
    verify.add_argument("--source", metavar="SRC", help="compare with it, for --level source")
    verify.add_argument("--all", action="store_true", help="every snapshot; what they share is looked at once")
    verify.add_argument("--receipt", action="store_true", help="leave a receipt in the archive")
    verify.add_argument("--sample", metavar="PERCENT", help="a deterministic part, such as 5%%")
    verify.add_argument("--part", metavar="N/T", help="slice N of T; next/T: that of the oldest receipt")

    prune = add("prune", commands.prune, "drop snapshots that no rule keeps; shows them without --yes")
    prune.add_argument("archive", metavar="ARCHIVE")
    prune.add_argument("--name", action="append", default=[], help="only this checkpoint")
    prune.add_argument("--keep-last", type=_count, default=0, metavar="N", help="the last N snapshots")
    for period in ("daily", "weekly", "monthly"):
        help_text = f"the newest of each of the last N {'days' if period == 'daily' else period[:-2] + 's'}"
        prune.add_argument(f"--keep-{period}", type=_count, default=0, metavar="N", help=help_text)
    prune.add_argument("--keep-tag", action="append", default=[], metavar="TAG", help="those with this tag")
    prune.add_argument(
        "--snapshot", action="append", default=[], metavar="CHECKPOINT/SEQ", help="drop this one, in place of rules"
    )
    prune.add_argument("--undo", metavar="CHECKPOINT/SEQ", help="bring a dropped snapshot back, until gc takes it")
    prune.add_argument("--yes", action="store_true", help="do it")

    gc = add("gc", commands.gc, "remove what no snapshot needs, a day after a first pass; shows it without --yes")
    gc.add_argument("archive", metavar="ARCHIVE")
    gc.add_argument(
        "--min-age", type=_count, default=72, metavar="HOURS", help="keep what is younger; longer than any run takes"
    )
    gc.add_argument("--yes", action="store_true", help="do it")

    rebuild = add("rebuild", commands.rebuild, "write lost manifests again; show runs that have lost their snapshot")
    rebuild.add_argument("archive", metavar="ARCHIVE")
    rebuild.add_argument("--run", metavar="RUN", help="show what is whole of this run")
    rebuild.add_argument("--snapshot", metavar="CHECKPOINT/SEQ", help="show what is whole of it, manifest or not")
    rebuild.add_argument("--packs", action="store_true", help="show the files that packs alone hold whole")
    rebuild.add_argument("--name", metavar="CHECKPOINT", help="commit that as the next snapshot of this checkpoint")

    help_text = "free the bytes of a source that is archived, on evidence, in two steps; shows them without --yes"
    release = add("release-source", commands.release_source, help_text, snapshot)
    release.add_argument("source", metavar="SRC")
    release.add_argument("archive", metavar="ARCHIVE")
    release.add_argument("--replica", metavar="ARCHIVE", help="another archive that must have the same snapshot")
    release.add_argument("--grace", type=_count, default=7, metavar="DAYS", help="least time from intent to deed")
    release.add_argument("--yes", action="store_true", help="write down the intent, or act on one that is old enough")

    listing = add("list", commands.listing, "snapshots of an archive", as_of)
    listing.add_argument("archive", metavar="ARCHIVE")
    info = add("info", commands.info, "files and tensors of a snapshot, with sizes", filters, snapshot, as_of)
    info.add_argument("archive", metavar="ARCHIVE")
    explain = add("explain", commands.explain, "the program of a tensor and why it won", snapshot, as_of)
    explain.add_argument("archive", metavar="ARCHIVE")
    explain.add_argument("--tensor", required=True, metavar="[FILE:]NAME")
    cat = add("cat", commands.cat, "raw bytes of a file to standard output", snapshot, as_of)
    cat.add_argument("archive", metavar="ARCHIVE")
    cat.add_argument("--file", required=True, metavar="F")
    cat.add_argument("--range", metavar="START:STOP", help="these bytes alone; only their segments are read")
    return root
