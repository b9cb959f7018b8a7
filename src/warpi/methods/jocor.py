"""JoCoR: joint training with co-regularization."""

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
class JoCoR(Method):
    """Train two networks to agree, on the examples with a small joint loss.

        l_i  = (1 - lambda) (CE(p_1, y) + CE(p_2, y)) + lambda (KL(p_1 || p_2) + KL(p_2 || p_1))        Eqs. (1) - (4)
        D~   = the (1 - R(t)) B examples of a batch with the smallest l_i,  R(t) = min(t tau / T_k, tau)   Eq. (5)
        L    = 1/|D~| sum_{i in D~} l_i,  minimized by both networks                                       Eq. (6)

    Differs from the paper: lambda rises from 0 together with R(t); why, and more, in docs/methods/jocor.md.
    Reference: Wei et al., Combating Noisy Labels by Agreement: A Joint Training Method with Co-Regularization,
    CVPR 2020.
    """

    family = "selection"
    year = 2020
    n_nets = 2
    needs_different_nets = True
    needs_noise_rate = True
    noise_rate_field = "forget_rate"
    for_tables = {"gradual": 10.0}

    forget_rate: float | None = setting(None, "fraction tau of examples dropped (default: noise rate)", low=0, high=1)
    gradual: float = setting(10.0, "epochs T_k in which drop rate and lambda rise, at most half of all", low=0)
    agreement: float = setting(0.9, "weight lambda of the agreement; the labels get 1 - lambda", low=0, high=1)

    def create_state(self) -> None:
        self.rate = torch.zeros((), device=self.task.device)  # R(t)
        self.weight = torch.zeros_like(self.rate)  # lambda in epoch t

    def before_epoch(self, t: int) -> None:
        ramp = capped_warmup(self.gradual, self.recipe.epochs)
        self.rate.fill_(forget_rate(t, self.task.noise_rate or 0.0, ramp))
        self.weight.fill_(forget_rate(t, self.agreement, ramp))

    def step(self, batch: Batch) -> Log:
        z = [net(batch.x) for net in self.nets]  # [B, K] each
        fixed = [logits.detach() for logits in z]
        w = small_loss(self.joint_loss(fixed[0], fixed[1], batch.y), self.rate)  # D~
        for logits, other, optimizer in zip(z, reversed(fixed), self.optimizers, strict=True):
            loss = selected_mean(self.joint_loss(logits, other, batch.y), w)  # the other network is held fixed
            descend(loss, optimizer)
        return {"loss": loss.detach()}

    def joint_loss(self, z: Tensor, other: Tensor, y: Tensor) -> Tensor:
        labels = cross_entropy(z, y) + cross_entropy(other, y)
        return (1 - self.weight) * labels + self.weight * divergence(z, other)


def divergence(z: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) + KL(q || p) = sum_k (p_k - q_k) (log p_k - log q_k).  [B, K], [B, K] -> [B]"""
    log_p, log_q = z.log_softmax(dim=1), other.log_softmax(dim=1)
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(dim=1)
