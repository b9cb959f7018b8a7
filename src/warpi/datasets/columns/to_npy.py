"""Convert a table that does not fit into memory to a .npy file of features, block by block.

NAME.npy            features [N, D] of float32
NAME_labels.npy     labels; NAME_clean.npy and NAME_trusted.npy if the table has such columns
NAME_table.json     how the columns became features, and the names of the classes

The first pass collects the labels and every k-th row; these rows decide how the columns become features. The second
pass writes the features. Only one block of rows is in memory at a time.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from warpi.data.numeric import Columns, needs_float64
from warpi.datasets.columns.choose import Notes
from warpi.datasets.columns.encode import TableOptions, encode_table
from warpi.datasets.columns.raw import LabelCollector, Raw, Table, Words
from warpi.datasets.columns.table_blocks import TableBlocks
from warpi.datasets.delimited_files import is_number
from warpi.datasets.label_columns import LABEL_COLUMNS, find_trusted_column
from warpi.datasets.labels import CodedLabels, blank_missing, check_counts, parse_marks, sort_classes
from warpi.datasets.tables import check_same_columns, choose_columns
from warpi.errors import UserError, blame_file, missing_package
from warpi.utils.files import read_json, write_json

FORMAT = "warpi-table/1"
_SAMPLE = 200_000  # this many rows, or up to twice as many, decide how columns become features


class Converted(NamedTuple):
    """What `convert_table` has written."""

    path: Path  # of the features
    n_rows: int
    n_features: int


class TableForm(NamedTuple):
    """How the columns of a converted table became features, and the names of its classes."""

    columns: Columns
    classes: tuple[str, ...]


def read_table_form(features: Path) -> TableForm | None:
    """The form of the table from which a .npy file was converted; None if it was not."""
    file = features.with_name(f"{features.stem}_table.json")
    if features.suffix.lower() != ".npy" or not file.is_file():
        return None
    with blame_file(file):
        stored = read_json(file, "convert the table again")
        if stored["format"] != FORMAT or not all(isinstance(name, str) for name in stored["classes"]):
            raise ValueError("another format")
        return TableForm(Columns.from_form(stored["columns"]), tuple(stored["classes"]))


def convert_table(
    data: Path | str,
    out: Path | str,
    *,
    label: str | None = None,
    drop: Sequence[str] = (),
    like: Path | str | None = None,
    options: TableOptions | None = None,
) -> Converted:
    """Write the features and labels of a table of any size to `out`, a .npy file.

    The table is a .csv, .tsv or .parquet file, or a folder with one split of a data set: .parquet files, or what
    `save_to_disk` of Hugging Face `datasets` writes.

    `like` is a .npy file that was converted before: the columns are read in the same way, and rows without labels are
    accepted. Texts and numbers that need float64 are refused: they do not fit into features of float32.
    """
    out = Path(out)
    if out.suffix != ".npy" or out.exists():
        advice = "exists; delete it first" if out.exists() else "the name of the file must end in .npy"
        raise UserError(f"--out {out}: {advice}")
    form = None if like is None else read_table_form(Path(like))
    if like is not None and form is None:
        raise UserError(f"--like {like}: there is no {Path(like).stem}_table.json; pass a .npy from `warpi convert`")
    try:
        import pyarrow  # noqa: F401
    except ImportError as e:
        raise missing_package("pyarrow", "converting a table", "tables") from e
    options = options or TableOptions()
    label = label or (form.columns.label if form else "label")
    source = TableBlocks(Path(data), label, tuple(drop), form.columns if form else None, options.kinds())
    labels, sample, n, step = _scan(source)
    notes = Notes()
    if form is None:
        columns = _choose(source, sample, step, notes, options)
    else:
        columns = form.columns
        check_same_columns(sample, columns, notes)
    classes, arrays = _encode_labels(source, labels, form)
    stem = out.with_suffix("")
    for name, values in arrays.items():
        np.save(f"{stem}_{name}.npy", values)
    write_json(Path(f"{stem}_table.json"), {"format": FORMAT, "columns": columns.form(), "classes": list(classes)})
    _write_features(source, columns, options, notes, out, n)
    notes.log(source.path)
    return Converted(out, n, columns.width)


def _scan(source: TableBlocks) -> tuple[dict[str, CodedLabels], Table, int, int]:
    """The labels of all rows, every k-th row, the number of rows, and k."""
    import pyarrow as pa

    names = [name for name in (source.label, *LABEL_COLUMNS) if name in source.names and name not in source.drop]
    labels = {name: LabelCollector() for name in dict.fromkeys(names)}
    kept: list[Any] = []
    n, step, n_kept = 0, 1, 0
    for block in source.blocks():
        table = Table(source.path, source.label, source.names, {}, None, True, first=n)
        for name, collected in labels.items():
            collected.add(source.read_column(table, name, block.column(name)))
        kept.append(block.take(np.arange(-n % step, len(block), step)))
        n += len(block)
        n_kept += len(kept[-1])
        if n_kept > 2 * _SAMPLE:
            kept = [pa.concat_tables(kept).take(np.arange(0, n_kept, 2))]
            step, n_kept = 2 * step, len(kept[0])
    if not n:
        raise UserError(f"{source.path}: no rows")
    return (
        {name: collected.finish() for name, collected in labels.items()},
        source.read(pa.concat_tables(kept)),
        n,
        step,
    )


def _choose(source: TableBlocks, sample: Table, step: int, notes: Notes, options: TableOptions) -> Columns:
    """How the columns become features, by every k-th row."""
    sample = sample._replace(new=False)
    counting = [name for name in sample.columns if name != source.label and _counts_up(sample.columns[name], step)]
    for name in counting:
        if name not in source.kinds:
            del sample.columns[name]
            notes.add("{} counts the rows and is not used", repr(name))
    n = _length(sample)
    drop = (*source.drop, *(name for name in counting if name not in source.kinds))
    columns = choose_columns(sample, source.label, drop, source.kinds, range(n), notes, declared=source.declares_types)
    if columns.sparse:
        raise UserError(
            f"{source.path}: texts and very many categories cannot be converted; drop them (--drop COLUMN,...), or "
            "compute the vectors of texts with `warpi embed`"
        )
    encoded = encode_table(sample, columns, replace(options, missing="fill"), Notes(), range(n))
    if encoded.columns.double:
        assert isinstance(encoded.x, np.ndarray)
        names = [name for name, _, part in columns.blocks() if needs_float64(encoded.x[:, part])]
        raise UserError(
            f"{source.path}: the numbers in {', '.join(map(repr, names))} need float64, which is not converted; "
            "subtract a constant or use another unit, or drop them with --drop"
        )
    return columns


def _length(table: Table) -> int:
    raw = next(iter(table.columns.values()))
    return len(raw.codes) if isinstance(raw, Words) else len(raw)


def _counts_up(raw: Raw, step: int) -> bool:
    """Whether a column, of which `raw` contains every `step`-th row, numbers the rows of the table."""
    if isinstance(raw, Words) or raw.ndim != 1 or raw.dtype.kind not in "iuf" or len(raw) < 20:
        return False
    return bool((np.diff(raw.astype(np.float64)) == step).all())


def _encode_labels(
    source: TableBlocks, texts: dict[str, CodedLabels], form: TableForm | None
) -> tuple[tuple[str, ...], dict[str, NDArray[Any]]]:
    """The classes, and the arrays to store: labels, clean, trusted."""

    def at(row: int) -> str:
        return f"{source.path}, row {row}"

    if source.label not in texts:  # new rows without labels
        assert form is not None
        return form.classes, {}
    given = texts[source.label]
    count = given.count_texts()
    if (row := given.first_row(count.keys() - {""})) is not None:
        raise UserError(f"{at(row)}: column {source.label!r} is empty; label such rows or drop them")
    check_counts(count, source.label, source.path, named=form is not None)
    coded = {"labels": given}
    if "clean_label" in texts:
        clean = texts["clean_label"]
        coded["clean"] = clean._replace(texts=tuple(blank_missing(clean.texts, given.texts)))
    different = {text for column in coded.values() for text in column.texts} - {""}
    classes = form.classes if form else sort_classes(different)
    arrays = {name: _to_stored(column.encode(classes, at).numpy(), classes) for name, column in coded.items()}
    marks = find_trusted_column(texts.keys() - {source.label}, source.path)
    if marks:
        column = texts[marks]
        marked = parse_marks(column.texts, lambda k: at(int((column.codes == k).argmax())), marks).numpy()
        arrays["trusted"] = marked[column.codes]
    return classes, arrays


def _to_stored(y: NDArray[np.int64], classes: tuple[str, ...]) -> NDArray[Any]:
    """Labels as `read_arrays` expects them: positions of classes, or names if some of these are numbers."""
    if not any(map(is_number, classes)):
        return y.astype(np.int16 if len(classes) < 2**15 else np.int64)
    are_integers = all(re.fullmatch("-?[0-9]{1,18}", name) and name == str(int(name)) for name in classes)
    if are_integers and "-1" not in classes:
        return np.array([-1, *map(int, classes)])[y + 1]
    return np.array(["", *classes])[y + 1]


def _write_features(
    source: TableBlocks, columns: Columns, options: TableOptions, notes: Notes, out: Path, n: int
) -> None:
    """Write the features of all rows. The file gets its name when it is complete."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    noted: set[tuple[str, str]] = set()
    done = 0
    try:
        with part.open("wb") as file:
            npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (n, columns.width)})
            for block in source.blocks():
                block_notes = Notes()
                encoded = encode_table(source.read(block, done), columns, options, block_notes)
                assert isinstance(encoded.x, np.ndarray)
                file.write(np.ascontiguousarray(encoded.x, "<f4").data)
                done += len(block)
                for sentence, mentions in block_notes.columns.items():  # once per column
                    for mention in mentions:
                        if (key := (sentence, mention.partition(" (")[0])) not in noted:
                            noted.add(key)
                            notes.add(sentence, mention)
            os.fsync(file.fileno())
        if done != n:
            raise UserError(f"{source.path} has changed while it was converted; convert it again")
        os.replace(part, out)
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror}; it needs {n * columns.width * 4 >> 20} MiB") from e
    finally:
        part.unlink(missing_ok=True)
