"""Compiled kernels on disk: one file per kernel and signature, safe to share and to lose.

numba's own cache keeps an index per function, in which two cold processes can mix up their entries,
does not notice damaged machine code, does not notice an edited callee in another file, and refuses
to work where neither the package nor the home directory can be written. Here:

- the name of a file is a digest of all that its code depends on: the sources of its module and of those
  that it imports, the signature, the CPU and its features, numba, Python. Nothing is ever stale and
  there is no index;
- a file is written under another name and moved into place, so a reader sees all of it or nothing;
- it begins with the digest of the rest. A damaged file is removed and compiled anew;
- where nothing can be written, kernels are compiled in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import re
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding as llvm
from numba.core import compiler, serialize
from numba.core.runtime import rtsys

from operators.kernels.parts import LINKED

_DIGEST_BYTES = 32
_PACKAGE = Path(__file__).parent


@cache
def source_digest(path: Path) -> str:
    """Return the digest of the source at `path` and of all that it imports from this project."""
    texts: dict[Path, bytes] = {}
    pending = [path]
    while pending:
        source = pending.pop()
        if source not in texts:
            texts[source] = source.read_bytes()
            for name in re.findall(rb"^\s*from (operators[.\w]*) import", texts[source], re.MULTILINE):
                imported = _PACKAGE.parent.parent.joinpath(*name.decode().split("."))
                # A package stands for all of its modules.
                pending.extend(imported.glob("*.py") if imported.is_dir() else [imported.with_suffix(".py")])
    digest = hashlib.sha256(f"{numba.__version__} {platform.python_version()}".encode())
    for source in sorted(texts):
        digest.update(hashlib.sha256(texts[source]).digest())
    return digest.hexdigest()[:16]


def directories() -> list[Path]:
    """Return where compiled kernels are looked for, in order; they are saved in the first that takes them.

    ``BREVIS_CACHE_DIR`` and ``NUMBA_CACHE_DIR`` where set, and nothing else then: a job may name a place of its
    own in the first, and find in the second what its node has warmed. Otherwise beside the sources (which may be
    read-only), the user's cache directory, and a private directory below the temporary one, which needs neither a
    home nor a name for the user.
    """
    named = [os.environ.get(name) for name in ("BREVIS_CACHE_DIR", "NUMBA_CACHE_DIR")]
    if any(named):
        return [Path(name) / "brevis-kernels" for name in named if name]
    found = [_PACKAGE / "__pycache__"]
    user = os.environ.get("XDG_CACHE_HOME", "")
    if not user:
        with contextlib.suppress(RuntimeError):  # no HOME, and a user id without a name
            user = str(Path("~/.cache").expanduser())
    if Path(user).is_absolute():
        found.append(Path(user) / "brevis-kernels")
    found.append(Path(tempfile.gettempdir()) / f"brevis-kernels-{os.getuid()}")
    return found


def _trusted(directory: Path) -> bool:
    """Whether `directory` exists and nobody but its owner, root or this user, can plant code in it."""
    try:
        info = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid in (0, os.getuid()) and not info.st_mode & 0o022


def _usable(directory: Path) -> bool:
    """Whether code may be loaded from `directory`; only the temporary one is open to others by nature."""
    return directory.parent != Path(tempfile.gettempdir()) or _trusted(directory)


class KernelCache:
    """What a dispatcher of numba asks for compiled code (its ``_Cache`` interface).

    Parameters
    ----------
    function : callable
        The Python function of the kernel.
    """

    cache_path = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self._path = Path(function.__code__.co_filename)
        self._name = f"{self._path.stem}.{function.__name__}"
        self._enabled = True

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        """Do nothing: no entry is ever stale."""

    def _file_name(self, signature: object, target: Any) -> str:
        key = hashlib.sha256(f"{signature} {target.codegen().magic_tuple()}".encode()).hexdigest()[:16]
        return f"{self._name}-{source_digest(self._path)}-{key}.kernel"

    def load_overload(self, signature: object, target: Any) -> Any:
        """Return the compile result of `signature`, or None where it has to be compiled."""
        # What machine code calls. To refresh the target, a quarter of a second, would bring what compiling needs too.
        rtsys.initialize(target)
        if not self._enabled:
            return None
        name = self._file_name(signature, target)
        for directory in directories():
            path = directory / name
            try:
                data = path.read_bytes() if _usable(directory) else b""
            except OSError:
                continue
            if not data:
                continue
            if hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
                # As numba does it: code of this user's own cache. Bytes of an archive never come here.
                parts = pickle.loads(data[_DIGEST_BYTES:])  # noqa: S301
                return compiler.CompileResult._rebuild(target, *parts)  # noqa: SLF001 -- numba's own way
            _remove(path)
        return None

    def save_overload(self, signature: object, result: Any) -> None:
        """Keep `result` in the first directory that takes it; a cache that cannot be written is no error."""
        if not self._enabled:
            return
        name = self._file_name(signature, result.target_context)
        body = serialize.dumps(_without_code_to_link(result._reduce()))  # noqa: SLF001 -- numba's own way
        data = hashlib.sha256(body).digest() + body
        for directory in directories():
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not _usable(directory):
                    continue
                _write(directory, name, data)
            except OSError:
                continue
            if directory.parent == _PACKAGE:  # one version lives there: drop what edits have left behind
                for path in directory.glob(f"{self._name}-*.kernel"):
                    if source_digest(self._path) not in path.name:
                        _remove(path)
            return


def _without_code_to_link(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what numba keeps of a kernel with names alone in place of the code by which others would link it.

    Nothing does: what kernels call are parts. To parse that code took two thirds of the time to load a kernel.
    """
    if not LINKED:
        return parts
    (name, kind, (machine_code, _)), function, *rest = parts
    names = function.llvm_func_name, function.llvm_cpython_wrapper_name
    text = "".join(f'define void @"{name}"() {{\n  ret void\n}}\n' for name in names)
    return (name, kind, (machine_code, llvm.parse_assembly(text).as_bitcode())), function, *rest


def _write(directory: Path, name: str, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(directory / name)
    except OSError:
        _remove(Path(temporary))
        raise


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass
