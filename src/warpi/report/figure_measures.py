"""Compute the arrays of figures from the weights of a finished run: losses, matrices, v and sigma, calibration."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpi.functional.losses import cross_entropy
from warpi.methods.warpi import WarPI
from warpi.report.figure_data import BINS, EDGES, KINDS, Arrays, write_arrays
from warpi.runs.reopen import reopen
from warpi.runs.run import Run
from warpi.runs.spec import DataCache
from warpi.training.method import Method, evaluating
from warpi.training.outputs import predict_rows

_CHUNK = 1000  # rows whose samples of v are in memory at the same time


def measure(folder: Path | str, device: str = "auto", *, cache: DataCache | None = None, **custom: Any) -> Arrays:
    """Compute the arrays of a finished run and store them in its folder.

    `custom` are a custom method or network that the run was made with (`method=...`, `net=...`). Pass one `cache` to
    several calls for runs on the same data.
    """
    arrays = compute_arrays(reopen(folder, device, custom, cache))
    write_arrays(Path(folder), arrays)
    return arrays


@torch.no_grad()
def compute_arrays(run: Run) -> Arrays:
    """Arrays of a trained method in evaluation mode, on all training rows without augmentation and on the test rows."""
    method, task, truth = run.method, run.task, run.truth
    k = task.n_classes
    rectifier = isinstance(method, WarPI)
    rows, seen = predict_rows(method.net, task.train, None if rectifier else method.predict)
    y = task.train.y[rows]
    z = seen if rectifier else seen.clamp_min(1e-12).log()  # for other methods log-probabilities replace the logits
    clean = torch.full_like(y, -1) if truth.clean is None else truth.clean.to(y.device)[rows]
    kind = torch.where(clean < 0, 2, (clean != y).long())  # a row of KINDS
    predicted = z.argmax(dim=1)
    raw = cross_entropy(z, y)
    arrays: dict[str, Tensor] = {
        "n_kind": torch.bincount(kind, minlength=len(KINDS)),
        "loss_raw": _histogram(raw, kind),
        "loss_raw_mean": _means(raw[:, None], kind, len(KINDS))[:, 0],
        "T_classifier": _means(_one_hot(y, k), predicted, k),  # row i: given labels of the examples predicted as i
        "confusion_train": _confusion(y, predicted, k),
    }
    if bool((clean >= 0).any()):
        known = clean >= 0
        arrays["T_given"] = _means(_one_hot(y[known], k), clean[known], k)  # the noise of the labels
    if truth.T is not None:
        arrays["T"] = truth.T
    if isinstance(method, WarPI):
        arrays |= _measure_rectified(method, z, y, clean, kind, predicted)
    if truth.test is not None:
        arrays |= _calibration(method, run)
    numbers: Arrays = {name: value.cpu().numpy().astype(np.float32) for name, value in arrays.items()}
    return {"classes": np.array(task.classes), **numbers}


def _measure_rectified(
    method: WarPI, z: Tensor, y: Tensor, clean: Tensor, kind: Tensor, predicted: Tensor
) -> dict[str, Tensor]:
    """Losses and predictions of the logits times v, and v and sigma by given label and predicted class."""
    k = z.shape[1]
    parts = []
    with evaluating([method.V]):
        for some in torch.split(torch.arange(len(y), device=y.device), _CHUNK):
            q = method.V(z[some], y[some])
            v = method.draw(q)  # [L, B, K]
            changed = v * z[some]
            parts.append((cross_entropy(changed, y[some]).mean(0), changed.softmax(-1).mean(0), v.mean(0), q.std))
    loss, p, v, sigma = (torch.cat(each) for each in zip(*parts, strict=True))  # [N], [N, K], [N, K], [N, K]
    arrays = {
        "loss_rectified": _histogram(loss, kind),
        "loss_rectified_mean": _means(loss[:, None], kind, len(KINDS))[:, 0],
    }
    if bool((clean >= 0).any()):
        arrays["T_rectified"] = _means(_one_hot(p.argmax(1), k)[clean >= 0], clean[clean >= 0], k)
    cell = y * k + predicted
    arrays["v_count"] = torch.bincount(cell, minlength=k * k).view(k, k)
    others = torch.ones_like(z).scatter_(1, y[:, None], 0).scatter_(1, predicted[:, None], 0)
    shown = {"v": v, "sigma": sigma} if method.samples else {"v": v}  # without samples sigma was not trained
    for name, value in shown.items():
        columns = [value.gather(1, y[:, None]), value.gather(1, predicted[:, None])]
        columns.append((value * others).sum(1, keepdim=True) / others.sum(1, keepdim=True))  # nan without other classes
        mean = _means(torch.cat(columns, dim=1), cell, k * k).view(k, k, 3)
        by_kind = _means(torch.cat(columns, dim=1), kind, len(KINDS))
        for i, coordinate in enumerate(("given", "predicted", "other")):
            arrays[f"{name}_{coordinate}"] = mean[..., i]
            arrays[f"{name}_{coordinate}_mean"] = by_kind[:, i]
    return arrays


def _calibration(method: Method, run: Run) -> dict[str, Tensor]:
    """Test rows in bins of their confidence: counts, mean confidence and accuracy; and the confusion matrix."""
    assert run.truth.test is not None
    rows, p = predict_rows(method.net, run.truth.test, method.predict)
    confidence, predicted = p.double().max(dim=1)
    y = run.truth.test.y[rows]
    right = (predicted == y).double()
    bins = (confidence * BINS).ceil().clamp(1, BINS).long() - 1
    mean = _means(torch.stack([confidence, right], dim=1), bins, BINS)
    return {
        "bin_count": torch.bincount(bins, minlength=BINS),
        "bin_confidence": mean[:, 0],
        "bin_accuracy": mean[:, 1],
        "confusion_test": _confusion(y, predicted, p.shape[1]),
    }


def _confusion(y: Tensor, predicted: Tensor, k: int) -> Tensor:
    """Number of examples by label (row) and prediction (column).  [K, K]"""
    return torch.bincount(y * k + predicted, minlength=k * k).view(k, k)


def _one_hot(y: Tensor, k: int) -> Tensor:
    return torch.nn.functional.one_hot(y, k).double()


def _means(values: Tensor, group: Tensor, n: int) -> Tensor:
    """Mean of the rows of `values` [N, D] in each of n groups, ignoring nan; nan for empty groups.  [n, D]"""
    sums = torch.zeros(n, values.shape[1], dtype=torch.double, device=values.device)
    known = ~values.isnan()
    counts = torch.zeros_like(sums).index_add_(0, group, known.double())
    return sums.index_add_(0, group, values.double().where(known, 0.0)) / counts


def _histogram(loss: Tensor, kind: Tensor) -> Tensor:
    """Number of losses in each bin, by kind of label.  [3, bins]"""
    bins = len(EDGES) - 1
    index = (loss / EDGES[-1] * bins).long().clamp(0, bins - 1)
    return torch.bincount(kind * bins + index, minlength=len(KINDS) * bins).view(len(KINDS), bins)
