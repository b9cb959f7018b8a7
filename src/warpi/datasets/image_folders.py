"""Image data sets on disk: a folder a class, a manifest, and the layouts of Clothing1M and Food-101N."""

import csv
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from warpi.data.dataset import Dataset, Files, NewInputs
from warpi.data.decode import SUFFIXES
from warpi.data.examples import Examples
from warpi.data.image_files import PHOTO, FileExamples, default_size, load_images, stored_size
from warpi.datasets.column_checks import check_label, find_trusted_column, warn_once, warn_similar_classes
from warpi.datasets.labels import (
    blank_missing,
    check_allowed,
    encode_labels,
    normalize_labels,
    parse_marks,
    sort_classes,
)
from warpi.datasets.text_files import check_column_names, data_root, detect_separator, read_cells, reading, shorten_list
from warpi.errors import UserError, unknown

logger = logging.getLogger("warpi.data")

IN_MEMORY = 2**30  # bytes: decoded images up to this many are held in memory
CLOTHING1M = (
    *("T-shirt", "Shirt", "Knitwear", "Chiffon", "Sweater", "Hoodie", "Windbreaker"),
    *("Jacket", "Down coat", "Suit", "Shawl", "Dress", "Vest", "Underwear"),
)
_PARTS = ("train", "test", "val", "meta")
_LIKE_PARTS = {*_PARTS, "training", "testing", "valid", "validation", "dev", "eval", "evaluation", "trusted"}
_CLUTTER = ("thumbs.db", "desktop.ini")  # of Windows


class _Part(NamedTuple):
    """Image files with a label each."""

    root: Path
    paths: Sequence[str]
    y: Sequence[int] | Tensor


def read_folder(
    path: Path, *, size: int | None = None, classes: tuple[str, ...] | None = None, in_memory: bool | None = None
) -> Dataset:
    """One folder a class, or `train/`, `test/` (else `val/`) and `meta/` with one folder a class in each.

    Files may lie at any depth below their class. Hidden files and folders are ignored, links to folders are followed
    only where they stand for a class. Classes are numbered by name, or as `classes` says; rows are in the order of
    their paths. `meta/` holds examples whose labels can be trusted.
    """
    if not path.is_dir():
        raise UserError(f"no folder {path}; give a folder that holds one folder of images a class")
    folders = _folders(path)
    present = [name for name in _PARTS if name in folders]
    if folders and (loose := _loose(path)):
        warn_once(
            f"{path}: {len(loose)} images beside the folders of the classes are not used, the first is {loose[0]}"
        )
    if "train" not in folders or (len(folders) > 1 and present == ["train"]):  # a class may be called train
        classes = _classes(path, folders, classes)
        return _dataset(path.resolve().name, classes, size, in_memory, {"train": _scan(path, classes)})
    classes = _classes(path / "train", _folders(path / "train"), classes)
    unused = [name for name in folders if name not in _PARTS or (name == "val" and "test" in folders)]
    if unused:
        logger.warning("%s: not used: %s; trusted examples are looked for in meta", path, ", ".join(unused))
    parts = {name: _scan(path / name, classes) for name in _PARTS if name in folders and name not in unused}
    if "val" in parts:
        parts["test"] = parts.pop("val")
    return _dataset(path.resolve().name, classes, size, in_memory, parts)


def _folders(path: Path) -> list[str]:
    """Names of the folders in `path`; not those that are hidden or lead back to where they are."""
    with reading(path):
        here = path.resolve()
        found = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        return sorted(e.name for e in found if not (e.is_symlink() and here.is_relative_to(e.resolve())))


