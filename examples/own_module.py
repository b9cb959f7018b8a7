"""For PyTorch users: your own nn.Module, your own arrays, wrong labels found, and a file to ship.

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
    """Any module that gives logits [B, K]; images come as [B, C, H, W], standardised."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def main(epochs: int = 10) -> tuple[float, float]:
    digits = load_digits()
    x, truth = digits.images[:, None].astype(np.float32), digits.target  # [N, 1, 8, 8]
    chance = np.random.default_rng(0)
    order = chance.permutation(len(x))
    train, checked, test = order[:1300], order[1300:1400], order[1400:]
    y = np.where(chance.random(len(x)) < 0.4, chance.integers(10, size=len(x)), truth)  # two in five labels are random

    torch.manual_seed(0)  # of the initial weights
    settings = {"epochs": epochs, "batch_size": 64, "lr": 0.05, "random_state": 0, "settings": {"output": "tanh"}}
    model = NoisyLabelClassifier("warpi", Net(), augment=False, **settings)  # a mirrored digit is none
    model.fit(x[train], y[train], x[checked], truth[checked])
    suspicious = train[model.label_quality_ < 0.5]
    wrong = float(np.mean(y[suspicious] != truth[suspicious]))
    print(f"{len(suspicious)} suspicious labels, {100 * wrong:.0f} % of them wrong")

    with TemporaryDirectory() as folder:
        model.save(Path(folder) / "digits.warpi")  # tensors and JSON, nothing pickled
        model = NoisyLabelClassifier.load(Path(folder) / "digits.warpi", net=Net())
    return 100 * model.score(x[test], truth[test]), wrong


if __name__ == "__main__":
    print(f"test accuracy {main()[0]:.1f} %")
