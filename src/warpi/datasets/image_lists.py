"""Lists of images: .csv, .tsv and .parquet files with a column `path`."""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.dataset import Dataset
from warpi.data.examples import Examples
from warpi.data.image_files import FileExamples
from warpi.data.split import Split
from warpi.datasets.columns.parquet import index_columns, open_parquet, spell_out
from warpi.datasets.columns.raw import LabelCollector, Table, read_arrow
from warpi.datasets.delimited_files import (
    check_column_names,
    detect_separator,
    read_cells,
    reading,
    shorten_list,
)
from warpi.datasets.label_columns import BY_AUDIT, CORRECTION_COLUMNS, LABEL_FACTS
from warpi.datasets.labels import MARK_NAMES
from warpi.errors import MALFORMED_ERRORS, UserError, first_line, missing_package
from warpi.utils.limits import check_expansion, check_regular

_ROWS = 65_536  # that are read together
_ODD = r"^$|^[/.]|/[./]|/$"  # a path that may need `os.path.normpath`, or is not allowed


class PathList(Sequence[str]):
    """Paths in an Arrow array. One Python object per path would take three times the memory."""

    def __init__(self, texts: Any) -> None:
        self._texts = texts  # a pyarrow array of large strings

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            texts: list[str] = self._texts.slice(start, max(0, stop - start)).to_pylist()
            return texts[::step] if step > 0 else [self[i] for i in range(start, stop, step)]
        text: str = self._texts[index].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _ROWS):
            yield from self[start : start + _ROWS]

    def take(self, rows: Sequence[int]) -> "PathList":
        return PathList(self._texts.take(np.asarray(rows)))

    def replace_odd(self, normalize: Callable[[int, str], str]) -> "PathList":
        """The list after `normalize` has replaced paths that are not in their shortest form."""
        import pyarrow as pa
        from pyarrow import compute

        parts = []
        for start in range(0, len(self), _ROWS):
            part = self._texts.slice(start, _ROWS)
            odd = compute.match_substring_regex(part, _ODD)
            rows = np.flatnonzero(odd.to_numpy(zero_copy_only=False)).tolist()
            new = [normalize(start + i, part[i].as_py()) for i in rows]
            parts.append(compute.replace_with_mask(part, odd, pa.array(new, pa.large_string())) if rows else part)
        return PathList(pa.concat_arrays(parts))


def take_paths(paths: Sequence[str], rows: Sequence[int]) -> Sequence[str]:
    """Some paths of a list."""
    if isinstance(paths, PathList):
        return paths if len(rows) == len(paths) else paths.take(rows)  # they are ascending
    return tuple(paths[i] for i in rows)


def find_repeated(paths: Sequence[str]) -> tuple[int, int] | None:
    """The first row with a path that an earlier row also has, and that row."""
    hashes: NDArray[np.int64] = np.fromiter(map(hash, paths), np.int64, len(paths))
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    first_row: dict[str, int] = {}
    for i in np.flatnonzero(counts[inverse] > 1).tolist():
        if (j := first_row.setdefault(paths[i], i)) != i:
            return i, j
    return None


class Manifest(NamedTuple):
    """The cells of a list of images."""

    path: Path
    lines: Sequence[int] | None  # of a .csv or .tsv file
    columns: dict[str, Sequence[str]]  # by lower-case name; of a .parquet file only paths and labels

    def where(self, row: int) -> str:
        return f"row {row}" if self.lines is None else f"line {self.lines[row]}"

    def at(self, row: int) -> str:
        return f"{self.path} {self.where(row)}"

    @classmethod
    def read(cls, path: Path, required: Sequence[str]) -> "Manifest":
        """Read a list with the `required` columns; the last one may be the label."""
        if path.suffix.lower() == ".parquet":
            return cls(path, None, _read_parquet(path, required))
        names, rows, lines = read_cells(path)
        names = _check_names(path, names, required)
        return cls(path, lines, {name: [row[j] for row in rows] for j, name in enumerate(names)})


