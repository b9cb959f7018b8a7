"""Softmax regression on soft labels, with cross-fitted predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg, sparse
from scipy.optimize import minimize

from warpi.auto.learners.modules import Linear
from warpi.auto.rows import Floats, Ints, Matrix

CLIP = 6.0  # standard deviations
STEPS = 200
TOLERANCE = 1e-6  # relative decrease of the loss
MOST_COLUMNS = 1000  # for which the curvature is factorized
MOST_SPANNED = 2000  # training rows in whose span sparse rows with far more columns are expressed
MANY_COLUMNS = 4  # times the number of these rows


@dataclass(eq=False)
class FittedSoftmax:
    """Coefficients and predictions."""

    mean: Floats
    scale: Floats
    coefficients: Floats  # [D + 1, K], the intercept last
    p: Floats  # [M, K] of all rows: by a model of the other folds for rows with a positive weight
    limit: float = CLIP

    def predict(self, x: Matrix) -> Floats:
        """Probabilities of other rows."""
        z = sparse.csr_array(x / self.scale) if sparse.issparse(x) else (x - self.mean) / self.scale
        if sparse.issparse(z):
            z.data = np.clip(z.data, -self.limit, self.limit)
        else:
            z = np.clip(z, -self.limit, self.limit)
        return predict(z, self.coefficients)

    def module(self) -> Linear:
        return Linear(self.mean, self.scale, self.coefficients[:-1], self.coefficients[-1], self.limit)


def fit_softmax(
    x: Matrix,
    q: Floats,
    weight: Floats,
    folds: Ints,
    c: float = 1.0,
    scaled: bool = False,
    check: Callable[[], None] | None = None,
) -> FittedSoftmax:
    """Minimize sum_i weight_i CE(q_i, p_i) + |W|^2 / (2 c) on all rows, then again without each fold.

    Rows of weight 0 are only predicted. The problem is convex, so a warm start does not let a fold see its own labels.
    `check` is called in every step.
    """
    used = np.flatnonzero(weight > 0)
    z, mean, scale = standardize(x, used)
    if scaled:  # principal directions: their scale says how much they matter
        z, scale = z * scale, np.ones_like(scale)
    span = find_span(z, used)
    if span is not None:
        z = span.coordinates
    scaling = find_scaling(z[used], weight[used], c)
    start = np.zeros((z.shape[1] + 1, q.shape[1]))
    whole = minimize_loss(z[used], q[used], weight[used], c, start, scaling, check)
    p = predict(z, whole)
    for fold in np.unique(folds[used]):
        inside = folds == fold
        train = used[~inside[used]]
        if len(train):
            tested = used[inside[used]]
            without = minimize_loss(z[train], q[train], weight[train], c, whole, scaling, check)
            p[tested] = predict(z[tested], without)
    if span is not None:
        whole = np.concatenate([span.to_columns(whole[:-1]), whole[-1:]])
    return FittedSoftmax(mean, scale, whole, p, 1e9 if scaled else CLIP)


def standardize(x: Matrix, used: Ints) -> tuple[Matrix, Floats, Floats]:
    """Columns with mean 0 and standard deviation 1 over the used rows. Sparse columns are only scaled."""
    if sparse.issparse(x):
        square = np.asarray(x[used].multiply(x[used]).mean(axis=0)).ravel()
        scale = np.sqrt(square)
        scale[scale < 1e-9] = 1
        z = sparse.csr_array(x / scale)
        z.data = np.clip(z.data, -CLIP, CLIP)
        return z, np.zeros(x.shape[1]), scale
    mean, scale = mean_and_scale(x[used])
    return np.clip((x - mean) / scale, -CLIP, CLIP), mean, scale


def mean_and_scale(x: Matrix) -> tuple[Floats, Floats]:
    """Mean and standard deviation of dense columns; 1 for a constant column."""
    mean = x.mean(axis=0, dtype=np.float64)
    scale = x.std(axis=0, dtype=np.float64)
    scale[scale < 1e-9 * (1 + np.abs(mean))] = 1
    return mean, scale


@dataclass(eq=False)
class Span:
    """Rows in coordinates of the space that n training rows Z span: Z Z' = L L', and the training rows become L.

    A penalized linear model of Z has coefficients in this space. Its n coordinates replace far more columns, without
    changing the model.
    """

    rows: Matrix  # Z [n, D]
    factor: Floats  # L [n, n]
    coordinates: Floats  # [M, n] of all rows

    def to_columns(self, coefficients: Floats) -> Floats:
        """Coefficients [n, K] of the coordinates as those of the columns [D, K]."""
        return np.asarray(self.rows.T @ linalg.solve_triangular(self.factor, coefficients, trans="T", lower=True))


def find_span(z: Matrix, used: Ints) -> Span | None:
    """The span of the used rows; None if it does not save time."""
    if not sparse.issparse(z) or len(used) > MOST_SPANNED or z.shape[1] < MANY_COLUMNS * len(used):
        return None
    z = z.astype(np.float64)  # the rounding errors of float32 are larger than what is added to the diagonal
    rows = z[used]
    gram = (rows @ rows.T).toarray()
    gram[np.diag_indices_from(gram)] += 1e-9 * (1 + np.trace(gram) / len(gram))  # rows may be equal
    factor = np.linalg.cholesky(gram)
    products = (z @ rows.T).toarray()
    return Span(rows, factor, linalg.solve_triangular(factor, products.T, lower=True).T)


def predict(z: Matrix, coefficients: Floats) -> Floats:
    return softmax(z @ coefficients[:-1] + coefficients[-1])[0]


def softmax(logits: Floats) -> tuple[Floats, Floats]:
    """Probabilities and log-normalizers [M, 1]."""
    top = logits.max(1, keepdims=True)
    p = np.exp(logits - top)
    total = p.sum(1, keepdims=True)
    p /= total
    return p, top + np.log(total)


def find_scaling(z: Matrix, weight: Floats, c: float) -> Floats | None:
    """A matrix A [D, D] such that the loss as a function of U, with W = A U, has about the same curvature everywhere.

    A A' is the inverse of a bound of the curvature of the loss. L-BFGS needs fewer steps for U than for W.
    """
    if sparse.issparse(z) or z.shape[1] > MOST_COLUMNS:
        return None
    curvature = (z * (0.25 * weight)[:, None]).T @ z
    curvature[np.diag_indices_from(curvature)] += 1 / c
    return np.asarray(np.linalg.inv(np.linalg.cholesky(curvature)).T)


def minimize_loss(
    z: Matrix,
    q: Floats,
    weight: Floats,
    c: float,
    start: Floats,
    scaling: Floats | None,
    check: Callable[[], None] | None = None,
) -> Floats:
    """L-BFGS on the weighted cross-entropy with an L2 penalty on everything but the intercept."""
    shape = start.shape
    targets = weight[:, None] * q
    sums = targets.sum(1)
    scale = np.sqrt(0.25 * weight.sum())  # of the intercept
    penalty = np.full(shape[0], 1 / c)
    penalty[-1] = 1e-3 / c  # almost free, so that the solution is unique

    def to_coefficients(flat: Floats) -> Floats:
        inner = flat.reshape(shape)
        return inner if scaling is None else np.concatenate([scaling @ inner[:-1], inner[-1:] / scale])

    def to_inner(gradient: Floats) -> Floats:
        if scaling is None:
            return gradient.ravel()
        return np.concatenate([scaling.T @ gradient[:-1], gradient[-1:] / scale]).ravel()

    def loss(flat: Floats) -> tuple[float, Floats]:
        if check is not None:
            check()
        coefficients = to_coefficients(flat)
        logits = z @ coefficients[:-1] + coefficients[-1]
        p, normalizer = softmax(logits)
        value = sums @ normalizer[:, 0] - (targets * logits).sum()
        p *= sums[:, None]
        p -= targets
        penalized = penalty[:, None] * coefficients
        gradient = np.concatenate([z.T @ p, p.sum(0)[None]]) + penalized
        return float(value + 0.5 * (penalized * coefficients).sum()), to_inner(gradient)

    first = start.ravel()
    if scaling is not None and start.any():
        first = np.concatenate([np.linalg.solve(scaling, start[:-1]), start[-1:] * scale]).ravel()
    options = {"maxiter": STEPS, "maxcor": 10, "ftol": TOLERANCE, "gtol": 1e-6}
    solution = minimize(loss, first, jac=True, method="L-BFGS-B", options=options)
    return to_coefficients(solution.x)
