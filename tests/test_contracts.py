"""Contracts of the whole tree that a reader relies on: imports, forbidden constructs, errors."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from operators import errors
from operators.errors import ArchiveError
from pipeline.archive import FOLDERS

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    # A module's name below each package that starts up with it, and what must stay out of the process.
    "operators.run": {"ray", "fsspec", "s3fs", "pyarrow", "synth", "configs", "pipeline", "torch", "safetensors"},
    "synth": {"ray", "fsspec", "s3fs", "pyarrow", "configs", "pipeline", "torch", "safetensors"},
    "configs.loader": {"ray", "fsspec", "s3fs", "pyarrow", "pipeline", "torch", "safetensors"},
    "pipeline.cli": {"ray", "torch", "safetensors"},
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_ATTRIBUTES = {("np", "load"), ("numpy", "load"), ("metadata", "entry_points")}
EXCEPTIONS = {
    # Machine code that numba compiled for this user, in this user's cache; never data of an archive.
    ("operators/kernels/cache.py", "pickle"),
}
UNWANTED = {
    # Field case N03: what forks after a parallel kernel is aborted, and workers share the CPUs among themselves.
    "prange": "for i in prange(8): pass",
    "parallel": "njit(parallel=True)",
    # P03: a file system of pyarrow that is alive keeps a process from its end; bytes come from our stores.
    "pyarrow.fs": "from pyarrow.fs import S3FileSystem",
    "pa.fs": "pa.fs.S3FileSystem()",
    "filesystem": "pq.read_table(path, filesystem=client)",
}


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_importing_a_package_does_not_start_what_it_must_do_without(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & MAY_IMPORT[module]


def forbidden(path: Path) -> Iterator[str]:
    """Yield what the source at `path` must not contain."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield node.func.id
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_IMPORTS:
            yield str(node.module)
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in FORBIDDEN_ATTRIBUTES:
            yield ast.unparse(node)


@pytest.mark.parametrize("path", sources("operators", "pipeline"), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executes_or_unpickles_data(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert [found for found in forbidden(path) if (name, found) not in EXCEPTIONS] == []


def words_of(path: Path) -> set[str]:
    """Names, dotted names, keywords and modules that the source at `path` uses, and keys of dictionaries."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(ast.unparse(node))
        if isinstance(node, ast.keyword):
            found.add(node.arg or "")
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        if isinstance(node, ast.Dict):
            found.update(str(key.value) for key in node.keys if isinstance(key, ast.Constant))
    return found


@pytest.mark.parametrize("path", sources("operators", "pipeline"), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_kernel_starts_threads_and_no_manifest_a_client(path: Path) -> None:
    assert words_of(path) & UNWANTED.keys() == set()


@pytest.mark.parametrize(("word", "line"), UNWANTED.items())
def test_unwanted_words_are_found(word: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(line)
    assert word in words_of(tmp_path / "planted.py")


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec('1')",
        "np.load(x)",
        "__import__('os')",
        "def f():\n    import cloudpickle",
    ],
)
def test_the_scan_finds_what_it_looks_for(line: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(line)
    assert list(forbidden(planted))


def error_classes(base: type[ArchiveError] = ArchiveError) -> list[type[ArchiveError]]:
    return [base, *(found for child in base.__subclasses__() for found in error_classes(child))]


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_errors_travel_between_processes(error: type[ArchiveError]) -> None:
    raised = error("a", "b", "key@0/tensor", "do c")
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is error
    assert (copy.expected, copy.found, copy.where, copy.next_step) == ("a", "b", "key@0/tensor", "do c")
    assert str(copy) == str(raised) == "key@0/tensor: expected a, found b; do c"
    assert str(error("only this")) == "only this"


def test_errors_have_a_kind_of_their_own_and_a_documented_exit_code() -> None:
    classes = error_classes()
    kinds = [error.kind for error in classes]
    assert len(set(kinds)) == len(kinds)
    assert {error.exit_code for error in classes} <= {1, 2, 3, 4, 5, 10, 11, 130, 143}
    assert all(error.__name__ in (errors.__doc__ or "") for error in classes)


def test_every_folder_of_an_archive_is_known_as_its_own() -> None:
    text = (ROOT / "pipeline" / "ARCHIVE.md").read_text("utf-8")
    assert frozenset(re.findall(r"^\| `(\w+)/", text, re.MULTILINE)) == FOLDERS


def test_every_promise_names_tests_that_are_there() -> None:
    rows = re.findall(r"^\| (P\d+) \|.*", (ROOT / "pipeline" / "ARCHIVE.md").read_text("utf-8"), re.MULTILINE)
    assert rows == [f"P{number}" for number in range(1, 19)]
    for line in (ROOT / "pipeline" / "ARCHIVE.md").read_text("utf-8").splitlines():
        if re.match(r"\| P\d+ \|", line):
            named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", line)
            assert named, line
            for path, test in named:
                assert f"def {test or 'test_'}" in (ROOT / "tests" / path).read_text("utf-8"), f"{path}::{test}"
