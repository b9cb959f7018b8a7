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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from warpi.batchnorm import forward_rules
from warpi.chance import capturing, generator_state, noted_chance, repeated
from warpi.errors import UserError
from warpi.trace import Passes, Point, Untraceable, trace

_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # RuntimeErrors that are not the network's
_log = logging.getLogger(__name__)
_obstacles: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why a network has no JVP; "": it has one
_traces: WeakKeyDictionary[nn.Module, dict[Any, Passes | None]] = WeakKeyDictionary()  # None: it cannot be traced


@dataclass(frozen=True)
class How:
    """How the passes of a network are done."""

    bf16: bool = False  # the network's operators in bfloat16 where autocast allows it; logits come out in float32
    compile: bool = False  # trace it; on a GPU fuse its kernels
    lean: bool = False  # where traced: compute again what BatchNorm and ReLU make of a tensor
    checkpointing: bool = False  # where traced: keep few activations, compute all the others again
    accumulate: int = 1  # parts in which a batch goes through
    depth: int = 0  # virtual steps move that many last children of the network; 0: all
    difference: bool = False  # J g by a finite difference


class Tuned(nn.Module):
    """Mixed into the class of a network by `tuned`: calls of the network are done as `how` says."""

    how: How

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and not _plain and (self.how.compile or self.how.accumulate > 1):
            return forward(self, x).z
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.how.bf16, cache_enabled=False):
            z: Tensor = super().forward(x)
        return z.float() if self.how.bf16 else z


def tuned(net: nn.Module, how: How) -> nn.Module:
    """The same network, whose calls are from now on done in that way. Weights, names and children stay as they are."""
    if how != How():
        kind = type(net)
        net.__class__ = type(kind.__name__, (Tuned, kind), {"__module__": kind.__module__})
        net.how = how  # type: ignore[assignment]
    return net


def laid_out(net: nn.Module) -> nn.Module:
    """The same network with its weights in memory as the GPU's convolutions want them."""
    on_gpu = any(p.is_cuda for p in net.parameters())
    return net.to(memory_format=torch.channels_last) if on_gpu else net  # type: ignore[call-overload]


def how_of(net: nn.Module) -> How:
    return net.how if isinstance(net, Tuned) else How()


def along(net: nn.Module) -> list[str]:
    """Names of the parameters that a virtual step moves."""
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    if not (depth := how_of(net).depth):
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
    def back(self, u: Tensor, some: bool = False) -> list[Tensor]:
        """J^T u, a tensor a parameter: of all of them, or of those that a virtual step moves."""

    @abstractmethod
    def ahead(self, g: Mapping[str, Tensor]) -> Tensor:
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
    done = _pass(net, _laid_out(net, x), None, snapshot)
    if done.z.requires_grad:
        return Forward(done.z, done)
    return Forward(_Logits.apply(done.back, done.z, *_own_parameters(net).values()), done)  # type: ignore[no-untyped-call]


def at(net: nn.Module, theta: Mapping[str, Tensor], x: Tensor) -> Pass:
    """A pass with other parameters, which leaves the network and its running statistics as they are."""
    return _pass(net, _laid_out(net, x), {name: p.detach() for name, p in theta.items()}, False)


