"""A small, fast convolutional network for images of about 32 pixels.

The layout is that of the networks in the CIFAR-10 speed-run literature: a fixed whitening layer and three blocks of
large convolutions, which keep a GPU busy at low resolution.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.nets.resnet import conv, he_init, image_channels

_EDGE = 0.19  # standard deviation of the difference of two neighboring pixels, relative to that of their mean
_COLOR = (1.0, 0.22, 0.12)  # of brightness and of the color differences in natural photos, relative to brightness
_FEATURE_SCALE = 1 / 8  # so that the last layer stays stable at large learning rates


class FastNet(nn.Module):
    """Fixed 2x2 filters, three blocks of three convolutions, global max-pooling and a linear layer."""

    def __init__(self, shape: tuple[int, ...], n_classes: int, widths: tuple[int, int, int] = (128, 384, 512)) -> None:
        super().__init__()
        self.filters: Tensor
        self.register_buffer("filters", whitening_filters(image_channels("fastnet", shape, least=4)))
        sizes = (len(self.filters), *widths)
        self.blocks = nn.Sequential(*(_Block(*pair) for pair in pairwise(sizes)))
        self.fc = nn.Linear(widths[-1], n_classes)
        he_init(self)

    def features(self, x: Tensor) -> Tensor:
        """The penultimate layer.  [B, C, H, W] -> [B, D]"""
        h: Tensor = self.blocks(F.gelu(F.conv2d(x, self.filters)))
        return h.amax((2, 3)) * _FEATURE_SCALE

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))
        return z


class _Block(nn.Module):
    """A convolution with pooling, then two more convolutions around a residual connection."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1 = conv(c_in, c_out, 3)
        self.norm1 = nn.BatchNorm2d(c_out)
        self.conv2 = conv(c_out, c_out, 3)
        self.norm2 = nn.BatchNorm2d(c_out)
        self.conv3 = conv(c_out, c_out, 3)
        self.norm3 = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        tiny = min(x.shape[2:]) < 4  # keep the last pixel of very small images
        x = F.gelu(self.norm1(F.max_pool2d(x, 2, ceil_mode=tiny)))
        h = F.gelu(self.norm2(self.conv2(x)))
        return F.gelu(x + self.norm3(self.conv3(h)))


def whitening_filters(channels: int) -> Tensor:
    """Filters that nearly decorrelate the 2x2 patches of normalized photos, each with both signs.  [8 C, C, 2, 2]

    The principal components of such patches are close to a cosine basis over rows, columns and color channels. Each
    filter is divided by the standard deviation of its component in natural photos, so no training data is needed.
    """
    pixels = _cosine_basis(2)
    bank = torch.einsum("kc,ai,bj->kabcij", _cosine_basis(channels), pixels, pixels)  # [C, 2, 2, C, 2, 2]
    color = torch.tensor([_COLOR[min(k, 2)] for k in range(channels)])
    space = torch.tensor([1.0, _EDGE])
    deviation = torch.einsum("k,a,b->kab", color, space, 2 * space) * math.sqrt(channels)  # [C, 2, 2]
    deviation[:, 1, 1] *= 2  # diagonal differences are larger than the product of the two
    filters = (bank / deviation[..., None, None, None]).flatten(0, 2)
    return torch.cat([filters, -filters])


def _cosine_basis(n: int) -> Tensor:
    """The orthonormal discrete cosine transform: row 0 is the mean, the others are differences.  [n, n]"""
    k = torch.arange(n)[:, None]
    i = torch.arange(n)
    basis = torch.cos(math.pi * k * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis
