"""Compiled kernels: the only place that imports numba.

Every kernel takes the caller's buffers, never writes an input, holds no global state and releases
the GIL. With ``NUMBA_DISABLE_JIT=1`` the same functions run as plain Python and give the same bytes.
"""
