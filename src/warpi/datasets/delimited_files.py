"""Read .csv and .tsv files, with errors that say what to fix."""

import csv
import itertools
import logging
import math
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from warpi.errors import UserError, format_count, nearest_path
from warpi.utils.limits import check_regular, limit, refuse
from warpi.utils.settings import join_names

logger = logging.getLogger("warpi.datasets")

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = frozenset({"", "nan", "na", "n/a", "null", "none"})
"""Words that mean a missing number. In other columns, only an empty cell is missing."""
GAPS = MISSING | {"?", "-", "--", ".", "nil", "nat", "<na>", "#n/a", "#na", "n.a.", "missing", "unknown"}
"""Words that mean a missing cell in a feature column of numbers or dates."""
_SEPARATORS = ";,\t|"  # if both ; and , fit, the comma is a decimal comma
NEEDS_ROWS = "{}: needs a first line with the names of the columns, and at least one row"


_read_before: ContextVar[bool] = ContextVar("_read_before", default=False)


def warn_once(message: str) -> None:
    """Log a warning about a file, unless it has been logged before: a file may be read more than once."""
    if not _read_before.get():
        _warn(message)


@cache
def _warn(message: str) -> None:
    logger.warning(message)


@contextmanager
def read_before() -> Iterator[None]:
    """Context manager: omit the warnings about files, because an earlier command has read and shown them."""
    token = _read_before.set(True)
    try:
        yield
    finally:
        _read_before.reset(token)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Context manager: turn I/O and decoding errors for a user's file into a `UserError`."""
    if isinstance(what, Path):
        check_regular(what)
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e).partition("\n")[0]
        near = nearest_path(what) if isinstance(e, FileNotFoundError) else None
        advice = "check the path and its permissions" if near in (None, str(what)) else f"did you mean {near!r}?"
        raise UserError(f"cannot read {what}: {reason}; {advice}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{what} is not UTF-8 text ({e.reason} at byte {e.start}); save it as UTF-8") from e


def data_root(root: Path | None, data: str, how_to_get: str) -> Path:
    """The folder of a data set: `root` if given, else the environment variable WARPI_DATA."""
    if root is None and not os.environ.get("WARPI_DATA"):
        raise UserError(f"{data} needs its files: {how_to_get}")
    return root or Path(os.environ["WARPI_DATA"])


def check_suffix(path: Path, allowed: Sequence[str]) -> str:
    """The lower-case suffix of an existing file."""
    if path.suffix.lower() not in allowed:
        raise UserError(f"{path}: the suffix must be one of {', '.join(allowed)}, got {path.suffix!r}")
    with reading(path):
        if not path.is_file():
            raise UserError(f"there is no file {path}")
    return path.suffix.lower()


class Cells(NamedTuple):
    """The cells of a .csv or .tsv file."""

    names: list[str]  # of the columns
    rows: list[list[str]]  # each with one cell per column
    lines: list[int]  # the line on which each row ends


def read_cells(path: Path, separator: str | None = None) -> Cells:
    """Read a .csv or .tsv file whose first line names the columns.

    If `separator` is None, it is detected, and rows of blank cells are skipped like blank lines.
    """
    rows = list(iterate_rows(path, separator))
    if len(rows) < 2:
        raise UserError(NEEDS_ROWS.format(path))
    return Cells(rows[0][1], [row for _, row in rows[1:]], [line for line, _ in rows[1:]])


def iterate_rows(path: Path, separator: str | None = None) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a .csv or .tsv file, each with the line on which it ends. The first row names the columns."""
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from _parse_rows(path, file, separator)
        except UnicodeDecodeError as e:
            line = _first_broken_line(path)
            raise UserError(f"{path}: line {line} is not UTF-8 text; save the table with the encoding UTF-8") from e


def _parse_rows(path: Path, file: TextIO, separator: str | None) -> Iterator[tuple[int, list[str]]]:
    skip_blank = separator is None
    if separator is None:
        separator = detect_separator(path, file)
        file.seek(0)
    reader = _open_csv(path, file, separator, strict=True)
    width = 0
    blank: list[tuple[int, list[str]]] = []  # rows that are skipped if only blank rows follow
    try:
        for row in reader:
            cells = list(map(str.strip, row))
            if not row or (skip_blank and not any(cells)):
                continue
            if not width:
                check_separator(path, cells, separator)
                width = len(row)
            if len(row) != width:
                raise UserError(
                    f"{path}: line {reader.line_num} has {format_count(len(row), 'cell')}, the first has {width:,}; "
                    "the first must name the columns, and cells that contain the separator need quotes"
                )
            if width > 1 and not any(cells):
                blank.append((reader.line_num, cells))
                continue
            yield from blank
            blank.clear()
            yield reader.line_num, cells
    except csv.Error as e:
        raise UserError(f"{path}: line {reader.line_num}: {e}; is a quote left open?") from e
    if blank:
        line = blank[0][0]
        which = f"row, on line {line}, is" if len(blank) == 1 else f"{len(blank)} rows, from line {line} on, are"
        warn_once(f"{path}: the last {which} blank and not used")


def _open_csv(path: Path, file: TextIO, separator: str, *, strict: bool) -> Any:
    csv.field_size_limit(max(limit("LINE"), csv.field_size_limit()))  # a cell may be as long as a line
    return csv.reader(_bounded_lines(path, file), delimiter=separator, skipinitialspace=True, strict=strict)


def _bounded_lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file. Raises if one is so long that it would fill the memory."""
    longest = limit("LINE")
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise refuse(f"{path}: line {number}", "is too long", "LINE")
        yield line


