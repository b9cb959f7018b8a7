"""Mixing pairs of examples: mixup, and parts of MixMatch.

With several ranks, partners are drawn from the whole batch. `parts` are the sizes of parts that each rank has joined
along the first dimension, such as the views of its examples, or noisy and trusted ones. The whole batch then consists
of the whole of each part, one after the other, as in a single process.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from warpi.utils import distributed


def beta(alpha: float, generator: Generator) -> Tensor:
    """Sample from Beta(alpha, alpha); 1 for alpha = 0, so that nothing is mixed.  []

    lambda = g / (g + h) for g, h ~ Gamma(alpha), computed with logarithms, because both underflow for a small alpha:
    g = g' u^(1 / alpha) with g' ~ Gamma(alpha + 1) and u uniform.
    """
    if alpha == 0:
        return torch.ones((), device=generator.device)
    above = torch.full((2,), alpha + 1, dtype=torch.float64, device=generator.device)
    u = torch.rand(2, generator=generator, dtype=torch.float64, device=generator.device)
    log_g = torch._standard_gamma(above, generator).log() + u.log() / alpha
    return torch.sigmoid(log_g[0] - log_g[1]).float()


def partners(parts: Sequence[int], generator: Generator) -> Tensor:
    """A random permutation of the batch: the partner of each of the n examples of this rank.  [n]"""
    whole = sum(parts) * distributed.n_ranks()
    order = torch.rand(whole, generator=generator, device=generator.device).argsort()
    return _share(order, parts)


def balanced_partners(group: Tensor, generator: Generator, parts: Sequence[int]) -> Tensor:
    """For each example a random partner, drawn with equal probability from group 1 and group 0.  [n] of 0, 1 -> [n]

    Partners are drawn with replacement. If a group is empty, all are from the other one.
    """
    group = _whole(group, parts)
    weight = group / group.sum().clamp_min(1) + (1 - group) / (1 - group).sum().clamp_min(1)
    upper = weight.double().cumsum(0)
    u = torch.rand(len(group), generator=generator, device=generator.device, dtype=torch.float64)
    partner = torch.searchsorted(upper, u * upper[-1], right=True).clamp_max(len(group) - 1)
    return _share(partner, parts)


def mix(a: Tensor, order: Tensor, weight: Tensor, parts: Sequence[int]) -> Tensor:
    """weight a_i + (1 - weight) a_order(i), for inputs or targets.  a [B, ...], order: positions in the whole batch"""
    return weight * a + (1 - weight) * _whole(a, parts)[order]


def _whole(a: Tensor, parts: Sequence[int]) -> Tensor:
    """The batch of all ranks, given the share of this one."""
    n = distributed.n_ranks()
    if n == 1:
        return a
    by_rank = distributed.gather(a).view(n, *a.shape)
    return torch.cat([part.flatten(0, 1) for part in torch.split(by_rank, list(parts), dim=1)])


def _share(whole: Tensor, parts: Sequence[int]) -> Tensor:
    """The share of this rank of what belongs to the batch of all ranks."""
    n = distributed.n_ranks()
    return torch.cat([part[distributed.rank_slice(len(part))] for part in torch.split(whole, [n * s for s in parts])])


def mixup(
    x: Tensor,
    q: Tensor,
    alpha: float,
    generator: Generator,
    *,
    parts: Sequence[int] | None = None,
    keep_own: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mix inputs and targets with those of a partner, with one lambda ~ Beta(alpha, alpha).  x [B, ...], q [B, K]

    With `keep_own`, lambda is max(lambda, 1 - lambda), so that example i keeps the larger weight (MixMatch).
    """
    parts = parts or [len(x)]
    weight = beta(alpha, generator)
    weight = torch.maximum(weight, 1 - weight) if keep_own else weight
    order = partners(parts, generator)
    return mix(x, order, weight, parts), mix(q, order, weight, parts)


def mixup_selected(
    x: Tensor, q: Tensor, selected: Tensor, alpha: float, generator: Generator, parts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Mixup among the selected examples only, with max(lambda, 1 - lambda).  x [B, ...], q [B, K], selected [B]

    The result has B examples, so that its shape is fixed: if fewer are selected, they occur more than once, with
    different partners. If none is selected, an arbitrary example takes their place.
    """
    weight = beta(alpha, generator)
    weight = torch.maximum(weight, 1 - weight)
    x, q, selected = (_whole(a, parts) for a in (x, q, selected))
    own, other = (_share(draw_selected(selected, generator), parts) for _ in range(2))
    return weight * x[own] + (1 - weight) * x[other], weight * q[own] + (1 - weight) * q[other]


def draw_selected(selected: Tensor, generator: Generator) -> Tensor:
    """The positions of the selected examples in random order, repeated until there are B.  [B], 0 or 1 -> [B]"""
    u = torch.rand(len(selected), generator=generator, device=generator.device)
    order = torch.where(selected > 0, u, u + 1).argsort()  # the selected ones first
    n = (selected > 0).sum().clamp_min(1)
    return order[torch.arange(len(selected), device=selected.device) % n]


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """p_k^(1/T) / sum_j p_j^(1/T): T = 1 leaves p as it is, T -> 0 makes it one-hot.  [B, K]"""
    powers = (p / p.amax(-1, keepdim=True)) ** (1 / temperature)  # the largest is 1, so the sum does not underflow
    return powers / powers.sum(-1, keepdim=True)
