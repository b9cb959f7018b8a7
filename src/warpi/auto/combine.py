"""Calibration of candidates on trusted rows, and the weights of a stack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warpi.auto.rows import Floats, Ints

POWERS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
SMOOTH = 0.01


def smooth(p: Floats, amount: float) -> Floats:
    return np.asarray(p * (1 - amount) + amount / p.shape[1])


def sharpen(p: Floats, power: float) -> Floats:
    """Raise probabilities to a power and normalize, with a little of the uniform distribution before and after."""
    raised = smooth(p, SMOOTH) ** power
    return smooth(raised / raised.sum(1, keepdims=True), SMOOTH)


def pick(p: Floats, labels: Ints) -> Floats:
    """p[i, labels[i]] of each row."""
    return p[np.arange(len(labels)), labels]


def calibrate(p_trusted: Floats, truth: Ints, importance: Floats) -> float:
    """The power with the highest weighted log-likelihood of trusted rows; powers far from 1 must gain more."""
    gains = [importance @ np.log(pick(sharpen(p_trusted, g), truth)) - abs(np.log2(g)) for g in POWERS]
    return POWERS[int(np.argmax(gains))]


def stack_weights(likelihoods: Sequence[tuple[Floats, Floats]], prior: Floats, steps: int = 100) -> Floats:
    """Mixture weights by EM.

    `likelihoods` holds pairs (weight of each row [M], likelihood of the row under each candidate [M, C]). The weights
    maximize the weighted sum of log mixture likelihoods under a Dirichlet prior with `prior` pseudo-counts.
    """
    weights = prior / prior.sum()
    for _ in range(steps):
        counts = prior.astype(np.float64)
        for row_weight, likelihood in likelihoods:
            joint = likelihood * weights
            counts = counts + row_weight @ (joint / joint.sum(1, keepdims=True))
        weights = counts / counts.sum()
    return np.asarray(weights)


def drop_small(weights: Floats, below: float = 0.01) -> Floats:
    """Set small weights to 0 and scale the others to sum 1."""
    kept = np.where(weights < below, 0.0, weights)
    return np.asarray(kept / kept.sum())


def mix(parts: Sequence[Floats], weights: Floats) -> Floats:
    mixed = np.zeros_like(parts[0])
    for p, weight in zip(parts, weights, strict=True):
        if weight:
            mixed += weight * p
    return mixed


def pool(parts: Sequence[Floats], weights: Floats) -> Floats:
    """The weighted geometric mean, normalized."""
    logs = sum(weight * np.log(p) for p, weight in zip(parts, weights, strict=True))
    raised = np.exp(logs - np.max(logs, axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(1, keepdims=True))


def scale_classes(p: Floats, factors: Floats) -> Floats:
    """Multiply the probability of each class by its factor, and scale the rows to sum 1."""
    scaled = p * factors
    return np.asarray(scaled / scaled.sum(1, keepdims=True))
