"""Batched augmentation of image tensors, on the device they are on."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


@dataclass(frozen=True)
class Crop:
    """A random crop of `size`, after reflecting a border of `pad` pixels, then a random horizontal flip.

    Outside training it is the center crop, without a border or a flip. CIFAR uses size 32 and pad 4. Image folders are
    stored slightly larger than `size` and need no border.
    """

    size: int
    pad: int = 0
    flip: bool = True

    def train(self, x: Tensor, generator: Generator, part: slice = slice(None), whole: int | None = None) -> Tensor:
        """Augment x [B, C, H, W] to [B, C, size, size], with one offset and one flip per image.

        If x is only `part` of a batch of `whole` images, random numbers are drawn for the entire batch.
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

    def center(self, x: Tensor) -> Tensor:
        """The center crop: x [B, C, H, W] -> [B, C, size, size]."""
        top = (x.shape[2] - self.size) // 2
        left = (x.shape[3] - self.size) // 2
        return x[:, :, top : top + self.size, left : left + self.size]
