"""Mixing examples with one another: mixup, and the pieces of MixMatch."""

import torch
from torch import Generator, Tensor


def beta(alpha: float, generator: Generator) -> Tensor:
    """A draw of Beta(alpha, alpha); 1 for alpha = 0, where nothing is mixed.  []

    lambda = g / (g + h) for g, h ~ Gamma(alpha), in logarithms, since for a small alpha both underflow:
    g = g' u^(1 / alpha) with g' ~ Gamma(alpha + 1) and u uniform.
    """
    if alpha == 0:
        return torch.ones((), device=generator.device)
    above = torch.full((2,), alpha + 1, dtype=torch.float64, device=generator.device)
    u = torch.rand(2, generator=generator, dtype=torch.float64, device=generator.device)
    log_g = torch._standard_gamma(above, generator).log() + u.log() / alpha
    return torch.sigmoid(log_g[0] - log_g[1]).float()


def partners(n: int, generator: Generator) -> Tensor:
    """A random order of n examples, each the partner of the one at its place.  [n]"""
    return torch.rand(n, generator=generator, device=generator.device).argsort()


def mix(a: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    """weight a_i + (1 - weight) a_order(i): of inputs or targets.  a [B, ...]"""
    return weight * a + (1 - weight) * a[order]


def mixup(x: Tensor, q: Tensor, alpha: float, generator: Generator, *, own: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs and targets, mixed with those of a partner by one lambda ~ Beta(alpha, alpha).  x [B, ...], q [B, K]

    `own`: lambda is replaced by max(lambda, 1 - lambda), so that example i stays nearer to itself (MixMatch).
    """
    weight = beta(alpha, generator)
    weight = torch.maximum(weight, 1 - weight) if own else weight
    order = partners(len(x), generator)
    return mix(x, order, weight), mix(q, order, weight)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """p_k^(1/T) / sum_j p_j^(1/T): T = 1 leaves p as it is, T -> 0 makes it one-hot.  [B, K]"""
    powers = (p / p.amax(-1, keepdim=True)) ** (1 / temperature)  # the largest is 1: nothing underflows as a whole
    return powers / powers.sum(-1, keepdim=True)
