"""The exact one-step meta gradient, without differentiating anything twice through the network.

A meta-learner phi shapes the loss L(z; phi) on the logits z = F(x; theta) of a noisy batch, and is judged by how the
classifier does on trusted examples after one step:

    theta_hat(phi) = theta - alpha J^T u(phi)        u = dL/dz, J = dz/dtheta                       the virtual step
    g              = d L_meta(theta_hat) / d theta_hat                                an ordinary gradient, clean batch
    dL_meta/dphi   = -alpha d/dphi <u(phi), J g>     J g held fixed

J g is one forward-mode product (a JVP) of the noisy batch. phi enters through u only, so this is the whole gradient,
not an approximation; it holds with BatchNorm in train mode, and with dropout, whose masks are drawn again as they
were. Only the [B, K] logits are differentiated twice. Memory stays that of ordinary training, and every quantity is an
ordinary gradient. The graph of z stays alive, so that the real step can go back through it a second time.

Chance: torch's own generator of the batch's device is replayed; python's and numpy's are not. A network's first step
checks that its pass could be repeated. Where it could not, or where an operator has no forward-mode rule (weight norm,
spectral norm), J g comes from the graph of the real pass, differentiated twice: exact too, with more time and memory.
Attention and RNNs run on torch's plain kernels here, since the fused ones have neither derivative.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from warpi.errors import UserError

LogitLoss = Callable[[Tensor], Tensor]
"""Logits [B, K] to a scalar loss; where it depends on meta-parameters, their input is detached from the logits."""

_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # RuntimeErrors that are not the network's
_log = logging.getLogger(__name__)
_obstacles: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why a network has no JVP; "": it has one


class Forward(NamedTuple):
    """A forward pass that can be gone back through, and repeated exactly."""

    net: nn.Module
    x: Tensor
    z: Tensor  # [B, K] logits with their graph
    chance: Tensor | None  # state of the global generator before the pass, where the network draws from it


def forward(net: nn.Module, x: Tensor) -> Forward:
    """The one pass of a step that updates running statistics."""
    before = _generator_state(x.device)
    with _plain_kernels(net):
        z = net(x)
    drew = not torch.equal(before, _generator_state(x.device))  # not by looking for modules: F.dropout is none
    return Forward(net, x, z, before if drew else None)


def meta_gradient(
    noisy: Forward, loss: LogitLoss, x_meta: Tensor, meta_loss: LogitLoss, phi: Sequence[Tensor], lr: float | Tensor
) -> Tensor:
    """Add d L_meta(theta_hat(phi)) / d phi to the .grad of every tensor of phi; return L_meta(theta_hat)."""
    theta = {name: p for name, p in noisy.net.named_parameters() if p.requires_grad}

    z = noisy.z.detach().requires_grad_()
    (u,) = torch.autograd.grad(loss(z), z, create_graph=True)  # [B, K], a function of phi

    step = torch.autograd.grad(noisy.z, list(theta.values()), u.detach(), retain_graph=True, allow_unused=True)
    theta_hat = {
        name: (p.detach() if s is None else p.detach() - lr * s).requires_grad_()
        for (name, p), s in zip(theta.items(), step, strict=True)
    }
    at_hat = meta_loss(_call(noisy.net, theta_hat, x_meta))
    g = torch.autograd.grad(at_hat, list(theta_hat.values()), allow_unused=True)

    along = {n: torch.zeros_like(p) if d is None else d for (n, p), d in zip(theta.items(), g, strict=True)}
    jg = _jacobian_product(noisy, theta, along)  # [B, K]
    for p, d in zip(phi, torch.autograd.grad(u, phi, -lr * jg, allow_unused=True), strict=True):
        if d is not None:
            p.grad = d if p.grad is None else p.grad + d
    return at_hat.detach()


def _jacobian_product(noisy: Forward, theta: Mapping[str, Tensor], along: dict[str, Tensor]) -> Tensor:
    """J g: in forward mode where the network allows it, else by differentiating the graph of z twice."""
    known = _obstacles.get(noisy.net)
    if known:
        return _double_backward(noisy, theta, along, known)
    here = {name: p.detach() for name, p in theta.items()}
    try:
        with _repeat(noisy.chance, noisy.x.device), _plain_kernels(noisy.net), torch.no_grad():
            z, jg = jvp(lambda p: _call(noisy.net, p, noisy.x), (here,), (along,))[:2]
    except _DEVICE_ERRORS:
        raise
    except RuntimeError as error:  # NotImplementedError is one
        why = _short(error)
    else:
        # Once, since this waits for the device. Not-a-number passes: divergence is not for here to find.
        other = known is None and (z - noisy.z).norm() > _tolerance(z) * noisy.z.norm()
        why = "repeated, its pass gives other logits: chance not torch's, or masks in another order" if other else ""
    if why:
        jg = _double_backward(noisy, theta, along, why)
        _tell(type(noisy.net).__name__, why)
    _obstacles[noisy.net] = why
    result: Tensor = jg
    return result


def _double_backward(noisy: Forward, theta: Mapping[str, Tensor], along: dict[str, Tensor], why: str) -> Tensor:
    """h(w) = J^T w is linear, so that d<h, g>/dw = J g at any w, and <h, g> = <w, J g> unless an operator cut h off."""
    w = torch.arange(noisy.z.numel(), device=noisy.z.device).cos().view_as(noisy.z).to(noisy.z).requires_grad_()
    try:
        h = torch.autograd.grad(noisy.z, list(theta.values()), w, create_graph=True, allow_unused=True)
        hg = torch.cat([(a * b).flatten() for a, b in zip(h, along.values(), strict=True) if a is not None])
        (jg,) = torch.autograd.grad(hg.sum(), w)
        gap, size = (hg.sum() - (w * jg).sum()).abs(), hg.norm() + hg.sum().abs()
        if gap > _tolerance(w) * size:
            raise RuntimeError("a backward pass that cannot be differentiated")
    except _DEVICE_ERRORS:
        raise
    except RuntimeError as error:
        raise UserError(
            f"{type(noisy.net).__name__} has an operator that can be differentiated neither in forward mode ({why}) "
            f"nor twice ({_short(error)}); meta methods need one of the two: replace that layer, or take a method "
            "without a meta gradient, such as ce"
        ) from error
    return jg


def _tolerance(z: Tensor) -> float:
    """Far above rounding, far below another mask."""
    return float(torch.finfo(z.dtype).eps ** 0.25)


def _short(error: RuntimeError) -> str:
    return str(error).partition("\n")[0][:160]


@cache
def _tell(net: str, why: str) -> None:
    """One line a process, type of network and reason."""
    _log.warning("%s has no forward-mode product (%s): exact, but slower and needs more memory", net, why)


@contextmanager
def _plain_kernels(net: nn.Module) -> Iterator[None]:
    """Kernels that can be differentiated twice or in forward mode, and draw the same masks in both passes."""
    with ExitStack() as flags:
        flags.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(m, nn.RNNBase) for m in net.modules()):  # for no other network: convolutions need cuDNN
            flags.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _call(net: nn.Module, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network with other parameters; its buffers (running statistics) are read from a copy and stay as they are."""
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    z: Tensor = functional_call(net, (theta, buffers), (x,))
    return z


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _repeat(chance: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw inside what was drawn from `chance` on, and leave the global generator as it was."""
    if chance is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        if device.type == "cuda":
            torch.cuda.set_rng_state(chance, device)
        else:
            torch.set_rng_state(chance)
        yield
