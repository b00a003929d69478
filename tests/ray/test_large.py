"""A night's worth of weights on two nodes: the driver is killed, then a node, and nothing comes out otherwise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.processes import ROOT, brevis, resident_bytes, tree
from tests.ray.cluster import Cluster, two_nodes
from tests.synthetic import write_bf16

N_FILES = 5
FILE_BYTES = 2 * 10**9
MEMORY_BYTES = 1 << 30
OPTIONS = ("--memory", f"{MEMORY_BYTES >> 20}MiB", "--no-progress", "--json")


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_10_gb_with_a_driver_and_a_node_killed(tmp_path: Path) -> None:
    source, archive = tmp_path / "source", tmp_path / "archive"
    source.mkdir()
    for number in range(N_FILES):
        write_bf16(source / f"model-{number + 1:05}-of-{N_FILES:05}.safetensors", FILE_BYTES, seed=number)
    undisturbed = json.loads(brevis("archive", source, tmp_path / "calm", "--workers", "2", *OPTIONS).stdout)
    n_tasks = len(receipts(tmp_path / "calm"))
    assert n_tasks >= 20

    with two_nodes({}) as cluster, watched(cluster) as peaks:
        command = [sys.executable, "-m", "pipeline", "archive", str(source), str(archive)]
        command += ["--ray", cluster.address, *OPTIONS]
        first = start(command, cluster)
        wait_for(lambda: len(receipts(archive)) >= n_tasks // 5, first)
        first.kill()
        first.wait()
        assert not (archive / "snapshots").exists()
        wait_for(lambda: not cluster.workers(), None)
        done = {path: path.stat().st_mtime_ns for path in packs(archive)}
        finished = len(receipts(archive))

        second = start(command, cluster)
        wait_for(lambda: len(receipts(archive)) >= n_tasks // 2, second)
        assert second.poll() is None, "the node has to be killed midway"
        kill_node(cluster.pids[1])
        output, _ = second.communicate(timeout=3000)
        assert second.returncode == 0
    summary = json.loads(output)
    assert summary["content"] == undisturbed["content"]
    assert (summary["failures"], summary["source_bytes"]) == ([], undisturbed["source_bytes"])
    assert summary["resumed_tasks"] == finished
    # A task that is done again puts its pack again. One whose receipt was on its way when the driver died may.
    again = [path for path, written in done.items() if path.stat().st_mtime_ns != written]
    assert len(again) <= len(done) - finished
    assert len(peaks) >= 4, "workers of two runs, on two nodes"
    assert max(peaks.values()) < MEMORY_BYTES


def start(command: list[str], cluster: Cluster) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=dict(cluster.env), cwd=ROOT, stdout=subprocess.PIPE)


def wait_for(true: object, process: subprocess.Popen[bytes] | None) -> None:
    assert callable(true)
    deadline = time.monotonic() + 1800
    while not true():
        assert process is None or process.poll() is None, "it has ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def receipts(archive: Path) -> list[Path]:
    return list(archive.glob("runs/*/receipts/*"))


def packs(archive: Path) -> list[Path]:
    return [path for path in archive.glob("packs/*/*") if not path.name.startswith(".")]


def kill_node(pid: int) -> None:
    """Kill all processes of a node at once, as when its machine is lost."""
    for child in list(tree(pid)):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@contextmanager
def watched(cluster: Cluster) -> Iterator[dict[int, int]]:
    """Note the most resident memory of each worker, by process id."""
    peaks: dict[int, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            for pid in cluster.workers():
                peaks[pid] = max(peaks.get(pid, 0), resident_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()
