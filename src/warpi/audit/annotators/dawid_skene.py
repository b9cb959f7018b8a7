"""Dawid and Skene's model of annotators, fitted by EM in float64.

Each annotator a has a matrix T_a[k, l] = P(label l | true class k). Labels of a row are independent given its class:

    q_n(k)     ∝ prior_n(k) prod over labels (a, l) of row n of T_a[k, l]
    T_a[k, l]  = (C_a[k, l] + s M[k, l]) / (sum_l C_a[k, l] + s),    C_a[k, l] = sum of q_n(k) over labels l of a
    M[k, l]    = (sum_a C_a[k, l] + 1/K) / (sum_a,l C_a[k, l] + 1)

M is the matrix of all annotators together. The strength s says how similar the annotators are: 0 gives the original
model, and infinity one matrix for all. It is estimated from how much the matrices differ. The prior of a row is the
frequency of the classes, or a classifier's p(class | x).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import softmax

from warpi.audit.label_scores import Floats, Ints, apply_temperature

_FIRST_STRENGTH = 10.0
_LEAST_STRENGTH, _MOST_STRENGTH = 0.1, 1e9
_LEAST = 1e-4  # of a classifier's probability
_TEMPERATURES = np.exp(np.linspace(-1.6, 1.6, 33))


@dataclass(frozen=True, eq=False)
class Labels:
    """L labels by A annotators of N rows with K classes."""

    row: Ints  # [L]
    annotator: Ints  # [L]
    label: Ints  # [L]
    n_rows: int
    n_annotators: int
    n_classes: int

    def design(self) -> csr_array:
        """Which row each annotator gave each label.  [A K, N] of 0 and 1"""
        index = self.annotator * self.n_classes + self.label
        shape = (self.n_annotators * self.n_classes, self.n_rows)
        return csr_array((np.ones(len(self.row)), (index, self.row)), shape=shape)

    def votes(self) -> Floats:
        """How many annotators gave each row each label.  [N, K]"""
        votes = np.zeros((self.n_rows, self.n_classes))
        np.add.at(votes, (self.row, self.label), 1)
        return votes


@dataclass(frozen=True, eq=False)
class DawidSkene:
    """A fitted model."""

    q: Floats  # [N, K] P(true class | all labels)
    T: Floats  # [A, K, K] of each annotator; one row per true class
    strength: float
    temperature: float  # of the classifier's probabilities; 1 without a classifier
    steps: int  # of EM


def fit_dawid_skene(labels: Labels, p: Floats | None = None, strength: float | None = None) -> DawidSkene:
    """Fit the model. `p` [N, K] are a classifier's probabilities for the rows. If `strength` is None, it is estimated.

    With p, the model is first fitted without it. A temperature is then fitted so that p agrees with the result, and the
    model is fitted again with p as the prior of each row.
    """
    start = labels.votes() + 1 / labels.n_classes
    q = start / start.sum(1, keepdims=True)
    model = _fit_with_strength(labels, q, None, strength)
    if p is None:
        return model
    p = np.maximum(np.asarray(p, np.float64), _LEAST)
    temperature = _fit_temperature(p, model.q[labels.votes().sum(1) > 0], labels.votes().sum(1) > 0)
    prior = apply_temperature(p, temperature)
    fitted = _fit_with_strength(labels, model.q, prior, strength)
    return DawidSkene(fitted.q, fitted.T, fitted.strength, temperature, model.steps + fitted.steps)


def _fit_with_strength(labels: Labels, q: Floats, prior: Floats | None, strength: float | None) -> DawidSkene:
    design = labels.design()
    s = _FIRST_STRENGTH if strength is None else strength
    steps = 0
    for _ in range(20):
        q, T, n = run_em(design, labels.n_classes, q, prior, s)
        steps += n
        if strength is not None:
            break
        new = estimate_strength(count_labels(design, q))
        if abs(np.log(new / s)) < 0.01:
            break
        s = new
    return DawidSkene(q, T, s, 1.0, steps)


def run_em(
    design: csr_array, K: int, q: Floats, prior: Floats | None, strength: float, steps: int = 200, tol: float = 1e-6
) -> tuple[Floats, Floats, int]:
    """EM steps from q until no probability changes by more than `tol`; returns q, T and the number of steps."""
    step = 0
    while step < steps:
        step += 1
        T = estimate_matrices(count_labels(design, q), strength)
        before = np.log((q.sum(0) + 1) / (len(q) + K)) if prior is None else np.log(prior)
        score = before + design.T @ np.log(T).transpose(0, 2, 1).reshape(-1, K)
        previous, q = q, softmax(score, axis=1)
        if np.abs(q - previous).max() < tol:
            break
    return q, T, step


def count_labels(design: csr_array, q: Floats) -> Floats:
    """C_a[k, l]: expected number of labels l by annotator a of rows of class k.  [A, K, K]"""
    K = q.shape[1]
    counts: NDArray[np.float64] = (design @ q).reshape(-1, K, K).transpose(0, 2, 1)
    return counts


def pool_matrices(counts: Floats) -> Floats:
    """M: the matrix of all annotators together.  [K, K]"""
    K = counts.shape[1]
    total = counts.sum(0) + 1 / K
    return np.asarray(total / total.sum(1, keepdims=True))


def estimate_matrices(counts: Floats, strength: float) -> Floats:
    """T_a: the matrices of the annotators, shrunk toward that of all.  [A, K, K]"""
    T = counts + max(strength, 1e-6) * pool_matrices(counts)
    return np.asarray(T / T.sum(2, keepdims=True))


def estimate_strength(counts: Floats) -> float:
    """How similar the annotators are: the s for which rows of T_a vary around M like Dirichlet(s M), by second moments.

    With v_k = sum_l M[k, l] (1 - M[k, l]), a row of C_a / n_a,k has the expected squared distance v_k (1/s + 1/n_a,k)
    from M. The sum of these distances, weighted by n_a,k, is solved for s (DerSimonian and Laird's estimate).
    """
    M = pool_matrices(counts)
    n = counts.sum(2)  # [A, K]
    share = counts / np.maximum(n, 1e-12)[..., None]
    distance = (n * ((share - M) ** 2).sum(2)).sum(0)  # [K]
    v = (M * (1 - M)).sum(1)
    total = np.maximum(n.sum(0), 1e-12)
    freedom = np.maximum((n >= 1).sum(0) - 1, 0)
    scale = total - (n**2).sum(0) / total
    excess = float((distance - freedom * v).sum())
    if excess <= 0:
        return _MOST_STRENGTH
    return float(np.clip((scale * v).sum() / excess, _LEAST_STRENGTH, _MOST_STRENGTH))


def _fit_temperature(p: Floats, q: Floats, labeled: NDArray[np.bool_]) -> float:
    """The temperature at which p is most probable under q, on the rows that have labels."""
    if not labeled.any():
        return 1.0

    def fit(temperature: float) -> float:
        return float((q * np.log(np.maximum(apply_temperature(p[labeled], temperature), 1e-30))).sum())

    return float(max(_TEMPERATURES.tolist(), key=fit))
