"""The one decorator that every kernel uses.

``@kernel("out")`` compiles a function on its first call: without the GIL, cached on disk
(`operators.kernels.cache`), integer semantics as written (no fast-math, numpy's error model). The
arguments named are the arrays that the kernel writes; every other array is declared read-only, so
that writable and read-only arrays of one dtype share one specialisation.

With ``NUMBA_DISABLE_JIT=1`` the same functions run as Python and give the same bytes. Two rules keep
that true: scalars that mix with uint64 are wrapped in ``np.uint64`` on both sides of every operator,
and memory beyond plain indexing goes through `operators.kernels.memory`.

Kernels see contiguous arrays and Python integers, trust their callers for sizes and alignment (numba does
not look at the latter), and never raise: those that read foreign bytes return a status.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import types
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from operators.kernels.cache import KernelCache
from operators.kernels.parts import LINKED, Part

F = TypeVar("F", bound=Callable[..., Any])
JIT = not config.DISABLE_JIT
"""Whether kernels are compiled in this process."""


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A dispatcher that declares the arrays it does not write read-only."""

    written: frozenset[str] = frozenset()
    part: Part | None = None
    _known: set[tuple[Any, ...]]

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return how another kernel calls this one, which becomes a part of it."""
        return super().get_call_template(args, kws) if self.part is None else self.part.get_call_template(args, kws)

    def get_overload(self, sig: Any) -> Any:
        """Return that by which numba finds the code for such a call."""
        return super().get_overload(sig) if self.part is None else self.part.get_overload(sig)

    def declared(self, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the types that arguments of types `kinds` are compiled for."""
        names = self._compiler.pysig.parameters
        return tuple(_declared(kind, name in self.written) for kind, name in zip(kinds, names, strict=True))

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        """Compile, load or look up the entry for `args`: called by numba when it has none for their types."""
        assert not kws, "kernels take positional arguments"
        self._compilation_chain_init_hook()
        actual = tuple(self.typeof_pyval(arg) for arg in args)
        self._types_active_call.clear()
        declared = self.declared(actual)
        with global_compiler_lock:
            entry = self.compile(declared)
            self._known.add(declared)
            if actual not in self._known:
                # The same machine code under the types of this call, so that the next finds it at once.
                self._known.add(actual)
                self._insert([kind._code for kind in actual], entry, False)  # noqa: SLF001
        return entry


def _declared(kind: Any, written: bool) -> Any:
    if not isinstance(kind, types.Array):
        return kind
    if kind.layout != "C" or (written and not kind.mutable):
        raise TypeError(f"kernels take contiguous arrays, writable where they are written, not {kind}")
    return kind.copy(readonly=not written)


def kernel(*written: str) -> Callable[[F], F]:
    """Return a decorator that compiles a function.

    Parameters
    ----------
    *written : str
        Names of the array arguments that the function writes.
    """

    def decorate(function: F) -> F:
        names = inspect.signature(function).parameters
        if not set(written) <= set(names):
            raise TypeError(f"{function.__name__} has no argument {set(written) - set(names)}")
        if not JIT:
            return _interpreted(function)
        options = {
            "nopython": True,
            "nogil": True,
            "error_model": "numpy",
            "boundscheck": False,
            "no_cfunc_wrapper": True,
        }
        dispatcher = Kernel(function, targetoptions=options)
        dispatcher.written = frozenset(written)
        dispatcher.part = Part(function, options, dispatcher.declared) if LINKED else None
        dispatcher._known = set()  # noqa: SLF001
        dispatcher._cache = KernelCache(function)  # noqa: SLF001
        return dispatcher

    return decorate


def inlined(function: F) -> F:
    """Decorate a part of a kernel: compiled into each kernel that calls it, never called from Python."""
    if not JIT:
        return function
    options = {"nopython": True, "nogil": True, "error_model": "numpy", "forceinline": True}
    compiled: F = Part(function, options) if LINKED else CPUDispatcher(function, targetoptions=options)
    return compiled


def _interpreted(function: F) -> F:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with np.errstate(over="ignore"):
            return function(*args)

    return run  # type: ignore[return-value]
