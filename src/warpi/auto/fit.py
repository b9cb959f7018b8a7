"""`fit_auto`: the model for tables and feature vectors with partly wrong labels and a few trusted rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from scipy import sparse
from threadpoolctl import threadpool_limits

from warpi.auto.budget import limit_trees
from warpi.auto.combine import pick
from warpi.auto.learners.modules import Mixture
from warpi.auto.learners.softmax import fit_softmax
from warpi.auto.models import (
    Plan,
    check_model,
    do_nothing,
    find_columns,
    find_directions,
    find_projection,
)
from warpi.auto.problem import (
    Clock,
    Column,
    OutOfTimeError,
    Problem,
    build_mixture,
    pose_problem,
    predict_by_column,
)
from warpi.auto.procedure import Outcome, combine, refit_on_all_rows, run_procedure, run_without_trusted
from warpi.auto.rows import (
    Floats,
    Rows,
    assign_folds,
    check_rows,
    multiply_columns,
    take_noisy,
    undo_audit,
    weigh_trusted,
)
from warpi.auto.score import FEW_FOLDS, Interval, accuracy_interval, noise_rate_interval, predict_nested, share_error
from warpi.auto.transition import bayes, confident_transition, estimate_transition, transition_prior

Progress = Callable[[str, float], None]
Report = Callable[[str], None]
N_TREES = 100
FOREST_COLUMNS = 64  # directions that a forest uses
STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1)  # C of softmax regression on many columns
DEFAULT_MODELS = ("forest", "logistic")
LARGE = 10_000  # rows from which boosting joins, with fewer trees, folds and candidates
MOST_ROWS = 10_000  # noisy rows that candidates are compared on
MOST_CELLS = 2_000_000  # the same as rows times classes
MOST_FINAL_ROWS = 150_000  # noisy rows of the last fit; more are only predicted
MOST_FINAL_CELLS = 5_000_000
CORRECTED_SHARE = 0.3  # of models of the labels that an audit has corrected
BATCH = 20_000  # rows that are predicted at a time


@dataclass(frozen=True)
class AutoSettings:
    """The settings that a user can choose."""

    models: tuple[Any, ...] = DEFAULT_MODELS
    budget: float | None = None
    seed: int = 0
    measure: bool = True  # the accuracy on trusted rows, which takes most of the time


@dataclass(frozen=True)
class Candidate:
    """One candidate: its accuracy on trusted rows that it has not seen, and its weight in the final mixture."""

    name: str
    score: float | None
    error: float | None
    seconds: float
    weight: float
    note: str = ""


@dataclass(eq=False)
class AutoResult:
    """The trained model and what is known about it."""

    model: Mixture
    candidates: list[Candidate]
    p: Floats
    p_trusted: Floats
    transition: Floats
    posterior: Floats
    trusted_score: Interval | None
    noise_rate: Interval | None
    noise_rate_point: float
    reason: str


def fit_auto(rows: Rows, settings: AutoSettings, progress: Progress | None = None) -> AutoResult:
    """Fit candidates, weight them by trusted rows, and measure the result on trusted rows it was not fitted to."""
    check_rows(rows)
    for model in settings.models:
        check_model(model)
    with threadpool_limits(1, user_api="blas"):  # in many products of small matrices, threads wait for each other
        return _fit(rows, settings, progress)


def _fit(rows: Rows, settings: AutoSettings, progress: Progress | None) -> AutoResult:
    latest: list[Any] = ["start", 0.0]

    def say(name: str, share: float) -> None:
        latest[:] = [name, share]
        if progress is not None:
            progress(name, share)

    clock = Clock(settings.budget, lambda: say(*latest))  # repeats the latest progress, so that it can stop the work
    learned = undo_audit(rows)
    chosen = choose_rows(learned, settings.seed, MOST_ROWS, MOST_CELLS)
    part = learned if chosen is None else take_noisy(learned, chosen)
    selected = find_columns(part.x)
    wide = find_directions(part.x) if selected is None else selected
    if wide is not None:
        part = multiply_columns(part, wide, selected is not None)
    models = choose_models(part, settings)
    problem = pose_problem(part)
    plan = replace(make_plan(problem, settings.seed, wide, selected is None, clock.check), marks=part.marks)
    plan, left_out = limit_trees(problem, models, plan, clock)
    steps = count(1)
    first: Report = lambda name: say(name, 0.2 * (1 - 1 / next(steps)))
    measurable = settings.measure and part.n_trusted > 1
    if part.n_trusted:
        repeats = FEW_FOLDS if measurable else 0
        outcome = run_procedure(problem, models, plan, clock, first, repeats=repeats)
    else:
        outcome = run_without_trusted(problem, models, plan, clock, first)
    outcome.left_out |= left_out
    later: Progress = lambda name, share: say(name, 0.2 + 0.6 * share)  # the repetitions take most of the time
    nested = {}
    if measurable:
        nested = predict_nested(part, models, plan, clock, later, outcome.columns, outcome.left_out)
    say("predictions of all rows" if chosen is not None else "mixture", 0.8)
    p = problem.noisy(outcome.final.p)
    if chosen is not None:
        p = predict_rest(outcome.final, rows, chosen, wide, p, lambda: say(*latest))
    evidence = judge_labels(learned, chosen, p, outcome.prior)
    top = outcome.final
    if chosen is not None:
        top = fit_last(learned, wide, top, evidence.posterior, plan, lambda name: say(name, 0.9))
    elif rows.before_audit is not None and part.n_trusted and clock.budget is None:
        again: Report = lambda name: say(f"{name}, corrected labels", 0.9)
        top = mix_with_corrected(rows, wide, selected is not None, top, models, plan, again)
    if rows.before_audit is not None:
        p_trusted = nested.get("auto", problem.trusted(outcome.final.p))
        prior = transition_prior(p_trusted, rows.y_trusted, rows.given_trusted, rows.n_classes)
        evidence = judge_labels(rows, chosen, p, prior)
    return summarize(rows, problem, outcome, nested, evidence, build_mixture(top))


def choose_strength(problem: Problem, plan: Plan) -> float:
    """The C of softmax regression with the highest likelihood of the given labels in one fold."""
    known = problem.n_noisy + problem.n_trusted
    held = plan.folds[:known] == 0
    labels = problem.labels[:known]

    def score(c: float) -> float:
        weight = problem.weights(1.0, 1.0)[:known] * ~held
        p = fit_softmax(problem.x[:known], labels, weight, np.zeros(known, np.int64), c, scaled=True).p
        return float(np.log((p * labels).sum(1)[held] + 1e-12).sum())

    return max(STRENGTHS, key=score)


def choose_rows(rows: Rows, seed: int, most_rows: int, most_cells: int) -> Any:
    """The noisy rows to fit on, or None for all of them. The work is bounded; the other rows are only predicted."""
    most = min(most_rows, most_cells // rows.n_classes)
    if rows.n_noisy <= most:
        return None
    return np.sort(np.random.default_rng([seed, 3]).choice(rows.n_noisy, most, replace=False))


def choose_models(rows: Rows, settings: AutoSettings) -> tuple[Any, ...]:
    """The models of the settings. To the default, dense rows add boosting if there are many of them, else a kernel."""
    if settings.models != DEFAULT_MODELS or sparse.issparse(rows.x):
        return settings.models
    if rows.n_noisy >= LARGE:
        return (*DEFAULT_MODELS, "boosting")
    return (*DEFAULT_MODELS, "kernel") if rows.n_trusted else DEFAULT_MODELS


def make_plan(
    problem: Problem,
    seed: int,
    wide: Floats | None = None,
    rotated: bool = False,
    check: Callable[[], None] = do_nothing,
) -> Plan:
    """How models are cross-fitted.

    `wide` selects or, if `rotated`, projects the columns of the user to those of the problem.
    """
    rng = np.random.default_rng([seed, 5])
    labels = np.concatenate([problem.given, problem.n_classes + problem.truth])
    rotated = rotated and wide is not None
    large = problem.n_noisy >= LARGE or rotated
    folds = assign_folds(labels, 3 if large else 5, rng)
    trees = int(N_TREES * np.clip(2000 / max(problem.n_noisy, 1), 0.5, 1))
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = jobs if problem.n_noisy >= 2000 else 1
    if not rotated:
        return Plan(folds, trees, seed, jobs, large, find_projection(problem.x, seed), wide, check=check)
    first = np.eye(problem.x.shape[1], FOREST_COLUMNS)
    plan = Plan(folds, trees, seed, jobs, large, first, wide, check=check)
    return replace(plan, c=choose_strength(problem, plan))


def fit_last(rows: Rows, wide: Floats | None, top: Column, posterior: Floats, plan: Plan, report: Report) -> Column:
    """Fit the important models of the mixture `top` once more, on all noisy rows, or on as many as the limits allow."""
    chosen = choose_rows(rows, plan.seed + 1, MOST_FINAL_ROWS, MOST_FINAL_CELLS)
    part = rows if chosen is None else take_noisy(rows, chosen)
    if wide is not None:
        part = multiply_columns(part, wide, selected=False)
    problem = pose_problem(part)
    last = replace(plan, folds=np.zeros(problem.x.shape[0], np.int64), complete=True)
    try:
        return refit_on_all_rows(top, problem, posterior if chosen is None else posterior[chosen], last, report)
    except OutOfTimeError:
        return top


def mix_with_corrected(
    rows: Rows, wide: Floats | None, selected: bool, top: Column, models: Sequence[Any], plan: Plan, report: Report
) -> Column:
    """The mixture `top`, in which the same procedure on the labels of an audit has a small share.

    The audit has learned from more checks than the models before it. But the corrected labels cannot be compared with
    those before the audit, which has seen the trusted rows, so the share is fixed.
    """
    part = rows if wide is None else multiply_columns(rows, wide, selected)
    plan = replace(plan, seed=plan.seed + 1)
    other = run_procedure(pose_problem(part), models, plan, Clock(), report).final
    return combine("auto", [top, other], np.array([1 - CORRECTED_SHARE, CORRECTED_SHARE]))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What cross-fitted predictions say about the labels of all noisy rows."""

    p: Floats  # [N, K]
    transition: Floats  # [K, K]
    posterior: Floats  # [N, K]


