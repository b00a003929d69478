"""Vectors of 512 bits as values of a kernel, and the instructions of AVX-512 that kernels need.

A kernel that is written for the plain instruction set leaves speed behind where the instruction that it
needs has no counterpart in Python: a permutation of bytes, a compression of words. Here a vector is a type
of numba whose value is an LLVM vector; it takes Python's operators, lane by lane and modulo the width of a
lane, and every function below is one instruction, or a few. Memory is reached by address, without checks:
the caller proves that the bytes are there.

========  ==================================  =======================
type      lanes                               comparisons give
========  ==================================  =======================
`BYTES`   64 of 8 bits                        `BYTE_MASK`
`WORDS`   32 of 16 bits                       `WORD_MASK`
`DWORDS`  16 of 32 bits
`QUADS`   8 of 64 bits
========  ==================================  =======================

Everything here is compiled into a kernel and never called from Python; `HAS_AVX512` says whether it may be.
"""

# numba calls what lowers an instruction with arguments that most of them have no use for.
# ruff: noqa: ARG001, ARG005
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from operators.kernels.jit import JIT

_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "bmi2")
# What numba compiles for, which is the host unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise.
_features = set(cpu_target.target_context.codegen().magic_tuple()[2].split(",")) if JIT else set()
HAS_AVX512: bool = all(f"+{name}" in _features for name in _NEEDED)
"""Whether kernels are compiled here, for a processor that has these instructions."""
HAS_AVX2: bool = "+avx2" in _features
"""The same of those that `operators.kernels.rans_avx2` needs."""


class Vector(types.Type):  # type: ignore[misc]
    """The type of a vector of `lanes` integers of `bits`."""

    def __init__(self, bits: int, lanes: int) -> None:
        self.bits, self.lanes = bits, lanes
        self.ir = ir.VectorType(ir.IntType(bits), lanes)
        super().__init__(name=f"Vector({bits}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.ir)


BYTES, WORDS, DWORDS, QUADS = Vector(8, 64), Vector(16, 32), Vector(32, 16), Vector(64, 8)
BYTE_MASK, WORD_MASK = Vector(1, 64), Vector(1, 32)

_ARITHMETIC = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.and_: "and_",
    operator.or_: "or_",
    operator.xor: "xor",
    operator.lshift: "shl",
    operator.rshift: "lshr",
    operator.iadd: "add",
    operator.isub: "sub",
    operator.iand: "and_",
    operator.ior: "or_",
    operator.ixor: "xor",
}
_COMPARISONS = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "=="}


def _register(key: Callable[..., Any], cases: Sequence[Any], emit: Callable[[Any, Any, Any], Any]) -> None:
    infer_global(key)(type("_Template", (ConcreteTemplate,), {"key": key, "cases": list(cases)}))

    @lower_builtin(key, Vector, Vector)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit(builder, *args)


def _arithmetic(name: str) -> Any:
    return lambda builder, a, b: getattr(builder, name)(a, b)


def _comparison(name: str) -> Any:
    return lambda builder, a, b: builder.icmp_unsigned(name, a, b)


for _key, _name in _ARITHMETIC.items():
    _register(_key, [signature(kind, kind, kind) for kind in (BYTES, WORDS, DWORDS, QUADS)], _arithmetic(_name))
for _key, _name in _COMPARISONS.items():
    _register(_key, [signature(BYTE_MASK, BYTES, BYTES), signature(WORD_MASK, WORDS, WORDS)], _comparison(_name))


def _value(kind: Any) -> Any:
    """Return the LLVM type of a vector or an unsigned integer of numba."""
    return kind.ir if isinstance(kind, Vector) else ir.IntType(kind.bitwidth)