def _loose(path: Path) -> list[str]:
    """Names of the images that lie in a folder itself."""
    with reading(path):
        return sorted(e.name for e in path.iterdir() if _is_image(e.name) and not e.is_dir())


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _classes(path: Path, found: list[str], given: tuple[str, ...] | None) -> tuple[str, ...]:
    if not found:
        raise UserError(
            f"{path} holds no folders; make one folder a class and put its images there, or give a csv file"
        )
    like = [name for name in found if name.lower() in _LIKE_PARTS and _folders(path / name) and not _loose(path / name)]
    if len(like) > 1 or like == found:
        raise UserError(
            f"{path} holds {', '.join(like)}, with folders in each: these are parts and no classes; call them train, "
            "test (or val) and meta, or give one of them; classes of these names can be listed in a csv file"
        )
    if given is None and len(found) == 1:
        raise UserError(f"{path} holds one class only, {found[0]!r}; at least two are needed")
    return given or tuple(found)


def _scan(path: Path, classes: tuple[str, ...]) -> _Part:
    number = {name: k for k, name in enumerate(classes)}
    rows, count, unread = list[tuple[str, int]](), Counter[str](), Counter[str]()
    for name in _folders(path):
        if name not in number:
            what = unknown(f"class (a folder of {path})", name, classes)
            raise UserError(f"{what}; rename the folder or take it out: a new class needs images to be trained on")
        files = _images(path, name, unread)
        if not files:
            raise UserError(f"class folder {path / name} holds no images ({' '.join(SUFFIXES)}); fill or remove it")
        rows.extend((file, number[name]) for file in files)
        count[name] = len(files)
    warn_similar_classes(count, "folder", path)
    if unread:
        listed = shorten_list(f"{n} {suffix or 'without a suffix'}" for suffix, n in sorted(unread.items()))
        warn_once(f"{path}: not read: {listed}; images end in {', '.join(SUFFIXES)}")
    rows.sort()
    return _Part(path, [file for file, _ in rows], [k for _, k in rows])


def _images(path: Path, name: str, unread: Counter[str]) -> list[str]:
    """The images in the folder `name` of `path`, at any depth, as seen from `path`; other files go to `unread`."""

    def refuse(error: OSError) -> None:  # os.walk would pass over a folder that may not be read
        raise error

    found = list[str]()
    with reading(path / name):
        for folder, below, files in os.walk(path / name, onerror=refuse):
            below[:] = [entry for entry in below if not entry.startswith(".")]
            inside = os.path.relpath(folder, path)
            found.extend(os.path.join(inside, file) for file in files if _is_image(file))
            others = (file for file in map(str.lower, files) if file[0] != "." and file not in _CLUTTER)
            unread.update(os.path.splitext(file)[1] for file in others if not _is_image(file))
    return found


