"""What `synth.warm` compiles: all that archiving, verifying and restoring run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.checkpoints import path
from tests.processes import ROOT

ASKED = """
import sys
from operators.kernels.cache import KernelCache
asked, load = set(), KernelCache.load_overload
def note(self, signature, target):
    asked.add(f"{self._name} of {signature}")
    return load(self, signature, target)
KernelCache.load_overload = note
"""
"""A program that notes which kernels it asks the cache for: what it does not ask for, it does not compile."""
WARM = """
from synth.warm import JOBS
for job in JOBS:
    job()
"""
USE = """
from pipeline.cli import main
source, archive, target = sys.argv[1:]
options = ["--no-progress", "--workers", "1"]
assert main(["archive", source, archive, *options]) == 0
assert main(["verify", archive, *options]) == 0
assert main(["restore", archive, target, *options]) == 0
"""
TELL = "print(*sorted(asked), sep='\\n', file=sys.stderr)"


def asked(program: str, *arguments: Path) -> set[str]:
    """Return the kernels that a process of its own asks for."""
    command = [sys.executable, "-c", ASKED + program + TELL, *map(str, arguments)]
    return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stderr.splitlines())


def test_nothing_is_left_to_compile_after_warming(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("minilm-bf16", "fracast-f32", "fracast-i8"):
        (source / path(name).name).symlink_to(path(name))
    used = asked(USE, source, tmp_path / "archive", tmp_path / "target")
    assert len(used) > 50
    assert used - asked(WARM) == set()
