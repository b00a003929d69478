"""Work that overlaps: the next item is made while the last one is used.

Kernels, digests, files and sockets release the interpreter, so that a thread is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Generator[Item]) -> Generator[Item]:
    """Yield `items`, each made in a thread while the caller works on the one before it.

    Parameters
    ----------
    items : generator
        It must leave an item alone until the one after the next is asked for. It is closed in the end.

    Raises
    ------
    BaseException
        Whatever `items` raises, in its turn.
    """
    end = object()
    with contextlib.closing(items), ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]
