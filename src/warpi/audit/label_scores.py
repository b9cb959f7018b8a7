"""Probability that each given label is wrong, by Bayes' rule, and noise rates with confidence intervals.

Pure numpy functions. p [N, K] are a classifier's probabilities of the true class, computed from x alone; y [N] are the
given labels; T [K, K] is the transition matrix, with one row per true class.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TINY = 1e-30
_Z = 1.959964  # standard normal quantile of a 95 % interval


def posterior(p: Floats, y: Ints, T: Floats) -> Floats:
    """P(true = i | x, given = y) = p_i T[i, y] / sum_j p_j T[j, y].  [N, K]

    Assumes that the given label depends on x only through the true class. If p and T together rule out the given
    label, the result is p.
    """
    joint = np.asarray(p, np.float64) * np.asarray(T, np.float64)[:, y].T  # [N, K]
    total = joint.sum(1, keepdims=True)
    return np.where(total > _TINY, joint / np.maximum(total, _TINY), p)


def label_quality(p: Floats, y: Ints, T: Floats) -> Floats:
    """P(true = given | x, given): 1 for a label that is certainly right, 0 for one that is certainly wrong.  [N]"""
    quality: Floats = posterior(p, y, T)[np.arange(len(y)), y]
    return quality


class LabelJudgments(NamedTuple):
    """Conclusions from a posterior, one entry per example."""

    suggested: Ints  # [N] the most probable class
    wrong_probability: Floats  # [N] 1 - label_quality
    label_quality: Floats  # [N] P(true = given | x, given)
    is_label_issue: NDArray[np.bool_]  # [N] wrong_probability > threshold and another class is more probable


def judge_labels(posterior: Floats, y: Ints, threshold: float = 0.5) -> LabelJudgments:
    """Suggested class, label quality and issue flag from P(true | x, given) [N, K] and the given labels [N]."""
    quality = np.clip(posterior[np.arange(len(y)), y], 0.0, 1.0)
    suggested = posterior.argmax(1).astype(np.int64)
    wrong = 1.0 - quality
    return LabelJudgments(suggested, wrong, quality, (wrong > threshold) & (suggested != y))


def estimate_transition(p: Floats, y: Ints, steps: int = 100, strength: float = 1.0) -> Floats:
    """Estimate T by maximum likelihood, max sum_n log sum_i p_n(i) T[i, y_n], with EM.  [K, K]

        q_n(i)   = p_n(i) T[i, y_n] / sum_j p_n(j) T[j, y_n]
        T[i, j]  ∝ sum_n q_n(i) [y_n = j] + strength * (fraction of label j),  rows normalized to sum 1

    EM starts from a soft confusion matrix. Unlike the confusion matrix of the most probable classes, the result does
    not count the classifier's uncertainty as noise. `strength` is the weight of the prior, in labels per row.
    """
    K = p.shape[1]
    Y = np.eye(K)[y]  # [N, K]
    prior = strength * Y.mean(0)
    counts = p.T @ Y + prior
    T = counts / counts.sum(1, keepdims=True)
    for _ in range(steps):
        counts = posterior(p, y, T).T @ Y + prior
        previous = T
        T = counts / counts.sum(1, keepdims=True)
        if np.abs(T - previous).max() < 1e-6:
            break
    return np.asarray(T)


def apply_temperature(p: Floats, temperature: float) -> Floats:
    """softmax(log p / temperature).  [..., K]"""
    z = np.log(np.maximum(np.asarray(p, np.float64), _TINY)) / temperature
    e = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def fit_temperature(p: Floats, y: Ints) -> float:
    """Temperature that maximizes the likelihood of examples with true labels y; 1 if there are none.

    Below 1, a prior log temperature ~ N(0, 1/4) applies: a few examples that are all predicted correctly must not
    make p infinitely confident.
    """
    if not len(y):
        return 1.0
    index = np.arange(len(y))

    def log_likelihood(t: float) -> float:
        p_y = apply_temperature(p, math.exp(t))[index, y]
        return float(np.log(np.maximum(p_y, _TINY)).sum()) - 2 * min(t, 0.0) ** 2

    return math.exp(max(np.linspace(-1.6, 1.6, 65).tolist(), key=log_likelihood))


def log_odds(p: Floats, y: Ints) -> Floats:
    """log p_y / (1 - p_y), accurate even if p_y is nearly 1.  [N]"""
    p = np.maximum(np.asarray(p, np.float64), _TINY)
    others = p.copy()
    others[np.arange(len(y)), y] = 0
    odds: Floats = np.log(p[np.arange(len(y)), y]) - np.log(np.maximum(others.sum(1), _TINY))
    return odds


def remove_memorization(p: Floats, y: Ints, held_out: Floats) -> tuple[Floats, float]:
    """Remove the effect of having trained on y from p; return p [N, K] and the size a of the correction.

    A training step raises the log-odds of a label in proportion to 1 - p_y. They are therefore lowered by a (1 - p_y).
    The factor a >= 0 is chosen so that their mean equals that of `held_out`: the log-odds [n] of the given labels of
    rows with equally noisy labels that were not used for training. The minimum of `held_out` is their lower limit.
    """
    if not len(held_out):
        return apply_temperature(p, 1.0), 0.0
    odds = log_odds(p, y)
    rest = 1 / (1 + np.exp(np.clip(odds, -50, 50)))  # 1 - p_y
    a = max(0.0, float(odds.mean() - held_out.mean())) / max(float(rest.mean()), 1e-6)
    z = np.log(np.maximum(np.asarray(p, np.float64), _TINY))
    z[np.arange(len(y)), y] -= np.minimum(a * rest, np.maximum(odds - held_out.min(), 0))
    return apply_temperature(np.exp(z - z.max(1, keepdims=True)), 1.0), a


def wilson_interval(rate: float, n: float, z: float = _Z) -> tuple[float, float]:
    """Wilson score interval of a proportion `rate` observed in n cases, also valid near 0 and 1; (0, 1) if n is 0."""
    if n <= 0:
        return 0.0, 1.0
    center = rate + z * z / (2 * n)
    half_width = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (center - half_width) / scale), min(1.0, (center + half_width) / scale)


def rate_margin(p: Floats, y: Ints, T: Floats) -> float:
    """Standard error of the mean of wrong_probability, measured on M trusted rows (p [M, K], true labels y).

    Trusted row m would be given label g with probability T[y_m, g]; d_m is the average excess of wrong_probability
    over those labels. The result is sqrt(mean(d)^2 + var(d) / M): the observed bias and its sampling error. It is 0
    with fewer than two rows.
    """
    if len(y) < 2:
        return 0.0
    given = np.maximum(p @ T, _TINY)  # [M, K] P(given = g | x)
    wrong = 1 - p * np.diag(T) / given  # [M, K] wrong_probability of every label
    truth = np.arange(p.shape[1])[None] != y[:, None]
    d = (T[y] * (wrong - truth)).sum(1)  # [M]
    return float(np.sqrt(d.mean() ** 2 + d.var(ddof=1) / len(d)))


def rate_by_confusion(p: Floats, y: Ints, trusted: Floats, true: Ints) -> float:
    """Proportion of wrong labels among the given labels y, without assuming that p is calibrated.

    Solves the following equations for J[i, g] = P(true = i, given = g):

        C[i, a]  = mean of p_a over the trusted rows of class i               [K, K]
        N[a, g]  = mean over the rows of p_a [y = g] = sum_i J[i, g] C[i, a]  [K, K]

    `trusted` [M, K] is p on the trusted rows, and `true` [M] their classes; every class must occur. The result is
    valid for any p that was trained neither on the labels y nor on the trusted rows, if labels depend on x only
    through the true class. With few trusted rows it is rough, so it only serves as a check of the rate from Bayes'
    rule.
    """
    K = p.shape[1]
    C = np.stack([trusted[true == i].mean(0) for i in range(K)])
    J = np.maximum(np.linalg.lstsq(C.T, p.T @ np.eye(K)[y] / len(y), rcond=None)[0], 0)
    return float(1 - np.trace(J) / J.sum())


def error_rate(wrong: Floats, margin: float = 0.0) -> dict[str, float]:
    """Proportion of wrong labels, from the probabilities `wrong` [N], and its 95 % interval.

    The Wilson interval covers the sampling error; `margin`, the standard error of the probabilities themselves, is
    added to it in squares.
    """
    n = len(wrong)
    rate = float(wrong.mean()) if n else 0.0
    low, high = wilson_interval(rate, n)
    low = rate - math.hypot(rate - low, _Z * margin)
    high = rate + math.hypot(high - rate, _Z * margin)
    return {"n": n, "rate": rate, "low": max(0.0, low), "high": min(1.0, high)}


def errors_by_class(wrong: Floats, y: Ints, classes: Sequence[str], margin: float) -> tuple[dict[str, Any], ...]:
    """`error_rate` of the rows with each given label, one dict per class."""
    return tuple({"class": name, **error_rate(wrong[y == k], margin)} for k, name in enumerate(classes))
