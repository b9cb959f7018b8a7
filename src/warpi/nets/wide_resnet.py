"""Wide residual networks for small images.

Reference: Zagoruyko, Komodakis, "Wide Residual Networks", BMVC 2016.
"""

import torch
from torch import Tensor, nn

from warpi.nets.preact_resnet import stage
from warpi.nets.resnet import conv, he_init, image_channels


class WideResNet(nn.Module):
    """WRN-28-k: a 3x3 stem of 16 channels, 3 stages of 4 pre-activation blocks, 16k-32k-64k channels.

    Dropout is off by default, because it draws from the global generator.
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int, widen: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = conv(image_channels("wrn28_10", shape), 16, 3)
        self.layer1 = stage(16, 16 * widen, 4, 1, dropout)
        self.layer2 = stage(16 * widen, 32 * widen, 4, 2, dropout)
        self.layer3 = stage(32 * widen, 64 * widen, 4, 2, dropout)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.fc = nn.Linear(64 * widen, n_classes)
        he_init(self)

    def features(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return torch.relu(self.bn1(h)).mean((2, 3))  # [B, D]

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))  # [B, K]
        return z
