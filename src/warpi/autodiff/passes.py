"""How a batch goes through a network: precision, tracing, in parts; and what can be asked of a pass afterwards.

`tuned` settles how a network's passes are done. `forward` does one, and returns something that can go back (J^T u) and
ahead (J g) from it. Any network has them; one that can be traced has them faster (`trace.py`).

Chance: torch's own generator of the batch's device is replayed where a pass is done a second time; python's and numpy's
are not. A network's first product checks that its pass could be repeated. Where it could not, or where an operator has
no forward-mode rule (weight norm, spectral norm), J g comes from the graph of the pass, differentiated twice: exact
too, with more time and memory. Attention and RNNs run on torch's plain kernels here, since the fused ones have neither
derivative.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, jvp

from warpi.autodiff.batchnorm import forward_rules
from warpi.autodiff.checked_trace import checked_trace
from warpi.autodiff.functional_call import call_with, detached, filled, others, own_parameters, plain_kernels
from warpi.autodiff.replay_rng import capturing, record_rng, replay_rng
from warpi.autodiff.trace import Passes, Point, Untraceable, python_values
from warpi.errors import UserError

_MOST_TRACES = 8  # shapes of a batch, of one network; each takes seconds
_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # RuntimeErrors that are not the network's
_log = logging.getLogger(__name__)
_obstacles: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why a network has no JVP; "": it has one
_repeats: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # networks whose parts could be done again
_traces: WeakKeyDictionary[nn.Module, dict[Any, Passes | None]] = WeakKeyDictionary()  # None: it cannot be traced


@dataclass(frozen=True)
class PassConfig:
    """How the passes of a network are done."""

    bf16: bool = False  # the network's operators in bfloat16 where autocast allows it; logits come out in float32
    compile: bool = False  # trace it; on a GPU fuse its kernels
    lean: bool = False  # where traced: compute again what BatchNorm and ReLU make of a tensor
    checkpointing: bool = False  # where traced: keep few activations, compute all the others again
    accumulate: int = 1  # parts in which a batch goes through
    depth: int = 0  # virtual steps move that many last children of the network; 0: all
    difference: bool = False  # J g by a finite difference


class ConfiguredNet(nn.Module):
    """Mixed into the class of a network by `tuned`: calls of the network are done as `_pass_config` says."""

    _pass_config: PassConfig

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        how, plain = self._pass_config, bool(_plain or args or kwargs)
        learning = self.training and torch.is_grad_enabled() and not x.requires_grad
        if learning and not plain and (how.compile or how.accumulate > 1):
            return forward(self, x).z
        if not how.bf16:
            return super().forward(x, *args, **kwargs)
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            z = super().forward(x, *args, **kwargs)
        return z.float() if isinstance(z, Tensor) else z

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle knows the network's own class
        return _rebuild, (type(self).__mro__[2], self._pass_config), self.__dict__


def configure_passes(net: nn.Module, how: PassConfig) -> nn.Module:
    """The same network, whose calls are from now on done in that way. Weights, names and children stay as they are."""
    if how != PassConfig():
        net.__class__ = _configured_class(type(net))  # type: ignore[arg-type]
        net._pass_config = how  # type: ignore[assignment]
    return net


@cache
def _configured_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (ConfiguredNet, kind), {"__module__": kind.__module__})


def restore_class(net: nn.Module) -> nn.Module:
    """The same network with the class it came with."""
    if isinstance(net, ConfiguredNet):
        net.__class__ = type(net).__mro__[2]
        del net._pass_config
    return net


def _rebuild(kind: type[nn.Module], how: PassConfig) -> nn.Module:
    return configure_passes(kind.__new__(kind), how)


def to_channels_last(net: nn.Module) -> nn.Module:
    """The same network with its weights in memory as the GPU's convolutions want them."""
    on_gpu = any(p.is_cuda for p in net.parameters())
    return net.to(memory_format=torch.channels_last) if on_gpu else net  # type: ignore[call-overload]


def pass_config(net: nn.Module) -> PassConfig:
    return net._pass_config if isinstance(net, ConfiguredNet) else PassConfig()


