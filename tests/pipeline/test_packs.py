"""The spool of a pack: a disk that fails is an error with a way out, and leaves nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from blake3 import blake3

from operators.books import Books
from operators.errors import StoreError, UnsupportedError
from operators.program import Literal, Node
from operators.record import pack_header
from operators.run import digest_of, encode, execute
from pipeline.executors import may_retry
from pipeline.packs import PackBooks, PackSpool, pack_key
from pipeline.rows import Row
from tests.cases import noise
from tests.memory_store import MemoryStore, bytes_of
from tests.strategies import BOOKS


def spool(folder: Path, *records: bytes) -> bytes:
    """Make a pack in memory for 1,500 bytes; return what it would be stored as."""
    with PackSpool(MemoryStore(), str(folder), np.empty(1500, np.uint8)) as pack:
        offsets = [pack.add(record)[0] for record in records]
        digest = pack.finish(b"index")
        data = bytes_of(pack.whole)
        assert digest == blake3(data).digest()
        assert len(data) == pack.n_bytes
        for offset, record in zip(offsets, records, strict=True):
            assert data[offset : offset + len(record)] == record
            assert pack.digests[offset] == blake3(record).digest()
        return data


def test_a_pack_does_not_depend_on_what_it_holds_in_memory(tmp_path: Path) -> None:
    records = [noise(i, n_bytes) for i, n_bytes in enumerate((700, 800, 1, 1500, 1499, 2, 3))]
    assert spool(tmp_path, *records)[len(pack_header()) :].startswith(b"".join(records))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n_records", [1, 2])
def test_a_pack_goes_to_a_file_only_where_it_outgrows_its_memory(tmp_path: Path, n_records: int) -> None:
    with PackSpool(MemoryStore(), str(tmp_path), np.empty(1500, np.uint8)) as pack:
        for _ in range(n_records):
            pack.add(noise(1, 800))
        pack.finish(b"index", b"books")
        assert isinstance(pack.whole, Path) == (n_records == 2)
        assert len(list(tmp_path.iterdir())) == n_records - 1
        assert bytes_of(pack.whole).count(noise(1, 800)) == n_records


@pytest.mark.parametrize("kept_bytes", [1 << 20, 500, 0])
def test_a_record_may_be_made_where_it_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """Whether it is moved or stays: it is held until the next flush, and gaps are not written."""
    monkeypatch.setattr("pipeline.packs.KEPT_BYTES", kept_bytes)
    sizes = (1000, 400, 900, 1, 500, 80)
    with PackSpool(MemoryStore(), str(tmp_path), np.empty(1500, np.uint8)) as pack:
        held: dict[int, memoryview] = {}
        pack.before_flush = held.clear
        for n_bytes in sizes:
            room = pack.room(n_bytes + 3)
            room[3 : 3 + n_bytes] = np.frombuffer(noise(n_bytes, n_bytes), np.uint8)
            _, held[n_bytes] = pack.add(room[3 : 3 + n_bytes].data)
            assert all(record == noise(size, size) for size, record in held.items())
        assert len(held) > 2
        pack.flush()
        assert not held
        whole = b"".join(noise(n_bytes, n_bytes) for n_bytes in sizes)
        assert bytes_of(pack.whole)[len(pack_header()) :] == whole
        offsets = [len(pack_header()) + sum(sizes[:i]) for i in range(len(sizes))]
        assert pack.digests == {at: blake3(noise(n, n)).digest() for at, n in zip(offsets, sizes, strict=True)}


def test_a_missing_folder_may_be_there_later(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"run\.scratch_dir") as caught:
        spool(tmp_path / "none", bytes(1500), b"1")
    assert str(tmp_path / "none") in str(caught.value)
    assert os.strerror(errno.ENOENT) in str(caught.value)
    assert may_retry(caught.value)


@pytest.mark.parametrize("room_bytes", [500, 1500])
def test_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """Full at the first record, at the second, which goes there with the index."""
    real, left_bytes = os.write, room_bytes

    def write(file: int, data: memoryview) -> int:
        nonlocal left_bytes
        if not left_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n_bytes = real(file, data[:left_bytes])  # as a disk does: what there is room for, then nothing
        left_bytes -= n_bytes
        return n_bytes

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(StoreError, match=r"run\.scratch_dir") as caught:
            spool(tmp_path, bytes(1000), bytes(501))
    assert os.strerror(errno.ENOSPC) in str(caught.value)
    assert may_retry(caught.value)
    assert list(tmp_path.iterdir()) == []
    spool(tmp_path, bytes(1000), bytes(501))
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_read_with_the_codebooks_of_its_pack(tmp_path: Path) -> None:
    store, words = MemoryStore(), np.arange(500, dtype=np.uint8) % np.uint8(4)
    book = next(book for book in BOOKS if book.width_bits == 8)
    encoded = encode(Node(Literal("fixed", (book.number, 0))), words, books=BOOKS)
    assert encoded is not None
    for index, books, found in ((b"index", BOOKS, 4), (bytes(9000), BOOKS, 4), (b"index", Books(), 0)):
        with PackSpool(store, str(tmp_path), np.empty(1500, np.uint8)) as pack:
            offset, _ = pack.add(encoded.record)
            digest = pack.finish(index, books.to_bytes())
            store.put(pack_key(digest), pack.whole)
            n_bytes = len(encoded.record)
            row = SimpleNamespace(
                program=str(encoded.program), pack=digest, pack_bytes=pack.n_bytes, pack_offset=offset,
                stored_bytes=n_bytes, n_bytes=500, digest=digest_of(words), where="here",
            )  # fmt: skip
        read = PackBooks(store).of(cast("Row", row))
        assert read is not None
        assert len(read) == found
        if found:
            assert execute(encoded.record, read).tobytes() == words.tobytes()
        else:
            with pytest.raises(UnsupportedError, match=f"number {book.number}"):
                execute(encoded.record, read)
    row.program = "raw"
    assert PackBooks(store).of(cast("Row", row)) is None
