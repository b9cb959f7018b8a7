"""The exact one-step meta gradient, without differentiating through the network twice.

Meta-parameters phi shape the loss L(z; phi) on the logits z = F(x; theta) of a noisy batch. The meta loss is the loss
of the classifier on trusted examples after one step:

    theta_hat(phi) = theta - alpha J^T u(phi)        u = dL/dz, J = dz/dtheta                       the virtual step
    g              = d L_meta(theta_hat) / d theta_hat                                an ordinary gradient, clean batch
    dL_meta/dphi   = -alpha d/dphi <u(phi), J g>     J g held fixed

J g is one Jacobian-vector product (forward mode) of the noisy batch. phi enters through u only, so this is the exact
gradient, also with BatchNorm in training mode and with dropout. Only the [B, K] logits are differentiated twice. The
memory is close to that of ordinary training. J^T u, g and the gradient of phi are ordinary gradients, which
data-parallel ranks average. The real step reuses the same forward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpi.autodiff.passes import Forward, Pass, forward, forward_at
from warpi.data.batch import Batch
from warpi.errors import UserError
from warpi.functional.losses import mean_cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.utils import distributed

LogitLoss = Callable[[Tensor], Tensor]
"""Maps logits [B, K] to a scalar loss. A meta-network inside must get detached logits as input."""


@dataclass(frozen=True)
class WithGradient:
    """A loss whose gradient at the logits is written out. This is faster than differentiating the loss twice.

    `compute` maps logits z [B, K], which need no gradient, to the loss and to its gradient u [B, K], a function of phi.
    If it is a loss on trusted examples, its second argument is their labels.
    """

    compute: Callable[..., tuple[Tensor, Tensor]]


def bilevel_step(
    method: Method,
    batch: Batch,
    loss: LogitLoss | WithGradient,
    meta_loss: Callable[[Tensor, Tensor], Tensor] | WithGradient,
    phi: Iterable[Tensor],
    meta_optimizer: torch.optim.Optimizer,
    alpha: float | Tensor | None = None,
    *,
    trusted: Batch | None = None,
    own_loss: Callable[[], Tensor] | None = None,
    trusted_weight: float = 0.0,
) -> Log:
    """One step of a meta method: update phi along its meta gradient, then theta along the gradient of the new loss.

    `loss` maps the logits of the noisy batch to a loss. `meta_loss` maps logits and labels of the trusted batch to a
    loss; this batch is `trusted` or the next one of the loader. `own_loss` is an additional loss of phi. `alpha` is the
    learning rate of the virtual step, by default that of the classifier. The real step also descends `meta_loss` with
    the factor `trusted_weight`. Depending on the recipe, some steps have no meta step, or the real step also serves as
    the virtual step.
    """
    _check_trusted(method)
    phi = [p for p in phi if p.requires_grad]  # layers may be frozen
    real_first = method.recipe.meta_order == "real"
    alpha = method.lr if alpha is None or real_first else alpha
    uses_vjp = isinstance(loss, WithGradient) or bool(trusted_weight)  # for the real step
    noisy = forward(method.net, batch.x, snapshot=real_first and method.is_meta_step, backward=not uses_vjp)
    uses_trusted = method.is_meta_step or trusted_weight
    meta = method.meta_loader.draw() if trusted is None and uses_trusted else trusted
    for p in (*method.net.parameters(), *phi):
        p.grad = None  # also frees the memory of the gradients of the last step

    loss_on_trusted = _with_labels(meta_loss, meta)

    def take_real_step(value: Tensor, u: Tensor) -> Tensor:
        grads = noisy.done.vjp(u.detach())
        if trusted_weight:
            assert meta is not None
            torch._foreach_add_(grads, _trusted_gradient(noisy.done, meta.x, loss_on_trusted), alpha=trusted_weight)
        step_along(method, grads)
        return value.detach()

    def descend_new_loss() -> Tensor:
        if not (isinstance(loss, WithGradient) or uses_vjp):
            return descend(loss(noisy.z), method.optimizer)
        with torch.set_grad_enabled(not isinstance(loss, WithGradient)):
            value_and_gradient = _differentiate(loss, noisy.z)
        return take_real_step(*value_and_gradient)

    if not method.is_meta_step:
        return {"loss": descend_new_loss()}
    assert meta is not None
    if own_loss is not None:
        _add_gradient(phi, own_loss())
    if real_first:
        value, u = _differentiate(loss, noisy.z)
        take_real_step(value, u)
        meta_value, g = _gradient_at(noisy.done, dict(method.net.named_parameters()), meta.x, loss_on_trusted)
        _add_gradient(phi, u, -alpha * noisy.done.jvp(g))
        meta_optimizer.step()
        return {"loss": value.detach(), "meta_loss": meta_value}
    meta_value = meta_gradient(noisy, loss, meta.x, loss_on_trusted, phi, alpha)
    meta_optimizer.step()
    return {"loss": descend_new_loss(), "meta_loss": meta_value}


def _with_labels(
    loss: Callable[[Tensor, Tensor], Tensor] | WithGradient, batch: Batch | None
) -> LogitLoss | WithGradient:
    """A loss of logits and labels as a loss of the logits of a batch."""
    compute: Callable[..., Any] = loss.compute if isinstance(loss, WithGradient) else loss

    def with_labels(z: Tensor) -> Any:
        assert batch is not None
        return compute(z, batch.y)

    return WithGradient(with_labels) if isinstance(loss, WithGradient) else with_labels


def _trusted_gradient(done: Pass, x: Tensor, loss: LogitLoss | WithGradient) -> list[Tensor]:
    """The gradient of the loss on trusted inputs at theta. Running statistics do not change."""
    at_theta = forward_at(done.net, done.theta, x)
    _, u = _differentiate(loss, at_theta.z)
    return at_theta.vjp(u.detach())


def _differentiate(loss: LogitLoss | WithGradient, z: Tensor) -> tuple[Tensor, Tensor]:
    """A loss and its gradient u [B, K] at the logits, a function of phi."""
    if isinstance(loss, WithGradient):
        return loss.compute(z.detach())
    z = z.detach().requires_grad_()
    value = loss(z)
    (u,) = torch.autograd.grad(value, z, create_graph=True)
    return value, u


def _check_trusted(method: Method) -> None:
    """Raise if the class does not declare that it needs trusted data, because lists of methods would be wrong."""
    if not method.needs_meta:
        name = type(method).__name__
        raise UserError(f"{name} takes a meta step but does not declare it; add `needs_meta = True` (a ClassVar) to it")


def batch_gradient(
    method: Method, noisy: Forward, loss: LogitLoss, phi: Tensor, alpha: float | Tensor, *, shared: bool
) -> tuple[Tensor, Tensor]:
    """d L_meta / d phi and L_meta for a phi that is created for each batch.

    phi is either `shared` by all ranks or belongs to the examples of this rank.
    """
    _check_trusted(method)
    if method.recipe.meta_every > 1 or method.recipe.meta_order == "real":
        raise UserError(
            f"{type(method).__name__} learns weights for every batch first; use --meta-every 1 and --meta-order virtual"
        )
    meta = method.meta_loader.draw()
    method.optimizer.zero_grad()  # free the gradients of the last step
    value = meta_gradient(noisy, loss, meta.x, lambda z: mean_cross_entropy(z, meta.y), [phi], alpha, shared=shared)
    assert phi.grad is not None
    return phi.grad, value


def meta_gradient(
    noisy: Forward,
    loss: LogitLoss | WithGradient,
    x_meta: Tensor,
    meta_loss: LogitLoss | WithGradient,
    phi: Sequence[Tensor],
    lr: float | Tensor,
    *,
    shared: bool = True,
) -> Tensor:
    """Add d L_meta(theta_hat(phi)) / d phi to the .grad of every tensor in phi; return L_meta(theta_hat).

    If phi is `shared`, its gradients are averaged over the ranks.
    """
    done = noisy.done
    _, u = _differentiate(loss, noisy.z)  # [B, K]
    step = done.vjp(u.detach(), moved_only=True)
    distributed.average(step)
    names = done.names(moved_only=True)
    moved = torch._foreach_sub([done.theta[name] for name in names], torch._foreach_mul(step, lr))
    theta_hat = {**done.theta, **dict(zip(names, moved, strict=True))}
    del step, moved  # memory peaks now: the activations of two batches are stored

    at_hat, g = _gradient_at(done, theta_hat, x_meta, meta_loss)
    _add_gradient(phi, u, -lr * done.jvp(g), shared=shared)
    return at_hat


def _gradient_at(
    done: Pass, theta: dict[str, Tensor], x: Tensor, loss: LogitLoss | WithGradient
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss at theta, and its gradient with respect to the parameters that the virtual step moves."""
    at_theta = forward_at(done.net, {name: theta[name] for name in done.theta}, x)
    value, u = _differentiate(loss, at_theta.z)
    g = at_theta.vjp(u.detach(), moved_only=True)
    distributed.average(g)
    return value.detach(), dict(zip(done.names(moved_only=True), g, strict=True))


def _add_gradient(phi: Sequence[Tensor], u: Tensor, weight: Tensor | None = None, *, shared: bool = True) -> None:
    """Add d<u(phi), weight>/dphi to .grad."""
    grads = list(torch.autograd.grad(u, phi, weight, allow_unused=True))
    if shared:
        distributed.average([d for d in grads if d is not None])
    for p, d in zip(phi, grads, strict=True):
        if d is not None:
            p.grad = d if p.grad is None else p.grad + d


def step_along(method: Method, grads: Sequence[Tensor]) -> None:
    """Take the real step along a gradient that is already known."""
    distributed.average(grads)
    for p, d in zip((p for p in method.net.parameters() if p.requires_grad), grads, strict=True):
        p.grad = d
    method.optimizer.step()
