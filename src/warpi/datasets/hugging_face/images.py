"""Read Hugging Face data sets with a column of images, as square images of one size in memory."""

import io
from collections.abc import Mapping, Sequence
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
from warpi.datasets.hugging_face.saved import column_names, image_column_of, open_splits, read_saved_table, to_cells
from warpi.datasets.label_columns import LABEL_FACTS, read_label_columns
from warpi.datasets.labels import blank_missing, encode_labels, normalize_labels
from warpi.errors import UserError, first_line

_SAMPLE = 100  # images whose size is read


def read_saved_images(
    data: Path | Any, label: str | None, drop: Sequence[str], size: int | None, like: Dataset | None
) -> Dataset:
    """Read a data set with a column of images, as square images of one size in memory."""
    splits = open_splits(data)
    where = data if isinstance(data, Path) else Path("dataset")
    column = image_column_of(splits, drop)
    label = label or "label"
    names = column_names(splits)
    if label not in names:
        raise UserError(f"{where} has no column {label!r}; columns: {', '.join(names)}; choose the label with --label")
    frame = read_saved_table({part: _drop_images(split, column) for part, split in splits.items()})
    used = [name for name in (label, *LABEL_FACTS) if name in frame.column_names]
    texts = {name: normalize_labels(to_cells(frame.column(name).to_pylist())) for name in used}
    labels = read_label_columns(
        texts, label, where, lambda row: f"{where}, row {row}", classes=like.classes if like else None
    )
    first = like.examples if like is not None else None
    if first is not None:
        if not isinstance(first, TensorExamples) or len(first.shape) != 3 or first.shape[0] != 3:
            raise UserError(
                f"{where} contains color images, but {like and like.name} does not; use one format for both"
            )
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
    column = image_column_of(splits, drop)
    pictures = [each for split in splits.values() for each in _pictures(split, column)]
    frame = read_saved_table({part: _drop_images(split, column) for part, split in splits.items()})
    labels = {
        name: encode_labels(
            blank_missing(normalize_labels(to_cells(frame.column(name).to_pylist())), classes),
            classes,
            lambda row: f"{path}, row {row}",
        )
        for name in dict.fromkeys((label or "label", "clean_label"))
        if name in frame.column_names
    }
    return NewInputs(replace(like, x=_decode_all(pictures, like.shape[-1], path)), labels)


def _drop_images(split: Any, column: str | None) -> Any:
    return split.remove_columns([column])


def _pictures(split: Any, column: str | None) -> list[dict[str, Any]]:
    """The images of a data set as they are stored: `bytes`, or the `path` of a file."""
    from datasets import Image

    pictures: list[dict[str, Any]] = split.select_columns([column]).cast_column(column, Image(decode=False))[:][column]
    return pictures


def open_picture(picture: Mapping[str, Any] | None, at: str) -> str | io.BytesIO:
    """The path or the content of an image. `at` is its row in error messages."""
    if picture is not None and picture.get("bytes") is not None:
        return io.BytesIO(picture["bytes"])
    path = (picture or {}).get("path")
    if not path or not Path(path).is_file():
        reason = f"{path} is not a file" if path else "the image is missing"
        raise UserError(f"{at}: {reason}; nothing is downloaded")
    return str(path)


def _usual_size(pictures: Sequence[Mapping[str, Any]], where: Path) -> int:
    """The median of the shorter sides of some images if that is small, else the size of photos."""
    from PIL import Image

    sides = []
    for row in range(0, len(pictures), len(pictures) // _SAMPLE + 1):
        try:
            with Image.open(open_picture(pictures[row], f"{where}, row {row}")) as image:
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
        source = open_picture(picture, at)
        try:
            image = decode(source, size)
        except BROKEN as e:
            raise UserError(f"{at}: the image cannot be read ({first_line(e)}); remove the row") from e
        left, top = ((side - size) // 2 for side in image.size)
        pixels = np.asarray(image.crop((left, top, left + size, top + size)))
        x[row] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    return x
