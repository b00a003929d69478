"""What ranks of the tests of collectives do; each assertion holds on every rank."""

from __future__ import annotations

import importlib
import io
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from operators.errors import FormatError, UnsupportedError, UsageError
from pipeline import collectives as cc
from pipeline import training
from pipeline.messages import TensorCodec
from pipeline.on_deepspeed import install_deepspeed, uninstall_deepspeed
from synth.books import CodebookSet

DTYPES = tuple(cc.DTYPES)
SIZES = (0, 1, 5, 257, 4097, cc.PIECE_WORDS + 3)
WIRE = {"BF16": 0.68, "F16": 0.90, "F32": 0.85, "F8_E4M3": 0.90}
"""Most of the raw bytes that messages take."""


def draw(dtype: torch.dtype, n: int, seed: int, scale: float = 1e-3) -> torch.Tensor:
    """Return normal numbers, with patterns among them that no arithmetic keeps."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    if dtype in (torch.int8, torch.uint8, torch.float4_e2m1fn_x2):
        return (x * 20).round().clamp(-127, 127).to(torch.int8).view(dtype)
    x = x * (1.0 if dtype.itemsize == 1 else scale)
    if n > 8 and dtype.itemsize > 1:
        x[:5] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, -float("inf")])
    return x.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View as bytes, so that a NaN equals itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def learned(size: int, **options: Any) -> TensorCodec:
    """Return a codec with books for all dtypes and kinds, the same on every rank."""
    codec = TensorCodec(CodebookSet({}), **options)
    for dtype in DTYPES:
        for kind in ("weight", "grad", "activation"):
            for seed in range(3):
                codec.observe(cc.words_of(draw(dtype, 1 << 14, 1000 + seed)), cc.DTYPES[dtype][0], kind)
    training.agree(codec)
    return codec


def collectives(rank: int, size: int) -> None:
    codec = learned(size, checksum=True)
    for dtype in DTYPES:
        for n in SIZES:
            x = draw(dtype, n, rank)
            expected = torch.empty(size * n, dtype=dtype)
            if n:
                dist.all_gather_single(bits(expected), bits(x))
            out = torch.empty(size * n, dtype=dtype)
            pending = cc.all_gather_single(out, x, async_op=True, codec=codec)
            assert pending is not None
            assert pending.wait()
            assert pending.is_completed()
            assert torch.equal(bits(out), bits(expected)), (dtype, n)
            y = draw(dtype, n, 7)
            z = y.clone() if rank == 1 else torch.zeros_like(bits(y)).view(dtype)
            cc.broadcast(z, 1, codec=codec)
            assert torch.equal(bits(z), bits(y))
            if rank == 0:
                cc.send(y, 1, codec=codec)
            elif rank == 1:
                z = torch.zeros_like(bits(y)).view(dtype)
                assert cc.recv(z, 0, codec=codec) == 0
                assert torch.equal(bits(z), bits(y))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in SIZES[1:]:
            x = draw(dtype, size * n, rank)
            parts = torch.empty((size, size * n), dtype=dtype)
            dist.all_gather_single(bits(parts), bits(x))
            total = plain_sum(parts, n)
            mine = torch.empty(n, dtype=dtype)
            cc.reduce_scatter_single(mine, x, codec=codec)
            assert torch.equal(bits(mine), bits(total[rank * n : (rank + 1) * n])), (dtype, n)
            reduced = x.clone()
            cc.all_reduce(reduced, codec=codec)
            if size == 2:
                ours = x.clone()
                dist.all_reduce(ours)
                # Of which NaN a sum is, gloo and torch have their own views.
                assert torch.equal(reduced.isnan(), ours.isnan())
                assert torch.equal(bits(reduced.nan_to_num(0)), bits(ours.nan_to_num(0))), (dtype, n)
            average = torch.empty(n, dtype=dtype)
            cc.reduce_scatter_single(average, x, dist.ReduceOp.AVG, codec=codec)
            assert torch.equal(bits(average), bits(mine / size))
    small(codec, {(name, kind) for name in WIRE for kind in ("weight", "activation")[: 1 + (rank == 0)]})
    small(codec, {(name, "grad") for name in ("F32", "BF16", "F16")})


def small(codec: TensorCodec, kinds: set[tuple[str, str]]) -> None:
    """Check that messages were sent of all these kinds, and how much they took."""
    for name, kind in kinds:
        traffic = codec.stats()[name, kind]
        assert 0 < traffic.wire_bytes <= WIRE[name] * traffic.raw_bytes, (name, kind, traffic)


def plain_sum(parts: torch.Tensor, n: int) -> torch.Tensor:
    """Add what all ranks have, part c from rank c - 1 down."""
    size = parts.shape[0]
    total = []
    for c in range(size):
        part = parts[:, c * n : (c + 1) * n]
        one = part[(c - 1) % size]
        for k in range(2, size + 1):
            one = one + part[(c - k) % size]
        total.append(one)
    return torch.cat(total)


def refusals(rank: int, size: int) -> None:
    codec = learned(size)
    x = torch.ones(8)
    with pytest.raises(UsageError, match="16 elements"):
        cc.all_gather_single(torch.empty(5), x, codec=codec)
    with pytest.raises(UnsupportedError, match="float64"):
        cc.all_reduce(x.double(), codec=codec)
    with pytest.raises(UnsupportedError, match="SUM or AVG"):
        cc.reduce_scatter_single(torch.empty(4), x, dist.ReduceOp.MAX, codec=codec)
    with pytest.raises(UnsupportedError, match=r"can be added, found torch\.float8_e4m3fn"):
        cc.all_reduce(x.to(torch.float8_e4m3fn), codec=codec)
    with pytest.raises(UnsupportedError, match="host memory"):
        cc.all_reduce(torch.empty(8, device="meta"), codec=codec)
    with pytest.raises(UsageError, match="contiguous"):
        cc.all_reduce(torch.zeros(4, 4).t(), codec=codec)
    ids = [codec.books.id.hex(), codec.books.id.hex()]
    if rank == 1:
        families = {key: family for key, family in codec.books.families.items() if key[1] != "grad"}
        codec.replace_books(CodebookSet(families))
    mine = [codec.books.id.hex()] * size
    dist.all_gather_object(mine, codec.books.id.hex())
    assert ids[0] in mine
    if rank == 0:
        dist.send(torch.tensor([1 << 40]), 1)
    elif rank == 1:
        with pytest.raises(FormatError, match="from rank 0"):
            cc.recv(torch.zeros(8), 0, codec=codec)
    with pytest.raises(UnsupportedError) as refused:
        cc.all_reduce(x, codec=codec)
    assert all(one in str(refused.value) for one in mine)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256))


def learn_at_1(codec: TensorCodec) -> Callable[[int], None]:
    return lambda step: training.agree(codec) if step == 1 else None


def steps(net: nn.Module, rank: int, n: int, after: Callable[[int], None] = lambda _: None) -> torch.Tensor:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(n):
        x = torch.randn(64, 256, generator=generator).to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        F.mse_loss(net(x), x.roll(1, 1) * x).backward()
        optimizer.step()
        after(step)
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in (q.detach() for q in net.parameters())]
    return torch.cat([p.reshape(-1) for p in full])


def ddp(rank: int, size: int) -> None:
    for name, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16)):
        plain = steps(DistributedDataParallel(model().to(dtype), bucket_cap_mb=1), rank, 12)
        coded = DistributedDataParallel(model().to(dtype), bucket_cap_mb=1)
        state = training.FixedHuffmanState(warmup_steps=2, check_every=4)
        coded.register_comm_hook(state, training.fixed_huffman_hook)
        found = steps(coded, rank, 12)
        if size == 2:
            assert torch.equal(bits(plain), bits(found))
        assert state.is_warm
        assert state.epoch >= 1
        small(state.codec, {(name, "grad")})
        again = training.FixedHuffmanState()
        again.load_state_dict(state.state_dict())
        assert again.codec.books.id == state.codec.books.id
        assert (again.step, again.epoch) == (state.step, state.epoch)


def fsdp(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (size,))

    def sharded(dtype: torch.dtype, codec: TensorCodec | None) -> nn.Module:
        net = model().to(dtype)
        layers = [layer for layer in net if isinstance(layer, nn.Linear)]
        for layer in (*layers, net):
            fully_shard(layer, mesh=mesh)
            if codec is not None:
                layer.set_custom_all_gather(training.FixedHuffmanAllGather(codec))
                layer.set_custom_reduce_scatter(training.FixedHuffmanReduceScatter(codec))
        return net

    for name, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16)):
        plain = steps(sharded(dtype, None), rank, 6)
        codec = TensorCodec(CodebookSet({}))
        found = steps(sharded(dtype, codec), rank, 6, learn_at_1(codec))
        if size == 2:
            assert torch.equal(bits(plain), bits(found))
        assert set(codec.stats()) == {(name, "weight"), (name, "grad")}
        small(codec, set(codec.stats()))


def odd_inputs(rank: int, size: int) -> None:
    """Send what no book was made for: random bits, equal words, words of another size."""
    codec = learned(size)
    bytes_of = np.random.default_rng(rank).bytes
    for dtype in DTYPES:
        n = 20_001
        n_bytes = n * dtype.itemsize
        for data in (
            bytes_of(n_bytes),
            bytes_of(1) * n_bytes,
            bits(draw(dtype, n, rank, scale=1e-19)).numpy().tobytes(),
        ):
            x = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
            expected, out = torch.empty(size * n, dtype=dtype), torch.empty(size * n, dtype=dtype)
            dist.all_gather_single(bits(expected), bits(x))
            cc.all_gather_single(out, x, codec=codec)
            assert torch.equal(bits(out), bits(expected)), dtype
    raw = sum(traffic.raw_bytes for traffic in codec.stats().values())
    assert sum(traffic.wire_bytes for traffic in codec.stats().values()) < raw


def overlap(rank: int, size: int) -> None:
    """Go on while a collective waits for another rank; code gradients while others are computed."""
    codec = learned(size)
    x = draw(torch.float32, cc.PIECE_WORDS + 5, rank)
    if rank:
        dist.recv(torch.empty(1), 0)
    pending = cc.all_reduce(x.clone(), async_op=True, codec=codec)
    assert pending is not None
    if not rank:
        assert not pending.is_completed()  # the other rank waits for what comes next
        dist.send(torch.ones(1), 1)
    assert pending.wait()
    net = DistributedDataParallel(model(), bucket_cap_mb=1)
    state = training.FixedHuffmanState(warmup_steps=0, codec=codec)
    net.register_comm_hook(state, training.fixed_huffman_hook)
    coded = threading.Event()
    encode = codec.encode

    def noted(*args: Any) -> Any:
        message = encode(*args)
        coded.set()
        return message

    codec.encode = noted  # type: ignore[assignment, method-assign]
    # The gradient of the first layer comes last: until then messages of others must have been coded.
    net.module[0].weight.register_hook(lambda _: seen.append(coded.wait(60)))
    for _ in range(2):  # buckets are cut anew after the first step
        seen: list[bool] = []
        coded.clear()
        F.mse_loss(net(x[: 64 * 256].nan_to_num(0).view(64, 256)), torch.zeros(64, 256)).backward()
    assert seen == [True]


class Bucket:
    """A bucket of gradients, the last one of a step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def buffer(self) -> torch.Tensor:
        return self.tensor

    def is_last(self) -> bool:
        return True


