"""``make demo``: a real checkpoint archived, verified, restored and compared, beside other compressors.

Then the same through ``ray job submit`` and an S3 server that the demo starts on this machine.
"""

from __future__ import annotations

import filecmp
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.peers import GENERAL
from tests.bench.sizes import dtype_of
from tests.checkpoints import path
from tests.processes import Finished, brevis

CHECKPOINT = "minilm-bf16"


def say(text: str = "") -> None:
    print(text, flush=True)


def step(title: str, *arguments: str | Path) -> Finished:
    """Run one command, show it, and return what it took."""
    say(f"$ brevis {' '.join(map(str, arguments))}")
    finished = brevis(*arguments)
    say(f"  {title}: {finished.wall_seconds:.1f} s, {finished.cpu_seconds:.1f} s of CPU")
    return finished


def local(file: Path) -> None:
    """Archive, verify, restore and compare on this machine; set the size beside other compressors'."""
    data = file.read_bytes()
    rows: list[tuple[str, int, float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        place, target = Path(scratch, "archive"), Path(scratch, "restored")
        archived = step("archived and checked", "archive", file, place, "--json")
        step("verified", "verify", place)
        restored = step("restored", "restore", place, target)
        if not filecmp.cmp(file, target / file.name, shallow=False):
            sys.exit("the restored file differs")
        say("  the restored file equals the original, byte for byte\n")
        stored = json.loads(archived.stdout)["stored_bytes"]
        rows.append(("brevis (whole archive)", stored, archived.wall_seconds, restored.wall_seconds))
    for peer in reversed(GENERAL):
        seconds, compressed = timed(lambda peer=peer: peer.compress(data, dtype_of(CHECKPOINT)))  # type: ignore[misc]
        back, _ = timed(lambda peer=peer, compressed=compressed: peer.decompress(compressed, ""))  # type: ignore[misc]
        rows.append((peer.name, len(compressed), seconds, back))
    say(f"{'':24}{'bytes':>12}{'% of file':>11}{'compress s':>12}{'restore s':>11}")
    say(f"{file.name:24}{len(data):>12,}{100:>10.2f}%")
    for name, n_bytes, seconds, back in sorted(rows, key=lambda row: row[1]):
        say(f"{name:24}{n_bytes:>12,}{100 * n_bytes / len(data):>10.2f}%{seconds:>12.1f}{back:>11.1f}")
    if min(rows, key=lambda row: row[1])[0] != rows[0][0]:
        sys.exit("the archive is not the smallest")


def timed(action: Callable[[], bytes]) -> tuple[float, bytes]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def main() -> None:
    say(f"A real checkpoint: {CHECKPOINT}, carried by an ordinary package ...")
    local(path(CHECKPOINT))


if __name__ == "__main__":
    main()
