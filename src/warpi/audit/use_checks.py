"""Combine the predictions for all rows with the rows that a person has checked."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import warpi.audit.label_scores as scores
from warpi.audit.label_scores import Floats, Ints
from warpi.audit.pair_model import MIN_PAIRS, count_votes, cross_fit_pairs, pair_features
from warpi.audit.rates import Checks, Rate, estimate_rate
from warpi.audit.result import Audit, CheckedPairs
from warpi.data.examples import TensorExamples
from warpi.data.split import Split

_MOST_ROWS = 50_000  # for which nearest neighbors are computed
_MOST_FEATURES = 5_000


class Pairs(NamedTuple):
    """m rows whose given and true label are known, with predictions by models that were not trained on them."""

    p: Floats  # [m, K]
    given: Ints  # [m]
    true: Ints  # [m]
    random: NDArray[np.bool_]  # [m] drawn at random
    weight: Floats  # [m] rows that a random one stands for, relative to the others

    @classmethod
    def join(cls, first: "Pairs", second: "Pairs") -> "Pairs":
        """All pairs. The weights of each part are divided by their mean, since they were drawn separately."""
        scaled = [
            part._replace(weight=part.weight / max(_mean(part.weight[part.random]), 1e-12)) for part in (first, second)
        ]
        return cls(*(np.concatenate(values) for values in zip(*scaled, strict=True)))


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 1.0


class Posterior(NamedTuple):
    """What is known about the true classes of n rows."""

    q: Floats  # [n, K] P(true class | x, given label); certain for checked rows
    checks: Checks  # for the noise rate
    pairs: CheckedPairs
    learned: bool  # whether q is learned from pairs, and not only Bayes' rule


def combine_with_checks(
    p: Floats, y: Ints, T: Floats, positions: Ints, checked: Pairs, trusted: Pairs, votes: Floats | None
) -> Posterior:
    """The posterior of rows with predictions p [n, K] and given labels y [n].

    `checked` are the rows at `positions` [m], and `trusted` are other rows. `votes` [n + trusted, K] are the labels of
    similar rows, if they are known.
    """
    n = len(y)
    pairs = Pairs.join(checked, trusted)
    learned = len(pairs.true) >= MIN_PAIRS
    if learned:
        every_p = np.concatenate([p, trusted.p])
        every_y = np.concatenate([y, trusted.given])
        features, names = pair_features(every_p, every_y, votes, others=len(trusted.true))
        all_positions = np.concatenate([positions, n + np.arange(len(trusted.true))])
        q, left_out = cross_fit_pairs(features, names, all_positions, pairs.true)
        q = q[:n]
    else:
        q = scores.posterior(p, y, T)
        left_out = scores.posterior(pairs.p, pairs.given, T)
    in_audit = np.concatenate([positions, np.full(len(trusted.true), -1)])
    judged = CheckedPairs(left_out, pairs.given, pairs.true, pairs.random, pairs.weight, in_audit)
    known = q.copy()
    known[positions] = np.eye(p.shape[1])[checked.true]
    return Posterior(known, make_checks(judged, y, y, q, judged.given), judged, learned)


def make_checks(pairs: CheckedPairs, given: Ints, label: Ints, q: Floats, pair_label: Ints) -> Checks:
    """What the pairs say about how many of the labels [n] are wrong.

    `label` are the labels to judge, `q` [n, K] their posterior, and `pair_label` [m] the labels that the pairs have or
    would have by the same rule. `given` are the classes whose rates are estimated.
    """
    m = len(pairs.true)
    return Checks(
        given=given,
        wrong=1 - q[np.arange(len(label)), label],
        checked_given=pairs.given,
        is_wrong=pair_label != pairs.true,
        wrong_left_out=1 - pairs.q[np.arange(m), pair_label],
        random=pairs.random,
        weight=pairs.weight,
        outside=pairs.position < 0,
    )


def choose_labels(q: Floats, given: Ints, above: float = 0.0) -> Ints:
    """The most probable class [n] where its probability is larger than `above`, else the given label."""
    best = q.argmax(1)
    return np.where((best != given) & (q[np.arange(len(q)), best] > above), best, given)


def count_wrong_labels(audit: Audit, label: Ints, above: float = 0.0, level: float = 0.9) -> tuple[Rate, Rate]:
    """How many of the audited labels are wrong before, and after they are replaced by `label` [n].

    `rate` and the limits are numbers of rows. Rows that a person has checked are right afterwards. For the others, the
    random checks tell how many labels would be wrong if they were corrected by the same rule without being checked.
    """
    n, given = len(audit), audit.given
    noise_rate = audit.facts["noise_rate"]
    before = Rate(n, noise_rate["rate"], noise_rate["low"], noise_rate["high"], noise_rate.get("checked", 0))
    if noise_rate.get("level") is None:  # an older audit, whose interval is not based on checks
        before = replace(before, low=None, high=None)
    q = audit.posterior.copy()
    pairs = audit.pairs
    if pairs is None:
        return _scale(before, n), Rate(n, float((1 - q[np.arange(n), label]).sum()), None, None, 0)
    inside = pairs.position >= 0
    pair_label = choose_labels(pairs.q, pairs.given, above)
    label = label.copy()
    label[pairs.position[inside]] = pair_label[inside]
    q[pairs.position[inside]] = pairs.q[inside]
    checks = make_checks(pairs, given, label, q, pair_label)
    corrected = int((checks.is_wrong & inside).sum())  # by people
    return _scale(before, n), shift_number(_scale(estimate_rate(checks, level), n), -corrected)


def _scale(rate: Rate, n: int) -> Rate:
    """Convert a fraction, and its limits, to a number of rows."""
    low, high = (None if end is None else n * end for end in (rate.low, rate.high))
    return replace(rate, rate=n * rate.rate, low=low, high=high)


def neighbor_votes(train: Split, row: Ints, y: Ints, trusted: Split | None, positions: Ints, K: int) -> Floats | None:
    """Votes of similar rows for the rows `row` of the data and for trusted rows; None if there is nothing to compare.

    Inputs are standardized features in memory. Images are not compared: their pixels say little about similarity.
    """
    examples = train.examples
    parts = [examples, *([] if trusted is None else [trusted.examples])]
    size = int(np.prod(examples.shape))
    if len(row) > _MOST_ROWS or size > _MOST_FEATURES or len(examples.shape) != 1:
        return None
    if not all(isinstance(part, TensorExamples) for part in parts):
        return None
    x = [examples.flat(torch.from_numpy(row))]
    if trusted is not None:
        x.append(trusted.examples.flat(trusted.rows[torch.from_numpy(positions)]))
    values = torch.cat([part.cpu().double() for part in x])
    mean, std = values[: len(row)].mean(0), values[: len(row)].std(0)
    standardized = (values - mean) / torch.where(std > 1e-12, std, torch.inf)
    return count_votes(standardized.numpy(), y, K, others=len(values) - len(row))


def shift_number(number: Rate, by: float) -> Rate:
    """Add to a number of rows and to its limits. None of them becomes negative."""
    low, high = (None if end is None else max(0.0, end + by) for end in (number.low, number.high))
    return replace(number, rate=max(0.0, number.rate + by), low=low, high=high)
