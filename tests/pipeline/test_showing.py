"""What commands tell without doing more than they are asked for: dry runs, info, progress, a check of one part."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.progress import Progress
from tests import cases
from tests.cases import bf16, noise, safetensors
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, objects_of, write

WEIGHTS = safetensors([("w", "BF16", [20, 100], bf16(1, 2000))], {"config": '{"layers":\n [1]}', "thumb": "/9j" * 3000})
SHARD = "model-00001-of-00002.safetensors"
FILES = {
    SHARD: WEIGHTS,
    "model.safetensors.index.json": cases.index_of({"w": SHARD, "x": SHARD, "v": "model-00002-of-00002.safetensors"}),
    "sub/noise.bin": noise(1, 3000),
}


@pytest.fixture
def archive(tmp_path: Path, capsys: Capture) -> Path:
    source = write(tmp_path / "llama", FILES)
    assert Ran(capsys, "archive", source, tmp_path / "vault", *QUICK, "--set", "task_bytes=4KiB").code == 0
    return tmp_path / "vault"


def test_u01_a_dry_run_of_restore_has_the_selection_of_the_real_one(
    archive: Path, tmp_path: Path, capsys: Capture
) -> None:
    """U01: names in order, bytes and their total; nothing is written, though nothing could be either."""
    (tmp_path / "out").write_bytes(b"no folder")
    for options in ((), ("--include", "*.json", "--include", "sub"), ("--exclude", "*.bin")):
        told = Ran(capsys, "restore", archive, tmp_path / "out", "--dry-run", *options)
        done = Ran(capsys, "restore", archive, tmp_path / f"out-{len(options)}", *options)
        files = files_of(tmp_path / f"out-{len(options)}")
        assert [(one["key"], one["n_bytes"]) for one in told.json["files"]] == [
            (key, len(data)) for key, data in sorted(files.items())
        ]
        assert (told.code, told.json["source_bytes"]) == (0, done.json["source_bytes"])
    assert (tmp_path / "out").read_bytes() == b"no folder"


def test_a_dry_run_of_one_tensor_lists_it_alone(archive: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "out").write_bytes(b"no folder")
    told = Ran(capsys, "restore", archive, tmp_path / "out", "--dry-run", "--tensor", "w")
    done = Ran(capsys, "restore", archive, tmp_path / "one.safetensors", "--tensor", "w")
    assert [one["key"] for one in told.json["files"]] == ["w"]
    assert told.json["source_bytes"] == done.json["source_bytes"]
    assert Ran(capsys, "restore", archive, tmp_path / "out", "--dry-run", "--tensor", "none").code != 0


def test_q02_an_index_is_compared_with_what_the_archive_has(archive: Path, capsys: Capture) -> None:
    """Q02, E02: by `verify`, which needs no source, and by `info -v`; plain `info` reads no pack."""
    named = {
        "index_missing_shards": "model-00002-of-00002.safetensors",
        "index_missing_tensors": "x",
    }
    verified, shown = Ran(capsys, "verify", archive), Ran(capsys, "info", archive, "-v")
    assert (verified.code, shown.code) == (0, 0)
    for ran in (verified, shown):
        assert {found["reason"]: found["detail"] for found in ran.json["warnings"]} == named
    assert Ran(capsys, "info", archive, "-v", "--include", "sub").json["warnings"] == []
    assert Ran(capsys, "verify", archive, "--include", "*.json").json["warnings"] == []
    for pack in objects_of(archive, "packs"):
        pack.unlink()
    assert "warnings" not in Ran(capsys, "info", archive).json


def test_s23_metadata_is_shown_in_a_line(archive: Path, capsys: Capture) -> None:
    found = {item["key"]: item.get("metadata") for item in Ran(capsys, "info", archive, "-v").json["files"]}
    assert found[SHARD] == {"config": '{"layers":\n [1]}', "thumb": "/9j" * 3000}
    assert found["sub/noise.bin"] is None
    main(["info", str(archive), "-v"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "metadata" in line]
    assert json.dumps({"config": '{"layers":\n [1]}'})[:-1] in line
    assert len(line) < 300


def test_explain_begins_with_the_tensor_and_what_is_stored(archive: Path, capsys: Capture) -> None:
    assert main(["explain", str(archive), "--tensor", "w", *QUICK[2:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{SHARD}: w")
    assert lines[1].startswith("stored ")
    assert lines[2].endswith(" bytes")
    assert not any("\\n" in line for line in lines)


def test_z02_z04_every_damage_is_named_and_a_check_has_a_scope(archive: Path, tmp_path: Path, capsys: Capture) -> None:
    """Z02: faults of several packs at once; Z04: of one checkpoint, or of some files."""
    before = set(objects_of(archive, "packs"))
    write(tmp_path / "other", {"theirs.bin": noise(2, 3000)})
    assert Ran(capsys, "archive", tmp_path / "other", archive, *QUICK).code == 0
    assert len(before) >= 2
    for pack in before:
        data = pack.read_bytes()
        pack.write_bytes(bytes([data[0] ^ 1]) + data[1:20] + bytes([data[20] ^ 1]) + data[21:])
    found = Ran(capsys, "verify", archive, "--snapshot", "llama", "--level", "bytes")
    assert found.code == 4
    named = {failure["key"].partition("@")[0] for failure in found.json["failures"]}
    assert named == FILES.keys()
    assert Ran(capsys, "verify", archive).code == 4
    assert Ran(capsys, "verify", archive, "--snapshot", "other").code == 0
    assert Ran(capsys, "verify", archive, "--include", "theirs.bin").code == 0


def test_z06_one_file_comes_back_alone(archive: Path, tmp_path: Path, capsys: Capture) -> None:
    assert Ran(capsys, "restore", archive, tmp_path / "out", "--include", "sub/noise.bin").code == 0
    assert files_of(tmp_path / "out") == {"sub/noise.bin": FILES["sub/noise.bin"]}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown", "lines"), [(io.StringIO, True, 3), (io.StringIO, False, 0), (_Terminal, False, 0)]
)
def test_u03_a_log_gets_a_line_an_interval(
    stream: type[io.StringIO], shown: bool, lines: int, monkeypatch: Patch
) -> None:
    """Of 100 steps of a tenth of a second; nothing at all where nobody wants to see it."""
    log, clock = stream(), iter(range(1000))
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 10)
    with Progress("archive", 1000, shown=shown, interval_seconds=3) as display:
        for _ in range(100):
            display.add(10)
    assert log.getvalue().count("\n") == lines
    assert "\r" not in log.getvalue()


def test_u03_a_terminal_gets_a_bar(monkeypatch: Patch) -> None:
    log = _Terminal()
    monkeypatch.setattr(sys, "stderr", log)
    with Progress("archive", 1000, shown=True, interval_seconds=3) as display:
        display.add(1000)
    assert "100%" in log.getvalue()
