"""Read tables (.csv, .tsv, .parquet) and folders of texts as data sets."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from warpi.data.dataset import Dataset, NewInputs
from warpi.data.numeric import CategoryColumn, Column, Columns, TextColumn
from warpi.datasets.columns.choose import Chooser, Notes, is_id, warn_trusted_name
from warpi.datasets.columns.encode import TableOptions, encode_table
from warpi.datasets.columns.raw import Raw, Table, Words, read_columns
from warpi.datasets.delimited_files import drop_flag, is_nameless, shorten_list
from warpi.datasets.label_columns import AUDIT_COLUMNS, CORRECTION_COLUMNS, GIVEN, LABEL_COLUMNS, read_label_columns
from warpi.datasets.labels import blank_missing, encode_labels, normalize_labels, to_texts
from warpi.errors import UserError, nearest

_MAX_CATEGORIES = 1000  # of a column
_MIN_CATEGORIES = 30  # of a column of a large table
_CATEGORY_CELLS = 100_000_000  # values of the features of all categories (400 MB); a large table keeps fewer categories
_MAX_DENSE = 5 * _CATEGORY_CELLS  # more of them are stored sparse
_UNUSED = "columns that are not in the {} are not used"


def read_table(
    path: Path,
    label: str | None = None,
    drop: Sequence[str] = (),
    like: Dataset | None = None,
    options: TableOptions | None = None,
) -> Dataset:
    """Read a table with one example per row, or a folder of texts. docs/data.md describes how columns become features.

    Rows of the splits test and trusted become separate examples, with their `clean_label` if it is filled. The classes
    are the values of both label columns, numbers in numerical order.

    For a second file, `like` is the data set of the first. Both have the same columns, categories and classes, but the
    second may lack the dropped columns.
    """
    options = options or TableOptions()
    first = _columns_of(like, path)
    label = label or (first.label if first else "label")
    _check_drop(path, drop, label)
    kinds = {} if first else options.kinds()
    table = read_columns(path, label, (*drop, *(first.drop if first else ())), first, kinds)
    if not first:
        for flag, names in (("--drop", drop), ("--types and --text", kinds)):
            for name in names:
                if name not in table.names:
                    raise no_column(name, table, f"{flag} takes some of these")
    if label not in table.columns:
        advice = "add it with the checked labels" if first else "choose the label with --label COLUMN"
        raise no_column(label, table, advice)
    earlier = _pop_earlier_labels(table, label, first)
    used = (label, *LABEL_COLUMNS, *CORRECTION_COLUMNS)
    texts = {name: _labels(table.columns[name]) for name in used if name in table.columns}
    texts |= {name: _labels(values) for name, values in earlier.items()}
    labels = read_label_columns(texts, label, path, table.at, classes=like.classes if like else None)
    notes = Notes()
    if first:
        check_same_columns(table, first, notes)
        columns = first
    else:
        declared = table.lines is None
        columns = choose_columns(table, label, tuple(drop), kinds, labels.rows["train"], notes, declared=declared)
    encoded = encode_table(table, columns, options, notes, None if first else labels.rows["train"])
    notes.log(path)
    parts = {part: (encoded.pick(rows), labels.labels(part)) for part, rows in labels.rows.items()}
    return Dataset.from_parts(path.stem, parts, labels.classes, encoding=encoded.columns, **labels.facts())


def read_new_table(
    path: Path, columns: Columns, classes: tuple[str, ...], options: TableOptions | None = None
) -> NewInputs:
    """Read rows to predict: the feature columns of the first table, with or without labels."""
    table = read_columns(path, columns.label, columns.drop, columns, {}, new=True)
    notes = Notes()
    check_same_columns(table, columns, notes)
    labels = {
        name: encode_labels(blank_missing(_labels(table.columns[name]), classes), classes, table.at)
        for name in dict.fromkeys((columns.label, "clean_label"))
        if name in table.columns
    }
    encoded = encode_table(table, columns, options or TableOptions(), notes)
    notes.log(path)
    return NewInputs(encoded.pick(range(encoded.x.shape[0])), labels, table.files)


def _labels(raw: Raw) -> list[str]:
    """Labels of a table column as text, '' if missing."""
    if not isinstance(raw, Words):
        return to_texts(raw)
    words = normalize_labels(raw.words)
    return [words[k] for k in raw.codes.tolist()]


# -- columns -----------------------------------------------------------------------------------------------------------


def _columns_of(like: Dataset | None, path: Path) -> Columns | None:
    if like is None:
        return None
    if not isinstance(like.encoding, Columns):
        raise UserError(f"{path} is a table, but {like.name} is not; use the same format for both")
    return like.encoding


def _check_drop(path: Path, drop: Sequence[str], label: str) -> None:
    if isinstance(drop, str):
        raise UserError(f"drop must be a list of columns, got {drop!r}; write [{drop!r}]")
    if label in drop:
        raise UserError(
            f"{path}: {label!r} contains the labels and cannot be dropped; choose another label with --label"
        )
    for name in drop:
        if name in LABEL_COLUMNS and name != "trusted":  # a feature in older versions
            raise UserError(f"{path}: {name!r} is a reserved name and cannot be dropped; rename it")


def _pop_earlier_labels(table: Table, label: str, first: Columns | None) -> dict[str, Raw]:
    """Remove and return the column `given`, the labels before they were checked, unless it is a feature.

    In a second table, it is a feature if it was one in the first. In a first table, it is a feature if it has values
    that are not classes, unless `warpi correct` wrote the table, because corrections may leave a class without rows.
    """
    names = [name for name in GIVEN if name in table.columns and name != label]
    if first:
        names = [name for name in names if name not in first.features]
    elif CORRECTION_COLUMNS[0] not in table.columns:
        classes = {"", *_labels(table.columns[label])}
        names = [name for name in names if classes.issuperset(_labels(table.columns[name]))]
    return {name: table.columns.pop(name) for name in names}


def _feature_names(table: Table, label: str) -> list[str]:
    special = (label, *LABEL_COLUMNS, *CORRECTION_COLUMNS, *AUDIT_COLUMNS)
    return [name for name in table.columns if name not in special]


def choose_columns(
    table: Table,
    label: str,
    drop: tuple[str, ...],
    kinds: dict[str, str],
    train: Sequence[int],
    notes: Notes,
    *,
    declared: bool,
) -> Columns:
    """Decide how every feature column of a training table becomes features.

    `declared` says whether the file declares the types of its columns.
    """
    fit = np.zeros(len(_labels(table.columns[label])), dtype=bool)
    fit[list(train)] = True
    names = _feature_names(table, label)
    chooser = Chooser(notes, fit, _limit_categories(table, names, len(fit)), declared)
    features: dict[str, Column] = {}
    unused: list[str] = []
    for j, name in enumerate(table.names):
        if name not in names:
            continue
        raw = table.columns[name]
        if is_nameless(name) and name not in kinds and _is_blank(raw):  # after a separator at the end of every row
            unused.append(name)
            continue
        if is_nameless(name) and name not in kinds and not is_id(name, raw):
            raise UserError(f"{table.path}: column {j + 1} has no name; name or delete it{table.or_drop(name)}")
        column = chooser.choose(name, raw, kinds.get(name))
        if column is None:
            unused.append(name)
            continue
        warn_trusted_name(name, raw, table.path)
        features[name] = column
    if not features:
        dropped = f"; --drop ignores {shorten_list(drop)}: keep one of them" if drop else ""
        why = "".join(f"; {line}" for line in notes.lines())
        raise UserError(f"{table.path}: no feature column is left; columns: {shorten_list(table.names)}{dropped}{why}")
    columns = Columns(label, features, (*drop, *unused))
    has_texts = any(isinstance(column, TextColumn) for column in features.values())
    n_categories = sum(column.width for column in features.values() if isinstance(column, CategoryColumn))
    return replace(columns, sparse=has_texts or n_categories * len(fit) > _MAX_DENSE)


def _is_blank(raw: Raw) -> bool:
    """Whether every cell of a column is missing."""
    if isinstance(raw, Words):
        return not any(raw.words)
    return raw.dtype.kind == "f" and bool(np.isnan(raw).all())


def _limit_categories(table: Table, names: Sequence[str], n: int) -> int:
    """The largest number of categories per column with which the features of all categories fit into memory."""
    columns = [raw for name in names if isinstance(raw := table.columns[name], Words)]
    distinct = np.array([len(raw.words) for raw in columns if 2 * len(raw.words) <= n])
    limits = range(_MIN_CATEGORIES, _MAX_CATEGORIES + 1)
    return max((c for c in limits if np.minimum(distinct, c).sum() * n <= _CATEGORY_CELLS), default=_MIN_CATEGORIES)


def check_same_columns(table: Table, columns: Columns, notes: Notes) -> None:
    """Raise if a feature column is missing; note columns that are not used."""
    missing = [name for name in columns.features if name not in table.columns]
    added = [name for name in _feature_names(table, columns.label) if name not in columns.features]
    added = [name for name in added if not is_nameless(name)]
    if missing:
        differ = {"lacks": missing, "adds": [] if table.new else added}
        parts = " and ".join(f"{verb} {shorten_list(map(repr, names))}" for verb, names in differ.items() if names)
        both = f"if they are not features, drop them from both tables with {drop_flag(*missing)}"
        advice = "; " + ("add them: cells may be empty" if table.new else both)
        raise UserError(f"{table.path}: columns differ from those of the training table: it {parts}{advice}")
    for name in added:
        notes.add(_UNUSED.format("run" if table.new else "training table") + ": {}", repr(name))


def no_column(name: str, table: Table, advice: str) -> UserError:
    near = nearest(name, table.names)
    hint = f" (did you mean {near!r}?)" if near else ""
    return UserError(f"{table.path} has no column {name!r}{hint}; columns: {shorten_list(table.names)}; {advice}")
