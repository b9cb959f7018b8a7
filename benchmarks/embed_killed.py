"""`warpi embed` on 5,000 image files, killed with SIGKILL five times: is the result that of an undisturbed run?

    python -m benchmarks.embed_killed --root DATA --work FOLDER [--with efficientnet_lite0] [--image-size 32]

`--root` holds `cifar-10-batches-py`; `--work` is an empty folder outside the repository. The command is started again
after each kill, as a user would. Afterwards the images are moved away, and `warpi fit` trains on the features.
"""

import argparse
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import warpi
from warpi.datasets.cifar import cifar10
from warpi.datasets.embedding.folder import FeatureFolder


def write_images(root: Path, folder: Path, n: int) -> None:
    data = cifar10(root)
    for row in range(n):
        file = folder / data.classes[int(data.y[row])] / f"{row:05d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.examples.x[row].permute(1, 2, 0).numpy()).save(file)


def rows_stored(out: Path) -> int:
    """How many vectors the files of an unfinished folder hold."""
    files = [*out.glob("shard-*.npy"), *out.glob("partial-*.npy")]
    return sum(len(np.load(file, mmap_mode="r")) for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--with", dest="embedder", default="efficientnet_lite0")
    parser.add_argument("--image-size", default="32")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    photos = given.work / "photos"
    write_images(given.root, photos, given.images)
    flags = ["--with", given.embedder, "--image-size", given.image_size]

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "warpi", "embed", str(photos), *flags, "--out", str(given.work / out)]

    began = time.perf_counter()
    subprocess.run(command("whole"), check=True)
    seconds = time.perf_counter() - began
    print(f"undisturbed: {seconds:.1f} s")
    draw = random.Random(given.seed)
    killed = given.work / "killed"
    for k in range(5):
        process = subprocess.Popen(command("killed"), stderr=subprocess.DEVNULL)
        time.sleep(seconds * draw.uniform(0.15, 0.5))
        process.kill()
        process.wait()
        print(f"kill {k + 1}: {rows_stored(killed)} vectors are stored")
    subprocess.run(command("killed"), check=True)
    whole, resumed = (_vectors(given.work / name) for name in ("whole", "killed"))
    once = resumed["row"].tolist() == list(range(given.images))
    equal = all(np.array_equal(whole[name], resumed[name]) for name in whole)
    print(f"every vector once: {once}; equal to the undisturbed run: {equal}")
    photos.rename(given.work / "moved")
    fit = [sys.executable, "-m", "warpi", "fit", "--data", str(killed), "--method", "ce", "--epochs", "2", "--quiet"]
    began = time.perf_counter()
    subprocess.run([*fit, "--out", str(given.work / "run")], check=True)
    print(f"fit without the images in place: {time.perf_counter() - began:.1f} s")
    print(f"warpi {warpi.__version__}, torch {torch.__version__}, {platform.processor() or platform.machine()}")
    sys.exit(0 if once and equal else 1)


def _vectors(path: Path) -> dict[str, np.ndarray]:
    folder = FeatureFolder(path)
    shards = folder.read_shards(folder.read_manifest())
    return {name: np.concatenate([shard[name] for shard in shards]) for name in ("row", "sha256", "vector")}


if __name__ == "__main__":
    main()
