"""Co-teaching: two networks choose examples for each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.selection import forget_rate, selected_mean, small_loss
from warpi.training.method import Log, Method, descend
from warpi.training.warmup import capped_warmup
from warpi.utils.settings import setting


@dataclass
class CoTeaching(Method):
    """Each of two networks picks its small-loss examples, and the other network learns from them.

        R(t)     = tau min((t / T_k)^c, 1)                                 fraction left out in epoch t
        D_f, D_g = the (1 - R(t)) B examples of a batch with the smallest loss in network f, in network g
        w_f <- w_f - eta d L(w_f; D_g)/dw_f,    w_g <- w_g - eta d L(w_g; D_f)/dw_g

    Differs from the paper: T_k is at most half of the epochs; predictions are averaged over both networks.
    Reference: Han et al., Co-teaching: Robust Training of Deep Neural Networks with Extremely Noisy Labels,
    NeurIPS 2018.
    """

    family = "selection"
    year = 2018
    n_nets = 2
    needs_different_nets = True
    needs_noise_rate = True
    noise_rate_field = "forget_rate"
    for_tables = {"gradual": 1.5}  # an MLP learns a table in one of 30 epochs

    forget_rate: float | None = setting(None, "fraction tau of examples dropped (default: noise rate)", low=0, high=1)
    gradual: float = setting(10.0, "epochs T_k in which the fraction dropped rises to tau, at most half of all", low=0)
    exponent: float = setting(1.0, "exponent c of that rise; 1 is linear", low=0)

    def create_state(self) -> None:
        self.rate = torch.zeros((), device=self.task.device)  # R(t)

    def before_epoch(self, t: int) -> None:
        ramp = capped_warmup(self.gradual, self.recipe.epochs)
        self.rate.fill_(forget_rate(t, self.task.noise_rate or 0.0, ramp, self.exponent))

    def step(self, batch: Batch) -> Log:
        losses = [cross_entropy(net(batch.x), batch.y) for net in self.nets]  # [B] each
        return update_crosswise(self, losses, [small_loss(loss.detach(), self.rate) for loss in losses])


def update_crosswise(method: Method, losses: Sequence[Tensor], chosen: Sequence[Tensor]) -> dict[str, Tensor]:
    """Update each network on the examples that the other one has chosen."""
    pairs = zip(losses, reversed(chosen), method.optimizers, strict=True)
    means = [descend(selected_mean(loss, w), optimizer) for loss, w, optimizer in pairs]
    return {"loss": (means[0] + means[1]) / 2}
