"""The user's own rows: tables (.csv, .tsv, .parquet) and arrays (.npz, .npy)."""

import csv
import io
import math
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.augment import Crop
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.split import Split
from warpi.errors import UserError, missing, unknown

_RESERVED = ("clean_label", "verified", "split")
_MAX_CATEGORIES = 1000
_MISSING = {
    "",
    "nan",
    "na",
    "n/a",
    "null",
    "none",
}  # in a column of numbers; elsewhere only the first, others are words
_TRUE, _FALSE = {"1", "true", "t", "yes", "y", "x"}, {"0", "false", "f", "no", "n", ""}


@dataclass(frozen=True)
class Columns:
    """How the columns of a table became features. Kept with the data set, so that a second table is read alike."""

    label: str
    categories: Mapping[str, tuple[str, ...] | None]  # feature column, in order -> its categories; None: a number


def read_table(
    path: Path, label: str | None = None, *, classes: tuple[str, ...] | None = None, like: Dataset | None = None
) -> Dataset:
    """A table with one example a row; the first line (or the schema) names the columns.

    Columns of numbers become float32 features, all others one feature a distinct value, in sorted order. In .csv and
    .tsv a column is numeric if every cell is a number; .parquet declares it. A missing or infinite cell is refused.
    Column names with a meaning: `label` (or the one named) holds the class; `clean_label` the true class, blank where
    unknown; `verified` says (1/0, yes/no, true/false) that a person has checked the row, and where there is no such
    column, the rows of a partly filled `clean_label` are the checked ones; `split` is train, test or meta. Rows of
    test and meta become splits with a tensor of their own, are labelled by `clean_label` where that is filled, and do
    not count as rows of the data set. Classes are the values of both label columns, numbers in numerical order.

    A second file is read with `like`: the data set of the first, whose columns, categories and classes it then shares.
    """
    table = _read_parquet(path) if _suffix(path, (".csv", ".tsv", ".parquet")) == ".parquet" else _read_csv(path)
    known = _columns_of(like, path)
    label = label or (known.label if known else "label")
    if label not in table.columns:
        raise _no_label(label, table)
    columns = known or _fit(table, label)
    x = torch.from_numpy(_encode(table, columns, label))  # [N, D]

    given = _labels(table.columns[label])
    if "" in given:
        raise UserError(f"{table.at(given.index(''))}: column {label!r} is empty; label the row or drop it")
    true = [""] * len(given)
    if "clean_label" in table.columns:
        blank = _MISSING - {text.lower() for text in given}  # a class may be called 'none'
        true = ["" if text.lower() in blank else text for text in _labels(table.columns["clean_label"])]
    classes = classes or (like.classes if like else _sorted({*given, *true} - {""}))
    y, clean = (_numbered(texts, classes, table.at) for texts in (given, true))
    verified = _verified(_labels(table.columns["verified"]), table.at) if "verified" in table.columns else None

    parts = _parts(table, len(y))
    truth = torch.where(clean >= 0, clean, y)
    return _dataset(
        path,
        x={part: x[rows] for part, rows in parts.items()},
        y={part: (y if part == "train" else truth)[rows] for part, rows in parts.items()},
        clean=clean[parts["train"]],
        verified=None if verified is None else verified[parts["train"]],
        classes=classes,
        make=_features,
        encoding=columns,
    )


