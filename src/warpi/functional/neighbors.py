"""Neighborhoods in feature space: nearest neighbors, local dimension, prototypes, clusters. h [n, D] are features."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def lid(h: Tensor, k: int) -> Tensor:
    """Local intrinsic dimensionality of each point among the others, from its k nearest.  [n, D] -> [n]

    Maximum likelihood: -1 / mean_j log(r_j / r_k) with the distances r_1 <= ... <= r_k. Not finite if all are equal.
    """
    r = torch.cdist(h, h, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    r = r.topk(min(k, len(h) - 1), largest=False).values.clamp_min(1e-12)  # [n, k], ascending
    return -1 / (r / r[:, -1:]).log().mean(dim=1)


def nearest(h: Tensor, k: int, among: Tensor | None = None, size: int = 2048) -> tuple[Tensor, Tensor]:
    """Cosine similarities and indices of the k most similar other points, in chunks of `size`.  [n, k], [n, k]

    `among` [n] marks points that may be neighbors; all others have the similarity -inf.
    """
    h = F.normalize(h, dim=1)
    k = min(k, len(h) - 1)
    chunks = []
    for start in range(0, len(h), size):
        s = h[start : start + size] @ h.T
        s.diagonal(start).fill_(-torch.inf)  # a point is not its own neighbor
        if among is not None:
            s[:, ~among] = -torch.inf
        chunks.append(s.topk(k))
    return torch.cat([c.values for c in chunks]), torch.cat([c.indices for c in chunks])


def prototypes(h: Tensor, n: int, apart: float) -> Tensor:
    """Indices of up to n points of one class that are dense but dissimilar.  [n]

        rho_i = sum_j sign(S_ij - S_c)               density: S are cosine similarities, S_c their upper 40 % quantile
        eta_i = max_{j: rho_j > rho_i} S_ij          similarity to a denser point; min_j S_ij for the densest point

    Takes the points with the largest rho among those with eta < `apart`, then those with the smallest eta.
    """
    h = F.normalize(h, dim=1)
    S = h @ h.T
    flat = S.flatten()
    S_c = flat.kthvalue(max(1, round(0.6 * len(flat)))).values
    rho = (S - S_c).sign().sum(1)
    rank = rho.argsort(descending=True, stable=True).argsort()  # among equally dense points, the first counts as denser
    denser = rank[None, :] < rank[:, None]  # [i, j]: j is denser than i
    eta = torch.where(denser, S, -torch.inf).amax(1)
    eta = torch.where(rank == 0, S.amin(1), eta)
    enough = eta < apart
    order = torch.where(enough, rho, -2 * len(h) - eta)  # rho >= -n, so the others come last
    return order.topk(min(n, len(h))).indices


def cluster_centers(h: Tensor, n: int, generator: Generator, steps: int = 10) -> Tensor:
    """Centers of n clusters of h, by k-means. It starts at distinct points of h if h has enough.  [n, D]"""
    drawn = torch.randperm(len(h), generator=generator)
    centers = h[drawn[torch.arange(n) % len(h)].to(h.device)]
    for _ in range(steps):
        cluster = torch.cdist(h, centers).argmin(dim=1)  # [len(h)]
        size = h.new_zeros(n).index_add_(0, cluster, h.new_ones(len(h)))[:, None]
        means = torch.zeros_like(centers).index_add_(0, cluster, h) / size.clamp_min(1)
        centers = torch.where(size > 0, means, centers)
    return centers
