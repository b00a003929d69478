"""The steps of `operators.kernels.tiles` with AVX2: 64 symbols of a column, eight lanes at a time.

A lane that is to take a word of the stream takes that of its rank among such lanes: a table has the order of the
words for each set of eight lanes. Source: Giesen, Interleaved entropy coders, 2014, section 5.

Everything here is compiled into a kernel and never called from Python; `operators.kernels.vectors.HAS_AVX2`
says whether it may be. The bytes are the same either way.
"""

# numba calls what lowers an instruction with arguments that most of them have no use for.
# ruff: noqa: ARG001
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from operators.kernels.jit import JIT

BITS = 12
"""Frequencies of a table add up to 2 to the power of this."""
LOWEST = 1 << 16
"""A state lies from here to 2**32; every lane ends here plus its seed."""
ESCAPED = 64
"""Bit of the entry of a slot whose symbol is an escape."""
put_vector: Any = None
take_vector: Any = None
_EIGHT, _LANES = 8, 64

if JIT:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from operators.kernels.tile_memory import data_of

    _BYTE, _DWORD, _QUAD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    _BYTES, _WORDS = ir.VectorType(_BYTE, _EIGHT), ir.VectorType(ir.IntType(16), _EIGHT)
    _DWORDS, _QUADS = ir.VectorType(_DWORD, _EIGHT), ir.VectorType(_QUAD, _EIGHT)
    _ENTRY = ir.VectorType(_QUAD, 2)

    def _ranks(chosen: int) -> list[int]:
        """Return for each of eight lanes its rank among the chosen ones; of the others any number from 0 to 7."""
        return [(chosen & ((1 << lane) - 1)).bit_count() for lane in range(_EIGHT)]

    def _last(chosen: int) -> list[int]:
        """Return the order of eight lanes that has the chosen ones last, in their own order."""
        lanes = [lane for lane in range(_EIGHT) if chosen >> lane & 1]
        return [0] * (_EIGHT - len(lanes)) + lanes

    def _orders(builder: Any, name: str, order_of: Callable[[int], Sequence[int]]) -> Any:
        """Return the address of the orders of lanes for each set of chosen ones."""
        kind = ir.ArrayType(_BYTES, 1 << _EIGHT)
        value = ir.Constant(kind, [ir.Constant(_BYTES, order_of(chosen)) for chosen in range(1 << _EIGHT)])
        return cgutils.global_constant(builder, name, value)

    def _ordered(builder: Any, orders: Any, chosen: Any, values: Any) -> Any:
        """Return eight values of 32 bits in the order for the chosen lanes."""
        at = builder.gep(orders, [_DWORD(0), builder.zext(chosen, _DWORD)])
        order = builder.zext(builder.load(at, align=1), _DWORDS)
        kind = ir.FunctionType(_DWORDS, (_DWORDS, _DWORDS))
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permd")
        return builder.call(permute, [values, order])

    def _bytes_of(builder: Any, chosen: Any) -> Any:
        """Return the bytes of the words of chosen lanes."""
        return builder.shl(builder.zext(builder.ctpop(chosen), _QUAD), _QUAD(1))

    def _all(kind: Any, number: int) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    def _arrays(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
        """Return where the arrays of a step begin, which stand in turn with its numbers."""
        return [data_of(context, builder, *each) for each in zip(signature.args[::2], args[::2], strict=True)]

    def _at(builder: Any, data: Any, byte: Any, kind: Any) -> Any:
        return builder.bitcast(builder.gep(data, [byte]), kind.as_pointer())

    def _states_at(builder: Any, states: Any, lane: Any, g: int) -> Any:
        return _at(builder, states, builder.shl(builder.add(lane, _QUAD(g)), _QUAD(2)), _DWORDS)

    def _gathered(builder: Any, table: Any, places: Any) -> Any:
        """Return eight numbers of 32 bits at places of a table."""
        kind = ir.FunctionType(_DWORDS, (_DWORDS, table.type, _DWORDS, _DWORDS, _BYTE))
        gather = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.gather.d.d.256")
        return builder.call(gather, [_all(_DWORDS, 0), table, places, _all(_DWORDS, 0xFFFFFFFF), _BYTE(4)])

    def _shuffled(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_DWORD, len(lanes)), list(lanes)))

    @intrinsic
    def take_vector(
        typing: Any, payload: Any, at: Any, entries: Any, first: Any, states: Any, lane: Any, scratch: Any, symbols: Any
    ) -> Any:
        """Decode the 64 symbols of a column; return the byte after the bits that came in, and 0 without escapes.

        128 bytes of the payload are there from `at` on; at most so many are looked at.
        """
        word = types.uint64

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            payload, entries, states, scratch = _arrays(context, builder, signature, args)
            at, first, lane, symbols = args[1::2]
            table = builder.gep(entries, [builder.shl(first, _QUAD(2))])
            orders = _orders(builder, "ranks", _ranks)
            all_entries = _all(_DWORDS, 0)
            for g in range(0, _LANES, _EIGHT):
                state_at = _states_at(builder, states, lane, g)
                x = builder.load(state_at, align=4)
                slots = builder.and_(x, _all(_DWORDS, (1 << BITS) - 1))
                entry = _gathered(builder, table, slots)
                all_entries = builder.or_(all_entries, entry)
                place = builder.and_(builder.lshr(entry, _all(_DWORDS, 8)), _all(_DWORDS, (1 << BITS) - 1))
                frequency = builder.lshr(entry, _all(_DWORDS, 20))
                x = builder.add(builder.mul(frequency, builder.lshr(x, _all(_DWORDS, BITS))), place)
                is_empty = builder.icmp_unsigned("<", x, _all(_DWORDS, LOWEST))
                chosen = builder.bitcast(is_empty, _BYTE)
                words = builder.zext(builder.load(_at(builder, payload, at, _WORDS), align=1), _DWORDS)
                refilled = builder.or_(builder.shl(x, _all(_DWORDS, 16)), _ordered(builder, orders, chosen, words))
                builder.store(builder.select(is_empty, refilled, x), state_at, align=4)
                symbol = builder.trunc(builder.and_(entry, _all(_DWORDS, 127)), _BYTES)
                builder.store(symbol, _at(builder, scratch, builder.add(symbols, _QUAD(g)), _BYTES), align=1)
                at = builder.add(at, _bytes_of(builder, chosen))
            escapes = builder.icmp_unsigned("!=", builder.and_(all_entries, _all(_DWORDS, ESCAPED)), _all(_DWORDS, 0))
            escaped = builder.zext(builder.bitcast(escapes, _BYTE), _QUAD)
            return context.make_tuple(builder, signature.return_type, (at, escaped))

        return types.UniTuple(word, 2)(payload, word, entries, word, states, word, scratch, types.int64), codegen

    @intrinsic
    def put_vector(
        typing: Any, scratch: Any, symbols: Any, entries: Any, first: Any, states: Any, lane: Any, stream: Any, at: Any
    ) -> Any:
        """Encode the 64 symbols of a column, the last first; return the byte where the stream starts.

        128 bytes of the stream are there below `at`, and may be written whether they are taken or not.
        """
        word = types.uint64

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            scratch, entries, states, stream = _arrays(context, builder, signature, args)
            symbols, first, lane, at = args[1::2]
            rows = builder.gep(entries, [builder.shl(first, _QUAD(3))])
            orders = _orders(builder, "last", _last)
            for g in range(_LANES - _EIGHT, -1, -_EIGHT):
                state_at = _states_at(builder, states, lane, g)
                x = builder.load(state_at, align=4)
                fours = []
                for start in (g, g + 4):
                    loaded = []
                    for i in range(start, start + 4):
                        symbol = builder.load(builder.gep(scratch, [builder.add(symbols, _QUAD(i))]))
                        byte = builder.shl(builder.zext(symbol, _QUAD), _QUAD(4))
                        loaded.append(builder.load(_at(builder, rows, byte, _ENTRY), align=8))
                    # Entries 0 and 2, 1 and 3 side by side: what is wanted of each is then interleaved in both halves.
                    even = _shuffled(builder, loaded[0], loaded[2], range(4))
                    odd = _shuffled(builder, loaded[1], loaded[3], range(4))
                    fours.append([_shuffled(builder, even, odd, (k, 4 + k, 2 + k, 6 + k)) for k in (0, 1)])
                reciprocals = _shuffled(builder, fours[0][0], fours[1][0], range(_EIGHT))
                of_rows = _shuffled(builder, fours[0][1], fours[1][1], range(_EIGHT))
                full_from = builder.trunc(of_rows, _DWORDS)
                sums = builder.trunc(builder.lshr(of_rows, _all(_QUADS, 32)), _DWORDS)
                is_full = builder.icmp_unsigned(">=", x, full_from)
                chosen = builder.bitcast(is_full, _BYTE)
                words = builder.trunc(_ordered(builder, orders, chosen, x), _WORDS)
                builder.store(words, _at(builder, stream, builder.sub(at, _QUAD(16)), _WORDS), align=1)
                at = builder.sub(at, _bytes_of(builder, chosen))
                x = builder.select(is_full, builder.lshr(x, _all(_DWORDS, 16)), x)
                product = builder.mul(builder.zext(x, _QUADS), reciprocals)
                q = builder.trunc(builder.lshr(product, _all(_QUADS, 32 + BITS)), _DWORDS)
                step = builder.mul(q, builder.lshr(sums, _all(_DWORDS, 16)))
                start = builder.and_(sums, _all(_DWORDS, 0xFFFF))
                builder.store(builder.add(builder.add(x, start), step), state_at, align=4)
            return at

        return word(scratch, types.int64, entries, word, states, word, stream, word), codegen
