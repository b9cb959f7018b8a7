"""The effect of a review on accuracy: decided rows as trusted examples, or only as corrected labels.

Digits, pair:0.4; the simulated reviewer makes no mistakes. `later`: with 50 trusted examples a run of WarPI is audited,
its 100 most suspicious rows are reviewed and exported as by `warpi review`, and the same recipe is trained again.
`first`: without trusted examples cross-entropy is trained; then random rows are reviewed, at least 20 and until there
is one of every class, and WarPI is trained with them.

    python -m benchmarks.audit.review_trusted --out benchmarks/results/review.json
"""

import argparse
import json
import logging
import os
import platform
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from warpi import __version__, fit
from warpi.audit import audit
from warpi.audit.decisions import Decision
from warpi.data.dataset import Dataset
from warpi.noise.parse import Noise
from warpi.review.export import write_trusted
from warpi.review.items import items_from_data, items_from_run
from warpi.review.reviewed_labels import write_corrected
from warpi.runs.defaults import load_dataset
from warpi.utils.files import write_atomically
from warpi.utils.seeding import generator


def decided(dataset: Dataset, rows: list[int]) -> dict[int, Decision]:
    """The decisions of a reviewer who knows the truth."""
    names = [dataset.classes[k] for k in dataset.truth[rows].tolist()]
    return {
        row: Decision(i, row, "change", name, "", "") for i, (row, name) in enumerate(zip(rows, names, strict=True))
    }


def first(seed: int, epochs: int) -> dict[str, float]:
    """Test accuracy without trusted examples, and with those of a first review."""
    dataset, _ = load_dataset("digits")
    common = {"data": "digits", "epochs": epochs, "seed": seed, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        run = fit(at / "before", noise="pair:0.4", meta=0, method="ce", **common)
        order = run.task.train.rows[torch.randperm(len(run.task.train), generator=generator(seed, "review"))].tolist()
        n = next(n for n in range(20, len(order)) if len(dataset.y[order[:n]].unique()) == dataset.n_classes)
        items = items_from_data(dataset, noisy(dataset, seed), None, None)
        standing = decided(dataset, order[:n])
        write_corrected(items, standing, at / "corrected.json")
        trusted = write_trusted(items, standing, at / "trusted.npz")
        noise = f"given:{at / 'corrected.json'}"
        after = fit(at / "after", noise=noise, trusted=str(trusted.path), method="warpi", **common)
        accuracy = {"ce": run.history[-1]["test_acc"], "warpi": after.history[-1]["test_acc"]}
        return {"decisions": n, "trusted": trusted.size, **accuracy}


def noisy(dataset: Dataset, seed: int) -> torch.Tensor:
    """The noisy labels of `warpi fit --noise pair:0.4 --seed SEED`."""
    return Noise.parse("pair:0.4").apply(dataset, generator(seed, "noise"), None).y


def later(seed: int, n: int, epochs: int) -> dict[str, float]:
    """Test accuracy before n decisions, and after using them in different ways."""
    dataset, _ = load_dataset("digits")
    common = {"data": "digits", "method": "warpi", "epochs": epochs, "seed": seed, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        run = fit(at / "before", noise="pair:0.4", meta=50, **common)
        result = audit(run)
        standing = decided(dataset, result.row[result.ranked[:n]].tolist())
        items = items_from_run(dataset, run.task, run.method.net, result, None, None)
        write_corrected(items, standing, at / "corrected.json")
        write_trusted(replace(items, random_rows=frozenset(standing)), standing, at / "all.npz")
        write_trusted(items, standing, at / "exported.npz")
        given = f"given:{at / 'corrected.json'}"
        after = {
            "trusted": {"noise": "pair:0.4", "trusted": str(at / "all.npz")},
            "labels corrected": {"noise": given, "trusted": str(at / "exported.npz")},
        }
        runs = {name: fit(at / str(i), **settings, **common) for i, (name, settings) in enumerate(after.items())}
        return {name: done.history[-1]["test_acc"] for name, done in {"before": run, **runs}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    versions = {"warpi": __version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"rows": args.rows, "epochs": args.epochs, "cores": os.cpu_count(), "versions": versions}
    done = json.loads(args.out.read_text()) if args.out.exists() else about
    for seed in range(args.seeds):
        for name, run in (("first", partial(first, seed)), ("later", partial(later, seed, args.rows))):
            by_seed = done.setdefault(name, {})
            if str(seed) not in by_seed:
                by_seed[str(seed)] = run(args.epochs)
                write_atomically(args.out, (json.dumps(done, indent=1) + "\n").encode())
            print(seed, name, by_seed[str(seed)], flush=True)
    for name in ("first", "later"):
        for what in done[name]["0"]:
            values = torch.tensor([result[what] for result in done[name].values()], dtype=torch.float64)
            print(f"{name}: {what}: {values.mean():.1f} ± {values.std():.1f}, {values.min():.1f} to {values.max():.1f}")


if __name__ == "__main__":
    main()