def _define(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
    """Return an intrinsic of up to three arguments whose code is ``emit(builder, *args)``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        made = emit(builder, *args)
        return context.get_dummy_value() if result is types.void else made

    sig = result(*arguments)
    if len(arguments) == 1:
        return intrinsic(lambda typing, a: (sig, codegen))
    if len(arguments) == 2:
        return intrinsic(lambda typing, a, b: (sig, codegen))
    return intrinsic(lambda typing, a, b, c: (sig, codegen))


def _instruction(name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Return an intrinsic that calls the LLVM function of that name."""
    kind = ir.FunctionType(_value(result), [_value(argument) for argument in arguments])

    def emit(builder: Any, *args: Any) -> Any:
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return _define(result, arguments, emit)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(kind: Any) -> Any:
    return _define(
        kind, [types.int64], lambda builder, address: builder.load(_at(builder, address, _value(kind)), align=1)
    )


def _store(kind: Any) -> Any:
    def emit(builder: Any, address: Any, value: Any) -> None:
        builder.store(value, _at(builder, address, _value(kind)), align=1)

    return _define(types.void, [types.int64, kind], emit)


def _load_some(kind: Vector, mask: Vector) -> Any:
    def emit(builder: Any, picked: Any, address: Any) -> Any:
        pointer = _at(builder, address, kind.ir)
        kinds = [pointer.type, ir.IntType(32), mask.ir, kind.ir]
        name = f"llvm.masked.load.v{kind.lanes}i{kind.bits}.p0"
        load = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind.ir, kinds), name)
        return builder.call(load, [pointer, ir.IntType(32)(1), picked, kind.ir([0] * kind.lanes)])

    return _define(kind, [mask, types.int64], emit)


def _store_some(kind: Vector, mask: Vector) -> Any:
    def emit(builder: Any, picked: Any, address: Any, value: Any) -> None:
        pointer = _at(builder, address, kind.ir)
        kinds = [kind.ir, pointer.type, ir.IntType(32), mask.ir]
        name = f"llvm.masked.store.v{kind.lanes}i{kind.bits}.p0"
        store = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        builder.call(store, [value, pointer, ir.IntType(32)(1), picked])

    return _define(types.void, [mask, types.int64, kind], emit)


