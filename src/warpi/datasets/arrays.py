"""Arrays of inputs and labels (.npz, .npy)."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.augment import Crop
from warpi.data.dataset import Dataset, NewInputs
from warpi.data.examples import Scale, TensorExamples
from warpi.data.mapped import MappedExamples, RawRows
from warpi.data.numeric import ROUNDING, Columns, Features, make_features, needs_float64
from warpi.datasets.columns.to_npy import read_table_form
from warpi.datasets.delimited_files import check_suffix, parse_numbers, reading, shorten_list
from warpi.datasets.label_columns import OLD_NAMES, find_trusted_column, warn_old_name
from warpi.datasets.labels import CodedLabels, check_counts, parse_marks, sort_classes
from warpi.errors import DAMAGED_ARRAY_ERRORS, UserError, format_count
from warpi.utils.limits import check_array_file

LARGE = 2**26  # bytes: larger features stay in their file, or in its precision
_Stored = NDArray[Any] | RawRows
_Inputs = Tensor | RawRows
_KEYS = {"x", "clean", "verified", "trusted", "classes"}  # and the labels
_KEYS |= {f"{name}_{part}" for name in "xy" for part in ("test", "trusted", "meta")}


def read_arrays(path: Path, label: str | None = None, *, like: Dataset | None = None) -> Dataset:
    """Read arrays of inputs and labels: a .npz with x and y, or a .npy of inputs with another .npy of labels.

    .npz: x [N, ...] and y [N] (or the key `label`); optional are clean (-1, NaN or '' if unknown), trusted [N], x_test
    and y_test, x_trusted and y_trusted, classes (K names). Keys may be in capitals; other keys are ignored.
    .npy: the labels are in the file `label`, or in NAME_labels.npy or y.npy in the folder of NAME.npy.

    Arrays of two dimensions [N, D] are features, which are standardized later. Arrays of uint8 with three dimensions
    are gray images [N, H, W]; with four, images [N, C, H, W] or [N, H, W, C] with C = 1 or 3. If both the second and
    the last dimension are 1 or 3, channels come first, unless images are square only if channels come last. Anything
    else is rejected. Square images are augmented.

    Labels are integers or text. If the names of the classes are known (from `like` or the file) and not all of them are
    numbers, integers are positions of classes. -1 in `clean` means unknown unless there is a class -1. For a second
    file, `like` is the data set of the first: the shapes must agree, and it has the same classes.
    """
    arrays = (_read_npz if check_suffix(path, (".npz", ".npy")) == ".npz" else _read_npy)(path, label)
    named = like is not None or "classes" in arrays
    x, texts = _read_parts(path, arrays, like, named)
    if "clean" in arrays:
        texts["clean"] = _labels(_values(arrays["clean"]), f"{path}: clean", len(_tensor(x["train"])))
    classes = like.classes if like else None
    if classes is None and "classes" in arrays:
        classes = tuple(_labels(_values(arrays["classes"]), f"{path}: classes").to_list())
        if len({*classes, ""}) <= len(classes):
            raise UserError(f"{path}: classes must be different names, got {shorten_list(classes)}")
    if "clean" in texts and "-1" not in (classes or texts["train"].texts):
        texts["clean"] = texts["clean"].blank("-1")
    by_position = classes is not None and parse_numbers(classes) is None
    classes = classes or sort_classes({text for column in texts.values() for text in column.texts} - {""})
    y = {
        part: column.encode(classes, lambda row: f"{path}, row {row} of {part}", by_position)
        for part, column in texts.items()
    }
    marks = find_trusted_column(arrays.keys() - {"clean"}, path)
    trusted = None
    if marks:
        marked = _labels(_values(arrays[marks]), f"{path}: {marks}", len(_tensor(x["train"])))
        trusted = _parse_coded_marks(marked, lambda row: f"{path}, row {row}", marks)
    columns = _columns_of(path, like)
    first = _first_examples(path, x, like, columns)
    parts = {part: (_examples(x[part], first), y[part]) for part in x}
    return Dataset.from_parts(path.stem, parts, classes, clean=y.get("clean"), trusted=trusted, encoding=columns)


def _columns_of(path: Path, like: Dataset | None) -> Columns | None:
    """The columns of the table from which the arrays were converted, which must be those of `like`."""
    form = read_table_form(path)
    if form and like and form.columns != like.encoding:
        raise UserError(f"{path}: its columns differ from those of {like.name}; convert it with --like {like.name}.npy")
    return form.columns if form else None


def _read_parts(
    path: Path, arrays: Mapping[str, _Stored], like: Dataset | None, named: bool
) -> tuple[dict[str, _Inputs], dict[str, CodedLabels]]:
    """Inputs and labels of train, test and trusted."""
    kind = _kind(like.examples) if like and isinstance(like.examples, TensorExamples) else None
    x: dict[str, _Inputs] = {}
    texts: dict[str, CodedLabels] = {}
    for part, end in {"train": "", "test": "_test", "trusted": "_trusted"}.items():
        if (f"x{end}" in arrays) != (f"y{end}" in arrays):
            raise UserError(f"{path} must contain both x{end} and y{end} or none of them, got only one")
        if f"x{end}" in arrays:
            x[part] = _inputs(arrays[f"x{end}"], f"{path}: x{end}", kind)
            kind = kind or _kind(x[part])
            texts[part] = _labels(_values(arrays[f"y{end}"]), f"{path}: y{end}", len(_tensor(x[part])))
            count = texts[part].count_texts()
            if (row := texts[part].first_row(count.keys() - {""})) is not None:
                raise UserError(f"{path}: row {row} of y{end} has no label")
            check_counts(count, f"y{end}", path, named=named or bool(end))
    return x, texts


def _first_examples(
    path: Path, x: Mapping[str, _Inputs], like: Dataset | None, columns: Columns | None
) -> TensorExamples:
    """Examples of the form that all parts must have."""
    train = x["train"]
    if like is not None:
        first = like.examples
    elif isinstance(train, RawRows):
        first = replace(MappedExamples.of(train), columns=columns)
    else:
        first = make_features(train, columns) if train.ndim == 2 else make_images(train)
    if not isinstance(first, TensorExamples):
        raise UserError(f"{path} contains arrays, but the training data does not; use the same format for both")
    for part, inputs in x.items():
        _check_like(inputs, first, f"{path}: an input of {part}")
    return first


def _examples(x: _Inputs, first: TensorExamples) -> TensorExamples:
    """Examples of the same form as `first`, in memory or in a file."""
    if isinstance(x, RawRows):
        columns = first.columns if isinstance(first, Features) else None
        return replace(MappedExamples.of(x).with_scale(first.scale), columns=columns)
    if isinstance(first, MappedExamples):
        return make_features(x, first.columns).with_scale(first.scale)
    return replace(first, x=x)


def _tensor(x: _Inputs) -> Tensor:
    return x.x if isinstance(x, RawRows) else x


def _kind(x: _Inputs | TensorExamples) -> torch.dtype:
    """The dtype of the inputs before they are scaled."""
    if isinstance(x, RawRows | MappedExamples):
        return torch.float32
    return x.x.dtype if isinstance(x, TensorExamples) else x.dtype


def read_new_arrays(path: Path, label: str | None, first: TensorExamples, classes: tuple[str, ...]) -> NewInputs:
    """Read inputs to predict, of the shape of `first`: a .npy, or x in a .npz (and y and clean, if present).

    The labels of NAME.npy are in NAME_labels.npy, if that file exists.
    """
    if check_suffix(path, (".npz", ".npy")) == ".npz":
        arrays = _read_npz(path, label, needs_label=False)
    else:
        label_file = path.with_name(f"{path.stem}_labels.npy")
        arrays = _read_npy(path, str(label_file)) if label_file.is_file() else {"x": _open_inputs(path)}
    x = _inputs(arrays["x"], f"{path}: x", _kind(first))
    _check_like(x, first, f"{path}: an input")

    def labels(name: str) -> Tensor:
        column = _labels(_values(arrays[name]), f"{path}: {name}", len(_tensor(x)))
        column = column if "-1" in classes else column.blank("-1")
        return column.encode(classes, lambda row: f"{path}, row {row} of {name}", parse_numbers(classes) is None)

    return NewInputs(_examples(x, first), {name: labels(name) for name in ("y", "clean") if name in arrays})


def _check_like(x: _Inputs, first: TensorExamples, what: str) -> None:
    forms = [(_kind(x), _tensor(x).shape[1:]), (_kind(first), first.x.shape[1:])]
    if forms[0] != forms[1]:
        actual, expected = (f"{str(kind).removeprefix('torch.')} {list(shape)}" for kind, shape in forms)
        raise UserError(f"{what} is {actual}, expected {expected}")


def _values(stored: _Stored) -> NDArray[Any]:
    return stored.x.numpy() if isinstance(stored, RawRows) else stored


def _parse_coded_marks(marked: CodedLabels, at: Callable[[int], str], name: str) -> Tensor:
    """Which rows are marked.  [N] bool"""
    marks = parse_marks(marked.texts, lambda k: at(int((marked.codes == k).argmax())), name)
    return marks[torch.from_numpy(marked.codes)]


def _labels(values: NDArray[Any], what: str, n: int | None = None) -> CodedLabels:
    """An array of n labels (integers or text), '' if missing."""
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1 or values.dtype.kind not in "iubfUS":
        raise UserError(f"{what} must be integers or text, one per row; got {values.dtype} {list(values.shape)}")
    if n is not None and len(values) != n:
        raise UserError(f"{what} has {format_count(len(values), 'row')}, but the inputs have {n:,}")
    if values.dtype.kind == "f" and (bad := np.isinf(values) | (np.floor(values) < values)).any():
        row = int(bad.argmax())
        raise UserError(f"{what}: row {row} contains {values[row]}; labels must be integers or text")
    return CodedLabels.of(values)


def _read_npz(path: Path, label: str | None, *, needs_label: bool = True) -> dict[str, _Stored]:
    """The arrays by lower-case name. The labels are called y, and old names are replaced by new ones."""
    stored = load_arrays(path, {*_KEYS, (label or "y").lower()})
    if not isinstance(stored, dict):
        raise UserError(f"{path}: not a .npz file")
    label = label or next((key for key in ("y", "Y") if key in stored), "y")
    names = {key: "y" if key == label else key.lower() for key in stored if key == label or key.lower() != "y"}
    for name in ("x", "y"):
        count = list(names.values()).count(name)
        if count > 1 or (count == 0 and (name == "x" or needs_label)):
            number = "more than one" if count else "no"
            shown = label if name == "y" else name
            raise UserError(f"{path} has {number} array {shown!r}; arrays: {shorten_list(stored)}")
    arrays: dict[str, _Stored] = {name: stored[key] for key, name in names.items()}
    for old in ("x_meta", "y_meta"):
        new = OLD_NAMES[old]
        if old in arrays and new not in arrays:
            warn_old_name(path, old)
            arrays[new] = arrays[old]
    return arrays


def _read_npy(path: Path, label: str | None) -> dict[str, _Stored]:
    files = [path.with_name(f"{path.stem}_labels.npy"), path.with_name("y.npy")]
    if label:
        files = [Path(label), path.parent / label]
    with reading(label):
        label_file = next((file for file in files if file.is_file() and file != path), None)
    if label_file is None:
        raise UserError(f"no labels for {path}: there is no {' and no '.join(map(str, files))}; pass --label FILE.npy")
    arrays: dict[str, _Stored] = {"x": _open_inputs(path), "y": _one(label_file)}
    form = read_table_form(path)
    if form is not None:
        arrays["classes"] = np.array(form.classes)
        stored = {name: path.with_name(f"{path.stem}_{name}.npy") for name in ("clean", "trusted")}
        arrays |= {name: _one(file) for name, file in stored.items() if file.is_file()}
    return arrays


def _open_inputs(path: Path) -> _Stored:
    """The array of a .npy file. A large one stays in the file if its form allows it."""
    with reading(path):
        is_large = path.stat().st_size >= LARGE
    if is_large:
        try:
            check_array_file(path)
            with reading(path):
                raw = RawRows.open(path)
        except DAMAGED_ARRAY_ERRORS:
            raw = None  # the reader below explains it
        if raw is not None:
            return raw
    return _one(path)


def _one(path: Path) -> NDArray[Any]:
    array = load_arrays(path)
    if isinstance(array, dict):
        raise UserError(f"{path}: not a .npy file")
    return array


def load_arrays(path: Path, needed: Collection[str] | None = None) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """The array or arrays of numbers and text in a .npy or .npz file.

    With `needed` (lower-case keys), other arrays are skipped if they cannot be read.
    """
    key = ""
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with reading(path), path.open("rb") as file:  # numpy would leave a broken file open
            if not file.read(6).startswith((b"PK", b"\x93NUMPY")):
                raise UserError(f"{path}: not a readable file of plain arrays (it does not start like .npz or .npy)")
            file.seek(0)
            check_array_file(path)
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return content
            for key in content:
                try:
                    arrays[key] = content[key]
                    if not isinstance(arrays[key], np.ndarray):
                        raise ValueError(f"{key} is not an array")
                except DAMAGED_ARRAY_ERRORS:
                    if needed is None or key.lower() in needed:
                        raise
            return arrays
    except UserError:
        raise
    except DAMAGED_ARRAY_ERRORS as e:
        reason = str(e).partition("\n")[0]
        is_object = key and reason.startswith("Object")
        advice = f"; if {key!r} is text, save it as {key}.astype(str)" if is_object else ""
        raise UserError(f"{path}: not a readable file of plain arrays; objects are rejected ({reason}){advice}") from e


def _inputs(stored: _Stored, what: str, kind: torch.dtype | None) -> _Inputs:
    """Features [N, D] of dtype `kind` (None: the precision they need), or uint8 images [N, C, H, W].

    Large arrays of low precision keep it.
    """
    if isinstance(stored, RawRows):
        _check_finite(stored, what)
        return stored if kind in (None, torch.float32) else stored.x.to(kind)
    x = stored
    if x.ndim == 2 and x.dtype.kind in "iufb" and x.size:
        if x.dtype == np.float16 and x.nbytes >= LARGE and kind in (None, torch.float32):
            return _inputs(RawRows(np.ascontiguousarray(x)), what, kind)
        with np.errstate(over="ignore"):
            numbers = torch.from_numpy(x.astype(np.float32, order="C"))
        _check_finite(RawRows(numbers.numpy()), what, x)
        double = needs_float64(x) if kind is None else kind == torch.float64
        return torch.from_numpy(x.astype(np.float64)) if double else numbers
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size or (x.ndim == 4 and not {*x.shape[1::2]} & {1, 3}):
        raise UserError(
            f"{what} is {x.dtype} {list(x.shape)}; it must contain numbers [N, D], or images of uint8 [N, H, W], "
            "[N, C, H, W] or [N, H, W, C] with C 1 or 3"
        )
    if x.ndim == 3:
        x = x[:, None]  # [N, 1, H, W]
    elif is_channels_last(x.shape):
        x = x.transpose(0, 3, 1, 2)  # [N, C, H, W]
    return torch.from_numpy(x.copy())


def _check_finite(rows: RawRows, what: str, original: NDArray[Any] | None = None) -> None:
    """Raise an error for numbers that are not finite. It shows the first of them, as in `original`."""
    first: tuple[int, int] | None = None
    n_bad = 0
    columns: set[int] = set()
    for start, block in rows.blocks():
        finite = torch.isfinite(block)
        if bool(finite.all()):
            continue
        bad = (~finite).nonzero()
        n_bad += len(bad)
        columns |= set(bad[:, 1].tolist())
        if first is None:
            first = start + int(bad[0, 0]), int(bad[0, 1])
    if first is not None:
        row, column = first
        value = rows.x[first].item() if original is None else original[first]
        raise UserError(
            f"{what}: row {row}, column {column} contains {value}; cells that are not finite numbers: {n_bad} in "
            f"{format_count(len(columns), 'column')}; fill them, or drop the rows or the columns"
        )


def is_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether images of four dimensions are [N, H, W, C] and not [N, C, H, W]."""
    _, a, b, c = shape
    return c in (1, 3) and (a not in (1, 3) or a == b != c)


def make_images(x: Tensor) -> TensorExamples:
    """Images (bytes, or floats on any scale) that are normalized by the mean and standard deviation of each channel."""
    if x.dtype == torch.uint8:
        levels = torch.arange(256, dtype=torch.float64)
        share = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
        share /= share.sum(1, keepdim=True)  # [C, 256]: a histogram is exact and needs no copy as floats
        mean = share @ levels
        std = (share @ levels.square() - mean.square()).clamp(min=0).sqrt()
        std[std < 1e-3] = 1.0
    else:
        channels = x.transpose(0, 1).flatten(1).double()
        mean, std = channels.mean(1), channels.std(1, correction=0)
        std[std <= ROUNDING * channels.abs().amax(1)] = 1.0
    scale = Scale(*(t.float().view(-1, 1, 1) for t in (mean, std)))
    height, width = x.shape[2:]
    return TensorExamples(x, scale, Crop(size=height, pad=height // 8) if height == width else None)
