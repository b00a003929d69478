"""Why a tensor got its program: the result of a search for people and for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from synth.cost import BYTE_Q8
from synth.synthesis import Synthesis
from synth.template import Template, Weighed


@dataclass(frozen=True, slots=True)
class Leaf:
    """One literal or constant of the winning program.

    Attributes
    ----------
    place : str
        The step and slot that it fills.
    type : str
        ``b[n]``.
    encoding : str
        Of a literal, ``const`` for a constant.
    n_bytes : int
        What it is expected to take.
    """

    place: str
    type: str
    encoding: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the prior held of one step of the winning program before it was tried.

    Attributes
    ----------
    production : str
    millibits : int
        -log2 of its chance, in 1/1000 bit.
    chance_percent : int
    """

    production: str
    millibits: int
    chance_percent: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """A search in words. All sizes are estimates; the archive's rows hold the exact ones.

    Attributes
    ----------
    program : str
    n_bytes, literal_bytes : int
        Of the winner, and of the words as one literal.
    leaves : tuple of Leaf
    runners_up : tuple of (str, int)
        Other finalists and their bytes.
    expectations : tuple of Expectation
        In the order of the program.
    expansions, budget : int
    stopped : str
        Why the search ended.
    found : tuple of (int, int, str)
        Expansions, bytes on the sample and program of each improvement.
    """

    program: str
    n_bytes: int
    literal_bytes: int
    leaves: tuple[Leaf, ...]
    runners_up: tuple[tuple[str, int], ...]
    expectations: tuple[Expectation, ...]
    expansions: int
    budget: int
    stopped: str
    found: tuple[tuple[int, int, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return asdict(self)

    def text(self) -> str:
        """Return the explanation as lines of text."""
        percent = 100 * self.n_bytes / max(1, self.literal_bytes)
        lines = [
            f"program     {self.program}",
            f"size        {self.n_bytes:,} bytes, {percent:.2f} % of the words as one literal ({self.literal_bytes:,})",
            f"search      {self.expansions} of {self.budget} expansions, then {_WHY.get(self.stopped, self.stopped)}",
        ]
        lines += ["leaves"]
        lines += [f"  {leaf.place:24} {leaf.type:16} {leaf.encoding:8} {leaf.n_bytes:>14,}" for leaf in self.leaves]
        lines += ["runners-up"] if self.runners_up else []
        lines += [f"  {n_bytes:>14,}  {program}" for program, n_bytes in self.runners_up]
        lines += ["what the prior expected"] if self.expectations else []
        lines += [f"  {step.production:24} {step.chance_percent:3} %" for step in self.expectations]
        lines += ["found on the way"]
        lines += [f"  after {expansions:4}  {n_bytes:>14,}  {program}" for expansions, n_bytes, program in self.found]
        return "\n".join(lines)


_WHY = {
    "budget": "the budget was used up",
    "exhausted": "nothing was left that could be expected to pay",
    "satisfied": "the program was tiny",
    "max_holes": "the graph had reached its limit",
}


def explain(synthesis: Synthesis) -> Explanation:
    """Return why `synthesis` found what it found."""
    return Explanation(
        program=str(synthesis.program),
        n_bytes=_bytes(synthesis.winner.cost_q8),
        literal_bytes=_bytes(synthesis.literal_q8),
        leaves=tuple(_leaves(synthesis.winner)),
        runners_up=tuple((_name(other.template), _bytes(other.cost_q8)) for other in synthesis.runners_up),
        expectations=tuple(_expectations(synthesis.template)),
        expansions=synthesis.expansions,
        budget=synthesis.budget,
        stopped=synthesis.stopped,
        found=tuple((step.expansions, _bytes(step.cost_q8), _name(step.template)) for step in synthesis.trace),
    )


def _leaves(weighed: Weighed) -> list[Leaf]:
    if not weighed.children:
        return [Leaf(weighed.tag, str(weighed.stream), weighed.encoding or "const", _bytes(weighed.cost_q8))]
    return [leaf for child in weighed.children for leaf in _leaves(child)]


def _expectations(template: Template | None) -> list[Expectation]:
    if template is None:
        return []
    bits = template.prior_q10
    here = Expectation(template.name, bits * 1000 >> 10, round(100 * 2 ** (-bits / 1024)))
    return [here, *(step for child in template.children for step in _expectations(child))]


def _name(template: Template | None) -> str:
    return "lit" if template is None else str(template)


def _bytes(cost_q8: int) -> int:
    return -(-cost_q8 // BYTE_Q8)
