"""Conditioned leaves: their costs are those of the bytes that are written, and the recipe decides their coder."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from operators.words import dtype_of
from synth.conditioned import KINDS, swept
from synth.hole import Setting
from synth.structured import structured
from tests.synth.support import encoded, search

SCALED = next(one for one in structured() if one.name == "rows and columns of own scale")
coders = pytest.mark.parametrize("coder", ["rans", "huffman"])


@coders
def test_costs_are_those_of_the_bytes(coder: str) -> None:
    words, columns = SCALED.words, SCALED.columns
    hole = Setting(dtype_of(SCALED.dtype), 16384, 32768, coder).root(words, columns)
    step = swept(hole, 1, 2)
    assert step is not None
    costs = step.costs(hole)
    assert costs is not None
    for tables, cost in enumerate(costs):
        exact = replace(step, tables=tables).exact_q8(words, hole.stream, columns)
        assert exact is not None
        assert 333 * abs(cost - exact) < exact


@coders
def test_the_recipe_decides_the_coder(coder: Literal["rans", "huffman"]) -> None:
    found = search(SCALED, coder=coder)
    assert str(found.program).startswith(f"{KINDS[coder].name}[")
    assert found.winner.encoding == KINDS[coder].name
    encoded(found, SCALED.words)


def test_a_thorough_plan_is_no_larger() -> None:
    usual, thorough = (search(SCALED, thorough=flag) for flag in (False, True))
    assert str(usual.program) == str(thorough.program)
    assert encoded(thorough, SCALED.words).body_bytes < encoded(usual, SCALED.words).body_bytes
