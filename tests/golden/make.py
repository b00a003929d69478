"""Write the golden records of the current format: ``python -m tests.golden.make``.

A line is ``name, kind of words, width, count, seed, program, record in hexadecimal``, parted by tabs. Lines of
a frozen format are never changed: then only missing ones are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from operators.base import Stream
from operators.errors import FormatError
from operators.program import LIT, Literal, Node
from operators.record import FORMAT_VERSION
from operators.registry import CONDITIONED, ENCODINGS, OPERATORS
from operators.run import encode
from tests.strategies import BOOKS, Case, applications, conditions

FOLDER = Path(__file__).parent
KINDS = ("skewed", "runs", "few", "periodic", "ramp", "edges", "constant", "distinct", "random")
"""Telling ones first."""


@dataclass(frozen=True)
class Line:
    """One golden record."""

    name: str
    case: Case
    program: str
    record: bytes

    def __str__(self) -> str:
        stream = self.case.stream
        fields = (self.name, self.case.kind, stream.width_bits, stream.n_words, self.case.seed, self.program)
        return "\t".join(map(str, (*fields, self.record.hex())))

    @classmethod
    def parse(cls, text: str) -> Line:
        """Inverse of ``str``."""
        name, kind, width_bits, n_words, seed, program, record = text.split("\t")
        case = Case(kind, Stream(int(width_bits), int(n_words)), int(seed))
        return cls(name, case, program, bytes.fromhex(record))


def golden_file(version: int) -> Path:
    """Return the file of a format version."""
    return FOLDER / f"v{version}.tsv"


def read(version: int) -> list[Line]:
    """Return the golden records of a format version; a missing file is an error."""
    return [Line.parse(text) for text in golden_file(version).read_text("ascii").splitlines()]


def encode_line(name: str, program: Node, case: Case) -> Line | None:
    """Return the line of `program` for `case`, or None where it cannot produce the words."""
    try:
        encoded = encode(program, case.words, books=BOOKS)
    except FormatError:  # an encoding that does not apply to these words
        return None
    return None if encoded is None else Line(name, case, str(program), bytes(encoded.record))


def lines() -> Iterator[Line]:
    """Yield the golden records that the current writer makes: a few of each operator and encoding."""
    tried = [
        Case(kind, Stream(width_bits, n_words), seed)
        for n_words in (40, 3)
        for seed, width_bits in enumerate((16, 8, 32, 64))
        for kind in KINDS
    ]
    for operator in OPERATORS.values():
        found = (
            line
            for case in tried
            for op in applications(operator, case)
            if (line := encode_line(operator.name, Node(op, (LIT,) * op.arity), case)) is not None
        )
        yield from _spread(found)
    for encoding in ENCODINGS.values():
        program = Node(Literal(encoding.name))
        yield from _spread(line for case in tried if (line := encode_line(encoding.name, program, case)) is not None)
    longer = [
        Case(kind, Stream(width_bits, 1500), seed)
        for seed, width_bits in enumerate((16, 8))
        for kind in ("skewed", "edges", "few")
    ]
    for conditioned in CONDITIONED.values():
        yield from _spread(
            line
            for case in longer
            for one in conditions(conditioned, case.stream)
            if (line := encode_line(conditioned.name, Node(Literal(conditioned.name, one.params)), case)) is not None
        )


def _spread(found: Iterable[Line]) -> list[Line]:
    """Return one line of each width, where possible with parameters that no other line has."""
    chosen: dict[int, Line] = {}
    for line in found:
        width_bits = line.case.stream.width_bits
        programs = {other.program for width, other in chosen.items() if width != width_bits}
        if width_bits not in chosen or (chosen[width_bits].program in programs and line.program not in programs):
            chosen[width_bits] = line
    return list(chosen.values())


def main() -> None:
    """Write the file of the current version."""
    file = golden_file(FORMAT_VERSION)
    kept = read(FORMAT_VERSION) if FORMAT_VERSION > 0 and file.exists() else []
    names = {line.name for line in kept}
    kept += [line for line in lines() if line.name not in names]
    file.write_text("".join(f"{line}\n" for line in kept), "ascii")
    print(f"{file.name}: {len(kept)} records")


if __name__ == "__main__":
    main()
