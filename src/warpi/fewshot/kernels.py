"""Kernels between sets of vectors, batched: random Fourier features, their exact limit, the Gaussian kernel.

Bases w ~ N(mu, diag(s^2)) and phases b ~ U[0, 2 pi] give z(x) = sqrt(2/D) cos(w.x + b), whose products estimate

    k(x, x') = E cos(w.(x - x')) = exp(-1/2 sum_j s_j^2 d_j^2) cos(mu.d),  d = x - x',

with an error proportional to 1/sqrt(D).
"""

import math

import torch
from torch import Tensor

from warpi.functional.gaussian import DiagGaussian


def fourier_features(x: Tensor, q: DiagGaussian, eps: Tensor, phase: Tensor) -> Tensor:
    """z(x) of D bases w = mu + s * eps: x [..., N, d], q [..., d], eps [..., D, d], phase [..., D] -> [..., N, D].

    w.x = mu.x + (s * x).eps, so one product with the noise serves all tasks, and the bases are never materialized.
    """
    shift = (x * q.mean[..., None, :]).sum(-1, keepdim=True)  # [..., N, 1]
    angle = (x * q.std[..., None, :]) @ eps.mT + shift + phase[..., None, :]
    return math.sqrt(2 / phase.shape[-1]) * torch.cos(angle)


def spectral_kernels(x: Tensor, y: Tensor, q: DiagGaussian) -> Tensor:
    """The limit of infinitely many bases, for M Gaussians: x [T, N, d], y [T, S, d], q [T, M, d] -> [T, M, N, S].

    Only y, which should be the smaller set, is scaled M times; the rest are matrix products.
    """
    var = torch.exp(q.log_var)
    scaled = (y[:, None] * var[:, :, None]).flatten(1, 2)  # [T, M S, d]
    cross = (x @ scaled.mT).view(*x.shape[:2], -1, y.shape[1]).transpose(1, 2)  # [T, M, N, S]
    norms, angles = (
        [v @ w.mT for v in (a, b)] for a, b, w in ((x**2, y**2, var), (x, y, q.mean))
    )  # [T, N, M], [T, S, M]
    distance, angle = (a.mT[..., :, None] + sign * b.mT[..., None, :] for (a, b), sign in ((norms, 1), (angles, -1)))
    return torch.exp(-0.5 * (distance - 2 * cross).clamp_min(0)) * torch.cos(angle)


def gaussian_kernel(x: Tensor, y: Tensor, bandwidth: Tensor) -> Tensor:
    """exp(-|x - y|^2 / (2 bandwidth^2)): x [..., N, d], y [..., M, d], bandwidth [...] -> [..., N, M]."""
    return torch.exp(-0.5 * squared_distances(x, y) / bandwidth[..., None, None] ** 2)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|^2 by one matrix product. Negative values, which are rounding errors, become 0.  [..., N, M]"""
    norms = (x**2).sum(-1)[..., :, None] + (y**2).sum(-1)[..., None, :]
    return (norms - 2 * x @ y.mT).clamp_min(0)


def mean_distance(x: Tensor) -> Tensor:
    """Mean distance between different vectors of a set [..., N, d] -> [...]; 1 for a single vector."""
    n = x.shape[-2]
    if n < 2:
        return x.new_ones(x.shape[:-2])
    squared = squared_distances(x, x) * (1 - torch.eye(n, device=x.device, dtype=x.dtype))
    return squared.clamp_min(1e-12).sqrt().sum((-1, -2)) / (n * (n - 1))  # sqrt is not differentiable at zero


def alignment(K: Tensor, Y: Tensor) -> Tensor:
    """Cosine similarity in [-1, 1] of a kernel [..., N, N] and the kernel of the labels Y [..., N, C].  [...]"""
    target = 0.99 * (Y @ Y.mT + 0.01)
    return torch.cosine_similarity(K.flatten(-2), target.flatten(-2), dim=-1)
