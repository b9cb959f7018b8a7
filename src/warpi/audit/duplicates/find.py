"""`find_duplicates`: copies, near copies, outliers and broken images in data, before anything is trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from warpi.data.dataset import Dataset
from warpi.data.duplicates.result import Duplicates
from warpi.data.duplicates.search import search
from warpi.data.image_files import PHOTO
from warpi.data.split import Split
from warpi.datasets.image_folders import read_folder, read_manifest
from warpi.datasets.load import has_images
from warpi.errors import UserError
from warpi.runs.spec import DataSpec, load


def find_duplicates(
    data: str | Path | Dataset,
    *,
    trusted: str | Path | Dataset | None = None,
    test: str | Path | Dataset | None = None,
    near: bool = True,
    **settings: Any,
) -> Duplicates:
    """Find exact and near copies within and between the training, trusted and test rows, outliers and broken images.

    Parameters:
        data: a name or path as for `fit`, or a `Dataset`. Its own trusted and test rows are compared too.
        trusted: more trusted rows: a path, or a `Dataset`.
        test: more test rows, in the same way.
        near: whether to search for near copies and outliers; False finds exact copies and broken images only.
        settings: how to read the data: root, label, drop, types, text, missing, unknown.
    """
    given: list[str | Path | Dataset | None] = [data, trusted, test]
    sets: list[Dataset | None] = [value for value in given if value is None or isinstance(value, Dataset)]
    if not isinstance(data, Dataset):
        if any(sets):
            raise UserError("pass data, trusted and test either all as paths or all as Datasets")
        others = [None if path is None else str(path) for path in (trusted, test)]
        sets = _read_all(str(data), others, settings)
    elif settings or len(sets) < 3:
        raise UserError("if data is a Dataset, trusted and test must be Datasets too, and settings must be omitted")
    first = sets[0]
    assert first is not None
    return search(list(_split(first, *sets[1:])), first.classes, near)


def _read_all(data: str, others: list[str | None], settings: dict[str, Any]) -> list[Dataset | None]:
    """Read the files. Images are not decoded yet, so that broken ones are found."""
    if has_images(data, settings.get("drop", ())):
        first = _list_images(data, settings, None)
        return [first, *(None if path is None else _list_images(path, settings, first.classes) for path in others)]
    loaded = [load(DataSpec(data=data, meta_data=path, **settings)) for path in others]
    return [loaded[0].dataset, *(part.trusted for part in loaded)]


def _list_images(path: str, settings: dict[str, Any], classes: tuple[str, ...] | None) -> Dataset:
    options: dict[str, Any] = {"size": PHOTO, "classes": classes, "in_memory": False}
    if Path(path).is_dir():
        return read_folder(Path(path), **options)
    root = Path(settings["root"]) if settings.get("root") else None
    return read_manifest(Path(path), root=root, label=settings.get("label"), **options)


def _split(data: Dataset, trusted: Dataset | None = None, test: Dataset | None = None) -> Iterator[tuple[str, Split]]:
    """The rows of each part. Rows of the data that are marked as trusted belong to that part."""
    rows = torch.arange(len(data.y))
    marked = torch.zeros(len(rows), dtype=torch.bool) if data.trusted is None else data.trusted
    whole = Split(data.examples, rows, data.y)
    yield "train", whole.subset(~marked)
    for name, inner, mask, outer in (("trusted", data.meta, marked, trusted), ("test", data.test, None, test)):
        if mask is not None and mask.any():
            yield name, whole.subset(mask)
        if inner is not None:
            yield name, inner
        if outer is not None:
            yield name, Split(outer.examples, torch.arange(len(outer.y)), outer.truth)
