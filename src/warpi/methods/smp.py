"""SMP: self-learning with multiple prototypes per class."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.neighbors import prototypes
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import feature_size, penultimate, predict_rows
from warpi.training.warmup import warmup_epochs
from warpi.utils.seeding import generator
from warpi.utils.settings import setting


@dataclass
class SMP(Method):
    """Train on the given label and on the class whose prototypes are most similar to the example.

        X_c   = prototypes of class c: points labeled c in dense regions that are not too similar to each other
        sigma_c(x) = mean_l cos(G(x), G(X_cl)),     y^ = argmax_c sigma_c(x)          G the features
        L     = 1/B sum_i (1 - alpha) CE(F(x_i), y_i) + alpha CE(F(x_i), y^_i)        alpha = 0 in the first epochs

    Prototypes are computed before each epoch.

    No official code exists; this follows the paper's description. Differs from the paper: the first phase is a fraction
    of the epochs (paper: 5 of 15).
    Reference: Han et al., Deep Self-Learning From Noisy Labels, ICCV 2019.
    """

    family = "refinement"
    year = 2019

    alpha: float = setting(0.5, "weight of the corrected labels", low=0, high=1)
    per_class: int = setting(1280, "number of examples per class among which prototypes are chosen", low=1)
    n_prototypes: int = setting(8, "number of prototypes per class", low=1)
    apart: float = setting(
        0.95, "maximum cosine similarity of a prototype to a denser point (above 1: no limit)", low=-1, high=1.01
    )
    warm_up: float = setting(1 / 3, "fraction of the epochs trained on the given labels only", low=0, high=1)

    def create_state(self) -> None:
        feature_size(self.net, self.task.shape)  # raises if the network has no penultimate features
        self.y_hat = self.task.train.y.clone()  # [N] corrected labels

    def before_epoch(self, t: int) -> None:
        if t >= warmup_epochs(self.warm_up, self.recipe.epochs):
            self.correct(t)

    def correct(self, t: int) -> None:
        rows, h = predict_rows(self.net, self.task.train, lambda x: penultimate(self.net, x))
        h = F.normalize(h, dim=1)
        y = self.task.train.y[rows]
        order = torch.randperm(len(h), generator=generator(self.recipe.seed, "prototypes", t)).to(h.device)
        sigma = h.new_full((len(h), self.task.n_classes), -torch.inf)  # a class without examples is never chosen
        for c in range(self.task.n_classes):
            some = order[y[order] == c][: self.per_class]
            if len(some):
                X_c = h[some[prototypes(h[some], self.n_prototypes, self.apart)]]
                sigma[:, c] = (h @ X_c.T).mean(1)
        self.y_hat[rows] = sigma.argmax(dim=1)

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        y_hat = self.y_hat[batch.rows]
        losses = (1 - self.alpha) * cross_entropy(z, batch.y) + self.alpha * cross_entropy(z, y_hat)
        return {"loss": descend(losses.mean(), self.optimizer), "changed": (y_hat != batch.y).float().mean()}
