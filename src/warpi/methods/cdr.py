"""CDR: robust early learning, by updating the critical weights only."""

from dataclasses import dataclass

import torch

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.training.method import Log, Method
from warpi.utils import distributed
from warpi.utils.settings import setting


@dataclass
class CDR(Method):
    """Only weights that matter for the clean labels get gradients; the others are just decayed.

        c_j = |w_j dL/dw_j|                              how critical weight j is
        w_j <- w_j - eta ((1 - tau) dL/dw_j + decay)     for the fraction 1 - tau of the weights with the largest c_j
        w_j <- w_j - eta decay                           for the others

    The idea: if a fraction tau of the labels is wrong, about that fraction of the weights serves to fit them. Critical
    weights are chosen again in every step. Biases and BatchNorm weights are always updated.

    Differs from the paper in decay and momentum, as the published code does, and in stopping: docs/methods/cdr.md.
    Reference: Xia et al., Robust Early-learning: Hindering the Memorization of Noisy Labels, ICLR 2021.
    """

    family = "refinement"
    year = 2021
    needs_noise_rate = True
    noise_rate_field = "tau"

    tau: float | None = setting(None, "fraction of wrong labels (default: the task's noise rate)", low=0, high=1)

    def step(self, batch: Batch) -> Log:
        tau = self.task.noise_rate
        assert tau is not None  # see `needs_noise_rate`
        loss = cross_entropy(self.net(batch.x), batch.y).mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        moved = [(p.detach(), p.grad) for p in self.net.parameters() if p.grad is not None]
        distributed.average(g for _, g in moved)

        judged = [(w, g) for w, g in moved if w.ndim > 1]
        critical = torch.cat([(w * g).abs().flatten() for w, g in judged])  # c
        keep = max(1, round((1 - tau) * len(critical)))
        least = critical.topk(keep, sorted=False).values.min()
        for w, g in judged:
            g.mul_((1 - tau) * ((w * g).abs() >= least))
        self.optimizer.step()
        return {"loss": loss.detach()}
