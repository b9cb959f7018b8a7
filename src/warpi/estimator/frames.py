"""Columns of a pandas frame: numbers, categories, and text with numbers or dates, as in a table read from a file."""

import logging
import warnings
from collections.abc import Sequence
from datetime import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.data.numeric import DateColumn, NumberColumn
from warpi.datasets.columns.choose import MANY_CATEGORIES, RARE, Chooser, Notes
from warpi.datasets.columns.parse_cells import find_date_order, read_days, read_numbers
from warpi.datasets.columns.raw import Raw, Words
from warpi.errors import UserError, format_count

log = logging.getLogger("warpi.estimator")

_MAX_CATEGORIES = 1000
_NUMBERS = {"integer", "floating", "mixed-integer-float", "decimal", "boolean"}  # of `pandas.api.types.infer_dtype`
_DATES = {"date", "datetime", "datetime64"}
_DURATIONS = {"timedelta", "timedelta64"}
_WORDS = {"string", "time", "mixed", "mixed-integer"}
Category = str | int | float | bool | None  # None: the cell is missing
Parsed = NumberColumn | DateColumn
"""Conversion of a non-numeric column whose values are numbers or dates."""


class UnknownCategories(UserWarning):
    """A column has categories that did not occur when the classifier was fitted, or cells that cannot be read."""


def has_non_numeric_columns(X: Any) -> bool:
    """Whether X is a pandas frame with at least one column that is not numeric."""
    return hasattr(X, "iloc") and hasattr(X, "columns") and not all(is_numeric(X.iloc[:, j]) for j in range(X.shape[1]))


def is_numeric(column: Any) -> bool:
    import pandas as pd

    dtype = column.dtype
    if pd.api.types.is_object_dtype(dtype):  # numbers may have this type, for example after a concat
        return pd.api.types.infer_dtype(column) in _NUMBERS
    return pd.api.types.is_numeric_dtype(dtype) and not isinstance(dtype, pd.CategoricalDtype)  # booleans are numeric


def detect_format(column: Any, name: object) -> Parsed | None:
    """How to convert a column of dates, or of text with dates or numbers; None for other columns."""
    if is_numeric(column) or (raw := _read_raw(column)) is None:
        return None
    chooser = Chooser(Notes(), np.ones(len(column), dtype=bool), _MAX_CATEGORIES, declared=True)
    parsed = chooser.parse(str(name), raw)
    if isinstance(parsed, DateColumn) and isinstance(raw, Words) and find_date_order(raw)[1]:
        text = "column %r of X is read as month/day/year; if the day comes first, convert it with pandas.to_datetime"
        log.warning(text, name)
    return parsed


def apply_format(column: Any, name: object, parsed: Parsed) -> NDArray[np.float64]:
    """Convert a column to features [N, width]. Cells that cannot be read count as missing, with a warning."""
    raw = Words.of([""] * len(column)) if column.isna().all() else _read_raw(column)  # if all are missing, any dtype
    kind = "dates" if isinstance(parsed, DateColumn) else "numbers"
    if raw is None or (not isinstance(raw, Words) and (raw.dtype.kind == "M") != isinstance(parsed, DateColumn)):
        raise UserError(f"column {name!r} of X contained {kind} in fit, but is {column.dtype} now")
    if isinstance(parsed, DateColumn):
        values, bad = read_days(raw, parsed.order)
    else:
        values, bad = read_numbers(raw, parsed.notation)
    if bad.any():
        n, example = int(bad.sum()), column.iloc[int(bad.argmax())]
        if 2 * n > n + int((~np.isnan(values)).sum()):
            cells = format_count(n, "other cell")
            raise UserError(f"column {name!r} of X must contain {kind}, as in fit, got {cells}, such as {example!r}")
        text = f"cells that are not {kind} count as missing: {name!r} ({format_count(n, 'row')}, such as {example!r})"
        warnings.warn(text, UnknownCategories, stacklevel=4)
    return parsed.encode(values)


