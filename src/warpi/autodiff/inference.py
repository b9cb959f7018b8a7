"""Logits of a network in evaluation mode, with fused kernels on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from warpi.autodiff.passes import images_to_channels_last, pass_config
from warpi.autodiff.trace import fuse_graph

_fused: WeakKeyDictionary[nn.Module, dict[Any, Callable[..., Sequence[Tensor]]]] = WeakKeyDictionary()


@torch.no_grad()
def infer(net: nn.Module, x: Tensor) -> Tensor:
    """Logits of a network in evaluation mode. It is traced if its configuration says so, for each shape of a batch.

    For a network that is asked in every step. An evaluation now and then is not worth the time to compile.
    """
    if net.training:
        raise ValueError("infer needs a network in evaluation mode")
    if not pass_config(net).compile:
        logits: Tensor = net(x)
        return logits
    x = images_to_channels_last(net, x)
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    key = x.shape, x.dtype, x.device
    graphs = _fused.setdefault(net, {})
    if key not in graphs:
        graphs[key] = _trace(net, x, tensors)
    return graphs[key](x, *tensors.values())[0]


def _trace(net: nn.Module, x: Tensor, tensors: dict[str, Tensor]) -> Callable[..., Sequence[Tensor]]:
    def logits(x: Tensor, *values: Tensor) -> list[Tensor]:
        return [functional_call(net, dict(zip(tensors, values, strict=True)), (x,))]

    graph = make_fx(logits, tracing_mode="fake")(x, *tensors.values())
    return fuse_graph(graph, [x, *tensors.values()]) if x.is_cuda else graph
