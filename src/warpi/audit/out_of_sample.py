"""What a trained method makes of rows, and probabilities from networks that have not seen the labels they judge."""

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpi.audit.label_scores import Floats, Ints
from warpi.audit.result import read_arrays
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.training.engine import train
from warpi.training.method import Method
from warpi.training.outputs import predict_rows
from warpi.utils.files import write_atomically
from warpi.utils.seeding import derive, generator, seeded

log = logging.getLogger("warpi.audit")

SAMPLES = 20  # of the rectifying vector v, for the uncertainty


@dataclass(frozen=True, eq=False)
class RowPredictions:
    """A trained method's view of n rows of a split: those that can be read."""

    at: Ints  # [n] positions within the split
    y: Ints  # [n] given labels
    p: Floats  # [n, K] probabilities of the classes
    each: Floats  # [S, n, K] the same of each network; S = 0 for a single one
    given: Floats  # [L, n] log softmax(v_l z)_y: what WarPI makes of the label with L samples of v; L = 0 elsewhere


_NAMES = [f.name for f in fields(RowPredictions)]
_TRUSTED = "trusted_"  # before the names of the second sight in a file


@torch.no_grad()
def predict_split(method: Method, split: Split | None) -> RowPredictions:
    """What the method predicts, in evaluation mode and without augmentation."""
    K = method.task.n_classes
    if split is None:
        none = np.zeros(0, np.int64)
        return RowPredictions(none, none, np.zeros((0, K)), np.zeros((0, 0, K)), np.zeros((0, 0)))
    nets = method.predictors
    at, p = predict_rows(method.net, split, method.predict)
    y = split.y[at]
    several = [predict_rows(net, split)[1].softmax(1) for net in nets] if len(nets) > 1 else []
    warped = _label_samples(method, split, y)
    each = torch.stack(several) if several else p.new_zeros((0, *p.shape))
    return RowPredictions(*(_numpy(t) for t in (at, y, p, each, warped)))


def _numpy(t: Tensor) -> Any:
    values = t.cpu()
    return values.double().numpy() if values.is_floating_point() else values.numpy()


def _label_samples(method: Method, split: Split, y: Tensor) -> Tensor:
    """Sampled log-probabilities of the given labels, L = 0 of them if the method has none.  [L, n]"""
    if type(method).label_samples is not Method.label_samples:
        rng = generator(method.recipe.seed, "audit", device=y.device)
        z = predict_rows(method.net, split)[1]
        batches = zip(torch.split(z, 10_000), torch.split(y, 10_000), strict=True)
        samples = [method.label_samples(z_part, y_part, SAMPLES, rng) for z_part, y_part in batches]
        if all(part is not None for part in samples):
            return torch.cat([part for part in samples if part is not None], dim=1)
    return y.new_zeros((0, len(y)))


def parts(y: Ints, n: int, seed: int) -> list[Ints]:
    """Positions of the n parts of a split, each with its share of every given label."""
    chance = generator(seed, "audit", "folds")
    fold = np.zeros(len(y), np.int64)
    start = 0
    for k in np.unique(y):
        mine = np.flatnonzero(y == k)
        mine = mine[torch.randperm(len(mine), generator=chance).numpy()]
        fold[mine] = (start + np.arange(len(mine))) % n  # goes on where the last class ended: parts differ by one row
        start += len(mine)
    return [np.flatnonzero(fold == f) for f in range(n)]


