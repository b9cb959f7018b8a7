"""Selection of examples by per-example weights of a fixed shape, so that a step can be a CUDA graph.

With several ranks, examples are selected from the whole batch, and each rank gets the weights of its share.
"""

import math

import torch
from torch import Generator, Tensor

from warpi.utils import distributed


def forget_rate(t: int, tau: float, gradual: float, exponent: float = 1.0) -> float:
    """R(t) = tau min((t / T_k)^c, 1): the fraction dropped in epoch t, counted from 0, with T_k = `gradual` epochs."""
    return tau if t >= gradual else tau * (t / gradual) ** exponent


def small_loss(losses: Tensor, rate: Tensor, among: Tensor | None = None) -> Tensor:
    """Weights that drop a fraction `rate` of the examples with the largest losses: 1 to keep, 0 to drop.  [B] -> [B]

    `among` are weights, 0 or 1, of the examples that may be kept. The number kept is rounded, and at least one if there
    is one. Equal losses are kept in the order of the batch.
    """
    among = distributed.gather(torch.ones_like(losses) if among is None else among)
    losses = distributed.gather(losses)
    rank = losses.masked_fill(among == 0, torch.inf).argsort(stable=True).argsort()  # [B]
    number = ((1 - rate) * among.sum()).round().clamp_min(1)
    return ((rank < number) * among)[distributed.rank_slice(len(losses))]


def rank_within_classes(losses: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """The rank of each loss among those with the same label; 0 is the smallest.  [N], [N] -> [N]"""
    order = losses.argsort(stable=True)
    order = order[y[order].argsort(stable=True)]  # by label, then by loss
    sizes = torch.bincount(y, minlength=n_classes)
    first = sizes.cumsum(0) - sizes  # [K] where each label begins
    places = torch.arange(len(y), device=y.device) - first[y[order]]
    return torch.empty_like(places).scatter_(0, order, places)


def disagreement(z: Tensor, other: Tensor) -> Tensor:
    """1 for examples for which two networks predict different classes, else 0.  [B, K], [B, K] -> [B]"""
    return (z.argmax(dim=1) != other.argmax(dim=1)).to(z.dtype)


def selected_mean(losses: Tensor, w: Tensor, least: float = 1.0) -> Tensor:
    """sum_i w_i l_i / max(sum_i w_i, least): the mean over the selected examples, 0 if there are none.

    With several ranks, the mean of this over the ranks is that over the whole batch.
    """
    return distributed.n_ranks() * (w * losses).sum() / distributed.total(w.sum()).clamp_min(least)


def self_paced(losses: Tensor, threshold: Tensor, softness: Tensor) -> Tensor:
    """v = clip(1 - (l - lambda) / gamma, 0, 1): 1 up to the threshold, then a line down to 0.  [B] -> [B]

    gamma = 0 is the step function of self-paced learning, gamma = inf selects all.
    """
    return torch.where(losses <= threshold, 1.0, (1 - (losses - threshold) / softness).clamp_min(0))


def follow_percentile(average: Tensor, losses: Tensor, p: float, kept: float) -> None:
    """average <- kept average + (1 - kept) (the loss below which a fraction p of the batch lies), in place.  [], [B]

    The percentile is the loss with the nearest rank. A negative average means that there is none yet.
    """
    losses = distributed.gather(losses)
    new = losses.sort().values[round(p * (len(losses) - 1))]
    average.copy_(torch.where(average < 0, new, kept * average + (1 - kept) * new))


def keep_at_random(n: int, rate: Tensor, generator: Generator) -> Tensor:
    """Weights of n examples: 0 for a random fraction `rate`, 1 for the others.  [n]"""
    u = distributed.draw_share(n, lambda total: torch.rand(total, generator=generator, device=generator.device))
    return small_loss(u, rate)


def steady_label(history: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """The most frequent prediction, and how uncertain it is.  [B, q], -1 if not yet predicted -> [B], [B]

    F = -sum_k f_k log f_k / log K with the frequencies f of the classes in the history: 0 if all predictions agree, 1
    if all classes are equally frequent. An incomplete history has the uncertainty 1.
    """
    f = (history[:, :, None] == torch.arange(n_classes, device=history.device)).float().mean(dim=1)  # [B, K]
    uncertainty = -torch.xlogy(f, f).sum(dim=1) / math.log(n_classes)
    return f.argmax(dim=1), torch.where((history < 0).any(dim=1), 1.0, uncertainty)


def two_gaussians(x: Tensor, steps: int = 10, floor: float = 5e-4) -> Tensor:
    """Posterior probability of the component with the smaller mean in a mixture of two Gaussians.  [N] -> [N]

    x is scaled to [0, 1]. EM starts from the best cut of the numbers into two groups, so the result is deterministic.
    `floor` is added to the variances.
    """
    x = (x - x.min()).double()
    x = x / x.max().clamp_min(torch.finfo(x.dtype).tiny)
    low = best_cut(x)
    r = torch.stack([low, ~low], dim=1).double()  # [N, 2] responsibilities
    for _ in range(steps):
        n = r.sum(0).clamp_min(1e-12)  # [2]
        mean = (r * x[:, None]).sum(0) / n
        var = (r * (x[:, None] - mean).square()).sum(0) / n + floor
        r = (n.log() - 0.5 * var.log() - 0.5 * (x[:, None] - mean).square() / var).softmax(dim=1)
    return r.gather(1, mean.argmin().expand(len(x), 1)).squeeze(1).float()


def best_cut(x: Tensor) -> Tensor:
    """Mark the smaller of two groups, cut so that the squared distance to both means is minimal.  [N] -> [N] bool

    A cut after the first n of N sorted numbers reduces that distance by n (N - n) / N (mean_high - mean_low)^2.
    """
    ranked, order = x.double().sort(stable=True)
    n = torch.arange(1, max(2, len(x)), device=x.device).double()  # [N - 1]
    sums = ranked.cumsum(0)
    gap = (sums[-1] - sums[: len(n)]) / (len(x) - n).clamp_min(1) - sums[: len(n)] / n
    cut = (n * (len(x) - n) * gap.square()).argmax() + 1
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(x), device=x.device))
    return rank < cut


