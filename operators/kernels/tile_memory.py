"""Memory as tiles are read and written by portable kernels: squares of bytes transposed, lines fetched ahead.

A vector of 16 bytes is in every instruction set: the code is that of LLVM for it, no instruction is named here.
"""

from __future__ import annotations

from typing import Any

from operators.kernels.jit import JIT

SIDE = 16

if JIT:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    _BYTE, _LONG = ir.IntType(8), ir.IntType(64)
    _ROW = ir.VectorType(_BYTE, SIDE)
    _HALVES = [
        ir.VectorType(ir.IntType(32), SIDE)([x for i in range(half, half + 8) for x in (i, SIDE + i)])
        for half in (0, 8)
    ]

    def data_of(context: Any, builder: Any, kind: Any, array: Any) -> Any:
        """Return the address of the first byte of an array."""
        return builder.bitcast(context.make_array(kind)(context, builder, array).data, _BYTE.as_pointer())

    def _transposing(from_rows: bool) -> Any:
        @intrinsic
        def transpose(
            typing: Any, scratch: Any, rows: Any, step: Any, places: Any, first: Any, offset: Any  # noqa: ARG001
        ) -> Any:  # fmt: skip
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                scratch, rows, step, places, first, offset = args
                data = data_of(context, builder, signature.args[0], scratch)
                listed = context.make_array(signature.args[3])(context, builder, places).data

                def row(i: int) -> Any:
                    return builder.add(rows, builder.mul(step, _LONG(i)))

                def column(i: int) -> Any:
                    place = builder.load(builder.gep(listed, [builder.add(first, _LONG(i))]))
                    return builder.add(builder.sext(place, _LONG), offset)

                def pointer(at: Any) -> Any:
                    return builder.bitcast(builder.gep(data, [at]), _ROW.as_pointer())

                source, target = (row, column) if from_rows else (column, row)
                held = [builder.load(pointer(source(i)), align=1) for i in range(SIDE)]
                # Each round turns the eight bits of a byte's row and place by one: four exchange the two.
                for _ in range(4):
                    held = [builder.shuffle_vector(held[i], held[i + 8], half) for i in range(8) for half in _HALVES]
                for i, vector in enumerate(held):
                    builder.store(vector, pointer(target(i)), align=1)
                return context.get_dummy_value()

            numbers = types.int64
            return types.void(scratch, numbers, numbers, places, numbers, numbers), codegen

        return transpose

    def _fetching(to_write: bool) -> Any:
        @intrinsic
        def fetch(typing: Any, array: Any, offset: Any) -> Any:  # noqa: ARG001
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                pointer = builder.gep(data_of(context, builder, signature.args[0], args[0]), [args[1]])
                number = ir.IntType(32)
                kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
                function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
                builder.call(function, [pointer, number(int(to_write)), number(3), number(1)])
                return context.get_dummy_value()

            return types.void(array, types.int64), codegen

        return fetch

    # (scratch, rows, step, places, first, offset): rows start at byte `rows` of the scratch and are `step` apart;
    # column i lies at byte ``places[first + i] + offset``, where `places` is an int32 array.
    rows_to_columns, columns_to_rows = _transposing(True), _transposing(False)
    # (array, byte): the line of that byte, which need not be inside the array, is brought into the cache.
    fetch_to_read, fetch_to_write = _fetching(False), _fetching(True)
else:

    def rows_to_columns(scratch: Any, rows: Any, step: Any, places: Any, first: Any, offset: Any) -> None:
        """Transpose 16 rows of 16 bytes to columns."""
        for i in range(SIDE):
            place = int(places[first + i]) + offset
            assert 0 <= place <= scratch.size - SIDE, "store out of bounds"
            scratch[place : place + SIDE] = scratch[rows + i : rows + i + SIDE * step : step]

    def columns_to_rows(scratch: Any, rows: Any, step: Any, places: Any, first: Any, offset: Any) -> None:
        """Transpose 16 columns of 16 bytes to rows."""
        for i in range(SIDE):
            place = int(places[first + i]) + offset
            assert 0 <= place <= scratch.size - SIDE, "load out of bounds"
            scratch[rows + i : rows + i + SIDE * step : step] = scratch[place : place + SIDE]

    def fetch_to_read(array: Any, byte: Any) -> None:
        """Do nothing: what is fetched ahead changes no byte."""

    fetch_to_write = fetch_to_read
