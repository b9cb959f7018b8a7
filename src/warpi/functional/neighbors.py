"""Examples beside one another in feature space: neighbours, local dimension, prototypes. h [n, D] are features."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def lid(h: Tensor, k: int) -> Tensor:
    """Local intrinsic dimensionality of each point among the others, from its k nearest.  [n, D] -> [n]

    Maximum likelihood: -1 / mean_j log(r_j / r_k), r_1 <= ... <= r_k the distances. Not finite where all are equal.
    """
    r = torch.cdist(h, h, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    r = r.topk(min(k, len(h) - 1), largest=False).values.clamp_min(1e-12)  # [n, k], ascending
    return -1 / (r / r[:, -1:]).log().mean(dim=1)


def nearest(h: Tensor, k: int, among: Tensor | None = None, size: int = 2048) -> tuple[Tensor, Tensor]:
    """The k largest cosine similarities of each point to the others, and to whom; in chunks of `size`.  [n, k], [n, k]

    `among` [n] are points that may be neighbours; the others keep places, with a similarity of -inf.
    """
    h = F.normalize(h, dim=1)
    k = min(k, len(h) - 1)
    found = []
    for start in range(0, len(h), size):
        s = h[start : start + size] @ h.T
        s.diagonal(start).fill_(-torch.inf)  # nobody is a neighbour of itself
        if among is not None:
            s[:, ~among] = -torch.inf
        found.append(s.topk(k))
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


def prototypes(h: Tensor, n: int, apart: float) -> Tensor:
    """Indices of up to n points of one class, dense ones that are not alike.  [n]

        rho_i = sum_j sign(S_ij - S_c)               S the cosine similarities, S_c their 40 % quantile from above
        eta_i = max_{j: rho_j > rho_i} S_ij          how like it is to a denser point; min_j S_ij for the densest

    The points of the largest rho among those with eta < `apart`; those of the smallest eta where they are too few.
    """
    h = F.normalize(h, dim=1)
    S = h @ h.T
    flat = S.flatten()
    S_c = flat.kthvalue(max(1, round(0.6 * len(flat)))).values
    rho = (S - S_c).sign().sum(1)
    rank = rho.argsort(descending=True, stable=True).argsort()  # of equally dense points the first counts as denser
    denser = rank[None, :] < rank[:, None]  # [i, j]: j is denser than i
    eta = torch.where(denser, S, -torch.inf).amax(1)
    eta = torch.where(rank == 0, S.amin(1), eta)
    enough = eta < apart
    order = torch.where(enough, rho, -2 * len(h) - eta)  # rho is -n at least: the others come after all of them
    return order.topk(min(n, len(h))).indices


def cluster_centers(h: Tensor, n: int, generator: Generator, steps: int = 10) -> Tensor:
    """n points that stand for h: k-means, begun at points of h (each once, where h has as many).  [n, D]"""
    drawn = torch.randperm(len(h), generator=generator)
    found = h[drawn[torch.arange(n) % len(h)].to(h.device)]
    for _ in range(steps):
        mine = torch.cdist(h, found).argmin(dim=1)  # [len(h)]
        size = h.new_zeros(n).index_add_(0, mine, h.new_ones(len(h)))[:, None]
        found = torch.where(size > 0, torch.zeros_like(found).index_add_(0, mine, h) / size.clamp_min(1), found)
    return found
