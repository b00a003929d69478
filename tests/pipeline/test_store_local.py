"""What only a file system can do to us: links, names, permissions, changes in place."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import ChangedError, DeniedError, ExistsError, NotFoundError, PathError, StoreError
from pipeline import store_local
from pipeline.cli import main
from pipeline.keys import clashing_keys, safe_local_path
from pipeline.locations import absolute_url, open_source, open_store
from pipeline.store import ObjectInfo
from pipeline.store_local import LocalStore
from tests.pipeline.commands import write

UNSAFE = ["", "/", "/etc/x", "../x", "a/../../x", "a/..", "..", "a/./b", "a//b", ".", "a\0b", "x" * 256,
          "ä" * 128, "/".join(["x" * 200] * 21)]  # fmt: skip


@pytest.mark.parametrize("key", UNSAFE)
def test_keys_that_leave_the_target_are_refused(tmp_path: Path, key: str) -> None:
    store = open_store(str(tmp_path / "root"))
    for attempt in (
        lambda: store.put_new(key, b"1"),
        lambda: store.put(key, b"1"),
        lambda: store.write(key, [b"1"], n_bytes=1, overwrite=True),
        lambda: store.stage(key, n_bytes=1, overwrite=True),
        lambda: store.head(key),
        lambda: store.delete(key),
        lambda: store.get_ranges(ObjectInfo(key, 1, ""), [(0, 1)]),
    ):
        with pytest.raises(PathError):
            attempt()
    assert list(store.refused_keys(["fine", key])) == [key]
    assert not (tmp_path / "root").exists() or not any((tmp_path / "root").iterdir())


@given(st.text(st.characters(codec="utf-8"), max_size=12) | st.text("./\\a\0", max_size=8))
def test_an_accepted_key_stays_inside(key: str) -> None:
    try:
        parts = safe_local_path("/base", key)
    except PathError:
        return
    path = os.path.normpath("/base/" + "/".join(parts))
    assert path == f"/base/{key.removesuffix('/')}"
    assert path.startswith("/base/")


@pytest.mark.parametrize("is_folder", [True, False])
def test_links_in_the_way_are_not_followed(tmp_path: Path, is_folder: bool) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"theirs")
    store = open_store(str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(outside if is_folder else outside / "x")
    for overwrite in (False, True):
        with pytest.raises(PathError):
            store.write("link/x", [b"1"], n_bytes=1, overwrite=overwrite)
    with pytest.raises(PathError):
        store.put_new("link/x", b"1")
    with pytest.raises(ExistsError):
        store.stage("link", n_bytes=4, overwrite=False)
    store.write("link", [b"ours"], n_bytes=4, overwrite=True)  # replaces the link, not what it names
    assert (outside / "x").read_bytes() == b"theirs"
    assert store.get("link", max_bytes=4) == b"ours"


def test_files_and_folders_in_the_way(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put_new("file", b"1")
    store.put_new("folder/x", b"1")
    with pytest.raises(PathError):
        store.stage("file/x", n_bytes=0, overwrite=True)
    with pytest.raises(ExistsError):
        store.stage("folder", n_bytes=0, overwrite=False)
    with pytest.raises(StoreError):
        store.write("folder", [], n_bytes=0, overwrite=True)
    assert store.unfinished() == []
    assert [info.key for info in store.list()] == ["file", "folder/x"]


def test_restored_files_have_the_usual_mode(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        open_store(str(tmp_path)).write("a/x", [], n_bytes=0, overwrite=False)
        assert stat.S_IMODE((tmp_path / "a/x").stat().st_mode) == 0o640
    finally:
        os.umask(old)


def test_folder_keys_are_folders(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for key in ("mark/", "a/b/"):
        store.write(key, [], n_bytes=0, overwrite=False)
    store.put_new("a/x", b"1")
    source = open_source(str(tmp_path))
    assert [info.key for info in source.list()] == ["a/b/", "a/x", "mark/"]
    assert [bytes(source.get_ranges(info, [(0, info.n_bytes)])[0]) for info in source.list()] == [b"", b"1", b""]
    assert [info.key for info in store.list()] == ["a/x"]
    with pytest.raises(ExistsError):
        store.write("mark/", [], n_bytes=0, overwrite=False)
    with pytest.raises(PathError):
        store.write("full/", [b"12345"], n_bytes=5, overwrite=False)
    with pytest.raises(PathError):
        store.stage("full/", n_bytes=5, overwrite=False)


def test_a_link_to_a_file_is_read_through(tmp_path: Path) -> None:
    """Model caches keep blobs in one folder and links to them in another."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(b"weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to("../blobs/1")
    source = open_source(str(tmp_path / "snapshot"))
    assert [(info.key, info.n_bytes) for info in source.list()] == [("model", 7)]
    assert source.get("model", max_bytes=7) == b"weights"


