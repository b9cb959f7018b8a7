"""Read probabilities, labels and trusted rows from arrays or from .npy, .csv and .parquet files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.audit.checked_labels import row_weight
from warpi.audit.label_scores import Floats, Ints
from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.delimited_files import TABLE_SUFFIXES, check_suffix, read_cells, reading
from warpi.datasets.labels import sort_classes, to_texts
from warpi.errors import DAMAGED_ARRAY_ERRORS, UserError

_TRUE = ("true_label", "checked_label", "label")  # columns of a trusted file, in this order
_GIVEN = ("given_label", "given")
_LABEL = ("given_label", "given", "label")  # columns of a file of labels
_IDS = ("row", "id", "index", "predicted", "probability", "path")  # columns of a csv that are not classes
_PREFIX = "p_"  # of the columns that `warpi predict` writes


class TrustedRows(NamedTuple):
    """Rows whose true label is known, and pairs of labels whose rows are not known."""

    row: Ints  # [m] ascending
    true: Ints  # [m]
    random: NDArray[np.bool_]  # [m] drawn at random
    weight: Floats  # [m] rows that a random one stands for, relative to the others
    pairs_given: Ints  # [n]
    pairs_true: Ints  # [n]

    @classmethod
    def none(cls) -> "TrustedRows":
        zero = np.zeros(0, np.int64)
        return cls(zero, zero, np.zeros(0, np.bool_), np.zeros(0), zero, zero)

    @classmethod
    def from_rows(
        cls, row: Ints, true: Ints, random: NDArray[np.bool_] | None = None, weight: Floats | None = None
    ) -> "TrustedRows":
        order = np.argsort(row, kind="stable")
        random = np.ones(len(row), np.bool_) if random is None else random
        weight = np.ones(len(row)) if weight is None else weight
        return cls.none()._replace(row=row[order], true=true[order], random=random[order], weight=weight[order])


def read_probabilities(source: object) -> tuple[NDArray[Any], list[str] | None]:
    """An array [N, K], and the names of its columns if the file has them. A .npy file is not loaded into memory."""
    if not isinstance(source, str | Path):
        return np.asarray(source), None
    path = Path(source)
    suffix = check_suffix(path, (".npy", *TABLE_SUFFIXES))
    if suffix == ".npy":
        array = _read_npy(path, mapped=True)
        if array.dtype.kind not in "fiu":
            raise UserError(f"{path} must contain numbers, got {array.dtype}")
        return array, None
    if suffix == ".parquet":
        frame = read_parquet(path)
        names = _class_columns(frame.column_names)
        columns = [frame.column(name).to_numpy() for name in names]
        if not all(column.dtype.kind in "fiu" for column in columns):
            raise UserError(f"{path}: the columns {', '.join(names)} must contain numbers; drop the others")
        return np.stack(columns, 1), [name.removeprefix(_PREFIX) for name in names]
    cells = read_cells(path)
    names = _class_columns(cells.names)
    positions = [cells.names.index(name) for name in names]
    try:
        values = np.array([[row[j] for j in positions] for row in cells.rows], np.float64)
    except ValueError as e:
        raise UserError(f"{path}: {e}; every column must contain the probabilities of one class") from e
    return values, [name.removeprefix(_PREFIX) for name in names]


def _class_columns(names: Sequence[str]) -> list[str]:
    """The columns p_CLASS, as `warpi predict` writes them, or else all columns not called row, id or the like."""
    marked = [name for name in names if name.startswith(_PREFIX)]
    return marked or [name for name in names if name.lower() not in _IDS]


def _read_npy(path: Path, mapped: bool = False) -> NDArray[Any]:
    try:
        with reading(path):
            array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except DAMAGED_ARRAY_ERRORS as e:
        raise UserError(f"{path} is not a readable array ({e}); write it with numpy.save") from e
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path} is not one array; write it with numpy.save")
    return array


def read_labels(source: object) -> NDArray[Any]:
    """Labels [N], as numbers or names, from an array, a .npy file, or the column `label` of a table."""
    if not isinstance(source, str | Path):
        values = np.asarray(source)
    elif check_suffix(Path(source), (".npy", *TABLE_SUFFIXES)) == ".npy":
        values = _read_npy(Path(source))
    else:
        values = _read_label_column(Path(source))
    if values.ndim != 1:
        raise UserError(f"labels must be one number or name per row, got {values.dtype} {list(values.shape)}")
    return values


def _read_label_column(path: Path) -> NDArray[Any]:
    columns = read_columns(path)
    name = next((name for name in _LABEL if name in columns), next(iter(columns)) if len(columns) == 1 else None)
    if name is None:
        raise UserError(f"{path} has no column 'label'; its columns are {', '.join(columns)}")
    return np.array(columns[name])


def read_columns(path: Path) -> dict[str, list[str]]:
    """The cells of every column of a table as text, '' if missing."""
    if path.suffix.lower() == ".parquet":
        frame = read_parquet(path)
        return {
            name: ["" if cell is None else str(cell) for cell in frame.column(name).to_pylist()]
            for name in frame.column_names
        }
    cells = read_cells(path)
    return {name: [row[j] for row in cells.rows] for j, name in enumerate(cells.names)}


def choose_classes(
    labels: NDArray[Any], columns: Sequence[str] | None, n_columns: int, classes: Sequence[str] | None
) -> tuple[str, ...]:
    """The class of each column: `classes`, else the names in the file, else 0 to K - 1 or the sorted labels."""
    if classes or columns:
        return tuple(classes or columns or ())
    if labels.dtype.kind in "iu":
        return tuple(map(str, range(n_columns)))
    return sort_classes({*to_texts(labels)})


def encode(labels: NDArray[Any], classes: Sequence[str], what: str) -> Ints:
    """Names or numbers as positions in `classes`. Numbers that are not names of classes are positions.  [N]"""
    K = len(classes)
    if labels.dtype.kind in "iu" and tuple(classes) == tuple(map(str, range(K))):
        positions = labels.astype(np.int64)
        bad = np.flatnonzero((positions < 0) | (positions >= K))
        if len(bad):
            raise UserError(f"{what}: row {bad[0]} has the label {labels[bad[0]]}, but the classes are 0 to {K - 1}")
        return positions
    index = {str(k): k for k in range(K)} if labels.dtype.kind in "iu" else {}
    index |= {name: k for k, name in enumerate(classes)}
    texts = to_texts(labels)
    for row, text in enumerate(texts):
        if text not in index:
            raise UserError(f"{what}: row {row} has the label {text!r}, which is not one of {', '.join(classes[:20])}")
    return np.array([index[text] for text in texts], np.int64)


def read_trusted(source: object, classes: Sequence[str], n_rows: int) -> TrustedRows:
    """Trusted rows: a table, (rows, labels), a dict from row to label, or an array of labels with -1 for unknown.

    A table has a column `true_label` (or checked_label, or label; blank if not checked) and either `row` or
    `given_label`. Filled lists from `warpi pick` are such tables; their columns say which rows were drawn at random.
    Rows of other tables are assumed to be drawn at random.
    """
    if source is None:
        return TrustedRows.none()
    if isinstance(source, str | Path):
        return _read_trusted_table(Path(source), classes, n_rows)
    if isinstance(source, Mapping):
        source = np.array(list(source)), np.array(list(source.values()))
    if isinstance(source, tuple):
        row, labels = np.asarray(source[0]), np.asarray(source[1])
    else:
        every = np.asarray(source)
        if every.dtype.kind not in "iu" or every.shape != (n_rows,):
            raise UserError(
                "trusted must be (rows, labels), a dict from row to label, or one number per row (-1: unknown)"
            )
        row = np.flatnonzero(every >= 0)
        labels = every[row]
    if len(row) != len(labels):
        raise UserError(f"trusted has {len(row)} rows and {len(labels)} labels; pass one label per row")
    return TrustedRows.from_rows(_check_rows(row, n_rows, "trusted"), encode(labels, classes, "trusted"))


def _read_trusted_table(path: Path, classes: Sequence[str], n_rows: int) -> TrustedRows:
    columns = read_columns(path)
    true_name = next((name for name in _TRUE if name in columns), None)
    given_name = next((name for name in _GIVEN if name in columns), None)
    if true_name is None or ("row" not in columns and given_name is None):
        raise UserError(f"{path} needs the column true_label, and either row (starting at 0) or given_label")
    filled = [i for i, cell in enumerate(columns[true_name]) if cell]
    true = encode(np.array([columns[true_name][i] for i in filled], dtype=str), classes, str(path))
    if "row" not in columns:
        given = encode(np.array([columns[given_name or ""][i] for i in filled], dtype=str), classes, str(path))
        return TrustedRows.none()._replace(pairs_given=given, pairs_true=true)
    try:
        row = np.array([int(columns["row"][i]) for i in filled], np.int64)
    except (ValueError, OverflowError) as e:
        raise UserError(f"{path}: the column row must contain row numbers, starting at 0 ({e})") from e
    row = _check_rows(row, n_rows, str(path))
    if "part" not in columns:
        return TrustedRows.from_rows(row, true)
    random = np.array([columns["part"][i] == "random" for i in filled], np.bool_)
    cells = [{name: values[i] for name, values in columns.items()} for i in filled]
    weight = np.array([row_weight(c) if r else 1.0 for c, r in zip(cells, random, strict=True)])
    return TrustedRows.from_rows(row, true, random, weight)


def _check_rows(row: NDArray[Any], n_rows: int, what: str) -> Ints:
    if row.dtype.kind not in "iu" or row.ndim != 1:
        raise UserError(f"{what}: row numbers must be integers, starting at 0")
    if len(row) and (row.min() < 0 or row.max() >= n_rows):
        wrong = row.max() if row.max() >= n_rows else row.min()
        raise UserError(f"{what}: row {wrong} is out of range; row numbers go from 0 to {n_rows - 1}")
    if len(np.unique(row)) != len(row):
        raise UserError(f"{what}: a row occurs twice; list every row once")
    return row.astype(np.int64)
