"""Restoring one tensor from files whose headers lie: refused at once, and nothing appears."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from operators.errors import FormatError
from pipeline import restore
from pipeline.archive import find_snapshot, load_manifest
from pipeline.cli import main
from pipeline.locations import open_source, open_store
from pipeline.reading import ArchivedFile, Decoder, Tensors, archived_files, read_header
from pipeline.restore import write_tensor
from pipeline.rows import Row
from pipeline.store import SourceStore
from tests.cases import safetensors

DATA = bytes(range(200)) * 20


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceStore, ArchivedFile]:
    folder = tmp_path_factory.mktemp("restore")
    (folder / "source").mkdir()
    (folder / "source" / "a.safetensors").write_bytes(safetensors([("a", "U8", [4000], DATA)]))
    url = str(folder / "archive")
    assert main(["archive", str(folder / "source"), url, "--workers", "1", "-q", "--set", "synth.budget=8"]) == 0
    archive = open_source(url)
    snapshot = find_snapshot(archive)
    return archive, archived_files(snapshot, load_manifest(archive, snapshot))[0]


class Parts(Decoder):
    """Gives the parts of a file as its segments, and counts those that are asked for."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.asked = 0

    def segments(self, rows: object) -> Iterator[tuple[Row, memoryview]]:
        self.asked += 1
        yield None, memoryview(self.parts[self.asked - 1])  # type: ignore[misc]


@pytest.mark.parametrize("header_bytes", [4000 + 9000, (256 << 20) + 1, 1 << 40, (1 << 64) - 1])
def test_a_header_beyond_its_file_or_any_header_is_refused_at_once(
    stored: tuple[SourceStore, ArchivedFile], header_bytes: int
) -> None:
    _, item = stored
    file = replace(item if header_bytes < 1 << 20 else replace_size(item, 1 << 39), rows=tuple(item.rows) * 10)
    decoder = Parts(header_bytes.to_bytes(8, "little"), *[bytes(1000)] * 20)
    with pytest.raises(FormatError, match="a header that ends at"):
        read_header(decoder, file)
    assert decoder.asked == 1


def test_a_length_in_two_segments_is_read_whole(stored: tuple[SourceStore, ArchivedFile]) -> None:
    length = (512).to_bytes(8, "little")
    decoder = Parts(length[:1], length[1:3], length[3:], bytes(600))  # one byte alone says a header of nothing
    assert read_header(decoder, replace(stored[1], rows=tuple(stored[1].rows) * 2)) == length + bytes(512)


def replace_size(item: ArchivedFile, n_bytes: int) -> ArchivedFile:
    return replace(item, entry=replace(item.entry, n_bytes=n_bytes))


def test_a_tensor_beyond_its_file_is_refused(stored: tuple[SourceStore, ArchivedFile]) -> None:
    archive, item = stored
    assert Tensors(archive, [item]).find("a").tensor.end == item.n_bytes
    with pytest.raises(FormatError, match="a tensor that ends at"):
        Tensors(archive, [replace_size(item, item.n_bytes - 1)]).find("a")


def test_a_tensor_that_is_not_all_there_never_appears(
    stored: tuple[SourceStore, ArchivedFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, item = stored
    found = Tensors(archive, [item]).find("a")
    target = open_store(str(tmp_path / "out"), {})
    for parts in ([DATA[:-1]], [DATA, b"x"], []):
        monkeypatch.setattr(restore, "tensor_bytes", lambda *_, parts=parts: iter(parts))
        with pytest.raises(FormatError, match="4000 bytes of a tensor"):
            write_tensor(archive, target, "a.safetensors", found, overwrite=False)
        assert not (tmp_path / "out" / "a.safetensors").exists()
    monkeypatch.undo()
    assert write_tensor(archive, target, "a.safetensors", found, overwrite=False) == 4000
    assert (tmp_path / "out" / "a.safetensors").read_bytes().endswith(DATA)
