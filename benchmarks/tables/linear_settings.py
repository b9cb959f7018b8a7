"""Settings of `--net linear` on features of a pretrained network: learning rate, weight decay and batch size.

    python -m benchmarks.tables.linear_settings FEATURES.npz

FEATURES.npz has the vectors `f` [N, D] of clean images and their classes `y` [N], such as those of CIFAR-10 images by
EfficientNet-Lite0 (`benchmarks/features_cifar.py` makes them). 4,000 rows are noisy, 100 trusted, 2,000 for testing; a
development seed draws them. Writes benchmarks/results/linear_settings.json; `warpi.runs.defaults` has the choice.
"""

import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpi
from benchmarks.common import RESULTS, made_on
from warpi.data.numeric import make_features
from warpi.runs.defaults import defaults_for, resolve_defaults
from warpi.training.engine import train
from warpi.training.metrics import evaluate
from warpi.utils.files import write_atomically

SEED, ROWS, TRUSTED, TEST = 100, 4000, 100, 2000
NOISES = ("pair:0.4", "symmetric:0.4")
METHODS = ("ce", "glc", "elr")
SETTINGS = [
    {"batch_size": 256, "epochs": epochs, "lr": lr, "weight_decay": decay}
    for epochs, lr, decay in product((30,), (0.001, 0.003, 0.01, 0.03), (5e-4, 1e-2, 1e-1))
]
OUT = RESULTS / "linear_settings.json"


def run(f: torch.Tensor, y: torch.Tensor, noise: str, method: str, settings: dict[str, Any]) -> dict[str, Any]:
    rows = torch.from_numpy(np.random.default_rng(SEED).permutation(len(y))[: ROWS + TRUSTED + TEST])
    classes = tuple(map(str, range(int(y.max()) + 1)))
    data = warpi.Dataset("features", make_features(f[rows]), y[rows], classes, clean=y[rows])
    test = TEST / len(rows)
    task, truth = warpi.make_task(data, noise, meta=TRUSTED, val=0.0, test=test, seed=SEED)
    assert truth.test is not None
    chosen = {**settings, "net": "linear", "seed": SEED}
    recipe, options, _ = resolve_defaults(warpi.METHODS[method], defaults_for(task.shape, task.n_classes), chosen)
    learner = replace(warpi.METHODS[method], **options)
    began = time.process_time()
    learner.start(task, recipe)
    for _ in train(learner, task):
        pass
    seconds = round(time.process_time() - began, 2)
    accuracy = round(evaluate(learner.predict, truth.test).acc, 2)
    return {"noise": noise, "method": method, **settings, "cpu_seconds": seconds, "accuracy": accuracy}


def main(file: Path) -> None:
    torch.set_num_threads(1)
    arrays = np.load(file)
    f, y = torch.from_numpy(arrays["f"].astype(np.float32)), torch.from_numpy(arrays["y"])
    rows = []
    for settings, noise, method in product(SETTINGS, NOISES, METHODS):
        rows.append(run(f, y, noise, method, settings))
        print(rows[-1], flush=True)
    about = made_on("warpi", "torch") | {"seed": SEED, "rows": ROWS, "trusted": TRUSTED, "threads": 1}
    write_atomically(OUT, (json.dumps({"about": about, "rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
