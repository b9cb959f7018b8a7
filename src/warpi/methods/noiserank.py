"""NoiseRank: labels that their neighbours do not support are left out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.neighbors import nearest
from warpi.functional.selection import selected_mean
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import feature_size, penultimate, predict_rows
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.field_checks import at_least, setting, within


def label_posterior(h: Tensor, y: Tensor, n_classes: int, k: int, gamma: float, among: Tensor) -> Tensor:
    """p(y_i = c | the labels of its neighbours) in a Markov random field.  h [n, D], y [n], among [n] -> [n, K]

    p(c) ~ exp(sum_j K_ij [y_j = c]) over the k nearest j with K_ij = exp(-gamma |h_i - h_j|^2), |h_i| = 1.
    Points that are not `among` the valid ones have no say.
    """
    cosine, j = nearest(h, k, among)
    kernel = (-2 * gamma * (1 - cosine)).exp().masked_fill(cosine.isneginf(), 0)  # those have no say
    votes = h.new_zeros(len(h), n_classes).scatter_add_(1, y[j], kernel)
    return votes.softmax(dim=1)


@dataclass
class NoiseRank(Method):
    """Examples are ranked by the probability that their label is wrong, given their neighbours' labels; the worst go.

        p(y_i = c | rest) ~ exp(sum_{j in N_i} K(x_i, x_j) [y_j = c])      a Markov random field over features
        s_i = 1 - p(y_i = given | rest)                                    by which examples are ranked
        train on those with s_i <= cut;  then features are better:  rank again, with the votes of those kept

    Who is left out may come back in the next round.

    Differs from the paper: no official code was found, this is built from its description: the kernel, the number of
    neighbours, the cut and the rounds are ours. The network goes on where the paper trains it anew; rounds are spread
    evenly over the epochs after the first phase.
    Reference: Sharma et al., NoiseRank: Unsupervised Label Noise Reduction with Dependence Models, ECCV 2020.
    """

    family: ClassVar[str] = "refinement"
    year: ClassVar[int | None] = 2020

    k: int = setting(50, "number of neighbors that vote on a label")
    gamma: float = setting(1.0, "kernel coefficient; a larger value lets only close neighbors vote")
    cut: float = setting(0.5, "largest probability of being wrong at which a label is used")
    warm_up: float = setting(1 / 6, "share of the epochs that train on all labels")
    rounds: int = setting(10, "number of times the labels are ranked")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, k=1, gamma=0, rounds=1)
        within(self, cut=(0, 1), warm_up=(0, 1))

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        feature_size(self.net, task.shape)  # says at once whether the network has features
        self.kept = torch.ones(len(task.train), device=task.train.y.device)  # [N] 0 or 1

    def epoch(self, t: int) -> Iterator[Log]:
        first = max(1, round(self.warm_up * self.recipe.epochs))  # never on an untrained network
        due = {first + i * (self.recipe.epochs - first) // self.rounds for i in range(self.rounds)}
        if t in due and self.loader.count <= t * self.loader.steps:
            self.rank()
        yield from super().epoch(t)

    def rank(self) -> None:
        rows, h = predict_rows(self.net, self.task.train, lambda x: penultimate(self.net, x))
        y, among = self.task.train.y[rows], self.kept[rows] > 0
        p = label_posterior(h, y, self.task.n_classes, self.k, self.gamma, among)
        wrong = 1 - p.gather(1, y[:, None])[:, 0]  # s
        self.kept[rows] = (wrong <= self.cut).to(self.kept.dtype)

    def step(self, batch: Batch) -> Log:
        w = self.kept[batch.rows]
        loss = selected_mean(cross_entropy(self.net(batch.x), batch.y), w)
        descend(loss, self.optimizer)
        return {"loss": loss.detach(), "kept": w.mean()}
