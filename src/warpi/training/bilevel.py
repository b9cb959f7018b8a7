"""The exact one-step meta gradient, without differentiating anything twice through the network.

A meta-learner phi shapes the loss L(z; phi) on the logits z = F(x; theta) of a noisy batch, and is judged by how the
classifier does on trusted examples after one step:

    theta_hat(phi) = theta - alpha J^T u(phi)        u = dL/dz, J = dz/dtheta                       the virtual step
    g              = d L_meta(theta_hat) / d theta_hat                                an ordinary gradient, clean batch
    dL_meta/dphi   = -alpha d/dphi <u(phi), J g>     J g held fixed

J g is one forward-mode product (a JVP) of the noisy batch. phi enters through u only, so this is the whole gradient,
not an approximation; it holds with BatchNorm in train mode, and with dropout. Only the [B, K] logits are differentiated
twice. Memory stays near that of ordinary training, and J^T u, g and the gradient of phi are ordinary gradients, which
data-parallel ranks average. The real step can go back through the same pass a second time.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from warpi.autodiff.passes import Forward, Pass, forward, forward_at, moved_names
from warpi.data.batch import Batch
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.utils import distributed

LogitLoss = Callable[[Tensor], Tensor]
"""Logits [B, K] to a scalar loss; where it depends on meta-parameters, their input is detached from the logits."""


def bilevel_step(
    method: Method,
    batch: Batch,
    loss: LogitLoss,
    meta_loss: Callable[[Tensor, Tensor], Tensor],
    phi: Iterable[Tensor],
    meta_optimizer: torch.optim.Optimizer,
    alpha: float | Tensor | None = None,
    *,
    trusted: Batch | None = None,
    own_loss: Callable[[], Tensor] | None = None,
) -> Log:
    """One step of a meta method: phi down its meta gradient, then theta down the loss that the new phi shapes.

    `loss` maps the logits of the noisy batch to a loss, `meta_loss` logits and labels of the trusted one, which is
    `trusted` or the next of the loader. What phi should minimise besides is its `own_loss`. The recipe may ask for a
    meta step now and then only, or for the real step in the place of the virtual one.
    """
    _check_trusted(method)
    phi, real_first = [p for p in phi if p.requires_grad], method.recipe.meta_order == "real"  # layers may be frozen
    alpha = method.lr if alpha is None or real_first else alpha
    noisy = forward(method.net, batch.x, snapshot=real_first and method.is_meta_step)
    if not method.is_meta_step:
        value = loss(noisy.z)
        descend(value, method.optimizer)
        return {"loss": value.detach()}
    meta = method.meta_loader.draw() if trusted is None else trusted
    method.optimizer.zero_grad()  # memory of the last step

    def judge(z: Tensor) -> Tensor:
        return meta_loss(z, meta.y)

    meta_optimizer.zero_grad()
    if own_loss is not None:
        _add_gradient(phi, own_loss())
    if real_first:
        z = noisy.z.detach().requires_grad_()
        value = loss(z)
        (u,) = torch.autograd.grad(value, z, create_graph=True)  # [B, K], a function of phi
        step_along(method, noisy.done.vjp(u.detach()))
        judged, g = _gradient_at(noisy.done, dict(method.net.named_parameters()), meta.x, judge)
        _add_gradient(phi, u, -alpha * noisy.done.jvp(g))
        meta_optimizer.step()
        return {"loss": value.detach(), "meta_loss": judged}
    judged = meta_gradient(noisy, loss, meta.x, judge, phi, alpha)
    meta_optimizer.step()
    value = loss(noisy.z)
    descend(value, method.optimizer)
    return {"loss": value.detach(), "meta_loss": judged}


def _check_trusted(method: Method) -> None:
    """A method that does not say it would be listed among those that need no trusted data."""
    if not method.needs_meta:
        name = type(method).__name__
        raise UserError(
            f"{name} takes a meta step and does not say so; give the class `needs_meta = True` (a ClassVar)"
        )


def batch_gradient(
    method: Method, noisy: Forward, loss: LogitLoss, phi: Tensor, alpha: float | Tensor, *, shared: bool
) -> tuple[Tensor, Tensor]:
    """d L_meta / d phi and L_meta for a phi that is made anew for every batch.

    It belongs to the examples of the batch, of which every rank has its own, or is `shared` by all of them.
    """
    _check_trusted(method)
    if method.recipe.meta_every > 1 or method.recipe.meta_order == "real":
        raise UserError(
            f"{type(method).__name__} learns its weights anew for every batch, before its step; "
            "leave --meta-every 1 and --meta-order virtual"
        )
    meta = method.meta_loader.draw()
    method.optimizer.zero_grad()  # memory of the last step

    def judge(z: Tensor) -> Tensor:
        return cross_entropy(z, meta.y).mean()

    judged = meta_gradient(noisy, loss, meta.x, judge, [phi], alpha, shared=shared)
    assert phi.grad is not None
    return phi.grad, judged


def meta_gradient(
    noisy: Forward,
    loss: LogitLoss,
    x_meta: Tensor,
    meta_loss: LogitLoss,
    phi: Sequence[Tensor],
    lr: float | Tensor,
    *,
    shared: bool = True,
) -> Tensor:
    """Add d L_meta(theta_hat(phi)) / d phi to the .grad of every tensor of phi; return L_meta(theta_hat).

    Ranks have a phi in common, of whose gradients they take the mean, unless it is not `shared`.
    """
    done = noisy.done
    z = noisy.z.detach().requires_grad_()
    (u,) = torch.autograd.grad(loss(z), z, create_graph=True)  # [B, K], a function of phi

    step = done.vjp(u.detach(), moved_only=True)
    distributed.average(step)
    names = moved_names(done.net)
    moved = torch._foreach_sub([done.theta[name] for name in names], torch._foreach_mul(step, lr))
    theta_hat = {**done.theta, **dict(zip(names, moved, strict=True))}
    del step, moved  # memory is short now: the activations of two batches are held

    at_hat, g = _gradient_at(done, theta_hat, x_meta, meta_loss)
    _add_gradient(phi, u, -lr * done.jvp(g), shared=shared)
    return at_hat


def _gradient_at(done: Pass, theta: dict[str, Tensor], x: Tensor, loss: LogitLoss) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss at theta, and its gradient with respect to what the virtual step moves."""
    there = forward_at(done.net, {name: theta[name] for name in done.theta}, x)
    z = there.z.detach().requires_grad_()
    value = loss(z)
    (u,) = torch.autograd.grad(value, z)
    g = there.vjp(u, moved_only=True)
    distributed.average(g)
    return value.detach(), dict(zip(moved_names(done.net), g, strict=True))


def _add_gradient(phi: Sequence[Tensor], u: Tensor, weight: Tensor | None = None, *, shared: bool = True) -> None:
    """Add d<u(phi), weight>/dphi to .grad."""
    grads = list(torch.autograd.grad(u, phi, weight, allow_unused=True))
    if shared:
        distributed.average([d for d in grads if d is not None])
    for p, d in zip(phi, grads, strict=True):
        if d is not None:
            p.grad = d if p.grad is None else p.grad + d


def step_along(method: Method, grads: Sequence[Tensor]) -> None:
    """The real step along a gradient that is known already."""
    distributed.average(grads)
    method.optimizer.zero_grad()
    for p, d in zip((p for p in method.net.parameters() if p.requires_grad), grads, strict=True):
        p.grad = d
    method.optimizer.step()
