"""Items that are made ahead: the same ones, in order, with their errors; nothing goes on once nobody wants more."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from operators.errors import StoreError
from pipeline.ahead import ahead


def counted(limit: int, made: list[int]) -> Generator[int]:
    for number in range(limit):
        made.append(number)
        yield number
    made.append(-1)


@pytest.mark.parametrize("limit", [0, 1, 2, 50])
def test_items_come_in_order(limit: int) -> None:
    made: list[int] = []
    assert list(ahead(counted(limit, made))) == list(range(limit))
    assert made == [*range(limit), -1]


def test_the_next_item_is_made_while_one_is_used() -> None:
    """The first is held until the second is there: a generator that waited to be asked would never end."""
    second = threading.Event()

    def items() -> Generator[str]:
        yield "first"
        second.set()
        yield "second"

    for item in ahead(items()):
        assert item == "second" or second.wait(30)


def test_an_error_comes_in_its_turn() -> None:
    def items() -> Generator[int]:
        yield 1
        raise StoreError("an answer", "none")

    following = ahead(items())
    assert next(following) == 1
    with pytest.raises(StoreError):
        next(following)


def test_one_that_is_left_early_is_closed() -> None:
    closed = threading.Event()

    def items() -> Generator[int]:
        try:
            yield from range(100)
        finally:
            closed.set()

    following = ahead(items())
    assert next(following) == 0
    following.close()
    assert closed.is_set()
