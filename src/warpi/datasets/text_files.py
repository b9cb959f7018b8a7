"""Reading text files that a user names, with errors that say what to fix."""

import csv
import io
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from warpi.errors import UserError
from warpi.utils.settings import join_names


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Context manager: turn I/O and decoding errors for a user's file into a `UserError`."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e).partition("\n")[0]
        raise UserError(f"cannot read {what}: {reason}; check the path and its permissions") from e
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
    rows: list[list[str]]  # each with as many cells
    lines: list[int]  # the line on which each row ends


def read_cells(path: Path, delimiter: str | None = None) -> Cells:
    """Read a .csv or .tsv file whose first line names the columns.

    Without a delimiter, the more frequent of comma and tab in the first line is used, and rows of blank cells are
    skipped like blank lines.
    """
    with reading(path):
        data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not UTF-8 text; save the table with the encoding UTF-8") from e
    skip_blank = delimiter is None
    if delimiter is None:
        delimiter = detect_separator(text.lstrip("\r\n").partition("\n")[0])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if not row or (skip_blank and not any(map(str.strip, row))):
                continue
            rows.append([cell.strip() for cell in row])
            lines.append(reader.line_num)
            check_separator(path, rows[0], delimiter)
            if len(row) != len(rows[0]):
                raise UserError(
                    f"{path}: line {reader.line_num} has {len(row)} cells, the first has {len(rows[0])}; the first "
                    "must name the columns, and cells that contain the separator need quotes"
                )
    except csv.Error as e:
        raise UserError(f"{path}: line {reader.line_num}: {e}; is a quote left open?") from e
    if len(rows) < 2:
        raise UserError(f"{path}: needs a first line with the names of the columns, and at least one row")
    return Cells(rows[0], rows[1:], lines[1:])


def read_records(path: Path) -> list[dict[str, str]]:
    """The rows of a .csv file, each as a dict from column name to cell."""
    names, rows, _ = read_cells(path, ",")
    return [dict(zip(names, row, strict=True)) for row in rows]


def check_separator(path: Path, names: Sequence[str], delimiter: str = ",") -> None:
    """Reject a first line that uses another separator, as spreadsheets write it in some countries."""
    if len(names) == 1 and (other := next((mark for mark in ";\t,|" if mark != delimiter and mark in names[0]), "")):
        raise UserError(f"{path} seems to be separated by {other!r}; save it with {delimiter!r} between the cells")


def detect_separator(line: str) -> str:
    """The separator of a line: tab or comma."""
    return "\t" if line.count("\t") > line.count(",") else ","


def check_column_names(path: Path, names: Iterable[object]) -> list[str]:
    """The names of all columns, which must be unique. One without a name is called `Unnamed: 0`, as in pandas."""
    texts = [str(name).strip() or f"Unnamed: {j}" for j, name in enumerate(names)]
    for j, name in enumerate(texts):
        if name in texts[:j]:
            raise UserError(f"{path}: columns {texts.index(name) + 1} and {j + 1} are both called {name!r}; rename one")
    return texts


def shorten_list(names: Iterable[object]) -> str:
    """Up to 20 names, and how many there are, for a message."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:20]) + (f", ... ({len(texts)} in all)" if len(texts) > 20 else "")


def drop_flag(*names: str) -> str:
    """The flag that drops columns of a table."""
    return f"--drop {shlex.quote(join_names(names))}" if len(names) <= 20 else "--drop COLUMN,..."
