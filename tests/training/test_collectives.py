from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from operators.errors import UnsupportedError
from pipeline import collectives as cc
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
    "function",
    [
        on_ranks.refusals, on_ranks.profiles, on_ranks.deepspeed, on_ranks.odd_inputs, on_ranks.overlap, on_ranks.drift,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_on_two_ranks(function: Callable[..., None]) -> None:
    ranks.run(function, 2)


def test_a_piece_is_coded_while_the_one_before_it_travels() -> None:
    events: list[str] = []

    def send(piece: slice) -> cc.Gathering:
        events.append(f"send {piece.start}")
        return cc.Gathering(piece.start, torch.empty(0), [], [])

    pieces = [slice(k, k + 1) for k in range(3)]
    cc._pipelined(pieces, send, lambda piece, _: events.append(f"take {piece.start}"))
    assert events == ["send 0", "send 1", "take 0", "send 2", "take 1", "take 2"]


def test_tensors_elsewhere_than_in_host_memory_are_refused() -> None:
    with FakeTensorMode():
        tensor = torch.empty(8, device="cuda:0")
    assert tensor.is_cuda
    with pytest.raises(UnsupportedError) as refused:
        cc.words_of(tensor)
    for what in ("a tensor in host memory", "found cuda:0", "tensor of torch.float32, 8 elements", "call cpu()"):
        assert what in str(refused.value)


def test_without_deepspeed_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.comm", None)
    with pytest.raises(UnsupportedError, match="the package deepspeed, found ModuleNotFoundError"):
        install_deepspeed(TensorCodec(CodebookSet({})))
