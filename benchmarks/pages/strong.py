"""Write docs/results/strong.md: CIFAR-10 and CIFAR-100 with the strong recipe.

    python -m benchmarks.strong_images --root DATA --out runs/strong --runs ce_clean plus_random1 plus_flip
    python -m benchmarks.pages.strong runs/strong [FOLDER ...]         (without folders: only the page)
    python -m benchmarks.pages.strong --shared runs/strong             runs that shared the GPU with others

Copies the small files of the runs in these folders to docs/results/strong and adds the lines of their summary.jsonl to
docs/results/strong/summary.json. Runs that did not reach their last epoch are named below the table. The comments are
those in docs/results/strong/notes.md.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.pages.results import PAPER
from benchmarks.strong_images import PARTS, RUNS
from warpi.report.experiments import RunRecord, find_runs
from warpi.runs.rerun_command import flag
from warpi.training.named_recipes import STRONG
from warpi.training.recipe import Recipe
from warpi.training.warmup import capped_warmup
from warpi.utils.files import write_with_folder

KEPT = ROOT / "docs" / "results" / "strong"
PAGE = ROOT / "docs" / "results" / "strong.md"
Summary = dict[str, Any]
INTRO = """# CIFAR-10 and CIFAR-100 with the strong recipe

This page lists all runs with [`--recipe strong`](../strong_recipe.md). [What the runs show](#what-the-runs-show) sums
them up, and [what is missing or weak](#what-is-missing-or-weak) names their limits.

Setup: `fastnet`, bf16, compiled, batches of 512. One run at a time used the GPU, except those marked †.
Machine: {gpu}. Versions: torch {torch}, Python {python}. Date: {date}.

    SHARED="--root DATA --out runs/strong --seconds 3000"
    python -m benchmarks.strong_images $SHARED --seeds 0 1 2 --runs plus_random1 plus_flip plus_uniform
    python -m benchmarks.strong_images $SHARED --runs plus_fine plus_c100_flip ce_clean ce_random1
    python -m benchmarks.strong_images $SHARED --runs plus_random1_untrusted sop_plus_random1_short
    python -m benchmarks.strong_images $SHARED --runs promix_random1_short dividemix_random1_short
    python -m benchmarks.strong_images $SHARED --runs plus_random1_strict plus_flip_strict plus_uniform_strict
    python -m benchmarks.strong_images $SHARED --runs plus_fine_strict plus_random1_v plus_flip_v
    python -m benchmarks.strong_images $SHARED --runs promix_random1 dividemix_random1 plus_instance
    python -m benchmarks.strong_images $SHARED --runs ce_flip plus_flip_untrusted plus_random1_no_mixup
    python -m benchmarks.strong_images $SHARED --seeds 100 --runs plus_random2_no_mixup
    python -m benchmarks.strong_images $SHARED --seeds 0 1 2 --runs plus_random1_long --probabilities
    python -m benchmarks.strong_images $SHARED --runs ce_clean_long elr_plus_random1
    python -m benchmarks.pages.strong runs/strong

`make results` writes this page from the runs in [docs/results/strong](strong), which `warpi report` can read as well.

- *Method*: with the settings that differ from the defaults of the method and from the strong recipe.
- *Last*: test accuracy of the last epoch in percent, one number per seed. The averaged network predicts from each test
  image and its mirror image; *one view*: from the image alone.
- *Best on test*: the best epoch on the test set, an oracle, which no user has.
- *Right*: fraction of right labels among the examples selected in the last epoch. *Recall*: fraction of right labels
  that are selected. *AUROC*: how well wrong labels of the training set are separated from right ones, by the
  predictions P in memory and, after a slash, by the audit of the trained network where it was measured.
- *Seconds*: all epochs, including an evaluation on the test set after each. In brackets the part that was spent on
  compiling: the time by which the first epoch, and the first one after a warm-up, exceeds the next epoch. A process
  compiles less for its later runs. †: two to four runs shared the GPU; what they would take alone is below.

"""
HEAD = """\
| method | labels | trusted | epochs | seeds | last | one view | best on test | right, recall | AUROC | seconds |
|:---|:---|---:|---:|:---|:---|:---|:---|:---|:---|:---|"""
PUBLISHED = """
## Published figures

Networks, training time and (for the paper) the choice of the epoch differ from ours. WarPI's figures are printed in its
paper: the best epoch on the test set, with 1,000 trusted images. The others are published last-epoch figures for
CIFAR-10N and CIFAR-100N, without trusted images. ProMix, DivideMix and ELR+ train two networks for several hundred
epochs; the figures of SOP+ are from a re-run by others.

| labels | ours: last epoch, mean of seeds | published |
|:---|:---|:---|"""
PARTS_TABLE = """
## WarPI+ without one of its parts

Accuracy of the last epoch, 1,000 trusted images, 100 epochs. In brackets: the difference to `warpi_plus` with the same
seeds.

| change | setting | `random1` | `flip:0.4` |
|:---|:---|---:|---:|"""
HUMAN = {"ProMix": 97.39, "SOP+": 95.70, "DivideMix": 95.16, "ELR+": 94.43}  # last epoch, random1
FINE = {"ProMix": 73.79, "DivideMix": 71.13, "ELR+": 66.72, "SOP+": 63.88}  # last epoch, CIFAR-100N
RIVALS = """
Our own runs of these methods on `random1`, with the strong recipe and much less time, and without trusted images if
none are named:

| method | ours: last epoch | epochs | seconds | published |
|:---|:---|:---|:---|:---|"""


def keep(folders: Sequence[Path], to: Path = KEPT, shared: bool = False) -> None:
    """Copy specification, results and end mark of the runs in `folders`, and add their summaries.

    `shared` runs were not alone on the GPU.
    """
    rows = {row["name"]: row for row in summaries(to)}
    for folder in folders:
        for row in map(json.loads, (folder / "summary.jsonl").read_text().splitlines()):
            source, target = folder / row["name"], to / row["name"]
            if reason := reason_against(row, source, target):
                print(f"{source} is left out: {reason}")
                continue
            spec = json.loads((source / "spec.json").read_text())
            spec["environment"].pop("folder", None)  # says nothing about the result
            write_with_folder(target / "spec.json", json.dumps(spec, indent=1) + "\n")
            write_with_folder(target / "results.jsonl", (source / "results.jsonl").read_text())
            if row["finished"]:
                write_with_folder(target / "done", "")
            rows[row["name"]] = row | ({"shared": True} if shared else {})
    text = ",\n".join(json.dumps(rows[name]) for name in sorted(rows))
    write_with_folder(to / "summary.json", f"[\n{text}\n]\n")


def reason_against(row: Summary, source: Path, target: Path) -> str | None:
    """The reason why a run is not copied; None if it is."""
    if not row["epochs"]:
        return "it has no epoch"
    if not row["finished"] and (target / "done").exists():
        return f"it was cut off, and {target} has finished"
    if row["finished"] and not (source / "done").exists():
        return "it was begun again, and the results in summary.jsonl are gone"
    return None


def summaries(folder: Path) -> list[Summary]:
    file = folder / "summary.json"
    return json.loads(file.read_text()) if file.exists() else []


def page(folder: Path = KEPT) -> str:
    by_name = {row["name"]: row for row in summaries(folder)}
    runs = {run.path.name: run for run in find_runs([folder])}
    finished = {name: [run for key, run in sorted(runs.items()) if run.done and is_run(key, name)] for name in RUNS}
    rows = [table_row(group, [by_name[run.path.name] for run in group]) for group in finished.values() if group]
    about = {key: each(runs.values(), key) for key in ("gpu", "torch", "python", "date")}
    notes = (folder / "notes.md").read_text().strip()
    lines = [HEAD, *rows, "", *cut_off(by_name.values()), *first_epochs(runs.values())]
    lines += [*alone(finished, by_name), *parts(finished), PUBLISHED, *published(finished), *rivals(finished)]
    lines += ["", notes, ""]
    return INTRO.format(**about) + "\n".join(lines)


def each(runs: Iterable[RunRecord], key: str) -> str:
    return "; ".join(sorted({str(run.environment[key]) for run in runs}))


def table_row(group: list[RunRecord], rows: list[Summary]) -> str:
    """A row of the table: runs that differ in the seed only."""
    spec = group[0].spec
    changed = in_flags({**spec["changed"], **other_recipe(spec["recipe"])})
    wrong = 100 * sum(run.facts["wrong_share"] for run in group) / len(group)
    noise = spec["noise"].removeprefix("given:")
    labels = f"`{noise}` ({wrong:.0f} % wrong)" if wrong else "true labels"
    labels = f"CIFAR-100, {labels}" if spec["data"] == "cifar100" else labels
    labels += f", {group[0].facts['n_train']:,} images" if spec.get("limit") else ""
    cells = [f"`{spec['method']}{' ' + changed if changed else ''}`", labels]
    cells += [f"{group[0].facts['n_meta']:,}", str(spec["recipe"]["epochs"])]
    cells.append(", ".join(str(run.spec["seed"]) for run in group))
    cells.append(listed(group, lambda run: f"{run.epochs[-1]['test_acc']:.2f}"))
    cells.append(listed(rows, lambda r: f"{r['test_acc_one_view']:.2f}"))
    cells.append(listed(group, lambda run: f"{max(e['test_acc'] for e in run.epochs):.2f}"))
    if "selected_right" in rows[0]:
        cells.append("; ".join(f"{100 * r['selected_right']:.1f}, {100 * r['recall_of_right']:.1f}" for r in rows))
        cells.append(listed(rows, auroc))
    else:
        cells += ["–", "–"]
    marks = ["†" if row.get("shared") else "" for row in rows]
    cells.append(", ".join(time_of(run) + mark for run, mark in zip(group, marks, strict=True)))
    return f"| {' | '.join(cells)} |"


def in_flags(settings: dict[str, Any]) -> str:
    return " ".join(" ".join(flag(name, value)) for name, value in settings.items())


def other_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe that differ from the strong one. The number of epochs has a column of its own."""
    usual = {"label_smoothing": 0.0, **STRONG}
    values = {name: recipe.get(name, getattr(Recipe(), name)) for name in usual if name != "epochs"}
    return {name: value for name, value in values.items() if value != usual[name]}


def auroc(row: Summary) -> str:
    audit = f" / {row['audit_auroc']:.3f}" if "audit_auroc" in row else ""
    return f"{row['auroc_wrong']:.3f}{audit}"


def listed(items: Sequence[Any], text: Callable[[Any], str]) -> str:
    return ", ".join(text(item) for item in items)


def seconds(run: RunRecord) -> list[float]:
    return [epoch["seconds"] for epoch in run.epochs]


def time_of(run: RunRecord) -> str:
    return f"{sum(seconds(run)):.0f} ({compiling(run):.0f})"


def compiling(run: RunRecord) -> float:
    """Seconds by which the first epoch of each phase was slower than the next epoch."""
    warm_up = capped_warmup(run.spec["options"].get("warm_up", 0), run.spec["recipe"]["epochs"])
    firsts = {0, round(warm_up)}
    return sum(seconds(run)[t] - seconds(run)[t + 1] for t in firsts if t + 1 < len(seconds(run)))


def cut_off(rows: Iterable[Summary]) -> list[str]:
    """Name the runs that did not reach their last epoch. They have no row in the table."""
    stopped = [
        f"`{row['name']}`, {row['test_acc']:.2f} at epoch {row['epochs']}"
        for row in rows
        if not row["finished"] and "stop" not in RUNS[row["name"].rpartition("_seed")[0]]
    ]
    return [f"Cut off, and therefore not in the table: {'; '.join(stopped)}."] if stopped else []


def alone(finished: dict[str, list[RunRecord]], by_name: dict[str, Summary]) -> list[str]:
    """Estimate the seconds without compiling of runs that shared the GPU, from runs of the same method that did not."""
    shown = []
    for group in finished.values():
        if not group or not by_name[group[0].path.name].get("shared"):
            continue
        method, epochs = group[0].spec["method"], len(group[0].epochs)
        others = [
            by_name[run.path.name]["epoch_seconds"]
            for runs in finished.values()
            for run in runs
            if run.spec["method"] == method and not by_name[run.path.name].get("shared")
        ]
        if others:
            shown.append(f"`{method}` with {epochs} epochs about {epochs * statistics.median(others):.0f} s")
    return ["", f"†: alone, without compiling: {'; '.join(shown)}."] if shown else []


def first_epochs(runs: Iterable[RunRecord]) -> list[str]:
    """Accuracies of the runs of the first epochs of a longer schedule, that of the authors of a method."""
    lines = []
    for run in runs:
        if "stop" in RUNS.get(run.path.name.rpartition("_seed")[0], {}):
            recipe = run.spec["recipe"]
            shown = [f"{e['test_acc']:.2f} at epoch {e['epoch']}" for e in run.epochs if e["epoch"] % 10 == 0]
            settings = f"{recipe['net']}, batches of {recipe['batch_size']}, learning rate {recipe['lr']:g}"
            lines.append(
                f"The first epochs of the authors' schedule of {recipe['epochs']} (`{run.path.name}`; {settings}): "
                f"{', '.join(shown)}."
            )
    return ["", *lines] if lines else []


def parts(finished: dict[str, list[RunRecord]]) -> list[str]:
    """A table of `warpi_plus` without one of its parts, and with V."""
    rows = [("with V", "v", {"rectifier": True}), ("without trusted images", "untrusted", {"meta": 0})]
    rows += [(f"without {part.replace('_', ' ')}", f"no_{part}", settings) for part, settings in PARTS.items()]
    bases = ("plus_random1", "plus_flip")
    lines = []
    for title, name, settings in rows:
        if any(finished[f"{base}_{name}"] for base in bases):
            shown = [compared(finished[f"{base}_{name}"], finished[base]) for base in bases]
            lines.append(f"| {title} | `{in_flags(settings)}` | {' | '.join(shown)} |")
    first = f"| – | – | {' | '.join(mean(finished[base]) for base in bases)} |"
    return [PARTS_TABLE, first, *lines] if lines else []


def compared(group: Sequence[RunRecord], base: Sequence[RunRecord]) -> str:
    """The mean accuracy of some runs, and its difference to the base runs with the same seeds."""
    seeds = {run.spec["seed"] for run in group}
    same = [run for run in base if run.spec["seed"] in seeds]
    if not group or len(same) < len(group):
        return mean(group)
    difference = float(mean(group)) - float(mean(same))
    return f"{mean(group)} ({difference:+.2f})"


def published(finished: dict[str, list[RunRecord]]) -> list[str]:
    lines = []
    figures = {
        "random1": in_words(HUMAN),
        "flip": printed("asymmetric", "cifar10"),
        "uniform": printed("uniform", "cifar10"),
        "fine": in_words(FINE),
        "c100_flip": printed("asymmetric", "cifar100"),
    }
    for name, others in figures.items():
        ours = f"`warpi_plus` {mean(finished[f'plus_{name}'])}"
        if without := finished.get(f"plus_{name}_untrusted"):
            ours += f"; without trusted images {mean(without)}"
        settings = RUNS[f"plus_{name}"]
        data = "CIFAR-100, " if settings.get("data") == "cifar100" else ""
        lines.append(f"| {data}`{settings['noise'].removeprefix('given:')}` | {ours} | {others} |")
    return lines


def in_words(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {figure:.2f}" for name, figure in figures.items())


def rivals(finished: dict[str, list[RunRecord]]) -> list[str]:
    """A table of our runs of the methods with published figures, if there are any."""
    lines = []
    for title, figure in HUMAN.items():
        method = title.lower().replace("+", "_plus")
        for name, runs in finished.items():
            if not runs or RUNS[name]["method"] != method or RUNS[name].get("noise") != "given:random1":
                continue
            trusted = f", {runs[0].facts['n_meta']:,} trusted images" if runs[0].facts["n_meta"] else ""
            cells = [f"`{method}` (`{name}`){trusted}", listed(runs, lambda run: f"{run.epochs[-1]['test_acc']:.2f}")]
            cells += [str(len(runs[0].epochs)), listed(runs, lambda run: f"{sum(seconds(run)):.0f}"), f"{figure:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return [RIVALS, *lines] if lines else []


def printed(table: str, data: str) -> str:
    """WarPI's figure in a table of the paper."""
    rate, net = {"asymmetric": ("0.4", "ResNet-32"), "uniform": ("0.6", "WRN-28-10")}[table]
    column = PAPER[table]["columns"].index([data, rate])
    (acc,) = [row["values"][column] for row in PAPER[table]["rows"] if row["name"] == "WarPI"]
    return f"WarPI {acc:.2f} ({net})"


def mean(runs: Sequence[RunRecord]) -> str:
    return f"{statistics.mean(run.epochs[-1]['test_acc'] for run in runs):.2f}" if runs else "–"


def is_run(folder: str, name: str) -> bool:
    return folder.rpartition("_seed")[0] == name


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:] if name != "--shared"]
    keep(folders, shared="--shared" in sys.argv)
    write_with_folder(PAGE, page())


if __name__ == "__main__":
    main()
