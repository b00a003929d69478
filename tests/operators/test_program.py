"""Programs: text and wire forms, and the check."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators import limits
from operators.base import Stream
from operators.check import _Needs, check
from operators.errors import DamageError, FormatError, LimitError, UnsupportedError
from operators.program import LIT, Node, parse, put_program, take_program
from operators.registry import ENCODINGS_BY_NAME, OPERATORS, OPERATORS_BY_NAME
from operators.wire import Reader

EXAMPLES = [
    ("raw", Stream(8, 0)),
    ("const[255]", Stream(8, 1000)),
    ("merge[5,10,1](bitpack, huffman, raw)", Stream(16, 100)),
    ("rotate[1](merge[6,10](bitpack, rans))", Stream(16, 100)),
    ("scan_add[1](raw, const[18446744073709551615])", Stream(64, 100)),
    ("concat[3,4](raw, const[0], repeat[2](raw))", Stream(32, 100)),
    ("dictionary[3](raw, bitpack)", Stream(32, 100)),
    ("partition[2,9,8](rans, deal[1,3](raw, bitpack), const[0])", Stream(16, 100)),
    ("unpack[4](scan_xor[2](raw, zigzag(huffman)))", Stream(32, 100)),
    ("xor[1](add[2](gray(reverse(lz))))", Stream(8, 100)),
]


def wire(node: Node) -> bytes:
    out = bytearray()
    put_program(out, node)
    return bytes(out)


@pytest.mark.parametrize(("text", "stream"), EXAMPLES)
def test_text_and_wire_forms_agree(text: str, stream: Stream) -> None:
    program = parse(text)
    assert str(program) == text
    reader = Reader(wire(program))
    assert take_program(reader) == program
    reader.end()
    assert len(check(program, stream)) == sum(text.count(name) for name in ENCODINGS_BY_NAME)


def test_every_operator_is_in_an_example() -> None:
    used = " ".join(text for text, _ in EXAMPLES)
    assert all(name in used for name in [*OPERATORS_BY_NAME, *ENCODINGS_BY_NAME])


@given(st.binary(max_size=64))
def test_any_wire_form_parses_or_is_refused(data: bytes) -> None:
    try:
        program = take_program(Reader(data))
    except (DamageError, UnsupportedError):
        return
    assert data.startswith(wire(program))


@given(st.text(alphabet="abcdegmnorst_0123456789[](), ", max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        program = parse(text)
    except DamageError:
        return
    assert parse(str(program)) == program


@pytest.mark.parametrize(
    ("text", "stream", "error"),
    [
        ("const[256]", Stream(8, 4), FormatError),
        ("merge[8,9](raw, raw)", Stream(16, 4), FormatError),
        ("merge[0,16](raw, raw)", Stream(16, 4), FormatError),
        ("repeat[4](raw)", Stream(8, 4), FormatError),
        ("concat[4](raw, raw)", Stream(8, 4), FormatError),
        ("scan_add[0](raw, raw)", Stream(8, 4), FormatError),
        ("dictionary[0](raw, raw)", Stream(8, 4), FormatError),
        ("dictionary[65537](raw, raw)", Stream(32, 4), FormatError),
        ("unpack[3](raw)", Stream(8, 4), FormatError),
        ("rotate[8](raw)", Stream(8, 4), FormatError),
        ("partition[3,1,8](raw, raw, raw)", Stream(8, 4), FormatError),
        ("partition[0,1,8](raw, raw, raw)", Stream(8, 4), FormatError),
        ("partition[2,0,8](raw, raw, raw)", Stream(8, 4), FormatError),
        ("partition[2,2,8](raw, raw, raw)", Stream(8, 4), FormatError),
        ("partition[2,1,9](raw, raw, raw)", Stream(8, 4), FormatError),
        ("partition[2,1,0](raw, raw, raw)", Stream(8, 4), FormatError),
        ("deal[1,4](raw, raw)", Stream(8, 4), FormatError),
        ("deal[0,4](raw, raw)", Stream(8, 4), FormatError),
        ("deal[4](raw)", Stream(8, 4), FormatError),
        ("raw", Stream(7, 4), FormatError),
        ("raw", Stream(8, limits.SEGMENT_BYTES + 1), LimitError),
        ("gray(" * 32 + "raw" + ")" * 32, Stream(8, 4), LimitError),
    ],
)
def test_ill_typed_programs_are_refused(text: str, stream: Stream, error: type[DamageError]) -> None:
    with pytest.raises(error):
        check(parse(text), stream)


def test_program_bombs_are_refused() -> None:
    wide = Node(OPERATORS_BY_NAME["merge"].from_params((1,) * 64), (LIT,) * 64)
    deep = Node(OPERATORS_BY_NAME["repeat"].from_params((1 << 20,)), (LIT,))
    for _ in range(20):
        deep = Node(OPERATORS_BY_NAME["repeat"].from_params((1 << 20,)), (deep,))
    assert len(check(wide, Stream(64, 10))) == 64
    with pytest.raises(LimitError, match="literals"):
        check(Node(OPERATORS_BY_NAME["concat"].from_params((1,)), (wide, wide)), Stream(64, 2))
    with pytest.raises(DamageError):
        check(deep, Stream(64, 8 << 20))


SEGMENT = limits.SEGMENT_BYTES


def scratch_bytes(program: Node, stream: Stream) -> int:
    """Return the memory that `check` counts."""
    needs = _Needs()
    needs.visit(program, stream, "", 1)
    return needs.scratch_bytes


@pytest.mark.parametrize(
    ("text", "stream", "window_bytes"),
    [
        ("lz", Stream(8, SEGMENT), SEGMENT),
        ("lz", Stream(64, SEGMENT // 8), SEGMENT),
        ("merge[4,4](lz, lz)", Stream(8, SEGMENT), 2 * SEGMENT),
        ("merge[7,8,1](lz, lz, lz)", Stream(16, SEGMENT // 2), 3 * SEGMENT // 2),
        ("merge[10,5,1](lz, lz, lz)", Stream(16, SEGMENT // 2), 2 * SEGMENT),
        ("merge[23,8,1](lz, lz, lz)", Stream(32, SEGMENT // 4), 3 * SEGMENT // 2),
        ("merge[3,4,1](lz, lz, lz)", Stream(8, SEGMENT - (1 << 20)), 3 * (SEGMENT - (1 << 20))),
    ],
)
def test_windows_of_lz_are_counted(text: str, stream: Stream, window_bytes: int) -> None:
    check(parse(text), stream)
    assert scratch_bytes(parse(text), stream) == scratch_bytes(parse(text.replace("lz", "rans")), stream) + window_bytes


@pytest.mark.parametrize("text", ["merge[3,4,1](lz, lz, lz)", "merge[2,2,2,2](lz, lz, lz, lz)"])
def test_more_windows_than_a_reader_grants_are_refused(text: str) -> None:
    check(parse(text.replace("lz", "rans")), Stream(8, SEGMENT))
    with pytest.raises(LimitError, match="scratch"):
        check(parse(text), Stream(8, SEGMENT))


def test_message_names_the_node() -> None:
    with pytest.raises(FormatError, match="/merge/const: expected a constant of 8 bits, found 300"):
        check(parse("merge[8,8](const[300], raw)"), Stream(16, 4))


def test_opcodes_are_append_only() -> None:
    """An opcode in a stored archive means the same for ever: this table only grows."""
    assert {code: cls.name for code, cls in OPERATORS.items()} == {
        1: "const", 2: "concat", 3: "repeat", 4: "merge", 5: "xor", 6: "add", 7: "zigzag", 8: "gray", 9: "rotate",
        10: "reverse", 11: "scan_xor", 12: "scan_add", 13: "dictionary", 14: "unpack", 15: "partition", 16: "deal",
    }  # fmt: skip
    assert {name: encoding.code for name, encoding in ENCODINGS_BY_NAME.items()} == {
        "raw": 64, "bitpack": 65, "huffman": 66, "rans": 67, "lz": 68,
    }  # fmt: skip


def test_a_pickled_program_is_hashed_anew() -> None:
    """Names have other hashes in another process; a program that brought its own would be lost in every cache."""
    program = parse("merge[6,10](bitpack, merge[3,7](huffman, lit))")
    pickled = pickle.dumps(program)
    assert b"_hash" not in pickled
    assert pickle.loads(pickled) == program
    assert hash(pickle.loads(pickled)) == hash(program)
