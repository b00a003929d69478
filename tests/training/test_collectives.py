from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from operators.errors import UnsupportedError
from pipeline.messages import TensorCodec
from pipeline.on_deepspeed import install_deepspeed
from synth.books import CodebookSet
from tests.training import on_ranks, ranks

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [on_ranks.collectives, on_ranks.ddp, on_ranks.fsdp], ids=lambda f: f.__name__)
def test_bit_identical(function: Callable[..., None], size: int) -> None:
    ranks.run(function, size)


@pytest.mark.parametrize(
    "function", [on_ranks.refusals, on_ranks.profiles, on_ranks.deepspeed], ids=lambda f: f.__name__
)
def test_on_two_ranks(function: Callable[..., None]) -> None:
    ranks.run(function, 2)


def test_without_deepspeed_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.comm", None)
    with pytest.raises(UnsupportedError, match="the package deepspeed, found ModuleNotFoundError"):
        install_deepspeed(TensorCodec(CodebookSet({})))
