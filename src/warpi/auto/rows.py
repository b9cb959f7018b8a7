"""The rows that `fit_auto` learns from, and how they are weighted and split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from warpi.errors import UserError

Matrix = Any
"""A float32 array [N, D] or a scipy csr_array of that shape."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows whose labels may be wrong, and rows whose labels are right. Labels are 0, ..., n_classes - 1."""

    x: Matrix
    given: Ints
    x_trusted: Matrix
    y_trusted: Ints
    given_trusted: Ints | None
    """The labels of the trusted rows before they were checked; -1 if unknown."""
    n_classes: int

    @property
    def n_noisy(self) -> int:
        return len(self.given)

    @property
    def n_trusted(self) -> int:
        return len(self.y_trusted)


def check_rows(rows: Rows) -> None:
    """Raise an error unless the arrays fit together and every number is finite."""
    for name, x, labels in (("noisy", rows.x, rows.given), ("trusted", rows.x_trusted, rows.y_trusted)):
        if x.shape[0] != len(labels):
            raise UserError(f"there are {x.shape[0]} {name} rows but {len(labels)} labels; pass one label per row")
        values = x.data if sparse.issparse(x) else x
        if not np.isfinite(values).all():
            raise UserError(f"the {name} rows contain NaN or infinite numbers; fill or remove them first")
        if len(labels) and not (labels.min() >= 0 and labels.max() < rows.n_classes):
            raise UserError(f"labels of the {name} rows must be 0 to {rows.n_classes - 1}")
    if rows.n_noisy + rows.n_trusted == 0:
        raise UserError("there is no row to learn from")
    if rows.n_trusted and rows.n_noisy and rows.x.shape[1] != rows.x_trusted.shape[1]:
        raise UserError(
            f"noisy rows have {rows.x.shape[1]} columns, trusted rows {rows.x_trusted.shape[1]}; they must match"
        )


def one_hot(labels: Ints, n_classes: int) -> Floats:
    encoded = np.zeros((len(labels), n_classes))
    encoded[np.arange(len(labels)), labels] = 1
    return encoded


def join_rows(*blocks: Matrix) -> Matrix:
    """Stack matrices on top of each other, dense or sparse."""
    if any(sparse.issparse(block) for block in blocks):
        return sparse.csr_array(sparse.vstack(blocks, format="csr"))
    return np.ascontiguousarray(np.concatenate(blocks), dtype=np.float32)


def trusted_importance(given: Ints, truth: Ints, n_classes: int) -> Floats:
    """The weight of each trusted row, with mean 1.

    Trusted rows are often drawn class by class. The weight is the share of a class among the given labels, divided by
    its share among the trusted rows, so that weighted means over trusted rows stand for all rows.
    """
    if not len(truth):
        return np.zeros(0)
    share = np.bincount(given, minlength=n_classes) + 1.0
    weight = share[truth] / np.bincount(truth, minlength=n_classes)[truth]
    return np.asarray(weight / weight.mean(), dtype=np.float64)


def assign_folds(labels: Ints, n_folds: int, rng: np.random.Generator) -> Ints:
    """Give each row a fold, so that each class is spread evenly. Rare classes start at different folds."""
    folds = np.empty(len(labels), dtype=np.int64)
    start = 0
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        folds[members] = (start + np.arange(len(members))) % n_folds
        start += len(members)
    return folds
