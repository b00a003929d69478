"""Golden records: what was written once is read for ever, and the writer does not change unnoticed."""

from __future__ import annotations

import pytest

from operators.program import parse
from operators.record import FORMAT_VERSION
from operators.registry import CONDITIONED_BY_NAME, ENCODINGS_BY_NAME, OPERATORS_BY_NAME
from operators.run import encode, execute
from tests.golden.make import Line, read
from tests.strategies import BOOKS

VERSIONS = range(FORMAT_VERSION + 1)
LINES = [line for version in VERSIONS for line in read(version)]


def test_every_operator_and_encoding_has_golden_records() -> None:
    there = {line.name for line in read(FORMAT_VERSION)}
    missing = {*OPERATORS_BY_NAME, *ENCODINGS_BY_NAME, *CONDITIONED_BY_NAME} - there
    assert not missing, "run python -m tests.golden.make"


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.program}-{line.case.stream}")
def test_a_golden_record_is_read(line: Line) -> None:
    words = line.case.words
    assert execute(line.record, BOOKS, n_bytes=words.nbytes).tobytes() == words.tobytes()


@pytest.mark.parametrize("line", read(FORMAT_VERSION), ids=lambda line: f"{line.program}-{line.case.stream}")
def test_the_writer_still_writes_it(line: Line) -> None:
    """Other bytes need a new writer revision (operators.record), and golden records made anew."""
    encoded = encode(parse(line.program), line.case.words, books=BOOKS)
    assert encoded is not None
    assert encoded.record.hex() == line.record.hex()
