"""What an archive that has lost its small objects can be made of again (T24)."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from operators.errors import DigestError, FormatError
from operators.record import PACK_FOOTER_BYTES, PACK_HEADER_BYTES
from pipeline import driver, salvage
from pipeline.archive import find_snapshot, load_manifest
from pipeline.locations import open_source
from pipeline.packs import pack_key
from pipeline.rows import Row
from pipeline.snapshots import time_text
from pipeline.store import Dated
from tests import forge
from tests.cases import bf16, noise, safetensors
from tests.memory_store import MemoryStore
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, objects_of, write

SMALL_TASKS = (*QUICK, "--set", "task_bytes=64KiB")
FILES = {
    "a.safetensors": safetensors([("w", "BF16", [300, 100], bf16(1, 30_000))]),
    "b.safetensors": safetensors([("w", "BF16", [300, 100], bf16(2, 30_000))]),
    "copy.safetensors": safetensors([("w", "BF16", [300, 100], bf16(1, 30_000))]),
    "config.json": b"{}",
}


@pytest.fixture
def archive(tmp_path: Path, capsys: Capture) -> Path:
    """Two snapshots; the second one takes most of its rows from the first."""
    folder = write(tmp_path / "source", FILES | {"old.bin": noise(1, 9000)})
    Ran(capsys, "archive", folder, tmp_path / "archive", *SMALL_TASKS)
    (folder / "old.bin").unlink()
    write(folder, {"new.bin": noise(2, 9000)})
    assert Ran(capsys, "archive", folder, tmp_path / "archive", *SMALL_TASKS).json["snapshot"] == "source/2"
    return tmp_path / "archive"


def restored(capsys: Capture, archive: Path, snapshot: str) -> dict[str, bytes]:
    target = archive.parent / f"back {snapshot}".replace("/", "-")
    assert Ran(capsys, "restore", archive, target, "--snapshot", snapshot).code == 0
    return files_of(target)


def test_lost_and_damaged_manifests_are_written_again(archive: Path, capsys: Capture) -> None:
    before = files_of(archive)
    lost, damaged = objects_of(archive, "manifests")
    lost.unlink()
    damaged.write_bytes(bytes(100))
    assert Ran(capsys, "verify", archive, "--snapshot", "source/1").code == 4
    ran = Ran(capsys, "rebuild", archive)
    assert (ran.code, ran.json["manifests"], ran.json["failures"]) == (0, ["source/1", "source/2"], [])
    assert ran.json["runs"] == []
    assert files_of(archive) == before
    assert Ran(capsys, "rebuild", archive).json["manifests"] == []


def test_packs_make_up_for_receipts_that_are_gone_or_damaged(archive: Path, capsys: Capture) -> None:
    before = files_of(archive)
    for path in [path for path in objects_of(archive, "runs") if path.parent.name == "receipts"]:
        data = path.read_bytes()
        for damaged in (None, data[:-1]):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            for manifest in objects_of(archive, "manifests"):
                manifest.unlink()
            assert Ran(capsys, "rebuild", archive).json["manifests"] == ["source/1", "source/2"]
        path.write_bytes(data)
        assert files_of(archive) == before


def test_a_run_that_lost_its_commit_is_committed_again(archive: Path, capsys: Capture) -> None:
    before = {seq: restored(capsys, archive, f"source/{seq}") for seq in (1, 2)}
    manifests = {path.name: path.read_bytes() for path in objects_of(archive, "manifests")}
    told = {seq: Ran(capsys, "list", archive).json["snapshots"][seq - 1] for seq in (1, 2)}
    shutil.rmtree(archive / "snapshots")
    shutil.rmtree(archive / "manifests")
    runs = Ran(capsys, "rebuild", archive).json["runs"]
    assert [run["lost"] for run in runs] == [[], []]
    for seq, run in enumerate(sorted(runs, key=lambda run: "new.bin" in str(run["files"])), 1):
        made = Ran(capsys, "rebuild", archive, "--run", run["run"], "--name", "again").json
        assert made["snapshot"] == f"again/{seq}"
        assert f"{made['manifest']}.parquet" in manifests
        assert restored(capsys, archive, f"again/{seq}") == before[seq]
    assert {path.name: path.read_bytes() for path in objects_of(archive, "manifests")} == manifests
    listed = Ran(capsys, "list", archive).json["snapshots"]
    assert [one["source_bytes"] for one in listed] == [told[1]["source_bytes"], told[2]["source_bytes"]]
    assert Ran(capsys, "rebuild", archive).json["runs"] == []
    assert Ran(capsys, "verify", archive).code == 0
    # The next night reads the source again: nobody knows which generations these files were of.
    again = Ran(capsys, "archive", archive.parent / "source", archive, *SMALL_TASKS, "--name", "again").json
    assert (again["unchanged"], again["snapshot"], again["unchanged_bytes"]) == (False, "again/3", 0)


def test_what_is_not_whole_is_named(archive: Path, capsys: Capture) -> None:
    shutil.rmtree(archive / "snapshots")
    first = next(run for run in Ran(capsys, "rebuild", archive).json["runs"] if "old.bin" in str(run["files"]))
    receipts = sorted((archive / "runs" / first["run"] / "receipts").iterdir())
    receipts[0].unlink()
    lost = next(run for run in Ran(capsys, "rebuild", archive).json["runs"] if run["run"] == first["run"])["lost"]
    assert lost
    made = Ran(capsys, "rebuild", archive, "--run", first["run"], "--name", "source")
    assert (made.code, made.json["lost"]) == (3, lost)
    names = {item["key"] for item in first["files"]} - {item["key"] for item in lost}
    assert {item["key"] for item in made.json["files"]} == names
    assert restored(capsys, archive, "source/1").keys() == names
    pack = objects_of(archive, "packs")[0]
    pack.unlink()
    runs = Ran(capsys, "rebuild", archive).json["runs"]
    assert any(item["reason"] == "lost_pack" for run in runs for item in run["lost"])


def test_rebuild_refuses_half_a_wish(archive: Path, capsys: Capture) -> None:
    assert Ran(capsys, "rebuild", archive, "--name", "x").code == 2
    assert Ran(capsys, "rebuild", archive, "--run", "0" * 64, "--name", "x").code == 10


# -- from packs alone ---------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, capsys: Capture) -> Path:
    """Two snapshots of files over several packs: one changes in part, one is copied, one renamed, some are tiny."""
    tensors = [(f"w{i}", "BF16", [300, 100], bf16(10 + i, 30_000)) for i in range(6)]
    files = {
        "a.safetensors": safetensors(tensors),
        "b.bin": noise(3, 150_000),
        "copy.safetensors": safetensors(tensors[:2]),
        "config.json": b"{}",
        "empty.txt": b"",
    }
    folder = write(tmp_path / "source", files)
    Ran(capsys, "archive", folder, tmp_path / "archive", *SMALL_TASKS)
    (folder / "b.bin").rename(folder / "c.bin")
    changed = [*tensors[:4], ("w4", "BF16", [300, 100], bf16(99, 30_000)), tensors[5]]
    write(folder, {"a.safetensors": safetensors(changed)})
    assert Ran(capsys, "archive", folder, tmp_path / "archive", *SMALL_TASKS).json["snapshot"] == "source/2"
    return tmp_path / "archive"


def test_manifests_are_made_of_packs_alone(large: Path, capsys: Capture) -> None:
    manifests = {path.name: path.read_bytes() for path in objects_of(large, "manifests")}
    before = {seq: restored(capsys, large, f"source/{seq}") for seq in (1, 2)}
    assert len(objects_of(large, "packs")) > 4
    shutil.rmtree(large / "runs")
    shutil.rmtree(large / "manifests")
    ran = Ran(capsys, "rebuild", large)
    assert (ran.code, ran.json["manifests"], ran.json["failures"]) == (0, ["source/1", "source/2"], [])
    assert {path.name: path.read_bytes() for path in objects_of(large, "manifests")} == manifests
    for seq in (1, 2):
        shutil.rmtree(large.parent / f"back source-{seq}")
        assert restored(capsys, large, f"source/{seq}") == before[seq]


def test_many_small_files_are_made_again_as_they_were_planned(tmp_path: Path, capsys: Capture) -> None:
    """More small files than are sampled, and a few that were: a pack tells which had a fingerprint."""
    folder = write(tmp_path / "source", {f"{i}.bin": noise(i, 50 + i) for i in range(70)})
    Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK)
    write(folder, {"new.bin": noise(99, 3000)})
    Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK)
    before = {path.name: path.read_bytes() for path in objects_of(tmp_path / "archive", "manifests")}
    shutil.rmtree(tmp_path / "archive" / "runs")
    shutil.rmtree(tmp_path / "archive" / "manifests")
    assert Ran(capsys, "rebuild", tmp_path / "archive").json["manifests"] == ["source/1", "source/2"]
    assert {path.name: path.read_bytes() for path in objects_of(tmp_path / "archive", "manifests")} == before


def test_a_lost_pack_loses_its_files_alone(large: Path, capsys: Capture) -> None:
    store = open_source(str(large))
    rows = load_manifest(store, find_snapshot(store, "source/1"))
    before = restored(capsys, large, "source/1")
    shutil.rmtree(large / "runs")
    shutil.rmtree(large / "manifests")
    for path in objects_of(large, "packs"):
        files = {row.file for row in rows if row.pack is not None and path.name == row.pack.hex()}
        if not files:
            continue  # of the second snapshot alone
        data = path.read_bytes()
        path.unlink()
        ran = Ran(capsys, "rebuild", large)
        assert ran.code == 3
        [fault] = [item for item in ran.json["failures"] if item["key"] == "source/1"]
        assert all(name in fault["message"] for name in files)
        shown = Ran(capsys, "rebuild", large, "--snapshot", "source/1")
        assert (shown.code, {item["key"] for item in shown.json["lost"]}) == (3, files)
        assert not (large / "snapshots" / path.name).exists()
        made = Ran(capsys, "rebuild", large, "--snapshot", "source/1", "--name", path.name)
        assert (made.code, {item["key"] for item in made.json["lost"]}) == (3, files)
        whole = {key: data for key, data in before.items() if key not in files}
        assert restored(capsys, large, made.json["snapshot"]) == whole
        path.write_bytes(data)


def test_without_snapshots_files_of_one_version_come_back(large: Path, capsys: Capture) -> None:
    before = restored(capsys, large, "source/1")
    for folder in ("runs", "manifests", "snapshots"):
        shutil.rmtree(large / folder)
    shown = Ran(capsys, "rebuild", large, "--packs")
    assert shown.code == 3
    assert {item["key"]: item["reason"] for item in shown.json["lost"]} == {"a.safetensors": "ambiguous"}
    assert not (large / "snapshots").exists()
    made = Ran(capsys, "rebuild", large, "--packs", "--name", "again").json
    assert made["snapshot"] == "again/1"
    del before["a.safetensors"], before["empty.txt"]  # two versions, and none
    assert restored(capsys, large, "again/1") == before
    assert Ran(capsys, "verify", large).code == 0


def test_without_snapshots_a_file_that_is_not_whole_is_none(tmp_path: Path, capsys: Capture) -> None:
    tensors = [(f"w{i}", "BF16", [300, 100], bf16(10 + i, 30_000)) for i in range(4)]
    folder = write(tmp_path / "source", {"a.safetensors": safetensors(tensors), "b.bin": b"b"})
    archive = tmp_path / "archive"
    Ran(capsys, "archive", folder, archive, *SMALL_TASKS)
    store = open_source(str(archive))
    rows = load_manifest(store, find_snapshot(store))
    for name in ("runs", "manifests", "snapshots"):
        shutil.rmtree(archive / name)
    assert Ran(capsys, "rebuild", archive, "--packs").code == 0
    packs = {row.pack for row in rows if row.file == "a.safetensors"}
    assert len(packs) > 2
    for pack in packs:
        path = archive / pack_key(pack or b"")
        data = path.read_bytes()
        for damaged in (None, data[:-1], bytes(len(data))):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            shown = Ran(capsys, "rebuild", archive, "--packs")
            assert {item["key"]: item["reason"] for item in shown.json["lost"]} == {"a.safetensors": "lost_pack"}
            assert [item["key"] for item in shown.json["files"]] == ["b.bin"]
        path.write_bytes(data)


@pytest.mark.parametrize("window_bytes", [1, 700, 1 << 20])
def test_a_pack_is_read_once(window_bytes: int, monkeypatch: Patch) -> None:
    """But for its ends and its index; in pieces of any size, of which none ends within a record."""
    monkeypatch.setattr(salvage, "WINDOW_BYTES", window_bytes)
    objects = forge.archive([forge.sound(noise(i, 300 * i), f"{i}.bin") for i in range(1, 7)])
    store = MemoryStore(objects)
    rows = load_manifest(store, find_snapshot(store))
    [(key, data)] = ((key, data) for key, data in objects.items() if key.startswith("packs/"))
    assert _told(store, key, len(data)) == sorted(rows, key=lambda row: row.file)
    read: list[int] = []
    plain = store.get_ranges

    def counted(info: Any, ranges: Any, room: Any = None) -> Any:
        read.extend(stop - start for start, stop in ranges)
        return plain(info, ranges, room)

    monkeypatch.setattr(store, "get_ranges", counted)
    salvage.pack_rows(store, Dated(key, len(data), 0))
    index_bytes = read[2]
    assert sum(read) == PACK_HEADER_BYTES + PACK_FOOTER_BYTES + index_bytes + len(data)
    assert (len(read) > 9) is (window_bytes < 1 << 20)


def _told(store: MemoryStore, key: str, n_bytes: int) -> list[Row]:
    return sorted(salvage.pack_rows(store, Dated(key, n_bytes, 0)), key=lambda row: row.file)


@pytest.mark.parametrize("place", [9, 200, 1 << 40])
def test_records_of_a_pack_that_overlap_or_lie_beyond_it_are_damage(place: int) -> None:
    """The index says so, under the right digest; a pack with another digest is told to have that."""
    pairs = [forge.sound(noise(i, 300), f"{i}.bin") for i in range(3)]
    index = forge.archive(
        [(replace(row, pack_offset=place if i == 1 else None), data) for i, (row, data) in enumerate(pairs)]
    )
    [(key, data)] = ((key, data) for key, data in index.items() if key.startswith("packs/"))
    with pytest.raises(FormatError):
        _told(MemoryStore({key: data}), key, len(data))
    with pytest.raises(DigestError):
        _told(MemoryStore({key: data + b"x"}), key, len(data) + 1)


def test_of_many_versions_the_digest_of_a_file_tells_the_right_one(tmp_path: Path, capsys: Capture) -> None:
    """Versions that differ in two places, in packs that all have one age: any of each may belong to any other."""
    tensors = [(f"w{i}", "BF16", [300, 100], bf16(10 + i, 30_000)) for i in range(4)]
    folder, archive = tmp_path / "source", tmp_path / "archive"
    for night in range(4):
        for place in (0, 3):
            tensors[place] = (f"w{place}", "BF16", [300, 100], bf16(100 + 10 * night + place, 30_000))
        write(folder, {"a.safetensors": safetensors(tensors)})
        assert Ran(capsys, "archive", folder, archive, *SMALL_TASKS).json["snapshot"] == f"source/{night + 1}"
    before = {path.name: path.read_bytes() for path in objects_of(archive, "manifests")}
    for path in objects_of(archive, "packs"):
        os.utime(path, (0, 0))
    shutil.rmtree(archive / "runs")
    shutil.rmtree(archive / "manifests")
    assert len(Ran(capsys, "rebuild", archive).json["manifests"]) == 4
    assert {path.name: path.read_bytes() for path in objects_of(archive, "manifests")} == before


def test_a_pack_tells_of_segments_that_moved(tmp_path: Path, capsys: Capture) -> None:
    """Those that share a record of the night before, at another place, beside one that was stored."""
    tensors = [(f"w{i}", "BF16", [300, 100], bf16(10 + i, 30_000)) for i in range(4)]
    folder, archive = write(tmp_path / "source", {"a.safetensors": safetensors(tensors)}), tmp_path / "archive"
    Ran(capsys, "archive", folder, archive, *QUICK)
    moved = safetensors([("new", "BF16", [300, 100], bf16(99, 30_000)), *reversed(tensors)])
    write(folder, {"a.safetensors": moved})
    assert Ran(capsys, "archive", folder, archive, *QUICK).json["deduplicated_bytes"] == 240_000
    before = {path.name: path.read_bytes() for path in objects_of(archive, "manifests")}
    shutil.rmtree(archive / "runs")
    shutil.rmtree(archive / "manifests")
    assert Ran(capsys, "rebuild", archive).json["manifests"] == ["source/1", "source/2"]
    assert {path.name: path.read_bytes() for path in objects_of(archive, "manifests")} == before


def test_of_two_packs_with_one_segment_the_last_before_the_snapshot_is_taken(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Another recipe stored the same files again: nothing but the ages of the packs tells whose is which."""
    files = {key: FILES[key] for key in ("a.safetensors", "b.safetensors")}
    folder, archive = write(tmp_path / "source", files), tmp_path / "archive"
    for night, options in ((1, SMALL_TASKS), (2, QUICK)):
        moment = datetime(2030, 1, night, 12, tzinfo=UTC)
        monkeypatch.setattr(driver, "time_text", lambda _, at=moment: time_text(at))
        known = set(objects_of(archive, "packs"))
        Ran(capsys, "archive", folder, archive, *options)
        new = set(objects_of(archive, "packs")) - known
        assert new
        for pack in new:
            os.utime(pack, (moment.timestamp() - 60, moment.timestamp() - 60))
    before = {path.name: path.read_bytes() for path in objects_of(archive, "manifests")}
    assert len(before) == 2
    shutil.rmtree(archive / "runs")
    shutil.rmtree(archive / "manifests")
    assert Ran(capsys, "rebuild", archive).json["manifests"] == ["source/1", "source/2"]
    assert {path.name: path.read_bytes() for path in objects_of(archive, "manifests")} == before
    # Where the ages are lost too, the manifest is not made up, and the files can be committed all the same.
    shutil.rmtree(archive / "manifests")
    for path in objects_of(archive, "packs"):
        os.utime(path, (0, 0))
    ran = Ran(capsys, "rebuild", archive)
    assert (ran.code, {one["reason"] for one in ran.json["failures"]}) == (3, {"digest_mismatch"})
    lost = ran.json["failures"][0]["key"]
    assert Ran(capsys, "rebuild", archive, "--snapshot", lost, "--name", "source").json["snapshot"] == "source/3"
    assert restored(capsys, archive, "source/3") == files
