"""Paired comparisons: each row with one row of its table, and all methods with each other over several tables.

Runs with the same seed share split and noise, so the variation that is common to all methods cancels.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from warpi.report.table import Grid
from warpi.runs.stored_facts import same_test_set

LEVEL = 0.05  # two methods are distinguished if the corrected p-value is at most this


@dataclass(frozen=True)
class PairTest:
    """The paired test of two methods."""

    better: str  # the method with the higher mean accuracy
    worse: str
    difference: float  # of the accuracies in percent: mean over seeds, then over tables
    n: int  # common runs
    p: float | None  # two-sided; None if there are too few common runs
    corrected: float | None  # by Holm, over all pairs that were tested

    @property
    def distinguished(self) -> bool:
        return self.corrected is not None and self.corrected <= LEVEL


@dataclass(frozen=True)
class Ranking:
    """Methods by mean rank, 1 is best, and the tests of all pairs."""

    methods: tuple[str, ...]  # the best first
    ranks: tuple[float, ...]
    pairs: tuple[PairTest, ...]
    groups: tuple[tuple[int, int], ...]  # first and last place of methods of which no two are distinguished
    note: str  # what was ranked and how it was tested


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


def rank_methods(runs: Sequence[RunRecord]) -> Ranking:
    """Rank the methods that every table has, and test all pairs with Holm's correction."""
    tables = _accuracies(runs)
    names = [name for name in next(iter(tables.values())) if all(name in table for table in tables.values())]
    if len(names) < 2:
        raise UserError(
            f"mean ranks need at least two methods with finished runs in each of the {len(tables)} tables, "
            f"got {len(names)}; give only runs of tables that share methods"
        )
    ranks, n_ranked = _mean_ranks(tables, names)
    n_pairs = math.comb(len(names), 2)
    over_tables = n_pairs * 2.0 ** (1 - len(tables)) <= LEVEL  # the smallest p-value that the signed ranks can have
    tests = [_test_pair(tables, pair, over_tables) for pair in itertools.combinations(names, 2)]
    known = [test.p for test in tests if test.p is not None]
    if not known:
        raise UserError(
            f"{len(tables)} table(s) with so few common seeds are too few to test {len(names)} methods: "
            "each pair needs three seeds in one table, or two seeds in each of two tables"
        )
    corrected = iter(holm(known))
    pairs = tuple(test if test.p is None else replace(test, corrected=next(corrected)) for test in tests)
    order = sorted(names, key=lambda name: (ranks[name], name))
    left_out = sorted({name for table in tables.values() for name in table} - set(names))
    note = _describe(len(tables), n_ranked, over_tables, len(known), n_pairs, left_out)
    return Ranking(tuple(order), tuple(ranks[name] for name in order), pairs, _groups(order, pairs), note)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, by the step-down method of Holm (1979)."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        corrected[i] = largest
    return corrected


