"""Digests of canonical JSON: one spelling for each value, so that digests of values are stable."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from configs.loader import canonical_json


def digest_of_json(value: Any) -> str:
    """Return the digest of the canonical JSON of `value`."""
    return blake3(canonical_json(value)).hexdigest()
