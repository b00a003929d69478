"""``ray job submit``, bucket to bucket: archive, restore and verify as jobs, and a worker killed midway."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.locations import open_store
from pipeline.store import Store
from tests.processes import ROOT, brevis
from tests.ray.cluster import AT_WORK, Cluster
from tests.s3server import S3Server

OPTIONS = ("--set", "recipe.task_bytes=256KiB", "--set", "synth.budget=16", "--no-progress", "--json")
OBJECT_STORE_LIMIT_BYTES = 16 << 20


@dataclass
class Submitted:
    """A job on its way, started by the script that ships with the package."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    def end(self) -> int:
        return self.process.wait(timeout=240)

    def result(self) -> dict[str, Any]:
        """Wait for its end; the JSON that its command printed among the lines of Ray."""
        assert self.end() == 0, self.output()[-6000:]
        lines = self.output().splitlines()
        found: dict[str, Any] = json.loads("\n".join(lines[lines.index("{") : lines.index("}") + 1]))
        return found


@pytest.fixture
def submit(cluster: Cluster) -> Iterator[Callable[..., Submitted]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Submitted:
            log = stack.enter_context(tempfile.TemporaryFile())
            env = {**cluster.env, "RAY_API_SERVER_ADDRESS": cluster.dashboard}
            command = [str(ROOT / "deploy" / "submit.sh"), *arguments]
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return Submitted(process, log)

        yield start


@pytest.fixture(scope="module")
def bucket(server: S3Server) -> Store:
    return open_store(server.url(""), server.options)


@pytest.fixture(scope="module")
def checkpoint(bucket: Store) -> dict[str, bytes]:
    """Files under ``source/``: 16 MiB of weights in 64 tensors, a task each, a text, nothing."""
    rng = np.random.default_rng(7)
    offset, header, parts = 0, {}, []
    for index in range(64):
        values = (rng.standard_normal((256, 512)) * 0.02 * (1 + index % 3)).astype(np.float32)
        parts.append((values.view(np.uint32) >> 16).astype("<u2").tobytes())
        header[f"layers.{index}.weight"] = {
            "dtype": "BF16", "shape": [256, 512], "data_offsets": [offset, offset + len(parts[-1])],
        }  # fmt: skip
        offset += len(parts[-1])
    text = json.dumps(header).encode()
    weights = len(text).to_bytes(8, "little") + text + b"".join(parts)
    files = {"a b/model.safetensors": weights, "config.json": b'{"layers": 64}', "empty.bin": b""}
    for name, data in files.items():
        bucket.put(f"source/{name}", data)
    return files


@pytest.fixture(scope="module")
def expected(server: S3Server, checkpoint: dict[str, bytes]) -> dict[str, Any]:
    """What one process makes of it, into an archive of its own."""
    finished = brevis("archive", server.url("source"), server.url("one"), "--workers", "1", *OPTIONS, env=server.env)
    summary: dict[str, Any] = json.loads(finished.stdout)
    return summary


def test_archive_and_restore_as_jobs(
    submit: Callable[..., Submitted],
    cluster: Cluster,
    server: S3Server,
    bucket: Store,
    checkpoint: dict[str, bytes],
    expected: dict[str, Any],
) -> None:
    before = cluster.object_store_bytes()
    job = submit("archive", server.url("source"), server.url("two"), *OPTIONS)
    served: set[int] = set()
    while job.process.poll() is None:
        served.update(cluster.workers(AT_WORK))
        time.sleep(0.05)
    archived = job.result()
    assert len(served) >= 2
    assert {name: archived[name] for name in ("content", "files", "segments", "failures")} == {
        name: expected[name] for name in ("content", "files", "segments", "failures")
    }
    packs = [info.key.partition("/")[2] for info in bucket.list("two/packs/")]
    assert len(packs) >= 60
    assert packs == [info.key.partition("/")[2] for info in bucket.list("one/packs/")]

    restored = submit("restore", server.url("two"), server.url("restored"), "--json", "--no-progress").result()
    assert restored["files"] == len(checkpoint)
    for name, data in checkpoint.items():
        info = bucket.head(f"restored/{name}")
        assert bytes(bucket.get_ranges(info, [(0, info.n_bytes)])[0]) == data

    assert cluster.object_store_bytes() - before < OBJECT_STORE_LIMIT_BYTES

    # Without a job: a driver of this machine, at an address.
    ray = ("--ray", cluster.address)
    verified = brevis("verify", server.url("two"), "--json", *ray, env=cluster.env)
    assert json.loads(verified.stdout)["verified"] == archived["segments"]
    again = brevis("archive", server.url("source"), server.url("two"), *ray, *OPTIONS, env=cluster.env)
    assert json.loads(again.stdout)["unchanged"]


def test_metrics_are_there_for_prometheus(
    cluster: Cluster, server: S3Server, bucket: Store, checkpoint: dict[str, bytes]
) -> None:
    def counted(metric: str, **labels: str) -> float:
        """Sum a counter over the nodes, over all jobs so far."""
        return sum(
            sample.value
            for url in cluster.metrics
            for family in text_string_to_metric_families(urllib.request.urlopen(url, timeout=10).read().decode())
            for sample in family.samples
            if sample.name == f"ray_{metric}_total" and labels.items() <= sample.labels.items()
        )

    assert bucket.list("source/")
    before = counted("brevis_source_bytes", command="archive")
    arguments = ("archive", server.url("source"), server.url("metered"), "--ray", cluster.address, *OPTIONS)
    brevis(*arguments, env=cluster.env)
    n_bytes = sum(map(len, checkpoint.values()))
    deadline = time.monotonic() + 30
    while counted("brevis_source_bytes", command="archive") < before + n_bytes and time.monotonic() < deadline:
        time.sleep(0.5)
    assert counted("brevis_source_bytes", command="archive") == before + n_bytes
    assert counted("brevis_tasks", outcome="done") >= 60
    assert 0 < counted("brevis_stored_bytes") < 10 * n_bytes
    assert all(counted("brevis_stage_seconds", stage=stage) > 0 for stage in ("read", "encode", "store"))


def test_a_worker_killed_midway_changes_nothing(
    submit: Callable[..., Submitted],
    cluster: Cluster,
    server: S3Server,
    bucket: Store,
    checkpoint: dict[str, bytes],
    expected: dict[str, Any],
) -> None:
    job = submit("archive", server.url("source"), server.url("three"), *OPTIONS)
    while not (victims := cluster.workers(AT_WORK)) or not bucket.list("three/packs/"):
        assert job.process.poll() is None, job.output()
        time.sleep(0.02)
    os.kill(victims[0], signal.SIGKILL)
    done = len(bucket.list("three/packs/"))
    archived = job.result()
    assert done < 60, "it was killed when all was done"
    assert archived["content"] == expected["content"]
    assert archived["failures"] == []


def test_a_driver_killed_midway_is_taken_up_by_the_next(
    cluster: Cluster, server: S3Server, bucket: Store, checkpoint: dict[str, bytes], expected: dict[str, Any]
) -> None:
    arguments = ("archive", server.url("source"), server.url("four"), "--ray", cluster.address, *OPTIONS)
    command = [sys.executable, "-m", "pipeline", *arguments]
    env = dict(cluster.env)
    driver = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    n_done = tasks_done(bucket, "four", driver)
    driver.kill()
    driver.wait()
    assert bucket.list("four/snapshots/") == []
    again = json.loads(brevis(*arguments, env=env).stdout)
    assert again["content"] == expected["content"]
    assert n_done <= again["resumed_tasks"] < 60


def tasks_done(bucket: Store, archive: str, process: subprocess.Popen[bytes]) -> int:
    """Wait until a process that archives has finished a task; how many it has."""
    while not (receipts := [info for info in bucket.list(f"{archive}/runs/") if "/receipts/" in info.key]):
        assert process.poll() is None
        time.sleep(0.02)
    return len(receipts)


def test_a_job_that_is_stopped_commits_nothing_and_the_next_goes_on(
    submit: Callable[..., Submitted],
    cluster: Cluster,
    server: S3Server,
    bucket: Store,
    checkpoint: dict[str, bytes],
    expected: dict[str, Any],
) -> None:
    """H05, Y07: `ray job stop` in mid work; no worker is left, and what was stored is not done again."""
    job = submit("archive", server.url("source"), server.url("five"), "--workers", "1", *OPTIONS)
    while not (name := re.search(r"raysubmit_\w+", job.output())):
        time.sleep(0.02)
    n_done = tasks_done(bucket, "five", job.process)
    # What `ray job stop` sends, which takes seconds to start.
    stop = urllib.request.Request(f"{cluster.dashboard}/api/jobs/{name[0]}/stop", method="POST")
    urllib.request.urlopen(stop, timeout=60).close()
    assert job.end() == 143, job.output()[-3000:]
    assert "found signal 15; run again to resume" in job.output(), job.output()[-3000:]
    deadline = time.monotonic() + 60
    while cluster.workers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert bucket.list("five/snapshots/") == []
    arguments = ("archive", server.url("source"), server.url("five"), "--ray", cluster.address, *OPTIONS)
    again = json.loads(brevis(*arguments, env=dict(cluster.env)).stdout)
    assert again["content"] == expected["content"]
    assert n_done <= again["resumed_tasks"] < 60


def test_a_job_shows_how_far_it_is_and_ends_with_the_code_of_its_command(
    submit: Callable[..., Submitted], cluster: Cluster, server: S3Server, checkpoint: dict[str, bytes]
) -> None:
    """In its log, as Ray's dashboard shows it, and by names of tasks; 10 is that of a place without an archive."""
    quiet = [option for option in OPTIONS if option != "--no-progress"]
    places = (server.url("source"), server.url("seen"))
    job = submit("archive", *places, "--workers", "2", "--set", "run.progress_seconds=1", *quiet)
    states, shown = set[str](), list[int]()
    while job.process.poll() is None:
        shown = [int(done.replace(",", "")) for done in re.findall(r"archive: ([\d,]+) of [\d,]+ bytes", job.output())]
        states |= {task["state"] for task in tasks_of(cluster) if task["name"] == "brevis ArchiveJob"}
        time.sleep(0.2)
    assert job.end() == 0, job.output()[-3000:]
    assert shown == sorted(shown)
    assert any(0 < done < sum(map(len, checkpoint.values())) for done in shown)
    assert states >= {"RUNNING", "FINISHED"}
    assert submit("verify", server.url("nowhere")).end() == 10


def tasks_of(cluster: Cluster) -> list[dict[str, Any]]:
    """What the dashboard lists: the state API."""
    url = f"{cluster.dashboard}/api/v0/tasks?limit=1000"
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]["result"]
    return found


