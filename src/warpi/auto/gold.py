"""The candidate "gold": models that are trained on the posterior of the true classes instead of on the given labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from warpi.auto.combine import POWERS, SMOOTH, pick, pool, sharpen, smooth, stack_weights
from warpi.auto.models import Fitted, Plan, fit_model, model_name
from warpi.auto.problem import Column, Problem
from warpi.auto.rows import Floats
from warpi.auto.transition import estimate_transition

ROUNDS = 2
TRUSTED_WEIGHT = 3.0
C = 0.3


def fit_gold(
    problem: Problem, models: Sequence[Any], start: Floats, prior: Floats, plan: Plan
) -> tuple[Column, Floats]:
    """Alternate between T and the models, twice. `start` are predictions [M, K]. Returns the candidate and T.

    1. EM for T, and the posterior of the true class of each noisy row, both with fixed predictions.
    2. Every model is fitted on the posterior of noisy rows, and on the labels of trusted rows with a larger weight.
    3. The calibrated models are pooled.
    """
    p = start
    for number in range(ROUNDS):
        trees = plan.n_trees if number == ROUNDS - 1 else int(0.6 * plan.n_trees)
        transition, posterior = estimate_transition(problem.noisy(p), problem.given, prior, problem.checked)
        step = replace(plan, n_trees=trees, seed=plan.seed + 100 + number)
        parts = []
        for model in models if number == ROUNDS - 1 or not plan.large else leave_out_slow(models):
            refit = partial(fit_part, model)
            fitted = refit(problem, posterior, step)
            name = f"gold {model_name(model)}"
            parts.append(Column(name, fitted.p, module=fitted.module, predict=fitted.predict, refit=refit))
        gold = pool_parts(problem, parts, transition)
        p = gold.p
    transition, _ = estimate_transition(problem.noisy(p), problem.given, prior, problem.checked)
    return gold, transition


def leave_out_slow(models: Sequence[Any]) -> Sequence[Any]:
    """The models of the rounds before the last one, if there are many rows: without boosting, if others are left."""
    return [model for model in models if model != "boosting"] or models


def fit_part(model: Any, problem: Problem, posterior: Floats, plan: Plan) -> Fitted:
    """Fit a model on the posterior [N, K] of noisy rows and on the labels of trusted rows."""
    labels = problem.labels
    labels[: problem.n_noisy] = posterior
    return fit_model(model, problem.x, labels, problem.weights(1.0, TRUSTED_WEIGHT, by_class=True), plan, c=C)


def pool_parts(problem: Problem, parts: list[Column], transition: Floats) -> Column:
    """Calibrate models by the likelihood of given and trusted labels, and pool them."""

    def likelihoods(p: Floats) -> tuple[Floats, Floats]:
        given = (problem.noisy(p) * transition[:, problem.given].T).sum(1)
        return given, pick(problem.trusted(p), problem.truth)

    def score(p: Floats) -> float:
        given, truth = likelihoods(p)
        return float(np.log(given).sum() + TRUSTED_WEIGHT * np.log(truth).sum())

    for part in parts:
        part.power = max(POWERS, key=lambda g: score(sharpen(part.p, g)))
    calibrated = [part.calibrated() for part in parts]
    if len(parts) > 1:
        given, truth = (np.stack(rows, axis=1) for rows in zip(*map(likelihoods, calibrated), strict=True))
        prior = np.full(len(parts), problem.n_noisy / 2 / len(parts))
        pairs = [(np.ones(problem.n_noisy), given), (np.full(problem.n_trusted, TRUSTED_WEIGHT), truth)]
        weights = stack_weights(pairs, prior)
    else:
        weights = np.ones(1)
    return Column(
        "gold",
        smooth(pool(calibrated, weights), 2 * SMOOTH),
        inputs=parts,
        weights=list(weights),
        powers=[part.power for part in parts],
        geometric=True,
    )
