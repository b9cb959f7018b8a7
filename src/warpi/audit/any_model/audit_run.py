"""Audit a run with too many rows for the other audits: predictions and scores in chunks, results in small types."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import warpi
import warpi.audit.label_scores as scores
from warpi.audit.any_model.audit_array import CHUNK, JudgedRows, finish_audit
from warpi.audit.any_model.read_files import TrustedRows
from warpi.audit.checked_labels import RowChecks, collect_row_checks, digest_decisions
from warpi.audit.label_scores import Floats, Ints
from warpi.audit.out_of_sample import predict_split
from warpi.audit.result import Audit
from warpi.auto.transition import confident_transition
from warpi.data.mapped import MOST_ROWS, MappedExamples
from warpi.data.split import Split
from warpi.training.method import Method, evaluating

log = logging.getLogger("warpi.audit")
_SAMPLE = 200_000  # rows from which the transition matrix is estimated


def is_large(method: Method) -> bool:
    """Whether a run has so many rows that they stay in their file and are audited in chunks."""
    return isinstance(method.task.train.examples, MappedExamples) and len(method.task.train) > MOST_ROWS


def audit_large_run(
    method: Method,
    path: Path | None,
    held_out: Sequence[Split],
    threshold: float,
    checked: Sequence[Path | str],
    facts: dict[str, Any],
) -> Audit:
    """Audit the labels of the training rows and of `held_out` by the network of the run itself.

    Probabilities are in sample: a network that memorizes labels hides mistakes. They are stored as float16, scores as
    float32. Rows that a person has checked determine the noise rate and their own posterior, but no model is fitted to
    them.
    """
    classes = method.task.classes
    split = _join([method.task.train, *held_out])
    trusted = predict_split(method, method.task.meta)
    temperature = scores.fit_temperature(trusted.p, trusted.y)
    p = _predict(method, split, temperature)
    given: Any = split.y.cpu().numpy().astype(np.int16 if len(classes) < 2**15 else np.int32)
    T = _estimate_transition(p, given, scores.estimate_transition if len(trusted.y) else confident_transition)
    judged = JudgedRows(np.empty_like(given), np.empty(len(given), np.float32), np.empty(len(given), np.float32))
    for start in range(0, len(given), CHUNK):
        rows = slice(start, start + CHUNK)
        judged.fill(rows, scores.posterior(p[rows], given[rows], T), given[rows])
    row = split.rows.numpy()
    checks = collect_row_checks(path, [Path(file) for file in checked], classes, row, given)
    known = _find_checks(row, checks)
    left_out = scores.posterior(p[known.row], given[known.row], T)
    accuracy = float((trusted.p.argmax(1) == trusted.y).mean()) if len(trusted.y) else None
    facts = facts | {
        "version": warpi.__version__,
        "folds": 0,
        "probabilities": "in sample: predicted by the network of the run, since the data is larger than memory",
        "temperature": temperature,
        "memory": 0.0,
        "n_trusted": len(trusted.y),
        "trusted_accuracy": accuracy,
        "uncertainty": "entropy of P(true class | x, given label) / log K, as there is one network",
        "threshold": threshold,
        "n_checked": len(known.row),
        "checked_lists": [str(file) for file in checked],
        "decisions": None if path is None else digest_decisions(path),
        "learned": False,
    }
    log.warning("the probabilities come from the network that was trained on these labels, which hides mistakes")
    return finish_audit(row, given, p, T, judged, known, left_out, classes, facts)


def _join(splits: list[Split]) -> Split:
    """The rows of splits of one data set, ascending."""
    if len(splits) == 1:
        return splits[0]
    rows = torch.cat([split.rows for split in splits])
    order = rows.argsort()
    y = torch.cat([split.y for split in splits])
    return replace(splits[0], rows=rows[order], y=y[order.to(y.device)])


@torch.no_grad()
def _predict(method: Method, split: Split, temperature: float) -> NDArray[Any]:
    """Calibrated probabilities of the rows of a split.  [N, K]"""
    p = np.empty((len(split), method.task.n_classes), np.float16)
    with evaluating(method.nets):
        for batch in split.batches(CHUNK // 4):
            predicted = method.predict(batch.x).double().cpu().numpy()
            p[batch.rows.cpu().numpy()] = scores.apply_temperature(predicted, temperature)
    return p


def _estimate_transition(p: NDArray[Any], given: NDArray[Any], estimate: Callable[[Floats, Ints], Floats]) -> Floats:
    n = min(len(p), _SAMPLE)
    rows = np.sort(np.random.default_rng(0).choice(len(p), n, replace=False))
    return estimate(p[rows].astype(np.float64), given[rows])


def _find_checks(row: NDArray[np.int64], checks: RowChecks) -> TrustedRows:
    """The checked rows that are audited, as positions in `row`, which is sorted."""
    position = np.minimum(np.searchsorted(row, checks.row), len(row) - 1)
    audited = row[position] == checks.row
    values = (position, checks.label, checks.random, checks.weight)
    return TrustedRows.from_rows(*(value[audited] for value in values))
