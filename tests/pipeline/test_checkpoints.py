"""Many checkpoints below one source: which there are, which still grow, and one snapshot for each of the others."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from operators.errors import UsageError
from pipeline import tasks
from pipeline.checkpoints import Found, find_checkpoints, why_unfinished
from tests.cases import bf16, safetensors
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, write

WEIGHTS = safetensors([("w", "BF16", [20, 100], bf16(1, 2000))])
KEYS = ("a/step-1/w", "a/step-1/x/y", "a/step-10/w", "b/step-1/w", "b/other/w", "top", "step-1/w")
SETTLED = ("--set", "run.settle_seconds=0")


def test_a_pattern_matches_part_by_part() -> None:
    assert find_checkpoints(KEYS, "*/step-*") == [
        Found("a/step-1", ("a/step-1/w", "a/step-1/x/y")),
        Found("a/step-10", ("a/step-10/w",)),
        Found("b/step-1", ("b/step-1/w",)),
    ]
    assert [found.name for found in find_checkpoints(KEYS, "step-?")] == ["step-1"]
    assert find_checkpoints(KEYS, "top") == [Found("top", ("top",))]
    assert [found.name for found in find_checkpoints(["r[1]/w", "r1/w"], "r[[]1]")] == ["r[1]"]
    with pytest.raises(UsageError, match="parts between slashes"):
        find_checkpoints(KEYS, "a//b")


def why(name: str, *keys: str, **texts: str) -> str | None:
    """Return what `why_unfinished` says of the folder `name` among objects, some of them with a text."""
    every = frozenset(keys) | texts.keys()
    found = Found(name, tuple(sorted(key for key in every if key.startswith(f"{name}/"))))
    return why_unfinished(found, every, lambda key: texts.get(key, "").encode(), 10_000, 600)


@pytest.mark.parametrize(
    ("name", "keys", "texts", "marker"),
    [
        ("run/tmp-checkpoint-500", ["run/tmp-checkpoint-500/w"], {}, "tmp-checkpoint-500"),
        ("run/5", ["run/5/state.orbax-checkpoint-tmp-17/w"], {}, "orbax"),
        ("run/5", ["run/5/w", "run/5/v.incomplete"], {}, "v.incomplete"),
        ("run/step=5", ["run/step=5/w", "run/step=5-unfinished"], {}, "lies beside it"),
        ("run/5", ["run/5/__0_0.distcp", "run/5/__1_0.distcp"], {}, "no .metadata"),
        ("iter_0000200", ["iter_0000200/w"], {"latest_checkpointed_iteration.txt": "100"}, "older"),
        ("r/iter_0000200", ["r/iter_0000200/w"], {"r/latest_checkpointed_iteration.txt": "100\n"}, "older"),
        ("r/global_step20", ["r/global_step20/w"], {"r/latest": "global_step10"}, "older"),
    ],
)
def test_what_frameworks_leave_until_the_end(name: str, keys: list[str], texts: dict[str, str], marker: str) -> None:
    assert marker in (why(name, *keys, **texts) or "whole")


@pytest.mark.parametrize(
    ("name", "keys", "texts"),
    [
        ("run/checkpoint-500", ["run/checkpoint-500/w", "run/tmp-checkpoint-600/w"], {}),
        ("run/5", ["run/5/__0_0.distcp", "run/5/.metadata"], {}),
        ("iter_0000100", ["iter_0000100/w"], {"latest_checkpointed_iteration.txt": "100"}),
        ("iter_0000100", ["iter_0000100/w"], {"latest_checkpointed_iteration.txt": "release"}),
        ("r/global_step9", ["r/global_step9/w"], {"r/latest": "global_step10"}),
        ("r/5", ["r/5/w", "r/5/party", "r/5/template"], {}),
    ],
)
def test_what_is_whole_is_taken(name: str, keys: list[str], texts: dict[str, str]) -> None:
    assert why(name, *keys, **texts) is None


def test_what_changed_a_moment_ago_waits() -> None:
    def nothing(key: str) -> bytes:
        raise AssertionError(key)

    assert "599 s ago" in (why_unfinished(Found("a", ("a/w",)), frozenset(["a/w"]), nothing, 599, 600) or "")
    assert why_unfinished(Found("a", ("a/w",)), frozenset(["a/w"]), nothing, 600, 600) is None


def source_of(tmp_path: Path) -> Path:
    return write(
        tmp_path / "models",
        {
            "llama/step-1/model.safetensors": WEIGHTS,
            "llama/step-2/model.safetensors": WEIGHTS[:-1],
            "llama/step-3/model.safetensors.part": b"begun",
            "qwen/step-1/model.safetensors": WEIGHTS,
            "qwen/notes.txt": b"no checkpoint",
        },
    )


def test_a_snapshot_of_each_and_one_summary(tmp_path: Path, capsys: Capture) -> None:
    source, archive = source_of(tmp_path), tmp_path / "vault"
    options = ("--checkpoint-glob", "*/step-*", *SETTLED, *QUICK)
    first = Ran(capsys, "archive", source, archive, *options)
    assert first.code == 0
    assert {one["checkpoint"]: one["outcome"] for one in first.json["checkpoints"]} == {
        "llama/step-1": "archived",
        "llama/step-2": "archived",
        "llama/step-3": "unfinished",
        "qwen/step-1": "archived",
    }
    listed = Ran(capsys, "list", archive)
    assert {one["snapshot"] for one in listed.json["snapshots"]} == {
        "llama/step-1/1",
        "llama/step-2/1",
        "qwen/step-1/1",
    }
    (stored,) = (archive / "jobs").iterdir()
    assert json.loads(stored.read_bytes()) == first.json

    Ran(capsys, "restore", archive, tmp_path / "back", "--snapshot", "qwen/step-1")
    assert files_of(tmp_path / "back") == {"model.safetensors": WEIGHTS}

    (source / "llama/step-3/model.safetensors.part").rename(source / "llama/step-3/model.safetensors")
    second = Ran(capsys, "archive", source, archive, *options)
    assert second.json["outcomes"] == {
        "archived": 1,
        "unchanged": 3,
        "incomplete": 0,
        "unfinished": 0,
        "failed": 0,
        "stopped": 0,
    }
    assert len(list((archive / "jobs").iterdir())) == 2


def test_a_failure_stays_with_its_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    source, archive = source_of(tmp_path), tmp_path / "vault"
    (source / "llama/step-1/gone").symlink_to(tmp_path / "nowhere")
    ran = Ran(capsys, "archive", source, archive, "--checkpoint-glob", "*/step-1", *SETTLED, *QUICK)
    assert ran.code == 3
    assert {one["checkpoint"]: one["outcome"] for one in ran.json["checkpoints"]} == {
        "llama/step-1": "incomplete",
        "qwen/step-1": "archived",
    }


def test_a_night_on_which_all_fails_has_failed(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("pipeline.driver.find_base", _refuse)
    ran = Ran(capsys, "archive", source_of(tmp_path), tmp_path / "v", "--checkpoint-glob", "*/step-1", *SETTLED, *QUICK)
    assert (ran.code, ran.json["outcomes"]["failed"]) == (1, 2)
    assert "access" in ran.json["checkpoints"][0]["reason"]


def _refuse(*_: object) -> None:
    from operators.errors import DeniedError

    raise DeniedError("access", "none", "the archive")


def test_a_night_that_is_told_to_stop_leaves_its_summary(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    source, archive = source_of(tmp_path), tmp_path / "vault"
    read = tasks.read_segments

    def stop(store: Any, part: Any, room: Any) -> Any:
        if "step-2" in store.url:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(store, part, room)

    monkeypatch.setattr(tasks, "read_segments", stop)
    options = ("--checkpoint-glob", "*/step-*", *SETTLED, *QUICK)
    ran = Ran(capsys, "archive", source, archive, *options)
    assert (ran.code, ran.json["error"]["kind"]) == (143, "stopped")
    (stored,) = (archive / "jobs").iterdir()
    assert {one["checkpoint"]: one["outcome"] for one in json.loads(stored.read_bytes())["checkpoints"]} == {
        "llama/step-1": "archived",
        "llama/step-2": "stopped",
        "llama/step-3": "stopped",
        "qwen/step-1": "stopped",
    }
    monkeypatch.undo()
    assert Ran(capsys, "archive", source, archive, *options).json["outcomes"]["archived"] == 2


def test_the_dry_run_tells_why_something_waits(tmp_path: Path, capsys: Capture) -> None:
    source = source_of(tmp_path)
    old = time.time() - 10_000
    for path in (source / "llama").rglob("*"):
        os.utime(path, (old, old))
    ran = Ran(capsys, "archive", source, tmp_path / "vault", "--checkpoint-glob", "*/step-*", "--dry-run", *QUICK)
    waits = {one["checkpoint"]: one["unfinished"] for one in ran.json["checkpoints"]}
    assert waits["llama/step-1"] is None
    assert "model.safetensors.part" in waits["llama/step-3"]
    assert "s ago" in waits["qwen/step-1"]
    assert not (tmp_path / "vault").exists()


def test_wrong_use(tmp_path: Path, capsys: Capture) -> None:
    source = source_of(tmp_path)
    assert Ran(capsys, "archive", source, tmp_path / "v", "--checkpoint-glob", "*/none-*", *QUICK).code == 5
    assert Ran(capsys, "archive", source, tmp_path / "v", "--checkpoint-glob", "*", "--name", "x", *QUICK).code == 2


def test_an_archive_below_its_source_is_no_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    source = source_of(tmp_path)
    for _ in range(2):
        ran = Ran(capsys, "archive", source, source / "vault", "--checkpoint-glob", "*/*", *SETTLED, *QUICK)
        assert {one["checkpoint"].split("/")[0] for one in ran.json["checkpoints"]} == {"llama", "qwen"}


def test_a_source_that_ends_in_a_star_has_checkpoints_of_the_folder_above(tmp_path: Path, capsys: Capture) -> None:
    ran = Ran(
        capsys,
        "archive",
        f"{source_of(tmp_path)}/l*",
        tmp_path / "v",
        "--checkpoint-glob",
        "*/step-1",
        *SETTLED,
        *QUICK,
    )
    assert {one["checkpoint"]: one["outcome"] for one in ran.json["checkpoints"]} == {"llama/step-1": "archived"}
