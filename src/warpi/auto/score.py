"""The accuracy on trusted rows that were not used for fitting, the noise rate, and their intervals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

from warpi.auto.models import Plan, model_name
from warpi.auto.problem import Clock, Column, OutOfTimeError, pose_problem
from warpi.auto.procedure import run_procedure
from warpi.auto.rows import Floats, Rows, assign_folds
from warpi.functional.intervals import wilson_interval

N_FOLDS = 5
FEW_FOLDS = 3  # with many rows
SPREAD = 2.0  # variance of an accuracy, relative to independent rows; chosen on development tables
RATE_SPREAD = 1.3  # the same for the noise rate
SHARE_OF_TREES = 0.8  # of the trees of the shipped forests; with fewer the accuracy would be too low
MORE_TIME = 0.3  # of the budget
GRACE = 0.3  # seconds after the end of the budget
MANY_ROWS = 3_000  # noisy rows from which the repeated procedures use the plain models of the first one


def predict_nested(
    rows: Rows,
    models: Sequence[Any],
    plan: Plan,
    clock: Clock,
    report: Callable[[str, float], None],
    columns: Sequence[Column] = (),
    without: Collection[str] = (),
) -> dict[str, Floats]:
    """Probabilities [n, K] of trusted rows by candidate name ("auto" is the procedure itself), or {} if time runs out.

    Each fold of trusted rows is held out from everything: the base candidates, calibration, T, gold, the stack and the
    switch. If there are many rows, the models of all rows, which are among the `columns` of the procedure, keep their
    own cross-fitted predictions: they have not seen the rows that they predict, and a few more or fewer trusted rows
    hardly change them. If the budget is short, the models of trusted rows alone keep theirs, too. Candidates in
    `without` are left out, as the budget has left them out of the procedure.
    """
    names = {model_name(model) for model in models}
    hurried = clock.left() < N_FOLDS * sum(column.seconds for column in columns)
    many = rows.n_noisy > MANY_ROWS or hurried
    plain = [column for column in columns if column.name in names or (hurried and column.trusted_only)]
    clock.extend(MORE_TIME)
    rng = np.random.default_rng([plan.seed, 11])
    folds = assign_folds(rows.y_trusted, FEW_FOLDS if many else N_FOLDS, rng, aligned=True)
    numbers = np.unique(folds)
    predicted: dict[str, Floats] = {}
    for done, fold in enumerate(numbers):
        started = clock.left()
        report(f"accuracy on trusted rows, {done + 1} of {len(numbers)}", done / len(numbers))
        out = np.flatnonzero(folds == fold)
        inside = np.flatnonzero(folds != fold)
        order = np.concatenate([np.arange(rows.n_noisy), rows.n_noisy + inside, rows.n_noisy + out])
        problem = pose_problem(rows, out)
        trees = max(1, int(SHARE_OF_TREES * plan.n_trees))
        inner = replace(plan, folds=plan.folds[order], n_trees=trees, seed=plan.seed + 1000 + done)
        clock.enforced = True
        known = [replace(column, p=column.p[order]) for column in plain]
        try:
            outcome = run_procedure(problem, models, inner, Clock(), lambda _: None, known if many else (), without)
        except OutOfTimeError:
            return {}
        for name, column in [*((column.name, column) for column in outcome.columns), ("auto", outcome.final)]:
            predicted.setdefault(name, np.zeros((rows.n_trusted, rows.n_classes)))
            predicted[name][out] = problem.held_out(column.p)
        needed = (started - clock.left()) * (len(numbers) - done - 1)
        if needed > max(clock.left(), GRACE):
            return {}
    return predicted


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its interval, as fractions."""

    estimate: float
    low: float
    high: float
    level: float = 0.9


def accuracy_interval(hits: Floats, importance: Floats, level: float = 0.9) -> Interval:
    """The weighted share of hits with a Wilson interval at the effective number of rows, with a t quantile.

    The number is divided by `SPREAD`, because repeated fits on other rows differ by more than the draw of trusted rows.
    """
    n = len(hits)
    estimate = float(importance @ hits / importance.sum())
    effective = effective_number(importance) / SPREAD
    quantile = t_quantile(n, level)
    low, high = wilson_interval(estimate, effective, quantile)
    return Interval(estimate, low, high, level)


def t_quantile(n: int, level: float) -> float:
    return float(stdtrit(max(n - 1, 1), (1 + level) / 2))


def effective_number(importance: Floats) -> float:
    """The number of rows of equal weight whose mean has the same variance."""
    return float(importance.sum() ** 2 / np.square(importance).sum())


def share_error(hits: Floats, importance: Floats) -> float:
    """The standard error of a weighted share of hits, each 0 or 1.

    Two hits and two misses are added, as Agresti and Coull do, so that a perfect score of a few rows has an error too.
    """
    if len(hits) < 2:
        return float("nan")
    n = effective_number(importance)
    share = (n * float(importance @ hits / importance.sum()) + 2) / (n + 4)
    return float(np.sqrt(share * (1 - share) / n))


def noise_rate_interval(
    wrong: Floats, wrong_trusted: Floats, differs: Floats, importance: Floats, level: float = 0.9
) -> Interval:
    """The prediction-powered interval of the share of wrong given labels.

    `wrong` [N] and `wrong_trusted` [n] are a model's probabilities that a given label is wrong, made in the same way
    for both. `differs` [n] says whether the given label of a trusted row was wrong. The model's mean over noisy rows
    is corrected by its mean error on trusted rows, so the estimate is right even if the model is not.
    """
    n = len(differs)
    weight = importance / importance.sum()
    residual = differs - wrong_trusted
    estimate = float(wrong.mean() + weight @ residual)
    center = weight @ residual
    plain = weight @ differs
    effective = effective_number(importance)
    spread = (n * (weight @ np.square(residual - center)) + 2 * max(plain * (1 - plain), 0.25 / (n + 1))) / (n + 2)
    half = t_quantile(n, level) * np.sqrt(RATE_SPREAD * spread * (1 / effective + 1 / len(wrong)))  # both are samples
    middle, low, high = np.clip([estimate, estimate - half, estimate + half], 0, 1)
    return Interval(float(middle), float(low), float(high), level)
