"""`warpi report`. torch is imported only to write a page."""

from pathlib import Path

from warpi.errors import UserError
from warpi.utils.flags import Parser
from warpi.utils.terminal import in_columns, say, visible


def report(argv: list[str]) -> None:
    parser = Parser("warpi report", "Print a table of one or many runs. With --out, also write a page about them.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run folders, or folders of run folders")
    parser.add("--against NAME", "show differences to this method or label, paired by seed")
    parser.add("--ranks", "also compare all methods: mean ranks, Holm-corrected paired tests, critical-difference plot")
    parser.add("--json FILE", "write the rows of the table as JSON", Path)
    parser.add("--out DIR", "write report.html (one file), .md, .tex and curves as PNG and SVG", Path)
    parser.add("--audit", "first audit the runs that have not been audited")
    parser.add("--device auto|cpu|cuda", "device for audits and measurements", default="auto")
    given = parser.read(argv)
    from warpi.report.answer import next_step
    from warpi.report.experiments import find_runs
    from warpi.report.page_data import Detail
    from warpi.report.paired_tests import compare, rank_grid, rank_methods
    from warpi.report.table import screen, to_rich
    from warpi.report.write import write_report

    if given["audit"] and not given["out"]:
        raise UserError(
            "--audit needs --out DIR, because it adds to the HTML page; to audit without a report, use `warpi audit`"
        )
    broken: list[UserError] = []
    runs = find_runs(given["runs"], broken)
    if not runs:
        raise UserError("; ".join(map(str, broken)))
    for error in broken:
        say(f"warpi: skipped: {' '.join(str(error).split())}", error=True)
    if given["against"] is not None:  # raises if the name is wrong, before anything is computed
        compare(runs, given["against"])
    ranking = rank_methods(runs) if given["ranks"] else None
    details: list[Detail] = []
    if given["out"]:
        from warpi.report.page_data import read_details

        details = read_details(runs, given["audit"], given["device"])
    rows = write_report(runs, given["out"], given["json"], details, given["against"], ranking)
    console = screen()
    console.print(to_rich(rows))
    if ranking is not None:
        table = rank_grid(ranking)
        lines = [dict(zip(table.heads, map(visible, row), strict=True)) for row in table.rows]
        for line in (*in_columns(lines).split("\n"), ranking.note):
            say(line)
    if given["out"]:
        say(f"report: {given['out'] / 'report.html'}")
        for detail in details if len(details) == 1 else []:
            if step := next_step(detail).replace("`", ""):
                for line in f"next: {step}".split("\n"):
                    say(line)
    if broken:
        raise SystemExit(1)
