"""The comparison on a small file: what it measures is verified, what goes wrong is told, bars are judged."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.bench import aside, compare, compared, published, targets
from tests.bench.aside import Job
from tests.bench.compare import Choice
from tests.bench.peers import GENERAL, Peer
from tests.bench.results import Results, Row
from tests.checkpoints import path, read

FILE = "fracast-i8"
ZSTD = next(peer for peer in GENERAL if peer.name == "zstd -3")
GZIP = dataclasses.replace(next(peer for peer in GENERAL if peer.name == "gzip"), unit="tensor", mb_s=1000)
FORGETFUL = Peer("forgetful", lambda data, _: data[1:], lambda data, _: b"\0" + data, module="zlib")
BROKEN = Peer("broken", lambda data, _: data[:1], lambda data, _: data[9], module="zlib")  # type: ignore[index, unused-ignore]
ABSENT = Peer("absent", lambda data, _: data, lambda data, _: data, package="no_such_package")


@pytest.fixture(scope="module")
def results() -> Results:
    """A quick comparison with two peers, and three that do not work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Results, "save", lambda *_: None)
        choice = Choice([FILE], [ZSTD, GZIP, FORGETFUL, BROKEN, ABSENT], ["Brevis language"], ["default"], quick=True)
        return compare.measure(choice, lambda _: None)


def test_every_figure_was_restored_and_compared(results: Results) -> None:
    measured = {row.name: row for row in results.rows if row.kind != "computed" and not row.note}
    assert {"zstd -3", "gzip", "brevis default", "brevis default, verified"} == set(measured)
    for row in measured.values():
        assert row.verified
        assert row.size
        assert row.compress_s is not None
        assert row.rounds == 1
    assert measured["brevis default"].size == measured["brevis default, verified"].size


def test_what_does_not_work_stays_in_the_tables(results: Results) -> None:
    notes = {row.name: row.note for row in results.rows if row.note}
    assert notes["forgetful"] == "RESTORES OTHER BYTES"
    assert notes["broken"].startswith("fails: IndexError")
    assert list(results.missing) == ["absent"]
    page = "\n".join(table.markdown() for table in compared.tables(results))
    for text in ("RESTORES OTHER BYTES", "absent: not measured, no_such_package is not installed", "fails: IndexError"):
        assert text in page


def test_results_are_read_back_as_they_were_written(results: Results, tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    file.write_text(json.dumps(dataclasses.asdict(results)), "utf-8")
    assert Results.load(file) == results


def test_a_bar_holds_only_by_what_was_measured() -> None:
    results = Results({})
    results.rows = [
        Row("minilm-bf16", 1000, "brevis default", "ours", "segment", size=650, compress_s=1, verified=True),
        Row("minilm-bf16", 1000, "ZipNN", "peer", "file", size=660, compress_s=3, verified=True),
        Row("minilm-bf16", 1000, "zstd -3", "peer", "file", size=100, compress_s=3, note="RESTORES OTHER BYTES"),
    ]
    results.archives = [{"file": "minilm-bf16", "recipe": "default", "compared": 658}]
    holds = {row[0]: (row[2], row[3]) for row in targets.table(results).rows}
    assert holds["size of minilm-bf16, default"] == ("65.80 %", "holds")
    assert holds["size of minilm-bf16, max"] == ("not measured", "MISSED")
    assert holds["compress against ZipNN, BF16 and F16: minilm-bf16"] == ("3.00x, verified not measured", "holds")
    assert holds["decompress against ZipNN, BF16 and F16: minilm-bf16"][1] == "MISSED"
    results.archives[0]["compared"] = 659
    assert {row[0]: row[3] for row in targets.table(results).rows}["size of minilm-bf16, default"] == "MISSED"


def test_small_nets_are_compared_in_both_ways_that_zipnn_is_used() -> None:
    results = Results({})
    results.rows = [
        Row("silero-f32", 1000, "brevis default", "ours", "segment", size=650, compress_s=1, verified=True),
        Row("silero-f32", 1000, "ZipNN", "peer", "file", size=660, compress_s=0.25, verified=True),
        Row("silero-f32", 1000, "ZipNN by tensor", "peer", "tensor", size=670, compress_s=2, verified=True),
    ]
    (table,) = [table for table in compared.tables(results) if "small tensors" in table.title]
    assert table.rows == [["silero-f32", "0.25", "2.00", "", ""]]
    holds = {name: holds for name, _, _, holds in targets._speed_bars(compared.View(results, with_archives=True))}
    assert not holds["compress against ZipNN, many small tensors: silero-f32"]
    assert holds["compress against ZipNN, many small tensors, each on its own: silero-f32"]


def test_published_sizes_are_not_below_what_their_formats_need() -> None:
    tensors = read(path(FILE))
    n_bytes = sum(len(tensor.data) for tensor in tensors.values())
    assert n_bytes // 2 < published.brevis_bytes(tensors) <= n_bytes + len(tensors)
    assert published.dfloat11_bytes(tensors) is None


def test_slow_peers_are_measured_anew_only_where_they_have_changed_and_not_where_they_take_too_long() -> None:
    slow = dataclasses.replace(ZSTD, name="slow", mb_s=1)
    old = Row(FILE, 1, "slow", "peer", "file", slow.settings, slow.version, size=7, verified=True)
    (kept,) = compare._jobs(Choice([FILE], [], [], ["default"], reuse=Results({}, [old])), [slow])
    assert kept is old
    changed = dataclasses.replace(old, version="0")
    (job,) = compare._jobs(Choice([FILE], [], [], ["default"], reuse=Results({}, [changed])), [slow])
    assert isinstance(job, Job)
    (left_out,) = compare._jobs(Choice([FILE], [], [], ["default"], patience_s=0.01), [slow])
    assert isinstance(left_out, Row)
    assert left_out.note.startswith("not measured: about")


class Dying(Job):
    """A job that ends its process."""

    def __call__(self) -> None:
        os._exit(3)


def test_a_process_that_dies_takes_no_other_work_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "FEW_SECONDS", 0)
    monkeypatch.setattr(Results, "save", lambda *_: None)
    rows: list[Row] = []
    jobs = [Dying("peer", "mortal", FILE, 2), Job("peer", "zstd -3", FILE, 1)]
    aside.in_background(jobs, Results({}), rows.extend)
    assert {row.name: (row.verified, row.note) for row in rows} == {
        "mortal": (False, "fails: its process died"),
        "zstd -3": (True, ""),
    }


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no such peer"):
        compare.choose(peers=["no such peer"])
    with pytest.raises(ValueError, match="no such recipe"):
        compare.choose(recipes=["no such recipe"])
