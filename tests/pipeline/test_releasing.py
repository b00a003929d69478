"""`release-source`: nothing below a source goes without evidence, and nothing that is not archived as it is."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from operators.errors import ConflictError, DeniedError, StoreError
from pipeline import releasing
from pipeline.archive import find_snapshot
from pipeline.locations import open_source, open_store
from pipeline.retention import RELEASED, add_tags, expire, tags_of
from pipeline.store import ObjectInfo, Store
from pipeline.store_local import LocalStore
from pipeline.store_s3 import S3Store
from tests.cases import bf16, noise, safetensors
from tests.memory_store import Killed
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, objects_of, write
from tests.s3server import S3Server, s3_server

FILES = {
    "a.safetensors": safetensors([("w", "BF16", [300, 100], bf16(1, 30_000))]),
    "sub/b.bin": noise(2, 9000),
    "config.json": b"{}",
    "empty.txt": b"",
}
N_BYTES = sum(map(len, FILES.values()))


def commands(folder: Path, capsys: Capture) -> Callable[..., Ran]:
    return lambda *arguments: Ran(capsys, "release-source", folder / "source", folder / "archive", *arguments)


@pytest.fixture
def folder(tmp_path: Path, capsys: Capture) -> Path:
    """A source, its archive, and the receipt of a verification."""
    write(tmp_path / "source", FILES)
    Ran(capsys, "archive", tmp_path / "source", tmp_path / "archive", *QUICK)
    assert Ran(capsys, "verify", tmp_path / "archive", "--receipt").code == 0
    return tmp_path


def age(path: Path, days: float) -> None:
    at = time.time() - days * releasing.DAY
    os.utime(path, (at, at))


# -- the whole path -----------------------------------------------------------------------------


def test_a_source_is_freed_in_two_steps(folder: Path, capsys: Capture) -> None:
    release = commands(folder, capsys)
    write(folder / "source", {"new.txt": b"not archived"})
    shown = release()
    assert (shown.code, shown.json["dry_run"], shown.json["files"]) == (0, True, 4)
    assert (shown.json["source_bytes"], shown.json["not_archived"]) == (N_BYTES, 1)
    assert not (folder / "archive" / "release").exists()
    first = release("--yes")
    assert (first.code, first.json["freed"]) == (0, 0)
    [intent] = objects_of(folder / "archive", "release")
    assert first.json["intent"] == f"release/{intent.name}"
    early = release("--yes")
    assert (early.code, early.json["error"]["kind"]) == (1, "no_evidence")
    assert first.json["ready"] in early.json["error"]["next_step"]
    assert files_of(folder / "source").keys() == FILES.keys() | {"new.txt"}
    age(intent, 6.9)
    assert release("--yes").code == 1
    age(intent, 7.1)
    assert release().json["freed"] == 0
    done = release("--yes")
    assert (done.code, done.json["freed"], done.json["freed_bytes"], done.json["failures"]) == (0, 4, N_BYTES, [])
    assert files_of(folder / "source") == {"new.txt": b"not archived"}
    assert objects_of(folder / "archive", "release") == []
    again = release("--yes")
    assert (again.code, again.json["files"], again.json["gone"], again.json["intent"]) == (0, 0, 4, "")
    assert Ran(capsys, "restore", folder / "archive", folder / "back").code == 0
    assert files_of(folder / "back") == FILES


def test_no_rule_of_prune_drops_what_may_be_the_last_copy(folder: Path, capsys: Capture) -> None:
    release = commands(folder, capsys)
    release("--yes", "--grace", "0")
    assert release("--yes", "--grace", "0").json["freed"] == 4
    write(folder / "source", {"later.txt": b"1"})
    for name in ("x", "y"):
        write(folder / "source", {"later.txt": name.encode()})
        Ran(capsys, "archive", folder / "source", folder / "archive", *QUICK)
    told = Ran(capsys, "prune", folder / "archive", "--keep-last", "1", "--yes").json["snapshots"]
    assert {one["snapshot"]: one["kept_by"] for one in told} == {
        "source/1": ["tag released"],
        "source/2": [],
        "source/3": ["last", "newest", "newest complete"],
    }
    assert Ran(capsys, "restore", folder / "archive", folder / "back", "--snapshot", "source/1").code == 0
    assert files_of(folder / "back") == FILES


def test_a_prune_that_was_faster_than_the_tag_is_noticed(folder: Path, capsys: Capture, monkeypatch: Patch) -> None:
    release = commands(folder, capsys)
    release("--yes", "--grace", "0")

    def late(store: Store, checkpoint: str, seq: int, tags: Iterable[str]) -> None:
        expire(store, checkpoint, seq)
        add_tags(store, checkpoint, seq, tags)

    monkeypatch.setattr(releasing, "add_tags", late)
    assert release("--yes", "--grace", "0").code == 10
    assert files_of(folder / "source") == FILES


def test_a_prune_that_comes_later_than_the_tag_puts_the_snapshot_back(folder: Path, capsys: Capture) -> None:
    """It has asked the rules before the tag was there."""
    store = open_store(str(folder / "archive"))
    before = files_of(folder / "archive" / "snapshots")
    add_tags(store, "source", 1, [RELEASED])
    with pytest.raises(ConflictError):
        expire(store, "source", 1)
    assert files_of(folder / "archive" / "snapshots") == before
    assert tags_of(store, "source") == {1: [RELEASED]}
    named = ("prune", folder / "archive", "--snapshot", "source/1", "--yes")
    assert Ran(capsys, *named).code == 0
    assert files_of(folder / "archive" / "snapshots") == {}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(len(FILES)))
def test_a_crash_at_any_deletion_leaves_the_rest_to_the_next_run(
    call: int, after: bool, folder: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    release = commands(folder, capsys)
    monkeypatch.setattr(releasing, "REQUESTS", 1)
    release("--yes", "--grace", "0")
    real, calls = LocalStore.delete_generation, itertools.count()

    def dying(store: LocalStore, info: ObjectInfo) -> None:
        now = next(calls) == call
        if after or not now:
            real(store, info)
        if now:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete_generation", dying)
        with pytest.raises(Killed):
            release("--yes", "--grace", "0")
    gone = call + after
    assert len(files_of(folder / "source")) == len(FILES) - gone
    done = release("--yes", "--grace", "0")
    assert (done.code, done.json["freed"], done.json["gone"]) == (0, len(FILES) - gone, gone)
    assert files_of(folder / "source") == {}
    assert objects_of(folder / "archive", "release") == []


def test_a_file_that_cannot_go_is_named_and_the_others_go(folder: Path, capsys: Capture, monkeypatch: Patch) -> None:
    release = commands(folder, capsys)
    release("--yes", "--grace", "0")
    real = LocalStore.delete_generation

    def failing(store: LocalStore, info: ObjectInfo) -> None:
        if info.key == "config.json":
            raise StoreError("an answer", "none", info.key)
        real(store, info)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete_generation", failing)
        ran = release("--yes", "--grace", "0", "--set", "retries=0")
    assert (ran.code, ran.json["freed"], [one["key"] for one in ran.json["failures"]]) == (3, 3, ["config.json"])
    assert files_of(folder / "source").keys() == {"config.json"}
    assert release("--yes", "--grace", "0").json["freed"] == 1


# -- evidence -----------------------------------------------------------------------------------


def receipt_of(folder: Path) -> Path:
    [path] = objects_of(folder / "archive", "verify")
    return path


def _no_receipt(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    receipt_of(folder).unlink()
    return ()


def _old_receipt(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    age(receipt_of(folder), 7.1)
    return ()


def _lower_level(folder: Path, capsys: Capture) -> tuple[str, ...]:
    receipt_of(folder).unlink()
    Ran(capsys, "verify", folder / "archive", "--receipt", "--level", "bytes")
    return ()


def _parts(folder: Path, capsys: Capture) -> tuple[str, ...]:
    receipt_of(folder).unlink()
    for part in ("1/3", "3/3", "2/2"):
        Ran(capsys, "verify", folder / "archive", "--receipt", "--part", part)
    return ()


def _receipt_of_another_snapshot(folder: Path, capsys: Capture) -> tuple[str, ...]:
    write(folder / "source", {"config.json": b"[]"})
    Ran(capsys, "archive", folder / "source", folder / "archive", *QUICK)
    return ()


def _receipt_with_faults(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    content = json.loads(receipt_of(folder).read_bytes())
    content["failures"] = [["a.safetensors@0", "digest_mismatch"]]
    receipt_of(folder).write_text(json.dumps(content))
    return ()


def _fault_found_since(folder: Path, capsys: Capture) -> tuple[str, ...]:
    """The bit has flipped back since, or a replica of the store answers: what was found counts."""
    [pack, *_] = objects_of(folder / "archive", "packs")
    data = pack.read_bytes()
    pack.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    age(receipt_of(folder), 1)
    assert Ran(capsys, "verify", folder / "archive", "--receipt", "--level", "bytes").code == 4
    pack.write_bytes(data)
    return ()


def _garbled_receipt(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    receipt_of(folder).write_bytes(b"[")
    return ()


def _lost_pack(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    objects_of(folder / "archive", "packs")[0].unlink()
    return ()


def _lost_manifest(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    objects_of(folder / "archive", "manifests")[0].unlink()
    return ()


def _no_replica(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    return "--replica", str(folder / "nowhere")


def _replica_of_other_content(folder: Path, capsys: Capture) -> tuple[str, ...]:
    write(folder / "other" / "source", {"x": b"1"})
    Ran(capsys, "archive", folder / "other" / "source", folder / "replica", *QUICK)
    return "--replica", str(folder / "replica")


def _replica_without_a_pack(folder: Path, _capsys: Capture) -> tuple[str, ...]:
    shutil.copytree(folder / "archive", folder / "replica")
    objects_of(folder / "replica", "packs")[0].unlink()
    return "--replica", str(folder / "replica")


@pytest.mark.parametrize(
    ("take", "message"),
    [
        (_no_receipt, "found none"),
        (_old_receipt, "older than 7 days"),
        (_lower_level, "of level bytes"),
        (_parts, "1 of 2 parts; 2 of 3 parts"),
        (_receipt_of_another_snapshot, "of other snapshots"),
        (_receipt_with_faults, "it found faults"),
        (_fault_found_since, "of level bytes"),
        (_garbled_receipt, "of other snapshots"),
        (_lost_pack, "expected a whole archive, found 1 packs that are not"),
        (_lost_manifest, "expected a whole archive, found manifests/"),
        (_no_replica, "expected a replica of this snapshot"),
        (_replica_of_other_content, "expected a replica of content"),
        (_replica_without_a_pack, "expected a whole replica, found 1 packs"),
    ],
)
def test_without_evidence_nothing_goes(
    take: Callable[[Path, Capture], tuple[str, ...]], message: str, folder: Path, capsys: Capture
) -> None:
    release = commands(folder, capsys)
    assert release("--yes", "--grace", "0").json["intent"]  # all was there then
    options = take(folder, capsys)
    source = files_of(folder / "source")
    for words in (("--yes", "--grace", "0"), ("--grace", "0")):
        ran = release(*words, *options)
        assert (ran.code, ran.json["error"]["kind"]) == (1, "no_evidence")
        assert message in ran.json["error"]["message"]
    assert files_of(folder / "source") == source


def test_a_replica_that_may_not_be_read_is_no_missing_one(folder: Path, capsys: Capture, monkeypatch: Patch) -> None:
    def refuse(*_: Any) -> None:
        raise DeniedError("access", "none", "replica")

    monkeypatch.setattr(releasing, "find_snapshot", refuse)
    store = open_source(str(folder / "archive"))
    snapshot = find_snapshot(store, "source")
    with pytest.raises(DeniedError):
        releasing.require_replica(open_source(str(folder)), store, snapshot)


def test_parts_of_one_whole_are_evidence_and_so_is_a_replica(folder: Path, capsys: Capture) -> None:
    receipt_of(folder).unlink()
    for part in ("1/3", "3/3", "2/3"):
        Ran(capsys, "verify", folder / "archive", "--receipt", "--part", part)
    shutil.copytree(folder / "archive", folder / "replica")
    release = commands(folder, capsys)
    assert release("--replica", folder / "archive").code == 2
    assert release("--yes", "--grace", "0", "--replica", folder / "replica").code == 0
    assert release("--yes", "--grace", "0", "--replica", folder / "replica").json["freed"] == 4


# -- what is not as it was archived -------------------------------------------------------------


def test_a_source_that_is_not_there_is_refused(folder: Path, capsys: Capture) -> None:
    release = commands(folder, capsys)
    (folder / "source").rename(folder / "sources")
    for words in ((), ("--yes", "--grace", "0")):
        ran = release(*words)
        assert (ran.code, ran.json["error"]["kind"]) == (1, "not_found")
        assert "expected a file or a folder, found nothing; check the path" in ran.json["error"]["message"]
    (folder / "source").mkdir()
    ran = release()
    assert (ran.code, ran.json["gone"]) == (0, len(FILES))


def test_a_file_that_changed_is_kept_and_named(folder: Path, capsys: Capture, monkeypatch: Patch) -> None:
    release = commands(folder, capsys)
    release("--yes", "--grace", "0")
    write(folder / "source", {"config.json": b"[]"})  # between the two
    real = LocalStore.delete_generation

    def overwritten(store: LocalStore, info: ObjectInfo) -> None:
        if info.key == "sub/b.bin":  # between the look and the deed: same size, other bytes
            write(folder / "source", {"sub/b.bin": noise(3, 9000)})
        real(store, info)

    monkeypatch.setattr(LocalStore, "delete_generation", overwritten)
    ran = release("--yes", "--grace", "0")
    assert (ran.code, ran.json["freed"]) == (3, 2)
    assert sorted((one["key"], one["reason"]) for one in ran.json["failures"]) == [
        ("config.json", "changed_during_read"),
        ("sub/b.bin", "changed_during_read"),
    ]
    assert files_of(folder / "source") == {"config.json": b"[]", "sub/b.bin": noise(3, 9000)}


def test_files_of_unknown_generation_stay(folder: Path, capsys: Capture) -> None:
    """A snapshot that was rebuilt does not know what it has archived."""
    shutil.rmtree(folder / "archive" / "snapshots")
    [run] = Ran(capsys, "rebuild", folder / "archive").json["runs"]
    Ran(capsys, "rebuild", folder / "archive", "--run", run["run"], "--name", "source")
    Ran(capsys, "verify", folder / "archive", "--receipt")
    ran = commands(folder, capsys)("--yes", "--grace", "0")
    assert (ran.code, ran.json["files"], len(ran.json["failures"])) == (3, 0, 3)
    assert files_of(folder / "source") == FILES


# -- S3 -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def test_from_a_bucket(server: S3Server, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    source, archive = server.url("models"), server.url("vault")
    store = open_store(source)
    for key, data in FILES.items():
        store.put(key, data)
    Ran(capsys, "archive", source, archive, *QUICK)
    Ran(capsys, "verify", archive, "--receipt")
    release: Any = lambda *words: Ran(capsys, "release-source", source, archive, "--grace", "0", *words)  # noqa: E731
    assert (release().json["files"], release("--yes").json["freed"]) == (4, 0)
    store.put("config.json", b"[1]")
    real = S3Store.head

    def overwritten(found: S3Store, key: str) -> ObjectInfo:
        info = real(found, key)
        if key == "sub/b.bin" and "models" in found.url:  # after the last look
            store.put(key, noise(9, 9000))
        return info

    with monkeypatch.context() as patch:
        patch.setattr(S3Store, "head", overwritten)
        ran = release("--yes")
    assert (ran.code, ran.json["freed"]) == (3, 2)
    assert {one["key"] for one in ran.json["failures"]} == {"config.json", "sub/b.bin"}
    assert [info.key for info in store.list()] == ["config.json", "sub/b.bin"]
    Ran(capsys, "restore", archive, tmp_path / "back")
    assert files_of(tmp_path / "back") == FILES
