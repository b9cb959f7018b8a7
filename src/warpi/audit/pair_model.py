"""The probability of every true class, learned from rows whose given label and true label are both known.

A checked row is a pair of labels: the given one and the true one. A conditional logit with four or five numbers learns
from such pairs how much to trust the classifier, the transition matrix, the given label and the labels of similar rows:

    F[n, k]       = (log p[n, k],  log T[k, g_n],  [k = g_n],  log vote[n, k],  log T_EM[k, g_n])
    q(k | x_n, g_n) = softmax_k(F[n] b),      b ~ N(mu, diag(sd^2)),  mu = (1, 1, 0, 0, 0)

Without pairs, b = mu, which is Bayes' rule with the soft transition matrix T. Unlike T alone, the third number can
represent mistakes that cluster where classes look alike. Pure NumPy functions; see `label_scores` for p, y and T.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax

from warpi.audit.label_scores import Floats, Ints, estimate_transition

NEIGHBORS = 15
MIN_PAIRS = 20  # with fewer, Bayes' rule with the transition matrix is as good
_FLOOR = 1e-6  # of probabilities in a logarithm
_LEAST = 1e-4  # of a classifier's probability
_MEAN = {"p": 1.0, "T": 1.0, "keep": 0.0, "vote": 0.0, "T_em": 0.0}
_SD = {"p": 0.6, "T": 0.6, "keep": 2.0, "vote": 0.6, "T_em": 0.6}
_STEPS = 25


def soft_transition(p: Floats, y: Ints) -> Floats:
    """T[i, j] ∝ sum_n p_n(i) [y_n = j] + 1: the soft confusion matrix, with one row per true class.  [K, K]"""
    counts = p.T @ np.eye(p.shape[1])[y] + 1
    return np.asarray(counts / counts.sum(1, keepdims=True))


def count_votes(
    x: NDArray[np.floating], y: Ints, n_classes: int, others: int = 0, k: int = NEIGHBORS, chunk: int = 1024
) -> Floats:
    """How many of the k rows nearest to each row (by the cosine, without the row itself) have each label y.  [N, K]

    The last `others` rows of x have no label: they get votes but do not vote.
    """
    h = np.asarray(x, np.float32).reshape(len(x), -1)
    h = h / np.maximum(np.linalg.norm(h, axis=1, keepdims=True), 1e-12)
    voters = h[: len(h) - others]
    k = min(k, len(voters) - 1)
    votes = np.zeros((len(x), n_classes))
    for start in range(0, len(x), chunk):
        rows = np.arange(start, min(start + chunk, len(x)))
        similarity = h[rows] @ voters.T
        own = rows < len(voters)
        similarity[np.flatnonzero(own), rows[own]] = -np.inf
        nearest = np.argpartition(-similarity, k - 1, axis=1)[:, :k] if k else np.zeros((len(rows), 0), np.int64)
        np.add.at(votes, (rows[:, None], y[nearest]), 1)
    return votes


def pair_features(p: Floats, y: Ints, votes: Floats | None = None, others: int = 0) -> tuple[Floats, list[str]]:
    """The features F [N, K, D] of every row and class, and their names. `votes` [N, K] are optional.

    The transition matrices are estimated without the last `others` rows.
    """
    n = len(p) - others
    p = raise_small(p)
    return features_of(p, y, soft_transition(p[:n], y[:n]), estimate_transition(p[:n], y[:n]), votes)


def raise_small(p: Floats) -> Floats:
    """Probabilities of at least about 1e-4, so that logarithms are moderate.  [N, K]"""
    p = np.maximum(np.asarray(p, np.float64), _LEAST)
    return np.asarray(p / p.sum(1, keepdims=True))


def features_of(p: Floats, y: Ints, soft: Floats, em: Floats, votes: Floats | None = None) -> tuple[Floats, list[str]]:
    """The features [N, K, D] for two transition matrices [K, K] that are known, and their names."""
    K = p.shape[1]
    columns = {
        "p": np.log(p),
        "T": np.log(np.maximum(soft, _FLOOR))[:, y].T,
        "keep": np.eye(K)[y],
        "T_em": np.log(np.maximum(em, _FLOOR))[:, y].T,
    }
    if votes is not None:
        total = votes.sum(1, keepdims=True)
        columns["vote"] = np.log((votes + 0.5) / (total + 0.5 * K))
    return np.stack(list(columns.values()), axis=2), list(columns)


def fit_pairs(features: Floats, names: list[str], true: Ints) -> Floats:
    """Maximize the posterior of b for checked rows with features [n, K, D] and true classes [n], by Newton.  [D]"""
    mean = np.array([_MEAN[name] for name in names])
    precision = np.array([_SD[name] for name in names]) ** -2.0
    b = mean.copy()
    if not len(true):
        return b
    rows = np.arange(len(true))

    def objective(b: Floats) -> float:
        fit = log_softmax(features @ b, axis=1)[rows, true].sum()
        return float(fit - 0.5 * (precision * (b - mean) ** 2).sum())

    value = objective(b)
    for _ in range(_STEPS):
        q = softmax(features @ b, axis=1)  # [n, K]
        expected = np.einsum("nk,nkd->nd", q, features)
        gradient = (features[rows, true] - expected).sum(0) - precision * (b - mean)
        hessian = np.einsum("nk,nkd,nke->de", q, features, features) - expected.T @ expected + np.diag(precision)
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while (new := objective(b + size * step)) < value and size > 1e-6:
            size /= 2
        if new - value < 1e-9:
            break
        b = b + size * step
        value = new
    return b


def pair_posterior(features: Floats, b: Floats) -> Floats:
    """q = softmax(F b).  [N, K]"""
    q: NDArray[np.float64] = softmax(features @ b, axis=1)
    return q


def cross_fit_pairs(
    features: Floats, names: list[str], checked: Ints, true: Ints, folds: int = 5, seed: int = 0
) -> tuple[Floats, Floats]:
    """Posteriors of all rows, as the mean over the fits without one fold each, and of the checked rows out of fold.

    `checked` [m] are positions of the checked rows, and `true` [m] their classes.  [N, K], [m, K]
    """
    fits, left_out = fit_folds(features[checked], names, true, folds, seed)
    return mean_posterior(features, fits), left_out


def mean_posterior(features: Floats, fits: Sequence[Floats]) -> Floats:
    """The mean of the posteriors under several fits b.  [N, K]"""
    mean = np.zeros(features.shape[:2])
    for b in fits:
        mean += pair_posterior(features, b) / len(fits)
    return mean


def fit_folds(
    features: Floats, names: list[str], true: Ints, folds: int = 5, seed: int = 0
) -> tuple[list[Floats], Floats]:
    """Fit b without each fold of the checked rows, and compute their posteriors out of fold.  [D] each, [m, K]"""
    m = len(true)
    folds = min(folds, m)
    if folds < 2:
        fit = fit_pairs(features, names, true)
        return [fit], pair_posterior(features, fit_pairs(features[:0], names, true[:0]))
    fold = np.random.default_rng(seed).permutation(m) % folds
    fits = [fit_pairs(features[fold != f], names, true[fold != f]) for f in range(folds)]
    left_out = np.zeros((m, features.shape[1]))
    for f, b in enumerate(fits):
        left_out[fold == f] = pair_posterior(features[fold == f], b)
    return fits, left_out
