"""K01 to K10 in the whole flow: keys are opaque from bucket to bucket, and what a folder cannot hold is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.store_s3 import S3Store
from tests.pipeline.commands import Capture, Ran, files_of
from tests.s3server import S3Server, s3_server

PLAIN = ("--workers", "1", "--set", "synth.prior=uniform", "--set", "synth.budget=0")
K01 = (
    "p/a b", "p/a#b", "p/a%20b", "p/a%2Fb", "p/a+b", "p/a?b", "p/a*b", "p/br[ack]et", "p/[0-9]", "p/{a}", "p/&=",
    "p/'\"", "p/~", "p/c:d", "p/back\\slash",
)  # fmt: skip
K02 = ("p/../up.bin", "/lead.bin", "p/./dot.bin")
K05 = {"p/dirmark/": b"", "p/dirmark/child": b"1", "p/alone/": b"", "p/trail/": b"12345"}
K07 = ("n" * 300 + "/x", "k" * 1000)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


class Bucket:
    """A bucket with a source in it, or all of it."""

    def __init__(self, server: S3Server, name: str, capsys: Capture) -> None:
        self.server, self.name, self.capsys = server, name, capsys
        self.stores: dict[str, S3Store] = {}
        self.store("")._run(self.store("")._request("create_bucket", "", {}))

    def store(self, prefix: str) -> S3Store:
        if prefix not in self.stores:
            self.stores[prefix] = S3Store(f"{self.name}/{prefix}" if prefix else self.name, self.server.options)
        return self.stores[prefix]

    def put(self, prefix: str, files: dict[str, bytes]) -> None:
        for key, data in files.items():
            self.store(prefix).put_new(key, data)

    def ran(self, command: str, *arguments: object) -> Ran:
        words = [word for key, value in self.server.options.items() for word in ("--storage-option", f"{key}={value}")]
        return Ran(self.capsys, command, *arguments, *words)

    def read(self, prefix: str) -> dict[str, bytes]:
        store = self.store(prefix)
        return {info.key: store.get(info.key, max_bytes=1 << 20) for info in store.list()}


@pytest.fixture
def bucket(server: S3Server, capsys: Capture, request: pytest.FixtureRequest) -> Bucket:
    return Bucket(server, f"keys-{request.node.name[:50].lower().replace('_', '-').strip('-')}", capsys)


def test_k01_k02_k05_k07_any_key_comes_back_from_bucket_to_bucket(bucket: Bucket) -> None:
    files = {key: key.encode() for key in (*K01, *K02, *K07)} | K05
    bucket.put("s", files)
    assert bucket.ran("archive", f"s3://{bucket.name}/s", f"s3://{bucket.name}/archive", *PLAIN).code == 0
    assert (
        max(len(info.key) for info in bucket.store("archive").list()) < 200
    )  # no key of an archive holds one of these
    assert bucket.ran("verify", f"s3://{bucket.name}/archive").code == 0
    assert bucket.ran("restore", f"s3://{bucket.name}/archive", f"s3://{bucket.name}/o").code == 0
    assert bucket.read("o") == files
    for key in ("p/a*b", "p/[0-9]", "p/a?b"):  # names, not patterns, when one file is asked for
        one = bucket.ran("restore", f"s3://{bucket.name}/archive", f"s3://{bucket.name}/one", "--include", key)
        assert one.code in (0, 5)
        assert bucket.read("one").keys() <= files.keys()


def test_k01_k02_k05_k07_a_folder_takes_what_it_can_and_names_the_rest(bucket: Bucket, tmp_path: Path) -> None:
    files = {key: key.encode() for key in (*K01, *K02, *K07)} | K05
    bucket.put("s", files)
    assert bucket.ran("archive", f"s3://{bucket.name}/s", f"s3://{bucket.name}/archive", *PLAIN).code == 0
    ran = bucket.ran("restore", f"s3://{bucket.name}/archive", tmp_path / "out", "--keep-going")
    assert ran.code == 3
    refused = {failure["key"]: failure["reason"] for failure in ran.json["failures"]}
    assert refused == dict.fromkeys((*K02, *K07, "p/trail/"), "unsafe_path")
    folders = {"p/dirmark/", "p/alone/"}
    assert files_of(tmp_path / "out") == {
        key: data for key, data in files.items() if key not in refused.keys() | folders
    }
    assert all((tmp_path / "out" / key).is_dir() for key in folders)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_k08_a_prefix_is_a_folder(bucket: Bucket) -> None:
    bucket.put("run", {"step-1/w": b"1", "step-10/w": b"10"})
    ran = bucket.ran("archive", f"s3://{bucket.name}/run/step-1", f"s3://{bucket.name}/archive", *PLAIN)
    assert (ran.code, ran.json["files"]) == (0, 1)
    assert bucket.ran("restore", f"s3://{bucket.name}/archive", f"s3://{bucket.name}/o").code == 0
    assert bucket.read("o") == {"w": b"1"}


def test_k10_a_single_object_a_whole_bucket_and_an_archive_inside(bucket: Bucket) -> None:
    bucket.put("", {"one.bin": b"1", "two/x.bin": b"2"})
    single = bucket.ran("archive", f"s3://{bucket.name}/one.bin", f"s3://{bucket.name}/vault", *PLAIN)
    assert (single.code, single.json["files"]) == (0, 1)
    for _ in range(2):  # its own archive is never archived
        whole = bucket.ran("archive", f"s3://{bucket.name}", f"s3://{bucket.name}/vault", *PLAIN, "--name", "all")
        assert (whole.code, whole.json["files"]) == (0, 2)
    assert whole.json["unchanged"]
    restored = bucket.ran("restore", f"s3://{bucket.name}/vault", f"s3://{bucket.name}/o", "--snapshot", "all")
    assert restored.code == 0
    assert bucket.read("o") == {"one.bin": b"1", "two/x.bin": b"2"}
