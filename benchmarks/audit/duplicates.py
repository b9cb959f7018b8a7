"""Planted copies in a folder of real images, and in real tables: how many `find_duplicates` finds.

    python -m benchmarks.audit.duplicates --data FOLDER [--images 2000] [--part choose|report]
    python -m benchmarks.audit.duplicates --part many [--rows 100000]      vectors, with and without the index of faiss

FOLDER holds cifar-10-batches-py. The images are enlarged to 96 x 96 pixels. A fifth of them get one planted copy: the
same file, a crop that cuts up to 10 % off the width and the height at a random place, JPEG of quality 40 to 90,
brightness of 0.8 to 1.2, or all three. `choose` uses batch 1 and prints figures for several thresholds; `report` uses
batch 2, whose images played no part in that choice, and the threshold of the library.
"""

import argparse
import io
import json
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common import RESULTS, made_on
from warpi.audit.duplicates.find import find_duplicates
from warpi.data.duplicates import near_copies
from warpi.data.duplicates.result import OUTLIER, Duplicates

OUT = RESULTS / "duplicates.json"
KINDS = ("exact", "crop", "jpeg", "brightness", "all three")
SIDE = 96
BATCH = {"choose": "data_batch_1", "report": "data_batch_2"}


def read_images(folder: Path, batch: str, n: int) -> list[Image.Image]:
    with (folder / "cifar-10-batches-py" / batch).open("rb") as file:
        pixels = pickle.load(file, encoding="bytes")[b"data"][:n].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return [Image.fromarray(x).resize((SIDE, SIDE), Image.Resampling.LANCZOS) for x in pixels]


def change(image: Image.Image, kind: str, rng: np.random.Generator) -> tuple[Image.Image, dict[str, Any]]:
    """A changed image, and the arguments with which it is saved."""
    saved: dict[str, Any] = {"format": "PNG"}
    if kind in ("crop", "all three"):
        cut = rng.uniform(0, 0.1, 2) * SIDE
        low = cut * rng.uniform(0, 1, 2)
        image = image.crop(tuple(np.rint([*low, *(SIDE - cut + low)]).astype(int).tolist()))
    if kind in ("brightness", "all three"):
        pixels = np.asarray(image, dtype=float) * rng.uniform(0.8, 1.2)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if kind in ("jpeg", "all three"):
        saved = {"format": "JPEG", "quality": int(rng.integers(40, 91))}
    return image, saved


