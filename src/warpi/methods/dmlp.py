"""DMLP: decoupled meta label purifier."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.functional.losses import one_hot, soft_cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.utils.settings import setting

_MOST_FEATURES = 20_000  # the closed form solves a system of this size


@dataclass
class DMLP(Method):
    """Purify the labels on fixed features, where the classifier has a closed form, then train on them.

        W(Y)   = (F^T F + lambda I)^-1 F^T Y                         ridge regression of the labels Y [N, K]
        L(Y)   = 1/M |F_m W(Y) - Y_m|^2                              judged by the M trusted rows
        Y     <- Y - t dL/dY,  t = argmin_t L(Y - t dL/dY)           intrinsic correction
        Y     <- momentum Y + (1 - momentum) F W(Y)                  extrinsic correction, by the classifier
        Y     <- the nearest distributions                           rows on the simplex

    L is quadratic in Y, so dL/dY = 2/M F (F^T F + lambda I)^-1 F_m^T (F_m W - Y_m) is the exact gradient of the bilevel
    problem and t the exact step. Then the network is trained by cross-entropy with the rows of Y as targets.

    Differs from the paper in the features, the steps and the classifier of the extrinsic correction:
    docs/methods/dmlp.md.
    Reference: Tu et al., Learning from Noisy Labels with Decoupled Meta Label Purifier, CVPR 2023.
    """

    family = "refinement"
    year = 2023
    needs_meta = True

    ridge: float = setting(3.0, "ridge penalty lambda, relative to the mean eigenvalue of F^T F", low=0)
    rounds: int = setting(20, "number of corrections of the labels", low=1)
    momentum_of_labels: float = setting(0.9, "share of the labels that an extrinsic correction keeps", 0, 1)

    def create_state(self) -> None:
        self.Y = one_hot(self.task.train.y, self.task.n_classes)  # [N, K]

    def before_epoch(self, t: int) -> None:
        if t == 0:
            assert self.task.meta is not None  # see needs_meta
            F, F_m = _features(self.task.train), _features(self.task.meta)
            Y_m = one_hot(self.task.meta.y, self.task.n_classes)
            self.Y.copy_(purify(F, self.Y, F_m, Y_m, self.ridge, self.rounds, self.momentum_of_labels))

    def step(self, batch: Batch) -> Log:
        target = self.Y[batch.rows]
        loss = soft_cross_entropy(self.net(batch.x), target).mean()
        kept = target.gather(1, batch.y[:, None]).mean()
        return {"loss": descend(loss, self.optimizer), "kept": kept}


def purify(F: Tensor, Y: Tensor, F_m: Tensor, Y_m: Tensor, ridge: float, rounds: int, momentum: float) -> Tensor:
    """Correct the labels Y [N, K] of the rows F [N, D], so that ridge regression on them predicts Y_m at F_m."""
    F, F_m, Y, Y_m = (tensor.double() for tensor in (F, F_m, Y, Y_m))
    gram = F.T @ F
    penalty = max(ridge, 1e-6) * gram.diagonal().mean()
    A = torch.linalg.inv(gram + penalty * torch.eye(len(gram), dtype=F.dtype, device=F.device))  # [D, D]
    H = F_m @ A @ F.T  # [M, N] predictions at trusted rows are H Y
    for _ in range(rounds):
        residual = H @ Y - Y_m  # [M, K]
        gradient = H.T @ residual  # [N, K], up to the factor 2/M
        change = H @ gradient
        t = (residual * change).sum() / change.square().sum().clamp_min(1e-30)
        Y = to_simplex(Y - t * gradient)
        predicted = F @ (A @ (F.T @ Y))  # at the noisy rows
        Y = to_simplex(momentum * Y + (1 - momentum) * predicted)
    return Y.float()


def to_simplex(Y: Tensor) -> Tensor:
    """The distribution nearest to each row.  [N, K]"""
    ordered = Y.sort(dim=1, descending=True).values
    counts = torch.arange(1, Y.shape[1] + 1, dtype=Y.dtype, device=Y.device)
    shifts = (ordered.cumsum(1) - 1) / counts
    size = (ordered > shifts).sum(1, keepdim=True)  # classes that keep a positive probability
    return (Y - shifts.gather(1, size - 1)).clamp_min(0)


def _features(split: Split) -> Tensor:
    """All inputs of a split as vectors, and a constant.  [N, D + 1]"""
    size = math.prod(split.examples.shape)
    if size >= _MOST_FEATURES:
        raise UserError(
            f"dmlp solves a linear system with one equation per feature, and {size} are too many; compute features "
            "with `warpi embed` first, or choose another method"
        )
    return torch.nn.functional.pad(split.to_vectors(), (0, 1), value=1.0)
