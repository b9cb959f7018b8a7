"""ELR: early-learning regularization; ELR+: with two networks, weight averaging and mixup."""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.autodiff.inference import infer
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, one_hot, soft_cross_entropy
from warpi.functional.mixup import beta, mix, partners
from warpi.training.method import Log, Method, descend
from warpi.utils.settings import setting


@dataclass
class ELR(Method):
    """Pull predictions toward their running average, which forms before the network memorizes wrong labels.

        t_i <- beta t_i + (1 - beta) p_i                                   running mean of the predictions     Eq. (9)
        L   = 1/B sum_i CE(p_i, y_i) + lambda log(1 - <p_i, t_i>)          p_i = softmax(F(x_i))               Eq. (6)

    As in the published code, p_i is clipped to [1e-4, 1 - 1e-4], and normalized before it enters t_i; t_i starts at 0.
    The defaults are those for CIFAR-10 with symmetric noise.

    Differs from the paper: network and schedule are the recipe's; the step is the same.
    Reference: Liu et al., Early-Learning Regularization Prevents Memorization of Noisy Labels, NeurIPS 2020.
    """

    family = "refinement"
    year = 2020

    beta: float = setting(0.7, "fraction of the memory kept per step", low=0, high=1)
    strength: float = setting(3.0, "weight lambda of the regularization", low=0)

    def create_state(self) -> None:
        self.memory = torch.zeros(len(self.task.train), self.task.n_classes, device=self.task.device)  # [N, K] t

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        t = update_memory(self.memory, batch.rows, z, self.beta)
        loss = (cross_entropy(z, batch.y) + self.strength * memory_regularizer(z, t)).mean()
        return {"loss": descend(loss, self.optimizer)}


@dataclass
class ELRPlus(Method):
    """ELR with two networks: the averaged weights of one fill the memory of the other; inputs are mixed.

        t_i <- beta t_i + (1 - beta) softmax(F(x_i; v_other))              v: moving average of the weights w
        x~, y~, t~ = l (x, y, t) + (1 - l) (x, y, t)_partner,              l = max(b, 1 - b), b ~ Beta(alpha, alpha)
        L   = 1/B sum_i CE(p~_i, y~_i) + lambda log(1 - <p~_i, t~_i>)      p~_i = softmax(F(x~_i; w_own))
        v   <- gamma_s v + (1 - gamma_s) w,                                gamma_s = gamma exp(-5 (1 - s/S)^2)

    for each network; gamma_s rises over the first S steps and equals gamma afterwards. If the recipe averages weights,
    v are those of the recipe. With strong augmentation, the steps above have a weak view, and the loss is the mean of
    that and of the same loss of a strong view that is not mixed.

    Differs from the published code: both networks see the same batches, one after the other; S is a fraction of the
    steps (published: 40,000 of 78,000); labels are not sharpened by the memory (published: on CIFAR-100 only).
    Reference: Liu et al., Early-Learning Regularization Prevents Memorization of Noisy Labels, NeurIPS 2020.
    """

    family = "refinement"
    year = 2020
    n_nets = 2

    beta: float = setting(0.7, "fraction of the memory kept per step", low=0, high=1)
    strength: float = setting(3.0, "weight lambda of the regularization", low=0)
    alpha: float = setting(1.0, "parameter of mixup's Beta distribution; 0 turns mixup off", low=0)
    averaging: float = setting(0.997, "fraction gamma of the averaged weights kept per step", low=0, high=1)
    ramp_up: float = setting(0.5, "fraction of the steps in which gamma rises to its full value", low=0, high=1)

    def plan_views(self, strong: bool) -> tuple[int, tuple[int, ...]]:
        return (2, (1,)) if strong else (1, ())

    def create_state(self) -> None:
        task = self.task
        self.averages = [] if self.average_decay else [deepcopy(net).requires_grad_(False) for net in self.nets]  # v
        self.memories = torch.zeros(2, len(task.train), task.n_classes, device=task.device)  # [2, N, K] t
        self.progress = torch.zeros((), device=task.device)  # s / S

    def step(self, batch: Batch) -> Log:
        y = one_hot(batch.y, self.task.n_classes)
        losses = []
        for k, net in enumerate(self.nets):
            t = update_memory(self.memories[k], batch.rows, self.predict_averaged(1 - k, batch.x), self.beta)
            b = beta(self.alpha, self.generator)
            order = partners([len(y)], self.generator)
            mixed = [mix(a, order, torch.maximum(b, 1 - b), [len(y)]) for a in (batch.x, y, t)]
            others = [(x, y, t) for x in batch.views[1:]]  # the strong view, if there is one
            x, q, t = (torch.cat(parts) for parts in zip(mixed, *others, strict=True))
            z = net(x)
            loss = (soft_cross_entropy(z, q) + self.strength * memory_regularizer(z, t)).mean()
            losses.append(descend(loss, self.optimizers[k]))
        if not self.average_decay:
            self.average()
        return {"loss": (losses[0] + losses[1]) / 2}

    @torch.no_grad()
    def predict_averaged(self, k: int, x: Tensor) -> Tensor:
        """Logits of the averaged weights of network k.  [B, K]"""
        if self.average_decay:
            return infer(self.averaged_nets[k], x)
        z: Tensor = self.averages[k](x)
        return z

    @torch.no_grad()
    def average(self) -> None:
        """v <- gamma_s v + (1 - gamma_s) w."""
        steps = max(1.0, self.ramp_up * self.recipe.epochs * self.loader.steps)  # S
        self.progress.add_(1 / steps).clamp_(max=1)
        weight = 1 - self.averaging * torch.exp(-5 * (1 - self.progress) ** 2)  # 1 - gamma_s
        for net, averaged in zip(self.nets, self.averages, strict=True):
            for w, v in zip(net.parameters(), averaged.parameters(), strict=True):
                v.lerp_(w, weight)


def memory_regularizer(z: Tensor, t: Tensor) -> Tensor:
    """log(1 - <p, t>), which decreases as the prediction p moves toward the memory t.  [B, K], [B, K] -> [B]"""
    return torch.log(1 - (_cut(z) * t).sum(dim=1))


def update_memory(memory: Tensor, rows: Tensor, z: Tensor, kept: float) -> Tensor:
    """Move the memory of some rows toward their current predictions, and return it.  [N, K] -> [B, K]"""
    p = _cut(z.detach())
    t = kept * memory[rows] + (1 - kept) * p / p.sum(dim=1, keepdim=True)
    memory[rows] = t
    return t


def _cut(z: Tensor) -> Tensor:
    return z.softmax(dim=1).clamp(1e-4, 1 - 1e-4)
