"""Do the figures that the loop prints hold: the accuracy of `fit`, and the number of wrong labels after `correct`?

Each case is the loop of `benchmarks.whole_loop` on a table, with 35 % wrong labels and 40 + 100 decisions. The accuracy
that `fit` prints before and after the loop is compared with the accuracy on test rows, and the intervals of the numbers
of wrong labels with the truth.

    python -m benchmarks.audit.loop_accuracy --seeds 100 101 --out dev.json                       development
    python -m benchmarks.audit.loop_accuracy --seeds 0 1 2 --page                                 docs/audit.md
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.never_loses.tables import load_table
from benchmarks.whole_loop import FIRST, SECOND, Case, run_loop, split_table
from warpi.utils.files import write_atomically

TABLES = (
    "breast_cancer",
    "vehicle",
    "german",
    "contraceptive",
    "segment",
    "crx",
    "spambase",
    "page_blocks0",
    "phishing",
    "oj",
    "titanic",
)
ROWS = 1000
MOST_TESTS = 3000
MARKS = ("<!-- loop_accuracy begins -->", "<!-- loop_accuracy ends -->")


def make_case(name: str, seed: int) -> Case:
    """A table without repeated rows; at least a third of it is for testing."""
    x, y = load_table(name)
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])]).drop_duplicates()
    y = y[frame.index]
    n = min(ROWS, 2 * len(y) // 3)
    names = [f"class {k}" for k in range(int(y.max()) + 1)]
    return split_table(frame, y, names, seed, n, min(MOST_TESTS, len(y) - n))


def compare(printed: list[float], truth: float) -> tuple[float, bool]:
    """The error of a printed figure, and whether its interval contains the truth."""
    figure, low, high = printed
    return figure - truth, low <= truth <= high


def judge(result: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Errors and coverage of the printed figures of one case, in percent."""
    right = {"before": "right_as_given", "after": "right_corrected"}
    judged = {}
    for when in ("before", "after"):
        judged[f"accuracy {when}"] = compare(result[f"printed_{when}"]["accuracy"], result[f"accuracy_{when}"])
        rate = result["expected"][when]
        printed = [100 * rate[name] / result["rows"] for name in ("rate", "low", "high")]
        judged[f"wrong {when}"] = compare(printed, 100 - result[right[when]])
    if "noise" in result["printed_after"]:
        n_noisy = result["rows"] - FIRST - SECOND // 2  # the others are trusted
        truth = 100 * result["wrong_after"] / n_noisy
        judged["wrong after, by fit"] = compare(result["printed_after"]["noise"], truth)
    return judged


def describe(stored: dict[str, Any]) -> str:
    """Markdown tables: by printed figure, and by data set."""
    cases = {key: judge(result) for key, result in stored["cases"].items()}
    whats = {
        "accuracy before": "accuracy of the first run",
        "accuracy after": "accuracy after the loop",
        "wrong before": "wrong labels before the correction",
        "wrong after": "wrong labels after the correction",
        "wrong after, by fit": "wrong labels that are not trusted, as the second run prints it",
    }
    lines = ["| | cases | printed − true | off by | contains the truth |", "|:---|---:|---:|---:|---:|"]
    for key, what in whats.items():
        found = [judged[key] for judged in cases.values() if key in judged]
        errors = [error for error, _ in found]
        covered = 100 * np.mean([covers for _, covers in found])
        lines.append(
            f"| {what} | {len(found)} | {np.mean(errors):+.1f} | {np.mean(np.abs(errors)):.1f} | {covered:.0f} % |"
        )
    lines += ["", "| | accuracy before | printed | accuracy after | printed |", "|:---|---:|---:|---:|---:|"]
    for name in dict.fromkeys(key.split()[0] for key in cases):
        own = [result for key, result in stored["cases"].items() if key.split()[0] == name]
        cells = []
        for when in ("before", "after"):
            cells.append(np.mean([result[f"accuracy_{when}"] for result in own]))
            cells.append(np.mean([result[f"printed_{when}"]["accuracy"][0] for result in own]))
        lines.append(f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    note = (
        f"In percent of the rows or points. Up to {ROWS:,} rows with 35 % wrong labels, 40 + 100 decisions, seeds "
        f"{stored['seeds']}, 90 % intervals. {stored['machine']}, warpi {stored['warpi']}, "
        f"scikit-learn {stored['scikit-learn']}, {stored['date']}."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--out", type=Path, default=RESULTS / "loop_accuracy.json")
    parser.add_argument("--page", action="store_true", help="write the tables in docs/audit.md")
    parser.add_argument("--keep", type=Path, help="keep the working folders here")
    args = parser.parse_args()
    out, start = args.out.resolve(), Path.cwd()
    cases = json.loads(out.read_text())["cases"] if out.exists() else {}
    for seed in args.seeds:
        for name in args.tables:
            if f"{name} {seed}" in cases:
                continue
            folder = Path(tempfile.mkdtemp()) if args.keep is None else args.keep.resolve() / f"{name}-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            os.chdir(folder)
            with (folder / "log.txt").open("w") as log:
                cases[f"{name} {seed}"], _ = run_loop(make_case(name, seed), seed, log)
            os.chdir(start)
            if args.keep is None:
                shutil.rmtree(folder)
            print(name, seed, {k: (round(e, 1), c) for k, (e, c) in judge(cases[f"{name} {seed}"]).items()}, flush=True)
            stored = {**made_on("warpi", "torch", "scikit-learn", "numpy"), "seeds": args.seeds, "cases": cases}
            write_atomically(out, (json.dumps(stored, indent=1) + "\n").encode())
    text = describe(json.loads(out.read_text()))
    print(text)
    if args.page:
        write_between(ROOT / "docs/audit.md", MARKS, text)


if __name__ == "__main__":
    main()
