"""From a data set to a task: split once, corrupt the labels of the training rows, keep the truth apart."""

import logging
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from warpi.data.dataset import Dataset
from warpi.data.examples import Examples
from warpi.data.numeric import Features
from warpi.data.overlap import check_disjoint, mark_shared
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.noise.noise import Noise
from warpi.noise.noise_file import hash_labels
from warpi.utils.seeding import generator

log = logging.getLogger("warpi.task")


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

    def to(self, device: torch.device | str, moved: "Moved | None" = None) -> "Task":
        """On another device. Splits that share their examples go on sharing them, those of a Truth too by `moved`."""
        moved = {} if moved is None else moved
        meta, val = (split and _move(split, device, moved) for split in (self.meta, self.val))
        return replace(self, train=_move(self.train, device, moved), meta=meta, val=val)


@dataclass(frozen=True, eq=False)
class Truth:
    """What evaluation and reports may see, and methods may not."""

    test: Split | None
    test_is_clean: bool  # False: nobody knows the truth about the test rows, and their given labels stand in for it
    clean: Tensor | None  # [N] true labels of the training rows, -1 where unknown or (open set) no class is right
    T: Tensor | None  # [K, K] transition matrix of the noise, rows = true class
    noise_hash: str  # of the corrupted labels of all rows, the same as in the file of `warpi corrupt`
    n_repeated: int = 0  # rows of the data that are among the trusted examples, and used only there

    def to(self, device: torch.device | str, moved: "Moved | None" = None) -> "Truth":
        return replace(self, test=self.test and _move(self.test, device, {} if moved is None else moved))


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
        raise UserError(f"limit must be at least 1, got {limit}")

    def chance(purpose: str) -> Generator:
        return generator(seed, "split", purpose)

    # 1. split once
    strata = dataset.truth  # [N] what splits are balanced by
    rows = torch.arange(len(dataset.y))
    if limit is not None:
        rows, _ = _stratified(rows, strata, limit / len(rows), chance("limit"))
    trusted, n_repeated = _apart(dataset, meta_data, meta, chance("meta")), 0
    if trusted is not None:  # what is trusted is neither trained on as noisy nor tested on
        seen = mark_shared(Split(dataset.examples, rows, dataset.y[rows]), trusted)
        if seen.all():
            raise UserError(
                f"all {len(rows)} rows of {dataset.name} are also among the trusted examples, none is left to train "
                "on; give as trusted only those that were checked"
            )
        if n_repeated := int(seen.sum()):
            told = "%d of %d rows are also among the trusted examples; only there are they used"
            log.info(told, n_repeated, len(rows))
        rows = rows[~seen]
        if dataset.test is not None:
            check_disjoint(trusted, dataset.test, Split(dataset.examples, rows, dataset.y[rows]))
    test_rows = rows[:0]
    if dataset.test is None:  # rows that a person has checked are too precious to be tested on
        pool = rows if dataset.trusted is None else rows[~dataset.trusted[rows]]
        test_rows, _ = _stratified(pool, strata, test, chance("test"), leave=True)
        rows = _without(rows, test_rows)
    meta_rows = rows[:0] if trusted is not None else _trusted_rows(dataset, rows, meta, chance("meta"))
    val_rows, train_rows = _stratified(_without(rows, meta_rows), strata, val, chance("val"), leave=True)
    if len(meta_rows) and not len(train_rows):
        which = "all" if len(meta_rows) == len(dataset.y) else f"{len(meta_rows)} of"
        raise UserError(
            f"{which} {len(dataset.y)} rows of {dataset.name} are trusted, none is left to train on as noisy; trust "
            "only rows that somebody has checked, or none at all: then every label counts as one that may be wrong"
        )

    # 2. corrupt the labels (or the inputs) of train and val, and nothing else
    noisy = noise.apply(dataset, generator(seed, "noise"), other)
    examples, clean = dataset.examples, dataset.clean
    if noisy.replaced is not None and other is not None:
        noisy_rows = torch.cat([train_rows, val_rows])
        hit = noisy_rows[noisy.replaced[noisy_rows] >= 0]
        examples = examples.replace_inputs(hit, other.examples, noisy.replaced[hit])
        clean = None if clean is None else clean.index_fill(0, hit, -1)  # no class of ours is right for them
    if (scale := examples.fit_scale(train_rows)) is not None:
        examples = examples.with_scale(scale)

    def part(rows: Tensor, y: Tensor) -> Split | None:
        return Split(examples, rows, y[rows]) if len(rows) else None

    def apart(split: Split | None) -> Split | None:
        return split and replace(split, examples=split.examples.with_scale(scale) if scale else split.examples)

    train = Split(examples, train_rows, noisy.y[train_rows])
    checked = part(meta_rows, dataset.truth) or apart(trusted)
    held_out = part(val_rows, noisy.y)
    known = dataset.truth
    if noise.kind == "given" and not dataset.truth_is_known:  # corrected labels are better than those that were read
        known = noisy.y if dataset.clean is None else torch.where(dataset.clean >= 0, dataset.clean, noisy.y)
    exam = part(test_rows, known) or apart(dataset.test)
    if limit is not None and dataset.test is not None and exam is not None:
        exam = exam.subset(_stratified(torch.arange(len(exam)), exam.y, limit / len(exam), chance("test"))[0])

    # 3. what every method relies on
    _check_classes(train.y, dataset.classes, "the training rows", "drop the class or give it examples")
    if checked is not None:
        _check_classes(checked.y, dataset.classes, "the trusted examples", "add at least one of each to them")
        _tell_uneven(checked.y, train.y, dataset.classes)
        _tell_elsewhere(checked, train)
    _tell_few(train.y, dataset.classes, bool(len(test_rows) + len(val_rows)))
    clean = None if clean is None else clean[train_rows]
    rate = None if clean is None or not dataset.truth_is_known else float((clean != train.y).double().mean())
    exam_is_clean = dataset.test_is_clean
    if dataset.test is None and dataset.clean is not None:
        exam_is_clean = bool((dataset.clean[test_rows] >= 0).all())
    return (
        Task(train, checked, held_out, dataset.classes, rate),
        Truth(exam, exam_is_clean, clean, noisy.T, hash_labels(noisy.y, noisy.replaced), n_repeated),
    )


