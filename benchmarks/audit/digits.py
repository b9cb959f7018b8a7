"""Finding wrong labels: `warpi audit` and cleanlab on the same splits of digits.

    python -m benchmarks.audit.digits          writes results/audit_digits.json and the tables of docs/audit.md
    python -m benchmarks.audit.digits --tables only writes the tables

Needs cleanlab (`pip install 'warpi[cleanlab]'`). Finished runs are stored and not repeated.
The settings were chosen on other seeds (10 to 14).
"""

import json
import os
import platform
import sys
import time
import warnings
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from cleanlab.classification import CleanLearning
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

import warpi
from benchmarks.common import RESULTS, ROOT
from warpi.audit import audit
from warpi.audit.pick import pick_rows
from warpi.audit.result import Audit

NOISES = ("pair:0.4", "uniform:0.4")
SEEDS = range(5)
META = 50
FOLDS = 5
CLASSIFIERS = {
    "LogisticRegression": lambda seed: LogisticRegression(max_iter=2000),  # noqa: ARG005
    "MLPClassifier": lambda seed: MLPClassifier((128,), max_iter=200, random_state=seed),
    "RandomForestClassifier": lambda seed: RandomForestClassifier(200, random_state=seed),
}
OUT = RESULTS / "audit_digits.json"
PAGE = ROOT / "docs" / "audit.md"


def detection(bad: np.ndarray, score: np.ndarray, issue: np.ndarray) -> dict[str, float]:
    """How well a score and a decision detect wrong labels."""
    hits = int((issue & bad).sum())
    return {
        "auroc": float(roc_auc_score(bad, score)),
        "precision": hits / max(1, int(issue.sum())),
        "recall": hits / int(bad.sum()),
    }


