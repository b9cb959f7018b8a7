"""Arrays of inputs and labels (.npz, .npy)."""

from collections.abc import Collection, Mapping
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
from warpi.data.numeric import ROUNDING, make_features, needs_float64
from warpi.datasets.label_columns import OLD_NAMES, find_trusted_column, warn_old_name
from warpi.datasets.labels import check_label, encode_labels, parse_marks, sort_classes, to_texts
from warpi.datasets.text_files import check_suffix, parse_numbers, reading, shorten_list
from warpi.errors import DAMAGED_ARRAY_ERRORS, UserError
from warpi.utils.limits import check_array_file

_KEYS = {"x", "clean", "verified", "trusted", "classes"}  # and the labels
_KEYS |= {f"{name}_{part}" for name in "xy" for part in ("test", "trusted", "meta")}


def read_arrays(path: Path, label: str | None = None, *, like: Dataset | None = None) -> Dataset:
    """Read arrays of inputs and labels: a .npz with x and y, or a .npy of inputs with another .npy of labels.

    .npz: x [N, ...] and y [N] (or the key `label`); optional are clean (-1, NaN or '' if unknown), trusted [N], x_test
    and y_test, x_trusted and y_trusted, classes (K names). Keys may be in capitals; other keys are ignored.
    .npy: the labels are in the file `label`, or in NAME_labels.npy or y.npy in the folder of NAME.npy.

    Two dimensions [N, D] are features, which are standardized later. uint8 of three dimensions is gray images
    [N, H, W]; of four it is [N, C, H, W] or [N, H, W, C] with C = 1 or 3. If both ends are 1 or 3, channels come first
    unless only the other reading gives square images. Anything else is rejected. Square images are augmented.

    Labels are integers or text. If the names of the classes are given (by `like` or in the file) and not all
    of them are numbers, integers are positions of classes. -1 in `clean` means unknown unless there is a class -1.
    If this is a second file, `like` is the data set of the first: the shapes must agree, and it has the same classes.
    """
    arrays = (_read_npz if check_suffix(path, (".npz", ".npy")) == ".npz" else _read_npy)(path, label)
    named = like is not None or "classes" in arrays
    x, texts = _read_parts(path, arrays, like, named)
    if "clean" in arrays:
        texts["clean"] = _texts(arrays["clean"], f"{path}: clean", len(x["train"]))
    classes = like.classes if like else None
    if classes is None and "classes" in arrays:
        classes = tuple(_texts(arrays["classes"], f"{path}: classes"))
        if len({*classes, ""}) <= len(classes):
            raise UserError(f"{path}: classes must be different names, got {shorten_list(classes)}")
    if "clean" in texts and "-1" not in (classes or texts["train"]):
        texts["clean"] = ["" if text == "-1" else text for text in texts["clean"]]
    by_position = classes is not None and parse_numbers(classes) is None
    classes = classes or sort_classes({text for column in texts.values() for text in column} - {""})
    y = {
        part: encode_labels(column, classes, lambda row: f"{path}, row {row} of {part}", by_position)
        for part, column in texts.items()
    }
    marks = find_trusted_column(arrays.keys() - {"clean"}, path)
    trusted = None
    if marks:
        marked = _texts(arrays[marks], f"{path}: {marks}", len(x["train"]))
        trusted = parse_marks(marked, lambda row: f"{path}, row {row}", marks)
    first = _first_examples(path, x, like)
    parts = {part: (replace(first, x=x[part]), y[part]) for part in x}
    return Dataset.from_parts(path.stem, parts, classes, clean=y.get("clean"), trusted=trusted)


