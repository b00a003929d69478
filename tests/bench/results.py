"""The rows of a comparison, and where they are kept."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.processes import ROOT

RESULTS = ROOT / "results"
FILE = RESULTS / "compare.json"


@dataclass
class Row:
    """One compressor on one file.

    Attributes
    ----------
    file : str
    n_bytes : int
    name : str
        Of the peer, or ``brevis RECIPE``.
    kind : {"ours", "peer", "computed", "paired"}
        Paired: a peer once more, in the turns of `on_avx2`.
    unit : {"file", "tensor", "segment"}
    settings, version : str
    size : int or None
        Bytes, in memory; those of an archive stand in `Results.archives`.
    compress_s, decompress_s : float or None
        CPU time: the median of `rounds` turns.
    rounds : int
    verified : bool
        What came back was compared, and equal.
    note : str
        Why there is no figure, or what is wrong.
    """

    file: str
    n_bytes: int
    name: str
    kind: str
    unit: str
    settings: str = ""
    version: str = ""
    size: int | None = None
    compress_s: float | None = None
    decompress_s: float | None = None
    rounds: int = 0
    verified: bool = False
    note: str = ""


@dataclass
class Results:
    """All of a run; ``results/compare.json``.

    Attributes
    ----------
    about : dict
        Machine, versions, date, command.
    rows : list of Row
    archives : list of dict
        Recipe, file, bytes stored and compared, and how it was checked.
    wall : list of dict
        File to file: command, workers, seconds, peak memory.
    roles : list of dict
        Bytes by file, role and dtype: source, ours, ZipNN by tensor.
    curves : list of dict
        Size against expansions.
    shares : list of dict
        Part of the search in the CPU time of large tensors, and what calibration took.
    missing : dict of str to str
        Peers that could not be used, and why.
    """

    about: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    archives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    wall: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    roles: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    curves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    shares: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    def save(self, file: Path = FILE) -> None:
        """Write the file anew."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        partial.replace(file)

    @staticmethod
    def load(file: Path = FILE) -> Results:
        """Read what `save` wrote."""
        content = json.loads(file.read_text("utf-8"))
        return Results(**{**content, "rows": [Row(**row) for row in content["rows"]]})

    def row(self, file: str, name: str) -> Row | None:
        """Return the row of a compressor on a file, if there is one."""
        return next((row for row in self.rows if (row.file, row.name) == (file, name)), None)