def out_of_sample(method: Method, n: int, folder: Path | None = None) -> tuple[RowPredictions, RowPredictions]:
    """Every training row, and every trusted row, as seen by the same recipe trained without it: n trainings in all.

    Each leaves a part of both out. A trusted row that is the only one of its class takes part in all, and is not among
    what is returned: without it the class would have none. In `folder` (the run's) each training is stored as it ends:
    it is not repeated.
    """
    split, trusted = method.task.train, method.task.meta
    y = split.y.cpu().numpy()
    rare = np.bincount(y, minlength=method.task.n_classes).min()
    if rare < 2:
        raise UserError("a class has a single training row: without it nothing is left to train on; use no folds")
    if n > len(y):
        raise UserError(f"{n} folds of {len(y)} training rows: some would be empty; take fewer")
    checked = y[:0] if trusted is None else trusted.y.cpu().numpy()
    several = np.bincount(checked, minlength=method.task.n_classes)[checked] > 1
    found = []
    for f, (held, apart) in enumerate(
        zip(parts(y, n, method.recipe.seed), parts(checked, n, method.recipe.seed), strict=True)
    ):
        file = None if folder is None else folder / f"fold-{f + 1}-of-{n}.npz"
        stored = None if file is None else _stored(file, held, y, checked)
        if stored is None:
            log.info("audit: training %d of %d", f + 1, n)
            stored = _judged(method, held, apart[several[apart]])
            if file is not None:
                _store(file, *stored)
        found.append(stored)
    rows, others = zip(*found, strict=True)
    return _together(rows), _together([replace(s, each=s.each[:0], given=s.given[:0]) for s in others])


def _together(sights: Sequence[RowPredictions]) -> RowPredictions:
    order = np.concatenate([s.at for s in sights]).argsort()
    return RowPredictions(
        *(np.concatenate([getattr(s, name) for s in sights])[order] for name in ("at", "y", "p")),
        *(np.concatenate([getattr(s, name) for s in sights], axis=1)[:, order] for name in ("each", "given")),
    )


def _judged(method: Method, held: Ints, apart: Ints) -> tuple[RowPredictions, RowPredictions]:
    """The rows `held` of the training split, and `apart` of the trusted one, by the same recipe trained on the rest."""
    task = method.task
    rest = replace(task, train=_without(task.train, held), meta=task.meta and _without(task.meta, apart), val=None)
    with seeded(derive(method.recipe.seed, "training")):
        learner = replace(method)  # its hyper-parameters, without its state
        learner.start(rest, method.recipe)
        for _ in train(learner, learner.task):
            pass
    rows, trusted = predict_split(learner, task.train.subset(torch.from_numpy(held))), predict_split(learner, task.meta)
    left = np.isin(trusted.at, apart)  # of all: those of a small part may be images none of which can be read
    part = RowPredictions(
        trusted.at[left], trusted.y[left], trusted.p[left], trusted.each[:, left], trusted.given[:, left]
    )
    return replace(rows, at=held[rows.at]), part


def _without(split: Split, at: Ints) -> Split:
    return split.subset(torch.from_numpy(np.setdiff1d(np.arange(len(split)), at)))


def _store(file: Path, sight: RowPredictions, trusted: RowPredictions) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **vars(sight), **{_TRUSTED + name: values for name, values in vars(trusted).items()})
    try:
        write_atomically(file, content.getvalue())
    except UserError as e:  # as with the audit itself
        log.warning("this training would have to be repeated after a crash: %s", e)


def _stored(file: Path, held: Ints, y: Ints, checked: Ints) -> tuple[RowPredictions, RowPredictions] | None:
    """What an earlier process found; None where there is nothing, or something about other rows, or about none of the
    trusted ones, which an earlier version did not leave out."""
    if not file.exists():
        return None
    try:
        arrays = read_arrays(file)
        trusted = {name: arrays.pop(_TRUSTED + name) for name in _NAMES if _TRUSTED + name in arrays}
        sight, apart = RowPredictions(**arrays), RowPredictions(**trusted) if trusted else None
        if apart is None or not np.isin(sight.at, held).all():
            return None
        for s, given in ((sight, y), (apart, checked)):
            if not np.array_equal(s.y, given[s.at]) or len(s.p) != len(s.y) or not np.isfinite(s.p).all():
                raise ValueError("its arrays do not fit the run")
    except (ValueError, TypeError, IndexError) as e:
        raise UserError(f"{file} is not what `warpi audit` stored there ({e}); delete it") from e
    return sight, apart
