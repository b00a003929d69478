"""Functions as other kernels call them: compiled as far as those need, which is not to the end.

numba makes machine code of each function that a compiled one calls, though that takes the function in and optimises it
again, as does its own caller: at every level of calls, all that lies below. Here such a function ends as code to link.
It takes a quarter off the time that kernels compile, and changes nothing in them.

This leans on the inside of one version of numba, `NUMBA`; with any other one functions are compiled as it does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
from numba.core import compiler
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

NUMBA: Final = "0.68.1"
"""The version that is known inside: the one that `constraints.txt` pins."""
LINKED: Final = numba.__version__ == NUMBA
"""Whether parts are linked only."""

Types = tuple[Any, ...]


class PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code that is only linked into other code: it is optimised there, and no machine code is made of it here."""

    def finalize(self) -> None:
        """Link what this code calls."""
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)  # noqa: SLF001
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)  # noqa: SLF001
        self._finalized = True


class Part(CPUDispatcher):  # type: ignore[misc]
    """What a function is where kernels call it.

    Parameters
    ----------
    function : callable
    options : dict
        Of numba, as for ``numba.njit``.
    declare : callable, optional
        Returns the types that arguments are compiled for; as they come by default.
    """

    def __init__(
        self, function: Callable[..., Any], options: dict[str, Any], declare: Callable[[Types], Types] | None = None
    ) -> None:
        super().__init__(function, targetoptions=options)
        self._declare = declare

    def get_call_template(self, args: Types, kws: dict[str, Any]) -> Any:
        """Return how to call the function with `args`, as numba asks for it; compile it where it has not been."""
        if self._declare is not None and not kws:
            args = self._declare(args)
        return super().get_call_template(args, kws)

    def compile(self, sig: Any) -> Any:
        """Compile the function as far as those that call it need."""
        args = tuple(sig)
        with global_compiler_lock:
            if args not in self.overloads:
                flags = compiler.Flags()
                self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
                flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
                library = PartLibrary(self.targetctx.codegen(), self.py_func.__qualname__)
                result = compiler.compile_extra(
                    self.typingctx, self.targetctx, self.py_func, args, None, flags, {}, library=library
                )
                entry = object()  # by which numba finds the code to link
                self.targetctx.insert_user_function(entry, result.fndesc, [library])
                self.overloads[args] = result._replace(entry_point=entry)
        return self.overloads[args].entry_point
