"""Features of tables: how each column becomes numbers, stored at the precision they need, standardized later."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, timedelta
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.examples import Scale, TensorExamples, check_form

ROUNDING = 1e-14  # a standard deviation below this fraction of the largest value is rounding error of float64
_TOLERANCE = 1e-4  # largest change by float32, as a fraction of the standard deviation of the column
_AT_ONCE = 10**7  # number of values processed together
_EPOCH = date(1970, 1, 1)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NumberColumn:
    """One number per row, and a second feature that marks missing cells if the training table has some."""

    kind: ClassVar[str] = "number"
    fill: float | None = None  # the median, which replaces missing cells; None: not known (older versions)
    marks_gaps: bool = False
    notation: str = "plain"  # how the cells are written, see `datasets.columns.parse_cells.find_notation`

    @property
    def width(self) -> int:
        return 1 + self.marks_gaps

    def encode(self, numbers: Floats) -> Floats:
        """[N] numbers, NaN if missing -> [N, width]"""
        return _with_gaps(numbers, self.fill, self.marks_gaps, [])

    def decode(self, block: NDArray[np.floating]) -> str:
        """The cell from which a row of features [width] was made, '' if it was missing."""
        return "" if self.marks_gaps and block[-1] > 0.5 else format_number(block[0])


@dataclass(frozen=True)
class DateColumn:
    """Days since 1970, and month and weekday if they vary. A last feature marks missing cells if there were some."""

    kind: ClassVar[str] = "date"
    fill: float
    marks_gaps: bool = False
    order: str = "ymd"  # of day, month and year in the cells
    month: bool = True
    weekday: bool = True

    @property
    def width(self) -> int:
        return 1 + self.month + self.weekday + self.marks_gaps

    def encode(self, days: Floats) -> Floats:
        """[N] days since 1970, NaN if missing -> [N, width]"""
        whole = np.floor(np.where(np.isnan(days), self.fill, days))
        parts = []
        if self.month:
            parts.append(months_of(whole))
        if self.weekday:
            parts.append(weekdays_of(whole))
        return _with_gaps(days, self.fill, self.marks_gaps, parts)

    def decode(self, block: NDArray[np.floating]) -> str:
        if self.marks_gaps and block[-1] > 0.5:
            return ""
        try:
            return (_EPOCH + timedelta(days=float(np.floor(block[0])))).isoformat()
        except OverflowError:
            return format_number(block[0])


@dataclass(frozen=True)
class CategoryColumn:
    """One feature per category. The category '' stands for missing cells, if the training table has some."""

    kind: ClassVar[str] = "category"
    categories: tuple[str, ...]
    other: bool = False  # whether one more feature stands for all rare and unknown values

    @property
    def width(self) -> int:
        return len(self.categories) + self.other

    def decode(self, block: NDArray[np.floating]) -> str:
        if not block.max(initial=0.0) > 0:  # unknown
            return ""
        k = int(block.argmax())
        return self.categories[k] if k < len(self.categories) else "(other)"


@dataclass(frozen=True)
class VectorColumn:
    """A vector of fixed length per row, such as an embedding. Missing ones become the mean vector."""

    kind: ClassVar[str] = "vector"
    fill: tuple[float, ...]

    @property
    def width(self) -> int:
        return len(self.fill)

    def encode(self, vectors: NDArray[Any]) -> NDArray[Any]:
        gaps = np.isnan(vectors)
        return np.where(gaps, np.array(self.fill, vectors.dtype), vectors) if gaps.any() else vectors

    def decode(self, block: NDArray[np.floating]) -> str:
        shown = ", ".join(f"{value:.4g}" for value in block[:5])
        return f"[{shown}{', ...' if len(block) > 5 else ''}]"


@dataclass(frozen=True)
class TextColumn:
    """Texts as tf-idf of words and pairs of words (see `data.sparse`)."""

    kind: ClassVar[str] = "text"
    vocabulary: tuple[str, ...]
    idf: tuple[float, ...] = field(repr=False)
    analyzer: str = "word"  # or 'char': sequences of characters, for languages without spaces

    @property
    def width(self) -> int:
        return len(self.vocabulary)

    def decode(self, block: NDArray[np.floating]) -> str:
        """The words with the largest weights. The text itself is in `SparseExamples.texts`."""
        top = [k for k in np.argsort(-block)[:10].tolist() if block[k] > 0]
        return " ".join(self.vocabulary[k] for k in top)


Column = NumberColumn | DateColumn | CategoryColumn | VectorColumn | TextColumn
_KINDS: dict[str, Any] = {
    kind.kind: kind for kind in (NumberColumn, DateColumn, CategoryColumn, VectorColumn, TextColumn)
}


@dataclass(frozen=True)
class Columns:
    """How the columns of a table become features. Stored with the data set, to read a second table in the same way."""

    label: str
    features: Mapping[str, Column]  # feature columns in order
    drop: tuple[str, ...] = ()  # columns that are ignored
    double: bool = False  # whether the numbers need float64
    sparse: bool = False  # whether the features are stored sparse; then `scales` is applied
    scales: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)
    """Center and spread of the features of numeric columns in a sparse table, so that zero means a usual value."""

    @property
    def width(self) -> int:
        return sum(column.width for column in self.features.values())

    def blocks(self) -> Iterator[tuple[str, Column, slice]]:
        """Each feature column with the slice of its features."""
        start = 0
        for name, column in self.features.items():
            yield name, column, slice(start, start + column.width)
            start += column.width

    def find_marks(self) -> NDArray[np.int64]:
        """For each feature, the one that marks its missing cells; -1 if there is none.  [width]"""
        marks = np.full(self.width, -1)
        for _, column, part in self.blocks():
            if isinstance(column, NumberColumn | DateColumn) and column.marks_gaps:
                marks[part.start : part.stop - 1] = part.stop - 1
        return marks

    def decode(self, x: NDArray[np.floating]) -> dict[str, str]:
        """Convert the features [D] of one row back to cells of its columns."""
        cells = {}
        for name, column, part in self.blocks():
            block = x[part]
            if name in self.scales:
                center, spread = self.scales[name]
                block = (block * np.array(spread) + np.array(center)).astype(np.float32)
            cells[name] = column.decode(block)
        return cells

    def form(self) -> dict[str, Any]:
        """Plain values that `from_form` reads."""
        features = {name: {"kind": column.kind, **asdict(column)} for name, column in self.features.items()}
        scales = {name: tuple(scale) for name, scale in self.scales.items()}
        return {**{f: getattr(self, f) for f in ("label", "drop", "double", "sparse")}, "features": features} | {
            "scales": scales
        }

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        """Restore columns from `form`, with lists or tuples. Raises ValueError, TypeError or KeyError if invalid."""
        values = dict(form)
        if "categories" in values:  # older versions
            old = values.pop("categories")
            values["features"] = {
                name: {"kind": "number"} if names is None else {"kind": "category", "categories": names}
                for name, names in old.items()
            }
        features = {}
        for name, stored in values.pop("features").items():
            column = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
            features[name] = _KINDS[str(column.pop("kind"))](**column)
        scales: Any = {name: tuple(map(tuple, scale)) for name, scale in values.pop("scales", {}).items()}
        columns = cls(features=features, drop=tuple(values.pop("drop", ())), scales=scales, **values)
        columns._check()
        return columns

    def _check(self) -> None:
        texts = [self.label, *self.drop, *self.features]
        for part in (self, *self.features.values()):
            for f in fields(part):
                if f.type in (bool, str):
                    check_form(type(getattr(part, f.name)) is f.type, f.name, getattr(part, f.name))
        for name, column in self.features.items():
            match column:
                case CategoryColumn(categories=names):
                    check_form(isinstance(names, tuple) and column.width > 0, "categories", names)
                    texts.extend(names)
                case TextColumn(vocabulary=words, idf=idf):
                    check_form(isinstance(words, tuple) and len(words) == len(idf), "vocabulary", len(words))
                    check_form(all(_is_number(value) for value in idf), "idf", idf[:5])
                    texts.extend(words)
                case VectorColumn(fill=fill):
                    check_form(isinstance(fill, tuple) and all(map(_is_number, fill)), "fill", fill)
                case _:
                    check_form(column.fill is None or _is_number(column.fill), "fill", column.fill)
            if name in self.scales:
                scale = self.scales[name]
                valid = len(scale) == 2 and all(len(part) == column.width for part in scale)
                check_form(valid and all(_is_number(value) for part in scale for value in part), "scales", scale)
        check_form(all(isinstance(text, str) for text in texts), "columns", texts)


@dataclass(frozen=True, eq=False)
class Features(TensorExamples):
    """Numbers whose scale is computed from the training rows: [N, D], or any shape that a custom network accepts.

    They are stored, compared and scaled in float64 if float32 is too coarse for them (`needs_float64`). A network sees
    float32 in either case.
    """

    columns: Columns | None = None  # of the table from which they were read
    marks: NDArray[np.int64] | None = None  # [D] as `Columns.find_marks`, if there are no columns; None: no mark

    def find_marks(self) -> NDArray[np.int64] | None:
        return self.marks if self.columns is None else self.columns.find_marks()

    def fit_scale(self, rows: Tensor) -> Scale:
        """Mean and standard deviation over `rows`.

        A column that is constant in `rows` gets an infinite deviation, so that it is zero in all other rows, too. The
        weights of such a column are never trained.
        """
        columns = self.x.flatten(1)  # [N, D]
        step = max(1, _AT_ONCE // max(len(rows), 1))
        means, deviations = [], []
        for start in range(0, max(columns.shape[1], 1), step):
            x = columns[:, start : start + step][rows].double()
            std = x.std(0, correction=0)
            varies = std > ROUNDING * x.abs().amax(0)
            means.append(x.mean(0))
            deviations.append(torch.where(varies, std, torch.inf))
        shape = self.x.shape[1:]
        return Scale(
            torch.cat(means).view(shape).to(self.scale.mean), torch.cat(deviations).view(shape).to(self.scale.std)
        )

    def _normalize(self, x: Tensor) -> Tensor:
        return super()._normalize(x).to(torch.get_default_dtype())

    def form(self) -> dict[str, Any]:
        return {**(super().form() or {}), "features": True, "columns": self.columns.form() if self.columns else None}

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        columns = None if form["columns"] is None else Columns.from_form(form["columns"])
        features = replace(super().from_form({**form, "crop": None}), columns=columns)
        if columns is not None:
            check_form(tuple(features.x.shape[1:]) == (columns.width,), "columns", columns)
        return features


class Originals(NamedTuple):
    """The image files or texts that vectors were computed from."""

    values: tuple[str, ...]  # [N] paths, or texts
    root: str | None = None  # the folder that the paths are relative to; None: these are texts


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


def make_features(x: Tensor, columns: Columns | None = None, marks: NDArray[np.int64] | None = None) -> Features:
    """Features that are not scaled yet."""
    kind = torch.promote_types(x.dtype, torch.get_default_dtype())
    return Features(
        x, Scale(torch.tensor(0.0, dtype=kind), torch.tensor(1.0, dtype=kind)), columns=columns, marks=marks
    )


def needs_float64(x: NDArray[Any]) -> bool:
    """Whether float32 is too coarse for finite numbers [N, ...].

    It is if the values of a column are tiny, or if they differ little compared to their distance from zero.
    """
    if x.dtype in (np.float32, np.float16, np.uint8, np.bool_) or not x.size:
        return False
    columns = x.reshape(len(x), -1)
    step = max(1, _AT_ONCE // len(x))
    blocks = (columns[:, start : start + step] for start in range(0, columns.shape[1], step))
    return any(_loses_digits(block.astype(np.float64)) for block in blocks)


def months_of(days: Floats) -> Floats:
    """The months 1..12 of whole days since 1970."""
    months = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
    return (months % 12 + 1).astype(np.float64)


def weekdays_of(days: Floats) -> Floats:
    """The weekdays of whole days since 1970, 0 for Monday."""
    return (days + 3) % 7


def format_number(value: np.floating) -> str:
    """The shortest text that parses to the same float32, without a decimal point for integers."""
    return str(value).removesuffix(".0")


def _with_gaps(values: Floats, fill: float | None, marks_gaps: bool, more: list[Floats]) -> Floats:
    """[N, width]: the values with their gaps filled, `more` features, and the marks of gaps."""
    gaps = np.isnan(values)
    filled = np.where(gaps, np.nan if fill is None else fill, values)
    return np.stack([filled, *more, *([gaps.astype(np.float64)] if marks_gaps else [])], axis=1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)


@np.errstate(over="ignore", invalid="ignore")  # other code rejects numbers that are too large
def _loses_digits(x: Floats) -> bool:
    moved = np.abs(x - x.astype(np.float32)).max(0)  # [D]
    if not moved.any():
        return False
    std = x.std(0)
    return bool(((moved > _TOLERANCE * std) & (std > ROUNDING * np.abs(x).max(0))).any())
