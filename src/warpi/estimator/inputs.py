"""Convert X as scikit-learn users pass it to numbers, and the numbers to the input of a network.

`Layout.of` chooses the layout once, for the data in `fit`. `Layout.numbers` converts any X with this layout to one
array or sparse matrix; `frames` reads the columns of frames. `Prepare` is a module, so that a stored or exported
classifier takes these numbers directly.

Missing numbers stay NaN until `arrange` replaces them by the median of the column and adds one feature per column that
had missing numbers in `fit`. Missing categories are a separate category.
"""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from torch import Generator, Tensor, nn

from warpi.data.examples import Examples, Scale, TensorExamples
from warpi.data.numeric import DateColumn, NumberColumn, make_features, needs_float64
from warpi.data.sparse import SparseExamples
from warpi.datasets.arrays import is_channels_last, make_images
from warpi.datasets.labels import bare_name
from warpi.errors import UserError
from warpi.estimator import frames
from warpi.estimator.frames import Category, Parsed

log = logging.getLogger("warpi.estimator")


@dataclass(frozen=True)
class Layout:
    """How examples are arranged in X."""

    kind: Literal["features", "columns", "sparse", "as given", "grey", "channels first", "channels last"]
    shape: tuple[int, ...]  # of one example in X; for `columns`, the number of columns
    categories: tuple[tuple[Category, ...] | None, ...] = ()  # of each column; None: it has none
    pixels: bool = False  # bytes, 0..255
    double: bool = False  # whether the features need float64
    fill: tuple[float, ...] = ()  # replacements for missing numbers, one per column of X; empty: none can be missing
    indicated: tuple[int, ...] = ()  # columns whose missing numbers also become a feature
    parsed: tuple[Parsed | None, ...] = ()  # how columns of dates, or of numbers as text, are read; empty: no column
    pooled: tuple[int, ...] = ()  # columns with so many categories that rare ones count as unknown

    @classmethod
    def of(cls, X: Any, custom_net: bool) -> "Layout":
        """The layout of a validated array, a sparse matrix, or a data frame with columns that are not numeric.

        Arrays of four dimensions are images, those of three are gray images or the input of a custom network.
        """
        if frames.has_non_numeric_columns(X):
            return cls._of_table(X)
        shape = tuple(X.shape[1:])
        if issparse(X):
            return cls("sparse", shape)
        if X.ndim == 2:
            means, indicated = _choose_fill(X)
            double = needs_float64(np.where(np.isnan(X), means, X)) if indicated else needs_float64(X)
            return cls("features", shape, double=double, fill=tuple(means.tolist()), indicated=indicated)
        if X.ndim == 4:
            _refuse_alpha(shape)
            last = is_channels_last(X.shape)
            return cls("channels last" if last else "channels first", shape, (), X.dtype == np.uint8)
        if X.ndim == 3 and not (custom_net and X.dtype != np.uint8):
            return cls("grey", shape, (), X.dtype == np.uint8)
        return cls("as given", shape, double=needs_float64(X))

    @classmethod
    def _of_table(cls, X: Any) -> "Layout":
        categories: list[tuple[Category, ...] | None] = []
        parsed: list[Parsed | None] = []
        fill: list[float] = []
        indicated: list[int] = []
        pooled: list[int] = []
        double = False
        for j, name in enumerate(X.columns):
            column = X.iloc[:, j]
            parsed.append(frames.detect_format(column, name))
            is_category = parsed[-1] is None and not frames.is_numeric(column)
            categories.append(frames.find_categories(column, name) if is_category else None)
            if (names := categories[-1]) is not None:
                if (frames.read_categories(column, names) < 0).any():
                    pooled.append(j)
                fill.append(0.0)
                continue
            numbers = _read_column(column, name, None, parsed[-1]).reshape(len(X), -1)
            means, with_gaps = _choose_fill(numbers)
            double |= needs_float64(numbers[~np.isnan(numbers).any(1)])
            indicated.extend(len(fill) + k for k in with_gaps)
            fill.extend(means.tolist())
        if all(names == () for names in categories):
            raise UserError("every column of X has different categories in almost every row; encode some of them first")
        formats = tuple(parsed) if any(parsed) else ()
        filled = (tuple(fill), tuple(indicated))
        return cls("columns", (len(categories),), tuple(categories), False, double, *filled, formats, tuple(pooled))

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Layout":
        categories = tuple(None if names is None else tuple(names) for names in stored["categories"])
        added = ("fill", "indicated", "pooled")  # older files lack these
        later = {name: tuple(stored.get(name, ())) for name in added}
        double = stored.get("double", False)
        parsed = tuple(_parsed_of(form) for form in stored.get("parsed", ()))
        return cls(stored["kind"], tuple(stored["shape"]), categories, stored["pixels"], double, **later, parsed=parsed)

    def to_json(self) -> dict[str, Any]:
        forms = [None if how is None else {"kind": how.kind, **asdict(how)} for how in self.parsed]
        return {**asdict(self), "parsed": forms}

    def categories_of_numbers(self) -> tuple[tuple[Category, ...] | None, ...]:
        """The categories of each column of `numbers`: a date has several, such as the day and the month."""
        parsed = self.parsed or (None,) * len(self.categories)
        pairs = zip(self.categories, parsed, strict=True)
        return tuple(names for names, how in pairs for _ in range(how.width if how else 1))

    def numbers(self, X: Any) -> Any:
        """X as numbers [N, ...]: float32, or float64 if needed; bytes stay bytes, sparse stays sparse.

        Categories become their positions, -1 for unknown ones. Missing numbers stay NaN. A date becomes the days since
        1970 and what `DateColumn` adds to them.
        """
        kind = np.dtype(np.uint8 if self.pixels else np.float64 if self.double else np.float32)
        if self.kind == "columns":
            parsed = self.parsed or (None,) * len(self.categories)
            pairs = zip(X.columns, self.categories, parsed, strict=True)
            columns = [_read_column(X.iloc[:, j], name, names, how) for j, (name, names, how) in enumerate(pairs)]
            frames.warn_unknown(X, self.categories, columns, self.pooled)
            return np.column_stack(columns).astype(kind)  # [N, columns]
        if tuple(X.shape[1:]) != self.shape:
            shape, fitted = (["N", *shape] for shape in (X.shape[1:], self.shape))
            raise UserError(f"X has the shape {shape}, but the classifier was fitted on {fitted}; use the same shape")
        if (X.dtype == np.uint8) != self.pixels:
            raise UserError(f"X contains {X.dtype}, but the classifier was fitted on {kind}; use the same type")
        _refuse_huge(X, "", allow_missing=bool(self.fill))
        return X.astype(kind, copy=False)

    def examples(self, X: Any, augment: bool) -> Examples:
        """Convert numbers to `Examples` for a task."""
        if self.kind == "sparse":
            return SparseExamples.of(X, augment)
        x = arrange(torch.tensor(X if isinstance(X, np.ndarray) else X.toarray()), self).contiguous()
        if self.kind in ("features", "columns", "as given"):
            return make_features(x, marks=self.find_marks())
        images = make_images(x)
        return images if augment else TensorExamples(images.x, images.scale)

    def find_marks(self) -> NDArray[np.int64] | None:
        """For each feature that `arrange` makes, the one that marks its missing cells; -1 if there is none.  [D]"""
        if not self.indicated:
            return None
        names = self.categories_of_numbers() or (None,) * len(self.fill)
        ends = np.cumsum([1 if column is None else len(column) for column in names])
        marks = np.full(ends[-1] + len(self.indicated), -1)
        marks[ends[list(self.indicated)] - 1] = ends[-1] + np.arange(len(self.indicated))
        return marks

    def sample(self, n: int, scale: Scale, generator: Generator) -> Tensor:
        """Random numbers of a plausible size, to compare two forms of one classifier."""
        if self.pixels:
            return torch.randint(256, (n, *self.shape), generator=generator, dtype=torch.uint8)
        mean = scale.mean.cpu()
        std = scale.std.cpu().nan_to_num(posinf=1.0)  # infinite: a constant column
        if self.kind == "features":  # without those that indicate missing numbers
            mean, std = mean[: self.shape[0]], std[: self.shape[0]]
        shape = (len(self.categories_of_numbers()),) if self.kind == "columns" else self.shape
        x = torch.randn((n, *shape), generator=generator).to(mean.dtype)
        if self.kind != "columns":
            per_feature = mean.shape == x.shape[1:]  # otherwise one number, or one per channel
            return x * (std if per_feature else std.mean()) + (mean if per_feature else mean.mean())
        first = 0  # the first feature of the column
        for j, names in enumerate(self.categories_of_numbers()):
            if names is None:
                x[:, j] = x[:, j] * std[first] + mean[first]
            else:
                x[:, j] = torch.randint(max(len(names), 1), (n,), generator=generator)
            first += 1 if names is None else len(names)
        return x


