"""Data sets of Hugging Face `datasets`, from disk: folders that `save_to_disk` wrote, and folders of parquet files.

Nothing is downloaded and no code of a data set is executed. A data set with a column of images becomes images in
memory; every other one is a table.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpi.data.dataset import Dataset, NewInputs
from warpi.data.decode import BROKEN, decode
from warpi.data.examples import TensorExamples
from warpi.data.image_files import PHOTO, SMALL
from warpi.datasets.arrays import make_images
from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.label_columns import LABEL_COLUMNS, read_label_columns
from warpi.datasets.labels import blank_missing, encode_labels, normalize_labels
from warpi.datasets.text_files import reading, warn_once
from warpi.errors import UserError, first_line, missing_package

PREFIX = "hf:"
_PARTS = {"train": "train", "test": "test", "trusted": "trusted"}
_HELD_OUT = ("validation", "valid", "val", "dev")  # used for testing if there is no split `test`
_SAMPLE = 100  # images whose size is looked at


def plain_path(data: str) -> str:
    """The path in `hf:PATH`, which must hold a data set of Hugging Face; any other text as it is."""
    if not data.startswith(PREFIX):
        return data
    path = data.removeprefix(PREFIX)
    if not is_saved(Path(path)):
        raise UserError(
            f"{data}: there is no folder {path} that `save_to_disk` wrote or that holds parquet files; nothing is "
            "downloaded: load the data set once and save it with dataset.save_to_disk(FOLDER)"
        )
    return path


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`, or holds parquet files."""
    if not path.is_dir():
        return False
    with reading(path):
        is_one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
        return is_one or (path / "dataset_dict.json").is_file() or bool(_parquet_files(path))


def _parquet_files(path: Path) -> list[Path]:
    return sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")])


def is_dataset(value: object) -> bool:
    """Whether a value is a Dataset or DatasetDict of the package `datasets`, which need not be imported."""
    return any(f"{kind.__module__}.{kind.__name__}".startswith("datasets.") for kind in type(value).__mro__)


def open_splits(data: Path | Any) -> dict[str, Any]:
    """The data sets by part (train, test, trusted), from a folder, a Dataset or a DatasetDict."""
    loaded = _load(data) if isinstance(data, Path) else data
    splits = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    where = str(data) if isinstance(data, Path) else "the data set"
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}
    held_out = [name for name in _HELD_OUT if name in splits]
    names = dict(_PARTS)
    if held_out and "test" not in splits:
        names[held_out.pop(0)] = "test"
    if held_out:
        warn_once(f"{where}: the split {', '.join(held_out)} is not used")
    unknown = sorted(splits.keys() - names.keys() - {*held_out})
    if unknown or "train" not in splits:
        raise UserError(
            f"{where} has the splits {', '.join(sorted(splits))}; allowed are train, test, validation and trusted: "
            "save one split with dataset[NAME].save_to_disk(FOLDER)"
        )
    return {names[name]: split for name, split in splits.items() if name in names}


def _load(path: Path) -> Any:
    """The Dataset or the splits of a folder."""
    try:
        from datasets.table import InMemoryTable

        import datasets
    except ImportError as e:
        raise missing_package("datasets", f"reading {path}", "hf") from e
    try:
        with reading(path):
            if files := _parquet_files(path):
                found: dict[str, list[Any]] = {}
                for file in files:
                    found.setdefault(_split_of(file, path), []).append(read_parquet(file))
                parts = {
                    name: [datasets.Dataset(InMemoryTable(frame)) for frame in frames] for name, frames in found.items()
                }
                return {name: datasets.concatenate_datasets(part) for name, part in parts.items()}
            return datasets.load_from_disk(str(path))
    except UserError:
        raise
    except Exception as e:  # damaged files cause errors of many kinds in pyarrow and in datasets
        raise UserError(f"{path} cannot be read by datasets.load_from_disk ({first_line(e)}); save it again") from e


