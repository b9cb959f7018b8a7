"""For PyTorch users: train your own nn.Module on arrays, find wrong labels, and save the model.

python examples/own_module.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from warpi import NoisyLabelClassifier


class Net(nn.Module):
    """Any module that returns logits [B, K]; images are standardized tensors [B, C, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def main(epochs: int = 10) -> tuple[float, float]:
    digits = load_digits()
    x = digits.images[:, None].astype(np.float32)  # [N, 1, 8, 8]
    truth = digits.target
    rng = np.random.default_rng(0)
    train, checked, test = np.split(rng.permutation(len(x)), [1300, 1400])
    y = np.where(rng.random(len(x)) < 0.4, rng.integers(10, size=len(x)), truth)  # 40 % of the labels are random

    torch.manual_seed(0)  # for the initial weights
    settings = {"epochs": epochs, "batch_size": 64, "lr": 0.05, "random_state": 0, "settings": {"output": "tanh"}}
    model = NoisyLabelClassifier("warpi", Net(), augment=False, **settings)  # do not mirror digits
    model.fit(x[train], y[train], x[checked], truth[checked])
    suspicious = train[model.label_quality_ < 0.5]
    wrong = float(np.mean(y[suspicious] != truth[suspicious]))
    print(f"{len(suspicious)} suspicious labels, {100 * wrong:.0f} % of them wrong")

    with TemporaryDirectory() as folder:
        model.save(Path(folder) / "digits.warpi")  # tensors and JSON, no pickle
        model = NoisyLabelClassifier.load(Path(folder) / "digits.warpi", net=Net())
    return 100 * model.score(x[test], truth[test]), wrong


if __name__ == "__main__":
    print(f"test accuracy {main()[0]:.1f} %")
