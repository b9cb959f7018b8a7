"""The measured rows as a table for the terminal and as a bar chart."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from warpi.errors import missing_package

Row = Mapping[str, Any]


def to_rich(rows: Sequence[Row]) -> Group:
    """One table per network and precision, at most 80 columns wide."""
    tables = []
    for title, group in _panels(rows).items():
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for head in ("variant", "L", "ms", "x sgd", "peak MiB", "gradient error"):
            table.add_column(head, justify="left" if head == "variant" else "right", no_wrap=True)
        for row in group:
            table.add_row(
                row["variant"],
                _show(row["samples"], "d"),
                _show(row["ms"], ".2f"),
                _show(row["ratio_to_sgd"], ".2f"),
                _show(row["peak_mib"], ".0f"),
                _show(row["gradient_error"], ".1e"),
            )
        tables.append(table)
    return Group(*tables)


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each network and precision, by title."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(f"{row['net']}, {row['precision']}, batch {row['batch']} + {row['batch']}", []).append(row)
    return panels


def _show(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def plot(rows: Sequence[Row], kind: str) -> bytes:
    """A bar chart as png or svg, with one panel per network and precision."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise missing_package("matplotlib", "a picture", "report") from e
    panels = _panels(rows)
    figure = Figure(figsize=(8, 0.6 + sum(0.7 + 0.26 * len(p) for p in panels.values())), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=[2 + len(p) for p in panels.values()])[:, 0]
    for ax, (title, group) in zip(axes, panels.items(), strict=True):
        several = len({r["samples"] for r in group if r["variant"] == "warpi"}) > 1
        names = [r["variant"] + (f" L = {r['samples']}" if several and r["samples"] is not None else "") for r in group]
        ours = [r["variant"].startswith("warpi") for r in group]
        bars = ax.barh(range(len(group)), [r["ms"] for r in group], color=["#0072b2" if o else "#9aa3ad" for o in ours])
        ax.bar_label(
            bars,
            [f"{r['ms']:{'.0f' if r['ms'] >= 100 else '.3g'}} ms" + _times(r["ratio_to_sgd"]) for r in group],
            padding=3,
            fontsize=8,
        )
        ax.set_yticks(range(len(group)), names, fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.18)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(title, loc="left", fontsize=9)
    axes[-1].set_xlabel("ms per step")
    first = rows[0]
    where = first["gpu"] or f"CPU, {first['threads']} threads"
    figure.suptitle(f"Training step: {where}, torch {first['torch']}, {first['date']}", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    return content.getvalue()


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f", {ratio:.2f}x"
