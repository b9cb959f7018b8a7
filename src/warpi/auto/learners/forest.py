"""A random forest on soft labels whose out-of-bag predictions are also valid for rows with large weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.tree import DecisionTreeRegressor

from warpi.auto.learners.modules import TreeSum, round_down
from warpi.auto.rows import Floats, Ints, Matrix

ROWS_PER_TREE = 5_000  # larger training sets: each tree sees a subsample, so that its cost is bounded


@dataclass(eq=False)
class FittedForest:
    """Trees and their predictions."""

    trees: list[Any]
    p: Floats  # [M, K] of all rows: out-of-bag for rows with a positive weight, all trees for the others

    def predict(self, x: Matrix) -> Floats:
        """Probabilities of other rows, much faster than `module` on a CPU."""
        total = np.zeros((x.shape[0], self.p.shape[1]))
        for tree in self.trees:
            total += tree.value[tree.apply(x), :, 0]
        return np.asarray(total / total.sum(1, keepdims=True))

    def module(self) -> TreeSum:
        return trees_to_module(self.trees)


def fit_forest(
    x: Matrix,
    q: Floats,
    weight: Floats,
    n_trees: int,
    seed: int,
    weighted_draw: bool = False,
    n_jobs: int = 1,
    check: Callable[[], None] | None = None,
) -> FittedForest:
    """Fit multi-output regression trees on soft labels q [M, K]. Rows of weight 0 are only predicted.

    The bootstrap is uniform, and weights go into the tree. A bootstrap that is drawn with weights, as scikit-learn
    does, puts heavy rows into almost every tree and leaves them without an out-of-bag prediction. With
    `weighted_draw` each tree first leaves out a random third of the rows and then draws from the rest with weights,
    which predicts better when a few rows are ten times as important. `check` is called after every tree.
    """
    used = np.flatnonzero(weight > 0)
    total = np.zeros_like(q)
    votes = np.zeros(len(q))

    def grow(number: int) -> tuple[Any, Ints, Ints]:
        rng = np.random.default_rng([seed, number])
        tree_weight, out_of_bag = draw_rows(weight[used], rng, weighted_draw)
        in_bag = np.flatnonzero(tree_weight)
        rows = used[in_bag]
        model = DecisionTreeRegressor(max_features="sqrt", random_state=int(rng.integers(2**31)))
        with config_context(skip_parameter_validation=True, assume_finite=True):
            model.fit(x[rows], q[rows], sample_weight=tree_weight[in_bag], check_input=False)
        predicted = np.ones(len(q), dtype=bool)
        predicted[used[~out_of_bag]] = False
        tested = np.flatnonzero(predicted)
        return model.tree_, tested, model.tree_.apply(x[tested])

    trees = []
    with ThreadPoolExecutor(n_jobs) as pool:
        for tree, tested, leaf in pool.map(grow, range(n_trees)) if n_jobs > 1 else map(grow, range(n_trees)):
            if check is not None:
                check()
            trees.append(tree)
            total[tested] += tree.value[leaf, :, 0]
            votes[tested] += 1
    prior = np.average(q[used], axis=0, weights=weight[used])
    p = (total + 1e-3 * prior) / (votes + 1e-3)[:, None]
    return FittedForest(trees, p / p.sum(1, keepdims=True))


def draw_rows(weight: Floats, rng: np.random.Generator, weighted_draw: bool) -> tuple[Floats, NDArray[np.bool_]]:
    """Weights of the rows in one tree, and which rows it may be tested on."""
    n = len(weight)
    size = min(n, ROWS_PER_TREE)
    if weighted_draw and n > 3:
        out = np.zeros(n, dtype=bool)
        out[rng.permutation(n)[: n // 3]] = True
        chance = np.where(out, 0, weight)
        drawn = rng.choice(n, size, p=chance / chance.sum())
        return np.bincount(drawn, minlength=n).astype(np.float64), out
    counts = np.bincount(rng.integers(n, size=size), minlength=n)
    return counts * weight, counts == 0


def trees_to_module(trees: list[Any], classification: bool = False) -> TreeSum:
    """Put the nodes of scikit-learn's trees into one array."""
    nodes = []
    for tree in trees:
        votes = tree.value[:, 0, :] if classification else tree.value[:, :, 0]
        value = votes / np.maximum(votes.sum(1, keepdims=True), 1e-12) if classification else votes
        leaf = tree.children_left < 0
        nodes.append(Nodes(leaf, tree.feature, tree.threshold, tree.children_left, tree.children_right, value))
    return join_trees(nodes, depth=max(tree.max_depth for tree in trees))


class Nodes(NamedTuple):
    """The n nodes of a tree, as scikit-learn numbers them."""

    leaf: Any  # [n] bool
    feature: Any  # [n] column that is compared with the threshold
    threshold: Any  # [n]
    left: Any  # [n] the next node if the feature is not above the threshold
    right: Any  # [n]
    value: Any  # [n, K]
    gap_right: Any = None  # [n] whether a missing number goes right; None: the numbers are never missing


def join_trees(trees: list[Nodes], depth: int, baseline: Floats | None = None) -> TreeSum:
    """Put the nodes of all trees into one array. A leaf becomes its own child."""
    roots = np.cumsum([0, *(len(tree.leaf) for tree in trees[:-1])])
    branches = []
    for root, tree in zip(roots, trees, strict=True):
        own = np.arange(len(tree.leaf))
        left, right = (np.where(tree.leaf, own, child.astype(np.int64)) for child in (tree.left, tree.right))
        branches.append(np.stack([left, right], axis=1) + root)
    return TreeSum(
        roots,
        np.concatenate([np.where(tree.leaf, 0, tree.feature).astype(np.int64) for tree in trees]),
        round_down(np.concatenate([np.where(tree.leaf, 0, tree.threshold) for tree in trees])),
        np.concatenate(branches),
        np.concatenate([tree.value for tree in trees]),
        depth,
        baseline,
        None if trees[0].gap_right is None else np.concatenate([tree.gap_right for tree in trees]),
    )
