"""Noise rates from a model's probabilities and random checks."""

import numpy as np
import pytest

from warpi.audit.rates import (
    MIN_CHECKS,
    Checks,
    Rate,
    _interval,
    combine_with_expectation,
    estimate_class_rates,
    estimate_rate,
)

N, K = 2000, 4


def population(seed: int, skill: float = 0.7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Given labels, which of them are wrong, and a biased model's probability that they are."""
    rng = np.random.default_rng(seed)
    given = rng.integers(0, K, N)
    is_wrong = rng.random(N) < 0.1 + 0.1 * given
    w = np.clip(0.1 + skill * is_wrong * rng.random(N), 0, 1)  # too low on average
    return given, is_wrong, w


def draw(seed: int, m: int, given: np.ndarray, is_wrong: np.ndarray, w: np.ndarray) -> Checks:
    return check(np.random.default_rng(seed).choice(N, m, replace=False), given, is_wrong, w)


def check(
    rows: np.ndarray,
    given: np.ndarray,
    is_wrong: np.ndarray,
    w: np.ndarray,
    random: np.ndarray | None = None,
    weight: np.ndarray | None = None,
) -> Checks:
    random = np.ones(len(rows), bool) if random is None else random
    weight = np.ones(len(rows)) if weight is None else weight
    return Checks(given, w, given[rows], is_wrong[rows], w[rows], random, weight)


def test_the_estimate_is_unbiased_and_its_interval_covers() -> None:
    given, is_wrong, w = population(0)
    truth = is_wrong.mean()
    assert abs(w.mean() - truth) > 0.02  # the model alone is wrong
    rates = [estimate_rate(draw(seed, 100, given, is_wrong, w)) for seed in range(300)]
    assert abs(np.mean([r.rate for r in rates]) - truth) < 0.005
    covered = np.mean([r.low <= truth <= r.high for r in rates])  # type: ignore[operator]
    assert 0.85 <= covered <= 0.97


def test_a_good_model_makes_the_interval_shorter() -> None:
    given, is_wrong, w = population(1)
    good = estimate_rate(draw(0, 150, given, is_wrong, w))
    useless = estimate_rate(draw(0, 150, given, is_wrong, np.full(N, 0.5)))
    assert good.high - good.low < 0.75 * (useless.high - useless.low)  # type: ignore[operator]


def test_class_intervals_cover() -> None:
    given, is_wrong, w = population(2)
    truth = [is_wrong[given == k].mean() for k in range(K)]
    covered = [
        r.low <= truth[k] <= r.high  # type: ignore[operator]
        for seed in range(100)
        for k, r in enumerate(estimate_class_rates(draw(seed, 150, given, is_wrong, w), K))
    ]
    assert np.mean(covered) >= 0.86


def test_checking_every_row_gives_the_exact_rate() -> None:
    given, is_wrong, w = population(3)
    rate = estimate_rate(draw(0, N, given, is_wrong, w))
    assert rate.rate == pytest.approx(is_wrong.mean())
    assert rate.high - rate.low < 1e-3  # type: ignore[operator]
    for k, r in enumerate(estimate_class_rates(draw(0, N, given, is_wrong, w), K)):
        assert r.rate == pytest.approx(is_wrong[given == k].mean(), abs=0.02)


def test_rows_checked_because_of_their_score_do_not_bias_the_rate() -> None:
    given, is_wrong, w = population(4)
    top = np.flatnonzero(w >= np.sort(w)[-200])  # all of these are checked
    estimates, naive = [], []
    for seed in range(200):
        random = np.random.default_rng(seed).choice(N, 100, replace=False)
        checked = np.union1d(random, top)
        checks = check(checked, given, is_wrong, w, np.isin(checked, random))
        estimates.append(estimate_rate(checks))
        naive.append(is_wrong[checked].mean())
    truth = is_wrong.mean()
    assert abs(np.mean([r.rate for r in estimates]) - truth) < 0.005
    assert np.mean(naive) - truth > 0.2
    assert np.mean([r.low <= truth <= r.high for r in estimates]) >= 0.85  # type: ignore[operator]


def test_checks_drawn_separately_from_each_class() -> None:
    given, is_wrong, w = population(7)
    given = np.where(np.arange(N) < 1500, 0, given)  # one large class
    size = np.bincount(given, minlength=K)
    truth = is_wrong.mean()
    estimates = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows = np.concatenate([rng.choice(np.flatnonzero(given == k), 30, replace=False) for k in range(K)])
        estimates.append(estimate_rate(check(rows, given, is_wrong, w, weight=size[given[rows]] / 30)))
    assert abs(np.mean([r.rate for r in estimates]) - truth) < 0.01
    assert np.mean([r.low <= truth <= r.high for r in estimates]) >= 0.85  # type: ignore[operator]


def test_checks_of_other_rows_are_a_sample_too() -> None:
    """Trusted rows from a second file: the truth is about the rows of the data, which differ from draw to draw."""
    covered = []
    for seed in range(300):
        given, is_wrong, w = population(1000 + seed)
        inside, other = np.arange(400), np.arange(400, 700)
        checks = Checks(
            given[inside],
            w[inside],
            given[other],
            is_wrong[other],
            w[other],
            np.ones(300, bool),
            np.ones(300),
            np.ones(300, bool),
        )
        rate = estimate_rate(checks)
        covered.append(rate.low <= is_wrong[inside].mean() <= rate.high)  # type: ignore[operator]
    assert 0.85 <= np.mean(covered) <= 0.96


def test_few_random_checks_give_no_interval() -> None:
    given, is_wrong, w = population(5)
    checks = draw(0, MIN_CHECKS - 1, given, is_wrong, w)
    rate = estimate_rate(checks)
    assert (rate.low, rate.high, rate.checked) == (None, None, MIN_CHECKS - 1)
    assert rate.rate == pytest.approx(w.mean())
    assert all(r.low is None for r in estimate_class_rates(checks, K))
    assert estimate_rate(draw(0, MIN_CHECKS, given, is_wrong, w)).low is not None


def test_a_class_without_checks_or_rows() -> None:
    given, is_wrong, w = population(6)
    given = np.where(given == 3, 2, given)  # no row has the last label
    checked = np.flatnonzero(given != 0)[:80]  # and none with the first label is checked
    checks = check(checked, given, is_wrong, w)
    rates = estimate_class_rates(checks, K)
    assert rates[3].n == 0
    assert rates[3].low is None
    widths = [r.high - r.low for r in rates[:3]]  # type: ignore[operator]
    assert widths[0] > max(widths[1:])


def test_interval_of_an_estimate_near_zero_still_says_something() -> None:
    """With a sample size of estimate / variance = 7 checks, the interval would end at 0.28."""
    low, high = _interval(0.0068, 0.00095, 34, 0.9)
    assert low < 0.001
    assert 0.06 < high < 0.12
    assert _interval(0.9932, 0.00095, 34, 0.9) == pytest.approx((1 - high, 1 - low))
    assert _interval(0.001, 2.3e-5, 34, 0.9)[1] > 0.04  # no error was found: no shorter than the checks allow


def test_a_number_lies_between_checks_and_expectation_and_in_the_interval() -> None:
    few, many = Rate(1000, 200.0, 100.0, 320.0, 40), Rate(1000, 200.0, 195.0, 205.0, 900)
    assert 150 < combine_with_expectation(few, 150.0).rate < 165
    assert combine_with_expectation(many, 190.0).rate == pytest.approx(200, abs=0.5)
    skewed = Rate(1000, 20.0, 12.0, 60.0, 40)
    assert combine_with_expectation(skewed, 0.0).rate == skewed.low
    zero = combine_with_expectation(Rate(1000, 0.0, 0.0, 60.0, 40), 20.0)  # random checks often show no error
    assert 8 < zero.rate < 20
    assert (zero.low, zero.high) == (0.0, 60.0)
    unknown = Rate(1000, 50.0, None, None, 5)
    assert combine_with_expectation(unknown, 100.0) == unknown


def test_an_expectation_that_the_checks_contradict_counts_little() -> None:
    """The expectation is 20 points off, eight times the usual error of a model."""
    errors = []
    for seed in range(200):
        checked = np.random.default_rng(seed).normal(350, 60)
        number = Rate(1000, checked, checked - 100, checked + 100, 90)
        errors.append(combine_with_expectation(number, 150.0).rate - 350)
    assert abs(np.mean(errors)) < 35
