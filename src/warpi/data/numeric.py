"""Columns of numbers: held in as many digits as they need, standardised by the training rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.examples import Scale, TensorExamples

ROUNDING = 1e-14  # a deviation below this share of the largest number is no more than float64 makes of a constant
_BLUR = 1e-4  # by how much of the deviation of its column float32 may move a number
_AT_ONCE = 10**7  # numbers that are looked at together


@dataclass(frozen=True)
class Columns:
    """How the columns of a table became features. Kept with the data set, so that a second table is read alike."""

    label: str
    categories: Mapping[str, tuple[str, ...] | None]  # feature column, in order -> its categories; None: a number
    drop: tuple[str, ...] = ()  # columns that were left out
    double: bool = False  # float32 is too coarse for the numbers


@dataclass(frozen=True, eq=False)
class Features(TensorExamples):
    """Numbers whose scale is learned from the training rows: [N, D], or whatever a network of the user's own takes.

    They are stored, compared and scaled in float64 if float32 is too coarse for them (`needs_float64`). A network sees
    float32 in either case.
    """

    standardise: bool = True
    columns: Columns | None = None  # of the table they came from

    def fit_scale(self, rows: Tensor) -> Scale:
        """A column that is constant in `rows` is zero in all others, by an infinite deviation: what a network would
        make of another value is chance, for its weights there are as they were drawn."""
        x = self.x[rows].double()
        std = x.std(0, correction=0)
        varies = std > ROUNDING * x.abs().amax(0)
        return Scale(x.mean(0).to(self.scale.mean), torch.where(varies, std, torch.inf).to(self.scale.std))

    def _normal(self, x: Tensor) -> Tensor:
        return super()._normal(x).to(torch.get_default_dtype())


def make_features(x: Tensor, columns: Columns | None = None) -> Features:
    kind = torch.promote_types(x.dtype, torch.get_default_dtype())
    return Features(x, Scale(torch.tensor(0.0, dtype=kind), torch.tensor(1.0, dtype=kind)), columns=columns)


def needs_float64(x: NDArray[Any]) -> bool:
    """Whether float32 is too coarse for finite numbers [N, ...]: a column far from zero for its deviation, or tiny."""
    if x.dtype in (np.float32, np.float16, np.uint8, np.bool_) or not x.size:
        return False
    columns = x.reshape(len(x), -1)
    step = max(1, _AT_ONCE // len(x))
    return any(_loses_digits(columns[:, at : at + step].astype(np.float64)) for at in range(0, columns.shape[1], step))


@np.errstate(over="ignore", invalid="ignore")  # what is too large is refused elsewhere
def _loses_digits(x: NDArray[np.float64]) -> bool:
    moved = np.abs(x - x.astype(np.float32)).max(0)  # [D]
    if not moved.any():
        return False
    std = x.std(0)
    return bool(((moved > _BLUR * std) & (std > ROUNDING * np.abs(x).max(0))).any())
