"""MLC of Wang et al.: learn a transition matrix for each batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.autodiff.passes import Forward, forward
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.training.bilevel import batch_gradient
from warpi.training.method import Log, Method, descend
from warpi.utils.settings import setting


def normalize_columns(T: Tensor) -> Tensor:
    """Divide each column of T >= 0 by its sum; leave columns of zeros unchanged.  [K, K]"""
    total = T.sum(0, keepdim=True)
    return T / torch.where(total > 0, total, 1)


@dataclass
class MLCWang(Method):
    """Multiply the logits by a matrix that takes one step from the identity, guided by the trusted examples.

        theta_hat(T) = theta - a d/dtheta sum_i CE(F(x_i; theta) T, y_i)     at T = I
        T <- max(T - eta d L_meta(theta_hat(T)) / dT, 0), columns normalized to sum 1
        theta <- theta - alpha d/dtheta 1/B sum_i CE(F(x_i; theta) T, y_i)

    T is computed for each batch and not kept. The first `warm_up` of the epochs use cross-entropy. Predictions do not
    use T.

    Differs from the paper in the product with logits (published) and in the data: docs/methods/mlc_wang.md.
    Reference: Wang et al., Training Noise-Robust Deep Neural Networks via Meta-Learning, CVPR 2020.
    """

    family = "meta"
    year = 2020
    needs_meta = True
    for_tables = {"matrix_lr": 30.0}  # why: docs/methods/mlc_wang.md

    warm_up: float = setting(3 / 8, "fraction of the epochs before the matrix is used", low=0, high=1)
    virtual_lr: float = setting(1e-3, "learning rate of the virtual step, on the loss summed over the batch", low=0)
    matrix_lr: float = setting(0.11, "learning rate eta of the matrix", low=0)

    def create_state(self) -> None:
        self.correcting = False

    def before_epoch(self, t: int) -> None:
        self.correcting = t >= round(self.warm_up * self.recipe.epochs)

    def matrix(self, noisy: Forward, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compute T for a batch [K, K], and the loss on a trusted batch."""
        T = torch.eye(self.task.n_classes, dtype=noisy.z.dtype, device=noisy.z.device, requires_grad=True)
        loss = lambda z: cross_entropy(z @ T, y).mean()
        alpha = self.virtual_lr * self.loader.batch_size  # for the mean loss instead of the sum
        d, judged = batch_gradient(self, noisy, loss, T, alpha, shared=True)
        return normalize_columns((T.detach() - self.matrix_lr * d).clamp_min(0)), judged

    def step(self, batch: Batch) -> Log:
        noisy = forward(self.net, batch.x)
        if not self.correcting:
            loss = cross_entropy(noisy.z, batch.y).mean()
            return {"loss": descend(loss, self.optimizer)}
        T, judged = self.matrix(noisy, batch.y)
        loss = cross_entropy(noisy.z @ T, batch.y).mean()
        return {"loss": descend(loss, self.optimizer), "meta_loss": judged, "diagonal": T.diagonal().mean()}