def _apart(dataset: Dataset, meta_data: Dataset | None, n: int | None, chance: Generator) -> Split | None:
    """Trusted examples that lie in a set of their own."""
    if n == 0:
        return None
    own = dataset.meta
    if meta_data is not None:
        for what, got, wanted in (
            ("classes", meta_data.classes, dataset.classes),
            ("inputs of shape", meta_data.examples.shape, dataset.examples.shape),
        ):
            if got != wanted:
                raise UserError(f"the trusted examples of {meta_data.name} have {what} {got}, the data has {wanted}")
        own = Split(meta_data.examples, torch.arange(len(meta_data.y)), meta_data.truth)
    if own is None or n is None:
        return own
    return own.subset(_balanced(torch.arange(len(own)), own.y, n, dataset.classes, chance))


def _trusted_rows(dataset: Dataset, rows: Tensor, n: int | None, chance: Generator) -> Tensor:
    """Rows that the data marks as trusted, or that are held out since the truth about all of them is known."""
    if n == 0:
        return rows[:0]
    if dataset.trusted is not None:
        pool = rows[dataset.trusted[rows]]
        return pool if n is None else _balanced(pool, dataset.truth, n, dataset.classes, chance)
    if n is None:
        return rows[:0]
    if not dataset.truth_is_known:
        raise UserError(
            f"--meta {n} holds trusted examples out of a data set whose true labels are known; those of {dataset.name} "
            "are not: give a checked file with --meta-data, mark checked rows in a 'verified' column, or, if all "
            "labels are right, say so: an array 'clean' (.npz), a column 'clean_label' (tables, image lists)"
        )
    return _balanced(rows, dataset.truth, n, dataset.classes, chance)


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


