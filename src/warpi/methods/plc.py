"""PLC: progressive label correction."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.training.warmup import capped_warmup
from warpi.utils import distributed
from warpi.utils.settings import setting


def correct_labels(y: Tensor, f: Tensor, theta: Tensor | float) -> Tensor:
    """Replace y by argmax_k f_k if f_y < theta max_k f_k, a likelihood-ratio test.  y [N], f [N, K] -> [N]"""
    most, guess = f.max(dim=1)
    return torch.where(f.gather(1, y[:, None])[:, 0] < theta * most, guess, y)


@dataclass
class PLC(Method):
    """After each epoch, change labels that the network finds much less likely than another class.

        f(x_i) = mean of the network's probabilities over the last `window` epochs
        y_i <- argmax_k f_k(x_i)   if  f_{y_i}(x_i) / max_k f_k(x_i) < theta
        theta <- min(theta + beta, 0.9)   once fewer than 0.1 % of the labels changed

    Training continues with cross-entropy on the new labels; changes are never undone.

    Differs from the published code: theta grows as in the paper; more in docs/methods/plc.md.
    Reference: Zhang et al., Learning with Feature-Dependent Label Noise: A Progressive Approach, ICLR 2021.
    """

    family = "refinement"
    year = 2021
    for_tables = {"warm_up": 1.0}

    theta: float = setting(0.3, "initial ratio of probabilities below which a label is changed", low=0, high=1)
    beta: float = setting(0.1, "increase of theta after an epoch in which few labels change", low=0)
    warm_up: float = setting(8.0, "epochs without corrections, at most half of all epochs", low=0)
    window: int = setting(5, "number of epochs over which predictions are averaged", low=1)

    def create_state(self) -> None:
        K = self.task.n_classes
        self.y = self.task.train.y.clone()  # [N]
        self.record = torch.zeros(self.window, len(self.y), K, device=self.task.device)  # of the last epochs
        self.slot = torch.zeros_like(self.y[:1])  # index of this epoch in `record`
        self.limit = torch.full_like(self.record[0, 0, 0], self.theta)

    def epoch(self, t: int) -> Iterator[Log]:
        yield from super().epoch(t)
        distributed.average([self.record[int(self.slot)]])  # ranks have different rows; a common factor does not matter
        if t >= capped_warmup(self.warm_up, self.recipe.epochs):
            new = correct_labels(self.y, self.record.sum(0), self.limit)
            if int((new != self.y).sum()) < 0.001 * len(new):
                self.limit.copy_((self.limit + self.beta).clamp(max=max(0.9, self.theta)))
            self.y.copy_(new)
        self.slot.copy_((self.slot + 1) % self.window)
        self.record[int(self.slot)].zero_()

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        y = self.y[batch.rows]
        self.record[self.slot.expand_as(batch.rows), batch.rows] = z.detach().softmax(dim=1).float()
        loss = cross_entropy(z, y).mean()
        return {"loss": descend(loss, self.optimizer), "changed": (y != batch.y).float().mean()}
