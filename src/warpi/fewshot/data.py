"""Data sets for few-shot tasks: sinusoids, Omniglot, CIFAR-FS and miniImageNet, each with train, val and test parts."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from warpi.data.decode import BROKEN, decode
from warpi.data.examples import TensorExamples
from warpi.datasets.cifar import cifar100
from warpi.datasets.safe_pickle import safe_load
from warpi.datasets.text_files import data_root, read_records, reading, shorten_list
from warpi.errors import UserError, missing_package, unknown

PARTS = ("train", "val", "test")
_OMNIGLOT_SIDE = 28
_MINI_SIDE = 84
_SUFFIXES = (".jpg", ".jpeg", ".png")

Values = Tensor | NDArray[Any] | Sequence[Any]
"""Types that are accepted instead of a tensor."""


def as_tensor(values: Values, what: str) -> Tensor:
    """Convert values to a tensor; errors call them `what`."""
    try:
        return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values, order="C"))
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(f"{what} must be a tensor, an array or a list with rows of equal length: {e}") from e


@dataclass(frozen=True, eq=False)
class Classes:
    """Images (or vectors) of K classes, sorted by class."""

    x: Tensor  # [N, C, H, W] uint8, or floats in [0, 1]; or [N, D] float32
    first: Tensor  # [K] row of the first image of each class
    count: Tensor  # [K] number of images of each class
    names: tuple[str, ...]
    least: int  # size of the smallest class
    most: int  # size of the largest class; a number, since reading a tensor on a GPU would block the step
    rotations: int = 1  # 4: every class rotated by 90, 180 and 270 degrees counts as three more classes

    @classmethod
    def of(cls, images: Mapping[str, Values], rotations: int = 1) -> Self:
        """Build from the images [n, C, H, W], or vectors [n, D], of each class."""
        parts = {name: _inputs(x, name) for name, x in images.items()}
        if not parts:
            raise UserError("no classes were given; write Classes.of({'cat': images, ...})")
        forms = {name: (tuple(x.shape[1:]), x.dtype) for name, x in parts.items()}
        (first, form), *others = forms.items()
        if other := next((name for name, its in others if its != form), None):
            raise UserError(f"{first!r} has inputs {form}, and {other!r} has {forms[other]}; they must be equal")
        if rotations > 1 and (len(form[0]) != 3 or form[0][1] != form[0][2]):
            raise UserError(f"only square images can be rotated, got inputs of shape {form[0]}; leave out rotations")
        sizes = [len(x) for x in parts.values()]
        x = torch.cat(list(parts.values()))
        count = torch.tensor(sizes)
        return cls(x, count.cumsum(0) - count, count, tuple(parts), min(sizes), max(sizes), rotations)

    def __len__(self) -> int:
        """Number of classes that a task can choose from."""
        return len(self.names) * self.rotations

    def to(self, device: torch.device | str) -> Self:
        return replace(self, x=self.x.to(device), first=self.first.to(device), count=self.count.to(device))

    def digest(self) -> str:
        """A hash of the data, with which a run checks that its data has not changed."""
        content = hashlib.sha256(f"{tuple(self.x.shape)} {self.count.tolist()} {self.names} {self.rotations}".encode())
        content.update(self.x.cpu().contiguous().numpy().data)
        return content.hexdigest()


def _inputs(values: Values, name: str) -> Tensor:
    """Check the images or vectors of a class; returns uint8 or float32."""
    x = as_tensor(values, f"the inputs of class {name!r}")
    if x.dim() not in (2, 4) or not x.numel():
        raise UserError(f"class {name!r} must have images [n, C, H, W] or vectors [n, D], got shape {tuple(x.shape)}")
    if x.dim() == 4 and not (x.is_floating_point() or x.dtype == torch.uint8):
        raise UserError(f"images must be bytes (uint8) or floats in [0, 1], got {x.dtype} for {name!r}; convert them")
    return x if x.dtype == torch.uint8 else x.float()


@dataclass(frozen=True)
class Sines:
    """Functions y = A sin(w x + b), with A, w, b and x drawn uniformly (Zhen et al. 2020, section 5.1)."""

    amplitude: tuple[float, float] = (0.1, 5.0)
    frequency: tuple[float, float] = (0.8, 1.2)
    phase: tuple[float, float] = (0.0, math.pi)
    interval: tuple[float, float] = (-5.0, 5.0)

    def functions(self, tasks: int, generator: Generator) -> Tensor:
        """A, w and b of each task.  [T, 3]"""
        ranges = (self.amplitude, self.frequency, self.phase)
        u = torch.rand(tasks, 3, generator=generator, device=generator.device).unbind(1)
        return torch.stack([low + (high - low) * v for (low, high), v in zip(ranges, u, strict=True)], dim=1)

    def points(self, tasks: int, n: int, generator: Generator) -> Tensor:
        """Inputs of each task.  [T, n, 1]"""
        low, high = self.interval
        return low + (high - low) * torch.rand(tasks, n, 1, generator=generator, device=generator.device)

    def grid(self, n: int = 50) -> Tensor:
        """n equally spaced inputs, including the left end and excluding the right end.  [n, 1]"""
        low, high = self.interval
        return low + (high - low) / n * torch.arange(n)[:, None]

    @staticmethod
    def values(functions: Tensor, x: Tensor) -> Tensor:
        """functions [T, 3], x [T, n, 1] -> y [T, n, 1]"""
        a, w, b = functions[:, :, None, None].unbind(1)  # each [T, 1, 1]
        return a * torch.sin(w * x + b)


class FewShotData(NamedTuple):
    """The source of tasks: three parts with different classes, or functions."""

    name: str
    train: Classes | Sines
    val: Classes | Sines
    test: Classes | Sines

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.x.shape[1:]) if isinstance(self.train, Classes) else (1,)

    @property
    def regression(self) -> bool:
        return isinstance(self.train, Sines)

    def part(self, name: str) -> Classes | Sines:
        part: Classes | Sines = getattr(self, name)
        return part

    def check(self) -> None:
        """Raise if two parts share a class or have inputs of different shapes."""
        parts = {name: part for name in PARTS if isinstance(part := self.part(name), Classes)}
        if parts and len(parts) < len(PARTS):
            raise UserError(
                f"only {', '.join(parts)} of {', '.join(PARTS)} are Classes; use the same type for all parts"
            )
        for a, b in combinations(parts, 2):
            if shared := sorted({*parts[a].names} & {*parts[b].names}):
                raise UserError(f"{a} and {b} share classes: {shorten_list(shared)}; put each class into one part only")
            if (one := parts[a].x.shape[1:]) != (other := parts[b].x.shape[1:]):
                raise UserError(f"inputs of {a} are {tuple(one)}, those of {b} are {tuple(other)}; they must be equal")

    def to(self, device: torch.device | str) -> "FewShotData":
        parts = (self.part(name) for name in PARTS)
        return FewShotData(self.name, *(p.to(device) if isinstance(p, Classes) else p for p in parts))

    def digest(self) -> str:
        return " ".join(p.digest() if isinstance(p, Classes) else repr(p) for p in self[1:])


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
