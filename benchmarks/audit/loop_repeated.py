"""Is the number of wrong labels after `warpi correct` right on average? The second half of the loop, repeated.

    python -m benchmarks.audit.loop_repeated --tables hr --seeds 100 101 --out dev.json           development
    python -m benchmarks.audit.loop_repeated --tables hr --seeds $(seq 0 19)
    python -m benchmarks.audit.loop_repeated --seeds $(seq 0 5) --page                            docs/audit.md

Each case is the first half of the loop of `benchmarks.whole_loop` on a table: 35 % wrong labels, 40 random rows are
checked, a model is trained. Then 100 rows are picked in several ways that differ only in the random rows, checked, and
the labels are corrected. The printed number of wrong labels, the two numbers that it combines and its interval are
compared with the truth. One loop is a single draw, and a mean of three loops still has a large error; this script
measures how large, and what is left on average. Each finished case is kept in the results.
"""

import argparse
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.audit.cifar10n_features import fill
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.never_loses.tables import TABLES, keel
from benchmarks.whole_loop import FIRST, SECOND, Case, decide, make_case, split_table, warpi, write_data
from warpi.audit import audit
from warpi.audit.pick import pick_rows
from warpi.audit.use_checks import choose_labels, count_wrong_labels
from warpi.review.correct import apply_corrections
from warpi.review.open import open_run
from warpi.utils.files import write_atomically

NAMES = ("hr", "contraceptive", "marketing", "vehicle", "german")
DRAWS = 6
ROWS = 2500
LEAST_ROWS = 60  # of a class
NUMBERS = ("printed", "model", "checks")
MARKS = ("<!-- loop_repeated begins -->", "<!-- loop_repeated ends -->")


def read_case(name: str, seed: int) -> Case:
    """A table without repeated rows and small classes; `hr` as in `benchmarks.whole_loop`."""
    if name == "hr":
        return make_case(name, seed, None)
    x, y = TABLES[name].load() if name in TABLES else keel(name)()
    frame = pd.DataFrame(np.asarray(x), columns=[f"c{i}" for i in range(x.shape[1])]).drop_duplicates()
    y = y[frame.index]
    kept = np.bincount(y)[y] >= LEAST_ROWS
    _, y = np.unique(y[kept], return_inverse=True)
    n = min(ROWS, 3 * len(y) // 4)
    names = [f"class {k}" for k in range(int(y.max()) + 1)]
    return split_table(frame[kept], y, names, seed, n, min(500, len(y) - n))


def repeat(case: Case, seed: int, log: Any) -> list[dict[str, Any]]:
    """Train once in the working folder, then pick, check and correct several times. Numbers are in % of the rows."""
    data, _, _ = write_data(case, Path())
    true = [case.names[k] for k in case.true]
    seeded = ["--seed", str(seed)]
    warpi(["pick", str(FIRST), *data, "--csv", "check.csv", *seeded], log)
    decide(data[1], "check.csv", Path("checked"), true)
    warpi(["review", *data, "--rows", "check.csv", "--out", "checked", "--export-trusted", "trusted.csv"], log)
    warpi(["fit", *data, "--trusted", "trusted.csv", "--out", "first", *seeded], log)
    opened = open_run(Path("first"), device="cpu")
    first, n = opened.audit, len(true)
    results = []
    for number in range(DRAWS):
        drawn = int(np.random.default_rng([seed, number]).integers(2**31))
        picked = pick_rows(SECOND, first.row, first.given, first.classes, audit=first, seed=drawn)
        picked.to_csv("check2.csv")
        fill(Path("check2.csv"), np.array(true))
        result = audit(opened.run, checked=["check2.csv"], save=False)
        corrected = apply_corrections(opened.items, result, {})
        by_checks = count_wrong_labels(result, choose_labels(result.posterior, result.given))[1]
        classes = np.array(opened.items.classes)
        numbers = {
            "true": int((classes[corrected.label] != np.array(true)).sum()),
            "printed": corrected.after.rate,
            "low": corrected.after.low,
            "high": corrected.after.high,
            "model": float((1 - corrected.probability[result.row]).sum()),
            "checks": by_checks.rate,
        }
        results.append({key: round(100 * value / n, 3) for key, value in numbers.items()})  # type: ignore[operator]
    return results


def describe(stored: dict[str, Any]) -> str:
    """A Markdown table with one line per table."""
    heads = ("", "loops", "wrong", "printed − true", "by the model alone", "by the checks alone", "off by", "contains")
    lines = ["| " + " | ".join(heads) + " |", "|:---|" + "---:|" * (len(heads) - 1)]
    for name in dict.fromkeys(key.split()[0] for key in stored["cases"]):
        own = [loops for key, loops in stored["cases"].items() if key.split()[0] == name]
        every = [loop for loops in own for loop in loops]
        cells = [f"{len(own)} × {len(own[0])}", f"{np.mean([loop['true'] for loop in every]):.1f}"]
        for key in NUMBERS:
            means = [np.mean([loop[key] - loop["true"] for loop in loops]) for loops in own]
            cells.append(f"{np.mean(means):+.1f} ± {np.std(means, ddof=1) / len(means) ** 0.5:.1f}")
        errors = [loop["printed"] - loop["true"] for loop in every]
        covered = [loop["low"] <= loop["true"] <= loop["high"] for loop in every]
        cells += [f"{np.mean(np.square(errors)) ** 0.5:.1f}", f"{100 * np.mean(covered):.0f} %"]
        seeds = [int(key.split()[1]) for key in stored["cases"] if key.split()[0] == name]
        lines.append(f"| {name}, seeds {min(seeds)} to {max(seeds)} | " + " | ".join(cells) + " |")
    note = (
        "Wrong labels after the correction in % of the rows, and errors in points: means with their standard errors "
        "over first halves of the loop; *off by* is the root of the mean squared error of one loop, *contains* the "
        f"share of 90 % intervals that contain the truth. Up to {ROWS:,} rows, {FIRST} + {SECOND} decisions. "
        f"{stored['machine']}, warpi {stored['warpi']}, scikit-learn "
        f"{stored['scikit-learn']}, {stored['date']}."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--tables", nargs="+", default=NAMES)
    parser.add_argument("--out", type=Path, default=RESULTS / "loop_repeated.json")
    parser.add_argument("--page", action="store_true", help="write the table in docs/audit.md")
    args = parser.parse_args()
    out, start = args.out.resolve(), Path.cwd()
    cases = json.loads(out.read_text())["cases"] if out.exists() else {}
    for seed in args.seeds:
        for name in args.tables:
            if f"{name} {seed}" in cases:
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                cases[f"{name} {seed}"] = repeat(read_case(name, seed), seed, io.StringIO())
                os.chdir(start)
            loops = cases[f"{name} {seed}"]
            print(name, seed, [round(loop["printed"] - loop["true"], 1) for loop in loops], flush=True)
            stored = {**made_on("warpi", "torch", "scikit-learn", "numpy"), "cases": cases}
            write_atomically(out, (json.dumps(stored, indent=1) + "\n").encode())
    text = describe(json.loads(out.read_text()))
    print(text)
    if args.page:
        write_between(ROOT / "docs/audit.md", MARKS, text)


if __name__ == "__main__":
    main()
