"""L2RW: learning to reweight examples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.autodiff.passes import Forward, forward
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.training.bilevel import batch_gradient
from warpi.training.method import Log, Method, descend
from warpi.utils import distributed


def normalize_weights(w: Tensor) -> Tensor:
    """w / sum w, with the sum over all ranks; zeros if the sum is 0.  [B]"""
    total = w.sum()
    distributed.average([total])  # since the losses of the ranks are averaged
    return w / torch.where(total > 0, total, 1)


@dataclass
class L2RW(Method):
    """Weigh each example by how much a step on it would lower the loss on the trusted examples.

        theta_hat(eps) = theta - alpha d/dtheta sum_i eps_i l_i,    l_i = CE(F(x_i; theta), y_i)          Eq. (4)
        e_i = max(0, -d L_meta(theta_hat(eps)) / d eps_i) at eps = 0                                 Eqs. (6), (7)
        w_i = e_i / sum_j e_j, all 0 if no e_j is positive                                                Eq. (8)
        theta <- theta - alpha d/dtheta sum_i w_i l_i

    The weights are computed for each batch and not kept. At eps = 0 the virtual step does not move theta, so e_i is
    the inner product of two gradients, and alpha cancels.

    Differs from the paper: network, schedule and batch sizes are the recipe's.
    Reference: Ren et al., Learning to Reweight Examples for Robust Deep Learning, ICML 2018.
    """

    family = "meta"
    year = 2018
    needs_meta = True

    def weigh(self, noisy: Forward, y: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the examples of a batch [B], and the loss on a trusted batch."""
        eps = torch.zeros_like(noisy.z[:, 0], requires_grad=True)  # [B]
        perturbed_loss = lambda z: (eps * cross_entropy(z, y)).mean()
        d, judged = batch_gradient(self, noisy, perturbed_loss, eps, 1.0, shared=False)  # Eq. (6)
        return normalize_weights((-d).clamp_min(0)), judged  # Eqs. (7), (8)

    def step(self, batch: Batch) -> Log:
        noisy = forward(self.net, batch.x)
        w, judged = self.weigh(noisy, batch.y)
        loss = (w * cross_entropy(noisy.z, batch.y)).sum()
        return {"loss": descend(loss, self.optimizer), "meta_loss": judged, "used": (w > 0).to(w).mean()}