def read_arrays(
    path: Path, label: str | None = None, *, classes: tuple[str, ...] | None = None, like: Dataset | None = None
) -> Dataset:
    """Arrays of inputs and labels: a .npz with x and y, or a .npy of inputs with another .npy of labels.

    .npz: x [N, ...] and y [N] (or the key `label`); optional clean (-1, NaN or '' where unknown), verified [N],
    x_test and y_test, x_meta and y_meta, classes (K names). Keys may be in capitals; other keys are not looked at.
    .npy: the labels are in the file `label`, or beside NAME.npy in NAME_labels.npy or y.npy.

    x of two dimensions [N, D] is features, standardised later. uint8 of three is grey images [N, H, W]; of four it is
    [N, C, H, W] or [N, H, W, C] with C 1 or 3: channels are where a 1 or 3 stands; where one stands at both ends, they
    come first unless only the other reading is a square image. Anything else is refused. Square images are augmented.

    Labels are whole numbers or text. Where the names of the classes are given (`classes`, `like`, or in the file) and
    are not all numbers, whole numbers count them from 0. -1 in `clean` means unknown unless there is a class -1.
    `like` is the data set of the first file where this is a second one: the shapes must agree, the classes are shared.
    """
    arrays = _read_npz(path, label) if _suffix(path, (".npz", ".npy")) == ".npz" else _read_npy(path, label)
    x: dict[str, Tensor] = {}
    texts: dict[str, list[str]] = {}
    for part, end in {"train": "", "test": "_test", "meta": "_meta"}.items():
        if (f"x{end}" in arrays) != (f"y{end}" in arrays):
            raise UserError(f"{path}: x{end} and y{end} come together, got only one of them")
        if f"x{end}" in arrays:
            x[part] = _inputs(arrays[f"x{end}"], f"{path}: x{end}")
            texts[part] = _texts(arrays[f"y{end}"], f"{path}: y{end}", len(x[part]))
            if "" in texts[part]:
                raise UserError(f"{path}: row {texts[part].index('')} of y{end} has no label")
    if "clean" in arrays:
        texts["clean"] = _texts(arrays["clean"], f"{path}: clean", len(x["train"]))
    if classes is None and like is not None:
        classes = like.classes
    if classes is None and "classes" in arrays:
        classes = tuple(_texts(arrays["classes"], f"{path}: classes"))
        if len({*classes, ""}) <= len(classes):
            raise UserError(f"{path}: classes must be names that differ, got {_few(classes)}")
    if "clean" in texts and "-1" not in (classes or texts["train"]):
        texts["clean"] = ["" if text == "-1" else text for text in texts["clean"]]
    counted = classes is not None and _parsed(classes) is None
    classes = classes or _sorted({text for column in texts.values() for text in column} - {""})
    y = {
        part: _numbered(column, classes, lambda row: f"{path}, row {row} of {part}", counted)
        for part, column in texts.items()
    }

    first = like.examples if like else _features(x["train"]) if x["train"].ndim == 2 else _images(x["train"])
    if not isinstance(first, TensorExamples):
        raise UserError(f"{path} holds arrays, the first data set does not; give both in the same form")
    for part, tensor in x.items():
        if tensor.shape[1:] != first.x.shape[1:] or tensor.dtype != first.x.dtype:
            got, want = (f"{t.dtype} {list(t.shape[1:])}" for t in (tensor, first.x))
            raise UserError(f"{path}: an input of {part} is {got}, expected {want}")
    marks = _texts(arrays["verified"], f"{path}: verified", len(x["train"])) if "verified" in arrays else None
    return _dataset(
        path,
        x=x,
        y=y,
        clean=y.get("clean"),
        verified=None if marks is None else _verified(marks, lambda row: f"{path}, row {row}"),
        classes=classes,
        make=lambda tensor: TensorExamples(tensor, first.scale, first.crop, first.standardise),
    )


def _dataset(
    path: Path,
    x: Mapping[str, Tensor],
    y: Mapping[str, Tensor],
    clean: Tensor | None,
    verified: Tensor | None,
    classes: tuple[str, ...],
    make: Callable[[Tensor], TensorExamples],
    encoding: Columns | None = None,
) -> Dataset:
    """`x` and `y` by part (train, test, meta); `clean` and `verified` of the train part."""
    if clean is not None and bool((clean < 0).all()):
        clean = None
    if verified is None and clean is not None and bool((clean < 0).any()):
        verified = clean >= 0
    test, meta = (
        Split(make(x[part]), torch.arange(len(x[part])), y[part]) if part in x else None for part in ("test", "meta")
    )
    return Dataset(
        path.stem, make(x["train"]), y["train"], classes, clean, verified, meta=meta, test=test, encoding=encoding
    )


