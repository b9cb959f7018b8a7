"""Make a task from a data set: split the rows once, corrupt the training labels, keep the true labels separate."""

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from scipy.special import chdtrc
from torch import Generator, Tensor

from warpi.data.dataset import Dataset
from warpi.data.numeric import Features
from warpi.data.overlap import check_disjoint, labels_in, mark_shared_once
from warpi.data.split import Split, group_by_class, leave_out
from warpi.errors import UserError, format_count
from warpi.noise.noise_file import hash_labels
from warpi.noise.parse import Noise
from warpi.utils.seeding import generator

log = logging.getLogger("warpi.training")
_ROWS_AT_ONCE = 50_000


@dataclass(frozen=True, eq=False)
class Task:
    """Everything a method may see."""

    train: Split  # with given labels, some of them wrong
    meta: Split | None  # trusted examples
    val: Split | None  # held out from the noisy rows, with equally noisy labels
    classes: tuple[str, ...]
    noise_rate: float | None = None  # oracle knowledge, only for methods with `needs_noise_rate`
    meta_given: Tensor | None = None  # [n] labels of the trusted examples before they were checked, -1 unknown
    before_audit: Tensor | None = None  # [N] labels of the training rows that an audit replaced, -1 for other rows

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train.examples.shape

    @property
    def device(self) -> torch.device:
        return self.train.y.device

    def to(self, device: torch.device | str) -> "Task":
        """Move to a device. Splits that share the examples of the training rows still share them."""
        train = self.train.to(device)

        def move(split: Split | None) -> Split | None:
            moved = split and split.to(device)
            shares = split is not None and split.examples is self.train.examples
            return replace(moved, examples=train.examples) if moved and shares else moved

        return replace(self, train=train, meta=move(self.meta), val=move(self.val))


@dataclass(frozen=True, eq=False)
class Truth:
    """What evaluation and reports may see, but methods may not."""

    test: Split | None
    test_is_clean: bool  # False: the test labels may be wrong, because the true ones are unknown
    clean: Tensor | None  # [N] true labels of the training rows, -1 if unknown or (open set) outside the classes
    T: Tensor | None  # [K, K] transition matrix of the noise, rows = true class
    noise_hash: str  # hash of the corrupted labels of all rows, the same as in the file of `warpi corrupt`
    n_repeated: int = 0  # rows of the data that are also trusted examples and are used only as such

    def to(self, device: torch.device | str) -> "Truth":
        return replace(self, test=self.test and self.test.to(device))


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
    """Split the rows once into train, meta, val and test, without overlap, and corrupt train and val.

    The trusted examples are the first of these that exists: `meta_data`; the trusted set that comes with the data; the
    rows that the data marks as trusted; `meta` rows held out from a data set with known true labels, the same number
    per class. `meta` also limits the first three, class by class; 0 means no trusted examples. `val` is a stratified
    fraction of the remaining rows and is corrupted like the training rows. `test` is the fraction held out if the data
    has no test set. `limit` is the largest number of rows to use, of the data and of its test set. Noise is drawn for
    all rows of the data set, so that `warpi corrupt` with the same seed gives the same labels. `other` provides inputs
    for open-set noise.
    """
    noise = Noise.parse(noise) if isinstance(noise, str) else noise
    rows = split_rows(dataset, meta=meta, val=val, test=test, limit=limit, seed=seed, meta_data=meta_data)
    task, truth = corrupt(dataset, noise, rows, seed, other)
    if limit is not None and dataset.test is not None and truth.test is not None:
        n = len(truth.test)
        kept, _ = _draw_stratified(torch.arange(n), truth.test.y, limit / n, generator(seed, "split", "test"))
        truth = replace(truth, test=truth.test.subset(kept))
    check_task(task, held_out=bool(len(rows.test) + len(rows.val)))
    return task, truth