def is_manifest(path: Path) -> bool:
    """Whether the file is a csv or tsv whose first line names a column `path`: a list of images, not a table."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = next((line for line in iter(lambda: file.readline(100_000), "") if line.strip()), "")
    except (OSError, UnicodeDecodeError):
        return False
    names = next(csv.reader([line], delimiter=detect_separator(line), skipinitialspace=True), [])
    return "path" in (name.strip().lower() for name in names)


def read_manifest(
    path: Path,
    *,
    root: Path | None = None,
    label: str | None = None,
    size: int | None = None,
    classes: tuple[str, ...] | None = None,
    in_memory: bool | None = None,
) -> Dataset:
    """A csv or tsv with a row an image: `path`, `label`, and if known `clean_label`, `verified`, `split`.

    Paths are relative to `root`, by default the folder of the manifest, and stay below it. A blank clean label means
    that the truth is unknown. `verified` or `trusted` (1/true/yes) marks rows that a person has checked; without such a
    column those with a clean label are taken as checked, where only some have one. `split` is train, test or meta,
    blank for train; rows of test and meta take their clean label where there is one. Classes are numbered by name
    (whole numbers by value), or as `classes` says.
    """
    root, label = root or path.parent, (label or "label").strip().lower()
    below, listed = os.path.join(os.path.abspath(root), ""), _Listed.read(path, required=("path", label))
    columns, at = listed.columns, listed.at
    paths = [_below(at(i), cell, below) for i, cell in enumerate(columns["path"])]
    first = dict[str, int]()
    for i, file in enumerate(paths):
        if (j := first.setdefault(file, i)) != i:
            raise UserError(f"{at(i)}: path {file!r} is also on line {listed.lines[j]}; keep one of the two")
    given = normalize_labels(columns[label])
    if "" in given:
        raise UserError(
            f"{at(given.index(''))}: the {label} is empty, in {given.count('')} rows in all; label or drop them"
        )
    check_label(given, label, path, named=classes is not None)
    true = blank_missing(normalize_labels(columns.get("clean_label", [""] * len(given))), given)
    classes = classes or sort_classes({*given, *true} - {""})
    if len(classes) < 2:
        raise UserError(f"{path} holds {len(classes)} class(es) in {len(given)} rows; at least two are needed")
    y, clean = encode_labels(given, classes, at), encode_labels(true, classes, at)
    splits = [cell.lower() or "train" for cell in columns.get("split", [""] * len(given))]
    check_allowed(splits, ("train", "test", "meta"), at, "split")
    of = {part: [i for i, split in enumerate(splits) if split == part] for part in ("train", "test", "meta")}
    if not of["train"]:
        raise UserError(f"{path}: no row is for training; the column split is train, test or meta (blank: train)")
    truth = torch.where(clean >= 0, clean, y)
    parts = {
        part: _Part(root, [paths[i] for i in index], (y if part == "train" else truth)[index])
        for part, index in of.items()
        if index
    }
    marks = find_trusted_column(columns.keys() - {label}, path)
    verified = parse_marks(normalize_labels(columns[marks]), at, marks)[of["train"]] if marks else None
    tested, clean = bool(of["test"]) and bool((clean[of["test"]] >= 0).all()), clean[of["train"]]
    return _dataset(path.stem, classes, size, in_memory, parts, clean=clean, verified=verified, test_is_clean=tested)


class _Listed(NamedTuple):
    """The cells of a manifest."""

    path: Path
    lines: list[int]
    columns: dict[str, list[str]]  # by name, in small letters

    def at(self, row: int) -> str:
        return f"{self.path} line {self.lines[row]}"

    @classmethod
    def read(cls, path: Path, required: tuple[str, ...]) -> "_Listed":
        names, rows, lines = read_cells(path)
        names = check_column_names(path, map(str.lower, names))
        absent = [name for name in required if name not in names]
        if absent:
            raise UserError(f"{path} has no column {absent[0]!r}; its columns are: {shorten_list(names)}")
        return cls(path, lines, {name: [row[j] for row in rows] for j, name in enumerate(names)})


def _below(where: str, cell: str, below: str) -> str:
    """A path as seen from the folder that it lies below."""
    path = os.path.normpath(os.path.join(below, cell))
    if not cell:
        raise UserError(f"{where}: the path is empty")
    if not path.startswith(below):
        raise UserError(f"{where}: {cell!r} is not a file below {below}; move it there or give another root")
    return path.removeprefix(below)


def read_new_images(
    path: Path, size: int, classes: tuple[str, ...], *, root: Path | None = None, label: str | None = None
) -> NewInputs:
    """Images to be predicted: a folder of them, a folder a class, or a manifest with or without labels."""
    if not path.is_dir():
        return _new_manifest(path, root, size, classes, (label or "label").strip().lower())
    folders = _folders(path)
    named = [name for name in folders if name in classes]
    if not named and set(folders) & set(_PARTS):
        raise UserError(f"{path} holds {', '.join(folders)}; give one of them, as {path / folders[0]}")
    if named:
        if loose := _loose(path):
            raise UserError(f"{path} holds images beside folders of classes, the first is {loose[0]}; move them")
        part = _scan(path, classes)
        return NewInputs(_files(part, size), {"folder": torch.tensor(part.y)}, tuple(part.paths))
    files = sorted(os.path.normpath(file) for file in _images(path, ".", Counter()))
    if not files:
        raise UserError(f"{path} holds no images ({' '.join(SUFFIXES)})")
    return NewInputs(_files(_Part(path, files, []), size), {}, tuple(files))


def _new_manifest(path: Path, root: Path | None, size: int, classes: tuple[str, ...], label: str) -> NewInputs:
    """Paths may lead anywhere: relative ones begin in the folder of the manifest, or of the run if none is there."""
    listed = _Listed.read(path, required=("path",))
    paths = tuple(listed.columns["path"])
    if "" in paths:
        raise UserError(f"{listed.at(paths.index(''))}: the path is empty")
    if root is None or any(os.path.exists(path.parent / file) for file in paths):
        root = path.parent
    labels = {
        name: encode_labels(blank_missing(normalize_labels(listed.columns[name]), classes), classes, listed.at)
        for name in dict.fromkeys((label, "clean_label"))
        if name in listed.columns
    }
    return NewInputs(_files(_Part(root, paths, []), size), labels, paths)


def _files(part: _Part, size: int) -> FileExamples:
    return FileExamples(str(part.root), tuple(part.paths), size)


def clothing1m(root: Path | None, *, size: int | None = None, in_memory: bool | None = None) -> Dataset:
    """Clothing1M: a million images of 14 classes with labels taken from the text around them.

    Trained on noisy_train_key_list.txt with the labels of noisy_label_kv.txt; the truth of a row is known where
    clean_label_kv.txt has its key. Trusted examples: clean_val_key_list.txt; test set: clean_test_key_list.txt.
    `root` holds these files, or a folder clothing1m that does.

    Reference: Xiao et al., Learning from massive noisy labeled data for image classification, CVPR 2015.
    """
    root = _root(root, "clothing1m", "clothing1m", "noisy_train_key_list.txt")
    noisy, checked = _label_kv(root / "noisy_label_kv.txt"), _label_kv(root / "clean_label_kv.txt")

    def part(keys: list[str], labels: dict[str, int], name: str) -> _Part:
        absent = next((key for key in keys if key not in labels), None)
        if absent is not None:
            raise UserError(f"{root / name} has no label for {absent!r}, which is listed as an image")
        return _Part(root, keys, [labels[key] for key in keys])

    meta = part(_keys(root / "clean_val_key_list.txt"), checked, "clean_label_kv.txt")
    test = part(_keys(root / "clean_test_key_list.txt"), checked, "clean_label_kv.txt")
    keys = _without(_keys(root / "noisy_train_key_list.txt"), meta.paths, test.paths)
    clean = torch.tensor([checked.get(key, -1) for key in keys])
    train = part(keys, noisy, "noisy_label_kv.txt")
    parts = {"train": train, "meta": meta, "test": test}
    return _dataset(
        "clothing1m", CLOTHING1M, PHOTO if size is None else size, in_memory, parts, clean=clean, test_is_clean=True
    )


def _label_kv(path: Path) -> dict[str, int]:
    labels = {}
    for line, text in _lines(path):
        key, label = text.rsplit(maxsplit=1) if " " in text else ("", text)
        if not key or not label.isdecimal() or int(label) >= len(CLOTHING1M):
            raise UserError(f"{path} line {line}: got {text!r}, expected an image and a class 0..{len(CLOTHING1M) - 1}")
        labels[key] = int(label)
    return labels


def _keys(path: Path) -> list[str]:
    return list(dict.fromkeys(text for _, text in _lines(path)))


def food101n(
    root: Path | None, *, whole: bool = False, size: int | None = None, in_memory: bool | None = None
) -> Dataset:
    """Food-101N: images of 101 dishes from the web, and the test set of Food-101.

    `root` is or holds Food-101N_release, with food-101 in it or beside it. Trained, as published, on the images of
    verified_train.tsv with the class they were found under: whether that class was verified as right is ignored. With
    `whole` on all of imagelist.tsv except the images of verified_val.tsv. Trusted examples: the images of
    verified_val.tsv whose class is right.

    Reference: Lee et al., CleanNet: transfer learning for scalable image classifier training with label noise,
    CVPR 2018; Bossard et al., Food-101, ECCV 2014.
    """
    root = _root(root, "food101n", "Food-101N_release", "meta/classes.txt")
    classes = tuple(text for _, text in _lines(root / "meta" / "classes.txt"))
    number = {name: k for k, name in enumerate(classes)}

    def listed(path: Path) -> Iterator[tuple[str, list[str], int]]:
        """class/image, the cells after it, and the number of the class."""
        for line, text in _lines(path):
            key, *cells = text.split("\t")
            if (name := key.partition("/")[0]) not in number:
                raise UserError(f"{path} line {line}: {unknown('class', name, classes)}")
            yield key, cells, number[name]

    val = {key: (cells, k) for key, cells, k in listed(root / "meta" / "verified_val.tsv")}
    right = {key: k for key, (cells, k) in val.items() if cells[-1:] == ["1"]}
    source = root / "meta" / ("imagelist.tsv" if whole else "verified_train.tsv")
    found = {key: k for key, _, k in listed(source)}
    keys = [key for key in found if key not in val] if whole else _without(list(found), list(val))
    beside = next((p for p in (root / "food-101", root.resolve().parent / "food-101") if p.is_dir()), root / "food-101")
    tested = {f"{key}.jpg": k for key, _, k in listed(beside / "meta" / "test.txt")}
    train = _Part(root / "images", keys, [found[key] for key in keys])
    meta = _Part(root / "images", list(right), list(right.values()))
    test = _Part(beside / "images", list(tested), list(tested.values()))
    parts = {"train": train, "meta": meta, "test": test}
    return _dataset("food101n", classes, PHOTO if size is None else size, in_memory, parts, test_is_clean=True)


def _root(root: Path | None, data: str, folder: str, first: str) -> Path:
    """Where `first` lies: in `root` itself or in the folder of that name in it."""
    root = data_root(root, data, f"name the folder that holds {first} with --root FOLDER or in WARPI_DATA")
    with reading(root):
        return root / folder if (root / folder / first).is_file() else root


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of the lines that are not blank, less the header that Food-101N has."""
    with reading(path):
        if not path.is_file():
            raise UserError(f"no file {path}; unpack the data set as it is published, or give another folder")
        with path.open(encoding="utf-8-sig") as file:
            lines = ((k, line.strip()) for k, line in enumerate(file, 1))
            yield from ((k, line) for k, line in lines if line and not line.startswith("class_name"))


