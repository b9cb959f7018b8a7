"""D2L: dimensionality-driven learning."""

import math
from dataclasses import dataclass, replace
from statistics import mean, pstdev

import torch

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.neighbors import lid
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import penultimate, predict_rows
from warpi.utils.seeding import generator
from warpi.utils.settings import setting


@dataclass
class D2L(Method):
    """When the dimensionality of the features rises, wrong labels are being fitted: mix in predictions from then on.

        LID_t = mean local intrinsic dimensionality of the features, from k neighbors within batches of 128
        turning point: the first t with LID_t > mean + 2 std of the last `window` epochs; restore the weights of one
        epoch earlier, and from then on
        alpha = exp(-(t / T) LID_t / min_{s <= t} LID_s)
        y*    = alpha y + (1 - alpha) [k = argmax p_k],    L = CE(F(x), y*)

    Differs from the paper in the first epochs, and in points at which the LID is infinite: docs/methods/d2l.md.
    Reference: Ma et al., Dimensionality-Driven Learning with Noisy Labels, ICML 2018.
    """

    family = "refinement"
    year = 2018

    k: int = setting(20, "number of neighbors for the dimensionality estimate", low=2)
    points: int = setting(1280, "number of examples at which the dimensionality is estimated", low=4)
    window: int = setting(5, "number of past epochs with which the current dimensionality is compared", low=1)
    settle: float = setting(1 / 3, "fraction of the epochs, at the start, without a turning point", low=0, high=1)

    def create_state(self) -> None:
        self.lids = torch.full((self.recipe.epochs,), math.nan, dtype=torch.float64)  # one per epoch
        self.alpha = torch.ones((), device=self.task.device)
        self.turned = torch.tensor(False)
        self.previous = {name: value.clone() for name, value in self.net.state_dict().items()}  # one epoch ago

    def before_epoch(self, t: int) -> None:
        self.lids[t] = self.dimension(t)
        self.pace(t)

    def dimension(self, t: int) -> float:
        """Estimate LID_t at randomly drawn points."""
        train = self.task.train
        some = torch.randperm(len(train), generator=generator(self.recipe.seed, "lid", t))[: self.points]
        part = replace(train, rows=train.rows[some], y=train.y[some.to(train.y.device)])
        _, h = predict_rows(self.net, part, lambda x: penultimate(self.net, x))
        first, *rest = torch.split(h.double(), 128)
        batches = [first, *(batch for batch in rest if len(batch) > self.k + 1)]
        lids = torch.cat([lid(batch, self.k) for batch in batches])
        lids = lids[lids.isfinite()]
        return float(lids.mean()) if len(lids) else 1.0  # too few examples for an estimate

    def pace(self, t: int) -> None:
        """Check for the turning point, and update alpha."""
        *lids, now = self.lids[: t + 1].tolist()
        before = lids[-self.window :]
        looking = t >= max(2, round(self.settle * self.recipe.epochs)) and not self.turned  # needs two earlier LIDs
        if looking and now > mean(before) + 2 * pstdev(before):
            self.turned.fill_(True)
            self.net.load_state_dict(self.previous)
        if self.turned:
            self.alpha.fill_(math.exp(-t / self.recipe.epochs * now / min([*lids, now])))
        for name, value in self.net.state_dict().items():
            self.previous[name].copy_(value)

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        losses = self.alpha * cross_entropy(z, batch.y) + (1 - self.alpha) * cross_entropy(z, z.argmax(dim=1))
        return {"loss": descend(losses.mean(), self.optimizer), "alpha": self.alpha.clone()}
