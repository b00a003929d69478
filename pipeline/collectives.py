"""Collectives of `torch.distributed` whose messages are coded in one stage, by fixed books that every rank has.

Each function mirrors torch's own of that name, with a codec beside. What arrives is bit for bit what the same schedule
without compression brings; with two ranks, what gloo brings. They pay on slow links: see ``deploy/training.md``.

Transfers run in the background, in the order in which they were asked for, on a process group of their own, so that
they overlap with computing and never mix with other collectives of the caller; but `send` and `recv` transfer in the
thread of the caller, on its group, as torch's own do. A tensor is cut into pieces: a collective codes one while that
before it travels and the one before that is decoded.

Needs the extra ``torch``. Source: Agrawal et al., arXiv 2601.10673.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from operators.errors import FormatError, UnsupportedError, UsageError
from operators.words import Words
from pipeline.messages import TensorCodec

DTYPES: Final[Mapping[torch.dtype, tuple[str, torch.dtype]]] = {
    torch.float32: ("F32", torch.uint32),
    torch.bfloat16: ("BF16", torch.uint16),
    torch.float16: ("F16", torch.uint16),
    torch.float8_e4m3fn: ("F8_E4M3", torch.uint8),
    torch.float8_e5m2: ("F8_E5M2", torch.uint8),
    torch.int8: ("I8", torch.uint8),
    torch.uint8: ("U8", torch.uint8),
    torch.float4_e2m1fn_x2: ("F4", torch.uint8),
}
"""Name of safetensors and words of a dtype. Packed integers of 4 bits are bytes, of a kind of their own."""
PIECE_WORDS = 1 << 20
"""Words of a piece: its planes stay in cache."""
SUM = dist.ReduceOp.SUM


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name by which books know the dtype of a tensor. Raises UnsupportedError."""
    if tensor.dtype not in DTYPES:
        expected = ", ".join(str(dtype) for dtype in DTYPES)
        raise UnsupportedError(f"one of {expected}", str(tensor.dtype), "tensor", "send it without the codec")
    return DTYPES[tensor.dtype][0]


def words_of(tensor: torch.Tensor) -> Words:
    """View a contiguous tensor as words; shares its memory.

    Raises
    ------
    UnsupportedError
        The tensor is not in the memory of the host, or of a dtype that no book knows.
    """
    dtype_name(tensor)
    if tensor.device.type != "cpu":
        where = f"tensor of {tensor.dtype}, {tensor.numel()} elements"
        next_step = "call cpu() and send that, or send it without the codec"
        raise UnsupportedError("a tensor in host memory", str(tensor.device), where, next_step)
    if not tensor.is_contiguous():
        raise UsageError("a contiguous tensor", f"strides {tensor.stride()}", "tensor", "call contiguous()")
    words: Words = tensor.detach().view(-1).view(DTYPES[tensor.dtype][1]).numpy()
    return words


