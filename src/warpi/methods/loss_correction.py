"""Forward and backward loss correction by an estimated or given transition matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.data.placeholder import PlaceholderExamples
from warpi.errors import UserError
from warpi.functional.transition import backward_loss, forward_loss, from_anchors, normalize_rows, well_conditioned
from warpi.noise.matrix_file import SUFFIXES, read_matrix
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.warmup import restart, warmup_epochs
from warpi.utils.settings import setting


@dataclass
class LossCorrection(Method):
    """Correct the loss by an estimated or given transition matrix T of the noise.

        T_ij = p(given = j | true = i),  estimated by  p(j | x^i),  x^i = argmax_x p(i | x)         Eqs. (12), (13)
        backward:  L = 1/B sum_i (T^-1 l_i)_{y_i},  l_ik = -log softmax(F(x_i; theta))_k            Theorem 1
        forward:   L = 1/B sum_i -log (T^T softmax(F(x_i; theta)))_{y_i}                            Theorem 2

    The backward loss is unbiased: its expectation under the noise is the loss of the true label, T T^-1 l = l. With
    T = I both losses are cross-entropy. In the first `warmup` of the epochs a network is trained with cross-entropy; T
    is estimated from its probabilities, and training restarts from the same initial weights.

    Differs from the paper: both trainings share the recipe's epochs, each with the full learning-rate schedule (paper:
    two full trainings). An ill-conditioned estimate (condition number above 10) is mixed with the identity, a tenth at
    a time, as the paper advises.
    Reference: Patrini et al., Making Deep Neural Networks Robust to Label Noise: a Loss Correction Approach, CVPR 2017.
    """

    family = "transition"
    year = 2017

    direction: Literal["forward", "backward"] = setting("forward", "correct predictions or losses")
    warmup: float = setting(0.3, "fraction of the epochs before T is estimated", low=0, high=1)
    quantile: float = setting(0.97, "quantile of p(i | x) at the anchor of class i; 1: the maximum", low=0, high=1)
    matrix: tuple[float, ...] | str | None = setting(None, "T, row by row, or a file with it (default: estimated)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.matrix, str) and Path(self.matrix).suffix.lower() not in SUFFIXES:
            raise UserError(
                f"matrix must be the numbers of T row by row, such as 0.9,0.1,0.2,0.8, or a file that contains T "
                f"({', '.join(SUFFIXES)}), got {self.matrix!r}"
            )

    def create_state(self) -> None:
        task = self.task
        self.switch = warmup_epochs(self.warmup, self.recipe.epochs)
        self.corrected = self.matrix is not None
        self.schedule_starts = [0] if self.corrected else [0, self.switch]
        T = torch.eye(task.n_classes)
        # Without inputs, T is restored from the checkpoint; its file may no longer exist.
        if self.matrix is not None and not isinstance(task.train.examples, PlaceholderExamples):
            T = _given(self.matrix, task.classes)
        self.T = T.to(task.device)
        self.T_inverse = torch.linalg.inv(well_conditioned(self.T))

    def before_epoch(self, t: int) -> None:
        if t >= self.switch and not self.corrected:
            _, z = predict_rows(self.net, self.task.train)
            self.T.copy_(from_anchors(z.softmax(1), self.quantile))  # Eqs. (12), (13)
            self.T_inverse.copy_(torch.linalg.inv(well_conditioned(self.T)))
            restart(self)
            self.corrected = True

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        if self.direction == "forward" or not self.corrected:
            loss = forward_loss(z, batch.y, self.T).mean()  # Theorem 2; with T = I cross-entropy
        else:
            loss = backward_loss(z, batch.y, self.T_inverse).mean()  # Theorem 1
        return {"loss": descend(loss, self.optimizer)}


def _given(matrix: tuple[float, ...] | str, classes: Sequence[str]) -> Tensor:
    """Return the user's T, given as numbers or as a file.  [K, K]"""
    if isinstance(matrix, str):
        return read_matrix(matrix, classes).float()
    K = len(classes)
    if len(matrix) != K * K:
        raise UserError(f"matrix has {len(matrix)} numbers, but {K} classes need {K * K}, which are T row by row")
    T = torch.tensor(matrix).reshape(K, K)
    if not torch.allclose(normalize_rows(T), T, atol=1e-4):
        raise UserError("each row of matrix must be a distribution: numbers of at least 0 that sum to 1")
    return T
