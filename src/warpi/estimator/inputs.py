"""What a scikit-learn user passes as X, to numbers, and the layer that makes of them what a network sees.

`Layout.of` decides, once, at the data to fit; `Layout.numbers` turns any X of that kind into one array or sparse
matrix; `Prepare` is a module, so that a stored or exported classifier takes these numbers as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch import Generator, Tensor, nn

from warpi.data.examples import Examples, Scale, TensorExamples
from warpi.data.numeric import make_features, needs_float64
from warpi.data.sparse import SparseExamples
from warpi.datasets.arrays import is_channels_last, make_images
from warpi.errors import UserError

_MAX_CATEGORIES = 1000
_NUMBERS = {"integer", "floating", "mixed-integer-float", "decimal", "boolean"}  # as pandas calls what objects are
Category = str | int | float | bool


@dataclass(frozen=True)
class Layout:
    """How examples lie in X."""

    kind: Literal["features", "columns", "sparse", "as given", "grey", "channels first", "channels last"]
    shape: tuple[int, ...]  # of one example in X; of `columns` their number
    categories: tuple[tuple[Category, ...] | None, ...] = ()  # of each column; None: a number
    pixels: bool = False  # bytes, 0..255
    double: bool = False  # float32 is too coarse for the features

    @classmethod
    def of(cls, X: Any, own_net: bool) -> "Layout":
        """The layout of a validated array, a sparse matrix, or a table with columns of text.

        Arrays of four dimensions are images, those of three grey images, or whatever a network of the user's own makes
        of them.
        """
        if is_table(X):
            categories = tuple(_categories(X.iloc[:, j], name) for j, name in enumerate(X.columns))
            numbers = (_column(X.iloc[:, j], X.columns[j], None) for j, names in enumerate(categories) if names is None)
            return cls("columns", (len(categories),), categories, double=any(map(needs_float64, numbers)))
        shape = tuple(X.shape[1:])
        if issparse(X):
            return cls("sparse", shape)
        if X.ndim == 2:
            return cls("features", shape, double=needs_float64(X))
        if X.ndim == 4:
            _refuse_alpha(shape)
            return cls(
                "channels last" if is_channels_last(X.shape) else "channels first", shape, (), X.dtype == np.uint8
            )
        if X.ndim == 3 and not (own_net and X.dtype != np.uint8):
            return cls("grey", shape, (), X.dtype == np.uint8)
        return cls("as given", shape, double=needs_float64(X))

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Layout":
        categories = tuple(None if names is None else tuple(names) for names in stored["categories"])
        return cls(stored["kind"], tuple(stored["shape"]), categories, stored["pixels"], stored.get("double", False))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def numbers(self, X: Any) -> Any:
        """X as numbers: float32 [N, ...] or, where that is too coarse, float64 (bytes stay bytes), or as sparse as it
        came; categories by position."""
        kind = np.dtype(np.uint8 if self.pixels else np.float64 if self.double else np.float32)
        if self.kind == "columns":
            pairs = zip(X.columns, self.categories, strict=True)
            columns = [_column(X.iloc[:, j], name, names) for j, (name, names) in enumerate(pairs)]
            return np.stack(columns, axis=1).astype(kind)  # [N, columns]
        if tuple(X.shape[1:]) != self.shape:
            got, want = (["N", *shape] for shape in (X.shape[1:], self.shape))
            raise UserError(f"X has the shape {got}, the classifier was fitted on {want}; give it the same form")
        if (X.dtype == np.uint8) != self.pixels:
            raise UserError(f"X holds {X.dtype}, the classifier was fitted on {kind}; give it the same")
        _refuse_huge(X, "")
        return X.astype(kind, copy=False)

    def examples(self, X: Any, augment: bool) -> Examples:
        """Numbers as what a task holds."""
        if self.kind == "sparse":
            return SparseExamples.of(X, augment)
        x = arranged(torch.tensor(X if isinstance(X, np.ndarray) else X.toarray()), self).contiguous()
        if self.kind in ("features", "columns", "as given"):
            return make_features(x)
        held = make_images(x)
        return held if augment else TensorExamples(held.x, held.scale)

    def sample(self, n: int, scale: Scale, generator: Generator) -> Tensor:
        """Made-up numbers of about the right size, to compare two forms of one classifier on."""
        if self.pixels:
            return torch.randint(256, (n, *self.shape), generator=generator, dtype=torch.uint8)
        mean, std = scale.mean.cpu(), scale.std.cpu().nan_to_num(posinf=1.0)  # infinite: a constant column
        x = torch.randn((n, *self.shape), generator=generator).to(mean.dtype)
        if self.kind != "columns":
            alike = mean.shape == x.shape[1:]  # else one number, or one a channel, wherever that lies
            return x * (std if alike else std.mean()) + (mean if alike else mean.mean())
        place = 0  # of the column among the features
        for j, names in enumerate(self.categories):
            if names is None:
                x[:, j] = x[:, j] * std[place] + mean[place]
            else:
                x[:, j] = torch.randint(len(names), (n,), generator=generator)
            place += 1 if names is None else len(names)
        return x


class Prepare(nn.Module):
    """Numbers of a layout to what the network sees: channels first, a feature a category, standardised."""

    def __init__(self, layout: Layout, scale: Scale) -> None:
        super().__init__()
        self.layout = layout
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", scale.mean.clone())
        self.register_buffer("std", scale.std.clone())

    def forward(self, x: Tensor) -> Tensor:
        return ((arranged(x, self.layout).to(self.mean.dtype) - self.mean) / self.std).float()


def arranged(x: Tensor, layout: Layout) -> Tensor:
    """The dimensions as a network wants them: [N, D], [N, C, H, W], or as they are."""
    if layout.kind == "grey":
        return x[:, None]
    if layout.kind == "channels last":
        return x.permute(0, 3, 1, 2)
    if layout.kind != "columns":
        return x
    parts = [
        x[:, j : j + 1] if names is None else (x[:, j : j + 1] == torch.arange(len(names), device=x.device)).to(x.dtype)
        for j, names in enumerate(layout.categories)
    ]
    return torch.cat(parts, dim=1)


# --- tables -----------------------------------------------------------------------------------------------------------


def is_table(X: Any) -> bool:
    """A pandas frame of which not every column is a number."""
    return hasattr(X, "iloc") and hasattr(X, "columns") and not all(_is_number(X.iloc[:, j]) for j in range(X.shape[1]))


def _is_number(column: Any) -> bool:
    import pandas as pd

    dtype = column.dtype
    if pd.api.types.is_object_dtype(dtype):  # numbers may be held so, after a concat, say: they are no categories
        return pd.api.types.infer_dtype(column) in _NUMBERS
    return pd.api.types.is_numeric_dtype(dtype) and not isinstance(dtype, pd.CategoricalDtype)  # booleans count as such


def _categories(column: Any, name: object) -> tuple[Category, ...] | None:
    """The values a column may have: those its type declares, else those that occur, in order."""
    if _is_number(column):
        return None
    declared = getattr(column.dtype, "categories", None)
    try:
        found = column.dropna().unique().tolist() if declared is None else declared.tolist()
        names: list[Any] = found if declared is not None else sorted(found)
    except TypeError as e:  # values that cannot be hashed, or compared with one another
        raise UserError(f"column {name!r} of X cannot be taken as categories ({e}); make it text or numbers") from e
    for value in names:
        if not isinstance(value, str | int | float | bool):
            raise UserError(
                f"column {name!r} of X holds {type(value).__name__}; allowed are numbers, text and true/false: "
                "convert the column or drop it"
            )
    if len(names) > _MAX_CATEGORIES:
        raise UserError(
            f"column {name!r} of X has {len(names)} categories, at most {_MAX_CATEGORIES} are encoded; drop it, or "
            "encode it before (TargetEncoder, HashingVectorizer)"
        )
    return tuple(names)


def _column(column: Any, name: object, names: Sequence[Category] | None) -> NDArray[np.float64]:
    """[N] numbers, or positions among the categories."""
    blank = column.isna().to_numpy(dtype=bool)
    if blank.any():
        raise ValueError(f"Input X contains NaN: column {name!r}, row {int(blank.argmax())}; fill it or drop the row")
    if names is not None:
        index = {value: k for k, value in enumerate(names)}
        values = column.tolist()
        for row, value in enumerate(values):
            if value not in index:
                raise UserError(
                    f"column {name!r} of X, row {row}: {value!r} did not occur when the classifier was fitted; declare "
                    "all values (pandas dtype 'category'), or put a OneHotEncoder(handle_unknown='ignore') before it"
                )
        return np.array([index[value] for value in values], dtype=np.float64)
    try:
        numbers: NDArray[np.float64] = column.to_numpy(dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise UserError(f"column {name!r} of X held numbers when the classifier was fitted, got {column.dtype}") from e
    _refuse_huge(numbers, f"column {name!r}, ")
    return numbers


# --- what cannot be used ----------------------------------------------------------------------------------------------


def refuse_texts(X: Any) -> None:
    """Texts are not taken for numbers that went wrong. A ValueError, as scikit-learn has it."""
    one = (
        getattr(X, "ndim", 1) == 1 and hasattr(X, "__len__") and not isinstance(X, str | bytes | Mapping) and len(X) > 0
    )
    if one and isinstance(next(iter(X)), str):
        raise ValueError(
            "X holds texts, numbers are expected; put a vectoriser before it: "
            "make_pipeline(TfidfVectorizer(), NoisyLabelClassifier())"
        )


def _refuse_huge(X: Any, where: str) -> None:
    sparse: bool = issparse(X)
    places = X.tocoo() if sparse else None
    huge = ~(np.abs(X if places is None else places.data) <= np.finfo(np.float32).max)  # NaN too
    if huge.any():
        first = int(np.argwhere(huge)[0, 0])
        row = first if places is None else places.row[first]
        raise ValueError(f"Input X contains infinity or a value too large for float32: {where}row {row}")


def _refuse_alpha(shape: tuple[int, ...]) -> None:
    """[H, W, 4] or [H, W, 2]: with transparency. Taken as [C, H, W] it would have as many channels as it has rows."""
    height, width, channels = shape
    if height == width > channels and channels in (2, 4):
        raise UserError(
            f"X has the shape {['N', *shape]}, which looks like [N, H, W, C] with C {channels}; allowed are "
            "[N, H, W, C] with C 1 or 3, and [N, C, H, W]: leave transparency out (X[..., :-1]), or move the channels "
            "(X.transpose(0, 3, 1, 2))"
        )


def refuse_blanks(y: Any, name: str) -> None:
    """Labels that are None, pandas' NA, or NaN among texts: the error names the first."""
    labels = np.asarray(y, dtype=object) if y is not None and not issparse(y) else np.zeros(0)
    if (
        labels.dtype != object or getattr(getattr(y, "dtype", None), "kind", "O") in "fiub"
    ):  # numbers are checked by others
        return
    for row, label in enumerate(labels.ravel().tolist()):
        if (
            label is None
            or type(label).__name__ in ("NAType", "NaTType")
            or (isinstance(label, float) and label != label)
        ):
            raise ValueError(f"{name}, row {row}: the label is missing ({label!r}); drop the row, or have it labelled")