# -- labels -----------------------------------------------------------------------------------------------------------


def _labels(values: NDArray[Any]) -> list[str]:
    """Labels of a table column as text, '' where missing. 1.0 is the class 1: a column of whole numbers with blanks is
    often written so."""
    if values.dtype.kind != "O":
        return _plain(values)
    numbers = _parsed(values)
    blank = np.zeros(len(values), bool) if numbers is None else np.isnan(numbers)
    return ["" if b else re.sub(r"^([+-]?\d+)\.0*$", r"\1", text) for text, b in zip(values, blank, strict=True)]


def _texts(values: NDArray[Any], what: str, n: int | None = None) -> list[str]:
    """An array of n labels (whole numbers or text) as text, '' where missing."""
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1 or values.dtype.kind not in "iubfUS":
        raise UserError(f"{what} must be whole numbers or text, one a row; got {values.dtype} {list(values.shape)}")
    if n is not None and len(values) != n:
        raise UserError(f"{what} has {len(values)} rows, the inputs have {n}; there must be as many")
    if values.dtype.kind == "f" and (bad := np.isinf(values) | (np.floor(values) < values)).any():
        row = int(bad.argmax())
        raise UserError(f"{what}: row {row} holds {values[row]}; labels must be whole numbers or text")
    return _plain(values)


def _plain(values: NDArray[Any]) -> list[str]:
    if values.dtype.kind == "f":
        return ["" if math.isnan(v) else str(int(v)) if v.is_integer() else repr(v) for v in values.tolist()]
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    return [str(v).strip() for v in values.tolist()]


def _sorted(names: Collection[str]) -> tuple[str, ...]:
    """Numbers in numerical order; anything else, and numbers among words, as text."""
    numbers = _parsed(names)
    if numbers is None or np.isnan(numbers).any():
        return tuple(sorted(names))
    return tuple(name for _, name in sorted(zip(numbers, names, strict=True)))


def _numbered(
    texts: Sequence[str], classes: tuple[str, ...], at: Callable[[int], str], counted: bool = False
) -> Tensor:
    """Names -> [N] positions in `classes`, -1 for ''. `counted`: whole numbers are positions already."""
    index = {"": -1} | {name: k for k, name in enumerate(classes)}
    if counted:
        index = {str(k): k for k in range(len(classes))} | index
    _check(texts, index, at, "class")
    return torch.tensor([index[text] for text in texts], dtype=torch.int64)


def _verified(texts: Iterable[str], at: Callable[[int], str]) -> Tensor:
    """[N] bool"""
    texts = [text.lower() for text in texts]
    _check(texts, _TRUE | _FALSE, at, "value of 'verified'")
    return torch.tensor([text in _TRUE for text in texts])


def _check(texts: Iterable[str], allowed: Collection[str], at: Callable[[int], str], what: str) -> None:
    """Refuse the first text that is not allowed."""
    for row, text in enumerate(texts):
        if text not in allowed:
            raise unknown(f"{what} in {at(row)}:", text, (name for name in allowed if name))


# -- tables -----------------------------------------------------------------------------------------------------------


class _Table(NamedTuple):
    path: Path
    columns: dict[str, NDArray[Any]]  # each [N]: numbers (NaN: missing) or an object array of str ("": missing)
    lines: list[int] | None  # the line each row ends on; None: the file has no lines, and its types are declared

    def at(self, row: int) -> str:
        return f"{self.path}, row {row}" + (f" (line {self.lines[row]})" if self.lines else "")


