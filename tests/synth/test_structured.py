"""The bars on structured tensors, with the prior that ships and with none, in 64 expansions."""

from __future__ import annotations

import pytest

from synth import Prior
from synth.structured import structured
from tests.synth.support import encoded, search

TENSORS = {tensor.name: tensor for tensor in structured(seed=11)}
FIXED_BYTES = 48
"""The part of a record that is not its program and payloads: header and digest."""
TINY = ("zeros", "ones", "nan", "alternating", "all patterns", "all bytes", "positions", "positions reversed",
        "offsets of 64", "LoRA B", "qzeros")  # fmt: skip
PERCENT = {
    "upcast of BF16": 33.0,
    "upcast of F16": 42.5,
    "causal mask": 0.3,
    "causal mask in F16": 0.3,
    "rows of BF16 and F32": 60.0,
    "rows of zeros": 51.6,
    "repeated row": 51.6,
    "mean row": 51.8,
    "codebook of 256": 49.5,
    "codebook of 16": 12.6,
    "sines": 70.0,
    "qweight": 86.0,
    "2 of 4 zero": 40.0,
    "90 % zero": 10.5,
    "E8M0 scales": 37.0,
}


@pytest.fixture(params=["uniform", "shipped"])
def prior(request: pytest.FixtureRequest) -> Prior:
    return Prior.uniform() if request.param == "uniform" else Prior.shipped()


@pytest.mark.parametrize("name", TINY)
def test_constants_ramps_and_alternations_take_no_bytes(name: str, prior: Prior) -> None:
    tensor = TENSORS[name]
    record = encoded(search(tensor, prior, budget=64), tensor.words)
    assert len(record.record) < FIXED_BYTES + 30
    assert record.body_bytes < 30


@pytest.mark.parametrize("name", sorted(PERCENT))
def test_structure_is_found(name: str, prior: Prior) -> None:
    tensor = TENSORS[name]
    record = encoded(search(tensor, prior, budget=64), tensor.words)
    assert 100 * len(record.record) <= PERCENT[name] * tensor.words.nbytes


def test_the_second_of_two_tied_halves_is_free(prior: Prior) -> None:
    tensor = TENSORS["tied halves"]
    half = tensor.words[: tensor.words.size // 2]
    one = encoded(search(type(tensor)("half", "BF16", 256, 512, half), prior, budget=64), half)
    both = encoded(search(tensor, prior, budget=64), tensor.words)
    assert len(both.record) < len(one.record) * 1.003 + 30


def test_group_indices_take_less_than_fifty_bytes(prior: Prior) -> None:
    tensor = TENSORS["g_idx"]
    assert len(encoded(search(tensor, prior, budget=64), tensor.words).record) < FIXED_BYTES + 50


@pytest.mark.parametrize("name", [name for name in TENSORS if name.startswith("noise") or name == "MXFP4 blocks"])
def test_noise_hardly_grows(name: str, prior: Prior) -> None:
    tensor = TENSORS[name]
    assert len(encoded(search(tensor, prior, budget=64), tensor.words).record) <= tensor.words.nbytes + FIXED_BYTES + 16


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_nothing_is_worse_than_a_literal(name: str) -> None:
    from tests.synth.support import literal_bytes

    tensor = TENSORS[name]
    record = encoded(search(tensor, budget=16), tensor.words)
    assert len(record.record) <= literal_bytes(tensor.words) * 1.005 + 16
