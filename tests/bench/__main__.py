"""``python -m tests.bench [NAME ...]``: measure, print, and write ``results/``.

``compare`` writes ``compare.json``, ``compare.md`` and pictures; ``targets`` checks what it last wrote; the others
write ``bench.json`` and ``bench.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence

from tests.bench import (
    books,
    compare,
    compared,
    files,
    memory,
    plots,
    scale,
    sizes,
    speed,
    synthesis,
    targets,
    training,
)
from tests.bench.report import Table, page, save
from tests.bench.results import FILE, RESULTS, Results

TABLES: dict[str, Callable[[], Table | Iterable[Table]]] = {
    "sizes": sizes.table,
    "speed": speed.table,
    "files": files.table,
    "search": synthesis.tables,
    "memory": memory.table,
    "scale": scale.tables,
    **scale.TABLES,
    "training": training.tables,
    **training.TABLES,
    "books": books.table,
    "peers": sizes.measure_peers,
}
DEFAULT = ("sizes", "speed", "files", "search")
"""What `make bench` measures unless told otherwise; the others need torch (`training`), write 8 GB or take long."""


def main(arguments: Sequence[str]) -> int:
    """Measure the named tables; return 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {[*TABLES, 'compare', 'targets']}; default {list(DEFAULT)}")
    parser.add_argument("--files", default="", help="compare: checkpoints, with commas between")
    parser.add_argument("--peers", default="", help="compare: peers, with commas between")
    parser.add_argument("--recipes", default="", help="compare: recipes, with commas between")
    parser.add_argument("--quick", action="store_true", help="compare: one turn, no slow peer, nothing file to file")
    parser.add_argument("--patience", type=float, default=compare.MOST_SECONDS, help="compare: most s of a slow peer")
    parser.add_argument("--reuse", action="store_true", help="compare: keep slow rows of the last run where they apply")
    chosen = parser.parse_args(arguments)
    names = chosen.names or DEFAULT
    unknown = [name for name in names if name not in (*TABLES, "compare", "targets")]
    if unknown:
        parser.error(f"unknown: {unknown}; known: {[*TABLES, 'compare', 'targets']}")
    tables: list[Table] = []
    holds = True
    for name in names:
        if name == "compare":
            _compare(chosen)
        elif name == "targets":
            table = targets.table(Results.load())
            print(table.markdown(), flush=True)
            holds &= all(row[-1] == targets.HOLDS for row in table.rows)
        else:
            made = TABLES[name]()
            for one in [made] if isinstance(made, Table) else made:
                tables.append(one)
                print(one.markdown(), flush=True)
    if tables:
        print(save(tables, RESULTS))
    return 0 if holds and all(passed for table in tables for passed in table.passed.values()) else 1


def _compare(chosen: argparse.Namespace) -> None:
    reuse = Results.load() if chosen.reuse and FILE.exists() else None
    names = [tuple(filter(None, text.split(","))) for text in (chosen.files, chosen.peers, chosen.recipes)]
    results = compare.measure(compare.choose(*names, quick=chosen.quick, patience_s=chosen.patience, reuse=reuse))
    text = page(compared.tables(results), results.about)
    pictures = plots.draw(results, RESULTS)
    text += "".join(f"\n![{picture.stem}]({picture.name})\n" for picture in pictures)
    (RESULTS / "compare.md").write_text(text, "utf-8")
    print(text)
    if not pictures:
        print("no pictures: matplotlib is not installed, or there is nothing to draw", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
