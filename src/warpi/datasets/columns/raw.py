"""Read the columns of .csv, .tsv and .parquet files and of folders of texts. Repeated texts are stored once."""

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.data.decode import SUFFIXES
from warpi.data.numeric import Columns, NumberColumn
from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.delimited_files import (
    GAPS,
    NEEDS_ROWS,
    TABLE_SUFFIXES,
    check_column_names,
    check_suffix,
    drop_flag,
    find_separator,
    iterate_rows,
    parse_numbers,
    reading,
)
from warpi.datasets.hugging_face.saved import is_saved, read_saved_table
from warpi.datasets.label_columns import GIVEN, LABEL_COLUMNS, PARTS
from warpi.datasets.labels import CodedLabels, normalize_labels
from warpi.errors import UserError
from warpi.utils.links import check_links

_CHUNK = 10_000  # rows that are converted together


class Words(NamedTuple):
    """The cells of a text column. Each distinct text is stored once."""

    codes: NDArray[np.int32]  # [N] positions in `words`
    words: list[str]  # '' is a missing cell

    @classmethod
    def of(cls, cells: Iterable[str]) -> "Words":
        return _TextBuilder().add(cells).finish()

    def cells(self) -> list[str]:
        """[N] the text of each row."""
        return [self.words[k] for k in self.codes.tolist()]

    def counts(self) -> NDArray[np.int64]:
        """How often each word occurs."""
        return np.bincount(self.codes, minlength=len(self.words))

    def take(self, values: NDArray[Any]) -> NDArray[Any]:
        """[N] the value of each row, from the values of the words."""
        return values[self.codes]


Raw = NDArray[Any] | Words
"""A column as it was read: numbers [N], dates [N] (datetime64), vectors [N, D], or text."""


