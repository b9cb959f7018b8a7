"""DMI: determinant-based mutual information; DMI-NS: a student trained on its predictions."""

from dataclasses import dataclass

from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import cap_gradient, determinant_loss
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.warmup import reset_optimizer_state, restart, warmup_epochs
from warpi.utils.settings import setting


@dataclass
class DMI(Method):
    """Maximize the determinant of the joint distribution of labels and predictions, which noise only rescales.

        U = sum_i onehot(y_i) softmax(F(x_i; theta))^T   [K, K]
        L = -1/K log(|det U| + epsilon)

    If the noise depends on the true class only, E[U_noisy] = T^T E[U_clean], so log|det| is a constant log|det T| plus
    the loss on true labels. The loss does not see which class is which, so training starts with cross-entropy for the
    first `warmup` of the epochs.

    Differs from the paper in 1/K, `rate`, a cap on the gradient, and absent classes: docs/methods/dmi.md.
    Reference: Xu et al., L_DMI: A Novel Information-theoretic Loss Function for Training Deep Nets Robust to Label
    Noise, NeurIPS 2019.
    """

    family = "transition"
    year = 2019
    for_tables = {"warmup": 0.2}  # why: docs/methods/dmi.md

    warmup: float = setting(0.7, "fraction of the epochs before the determinant loss is used", low=0, high=1)
    rate: float = setting(0.1, "factor of the determinant loss", low=0)
    epsilon: float = setting(1e-3, "constant added to the determinant before its logarithm", low=1e-30)

    def create_state(self) -> None:
        self.switch = warmup_epochs(self.warmup, self.recipe.epochs)
        self.by_determinant = False

    def before_epoch(self, t: int) -> None:
        if t >= self.switch and not self.by_determinant:
            reset_optimizer_state(self.optimizer)
            self.by_determinant = True

    def step(self, batch: Batch) -> Log:
        loss = _loss(self, self.net(batch.x), batch.y)
        return {"loss": descend(loss, self.optimizer)}


@dataclass
class DMINS(Method):
    """Train a teacher with DMI, relabel the examples with its predictions, and train a student on them.

        teacher:  cross-entropy, then DMI, on the given labels y_i
        y'_i    = argmax_k softmax(F_teacher(x_i))_k
        student:  from the initial weights, cross-entropy, then DMI, on y'_i

    Differs from the paper: teacher and student share the recipe's epochs; the teacher of the last epoch is used (paper:
    the best one on noisy validation data); augmentation is the recipe's (paper: AutoAugment, Cutout).
    Reference: Chen et al., Robustness of Accuracy Metric and its Inspirations in Learning with Noisy Labels, AAAI 2021.
    """

    family = "transition"
    year = 2021
    for_tables = {"warmup": 0.2}

    warmup: float = setting(0.7, "fraction of the epochs of teacher and student with cross-entropy", low=0, high=1)
    rate: float = setting(0.1, "factor of the determinant loss", low=0)
    epsilon: float = setting(1e-3, "constant added to the determinant before its logarithm", low=1e-30)
    teaching: float = setting(0.5, "fraction of the epochs that train the teacher", low=0, high=1)

    def create_state(self) -> None:
        self.labels = self.task.train.y.clone()  # [N]
        self.switch = warmup_epochs(self.teaching, self.recipe.epochs)
        self.schedule_starts = [0, self.switch]
        self.taught = self.by_determinant = False

    def before_epoch(self, t: int) -> None:
        if t >= self.switch and not self.taught:
            rows, z = predict_rows(self.predictors[0], self.task.train)
            self.labels[rows] = z.argmax(1)
            restart(self)
            self.taught = True
            self.by_determinant = False
        first, last = (self.switch, self.recipe.epochs) if self.taught else (0, self.switch)
        if t >= first + warmup_epochs(self.warmup, last - first) and not self.by_determinant:
            reset_optimizer_state(self.optimizer)
            self.by_determinant = True

    def step(self, batch: Batch) -> Log:
        loss = _loss(self, self.net(batch.x), self.labels[batch.rows])
        return {"loss": descend(loss, self.optimizer)}


def _loss(method: DMI | DMINS, z: Tensor, y: Tensor) -> Tensor:
    if not method.by_determinant:
        return cross_entropy(z, y).mean()
    return method.rate * determinant_loss(cap_gradient(z, method.rate), y, method.epsilon)