class Rows(NamedTuple):
    """Row numbers of the parts of a data set, without overlap."""

    train: Tensor
    val: Tensor
    test: Tensor
    meta: Tensor
    trusted: Split | None  # trusted examples that are not rows of the data set
    trusted_given: Tensor | None  # labels of `trusted` before they were checked, -1 unknown
    n_repeated: int  # number of rows that were omitted because they are also in `trusted`


def split_rows(
    dataset: Dataset, meta: int | None, val: float, test: float, limit: int | None, seed: int, meta_data: Dataset | None
) -> Rows:
    """Choose the rows of each part at random, stratified by class. See `make_task` for the arguments."""
    for name, share in (("val", val), ("test", test)):
        if not 0 <= share < 1:
            raise UserError(f"{name} must be a fraction of the rows in [0, 1), got {share}")
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")

    def rng(purpose: str) -> Generator:
        return generator(seed, "split", purpose)

    rows = torch.arange(len(dataset.y))
    if limit is not None:
        rows, _ = _draw_stratified(rows, dataset.truth, limit / len(rows), rng("limit"))
    trusted, trusted_given = _separate_trusted(dataset, meta_data, meta, rng("meta"))
    n_repeated = 0
    if trusted is not None:
        before = len(rows)
        trusted_given = trusted_given if trusted_given is not None else _find_given_labels(dataset, rows, trusted)
        rows = _drop_trusted(dataset, rows, trusted)
        n_repeated = before - len(rows)
    test_rows = rows[:0]
    if dataset.test is None:
        # Rows that a person has checked are too valuable for testing.
        pool = rows if dataset.trusted is None else rows[~dataset.trusted[rows]]
        test_rows, _ = _draw_stratified(pool, dataset.truth, test, rng("test"), leave=True)
        rows = leave_out(rows, test_rows)
    meta_rows = rows[:0] if trusted is not None else _trusted_rows(dataset, rows, meta, rng("meta"))
    val_rows, train_rows = _draw_stratified(leave_out(rows, meta_rows), dataset.truth, val, rng("val"), leave=True)
    if len(meta_rows) and not len(train_rows):
        which = "all" if len(meta_rows) == len(dataset.y) else f"{len(meta_rows)} of"
        raise UserError(
            f"{which} {len(dataset.y)} rows of {dataset.name} are trusted, so none is left to train on; trust "
            "only rows that somebody has checked, or none if no label was checked"
        )
    return Rows(train_rows, val_rows, test_rows, meta_rows, trusted, trusted_given, n_repeated)


def corrupt(dataset: Dataset, noise: Noise, rows: Rows, seed: int, other: Dataset | None = None) -> tuple[Task, Truth]:
    """Corrupt the labels (or the inputs) of the training and validation rows, and assemble the parts."""
    noisy = noise.apply(dataset, generator(seed, "noise"), other)
    if len(noisy.dropped):
        parts = {name: getattr(rows, name) for name in ("train", "val", "test")}
        rows = rows._replace(**{name: part[~torch.isin(part, noisy.dropped)] for name, part in parts.items()})
    examples = dataset.examples
    clean = dataset.clean
    if noisy.replaced is not None and other is not None:
        noisy_rows = torch.cat([rows.train, rows.val])
        replaced = noisy_rows[noisy.replaced[noisy_rows] >= 0]
        examples = examples.replace_inputs(replaced, other.examples, noisy.replaced[replaced])
        clean = None if clean is None else clean.index_fill(0, replaced, -1)  # none of the classes is right for them
    scale = examples.fit_scale(rows.train)
    if scale is not None:
        examples = examples.with_scale(scale)

    def part(rows: Tensor, y: Tensor) -> Split | None:
        return Split(examples, rows, y[rows]) if len(rows) else None

    def scaled(split: Split | None) -> Split | None:
        return split and replace(split, examples=split.examples.with_scale(scale) if scale else split.examples)

    test_y = dataset.truth
    if noise.kind == "given" and not dataset.truth_is_known:  # the given labels may be corrections of those in the data
        test_y = noisy.y if dataset.clean is None else torch.where(dataset.clean >= 0, dataset.clean, noisy.y)
    test_is_clean = dataset.test_is_clean
    if dataset.test is None and dataset.clean is not None:
        test_is_clean = bool((dataset.clean[rows.test] >= 0).all())
    train = Split(examples, rows.train, noisy.y[rows.train])
    clean = None if clean is None else clean[rows.train]
    noise_rate = None
    if clean is not None and dataset.truth_is_known:
        noise_rate = float((clean != train.y).double().mean())
    trusted = part(rows.meta, dataset.truth) or scaled(rows.trusted)
    test = part(rows.test, test_y) or scaled(dataset.test)
    noise_hash = hash_labels(noisy.y, noisy.replaced)
    given = rows.trusted_given if rows.trusted is not None else _given_of_rows(dataset, rows.meta)
    given = given if str(noise) == "given" else None  # otherwise the method does not learn from the labels in the data
    if noisy.unchecked is not None and rows.trusted is not None:  # labels that `warpi correct` wrote
        known = labels_in(rows.trusted, Split(dataset.examples, torch.arange(len(dataset.y)), noisy.unchecked))
        given = known if bool((known >= 0).any()) else None
    before = noisy.before_audit if noise.file else dataset.before_audit if str(noise) == "given" else None
    before = None if before is None else before[rows.train]
    return (
        Task(train, trusted, part(rows.val, noisy.y), dataset.classes, noise_rate, given, before),
        Truth(test, test_is_clean, clean, noisy.T, noise_hash, rows.n_repeated),
    )


