"""Runs one function on several ranks of gloo, each a process; what a rank raises fails the test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeline.collectives import Channel


def run(function: Callable[..., None], size: int, *args: Any) -> None:
    """Call ``function(rank, size, *args)`` on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, str(Path(folder) / "store"), function, args), size, start_method="spawn")


def _rank(rank: int, size: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    function(rank, size, *args)
    dist.barrier()
    Channel.close_all()
    dist.destroy_process_group()
