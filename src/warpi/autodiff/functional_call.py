"""A network as a function of its parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensors = dict[str, Tensor]
"""Parameters, buffers or directions by name."""


def trainable_parameters(net: nn.Module) -> Tensors:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def detach_trainable(net: nn.Module, *, copy: bool) -> Tensors:
    """The trainable parameters without their graph. They share memory with the network unless `copy`."""
    return {name: p.detach().clone() if copy else p.detach() for name, p in trainable_parameters(net).items()}


def fixed_tensors(net: nn.Module) -> Tensors:
    """Frozen parameters and buffers."""
    frozen = {name: p.detach() for name, p in net.named_parameters() if not p.requires_grad}
    return {**frozen, **dict(net.named_buffers())}


def fill_missing(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with zeros for parameters that have no effect."""
    return [torch.zeros_like(p) if d is None else d for d, p in zip(grads, like, strict=True)]


@contextmanager
def plain_kernels(net: nn.Module) -> Iterator[None]:
    """Context manager: use kernels that support double backward and forward mode, and draw the same masks in both."""
    with ExitStack() as flags:
        flags.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(m, nn.RNNBase) for m in net.modules()):  # only for RNNs, because convolutions need cuDNN
            flags.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def call_with(net: nn.Module, theta: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Call the network with other parameters. Its buffers (running statistics) do not change."""
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    z: Tensor = functional_call(net, (dict(theta), buffers), (x,))
    return z


class Logits(torch.autograd.Function):
    """Logits whose backward pass is the `vjp` of a Pass."""

    @staticmethod
    def forward(ctx: Any, vjp: Callable[[Tensor], list[Tensor]], z: Tensor, *theta: Tensor) -> Tensor:  # noqa: ARG004
        ctx.vjp = vjp
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Any:
        return None, None, *ctx.vjp(u)
