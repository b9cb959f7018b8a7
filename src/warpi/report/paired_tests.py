"""Paired comparison of every row with one row of its table: runs with the same seed share split and noise."""

import math
from collections.abc import Sequence
from dataclasses import replace

from warpi.errors import UserError, unknown
from warpi.report.experiments import (
    Difference,
    Experiment,
    Row,
    RunRecord,
    group,
    group_by,
    mean_std,
    number,
    summarize,
)
from warpi.runs.stored_facts import same_test_set


def compare(runs: Sequence[RunRecord], name: str) -> list[Row]:
    """The rows of `summarize`, each with its difference from the row `name` (a method or a label) of its table.

    Tables without such a row have no differences.
    """
    experiments = group(runs)
    references: dict[tuple[str, str, str], Experiment] = {}
    for block, some in group_by(experiments, lambda g: g.block).items():
        named = [g for g in some if g.label == name] or [g for g in some if g.first.spec["method"] == name]
        if len(named) > 1:
            labels = ", ".join(repr(g.label) for g in named)
            title = named[0].block_title
            raise UserError(f"{name!r} matches {len(named)} rows of {title}: {labels}; give one of these labels")
        if named:
            references[block] = named[0]
    if not references:
        names = {name for g in experiments for name in (g.label, g.first.spec["method"])}
        raise unknown("method or label", name, names)
    return [
        replace(row, against=_difference(g, references[g.block])) if g.block in references else row
        for g, row in zip(experiments, summarize(runs), strict=True)
    ]


def mean_interval(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and half-width t s / sqrt(n) of its 95 % interval.

    Both are None if a value is missing; the half-width is None for a single value.
    """
    from scipy.special import stdtrit  # quantiles of Student's distribution; slow to import

    n = len(values)
    mean, std = mean_std(values)
    return mean, None if std is None else float(stdtrit(n - 1, 0.975)) * std / math.sqrt(n)


def _difference(g: Experiment, other: Experiment) -> Difference:
    """Compare the seeds that both have finished and whose noise and test set are known to be the same."""
    others = {run.spec["seed"]: run for run in other.runs if run.done}
    pairs = {s: (run, others[s]) for run in g.runs if run.done and (s := run.spec["seed"]) in others}
    alike = {s: pair for s, pair in pairs.items() if _alike(*pair)}
    mean, ci95 = mean_interval([_gap(*pair) for pair in alike.values()])
    return Difference(other.label, tuple(alike), tuple(s for s in pairs if s not in alike), mean, ci95)


def _alike(a: RunRecord, b: RunRecord) -> bool:
    one_file = a.spec.get("meta_data") == b.spec.get("meta_data")  # the comparison may be between two files
    return same_test_set(a.facts, b.facts, trusted=one_file)


def _gap(run: RunRecord, other: RunRecord) -> float | None:
    a, b = (number(each.epochs[-1], "test_acc") for each in (run, other))
    return None if a is None or b is None else a - b
