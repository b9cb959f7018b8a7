"""Probability that each given label is wrong, by Bayes' rule.

Pure numpy functions. p [N, K] are a classifier's probabilities of the true class, computed from x alone; y [N] are the
given labels; T [K, K] is the transition matrix, with one row per true class.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TINY = 1e-30


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