def _split_of(file: Path, top: Path) -> str:
    """The split that a parquet file belongs to, by its name (`train-00000-of-00002.parquet`) or its folder."""
    known = {*_PARTS, *_HELD_OUT}
    name = file.stem.split("-")[0].lower()
    folder = file.parent.name.lower() if file.parent != top else ""
    return next((n for n in (name, folder) if n in known), "train")


def column_names(splits: Mapping[str, Any]) -> list[str]:
    """The columns of the training part."""
    return list(splits["train"].features)


def find_image_column(data: Path | Any, drop: Sequence[str] = ()) -> str | None:
    """The column of images, if there is one."""
    return _image_column(open_splits(data), drop)


def _image_column(splits: Mapping[str, Any], drop: Sequence[str] = ()) -> str | None:
    features = splits["train"].features
    found = [name for name, kind in features.items() if type(kind).__name__ == "Image" and name not in drop]
    if len(found) > 1:
        raise UserError(f"the data set has the image columns {', '.join(found)}; choose one: --drop {found[1]}")
    return found[0] if found else None


def read_saved_table(data: Path | Any) -> Any:
    """All rows as a pyarrow table. Classes are names, and a column `split` tells the part if there are several."""
    import pyarrow as pa

    splits = open_splits(data)
    frames = []
    for part, split in splits.items():
        frame = _to_arrow(split)
        if len(splits) > 1:
            if "split" in frame.column_names:
                raise UserError("the data set has splits and a column 'split'; remove the column")
            frame = frame.append_column("split", pa.array([part] * len(frame), pa.string()))
        frames.append(frame)
    try:
        return pa.concat_tables(frames, promote_options="default")
    except pa.ArrowInvalid as e:
        raise UserError(f"the splits of the data set have different columns ({first_line(e)})") from e


def _to_arrow(split: Any) -> Any:
    """A data set as a pyarrow table, with the names of classes instead of their numbers."""
    import pyarrow as pa

    frame = split.with_format("arrow")[:].replace_schema_metadata(None)
    for j, (name, kind) in enumerate(split.features.items()):
        if type(kind).__name__ == "ClassLabel":
            codes = np.array([-1 if code is None else code for code in frame.column(j).to_pylist()], dtype=np.int64)
            names = np.array([*kind.names, None], dtype=object)  # -1: no label
            frame = frame.set_column(j, name, pa.array(names[codes].tolist(), pa.string()))
    return frame


def read_labels(data: Any) -> tuple[list[str], tuple[str, ...] | None]:
    """The column `label` of a Dataset in memory as names, and the classes in its order, if it has one."""
    split = open_splits(data)["train"]
    if "label" not in split.features:
        raise UserError(f"the data set has no column 'label'; columns: {', '.join(split.features)}")
    names = _to_arrow(split.select_columns(["label"])).column("label").to_pylist()
    return _texts(names), tuple(getattr(split.features["label"], "names", None) or ()) or None


# -- images ------------------------------------------------------------------------------------------------------------


def read_saved_images(
    data: Path | Any, label: str | None, drop: Sequence[str], size: int | None, like: Dataset | None
) -> Dataset:
    """Read a data set with a column of images, as square images of one size in memory."""
    splits = open_splits(data)
    where = data if isinstance(data, Path) else Path("dataset")
    column = _image_column(splits, drop)
    label = label or "label"
    names = column_names(splits)
    if label not in names:
        raise UserError(f"{where} has no column {label!r}; columns: {', '.join(names)}; choose the label with --label")
    frame = read_saved_table({part: _drop_images(split, column) for part, split in splits.items()})
    used = [name for name in (label, *LABEL_COLUMNS, "given", "given_label") if name in frame.column_names]
    texts = {name: normalize_labels(_texts(frame.column(name).to_pylist())) for name in used}
    labels = read_label_columns(
        texts, label, where, lambda row: f"{where}, row {row}", classes=like.classes if like else None
    )
    first = like.examples if like is not None else None
    if first is not None:
        if not isinstance(first, TensorExamples) or len(first.shape) != 3 or first.shape[0] != 3:
            raise UserError(f"{where} holds color images, but {like and like.name} does not; give both in one format")
        size = first.shape[-1]
    pictures = [each for split in splits.values() for each in _pictures(split, column)]
    size = _usual_size(pictures, where) if size is None else size
    x = _decode_all(pictures, size, where)
    first = first or make_images(x[labels.rows["train"]])
    parts = {part: (replace(first, x=x[rows]), labels.labels(part)) for part, rows in labels.rows.items()}
    return Dataset.from_parts(where.stem, parts, labels.classes, **labels.facts())


