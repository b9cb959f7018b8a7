"""Image data sets on disk: one folder per class, or a manifest that lists the images."""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpi.data.dataset import Dataset, Files, NewInputs
from warpi.data.decode import SUFFIXES
from warpi.data.examples import Examples
from warpi.data.image_files import PHOTO, FileExamples, default_size, load_images, stored_size
from warpi.datasets.delimited_files import reading, shorten_list, warn_once
from warpi.datasets.image_lists import Manifest, PathList, find_repeated, take_paths, write_list
from warpi.datasets.label_columns import LABEL_COLUMNS, OLD_NAMES, read_label_columns, warn_old_name
from warpi.datasets.labels import blank_missing, encode_labels, normalize_labels, warn_similar_classes
from warpi.errors import UserError, format_count, unknown
from warpi.utils.limits import limit, refuse
from warpi.utils.links import check_links

logger = logging.getLogger("warpi.datasets")

IN_MEMORY = 2**30  # bytes: decoded images up to this size are kept in memory
_PARTS = ("train", "test", "val", "trusted", "meta")
_LIKE_SPLITS = {*_PARTS, "training", "testing", "valid", "validation", "dev", "eval", "evaluation"}
_CLUTTER = ("thumbs.db", "desktop.ini")  # written by Windows


class ImageList(NamedTuple):
    """Image files with one label each."""

    root: Path
    paths: Sequence[str]
    y: Sequence[int] | Tensor

    def examples(self, size: int) -> FileExamples:
        paths = self.paths if isinstance(self.paths, PathList) else tuple(self.paths)
        return FileExamples(str(self.root), paths, size)


def read_folder(
    path: Path,
    *,
    size: int | None = None,
    classes: tuple[str, ...] | None = None,
    in_memory: bool | None = None,
    like: Dataset | None = None,
) -> Dataset:
    """Read one folder per class, or `train/`, `test/` (else `val/`) and `trusted/` with one folder per class in each.

    Files may be at any depth below their class. Hidden files and folders are ignored, and links to folders are followed
    only if they stand for a class. Classes are numbered by name, or as in `classes`; rows are sorted by path. Examples
    in `trusted` have labels that can be trusted; its old name is `meta`. Links may lead to files below `path`, or below
    the folder of the data set `like`, as in a trusted set that `warpi review` has exported.
    """
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; pass one that contains one folder of images per class")
    allowed = (path, *_folders_of(like))
    folders = _list_folders(path)
    parts = [name for name in _PARTS if name in folders]
    if folders and (loose := _list_images(path)):
        n_loose = format_count(len(loose), "image")
        warn_once(f"{path}: not used: {n_loose} outside the folders of the classes, such as {loose[0]}")
    if "train" not in folders or (len(folders) > 1 and parts == ["train"]):  # a class may be called train
        classes = _check_classes(path, folders, classes)
        lists = {"train": _scan(path, classes, allowed)}
        return make_image_dataset(path.resolve().name, classes, size, in_memory, lists)
    classes = _check_classes(path / "train", _list_folders(path / "train"), classes)
    replaced = {"val": "test", "meta": "trusted"}  # used only if the folder of the other name does not exist
    unused = [name for name in folders if name not in _PARTS or replaced.get(name) in folders]
    if unused:
        logger.warning("%s: not used: %s; trusted examples are read from the folder 'trusted'", path, ", ".join(unused))
    lists = {}
    for name in parts:
        if name not in unused:
            if name in OLD_NAMES:
                warn_old_name(path, name)
            lists[replaced.get(name, name)] = _scan(path / name, classes, allowed)
    return make_image_dataset(path.resolve().name, classes, size, in_memory, lists, top=path)


def _folders_of(like: Dataset | None) -> list[Path]:
    """The folder of the images of a data set, if it has one."""
    if like is None or like.files is None:
        return []
    return [Path(like.files.top or like.files.root)]


def _list_folders(path: Path) -> list[str]:
    """Names of the folders in `path`, except hidden ones and links to a folder that contains `path`."""
    with reading(path):
        resolved = path.resolve()
        folders = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        return sorted(e.name for e in folders if not (e.is_symlink() and resolved.is_relative_to(e.resolve())))


