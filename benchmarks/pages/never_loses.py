"""Write docs/results/never_loses.md: `auto` and the baselines on many tables.

python -m benchmarks.pages.never_loses                    only the page, from benchmarks/results/never_loses.json
python -m benchmarks.pages.never_loses results.jsonl ...  first that file, from the lines of `benchmarks.never_loses`

Give benchmarks/results/never_loses.json as the first file to add lines to those that it has.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import RESULTS, ROOT, made_on
from benchmarks.never_loses.plan import BASELINES, DEVELOPMENT, TARGETS, Cell
from benchmarks.never_loses.rows import read_any, read_kept
from benchmarks.never_loses.summary import (
    TRUSTED_ALONE,
    CellResult,
    cell_results,
    covers,
    losses_to_trusted_alone,
    mean_accuracy,
    standard_error,
    summarize,
)
from benchmarks.never_loses.tables import TABLES, VERSIONS
from warpi.utils.files import write_atomically

KEPT = RESULTS / "never_loses.json"
PAGE = ROOT / "docs" / "results" / "never_loses.md"
FIELDS = ("table", "noise", "rate", "per_class", "seed", "n_noisy", "n_trusted", "n_test", "true_rate")
AUTO = ("accuracy", "seconds", "score", "noise_rate")
PRINTED = "In the column of the printed accuracy: its mean, and in how many runs its interval has the test accuracy."
INTRO = """# The default against everything else

