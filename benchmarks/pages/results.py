"""Write the pages docs/results/TABLE.md and the figures docs/results/figures from the results stored in docs/results.

    python -m benchmarks.pages.results [--root FOLDER] [--no-pictures]

Nothing is trained, and the same files give the same bytes. A page combines the runs of recipes/TABLE.toml, their stored
results, the figures printed in the paper (paper_tables.json), and the comments in docs/results/TABLE/notes.md.
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
from warpi.runs.rerun_command import format_value
from warpi.sweep.plan import Job, read_plan
from warpi.sweep.run_states import find_kept
from warpi.utils.files import write_with_folder

PAPER = json.loads((ROOT / "benchmarks" / "pages" / "paper_tables.json").read_text())["tables"]
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "clothing1m": "Clothing1M", "food101n": "Food-101N"}
LEGEND = """\
Test accuracy in percent, mean ± sample standard deviation over seeds. *Last*: the final epoch. *Best on
validation*: the epoch with the highest accuracy on held-out rows, whose labels are as noisy as the training labels.
*Best on test*: an oracle, which no user has. –: not run, or not printed."""
AGAINST = """\
The published code reports the best epoch on the test set, so compare the paper's column ({label}) with *best on test*.
*Difference*: best on test minus the paper's figure."""
MIXED = """\
°: most likely printed for the other kind of noise. Base Model, Co-teaching, MentorNet, D2L, Fine-tuning, L2RW, GLC and
MWNet are rows of MW-Net's paper, whose code flips a class to two others (`flip2`); WarPI's flips it to one (`flip`)."""
TIMES = """\
Seconds: the median epoch, including evaluation and without the first, of runs that were alone on the GPU
(`samples-time.toml`). The paper's figures are for other data and a ResNet-50 with batches of 32: compare only how they
grow with L."""


@dataclass(frozen=True)
class Table:
    """One page."""

    title: str
    recipes: tuple[str, ...]
    kind: str  # paper, or the settings that distinguish its rows


TABLES = {
    "asymmetric": Table("Asymmetric noise", ("asymmetric", "asymmetric-others"), "paper"),
    "uniform": Table("Uniform noise", ("uniform",), "paper"),
    "instance": Table("Instance-dependent noise", ("instance",), "paper"),
    "clothing1m": Table("Clothing1M", ("clothing1m",), "paper"),
    "food101n": Table("Food-101N", ("food101n",), "paper"),
    "v-output": Table("The output of V", ("v-output",), "options"),
    "ablation": Table("WarPI's settings, one at a time", ("ablation",), "changes"),
    "samples": Table("The number of Monte-Carlo samples", ("samples", "samples-time"), "samples"),
    "curves": Table("200 epochs", ("curves",), "curves"),
}
# The stored runs from which each kind of figure is drawn.
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
    "losses": """Histograms of the training losses, for the raw logits and for the logits times v (fig:dist). The last
bar also counts all larger losses.""",
    "confusion": """The true transition matrix of the labels; the rectified predictions by true class, as in the paper
(fig:confusion_matrix); and the given labels by predicted class, which does not need the truth. Error: the mean over the
rows of half the sum of absolute differences.""",
    "samples": """Accuracy and seconds per epoch against the number of Monte-Carlo samples (fig:ell). Small dots: single
seeds, if there are several; the line connects their means. Time: the median epoch of the fastest run with that number.
The runs of 80 epochs shared the GPU with two others in most epochs.""",
    "stability": """Test accuracy and loss on the trusted examples over the epochs: mean and standard deviation over
seeds for the 80 epochs of the tables, and for 200 epochs as in the paper (`recipes/curves.toml`; fig:stable).
Accuracies of the first epochs may be outside of the figure.""",
    "rectifier": """What V has learned: mean v, and mean σ of the sample s of which v is a function, by given label and
predicted class. Gray: no example; blank: below 0.005.""",
    "sigma": """The standard deviation σ of the posterior of s (v is a function of s) over the epochs; mean over
examples, classes and seeds. In a collapse σ would fall to 0. A few large σ hide that in the mean, but not in the
geometric mean (dotted; missing in the oldest stored runs).""",
    "calibration": """Fraction of right predictions by their probability; dotted: perfect calibration. Bins with less
than 1 % of the test examples are not shown, but the calibration error (ECE) includes them.""",
}

AFTER = "Losses, confusion, rectifier and calibration: seed 0, after the last epoch."


