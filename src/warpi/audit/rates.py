"""Noise rates from random checks, with or without a model's predictions. The intervals do not rely on the model.

`estimate_rate` corrects a model's predictions for all rows:

    rate = mean of w over all rows  +  mean over random checks of ([true != given] - w)

w is a model's probability that a label is wrong. If w is good, the second mean has a small variance, so the interval is
much shorter than that of the checks alone; if w is bad, the interval is longer but still valid. w of a checked row must
come from a fit without this row (`pair_model.cross_fit_pairs`). `estimate_noise_rate` uses the checks alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from warpi.audit.checked_labels import CHECKED, OUT_OF_ORDER, row_weight
from warpi.audit.label_scores import Floats, Ints
from warpi.errors import UserError
from warpi.functional.intervals import wilson_interval

MIN_CHECKS = 20
_MODEL_ERROR = 0.025  # standard deviation of the error of a model's mean probability; measured on development tables
_LEAST_SPREAD = 0.10  # smallest standard deviation assumed between the corrections of the classes


@dataclass(frozen=True)
class Rate:
    """The fraction of wrong labels among n rows, with an interval if there are enough random checks."""

    n: int
    rate: float
    low: float | None
    high: float | None
    checked: int  # number of random checks on which the interval is based


@dataclass(frozen=True, eq=False)
class Checks:
    """m checked rows, and a model's probability that each of the N labels is wrong.

    A random check represents `weight` rows relative to the others. Weights differ if the rows were drawn separately
    from each class. Checks that are not random do not change a rate.
    """

    given: Ints  # [N]
    wrong: Floats  # [N] probability that the label of each row is wrong
    checked_given: Ints  # [m]
    is_wrong: NDArray[np.bool_]  # [m] whether the check found another label
    wrong_left_out: Floats  # [m] the model's probability, from a fit without this row
    random: NDArray[np.bool_]  # [m] whether the row was drawn at random
    weight: Floats  # [m]
    outside: NDArray[np.bool_] | None = None  # [m] whether the checked row is not one of the N; None: all are

    def variance_factor(self, used: NDArray[np.bool_], n_rows: int) -> float:
        """Factor by which the variance of a mean over the checks `used` is multiplied.

        It is below 1 if the checked rows are among the `n_rows` rows whose rate is estimated: only the unchecked ones
        are uncertain. It is above 1 if they are other rows, because then both sets are samples.
        """
        n_outside = 0 if self.outside is None else int((used & self.outside).sum())
        return max(0.0, 1 + (2 * n_outside - int(used.sum())) / n_rows) if n_rows else 0.0


def estimate_rate(checks: Checks, level: float = 0.9) -> Rate:
    """The noise rate of all rows."""
    N = len(checks.given)
    used = checks.random
    n = int(used.sum())
    mean = float(checks.wrong.mean()) if N else 0.0
    if n < MIN_CHECKS:
        return Rate(N, _clip(mean), None, None, n)
    d = checks.is_wrong[used] - checks.wrong_left_out[used]
    weight = checks.weight[used] / checks.weight[used].mean()
    estimate = mean + float((weight * d).mean())
    variance = _variance(checks.is_wrong[used], d, weight) / n * checks.variance_factor(used, N)
    low, high = _interval(estimate, variance, n, level)
    return Rate(N, _clip(estimate), low, high, n)


def combine_with_expectation(number: Rate, expected: float, level: float = 0.9) -> Rate:
    """A number of rows between the estimate from random checks and the one that a model expects.

    Each is weighted by the inverse of its variance. That of the checks is known from their interval. The error of the
    model has the standard deviation that was measured on other tables, or a larger one if the two numbers differ by
    more than such errors explain; its square is then DerSimonian and Laird's estimate. So with few checks the number is
    close to the model's, unless they contradict it, and with many it is close to theirs. The interval is based on the
    checks alone and does not change.
    """
    if number.low is None or number.high is None:
        return number
    z = float(stdtrit(number.checked - 1, 0.5 + level / 2))
    upper = max(number.high - number.rate, (number.high - number.low) / 2)  # the limit 0 may cut the lower part
    variance = (upper / z) ** 2
    difference = number.rate - expected
    model = max((_MODEL_ERROR * number.n) ** 2, difference**2 - variance)
    rate = expected + model / (model + variance) * difference
    return replace(number, rate=min(max(rate, number.low), number.high))


def estimate_class_rates(checks: Checks, n_classes: int, level: float = 0.9) -> list[Rate]:
    """The noise rate of the rows with each given label.

    The correction of a class is shrunk toward the mean of all classes, because a class has few checks.
    """
    used = checks.random
    n = int(used.sum())
    if n < MIN_CHECKS:
        return [_model_rate(checks, k, n) for k in range(n_classes)]
    residual = checks.is_wrong[used] - checks.wrong_left_out[used]
    weight = checks.weight[used] / checks.weight[used].mean()
    label = checks.checked_given[used]
    count = np.bincount(label, minlength=n_classes)
    class_mean = np.bincount(label, residual, minlength=n_classes) / np.maximum(count, 1)
    n_rows = np.bincount(checks.given, minlength=n_classes)
    model = np.bincount(checks.given, checks.wrong, minlength=n_classes) / np.maximum(n_rows, 1)
    is_wrong = checks.is_wrong[used]
    ratio = min(1.0, _variance(is_wrong, residual, weight) / _binomial_variance(is_wrong, weight))
    base = np.clip(model + (weight * residual).mean(), 0.01, 0.99)
    variance = ratio * base * (1 - base) / np.maximum(count, 1)
    mean, shrunk_variance = _shrink(class_mean, variance, count > 0)
    rates = []
    for k in range(n_classes):
        if not n_rows[k]:
            rates.append(Rate(0, 0.0, None, None, 0))
            continue
        estimate = model[k] + mean[k]
        factor = checks.variance_factor(used & (checks.checked_given == k), int(n_rows[k]))
        low, high = _interval(estimate, shrunk_variance[k] * factor, n, level)
        rates.append(Rate(int(n_rows[k]), _clip(estimate), low, high, int(count[k])))
    return rates


def _model_rate(checks: Checks, k: int, n: int) -> Rate:
    members = checks.given == k
    return Rate(int(members.sum()), float(checks.wrong[members].mean()) if members.any() else 0.0, None, None, n)


def _shrink(mean: Floats, variance: Floats, observed: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Shrink the means of groups toward their common mean. Returns the shrunk means and their variances.

    The variance between groups is DerSimonian and Laird's estimate. It has a lower limit, because it is often zero.
    """
    w = np.where(observed, 1 / np.maximum(variance, 1e-12), 0.0)
    center = float((w * mean).sum() / w.sum())
    q = float((w * (mean - center) ** 2).sum())
    scale = float(w.sum() - (w**2).sum() / w.sum())
    between = (q - (int(observed.sum()) - 1)) / scale if scale > 0 else 0.0
    tau2 = max(_LEAST_SPREAD**2, between)
    w = np.where(observed, 1 / (variance + tau2), 0.0)
    center = float((w * mean).sum() / w.sum())
    center_variance = float(1 / w.sum())
    keep = np.where(observed, tau2 / (tau2 + variance), 0.0)
    spread = np.where(observed, keep * variance + (1 - keep) ** 2 * center_variance, tau2 + center_variance)
    return keep * mean + (1 - keep) * center, spread


