"""Coded collectives under DeepSpeed, which has no hook for them: its backend is wrapped while they are installed.

Needs the extra ``deepspeed``.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from operators.errors import UnsupportedError, UsageError
from pipeline.collectives import DTYPES, SUM, all_reduce, observe
from pipeline.messages import MIN_WORDS, TensorCodec
from pipeline.training import FixedHuffmanAllGather, FixedHuffmanReduceScatter


def install_deepspeed(codec: TensorCodec) -> None:
    """Code what DeepSpeed gathers, reduces and scatters in this process, until `uninstall_deepspeed`.

    All ranks call it at the same point, after ``deepspeed.init_distributed``. As long as `codec` has no books samples
    are taken, and nothing is coded: `pipeline.training.agree` learns them. Tensors that are small, elsewhere than in
    host memory, or of a dtype without books, and other collectives, are left to DeepSpeed.

    Raises
    ------
    UnsupportedError
        DeepSpeed is not there, or fails to load.
    UsageError
        It is not initialised, or wrapped already.
    """
    module = _deepspeed()
    if module.cdb is None:
        raise UsageError("a backend of DeepSpeed", "none", "deepspeed.comm", "call deepspeed.init_distributed() first")
    if isinstance(module.cdb, _CodedBackend):
        raise UsageError("a backend of DeepSpeed", "a coded one", "deepspeed.comm", "call uninstall_deepspeed() first")
    module.cdb = _CodedBackend(module.cdb, codec)


def uninstall_deepspeed() -> None:
    """Give DeepSpeed its own backend back; does nothing where it has it."""
    module = _deepspeed()
    if isinstance(module.cdb, _CodedBackend):
        module.cdb = module.cdb.plain


def _deepspeed() -> Any:
    try:
        return importlib.import_module("deepspeed.comm.comm")
    except Exception as error:  # whatever its import has tried: compilers, drivers, other packages
        raise UnsupportedError(
            "the package deepspeed", f"{type(error).__name__}: {error}", "import", 'pip install "brevis[deepspeed]"'
        ) from error


class _CodedBackend:
    """A backend of DeepSpeed, as ``deepspeed.comm.comm.cdb``, with some of its methods coded."""

    def __init__(self, plain: Any, codec: TensorCodec) -> None:
        self.plain = plain
        self.codec = codec
        self._gather = FixedHuffmanAllGather(codec)
        self._scatter = FixedHuffmanReduceScatter(codec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Gather parameters."""
        call = self._gather if _is_coded(input_tensor, output_tensor) else self.plain.all_gather_into_tensor
        return call(output_tensor, input_tensor, group, async_op)

    def reduce_scatter_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Add gradients, each rank keeping its part."""
        op = self.plain._reduce_op(op)  # noqa: SLF001
        is_coded = op in (SUM, dist.ReduceOp.AVG) and _is_coded(output_tensor, input_tensor)
        call = self._scatter if is_coded else self.plain.reduce_scatter_tensor
        return call(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any = SUM, group: Any = None, async_op: bool = False) -> Any:
        """Add gradients."""
        op = self.plain._reduce_op(op)  # noqa: SLF001
        if op not in (SUM, dist.ReduceOp.AVG) or not _is_coded(tensor):
            return self.plain.all_reduce(tensor, op, group, async_op)
        if self.codec.books.families:
            return all_reduce(tensor, op, group, async_op, codec=self.codec)
        observe(self.codec, tensor, "grad")
        return self.plain.all_reduce(tensor, op, group, async_op)


def _is_coded(*tensors: torch.Tensor) -> bool:
    return all(
        tensor.dtype in DTYPES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() >= MIN_WORDS
        for tensor in tensors
    )
