"""Consensus of three people per image: CIFAR-10N `random1` to `random3`, warpi, majority vote and crowd-kit.

    python -m benchmarks.audit.annotators --root DATA [--features FOLDER] [--crowdkit FOLDER] [--page]

DATA holds `cifar-10-batches-py` and `cifar-n/cifar10n.npz`. `--features` is a folder with the vectors of the first
images (`benchmarks.audit.embed_cifar10` makes it): there, the consensus also uses a logistic regression that was
trained on the majority labels of other rows (5 folds). `--crowdkit` is where crowd-kit is installed, if it is not on
the path. 200 random trusted rows (a seed draws them) give the accuracy of each annotator an interval. Simulated
annotators (seeds 0 to 9) are compared too.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.audit.any_model import predict
from benchmarks.audit.embed_cifar10 import read_vectors
from benchmarks.common import RESULTS, ROOT, made_on, write_between

OUT = RESULTS / "annotators.json"
MARKS = ("<!-- annotators begins -->", "<!-- annotators ends -->")


def expected_majority(wide: np.ndarray, true: np.ndarray) -> float:
    """Expected number of wrong labels of a majority vote that breaks ties at random."""
    votes = np.stack([(wide == k).sum(1) for k in range(10)], 1)
    best = votes == votes.max(1, keepdims=True)
    return float((1 - (best / best.sum(1, keepdims=True))[np.arange(len(true)), true]).sum())


def by_crowdkit(wide: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Wrong labels of crowd-kit's majority vote and Dawid-Skene. -1 is no label."""
    import pandas as pd
    from crowdkit.aggregation import DawidSkene, MajorityVote

    task, worker = np.nonzero(wide >= 0)
    frame = pd.DataFrame({"task": task, "worker": worker, "label": wide[task, worker]})
    models = {"crowd-kit, MajorityVote": MajorityVote(), "crowd-kit, DawidSkene": DawidSkene(n_iter=100)}
    return {
        name: float((model.fit_predict(frame).sort_index().to_numpy() != true).sum()) for name, model in models.items()
    }


def measure(wide: np.ndarray, true: np.ndarray, crowdkit: bool, x: np.ndarray | None) -> dict[str, Any]:
    from warpi.audit import combine_annotators

    wrong = {"majority vote, ties at random": expected_majority(wide, true)}
    if crowdkit:
        wrong |= by_crowdkit(wide, true)
    began = time.perf_counter()
    consensus = combine_annotators(wide)
    seconds = time.perf_counter() - began
    wrong["warpi annotators"] = float((consensus.label != true).sum())
    if x is not None:
        votes = np.stack([(wide == k).sum(1) for k in range(10)], 1)
        p = predict(x, votes.argmax(1), 0)
        wrong["the classifier alone"] = float((p.argmax(1) != true).sum())
        wrong["warpi annotators with the classifier"] = float(
            (combine_annotators(wide, probabilities=p).label != true).sum()
        )
    review = np.array([bool(reason) for reason in consensus.review])
    record = {"rows": len(true), "wrong": wrong, "seconds": seconds, "to_review": int(review.sum())}
    return record | {"wrong_in_review": int((review & (consensus.label != true)).sum())}


def simulate(seed: int) -> dict[str, float]:
    """Wrong labels of 2,000 rows with 3 labels each, by 60 annotators whose matrices are drawn from a Dirichlet."""
    from warpi.audit import combine_annotators

    rng = np.random.default_rng(seed)
    n, n_annotators, k = 2000, 60, 5
    true = rng.integers(0, k, n)
    mean = np.full((k, k), 0.08) + 0.6 * np.eye(k)
    matrices = np.stack([[rng.dirichlet(8 * row) for row in mean] for _ in range(n_annotators)])
    wide = np.full((n, n_annotators), -1)
    for row in range(n):
        for a in rng.choice(n_annotators, 3, replace=False):
            wide[row, a] = rng.choice(k, p=matrices[a, true[row]])
    wrong = by_crowdkit(wide, true)
    return wrong | {"warpi annotators": float((combine_annotators(wide).label != true).sum())}