class Results:
    """The jobs of a table's recipes, each with its stored run, if any."""

    def __init__(self, table: Table, root: Path) -> None:
        self.root = root
        self.outs: dict[str, None] = {}
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
    flags = {"samples-time": " --per-gpu 1"}
    commands = [f"    warpi sweep recipes/{r}.toml --root DATA{flags.get(r, '')}" for r in table.recipes]
    lines = [
        f"# {table.title}",
        "",
        "Written by `make results` from the results stored in",
        f"[docs/results/{name}]({name}):",
    ]
    lines += ["", *commands, f"    python benchmarks/keep.py {' '.join(results.outs)}", ""]
    notes = root / "docs" / "results" / name / "notes.md"
    if notes.exists():
        lines += [notes.read_text().strip(), ""]
    kinds = {"paper": _paper, "options": _options, "changes": _changes, "samples": _samples, "curves": _curves}
    body = kinds[table.kind](name, results)
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
    kind = noise.partition(":")[0]
    extra: dict[str, Any] = {"values": [], "name": ""}
    named = {row["method"] for row in printed}
    mixed = any(row.get("probably") for row in printed)
    others = [{**extra, "method": m} for m in results.values("method") if m not in named]
    for row in (*printed, *others):
        value = row["values"][column] if row["values"] and column is not None else None
        runs = results.some(data=data, noise=noise, method=row["method"])
        best = summarize_seeds(runs).best_mean if runs else None
        mark = "°" if mixed and row.get("probably", "flip") != kind else ""
        paper = "–" if value is None else f"{value:.2f}{mark}"
        difference = "–" if value is None or best is None else f"{best - value:+.2f}"
        lines.append(join_cells([row["name"] or f"`{row['method']}`", *_cells(runs), paper, difference]))
    return [*lines, ""]


# -- other tables ----------------------------------------------------------------------------------------------------


def _options(_: str, results: Results) -> list[str]:
    """One table per noise, with one row per combination of the settings of v."""
    lines = [LEGEND, ""]
    keys = ("output", "label_input", "mean_init", "meta_lr")
    combinations = list(dict.fromkeys(tuple(job.settings.get(key) for key in keys) for job in results.jobs))
    for noise in results.values("noise"):
        lines += [
            f"## `{noise}`",
            "",
            "| output | label | initial mean | meta lr | seeds | last | best on validation | best on test |",
        ]
        lines.append("|:---|:---|:---|---:|---:|---:|---:|---:|")
        for values in combinations:
            runs = results.some(noise=noise, **dict(zip(keys, values, strict=True)))
            if not runs and results.runs:  # missing runs are listed below
                continue
            lines.append(join_cells([*(f"`{format_value(value or 'xavier')}`" for value in values), *_cells(runs)]))
        lines.append("")
    return lines


def _changes(_: str, results: Results) -> list[str]:
    """One row per change from the most frequent settings."""
    lines = [LEGEND, "", "| changed | seeds | last | best on validation | best on test |", "|:---|---:|---:|---:|---:|"]
    keys = dict.fromkeys(key for job in results.jobs for key in job.settings if key != "seed")
    usual = {key: statistics.mode(job.settings.get(key) for job in results.jobs) for key in keys}
    changed = {
        tuple((key, job.settings.get(key)) for key in keys if job.settings.get(key) != usual[key]): None
        for job in results.jobs
    }
    for change in changed:
        runs = results.some(**{**usual, **dict(change)})
        lines.append(
            join_cells([", ".join(f"`{key}` = {format_value(value)}" for key, value in change), *_cells(runs)])
        )
    return lines


def _samples(name: str, results: Results) -> list[str]:
    lines = [LEGEND, TIMES, ""]
    for data in results.values("data"):
        lines += [f"## {NAMES.get(data, data)}, `flip:0.4`", ""]
        lines += ["| L | seeds | last | best on validation | best on test | seconds per epoch | seconds per batch |"]
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
            lines.append(join_cells([str(samples), *_cells(scored), *cells]))
        lines.append("")
    lines += _step(results.root / "benchmarks" / "results" / "samples-h200.json")
    lines += ["## The paper's table (`tab:ell`)", "", "| L | " + " | ".join(PAPER[name]["columns"]) + " |"]
    lines.append("|---:" * 5 + "|")
    lines += [join_cells([str(row["samples"]), *map(str, row["values"])]) for row in PAPER[name]["rows"]]
    return lines


def _step(file: Path) -> list[str]:
    """A step of the paper's network, measured by `warpi bench meta-step`."""
    if not file.exists():
        return ["A step of the paper's network and batch has not been measured yet.", ""]
    rows = json.loads(file.read_text())
    first = rows[0]
    lines = [f"## A step of {first['net']}, batches of {first['batch']}, {first['precision']}", ""]
    lines += [f"{first['gpu'] or 'CPU'}, torch {first['torch']}, {first['date']}; images of 224 pixels, in memory.", ""]
    lines += ["| | L | also on the GPU | seconds per batch |", "|:---|---:|:---|---:|"]
    for r in rows:
        cells = [f"`{r['variant']}`", str(r["samples"] or "–"), r.get("beside", "nothing"), f"{r['ms'] / 1000:.4f}"]
        lines.append(join_cells(cells))
    return [*lines, ""]


