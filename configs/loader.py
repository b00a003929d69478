"""Settings: read, checked against dataclasses, and named in every complaint.

`Run` holds everything that cannot decide a byte; `configs.recipe` adds the recipe, which decides all, and
with it the search. Commands that only restore load `Run` alone, so they work without the search.

The values come from ``default.toml``, which states every key, then from the file or profile of
``--config``, then from each ``--set key=value``. The dataclasses have no defaults of their own, so that
a value is written in one place.

Types are those of the dataclasses. A name that ends in ``_bytes`` also takes a text such as ``"768MiB"``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from operators.errors import UsageError
from operators.limits import RECORD_BYTES, SCRATCH_FIXED_BYTES, SEGMENT_BYTES

T = TypeVar("T")

INTERPRETER_BYTES = 256 << 20
"""Resident memory of a worker that holds nothing yet: the interpreter, numpy, compiled kernels, a store."""
MIN_MEMORY_BYTES = INTERPRETER_BYTES + 3 * SEGMENT_BYTES + RECORD_BYTES + 2 * SEGMENT_BYTES + SCRATCH_FIXED_BYTES
"""A segment as read and as decoded, the next one, its record, and the scratch that the format allows a program."""
TASK_MEMORY_BYTES = 3 * SEGMENT_BYTES + RECORD_BYTES
"""What another task holds: segments as read and as decoded, the next ones, and records; scratch is there once."""
RAY_BYTES = 192 << 20
"""What Ray has in memory of each of its workers, beside that."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that cannot change a byte of an archive.

    Attributes
    ----------
    workers : int
        Processes or actors that run tasks; 0 takes one per CPU.
    memory_bytes : int
        Resident memory that one worker may use.
    scratch_dir : str
        Where packs go on that outgrow their memory; empty takes the archive where it is a folder, else the temporary
        directory of the system.
    retries : int
        How often a failed task is tried again.
    tasks_in_flight : int
        Most tasks begun and not yet done, per worker: one computes, others are read or stored.
    progress_seconds : int
        Interval of the progress lines where there is no terminal.
    settle_seconds : int
        How long a checkpoint that was found by a pattern must be at rest before it is archived.
    on_changing : str
        What becomes of an object that changes while it is archived: ``skip`` leaves it out, ``retry`` reads it once
        more, from the start, and ``fail`` ends the run without a commit.
    storage_options : mapping of str to str
        Passed to the store: ``endpoint_url``, ``addressing_style``, ``profile`` ...
    """

    workers: int
    memory_bytes: int
    scratch_dir: str
    retries: int
    tasks_in_flight: int
    progress_seconds: int
    settle_seconds: int
    on_changing: Literal["skip", "retry", "fail"]
    storage_options: Mapping[str, str]

    def tasks_at_once(self, other_bytes: int = 0) -> int:
        """Tasks that a worker begins: at most `tasks_in_flight`, no more than it has memory for, and at least one.

        Parameters
        ----------
        other_bytes : int
            What of its memory is not ours.
        """
        left_bytes = self.memory_bytes - MIN_MEMORY_BYTES - other_bytes
        return max(1, min(self.tasks_in_flight, 1 + left_bytes // TASK_MEMORY_BYTES))


def load_run(config: str | Path | None = None, overrides: Sequence[str] = ()) -> Run:
    """Read what cannot decide bytes; parameters and errors as of `configs.recipe.load`."""
    return run_of(read_settings(config, overrides))


def read_settings(config: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return all settings as nested tables, unknown keys of tables still among them."""
    settings = _read(_profile("default"))
    if config is not None:
        extra = _read(_locate(config))
        for name, table in extra.items():
            if name not in settings:
                raise _unknown_key((name,), _all_names(settings))
            if not isinstance(table, dict):
                raise _wrong_type((name,), "a table", table)
        _overlay(settings, extra, ())
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise UsageError("key=value", repr(override), "--set")
        path = _full_path(key.strip(), settings)
        value = text if path[:-1] == ("run", "storage_options") else _value(text.strip())
        if len(path) == 1 and not isinstance(value, dict):
            raise _wrong_type(path, "a table", value)
        _overlay(settings, _nested(path, value), ())
    return settings


def run_of(settings: Mapping[str, Any]) -> Run:
    """Return the table ``[run]``, checked."""
    run = build(Run, settings["run"], ("run",))
    if run.memory_bytes < MIN_MEMORY_BYTES:
        raise UsageError(
            f"at least {format_bytes(MIN_MEMORY_BYTES)} for a segment with its working memory",
            format_bytes(run.memory_bytes),
            "run.memory_bytes",
            f"use --memory {format_bytes(MIN_MEMORY_BYTES)} or more",
        )
    for key, least in (
        ("workers", 0),
        ("retries", 0),
        ("tasks_in_flight", 1),
        ("progress_seconds", 1),
        ("settle_seconds", 0),
    ):
        require_at_least(f"run.{key}", getattr(run, key), least)
    return run