def drift(rank: int, size: int) -> None:
    """Drift on one rank: all learn again at the same step, and the state of a checkpoint goes on as it was."""
    state = training.FixedHuffmanState(warmup_steps=2, check_every=4)

    def step(k: int, state: training.FixedHuffmanState, *, moved: bool = False) -> torch.Tensor:
        x = draw(torch.bfloat16, 40_000, 10 * k + rank)
        if moved:
            x = x.sign() * x.abs().nan_to_num(0, 0, 0) ** 0.2  # of other sizes, and all of them closer
        future = training.fixed_huffman_hook(state, Bucket(x))
        found: torch.Tensor = future.wait()
        return found

    for k in range(10):
        step(k, state)
    assert (state.step, state.epoch) == (10, 1)
    first = state.codec.books.id
    for k in range(10, 13):
        step(k, state, moved=rank == 1)
    assert state.codec.stats()["BF16", "grad"].has_drifted or rank == 0
    assert (state.codec.books.id, state.epoch) == (first, 1)  # not before the step at which all look
    step(13, state, moved=rank == 1)
    assert (state.step, state.epoch) == (14, 2)
    ids: list[Any] = [None] * size
    dist.all_gather_object(ids, state.codec.books.id)
    assert set(ids) == {state.codec.books.id} != {first}
    kept = io.BytesIO()
    torch.save(state.state_dict(), kept)
    kept.seek(0)
    again = training.FixedHuffmanState()
    again.load_state_dict(torch.load(kept, weights_only=True))
    assert again.is_warm
    assert torch.equal(bits(step(14, again)), bits(step(14, state)))
    assert (again.step, again.epoch, again.codec.books.id) == (state.step, state.epoch, state.codec.books.id)


