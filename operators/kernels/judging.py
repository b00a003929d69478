"""All that a search wants to know of a stream, in one call: counts, entropies, features, the cost of a literal.

Integers only, so that a cost is the same on every machine, compiled or not. Logarithms come from tables of
the caller in units of 2**-20 bit. Samples have at most `MAX_WORDS` words, for which all sums fit 64 bits;
products that might not go through `_scaled`.

The plain text of each step, and the oracle of these kernels, is `tests.synth.plain`.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any, Final

import numpy as np

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length

MAX_WORDS: Final = 1 << 24
"""Most words of a sample."""
NARROW_BITS: Final = 16
"""Words up to this width are counted in a table of all words; literals of wider ones are not entropy-coded."""
FLAT: Final = 4
"""Bucket of an entropy that is the width but for noise."""
HUFFMAN_FIXED_BITS: Final = 80
"""Head of a table, sizes of streams, bits left over."""
RANS_FIXED_BITS: Final = 32
RANS_LOSS: Final = 2048
"""One part in so many is lost to frequencies that are multiples of a power of two."""
LN2_Q20: Final = 726817
"""ln 2 in units of 2**-20."""
MAX_DISTINCT: Final = 4096
"""Wide words are counted up to so many different ones."""
SLOTS: Final = 4 * MAX_DISTINCT
"""Places of the table in which they are counted."""
LOOKED_AT: Final = 512
"""Words by which nearness is judged."""
USUAL: Final = 1024
"""Counts below this are sorted by counting."""
VERDICT: Final = 25
"""Numbers of a verdict, see `judge_narrow`."""
_MARKS = 1 << NARROW_BITS - 6
ROOM: Final = _MARKS + USUAL + 7 * (1 << NARROW_BITS)
"""Numbers of the scratch of `judge_narrow`."""
PLACES_AT: Final = ROOM - 2 * (1 << NARROW_BITS)
LIVE_AT: Final = ROOM - (1 << NARROW_BITS)
"""Where it leaves the live fields, and how often they occur."""
LISTED_WORDS: Final = 2
"""Words of a sample for each that occurs, at least, for those to be listed in any case."""
_DENSE = 4096
"""Tables up to this size are read whole, larger ones where something was counted."""
_FOLDED = 2048
"""Tables up to this size are kept four times: a run of one word does not wait for itself then."""


@inlined
def _log_q20(x: Any, logs: Any) -> Any:
    """Return log2(x) in units of 2**-20 bit from a table of 65537; 0 for 0."""
    up = max(np.int64(0), bit_length(x) - 17)
    y = x >> up
    if y > 65536:
        y >>= 1
        up += 1
    return logs[y] + (up << 20)


@inlined
def _scaled(a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b // c`` of non-negative integers below 2**63, where that is below 2**63 too."""
    if bit_length(a) + bit_length(b) <= 62:
        return a * b // c
    low_a, high_a = np.uint64(a) & np.uint64(0xFFFFFFFF), np.uint64(a) >> np.uint64(32)
    low_b, high_b = np.uint64(b) & np.uint64(0xFFFFFFFF), np.uint64(b) >> np.uint64(32)
    cross = low_a * high_b + ((low_a * low_b) >> np.uint64(32))
    middle = high_a * low_b + (cross & np.uint64(0xFFFFFFFF))
    low = np.uint64(a) * np.uint64(b)
    rest = high_a * high_b + (cross >> np.uint64(32)) + (middle >> np.uint64(32))
    # The upper half is below the divisor; the lower one is taken in bit by bit.
    divisor = np.uint64(c)
    quotient = np.uint64(0)
    for k in range(63, -1, -1):
        rest = (rest << np.uint64(1)) | ((low >> np.uint64(k)) & np.uint64(1))
        quotient <<= np.uint64(1)
        if rest >= divisor:
            rest -= divisor
            quotient |= np.uint64(1)
    return np.int64(quotient)


@inlined
def _loss_q20(taken_q24: Any, logs: Any) -> Any:
    """Return the bits per word that are lost where a part of all codes is taken by words that hardly occur."""
    return (np.int64(24) << 20) - _log_q20(max(np.int64(1), (np.int64(1) << 24) - taken_q24), logs)


@inlined
def _nearer(far: Any, n_far: Any, near: Any, n_near: Any) -> Any:
    """Return 0 where a word is no nearer than a far one (a scan would lose), 1 for up to 1.5 bits, 2 for more."""
    if n_near < 16:
        return np.int64(0)
    eighths = 8 * far // n_far - 8 * near // n_near
    return np.int64(0) if eighths < 3 else np.int64(1) if eighths < 12 else np.int64(2)


