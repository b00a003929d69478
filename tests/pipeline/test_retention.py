"""Prune and gc through the command line, and the rules of retention against their definition."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import garbage
from pipeline.archive import find_snapshot, load_manifest, missing_packs, pack_sizes
from pipeline.garbage import collect, mark
from pipeline.locations import open_store
from pipeline.retention import Kept, Policy, add_tags, decide_kept, expire, revive, tags_of
from pipeline.store_s3 import PART_BYTES, S3Store
from tests.cases import noise
from tests.pipeline.commands import QUICK, Capture, Ran, files_of, objects_of, write
from tests.pipeline.runs import drive
from tests.pipeline.test_keeping import origin
from tests.s3server import s3_server

START = datetime(2026, 1, 1, tzinfo=UTC)
HOURS = st.lists(st.integers(0, 3000), min_size=1, max_size=25, unique=True)
COUNTS = st.integers(0, 6)


def snapshots(hours: list[int]) -> list[Kept]:
    times = [(START + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:%M:%SZ") for hour in sorted(hours)]
    return [Kept("model", number, text, frozenset(), complete=True) for number, text in enumerate(times, 1)]


def by_definition(found: list[Kept], count: int, period: Callable[[datetime], Hashable]) -> set[int]:
    """The newest of each of the last periods that have any; and the oldest, where there are fewer than that."""
    newest = {period(datetime.fromisoformat(one.time)): one.seq for one in found}
    kept = set(sorted(newest.values())[-count:]) if count else set()
    return kept | ({1} if len(newest) < count else set())


@given(HOURS, COUNTS, COUNTS, COUNTS, COUNTS)
def test_rules_keep_what_they_say(hours: list[int], last: int, daily: int, weekly: int, monthly: int) -> None:
    found = snapshots(hours)
    decided = decide_kept(found, Policy(last, daily, weekly, monthly))
    for name, count, period in (
        ("last", last, lambda moment: moment),
        ("daily", daily, lambda moment: moment.date()),
        ("weekly", weekly, lambda moment: moment.strftime("%G %V")),
        ("monthly", monthly, lambda moment: moment.strftime("%Y %m")),
    ):
        assert {one.seq for one in decided if name in one.reasons} == by_definition(found, count, period), name
    assert [one.seq for one in decided if "newest" in one.reasons] == [len(hours)]


def test_what_no_rule_may_drop() -> None:
    def one(seq: int, text: str, tag: str = "", *, complete: bool = True) -> Kept:
        return Kept("model", seq, text, frozenset([tag] if tag else []), complete)

    found = [
        one(1, "2026-01-01T00:00:00Z", "v1"),
        one(2, "2026-01-02T00:00:00Z"),
        one(3, ""),
        one(4, "2026-01-04T00:00:00Z", complete=False),
        one(5, "2026-01-05T00:00:00Z", complete=False),
    ]
    decided = {kept.seq: kept.reasons for kept in decide_kept(found, Policy(last=1, tags=frozenset(["v1", "v2"])))}
    assert decided == {
        1: ("tag v1",),
        2: ("newest complete",),
        3: ("unreadable",),
        4: (),
        5: ("last", "newest"),
    }


# -- through the command line -------------------------------------------------------------------


def nights(tmp_path: Path, capsys: Capture) -> tuple[Path, Path]:
    """Three snapshots of a source of which one file changes; the second is tagged."""
    folder, archive = tmp_path / "source", tmp_path / "archive"
    for number in range(3):
        write(folder, {"same.bin": noise(9, 3000), "changes.bin": noise(number, 3000)})
        tag = ("--tag", "release 1/2") if number == 1 else ()
        assert Ran(capsys, "archive", folder, archive, *QUICK, *tag).code == 0
    return folder, archive


def age(archive: Path, hours: int) -> None:
    for path in archive.rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - hours * 3600
            os.utime(path, (then, then))


def test_prune_shows_what_it_would_do_and_does_it_when_told(tmp_path: Path, capsys: Capture) -> None:
    _, archive = nights(tmp_path, capsys)
    before = files_of(archive)
    rules = ("--keep-last", "1", "--keep-tag", "release 1/2")
    shown = Ran(capsys, "prune", archive, *rules).json
    assert files_of(archive) == before
    assert (shown["dry_run"], shown["kept"], shown["dropped"]) == (True, 2, 1)
    assert {one["snapshot"]: one["kept_by"] for one in shown["snapshots"]} == {
        "source/1": [],
        "source/2": ["tag release 1/2"],
        "source/3": ["last", "newest", "newest complete"],
    }
    done = Ran(capsys, "prune", archive, *rules, "--yes").json
    assert done == shown | {"dry_run": False}
    listed = Ran(capsys, "list", archive).json["snapshots"]
    assert [(one["snapshot"], one["tags"]) for one in listed] == [("source/2", ["release 1/2"]), ("source/3", [])]
    gone = before.keys() - files_of(archive).keys()
    assert gone == {"snapshots/source/00000001.json"}
    copies = objects_of(archive, "expired")
    assert [copy.read_bytes() for copy in copies] == [before["snapshots/source/00000001.json"]]
    assert Ran(capsys, "verify", archive, "--snapshot", "source/2").code == 0


def test_a_dropped_snapshot_comes_back(tmp_path: Path, capsys: Capture) -> None:
    _, archive = nights(tmp_path, capsys)
    before = files_of(archive)
    assert Ran(capsys, "prune", archive, "--snapshot", "source/3", "--yes").code == 0
    assert [one["snapshot"] for one in Ran(capsys, "list", archive).json["snapshots"]] == ["source/1", "source/2"]
    assert Ran(capsys, "prune", archive, "--undo", "source/3").json["revived"] == "source/3"
    after = {key: data for key, data in files_of(archive).items() if not key.startswith("expired/")}
    assert after == before
    assert Ran(capsys, "prune", archive, "--undo", "source/2").code == 10
    assert Ran(capsys, "prune", archive, "--undo", "source/9").code == 10


def test_tags_come_back_and_the_last_drop_of_a_number(tmp_path: Path, capsys: Capture) -> None:
    """A snapshot whose source was freed stays beyond all rules, dropped and brought back or not."""
    source, archive = nights(tmp_path, capsys)
    store = open_store(str(archive))
    add_tags(store, "source", 1, ["released", "gold"])
    expire(store, "source", 1, released=True)
    assert tags_of(store, "source").get(1) is None
    revive(store, "source", 1)
    assert sorted(tags_of(store, "source")[1]) == ["gold", "released"]
    kept = Ran(capsys, "prune", archive, "--keep-last", "1").json["snapshots"]
    assert "tag released" in {one["snapshot"]: one["kept_by"] for one in kept}["source/1"]
    expire(store, "source", 3)
    (source / "z.bin").write_bytes(b"another third night")
    assert Ran(capsys, "archive", source, archive, *QUICK).json["snapshot"] == "source/3"
    another = find_snapshot(store, "source/3")
    expire(store, "source", 3)
    revive(store, "source", 3)
    assert find_snapshot(store, "source/3") == another


def test_a_second_drop_can_be_undone_as_long_as_the_first(tmp_path: Path, capsys: Capture) -> None:
    _, archive = nights(tmp_path, capsys)
    store = open_store(str(archive))
    expire(store, "source", 1)
    revive(store, "source", 1)
    age(archive, 1000)
    expire(store, "source", 1)
    assert not [key for key in mark(store).garbage if key.startswith(("packs/", "manifests/"))]
    age(archive, 1000)
    marked = {key for key in mark(store).garbage if key.startswith("expired/")}
    assert marked == {str(copy.relative_to(archive)) for copy in objects_of(archive, "expired")}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (("--keep-last", "1", "--snapshot", "source/1"), 2),
        (("--snapshot", "source"), 2),
        (("--snapshot", "source/9"), 5),
        (("--keep-last", "1", "--name", "other"), 10),
    ],
)
def test_prune_refuses_what_nobody_can_mean(tmp_path: Path, capsys: Capture, words: tuple[str, ...], code: int) -> None:
    _, archive = nights(tmp_path, capsys)
    before = files_of(archive)
    assert Ran(capsys, "prune", archive, *words, "--yes").code == code
    assert files_of(archive) == before


def test_gc_takes_what_a_pruned_snapshot_alone_needed(tmp_path: Path, capsys: Capture) -> None:
    folder, archive = nights(tmp_path, capsys)
    Ran(capsys, "prune", archive, "--keep-last", "1", "--yes")
    (archive / ".brevis-0123456789abcdef.part").write_bytes(bytes(100))  # of a worker that was killed
    expected = {key for key in files_of(archive) if key.startswith(("packs/", "manifests/", "runs/", "expired/"))}
    young = Ran(capsys, "gc", archive, "--yes").json
    assert (young["garbage"]["objects"], young["condemned"], young["removed"]["objects"]) == (0, "", 0)
    age(archive, 73)
    shown = Ran(capsys, "gc", archive).json
    assert not (archive / "gc").exists()
    assert [item["key"] for item in shown["unfinished"]] == [".brevis-0123456789abcdef.part"]
    garbage_keys = {item["key"] for item in shown["garbage"]["keys"]}
    assert {key.partition("/")[0] for key in garbage_keys} == {"packs", "manifests", "runs", "expired"}
    first = Ran(capsys, "gc", archive, "--yes").json
    assert (first["removed"]["keys"], first["garbage"]) == ([".brevis-0123456789abcdef.part"], shown["garbage"])
    assert first["condemned"].startswith("gc/")
    waiting = Ran(capsys, "gc", archive, "--yes").json
    assert (waiting["removed"]["objects"], waiting["ready"]) == (0, first["ready"])
    age(archive, 24)
    second = Ran(capsys, "gc", archive, "--yes").json
    assert set(second["removed"]["keys"]) == garbage_keys
    assert second["removed"]["bytes"] == shown["garbage"]["bytes"]
    assert second["garbage"]["objects"] == 0
    left = {key for key in files_of(archive) if key.startswith(("packs/", "manifests/", "runs/", "expired/", "gc/"))}
    assert left == expected - garbage_keys
    assert Ran(capsys, "verify", archive).code == 0
    Ran(capsys, "restore", archive, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(folder)
    assert Ran(capsys, "archive", folder, archive, *QUICK).json["unchanged"]


def test_gc_refuses_where_it_cannot_know_what_is_needed(tmp_path: Path, capsys: Capture) -> None:
    _, archive = nights(tmp_path, capsys)
    age(archive, 100)
    for broken, code in ((objects_of(archive, "manifests")[0], 1), (objects_of(archive, "snapshots")[0], 4)):
        content = broken.read_bytes()
        if code == 1:
            broken.unlink()
        else:
            broken.write_bytes(content[:-2])
        before = files_of(archive)
        refused = Ran(capsys, "gc", archive, "--yes")
        assert refused.code == code
        assert broken.name in refused.json["error"]["message"]
        assert files_of(archive) == before
        broken.write_bytes(content)


def test_gc_leaves_what_it_does_not_know(tmp_path: Path, capsys: Capture) -> None:
    _, archive = nights(tmp_path, capsys)
    strange = {"packs/notes.txt": b"1", "packs/ab/cd": b"2", "jobs/x.json": b"3", "mine": b"4", "verify/x": b"5"}
    write(archive, strange)
    age(archive, 1000)
    assert Ran(capsys, "gc", archive).json["garbage"]["objects"] == 0
    Ran(capsys, "gc", archive, "--yes")
    age(archive, 1000)
    Ran(capsys, "gc", archive, "--yes")
    assert strange.items() <= files_of(archive).items()


def test_gc_on_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "WAIT_SECONDS", 1)
    with s3_server() as server:
        store = S3Store(f"{server.bucket}/archive", server.options)
        drive(store, origin(1, 2))
        drive(store, origin(1, 3))
        store.delete("snapshots/model/00000001.json")
        store.stage("packs/00/lost", n_bytes=PART_BYTES + 1, overwrite=True)
        packs = {info.key for info in store.list("packs/")}
        time.sleep(2.1)
        assert collect(store, 0).condemned
        assert store.unfinished() == []
        time.sleep(2.1)
        result = collect(store, 0)
        left = {info.key for info in store.list("packs/")}
        assert result.removed > len(packs - left) > 0
        assert missing_packs(store, pack_sizes(load_manifest(store, find_snapshot(store)))) == []