def profiles(rank: int, size: int) -> None:
    def batch(net: nn.Module) -> torch.Tensor:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank))
        return F.mse_loss(net(x), x * x)

    books, report = training.profile(model(), [batch, batch])
    kinds = {"weight", "activation", "grad", "activation_grad"}
    assert {kind for _, kind in books.families} == kinds == {one.kind for one in report}
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (books.id, report))
    assert all(one == (books.id, report) for one in found)
    names = {(one.kind, one.name) for one in report}
    assert {("grad", "0.weight"), ("activation", "2"), ("activation_grad", "2"), ("weight", "4.weight")} < names
    for name in names:
        assert {one.rank for one in report if (one.kind, one.name) == name} == set(range(size))
    assert [one.regret_ppm for one in report] == sorted((one.regret_ppm for one in report), reverse=True)
    assert np.median([one.regret_ppm for one in report]) < 20_000
    grads = [one for one in report if one.kind == "grad" and "weight" in one.name]
    assert max(one.regret_ppm for one in grads) < max(one.one_book_ppm for one in grads)


def deepspeed(rank: int, size: int) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    ds = importlib.import_module("deepspeed")
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled when first used, and not what is tested
    with pytest.raises(UsageError, match=r"call deepspeed\.init_distributed"):
        install_deepspeed(TensorCodec(CodebookSet({})))
    ds.init_distributed(dist_backend="gloo")
    own = ds.comm.comm.cdb
    for stage, precision in ((1, "BF16"), (3, "BF16"), (3, "F32")):
        plain = zero_steps(ds, rank, stage, precision)
        codec = TensorCodec(CodebookSet({}), checksum=True)
        install_deepspeed(codec)
        coded = zero_steps(ds, rank, stage, precision, learn_at_1(codec))
        with pytest.raises(UsageError, match="call uninstall_deepspeed"):
            install_deepspeed(codec)
        uninstall_deepspeed()
        assert torch.equal(bits(plain), bits(coded))
        assert set(codec.stats()) == {(precision, "weight"), (precision, "grad")}
        small(codec, set(codec.stats()))
    uninstall_deepspeed()
    assert ds.comm.comm.cdb is own


def zero_steps(
    ds: Any, rank: int, stage: int, precision: str, after: Callable[[int], None] = lambda _: None
) -> torch.Tensor:
    net = model()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "BF16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=config)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(6):
        x = torch.randn(16, 256, generator=generator).to(next(net.parameters()).dtype)
        engine.backward(F.mse_loss(engine(x), x.roll(1, 1) * x))
        engine.step()
        after(step)
    with ds.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()])
