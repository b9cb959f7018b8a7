"""Data sets, and inputs to predict, as the readers return them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from warpi.data.examples import Examples
from warpi.data.split import Split
from warpi.errors import UserError


class Files(NamedTuple):
    """The image files of a data set."""

    root: str
    paths: Sequence[str]  # [N] relative to root, or absolute
    top: str | None = None  # the folder that was given as the data, if it contains root


class NewInputs(NamedTuple):
    """Inputs to predict."""

    examples: Examples
    labels: Mapping[str, Tensor]  # known labels by the name of their column; each [N], -1 unknown
    paths: Sequence[str] | None = None  # [N] of image files, as they were listed
    rows: Tensor | None = None  # [N] their positions in the new data if some were omitted; None: 0..N-1
    unread: int = 0  # number of inputs that were omitted because they cannot be read


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs, their given labels, and what is known about the true labels.

    `clean` contains true labels, -1 if unknown. `trusted` marks rows that a person has checked. The true label of such
    a row is `clean` if that is known, and the given label otherwise. A trusted row whose label was corrected in place
    may still have its earlier label in `given`. `label_sets` are further labels of the same rows by name, for
    `--noise given:NAME` (CIFAR-N).
    """

    name: str
    examples: Examples
    y: Tensor  # [N] int64 given labels, 0..K-1
    classes: tuple[str, ...]  # K names
    clean: Tensor | None = None  # [N] int64 true labels, -1 unknown; None: all unknown
    trusted: Tensor | None = None  # [N] bool; None: not known
    meta: Split | None = None  # trusted examples that form a separate set
    test: Split | None = None  # None: some of the rows are held out
    test_is_clean: bool = False  # whether the labels of `test` are known to be right
    superclass: Tensor | None = None  # [K] for `hierarchical` and `asymmetric` noise
    label_sets: Mapping[str, Tensor] = field(default_factory=dict)  # each [N]
    encoding: object = None  # how columns become features, to read a second file in the same way
    files: Files | None = None  # set for image files, even if they are kept in memory
    given: Tensor | None = None  # [N] int64 labels before a person checked them, -1 unknown; None: all unknown
    meta_given: Tensor | None = None  # the same for the rows of `meta`
    before_audit: Tensor | None = None  # [N] labels that an audit replaced, -1 for other rows; None: none
    before_person: Tensor | None = None  # the same for a person

    def __post_init__(self) -> None:
        check_labels(self.y, len(self.examples), self.n_classes, f"labels of {self.name}")
        if self.clean is not None:
            check_labels(self.clean.clamp(min=0), len(self.y), self.n_classes, f"true labels of {self.name}")
        if self.trusted is not None and (self.trusted.shape != self.y.shape or self.trusted.dtype != torch.bool):
            shape = f"{self.trusted.dtype} {list(self.trusted.shape)}"
            raise UserError(f"trusted rows of {self.name}: got {shape} for {len(self.y)} examples; pass one bool each")
        meta_y = self.meta.y if self.meta else None
        for earlier, rows in (
            (self.given, self.y),
            (self.before_audit, self.y),
            (self.before_person, self.y),
            (self.meta_given, meta_y),
        ):
            if earlier is not None:
                n = 0 if rows is None else len(rows)
                check_labels(earlier.clamp(min=0), n, self.n_classes, f"labels of {self.name} before they were checked")
        for name, labels in self.label_sets.items():
            check_labels(labels, len(self.examples), self.n_classes, f"label set {name!r} of {self.name}")
        for split, what in ((self.meta, "trusted examples"), (self.test, "test set")):
            if split is not None:
                check_labels(split.y, len(split.rows), self.n_classes, f"{what} of {self.name}")

    @classmethod
    def from_parts(
        cls,
        name: str,
        parts: Mapping[str, tuple[Examples, Tensor]],
        classes: tuple[str, ...],
        *,
        clean: Tensor | None = None,
        trusted: Tensor | None = None,
        test_is_clean: bool = False,
        encoding: object = None,
        files: Files | None = None,
        given: Tensor | None = None,
        meta_given: Tensor | None = None,
        before_audit: Tensor | None = None,
        before_person: Tensor | None = None,
    ) -> "Dataset":
        """Make a data set from the inputs and labels of `train` and, if present, `test` and `trusted`.

        `clean`, `trusted`, `given`, `before_audit` and `before_person` [N] describe the training rows, `meta_given` the
        trusted ones. If `trusted` is None and only some rows have a clean label, these rows are the trusted ones.
        """
        clean = _if_any_known(clean)
        if trusted is None and clean is not None and bool((clean < 0).any()):
            trusted = clean >= 0
        splits = {part: Split(examples, torch.arange(len(y)), y) for part, (examples, y) in parts.items()}
        train = splits["train"]
        return cls(
            name,
            train.examples,
            train.y,
            classes,
            clean,
            trusted,
            meta=splits.get("trusted"),
            test=splits.get("test"),
            test_is_clean=test_is_clean,
            encoding=encoding,
            files=files,
            given=_if_any_known(given),
            meta_given=_if_any_known(meta_given),
            before_audit=_if_any_known(before_audit),
            before_person=_if_any_known(before_person),
        )

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def truth(self) -> Tensor:
        """The best known labels: the true label if there is one, else the given one.  [N]"""
        return self.y if self.clean is None else torch.where(self.clean >= 0, self.clean, self.y)

    @property
    def truth_is_known(self) -> bool:
        """Whether every row has a true label."""
        return self.clean is not None and bool((self.clean >= 0).all())


def _if_any_known(labels: Tensor | None) -> Tensor | None:
    return None if labels is None or bool((labels < 0).all()) else labels


def check_labels(y: Tensor, n: int, n_classes: int, what: str) -> None:
    """Raise an error unless there is one integer label in 0..K-1 per example. The error names the first bad row."""
    if y.ndim != 1 or len(y) != n:
        raise UserError(f"{what}: got {tuple(y.shape)} labels for {n} examples; pass exactly one label per example")
    if y.dtype.is_floating_point:
        raise UserError(f"{what}: labels must be integers, got {y.dtype}")
    if n == 0:
        raise UserError(f"{what}: no examples")
    bad = (y < 0) | (y >= n_classes)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise UserError(f"{what}: row {row} has label {int(y[row])}, but labels must be in 0..{n_classes - 1}")