def test_relative_paths_are_those_of_the_driver(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_bytes(bytes(range(256)) * 100)
    for arguments in (("archive", "in", "place"), ("verify", "place"), ("restore", "place", "out")):
        command = [sys.executable, "-m", "pipeline", *arguments, "--ray", cluster.address, "--quiet"]
        subprocess.run(command, env=dict(cluster.env), cwd=tmp_path, timeout=120, check=True)
    assert (tmp_path / "out" / "x").read_bytes() == (tmp_path / "in" / "x").read_bytes()


def test_a_job_is_small_runs_its_own_code_and_fails_with_its_command(cluster: Cluster, tmp_path: Path) -> None:
    """H11: the package holds the source alone, and goes before what is installed on the nodes."""
    code = "import pipeline, os, sys; print(pipeline.__file__, *os.listdir()); sys.exit(10)"
    command = cluster.submit("python", "-c", code, runtime_env=ROOT / "deploy" / "runtime_env.yaml")
    finished = subprocess.run(
        command, env=dict(cluster.env), capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert finished.returncode == 1
    assert "exit code 10" in finished.stdout + finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.endswith(".py") or "__init__.py " in line)
    place, *names = line.split()
    assert "runtime_resources" in place
    assert "operators" in names
    assert not {"tests", ".venv", ".git", ".cache"} & set(names)
