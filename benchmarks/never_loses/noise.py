"""Splits and label noise of the benchmark."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.model_selection import StratifiedKFold, cross_val_predict, train_test_split

from benchmarks.never_loses.tables import Features, load_table

NOISES = ("pair", "symmetric", "instance")


@dataclass(frozen=True, eq=False)
class Problem:
    """The data of one run. `clean` and the test rows are only for evaluation."""

    x: Features  # [N, D] rows whose labels may be wrong
    given: np.ndarray  # [N]
    clean: np.ndarray  # [N]
    x_trusted: Features  # [n, D]
    y_trusted: np.ndarray  # [n]
    given_trusted: np.ndarray  # [n] the labels before they were checked
    x_test: Features
    y_test: np.ndarray
    n_classes: int


@dataclass(frozen=True)
class Sizes:
    test_share: float = 0.3
    most_training_rows: int = 800
    most_test_rows: int = 1500


@cache
def split_rows(table: str, seed: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and testing, stratified by class."""
    y = load_table(table)[1]
    train, test = train_test_split(np.arange(len(y)), test_size=sizes.test_share, stratify=y, random_state=seed)
    return keep_share(train, y, sizes.most_training_rows, seed), keep_share(test, y, sizes.most_test_rows, seed)


def keep_share(rows: np.ndarray, y: np.ndarray, most: int, seed: int) -> np.ndarray:
    if len(rows) <= most:
        return rows
    return train_test_split(rows, train_size=most, stratify=y[rows], random_state=seed)[0]


def draw_trusted(y: np.ndarray, per_class: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of trusted rows: `per_class` of each class, at most half of a class and at least one.

    With the same generator state a smaller number gives a part of the rows of a larger number.
    """
    order = rng.permutation(len(y))
    chosen = []
    for k in np.unique(y):
        rows = order[y[order] == k]
        chosen.append(rows[: max(1, min(per_class, len(rows) // 2))])
    return np.sort(np.concatenate(chosen))


def pair_noise(y: np.ndarray, rate: float, n_classes: int, rng: np.random.Generator) -> np.ndarray:
    """The next class with probability `rate`."""
    return np.where(rng.random(len(y)) < rate, (y + 1) % n_classes, y)


def symmetric_noise(y: np.ndarray, rate: float, n_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Another class, each with the same probability, with probability `rate`."""
    wrong = (y + rng.integers(1, n_classes, len(y))) % n_classes
    return np.where(rng.random(len(y)) < rate, wrong, y)


def instance_noise(y: np.ndarray, rate: float, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mistakes near class boundaries: the most likely other class of a model `p` [N, K].

    The probability of a mistake falls linearly with the rank of the margin, from 2 * rate to 0, so that its mean is
    `rate`.
    """
    rows = np.arange(len(y))
    others = p.copy()
    others[rows, y] = -1
    runner_up = others.argmax(1)
    margin = p[rows, y] - others[rows, runner_up] + 1e-9 * rng.random(len(y))  # random order among equal margins
    rank = np.empty(len(y))
    rank[margin.argsort()] = (rows + 0.5) / len(y)
    return np.where(rng.random(len(y)) < 2 * rate * (1 - rank), runner_up, y)


@cache
def clean_model(table: str, seed: int, sizes: Sizes, per_class: int) -> np.ndarray:
    """Class probabilities of the training rows, by forests that learned the correct labels of other noisy rows.

    The correct labels of trusted rows are not used: wrong labels that depend on them would tell a method what the
    trusted labels are, and the accuracy on trusted rows would be higher than on test rows.
    """
    x, y = load_table(table)
    train, _ = split_rows(table, seed, sizes)
    clean = y[train]
    trusted = draw_trusted(clean, per_class, np.random.default_rng([seed, 2]))
    noisy = np.setdiff1d(np.arange(len(train)), trusted)
    trees = ExtraTreesClassifier(100, min_samples_leaf=2, random_state=seed)
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    p = np.zeros((len(train), int(y.max()) + 1))
    p[noisy] = cross_val_predict(trees, x[train[noisy]], clean[noisy], cv=folds, method="predict_proba")
    p[trusted] = trees.fit(x[train[noisy]], clean[noisy]).predict_proba(x[train[trusted]])
    return p


def make_problem(
    table: str,
    noise: str,
    rate: float,
    per_class: int,
    seed: int,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> Problem:
    """Split a table, draw wrong labels for the training rows, and take `per_class` trusted rows of each class."""
    x, y = load_table(table)
    n_classes = int(y.max()) + 1
    train, test = split_rows(table, seed, sizes)
    clean = y[train]
    if noise == "instance":
        given = instance_noise(
            clean, rate, clean_model(table, seed, sizes, per_class), np.random.default_rng([seed, 1])
        )
    else:
        draw = {"pair": pair_noise, "symmetric": symmetric_noise}[noise]
        given = draw(clean, rate, n_classes, np.random.default_rng([seed, 1]))
    trusted = draw_trusted(clean, per_class, np.random.default_rng([seed, 2]))
    noisy = np.setdiff1d(np.arange(len(train)), trusted)
    return Problem(
        x=x[train[noisy]],
        given=given[noisy],
        clean=clean[noisy],
        x_trusted=x[train[trusted]],
        y_trusted=clean[trusted],
        given_trusted=given[trusted],
        x_test=x[test],
        y_test=y[test],
        n_classes=n_classes,
    )