def _curves(_: str, results: Results) -> list[str]:
    lines = [LEGEND, "", "*Drop*: from the best epoch to the last.", ""]
    for noise in results.values("noise"):
        lines += [f"## `{noise}`", ""]
        lines += ["| method | seeds | last | best on test | at epoch | drop | meta loss: lowest | last |"]
        lines.append("|:---|---:|---:|---:|---:|---:|---:|---:|")
        for method in results.values("method"):
            runs = results.some(noise=noise, method=method)
            cells = ["–"] * 7
            if runs:
                row = summarize_seeds(runs)
                best = [max(run.epochs, key=lambda e: number(e, "test_acc") or 0.0) for run in runs]
                drops = [b["test_acc"] - run.epochs[-1]["test_acc"] for b, run in zip(best, runs, strict=True)]
                meta = [[m for e in run.epochs if (m := number(e, "meta_loss")) is not None] for run in runs]
                cells = [
                    str(row.n_seeds),
                    format_mean(row.last_mean, row.last_std),
                    format_mean(row.best_mean, row.best_std),
                ]
                cells += [", ".join(str(int(b["epoch"])) for b in best), f"{statistics.fmean(drops):.2f}"]
                known = [m for m in meta if m]
                cells += [
                    f"{statistics.fmean(f(m) for m in known):.3f}" if known else "–" for f in (min, lambda m: m[-1])
                ]
            lines.append(join_cells([f"`{method}`", *cells]))
        lines.append("")
    return lines


def _cells(runs: Sequence[RunRecord]) -> list[str]:
    """Seeds, last, best on validation, best on test."""
    if not runs:
        return ["–"] * 4
    row = summarize_seeds(runs)
    pairs = ((row.last_mean, row.last_std), (row.val_mean, row.val_std), (row.best_mean, row.best_std))
    return [str(row.n_seeds), *(format_mean(*pair) for pair in pairs)]


def summarize_seeds(runs: Sequence[RunRecord]) -> Row:
    """The row of runs that differ only in the seed; other differences end the script, so that no run is lost."""
    rows = summarize(runs)
    if len(rows) > 1:
        sys.exit(
            f"{', '.join(str(r.path) for r in runs)} differ in more than the seed: {', '.join(r.label for r in rows)}"
        )
    return rows[0]


# -- missing runs and sources ----------------------------------------------------------------------------------------


def _missing(results: Results) -> list[str]:
    """Missing runs by data and noise: methods with seeds, or the number of runs if there is only one method."""
    left = [job for job, run in results.all if run is None or not run.done]
    lines = ["## Missing runs", ""]
    if not left:
        return [*lines, "None: all runs of the recipe are stored.", ""]
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
    """Rows of the paper that no recipe contains, or not for every noise rate."""
    asked = {(job.settings["method"], str(job.settings["noise"]).partition(":")[2]) for job in results.jobs}
    rates = sorted({rate for _, rate in asked})
    names = []
    for row in PAPER[name]["rows"]:
        left = [rate for rate in rates if (row["method"], rate) not in asked]
        if left:
            names.append(row["name"] + ("" if left == rates else f" (at {', '.join(left)})"))
    return [f"Printed, but not in a recipe: {', '.join(names)}.", ""] if names else []


def _made(runs: Sequence[RunRecord]) -> str:
    """Machines, versions and dates of runs."""
    machines = _each(run.environment.get("gpu") or run.environment.get("device") for run in runs)
    versions = _each(
        f"warpi {r.version}, torch {r.environment.get('torch')}, python {r.environment.get('python')}" for r in runs
    )
    dates = _each(run.environment.get("date", "unknown") for run in runs)
    return f"Machine: {machines}. Versions: {versions}. Runs started on: {dates}."


def _evidence(results: Results) -> list[str]:
    """Machines, dates and hashes of the labels."""
    runs = results.runs
    if not runs:
        return []
    lines = ["## Sources", "", _made(runs), ""]
    lines += [
        "| data | noise | seed | wrong labels | training rows | SHA-256 of the noisy labels |",
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
    return [*lines, *(join_cells(cells) for cells in sorted(seen)), ""]


def _each(texts: Iterable[str]) -> str:
    return "; ".join(sorted(set(map(str, texts))))


def format_mean(mean: float | None, std: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def join_cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# -- pictures --------------------------------------------------------------------------------------------------------


def pictures(root: Path) -> str:
    """Draw the figures of the stored runs; return the page that shows them."""
    results = root / "docs" / "results"
    out = results / "figures"
    lines = ["# Figures", "", "Drawn by `make results` from stored runs, as PNG and SVG.", AFTER, ""]
    known = {run.path for table in TABLES.values() for run in Results(table, root).runs}
    others: dict[Path, None] = {}
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
        drawn, values = draw_figures(runs, out, [kind]) if runs else ([], {})
        images = [f"![{path.stem}](figures/{path.name})" for path in drawn if path.suffix == ".png"]
        lines += [f"## {kind}", "", CAPTIONS[kind], "", *(images or ["Not drawn yet: the runs are missing."]), ""]
        if kind in ("confusion", "rectifier", "calibration"):
            numbers |= values
    for path in others:
        print(f"{path} is not a run that the recipe of its table contains; it is not drawn", file=sys.stderr)
    if numbers:
        write_with_folder(
            out / "figures.json", json.dumps(numbers, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        )
        lines += ["Numbers of these figures: [figures.json](figures/figures.json).", ""]
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
