"""What every reader returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from warpi.data.examples import Examples
from warpi.data.split import Split
from warpi.errors import UserError


class Files(NamedTuple):
    """Where the rows of a data set of images lie."""

    root: str
    paths: tuple[str, ...]  # [N] relative to root, or absolute


class NewInputs(NamedTuple):
    """Inputs to be predicted."""

    examples: Examples
    labels: Mapping[str, Tensor]  # what they were labelled with, by the name of the column; each [N], -1 unknown
    paths: tuple[str, ...] | None = None  # [N] of image files, as they were listed


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set as it was read: inputs, the labels they were given, and what is known about the truth.

    `clean` holds true labels, -1 where the truth of a row is unknown. `trusted` marks rows that a person has checked:
    the truth of such a row is `clean` where that is known and the given label otherwise. `label_sets` are other
    people's labels of the same rows by name, for `--noise given:NAME` (CIFAR-N).
    """

    name: str
    examples: Examples
    y: Tensor  # [N] int64 given labels, 0..K-1
    classes: tuple[str, ...]  # K names
    clean: Tensor | None = None  # [N] int64 true labels, -1 unknown; None: nothing is known
    trusted: Tensor | None = None  # [N] bool; None: the data set does not say
    meta: Split | None = None  # trusted examples that come in a set of their own
    test: Split | None = None  # None: a part of the rows is held out
    test_is_clean: bool = False  # whether the labels of `test` are known to be right
    superclass: Tensor | None = None  # [K] for `hierarchical` and `asymmetric` noise
    label_sets: Mapping[str, Tensor] = field(default_factory=dict)  # each [N]
    encoding: object = None  # how a reader made features out of columns, so that it can read a second file alike
    files: Files | None = None  # of image files, also where these are held in memory

    def __post_init__(self) -> None:
        check_labels(self.y, len(self.examples), self.n_classes, f"labels of {self.name}")
        if self.clean is not None:
            check_labels(self.clean.clamp(min=0), len(self.y), self.n_classes, f"true labels of {self.name}")
        if self.trusted is not None and (self.trusted.shape != self.y.shape or self.trusted.dtype != torch.bool):
            got = f"{self.trusted.dtype} {list(self.trusted.shape)}"
            raise UserError(f"trusted rows of {self.name}: got {got} for {len(self.y)} examples; give one bool a row")
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
        verified: Tensor | None = None,
        test_is_clean: bool = False,
        encoding: object = None,
        files: Files | None = None,
    ) -> "Dataset":
        """Put together what a reader found: inputs and labels of train and, where there are such, of test and meta.

        `clean` and `verified` [N] are about train. Where nothing says which rows a person has checked, but some have
        a clean label and some have none, those that have one are the checked ones.
        """
        if clean is not None and bool((clean < 0).all()):
            clean = None
        if verified is None and clean is not None and bool((clean < 0).any()):
            verified = clean >= 0
        held = {part: Split(examples, torch.arange(len(y)), y) for part, (examples, y) in parts.items()}
        train = held["train"]
        return cls(
            name,
            train.examples,
            train.y,
            classes,
            clean,
            verified,
            meta=held.get("meta"),
            test=held.get("test"),
            test_is_clean=test_is_clean,
            encoding=encoding,
            files=files,
        )

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def truth(self) -> Tensor:
        """The best that is known: the true label where there is one, else the given one.  [N]"""
        return self.y if self.clean is None else torch.where(self.clean >= 0, self.clean, self.y)

    @property
    def truth_is_known(self) -> bool:
        """Whether every row has a true label."""
        return self.clean is not None and bool((self.clean >= 0).all())


def check_labels(y: Tensor, n: int, n_classes: int, what: str) -> None:
    """Labels must be one whole number in 0..K-1 a row; the error names the first row that is not."""
    if y.ndim != 1 or len(y) != n:
        raise UserError(f"{what}: got {tuple(y.shape)} labels for {n} examples; give exactly one label an example")
    if y.dtype.is_floating_point:
        raise UserError(f"{what}: labels must be whole numbers, got {y.dtype}")
    if n == 0:
        raise UserError(f"{what}: no examples")
    bad = (y < 0) | (y >= n_classes)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise UserError(f"{what}: row {row} has label {int(y[row])}, allowed are 0..{n_classes - 1}")