def measure_intervals(wide: np.ndarray, true: np.ndarray, seeds: range) -> dict[str, Any]:
    """How often the 90 % interval of an annotator's accuracy contains the true value."""
    from warpi.audit import combine_annotators

    accuracy = (wide == true[:, None]).mean(0)
    inside, width = 0, 0.0
    for seed in seeds:
        rows = np.random.default_rng(seed).choice(len(true), 200, replace=False)
        found = combine_annotators(wide, trusted=(rows, true[rows])).annotators
        inside += sum(bool(a["low"] <= value <= a["high"]) for a, value in zip(found, accuracy, strict=True))
        width += float(np.mean([a["high"] - a["low"] for a in found])) / len(seeds)
    without = [a["accuracy"] for a in combine_annotators(wide).annotators]
    total = len(seeds) * wide.shape[1]
    return {"accuracy": accuracy.tolist(), "without_trusted": without, "inside": inside, "of": total, "width": width}


def write_page(record: dict[str, Any]) -> None:
    parts = [part for part in (record["all"], record.get("features")) if part]
    names = list(dict.fromkeys(name for part in parts for name in part["wrong"]))
    head = " | ".join(f"{part['rows']:,} images" for part in parts)
    lines = [f"| wrong labels | {head} |", "|:---|" + "---:|" * len(parts)]
    for name in names:
        cells = [f"{part['wrong'][name]:,.0f}" if name in part["wrong"] else "" for part in parts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    part, intervals, about = record["all"], record["intervals"], record["made"]
    errors = part["wrong"]["warpi annotators"]
    lists = {
        name: ", ".join(f"{100 * value:.1f}" for value in intervals[name]) for name in ("without_trusted", "accuracy")
    }
    simulated = {name: np.mean([run[name] for run in record["simulated"]]) for name in record["simulated"][0]}
    text = (
        f"\n\n{part['to_review']:,} of the 50,000 rows are to be reviewed; they hold {part['wrong_in_review']:,} of "
        f"the {errors:,.0f} wrong labels. Simulated: 2,000 rows with 3 labels each by 60 people who differ have "
        f"{', '.join(f'{value:.0f} wrong labels ({name})' for name, value in simulated.items())}, mean of seeds 0 to 9."
        f"\n\nWithout trusted rows the accuracies of the three are estimated as {lists['without_trusted']} %; in truth "
        f"they are {lists['accuracy']} %. With 200 trusted rows, {intervals['inside']} of {intervals['of']} intervals "
        f"(90 %) contain the true value; they are {100 * intervals['width']:.1f} points wide (8,000 images, 20 seeds)."
        f"\n\n{about['machine']}, python {about['python']}, warpi {about['warpi']}, crowd-kit {record['crowdkit']}, "
        f"numpy {about['numpy']}; {part['seconds']:.1f} s for all images; {about['date']}."
    )
    write_between(ROOT / "docs" / "annotators.md", MARKS, "\n" + "\n".join(lines) + text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--crowdkit", type=Path)
    parser.add_argument("--page", action="store_true", help="write the table of docs/annotators.md")
    args = parser.parse_args()
    if args.crowdkit:
        sys.path.append(str(args.crowdkit))
    from importlib.metadata import version

    from warpi.datasets.cifar import cifar10

    true = cifar10(args.root).truth.numpy()
    stored = np.load(args.root / "cifar-n" / "cifar10n.npz")
    wide = np.stack([stored[f"random{i}"] for i in (1, 2, 3)], 1).astype(np.int64)
    record: dict[str, Any] = {"all": measure(wide, true, True, None), "crowdkit": version("crowd-kit")}
    print(record, flush=True)
    if args.features:
        x, _ = read_vectors(args.features)
        record["features"] = measure(wide[: len(x)], true[: len(x)], True, x)
        print(record["features"], flush=True)
    record["intervals"] = measure_intervals(wide[:8000], true[:8000], range(20))
    record["simulated"] = [simulate(seed) for seed in range(10)]
    record["made"] = made_on("warpi", "numpy")
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    if args.page:
        write_page(record)


if __name__ == "__main__":
    main()
