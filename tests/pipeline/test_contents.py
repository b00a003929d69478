"""What tensors of well-known kinds may cost at most, in an archive that the defaults made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.archive import find_snapshot, load_manifest
from pipeline.cli import main
from pipeline.locations import open_source
from pipeline.rows import Row
from tests.cases import CASES

Rows = dict[str, Row]
"""Rows of one case by tensor; each of these tensors is one segment."""

TINY = 120
"""Bytes of a record that says hardly more than what to repeat; its head takes about 45."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    folder = tmp_path_factory.mktemp("contents")
    for case in CASES:
        if case.id.startswith("D"):
            (key, data), *_ = case.files.items()
            (folder / "src").mkdir(exist_ok=True)
            (folder / "src" / key).write_bytes(data)
    assert main(["archive", str(folder / "src"), str(folder / "archive"), "--workers", "1", "-q"]) == 0
    assert main(["restore", str(folder / "archive"), str(folder / "out"), "--workers", "1", "-q"]) == 0
    for path in (folder / "src").iterdir():
        assert (folder / "out" / path.name).read_bytes() == path.read_bytes()
    store = open_source(str(folder / "archive"))
    found: dict[str, Rows] = {}
    for row in load_manifest(store, find_snapshot(store)):
        if row.tensor is not None:
            found.setdefault(Path(row.file).stem, {})[row.tensor] = row
    return found


def stored(row: Row) -> int:
    assert row.stored_bytes is not None
    return row.stored_bytes


def tiny(row: Row) -> bool:
    return stored(row) <= TINY


def at_most(share: float, more: int = 200) -> Callable[[Row], bool]:
    return lambda row: stored(row) <= share * row.n_bytes + more


@pytest.mark.parametrize(
    ("case", "tensors", "cheap"),
    [
        ("D01-constants", "zero one nan two", tiny),
        ("D02-every-pattern", "bf16 f16", at_most(1)),
        ("D03-upcast", "from_bf16 from_f16 mixed", at_most(0.5)),
        ("D05-optimizer", "exp_avg_sq", at_most(31 / 32)),  # no bit for a sign that never is
        ("D07-padding-rows", "embed alt", at_most(0.7 * 257 / 320)),  # the padding is free
        ("D08-buffers", "position_ids reversed by_64", tiny),
        ("D08-buffers", "inv_freq sin", at_most(0.75)),
        ("D09-masks", "attn.bias attn.bool attn.mask masked_bias", tiny),
        ("D10-lora", "r4.lora_B.weight r8.lora_B.weight r16.lora_B.weight", tiny),
        ("D11-gptq", "qzeros qzeros8 g_idx", tiny),
        ("D13-sparse", "two_of_four", at_most(0.6)),
        ("D13-sparse", "tenth", at_most(0.15)),
        ("D14-codebook", "bf16", at_most(1 / 2, 700)),  # an index of 8 bits, and the 256 words
        ("D14-codebook", "f32", at_most(1 / 8)),  # an index of 4 bits
        ("D15-mx-scales", "scales", at_most(0.4)),
    ],
)
def test_structure_is_found(rows: dict[str, Rows], case: str, tensors: str, cheap: Callable[[Row], bool]) -> None:
    dear = {
        name: (stored(rows[case][name]), rows[case][name].program)
        for name in tensors.split()
        if not cheap(rows[case][name])
    }
    assert dear == {}


def test_d06_equal_tensors_are_stored_once_and_one_changed_bit_is_another_tensor(rows: dict[str, Rows]) -> None:
    head, table, other = (rows["D06-tied"][name] for name in ("lm_head.weight", "wte.weight", "other.weight"))
    assert head.pack_offset == table.pack_offset != other.pack_offset
    assert head.digest == table.digest != other.digest


def test_d16_noise_hardly_grows(rows: dict[str, Rows]) -> None:
    noise = rows["D16-noise"].values()
    assert len(noise) == 20
    assert all(stored(row) <= 1.001 * row.n_bytes + 100 for row in noise)
