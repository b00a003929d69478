"""One contract for every store: local folder, memory, S3."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import (
    ArchiveError,
    ChangedError,
    ExistsError,
    LimitError,
    NotFoundError,
    PathError,
    StoreError,
    UsageError,
)
from pipeline.keys import clashing_keys
from pipeline.locations import open_source, open_store
from pipeline.store import ObjectInfo, SourceStore, Staged, Store
from pipeline.store_base import MAX_GAP_BYTES, MAX_REQUEST_BYTES, coalesce
from pipeline.store_fsspec import FsspecStore
from pipeline.store_s3 import PART_BYTES, S3Store
from tests.radosgw import SERVERS, running
from tests.s3server import S3Server

WRITE_VERBS = (
    "put_new", "put", "write", "stage", "write_stretch", "publish", "abandon", "delete", "delete_generation",
    "discard", "supports_create_only",
)  # fmt: skip
ODD_NAMES = (
    "a b", "a#b", "a%20b", "a%2Fb", "a+b", "a?b", "a*b", "br[ack]et.bin", "[0-9]", "{a}", "&=", "'\"", "~", "c:d",
    "back\\slash", "grüße", "模型", "e\u0301", "\U0001f600", "-rf", "a?versionId=7", "trailing.", " lead", "x" * 255,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    url: str
    options: dict[str, str] = field(default_factory=dict)

    def store(self) -> Store:
        return open_store(self.url, self.options)

    def source(self, suffix: str = "") -> SourceStore:
        return open_source(self.url + suffix, self.options)


@pytest.fixture(scope="module")
def ministack() -> Iterator[S3Server]:
    with running("ministack") as server:
        yield server


@pytest.fixture(scope="module")
def radosgw() -> Iterator[S3Server]:
    with running("radosgw") as server:
        yield server


@pytest.fixture(params=["local", "memory", *SERVERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "root"))
    if request.param == "memory":
        return Place(f"memory://{tmp_path.name}-{os.getpid()}/root")
    server: S3Server = request.getfixturevalue(request.param)
    return Place(server.url(f"{tmp_path.name}/root"), server.options)


def keys(store: SourceStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def read(store: SourceStore, key: str) -> bytes:
    info = store.head(key)
    return bytes(store.get_ranges(info, [(0, info.n_bytes)])[0])


def test_an_absent_object_is_not_found(place: Place) -> None:
    store = place.store()
    assert store.list() == []
    store.put_new("here/x", b"1")
    for key in ("x", "here", "here/y", "here/x/y"):
        with pytest.raises(NotFoundError) as caught:
            store.head(key)
        assert key in str(caught.value)
        with pytest.raises(NotFoundError):
            store.get(key, max_bytes=10)
        with pytest.raises(NotFoundError):
            store.get_ranges(ObjectInfo(key, 1, ""), [(0, 1)])
    store.delete("here/y")
    assert keys(store) == ["here/x"]


def test_an_absent_source_is_not_found(place: Place) -> None:
    with pytest.raises(NotFoundError):
        place.source("/nowhere").list()


def test_put_new_never_replaces(place: Place) -> None:
    store = place.store()
    store.put_new("a/b/c", b"first")
    for data in (b"second", b"first", b""):
        with pytest.raises(ExistsError):
            store.put_new("a/b/c", data)
    assert store.get("a/b/c", max_bytes=5) == b"first"
    assert keys(store) == ["a/b/c"]


@pytest.mark.parametrize("turns", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_one_of_many_writers_wins(place: Place, turns: int) -> None:
    """T13."""
    store = place.store()
    for turn in range(turns):
        barrier = threading.Barrier(16)
        won: list[bytes] = []

        def write(name: bytes, key: str = f"race/{turn}", barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                store.put_new(key, name)
            except ExistsError:
                return
            won.append(name)  # noqa: B023  # joined below, before the next turn

        threads = [threading.Thread(target=write, args=(b"%d" % i * 100,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [store.get(f"race/{turn}", max_bytes=1000)]


def test_ranges(place: Place) -> None:
    store = place.store()
    data = os.urandom(3 * MAX_GAP_BYTES)
    store.put("x", data)
    n, info = len(data), store.head("x")
    asked = [(0, n), (n, n), (0, 0), (n - 1, n), (5, 9), (7, 30), (2 * MAX_GAP_BYTES + 50, n - 3), (0, 1), (9, 11)]
    found = store.get_ranges(info, asked)
    assert [bytes(view) for view in found] == [data[start:stop] for start, stop in asked]
    assert all(view.readonly for view in found)
    assert store.get_ranges(info, []) == []
    for wrong in ((0, n + 1), (-1, 4), (4, 3), (n + 1, n + 1)):
        with pytest.raises(StoreError):
            store.get_ranges(info, [(0, 1), wrong])


def in_one_buffer(data: bytes) -> Iterator[memoryview]:
    """Yield pieces, each where the one before it was."""
    buffer = bytearray(5_000_011)
    for start in range(0, len(data), len(buffer)):
        piece = data[start : start + len(buffer)]
        buffer[: len(piece)] = piece
        yield memoryview(buffer)[: len(piece)]


@pytest.mark.parametrize("n_bytes", [0, 1, 12 << 20, 41 << 20])
def test_sizes(place: Place, tmp_path: Path, n_bytes: int) -> None:
    store = place.store()
    data = os.urandom(n_bytes)
    store.put("whole", data)
    path = tmp_path / "file"
    path.write_bytes(data)
    store.put("file", path)
    store.put("file", path)  # a second time writes the same
    store.write("pieces", in_one_buffer(data), n_bytes=n_bytes, overwrite=False)
    assert [(info.key, info.n_bytes) for info in store.list()] == [(k, n_bytes) for k in ("file", "pieces", "whole")]
    for info in store.list():
        assert store.get_ranges(info, [(0, n_bytes)])[0] == data
        assert store.get(info.key, max_bytes=n_bytes) == data
        if n_bytes:
            with pytest.raises(LimitError):
                store.get(info.key, max_bytes=n_bytes - 1)


def test_another_generation_is_refused(place: Place) -> None:
    store, source = place.store(), place.source()
    store.put("x", b"first")
    store.put("empty", b"")
    old, empty = source.list()[1], source.list()[0]
    assert old == store.head("x")
    assert bytes(source.get_ranges(old, [(0, 5)])[0]) == b"first"
    store.put("x", b"again")  # the same size
    store.put("empty", b"x")
    with pytest.raises(ChangedError):
        source.get_ranges(old, [(0, 2)])
    with pytest.raises(ChangedError):
        source.get_ranges(empty, [(0, 0)])
    assert bytes(source.get_ranges(replace(old, etag=""), [(0, 5)])[0]) == b"again"  # no token, no check
    store.delete("x")
    with pytest.raises(NotFoundError):
        source.get_ranges(store_info := replace(old, etag="", version=None), [(0, 2)])
    with pytest.raises(NotFoundError):
        source.get_ranges(store_info, [(0, 2)])


def test_a_list_shows_what_was_just_written(place: Place) -> None:
    store = place.store()
    names = ["b", "a/z", "a/é", "a-b", "a/b/c", "Z", "a.b"]
    for i, name in enumerate(names):
        store.put_new(name, b"x" * i)
        assert keys(store) == sorted(names[: i + 1], key=str.encode)
    assert keys(store, "a/") == sorted((n for n in names if n.startswith("a/")), key=str.encode)
    assert keys(store, "a") == sorted((n for n in names if n.startswith("a")), key=str.encode)
    assert keys(store, "a/b/c") == ["a/b/c"]
    assert keys(store, "none") == []
    store.delete("a/z")
    assert "a/z" not in keys(store)


def test_keys_are_exact(place: Place) -> None:
    store = place.store()
    odd = [f"odd/{name}" for name in ODD_NAMES] + ["odd/a-b", "odd/acb"]  # the last two match patterns above
    for key in odd:
        store.put_new(key, key.encode())
    assert keys(store) == sorted(odd, key=str.encode)
    source = place.source()
    assert [read(source, key) for key in odd] == [key.encode() for key in odd]
    store.delete("odd/a*b")
    store.delete("odd/a?b")
    assert set(odd) - set(keys(store)) == {"odd/a*b", "odd/a?b"}
    for key in odd[:8]:
        store.write(key, [b"new"], n_bytes=3, overwrite=True)
        assert store.get(key, max_bytes=3) == b"new"


@pytest.mark.parametrize("key", ["../escaped", "a/../../x", "/x", "a//b", "a/./b", "a\0b", ".."])
def test_keys_that_leave_a_target_of_fsspec_are_refused(tmp_path: Path, key: str) -> None:
    """The folder of this machine, as fsspec sees it, stands for every file system that follows '..'."""
    folder = tmp_path / "root"
    folder.mkdir()
    (tmp_path / "x").write_bytes(b"theirs")
    store = FsspecStore(f"file://{folder}", {})
    attempts: tuple[Callable[[], object], ...] = (
        lambda: store.put_new(key, b"1"),
        lambda: store.put(key, b"1"),
        lambda: store.write(key, [b"1"], n_bytes=1, overwrite=True),
        lambda: store.write(key, [b"1"], n_bytes=1, overwrite=False),
        lambda: store.delete(key),
    )
    for attempt in attempts:
        with pytest.raises(PathError):
            attempt()
    assert list(store.refused_keys(["fine", key])) == [key]
    assert [path.name for path in tmp_path.iterdir()] in (["root", "x"], ["x", "root"])
    assert list(folder.iterdir()) == []
    assert (tmp_path / "x").read_bytes() == b"theirs"


def test_a_url_selects_a_folder_an_object_or_a_stem(place: Place) -> None:
    store = place.store()
    for key in ("run/step-1/x", "run/step-10/x", "run/step-1.json", "top"):
        store.put_new(key, key.encode())
    assert keys(place.source("/run/step-1")) == ["x"]
    assert keys(place.source("/run/step-1/")) == ["x"]
    assert keys(place.source("/run")) == ["step-1.json", "step-1/x", "step-10/x"]
    assert keys(place.source("/run/step-1*")) == ["step-1.json", "step-1/x", "step-10/x"]
    assert keys(place.source("/run/step-1*"), "step-10") == ["step-10/x"]
    assert keys(place.source("/run/step-1*"), "s") == ["step-1.json", "step-1/x", "step-10/x"]
    assert keys(place.source("/run/step-1*"), "t") == []
    single = place.source("/run/step-1.json")
    assert keys(single) == ["step-1.json"]
    assert read(single, "step-1.json") == b"run/step-1.json"
    elsewhere = pickle.loads(pickle.dumps(place.source("/run/step-1.json")))  # resolved by the process that reads
    assert read(elsewhere, "step-1.json") == b"run/step-1.json"


class PlannedError(Exception):
    """Not one of ours, so that nothing but the test can have raised it."""


@pytest.mark.parametrize("n_bytes", [0, 4, 40 << 20])
@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_appears_of_what_is_not_all_there(place: Place, n_bytes: int, overwrite: bool) -> None:
    store = place.store()
    store.put_new("kept", b"old")

    def failing() -> Iterator[bytes]:
        yield bytes(n_bytes)
        raise PlannedError

    for key in ("deep/x", "kept") if overwrite else ("deep/x",):
        with pytest.raises(PlannedError):
            store.write(key, failing(), n_bytes=n_bytes, overwrite=overwrite)
        for wrong in (n_bytes + 1, n_bytes - 1)[: 1 + (n_bytes > 0)]:
            with pytest.raises(StoreError, match=f"{wrong} bytes"):
                store.write(key, [bytes(n_bytes)], n_bytes=wrong, overwrite=overwrite)
    assert store.unfinished() == []
    assert keys(store) == ["kept"]
    assert store.get("kept", max_bytes=3) == b"old"
    if not place.options and "://" not in place.url:
        assert [path.name for path in Path(place.url).rglob("*") if path.is_file()] == ["kept"]


@pytest.mark.parametrize("n_bytes", [4, 40 << 20])
def test_writing_refuses_or_replaces(place: Place, n_bytes: int) -> None:
    store = place.store()
    store.put_new("x", b"old")

    def late() -> Iterator[bytes]:
        yield bytes(n_bytes)
        store.put_new("y", b"theirs")  # between the look and the end

    for key, data in (("x", iter([bytes(n_bytes)])), ("y", late())):
        with pytest.raises(ExistsError):
            store.write(key, data, n_bytes=n_bytes, overwrite=False)
    assert (store.get("x", max_bytes=10), store.get("y", max_bytes=10)) == (b"old", b"theirs")
    store.write("x", [bytes(n_bytes)], n_bytes=n_bytes, overwrite=True)
    assert store.head("x").n_bytes == n_bytes
    assert keys(store) == ["x", "y"]


def test_a_source_cannot_write(place: Place) -> None:
    assert all(hasattr(place.store(), verb) for verb in WRITE_VERBS)
    assert not any(hasattr(place.source(), verb) for verb in WRITE_VERBS)


def test_only_the_generation_that_is_meant_goes(
    place: Place, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.store()
    if isinstance(store, FsspecStore):
        store.put_new("a", b"1")
        with pytest.raises(StoreError, match="a local folder or S3"):
            store.delete_generation(store.head("a"))
        assert keys(store) == ["a"]
        return
    store.put("a/b", b"first")
    store.put("a/c", b"stays")
    old = store.head("a/b")
    store.put("a/b", b"other")
    with pytest.raises(ChangedError):
        store.delete_generation(old)
    assert read(store, "a/b") == b"other"
    new = store.head("a/b")
    if "ministack" in request.node.name:
        with monkeypatch.context() as patch:  # it knows the condition of the request, without our look before it
            patch.setattr(S3Store, "head", lambda *_: old)
            with pytest.raises(ChangedError):
                store.delete_generation(old)
        assert read(store, "a/b") == b"other"
    store.delete_generation(new)
    assert keys(store) == ["a/c"]
    with pytest.raises(NotFoundError):
        store.delete_generation(new)


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "root" / "blobs").mkdir(parents=True)
    (tmp_path / "root" / "blobs" / "1").write_bytes(b"1")
    (tmp_path / "root" / "link").symlink_to("blobs/1")
    (tmp_path / "root" / "folder").symlink_to("blobs")
    store = open_store(str(tmp_path / "root"))
    for key in ("link", "folder/1"):
        with pytest.raises(PathError, match="a link"):
            store.delete_generation(store.head(key))
    (tmp_path / "other").symlink_to("root")
    other = open_store(str(tmp_path / "other"))
    other.delete_generation(other.head("blobs/1"))
    assert not (tmp_path / "root" / "blobs" / "1").exists()


def test_create_only_is_probed_and_leaves_nothing(place: Place) -> None:
    store = place.store()
    assert store.supports_create_only()
    assert store.supports_create_only()
    assert store.list() == []


def test_objects_have_an_age_by_the_clock_of_the_store(place: Place) -> None:
    store = place.store()
    before = store.now()
    for key in ("a/x", "a/y", "b"):
        store.put_new(key, b"12")
    assert abs(before - time.time()) < 60
    for prefix, names in (("", ["a/x", "a/y", "b"]), ("a/", ["a/x", "a/y"]), ("c", [])):
        found = sorted(store.dated(prefix), key=lambda item: item.key)
        assert [(item.key, item.n_bytes) for item in found] == [(name, 2) for name in names]
        assert all(before - 1 <= item.written <= store.now() + 1 for item in found)


def test_what_was_never_published_is_found_and_discarded(place: Place) -> None:
    store = place.store()
    store.put_new("folder/whole", b"1")
    staged = store.stage("folder/half", n_bytes=2 * PART_BYTES, overwrite=True)
    if place.url.startswith("memory:"):  # one writer alone, which keeps everything here
        assert staged is None
        assert store.unfinished() == []
        return
    assert staged is not None
    store.write_stretch(staged, 0, PART_BYTES, [bytes(PART_BYTES)])
    left = store.unfinished()
    assert keys(store) == ["folder/whole"]
    assert len(left) == 1
    assert left[0].key.startswith("folder/")
    assert abs(left[0].written - store.now()) < 60
    store.discard(left[0])
    store.discard(left[0])
    assert store.unfinished() == []
    assert keys(store) == ["folder/whole"]


def staging(place: Place, key: str, n_bytes: int, *, overwrite: bool = False) -> tuple[Store, Staged]:
    """Stage an object in a store that can."""
    store = place.store()
    staged = store.stage(key, n_bytes=n_bytes, overwrite=overwrite)
    assert staged is not None
    return store, staged


@pytest.mark.parametrize("place", ["local", *SERVERS], indirect=True)
def test_an_object_is_written_by_many_in_any_order_and_more_than_once(place: Place) -> None:
    data = os.urandom(3 * PART_BYTES + 5)
    store, staged = staging(place, "a/x", len(data))
    stretches = []
    for begin, end in ((2 * PART_BYTES, len(data)), (0, 2 * PART_BYTES), (2 * PART_BYTES, len(data))):
        assert keys(store) == []
        elsewhere = pickle.loads(pickle.dumps(store))
        written = elsewhere.write_stretch(
            pickle.loads(pickle.dumps(staged)), begin, end, in_one_buffer(data[begin:end])
        )
        assert (written[0].begin, written[-1].end) == (begin, end)
        stretches.append(written)
    with pytest.raises(StoreError, match=f"none at {2 * PART_BYTES}"):
        store.publish(staged, stretches[1])
    assert keys(store) == []
    store.publish(staged, [*stretches[2], *stretches[1]])
    store.abandon(staged)
    assert read(store, "a/x") == data
    assert store.unfinished() == []
    with pytest.raises(NotFoundError):  # a worker that comes late
        store.write_stretch(staged, 0, 2 * PART_BYTES, [data[: 2 * PART_BYTES]])
    assert read(store, "a/x") == data


@pytest.mark.parametrize("place", ["local", *SERVERS], indirect=True)
def test_what_is_abandoned_leaves_nothing(place: Place) -> None:
    n_bytes = 2 * PART_BYTES
    store, staged = staging(place, "a/x", n_bytes)
    store.write_stretch(staged, 0, PART_BYTES, [bytes(PART_BYTES)])
    for wrong in (PART_BYTES - 1, PART_BYTES + 1):
        with pytest.raises(StoreError, match=f"{PART_BYTES} bytes"):
            store.write_stretch(staged, PART_BYTES, n_bytes, [bytes(wrong)])
    for _ in range(2):
        store.abandon(staged)
    assert store.unfinished() == []
    assert keys(store) == []
    with pytest.raises(NotFoundError):
        store.write_stretch(staged, PART_BYTES, n_bytes, [bytes(PART_BYTES)])
    assert store.unfinished() == []


@pytest.mark.parametrize("place", ["local", *SERVERS], indirect=True)
@pytest.mark.parametrize("overwrite", [False, True])
def test_publishing_refuses_or_replaces(place: Place, overwrite: bool) -> None:
    n_bytes = PART_BYTES + 1
    store, staged = staging(place, "x", n_bytes, overwrite=overwrite)
    written = store.write_stretch(staged, 0, n_bytes, [bytes(n_bytes)])
    store.put_new("x", b"theirs")
    if overwrite:
        store.publish(staged, written)
    else:
        with pytest.raises(ExistsError):
            store.publish(staged, written)
        with pytest.raises(ExistsError):
            store.stage("x", n_bytes=n_bytes, overwrite=False)
        store.abandon(staged)
    assert store.head("x").n_bytes == (n_bytes if overwrite else 6)
    assert store.unfinished() == []


def test_a_store_travels_as_url_and_options(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    store = place.store()
    store.put_new("x", b"1")
    packed = pickle.dumps(store)
    assert b"from-the-environment" not in packed
    assert pickle.loads(packed).get("x", max_bytes=1) == b"1"
    assert all(secret not in repr(store) for secret in place.options.values() if secret != "test")


@pytest.mark.parametrize("url", ["", "s3://", "s3:///x", "memory://"])
def test_urls_that_name_nothing(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean endpoint_url"):
        open_source("s3://bucket/x", {"endpoint": "http://127.0.0.1:1"})
    assert open_source(str(tmp_path), {"endpoint_url": "x"}).list() == []  # one command, a path and a bucket
    for wrong in ({"anon": "perhaps"}, {"read_timeout": "0"}, {"connect_timeout": "1.5"}):
        with pytest.raises(UsageError):
            open_source("s3://bucket/x", wrong)
    with pytest.raises(ArchiveError):
        open_source("nosuchprotocol://x").list()


@given(st.lists(st.tuples(st.integers(0, 1 << 25), st.integers(0, 1 << 24)), max_size=20))
def test_coalescing_covers_each_range_once(pairs: list[tuple[int, int]]) -> None:
    ranges = [(start, start + length) for start, length in pairs]
    stretches = coalesce(ranges)
    assert sorted(i for _, _, members in stretches for i in members) == [i for i, (_, n) in enumerate(pairs) if n]
    for start, stop, members in stretches:
        assert start == min(ranges[i][0] for i in members)
        assert stop == max(ranges[i][1] for i in members)
        assert stop - start <= max(MAX_REQUEST_BYTES, *(ranges[i][1] - ranges[i][0] for i in members))
    assert [start for start, _, _ in stretches] == sorted(start for start, _, _ in stretches)


@given(st.lists(st.text("aAbß/", min_size=1, max_size=6), max_size=12, unique=True), st.booleans())
def test_keys_that_do_not_clash_make_a_tree(names: list[str], fold_case: bool) -> None:
    names = [name.strip("/") for name in names if name.strip("/") and "//" not in name]
    clashes = clashing_keys(names, fold_case=fold_case)
    files: set[str] = set()
    for name in dict.fromkeys(name for name in names if name not in clashes):
        folded = name.casefold() if fold_case else name
        assert folded not in files
        assert not any(other.startswith(f"{folded}/") or folded.startswith(f"{other}/") for other in files)
        files.add(folded)
    assert all(other in names for other in clashes.values())
