"""Trace a network, and compare the trace with the network before it is used."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from warpi.autodiff.functional_call import detach_trainable, fill_missing, fixed_tensors, trainable_parameters
from warpi.autodiff.replay_rng import get_rng_state, replay_rng
from warpi.autodiff.trace import Untraceable, trace
from warpi.autodiff.trace_parts import Passes, Point
from warpi.errors import first_line
from warpi.nets.sync_batchnorm import SharedBatchNorm

_MAX_CACHED = 16
_cache: OrderedDict[Any, Passes] = OrderedDict()  # the next run in this process often has the same network


def checked_trace(
    net: nn.Module, x: Tensor, moved: Sequence[str], lean: bool, checkpointing: bool, tolerance: float, key: Any
) -> Passes:
    """Trace a network and compare logits, buffers and both products with plain passes of a copy.

    Tracing takes seconds, comparing does not. So the cached trace of a network that looks the same and has the same
    `key` is tried first. Raises Untraceable if the network cannot be traced or the trace differs.
    """
    if any(isinstance(m, SharedBatchNorm) for m in net.modules()):
        raise Untraceable("its BatchNorm sums over ranks")
    try:
        plain_copy = copy.deepcopy(net)
        traced_copy = copy.deepcopy(net)
    except (RuntimeError, TypeError) as error:
        raise Untraceable(f"it cannot be copied: {first_line(error)}") from None
    reference = _Reference(net, plain_copy, x)
    looks = tuple((name, type(module), repr(module), _describe(module)) for name, module in net.named_modules())
    key = looks, tuple(moved), lean, checkpointing, key
    if key in _cache:
        try:
            reference.compare(_cache[key], tolerance)
            _cache.move_to_end(key)
            return _cache[key]
        except (Untraceable, RuntimeError, LookupError):  # it only looks the same
            pass
    passes = trace(traced_copy, x, reference.z.shape[1], moved, lean, checkpointing)
    reference.compare(passes, tolerance)
    if x.is_cuda:
        passes.fuse()
    if not passes.holds_tensors():
        _cache[key] = passes
        if len(_cache) > _MAX_CACHED:
            _cache.popitem(last=False)
    return passes


def _describe(module: nn.Module) -> tuple[str, ...]:
    """The attributes of a module as text, except modules and tensors. One pass may not reveal all, such as a clamp."""
    attributes = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
    return tuple(f"{name} = {value!r}" for name, value in attributes.items() if not isinstance(value, Tensor))


class _Reference:
    """The results of a network without tracing: two forward passes of a copy, and one backward pass."""

    def __init__(self, net: nn.Module, plain_copy: nn.Module, x: Tensor) -> None:
        self.net = net
        self.x = x
        self.rng_state = get_rng_state(x.device)
        with replay_rng(self.rng_state, x.device), torch.enable_grad():
            z = plain_copy(x)
        self.buffers = {name: b.clone() for name, b in plain_copy.named_buffers()}
        with replay_rng(self.rng_state, x.device), torch.no_grad():
            self.second_z = plain_copy(x)
        self.u = torch.arange(z.numel(), device=z.device).cos().view_as(z).to(z)
        self.parameters = list(trainable_parameters(plain_copy).values())
        grads = torch.autograd.grad(z, self.parameters, self.u, allow_unused=True)
        self.grads = fill_missing(grads, self.parameters)
        self.z = z.detach()

    def compare(self, passes: Passes, tolerance: float) -> None:
        """Raise Untraceable if the trace gives different results."""

        def compare(what: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
            a, b = (torch.cat([t.detach().flatten().double() for t in ts]) for ts in (got, wanted))
            if not (a - b).norm() <= tolerance * b.norm() + 1e-12:  # written so that NaN counts as a difference
                raise Untraceable(what)

        with replay_rng(self.rng_state, self.x.device):
            point = Point(passes, self.x, detach_trainable(self.net, copy=False), fixed_tensors(self.net))
        compare("a second call gives different logits", [self.second_z], [self.z])
        compare("its trace gives different logits", [point.z], [self.z])
        for name, b in self.buffers.items():
            compare(f"its trace gives a different {name}", [point.fixed[name]], [b])
        for _ in range(2):
            grads = fill_missing(point.vjp(self.u), self.parameters)
            compare("its trace gives a different gradient", grads, self.grads)
        names = trainable_parameters(self.net)
        g = {name: d for name, d in zip(names, self.grads, strict=True) if name in passes.g}
        compare(
            "its trace gives a different product",
            [(self.u * point.jvp(g)).sum()],
            [torch.stack([(d * d).sum() for d in g.values()]).sum()],
        )
