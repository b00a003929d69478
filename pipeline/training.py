"""Coded collectives in a training run: books that all ranks agree on, and what DDP and FSDP2 call.

Needs the extra ``torch``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.collectives import (
    DTYPES,
    Channel,
    all_gather_single,
    all_reduce,
    dtype_name,
    observe,
    reduce_scatter_single,
    words_of,
)
from pipeline.messages import MIN_WORDS, TensorCodec
from synth.books import LAYOUTS, CodebookSet, Counts, Family, fit, regret_ppm, take_samples


def agree(codec: TensorCodec, group: Any = None, *, k: int = 8) -> None:
    """Learn books from the samples of all ranks, and use them on each: all of them call this at the same point.

    Samples are exchanged, so that every rank learns the same; the ids are compared.

    Raises
    ------
    UnsupportedError
        Ranks have learned different sets.
    """
    merged = _gathered(codec, group)
    kept = {key: family for key, family in codec.books.families.items() if key not in merged}
    codec.replace_books(CodebookSet({**kept, **CodebookSet.learn(merged, k=k).families}))
    _exchange(codec, group, [])


def _gathered(codec: TensorCodec, group: Any) -> dict[tuple[str, str], list[Counts]]:
    """Return the samples of all ranks."""
    mine = [[*key, np.array(found).tolist()] for key, found in codec.samples().items()]
    merged: dict[tuple[str, str], list[Counts]] = {}
    for theirs in _exchange(codec, group, mine):
        for dtype, kind, counts in theirs:
            merged.setdefault((dtype, kind), []).extend(np.array(counts, np.int64))
    return merged


def _exchange(codec: TensorCodec, group: Any, mine: list[Any]) -> list[list[Any]]:
    """Return what every rank of a group brings, in JSON's types; all of them have the same books."""
    if not dist.is_initialized():
        return [mine]
    channel = Channel.of(group)
    found: list[list[Any]] = []

    def work() -> None:
        gathering = channel.gather(codec, np.frombuffer(json.dumps(mine).encode(), np.uint8))
        found.extend(json.loads(message.tobytes()) for message in gathering.messages())

    channel.run(work, None, async_op=False)
    return found


# -- DistributedDataParallel ----------------------------------------------------------------------------


class FixedHuffmanState:
    """State of `fixed_huffman_hook`: plain steps that learn, then coded ones, and books learned again on drift.

    Parameters
    ----------
    process_group : ProcessGroup, optional
    warmup_steps : int
        Plain steps, from whose gradients books are learned; 0 takes the books of `codec` as they are.
    codec : TensorCodec, optional
    check_every : int
        Steps after which all ranks look whether any of them has seen drift, and then learn again together.
    kind : str
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        warmup_steps: int = 2,
        codec: TensorCodec | None = None,
        check_every: int = 16,
        kind: str = "grad",
    ) -> None:
        self.process_group = process_group
        self.warmup_steps = warmup_steps
        self.codec = TensorCodec(CodebookSet({})) if codec is None else codec
        self.check_every = check_every
        self.kind = kind
        self.step = 0
        self.epoch = 0

    @property
    def is_warm(self) -> bool:
        """Whether gradients are coded."""
        return self.step >= self.warmup_steps

    def end_step(self) -> None:
        """Note that all gradients of a step have been handed over; learn where it is time to."""
        self.step += 1
        coded = self.step - self.warmup_steps
        if coded == 0 or (coded > 0 and coded % self.check_every == 0 and self._drifted()):
            agree(self.codec, self.process_group)
            self.epoch += 1

    def _drifted(self) -> bool:
        """Whether any rank has seen drift: the same answer on each."""
        channel = Channel.of(self.process_group)
        flag = torch.tensor([int(any(traffic.has_drifted for traffic in self.codec.stats().values()))])
        channel.run(lambda: dist.all_reduce(flag, dist.ReduceOp.MAX, group=channel.group), None, async_op=False)
        return bool(flag.item())

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        return {"step": self.step, "epoch": self.epoch, "books": self.codec.books.save()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Raises FormatError for damaged books."""
        self.codec.replace_books(CodebookSet.load(state["books"]))
        self.step, self.epoch = int(state["step"]), int(state["epoch"])


