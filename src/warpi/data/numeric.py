"""Numeric features: stored at the precision they need, standardized with the training rows."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.examples import Scale, TensorExamples, check_form

ROUNDING = 1e-14  # a standard deviation below this fraction of the largest value is rounding error of float64
_TOLERANCE = 1e-4  # largest change by float32, as a fraction of the standard deviation of the column
_AT_ONCE = 10**7  # number of values processed together


@dataclass(frozen=True)
class Columns:
    """How the columns of a table become features. Stored with the data set, to read a second table in the same way."""

    label: str
    categories: Mapping[str, tuple[str, ...] | None]  # feature columns in order -> their categories; None: numeric
    drop: tuple[str, ...] = ()  # columns that are ignored
    double: bool = False  # whether the numbers need float64


@dataclass(frozen=True, eq=False)
class Features(TensorExamples):
    """Numbers whose scale is computed from the training rows: [N, D], or any shape that a custom network accepts.

    They are stored, compared and scaled in float64 if float32 is too coarse for them (`needs_float64`). A network sees
    float32 in either case.
    """

    columns: Columns | None = None  # of the table that they were read from

    def fit_scale(self, rows: Tensor) -> Scale:
        """Mean and standard deviation over `rows`.

        A column that is constant in `rows` gets an infinite deviation, so that it is also zero in all other rows: the
        weights of such a column are never trained.
        """
        x = self.x[rows].double()
        std = x.std(0, correction=0)
        varies = std > ROUNDING * x.abs().amax(0)
        return Scale(x.mean(0).to(self.scale.mean), torch.where(varies, std, torch.inf).to(self.scale.std))

    def _normalize(self, x: Tensor) -> Tensor:
        return super()._normalize(x).to(torch.get_default_dtype())

    def form(self) -> dict[str, Any]:
        return {**(super().form() or {}), "features": True, "columns": asdict(self.columns) if self.columns else None}

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        columns = None if form["columns"] is None else Columns(**form["columns"])
        features = replace(super().from_form({**form, "crop": None}), columns=columns)
        if columns is not None:
            _check_columns(columns, tuple(features.x.shape[1:]))
        return features


class Originals(NamedTuple):
    """The image files or texts that vectors were computed from."""

    values: tuple[str, ...]  # [N] paths, or texts
    root: str | None = None  # the folder in which the paths start; None: these are texts


@dataclass(frozen=True, eq=False)
class Embedded(Features):
    """Vectors that a pretrained model computed from images or texts (`datasets.embedding`).

    `embedder` identifies the model, so that new images or texts are embedded in the same way: `name`, `sha256` (of its
    weights), `kind` ("images" or "texts") and `image_size`; `label` and `text` are the columns of a table.
    """

    embedder: Mapping[str, Any] = field(default_factory=dict)
    originals: Originals | None = None  # None: not known
    hashes: NDArray[np.uint8] | None = None  # [N, 32] SHA-256 of the content of each image file or text

    def form(self) -> dict[str, Any]:
        return {**super().form(), "embedder": dict(self.embedder)}

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        embedder = dict(form["embedder"])
        texts = [embedder[name] for name in ("name", "sha256", "kind")]
        check_form(all(isinstance(text, str) for text in texts), "embedder", embedder)
        return replace(super().from_form(form), embedder=embedder)


def _check_columns(columns: Columns, shape: tuple[int, ...]) -> None:
    texts = [columns.label, *columns.drop, *columns.categories]
    width = 0
    for names in columns.categories.values():
        check_form(names is None or (isinstance(names, tuple) and len(names) > 0), "categories", names)
        texts.extend(names or ())
        width += 1 if names is None else len(names)
    check_form(all(isinstance(text, str) for text in texts) and shape == (width,), "columns", texts)


def make_features(x: Tensor, columns: Columns | None = None) -> Features:
    """Features that are not scaled yet."""
    kind = torch.promote_types(x.dtype, torch.get_default_dtype())
    return Features(x, Scale(torch.tensor(0.0, dtype=kind), torch.tensor(1.0, dtype=kind)), columns=columns)


def needs_float64(x: NDArray[Any]) -> bool:
    """Whether float32 is too coarse for finite numbers [N, ...].

    This is the case if the values of a column are tiny, or differ little compared to their distance from zero.
    """
    if x.dtype in (np.float32, np.float16, np.uint8, np.bool_) or not x.size:
        return False
    columns = x.reshape(len(x), -1)
    step = max(1, _AT_ONCE // len(x))
    return any(_loses_digits(columns[:, at : at + step].astype(np.float64)) for at in range(0, columns.shape[1], step))


@np.errstate(over="ignore", invalid="ignore")  # other code rejects numbers that are too large
def _loses_digits(x: NDArray[np.float64]) -> bool:
    moved = np.abs(x - x.astype(np.float32)).max(0)  # [D]
    if not moved.any():
        return False
    std = x.std(0)
    return bool(((moved > _TOLERANCE * std) & (std > ROUNDING * np.abs(x).max(0))).any())
