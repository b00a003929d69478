"""``python -m tests.bench [NAME ...]``: measure, print, and write ``results/bench.json`` and ``results/bench.md``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tests.bench import files, memory, sizes, speed, synthesis
from tests.bench.report import Table, save
from tests.processes import ROOT

TABLES: dict[str, Callable[[], Table]] = {
    "sizes": sizes.table,
    "speed": speed.table,
    "files": files.table,
    "search": synthesis.table,
    "memory": memory.table,
    "peers": sizes.measure_peers,
}
DEFAULT = ("sizes", "speed", "files", "search")
"""What `make bench` measures unless told otherwise; `memory` writes 6 GB, `peers` compresses for minutes."""


def main(names: Sequence[str]) -> int:
    """Measure the named tables; return 1 if a bar does not hold."""
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        print(f"unknown: {unknown}; known: {list(TABLES)}", file=sys.stderr)
        return 2
    tables = []
    for name in names or DEFAULT:
        table = TABLES[name]()
        tables.append(table)
        print(table.markdown(), flush=True)
    print(save(tables, ROOT / "results"))
    return 0 if all(holds for table in tables for holds in table.passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
