"""Write the status of every method, *reproduced* or *unit-tested only*, from the stored runs and published figures.

    python -m benchmarks.pages.status

A method is reproduced if, on the same data and labels, the mean of our runs is at most one point below a published
figure. Written are src/warpi/methods/status.json, for `warpi list methods`, and a line of each page in docs/methods.
Published figures: paper_tables.json (the WarPI paper) and published.json (CIFAR-N).
"""

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.pages.results import NAMES, PAPER
from warpi.methods.registry import METHODS
from warpi.report.experiments import RunRecord, find_runs
from warpi.utils.files import write_with_folder

STATUS = ROOT / "src" / "warpi" / "methods" / "status.json"
PAGES = ROOT / "docs" / "methods"
FOLDERS = ("asymmetric", "uniform", "instance", "curves", "strong", "leaderboard")
PUBLISHED = json.loads((ROOT / "benchmarks" / "pages" / "published.json").read_text())["rows"]
NOISES = {"asymmetric": "flip:{}", "uniform": "uniform:{}", "instance": "instance:{}"}  # of the paper's tables
TOLERANCE = 1.0  # points
NO_PAPER = ("auto", "ce", "clean_only", "fine_tune", "warpi_plus")
_LINE = re.compile(r"^\*\*Status\.\*\*.*\n(?:.+\n)*\n", re.MULTILINE)


@dataclass(frozen=True)
class Figure:
    """A published accuracy."""

    method: str
    data: str
    noise: str
    accuracy: float
    is_best: bool  # of the best epoch on the test set; otherwise of the last one


def figures() -> Iterator[Figure]:
    for table, pattern in NOISES.items():
        for row in PAPER[table]["rows"]:
            for (data, rate), accuracy in zip(PAPER[table]["columns"], row["values"], strict=True):
                noise = pattern.format(rate)
                noise = noise.replace("flip:", f"{row['probably']}:") if "probably" in row else noise
                if accuracy is not None and row.get("method"):
                    yield Figure(row["method"], data, noise, accuracy, is_best=True)
    for row in PUBLISHED:
        yield Figure(**row, is_best=False)


def stored_runs() -> list[RunRecord]:
    folders = [ROOT / "docs" / "results" / name for name in FOLDERS]
    runs = find_runs([folder for folder in folders if any(folder.glob("*/spec.json"))])
    return [run for run in runs if run.done]


def comparisons() -> dict[str, list[dict[str, Any]]]:
    """For each method, our accuracy next to the published one wherever there is a run; the best evidence first."""
    groups: dict[tuple[str, str, str], dict[str, list[RunRecord]]] = {}
    for run in stored_runs():
        spec = run.spec
        if METHODS[spec["method"]].needs_meta or not run.facts["n_meta"] or spec["method"] in NO_PAPER:
            variants = groups.setdefault((spec["method"], spec["data"], spec["noise"]), {})
            variants.setdefault(re.sub(r"_seed\d+$", "", str(run.path)), []).append(run)
    found: dict[str, list[dict[str, Any]]] = {}
    for figure in figures():
        for runs in groups.get((figure.method, figure.data, figure.noise), {}).values():
            ours = statistics.mean(accuracy(run, figure.is_best) for run in runs)
            recipe = runs[0].spec["recipe"]
            row = {"data": figure.data, "noise": figure.noise, "published": figure.accuracy, "best": figure.is_best}
            row |= {"ours": round(ours, 2), "seeds": len(runs), "net": recipe["net"], "epochs": recipe["epochs"]}
            row |= {"date": max(run.environment["date"] for run in runs), "table": runs[0].path.parent.name}
            found.setdefault(figure.method, []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: (not is_reproduced(row), -row["seeds"], row["published"] - row["ours"]))
    return found


def accuracy(run: RunRecord, best: bool) -> float:
    return max(epoch["test_acc"] for epoch in run.epochs) if best else run.epochs[-1]["test_acc"]


def is_reproduced(row: dict[str, Any]) -> bool:
    return bool(row["ours"] >= row["published"] - TOLERANCE)


def statuses() -> dict[str, dict[str, Any]]:
    found = comparisons()
    table: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        rows = found.get(name, [])
        if name in NO_PAPER and not any(map(is_reproduced, rows)):
            table[name] = {"status": "no published figure"}
        elif not rows:
            table[name] = {"status": "unit-tested only"}
        else:
            table[name] = {"status": "reproduced" if is_reproduced(rows[0]) else "below the published figure"} | rows[0]
    return table


def sentence(entry: dict[str, Any]) -> str:
    """The status as it appears on the page of a method."""
    if entry["status"] == "no published figure":
        return "**Status.** Unit-tested; no published figure exists to compare with."
    if entry["status"] == "unit-tested only":
        return "**Status.** Unit-tested only: no stored run has the data and the labels of a published figure."
    seeds = f"{entry['seeds']} seeds" if entry["seeds"] > 1 else "one seed"
    kind = "best epoch on test" if entry["best"] else "last epoch"
    labels = f"{NAMES[entry['data']]}, `{entry['noise'].removeprefix('given:')}`"
    first = "Reproduced" if entry["status"] == "reproduced" else "Run, but below the published figure"
    return (
        f"**Status.** {first}: {entry['ours']:.2f} on {labels}, published {entry['published']:.2f}\n"
        f"({kind}, {entry['net']}, {entry['epochs']} epochs, {seeds}, {entry['date']};\n"
        f"[table](../results/{entry['table']}.md))."
    )


def with_status(page: str, text: str) -> str:
    """The page with its status below the title."""
    title, _, rest = _LINE.sub("", page, count=1).partition("\n\n")
    return f"{title}\n\n{text}\n\n{rest}"


def main() -> None:
    table = statuses()
    write_with_folder(STATUS, json.dumps(table, indent=1) + "\n")
    for name, entry in table.items():
        file: Path = PAGES / f"{name}.md"
        write_with_folder(file, with_status(file.read_text(), sentence(entry)))


if __name__ == "__main__":
    main()
