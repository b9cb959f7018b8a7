"""NoiseRank: leave out labels that differ from those of similar examples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.neighbors import nearest
from warpi.functional.selection import selected_mean
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import feature_size, penultimate, predict_rows
from warpi.training.warmup import warmup_epochs
from warpi.utils.settings import setting


def label_posterior(h: Tensor, y: Tensor, n_classes: int, k: int, gamma: float, voters: Tensor) -> Tensor:
    """p(y_i = c | labels of the neighbors) in a Markov random field.  h [n, D], y [n], voters [n] -> [n, K]

    p(c) ~ exp(sum_j K_ij [y_j = c]) over the k nearest j with K_ij = exp(-gamma |h_i - h_j|^2), |h_i| = 1.
    Only points i with voters[i] vote.
    """
    cosine, j = nearest(h, k, voters)
    kernel = (-2 * gamma * (1 - cosine)).exp().masked_fill(cosine.isneginf(), 0)  # padding: does not vote
    votes = h.new_zeros(len(h), n_classes).scatter_add_(1, y[j], kernel)
    return votes.softmax(dim=1)


@dataclass
class NoiseRank(Method):
    """Rank examples by how likely their label is wrong, given the labels of their neighbors; drop the worst.

        p(y_i = c | rest) ~ exp(sum_{j in N_i} K(x_i, x_j) [y_j = c])      a Markov random field over features
        s_i = 1 - p(y_i = given | rest)                                    the score for ranking
        train on the examples with s_i <= cut, then rank again with the better features; only kept examples vote

    Examples that were left out can return in a later round.

    Differs from the paper, which has no official code, in choices listed in docs/methods/noiserank.md.
    Reference: Sharma et al., NoiseRank: Unsupervised Label Noise Reduction with Dependence Models, ECCV 2020.
    """

    family = "refinement"
    year = 2020

    k: int = setting(50, "number of neighbors that vote on a label", low=1)
    gamma: float = setting(1.0, "kernel coefficient; a larger value lets only close neighbors vote", low=0)
    cut: float = setting(0.5, "largest probability of being wrong at which a label is used", low=0, high=1)
    warm_up: float = setting(1 / 6, "fraction of the epochs that train on all labels", low=0, high=1)
    rounds: int = setting(10, "number of times the labels are ranked", low=1)

    def create_state(self) -> None:
        feature_size(self.net, self.task.shape)  # raises if the network has no penultimate features
        self.kept = torch.ones(len(self.task.train), device=self.task.device)  # [N] 0 or 1

    def before_epoch(self, t: int) -> None:
        first = warmup_epochs(self.warm_up, self.recipe.epochs)  # never rank with an untrained network
        if t in {first + i * (self.recipe.epochs - first) // self.rounds for i in range(self.rounds)}:
            self.rank()

    def rank(self) -> None:
        rows, h = predict_rows(self.net, self.task.train, lambda x: penultimate(self.net, x))
        y = self.task.train.y[rows]
        voters = self.kept[rows] > 0
        p = label_posterior(h, y, self.task.n_classes, self.k, self.gamma, voters)
        wrong = 1 - p.gather(1, y[:, None])[:, 0]  # s
        self.kept[rows] = (wrong <= self.cut).to(self.kept.dtype)

    def step(self, batch: Batch) -> Log:
        w = self.kept[batch.rows]
        loss = selected_mean(cross_entropy(self.net(batch.x), batch.y), w)
        return {"loss": descend(loss, self.optimizer), "kept": w.mean()}
