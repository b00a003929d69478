"""The commit protocol against a real S3 server, behind a proxy that loses answers and fails requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from operators.errors import ConflictError
from pipeline.archive import checkpoints, find_snapshot, load_manifest
from pipeline.packs import pack_key
from pipeline.snapshots import Snapshot
from pipeline.store_s3 import S3Store
from tests.faultproxy import Fault, fault_proxy
from tests.pipeline.runs import OTHER_RECIPE, RECIPE, drive, source
from tests.radosgw import SERVERS, running
from tests.s3server import S3Server


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with running(request.param) as found:
        yield found


@pytest.fixture
def prefix(server: S3Server, tmp_path: Path) -> str:
    return f"{server.bucket}/{tmp_path.name}"


def check(store: S3Store) -> Snapshot:
    """Check that the one snapshot restores the source, and return it."""
    assert checkpoints(store) == {"model": [1]}
    snapshot, files = find_snapshot(store), dict.fromkeys(source().objects, b"")
    for row in load_manifest(store, snapshot):
        pack = store.get(pack_key(row.pack or b""), max_bytes=1 << 20)
        files[row.file] += pack[row.pack_offset or 0 :][: row.n_bytes]
    assert files == source().objects
    return snapshot


@pytest.mark.parametrize("action", ["drop-reply", "503 SlowDown", "409 ConditionalRequestConflict"])
@pytest.mark.parametrize("kind", ["FORMAT", "plan", "prior", "receipts", "packs", "manifests", "snapshots"])
def test_a_put_that_fails_once_is_no_matter(server: S3Server, prefix: str, kind: str, action: str) -> None:
    with fault_proxy(server.endpoint, [Fault(f"^PUT .*{kind}", action)]) as proxy:
        snapshot = drive(S3Store(prefix, server.options | {"endpoint_url": proxy.endpoint}), source())
    assert sum("PUT" in line and kind in line for line in proxy.requests) > 1  # the fault was met
    assert check(S3Store(prefix, server.options)) == snapshot


@pytest.mark.parametrize("recipe", [RECIPE, OTHER_RECIPE], ids=["twins", "rivals"])
def test_drivers_at_once(server: S3Server, prefix: str, recipe: str) -> None:
    outcomes: list[Snapshot | ConflictError] = []
    start = threading.Barrier(2)

    def run(recipe: str) -> None:
        store = S3Store(prefix, server.options)
        start.wait()
        try:
            outcomes.append(drive(store, source(), recipe))
        except ConflictError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in (RECIPE, recipe)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = S3Store(prefix, server.options)
    numbers = checkpoints(store)["model"]
    snapshots = [outcome for outcome in outcomes if isinstance(outcome, Snapshot)]
    assert len(outcomes) == 2
    assert {snapshot.seq for snapshot in snapshots} == set(numbers)
    if recipe == RECIPE:
        assert len(snapshots) == 2
        assert numbers == [1]
