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
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

LogitLoss = Callable[[Tensor], Tensor]
"""Logits [B, K] to a scalar loss; where it depends on meta-parameters, their input is detached from the logits."""


class Forward(NamedTuple):
    """A forward pass that can be gone back through, and repeated exactly."""

    net: nn.Module
    x: Tensor
    z: Tensor  # [B, K] logits with their graph
    chance: Tensor | None  # state of the global generator before the pass, where the network draws from it


def forward(net: nn.Module, x: Tensor) -> Forward:
    """The one pass of a step that updates running statistics."""
    before = _generator_state(x.device)
    z = net(x)
    drew = not torch.equal(before, _generator_state(x.device))  # by whatever means: F.dropout is no module
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

    here = {name: p.detach() for name, p in theta.items()}
    along = {n: torch.zeros_like(p) if d is None else d for (n, p), d in zip(here.items(), g, strict=True)}
    with _repeat(noisy.chance, noisy.x.device), torch.no_grad():
        jg: Tensor = jvp(lambda p: _call(noisy.net, p, noisy.x), (here,), (along,))[1]  # [B, K]

    for p, d in zip(phi, torch.autograd.grad(u, phi, -lr * jg, allow_unused=True), strict=True):
        if d is not None:
            p.grad = d if p.grad is None else p.grad + d
    return at_hat.detach()


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
