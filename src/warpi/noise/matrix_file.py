"""Read a custom transition matrix from a file: T[i, j] is the probability that class i is labeled as j."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.datasets.arrays import load_arrays
from warpi.datasets.delimited_files import check_suffix, is_number, read_cells, reading
from warpi.errors import UserError, format_count, unknown
from warpi.utils.files import read_json

SUFFIXES = (".npy", ".csv", ".json")
ROUNDING = 1e-6  # tolerance for the sum of a row, as in a noise file
_CSV_ADVICE = "write e.g. 0.25 (class names belong in the first row and the first column)"
_JSON_ADVICE = "write a list of rows of numbers, or an object with 'classes' (names) and 'T' (such a list)"


class _MatrixFile(NamedTuple):
    """The content of a file, in its own order."""

    T: NDArray[Any]
    true: list[str] | None = None  # names of the rows; None: the classes of the data in their order
    given: list[str] | None = None  # names of the columns


def read_matrix(file: Path | str, classes: Sequence[str]) -> Tensor:
    """Read T, with rows and columns in the order of `classes`. It is not normalized.  [K, K] float64

    .npy: the array. .csv: only numbers, or with a first row and a first column of class names, in any order.
    .json: a list of lists, or {"classes": [...], "T": [[...]]} as `warpi audit --json` and `warpi corrupt` write it.
    """
    path = Path(file)
    matrix = {".npy": _npy, ".csv": _csv, ".json": _json}[check_suffix(path, SUFFIXES)](path)
    rows, columns = (_order(path, names, classes) for names in (matrix.true, matrix.given))
    return check_matrix(path, matrix.T, matrix.true or classes, matrix.given or classes)[rows][:, columns]


def _order(path: Path, names: list[str] | None, classes: Sequence[str]) -> list[int]:
    """The position of each class of the data in the file.  [K]"""
    if names is None:
        return list(range(len(classes)))
    for name in names:
        if name not in classes:
            raise unknown(f"class in {path}:", name, classes)
        if names.count(name) > 1:
            raise UserError(f"{path}: the class {name!r} is named twice; name each class of the data once")
    for name in classes:
        if name not in names:
            raise UserError(f"{path}: class {name!r} occurs in the data but not in the matrix; add a row and a column")
    return [names.index(name) for name in classes]


def check_matrix(path: Path | str, array: NDArray[Any], true: Sequence[str], given: Sequence[str]) -> Tensor:
    """Check that T has one row per true class and one column per given class, and that each row is a distribution."""
    K = len(true)
    if array.shape != (K, K):
        raise UserError(
            f"{path}: T is {_size(array)}, but the data has {K} classes; it must be {K} x {K}, with one row per true "
            "class and one column per given label (a .csv may have class names in its first row and first column)"
        )
    T = torch.from_numpy(array.astype(np.float64))
    for i, j in (~((T >= 0) & (T <= 1 + ROUNDING))).nonzero().tolist():
        raise UserError(
            f"{path}: row {i + 1} ({true[i]!r}), column {j + 1} ({given[j]!r}) is {float(T[i, j]):.9g}; a probability "
            "must be between 0 and 1"
        )
    for i in (~_are_one(T.sum(1))).nonzero()[:, 0].tolist():
        advice = "divide each row by its sum, or write more digits"
        if bool(_are_one(T.sum(0)).all()):
            advice = "the columns sum to 1, so transpose the matrix"
        raise UserError(
            f"{path}: row {i + 1} ({true[i]!r}) sums to {float(T[i].sum()):.9g}, not to 1 (within {ROUNDING:g}); "
            f"rows must be true classes and columns given labels; {advice}"
        )
    return T


def _are_one(sums: Tensor) -> Tensor:
    return (sums - 1).abs() < ROUNDING


def _npy(path: Path) -> _MatrixFile:
    with reading(path), path.open("rb") as file:
        if file.read(2) == b"PK":  # a .npz, which could be of any size
            raise UserError(f"{path} must contain one array [K, K], got several arrays; save it with numpy.save")
    array = load_arrays(path)
    if isinstance(array, dict) or array.dtype.kind not in "biuf" or array.ndim != 2:
        content = "several arrays" if isinstance(array, dict) else f"{array.dtype} {list(array.shape)}"
        raise UserError(f"{path} must contain one array [K, K] of numbers, got {content}; save it with numpy.save")
    return _MatrixFile(array)


def _csv(path: Path) -> _MatrixFile:
    cells = read_cells(path)
    if len(cells.names) == 1:
        raise UserError(f"{path} has one cell per line; separate the numbers with commas, as in 0.75,0.25")
    if all(map(is_number, cells.names)):
        return _MatrixFile(_to_array(path, [cells.names, *cells.rows], is_number, _CSV_ADVICE))
    true = [row[0] for row in cells.rows]
    given = cells.names[1:]
    if len(true) != len(given):
        raise UserError(
            f"{path} has {format_count(len(true), 'row')} and {format_count(len(given), 'column')}, "
            "not counting the first row and column of names; it must have as many rows as columns, and names "
            "for both or for neither"
        )
    return _MatrixFile(_to_array(path, [row[1:] for row in cells.rows], is_number, _CSV_ADVICE), true, given)


def _json(path: Path) -> _MatrixFile:
    with reading(path):
        content = read_json(path, _JSON_ADVICE)
    if not isinstance(content, dict):
        return _MatrixFile(read_rows(path, content))
    if content.get("T") is None:
        raise UserError(f"{path} has no 'T', the transition matrix; {_JSON_ADVICE}")
    names = content.get("classes")
    T = read_rows(path, content["T"])
    if names is None:
        return _MatrixFile(T)
    if not isinstance(names, list) or not all(type(name) in (str, int) for name in names) or len(names) != len(T):
        got = f"got {names!r:.60}, and T is {_size(T)}"
        raise UserError(f"{path}: 'classes' must be one name per row of T; {got}; {_JSON_ADVICE}")
    names = [str(name) for name in names]
    return _MatrixFile(T, names, names)


def read_rows(path: Path | str, rows: Any) -> NDArray[Any]:
    """Convert nested JSON lists to an array."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise UserError(f"{path}: T must be a list of lists, got {rows!r:.60}; {_JSON_ADVICE}")
    return _to_array(path, rows, lambda value: type(value) in (int, float) and not abs(value) > 1e300, _JSON_ADVICE)


def _to_array(path: Path | str, rows: list[list[Any]], is_valid: Callable[[Any], bool], advice: str) -> NDArray[Any]:
    for i, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            n = format_count(len(row), "number")
            raise UserError(f"{path}: row {i} of T has {n}, but the first has {len(rows[0])}; {advice}")
        for j, value in enumerate(row, 1):
            if not is_valid(value):
                raise UserError(f"{path}: row {i} of T, column {j} must be a number, got {value!r:.60}; {advice}")
    return np.array(rows, dtype=object).astype(np.float64)


def _size(T: NDArray[Any]) -> str:
    return " x ".join(map(str, T.shape))
