"""The spool of a pack: a disk that fails is an error with a way out, and leaves nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from operators.errors import StoreError
from pipeline.executors import may_retry
from pipeline.packs import PackSpool


class Full:
    """A file on a disk that has room for `room_bytes` more."""

    def __init__(self, handle: int, room_bytes: int) -> None:
        self._handle, self._room_bytes = handle, room_bytes
        self._is_full = False

    def write(self, data: bytes) -> None:
        self._room_bytes -= len(data)
        self._is_full = self._is_full or self._room_bytes < 0
        self._check()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self._check()  # what is buffered is written once more, and fails once more

    def _check(self) -> None:
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def spool(folder: Path, record: bytes) -> None:
    with PackSpool(str(folder)) as pack:
        pack.add(record)
        pack.finish(b"index")


def test_a_missing_folder_may_be_there_later(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"run\.scratch_dir") as caught:
        spool(tmp_path / "none", b"1")
    assert str(tmp_path / "none") in str(caught.value)
    assert os.strerror(errno.ENOENT) in str(caught.value)
    assert may_retry(caught.value)


@pytest.mark.parametrize("room_bytes", [500, 1010])
def test_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """Full at the record, at the index."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", lambda handle, _mode: Full(handle, room_bytes))
        with pytest.raises(StoreError, match=r"run\.scratch_dir") as caught:
            spool(tmp_path, bytes(1000))
    assert os.strerror(errno.ENOSPC) in str(caught.value)
    assert may_retry(caught.value)
    assert list(tmp_path.iterdir()) == []
    spool(tmp_path, bytes(1000))
    assert list(tmp_path.iterdir()) == []