def fixed_huffman_hook(state: FixedHuffmanState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket; for `DistributedDataParallel.register_comm_hook`."""
    tensor = bucket.buffer().div_(dist.get_world_size(state.process_group))
    if state.is_warm and tensor.dtype in DTYPES:
        pending = all_reduce(tensor, group=state.process_group, async_op=True, codec=state.codec, kind=state.kind)
    else:
        if tensor.dtype in DTYPES:
            observe(state.codec, tensor, state.kind)
        channel = Channel.of(state.process_group)
        pending = channel.run(lambda: dist.all_reduce(tensor, group=channel.group), tensor, async_op=True)
    assert pending is not None
    if bucket.is_last():
        state.end_step()
    future: torch.futures.Future[torch.Tensor] = pending.get_future()
    return future


# DistributedDataParallel looks at the types themselves.
fixed_huffman_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


# -- FullyShardedDataParallel, version 2 -----------------------------------------------------------------


class _Coded:
    def __init__(self, codec: TensorCodec) -> None:
        self.codec = codec

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a transfer."""
        return torch.empty(*size, dtype=dtype, device=device)


class FixedHuffmanAllGather(_Coded):
    """For `FSDPModule.set_custom_all_gather`. Until the codec has books it only takes samples."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather parameters; as `torch.distributed.all_gather_single`."""
        if self.codec.books.families:
            return all_gather_single(output_tensor, input_tensor, group, async_op, codec=self.codec, kind="weight")
        observe(self.codec, input_tensor, "weight")
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class FixedHuffmanReduceScatter(_Coded):
    """For `FSDPModule.set_custom_reduce_scatter`. Until the codec has books it only takes samples."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Add gradients; as `torch.distributed.reduce_scatter_single`."""
        if self.codec.books.families:
            return reduce_scatter_single(
                output_tensor, input_tensor, op, group, async_op, codec=self.codec, kind="grad"
            )
        observe(self.codec, input_tensor, "grad")
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


# -- warm-up --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far one tensor of a warm-up is from the others of its kind.

    Attributes
    ----------
    kind, name, dtype : str
    rank : int
    regret_ppm : int
        What its samples take beyond codes of their own, in millionths, by the books of the set.
    one_book_ppm : int
        The same by one book for all tensors of the kind and dtype on all ranks.
    n_parts : int
        It has a book, or one for each of so many parts.
    """

    kind: str
    name: str
    dtype: str
    rank: int
    regret_ppm: int
    one_book_ppm: int
    n_parts: int


def profile(
    model: torch.nn.Module,
    batches: Iterable[Callable[[torch.nn.Module], torch.Tensor]],
    *,
    k: int = 8,
    group: Any = None,
) -> tuple[CodebookSet, list[Divergence]]:
    """Learn books for the weights, activations and gradients of a model from a few steps.

    Kinds are ``weight``, ``grad``, ``activation`` and ``activation_grad``, the last two of outputs of modules.

    Parameters
    ----------
    model : Module
        Its gradients are set to None in the end; weights are not changed.
    batches : iterable of callables
        Each takes the model and returns a loss.
    k : int
        Books of a kind and dtype.
    group : ProcessGroup, optional
        Where `torch.distributed` is initialised, samples of all its ranks are taken.

    Returns
    -------
    (CodebookSet, list of Divergence)
        The same on every rank: the set, and how well it suits each tensor of the last batch on each rank, the worst
        first.
    """
    codec = TensorCodec(CodebookSet({}))
    seen: dict[tuple[str, str, str], Counts] = {}

    def note(kind: str, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES and tensor.numel() >= MIN_WORDS:
            words = words_of(tensor.detach().contiguous())
            codec.observe(words, dtype_name(tensor), kind)
            seen[dtype_name(tensor), kind, name] = take_samples(words, LAYOUTS[dtype_name(tensor)])

    def watch(name: str, output: Any) -> None:
        note("activation", name, output)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda grad: note("activation_grad", name, grad))

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: watch(name, output))
        for name, module in model.named_modules()
    ]
    try:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            batch(model).backward()
            for name, parameter in model.named_parameters():
                note("weight", name, parameter)
                note("grad", name, parameter.grad)
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    merged = _gathered(codec, group)
    codec.replace_books(CodebookSet.learn(merged, k=k))
    single = {key: Family((fit(np.sum(found, axis=0)),), 0) for key, found in merged.items()}
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    rows = []
    for (dtype, kind, name), samples in seen.items():
        choices, one = codec.books.families[dtype, kind].choose_parts(samples), single[dtype, kind].choose(samples[0])
        rows.append((kind, name, dtype, rank, regret_ppm(choices), regret_ppm([one]), len(choices)))
    report = [Divergence(*row) for theirs in _exchange(codec, group, rows) for row in theirs]
    return codec.books, sorted(report, key=lambda one: (-one.regret_ppm, one.kind, one.name, one.rank))
