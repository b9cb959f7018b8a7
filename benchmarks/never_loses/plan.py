"""Which runs there are.

The whole grid has every table, kind of noise, rate and number of trusted rows. It is divided into three passes. In each
pass every table meets every kind of noise at every rate once, and the numbers of trusted rows rotate. So one pass is a
balanced third of the grid, and the runs can stop after any pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.never_loses.noise import NOISES, Sizes, draw_trusted, split_rows
from benchmarks.never_loses.tables import TABLES, load_table

RATES = (0.2, 0.4)
PER_CLASS = (5, 20, 50)
PLAIN = ("logistic", "forest", "boosting", "knn")
BASELINES = (
    *(f"{name}, all rows" for name in PLAIN),
    *(f"{name}, trusted rows" for name in PLAIN),
    "forest, trusted x10",
    "cleanlab (forest)",
    "cleanlab (logistic)",
)
DEVELOPMENT = 100  # seeds from here on are for development, the others for reporting


@dataclass(frozen=True, order=True)
class Cell:
    table: str
    noise: str
    rate: float
    per_class: int  # trusted rows of each class


@dataclass(frozen=True)
class Target:
    """An accuracy that `auto` should reach in the mean of several seeds."""

    cell: Cell
    seeds: int
    accuracy: float


TARGETS = (
    Target(Cell("digits", "pair", 0.4, 5), 5, 96.0),
    Target(Cell("digits", "symmetric", 0.4, 5), 5, 96.0),
    Target(Cell("wine", "pair", 0.4, 5), 100, 96.5),
    Target(Cell("wine", "symmetric", 0.4, 5), 100, 97.0),
    Target(Cell("breast_cancer", "pair", 0.4, 20), 100, 94.5),
)
TARGET_SIZES = Sizes(test_share=0.25, most_training_rows=10**9, most_test_rows=10**9)


def different_counts(table: str) -> list[int]:
    """Numbers of trusted rows per class, without those that the limit of half a class makes nearly equal."""
    train, _ = split_rows(table, DEVELOPMENT, Sizes())
    y = load_table(table)[1][train]
    counts: list[int] = []
    sizes: list[int] = []
    for per_class in PER_CLASS:
        size = len(draw_trusted(y, per_class, np.random.default_rng(0)))
        if not sizes or size > 1.25 * sizes[-1]:
            counts.append(per_class)
            sizes.append(size)
    return counts


def cells_of_pass(number: int, tables: list[str]) -> Iterator[Cell]:
    for t, table in enumerate(TABLES):
        if table not in tables:
            continue
        counts = different_counts(table)
        if number >= len(counts):
            continue
        two_classes = int(load_table(table)[1].max()) == 1
        noises = [noise for noise in NOISES if not (two_classes and noise == "symmetric")]  # the same as pair
        for i, noise in enumerate(noises):
            for j, rate in enumerate(RATES):
                yield Cell(table, noise, rate, counts[(t + i + j + number) % len(counts)])
