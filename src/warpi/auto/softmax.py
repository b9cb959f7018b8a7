"""Softmax regression on soft labels, with cross-fitted predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import logsumexp

from warpi.auto.modules import Linear
from warpi.auto.rows import Floats, Ints, Matrix

CLIP = 6.0  # standard deviations
STEPS = 200


@dataclass(eq=False)
class FittedSoftmax:
    """Coefficients and predictions."""

    mean: Floats
    scale: Floats
    coefficients: Floats  # [D + 1, K], the intercept last
    p: Floats  # [M, K] of all rows: by a model of the other folds for rows with a positive weight

    def module(self) -> Linear:
        return Linear(self.mean, self.scale, self.coefficients[:-1], self.coefficients[-1], CLIP)


def fit_softmax(x: Matrix, q: Floats, weight: Floats, folds: Ints, c: float = 1.0) -> FittedSoftmax:
    """Minimize sum_i weight_i CE(q_i, p_i) + |W|^2 / (2 c) on all rows, then again without each fold.

    Rows of weight 0 are only predicted. The problem is convex, so a warm start does not let a fold see its own labels.
    """
    used = np.flatnonzero(weight > 0)
    z, mean, scale = standardize(x, used)
    start = np.zeros((z.shape[1] + 1, q.shape[1]))
    whole = minimize_loss(z[used], q[used], weight[used], c, start)
    p = predict(z, whole)
    for fold in np.unique(folds[used]):
        inside = folds == fold
        train = used[~inside[used]]
        if len(train):
            tested = used[inside[used]]
            p[tested] = predict(z[tested], minimize_loss(z[train], q[train], weight[train], c, whole))
    return FittedSoftmax(mean, scale, whole, p)


def standardize(x: Matrix, used: Ints) -> tuple[Matrix, Floats, Floats]:
    """Columns with mean 0 and standard deviation 1 over the used rows. Sparse columns are only scaled."""
    if sparse.issparse(x):
        square = np.asarray(x[used].multiply(x[used]).mean(axis=0)).ravel()
        scale = np.sqrt(square)
        scale[scale < 1e-9] = 1
        z = sparse.csr_array(x / scale)
        z.data = np.clip(z.data, -CLIP, CLIP)
        return z, np.zeros(x.shape[1]), scale
    mean = x[used].mean(axis=0, dtype=np.float64)
    scale = x[used].std(axis=0, dtype=np.float64)
    scale[scale < 1e-9 * (1 + np.abs(mean))] = 1
    return np.clip((x - mean) / scale, -CLIP, CLIP), mean, scale


def predict(z: Matrix, coefficients: Floats) -> Floats:
    logits = z @ coefficients[:-1] + coefficients[-1]
    return np.asarray(np.exp(logits - logsumexp(logits, axis=1, keepdims=True)))


def minimize_loss(z: Matrix, q: Floats, weight: Floats, c: float, start: Floats) -> Floats:
    """L-BFGS on the weighted cross-entropy with an L2 penalty on everything but the intercept."""
    shape = start.shape
    targets = weight[:, None] * q

    def loss(flat: Floats) -> tuple[float, Floats]:
        coefficients = flat.reshape(shape)
        logits = z @ coefficients[:-1] + coefficients[-1]
        log_p = logits - logsumexp(logits, axis=1, keepdims=True)
        residual = weight[:, None] * np.exp(log_p) - targets
        penalized = coefficients.copy()
        penalized[-1] *= 1e-3  # almost free, so that the solution is unique
        gradient = np.concatenate([z.T @ residual, residual.sum(0)[None]]) + penalized / c
        value = -(targets * log_p).sum() + 0.5 * (penalized * coefficients).sum() / c
        return float(value), gradient.ravel()

    options = {"maxiter": STEPS, "maxcor": 20, "ftol": 1e-7, "gtol": 1e-4 * max(1.0, weight.sum() / 100)}
    solution = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return np.asarray(solution.x.reshape(shape))
