"""One S3 server and one cluster of two nodes for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.cluster import Cluster, two_nodes
from tests.s3server import S3Server, s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="session")
def cluster(server: S3Server) -> Iterator[Cluster]:
    """Its nodes find the server, and its credentials, in their environment."""
    with two_nodes(server.env) as running:
        yield running
