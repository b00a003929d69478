"""The search: what it finds, and that it is the same everywhere and within its limits."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.recipe import load
from operators.base import Stream
from operators.program import LIT, Literal, parse
from operators.run import encode
from operators.words import Words, dtype_of
from synth import Prior
from synth.grammar import PRODUCTIONS, menu_of, offers
from synth.hole import Setting
from synth.search import SATISFIED_Q8, TOP_EVERY, Search, forced_q8
from synth.steps import Ends, Period, Split
from synth.structured import Structured, bf16, structured
from synth.synthesis import _is_close
from synth.template import Template, Weighed
from tests.processes import ROOT
from tests.strategies import make_words
from tests.synth.support import encoded, options, search

ORDERS = ("default", "paper", "greedy", "depth1")


def tensor_of(words: Words, columns: int = 0, dtype: str | None = None) -> Structured:
    return Structured("", dtype, words.size // columns if columns else 1, columns or words.size, words)  # type: ignore[arg-type]


def weights(rows: int = 256, columns: int = 512, seed: int = 0) -> Structured:
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal((rows, 1)) * 0.3)
    return Structured("weights", "BF16", rows, columns, bf16(rng.standard_normal((rows, columns)) * 0.02 * scale))


def planted() -> dict[str, tuple[Structured, str]]:
    """Programs of three levels, with words that they produce and whose leaves are noise of their own kind."""
    rng = np.random.default_rng(3)
    n = 24576
    steps = rng.choice([0, 1, 2, 1023, 1022], n, p=[0.4, 0.2, 0.1, 0.2, 0.1]).cumsum() & 1023
    low = rng.integers(0, 64, n)
    walk = (low | steps << 6).astype(np.uint16)
    values = np.sort(rng.integers(0, 1 << 32, 16))
    chained = (values[rng.integers(0, 16, n)].cumsum() & 0xFFFFFFFF).astype(np.uint32)
    bytes_ = np.empty((n // 64, 64), np.int64)
    bytes_[0] = rng.integers(0, 256, 64)
    deltas = rng.choice(16, (n // 64, 64), p=np.array([2**-1, *[2**-1 / 15] * 15]))
    bytes_[1:] = deltas[1:]
    rows = np.bitwise_xor.accumulate(bytes_, axis=0).astype(np.uint8)
    book = np.sort(rng.choice(1 << 16, 64, replace=False)).astype(np.uint16)
    picks = np.bitwise_xor.accumulate(rng.choice(64, (n // 128, 128), p=np.array([0.7, *[0.3 / 63] * 63])), axis=0)
    return {
        "field of a walk": (tensor_of(walk), "merge[6,10](lit, scan_add[1](lit, merge[9,1](lit, lit)))"),
        "walk over a codebook": (tensor_of(chained), "scan_add[1](lit, dictionary[16](lit, unpack[2](lit)))"),
        "rows of packed bytes": (
            tensor_of(rows.reshape(-1).view(np.uint32), 16), "unpack[8](scan_xor[64](lit, merge[4,4](lit, lit)))",
        ),
        "codebook of a walk": (
            tensor_of(book[picks].reshape(-1), 128), "dictionary[64](lit, scan_xor[128](lit, merge[5,1](lit, lit)))",
        ),
    }  # fmt: skip


PLANTED = planted()


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_programs_of_three_levels_are_recovered(name: str) -> None:
    tensor, text = PLANTED[name]
    known = encode(parse(text), tensor.words)
    assert known is not None
    found = encoded(search(tensor, budget=256), tensor.words)
    assert len(found.record) <= 1.02 * len(known.record)


def test_a_search_is_repeatable() -> None:
    tensor = weights()
    first, second = search(tensor, budget=128), search(tensor, budget=128)
    assert first.program == second.program
    assert first.trace == second.trace


SMALL = """
import json, sys
import numpy as np
from synth import Prior
from synth.structured import structured
from tests.synth.support import search
found = []
for tensor in list(structured(4096, 5))[::2]:
    if tensor.words.size <= 4096 and tensor.name not in ("MXFP4 blocks", "2 of 4 zero"):
        for prior in (Prior.uniform(), Prior.shipped()):
            result = search(tensor, prior, budget=5, exact_words=512, sample_words=512, finish_words=512)
            found.append([str(result.program), result.expansions, [step.cost_q8 for step in result.trace]])
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize("environment", [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "NUMBA_DISABLE_JIT": "1"}])
def test_neither_hash_seed_nor_jit_changes_anything(environment: dict[str, str]) -> None:
    import os

    outputs = [
        subprocess.run(
            [sys.executable, "-c", SMALL], check=True, capture_output=True, cwd=ROOT, env={**os.environ, **changes}
        ).stdout
        for changes in ({"PYTHONHASHSEED": "0"}, environment)
    ]
    assert len(json.loads(outputs[0])) > 10
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_finds_a_program_for_weights(order: str) -> None:
    tensor = weights()
    found = search(tensor, budget=128, order=order)
    assert found.winner.cost_q8 < found.literal_q8
    encoded(found, tensor.words)