def along(net: nn.Module) -> list[str]:
    """Names of the parameters that a virtual step moves."""
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    if not (depth := pass_config(net).depth):
        return names
    children = [name for name, child in net.named_children() if any(True for _ in child.parameters())]
    last = tuple(f"{name}." for name in children[-depth:])
    if not (some := [name for name in names if name.startswith(last)]):
        raise UserError(
            f"the last {depth} children of {type(net).__name__} have no weights to train; use --meta-depth 0"
        )
    return some


# --- a pass -----------------------------------------------------------------------------------------------------------


class Pass(ABC):
    """A pass of a network at theta, which can be gone back through, any number of times, and ahead."""

    net: nn.Module
    theta: dict[str, Tensor]  # trainable parameters at which the pass was done
    z: Tensor  # [B, K] logits

    @abstractmethod
    def vjp(self, u: Tensor, some: bool = False) -> list[Tensor]:
        """J^T u, a tensor a parameter: of all of them, or of those that a virtual step moves."""

    @abstractmethod
    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        """J g for a direction along the parameters that a virtual step moves.  [B, K]"""

    def names(self, some: bool) -> list[str]:
        return along(self.net) if some else list(self.theta)


class Forward(NamedTuple):
    """The real pass of a step: loss(z).backward() gives the parameters of the network their gradients."""

    z: Tensor
    done: Pass


def forward(net: nn.Module, x: Tensor, *, snapshot: bool = False) -> Forward:
    """The one pass of a step that updates running statistics.

    `snapshot`: the parameters will be changed in place before `ahead` is asked for.
    """
    done = _pass(net, images_to_channels_last(net, x), None, snapshot)
    if done.z.requires_grad:
        return Forward(done.z, done)
    return Forward(_Logits.apply(done.vjp, done.z, *own_parameters(net).values()), done)  # type: ignore[no-untyped-call]


def at(net: nn.Module, theta: Mapping[str, Tensor], x: Tensor) -> Pass:
    """A pass with other parameters, which leaves the network and its running statistics as they are."""
    return _pass(net, images_to_channels_last(net, x), {name: p.detach() for name, p in theta.items()}, False)


