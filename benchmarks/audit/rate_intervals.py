"""Do the 90 % intervals of the noise rate contain the true rate?

Tables, digits and features of images with three kinds of noise (those of `benchmarks.never_loses`), and the human
labels of CIFAR-10N on the features. For each of them, `auto` predicts all rows without having seen their labels. Then
rows are drawn and checked (their true labels become known) as `warpi pick` draws them: all at random, or half of them
at random and half where the class is most uncertain. The noise rate is estimated from the checks and the predictions
as in `warpi audit`, overall and for each class.

    python -m benchmarks.audit.rate_intervals --seeds 0 1 --labels DATA/cifar-n/cifar10n.npz --page
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.preprocessing import StandardScaler

from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.never_loses.noise import Sizes, make_problem
from benchmarks.never_loses.tables import load_table
from warpi.audit.pair_model import count_votes
from warpi.audit.pick import pick_rows
from warpi.audit.rates import estimate_class_rates, estimate_rate
from warpi.audit.use_checks import Pairs, combine_with_checks
from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.functional.intervals import wilson_interval
from warpi.utils.files import write_atomically

TABLES = ("digits", "satimage", "segment", "contraceptive", "spambase", "hr", "cifar_features")
NOISES = (("pair", 0.4), ("symmetric", 0.3), ("instance", 0.2))
HUMAN = ("random1", "random2", "random3")
CHECKS = (50, 150, 500)
DRAWS = 8  # of each way to draw
SIZES = Sizes(test_share=0.01, most_training_rows=1500)
Z90 = 1.645
MARKS = ("<!-- rate_intervals begins -->", "<!-- rate_intervals ends -->")


class Data(NamedTuple):
    """Rows with given and true labels, and the predictions of `auto`."""

    p: np.ndarray  # [N, K]
    T: np.ndarray  # [K, K]
    given: np.ndarray  # [N]
    true: np.ndarray  # [N]
    votes: np.ndarray  # [N, K]


def predict(x: np.ndarray, given: np.ndarray, true: np.ndarray, seed: int) -> Data:
    """Predict every row by models that were not trained on its label. No label is known to be right."""
    K = int(true.max()) + 1
    fitted = fit_auto(Rows(x, given, x[:0], given[:0], None, K), AutoSettings(seed=seed))
    votes = count_votes(StandardScaler().fit_transform(x), given, K)
    return Data(fitted.p, fitted.transition, given, true, votes)


@cache
def read_human(labels: Path, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, human labels and true labels of the first images of CIFAR-10."""
    x, y = load_table("cifar_features")
    with np.load(labels) as arrays:
        return np.asarray(x), arrays[name][: len(y)].astype(np.int64), y


def load_data(name: str, noise: str, rate: float, seed: int, labels: Path | None) -> Data:
    if noise == "human":
        assert labels is not None
        x, given, true = read_human(labels, name)
        rows = np.random.default_rng(seed).permutation(len(true))[:2000]
        return predict(x[rows], given[rows], true[rows], seed)
    problem = make_problem(name, noise, rate, 1, seed, SIZES)
    return predict(np.asarray(problem.x), problem.given, problem.clean, seed)


def draw(data: Data, m: int, half: bool, seed: int) -> tuple[np.ndarray, Pairs]:
    """Draw rows as `warpi pick` does, and check them."""
    N, K = data.p.shape
    names = tuple(map(str, range(K)))
    n_random = m // 2 if half else m
    picked = pick_rows(n_random, np.arange(N), data.given, names, seed=seed)
    at = picked.row
    weight = picked.stratum_size / picked.stratum_picked
    if half:
        rest = np.setdiff1d(np.arange(N), at)
        q = data.p * data.T[:, data.given].T
        certain = (q / q.sum(1, keepdims=True)).max(1)
        at = np.concatenate([at, rest[certain[rest].argsort(kind="stable")][: m - n_random]])
        weight = np.concatenate([weight, np.ones(m - n_random)])
    return at, Pairs(data.p[at], data.given[at], data.true[at], np.arange(m) < n_random, weight)


