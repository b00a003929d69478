"""Literals for the encoding `scaled`: words that mostly fit their scales, and tables that can code them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from operators.words import Words
from tests.operators import scaled_oracle as oracle

RARE_SLOTS = 128
"""Most slots of symbols whose frequency is below 16."""


@dataclass(frozen=True, repr=False)
class Case:
    words: Words
    scales: oracle.Scales
    frequencies: list[oracle.Table]
    geometry: oracle.Geometry

    def __repr__(self) -> str:
        return f"<{self.words.size} words, {len(self.scales.columns)} columns, {self.geometry}>"

    def sections(self) -> oracle.Sections:
        return oracle.encode(self.words.tolist(), self.scales, self.frequencies, self.geometry)


def legal_table(counts: Sequence[int], rng: np.random.Generator) -> oracle.Table:
    """Return frequencies roughly in proportion to `counts`, rare ones below 16 where the rule allows it."""
    live = [symbol for symbol in range(64) if counts[symbol]]
    if not live:
        return (0,) * 64
    if len(live) == 1:
        live.append((live[0] + 1) % 64)
    table, total, rare_left = [0] * 64, sum(counts), RARE_SLOTS
    for symbol in live:
        share = max(1, counts[symbol] * 3000 // total)
        table[symbol] = share
        if share < 16:
            table[symbol] = int(rng.integers(1, 16)) if rng.integers(2) else 16
            if table[symbol] < 16 and (table[symbol] > rare_left or len(live) == 2):
                table[symbol] = 16
            rare_left -= table[symbol] if table[symbol] < 16 else 0
    first = max(live, key=lambda symbol: table[symbol])
    table[first] += 4096 - sum(table)
    assert min(table[symbol] for symbol in live) > 0
    assert max(table) < 4096
    assert sum(f for f in table if f < 16) <= RARE_SLOTS
    return tuple(table)


def make_case(
    geometry: oracle.Geometry, columns: int, n_tiles: int, n_tail: int, kind: str = "skewed", seed: int = 0
) -> Case:
    """Return `n_tiles` whole tiles and `n_tail` more words.

    `kind` says how symbols fall: "skewed", "flat", "escapes" (half of them) or "constant" (words).
    """
    rng = np.random.default_rng(seed)
    g = geometry
    octaves = 1 << g.field_bits - g.fraction_bits
    middle = int(rng.integers(-1, octaves + 1)) * 8
    signs = g.signed == 2
    scales = oracle.Scales(
        rows=(middle + rng.integers(-9, 10, 64 * n_tiles)).tolist(),
        columns=rng.integers(-6, 7, columns).tolist(),
        levels=rng.integers(0, 5 if signs else 1, columns).tolist(),
        flips=rng.integers(0, 2 if signs else 1, columns).tolist(),
        tail=middle,
    )
    n_words = 64 * columns * n_tiles + n_tail
    words = rng.integers(0, 1 << g.width_bits, n_words)
    if kind == "constant":
        words[:] = rng.integers(0, 1 << g.width_bits)
    else:
        for tile in oracle.tiles(n_words, scales, g):
            for vector in tile.vectors:
                symbols = rng.geometric(0.2, 64) - 1 if kind == "skewed" else rng.integers(0, 64, 64)
                if kind == "escapes":
                    symbols[rng.integers(0, 2, 64) > 0] = oracle.ESCAPE
                fields = np.clip(vector.top - symbols, 0, None)
                fields[symbols >= oracle.ESCAPE] = rng.integers(0, 1 << g.field_bits, int((symbols >= 63).sum()))
                raws = rng.integers(0, 1 << g.raw_bits, 64)
                words[vector.words] = [
                    oracle.merge(int(f), int(r), vector.flip, g) for f, r in zip(fields, raws, strict=True)
                ]
    counts = np.zeros((g.n_tables, 64), np.int64)
    for tile in oracle.tiles(n_words, scales, g):
        for vector in tile.vectors:
            for i in vector.words:
                counts[vector.table, oracle.symbol_of(oracle.split(int(words[i]), vector.flip, g)[0], vector.top)] += 1
    if seed % 2:  # some symbols get no slots
        dropped = (rng.random(counts.shape) < 0.1) & (counts > 0)
        dropped[:, oracle.ESCAPE] = False
        counts[:, oracle.ESCAPE] += (counts * dropped).sum(axis=1)
        counts[dropped] = 0
    frequencies = [legal_table(row.tolist(), rng) for row in counts]
    return Case(words.astype(f"<u{g.width_bits // 8}"), scales, frequencies, g)


@st.composite
def geometries(draw: st.DrawFn) -> oracle.Geometry:
    width_bits, signed = draw(st.sampled_from([8, 16])), draw(st.integers(0, 2))
    field_bits = draw(st.integers(1, width_bits - (signed > 0)))
    return oracle.Geometry(
        width_bits,
        width_bits - (signed > 0) - field_bits,
        draw(st.integers(0, field_bits)),
        signed,
        draw(st.integers(0, 3)),
        draw(st.integers(1, 2)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return make_case(
        draw(geometries()),
        2 * draw(st.integers(1, 20)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([0, 1, 127, 128, 200, 1000])),
        draw(st.sampled_from(["skewed", "flat", "escapes", "constant"])),
        draw(st.integers(0, 1 << 32)),
    )
