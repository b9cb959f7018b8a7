"""The candidates of `auto` that are fitted once, before gold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from warpi.auto.budget import GOLD_FITS, NO_TIME
from warpi.auto.models import Fitted, Plan, fit_model, fit_neighbors, model_name
from warpi.auto.problem import Clock, Column, OutOfTimeError, Problem
from warpi.auto.rows import Floats
from warpi.auto.transition import confident_class
from warpi.errors import first_line

HEAVY = 10.0  # weight of a trusted row in the candidate "trusted x10"
AGREEING = ", agreeing rows"  # ends of the names of candidates
ALONE = ", trusted only"

Report = Callable[[str], None]


def fit_base(
    problem: Problem,
    models: Sequence[Any],
    plan: Plan,
    clock: Clock,
    report: Report,
    known: Sequence[Column] = (),
    without: Collection[str] = (),
    repeats: int = 0,
) -> tuple[list[Column], dict[str, str]]:
    """The candidates that are fitted once, and why others are left out.

    With many rows no candidate is pruned, and none repeats trusted rows. With a budget the plain models come first,
    then those of trusted rows, then time is reserved for gold: the other candidates improve the mixture less.
    """
    base = CandidateFitter(problem, plan, clock, report, known, without, repeats)
    if clock.budget is not None:
        for model in models:
            base.add(model_name(model), model)
        for model in models:
            base.add(f"{model_name(model)}{ALONE}", model, problem.weights(0.0, 1.0))
        base.reserve_gold(choose_for_gold(problem, models, plan, base.columns))
    for model in models:
        name = model_name(model)
        whole = base.add(name, model)
        if not (plan.large and model == "boosting" and len(models) > 1):  # slow, and rarely the best for few rows
            base.add(f"{name}{ALONE}", model, problem.weights(0.0, 1.0))
        if whole is not None and not plan.large:
            kept = keep_confident(problem.noisy(whole.p), problem)
            base.add(f"{name}, pruned", model, problem.weights(kept, 1.0))
        if model == "forest" and not plan.large:
            base.add(f"{name}, trusted x10", model, problem.weights(1.0, HEAVY), weighted_draw=True)
    if problem.n_noisy and not plan.large:
        model = "forest" if "forest" in models else best_plain_model(problem, models, base.columns)
        name = f"{model_name(model)}{AGREEING}"
        if not base.admits(name, model):
            return base.columns, base.left_out
        predictions = [column.p for column in base.columns if column.name in map(model_name, models)]
        neighbors = vote_of_neighbors(problem, problem.weights(1.0, 1.0), plan)
        kept = keep_agreeing([*predictions, neighbors], problem)
        base.add(name, model, problem.weights(kept, 1.0))
    return base.columns, base.left_out


@dataclass(eq=False)
class CandidateFitter:
    """Fits candidates while there is time, and collects them."""

    problem: Problem
    plan: Plan
    clock: Clock
    report: Report
    known: Sequence[Column] = ()
    without: Collection[str] = ()
    repeats: int = 0
    reserved: float = 0.0  # seconds for gold
    columns: list[Column] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, model: Any, weight: Floats | None = None, **how: Any) -> Column | None:
        """Fit a candidate with these weights of the rows (None: equal ones); returns None if it is left out."""
        earlier = [column for column in self.columns if column.name == name]
        if earlier:
            return earlier[0]
        known = [column for column in self.known if column.name == name]
        if known:
            self.columns.extend(known)
            return known[0]
        if not self.admits(name, model, plain=weight is None):
            return None
        self.report(name)
        self.clock.lap()
        self.clock.enforced = bool(self.columns)
        rows = self.problem.weights(1.0, 1.0) if weight is None else weight
        try:
            fitted = fit_model(model, self.problem.x, self.problem.labels, rows, self.plan, **how)
        except OutOfTimeError:
            if self.clock.budget is None:
                raise
            self.left_out[name] = NO_TIME
            return None
        except ValueError as e:  # for example more neighbors than trusted rows
            if weight is None:
                raise
            self.left_out[name] = f"left out: {first_line(e)}"
            return None
        column = Column(name, fitted.p, self.clock.lap(), name.endswith(ALONE), fitted.module)
        column.predict = fitted.predict
        if weight is None:
            column.refit = partial(fit_plain, model)
        self.columns.append(column)
        if not column.trusted_only and weight is not None:
            self.reserved += self.repeats * column.seconds
        return column

    def admits(self, name: str, model: Any, plain: bool = False) -> bool:
        """Whether there is time for a candidate. Plain models are tried while there is any."""
        if name in self.without or name in self.left_out:
            return False
        needed = 0.0 if plain else self.reserved + self.expect(model, name.endswith(ALONE))
        if self.columns and self.clock.left() <= needed:
            self.left_out[name] = NO_TIME
            return False
        return True

    def expect(self, model: Any, alone: bool = False) -> float:
        """About how many seconds a candidate takes, with its repetitions. Models of trusted rows are not repeated."""
        longest = max((column.seconds for column in self.columns), default=0.0)
        seconds = next((column.seconds for column in self.columns if column.name == model_name(model)), longest)
        share = self.problem.n_trusted / (self.problem.n_noisy + self.problem.n_trusted)
        return float(seconds * np.sqrt(share) if alone else seconds * (1 + self.repeats))

    def reserve_gold(self, models: Sequence[Any]) -> None:
        """Keep time for the first of the models to take part in gold, as many as fit; leave out the others."""
        for number, model in enumerate(models):
            seconds = GOLD_FITS * self.expect(model)
            if self.clock.left() <= self.reserved + seconds:
                self.left_out |= {f"gold {model_name(late)}": NO_TIME for late in models[number:]}
                return
            self.reserved += seconds


def fit_plain(model: Any, problem: Problem, _posterior: Floats, plan: Plan) -> Fitted:
    """Fit a model on all rows with their labels as they are."""
    return fit_model(model, problem.x, problem.labels, problem.weights(1.0, 1.0), plan)


def keep_confident(p: Floats, problem: Problem) -> Floats:
    """1 for noisy rows to keep, 0 for rows that confidently belong to another class."""
    confident = confident_class(p, problem.given)
    return np.where((confident >= 0) & (confident != problem.given), 0.0, 1.0)


def vote_of_neighbors(problem: Problem, weight: Floats, plan: Plan) -> Floats:
    """Predictions [M, K] by the nearest neighbors of each row."""
    dense = problem.x if plan.projection is None else np.asarray(problem.x @ plan.projection, dtype=np.float32)
    return fit_neighbors(dense, problem.labels, weight)[0]


def keep_agreeing(predictions: Sequence[Floats], problem: Problem) -> Floats:
    """1 for noisy rows whose given label is the prediction of every model, otherwise 0.

    Models of different kinds rarely make the same mistake, so the labels of these rows are right more often than those
    that one model alone would keep. It helps most if mistakes depend on the row.
    """
    votes = np.stack([problem.noisy(p).argmax(1) for p in predictions])
    return np.asarray((votes == problem.given).all(0), dtype=np.float64)


def choose_for_gold(problem: Problem, models: Sequence[Any], plan: Plan, base: list[Column]) -> Sequence[Any]:
    """The models of gold: all of them, but the best one alone if the columns are directions."""
    return models if plan.c is None else [best_plain_model(problem, models, base)]


def best_plain_model(problem: Problem, models: Sequence[Any], base: list[Column]) -> Any:
    """The model whose cross-fitted predictions agree most often with the given labels."""
    names = [column.name for column in base]

    def agreement(model: Any) -> float:
        if model_name(model) not in names:  # left out
            return -1.0
        column = base[names.index(model_name(model))]
        return float((problem.noisy(column.p).argmax(1) == problem.given).mean())

    return max(models, key=agreement)