def _without(keys: list[str], *held: Sequence[str]) -> list[str]:
    """The keys that are not held out: no image is trained on and tested on."""
    out = {key for part in held for key in part}
    kept = [key for key in keys if key not in out]
    if len(kept) < len(keys):
        logger.warning("%d images left out of training: they are held out as well", len(keys) - len(kept))
    return kept


def _dataset(
    name: str,
    classes: tuple[str, ...],
    size: int | None,
    in_memory: bool | None,
    parts: Mapping[str, _Part],
    *,
    clean: Tensor | None = None,
    verified: Tensor | None = None,
    test_is_clean: bool = False,
) -> Dataset:
    """Put together what a reader found in train, test and meta; in memory the rows of unreadable files are dropped."""
    size = default_size(_files(parts["train"], PHOTO)) if size is None else size
    if in_memory is None:
        in_memory = sum(len(part.paths) for part in parts.values()) * 3 * stored_size(size) ** 2 <= IN_MEMORY

    def load(part: _Part) -> tuple[Examples, Tensor, Tensor]:
        """The images, their labels, and which of the files they are."""
        examples, y = _files(part, size), torch.as_tensor(part.y, dtype=torch.int64)
        if not in_memory:
            return examples, y, torch.ones(len(y), dtype=torch.bool)
        tensor, kept = load_images(examples)
        return tensor, y[kept], kept

    loaded = {which: load(part) for which, part in parts.items()}
    kept = loaded["train"][2]
    clean, verified = (None if column is None else column[kept] for column in (clean, verified))
    held = {which: (examples, y) for which, (examples, y, _) in loaded.items()}
    read = zip(parts["train"].paths, kept.tolist(), strict=True)
    files = Files(str(parts["train"].root), tuple(path for path, good in read if good))
    return Dataset.from_parts(
        name, held, classes, clean=clean, verified=verified, test_is_clean=test_is_clean, files=files
    )
