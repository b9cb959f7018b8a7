"""The effect of the defaults for small tables, for methods of every kind.

    python -m benchmarks.tables.small_tables

Writes benchmarks/results/small_tables.json and the table of docs/data.md. Results that are already in the file are not
computed again; delete the file to start over.

The rule (`warpi.runs.defaults`) was chosen on wine, breast cancer, iris, 200 and 400 digits and `make_classification`
with 20 features, seeds 0 to 2. The last two tables and all seeds here are new.
"""

import json
import time
from itertools import product
from statistics import mean, stdev

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification

import warpi
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from warpi.data.numeric import make_features
from warpi.utils.files import write_atomically

TABLES = {  # noise, trusted rows, title
    "wine": ("pair:0.3", 30, "wine"),
    "breast_cancer": ("pair:0.4", 50, "breast cancer"),
    "even": ("pair:0.3", 40, "even or odd"),
    "made": ("uniform:0.4", 40, "synthetic"),
}
METHODS = ("ce", "clean_only", "fine_tune", "glc", "co_teaching", "elr", "dividemix", "dmi_ns")
METHODS += ("l2rw", "mwnet", "vri", "warpi_detc", "warpi")
RULES = {"before": {"epochs": 30, "lr": 0.05}, "now": {}}
SEEDS = range(10, 15)
OUT = RESULTS / "small_tables.json"
PAGE = ROOT / "docs" / "data.md"
MARKS = "<!-- by benchmarks/tables/small_tables.py -->\n", "<!-- until here -->\n"


def load(name: str, seed: int) -> warpi.Dataset:
    if name == "wine":
        x, y = load_wine(return_X_y=True)
    elif name == "breast_cancer":
        x, y = load_breast_cancer(return_X_y=True)
    elif name == "even":
        x, y = load_digits(return_X_y=True)
        x, y = x[:600], y[:600] % 2
    else:
        x, y = make_classification(
            500, 12, n_informative=6, n_redundant=0, n_classes=5, n_clusters_per_class=1, class_sep=2, random_state=seed
        )
    labels = torch.tensor(y, dtype=torch.int64)
    classes = tuple(map(str, range(int(y.max()) + 1)))
    return warpi.Dataset(name, make_features(torch.tensor(x, dtype=torch.float32)), labels, classes, clean=labels)


def arrays(split: warpi.Split) -> tuple[np.ndarray, np.ndarray]:
    return split.examples.flat(split.rows).numpy(), split.y.numpy()


def run(data: str, seed: int, method: str, rule: str) -> dict:
    noise, trusted, _ = TABLES[data]
    task, truth = warpi.make_task(load(data, seed), noise, meta=trusted, val=0.0, seed=seed)
    needs = {"noise_rate": task.noise_rate} if warpi.METHODS[method].needs_noise_rate else {}
    model = warpi.NoisyLabelClassifier(method, random_state=seed, device="cpu", **needs, **RULES[rule])
    meta = arrays(task.meta) if warpi.METHODS[method].needs_meta else ()
    began = time.process_time()
    model.fit(*arrays(task.train), *meta)
    seconds = round(time.process_time() - began, 2)
    row = {"data": data, "seed": seed, "method": method, "rule": rule, "n": len(task.train), "cpu_seconds": seconds}
    return {**row, "accuracy": 100 * model.score(*arrays(truth.test))}


def table(rows: list[dict]) -> str:
    n = {r["data"]: r["n"] for r in rows}
    heads = [f"{title}, {n[name]} rows, `{noise}`" for name, (noise, _, title) in TABLES.items()]
    lines = ["| method | " + " | ".join(heads) + " | CPU s |", "|:---|" + "---:|" * (len(heads) + 1)]

    def values(field: str, **fixed: str) -> list[float]:
        return [r[field] for r in rows if all(r[key] == value for key, value in fixed.items())]

    for method in METHODS:
        cells = []
        for data in TABLES:
            before, now = (values("accuracy", method=method, data=data, rule=rule) for rule in RULES)
            cells.append(f"{mean(before):.1f} → {mean(now):.1f} ± {stdev(now):.1f}")
        seconds = " → ".join(f"{mean(values('cpu_seconds', method=method, rule=rule)):.1f}" for rule in RULES)
        lines.append(f"| `{method}` | {' | '.join(cells)} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    done = {(r["data"], r["seed"], r["method"], r["rule"]) for r in rows}
    about = made_on("warpi", "torch", "numpy", "scikit-learn") | {"threads_a_fit": 1}
    for seed, data, method, rule in product(SEEDS, TABLES, METHODS, RULES):
        if (data, seed, method, rule) not in done:
            rows.append(run(data, seed, method, rule))
            write_atomically(OUT, (json.dumps({"about": about, "rows": rows}, indent=1) + "\n").encode())
    versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "scikit-learn"))
    trusted = ", ".join(f"{title} {n}" for _, n, title in TABLES.values())
    last = (
        f"Seeds {SEEDS[0]} to {SEEDS[-1]}; trusted rows: {trusted}. {about['date']}, {about['machine']}, one thread, "
    )
    made = f"{table(rows)}\n\n{last}machine shared with other jobs;\n{versions}.\n"
    write_between(PAGE, MARKS, made)


if __name__ == "__main__":
    main()
