"""The encodings written a second time, for reading: plain Python, one bit and one word at a time.

The fast encoders must give these bytes exactly. Nothing here imports a kernel.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

BLOCK_WORDS = 1 << 17
SPLIT_WORDS = 1 << 12
RUN_WORDS = 1 << 22


class Bits:
    """A stream of bits, least significant first."""

    def __init__(self) -> None:
        self.value = 0
        self.n_bits = 0

    def put(self, value: int, n_bits: int) -> None:
        assert 0 <= value < 1 << n_bits
        self.value |= value << self.n_bits
        self.n_bits += n_bits

    def put_golomb(self, order: int, value: int) -> None:
        u = value + (1 << order)
        e = u.bit_length() - 1 - order
        self.put(1 << e, e + 1)
        self.put(u - (1 << (e + order)), e + order)

    def to_bytes(self) -> bytes:
        return self.value.to_bytes((self.n_bits + 7) // 8, "little")


def bitpack(words: Sequence[int], width_bits: int) -> bytes:
    n_bytes = (len(words) * max(words, default=0).bit_length() + 7) // 8
    width = min(width_bits, 8 * n_bytes // max(len(words), 1))
    bits = Bits()
    for word in words:
        bits.put(word, width)
    return bits.to_bytes()


def table(symbols: Sequence[int], levels: Sequence[int], values: Sequence[int] = ()) -> bytes:
    gaps = [symbol - previous - 1 for symbol, previous in zip(symbols, [-1, *symbols], strict=False)]
    steps = [level - previous for level, previous in zip(levels, [0, *levels], strict=False)]
    zigzags = [2 * step if step >= 0 else -2 * step - 1 for step in steps]

    def golomb_bits(order: int, numbers: Sequence[int]) -> int:
        bits = Bits()
        for number in numbers:
            bits.put_golomb(order, number)
        return bits.n_bits

    order = min(range(16), key=lambda k: golomb_bits(k, gaps))
    differences = golomb_bits(0, zigzags) < 4 * len(levels)
    bits = Bits()
    bits.put(order, 4)
    bits.put(int(differences), 1)
    bits.put_golomb(4, len(symbols) - 1)
    for gap in gaps:
        bits.put_golomb(order, gap)
    for level, zigzag in zip(levels, zigzags, strict=True):
        if differences:
            bits.put_golomb(0, zigzag)
        else:
            bits.put(level, 4)
    for value, level in zip(values, levels, strict=False):
        bits.put(value - (1 << level), level)
    return bits.to_bytes()


def code_lengths(counts: dict[int, int], limit: int) -> dict[int, int]:
    """Package-merge with the packages written out: each is (weight, symbols in it)."""
    if len(counts) == 1:
        return dict.fromkeys(counts, 0)
    ascending = sorted(counts, key=lambda symbol: (counts[symbol], symbol))
    leaves: list[tuple[int, tuple[int, ...]]] = [(counts[symbol], (symbol,)) for symbol in ascending]
    items = list(leaves)
    for _ in range(limit - 1):
        pairs = zip(items[::2], items[1::2], strict=False)
        packages = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
        items = list(heapq.merge(leaves, packages, key=lambda item: item[0]))
    lengths = Counter(symbol for item in items[: 2 * len(leaves) - 2] for symbol in item[1])
    return dict(lengths)


def canonical(lengths: dict[int, int]) -> dict[int, str]:
    """Codes as strings of binary digits, most significant first."""
    codes: dict[int, str] = {}
    code = previous = 0
    for symbol in sorted(lengths, key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - previous
        previous = lengths[symbol]
        codes[symbol] = f"{code:0{previous}b}" if previous else ""
        code += 1
    return codes


def huffman(words: Sequence[int]) -> bytes:
    counts = Counter(words)
    best: dict[int, int] = {}
    cost = 0
    for limit in (12, 14):
        if len(counts) <= 1 << limit:
            lengths = code_lengths(counts, limit)
            n_bits = sum(counts[symbol] * lengths[symbol] for symbol in counts)
            if not best or n_bits < cost - cost // 4096:
                best, cost = lengths, n_bits
    symbols = sorted(counts)
    head = table(symbols, [best[symbol] for symbol in symbols])
    if len(counts) == 1:
        return head
    codes = canonical(best)
    streams = []
    for start in range(0, len(words), BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        step = len(block) if len(block) < SPLIT_WORDS else -(-len(block) // 4)
        for first in range(0, len(block), step):
            bits = Bits()
            for word in block[first : first + step]:
                for digit in codes[word]:
                    bits.put(int(digit), 1)
            streams.append(bits.to_bytes())
    directory = b"".join(len(stream).to_bytes(2, "little") for stream in streams[:-1])
    return head + directory + b"".join(streams)


def frequencies(counts: Sequence[int], bits: int) -> list[int]:
    made = [0] * len(counts)
    while True:
        slots = (1 << bits) - sum(made)
        total = sum(count for count, f in zip(counts, made, strict=True) if not f)
        rare = [i for i, count in enumerate(counts) if not made[i] and Fraction(count * slots, total) < 1]
        if not rare:
            break
        for i in rare:
            made[i] = 1
    made = [f or int(Fraction(count * slots, total) + Fraction(1, 2)) for count, f in zip(counts, made, strict=True)]
    while (left := (1 << bits) - sum(made)) != 0:
        step = max(abs(left) // len(counts), 1)
        if left > 0:
            gains = [Fraction(count, 2 * f + 1) for count, f in zip(counts, made, strict=True)]
            made[gains.index(max(gains))] += step
        else:
            losses = [
                (Fraction(count, 2 * f - 1), i)
                for i, (count, f) in enumerate(zip(counts, made, strict=True))
                if f > step
            ]
            made[min(losses)[1]] -= step
    return made


def rans(words: Sequence[int], bits: int) -> bytes:
    counts = Counter(words)
    symbols = sorted(counts)
    made = frequencies([counts[symbol] for symbol in symbols], bits)
    frequency = dict(zip(symbols, made, strict=True))
    first = {symbol: sum(made[:i]) for i, symbol in enumerate(symbols)}
    head = bytes((bits,)) + table(symbols, [f.bit_length() - 1 for f in made], made)
    runs = []
    for start in range(0, len(words), RUN_WORDS):
        run = words[start : start + RUN_WORDS]
        lanes = 64 if len(run) >= 1 << 16 else 8 if len(run) >= 1 << 11 else 1
        states = [1 << 16] * lanes
        stream: list[int] = []
        for i in reversed(range(len(run))):
            x, f = states[i % lanes], frequency[run[i]]
            if x >= f << (32 - bits):
                stream.append(x & 0xFFFF)
                x >>= 16
            states[i % lanes] = (x // f << bits) + x % f + first[run[i]]
        runs.append(
            b"".join(x.to_bytes(4, "little") for x in states)
            + b"".join(x.to_bytes(2, "little") for x in reversed(stream))
        )
    return head + b"".join(len(run).to_bytes(4, "little") for run in runs[:-1]) + b"".join(runs)
