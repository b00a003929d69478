"""What every registered operator and encoding must do; being registered is enough to be tested here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import Encoding, Operator, Profile, Source, Stream
from operators.errors import ArchiveError
from operators.literals.profile import Profiler
from operators.program import LIT, Literal, Node, parse
from operators.registry import CONDITIONED, ENCODINGS, OPERATORS
from operators.run import encode, execute
from operators.words import Words, container, mask_of
from tests.strategies import KINDS, WIDTHS, Case, applications, cases, damage

EVERY_OPERATOR = pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
EVERY_ENCODING = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda encoding: encoding.name)
SEGMENT_WIDTHS = (8, 16, 32, 64)


class ArraySource(Source):
    """Gives the words of an array, in order."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def read(self, out: Words) -> None:
        out[:] = self.words[: out.size]
        self.words = self.words[out.size :]


def profile_of(words: Words, stream: Stream) -> Profile:
    profiler = Profiler(stream)
    if words.size:
        profiler.add(words)
    return profiler.finish()


def read_in_pieces(source: Source, stream: Stream, pieces: Sequence[int]) -> Words:
    """Read a whole stream, in pieces of the given sizes again and again."""
    out = stream.empty()
    done = index = 0
    while done < out.size:
        taken = min(pieces[index % len(pieces)], out.size - done)
        source.read(out[done : done + taken])
        done += taken
        index += 1
    return out


def assert_same(left: Words, right: Words) -> None:
    assert left.dtype == right.dtype
    assert left.tobytes() == right.tobytes()


PIECES = st.lists(st.integers(1, 400), min_size=1, max_size=3)


@EVERY_OPERATOR
@given(case=cases(), pieces=PIECES)
def test_an_operator_gives_back_what_its_targets_came_from(
    operator: type[Operator], case: Case, pieces: list[int]
) -> None:
    words, stream = case.words, case.stream
    for op in applications(operator, case):
        targets, again = op.targets(words, stream), op.targets(words, stream)
        children = op.children(stream)
        assert targets is not None
        assert again is not None
        assert len(targets) == len(children) == op.arity
        assert type(op).from_params(op.params) == op
        for target, twice, child in zip(targets, again, children, strict=True):
            assert target.size == child.n_words
            assert target.dtype == container(child.width_bits)
            assert int(target.max(initial=0)) <= mask_of(child.width_bits)
            assert_same(target, twice)
            target.flags.writeable = False
        sources = [ArraySource(target) for target in targets]
        assert_same(read_in_pieces(op.source(sources, stream), stream, pieces), words)
        assert_same(words, case.words)


@EVERY_OPERATOR
@given(case=cases(), cut=st.floats(0, 1))
def test_targets_of_a_pointwise_operator_can_be_made_in_parts(operator: type[Operator], case: Case, cut: float) -> None:
    words, stream = case.words, case.stream
    middle = int(cut * words.size)
    for op in applications(operator, case):
        if not op.pointwise:
            continue
        whole, first, second = (
            op.targets(words, stream),
            op.targets(words[:middle], stream),
            op.targets(words[middle:], stream),
        )
        assert whole is not None
        assert first is not None
        assert second is not None
        for parts in zip(whole, first, second, strict=True):
            assert_same(parts[0], np.concatenate(parts[1:]))


@EVERY_OPERATOR
def test_an_operator_is_reached_by_these_tests_at_every_width(operator: type[Operator]) -> None:
    reached = {
        (width, len(op.params))
        for width in WIDTHS
        for kind in KINDS
        for op in applications(operator, Case(kind, Stream(width, 257), 5))
    }
    widths = {width for width, _ in reached}
    assert widths >= {8, 16, 32, 64}
    assert any(width % 8 for width in widths)