def check_task(task: Task, held_out: bool) -> None:
    """Raise if a class has no examples; warn about data with too little to learn from."""
    known = task.train.y if task.meta is None else torch.cat([task.train.y.cpu(), task.meta.y.cpu()])
    _check_classes(known, task.classes, "the training rows", "drop them or add examples")
    if task.meta is not None:
        _warn_uneven(task.meta.y, task.train.y, task.classes)
        _warn_shifted(task.meta, task.train)
    _warn_few(task.train.y, task.classes, held_out)


def check_every_class(task: Task) -> None:
    """Raise if some class has no training example, or if there are trusted examples, but none of some class."""
    _check_classes(task.train.y, task.classes, "the training rows", "drop them or add examples")
    if task.meta is not None:
        _check_classes(task.meta.y, task.classes, "the trusted examples", "add at least one of each")


def _separate_trusted(
    dataset: Dataset, meta_data: Dataset | None, n: int | None, rng: Generator
) -> tuple[Split | None, Tensor | None]:
    """Trusted examples from `meta_data` or from the trusted set of the data, and their labels before the check."""
    if n == 0:
        return None, None
    trusted, given = dataset.meta, dataset.meta_given
    if meta_data is not None:
        pairs = (meta_data.classes, dataset.classes), (meta_data.examples.shape, dataset.examples.shape)
        for what, (got, wanted) in zip(("classes", "inputs of shape"), pairs, strict=True):
            if got != wanted:
                has = f"{meta_data.name} have {what} {got}, but the data has {wanted}"
                raise UserError(f"the trusted examples of {has}; use the same in both")
        trusted = Split(meta_data.examples, torch.arange(len(meta_data.y)), meta_data.truth)
        given = meta_data.given
    if trusted is None or n is None:
        return trusted, given
    kept = _draw_balanced(torch.arange(len(trusted)), trusted.y, n, dataset.classes, rng)
    return trusted.subset(kept), None if given is None else given[kept]


def _find_given_labels(dataset: Dataset, rows: Tensor, trusted: Split) -> Tensor | None:
    """The labels in the data set of trusted examples that come from elsewhere.

    None if they equal the trusted labels: the data set may have been corrected after the check.
    """
    given = labels_in(trusted, Split(dataset.examples, rows, dataset.y[rows]))
    has_errors = bool(((given >= 0) & (given != trusted.y)).any())
    return given if has_errors else None


