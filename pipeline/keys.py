"""Names of objects: their order, and what of them a local folder can hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from operators.errors import PathError
from pipeline.store import ObjectInfo


def name_order(key: str) -> bytes:
    """Sort key: the bytes of the name, the same on every machine and in every locale."""
    return key.encode("utf-8", "surrogateescape")


def key_order(info: ObjectInfo) -> bytes:
    """Sort key: that of its name."""
    return name_order(info.key)


def safe_local_path(root: str, key: str) -> list[str]:
    """Parts of the path below `root` that a key names; the one place that decides what a folder may hold.

    A trailing slash (an object that marks a folder) is dropped: the caller looks for it.

    Raises
    ------
    PathError
        The key is empty or absolute, leaves the root, has an empty or dot part or a NUL, or is too long.
    """

    def refuse(found: str) -> PathError:
        return PathError("a key that is a path below the target", found, key, "use an object store as the target")

    parts = key.removesuffix("/").split("/")
    if "\0" in key:
        raise refuse("a NUL")
    if key.startswith("/"):
        raise refuse("an absolute path")
    if any(part in {"", ".", ".."} for part in parts):
        raise refuse("an empty, '.' or '..' part")
    if any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts):
        raise refuse("a name of more than 255 bytes")
    if len(f"{root}/{key}".encode("utf-8", "surrogateescape")) > 4095:
        raise refuse("a path of more than 4095 bytes")
    return parts


def clashing_keys(keys: Sequence[str], *, fold_case: bool) -> dict[str, str]:
    """Keys that cannot be files beside an earlier one of `keys`, with that one.

    Two names that differ only in case clash where the file system folds case; ``a`` and ``a/b`` always do.
    """

    def fold(key: str) -> str:
        return key.removesuffix("/").casefold() if fold_case else key.removesuffix("/")

    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    clashes: dict[str, str] = {}
    for key in keys:
        name = fold(key)
        parents = [name[: match.start()] for match in re.finditer("/", name)]
        if key.endswith("/"):
            parents.append(name)
        blocking = next((files[parent] for parent in parents if parent in files), None)
        if blocking is None and not key.endswith("/"):
            blocking = files.get(name) or folders.get(name)
        if blocking is not None:
            clashes[key] = blocking
            continue
        for parent in parents:
            folders.setdefault(parent, key)
        if not key.endswith("/"):
            files[name] = key
    return clashes
