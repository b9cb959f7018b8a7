"""The rows of `warpi bench` as a table for the terminal and as a picture."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from warpi.errors import UserError, missing

Row = Mapping[str, Any]


def to_rich(rows: Sequence[Row]) -> Table:
    """The rows as a table for a terminal."""
    heads = ("net", "precision", "variant", "samples", "ms", "x sgd", "peak MiB", "gradient error")
    table = Table(box=None)
    for head in heads:
        table.add_column(head, justify="left" if head in heads[:3] else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["net"],
            row["precision"],
            row["variant"],
            _show(row["samples"], "d"),
            _show(row["ms"], ".2f"),
            _show(row["ratio_to_sgd"], ".2f"),
            _show(row["peak_mib"], ".0f"),
            _show(row["gradient_error"], ".1e"),
        )
    return table


def _show(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def plot(rows: Sequence[Row], kind: str) -> bytes:
    """A bar a variant, a panel a network and precision: a picture of `kind` png or svg."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise missing("matplotlib", "a picture", "report") from e
    panels = {
        (r["net"], r["precision"]): [s for s in rows if (s["net"], s["precision"]) == (r["net"], r["precision"])]
        for r in rows
    }
    figure = Figure(figsize=(8, 0.6 + sum(0.7 + 0.26 * len(p) for p in panels.values())), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=[2 + len(p) for p in panels.values()])[:, 0]
    for ax, ((net, precision), mine) in zip(axes, panels.items(), strict=True):
        several = len({r["samples"] for r in mine if r["variant"] == "warpi"}) > 1
        names = [r["variant"] + (f" L = {r['samples']}" if several and r["samples"] is not None else "") for r in mine]
        ours = [r["variant"].startswith("warpi") for r in mine]
        bars = ax.barh(range(len(mine)), [r["ms"] for r in mine], color=["#0072b2" if o else "#9aa3ad" for o in ours])
        ax.bar_label(bars, [f"{r['ms']:.3g} ms" + _times(r["ratio_to_sgd"]) for r in mine], padding=3, fontsize=8)
        ax.set_yticks(range(len(mine)), names, fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.18)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(f"{net}, {precision}, batch {mine[0]['batch']} + {mine[0]['batch']}", loc="left", fontsize=9)
    axes[-1].set_xlabel("ms a step")
    first = rows[0]
    where = first["gpu"] or f"CPU, {first['threads']} threads"
    figure.suptitle(f"a training step: {where}, torch {first['torch']}, {first['date']}", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    return content.getvalue()


def picture_kind(path: Path) -> str:
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"a picture is a .png or .svg file, got {str(path)!r}")
    return path.suffix[1:]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f", {ratio:.2f}x"