def test_depth_one_tries_the_root_alone() -> None:
    tensor = PLANTED["field of a walk"][0]
    shallow, deep = search(tensor, budget=256, order="depth1"), search(tensor, budget=256)
    assert all(isinstance(child.op, Literal) for child in shallow.program.children)
    assert deep.winner.cost_q8 < shallow.winner.cost_q8


def test_ends_are_not_looked_for_where_only_a_sample_is_at_hand() -> None:
    tensor = weights(1024, 1024)
    root = Setting(dtype_of("BF16"), 16384, 32768).root(tensor.words, tensor.columns)
    expansion = Split((7, 9), "two").expand(root)
    assert expansion is not None
    for step in (Ends(at_start=True), Ends(at_start=False), Period()):
        assert all(step.expand(child) is None for child in expansion[1])


def test_a_field_is_cut_out_of_many_words_only_where_they_repeat() -> None:
    setting = Setting(dtype_of("BF16"), 16384, 32768)
    noise = weights(1024, 1025)
    rows = np.tile(noise.words[: 64 * 1025], 17)
    step = Split((15, 1), "sign", keeps_matches=True)
    for words, is_cut in ((noise.words, False), (rows, True), (noise.words[: 256 * 1025], True)):
        expansion = step.expand(setting.root(words, 1025))
        assert expansion is not None
        assert (expansion[1][0].region is not None) == is_cut


@pytest.mark.parametrize("budget", [0, 1, 3, 20])
def test_no_more_than_the_budget_is_used(budget: int) -> None:
    found = search(weights(), budget=budget)
    assert found.expansions <= budget
    if budget == 0:
        assert found.program == LIT


def test_a_small_tensor_has_a_small_budget() -> None:
    found = search(weights(2, 256))
    assert found.budget == 4 == found.expansions


def test_more_budget_is_never_worse() -> None:
    tensor = PLANTED["field of a walk"][0]
    costs = [search(tensor, budget=budget).winner.cost_q8 for budget in (0, 4, 16, 64, 256)]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("other_whole", "other_part", "is_close"), [(1000, 100, False), (1004, 104, True), (1030, 130, False)]
)
def test_a_larger_sample_is_taken_where_it_may_decide(other_whole: int, other_part: int, is_close: bool) -> None:
    # Two programs of equal steps that differ in one leaf: not at all, by less than samples err, by more.
    leaves = [Template("lz", None, (), 0), Template("lz" if other_part == 100 else "raw", None, (), 0)]
    whole, part = Stream(16, 1000), Stream(7, 1000)
    programs = [
        Weighed(
            Template("cut", Split((7, 9), "cut.7"), (leaf, None), prior), "root", whole, cost, "",
            (Weighed(leaf, "cut.7/0", part, cost_below, "", ()), Weighed(None, "cut.7/1", part, 900, "", ())),
        )
        for leaf, cost, cost_below, prior in zip(leaves, (1000, other_whole), (100, other_part), (5, 6), strict=True)
    ]  # fmt: skip
    assert _is_close(*programs) == is_close