def _read_parts(
    path: Path, arrays: Mapping[str, NDArray[Any]], like: Dataset | None, named: bool
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Inputs and labels of train, test and trusted."""
    first = like.examples.x if like and isinstance(like.examples, TensorExamples) else None
    x: dict[str, Tensor] = {}
    texts: dict[str, list[str]] = {}
    for part, end in {"train": "", "test": "_test", "trusted": "_trusted"}.items():
        if (f"x{end}" in arrays) != (f"y{end}" in arrays):
            raise UserError(f"{path}: x{end} and y{end} must be given together, got only one of them")
        if f"x{end}" in arrays:
            x[part] = _inputs(arrays[f"x{end}"], f"{path}: x{end}", x.get("train") if first is None else first)
            texts[part] = _texts(arrays[f"y{end}"], f"{path}: y{end}", len(x[part]))
            if "" in texts[part]:
                raise UserError(f"{path}: row {texts[part].index('')} of y{end} has no label")
            check_label(texts[part], f"y{end}", path, named=named or bool(end))
    return x, texts


def _first_examples(path: Path, x: Mapping[str, Tensor], like: Dataset | None) -> TensorExamples:
    """Examples of the form that all parts must have."""
    if like is not None:
        first = like.examples
    else:
        first = make_features(x["train"]) if x["train"].ndim == 2 else make_images(x["train"])
    if not isinstance(first, TensorExamples):
        raise UserError(f"{path} holds arrays, but the first data set does not; give both in the same format")
    for part, tensor in x.items():
        _check_like(tensor, first, f"{path}: an input of {part}")
    return first


def read_new_arrays(path: Path, label: str | None, first: TensorExamples, classes: tuple[str, ...]) -> NewInputs:
    """Read inputs to predict: x of a .npz (and y and clean, if they are there) or a .npy, of the shape of `first`.

    The labels of NAME.npy are in NAME_labels.npy, if that file exists.
    """
    if check_suffix(path, (".npz", ".npy")) == ".npz":
        arrays = _read_npz(path, label, needs_label=False)
    else:
        label_file = path.with_name(f"{path.stem}_labels.npy")
        arrays = _read_npy(path, str(label_file)) if label_file.is_file() else {"x": _one(path)}
    x = _inputs(arrays["x"], f"{path}: x", first.x)
    _check_like(x, first, f"{path}: an input")

    def labels(name: str) -> Tensor:
        texts = _texts(arrays[name], f"{path}: {name}", len(x))
        texts = ["" if text == "-1" and "-1" not in classes else text for text in texts]
        return encode_labels(texts, classes, lambda row: f"{path}, row {row} of {name}", parse_numbers(classes) is None)

    return NewInputs(replace(first, x=x), {name: labels(name) for name in ("y", "clean") if name in arrays})


def _check_like(x: Tensor, first: TensorExamples, what: str) -> None:
    if x.shape[1:] != first.x.shape[1:] or x.dtype != first.x.dtype:
        actual, expected = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape[1:])}" for t in (x, first.x))
        raise UserError(f"{what} is {actual}, expected {expected}")


def _texts(values: NDArray[Any], what: str, n: int | None = None) -> list[str]:
    """An array of n labels (integers or text) as text, '' if missing."""
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1 or values.dtype.kind not in "iubfUS":
        raise UserError(f"{what} must be integers or text, one per row; got {values.dtype} {list(values.shape)}")
    if n is not None and len(values) != n:
        raise UserError(f"{what} has {len(values)} rows, but the inputs have {n}")
    if values.dtype.kind == "f" and (bad := np.isinf(values) | (np.floor(values) < values)).any():
        row = int(bad.argmax())
        raise UserError(f"{what}: row {row} holds {values[row]}; labels must be integers or text")
    return to_texts(values)


def _read_npz(path: Path, label: str | None, *, needs_label: bool = True) -> dict[str, NDArray[Any]]:
    """The arrays under their lower-case names, the labels as y, and under new names if they have old ones."""
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
    arrays = {name: stored[key] for key, name in names.items()}
    for old in ("x_meta", "y_meta"):
        new = OLD_NAMES[old]
        if old in arrays and new not in arrays:
            warn_old_name(path, old)
            arrays[new] = arrays[old]
    return arrays


def _read_npy(path: Path, label: str | None) -> dict[str, NDArray[Any]]:
    files = [path.with_name(f"{path.stem}_labels.npy"), path.with_name("y.npy")]
    if label:
        files = [Path(label), path.parent / label]
    with reading(label):
        label_file = next((file for file in files if file.is_file() and file != path), None)
    if label_file is None:
        raise UserError(f"no labels for {path}: there is no {' and no '.join(map(str, files))}; give --label FILE.npy")
    return {"x": _one(path), "y": _one(label_file)}


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


def _inputs(x: NDArray[Any], what: str, like: Tensor | None) -> Tensor:
    """Features [N, D] of the same precision as `like` (None: the precision they need), or uint8 images [N, C, H, W]."""
    if x.ndim == 2 and x.dtype.kind in "iufb" and x.size:
        with np.errstate(over="ignore"):
            numbers = x.astype(np.float32)
        if not np.isfinite(numbers).all():
            bad = np.argwhere(~np.isfinite(numbers))
            row, column = (int(i) for i in bad[0])
            raise UserError(
                f"{what}: row {row}, column {column} holds {x[row, column]}; {len(bad)} cells in "
                f"{len({*bad[:, 1]})} columns are not finite numbers; fill them, or drop the rows or the columns"
            )
        double = needs_float64(x) if like is None else like.dtype == torch.float64
        return torch.from_numpy(x.astype(np.float64) if double else numbers)
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
