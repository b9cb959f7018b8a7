"""The pages docs/results/TABLE.md and the pictures docs/results/figures, from the results kept in docs/results/TABLE.

    python -m benchmarks.pages.results [--root FOLDER] [--no-pictures]

Nothing is run, and the same files give the same bytes: what recipes/TABLE.toml asks for, what is kept of it, what the
paper prints (paper_tables.json), and what a person has to say about it (docs/results/TABLE/notes.md).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from warpi.report.experiments import Row, RunRecord, find_runs, number, summarize
from warpi.report.figures import draw_figures
from warpi.runs.rerun import format_value
from warpi.sweep.plan import Job, read_plan
from warpi.sweep.queue import find_kept
from warpi.utils.files import write_with_folder

PAPER = json.loads((ROOT / "benchmarks" / "pages" / "paper_tables.json").read_text())["tables"]
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "clothing1m": "Clothing1M", "food101n": "Food-101N"}
LEGEND = """\
Test accuracy in percent, mean ± sample standard deviation over seeds. *Last*: the final epoch. *Best on
validation*: the epoch of the highest accuracy on held-out rows, whose labels are as noisy as those trained on.
*Best on test*: an oracle, which no user has. –: not run, or not printed."""
AGAINST = """\
The published code reports the best epoch on the test set, so that the paper's column ({label}) is to be compared
with that one. *Difference*: best on test less the paper's figure."""
MIXED = """\
°: most likely printed for the other kind of noise. Base Model, Co-teaching, MentorNet, D2L, Fine-tuning, L2RW, GLC and
MWNet are rows of MW-Net's paper, whose code flips a class to two others (`flip2`); WarPI's own to one (`flip`)."""
TIMES = """\
Seconds: the median epoch (evaluation included) of runs that had the GPU to themselves (`samples-time.toml`), the
first epoch left out. The paper's figures are of other data and of a ResNet-50 with batches of 32: compare how they
grow with L."""


@dataclass(frozen=True)
class Table:
    """One page."""

    title: str
    recipes: tuple[str, ...]
    kind: str  # paper, or which settings tell its rows apart


TABLES = {
    "asymmetric": Table("Asymmetric noise", ("asymmetric", "asymmetric-others"), "paper"),
    "uniform": Table("Uniform noise", ("uniform",), "paper"),
    "instance": Table("Instance-dependent noise", ("instance",), "paper"),
    "clothing1m": Table("Clothing1M", ("clothing1m",), "paper"),
    "food101n": Table("Food-101N", ("food101n",), "paper"),
    "v-output": Table("What may v be?", ("v-output",), "options"),
    "ablation": Table("WarPI's settings, one at a time", ("ablation",), "changes"),
    "samples": Table("The Monte-Carlo number", ("samples", "samples-time"), "samples"),
    "curves": Table("200 epochs", ("curves",), "curves"),
}
# Which of the kept runs each kind of picture is drawn from.
PICTURES = {
    "losses": ("asymmetric/warpi_*_data-cifar10_seed0",),
    "confusion": ("asymmetric/warpi_*_data-cifar10_seed0",),
    "samples": ("samples/*", "samples-time/*", "asymmetric/warpi_flip-0.4_data-cifar10_seed*"),
    "stability": ("asymmetric/*_flip-0.4_data-cifar10_seed*", "curves/*"),
    "rectifier": (
        "asymmetric/warpi_flip-0.4_data-cifar10_seed0",
        "v-output/*_label_input-embedding_meta_lr-0.0003_output-tanh_seed0",
    ),
    "sigma": ("asymmetric/warpi_*_data-cifar10_seed*", "samples/*", "curves/warpi_*"),
    "calibration": ("asymmetric/*_flip-0.4_data-cifar10_seed0",),
}
CAPTIONS = {
    "losses": """How many training examples have which loss, with the logits as they are and multiplied by v
(fig:dist). The last bar holds all that is above.""",
    "confusion": """The transition matrix of the labels; what the rectified predictions make of it, by true class as in
the paper (fig:confusion_matrix); and what needs no truth: the given labels of the examples that the classifier puts
into a class. Error: the mean over the rows of half the sum of absolute differences.""",
    "samples": """Accuracy, and seconds an epoch, against the Monte-Carlo number (fig:ell). Small dots: the seeds, where
there are several, and the line goes through their mean. Time: the median epoch of the fastest run with that number;
those of 80 epochs had two others beside them on the GPU in most epochs.""",
    "stability": """Test accuracy and loss on the trusted examples over the epochs: of the tables, mean and standard
deviation over seeds; where it is run, over 200 epochs, as the paper has it (`recipes/curves.toml`; fig:stable).
Accuracies of the first epochs may lie below the picture.""",
    "rectifier": """What V has learned: mean v, and mean σ of the sample s that v is a function of, by given label and
predicted class. Grey: no example; blank: below 0.005.""",
    "sigma": """The standard deviation σ of the posterior of s (v is a function of s) over the epochs; mean over
examples, classes and seeds. A collapse would be a fall to 0, which a few large σ hide in the mean, not in
the geometric mean (dotted; the first runs that were kept lack it).""",
    "calibration": """How often a prediction is right, against how sure the method is of it; dotted: as often as sure.
Bins with fewer than a hundredth of the test examples are not shown, the calibration error (ECE) is over all.""",
}

