"""One pass of the whole procedure: base candidates, a first stack, gold, the final stack, and the switch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.auto.budget import NO_TIME
from warpi.auto.candidates import (
    AGREEING,
    CandidateFitter,
    Report,
    choose_for_gold,
    fit_base,
)
from warpi.auto.combine import drop_small, mix, pick, scale_classes, stack_weights
from warpi.auto.gold import fit_gold
from warpi.auto.models import Plan, model_name
from warpi.auto.problem import Clock, Column, OutOfTimeError, Problem
from warpi.auto.rows import Floats
from warpi.auto.transition import diagonal_prior, estimate_transition, transition_prior

FIRST_PRIOR = 5.0
FINAL_PRIOR = 10.0
LEADERS_SHARE = 0.8  # of gold and of the candidate "agreeing rows" in the prior, half each
GOLD_SHARE = 0.5  # the same if gold is alone
SWITCH_AT = 0.5  # standard errors
TRUSTED_SHARE = 0.1  # of the models of trusted rows alone in the final mixture
SWITCHED_SHARE = 0.5  # the same after the switch
ALONE_AT = 2.0  # standard errors from which only models of trusted rows are used
REFIT_FROM = 0.05  # weight in the mixture from which a model is fitted again on all rows


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
    problem: Problem,
    models: Sequence[Any],
    plan: Plan,
    clock: Clock,
    report: Report,
    known: Sequence[Column] = (),
    without: Collection[str] = (),
    repeats: int = 0,
) -> Outcome:
    """Fit all candidates and combine them. There is at least one trusted row.

    Candidates in `known` are not fitted again, and those in `without` are left out. So is what does not fit into the
    budget, if it is done once and then `repeats` times to measure the accuracy.
    """
    base, left_out = fit_base(problem, models, plan, clock, report, known, without, repeats)
    base = [column.calibrate(problem) for column in base]
    first = stack_first(problem, base)
    predictions = [column.p for column in base if column.name in map(model_name, models)]
    prior = transition_prior(
        problem.trusted(np.mean(predictions, axis=0)), problem.truth, problem.given_trusted, problem.n_classes
    )
    skipped = {*left_out, *without}
    gold_models = [m for m in choose_for_gold(problem, models, plan, base) if f"gold {model_name(m)}" not in skipped]
    report("gold")
    found = None
    if gold_models and "gold" not in skipped:
        found = fit_gold_in_time(problem, gold_models, first.p, prior, plan, clock)
        left_out |= {} if found else {"gold": NO_TIME}
    if found is None:
        return finish_without_gold(problem, base, first, prior, left_out)
    gold, transition = found
    columns = [*base, first.calibrate(problem), gold.calibrate(problem)]
    weights = weigh_candidates(problem, columns, transition)
    lead = lead_of_trusted(problem, base, gold)
    if lead > SWITCH_AT:
        weights = mark_leaders(columns) / mark_leaders(columns).sum()
    share = 1.0 if lead > ALONE_AT else SWITCHED_SHARE if lead > SWITCH_AT else TRUSTED_SHARE
    final = combine("auto", columns, drop_small(give_share_to_trusted(weights, columns, share)))
    return Outcome(correct_shares(problem, final, prior), columns, transition, prior, explain(final, lead), left_out)


def fit_gold_in_time(
    problem: Problem, models: Sequence[Any], start: Floats, prior: Floats, plan: Plan, clock: Clock
) -> tuple[Column, Floats] | None:
    """The candidate gold and T; None if the budget ends before."""
    clock.lap()
    clock.enforced = True
    try:
        gold, transition = fit_gold(problem, models, start, prior, plan)
    except OutOfTimeError:
        if clock.budget is None:
            raise
        return None
    gold.seconds = clock.lap()
    return gold, transition


def finish_without_gold(
    problem: Problem, base: list[Column], first: Column, prior: Floats, left_out: dict[str, str]
) -> Outcome:
    """The first stack is the result, because the budget is used up."""
    transition, _ = estimate_transition(problem.noisy(first.p), problem.given, prior, problem.checked)
    weights = np.array([1.0 if column is first else 0.0 for column in [*base, first]])
    final = combine("auto", [*base, first], drop_small(give_share_to_trusted(weights, [*base, first], TRUSTED_SHARE)))
    final = correct_shares(problem, final, prior)
    return Outcome(final, [*base, first], transition, prior, explain(final, 0.0), left_out)


def stack_first(problem: Problem, base: list[Column]) -> Column:
    """The stack that gold starts from."""
    likelihood = np.stack([pick(problem.trusted(column.calibrated()), problem.truth) for column in base], axis=1)
    prior = np.full(len(base), FIRST_PRIOR / len(base))
    weights = drop_small(stack_weights([(problem.importance, likelihood)], prior))
    return combine("first stack", base, weights)


def weigh_candidates(problem: Problem, columns: list[Column], transition: Floats) -> Floats:
    """The weights of the final stack, with most of the prior on gold and on the model of agreeing rows."""
    calibrated = [column.calibrated() for column in columns]
    truth = np.stack([pick(problem.trusted(p), problem.truth) for p in calibrated], axis=1)
    by_given = transition[:, problem.given].T
    given = np.stack([(problem.noisy(p) * by_given).sum(1) for p in calibrated], axis=1)
    share = problem.n_trusted / max(problem.n_noisy, 1)
    leads = mark_leaders(columns)
    total = LEADERS_SHARE if leads.sum() > 1 else GOLD_SHARE
    prior = np.where(leads, total / leads.sum(), (1 - total) / max((~leads).sum(), 1))
    pairs = [(problem.importance, truth), (np.full(problem.n_noisy, share), given)]
    return stack_weights(pairs, FINAL_PRIOR * prior)


def mark_leaders(columns: list[Column]) -> NDArray[np.bool_]:
    """True for gold and for the model of agreeing rows."""
    return np.array([column.name == "gold" or column.name.endswith(AGREEING) for column in columns])


def give_share_to_trusted(weights: Floats, columns: list[Column], share: float) -> Floats:
    """Give a share of the weights to the models of trusted rows alone.

    Mistakes that depend on the row, not only on its class, mislead every model of the noisy rows in the same way, and a
    few trusted rows cannot show it. A fixed share limits the loss.
    """
    alone = np.array([float(column.trusted_only) for column in columns])
    if not alone.any():
        return weights
    return np.asarray((1 - share) * weights + share * alone / alone.sum())


def combine(name: str, columns: list[Column], weights: Floats) -> Column:
    used = [(column, float(weight)) for column, weight in zip(columns, weights, strict=True) if weight > 0]
    return Column(
        name,
        mix([column.calibrated() for column, _ in used], np.array([weight for _, weight in used])),
        inputs=[column for column, _ in used],
        weights=[weight for _, weight in used],
        powers=[column.power for column, _ in used],
    )


def correct_shares(problem: Problem, final: Column, prior: Floats) -> Column:
    """Scale the classes of the mixture to their shares among the noisy rows.

    Its mean probabilities lie between the shares of the classes and those of the given labels, because it is careful
    and partly learned from these: if a large class is often mistaken for a small one, the small class looks too large.
    The most probable class of each row, with or without its given label, is a better count. If only one of these two
    counts exceeds the sum of the probabilities, nothing is changed.
    """
    p = problem.noisy(final.p)
    _, posterior = estimate_transition(p, problem.given, prior, problem.checked)
    with_label, without = (np.bincount(q.argmax(1), minlength=problem.n_classes) for q in (posterior, p))
    total = posterior.sum(0)
    factors = (np.median([total, with_label, without], axis=0) + 1) / (total + 1)
    return replace(final, p=scale_classes(final.p, factors), factors=factors)


def lead_of_trusted(problem: Problem, base: list[Column], gold: Column) -> float:
    """By how many standard errors the best model of trusted rows alone beats gold on trusted rows; 0 if it does not.

    Gold's predictions of trusted rows are optimistic, because the posterior of other rows was formed with their help.
    So this score is only used to switch away from gold, and only if the lead is clear.
    """
    alone = [column for column in base if column.trusted_only]
    missing = len(np.unique(problem.truth)) < problem.n_classes  # models of trusted rows do not know these classes
    if not alone or missing or problem.n_trusted < 2:
        return 0.0

    def log_likelihood(column: Column) -> float:
        return float(problem.importance @ np.log(pick(problem.trusted(column.calibrated()), problem.truth)))

    def hits(column: Column) -> Floats:
        return np.asarray(problem.trusted(column.p).argmax(1) == problem.truth, dtype=np.float64)

    gain = problem.importance * (hits(max(alone, key=log_likelihood)) - hits(gold))
    if gain.mean() <= 0:
        return 0.0
    return float(gain.mean() / (gain.std(ddof=1) / np.sqrt(len(gain)) + 1e-12))


def explain(final: Column, lead: float) -> str:
    """One sentence on what is used and why."""
    order = np.argsort(final.weights)[::-1][:3]
    shares = ", ".join(f"{final.inputs[i].name} {100 * final.weights[i]:.0f} %" for i in order)
    if lead > SWITCH_AT:
        return f"mostly models fitted on the trusted rows alone, which predict trusted rows best: {shares}"
    return f"a mixture, weighted by how well candidates predict trusted rows: {shares}"


def run_without_trusted(problem: Problem, models: Sequence[Any], plan: Plan, clock: Clock, report: Report) -> Outcome:
    """The mean of plain models, a model without rows that all models reject, and gold with a prior on right labels."""
    base = CandidateFitter(problem, plan, clock, report)
    for model in models:
        base.add(model_name(model), model)
    plain = list(base.columns)
    start = combine("plain mean", plain, np.full(len(plain), 1 / len(plain)))
    if clock.budget is not None:
        base.reserve_gold(models)
    kept = keep_unless_all_disagree([column.p for column in plain], problem)
    pruned = base.add(f"{model_name(models[0])}, pruned", models[0], problem.weights(kept, 1.0))
    parts = [start] if pruned is None else [start, pruned]
    prior = diagonal_prior(problem.n_noisy, problem.n_classes)
    report("gold")
    best = [model for model in models if f"gold {model_name(model)}" not in base.left_out]
    found = fit_gold_in_time(problem, best, start.p, prior, plan, clock) if best else None
    reason = "the mean of plain models, of a model without suspicious rows, and of gold"
    if found is None:
        if best:
            base.left_out["gold"] = NO_TIME
        transition, _ = estimate_transition(problem.noisy(start.p), problem.given, prior, problem.checked)
    else:
        gold, transition = found
        parts.append(gold)
        base.columns.append(gold)
    if len(parts) < 3:
        reason = "the mean of the models that the budget allows"
    final = combine("auto", parts, np.full(len(parts), 1 / len(parts)))
    reason += ", because there is no trusted row"
    return Outcome(final, base.columns, transition, prior, reason, base.left_out)


def keep_unless_all_disagree(predictions: Sequence[Floats], problem: Problem) -> Floats:
    """0 for rows for which all models predict the same class, and it is not the given label; otherwise 1."""
    votes = np.stack([problem.noisy(p).argmax(1) for p in predictions])
    suspect = (votes == votes[0]).all(0) & (votes[0] != problem.given)
    kept = np.where(suspect, 0.0, 1.0)
    return kept if kept.any() else np.ones_like(kept)


def refit_on_all_rows(top: Column, problem: Problem, posterior: Floats, plan: Plan, report: Report) -> Column:
    """The same mixture, in which the models that matter are fitted on all rows of `problem`.

    `posterior` [N, K] are the probabilities of the true classes of the noisy rows. The predictions of the columns stay:
    they belong to the models of fewer rows, which have not seen the rows that they predict.
    """
    shares: dict[int, float] = {}

    def add_share(column: Column, share: float) -> None:
        shares[id(column)] = shares.get(id(column), 0.0) + share
        for part, weight in zip(column.inputs, column.weights, strict=True):
            add_share(part, share * weight)

    renewed: dict[int, Column] = {}

    def renew(column: Column) -> Column:
        if id(column) not in renewed:
            new = column
            if column.inputs:
                new = replace(column, inputs=[renew(part) for part in column.inputs])
            elif column.refit is not None and shares[id(column)] >= REFIT_FROM:
                report(f"{column.name}, all rows")
                new = replace(column, module=column.refit(problem, posterior, plan).module)
            renewed[id(column)] = new
        return renewed[id(column)]

    add_share(top, 1.0)
    return renew(top)
