"""Co-teaching+: Co-teaching on the examples about which the networks disagree."""

from dataclasses import dataclass

import torch

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.selection import disagreement, forget_rate, small_loss
from warpi.methods.co_teaching import update_crosswise
from warpi.training.method import Log, Method
from warpi.training.warmup import capped_warmup
from warpi.utils.settings import setting


@dataclass
class CoTeachingPlus(Method):
    """Co-teaching, restricted to the examples for which the two networks predict different classes.

        D'       = the examples of a batch with different predicted classes; all of them in the warm-up
        D_f, D_g = the (1 - R(t)) |D'| examples of D' with the smallest loss in network f, in network g
        w_f <- w_f - eta d L(w_f; D_g)/dw_f,    w_g <- w_g - eta d L(w_g; D_f)/dw_g

    with R(t) as in Co-teaching. Nothing is learned from a batch without disagreement.

    Differs from the published code: no second softmax before the one in the loss; batches without disagreement are
    skipped from the end of the warm-up on, not after 5,000 steps. Warm-up and T_k are at most half of the epochs.
    Reference: Yu et al., How does Disagreement Help Generalization against Label Corruption?, ICML 2019.
    """

    family = "selection"
    year = 2019
    n_nets = 2
    needs_different_nets = True
    needs_noise_rate = True
    noise_rate_field = "forget_rate"
    for_tables = {"gradual": 1.5, "warm_up": 3.0}

    forget_rate: float | None = setting(None, "fraction tau of examples dropped (default: noise rate)", low=0, high=1)
    gradual: float = setting(10.0, "epochs T_k in which the fraction dropped rises to tau, at most half of all", low=0)
    warm_up: float = setting(20.0, "epochs of plain Co-teaching, at most half of all epochs", low=0)

    def create_state(self) -> None:
        self.rate = torch.zeros((), device=self.task.device)  # R(t)
        self.warming = torch.zeros_like(self.rate)  # 1 in the warm-up

    def before_epoch(self, t: int) -> None:
        ramp, warm_up = (capped_warmup(n, self.recipe.epochs) for n in (self.gradual, self.warm_up))
        self.rate.fill_(forget_rate(t, self.task.noise_rate or 0.0, ramp))
        self.warming.fill_(float(t < warm_up))

    def step(self, batch: Batch) -> Log:
        z = [net(batch.x) for net in self.nets]  # [B, K] each
        losses = [cross_entropy(logits, batch.y) for logits in z]  # [B] each
        among = disagreement(*z).maximum(self.warming)  # D'
        chosen = [small_loss(loss.detach(), self.rate, among) for loss in losses]
        return update_crosswise(self, losses, chosen) | {"disagreement": among.mean()}
