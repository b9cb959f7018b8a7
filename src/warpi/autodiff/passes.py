"""Forward passes of a network that can be differentiated afterwards: gradients J^T u and Jacobian products J g.

`configure_passes` sets how the passes of a network run: precision, tracing, micro-batches. `forward` runs one pass and
returns an object with `vjp` (J^T u) and `jvp` (J g). This works for any network and is faster if it can be traced
(`trace.py`, `trace_parts.py`) or is a linear head, whose products are written out.

Randomness: if a pass is repeated, torch's global generator is set to its former state. The generators of python and
numpy are not. The first product of a network checks that its pass can be repeated. Some passes cannot, and some
operators have no forward-mode rule (weight norm, spectral norm). Then J g is computed by differentiating the graph of
the pass twice, which is also exact but takes more time and memory. Attention and RNNs use torch's plain kernels here,
because the fused kernels support neither.
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
from torch.func import functional_call, jvp

from warpi.autodiff.batchnorm import forward_rules
from warpi.autodiff.checked_trace import checked_trace
from warpi.autodiff.functional_call import (
    Logits,
    Tensors,
    call_with,
    detach_trainable,
    fill_missing,
    fixed_tensors,
    plain_kernels,
    trainable_parameters,
)
from warpi.autodiff.memory_format import images_to_channels_last
from warpi.autodiff.replay_rng import is_capturing, record_rng, replay_rng
from warpi.autodiff.trace import Untraceable, python_values
from warpi.autodiff.trace_parts import Passes, Point
from warpi.errors import UserError, first_line
from warpi.nets.linear import LinearHead
from warpi.utils.devices import DEVICE_ERRORS

_MAX_TRACES = 8  # batch shapes per network; tracing each takes seconds
_log = logging.getLogger("warpi.autodiff")
_jvp_obstacles: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why a network has no JVP; "": it has one
_repeatable: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # networks whose micro-batches can be repeated
_traces: WeakKeyDictionary[nn.Module, dict[Any, Passes | None]] = WeakKeyDictionary()  # None: it cannot be traced


@dataclass(frozen=True)
class PassConfig:
    """How to run the passes of a network."""

    bf16: bool = False  # run operators in bfloat16 where autocast allows it; logits are float32
    compile: bool = False  # trace the network, and fuse its kernels on a GPU
    lean: bool = False  # if traced: recompute the outputs of BatchNorm and ReLU instead of storing them
    checkpointing: bool = False  # if traced: store few activations and recompute all others
    accumulate: int = 1  # number of micro-batches per batch
    depth: int = 0  # virtual steps move only that many last children of the network; 0: all
    difference: bool = False  # compute J g as a finite difference


class ConfiguredNet(nn.Module):
    """Mixed into the class of a network by `configure_passes`, so that its calls follow `_pass_config`."""

    _pass_config: PassConfig

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        config = self._pass_config
        is_plain = bool(_plain_calls or args or kwargs)
        is_learning = self.training and torch.is_grad_enabled() and not x.requires_grad
        if is_learning and not is_plain and (config.compile or config.accumulate > 1):
            return forward(self, x).z
        if not config.bf16:
            return super().forward(x, *args, **kwargs)
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            z = super().forward(x, *args, **kwargs)
        return z.float() if isinstance(z, Tensor) else z

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle only knows the original class
        return _rebuild, (type(self).__mro__[2], self._pass_config), self.__dict__


def configure_passes(net: nn.Module, config: PassConfig) -> nn.Module:
    """Make all later calls of the network follow the configuration. Weights, names and children do not change."""
    if config != PassConfig():
        net.__class__ = _configured_class(type(net))  # type: ignore[arg-type]
        net._pass_config = config  # type: ignore[assignment]
    return net


@cache
def _configured_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (ConfiguredNet, cls), {"__module__": cls.__module__})


def restore_class(net: nn.Module) -> nn.Module:
    """Undo `configure_passes`."""
    if isinstance(net, ConfiguredNet):
        net.__class__ = type(net).__mro__[2]
        del net._pass_config
    return net


def _rebuild(cls: type[nn.Module], config: PassConfig) -> nn.Module:
    return configure_passes(cls.__new__(cls), config)


def pass_config(net: nn.Module) -> PassConfig:
    return net._pass_config if isinstance(net, ConfiguredNet) else PassConfig()


def moved_names(net: nn.Module) -> list[str]:
    """Names of the parameters that a virtual step moves."""
    names = list(trainable_parameters(net))
    depth = pass_config(net).depth
    if not depth:
        return names
    children = [name for name, child in net.named_children() if any(True for _ in child.parameters())]
    last = tuple(f"{name}." for name in children[-depth:])
    moved = [name for name in names if name.startswith(last)]
    if not moved:
        raise UserError(f"the last {depth} children of {type(net).__name__} have no weights; use --meta-depth 0")
    return moved


class Pass(ABC):
    """A forward pass at theta with repeatable vector-Jacobian and Jacobian-vector products."""

    net: nn.Module
    theta: Tensors  # trainable parameters of this pass
    z: Tensor  # [B, K] logits

    @abstractmethod
    def vjp(self, u: Tensor, moved_only: bool = False) -> list[Tensor]:
        """J^T u, one tensor per parameter: for all parameters, or only for those that a virtual step moves."""

    @abstractmethod
    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        """J g for a direction g of the parameters that a virtual step moves.  [B, K]"""

    def names(self, moved_only: bool) -> list[str]:
        return moved_names(self.net) if moved_only else list(self.theta)


class Forward(NamedTuple):
    """The real pass of a step: loss(z).backward() gives the parameters of the network their gradients."""

    z: Tensor
    done: Pass


def forward(net: nn.Module, x: Tensor, *, snapshot: bool = False, backward: bool = True) -> Forward:
    """Run the one pass of a step that updates running statistics.

    Use `snapshot` if the parameters will be changed in place before `jvp` is called. Without `backward`, the caller
    computes gradients by `vjp` only.
    """
    done = _run_pass(net, images_to_channels_last(net, x), None, snapshot)
    if done.z.requires_grad or not backward:
        return Forward(done.z, done)
    parameters = trainable_parameters(net).values()
    return Forward(Logits.apply(done.vjp, done.z, *parameters), done)  # type: ignore[no-untyped-call]


def forward_at(net: nn.Module, theta: Mapping[str, Tensor], x: Tensor) -> Pass:
    """Run a pass with other parameters. The network and its running statistics do not change."""
    return _run_pass(net, images_to_channels_last(net, x), {name: p.detach() for name, p in theta.items()}, False)


def _run_pass(net: nn.Module, x: Tensor, theta: Tensors | None, snapshot: bool) -> Pass:
    if pass_config(net).accumulate > 1:
        return _MicroBatches(net, x, theta, snapshot)
    return _run_whole(net, x, theta, snapshot)


def _run_whole(net: nn.Module, x: Tensor, theta: Tensors | None, snapshot: bool) -> Pass:
    config = pass_config(net)
    if isinstance(net, LinearHead) and not (config.bf16 or config.difference):
        return _Linear(net, x, theta, snapshot)
    passes = _find_trace(net, x) if config.compile else None
    if passes is not None:
        return _Traced(net, x, theta, snapshot, passes)
    return _Eager(net, x, theta, snapshot)


class _Linear(Pass):
    """A pass of a linear head, z = x W^T + b: a matrix product for z, one for J^T u and one for J g."""

    def __init__(self, net: nn.Module, x: Tensor, theta: Tensors | None, snapshot: bool) -> None:
        self.net = net
        self.x = x.flatten(1)  # [B, D]
        self.theta = detach_trainable(net, copy=snapshot) if theta is None else theta
        self.z = self.jvp(self.theta)

    def names(self, moved_only: bool) -> list[str]:  # noqa: ARG002 (all parameters move)
        return list(self.theta)

    def vjp(self, u: Tensor, moved_only: bool = False) -> list[Tensor]:  # noqa: ARG002
        return [u.T @ self.x, u.sum(0)]

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        return (g["fc.weight"] @ self.x.T).T.contiguous() + g["fc.bias"]  # on a CPU twice as fast as x @ W^T


class _Traced(Pass):
    """A pass that runs the graphs of a trace."""

    def __init__(self, net: nn.Module, x: Tensor, theta: Tensors | None, snapshot: bool, passes: Passes) -> None:
        self.net = net
        self.x = x
        self.theta = detach_trainable(net, copy=snapshot) if theta is None else theta
        self.point = Point(passes, x, self.theta, fixed_tensors(net))
        self.z = self.point.z
        if theta is None:
            with torch.no_grad():
                for name, buffer in net.named_buffers():
                    buffer.copy_(self.point.fixed[name])

    def vjp(self, u: Tensor, moved_only: bool = False) -> list[Tensor]:
        return fill_missing(self.point.vjp(u, moved_only), [self.theta[name] for name in self.names(moved_only)])

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        if pass_config(self.net).difference and not self.point.passes.draws:  # random masks would differ
            return _difference(self, g, lambda p: Point(self.point.passes, self.x, p, fixed_tensors(self.net)).z)
        return self.point.jvp(g)


class _Eager(Pass):
    """A pass that torch runs operator by operator. Works for any network."""

    def __init__(self, net: nn.Module, x: Tensor, theta: Tensors | None, snapshot: bool) -> None:
        self.net = net
        self.x = x
        self.theta = detach_trainable(net, copy=snapshot) if theta is None else theta
        if snapshot or theta is not None:  # not the parameters themselves, which may change in place
            self.leaves = {n: p.requires_grad_() for n, p in self.theta.items()}
        else:
            self.leaves = trainable_parameters(net)
        with record_rng(net, x) as recorded, plain_kernels(net), _plain_call(), torch.enable_grad():
            if theta is not None:
                self.z = call_with(net, self.leaves, x)
            else:
                self.z = functional_call(net, self.leaves, (x,)) if snapshot else net(x)
        self.rng_state = recorded[0] if recorded else None

    def vjp(self, u: Tensor, moved_only: bool = False) -> list[Tensor]:
        names = self.names(moved_only)
        leaves = [self.leaves[name] for name in names]
        grads = torch.autograd.grad(self.z, leaves, u, retain_graph=True, allow_unused=True)
        return fill_missing(grads, [self.theta[name] for name in names])

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        """Use forward mode if the network allows it, else differentiate the graph of z twice."""
        if pass_config(self.net).difference:
            return _difference(self, g, self._repeat)
        obstacle = _jvp_obstacles.get(self.net)
        if obstacle:
            return self._double_backward(g, obstacle)
        theta = {name: p.detach() for name, p in self.theta.items()}
        moved = {name: theta[name] for name in g}
        rest = {name: p for name, p in theta.items() if name not in moved}
        why = ""
        try:
            with torch.no_grad(), forward_rules(least=2**16):
                z, jg = jvp(lambda p: self._repeat({**rest, **p}), (moved,), (dict(g),))[:2]
        except DEVICE_ERRORS:
            raise
        except RuntimeError as error:  # includes NotImplementedError
            why = first_line(error)
        else:
            # Compare only once, because this waits for the device. NaN passes: the engine detects divergence.
            if obstacle is None and (z - self.z).norm() > _tolerance(z, self.net) * self.z.norm():
                why = "a repeated pass gives different logits: it draws masks in another order, or not from torch"
        if why:
            jg = self._double_backward(g, why)
            name = type(self.net).__name__
            _warn_once(f"{name} has no forward-mode product ({why}): exact, but slower and needs more memory")
        _jvp_obstacles[self.net] = why
        product: Tensor = jg
        return product

    def _repeat(self, theta: Tensors) -> Tensor:
        with replay_rng(self.rng_state, self.x.device), plain_kernels(self.net), _plain_call():
            return call_with(self.net, theta, self.x)

    def _double_backward(self, g: Mapping[str, Tensor], why: str) -> Tensor:
        """h(w) = J^T w is linear, so d<h, g>/dw = J g at any w. <h, g> = <w, J g> unless an operator is detached."""
        z = self.z
        w = torch.arange(z.numel(), device=z.device).cos().view_as(z).to(z).requires_grad_()
        try:
            with torch.enable_grad():
                h = torch.autograd.grad(z, [self.leaves[name] for name in g], w, create_graph=True, allow_unused=True)
                hg = torch.cat([(a * b).flatten() for a, b in zip(h, g.values(), strict=True) if a is not None])
                (jg,) = torch.autograd.grad(hg.sum(), w)
            if not is_capturing(z.device):  # this check waits for the device
                gap = (hg.sum() - (w * jg).sum()).abs()
                if gap > _tolerance(w, self.net) * (hg.norm() + hg.sum().abs()):
                    raise RuntimeError("a backward pass that cannot be differentiated")
        except DEVICE_ERRORS:
            raise
        except RuntimeError as error:
            raise UserError(
                f"{type(self.net).__name__} has an operator that can be differentiated neither in forward mode ({why}) "
                f"nor twice ({first_line(error)}); meta methods need one of the two: replace that layer, or choose a "
                "method without a meta gradient, such as ce"
            ) from error
        return jg


def cut_batch(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """The n micro-batches of a batch."""
    if n > 1 and len(x) < 2 * n:
        raise UserError(f"a batch of {len(x)} cannot be cut into {n} parts of 2 or more; lower --accumulate")
    return x.tensor_split(n)


class _MicroBatches(Pass):
    """Runs micro-batches one by one without storing activations; products repeat each. BatchNorm sees micro-batches."""

    def __init__(self, net: nn.Module, x: Tensor, theta: Tensors | None, snapshot: bool) -> None:
        self.net = net
        self.theta = detach_trainable(net, copy=snapshot) if theta is None else theta
        self.parts: list[tuple[Tensor, Tensor | None]] = []  # inputs, and the random state if the network draws
        self.logits: list[Tensor] = []
        for part in cut_batch(x, pass_config(net).accumulate):
            with torch.no_grad(), record_rng(net, x) as recorded, plain_kernels(net), _plain_call():
                self.logits.append(net(part) if theta is None else call_with(net, self.theta, part))
            self.parts.append((part, recorded[0] if recorded else None))
        self.z = torch.cat(self.logits)

    def _repeat(self) -> Iterator[Pass]:
        for (part, rng_state), logits in zip(self.parts, self.logits, strict=True):
            with replay_rng(rng_state, part.device):
                done = (_run_whole if rng_state is None else _Eager)(self.net, part, self.theta, False)
            # Compare only once, because this waits for the device.
            is_known = _repeatable.get(self.net)
            if not is_known and (done.z - logits).norm() > _tolerance(logits, self.net) * logits.norm():
                raise UserError(
                    f"a batch cannot pass through {type(self.net).__name__} in parts: repeated, a part gives other "
                    "logits (it reads values it changes, or draws random numbers not from torch); use --accumulate 1"
                )
            yield done
        _repeatable[self.net] = True

    def vjp(self, u: Tensor, moved_only: bool = False) -> list[Tensor]:
        total = [torch.zeros_like(self.theta[name]) for name in self.names(moved_only)]
        for done, part in zip(self._repeat(), torch.split(u, [len(p) for p, _ in self.parts]), strict=True):
            torch._foreach_add_(total, done.vjp(part, moved_only))
        return total

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([done.jvp(g) for done in self._repeat()])


def _find_trace(net: nn.Module, x: Tensor) -> Passes | None:
    """The traced passes of a network for inputs like x, or None if it cannot be traced, which is logged once."""
    config = pass_config(net)
    traces = _traces.setdefault(net, {})
    modes = tuple(module.training for module in net.modules())
    trainable = tuple(p.requires_grad for p in net.parameters())
    autocast = torch.is_autocast_enabled(x.device.type)
    key = x.shape, x.stride(), x.dtype, x.device, modes, trainable, autocast, python_values(net)
    if key not in traces:
        traces[key] = None
        try:
            if len(traces) > _MAX_TRACES:
                raise Untraceable("its batches come in too many shapes, or its numbers change too often")
            with _plain_call(), plain_kernels(net):
                traces[key] = checked_trace(
                    net, x, moved_names(net), config.lean, config.checkpointing, _tolerance(x, net), (config, key)
                )
        except Untraceable as why:
            _warn_once(f"{type(net).__name__} cannot be traced ({why}): its passes are exact, but slower")
    return traces[key]


def _difference(done: Pass, g: Mapping[str, Tensor], logits: Callable[[Tensors], Tensor]) -> Tensor:
    """J g = (F(theta + e g) - F(theta)) / e, with e such that the parameters move by 0.01 in total."""
    length = torch.stack(torch._foreach_norm(list(g.values()))).norm()
    e = 0.01 / length.clamp_min(1e-12)
    with torch.no_grad():
        moved = {name: done.theta[name] + e * d for name, d in g.items()}
        jg: Tensor = (logits({**done.theta, **moved}) - done.z) / e
        return jg


def _tolerance(z: Tensor, net: nn.Module) -> float:
    """A relative difference far above rounding errors and far below the effect of another random mask."""
    return float(torch.finfo(torch.bfloat16 if pass_config(net).bf16 else z.dtype).eps ** 0.25)


@cache
def _warn_once(text: str) -> None:
    """Log once per process."""
    _log.warning("%s", text)


_plain_calls: list[None] = []  # if not empty, a call of a configured network is one plain pass


@contextmanager
def _plain_call() -> Iterator[None]:
    _plain_calls.append(None)
    try:
        yield
    finally:
        _plain_calls.pop()
