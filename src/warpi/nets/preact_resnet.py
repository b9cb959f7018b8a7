"""Pre-activation ResNet-18 for small images.

Reference: He, Zhang, Ren, Sun, "Identity Mappings in Deep Residual Networks", ECCV 2016.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.nets.resnet import conv, he_init, image_channels


class PreActBlock(nn.Module):
    """BatchNorm and ReLU come before each of the two convolutions, and nothing follows the sum.

    If the size changes, the shortcut is a 1x1 convolution of the activated input; otherwise it is x itself. `dropout`
    acts between the convolutions (wide residual networks).
    """

    def __init__(self, c_in: int, c_out: int, stride: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(c_in)
        self.conv1 = conv(c_in, c_out, 3, stride)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.conv2 = conv(c_out, c_out, 3)
        self.shortcut = conv(c_in, c_out, 1, stride) if stride != 1 or c_in != c_out else None
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.bn1(x))
        h = torch.relu(self.bn2(self.conv1(a)))
        if self.dropout:
            h = F.dropout(h, self.dropout, self.training)
        out: Tensor = self.conv2(h) + (x if self.shortcut is None else self.shortcut(a))
        return out


def stage(c_in: int, c_out: int, depth: int, stride: int, dropout: float = 0.0) -> nn.Sequential:
    """`depth` pre-activation blocks, the first of which changes the size."""
    first = PreActBlock(c_in, c_out, stride, dropout)
    return nn.Sequential(first, *(PreActBlock(c_out, c_out, 1, dropout) for _ in range(depth - 1)))


class PreActResNet18(nn.Module):
    """A 3x3 stem and 4 stages of 2 pre-activation blocks.

    *Differs from the paper*: no BatchNorm and ReLU after the last block, and the shortcut of the very first block
    is not activated. This is the form with 11,171,146 parameters for 10 classes; the paper's has 1,024 more.
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv1 = conv(image_channels("preact18", shape), width, 3)
        self.layer1 = stage(width, width, 2, 1)
        self.layer2 = stage(width, 2 * width, 2, 2)
        self.layer3 = stage(2 * width, 4 * width, 2, 2)
        self.layer4 = stage(4 * width, 8 * width, 2, 2)
        self.fc = nn.Linear(8 * width, n_classes)
        he_init(self)

    def features(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        return h.mean((2, 3))  # [B, D]

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))  # [B, K]
        return z
