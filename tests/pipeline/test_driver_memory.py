"""A driver holds segments as columns: a million of them, or tens of thousands of files, take it little memory.

Workers are left out: what they do with a segment takes a hundred times as long, and is no memory of the driver.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.recipe import load
from pipeline import calibration
from pipeline.commit import adopt_receipt
from pipeline.driver import ArchiveRun, Order
from pipeline.executors import Outcome
from pipeline.packs import pack_key
from pipeline.plan import TASK_SEGMENTS, make_plan
from pipeline.progress import Progress
from pipeline.segments import Layout, Segment
from pipeline.store import ObjectInfo, Store
from pipeline.tasks import Receipt
from synth.calibrate import MAX_TENSORS
from tests.processes import resident_bytes, run

TENSOR_BYTES = 4096
N_TENSORS = 50_000
MOST_BYTES = 600
"""What a stored segment may take of the driver; objects took 1,000 and more, columns take 300."""


@dataclass(frozen=True)
class Clerk:
    """An executor that makes receipts of made-up records, with packs of one byte."""

    archive: Store
    resident_bytes: list[int]
    """Memory of this process at the end of each task."""

    def run(self, job: Any, items: Sequence[Any]) -> Iterator[Outcome[Any, Any]]:
        """See `Executor.run`."""
        rng = np.random.Generator(np.random.SFC64(7))
        for task in items:
            pack = rng.bytes(32)
            self.archive.put(pack_key(pack), b"p")
            rows = [
                replace(
                    row, digest=rng.bytes(32), program="scaled[...](raw, rans)", stored_bytes=1,
                    stored_digest=rng.bytes(32), pack=pack, pack_bytes=1, pack_offset=0,
                )
                for row in task.rows()
            ]  # fmt: skip
            receipt = Receipt(adopt_receipt(self.archive, job.run, task, rows), False)
            del rows
            yield Outcome(task, receipt, None)
            gc.collect()
            self.resident_bytes.append(resident_bytes(os.getpid()))


def write(folder: Path, n_tensors: int) -> None:
    """Write tensors of `TENSOR_BYTES` each, no two alike."""
    entries = {
        f"model.layers.{i // 512}.experts.{i % 512}.scale": {
            "dtype": "BF16",
            "shape": [TENSOR_BYTES // 2],
            "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES],
        }
        for i in range(n_tensors)
    }
    header = json.dumps(entries).encode()
    rng = np.random.Generator(np.random.SFC64(1))
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, n_tensors, 1 << 12):
            out.write(rng.bytes(min(1 << 12, n_tensors - start) * TENSOR_BYTES))


def main(source: str, archive: str) -> None:
    """Archive, and print what segments of the tasks after the first one took of this process, in bytes each."""
    order = Order(source, archive, "many", single_writer=True)
    driver = ArchiveRun(order, load(None, ["synth.prior=uniform"]))
    clerk = Clerk(driver.archive, [])
    summary = driver.run(clerk, Progress("archive", 0, shown=False, interval_seconds=0))
    grown = clerk.resident_bytes[-1] - clerk.resident_bytes[0]
    print(json.dumps({"segments": summary.segments, "bytes": grown / (summary.segments - TASK_SEGMENTS)}))


def test_a_stored_segment_takes_little_of_the_driver(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write(source, N_TENSORS)
    code = f"from {__name__} import main; main({str(source)!r}, {str(tmp_path / 'archive')!r})"
    found = json.loads(run([sys.executable, "-c", code]).stdout)
    assert found["segments"] == N_TENSORS + 1  # and the header
    assert found["bytes"] < MOST_BYTES, found


def test_the_tensors_that_teach_are_the_same_however_few_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 4096  # and one dtype: all in one stratum
    segments = tuple(
        Segment(i * n, n, f"layers.{i}.{'abcd'[i % 7 % 4]}", "BF16", (n // 2,), 0, 1, n // 2, 1) for i in range(2000)
    )
    plan = make_plan([ObjectInfo("m", 2000 * n, "")], [Layout("safetensors", None, "", segments)], 1 << 28, {})
    monkeypatch.setattr(calibration, "KEPT_TENSORS", len(segments) + 1)
    wanted = [segment for _, segment in calibration.choose(plan)]
    monkeypatch.setattr(calibration, "KEPT_TENSORS", MAX_TENSORS + 1)
    assert [segment for _, segment in calibration.choose(plan)] == wanted
    assert len(wanted) == MAX_TENSORS
