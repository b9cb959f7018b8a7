"""`warpi report`, which does not load torch unless it writes a page."""

import sys
from pathlib import Path

from warpi.errors import UserError
from warpi.utils.flags import Parser


def report(argv: list[str]) -> None:
    from warpi.report.experiments import find_runs
    from warpi.report.page_data import Detail
    from warpi.report.paired import compare
    from warpi.report.table import screen, to_rich
    from warpi.report.write import write_report

    parser = Parser(prog="warpi report", description="Show one run, or compare many: a table, and with --out a page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run folders, or folders of run folders")
    parser.add_argument("--against", metavar="NAME", help="a method or label: differences to it, paired by seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's rows as JSON")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.html (one file), .md, .tex and curves as PNG and SVG"
    )
    parser.add_argument("--audit", action="store_true", help="audit runs that are not, for their suspicious labels")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to audit and to measure")
    given = parser.read(argv)
    if given["audit"] and not given["out"]:
        raise UserError("--audit is for the page; name its folder with --out DIR, or run warpi audit")
    broken, found = list[UserError](), list[Detail]()
    if not (runs := find_runs(given["runs"], broken)):
        raise UserError("; ".join(map(str, broken)))
    for error in broken:
        print(f"warpi: left out: {' '.join(str(error).split())}", file=sys.stderr)
    if given["against"] is not None:  # a wrong name is said before anything is computed
        compare(runs, given["against"])
    if given["out"]:
        from warpi.report.page_data import read_details

        found = read_details(runs, given["audit"], given["device"])
    rows = write_report(runs, given["out"], given["json"], found, given["against"])
    console = screen()
    console.print(to_rich(rows))
    if given["out"]:
        console.print(f"report: {given['out'] / 'report.html'}", markup=False, emoji=False, soft_wrap=True)
    if broken:
        raise SystemExit(1)
