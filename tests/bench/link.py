"""Collectives over a link of known speed: two ranks in network namespaces of their own, with tc between them.

``python -m tests.bench.link`` is what each rank runs. Where namespaces cannot be made, the table says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.messages import TensorCodec
from synth.books import CodebookSet
from tests.bench.report import Table
from tests.checkpoints import path, read
from tests.processes import ROOT

SPEEDS_MBIT = (500, 1000, 2000, 4000)
N_BYTES = 64 << 20
ROUNDS = 7
PATIENCE_S = 300


def table() -> Table:
    """Time an all-gather of 64 MiB of BF16 weights on links of several speeds."""
    made = Table(
        "Fixed codebooks: all_gather of 64 MiB of BF16 over a shaped link, two ranks",
        ["Mbit/s each way", "plain, ms", "coded, ms", "coded / plain", "8-bit integers, ms"],
        notes=[
            f"wall time, least of {ROUNDS} alternating turns; network namespaces, a token bucket at both ends",
            "8-bit integers: half the bytes and other values; their rounding is not timed",
            "gloo fills about half of a link where both ends send at once",
        ],
    )
    for speed in SPEEDS_MBIT:
        try:
            took = measure(speed)
        except (OSError, subprocess.SubprocessError) as error:
            made.notes.append(f"no shaped link on this machine: {error}")
            return made
        made.rows.append([speed, *(1000 * took[name] for name in ("plain", "coded")), took["coded"] / took["plain"]])
        made.rows[-1].append(1000 * took["quantised"])
        if speed == 1000:
            made.passed["at 1 Gbit/s coded takes at most 0.75 of plain"] = took["coded"] <= 0.75 * took["plain"]
    ratios = [(speed, ratio) for speed, _, _, ratio, _ in made.rows]
    for (slow, below), (fast, above) in pairwise(ratios):
        if below < 1 <= above:
            even = slow + (fast - slow) * (1 - below) / (above - below)
            made.notes.append(f"break-even at about {even:.0f} Mbit/s")
    return made


def measure(speed_mbit: int) -> dict[str, float]:
    """Return the seconds of each way to gather. Raises OSError or SubprocessError where no link can be laid."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--map-root-user", "--net", sys.executable, "-m", "tests.bench.link"]
        first = subprocess.run(
            [*command, folder, "0", str(speed_mbit)],
            cwd=ROOT, check=True, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
    found: dict[str, float] = json.loads(first.stdout.splitlines()[-1])
    return found


def _connect(pid: int, speed_mbit: int) -> None:
    """Lay a link from the namespace of this process to that of another."""
    ours = Path("/proc/self/ns/net").stat().st_ino
    while Path(f"/proc/{pid}/ns/net").stat().st_ino == ours:
        time.sleep(0.01)
    _call("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", str(pid))
    for rank, enter in enumerate(((), ("nsenter", "-t", str(pid), "-n"))):
        _call(*enter, "ip", "link", "set", "lo", "up")
        _call(*enter, "ip", "address", "add", f"10.77.0.{rank + 1}/24", "dev", f"v{rank}")
        _call(*enter, "ip", "link", "set", f"v{rank}", "up")
        bucket = ("rate", f"{speed_mbit}mbit", "burst", "256kb", "latency", "50ms")
        _call(*enter, "tc", "qdisc", "add", "dev", f"v{rank}", "root", "tbf", *bucket)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def _rank(folder: Path, rank: int) -> dict[str, float]:
    """Time the ways to gather on one rank; both begin each turn together."""
    import torch
    import torch.distributed as dist

    from pipeline.collectives import Channel, all_gather_single

    os.environ["GLOO_SOCKET_IFNAME"] = f"v{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    words = np.concatenate([np.frombuffer(one.data, np.uint16) for one in read(path("mpnet-bf16")).values()])
    n_words = N_BYTES // 2
    mine = torch.from_numpy(words[rank * n_words : (rank + 1) * n_words].copy()).view(torch.bfloat16)
    out, quantised = torch.empty(2 * n_words, dtype=torch.bfloat16), torch.zeros(n_words, dtype=torch.int8)
    codec = TensorCodec(CodebookSet.shipped())
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: dist.all_gather_single(out.view(torch.uint8), mine.view(torch.uint8)),
        "coded": lambda: all_gather_single(out, mine, codec=codec),
        "quantised": lambda: dist.all_gather_single(out.view(torch.int8)[: 2 * n_words], quantised),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - start)
    Channel.close_all()
    dist.destroy_process_group()
    return {name: min(taken) for name, taken in times.items()}


def main(folder: Path, rank: int, speed_mbit: int) -> None:
    """Run one rank; the first starts the other, in a namespace of its own, and lays the link."""
    if rank:
        while not (folder / "connected").exists():
            time.sleep(0.01)
        _rank(folder, rank)
        return
    other = ["unshare", "--net", sys.executable, "-m", "tests.bench.link", str(folder), "1", str(speed_mbit)]
    with subprocess.Popen(other, stdout=sys.stderr) as process:
        try:
            _connect(process.pid, speed_mbit)
            (folder / "connected").touch()
            print(json.dumps(_rank(folder, rank)))
        finally:
            process.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
