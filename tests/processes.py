"""Run a command and learn what it took: wall time, CPU time of its whole tree, peak resident memory of the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAMPLE_SECONDS = 0.02


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

    CPU time is that of the process and of all descendants it waited for. Peak memory is the largest sum of
    the resident pages of the tree, sampled every 20 ms: shared pages count once for each process.

    Raises
    ------
    RuntimeError
        `check` is set and the command did not exit with 0.
    """
    start = time.perf_counter()
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
    if check and process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {process.returncode}\n{texts[0][-2000:]}\n{texts[1][-4000:]}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    own, *children = peaks.values()
    return Finished(
        process.returncode, texts[0], texts[1], wall_seconds, cpu_seconds, peak_bytes, own, max(children, default=0)
    )


def brevis(*arguments: str | Path, env: Mapping[str, str] | None = None, check: bool = True) -> Finished:
    """Run ``python -m pipeline`` with `arguments`."""
    return run([sys.executable, "-m", "pipeline", *map(str, arguments)], env, check=check)


def tree(pid: int) -> Iterator[int]:
    """Yield `pid` and its descendants."""
    yield pid
    try:
        children = "".join(task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it ended meanwhile
        return
    for child in children.split():
        yield from tree(int(child))


def resident_bytes(pid: int) -> int:
    """Return the resident memory of one process, 0 where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
