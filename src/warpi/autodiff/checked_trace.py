"""A trace that is used only after it was compared with what the network does."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from warpi.autodiff.functional_call import detached, filled, others, own_parameters
from warpi.autodiff.replay_rng import generator_state, replay_rng
from warpi.autodiff.trace import Passes, Point, Untraceable, trace
from warpi.nets.sync_batchnorm import SharedBatchNorm

_MOST = 16
_known: OrderedDict[Any, Passes] = OrderedDict()  # the next run of a sweep has the same network


def checked_trace(
    net: nn.Module, x: Tensor, along: Sequence[str], lean: bool, checkpointing: bool, tolerance: float, key: Any
) -> Passes:
    """A trace that was compared with a plain pass of a copy of the network: logits, buffers, both linear maps.

    Tracing takes seconds and the comparison does not, so the trace of a network that looks the same, and has the same
    `key`, is tried first.
    """
    if any(isinstance(m, SharedBatchNorm) for m in net.modules()):
        raise Untraceable("its BatchNorm sums over ranks")
    try:
        twin, other = copy.deepcopy(net), copy.deepcopy(net)
    except (RuntimeError, TypeError) as error:
        raise Untraceable(f"it cannot be copied: {str(error).partition(chr(10))[0][:160]}") from None
    plain = _Plain(net, twin, x)
    looks = tuple((name, type(module), repr(module), _held(module)) for name, module in net.named_modules())
    key = looks, tuple(along), lean, checkpointing, key
    if key in _known:
        try:
            plain.compare(_known[key], tolerance)
            _known.move_to_end(key)
            return _known[key]
        except (Untraceable, RuntimeError, LookupError):  # it only looks the same
            pass
    passes = trace(other, x, plain.z.shape[1], along, lean=lean, checkpointing=checkpointing)
    plain.compare(passes, tolerance)
    if x.is_cuda:
        passes.fuse()
    if not passes.holds_tensors():
        _known[key] = passes
        if len(_known) > _MOST:
            _known.popitem(last=False)
    return passes


def _held(module: nn.Module) -> tuple[str, ...]:
    """What a module holds besides modules and tensors, as text: the ends of a clamp, which one pass may hide."""
    own = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
    return tuple(f"{name} = {value!r}" for name, value in own.items() if not isinstance(value, Tensor))


class _Plain:
    """What a network does, run as it is: two passes of its twin, and one way back."""

    def __init__(self, net: nn.Module, twin: nn.Module, x: Tensor) -> None:
        self.net, self.x, self.chance = net, x, generator_state(x.device)
        with replay_rng(self.chance, x.device), torch.enable_grad():
            z = twin(x)
        self.buffers = {name: b.clone() for name, b in twin.named_buffers()}
        with replay_rng(self.chance, x.device), torch.no_grad():
            self.once_more = twin(x)
        self.u = torch.arange(z.numel(), device=z.device).cos().view_as(z).to(z)
        self.own = list(own_parameters(twin).values())
        self.grads = filled(torch.autograd.grad(z, self.own, self.u, allow_unused=True), self.own)
        self.z = z.detach()

    def compare(self, passes: Passes, tolerance: float) -> None:
        """Raises Untraceable where a trace does something else."""

        def compare(what: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
            a, b = (torch.cat([t.detach().flatten().double() for t in ts]) for ts in (got, wanted))
            if not (a - b).norm() <= tolerance * b.norm() + 1e-12:  # so that nan, which is no number, differs
                raise Untraceable(what)

        with replay_rng(self.chance, self.x.device):
            point = Point(passes, self.x, detached(self.net, False), others(self.net))
        compare("called again, it gives other logits", [self.once_more], [self.z])
        compare("traced, it gives other logits", [point.z], [self.z])
        for name, b in self.buffers.items():
            compare(f"traced, it gives another {name}", [point.others[name]], [b])
        for _ in range(2):
            compare("traced, it gives another gradient", filled(point.vjp(self.u), self.own), self.grads)
        names = own_parameters(self.net)
        g = {name: d for name, d in zip(names, self.grads, strict=True) if name in passes.g}
        compare(
            "traced, it gives another product",
            [(self.u * point.jvp(g)).sum()],
            [torch.stack([(d * d).sum() for d in g.values()]).sum()],
        )
