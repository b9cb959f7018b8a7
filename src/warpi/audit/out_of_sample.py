"""Predictions of a trained method for rows, and out-of-sample predictions by cross-validation."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.audit.label_scores import Floats, Ints
from warpi.audit.result import read_arrays, write_arrays
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.training.engine import train
from warpi.training.method import Method
from warpi.training.outputs import predict_rows
from warpi.utils.seeding import derive, generator, seeded

log = logging.getLogger("warpi.audit")

SAMPLES = 20  # number of `Method.label_samples`, for the uncertainty
_CHUNK = 10_000  # rows that are sampled at once


@dataclass(frozen=True, eq=False)
class RowPredictions:
    """Predictions of a trained method for the n readable rows of a split."""

    positions: Ints  # [n] positions within the split
    y: Ints  # [n] given labels
    p: Floats  # [n, K] class probabilities
    per_network: Floats  # [S, n, K] class probabilities of each network; S = 0 for a single network
    label_log_probs: Floats  # [L, n] `Method.label_samples`; L = 0 if the method has none

    def take(self, index: Ints | NDArray[np.bool_]) -> "RowPredictions":
        """The rows at an index array or mask."""
        per_row = (self.positions[index], self.y[index], self.p[index])
        return RowPredictions(*per_row, self.per_network[:, index], self.label_log_probs[:, index])


# Names of the arrays in a file of stored predictions.
_STORED_NAMES = {"positions": "at", "y": "y", "p": "p", "per_network": "each", "label_log_probs": "given"}
_TRUSTED = "trusted_"  # prefix of the names of the trusted rows in a file


def concatenate(parts: Sequence[RowPredictions]) -> RowPredictions:
    """All rows, one part after the other."""
    axes = {"positions": 0, "y": 0, "p": 0, "per_network": 1, "label_log_probs": 1}
    return RowPredictions(
        **{name: np.concatenate([getattr(part, name) for part in parts], axis) for name, axis in axes.items()}
    )


def no_predictions(n_classes: int) -> RowPredictions:
    """Predictions for no row."""
    no_rows = np.zeros(0, np.int64)
    return RowPredictions(no_rows, no_rows, np.zeros((0, n_classes)), np.zeros((0, 0, n_classes)), np.zeros((0, 0)))


@torch.no_grad()
def predict_split(method: Method, split: Split | None) -> RowPredictions:
    """Predict the rows of a split in evaluation mode, without augmentation."""
    if split is None:
        return no_predictions(method.task.n_classes)
    positions, p = predict_rows(method.net, split, method.predict)
    y = split.y[positions]
    per_network = p.new_zeros((0, *p.shape))
    if len(method.predictors) > 1:
        per_network = torch.stack([predict_rows(net, split)[1].softmax(1) for net in method.predictors])
    label_log_probs = _sample_labels(method, split, y)
    return RowPredictions(*(_to_numpy(t) for t in (positions, y, p, per_network, label_log_probs)))


def _to_numpy(t: Tensor) -> Any:
    values = t.cpu()
    return values.double().numpy() if values.is_floating_point() else values.numpy()


def _sample_labels(method: Method, split: Split, y: Tensor) -> Tensor:
    """`Method.label_samples` of all readable rows of a split, with labels y.  [L, n]"""
    rng = generator(method.recipe.seed, "audit", device=y.device)
    no_logits = torch.zeros(0, method.task.n_classes, device=y.device)
    if method.label_samples(no_logits, y[:0], SAMPLES, rng) is None:
        return torch.zeros(0, len(y))
    logits = predict_rows(method.net, split)[1]
    samples = []
    for z_part, y_part in zip(torch.split(logits, _CHUNK), torch.split(y, _CHUNK), strict=True):
        part = method.label_samples(z_part, y_part, SAMPLES, rng)
        assert part is not None
        samples.append(part)
    return torch.cat(samples, dim=1)


def split_into_folds(y: Ints, n: int, seed: int) -> list[Ints]:
    """Positions of n stratified folds: each contains its share of every given label."""
    rng = generator(seed, "audit", "folds")
    fold = np.zeros(len(y), np.int64)
    start = 0
    for k in np.unique(y):
        members = np.flatnonzero(y == k)
        members = members[torch.randperm(len(members), generator=rng).numpy()]
        fold[members] = (start + np.arange(len(members))) % n  # continues after the last class: sizes differ by one
        start += len(members)
    return [np.flatnonzero(fold == f) for f in range(n)]


def predict_out_of_sample(method: Method, n: int, folder: Path | None = None) -> tuple[RowPredictions, RowPredictions]:
    """Predict every training row and every trusted row with networks that were not trained on it.

    Trains the same recipe n times; each training leaves out one fold of the training rows and one of the trusted rows.
    A trusted row that is the only one of its class is never left out and is missing from the result. If `folder` (the
    run folder) is given, the predictions of each fold are stored there, so that an interrupted audit does not repeat
    finished trainings.
    """
    split = method.task.train
    y = split.y.cpu().numpy()
    if np.bincount(y, minlength=method.task.n_classes).min() < 2:
        raise UserError("folds need at least two training rows of every class, but one class has only one row; use 0")
    if n > len(y):
        raise UserError(f"{n} folds of {len(y)} training rows would be too small; use fewer folds")
    trusted = method.task.meta
    trusted_y = y[:0] if trusted is None else trusted.y.cpu().numpy()
    can_leave_out = np.bincount(trusted_y, minlength=method.task.n_classes)[trusted_y] > 1
    folds = split_into_folds(y, n, method.recipe.seed)
    trusted_folds = split_into_folds(trusted_y, n, method.recipe.seed)
    results = []
    for f in range(n):
        file = None if folder is None else folder / f"fold-{f + 1}-of-{n}.npz"
        result = None if file is None else _read_fold(file, folds[f], y, trusted_y)
        if result is None:
            log.info("audit: training %d of %d", f + 1, n)
            left_out = trusted_folds[f]
            result = _predict_fold(method, folds[f], left_out[can_leave_out[left_out]])
            if file is not None:
                _write_fold(file, *result)
        results.append(result)
    rows = concatenate([rows for rows, _ in results])
    left_out_trusted = concatenate([trusted_rows for _, trusted_rows in results])
    return rows.take(rows.positions.argsort()), left_out_trusted.take(left_out_trusted.positions.argsort())


def _predict_fold(method: Method, fold: Ints, trusted_fold: Ints) -> tuple[RowPredictions, RowPredictions]:
    """Train the recipe without the rows `fold` and the trusted rows `trusted_fold`, and predict these."""
    task = method.task
    meta = task.meta and _leave_out(task.meta, trusted_fold)
    rest = replace(task, train=_leave_out(task.train, fold), meta=meta, val=None)
    with seeded(derive(method.recipe.seed, "training")):
        learner = replace(method)  # the same hyper-parameters, without state
        learner.start(rest, method.recipe)
        for _ in train(learner, learner.task):
            pass
    rows = predict_split(learner, task.train.subset(torch.from_numpy(fold)))
    # Predict all trusted rows: the few images of one fold may all be unreadable.
    trusted = predict_split(learner, task.meta)
    return replace(rows, positions=fold[rows.positions]), trusted.take(np.isin(trusted.positions, trusted_fold))


def _leave_out(split: Split, positions: Ints) -> Split:
    return split.subset(torch.from_numpy(np.setdiff1d(np.arange(len(split)), positions)))


def _write_fold(file: Path, rows: RowPredictions, trusted: RowPredictions) -> None:
    arrays = {key: getattr(rows, name) for name, key in _STORED_NAMES.items()}
    arrays |= {_TRUSTED + key: getattr(trusted, name) for name, key in _STORED_NAMES.items()}
    try:
        write_arrays(file, arrays)
    except UserError as e:  # a read-only run folder; the audit itself can still be completed
        log.warning("the predictions of this fold are not stored, so a restarted audit trains it again: %s", e)


def _read_fold(file: Path, fold: Ints, y: Ints, trusted_y: Ints) -> tuple[RowPredictions, RowPredictions] | None:
    """Read the predictions that an earlier process stored.

    Returns None if there are none, if they are for other rows, or if they have no trusted rows (older versions).
    """
    if not file.exists():
        return None
    try:
        arrays = read_arrays(file)
        if not any(key.startswith(_TRUSTED) for key in arrays):
            return None
        rows = RowPredictions(**{name: arrays[key] for name, key in _STORED_NAMES.items()})
        trusted = RowPredictions(**{name: arrays[_TRUSTED + key] for name, key in _STORED_NAMES.items()})
        if not np.isin(rows.positions, fold).all():
            return None
        for part, labels in ((rows, y), (trusted, trusted_y)):
            same_labels = np.array_equal(part.y, labels[part.positions])
            if not same_labels or len(part.p) != len(part.y) or not np.isfinite(part.p).all():
                raise ValueError("its arrays do not fit the run")
    except (ValueError, TypeError, LookupError) as e:
        raise UserError(f"{file} was not written by `warpi audit` ({e}); delete it") from e
    return rows, trusted
