"""Residual networks of He et al.: ResNet-20, -32 and -18 for small images, ResNet-50 for photographs.

Reference: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.errors import UserError


def image_channels(net: str, shape: tuple[int, ...], least: int = 1) -> int:
    """Number of channels of an input shape. Raises if it is not an image with sides of at least `least` pixels."""
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(
            f"{net} needs images of shape (channels, height, width), got inputs of shape {tuple(shape)}; "
            "use the net 'mlp', or give the inputs as images"
        )
    if min(shape[1:]) < least:
        raise UserError(
            f"{net} needs images of at least {least} x {least} pixels, got shape {tuple(shape)}; "
            "use 'resnet18' or 'resnet32', or give larger images"
        )
    return shape[0]


def conv(c_in: int, c_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, padded so that only the stride changes the image size."""
    return nn.Conv2d(c_in, c_out, size, stride, padding=size // 2, bias=False)


def he_init(net: nn.Module, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Initialize all convolutions with He's normal distribution, variance 2 / fan, from the global generator."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")


class _PadShortcut(nn.Module):
    """Option A of He et al.: take every `stride`-th pixel and pad with zero channels, half of them on each side."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (c_out - c_in) // 2
        self.after = c_out - c_in - self.before

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, c_in: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = conv(c_in, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return torch.relu(h + (x if self.downsample is None else self.downsample(x)))


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions. The stride is in the 3x3 one ("v1.5", as in torchvision), not in the first."""

    expansion: ClassVar[int] = 4

    def __init__(self, c_in: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        c_out = width * self.expansion
        self.conv1 = conv(c_in, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, c_out, 1)
        self.bn3 = nn.BatchNorm2d(c_out)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        h = torch.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return torch.relu(h + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Stages of residual blocks; each stage after the first halves the image and doubles the width.

    `photo_stem`: 7x7 stride 2 and max pooling, as for ImageNet; otherwise one 3x3 convolution, as for CIFAR.
    `pad_shortcut`: shortcuts without parameters (option A); otherwise 1x1 convolution and BatchNorm (option B).
    Layers are named as in torchvision, so that its weight files can be loaded.
    """

    def __init__(
        self,
        channels: int,
        n_classes: int,
        block: type[_BasicBlock] | type[_Bottleneck],
        depths: tuple[int, ...],
        width: int,
        *,
        photo_stem: bool = False,
        pad_shortcut: bool = False,
    ) -> None:
        super().__init__()
        self.photo_stem = photo_stem
        self.conv1 = conv(channels, width, 7, stride=2) if photo_stem else conv(channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.n_stages = len(depths)
        c_in = width
        for i, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                c_out = width * 2**i * block.expansion
                blocks.append(block(c_in, width * 2**i, stride, _shortcut(c_in, c_out, stride, pad_shortcut)))
                c_in = c_out
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(c_in, n_classes)

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        if self.photo_stem:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for i in range(self.n_stages):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return x.mean((2, 3))  # [B, D]

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))  # [B, K]
        return z


def _shortcut(c_in: int, c_out: int, stride: int, pad: bool) -> nn.Module | None:
    if c_in == c_out and stride == 1:
        return None
    if pad:
        return _PadShortcut(c_in, c_out, stride)
    return nn.Sequential(conv(c_in, c_out, 1, stride), nn.BatchNorm2d(c_out))


def resnet20(shape: tuple[int, ...], n_classes: int, *, width: int = 16) -> ResNet:
    """The CIFAR ResNet-20: like ResNet-32, with 3 blocks per stage."""
    return _cifar_resnet("resnet20", shape, n_classes, 3, width)


def resnet32(shape: tuple[int, ...], n_classes: int, *, width: int = 16) -> ResNet:
    """The CIFAR ResNet-32: 3 stages of 5 basic blocks, 16-32-64 channels, option-A shortcuts.

    The last layer also has He's initialization (fan in), as in published noisy-label code with this network.
    """
    return _cifar_resnet("resnet32", shape, n_classes, 5, width)


def _cifar_resnet(name: str, shape: tuple[int, ...], n_classes: int, depth: int, width: int) -> ResNet:
    net = ResNet(image_channels(name, shape), n_classes, _BasicBlock, (depth,) * 3, width, pad_shortcut=True)
    he_init(net, mode="fan_in")
    nn.init.kaiming_normal_(net.fc.weight)
    return net


def resnet18(shape: tuple[int, ...], n_classes: int, *, width: int = 64) -> ResNet:
    """ResNet-18 for small images: a 3x3 stem with stride 1 and no max pooling."""
    net = ResNet(image_channels("resnet18", shape), n_classes, _BasicBlock, (2, 2, 2, 2), width)
    he_init(net)
    return net


def resnet50(shape: tuple[int, ...], n_classes: int, *, width: int = 64) -> ResNet:
    """ResNet-50 for photographs (ImageNet stem), the same as torchvision's, whose weight files can be loaded."""
    channels = image_channels("resnet50", shape, least=32)
    net = ResNet(channels, n_classes, _Bottleneck, (3, 4, 6, 3), width, photo_stem=True)
    he_init(net)
    return net