class Pending:
    """A collective under way; as `torch.distributed.Work`."""

    def __init__(self, future: Future[Any], result: Any) -> None:
        self._future = future
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        """Wait until it is done. Raises what it has raised."""
        self._future.result()
        return True

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of torch that brings the result."""
        found: torch.futures.Future[Any] = torch.futures.Future()

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                found.set_result(self._result)
            else:
                found.set_exception(error)

        self._future.add_done_callback(done)
        return found


class Channel:
    """The way to the other ranks of a group: a process group of its own, and the thread that uses it.

    Parameters
    ----------
    group : ProcessGroup or None
        Every one of its ranks opens a channel at the same point.
    """

    _open: Final[dict[int, Channel]] = {}

    def __init__(self, group: Any) -> None:
        self._of = group  # held, so that no other group gets its id while this channel is open
        ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        self.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.rank = dist.get_group_rank(self.group, dist.get_rank())
        self.ranks = ranks
        self.size = len(ranks)
        self._thread = ThreadPoolExecutor(1, "collectives")

    @classmethod
    def of(cls, group: Any) -> Channel:
        """Return the channel of a group, opened when it is first asked for."""
        group = dist.group.WORLD if group is None else group
        key = id(group)
        if key not in cls._open:
            cls._open[key] = cls(group)
        return cls._open[key]

    @classmethod
    def close_all(cls) -> None:
        """Close the channels, before the groups are destroyed."""
        while cls._open:
            _, channel = cls._open.popitem()
            channel._thread.shutdown()  # noqa: SLF001

    def run(self, work: Callable[[], None], result: Any, async_op: bool) -> Pending | None:
        """Run `work` after all that was asked for before it; wait for it, or return it pending."""
        pending = Pending(self._thread.submit(work), result)
        if async_op:
            return pending
        pending.wait()
        return None

    # -- bytes of uneven sizes, in the thread ------------------------------------------------------------

    def sizes(self, codec: TensorCodec, sizes: Sequence[int]) -> torch.Tensor:
        """Exchange sizes, all to all; rows are ranks. The books of all ranks are compared.

        Raises
        ------
        UnsupportedError
            Another rank holds other books.
        """
        own = int.from_bytes(codec.books.id, "little", signed=True)
        table = torch.empty((self.size, len(sizes) + 1), dtype=torch.int64)
        dist.all_gather_single(table.view(-1), torch.tensor([*sizes, own]), group=self.group)
        for rank, theirs in enumerate(table[:, -1].tolist()):
            if theirs != own:
                raise UnsupportedError(
                    f"set of codebooks {codec.books.id.hex()} on every rank",
                    f"{theirs.to_bytes(8, 'little', signed=True).hex()} on rank {rank}",
                    f"rank {self.rank}", "give every rank the same books",
                )  # fmt: skip
        return table[:, :-1]

    def gather(self, codec: TensorCodec, message: NDArray[np.uint8]) -> Gathering:
        """Start to gather the messages of all ranks."""
        sizes = self.sizes(codec, [message.size])[:, 0].tolist()
        most = max(sizes)
        mine = torch.zeros(most, dtype=torch.uint8)
        mine.numpy()[: message.size] = message
        out = torch.empty(self.size * most, dtype=torch.uint8)
        work = dist.all_gather_single(out, mine, group=self.group, async_op=True)
        return Gathering(work, mine, out.numpy().reshape(self.size, most), sizes)

    def scatter(self, codec: TensorCodec, messages: Sequence[NDArray[np.uint8]]) -> Gathering:
        """Start to send message k to rank k, and to take one of every rank."""
        table = self.sizes(codec, [message.size for message in messages])
        sizes = table[:, self.rank].tolist()
        mine = torch.from_numpy(np.concatenate(messages))
        out = torch.empty(sum(sizes), dtype=torch.uint8)
        work = dist.all_to_all_single(
            out, mine, sizes, [message.size for message in messages], group=self.group, async_op=True
        )
        ends = np.cumsum(sizes)
        parts = [out.numpy()[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return Gathering(work, mine, parts, sizes)


@dataclass
class Gathering:
    """Messages on their way.

    Attributes
    ----------
    work : Work
    mine : Tensor
        Sent: kept until it has arrived.
    parts : sequence of uint8 arrays
        Of every rank, perhaps longer than the message.
    sizes : list of int
    """

    work: Any
    mine: torch.Tensor
    parts: Any
    sizes: list[int]

    def messages(self) -> Iterator[NDArray[np.uint8]]:
        """Wait, and yield the message of every rank in turn."""
        self.work.wait()
        for part, size in zip(self.parts, self.sizes, strict=True):
            yield part[:size]


def _pieces(n_words: int) -> list[slice]:
    return [slice(start, min(start + PIECE_WORDS, n_words)) for start in range(0, n_words, PIECE_WORDS)]


def _pipelined(
    pieces: Iterable[slice], send: Callable[[slice], Gathering], take: Callable[[slice, Gathering], None]
) -> None:
    """Send every piece, and take each when the one after it is on its way."""
    waiting: tuple[slice, Gathering] | None = None
    for piece in pieces:
        gathering = send(piece)
        if waiting is not None:
            take(*waiting)
        waiting = piece, gathering
    if waiting is not None:
        take(*waiting)


def observe(codec: TensorCodec, tensor: torch.Tensor, kind: str) -> None:
    """Take samples of a tensor to learn from, in the pieces that it would be sent in."""
    words, name = words_of(tensor), dtype_name(tensor)
    for piece in _pieces(words.size):
        codec.observe(words[piece], name, kind)


def _checked(expected: int, tensor: torch.Tensor, like: torch.Tensor, what: str) -> None:
    if tensor.numel() != expected or tensor.dtype != like.dtype:
        raise UsageError(f"{expected} elements of {like.dtype}", f"{tensor.numel()} of {tensor.dtype}", what)


# -- collectives ----------------------------------------------------------------------------------------


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    group: Any = None,
    async_op: bool = False,
    *,
    codec: TensorCodec,
    kind: str = "weight",
) -> Pending | None:
    """Gather tensors of all ranks; as `torch.distributed.all_gather_single`.

    Parameters
    ----------
    output : Tensor, shape (size * n,)
        Set to the inputs of all ranks, by rank.
    input : Tensor, shape (n,)
    group : ProcessGroup, optional
    async_op : bool
    codec : TensorCodec
        With the same books on every rank.
    kind : str
        Of books.

    Raises
    ------
    UsageError
        Shapes or dtypes do not fit.
    UnsupportedError
        The dtype or device is not supported, or another rank has other books.
    """
    channel = Channel.of(group)
    n_words, name = input.numel(), dtype_name(input)
    _checked(channel.size * n_words, output, input, "output of all_gather_single")
    source, target = words_of(input), words_of(output)

    def send(piece: slice) -> Gathering:
        return channel.gather(codec, codec.encode(source[piece], name, kind))

    def take(piece: slice, gathering: Gathering) -> None:
        for rank, message in enumerate(gathering.messages()):
            part = target[rank * n_words : (rank + 1) * n_words][piece]
            if rank == channel.rank:
                part[:] = source[piece]
            else:
                codec.decode(message, part, name)

    return channel.run(lambda: _pipelined(_pieces(n_words), send, take), output, async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: TensorCodec,
    kind: str = "grad",
) -> Pending | None:
    """Add tensors of all ranks, each rank keeping its part; as `torch.distributed.reduce_scatter_single`.

    Every rank sends each other one its part, and adds what it is sent in the order of gloo's ring: rank c begins
    with the part of rank c - 1 and goes down.

    Parameters
    ----------
    output : Tensor, shape (n,)
    input : Tensor, shape (size * n,)
    op : ReduceOp
        SUM or AVG.
    group, async_op, codec, kind
        As for `all_gather_single`.

    Raises
    ------
    UsageError, UnsupportedError
        As for `all_gather_single`.
    """
    channel = Channel.of(group)
    n_words, name = output.numel(), dtype_name(input)
    _checked(channel.size * n_words, input, output, "input of reduce_scatter_single")
    if op not in (SUM, dist.ReduceOp.AVG):
        raise UnsupportedError("SUM or AVG", str(op), "op of reduce_scatter_single", "use torch.distributed's own")
    if output.dtype.is_floating_point and output.dtype.itemsize == 1:
        raise UnsupportedError(
            "a dtype that can be added", str(output.dtype), "reduce_scatter_single", "widen it first"
        )
    source = words_of(input).reshape(channel.size, n_words)
    own = input.view(channel.size, n_words)[channel.rank]
    words_of(output)
    flat = output.view(-1)
    nothing = np.empty(0, np.uint8)

    def send(piece: slice) -> Gathering:
        messages = [
            nothing if rank == channel.rank else codec.encode(part[piece], name, kind)
            for rank, part in enumerate(source)
        ]
        return channel.scatter(codec, messages)

    def take(piece: slice, gathering: Gathering) -> None:
        parts = []
        for rank, message in enumerate(gathering.messages()):
            part = own[piece]
            if rank != channel.rank:
                part = torch.empty_like(part)
                codec.decode(message, words_of(part), name)
            parts.append(part)
        total = parts[(channel.rank - 1) % channel.size]
        for k in range(2, channel.size + 1):
            total = total + parts[(channel.rank - k) % channel.size]
        flat[piece] = total / channel.size if op == dist.ReduceOp.AVG else total

    return channel.run(lambda: _pipelined(_pieces(n_words), send, take), output, async_op)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: TensorCodec,
    kind: str = "grad",
) -> Pending | None:
    """Add tensors of all ranks, in place; as `torch.distributed.all_reduce`.

    A reduce-scatter and an all-gather. Parameters and errors are those of `reduce_scatter_single`.
    """
    channel = Channel.of(group)
    words_of(tensor)
    flat = tensor.view(-1)
    n_words = 2 * -(-flat.numel() // (2 * channel.size))  # as gloo cuts it: two equal parts for each rank
    whole = torch.zeros(channel.size * n_words, dtype=tensor.dtype)
    whole[: flat.numel()] = flat
    part = torch.empty(n_words, dtype=tensor.dtype)
    reduce_scatter_single(part, whole, op, group, True, codec=codec, kind=kind)
    gathered = all_gather_single(whole, part, group, True, codec=codec, kind=kind)

    def finish() -> None:
        assert gathered is not None
        gathered.wait()
        flat.copy_(whole[: flat.numel()])

    return channel.run(finish, tensor, async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    *,
    codec: TensorCodec,
    kind: str = "weight",
) -> Pending | None:
    """Send a tensor of the global rank `src` to all of a group; as `torch.distributed.broadcast`.

    Other parameters and errors are those of `all_gather_single`.
    """
    channel = Channel.of(group)
    words, name = words_of(tensor), dtype_name(tensor)
    is_source = dist.get_rank() == src

    def work() -> None:
        for piece in _pieces(words.size):
            message = codec.encode(words[piece], name, kind) if is_source else np.empty(0, np.uint8)
            size = int(channel.sizes(codec, [message.size]).max())
            data = torch.from_numpy(message) if is_source else torch.empty(size, dtype=torch.uint8)
            dist.broadcast(data, src, group=channel.group)
            if not is_source:
                codec.decode(data.numpy(), words[piece], name)

    return channel.run(work, tensor, async_op)


def send(tensor: torch.Tensor, dst: int, group: Any = None, *, codec: TensorCodec, kind: str = "activation") -> None:
    """Send a tensor to the global rank `dst`, which calls `recv`; as `torch.distributed.send`."""
    words, name = words_of(tensor.contiguous()), dtype_name(tensor)
    for piece in _pieces(words.size):
        message = codec.encode(words[piece], name, kind)
        dist.send(torch.tensor([message.size]), dst, group=group)
        dist.send(torch.from_numpy(message), dst, group=group)


def recv(tensor: torch.Tensor, src: int, group: Any = None, *, codec: TensorCodec) -> int:
    """Receive a tensor of the shape and dtype of `tensor` from the global rank `src`; as `torch.distributed.recv`.

    Raises
    ------
    UnsupportedError, FormatError
        The message needs other books, or is not one of that dtype and size.
    """
    words, name = words_of(tensor), dtype_name(tensor)
    for piece in _pieces(words.size):
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, src, group=group)
        most = 4 * words[piece].nbytes + 4096
        if not 0 < int(size) <= most:
            raise FormatError(f"a message of at most {most} bytes", str(int(size)), f"from rank {src}")
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, src, group=group)
        codec.decode(data.numpy(), words[piece], name)
    return src
