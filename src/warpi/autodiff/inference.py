"""Outputs of a network in evaluation mode, with fused kernels on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from warpi.autodiff.functional_call import Tensors
from warpi.autodiff.memory_format import images_to_channels_last
from warpi.autodiff.passes import pass_config
from warpi.autodiff.trace_parts import fuse_graph

_graphs: WeakKeyDictionary[nn.Module, dict[Any, Callable[..., Sequence[Tensor]]]] = WeakKeyDictionary()


@torch.no_grad()
def infer(net: nn.Module, x: Tensor, *, features: bool = False) -> Tensor:
    """Logits of a network in evaluation mode, or its penultimate features `net.features(x)`.

    They are traced if the network's configuration asks for it, once per batch shape. This is for a network that is
    used in every step; an evaluation once per epoch is not worth the time to compile.
    """
    if net.training:
        raise ValueError("infer needs a network in evaluation mode")
    if not pass_config(net).compile:
        return _call(net, x, features, {})
    x = images_to_channels_last(net, x)
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    graphs = _graphs.setdefault(net, {})
    key = x.shape, x.dtype, x.device, features
    if key not in graphs:
        graphs[key] = _trace(net, x, features, tensors)
    return graphs[key](x, *tensors.values())[0]


class _FeaturesOf(nn.Module):
    """Wraps `net.features` as a module, so that it can be called with other parameters and buffers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.net.features(x)  # type: ignore[operator]
        return h


def call_features(net: nn.Module, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """`net.features(x)` in the precision of the network, with some of its parameters and buffers replaced.  [B, D]"""
    bf16 = pass_config(net).bf16
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
        h: Tensor = functional_call(_FeaturesOf(net), {f"net.{name}": t for name, t in tensors.items()}, (x,))
    return h.float() if bf16 else h


def _call(net: nn.Module, x: Tensor, features: bool, tensors: Mapping[str, Tensor]) -> Tensor:
    if features:
        return call_features(net, x, tensors)
    z: Tensor = functional_call(net, dict(tensors), (x,))
    return z


def _trace(net: nn.Module, x: Tensor, features: bool, tensors: Tensors) -> Callable[..., Sequence[Tensor]]:
    def outputs(x: Tensor, *values: Tensor) -> list[Tensor]:
        return [_call(net, x, features, dict(zip(tensors, values, strict=True)))]

    graph = make_fx(outputs, tracing_mode="fake")(x, *tensors.values())
    return fuse_graph(graph, [x, *tensors.values()]) if x.is_cuda else graph
