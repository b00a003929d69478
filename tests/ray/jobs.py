"""Jobs that a worker can import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Square:
    def open(self) -> Callable[[int], int]:
        return lambda item: item * item
