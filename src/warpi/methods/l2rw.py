"""L2RW: learning to reweight examples."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from warpi.autodiff.passes import Forward, forward
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.training.bilevel import batch_gradient
from warpi.training.method import Log, Method, descend
from warpi.utils import distributed


def normalised(w: Tensor) -> Tensor:
    """w / sum w, or all zero where the sum is; the sum is that of all ranks.  [B]"""
    total = w.sum()
    distributed.average([total])  # a rank's loss counts as one of their mean
    return w / torch.where(total > 0, total, 1)


@dataclass
class L2RW(Method):
    """An example weighs as much as a small step along its gradient lowers the loss on the trusted examples.

        theta_hat(eps) = theta - alpha d/dtheta sum_i eps_i l_i,    l_i = CE(F(x_i; theta), y_i)          Eq. (4)
        e_i = max(0, -d L_meta(theta_hat(eps)) / d eps_i) at eps = 0                                 Eqs. (6), (7)
        w_i = e_i / sum_j e_j, all 0 where no e_j is above 0                                              Eq. (8)
        theta <- theta - alpha d/dtheta sum_i w_i l_i

    Weights are made anew for every batch; nothing is kept. At eps = 0 the virtual step stands still, so that e_i is the
    inner product of two gradients, and alpha cancels.

    Differs from the paper: network, schedule and batch sizes are the recipe's.
    Reference: Ren et al., Learning to Reweight Examples for Robust Deep Learning, ICML 2018.
    """

    family: ClassVar[str] = "meta"
    year: ClassVar[int | None] = 2018
    needs_meta: ClassVar[bool] = True

    def weigh(self, noisy: Forward, y: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the examples of a batch [B], and the loss on the trusted ones."""
        eps = torch.zeros_like(noisy.z[:, 0], requires_grad=True)  # [B]

        def perturbed_loss(z: Tensor) -> Tensor:
            return (eps * cross_entropy(z, y)).mean()

        d, judged = batch_gradient(self, noisy, perturbed_loss, eps, 1.0, shared=False)  # Eq. (6)
        return normalised((-d).clamp_min(0)), judged  # Eqs. (7), (8)

    def step(self, batch: Batch) -> Log:
        noisy = forward(self.net, batch.x)
        w, judged = self.weigh(noisy, batch.y)
        loss = (w * cross_entropy(noisy.z, batch.y)).sum()
        descend(loss, self.optimizer)
        return {"loss": loss.detach(), "meta_loss": judged, "used": (w > 0).to(w).mean()}
