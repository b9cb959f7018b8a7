"""Read a table of any size in blocks of rows: .csv, .tsv, .parquet, and folders of .parquet or .arrow files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from warpi.data.numeric import Columns
from warpi.datasets.columns.parquet import index_columns, open_parquet, spell_out
from warpi.datasets.columns.raw import Raw, Table, Words, plan_columns, read_arrow, texts_of
from warpi.datasets.delimited_files import (
    GAPS,
    NEEDS_ROWS,
    TABLE_SUFFIXES,
    check_suffix,
    find_separator,
    iterate_rows,
    reading,
)
from warpi.datasets.label_columns import GIVEN
from warpi.datasets.tables import no_column
from warpi.errors import MALFORMED_ERRORS, UserError, blame_file, first_line
from warpi.utils.files import read_json

ROWS = 65_536  # rows converted together
_CSV_BYTES = 2**24  # bytes parsed together


class TableBlocks:
    """A table that is read in blocks of rows."""

    def __init__(
        self, path: Path, label: str, drop: tuple[str, ...], first: Columns | None, kinds: dict[str, str]
    ) -> None:
        self.path = path
        self.label = label
        self.drop = drop + (first.drop if first else ())
        self.kinds = kinds
        self.files = _list_files(path)
        self.declares_types = self.files[0].suffix.lower() in (".parquet", ".arrow")
        self.class_names: dict[str, list[str]] = {}  # of columns that contain positions of classes
        self.separator = ","
        self.header_line = 0
        table = Table(path, label, [], {}, None, first is not None)
        _, positions = plan_columns(table, self.drop, texts_of(label, first, kinds), self._names())
        self.names = table.names
        self.as_text = {table.names[j] for j in positions}
        for name in ("split", *GIVEN):
            if name in self.names and name not in self.drop:
                raise UserError(f"{path}: column {name!r} cannot be converted; write one file per split, or drop it")
        missing = [name for name in (*drop, *kinds) if name not in self.names]
        if label not in self.names and first is None:
            missing.append(label)
        if missing:
            raise no_column(missing[0], table, "--label, --drop and --types take some of these")

    def _names(self) -> list[str]:
        if self.declares_types:
            with self._reading(), self.files[0].open("rb") as file:
                schema = self._open(self.files[0], file)[0]
                self.class_names = _class_names(schema.metadata or {})
            index = index_columns(schema)
            return [name for name in schema.names if name not in index]
        self.separator = find_separator(self.path)
        self.header_line, names = next(iterate_rows(self.path, self.separator), (0, []))
        if not names:
            raise UserError(NEEDS_ROWS.format(self.path))
        with reading(self.path), self.path.open("rb") as file:  # pyarrow would read the rest of the file as one cell
            if sum(part.count(b'"') for part in iter(lambda: file.read(_CSV_BYTES), b"")) % 2:
                raise UserError(f"{self.path}: an odd number of quotes; is one left open?")
        return names

    def _open(self, path: Path, file: IO[bytes], names: list[str] | None = None) -> tuple[Any, Iterator[Any]]:
        """The schema of a file with declared types, and its columns in blocks of rows."""
        import pyarrow as pa

        if path.suffix.lower() == ".parquet":
            reader, schema = open_parquet(path, file)
            batches = reader.iter_batches(ROWS, columns=names)
            return schema, (spell_out(path, pa.Table.from_batches([batch]), schema) for batch in batches)
        stream = pa.ipc.open_stream(file)
        return stream.schema, (_checked(pa.Table.from_batches([batch.select(names)])) for batch in stream)

    def _open_csv(self, names: list[str]) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import csv

        as_text = dict.fromkeys(self.names, pa.string())
        batches = csv.open_csv(
            self.path,
            csv.ReadOptions(block_size=_CSV_BYTES, column_names=self.names, skip_rows=self.header_line),
            csv.ParseOptions(delimiter=self.separator, newlines_in_values=True),
            csv.ConvertOptions(column_types=as_text, include_columns=names, strings_can_be_null=False),
        )
        return (pa.Table.from_batches([batch]) for batch in batches)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with reading(self.path):
                yield
        except UserError:
            raise
        except MALFORMED_ERRORS as e:
            raise UserError(f"{self.path}: not a readable table ({first_line(e)})") from e

    def blocks(self) -> Iterator[Any]:
        """The columns of up to `ROWS` rows at a time, as pyarrow tables."""
        names = [name for name in self.names if name not in self.drop]
        with self._reading():
            for path in self.files:
                with path.open("rb") as file:
                    for table in self._open(path, file, names)[1] if self.declares_types else self._open_csv(names):
                        yield from (table.slice(start, ROWS) for start in range(0, len(table), ROWS))

    def read(self, block: Any, first: int = 0) -> Table:
        """The columns of a block whose first row has this number."""
        table = Table(self.path, self.label, self.names, {}, None, True, first=first)
        for name in block.column_names:
            table.columns[name] = self.read_column(table, name, block.column(name))
        return table

    def read_column(self, table: Table, name: str, column: Any) -> Raw:
        if not self.declares_types:
            return _read_cells(table, name, column, self.as_text)
        raw = read_arrow(table, name, column)
        if name in self.class_names and not isinstance(raw, Words):
            numbers = np.where(np.isnan(raw), -1, raw) if raw.dtype.kind == "f" else raw.astype(np.int64)
            if len(numbers) and not -1 <= numbers.min() <= numbers.max() < len(self.class_names[name]):
                n_classes = len(self.class_names[name])
                raise ValueError(f"column {name!r} contains numbers that are not positions of its {n_classes} classes")
            return Words(numbers.astype(np.int32) + 1, ["", *self.class_names[name]])
        return raw


def _read_cells(table: Table, name: str, column: Any, as_text: set[str]) -> Raw:
    """A column of a csv file: numbers, if all cells are numbers or missing; else text."""
    import pyarrow as pa
    from pyarrow import compute

    if name not in as_text:
        cells = compute.utf8_trim_whitespace(column)
        gap = compute.is_in(compute.utf8_lower(cells), pa.array(sorted(GAPS)))
        try:
            numbers = compute.if_else(gap, None, cells).cast(pa.float64())
            return np.asarray(numbers.to_numpy())
        except pa.ArrowInvalid:
            pass  # it contains words
    return read_arrow(table, name, column)


def _checked(table: Any) -> Any:
    table.validate(full=True)  # a damaged file may refer to values that do not exist
    return table


def _list_files(path: Path) -> list[Path]:
    """The files of a table. A folder contains one split of a data set, as parquet or as `datasets` saves it to disk."""
    if not path.is_dir():
        check_suffix(path, TABLE_SUFFIXES)
        return [path]
    state = path / "state.json"
    if state.is_file():
        with blame_file(state):
            names = [entry["filename"] for entry in read_json(state, "save the data set again")["_data_files"]]
            if not names or any(Path(name).name != name or not name.endswith(".arrow") for name in names):
                raise ValueError(f"files {names}")
        return [path / name for name in names]
    if files := sorted(path.glob("*.parquet")):
        return files
    below = sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file())
    advice = f"pass one of its splits, such as {path / below[0]}" if below else "pass a table or a folder of .parquet"
    raise UserError(f"{path} contains no table; {advice}")


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """The names of the classes of each column, from the metadata that `datasets` stores."""
    if b"huggingface" not in metadata:
        return {}
    features = json.loads(metadata[b"huggingface"])["info"]["features"]
    return {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
