"""The prior over productions: how often each has been worth its expansion, by what a hole looks like.

Evidence is counted in six contexts, from the finest (dtype, place, width, all features) to the production
alone. Each context is smoothed towards the next coarser one, and a quarter of the result is uniform: what
was never seen keeps a chance. A production is a coin of its own (wins of offers), not a share of a whole:
several of one hole may be worth trying.

Counts are integers and so is what is derived from them. Source: the contexts follow PHOG (Bielik,
Raychev, Vechev, "PHOG: Probabilistic Model for Code", ICML 2016); there they are synthesised, here fixed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from operators.books import Books
from operators.errors import FormatError, UnsupportedError
from operators.program import parse
from synth.hole import Hole
from synth.logs import bits_q10

FORMAT: Final = 1
ALPHA: Final = 2
"""Weight of the coarser context, in offers."""
BASE_Q20: Final = (1 << 20) // 20
"""Chance of a production that was never seen."""
BASE_GAIN_Q10: Final = 20
"""Part of a literal that such a production saves where it wins."""
UNIFORM_PERCENT: Final = 25
MERGE_OFFERS: Final = 16
"""Most offers that a context of the base keeps when a checkpoint's own evidence comes on top."""
MAX_BYTES: Final = 16 << 20
MAX_COUNT: Final = 1 << 40

MAX_RANKED: Final = 1 << 14
"""Looks of holes that are remembered."""

Counts: TypeAlias = tuple[int, int, int]
"""Offers, wins, and the parts of the literal saved by the wins, each in 1/1024, summed up."""


class Rule(Protocol):
    """What a prior sees of a production."""

    @property
    def name(self) -> str:
        """What is counted."""

    @property
    def certain(self) -> bool:
        """Whether there is nothing to expect: it is known."""


_HEX: Final = re.compile("(?:[0-9a-f]{2})*")
R = TypeVar("R", bound=Rule)


@dataclass(frozen=True, slots=True)
class Belief:
    """What a prior expects of a production at a hole.

    Attributes
    ----------
    bits_q10 : int
        -log2 of the chance that it wins, in 1/1024 bit.
    chance_q20 : int
        The chance itself, before the uniform part is mixed in.
    gain_q10 : int
        Part of the hole's literal that it saves where it wins.
    """

    bits_q10: int
    chance_q20: int
    gain_q10: int


CERTAIN: Final = Belief(bits_q10(95, 100), 1 << 20, 1 << 10)
"""Of exact structure that a detector has seen."""
_IGNORANT: Final = Belief(bits_q10(1, 20), BASE_Q20, BASE_GAIN_Q10)


def contexts(hole: Hole) -> tuple[str, ...]:
    """Return the contexts of a hole, from fine to coarse."""
    dtype, tag, width = hole.setting.dtype.name, hole.tag, hole.stream.width_bits
    seen = hole.features
    return (
        f"{dtype}|{tag}|{width}|{''.join(map(str, seen))}",
        f"{dtype}|{tag}|{width}|{seen[0]}{seen[1]}{seen[6]}{seen[7]}",
        f"{dtype}|{tag}",
        f"|{tag}|{width}|{seen[6]}{seen[7]}",
        f"||{width}|{seen[0]}{seen[6]}{seen[7]}",
        "",
    )


@dataclass(frozen=True, slots=True)
class Remembered:
    """A program that calibration found for a tensor, for others of its role (`synth.roles`).

    Attributes
    ----------
    program : str
    bits_q18 : int
        What it took for a word, in 2**-18 bit.
    columns, n_words : int
        Words of a row, and of all, for which it was made; 0 where they do not matter.
    """

    program: str
    bits_q18: int
    columns: int
    n_words: int

    def fits(self, n_words: int, columns: int) -> bool:
        """Whether words may want it, so many in all and in a row."""
        return self.columns in (0, columns) and self.n_words in (0, n_words)


