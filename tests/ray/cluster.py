"""A Ray cluster of two nodes on the loopback of this machine.

The nodes are children that stay in the foreground and are ended by their process ids: ``ray stop`` would end every
Ray process of the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT, tree
from tests.s3server import free_port

RAY = str(Path(sys.executable).with_name("ray"))
OBJECT_STORE_BYTES = 80 << 20
"""H09: about the least that Ray takes, while tensors are larger."""
FAST_LOSS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_initial_delay_ms": "500",
}
"""A lost node is noticed after about a second instead of fourteen."""
METRICS = {"RAY_metrics_report_interval_ms": "500"}
"""Instead of ten seconds."""

AT_REST, AT_WORK = "ray::Worker", "ray::brevis "
"""How the titles of the processes of workers begin."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes
    ----------
    address : str
        For drivers.
    dashboard : str
        For ``ray job submit``.
    env : mapping of str to str
        What a client of it needs in its environment.
    pids : list of int
        Of the two nodes, the head first.
    metrics : list of str
        Where Prometheus would look, one address for each node.
    """

    address: str
    dashboard: str
    env: Mapping[str, str]
    pids: list[int]
    metrics: list[str]

    def workers(self, *titles: str) -> list[int]:
        """Process ids of the workers of this cluster whose title starts so: by default all, at rest or at work."""
        titles = titles or (AT_REST, AT_WORK)
        return [pid for node in self.pids for pid in tree(node) if _title(pid).startswith(titles)]

    def submit(self, *entrypoint: str, working_dir: Path = ROOT, runtime_env: Path | None = None) -> list[str]:
        """The command that submits a job and follows it to its end."""
        command = [RAY, "job", "submit", "--address", self.dashboard, "--working-dir", str(working_dir)]
        if runtime_env is not None:
            command += ["--runtime-env", str(runtime_env)]
        return [*command, "--", *entrypoint]

    def object_store_bytes(self) -> int:
        """Bytes that were ever put into the object stores of all nodes."""
        code = """
import logging, ray
from ray._private.internal_api import node_stats
ray.init("auto", logging_level=logging.ERROR)
places = [(n["NodeManagerAddress"], n["NodeManagerPort"]) for n in ray.nodes() if n["Alive"]]
stats = [node_stats(*place, include_memory_info=False).store_stats for place in places]
print(sum(s.cumulative_created_bytes for s in stats))
"""
        env = {**self.env, "RAY_ADDRESS": self.address}
        command = [sys.executable, "-c", code]
        answer = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
        return int(answer.stdout)


@contextlib.contextmanager
def two_nodes(env: Mapping[str, str], cpus_per_node: int = 1) -> Iterator[Cluster]:
    """Start a head and a second node with `env`, and end them."""
    # Sockets of Ray have paths of at most 107 bytes, which rules out the folders of pytest.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    client = {**os.environ, **env, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    client["PYTHONPATH"] = str(ROOT)  # as if the package, and the jobs of the tests, were installed on every node
    client["PATH"] = f"{Path(sys.executable).parent}:{client.get('PATH', '')}"  # jobs run `python` by its name
    client.pop("RAY_ADDRESS", None)
    port, dashboard_port, metrics_ports = free_port(), free_port(), [free_port(), free_port()]
    common = ["--block", f"--num-cpus={cpus_per_node}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    head = ["--head", "--node-ip-address=127.0.0.2", f"--port={port}", f"--temp-dir={folder}/ray"]
    head += ["--dashboard-host=127.0.0.2", f"--dashboard-port={dashboard_port}", "--include-dashboard=true"]
    head.append(f"--metrics-export-port={metrics_ports[0]}")
    second = [f"--address=127.0.0.2:{port}", "--node-ip-address=127.0.0.3"]
    second.append(f"--metrics-export-port={metrics_ports[1]}")
    dashboard = f"http://127.0.0.2:{dashboard_port}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)

        def start(name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            agent = f"--dashboard-agent-listen-port={free_port()}"
            command = [RAY, "start", *arguments, *common, agent, "--disable-usage-stats"]
            node = subprocess.Popen(
                command, env={**client, **FAST_LOSS, **METRICS}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd=folder,
            )  # fmt: skip
            stack.callback(_end, node)
            return node

        first = start("head", head)
        _wait(lambda: _answers(f"{dashboard}/api/version"), first, folder / "head.log")
        other = start("second", second)
        log = folder / "second.log"
        _wait(lambda: "Ray runtime started" in log.read_text(errors="replace"), other, log)
        metrics = [f"http://127.0.0.{host}:{port}/metrics" for host, port in zip((2, 3), metrics_ports, strict=True)]
        yield Cluster(f"127.0.0.2:{port}", dashboard, client, [first.pid, other.pid], metrics)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except OSError:
        return False
    return True


def _wait(ready: object, process: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    assert callable(ready)
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a node did not start: {log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


def _end(node: subprocess.Popen[bytes]) -> None:
    """End a node and what it started: first kindly, then the rest of its tree."""
    pids = list(tree(node.pid))
    node.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(15)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if _title(pid):
                os.kill(pid, signal.SIGKILL)
    node.wait()
