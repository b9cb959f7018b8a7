"""Co-teaching: two networks choose examples for each other; its variants Co-teaching+ and JoCoR."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.selection import disagreement, forget_rate, selected_mean, small_loss
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


def update_crosswise(method: Method, losses: Sequence[Tensor], chosen: Sequence[Tensor]) -> dict[str, Tensor]:
    """Update each network on the examples that the other one has chosen."""
    pairs = zip(losses, reversed(chosen), method.optimizers, strict=True)
    means = [descend(selected_mean(loss, w), optimizer) for loss, w, optimizer in pairs]
    return {"loss": (means[0] + means[1]) / 2}


def divergence(z: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) + KL(q || p) = sum_k (p_k - q_k) (log p_k - log q_k).  [B, K], [B, K] -> [B]"""
    log_p, log_q = z.log_softmax(dim=1), other.log_softmax(dim=1)
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(dim=1)
