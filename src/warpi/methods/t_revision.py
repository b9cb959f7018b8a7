"""T-revision: a transition matrix without anchor points."""

from dataclasses import dataclass

import torch
from torch import nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import from_anchors, normalize_rows, reweighted_loss
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.recipe import adam
from warpi.training.warmup import restart, warmup_epochs
from warpi.utils.settings import setting


@dataclass
class TRevision(Method):
    """Reweigh the examples by an estimated T, then revise T together with the classifier.

        T^   = estimate from the anchors of a network trained on the noisy labels               as in `LossCorrection`
        beta_i = g_{y_i} / (T^T g)_{y_i},   g = softmax(F(x_i; theta))
        L    = 1/B sum_i -beta_i log g_{y_i}                                         T = T^,        then
        L    minimized over theta and Delta T,                                       T = T^ + Delta T

    Phases, as fractions of the epochs: cross-entropy up to `warmup`, T^ up to `revise`, then Delta T.

    Differs from the paper in the gradient of beta and the restart (`reinitialize`): docs/methods/t_revision.md.
    Reference: Xia et al., Are Anchor Points Really Indispensable in Label-Noise Learning?, NeurIPS 2019.
    """

    family = "transition"
    year = 2019
    for_tables = {"revision_lr": 1e-2}  # why: docs/methods/t_revision.md

    warmup: float = setting(0.3, "fraction of the epochs before T is estimated", low=0, high=1)
    revise: float = setting(0.6, "fraction of the epochs after which T is revised", low="warmup", high=1)
    quantile: float = setting(0.97, "quantile of p(i | x) at the anchor of class i; 1: the maximum", low=0, high=1)
    revision_lr: float = setting(5e-7, "learning rate of the revision of T (Adam)", low=0)
    reinitialize: bool = setting(True, "restart the classifier from its initial weights after T has been estimated")

    def create_state(self) -> None:
        self.schedule_starts = [0, warmup_epochs(self.warmup, self.recipe.epochs)]
        self.T = torch.eye(self.task.n_classes, device=self.task.device)
        self.delta = nn.Parameter(torch.zeros_like(self.T))
        self.delta_optimizer = adam([self.delta], self.revision_lr)
        self.phase = 0

    def before_epoch(self, t: int) -> None:
        if t >= self.schedule_starts[1] and self.phase == 0:
            _, z = predict_rows(self.net, self.task.train)
            self.T.copy_(from_anchors(z.softmax(1), self.quantile))
            restart(self, reinitialize=self.reinitialize)
            self.phase = 1
        if t >= warmup_epochs(self.revise, self.recipe.epochs) and self.phase == 1:
            self.phase = 2

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        column = normalize_rows(self.T + self.delta).T[batch.y]  # T[:, y_i]
        losses = reweighted_loss(z, batch.y, column) if self.phase else cross_entropy(z, batch.y)
        loss = losses.mean()
        if self.phase == 2:
            descend(reweighted_loss(z.detach(), batch.y, column).mean(), self.delta_optimizer)
        return {"loss": descend(loss, self.optimizer)}