def test_only_a_spooled_file_of_ours_is_not_listed(tmp_path: Path) -> None:
    ours = f".brevis-{'0a' * 8}.part"
    theirs = [f"{ours}/x", ".brevis-.part", ".brevis-old.part", f"sub/{ours}.part"]
    write(tmp_path, {**dict.fromkeys(theirs, b"theirs"), f"sub/{ours}": b"ours"})
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / ours).symlink_to(tmp_path / theirs[1])
    assert [info.key for info in open_source(str(tmp_path)).list()] == sorted([*theirs, f"link/{ours}"])


NO_FILES = {
    "dangling": "a dangling link",
    "self": "a loop of links",
    "above": "a link to a folder above it",
    "pipe": "a pipe",
    "socket": "a socket",
}


def make_no_file(odd: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(odd))
    else:
        odd.symlink_to({"dangling": odd.with_name("nowhere"), "self": odd, "above": odd.parent}[kind])


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_listed_and_fails_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)  # the address of a socket is at most 107 bytes
    make_no_file(Path("a/odd") if kind == "socket" else tmp_path / "a/odd", kind)
    (tmp_path / "a" / "x").write_bytes(b"1")
    source = open_source(str(tmp_path))
    listed = source.list()
    assert [info.key for info in listed] == ["a/odd", "a/x"]
    assert listed == source.list()  # no change of generation while nothing changes
    assert listed[0].n_bytes > 0  # an empty file would be archived without a look
    for ranges in ([], [(0, 0)], [(0, 1)]):
        with pytest.raises(NotFoundError, match=NO_FILES[kind]) as caught:
            source.get_ranges(listed[0], ranges)
        assert "a/odd" in str(caught.value)
    assert bytes(source.get_ranges(listed[1], [(0, 1)])[0]) == b"1"


@pytest.mark.parametrize("refused", ["stat", "scandir"])
def test_a_folder_that_may_not_be_read_is_one_failure_and_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: str
) -> None:
    source = write(tmp_path / "source", {"a/lost/x": b"1", "b": b"2"})
    own = Path if refused == "stat" else os
    real = getattr(own, refused)

    def denied(path: object, *more: object, **named: object) -> object:
        if str(path).rstrip("/").endswith("lost"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *more, **named)

    monkeypatch.setattr(own, refused, denied)
    store = open_source(str(source))
    lost, kept = store.list()
    assert (lost.key, kept.key) == ("a/lost", "b")
    with pytest.raises(NotFoundError, match="a folder that may not be read"):
        store.get_ranges(lost, [(0, 1)])
    for prefix in ("a", "a/lost/"):  # as archives are listed
        with pytest.raises(DeniedError):
            store.list(prefix)
    command = ["archive", str(source), str(tmp_path / "vault"), "--workers", "1", "--no-progress"]
    assert main([*command, "--json"]) == 3
    assert [failure["key"] for failure in json.loads(capsys.readouterr().out)["failures"]] == ["a/lost"]
    assert main([*command, "--exclude", "a/lost"]) == 0
    with pytest.raises(DeniedError):
        list(open_source(str(source / "a/lost")).list())


