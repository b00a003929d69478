"""What a job that runs every night meets: attempts that were killed, losses, files that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from operators.errors import DeniedError
from pipeline import driver, planning, tasks
from pipeline.segments import layout_of
from tests.cases import bf16, index_of, noise, safetensors
from tests.memory_store import Killed
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, objects_of, write

SMALL_TASKS = (*QUICK, "--set", "task_bytes=64KiB")


def large(seed: int) -> bytes:
    return safetensors([("w", "BF16", [300, 100], bf16(seed, 30_000))])


FILES = {"a.safetensors": large(1), "b.safetensors": large(2), "config.json": b"{}"}


def test_a_lost_pack_is_noticed_by_the_next_run_and_made_again(tmp_path: Path, capsys: Capture) -> None:
    folder, archive = write(tmp_path / "source", FILES), tmp_path / "archive"
    Ran(capsys, "archive", folder, archive, *SMALL_TASKS)
    lost = objects_of(archive, "packs")[0]
    content = lost.read_bytes()
    lost.unlink()
    again = Ran(capsys, "archive", folder, archive, *SMALL_TASKS)
    assert (again.code, again.json["unchanged"], again.json["snapshot"]) == (0, False, "source/2")
    assert [(item["key"], item["reason"]) for item in again.json["warnings"]] == [
        (str(lost.relative_to(archive)), "not_found")
    ]
    assert lost.read_bytes() == content
    assert Ran(capsys, "archive", folder, archive, *SMALL_TASKS).json["unchanged"]


def test_a_run_with_nothing_to_do_repeats_the_warnings(tmp_path: Path, capsys: Capture) -> None:
    folder = write(
        tmp_path / "source", {"a.pt": b"", "b.safetensors": b"text", "c.index.json": index_of({"w": "gone"})}
    )
    ran = [Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK) for _ in range(2)]
    assert ran[1].json["unchanged"]
    named = [[(item["key"], item["reason"]) for item in one.json["warnings"]] for one in ran]
    assert named[0] == named[1]
    assert [reason for _, reason in named[0]] == ["empty_weights_file", "too_short", "index_missing_shards"]


def test_a_file_that_goes_away_after_it_was_read_is_kept(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    folder = write(tmp_path / "source", {"a.bin": noise(1, 100), "rotated.bin": noise(2, 100)})
    read = tasks.read_segments

    def remove_after(source: Any, part: Any, room: Any) -> Any:
        yield from read(source, part, room)
        if part.info.key == "rotated.bin":
            (folder / "rotated.bin").unlink()

    monkeypatch.setattr(tasks, "read_segments", remove_after)
    ran = Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK)
    assert (ran.code, ran.json["failures"]) == (0, [])
    assert [(item["key"], item["reason"]) for item in ran.json["warnings"]] == [("rotated.bin", "vanished")]
    Ran(capsys, "restore", tmp_path / "archive", tmp_path / "out")
    assert files_of(tmp_path / "out")["rotated.bin"] == noise(2, 100)


def test_an_attempt_that_could_not_read_a_header_does_not_stop_the_next(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """The first attempt plans without a file, so it is another run: what it learned must not reach the next one."""
    folder, archive = write(tmp_path / "source", FILES), tmp_path / "archive"

    def deny_first(read: Any, key: str, n_bytes: int, **named: Any) -> Any:
        if key == "a.safetensors":
            raise DeniedError("access", "none", key)
        return layout_of(read, key, n_bytes, **named)

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(planning, "layout_of", deny_first)
    monkeypatch.setattr(driver, "commit", die)
    with pytest.raises(Killed):
        Ran(capsys, "archive", folder, archive, *SMALL_TASKS)
    assert objects_of(archive, "runs")
    monkeypatch.undo()
    ran = Ran(capsys, "archive", folder, archive, *SMALL_TASKS)
    undisturbed = Ran(capsys, "archive", folder, tmp_path / "undisturbed", *SMALL_TASKS)
    assert (ran.code, ran.json["resumed_tasks"]) == (0, 0)
    assert ran.json["content"] == undisturbed.json["content"]
    Ran(capsys, "restore", archive, tmp_path / "out")
    assert files_of(tmp_path / "out") == FILES


def test_one_new_file_leaves_the_packs_of_the_others(tmp_path: Path, capsys: Capture) -> None:
    folder, archive = write(tmp_path / "source", FILES), tmp_path / "archive"
    Ran(capsys, "archive", folder, archive, *SMALL_TASKS)
    before = {path: path.read_bytes() for path in objects_of(archive, "packs")}
    write(folder, {"a-first.safetensors": large(3)})
    Ran(capsys, "archive", folder, archive, *SMALL_TASKS)
    after = {path: path.read_bytes() for path in objects_of(archive, "packs")}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
