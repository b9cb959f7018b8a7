"""What one pass of the procedure works on: all rows in one matrix, and columns of predictions for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray
from torch import nn

from warpi.auto.combine import SMOOTH, calibrate, mix, pool, scale_classes, sharpen, smooth
from warpi.auto.learners.modules import Mixture, Node
from warpi.auto.models import Fitted, Plan
from warpi.auto.rows import Floats, Ints, Matrix, Rows, join_rows, one_hot, trusted_importance


@dataclass(frozen=True, eq=False)
class Problem:
    """Noisy rows first, then trusted rows, then trusted rows that are held out and only predicted."""

    x: Matrix  # [M, D]
    given: Ints  # [N]
    truth: Ints  # [n]
    given_trusted: Ints | None  # [n]
    importance: Floats  # [n] weights of the trusted rows, mean 1
    checked: NDArray[np.bool_]  # [N] noisy rows whose given label is known to be right
    n_classes: int

    @property
    def n_noisy(self) -> int:
        return len(self.given)

    @property
    def n_trusted(self) -> int:
        return len(self.truth)

    @property
    def labels(self) -> Floats:
        """One-hot labels [M, K]: given ones, then true ones; zeros for held-out rows."""
        labels = np.zeros((self.x.shape[0], self.n_classes))
        known = np.concatenate([self.given, self.truth])
        labels[: len(known)] = one_hot(known, self.n_classes)
        return labels

    def weights(self, noisy: Floats | float, trusted: float, by_class: bool = False) -> Floats:
        """Row weights [M]; held-out rows have weight 0.

        Noisy rows that were checked have the weight of a trusted row. With `by_class`, trusted rows have `importance`.
        """
        weight = np.zeros(self.x.shape[0])
        weight[: self.n_noisy] = np.where(self.checked, trusted, noisy)
        weight[self.n_noisy : self.n_noisy + self.n_trusted] = trusted * (self.importance if by_class else 1.0)
        return weight

    def noisy(self, p: Floats) -> Floats:
        return p[: self.n_noisy]

    def trusted(self, p: Floats) -> Floats:
        return p[self.n_noisy : self.n_noisy + self.n_trusted]

    def held_out(self, p: Floats) -> Floats:
        return p[self.n_noisy + self.n_trusted :]


def pose_problem(rows: Rows, held_out: Ints | None = None) -> Problem:
    """The problem without the trusted rows `held_out`, which are predicted only."""
    out = np.zeros(rows.n_trusted, dtype=bool)
    if held_out is not None:
        out[held_out] = True
    truth = rows.y_trusted[~out]
    return Problem(
        x=join_rows(rows.x, rows.x_trusted[np.flatnonzero(~out)], rows.x_trusted[np.flatnonzero(out)]),
        given=rows.given,
        truth=truth,
        given_trusted=None if rows.given_trusted is None else rows.given_trusted[~out],
        importance=trusted_importance(np.bincount(rows.given, minlength=rows.n_classes), truth),
        checked=np.zeros(rows.n_noisy, dtype=bool) if rows.checked is None else rows.checked,
        n_classes=rows.n_classes,
    )


Refit = Callable[[Problem, Floats, Plan], Fitted]
"""Fits a model again, from a problem, the probabilities [N, K] of the true classes of its noisy rows, and a plan."""


@dataclass(eq=False)
class Column:
    """Cross-fitted predictions of one candidate, and how to predict new rows: a module, or a combination of columns."""

    name: str
    p: Floats  # [M, K]
    seconds: float = 0.0
    trusted_only: bool = False
    module: Callable[[], nn.Module] | None = None
    inputs: list[Column] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    powers: list[float] = field(default_factory=list)
    geometric: bool = False
    factors: Floats | None = None
    """[K] factors of the classes, by which the mixture of `inputs` is multiplied."""
    power: float = 1.0
    """The power that calibrates `p` on trusted rows."""
    predict: Callable[[Matrix], Floats] | None = None
    """Predicts other rows of the problem's columns faster than the module; None for candidates without it."""
    refit: Refit | None = None
    """Fits the same model on other rows; None for candidates that stay as they are."""

    def calibrate(self, problem: Problem) -> Column:
        if problem.n_trusted:
            self.power = calibrate(problem.trusted(self.p), problem.truth, problem.importance)
        return self

    def calibrated(self) -> Floats:
        return sharpen(self.p, self.power)


def predict_by_column(top: Column, x: Matrix) -> Floats | None:
    """What the mixture of a column predicts for rows x of the problem's columns; None if a part has no `predict`."""
    known: dict[int, Floats | None] = {}

    def visit(column: Column) -> Floats | None:
        if id(column) not in known:
            known[id(column)] = compute(column)
        return known[id(column)]

    def compute(column: Column) -> Floats | None:
        if not column.inputs:
            return None if column.predict is None else column.predict(x)
        predictions = [visit(part) for part in column.inputs]
        complete = [p for p in predictions if p is not None]
        if len(complete) < len(predictions):
            return None
        parts = [sharpen(p, power) for p, power in zip(complete, column.powers, strict=True)]
        weights = np.array(column.weights)
        p = smooth(pool(parts, weights), 2 * SMOOTH) if column.geometric else mix(parts, weights)
        return p if column.factors is None else scale_classes(p, column.factors)

    return visit(top)


def build_mixture(top: Column) -> Mixture:
    """The torch module of a column, with every model that it needs once."""
    leaves: list[Column] = []
    combined: list[Column] = []

    def visit(column: Column) -> None:
        if column in leaves or column in combined:
            return
        for part in column.inputs:
            visit(part)
        (combined if column.inputs else leaves).append(column)

    visit(top)
    if not combined:
        combined.append(Column(top.name, top.p, inputs=[top], weights=[1.0], powers=[top.power]))
    order = {id(column): i for i, column in enumerate([*leaves, *combined])}
    nodes = [
        Node(
            [order[id(part)] for part in column.inputs],
            column.weights,
            column.powers,
            column.geometric,
            factors=None if column.factors is None else column.factors.tolist(),
        )
        for column in combined
    ]
    return Mixture([leaf.module() for leaf in leaves if leaf.module], nodes)


class OutOfTimeError(Exception):
    """The budget is used up."""


class Clock:
    """Measures seconds, and says whether more work fits into a budget.

    `tick` is called often during long fits. It can show progress, and it can raise an error to stop the work.
    """

    TICK = 0.2  # seconds between calls of `tick`

    def __init__(self, budget: float | None = None, tick: Callable[[], None] | None = None) -> None:
        self.start = monotonic()
        self.budget = budget
        self.last = self.start
        self.tick = tick
        self.ticked = self.start
        self.enforced = False  # until there is a result to fall back on

    def check(self) -> None:
        """Raise `OutOfTimeError` if no time is left. Cheap enough to be called for every tree or gradient."""
        now = monotonic()
        if self.tick is not None and now - self.ticked >= self.TICK:
            self.ticked = now
            self.tick()
        if self.enforced and self.left() <= 0:
            raise OutOfTimeError

    def lap(self) -> float:
        """Seconds since the last call."""
        now = monotonic()
        seconds, self.last = now - self.last, now
        return seconds

    def extend(self, share: float) -> None:
        """Allow a share of the budget more, to finish what would otherwise be lost."""
        if self.budget is not None:
            self.budget *= 1 + share

    def left(self) -> float:
        return np.inf if self.budget is None else self.budget - (monotonic() - self.start)
