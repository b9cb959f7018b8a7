"""Predictions of every row by `auto`, fitted several times, each row by models that were not trained on its label.

The mean over several fits changes little with the random seed, so that two audits of the same data agree.
"""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse

from warpi.audit.label_scores import Floats, Ints
from warpi.audit.out_of_sample import split_into_folds
from warpi.audit.result import read_arrays, write_arrays
from warpi.auto.fit import AutoResult, AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.methods.auto import Auto, read_task
from warpi.training.method import Method
from warpi.utils.seeding import derive

log = logging.getLogger("warpi.audit")

FITS = 3
MOST_ROWS = 20_000  # with more rows, a run of auto is not fitted again, because two fits would differ little
FILE = "cross-fit.npz"


@dataclass(frozen=True, eq=False)
class CrossFit:
    """Predictions of n rows and of the trusted rows, as means over several fits."""

    y: Ints  # [n] given labels
    p: Floats  # [n, K]
    left_out: Ints  # [m] positions of the trusted rows that are predicted
    p_trusted: Floats  # [m, K] by fits without these rows
    T: Floats  # [K, K] transition matrix
    fits: int


def can_cross_fit(method: Method) -> bool:
    """Whether `auto` can predict the rows: feature vectors, or images for which a run of `auto` made features."""
    return isinstance(method, Auto) or len(method.task.shape) == 1


def cross_fit(method: Method, split: Split, folder: Path | None) -> CrossFit:
    """Predict the rows of a split, which has the labels to audit. The result is stored in the run folder."""
    y = split.y.cpu().numpy()
    file = None if folder is None else folder / FILE
    stored = None if file is None else _read(file, y, method)
    if stored is not None:
        return stored
    is_own = isinstance(method, Auto) and torch.equal(split.rows, method.task.train.rows)
    result = _combine_with_own(method, method.task.train) if is_own else _fit_all(method, split)
    if file is not None:
        _write(file, result)
    return result


def _combine_with_own(method: Method, split: Split) -> CrossFit:
    """Combine the fit of the run itself with further fits. The run has predicted its trusted rows out of sample."""
    own = method.out_of_sample()
    assert own is not None
    p, T = [own.p.numpy()], [own.transition.numpy()]
    rows = _read_rows(method, split)
    for r in range(FITS - 1 if len(split) <= MOST_ROWS else 0):
        log.info("audit: fit %d of %d", r + 2, FITS)
        fitted = _fit(method, rows, r)
        p.append(fitted.p)
        T.append(fitted.transition)
    trusted = np.arange(len(own.p_trusted))
    return CrossFit(rows.given, np.mean(p, 0), trusted, own.p_trusted.numpy(), np.mean(T, 0), len(p))


def _fit_all(method: Method, split: Split) -> CrossFit:
    """Every fit leaves out a different part of the trusted rows. The only trusted row of a class is never left out."""
    rows = _read_rows(method, split)
    can_leave_out = np.bincount(rows.y_trusted, minlength=rows.n_classes)[rows.y_trusted] > 1
    folds = split_into_folds(rows.y_trusted, FITS, method.recipe.seed)
    p, T = [], []
    p_trusted = np.zeros((rows.n_trusted, rows.n_classes))
    for r, fold in enumerate(folds):
        log.info("audit: fit %d of %d", r + 1, FITS)
        out = fold[can_leave_out[fold]]
        kept = np.setdiff1d(np.arange(rows.n_trusted), out)
        given = None if rows.given_trusted is None else rows.given_trusted[kept]
        part = replace(rows, x_trusted=rows.x_trusted[kept], y_trusted=rows.y_trusted[kept], given_trusted=given)
        fitted = _fit(method, part, r)
        p.append(fitted.p)
        T.append(fitted.transition)
        if len(out):
            p_trusted[out] = _predict(fitted, rows.x_trusted[out])
    left_out = np.flatnonzero(can_leave_out)
    return CrossFit(rows.given, np.mean(p, 0), left_out, p_trusted[left_out], np.mean(T, 0), FITS)


def _read_rows(method: Method, split: Split) -> Rows:
    """The audited rows and the trusted rows as `auto` sees them."""
    images = getattr(method.nets[0], "images", None) if isinstance(method, Auto) else None
    return read_task(method.task, split, images)


def _fit(method: Method, rows: Rows, number: int) -> AutoResult:
    model = method.model if isinstance(method, Auto) else None
    options: dict[str, Any] = {} if model is None else {"models": (model,)}
    seed = derive(method.recipe.seed, "audit", number) % 2**31
    return fit_auto(rows, AutoSettings(**options, seed=seed, measure=False))


@torch.no_grad()
def _predict(fitted: AutoResult, x: Any) -> Floats:
    dense = x.toarray() if sparse.issparse(x) else x
    p: Floats = fitted.model(torch.as_tensor(dense)).exp().double().numpy()
    return p


def _write(file: Path, result: CrossFit) -> None:
    try:
        write_arrays(file, asdict(result))
    except UserError as e:  # a read-only run folder; the audit itself can still be completed
        log.warning("the predictions are not stored, so the next audit computes them again: %s", e)


def _read(file: Path, y: Ints, method: Method) -> CrossFit | None:
    """Predictions that an earlier audit stored; None if there are none, or if they are for other rows or labels."""
    if not file.exists():
        return None
    try:
        arrays: dict[str, Any] = read_arrays(file)
        result = CrossFit(**{**arrays, "fits": int(arrays["fits"])})
        K = method.task.n_classes
        shapes = (result.p.shape, result.p_trusted.shape, result.T.shape)
        if shapes != ((len(result.y), K), (len(result.left_out), K), (K, K)):
            raise ValueError("its arrays do not fit together")
        if not all(np.isfinite(values).all() for values in (result.p, result.p_trusted, result.T)):
            raise ValueError("it contains values that are not probabilities")
    except (ValueError, TypeError, LookupError) as e:
        raise UserError(f"{file} was not written by `warpi audit` ({e}); delete it") from e
    return result if np.array_equal(result.y, y) else None