def measure(data: Data, m: int, half: bool, seed: int) -> dict[str, Any]:
    """Errors, coverage and widths for one draw of m rows."""
    K = data.p.shape[1]
    at, checked = draw(data, m, half, seed)
    none = Pairs(*(np.asarray(values)[:0] for values in checked))
    found = combine_with_checks(data.p, data.given, data.T, at, checked, none, data.votes)
    is_wrong = data.given != data.true
    truth = is_wrong.mean()
    rate = estimate_rate(found.checks)
    classes = []
    for k, estimate in enumerate(estimate_class_rates(found.checks, K)):
        if estimate.n:
            classes.append((estimate, is_wrong[data.given == k].mean()))
    low, high = wilson_interval(is_wrong[at[checked.random]].mean(), int(checked.random.sum()), Z90)
    assert rate.low is not None
    assert rate.high is not None
    return {
        "error": 100 * abs(rate.rate - truth),
        "covers": bool(rate.low <= truth <= rate.high),
        "width": 100 * (rate.high - rate.low),
        "plain_width": 100 * (high - low),
        "class_covers": float(np.mean([r.low <= t <= r.high for r, t in classes])),  # type: ignore[operator]
        "class_width": 100 * float(np.mean([r.high - r.low for r, _ in classes])),  # type: ignore[operator]
    }


def measure_all(name: str, noise: str, rate: float, seed: int, labels: Path | None) -> list[dict[str, Any]]:
    data = load_data(name, noise, rate, seed, labels)
    N, K = data.p.shape
    results = []
    for m in CHECKS:
        for half in (False, True):
            if 2 * m > N or m // (1 + half) < max(20, K):
                continue
            for number in range(DRAWS):
                figures = measure(data, m, half, int(np.random.default_rng([seed, m, half, number]).integers(2**31)))
                how = "half random" if half else "random"
                about = {"data": name, "noise": noise, "seed": seed, "checks": m, "drawn": how}
                results.append({**about, **figures})
    return results


def summarize(results: list[dict[str, Any]], *keys: str) -> dict[str, dict[str, float]]:
    """Means over all results with the same values of the keys."""
    names = ("error", "covers", "width", "plain_width", "class_covers", "class_width")
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(", ".join(str(result[key]) for key in keys), []).append(result)
    return {
        value: {"n": len(group), **{name: round(float(np.mean([r[name] for r in group])), 3) for name in names}}
        for value, group in groups.items()
    }


def describe(stored: dict[str, Any]) -> str:
    """Markdown tables: by number of checks, and by data set."""
    heads = ("", "cases", "off by", "contains the rate", "width", "width without a model", "of a class", "its width")
    lines = []
    for key in ("checks, drawn", "data"):
        lines += ["| " + " | ".join(heads) + " |", "|:---|" + "---:|" * (len(heads) - 1)]
        for value, f in stored[key].items():
            cells = [str(f["n"]), f"{f['error']:.1f}", f"{100 * f['covers']:.0f} %", f"{f['width']:.1f}"]
            cells += [f"{f['plain_width']:.1f}", f"{100 * f['class_covers']:.0f} %", f"{f['class_width']:.1f}"]
            lines.append(f"| {value} | " + " | ".join(cells) + " |")
        lines.append("")
    every = stored["every"]
    covered, of_classes = (f"{100 * every[name]:.1f} %" for name in ("covers", "class_covers"))
    note = (
        f"{every['n']} cases; {covered} of the intervals contain the true rate ({of_classes} of those of classes). "
        "Widths and errors are in points. Tables: 1,500 rows with `pair:0.4`, symmetric 0.3 and instance-dependent 0.2."
        f" Human labels: 2,000 images. Seeds {stored['seeds']}, {stored['draws']} draws each; {stored['machine']}, "
        f"warpi {stored['warpi']}, scikit-learn {stored['scikit-learn']}, {stored['date']}."
    )
    return "\n".join([*lines, note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--tables", nargs="*", default=TABLES)
    parser.add_argument("--labels", type=Path, help="cifar10n.npz; without it, no human labels")
    parser.add_argument("--out", type=Path, default=RESULTS / "rate_intervals.json")
    parser.add_argument("--page", action="store_true", help="write the tables in docs/audit.md")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for seed in args.seeds:
        cases = [(table, noise, rate) for table in args.tables for noise, rate in NOISES]
        cases += [(name, "human", 0.0) for name in HUMAN] if args.labels else []
        for name, noise, rate in cases:
            results += measure_all(name, noise, rate, seed, args.labels)
            last = [r for r in results if (r["data"], r["noise"]) == (name, noise)]
            print(seed, name, noise, summarize(last, "noise"), flush=True)
    about = {**made_on("warpi", "numpy", "scipy", "scikit-learn"), "seeds": args.seeds, "draws": DRAWS}
    for r in results:
        r["every"] = "every"
    stored = {**about, "every": summarize(results, "every")["every"]}
    stored |= {", ".join(keys): summarize(results, *keys) for keys in (("checks", "drawn"), ("data",), ("noise",))}
    write_atomically(args.out, (json.dumps(stored, indent=1) + "\n").encode())
    text = describe(stored)
    print(text)
    if args.page:
        write_between(ROOT / "docs/audit.md", MARKS, text)


if __name__ == "__main__":
    main()
