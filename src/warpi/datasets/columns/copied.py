"""Columns of a table that are copied to the results about its rows: ids, and columns that the user names."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from warpi.data.numeric import Columns
from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.delimited_files import TABLE_SUFFIXES, find_separator, name_columns, read_cells
from warpi.datasets.hugging_face.saved import find_image_column, is_saved, read_saved_table
from warpi.datasets.label_columns import AUDIT_COLUMNS, CORRECTION_COLUMNS, GIVEN, LABEL_COLUMNS, OLD_NAMES
from warpi.errors import UserError


def read_copied_columns(
    path: Path | str, encoding: object, ids: Sequence[str] = (), keep: Sequence[str] = (), part: str | None = "train"
) -> dict[str, list[str]]:
    """The cells of the id columns of a table, and of the columns `keep`, for all rows of a part (None: of every part).

    If `ids` is empty, the id columns are those that are not features (according to `encoding`) and differ in (almost)
    every row. If the data is not a table, there are none. Numbers are written as in the file.
    """
    path = Path(path)
    asked = [*ids, *keep]
    is_table = is_saved(path) or (path.suffix.lower() in TABLE_SUFFIXES and path.is_file())
    if not is_table or (is_saved(path) and find_image_column(path)):
        if asked:
            raise UserError(f"--id and --keep copy columns of a table, but {path} is not one; omit them")
        return {}
    names, lines, parts = read_table_cells(path)
    if missing := [name for name in asked if name not in names]:
        raise UserError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(names)}")
    rows = [line for line, line_part in zip(lines, parts, strict=True) if part is None or line_part == part]
    columns = {name: [line[j] for line in rows] for j, name in enumerate(names)}
    ids = ids or [name for name in _unused(names, encoding) if _differ(columns[name])]
    return {name: columns[name] for name in dict.fromkeys([*ids, *keep])}


def _unused(names: Sequence[str], encoding: object) -> list[str]:
    """Columns that are neither features nor labels."""
    if not isinstance(encoding, Columns):
        return []
    other = (encoding.label, "path", *LABEL_COLUMNS, *GIVEN, *CORRECTION_COLUMNS, *AUDIT_COLUMNS)
    return [name for name in names if name not in encoding.features and name not in other]


def _differ(cells: Sequence[str]) -> bool:
    """Whether (almost) every row has a different value."""
    filled = [cell for cell in cells if cell]
    return 2 * len(filled) > len(cells) and 10 * len(set(filled)) >= 9 * len(filled)


def read_table_cells(path: Path) -> tuple[list[str], Sequence[Sequence[str]], list[str]]:
    """The column names, the rows of cells and the part of each row (train, test or trusted) of a table."""
    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    if is_saved(path):
        names, rows = _read_frame(read_saved_table(path))
    elif path.suffix.lower() == ".parquet":
        names, rows = _read_frame(read_parquet(path))
    else:
        names, rows, _ = read_cells(path, find_separator(path))
    names = name_columns(names)
    if "split" not in names:
        return names, rows, ["train"] * len(rows)
    j = names.index("split")
    parts = [row[j].strip().lower() for row in rows]
    return names, rows, [OLD_NAMES.get(part, part) for part in parts]


def _read_frame(frame: Any) -> tuple[list[str], list[tuple[str, ...]]]:
    columns: list[list[str]] = []
    for column in frame.columns:
        is_float = str(column.type) in ("halffloat", "float", "double")  # numpy writes as few digits as needed
        cells = column.to_numpy() if is_float else column.to_pylist()
        columns.append(["" if cell is None or cell != cell else str(cell) for cell in cells])
    return frame.column_names, list(zip(*columns, strict=True))


def insert_copied(
    columns: Mapping[str, Any], copied: Mapping[str, Sequence[str]], rows: Iterable[int]
) -> dict[str, Any]:
    """Insert the copied cells of these rows after the first column. A name that is taken gets the prefix `data_`."""
    positions = list(rows)
    added = {
        (f"data_{name}" if name in columns else name): np.array([cells[i] for i in positions], dtype=object)
        for name, cells in copied.items()
    }
    first = next(iter(columns))
    return {first: columns[first], **added, **columns}
