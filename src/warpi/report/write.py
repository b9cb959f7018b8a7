"""Write a report: tables, curves and an HTML page. Torch is not needed, so that it starts quickly."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from warpi.report.curves import draw_curves
from warpi.report.experiments import Row, RunRecord, summarize
from warpi.report.page import to_html
from warpi.report.page_data import Detail
from warpi.report.paired_tests import compare
from warpi.report.table import to_latex, to_markdown, write_json
from warpi.utils.files import write_with_folder
from warpi.utils.terminal import visible_lines


def write_report(
    runs: Sequence[RunRecord],
    out: Path | None = None,
    json: Path | None = None,
    details: Iterable[Detail] = (),
    against: str | None = None,
) -> list[Row]:
    """Compare runs from `find_runs`; return the rows of the table.

    out : folder for report.html, report.md, report.tex, summary.json, curves-*.png and curves-*.svg
    json : file for the numbers
    details : what report.html shows of the runs beyond their results (`read_details`)
    against : a method or a label; every row gets its difference from that one
    """
    rows = summarize(runs) if against is None else compare(runs, against)
    if json is not None:
        write_json(rows, json)
    if out is not None:
        write_json(rows, out / "summary.json")
        images = [path for path in draw_curves(runs, out) if path.suffix == ".png"]
        links = "".join(f"\n![{path.stem}]({path.name})\n" for path in images)
        write_with_folder(out / "report.md", visible_lines(to_markdown(rows) + links))
        write_with_folder(out / "report.tex", visible_lines(to_latex(rows)))
        write_with_folder(out / "report.html", visible_lines(to_html(rows, runs, details)))
    return rows
