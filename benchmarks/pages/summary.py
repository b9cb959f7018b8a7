"""Write the table of the paper's cells in docs/results/README.md, from stored runs and the printed figures.

    python -m benchmarks.pages.summary

Nothing is trained.
"""

from pathlib import Path

from benchmarks.common import ROOT, write_between
from benchmarks.pages.results import NAMES, PAPER, TABLES, Results, format_mean, join_cells, summarize_seeds
from warpi.report.experiments import RunRecord

PAGE = ROOT / "docs" / "results" / "README.md"
MARKS = "<!-- cells -->", "<!-- /cells -->"
METHODS = ("warpi", "mwnet", "ce")
CLOSE = 1.5  # points below the printed figure that count as the same
HEAD = [
    "| data, labels, network | WarPI, last epoch | Meta-Weight-Net, last | plain training, last "
    "| WarPI, best on test | printed | verdict |",
    "|:---|---:|---:|---:|---:|---:|:---|",
]


def table(root: Path = ROOT) -> str:
    """One row per cell in which at least one of the three methods has a run, and the number of the others."""
    lines = list(HEAD)
    n_missing = 0
    for name, page in TABLES.items():
        if page.kind != "paper":
            continue
        results = Results(page, root)
        for data in results.values("data"):
            for noise in sorted(results.values("noise")):
                runs = {method: results.some(data=data, noise=noise, method=method) for method in METHODS}
                if any(runs.values()):
                    lines.append(_line(name, data, noise, runs))
                else:
                    n_missing += 1
    not_run = (
        f"{n_missing} cells have no run of these methods yet; [recipes](../../recipes/README.md) lists their cost."
    )
    return "\n".join([*lines, *(["", not_run] if n_missing else [])])


def _line(name: str, data: str, noise: str, runs: dict[str, list[RunRecord]]) -> str:
    rate = noise.partition(":")[2] or None
    column = next((i for i, c in enumerate(PAPER[name]["columns"]) if c == [data, rate]), None)
    printed = next(row for row in PAPER[name]["rows"] if row["method"] == "warpi")["values"]
    figure = None if column is None or noise.startswith("flip2") else printed[column]  # WarPI's figures are for flip
    net = next(run for some in runs.values() for run in some).spec["recipe"]["net"]
    where = f"[{NAMES.get(data, data)}]({name}.md)" + ("" if noise == "given" else f", `{noise}`") + f", {net}"
    cells = []
    for some in runs.values():
        row = summarize_seeds(some) if some else None
        cells.append(f"{format_mean(row.last_mean, row.last_std)} ({row.n_seeds})" if row else "–")
    best = summarize_seeds(runs["warpi"]).best_mean if runs["warpi"] else None
    verdict = "–"
    if best is not None and figure is not None:
        difference = best - figure
        words = "as printed" if abs(difference) <= CLOSE else "above" if difference > 0 else "below"
        verdict = f"{words} ({difference:+.1f})"
    shown = ["–" if value is None else f"{value:.2f}" for value in (best, figure)]
    return join_cells([where, *cells, *shown, verdict])


def main() -> None:
    write_between(PAGE, MARKS, table())


if __name__ == "__main__":
    main()
