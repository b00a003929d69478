"""What an archive that has lost its small objects can be made of again (T24)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cases import bf16, noise, safetensors
from tests.pipeline.test_jobs import QUICK, Capture, Ran, files_of, objects_of, write

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


def test_a_manifest_whose_receipts_are_gone_is_not_made_up(archive: Path, capsys: Capture) -> None:
    for path in objects_of(archive, "manifests"):
        path.unlink()
    receipts = [path for path in objects_of(archive, "runs") if path.parent.name == "receipts"]
    for path in receipts:
        data = path.read_bytes()
        path.unlink()
        before = files_of(archive)
        ran = Ran(capsys, "rebuild", archive)
        assert ran.code == 3
        assert len(ran.json["failures"]) == 1
        for manifest in objects_of(archive, "manifests"):
            manifest.unlink()
        assert before == files_of(archive)
        path.write_bytes(data)


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
