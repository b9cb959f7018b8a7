"""Read data sets by name, or from the user's files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from warpi.data.dataset import Dataset, NewInputs
from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import Decoded, FileExamples
from warpi.data.numeric import Columns, Embedded, Features
from warpi.data.placeholder import PlaceholderExamples
from warpi.data.sparse import SparseExamples
from warpi.datasets.arrays import read_arrays, read_new_arrays
from warpi.datasets.columns.encode import TableOptions
from warpi.datasets.columns.raw import is_text_folder
from warpi.datasets.columns.to_npy import read_table_form
from warpi.datasets.delimited_files import TABLE_SUFFIXES, reading
from warpi.datasets.embedding.dataset import embed_second, read_features, read_new_vectors
from warpi.datasets.embedding.folder import is_features
from warpi.datasets.hugging_face.images import read_new_saved_images, read_saved_images
from warpi.datasets.hugging_face.saved import find_image_column, is_dataset, is_saved, plain_path, store_objects
from warpi.datasets.image_folders import read_folder, read_manifest, read_new_images
from warpi.datasets.image_lists import is_manifest
from warpi.datasets.registry import DATASETS
from warpi.datasets.tables import read_new_table, read_table
from warpi.errors import UserError, nearest_path, no_path, unknown

_TABLE = "a table"
_IMAGES = "image files"
_ARRAYS = "arrays (.npz, .npy)"


def read_dataset(
    data: Any,
    *,
    root: Path | None = None,
    label: str | None = None,
    drop: Sequence[str] = (),
    image_size: int | None = None,
    like: Dataset | None = None,
    options: TableOptions | None = None,
) -> Dataset:
    """Read a data set.

    Parameters:
        data: the name of a built-in data set, a path, or a Dataset or DatasetDict of Hugging Face.
        root: folder with the files of a built-in data set, or with the images of a manifest.
        label: where the labels are: a column of a table, a key of an .npz file, or a second .npy file.
        drop: columns of a table to ignore.
        image_size: side length at which image files are read.
        like: another data set; the new one gets the same classes and is read in the same way.
        options: kinds of the columns of a table, and what to do with missing and unknown values.
    """
    if is_dataset(data):
        if find_image_column(data, drop):
            return read_saved_images(data, label, drop, image_size, like)
        with TemporaryDirectory() as folder:
            stored = store_objects({"data": data}, Path(folder))["data"]
            return _read(Path(stored), None, label, drop, image_size, like, options)
    data = plain_path(data)
    if data in DATASETS:
        entry = DATASETS[data]
        if image_size is not None and not entry.resizable:
            raise _size_error(data)
        if label is not None:
            raise UserError(f"{data} has fixed labels; --label can only be used with tables, arrays and manifests")
        if drop:
            raise _drop_error(data)
        _check_no_types(data, options)
        return entry.load(root, image_size)
    path = Path(data)
    with reading(data):
        exists = bool(data) and path.exists()
    if not exists:
        if path.suffix or "/" in data or os.sep in data:
            raise no_path(data)
        closest = nearest_path(data)
        hint = f", but there is {closest!r}" if closest else ""
        raise UserError(
            f"{unknown('data set', data, DATASETS)}; there is no file or folder with that name either{hint}"
        )
    dataset = _read(path, root, label, drop, image_size, like, options)
    if dataset.n_classes < 2:
        raise UserError(f"{data}: every row has the label {dataset.classes[0]!r}; at least two classes are needed")
    return dataset


def read_new_inputs(data: str, settings: Mapping[str, Any], examples: Examples, classes: tuple[str, ...]) -> NewInputs:
    """Read new inputs for prediction, in the same way as the inputs of a run were read.

    `settings` are those of the run's data (data, root, label, drop, missing, unknown). Only the type, shape and scale
    of the run's `examples` are used.
    """
    like = examples.like if isinstance(examples, PlaceholderExamples) else examples
    data = plain_path(data)
    if isinstance(like, Embedded):
        return read_new_vectors(data, settings, like, classes)
    path = Path(data)
    label = settings["label"]
    drop = settings.get("drop", ())
    columns = like.columns if isinstance(like, Features | SparseExamples) else None
    expected = _TABLE if columns else _ARRAYS
    if isinstance(like, FileExamples | Decoded):
        expected = _IMAGES
    kind = _kind_of_files(os.path.abspath(data), drop)  # absolute, so not a name in DATASETS
    form = read_table_form(path)
    if columns and form:
        if form.columns != columns:
            raise UserError(f"{data}: its columns differ from those of the run; convert it with --like RUN_DATA.npy")
        assert isinstance(like, TensorExamples)
        return read_new_arrays(path, None, like, classes)
    if kind != expected:
        raise UserError(f"{data} contains {kind}, but the run was trained on {expected}; use data of the same kind")
    if kind == _IMAGES:
        root = Path(settings["root"]) if settings["root"] and settings["data"] not in DATASETS else None
        return read_new_images(path, like.shape[-1], classes, root=root, label=label)
    if columns:
        assert isinstance(like, Features | SparseExamples)
        options = TableOptions(missing=settings.get("missing", "fill"), unknown=settings.get("unknown", "ignore"))
        new = read_new_table(path, columns, classes, options)
        return new._replace(examples=new.examples.with_scale(like.scale))
    assert isinstance(like, TensorExamples)
    if is_saved(path):
        return read_new_saved_images(path, label, like, classes, drop)
    return read_new_arrays(path, None if str(label).endswith(".npy") else label, like, classes)


def has_images(data: str, drop: Sequence[str] = ()) -> bool:
    """Whether a path is a folder of images, or a manifest whose column `path` is not dropped. It may not exist."""
    path = Path(data)
    is_image_list = path.suffix.lower() in TABLE_SUFFIXES and "path" not in map(str.lower, drop) and is_manifest(path)
    is_other = is_features(path) or is_saved(path) or is_text_folder(path)
    return (path.is_dir() and not is_other) or is_image_list


def is_resizable(data: str, drop: Sequence[str] = ()) -> bool:
    """Whether the images of a data set can be read at any size."""
    if data in DATASETS:
        return DATASETS[data].resizable
    return has_images(data, drop) or (is_saved(Path(data)) and find_image_column(Path(data), drop) is not None)


def _kind_of_files(data: str, drop: Sequence[str]) -> str:
    if is_saved(Path(data)):
        return _ARRAYS if find_image_column(Path(data), drop) else _TABLE
    if is_resizable(data, drop):
        return _IMAGES
    if data in DATASETS:
        return _ARRAYS
    suffix = Path(data).suffix.lower()
    if suffix in (".npz", ".npy"):
        return _ARRAYS
    if suffix in TABLE_SUFFIXES or is_text_folder(Path(data)):
        return _TABLE
    raise _unreadable(Path(data))


def _unreadable(path: Path) -> UserError:
    return UserError(
        f"cannot read {path}; pass a .npz, .npy, .csv, .tsv or .parquet file, or a folder of images, texts or features"
    )


def _read(
    path: Path,
    root: Path | None,
    label: str | None,
    drop: Sequence[str],
    size: int | None,
    like: Dataset | None,
    options: TableOptions | None,
) -> Dataset:
    suffix = path.suffix.lower()
    if is_features(path):
        if size is not None or drop:
            raise _size_error(path) if size is not None else _drop_error(path)
        return read_features(path, like)
    if like is not None and isinstance(like.examples, Embedded):
        return embed_second(str(path), like, root=root, label=label)
    if is_saved(path) and find_image_column(path, drop):
        _check_no_types(path, options if like is None else None)
        return read_saved_images(path, label, drop, size, like)
    images = has_images(str(path), drop)
    if drop and like is None and (images or suffix in (".npz", ".npy")):  # checked for `like` already
        raise _drop_error(path)
    is_table = suffix in TABLE_SUFFIXES or (path.is_dir() and not images)
    if images or not is_table:
        _check_no_types(path, options if like is None else None)
    if images:
        if like is not None and isinstance(like.encoding, Columns):
            raise UserError(f"{path} contains images, but {like.name} is a table; use the same format for both")
        classes = like.classes if like else None
        # If the images of `like` are not in memory, neither are these: crops and `data/overlap.py` need the same type.
        in_memory = False if like and isinstance(like.examples, FileExamples) else None
        if size is None and like is not None and like.files is not None:
            size = like.examples.shape[-1]
        if path.is_dir():
            return read_folder(path, size=size, classes=classes, in_memory=in_memory, like=like)
        return read_manifest(path, root=root, label=label, size=size, classes=classes, in_memory=in_memory, like=like)
    if size is not None:
        raise _size_error(path)
    match suffix:
        case ".npz":
            return read_arrays(path, label, like=like)
        case ".npy":  # with `like`, `label` is the label file of that data set
            return read_arrays(path, None if like else label, like=like)
    if is_table:
        return read_table(path, label, drop=drop, like=like, options=options)
    raise _unreadable(path)


def _check_no_types(data: object, options: TableOptions | None) -> None:
    if options is not None and options.kinds():
        raise UserError(f"{data} is not a table; omit --types and --text, which can only be used with tables")


def _size_error(data: object) -> UserError:
    return UserError(f"{data} cannot be read at another size; omit image_size, which can only be used with image files")


def _drop_error(data: object) -> UserError:
    advice = "omit --drop, which can only be used with tables (.csv, .tsv, .parquet)"
    if str(data).lower().endswith(TABLE_SUFFIXES):
        return UserError(f"{data} lists images in column 'path'; {advice}, or also drop 'path' to read it as a table")
    return UserError(f"{data} is not a table; {advice}")