def test_a_part_that_weighs_little_needs_no_larger_sample() -> None:
    few = Weighed(Template("raw", None, (), 0), "rows/2", Stream(16, 10), 50, "", ())
    fewer = Weighed(Template("lz", None, (), 0), "rows/2", Stream(16, 10), 48, "", ())
    many = Weighed(None, "rows/1", Stream(16, 1000), 950, "", ())
    step = Split((7, 9), "cut.7")
    one, other = (
        Weighed(
            Template("cut", step, (None, last.template), 0), "root", Stream(16, 1000), 950 + last.cost_q8, "",
            (many, last),
        )
        for last in (fewer, few)
    )  # fmt: skip
    assert not _is_close(one, other)
    assert _is_close(many, replace(many, template=few.template))


def test_one_expansion_in_four_is_of_the_first_level() -> None:
    # A prior that knows of the root that one step wins there alone, and of all else that anything does.
    names = [production.name for production in PRODUCTIONS]
    never, always = (10_000, 1, 0), (10_000, 9_999, 9_999)
    prior = Prior({"BF16|root": dict.fromkeys(names, never) | {"float.0": always}, "": dict.fromkeys(names, always)})
    setting, tensor = Setting(dtype_of("BF16"), 16384, 32768), weights()
    for budget in (8, 16, 48):
        found = Search(setting.root(tensor.words, tensor.columns), options(min_gain_ppm=0, disable=("scaled",)))
        found.run(prior, budget)
        tried = len(found.root.edges) + len(found.root.refused)
        assert tried >= budget // TOP_EVERY
        assert len(found.holes) > 1 + tried, "the rest goes below"


def test_disabled_productions_are_not_used() -> None:
    tensor = weights()
    names = [production.name for production in PRODUCTIONS]
    families = sorted({production.family for production in PRODUCTIONS})
    assert search(tensor, budget=64, disable=tuple(names)).program == LIT
    assert search(tensor, budget=64, disable=tuple(families)).program == LIT
    without = search(tensor, budget=256, disable=("float", "scaled"))
    assert all("float" not in str(step.template) for step in without.trace)
    assert "merge" in str(without.program)


def test_limits_on_holes_memory_and_depth_hold() -> None:
    tensor = weights()
    few = search(tensor, budget=512, max_holes=40)
    assert few.stopped == "max_holes"
    setting = Setting(dtype_of("BF16"), 16384, 32768)
    tight = Search(setting.root(tensor.words, tensor.columns), options(max_held_bytes=100_000, max_holes=1 << 20))
    tight.run(Prior.uniform(), 512)
    assert tight.held_bytes <= 100_000
    for depth in (1, 2):
        shallow = Search(setting.root(tensor.words, tensor.columns), options(depth=depth))
        shallow.run(Prior.uniform(), 512)
        assert max(hole.depth for hole in shallow.holes) == depth


def test_a_search_stops_where_the_prior_expects_nothing() -> None:
    tensor = weights(1024, 1024)
    eager, patient = search(tensor, Prior.shipped(), min_gain_ppm=100), search(tensor, Prior.shipped(), min_gain_ppm=0)
    assert eager.stopped == "exhausted"
    assert eager.expansions <= 32 < patient.expansions
    assert eager.winner.cost_q8 <= patient.winner.cost_q8 * 1.001


def cost_at_the_end(tensor: Structured, *, bounded: bool) -> int:
    setting = Setting(dtype_of(None), 1 << 16, 1 << 16)
    found = Search(setting.root(tensor.words, 8), options(depth=2, max_holes=1 << 20, max_held_bytes=1 << 30))
    if not bounded:
        found._cannot_matter = found._cannot_win = lambda *_: False  # type: ignore[method-assign, assignment]
    found.run(Prior.uniform(), 1 << 20)
    assert found.stopped in ("exhausted", "satisfied")
    # A satisfied search may end at any tiny program.
    return max(found.root.best_q8, SATISFIED_Q8)


@given(
    st.sampled_from(("few", "skewed", "periodic", "runs", "random")),
    st.sampled_from((8, 16, 32)),
    st.sampled_from((64, 200)),
    st.integers(0, 1000),
)
def test_the_bounds_are_admissible(kind: str, width_bits: int, n_words: int, seed: int) -> None:
    tensor = tensor_of(make_words(kind, width_bits, n_words, seed), 8)
    assert cost_at_the_end(tensor, bounded=True) == cost_at_the_end(tensor, bounded=False)