def judge_labels(rows: Rows, chosen: Any, p: Floats, prior: Floats) -> Evidence:
    """T from the chosen noisy rows, and the posterior of all of them from their predictions p [N, K]."""
    part = rows if chosen is None else take_noisy(rows, chosen)
    p_part = p if chosen is None else p[chosen]
    transition, posterior = estimate_transition(p_part, part.given, prior, part.checked)
    if chosen is not None:
        posterior = bayes(p, transition, rows.given)
    return Evidence(p, transition, posterior)


def summarize(
    rows: Rows, problem: Problem, outcome: Outcome, nested: dict[str, Floats], evidence: Evidence, model: Mixture
) -> AutoResult:
    """The intervals and the list of candidates."""
    p, transition, posterior = evidence.p, evidence.transition, evidence.posterior
    if not rows.n_trusted and rows.n_noisy:
        transition = confident_transition(p, rows.given)
        posterior = bayes(p, transition, rows.given)
    p_trusted = nested.get("auto", problem.trusted(outcome.final.p))
    importance = weigh_trusted(estimate_class_sizes(p, posterior), rows.y_trusted, rows.given_trusted, rows.given)
    hits = (p_trusted.argmax(1) == rows.y_trusted).astype(np.float64)
    wrong = 1 - pick(posterior, rows.given)
    return AutoResult(
        model=model,
        candidates=list_candidates(rows, outcome, nested, importance),
        p=p,
        p_trusted=p_trusted,
        transition=transition,
        posterior=posterior,
        trusted_score=accuracy_interval(hits, importance) if nested else None,
        noise_rate=measure_noise(rows, p_trusted, transition, wrong, importance),
        noise_rate_point=float(wrong.mean()) if len(wrong) else 0.0,
        reason=outcome.reason,
    )


