"""The real driver from and to an S3 server that loses replies, throttles, cuts bodies and refuses access.

T15 and field cases G01, G02, G07, G08, G09, G14: each run ends in a complete archive, or fails clearly with the old
state intact, and the next one finishes. The servers are real; the faults are those of a proxy before them.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import s3fs

from pipeline.snapshots import time_text
from pipeline.store import ObjectInfo
from pipeline.store_s3 import S3Source, S3Store
from tests.cases import bf16, noise, safetensors
from tests.faultproxy import ALWAYS, Fault, Proxy, fault_proxy
from tests.invariants import Watched
from tests.pipeline.commands import Capture, Patch, Ran, files_of
from tests.radosgw import SERVERS, running
from tests.s3server import S3Server

SETTINGS = ("task_bytes=40000", "synth.prior=uniform", "synth.budget=0", "retries=1")
PLAIN = ("--workers", "1", *(word for setting in SETTINGS for word in ("--set", setting)))
FILES = {
    "config.json": b"{}",
    "model.safetensors": safetensors([("w", "BF16", [200, 100], bf16(1, 20_000))]),
    "noise.bin": noise(1, 30_000),
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with running(request.param) as found:
        yield found


SIGNS_NOTHING = pytest.mark.parametrize("server", ["ministack"], indirect=True)
"""For requests that a proxy changes in a way that a signature does not allow, or that take TLS elsewhere."""

KNOWS_RANGES_OF_VERSIONS = pytest.mark.parametrize("server", SERVERS[1:], indirect=True)
"""Asked for a range of a version, the small server answers with all of it."""


@pytest.fixture(scope="module")
def proxy(server: S3Server) -> Iterator[Proxy]:
    """One for all tests, which change what it does: a client of its own for each run would take most of the time."""
    with fault_proxy(server.endpoint, FAULTS) as proxy, pytest.MonkeyPatch.context() as patch:
        clients: dict[str, Any] = {}
        real = s3fs.S3FileSystem

        def client(**options: Any) -> Any:
            key = repr(options)
            if key not in clients:
                clients[key] = real(**options)
            return clients[key]

        patch.setattr("pipeline.store_s3.s3fs.S3FileSystem", client)
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # botocore's, which wait long, below those of s3fs
        yield proxy


FAULTS: list[Fault] = []
"""Those of the proxy now."""


@dataclass
class Place:
    """A source and an archive in one bucket, and what commands say."""

    server: S3Server
    proxy: Proxy
    prefix: str
    capsys: Capture

    def store(self, name: str = "archive") -> S3Store:
        return S3Store(f"{self.server.bucket}/{self.prefix}/{name}", self.server.options)

    def url(self, name: str) -> str:
        return self.server.url(f"{self.prefix}/{name}")

    def ran(self, *arguments: object, faults: Sequence[Fault] = ()) -> Ran:
        """Run a command with `faults` between it and the server."""
        stores = self.server.options | {"endpoint_url": self.proxy.endpoint}
        words = [word for key, value in stores.items() for word in ("--storage-option", f"{key}={value}")]
        FAULTS[:] = faults
        try:
            return Ran(self.capsys, *arguments, *words)
        finally:
            FAULTS.clear()

    def archive(self, *options: str, name: str = "archive", faults: Sequence[Fault] = ()) -> Ran:
        return self.ran("archive", self.url("source"), self.url(name), *PLAIN, *options, faults=faults)


@pytest.fixture
def place(server: S3Server, proxy: Proxy, tmp_path: Path, capsys: Capture) -> Place:
    found = Place(server, proxy, tmp_path.name, capsys)
    store = found.store("source")
    for key, data in FILES.items():
        store.put(key, data)
    return found


def content_of(place: Place, name: str) -> str:
    """Check the archive of that name whole, and return its one content digest."""
    contents = {snapshot.content for snapshot in Watched(place.store(name)).check(FILES)}
    assert len(contents) == 1
    return contents.pop()


# -- the archive --------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize("action", ["drop-reply", pytest.param("500 InternalError", marks=SLOW)])
def test_any_put_may_be_lost_or_fail_once(place: Place, action: str) -> None:
    """T15: for every n the n-th PUT of a run; no spurious conflict, no second snapshot, the same content."""
    assert place.archive(name="undisturbed").code == 0
    content = content_of(place, "undisturbed")
    for n in itertools.count():
        fault = Fault("^PUT", action, skip=n)
        ran = place.archive(name=f"archive-{n}", faults=[fault])
        assert ran.code == 0, (n, ran.err)
        assert ran.json["snapshot"] == "source/1"
        assert content_of(place, f"archive-{n}") == content
        if not fault.met:
            break
    assert n > 8


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([Fault(".", "503 SlowDown", ALWAYS, share=0.2)], marks=SLOW),
        [Fault("^GET", "cut-reply", ALWAYS, share=0.2)],
        [Fault(".", "503 SlowDown", ALWAYS, share=0.1), Fault(".", "drop-reply", ALWAYS, share=0.1)],
    ],
    ids=["503", "cut", "503 and lost"],
)
def test_a_storm_is_slower_and_no_more(place: Place, faults: list[Fault]) -> None:
    """G08, G09: a fifth of all calls fails; what is stored and restored is whole."""
    faults = [replace(fault) for fault in faults]
    ran = place.archive(faults=faults)
    assert ran.code == 0, ran.err
    assert all(fault.met for fault in faults)
    content_of(place, "archive")
    assert place.ran("restore", place.url("archive"), place.url("out"), faults=faults).code == 0
    out = place.store("out")
    assert {info.key: out.get(info.key, max_bytes=1 << 20) for info in out.list()} == FILES


@pytest.mark.parametrize("match", ["^PUT .*packs/", "^PUT .*receipts/", "^PUT .*manifests/", "^PUT .*snapshots/"])
def test_a_store_that_takes_no_more_is_a_clear_failure(place: Place, match: str) -> None:
    """G08: refused for good; there is no snapshot, and the next run takes up what is there."""
    ran = place.archive(faults=[Fault(match, "403 AccessDenied", ALWAYS)])
    assert ran.code == 1
    assert "AccessDenied" in ran.json["error"]["message"]
    assert ran.json["error"]["next_step"]
    assert not place.store().list("snapshots/")
    again = place.archive()
    assert (again.code, again.json["snapshot"]) == (0, "source/1")
    content_of(place, "archive")


def test_an_upload_in_parts_that_is_always_refused_leaves_no_object(place: Place, monkeypatch: Patch) -> None:
    """G08: SlowDown on every CreateMultipartUpload."""
    monkeypatch.setattr("pipeline.store_s3.part_bytes", lambda *_: 1 << 14)
    monkeypatch.setattr("pipeline.store_s3.PUT_BYTES", 1 << 14)
    fault = Fault("^POST .*uploads", "503 SlowDown", ALWAYS)
    ran = place.archive("--include", "noise.bin", "--set", "retries=0", faults=[fault])
    assert ran.code == 1
    assert fault.met
    assert "SlowDown" in ran.json["error"]["message"]
    store = place.store()
    assert not [info for info in store.list() if info.key.startswith(("packs/", "manifests/", "snapshots/"))]
    uploads = store._run(store._request("list_multipart_uploads", "", {"Prefix": f"{place.prefix}/archive"}))
    assert not uploads.get("Uploads")
    monkeypatch.undo()
    assert place.archive().code == 0
    content_of(place, "archive")


@SIGNS_NOTHING
def test_a_store_that_ignores_conditions_is_refused_unless_there_is_one_writer(place: Place) -> None:
    """Found by a probe before anything else is written."""
    faults = [Fault("^PUT", "strip if-none-match", ALWAYS)]
    ran = place.archive(faults=faults)
    assert (ran.code, ran.json["error"]["kind"]) == (2, "usage")
    assert "--single-writer" in ran.json["error"]["next_step"]
    assert place.store().list() == []
    assert place.archive("--single-writer", faults=faults).code == 0
    content_of(place, "archive")


def test_credentials_that_expire_are_asked_for_again(place: Place, tmp_path: Path, monkeypatch: Patch) -> None:
    """G07: those that a provider gave are refused at the fifth request; it is asked again, and the run goes on."""
    provider, calls = tmp_path / "provider.py", tmp_path / "calls"
    key = {"AccessKeyId": place.server.options["key"], "SecretAccessKey": place.server.options["secret"]}
    provider.write_text(
        f"open({str(calls)!r}, 'a').write('x')\nimport json\nprint(json.dumps({ {'Version': 1} | key!r}))\n"
    )
    config = tmp_path / "config"
    config.write_text(f"[profile night]\ncredential_process = {sys.executable} {provider}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    fault = Fault(".", "400 ExpiredToken", skip=4)
    with fault_proxy(place.server.endpoint, [fault]) as proxy:
        stores = {"endpoint_url": proxy.endpoint, "profile": "night", "region": "us-east-1"}
        words = [word for key, value in stores.items() for word in ("--storage-option", f"{key}={value}")]
        ran = Ran(place.capsys, "archive", place.url("source"), place.url("archive"), *PLAIN, *words)
    assert ran.code == 0, ran.err
    assert fault.met
    assert len(calls.read_text()) > 1
    content_of(place, "archive")


# -- the source ---------------------------------------------------------------------------------


def test_a_denied_key_fails_alone(place: Place) -> None:
    """G14: the source is read-only and one key is refused; the rest is archived, and the exit code is 3."""
    faults = [Fault(f"^GET .*{place.prefix}/source/noise.bin", "403 AccessDenied", ALWAYS)]
    faults += [Fault(f"^(PUT|POST|DELETE) .*{place.prefix}/source/", "403 AccessDenied", ALWAYS)]
    ran = place.archive(faults=faults)
    assert ran.code == 3, ran.err
    assert [(failure["key"], failure["reason"]) for failure in ran.json["failures"]] == [("noise.bin", "denied")]
    assert not faults[1].seen  # P6: nobody tried
    assert Watched(place.store()).check(FILES)[0].totals.files == len(FILES) - 1
    assert place.archive().code == 0
    assert Watched(place.store()).check(FILES)[-1].totals.files == len(FILES)


@pytest.mark.parametrize(
    "change", ["same size", pytest.param("another size", marks=SLOW), pytest.param("deleted", marks=SLOW)]
)
def test_an_object_that_changes_at_any_read_is_never_mixed(place: Place, change: str, monkeypatch: Patch) -> None:
    """T12, G01, G02: before the k-th read of the source, for every k; the next run archives what is there then."""
    source = place.store("source")
    other = {"same size": noise(9, 30_000), "another size": noise(9, 70_000), "deleted": None}[change]
    now = {key: data for key, data in (FILES | {"noise.bin": other}).items() if data is not None}
    seen = set()
    for k in itertools.count():
        source.put("noise.bin", FILES["noise.bin"])
        calls = itertools.count()

        def changes(k: int = k, calls: Iterator[int] = calls) -> None:
            if next(calls) == k:
                _change(source, other)

        monkeypatch.setattr(S3Source, "first", _after(changes, S3Source.first, "noise.bin"))
        monkeypatch.setattr(S3Source, "get_ranges", _after(changes, S3Source.get_ranges))
        ran = place.archive(name=f"archive-{k}")
        monkeypatch.undo()
        reasons = {failure["reason"] for failure in ran.json["failures"]}
        seen |= reasons
        assert (ran.code, reasons) in ((0, set()), (3, {"not_found" if other is None else "changed_during_read"}))
        watched = Watched(place.store(f"archive-{k}"))
        watched.check(FILES, now)
        if next(calls) <= k:
            break
        assert place.archive(name=f"archive-{k}").code == 0
        watched.check(FILES, now)
    assert k > 2
    assert len(seen) == 1


def _after(changes: Callable[[], None], read: Callable[..., object], key: str = "") -> Callable[..., object]:
    def called(self: S3Source, info: ObjectInfo, *arguments: object) -> object:
        if self.url.endswith("source") and info.key.startswith(key):
            changes()
        return read(self, info, *arguments)

    return called


def _change(source: S3Store, data: bytes | None) -> None:
    if data is None:
        source.delete("noise.bin")
    else:
        source.put("noise.bin", data)


def versioned(place: Place) -> S3Store:
    """Make a bucket that keeps versions."""
    source = S3Store(f"{place.prefix.replace('_', '-')}/source", place.server.options)
    source._run(source._request("create_bucket", "", {}))
    source._run(source._request("put_bucket_versioning", "", {"VersioningConfiguration": {"Status": "Enabled"}}))
    return source


def test_the_newest_version_is_read_and_a_marker_is_absence(place: Place) -> None:
    """G03: three versions of one key, and a key that is deleted in a bucket that keeps versions."""
    source = versioned(place)
    for data in (b"one", b"two", b"three"):
        source.put("w.bin", data)
    source.put("gone.bin", b"gone")
    source.delete("gone.bin")
    assert place.ran("archive", source.url, place.url("archive"), *PLAIN).code == 0
    (snapshot,) = Watched(place.store()).check({"w.bin": b"three"})
    (entry,) = snapshot.files
    assert entry.version is not None
    assert entry.info == source.head("w.bin")
    assert place.ran("archive", source.url, place.url("archive"), *PLAIN).json["unchanged"]
    source.put("w.bin", b"fours")  # what is pinned stays readable, what is there is another
    assert bytes(source.get_ranges(entry.info, [(0, 5)])[0]) == b"three"
    against = ("--level", "source", "--source", source.url, "--workers", "1")
    assert place.ran("verify", place.url("archive"), *against).code == 4


def test_without_the_right_to_ask_for_versions_none_is_recorded(place: Place) -> None:
    source = versioned(place)
    source.put("w.bin", b"one")
    refused = Fault("^GET /[^/?]*[?]versioning", "403 AccessDenied", ALWAYS)
    assert place.ran("archive", source.url, place.url("archive"), *PLAIN, faults=[refused]).code == 0
    assert refused.met
    (snapshot,) = Watched(place.store()).check({"w.bin": b"one"})
    assert [entry.version for entry in snapshot.files] == [None]
    asked = (source.url, place.url("archive"), *PLAIN, "--as-of", "2999-01-01")
    assert place.ran("archive", *asked, faults=[refused]).json["error"]["kind"] == "denied"


def test_a_source_as_it_was(place: Place, tmp_path: Path) -> None:
    """O18, G03: of each key the newest version that is not newer; a key that was deleted by then is absent."""
    source = versioned(place)
    histories: list[dict[str, bytes]] = [
        {"a.bin": noise(1, 300), "sub/b.bin": b"b"},
        {"a.bin": noise(2, 300), "sub/b.bin": b"b", "c.bin": b""},
        {"sub/b.bin": b"b", "d.bin": b"d"},
        {},
    ]
    there: dict[str, bytes] = {}
    times = []
    for objects in histories:
        for key in there.keys() - objects.keys():
            source.delete(key)
        for key, data in objects.items():
            if there.get(key) != data:
                source.put(key, data)
        there = objects
        times.append(time_text(datetime.fromtimestamp(source.now(), UTC)))
        while source.now() <= datetime.fromisoformat(times[-1]).timestamp():
            time.sleep(0.1)
    for step, (when, objects) in enumerate(zip(times, histories, strict=True)):
        for url in (source.url, source.url + "/", source.url[:-2] + "*"):
            ran = place.ran("archive", url, place.url(f"archive-{step}"), *PLAIN, "--as-of", when, "--name", "x")
            if not objects:
                assert ran.code == 5
                continue
            assert ran.code == 0
            below = "source/" if url.endswith("*") else ""
            expected = {below + key: data for key, data in objects.items()}
            out = tmp_path / f"out-{step}-{below[:1]}"
            assert place.ran("restore", place.url(f"archive-{step}"), out, "--overwrite").code == 0
            assert files_of(out) == expected
    one = place.ran("archive", f"{source.url}/a.bin", place.url("one"), *PLAIN, "--as-of", times[0], "--workers", "1")
    assert (one.code, one.json["source_bytes"]) == (0, 300)
    assert place.ran("archive", source.url, place.url("none"), *PLAIN, "--as-of", "2001-01-01").code == 5
    # Where nothing is kept, or nobody knows whether all is, what was there cannot be told.
    for refused in (place.url("source"), str(tmp_path)):
        assert place.ran("archive", refused, place.url("none"), *PLAIN, "--as-of", times[0]).code == 2
    suspended = {"VersioningConfiguration": {"Status": "Suspended"}}
    source._run(source._request("put_bucket_versioning", "", suspended))
    assert place.ran("archive", source.url, place.url("none"), *PLAIN, "--as-of", times[0]).code == 2
    glob = ("--as-of", times[0], "--checkpoint-glob", "*")
    assert place.ran("archive", source.url, place.url("none"), *PLAIN, *glob).code == 2


@KNOWS_RANGES_OF_VERSIONS
@pytest.mark.parametrize("now", ["newer", "deleted"])
def test_ranges_of_an_old_version_are_its_own(place: Place, tmp_path: Path, now: str) -> None:
    """O18: many requests of one object that are of the version that was, whatever is there since."""
    source = versioned(place)
    old = safetensors([(f"w{i}", "BF16", [100, 100], bf16(i, 10_000)) for i in range(4)])
    large = noise(1, 1 << 20) * 40
    source.put("model.safetensors", old)
    source.put("large.bin", large)
    when = source.now()
    while source.now() <= when:
        time.sleep(0.1)
    for key, data in (("model.safetensors", old[::-1]), ("large.bin", large[::-1])):
        source.put(key, data)
        if now == "deleted":
            source.delete(key)
    then = time_text(datetime.fromtimestamp(when, UTC))
    as_of = S3Source(source.url.removeprefix("s3://"), place.server.options, versions=True, as_of=then)
    info = {found.key: found for found in as_of.list()}["large.bin"]
    ranges = [(5, 5), (39 << 20, 40 << 20), (0, 33 << 20), (1000, 1007)]
    assert [bytes(part) for part in as_of.get_ranges(info, ranges)] == [large[start:stop] for start, stop in ranges]
    first, _ = as_of.first(info, 100)
    assert first == large[:100]
    few = ("--exclude", "large.bin", "--as-of", then)
    ran = place.ran("archive", source.url, place.url("archive"), *PLAIN, *few)
    assert (ran.code, ran.json["source_bytes"]) == (0, len(old))
    assert place.ran("restore", place.url("archive"), tmp_path / "out").code == 0
    assert files_of(tmp_path / "out") == {"model.safetensors": old}


@SIGNS_NOTHING
def test_a_bucket_with_dots_and_keys_of_headers(place: Place) -> None:
    """G04, G06: path style against an endpoint, and encryption asked for by an option on every object of an archive."""
    bucket = replace(place, server=S3Server(place.server.endpoint, "with.dots.in-it"))
    store = bucket.store("source")
    store._run(store._request("create_bucket", "", {}))
    store.put("a.bin", b"1")
    refuse = Fault(
        "^(PUT .*/archive/|POST .*/archive/.*uploads)", "403 AccessDenied", ALWAYS, header="^((?!AES256).)*$"
    )
    ran = bucket.archive("--storage-option", "sse=AES256", faults=[refuse])
    assert ran.code == 0, ran.err
    archive = bucket.store()
    heads = [archive._call("head_object", info.key) for info in archive.list()]
    assert {head.get("ServerSideEncryption") for head in heads} == {"AES256"}
    Watched(archive).check({"a.bin": b"1"})