def test_a_listing_leaves_out_what_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gone", "x"):
        (tmp_path / name).touch()
    real = os.scandir

    def late(path: str) -> object:
        entries = real(path)
        (tmp_path / "gone").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(os, "scandir", late)
    assert [info.key for info in open_source(str(tmp_path)).list()] == ["x"]


def test_what_is_no_file_is_one_failure_and_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "x").write_bytes(b"weights")
    for kind in ("dangling", "above", "pipe"):
        make_no_file(source / f"{kind}.odd", kind)
    command = ["archive", str(source), str(tmp_path / "archive"), "--workers", "1", "--no-progress"]
    assert main([*command, "--json"]) == 3
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert sorted(failure["key"] for failure in failures) == ["above.odd", "dangling.odd", "pipe.odd"]
    assert main([*command, "--exclude", "*.odd"]) == 0


def test_an_absent_folder_is_refused_or_empty(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        open_source(str(tmp_path / "none")).list()
    assert open_store(str(tmp_path / "none")).list() == []
    (tmp_path / "file").touch()
    with pytest.raises(PathError):
        open_store(str(tmp_path / "file"))


def test_a_file_changed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    source = open_source(str(tmp_path))
    info = source.head("x")
    real = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        n_read = real(fd, buffers, offset)
        if offset:
            path.write_bytes(bytes(1000))  # the same size
        return n_read

    monkeypatch.setattr(os, "preadv", slow)
    assert source.get_ranges(info, [(0, 10)])
    with pytest.raises(ChangedError):
        source.get_ranges(info, [(0, 10), (10, 20)])
    path.write_bytes(bytes(5))
    with pytest.raises(StoreError):
        source.get_ranges(ObjectInfo("x", 1000, ""), [(0, 1000)])


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: write(fd, view[:7], offset))
    store, data = open_store(str(tmp_path)), os.urandom(1000)
    store.put("x", data)
    assert store.get("x", max_bytes=1000) == data


def test_what_was_written_leaves_the_page_cache_from_the_disk_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int, int]] = []
    fsync = os.fsync

    def synced(fd: int) -> None:
        fsync(fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            events.append(("fsync", 0, 0))

    monkeypatch.setattr(store_local, "SYNC_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, begin, n_bytes, advice: events.append((f"advice {advice}", begin, n_bytes))
    )
    store, advice = LocalStore(str(tmp_path)), f"advice {os.POSIX_FADV_DONTNEED}"
    staged = store.stage("stretches", n_bytes=5000, overwrite=False)
    assert staged is not None
    store.write_stretch(staged, 1500, 3900, [bytes(600)] * 4)
    sync = ("fsync", 0, 0)
    assert events == [sync, (advice, 1500, 1200), sync, (advice, 2700, 1200), sync, (advice, 3900, 0)]
    events.clear()
    spooled = store.spool("")
    spooled.write_bytes(bytes(5000))
    store.put("whole", spooled)
    assert events == [sync, (advice, 0, 0)]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "link"])
@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StoreError), (errno.EACCES, DeniedError)])
def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type[Exception]
) -> None:
    store = open_store(str(tmp_path))

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind):
            store.put_new("x", b"1")
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for turn in range(3):
        store.put(f"a/{turn}", b"1")
        for attempt in (
            lambda: store.put_new("a/0", b"2"),
            lambda: store.stage("a/0", n_bytes=1, overwrite=False),
            lambda: store.stage("a/0/x", n_bytes=1, overwrite=False),
            lambda: store.write("a/2", [b"1"], n_bytes=2, overwrite=True),
            lambda: store.get_ranges(ObjectInfo("a/0", 1, "old"), [(0, 1)]),
        ):
            with pytest.raises(StoreError):
                attempt()
        staged = store.stage("a/y", n_bytes=1, overwrite=True)
        assert staged is not None
        store.abandon(staged)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_name_of_another_write_in_flight_is_not_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    staged = store.stage("x", n_bytes=1, overwrite=False)
    assert staged is not None
    store.write_stretch(staged, 0, 1, [b"1"])
    assert store.list() == []
    assert open_source(str(tmp_path)).list() == []


