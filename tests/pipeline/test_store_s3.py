"""What only a server can do to us: lost replies, throttling, cut bodies, versions, refused access."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from operators.errors import ChangedError, DeniedError, ExistsError, NotFoundError, PathError, StoreError, UsageError
from pipeline.locations import open_source, open_store
from pipeline.store import ObjectInfo
from pipeline.store_s3 import MAX_PARTS, PART_BYTES, S3Source, S3Store, part_bytes
from tests.faultproxy import ALWAYS, Fault, Proxy, fault_proxy
from tests.s3server import S3Server, s3_server

BIG = 3 * PART_BYTES + 5


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def prefix(server: S3Server, tmp_path: Path) -> str:
    return f"{server.bucket}/{tmp_path.name}"


def direct(server: S3Server, prefix: str) -> S3Store:
    return S3Store(prefix, server.options)


@contextmanager
def faulty(server: S3Server, prefix: str, faults: Sequence[Fault]) -> Iterator[tuple[S3Store, Proxy]]:
    """A store behind a proxy with faults."""
    with fault_proxy(server.endpoint, faults) as proxy:
        yield S3Store(prefix, server.options | {"endpoint_url": proxy.endpoint}), proxy


# -- create-only --------------------------------------------------------------------------------


def test_a_lost_reply_to_our_own_create_is_success(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, [Fault("^PUT", "drop-reply")]) as (store, proxy):
        store.put_new("x", b"mine")
    assert [line[:3] for line in proxy.requests] == ["PUT", "PUT", "GET"]  # the retry is refused, then we look
    assert direct(server, prefix).get("x", max_bytes=4) == b"mine"


def test_a_lost_reply_does_not_hide_that_another_won(server: S3Server, prefix: str) -> None:
    direct(server, prefix).put_new("x", b"mine")  # the same bytes, written by another
    with faulty(server, prefix, [Fault("^PUT", "drop-reply")]) as (store, _), pytest.raises(ExistsError):
        store.put_new("x", b"mine")


def test_a_lost_reply_to_the_end_of_an_upload_is_success(server: S3Server, prefix: str) -> None:
    data = os.urandom(BIG)
    with faulty(server, prefix, [Fault("^POST .*uploadId", "drop-reply")]) as (store, _):
        for key, overwrite in (("new", False), ("x", True)):
            store.write(key, [data], n_bytes=BIG, overwrite=overwrite)
    for key in ("new", "x"):
        info = direct(server, prefix).head(key)
        assert direct(server, prefix).get_ranges(info, [(0, BIG)])[0] == data


def test_two_creates_in_flight_are_tried_again(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, [Fault("^PUT", "409 ConditionalRequestConflict", first=2)]) as (store, proxy):
        store.put_new("x", b"1")
    assert len(proxy.requests) == 3


def test_a_store_that_ignores_the_condition_is_found_out(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, [Fault("^PUT", "strip if-none-match", first=100)]) as (store, proxy):
        assert not store.supports_create_only()
        assert store.list() == []
        alone = open_store(store.url, {**server.options, "endpoint_url": proxy.endpoint}, single_writer=True)
        alone.put_new("x", b"1")
        with pytest.raises(ExistsError):
            alone.put_new("x", b"2")
        with pytest.raises(ExistsError):
            alone.write("x", [b"2"], n_bytes=1, overwrite=False)
        assert alone.get("x", max_bytes=1) == b"1"


def test_a_store_that_refuses_the_condition_says_so(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, [Fault("^PUT", "501 NotImplemented", first=100)]) as (store, _):
        with pytest.raises(StoreError, match="NotImplemented"):
            store.put_new("x", b"1")
        assert store.list() == []


def test_a_probe_that_may_not_be_deleted_stays_and_serves(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, [Fault("^DELETE", "403 AccessDenied", first=9)]) as (store, _):
        assert store.supports_create_only()
        assert store.supports_create_only()
        assert len(store.list()) == 1


def test_etags_without_quotes_in_listings_are_those_of_the_objects(server: S3Server, prefix: str) -> None:
    direct(server, prefix).put_new("x", b"mine")
    with faulty(server, prefix, [Fault("^GET .*list-type", "bare-etags", first=ALWAYS)]) as (store, _):
        (info,) = store.list()
        assert info == store.head("x")
        assert bytes(store.get_ranges(info, [(0, 4)])[0]) == b"mine"
        assert store.get_ranges(info, []) == []
        store.delete_generation(info)
        with pytest.raises(NotFoundError):
            store.head("x")


# -- a store that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["503 SlowDown", "500 InternalError", "drop-reply", "cut-reply"])
def test_passing_faults_are_survived(server: S3Server, prefix: str, action: str) -> None:
    data = os.urandom(BIG)
    faults = [
        Fault("^PUT .*partNumber=2", action),
        Fault("^PUT .*/small", action),
        Fault("^GET .*list-type", action),
        Fault("^GET .*/(big|small)", action, skip=1),
        Fault("^POST .*uploads", action),
        Fault("^HEAD", action),
    ]
    with faulty(server, prefix, faults) as (store, _):
        store.put("big", data)
        store.put_new("small", b"small")
        assert [info.key for info in store.list()] == ["big", "small"]
        assert store.get_ranges(store.head("big"), [(0, BIG), (7, 9)])[0] == data
        assert store.get("small", max_bytes=5) == b"small"
        assert store.get("small", max_bytes=5) == b"small"
    assert all(fault.seen > (action != "cut-reply") for fault in faults)  # an empty body has no half


def test_a_body_that_is_always_cut_is_an_error(server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.store_s3._TRIES", 3)
    direct(server, prefix).put("x", bytes(1000))
    info = direct(server, prefix).head("x")
    with faulty(server, prefix, [Fault("^GET", "cut-reply", first=100)]) as (store, _):
        with pytest.raises(StoreError, match="1000 bytes"):
            store.get_ranges(info, [(0, 1000)])
        with pytest.raises(StoreError, match="1000 bytes"):
            store.get("x", max_bytes=1000)


@pytest.mark.parametrize(
    "match", ["^POST .*uploads", "^PUT .*partNumber=1", "^PUT .*partNumber=3", "^POST .*uploadId", "^PUT"]
)
def test_a_failed_upload_leaves_no_object_and_no_parts(server: S3Server, prefix: str, match: str) -> None:
    with faulty(server, prefix, [Fault(match, "403 AccessDenied", first=100)]) as (store, _):
        with pytest.raises(DeniedError):
            store.put("x", bytes(BIG))
        assert store.list() == []
        uploads = store._run(store._request("list_multipart_uploads", "", {"Prefix": prefix.partition("/")[2]}))
        assert not uploads.get("Uploads")


def test_renewed_credentials_are_picked_up(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, [Fault("^PUT .*partNumber=2", "400 ExpiredToken")]) as (store, _):
        store.put("x", bytes(BIG))
        assert store.head("x").n_bytes == BIG
    with (
        faulty(server, prefix, [Fault("^GET", "400 ExpiredToken", first=100)]) as (store, _),
        pytest.raises(DeniedError, match="ExpiredToken"),
    ):
        store.get("x", max_bytes=BIG)


def test_refused_access_and_absent_buckets_have_names(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, [Fault(".", "403 AccessDenied", first=100)]) as (store, _):
        for attempt in (store.list, lambda: store.head("x"), lambda: store.put_new("x", b"1")):
            with pytest.raises(DeniedError):
                attempt()
    with pytest.raises(NotFoundError):
        open_source("s3://no-such-bucket/x", server.options).list()
    with pytest.raises(StoreError):
        open_source(
            "s3://bucket/x", server.options | {"endpoint_url": "http://127.0.0.1:9", "connect_timeout": "1"}
        ).list()


# -- reading one generation ---------------------------------------------------------------------


def test_a_store_that_ignores_if_match_is_still_checked(server: S3Server, prefix: str) -> None:
    direct(server, prefix).put("x", b"first")
    info = direct(server, prefix).head("x")
    direct(server, prefix).put("x", b"again")
    with faulty(server, prefix, [Fault("^GET", "strip if-match", first=9)]) as (store, _), pytest.raises(ChangedError):
        store.get_ranges(info, [(0, 5)])


def test_an_object_replaced_between_two_requests_is_never_mixed(server: S3Server, prefix: str) -> None:
    store, data = direct(server, prefix), os.urandom(20 << 20)
    store.put("x", data)
    info = store.head("x")
    assert store.get_ranges(info, [(0, 10)])[0] == data[:10]
    store.put("x", data[::-1])
    with pytest.raises(ChangedError):
        store.get_ranges(info, [(0, len(data))])


def test_a_version_stays_readable(server: S3Server, prefix: str) -> None:
    store = direct(server, f"{server.bucket}-versions/{prefix}")
    store._run(store._request("create_bucket", "", {}))
    store._run(store._request("put_bucket_versioning", "", {"VersioningConfiguration": {"Status": "Enabled"}}))
    store.put("x", b"first")
    old = store.head("x")
    store.put("x", b"again")
    assert old.version is not None
    assert bytes(store.get_ranges(old, [(0, 5)])[0]) == b"first"
    assert store.get("x", max_bytes=5) == b"again"
    store.delete("x")  # a marker: the object is gone from the list, not from history
    assert store.list() == []
    with pytest.raises(NotFoundError):
        store.head("x")


def test_a_short_object_is_not_read_as_a_long_one(server: S3Server, prefix: str) -> None:
    store = direct(server, prefix)
    store.put("x", b"12345")
    with pytest.raises(StoreError):
        store.get_ranges(ObjectInfo("x", 9, ""), [(0, 9)])


def test_near_ranges_share_requests(server: S3Server, prefix: str) -> None:
    direct(server, prefix).put("x", bytes(20 << 20))
    with faulty(server, prefix, []) as (store, proxy):
        info = store.head("x")
        store.get_ranges(info, [(i * 5000, i * 5000 + 100) for i in range(400)])
        assert len(proxy.requests) == 2
        store.get_ranges(info, [(0, 20 << 20)])
        assert len(proxy.requests) == 4


def test_encryption_is_asked_for_on_every_write(server: S3Server, prefix: str) -> None:
    store = S3Store(prefix, server.options | {"sse": "AES256"})
    store.put_new("small", b"1")
    store.put("big", bytes(BIG))
    assert {store._call("head_object", key)["ServerSideEncryption"] for key in ("small", "big")} == {"AES256"}
    assert store.get("small", max_bytes=1) == b"1"


# -- keys ---------------------------------------------------------------------------------------


def test_keys_that_mark_folders_are_objects(server: S3Server, prefix: str) -> None:
    store = direct(server, prefix)
    names = {"p/dirmark/": b"", "p/dirmark/x": b"1", "p/alone/": b"", "p/trail/": b"12345", "p/../up.bin": b"2",
             "/lead.bin": b"3", "p//double": b"4", "p/./dot.bin": b"5"}  # fmt: skip
    for key, data in names.items():
        store.put_new(key, data)
    source = open_source(store.url, server.options)
    assert {info.key: bytes(source.get_ranges(info, [(0, info.n_bytes)])[0]) for info in source.list()} == names
    folder = open_source(f"{store.url}/p/dirmark", server.options)
    assert [info.key for info in folder.list()] == ["x"]
    with pytest.raises(UsageError):
        open_source(f"{store.url}/p/trail/", server.options).list()


def test_a_whole_bucket_and_long_keys(server: S3Server, prefix: str) -> None:
    store = direct(server, f"{server.bucket}-whole")
    store._run(store._request("create_bucket", "", {}))
    assert open_source("s3://checkpoints-whole", server.options).list() == []
    store.put_new("k" * 1024, b"1")
    store.put_new("n" * 300 + "/x", b"2")
    assert [len(info.key) for info in open_source("s3://checkpoints-whole/", server.options).list()] == [1024, 302]
    with pytest.raises(PathError):
        store.stage("k" * 1025, n_bytes=1, overwrite=True)
    assert list(store.refused_keys(["ok", "k" * 1025, "", "../ok"])) == ["k" * 1025, ""]


def test_listings_have_many_pages(server: S3Server, prefix: str) -> None:
    with faulty(server, prefix, []) as (store, proxy):
        names = [f"{i:04}" for i in range(1005)]
        for name in names:
            store.put(name, b"")
        proxy.requests.clear()
        assert [info.key for info in store.list()] == names
        assert len(proxy.requests) == 2


def test_parts_grow_so_that_ten_thousand_do() -> None:
    """G16."""
    for n_bytes in (0, 1, 160 << 30, 5 << 40):
        size = part_bytes(n_bytes)
        assert size >= PART_BYTES
        assert -(-n_bytes // size) <= MAX_PARTS


def test_parts_are_made_of_pieces_that_change_and_sent_from_memory_that_is_used_again(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts than are sent at once; pieces that are larger and smaller than them, the last part a byte."""
    monkeypatch.setattr("pipeline.store_s3.part_bytes", lambda _: 1 << 14)
    whole, piece = os.urandom((12 << 14) + 1), bytearray(40_000)
    for step in (40_000, 1 << 14, 999):

        def pieces(step: int = step) -> Iterator[memoryview]:
            for start in range(0, len(whole), step):
                part = whole[start : start + step]
                piece[: len(part)] = part
                yield memoryview(piece)[: len(part)]

        store = direct(server, prefix)
        store.write("x", pieces(), n_bytes=len(whole), overwrite=True)
        assert store.get("x", max_bytes=len(whole)) == whole