def canonical_json(value: Any) -> bytes:
    """Return `value` as JSON that has one form only: keys sorted, no blanks, ASCII, no floats."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def parse_bytes(text: str, where: str = "") -> int:
    """Return the bytes that a text such as ``768MiB``, ``64 GB`` or ``1000`` means.

    Raises
    ------
    UsageError
        `text` is not a whole number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper() or "B") if match else None
    if match is None or unit is None:
        raise UsageError("a size such as 768MiB", repr(text), where)
    return int(match[1]) * unit


def format_bytes(n_bytes: int) -> str:
    """Return a text that `parse_bytes` reads back to at least `n_bytes`, in MiB from 1 MiB up."""
    return f"{-(-n_bytes // (1 << 20))}MiB" if n_bytes >= 1 << 20 else f"{n_bytes}B"


def _profile(name: str) -> Path:
    return Path(str(resources.files("configs") / f"{name}.toml"))


def _locate(config: str | Path) -> Path:
    if not isinstance(config, Path) and re.fullmatch(r"[a-z][a-z0-9_]*", config) and _profile(config).is_file():
        return _profile(config)
    return Path(config)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        names = sorted(profile.stem for profile in _profile("default").parent.glob("*.toml"))
        raise UsageError("a settings file", error.strerror or str(error), str(path), f"or one of {names}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("TOML", str(error), str(path)) from error


def _value(text: str) -> Any:
    """Return `text` as a TOML value, or as itself where it is none, so that texts need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _full_path(key: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    path = tuple(key.split("."))
    for table in settings:
        if path[0] != table and path[0] in settings[table]:
            return (table, *path)
    if path[0] not in settings:
        raise _unknown_key(path, _all_names(settings))
    return path


def _all_names(settings: Mapping[str, Any]) -> list[str]:
    return [name for table in settings.values() for name in _names(table)]


def _names(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all values under `table`."""
    names = []
    for key, value in table.items():
        names += _names(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]
    return names


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return typing.cast("dict[str, Any]", value)


def _overlay(base: dict[str, Any], extra: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Replace values of `base` by those of `extra`, table by table."""
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(base[key], value, (*path, key))
        else:
            base[key] = value


def build(cls: type[T], table: Any, path: tuple[str, ...]) -> T:
    """Return the dataclass `cls` filled from `table`, whose keys must be exactly its fields."""
    if not isinstance(table, dict):
        raise _wrong_type(path, "a table", table)
    hints = typing.get_type_hints(cls)
    for key in table:
        if key not in hints:
            raise _unknown_key((*path, key), [".".join((*path, name)) for name in hints])
    for name in hints:
        if name not in table:
            raise UsageError("a value", "none", ".".join((*path, name)), "default.toml states every key")
    return cls(**{name: _convert(hint, table[name], (*path, name)) for name, hint in hints.items()})


def _convert(hint: Any, value: Any, path: tuple[str, ...]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, path)
    if hint is int and path[-1].endswith("_bytes") and isinstance(value, str):
        return parse_bytes(value, ".".join(path))
    if hint in (int, str, bool):
        # bool is a subclass of int, and a switch is no number.
        if type(value) is not hint:
            raise _wrong_type(path, {int: "an integer", str: "a text", bool: "true or false"}[hint], value)
        return value
    if origin is Literal:
        if value not in arguments:
            raise _wrong_type(path, f"one of {', '.join(map(str, arguments))}", value)
        return value
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        if not isinstance(value, list):
            raise _wrong_type(path, "a list", value)
        return tuple(_convert(arguments[0], item, path) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong_type(path, "a table", value)
        return {key: _convert(arguments[1], item, (*path, key)) for key, item in value.items()}
    raise TypeError(f"{'.'.join(path)}: settings cannot have the type {hint}")


def require_at_least(key: str, value: int, least: int) -> None:
    """Raise UsageError, naming `key`, where `value` is below `least`."""
    if value < least:
        raise UsageError(f"at least {least}", str(value), key)


def _unknown_key(path: tuple[str, ...], known: Sequence[str]) -> UsageError:
    key = ".".join(path)
    short = [name.split(".")[-1] for name in known]
    near = difflib.get_close_matches(key, known, 1, 0.5) or [
        known[short.index(name)] for name in difflib.get_close_matches(path[-1], short, 1, 0.5)
    ]
    return UsageError("a known key", key, "settings", f"did you mean {near[0]}?" if near else f"known: {list(known)}")


def _wrong_type(path: tuple[str, ...], expected: str, value: Any) -> UsageError:
    return UsageError(expected, f"{value!r} ({type(value).__name__})", ".".join(path))


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError(f"{value!r}: floats have no canonical form")
    if isinstance(value, Mapping):
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_floats(item)
