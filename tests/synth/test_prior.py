"""The prior: its file, its arithmetic, and what calibration teaches it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from operators.errors import FormatError, UnsupportedError
from operators.words import dtype_of
from synth import Prior
from synth.calibrate import TensorSample, calibrate
from synth.explain import explain
from synth.hole import Hole, Setting
from synth.prior import ALPHA, BASE_Q20, MERGE_OFFERS, Evidence, contexts
from synth.structured import bf16, structured
from tests.checkpoints import CHECKPOINTS
from tests.synth.support import options, search


def hole(seed: int = 0) -> Hole:
    words = bf16(np.random.default_rng(seed).standard_normal(4096))
    return Setting(dtype_of("BF16"), 1 << 14, 1 << 14).root(words, 64)


def evidence(wins: int, losses: int, gain_q10: int = 100) -> Prior:
    counted = Evidence()
    for _ in range(wins):
        counted.add(hole(), "float.0", gain_q10)
    for _ in range(losses):
        counted.add(hole(), "float.0", None)
    return counted.prior()


def chance(prior: Prior) -> float:
    return prior.belief(contexts(hole()), "float.0").chance_q20 / (1 << 20)


def test_what_is_dumped_is_loaded() -> None:
    prior = evidence(3, 2)
    again = Prior.load(prior.dump())
    assert again.dump() == prior.dump()
    assert again.evidence == prior.evidence
    assert Prior.load(Prior.uniform().dump()).informed is False


def test_the_shipped_prior_is_canonical_and_says_what_it_comes_from() -> None:
    prior = Prior.shipped()
    assert prior.informed
    assert Prior.load(prior.dump()).dump() == prior.dump()
    sources = [row for row in prior.provenance if "sha256" in row]
    assert len(sources) >= 4
    assert all(row["package"] and len(row["sha256"]) == 64 for row in sources)
    measured = {digest for _, digest in CHECKPOINTS.values()}
    assert not measured & {row["sha256"] for row in sources}


DAMAGE: dict[str, Any] = {
    "no JSON": b"{",
    "another kind": b"[]",
    "a key too many": {"more": 1},
    "a format that is no number": {"format": "1"},
    "negative counts": {"evidence": {"c": {"p": [-1, 0, 0]}}},
    "more wins than offers": {"evidence": {"c": {"p": [1, 2, 0]}}},
    "gains without wins": {"evidence": {"c": {"p": [1, 0, 5]}}},
    "floats": {"evidence": {"c": {"p": [1.0, 0, 0]}}},
    "booleans": {"evidence": {"c": {"p": [True, 0, 0]}}},
    "a count beyond all reason": {"evidence": {"c": {"p": [1 << 60, 0, 0]}}},
    "counts of the wrong number": {"evidence": {"c": {"p": [1, 0]}}},
    "evidence that is a list": {"evidence": []},
    "a context that is a list": {"evidence": {"c": []}},
    "provenance that is a text": {"provenance": "me"},
    "informed by a number": {"informed": 1},
    "books that are a number": {"books": 1},
    "books that are no hexadecimal": {"books": "0"},
    "books that are something else": {"books": "00"},
    "nesting": b"[" * 100_000,
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_what_is_no_prior_is_refused(name: str) -> None:
    damage = DAMAGE[name]
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(evidence(1, 1).dump()), **damage}).encode()
    with pytest.raises(FormatError):
        Prior.load(damage)


def test_a_newer_prior_needs_a_newer_version() -> None:
    newer = json.dumps({**json.loads(evidence(1, 1).dump()), "format": 2}).encode()
    with pytest.raises(UnsupportedError):
        Prior.load(newer)


def test_evidence_moves_the_chance() -> None:
    assert chance(evidence(0, 0)) == BASE_Q20 / (1 << 20)
    assert chance(evidence(0, 8)) < chance(evidence(0, 1)) < chance(evidence(0, 0)) < chance(evidence(1, 1))
    assert chance(evidence(20, 0)) > 0.9


def test_each_context_is_smoothed_towards_the_next() -> None:
    expected = BASE_Q20
    for _ in contexts(hole()):
        expected = ((3 << 20) + ALPHA * expected) // (5 + ALPHA)
    assert evidence(3, 2).belief(contexts(hole()), "float.0").chance_q20 == expected


def test_what_was_never_tried_keeps_a_chance() -> None:
    bits = evidence(0, 1000).belief(contexts(hole()), "float.0").bits_q10
    assert bits < 7 * 1024


def test_own_evidence_outweighs_the_base() -> None:
    base, own = evidence(1000, 0), evidence(0, 16)
    merged = base.plus(own)
    assert all(counts[0] <= MERGE_OFFERS + 16 for row in merged.evidence.values() for counts in row.values())
    assert chance(merged) < 0.6 < chance(base)


def test_merging_does_not_change_its_parts() -> None:
    base, own = evidence(30, 10), evidence(1, 5)
    before = base.dump(), own.dump()
    base.plus(own)
    assert (base.dump(), own.dump()) == before


def samples() -> list[TensorSample]:
    kinds = ("rows and columns of own scale", "sines", "codebook of 16", "qweight", "exp_avg", "causal mask", "step")
    return [
        TensorSample(tensor.words, tensor.dtype, tensor.rows, tensor.columns)
        for tensor in structured(1 << 15, 9)
        if tensor.name in kinds
    ]


def test_calibration_is_repeatable_and_teaches() -> None:
    first, second = (calibrate(samples(), options(), Prior.uniform()) for _ in range(2))
    assert first.dump() == second.dump()
    assert first.informed
    codebook = next(tensor for tensor in structured(1 << 15, 21) if tensor.name == "codebook of 16")
    taught, naive = search(codebook, first, budget=64), search(codebook, Prior.uniform(), budget=64)
    assert taught.winner.cost_q8 <= naive.winner.cost_q8
    assert taught.trace[-1].expansions <= naive.trace[-1].expansions


def test_an_explanation_adds_up() -> None:
    tensor = next(tensor for tensor in structured(1 << 15, 4) if tensor.name == "repeated row")
    found = search(tensor, Prior.shipped(), budget=64)
    told = explain(found)
    assert told.program == str(found.program)
    assert 0 <= told.n_bytes - sum(leaf.n_bytes for leaf in told.leaves) < 64
    assert told.n_bytes < told.literal_bytes
    assert {step.production for step in told.expectations} >= {"tail"}
    assert [size for _, size, _ in told.found] == sorted((size for _, size, _ in told.found), reverse=True)
    assert json.loads(json.dumps(told.to_json()))["program"] == told.program
    for leaf in told.leaves:
        assert leaf.type in told.text()