def _pass(net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> Pass:
    if pass_config(net).accumulate > 1:
        return _MicroBatches(net, x, theta, snapshot)
    return _whole(net, x, theta, snapshot)


def _whole(net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> Pass:
    if pass_config(net).compile and (passes := _trace_of(net, x)) is not None:
        return _Traced(net, x, theta, snapshot, passes)
    return _Eager(net, x, theta, snapshot)


class _Logits(torch.autograd.Function):
    """Logits whose way back is the `back` of a Pass."""

    @staticmethod
    def forward(ctx: Any, back: Callable[[Tensor], list[Tensor]], z: Tensor, *theta: Tensor) -> Tensor:  # noqa: ARG004
        ctx.vjp = back
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Any:
        return None, None, *ctx.vjp(u)


class _Traced(Pass):
    """By the graphs of `trace.py`."""

    def __init__(
        self, net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool, passes: Passes
    ) -> None:
        self.net, self.x, self.theta = net, x, detached(net, snapshot) if theta is None else theta
        self.point = Point(passes, x, self.theta, others(net))
        self.z = self.point.z
        if theta is None:
            buffers = dict(net.named_buffers())
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(self.point.others[name])

    def vjp(self, u: Tensor, some: bool = False) -> list[Tensor]:
        return filled(self.point.vjp(u, some), [self.theta[name] for name in self.names(some)])

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        if pass_config(self.net).difference and not self.point.passes.draws:  # other masks would not be a difference
            return _difference(self, g, lambda p: Point(self.point.passes, self.x, p, others(self.net)).z)
        return self.point.jvp(g)


class _Eager(Pass):
    """By torch, operator by operator: any network."""

    def __init__(self, net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> None:
        self.net, self.x, self.theta = net, x, detached(net, snapshot) if theta is None else theta
        apart = snapshot or theta is not None  # not the parameters themselves, which may change in place
        self.leaves = {n: p.requires_grad_() for n, p in self.theta.items()} if apart else own_parameters(net)
        with record_rng(net, x) as chance, plain_kernels(net), _as_it_is(), torch.enable_grad():
            if theta is not None:
                self.z = call_with(net, self.leaves, x)
            else:
                self.z = functional_call(net, self.leaves, (x,)) if snapshot else net(x)
        self.chance = chance[0] if chance else None

    def vjp(self, u: Tensor, some: bool = False) -> list[Tensor]:
        names = self.names(some)
        grads = torch.autograd.grad(
            self.z, [self.leaves[name] for name in names], u, retain_graph=True, allow_unused=True
        )
        return filled(grads, [self.theta[name] for name in names])

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        """In forward mode where the network allows it, else by differentiating the graph of z twice."""
        if pass_config(self.net).difference:
            return _difference(self, g, self._again)
        known = _obstacles.get(self.net)
        if known:
            return self._double_backward(g, known)
        theta = {name: p.detach() for name, p in self.theta.items()}
        here = {name: theta[name] for name in g}
        rest = {name: p for name, p in theta.items() if name not in here}
        try:
            with torch.no_grad(), forward_rules(least=2**16):
                z, jg = jvp(lambda p: self._again({**rest, **p}), (here,), (dict(g),))[:2]
        except _DEVICE_ERRORS:
            raise
        except RuntimeError as error:  # NotImplementedError is one
            why = _short(error)
        else:
            # Once, since this waits for the device. Not-a-number passes: divergence is not for here to find.
            other = known is None and (z - self.z).norm() > _tolerance(z, self.net) * self.z.norm()
            why = (
                "repeated, its pass gives other logits: chance not torch's, or masks in another order" if other else ""
            )
        if why:
            jg = self._double_backward(g, why)
            _tell(type(self.net).__name__, why)
        _obstacles[self.net] = why
        result: Tensor = jg
        return result

    def _again(self, theta: dict[str, Tensor]) -> Tensor:
        with replay_rng(self.chance, self.x.device), plain_kernels(self.net), _as_it_is():
            return call_with(self.net, theta, self.x)

    def _double_backward(self, g: Mapping[str, Tensor], why: str) -> Tensor:
        """h(w) = J^T w is linear, so that d<h, g>/dw = J g at any w; <h, g> = <w, J g> unless an operator cut it."""
        z = self.z
        w = torch.arange(z.numel(), device=z.device).cos().view_as(z).to(z).requires_grad_()
        try:
            with torch.enable_grad():
                h = torch.autograd.grad(z, [self.leaves[name] for name in g], w, create_graph=True, allow_unused=True)
                hg = torch.cat([(a * b).flatten() for a, b in zip(h, g.values(), strict=True) if a is not None])
                (jg,) = torch.autograd.grad(hg.sum(), w)
            if not capturing(z.device):  # this waits for the device
                gap, size = (hg.sum() - (w * jg).sum()).abs(), hg.norm() + hg.sum().abs()
                if gap > _tolerance(w, self.net) * size:
                    raise RuntimeError("a backward pass that cannot be differentiated")
        except _DEVICE_ERRORS:
            raise
        except RuntimeError as error:
            raise UserError(
                f"{type(self.net).__name__} has an operator that can be differentiated neither in forward mode ({why}) "
                f"nor twice ({_short(error)}); meta methods need one of the two: replace that layer, or take a method "
                "without a meta gradient, such as ce"
            ) from error
        return jg


def too_few(x: Tensor, n: int) -> UserError:
    return UserError(f"a batch of {len(x)} cannot be cut into {n} parts of 2 or more; lower --accumulate")


class _MicroBatches(Pass):
    """Part after part, keeping no activations: each is done again where it is gone through. BatchNorm sees parts."""

    def __init__(self, net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> None:
        self.net, self.theta = net, detached(net, snapshot) if theta is None else theta
        if len(x) < 2 * (n := pass_config(net).accumulate):
            raise too_few(x, n)
        self.parts: list[tuple[Tensor, Tensor | None]] = []
        self.logits: list[Tensor] = []
        for part in x.tensor_split(n):
            with torch.no_grad(), record_rng(net, x) as chance, plain_kernels(net), _as_it_is():
                self.logits.append(net(part) if theta is None else call_with(net, self.theta, part))
            self.parts.append((part, chance[0] if chance else None))
        self.z = torch.cat(self.logits)

    def _again(self) -> Iterator[Pass]:
        for (part, chance), before in zip(self.parts, self.logits, strict=True):
            with replay_rng(chance, part.device):
                done = (_whole if chance is None else _Eager)(self.net, part, self.theta, False)
            known = _repeats.get(self.net)  # looked at once, since this waits for the device
            if not known and (done.z - before).norm() > _tolerance(before, self.net) * before.norm():
                raise UserError(
                    f"a batch cannot go through {type(self.net).__name__} in parts: done again, a part gives other "
                    "logits (it reads what it changes, or its chance is not torch's); use --accumulate 1"
                )
            yield done
        _repeats[self.net] = True

    def vjp(self, u: Tensor, some: bool = False) -> list[Tensor]:
        total = [torch.zeros_like(self.theta[name]) for name in self.names(some)]
        for again, part in zip(self._again(), torch.split(u, [len(p) for p, _ in self.parts]), strict=True):
            torch._foreach_add_(total, again.vjp(part, some))
        return total

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([again.jvp(g) for again in self._again()])


# --- what they share --------------------------------------------------------------------------------------------------


def _trace_of(net: nn.Module, x: Tensor) -> Passes | None:
    """The traced passes of a network for such inputs; None where it cannot be traced, which is said once."""
    how, traces = pass_config(net), _traces.setdefault(net, {})
    modes = tuple(module.training for module in net.modules())
    trainable = tuple(p.requires_grad for p in net.parameters())
    autocast = torch.is_autocast_enabled(x.device.type)
    key = x.shape, x.stride(), x.dtype, x.device, modes, trainable, autocast, python_values(net)
    if key not in traces:
        traces[key] = None
        try:
            if len(traces) > _MOST_TRACES:
                raise Untraceable("its batches come in too many shapes, or its numbers change too often")
            with _as_it_is(), plain_kernels(net):
                traces[key] = checked_trace(
                    net, x, along(net), how.lean, how.checkpointing, _tolerance(x, net), (how, key)
                )
        except Untraceable as why:
            _tell_untraced(type(net).__name__, str(why))
    return traces[key]


def _difference(done: Pass, g: Mapping[str, Tensor], logits: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """J g = (F(theta + e g) - F(theta)) / e, with e such that the parameters move by 0.01 in all."""
    length = torch.stack(torch._foreach_norm(list(g.values()))).norm()
    e = 0.01 / length.clamp_min(1e-12)
    with torch.no_grad():
        moved = {name: done.theta[name] + e * d for name, d in g.items()}
        jg: Tensor = (logits({**done.theta, **moved}) - done.z) / e
        return jg


def _tolerance(z: Tensor, net: nn.Module) -> float:
    """Far above rounding, far below another mask."""
    return float(torch.finfo(torch.bfloat16 if pass_config(net).bf16 else z.dtype).eps ** 0.25)


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]


@cache
def _tell(net: str, why: str) -> None:
    """One line a process, type of network and reason."""
    _log.warning("%s has no forward-mode product (%s): exact, but slower and needs more memory", net, why)


@cache
def _tell_untraced(net: str, why: str) -> None:
    _log.warning("%s cannot be traced (%s): its passes are exact, but slower", net, why)


def images_to_channels_last(net: nn.Module, x: Tensor) -> Tensor:
    """Images as the GPU's convolutions want them."""
    channels_last = x.is_cuda and x.dim() == 4 and any(isinstance(m, nn.Conv2d) for m in net.modules())
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


_plain: list[None] = []  # not empty: a call of a tuned network is one plain pass


@contextmanager
def _as_it_is() -> Iterator[None]:
    _plain.append(None)
    try:
        yield
    finally:
        _plain.pop()
