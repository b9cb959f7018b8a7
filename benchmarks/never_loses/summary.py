"""Figures of the benchmark from its rows.

A cell is a table, a kind of noise, a rate and a number of trusted rows; its accuracies are means over seeds. The best
baseline of a cell is the one with the highest mean on the test rows, which nobody could know beforehand.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.never_loses.plan import Cell

TRUSTED_ALONE = ("logistic, trusted rows", "forest, trusted rows")
Row = dict[str, Any]


@dataclass(frozen=True)
class CellResult:
    cell: Cell
    rows: list[Row]
    auto: float  # mean over seeds
    best: str  # the baseline with the highest mean
    best_accuracy: float
    error: float  # standard error of the paired difference, or that of the best baseline if it is larger
    trusted_alone: str  # the better of two

    @property
    def regret(self) -> float:
        return self.best_accuracy - self.auto

    def within(self, errors: float) -> bool:
        return self.regret <= errors * self.error + 1e-9


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def mean_accuracy(rows: Iterable[Row], name: str) -> float:
    return mean(row["accuracy"][name] for row in rows)


def cell_results(rows: Iterable[Row]) -> list[CellResult]:
    groups: dict[Cell, list[Row]] = defaultdict(list)
    for row in rows:
        groups[Cell(row["table"], row["noise"], row["rate"], row["per_class"])].append(row)
    results = []
    for cell, group in groups.items():
        best = max(group[0]["accuracy"], key=lambda name: mean_accuracy(group, name))
        autos = [row["auto"]["accuracy"] for row in group]
        bests = [row["accuracy"][best] for row in group]
        error = max(standard_error([a - b for a, b in zip(autos, bests, strict=True)]), standard_error(bests))
        alone = max(TRUSTED_ALONE, key=lambda name: mean_accuracy(group, name))
        results.append(CellResult(cell, group, mean(autos), best, mean(bests), error, alone))
    return results


def percent(flags: Iterable[bool]) -> float:
    return 100 * mean(map(float, flags))


def losses_to_trusted_alone(results: Iterable[CellResult], points: float = 3) -> list[Row]:
    """Runs in which `auto` is more than `points` below the better of two models on the trusted rows alone."""
    below = lambda row, name: row["auto"]["accuracy"] < row["accuracy"][name] - points
    return [row for result in results for row in result.rows if below(row, result.trusted_alone)]


def covers(row: Row, interval: str, truth: float) -> bool:
    _, low, high = row["auto"][interval]
    return low - 1e-9 <= truth <= high + 1e-9


def best_single(results: Sequence[CellResult]) -> str:
    """The baseline with the highest mean over all cells."""
    names = results[0].rows[0]["accuracy"]
    return max(names, key=lambda name: mean(mean_accuracy(result.rows, name) for result in results))


def summarize(results: Sequence[CellResult], single: str | None = None) -> dict[str, Any]:
    """All figures of a set of cells. `single` is the baseline to compare with, by default the best of these cells."""
    single = single or best_single(results)
    rows = [row for result in results for row in result.rows]
    single_mean = mean(mean_accuracy(result.rows, single) for result in results)
    auto_mean = mean(result.auto for result in results)
    scored = [row for row in rows if row["auto"]["score"]]
    rated = [row for row in rows if row["auto"]["noise_rate"]]
    errors = [row["auto"]["score"][0] - row["auto"]["accuracy"] for row in scored]
    return {
        "cells": len(results),
        "runs": len(rows),
        "auto": auto_mean,
        "single": single,
        "single_mean": single_mean,
        "above_single": auto_mean - single_mean,
        "regret": mean(result.regret for result in results),
        "worst_regret": max(result.regret for result in results),
        "within_1": percent(result.within(1) for result in results),
        "within_2": percent(result.within(2) for result in results),
        "far_below_trusted": 100 * len(losses_to_trusted_alone(results)) / len(rows),
        "score_error": mean(errors) if scored else None,
        "score_absolute_error": mean(map(abs, errors)) if scored else None,
        "score_covers": percent(covers(row, "score", row["auto"]["accuracy"]) for row in scored) if scored else None,
        "score_width": mean(row["auto"]["score"][2] - row["auto"]["score"][1] for row in scored) if scored else None,
        "noise_error": mean(row["auto"]["noise_rate"][0] - row["true_rate"] for row in rated) if rated else None,
        "noise_covers": percent(covers(row, "noise_rate", row["true_rate"]) for row in rated) if rated else None,
        "noise_width": mean(r["auto"]["noise_rate"][2] - r["auto"]["noise_rate"][1] for r in rated) if rated else None,
        "seconds": mean(row["auto"]["seconds"] for row in rows),
    }
