"""Clothing1M, Food-101N, ANIMAL-10N and mini-WebVision: images with labels from the web, in their published layouts."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from warpi.data.dataset import Dataset
from warpi.data.image_files import PHOTO
from warpi.datasets.delimited_files import data_root, reading
from warpi.datasets.image_folders import ImageList, make_image_dataset
from warpi.errors import UserError, format_count, unknown
from warpi.utils.limits import limit, refuse

logger = logging.getLogger("warpi.datasets")

CLOTHING1M = (
    *("T-shirt", "Shirt", "Knitwear", "Chiffon", "Sweater", "Hoodie", "Windbreaker"),
    *("Jacket", "Down coat", "Suit", "Shawl", "Dress", "Vest", "Underwear"),
)
ANIMAL10N = (
    *("cat", "lynx", "wolf", "coyote", "cheetah", "jaguar"),
    *("chimpanzee", "orangutan", "hamster", "guinea pig"),
)
MINI_WEBVISION = 50  # number of classes


def clothing1m(root: Path | None, *, size: int | None = None, in_memory: bool | None = None) -> Dataset:
    """Clothing1M: a million images of 14 classes with labels taken from the surrounding text.

    Training rows are those of noisy_train_key_list.txt with the labels of noisy_label_kv.txt; the true label of a row
    is known if clean_label_kv.txt has its key. Trusted examples are in clean_val_key_list.txt, the test set in
    clean_test_key_list.txt. `root` contains these files, or a folder clothing1m with them.

    Reference: Xiao et al., Learning from massive noisy labeled data for image classification, CVPR 2015.
    """
    root = _find_root(root, "clothing1m", "clothing1m", "noisy_train_key_list.txt")
    noisy = _read_labels(root / "noisy_label_kv.txt")
    checked = _read_labels(root / "clean_label_kv.txt")

    def list_images(keys: list[str], labels: dict[str, int], name: str) -> ImageList:
        for key in keys:
            if key not in labels:
                raise UserError(f"{root / name} has no label for {key!r}, which is listed as an image")
        return ImageList(root, keys, [labels[key] for key in keys])

    trusted = list_images(_read_keys(root / "clean_val_key_list.txt"), checked, "clean_label_kv.txt")
    test = list_images(_read_keys(root / "clean_test_key_list.txt"), checked, "clean_label_kv.txt")
    keys = _remove_held_out(_read_keys(root / "noisy_train_key_list.txt"), trusted.paths, test.paths)
    lists = {"train": list_images(keys, noisy, "noisy_label_kv.txt"), "trusted": trusted, "test": test}
    clean = torch.tensor([checked.get(key, -1) for key in keys])
    size = PHOTO if size is None else size
    return make_image_dataset("clothing1m", CLOTHING1M, size, in_memory, lists, clean=clean, test_is_clean=True)


def _read_labels(path: Path) -> dict[str, int]:
    labels = {}
    for line, text in _read_lines(path):
        key, label = text.rsplit(maxsplit=1) if " " in text else ("", text)
        if not key or not label.isdecimal() or int(label) >= len(CLOTHING1M):
            raise UserError(f"{path} line {line}: got {text!r}, expected an image and a class 0..{len(CLOTHING1M) - 1}")
        labels[key] = int(label)
    return labels


def _read_keys(path: Path) -> list[str]:
    return list(dict.fromkeys(text for _, text in _read_lines(path)))


def food101n(
    root: Path | None, *, whole: bool = False, size: int | None = None, in_memory: bool | None = None
) -> Dataset:
    """Food-101N: images of 101 dishes from the web, and the test set of Food-101.

    `root` is the folder Food-101N_release or contains it; food-101 is in it or next to it. Training rows are, as
    published, the images of verified_train.tsv with the class of the query that returned them; whether that class was
    verified is ignored. With `whole`, they are all of imagelist.tsv except the images of verified_val.tsv. Trusted
    examples are the images of verified_val.tsv whose class is right.

    Reference: Lee et al., CleanNet: transfer learning for scalable image classifier training with label noise,
    CVPR 2018; Bossard et al., Food-101, ECCV 2014.
    """
    root = _find_root(root, "food101n", "Food-101N_release", "meta/classes.txt")
    classes = tuple(text for _, text in _read_lines(root / "meta" / "classes.txt"))
    number = {name: k for k, name in enumerate(classes)}

    def read_list(path: Path) -> Iterator[tuple[str, list[str], int]]:
        """Yield class/image, the cells after it, and the number of the class."""
        for line, text in _read_lines(path):
            key, *cells = text.split("\t")
            if (name := key.partition("/")[0]) not in number:
                raise UserError(f"{path} line {line}: {unknown('class', name, classes)}")
            yield key, cells, number[name]

    verified = {key: (cells, k) for key, cells, k in read_list(root / "meta" / "verified_val.tsv")}
    trusted = {key: k for key, (cells, k) in verified.items() if cells[-1:] == ["1"]}
    source = root / "meta" / ("imagelist.tsv" if whole else "verified_train.tsv")
    noisy = {key: k for key, _, k in read_list(source)}
    keys = [key for key in noisy if key not in verified] if whole else _remove_held_out(list(noisy), list(verified))
    folders = (root / "food-101", root.resolve().parent / "food-101")
    food101 = next((folder for folder in folders if folder.is_dir()), folders[0])
    test = {f"{key}.jpg": k for key, _, k in read_list(food101 / "meta" / "test.txt")}
    lists = {
        "train": ImageList(root / "images", keys, [noisy[key] for key in keys]),
        "trusted": ImageList(root / "images", list(trusted), list(trusted.values())),
        "test": ImageList(food101 / "images", list(test), list(test.values())),
    }
    size = PHOTO if size is None else size
    return make_image_dataset("food101n", classes, size, in_memory, lists, test_is_clean=True)


def animal10n(root: Path | None, *, size: int | None = None, in_memory: bool | None = None) -> Dataset:
    """ANIMAL-10N: 50,000 images of five pairs of similar animals, about 8 % wrong labels, and 5,000 for testing.

    `root` contains the folders training and testing of the published images, or a folder animal10n with them. The
    number of the class is the first part of a file's name, as in 3_12345.jpg. The images have 64 x 64 pixels, which is
    the default size. There are no trusted examples. The labels of the test set are assumed to be right.

    Reference: Song et al., SELFIE: refurbishing unclean samples for robust deep learning, ICML 2019.
    """
    root = data_root(root, "animal10n", "set --root (or WARPI_DATA) to the folder that contains training/ and testing/")
    with reading(root):
        root = root / "animal10n" if (root / "animal10n" / "training").is_dir() else root
    lists = {part: _list_numbered(root / folder) for part, folder in (("train", "training"), ("test", "testing"))}
    size = 64 if size is None else size
    return make_image_dataset("animal10n", ANIMAL10N, size, in_memory, lists, test_is_clean=True)


def _list_numbered(folder: Path) -> ImageList:
    """The images of a folder whose names begin with the number of their class, sorted by name."""
    with reading(folder):
        if not folder.is_dir():
            raise UserError(f"no folder {folder}; unpack raw_image.zip of ANIMAL-10N, or choose another folder")
        is_image = lambda name: name.lower().endswith((".jpg", ".jpeg", ".png")) and not name.startswith(".")
        names = sorted(filter(is_image, os.listdir(folder)))
        if len(names) > limit("FILES"):
            raise refuse(folder, "contains too many files", "FILES")
    for name in names:
        if not re.match(r"[0-9]_", name):
            raise UserError(f"{folder / name}: the name must begin with the class 0..9 and _, as in 3_12345.jpg")
    return ImageList(folder, names, [int(name[0]) for name in names])


def mini_webvision(root: Path | None, *, size: int | None = None, in_memory: bool | None = None) -> Dataset:
    """Mini-WebVision: the images of WebVision 1.0 that Google found for the first 50 classes, about 66,000.

    `root` contains WebVision's folders info, google and val_images_256 (or val_images), or a folder webvision with
    them. Training rows are those of info/train_filelist_google.txt, test rows those of info/val_filelist.txt, 50 per
    class. Classes have the names in info/synsets.txt if it exists, else their numbers. There are no trusted examples.

    Reference: Li et al., WebVision database: visual learning and understanding from web data, 2017; Jiang et al.,
    MentorNet, ICML 2018 (the first 50 classes).
    """
    root = _find_root(root, "mini_webvision", "webvision", "info/train_filelist_google.txt")
    train = _read_numbered(root / "info" / "train_filelist_google.txt")
    test = _read_numbered(root / "info" / "val_filelist.txt")
    folders = (root / "val_images_256", root / "val_images")
    with reading(root):
        pictures = next((folder for folder in folders if folder.is_dir()), folders[0])
    lists = {
        "train": ImageList(root, list(train), list(train.values())),
        "test": ImageList(pictures, list(test), list(test.values())),
    }
    classes = _read_synsets(root / "info" / "synsets.txt")
    size = PHOTO if size is None else size
    return make_image_dataset("mini_webvision", classes, size, in_memory, lists, test_is_clean=True)


def _read_numbered(path: Path) -> dict[str, int]:
    """The class of each image, for the classes that are used."""
    labels = {}
    for line, text in _read_lines(path):
        key, _, label = text.rpartition(" ")
        if not key or not label.isdecimal():
            raise UserError(f"{path} line {line}: got {text!r}, expected an image and the number of its class")
        if int(label) < MINI_WEBVISION:
            labels[key.strip()] = int(label)
    return labels


def _read_synsets(path: Path) -> tuple[str, ...]:
    """The first name of each class that is used, or its whole line if that is not unique."""
    with reading(path):
        if not path.is_file():
            return tuple(map(str, range(MINI_WEBVISION)))
    lines = [text for _, text in _read_lines(path)][:MINI_WEBVISION]
    if len(lines) < MINI_WEBVISION:
        raise UserError(f"{path} has {len(lines)} classes, expected at least {MINI_WEBVISION}; unpack it again")
    names = [text.partition(" ")[2].partition(",")[0].strip() or text for text in lines]
    return tuple(name if names.count(name) == 1 else text for name, text in zip(names, lines, strict=True))


def _find_root(root: Path | None, data: str, folder: str, first: str) -> Path:
    """The folder that contains the file `first`: `root`, or its subfolder `folder`."""
    root = data_root(root, data, f"set --root (or WARPI_DATA) to the folder that contains {first}")
    with reading(root):
        return root / folder if (root / folder / first).is_file() else root


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of the lines that are not blank, without the header of Food-101N."""
    with reading(path):
        if not path.is_file():
            raise UserError(f"no file {path}; unpack the data set as it is published, or choose another folder")
        with path.open(encoding="utf-8-sig") as file:
            lines = ((k, line.strip()) for k, line in enumerate(file, 1))
            yield from ((k, line) for k, line in lines if line and not line.startswith("class_name"))


def _remove_held_out(keys: list[str], *held_out: Sequence[str]) -> list[str]:
    """The keys that are not held out, so that no image is used for both training and testing."""
    excluded = {key for part in held_out for key in part}
    kept = [key for key in keys if key not in excluded]
    if len(kept) < len(keys):
        n_removed = format_count(len(keys) - len(kept), "image")
        logger.warning("removed %s from training, because trusted or test data also contains them", n_removed)
    return kept
