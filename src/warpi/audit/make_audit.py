"""Audit the labels of a run: predict rows, estimate the transition matrix T, apply Bayes' rule, estimate errors."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpi
import warpi.audit.label_scores as scores
from warpi.audit.any_model.audit_array import audit_probabilities
from warpi.audit.any_model.audit_run import audit_large_run, is_large
from warpi.audit.checked_labels import RowChecks, collect_row_checks, digest_decisions
from warpi.audit.cross_fit import can_cross_fit, cross_fit
from warpi.audit.duplicates.of_run import find_copies
from warpi.audit.label_scores import Floats, Ints
from warpi.audit.out_of_sample import (
    SAMPLES,
    RowPredictions,
    concatenate,
    no_predictions,
    predict_out_of_sample,
    predict_split,
)
from warpi.audit.pair_model import MIN_PAIRS
from warpi.audit.rates import estimate_class_rates, estimate_rate
from warpi.audit.result import AUDIT_FILE, Audit, read_audit
from warpi.audit.use_checks import Pairs, combine_with_checks, neighbor_votes
from warpi.auto.rows import trusted_importance, weigh_trusted
from warpi.auto.transition import confident_transition
from warpi.data.split import Split
from warpi.datasets.hugging_face.saved import is_dataset, read_labels
from warpi.errors import UserError
from warpi.runs.reopen import reopen
from warpi.runs.run import Run
from warpi.training.method import Method

log = logging.getLogger("warpi.audit")
_LOW_ACCURACY = 0.7  # of the trusted rows, below which many suggestions are wrong
_LEVEL = 0.9  # of the intervals


def audit(
    run: Path | str | Run | Method | None = None,
    *,
    folds: int | None = None,
    rows: str | None = None,
    threshold: float = 0.5,
    device: str = "auto",
    save: bool = True,
    checked: Sequence[Path | str] = (),
    probabilities: object = None,
    labels: object = None,
    trusted: object = None,
    classes: Sequence[str] | None = None,
    **custom: Any,
) -> Audit:
    """Audit the labels a run was trained on, or any labels by the probabilities of any model.

    Rows that a person has checked make it better: decisions of `warpi review` in the run folder, the lists `checked`,
    and trusted rows whose label before the check is known. With 20 such rows or more, the probabilities are learned
    from them (`pair_model`), and the noise rate has an interval if enough of them were drawn at random.

    Parameters:
        run: a run folder, the result of `fit`, or a trained method.
        folds: where the probabilities come from. None: from `auto`, cross-fitted several times, or from the run itself
            if it is a network for images. 0: from the run itself. Otherwise the number of folds of a cross-validation:
            the recipe of the run is trained once per fold without the rows of the fold, so that every probability
            comes from a network that was not trained on the label.
        rows: "train" for the training rows; "all" to add the rows held out for validation and, if their true labels
            are unknown, for testing. Default: "all" if the true labels of the test rows are unknown, else "train".
        threshold: labels with a higher `wrong_probability` are reported as issues.
        device: "auto", "cpu" or "cuda".
        save: whether to store the result in the run folder.
        checked: lists from `warpi pick`, in which a person has filled in the column `checked_label`.
        probabilities: instead of a run: an array [N, K], or a .npy, .csv or .parquet file, from models that were not
            trained on the row they predict. A .npy file is read in chunks.
        labels: with probabilities: the given labels [N], as class names or numbers, a file, or a Dataset of Hugging
            Face, whose order of classes is that of the columns.
        trusted: with probabilities: (rows, true labels), a dict from row to true label, or a table with the columns
            `true_label` and `row` (or `given_label`, if the rows are not known).
        classes: with probabilities: the class of each column, if the file does not name them.
        custom: the custom `method` or `net` that the run was trained with, as in `fit(resume=True)`.
    """
    if probabilities is not None:
        if run is not None or folds or rows or checked or custom:
            raise UserError("with probabilities, pass only labels, trusted, classes and threshold")
        if is_dataset(labels):
            labels, own = read_labels(labels)
            classes = classes or own
        return audit_probabilities(probabilities, labels, trusted, classes, threshold)
    if run is None or labels is not None or trusted is not None:
        raise UserError("pass a run, or probabilities and labels; the trusted rows of a run are passed to fit")
    _check_arguments(folds, rows, threshold)
    if isinstance(run, Path | str):
        run = reopen(run, device, custom)
    method = run if isinstance(run, Method) else run.method
    path = None if isinstance(run, Method) else run.path
    if not hasattr(method, "task"):
        raise UserError("this method has not been trained; train it first, or pass a run folder")
    if rows is None:
        rows = "all" if isinstance(run, Run) and not run.truth.test_is_clean else "train"
    result = _audit_method(method, path, _held_out_splits(run, method), folds, rows, threshold, checked)
    if isinstance(run, Run):
        result = replace(result, copies=find_copies(run))
    if save and path is not None:
        _store(result, path)
    return result


def _audit_method(
    method: Method,
    path: Path | None,
    held_out: list[Split],
    folds: int | None,
    rows: str,
    threshold: float,
    checked: Sequence[Path | str],
) -> Audit:
    """The audit of a trained method; `path` is its run folder."""
    audited = held_out if rows == "all" else []
    about: dict[str, Any] = {
        "run": None if path is None else str(path),
        "method": type(method).__name__,
        "rows": rows,
        "left_out": 0 if rows == "all" else sum(map(len, held_out)),
    }
    if not folds and is_large(method):
        return audit_large_run(method, path, audited, threshold, checked, about)
    predicted = _predict(method, folds, path, audited)
    T, row, predictions = predicted.T, predicted.row, predicted.rows
    y = predictions.y
    row_checks = collect_row_checks(path, [Path(file) for file in checked], method.task.classes, row, y)
    positions, checked_pairs = _checked_pairs(row, predictions, row_checks)
    pairs = _trusted_pairs(method, predicted)
    votes = None
    if len(positions) + len(pairs.true) >= MIN_PAIRS:
        votes = _count_votes(method, predicted, row, y, len(pairs.true))
    posterior = combine_with_checks(predictions.p, y, T, positions, checked_pairs, pairs, votes)
    judged = scores.judge_labels(posterior.q, y, threshold)
    uncertainty, uncertainty_description = estimate_uncertainty(predictions, T, bool(folds))
    classes, before = method.task.classes, method.task.before_audit
    facts: dict[str, Any] = {
        **about,
        "version": warpi.__version__,
        "folds": folds or 0,
        **_describe_predictions(predicted),
        "uncertainty": uncertainty_description,
        "threshold": threshold,
        "n_checked": len(posterior.pairs.true),
        "checked_lists": [str(file) for file in checked],
        "decisions": None if path is None else digest_decisions(path),
        "already_corrected": 0 if before is None else int((before >= 0).sum()),
        "learned": posterior.learned,
        "noise_rate": {**asdict(estimate_rate(posterior.checks, _LEVEL)), "level": _LEVEL},
    }
    class_rates = estimate_class_rates(posterior.checks, len(classes), _LEVEL)
    rates = tuple({"class": name, **asdict(rate)} for name, rate in zip(classes, class_rates, strict=True))
    learned = posterior.q if posterior.learned or len(positions) else None
    known = posterior.pairs if len(posterior.pairs.true) else None
    result = Audit(row, y, *judged, uncertainty, predictions.p, T, classes, rates, facts, learned, known)
    _warn(facts, predicted.trusted_left_out)
    return result


def _store(result: Audit, path: Path) -> None:
    """Store an audit in its run folder. If the folder is read-only, the caller still gets the audit."""
    try:
        result.save(path)
    except UserError as e:
        log.warning("cannot store the audit in the run folder: %s", e)


def load_or_make_audit(run: Run) -> Audit:
    """The audit stored in a run folder, or a new one if there is none or if people have made decisions since."""
    file = run.path / AUDIT_FILE
    if not file.exists():
        return audit(run)
    stored = read_audit(run.path)
    dataset = run.data.dataset
    copies = stored.copies
    last = int(stored.row.max()) if copies is None else int(max(stored.row.max(), copies.row[copies.of_data].max()))
    if stored.classes != dataset.classes or last >= len(dataset.y):
        raise UserError(f"{file} was made from other data; recreate it with: warpi audit {run.path}")
    facts = stored.facts
    if digest_decisions(run.path) == facts.get("decisions"):
        return stored
    log.info("people have made decisions since the last audit, so it is repeated")
    lists = [file for file in facts.get("checked_lists", ()) if Path(file).exists()]
    return audit(run, folds=facts["folds"] or None, rows=facts["rows"], threshold=facts["threshold"], checked=lists)


def _check_arguments(folds: int | None, rows: str | None, threshold: float) -> None:
    if rows not in (None, "train", "all"):
        raise UserError(f"rows must be 'train' or 'all', got {rows!r}")
    if not 0 < threshold < 1:
        raise UserError(f"threshold must be a probability in (0, 1), got {threshold}")
    if folds and not 2 <= folds <= 50:
        raise UserError(f"folds must be 0 (none) or 2 to 50, got {folds}")


def _held_out_splits(run: Run | Method, method: Method) -> list[Split]:
    """Splits that were not used for training and whose labels are as noisy as those of the training rows."""
    splits = [] if method.task.val is None else [method.task.val]
    if isinstance(run, Method) or run.truth.test is None or run.truth.test_is_clean:
        return splits
    are_rows_of_data = run.data.dataset.test is None
    return [*splits, run.truth.test] if are_rows_of_data else splits


@dataclass(frozen=True, eq=False)
class _Predictions:
    """Calibrated predictions for the audited rows of a run, and how they were made."""

    row: Ints  # [n] rows of the data set, ascending
    rows: RowPredictions
    trusted: RowPredictions
    trusted_left_out: bool  # whether the trusted rows are predicted by models that were not trained on them
    T: Floats  # [K, K] estimated transition matrix
    source: str  # describes where the probabilities come from
    temperature: float = 1.0
    memorization: float = 0.0  # size of the correction by `remove_memorization`


def _describe_predictions(predicted: _Predictions) -> dict[str, Any]:
    trusted = predicted.trusted
    return {
        "probabilities": predicted.source,
        "temperature": predicted.temperature,
        "memory": predicted.memorization,
        "n_trusted": len(trusted.y),
        "trusted_accuracy": _trusted_accuracy(predicted) if len(trusted.y) else None,
    }


def _trusted_accuracy(predicted: _Predictions) -> float:
    """The accuracy on trusted rows, each class weighted by its size in the data, as `warpi fit` prints it.

    Trusted rows are often drawn class by class, so the plain share of hits would count small classes too often.
    """
    trusted, rows = predicted.trusted, predicted.rows
    weight = trusted_importance(scores.posterior(rows.p, rows.y, predicted.T).sum(0), trusted.y)
    return float(weight @ (trusted.p.argmax(1) == trusted.y) / weight.sum())


def _predict(method: Method, folds: int | None, path: Path | None, held_out: list[Split]) -> _Predictions:
    """Predict the training rows, the rows of `held_out` and the trusted rows."""
    if folds is None and can_cross_fit(method):
        return _predict_by_auto(method, path, held_out)
    own = None if folds else method.out_of_sample()
    if own is not None:
        train = _to_predictions(own.p.numpy(), method.task.train)
        trusted = _trusted_predictions(method, own.p_trusted.numpy())
        row, rows = _collect_audited_rows(method, train, held_out)
        source = "out of sample: cross-fitted, each row is predicted by models that were not trained on it"
        return _Predictions(row, rows, trusted, True, own.transition.numpy(), source)
    return _predict_by_method(method, folds or 0, path, held_out)


def _predict_by_auto(method: Method, path: Path | None, held_out: list[Split]) -> _Predictions:
    splits = [method.task.train, *held_out]
    row = torch.cat([split.rows for split in splits])
    y = torch.cat([split.y for split in splits])
    order = row.argsort(stable=True)
    split = replace(method.task.train, rows=row[order], y=y[order.to(y.device)])
    fitted = cross_fit(method, split, path)
    trusted = _trusted_predictions(method, fitted.p_trusted, fitted.left_out)
    source = f"out of sample: mean of {fitted.fits} fits of auto, each row predicted by models not trained on its label"
    T = fitted.T if method.task.meta is not None else confident_transition(fitted.p, fitted.y)
    return _Predictions(row[order].numpy(), _to_predictions(fitted.p, split), trusted, True, T, source)


def _predict_by_method(method: Method, folds: int, path: Path | None, held_out: list[Split]) -> _Predictions:
    """Predict by the trained method itself, or with `folds` out of sample."""
    task = method.task
    trusted = predict_split(method, task.meta)
    val = predict_split(method, task.val)
    train, memorization = _remove_memorization(predict_split(method, task.train), val)
    trusted_left_out = not method.uses_trusted
    source = f"in sample, corrected for memorized labels, as measured on {len(val.y)} held-out rows"
    if not len(val.y):
        source = "in sample: no held-out rows show how many labels the network memorized; use folds"
    cross_validated = None
    if folds:
        cross_validated, left_out = predict_out_of_sample(method, folds, path)
        if len(left_out.y):
            trusted = left_out
            trusted_left_out = True
        source = f"out of sample: each of {folds} folds is predicted by a network that was not trained on it"
    temperature = scores.fit_temperature(trusted.p, trusted.y)
    train, trusted = (_apply_temperature(part, temperature) for part in (train, trusted))
    if cross_validated is not None:
        cross_validated = _apply_temperature(cross_validated, temperature)
        in_sample = train.p[np.searchsorted(train.positions, cross_validated.positions)]
        train = replace(cross_validated, per_network=np.stack([in_sample, cross_validated.p]))  # [2, n, K]
        memorization = 0.0
    estimate = scores.estimate_transition if len(trusted.y) else confident_transition
    T = estimate(train.p, train.y)
    row, rows = _collect_audited_rows(method, train, held_out, temperature)
    return _Predictions(row, rows, trusted, trusted_left_out, T, source, temperature, memorization)


def _trusted_predictions(method: Method, p: Floats, positions: Ints | None = None) -> RowPredictions:
    """The predictions p of the trusted rows at some positions, or of all of them."""
    trusted = method.task.meta
    if trusted is None:
        return no_predictions(method.task.n_classes)
    kept = np.arange(len(p)) if positions is None else positions
    return replace(_to_predictions(p, trusted.subset(torch.from_numpy(kept))), positions=kept)


def _to_predictions(p: Floats, split: Split) -> RowPredictions:
    n, K = p.shape
    return RowPredictions(np.arange(n), split.y.cpu().numpy(), p, np.zeros((0, n, K)), np.zeros((0, n)))


def _remove_memorization(train: RowPredictions, val: RowPredictions) -> tuple[RowPredictions, float]:
    """Remove the effect of training on the labels from all probabilities. Also returns the size of the correction."""
    p, memorization = scores.remove_memorization(train.p, train.y, scores.log_odds(val.p, val.y))
    per_network = train.per_network.copy()
    for s, val_p in enumerate(val.per_network):
        per_network[s] = scores.remove_memorization(per_network[s], train.y, scores.log_odds(val_p, val.y))[0]
    return replace(train, p=p, per_network=per_network), memorization


def _apply_temperature(predictions: RowPredictions, temperature: float) -> RowPredictions:
    p, per_network = (scores.apply_temperature(p, temperature) for p in (predictions.p, predictions.per_network))
    return replace(predictions, p=p, per_network=per_network)


def _collect_audited_rows(
    method: Method, train: RowPredictions, held_out: list[Split], temperature: float = 1.0
) -> tuple[Ints, RowPredictions]:
    """Return the rows of the training split and of `held_out` in ascending order, and their predictions."""
    splits = [method.task.train, *held_out]
    parts = [train]
    for split in held_out:
        part = _apply_temperature(predict_split(method, split), temperature)
        n_networks = len(train.per_network)
        if len(part.per_network) != n_networks:  # repeat a single prediction, so that it does not add variance
            part = replace(part, per_network=np.repeat(part.p[None], n_networks, axis=0))
        parts.append(part)
    row = np.concatenate([split.rows.numpy()[part.positions] for split, part in zip(splits, parts, strict=True)])
    order = row.argsort(kind="stable")
    return row[order], concatenate(parts).take(order)


def estimate_uncertainty(predictions: RowPredictions, T: Floats, folds: bool = False) -> tuple[Floats, str]:
    """Standard deviation of wrong_probability w [n], and a description of what was varied.

    With samples l of the label probability (WarPI), w_l = sigmoid(logit w + log pi_l - mean_l log pi_l) with
    pi_l = softmax(v_l z)_y. The rectified logits model the given label, so pi_l replaces P(given | x), by which Bayes'
    rule divides. With several networks (those of the method, or those of the run and of the fold), w is computed for
    each. If both apply, their variances are added. If neither applies, the result is the entropy of P(true | x, given)
    divided by log K.
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
    return entropy, "entropy of P(true class | x, given label), divided by its maximum log K"


