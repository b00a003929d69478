"""Every field case has a test: inputs are cases of `tests.cases`, what else must hold stands in FIELD_CASES.md."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.cases import CASES

TESTS = Path(__file__).parent
INPUTS = {
    "A": (1, 2, 3, 6, 8, 9, 10, 11, 14, 17, 18, 19),
    "B": (1, 2, 3, 5, 6, 8, 11, 14),
    "C": (1, 2, 4, 5),
    "D": (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16),
    "E": (1, 2, 3, 5, 6, 7, 8, 11, 12, 13),
}
"""By their kind: odd and broken safetensors, dtypes, contents, other files."""
OTHERS = {
    "S": (1, 2, 3, 4, 6, 8, 9, 11, 12, 15, 16, 17, 20, 22, 23),
    "Q": (1, 2, 4, 5, 6, 7, 8, 9, 11, 13),
    "T": (1, 2, 3, 4, 6, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22),
    "O": (1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 13, 15, 18, 20, 22, 23),
    "P": (1, 3),
    "Z": (1, 2, 3, 4, 6, 7, 10, 11),
    "Y": (1, 2, 3, 4, 6, 7, 8),
    "N": (1, 2, 3, 5),
    "U": (1, 3, 4, 5),
    "A": (20,),
    "K": (1, 2, 5, 7, 8, 10),
    "G": (1, 2, 3, 4, 6, 7, 8, 9, 14, 15, 16),
    "H": (1, 2, 4, 5, 6, 8, 9, 11),
}
"""Reports by their kind, in the order of the table, and what is no input of one file."""
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
KNOWN = {case.id for case in CASES}


def ids(numbers: dict[str, tuple[int, ...]]) -> list[str]:
    return [f"{kind}{number:02}" for kind, some in numbers.items() for number in some]


def rows() -> dict[str, str]:
    """Return what each row of the table names."""
    text = (TESTS / "FIELD_CASES.md").read_text("utf-8")
    return dict(re.findall(r"^\| ([A-Z]\d\d) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE))


@cache
def names_in(path: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (TESTS / path).read_text("utf-8"), re.MULTILINE))


def missing(named: str) -> list[str]:
    """Return the names that are no test and no input, of those in backticks."""
    names = re.findall(r"`([^`]+)`", named)
    return [name for name in names if name not in KNOWN and not is_test(name)] or ([] if names else ["nothing"])


def is_test(name: str) -> bool:
    path, _, test = name.partition("::")
    return path.endswith(".py") and (TESTS / path).is_file() and test in names_in(path)


@pytest.mark.parametrize("name", ids(INPUTS))
def test_an_input_is_a_case(name: str) -> None:
    assert any(case.startswith(f"{name}-") for case in KNOWN)


@pytest.mark.parametrize(("name", "case"), REBUILT.items())
def test_a_rebuilt_file_is_a_case(name: str, case: str) -> None:
    assert case in KNOWN


def test_the_table_has_every_other_id_once_and_in_order() -> None:
    assert list(rows()) == ids(OTHERS)


@pytest.mark.parametrize(("name", "named"), rows().items(), ids=list(rows()))
def test_what_the_table_names_is_there(name: str, named: str) -> None:
    assert missing(named) == []


@pytest.mark.parametrize(
    "named",
    [
        "",
        "`A99-none`",
        "`pipeline/test_jobs.py::test_nothing`",
        "`pipeline/test_none.py::test_one_tensor`",
        "`B14-pointer`, `x`",
    ],
)
def test_what_is_not_there_is_noticed(named: str) -> None:
    assert missing(named)