AFTER = "Losses, confusion, rectifier and calibration: seed 0, after the last epoch."


class Results:
    """The jobs of a table's recipes, each with its run if one is kept."""

    def __init__(self, table: Table, root: Path) -> None:
        self.root, self.outs = root, dict[str, None]()
        self.all: list[tuple[Job, RunRecord | None]] = []
        for recipe in table.recipes:
            plan = read_plan(root / "recipes" / f"{recipe}.toml")
            self.outs[str(plan.out)] = None
            for job in plan.jobs:
                folders = [root / folder for folder in plan.kept or (f"docs/results/{recipe}",)]
                path = find_kept(folders, job)
                self.all.append((job, None if path is None else find_runs([path])[0]))

    @property
    def jobs(self) -> list[Job]:
        return [job for job, _ in self.all]

    @property
    def runs(self) -> list[RunRecord]:
        return [run for _, run in self.all if run is not None]

    def some(self, **wanted: Any) -> list[RunRecord]:
        """Runs with these settings."""
        fits = lambda job: all(job.settings.get(key) == value for key, value in wanted.items())
        return [run for job, run in self.all if run is not None and fits(job)]

    def values(self, key: str) -> list[Any]:
        return list(dict.fromkeys(job.settings.get(key) for job in self.jobs))


def page(name: str, table: Table, root: Path) -> str:
    results = Results(table, root)
    alone = {"samples-time": " --per-gpu 1"}
    commands = [f"    warpi sweep recipes/{r}.toml --root DATA{alone.get(r, '')}" for r in table.recipes]
    lines = [
        f"# {table.title}",
        "",
        "Made by `make results` from the results kept in",
        f"[docs/results/{name}]({name}):",
    ]
    lines += ["", *commands, f"    python benchmarks/keep.py {' '.join(results.outs)}", ""]
    notes = root / "docs" / "results" / name / "notes.md"
    if notes.exists():
        lines += [notes.read_text().strip(), ""]
    body = {"paper": _paper, "options": _options, "changes": _changes, "samples": _samples, "curves": _curves}[
        table.kind
    ](name, results)
    while body[-1] == "":
        body.pop()
    lines += [*body, "", *_missing(results), *(_printed_only(name, results) if table.kind == "paper" else [])]
    lines += _evidence(results)
    return "\n".join(lines).rstrip() + "\n"


# -- the tables of the paper -----------------------------------------------------------------------------------------


def _paper(name: str, results: Results) -> list[str]:
    printed = PAPER[name]
    lines = [LEGEND, AGAINST.format(label=f"`{printed['label']}`"), ""]
    if any(row.get("probably") for row in printed["rows"]):
        lines += [MIXED, ""]
    cells = [(data, noise) for data in results.values("data") for noise in sorted(results.values("noise"))]
    begun = [cell for cell in cells if results.some(data=cell[0], noise=cell[1])]
    for data, noise in begun or cells:
        rate = noise.partition(":")[2] or None
        column = next((i for i, c in enumerate(printed["columns"]) if c == [data, rate]), None)
        lines += _block(data, noise, column, printed["rows"], results)
    return lines


