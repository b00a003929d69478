from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.training import on_ranks, ranks

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [on_ranks.collectives, on_ranks.ddp, on_ranks.fsdp], ids=lambda f: f.__name__)
def test_bit_identical(function: Callable[..., None], size: int) -> None:
    ranks.run(function, size)


@pytest.mark.parametrize("function", [on_ranks.refusals, on_ranks.profiles], ids=lambda f: f.__name__)
def test_on_two_ranks(function: Callable[..., None]) -> None:
    ranks.run(function, 2)
