"""How long `auto` takes with a budget, what it leaves out, and what that costs.

    python -m benchmarks.tables.budget [--seeds 100]

A synthetic table of 1,000 rows and 20 columns with 40 % pair noise and 20 trusted rows per class, and tables of
`benchmarks.never_loses`. The time is that of the fit, without imports, reading and predictions. Writes
benchmarks/results/budget.json and prints a table.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_classification
from threadpoolctl import threadpool_limits

from benchmarks.common import RESULTS, made_on
from benchmarks.never_loses.noise import draw_trusted, make_problem, pair_noise
from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.utils.files import write_atomically

BUDGETS = (1.0, 3.0, 10.0, None)
TABLES = ("synthetic", "digits", "vehicle", "german", "hr")
RATE, PER_CLASS, N_TEST = 0.4, 20, 2000
OUT = RESULTS / "budget.json"


def load(name: str, seed: int) -> tuple[Rows, np.ndarray, np.ndarray]:
    """The rows to learn from, and test rows with their classes."""
    if name == "synthetic":
        x, y = make_classification(1000 + N_TEST, 20, n_informative=8, n_classes=3, random_state=seed)
        x, clean, x_test, y_test = x[:1000], y[:1000], x[1000:], y[1000:]
        given = pair_noise(clean, RATE, 3, np.random.default_rng([seed, 1]))
        trusted = draw_trusted(clean, PER_CLASS, np.random.default_rng([seed, 2]))
        noisy = np.setdiff1d(np.arange(1000), trusted)
        rows = Rows(x[noisy], given[noisy], x[trusted], clean[trusted], given[trusted], 3)
    else:
        problem = make_problem(name, "pair", RATE, PER_CLASS, seed)
        x_test, y_test = problem.x_test, problem.y_test
        rows = Rows(
            problem.x, problem.given, problem.x_trusted, problem.y_trusted, problem.given_trusted, problem.n_classes
        )
    known = np.concatenate([rows.x, rows.x_trusted])
    center, scale = known.mean(0), known.std(0)
    scale[scale < 1e-9] = np.inf
    x, x_trusted, x_test = (((part - center) / scale).astype(np.float32) for part in (rows.x, rows.x_trusted, x_test))
    return Rows(x, rows.given, x_trusted, rows.y_trusted, rows.given_trusted, rows.n_classes), x_test, y_test


def run(name: str, seed: int) -> Iterator[dict[str, Any]]:
    rows, x_test, y_test = load(name, seed)
    for budget in BUDGETS:
        began, cpu = time.monotonic(), time.process_time()
        result = fit_auto(rows, AutoSettings(budget=budget, seed=seed))
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu
        with torch.no_grad():
            p = result.model(torch.from_numpy(x_test)).numpy()
        yield {
            "table": name,
            "seed": seed,
            "budget": budget,
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu_seconds, 2),
            "accuracy": round(100 * float(np.mean(p.argmax(1) == y_test)), 2),
            "measured": result.trusted_score is not None,
            "left_out": [candidate.name for candidate in result.candidates if candidate.note],
        }


def summarize(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| budget | seconds, mean and largest | accuracy | with a measured accuracy |"
    yield "|---:|---:|---:|---:|"
    for budget in BUDGETS:
        these = [row for row in rows if row["budget"] == budget]
        seconds = [row["seconds"] for row in these]
        measured = sum(row["measured"] for row in these)
        accuracy = mean(row["accuracy"] for row in these)
        shown = "none" if budget is None else f"{budget:g} s"
        yield f"| {shown} | {mean(seconds):.1f}, {max(seconds):.1f} | {accuracy:.1f} | {measured} of {len(these)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    with threadpool_limits(1):
        fit_auto(load("synthetic", 0)[0], AutoSettings(budget=1e-6))  # the first fit imports modules
        for seed in options.seeds:
            for name in TABLES:
                for row in run(name, seed):
                    rows.append(row)
                    print(*list(row.values())[:-1], flush=True)
    about = made_on("warpi", "torch", "scikit-learn", "numpy") | {"threads": 1}
    lines = ",\n".join(map(json.dumps, rows))
    write_atomically(OUT, f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n'.encode())
    print(*summarize(rows), sep="\n")


if __name__ == "__main__":
    main()
