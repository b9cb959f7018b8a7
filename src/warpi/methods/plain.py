"""The baselines: training on the noisy labels, on the trusted examples, and on one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, one_hot, soft_cross_entropy
from warpi.functional.mixup import mixup
from warpi.training.method import Log, Method, descend
from warpi.training.warmup import warmup_epochs
from warpi.utils.settings import setting


def _cross_entropy_step(method: Method, batch: Batch) -> Log:
    """One step of cross-entropy, with the mixup and label smoothing of the recipe."""
    recipe = method.recipe
    if recipe.mixup or recipe.label_smoothing:
        q = one_hot(batch.y, method.task.n_classes)
        q = (1 - recipe.label_smoothing) * q + recipe.label_smoothing / method.task.n_classes
        x, q = mixup(batch.x, q, recipe.mixup, method.generator)
        loss = soft_cross_entropy(method.net(x), q).mean()
    else:
        loss = cross_entropy(method.net(batch.x), batch.y).mean()
    return {"loss": descend(loss, method.optimizer)}


@dataclass
class CE(Method):
    """Cross-entropy on the given labels, as if all of them were right.

    L = 1/B sum_i -log softmax(F(x_i; theta))_{y_i}
    """

    step = _cross_entropy_step


@dataclass
class CleanOnly(Method):
    """Cross-entropy on the trusted examples only; the noisy examples are not used.

    Shows whether the noisy examples help at all. It takes as many steps per epoch as the other methods.
    """

    needs_meta = True

    def create_state(self) -> None:
        self.meta_loader.steps = self.loader.steps

    def epoch(self, t: int) -> Iterator[Log]:
        for batch in self.meta_loader.epoch(t):
            yield self.step(batch)

    step = _cross_entropy_step


@dataclass
class FineTune(Method):
    """Cross-entropy on the noisy labels, then on the trusted examples for the last epochs.

    Differs from the paper, which adds 5,000 steps to 60,000: the last `share` of the recipe's epochs trains on the
    trusted examples, so that all methods have the same budget.
    Reference: the baseline of Ren et al., Learning to Reweight Examples for Robust Deep Learning, ICML 2018.
    """

    needs_meta = True

    share: float = setting(1 / 12, "fraction of the epochs, at the end, on the trusted examples only", low=0, high=1)

    def create_state(self) -> None:
        self.meta_loader.steps = self.loader.steps
        epochs = self.recipe.epochs
        self.switch = epochs - warmup_epochs(self.share, epochs)  # the first epoch of the second phase

    def epoch(self, t: int) -> Iterator[Log]:
        loader = self.loader if t < self.switch else self.meta_loader
        for batch in loader.epoch(t):
            yield self.step(batch)

    step = _cross_entropy_step