def is_manifest(path: Path) -> bool:
    """Whether a file is a list of images and not a table: it has a column `path` of texts."""
    check_regular(path)
    if path.suffix.lower() == ".parquet":
        return _lists_paths(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = next((line for line in iter(lambda: file.readline(100_000), "") if line.strip()), "")
            separator = detect_separator(path, file)
    except (OSError, UnicodeDecodeError):
        return False
    names = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
    return "path" in (name.strip().lower() for name in names)


def _lists_paths(path: Path) -> bool:
    """Whether a .parquet file has a column `path` of texts. False if it cannot be read; its reader reports why."""
    try:
        from pyarrow import parquet, types

        with path.open("rb") as file:
            schema = parquet.read_schema(file)
    except (ImportError, OSError, *MALFORMED_ERRORS):
        return False
    kinds = [field.type for field in schema if field.name.strip().lower() == "path"]
    values = [kind.value_type if types.is_dictionary(kind) else kind for kind in kinds]
    return any(types.is_string(kind) or types.is_large_string(kind) for kind in values)


def _check_names(path: Path, names: Sequence[str], required: Sequence[str]) -> list[str]:
    names = check_column_names(path, map(str.lower, names))
    for name in required:
        if name not in names:
            raise UserError(f"{path} has no column {name!r}; its columns are: {shorten_list(names)}")
    return names


def _read_parquet(path: Path, required: Sequence[str]) -> dict[str, Sequence[str]]:
    """The paths and labels of a .parquet file, read in blocks of rows."""
    try:
        import pyarrow as pa
    except ImportError as e:
        raise missing_package("pyarrow", "reading .parquet", "tables") from e
    wanted = {"label", *required, *LABEL_FACTS, *MARK_NAMES, "state"}
    parts: list[Any] = []
    try:
        with reading(path), path.open("rb") as file:
            reader, schema = open_parquet(path, file)
            index = index_columns(schema)
            stored = [name for name in schema.names if name not in index]
            names = dict(zip(stored, _check_names(path, [name.strip() for name in stored], required), strict=True))
            used = {old: name for old, name in names.items() if name in wanted}
            labels = {name: LabelCollector() for name in used.values() if name != "path"}
            for batch in reader.iter_batches(_ROWS, columns=list(used)):
                block = spell_out(path, pa.Table.from_batches([batch]), schema)
                for old, name in used.items():
                    if name == "path":
                        parts.append(_texts(path, block.column(old)))
                        check_expansion(path, sum(part.nbytes for part in parts))
                    else:
                        table = Table(path, name, stored, {}, None, True)
                        labels[name].add(read_arrow(table, name, block.column(old)))
    except UserError:
        raise
    except MALFORMED_ERRORS as e:
        raise UserError(f"{path}: not a readable parquet file ({first_line(e)})") from e
    if not parts or not sum(map(len, parts)):
        raise UserError(f"{path}: no rows")
    columns: dict[str, Sequence[str]] = {"path": PathList(pa.concat_arrays(parts))}
    return columns | {name: collected.finish().to_list() for name, collected in labels.items()}


def _texts(path: Path, column: Any) -> Any:
    """A column of paths as one array of large strings, '' for missing ones."""
    import pyarrow as pa
    from pyarrow import compute, types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise UserError(f"{path}: column 'path' contains values of type {kind}, not texts; drop it to read a table")
    column = compute.fill_null(column.cast(pa.large_string()), "")
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.large_string())


def write_list(data: Dataset, out: Path, base: Path) -> None:
    """Write a data set of image files as a .parquet list, with paths relative to the folder `base`."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as e:
        raise missing_package("pyarrow", "writing .parquet", "tables") from e
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        table = pa.concat_tables(_tables_of_parts(data, base), promote_options="default")
        parquet.write_table(table, part, row_group_size=_ROWS)
        os.replace(part, out)
    except UnicodeEncodeError as e:
        raise UserError(f"{data.name}: some names of images or folders are not UTF-8; rename them") from e
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror or first_line(e)}") from e
    finally:
        part.unlink(missing_ok=True)


def _tables_of_parts(data: Dataset, base: Path) -> Iterator[Any]:
    """Yield the rows of training, test and trusted images as pyarrow tables."""
    import pyarrow as pa

    given = data.given if data.before_audit is None else _first(data.before_audit, data.given)
    train = Split(data.examples, torch.arange(len(data.y)), data.y)
    facts: dict[str, tuple[Split | None, dict[str, Tensor | None]]] = {
        "train": (train, {"clean_label": data.clean, "given": given}),
        "test": (data.test, {"clean_label": data.test.y if data.test and data.test_is_clean else None}),
        "trusted": (data.meta, {"given": data.meta_given}),
    }
    for name, (split, labels) in facts.items():
        if split is not None:
            known = {"label": split.y, **{column: y for column, y in labels.items() if y is not None}}
            columns = {"path": _below(split.examples, base)}
            columns |= {column: _name_classes(y, data.classes) for column, y in known.items()}
            if split is train and data.trusted is not None:
                columns["trusted"] = pa.array(data.trusted.numpy())
            if split is train and data.before_audit is not None:
                columns[CORRECTION_COLUMNS[0]] = _name_classes(-(data.before_audit < 0).long(), BY_AUDIT[:1])
            yield pa.table({**columns, "split": pa.array([name] * len(split))})


def _first(labels: Tensor, others: Tensor | None) -> Tensor:
    """`labels`, and `others` where they are unknown."""
    return labels if others is None else torch.where(labels >= 0, labels, others)


def _name_classes(labels: Tensor, classes: Sequence[str]) -> Any:
    """The names of labels as an Arrow dictionary array; missing if unknown."""
    import pyarrow as pa

    codes = pa.array(labels.numpy(), pa.int32(), mask=(labels < 0).numpy())
    return pa.DictionaryArray.from_arrays(codes, pa.array(classes, pa.string()))


def _below(examples: Examples, base: Path) -> Any:
    """The paths of image files relative to a folder that contains them, as an array of large strings."""
    import pyarrow as pa

    assert isinstance(examples, FileExamples)
    prefix = os.path.relpath(examples.root, base)
    prefix = "" if prefix == os.curdir else os.path.join(prefix, "")
    starts = range(0, len(examples), _ROWS)
    blocks = ([prefix + path for path in examples.paths[start : start + _ROWS]] for start in starts)
    return pa.concat_arrays([pa.array(block, pa.large_string()) for block in blocks])
