"""Verification of a whole archive over many nights, its receipts, the source level, and damage of every kind (T22)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from operators.errors import DeniedError
from operators.run import execute
from pipeline import commands, comparing, keeping, reading, verifying
from pipeline.archive import find_snapshot, load_manifest
from pipeline.locations import open_source
from pipeline.packs import pack_key
from tests.cases import bf16, noise, safetensors
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, objects_of, write

SMALL_TASKS = (*QUICK, "--set", "task_bytes=64KiB")
FILES = {
    "a.safetensors": safetensors([("w", "BF16", [300, 100], bf16(1, 30_000)), ("v", "BF16", [90, 90], bf16(3, 8100))]),
    "b.safetensors": safetensors([("w", "BF16", [300, 100], bf16(2, 30_000))]),
    "config.json": b"{}",
    "empty.txt": b"",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", FILES)


@pytest.fixture
def archive(source: Path, tmp_path: Path, capsys: Capture) -> Path:
    """Two snapshots that share most of their records."""
    write(source, {"z.bin": noise(5, 5000)})
    Ran(capsys, "archive", source, tmp_path / "archive", *SMALL_TASKS)
    write(source, {"z.bin": noise(6, 5000)})
    assert Ran(capsys, "archive", source, tmp_path / "archive", *SMALL_TASKS).json["snapshot"] == "source/2"
    return tmp_path / "archive"


# -- all snapshots, in parts --------------------------------------------------------------------


def test_all_snapshots_are_looked_at_and_what_they_share_once(archive: Path, capsys: Capture) -> None:
    newest = Ran(capsys, "verify", archive).json
    every = Ran(capsys, "verify", archive, "--all").json
    assert (every["files"], every["segments"]) == (2 * newest["files"], 2 * newest["segments"])
    assert every["verified"] == newest["verified"] + 1  # the one segment that changed
    parts = [Ran(capsys, "verify", archive, "--all", "--part", f"{n}/3").json["verified"] for n in (1, 2, 3)]
    assert sum(parts) == every["verified"]
    only_old = objects_of(archive, "snapshots")[0]
    only_old.write_bytes(only_old.read_bytes()[:-3])
    assert Ran(capsys, "verify", archive).code == 0
    damaged = Ran(capsys, "verify", archive, "--all", "--level", "manifest")
    assert (damaged.code, [item["key"] for item in damaged.json["failures"]]) == (4, ["source/1"])


def test_the_part_of_the_oldest_receipt_is_next(archive: Path, capsys: Capture, monkeypatch: Patch) -> None:
    moments = iter(range(1, 100))
    monkeypatch.setattr(verifying, "_stamp", lambda _: f"20260101T0000{next(moments):02d}Z")
    whole = Ran(capsys, "verify", archive, "--all").json["verified"]
    seen = 0
    for number in (1, 2, 3, 1):
        ran = Ran(capsys, "verify", archive, "--all", "--part", "next/3", "--receipt")
        assert ran.code == 0
        path = objects_of(archive, "verify")[-1]
        receipt = json.loads(path.read_bytes())
        assert path.name.endswith(f"-decode-{number}-3.json")
        assert (receipt["part"], receipt["level"], receipt["failures"]) == ([number, 3], "decode", [])
        assert receipt["verified"] == ran.json["verified"]
        assert [name for name, _ in receipt["snapshots"]] == ["source/1", "source/2"]
        seen += ran.json["verified"]
    first = json.loads(objects_of(archive, "verify")[0].read_bytes())
    assert seen - first["verified"] == whole
    # Another level, or another number of parts, counts for itself.
    Ran(capsys, "verify", archive, "--level", "bytes", "--part", "next/3", "--receipt")
    Ran(capsys, "verify", archive, "--part", "next/4", "--receipt")
    names = [path.name.partition("-")[2] for path in objects_of(archive, "verify")]
    assert names[-2:] == ["bytes-1-3.json", "decode-1-4.json"]


def test_without_being_asked_verify_writes_nothing(archive: Path, capsys: Capture) -> None:
    Ran(capsys, "verify", archive, "--all")
    assert not (archive / "verify").exists()
    assert Ran(capsys, "verify", archive, "--receipt", "--include", "*.json").code == 2


def test_a_receipt_that_cannot_be_written_hides_no_fault(archive: Path, capsys: Capture, monkeypatch: Patch) -> None:
    def refuse(*_: Any) -> None:
        raise DeniedError("access", "none", "verify/")

    monkeypatch.setattr(verifying, "put_receipt", refuse)
    assert (whole := Ran(capsys, "verify", archive, "--receipt")).code == 3
    assert [item["reason"] for item in whole.json["failures"]] == ["denied"]
    objects_of(archive, "packs")[0].unlink()
    damaged = Ran(capsys, "verify", archive, "--receipt")
    assert damaged.code == 4
    assert {item["reason"] for item in damaged.json["failures"]} > {"denied"}


def test_a_receipt_tells_what_was_found(archive: Path, capsys: Capture) -> None:
    pack = objects_of(archive, "packs")[0]
    pack.write_bytes(pack.read_bytes()[:-5])
    assert Ran(capsys, "verify", archive, "--receipt").code == 4
    receipt = json.loads(objects_of(archive, "verify")[0].read_bytes())
    assert (str(pack.relative_to(archive)), "wrong_size") in map(tuple, receipt["failures"])


def test_what_failed_is_not_verified(archive: Path, capsys: Capture) -> None:
    whole = Ran(capsys, "verify", archive).json
    assert whole["verified"] == whole["segments"]
    (archive / "packs").rename(archive / "elsewhere")
    lost = Ran(capsys, "verify", archive, "--receipt").json
    assert (lost["segments"], lost["verified"]) == (whole["segments"], 0)
    assert json.loads(objects_of(archive, "verify")[0].read_bytes())["verified"] == 0
    (archive / "elsewhere").rename(archive / "packs")
    store = open_source(str(archive))
    row = next(row for row in load_manifest(store, find_snapshot(store)) if row.file == "z.bin")
    flip(archive / pack_key(row.pack or b""), row.pack_offset or 0)
    assert Ran(capsys, "verify", archive).json["verified"] == whole["segments"] - 1


def test_a_prune_beside_it_takes_its_snapshots_alone(archive: Path, capsys: Capture, monkeypatch: Patch) -> None:
    numbers = lambda _: {"source": [1, 2]}  # noqa: E731
    for module in (verifying, commands, keeping):
        monkeypatch.setattr(module, "checkpoints", numbers)
    objects_of(archive, "snapshots")[0].unlink()
    ran = Ran(capsys, "verify", archive, "--all", "--receipt")
    assert (ran.code, ran.json["snapshot"]) == (0, "source/2")
    assert len(objects_of(archive, "verify")) == 1
    listed = Ran(capsys, "list", archive)
    assert (listed.code, [one["snapshot"] for one in listed.json["snapshots"]]) == (0, ["source/2"])
    rebuilt = Ran(capsys, "rebuild", archive)
    assert (rebuilt.code, rebuilt.json["failures"]) == (0, [])


# -- the source ---------------------------------------------------------------------------------


def test_the_source_is_compared_without_a_pack(archive: Path, source: Path, capsys: Capture) -> None:
    for pack in objects_of(archive, "packs"):
        pack.write_bytes(bytes(pack.stat().st_size))
    ran = Ran(capsys, "verify", archive, "--level", "source", "--source", source)
    assert (ran.code, ran.json["verified"], ran.json["failures"]) == (0, ran.json["segments"], [])


def test_a_source_that_differs_is_told(archive: Path, source: Path, capsys: Capture, monkeypatch: Patch) -> None:
    write(source, {"new.txt": b"1", "b.safetensors": FILES["a.safetensors"]})
    (source / "config.json").unlink()
    ran = Ran(capsys, "verify", archive, "--level", "source", "--source", source)
    assert ran.code == 4
    found = {(item["key"], item["reason"]) for item in ran.json["failures"]}
    assert found == {("config.json", "not_found"), ("b.safetensors", "changed_during_read")}
    assert [(item["key"], item["reason"]) for item in ran.json["warnings"]] == [("new.txt", "not_archived")]
    # Other bytes under a generation that the store says is the same.
    write(source, {"config.json": b"[]"})

    def careless(url: str, options: dict[str, str]) -> Any:
        store: Any = open_source(url, options)
        read = store.get_ranges
        store.get_ranges = lambda info, ranges: read(store.head(info.key), ranges)
        return store

    monkeypatch.setattr(comparing, "open_source", careless)
    only = Ran(capsys, "verify", archive, "--level", "source", "--source", source, "--include", "config.json")
    assert [(item["key"], item["reason"]) for item in only.json["failures"]] == [("config.json@0", "digest_mismatch")]


def test_level_and_source_belong_together(archive: Path, source: Path, capsys: Capture) -> None:
    assert Ran(capsys, "verify", archive, "--level", "source").code == 2
    assert Ran(capsys, "verify", archive, "--source", source).code == 2


# -- damage -------------------------------------------------------------------------------------

LEVELS = ("manifest", "bytes", "decode")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def _flip_snapshot(archive: Path, _pack: Path, _offset: int) -> str:
    flip(objects_of(archive, "snapshots")[-1], 50)
    return "source/2"


def _flip_manifest(archive: Path, _pack: Path, _offset: int) -> str:
    flip(archive / "manifests" / f"{find_snapshot(open_source(str(archive))).manifest}.parquet", 500)
    return "source/2"


def _lose_manifest(archive: Path, _pack: Path, _offset: int) -> str:
    (archive / "manifests" / f"{find_snapshot(open_source(str(archive))).manifest}.parquet").unlink()
    return "source/2"


def _lose_pack(archive: Path, pack: Path, _offset: int) -> str:
    pack.unlink()
    return str(pack.relative_to(archive))


def _cut_pack(archive: Path, pack: Path, _offset: int) -> str:
    pack.write_bytes(pack.read_bytes()[:-1])
    return str(pack.relative_to(archive))


def _swap_pack(archive: Path, pack: Path, _offset: int) -> str:
    """Another object of the same size in its place: a stale copy."""
    pack.write_bytes(noise(8, pack.stat().st_size))
    return "b.safetensors@"


def _flip_record(archive: Path, pack: Path, offset: int) -> str:
    flip(pack, offset)
    return "b.safetensors@"


def _flip_index(archive: Path, pack: Path, _offset: int) -> str:
    flip(pack, -40)
    return str(pack.relative_to(archive))


@pytest.mark.parametrize(
    ("damage", "level"),
    [
        (_flip_snapshot, "manifest"),
        (_flip_manifest, "manifest"),
        (_lose_manifest, "manifest"),
        (_lose_pack, "manifest"),
        (_cut_pack, "manifest"),
        (_swap_pack, "bytes"),
        (_flip_record, "bytes"),
        (_flip_index, "bytes"),
    ],
)
def test_damage_is_found_at_the_level_that_promises_it(
    damage: Callable[[Path, Path, int], str], level: str, archive: Path, capsys: Capture
) -> None:
    store = open_source(str(archive))
    row = max(
        (row for row in load_manifest(store, find_snapshot(store)) if row.file == "b.safetensors"),
        key=lambda row: row.n_bytes,
    )
    pack = archive / pack_key(row.pack or b"")
    named = damage(archive, pack, (row.pack_offset or 0) + (row.stored_bytes or 0) // 2)
    for one in LEVELS:
        ran = Ran(capsys, "verify", archive, "--level", one)
        keys = [item["key"] for item in ran.json["failures"]]
        if LEVELS.index(one) < LEVELS.index(level):
            assert (ran.code, keys) == (0, []), f"{one} does not promise this"
        else:
            assert ran.code == 4
            assert any(key.startswith(named) for key in keys), f"{one}: {keys}"
            assert all(key.startswith((named, "b.safetensors@", str(pack.relative_to(archive)))) for key in keys)


def test_what_decodes_to_other_bytes_is_found_by_decoding(archive: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """A record of the right digest that decodes wrongly, as a fault of a decoder would have it."""

    def faulty(record: memoryview, *books: Any, n_bytes: int, **named: Any) -> Any:
        wrong = bytearray(record)
        wrong[-1] ^= 1 if n_bytes == 5000 else 0
        return execute(wrong, *books, n_bytes=n_bytes, **named)

    monkeypatch.setattr(reading, "execute", faulty)
    assert Ran(capsys, "verify", archive, "--level", "bytes").code == 0
    ran = Ran(capsys, "verify", archive, "--level", "decode")
    assert (ran.code, {(item["key"], item["reason"]) for item in ran.json["failures"]}) == (
        4,
        {("z.bin@0", "digest_mismatch")},
    )
