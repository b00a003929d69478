"""Run a command and learn what it took: wall time, CPU time of its whole tree, peak resident memory of the tree."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAMPLE_SECONDS = 0.02
END_SECONDS = 2
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux, as in `prctl(2)`."""


@dataclass(frozen=True)
class Finished:
    """What a command printed and took.

    Attributes
    ----------
    peak_bytes : int
        Most resident memory of the whole tree.
    own_peak_bytes, child_peak_bytes : int
        That of the process itself, and of the largest below it.
    """

    exit_code: int
    stdout: str
    stderr: str
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    own_peak_bytes: int = 0
    child_peak_bytes: int = 0


def run(command: Sequence[str], env: Mapping[str, str] | None = None, *, check: bool = True) -> Finished:
    """Run `command` to its end.

    CPU time is that of the process, of all descendants it waited for, and of those that end with it, as the server does
    whose forks are the workers of a pool. Peak memory is the largest sum of
    the resident pages of the tree, sampled every 20 ms: shared pages count once for each process.

    Raises
    ------
    RuntimeError
        `check` is set and the command did not exit with 0.
    """
    start = time.perf_counter()
    _adopt_orphans(is_on=True)
    process = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    peak_bytes = 0
    peaks = {process.pid: 0}
    done = threading.Event()

    def watch() -> None:
        nonlocal peak_bytes
        while not done.wait(SAMPLE_SECONDS):
            now = {pid: resident_bytes(pid) for pid in tree(process.pid)}
            peak_bytes = max(peak_bytes, sum(now.values()))
            for pid, n_bytes in now.items():
                peaks[pid] = max(peaks.get(pid, 0), n_bytes)

    def collect(index: int, stream: Iterator[str]) -> None:
        texts[index] = "".join(stream)

    texts = ["", ""]
    threads = [threading.Thread(target=watch)]
    threads += [
        threading.Thread(target=collect, args=pair) for pair in enumerate((process.stdout, process.stderr)) if pair[1]
    ]
    for thread in threads:
        thread.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_seconds = time.perf_counter() - start
    done.set()
    for thread in threads:
        thread.join()
    usages = [usage, *_left(peaks.keys() - {process.pid})]
    _adopt_orphans(is_on=False)
    if check and process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {process.returncode}\n{texts[0][-2000:]}\n{texts[1][-4000:]}")
    cpu_seconds = sum(one.ru_utime + one.ru_stime for one in usages)
    own, *children = peaks.values()
    return Finished(
        process.returncode, texts[0], texts[1], wall_seconds, cpu_seconds, peak_bytes, own, max(children, default=0)
    )


def _adopt_orphans(*, is_on: bool) -> None:
    """Become the parent of processes below this one whose own parent ends, so that they can be waited for."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def _left(pids: Iterable[int]) -> Iterator[resource.struct_rusage]:
    """Yield what those of `pids` took that were left by their parent and end at once."""
    deadline = time.monotonic() + END_SECONDS
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # its parent has waited for it
            ended, _, usage = os.wait4(pid, os.WNOHANG)
            while not ended and time.monotonic() < deadline:
                time.sleep(SAMPLE_SECONDS)
                ended, _, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                yield usage


def brevis(*arguments: str | Path, env: Mapping[str, str] | None = None, check: bool = True) -> Finished:
    """Run ``python -m pipeline`` with `arguments`."""
    return run([sys.executable, "-m", "pipeline", *map(str, arguments)], env, check=check)


def tree(pid: int) -> Iterator[int]:
    """Yield `pid` and its descendants."""
    yield pid
    for child in children(pid):
        yield from tree(child)


def children(pid: int) -> list[int]:
    """Return the processes that `pid` has started, none where it has ended."""
    try:
        found = "".join(task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [int(child) for child in found.split()]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of one process, 0 where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