def test_links_never_let_two_writers_win(tmp_path: Path) -> None:
    """A plain exclusive write lost this race twice in 300 turns."""
    store = open_store(str(tmp_path))
    for turn in range(60):
        barrier = threading.Barrier(8)
        won: list[int] = []

        def write(i: int, turn: int = turn, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            try:
                store.put_new(f"{turn}", b"%d" % i)
            except ExistsError:
                return
            won.append(i)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [b"%d" % i for i in won] == [store.get(f"{turn}", max_bytes=1)]


def test_names_that_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "A", "b/c", "B/d", "b", "a/x", "d/", "D/x", "x", "x/"]
    assert clashing_keys(names, fold_case=False) == {"b": "b/c", "a/x": "a", "x/": "x"}
    assert clashing_keys(names, fold_case=True) == {"A": "a", "b": "b/c", "a/x": "a", "x/": "x"}
    store = open_store(str(tmp_path))
    assert list(store.refused_keys(names)) == ["b", "a/x", "x/"]
    monkeypatch.setattr("pipeline.store_local.LocalStore._folds_case", lambda _: True)
    refused = store.refused_keys(names)
    assert list(refused) == ["A", "b", "a/x", "x/"]
    assert all(isinstance(error, PathError) for error in refused.values())


def test_relative_paths_hold_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("root")
    monkeypatch.chdir("/")
    store.put_new("x", b"1")
    assert (tmp_path / "root" / "x").exists()
    assert open_source(f"file://{tmp_path}/root").get("x", max_bytes=1) == b"1"
    monkeypatch.chdir(tmp_path)
    urls = {".": str(tmp_path), "a/b*": f"{tmp_path}/a/b*", "a/": f"{tmp_path}/a/", "/": "/", "s3://b/x/": "s3://b/x/"}
    assert {url: absolute_url(url) for url in urls} == urls
    assert absolute_url("file:///a b%20") == "/a b%20"


def test_a_file_made_beside_the_objects_is_moved_into_place(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    path = store.spool("")
    assert store.list() == []
    path.write_bytes(b"a pack")
    inode = path.stat().st_ino
    store.put("packs/aa/1", path)
    stored = tmp_path / "store/packs/aa/1"
    assert (stored.read_bytes(), stored.stat().st_ino) == (b"a pack", inode)
    assert not path.exists()
    plain = tmp_path / "plain"
    plain.touch()
    assert stored.stat().st_mode == plain.stat().st_mode  # whoever may read other objects may read this one


def test_a_file_made_elsewhere_is_copied(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    (tmp_path / "scratch").mkdir()
    path = store.spool(str(tmp_path / "scratch"))
    path.write_bytes(b"a pack")
    store.put("packs/aa/1", path)
    assert (tmp_path / "store/packs/aa/1").read_bytes() == path.read_bytes() == b"a pack"


def test_what_is_no_file_has_a_date_too(tmp_path: Path) -> None:
    """Where checkpoints are looked for by name, a link that leads nowhere is one item's loss, not all of them."""
    (tmp_path / "file").write_bytes(b"1")
    for name, target in (("loop", "loop"), ("through", "file/x"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
    store = open_source(str(tmp_path))
    assert [item.key for item in store.dated()] == ["dangling", "file", "loop", "through"]


@pytest.mark.parametrize("opened", [open_source, open_store])
def test_a_location_that_cannot_be_looked_at_is_named(opened: Callable[[str], object]) -> None:
    with pytest.raises(PathError, match="xxx"):
        opened("/" + 300 * "x")