def _block(data: str, noise: str, column: int | None, printed: list[dict[str, Any]], results: Results) -> list[str]:
    title = f"## {NAMES.get(data, data)}" + ("" if noise == "given" else f", `{noise}`")
    lines = [title, "", "| method | seeds | last | best on validation | best on test | paper | difference |"]
    lines.append("|:---|---:|---:|---:|---:|---:|---:|")
    kind, extra = noise.partition(":")[0], {"values": [], "name": ""}
    named = {row["method"] for row in printed}
    mixed = any(row.get("probably") for row in printed)
    others = [{**extra, "method": m} for m in results.values("method") if m not in named]
    for row in (*printed, *others):
        value = row["values"][column] if row["values"] and column is not None else None
        runs = results.some(data=data, noise=noise, method=row["method"])
        best = _row(runs).best_mean if runs else None
        mark = "°" if mixed and row.get("probably", "flip") != kind else ""
        paper = "–" if value is None else f"{value:.2f}{mark}"
        difference = "–" if value is None or best is None else f"{best - value:+.2f}"
        lines.append(_pipes([row["name"] or f"`{row['method']}`", *_cells(runs), paper, difference]))
    return [*lines, ""]


# -- other tables ----------------------------------------------------------------------------------------------------


def _options(_: str, results: Results) -> list[str]:
    """One row for each way to make v, the noises side by side."""
    lines = [LEGEND, ""]
    keys = ("output", "label_input", "mean_init", "meta_lr")
    ways = list(dict.fromkeys(tuple(job.settings.get(key) for key in keys) for job in results.jobs))
    for noise in results.values("noise"):
        lines += [
            f"## `{noise}`",
            "",
            "| output | label | first mean | meta lr | seeds | last | best on validation | best on test |",
        ]
        lines.append("|:---|:---|:---|---:|---:|---:|---:|---:|")
        for way in ways:
            runs = results.some(noise=noise, **dict(zip(keys, way, strict=True)))
            if not runs and results.runs:  # what is missing is said below
                continue
            lines.append(_pipes([*(f"`{format_value(value or 'xavier')}`" for value in way), *_cells(runs)]))
        lines.append("")
    return lines


def _changes(_: str, results: Results) -> list[str]:
    """One row for each run that differs from most of the others in something."""
    lines = [LEGEND, "", "| changed | seeds | last | best on validation | best on test |", "|:---|---:|---:|---:|---:|"]
    keys = dict.fromkeys(key for job in results.jobs for key in job.settings if key != "seed")
    usual = {key: statistics.mode(job.settings.get(key) for job in results.jobs) for key in keys}
    changed = {
        tuple((key, job.settings.get(key)) for key in keys if job.settings.get(key) != usual[key]): None
        for job in results.jobs
    }
    for change in changed:
        runs = results.some(**{**usual, **dict(change)})
        lines.append(_pipes([", ".join(f"`{key}` = {format_value(value)}" for key, value in change), *_cells(runs)]))
    return lines


def _samples(name: str, results: Results) -> list[str]:
    lines = [LEGEND, TIMES, ""]
    for data in results.values("data"):
        lines += [f"## {NAMES.get(data, data)}, `flip:0.4`", ""]
        lines += ["| L | seeds | last | best on validation | best on test | seconds an epoch | seconds a batch |"]
        lines.append("|---:|---:|---:|---:|---:|---:|---:|")
        for samples in sorted(results.values("samples")):
            runs = results.some(data=data, samples=samples)
            longest = max((len(run.epochs) for run in runs), default=0)
            scored = [run for run in runs if len(run.epochs) == longest and longest > 3]
            timed = [run for run in runs if len(run.epochs) <= 3]
            cells = ["–", "–"]
            if timed:
                epoch = min(statistics.median(number(e, "seconds") or 0.0 for e in run.epochs[1:]) for run in timed)
                steps = timed[0].facts["n_train"] // timed[0].spec["recipe"]["batch_size"]
                cells = [f"{epoch:.2f}", f"{epoch / steps:.4f}"]
            lines.append(_pipes([str(samples), *_cells(scored), *cells]))
        lines.append("")
    lines += _step(results.root / "benchmarks" / "results" / "samples-h200.json")
    lines += ["## What the paper prints (`tab:ell`)", "", "| L | " + " | ".join(PAPER[name]["columns"]) + " |"]
    lines.append("|---:" * 5 + "|")
    lines += [_pipes([str(row["samples"]), *map(str, row["values"])]) for row in PAPER[name]["rows"]]
    return lines