def _given_of_rows(dataset: Dataset, rows: Tensor) -> Tensor | None:
    """The labels of rows of the data set before they were checked, if any is known."""
    given = dataset.given
    if given is None and dataset.clean is not None:
        given = torch.where(dataset.clean >= 0, dataset.y, -1)
    known = None if given is None else given[rows]
    return known if known is not None and bool((known >= 0).any()) else None


def _drop_trusted(dataset: Dataset, rows: Tensor, trusted: Split) -> Tensor:
    """The rows without those that are also trusted examples. They are neither used as noisy rows nor for testing.

    Rows with the same input as another row stay. If there are few possible inputs, they are probably other examples.
    Dropping those whose label agrees with the trusted one would then raise the noise rate.
    """
    repeated = mark_shared_once(Split(dataset.examples, rows, dataset.y[rows]), trusted)
    if repeated.all():
        raise UserError(
            f"all {len(rows)} rows of {dataset.name} are also among the trusted examples, so none is left to "
            "train on; pass only the checked rows as trusted"
        )
    if repeated.any():
        log.info("rows that also appear in the trusted set are used only as trusted examples: %d", int(repeated.sum()))
    rows = rows[~repeated]
    if dataset.test is not None:
        check_disjoint(trusted, dataset.test, Split(dataset.examples, rows, dataset.y[rows]))
    return rows


def _trusted_rows(dataset: Dataset, rows: Tensor, n: int | None, rng: Generator) -> Tensor:
    """Rows that the data marks as trusted, or n held-out rows if all true labels are known."""
    if n == 0:
        return rows[:0]
    if dataset.trusted is not None:
        pool = rows[dataset.trusted[rows]]
        return pool if n is None else _draw_balanced(pool, dataset.truth, n, dataset.classes, rng)
    if n is None:
        return rows[:0]
    if not dataset.truth_is_known:
        raise UserError(
            f"--meta {n} takes trusted examples from data whose true labels are known, but those of {dataset.name} are "
            "not; pass checked rows with --trusted FILE, or mark them in a column 'trusted'; if all labels are right, "
            "add them as the array 'clean' (.npz) or the column 'clean_label' (tables, image lists)"
        )
    return _draw_balanced(rows, dataset.truth, n, dataset.classes, rng)


def _draw_balanced(rows: Tensor, y: Tensor, n: int, classes: tuple[str, ...], rng: Generator) -> Tensor:
    """Draw n rows, the same number per class; classes drawn at random get the remainder."""
    if n < len(classes):
        raise UserError(f"--meta {n} cannot cover {len(classes)} classes; set it to at least {len(classes)}")
    extra = torch.randperm(len(classes), generator=rng)[: n % len(classes)].tolist()
    drawn = []
    for k, name in enumerate(classes):
        pool = rows[y[rows] == k]
        need = n // len(classes) + (k in extra)
        if len(pool) < need:
            has = f"class {name!r} needs {need} but has only {format_count(len(pool), 'candidate')}"
            raise UserError(f"cannot draw {n} balanced trusted examples: {has}; lower --meta")
        drawn.append(pool[torch.randperm(len(pool), generator=rng)[:need]])
    return torch.cat(drawn).sort().values


def _draw_stratified(
    rows: Tensor, y: Tensor, share: float, rng: Generator, *, leave: bool = False
) -> tuple[Tensor, Tensor]:
    """Draw the same fraction of the rows of each class. Returns the drawn and the other rows, in ascending order.

    The classes with the largest remainders are rounded up, so that the total is right. With `leave`, a class is not
    rounded up if that would take its last row.
    """
    groups = [group for group in group_by_class(rows, y) if len(group)]
    exact = [min(share, 1.0) * len(group) for group in groups]
    n_up = round(sum(exact)) - sum(map(int, exact))
    candidates = [k for k, group in enumerate(groups) if not leave or int(exact[k]) + 1 < len(group)]
    rounded_up = sorted(candidates, key=lambda k: int(exact[k]) - exact[k])[:n_up]
    drawn = [
        group[torch.randperm(len(group), generator=rng)[: int(exact[k]) + (k in rounded_up)]]
        for k, group in enumerate(groups)
    ]
    inside = torch.cat(drawn).sort().values if drawn else rows[:0]
    return inside, leave_out(rows, inside)


