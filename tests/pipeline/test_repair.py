"""`archive --repair`: what a damaged pack held is stored again from the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from operators.errors import StoreError
from pipeline import verify
from pipeline.archive import find_snapshot, load_manifest
from pipeline.locations import open_source
from pipeline.packs import pack_key
from tests.cases import bf16, noise, safetensors
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, objects_of, write
from tests.pipeline.test_scrubbing import flip

SMALL_TASKS = (*QUICK, "--set", "task_bytes=64KiB")
FILES = {
    "a.safetensors": safetensors([(f"w{i}", "BF16", [300, 100], bf16(i, 30_000)) for i in range(3)]),
    "b.bin": noise(1, 50_000),
    "config.json": b"{}",
}


@pytest.fixture
def place(tmp_path: Path, capsys: Capture) -> Path:
    write(tmp_path / "source", FILES)
    Ran(capsys, "archive", tmp_path / "source", tmp_path / "archive", *SMALL_TASKS)
    return tmp_path


def archived(place: Path, capsys: Capture, *options: str) -> Ran:
    return Ran(capsys, "archive", place / "source", place / "archive", *SMALL_TASKS, *options)


def pack_of(place: Path, tensor: str) -> Path:
    store = open_source(str(place / "archive"))
    rows = load_manifest(store, find_snapshot(store, "source/1"))
    [pack] = {row.pack for row in rows if row.tensor == tensor}
    return place / "archive" / pack_key(pack or b"")


@pytest.mark.parametrize("where", [1000, -40], ids=["record", "index"])
def test_a_damaged_pack_is_stored_again(where: int, place: Path, capsys: Capture) -> None:
    pack = pack_of(place, "w1")
    before = files_of(place / "archive" / "packs")
    flip(pack, where)
    assert archived(place, capsys).json["unchanged"]  # a run without the option does not read packs
    ran = archived(place, capsys, "--repair")
    assert (ran.code, ran.json["snapshot"]) == (0, "source/2")
    [warning] = ran.json["warnings"]
    assert (warning["key"], warning["reason"]) == (str(pack.relative_to(place / "archive")), "digest_mismatch")
    assert ran.json["unchanged_bytes"] == len(FILES["b.bin"]) + len(FILES["config.json"])
    assert ran.json["deduplicated_bytes"] > 100_000  # the two tensors of other packs
    # Stored again it is the same pack, so that older snapshots are whole too.
    assert files_of(place / "archive" / "packs") == before
    assert Ran(capsys, "verify", place / "archive", "--all").code == 0
    assert archived(place, capsys, "--repair").json["unchanged"]


def test_where_the_source_went_on_the_newest_snapshot_is_whole(place: Path, capsys: Capture) -> None:
    changed = safetensors([(f"w{i}", "BF16", [300, 100], bf16(i + (i == 2), 30_000)) for i in range(3)])
    flip(pack_of(place, "w2"), 1000)
    write(place / "source", {"a.safetensors": changed})
    assert archived(place, capsys, "--repair").json["snapshot"] == "source/2"
    told = Ran(capsys, "verify", place / "archive", "--all")
    assert (told.code, {item["key"].split("@")[0] for item in told.json["failures"]}) == (4, {"a.safetensors"})
    assert Ran(capsys, "verify", place / "archive").code == 0
    assert Ran(capsys, "restore", place / "archive", place / "back").code == 0
    assert files_of(place / "back") == {**FILES, "a.safetensors": changed}


def test_nothing_damaged_is_nothing_to_do(place: Path, capsys: Capture) -> None:
    before = {path: path.stat().st_mtime_ns for path in objects_of(place / "archive", "")}
    assert archived(place, capsys, "--repair").json["unchanged"]
    assert {path: path.stat().st_mtime_ns for path in objects_of(place / "archive", "")} == before


def test_a_pack_that_cannot_be_read_is_not_taken_for_damaged(place: Path, capsys: Capture, monkeypatch: Patch) -> None:
    def failing(*_: object) -> None:
        raise StoreError("an answer", "none", "packs")

    monkeypatch.setattr(verify, "read_records", failing)
    ran = archived(place, capsys, "--repair")
    assert (ran.code, ran.json["error"]["kind"]) == (1, "store")
    assert [path.name for path in objects_of(place / "archive", "snapshots")] == ["00000001.json"]