def _trusted_pairs(method: Method, predicted: _Predictions) -> Pairs:
    """The trusted rows whose label before the check is known, if they were not used to predict themselves."""
    trusted = predicted.trusted
    meta_given = method.task.meta_given
    given = np.full(len(trusted.y), -1) if meta_given is None else meta_given.cpu().numpy()[trusted.positions]
    usable = (given >= 0) & predicted.trusted_left_out
    true = trusted.y[usable]
    sizes = scores.posterior(predicted.rows.p, predicted.rows.y, predicted.T).sum(0)  # [K]
    weight = weigh_trusted(sizes, true, given[usable], predicted.rows.y)
    return Pairs(trusted.p[usable], given[usable], true, np.ones(len(true), dtype=np.bool_), weight)


def _checked_pairs(row: Ints, predictions: RowPredictions, checks: RowChecks) -> tuple[Ints, Pairs]:
    """The audited rows that a person has checked: their positions and pairs."""
    position = {number: i for i, number in enumerate(row.tolist())}
    audited = np.array([number in position for number in checks.row.tolist()], dtype=np.bool_)
    index = np.array([position[number] for number in checks.row[audited].tolist()], dtype=np.int64)
    p, y, true = predictions.p[index], predictions.y[index], checks.label[audited]
    return index, Pairs(p, y, true, checks.random[audited], checks.weight[audited])


def _count_votes(method: Method, predicted: _Predictions, row: Ints, y: Ints, n_trusted: int) -> Floats | None:
    """Labels of the rows that are most similar to each audited row and to each trusted pair."""
    task = method.task
    if not n_trusted or task.meta is None or task.meta_given is None:
        return neighbor_votes(task.train, row, y, None, row[:0], task.n_classes)
    positions = predicted.trusted.positions
    known = positions[task.meta_given.cpu().numpy()[positions] >= 0]
    return neighbor_votes(task.train, row, y, task.meta, known, task.n_classes)


def _warn(facts: Mapping[str, Any], trusted_left_out: bool) -> None:
    """Log a warning for each reason not to trust the audit."""
    if not trusted_left_out and not facts["folds"]:
        log.warning("the trusted rows were used for training and cannot check the probabilities; use --folds 5")
    accuracy = facts["trusted_accuracy"]
    if accuracy is not None and accuracy < _LOW_ACCURACY:
        log.warning(
            "only %.0f %% of the trusted rows are predicted correctly (weighted by the sizes of the classes), so many "
            "suggestions are wrong",
            100 * accuracy,
        )
