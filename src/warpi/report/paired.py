"""Every row against one of its table, a seed at a time: runs of one seed share split and noise, and so its luck."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from warpi.errors import UserError, unknown
from warpi.report.experiments import Difference, Experiment, Row, RunRecord, group, number, summarize
from warpi.runs.facts import same_test_set


def compare(runs: Sequence[RunRecord], name: str) -> list[Row]:
    """The rows of `summarize`, each with its difference to the row `name`, a method or a label, of its own table.

    Rows of tables that have no such row have none.
    """
    experiments, found = group(runs), dict[tuple[str, str, str], Experiment]()
    for block, some in groupby(experiments, _block):
        mine = list(some)
        named = [g for g in mine if g.label == name] or [g for g in mine if g.first.spec["method"] == name]
        if len(named) > 1:
            labels = ", ".join(repr(g.label) for g in named)
            where = "{}, noise {}, {}".format(*block)
            raise UserError(f"{name!r} names {len(named)} rows of {where}: {labels}; give one of these labels")
        if named:
            found[block] = named[0]
    if not found:
        names = {name for g in experiments for name in (g.label, g.first.spec["method"])}
        raise unknown("method or label", name, names)
    return [
        replace(row, against=_difference(g, found[_block(g)])) if _block(g) in found else row
        for g, row in zip(experiments, summarize(runs), strict=True)
    ]


def mean_interval(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and half of its 95 % interval, t s / sqrt(n); nothing where a value is missing, no interval of one."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    n, mean = len(known), statistics.fmean(known)
    return mean, student(n - 1) * statistics.stdev(known) / math.sqrt(n) if n > 1 else None


def student(df: int, inside: float = 0.95) -> float:
    """The t that a variable of Student's distribution stays within with probability `inside`."""
    low, high = 0.0, math.pi / 2  # of theta = atan(t / sqrt(df)), by which P(|T| < t) is a finite sum
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, df) < inside else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _within(theta: float, df: int) -> float:
    """P(|T| < sqrt(df) tan(theta)).

    Even df: sin (1 + 1/2 cos^2 + 1·3/(2·4) cos^4 + ...), odd: 2/pi (theta + sin (cos + 2/3 cos^3 + ...)), in both up to
    cos^(df - 2).
    """
    odd, cos, total = df % 2, math.cos(theta), 0.0
    term = cos if odd else 1.0
    for k in range(odd, df - 1, 2):  # the power of cos
        total += term
        term *= (k + 1) / (k + 2) * cos * cos
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if odd else total


def _difference(g: Experiment, other: Experiment) -> Difference:
    """Over the seeds that both have finished, in which noise and test set are known to be the same."""
    theirs = {run.spec["seed"]: run for run in other.runs if run.done}
    pairs = {s: (run, theirs[s]) for run in g.runs if run.done and (s := run.spec["seed"]) in theirs}
    alike = {s: pair for s, pair in pairs.items() if _alike(*pair)}
    mean, ci95 = mean_interval([_gap(*pair) for pair in alike.values()])
    return Difference(other.label, tuple(alike), tuple(s for s in pairs if s not in alike), mean, ci95)


def _alike(a: RunRecord, b: RunRecord) -> bool:
    one_file = a.spec.get("meta_data") == b.spec.get("meta_data")  # two files, as settings, may be what is compared
    return same_test_set(a.facts, b.facts, meta=one_file)


def _gap(run: RunRecord, other: RunRecord) -> float | None:
    a, b = (number(each.epochs[-1], "test_acc") for each in (run, other))
    return None if a is None or b is None else a - b


def _block(g: Experiment) -> tuple[str, str, str]:
    return g.data, g.noise, g.net
