"""Methods that replace cross-entropy by a loss that is less sensitive to wrong labels."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional import losses
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.warmup import warmup_epochs
from warpi.utils.settings import setting


def _step(method: Method, values: Tensor) -> Log:
    """One optimizer step on the mean of the losses of a batch.  [B]"""
    return {"loss": descend(values.mean(), method.optimizer)}


@dataclass
class MAE(Method):
    """Mean absolute error, whose minimizer does not change under symmetric noise.

    L = 1/B sum_i |softmax(F(x_i; theta)) - y_i|_1 = 1/B sum_i 2 (1 - p_{y_i})
    Reference: Ghosh et al., Robust Loss Functions under Label Noise for Deep Neural Networks, AAAI 2017.
    """

    family = "loss"
    year = 2017

    def step(self, batch: Batch) -> Log:
        return _step(self, losses.absolute_error(self.net(batch.x), batch.y))


@dataclass
class GCE(Method):
    """Generalized cross-entropy: between cross-entropy (q -> 0), which learns fast, and MAE (q = 1), which is robust.

    L_q = 1/B sum_i (1 - p_{y_i}^q) / q
    Reference: Zhang & Sabuncu, Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels,
    NeurIPS 2018.
    """

    family = "loss"
    year = 2018

    q: float = setting(0.7, "exponent of the loss: 0 is cross-entropy, 1 is half the absolute error", low=0, high=1)

    def step(self, batch: Batch) -> Log:
        return _step(self, losses.generalized_cross_entropy(self.net(batch.x), batch.y, self.q))


@dataclass
class TruncatedGCE(Method):
    """Generalized cross-entropy that ignores examples whose label has a low probability.

        L = 1/B sum_i w_i (L_q(p_{y_i}) - L_q(k)),    w_i = [p_{y_i} > k]

    Pruning starts after `start_prune` of the epochs. Every `prune_every` of the epochs, w is computed again for all
    examples, so that pruned examples can return.
    Differs from the paper in the network that prunes and in the schedule: docs/methods/gce_truncated.md.
    Reference: Zhang & Sabuncu, Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels,
    NeurIPS 2018.
    """

    family = "loss"
    year = 2018
    for_tables = {"start_prune": 1 / 3}  # why: docs/methods/gce_truncated.md

    q: float = setting(0.7, "exponent of the loss: 0 is cross-entropy, 1 is half the absolute error", low=0, high=1)
    k: float = setting(0.5, "examples whose label has at most this probability are pruned", low=1e-6, high=1)
    start_prune: float = setting(0.7, "fraction of the epochs before the first pruning", low=0, high=1)
    prune_every: float = setting(1 / 12, "fraction of the epochs between two prunings", low=0, high=1)

    @classmethod
    def data_defaults(cls, table: bool, n_classes: int) -> dict[str, Any]:
        # Many classes are learned too late for pruning to begin early.
        return super().data_defaults(table and n_classes <= 20, n_classes)

    def create_state(self) -> None:
        self.kept = torch.ones(len(self.task.train), device=self.task.device)  # [N] w

    def before_epoch(self, t: int) -> None:
        since = t - warmup_epochs(self.start_prune, self.recipe.epochs)  # an untrained network would prune everything
        if since >= 0 and since % warmup_epochs(self.prune_every, self.recipe.epochs) == 0:
            self.prune()

    def prune(self) -> None:
        rows, z = predict_rows(self.net, self.task.train)
        p_y = (-losses.cross_entropy(z, self.task.train.y[rows])).exp()
        self.kept[rows] = (p_y > self.k).float()

    def step(self, batch: Batch) -> Log:
        kept = self.kept[batch.rows]  # [B]
        loss = losses.truncated_cross_entropy(self.net(batch.x), batch.y, kept, self.q, self.k).mean()
        return {"loss": descend(loss, self.optimizer), "kept": kept.mean()}


@dataclass
class SCE(Method):
    """Symmetric cross-entropy: cross-entropy plus its reverse, with prediction and label swapped.

        L = alpha CE(y, p) + beta RCE,    RCE = -sum_k p_k log y_k = -A (1 - p_y),  log 0 := A

    `clip` is the value of the published code: A = log 1e-4.
    Reference: Wang et al., Symmetric Cross Entropy for Robust Learning with Noisy Labels, ICCV 2019.
    """

    family = "loss"
    year = 2019

    alpha: float = setting(0.1, "weight of the cross-entropy (paper: 6 on CIFAR-100)", low=0)
    beta: float = setting(1.0, "weight of the reverse cross-entropy (paper: 0.1 on CIFAR-100)", low=0)
    clip: float = setting(1e-4, "probability that replaces 0 in a label, before the logarithm", low=1e-38, high=1)

    def step(self, batch: Batch) -> Log:
        A = math.log(self.clip)
        return _step(self, losses.symmetric_cross_entropy(self.net(batch.x), batch.y, self.alpha, self.beta, A))


@dataclass
class Focal(Method):
    """Focal loss: down-weights examples that are already classified well. Made for rare classes, not for wrong labels.

    L = 1/B sum_i -(1 - p_{y_i})^gamma log p_{y_i}                                                            Eq. (4)
    Reference: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """

    family = "loss"
    year = 2017

    gamma: float = setting(2.0, "how strongly easy examples are down-weighted; 0 is cross-entropy", low=0)

    def step(self, batch: Batch) -> Log:
        return _step(self, losses.focal(self.net(batch.x), batch.y, self.gamma))


@dataclass
class Bootstrap(Method):
    """Bootstrapping: the target mixes the given label with the network's own prediction.

        soft: L = -sum_k (beta y_k + (1 - beta) p_k) log p_k
        hard: L = -sum_k (beta y_k + (1 - beta) [k = argmax p]) log p_k

    Reference: Reed et al., Training Deep Neural Networks on Noisy Labels with Bootstrapping, ICLR workshop 2015.
    """

    family = "loss"
    year = 2015

    hard: bool = setting(False, "mix the label with the predicted class instead of the predicted probabilities")
    beta: float = setting(0.95, "weight of the given label (paper: 0.95 if soft, 0.8 if hard)", low=0, high=1)

    def step(self, batch: Batch) -> Log:
        loss = losses.hard_bootstrap if self.hard else losses.soft_bootstrap
        return _step(self, loss(self.net(batch.x), batch.y, self.beta))


@dataclass
class LabelSmoothing(Method):
    """Label smoothing: each target has a small probability for every class, which keeps the logits bounded.

    L = 1/B sum_i CE((1 - epsilon) y_i + epsilon / K, p_i)
    Reference: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016.
    """

    family = "loss"
    year = 2016

    smoothing: float = setting(0.1, "probability epsilon that is spread evenly over all classes", low=0, high=1)

    def step(self, batch: Batch) -> Log:
        return _step(self, losses.smooth_cross_entropy(self.net(batch.x), batch.y, self.smoothing))
