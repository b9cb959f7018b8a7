"""Replace missing trusted examples by rows whose labels agree with networks that were not trained on them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from warpi.errors import UserError
from warpi.training.method import Method
from warpi.training.task import Task
from warpi.utils.seeding import generator

METHOD_WITHOUT_TRUSTED = "dmi_ns"  # trains the networks that choose rows (docs/estimator.md)
FOLDS = 4
MAX_PER_CLASS = 10  # examples chosen per class; at most a quarter of the class


class NoTrustedExamples(UserWarning):
    """There are no trusted examples, so the classifier is trained without them."""


def hold_out_pseudo_trusted(task: Task, learn: Callable[[Task], Method], seed: int) -> Task:
    """Choose the training rows whose labels are most likely right as trusted examples.

    Networks trained on all folds but one (`learn`) predict the rows of that fold. In every class, the rows whose given
    label has the highest probability are held out, up to MAX_PER_CLASS and a quarter of the class.
    """
    train = task.train
    n = len(train)
    if n < 2 * FOLDS:
        raise UserError(
            f"{n} rows are too few to choose trusted ones; pass X_trusted and y_trusted, or use a method that needs no "
            "trusted examples"
        )
    fold = torch.randperm(n, generator=generator(seed, "folds")) % FOLDS  # [N]
    confidence = torch.zeros(n)  # probability of the given label
    for k in range(FOLDS):
        learner = learn(replace(task, train=train.subset(fold != k)))
        batches = train.subset(fold == k).batches(1000)
        confidence[fold == k] = torch.cat([learner.predict(b.x).gather(1, b.y[:, None])[:, 0] for b in batches]).cpu()
    y = train.y.cpu()
    chosen = torch.zeros(n, dtype=torch.bool)
    for c in range(task.n_classes):
        rows = (y == c).nonzero()[:, 0]
        count = max(1, min(MAX_PER_CLASS, len(rows) // 4))
        chosen[rows[confidence[rows].argsort(descending=True)[:count]]] = True
    only_one = torch.bincount(y, minlength=task.n_classes)[y] == 1  # the only row of its class: trusted and trained on
    return replace(task, train=train.subset(~chosen | only_one), meta=train.subset(chosen))
