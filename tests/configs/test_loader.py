from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.loader import MIN_MEMORY_BYTES, RAY_BYTES, canonical_json, format_bytes, load_run, parse_bytes
from configs.recipe import Config, load, recipe_digest
from operators.errors import UsageError
from synth.options import SearchOptions


def refused(config: str | Path | None = None, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(config, overrides)
    return str(caught.value)


def test_the_defaults_are_complete() -> None:
    config = load()
    assert isinstance(config.recipe.synth, SearchOptions)
    assert config.run.memory_bytes >= MIN_MEMORY_BYTES


def test_every_profile_states_something_else() -> None:
    names = [file.stem for file in Path("configs").glob("*.toml")]
    assert {"default", "fast", "max", "portable"} <= set(names)
    assert len({repr(load(name)) for name in names}) == len(names)
    assert load("portable").recipe.synth.coder == "huffman"
    assert "coder" in refused(None, "coder=arithmetic")


def test_commands_that_only_restore_need_no_search() -> None:
    code = "import configs.loader, sys; configs.loader.load_run(); assert 'synth' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load_run(None, ["workers=3"]) == load(None, ["workers=3"]).run


def test_a_key_that_no_file_states_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = Path("configs/default.toml").read_text("utf-8")
    (tmp_path / "default.toml").write_text(default.replace("retries", "retries_"))
    monkeypatch.setattr("configs.loader._profile", lambda name: tmp_path / f"{name}.toml")
    with pytest.raises(UsageError, match=r"run\.retries"):
        load()


def test_every_key_can_be_set_to_its_own_default_and_none_is_in_two_tables() -> None:
    settings = tomllib.loads(Path("configs/default.toml").read_text("utf-8"))
    names = [name for table in settings.values() for name in table]
    assert len(names) == len(set(names))
    for table, values in settings.items():
        for name, value in values.items():
            if not isinstance(value, dict):
                assert load(None, [f"{name}={json.dumps(value)}"]) == load(
                    None, [f"{table}.{name}={json.dumps(value)}"]
                )


def test_overrides_apply_in_order_and_take_bare_texts() -> None:
    config = load(None, ["task_bytes=16MiB", "run.scratch_dir=/big/disk", "workers=1", "workers=3", "synth.budget=7"])
    assert config.recipe.task_bytes == 16 << 20
    assert config.run.scratch_dir == "/big/disk"
    assert config.run.workers == 3
    assert config.recipe.synth.budget == 7


def test_storage_options_are_texts_whatever_they_look_like() -> None:
    config = load(None, ["storage_options.endpoint_url=http://localhost:1", "run.storage_options.anon=true"])
    assert config.run.storage_options == {"endpoint_url": "http://localhost:1", "anon": "true"}


def test_a_file_states_only_what_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[run]\nworkers = 5\n[recipe]\ntask_bytes = "1MiB"\n')
    config = load(path)
    assert (config.run.workers, config.recipe.task_bytes) == (5, 1 << 20)
    assert config.run.retries == load().run.retries
    assert load(str(path)) == config
    assert load("default") == load()


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    assert "run.workers" in refused(None, "run.wokers=2")
    assert "workers" in refused(None, "wokers=2")
    assert "synth.budget" in refused(None, "synth.buget=2")
    path = tmp_path / "mine.toml"
    path.write_text("[run]\nretrys = 5\n")
    assert "run.retries" in refused(path)
    path.write_text("[runs]\nretries = 5\n")
    assert "run" in refused(path)


def test_what_stands_outside_its_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("budget = 3\n")
    for overrides in ((), ("workers=2",)):
        assert "synth.budget" in refused(path, *overrides)
        with pytest.raises(UsageError, match="budget"):
            load_run(path, overrides)
    path.write_text("run = 3\n")
    assert "a table" in refused(path)
    assert "a table" in refused(None, "run=3", "workers=1")
    assert load(None, ["run={workers=3}"]).run.workers == 3


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("workers=many", ("run.workers", "an integer", "'many'", "str")),
        ("workers=true", ("run.workers", "an integer", "True")),
        ("workers=2.0", ("run.workers", "an integer", "2.0", "float")),
        ("scratch_dir=3", ("run.scratch_dir", "a text", "3")),
        ("task_bytes=1 parsec", ("recipe.task_bytes", "a size", "parsec")),
        ("task_bytes=0", ("recipe.task_bytes", "at least 1")),
        ("workers=-1", ("run.workers", "at least 0", "-1")),
        ("run=3", ("run", "a table")),
        ("storage_options=3", ("run.storage_options", "a table")),
        ("synth.order=best", ("recipe.synth.order", "one of", "default")),
        ("workers", ("key=value",)),
    ],
)
def test_a_wrong_value_names_key_expected_and_found(override: str, fragments: tuple[str, ...]) -> None:
    message = refused(None, override)
    for fragment in fragments:
        assert fragment in message


