"""From a trained method to an `Audit`: predict rows, estimate T, apply Bayes' rule, and quantify the uncertainty."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import warpi
import warpi.audit.label_scores as scores
from warpi.audit.label_scores import Floats, Ints
from warpi.audit.out_of_sample import SAMPLES, RowPredictions, concatenate, predict_out_of_sample, predict_split
from warpi.audit.result import AUDIT_FILE, Audit, read_audit
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.runs.reopen import reopen
from warpi.runs.run import Run
from warpi.training.method import Method

log = logging.getLogger("warpi.audit")
_LOW_ACCURACY = 0.7  # on the trusted rows; below it an audit is unreliable
_UNCHECKED_MARGIN = 0.1  # standard error of rates that no left-out row can check (measured, see docs/audit.md)


def audit(
    run: Path | str | Run | Method,
    *,
    folds: int = 0,
    rows: str | None = None,
    threshold: float = 0.5,
    device: str = "auto",
    save: bool = True,
    **custom: Any,
) -> Audit:
    """Audit the labels a run was trained on.

    Parameters:
        run: a run folder, the result of `fit`, or a trained method.
        folds: 2 or more trains the same recipe that many times, each time without a part of the rows, so that every
            probability comes from a network that was not trained on the label it judges.
        rows: "train" for the training rows, "all" to add the rows held out for validation and, if their true labels
            are unknown, for testing. By default "all" if the true labels of the test rows are unknown, else "train".
        threshold: a row is an issue if its wrong_probability is higher.
        device: "auto", "cpu" or "cuda".
        save: whether to store the result in the run folder.
        custom: a custom method or net that the run was trained with, as in `fit(resume=True)`.
    """
    _check_arguments(folds, rows, threshold)
    if isinstance(run, Path | str):
        run = reopen(run, device, custom)
    method, path = (run, None) if isinstance(run, Method) else (run.method, run.path)
    if not hasattr(method, "task"):
        raise UserError("this method has not been trained; train it first, or give a run folder")
    if rows is None:
        rows = "all" if isinstance(run, Run) and not run.truth.test_is_clean else "train"
    held_out = _held_out_splits(run, method)
    evidence = _predict(method, folds, path)
    T = scores.estimate_transition(evidence.train.p, evidence.train.y)
    row, predictions = _audited_rows(method, evidence, held_out if rows == "all" else [])
    y = predictions.y
    verdict = scores.judge_labels(scores.posterior(predictions.p, y, T), y, threshold)
    spread, spread_description = estimate_uncertainty(predictions, T, bool(folds))
    can_check = evidence.trusted_left_out and len(np.unique(evidence.trusted.y)) == method.task.n_classes
    margin = _rate_margin(evidence, predictions, T, verdict.wrong_probability, can_check, folds)
    trusted = evidence.trusted
    facts: dict[str, Any] = {
        "run": None if path is None else str(path),
        "method": type(method).__name__,
        "version": warpi.__version__,
        "rows": rows,
        "left_out": 0 if rows == "all" else sum(map(len, held_out)),
        "folds": folds,
        "probabilities": evidence.source,
        "temperature": evidence.temperature,
        "memory": evidence.memorization,
        "uncertainty": spread_description,
        "threshold": threshold,
        "n_trusted": len(trusted.y),
        "trusted_accuracy": float((trusted.p.argmax(1) == trusted.y).mean()) if len(trusted.y) else None,
        "noise_rate": scores.error_rate(verdict.wrong_probability, margin),
    }
    classes = method.task.classes
    rates = scores.errors_by_class(verdict.wrong_probability, y, classes, margin)
    result = Audit(row, y, *verdict, spread, predictions.p, T, classes, rates, facts)
    _warn(method, facts, can_check, evidence.trusted_left_out)
    if save and path is not None:
        try:
            result.save(path)
        except UserError as e:  # a read-only run folder; the caller still gets the audit
            log.warning("the audit is not stored in the run: %s", e)
    return result


def load_or_make_audit(run: Run) -> Audit:
    """The audit stored in a run folder, or a new one if there is none."""
    file = run.path / AUDIT_FILE
    if not file.exists():
        return audit(run)
    stored = read_audit(run.path)
    dataset = run.data.dataset
    if stored.classes != dataset.classes or stored.row.max() >= len(dataset.y):
        raise UserError(f"{file} is about other data; recreate it with: warpi audit {run.path}")
    return stored


def _check_arguments(folds: int, rows: str | None, threshold: float) -> None:
    if rows not in (None, "train", "all"):
        raise UserError(f"rows must be 'train' or 'all', got {rows!r}")
    if not 0 < threshold < 1:
        raise UserError(f"threshold must be a probability in (0, 1), got {threshold}")
    if folds and not 2 <= folds <= 50:
        raise UserError(f"folds must be 0 (none) or 2 to 50, got {folds}")


def _held_out_splits(run: Run | Method, method: Method) -> list[Split]:
    """Rows of the data that were not used for training and whose labels are as noisy as the others."""
    splits = [] if method.task.val is None else [method.task.val]
    test = None if isinstance(run, Method) or run.truth.test_is_clean else run.truth.test
    if test is not None and test.examples is method.task.train.examples:
        splits.append(test)
    return splits


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Calibrated predictions from which the labels are judged."""

    train: RowPredictions
    val: RowPredictions
    trusted: RowPredictions
    trusted_left_out: bool  # no network that predicts the trusted rows was trained on them
    source: str  # a description of the probabilities
    temperature: float
    memorization: float  # size of the correction by `remove_memorization`


