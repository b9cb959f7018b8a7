"""LCCN: true labels are sampled, and T follows from their counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from warpi.losses import cross_entropy
from warpi.method import Method, descend
from warpi.phases import border
from warpi.recipe import Recipe
from warpi.settings import at_least, within
from warpi.survey import survey
from warpi.task import Task
from warpi.types import Batch, Log


@dataclass
class LCCN(Method):
    """Every example has a latent true label z, drawn anew whenever the example is seen; T is what the draws have shown.

        C_kj   = number of examples with latent label k and given label j,  the batch itself left out
        phi_kj = (C_kj + alpha) / sum_l (C_kl + alpha)                          Dirichlet posterior, T integrated out
        z_i    ~ softmax(F(x_i; theta))_z phi_{z y_i},  normalised              collapsed Gibbs sampling
        L      = 1/B sum_i -log softmax(F(x_i; theta))_{z_i}

    One batch moves phi by no more than its share of the counts: the safeguard of the title. The latent labels begin as
    the predictions of a network trained by cross-entropy in the first `warmup` of the epochs.

    Differs from the paper: no steps with a fixed T in between (published: 20,000, with a T from another method); phi
    follows the counts at every step (published: every 200). The first phase lasts until the learning rate has fallen
    (published: a whole training): draws from a network that knows little are little else than its own opinion.
    Reference: Yao et al., Safeguarded Dynamic Label Regression for Noisy Supervision, AAAI 2019.
    """

    family: ClassVar[str] = "transition"
    year: ClassVar[int | None] = 2019
    warmup: float = 0.7  # share of the epochs with cross-entropy
    alpha: float = 1.0  # of the Dirichlet prior

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, warmup=(0, 1))
        at_least(self, alpha=1e-6)

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.latent = task.train.y.clone()  # [N]
        self.counts = torch.zeros(task.n_classes, task.n_classes, device=self.latent.device)  # C
        self.switch, self.sampling = border(self.warmup, recipe.epochs), False

    def epoch(self, t: int) -> Iterator[Log]:
        if t >= self.switch and not self.sampling:
            rows, z = survey(self.net, self.task.train)
            self.latent[rows] = z.argmax(1)
            self._count(self.latent, self.task.train.y, 1.0)
            self.sampling = True
        yield from super().epoch(t)

    def step(self, batch: Batch) -> Log:
        logits, target = self.net(batch.x), batch.y
        if self.sampling:
            self._count(self.latent[batch.rows], batch.y, -1.0)
            phi = self.counts + self.alpha
            phi = phi / phi.sum(1, keepdim=True)  # [K, K]
            q = logits.detach().softmax(1) * phi.T[batch.y]  # [B, K]
            race = torch.empty_like(q).exponential_(generator=self.generator)
            target = (q.clamp_min(1e-30) / race).argmax(1)  # a draw from q; torch.multinomial makes a GPU wait
            self.latent[batch.rows] = target
            self._count(target, batch.y, 1.0)
        loss = cross_entropy(logits, target).mean()
        descend(loss, self.optimizer)
        return {"loss": loss.detach()}

    def _count(self, latent: Tensor, y: Tensor, sign: float) -> None:
        self.counts.index_put_((latent, y), self.counts.new_full(y.shape, sign), accumulate=True)
