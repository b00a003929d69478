"""The prior of a checkpoint: learned from a few of its tensors, on top of the one that ships.

Each tensor is searched twice on one graph: in the order of the base prior, then in an order that is
uniform but for hashed ties, so that a biased teacher does not teach its bias alone. That costs ten times the first,
and is left out where tensors of the role had it. Wins are the steps of the pruned winner and, at the holes beside it,
the best step of each. Losses are all others that were tried: they teach where to stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from operators.words import Words
from synth.hole import Edge, Hole, Setting
from synth.options import SearchOptions
from synth.prior import Evidence, Prior, Remembered
from synth.roles import MAX_KNOWN, remembered_as, role_of, smallest, written
from synth.search import Search
from synth.synthesis import MIN_BUDGET, Synthesis, finish
from synth.template import Template

ORDERED_EXPANSIONS = 256
SHUFFLED_EXPANSIONS = 256
BYTES_PER_EXPANSION = 128
"""A small tensor has fewer expansions of either kind: one for so many bytes, so that it costs no more than its part."""
SHUFFLED_TENSORS = MAX_KNOWN
"""Tensors of a role that are searched in both orders: more of them teach the same."""
MAX_TENSORS = 24
"""Measured: 8 to 16 tensors teach, 1 or 2 are worthless; more are there for the programs of their roles."""


@dataclass(frozen=True, slots=True)
class TensorSample:
    """A region of a tensor to learn from.

    Attributes
    ----------
    words : Words
        Whole rows, at most a few MiB: more is sampled away.
    dtype : str or None
    rows, columns : int
        As for `synthesise`.
    name : str or None
        Of the tensor, so that its program may serve others of its role.
    """

    words: Words
    dtype: str | None
    rows: int
    columns: int
    name: str | None = None


def calibrate(samples: Iterable[TensorSample], options: SearchOptions, base: Prior) -> Prior:
    """Return `base` with the evidence of `samples` on top.

    Parameters
    ----------
    samples : iterable of TensorSample
        8 and more, over all kinds of tensors of the checkpoint: dtypes, sizes, roles. One or two are worthless.
        Those beyond `MAX_TENSORS` are not looked at. The words of one are not kept once the next is asked for.
    options : SearchOptions
        `budget` does not matter.
    base : Prior
    """
    evidence = Evidence()
    programs: dict[str, tuple[Remembered, ...]] = {}
    seen: Counter[str] = Counter()
    for index, sample in enumerate(islice(samples, MAX_TENSORS)):
        columns = sample.columns if sample.rows > 1 else 0
        role = role_of(sample.name, sample.words, sample.dtype, columns) if sample.words.size else ""
        seen[role] += 1
        seed = index if seen[role] <= SHUFFLED_TENSORS else None
        found = learn_from(sample, options, base, evidence, seed)
        if options.share and sample.words.size:
            known = programs.setdefault(role, ())
            encoded = written(found.program, sample.words)
            if encoded is None or found.is_missed(encoded.body_bytes):
                found, encoded = smallest(found, encoded, sample.words, partial(written, words=sample.words))
            if encoded is not None and len(known) < MAX_KNOWN:
                remembered = remembered_as(found, sample.words, columns, encoded)
                if remembered.program not in [one.program for one in known]:
                    programs[role] = (*known, remembered)
    return base.plus(evidence.prior(programs=programs))


def learn_from(
    sample: TensorSample, options: SearchOptions, base: Prior, evidence: Evidence, seed: int | None
) -> Synthesis:
    """Search one tensor and count what was worth its expansion; return what was found.

    With a `seed` it is searched in an order of that too.
    """
    columns = sample.columns if sample.rows > 1 and 1 < sample.columns < sample.words.size else 0
    setting = Setting.of(sample.dtype, options)
    search = Search(setting.root(sample.words, columns), options)
    most = max(MIN_BUDGET, sample.words.nbytes // BYTES_PER_EXPANSION)
    ordered = min(ORDERED_EXPANSIONS, most)
    search.run(base, ordered)
    if seed is not None:
        search.run(Prior.uniform(), ordered + min(SHUFFLED_EXPANSIONS, most), shuffle=seed)
    found = finish(search, setting, sample.words, columns, search.expansions, release=False)
    count(evidence, search, found.winner.template)
    search.release()
    return found


def count(evidence: Evidence, search: Search, winner: Template | None) -> None:
    """Count wins and losses at all holes of a search.

    At the holes of the winning program its steps win, as it was pruned on more words than were searched. At
    any other hole the best step wins, if one was better than a literal.
    """
    wins = dict(_followed(search.root, winner))
    for hole in search.holes:
        won = wins.get(id(hole), hole.best_edge)
        for edge in hole.edges:
            gain_q10 = None
            if edge is won:
                gain_q10 = max(0, hole.literal.bits_q8 - edge.cost_q8) * 1024 // max(1, hole.literal.bits_q8)
            evidence.add(hole, edge.name, gain_q10)
        for name in hole.refused:
            evidence.add(hole, name, None)


def _followed(hole: Hole, template: Template | None) -> Iterator[tuple[int, Edge | None]]:
    """Yield the holes on the way of a winning program, each by its identity, with the step that it takes there."""
    won = None
    if template is not None:
        won = next((edge for edge in hole.edges if edge.name == template.name and edge.step == template.step), None)
    yield id(hole), won
    if won is not None and template is not None:
        for child, below in zip(won.children, template.children, strict=True):
            yield from _followed(child, below)


def learn(samples: Iterable[TensorSample], options: SearchOptions, provenance: Iterable[Mapping[str, Any]]) -> Prior:
    """Return a prior learned from scratch, as the shipped one is."""
    evidence = Evidence()
    for index, sample in enumerate(samples):
        learn_from(sample, options, Prior.uniform(), evidence, seed=index)
    return evidence.prior(provenance)