def test_the_bound_of_the_last_level_lets_through_what_can_win() -> None:
    # Skewed bits, noise, skewed bits: a second cut saves the table of thousands of words.
    rng = np.random.default_rng(6)
    skewed = rng.geometric(0.7, (2, 4000)).clip(1, 15)
    words = (skewed[0] | rng.integers(0, 64, 4000) << 4 | skewed[1] << 10).astype(np.uint16)
    costs = [cost_at_the_end(tensor_of(words, 8), bounded=bounded) for bounded in (True, False)]
    one_level = search(tensor_of(words), budget=512, depth=1, exact_words=1 << 16).winner.cost_q8
    assert costs[0] == costs[1] < 0.98 * one_level


def test_an_improvement_below_wakes_holes_that_could_not_matter() -> None:
    # Without waking, the graph would be left with holes that an improvement elsewhere has made worth while.
    tensor = PLANTED["walk over a codebook"][0]
    setting = Setting(dtype_of(None), 1 << 16, 1 << 16)
    found = Search(setting.root(tensor.words, 0), options(max_holes=1 << 20, max_held_bytes=1 << 30))
    found.run(Prior.uniform(), 600)
    assert all(found._cannot_matter(item.hole, forced_q8(item.hole)) for item in found._waiting)


def test_costs_of_the_graph_add_up() -> None:
    tensor = weights()
    setting = Setting(dtype_of("BF16"), 16384, 32768)
    found = Search(setting.root(tensor.words, tensor.columns), options())
    found.run(Prior.uniform(), 200)
    for hole in found.holes:
        if hole.best_edge is None:
            assert hole.best_q8 == hole.literal.bits_q8
        else:
            assert hole.best_q8 == hole.best_edge.cost_q8 < hole.literal.bits_q8
        for edge in hole.edges:
            assert edge.cost_q8 == edge.overhead_q8 + sum(child.best_q8 for child in edge.children)
    traced = [step.cost_q8 for step in found.improvements]
    assert all(later < earlier for earlier, later in itertools.pairwise(traced))
    assert traced[-1] == found.root.best_q8


@pytest.mark.parametrize("tensor", [*structured(1 << 12, 8)][::3], ids=lambda tensor: tensor.name)
def test_what_a_detector_says_of_a_look_holds_for_all_holes_of_it(tensor: Structured) -> None:
    setting = Setting(dtype_of(tensor.dtype), 1024, 2048)
    found = Search(setting.root(tensor.words, tensor.columns), options())
    found.run(Prior.uniform(), 100)
    for hole in found.holes:
        seen = [one for one in menu_of(hole, options().depth, frozenset()) if one.applies is None or one.applies(hole)]
        offered = offers(hole, options().depth)
        assert offered == tuple(seen) or (len(offered) == 1 and offered[0] in seen)


def test_the_graph_is_released() -> None:
    tensor = weights()
    setting = Setting(dtype_of("BF16"), 16384, 32768)
    found = Search(setting.root(tensor.words, tensor.columns), options())
    found.run(Prior.uniform(), 50)
    edge = found.root.edges[0]
    found.release()
    assert not found.holes
    assert not edge.hole.edges


def test_the_program_of_a_tensor_fits_its_segments() -> None:
    for tensor in structured(1 << 17, 2):
        found = search(tensor, budget=32)
        rows = max(1, tensor.rows // 4)
        for part in np.array_split(tensor.words, tensor.words.size // max(1, rows * tensor.columns) or 1):
            segment = np.ascontiguousarray(part)
            record = encode(found.program_for(segment), segment)
            assert record is not None, (tensor.name, str(found.program_for(segment)))


@given(
    st.sampled_from(("few", "skewed", "periodic", "runs", "ramp", "constant")), st.integers(0, 200), st.integers(0, 200)
)
def test_a_program_fits_other_words_too(kind: str, seed: int, other: int) -> None:
    found = search(tensor_of(make_words(kind, 16, 400, seed), 20, "BF16"), budget=24)
    for words in (
        make_words("random", 16, 400, other),
        make_words("few", 16, 37, other),
        make_words("constant", 16, 3, other),
    ):
        assert encode(found.program_for(words), words) is not None


def test_defaults_are_stated() -> None:
    assert load().recipe.synth == options()
