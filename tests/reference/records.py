"""Records, decoded slowly, as `operators/FORMAT.md` says and written from that page alone: nothing of ours is used.

Words are Python integers in lists, bits are taken one at a time. What a page does not allow raises `WrongError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import zstandard
from blake3 import blake3

from tests.reference.bits import Bits, Bytes, Words, WrongError, canonical, decode_stream, need, numbers
from tests.reference.tiles import Scaled


@dataclass
class Node:
    opcode: int
    params: Words
    children: list[Node]


LITERALS = dict(enumerate(("raw", "bitpack", "huffman", "rans", "lz", "scaled", "scaled_huffman", "fixed"), 64))
CONDITIONED = (69, 70, 71)


def decode_record(data: bytes, books: Mapping[int, Book] | None = None) -> bytes:
    """Return the bytes of a segment from its record; `books` by their numbers."""
    source = Bytes(data)
    need(source.take(4) == b"BRVr", "no record")
    need(source.number(1) == 0, "another version")
    width = source.number(1)
    need(width in (8, 16, 32, 64), "another width")
    n = source.varint()
    code = Bytes(source.take(source.varint()))
    tree = take_node(code, 0)
    code.end()
    leaves = list(literals(tree))
    sizes = [source.varint() for _ in leaves]
    digest = source.take(32)
    payloads = iter([source.take(size) for size in sizes])
    source.end()
    words = produce(tree, width, n, payloads, books or {})
    result = b"".join(word.to_bytes(width // 8, "little") for word in words)
    need(blake3(result).digest() == digest, "another digest")
    return result


def take_node(code: Bytes, depth: int) -> Node:
    need(depth < 32, "too deep")
    opcode = code.number(1)
    params: Words = []
    if opcode not in LITERALS or opcode in CONDITIONED:
        params = [code.varint() for _ in range(code.varint())]
    return Node(opcode, params, [take_node(code, depth + 1) for _ in range(arity(opcode, params))])


def arity(opcode: int, params: Words) -> int:
    if opcode in LITERALS or opcode == 1:
        return 0
    if opcode == 2:
        return len(params) + 1
    if opcode in (4, 16):
        return len(params)
    known = {3: 1, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 2, 12: 2, 13: 2, 14: 1, 15: 3}
    need(opcode in known, "an unknown opcode")
    return known[opcode]


def literals(node: Node) -> Iterator[Node]:
    if node.opcode in LITERALS:
        yield node
    for child in node.children:
        yield from literals(child)


def produce(node: Node, b: int, n: int, payloads: Iterator[bytes], books: Mapping[int, Book]) -> Words:
    """Return the words of a node of type b[n]."""
    if node.opcode in LITERALS:
        words = literal(node, b, n, next(payloads), books)
    else:
        types = child_types(node, b, n)
        need(all(count >= 0 and 1 <= width <= 64 for width, count in types), "a type that does not fit")
        parts = [
            produce(child, width, count, payloads, books)
            for child, (width, count) in zip(node.children, types, strict=True)
        ]
        words = operate(node.opcode, node.params, b, n, parts)
    need(len(words) == n and all(0 <= word < 1 << b for word in words), "other words than the type says")
    return words


def child_types(node: Node, b: int, n: int) -> list[tuple[int, int]]:
    p = node.params
    match node.opcode:
        case 1:
            return []
        case 2:
            need(all(count > 0 for count in [*p, n - sum(p)]), "an empty child")
            return [(b, count) for count in [*p, n - sum(p)]]
        case 3:
            need(0 < p[0] < n, "a period")
            return [(b, p[0])]
        case 4:
            need(sum(p) == b, "widths that do not sum up")
            return [(width, n) for width in p]
        case 5 | 6 | 7 | 8 | 9 | 10:
            return [(b, n)]
        case 11 | 12:
            need(0 < p[0] < n, "a lag")
            return [(b, p[0]), (b, n - p[0])]
        case 13:
            need(0 < p[0] <= 65536, "a dictionary")
            return [(b, p[0]), (max(1, (p[0] - 1).bit_length()), n)]
        case 14:
            need(p[0] < b and b % p[0] == 0, "a width that does not divide")
            return [(p[0], n * b // p[0])]
        case 15:
            row, ones, zeros = p
            need(n % row == 0 and 0 < ones < n // row and 0 < zeros <= b, "a partition")
            return [(1, n // row), (b, n - row * ones), (b, row * ones)]
        case 16:
            need(all(p) and sum(p) <= n, "a deal")
            whole, rest = divmod(n, sum(p))
            counts = []
            for count in p:
                counts.append(whole * count + min(count, rest))
                rest -= min(count, rest)
            return [(b, count) for count in counts]
    raise WrongError("an unknown opcode")


def operate(opcode: int, p: Words, b: int, n: int, x: list[Words]) -> Words:
    """Return the words that an operator makes of those of its children."""
    mask = (1 << b) - 1
    match opcode:
        case 1:
            return [p[0]] * n
        case 2:
            return [word for part in x for word in part]
        case 3:
            return [x[0][i % p[0]] for i in range(n)]
        case 4:
            return [sum(part[i] << sum(p[:j]) for j, part in enumerate(x)) for i in range(n)]
        case 5:
            return [word ^ p[0] for word in x[0]]
        case 6:
            return [(word + p[0]) & mask for word in x[0]]
        case 7:
            return [(-(word + 1) // 2) & mask if word % 2 else word // 2 for word in x[0]]
        case 8:
            return [gray(word) for word in x[0]]
        case 9:
            need(0 < p[0] < b, "a rotation")
            return [(word >> p[0] | word << (b - p[0])) & mask for word in x[0]]
        case 10:
            return [int(format(word, f"0{b}b")[::-1], 2) for word in x[0]]
        case 11 | 12:
            y = list(x[0])
            for i, step in enumerate(x[1]):
                y.append(y[i] ^ step if opcode == 11 else (y[i] + step) & mask)
            return y
        case 13:
            need(all(index < p[0] for index in x[1]), "an index beyond the dictionary")
            return [x[0][index] for index in x[1]]
        case 14:
            each = b // p[0]
            return [sum(x[0][i * each + j] << (j * p[0]) for j in range(each)) for i in range(n)]
        case 15:
            need(sum(x[0]) == p[1], "other ones in the mask")
            sides = (iter(x[1]), iter(x[2]))
            return [next(sides[side]) for side in x[0] for _ in range(p[0])]
    hands = [iter(part) for part in x]  # 16
    words: Words = []
    while len(words) < n:
        for count, hand in zip(p, hands, strict=True):
            words += [next(hand) for _ in range(min(count, n - len(words)))]
    return words


def gray(word: int) -> int:
    result = 0
    while word:
        result ^= word
        word >>= 1
    return result


# -- payloads -----------------------------------------------------------------------------------

BLOCK = 131_072


def literal(node: Node, b: int, n: int, data: bytes, books: Mapping[int, Book]) -> Words:
    """Return the words of a literal."""
    name = LITERALS[node.opcode]
    need(n > 0 or name in ("raw", "bitpack"), "no words")
    if name == "raw":
        need(b in (8, 16, 32, 64) and len(data) == n * b // 8, "other bytes than words")
        return numbers(data, b // 8)
    if name == "bitpack":
        p = min(b, 8 * len(data) // n) if n else 0
        need(len(data) == -(-n * p // 8), "other bytes than words")
        bits = Bits(data)
        words = [bits.number(p) for _ in range(n)]
        bits.to_the_byte()
        return words
    if name == "huffman":
        return huffman(b, n, data)
    if name == "rans":
        return rans(b, n, data)
    if name == "lz":
        n_bytes = next(size for size in (1, 2, 4, 8) if 8 * size >= b)
        need(zstandard.frame_content_size(data) == n * n_bytes, "another content size")
        return numbers(zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data), n_bytes)
    if name == "fixed":
        number, shift = node.params
        need(number in books, "a codebook that is not there")
        return fixed(b, n, data, books[number], shift)
    return Scaled(b, n, data, node.params, codes=name == "scaled_huffman").decode()


def table_of_words(data: bytes, *, values: bool) -> tuple[dict[int, int], int]:
    """Return the level, or value, of each word of a table, and the bytes that it took."""
    bits = Bits(data)
    order = bits.number(4)
    differences = bits.bit()
    m = bits.golomb(4) + 1
    need(m <= 16_384, "too many words")
    words: Words = []
    for _ in range(m):
        words.append((words[-1] if words else -1) + 1 + bits.golomb(order))
    levels: Words = []
    for _ in range(m):
        levels.append((levels[-1] if levels else 0) + bits.signed(0) if differences else bits.number(4))
    if values:
        levels = [(1 << level) + bits.number(level) for level in levels]
    return dict(zip(words, levels, strict=True)), bits.to_the_byte()


def stream_counts(n: int) -> Words:
    """Return how many words each stream of a block of n words has."""
    quarter = -(-n // 4)
    return [quarter, quarter, quarter, n - 3 * quarter] if n >= 4096 else [n]


def huffman(b: int, n: int, data: bytes) -> Words:
    lengths, n_bytes = table_of_words(data, values=False)
    source = Bytes(data[n_bytes:])
    if len(lengths) == 1:
        source.end()
        need(list(lengths.values()) == [0], "a length of a single word")
        return list(lengths) * n
    need(b <= 16 and all(1 <= length <= 14 for length in lengths.values()), "a length")
    counts = [count for start in range(0, n, BLOCK) for count in stream_counts(min(BLOCK, n - start))]
    sizes = [source.number(2) for _ in counts[:-1]]
    streams = [source.take(size) for size in sizes]
    streams.append(source.rest())
    codes = canonical(lengths)
    return [word for stream, count in zip(streams, counts, strict=True) for word in decode_stream(stream, count, codes)]


def rans(b: int, n: int, data: bytes) -> Words:
    bits = data[0]
    need(b <= 16 and 12 <= bits <= 14, "bits")
    frequencies, n_bytes = table_of_words(data[1:], values=True)
    slots = [(word, slot) for word, frequency in sorted(frequencies.items()) for slot in range(frequency)]
    need(len(slots) == 1 << bits, "frequencies that do not sum up")
    source = Bytes(data[1 + n_bytes :])
    counts = [min(1 << 22, n - start) for start in range(0, n, 1 << 22)]
    sizes = [source.number(4) for _ in counts[:-1]]
    runs = [source.take(size) for size in sizes]
    runs.append(source.rest())
    words = []
    for run, count in zip(runs, counts, strict=True):
        stream = Bytes(run)
        lanes = 64 if count >= 65_536 else 8 if count >= 2_048 else 1
        states = [stream.number(4) for _ in range(lanes)]
        for i in range(count):
            x = states[i % lanes]
            word, slot = slots[x % (1 << bits)]
            words.append(word)
            x = frequencies[word] * (x >> bits) + slot
            states[i % lanes] = x << 16 | stream.number(2) if x < 1 << 16 else x
        stream.end()
        need(all(x == 1 << 16 for x in states), "states that are left")
    return words


@dataclass
class Book:
    """A codebook: words count from `first`; the escape is the word after all."""

    width: int
    first: int
    n_words: int
    codes: dict[tuple[int, int], int]
    n_bytes: int
    id: bytes

    @classmethod
    def take(cls, data: bytes) -> Book:
        """Read the book that `data` begins with."""
        source = Bytes(data)
        need(source.take(4) == b"BRVB" and source.number(1) == 0, "no codebook")
        width, escape, first, m = source.number(1), source.number(1), source.number(2), source.number(2)
        need(1 <= width <= 12 and first < 1 << width and 1 <= m < 1 << width, "a codebook of another kind")
        halves = [half for byte in source.take((m + 1) // 2) for half in (byte & 15, byte >> 4)]
        need(m % 2 == 0 or halves[-1] == 0, "a last half")
        lengths = dict(enumerate([*halves[:m], escape]))
        need(all(1 <= length <= 12 for length in lengths.values()), "a length")
        digest = blake3(data[: source.place]).digest()
        return cls(width, first, m, canonical(lengths), source.place, digest[:8])

    @property
    def number(self) -> int:
        return int.from_bytes(self.id[:2], "little") % (1 << 14)


def fixed(b: int, n: int, data: bytes, book: Book, shift: int) -> Words:
    need(book.width == b and shift < 1 << b, "a codebook of another width")
    source = Bytes(data)
    words: Words = []
    n_bytes = 1 if b <= 8 else 2
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        kind = source.varint()
        if kind == 0:
            bits = Bits(source.take(-(-count * b // 8)))
            words += [bits.number(b) for _ in range(count)]
            bits.to_the_byte()
        elif kind == 1:
            words += numbers(source.take(n_bytes), n_bytes) * count
        else:
            counts = stream_counts(count)
            sizes = [source.varint() for _ in counts]
            streams = [source.take(size) for size in sizes]
            escaped = iter(numbers(source.take((kind - 2) * n_bytes), n_bytes))
            for stream, length in zip(streams, counts, strict=True):
                for symbol in decode_stream(stream, length, book.codes):
                    known = (book.first + symbol + shift) % (1 << b)
                    words.append(next(escaped) if symbol == book.n_words else known)
            need(next(escaped, None) is None, "escapes that are left")
    source.end()
    return words
