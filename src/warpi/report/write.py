"""Compare runs: tables, curves and a page, from run folders alone. Needs no torch, so that it starts at once."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from warpi.report.curves import draw_curves
from warpi.report.experiments import Difference, Row, RunRecord, find_runs, summarize
from warpi.report.page import to_html
from warpi.report.page_data import Detail
from warpi.report.paired import compare
from warpi.report.table import screen, to_latex, to_markdown, to_rich, write_json
from warpi.runs.rerun import command
from warpi.utils.files import write_with_folder

__all__ = [
    "Detail",
    "Difference",
    "Row",
    "RunRecord",
    "command",
    "compare",
    "draw_curves",
    "find_runs",
    "screen",
    "summarize",
    "to_html",
    "to_latex",
    "to_markdown",
    "to_rich",
    "write_json",
    "write_report",
]


def write_report(
    runs: Sequence[RunRecord],
    out: Path | None = None,
    json: Path | None = None,
    details: Iterable[Detail] = (),
    against: str | None = None,
) -> list[Row]:
    """Compare runs (of `find_runs`); return the rows of the table.

    With `out`, a folder: report.html, report.md, report.tex, summary.json and curves-*.png and .svg. With `json`, a
    file: the numbers. `details` are what report.html shows of runs beyond their results (`warpi.details`). With
    `against`, a method or a label: every row's difference to that one.
    """
    rows = summarize(runs) if against is None else compare(runs, against)
    if json is not None:
        write_json(rows, json)
    if out is not None:
        write_json(rows, out / "summary.json")
        figures = draw_curves(runs, out)
        pictures = "".join(f"\n![{path.stem}]({path.name})\n" for path in figures if path.suffix == ".png")
        write_with_folder(out / "report.md", to_markdown(rows) + pictures)
        write_with_folder(out / "report.tex", to_latex(rows))
        write_with_folder(out / "report.html", to_html(rows, runs, details))
    return rows
