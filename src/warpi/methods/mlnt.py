"""MLNT: meta-learning based noise-tolerant training."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from warpi.autodiff.passes import forward, forward_at
from warpi.data.batch import Batch
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy, entropy, one_hot, soft_cross_entropy
from warpi.training.bilevel import step_along
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import feature_size, penultimate
from warpi.utils import distributed
from warpi.utils.settings import setting


def synthesize_labels(h: Tensor, y: Tensor, n: int, share: float, k: int, generator: Generator) -> Tensor:
    """n copies of the labels of a batch, with a fraction of them replaced by labels of near neighbors.  [n, B]

    With several ranks, the neighbors are those in the whole batch.
    """
    h, y = distributed.gather(h), distributed.gather(y)
    size = (n, len(y))
    away = torch.cdist(h, h).fill_diagonal_(torch.inf)  # [B, B]
    near = away.topk(min(k, len(y) - 1), largest=False).indices  # [B, k]
    which = (torch.rand(size, generator=generator, device=y.device) * near.shape[1]).long()  # [n, B]
    labels = y[near].expand(n, *near.shape).gather(2, which[:, :, None])[:, :, 0]
    order = torch.rand(size, generator=generator, device=y.device).argsort(dim=1).argsort(dim=1)
    return torch.where(order < int(share * len(y)), labels, y)[:, distributed.rank_slice(len(y))]


@dataclass
class MLNT(Method):
    """Train the network so that steps toward synthetic wrong labels barely change its predictions.

        y_m       : labels of the batch, a fraction of them replaced by the label of a near neighbor, m = 1..M
        theta_m   = theta - a d/dtheta CE(F(x; theta), y_m)
        J(theta)  = 1/M sum_m KL(F(x; teacher) || F(x; theta_m))
        theta   <- theta - alpha d/dtheta [CE(F(x; theta), y) + r J],   teacher <- g teacher + (1 - g) theta

    The gradient of J is the first-order one, taken at theta_m. The teacher predicts. After a warm-up with
    cross-entropy, r rises to 1. Trusted examples are not needed.

    Differs from the paper in the features of the neighbors, the rounds and the mean of KL: docs/methods/mlnt.md.
    Reference: Li et al., Learning to Learn from Noisy Labeled Data, CVPR 2019.
    """

    family = "meta"
    year = 2019
    least_batch = 2  # labels come from neighbors in the batch

    updates: int = setting(10, "number M of synthetic label sets per batch", low=1)
    share: float = setting(0.5, "fraction of the labels of a batch that are replaced", low=0, high=1)
    neighbours: int = setting(10, "number of nearest neighbors from which a replacement label is drawn", low=1)
    fast_lr: float = setting(0.02, "learning rate of the steps toward synthetic labels", low=0)
    warm_up: float = setting(0.1, "fraction of the epochs with cross-entropy only", low=0, high=1)
    ramp: float = setting(0.2, "fraction of the epochs in which the weight of J rises to 1", low=0, high=1)
    averaging: tuple[float, ...] = setting((0.99, 0.999), "fraction of the teacher kept (ramp, later)", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.averaging) not in (1, 2):
            raise UserError(f"averaging must be one or two fractions (in the ramp, and later), got {self.averaging}")

    def create_state(self) -> None:
        feature_size(self.net, self.task.shape)  # raises if the network has no penultimate features
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.rate = torch.zeros((), device=self.task.device)  # r
        self.warm = True
        self.keep = 0.0  # g

    def before_epoch(self, t: int) -> None:
        start = round(self.warm_up * self.recipe.epochs)
        end = round((self.warm_up + self.ramp) * self.recipe.epochs)
        self.warm = t < start
        if self.warm:
            self.keep = 0.0
            self.rate.fill_(0)
        else:
            self.keep = self.averaging[0] if t < end else self.averaging[-1]
            self.rate.fill_(math.exp(-5 * max(0, 1 - (t + 1 - start) / max(1, end - start)) ** 2))

    @torch.no_grad()
    def follow(self) -> None:
        """Move the teacher toward the network; in the warm-up, copy the network."""
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.net.parameters()), 1 - self.keep)
        if self.warm:
            for averaged, current in zip(self.teacher.buffers(), self.net.buffers(), strict=True):
                averaged.copy_(current)

    def step(self, batch: Batch) -> Log:
        noisy = forward(self.net, batch.x)
        loss = cross_entropy(noisy.z, batch.y).mean()
        if self.warm:
            log = {"loss": descend(loss, self.optimizer)}
            self.follow()
            return log
        self.follow()
        with torch.no_grad():
            z_teacher = self.teacher(batch.x)  # [B, K]
            h = penultimate(self.teacher, batch.x)  # [B, D]
        target = z_teacher.softmax(dim=1)  # [B, K]
        p = noisy.z.detach().softmax(dim=1)  # [B, K]
        B, K = p.shape
        gradient = noisy.done.vjp((p - one_hot(batch.y, K)) / B)  # of CE(F(x; theta), y)
        J = torch.zeros_like(self.rate)
        for y in synthesize_labels(h, batch.y, self.updates, self.share, self.neighbours, self.generator):
            step = noisy.done.vjp((p - one_hot(y, K)) / B)
            distributed.average(step)
            moved = torch._foreach_sub(list(noisy.done.theta.values()), torch._foreach_mul(step, self.fast_lr))
            after = forward_at(self.net, dict(zip(noisy.done.theta, moved, strict=True)), batch.x)  # at theta_m
            z = after.z.detach()
            J += (soft_cross_entropy(z, target) - entropy(z_teacher)).mean() / self.updates
            torch._foreach_add_(gradient, after.vjp((z.softmax(dim=1) - target) * self.rate / (self.updates * B)))
        step_along(self, gradient)
        return {"loss": loss.detach(), "consistency": J}

    @property
    def predictors(self) -> list[nn.Module]:
        return [self.teacher]
