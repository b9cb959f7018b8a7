"""Truncated generalized cross-entropy."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, truncated_cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.warmup import warmup_epochs
from warpi.utils.settings import setting


@dataclass
class TruncatedGCE(Method):
    """Generalized cross-entropy that ignores examples whose label has a low probability.

        L = 1/B sum_i w_i (L_q(p_{y_i}) - L_q(k)),    w_i = [p_{y_i} > k]

    Pruning starts after `start_prune` of the epochs. Every `prune_every` of the epochs, w is computed again for all
    examples, so that pruned examples can return.
    Differs from the paper in the network that prunes and in the schedule: docs/methods/gce_truncated.md.
    Reference: Zhang & Sabuncu, Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels,
    NeurIPS 2018.
    """

    family = "loss"
    year = 2018
    for_tables: ClassVar[dict[str, Any]] = {"start_prune": 1 / 3}  # why: docs/methods/gce_truncated.md

    q: float = setting(0.7, "exponent of the loss: 0 is cross-entropy, 1 is half the absolute error", low=0, high=1)
    k: float = setting(0.5, "examples whose label has at most this probability are pruned", low=1e-6, high=1)
    start_prune: float = setting(0.7, "fraction of the epochs before the first pruning", low=0, high=1)
    prune_every: float = setting(1 / 12, "fraction of the epochs between two prunings", low=0, high=1)

    @classmethod
    def data_defaults(cls, table: bool, n_classes: int) -> dict[str, Any]:
        # Many classes are learned too late for pruning to begin early.
        return super().data_defaults(table and n_classes <= 20, n_classes)

    def create_state(self) -> None:
        self.kept = torch.ones(len(self.task.train), device=self.task.device)  # [N] w

    def before_epoch(self, t: int) -> None:
        since = t - warmup_epochs(self.start_prune, self.recipe.epochs)  # an untrained network would prune everything
        if since >= 0 and since % warmup_epochs(self.prune_every, self.recipe.epochs) == 0:
            self.prune()

    def prune(self) -> None:
        rows, z = predict_rows(self.net, self.task.train)
        p_y = (-cross_entropy(z, self.task.train.y[rows])).exp()
        self.kept[rows] = (p_y > self.k).float()

    def step(self, batch: Batch) -> Log:
        kept = self.kept[batch.rows]  # [B]
        loss = truncated_cross_entropy(self.net(batch.x), batch.y, kept, self.q, self.k).mean()
        return {"loss": descend(loss, self.optimizer), "kept": kept.mean()}