def plant(images: list[Image.Image], folder: Path, rng: np.random.Generator) -> dict[str, str]:
    """Write a folder with two classes and return the kind of each planted pair of names, 'NAME COPY'."""
    planted = {}
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
    for i, image in enumerate(images):
        content = io.BytesIO()
        image.save(content, "PNG")
        name = f"{'ab'[i % 2]}/{i}.png"
        (folder / name).write_bytes(content.getvalue())
        if i % 5:
            continue
        kind = KINDS[i // 5 % len(KINDS)]
        copy = f"{'ab'[int(rng.integers(2))]}/{i}_copy.png"
        if kind != "exact":
            content = io.BytesIO()
            changed, saved = change(image, kind, rng)
            changed.save(content, **saved)
        (folder / copy).write_bytes(content.getvalue())
        planted[f"{name} {copy}"] = kind
    return planted


def found_pairs(found: Duplicates) -> set[tuple[int, int]]:
    """All pairs of rows in one group."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(found.group.tolist()):
        if group >= 0:
            members.setdefault(group, []).append(i)
    return {(i, j) for rows in members.values() for a, i in enumerate(rows) for j in rows[a + 1 :]}


def measure_images(folder: Path, planted: dict[str, str]) -> dict[str, Any]:
    began = time.process_time()
    found = find_duplicates(folder)
    seconds = time.process_time() - began
    assert found.path is not None
    at = {Path(path).relative_to(folder).as_posix(): i for i, path in enumerate(found.path)}
    wanted = {tuple(sorted(at[name] for name in pair.split())): kind for pair, kind in planted.items()}
    pairs = found_pairs(found)
    recall = {kind: float(np.mean([p in pairs for p, k in wanted.items() if k == kind])) for kind in KINDS}
    others = [[found.path[i].removeprefix(f"{folder}/") for i in pair] for pair in sorted(pairs - wanted.keys())]
    return {
        "files": len(found),
        "planted": len(wanted),
        "recall": float(np.mean([pair in pairs for pair in wanted])),
        "precision": len(pairs & wanted.keys()) / max(len(pairs), 1),
        "recall_by_kind": recall,
        "not_planted": others,
        "cpu_seconds": round(seconds, 1),
    }


def measure_table(name: str, seed: int = 0) -> dict[str, Any]:
    """Copies of rows of a table, changed by noise of 1 % of the standard deviation of each column."""
    import sklearn.datasets
    import torch

    from warpi.data.dataset import Dataset
    from warpi.data.numeric import make_features

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    x, first = np.unique(x, axis=0, return_index=True)
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(x), len(x) // 10, replace=False)
    copies = x[rows] + 0.01 * x.std(0) * rng.normal(size=x[rows].shape)
    labels = torch.tensor(np.concatenate([y[first], y[first][rows]]))
    examples = make_features(torch.tensor(np.concatenate([x, copies])))
    found = find_duplicates(Dataset(name, examples, labels, tuple(map(str, range(int(labels.max()) + 1)))))
    pairs = found_pairs(found)
    wanted = {(int(row), len(x) + i) for i, row in enumerate(rows)}
    precision = len(pairs & wanted) / max(len(pairs), 1)
    return {
        "rows": len(labels),
        "planted": len(wanted),
        "recall": len(pairs & wanted) / len(wanted),
        "precision": precision,
    }


def measure_many(n: int, d: int = 64) -> dict[str, Any]:
    """Vectors around 50 centers. One in a hundred has a near copy, and one in a thousand is far from all others."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 0.7, (50, d))[rng.integers(0, 50, n)] + rng.normal(size=(n, d))
    x[-(n // 1000) :] *= 4
    rows = rng.choice(n - n // 1000, n // 100, replace=False)
    x = np.concatenate([x, x[rows] + 0.02 * rng.normal(size=(len(rows), d))]).astype(np.float32)
    wanted = {(int(row), n + i) for i, row in enumerate(rows)}
    limit, measured = near_copies.EXACT, {}
    for name, exact in (("all pairs", len(x)), ("index", limit)):
        near_copies.EXACT = exact
        assert near_copies.uses_index(len(x)) == (name == "index"), "install faiss-cpu"
        began = time.process_time()
        pairs, score = near_copies.find_close_vectors(x, False)
        seconds = time.process_time() - began
        found = {*zip(pairs.a.tolist(), pairs.b.tolist(), strict=True)}
        far = np.flatnonzero(score > OUTLIER)
        measured[name] = {
            "recall": len(found & wanted) / len(wanted),
            "precision": len(found & wanted) / max(len(found), 1),
            "outlier_recall": float(np.mean(np.isin(np.arange(n - n // 1000, n), far))),
            "outlier_precision": float(np.mean((far >= n - n // 1000) & (far < n))),
            "cpu_seconds": round(seconds, 1),
        }
    near_copies.EXACT = limit
    return {"rows": len(x), "features": d, "planted": len(wanted), **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--part", choices=(*BATCH, "many"), default="report")
    given = parser.parse_args()
    stored = json.loads(OUT.read_text()) if OUT.exists() else {}
    if given.part == "many":
        stored["many"] = {**made_on("faiss-cpu", "numpy", "scikit-learn"), **measure_many(given.rows)}
        OUT.write_text(json.dumps(stored, indent=1) + "\n")
        print(json.dumps(stored["many"], indent=1))
        return
    if given.data is None:
        parser.error("--data is required")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "images"
        planted = plant(read_images(given.data, BATCH[given.part], given.images), folder, np.random.default_rng(0))
        if given.part == "choose":
            for threshold in (0.7, 0.8, 0.85, 0.88, 0.9, 0.93, 0.95):
                near_copies.SIMILAR = threshold
                result = measure_images(folder, planted)
                print(threshold, {name: result[name] for name in ("recall", "precision", "not_planted")})
            return
        result = {"images": measure_images(folder, planted), "threshold": near_copies.SIMILAR}
    result["tables"] = {name: measure_table(name) for name in ("digits", "breast_cancer", "wine")}
    OUT.write_text(json.dumps({**stored, **made_on("torch", "numpy", "pillow"), **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
