"""T-revision: a transition matrix without anchor points; PTD: one matrix per example, for part-dependent noise."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import anchors, fit_parts, from_anchors, nmf, normalize_rows, reweighted_loss
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import penultimate, predict_rows
from warpi.training.recipe import adam
from warpi.training.warmup import restart, warmup_epochs
from warpi.utils.settings import setting


def _begin_phase(method: "TRevision | PTD", t: int) -> None:
    """Phase 1 begins with an estimate of T and a restart of the classifier. In phase 2, T is revised."""
    if t >= method.beginnings[1] and method.phase == 0:
        method.estimate()
        restart(method, reinitialize=method.anew)
        method.phase = 1
    if t >= warmup_epochs(method.revise, method.recipe.epochs) and method.phase == 1:
        method.phase = 2


@dataclass
class TRevision(Method):
    """Reweigh the examples by an estimated T, then revise T together with the classifier.

        T^   = estimate from the anchors of a network trained on the noisy labels               as in `LossCorrection`
        beta_i = g_{y_i} / (T^T g)_{y_i},   g = softmax(F(x_i; theta))
        L    = 1/B sum_i -beta_i log g_{y_i}                                         T = T^,        then
        L    minimized over theta and Delta T,                                       T = T^ + Delta T

    Phases, as fractions of the epochs: cross-entropy up to `warmup`, T^ up to `revise`, then Delta T.

    Differs from the paper in the gradient of beta and the restart (`anew`): docs/methods/t_revision.md.
    Reference: Xia et al., Are Anchor Points Really Indispensable in Label-Noise Learning?, NeurIPS 2019.
    """

    family = "transition"
    year = 2019
    for_tables = {"revision_lr": 1e-2}  # why: docs/methods/t_revision.md

    warmup: float = setting(0.3, "fraction of the epochs before T is estimated", low=0, high=1)
    revise: float = setting(0.6, "fraction of the epochs after which T is revised", low="warmup", high=1)
    quantile: float = setting(0.97, "quantile of p(i | x) at the anchor of class i; 1: the maximum", low=0, high=1)
    revision_lr: float = setting(5e-7, "learning rate of the revision of T (Adam)", low=0)
    anew: bool = setting(True, "restart the classifier from its initial weights after T has been estimated")

    def create_state(self) -> None:
        self.beginnings = [0, warmup_epochs(self.warmup, self.recipe.epochs)]
        self.T = torch.eye(self.task.n_classes, device=self.task.device)
        self.delta = nn.Parameter(torch.zeros_like(self.T))
        self.delta_optimizer = adam([self.delta], self.revision_lr)
        self.phase = 0

    def estimate(self) -> None:
        _, z = predict_rows(self.net, self.task.train)
        self.T.copy_(from_anchors(z.softmax(1), self.quantile))

    before_epoch = _begin_phase

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        column = normalize_rows(self.T + self.delta).T[batch.y]  # T[:, y_i]
        losses = reweighted_loss(z, batch.y, column) if self.phase else cross_entropy(z, batch.y)
        loss = losses.mean()
        if self.phase == 2:
            descend(reweighted_loss(z.detach(), batch.y, column).mean(), self.delta_optimizer)
        return {"loss": descend(loss, self.optimizer)}


@dataclass
class PTD(Method):
    """Estimate a transition matrix for each example, as a mixture of matrices of its parts.

        features = W H, all >= 0;   h(x) = row of W, sum 1                          r parts; a warmed-up network
        P^1..P^r:   sum_j h_j(x^i) P^j_i. = p(given | x^i)   in least squares       x^i: r anchors per class
        T(x) = sum_j h_j(x) P^j + Delta T
        L    = 1/B sum_i -beta_i log g_{y_i},   beta_i = g_{y_i} / (T(x_i)^T g)_{y_i},   g = softmax(F(x_i; theta))

    Phases, as fractions of the epochs: cross-entropy up to `warmup`; a restart with Delta T = 0 up to `revise` (the
    paper's PTD-R); then Delta T is learned together with theta (PTD-R-V).

    Differs from the paper in the fit of the matrices, the normalizations and the restart (`anew`): docs/methods/ptd.md.
    Reference: Xia et al., Part-dependent Label Noise: Towards Instance-dependent Label Noise, NeurIPS 2020.
    """

    family = "transition"
    year = 2020
    for_tables = {"revision_lr": 1e-2}

    warmup: float = setting(0.3, "fraction of the epochs before T is estimated", low=0, high=1)
    revise: float = setting(0.6, "fraction of the epochs after which the correction is learned", low="warmup", high=1)
    parts: int = setting(20, "number r of parts", low=1)
    nmf_steps: int = setting(20, "updates of the non-negative matrix factorization", low=1)
    fit_steps: int = setting(300, "largest number of steps that fit the matrices of the parts", low=1)
    fit_lr: float = setting(0.02, "learning rate of that fit (Adam)", low=0)
    enough: float = setting(1e-3, "mean squared error of a class at which its fit stops", low=0)
    revision_lr: float = setting(5e-7, "learning rate of the correction of T (Adam)", low=0)
    anew: bool = setting(True, "restart the classifier from its initial weights after T has been estimated")

    def create_state(self) -> None:
        self.beginnings = [0, warmup_epochs(self.warmup, self.recipe.epochs)]
        K = self.task.n_classes
        device = self.task.device
        self.h = torch.full((len(self.task.train), self.parts), 1 / self.parts, device=device)  # [N, r]
        self.P = torch.eye(K, device=device).repeat(self.parts, 1, 1)  # [r, K, K]
        self.delta = nn.Parameter(torch.zeros(K, K, device=device))
        self.delta_optimizer = adam([self.delta], self.revision_lr)
        self.phase = 0

    before_epoch = _begin_phase

    def estimate(self) -> None:
        rows, f = predict_rows(self.net, self.task.train, lambda x: penultimate(self.net, x))
        h = nmf(f - f.amin(0).clamp_max(0), self.parts, self.nmf_steps, self.generator)
        p = predict_rows(self.net, self.task.train)[1].softmax(1)
        rows_of_anchors = anchors(p, torch.linspace(0.97, 0.99, self.parts).tolist())  # [r, K]
        self.P.copy_(fit_parts(h[rows_of_anchors], p[rows_of_anchors], self.fit_steps, self.fit_lr, self.enough))
        self.h[rows] = h

    def columns(self, batch: Batch) -> Tensor:
        """T(x_i)[:, y_i].  [B, K]"""
        T = torch.einsum("br,rkb->bk", self.h[batch.rows], self.P[:, :, batch.y])
        return (T + (self.delta - self.delta.mean(1, keepdim=True)).T[batch.y]).clamp_min(0)

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        if self.phase == 2:
            descend(reweighted_loss(z.detach(), batch.y, self.columns(batch)).mean(), self.delta_optimizer)
        losses = reweighted_loss(z, batch.y, self.columns(batch)) if self.phase else cross_entropy(z, batch.y)
        return {"loss": descend(losses.mean(), self.optimizer)}
