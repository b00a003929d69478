"""``make demo``: a real checkpoint archived, verified, restored and compared, beside other compressors.

Then the same through ``ray job submit`` and an S3 server that the demo starts on this machine.
"""

from __future__ import annotations

import filecmp
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.bench.peers import GENERAL
from tests.bench.sizes import dtype_of
from tests.checkpoints import path
from tests.processes import ROOT, Finished, brevis, run
from tests.ray.cluster import two_nodes
from tests.s3server import s3_server

SUBMIT = ROOT / "deploy" / "submit.sh"

CHECKPOINT = "minilm-bf16"
OPTIONS = ("--name", "minilm", "--set", "task_bytes=8MiB", "--json", "--no-progress")
"""Small tasks, so that a checkpoint of this size has some for every worker."""
SNAPSHOT = "snapshots/minilm/00000001.json"


def say(text: str = "") -> None:
    print(text, flush=True)


def step(title: str, finished: Finished, shown: str) -> Finished:
    """Show a command and what it took."""
    say(f"$ {shown}")
    say(f"  {title}: {finished.wall_seconds:.1f} s, {finished.cpu_seconds:.1f} s of CPU")
    return finished


def local(file: Path, scratch: Path) -> str:
    """Archive, verify, restore and compare on this machine; return the digest of the content."""
    data = file.read_bytes()
    place, target = scratch / "archive", scratch / "restored"
    archived = step(
        "archived and checked", brevis("archive", file, place, *OPTIONS), f"brevis archive {file.name} ARCHIVE"
    )
    step("verified", brevis("verify", place), "brevis verify ARCHIVE")
    restored = step("restored", brevis("restore", place, target), "brevis restore ARCHIVE TARGET")
    if not filecmp.cmp(file, target / file.name, shallow=False):
        sys.exit("the restored file differs")
    say("  the restored file equals the original, byte for byte\n")
    stored = json.loads(archived.stdout)["stored_bytes"]
    rows = [("brevis (whole archive)", stored, archived.wall_seconds, restored.wall_seconds)]
    for peer in reversed(GENERAL):
        seconds, compressed = timed(partial(peer.compress, data, dtype_of(CHECKPOINT)))
        back, _ = timed(partial(peer.decompress, compressed, dtype_of(CHECKPOINT)))
        rows.append((peer.name, len(compressed), seconds, back))
    say(f"{'':28}{'bytes':>12}{'% of file':>11}{'compress s':>12}{'restore s':>11}")
    say(f"{file.name:28}{len(data):>12,}{100:>10.2f}%")
    for name, n_bytes, seconds, back in sorted(rows, key=lambda row: row[1]):
        say(f"{name:28}{n_bytes:>12,}{100 * n_bytes / len(data):>10.2f}%{seconds:>12.1f}{back:>11.1f}")
    if stored > min(n_bytes for _, n_bytes, _, _ in rows):
        sys.exit("the archive is not the smallest")
    return content_digest((place / SNAPSHOT).read_bytes())


def content_digest(snapshot: bytes) -> str:
    """Return the digest that a snapshot has of its content: without time and place."""
    digest: str = json.loads(snapshot)["content"]
    return digest


def on_ray(file: Path, digest: str) -> None:
    """Archive from S3 to S3 as a job of a two-node cluster, restore with a second job, compare both."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with s3_server() as server, two_nodes(server.env) as cluster:
        say("\nThe same from S3 to S3, on a Ray cluster of two nodes and an S3 server of this machine:")
        bucket = f"{server.endpoint}/{server.bucket}"
        put = urllib.request.Request(f"{bucket}/source/{file.name}", data=file.read_bytes(), method="PUT")
        urllib.request.urlopen(put).close()
        env = {**cluster.env, "RAY_API_SERVER_ADDRESS": cluster.dashboard}
        source, place, target = (server.url(prefix) for prefix in (f"source/{file.name}", "archive", "restored"))
        for title, arguments in (
            ("archived and checked by a job", ["archive", source, place, *OPTIONS]),
            ("restored by a second job", ["restore", place, target]),
        ):
            step(title, run([str(SUBMIT), *arguments], env), f"deploy/submit.sh {' '.join(arguments[:3])}")
        with urllib.request.urlopen(f"{bucket}/restored/{file.name}") as restored:
            if restored.read() != file.read_bytes():
                sys.exit("the file restored through Ray differs")
        with urllib.request.urlopen(f"{bucket}/archive/{SNAPSHOT}") as snapshot:
            if content_digest(snapshot.read()) != digest:
                sys.exit("Ray and this process made different archives")
        say("  the restored object equals the original, and both archives have the same content digest")


def timed(action: Callable[[], bytes]) -> tuple[float, bytes]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def main() -> None:
    say("Kernels are compiled on the first run, on up to four CPUs, and kept:")
    step("ready", run([sys.executable, "-m", "synth.warm"]), "python -m synth.warm")
    say(f"\nA real checkpoint, carried by an ordinary package: {CHECKPOINT}")
    file = path(CHECKPOINT)
    with tempfile.TemporaryDirectory() as scratch:
        digest = local(file, Path(scratch))
    on_ray(file, digest)


if __name__ == "__main__":
    main()