def _stratified(
    rows: Tensor, y: Tensor, share: float, chance: Generator, *, leave: bool = False
) -> tuple[Tensor, Tensor]:
    """(a random share of the rows, of every class alike, the others), both in ascending order.

    Classes are rounded such that the sum is right: those with the largest remainders are rounded up. With `leave` none
    is that would be left without a row: it could not be trained on.
    """
    groups = [rows[y[rows] == k] for k in sorted(set(y[rows].tolist()))]
    exact = [min(share, 1.0) * len(group) for group in groups]
    up = round(sum(exact)) - sum(map(int, exact))
    room = [k for k, group in enumerate(groups) if not leave or int(exact[k]) + 1 < len(group)]
    raised = sorted(room, key=lambda k: int(exact[k]) - exact[k])[:up]
    taken = [
        group[torch.randperm(len(group), generator=chance)[: int(exact[k]) + (k in raised)]]
        for k, group in enumerate(groups)
    ]
    inside = torch.cat(taken).sort().values if taken else rows[:0]
    return inside, _without(rows, inside)


def _without(rows: Tensor, others: Tensor) -> Tensor:
    return rows[~torch.isin(rows, others)]


def _check_classes(y: Tensor, classes: tuple[str, ...], where: str, advice: str) -> None:
    empty = [name for k, name in enumerate(classes) if not bool((y == k).any())]
    if empty:
        listed = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise UserError(f"{len(empty)} of {len(classes)} classes have no example among {where}: {listed}; {advice}")


def _tell_few(y: Tensor, classes: tuple[str, ...], held_out: bool) -> None:
    """Say so where nothing can be learned about a class, least of all which of its labels are wrong."""
    count = torch.bincount(y.cpu(), minlength=len(classes)).tolist()
    few = [f"{n} of {name}" for name, n in zip(classes, count, strict=True) if n < 5]
    if few:
        listed = ", ".join(few[:5]) + (", ..." if len(few) > 5 else "")
        after = ", after test and validation rows were held out" if held_out else ""
        log.warning("too few training rows to learn from (%s)%s", listed, after)


def _tell_uneven(trusted: Tensor, given: Tensor, classes: tuple[str, ...]) -> None:
    """Say so where trusted examples are neither even nor like the data: what meta methods learn from them is tilted."""
    ours, theirs = (torch.bincount(y.cpu(), minlength=len(classes)).double() for y in (trusted, given))
    tilt = (ours / ours.sum()) / (theirs / theirs.sum())
    more = torch.minimum(ours[:, None] / ours, tilt[:, None] / tilt)  # [K, K] of class i than of class j
    if more.max() >= 3:
        most, least = divmod(int(more.argmax()), len(classes))
        log.warning(
            "the trusted examples are uneven (%d of %s, %d of %s), the data is not like that: meta methods suffer "
            "(WarPI by ten points on digits); check more of the rare ones, or trust as many of each (fit: --meta N)",
            *(int(ours[most]), classes[most], int(ours[least]), classes[least]),
        )


def _tell_elsewhere(trusted: Split, train: Split) -> None:
    """Say so where trusted examples are not like the data: other units, or steps that they did not go through."""
    if not isinstance(trusted.examples, Features) or not isinstance(train.examples, Features):
        return
    mean, x = trusted.examples.x[trusted.rows].double().mean(0), train.examples.x[train.rows].double()
    low, high = x.amin(0), x.amax(0)
    if far := int(((low < high) & ((mean < low) | (mean > high))).sum()):
        log.warning(
            "in %d of %d features the mean of the trusted examples lies beyond all noisy rows: other units, or were "
            "steps of a Pipeline left out (docs/estimator.md)?",
            *(far, mean.numel()),
        )


Moved = dict[int, tuple[Examples, Examples]]
"""Examples before and after a move, by the identity of the former."""


def _move(split: Split, device: torch.device | str, moved: Moved) -> Split:
    if id(split.examples) not in moved:
        moved[id(split.examples)] = split.examples, split.examples.to(device)
    return replace(split, examples=moved[id(split.examples)][1], y=split.y.to(device))
