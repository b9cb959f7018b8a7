"""Compare runs: tables, curves and a page, from run folders alone. Needs no torch, so that it starts at once."""

from collections.abc import Sequence
from pathlib import Path

from warpi.report.curves import curves
from warpi.report.runs import Row, Run, command, find_runs, summarise
from warpi.report.table import to_html, to_latex, to_markdown, to_rich, write, write_json

__all__ = [
    "Row",
    "Run",
    "command",
    "curves",
    "find_runs",
    "summarise",
    "to_html",
    "to_latex",
    "to_markdown",
    "to_rich",
    "write_json",
    "write_report",
]


def write_report(paths: Sequence[Path], out: Path | None = None, json: Path | None = None) -> str:
    """Compare the runs in `paths`; return the comparison as Markdown.

    With `out`, a folder: report.md, report.html, summary.json and curves-*.png and .svg. With `json`, a file: the
    numbers.
    """
    runs = find_runs(paths)
    rows = summarise(runs)
    text = to_markdown(rows)
    if json is not None:
        write_json(rows, json)
    if out is not None:
        write_json(rows, out / "summary.json")
        figures = curves(runs, out)
        text += "".join(f"\n![{path.stem}]({path.name})\n" for path in figures if path.suffix == ".png")
        write(out / "report.md", text)
        write(out / "report.html", to_html(rows, runs, figures))
    return text