def estimate_class_sizes(p: Floats, posterior: Floats) -> Floats:
    """About how many noisy rows belong to each class: the mean of a soft and a hard count.

    The given labels would be a bad count if a large class is often mistaken for a small one.
    """
    hard = np.bincount(p.argmax(1), minlength=p.shape[1])
    return np.asarray((posterior.sum(0) + hard) / 2)


def predict_rest(
    top: Column, rows: Rows, chosen: Any, wide: Floats | None, p: Floats, check: Callable[[], None]
) -> Floats:
    """Predictions of all noisy rows: cross-fitted for the chosen ones, by the mixture `top` for the others."""
    complete = np.zeros((rows.n_noisy, rows.n_classes))
    for start in range(0, rows.n_noisy, BATCH):
        check()
        x = rows.x[start : start + BATCH]
        predicted = predict_by_column(top, x if wide is None else x @ wide)
        if predicted is None:
            dense = x.toarray() if sparse.issparse(x) else x
            with torch.no_grad():
                predicted = build_mixture(top)(torch.as_tensor(dense)).exp().numpy()
        complete[start : start + BATCH] = predicted
    complete[chosen] = p
    return complete


def measure_noise(
    rows: Rows, p_trusted: Floats, transition: Floats, wrong: Floats, importance: Floats
) -> Interval | None:
    """The prediction-powered noise rate, if at least two trusted rows still have their given label."""
    if rows.given_trusted is None:
        return None
    known = rows.given_trusted >= 0
    if known.sum() < 2 or not len(wrong):
        return None
    given = rows.given_trusted[known]
    wrong_trusted = 1 - pick(bayes(p_trusted[known], transition, given), given)
    differs = (given != rows.y_trusted[known]).astype(np.float64)
    return noise_rate_interval(wrong, wrong_trusted, differs, importance[known])


def list_candidates(rows: Rows, outcome: Outcome, nested: dict[str, Floats], importance: Floats) -> list[Candidate]:
    """All candidates, with their nested scores if they have any."""
    weights = {id(column): weight for column, weight in zip(outcome.final.inputs, outcome.final.weights, strict=True)}
    weights[id(outcome.final)] = 1.0
    listed = []
    for column in outcome.columns:
        score, error = None, None
        if column.name in nested:
            hits = (nested[column.name].argmax(1) == rows.y_trusted).astype(np.float64)
            score = float(importance @ hits / importance.sum())
            error = share_error(hits, importance)
        listed.append(Candidate(column.name, score, error, column.seconds, weights.get(id(column), 0.0)))
    listed += [Candidate(name, None, None, 0.0, 0.0, note) for name, note in outcome.left_out.items()]
    return listed