def mean_places(values: Sequence[float]) -> list[float]:
    """The place of each value, 1 for the smallest. Equal values share the mean of their places."""
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def signed_rank_p(differences: Sequence[float]) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test, exact also with ties. Zeros are dropped."""
    nonzero = [d for d in differences if d != 0]
    doubled = [round(2 * place) for place in mean_places([abs(d) for d in nonzero])]  # whole numbers
    counts = [1] + [0] * sum(doubled)  # how many choices of signs give each sum of positive ranks
    for rank in doubled:
        counts = [n + (counts[i - rank] if i >= rank else 0) for i, n in enumerate(counts)]
    positive = sum(rank for rank, d in zip(doubled, nonzero, strict=True) if d > 0)
    tail = sum(counts[: min(positive, sum(doubled) - positive) + 1])
    return min(1.0, 2.0 * tail / 2.0 ** len(nonzero))


def seeds_t_p(tables: Sequence[Sequence[float]]) -> float | None:
    """The two-sided p-value that the mean over tables of the mean difference over seeds is zero, by a t-test.

    The variance between seeds is pooled over the tables. With one table this is the paired t-test. None if fewer than
    two degrees of freedom are left.
    """
    from scipy.special import stdtr

    freedom = sum(len(table) - 1 for table in tables)
    if freedom < 2:
        return None
    mean = statistics.fmean(statistics.fmean(table) for table in tables)
    squares = sum((d - statistics.fmean(table)) ** 2 for table in tables for d in table)
    error = math.sqrt(squares / freedom * sum(1 / len(table) for table in tables)) / len(tables)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * float(stdtr(freedom, -abs(mean) / error))


_Table = dict[str, dict[int, RunRecord]]


def _accuracies(runs: Sequence[RunRecord]) -> dict[str, _Table]:
    """The finished runs by table, label and seed."""
    tables: dict[str, _Table] = {}
    for g in group(runs):
        for run in g.runs:
            if run.done:
                if number(run.epochs[-1], "test_acc") is None:
                    raise UserError(f"{run.path} has no test accuracy and cannot be ranked; leave it out")
                tables.setdefault(g.block_title, {}).setdefault(g.label, {})[run.spec["seed"]] = run
    if not tables:
        raise UserError("no run has finished, so there is nothing to rank")
    return tables


def _mean_ranks(tables: dict[str, _Table], names: Sequence[str]) -> tuple[dict[str, float], int]:
    """Mean ranks over the seeds that all methods share, then over tables; and the number of these (table, seed)."""
    means: dict[str, list[float]] = {name: [] for name in names}
    n_ranked = 0
    for title, table in tables.items():
        first = table[names[0]]
        seeds = [s for s in first if all(s in table[m] and _alike(first[s], table[m][s]) for m in names)]
        if not seeds:
            raise UserError(f"the methods of {title} share no seed with the same noise and test set; add such runs")
        n_ranked += len(seeds)
        places = [mean_places([-table[name][seed].epochs[-1]["test_acc"] for name in names]) for seed in seeds]
        for name, each in zip(names, zip(*places, strict=True), strict=True):
            means[name].append(statistics.fmean(each))
    return {name: statistics.fmean(each) for name, each in means.items()}, n_ranked


def _test_pair(tables: dict[str, _Table], pair: tuple[str, str], over_tables: bool) -> PairTest:
    a, b = pair
    gaps = []
    for table in tables.values():
        common = [s for s in table[a] if s in table[b] and _alike(table[a][s], table[b][s])]
        gaps.append([table[a][s].epochs[-1]["test_acc"] - table[b][s].epochs[-1]["test_acc"] for s in common])
    mean = statistics.fmean(statistics.fmean(each) for each in gaps)  # `_mean_ranks` ensures a common seed per table
    p = signed_rank_p([statistics.fmean(each) for each in gaps]) if over_tables else seeds_t_p(gaps)
    better, worse = (a, b) if mean >= 0 else (b, a)
    return PairTest(better, worse, abs(mean), sum(map(len, gaps)), p, None)


def _groups(order: Sequence[str], pairs: Sequence[PairTest]) -> tuple[tuple[int, int], ...]:
    """The longest runs of neighbors in which no two methods are distinguished."""
    apart = {frozenset((test.better, test.worse)) for test in pairs if test.distinguished}
    found: list[tuple[int, int]] = []
    for first in range(len(order)):
        last = first
        while last + 1 < len(order) and all(
            frozenset((order[i], order[last + 1])) not in apart for i in range(first, last + 1)
        ):
            last += 1
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return tuple(found)


def _describe(
    n_tables: int, n_ranked: int, over_tables: bool, n_tested: int, n_pairs: int, left_out: Sequence[str]
) -> str:
    parts = [f"Ranks of the last test accuracy over {n_ranked} (table, seed) in {n_tables} table(s); 1 is best."]
    if over_tables:
        parts.append("Tests: Wilcoxon's signed ranks over tables, exact. They hold for tables like these.")
    else:
        parts.append(
            "Tests: paired t over seeds, with a variance that is pooled over tables. They hold for these tables only."
        )
    parts.append(f"{n_tested} of {n_pairs} pairs tested; p-values corrected by Holm, level {LEVEL:g}.")
    if left_out:
        parts.append(f"Left out, because not every table has them: {', '.join(left_out)}.")
    return " ".join(parts)


def rank_grid(ranking: Ranking) -> Grid:
    """One line per method: its mean rank and the methods that it is distinguished from."""
    rows = []
    for name, rank in zip(ranking.methods, ranking.ranks, strict=True):
        beaten = [test.worse for test in ranking.pairs if test.distinguished and test.better == name]
        rows.append((name, f"{rank:.2f}", ", ".join(beaten) or "–"))
    return Grid(("method", "mean rank", "better than"), rows, (0, 2))


def pair_grid(ranking: Ranking) -> Grid:
    """One line per pair, the smallest p-value first."""
    rows = []
    for test in sorted(ranking.pairs, key=lambda t: (t.p is None, t.p, t.better, t.worse)):
        tested = ["–" if p is None else f"{p:.2g}" for p in (test.p, test.corrected)]
        rows.append((test.better, test.worse, f"{test.difference:.2f}", str(test.n), *tested))
    return Grid(("better", "worse", "difference", "runs", "p", "p (Holm)"), rows, (0, 1))