def _read_csv(path: Path) -> _Table:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not UTF-8 text; save the table with the encoding UTF-8") from e
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if not row:  # a blank line
                continue
            rows.append(row)
            lines.append(reader.line_num)
            if len(row) != len(rows[0]):
                raise UserError(
                    f"{path}: line {reader.line_num} has {len(row)} cells, the first has {len(rows[0])}; "
                    "quote cells that hold the separator"
                )
    except csv.Error as e:
        raise UserError(f"{path}: line {reader.line_num}: {e}; is a quote left open?") from e
    if len(rows) < 2:
        raise UserError(f"{path}: a first line with the names of the columns and at least one row are needed")
    names = _checked_names(path, rows.pop(0))
    columns = {name: np.array([row[j].strip() for row in rows], dtype=object) for j, name in enumerate(names)}
    return _Table(path, columns, lines[1:])


def _read_parquet(path: Path) -> _Table:
    try:
        import pandas as pd

        frame = pd.read_parquet(path)
    except ImportError as e:  # pandas itself, or the pyarrow it needs here
        raise missing("pandas" if e.name == "pandas" else "pyarrow", "reading .parquet", "tables") from e
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not a readable parquet file ({str(e).splitlines()[0]})") from e
    columns: dict[str, NDArray[Any]] = {}
    for j, name in enumerate(_checked_names(path, frame.columns)):
        series = frame.iloc[:, j]
        categorical = isinstance(series.dtype, pd.CategoricalDtype)
        kind = "categorical" if categorical else pd.api.types.infer_dtype(series, skipna=True)
        if kind in ("integer", "floating", "mixed-integer-float"):
            whole = kind == "integer" and not series.isna().any()
            exact = np.uint64 if whole and series.min() >= 0 else np.int64
            columns[name] = series.to_numpy(dtype=exact if whole else np.float64, na_value=np.nan)
        elif kind in ("string", "boolean", "categorical", "empty"):
            cells = zip(series.astype(object), series.isna(), strict=True)
            columns[name] = np.array(["" if blank else str(cell).strip() for cell, blank in cells], dtype=object)
        else:
            raise UserError(
                f"{path}: column {name!r} holds values of type {kind}; allowed are numbers, text and true/false: "
                "convert the column or drop it"
            )
    if not len(frame):
        raise UserError(f"{path}: no rows")
    return _Table(path, columns, None)


def _checked_names(path: Path, names: Iterable[object]) -> list[str]:
    texts = [str(name).strip() for name in names]
    for j, name in enumerate(texts):
        if not name or re.fullmatch(r"Unnamed: \d+", name):
            raise UserError(f"{path}: column {j + 1} has no name; name it, or drop it if it only numbers the rows")
        if name in texts[:j]:
            raise UserError(f"{path}: columns {texts.index(name) + 1} and {j + 1} are both called {name!r}; rename one")
    return texts


def _columns_of(like: Dataset | None, path: Path) -> Columns | None:
    if like is None:
        return None
    if not isinstance(like.encoding, Columns):
        raise UserError(f"{path} is a table, {like.name} is not; give both in the same form")
    return like.encoding


def _fit(table: _Table, label: str) -> Columns:
    """Decide for every feature column whether it is a number or a set of categories."""
    categories: dict[str, tuple[str, ...] | None] = {}
    for name in _feature_names(table, label):
        values = table.columns[name]
        if values.dtype.kind != "O" or (table.lines and _parsed(values) is not None):
            categories[name] = None
            continue
        distinct = set(values.tolist())
        if len(distinct) > _MAX_CATEGORIES:
            raise UserError(
                f"{table.path}: column {name!r} is text with {len(distinct)} distinct values, at most "
                f"{_MAX_CATEGORIES} can be encoded; drop the column or make it numeric"
            )
        categories[name] = tuple(sorted(distinct - {""}))
    if not categories:
        raise UserError(f"{table.path}: no column is left to learn from; columns: {_few(table.columns)}")
    return Columns(label, categories)


def _feature_names(table: _Table, label: str) -> list[str]:
    return [name for name in table.columns if name != label and name not in _RESERVED]


