"""What the tests of the search share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from configs.recipe import load
from operators.program import LIT
from operators.run import Encoded, encode, execute
from operators.words import Words
from synth import Prior, SearchOptions, Synthesis, synthesise
from synth.structured import Structured


def options(**changes: Any) -> SearchOptions:
    return dataclasses.replace(load().recipe.synth, **changes)


def search(tensor: Structured, prior: Prior | None = None, **changes: Any) -> Synthesis:
    return synthesise(
        tensor.words,
        dtype=tensor.dtype,
        rows=tensor.rows,
        columns=tensor.columns,
        options=options(**changes),
        prior=prior or Prior.uniform(),
    )


def encoded(synthesis: Synthesis, words: Words) -> Encoded:
    """Write the record of a synthesis, or of a finalist where that was misjudged; check that it restores the words."""
    record = encode(synthesis.program, words)
    assert record is not None, f"{synthesis.program} cannot produce the words it was found for"
    if synthesis.is_missed(record.body_bytes):
        others = [encode(other.program_for(words), words) for other in synthesis.others()]
        record = min((record, *(one for one in others if one is not None)), key=lambda one: one.body_bytes)
    assert np.array_equal(execute(record.record), words)
    return record


def literal_bytes(words: Words) -> int:
    record = encode(LIT, words)
    assert record is not None
    return len(record.record)
