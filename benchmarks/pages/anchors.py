"""Alternatives to warpi: scikit-learn's classifiers, with and without cleanlab, on the splits of warpi.

    python -m benchmarks.pages.anchors               writes docs/results/anchors.md and anchors.json

cleanlab (>= 2.8) is optional; without it, its column is left out. The validation rows are held out as for the methods
of warpi and not used, so all train on the same rows.
"""

import argparse
import json
import os
import platform
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib.metadata import version
from itertools import product
from statistics import mean, stdev

import numpy as np
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

import warpi
from benchmarks.common import ROOT

try:
    from cleanlab.classification import CleanLearning

    CLEANLAB = tuple(map(int, version("cleanlab").split(".")[:2])) >= (2, 8)
except ImportError:
    CLEANLAB = False

NOISES = ("pair:0.4", "flip:0.4", "symmetric:0.4")
SEEDS = range(10, 15)
META = 50
PROCESSES = 2
CLASSIFIERS = {
    "LogisticRegression": lambda seed: LogisticRegression(max_iter=2000),  # noqa: ARG005
    "MLPClassifier": lambda seed: MLPClassifier((128,), max_iter=200, random_state=seed),
    "RandomForestClassifier": lambda seed: RandomForestClassifier(200, random_state=seed),
}
TRAINED_ON = ("noisy", "noisy + trusted", "trusted alone", "CleanLearning, noisy + trusted")[: 4 if CLEANLAB else 3]
OUT = ROOT / "docs" / "results"


def arrays(split: warpi.Split) -> tuple[np.ndarray, np.ndarray]:
    return (split.examples.flat(split.rows) / 16).numpy(), split.y.numpy()  # [N, 64] in 0..1, [N]


def run(job: tuple[str, int]) -> dict:
    """The test accuracy of every classifier on one split, and the sizes and hash of the split."""
    noise, seed = job
    task, truth = warpi.make_task(warpi.load_dataset("digits")[0], noise, meta=META, seed=seed)
    noisy, trusted, (x, y) = arrays(task.train), arrays(task.meta), arrays(truth.test)
    both = tuple(map(np.concatenate, zip(noisy, trusted, strict=True)))
    accuracy = {}
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)
        for (name, make), on in product(CLASSIFIERS.items(), TRAINED_ON):
            rows = {"noisy": noisy, "trusted alone": trusted}.get(on, both)
            model = CleanLearning(make(seed), seed=seed) if on.startswith("CleanLearning") else make(seed)
            accuracy[name, on] = 100 * float((model.fit(*rows).predict(x) == y).mean())
    sizes = {"noisy": len(noisy[1]), "trusted": len(trusted[1]), "test": len(y)}
    split = {"noise": noise, "seed": seed, **sizes, "noise_rate": task.noise_rate, "noise_hash": truth.noise_hash}
    return {"split": split, "accuracy": accuracy}


def table(rows: list[dict]) -> str:
    top = max(row["mean"] for row in rows)
    lines = ["| classifier | " + " | ".join(TRAINED_ON) + " |", "|:---|" + "---:|" * len(TRAINED_ON)]
    for name in CLASSIFIERS:
        some = [row for row in rows if row["classifier"] == name]
        cells = (
            f"{'**' * (r['mean'] == top)}{r['mean']:.2f} ± {r['std']:.2f}{'**' * (r['mean'] == top)}" for r in some
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not CLEANLAB:
        print("cleanlab >= 2.8 is not installed; its column is left out (pip install 'cleanlab>=2.8')")
    began = time.perf_counter()
    with ProcessPoolExecutor(PROCESSES) as pool:
        results = list(pool.map(run, product(NOISES, SEEDS)))
    rows = []
    for noise, name, on in product(NOISES, CLASSIFIERS, TRAINED_ON):
        values = [r["accuracy"][name, on] for r in results if r["split"]["noise"] == noise]
        key = {"noise": noise, "classifier": name, "trained_on": on}
        rows.append({**key, "mean": mean(values), "std": stdev(values), "by_seed": values})
    packages = ("torch", "numpy", "scikit-learn", "cleanlab")[: 4 if CLEANLAB else 3]
    versions = {"warpi": warpi.__version__, "python": platform.python_version()} | {p: version(p) for p in packages}
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), {PROCESSES} processes of one thread"
    record = {"data": "digits", "meta": META, "seeds": list(SEEDS), "date": f"{date.today()}", "machine": machine}
    record |= {"versions": versions, "rows": rows, "splits": [r["split"] for r in results]}
    tables = (
        f"### digits, noise {noise}, {META} trusted examples\n\n{table([r for r in rows if r['noise'] == noise])}\n"
        for noise in NOISES
    )
    page = f"""# Anchors: scikit-learn and cleanlab on the same splits

{chr(10).join(tables)}
Test accuracy in percent (clean test rows), mean ± sample standard deviation over seeds {SEEDS[0]} to {SEEDS[-1]}.
Bold: the highest mean. CleanLearning finds wrong labels by cross-validation, removes them and trains again; it does not
know which rows are trusted. All settings that the script does not mention have the defaults of their packages.
{"" if CLEANLAB else "cleanlab was not installed, so its column is left out."}
Run on {date.today()} on {machine}, {time.perf_counter() - began:.0f} s in total.
Versions: {", ".join(f"{name} {number}" for name, number in versions.items())}.

To repeat this: `pip install warpi cleanlab`, then `python -m benchmarks.pages.anchors` in a checkout.
"""
    (OUT / "anchors.json").write_text(json.dumps(record, indent=1) + "\n")
    (OUT / "anchors.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
