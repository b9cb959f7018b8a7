"""DivideMix: learning with noisy labels as semi-supervised learning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from warpi.autodiff.inference import infer
from warpi.autodiff.passes import pass_config
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, entropy, one_hot, prior_penalty, soft_cross_entropy, squared_error
from warpi.functional.mixup import balanced_partners, beta, mix, sharpen
from warpi.functional.selection import selected_mean, two_gaussians
from warpi.training.method import Log, Method, add_trusted, descend, evaluating
from warpi.training.outputs import predict_rows
from warpi.training.warmup import capped_warmup
from warpi.utils.settings import setting

Views = tuple[Tensor, ...]


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

    Half of the partners in mixup are unlabeled examples, as in the paper, whose batches are half labeled.

    With averaged weights, the averaged networks divide and guess. With strong augmentation, each example has a weak
    view, for the steps above, and a strong view s, which is learned without mixup:

        L += mean_i c_i CE(target_i, p(s_i)),    c_i = 1 in X, the largest entry of the target in U
    Differs from the paper in the batches: docs/methods/dividemix.md.
    Reference: Li et al., DivideMix: Learning with Noisy Labels as Semi-supervised Learning, ICLR 2020.
    """

    family = "semi-supervised"
    year = 2020
    n_nets = 2
    n_views = 2  # M
    n_trusted_views = 2
    for_tables = {"warm_up": 1.0, "ramp_up": 1.6}

    tau: float = setting(0.5, "smallest probability of being clean at which a label is used", low=0, high=1)
    temperature: float = setting(0.5, "temperature T of sharpening; lower is sharper", low=0.001)
    alpha: float = setting(4.0, "parameter of mixup's Beta distribution", low=0)
    lambda_u: float | None = setting(
        None, "weight of the loss on unlabeled examples (default: the published one for their fraction)", low=0
    )
    lambda_r: float = setting(1.0, "weight of the penalty on uneven class predictions", low=0)
    warm_up: float = setting(10.0, "epochs with cross-entropy, at least one and at most half of all epochs", low=0)
    ramp_up: float = setting(16.0, "epochs in which lambda_u rises to its full value, at most half of all", low=0)
    confidence_penalty: float = setting(0.0, "weight of the negative entropy in the warm-up", low=0)
    use_trusted: bool = setting(False, "also train on the trusted examples, which are always labeled")

    @classmethod
    def data_defaults(cls, table: bool, n_classes: int) -> dict[str, Any]:
        return {**cls.for_tables, "lambda_u": few_classes(25.0, n_classes)} if table else {}

    def plan_views(self, strong: bool) -> tuple[int, tuple[int, ...]]:
        return self.n_views, (1,) if strong else ()

    def create_state(self) -> None:
        device = self.task.device
        self.clean = torch.ones(2, len(self.task.train), device=device)  # [2, N] w, for each network
        self.weight_u = torch.zeros((), device=device)  # current lambda_u
        if self.lambda_u is None:
            self.full_weight_u = torch.zeros((), device=device)  # lambda_u, chosen after the warm-up
        self.ramp_steps = max(1, round(capped_warmup(self.ramp_up, self.recipe.epochs) * self.loader.steps))
        self.warming = True

    @property
    def first(self) -> int:
        """The first epoch after the warm-up."""
        return max(1, round(capped_warmup(self.warm_up, self.recipe.epochs)))

    def before_epoch(self, t: int) -> None:
        self.warming = t < self.first
        if not self.warming:
            self.divide()
        if t == self.first and self.lambda_u is None:
            unlabeled = float((self.clean < self.tau).float().mean())
            self.full_weight_u.fill_(published_lambda_u(unlabeled, self.task.n_classes))

    def divide(self) -> None:
        train = self.task.train
        for k in (0, 1):
            rows, z = predict_rows(self.predictors[1 - k], train)
            self.clean[k, rows] = two_gaussians(cross_entropy(z, train.y[rows])).to(self.clean)

    def step(self, batch: Batch) -> Log:
        if self.warming:
            return self.warm(batch)
        full = self.full_weight_u if self.lambda_u is None else self.lambda_u
        self.weight_u.add_(full / self.ramp_steps).clamp_(max=full)
        views, labels = add_trusted(self, batch)
        y = one_hot(labels, self.task.n_classes)  # [B, K]
        parts = [len(batch.y), len(y) - len(batch.y)]
        w = torch.cat([self.clean[:, batch.rows], self.clean.new_ones(2, parts[1])], dim=1)  # [2, B]
        n = 1 if self.recipe.augment == "strong" else self.n_views  # weak views, M
        own, others = self.guess(views[:n])
        logs = [self.match(k, views[:n], views[n:], y, w[k], own[k], others[1 - k], parts) for k in (0, 1)]
        return {name: (logs[0][name] + logs[1][name]) / 2 for name in logs[0]}

    def warm(self, batch: Batch) -> Log:
        views, y = add_trusted(self, batch)
        x = views[0]
        if self.recipe.augment == "strong":
            x, y = torch.cat(views), y.repeat(len(views))
        total = torch.zeros_like(self.weight_u)
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            z = net(x)
            loss = (cross_entropy(z, y) - self.confidence_penalty * entropy(z)).mean()
            total += descend(loss, optimizer) / 2
        return {"loss": total}

    def guess(self, views: Views) -> tuple[Tensor, Tensor]:
        """Predictions of each network for itself and for the other one, as means over views.  2 x [2, B, K]

        A network predicts for itself in training mode, as published, so that BatchNorm also sees unmixed examples.
        """
        if self.average_decay:
            p = torch.stack([mean_prediction(partial(infer, net), views) for net in self.averaged_nets])
            return p, p
        own = torch.stack([mean_prediction(partial(call_in_training, net), views) for net in self.nets])
        with evaluating(self.nets):
            return own, torch.stack([mean_prediction(partial(infer, net), views) for net in self.nets])

    def match(
        self,
        k: int,
        weak: Views,
        strong: Views,
        y: Tensor,
        w: Tensor,
        own: Tensor,
        other: Tensor,
        parts: Sequence[int],
    ) -> dict[str, Tensor]:
        """One step of network k, given its own predictions and those of the other network.

        `parts` are the numbers of noisy and of trusted examples.
        """
        labeled = (w >= self.tau).float()  # [B]
        w = w[:, None]  # [B, 1]
        refined = w * y + (1 - w) * own  # Eq. (3)
        guessed = (own + other) / 2  # co-guessing
        target = sharpen(torch.where(labeled[:, None] > 0, refined, guessed), self.temperature)  # Eq. (4)
        in_x = labeled.repeat(len(weak))  # [M B]
        b = beta(self.alpha, self.generator)
        pieces = [*parts] * len(weak)
        partner = balanced_partners(in_x, self.generator, pieces)
        both = torch.cat(weak), target.repeat(len(weak), 1)
        x, q = (mix(a, partner, torch.maximum(b, 1 - b), pieces) for a in both)  # Eqs. (5) to (8)
        z, *z_strong = self.nets[k](torch.cat([x, *strong])).split([len(x), *(len(s) for s in strong)])
        loss_x = selected_mean(soft_cross_entropy(z, q), in_x)  # Eq. (9)
        loss_u = selected_mean(squared_error(z, q), 1 - in_x)  # Eq. (10)
        loss = loss_x + self.weight_u * loss_u + self.lambda_r * prior_penalty(z)  # Eqs. (11), (12)
        for z in z_strong:
            loss = loss + (target.amax(1).maximum(labeled) * soft_cross_entropy(z, target)).mean()
        return {"loss": descend(loss, self.optimizers[k]), "labelled": labeled[: parts[0]].mean()}


def published_lambda_u(unlabeled: float, n_classes: int) -> float:
    """The paper's lambda_u: for CIFAR-10 0 at 20 percent noise and 25 at 50, for CIFAR-100 25 and 150."""
    is_little = unlabeled < 0.35
    if n_classes > 10:
        return 25.0 if is_little else 150.0
    return 0.0 if is_little else few_classes(25.0, n_classes)


def few_classes(lambda_u: float, n_classes: int) -> float:
    """A smaller weight for fewer than 10 classes: the error of a guess is a mean over the classes."""
    return lambda_u * min(n_classes, 10) / 10


def mean_prediction(net: Callable[[Tensor], Tensor], views: Views) -> Tensor:
    """The predicted probabilities, averaged over the views of each example.  M x [B, ...] -> [B, K]"""
    return torch.stack([net(x).softmax(dim=1) for x in views]).mean(0)


def call_in_training(net: nn.Module, x: Tensor) -> Tensor:
    """Logits in training mode without a gradient. A traced network is only traced for calls with a gradient."""
    with torch.set_grad_enabled(pass_config(net).compile):
        z: Tensor = net(x)
    return z.detach()
