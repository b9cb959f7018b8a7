"""ELR: early-learning regularization."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.utils.settings import setting


@dataclass
class ELR(Method):
    """Pull predictions towards a running average of past ones, which were made before memorization set in.

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


def memory_regularizer(z: Tensor, t: Tensor) -> Tensor:
    """log(1 - <p, t>), which decreases as the prediction p moves towards the memory t.  [B, K], [B, K] -> [B]"""
    return torch.log(1 - (_cut(z) * t).sum(dim=1))


def update_memory(memory: Tensor, rows: Tensor, z: Tensor, kept: float) -> Tensor:
    """Move the memory of some rows towards their current predictions, and return it.  [N, K] -> [B, K]"""
    p = _cut(z.detach())
    t = kept * memory[rows] + (1 - kept) * p / p.sum(dim=1, keepdim=True)
    memory[rows] = t
    return t


def _cut(z: Tensor) -> Tensor:
    return z.softmax(dim=1).clamp(1e-4, 1 - 1e-4)
