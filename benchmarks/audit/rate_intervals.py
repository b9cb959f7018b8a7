"""Do the 90 % intervals of the noise rate contain the true rate? Tables with known labels and three kinds of noise.

For each table, noise and rate, `auto` predicts all rows without having seen their labels. Then rows are drawn at random
and checked (their true labels become known), and the noise rate is estimated from them and the predictions, overall and
for each class. The table and the noise are those of `benchmarks.never_loses`.

    python -m benchmarks.audit.rate_intervals --seeds 0 1 --out benchmarks/results/rate_intervals.json
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
from sklearn.preprocessing import StandardScaler

from benchmarks.never_loses.noise import NOISES, Sizes, make_problem
from warpi import __version__
from warpi.audit.label_scores import wilson_interval
from warpi.audit.pair_model import count_votes, cross_fit_pairs, pair_features
from warpi.audit.rates import Checks, estimate_class_rates, estimate_rate
from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.utils.files import write_atomically

TABLES = ("digits", "satimage", "segment", "contraceptive", "spambase", "phishing", "hr", "mnist", "splice")
CHECKS = (50, 150, 500)
DRAWS = 10
SIZES = Sizes(test_share=0.01, most_training_rows=2500)
Z90 = 1.645


def measure(table: str, noise: str, rate: float, seed: int) -> list[dict[str, Any]]:
    """One result for each number of checks and each draw."""
    problem = make_problem(table, noise, rate, 1, seed, SIZES)
    K, N = problem.n_classes, len(problem.given)
    none = np.zeros(0, np.int64)
    rows = Rows(problem.x, problem.given, problem.x[:0], none, None, K)
    p = fit_auto(rows, AutoSettings(seed=seed)).p
    votes = count_votes(StandardScaler().fit_transform(problem.x), problem.given, K)
    features, names = pair_features(p, problem.given, votes)
    is_wrong = problem.given != problem.clean
    truth = is_wrong.mean()
    class_truth = [is_wrong[problem.given == k].mean() for k in range(K)]
    results = []
    for m in CHECKS:
        if 2 * m > N:
            continue
        for draw in range(DRAWS):
            checked = np.random.default_rng([seed, m, draw]).choice(N, m, replace=False)
            q, left_out = cross_fit_pairs(features, names, checked, problem.clean[checked])
            w = 1 - q[np.arange(N), problem.given]
            w_checked = 1 - left_out[np.arange(m), problem.given[checked]]
            no, yes = np.zeros(N, bool), np.ones(m, bool)
            checks = Checks(
                problem.given, w, no, problem.given[checked], is_wrong[checked], w_checked, yes, ~yes, yes.astype(float)
            )
            overall = estimate_rate(checks)
            classes = [r for r in zip(estimate_class_rates(checks, K), class_truth, strict=True) if r[0].n]
            low, high = wilson_interval(is_wrong[checked].mean(), m, Z90)
            assert overall.low is not None
            assert overall.high is not None
            results.append(
                {
                    "table": table,
                    "noise": noise,
                    "rate": rate,
                    "seed": seed,
                    "checks": m,
                    "error": 100 * abs(overall.rate - truth),
                    "covers": bool(overall.low <= truth <= overall.high),
                    "width": 100 * (overall.high - overall.low),
                    "plain_width": 100 * (high - low),
                    "class_covers": float(np.mean([r.low <= t <= r.high for r, t in classes])),  # type: ignore[operator]
                    "class_width": 100 * float(np.mean([r.high - r.low for r, _ in classes])),  # type: ignore[operator]
                    "model_error": 100 * abs(float(np.mean(1 - p[np.arange(N), problem.given])) - truth),
                }
            )
    return results


def summarize(results: list[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """Means over all results with the same value of a key."""
    names = ("error", "covers", "width", "plain_width", "class_covers", "class_width")
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(str(result[key]), []).append(result)
    return {
        value: {"n": len(group), **{name: round(float(np.mean([r[name] for r in group])), 3) for name in names}}
        for value, group in groups.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--tables", nargs="+", default=TABLES)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for seed in args.seeds:
        for table in args.tables:
            for noise in NOISES:
                for rate in (0.2, 0.4):
                    results += measure(table, noise, rate, seed)
            print(seed, table, summarize([r for r in results if r["table"] == table], "checks"), flush=True)
    versions = {"warpi": __version__, "numpy": np.__version__, "scipy": scipy.__version__}
    versions |= {"scikit-learn": sklearn.__version__, "python": platform.python_version()}
    summary = {key: summarize(results, key) for key in ("checks", "table", "noise", "rate")}
    about = {"seeds": args.seeds, "draws": DRAWS, "cores": os.cpu_count(), "versions": versions}
    write_atomically(args.out, (json.dumps({**about, **summary}, indent=1) + "\n").encode())
    for key, values in summary.items():
        for value, figures in values.items():
            print(key, value, figures)


if __name__ == "__main__":
    main()
