"""Audit an array of probabilities. It is read in chunks of rows, so that it may be larger than the memory."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import warpi
import warpi.audit.label_scores as scores
from warpi.audit.any_model.read_files import (
    TrustedRows,
    choose_classes,
    encode,
    read_labels,
    read_probabilities,
    read_trusted,
)
from warpi.audit.label_scores import Floats, Ints
from warpi.audit.pair_model import MIN_PAIRS, features_of, fit_folds, mean_posterior, raise_small, soft_transition
from warpi.audit.rates import Checks, estimate_class_rates, estimate_rate
from warpi.audit.result import Audit, CheckedPairs
from warpi.auto.transition import confident_transition
from warpi.errors import UserError

log = logging.getLogger("warpi.audit")
CHUNK = 65_536  # rows
_SAMPLE_ROWS, _SAMPLE_CELLS = 200_000, 20_000_000  # largest sample from which transition matrices are estimated
_PAIR_STRENGTH = 10.0  # weight of the estimated T against pairs of labels, in pairs of each true class
_LEVEL = 0.9  # of the intervals
_LOW_ACCURACY = 0.7
_TOLERANCE = 0.02  # for sums of probabilities in half precision
NO_TRUSTED = (
    "without trusted rows nothing checks the probabilities: the ranking is only as good as the model, and the noise "
    "rate has no interval; check 100 random rows and pass them as trusted"
)


def audit_array(
    probabilities: NDArray[Any],
    given: Ints,
    classes: tuple[str, ...],
    trusted: TrustedRows | None = None,
    threshold: float = 0.5,
    chunk: int = CHUNK,
    keep_posterior: bool = True,
) -> Audit:
    """Audit labels `given` [N] by the probabilities [N, K] of any model that was not trained on the row it predicts.

    With 20 trusted rows or more, P(true class | probabilities, given label) is learned from them (`pair_model`).
    Pairs of labels without row numbers only correct the transition matrix. Results do not depend on the size of the
    chunks, except by rounding. Without `keep_posterior`, the result has no `learned_posterior`, the largest array.
    """
    _check_shapes(probabilities, given, classes, threshold)
    trusted = trusted or TrustedRows.none()
    judge = _fit(probabilities, given, trusted)
    N, K = probabilities.shape
    q: NDArray[Any] = np.empty((N if keep_posterior else 0, K), np.float32)  # half the memory
    judged = JudgedRows(np.empty(N, np.int64), np.empty(N), np.empty(N))
    for rows, p in _chunks(probabilities, chunk):
        part = judge.posterior(p, given[rows])
        judged.fill(rows, part, given[rows])
        if keep_posterior:
            q[rows] = part
    facts = _describe(judge, trusted, classes, threshold)
    result = finish_audit(np.arange(N), given, probabilities, judge.T, judged, trusted, judge.left_out, classes, facts)
    _warn(facts, judge, len(trusted.pairs_true))
    if not keep_posterior:
        return result
    q[trusted.row] = np.eye(K)[trusted.true]
    return replace(result, learned_posterior=q)


class JudgedRows(NamedTuple):
    """What the posterior says about the given label of each row."""

    suggested: NDArray[Any]  # [N]
    wrong: NDArray[Any]  # [N] probability that the given label is wrong
    uncertainty: NDArray[Any]  # [N] entropy of the posterior / log K

    def fill(self, rows: slice, q: Floats, given: NDArray[Any]) -> None:
        """Judge some rows by their posteriors q [n, K] and given labels [n]."""
        self.suggested[rows] = q.argmax(1)
        self.wrong[rows] = 1 - np.clip(q[np.arange(len(q)), given], 0, 1)
        self.uncertainty[rows] = -(q * np.log(np.maximum(q, 1e-30))).sum(1) / np.log(q.shape[1])


def finish_audit(
    row: Ints,
    given: NDArray[Any],
    p: NDArray[Any],
    T: Floats,
    judged: JudgedRows,
    trusted: TrustedRows,
    left_out: Floats,
    classes: tuple[str, ...],
    facts: dict[str, Any],
) -> Audit:
    """The audit of judged rows. Trusted rows set the noise rates, with posteriors `left_out`, and their own scores."""
    checked = trusted.row
    checks = _make_checks(given, judged.wrong.copy(), trusted, left_out)
    judged.suggested[checked] = trusted.true
    judged.wrong[checked] = trusted.true != given[checked]
    judged.uncertainty[checked] = 0
    issue = (judged.wrong > facts["threshold"]) & (judged.suggested != given)
    rates = estimate_class_rates(checks, len(classes), _LEVEL)
    error_rates = tuple({"class": name, **asdict(rate)} for name, rate in zip(classes, rates, strict=True))
    facts = facts | {"noise_rate": {**asdict(estimate_rate(checks, _LEVEL)), "level": _LEVEL}}
    y = given[checked].astype(np.int64)
    pairs = CheckedPairs(left_out, y, trusted.true, trusted.random, trusted.weight, checked)
    values = (row, given, judged.suggested, judged.wrong, 1 - judged.wrong, issue, judged.uncertainty, p, T)
    return Audit(*values, classes, error_rates, facts, pairs=pairs if len(checked) else None)


class _Judge(NamedTuple):
    """The model of P(true class | probabilities, given label)."""

    T: Floats  # [K, K]
    soft: Floats  # [K, K]
    fits: list[Floats]  # of the pair model; empty: Bayes' rule with T
    left_out: Floats  # [m, K] posteriors of the trusted rows, from fits without them
    accuracy: float | None  # of the model on the trusted rows

    def posterior(self, p: Floats, y: Ints) -> Floats:
        if not self.fits:
            return scores.posterior(p, y, self.T)
        return mean_posterior(features_of(raise_small(p), y, self.soft, self.T)[0], self.fits)


def _fit(probabilities: NDArray[Any], given: Ints, trusted: TrustedRows) -> _Judge:
    N, K = probabilities.shape
    n = min(N, _SAMPLE_ROWS, max(_SAMPLE_CELLS // K, 1))
    rows = np.arange(N) if n == N else np.sort(np.random.default_rng(0).choice(N, n, replace=False))
    p, y = normalize(probabilities[rows]), given[rows]
    checked, true = trusted.row, trusted.true
    trusted_p = normalize(probabilities[checked])
    accuracy = float((trusted_p.argmax(1) == true).mean()) if len(checked) else None
    if len(checked) >= MIN_PAIRS:
        p, trusted_p = raise_small(p), raise_small(trusted_p)
        soft, T = soft_transition(p, y), scores.estimate_transition(p, y)
        features, names = features_of(trusted_p, given[checked], soft, T)
        fits, left_out = fit_folds(features, names, true)
        return _Judge(T, soft, fits, left_out, accuracy)
    T = confident_transition(p, y)
    if len(trusted.pairs_true):
        T = correct_transition(T, trusted.pairs_given, trusted.pairs_true)
    return _Judge(T, T, [], scores.posterior(trusted_p, given[checked], T), accuracy)


def correct_transition(T: Floats, given: Ints, true: Ints) -> Floats:
    """The mean of T [K, K] after pairs of labels, with T as a prior that counts as ten pairs of each true class."""
    counts = _PAIR_STRENGTH * T
    np.add.at(counts, (true, given), 1)
    return np.asarray(counts / counts.sum(1, keepdims=True))


def _chunks(probabilities: NDArray[Any], size: int) -> Iterator[tuple[slice, Floats]]:
    for start in range(0, len(probabilities), size):
        rows = slice(start, start + size)
        yield rows, normalize(probabilities[rows], start)


def normalize(values: NDArray[Any], start: int = 0) -> Floats:
    """Scale rows so that they sum to 1 exactly. Rounded probabilities are accepted, other numbers are not."""
    p = np.asarray(values, np.float64)
    total = p.sum(1, keepdims=True)
    fine = np.isfinite(p).all(1) & (p >= 0).all(1) & (np.abs(total[:, 0] - 1) <= _TOLERANCE)
    if not fine.all():
        row = int(np.flatnonzero(~fine)[0])
        raise UserError(
            f"the probabilities of row {start + row} must be at least 0 and sum to 1 (sum {total[row, 0]:.4g}); "
            "apply softmax to logits, and remove missing values"
        )
    return np.asarray(p / total)


def _make_checks(given: NDArray[Any], wrong: NDArray[Any], trusted: TrustedRows, left_out: Floats) -> Checks:
    m = len(trusted.row)
    label = given[trusted.row]
    return Checks(
        given=given,
        wrong=wrong,
        checked_given=label,
        is_wrong=label != trusted.true,
        wrong_left_out=1 - left_out[np.arange(m), label],
        random=trusted.random,
        weight=trusted.weight,
    )


def _describe(judge: _Judge, trusted: TrustedRows, classes: tuple[str, ...], threshold: float) -> dict[str, Any]:
    m = len(trusted.row)
    source = "given by you; columns are " + ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
    return {
        "run": None,
        "method": "given probabilities",
        "version": warpi.__version__,
        "rows": "all",
        "left_out": 0,
        "folds": 0,
        "probabilities": source,
        "n_trusted": m,
        "trusted_accuracy": judge.accuracy,
        "uncertainty": "entropy of P(true class | x, given label) / log K",
        "threshold": threshold,
        "n_checked": m,
        "learned": bool(judge.fits),
    }


def _warn(facts: dict[str, Any], judge: _Judge, n_pairs: int) -> None:
    """Log each reason not to trust the audit."""
    if not facts["n_trusted"] and not n_pairs:
        log.warning(NO_TRUSTED)
    elif n_pairs:
        log.info("without row numbers, pairs of labels only correct the transition matrix (%d pairs)", n_pairs)
    elif not judge.fits:
        log.warning("too few trusted rows to learn from (%d); pass at least %d", facts["n_trusted"], MIN_PAIRS)
    if judge.accuracy is not None and judge.accuracy < _LOW_ACCURACY:
        log.warning("only %.0f %% of the trusted rows are predicted correctly", 100 * judge.accuracy)


def _check_shapes(probabilities: NDArray[Any], given: Ints, classes: tuple[str, ...], threshold: float) -> None:
    if probabilities.ndim != 2 or probabilities.dtype.kind not in "fiu" or probabilities.shape[1] < 2:
        shape = f"{probabilities.dtype} {list(probabilities.shape)}"
        raise UserError(f"probabilities must be numbers with one row per example and one column per class, got {shape}")
    if len(probabilities) != len(given) or not len(given):
        raise UserError(f"there are {len(probabilities)} rows of probabilities for {len(given)} labels; pass one each")
    if probabilities.shape[1] != len(classes):
        raise UserError(
            f"probabilities have {probabilities.shape[1]} columns for {len(classes)} classes; name the class of each "
            "column with --classes A,B,..., or in the first line of a csv file"
        )
    if not 0 < threshold < 1:
        raise UserError(f"threshold must be a probability in (0, 1), got {threshold}")


def audit_probabilities(
    probabilities: object,
    labels: object,
    trusted: object = None,
    classes: Sequence[str] | None = None,
    threshold: float = 0.5,
    keep_posterior: bool = True,
) -> Audit:
    """Audit labels by the probabilities of any model; see `warpi.audit.audit` for the arguments."""
    p, columns = read_probabilities(probabilities)
    if p.ndim != 2:
        raise UserError(f"probabilities must have one row per example and one column per class, got {list(p.shape)}")
    values = read_labels(labels)
    names = choose_classes(values, columns, p.shape[1], classes)
    given = encode(values, names, "labels")
    checked = read_trusted(trusted, names, len(given))
    return audit_array(p, given, names, checked, threshold, keep_posterior=keep_posterior)
