"""What damaged and hostile bytes do to whatever reads them: ``python -m tests.fuzz [SECONDS [SEED [TARGET ...]]]``.

Run it with ``NUMBA_DISABLE_JIT=1``: compiled kernels read wherever an index points, interpreted ones raise.
The promise under test: whatever the bytes, a reader gives what the digests name or raises an `ArchiveError`; it never
raises anything else, never takes long, never allocates much.
"""