def _predict(method: Method, folds: int, path: Path | None) -> _Evidence:
    """Predict the training, validation and trusted rows, out of sample if there are folds."""
    task = method.task
    trusted = predict_split(method, task.meta)
    val = predict_split(method, task.val)
    train, memorization = _without_memorization(predict_split(method, task.train), val)
    trusted_left_out = not method.uses_trusted
    source = _describe_in_sample(len(val.y))
    cross_validated = None
    if folds:
        cross_validated, left_out = predict_out_of_sample(method, folds, path)
        if len(left_out.y):
            trusted = left_out
            trusted_left_out = True
        source = f"out of sample: the recipe was trained {folds} times, and each training predicts the rows it left out"
    temperature = scores.fit_temperature(trusted.p, trusted.y)
    train, val, trusted = (_with_temperature(part, temperature) for part in (train, val, trusted))
    if cross_validated is not None:
        cross_validated = _with_temperature(cross_validated, temperature)
        in_sample = train.p[np.searchsorted(train.positions, cross_validated.positions)]
        train = replace(cross_validated, per_network=np.stack([in_sample, cross_validated.p]))  # [2, n, K]
        memorization = 0.0
    return _Evidence(train, val, trusted, trusted_left_out, source, temperature, memorization)


def _describe_in_sample(n_val: int) -> str:
    if n_val:
        return f"in sample, minus what the network memorized of the labels, measured on {n_val} held-out rows"
    return (
        "in sample: the network was trained on the labels it judges, and there are no held-out rows to measure how "
        "much it memorized; use folds"
    )


def _without_memorization(train: RowPredictions, val: RowPredictions) -> tuple[RowPredictions, float]:
    """Remove the effect of training on the labels from all probabilities; return the size of the correction, too."""
    p, memorization = scores.remove_memorization(train.p, train.y, scores.log_odds(val.p, val.y))
    per_network = train.per_network.copy()
    for s, val_p in enumerate(val.per_network):
        per_network[s] = scores.remove_memorization(per_network[s], train.y, scores.log_odds(val_p, val.y))[0]
    return replace(train, p=p, per_network=per_network), memorization


def _with_temperature(predictions: RowPredictions, temperature: float) -> RowPredictions:
    p, per_network = (scores.apply_temperature(p, temperature) for p in (predictions.p, predictions.per_network))
    return replace(predictions, p=p, per_network=per_network)