def _binomial_variance(is_wrong: NDArray[np.bool_], weight: Floats) -> float:
    """n times the variance of the weighted mean of n checks, without a model. The weights have mean 1."""
    a = (float((weight * is_wrong).sum()) + 0.5) / (len(is_wrong) + 1)
    return a * (1 - a) * float((weight**2).mean())


def _variance(is_wrong: NDArray[np.bool_], d: Floats, weight: Floats) -> float:
    """n times the variance of the weighted mean of n residuals d, with two pseudo-rows from `_binomial_variance`."""
    n = len(d)
    spread = float((weight**2 * (d - (weight * d).mean()) ** 2).sum()) / (n - 1)
    return (n * spread + 2 * _binomial_variance(is_wrong, weight)) / (n + 2)


def _interval(estimate: float, variance: float, n: int, level: float) -> tuple[float, float]:
    """Wilson's interval for the sample size at which a proportion has this variance.

    If the estimate is closer to 0 or 1 than one standard deviation, this size can be near 0, and the interval would be
    too wide to be useful. Then the size of a proportion one standard deviation away from 0 or 1 is used, at most n.
    """
    clipped = min(max(estimate, 0.001), 0.999)
    variance = max(variance, 1e-12)
    size = clipped * (1 - clipped) / variance
    spread = variance**0.5
    if min(clipped, 1 - clipped) < spread < 0.5:
        size = max(size, min(n, spread * (1 - spread) / variance))
    z = float(stdtrit(n - 1, 0.5 + level / 2))  # quantile of Student's distribution
    return wilson_interval(clipped, size, z)


