"""Per-example losses: (z [..., B, K], y [B]) -> [..., B], where p = softmax(z). The method reduces them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from warpi.utils import distributed


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """-log softmax(z)_y.  z [..., B, K], y [B] -> [..., B]"""
    log_p = F.log_softmax(z, dim=-1)
    return -log_p.gather(-1, y.expand(z.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def mean_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of a batch.  z [..., B, K], y [B] -> []"""
    return cross_entropy(z, y).mean()


def cross_entropy_gradient(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of a batch and its gradient (p - y) / B at z, without autograd.  z [B, K], y -> [], [B, K]"""
    log_p = F.log_softmax(z.T.contiguous(), dim=0)  # [K, B]: on a CPU, a softmax over a short last dimension is slow
    loss = -log_p.gather(0, y[None]).mean()
    target = torch.zeros_like(log_p).scatter_(0, y[None], 1)
    return loss, (log_p.exp_() - target).T / len(z)


def rectified_cross_entropy(v: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of L rectified logits v_l z, and its gradient u at z.  v [L, B, K], z, y -> [], [B, K]

        u = 1/(L B) sum_l v_l (p_l - y),   p_l = softmax(v_l z)

    Only u can be differentiated, and only once, in v. This takes a fraction of the time of two derivatives of
    log_softmax, which is slow on a CPU if K is small.
    """
    loss, u = _Rectified.apply(v, z, y)  # type: ignore[no-untyped-call]
    return loss, u


class _Rectified(torch.autograd.Function):
    # The tensors are transposed: on a CPU, sums over the last dimension are slow if it is short.

    @staticmethod
    def forward(ctx: Any, v: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        v = v.transpose(1, 2).contiguous()  # [L, K, B]
        z = z.T.contiguous()  # [K, B]
        log_p = (v * z).log_softmax(1)
        loss = -log_p.mean(0).gather(0, y[None]).mean()
        p = log_p.exp_()
        error = p - torch.zeros_like(z).scatter_(0, y[None], 1)
        ctx.save_for_backward(v, z, p, error)
        ctx.mark_non_differentiable(loss)
        return loss, (v * error).mean(0).T / len(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, w: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of <u, w> at v_l: [w (p_l - y) + z p_l (v_l w - <p_l, v_l w>)] / (L B)."""
        v, z, p, error = ctx.saved_tensors
        w = w.T.contiguous() / (len(v) * z.shape[1])
        vw = v * w
        vw -= (p * vw).sum(1, keepdim=True)
        vw *= p
        vw *= z
        vw.addcmul_(error, w)
        return vw.transpose(1, 2).contiguous(), None, None


def soft_cross_entropy(z: Tensor, q: Tensor) -> Tensor:
    """-sum_k q_k log p_k: targets are distributions.  q [B, K]"""
    return -(q * F.log_softmax(z, dim=-1)).sum(-1)


def one_hot(y: Tensor, n_classes: int) -> Tensor:
    """Labels as distributions.  [B, K]"""
    return F.one_hot(y, n_classes).float()


def smooth_cross_entropy(z: Tensor, y: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy with the target (1 - e) y + e / K."""
    return (1 - smoothing) * cross_entropy(z, y) - smoothing * F.log_softmax(z, dim=-1).mean(-1)


def absolute_error(z: Tensor, y: Tensor) -> Tensor:
    """|p - y|_1 = 2 (1 - p_y)."""
    return -2 * torch.expm1(-cross_entropy(z, y))


def generalized_cross_entropy(z: Tensor, y: Tensor, q: float) -> Tensor:
    """(1 - p_y^q) / q; the limit for q = 0 is cross-entropy. Uses log p_y, so that p_y = 0 has a gradient."""
    ce = cross_entropy(z, y)
    return -torch.expm1(-q * ce) / q if q else ce


def truncated_cross_entropy(z: Tensor, y: Tensor, kept: Tensor, q: float, k: float) -> Tensor:
    """kept * (L_q(p_y) - L_q(k)), with the generalized cross-entropy L_q: the loss relative to pruning the example."""
    at_k = (1 - k**q) / q if q else -math.log(k)
    return kept * (generalized_cross_entropy(z, y, q) - at_k)


def symmetric_cross_entropy(z: Tensor, y: Tensor, alpha: float, beta: float, log_zero: float) -> Tensor:
    """alpha CE(y, p) + beta CE(p, y), with `log_zero` in place of the logarithm of the label's zeros."""
    reverse = -log_zero / 2 * absolute_error(z, y)  # -sum_k p_k log y_k = -A (1 - p_y)
    return alpha * cross_entropy(z, y) + beta * reverse


def focal(z: Tensor, y: Tensor, gamma: float) -> Tensor:
    """-(1 - p_y)^gamma log p_y."""
    ce = cross_entropy(z, y)
    wrong = -torch.expm1(-ce)  # 1 - p_y
    return wrong.clamp_min(1e-12) ** gamma * ce  # the slope of a root at 0 is infinite


def soft_bootstrap(z: Tensor, y: Tensor, beta: float) -> Tensor:
    """-sum_k (beta y_k + (1 - beta) p_k) log p_k, differentiated through both p."""
    return beta * cross_entropy(z, y) + (1 - beta) * entropy(z)


def hard_bootstrap(z: Tensor, y: Tensor, beta: float) -> Tensor:
    """Cross-entropy with the target beta y + (1 - beta) [k = argmax p]."""
    return beta * cross_entropy(z, y) - (1 - beta) * F.log_softmax(z, dim=-1).amax(-1)


def entropy(z: Tensor) -> Tensor:
    """-sum_k p_k log p_k."""
    return soft_cross_entropy(z, z.softmax(dim=-1))


def squared_error(z: Tensor, q: Tensor) -> Tensor:
    """1/K sum_k (p_k - q_k)^2: bounded, unlike cross-entropy, for guessed targets.  q [B, K]"""
    return (z.softmax(dim=-1) - q).square().mean(-1)


def prior_penalty(z: Tensor) -> Tensor:
    """KL(uniform || mean_i p_i) over a batch: penalizes predicting one class for all examples.  z [B, K] -> []"""
    mean = distributed.mean(z.softmax(dim=-1).mean(0)).clamp_min(1e-8)  # [K]
    return -mean.log().mean() - math.log(len(mean))