class Prepare(nn.Module):
    """Converts the numbers of a layout to the input of a network: channels first, categories one-hot, standardized."""

    def __init__(self, layout: Layout, scale: Scale) -> None:
        super().__init__()
        self.layout = layout
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", scale.mean.clone())
        self.register_buffer("std", scale.std.clone())

    def forward(self, x: Tensor) -> Tensor:
        return ((arrange(x, self.layout).to(self.mean.dtype) - self.mean) / self.std).float()


def arrange(x: Tensor, layout: Layout) -> Tensor:
    """Rearrange the dimensions for a network, [N, D] or [N, C, H, W], and replace missing numbers."""
    if layout.kind == "grey":
        return x[:, None]
    if layout.kind == "channels last":
        return x.permute(0, 3, 1, 2)
    indicators = []
    if layout.fill:
        is_missing = x.isnan()
        x = torch.where(is_missing, torch.tensor(layout.fill, dtype=x.dtype, device=x.device), x)
        if layout.indicated:
            indicators = [is_missing[:, list(layout.indicated)].to(x.dtype)]
    if layout.kind != "columns":
        return torch.cat([x, *indicators], dim=1) if indicators else x
    parts = [
        x[:, j : j + 1] if names is None else (x[:, j : j + 1] == torch.arange(len(names), device=x.device)).to(x.dtype)
        for j, names in enumerate(layout.categories_of_numbers())
    ]
    return torch.cat([*parts, *indicators], dim=1)


