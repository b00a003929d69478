"""A real S3 server on free loopback ports: radosgw over one monitor and one object store daemon, all in memory.

It is another program in another language than the one of `tests.s3server`: it checks signatures, has real uploads in
parts, and answers many things in its own way. Debian's packages ``radosgw ceph-mon ceph-osd ceph-common`` hold it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs

from tests.s3server import S3Server, free_port, s3_server

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
KEY, SECRET = "testkey123", "testsecret123"
SERVERS = ["ministack", pytest.param("radosgw", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
"""Parameters of a fixture whose tests run on either server: the small one always, the real one in the slow tests."""
STORE_BYTES = 2 << 30
DAEMON_SECONDS = 120


@dataclass(frozen=True)
class RadosGateway(S3Server):
    """A running server whose credentials are checked."""

    @property
    def options(self) -> dict[str, str]:
        """Storage options of a client."""
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET, "region": "us-east-1"}


def running(name: str) -> contextlib.AbstractContextManager[S3Server]:
    """Start the server of that name."""
    return radosgw() if name == "radosgw" else s3_server()


@contextlib.contextmanager
def radosgw(bucket: str = "checkpoints") -> Iterator[RadosGateway]:
    """Start the three daemons, create a user and `bucket`, and end them by their process ids.

    Raises
    ------
    RuntimeError
        The programs are not installed, or one of them did not start.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"not installed: {', '.join(missing)}; apt install radosgw ceph-mon ceph-osd ceph-common")
    with contextlib.ExitStack() as stack:
        # Sockets have paths of at most 107 bytes, which rules out the folders of pytest.
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="rgw-", dir="/tmp", ignore_cleanup_errors=True))
        )
        yield _start(stack, folder, bucket)


def _start(stack: contextlib.ExitStack, folder: Path, bucket: str) -> RadosGateway:
    mon_port, rgw_port = free_port(), free_port()
    cluster, osd = str(uuid.uuid4()), str(uuid.uuid4())
    for name in ("mon", "osd", "rgw", "run", "log"):
        (folder / name).mkdir()
    conf = folder / "ceph.conf"
    conf.write_text(_configuration(folder, cluster, mon_port, rgw_port))
    env = {**os.environ, "CEPH_CONF": str(conf), "CEPH_ARGS": f"--conf {conf}"}

    def run(*command: str) -> None:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DAEMON_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]} {done.stderr[-1000:]}")

    def daemon(*command: str) -> subprocess.Popen[bytes]:
        log = stack.enter_context((folder / "log" / f"{command[0]}.out").open("ab"))
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
        stack.callback(_end, process)
        return process

    def answers(*command: str) -> bool:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DAEMON_SECONDS, check=False)
        return done.returncode == 0 and (command[-1] != "stat" or "1 up" in done.stdout)

    keyring, monmap = str(folder / "keyring"), str(folder / "monmap")
    run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    run("monmaptool", "--create", "--clobber", "--fsid", cluster, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", monmap)
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    _wait(lambda: daemon("ceph-mon", "-f", "-i", "a"), lambda: answers("ceph", "--connect-timeout", "5", "-s"))
    run("ceph", "osd", "new", osd)
    run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    run("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=localhost", "root=default")
    _wait(lambda: daemon("ceph-osd", "-f", "-i", "0"), lambda: answers("ceph", "osd", "stat"))
    user = ["--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret={SECRET}"]
    run("radosgw-admin", "user", "create", *user)
    endpoint = f"http://127.0.0.1:{rgw_port}"
    _wait(lambda: daemon("radosgw", "-f", "-n", "client.rgw.a"), lambda: _is_up(endpoint))
    server = RadosGateway(endpoint, bucket)
    client = s3fs.S3FileSystem(
        key=KEY, secret=SECRET, endpoint_url=endpoint, client_kwargs={"region_name": "us-east-1"}
    )
    client.call_s3("create_bucket", Bucket=bucket)
    return server


def _configuration(folder: Path, cluster: str, mon_port: int, rgw_port: int) -> str:
    return f"""[global]
fsid = {cluster}
mon host = [v1:127.0.0.1:{mon_port}]
ms bind msgr2 = false
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
osd crush chooseleaf type = 0
run dir = {folder}/run
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
keyring = {folder}/keyring
[mon.a]
host = localhost
mon addr = 127.0.0.1:{mon_port}
mon data = {folder}/mon
mon data avail crit = 1
mon data avail warn = 2
[osd.0]
host = localhost
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {STORE_BYTES}
osd memory target = 939524096
osd class dir = /usr/lib/x86_64-linux-gnu/rados-classes
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{rgw_port}
rgw data = {folder}/rgw
rgw enable usage log = false
rgw dynamic resharding = false
"""


def _wait(start: Callable[[], subprocess.Popen[bytes]], ready: Callable[[], bool]) -> None:
    """Start a daemon, and again where it ends: an osd that asks before it knows its cluster is sent away."""
    process, deadline = start(), time.monotonic() + DAEMON_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not start")
        time.sleep(0.1)
        if process.poll() is not None:
            time.sleep(1)
            process = start()


def _is_up(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
