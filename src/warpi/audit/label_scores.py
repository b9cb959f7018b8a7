"""Which labels are wrong, by Bayes: what a classifier believes, how labels go wrong, and the label that was given.

Plain numpy, no state. p [N, K] are a classifier's probabilities of the true class, made from x alone; y [N] the given
labels; T [K, K] the transition matrix, rows = true class.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TINY = 1e-30
_Z = 1.959964  # 95 %


def posterior(p: Floats, y: Ints, T: Floats) -> Floats:
    """P(true = i | x, given = y) = p_i T[i, y] / sum_j p_j T[j, y].  [N, K]

    The label is taken to depend on x through the true class alone, which is what T says. Where p and T together rule
    the given label out, p stands.
    """
    joint = np.asarray(p, np.float64) * np.asarray(T, np.float64)[:, y].T  # [N, K]
    total = joint.sum(1, keepdims=True)
    return np.where(total > _TINY, joint / np.maximum(total, _TINY), p)


def label_quality(p: Floats, y: Ints, T: Floats) -> Floats:
    """P(true = given | x, given): 1 for a label that is surely right, 0 for one that is surely wrong.  [N]"""
    quality: Floats = posterior(p, y, T)[np.arange(len(y)), y]
    return quality


class Verdict(NamedTuple):
    """What follows from a posterior, a row an example."""

    suggested: Ints  # [N] the most probable class
    wrong_probability: Floats  # [N] 1 - label_quality
    label_quality: Floats  # [N] P(true = given | x, given)
    is_label_issue: NDArray[np.bool_]  # [N] wrong_probability > threshold, and another class is more probable


def judge_labels(posterior: Floats, y: Ints, threshold: float = 0.5) -> Verdict:
    """Suggestion, quality and decision from P(true | x, given) [N, K] and the given labels [N]."""
    quality = np.clip(posterior[np.arange(len(y)), y], 0.0, 1.0)
    suggested = posterior.argmax(1).astype(np.int64)
    wrong = 1.0 - quality
    return Verdict(suggested, wrong, quality, (wrong > threshold) & (suggested != y))


def estimate_transition(p: Floats, y: Ints, steps: int = 100, strength: float = 1.0) -> Floats:
    """T of the largest likelihood sum_n log sum_i p_n(i) T[i, y_n], by EM from a soft confusion matrix.  [K, K]

        q_n(i)   = p_n(i) T[i, y_n] / sum_j p_n(j) T[j, y_n]
        T[i, j]  = (sum_n q_n(i) [y_n = j] + s (prior_j)) / ...,   s = `strength` labels a row, the share of each label

    Unlike the confusion matrix of the most probable classes it does not count what the classifier is unsure about as
    noise.
    """
    K = p.shape[1]
    Y = np.eye(K)[y]  # [N, K]
    prior = strength * Y.mean(0)
    counts = p.T @ Y + prior
    T = counts / counts.sum(1, keepdims=True)
    for _ in range(steps):
        counts = posterior(p, y, T).T @ Y + prior
        before, T = T, counts / counts.sum(1, keepdims=True)
        if np.abs(T - before).max() < 1e-6:
            break
    return np.asarray(T)


# --- what the trusted and the held-out rows say about p ---------------------------------------------------------------


def apply_temperature(p: Floats, temperature: float) -> Floats:
    """softmax(log p / temperature).  [N, K]"""
    z = np.log(np.maximum(np.asarray(p, np.float64), _TINY)) / temperature
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def fit_temperature(p: Floats, y: Ints) -> float:
    """The temperature under which examples with true labels y are the most probable; 1 where there are none.

    Below 1 a prior, log temperature ~ N(0, 1/4), keeps a few examples that are all right from making p infinitely sure.
    """
    if not len(y):
        return 1.0
    at = np.arange(len(y))

    def fit(t: float) -> float:
        return float(np.log(np.maximum(apply_temperature(p, math.exp(t))[at, y], _TINY)).sum()) - 2 * min(t, 0.0) ** 2

    return math.exp(max(np.linspace(-1.6, 1.6, 65).tolist(), key=fit))


def log_odds(p: Floats, y: Ints) -> Floats:
    """log p_y / (1 - p_y), exact where p_y is nearly 1.  [N]"""
    p = np.maximum(np.asarray(p, np.float64), _TINY)
    others = p.copy()
    others[np.arange(len(y)), y] = 0
    odds: Floats = np.log(p[np.arange(len(y)), y]) - np.log(np.maximum(others.sum(1), _TINY))
    return odds


def remove_memorization(p: Floats, y: Ints, held_out: Floats) -> tuple[Floats, float]:
    """p without what the network remembers of y from training, and how much that was.  [N, K]

    A step of training pushes the log-odds of a label up in proportion to 1 - p_y. So they are moved back by
    a (1 - p_y), with the one a >= 0 for which their mean is that of `held_out`: the log-odds [n] of given labels on
    rows that were not trained on, whose labels are as noisy. None goes below the least of those.
    """
    if not len(held_out):
        return apply_temperature(p, 1.0), 0.0
    odds = log_odds(p, y)
    rest = 1 / (1 + np.exp(np.clip(odds, -50, 50)))  # 1 - p_y
    a = max(0.0, float(odds.mean() - held_out.mean())) / max(float(rest.mean()), 1e-6)
    back = np.minimum(a * rest, np.maximum(odds - held_out.min(), 0))
    z = np.log(np.maximum(np.asarray(p, np.float64), _TINY))
    z[np.arange(len(y)), y] -= back
    return apply_temperature(np.exp(z - z.max(1, keepdims=True)), 1.0), a


# --- rates ------------------------------------------------------------------------------------------------------------


def wilson_interval(rate: float, n: float, z: float = _Z) -> tuple[float, float]:
    """Interval of a share that was `rate` among n; (0, 1) for none.  Holds near 0 and 1, where rate ± z s does not."""
    if n <= 0:
        return 0.0, 1.0
    middle, half = rate + z * z / (2 * n), z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def rate_margin(p: Floats, y: Ints, T: Floats) -> float:
    """How far a mean of wrong_probability may be off, by the trusted rows (p [M, K], true labels y); 0 without any.

    Label g would be given to trusted row m with probability T[y_m, g]; d_m is what wrong_probability says too much on
    average over g. sqrt(mean(d)^2 + var(d) / M): what it is off by here, and what M rows cannot tell.
    """
    if len(y) < 2:
        return 0.0
    given = np.maximum(p @ T, _TINY)  # [M, K] P(given = g | x)
    wrong = 1 - p * np.diag(T) / given  # [M, K] wrong_probability of every label
    truth = np.arange(p.shape[1])[None] != y[:, None]
    d = (T[y] * (wrong - truth)).sum(1)  # [M]
    return float(np.sqrt(d.mean() ** 2 + d.var(ddof=1) / len(d)))


def rate_by_confusion(p: Floats, y: Ints, trusted: Floats, true: Ints) -> float:
    """The share of wrong labels among given labels y, by a way that does not need p to be calibrated.

        C[i, a]  = mean of p_a over the trusted rows of class i               [K, K]
        N[a, g]  = mean over the rows of p_a [y = g] = sum_i J[i, g] C[i, a]  [K, K]

    is solved for J[i, g] = P(true = i, given = g). It holds for any p that has seen neither the labels y nor the
    trusted rows (their p is `trusted`, with true classes, each of which must occur), as long as labels depend on x
    through the true class alone. With few trusted rows it is rough: a check on the rate from Bayes' rule.
    """
    K = p.shape[1]
    C = np.stack([trusted[true == i].mean(0) for i in range(K)])
    J = np.maximum(np.linalg.lstsq(C.T, p.T @ np.eye(K)[y] / len(y), rcond=None)[0], 0)
    return float(1 - np.trace(J) / J.sum())


def error_rate(wrong: Floats, doubt: float = 0.0) -> dict[str, float]:
    """Share of wrong labels and its 95 % interval: Wilson's, since whether a label is wrong has the variance r (1 - r)
    whoever knows it, widened (in squares) by the `doubt` about the probabilities themselves."""
    n, rate = len(wrong), float(wrong.mean()) if len(wrong) else 0.0
    low, high = wilson_interval(rate, n)
    low, high = rate - math.hypot(rate - low, _Z * doubt), rate + math.hypot(high - rate, _Z * doubt)
    return {"n": n, "rate": rate, "low": max(0.0, low), "high": min(1.0, high)}


def errors_by_class(wrong: Floats, y: Ints, classes: Sequence[str], doubt: float) -> tuple[dict[str, Any], ...]:
    """For each class the share of wrong labels among the rows that were given it."""
    return tuple({"class": name, **error_rate(wrong[y == k], doubt)} for k, name in enumerate(classes))