def _splat(kind: Vector) -> Any:
    lane = ir.IntType(kind.bits)
    firsts = ir.VectorType(ir.IntType(32), kind.lanes)([0] * kind.lanes)

    @intrinsic
    def fill(typing: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            wide = args[0].type.width
            scalar = builder.trunc(args[0], lane) if wide > kind.bits else builder.zext(args[0], lane)
            first = builder.insert_element(kind.ir(ir.Undefined), scalar, ir.IntType(32)(0))
            return builder.shuffle_vector(first, kind.ir(ir.Undefined), firsts)

        return kind(value), codegen

    return fill


def _cast(kind: Vector, to: Vector) -> Any:
    return _define(to, [kind], lambda builder, value: builder.bitcast(value, to.ir))


def _shuffle(kind: Vector, places: Sequence[int]) -> Any:
    mask = ir.VectorType(ir.IntType(32), len(places))(list(places))
    return _define(kind, [kind, kind], lambda builder, a, b: builder.shuffle_vector(a, b, mask))


def _choose(kind: Vector, mask: Vector) -> Any:
    return _define(kind, [mask, kind, kind], lambda builder, picked, a, b: builder.select(picked, a, b))


def _mask_of(mask: Vector) -> Any:
    def emit(builder: Any, bits: Any) -> Any:
        narrow = bits if mask.lanes == 64 else builder.trunc(bits, ir.IntType(mask.lanes))
        return builder.bitcast(narrow, mask.ir)

    return _define(mask, [types.uint64], emit)


def _bits_of(mask: Vector) -> Any:
    def emit(builder: Any, picked: Any) -> Any:
        bits = builder.bitcast(picked, ir.IntType(mask.lanes))
        return bits if mask.lanes == 64 else builder.zext(bits, ir.IntType(64))

    return _define(types.uint64, [mask], emit)


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """Return the address of the first byte of an array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


@intrinsic
def item_bytes(typing: Any, array: Any) -> Any:
    """Return the bytes of an item of an array, as a constant."""
    n_bytes = array.dtype.bitwidth // 8
    return types.int64(array), lambda context, builder, sig, args: ir.IntType(64)(n_bytes)


def _prefetch(to_write: bool) -> Any:
    def emit(builder: Any, address: Any) -> None:
        pointer, number = _at(builder, address, ir.IntType(8)), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [pointer, number(int(to_write)), number(2), number(1)])

    return _define(types.void, [types.int64], emit)


# The line of an address, any address, is brought into the second level of the cache.
fetch_to_read, fetch_to_write = _prefetch(False), _prefetch(True)
load_bytes, load_words = _load(BYTES), _load(WORDS)
store_bytes, store_words = _store(BYTES), _store(WORDS)
load_byte, load_word, load_dword = _load(types.uint8), _load(types.uint16), _load(types.uint32)
store_byte, store_word = _store(types.uint8), _store(types.uint16)
# Lanes that the mask leaves out are not touched in memory, and loaded as zeros.
load_some_bytes, load_some_words = _load_some(BYTES, BYTE_MASK), _load_some(WORDS, WORD_MASK)
store_some_bytes, store_some_words = _store_some(BYTES, BYTE_MASK), _store_some(WORDS, WORD_MASK)
byte_mask, word_mask, bits_of_bytes, bits_of_words = (
    _mask_of(BYTE_MASK),
    _mask_of(WORD_MASK),
    _bits_of(BYTE_MASK),
    _bits_of(WORD_MASK),
)
# All lanes alike: the low bits of an integer.
all_bytes, all_words, all_dwords, all_quads = _splat(BYTES), _splat(WORDS), _splat(DWORDS), _splat(QUADS)
choose_bytes, choose_words = _choose(BYTES, BYTE_MASK), _choose(WORDS, WORD_MASK)
bytes_as_words, words_as_bytes = _cast(BYTES, WORDS), _cast(WORDS, BYTES)
words_as_quads, quads_as_dwords = _cast(WORDS, QUADS), _cast(QUADS, DWORDS)

least_bytes = _instruction("llvm.umin.v64i8", BYTES, [BYTES, BYTES])
least_words = _instruction("llvm.umin.v32i16", WORDS, [WORDS, WORDS])
high_product = _instruction("llvm.x86.avx512.pmulhu.w.512", WORDS, [WORDS, WORDS])
# (a, b, n): the high words of (a << 16 | b) << n.
shift_pair = _instruction("llvm.fshl.v32i16", WORDS, [WORDS, WORDS, WORDS])
# (table, places): 64 entries; (first half, places, second half): twice as many as a vector has.
pick_byte = _instruction("llvm.x86.avx512.permvar.qi.512", BYTES, [BYTES, BYTES])
pick_byte_of_two = _instruction("llvm.x86.avx512.vpermi2var.qi.512", BYTES, [BYTES, BYTES, BYTES])
# (vector, others, mask): the lanes of the mask moved to the front; the first lanes moved to those of the mask.
compress_words = _instruction("llvm.x86.avx512.mask.compress.v32i16", WORDS, [WORDS, WORDS, WORD_MASK])
expand_words = _instruction("llvm.x86.avx512.mask.expand.v32i16", WORDS, [WORDS, WORDS, WORD_MASK])
count_bits = _instruction("llvm.ctpop.i64", types.uint64, [types.uint64])
count_trailing_zeros = _define(types.uint64, [types.uint64], lambda b, value: b.cttz(value, ir.IntType(1)(0)))
count_leading_zeros = _define(types.uint64, [types.uint64], lambda b, value: b.ctlz(value, ir.IntType(1)(0)))

# The halves of a 128-bit part of two vectors in turn, and the way back: what packs and unpacks within parts.
_PARTS = range(4)
unpack_low_words = _shuffle(WORDS, [x for q in _PARTS for i in range(4) for x in (8 * q + i, 32 + 8 * q + i)])
unpack_high_words = _shuffle(WORDS, [x for q in _PARTS for i in range(4, 8) for x in (8 * q + i, 32 + 8 * q + i)])
odd_of_second = _shuffle(DWORDS, [i + 16 * (i & 1) for i in range(16)])
# Bytes and words that fit in half a lane.
pack_words = _instruction("llvm.x86.avx512.packuswb.512", BYTES, [WORDS, WORDS])
pack_dwords = _instruction("llvm.x86.avx512.packusdw.512", WORDS, [DWORDS, DWORDS])
# 16 states of 32 bits in two vectors each, and their low and high halves.
even_words, odd_words = _shuffle(WORDS, range(0, 64, 2)), _shuffle(WORDS, range(1, 64, 2))
interleave_first = _shuffle(WORDS, [i // 2 + 32 * (i & 1) for i in range(32)])
interleave_last = _shuffle(WORDS, [16 + i // 2 + 32 * (i & 1) for i in range(32)])


def _join(first: int) -> Any:
    lanes = [x for q in _PARTS for i in range(first, first + 8) for x in (16 * q + i, 64 + 16 * q + i)]
    mask = ir.VectorType(ir.IntType(32), 64)(lanes)
    return _define(WORDS, [BYTES, BYTES], lambda b, low, high: b.bitcast(b.shuffle_vector(low, high, mask), WORDS.ir))


def _widen(first: int) -> Any:
    lanes = [x for q in _PARTS for i in range(first, first + 8) for x in (16 * q + i, 64)]
    mask, zeros = ir.VectorType(ir.IntType(32), 64)(lanes), BYTES.ir([0] * 64)
    return _define(WORDS, [BYTES], lambda b, value: b.bitcast(b.shuffle_vector(value, zeros, mask), WORDS.ir))


# Words of low and high bytes, or of the bytes of a vector: in turns of 8 lanes, as `pack_words` packs them.
join_low, join_high = _join(0), _join(8)
widen_low, widen_high = _widen(0), _widen(8)


def _reorder(places: Sequence[int]) -> Any:
    mask = ir.VectorType(ir.IntType(32), 8)(list(places))

    def emit(builder: Any, value: Any) -> Any:
        quads = builder.bitcast(value, QUADS.ir)
        return builder.bitcast(builder.shuffle_vector(quads, quads, mask), BYTES.ir)

    return _define(BYTES, [BYTES], emit)


# From the order of `pack_words` to the natural one, and back.
packed_to_natural, natural_to_packed = _reorder([0, 2, 4, 6, 1, 3, 5, 7]), _reorder([0, 4, 1, 5, 2, 6, 3, 7])


@intrinsic
def transpose(typing: Any, low: Any, high: Any, step: Any, first: Any, last: Any) -> Any:
    """Transpose the 16 x 16 bytes of each 128-bit part of 16 vectors.

    Parameters
    ----------
    low, high : int64
        Part q of vector i comes from ``low + 64 * i + step * q`` for i < 8, and from
        ``high + 64 * (i - 8) + step * q`` for the others.
    step : int64
    first, last : int64
        The first 8 results go to 64-byte rows from `first` on, the others from `last` on.

    Notes
    -----
    Four rounds of interleaving vector i with vector i + 8. The address of a byte, the number of its vector and
    its place in the part, has 8 bits; each round turns them by one, and four exchange the two numbers.
    """
    indices = ir.VectorType(ir.IntType(32), 64)
    rounds = [
        indices([x for q in range(4) for i in range(8) for x in (16 * q + 8 * half + i, 64 + 16 * q + 8 * half + i)])
        for half in range(2)
    ]
    quarters = indices([i if i < 16 else 0 for i in range(64)])
    joins = [indices([i if i // 16 != q else 64 + i % 16 for i in range(64)]) for q in range(4)]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low, high, step, first, last = args
        word = ir.IntType(64)
        part = ir.VectorType(ir.IntType(8), 16)
        rows = []
        for i in range(16):
            start = builder.add(low, word(64 * i)) if i < 8 else builder.add(high, word(64 * (i - 8)))
            row = BYTES.ir(ir.Undefined)
            for q in range(4):
                loaded = builder.load(_at(builder, start, part), align=1)
                wide = builder.shuffle_vector(loaded, part(ir.Undefined), quarters)
                row = wide if q == 0 else builder.shuffle_vector(row, wide, joins[q])
                start = builder.add(start, step)
            rows.append(row)
        for _ in range(4):
            rows = [builder.shuffle_vector(rows[i], rows[i + 8], half) for i in range(8) for half in rounds]
        for i, row in enumerate(rows):
            start = builder.add(first, word(64 * i)) if i < 8 else builder.add(last, word(64 * (i - 8)))
            builder.store(row, _at(builder, start, BYTES.ir), align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