def _step(file: Path) -> list[str]:
    """A step of the paper's network, as `warpi bench meta-step` measured it (benchmarks/gpu.sh step)."""
    if not file.exists():
        return [
            "A step of the paper's network and batch here: not measured yet (`bash benchmarks/gpu.sh step 300`).",
            "",
        ]
    rows = json.loads(file.read_text())
    first = rows[0]
    lines = [f"## A step of {first['net']}, batches of {first['batch']}, {first['precision']}", ""]
    lines += [f"{first['gpu'] or 'CPU'}, torch {first['torch']}, {first['date']}; images of 224 pixels in memory.", ""]
    lines += ["| | L | beside it on the GPU | seconds a batch |", "|:---|---:|:---|---:|"]
    for r in rows:
        cells = [f"`{r['variant']}`", str(r["samples"] or "–"), r.get("beside", "nothing"), f"{r['ms'] / 1000:.4f}"]
        lines.append(_pipes(cells))
    return [*lines, ""]


def _curves(_: str, results: Results) -> list[str]:
    lines = [LEGEND, "", "*Fall*: from the best epoch to the last.", ""]
    for noise in results.values("noise"):
        lines += [f"## `{noise}`", ""]
        lines += ["| method | seeds | last | best on test | at epoch | fall | meta loss: lowest | last |"]
        lines.append("|:---|---:|---:|---:|---:|---:|---:|---:|")
        for method in results.values("method"):
            runs = results.some(noise=noise, method=method)
            cells = ["–"] * 7
            if runs:
                row = _row(runs)
                best = [max(run.epochs, key=lambda e: number(e, "test_acc") or 0.0) for run in runs]
                fall = [b["test_acc"] - run.epochs[-1]["test_acc"] for b, run in zip(best, runs, strict=True)]
                meta = [[m for e in run.epochs if (m := number(e, "meta_loss")) is not None] for run in runs]
                cells = [str(row.n_seeds), _mean(row.last_mean, row.last_std), _mean(row.best_mean, row.best_std)]
                cells += [", ".join(str(int(b["epoch"])) for b in best), f"{statistics.fmean(fall):.2f}"]
                known = [m for m in meta if m]
                cells += [
                    f"{statistics.fmean(f(m) for m in known):.3f}" if known else "–" for f in (min, lambda m: m[-1])
                ]
            lines.append(_pipes([f"`{method}`", *cells]))
        lines.append("")
    return lines


def _cells(runs: Sequence[RunRecord]) -> list[str]:
    """Seeds, last, best on validation, best on test."""
    if not runs:
        return ["–"] * 4
    row = _row(runs)
    pairs = ((row.last_mean, row.last_std), (row.val_mean, row.val_std), (row.best_mean, row.best_std))
    return [str(row.n_seeds), *(_mean(*pair) for pair in pairs)]


def _row(runs: Sequence[RunRecord]) -> Row:
    """Runs over their seeds. Those that were done with other defaults would be another row, and none may be lost."""
    rows = summarize(runs)
    if len(rows) > 1:
        sys.exit(
            f"{', '.join(str(r.path) for r in runs)} differ in more than the seed: {', '.join(r.label for r in rows)}"
        )
    return rows[0]


# -- what is there, and what is not ----------------------------------------------------------------------------------


def _missing(results: Results) -> list[str]:
    """By data and noise: which methods with which seeds, or how many runs where there is one method only."""
    left = [job for job, run in results.all if run is None or not run.done]
    lines = ["## What has not been run", ""]
    if not left:
        return [*lines, "Nothing: all runs of the recipe are here.", ""]
    lines += [f"{len(left)} of {len(results.jobs)} runs (in brackets: seeds):", ""]
    cells: dict[str, dict[str, list[str]]] = {}
    for job in left:
        where = " ".join(str(job.settings[k]) for k in ("data", "noise") if job.settings.get(k) not in (None, "given"))
        cells.setdefault(where, {}).setdefault(job.settings["method"], []).append(str(job.settings["seed"]))
    one = len(results.values("method")) == 1
    for where, methods in cells.items():
        named = [f"{len(seeds)} runs" if one else f"{m} ({', '.join(seeds)})" for m, seeds in methods.items()]
        lines.append(f"- {where}: {', '.join(named)}")
    return [*lines, ""]


