"""Scores of predictions: accuracy, negative log-likelihood and calibration."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from warpi.data.split import Split
from warpi.training.outputs import share_rows


class Scores(NamedTuple):
    """Scores of predictions, in percent except `nll`."""

    acc: float
    nll: float
    ece: float
    per_class: tuple[float, ...]  # accuracy of each class; NaN if the split has no example of it


def compute_scores(p: Tensor, y: Tensor, bins: int = 15) -> Scores:
    """Accuracy, negative log-likelihood, expected calibration error and accuracy per class.  p [N, K], y [N]

    ECE = sum_b n_b / N |accuracy_b - confidence_b|, where the bins b divide the highest predicted probability into
    intervals of equal width.
    """
    confidence, predicted = p.double().max(dim=1)
    correct = (predicted == y).double()
    nll = -p.double().gather(1, y[:, None]).clamp_min(1e-12).log().mean()
    bin_index = (confidence * bins).ceil().clamp(1, bins).long() - 1
    gaps = torch.zeros(bins, dtype=torch.double, device=p.device).index_add_(0, bin_index, correct - confidence)
    zeros = torch.zeros(p.shape[1], dtype=torch.double, device=p.device)
    per_class = zeros.index_add(0, y, correct) / zeros.index_add(0, y, torch.ones_like(correct))
    return Scores(
        100 * correct.mean().item(),
        nll.item(),
        100 * (gaps.abs().sum() / len(y)).item(),  # gaps[b] = n_b (accuracy_b - confidence_b)
        tuple((100 * per_class).tolist()),
    )


def evaluate(predict: Callable[[Tensor], Tensor], split: Split, batch_size: int = 1000) -> Scores:
    """Compute the scores of a function from inputs to probabilities on a split."""
    rows, p = share_rows(predict, split, batch_size)
    return compute_scores(p, split.y[rows])