def read_new_saved_images(
    path: Path, label: str | None, like: TensorExamples, classes: tuple[str, ...], drop: Sequence[str] = ()
) -> NewInputs:
    """Read the images of a data set to predict, with or without labels."""
    splits = open_splits(path)
    column = _image_column(splits, drop)
    pictures = [each for split in splits.values() for each in _pictures(split, column)]
    frame = read_saved_table({part: _drop_images(split, column) for part, split in splits.items()})
    labels = {
        name: encode_labels(
            blank_missing(normalize_labels(_texts(frame.column(name).to_pylist())), classes),
            classes,
            lambda row: f"{path}, row {row}",
        )
        for name in dict.fromkeys((label or "label", "clean_label"))
        if name in frame.column_names
    }
    return NewInputs(replace(like, x=_decode_all(pictures, like.shape[-1], path)), labels)


def _texts(values: Sequence[object]) -> list[str]:
    return ["" if value is None else str(value).strip() for value in values]


def _drop_images(split: Any, column: str | None) -> Any:
    return split.remove_columns([column])


def _pictures(split: Any, column: str | None) -> list[dict[str, Any]]:
    """The images of a data set as they are stored: `bytes`, or the `path` of a file."""
    from datasets import Image

    pictures: list[dict[str, Any]] = split.select_columns([column]).cast_column(column, Image(decode=False))[:][column]
    return pictures


def _open_picture(picture: Mapping[str, Any] | None, at: str) -> str | io.BytesIO:
    if picture is not None and picture.get("bytes") is not None:
        return io.BytesIO(picture["bytes"])
    path = (picture or {}).get("path")
    if not path or not Path(path).is_file():
        raise UserError(f"{at}: the image is {path or 'missing'}, which is not a file; nothing is downloaded")
    return str(path)


def _usual_size(pictures: Sequence[Mapping[str, Any]], where: Path) -> int:
    """The median of the shorter sides of some images if that is small, else the size of photos."""
    from PIL import Image

    sides = []
    for row in range(0, len(pictures), len(pictures) // _SAMPLE + 1):
        try:
            with Image.open(_open_picture(pictures[row], f"{where}, row {row}")) as image:
                sides.append(min(image.size))
        except BROKEN:
            continue  # `_decode_all` reports it
    side = median_low(sides or [PHOTO])
    return side if side <= SMALL else PHOTO


def _decode_all(pictures: Sequence[Mapping[str, Any]], size: int, where: Path) -> Tensor:
    """The center squares of all images.  [N, 3, size, size] uint8"""
    x = torch.empty(len(pictures), 3, size, size, dtype=torch.uint8)
    for row, picture in enumerate(pictures):
        at = f"{where}, row {row}"
        source = _open_picture(picture, at)
        try:
            image = decode(source, size)
        except BROKEN as e:
            raise UserError(f"{at}: the image cannot be read ({first_line(e)}); remove the row") from e
        left, top = ((side - size) // 2 for side in image.size)
        pixels = np.asarray(image.crop((left, top, left + size, top + size)))
        x[row] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    return x


# -- objects in Python -------------------------------------------------------------------------------------------------


@contextmanager
def without_bars() -> Iterator[None]:
    """Context manager: `datasets` shows no progress bars."""
    import datasets

    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()


def store_objects(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings in which a Dataset or DatasetDict is replaced by the path of a copy in `folder`."""
    stored = dict(settings)
    for name, target in (("data", "data"), ("meta_data", "trusted")):
        if is_dataset(stored.get(name)):
            folder.mkdir(parents=True, exist_ok=True)
            with without_bars():
                stored[name].save_to_disk(str(folder / target))
            stored[name] = str(folder / target)
    return stored
