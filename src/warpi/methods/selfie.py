"""SELFIE: replace the labels of examples that are predicted consistently."""

from dataclasses import dataclass

import torch

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.selection import selected_mean, small_loss, steady_label
from warpi.training.method import Log, Method, descend
from warpi.utils.settings import setting


@dataclass
class SELFIE(Method):
    """Learn from small-loss examples, and from examples whose label is replaced by a consistent prediction.

        F(x; q) = -sum_k f_k log f_k / log K,    f: frequencies of the classes among the last q predictions of x
        C = the (1 - tau) B examples of a batch with the smallest loss;    R = those with F(x; q) <= epsilon
        L = 1/|R u C| (sum_{R} CE(F(x_i), y~_i) + sum_{C without R} CE(F(x_i), y_i)),    y~: the most frequent class

    after a warm-up with cross-entropy on all examples. As in the published code, an example that has been in R once
    stays there, with its last y~.

    Differs from the paper: training is not repeated twice with the replaced labels. The warm-up is a fraction of the
    epochs (published: 25 of 100); q is 15 as published, but at most the number of epochs in the warm-up.
    Reference: Song et al., SELFIE: Refurbishing Unclean Samples for Robust Deep Learning, ICML 2019.
    """

    family = "selection"
    year = 2019
    needs_noise_rate = True
    noise_rate_field = "forget_rate"

    forget_rate: float | None = setting(None, "fraction tau of examples dropped (default: noise rate)", low=0, high=1)
    unsure: float = setting(0.05, "largest normalized entropy of consistent past predictions", low=0, high=1)
    history: float = setting(15.0, "number q of past predictions kept; up to 1: as a fraction of the epochs", low=0)
    warm_up: float = setting(0.25, "fraction of the epochs with cross-entropy on all examples", low=0, high=1)

    def create_state(self) -> None:
        y = self.task.train.y
        self.predictions = y.new_full((len(y), self.n_kept), -1)  # [N, q]
        self.refurbished = torch.full_like(y, -1)  # [N] y~, or -1 if not in R
        self.place = y.new_zeros(1)  # column of this epoch in `predictions`
        self.rate = torch.zeros((), device=y.device)  # tau; 0 in the warm-up
        self.bound = torch.zeros((), device=y.device)  # epsilon; -1 in the warm-up

    @property
    def n_kept(self) -> int:
        """The number q of predictions that must agree; a run whose warm-up is shorter could not fill more."""
        epochs = self.recipe.epochs
        wanted = self.history * epochs if self.history <= 1 else min(self.history, self.warm_up * epochs)
        return max(2, round(wanted))

    def before_epoch(self, t: int) -> None:
        warming = t < self.warm_up * self.recipe.epochs
        self.place.fill_(t % self.predictions.shape[1])
        self.rate.fill_(0.0 if warming else self.task.noise_rate or 0.0)
        self.bound.fill_(-1.0 if warming else self.unsure)

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        steady, unsure = steady_label(self.predictions[batch.rows], self.task.n_classes)
        better = torch.where(unsure <= self.bound, steady, self.refurbished[batch.rows])  # y~
        in_r = better >= 0
        w = small_loss(cross_entropy(z, batch.y).detach(), self.rate).maximum(in_r)  # R u C
        loss = selected_mean(cross_entropy(z, torch.where(in_r, better, batch.y)), w)
        self.refurbished[batch.rows] = better
        self.predictions[batch.rows, self.place] = z.argmax(dim=1)
        return {"loss": descend(loss, self.optimizer), "refurbished": in_r.float().mean()}
