"""One search for tensors of one role: who shares, who does not, and what calibration remembers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from operators.errors import FormatError
from operators.program import parse
from operators.run import encode, execute
from operators.words import Words
from synth import Prior
from synth.calibrate import TensorSample, calibrate
from synth.prior import Remembered
from synth.roles import Roles, role_of
from tests.synth.support import options

ROWS, COLUMNS = 256, 128


def weights(seed: int) -> Words:
    rng = np.random.Generator(np.random.PCG64(seed))
    floats = (rng.standard_normal(ROWS * COLUMNS) * 0.02).astype(np.float32)
    return (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def roles(prior: Prior | None = None, *, share: bool = True) -> Roles:
    return Roles(options(share=share, budget=16), prior or Prior.shipped())


def test_a_tensor_of_the_same_role_takes_the_program_of_the_first() -> None:
    found = roles()
    first = found.search("layer.0.q", weights(0), "BF16", ROWS, COLUMNS)
    second = found.recall("layer.1.q", weights(1), "BF16", ROWS, COLUMNS)
    assert second is not None
    assert (second.program, second.expansions) == (first.program, 0)
    record = encode(second.program, weights(1))
    assert record is not None
    assert execute(record.record).tobytes() == weights(1).tobytes()
    assert not second.is_missed(record.body_bytes)


def test_others_do_not() -> None:
    found = roles()
    found.search("layer.0.q", weights(0), "BF16", ROWS, COLUMNS)
    half_zero = weights(1)
    half_zero[::2] = 0
    assert found.recall("layer.0.k", weights(1), "BF16", ROWS, COLUMNS) is None
    assert found.recall("layer.1.q", weights(1), "F16", ROWS, COLUMNS) is None
    assert found.recall("layer.1.q", weights(1), "BF16", COLUMNS, ROWS) is None
    assert found.recall("layer.1.q", half_zero, "BF16", ROWS, COLUMNS) is None
    found.clear()
    assert found.recall("layer.1.q", weights(1), "BF16", ROWS, COLUMNS) is None


def test_without_sharing_nothing_is_remembered() -> None:
    found = roles(share=False)
    found.search("layer.0.q", weights(0), "BF16", ROWS, COLUMNS)
    assert found.recall("layer.1.q", weights(1), "BF16", ROWS, COLUMNS) is None


def test_calibration_remembers_programs_by_role() -> None:
    sample = TensorSample(weights(0), "BF16", ROWS, COLUMNS, "layer.0.q")
    prior = Prior.load(calibrate([sample], options(), Prior.shipped()).dump())
    assert list(prior.programs) == [role_of("layer.7.q", ROWS * COLUMNS, "BF16", ROWS, COLUMNS)]
    recalled = roles(prior).recall("layer.1.q", weights(1), "BF16", ROWS, COLUMNS)
    assert recalled is not None
    record = encode(recalled.program, weights(1))
    assert record is not None
    assert execute(record.record).tobytes() == weights(1).tobytes()
    assert not recalled.is_missed(record.body_bytes)
    assert recalled.is_missed(2 * record.body_bytes)
    assert calibrate([sample], options(share=False), Prior.shipped()).programs == {}


def test_small_tensors_go_by_their_shape() -> None:
    assert role_of("a.bias", 768, "BF16", 1, 768) == role_of("b.weight", 768, "BF16", 1, 768)
    assert role_of("a.bias", 1 << 20, "BF16", 1, 1 << 20) != role_of("b.weight", 1 << 20, "BF16", 1, 1 << 20)


@pytest.mark.parametrize("bad", [[], {"a": 1}, {"a": [[1], "lit", -1]}, {"a": [[1], "no such program(", 5]}])
def test_a_prior_with_other_programs_is_refused(bad: object) -> None:
    good = dataclasses.replace(Prior.uniform(), programs={"role": Remembered((1, 2), str(parse("lit")), 7)})
    assert Prior.load(good.dump()).programs == good.programs
    text = good.dump().decode()
    start = text.index('"programs":') + len('"programs":')
    end = text.index(',"provenance"')
    with pytest.raises(FormatError):
        Prior.load((text[:start] + json.dumps(bad) + text[end:]).encode())