@EVERY_OPERATOR
@given(
    params=st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 20), max_size=5),
    stream=st.builds(Stream, st.sampled_from(WIDTHS), st.integers(0, 40)),
)
def test_parameters_fit_or_are_refused(operator: type[Operator], params: list[int], stream: Stream) -> None:
    try:
        op = operator.from_params(tuple(params))
        children = op.children(stream)
    except ArchiveError:
        return
    assert len(children) == op.arity
    assert all(1 <= child.width_bits <= 64 and child.n_words >= 0 for child in children)
    assert op.scratch_bytes(stream) >= 0
    assert parse(str(Node(op, (LIT,) * op.arity))) == Node(op, (LIT,) * op.arity)


@EVERY_OPERATOR
@given(case=cases(SEGMENT_WIDTHS, 400))
def test_a_record_of_every_operator_restores(operator: type[Operator], case: Case) -> None:
    words = case.words
    for op in applications(operator, case):
        encoded = encode(Node(op, (LIT,) * op.arity), words)
        assert encoded is not None
        assert_same(execute(encoded.record, n_bytes=words.nbytes), words)
        assert encode(encoded.program, words) == encoded


@EVERY_ENCODING
@given(case=cases(), pieces=PIECES)
def test_an_encoding_gives_back_its_words(encoding: Encoding, case: Case, pieces: list[int]) -> None:
    words, stream = case.words, case.stream
    plan = encoding.plan(profile_of(words, stream))
    if plan is None:
        return
    payloads = []
    for _ in range(2):
        writer = plan.writer()
        if words.size:
            writer.add(words)
        payloads.append(bytes(writer.finish()))
    assert payloads[0] == payloads[1]
    assert len(payloads[0]) <= plan.n_bytes
    assert_same(words, case.words)
    assert_same(read_in_pieces(encoding.source(memoryview(payloads[0]), stream), stream, pieces), words)


@EVERY_ENCODING
def test_an_encoding_is_reached_by_these_tests(encoding: Encoding) -> None:
    planned = [
        case
        for width in WIDTHS
        for kind in KINDS
        if encoding.plan(profile_of((case := Case(kind, Stream(width, 1024), 5)).words, case.stream)) is not None
    ]
    assert len(planned) >= len(KINDS)


@EVERY_ENCODING
@given(case=cases(max_words=300), data=st.data())
def test_a_damaged_payload_is_refused_or_gives_words(encoding: Encoding, case: Case, data: st.DataObject) -> None:
    """The digest of the record tells damage from words; a payload alone must only never do harm."""
    words, stream = case.words, case.stream
    plan = encoding.plan(profile_of(words, stream))
    if plan is None:
        return
    writer = plan.writer()
    if words.size:
        writer.add(words)
    payload = bytes(writer.finish())
    damaged = data.draw(damage(payload)) if payload else data.draw(st.binary(min_size=1, max_size=9))
    out = stream.empty()
    try:
        encoding.source(memoryview(damaged), stream).read(out)
    except ArchiveError:
        return
    assert int(out.max(initial=0)) <= mask_of(stream.width_bits)


@EVERY_ENCODING
@given(case=cases(SEGMENT_WIDTHS, 400), data=st.data())
def test_a_damaged_record_of_every_encoding_is_refused(encoding: Encoding, case: Case, data: st.DataObject) -> None:
    words = case.words
    if encoding.plan(profile_of(words, case.stream)) is None:
        return
    encoded = encode(Node(Literal(encoding.name)), words)
    assert encoded is not None
    assert_same(execute(encoded.record), words)
    with pytest.raises(ArchiveError):
        execute(data.draw(damage(bytes(encoded.record))), n_bytes=words.nbytes)


def test_codes_and_names_are_apart() -> None:
    assert all(1 <= opcode <= 63 for opcode in OPERATORS)
    assert all(64 <= code <= 127 for code in [*ENCODINGS, *CONDITIONED])
    assert not set(ENCODINGS) & set(CONDITIONED)
    names = [member.name for members in (OPERATORS, ENCODINGS, CONDITIONED) for member in members.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name != "lit" for name in names)