def _encode(table: _Table, columns: Columns, label: str) -> NDArray[np.float32]:
    """[N, D] features"""
    got, want = _feature_names(table, label), columns.categories
    differ = {"lacks": [name for name in want if name not in got], "adds": [name for name in got if name not in want]}
    if any(differ.values()):
        parts = " and ".join(f"{verb} {_few(map(repr, names))}" for verb, names in differ.items() if names)
        raise UserError(f"{table.path}: columns differ from those of the first table: it {parts}")
    blocks = [_numbers(table, name) if c is None else _one_hot(table, name, c) for name, c in want.items()]
    return np.concatenate(blocks, axis=1)


def _one_hot(table: _Table, name: str, categories: tuple[str, ...]) -> NDArray[np.float32]:
    """[N, C]"""
    values = table.columns[name]
    cells = values.tolist() if values.dtype.kind == "O" else _plain(values)
    if "" in cells:
        raise _empty(table, cells.index(""), name)
    index = {category: k for k, category in enumerate(categories)}
    _check(cells, index, table.at, f"value of column {name!r} (the first table does not have it)")
    x = np.zeros((len(cells), len(categories)), dtype=np.float32)
    x[np.arange(len(cells)), [index[cell] for cell in cells]] = 1
    return x


def _numbers(table: _Table, name: str) -> NDArray[np.float32]:
    """[N, 1]; every cell must be a finite number"""
    values = table.columns[name]
    parsed = _parsed(values) if values.dtype.kind == "O" else values.astype(np.float64)
    if parsed is None:
        row = next(row for row, cell in enumerate(values) if _parsed([cell]) is None)
        raise UserError(f"{table.at(row)}: column {name!r} holds {values[row]!r}, numbers in the first table")
    with np.errstate(over="ignore"):
        x = parsed.astype(np.float32)
    bad = ~np.isfinite(x)
    if bad.any():
        raise _empty(table, int(bad.argmax()), name)
    return x[:, None]


def _empty(table: _Table, row: int, name: str) -> UserError:
    cell = str(table.columns[name][row])
    what = f"holds {cell}, not a finite number" if cell else "is empty"
    return UserError(f"{table.at(row)}: column {name!r} {what}; fill it, or drop the row or the column")


def _parsed(cells: Iterable[str]) -> NDArray[np.float64] | None:
    """Cells as numbers, NaN where missing; None if one of them is neither."""
    cells = list(cells)
    try:
        numbers = np.array(cells, dtype=object).astype(np.float64)
    except ValueError:  # a word, or a word for a missing number
        try:
            numbers = np.array([math.nan if cell.lower() in _MISSING else float(cell) for cell in cells])
        except ValueError:
            return None
    return None if any("_" in cell for cell in cells) else numbers  # python reads 1_0 as 10


def _parts(table: _Table, n: int) -> dict[str, Tensor]:
    """Rows by part; 'train' is always there."""
    texts = [text.lower() for text in _labels(table.columns["split"])] if "split" in table.columns else ["train"] * n
    _check(texts, ("train", "test", "meta"), table.at, "value of 'split'")
    if "train" not in texts:
        raise UserError(f"{table.path}: no row has the split 'train'")
    return {part: torch.tensor([row for row in range(n) if texts[row] == part]) for part in set(texts)}


