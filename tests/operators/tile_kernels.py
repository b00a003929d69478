"""Run a family of kernels of tiles over a whole literal, as its encoding does; shared by the tests of all families."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.words import Words
from tests.operators import scaled_oracle as oracle
from tests.operators.scaled_cases import Case

SLACK = 64
GUARD = 0xA5
NO_LOWS = np.empty(0, np.uint8)


def encode(family: ModuleType, case: Case, room: int | None = None) -> oracle.Sections | None:
    """Return the sections, or None where the family gives up for want of `room` (bytes of stream, words of escapes)."""
    g, n_words = case.geometry, case.words.size
    tables = np.empty((g.n_tables, family.ENCODER_BYTES), np.uint8)
    family.encoder_tables(np.array(case.frequencies, np.uint16), tables)
    room = 2 * n_words + 1024 if room is None else room
    stream, escapes = np.zeros(room + SLACK, np.uint8), np.zeros(room + SLACK, np.uint16)
    states = np.empty(64 * g.groups, np.uint32)
    at = n_escapes = room
    blocks: list[bytes] = []
    calls = calls_of(case)
    for i, (start, stop, *arguments) in reversed(list(enumerate(calls))):
        columns, tile_scales = arguments[0], arguments[2]
        raw = np.zeros(8 * g.raw_bits * columns * tile_scales.size + SLACK, np.uint8)
        scratch = np.full(family.SCRATCH_BYTES_PER_COLUMN * columns + family.SCRATCH_BYTES, GUARD, np.uint8)
        at, n_escapes = family.encode_tiles(
            case.words[start:stop], *arguments, tables, raw, stream, at, states, escapes, n_escapes, scratch,
            i == len(calls) - 1,
        )  # fmt: skip
        if at < 0:
            return None
        blocks.insert(0, raw[: raw.size - SLACK].tobytes())
    raw_bytes = b"".join(blocks)
    n_seeded = oracle.seeded_bytes(8 * g.raw_bits * calls[-1][2], g)
    n_rest = n_words - calls[-1][1]
    return oracle.Sections(
        raw_bytes[: len(raw_bytes) - n_seeded],
        case.words[n_words - n_rest :].tobytes(),
        tuple(states.tolist()),
        tuple(escapes[n_escapes:room].tolist()),
        tuple(stream[at:room].view("<u2").tolist()),
    )


def decode(family: ModuleType, case: Case, sections: oracle.Sections) -> Words | None:
    """Return the words, or None where the family finds that the sections are damaged.

    Everything is checked for writes beyond its end. The payload is an array of its exact size.
    """
    g = case.geometry
    tables = np.empty((g.n_tables, family.DECODER_BYTES), np.uint8)
    family.decoder_tables(np.array(case.frequencies, np.uint16), tables)
    stream = np.array(sections.stream, "<u2").view(np.uint8)
    payload = np.concatenate((np.frombuffer(sections.raw, np.uint8), stream))
    payload.flags.writeable = False
    escapes = np.array(sections.escapes, np.uint16)
    states = np.array(sections.states, np.uint32)
    found = np.empty_like(case.words)
    raw_at, at, n_escapes = 0, len(sections.raw), 0
    calls = calls_of(case)
    for i, (start, stop, *arguments) in enumerate(calls):
        columns, tile_scales = arguments[0], arguments[2]
        scratch = np.full(family.SCRATCH_BYTES_PER_COLUMN * columns + family.SCRATCH_BYTES + SLACK, GUARD, np.uint8)
        words = np.full(stop - start + SLACK, GUARD, found.dtype)
        at, n_escapes = family.decode_tiles(
            payload, *arguments, tables, raw_at, at, payload.size, states, escapes, n_escapes, scratch[:-SLACK],
            NO_LOWS, words[:-SLACK], i == len(calls) - 1,
        )  # fmt: skip
        assert (scratch[-SLACK:] == GUARD).all()
        assert (words[-SLACK:] == GUARD).all()
        if at < 0:
            return None
        assert at <= payload.size
        found[start:stop] = words[:-SLACK]
        raw_at += 8 * g.raw_bits * columns * tile_scales.size
    if at != payload.size or n_escapes != escapes.size:
        return None
    n_rest = case.words.size - calls[-1][1]
    found[case.words.size - n_rest :] = np.frombuffer(sections.rest, case.words.dtype)
    return found


def calls_of(case: Case) -> list[Any]:
    """Return for the whole tiles, and for the tile of the tail, the words and what both directions are given."""
    scales, geometry = case.scales, case.geometry.array()
    columns, n_rows = len(scales.columns), len(scales.rows)
    order = oracle.row_order(scales.rows)
    tile_scales = [
        oracle.tile_scale([scales.rows[row] for row in order[first : first + 64]]) for first in range(0, n_rows, 64)
    ]
    calls = [_call(0, n_rows * columns, scales, order, tile_scales, geometry)]
    if n_tail := oracle.tail_columns(case.words.size - n_rows * columns):
        zeros = [0] * n_tail
        of_tail = replace(scales, columns=zeros, levels=zeros, flips=zeros)
        start = n_rows * columns
        calls.append(_call(start, start + 64 * n_tail, of_tail, list(range(64)), [scales.tail], geometry))
    return calls


def _call(
    start: int,
    stop: int,
    scales: oracle.Scales,
    rows: list[int],
    tile_scales: list[int],
    geometry: NDArray[np.int64],
) -> tuple[Any, ...]:
    order = oracle.column_order(scales.levels, scales.columns)
    return (
        start,
        stop,
        len(scales.columns),
        np.array(rows, np.int32),
        np.array(tile_scales, np.int32),
        np.array(order, np.int32),
        np.array(scales.columns, np.int32),
        np.array(scales.levels, np.uint8),
        np.array(scales.flips, np.uint8),
        geometry,
    )
