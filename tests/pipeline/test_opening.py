"""`pipeline.open`: the source is the oracle, and no more is read or kept than was asked for."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import pipeline
from operators.errors import ArchiveNotFoundError, DamageError, DigestError, NotFoundError, UnsupportedError, UsageError
from operators.words import DTYPES
from pipeline import archive as archive_module
from pipeline import opening
from pipeline.archive import latest_time
from pipeline.cli import main
from pipeline.opening import Archive
from pipeline.reading import Decoder
from pipeline.rows import Row
from pipeline.segments import tensors_of
from tests.cases import Entry, bf16, noise, safetensors
from tests.s3server import s3_server

ROOT = Path(__file__).parents[2]
QUICK = ("--workers", "1", "--set", "synth.budget=8", "--set", "synth.prior=shipped", "-q")
LARGE_ROWS, LARGE_ROW_BYTES = 150, 1_000_003
"""Segments of odd sizes, of which each but the first begins at an odd byte of the tensor."""


def of_every_dtype() -> list[Entry]:
    """One tensor of each dtype, 24 elements in a row, with patterns that no arithmetic leaves alone."""
    return [
        (f"of_{name}", name, [5, 24], noise(seed, 5 * 24 * dtype.element_bits // 8))
        for seed, (name, dtype) in enumerate(DTYPES.items())
    ]


def large() -> bytes:
    data = np.zeros(LARGE_ROWS * LARGE_ROW_BYTES, np.uint8)
    data[::99_991] = 1 + np.arange(data[::99_991].size) % 255
    return data.tobytes()


def sources() -> dict[str, bytes]:
    tiny = [(f"tiny.{i}", "F16", [i], noise(i, 2 * i)) for i in range(1, 300)]
    return {
        "dtypes.safetensors": safetensors([*of_every_dtype(), ("odd", "F4", [3, 6], noise(7, 9))]),
        "large.safetensors": safetensors([("large", "U8", [LARGE_ROWS, LARGE_ROW_BYTES], large())]),
        "part-1.safetensors": safetensors(
            [("a", "BF16", [100, 64], bf16(1, 6400)), ("both", "U8", [3], b"one"), *tiny]
        ),
        "part-2.safetensors": safetensors(
            [
                ("b", "F32", [33, 7], noise(2, 924)),
                ("both", "U8", [3], b"two"),
                ("none", "I64", [0, 4], b""),
                ("scalar", "F64", [], noise(3, 8)),
                ("wide", "F32", [50, 333], noise(4, 66_600)),
            ]
        ),
        "notes/readme.txt": b"plain text\n" * 1000,
        "empty": b"",
    }


@pytest.fixture(scope="module")
def source() -> dict[str, bytes]:
    return sources()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, source: dict[str, bytes]) -> Path:
    """An archive without `runs/`: reading needs a snapshot, its manifest and its packs."""
    folder = tmp_path_factory.mktemp("opening")
    for key, data in source.items():
        (folder / "source" / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / key).write_bytes(data)
    assert main(["archive", str(folder / "source"), str(folder / "archive"), *QUICK]) == 0
    shutil.rmtree(folder / "archive" / "runs")
    return folder / "archive"


@pytest.fixture(scope="module")
def archive(place: Path) -> Archive:
    return pipeline.open(str(place))


class Taken:
    """The stored bytes that are asked of a store while a test runs."""

    def __init__(self, archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        plain = archive._store.get_ranges

        def counted(info: Any, ranges: Any, room: Any = None) -> Any:
            self.sizes += [stop - start for start, stop in ranges]
            return plain(info, ranges, room)

        monkeypatch.setattr(archive._store, "get_ranges", counted)


# -- tensors ------------------------------------------------------------------------------------


def test_every_tensor_of_every_file_equals_the_source(
    archive: Archive, source: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones that share a segment, one without bytes, a scalar, one of several segments cut at odd bytes."""
    plain, seen = Decoder.decode, 0

    def decode(self: Any, row: Row, record: memoryview, out: Any = None) -> memoryview:
        assert out is None or out.ctypes.data % 8 == 0, "kernels take words that are aligned"
        return plain(self, row, record, out)

    monkeypatch.setattr(Decoder, "decode", decode)
    for key, data in source.items():
        if not key.endswith(".safetensors"):
            continue
        for tensor in tensors_of(data[: 8 + int.from_bytes(data[:8], "little")]):
            found = archive.tensor(f"{key}:{tensor.name}")
            assert found.tobytes() == data[tensor.begin : tensor.end], tensor.name
            if DTYPES[tensor.dtype].element_bits >= DTYPES[tensor.dtype].word_bits:
                assert found.shape == tensor.shape
            seen += 1
    assert seen == len(archive.names()) == len(DTYPES) + 1 + 1 + 301 + 5


