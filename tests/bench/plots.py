"""Pictures of a comparison: size against speed, savings by dtype and role, size against expansions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.bench.compared import View, by_role
from tests.bench.results import Results


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the pictures that the results allow; none where matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, picture in (("size_speed", _size_speed), ("roles", _roles), ("expansions", _expansions)):
        figure = picture(results, plt)
        if figure is not None:
            file = folder / f"compare_{name}.png"
            figure.savefig(file, dpi=120, bbox_inches="tight")
            plt.close(figure)
            drawn.append(file)
    return drawn


def _size_speed(results: Results, plt: Any) -> Any:
    """One field for each file: per cent against MB/s of compression, ours in colour."""
    view = View(results)
    files = [file for file in view.files if view.n_bytes[file] > 5e6][:12]
    if not files:
        return None
    n_columns = min(3, len(files))
    n_rows = -(-len(files) // n_columns)
    figure, fields = plt.subplots(n_rows, n_columns, figsize=(5.5 * n_columns, 4 * n_rows), squeeze=False)
    for field, file in zip(fields.flat, files, strict=False):
        for name in (*view.peers, *view.recipes):
            ours = name in view.recipes
            percent = view.percent(file, name)
            speed = view.mb_s(file, f"brevis {name}" if ours else name, "compress")
            if percent is None or speed is None or percent > 97:
                continue
            field.plot(speed, percent, "o", color="tab:red" if ours else "tab:gray")
            field.annotate(name, (speed, percent), fontsize=7, xytext=(3, 3), textcoords="offset points",
                           color="tab:red" if ours else "black")  # fmt: skip
        field.set_xscale("log")
        field.set_title(file, fontsize=10)
        field.set_xlabel("compress, CPU MB/s")
        field.set_ylabel("% of the file")
        field.grid(alpha=0.3)
    for field in list(fields.flat)[len(files) :]:
        field.axis("off")
    figure.tight_layout()
    return figure


def _roles(results: Results, plt: Any) -> Any:
    """Bars: what is saved of each dtype and role, ours beside the peer that works tensor by tensor."""
    cells = {key: cell for key, cell in by_role(results).items() if cell["source"] >= 1 << 18}
    if not cells:
        return None
    labels = [f"{dtype} {role}" for dtype, role in cells]
    figure, field = plt.subplots(figsize=(9, 0.34 * len(labels) + 1.2))
    for offset, (key, color) in enumerate((("brevis", "tab:red"), ("peer", "tab:gray"))):
        saved = [100 * (1 - cell.get(key, 0) / cell["source"]) if cell.get(key) else 0 for cell in cells.values()]
        places = [place + 0.2 - 0.4 * offset for place in range(len(labels))]
        field.barh(places, saved, 0.38, color=color, label=key if key == "brevis" else "peer, by tensor")
    field.set_yticks(range(len(labels)), labels, fontsize=8)
    field.set_xlabel("% of the bytes saved")
    field.legend()
    field.grid(axis="x", alpha=0.3)
    return figure


def _expansions(results: Results, plt: Any) -> Any:
    """Lines: size, in that of the best program known, against expansions, for each prior and order."""
    files = list(dict.fromkeys(curve["file"] for curve in results.curves))
    if not files:
        return None
    figure, fields = plt.subplots(1, len(files), figsize=(4.6 * len(files), 3.6), squeeze=False)
    for field, file in zip(fields.flat, files, strict=True):
        for curve in results.curves:
            if curve["file"] == file:
                field.plot(curve["expansions"], curve["excess_percent"], marker=".", label=curve["search"])
        field.set_xscale("symlog")
        field.set_yscale("symlog", linthresh=0.01)
        field.set_title(file, fontsize=10)
        field.set_xlabel("expansions")
        field.set_ylabel("% over the best known")
        field.grid(alpha=0.3)
        field.legend(fontsize=7)
    figure.tight_layout()
    return figure