def _audited_rows(method: Method, evidence: _Evidence, held_out: list[Split]) -> tuple[Ints, RowPredictions]:
    """Rows of the data set in ascending order, and their predictions: the training split and other splits."""
    task = method.task
    splits = [task.train, *held_out]
    parts = [evidence.train]
    for split in held_out:
        part = evidence.val
        if split is not task.val:
            part = _with_temperature(predict_split(method, split), evidence.temperature)
        if len(part.per_network) != len(evidence.train.per_network):  # a single prediction counts as agreement
            part = replace(part, per_network=np.repeat(part.p[None], len(evidence.train.per_network), axis=0))
        parts.append(part)
    row = np.concatenate([split.rows.numpy()[part.positions] for split, part in zip(splits, parts, strict=True)])
    order = row.argsort(kind="stable")
    return row[order], concatenate(parts).take(order)


def estimate_uncertainty(predictions: RowPredictions, T: Floats, folds: bool = False) -> tuple[Floats, str]:
    """Standard deviation of wrong_probability w [n], and a description of what was varied.

    Samples of the label probability (WarPI): w_l = sigmoid(logit w + log pi_l - mean_l log pi_l) with
    pi_l = softmax(v_l z)_y. The rectified logits model the given label, so pi_l takes the place of P(given | x), by
    which Bayes' rule divides. Several networks, or the networks of the run and of the fold: w of each. Variances are
    added. With one network and no samples, the result is the entropy of P(true | x, given) divided by log K.
    """
    y = predictions.y
    w = 1 - scores.label_quality(predictions.p, y, T)
    variance = np.zeros(len(y))
    varied: list[str] = []
    if len(predictions.label_log_probs):
        logit = np.log(np.maximum(w, 1e-9)) - np.log(np.maximum(1 - w, 1e-9))
        shift = predictions.label_log_probs - predictions.label_log_probs.mean(0)
        variance += (1 / (1 + np.exp(-np.clip(logit + shift, -50, 50)))).var(0)
        varied.append(f"{SAMPLES} samples of the label probability")
    if len(predictions.per_network):
        variance += np.stack([scores.label_quality(p, y, T) for p in predictions.per_network]).var(0)
        varied.append("the networks of run and fold" if folds else f"{len(predictions.per_network)} networks")
    if varied:
        return np.sqrt(variance), f"standard deviation of wrong_probability over {' and over '.join(varied)}"
    q = scores.posterior(predictions.p, y, T)
    entropy = -(q * np.log(np.maximum(q, 1e-30))).sum(1) / np.log(q.shape[1])
    return entropy, "entropy of P(true class | x, given label) / log K: there is one network and nothing to sample"


def _rate_margin(
    evidence: _Evidence, predictions: RowPredictions, T: Floats, wrong: Floats, can_check: bool, folds: int
) -> float:
    """Standard error of the noise rate: by the trusted rows, and by a second estimate if they can check it."""
    trusted = evidence.trusted
    difference = 0.0 if can_check and folds else _UNCHECKED_MARGIN  # without folds p depends on the labels
    if can_check:
        second = scores.rate_by_confusion(predictions.p, predictions.y, trusted.p, trusted.y)
        difference = max(difference, abs(second - float(wrong.mean())))
    return math.hypot(scores.rate_margin(trusted.p, trusted.y, T), difference)


def _warn(method: Method, facts: Mapping[str, Any], can_check: bool, trusted_left_out: bool) -> None:
    """Log a warning for each reason not to trust the audit."""
    if method.trusts_given_labels:
        log.warning("%s learns wrong labels like right ones, so its audit misses them; audit warpi", facts["method"])
    if facts["folds"] and facts["n_trusted"] and not can_check:
        log.warning("a class has a single trusted row, which is never left out, so the rates cannot be checked")
    elif not trusted_left_out:
        log.warning("the trusted rows were used for training, so they cannot check the rates; use --folds 5")
    accuracy = facts["trusted_accuracy"]
    if accuracy is not None and accuracy < _LOW_ACCURACY:
        log.warning("only %.0f %% of the trusted rows are predicted correctly; the audit is unreliable", 100 * accuracy)