NUMPY = {"BF16": "uint16", "BOOL": "bool", "C64": "complex64"} | {
    name: "uint8" for name in DTYPES if name.startswith(("F8_", "F6_")) or name == "F4"
}


def test_numpy_gives_the_declared_dtype_or_words(archive: Archive) -> None:
    for name, dtype in DTYPES.items():
        expected = NUMPY.get(name) or {"U": "uint", "I": "int", "F": "float"}[name[0]] + name[1:]
        found = archive.tensor(f"of_{name}")
        assert found.dtype == np.dtype(expected), name
        assert found.shape == (5, 24 if dtype.element_bits >= 8 else 24 * dtype.element_bits // 8)
    assert archive.tensor("odd").shape == (3, 3)
    assert archive.tensor("scalar").shape == ()
    assert archive.tensor("none").shape == (0, 4)


def test_torch_gives_the_declared_dtype_and_never_casts(archive: Archive, source: dict[str, bytes]) -> None:
    """T20: an exponent byte of 120 stays a byte of E8M0; what torch does not have is refused."""
    some = {"BOOL": torch.bool, "F8_E8M0": torch.float8_e8m0fnu, "BF16": torch.bfloat16, "F4": torch.float4_e2m1fn_x2}
    for name in DTYPES:
        if name.startswith("F6_"):
            with pytest.raises(UnsupportedError, match=name):
                archive.torch(f"of_{name}")
            continue
        found = archive.torch(f"of_{name}")
        assert found.dtype == some.get(name, found.dtype)
        assert found.view(torch.uint8).numpy().tobytes() == archive.tensor(f"of_{name}").tobytes()


def test_a_state_dict_equals_that_of_the_reference_reader(
    archive: Archive, source: dict[str, bytes], tmp_path: Path
) -> None:
    """U04: straight from the archive, all of it or some names."""
    (tmp_path / "part-2.safetensors").write_bytes(source["part-2.safetensors"])
    expected = load_file(tmp_path / "part-2.safetensors")
    names = ["wide", "scalar", "none", "b"]
    for device in (None, "cpu"):
        found = archive.state_dict(names, device)
        assert list(found) == names
        for name in names:
            assert found[name].dtype == expected[name].dtype
            assert found[name].numpy().tobytes() == expected[name].numpy().tobytes()
            assert found[name].shape == expected[name].shape
    meta = archive.state_dict(["a", "b"], "meta")
    assert {name: tensor.shape for name, tensor in meta.items()} == {"a": (100, 64), "b": (33, 7)}


def test_tensors_that_share_a_segment_are_decoded_together(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = pipeline.open(str(place))
    archive.names()
    taken = Taken(archive, monkeypatch)
    archive.state_dict([f"tiny.{i}" for i in range(299, 0, -1)])
    assert 1 <= len(taken.sizes) <= 3


def test_a_tensor_takes_its_own_records_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = pipeline.open(str(place))
    taken = Taken(archive, monkeypatch)
    archive.tensor("part-2.safetensors:wide")  # whose header is in one record
    [rows] = [archive._files["part-2.safetensors"].rows]
    sizes = [row.stored_bytes for row in rows if row.tensor == "wide" or row.offset_bytes == 0]
    assert taken.sizes == [size for size in sizes if size is not None]


def test_names_that_several_files_have(archive: Archive) -> None:
    with pytest.raises(UsageError, match=r"part-1.safetensors, part-2.safetensors"):
        archive.tensor("both")
    assert archive.tensor("part-1.safetensors:both").tobytes() == b"one"
    assert archive.tensor("part-2.safetensors:both").tobytes() == b"two"
    names = archive.names()
    assert "both" not in names
    assert {"part-1.safetensors:both", "part-2.safetensors:both", "a", "scalar"} <= set(names)
    for nobody in ("nobody", "part-1.safetensors:b", "nowhere.safetensors:a", ":a", "a:"):
        with pytest.raises(UsageError):
            archive.tensor(nobody)


def test_what_is_returned_is_the_callers(archive: Archive) -> None:
    for name in ("a", "tiny.7", "large"):
        first = archive.tensor(name)
        first[...] = 0
        assert archive.tensor(name).any()
        assert first.ctypes.data % 64 == 0


def test_bfloat16_words_are_what_ml_dtypes_reads(archive: Archive) -> None:
    words = archive.tensor("a")
    floats = archive.torch("a").float().numpy()
    assert np.array_equal(words.view(ml_dtypes.bfloat16).astype(np.float32), floats, equal_nan=True)


# -- files --------------------------------------------------------------------------------------


def test_files_are_listed_and_read_whole(archive: Archive, source: dict[str, bytes]) -> None:
    assert archive.files() == sorted(source)
    for key, data in source.items():
        with archive.open(key) as file:
            assert file.read() == data
            assert file.read() == b""
    with pytest.raises(NotFoundError):
        archive.open("nothing")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_seeks_and_reads_equal_those_of_the_source(
    archive: Archive, source: dict[str, bytes], data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from([key for key in sorted(source) if not key.startswith("large")]))
    plain, file = io.BytesIO(source[key]), archive.open(key)
    size = len(source[key])
    for _ in range(data.draw(st.integers(1, 8))):
        whence = data.draw(st.sampled_from((0, 1, 2)))
        low = {0: 0, 1: -plain.tell(), 2: -size}[whence]
        offset = data.draw(st.integers(low, low + size + 10))
        assert file.seek(offset, whence) == plain.seek(offset, whence)
        n_bytes = data.draw(st.one_of(st.integers(0, 100), st.integers(0, size + 10), st.just(-1)))
        assert file.read(n_bytes) == plain.read(n_bytes)
        assert file.tell() == plain.tell()
    with pytest.raises(ValueError, match="negative"):
        file.seek(-1 - size)


def test_small_reads_of_a_large_file_keep_little_in_memory(
    place: Path, source: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three segments of 50 MB fit; tracemalloc sees what numpy allocates."""
    data = source["large.safetensors"]
    archive = pipeline.open(str(place))
    rows = archive._files["large.safetensors"].rows
    largest = max(row.n_bytes for row in rows)
    assert sum(row.n_bytes == largest for row in rows) >= 2
    monkeypatch.setattr(opening, "CACHE_BYTES", largest + (8 << 20))
    steps = [*range(0, len(data), 1 << 20), *range(len(data) - 1000, 0, -(len(data) // 7))]
    tracemalloc.start()
    try:
        with archive.open("large.safetensors") as file:
            for position in steps:
                file.seek(position)
                assert file.read(5000) == data[position : position + 5000]
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < opening.CACHE_BYTES + (8 << 20)
    assert archive._cache._n_bytes <= opening.CACHE_BYTES


def test_a_position_in_a_large_file_costs_one_record(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = pipeline.open(str(place))
    taken = Taken(archive, monkeypatch)
    rows = archive._files["large.safetensors"].rows
    with archive.open("large.safetensors") as file:
        for row in (rows[-1], rows[1], rows[-1]):
            file.seek(row.offset_bytes + 10)
            file.read(100)
    assert taken.sizes == [rows[-1].stored_bytes, rows[1].stored_bytes]


# -- around it ----------------------------------------------------------------------------------


def test_threads_and_copies_read_the_same(archive: Archive, place: Path, source: dict[str, bytes]) -> None:
    names = [name for name in archive.names() if name != "large"] * 3
    expected = [archive.tensor(name).tobytes() for name in names]
    fresh = pickle.loads(pickle.dumps(pipeline.open(str(place), "source/1")))
    assert fresh.snapshot == archive.snapshot
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda name: fresh.tensor(name).tobytes(), names)) == expected


def test_damage_is_an_error_that_names_the_place(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "archive")
    archive = pipeline.open(str(tmp_path / "archive"))
    [row] = [row for row in archive._files["part-2.safetensors"].rows if row.tensor == "wide"]
    assert row.pack is not None
    assert row.pack_offset is not None
    assert row.stored_bytes is not None
    path = tmp_path / "archive" / "packs" / row.pack.hex()[:2] / row.pack.hex()
    data = bytearray(path.read_bytes())
    data[row.pack_offset + row.stored_bytes // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"part-2.safetensors@[0-9]+/wide"):
        archive.tensor("wide")
    with pytest.raises(DigestError, match=r"part-2.safetensors@[0-9]+/wide"):
        archive.open("part-2.safetensors").read()
    assert archive.tensor("part-2.safetensors:b").size == 33 * 7


def test_a_shape_that_numpy_lacks_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "m.safetensors").write_bytes(
        safetensors([("none", "F32", [0, 10**17, 10**17], b""), ("w", "F32", [1], bytes(4))])
    )
    assert main(["archive", str(folder), str(tmp_path / "vault"), *QUICK]) == 0
    opened = pipeline.open(tmp_path / "vault")  # a path, as much as a string
    assert opened.tensor("w").shape == (1,)
    with pytest.raises(UnsupportedError, match="none: expected a shape that numpy has"):
        opened.tensor("none")


def test_reading_needs_neither_search_nor_torch(place: Path) -> None:
    """T21."""
    code = (
        "import sys; sys.modules.update(synth=None, ray=None, torch=None)\n"
        "import pipeline\n"
        "archive = pipeline.open(sys.argv[1])\n"
        "print(archive.tensor('a').shape, archive.open('notes/readme.txt').readline())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "(100, 64) b'plain text\\n'\n"


def test_the_snapshot_of_a_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = pipeline.open(str(place)).snapshot
    times = {1: "2026-11-28T03:00:00Z", 2: "2026-11-29T03:00:00Z", 3: "2026-11-30T03:00:00Z"}
    monkeypatch.setattr(archive_module, "checkpoints", lambda _: {"source": [1, 2, 3]})
    monkeypatch.setattr(archive_module, "load_snapshot", lambda _s, _c, seq: replace(only, seq=seq, time=times[seq]))
    for as_of, seq in (
        ("2026-11-29", 2), ("2026-11-29T03:00:00Z", 2), ("2026-11-29T02:59:59", 1), ("2026-12-24", 3),
        ("2026-11-29T04:30:00+02:00", 1), ("2026-11-30 03:00:00", 3),
    ):  # fmt: skip
        assert pipeline.open(str(place), as_of=as_of).snapshot.seq == seq, as_of
        assert pipeline.open(str(place), "source", as_of=as_of).snapshot.seq == seq
    with pytest.raises(ArchiveNotFoundError, match="2026-11-27T23:59:59Z or before"):
        pipeline.open(str(place), as_of="2026-11-27")
    for wrong in ("yesterday", "2026-13-01", ""):
        with pytest.raises(UsageError, match="YYYY-MM-DD"):
            latest_time(wrong)
    with pytest.raises(UsageError, match="--as-of"):
        pipeline.open(str(place), "source/2", as_of="2026-11-29")


def test_a_damaged_snapshot_fails_the_times_that_it_may_be_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = pipeline.open(str(place)).snapshot
    times = {1: "2026-11-28T03:00:00Z", 3: "2026-11-30T03:00:00Z", 5: "2026-12-02T03:00:00Z"}

    def load(_store: Any, _checkpoint: str, seq: int) -> Any:
        if seq not in times:
            raise DamageError("a snapshot", f"damage in {seq}", "here")
        return replace(only, seq=seq, time=times[seq])

    monkeypatch.setattr(archive_module, "checkpoints", lambda _: {"source": [0, 1, 2, 3, 4, 5]})
    monkeypatch.setattr(archive_module, "load_snapshot", load)
    assert pipeline.open(str(place), as_of="2026-12-02").snapshot.seq == 5
    for as_of, seq in (("2026-11-30", 4), ("2026-11-29", 2), ("2026-11-01", 0)):
        with pytest.raises(DamageError, match=f"damage in {seq}"):
            pipeline.open(str(place), as_of=as_of)


def test_a_snapshot_is_named_before_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints found by patterns have slashes in their names: one may be that of a snapshot of another."""
    for name, data in (("llama", b"this is A"), ("llama/1", b"this is B")):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / "f").write_bytes(data)
        assert main(["archive", str(tmp_path / "source"), str(tmp_path / "v"), "--name", name, "-q"]) == 0
    capsys.readouterr()
    opened = pipeline.open(str(tmp_path / "v"), "llama")
    for one in (opened, pickle.loads(pickle.dumps(opened)), pipeline.open(str(tmp_path / "v"), "llama/1")):
        assert (one.snapshot.name, one.open("f").read()) == ("llama/1", b"this is A")
    other = pipeline.open(str(tmp_path / "v"), "llama/1/1")
    assert pickle.loads(pickle.dumps(other)).open("f").read() == b"this is B"


def test_commands_take_a_time(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Long ago there was nothing; in the far future there is what there is now."""
    capsys.readouterr()
    for as_of, listed, code in (("2000-01-01", 0, 10), ("2999-12-31", 1, 0)):
        assert main(["list", str(place), "--as-of", as_of, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["snapshots"]) == listed
        assert main(["info", str(place), "--as-of", as_of, "-q"]) == code
        assert main(["cat", str(place), "--file", "empty", "--as-of", as_of]) == code
    assert main(["list", str(place), "--as-of", "soon", "-q"]) == 2


def test_weights_load_straight_from_a_bucket(tmp_path: Path, source: dict[str, bytes]) -> None:
    """U04: without a local copy, all of them or some names."""
    for key in ("part-1.safetensors", "part-2.safetensors"):
        (tmp_path / key).write_bytes(source[key])
    with s3_server() as server:
        url = server.url("vault")
        options = [word for name, value in server.options.items() for word in ("--storage-option", f"{name}={value}")]
        assert main(["archive", str(tmp_path), url, "--name", "model", *QUICK, *options]) == 0
        archive = pipeline.open(url, "model", server.options)
        found = archive.state_dict(["wide", "a", "part-2.safetensors:both"])
        assert [tensor.dtype for tensor in found.values()] == [torch.float32, torch.bfloat16, torch.uint8]
        assert found["wide"].numpy().tobytes() == noise(4, 66_600)
        assert found["a"].view(torch.uint8).numpy().tobytes() == bf16(1, 6400)
        assert archive.open("part-1.safetensors").read() == source["part-1.safetensors"]
