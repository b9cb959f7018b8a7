"""CAL: covariance-assisted learning."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import one_hot
from warpi.training.method import Log, Method, descend
from warpi.training.warmup import restart, warmup_epochs
from warpi.utils import distributed
from warpi.utils.settings import setting


def bounded_losses(z: Tensor, eps: float = 1e-5) -> Tensor:
    """-log(p + eps): the bounded loss of every possible label.  [B, K]"""
    return -(z.softmax(dim=1) + eps).log()


def covariance(losses: Tensor, y: Tensor, cluster: Tensor, T: Tensor, mean: Tensor, prior: Tensor) -> Tensor:
    """sum_i P(i) sum_j Cov(T_ij(X), l(X, j) | cluster i), estimated on a batch.  losses [B, K], y, cluster [B] -> []

    With several ranks, the mean of this over the ranks is that over the whole batch.
    T_ij(x) is 1 if the given label is j; `T` [K, K] is its mean in cluster i, and `mean` [K, K] the mean of the losses.
    """
    K = losses.shape[1]
    inside = one_hot(cluster, K)  # [B, K]
    size = distributed.mean(inside.sum(0)).clamp_min(1 / distributed.n_ranks())  # [K]
    products = ((one_hot(y, K) - T[cluster]) * (losses - mean[cluster])).sum(1)  # [B]
    return (prior[cluster] / size[cluster] * products).sum()


@dataclass
class CAL(Method):
    """Subtract the covariance between loss and noise that instance-dependent noise causes.

    The first phase trains with a peer term that rewards confidence. Its network sieves the labels into clusters y^:

        l_peer = -sum_k P(y = k) log(p_k + eps)
        L      = CE - alpha_1 l_peer                           alpha_1 rises from 0
        y^_i   = y_i if CE - mean_k(-log p_k) < sieve, else argmax p     in the last epoch of this phase

    The second phase uses second-order statistics of the clusters:

        L = CE - alpha_2 l_peer - sum_i P(y^ = i) sum_j Cov(1[y = j], -log(p_j + eps) | y^ = i)

    It restarts from the initial weights, and alpha_2 also rises from 0. The mean losses of the clusters are those of
    the previous epoch, as in the published code.

    As published, CE has a floor, -log(p + 1e-8), and the learning rate is divided by 1 + alpha.

    Differs from the published code in the prior: docs/methods/cal.md.
    Reference: Zhu et al., A Second-Order Approach to Learning with Instance-Dependent Label Noise, CVPR 2021.
    """

    family = "refinement"
    year = 2021

    alpha_sieve: float = setting(2.0, "largest weight of the peer term in the first phase", low=0)
    alpha: float = setting(1.0, "largest weight of the peer term in the second phase", low=0)
    sieve: float = setting(-8.0, "threshold below which a given label is kept")
    sieve_share: float = setting(65 / 165, "fraction of the epochs that the first phase takes", low=0, high=1)
    slow: bool = setting(True, "divide the learning rate by 1 + alpha, as the published code does")

    def create_state(self) -> None:
        K = self.task.n_classes
        y = self.task.train.y
        self.P = one_hot(y, K).mean(0)  # [K] distribution of the given labels
        self.peers = max(1.0, K / 10)  # for 100 classes, the published code counts the peer term ten times
        self.cluster = y.clone()  # [N] y^
        self.T = torch.eye(K, device=y.device)
        self.prior = self.P.clone()
        self.mean = torch.zeros(K, K, device=y.device)  # mean losses [cluster, label]
        self.sums = torch.zeros_like(self.mean)
        self.counts = torch.zeros_like(self.P)
        self.weight = torch.zeros_like(self.P[0])  # alpha of this epoch
        self.switch = warmup_epochs(self.sieve_share, self.recipe.epochs)
        self.second = False
        self.schedule_starts = [0, self.switch]

    def epoch(self, t: int) -> Iterator[Log]:
        if t >= self.switch and not self.second:
            self.distil()
            restart(self)
            self.second = True
        self.weight.fill_(self.alpha_at(t))
        yield from super().epoch(t)
        if self.second:
            self.mean.copy_(self.sums / self.counts.clamp_min(1e-6)[:, None])  # 0 if a cluster is empty
            self.sums.zero_()
            self.counts.zero_()

    def alpha_at(self, t: int) -> float:
        """The weight of the peer term in epoch t, which rises from epoch 10 to 40 of a phase as long as published."""
        if t >= self.switch:
            published_epoch = 100 * (t - self.switch) / (self.recipe.epochs - self.switch)
            largest = self.alpha
        else:
            published_epoch = 65 * t / self.switch
            largest = self.alpha_sieve
        return largest * min(1.0, max(0.0, (published_epoch - 10) / 30))

    def lr_factor(self, t: int) -> float:
        return 1 / (1 + self.alpha_at(t)) if self.slow else 1.0

    def sieved(self, z: Tensor, y: Tensor) -> Tensor:
        """The clusters of a batch: given labels that the network believes, otherwise its predictions.  [B]"""
        losses = bounded_losses(z, 1e-8)  # [B, K]
        believed = losses.gather(1, y[:, None])[:, 0] - losses.mean(1) < self.sieve
        return torch.where(believed, y, z.argmax(dim=1))

    def distil(self) -> None:
        """Estimate the noise in each cluster."""
        K = self.task.n_classes
        inside = one_hot(self.cluster, K)  # [N, K]
        self.T.copy_(inside.T @ one_hot(self.task.train.y, K) / inside.sum(0).clamp_min(1)[:, None])
        self.prior.copy_(inside.mean(0))

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        losses = bounded_losses(z)  # [B, K]
        given = bounded_losses(z, 1e-8).gather(1, batch.y[:, None]).mean()
        loss = given - self.weight * self.peers * (losses @ self.P).mean()
        if self.second:
            cluster = self.cluster[batch.rows]
            loss = loss - covariance(losses, batch.y, cluster, self.T, self.mean, self.prior)
            inside = one_hot(cluster, losses.shape[1])  # [B, K]
            self.sums += distributed.total(inside.T @ losses.detach())
            self.counts += distributed.total(inside.sum(0))
        else:
            self.cluster[batch.rows] = self.sieved(z.detach(), batch.y)
        return {"loss": descend(loss, self.optimizer)}
