"""Write docs/results/leaderboard.md: every method with the strong recipe and the same training time.

    python -m benchmarks.leaderboard --root DATA --out runs/leaderboard
    python -m benchmarks.pages.leaderboard runs/leaderboard [FOLDER ...]      (without folders: only the page)
    python -m benchmarks.pages.leaderboard --shared runs/leaderboard          runs that shared the GPU with others

Copies the small files of the runs to docs/results/leaderboard. Without stored runs there is no page.
"""

import statistics
import sys
from pathlib import Path

from benchmarks import leaderboard
from benchmarks.common import ROOT
from benchmarks.pages.status import PUBLISHED
from benchmarks.pages.strong import each, keep, listed, seconds, summaries
from warpi.methods.registry import METHODS
from warpi.report.experiments import RunRecord, find_runs
from warpi.utils.files import write_with_folder

KEPT = ROOT / "docs" / "results" / "leaderboard"
PAGE = ROOT / "docs" / "results" / "leaderboard.md"
TITLES = {"random1": "CIFAR-10N `random1`", "flip": "CIFAR-10 `flip:0.4`", "fine": "CIFAR-100N `fine`"}
INTRO = """# Leaderboard

Every method with [the strong recipe](../strong_recipe.md) and two minutes of training on one GPU, without the time to
compile: the number of epochs follows from the measured seconds of an epoch
(`benchmarks/results/leaderboard_epochs.json`). Test accuracy of the last epoch in percent, mean over seeds, with the
number of seeds in brackets if there are several; the networks that predict are averaged, and each test image is also
mirrored. After the slash: the figure published for CIFAR-N, with another network and much longer training.
*Rank*: mean over the columns, for methods with a run in each.

Methods marked * have 1,000 trusted images, those marked ° the true noise rate. Machine: {gpu}. Versions: torch {torch}.
Date: {date}.

    python -m benchmarks.leaderboard --root DATA --out runs/leaderboard
    python -m benchmarks.pages.leaderboard runs/leaderboard

"""
SHARED = """
†: the run shared the GPU with others and took longer. Its number of epochs is that of two minutes alone.
"""


def page(folder: Path = KEPT) -> str:
    runs = [run for run in find_runs([folder]) if run.done]
    cells: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        name, _, _ = run.path.name.rpartition("_seed")
        entry, _, labels = name.rpartition("_")
        cells.setdefault((entry, labels), []).append(run)
    ranks = mean_ranks({key: accuracy(group) for key, group in cells.items()})
    entries = sorted({entry for entry, _ in cells}, key=lambda e: (ranks.get(e, 1e9), e))
    about = {key: each(runs, key) for key in ("gpu", "torch", "date")}
    shared = {row["name"] for row in summaries(folder) if row.get("shared")}
    lines = [f"| method | {' | '.join(TITLES.values())} | rank | epochs | seconds |", "|:---|" + "---:|" * 6]
    for entry in entries:
        groups = [cells.get((entry, labels), []) for labels in TITLES]
        first = next(group for group in groups if group)
        shown = [cell(group) for group in groups]
        rank = f"{ranks[entry]:.1f}" if entry in ranks else "–"
        times = listed(first, lambda run: f"{sum(seconds(run)):.0f}{'†' if run.path.name in shared else ''}")
        lines.append(f"| {title(entry)} | {' | '.join(shown)} | {rank} | {len(first[0].epochs)} | {times} |")
    return INTRO.format(**about) + "\n".join(lines) + "\n" + (SHARED if shared else "")


def title(entry: str) -> str:
    method = METHODS[leaderboard.ENTRIES[entry].get("method", entry)]
    marks = "*" * (method.needs_meta or entry == "warpi_plus") + "°" * method.needs_noise_rate
    return f"`{entry}`{marks}"


def accuracy(group: list[RunRecord]) -> float:
    return statistics.mean(run.epochs[-1]["test_acc"] for run in group)


def cell(group: list[RunRecord]) -> str:
    """The accuracy of some runs, and the published one for the same labels."""
    if not group:
        return "–"
    spec = group[0].spec
    text = f"{accuracy(group):.2f}" + (f" ({len(group)})" if len(group) > 1 else "")
    same = [row["accuracy"] for row in PUBLISHED if all(row[key] == spec[key] for key in ("method", "data", "noise"))]
    return f"{text} / {same[0]:.2f}" if same and not group[0].facts["n_meta"] else text


def mean_ranks(scores: dict[tuple[str, str], float]) -> dict[str, float]:
    """Mean rank over the label sets of the entries that have all of them; equal scores share a rank."""
    labels = sorted({label for _, label in scores})
    whole = [entry for entry in {e for e, _ in scores} if all((entry, label) in scores for label in labels)]
    ranks: dict[str, float] = {}
    for entry in whole:
        each_rank = []
        for label in labels:
            own = scores[entry, label]
            better = sum(scores[other, label] > own for other in whole)
            equal = sum(scores[other, label] == own for other in whole)
            each_rank.append(better + (equal + 1) / 2)
        ranks[entry] = statistics.mean(each_rank)
    return ranks


def main() -> None:
    if folders := [Path(name) for name in sys.argv[1:] if name != "--shared"]:
        keep(folders, KEPT, shared="--shared" in sys.argv)
    if any(KEPT.glob("*/spec.json")):
        write_with_folder(PAGE, page())


if __name__ == "__main__":
    main()