def calibration(bad: np.ndarray, wrong: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error of wrong_probability."""
    at = np.minimum((wrong * bins).astype(int), bins - 1)
    return float(sum(abs(bad[at == b].mean() - wrong[at == b].mean()) * (at == b).mean() for b in set(at.tolist())))


def ours(a: Audit, clean: np.ndarray, T: np.ndarray) -> dict[str, float]:
    bad = clean != a.given
    return {
        **detection(bad, a.wrong_probability, a.is_label_issue),
        "ece": calibration(bad, a.wrong_probability),
        "right_after_fix": float((np.where(a.is_label_issue, a.suggested, a.given) == clean).mean()),
        "noise_rate_error": a.facts["noise_rate"]["rate"] - float(bad.mean()),
        "T_error": float(np.abs(a.T - T).sum(1).mean() / 2),
        "uncertainty_finds_mistakes": float(roc_auc_score(bad != a.is_label_issue, a.uncertainty)),
    }


def fit(method: warpi.Method, task: warpi.Task, truth: warpi.Truth, seed: int) -> float:
    """Train, and return the test accuracy of the last epoch."""
    _, defaults = warpi.load_dataset("digits")
    recipe = warpi.Recipe(
        **{k: defaults[k] for k in ("net", "epochs", "batch_size", "meta_batch_size", "lr")}, seed=seed
    )
    method.start(task, recipe)
    return [record for record in warpi.train(method, task, truth) if record][-1]["test_acc"]


def run(noise: str, seed: int) -> dict[str, Any]:
    task, truth = warpi.make_task(warpi.load_dataset("digits")[0], noise, meta=META, seed=seed)
    clean, y = truth.clean.numpy(), task.train.y.numpy()
    bad = clean != y
    rows: dict[str, dict[str, float]] = {}

    method = warpi.WarPI(output="tanh", label_input="one_hot")
    before = fit(method, task, truth, seed)
    began = time.perf_counter()
    a = audit(method, folds=0)
    rows["warpi audit --folds 0"] = ours(a, clean, truth.T.numpy()) | {"seconds": time.perf_counter() - began}
    began = time.perf_counter()
    b = audit(method, folds=FOLDS)
    rows[f"warpi audit --folds {FOLDS}"] = ours(b, clean, truth.T.numpy()) | {"seconds": time.perf_counter() - began}

    after: dict[str, float] = {"warpi before": before}
    ce = fit(warpi.CE(), task, truth, seed)
    after["ce before"] = ce
    half = a.ranked[: int(a.is_label_issue.sum()) // 2]  # the half of the issues with the highest probability
    for name, at in (("all issues", np.flatnonzero(a.is_label_issue)), ("the surest half", half)):
        labels = y.copy()
        labels[at] = a.suggested[at]
        fixed = replace(task, train=replace(task.train, y=torch.from_numpy(labels)))
        after[f"warpi after {name}"] = fit(warpi.WarPI(output="tanh", label_input="one_hot"), fixed, truth, seed)
        after[f"ce after {name}"] = fit(warpi.CE(), fixed, truth, seed)

    def arrays(split: warpi.Split) -> tuple[np.ndarray, np.ndarray]:
        return (split.examples.flat(split.rows) / 16).numpy(), split.y.numpy()

    x, labels = (np.concatenate(parts) for parts in zip(arrays(task.train), arrays(task.meta), strict=True))
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, make in CLASSIFIERS.items():
            began = time.perf_counter()
            issues = CleanLearning(make(seed), seed=seed, cv_n_folds=FOLDS).find_label_issues(x, labels)[: len(y)]
            score, issue = 1 - issues["label_quality"].to_numpy(), issues["is_label_issue"].to_numpy()
            rows[f"cleanlab, {name}"] = detection(bad, score, issue) | {"seconds": time.perf_counter() - began}
    issue = find_label_issues(**b.cleanlab())
    score = 1 - get_label_quality_scores(**b.cleanlab())
    rows[f"cleanlab on the probabilities of --folds {FOLDS}"] = detection(bad, score, issue)
    split = {"n": len(y), "wrong": float(bad.mean()), "noise_hash": truth.noise_hash}
    return {"noise": noise, "seed": seed, "split": split, "found": rows, "accuracy": after}


def more_trusted(noise: str, seed: int, n: int = 50) -> dict[str, float]:
    """Test accuracy if a person checks n more rows, which become trusted: the most suspicious ones, or by `pick`."""
    task, truth = warpi.make_task(warpi.load_dataset("digits")[0], noise, meta=META, seed=seed)
    method = warpi.WarPI(output="tanh", label_input="one_hot")
    accuracy = {"before": fit(method, task, truth, seed)}
    split = task.train
    right = truth.clean
    a = audit(method, folds=0)
    picked = pick_rows(n, a.row, a.given, a.classes, audit=a, seed=seed)
    choices = {"the most suspicious": a.ranked[:n], "warpi pick": np.searchsorted(a.row, picked.row)}
    for name, at in choices.items():
        rest = np.setdiff1d(np.arange(len(a)), at)
        rows, y = torch.cat([task.meta.rows, split.rows[at]]), torch.cat([task.meta.y, right[at]])
        train = replace(split, rows=split.rows[rest], y=split.y[rest])
        grown = replace(task, train=train, meta=replace(task.meta, rows=rows, y=y))
        accuracy[name] = fit(warpi.WarPI(output="tanh", label_input="one_hot"), grown, truth, seed)
    return accuracy


def tables(record: dict[str, Any]) -> str:
    """The tables of the page."""
    lines = []
    for noise in NOISES:
        runs = [r for r in record["runs"] if r["noise"] == noise]

        def cell(path: tuple[str, ...], runs: list[dict[str, Any]] = runs, scale: float = 1, digits: int = 3) -> str:
            values = []
            for r in runs:
                at: Any = r
                for key in path:
                    at = at.get(key) if isinstance(at, dict) else None
                values.append(at)
            if None in values:
                return ""
            return f"{scale * mean(values):.{digits}f} ± {scale * stdev(values):.{digits}f}"

        lines += [f"**`{noise}`**, {100 * mean(r['split']['wrong'] for r in runs):.0f} % of the labels wrong:", ""]
        lines += ["| | AUROC | precision | recall | calibration error |", "|:---|---:|---:|---:|---:|"]
        for name in runs[0]["found"]:
            cells = (cell(("found", name, key)) for key in ("auroc", "precision", "recall", "ece"))
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += [
            "",
            "| test accuracy in % | as given | most certain half corrected | all issues corrected |",
            "|:---|---:|---:|---:|",
        ]
        for name in ("warpi", "ce"):
            keys = (f"{name} before", f"{name} after the surest half", f"{name} after all issues")
            lines.append(f"| `{name}` | {' | '.join(cell(('accuracy', key), digits=1) for key in keys)} |")
        keys = ("before", "the most suspicious", "warpi pick")
        lines += ["", "| 50 more rows checked and trusted | none | the 50 most suspicious | by `warpi pick 50` |"]
        lines += ["|:---|---:|---:|---:|"]
        lines += [f"| `warpi` | {' | '.join(cell(('trusted', key), digits=1) for key in keys)} |", ""]
        for name in [n for n in runs[0]["found"] if n.startswith("warpi")]:
            get = lambda key, name=name, runs=runs: mean(r["found"][name][key] for r in runs)
            lines.append(
                f"`{name}`: {100 * get('right_after_fix'):.1f} % of labels are right after its issues are corrected; "
                f"AUROC of `uncertainty` for mistakes of `is_label_issue` {get('uncertainty_finds_mistakes'):.2f}; "
                f"mean error of T {get('T_error'):.3f} (half the sum of |difference| per row); {get('seconds'):.1f} s."
            )
            lines.append("")
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    lines.append(
        f"Mean ± sample standard deviation over seeds {SEEDS[0]} to {SEEDS[-1]}, {META} trusted examples. "
        f"{record['machine']}; {versions}; {record['date']}."
    )
    return "\n".join(lines) + "\n"


def stamp() -> dict[str, Any]:
    """Machine, versions and date."""
    versions = {"warpi": warpi.__version__, "python": platform.python_version()}
    versions |= {p: version(p) for p in ("torch", "numpy", "scikit-learn", "cleanlab")}
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread"
    return {"machine": machine, "versions": versions, "date": str(date.today())}


def main() -> None:
    torch.set_num_threads(1)
    record: dict[str, Any] = {"runs": []}
    if OUT.exists():
        record = json.loads(OUT.read_text())
    for noise in NOISES if "--tables" not in sys.argv else ():
        for seed in SEEDS:
            if not any(r["noise"] == noise and r["seed"] == seed for r in record["runs"]):
                record["runs"].append(run(noise, seed))
                record |= stamp()
                OUT.write_text(json.dumps(record, indent=1) + "\n")
                print(noise, seed, json.dumps(record["runs"][-1]), flush=True)
    for r in record["runs"] if "--tables" not in sys.argv else ():
        if "trusted" not in r:
            r["trusted"] = more_trusted(r["noise"], r["seed"])
            record |= stamp()
            OUT.write_text(json.dumps(record, indent=1) + "\n")
            print(r["noise"], r["seed"], r["trusted"], flush=True)
    page, begin, end = PAGE.read_text(), "<!-- audit_digits begins -->\n", "<!-- audit_digits ends -->"
    head, rest = page.split(begin)
    PAGE.write_text(head + begin + "\n" + tables(record) + "\n" + end + rest.split(end)[1])
    print(tables(record))


if __name__ == "__main__":
    main()