def two_betas(x: Tensor, steps: int = 10) -> Tensor:
    """Fit a mixture of two beta distributions to numbers in (0, 1) by EM.  [N] -> [3, 2]: weights, alphas, betas

    M-step by moments: with the weighted mean m and variance s, alpha = m (m (1 - m) / s - 1), beta = alpha (1 - m) / m.
    The first distribution is the one with the smaller mean.
    """
    x = x.double().clamp(1e-4, 1 - 1e-4)
    mixture = x.new_tensor([[0.5, 0.5], [1.0, 2.0], [2.0, 1.0]])
    for _ in range(steps):
        second = beta_posterior(x, mixture)
        r = torch.stack([1 - second, second]).clamp_min(1e-12)  # [2, N]
        m = (r @ x) / r.sum(1)  # [2]
        s = (r * (x - m[:, None]).square()).sum(1) / r.sum(1)
        alpha = m * (m * (1 - m) / s.clamp_min(1e-8) - 1).clamp_min(1e-4)
        mixture = torch.stack([r.mean(1), alpha, alpha * (1 - m) / m])
    means = mixture[1] / (mixture[1] + mixture[2])
    return mixture[:, means.argsort()]


def beta_posterior(x: Tensor, mixture: Tensor) -> Tensor:
    """Probability that a number belongs to the second of two beta distributions.  [N], [3, 2] -> [N]"""
    weight, alpha, beta = mixture.double()
    x = x.double().clamp(1e-4, 1 - 1e-4)[:, None]
    log_b = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    log_p = weight.log() + (alpha - 1) * x.log() + (beta - 1) * (1 - x).log() - log_b  # [N, 2]
    p: Tensor = log_p.softmax(dim=1)[:, 1]
    return p