class LabelCollector:
    """The cells of a label column, collected block by block as codes."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.parts: list[NDArray[np.int32]] = []

    def add(self, raw: Raw) -> None:
        coded = (
            CodedLabels(tuple(raw.words), raw.codes.astype(np.int64)) if isinstance(raw, Words) else CodedLabels.of(raw)
        )
        used, codes = np.unique(coded.codes, return_inverse=True)  # a name without rows is not a class
        positions = [self.index.setdefault(coded.texts[k], len(self.index)) for k in used.tolist()]
        self.parts.append(np.array(positions, np.int32)[codes])

    def finish(self) -> CodedLabels:
        return CodedLabels(tuple(normalize_labels(self.index)), np.concatenate(self.parts).astype(np.int64))


class Table(NamedTuple):
    """The columns of a table as they were read, and where its rows are."""

    path: Path
    label: str
    names: list[str]  # of all columns
    columns: dict[str, Raw]  # without dropped ones
    lines: NDArray[np.int32] | None  # on which each row ends; None: not a text file
    new: bool  # whether the rows are to be predicted, so that the columns are fixed
    files: tuple[str, ...] | None = None  # of a folder of texts
    first: int = 0  # the number of the first row, if this is a part of a table

    def at(self, row: int) -> str:
        return f"{self.path}, {self.row(row)}"

    def row(self, row: int) -> str:
        if self.files is not None:
            return self.files[row]
        return f"row {self.first + row}" + (f" (line {self.lines[row]})" if self.lines is not None else "")

    def cell(self, name: str, row: int) -> str:
        raw = self.columns[name]
        return raw.words[raw.codes[row]] if isinstance(raw, Words) else f"{raw[row]:g}"

    def or_drop(self, *names: str) -> str:
        """The advice to drop columns, if they may be dropped."""
        what = "the column" if len(names) == 1 else "the columns"
        fixed = self.new or {self.label, *LABEL_COLUMNS} & {*names}
        return "" if fixed else f", or drop {what} with {drop_flag(*names)}"


def read_columns(
    path: Path,
    label: str,
    drop: Collection[str],
    first: Columns | None,
    kinds: dict[str, str],
    *,
    new: bool = False,
) -> Table:
    """Read the columns of a file. Labels, categories and texts are read as text."""
    if path.is_dir() and not is_saved(path):
        return _read_text_folder(path, label, new)
    table = Table(path, label, [], {}, None, new)
    plan = partial(plan_columns, table, drop, texts_of(label, first, kinds))
    if path.is_dir():
        return _read_frame(table, plan, read_saved_table(path))
    suffix = check_suffix(path, TABLE_SUFFIXES)
    if suffix == ".parquet":
        return _read_frame(table, plan, read_parquet(path))
    read = read_csv_columns(path, find_separator(path), plan)
    table.columns.update((name, raw) for name, raw in zip(table.names, read.columns, strict=True) if raw is not None)
    return table._replace(lines=read.lines)


def texts_of(label: str, first: Columns | None, kinds: Mapping[str, str]) -> set[str]:
    """The columns to read as text: labels, and columns that are not numbers in the first table or by choice."""
    features = first.features if first else {}
    known_texts = {name for name, column in features.items() if not isinstance(column, NumberColumn)}
    as_text = {label, *LABEL_COLUMNS, *GIVEN, *known_texts, *(name for name in kinds if kinds[name] != "number")}
    return as_text - {name for name in GIVEN if isinstance(features.get(name), NumberColumn)}


def plan_columns(
    table: Table, drop: Collection[str], as_text: Collection[str], names: Iterable[object]
) -> tuple[set[int], set[int]]:
    """Store the names of the columns. Returns the positions of those to ignore, and of those to read as text."""
    table.names.extend(check_column_names(table.path, names))
    for name in table.names:
        if name.lower() in LABEL_COLUMNS and name not in (*LABEL_COLUMNS, table.label, *drop):
            meaning = f"column {name!r} looks like {name.lower()!r}, which has a special meaning"
            raise UserError(f"{table.path}: {meaning}; rename it{table.or_drop(name)}")
    positions = range(len(table.names))
    return {j for j in positions if table.names[j] in drop}, {j for j in positions if table.names[j] in as_text}


def _read_frame(table: Table, plan: Callable[[Iterable[object]], tuple[set[int], set[int]]], frame: Any) -> Table:
    if not frame.num_rows:
        raise UserError(f"{table.path}: no rows")
    ignored, _ = plan(frame.column_names)
    for j, name in enumerate(table.names):
        if j not in ignored:
            table.columns[name] = read_arrow(table, name, frame.column(j))
    return table


def read_arrow(table: Table, name: str, column: Any) -> Raw:
    """A column of a pyarrow table: numbers, dates, vectors or text."""
    import pyarrow as pa
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    is_label = name in (table.label, *LABEL_COLUMNS)
    if types.is_integer(kind) and not column.null_count:  # not as floats: large numbers may be names of classes
        numbers: NDArray[Any] = column.to_numpy()
        return numbers.astype(np.uint64 if compute.min(column).as_py() >= 0 else np.int64)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy())
    if types.is_duration(kind) and not is_label:
        seconds = column.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.float64()).to_numpy() / 1e6
        return np.asarray(seconds)
    if (types.is_timestamp(kind) or types.is_date(kind)) and not is_label:
        return np.asarray(column.cast(pa.timestamp("us"), safe=False).to_numpy())
    if (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)) and not is_label:
        return _read_vectors(table, name, column)
    if types.is_boolean(kind):  # as Python writes them
        column = compute.if_else(column, "True", "False")
    elif types.is_null(kind) or types.is_time(kind):
        column = column.cast(pa.string())
    elif not (types.is_string(kind) or types.is_large_string(kind)):
        raise UserError(
            f"{table.path}: column {name!r} contains values of type {kind}; convert it to numbers, text or "
            f"true/false, or delete it{table.or_drop(name)}"
        )
    column = compute.fill_null(compute.utf8_trim_whitespace(column), "").dictionary_encode().combine_chunks()
    encoded = column if isinstance(column, pa.DictionaryArray) else column.chunk(0)
    return Words(encoded.indices.to_numpy().astype(np.int32), encoded.dictionary.to_pylist())


def _read_vectors(table: Table, name: str, column: Any) -> NDArray[Any]:
    """A column of lists of numbers as [N, D]; NaN if a list or a number is missing."""
    import pyarrow as pa
    from pyarrow import compute, types

    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.float64)  # NaN: no list
    known = lengths[~np.isnan(lengths)].astype(np.int64)
    inner = column.type.value_type
    if (
        not len(known)
        or known.min() != known.max()
        or not known[0]
        or not (types.is_integer(inner) or types.is_floating(inner))
    ):
        sizes = f"of {known.min()} to {known.max()} values" if len(known) else "that are all missing"
        raise UserError(
            f"{table.path}: column {name!r} contains lists {sizes} of type {inner}; a vector needs the same number of "
            f"numbers in every row; delete it{table.or_drop(name)}"
        )
    is_single = inner in (pa.float16(), pa.float32())
    vectors = np.full((len(lengths), int(known[0])), np.nan, dtype=np.float32 if is_single else np.float64)
    flat = compute.list_flatten(column.drop_null()).cast(pa.float32() if is_single else pa.float64())
    values = flat.to_numpy(zero_copy_only=False)
    vectors[~np.isnan(lengths)] = values.reshape(-1, int(known[0]))
    return vectors


# -- folders of texts --------------------------------------------------------------------------------------------------


def is_text_folder(path: Path) -> bool:
    """Whether a folder contains texts: its first folder with images or .txt files has .txt files only."""
    for _, folders, files in os.walk(path):
        folders.sort()
        endings = {os.path.splitext(file)[1].lower() for file in files}
        if endings.intersection(SUFFIXES):
            return False
        if ".txt" in endings:
            return True
    return False


def _read_text_folder(path: Path, label: str, new: bool) -> Table:
    """A table of the .txt files below a folder: the text, its class (the name of its folder) and its split."""
    files = sorted(file.relative_to(path) for file in path.rglob("*.txt"))
    check_links(path, files, (path,))
    parts = {file.parts[0].lower() if len(file.parts) > 2 else "train" for file in files}
    has_parts = "train" in parts and parts <= {*PARTS, "meta"} and any(len(file.parts) > 2 for file in files)
    loose = [file for file in files if len(file.parts) < (3 if has_parts else 2)]
    if loose and not new:
        raise UserError(f"{path}: {loose[0]} is not in the folder of a class; make one folder of .txt files per class")
    texts = []
    for file in files:
        with reading(path / file):
            texts.append((path / file).read_text(encoding="utf-8-sig").strip())
    columns: dict[str, Raw] = {"text": Words.of(texts)}
    if not loose:
        columns[label] = Words.of(file.parts[-2] for file in files)
    if has_parts:
        columns["split"] = Words.of(file.parts[0] for file in files)
    return Table(path, label, list(columns), columns, None, new, tuple(map(str, files)))


# -- .csv and .tsv -----------------------------------------------------------------------------------------------------


class CsvColumns(NamedTuple):
    """The columns of a .csv or .tsv file."""

    names: list[str]
    columns: list[NDArray[np.float64] | Words | None]  # numbers, NaN if missing; else text; None: ignored
    lines: NDArray[np.int32]  # [N] the line on which each row ends


def read_csv_columns(
    path: Path, separator: str, plan: Callable[[list[str]], tuple[Collection[int], Collection[int]]]
) -> CsvColumns:
    """Read a .csv or .tsv file column by column, with far less memory than `read_cells` needs.

    A column is numeric if every cell is a number or means a missing one (`MISSING`). `plan` gets the names and returns
    the positions of columns to ignore, and of columns to read as text in any case.
    """
    names, rows = _open_rows(path, separator)
    ignored, as_text = plan(names)
    wanted = [j for j in range(len(names)) if j not in ignored]
    builders: dict[int, _TextBuilder | _NumberBuilder | _Restart] = {
        j: _TextBuilder() if j in as_text else _NumberBuilder() for j in wanted
    }
    lines: list[NDArray[np.int32]] = []
    for numbers, columns in _in_chunks(rows):
        lines.append(np.array(numbers, dtype=np.int32))
        for j, builder in builders.items():
            builders[j] = builder.add(columns[j])
    if not lines:
        raise UserError(NEEDS_ROWS.format(path))
    late = {j: _TextBuilder() for j, builder in builders.items() if isinstance(builder, _Restart)}
    if late:  # text after chunks of numbers: read these columns again, as text
        _, rows = _open_rows(path, separator)
        for _, columns in _in_chunks(rows):
            for j, builder in late.items():
                builder.add(columns[j])
    finished = {j: builder.finish() for j, builder in {**builders, **late}.items() if not isinstance(builder, _Restart)}
    return CsvColumns(names, [finished.get(j) for j in range(len(names))], np.concatenate(lines))


def _open_rows(path: Path, separator: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    rows = iterate_rows(path, separator)
    first = next(rows, None)
    if first is None:
        raise UserError(NEEDS_ROWS.format(path))
    return first[1], rows


def _in_chunks(rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[list[int], list[tuple[str, ...]]]]:
    """Line numbers and columns of up to `_CHUNK` rows at a time."""
    while chunk := list(itertools.islice(rows, _CHUNK)):
        yield [line for line, _ in chunk], list(zip(*(row for _, row in chunk), strict=True))


class _NumberBuilder:
    def __init__(self) -> None:
        self.parts: list[NDArray[np.float64]] = []

    def add(self, cells: Sequence[str]) -> "_NumberBuilder | _TextBuilder | _Restart":
        numbers = parse_numbers(cells, GAPS)
        if numbers is None:
            return _Restart() if self.parts else _TextBuilder().add(cells)
        self.parts.append(numbers)
        return self

    def finish(self) -> NDArray[np.float64]:
        return np.concatenate(self.parts)


class _TextBuilder:
    def __init__(self) -> None:
        self.index = _Positions()
        self.parts: list[NDArray[np.int32]] = []

    def add(self, cells: Iterable[str]) -> "_TextBuilder":
        self.parts.append(np.fromiter(map(self.index.__getitem__, cells), dtype=np.int32))
        return self

    def finish(self) -> Words:
        return Words(np.concatenate(self.parts), list(self.index))


class _Positions(dict[str, int]):
    """Numbers texts in the order of their first lookup."""

    def __missing__(self, text: str) -> int:
        self[text] = position = len(self)
        return position


class _Restart:
    """A column that turned out to be text after some chunks of numbers."""

    def add(self, _: Sequence[str]) -> "_Restart":
        return self
