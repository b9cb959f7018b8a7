"""How accurate are the noise rates of `warpi audit`? On synthetic tables and digits, with and without folds.

    python -m benchmarks.audit.rates          writes results/audit_rates.json and the table of docs/audit.md

Finished runs are stored and not repeated. About ten minutes on 2 CPU cores.
"""

import json
import logging
import math
import os
import platform
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import torch

import warpi
from benchmarks.common import RESULTS, ROOT
from warpi.audit import audit
from warpi.data.numeric import make_features
from warpi.runs.defaults import defaults_for, resolve_defaults, resolve_method
from warpi.utils.seeding import derive, seeded

OUT = RESULTS / "audit_rates.json"
PAGE = ROOT / "docs" / "audit.md"
FOLDS = 5
METHODS = ("warpi", "clean_only", "fine_tune")
TABLES: dict[
    str, dict[str, Any]
] = {  # classes, columns, distance of the centers, rows, trusted rows, centers per class
    "2 classes, 30 % of one of them": {"K": 2, "D": 5, "sep": 0.6, "n": 2000, "m": 80, "kind": "one", "rate": 0.3},
    "3 classes, no noise": {"K": 3, "D": 4, "sep": 1.0, "n": 2000, "m": 150, "kind": "pair", "rate": 0.0},
    "3 classes, pair:0.3": {"K": 3, "D": 4, "sep": 1.0, "n": 3000, "m": 150, "kind": "pair", "rate": 0.3},
    "4 classes, uniform:0.4": {"K": 4, "D": 6, "sep": 0.9, "n": 2000, "m": 100, "kind": "uniform", "rate": 0.4},
    "6 classes, pair:0.35": {"K": 6, "D": 8, "sep": 1.2, "n": 2000, "m": 120, "kind": "pair", "rate": 0.35, "parts": 2},
    "10 classes, pair:0.4": {"K": 10, "D": 10, "sep": 0.8, "n": 2500, "m": 100, "kind": "pair", "rate": 0.4},
}
DIGITS = ("pair:0.4", "uniform:0.4")


def table(
    K: int, D: int, sep: float, n: int, m: int, kind: str, rate: float, parts: int = 1, seed: int = 0
) -> tuple[warpi.Task, np.ndarray]:
    """Overlapping Gaussian classes: the task, and the true labels of its training rows."""
    rng = np.random.default_rng(seed)
    centers = sep * rng.normal(size=(K, parts, D))
    y = rng.integers(0, K, n + m)
    x = (centers[y, rng.integers(0, parts, n + m)] + rng.normal(size=(n + m, D))).astype(np.float32)
    others = {"pair": (y + 1) % K, "uniform": rng.integers(0, K, n + m), "one": np.maximum(y, 1)}
    given = np.where(rng.random(n + m) < rate, others[kind], y)
    names = tuple(map(str, range(K)))
    noisy, checked = (
        warpi.Dataset("synthetic", make_features(torch.from_numpy(x[at])), torch.from_numpy(labels[at]), names)
        for at, labels in ((slice(n), given), (slice(n, None), y))
    )
    task, _ = warpi.make_task(noisy, meta_data=checked, seed=seed)
    return task, y[task.train.rows.numpy()]


def run(name: str, method: str, seed: int) -> dict[str, Any]:
    if name in TABLES:
        task, clean = table(**TABLES[name], seed=seed)
        defaults = defaults_for((1,), task.n_classes)
    else:
        dataset, defaults = warpi.load_dataset("digits")
        task, truth = warpi.make_task(dataset, name, meta=50, seed=seed)
        clean = truth.clean.numpy()
    _, base = resolve_method(method)
    recipe, options, _ = resolve_defaults(base, defaults, {"seed": seed})
    learner = replace(base, **options)
    with seeded(derive(seed, "training")):
        learner.start(task, recipe)
        for _ in warpi.train(learner, task):
            pass
    rates = {f"folds {n}": audit(learner, folds=n).facts["noise_rate"] for n in (0, FOLDS)}
    return {
        "data": name,
        "method": method,
        "seed": seed,
        "wrong": float((clean != task.train.y.numpy()).mean()),
        **rates,
    }


def lines(runs: list[dict[str, Any]]) -> list[str]:
    """One row per data set and method, and a summary."""

    def cell(r: dict[str, Any], n: int) -> str:
        return f"{100 * r[f'folds {n}']['rate']:.1f}"

    text = [f"| | method | wrong % | `--folds 0` | `--folds {FOLDS}` |", "|:---|:---|---:|---:|---:|"]
    for r in runs:
        data = f"digits, {r['data']}" if r["data"] in DIGITS else r["data"]
        text.append(f"| {data} | `{r['method']}` | {100 * r['wrong']:.1f} | {cell(r, 0)} | {cell(r, FOLDS)} |")
    text.append("")
    text += ["| off by, in points (root mean square) | `--folds 0` | `--folds 5` |"]
    text += ["|:---|---:|---:|"]
    for method in METHODS:
        some = [r for r in runs if r["method"] == method]
        cells = []
        for n in (0, FOLDS):
            error = math.sqrt(np.mean([(r[f"folds {n}"]["rate"] - r["wrong"]) ** 2 for r in some]))
            cells.append(f"{100 * error:.1f}")
        text.append(f"| `{method}` | {cells[0]} | {cells[1]} |")
    return text


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the audits without folds warn that the trusted rows were trained on
    record = json.loads(OUT.read_text()) if OUT.exists() else {"runs": []}
    done = {(r["data"], r["method"], r["seed"]) for r in record["runs"]}
    for k, name in enumerate((*TABLES, *DIGITS)):
        for method in METHODS:
            if (name, method, 70 + k) not in done:
                record["runs"].append(run(name, method, 70 + k))
                versions = f"warpi {warpi.__version__}, python {platform.python_version()}, torch {torch.__version__}"
                machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread"
                record["where"] = f"{machine}; {versions}; {date.today().isoformat()}."
                OUT.write_text(json.dumps(record, indent=1) + "\n")
                print(json.dumps(record["runs"][-1]), flush=True)
    page, begin, end = PAGE.read_text(), "<!-- audit_rates begins -->\n", "<!-- audit_rates ends -->"
    head, rest = page.split(begin)
    PAGE.write_text(
        head
        + begin
        + "\n"
        + "\n".join([*lines(record["runs"]), "", record["where"], "", ""])
        + end
        + rest.split(end)[1]
    )


if __name__ == "__main__":
    main()
