"""O20: content type and its like, user metadata and tags of objects are recorded, and come back with their bytes."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import FormatError
from pipeline import restore
from pipeline.archive import find_snapshot
from pipeline.snapshots import headers_from_json, headers_to_json
from pipeline.store import Headers
from pipeline.store_local import LocalSource
from pipeline.store_s3 import S3Store
from pipeline.store_s3_client import METADATA_BYTES_MAX, WRITE_ID, arguments_of, headers_of, tags_of
from tests.cases import safetensors
from tests.faultproxy import ALWAYS, Fault, fault_proxy
from tests.pipeline.commands import Capture, Patch, Ran, files_of
from tests.radosgw import SERVERS, running
from tests.reference.decode import decode_archive
from tests.s3server import S3Server

MIB = 1 << 20
TENSOR_BYTES, PART_BYTES = 3 * MIB, 5 * MIB
FILES = {
    "config.json": b'{"hidden": 64}' * 200,
    "empty.txt": b"",
    "model.safetensors": safetensors([(f"w{i}", "U8", [TENSOR_BYTES], bytes(TENSOR_BYTES)) for i in range(6)]),
    "plain.bin": b"nothing but bytes",
}
KEPT: dict[str, dict[str, Any]] = {
    "config.json": {"ContentType": "application/json", "Metadata": {"run": "a b"}, "Tagging": "stage=draft&a=%2B%20"},
    "empty.txt": {"ContentType": "text/plain", "ContentLanguage": "en", "Tagging": "empty="},
    "model.safetensors": {
        "CacheControl": "no-cache",
        "ContentDisposition": 'attachment; filename="model.bin"',
        "ContentEncoding": "zstd",
        "ContentType": "application/x-model",
        "Metadata": {"step": "100", "note": "=?UTF-8?B?w6k=?="},
        "Tagging": "run=7&stage=final",
    },
    "plain.bin": {"ContentType": "binary/octet-stream"},
}
PLAIN = ("--workers", "1", "--set", "synth.prior=uniform", "--set", "synth.budget=0", "--set", "retries=1")


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with running(request.param) as found:
        yield found


@dataclass
class Place:
    """A source whose objects keep something, and what commands say."""

    server: S3Server
    prefix: str
    capsys: Capture

    def store(self, name: str) -> S3Store:
        return S3Store(f"{self.server.bucket}/{self.prefix}/{name}", self.server.options)

    def url(self, name: str) -> str:
        return self.server.url(f"{self.prefix}/{name}")

    def put(self, key: str, kept: Mapping[str, Any]) -> None:
        self.store("source")._call("put_object", key, Body=[FILES[key]], **kept)

    def ran(self, *arguments: object, faults: tuple[Fault, ...] = ()) -> Ran:
        with fault_proxy(self.server.endpoint, faults) as proxy:
            options = self.server.options | {"endpoint_url": proxy.endpoint}
            return Ran(
                self.capsys,
                *arguments,
                *(word for name, value in options.items() for word in ("--storage-option", f"{name}={value}")),
            )

    def archive(self, *options: str, faults: tuple[Fault, ...] = ()) -> Ran:
        return self.ran("archive", self.url("source"), self.url("archive"), *PLAIN, *options, faults=faults)

    def recorded(self) -> dict[str, dict[str, str]]:
        """What the newest snapshot says of each file."""
        return {entry.key: dict(entry.headers) for entry in find_snapshot(self.store("archive"), "source").files}


@pytest.fixture
def place(server: S3Server, tmp_path: Path, capsys: Capture) -> Place:
    found = Place(server, tmp_path.name, capsys)
    for key, kept in KEPT.items():
        found.put(key, kept)
    return found


def kept_by(store: S3Store, key: str) -> dict[str, Any]:
    """Ask a server what it keeps of an object; our own id of the write is no part of it."""
    answer = store._call("head_object", key)
    tags = store._call("get_object_tagging", key)["TagSet"]
    metadata = {name: value for name, value in answer["Metadata"].items() if name != WRITE_ID}
    names = ("CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage", "ContentType")
    return {name: answer[name] for name in names if name in answer} | {
        "Metadata": metadata,
        "Tagging": sorted((tag["Key"], tag["Value"]) for tag in tags),
    }


def test_what_an_object_keeps_comes_back_with_its_bytes(place: Place, tmp_path: Path, monkeypatch: Patch) -> None:
    """One PUT, and an upload whose parts several workers write; a folder takes the bytes alone."""
    assert place.archive().code == 0
    wanted = {key: kept_by(place.store("source"), key) for key in FILES}
    assert wanted["model.safetensors"]["Tagging"] == [("run", "7"), ("stage", "final")]
    monkeypatch.setattr(restore, "SEGMENT_BYTES", 4 * MIB)
    monkeypatch.setattr(restore, "STEPPED_STRETCHES", 1)
    monkeypatch.setattr("pipeline.store_s3.part_bytes", lambda _: PART_BYTES)
    sent = Fault("^POST .*model.*uploads", "strip nothing", header="x-amz-tagging: run=7&stage=final")
    parts = Fault("^PUT .*partNumber", "strip nothing", ALWAYS)
    ran = place.ran("restore", place.url("archive"), place.url("out"), faults=(sent, parts))
    assert (ran.code, sent.met, parts.met) == (0, 1, 4)
    out = place.store("out")
    assert {info.key: out.get(info.key, max_bytes=info.n_bytes) for info in out.list()} == FILES
    assert {key: kept_by(out, key) for key in FILES} == wanted
    assert place.ran("restore", place.url("archive"), tmp_path / "out").code == 0
    assert files_of(tmp_path / "out") == FILES


def test_only_tags_take_a_request_of_their_own(place: Place) -> None:
    requests: list[str] = []
    with fault_proxy(place.server.endpoint) as proxy:
        store = S3Store(
            f"{place.server.bucket}/{place.prefix}/source", place.server.options | {"endpoint_url": proxy.endpoint}
        )
        for info in store.list():
            proxy.requests.clear()
            first, headers = store.first(info, min(info.n_bytes, 100))
            assert first == FILES[info.key][:100]
            assert dict(headers) == wire(info.key)
            requests += [line.split()[0] for line in proxy.requests if info.key in line]
            assert sum("tagging" in line for line in proxy.requests) == ("Tagging" in KEPT[info.key])
    assert requests == ["GET"] * 7


def wire(key: str) -> dict[str, str]:
    """What a record has of the arguments of a PUT."""
    kept = KEPT[key]
    names = {"CacheControl": "cache-control", "ContentDisposition": "content-disposition"}
    names |= {"ContentEncoding": "content-encoding", "ContentLanguage": "content-language"}
    names |= {"ContentType": "content-type"}
    found = {names[name]: value for name, value in kept.items() if name in names}
    found |= {f"x-amz-meta-{name}": value for name, value in kept.get("Metadata", {}).items()}
    if "Tagging" in kept:
        found["x-amz-tagging"] = "&".join(sorted(kept["Tagging"].split("&")))
    return found


def test_tags_that_may_not_be_read_are_named_and_fail_nothing(place: Place) -> None:
    refused = Fault("^GET .*tagging", "403 AccessDenied", ALWAYS)
    for _ in range(2):  # the second finds nothing to do, and says it all the same
        ran = place.archive(faults=(refused,))
        assert ran.code == 0
        named = [warning["key"] for warning in ran.json["warnings"] if warning["reason"] == "tags_unread"]
        assert named == ["config.json", "empty.txt", "model.safetensors"]
    assert ran.json["unchanged"]
    assert place.ran("restore", place.url("archive"), place.url("out")).code == 0
    wanted = kept_by(place.store("source"), "config.json")
    assert kept_by(place.store("out"), "config.json") == {**wanted, "Tagging": []}
    shown = place.ran("info", place.url("archive"), "-v", "--include", "config.json").json["files"]
    assert [file["headers"] for file in shown] == [
        {"content-type": "application/json", "x-amz-meta-run": "a b", "x-amz-tagging-count": "2"}
    ]


def test_what_is_not_read_again_keeps_its_record(place: Place) -> None:
    assert place.archive().code == 0
    before = place.recorded()
    assert before == {key: wire(key) for key in FILES}
    place.store("source")._call("put_object", "new.bin", Body=[b"new"], ContentType="x/y")
    refused = Fault("^GET .*source/(config|model)", "403 AccessDenied", ALWAYS)
    assert place.archive(faults=(refused,)).code == 0
    assert not refused.met
    assert place.recorded() == {**before, "new.bin": {"content-type": "x/y"}}


def test_others_read_an_archive_with_a_record(place: Place, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    few = ("--exclude", "model.safetensors")
    assert place.ran("archive", place.url("source"), archive, *PLAIN, *few).code == 0
    assert decode_archive(archive, "source", 1) == {key: data for key, data in FILES.items() if key not in few}
    snapshot = find_snapshot(LocalSource(str(archive)))
    assert [len(entry.headers) for entry in snapshot.files] == [3, 3, 1]
    for key in FILES:
        place.put(key, {"ContentType": "x/y"})
    assert place.ran("archive", place.url("source"), tmp_path / "other", *PLAIN, *few).code == 0
    other = find_snapshot(LocalSource(str(tmp_path / "other")))
    assert other.files != snapshot.files
    assert (other.content, other.manifest) == (snapshot.content, snapshot.manifest)


def test_metadata_alone_are_seen_where_all_is_read(place: Place) -> None:
    assert place.archive().code == 0
    place.put("plain.bin", {"ContentType": "x/y"})
    assert place.archive().json["unchanged"]
    assert place.recorded()["plain.bin"] != {"content-type": "x/y"}
    assert not place.archive("--checksum").json["unchanged"]
    assert place.recorded()["plain.bin"] == {"content-type": "x/y"}
    assert place.archive("--checksum").json["unchanged"]


def test_a_run_that_is_taken_up_and_one_that_lost_its_commit_have_the_record(place: Place) -> None:
    """It is stored with the plan: who finds that does not look at the objects again."""
    refused = Fault("^PUT .*snapshots/", "403 AccessDenied", ALWAYS)
    assert place.archive(faults=(refused,)).json["error"]["kind"] == "denied"
    for key in KEPT:
        place.put(key, {"ContentType": "x/y"})  # the same bytes
    assert place.archive().code == 0
    recorded = place.recorded()
    assert recorded == {key: wire(key) for key in FILES}
    archive = place.store("archive")
    for info in archive.list("snapshots/"):
        archive.delete(info.key)
    (run,) = place.ran("rebuild", place.url("archive")).json["runs"]
    assert place.ran("rebuild", place.url("archive"), "--run", run["run"], "--name", "source").code == 0
    assert place.recorded() == {key: kept for key, kept in recorded.items() if FILES[key]}


# -- what a record may hold -----------------------------------------------------------------------


NAMES = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=8)
VALUES = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f"), max_size=40)


@given(
    st.dictionaries(NAMES.map("x-amz-meta-".__add__), VALUES, max_size=4), st.dictionaries(NAMES, VALUES, max_size=10)
)
def test_a_record_is_what_a_write_sends_and_an_answer_says(metadata: dict[str, str], tags: dict[str, str]) -> None:
    others = {"content-type": "a/b", "etag": '"1"', f"x-amz-meta-{WRITE_ID}": "that of a restore"}
    answer = {"ResponseMetadata": {"HTTPHeaders": {**metadata, **others}}, "TagCount": 1}
    headers = headers_of(answer, [{"Key": name, "Value": value} for name, value in tags.items()])
    assert dict(headers).keys() == {*metadata, "content-type", "x-amz-tagging"}
    assert headers_from_json(headers_to_json({"k": headers}), "") == {"k": headers}
    sent = arguments_of(headers, "id")
    assert sent.pop("Metadata").keys() == {name.removeprefix("x-amz-meta-") for name in metadata} | {WRITE_ID}
    assert parse_qsl(sent.pop("Tagging"), keep_blank_values=True) == sorted(tags.items())
    assert tags_of(headers) == [{"Key": name, "Value": value} for name, value in sorted(tags.items())]
    assert sent == {"ContentType": "a/b"}


def test_metadata_leave_room_for_an_id_or_have_none() -> None:
    def sent(n_bytes: int) -> Mapping[str, str]:
        found: Mapping[str, str] = arguments_of((("x-amz-meta-n", "x" * (n_bytes - 1)),), "0" * 32)["Metadata"]
        return found

    room = METADATA_BYTES_MAX - len(WRITE_ID) - 32
    assert WRITE_ID in sent(room)
    assert sent(room + 1).keys() == {"n"}
    assert arguments_of((("x-amz-meta-n", "\xe9"),), "")["Metadata"]["n"] == "=?UTF-8?B?w6k=?="
    assert arguments_of(((WRITE_ID, "1"), ("authorization", "1"), ("x-amz-tagging-count", "3")), "") == {
        "Metadata": {WRITE_ID: ""}
    }


@pytest.mark.parametrize(
    "headers",
    [
        (("x-amz-meta-a", "1\r\nx-amz-acl: public-read"),),
        (("x-amz-meta-a\n", "1"),),
        (("Content-Type", "1"),),
        (("b", "1"), ("a", "1")),
        (("a", "1"), ("a", "2")),
        (("a", 1),),
        (("a",),),
        ("ab",),
    ],
)
def test_a_record_that_is_none_is_refused(headers: Headers) -> None:
    with pytest.raises(FormatError):
        headers_from_json(headers_to_json({"k": headers}), "")
