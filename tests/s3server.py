"""An S3 server on a free loopback port, for tests and for the demo.

As a context manager in tests; as a command for a shell::

    python -m tests.s3server [BUCKET]     # prints `export` lines, serves until its standard input ends or ^C
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECRET = "loopback-only"  # the server checks no signature, but clients insist on having something to sign with


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes
    ----------
    endpoint : str
        Its URL.
    bucket : str
        A bucket that exists.
    """

    endpoint: str
    bucket: str

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which any S3 client finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def options(self) -> dict[str, str]:
        """The same as storage options."""
        return {"endpoint_url": self.endpoint, "key": "test", "secret": SECRET, "region": "us-east-1"}

    def url(self, prefix: str) -> str:
        """A URL below the bucket."""
        return f"s3://{self.bucket}/{prefix}"


def free_port() -> int:
    """A port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def s3_server(bucket: str = "checkpoints") -> Iterator[S3Server]:
    """Start a server in memory, create `bucket`, and end it by its process id."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="s3server-") as folder:
        log = Path(folder, "log")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3_", "MINISTACK"))}
        env |= {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3", "LOG_LEVEL": "WARNING"}
        env |= {"TMPDIR": folder, "STATE_DIR": f"{folder}/state", "S3_DATA_DIR": f"{folder}/data"}
        command = [sys.executable, "-c", "from ministack.app import main; main()"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder)
        try:
            server = S3Server(endpoint, bucket)
            _wait_until_it_answers(endpoint, process, log)
            put_bucket = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
            urllib.request.urlopen(put_bucket, timeout=10).close()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_answers(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}")
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return


def _serve() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with s3_server(*sys.argv[1:2]) as server, contextlib.suppress(KeyboardInterrupt):
        for name, value in server.env.items():
            print(f"export {name}={value}")
        print(f"export S3_URL=s3://{server.bucket}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
