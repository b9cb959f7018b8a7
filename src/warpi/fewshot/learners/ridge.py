"""Ridge regression in closed form, batched: with the kernel matrix, or with the features if these are fewer.

    dual    (K + lam I) A = Y,          prediction k(x)^T A           K = Z Z^T, n x n
    primal  (Z^T Z + lam I) W = Z^T Y,  prediction z(x)^T W           D x D; W = Z^T A

The solution is the mean of a Gaussian process y ~ N(0, a^2 (K + lam I)), which also gives evidence and variance.
Factorizations do not synchronize (`cholesky_ex`), so they can be part of a CUDA graph. If a matrix cannot be
factorized, as may happen to ill-conditioned ones in float32, the result is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import cholesky_ex, solve_triangular


class Fit(NamedTuple):
    """A ridge solution. Queries are kernel rows [..., M, n], or features [..., M, D] after `fit_features`."""

    weights: Tensor  # [..., n, C] A, or [..., D, C] W
    factor: Tensor  # Cholesky factor of the solved matrix
    quad: Tensor  # [...] sum_c y_c^T (K + lam I)^-1 y_c
    log_det: Tensor  # [...] of K + lam I
    points: Tensor | None = None  # Z [..., n, D] of a dual fit of features
    ridge: Tensor | None = None  # lam [..., 1, 1] of a primal fit

    def mean(self, query: Tensor) -> Tensor:
        """[..., M, C]"""
        return query @ self.weights

    def variance(self, query: Tensor, prior: Tensor | float = 1.0) -> Tensor:
        """Variance of the process at each query, in units of a^2, without noise; `prior` is k(x, x).  [..., M]"""
        if self.points is not None:
            prior = (query**2).sum(-1)
            query = query @ self.points.mT
        explained: Tensor = (solve_triangular(self.factor, query.mT, upper=False) ** 2).sum(-2)  # [..., M]
        if self.ridge is not None:  # lam z^T (Z^T Z + lam I)^-1 z
            return self.ridge.squeeze(-1) * explained
        return (prior - explained).clamp_min(0)  # k(x, x) - k^T (K + lam I)^-1 k

    def log_evidence(self, shots: int, outputs: int, floor: Tensor | float = 0.0) -> Tensor:
        """log p(Y | kernel) at the most likely scale a^2, up to a constant; `floor` keeps a^2 above 0.  [...]"""
        return -0.5 * outputs * self.log_det - 0.5 * shots * outputs * torch.log(self.quad + floor)


def fit_kernel(K: Tensor, Y: Tensor, lam: Tensor) -> Fit:
    """Solve with a kernel matrix K [..., n, n], targets Y [..., n, C] and penalty lam, [...] or a scalar."""
    n = K.shape[-1]
    L = _factor(K + lam[..., None, None] * torch.eye(n, dtype=K.dtype, device=K.device))
    half = solve_triangular(L, Y, upper=False)  # [..., n, C]
    return Fit(solve_triangular(L.mT, half, upper=True), L, (half**2).sum((-1, -2)), _log_det(L))


def fit_features(Z: Tensor, Y: Tensor, lam: Tensor) -> Fit:
    """Solve with K = Z Z^T for features Z [..., n, D], in the smaller of the two spaces."""
    n, D = Z.shape[-2:]
    if n <= D:
        fit = fit_kernel(Z @ Z.mT, Y, lam)
        return fit._replace(weights=Z.mT @ fit.weights, points=Z)
    lam = lam[..., None, None]
    L = _factor(Z.mT @ Z + lam * torch.eye(D, dtype=Z.dtype, device=Z.device))
    right = Z.mT @ Y
    W = torch.cholesky_solve(right, L)  # [..., D, C]
    quad = ((Y**2).sum((-1, -2)) - (right * W).sum((-1, -2))) / lam.squeeze(-1).squeeze(-1)
    log_det = _log_det(L) + (n - D) * lam.log().squeeze(-1).squeeze(-1)
    return Fit(W, L, quad, log_det, ridge=lam)


def _factor(A: Tensor) -> Tensor:
    L, failed = cholesky_ex(A)
    factor: Tensor = L.masked_fill(failed[..., None, None] > 0, torch.nan)
    return factor


def _log_det(L: Tensor) -> Tensor:
    return 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