def _list_images(path: Path) -> list[str]:
    """Names of the images directly in a folder."""
    with reading(path):
        return sorted(e.name for e in path.iterdir() if _is_image(e.name) and not e.is_dir())


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _check_classes(path: Path, folders: list[str], classes: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return `classes`, or else one class per folder."""
    if not folders:
        raise UserError(f"{path} contains no folders; make one per class and put its images there, or pass a csv file")
    like_splits = [
        name
        for name in folders
        if name.lower() in _LIKE_SPLITS and _list_folders(path / name) and not _list_images(path / name)
    ]
    if len(like_splits) > 1 or like_splits == folders:
        raise UserError(
            f"the subfolders {', '.join(like_splits)} of {path} contain folders, so they look like splits, not "
            "classes; name splits train, test (or val) and trusted, or pass one of them as the data; if these are "
            "classes, list their images in a csv file"
        )
    if classes is None and len(folders) == 1:
        raise UserError(f"{path} contains only one class, {folders[0]!r}; at least two are needed")
    return classes or tuple(folders)


def _scan(path: Path, classes: tuple[str, ...], allowed: Sequence[Path]) -> ImageList:
    """All images in the folders of the classes. Links may only lead to the allowed folders."""
    number = {name: k for k, name in enumerate(classes)}
    rows: list[tuple[str, int]] = []
    count: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    for name in _list_folders(path):
        if name not in number:
            error = unknown(f"class (a folder of {path})", name, classes)
            raise UserError(f"{error}; rename or remove the folder: a new class needs training images")
        files = _find_images(path, name, unread, allowed)
        if not files:
            raise UserError(f"class folder {path / name} contains no images ({' '.join(SUFFIXES)}); fill or remove it")
        rows.extend((file, number[name]) for file in files)
        count[name] = len(files)
    warn_similar_classes(count, "folder", path)
    if unread:
        counts = shorten_list(f"{n} {suffix or 'without a suffix'}" for suffix, n in sorted(unread.items()))
        warn_once(f"{path}: not read: {counts}; images end in {', '.join(SUFFIXES)}")
    rows.sort()
    return ImageList(path, [file for file, _ in rows], [k for _, k in rows])


def _find_images(path: Path, name: str, unread: Counter[str], allowed: Sequence[Path]) -> list[str]:
    """Paths, relative to `path`, of all images in its folder `name`. The suffixes of other files go to `unread`."""

    def reraise(error: OSError) -> None:  # os.walk would skip a folder without read permission
        raise error

    images: list[str] = []
    check_links(path, [os.path.join(name, ".")], allowed)  # before a link to a huge folder is searched
    with reading(path / name):
        for folder, below, files in os.walk(path / name, onerror=reraise):
            below[:] = [entry for entry in below if not entry.startswith(".")]
            relative = os.path.relpath(folder, path)
            images.extend(os.path.join(relative, file) for file in files if _is_image(file))
            if len(images) > limit("FILES"):
                raise refuse(path / name, "contains too many files", "FILES")
            others = (file for file in map(str.lower, files) if file[0] != "." and file not in _CLUTTER)
            unread.update(os.path.splitext(file)[1] for file in others if not _is_image(file))
    check_links(path, images, allowed)
    return images


def read_manifest(
    path: Path,
    *,
    root: Path | None = None,
    label: str | None = None,
    size: int | None = None,
    classes: tuple[str, ...] | None = None,
    in_memory: bool | None = None,
    like: Dataset | None = None,
) -> Dataset:
    """Read a csv, tsv or parquet with one row per image.

    The columns are `path`, `label`, and optionally `clean_label`, `trusted` and `split` (docs/data.md). Paths are
    relative to `root`, by default the folder of the manifest, and may not leave it. Rows of test and trusted use their
    clean label if there is one. Classes are numbered by name (numbers by value), or as in `classes`.
    """
    root = root or path.parent
    label = (label or "label").strip().lower()
    manifest = Manifest.read(path, required=("path", label))
    paths = _relative_paths(manifest, os.path.join(os.path.abspath(root), ""))
    check_links(root, paths, (root, *_folders_of(like)))
    if repeated := find_repeated(paths):
        i, j = repeated
        raise UserError(f"{manifest.at(i)}: path {paths[i]!r} is also on {manifest.where(j)}; keep one of the two")
    texts = {**manifest.columns}
    for name in {label, *LABEL_COLUMNS} & texts.keys():
        texts[name] = normalize_labels(texts[name])
    labels = read_label_columns(texts, label, path, manifest.at, classes=classes, blank_split="train")
    if len(labels.classes) < 2:
        raise UserError(f"{path} contains only one class, {labels.classes[0]!r}; at least two are needed")
    lists = {part: ImageList(root, take_paths(paths, rows), labels.labels(part)) for part, rows in labels.rows.items()}
    return make_image_dataset(path.stem, labels.classes, size, in_memory, lists, **labels.facts())


def _relative_paths(manifest: Manifest, top: str) -> Sequence[str]:
    """The paths of a list, relative to the folder `top`."""
    cells = manifest.columns["path"]

    def normalize(row: int, cell: str) -> str:
        return _relative_path(manifest.at(row), cell, top)

    if isinstance(cells, PathList) and os.sep == "/":
        return cells.replace_odd(normalize)
    return [normalize(row, cell) for row, cell in enumerate(cells)]


def _relative_path(where: str, cell: str, top: str) -> str:
    """A path relative to the folder `top`, which must contain it."""
    path = os.path.normpath(os.path.join(top, cell))
    if not cell:
        raise UserError(f"{where}: the path is empty")
    if not path.startswith(top):
        raise UserError(f"{where}: {cell!r} is not a file below {top}; move it there or set another root")
    return path.removeprefix(top)


def read_new_images(
    path: Path, size: int, classes: tuple[str, ...], *, root: Path | None = None, label: str | None = None
) -> NewInputs:
    """Read images to predict: a folder of images, one folder per class, or a manifest with or without labels."""
    if not path.is_dir():
        return _read_new_manifest(path, root, size, classes, (label or "label").strip().lower())
    folders = _list_folders(path)
    of_classes = [name for name in folders if name in classes]
    if not of_classes and set(folders) & set(_PARTS):
        raise UserError(f"{path} contains {', '.join(folders)}; pass one of them, such as {path / folders[0]}")
    if of_classes:
        if loose := _list_images(path):
            raise UserError(f"{path} contains images outside the folders of classes, such as {loose[0]}; move them")
        images = _scan(path, classes, (path,))
        return NewInputs(images.examples(size), {"folder": torch.tensor(images.y)}, tuple(images.paths))
    files = sorted(os.path.normpath(file) for file in _find_images(path, ".", Counter(), (path,)))
    if not files:
        raise UserError(f"{path} contains no images ({' '.join(SUFFIXES)})")
    return NewInputs(ImageList(path, files, []).examples(size), {}, tuple(files))


def _read_new_manifest(path: Path, root: Path | None, size: int, classes: tuple[str, ...], label: str) -> NewInputs:
    """Read a manifest whose paths may be anywhere.

    They are relative to the folder of the manifest, or to `root` if none of them exists there.
    """
    manifest = Manifest.read(path, required=("path",))
    paths = manifest.columns["path"]
    if "" in paths:
        raise UserError(f"{manifest.at(paths.index(''))}: the path is empty")
    if root is None or any(os.path.exists(path.parent / file) for file in paths):
        root = path.parent
    labels = {
        name: encode_labels(blank_missing(normalize_labels(manifest.columns[name]), classes), classes, manifest.at)
        for name in dict.fromkeys((label, "clean_label"))
        if name in manifest.columns
    }
    return NewInputs(ImageList(root, paths, []).examples(size), labels, paths)


def convert_images(data: Path, out: Path, *, root: Path | None = None, label: str | None = None) -> tuple[int, Path]:
    """Write the paths and labels in a folder or list of images to `out`, a .parquet list. No image is opened.

    The new paths are relative to the folder of `out` if that contains the images, otherwise to the folder of the
    images. Returns the number of images and this folder.
    """
    if out.suffix != ".parquet" or out.exists():
        advice = "exists; delete it first" if out.exists() else "the name of the file must end in .parquet"
        raise UserError(f"--out {out}: {advice}")
    top = data if data.is_dir() else root or data.parent
    if data.is_dir() and Path(os.path.abspath(out)).is_relative_to(os.path.abspath(data)):
        raise UserError(
            f"--out {out} is inside {data}, which could no longer be read as a folder of images; choose another folder"
        )
    options: dict[str, Any] = {"size": PHOTO, "in_memory": False}
    dataset = read_folder(data, **options) if data.is_dir() else read_manifest(data, root=root, label=label, **options)
    base = out.parent if Path(os.path.abspath(top)).is_relative_to(os.path.abspath(out.parent)) else top
    write_list(dataset, out, base)
    splits = (dataset, dataset.test, dataset.meta)
    return sum(len(split.y) for split in splits if split is not None), base


def make_image_dataset(
    name: str,
    classes: tuple[str, ...],
    size: int | None,
    in_memory: bool | None,
    lists: Mapping[str, ImageList],
    *,
    top: Path | None = None,
    **facts: Any,
) -> Dataset:
    """Make a data set from the images of train, test and trusted. In memory, it has no unreadable images.

    If `size` or `in_memory` is None, it depends on the size of the images and the memory they need. `facts` describe
    the labels, as in `Dataset.from_parts`.
    """
    size = default_size(lists["train"].examples(PHOTO)) if size is None else size
    if in_memory is None:
        in_memory = sum(len(images.paths) for images in lists.values()) * 3 * stored_size(size) ** 2 <= IN_MEMORY
    parts: dict[str, tuple[Examples, Tensor]] = {}
    kept = {part: torch.ones(len(images.paths), dtype=torch.bool) for part, images in lists.items()}
    for part, images in lists.items():
        examples: Examples = images.examples(size)
        y = torch.as_tensor(images.y, dtype=torch.int64)
        if in_memory:
            examples, kept[part] = load_images(images.examples(size))
            y = y[kept[part]]
        parts[part] = examples, y
    paths = take_paths(lists["train"].paths, kept["train"].nonzero()[:, 0].tolist())
    for fact, values in facts.items():
        if isinstance(values, Tensor):
            facts[fact] = values[kept["trusted" if fact == "meta_given" else "train"]]
    files = Files(str(lists["train"].root), paths, str(top) if top else None)
    return Dataset.from_parts(name, parts, classes, files=files, **facts)
