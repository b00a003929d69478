"""T10: the same source and recipe are the same archive, byte for byte, whatever else differs.

Hash seeds, compiled kernels or interpreted ones, workers, and the order in which tasks are done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cases import bf16, noise, safetensors

ROOT = Path(__file__).parents[2]
FLOATS = np.random.default_rng(4).standard_normal(1600).astype(np.float32)
SOURCE = {
    "a.safetensors": safetensors(
        [
            ("weights", "BF16", [40, 16], bf16(1, 640)),
            ("wide", "F32", [20, 32], FLOATS[:640].tobytes()),
            ("upcast", "F32", [50, 32], (FLOATS.view(np.uint32) & np.uint32(0xFFFF0000)).tobytes()),
            ("mask", "BOOL", [32, 32], np.tril(np.ones((32, 32), np.uint8)).tobytes()),
            ("step", "I64", [1], bytes([57, 48, 0, 0, 0, 0, 0, 0])),
        ],
        {"format": "pt"},
    ),
    "b.safetensors": safetensors(
        [
            ("twin", "BF16", [40, 16], bf16(1, 640)),
            ("positions", "I64", [500], np.arange(500).tobytes()),
            ("zeros", "F16", [300], bytes(600)),
        ]
    ),
    "config.json": b'{"hidden": 64}' * 20,
    "noise.bin": noise(3, 700),
}
ARCHIVE = """
import random, sys
from pipeline import executors
from pipeline.cli import main

if __name__ == "__main__":
    source, archive, workers, seed = sys.argv[1:]
    if int(seed):
        for kind in (executors.SerialExecutor, executors.PoolExecutor):
            def shuffled(self, job, items, run=kind.run):
                return run(self, job, random.Random(int(seed)).sample(items, len(items)))
            kind.run = shuffled
    options = ["--workers", workers, "--set", "task_bytes=2KiB", "--set", "synth.budget=6"]
    sys.exit(main(["archive", source, archive, *options, "--no-progress"]))
"""
"""With its tasks in another order where there is a seed."""


def archived(source: Path, archive: Path, workers: int = 1, shuffle: int = 0, **environment: str) -> dict[str, bytes]:
    """Return the objects of an archive, made by a process of its own, that a run's time and name are not part of."""
    script = archive.with_suffix(".py")
    script.write_text(ARCHIVE)
    command = [sys.executable, str(script), str(source), str(archive), str(workers), str(shuffle)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    objects = {
        str(path.relative_to(archive)): path.read_bytes()
        for part in ("packs", "manifests")
        for path in (archive / part).rglob("*")
        if path.is_file()
    }
    assert sum(name.startswith("packs") for name in objects) > 2, "several tasks write packs"
    assert any(name.startswith("manifests") for name in objects)
    return objects


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name, data in SOURCE.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return archived(source, tmp_path_factory.mktemp("expected") / "archive", PYTHONHASHSEED="0")


def test_no_hash_seed_changes_a_byte(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    assert archived(source, tmp_path / "archive", PYTHONHASHSEED="1") == expected


def test_interpreted_kernels_write_the_same(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    assert archived(source, tmp_path / "archive", PYTHONHASHSEED="2", NUMBA_DISABLE_JIT="1") == expected


@pytest.mark.parametrize(("workers", "seed"), [(1, 1), (2, 2)])
def test_neither_workers_nor_the_order_of_tasks_do(
    source: Path, expected: dict[str, bytes], tmp_path: Path, workers: int, seed: int
) -> None:
    assert archived(source, tmp_path / "archive", workers, seed) == expected
