"""Mixup."""

from dataclasses import dataclass

from warpi.data.batch import Batch
from warpi.functional.losses import one_hot, soft_cross_entropy
from warpi.functional.mixup import mixup
from warpi.training.method import Log, Method, descend
from warpi.utils.settings import setting


@dataclass
class Mixup(Method):
    """Train on convex combinations of pairs of examples and of their labels.

        x' = lambda x_i + (1 - lambda) x_j,    y' = lambda y_i + (1 - lambda) y_j,    lambda ~ Beta(alpha, alpha)
        L  = 1/B sum_i CE(F(x'_i; theta), y'_i)

    A wrong label is only ever fitted in a mixture with another one. As in the published code, a batch has one lambda,
    and its examples are paired with a permutation of the same batch; the paper draws pairs.
    Reference: Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018.
    """

    family = "loss"
    year = 2018

    alpha: float = setting(1.0, "parameter of the Beta distribution; 0 is plain cross-entropy", low=0)

    def step(self, batch: Batch) -> Log:
        y = one_hot(batch.y, self.task.n_classes)  # [B, K]
        x, target = mixup(batch.x, y, self.alpha, self.generator)
        loss = soft_cross_entropy(self.net(x), target).mean()
        return {"loss": descend(loss, self.optimizer)}
