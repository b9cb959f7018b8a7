"""The small convolutional network of few-shot learning: 3x3 convolutions, each followed by pooling."""

from math import prod

from torch import Tensor, nn

from warpi.errors import UserError
from warpi.nets.resnet import image_channels


def n_blocks(side: int) -> int:
    """Number of blocks that reduce an image to 2x2 positions: four for 28 and 32 pixels, five for 84."""
    return 4 if side < 64 else 5


def pooling(side: int) -> nn.MaxPool2d:
    """Pooling that halves the sides. It rounds up below 32 pixels (28-14-7-4-2), so that no pixels are lost."""
    return nn.MaxPool2d(2, ceil_mode=side < 32)


def convolution(channels_in: int, channels: int) -> nn.Conv2d:
    """3x3 convolution that keeps the size, without bias (a normalization follows), Xavier normal."""
    layer = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
    nn.init.xavier_normal_(layer.weight)
    return layer


class Conv4(nn.Module):
    """Blocks of convolution, BatchNorm, ReLU and pooling, then a linear layer: 3-64-64-64-64-K."""

    def __init__(self, shape: tuple[int, ...], n_classes: int, channels: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        c = image_channels("conv4", shape)
        last = positions(shape)
        side = max(shape[1:])
        for _ in range(n_blocks(side)):
            layers += [convolution(c, channels), nn.BatchNorm2d(channels), nn.ReLU(), pooling(side)]
            c = channels
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(channels * last, n_classes)

    def features(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x).flatten(1)  # [B, D]
        return h

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))  # [B, K]
        return z


def positions(shape: tuple[int, ...]) -> int:
    """Number of positions that remain of an image (C, H, W) after all blocks."""
    side = max(shape[1:])
    n = n_blocks(side)
    sizes = [-(-size // 2**n) if side < 32 else size // 2**n for size in shape[1:]]  # rounded like `pooling`
    if not all(sizes):
        raise UserError(f"images of {shape[1]} x {shape[2]} pixels are too small or too narrow to be pooled {n} times")
    return prod(sizes)
