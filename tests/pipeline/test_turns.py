"""Blocks of quantised weights in one long row: every segment of it begins with a block."""

from __future__ import annotations

import ast
from dataclasses import replace

import numpy as np
import pytest

from operators.limits import SEGMENT_BYTES
from operators.run import digest_of
from operators.words import Words
from pipeline.encoder import Encoder
from pipeline.plan import make_plan
from pipeline.segments.safetensors import TURN_BYTES
from pipeline.store import ObjectInfo
from synth.learn import OPTIONS
from synth.parts import PERIODS
from synth.prior import Prior
from synth.structured import f16
from tests import cases
from tests.pipeline.test_segments import look
from tests.synth.test_parts import WIDTHS, block

SMALL_SEGMENT_BYTES = 1 << 20


def test_a_piece_of_a_row_holds_whole_turns() -> None:
    assert all(TURN_BYTES % (4 * period) == 0 for period in (2, 3, 4))  # of words, points and pairs in F32
    assert all(TURN_BYTES % period == 0 for period in PERIODS)
    assert SEGMENT_BYTES // TURN_BYTES * TURN_BYTES == 66_916_080


def q4_k(n: int) -> Words:
    """Return super-blocks of Q4_K: two scales in F16, twelve bytes of scales of 6 bits, and 256 weights of 4 bits."""
    rng = np.random.default_rng(3)
    heads = np.exp(rng.standard_normal((n, 2)) * 0.4) * 1e-3
    scales = np.clip(rng.normal(44, 6, (n, 12)), 0, 63).astype(np.uint8)
    nibbles = np.clip(np.rint(rng.normal(7.5, 2.8, (n, 2, 128))), 0, 15).astype(np.uint8)
    return np.concatenate(
        (f16(heads).view(np.uint8).reshape(n, 4), scales, nibbles[:, 0] | nibbles[:, 1] << 4), 1
    ).ravel()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "MXFP4", "Q6_K"])
def test_all_segments_of_a_tensor_of_blocks_are_dealt_alike(name: str) -> None:
    turn = sum(WIDTHS.get(name, (144,)))
    n_blocks = 3 * SMALL_SEGMENT_BYTES // turn
    data = (q4_k(n_blocks) if name == "Q4_K" else block(name, n_blocks)).tobytes()
    file = cases.safetensors([("blocks", "U8", [len(data)], data)])
    layout = look(file, segment_bytes=SMALL_SEGMENT_BYTES)
    (task,) = make_plan([ObjectInfo("a", len(file), "", None)], [layout], 2 * len(file), {}).tasks
    encoder = Encoder(OPTIONS, Prior.uniform())
    encoder.start()
    found = []
    for row in (row for row in task.rows() if row.tensor == "blocks"):
        part = memoryview(file)[row.offset_bytes : row.offset_bytes + row.n_bytes]
        encoded, _ = encoder.record(replace(row, digest=digest_of(part)), part)
        found.append((str(encoded.program).partition("(")[0], len(encoded.record) / row.n_bytes))
    assert len(found) == 4
    (program,) = {program for program, _ in found}
    assert sum(ast.literal_eval(program.removeprefix("deal"))) == turn
    assert max(ratio for _, ratio in found) < 1.01 * min(ratio for _, ratio in found)
