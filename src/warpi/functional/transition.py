"""The transition matrix T of label noise for networks: estimates of T, and losses that use it.

T[i, j] is the probability that an example of true class i has the given label j. Rows are true classes and sum to 1.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from warpi.functional.losses import cross_entropy, one_hot
from warpi.utils import distributed

_TINY = 1e-30  # a float32 with a finite logarithm


def normalize_rows(T: Tensor) -> Tensor:
    """Set negative numbers to zero and scale rows to sum 1. A zero row becomes a unit vector.  [K, K]"""
    T = T.clamp_min(0)
    total = T.sum(1, keepdim=True)
    return torch.where(total > 0, T / total.clamp_min(_TINY), torch.eye(len(T), dtype=T.dtype, device=T.device))


def anchors(p: Tensor, quantiles: Sequence[float]) -> Tensor:
    """For each quantile and class, the row at that quantile of the class's probability.  p [N, K] -> [n, K]

    The quantile 1 is the argmax, the most confident row. Smaller quantiles skip the most confident rows as outliers: a
    fraction of all rows, as published for ten classes, but for a rare class at most that fraction of 15 times its size.
    """
    outliers = 1 - torch.tensor(quantiles, dtype=torch.float64, device=p.device)  # [n]
    rows = (15 * p.sum(0, dtype=torch.float64)).clamp_max(len(p))  # [K]
    places = (outliers[:, None] * rows - 1e-6).ceil().long().clamp(0, len(p) - 1)  # [n, K]
    return p.topk(int(places.max()) + 1, dim=0).indices.gather(0, places)


def from_anchors(p: Tensor, quantile: float = 1.0) -> Tensor:
    """Estimate T from noisy posteriors [N, K]: the posterior of an example that is certainly of class i is row i."""
    return normalize_rows(p[anchors(p, [quantile])[0]])


def from_trusted(p: Tensor, y: Tensor) -> Tensor:
    """Estimate T from noisy posteriors [N, K] of examples with true labels y [N]: row i is their mean over class i."""
    return normalize_rows(one_hot(y, p.shape[1]).to(p).T @ p)


def from_given(p: Tensor, y: Tensor) -> Tensor:
    """Estimate T from beliefs p [N, K] about true classes and given labels y [N]: a soft confusion matrix."""
    return normalize_rows(p.T @ one_hot(y, p.shape[1]).to(p))


def latent_labels(z: Tensor, y: Tensor, T: Tensor, generator: Generator) -> Tensor:
    """Sample a true class for each given label, in proportion to p_k T_ky.  [B, K], [B], [K, K] -> [B]

    Takes the winner of exponential races with these rates, because torch.multinomial would make a GPU wait.
    """
    q = z.softmax(1) * T.T[y]  # [B, K]
    times = distributed.draw_share(len(q), lambda n: q.new_empty(n, q.shape[1]).exponential_(generator=generator))
    return (q.clamp_min(_TINY) / times).argmax(1)


def well_conditioned(T: Tensor, limit: float = 10.0) -> Tensor:
    """T, mixed with as little of the identity (in tenths) as makes its condition number at most `limit`."""
    eye = torch.eye(len(T), dtype=T.dtype, device=T.device)
    mixtures = [torch.lerp(T, eye, share / 10) for share in range(11)]
    return next(M for M in mixtures if float(torch.linalg.cond(M.double())) <= limit)


def forward_loss(z: Tensor, y: Tensor, T: Tensor) -> Tensor:
    """-log (T^T p)_y: the loss of the noisy posterior T^T p for p = softmax(z).  [B, K], [B] -> [B]"""
    return -torch.logsumexp(F.log_softmax(z, dim=1) + T.T[y].clamp_min(_TINY).log(), dim=1)


def backward_loss(z: Tensor, y: Tensor, T_inverse: Tensor, least: float = 1e-7) -> Tensor:
    """(T^-1 l)_y for the losses l_k = -log p_k of all classes, unbiased under the noise.  [B, K], [B] -> [B]

    Its only lower bound comes from the probability `least`, below which the gradient is zero.
    """
    losses = -F.log_softmax(z, dim=1).clamp_min(math.log(least))  # [B, K]
    return (T_inverse[y] * losses).sum(1)


def importance(z: Tensor, y: Tensor, columns: Tensor) -> Tensor:
    """p_y / (T^T p)_y: the probability ratio of y as true and as given label.  columns [B, K] = T[:, y_i] -> [B]

    The probabilities are detached, because otherwise the weighted loss -beta log p_y would also fall as p_y goes to 0.
    """
    p = z.detach().softmax(1)
    return p.gather(1, y[:, None])[:, 0] / (p * columns).sum(1).clamp_min(1e-6)


def reweighted_loss(z: Tensor, y: Tensor, columns: Tensor) -> Tensor:
    """Cross-entropy on the given labels, weighted by `importance`.  [B, K], [B], [B, K] -> [B]"""
    return importance(z, y, columns) * cross_entropy(z, y)


def determinant_loss(z: Tensor, y: Tensor, epsilon: float = 1e-3) -> Tensor:
    """-1/K log(|det U| + epsilon), U = sum_i y_i p_i^T; label noise multiplies det U by a constant.  [B, K], [B] -> []

    A class without a label in the batch would make it zero, so its row becomes a unit vector. Computed in float64 with
    logarithms, because the determinant of K rows scales like a K-th power. With several ranks, U is that of the whole
    batch.
    """
    p = z.softmax(1).double()
    K = z.shape[1]
    Y = one_hot(y, K).to(p)  # [B, K]
    n = distributed.total(Y.sum(0))  # [K]
    U = distributed.total((Y / n.clamp_min(1)).T @ p) + torch.diag((n == 0).to(p))  # [K, K] rows sum to 1
    _, log_det = torch.linalg.slogdet(U + 1e-9 * torch.eye(K, dtype=p.dtype, device=p.device))
    log_det = log_det + n.clamp_min(1).log().sum()
    return (-torch.logaddexp(log_det, torch.full_like(log_det, math.log(epsilon))) / K).to(z.dtype)


def cap_gradient(z: Tensor, weight: float = 1.0) -> Tensor:
    """Logits whose gradient is scaled down to the largest that a mean cross-entropy can have: weight * sqrt(2 / B).

    With several ranks, this is the gradient of the whole batch: a rank has its share, times the number of ranks.
    """
    n = distributed.n_ranks()
    limit = n * weight * math.sqrt(2 / (n * len(z)))

    def cap(g: Tensor) -> Tensor:
        return g * (limit / distributed.total(g.square().sum()).sqrt().clamp_min(_TINY)).clamp_max(1)

    z = z.view_as(z)
    z.register_hook(cap)  # type: ignore[no-untyped-call]
    return z


def nmf(X: Tensor, r: int, steps: int, generator: Generator) -> Tensor:
    """Weights W [N, r] of a non-negative factorization X [N, D] = W H, rows scaled to sum 1: the parts of each row.

    Multiplicative updates of the squared error (Lee and Seung).
    """
    scale = (X.mean() / r).sqrt().clamp_min(1e-6)
    W = torch.rand(len(X), r, generator=generator, device=X.device, dtype=X.dtype) * scale
    H = torch.rand(r, X.shape[1], generator=generator, device=X.device, dtype=X.dtype) * scale
    for _ in range(steps):
        H *= (W.T @ X) / (W.T @ W @ H).clamp_min(1e-12)
        W *= (X @ H.T) / (W @ (H @ H.T)).clamp_min(1e-12)
        W = normalize_parts(W)
    return W


def normalize_parts(W: Tensor) -> Tensor:
    """Rows scaled to sum 1; a row of zeros becomes uniform.  [N, r]"""
    total = W.sum(1, keepdim=True)
    return torch.where(total > 0, W / total.clamp_min(_TINY), torch.full_like(W, 1 / W.shape[1]))


def fit_parts(h: Tensor, q: Tensor, steps: int, lr: float, enough: float = 0.0) -> Tensor:
    """Matrices P [r, K, K] of parts for which row i of sum_j h_j P_j is close to q at the anchors of class i.

    h [n, K, r] are the weights of n anchors per class, q [n, K, K] their noisy posteriors. Adam minimizes the squared
    error; a softmax keeps the rows of every P_j stochastic. A class whose mean error is below `enough` no longer
    counts: otherwise parts with little weight in its anchors would take extreme values to explain the remaining error.
    """
    mean = q.mean(0).clamp_min(1e-4).log()  # [K, K] start with all parts equal
    logits = mean.expand(h.shape[-1], *mean.shape).clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr)
    for _ in range(steps):
        with torch.enable_grad():
            rows = torch.einsum("nkr,rkj->nkj", h, logits.softmax(-1))
            loss = (((rows - q) ** 2).mean((0, 2)) - enough).clamp_min(0).sum()  # one mean per class
        (logits.grad,) = torch.autograd.grad(loss, logits)
        optimizer.step()
    return logits.detach().softmax(-1)
