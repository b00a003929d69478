"""Memory that is read into, on cache lines of its own and used again."""

from __future__ import annotations

from operators.words import LINE_BYTES, aligned


class Room:
    """Memory for what is read, used again once it is cleared: fresh memory costs more than to read into it.

    It holds as much as was asked for between two calls of `clear`, so that its owner decides how much that is.

    Parameters
    ----------
    n_bytes : int
        What will be asked for, where the owner knows: it need not grow then. It takes up what is written to, no more.
    """

    def __init__(self, n_bytes: int = 0) -> None:
        self._block = aligned(n_bytes).data
        self._used = 0

    def clear(self) -> None:
        """Give all of it back: what `take` returned must not be used any more."""
        if self._used > len(self._block):
            self._block = memoryview(b"")  # first, so that both are never there at once
            self._block = aligned(self._used + self._used // 8).data  # the next may be a little larger
        self._used = 0

    def take(self, n_bytes: int) -> memoryview:
        """Return `n_bytes` on a cache line of their own, to be written."""
        start = self._used
        self._used += -(-n_bytes // LINE_BYTES) * LINE_BYTES
        return self._block[start : start + n_bytes] if self._used <= len(self._block) else aligned(n_bytes).data


def taken(room: Room | None, n_bytes: int) -> memoryview:
    """Return a buffer of `n_bytes` from `room`, or a fresh one."""
    return aligned(n_bytes).data if room is None else room.take(n_bytes)
