"""What every comparison starts from: training on the noisy labels, on the trusted ones, and on one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.field_checks import setting, within


def _cross_entropy_step(method: Method, batch: Batch) -> Log:
    loss = cross_entropy(method.net(batch.x), batch.y).mean()
    descend(loss, method.optimizer)
    return {"loss": loss.detach()}


@dataclass
class CE(Method):
    """Cross-entropy on the given labels, as if they were right: the base model of every table.

    L = 1/B sum_i -log softmax(F(x_i; theta))_{y_i}
    """

    trusts_given_labels: ClassVar[bool] = True

    step = _cross_entropy_step


@dataclass
class CleanOnly(Method):
    """Cross-entropy on the trusted examples alone; the noisy ones are thrown away.

    The question every user asks first: is the noisy data worth anything? It takes as many steps as the others.
    """

    needs_meta: ClassVar[bool] = True

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.meta_loader.steps = self.loader.steps

    def epoch(self, t: int) -> Iterator[Log]:
        for batch in self.meta_loader.epoch(t):
            yield self.step(batch)

    step = _cross_entropy_step


@dataclass
class FineTune(Method):
    """Cross-entropy on the noisy labels, then on the trusted examples for the last epochs.

    Differs from the table of L2RW, which adds 5,000 steps to 60,000: here the last `share` of the epochs is spent on
    the trusted examples, so that every method has the same budget.
    Reference: the baseline of Ren et al., Learning to Reweight Examples for Robust Deep Learning, ICML 2018.
    """

    needs_meta: ClassVar[bool] = True

    share: float = setting(1 / 12, "share of the epochs, at the end, that train on the trusted examples only")

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, share=(0, 1))

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.meta_loader.steps = self.loader.steps
        self.switch = recipe.epochs - max(1, round(self.share * recipe.epochs))  # the first epoch of the second phase

    def epoch(self, t: int) -> Iterator[Log]:
        loader = self.loader if t < self.switch else self.meta_loader
        for batch in loader.epoch(t):
            yield self.step(batch)

    step = _cross_entropy_step
