"""What the weights of a finished run have to say: losses, transition matrices, v and sigma, calibration."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpi.functional.losses import cross_entropy
from warpi.methods.warpi import WarPI
from warpi.report.figure_data import BINS, EDGES, KINDS, Arrays, write
from warpi.runs.reopen import reopen
from warpi.runs.run import Run
from warpi.training.method import Method, evaluating
from warpi.training.outputs import predict_rows

_CHUNK = 1000  # rows whose samples of v are held at a time


def measure(folder: Path | str, device: str = "auto", **own: Any) -> Arrays:
    """Compute the arrays of a finished run, and put them beside it.

    `own` are a method or a net of your own that the run was made with (`method=...`, `net=...`).
    """
    arrays = arrays_of(reopen(folder, device, own))
    write(Path(folder), arrays)
    return arrays


@torch.no_grad()
def arrays_of(run: Run) -> Arrays:
    """Arrays of a trained method, in evaluation mode, on all training rows as they are, and on the test rows."""
    method, task, truth = run.method, run.task, run.truth
    k, rectifier = task.n_classes, isinstance(method, WarPI)
    rows, seen = predict_rows(method.net, task.train, None if rectifier else method.predict)
    y = task.train.y[rows]
    z = seen if rectifier else seen.clamp_min(1e-12).log()  # of other methods log-probabilities stand for logits
    clean = torch.full_like(y, -1) if truth.clean is None else truth.clean.to(y.device)[rows]
    kind = torch.where(clean < 0, 2, (clean != y).long())  # a row of KINDS
    predicted = z.argmax(dim=1)
    raw = cross_entropy(z, y)
    found: dict[str, Tensor] = {
        "n_kind": torch.bincount(kind, minlength=len(KINDS)),
        "loss_raw": _histogram(raw, kind),
        "loss_raw_mean": _means(raw[:, None], kind, len(KINDS))[:, 0],
        "T_classifier": _means(_one_hot(y, k), predicted, k),  # no truth needed: given labels where it predicts i
        "confusion_train": _crossed(y, predicted, k),
    }
    if bool((clean >= 0).any()):
        known = clean >= 0
        found["T_given"] = _means(_one_hot(y[known], k), clean[known], k)  # what was done to the labels
    if truth.T is not None:
        found["T"] = truth.T
    if isinstance(method, WarPI):
        found |= _rectified(method, z, y, clean, kind, predicted)
    if truth.test is not None:
        found |= _calibration(method, run)
    numbers: Arrays = {name: value.cpu().numpy().astype(np.float32) for name, value in found.items()}
    return {"classes": np.array(task.classes), **numbers}


def _rectified(
    method: WarPI, z: Tensor, y: Tensor, clean: Tensor, kind: Tensor, predicted: Tensor
) -> dict[str, Tensor]:
    """Losses and predictions after multiplication by v, and v and sigma by (given label, predicted class)."""
    k, parts = z.shape[1], []
    with evaluating([method.V]):
        for some in torch.split(torch.arange(len(y), device=y.device), _CHUNK):
            q = method.V(z[some], y[some])
            v = method.draw(q)  # [L, B, K]
            changed = v * z[some]
            parts.append((cross_entropy(changed, y[some]).mean(0), changed.softmax(-1).mean(0), v.mean(0), q.std))
    loss, p, v, sigma = (torch.cat(each) for each in zip(*parts, strict=True))  # [N], [N, K], [N, K], [N, K]
    found = {
        "loss_rectified": _histogram(loss, kind),
        "loss_rectified_mean": _means(loss[:, None], kind, len(KINDS))[:, 0],
    }
    if bool((clean >= 0).any()):
        found["T_rectified"] = _means(_one_hot(p.argmax(1), k)[clean >= 0], clean[clean >= 0], k)
    cell = y * k + predicted
    found["v_count"] = torch.bincount(cell, minlength=k * k).view(k, k)
    others = torch.ones_like(z).scatter_(1, y[:, None], 0).scatter_(1, predicted[:, None], 0)
    for name, value in {"v": v, "sigma": sigma}.items():
        columns = [value.gather(1, y[:, None]), value.gather(1, predicted[:, None])]
        columns.append((value * others).sum(1, keepdim=True) / others.sum(1, keepdim=True))  # nan: there are no others
        mean = _means(torch.cat(columns, dim=1), cell, k * k).view(k, k, 3)
        by_kind = _means(torch.cat(columns, dim=1), kind, len(KINDS))
        for i, where in enumerate(("given", "predicted", "other")):  # at which coordinate
            found[f"{name}_{where}"], found[f"{name}_{where}_mean"] = mean[..., i], by_kind[:, i]
    if method.samples == 0:  # sigma was never asked for, and is as it was drawn at the start
        found = {name: value for name, value in found.items() if not name.startswith("sigma")}
    return found


def _calibration(method: Method, run: Run) -> dict[str, Tensor]:
    """Test rows by how sure the method is of them: how many, how sure, how often right."""
    assert run.truth.test is not None
    rows, p = predict_rows(method.net, run.truth.test, method.predict)
    confidence, guess = p.double().max(dim=1)
    y = run.truth.test.y[rows]
    hit = (guess == y).double()
    which = (confidence * BINS).ceil().clamp(1, BINS).long() - 1
    mean = _means(torch.stack([confidence, hit], dim=1), which, BINS)
    return {
        "bin_count": torch.bincount(which, minlength=BINS),
        "bin_confidence": mean[:, 0],
        "bin_accuracy": mean[:, 1],
        "confusion_test": _crossed(y, guess, p.shape[1]),
    }


def _crossed(y: Tensor, predicted: Tensor, k: int) -> Tensor:
    """How many examples have which label (row) and which prediction (column).  [K, K]"""
    return torch.bincount(y * k + predicted, minlength=k * k).view(k, k)


def _one_hot(y: Tensor, k: int) -> Tensor:
    return torch.nn.functional.one_hot(y, k).double()


def _means(values: Tensor, group: Tensor, n: int) -> Tensor:
    """Mean of the rows of `values` [N, D] in each of n groups, without nan; nan where nothing is left.  [n, D]"""
    sums = torch.zeros(n, values.shape[1], dtype=torch.double, device=values.device)
    known = ~values.isnan()
    counts = torch.zeros_like(sums).index_add_(0, group, known.double())
    return sums.index_add_(0, group, values.double().where(known, 0.0)) / counts


def _histogram(loss: Tensor, kind: Tensor) -> Tensor:
    """How many losses lie in each bin, by kind of label.  [3, bins]"""
    bins = len(EDGES) - 1
    which = (loss / EDGES[-1] * bins).long().clamp(0, bins - 1)
    return torch.bincount(kind * bins + which, minlength=len(KINDS) * bins).view(len(KINDS), bins)