`warpi fit` and `NoisyLabelClassifier` use `auto` unless you choose another method. This page compares it with the
models that most people would try first. Over {cells} cells, `auto` has a mean accuracy of {auto:.1f} %, the best single
alternative ({single}) {best_single:.1f} %, and the alternative that is best in each cell, chosen in hindsight,
{hindsight:.1f} %. [The setup](#setup) explains these words.
"""
SETUP = """## Setup

- **Data sets**: {tables}, called tables below. They are tables that ship inside Python packages, two sets of texts
  (tf-idf), pixels of digits, and features of photos. A category becomes one column per value. A missing number is
  replaced by the median, and another column marks it. All models get the same numbers. {fresh} tables, marked °, were
  not used in the development of `auto`.
- **Image features**: `cifar_features` are 3,000 photos of CIFAR-10, 1,280 numbers each, which `warpi embed` computed by
  EfficientNet-Lite0 at 128 pixels.
- **Rows**: at most 800 for training and 1,500 for testing, stratified by class.
- **Noise**: `pair` (the next class), `symmetric` (any other class; with two classes this is `pair`), `instance`
  (the second most likely class, more often near class boundaries), each at 20 % and 40 %.
- **Trusted rows**: 5, 20 or 50 of each class, at most half of a class. `auto` also gets the labels that they had before
  they were checked (`given_trusted`).
- **Cells**: {cells} combinations of table, noise, rate and number of trusted rows. They are a balanced part of all
  combinations, fixed beforehand: every table meets every kind of noise at both rates, and the numbers of trusted rows
  rotate (`benchmarks/never_loses/plan.py`).
- **Baselines**: logistic regression, random forest, histogram boosting and nearest neighbors, on all rows (trusted rows
  with their checked labels) and on the trusted rows alone; a forest in which trusted rows count ten times; cleanlab's
  `CleanLearning` with a forest and with logistic regression.
- **Seeds**: {seeds}. Settings of `auto` were chosen with seeds from {development} on.

The words in the tables:

- **Best baseline** of a cell: the one with the highest accuracy on its test rows. In practice, nobody knows which one
  this is. It is a hard opponent, because the best of {baselines} noisy means is overestimated.
- **Regret**: the accuracy of the best baseline minus that of `auto`, in percentage points. Below 0 is good.
- **Within 2 errors**: the regret is at most two standard errors (of the paired difference over seeds, or of the
  baseline's mean if that is larger).
- **Trusted alone**: the better of logistic regression and forest on the trusted rows.

To repeat this:

    python -m benchmarks.never_loses.features --root DATA
    python -m benchmarks.never_loses --seeds 0 1 2 --out results.jsonl
    python -m benchmarks.never_loses --targets --out results.jsonl
    python -m benchmarks.pages.never_loses results.jsonl

After a change to `auto`, `--baselines benchmarks/results/never_loses.json` fits only `auto` again.
"""


def keep(rows: list[dict[str, Any]], file: Path) -> None:
    """Store the rows without names of fields, so that the file stays small."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(item) for item in value]
        return round(value, 3) if isinstance(value, float) else value

    lines = []
    for row in sorted(rows, key=lambda row: (row["study"], *(row[name] for name in FIELDS))):
        auto = [rounded(row["auto"][name]) for name in AUTO]
        accuracy = [rounded(row["accuracy"].get(name)) for name in BASELINES]
        lines.append(json.dumps([row["study"], *(rounded(row[name]) for name in FIELDS), auto, accuracy]))
    packages = ("warpi", "scikit-learn", "cleanlab", "numpy", "scipy", "torch")
    about = made_on(*packages) | {f"data: {name}": version for name, version in VERSIONS.items()}
    head = {"about": about, "fields": ["study", *FIELDS, "auto", "accuracy"], "auto": AUTO, "baselines": BASELINES}
    text = json.dumps(head)[:-1] + ',\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"
    write_atomically(file, text.encode())


def table(head: list[str], lines: list[list[str]]) -> str:
    align = "|:---|" + "---:|" * (len(head) - 1)
    return "\n".join(["| " + " | ".join(head) + " |", align, *("| " + " | ".join(line) + " |" for line in lines)])


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def name_of(table_name: str) -> str:
    return table_name + (" °" if TABLES[table_name].fresh else "")


def goals(all_cells: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The main figures next to what was aimed for."""
    figures = all_cells
    lines = [
        ["mean regret to the best baseline", "≤ 0", number(figures["regret"], 2)],
        ["cells within two errors of the best baseline", "≥ 93 %", number(figures["within_2"]) + " %"],
        ["cells within one error", "", number(figures["within_1"]) + " %"],
        [
            f"mean accuracy above the best single baseline ({figures['single']})",
            "≥ 3",
            number(figures["above_single"], 2),
        ],
        ["fits more than 3 points below trusted alone", "< 3 %", number(figures["far_below_trusted"]) + " %"],
        ["printed accuracy minus test accuracy, mean", "± 1", number(figures["score_error"], 2)],
        ["printed 90 % interval contains the test accuracy", "≥ 85 %", number(figures["score_covers"]) + " %"],
        ["90 % interval of the noise rate contains the true rate", "≥ 85 %", number(figures["noise_covers"]) + " %"],
    ]
    for target in TARGETS:
        accuracies = [
            row["auto"]["accuracy"] for row in rows if row["study"] == "targets" and cell_of(row) == target.cell
        ]
        if accuracies:
            cell = target.cell
            trusted = next(r["n_trusted"] for r in rows if r["study"] == "targets" and cell_of(r) == cell)
            what = f"{cell.table}, `{cell.noise}:{cell.rate}`, {trusted} trusted rows, {len(accuracies)} seeds"
            reached = f"{mean(accuracies):.1f} ± {standard_error(accuracies):.1f}"
            lines.append([f"{what}, 75 % of the rows", f"≥ {target.accuracy}", reached])
    return table(["figure", "aim", "measured"], lines) + missed(rows)


def missed(rows: list[dict[str, Any]]) -> str:
    """How many test rows the accuracies below their aim are away from it."""
    text = ""
    for target in TARGETS:
        some = [row for row in rows if row["study"] == "targets" and cell_of(row) == target.cell]
        n = sum(row["n_test"] for row in some)
        wrong = sum(round(row["n_test"] * (1 - row["auto"]["accuracy"] / 100)) for row in some)
        if some and mean(row["auto"]["accuracy"] for row in some) < target.accuracy:
            cell, allowed = target.cell, n * (1 - target.accuracy / 100)
            text += f"\n\n**{cell.table}, `{cell.noise}:{cell.rate}`, misses its aim**: "
            text += f"{wrong} of {n} test rows are wrong, and the aim allows {allowed:.1f}."
    return text


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(row["table"], row["noise"], row["rate"], row["per_class"])


def slices(results: list[CellResult]) -> str:
    """The same figures for parts of the cells."""
    parts: dict[str, list[CellResult]] = {"all": results}
    parts["tables used in development"] = [r for r in results if not TABLES[r.cell.table].fresh]
    parts["other tables (°)"] = [r for r in results if TABLES[r.cell.table].fresh]
    for field, unit in (("noise", ""), ("rate", " noise"), ("per_class", " trusted per class"), ("table", "")):
        values = dict.fromkeys(getattr(r.cell, field) for r in results)
        for value in values if field == "table" else sorted(values):
            title = name_of(value) if field == "table" else f"{value}{unit}"
            parts[title] = [r for r in results if getattr(r.cell, field) == value]
    head = ["cells", "number", "auto", "best single", "regret", "within 1 / 2 errors", "far below trusted alone"]
    head += ["printed − true", "covered", "noise rate covered", "CPU s"]
    lines = []
    for title, some in parts.items():
        if not some:
            continue
        f = summarize(some)
        lines.append(
            [
                title,
                str(f["cells"]),
                number(f["auto"]),
                f"{f['single_mean']:.1f} ({f['single']})",
                number(f["regret"], 2),
                f"{f['within_1']:.0f} / {f['within_2']:.0f} %",
                number(f["far_below_trusted"]) + " %",
                number(f["score_error"]),
                number(f["score_covers"], 0) + " %",
                number(f["noise_covers"], 0) + " %",
                number(f["seconds"]),
            ]
        )
    return table(head, lines)


def baselines(results: list[CellResult]) -> str:
    """How each baseline fares, by the same measure."""
    lines = []
    auto = summarize(results)
    lines.append(["`auto`", number(auto["auto"]), number(auto["regret"], 2), number(auto["worst_regret"]), ""])
    for name in sorted(BASELINES, key=lambda name: -mean(mean_accuracy(r.rows, name) for r in results)):
        means = [mean_accuracy(r.rows, name) for r in results]
        regrets = [r.best_accuracy - value for r, value in zip(results, means, strict=True)]
        best = sum(r.best == name for r in results)
        lines.append([name, number(mean(means)), number(mean(regrets), 2), number(max(regrets)), str(best)])
    return table(
        ["model", "mean accuracy", "mean regret", "largest regret", "cells in which it is the best baseline"], lines
    )


def all_cells(results: list[CellResult]) -> str:
    head = ["cell", "trusted", "auto", "best baseline", "regret", "error", "trusted alone", "printed (90 % interval)"]
    head += ["noise rate: true, estimated"]
    lines = []
    for r in sorted(results, key=lambda r: -r.regret):
        scores = [row["auto"]["score"] for row in r.rows if row["auto"]["score"]]
        rates = [row["auto"]["noise_rate"] for row in r.rows if row["auto"]["noise_rate"]]
        inside = sum(covers(row, "score", row["auto"]["accuracy"]) for row in r.rows if row["auto"]["score"])
        lines.append(
            [
                f"{name_of(r.cell.table)} `{r.cell.noise}:{r.cell.rate}`",
                str(r.rows[0]["n_trusted"]),
                number(r.auto),
                f"{r.best_accuracy:.1f} ({r.best})",
                number(r.regret),
                number(r.error),
                number(mean_accuracy(r.rows, r.trusted_alone)),
                f"{mean(s[0] for s in scores):.1f} ({inside} of {len(scores)})" if scores else "–",
                f"{mean(row['true_rate'] for row in r.rows):.2f}, {mean(s[0] for s in rates):.2f}" if rates else "–",
            ]
        )
    return table(head, lines)


def page(about: dict[str, str], rows: list[dict[str, Any]]) -> str:
    grid = [row for row in rows if row["study"] == "grid"]
    results = cell_results(grid)
    names = {row["table"] for row in grid}
    seeds = ", ".join(map(str, sorted({row["seed"] for row in grid})))
    summary = summarize(results)
    intro = INTRO.format(
        cells=len(results),
        auto=summary["auto"],
        single=summary["single"],
        best_single=summary["auto"] - summary["above_single"],
        hindsight=summary["auto"] + summary["regret"],
    )
    setup = SETUP.format(
        tables=len(names),
        cells=len(results),
        fresh=sum(TABLES[name].fresh for name in names),
        seeds=seeds,
        development=DEVELOPMENT,
        baselines=len(BASELINES),
    )
    losses = losses_to_trusted_alone(results)
    named = [
        f"- {row['table']} `{row['noise']}:{row['rate']}`, {row['n_trusted']} trusted, seed {row['seed']}: "
        f"{row['auto']['accuracy']:.1f}, trusted alone {max(row['accuracy'][n] for n in TRUSTED_ALONE):.1f}"
        for row in losses
    ]
    facts = "; ".join(f"{name} {value}" for name, value in about.items())
    parts = [
        intro,
        goals(summary, rows),
        setup,
        f"## Parts of the {len(results)} cells\n\n{slices(results)}",
        f"## Every model\n\n{baselines(results)}",
        "## Fits more than 3 points below trusted alone\n\n" + ("\n".join(named) or "None."),
        f"## Every cell\n\nThe largest regret comes first. {PRINTED}\n\n{all_cells(results)}",
        f"{len(grid)} runs, one thread; {facts}.",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--kept", type=Path, default=KEPT, help="file with the rows of the page")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.results:
        keep([row for path in options.results for row in read_any(path)], options.kept)
    write_atomically(options.page, page(*read_kept(options.kept)).encode())


if __name__ == "__main__":
    main()