@inlined
def _bits_of(word: Any) -> Any:
    """Return the bits of a uint64 without its leading zeros."""
    high = bit_length(np.int64(word >> np.uint64(32)))
    return high + 32 if high else bit_length(np.int64(word & np.uint64(0xFFFFFFFF)))


@inlined
def _distance_bits(words: Any, i: Any, j: Any, down: Any, keep: Any) -> Any:
    a = (np.uint64(words[np.uint64(i)]) >> down) & keep
    b = (np.uint64(words[np.uint64(j)]) >> down) & keep
    return _bits_of(a - b if a > b else b - a)


@inlined
def _look_around(words: Any, shift: Any, width_bits: Any, row_lag: Any, row_block: Any, verdict: Any) -> None:
    """Judge how much nearer a word is to the one before, and to the one a row before, than to one far away."""
    n = words.size
    down = np.uint64(shift)
    keep = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    half = n >> 1
    near, far, row, n_near, n_row = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for i in range(0, n - 1, max(1, n // LOOKED_AT) | 1):
        near += _distance_bits(words, i, i + 1, down, keep)
        n_near += 1
        j = i + half
        far += _distance_bits(words, i, j if j < n else j - n, down, keep)
        j = i + row_lag
        if row_lag and j < n and not (row_block and (i % row_block) * 2 >= row_block):
            row += _distance_bits(words, i, j, down, keep)
            n_row += 1
    verdict[VERDICT - 2] = _nearer(far, n_near, near, n_near)
    verdict[VERDICT - 1] = _nearer(far, n_near, row, n_row)


@inlined
def _n_equal(words: Any, shift: Any, width_bits: Any) -> Any:
    """Count the fields that are equal to the one before."""
    equal = np.int64(0)
    keep = (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)) << np.uint64(shift)
    for i in range(1, words.size):
        equal += np.int64(((np.uint64(words[i]) ^ np.uint64(words[i - 1])) & keep) == np.uint64(0))
    return equal


@inlined
def _set_features(n: Any, width_bits: Any, n_words: Any, entropy: Any, varying: Any, verdict: Any) -> None:
    """Set the buckets of a stream by which priors know it, but for the last two."""
    n = max(np.int64(1), n)
    live, equal = verdict[0], verdict[5]
    # Chance alone makes one pair in 2**width equal.
    by_chance = 2 * n // (np.int64(1) << min(np.int64(width_bits), np.int64(12))) + n // 512
    verdict[17] = entropy
    verdict[18] = 0 if equal < by_chance else 1 if 10 * equal < n else 2 if 10 * equal < 6 * n else 3
    verdict[19] = 0 if live <= 1 else 1 if live <= 16 else 2 if live <= 256 else 3
    trailing = np.int64(0)
    while varying and not (varying >> np.uint64(trailing)) & np.uint64(1):
        trailing += 1
    verdict[20] = min(np.int64(3), trailing // 4)
    verdict[21] = min(np.int64(2), (width_bits - _bits_of(varying)) // 4)
    verdict[22] = min(np.int64(7), (bit_length(n_words + 1) - 1) // 3)


@inlined
def _merged_bits(weights: Any, times: Any, n_runs: Any, sums: Any, sum_times: Any) -> Any:
    """Return the bits of a Huffman code for runs of equal counts in ascending order.

    The two least are merged again and again; equal ones many at a time, as ties do not change the total. Sums
    come in ascending order, so two queues do.
    """
    total = np.int64(0)
    taken, head, tail = 0, 0, 0
    single = np.int64(0)  # one left over, which is the least of all
    while True:
        from_runs = taken < n_runs and (head == tail or weights[taken] <= sums[head])
        if not from_runs and head == tail:
            return total
        if from_runs:
            weight, many = weights[taken], times[taken]
            taken += 1
        else:
            weight, many = sums[head], sum_times[head]
            head += 1
        if single:
            total += single + weight
            sums[tail] = single + weight
            sum_times[tail] = 1
            tail += 1
            many -= 1
            single = np.int64(0)
        if many > 1:
            total += 2 * weight * (many >> 1)
            # Not below the sum before: that was of no larger words.
            sums[tail] = 2 * weight
            sum_times[tail] = many >> 1
            tail += 1
        if many & 1:
            single = weight


@kernel("room")
def huffman_bits(counts: Any, room: Any) -> int:
    """Return the bits of the Huffman code of all words, without a limit on lengths; 0 for one word alone.

    Parameters
    ----------
    counts : int64 array, shape (k,)
        Positive, in any order.
    room : int64 array, shape (USUAL + 5 * k,)
        Scratch; the first `USUAL` are zeros, and left so.
    """
    k = counts.size
    few = room[:USUAL]
    weights = room[USUAL : USUAL + k]
    times = room[USUAL + k : USUAL + 2 * k]
    large = room[USUAL + 2 * k : USUAL + 3 * k]
    n_large = 0
    most = np.int64(0)
    for i in range(k):
        x = counts[i]
        if x < USUAL:
            few[x] += 1
            most = max(most, x)
        else:
            large[n_large] = x
            n_large += 1
    n_runs = 0
    for x in range(1, most + 1):
        if few[x]:
            weights[n_runs] = x
            times[n_runs] = few[x]
            few[x] = 0
            n_runs += 1
    gap = 1
    while gap < n_large:
        gap = 3 * gap + 1
    while gap > 1:
        gap //= 3
        for i in range(gap, n_large):
            x = large[i]
            j = i
            while j >= gap and large[j - gap] > x:
                large[j] = large[j - gap]
                j -= gap
            large[j] = x
    for i in range(n_large):
        weights[n_runs] = large[i]
        times[n_runs] = 1
        n_runs += 1
    sums = room[USUAL + 3 * k : USUAL + 4 * k]
    return _merged_bits(weights, times, n_runs, sums, room[USUAL + 4 * k : USUAL + 5 * k])


@kernel("room", "verdict")
def weigh_counts(
    live: Any, places: Any, n: int, width_bits: int, max_live: int, terms: Any, logs: Any, room: Any, verdict: Any
) -> None:
    """Set the entries of a verdict that follow from counts alone, and those of the cost of a literal.

    Parameters
    ----------
    live, places : int64 arrays, shape (k,)
        The fields that occur, ascending in `places`, and how often.
    n : int
        Words of the sample.
    width_bits : int
    max_live : int
        Live fields beyond which no table is costed: its sums are those of no fields.
    terms : int64 array, shape (3,)
        Words of the whole stream, cost of the states of a rANS literal of it, and the part that rANS has to
        save or 0.
    logs : int64 array, shape (4, LOG_TABLE_SIZE)
        log2(x), and Grassberger's substitute for it; by how much x times either grows from x to x + 1.
    room : int64 array, of huffman_bits
    verdict : int64 array, shape (VERDICT,)
        Of `judge_narrow`.
    """
    n_live = np.int64(live.size)
    has_table = n_live <= max_live
    log_total = _log_q20(n, logs[0])
    once, twice = np.int64(0), np.int64(0)
    plain, smooth, pairs = np.int64(0), np.int64(0), np.int64(0)
    gap_bits, level_bits, value_bits, rare = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    last, level = np.int64(-1), np.int64(0)
    for k in range(n_live):
        x = live[k]
        once += np.int64(x == 1)
        twice += np.int64(x == 2)
        pairs += x * x
        up = max(np.int64(0), bit_length(x) - 17)
        y = x >> up
        if y > 65536:
            y >>= 1
            up += 1
        log = logs[0, y] + (up << 20)
        plain += x * log
        smooth += x * (logs[1, y] + (up << 20))
        if has_table:
            gap_bits += 2 * bit_length(places[k] - last) - 1
            last = places[k]
            if x << 14 < n:
                rare += 1024 - (x << 24) // n
            length = min(np.int64(15), max(np.int64(1), (log_total - log + (1 << 19)) >> 20))
            value_bits += max(np.int64(0), 12 - length)
            step = length - level
            level = length
            level_bits += 2 * bit_length(2 * step + 1 if step >= 0 else -2 * step) - 1
    plain = max(np.int64(0), n * log_total - plain)
    smooth = max(np.int64(0), n * log_total - smooth)
    largest = places[n_live - 1] if n_live else np.int64(0)
    huffman = n if n_live == 2 else np.int64(0) if n_live < 2 else np.int64(-1)
    width_q20 = (n * bit_length(largest)) << 20
    if 2 < n_live and has_table and plain * 1024 < width_q20 * 1023:
        huffman = huffman_bits(live, room)
    verdict[0], verdict[1], verdict[2] = n_live, once, twice
    verdict[3], verdict[4], verdict[7] = plain, smooth, largest
    verdict[8], verdict[9], verdict[10], verdict[11] = gap_bits, level_bits, value_bits, rare
    verdict[12], verdict[13] = huffman, pairs // n if n else 0
    _weigh(n, width_bits, terms, logs[0], verdict)


@inlined
def _weigh(n_sample: Any, width_bits: Any, terms: Any, logs: Any, verdict: Any) -> None:
    """Set the payload of the literal that the emitter would choose, LZ left out, its encoding and its floor."""
    n = terms[0]
    seen, once, twice, plain, smooth, huffman = (
        verdict[0], verdict[1], verdict[2], verdict[3], verdict[4], verdict[12],
    )  # fmt: skip
    verdict[14], verdict[15], verdict[16] = 0, 0, 0
    if n == 0 or n_sample == 0:
        return
    best = n * bit_length(verdict[7]) << 8
    verdict[16] = min(best, _scaled(plain, n, n_sample) >> 12)
    encoding = 0
    if huffman >= 0:
        entropy, live = plain, seen
        if n != n_sample:
            entropy = max(plain, smooth)
            unseen = once * (once - 1) // (2 * (twice + 1))
            growth = ((_log_q20(n, logs) - _log_q20(n_sample, logs)) * LN2_Q20) >> 20
            unseen = max(unseen, (once * growth) >> 20)
            live = min(seen + unseen, n, np.int64(1) << width_bits)
        gap_bits = min(verdict[8], seen * (bit_length(verdict[7] // seen) + 2))
        table = gap_bits + min(verdict[9], 4 * seen)
        coded = _scaled(huffman << 8, n, n_sample)
        if plain and seen > 2:
            # The sample flatters its own code by as much as it flatters its own entropy.
            coded = _scaled(coded, entropy, plain)
        # Each word takes at least one of 2**14 frequencies, or of 2**15 places in the space of codes, however
        # rare it is; those too that the sample has missed.
        taken = verdict[11] + ((live - seen) << 10)
        coded += ((n * _loss_q20(taken >> 1, logs)) >> 12) + ((table * live // seen + HUFFMAN_FIXED_BITS) << 8)
        if coded < best:
            best, encoding = coded, 1
        coded = (_scaled(entropy, n, n_sample) + n * _loss_q20(taken, logs)) >> 12
        coded += coded // RANS_LOSS
        coded += (((table + verdict[10]) * live // seen + RANS_FIXED_BITS) << 8) + terms[1]
        if coded < (best - best // terms[2] if terms[2] else best):
            best, encoding = coded, 2
    verdict[14], verdict[15] = best, encoding


@inlined
def _is_noise(words: Any, down: Any, keep: Any, counts: Any) -> Any:
    """Return whether hardly any of the first fields occurs twice: the counts of all are then not looked at again."""
    looked_at = words.size >> 3
    n_live = np.int64(0)
    for k in range(looked_at):
        field = (np.uint64(words[k]) >> down) & keep
        n_live += np.int64(counts[field] == 0)
        counts[field] = 1
    for k in range(looked_at):
        counts[(np.uint64(words[k]) >> down) & keep] = 0
    return 4 * n_live > 3 * looked_at


@inlined
def _tally(words: Any, down: Any, keep: Any, logs: Any, counts: Any, marks: Any, verdict: Any) -> Any:
    """Count fields, set of a verdict what needs no list of them, and return how many are different."""
    n_live, once, twice, pairs = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    plain, smooth = np.int64(0), np.int64(0)
    largest = np.uint64(0)
    for k in range(words.size):
        field = (np.uint64(words[k]) >> down) & keep
        x = np.int64(counts[field])
        counts[field] = x + 1
        marks[field >> np.uint64(6)] = 1
        plain += logs[2, x]
        smooth += logs[3, x]
        pairs += 2 * x + 1
        n_live += np.int64(x == 0)
        once += np.int64(x == 0) - np.int64(x == 1)
        twice += np.int64(x == 1) - np.int64(x == 2)
        largest = max(largest, field)
    n = np.int64(words.size)
    total = n * logs[0, n]
    verdict[0], verdict[1], verdict[2] = n_live, once, twice
    verdict[3], verdict[4] = max(np.int64(0), total - plain), max(np.int64(0), total - smooth)
    verdict[7], verdict[13] = np.int64(largest), pairs // n
    return n_live


@inlined
def _varying(words: Any, down: Any, keep: Any) -> Any:
    """Return the or of all differences of fields to the first."""
    varying = np.uint64(0)
    for k in range(words.size):
        varying |= np.uint64(words[k]) ^ np.uint64(words[0])
    return (varying >> down) & keep


@kernel("counts", "room", "verdict")
def judge_narrow(
    words: Any,
    shift: int,
    width_bits: int,
    above_live: Any,
    above_places: Any,
    max_live: int,
    is_open: bool,
    row_lag: int,
    row_block: int,
    terms: Any,
    logs: Any,
    counts: Any,
    room: Any,
    verdict: Any,
) -> None:
    """Judge the bit field ``(word >> shift) & mask`` of every word: at most 16 bits.

    Parameters
    ----------
    words : Words
        At most `MAX_WORDS`.
    shift, width_bits : int
    above_live, above_places : int64 arrays, shape (k,)
        The words that occur and how often, where they have been counted: fewer than `words`. Else empty.
    max_live, terms, logs
        Of `weigh_counts`.
    is_open : bool
        Whether neighbours are compared.
    row_lag, row_block : int
        The word ``row_lag`` later stands a row below, for the first half of each `row_block` words; or for
        all, where `row_block` is 0. 0 and 0 where there are no rows.
    counts : int32 array, shape (65536,)
        Zeros, and left so.
    room : int64 array, shape (ROOM,)
        Scratch; the first ``_MARKS + USUAL`` are zeros, and left so. The live fields and how often they occur
        are left from `PLACES_AT` and `LIVE_AT` on where there are `LISTED_WORDS` words for each.
    verdict : int64 array, shape (VERDICT,)
        Set to: distinct fields, those seen once, those seen twice; empirical entropy of all words of the sample
        together, and Grassberger's estimate of the true one, in 2**-20 bit; fields equal to the one before, or
        of all differences to the first, largest field; of a table in the form of `operators.kernels.alphabet`,
        the bits of its gaps, of its levels as differences, and of its values; what fields rarer than one in
        2**14 would need to become that frequent, in 2**-24 of all; bits of all words by a Huffman code, -1 where
        none can be shorter than the words are; how many fields would equal the one before in random order;
        payload of a literal of the whole stream in 1/256 bit, its encoding (0 bitpack, 1 huffman, 2 rans),
        empirical entropy of the whole stream; eight features: see `synth.features`.
    """
    down = np.uint64(shift)
    size = 1 << width_bits
    keep = np.uint64(size - 1)
    n = words.size
    marks = room[:_MARKS]
    places = room[PLACES_AT:LIVE_AT]
    live = room[LIVE_AT:]
    folded = 0
    has_no_table = False
    if above_live.size and size <= _DENSE:
        for k in range(above_live.size):
            counts[(np.uint64(above_places[k]) >> down) & keep] += above_live[k]
    elif above_live.size:
        for k in range(above_live.size):
            field = (np.uint64(above_places[k]) >> down) & keep
            counts[field] += above_live[k]
            marks[field >> np.uint64(6)] = 1
    elif size <= _FOLDED:
        folded = size
        b, c, d = counts[size:], counts[2 * size :], counts[3 * size :]
        one = np.int32(1)
        for quad in range(np.uint64(n >> 2)):
            i = np.uint64(quad) << np.uint64(2)
            j = (np.uint64(words[i]) >> down) & keep
            k1 = (np.uint64(words[i + np.uint64(1)]) >> down) & keep
            k2 = (np.uint64(words[i + np.uint64(2)]) >> down) & keep
            k3 = (np.uint64(words[i + np.uint64(3)]) >> down) & keep
            counts[j] += one
            b[k1] += one
            c[k2] += one
            d[k3] += one
        for k in range(n & ~3, n):
            counts[(np.uint64(words[k]) >> down) & keep] += 1
    elif size <= _DENSE:
        for k in range(n):
            counts[(np.uint64(words[k]) >> down) & keep] += 1
    elif 2 <= max_live < 2 * n <= size and n < logs.shape[1] and _is_noise(words, down, keep, counts):
        n_found = _tally(words, down, keep, logs, counts, marks, verdict)
        has_no_table = n_found > max_live and LISTED_WORDS * n_found >= n
    else:
        for k in range(n):
            field = (np.uint64(words[k]) >> down) & keep
            counts[field] += 1
            marks[field >> np.uint64(6)] = 1
    for k in range(folded):
        counts[k] += counts[folded + k] + counts[2 * folded + k] + counts[3 * folded + k]
    for k in range(folded, 4 * folded):
        counts[k] = 0
    n_live = np.int64(0)
    verdict[5] = _n_equal(words, shift, width_bits)
    varying = np.uint64(0)
    if has_no_table:
        for mark in range(size >> 6):
            marks[mark] = 0
        for symbol in range(size):
            counts[symbol] = 0
        verdict[8:13] = 0
        verdict[12] = -1
        _weigh(n, width_bits, terms, logs[0], verdict)
        varying = _varying(words, down, keep)
    elif size <= _DENSE:
        for symbol in range(size):
            # Written in any case, and kept where it counts: a branch would be mispredicted in noise.
            x = counts[symbol]
            live[n_live] = x
            places[n_live] = symbol
            n_live += np.int64(x != 0)
            counts[symbol] = 0
    else:
        for mark in range(size >> 6):
            if marks[mark]:
                marks[mark] = 0
                for symbol in range(mark << 6, (mark + 1) << 6):
                    x = counts[symbol]
                    live[n_live] = x
                    places[n_live] = symbol
                    n_live += np.int64(x != 0)
                    counts[symbol] = 0
    if not has_no_table:
        for k in range(n_live):
            varying |= np.uint64(places[k] ^ places[0])
        weigh_counts(live[:n_live], places[:n_live], n, width_bits, max_live, terms, logs, room[_MARKS:], verdict)
    verdict[6] = np.int64(varying)
    full = max(np.int64(1), n) * width_bits << 20
    entropy = min(np.int64(3), verdict[4] * 4 // full)
    if verdict[4] * 10000 >= full * 9985:
        entropy = np.int64(FLAT)
    _set_features(n, width_bits, terms[0], entropy, varying, verdict)
    verdict[VERDICT - 2] = 0
    verdict[VERDICT - 1] = 0
    if is_open and width_bits > 1:
        _look_around(words, shift, width_bits, row_lag, row_block, verdict)


@kernel("slots", "hits", "verdict")
def judge_wide(
    words: Any, shift: int, width_bits: int, is_open: bool, row_lag: int, row_block: int, n_words: int, slots: Any,
    hits: Any, verdict: Any,
) -> None:  # fmt: skip
    """Judge fields of more than 16 bits, as `judge_narrow` does: without entropies, their literal is bit-packed.

    Parameters
    ----------
    words, shift, width_bits, is_open, row_lag, row_block
        Of `judge_narrow`.
    n_words : int
        Of the whole stream.
    slots : uint64 array, shape (SLOTS,)
    hits : int64 array, shape (SLOTS,)
        Zeros, and left so.
    verdict : int64 array, shape (VERDICT,)
        As that of `judge_narrow`; the third and seventh number stand for their values modulo 2**64. More than
        `MAX_DISTINCT` words count as if no word occurred twice.
    """
    n = words.size
    equal = _n_equal(words, shift, width_bits)
    down = np.uint64(shift)
    keep = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    kept = keep << down
    varying, largest = np.uint64(0), np.uint64(0)
    for i in range(n):
        varying |= np.uint64(words[i]) ^ np.uint64(words[0])
        largest = max(largest, np.uint64(words[i]) & kept)
    varying, largest = (varying >> down) & keep, largest >> down
    wrap = np.uint64(SLOTS - 1)
    n_distinct = 0
    for i in range(n):
        word = (np.uint64(words[i]) >> down) & keep
        place = ((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & wrap
        while hits[place] and slots[place] != word:
            place = (place + np.uint64(1)) & wrap
        if hits[place] == 0:
            n_distinct += 1
            if n_distinct > MAX_DISTINCT:
                break
            slots[place] = word
        hits[place] += 1
    verdict[:] = 0
    if n_distinct > MAX_DISTINCT:
        verdict[0], verdict[1] = n, n
    else:
        verdict[0] = n_distinct
        for slot in range(SLOTS):
            verdict[1] += np.int64(hits[slot] == 1)
            verdict[2] += np.int64(hits[slot] == 2)
    for slot in range(SLOTS):
        hits[slot] = 0
    verdict[5], verdict[6], verdict[7], verdict[12] = equal, np.int64(varying), np.int64(largest), -1
    verdict[14] = n_words * _bits_of(largest) << 8 if n else 0
    live = verdict[0]
    entropy = np.int64(3) if 2 * live > max(np.int64(1), n) else np.int64(1) if live > 256 else np.int64(0)
    _set_features(n, width_bits, n_words, entropy, varying, verdict)
    if is_open:
        _look_around(words, shift, width_bits, row_lag, row_block, verdict)
