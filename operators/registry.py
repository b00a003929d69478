"""The operators and encodings of the language, found by looking into their packages.

There is no list to keep: a module in ``ops/`` or ``literals/`` that defines a concrete subclass with an
opcode is registered. Two with one code or one name are a mistake of the build and refused at import.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import TypeVar

import operators.literals
import operators.ops
from operators.base import Conditioned, Encoding, Operator

T = TypeVar("T")


def _members(package: ModuleType, base: type[T], code: str) -> list[type[T]]:
    found: dict[int, type[T]] = {}
    names: set[str] = set()
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for member in vars(module).values():
            if not (isinstance(member, type) and issubclass(member, base) and member.__module__ == module.__name__):
                continue
            number = member.__dict__.get(code)
            if number is None:
                continue
            name = member.__dict__["name"]
            if number in found or name in names:
                raise ImportError(f"{member.__qualname__}: code {number} or name {name!r} is taken")
            found[number] = member
            names.add(name)
    return [found[number] for number in sorted(found)]


OPERATORS: dict[int, type[Operator]] = {cls.opcode: cls for cls in _members(operators.ops, Operator, "opcode")}  # type: ignore[type-abstract]
OPERATORS_BY_NAME: dict[str, type[Operator]] = {cls.name: cls for cls in OPERATORS.values()}
ENCODINGS: dict[int, Encoding] = {cls.code: cls() for cls in _members(operators.literals, Encoding, "code")}  # type: ignore[type-abstract]
ENCODINGS_BY_NAME: dict[str, Encoding] = {encoding.name: encoding for encoding in ENCODINGS.values()}
CONDITIONED: dict[int, type[Conditioned]] = {
    cls.code: cls
    for cls in _members(operators.literals, Conditioned, "code")  # type: ignore[type-abstract]
}
CONDITIONED_BY_NAME: dict[str, type[Conditioned]] = {cls.name: cls for cls in CONDITIONED.values()}
