"""What holds in an archive at every instant, whatever happened to those who wrote it (`pipeline/ARCHIVE.md`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from blake3 import blake3

from pipeline import commit
from pipeline.archive import checkpoints, load_manifest, load_snapshot, manifest_key, pack_sizes
from pipeline.packs import pack_key
from pipeline.parquet import from_parquet
from pipeline.reading import Decoder, check_files
from pipeline.snapshots import Snapshot
from pipeline.store import SourceStore, Store
from pipeline.store_base import PROBE_KEY
from pipeline.verify import Verifier, pack_items

ANY_BYTES = 1 << 30


class Watched:
    """An archive that is looked at again and again.

    Parameters
    ----------
    store : SourceStore
        The archive, at rest while it is looked at.
    """

    def __init__(self, store: SourceStore) -> None:
        self._store = store
        self._seen: dict[str, bytes] = {}

    def check(self, *sources: Mapping[str, bytes]) -> list[Snapshot]:
        """Check everything that is stored, and that each snapshot restores one of `sources`.

        Parameters
        ----------
        *sources : mapping of str to bytes
            What the source held, at any time. A file that a snapshot names as a failure need not be in it.

        Returns
        -------
        list of Snapshot
            In the order of their names and numbers.
        """
        found = {info.key: self._store.get(info.key, max_bytes=ANY_BYTES) for info in self._store.list()}
        for key, data in found.items():
            if key != PROBE_KEY:
                assert self._seen.setdefault(key, data) == data, f"{key} was modified"
            _check_name(key, data)
            if "/receipts/" in key:
                for pack, n_bytes in pack_sizes(from_parquet(data)).items():
                    assert len(found[pack_key(pack)]) == n_bytes, f"{key} refers to a pack that is not there"
        snapshots = [
            load_snapshot(self._store, checkpoint, seq)
            for checkpoint, numbers in checkpoints(self._store).items()
            for seq in numbers
        ]
        for snapshot in snapshots:
            assert manifest_key(snapshot.manifest) in found, f"{snapshot.name} refers to a manifest that is not there"
            self._check_restores(snapshot, sources)
        return snapshots

    def _check_restores(self, snapshot: Snapshot, sources: Sequence[Mapping[str, bytes]]) -> None:
        rows = load_manifest(self._store, snapshot)
        check_files(snapshot, rows)
        verifier = Verifier(self._store, decode=True)
        assert [failure for item in pack_items(rows, None, whole=True) for failure in verifier(item).failures] == []
        files = dict.fromkeys((entry.key for entry in snapshot.files), b"")
        for row, data in Decoder(self._store).segments(rows):
            files[row.file] += data
        failed = {finding.key for finding in snapshot.failures}
        assert files in [{key: data for key, data in source.items() if key not in failed} for source in sources], (
            f"{snapshot.name} mixes states of its source"
        )


def _check_name(key: str, data: bytes) -> None:
    """Check that what is named by its content has that content."""
    kind, _, name = key.partition("/")
    digest = blake3(data).hexdigest()
    if kind == "packs":
        assert name == f"{digest[:2]}/{digest}", f"{key} has other bytes"
    elif kind == "manifests":
        assert name == f"{digest}.parquet", f"{key} has other bytes"


def publish_before_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: a commit puts its snapshot before the manifest that this names."""
    held: list[tuple[Any, ...]] = []
    publish, put_manifest = commit._publish, commit._put_manifest
    monkeypatch.setattr(commit, "_put_manifest", lambda *args: held.append(args))

    def publish_first(store: Store, snapshot: Snapshot) -> Snapshot:
        stored = publish(store, snapshot)
        put_manifest(*held.pop())
        return stored

    monkeypatch.setattr(commit, "_publish", publish_first)
