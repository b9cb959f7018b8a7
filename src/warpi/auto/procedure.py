"""One pass of the whole procedure: base candidates, a first stack, gold, the final stack, and the switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from warpi.auto.combine import drop_small, mix, pick, stack_weights
from warpi.auto.gold import fit_gold
from warpi.auto.models import Plan, fit_model, model_name
from warpi.auto.problem import Clock, Column, Problem
from warpi.auto.rows import Floats
from warpi.auto.transition import diagonal_prior, transition_prior

HEAVY = 10.0  # weight of a trusted row in the candidate "trusted x10"
FIRST_PRIOR = 5.0
FINAL_PRIOR = 10.0
GOLD_SHARE = 0.5
SWITCH_AT = 0.5  # standard errors

Report = Callable[[str], None]


@dataclass(eq=False)
class Outcome:
    """What one pass found."""

    final: Column
    columns: list[Column]
    transition: Floats
    prior: Floats
    reason: str
    left_out: dict[str, str] = field(default_factory=dict)


def run_procedure(
    problem: Problem, models: Sequence[Any], plan: Plan, clock: Clock, extra: Sequence[Column], report: Report
) -> Outcome:
    """Fit all candidates and combine them. The problem has at least one trusted row."""
    base, left_out = fit_base(problem, models, plan, clock, report)
    base = [column.calibrate(problem) for column in [*base, *extra]]
    first = stack_first(problem, base)
    plain = [column.p for column in base if column.name in map(model_name, models)]
    prior = transition_prior(
        problem.trusted(np.mean(plain, axis=0)), problem.truth, problem.given_trusted, problem.n_classes
    )
    clock.lap()
    report("gold")
    gold, transition = fit_gold(problem, models, first.p, prior, plan)
    gold.seconds = clock.lap()
    columns = [*base, first.calibrate(problem), gold.calibrate(problem)]
    final = stack_final(problem, columns, transition)
    better = find_better_trusted(problem, base, gold)
    if better is None:
        reason = explain_mixture(final)
    else:
        final = better
        reason = f'"{better.name}" alone, because it beats the models of the noisy rows on trusted rows'
    return Outcome(final, columns, transition, prior, reason, left_out)


def fit_base(
    problem: Problem, models: Sequence[Any], plan: Plan, clock: Clock, report: Report
) -> tuple[list[Column], dict[str, str]]:
    """The candidates that are fitted once. What does not fit into the budget is left out."""
    columns: list[Column] = []
    left_out: dict[str, str] = {}
    labels = problem.labels
    everything = problem.weights(1.0, 1.0)

    def add(name: str, model: Any, weight: Floats, **how: Any) -> Column | None:
        if columns and clock.left() < 3 * max(column.seconds for column in columns):
            left_out[name] = "left out, because the time budget was used up"
            return None
        report(name)
        clock.lap()
        fitted = fit_model(model, problem.x, labels, weight, plan, **how)
        column = Column(name, fitted.p, clock.lap(), name.endswith("trusted only"), fitted.module)
        columns.append(column)
        return column

    for model in models:
        name = model_name(model)
        plain = add(name, model, everything)
        add(f"{name}, trusted only", model, problem.weights(0.0, 1.0))
        if plain is not None:
            kept = keep_confident(problem.noisy(plain.p), problem)
            add(f"{name}, pruned", model, problem.weights(kept, 1.0))
        if model == "forest":
            add(f"{name}, trusted x10", model, problem.weights(1.0, HEAVY), weighted_draw=True)
    return columns, left_out


def keep_confident(p: Floats, problem: Problem) -> Floats:
    """Confident learning: 1 for noisy rows to keep, 0 for rows that are confidently of another class.

    The threshold of a class is the mean probability of the class over the rows with that label.
    """
    given = problem.given
    counts = np.bincount(given, minlength=problem.n_classes)
    own = np.bincount(given, weights=pick(p, given), minlength=problem.n_classes)
    threshold = np.where(counts > 0, own / np.maximum(counts, 1), np.inf)
    confident = np.where(p >= threshold, p, -1.0)
    suspect = (confident.max(1) >= 0) & (confident.argmax(1) != given)
    return np.where(suspect, 0.0, 1.0)


def stack_first(problem: Problem, base: list[Column]) -> Column:
    """The stack that gold starts from."""
    likelihood = np.stack([pick(problem.trusted(column.calibrated()), problem.truth) for column in base], axis=1)
    prior = np.full(len(base), FIRST_PRIOR / len(base))
    weights = drop_small(stack_weights([(problem.importance, likelihood)], prior))
    return combine("first stack", base, weights)


def stack_final(problem: Problem, columns: list[Column], transition: Floats) -> Column:
    """The stack of all candidates, with half of the prior on gold."""
    calibrated = [column.calibrated() for column in columns]
    truth = np.stack([pick(problem.trusted(p), problem.truth) for p in calibrated], axis=1)
    by_given = transition[:, problem.given].T
    given = np.stack([(problem.noisy(p) * by_given).sum(1) for p in calibrated], axis=1)
    share = problem.n_trusted / max(problem.n_noisy, 1)
    prior = np.array([GOLD_SHARE if column.name == "gold" else 0.0 for column in columns])
    prior[prior == 0] = (1 - GOLD_SHARE) / max(len(columns) - 1, 1)
    pairs = [(problem.importance, truth), (np.full(problem.n_noisy, share), given)]
    weights = drop_small(stack_weights(pairs, FINAL_PRIOR * prior))
    return combine("auto", columns, weights)


def combine(name: str, columns: list[Column], weights: Floats) -> Column:
    used = [(column, float(weight)) for column, weight in zip(columns, weights, strict=True) if weight > 0]
    return Column(
        name,
        mix([column.calibrated() for column, _ in used], np.array([weight for _, weight in used])),
        inputs=[column for column, _ in used],
        weights=[weight for _, weight in used],
        powers=[column.power for column, _ in used],
    )


def find_better_trusted(problem: Problem, base: list[Column], gold: Column) -> Column | None:
    """The best model of trusted rows alone, if it beats gold by more than half a standard error; else None.

    Gold's predictions of trusted rows are optimistic, because the posterior of other rows was formed with their help.
    So a switch away from gold is careful, and a switch towards it is not made by this score.
    """
    alone = [column for column in base if column.trusted_only]
    if not alone:
        return None

    def log_likelihood(column: Column) -> float:
        return float(problem.importance @ np.log(pick(problem.trusted(column.calibrated()), problem.truth)))

    def hits(column: Column) -> Floats:
        return np.asarray(problem.trusted(column.p).argmax(1) == problem.truth, dtype=np.float64)

    best = max(alone, key=log_likelihood)
    gain = problem.importance * (hits(best) - hits(gold))
    error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.inf
    return best if gain.mean() > SWITCH_AT * error and gain.mean() > 0 else None


def explain_mixture(final: Column) -> str:
    order = np.argsort(final.weights)[::-1][:3]
    shares = [f"{final.inputs[i].name} {100 * final.weights[i]:.0f} %" for i in order]
    return f"a mixture, weighted by how well candidates predict trusted rows: {', '.join(shares)}"


def run_without_trusted(
    problem: Problem, models: Sequence[Any], plan: Plan, clock: Clock, extra: Sequence[Column], report: Report
) -> Outcome:
    """The mean of plain models, a model without rows that all models reject, and gold with a prior on right labels."""
    plain = []
    for model in models:
        clock.lap()
        report(model_name(model))
        fitted = fit_model(model, problem.x, problem.labels, problem.weights(1.0, 0.0), plan)
        plain.append(Column(model_name(model), fitted.p, clock.lap(), module=fitted.module))
    start = combine("plain mean", [*plain, *extra], np.full(len(plain) + len(extra), 1 / (len(plain) + len(extra))))
    report("pruned")
    kept = keep_unless_all_disagree([column.p for column in plain], problem)
    fitted = fit_model(models[0], problem.x, problem.labels, problem.weights(kept, 0.0), plan)
    pruned = Column(f"{model_name(models[0])}, pruned", fitted.p, clock.lap(), module=fitted.module)
    report("gold")
    prior = diagonal_prior(problem.n_noisy, problem.n_classes)
    gold, transition = fit_gold(problem, models, start.p, prior, plan)
    gold.seconds = clock.lap()
    thirds = np.full(3, 1 / 3)
    final = combine("auto", [start, pruned, gold], thirds)
    reason = (
        "the mean of plain models, of a model without suspicious rows, and of gold, because there is no trusted row"
    )
    return Outcome(final, [*plain, *extra, pruned, gold], transition, prior, reason)


def keep_unless_all_disagree(predictions: Sequence[Floats], problem: Problem) -> Floats:
    """0 for rows on whose label all models agree with each other but not with the given label, otherwise 1."""
    votes = np.stack([problem.noisy(p).argmax(1) for p in predictions])
    suspect = (votes == votes[0]).all(0) & (votes[0] != problem.given)
    kept = np.where(suspect, 0.0, 1.0)
    return kept if kept.any() else np.ones_like(kept)
