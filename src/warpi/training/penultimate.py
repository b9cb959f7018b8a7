"""The penultimate layer of a network within a step: the input of meta-networks that look at features."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from warpi.autodiff.passes import how_of, too_few
from warpi.errors import UserError
from warpi.training.method import evaluating


class _Features(nn.Module):
    """`net.features` as a module, which can be called with other buffers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.net.features(x)  # type: ignore[operator]
        return h


def features(net: nn.Module, x: Tensor) -> Tensor:
    """h(x), by a pass of its own which leaves running statistics as they are.  [B, D]

    In the precision and the parts of the network's other passes. It can be gone back through where gradients are on.
    """
    if isinstance(found := getattr(net, "features", None), nn.Module) or not callable(found):
        raise UserError(  # torchvision calls a part of some networks so, which gives no [B, D]
            f"this method looks at features, and the network {type(net).__name__} has no method features(x); "
            "give it one that gives [B, D], take a net of `warpi list nets`, or a method that needs none, such as warpi"
        )
    how, parts = how_of(net), []
    n = how.accumulate if net.training else 1  # as the logits are cut: BatchNorm sees the same sets
    if len(x) < 2 * n and n > 1:
        raise too_few(x, n)
    for part in x.tensor_split(n):
        buffers = {f"net.{name}": b.clone() for name, b in net.named_buffers()}
        with torch.autocast(x.device.type, torch.bfloat16, enabled=how.bf16, cache_enabled=False):
            parts.append(functional_call(_Features(net), buffers, (part,)))
    h = torch.cat(parts)
    return h.float() if how.bf16 else h


def last_layer(net: nn.Module, h: Tensor) -> Tensor:
    """fc(h), the logits.  [B, K]"""
    if not isinstance(fc := getattr(net, "fc", None), nn.Module):
        raise UserError(
            f"this method needs a network in two parts, and {type(net).__name__} has no last layer `fc`; "
            "name it so that forward(x) is fc(features(x)), or take a net of `warpi list nets`"
        )
    with torch.autocast(h.device.type, torch.bfloat16, enabled=how_of(net).bf16, cache_enabled=False):
        z: Tensor = fc(h)
    return z.float() if how_of(net).bf16 else z


@torch.no_grad()
def feature_size(net: nn.Module, shape: tuple[int, ...]) -> int:
    """D, by a look at what becomes of two inputs of zeros."""
    with evaluating([net]):
        h = features(net, next(net.parameters()).new_zeros((2, *shape)))
    if h.dim() != 2 or len(h) != 2:
        raise UserError(f"{type(net).__name__}.features gave shape {tuple(h.shape)} for two inputs; allowed is (2, D)")
    return h.shape[1]
