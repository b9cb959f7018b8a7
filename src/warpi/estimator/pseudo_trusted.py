"""What stands in for trusted examples where there are none: labels that networks which never saw them agree with."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from warpi.data.split import Split
from warpi.errors import UserError
from warpi.training.method import Method
from warpi.training.task import Task
from warpi.utils.seeding import generator

WITHOUT_TRUSTED = "dmi_ns"  # what "auto" is then, and who chooses the examples: why, docs/estimator.md
FOLDS = 4
MAX_PER_CLASS = 10  # examples chosen of a class, at most a quarter of it


class NoTrustedExamples(UserWarning):
    """There are no trusted examples, and something else is done."""


def hold_out_pseudo_trusted(task: Task, learn: Callable[[Task], Method], seed: int) -> Task:
    """A task whose trusted examples are those of its own rows that are most surely labelled as they should be.

    Networks are trained on all folds but one (`learn`), and judge the rows of that one. Of every class the rows to
    whose given label they give the highest probability are held out, up to EACH and a quarter of the class.
    """
    train, n = task.train, len(task.train)
    if n < 2 * FOLDS:
        raise UserError(
            f"{n} rows are too few to choose trusted ones among them; give X_meta and y_meta, or a method without"
        )
    fold = torch.randperm(n, generator=generator(seed, "folds")) % FOLDS  # [N]
    own = torch.zeros(n)  # probability of the given label
    for k in range(FOLDS):
        learner = learn(replace(task, train=_part(train, fold != k)))
        p = [learner.predict(b.x).gather(1, b.y[:, None])[:, 0] for b in _part(train, fold == k).batches(1000)]
        own[fold == k] = torch.cat(p).cpu()
    y, chosen = train.y.cpu(), torch.zeros(n, dtype=torch.bool)
    for c in range(task.n_classes):
        mine = (y == c).nonzero()[:, 0]
        chosen[mine[own[mine].argsort(descending=True)[: max(1, min(MAX_PER_CLASS, len(mine) // 4))]]] = True
    alone = torch.bincount(y, minlength=task.n_classes)[y] == 1  # the only one of its class is needed on both sides
    return replace(task, train=_part(train, ~chosen | alone), meta=_part(train, chosen))


def _part(split: Split, which: Tensor) -> Split:
    return Split(split.examples, split.rows[which], split.y[which.to(split.y.device)])