def test_an_upload_is_completed_with_its_parts_in_order(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 refuses any other order, which ministack takes."""
    monkeypatch.setattr("pipeline.store_s3.part_bytes", lambda _: 1 << 14)
    store, named = direct(server, prefix), list[int]()
    staged = store.stage("x", n_bytes=3 << 14, overwrite=False)
    written = [store.write_stretch(staged, n << 14, n + 1 << 14, [bytes(1 << 14)]) for n in (2, 0, 1)]
    call = store._call

    def heard(verb: str, key: str, **request: Any) -> Any:
        named.extend(part["PartNumber"] for part in request.get("MultipartUpload", {}).get("Parts", []))
        return call(verb, key, **request)

    monkeypatch.setattr(store, "_call", heard)
    store.publish(staged, [one for some in written for one in some])
    assert named == [1, 2, 3]


def test_the_environment_names_endpoint_and_credentials(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    store = S3Store(prefix, {})
    store.put_new("x", b"1")
    packed = pickle.dumps(store)
    assert b"loopback-only" not in packed
    assert server.endpoint.encode() not in packed
    assert isinstance(pickle.loads(packed), S3Source)
    assert pickle.loads(packed).get("x", max_bytes=1) == b"1"


def test_stores_of_equal_options_and_environment_share_a_client(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [S3Store(f"{prefix}/{name}", server.options) for name in "abc"]
    stores.append(S3Store(f"{prefix}/d", {**server.options, "read_timeout": "61"}))
    for store in stores:
        if store is stores[2]:
            monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
        store.put_new("x", b"1")
    clients = [store._client for store in stores]
    assert clients[0] is clients[1]
    assert len(set(map(id, clients))) == 3
