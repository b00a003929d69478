"""Memory stays bounded however large a checkpoint is."""

from __future__ import annotations

import pytest

from tests.bench.memory import table


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_workers_archive_and_restore_6_gb_within_2500_mib() -> None:
    assert [bar for bar, holds in table().passed.items() if not holds] == []
