"""The conditional logit that learns from rows whose given and true label are known."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax

from warpi.audit.label_scores import posterior
from warpi.audit.pair_model import (
    count_votes,
    cross_fit_pairs,
    fit_pairs,
    pair_features,
    pair_posterior,
    soft_transition,
)

RNG = np.random.default_rng(0)
N, K = 60, 3
P = RNG.dirichlet(np.ones(K), N)
Y = RNG.integers(0, K, N)
TRUE = np.array([RNG.choice(K, p=p) for p in P])


def test_soft_transition_is_a_soft_confusion_matrix() -> None:
    counts = np.ones((K, K))
    for p, y in zip(P, Y, strict=True):
        counts[:, y] += p
    np.testing.assert_allclose(soft_transition(P, Y), counts / counts.sum(1, keepdims=True))


def test_votes_of_the_nearest_rows() -> None:
    x = RNG.normal(size=(20, 4))
    y = RNG.integers(0, K, 20)
    votes = count_votes(x, y, K, k=5, chunk=7)
    for n in range(20):
        cosine = x @ x[n] / np.linalg.norm(x, axis=1) / np.linalg.norm(x[n])
        nearest = [i for i in np.argsort(-cosine) if i != n][:5]
        np.testing.assert_array_equal(votes[n], np.bincount(y[nearest], minlength=K))


def test_votes_of_fewer_rows_than_neighbors() -> None:
    assert count_votes(np.eye(3), np.array([0, 1, 1]), 2).sum(1).tolist() == [2, 2, 2]
    assert count_votes(np.ones((1, 2)), np.array([1]), 2).tolist() == [[0, 0]]


def test_without_pairs_it_is_bayes_rule() -> None:
    features, names = pair_features(P, Y)
    q = pair_posterior(features, fit_pairs(features[:0], names, TRUE[:0]))
    np.testing.assert_allclose(q, posterior(P, Y, soft_transition(P, Y)), atol=2e-3)  # up to the least probability


@pytest.mark.parametrize("with_votes", [False, True])
def test_newton_finds_the_maximum(with_votes: bool) -> None:
    votes = RNG.integers(0, 15, (N, K)).astype(float) if with_votes else None
    features, names = pair_features(P, Y, votes)
    b = fit_pairs(features, names, TRUE)
    mean = np.array([{"p": 1.0, "T": 1.0}.get(name, 0.0) for name in names])
    sd = np.array([2.0 if name == "keep" else 0.6 for name in names])

    def loss(b: np.ndarray) -> float:
        fit = sum(log_softmax(features[n] @ b)[TRUE[n]] for n in range(N))
        return float(-fit + 0.5 * (((b - mean) / sd) ** 2).sum())

    best = minimize(loss, mean, method="BFGS", options={"gtol": 1e-8})
    np.testing.assert_allclose(b, best.x, atol=1e-4)


def test_a_checked_row_is_predicted_without_its_own_label() -> None:
    features, names = pair_features(P, Y)
    checked = np.arange(0, N, 4)
    _, left_out = cross_fit_pairs(features, names, checked, TRUE[checked])
    for i in range(3):
        other = TRUE[checked].copy()
        other[i] = (other[i] + 1) % K
        _, changed = cross_fit_pairs(features, names, checked, other)
        np.testing.assert_array_equal(changed[i], left_out[i])
        assert not np.array_equal(changed, left_out)  # others do change


def test_one_checked_row_is_predicted_by_the_prior() -> None:
    features, names = pair_features(P, Y)
    _, left_out = cross_fit_pairs(features, names, np.array([7]), TRUE[[7]])
    np.testing.assert_allclose(left_out, pair_posterior(features[[7]], fit_pairs(features[:0], names, TRUE[:0])))


def test_pairs_learn_that_given_labels_are_right_where_classes_overlap() -> None:
    """p is unsure everywhere and T is diagonal, so Bayes' rule changes labels; the pairs say that all are right."""
    p = np.full((200, 2), 0.5) + RNG.uniform(-0.45, 0.45, (200, 1)) * [1, -1]
    y = (RNG.random(200) < p[:, 1]).astype(int)
    features, names = pair_features(p, y)
    checked = np.arange(100)
    before = pair_posterior(features, fit_pairs(features[:0], names, y[:0]))[np.arange(200), y]
    after = pair_posterior(features, fit_pairs(features[checked], names, y[checked]))[np.arange(200), y]
    assert after[100:].min() > 0.8
    assert after[100:].mean() > before[100:].mean() + 0.1