def _first_broken_line(path: Path) -> int:
    data = path.read_bytes()
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        return data[: e.start].count(b"\n") + 1
    return 1


def read_records(path: Path) -> list[dict[str, str]]:
    """The rows of a .csv file, each as a dict from column name to cell."""
    names, rows, _ = read_cells(path, ",")
    return [dict(zip(names, row, strict=True)) for row in rows]


def is_number(cell: str) -> bool:
    """Whether a cell is a number. Python reads 1_0 as 10."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def parse_numbers(cells: Collection[str], gaps: Collection[str] = MISSING) -> NDArray[np.float64] | None:
    """Cells as numbers, NaN if missing; None if any cell is neither."""
    try:
        numbers = np.array([float(cell) if cell else math.nan for cell in cells])
    except ValueError:  # a word, possibly one for a missing number
        try:
            numbers = np.array([math.nan if cell.lower() in gaps else float(cell) for cell in cells])
        except ValueError:
            return None
    return None if "_" in "".join(cells) else numbers  # python reads 1_0 as 10


def check_separator(path: Path, names: Sequence[str], separator: str = ",") -> None:
    """Reject a first line that uses another separator, as spreadsheets write it in some countries."""
    if len(names) == 1 and (
        other := next((mark for mark in _SEPARATORS if mark != separator and mark in names[0]), "")
    ):
        raise UserError(f"{path} seems to be separated by {other!r}; save it with {separator!r} between the cells")


def find_separator(path: Path) -> str:
    """The separator of a .csv or .tsv table."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with reading(path), path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return detect_separator(path, file)


def detect_separator(path: Path, file: TextIO) -> str:
    """The separator by which the first two rows have the same number of cells, at least two.

    If several fit, it is the one with the most cells.
    """
    fits = {}
    for separator in _SEPARATORS:
        file.seek(0)
        rows = _open_csv(path, file, separator, strict=False)
        try:
            widths = [len(row) for row in itertools.islice(filter(None, rows), 2)] or [0]
        except csv.Error:  # a cell is longer than the limit: a quote is left open
            widths = [0]
        fits[separator] = (widths[0] == widths[-1] > 1, widths[0])
    best = max(fits, key=lambda separator: fits[separator])
    return best if fits[best][1] > 1 else ","


def name_columns(names: Iterable[str]) -> list[str]:
    """The names of columns. As in pandas, one without a name is `Unnamed: 0`, or `Unnamed: 0.1` if that is taken."""
    texts = list(map(str.strip, names))
    for j in [j for j, text in enumerate(texts) if not text]:
        choices = (f"Unnamed: {j}" + (f".{k}" if k else "") for k in itertools.count())
        texts[j] = next(name for name in choices if name not in texts)
    return texts


def is_nameless(name: str) -> bool:
    """Whether `name_columns`, or the program that wrote the file, made up the name for a column without one."""
    return re.fullmatch(r"Unnamed: \d+(\.\d+)*", name) is not None


def check_column_names(path: Path, names: Iterable[object]) -> list[str]:
    """Return the names of all columns. Raise if they are not unique."""
    texts = name_columns(map(str, names))
    for j, name in enumerate(texts):
        if name in texts[:j]:
            raise UserError(f"{path}: columns {texts.index(name) + 1} and {j + 1} are both called {name!r}; rename one")
    return texts


def shorten_list(names: Iterable[object]) -> str:
    """The first 20 names for a message, and the total number if there are more."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:20]) + (f", ... ({len(texts)} in all)" if len(texts) > 20 else "")


def drop_flag(*names: str) -> str:
    """The flag that drops columns of a table."""
    return f"--drop {shlex.quote(join_names(names))}" if len(names) <= 20 else "--drop COLUMN,..."
