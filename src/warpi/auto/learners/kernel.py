"""Kernel ridge regression on soft labels, with leave-one-out predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg

from warpi.auto.learners.modules import Kernel
from warpi.auto.learners.softmax import CLIP, mean_and_scale
from warpi.auto.rows import Floats, Ints

LANDMARKS = 500
PENALTIES = (0.3, 1.0, 3.0, 10.0)
LEAST = 1e-3  # probability, before the probabilities of a row are scaled to sum 1
JITTER = 1e-8  # rows may be equal


@dataclass(eq=False)
class FittedKernel:
    """The function f(x) = intercept + sum_j coefficients_j k(x, point_j), and its predictions."""

    mean: Floats
    scale: Floats
    points: Floats  # [m, D] standardized landmarks
    width: float  # of the Gaussian kernel k
    coefficients: Floats  # [m, K]
    intercept: Floats  # [K]
    p: Floats  # [M, K] of all rows: leave-one-out for rows with a positive weight

    def predict(self, x: Floats) -> Floats:
        """Probabilities of other rows."""
        z = standardize(x, self.mean, self.scale)
        return to_probabilities(self.intercept + gaussian(z, self.points, self.width) @ self.coefficients)

    def module(self) -> Kernel:
        return Kernel(
            self.mean, self.scale, self.points, self.width, self.coefficients, self.intercept, limit=CLIP, least=LEAST
        )


def fit_kernel(
    x: Floats, q: Floats, weight: Floats, seed: int, scaled: bool = False, check: Callable[[], None] | None = None
) -> FittedKernel:
    """Minimize sum_i weight_i |q_i - f(x_i)|^2 + penalty |f|^2. Rows of weight 0 are only predicted.

    f lies in the span of the kernel at the landmarks, which are at most 500 of the rows. The penalty is the one with
    the smallest leave-one-out error. With `scaled` the scale of a column says how much it matters.
    """
    used = np.flatnonzero(weight > 0)
    mean, scale = mean_and_scale(x[used])
    width = float(np.sqrt(max(1, (x[used].min(axis=0) < x[used].max(axis=0)).sum())))
    if scaled:
        scale = np.full_like(scale, np.sqrt(np.mean(x[used].var(axis=0, dtype=np.float64)) or 1.0))
    points = standardize(x[draw_landmarks(used, seed)], mean, scale)
    factor = np.linalg.cholesky(gaussian(points, points, width) + JITTER * len(points) * np.eye(len(points)))
    row_weight = weight[used] / weight[used].mean()
    prior = np.average(q[used], axis=0, weights=row_weight)
    z = standardize(x[used], mean, scale)
    features = linalg.solve_triangular(factor, gaussian(points, z, width), lower=True).T
    features = np.concatenate([features, np.ones((len(used), 1))], axis=1)
    beta, left_out = fit_ridge(features, q[used] - prior, row_weight, check)
    coefficients = linalg.solve_triangular(factor, beta[:-1], trans="T", lower=True)
    fitted = FittedKernel(mean, scale, points, width, coefficients, prior + beta[-1], np.empty_like(q))
    fitted.p[used] = to_probabilities(prior + left_out)
    others = np.flatnonzero(weight <= 0)
    fitted.p[others] = fitted.predict(x[others])
    return fitted


def draw_landmarks(used: Ints, seed: int) -> Ints:
    if len(used) <= LANDMARKS:
        return used
    return np.sort(np.random.default_rng([seed, 17]).choice(used, LANDMARKS, replace=False))


def fit_ridge(
    features: Floats, y: Floats, weight: Floats, check: Callable[[], None] | None = None
) -> tuple[Floats, Floats]:
    """Coefficients [F, K] with the best penalty, and the prediction [n, K] of each row without that row.

    A row's residual without the row is its residual divided by 1 - h, where h is its leverage.
    """
    if check is not None:
        check()
    values, vectors = np.linalg.eigh((features * weight[:, None]).T @ features)
    rotated = features @ vectors
    target = rotated.T @ (weight[:, None] * y)
    best = (np.inf, vectors, y)
    for penalty in PENALTIES:
        if check is not None:
            check()
        shrunk = 1 / (np.maximum(values, 0) + penalty)
        beta = shrunk[:, None] * target
        leverage = weight * (np.square(rotated) @ shrunk)
        residual = (y - rotated @ beta) / (1 - leverage)[:, None]
        error = float(weight @ np.square(residual).sum(1))
        if error < best[0]:
            best = (error, vectors @ beta, y - residual)
    return best[1], best[2]


def standardize(x: Floats, mean: Floats, scale: Floats) -> Floats:
    return np.asarray(np.clip((x - mean) / scale, -CLIP, CLIP), dtype=np.float64)


def gaussian(a: Floats, b: Floats, width: float) -> Floats:
    """exp(-|a_i - b_j|^2 / (2 width^2)) [A, B]."""
    distance = np.square(a).sum(1)[:, None] + np.square(b).sum(1) - 2 * a @ b.T
    return np.asarray(np.exp(-np.maximum(distance, 0) / (2 * width**2)))


def to_probabilities(f: Floats) -> Floats:
    p = np.maximum(f, LEAST)
    return np.asarray(p / p.sum(1, keepdims=True))
