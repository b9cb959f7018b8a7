"""The transition matrix T of label noise: estimates of it, and losses that take it into account.

T[i, j] is the probability that an example of true class i is given label j: rows are true classes and sum to 1.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from warpi.functional.losses import cross_entropy, one_hot

_TINY = 1e-30  # a float32 with a logarithm


def normalize_rows(T: Tensor) -> Tensor:
    """Negative numbers to zero, rows to sum 1; a row without mass becomes that of a class without noise.  [K, K]"""
    T = T.clamp_min(0)
    total = T.sum(1, keepdim=True)
    return torch.where(total > 0, T / total.clamp_min(_TINY), torch.eye(len(T), dtype=T.dtype, device=T.device))


# --- estimates --------------------------------------------------------------------------------------------------------


def anchors(p: Tensor, quantiles: Sequence[float]) -> Tensor:
    """For each quantile and class, the row at that quantile of the class's probability.  p [N, K] -> [n, K]

    At 1 it is the argmax, the row that most surely carries that label; below, the surest are left out as outliers: a
    share of all rows, as published for ten classes, and of a rare class no more than it would be of a fifteenth.
    """
    outliers = 1 - torch.tensor(quantiles, dtype=torch.float64, device=p.device)  # [n]
    rows = (15 * p.sum(0, dtype=torch.float64)).clamp_max(len(p))  # [K]
    places = (outliers[:, None] * rows - 1e-6).ceil().long().clamp(0, len(p) - 1)  # [n, K]
    return p.topk(int(places.max()) + 1, dim=0).indices.gather(0, places)


def from_anchors(p: Tensor, quantile: float = 1.0) -> Tensor:
    """Noisy posteriors [N, K] to T: an example that is surely of class i shows row i."""
    return normalize_rows(p[anchors(p, [quantile])[0]])


def from_trusted(p: Tensor, y: Tensor) -> Tensor:
    """Noisy posteriors [N, K] of examples with true labels y [N] to T: row i is their mean over class i."""
    return normalize_rows(one_hot(y, p.shape[1]).to(p).T @ p)


def from_given(p: Tensor, y: Tensor) -> Tensor:
    """Beliefs p [N, K] about true classes, and given labels y [N], to T: a soft confusion matrix."""
    return normalize_rows(p.T @ one_hot(y, p.shape[1]).to(p))


def latent_labels(z: Tensor, y: Tensor, T: Tensor, generator: Generator) -> Tensor:
    """A true class for each given label, drawn from what z and T make of it, p_k T_ky.  [B, K], [B], [K, K] -> [B]

    The winner of exponential races at these rates: torch.multinomial would make a GPU wait.
    """
    q = z.softmax(1) * T.T[y]  # [B, K]
    return (q.clamp_min(_TINY) / torch.empty_like(q).exponential_(generator=generator)).argmax(1)


def well_conditioned(T: Tensor, limit: float = 100.0) -> Tensor:
    """T, mixed with as much of the identity (tenths) as its inverse needs to be of use."""
    eye = torch.eye(len(T), dtype=T.dtype, device=T.device)
    mixed = [torch.lerp(T, eye, share / 10) for share in range(11)]
    return next(M for M in mixed if float(torch.linalg.cond(M.double())) <= limit)


# --- losses -----------------------------------------------------------------------------------------------------------


def forward_loss(z: Tensor, y: Tensor, T: Tensor) -> Tensor:
    """-log (T^T p)_y: the loss of the noisy posterior that T makes of p = softmax(z).  [B, K], [B] -> [B]"""
    return -torch.logsumexp(F.log_softmax(z, dim=1) + T.T[y].clamp_min(_TINY).log(), dim=1)


def backward_loss(z: Tensor, y: Tensor, T_inverse: Tensor, least: float = 1e-7) -> Tensor:
    """(T^-1 l)_y for the losses l_k = -log p_k of all classes, unbiased under the noise.  [B, K], [B] -> [B]

    It has no lower bound but for the least probability, below which nothing is learned.
    """
    losses = -F.log_softmax(z, dim=1).clamp_min(math.log(least))  # [B, K]
    return (T_inverse[y] * losses).sum(1)


def importance(z: Tensor, y: Tensor, columns: Tensor) -> Tensor:
    """p_y / (T^T p)_y: how much more probable the label is as the true one.  columns [B, K] = T[:, y_i] -> [B]

    The probabilities are detached: through them the weighted loss -beta log p_y would also fall as p_y goes to 0.
    """
    p = z.detach().softmax(1)
    return p.gather(1, y[:, None])[:, 0] / (p * columns).sum(1).clamp_min(1e-6)


def reweighted_loss(z: Tensor, y: Tensor, columns: Tensor) -> Tensor:
    """Cross-entropy on the given labels, weighted by `importance`.  [B, K], [B], [B, K] -> [B]"""
    return importance(z, y, columns) * cross_entropy(z, y)


def determinant_loss(z: Tensor, y: Tensor, epsilon: float = 1e-3) -> Tensor:
    """-1/K log(|det U| + epsilon), U = sum_i y_i p_i^T; label noise multiplies det U by a constant.  [B, K], [B] -> []

    A class that no label of the batch names would make it zero, and is left out: its row becomes the unit vector. In
    float64 and by logarithms, since a determinant of K rows has the size of a K-th power.
    """
    p, K = z.softmax(1).double(), z.shape[1]
    Y = one_hot(y, K).to(p)  # [B, K]
    n = Y.sum(0)  # [K]
    U = (Y / n.clamp_min(1)).T @ p + torch.diag((n == 0).to(p))  # [K, K] rows sum to 1
    _, log_det = torch.linalg.slogdet(U + 1e-9 * torch.eye(K, dtype=p.dtype, device=p.device))
    log_det = log_det + n.clamp_min(1).log().sum()
    return (-torch.logaddexp(log_det, torch.full_like(log_det, math.log(epsilon))) / K).to(z.dtype)


def cap_gradient(z: Tensor, weight: float = 1.0) -> Tensor:
    """The same logits, whose gradient is cut down to what a mean cross-entropy can have: weight * sqrt(2 / B)."""
    limit, z = weight * math.sqrt(2 / len(z)), z.view_as(z)
    z.register_hook(lambda g: g * (limit / g.norm().clamp_min(_TINY)).clamp_max(1))  # type: ignore[no-untyped-call]
    return z


# --- parts ------------------------------------------------------------------------------------------------------------


def nmf(X: Tensor, r: int, steps: int, generator: Generator) -> Tensor:
    """Weights W [N, r] of a non-negative factorisation X [N, D] = W H, rows scaled to sum 1: of which parts a row is.

    Multiplicative updates of the squared error (Lee and Seung).
    """
    scale = (X.mean() / r).sqrt().clamp_min(1e-6)
    W = torch.rand(len(X), r, generator=generator, device=X.device, dtype=X.dtype) * scale
    H = torch.rand(r, X.shape[1], generator=generator, device=X.device, dtype=X.dtype) * scale
    for _ in range(steps):
        H *= (W.T @ X) / (W.T @ W @ H).clamp_min(1e-12)
        W *= (X @ H.T) / (W @ (H @ H.T)).clamp_min(1e-12)
    total = W.sum(1, keepdim=True)
    return torch.where(total > 0, W / total.clamp_min(_TINY), torch.full_like(W, 1 / r))


def fit_parts(h: Tensor, q: Tensor, steps: int, lr: float, enough: float = 0.0) -> Tensor:
    """Matrices P [r, K, K] of parts such that sum_j h_j P_j has row i = q at the anchors of class i.

    h [n, K, r] are the weights of n anchors a class, q [n, K, K] their noisy posteriors. Squared error, rows of every
    P_j kept stochastic by a softmax, Adam. A class whose mean error is below `enough` is left as it is: a part of which
    its anchors have little would be driven far to explain the rest, and rule the examples that have much of it.
    """
    mean = q.mean(0).clamp_min(1e-4).log()  # [K, K]: all parts alike, where the search begins
    logits = mean.expand(h.shape[-1], *mean.shape).clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr)
    for _ in range(steps):
        with torch.enable_grad():
            rows = torch.einsum("nkr,rkj->nkj", h, logits.softmax(-1))
            loss = (((rows - q) ** 2).mean((0, 2)) - enough).clamp_min(0).sum()  # a mean for each class
        (logits.grad,) = torch.autograd.grad(loss, logits)
        optimizer.step()
    return logits.detach().softmax(-1)
