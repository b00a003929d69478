"""Integer arithmetic that stays in the width of a word, and instructions that Python has no operator for.

numba widens every integer operation to 64 bits, so a loop over words of 8 or 16 bits uses a quarter or
less of each vector register. These stay narrow; without them splitting fields takes three times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import JIT

HAS_BIT_GATHER = False
"""Whether `gather_bits` and `scatter_bits` are fast here; otherwise kernels do without. Same bytes either way."""

if JIT:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.core.registry import cpu_target
    from numba.extending import intrinsic

    # What numba compiles for, which is the host unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise.
    _, _cpu, _features = cpu_target.target_context.codegen().magic_tuple()
    # The first two generations of Zen have the instructions, but take a hundred cycles for them.
    HAS_BIT_GATHER = "+bmi2" in _features.split(",") and _cpu not in ("znver1", "znver2")

    def _two_words(name: str) -> Any:
        @intrinsic
        def call(typing: Any, value: Any, mask: Any) -> Any:  # noqa: ARG001
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
                word = ir.IntType(64)
                kind = ir.FunctionType(word, (word, word))
                return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

            return types.uint64(types.uint64, types.uint64), codegen

        return call

    gather_bits = _two_words("llvm.x86.bmi.pext.64")
    scatter_bits = _two_words("llvm.x86.bmi.pdep.64")

    def _narrowed(builder: Any, amount: Any, word: Any) -> Any:
        return builder.trunc(amount, word.type) if word.type.width < amount.type.width else amount

    @intrinsic
    def down(typing: Any, word: Any, shift: Any) -> Any:  # noqa: ARG001
        """Return ``word >> shift``; `shift` is less than the width of the word."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return builder.lshr(args[0], _narrowed(builder, args[1], args[0]))

        return word(word, types.int64), codegen

    @intrinsic
    def up(typing: Any, word: Any, shift: Any) -> Any:  # noqa: ARG001
        """Return ``word << shift`` without the bits above the word; `shift` is less than its width."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return builder.shl(args[0], _narrowed(builder, args[1], args[0]))

        return word(word, types.int64), codegen

    @intrinsic
    def both(typing: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
        """Return ``a & b`` of two words of one width."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return builder.and_(args[0], args[1])

        return a(a, a), codegen

    @intrinsic
    def pick(typing: Any, condition: Any, yes: Any, no: Any) -> Any:  # noqa: ARG001
        """Return `yes` or `no`, without a branch that would be guessed wrong."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            picked = builder.select(*args)
            picked.set_metadata("unpredictable", builder.module.add_metadata([]))
            return picked

        return types.uint64(types.boolean, types.uint64, types.uint64), codegen

    @intrinsic
    def bit_length(typing: Any, value: Any) -> Any:  # noqa: ARG001
        """Return the bits of a non-negative integer without its leading zeros."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            word = args[0].type
            return builder.sub(word(64), builder.ctlz(args[0], ir.IntType(1)(0)))

        return types.int64(types.int64), codegen

else:

    def gather_bits(value: Any, mask: Any) -> Any:
        """Return the bits of `value` where `mask` has ones, side by side from bit 0."""
        places = [k for k in range(64) if int(mask) >> k & 1]
        return np.uint64(sum((int(value) >> k & 1) << i for i, k in enumerate(places)))

    def scatter_bits(value: Any, mask: Any) -> Any:
        """Inverse of `gather_bits`: bits from 0 on go where `mask` has ones."""
        places = [k for k in range(64) if int(mask) >> k & 1]
        return np.uint64(sum((int(value) >> i & 1) << k for i, k in enumerate(places)))

    def pick(condition: Any, yes: Any, no: Any) -> Any:
        """Return `yes` or `no`, without a branch that would be guessed wrong."""
        return yes if condition else no

    def bit_length(value: Any) -> int:
        """Return the bits of a non-negative integer without its leading zeros."""
        return int(value).bit_length()

    def down(word: Any, shift: Any) -> Any:
        """Return ``word >> shift``; `shift` is less than the width of the word."""
        return word >> word.dtype.type(shift)

    def up(word: Any, shift: Any) -> Any:
        """Return ``word << shift`` without the bits above the word; `shift` is less than its width."""
        return word << word.dtype.type(shift)

    def both(a: Any, b: Any) -> Any:
        """Return ``a & b`` of two words of one width."""
        return a & b
