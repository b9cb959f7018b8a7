"""Decoupling: two networks update on the examples they disagree about."""

from dataclasses import dataclass

import torch

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.selection import disagreement, selected_mean
from warpi.training.method import Log, Method, descend
from warpi.utils import distributed
from warpi.utils.settings import setting


@dataclass
class Decoupling(Method):
    """Two networks learn only from the examples for which they predict different classes.

        S   = the examples of a batch for which the networks predict different classes
        w_j <- w_j - eta d/dw_j sum_{i in S} CE(F(x_i; w_j), y_i) / max(|S|, B / 10),    j = 1, 2

    The denominator is that of the published code: a few examples do not get the weight of a whole batch.

    Differs from the paper: if S is empty, the gradient is 0, and momentum and weight decay still move the weights.
    Reference: Malach and Shalev-Shwartz, Decoupling "when to update" from "how to update", NeurIPS 2017.
    """

    family = "selection"
    year = 2017
    n_nets = 2
    needs_different_nets = True

    warm_up: float = setting(0.1, "fraction of the epochs that train on all examples", low=0, high=1)
    least: float = setting(0.1, "lower bound of the loss denominator, as a fraction of the batch", low=0.001, high=1)

    def create_state(self) -> None:
        self.warming = torch.zeros((), device=self.task.device)  # 1 in the warm-up

    def before_epoch(self, t: int) -> None:
        self.warming.fill_(float(t < self.warm_up * self.recipe.epochs))

    def step(self, batch: Batch) -> Log:
        z = [net(batch.x) for net in self.nets]  # [B, K] each
        w = disagreement(*z).maximum(self.warming)  # S
        least = self.least * len(w) * distributed.n_ranks()
        losses = [selected_mean(cross_entropy(logits, batch.y), w, least) for logits in z]
        for loss, optimizer in zip(losses, self.optimizers, strict=True):
            descend(loss, optimizer)
        return {"loss": (losses[0] + losses[1]).detach() / 2, "disagreement": w.mean()}
