"""Features of images without training: the responses of whitened patches of the images themselves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 32  # larger images are scaled down to this side
_LOCAL = 0.0025  # added to the variance of a patch, relative to that of all pixels
_WHITENING = 0.1  # added to the eigenvalues of the covariance of normalized patches
_SAMPLE = 20_000  # patches from which the covariance is estimated


class PatchFeatures(nn.Module):
    """Compare every patch of an image with F patches of the training images, and average the responses.

        z     = D W (u - m)           u: a patch with mean 0 and variance 1,  W whitens patches,  D [F, d]: unit rows
        out   = average over each cell of a G x G grid of (max(0, z - a), max(0, -z - a))      [2 F G^2]

    The rows of D are whitened patches drawn at random, so nothing is trained (Coates and Ng, The Importance of Encoding
    Versus Training with Sparse Coding and Vector Quantization, ICML 2011).
    """

    weight: Tensor
    bias: Tensor
    floor: Tensor

    def __init__(
        self, channels: int, filters: int = 256, size: int = 6, grid: int = 2, threshold: float = 0.25
    ) -> None:
        super().__init__()
        self.grid = grid
        self.threshold = threshold
        self.register_buffer("weight", torch.zeros(filters, channels, size, size))  # D W
        self.register_buffer("bias", torch.zeros(filters))  # - D W m
        self.register_buffer("floor", torch.zeros(()))  # added to the variance of a patch

    def arrays(self) -> dict[str, Tensor | float]:
        """Everything that `from_arrays` needs to build the same features again."""
        return {**self.state_dict(), "grid": self.grid, "threshold": self.threshold}

    @classmethod
    def from_arrays(cls, weight: Tensor, bias: Tensor, floor: Tensor, grid: int, threshold: float) -> "PatchFeatures":
        filters, channels, size, _ = weight.shape
        net = cls(channels, filters, size, grid, threshold)
        net.load_state_dict({"weight": weight, "bias": bias, "floor": floor})
        return net

    @property
    def n_features(self) -> int:
        return 2 * len(self.weight) * self.grid**2

    @torch.no_grad()
    def fit(self, x: Tensor, generator: torch.Generator) -> "PatchFeatures":
        """Choose the patches from images x [N, C, H, W]."""
        x = shrink(x)
        filters, _, size, _ = self.weight.shape
        self.floor.copy_(_LOCAL * x.var())
        patches = draw_patches(x, size, max(_SAMPLE, 4 * filters), generator)  # [n, d]
        mean = patches.mean(1, keepdim=True)
        patches = (patches - mean) / (patches.var(1, keepdim=True, unbiased=False) + self.floor).sqrt()
        center = patches.mean(0)
        patches = patches - center
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        whiten = vectors @ torch.diag((values.clamp_min(0) + _WHITENING).rsqrt()) @ vectors.T
        D = F.normalize(patches[torch.randperm(len(patches), generator=generator)[:filters]] @ whiten, dim=1)
        self.weight.copy_((D @ whiten).view_as(self.weight))
        self.bias.copy_(-(D @ whiten) @ center)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 2 F G^2]"""
        x = shrink(x)
        mean, variance = local_moments(x, self.weight.shape[-1])
        z = F.conv2d(x, self.weight) - mean * self.weight.sum((1, 2, 3))[:, None, None]
        z = z / (variance + self.floor).sqrt() + self.bias[:, None, None]
        z = torch.cat([F.relu(z - self.threshold), F.relu(-z - self.threshold)], dim=1)
        return F.adaptive_avg_pool2d(z, self.grid).flatten(1)


def shrink(x: Tensor) -> Tensor:
    """Scale images down so that their longer side is at most LARGEST pixels."""
    side = max(x.shape[-2:])
    if side <= LARGEST:
        return x
    h, w = (max(1, round(LARGEST * n / side)) for n in x.shape[-2:])
    return F.adaptive_avg_pool2d(x, (h, w))


def local_moments(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of every patch.  [B, 1, H', W'] each"""
    mean = F.avg_pool2d(x, size, stride=1).mean(1, keepdim=True)
    square = F.avg_pool2d(x**2, size, stride=1).mean(1, keepdim=True)
    return mean, (square - mean**2).clamp_min(0)


def draw_patches(x: Tensor, size: int, n: int, generator: torch.Generator) -> Tensor:
    """n random patches, flat.  [n, C size^2]"""
    N, _, H, W = x.shape

    def draw(high: int) -> Tensor:
        return torch.randint(high, (n,), generator=generator)

    rows, top, left = draw(N), draw(H - size + 1), draw(W - size + 1)
    step = torch.arange(size)
    down = (top[:, None] + step)[:, :, None]  # [n, size, 1]
    right = (left[:, None] + step)[:, None, :]  # [n, 1, size]
    return x[rows[:, None, None], :, down, right].permute(0, 3, 1, 2).flatten(1)
