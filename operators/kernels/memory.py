"""Unaligned little-endian loads, stores and copies at a byte offset of a uint8 array.

Compiled they are one instruction without a bounds check: the caller proves that the bytes are there.
Interpreted they check, so that a fuzzer without the JIT sees what the compiled code would read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from operators.kernels.jit import JIT


def _interpreted_load(n_bytes: int) -> Callable[[Any, Any], Any]:
    dtype = np.dtype(f"<u{n_bytes}").type

    def load(buffer: Any, offset: Any) -> Any:
        start = int(offset)
        assert 0 <= start <= buffer.size - n_bytes, "load out of bounds"
        return dtype(int.from_bytes(buffer[start : start + n_bytes].tobytes(), "little"))

    return load


def _interpreted_store(n_bytes: int) -> Callable[[Any, Any, Any], None]:
    def store(buffer: Any, offset: Any, value: Any) -> None:
        start = int(offset)
        assert 0 <= start <= buffer.size - n_bytes, "store out of bounds"
        data = int(value).to_bytes(n_bytes, "little")
        buffer[start : start + n_bytes] = np.frombuffer(data, np.uint8)

    return store


if JIT:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, bits: int) -> Any:
        data = context.make_array(array_type)(context, builder, array).data
        start = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [offset])
        return builder.bitcast(start, ir.IntType(bits).as_pointer())

    def _compiled_load(n_bytes: int) -> Any:
        bits = 8 * n_bytes

        @intrinsic
        def load(typing: Any, buffer: Any, offset: Any) -> Any:  # noqa: ARG001
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                pointer = _pointer(context, builder, signature.args[0], args[0], args[1], bits)
                return builder.load(pointer, align=1)

            return getattr(types, f"uint{bits}")(buffer, types.uint64), codegen

        return load

    def _compiled_store(n_bytes: int) -> Any:
        bits = 8 * n_bytes

        @intrinsic
        def store(typing: Any, buffer: Any, offset: Any, value: Any) -> Any:  # noqa: ARG001
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                pointer = _pointer(context, builder, signature.args[0], args[0], args[1], bits)
                builder.store(args[2], pointer, align=1)
                return context.get_dummy_value()

            return types.void(buffer, types.uint64, getattr(types, f"uint{bits}")), codegen

        return store

    @intrinsic
    def item_bytes(typing: Any, array: Any) -> Any:  # noqa: ARG001
        """Return the bytes of an item: a constant, where numba's `itemsize` is a number that code must branch on."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return context.get_constant(types.int64, signature.args[0].dtype.bitwidth // 8)

        return types.int64(array), codegen

    @intrinsic
    def copy_bytes(typing: Any, out: Any, to: Any, source: Any, start: Any, n_bytes: Any) -> Any:  # noqa: ARG001
        """Copy `n_bytes` from byte `start` of `source` to byte `to` of `out`; the arrays do not overlap."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target = _pointer(context, builder, signature.args[0], args[0], args[1], 8)
            origin = _pointer(context, builder, signature.args[2], args[2], args[3], 8)
            cgutils.raw_memcpy(builder, target, origin, args[4], 1)
            return context.get_dummy_value()

        return types.void(out, types.int64, source, types.int64, types.int64), codegen

    @intrinsic
    def fetch(typing: Any, array: Any, offset: Any) -> Any:  # noqa: ARG001
        """Ask for the cache line at byte `offset` of `array`, or anywhere: nothing is read."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place, number = _pointer(context, builder, signature.args[0], args[0], args[1], 8), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
            ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(ask, [place, number(0), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(array, types.int64), codegen

    load_u16, load_u64 = _compiled_load(2), _compiled_load(8)
    store_u16, store_u64 = _compiled_store(2), _compiled_store(8)
else:

    def item_bytes(array: Any) -> int:
        """Return the bytes of an item."""
        return int(array.itemsize)

    def copy_bytes(out: Any, to: Any, source: Any, start: Any, n_bytes: Any) -> None:
        """Copy `n_bytes` from byte `start` of `source` to byte `to` of `out`; the arrays do not overlap."""
        assert 0 <= start <= source.size - n_bytes, "copy out of bounds"
        assert 0 <= to <= out.size - n_bytes, "copy out of bounds"
        out[to : to + n_bytes] = source[start : start + n_bytes]

    def fetch(array: Any, offset: Any) -> None:
        """Ask for the cache line at byte `offset` of `array`, or anywhere: nothing is read."""

    load_u16, load_u64 = _interpreted_load(2), _interpreted_load(8)
    store_u16, store_u64 = _interpreted_store(2), _interpreted_store(8)
