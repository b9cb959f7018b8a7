"""The models that `auto` combines. Each one learns from soft labels and gives cross-fitted predictions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.neighbors import NearestNeighbors
from sklearn.utils.validation import has_fit_parameter
from threadpoolctl import threadpool_limits
from torch import nn

from warpi.auto.learners.convert import constant_module, estimators_to_module
from warpi.auto.learners.forest import fit_forest
from warpi.auto.learners.kernel import fit_kernel
from warpi.auto.learners.modules import Gaps, Neighbors, Projected, full_probabilities
from warpi.auto.learners.softmax import fit_softmax, mean_and_scale
from warpi.auto.rows import Floats, Ints, Matrix
from warpi.errors import UserError, unknown

KINDS = ("forest", "logistic", "kernel", "boosting", "knn")
SAMPLE = 2000  # rows that show what kind of columns there are
WIDE = 256  # more dense columns are replaced by as many principal directions
MOST_BOOSTED = 30_000  # rows of one fit of boosting
MOST_BOOSTED_AT_LAST = 150_000  # the same for the fit on all rows
MOST_LINEAR = 40_000  # rows of a linear model in the fit on all rows
MOST_POINTS = 20_000  # of the nearest-neighbor model
ESTIMATOR_FOLDS = 3  # of boosting and of the user's classifiers, which are slower than the others
FREQUENT = 0.05  # share of the rows with a category from which its column is kept next to words
SMALLEST_SHARE = 0.1  # a soft label below this share is left out when a row is repeated once per class


def do_nothing() -> None:
    """The default of `Plan.check`."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How models are cross-fitted."""

    folds: Ints  # [M] fold of each row
    n_trees: int
    seed: int
    n_jobs: int = 1
    large: bool = False  # many rows: fewer candidates
    projection: Floats | None = None  # [D, d] directions that the forest uses instead of sparse columns
    wide: Floats | None = None  # [D, d] if the columns of x are directions of D columns, or a selection of them
    c: float | None = None  # of the softmax regression on such columns
    check: Callable[[], None] = do_nothing  # called often; raises an error to stop the fit
    marks: Ints | None = None  # [D] the marks of missing cells, see `Rows.marks`
    complete: bool = False  # the fit on all rows after the choice: no cross-fitted predictions, larger boosting


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted model."""

    p: Floats  # [M, K]: rows with a positive weight are predicted by models that were not trained on them
    module: Callable[[], nn.Module]
    predict: Callable[[Matrix], Floats] | None = None  # the same predictions, faster; None: only by the module


def model_name(model: Any) -> str:
    return model if isinstance(model, str) else type(model).__name__


def check_model(model: Any) -> None:
    """Raise an error if `model` is neither a known name nor a classifier."""
    if isinstance(model, str):
        if model not in KINDS:
            raise unknown("model", model, KINDS)
    elif not (hasattr(model, "fit") and hasattr(model, "predict")):
        raise unknown("model", type(model).__name__, KINDS)


def fit_model(
    model: Any, x: Matrix, q: Floats, weight: Floats, plan: Plan, c: float = 1.0, weighted_draw: bool = False
) -> Fitted:
    """Fit a model on soft labels q [M, K] with row weights; rows of weight 0 are only predicted."""
    fitted = _fit_model(model, x, q, weight, plan, c, weighted_draw)
    return fitted if plan.wide is None else replace(fitted, module=partial(_project, plan.wide, fitted.module))


def _fit_model(model: Any, x: Matrix, q: Floats, weight: Floats, plan: Plan, c: float, weighted_draw: bool) -> Fitted:
    used = weight > 0
    if len(np.unique(q[used].argmax(1))) < 2:  # a single class: nothing to learn
        prior = np.average(q[used], axis=0, weights=weight[used])
        return Fitted(np.tile(prior, (len(q), 1)), partial(constant_module, prior, x.shape[1]))
    if model == "forest":
        densify = partial(_multiply, plan.projection)
        forest = fit_forest(densify(x), q, weight, plan.n_trees, plan.seed, weighted_draw, plan.n_jobs, plan.check)
        module = partial(_project, plan.projection, forest.module)
        return Fitted(forest.p, module, lambda rows: forest.predict(densify(rows)))
    if model == "logistic":
        scaled = plan.c is not None
        if plan.complete:
            x, q, weight, plan = thin_out(x, q, weight, plan)
        softmax = fit_softmax(x, q, weight, plan.folds, plan.c or c, scaled, plan.check)
        return Fitted(softmax.p, softmax.module, softmax.predict)
    if model == "kernel":
        check_dense(model, x)
        kernel = fit_kernel(x, q, weight, plan.seed, plan.c is not None, plan.check)
        return Fitted(kernel.p, kernel.module, kernel.predict)
    if model == "knn":
        check_dense(model, x)
        p, neighbors = fit_neighbors(x, q, weight)
        return Fitted(p, partial(_same, neighbors))
    if model == "boosting":
        most = MOST_BOOSTED_AT_LAST if plan.complete else MOST_BOOSTED
        return fit_estimator(make_boosting(int(used.sum()), q.shape[1]), x, q, weight, plan, most)
    return fit_estimator(model, x, q, weight, plan)


def check_dense(model: str, x: Matrix) -> None:
    if sparse.issparse(x):
        raise UserError(f"model {model!r} needs dense columns; choose forest or logistic for sparse data")


def thin_out(x: Matrix, q: Floats, weight: Floats, plan: Plan) -> tuple[Matrix, Floats, Floats, Plan]:
    """A random part of the rows for a linear model, which learns little from more of them."""
    used = np.flatnonzero(weight > 0)
    if len(used) <= MOST_LINEAR:
        return x, q, weight, plan
    kept = np.sort(np.random.default_rng([plan.seed, 13]).choice(used, MOST_LINEAR, replace=False))
    return x[kept], q[kept], weight[kept], replace(plan, folds=plan.folds[kept])


def _same(module: Neighbors) -> Neighbors:
    return module


def _multiply(projection: Floats | None, x: Matrix) -> Matrix:
    return x if projection is None else np.ascontiguousarray(x @ projection, dtype=np.float32)


def _project(projection: Floats | None, make: Callable[[], Any]) -> nn.Module:
    module: nn.Module = make() if projection is None else Projected(projection, make())
    return module


def make_boosting(n_rows: int, n_classes: int) -> Any:
    """Histogram boosting with a bounded number of trees."""
    iterations = int(np.clip(100 // n_classes, 20, 40))
    return HistGradientBoostingClassifier(
        learning_rate=0.2,
        max_iter=iterations,
        max_leaf_nodes=15,
        max_bins=63,
        min_samples_leaf=int(np.clip(n_rows // 40, 2, 20)),
        early_stopping=False,
        random_state=0,
    )


def fit_estimator(estimator: Any, x: Matrix, q: Floats, weight: Floats, plan: Plan, most: int | None = None) -> Fitted:
    """Cross-fit any scikit-learn classifier on soft labels. `most` limits the training rows of one fit."""
    prepare: Callable[[Matrix], Matrix] = partial(open_gaps, marks=plan.marks if sees_gaps(estimator) else None)
    x = prepare(x)
    used = np.flatnonzero(weight > 0)
    hard = bool((q[used].max(1) > 1 - 1e-9).all())
    draws = 1 if hard or has_fit_parameter(estimator, "sample_weight") else 3
    folds = plan.folds % (2 if plan.large else ESTIMATOR_FOLDS)
    numbers = [fold for fold in np.unique(folds[used]) if (folds[used] != fold).any()]
    training = [used] * draws + [used[folds[used] != fold] for fold in numbers]

    def fit(number: int) -> Any:
        rng = np.random.default_rng([plan.seed, 7, number])
        return _fit_once(estimator, x, q, weight, training[number], rng, most, plan.large)

    jobs = plan.n_jobs if isinstance(estimator, HistGradientBoostingClassifier) else 1
    fitted = run_parallel(fit, len(training), jobs, plan.check)
    whole, others = fitted[:draws], fitted[draws:]
    p = np.zeros_like(q) if plan.complete else _mean_prediction(whole, x, q.shape[1])
    for fold, model in zip(numbers, others, strict=True):
        plan.check()
        tested = used[folds[used] == fold]
        p[tested] = full_probabilities(model, x[tested], q.shape[1])
    module = partial(estimators_to_module, whole, q.shape[1])
    if sees_gaps(estimator) and plan.marks is not None:
        module = partial(_open_gaps_before, plan.marks, module)
    return Fitted(p, module, lambda rows: _mean_prediction(whole, prepare(rows), q.shape[1]))


def sees_gaps(estimator: Any) -> bool:
    """Whether the estimator gets missing cells as NaN instead of as medians."""
    return isinstance(estimator, HistGradientBoostingClassifier)


def open_gaps(x: Matrix, marks: Ints | None) -> Matrix:
    """x with NaN where the mark of a column says that the cell was missing."""
    return x if marks is None else np.where((marks >= 0) & (x[:, marks] > 0), np.float32(np.nan), x)


def _open_gaps_before(marks: Ints, make: Callable[[], Any]) -> nn.Module:
    return Gaps(marks, make())


def run_parallel(task: Callable[[int], Any], n: int, n_jobs: int, check: Callable[[], None]) -> list[Any]:
    """The results of `task(0)`, ..., `task(n - 1)`, in threads if there are several jobs.

    Each task uses one OpenMP thread: threads that wait for each other in short steps are slow on a busy machine.
    """
    if min(n, n_jobs) < 2:
        results = []
        for number in range(n):
            check()
            results.append(task(number))
        return results

    def alone(number: int) -> Any:
        with threadpool_limits(1, user_api="openmp"):
            return task(number)

    with ThreadPoolExecutor(n_jobs) as pool:
        futures = [pool.submit(alone, number) for number in range(n)]
        try:
            while wait(futures, timeout=0.2).not_done:
                check()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _mean_prediction(estimators: list[Any], x: Matrix, n_classes: int) -> Floats:
    return np.asarray(np.mean([full_probabilities(estimator, x, n_classes) for estimator in estimators], axis=0))


def _fit_once(
    estimator: Any,
    x: Matrix,
    q: Floats,
    weight: Floats,
    rows: Ints,
    rng: np.random.Generator,
    most: int | None = None,
    draw: bool = False,
) -> Any:
    """Fit a copy: each row once per class with weight q, or with a label drawn from q.

    A label is drawn if the estimator takes no weights, and with `draw`, which is faster and good enough for many rows.
    If there are more than `most` rows, some of them are drawn at random.
    """
    model = clone(estimator)
    row = np.arange(len(rows))
    row_weight: Floats | None = weight[rows]
    if not has_fit_parameter(estimator, "sample_weight"):
        row = np.repeat(row, np.maximum(1, np.rint(weight[rows] / np.median(weight[rows]))).astype(np.int64))
        row_weight = None
        label = draw_labels(q[rows][row], rng)
    elif draw:
        label = draw_labels(q[rows], rng)
    else:
        row, label = np.nonzero(q[rows] >= np.minimum(SMALLEST_SHARE, q[rows].max(1, keepdims=True)))
        row_weight = weight[rows][row] * q[rows][row, label]
    if most is not None and len(row) > most:
        drawn = rng.choice(len(row), most, replace=False)
        row, label = row[drawn], label[drawn]
        row_weight = None if row_weight is None else row_weight[drawn]
    if len(np.unique(label)) < 2:
        return ConstantClassifier(int(label[0]))
    features = x[rows[row]]
    if row_weight is None:
        return model.fit(features, label)
    return model.fit(features, label, sample_weight=row_weight)


def draw_labels(q: Floats, rng: np.random.Generator) -> Ints:
    """One class per row, with probabilities q [M, K]."""
    cumulative = q.cumsum(1)
    return np.asarray((rng.random((len(q), 1)) * cumulative[:, -1:] > cumulative).sum(1).clip(max=q.shape[1] - 1))


@dataclass
class ConstantClassifier:
    """Predicts the only class of its training rows."""

    label: int

    @property
    def classes_(self) -> Ints:
        return np.array([self.label])

    def predict_proba(self, x: Matrix) -> Floats:
        return np.ones((x.shape[0], 1))


def find_columns(x: Matrix) -> Floats | None:
    """A selection [D, WIDE] of the columns of a table with many one-hot columns; None if there are fewer.

    Rare categories are left out: they say little, and models of trees become slow. Their directions would say even
    less, because a tree cannot find a category in them.
    """
    if sparse.issparse(x) or x.shape[1] <= WIDE:
        return None
    sample = x[:: max(1, len(x) // SAMPLE)][:SAMPLE]
    ordered = np.sort(sample, axis=0)
    is_binary = ((np.diff(ordered, axis=0) > 0).sum(0)) <= 1
    if is_binary.mean() <= 0.5:
        return None
    frequency = (sample > (ordered[0] + ordered[-1]) / 2).mean(0)
    varies = np.where(is_binary, frequency * (1 - frequency), 1.0)
    kept = np.sort(np.argsort(-varies, kind="stable")[:WIDE])
    selection: Any = np.zeros((x.shape[1], len(kept)), dtype=np.float32)
    selection[kept, np.arange(len(kept))] = 1
    return np.asarray(selection)


def find_directions(x: Matrix) -> Floats | None:
    """The principal directions [D, WIDE] of standardized columns, for dense inputs with more columns than that."""
    if sparse.issparse(x) or x.shape[1] <= WIDE:
        return None
    _, scale = mean_and_scale(x)
    z = ((x - x.mean(axis=0)) / scale).astype(np.float32)
    _, vectors = np.linalg.eigh(z.T @ z)
    return np.ascontiguousarray(vectors[:, ::-1][:, :WIDE] / scale[:, None], dtype=np.float32)


def find_projection(x: Matrix, seed: int, size: int = 50) -> Floats | None:
    """The columns [D, d] of a sparse matrix for models that need dense ones.

    These are the columns of numbers and of frequent categories, and the leading right singular vectors of all others,
    which are words.
    """
    if not sparse.issparse(x):
        return None
    kept = find_plain_columns(x)
    words = np.setdiff1d(np.arange(x.shape[1]), kept)
    selection = np.zeros((x.shape[1], len(kept)))
    selection[kept, np.arange(len(kept))] = 1
    size = min(size, min(x.shape[0], len(words)) - 1)
    if size < 1:
        return np.eye(x.shape[1])
    start = np.random.default_rng(seed).random(min(x.shape[0], len(words)))
    _, _, directions = sparse.linalg.svds(x[:, words].astype(np.float64), k=size, v0=start)
    projection = np.zeros((x.shape[1], size))
    projection[words] = directions.T
    return np.ascontiguousarray(np.concatenate([selection, projection], axis=1))


def find_plain_columns(x: Matrix) -> Ints:
    """Columns of numbers, some of which are negative, and of categories that are not rare; at most WIDE.

    Trees find them more easily than directions in which they are mixed with words. Weights of words are not negative.
    """
    entries = np.bincount(x.indices, minlength=x.shape[1])
    low, high = (extreme.toarray().ravel() for extreme in (x.min(axis=0), x.max(axis=0)))
    is_category = (low == 0) & np.isclose(x.sum(axis=0), entries * high) & (entries >= FREQUENT * x.shape[0])
    plain = np.flatnonzero((low < 0) | is_category)
    return np.sort(plain[np.argsort(-entries[plain], kind="stable")[:WIDE]])


def fit_neighbors(x: Matrix, q: Floats, weight: Floats, k: int = 15) -> tuple[Floats, Neighbors]:
    """Predictions [M, K] of all rows, and the module that predicts new rows."""
    used = np.flatnonzero(weight > 0)
    if len(used) > MOST_POINTS:
        used = np.sort(np.random.default_rng(0).choice(used, MOST_POINTS, replace=False))
    mean, scale = mean_and_scale(x[used])
    z = ((x - mean) / scale).astype(np.float32)
    k = max(1, min(k, len(used) - 1))
    labels = weight[used, None] * q[used]
    search = NearestNeighbors(n_neighbors=min(k + 1, len(used))).fit(z[used])
    found = search.kneighbors(z, return_distance=False)  # [M, k + 1]
    own = np.full(len(q), -1)
    own[used] = np.arange(len(used))
    other = found != own[:, None]
    other &= other.cumsum(1) <= k  # the k nearest that are not the row itself
    votes = np.einsum("mk,mkc->mc", other, labels[found])
    p = votes / np.maximum(votes.sum(1, keepdims=True), 1e-12)
    return p, Neighbors(mean, scale, z[used], labels, k)
