"""How a stream is judged, in plain Python: the oracle of `operators.kernels.judging`."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import Any

from operators.base import Stream
from operators.literals.profile import faster_bound
from operators.literals.rans import RUN_WORDS, lanes_of
from operators.words import Words, mask_of
from synth.cost import GUARD, Q8, literal_q8
from synth.features import FLAT, NARROW_BITS
from synth.logs import LOGS, SMOOTH_LOGS, log_q20

MAX_DISTINCT = 4096
LOOKED_AT = 512
LN2_Q20 = 726817


def judged(
    words: Words, shift: int, stream: Stream, row_below: tuple[int, int], *, closed: bool
) -> tuple[dict[str, int], tuple[int, ...], tuple[int, str, int]]:
    """Return the counts of a field, its features, and the cost of its literal, encoding and floor."""
    width = stream.width_bits
    field = [int(word) >> shift & mask_of(width) for word in words]
    counts = Counter(field)
    near = nearness(field, *row_below) if width > 1 and not closed else (0, 0)
    found = {
        "n_words": len(field),
        "equal": sum(a == b for a, b in itertools.pairwise(field)),
        "varying": varying(field),
        "largest": max(field, default=0),
        "live": len(counts),
        "once": sum(count == 1 for count in counts.values()),
        "twice": sum(count == 2 for count in counts.values()),
        "entropy_q20": 0,
        "smooth_q20": 0,
        "by_chance": 0,
    }
    if width > NARROW_BITS and len(counts) > MAX_DISTINCT:
        found |= {"live": len(field), "once": len(field), "twice": 0}
    if width <= NARROW_BITS:
        n = len(field)
        found["entropy_q20"] = max(0, n * log_q20(n) - sum(x * table_log(x, LOGS) for x in counts.values()))
        found["smooth_q20"] = max(0, n * log_q20(n) - sum(x * table_log(x, SMOOTH_LOGS) for x in counts.values()))
        found["by_chance"] = sum(x * x for x in counts.values()) // max(1, n)
    seen, cost = features(found, stream, near), literal(found, counts, stream)
    del found["smooth_q20"]  # features and costs take it, nothing else does
    return found, seen, cost


def varying(field: list[int]) -> int:
    bits = 0
    for word in field:
        bits |= word ^ field[0]
    return bits


def table_log(x: int, table: Any) -> int:
    up = 0
    while x > 65536:
        x >>= 1
        up += 1
    return int(table[x]) + (up << 20)


def nearness(field: list[int], row_lag: int, row_block: int) -> tuple[int, int]:
    n = len(field)
    near, far, row = [], [], []
    for i in range(0, n - 1, max(1, n // LOOKED_AT) | 1):
        near.append(abs(field[i] - field[i + 1]).bit_length())
        far.append(abs(field[i] - field[(i + n // 2) % n]).bit_length())
        if row_lag and i + row_lag < n and not (row_block and i % row_block * 2 >= row_block):
            row.append(abs(field[i] - field[i + row_lag]).bit_length())
    return nearer(far, near), nearer(far, row)


def nearer(far: list[int], near: list[int]) -> int:
    if len(near) < 16:
        return 0
    eighths = 8 * sum(far) // len(far) - 8 * sum(near) // len(near)
    return 0 if eighths < 3 else 1 if eighths < 12 else 2


def features(found: dict[str, int], stream: Stream, near: tuple[int, int]) -> tuple[int, ...]:
    n, width, live, equal = max(1, found["n_words"]), stream.width_bits, found["live"], found["equal"]
    if width <= NARROW_BITS:
        full = n * width << 20
        entropy = FLAT if found["smooth_q20"] * 10000 >= full * 9985 else min(3, found["smooth_q20"] * 4 // full)
    else:
        entropy = 3 if 2 * live > n else 1 if live > 256 else 0
    by_chance = 2 * n // (1 << min(width, 12)) + n // 512
    equality = 0 if equal < by_chance else 1 if 10 * equal < n else 2 if 10 * equal < 6 * n else 3
    distinct = 0 if live <= 1 else 1 if live <= 16 else 2 if live <= 256 else 3
    bits = found["varying"]
    trailing = (bits & -bits).bit_length() - 1 if bits else 0
    leading = width - bits.bit_length()
    length = (stream.n_words + 1).bit_length() - 1
    return (entropy, equality, distinct, min(3, trailing // 4), min(2, leading // 4), min(7, length // 3), *near)


def literal(found: dict[str, int], counts: Counter[int], stream: Stream) -> tuple[int, str, int]:
    n, n_sample = stream.n_words, found["n_words"]
    if n == 0 or n_sample == 0:
        return literal_q8(0), "bitpack", 0
    best, encoding = n * found["largest"].bit_length() * Q8, "bitpack"
    floor = min(best, found["entropy_q20"] * n // n_sample >> 12)
    max_live = n_sample if n == n_sample else n_sample // GUARD
    if stream.width_bits <= NARROW_BITS and len(counts) > 2:
        full = n_sample * found["largest"].bit_length() << 20
        is_coded = len(counts) <= max_live and found["entropy_q20"] * 1024 < full * 1023
    else:
        is_coded = stream.width_bits <= NARROW_BITS
    if is_coded:
        huffman, rans = coded_q8(found, counts, stream, has_table=len(counts) <= max_live)
        if huffman < best:
            best, encoding = huffman, "huffman"
        if rans < faster_bound("rans", best, n):
            best, encoding = rans, "rans"
    return literal_q8(best), encoding, floor


def coded_q8(found: dict[str, int], counts: Counter[int], stream: Stream, *, has_table: bool) -> tuple[int, int]:
    """Return the payloads of a Huffman and of a rANS literal."""
    n, n_sample, seen = stream.n_words, found["n_words"], found["live"]
    entropy, live = found["entropy_q20"], seen
    if n != n_sample:
        entropy = max(entropy, found["smooth_q20"])
        chao = found["once"] * (found["once"] - 1) // (2 * (found["twice"] + 1))
        growth = (log_q20(n) - log_q20(n_sample)) * LN2_Q20 >> 20
        live = min(seen + max(chao, found["once"] * growth >> 20), n, 1 << stream.width_bits)
    gaps, lengths, frequencies, rare = table_bits(counts, n_sample) if has_table else (0, 0, 0, 0)
    table = min(gaps, seen * ((found["largest"] // seen).bit_length() + 2)) + min(lengths, 4 * seen)
    huffman = (n_sample if seen == 2 else 0 if seen < 2 else huffman_bits(counts)) * Q8 * n // n_sample
    if found["entropy_q20"] and seen > 2:
        huffman = huffman * entropy // found["entropy_q20"]
    taken = rare + (live - seen << 10)
    huffman += (n * loss_q20(taken >> 1) >> 12) + (table * live // seen + 80) * Q8
    rans = entropy * n // n_sample + n * loss_q20(taken) >> 12
    rans += rans // 2048
    rans += ((table + frequencies) * live // seen + 32) * Q8
    return huffman, rans + lanes_of(n) * 32 * Q8 * (1 + n // RUN_WORDS)


def loss_q20(taken: int) -> int:
    return log_q20(1 << 24) - log_q20(max(1, (1 << 24) - taken))


def table_bits(counts: Counter[int], n: int) -> tuple[int, int, int, int]:
    """Return the bits of gaps, levels and values of a table, and what rare words would need, in 2**-24."""
    gaps = lengths = values = rare = level = 0
    last = -1
    for word, count in sorted(counts.items()):
        gaps += 2 * (word - last).bit_length() - 1
        last = word
        rare += max(0, 1024 - (count << 24) // n)
        length = min(15, max(1, log_q20(n) - log_q20(count) + (1 << 19) >> 20))
        values += max(0, 12 - length)
        step = length - level
        level = length
        lengths += 2 * ((2 * step if step >= 0 else -1 - 2 * step) + 1).bit_length() - 1
    return gaps, lengths, values, rare


def huffman_bits(counts: Counter[int]) -> int:
    heap, total = sorted(counts.values()), 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total
