"""DivideMix: learning with noisy labels as semi-supervised learning."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, entropy, one_hot, prior_penalty, soft_cross_entropy, squared_error
from warpi.functional.mixup import mixup, sharpen
from warpi.functional.selection import selected_mean, two_gaussians
from warpi.training.method import Log, Method, descend, evaluating
from warpi.training.outputs import predict_rows
from warpi.training.warmup import capped_warmup
from warpi.utils.settings import setting


@dataclass
class DivideMix(Method):
    """Two networks divide the examples into clean and noisy ones for each other; noisy labels are guessed.

    After a warm-up with cross-entropy, before each epoch and for each network k:

        w_i = p(clean | loss of example i in the other network), from a mixture of two Gaussians
        labeled X: w_i >= tau,     unlabeled U: the others

    In a step, with M augmented views of each example and p_k the mean prediction of network k over them:

        X: target = Sharpen(w_i y_i + (1 - w_i) p_k, T)                       co-refinement              Eqs. (3), (4)
        U: target = Sharpen((p_1 + p_2) / 2, T)                               co-guessing
        mixup of all views and targets, lambda' = max(lambda, 1 - lambda)     MixMatch                  Eqs. (5) - (8)
        L = mean_X CE(y', p') + lambda_u mean_U |p' - y'|^2 / K + lambda_r KL(uniform || mean p')      Eqs. (9) - (12)

    Differs from the paper in the batches and in lambda_u, independent of the noise: docs/methods/dividemix.md.
    Reference: Li et al., DivideMix: Learning with Noisy Labels as Semi-supervised Learning, ICLR 2020.
    """

    family = "semi-supervised"
    year = 2020
    n_nets = 2
    n_views = 2  # M
    for_tables = {"warm_up": 1.0, "ramp_up": 1.6}

    tau: float = setting(0.5, "smallest probability of being clean at which a label is used", low=0, high=1)
    temperature: float = setting(0.5, "temperature T of sharpening; lower is sharper", low=0.001)
    alpha: float = setting(4.0, "parameter of mixup's Beta distribution", low=0)
    lambda_u: float = setting(25.0, "weight of the loss on unlabeled examples, which is a mean over the classes", low=0)
    lambda_r: float = setting(1.0, "weight of the penalty on uneven class predictions", low=0)
    warm_up: float = setting(10.0, "epochs with cross-entropy, at least one and at most half of all epochs", low=0)
    ramp_up: float = setting(16.0, "epochs in which lambda_u rises to its full value, at most half of all", low=0)
    confidence_penalty: float = setting(0.0, "weight of the negative entropy in the warm-up", low=0)

    @classmethod
    def data_defaults(cls, table: bool, n_classes: int) -> dict[str, Any]:
        # The error of unlabeled examples is a mean over the classes: docs/methods/dividemix.md
        fewer = {"lambda_u": cls.lambda_u * n_classes / 10} if n_classes < 10 else {}
        return {**super().data_defaults(table, n_classes), **fewer}

    def create_state(self) -> None:
        self.clean = torch.ones(2, len(self.task.train), device=self.task.device)  # [2, N] w, for each network
        self.weight_u = torch.zeros((), device=self.task.device)  # current lambda_u
        self.ramp_steps = max(1, round(capped_warmup(self.ramp_up, self.recipe.epochs) * self.loader.steps))
        self.warming = True

    def before_epoch(self, t: int) -> None:
        self.warming = t < max(1, round(capped_warmup(self.warm_up, self.recipe.epochs)))
        if not self.warming:
            self.divide()

    def divide(self) -> None:
        train = self.task.train
        for k in (0, 1):
            rows, z = predict_rows(self.nets[1 - k], train)
            self.clean[k, rows] = two_gaussians(cross_entropy(z, train.y[rows]))

    def step(self, batch: Batch) -> Log:
        if self.warming:
            return self.warm(batch)
        self.weight_u.add_(self.lambda_u / self.ramp_steps).clamp_(max=self.lambda_u)
        x = torch.cat(batch.views)  # [M B, ...]
        y = one_hot(batch.y, self.task.n_classes)  # [B, K]
        own = self.predict_each(x)  # in training mode, so that BatchNorm also sees unmixed examples  [2, B, K]
        with evaluating(self.nets):
            p = self.predict_each(x)
        logs = [self.match(k, x, y, self.clean[k, batch.rows], own[k], p[1 - k]) for k in (0, 1)]
        return {name: (logs[0][name] + logs[1][name]) / 2 for name in logs[0]}

    def warm(self, batch: Batch) -> Log:
        total = torch.zeros_like(self.weight_u)
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            z = net(batch.x)
            loss = (cross_entropy(z, batch.y) - self.confidence_penalty * entropy(z)).mean()
            total += descend(loss, optimizer) / 2
        return {"loss": total}

    @torch.no_grad()
    def predict_each(self, x: Tensor) -> Tensor:
        """Predictions of each network, averaged over the views of an example.  [M B, ...] -> [2, B, K]"""
        p = [net(x).softmax(dim=1).chunk(self.n_views) for net in self.nets]
        return torch.stack([torch.stack(views).mean(0) for views in p])

    def match(self, k: int, x: Tensor, y: Tensor, w: Tensor, own: Tensor, other: Tensor) -> dict[str, Tensor]:
        """One step of network k, given its own predictions and those of the other network."""
        labeled = (w >= self.tau).float()  # [B]
        w = w[:, None]  # [B, 1]
        refined = w * y + (1 - w) * own  # Eq. (3)
        guessed = (own + other) / 2  # co-guessing
        target = sharpen(torch.where(labeled[:, None] > 0, refined, guessed), self.temperature)  # Eq. (4)
        x, q = mixup(x, target.repeat(self.n_views, 1), self.alpha, self.generator, keep_own=True)  # Eqs. (5) to (8)
        z = self.nets[k](x)  # [M B, K]
        in_x = labeled.repeat(self.n_views)  # [M B]
        loss_x = selected_mean(soft_cross_entropy(z, q), in_x)  # Eq. (9)
        loss_u = selected_mean(squared_error(z, q), 1 - in_x)  # Eq. (10)
        loss = loss_x + self.weight_u * loss_u + self.lambda_r * prior_penalty(z)  # Eqs. (11), (12)
        return {"loss": descend(loss, self.optimizers[k]), "labelled": labeled.mean()}
