"""Batched augmentation of image tensors, on the device they are on: random crops and strong distortions."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

_N_DRAWS = 11  # random numbers per image
# Largest changes by strong augmentation
_ROTATION = math.pi / 12  # 15 degrees
_SHEAR = 0.15
_ZOOM = 0.2  # of the logarithm of the factor, also below
_SHIFT = 0.1  # as a fraction of the image
_CONTRAST = 0.4
_BRIGHTNESS = 0.3
_SATURATION = 0.7
_GRAY = 127.5  # fills the square that is cut out


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


def distort(x: Tensor, generator: Generator, part: slice = slice(None), whole: int | None = None) -> Tensor:
    """Apply a random affine map, change the colors and cut out a square.  [B, C, H, W], values 0 to 255

    If x is only `part` of a batch of `whole` images, random numbers are drawn for the entire batch.
    """
    u = torch.rand(whole or len(x), _N_DRAWS, generator=generator, device=x.device)[part]
    x = warp(x.float(), 2 * u[:, :6] - 1)
    x = change_colors(x, 2 * u[:, 6:9] - 1)
    return cut_out(x, u[:, 9:])


def warp(x: Tensor, u: Tensor) -> Tensor:
    """Rotate, shear, zoom and shift each image; the border is reflected.  u [B, 6] in (-1, 1)"""
    angle, shear_x, shear_y, zoom, shift_x, shift_y = u.unbind(1)
    size = torch.exp(_ZOOM * zoom)
    cos = size * torch.cos(_ROTATION * angle)
    sin = size * torch.sin(_ROTATION * angle)
    first = torch.stack([cos, _SHEAR * shear_x - sin, 2 * _SHIFT * shift_x], dim=1)
    second = torch.stack([_SHEAR * shear_y + sin, cos, 2 * _SHIFT * shift_y], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def change_colors(x: Tensor, u: Tensor) -> Tensor:
    """Change brightness, contrast and saturation of each image.  u [B, 3] in (-1, 1)"""
    brightness, contrast, saturation = (u[:, i, None, None, None] for i in range(3))
    gray = x.mean(1, keepdim=True)
    x = gray + torch.exp(_SATURATION * saturation) * (x - gray)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + torch.exp(_CONTRAST * contrast) * (x - mean)
    return (torch.exp(_BRIGHTNESS * brightness) * x).clamp(0, 255)


def cut_out(x: Tensor, u: Tensor) -> Tensor:
    """Fill a square of half the image's side with gray. It may extend beyond the image.  u [B, 2] in (0, 1)"""
    height, width = x.shape[2:]
    half = min(height, width) / 4
    rows = torch.arange(height, device=x.device) + 0.5
    columns = torch.arange(width, device=x.device) + 0.5
    in_rows = (rows - u[:, :1] * height).abs() < half  # [B, H]
    in_columns = (columns - u[:, 1:] * width).abs() < half  # [B, W]
    inside = in_rows[:, :, None] & in_columns[:, None, :]
    return x.masked_fill(inside[:, None], _GRAY)