def _check_classes(y: Tensor, classes: tuple[str, ...], where: str, advice: str) -> None:
    counts = torch.bincount(y.cpu(), minlength=len(classes)).tolist()
    empty = [name for name, n in zip(classes, counts, strict=True) if not n]
    if empty:
        listed = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise UserError(f"{len(empty)} of {len(classes)} classes without an example in {where}: {listed}; {advice}")


def _warn_few(y: Tensor, classes: tuple[str, ...], held_out: bool) -> None:
    """Warn about classes with too few rows to learn from."""
    counts = torch.bincount(y.cpu(), minlength=len(classes)).tolist()
    few = [f"{n} of {name}" for name, n in zip(classes, counts, strict=True) if n < 5]
    if few:
        listed = ", ".join(few[:5]) + (", ..." if len(few) > 5 else "")
        after = ", after test and validation rows were held out" if held_out else ""
        log.warning("some classes have too few training rows to learn from (%s)%s", listed, after)


def _warn_uneven(trusted: Tensor, given: Tensor, classes: tuple[str, ...]) -> None:
    """Warn if the class frequencies of the trusted examples are neither uniform nor like those of the data.

    A few examples that were drawn at random are never quite even, so both differences must be significant.
    """
    n_trusted = torch.bincount(trusted.cpu(), minlength=len(classes)).double()
    n_given = torch.bincount(given.cpu(), minlength=len(classes)).double()
    if not bool(((n_trusted > 0) & (n_given > 0)).all()):  # methods say what a missing class means for them
        return
    relative = (n_trusted / n_trusted.sum()) / (n_given / n_given.sum())
    excess = torch.minimum(n_trusted[:, None] / n_trusted, relative[:, None] / relative)  # [K, K] class i over class j
    expected = [n_trusted.sum() * share for share in (n_given / n_given.sum(), torch.ones_like(n_given) / len(classes))]
    if excess.max() >= 3 and all(_differ(n_trusted, counts) for counts in expected):
        most, least = divmod(int(excess.argmax()), len(classes))
        log.warning(
            "the trusted examples are uneven (%d of %s, %d of %s), unlike the data; auto allows for it, but networks "
            "with a meta step get worse (WarPI by ten points on digits): check more of the rare ones",
            *(int(n_trusted[most]), classes[most], int(n_trusted[least]), classes[least]),
        )


def _differ(counts: Tensor, expected: Tensor) -> bool:
    """Whether the counts of classes differ from what is expected by more than chance (5 %)."""
    statistic = float(((counts - expected).square() / expected.clamp_min(1e-9)).sum())
    return bool(chdtrc(len(counts) - 1, statistic) < 0.05)


def _warn_shifted(trusted: Split, train: Split) -> None:
    """Warn if features of the trusted examples are outside the range of the data, for example in other units."""
    if not isinstance(trusted.examples, Features) or not isinstance(train.examples, Features):
        return
    mean = trusted.examples.x[trusted.rows].double().mean(0)
    low = torch.full_like(mean, torch.inf)
    high = torch.full_like(mean, -torch.inf)
    for rows in torch.split(train.rows, _ROWS_AT_ONCE):
        x = train.examples.x[rows].double()
        low = torch.minimum(low, x.amin(0))
        high = torch.maximum(high, x.amax(0))
        train.examples.release(rows)
    n_outside = int(((low < high) & ((mean < low) | (mean > high))).sum())
    if n_outside:
        log.warning(
            "in %d of %d features the mean of the trusted examples is outside the range of all noisy rows; do they "
            "have different units, or lack steps of a Pipeline (docs/estimator.md)?",
            *(n_outside, mean.numel()),
        )
