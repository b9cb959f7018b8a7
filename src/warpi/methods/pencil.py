"""PENCIL: label distributions that are learned together with the network."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, entropy, one_hot, soft_cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.training.warmup import warmup_epochs
from warpi.utils import distributed
from warpi.utils.settings import setting


def divergence(z: Tensor, y_tilde: Tensor) -> Tensor:
    """KL(softmax(z) || softmax(y_tilde)).  [B, K], [B, K] -> [B]"""
    return soft_cross_entropy(y_tilde, z.softmax(dim=1)) - entropy(z)


@dataclass
class PENCIL(Method):
    """Learn a label distribution y^d = softmax(y~) for each example, together with the network.

        stage 1   L = CE(f, y)                          the given labels, at a high learning rate;  y~ = 10 y
        stage 2   L = 1/K L_c + alpha L_o + beta/K L_e,   theta by the optimizer,  y~ <- y~ - lambda dL/dy~
        stage 3   L = 1/K L_c                           the network alone, on the learned labels

        L_c = KL(f || y^d) fits the labels, L_o = CE(y^d, y) keeps them near the given ones, L_e = H(f) avoids flat f

    Differs from the paper, as the published code does: L_o applies a second softmax to y^d before the logarithm. Stages
    are fractions of the epochs. alpha and beta are the paper's; with those of the code (0.4 and 0.1) no label changes.
    Reference: Yi and Wu, Probabilistic End-to-end Noise Correction for Learning with Noisy Labels, CVPR 2019.
    """

    family = "refinement"
    year = 2019

    alpha: float = setting(0.1, "weight of the compatibility with the given labels", low=0)
    beta: float = setting(0.4, "weight of the entropy of the predictions", low=0)
    label_lr: float = setting(600.0, "learning rate lambda of the labels; a label moves by lambda / batch size", low=0)
    stage1: float = setting(70 / 320, "fraction of the epochs at which the first stage ends", low=0, high=1)
    stage2: float = setting(200 / 320, "fraction of the epochs at which the second stage ends", low="stage1", high=1)

    def create_state(self) -> None:
        self.y_tilde = 10 * one_hot(self.task.train.y, self.task.n_classes)  # [N, K]
        self.stage = 1

    def before_epoch(self, t: int) -> None:
        self.stage = 1 + sum(t >= warmup_epochs(share, self.recipe.epochs) for share in (self.stage1, self.stage2))

    def loss(self, z: Tensor, y_tilde: Tensor, y: Tensor) -> Tensor:
        """Losses of the examples in the current stage.  [B]"""
        if self.stage == 1:
            return cross_entropy(z, y)
        L_c = divergence(z, y_tilde) / z.shape[1]
        if self.stage == 3:
            return L_c
        return L_c + self.alpha * cross_entropy(y_tilde.softmax(dim=1), y) + self.beta / z.shape[1] * entropy(z)

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        y_tilde = self.y_tilde[batch.rows]
        loss = self.loss(z, y_tilde, batch.y).mean()
        descend(loss, self.optimizer)
        if self.stage == 2:
            y_tilde.requires_grad_()
            losses = self.loss(z.detach(), y_tilde, batch.y)
            label_loss = losses.mean() / distributed.n_ranks()  # the mean over the batch of all ranks
            (slope,) = torch.autograd.grad(label_loss, y_tilde)
            self.y_tilde[batch.rows] = y_tilde.detach() - self.label_lr * slope
        return {"loss": loss.detach()}
