"""Every field case has a test that names it: a case of `tests.cases`, or a test by its name or text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cases import CASES

NUMBERS = {
    "A": (1, 2, 3, 6, 8, 9, 10, 11, 14, 17, 18, 19, 20),
    "B": (1, 2, 3, 5, 6, 8, 11, 14),
    "C": (1, 2, 4, 5),
    "D": (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16),
    "E": (1, 2, 3, 5, 6, 7, 8, 11, 12, 13),
    "K": (1, 2, 5, 7, 8, 10),
    "G": (1, 2, 3, 4, 6, 7, 8, 9, 14, 15, 16),
    "H": (1, 2, 4, 5, 6, 8, 9, 11),
}
"""Inputs by their kind: odd and broken safetensors, dtypes, contents, other files, keys, storage, processes."""
FIELD_CASES = [f"{kind}{number:02}" for kind, numbers in NUMBERS.items() for number in numbers]
REBUILT = {
    "R1": "A18-many-tensors",
    "R2": "R2-unaligned-upcast",
    "R3": "R3-scaled-fp8",
    "R5": "R5-misaligned",
    "R9": "B14-pointer",
    "R11": "B13-other-range",
    "R12": "D07-padding-rows",
    "R13": "D02-every-pattern",
}
"""Files with known public properties, and the cases that have them."""


def named(path: Path) -> set[str]:
    """Return the ids that tests or their helpers name, in their names or in words."""
    text = path.read_text("utf-8")
    in_names = {part.upper() for name in re.findall(r"def test_(\w+)", text) for part in name.split("_")}
    return set(re.findall(r"\b[A-Z]\d\d\b", text)) | in_names


NAMED = set[str]().union(*(named(path) for path in Path(__file__).parent.rglob("*.py") if path != Path(__file__)))


@pytest.mark.parametrize("name", FIELD_CASES)
def test_a_field_case_has_a_test(name: str) -> None:
    assert name in NAMED or any(case.id.startswith(f"{name}-") for case in CASES)


@pytest.mark.parametrize(("name", "case"), REBUILT.items())
def test_a_rebuilt_file_is_a_case(name: str, case: str) -> None:
    assert case in {known.id for known in CASES}


def test_a_case_that_nobody_names_is_noticed() -> None:
    assert not {"A99", "Q07"} & NAMED
