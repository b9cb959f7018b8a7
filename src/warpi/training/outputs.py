"""Outputs of a network: predictions for the rows of a split, penultimate features, and logits of the last layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from warpi.autodiff.inference import call_features
from warpi.autodiff.passes import cut_batch, pass_config
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.training.method import evaluating
from warpi.utils import distributed


@torch.no_grad()
def predict_rows(
    net: nn.Module, split: Split, fn: Callable[[Tensor], Tensor] | None = None, size: int = 1000
) -> tuple[Tensor, Tensor]:
    """The readable rows [n] of a split and `fn(x)` [n, ...] for each, in evaluation mode without augmentation.

    `fn` is by default the network itself, which gives logits. All ranks get the same values at the beginning of an
    epoch, when running statistics have just been averaged.
    """
    with evaluating([net]):
        return share_rows(lambda x: (fn or net)(x).float(), split, size)


def share_rows(fn: Callable[[Tensor], Tensor], split: Split, size: int = 1000) -> tuple[Tensor, Tensor]:
    """The readable rows [n] of a split and `fn(x)` [n, ...] for each. Ranks compute shares and get the whole result."""
    n = distributed.n_ranks() if len(split) >= distributed.n_ranks() else 1
    positions = torch.arange(len(split)).tensor_split(n)[distributed.rank() % n]
    part = split if n == 1 else split.subset(positions)
    rows: list[Tensor] = []
    values: list[Tensor] = []
    with distributed.raise_on_all_ranks():
        for batch in part.batches(size):
            rows.append(batch.rows + positions[0].to(batch.rows.device))
            values.append(fn(batch.x))
    if n == 1:
        return torch.cat(rows), torch.cat(values)
    return distributed.gather_uneven(torch.cat(rows)), distributed.gather_uneven(torch.cat(values))


def penultimate(net: nn.Module, x: Tensor) -> Tensor:
    """Features h(x) of the penultimate layer, from a separate pass that does not update running statistics.  [B, D]

    Uses the precision and micro-batches of the network's other passes. Differentiable if gradients are enabled.
    """
    features = getattr(net, "features", None)
    if isinstance(features, nn.Module) or not callable(features):  # some torchvision networks have a module "features"
        raise UserError(
            f"this method uses features, but the network {type(net).__name__} has no method features(x); add one that "
            "returns [B, D], use a network from `warpi list nets`, or the method `warpi`, which does not use features"
        )
    n = pass_config(net).accumulate if net.training else 1  # the parts of the logits: BatchNorm sees the same sets
    parts = []
    for part in cut_batch(x, n):
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        parts.append(call_features(net, part, buffers))
    return torch.cat(parts)


def last_layer(net: nn.Module, h: Tensor) -> Tensor:
    """Logits fc(h) of penultimate features h.  [B, D] -> [B, K]"""
    fc = getattr(net, "fc", None)
    if not isinstance(fc, nn.Module):
        raise UserError(
            "this method needs a network split into features(x) and a last layer `fc`, but "
            f"{type(net).__name__} has no `fc`; define forward(x) as fc(features(x)), or choose a network from "
            "`warpi list nets`"
        )
    bf16 = pass_config(net).bf16
    with torch.autocast(h.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
        z: Tensor = fc(h)
    return z.float() if bf16 else z


@torch.no_grad()
def feature_size(net: nn.Module, shape: tuple[int, ...]) -> int:
    """Feature dimension D, measured by passing two zero inputs through the network."""
    with evaluating([net]):
        h = penultimate(net, next(net.parameters()).new_zeros((2, *shape)))
    if h.dim() != 2 or len(h) != 2:
        raise UserError(f"{type(net).__name__}.features returned shape {tuple(h.shape)} for two inputs, not (2, D)")
    return h.shape[1]