def test_too_little_memory_names_the_minimum() -> None:
    assert format_bytes(MIN_MEMORY_BYTES) in refused(None, f"memory_bytes={MIN_MEMORY_BYTES - 1}")
    assert load(None, [f"memory_bytes={format_bytes(MIN_MEMORY_BYTES)}"]).run.memory_bytes >= MIN_MEMORY_BYTES
    assert parse_bytes("768MiB") >= MIN_MEMORY_BYTES


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert "absent.toml" in refused(tmp_path / "absent.toml")
    assert "default" in refused("no_such_profile")
    broken = tmp_path / "broken.toml"
    broken.write_text("workers = ")
    assert "broken.toml" in refused(broken)


@given(st.integers(0, 1 << 50))
def test_sizes_round_trip(n_bytes: int) -> None:
    assert parse_bytes(str(n_bytes)) == n_bytes
    assert n_bytes <= parse_bytes(format_bytes(n_bytes)) < n_bytes + (1 << 20)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("768MiB", 768 << 20), ("2 GB", 2 * 10**9), ("1kb", 1000), ("0", 0), ("5B", 5)]
)
def test_units(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5GiB", "1 furlong", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="768MiB"):
        parse_bytes(text)


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if dataclasses.is_dataclass(value):
        return [
            leaf
            for field in dataclasses.fields(value)
            for leaf in leaves(getattr(value, field.name), (*path, field.name))
        ]
    return [(path, value)]


def changed(value: Any, path: tuple[str, ...]) -> Any:
    """Return `value` with the leaf at `path` changed."""
    if path:
        return dataclasses.replace(value, **{path[0]: changed(getattr(value, path[0]), path[1:])})
    if isinstance(value, tuple):
        return (*value, "x")
    return value + ("x" if isinstance(value, str) else 1)


def test_the_digest_covers_every_part_of_the_recipe_and_nothing_of_the_run() -> None:
    config = load()
    digest = recipe_digest(config.recipe, "p", 1, "1.5.7")
    others = {
        recipe_digest(config.recipe, "q", 1, "1.5.7"),
        recipe_digest(config.recipe, "p", 2, "1.5.7"),
        recipe_digest(config.recipe, "p", 1, "1.5.8"),
        *(recipe_digest(changed(config.recipe, path), "p", 1, "1.5.7") for path, _ in leaves(config.recipe)),
    }
    assert len(others) == 3 + len(leaves(config.recipe))
    assert digest not in others
    assert recipe_digest(load(None, ["workers=7", "memory_bytes=4GiB"]).recipe, "p", 1, "1.5.7") == digest


def test_the_digest_is_the_same_in_every_process() -> None:
    code = "from configs.recipe import *; print(recipe_digest(load().recipe, 'p', 1, '1'))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert digests == {recipe_digest(load().recipe, "p", 1, "1") + "\n"}


def test_canonical_json_has_one_form_and_no_floats() -> None:
    assert canonical_json({"b": [1, True, None], "a": "é"}) == b'{"a":"\\u00e9","b":[1,true,null]}'
    with pytest.raises(TypeError, match="floats"):
        canonical_json({"a": [{"b": 1.0}]})


def test_a_config_travels_between_processes() -> None:
    config = load(None, ["storage_options.profile=p"])
    copy: Config = pickle.loads(pickle.dumps(config))
    assert copy == config


@pytest.mark.parametrize(
    ("memory", "in_flight", "at_once", "on_ray"),
    [("705MiB", 2, 1, 1), ("768MiB", 2, 1, 1), ("1GiB", 2, 2, 1), ("1GiB", 1, 1, 1), ("4GiB", 9, 9, 9)],
)
def test_memory_limits_how_many_tasks_are_begun(memory: str, in_flight: int, at_once: int, on_ray: int) -> None:
    run = load_run(None, [f"run.memory_bytes={memory}", f"run.tasks_in_flight={in_flight}"])
    assert run.tasks_at_once() == at_once
    assert run.tasks_at_once(RAY_BYTES) == on_ray