def _parsed_of(form: Mapping[str, Any] | None) -> Parsed | None:
    """How a column is converted, from the stored form."""
    if form is None:
        return None
    values = {name: value for name, value in form.items() if name != "kind"}
    return DateColumn(**values) if form["kind"] == DateColumn.kind else NumberColumn(**values)


def _read_column(
    column: Any, name: object, names: tuple[Category, ...] | None, parsed: Parsed | None
) -> NDArray[np.float64]:
    """Positions of categories [N], numbers [N], or the features [N, width] of a column with a format."""
    if names is not None:
        return frames.read_categories(column, names)
    if parsed is not None:
        return frames.apply_format(column, name, parsed)
    numbers = frames.read_numeric(column, name)
    _refuse_huge(numbers, f"column {name!r}, ", allow_missing=True)
    return numbers


def _choose_fill(X: NDArray[Any]) -> tuple[NDArray[np.float64], tuple[int, ...]]:
    """Replacements for missing numbers [D], and the columns that have some. These get their median, others the mean."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinite numbers are refused later
        fill = X.mean(0, dtype=np.float64)
        indicated = np.flatnonzero(np.isnan(X).any(0))
    for j in indicated:
        known = X[~np.isnan(X[:, j]), j]
        fill[j] = np.median(known) if len(known) else 0.0
    return np.nan_to_num(fill), tuple(indicated.tolist())


def refuse_texts(X: Any) -> None:
    """Raise a ValueError for a list of texts, with better advice than scikit-learn gives."""
    is_sequence = getattr(X, "ndim", 1) == 1 and hasattr(X, "__len__") and not isinstance(X, str | bytes | Mapping)
    if is_sequence and len(X) > 0 and isinstance(next(iter(X)), str):
        raise ValueError(
            "X contains texts, but numbers are expected; put a vectorizer before it: "
            "make_pipeline(TfidfVectorizer(), NoisyLabelClassifier())"
        )


def _refuse_huge(X: Any, where: str, allow_missing: bool = False) -> None:
    entries = X.tocoo() if issparse(X) else None
    size = np.abs(X if entries is None else entries.data)
    huge: NDArray[np.bool_] = ~(size <= np.finfo(np.float32).max)  # true for NaN as well
    if allow_missing:
        huge &= ~np.isnan(size)
    if huge.any():
        first = int(np.argwhere(huge)[0, 0])
        row = first if entries is None else entries.row[first]
        raise ValueError(f"Input X contains infinity or a value too large for float32: {where}row {row}")


def _refuse_alpha(shape: tuple[int, ...]) -> None:
    """Raise an error for images with transparency, [H, W, 4] or [H, W, 2], which would be read as [C, H, W]."""
    height, width, channels = shape
    if height == width > channels and channels in (2, 4):
        raise UserError(
            f"X has the shape {['N', *shape]}, which looks like [N, H, W, C] with C {channels}, but must be "
            "[N, H, W, C] with C 1 or 3, or [N, C, H, W]; remove the transparency (X[..., :-1]), or move the channels "
            "(X.transpose(0, 3, 1, 2))"
        )


def refuse_blanks(y: Any, name: str) -> None:
    """Raise an error for labels that are None, NA of pandas, or NaN among texts. The error names the first row."""
    labels = np.asarray(y, dtype=object) if y is not None and not issparse(y) else np.zeros(0)
    if labels.dtype != object or getattr(getattr(y, "dtype", None), "kind", "O") in "fiub":  # scikit-learn checks these
        return
    for row, label in enumerate(labels.ravel().tolist()):
        is_nan = isinstance(label, float) and label != label
        if label is None or is_nan or type(label).__name__ in ("NAType", "NaTType"):
            raise ValueError(f"{name}, row {row}: the label is missing ({label!r}); label or drop the row")


def add_classes(classes: NDArray[Any], y_trusted: Any) -> NDArray[Any]:
    """The classes of y and those that occur only in y_trusted, sorted.

    Labels of another type than the classes, and names that differ from a class only in case or spaces, are left out.
    They are mistakes.
    """
    known = classes.tolist()
    types = {type(label) for label in known}
    names = {bare_name(str(label)) for label in known}
    labels = {label for label in np.asarray(y_trusted, dtype=object).ravel().tolist() if type(label) in types}
    new = [label for label in labels.difference(known) if label == label and bare_name(str(label)) not in names]
    if not new:
        return classes
    text = (
        "classes that occur in y_trusted, but not in y: %s; they are rarely predicted; correct the labels if these are "
        "typing mistakes"
    )
    log.warning(text, ", ".join(map(repr, sorted(new))))
    return np.unique(np.array([*known, *new], dtype=object if classes.dtype == object else None))


def accepted_types(X: Any) -> list[type[np.generic]]:
    """The types that X may keep: bytes for images, otherwise float32 or float64."""
    return [np.uint8] if getattr(X, "ndim", 2) > 2 and X.dtype == np.uint8 else [np.float64, np.float32]


def check_marks(trusted: ArrayLike, n: int) -> Tensor:
    """The booleans that mark the trusted rows of X [N]; raises if they do not fit X or mark no row."""
    marks = np.asarray(trusted)
    if marks.shape != (n,) or marks.dtype != bool:
        raise UserError(f"`trusted` must be {n} booleans, one per row of X; got {marks.dtype} {list(marks.shape)}")
    if not marks.any():  # another method would be trained, whose score would not be comparable
        raise UserError(
            f"`trusted` marks none of the {n} rows to fit; in cross-validation, this fold has no trusted rows: use "
            "StratifiedKFold(shuffle=True), or X_trusted and y_trusted, which are in every fold; else omit `trusted`"
        )
    return torch.from_numpy(marks.copy())


def check_net(net: Any) -> Any:
    """The network, or an error if it cannot be built or has no trainable parameters."""
    if isinstance(net, str) or not callable(net):
        return net
    if isinstance(net, nn.Module):
        return _check_trainable(net)
    try:
        inspect.signature(net).bind((1,), 2)
    except TypeError as e:
        name = getattr(net, "__name__", type(net).__name__)
        is_class = isinstance(net, type)
        advice = f"pass the module itself, net={name}(...)" if is_class else "define it as f(shape, n_classes)"
        raise UserError(f"net={name} cannot be called with (shape, n_classes): {e}; {advice}") from e
    except ValueError:  # a function without a known signature
        return net
    return lambda shape, n_classes: _check_trainable(net(shape, n_classes))


def _check_trainable(net: Any) -> Any:
    if isinstance(net, nn.Module) and not any(p.requires_grad for p in net.parameters()):
        raise UserError(f"{type(net).__name__} has no trainable parameters; call requires_grad_(True) on some of them")
    return net
