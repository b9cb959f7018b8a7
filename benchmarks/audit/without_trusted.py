"""What an audit finds without trusted rows, and what five checked rows of each class change.

    python -m benchmarks.audit.without_trusted --seeds 0 1 [--tables vehicle german] [--page]

Tables and noise are those of `benchmarks.never_loses`. `auto` is fitted once without trusted rows and once with five of
each class, whose labels before the check are known. All figures about labels are about the same rows: those that are
not trusted. cleanlab gets cross-validated probabilities of a random forest. Writes
benchmarks/results/without_trusted.json and the table in docs/no_trusted.md; a second run adds what is missing.
"""

import argparse
import json
from typing import Any

import numpy as np
import torch
from cleanlab.filter import find_label_issues
from scipy import sparse
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import cross_val_predict

from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.never_loses.noise import Problem, make_problem
from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.utils.files import write_atomically

OUT = RESULTS / "without_trusted.json"
MARKS = ("<!-- without_trusted begins -->", "<!-- without_trusted ends -->")
TABLES = (
    "breast_cancer",
    "contraceptive",
    "digits",
    "german",
    "penguins",
    "satimage",
    "segment",
    "spambase",
    "vehicle",
)
NOISES = (
    ("symmetric", 0.0),
    ("symmetric", 0.2),
    ("symmetric", 0.4),
    ("pair", 0.2),
    ("pair", 0.4),
    ("instance", 0.2),
    ("instance", 0.4),
)
PER_CLASS = 5


def stack(*parts: Any) -> Any:
    return sparse.csr_array(sparse.vstack(parts)) if sparse.issparse(parts[0]) else np.concatenate(parts)


def fit(problem: Problem, seed: int, trusted: bool) -> dict[str, float]:
    """Percentages: right labels after the suggestions of `auto`, estimated wrong labels, accuracy on test rows."""
    x_trusted, y_trusted, given = problem.x_trusted, problem.y_trusted, problem.given_trusted
    rows = Rows(problem.x, problem.given, x_trusted, y_trusted, given, problem.n_classes)
    if not trusted:
        x, labels = stack(problem.x, x_trusted), np.concatenate([problem.given, given])
        rows = Rows(x, labels, x_trusted[:0], y_trusted[:0], None, problem.n_classes)
    found = fit_auto(rows, AutoSettings(seed=seed, measure=False))
    n = len(problem.given)
    posterior = found.posterior[:n]
    x_test = problem.x_test.toarray() if sparse.issparse(problem.x_test) else problem.x_test
    with torch.no_grad():
        predicted = found.model(torch.as_tensor(x_test)).argmax(1).numpy()
    return {
        "right": 100 * float((posterior.argmax(1) == problem.clean).mean()),
        "wrong": 100 * float((1 - posterior[np.arange(n), problem.given]).mean()),
        "accuracy": 100 * float((predicted == problem.y_test).mean()),
    }


def run_case(table: str, noise: str, rate: float, seed: int) -> dict[str, Any]:
    problem = make_problem(table, noise, rate, PER_CLASS, seed)
    forest = RandomForestClassifier(100, random_state=seed, n_jobs=1)
    p = cross_val_predict(forest, problem.x, problem.given, cv=5, method="predict_proba")
    label = np.where(find_label_issues(problem.given, p), p.argmax(1), problem.given)
    x, given = stack(problem.x, problem.x_trusted), np.concatenate([problem.given, problem.given_trusted])
    return {
        "right_as_given": 100 * float((problem.given == problem.clean).mean()),
        "right_cleanlab": 100 * float((label == problem.clean).mean()),
        "forest": 100 * float((forest.fit(x, given).predict(problem.x_test) == problem.y_test).mean()),
        "without": fit(problem, seed, trusted=False),
        "five": fit(problem, seed, trusted=True),
    }


def describe(record: dict[str, Any]) -> str:
    heads = [
        "wrong labels",
        "right: as given",
        "cleanlab",
        "`auto`",
        "`auto`, five",
        "estimated wrong: `auto`",
        "`auto`, five",
    ]
    heads += ["accuracy: forest", "`auto`", "`auto`, five"]
    lines = ["| " + " | ".join(heads) + " |", "|:---|" + "---:|" * (len(heads) - 1)]
    cases = record["cases"]
    for noise, rate in NOISES:
        found = [case for key, case in cases.items() if key.split()[1:3] == [noise, str(rate)]]
        if not found:
            continue
        columns = [[case[name] for case in found] for name in ("right_as_given", "right_cleanlab")]
        columns += [
            [case[which][name] for case in found] for name in ("right", "wrong") for which in ("without", "five")
        ]
        columns += [[case["forest"] for case in found]]
        columns += [[case[which]["accuracy"] for case in found] for which in ("without", "five")]
        name = f"`{noise}:{rate}`" if rate else "none"
        lines.append(f"| {name} | " + " | ".join(f"{np.mean(column):.1f}" for column in columns) + " |")
    tables = ", ".join(dict.fromkeys(key.split()[0] for key in cases))
    seeds = ", ".join(dict.fromkeys(key.split()[3] for key in cases))
    lines += [
        "",
        "In percent: right labels as given and after each correction; wrong labels as `auto` estimates them; accuracy "
        "on test rows of a random forest and of `auto`, without trusted rows and with five of each class. Means over "
        f"tables of at most 800 rows ({tables}); seed{'s' * (', ' in seeds)} {seeds}. {record['machine']}, warpi "
        f"{record['warpi']}, scikit-learn {record['scikit-learn']}, cleanlab {record['cleanlab']}, {record['date']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--page", action="store_true", help="write the table of docs/no_trusted.md")
    args = parser.parse_args()
    record = json.loads(OUT.read_text()) if OUT.exists() else {"cases": {}}
    for seed in args.seeds:
        for table in args.tables:
            for noise, rate in NOISES:
                key = f"{table} {noise} {rate} {seed}"
                two_classes = noise == "symmetric" and rate and table in ("breast_cancer", "german", "spambase")
                if key in record["cases"] or two_classes:  # with two classes it is the same as pair
                    continue
                record["cases"][key] = run_case(table, noise, rate, seed)
                record |= made_on("warpi", "scikit-learn", "cleanlab")
                print(key, json.dumps(record["cases"][key]), flush=True)
                write_atomically(OUT, (json.dumps(record, indent=1) + "\n").encode())
    text = describe(record)
    print(text)
    if args.page:
        write_between(ROOT / "docs" / "no_trusted.md", MARKS, text)


if __name__ == "__main__":
    main()
