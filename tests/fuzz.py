"""Feed damaged records and programs to the decoder: ``python -m tests.fuzz [SECONDS [SEED]]``.

Run it with ``NUMBA_DISABLE_JIT=1``: compiled kernels read wherever an index points, interpreted ones raise.
The promise under test: whatever the bytes, the decoder restores the words that the digest names or raises an
`ArchiveError`; it never raises anything else, never takes long, never allocates much.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from operators.errors import ArchiveError
from operators.program import parse
from operators.record import FORMAT_VERSION
from operators.run import execute
from tests.golden.make import Line, read
from tests.strategies import BOOKS

MOST_SECONDS = 5
"""For one input; interpreted kernels are slow, an endless loop is slower."""
MOST_BYTES = 768 << 20
"""Address space beyond what is in use at the start."""


@dataclass
class Counts:
    """What became of the inputs."""

    refused: int = 0
    restored: int = 0
    failed: int = 0


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return `data` with one to six changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        position = rng.randrange(len(changed) + 1)
        # The header and the tables come first and matter most.
        if rng.random() < 0.5:
            position = min(position, rng.randrange(64))
        kind = rng.randrange(7)
        if kind == 0 and position < len(changed):
            changed[position] ^= 1 << rng.randrange(8)
        elif kind == 1 and position < len(changed):
            changed[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del changed[position : position + rng.randrange(1, 9)]
        elif kind == 3:
            changed[position:position] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            part = other[start : start + rng.randrange(1, 40)]
            changed[position : position + len(part)] = part
        elif kind == 5:
            del changed[position:]
        elif kind == 6:
            changed[position:position] = changed[position : position + rng.randrange(1, 20)]
    return bytes(changed)


def fuzz_record(rng: random.Random, lines: Sequence[Line], records: Sequence[bytes], counts: Counts) -> None:
    """Execute one damaged record as the manifest would have it executed: with the size that it promises."""
    line = rng.choice(lines)
    words = line.case.words
    damaged = mutate(rng, line.record, records)
    try:
        restored = execute(damaged, BOOKS, n_bytes=words.nbytes)
    except ArchiveError:
        counts.refused += 1
        return
    counts.restored += 1
    # Its digest is part of the record, so a record that decodes is one of another writer, not a wrong one.
    if restored.nbytes != words.nbytes:
        raise AssertionError(f"{restored.nbytes} bytes restored instead of {words.nbytes}")


def fuzz_text(rng: random.Random, programs: Sequence[bytes], counts: Counts) -> None:
    """Parse one damaged program; what parses must print as what it parsed to."""
    text = mutate(rng, rng.choice(programs), programs).decode("latin1")
    try:
        program = parse(text)
    except ArchiveError:
        counts.refused += 1
        return
    counts.restored += 1
    if parse(str(program)) != program:
        raise AssertionError(f"{text!r} does not survive printing")


def run(seconds: float, seed: int) -> Counts:
    """Fuzz for so long; print every failure. The same seed gives the same inputs."""
    rng = random.Random(seed)
    lines = read(FORMAT_VERSION)
    records = [line.record for line in lines]
    programs = [line.program.encode() for line in lines]
    counts = Counts()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        signal.alarm(MOST_SECONDS if signal.getsignal(signal.SIGALRM) is _too_long else 0)
        try:
            if rng.random() < 0.9:
                fuzz_record(rng, lines, records, counts)
            else:
                fuzz_text(rng, programs, counts)
        except Exception:  # noqa: BLE001 -- any exception here is the finding
            counts.failed += 1
            print(f"seed {seed}, input {counts.refused + counts.restored + counts.failed}:\n{traceback.format_exc()}")
            if counts.failed >= 10:
                break
        finally:
            signal.alarm(0)
    return counts


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"one input took over {MOST_SECONDS} s")


def main() -> int:
    """Fuzz; return 1 if anything but an `ArchiveError` escaped."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _too_long)
    counts = run(seconds, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{counts.refused} refused, {counts.restored} restored, {counts.failed} failed")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
