"""The rows that `fit_auto` learns from, and how they are weighted and split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import chdtrc

from warpi.errors import UserError

Matrix = Any
"""A float32 array [N, D] or a scipy csr_array of that shape."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_ERRORS = 4.0  # standard errors by which two estimates of the size of a class may differ
LIKE_ALL = 0.1  # p-value above which the given labels of trusted rows are like those of all rows


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
    before_audit: Ints | None = None
    """[N] labels of the noisy rows that an audit replaced, -1 for other rows; None if it replaced none."""
    marks: Ints | None = None
    """[D] for each column, the one whose positive numbers mark its missing cells, -1 without; None if none has one."""
    checked: NDArray[np.bool_] | None = None
    """[N] noisy rows whose label a person has checked. They were not drawn at random, so they test nothing."""

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


def take_noisy(rows: Rows, chosen: Ints) -> Rows:
    """The same rows with only some of the noisy ones."""
    before = None if rows.before_audit is None else rows.before_audit[chosen]
    checked = None if rows.checked is None else rows.checked[chosen]
    return replace(rows, x=rows.x[chosen], given=rows.given[chosen], before_audit=before, checked=checked)


def multiply_columns(rows: Rows, wide: Floats, selected: bool) -> Rows:
    """The same rows with x @ wide. Marks of missing cells remain if `wide` selects columns, among the selected ones."""
    marks = None
    if rows.marks is not None and selected:
        kept = wide.argmax(0)
        position = np.full(len(wide) + 1, -1)  # the last one belongs to columns without a mark
        position[kept] = np.arange(len(kept))
        marks = position[rows.marks[kept]]
    return replace(rows, x=rows.x @ wide, x_trusted=rows.x_trusted @ wide, marks=marks)


def undo_audit(rows: Rows) -> Rows:
    """The rows with the labels that an audit replaced, which most models learn from.

    The new labels are predictions of an earlier model. A model that learns from them repeats its mistakes. They also
    depend on the trusted rows, so models that are tested on trusted rows must not learn from them.
    """
    if rows.before_audit is None:
        return rows
    given = np.where(rows.before_audit >= 0, rows.before_audit, rows.given)
    return replace(rows, given=given, given_trusted=None, before_audit=None)  # `given_trusted` are also corrected


def one_hot(labels: Ints, n_classes: int) -> Floats:
    encoded = np.zeros((len(labels), n_classes))
    encoded[np.arange(len(labels)), labels] = 1
    return encoded


def join_rows(*blocks: Matrix) -> Matrix:
    """Stack matrices on top of each other, dense or sparse."""
    if any(sparse.issparse(block) for block in blocks):
        return sparse.csr_array(sparse.vstack(blocks, format="csr"))
    return np.ascontiguousarray(np.concatenate(blocks), dtype=np.float32)


def trusted_importance(class_sizes: Floats | Ints, truth: Ints) -> Floats:
    """The weight of each trusted row, with mean 1, given the approximate number of noisy rows of each class.

    Trusted rows are often drawn class by class. The weight is the share of a class among all rows, divided by
    its share among the trusted rows, so that weighted means over trusted rows stand for all rows.
    """
    if not len(truth):
        return np.zeros(0)
    weight = (class_sizes[truth] + 1) / np.bincount(truth)[truth]
    return np.asarray(weight / weight.mean(), dtype=np.float64)


def weigh_trusted(class_sizes: Floats | Ints, truth: Ints, given_trusted: Ints | None, given: Ints) -> Floats:
    """The weight of each trusted row, with mean 1, so that weighted means over trusted rows stand for all rows.

    If the trusted rows were drawn without looking at their classes, each stands for the rows with its given label,
    whose number is known. Otherwise it stands for the rows of its class, and `class_sizes` are estimates: they exceed
    the truth for classes that the model prefers, in which it is right more often. If the given labels imply sizes that
    differ far more from these than by chance, the trusted rows were drawn class by class.
    """
    by_class = trusted_importance(class_sizes, truth)
    if given_trusted is None or not _drawn_by_given(truth, given_trusted, given, len(class_sizes)):
        return by_class
    by_given = trusted_importance(np.bincount(given, minlength=len(class_sizes)), given_trusted)
    n = len(truth)
    shares = (np.bincount(truth, by_given, minlength=len(class_sizes)) + 1) / (n + len(class_sizes))
    error = np.sqrt(shares * (1 - shares) * np.square(by_given).mean() / n)
    too_different = np.abs(class_sizes / class_sizes.sum() - shares) > MOST_ERRORS * error
    return by_class if too_different.any() else by_given


def _drawn_by_given(truth: Ints, given_trusted: Ints, given: Ints, n_classes: int) -> bool:
    """Whether trusted rows were probably drawn from all rows, or the same number of each given label.

    If most classes have the largest number of trusted rows, the same number of each class was drawn.
    """
    if not len(truth) or not len(given) or (given_trusted < 0).any():
        return False
    by_class = np.bincount(truth, minlength=n_classes)
    if 2 * (by_class == by_class.max()).sum() > n_classes:
        return False
    by_given = np.bincount(given_trusted, minlength=n_classes)
    if by_given.max() - by_given.min() <= 1:
        return True
    expected = np.bincount(given, minlength=n_classes) * len(truth) / len(given)
    statistic = float((np.square(by_given - expected) / np.maximum(expected, 1e-9)).sum())
    return float(chdtrc(n_classes - 1, statistic)) > LIKE_ALL


def assign_folds(labels: Ints, n_folds: int, rng: np.random.Generator, aligned: bool = False) -> Ints:
    """Give each row a fold, so that each class is spread evenly.

    A class starts where the one before it ended. With `aligned`, classes with at least `n_folds` rows start at fold 0,
    so that a fold removes as many rows of one class as of another of the same size.
    """
    folds = np.empty(len(labels), dtype=np.int64)
    start = 0
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        first = 0 if aligned and len(members) >= n_folds else start
        folds[members] = (first + np.arange(len(members))) % n_folds
        start += len(members)
    return folds
