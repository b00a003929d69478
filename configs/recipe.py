"""The recipe: everything that decides the bytes of an archive, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from configs.loader import Run, build, canonical_json, read_settings, require_at_least, run_of
from operators.errors import UsageError
from operators.limits import PROGRAM_DEPTH
from synth.options import SearchOptions

LEAST = {
    "budget": 0,
    "depth": 0,
    "sample_words": 1 << 10,
    "exact_words": 1 << 10,
    "finish_words": 1 << 10,
    "finalists": 1,
    "max_holes": 1,
    "max_held_bytes": 0,
    "min_gain_ppm": 0,
}
"""Smallest values with which a search makes sense."""
MOST_DEPTH = PROGRAM_DEPTH // 4
"""A level of the search may take several of a program."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the bytes of an archive. Integers, texts and lists only: it is hashed.

    Attributes
    ----------
    task_bytes : int
        Source bytes of one task, and so about the size of a pack before compression.
    synth : SearchOptions
        The search.
    """

    task_bytes: int
    synth: SearchOptions


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of one command."""

    recipe: Recipe
    run: Run


def load(config: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read the settings.

    Parameters
    ----------
    config : str, Path or None
        A TOML file, or the name of a profile that ships with the package; its keys replace the defaults.
    overrides : sequence of str
        ``key=value``, the value in TOML or a bare text. ``recipe.`` and ``run.`` may be left out of a key.

    Raises
    ------
    UsageError
        A file cannot be read, a key is unknown (the nearest one is named), a value has the wrong type, or
        the memory is too small for the largest segment.
    """
    settings = read_settings(config, overrides)
    run = run_of(settings)
    recipe = build(Recipe, settings["recipe"], ("recipe",))
    require_at_least("recipe.task_bytes", recipe.task_bytes, 1)
    for key, least in LEAST.items():
        require_at_least(f"recipe.synth.{key}", getattr(recipe.synth, key), least)
    if recipe.synth.depth > MOST_DEPTH:
        raise UsageError(f"at most {MOST_DEPTH}", str(recipe.synth.depth), "recipe.synth.depth")
    return Config(recipe, run)


def recipe_digest(recipe: Recipe, prior_digest: str, writer_revision: int, zstd_version: str) -> str:
    """Return the BLAKE3 digest, in hexadecimal, of everything that decides bytes."""
    content = {
        "prior": prior_digest,
        "recipe": dataclasses.asdict(recipe),
        "writer_revision": writer_revision,
        "zstd": zstd_version,
    }
    return blake3(canonical_json(content)).hexdigest()
