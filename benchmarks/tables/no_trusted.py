"""What NoisyLabelClassifier loses without trusted examples, for each of its substitutes.

    python -m benchmarks.tables.no_trusted

Writes benchmarks/results/no_trusted.json and the table of docs/estimator.md. Results that are already in the file are
not computed again; delete the file to start over.

All entries train on the same noisy rows of `warpi.make_task`; the first two also get 50 trusted rows. The substitutes
were chosen on digits with seeds 0 to 3 and 40 to 44, which the tables do not use.
"""

import json
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import mean, stdev

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, make_blobs

import warpi
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from warpi.data.numeric import make_features
from warpi.estimator.pseudo_trusted import NoTrustedExamples
from warpi.utils.files import write_atomically

TITLES = {
    "digits": "Digits (1,298 noisy rows)",
    "breast_cancer": "Breast cancer (two classes, 377 noisy rows)",
    "blobs40": "Forty Gaussian classes (1,450 noisy rows)",
}
NOISES = ("pair:0.4", "uniform:0.4")
SEEDS = {"digits": range(60, 65), "breast_cancer": range(60, 65), "blobs40": range(60, 62)}
WITH = ("clean_only",)  # with 50 trusted examples
WITHOUT = ("dmi_ns", "elr_plus", "dividemix", "ce")
ENTRIES = [*((method, 50) for method in WITH), *((method, 0) for method in WITHOUT)]
OUT = RESULTS / "no_trusted.json"
PAGE = ROOT / "docs" / "estimator.md"
MARKS = "<!-- by benchmarks/tables/no_trusted.py -->\n", "<!-- until here -->\n"


def load(name: str, seed: int) -> warpi.Dataset:
    if name == "digits":
        return warpi.load_dataset("digits")[0]
    if name == "breast_cancer":
        x, y = load_breast_cancer(return_X_y=True)
    else:  # forty classes, fifty rows each
        x, y = make_blobs(2000, 20, centers=40, cluster_std=3.0, random_state=seed)
    labels = torch.tensor(y, dtype=torch.int64)
    classes = tuple(map(str, range(int(y.max()) + 1)))
    return warpi.Dataset(name, make_features(torch.tensor(x, dtype=torch.float32)), labels, classes, clean=labels)


def arrays(split: warpi.Split) -> tuple[np.ndarray, np.ndarray]:
    return split.examples.flat(split.rows).numpy(), split.y.numpy()


def run(job: tuple[str, str, int, list[tuple[str, int]]]) -> list[dict]:
    data, noise, seed, entries = job
    torch.set_num_threads(1)
    task, truth = warpi.make_task(load(data, seed), noise, meta=50, val=0.0, seed=seed)
    (x, y), trusted, test = (arrays(split) for split in (task.train, task.meta, truth.test))
    rows = []
    for method, n in entries:
        began = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoTrustedExamples)
            model = warpi.NoisyLabelClassifier(method, random_state=seed).fit(x, y, *(trusted if n else ()))
        row = {"data": data, "noise": noise, "seed": seed, "trusted": n, "method": method}
        row |= {"accuracy": 100 * model.score(*test), "cpu_seconds": round(time.process_time() - began, 2)}
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    lines = ["| trusted | method | " + " | ".join(NOISES) + " | CPU s |", "|---:|:---|" + "---:|" * (len(NOISES) + 1)]
    for method, trusted in ENTRIES:
        some = [r for r in rows if (r["trusted"], r["method"]) == (trusted, method)]
        cells = [[r["accuracy"] for r in some if r["noise"] == noise] for noise in NOISES]
        shown = " | ".join(f"{mean(values):.1f} ± {stdev(values):.1f}" for values in cells)
        lines.append(f"| {trusted} | `{method}` | {shown} | {mean(r['cpu_seconds'] for r in some):.1f} |")
    return "\n".join(lines)


def main() -> None:
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    done = {(r["data"], r["noise"], r["seed"], r["method"], r["trusted"]) for r in rows}
    whole = [(data, noise, seed) for data, seeds in SEEDS.items() for noise, seed in product(NOISES, seeds)]
    jobs = [(*job, [entry for entry in ENTRIES if (*job, *entry) not in done]) for job in whole]
    about = made_on("warpi", "torch", "numpy", "scikit-learn") | {"threads_a_fit": 1, "processes": 2}
    with ProcessPoolExecutor(2) as pool:
        for new in pool.map(run, [job for job in jobs if job[-1]]):
            rows += new
            write_atomically(OUT, (json.dumps({"about": about, "rows": rows}, indent=1) + "\n").encode())
    write_page(rows, about)


def write_page(rows: list[dict], about: dict) -> None:
    """Write the complete tables between the marks of the page."""
    parts = []
    for data, seeds in SEEDS.items():
        some = [r for r in rows if r["data"] == data]
        if len(some) == len(NOISES) * len(seeds) * len(ENTRIES):
            parts.append(f"{TITLES[data]}, seeds {seeds[0]} to {seeds[-1]}:\n\n{table(some)}\n")
    versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "scikit-learn"))
    parts.append(
        f"{about['date']}, {about['machine']}, one thread per fit, machine shared with other jobs; {versions}.\n"
    )
    write_between(PAGE, MARKS, "\n".join(parts))


if __name__ == "__main__":
    main()
