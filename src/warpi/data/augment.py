"""Batched augmentation of image tensors, on whatever device they are."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


@dataclass(frozen=True)
class Crop:
    """Random crop of `size` out of an image with a reflected border of `pad`, then a random mirror image.

    Outside training: the crop from the middle, no border, no mirror. CIFAR: size 32, pad 4. Image folders are stored
    a little larger than `size` and take no border.
    """

    size: int
    pad: int = 0
    flip: bool = True

    def train(self, x: Tensor, generator: Generator, part: slice = slice(None), whole: int | None = None) -> Tensor:
        """x [B, C, H, W] -> [B, C, size, size], one offset and one mirror an image.

        Where x is a `part` of a `whole` number of images, chance is drawn for all of them.
        """
        if self.pad:
            x = F.pad(x.float(), [self.pad] * 4, mode="reflect")
        n, channels, height, width = x.shape
        drawn = (whole or n, 1)
        top = torch.randint(height - self.size + 1, drawn, generator=generator, device=x.device)[part]
        left = torch.randint(width - self.size + 1, drawn, generator=generator, device=x.device)[part]
        span = torch.arange(self.size, device=x.device)
        columns = left + span  # [B, size]
        if self.flip:
            mirror = torch.rand(drawn, generator=generator, device=x.device)[part] < 0.5
            columns = torch.where(mirror, columns.flip(1), columns)
        flat = (top + span)[:, :, None] * width + columns[:, None, :]  # [B, size, size]
        index = flat.view(n, 1, -1).expand(n, channels, -1)
        return x.reshape(n, channels, -1).gather(2, index).view(n, channels, self.size, self.size)

    def middle(self, x: Tensor) -> Tensor:
        """x [B, C, H, W] -> [B, C, size, size], without chance."""
        top, left = (x.shape[2] - self.size) // 2, (x.shape[3] - self.size) // 2
        return x[:, :, top : top + self.size, left : left + self.size]
