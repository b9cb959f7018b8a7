"""MSLC: meta soft label correction."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, mean_cross_entropy, one_hot
from warpi.training.bilevel import bilevel_step
from warpi.training.method import Log, Method, descend
from warpi.training.recipe import adam
from warpi.utils.settings import setting


class Share(nn.Module):
    """Map the loss of a label to the weight of that label, in (0, 1)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, losses: Tensor) -> Tensor:
        w: Tensor = torch.sigmoid(self.layers(losses.detach()[:, None]))[:, 0]  # [B]
        return w


@dataclass
class MSLC(Method):
    """Mix the given label, the label of the previous epoch and the prediction, with learned weights.

        a_i = V(CE(z_i, y_i); phi),   b_i = W(CE(z_i, s_i); psi),   s_i = argmax soft_i
        l_i = a_i CE(z_i, y_i) + (1 - a_i) [b_i CE(z_i, s_i) + (1 - b_i) CE(z_i, argmax z_i)]
        phi, psi <- a step down d L_meta(theta_hat(phi, psi)),   theta <- a step down 1/B sum_i l_i
        soft_i <- a_i y_i + (1 - a_i) [b_i soft_i + (1 - b_i) softmax(z_i)]

    The first `warm_up` of the epochs use cross-entropy, and soft_i is the softmax. V and W have one hidden layer. The
    learning rate of the virtual step is `virtual` times that of theta: the published code decays it 20 epochs later.

    Differs from the paper: labels in the loss are hard, as in the published code (with its own softmax as the target
    the network would not move); the stored labels are soft. Network and learning rates are the recipe's.
    Reference: Wu et al., Learning to Purify Noisy Labels via Meta Soft Label Corrector, AAAI 2021.
    """

    family = "meta"
    year = 2021
    needs_meta = True

    warm_up: float = setting(2 / 3, "fraction of the epochs with cross-entropy only", low=0, high=1)
    virtual: float = setting(10.0, "learning rate of the virtual step, as a multiple of the classifier's", low=0)
    hidden: int = setting(100, "hidden units of each weighting network", low=1)
    meta_lr: float = setting(1e-3, "learning rate of the weighting networks (Adam)", low=0)
    meta_weight_decay: float = setting(1e-4, "weight decay of the weighting networks", low=0)

    def create_state(self) -> None:
        pair = self.recipe.make_module("meta-network", lambda: nn.ModuleList(Share(self.hidden) for _ in range(2)))
        self.V, self.W = pair.to(self.task.device)
        phi = [*self.V.parameters(), *self.W.parameters()]
        self.meta_optimizer = adam(phi, self.meta_lr, self.meta_weight_decay)
        self.soft = one_hot(self.task.train.y, self.task.n_classes)  # [N, K]
        self.correcting = False

    def before_epoch(self, t: int) -> None:
        self.correcting = t >= round(self.warm_up * self.recipe.epochs)

    def step(self, batch: Batch) -> Log:
        before = self.soft[batch.rows]  # [B, K]
        z = torch.empty(0)

        def corrected_loss(logits: Tensor) -> Tensor:
            nonlocal z
            z = logits
            given = cross_entropy(z, batch.y)  # [B]
            last = cross_entropy(z, before.argmax(dim=1))  # [B]
            predicted = cross_entropy(z, z.detach().argmax(dim=1))  # [B]
            a: Tensor = self.V(given)
            b: Tensor = self.W(last)
            return (a * given + (1 - a) * (b * last + (1 - b) * predicted)).mean()

        if not self.correcting:
            z = self.net(batch.x)
            self.soft[batch.rows] = z.detach().softmax(dim=1)
            return {"loss": descend(cross_entropy(z, batch.y).mean(), self.optimizer)}

        phi = [*self.V.parameters(), *self.W.parameters()]
        virtual_lr = self.virtual * self.lr
        log = bilevel_step(self, batch, corrected_loss, mean_cross_entropy, phi, self.meta_optimizer, virtual_lr)
        self.soft[batch.rows] = self.correct_labels(z.detach(), batch.y, before)
        return log

    @torch.no_grad()
    def correct_labels(self, z: Tensor, y: Tensor, before: Tensor) -> Tensor:
        """Soft labels for the next epoch.  [B, K]"""
        a: Tensor = self.V(cross_entropy(z, y))[:, None]
        b: Tensor = self.W(cross_entropy(z, before.argmax(dim=1)))[:, None]
        return a * one_hot(y, z.shape[1]) + (1 - a) * (b * before + (1 - b) * z.softmax(dim=1))
