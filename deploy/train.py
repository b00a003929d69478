"""Two ranks train a small model on the CPU, with and without coded gradients: ``python deploy/train.py``.

Prints the time of a step, what went over the wire, and whether both runs end with the same parameters.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.collectives import Channel
from pipeline.training import FixedHuffmanState, fixed_huffman_hook

RANKS, STEPS, WIDTH = 2, 24, 1024


def train(rank: int, *, coded: bool) -> tuple[torch.Tensor, float, FixedHuffmanState]:
    """Return the parameters after all steps, the seconds of a step, and the state of the hook."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)
    state = FixedHuffmanState(warmup_steps=4)
    if coded:
        model.register_comm_hook(state, fixed_huffman_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    start = time.perf_counter()
    for step in range(STEPS):
        if step == STEPS // 2:
            start = time.perf_counter()  # books are learned, kernels are compiled
        batch = torch.randn(64, 256, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(batch), batch.roll(1, 1) * batch).backward()
        optimizer.step()
    seconds = (time.perf_counter() - start) / (STEPS - STEPS // 2)
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]), seconds, state


def main(rank: int, store: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    plain, plain_s, _ = train(rank, coded=False)
    coded, coded_s, state = train(rank, coded=True)
    if rank == 0:
        traffic = state.codec.stats()["F32", "grad"]
        print(f"step: {1000 * plain_s:.1f} ms plain, {1000 * coded_s:.1f} ms coded")
        print(f"wire / raw: {traffic.wire_bytes / traffic.raw_bytes:.3f}, {traffic.messages} messages")
        print(f"books: {state.codec.books.id.hex()}, epoch {state.epoch}")
        print("parameters are", "the same, bit for bit" if torch.equal(plain, coded) else "NOT the same")
    same = torch.equal(plain, coded)
    dist.barrier()
    Channel.close_all()
    dist.destroy_process_group()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (str(Path(folder) / "store"),), RANKS, start_method="spawn")