def _no_label(label: str, table: _Table) -> UserError:
    near = get_close_matches(label, table.columns, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    listed = _few(table.columns)
    return UserError(
        f"{table.path} has no column {label!r}{hint}; columns: {listed}; name the label with --label COLUMN"
    )


# -- arrays -----------------------------------------------------------------------------------------------------------


def _read_npz(path: Path, label: str | None) -> dict[str, NDArray[Any]]:
    """The arrays under their names in small letters, the labels as y."""
    held = _load(path)
    if not isinstance(held, dict):
        raise UserError(f"{path}: not a .npz file")
    label = label or next((key for key in ("y", "Y") if key in held), "y")
    names = {key: "y" if key == label else key.lower() for key in held if key == label or key.lower() != "y"}
    for name in ("x", "y"):
        if (count := list(names.values()).count(name)) != 1:
            got = "no" if not count else "more than one"
            raise UserError(f"{path} has {got} array {label if name == 'y' else name!r}; arrays: {_few(held)}")
    return {name: held[key] for key, name in names.items()}


def _read_npy(path: Path, label: str | None) -> dict[str, NDArray[Any]]:
    beside = [path.with_name(f"{path.stem}_labels.npy"), path.with_name("y.npy")]
    files = [Path(label), path.parent / label] if label else beside
    found = next((file for file in files if file.is_file() and file != path), None)
    if found is None:
        raise UserError(f"no labels for {path}: there is no {' and no '.join(map(str, files))}; give --label FILE.npy")
    x, y = _load(path), _load(found)
    if isinstance(x, dict) or isinstance(y, dict):
        raise UserError(f"{path if isinstance(x, dict) else found}: not a .npy file")
    return {"x": x, "y": y}


def _load(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:  # numpy would leave a broken file open
            held = np.load(file, allow_pickle=False)
            return held if isinstance(held, np.ndarray) else dict(held)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
        raise UserError(f"{path}: not a readable file of plain arrays, objects are refused ({e})") from e


def _inputs(x: NDArray[Any], what: str) -> Tensor:
    """Features float32 [N, D], or images uint8 [N, C, H, W]."""
    if x.ndim == 2 and x.dtype.kind in "iufb" and x.size:
        with np.errstate(over="ignore"):
            features = x.astype(np.float32)
        if not np.isfinite(features).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(features))[0])
            raise UserError(f"{what}: row {row}, column {column} holds {x[row, column]}; fill it or drop the row")
        return torch.from_numpy(features)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size or (x.ndim == 4 and not {*x.shape[1::2]} & {1, 3}):
        raise UserError(
            f"{what} is {x.dtype} {list(x.shape)}; allowed are numbers [N, D], and images of uint8 [N, H, W], "
            "[N, C, H, W] or [N, H, W, C] with C 1 or 3"
        )
    if x.ndim == 3:
        x = x[:, None]  # [N, 1, H, W]
    else:
        _, a, b, c = x.shape
        if c in (1, 3) and (a not in (1, 3) or a == b != c):
            x = x.transpose(0, 3, 1, 2)  # [N, C, H, W]
    return torch.from_numpy(x.copy())


def _features(x: Tensor) -> TensorExamples:
    return TensorExamples(x, Scale(torch.tensor(0.0), torch.tensor(1.0)), standardise=True)


def _images(x: Tensor) -> TensorExamples:
    """Normalised by the mean and deviation of each channel of these images, 0..255."""
    levels = torch.arange(256, dtype=torch.float64)
    share = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
    share /= share.sum(1, keepdim=True)  # [C, 256]: a histogram is exact, and needs no copy of the images as floats
    mean = share @ levels
    std = (share @ levels.square() - mean.square()).clamp(min=0).sqrt()
    std[std < 1e-3] = 1.0
    scale = Scale(*(t.float().view(-1, 1, 1) for t in (mean, std)))
    height, width = x.shape[2:]
    return TensorExamples(x, scale, Crop(size=height, pad=height // 8) if height == width else None)


# -- messages ---------------------------------------------------------------------------------------------------------


def _suffix(path: Path, allowed: Sequence[str]) -> str:
    if path.suffix.lower() not in allowed:
        raise UserError(f"{path}: ends in {path.suffix!r}, allowed are {', '.join(allowed)}")
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    return path.suffix.lower()


def _few(names: Iterable[object]) -> str:
    listed = [str(name) for name in names]
    return ", ".join(listed[:20]) + (f", ... ({len(listed)} in all)" if len(listed) > 20 else "")
