"""GLC: gold loss correction."""

from dataclasses import dataclass

import torch

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import forward_loss, from_trusted
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.warmup import restart, warmup_epochs
from warpi.utils.settings import setting


@dataclass
class GLC(Method):
    """Estimate how labels are corrupted on the trusted examples, then correct the loss of the noisy ones.

        C_k  = mean of p(given | x) over the trusted x of class k,   p trained on the noisy labels
        L    = (sum over noisy -log (C^T softmax F(x))_y  +  sum over trusted -log softmax(F(x))_y) / (N + M)

    p is trained in the first `warmup` of the epochs; then training restarts from the same initial weights.

    Differs from the paper in the epochs and in how batches are drawn: docs/methods/glc.md.
    Reference: Hendrycks et al., Using Trusted Data to Train Deep Networks on Labels Corrupted by Severe Noise,
    NeurIPS 2018.
    """

    family = "transition"
    year = 2018
    needs_meta = True

    warmup: float = setting(0.3, "fraction of the epochs before the corruption matrix is estimated", low=0, high=1)

    def create_state(self) -> None:
        assert self.task.meta is not None  # see needs_meta
        self.gold = len(self.task.meta) / (len(self.task.meta) + len(self.task.train))  # M / (N + M)
        self.C = torch.eye(self.task.n_classes, device=self.task.train.y.device)
        self.switch = warmup_epochs(self.warmup, self.recipe.epochs)
        self.measured = False
        self.schedule_starts = [0, self.switch]

    def before_epoch(self, t: int) -> None:
        if t >= self.switch and not self.measured:
            assert self.task.meta is not None  # see needs_meta
            rows, z = predict_rows(self.predictors[0], self.task.meta)
            self.C.copy_(from_trusted(z.softmax(1), self.task.meta.y[rows]))
            restart(self)
            self.measured = True

    def step(self, batch: Batch) -> Log:
        if not self.measured:
            loss = cross_entropy(self.net(batch.x), batch.y).mean()
        else:
            gold = self.meta_loader.draw()
            z, z_gold = self.net(torch.cat([batch.x, gold.x])).split([len(batch.y), len(gold.y)])
            noisy = forward_loss(z, batch.y, self.C).mean()
            loss = (1 - self.gold) * noisy + self.gold * cross_entropy(z_gold, gold.y).mean()
        return {"loss": descend(loss, self.optimizer)}