def _pass(net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> Pass:
    if how_of(net).accumulate > 1:
        return _InParts(net, x, theta, snapshot)
    return _whole(net, x, theta, snapshot)


def _whole(net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> Pass:
    if how_of(net).compile and (passes := _trace_of(net, x)) is not None:
        return _Traced(net, x, theta, snapshot, passes)
    return _Eager(net, x, theta, snapshot)


class _Logits(torch.autograd.Function):
    """Logits whose way back is the `back` of a Pass."""

    @staticmethod
    def forward(ctx: Any, back: Callable[[Tensor], list[Tensor]], z: Tensor, *theta: Tensor) -> Tensor:  # noqa: ARG004
        ctx.back = back
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Any:
        return None, None, *ctx.back(u)


class _Traced(Pass):
    """By the graphs of `trace.py`."""

    def __init__(
        self, net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool, passes: Passes
    ) -> None:
        self.net, self.x, self.theta = net, x, _detached(net, snapshot) if theta is None else theta
        self.point = Point(passes, x, self.theta, _others(net))
        self.z = self.point.z
        if theta is None:
            buffers = dict(net.named_buffers())
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(self.point.others[name])

    def back(self, u: Tensor, some: bool = False) -> list[Tensor]:
        return _filled(self.point.back(u, some), [self.theta[name] for name in self.names(some)])

    def ahead(self, g: Mapping[str, Tensor]) -> Tensor:
        if how_of(self.net).difference:
            return _difference(self, g, lambda p: Point(self.point.passes, self.x, p, _others(self.net)).z)
        return self.point.ahead(g)


class _Eager(Pass):
    """By torch, operator by operator: any network."""

    def __init__(self, net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> None:
        self.net, self.x, self.theta = net, x, _detached(net, snapshot) if theta is None else theta
        own = _own_parameters(net)
        self.leaves = own if theta is None else {name: p.detach().requires_grad_() for name, p in theta.items()}
        with noted_chance(net, x) as chance, _plain_kernels(net), _as_it_is(), torch.enable_grad():
            self.z = net(x) if theta is None else _call(net, self.leaves, x)
        self.chance = chance[0] if chance else None

    def back(self, u: Tensor, some: bool = False) -> list[Tensor]:
        names = self.names(some)
        grads = torch.autograd.grad(
            self.z, [self.leaves[name] for name in names], u, retain_graph=True, allow_unused=True
        )
        return _filled(grads, [self.theta[name] for name in names])

    def ahead(self, g: Mapping[str, Tensor]) -> Tensor:
        """In forward mode where the network allows it, else by differentiating the graph of z twice."""
        if how_of(self.net).difference:
            return _difference(self, g, self._again)
        known = _obstacles.get(self.net)
        if known:
            return self._double_backward(g, known)
        here = {name: self.theta[name] for name in g}
        rest = {name: p for name, p in self.theta.items() if name not in here}
        try:
            with torch.no_grad(), forward_rules():
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
        with repeated(self.chance, self.x.device), _plain_kernels(self.net), _as_it_is():
            return _call(self.net, theta, self.x)

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


class _InParts(Pass):
    """Part after part, keeping no activations: each is done again where it is gone through. BatchNorm sees parts."""

    def __init__(self, net: nn.Module, x: Tensor, theta: dict[str, Tensor] | None, snapshot: bool) -> None:
        self.net, self.theta = net, _detached(net, snapshot) if theta is None else theta
        if len(x) % (n := how_of(net).accumulate) or len(x) < 2 * n:
            raise UserError(f"a batch of {len(x)} cannot be cut into {n} equal parts of 2 or more; change --accumulate")
        self.parts: list[tuple[Tensor, Tensor | None]] = []
        logits = []
        for part in x.chunk(n):
            with torch.no_grad(), noted_chance(net, x) as chance, _plain_kernels(net), _as_it_is():
                logits.append(net(part) if theta is None else _call(net, self.theta, part))
            self.parts.append((part, chance[0] if chance else None))
        self.z = torch.cat(logits)

    def _again(self) -> Iterator[Pass]:
        for part, chance in self.parts:
            with repeated(chance, part.device):
                done = (_whole if chance is None else _Eager)(self.net, part, self.theta, False)
            yield done

    def back(self, u: Tensor, some: bool = False) -> list[Tensor]:
        total = [torch.zeros_like(self.theta[name]) for name in self.names(some)]
        for again, part in zip(self._again(), u.chunk(len(self.parts)), strict=True):
            torch._foreach_add_(total, again.back(part, some))
        return total

    def ahead(self, g: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([again.ahead(g) for again in self._again()])


# --- what they share --------------------------------------------------------------------------------------------------


def _trace_of(net: nn.Module, x: Tensor) -> Passes | None:
    """The traced passes of a network for such inputs; None where it cannot be traced, which is said once."""
    how, traces = how_of(net), _traces.setdefault(net, {})
    modes = tuple(module.training for module in net.modules())
    trainable = tuple(p.requires_grad for p in net.parameters())
    key = x.shape, x.stride(), x.dtype, x.device, modes, trainable, torch.is_autocast_enabled(x.device.type)
    if key not in traces:
        try:
            with _as_it_is(), _plain_kernels(net):
                with torch.no_grad(), repeated(generator_state(x.device), x.device):
                    plain = _call(net, _own_parameters(net), x)
                fuse = x.is_cuda
                passes = trace(
                    net, x, plain.shape[1], along(net), lean=how.lean, checkpointing=how.checkpointing, fuse=fuse
                )
                with repeated(generator_state(x.device), x.device):
                    z = Point(passes, x, _detached(net, False), _others(net)).z
            # fused kernels draw other random numbers
            if not (fuse and passes.draws) and (z - plain).norm() > _tolerance(z, net) * plain.norm():
                raise Untraceable("traced, it gives other logits")
            traces[key] = passes
        except Untraceable as why:
            traces[key] = None
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
    return float(torch.finfo(torch.bfloat16 if how_of(net).bf16 else z.dtype).eps ** 0.25)


def _short(error: RuntimeError) -> str:
    return str(error).partition("\n")[0][:160]


@cache
def _tell(net: str, why: str) -> None:
    """One line a process, type of network and reason."""
    _log.warning("%s has no forward-mode product (%s): exact, but slower and needs more memory", net, why)


@cache
def _tell_untraced(net: str, why: str) -> None:
    _log.warning("%s cannot be traced (%s): its passes are exact, but slower", net, why)


def _own_parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def _detached(net: nn.Module, copy: bool) -> dict[str, Tensor]:
    return {name: p.detach().clone() if copy else p.detach() for name, p in _own_parameters(net).items()}


def _others(net: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers."""
    frozen = {name: p.detach() for name, p in net.named_parameters() if not p.requires_grad}
    return {**frozen, **dict(net.named_buffers())}


def _filled(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if d is None else d for d, p in zip(grads, like, strict=True)]


def _laid_out(net: nn.Module, x: Tensor) -> Tensor:
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


@contextmanager
def _plain_kernels(net: nn.Module) -> Iterator[None]:
    """Kernels that can be differentiated twice or in forward mode, and draw the same masks in both passes."""
    with ExitStack() as flags:
        flags.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(m, nn.RNNBase) for m in net.modules()):  # for no other network: convolutions need cuDNN
            flags.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _call(net: nn.Module, theta: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The network with other parameters; its buffers (running statistics) are read from a copy and stay as they are."""
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    z: Tensor = functional_call(net, (dict(theta), buffers), (x,))
    return z