def _read_raw(column: Any) -> Raw | None:
    """The cells of dates, durations (in seconds), numbers or text; None for other values and declared categories."""
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype):
        return None
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind in _DATES:
        days = pd.to_datetime(column, utc=True).dt.tz_localize(None)
        return np.asarray(days.to_numpy("datetime64[us]"))
    if kind in _DURATIONS:
        return np.asarray(pd.to_timedelta(column).dt.total_seconds())
    if kind == "empty" or is_numeric(column):
        return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
    if kind in _WORDS and all(isinstance(cell, str | int | float | time) for cell in column[~column.isna()]):
        cells = zip(column, column.isna(), strict=True)
        return Words.of("" if is_missing else str(cell).strip() for cell, is_missing in cells)
    return None


def find_categories(column: Any, name: object) -> tuple[Category, ...]:
    """The categories of a column: those that its dtype declares, otherwise the sorted values.

    If there are too many, only the frequent ones are returned. A value that occurs once, such as an id, would otherwise
    mark one row of X and none of the trusted and new rows.
    """
    declared = getattr(column.dtype, "categories", None)
    try:
        names: list[Any] = _sort_values(column) if declared is None else declared.tolist()
    except TypeError as e:  # values that cannot be hashed, or compared with one another
        raise UserError(
            f"column {name!r} of X cannot be used as categories ({e}); convert it to text or numbers"
        ) from e
    for value in names:
        if not isinstance(value, str | int | float | bool):
            raise UserError(
                f"column {name!r} of X contains values of type {type(value).__name__}; convert the column to numbers, "
                "text, dates or true/false, or drop it"
            )
    if len(names) > (_MAX_CATEGORIES if declared is not None else max(MANY_CATEGORIES, len(column) // 20)):
        counts = column.value_counts()
        frequent = set(counts.index[:_MAX_CATEGORIES][counts[:_MAX_CATEGORIES] >= RARE])
        text = (
            "column %r of X has %d categories; %d are kept, the others are treated as unknown; if this column is free "
            "text, vectorize it first, for example with TfidfVectorizer"
        )
        log.warning(text, name, len(names), len(frequent))
        names = [value for value in names if value in frequent]
    return (*names, None) if column.isna().any() else tuple(names)


def _sort_values(column: Any) -> list[Any]:
    """The different values. Words follow numbers, because pandas may read both from one column of a file."""
    return sorted(column.dropna().unique().tolist(), key=lambda value: (isinstance(value, str), value))


def read_categories(column: Any, names: Sequence[Category]) -> NDArray[np.float64]:
    """[N] positions among the categories, -1 if unknown."""
    index = {value: k for k, value in enumerate(names)}
    values = [None if is_missing else value for value, is_missing in zip(column, column.isna(), strict=True)]
    return np.array([index.get(value, -1) for value in values], dtype=np.float64)


def read_numeric(column: Any, name: object) -> NDArray[np.float64]:
    """[N] numbers, NaN if missing."""
    try:
        numbers: NDArray[np.float64] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as e:
        raise UserError(f"column {name!r} of X was numeric in fit, but is {column.dtype} now") from e
    return numbers


def warn_unknown(
    X: Any, categories: Sequence[Any], columns: Sequence[NDArray[np.float64]], pooled: Sequence[int]
) -> None:
    """Warn once about cells whose category did not occur in `fit`. The columns `pooled` are skipped.

    Their rare categories were dropped.
    """
    cells = []
    for j, (names, values) in enumerate(zip(categories, columns, strict=True)):
        if names is not None and j not in pooled and (rows := np.flatnonzero(values < 0).tolist()):
            cells.append(f"{X.columns[j]!r} ({format_count(len(rows), 'row')}, such as {X.iloc[rows[0], j]!r})")
    if cells:
        text = f"categories that did not occur in fit are treated as unknown: {', '.join(cells)}"
        warnings.warn(text, UnknownCategories, stacklevel=4)
