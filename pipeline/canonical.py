"""Canonical JSON: one spelling for each value, so that digests of values are stable."""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3


def canonical_json(value: Any) -> bytes:
    """Return `value` as JSON with sorted keys and no white space, in ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of_json(value: Any) -> str:
    """Return the digest of the canonical JSON of `value`."""
    return blake3(canonical_json(value)).hexdigest()
