"""Tables of the user (.csv, .tsv, .parquet)."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from warpi.data.dataset import Dataset, NewInputs
from warpi.data.numeric import Columns, make_features, needs_float64
from warpi.datasets.column_checks import are_image_names, check_numeric_text, warn_suspicious_feature
from warpi.datasets.label_columns import CORRECTION_COLUMNS, GIVEN, LABEL_COLUMNS, read_label_columns
from warpi.datasets.labels import MISSING, blank_missing, encode_labels, normalize_labels, parse_numbers, to_texts
from warpi.datasets.text_files import check_column_names, check_suffix, drop_flag, read_cells, reading, shorten_list
from warpi.errors import UserError, missing_package, nearest, unknown

logger = logging.getLogger("warpi.datasets")

_MAX_CATEGORIES = 1000


def read_table(path: Path, label: str | None = None, drop: Sequence[str] = (), like: Dataset | None = None) -> Dataset:
    """Read a table with one example per row; docs/data.md describes the columns and what is rejected.

    Numeric columns become one feature each, all others one feature per distinct value, in sorted order. Rows of the
    splits test and trusted become separate tensors, with their `clean_label` if it is filled. The classes are the
    values of both label columns, numbers in numerical order.

    A second file is read with `like`, the data set of the first. It then has the same columns, categories and classes,
    and may lack the dropped columns.
    """
    first = _columns_of(like, path)
    label = label or (first.label if first else "label")
    _check_drop(path, drop, label)
    table = _read(path, label, (*drop, *(first.drop if first else ())))
    if not first:
        for name in drop:
            if name not in table.names:
                raise _no_column(name, table, "--drop takes some of these")
    if label not in table.columns:
        raise _no_column(label, table, "choose the label with --label COLUMN")
    earlier = _pop_earlier_labels(table, label, first)
    columns = first or _choose_encoding(table, label, tuple(drop))
    added = [name for name in _feature_names(table, label) if name not in columns.categories]
    _check_same_columns(table, columns, added)
    x = torch.from_numpy(_encode(table, columns, first is None))  # [N, D]
    if not first:
        columns = replace(columns, double=x.dtype == torch.float64)
        for name in columns.categories:
            warn_suspicious_feature(table.columns[name], name, path)
    texts = {name: _labels(table.columns[name]) for name in (label, *LABEL_COLUMNS) if name in table.columns}
    texts |= {name: _labels(values) for name, values in earlier.items()}
    labels = read_label_columns(texts, label, path, table.at, classes=like.classes if like else None)
    parts = {part: (make_features(x[rows], columns), labels.labels(part)) for part, rows in labels.rows.items()}
    return Dataset.from_parts(path.stem, parts, labels.classes, encoding=columns, **labels.facts())


def read_new_table(path: Path, columns: Columns, classes: tuple[str, ...]) -> NewInputs:
    """Read rows to predict: the feature columns of the first table, with or without labels."""
    table = _read(path, columns.label, columns.drop, new=True)
    _check_same_columns(table, columns, [])
    unused = [name for name in _feature_names(table, columns.label) if name not in columns.categories]
    if unused:
        logger.warning("%s: columns that the run does not have are not used: %s", path, shorten_list(map(repr, unused)))
    labels = {
        name: encode_labels(blank_missing(_labels(table.columns[name]), classes), classes, table.at)
        for name in dict.fromkeys((columns.label, "clean_label"))
        if name in table.columns
    }
    return NewInputs(make_features(torch.from_numpy(_encode(table, columns)), columns), labels)


def _labels(values: NDArray[Any]) -> list[str]:
    """Labels of a table column as text, '' if missing."""
    return normalize_labels(values) if values.dtype.kind == "O" else to_texts(values)


class _Table(NamedTuple):
    path: Path
    label: str
    names: list[str]  # of all columns
    columns: dict[str, NDArray[Any]]  # less those to drop; text as objects
    lines: list[int] | None  # on which each row ends; None: parquet, which declares its types
    new: bool  # whether the rows are to be predicted, so that the columns are fixed

    def at(self, row: int) -> str:
        return f"{self.path}, {self.row(row)}"

    def row(self, row: int) -> str:
        return f"row {row}" + (f" (line {self.lines[row]})" if self.lines else "")

    def or_drop(self, *names: str) -> str:
        """The advice to drop columns, if they may be dropped."""
        what = "the column" if len(names) == 1 else "the columns"
        fixed = self.new or {self.label, *LABEL_COLUMNS} & {*names}
        return "" if fixed else f", or drop {what} with {drop_flag(*names)}"


_Cells = Callable[[_Table, int], NDArray[Any]]  # returns a column by its position


def _read(path: Path, label: str, drop: Sequence[str], *, new: bool = False) -> _Table:
    read = _read_parquet if check_suffix(path, (".csv", ".tsv", ".parquet")) == ".parquet" else _read_csv
    names, cells, lines = read(path)
    table = _Table(path, label, check_column_names(path, names), {}, lines, new)
    for j, name in enumerate(table.names):
        if name in drop:
            continue
        if re.fullmatch(r"Unnamed: \d+", name):
            raise UserError(f"{path}: column {j + 1} has no name; name or delete it{table.or_drop(name)}")
        if name.lower() in LABEL_COLUMNS and name not in (*LABEL_COLUMNS, label):
            meaning = f"column {name!r} looks like {name.lower()!r}, which has a meaning"
            raise UserError(f"{path}: {meaning}; rename it{table.or_drop(name)}")
        table.columns[name] = cells(table, j)
    return table


def _read_csv(path: Path) -> tuple[Iterable[object], _Cells, list[int] | None]:
    names, rows, lines = read_cells(path, "\t" if path.suffix.lower() == ".tsv" else ",")
    return names, lambda _, j: np.array([row[j] for row in rows], dtype=object), lines


def read_parquet(path: Path) -> Any:
    """The columns of a parquet file as a pyarrow table, without the index of a pandas frame."""
    try:
        from pyarrow import parquet
    except ImportError as e:
        raise missing_package("pyarrow", "reading .parquet", "tables") from e
    try:
        with reading(path), path.open("rb") as file:
            frame = parquet.ParquetFile(file).read()
    except UserError:
        raise
    except ValueError as e:
        raise UserError(f"{path}: not a readable parquet file ({str(e).splitlines()[0]})") from e
    index = (frame.schema.pandas_metadata or {}).get("index_columns", ())
    return frame.drop_columns([name for name in index if isinstance(name, str)])


def _read_parquet(path: Path) -> tuple[Iterable[object], _Cells, None]:
    frame = read_parquet(path)
    if not frame.num_rows:
        raise UserError(f"{path}: no rows")
    import pyarrow as pa
    from pyarrow import compute, types

    def cells(table: _Table, j: int) -> NDArray[Any]:
        column = frame.column(j)
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if types.is_integer(kind) and not column.null_count:  # not as floats: large numbers may be names of classes
            numbers: NDArray[Any] = column.to_numpy()
            return numbers.astype(np.uint64 if compute.min(column).as_py() >= 0 else np.int64)
        if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
            return np.asarray(column.cast(pa.float64(), safe=False).to_numpy())
        if not any(check(kind) for check in (types.is_boolean, types.is_null, types.is_string, types.is_large_string)):
            raise UserError(
                f"{path}: column {table.names[j]!r} holds values of type {kind}; convert it to numbers, text or "
                f"true/false, or delete it{table.or_drop(table.names[j])}"
            )
        return np.array(["" if cell is None else str(cell).strip() for cell in column.to_pylist()], dtype=object)

    return frame.column_names, cells, None


def _columns_of(like: Dataset | None, path: Path) -> Columns | None:
    if like is None:
        return None
    if not isinstance(like.encoding, Columns):
        raise UserError(f"{path} is a table, but {like.name} is not; give both in the same format")
    return like.encoding


def _check_drop(path: Path, drop: Sequence[str], label: str) -> None:
    if isinstance(drop, str):
        raise UserError(f"drop must be a list of columns, got {drop!r}; write [{drop!r}]")
    if label in drop:
        raise UserError(f"{path}: {label!r} holds the labels and cannot be dropped; choose another label with --label")
    for name in drop:
        if name in LABEL_COLUMNS and name != "trusted":  # a feature in older versions
            raise UserError(f"{path}: {name!r} is a reserved name and cannot be dropped; rename it")


def _choose_encoding(table: _Table, label: str, drop: tuple[str, ...]) -> Columns:
    """Decide for every feature column whether it is numeric or categorical."""
    categories: dict[str, tuple[str, ...] | None] = {}
    for name in _feature_names(table, label):
        values = table.columns[name]
        if values.dtype.kind != "O" or (table.lines and parse_numbers(values) is not None):
            categories[name] = None
            continue
        if table.lines:
            check_numeric_text(values.tolist(), name, table.at)
        distinct = set(values.tolist())
        if len(distinct) > _MAX_CATEGORIES:
            advice = "make it numeric"
            if are_image_names(distinct):
                advice = "if it names images, rename it to 'path' in a .csv or .tsv"
            raise UserError(
                f"{table.path}: column {name!r} is text with {len(distinct)} distinct values, at most "
                f"{_MAX_CATEGORIES} can be encoded; {advice}{table.or_drop(name)}"
            )
        categories[name] = tuple(sorted(distinct - {""}))
    if not categories:
        dropped = f"; --drop ignores {shorten_list(drop)}: keep one of them" if drop else ""
        raise UserError(f"{table.path}: no feature column is left; columns: {shorten_list(table.names)}{dropped}")
    return Columns(label, categories, drop)


def _pop_earlier_labels(table: _Table, label: str, first: Columns | None) -> dict[str, NDArray[Any]]:
    """Take out the column `given`: the labels before they were checked.

    It is a feature if it was one in the first table, or if it has other values than the label column of a first table.
    """
    names = [name for name in GIVEN if name in table.columns and name != label]
    if first:
        names = [name for name in names if name not in first.categories]
    else:
        classes = {"", *_labels(table.columns[label])}
        names = [name for name in names if classes.issuperset(_labels(table.columns[name]))]
    return {name: table.columns.pop(name) for name in names}


def _feature_names(table: _Table, label: str) -> list[str]:
    special = (label, *LABEL_COLUMNS, *CORRECTION_COLUMNS)
    return [name for name in table.columns if name not in special]


def _check_same_columns(table: _Table, columns: Columns, added: list[str]) -> None:
    differ = {"lacks": [name for name in columns.categories if name not in table.columns], "adds": added}
    if any(differ.values()):
        parts = " and ".join(f"{verb} {shorten_list(map(repr, names))}" for verb, names in differ.items() if names)
        both = f"; if they are not features, drop them from both tables with {drop_flag(*differ['lacks'])}"
        advice = both if differ["lacks"] and not table.new else ""
        raise UserError(f"{table.path}: columns differ from those of the training table: it {parts}{advice}")


def _encode(table: _Table, columns: Columns, first: bool = False) -> NDArray[np.floating]:
    """[N, D] features, in float32, or in float64 if the first table needs it."""
    gaps: dict[str, str] = {}
    for name, categories in columns.categories.items():
        values, words = table.columns[name], MISSING if categories is None else {""}
        blank = [cell.lower() in words for cell in values] if values.dtype.kind == "O" else np.isnan(values).tolist()
        if any(blank):
            gaps[name] = f"{name!r} ({sum(blank)} of {len(blank)}, first {table.row(blank.index(True))})"
    if gaps:
        raise UserError(
            f"{table.path}: cells are missing in {shorten_list(gaps.values())}; fill them or drop the rows"
            f"{table.or_drop(*gaps)}: missing cells are not filled automatically"
        )
    blocks: list[NDArray[np.floating]] = [
        _numbers(table, name) if c is None else _one_hot(table, name, c) for name, c in columns.categories.items()
    ]
    double = any(map(needs_float64, blocks)) if first else columns.double
    return np.concatenate(blocks, axis=1, dtype=np.float64 if double else np.float32)


def _one_hot(table: _Table, name: str, categories: tuple[str, ...]) -> NDArray[np.float32]:
    """[N, C]"""
    values = table.columns[name]
    cells = values.tolist() if values.dtype.kind == "O" else to_texts(values)
    index = {category: k for k, category in enumerate(categories)}
    new = [row for row, cell in enumerate(cells) if cell not in index]
    if new:
        error = unknown(f"value of column {name!r} in {table.at(new[0])}:", cells[new[0]], index)
        raise UserError(
            f"{error}; {len(new)} rows have values that the training table does not have: fix them, drop them, or "
            f"train with rows that have them{table.or_drop(name)}"
        )
    x = np.zeros((len(cells), len(categories)), dtype=np.float32)
    x[np.arange(len(cells)), [index[cell] for cell in cells]] = 1
    return x


def _numbers(table: _Table, name: str) -> NDArray[np.float64]:
    """[N, 1] finite numbers."""
    values = table.columns[name]
    numbers = parse_numbers(values) if values.dtype.kind == "O" else values.astype(np.float64)
    if numbers is None:
        row = next(row for row, cell in enumerate(values) if parse_numbers([cell]) is None)
        raise UserError(f"{table.at(row)}: column {name!r} holds {values[row]!r}, but is numeric in the training table")
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(numbers.astype(np.float32))
    if bad.any():
        row = int(bad.argmax())
        cell = f"column {name!r} holds {values[row]}, but must hold finite numbers up to 3.4e38"
        raise UserError(f"{table.at(row)}: {cell}; fix it or drop the row{table.or_drop(name)}")
    return numbers[:, None]


def _no_column(name: str, table: _Table, advice: str) -> UserError:
    near = nearest(name, table.names)
    hint = f" (did you mean {near!r}?)" if near else ""
    return UserError(f"{table.path} has no column {name!r}{hint}; columns: {shorten_list(table.names)}; {advice}")
