"""PTD: part-dependent label noise, with one transition matrix per example."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import anchors, fit_parts, nmf, reweighted_loss
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import penultimate, predict_rows
from warpi.training.recipe import adam
from warpi.training.warmup import restart, warmup_epochs
from warpi.utils.settings import setting


@dataclass
class PTD(Method):
    """Estimate a transition matrix for each example, as a mixture of matrices of its parts.

        features = W H, all >= 0;   h(x) = row of W, sum 1                          r parts; a warmed-up network
        P^1..P^r:   sum_j h_j(x^i) P^j_i. = p(given | x^i)   in least squares       x^i: r anchors per class
        T(x) = sum_j h_j(x) P^j + Delta T
        L    = 1/B sum_i -beta_i log g_{y_i},   beta_i = g_{y_i} / (T(x_i)^T g)_{y_i},   g = softmax(F(x_i; theta))

    Phases, as fractions of the epochs: cross-entropy up to `warmup`; a restart with Delta T = 0 up to `revise` (the
    paper's PTD-R); then Delta T is learned together with theta (PTD-R-V).

    Differs from the paper in the fit of the matrices, the normalizations and the restart (`reinitialize`):
    docs/methods/ptd.md.
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
    reinitialize: bool = setting(True, "restart the classifier from its initial weights after T has been estimated")

    def create_state(self) -> None:
        self.schedule_starts = [0, warmup_epochs(self.warmup, self.recipe.epochs)]
        K = self.task.n_classes
        device = self.task.device
        self.h = torch.full((len(self.task.train), self.parts), 1 / self.parts, device=device)  # [N, r]
        self.P = torch.eye(K, device=device).repeat(self.parts, 1, 1)  # [r, K, K]
        self.delta = nn.Parameter(torch.zeros(K, K, device=device))
        self.delta_optimizer = adam([self.delta], self.revision_lr)
        self.phase = 0

    def before_epoch(self, t: int) -> None:
        if t >= self.schedule_starts[1] and self.phase == 0:
            self._estimate()
            restart(self, reinitialize=self.reinitialize)
            self.phase = 1
        if t >= warmup_epochs(self.revise, self.recipe.epochs) and self.phase == 1:
            self.phase = 2

    def _estimate(self) -> None:
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
