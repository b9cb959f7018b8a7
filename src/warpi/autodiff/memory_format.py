"""The memory format that convolutions on a GPU prefer."""

import torch
from torch import Tensor, nn


def to_channels_last(net: nn.Module) -> nn.Module:
    """Store the weights in the memory format that convolutions on a GPU prefer."""
    on_gpu = any(p.is_cuda for p in net.parameters())
    return net.to(memory_format=torch.channels_last) if on_gpu else net  # type: ignore[call-overload]


def images_to_channels_last(net: nn.Module, x: Tensor) -> Tensor:
    """Store images in the memory format that convolutions on a GPU prefer."""
    has_convolutions = x.is_cuda and x.dim() == 4 and any(isinstance(m, nn.Conv2d) for m in net.modules())
    return x.contiguous(memory_format=torch.channels_last) if has_convolutions else x
