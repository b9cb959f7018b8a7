"""From a data set to a task: split once, corrupt the labels of the training rows, keep the truth apart."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from warpi.data.dataset import Dataset
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.manifest import labels_hash
from warpi.noise import Noise
from warpi.rng import generator


@dataclass(frozen=True, eq=False)
class Task:
    """All that a method may see."""

    train: Split  # given labels, partly wrong
    meta: Split | None  # trusted
    val: Split | None  # held out of the noisy rows, labelled as badly as they are
    classes: tuple[str, ...]
    noise_rate: float | None = None  # oracle knowledge; only methods with `needs_noise_rate` may look

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train.examples.shape

    def to(self, device: torch.device | str) -> "Task":
        meta, val = _move(self.meta, device), _move(self.val, device)
        return replace(self, train=self.train.to(device), meta=meta, val=val)


@dataclass(frozen=True, eq=False)
class Truth:
    """What evaluation and reports may see, and methods may not."""

    test: Split | None
    test_is_clean: bool  # False: nobody knows the truth about the test rows, and their given labels stand in for it
    clean: Tensor | None  # [N] true labels of the training rows, -1 where unknown or (open set) no class is right
    T: Tensor | None  # [K, K] transition matrix of the noise, rows = true class
    noise_hash: str  # of the corrupted labels of all rows, the same as in the file of `warpi corrupt`

    def to(self, device: torch.device | str) -> "Truth":
        return replace(self, test=_move(self.test, device))


def make_task(
    dataset: Dataset,
    noise: Noise | str = "given",
    *,
    meta: int | None = None,
    val: float = 0.1,
    test: float = 0.25,
    limit: int | None = None,
    seed: int = 0,
    meta_data: Dataset | None = None,
    other: Dataset | None = None,
) -> tuple[Task, Truth]:
    """Split the rows once into train / meta / val (/ test), disjoint by construction, and corrupt train and val.

    The trusted examples are, in this order: `meta_data`; the set that comes with the data; the rows that the data
    marks as trusted; `meta` rows held out of a data set whose true labels are known, the same number of every class.
    `meta` also limits the first three, class by class; 0 means none. `val` is a share of what is left, stratified,
    and is corrupted like the training rows: nothing but the `meta` examples is ever trusted. `test` is the share held
    out where the data has no test set. `limit` takes that many rows before anything else (and as many of the test
    set). Noise is drawn for all rows of the data set, so that `warpi corrupt` with the same seed gives the same.
    """
    noise = Noise.parse(noise) if isinstance(noise, str) else noise
    for name, share in (("val", val), ("test", test)):
        if not 0 <= share < 1:
            raise UserError(f"{name} is a share of the rows in [0, 1), got {share}")
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 row, got {limit}")
    known = dataset.clean is not None and bool((dataset.clean >= 0).all())
    strata = dataset.clean if known and dataset.clean is not None else dataset.y  # [N] what splits are balanced by
    chance = generator(seed, "split")

    # 1. split once
    rows = torch.arange(len(dataset.y))
    if limit is not None:
        rows = _stratified(rows, strata, limit / len(rows), chance)[0]
    test_rows = rows[:0]
    if dataset.test is None:
        test_rows, rows = _stratified(rows, strata, test, chance)
    own_meta, meta_rows, rows = _trusted(dataset, meta_data, rows, meta, known, chance)
    val_rows, rows = _stratified(rows, strata, val, chance)

    # 2. corrupt, and put together
    noisy = noise.apply(dataset, generator(seed, "noise"), other)
    examples = dataset.examples
    if noisy.replaced is not None and other is not None:
        noisy_rows = torch.cat([rows, val_rows])
        hit = noisy_rows[noisy.replaced[noisy_rows] >= 0]
        examples = examples.replaced(hit, other.examples, noisy.replaced[hit])
    truth_of = dataset.y if dataset.clean is None else torch.where(dataset.clean >= 0, dataset.clean, dataset.y)
    if (scale := examples.standardised(rows)) is not None:
        examples = examples.scaled(scale)
        own_meta = own_meta and replace(own_meta, examples=own_meta.examples.scaled(scale))
    train = Split(examples, rows, noisy.y[rows])
    if len(meta_rows):
        own_meta = Split(examples, meta_rows, truth_of[meta_rows])
    held_out = Split(examples, val_rows, noisy.y[val_rows]) if len(val_rows) else None

    test_split = Split(examples, test_rows, truth_of[test_rows]) if len(test_rows) else dataset.test
    test_is_clean = dataset.test is not None or (
        dataset.clean is not None and bool((dataset.clean[test_rows] >= 0).all())
    )
    if dataset.test is not None:
        if scale is not None:
            test_split = replace(dataset.test, examples=dataset.test.examples.scaled(scale))
        if limit is not None and test_split is not None:
            test_split = _subset(
                test_split, _stratified(torch.arange(len(test_split)), test_split.y, limit / len(test_split), chance)[0]
            )

    # 3. what every method relies on
    _check_classes(train.y, dataset.classes, "the training rows", "drop the class or give it examples")
    if own_meta is not None:
        _check_classes(
            own_meta.y, dataset.classes, "the trusted examples", "add at least one of each to the trusted set"
        )
    clean = None if dataset.clean is None else dataset.clean[rows]
    if clean is not None and noisy.replaced is not None:
        clean = torch.where(noisy.replaced[rows] >= 0, -1, clean)
    wrong = float((clean != train.y).double().mean()) if known and clean is not None else None
    return (
        Task(train, own_meta, held_out, dataset.classes, wrong),
        Truth(test_split, test_is_clean, clean, noisy.T, labels_hash(noisy.y, noisy.replaced)),
    )


def _trusted(
    dataset: Dataset, meta_data: Dataset | None, rows: Tensor, n: int | None, known: bool, chance: Generator
) -> tuple[Split | None, Tensor, Tensor]:
    """(trusted examples of their own, trusted rows of the data set, the rows that are left)"""
    if n == 0:
        return None, rows[:0], rows
    own = dataset.meta
    if meta_data is not None:
        for what, got, wanted in (
            ("classes", meta_data.classes, dataset.classes),
            ("inputs of shape", meta_data.examples.shape, dataset.examples.shape),
        ):
            if got != wanted:
                raise UserError(f"the trusted examples of {meta_data.name} have {what} {got}, the data has {wanted}")
        own = Split(meta_data.examples, torch.arange(len(meta_data.y)), meta_data.y)
    if own is not None:
        if n is not None:
            own = _subset(own, _balanced(torch.arange(len(own)), own.y, n, dataset.classes, chance))
        return own, rows[:0], rows
    if dataset.trusted is not None:
        pool = rows[dataset.trusted[rows]]
        truth = dataset.y if dataset.clean is None else torch.where(dataset.clean >= 0, dataset.clean, dataset.y)
        taken = pool if n is None else _balanced(pool, truth, n, dataset.classes, chance)
    elif n is None:
        return None, rows[:0], rows
    elif known and dataset.clean is not None:
        taken = _balanced(rows, dataset.clean, n, dataset.classes, chance)
    else:
        raise UserError(
            f"--meta {n} holds trusted examples out of a data set whose true labels are known; those of {dataset.name} "
            "are not: give a checked file with --meta-data, or mark checked rows in a 'verified' column"
        )
    return None, taken, rows[~torch.isin(rows, taken)]


def _balanced(rows: Tensor, y: Tensor, n: int, classes: tuple[str, ...], chance: Generator) -> Tensor:
    """n of the rows, the same number of every class; a remainder goes to classes drawn at random."""
    if n < len(classes):
        raise UserError(f"{n} trusted examples cannot hold all {len(classes)} classes; ask for at least {len(classes)}")
    extra = torch.randperm(len(classes), generator=chance)[: n % len(classes)].tolist()
    taken = []
    for k, name in enumerate(classes):
        mine, need = rows[y[rows] == k], n // len(classes) + (k in extra)
        if len(mine) < need:
            raise UserError(f"class {name!r} has {len(mine)} examples that could be trusted, {n} need {need} of it")
        taken.append(mine[torch.randperm(len(mine), generator=chance)[:need]])
    return torch.cat(taken).sort().values


def _stratified(rows: Tensor, y: Tensor, share: float, chance: Generator) -> tuple[Tensor, Tensor]:
    """(a random share of the rows of every class, the others), both in ascending order"""
    taken = []
    for k in sorted(set(y[rows].tolist())):
        mine = rows[y[rows] == k]
        count = min(len(mine), round(share * len(mine)))
        taken.append(mine[torch.randperm(len(mine), generator=chance)[:count]])
    inside = torch.cat(taken).sort().values if taken else rows[:0]
    return inside, rows[~torch.isin(rows, inside)]


def _check_classes(y: Tensor, classes: tuple[str, ...], where: str, advice: str) -> None:
    empty = [name for k, name in enumerate(classes) if not bool((y == k).any())]
    if empty:
        listed = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise UserError(f"{len(empty)} of {len(classes)} classes have no example among {where}: {listed}; {advice}")


def _subset(split: Split, index: Tensor) -> Split:
    return replace(split, rows=split.rows[index], y=split.y[index])


def _move(split: Split | None, device: torch.device | str) -> Split | None:
    return None if split is None else split.to(device)