def _printed_only(name: str, results: Results) -> list[str]:
    """Rows of the paper that no recipe asks for, or not at every rate of noise."""
    asked = {(job.settings["method"], str(job.settings["noise"]).partition(":")[2]) for job in results.jobs}
    rates = sorted({rate for _, rate in asked})
    found = []
    for row in PAPER[name]["rows"]:
        left = [rate for rate in rates if (row["method"], rate) not in asked]
        if left:
            found.append(row["name"] + ("" if left == rates else f" (at {', '.join(left)})"))
    return [f"Printed, and asked for by no recipe: {', '.join(found)}.", ""] if found else []


def _made(runs: Sequence[RunRecord]) -> str:
    """On what, and when."""
    machines = _each(run.environment.get("gpu") or run.environment.get("device") for run in runs)
    versions = _each(
        f"warpi {r.version}, torch {r.environment.get('torch')}, python {r.environment.get('python')}" for r in runs
    )
    dates = _each(run.environment.get("date", "unknown") for run in runs)
    return f"Machine: {machines}. Versions: {versions}. Runs begun on: {dates}."


def _evidence(results: Results) -> list[str]:
    """On what, when, and with which labels."""
    runs = results.runs
    if not runs:
        return []
    lines = ["## Where it comes from", "", _made(runs), ""]
    lines += [
        "| data | noise | seed | wrong labels | trained on | SHA-256 of the noisy labels |",
        "|:---|:---|---:|---:|---:|:---|",
    ]
    seen = {}
    for run in runs:
        facts = run.facts
        wrong = "–" if facts.get("wrong_share") is None else f"{100 * facts['wrong_share']:.2f} %"
        cells = (
            run.spec["data"],
            run.spec["noise"],
            run.spec["seed"],
            wrong,
            facts["n_train"],
            f"`{facts['noise_sha256'][:16]}`",
        )
        seen[tuple(map(str, cells))] = None
    return [*lines, *(_pipes(cells) for cells in sorted(seen)), ""]


def _each(texts: Iterable[str]) -> str:
    return "; ".join(sorted(set(map(str, texts))))


def _mean(mean: float | None, std: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# -- pictures --------------------------------------------------------------------------------------------------------


def pictures(root: Path) -> str:
    """Draw what the kept runs allow; return the page that shows it."""
    results, out = root / "docs" / "results", root / "docs" / "results" / "figures"
    lines = ["# Figures", "", "Made by `make results` from what is kept of the runs; as SVG beside the PNG.", AFTER, ""]
    known = {run.path for table in TABLES.values() for run in Results(table, root).runs}
    others = dict[Path, None]()
    for old in out.glob("*.[ps][nv]g"):
        old.unlink()
    numbers: dict[str, Any] = {}
    used: dict[Path, RunRecord] = {}
    for kind, patterns in PICTURES.items():
        folders = [
            path for pattern in patterns for path in sorted(results.glob(pattern)) if (path / "spec.json").exists()
        ]
        others |= dict.fromkeys(path for path in folders if path not in known)
        folders = [path for path in folders if path in known]
        runs = find_runs(folders) if folders else []
        used |= {run.path: run for run in runs}
        drawn, found = draw_figures(runs, out, [kind]) if runs else ([], {})
        images = [f"![{path.stem}](figures/{path.name})" for path in drawn if path.suffix == ".png"]
        lines += [f"## {kind}", "", CAPTIONS[kind], "", *(images or ["Not yet: the runs are missing."]), ""]
        if kind in ("confusion", "rectifier", "calibration"):
            numbers |= found
    for path in others:
        print(f"{path} is not a run that the recipe of its table contains; it is not drawn", file=sys.stderr)
    if numbers:
        write_with_folder(
            out / "figures.json", json.dumps(numbers, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        )
        lines += ["Numbers of these pictures: [figures.json](figures/figures.json).", ""]
    if used:
        lines += [_made(list(used.values())), ""]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--no-pictures", action="store_true")
    given = parser.parse_args(argv)
    for name, table in TABLES.items():
        write_with_folder(given.root / "docs" / "results" / f"{name}.md", page(name, table, given.root))
    if not given.no_pictures:
        write_with_folder(given.root / "docs" / "results" / "figures.md", pictures(given.root))


if __name__ == "__main__":
    main()
