"""Settings of the search: the table ``[recipe.synth]`` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Everything that decides what the search finds, beside the words and the prior. Hashed with the recipe.

    Attributes
    ----------
    prior : {"learned", "uniform", "shipped"}
        Evidence that orders the search: the checkpoint's own on top of the shipped one, none, or the
        shipped one alone.
    order : {"default", "paper", "greedy", "depth1"}
        Key of the queue: estimated bits with a part of the prior's; the bits of the grammar alone, as
        published; estimated bits alone; or one level of operators, and no leaves in the context of scales.
    budget : int
        Most expansions of a tensor: one expansion is one production applied to one hole. 0 gives a literal.
    depth : int
        Levels of operators; constants and repetitions below them are free.
    disable : tuple of str
        Names of productions or families that are not offered; ``fixed`` for codebooks (`synth.booked`). A literal
        cannot be disabled.
    sample_words : int
        Words on which a tensor is judged that has more than `exact_words`.
    exact_words : int
        Most words that are judged whole.
    finish_words : int
        Words on which the finalists of a larger tensor are compared.
    finalists : int
        Programs that are compared at the end, the literal not counted.
    max_holes : int
        Most holes of a graph.
    max_held_bytes : int
        Most memory for the samples of the holes that may still be expanded.
    min_gain_ppm : int
        An expansion must be expected to save this part of the tensor, in millionths; 0 never stops early.
    coder : {"rans", "huffman"}
        Of leaves in the context of scales: the smaller one, or the one that is fast on any CPU.
    thorough : bool
        Whether such leaves are planned from all their words, which takes as long as to code them.
    share : bool
        Whether tensors whose names differ by numbers alone, and that look alike, share a program (`synth.roles`).
    """

    prior: Literal["learned", "uniform", "shipped"]
    order: Literal["default", "paper", "greedy", "depth1"]
    budget: int
    depth: int
    disable: tuple[str, ...]
    sample_words: int
    exact_words: int
    finish_words: int
    finalists: int
    max_holes: int
    max_held_bytes: int
    min_gain_ppm: int
    coder: Literal["rans", "huffman"]
    thorough: bool
    share: bool