def _clip(rate: float) -> float:
    return min(max(float(rate), 0.0), 1.0)


def estimate_noise_rate(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Estimate the noise rate of the data from the checked `random` rows alone, with 95 % intervals.

        r_c = sum_i w_i [checked_i != given_i] / sum_i w_i     checked rows of given class c, w = stratum size / picked
        r   = sum_c N_c / N r_c                                N_c = rows of the data with that label

    The estimate is unbiased, because the probability of drawing each row is known. Its interval is Wilson's for the
    number of rows of a simple random sample with the same variance. That variance is the larger of two sums:
    sum_c (N_c / N)^2 r_c (1 - r_c) / n_c, and the same with r in place of every r_c, because a few rows of a class may
    show no error by coincidence. n_c = (sum w)^2 / sum w^2, divided by the proportion of unchecked rows.

    Blank rows are assumed to be like the others of their class. Rows that were checked out of order are omitted (see
    `read_checked`). The level is not the 90 % of `estimate_rate`: the result has no field for it and stays comparable
    with older results, which have 95 %.
    """
    rows, weight = _random_rows(rows)
    given = np.array([cells["given_label"] for cells in rows])
    checked = np.array([bool(cells[CHECKED] and not cells.get(OUT_OF_ORDER)) for cells in rows], dtype=bool)
    out_of_order = sum(bool(cells.get(OUT_OF_ORDER)) for cells in rows)
    _require_checked(checked, out_of_order)
    wrong = np.array([cells["given_label"] != cells[CHECKED] for cells in rows], dtype=float)
    names = [name for name in dict.fromkeys(given.tolist()) if checked[given == name].any()]
    size = np.array([weight[given == name].sum() for name in names])  # N_c
    by_class = []
    for name, N in zip(names, size.tolist(), strict=True):
        members = (given == name) & checked
        by_class.append({"class": name, **_class_rate(wrong[members], weight[members], N)})
    share = size / size.sum()
    class_rate = np.array([c["rate"] for c in by_class])
    class_n = np.array([c["n"] for c in by_class])
    rate = float((share * class_rate).sum())
    pooled = float((share**2 / class_n).sum())
    stratified = float((share**2 * class_rate * (1 - class_rate) / class_n).sum())
    n = 1 / max(pooled, stratified / (rate * (1 - rate)) if 0 < rate < 1 else 0.0)
    low, high = wilson_interval(rate, n / max(1 - checked.sum() / size.sum(), 1e-9))
    return {
        "rate": rate,
        "low": low,
        "high": high,
        "checked": int(checked.sum()),
        "drawn": len(rows),  # at random, checked or not
        "left_out": out_of_order,
        "by_class": by_class,
        "unchecked_classes": sorted({*given.tolist()} - {*names}),  # not covered by the estimate
    }


def _random_rows(rows: Sequence[Mapping[str, str]]) -> tuple[list[Mapping[str, str]], Floats]:
    """The rows that were drawn at random, and how many rows of the data each stands for."""
    if any("part" not in cells for cells in rows):
        raise UserError("the file does not say how its rows were drawn (column 'part'); add --picked PICK.csv")
    drawn = [cells for cells in rows if cells["part"] == "random"]
    return drawn, np.array([row_weight(cells) for cells in drawn])


def _require_checked(checked: NDArray[np.bool_], out_of_order: int) -> None:
    if checked.any():
        return
    if out_of_order:
        raise UserError(
            f"rows were not checked in the order of the list ({out_of_order} of {len(checked)} random rows), so they "
            "may have been chosen because they look suspicious, and cannot be used to estimate the noise rate; review "
            "the list from its beginning: warpi review --rows LIST.csv"
        )
    raise UserError("no randomly drawn row is checked, and other rows cannot be used to estimate the noise rate")


def _class_rate(wrong: Floats, weight: Floats, N: float) -> dict[str, float]:
    """For one class of N rows: weighted proportion of wrong labels, its interval, and the effective sample size."""
    rate = float((weight * wrong).sum() / weight.sum())
    n = float(weight.sum() ** 2 / (weight**2).sum())
    low, high = wilson_interval(rate, n / max(1 - len(weight) / N, 1e-9))
    return {"checked": len(weight), "rate": rate, "low": low, "high": high, "n": n}