@dataclass(slots=True, eq=False)
class Prior:
    """Evidence about productions.

    Attributes
    ----------
    evidence : mapping of str to mapping of str to Counts
        By context, then by the name of the production.
    provenance : tuple of mappings
        What it was learned from; for people.
    informed : bool
        False for the uniform prior, by which nothing is expected and nothing stops early.
    programs : mapping of str to tuple of Remembered
        By role, those that were found first first.
    books : Books
        Those for the small tensors of a checkpoint (`synth.booked`).
    """

    evidence: Mapping[str, Mapping[str, Counts]]
    provenance: tuple[Mapping[str, Any], ...] = ()
    informed: bool = True
    programs: Mapping[str, tuple[Remembered, ...]] = field(default_factory=dict)
    books: Books = field(default_factory=Books)
    _ranked: dict[tuple[object, ...], list[tuple[Belief, Any]]] = field(default_factory=dict, repr=False)

    @classmethod
    def uniform(cls) -> Prior:
        """Return the prior that knows nothing."""
        return cls({}, informed=False)

    @classmethod
    @functools.cache
    def shipped(cls) -> Prior:
        """Return the prior that comes with the package, learned by `synth.learn`."""
        return cls.load(resources.files("synth").joinpath("prior.json").read_bytes())

    def ranked(self, hole: Hole, rules: tuple[R, ...]) -> list[tuple[Belief, R]]:
        """Return `rules` with what is expected of them at `hole`, the least likely first, of equals the last.

        The list is shared: it is not to be changed.
        """
        key = (hole.setting.dtype.name, hole.tag, hole.stream.width_bits, hole.features, rules)
        ranked = self._ranked.get(key)
        if ranked is None:
            if len(self._ranked) >= MAX_RANKED:
                self._ranked.clear()
            names = contexts(hole)
            ranked = [(CERTAIN if rule.certain else self.belief(names, rule.name), rule) for rule in rules]
            ranked.reverse()
            ranked.sort(key=lambda entry: entry[0].bits_q10, reverse=True)
            self._ranked[key] = ranked
        return ranked

    def belief(self, names: tuple[str, ...], production: str) -> Belief:
        """Return what is expected of a production at a hole with the contexts `names`."""
        return self._derive(names, production) if self.informed else _IGNORANT

    def _derive(self, names: tuple[str, ...], production: str) -> Belief:
        chance, gain = BASE_Q20, BASE_GAIN_Q10
        for name in reversed(names):
            counts = self.evidence.get(name, {}).get(production)
            if counts is not None:
                offers, wins, gains = counts
                chance = ((wins << 20) + ALPHA * chance) // (offers + ALPHA)
                gain = (gains + ALPHA * gain) // (wins + ALPHA)
        mixed = (chance * (100 - UNIFORM_PERCENT) + BASE_Q20 * UNIFORM_PERCENT) // 100
        return Belief(bits_q10(mixed, 1 << 20), chance, gain)

    def plus(self, own: Prior) -> Prior:
        """Return this prior with the evidence `own` on top.

        A context keeps its proportions but at most `MERGE_OFFERS` offers, so that a checkpoint's few tensors
        outweigh the many of others where they disagree.
        """
        merged: dict[str, dict[str, Counts]] = {}
        for context, productions in self.evidence.items():
            merged[context] = {name: _capped(counts) for name, counts in productions.items()}
        for context, productions in own.evidence.items():
            row = merged.setdefault(context, {})
            for name, (offers, wins, gains) in productions.items():
                before = row.get(name, (0, 0, 0))
                row[name] = (before[0] + offers, before[1] + wins, before[2] + gains)
        programs, books = {**self.programs, **own.programs}, own.books if len(own.books) else self.books
        return Prior(merged, self.provenance + own.provenance, programs=programs, books=books)

    def pruned(self, min_offers: int) -> Prior:
        """Return this prior without what was offered fewer times: a coarser context tells as much."""
        kept: dict[str, dict[str, Counts]] = {}
        for context, productions in self.evidence.items():
            row = {name: counts for name, counts in productions.items() if counts[0] >= min_offers}
            if row:
                kept[context] = row
        return Prior(kept, self.provenance, self.informed, self.programs, self.books)

    def dump(self) -> bytes:
        """Return canonical JSON: the same evidence is always the same bytes."""
        content = {
            "evidence": {
                context: {name: list(counts) for name, counts in productions.items()}
                for context, productions in self.evidence.items()
            },
            "format": FORMAT,
            "informed": self.informed,
            "programs": {
                role: [[one.program, one.bits_q18, one.columns, one.n_words] for one in known]
                for role, known in self.programs.items()
            },
            "provenance": list(self.provenance),
            **({"books": self.books.to_bytes().hex()} if len(self.books) else {}),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"

    @classmethod
    def load(cls, data: bytes) -> Prior:
        """Read what `dump` wrote.

        Raises
        ------
        FormatError
            The bytes are not a prior.
        UnsupportedError
            It was written by a newer version.
        """
        if len(data) > MAX_BYTES:
            raise FormatError(f"a prior of at most {MAX_BYTES} bytes", str(len(data)))
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError("a prior in JSON", str(error)) from None
        _require(isinstance(content, dict), "an object", content)
        version = content.get("format")
        _require(type(version) is int and version > 0, "a format number", version)
        if version > FORMAT:
            raise UnsupportedError(f"a prior of format {FORMAT}", str(version), "", "read it with a newer version")
        _require(
            set(content) | {"books"} == {"books", "evidence", "format", "informed", "programs", "provenance"},
            "the keys of a prior",
            sorted(content),
        )
        books = content.get("books", "")
        _require(isinstance(books, str) and _HEX.fullmatch(books) is not None, "books in hexadecimal", books)
        _require(type(content["informed"]) is bool, "true or false", content["informed"])
        provenance = content["provenance"]
        _require(isinstance(provenance, list) and all(isinstance(row, dict) for row in provenance), "rows", provenance)
        evidence = content["evidence"]
        _require(isinstance(evidence, dict), "contexts", evidence)
        for context, productions in evidence.items():
            _require(isinstance(productions, dict), "productions", productions, context)
            for name, counts in productions.items():
                valid = isinstance(counts, list) and len(counts) == 3 and all(type(count) is int for count in counts)
                valid = valid and 0 <= counts[1] <= counts[0] < MAX_COUNT and 0 <= counts[2] <= counts[1] << 10
                _require(valid, "offers, wins and gains", counts, f"{context} {name}")
                productions[name] = tuple(counts)
        programs = _programs(content["programs"])
        return cls(evidence, tuple(provenance), content["informed"], programs, Books.from_bytes(bytes.fromhex(books)))


def _programs(content: Any) -> dict[str, tuple[Remembered, ...]]:
    _require(isinstance(content, dict), "programs", content)
    programs = {}
    for role, known in content.items():
        _require(isinstance(known, list), "programs of a role", known, role)
        for value in known:
            valid = isinstance(value, list) and len(value) == 4 and isinstance(value[0], str)
            valid = valid and all(type(number) is int and number >= 0 for number in value[1:])
            _require(valid, "program, bits, columns and words", value, role)
            parse(value[0])  # or it raises FormatError
        programs[role] = tuple(Remembered(*value) for value in known)
    return programs


class Evidence:
    """Counts evidence for a `Prior`."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, list[int]]] = {}

    def add(self, hole: Hole, production: str, gain_q10: int | None) -> None:
        """Count one offer of a production, and a win of `gain_q10` unless that is None."""
        for context in contexts(hole):
            counts = self._counts.setdefault(context, {}).setdefault(production, [0, 0, 0])
            counts[0] += 1
            if gain_q10 is not None:
                counts[1] += 1
                counts[2] += gain_q10

    def prior(
        self, provenance: Iterable[Mapping[str, Any]] = (), programs: Mapping[str, tuple[Remembered, ...]] | None = None
    ) -> Prior:
        """Return the counts as a prior."""
        evidence = {
            context: {name: (counts[0], counts[1], counts[2]) for name, counts in sorted(productions.items())}
            for context, productions in sorted(self._counts.items())
        }
        return Prior(evidence, tuple(provenance), programs=programs or {})


def _capped(counts: Counts) -> Counts:
    offers, wins, gains = counts
    if offers <= MERGE_OFFERS:
        return counts
    kept = -(-wins * MERGE_OFFERS // offers)
    return MERGE_OFFERS, kept, gains * kept // max(1, wins)


def _require(valid: bool, expected: str, found: object, where: str = "") -> None:
    if not valid:
        raise FormatError(expected, repr(found)[:80], f"prior {where}".strip(), "use a prior that this package wrote")
