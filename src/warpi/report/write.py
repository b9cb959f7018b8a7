"""Write a report: tables, curves and an HTML page. Torch is not needed, so that it starts quickly."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from warpi.report.experiments import Row, RunRecord, summarize
from warpi.report.page import to_html
from warpi.report.page_data import Detail
from warpi.report.paired_tests import Ranking, compare, pair_grid, rank_grid
from warpi.report.plot_style import figure_style, save
from warpi.report.plots import draw_curves, draw_ranks
from warpi.report.table import grid_markdown, to_latex, to_markdown, write_json
from warpi.utils.files import write_with_folder
from warpi.utils.terminal import visible_lines


def write_report(
    runs: Sequence[RunRecord],
    out: Path | None = None,
    json: Path | None = None,
    details: Iterable[Detail] = (),
    against: str | None = None,
    ranking: Ranking | None = None,
) -> list[Row]:
    """Compare runs from `find_runs`; return the rows of the table.

    out : folder for report.html, report.md, report.tex, summary.json, curves-*.png and curves-*.svg
    json : file for the numbers
    details : what report.html shows of the runs beyond their results (`read_details`)
    against : a method or a label; every row gets its difference from that one
    ranking : mean ranks of all methods (`rank_methods`); `out` gets ranks.json, ranks.png and ranks.svg
    """
    rows = summarize(runs) if against is None else compare(runs, against)
    if json is not None:
        write_json(rows, json)
    if out is not None:
        write_json(rows, out / "summary.json")
        images = [path for path in draw_curves(runs, out) if path.suffix == ".png"]
        text = to_markdown(rows) + "".join(f"\n![{path.stem}]({path.name})\n" for path in images)
        ranks = None if ranking is None else _write_ranks(ranking, out)
        if ranking is not None:
            methods = grid_markdown(rank_grid(ranking), ranking.note)
            text += f"\n### Mean ranks\n\n{methods}\n![ranks](ranks.png)\n\n{grid_markdown(pair_grid(ranking))}"
        write_with_folder(out / "report.md", visible_lines(text))
        write_with_folder(out / "report.tex", visible_lines(to_latex(rows)))
        write_with_folder(out / "report.html", visible_lines(to_html(rows, runs, details, ranks)))
    return rows


def _write_ranks(ranking: Ranking, out: Path) -> dict[str, Any]:
    """Write the ranks and their plot; return what the page shows of them."""
    write_with_folder(out / "ranks.json", dumps(asdict(ranking), indent=2, ensure_ascii=False) + "\n")
    with figure_style():
        files = save(draw_ranks(ranking), out / "ranks")
    picture = next(file for file in files if file.suffix == ".svg").read_bytes()
    source = "data:image/svg+xml;base64," + base64.b64encode(picture).decode()
    return {"methods": rank_grid(ranking), "pairs": pair_grid(ranking), "note": ranking.note, "picture": source}
