"""Estimate the matrix T[true class, given label] for `auto`, and the posterior of the true class of each noisy row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from warpi.auto.combine import pick
from warpi.auto.rows import Floats, Ints, one_hot


def transition_prior(p_noisy_label: Floats, truth: Ints, given_trusted: Ints | None, n_classes: int) -> Floats:
    """Pseudo-counts [K, K] of T.

    Row k begins with 1/K in each cell and 1 more on the diagonal. A trusted row of true class k whose given label is
    known adds 1 to the cell of that label. One whose given label is not known adds 1/2, divided among the cells as
    `p_noisy_label` says: what a model of the given labels predicts for it. `truth` are the trusted rows' true classes.
    """
    prior = np.full((n_classes, n_classes), 1 / n_classes) + np.eye(n_classes)
    known = np.zeros(len(truth), dtype=bool) if given_trusted is None else given_trusted >= 0
    for k in range(n_classes):
        members = (truth == k) & ~known
        if members.any():
            row = p_noisy_label[members].mean(0) + 0.01
            row[k] += 0.5
            prior[k] += 0.5 * members.sum() * row / row.sum()
    if given_trusted is not None:
        np.add.at(prior, (truth[known], given_trusted[known]), 1.0)
    return prior


def diagonal_prior(n_rows: int, n_classes: int) -> Floats:
    """Pseudo-counts of T without trusted rows: most labels are right."""
    return np.full((n_classes, n_classes), 1 / n_classes) + np.eye(n_classes) * (1 + n_rows / (5 * n_classes))


def estimate_transition(
    p: Floats, given: Ints, prior: Floats, checked: NDArray[np.bool_] | None = None, steps: int = 30
) -> tuple[Floats, Floats]:
    """EM for T with fixed p(true class | x). Returns T and the posterior [N, K] of the true class.

    The given labels of `checked` rows [N] are right. They tell nothing about T, because people have replaced them.
    """
    labels = one_hot(given, p.shape[1])
    right = np.zeros(len(given), dtype=bool) if checked is None else checked
    known = labels[right]
    labels[right] = 0
    transition = prior / prior.sum(1, keepdims=True)
    posterior = bayes(p, transition, given)
    for _ in range(steps):
        counts = prior + posterior.T @ labels
        transition = counts / counts.sum(1, keepdims=True)
        posterior = bayes(p, transition, given)
    posterior[right] = known
    return transition, posterior


def confident_class(p: Floats, given: Ints) -> Ints:
    """The class that each row confidently belongs to, -1 if there is none (confident learning).

    Of the classes whose probability reaches their threshold, it is the most probable. The threshold of a class is the
    mean probability of the class over the rows with that label.
    """
    n_classes = p.shape[1]
    counts = np.bincount(given, minlength=n_classes)
    own = np.bincount(given, weights=pick(p, given), minlength=n_classes)
    threshold = np.where(counts > 0, own / np.maximum(counts, 1), np.inf)
    reached = p >= threshold
    return np.where(reached.any(1), np.where(reached, p, -1.0).argmax(1), -1)


def confident_transition(p: Floats, given: Ints) -> Floats:
    """T without trusted rows: counts of confident classes and given labels, scaled to the size of each given label.

    Nothing anchors EM without trusted rows. A model of the given labels also predicts their mistakes, so EM explains
    almost all labels as right.
    """
    n_classes = p.shape[1]
    counts = np.full((n_classes, n_classes), 1 / n_classes) + np.eye(n_classes)
    confident = confident_class(p, given)
    known = confident >= 0
    np.add.at(counts, (confident[known], given[known]), 1.0)
    counts *= np.maximum(np.bincount(given, minlength=n_classes), 1) / counts.sum(0)
    return np.asarray(counts / counts.sum(1, keepdims=True))


def bayes(p: Floats, transition: Floats, given: Ints) -> Floats:
    """The probability of each true class, given x and the given label."""
    joint = p * transition[:, given].T
    return np.asarray(joint / np.maximum(joint.sum(1, keepdims=True), 1e-300))
