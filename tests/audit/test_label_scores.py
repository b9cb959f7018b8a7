"""The formulas of an audit, compared with naive loops and with simulated data whose true labels are known."""

import numpy as np
import pytest

from warpi.audit import label_scores as scores


def simulate(n: int = 2000, K: int = 4, noise: float = 0.3, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Data that satisfies the assumptions: p(true | x), true labels, given labels and T."""
    rng = np.random.default_rng(seed)
    z = 2.5 * rng.standard_normal((n, K))
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    T = (1 - noise) * np.eye(K) + noise * np.roll(np.eye(K), 1, axis=1)
    true = (p.cumsum(1) < rng.random(n)[:, None]).sum(1)
    given = (T[true].cumsum(1) < rng.random(n)[:, None]).sum(1)
    return p, true, given, T


def test_posterior_is_bayes_rule() -> None:
    p, _, y, T = simulate(50)
    q = scores.posterior(p, y, T)
    for n in range(50):
        joint = [p[n, i] * T[i, y[n]] for i in range(4)]
        assert np.allclose(q[n], np.array(joint) / sum(joint))
    assert np.allclose(scores.label_quality(p, y, T), q[np.arange(50), y])
    assert np.allclose(scores.posterior(p, y, np.full((4, 4), 0.25)), p)  # uninformative labels change nothing
    certain = np.eye(4)[[0, 1]]
    assert np.array_equal(scores.posterior(certain, np.array([1, 1]), np.eye(4)), certain)  # impossible label: p


def test_wrong_probability_is_calibrated() -> None:
    p, true, y, T = simulate(20_000)
    verdict = scores.judge_labels(scores.posterior(p, y, T), y)
    for low, high in ((0.1, 0.3), (0.4, 0.6), (0.7, 0.9)):
        rows = (verdict.wrong_probability > low) & (verdict.wrong_probability < high)
        assert abs(verdict.wrong_probability[rows].mean() - (true != y)[rows].mean()) < 0.04
    assert np.array_equal(verdict.is_label_issue, (verdict.wrong_probability > 0.5) & (verdict.suggested != y))
    assert np.allclose(verdict.label_quality + verdict.wrong_probability, 1)


def test_the_most_probable_label_is_not_an_issue() -> None:
    verdict = scores.judge_labels(np.array([[0.4, 0.3, 0.3], [0.4, 0.3, 0.3]]), np.array([0, 1]))
    assert verdict.is_label_issue.tolist() == [False, True]


def test_em_estimates_T_better_than_the_confusion_matrix() -> None:
    p, _, y, T = simulate(4000)
    em = scores.estimate_transition(p, y)
    soft = p.T @ np.eye(4)[y]
    soft /= soft.sum(1, keepdims=True)
    assert np.allclose(em.sum(1), 1)
    assert np.abs(em - T).max() < 0.05 < np.abs(soft - T).max()


def test_temperature_corrects_overconfidence() -> None:
    p, true, _, _ = simulate()
    assert abs(scores.fit_temperature(scores.apply_temperature(p, 0.5), true) - 2) < 0.25
    assert scores.fit_temperature(p[:0], true[:0]) == 1
    assert scores.fit_temperature(np.eye(4)[[0, 1]] * 0.9 + 0.025, np.array([0, 1])) > 0.2  # two rows prove little


def test_memorization_is_removed() -> None:
    p, _, y, _ = simulate()
    q, _, held_out_y, _ = simulate(seed=1)
    odds = scores.log_odds(q, held_out_y)
    assert scores.log_odds(np.array([[1 - 1e-20, 1e-20]]), np.array([0]))[0] == pytest.approx(np.log(1e20))
    z = np.log(p)
    z[np.arange(len(y)), y] += 3 * (1 - p[np.arange(len(y)), y])  # the effect of training on the given labels
    memorized = scores.apply_temperature(np.exp(z), 1.0)
    corrected, a = scores.remove_memorization(memorized, y, odds)
    assert a > 1
    assert scores.log_odds(corrected, y).mean() == pytest.approx(odds.mean(), abs=0.05)
    assert np.abs(corrected - p).mean() < 0.5 * np.abs(memorized - p).mean()
    unchanged, a = scores.remove_memorization(memorized, y, odds[:0])
    assert a == 0
    assert np.allclose(unchanged, memorized)
    assert scores.remove_memorization(p, y, odds + 5)[1] == 0  # never raises the log-odds
