"""Ridge regression in closed form, batched: in the kernel's matrix, or in the features where these are fewer.

    dual    (K + lam I) A = Y,          prediction k(x)^T A           K = Z Z^T, n x n
    primal  (Z^T Z + lam I) W = Z^T Y,  prediction z(x)^T W           D x D; W = Z^T A

It is the mean of a Gaussian process y ~ N(0, a^2 (K + lam I)), so that a fit also knows how likely its labels were and
how sure it is. Factorisations wait for nothing (`cholesky_ex`), so that they can be part of a CUDA graph; a matrix that
has none, which ill-conditioned ones may come to in float32, gives NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import cholesky_ex, solve_triangular


class Fit(NamedTuple):
    """A ridge solution. Queries come as kernel rows [..., M, n], or as features [..., M, D] (`fit_features`)."""

    weights: Tensor  # [..., n, C] A, or [..., D, C] W
    factor: Tensor  # the Cholesky factor of the matrix that was solved with
    quad: Tensor  # [...] sum_c y_c^T (K + lam I)^-1 y_c
    log_det: Tensor  # [...] of K + lam I
    points: Tensor | None = None  # Z [..., n, D] of a dual fit of features
    ridge: Tensor | None = None  # lam [..., 1, 1] of a primal fit

    def mean(self, query: Tensor) -> Tensor:
        """[..., M, C]"""
        return query @ self.weights

    def variance(self, query: Tensor, prior: Tensor | float = 1.0) -> Tensor:
        """Of the process at each query, in units of a^2, without noise; `prior` is k(x, x) of a kernel.  [..., M]"""
        if self.points is not None:
            prior, query = (query**2).sum(-1), query @ self.points.mT
        seen: Tensor = (solve_triangular(self.factor, query.mT, upper=False) ** 2).sum(-2)  # [..., M]
        if self.ridge is not None:  # lam z^T (Z^T Z + lam I)^-1 z
            return self.ridge.squeeze(-1) * seen
        return (prior - seen).clamp_min(0)  # k(x, x) - k^T (K + lam I)^-1 k

    def log_evidence(self, shots: int, outputs: int, floor: Tensor | float = 0.0) -> Tensor:
        """log p(Y | kernel), up to a constant, at the scale a^2 that suits it best (floor keeps a^2 from 0).  [...]"""
        return -0.5 * outputs * self.log_det - 0.5 * shots * outputs * torch.log(self.quad + floor)


def fit_kernel(K: Tensor, Y: Tensor, lam: Tensor) -> Fit:
    """K [..., n, n], Y [..., n, C], lam [...] or a scalar."""
    n = K.shape[-1]
    L = _factor(K + lam[..., None, None] * torch.eye(n, dtype=K.dtype, device=K.device))
    half = solve_triangular(L, Y, upper=False)  # [..., n, C]
    return Fit(solve_triangular(L.mT, half, upper=True), L, (half**2).sum((-1, -2)), _log_det(L))


def fit_features(Z: Tensor, Y: Tensor, lam: Tensor) -> Fit:
    """The same with K = Z Z^T of features Z [..., n, D], solved in the smaller of the two spaces."""
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
    known: Tensor = L.masked_fill(failed[..., None, None] > 0, torch.nan)
    return known


def _log_det(L: Tensor) -> Tensor:
    return 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
