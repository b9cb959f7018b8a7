"""The few-shot data sets by name: sinusoids, Omniglot, CIFAR-FS and miniImageNet."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.decode import BROKEN, decode
from warpi.data.examples import TensorExamples
from warpi.datasets.cifar import cifar100
from warpi.datasets.delimited_files import data_root, read_records, reading, shorten_list
from warpi.datasets.safe_pickle import safe_load
from warpi.errors import UserError, missing_package, unknown
from warpi.fewshot.data import PARTS, Classes, FewShotData, Sines

_OMNIGLOT_SIDE = 28
_MINI_SIDE = 84
_SUFFIXES = (".jpg", ".jpeg", ".png")


class FewShotEntry(NamedTuple):
    """A reader and a one-line description of a data set."""

    read: Callable[[Path | None], FewShotData]
    summary: str


def load_fewshot(name: str, root: Path | str | None = None) -> FewShotData:
    """Read a data set of FEWSHOT. `root` is the folder of its files (default: the environment variable WARPI_DATA)."""
    if name not in FEWSHOT:
        raise unknown("few-shot data set", name, FEWSHOT)
    return FEWSHOT[name].read(Path(root) if root is not None else None)


@cache
def class_lists(name: str) -> Any:
    """The published class lists of the three parts."""
    return json.loads((resources.files("warpi.fewshot") / "fewshot_splits.json").read_text())[name]


def sines(root: Path | None = None) -> FewShotData:
    """The sinusoids of the MetaVRF paper. No files are read."""
    if root is not None:
        raise UserError(f"sines are generated, not read; leave out --root {root}")
    return FewShotData("sines", Sines(), Sines(), Sines())


def omniglot(root: Path | None = None) -> FewShotData:
    """1,623 characters with 20 drawings each, 28 x 28, ink 255 on 0, in Vinyals' 1,028 / 172 / 423 split; 4 rotations.

    `root` contains the folder omniglot (or is it), with images_background and images_evaluation as published.
    """
    how = (
        "unpack images_background.zip and images_evaluation.zip into a folder omniglot, and give its parent folder "
        "with --root FOLDER or in the environment variable WARPI_DATA"
    )
    root = data_root(root, "omniglot", how)
    folder = next((f for f in (root / "omniglot", root) if (f / "images_background").is_dir()), None)
    if folder is None:
        raise UserError(f"{root} has no omniglot/images_background: {how}")

    def read(part: Mapping[str, Sequence[int]]) -> Classes:
        names = [f"{a}/character{i:02d}" for a, (low, high) in part.items() for i in range(low, high + 1)]
        missing = [name for name in names if not (folder / name).is_dir()]
        if missing:
            raise UserError(f"{folder} has no folder {missing[0]!r} ({len(missing)} are missing); unpack it again")
        return Classes.of(_read_images({name: _images_in(folder / name) for name in names}, _drawing), rotations=4)

    return FewShotData("omniglot", *(read(class_lists("omniglot")[part]) for part in PARTS))


def cifar_fs(root: Path | None = None) -> FewShotData:
    """CIFAR-100 in 64 / 16 / 20 classes of 600 images, 32 x 32, train and test together; `root` as for `cifar100`."""
    whole = cifar100(root)
    assert whole.test is not None and isinstance(whole.examples, TensorExamples)  # noqa: PT018
    assert isinstance(whole.test.examples, TensorExamples)
    x = torch.cat([whole.examples.x, whole.test.examples.x])
    y = torch.cat([whole.y, whole.test.y])

    def part(name: str) -> Classes:
        wanted: list[str] = class_lists("cifar_fs")[name]
        missing = [n for n in wanted if n not in whole.classes or not (y == whole.classes.index(n)).any()]
        if missing:
            raise UserError(f"these CIFAR-100 files have no images of {shorten_list(missing)}; download them again")
        return Classes.of({n: x[y == whole.classes.index(n)] for n in wanted})

    return FewShotData("cifar_fs", *map(part, PARTS))


def mini_imagenet(root: Path | None = None) -> FewShotData:
    """100 classes of 600 photographs, 84 x 84, in Ravi and Larochelle's 64 / 16 / 20 classes.

    `root` contains one of: train, val and test with one folder per class; images with train.csv, val.csv and test.csv
    (filename,label); one folder per class; mini-imagenet-cache-PART.pkl; miniImageNet_category_split_PART.pickle.
    The first two define which class is in which part.
    """
    root = data_root(root, "mini_imagenet", _MINI)
    for folder in (root / "mini_imagenet", root / "miniimagenet", root / "mini-imagenet", root):
        with reading(folder):
            images = _mini_pickles(folder)
            if images is None and (files := _mini_files(folder)):
                images = {part: _read_images(files[part], _photograph) for part in PARTS}
        if images is not None:
            data = FewShotData("mini_imagenet", *(Classes.of(images[part]) for part in PARTS))
            _check_disjoint(data, folder)
            return data
    raise UserError(f"{root} has no miniImageNet files: {_MINI}")


_MINI = (
    "put there train, val and test with one folder of images per class, or images with train.csv, val.csv and "
    "test.csv, or mini-imagenet-cache-{train,val,test}.pkl, or miniImageNet_category_split_{train_phase_train,val,test}"
    ".pickle, and give the folder with --root FOLDER or in the environment variable WARPI_DATA"
)
_Images = dict[str, Tensor]


def _mini_pickles(folder: Path) -> dict[str, _Images] | None:
    """Read either kind of published pickle: one lists the rows of each class, the other the label of each row."""
    cache_files = {part: folder / f"mini-imagenet-cache-{part}.pkl" for part in PARTS}
    names = {"train": "train_phase_train", "val": "val", "test": "test"}
    split_files = {part: folder / f"miniImageNet_category_split_{name}.pickle" for part, name in names.items()}
    for files in (cache_files, split_files):
        if any(file.is_file() for file in files.values()):
            missing = [file.name for file in files.values() if not file.is_file()]
            if missing:
                raise UserError(f"{folder} has no {missing[0]}; all three parts are needed")
            return {part: _mini_pickle(file) for part, file in files.items()}
    return None


def _mini_pickle(path: Path) -> _Images:
    content = safe_load(path)
    record = content if isinstance(content, dict) else {}
    x = record.get("image_data", record.get("data"))
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape[1:] != (_MINI_SIDE, _MINI_SIDE, 3):
        raise UserError(f"{path}: no uint8 images [N, 84, 84, 3] under 'image_data' or 'data'; download it again")
    rows: dict[str, NDArray[Any]] = {}
    numbers = {*range(len(x))}
    with suppress(ValueError):  # lists of unequal length
        if isinstance(listed := record.get("class_dict"), dict):
            rows = {str(name): np.asarray(group) for name, group in listed.items()}
        elif (labels := np.asarray(record.get("labels"))).shape == (len(x),) and labels.dtype.kind in "iuSU":
            rows = {str(label): np.flatnonzero(labels == label) for label in dict.fromkeys(labels.tolist())}
    fits = lambda group: group.ndim == 1 and group.size and group.dtype.kind in "iu" and {*group.tolist()} <= numbers
    if not rows or not all(map(fits, rows.values())):
        raise UserError(f"{path}: neither 'class_dict' nor 'labels' gives the classes of the {len(x)} images")
    images = torch.from_numpy(x).permute(0, 3, 1, 2)
    return {name: images[group.tolist()] for name, group in rows.items()}


def _mini_files(folder: Path) -> dict[str, dict[str, list[Path]]] | None:
    """The image files of the classes of each part, in any of the three layouts of folders."""
    if all((folder / part).is_dir() for part in PARTS):
        return {part: {c.name: _images_in(c) for c in _folders_in(folder / part)} for part in PARTS}
    if (folder / "images").is_dir() and all((folder / f"{part}.csv").is_file() for part in PARTS):
        return {part: _read_image_list(folder / f"{part}.csv", folder / "images") for part in PARTS}
    lists = class_lists("mini_imagenet")  # they define the parts of one folder per class
    names = [name for part in PARTS for name in lists[part]]
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing == names:
        return None
    if missing:
        raise UserError(f"{folder} has no folders {shorten_list(missing)}; all 100 classes are needed")
    return {part: {name: _images_in(folder / name) for name in lists[part]} for part in PARTS}


def _read_image_list(table: Path, folder: Path) -> dict[str, list[Path]]:
    """The image files of each class in a csv table."""
    files: dict[str, list[Path]] = {}
    with reading(table):
        for row in read_records(table):
            if not row.get("filename") or not row.get("label"):
                raise UserError(f"{table}: needs columns filename and label, got {shorten_list(row)}")
            if not (path := folder / row["filename"]).is_file():
                raise UserError(f"{table} names {row['filename']!r}, which is not in {folder}; download it again")
            files.setdefault(row["label"], []).append(path)
    return files


def _check_disjoint(data: FewShotData, folder: Path) -> None:
    """Raise if two parts share a class. Classes that pickles number from 0 are compared by their first images."""
    parts = [part for part in data[1:] if isinstance(part, Classes)]
    numbered = any(name.isdigit() for part in parts for name in part.names)
    firsts = [
        [x.contiguous().numpy().tobytes() for x in part.x[part.first]] if numbered else part.names for part in parts
    ]
    known = [dict(zip(first, part.names, strict=True)) for first, part in zip(firsts, parts, strict=True)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        if shared := [known[a][key] for key in known[a].keys() & known[b].keys()]:
            raise UserError(f"{folder}: {PARTS[a]} and {PARTS[b]} share the classes {shorten_list(sorted(shared))}")


def _folders_in(folder: Path) -> list[Path]:
    folders = sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not folders:
        raise UserError(f"{folder} contains no folders; it needs one folder of images per class")
    return folders


def _images_in(folder: Path) -> list[Path]:
    with reading(folder):
        files = sorted(f for f in folder.iterdir() if f.suffix.lower() in _SUFFIXES and not f.name.startswith("."))
    if not files:
        raise UserError(f"{folder} contains no images ({', '.join(_SUFFIXES)})")
    return files


def _photograph(path: Path) -> NDArray[np.uint8]:
    """Read a photograph as [3, 84, 84], stretched to a square as in other implementations."""
    from PIL import Image

    square = (_MINI_SIDE, _MINI_SIDE)
    return np.asarray(decode(str(path), 2 * _MINI_SIDE).resize(square, Image.Resampling.LANCZOS)).transpose(2, 0, 1)


def _drawing(path: Path) -> NDArray[np.uint8]:
    """Read a drawing as [1, 28, 28], with ink 255."""
    from PIL import Image

    with Image.open(path, formats=("PNG", "JPEG")) as image:
        small = image.convert("L").resize((_OMNIGLOT_SIDE, _OMNIGLOT_SIDE), Image.Resampling.LANCZOS)
    return 255 - np.asarray(small)[None]


def _read_images(files: Mapping[str, Sequence[Path]], read: Callable[[Path], NDArray[np.uint8]]) -> _Images:
    """The images [n, C, H, W] of each class, read by several threads."""
    try:
        from PIL.Image import DecompressionBombError
    except ImportError as e:
        raise missing_package("pillow", "reading images", "images") from e
    broken: tuple[type[Exception], ...] = (DecompressionBombError, *BROKEN)

    def one(path: Path) -> NDArray[np.uint8]:
        try:
            return read(path)
        except broken as e:
            raise UserError(f"cannot read the image {path}: {e}; download it again") from e

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        images = pool.map(one, [file for group in files.values() for file in group])
        stacks = {name: np.stack([next(images) for _ in group]) for name, group in files.items()}
    return {name: torch.from_numpy(x).contiguous() for name, x in stacks.items()}


FEWSHOT: dict[str, FewShotEntry] = {
    "sines": FewShotEntry(sines, "regression: sinusoids of varying amplitude, frequency and phase"),
    "omniglot": FewShotEntry(omniglot, "1,623 handwritten characters and their rotations, Vinyals' split"),
    "cifar_fs": FewShotEntry(cifar_fs, "CIFAR-100 as 64 / 16 / 20 classes"),
    "mini_imagenet": FewShotEntry(mini_imagenet, "100 classes of ImageNet at 84 x 84, Ravi and Larochelle's split"),
}
