"""List the image files or texts to embed, with their labels."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from warpi.data.dataset import Dataset
from warpi.data.image_files import FileExamples
from warpi.data.split import Split
from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.delimited_files import (
    TABLE_SUFFIXES,
    check_column_names,
    find_separator,
    read_cells,
    reading,
    shorten_list,
)
from warpi.datasets.hugging_face.extract import extract_images
from warpi.datasets.hugging_face.saved import is_saved, read_saved_table
from warpi.datasets.image_folders import read_folder, read_manifest, read_new_images
from warpi.datasets.image_lists import is_manifest
from warpi.datasets.label_columns import LABEL_FACTS, PARTS, read_label_columns
from warpi.datasets.labels import blank_missing, encode_labels, normalize_labels
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError, no_path, unknown
from warpi.utils.files import file_size
from warpi.utils.links import check_links

_FACTS = ("clean", "trusted", "given", "meta_given", "before_audit", "before_person")
_ANY_SIDE = 8  # pixels; the value does not matter, because the images are only listed


@dataclass(frozen=True)
class Source:
    """Images or texts to embed. The rows of `train` come first, then those of `test` and `trusted`."""

    name: str
    kind: str  # "images" or "texts"
    root: str | None  # the folder that the paths of images are relative to
    inputs: tuple[str, ...]  # [N] paths or texts
    parts: Mapping[str, int]  # number of rows of each part, in order
    classes: tuple[str, ...] = ()
    y: tuple[int, ...] = ()  # [N] given labels; empty: not known
    facts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # arguments of `Dataset.from_parts` with labels
    test_is_clean: bool = False
    labels: Mapping[str, tuple[int, ...]] | None = None  # of rows to predict, by column; -1 unknown

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Source":
        lists = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
        facts = {name: tuple(values) for name, values in stored["facts"].items()}
        return cls(**{**stored, **lists, "facts": facts})

    def rows_of(self, part: str) -> range:
        start = 0
        for name, n in self.parts.items():
            if name == part:
                return range(start, start + n)
            start += n
        raise KeyError(part)

    def path(self, row: int) -> str:
        return os.path.join(self.root or "", self.inputs[row])

    def content(self, row: int) -> bytes:
        """The bytes of an image file, or of a text as UTF-8. Raises OSError if a file cannot be read."""
        if self.kind == "texts":
            return self.inputs[row].encode(errors="surrogateescape")
        if not os.path.isfile(self.path(row)):
            raise FileNotFoundError(f"no file {self.path(row)}")
        with open(self.path(row), "rb") as file:
            return file.read()

    def file_sizes(self) -> list[int]:
        """Sizes of the image files in bytes, -1 for a missing one; empty for texts."""
        return [file_size(self.path(row)) for row in range(len(self.inputs))] if self.kind == "images" else []


def list_source(
    data: str,
    *,
    root: Path | None = None,
    label: str | None = None,
    text: str | None = None,
    classes: tuple[str, ...] | None = None,
    like: Dataset | None = None,
) -> Source:
    """List the images or texts of a data set with their labels.

    `data` is a folder of images or of .txt files with one folder per class, a csv or tsv with a column `path` of
    images, a table with a column of texts (`text`), a Hugging Face data set with such a column, or the name of a
    built-in data set of image files. A second set gets the `classes` of the first, `like`, and its links may lead to
    the images of the first.
    """
    path = Path(data)
    if data in DATASETS:
        if not DATASETS[data].resizable:
            raise UserError(f"{data} does not consist of image files; pass a folder of images or a table with texts")
        return _from_images(DATASETS[data].load(root, _ANY_SIDE, in_memory=False))
    if not path.exists():
        raise no_path(data, advice="pass images or texts to embed")
    if is_saved(path):
        return _from_table(path, text or "text", label or "label", classes)
    if path.is_dir() and not _has_texts(path):
        return _from_images(read_folder(path, size=_ANY_SIDE, classes=classes, in_memory=False, like=like))
    if path.is_dir():
        return _from_text_folder(path, classes)
    if path.suffix.lower() not in TABLE_SUFFIXES:
        kinds = "a folder of images or .txt files, a .csv, .tsv or .parquet file, or hf:FOLDER"
        raise UserError(f"cannot embed {path}; pass {kinds}")
    if text is None and is_manifest(path):
        options: dict[str, Any] = {"root": root, "label": label, "classes": classes, "in_memory": False, "like": like}
        return _from_images(read_manifest(path, size=_ANY_SIDE, **options))
    return _from_table(path, text or "text", label or "label", classes)


def list_with_classes(source: Source, classes: tuple[str, ...], data: str) -> Source:
    """A second set, such as trusted examples, with the classes of the first."""
    for name in source.classes:
        if name not in classes:
            raise UserError(f"{unknown(f'class in {data}:', name, classes)}; a new class needs training rows")
    number = [*(classes.index(name) for name in source.classes), -1]  # -1 stays -1
    facts = {name: v if name == "trusted" else tuple(number[k] for k in v) for name, v in source.facts.items()}
    return replace(source, classes=classes, y=tuple(number[k] for k in source.y), facts=facts)


def list_new(
    data: str,
    kind: str,
    classes: tuple[str, ...],
    scratch: Path,
    *,
    root: Path | None,
    label: str | None,
    text: str | None,
) -> Source:
    """List images or texts to predict. Labels are optional. Images of Hugging Face become files in `scratch`."""
    path = Path(data)
    if kind == "images":
        if is_saved(path):
            path, label = extract_images(path, scratch, label, overwrite=True, new=True), None
        new = read_new_images(path, _ANY_SIDE, classes, root=root, label=label)
        assert isinstance(new.examples, FileExamples)
        assert new.paths is not None
        labels = {name: tuple(y.tolist()) for name, y in new.labels.items()}
        folder = os.path.abspath(new.examples.root)
        return Source(path.name, kind, folder, tuple(new.paths), {"train": len(new.paths)}, classes, labels=labels)
    if path.is_dir() and not is_saved(path):
        files = sorted(_find_texts(path))
        if not files:
            raise UserError(f"{path} contains no .txt files")
        texts = tuple(_read_text(path / file) for file in files)
        return Source(path.name, kind, None, texts, {"train": len(texts)}, classes)
    columns = _read_columns(path)
    texts = tuple(_column(columns, text or "text", path, "--text COLUMN"))
    names = [name for name in dict.fromkeys((label or "label", "clean_label")) if name in columns]
    labels = {
        name: tuple(
            encode_labels(
                blank_missing(normalize_labels(columns[name]), classes), classes, lambda i: f"{path}, row {i}"
            ).tolist()
        )
        for name in names
    }
    return Source(path.stem, kind, None, texts, {"train": len(texts)}, classes, labels=labels)


def _from_images(dataset: Dataset) -> Source:
    """The files and labels of a data set of image files."""
    every = torch.arange(len(dataset.y))
    splits: dict[str, Split | None] = {"train": Split(dataset.examples, every, dataset.y)}
    splits |= {"test": dataset.test, "trusted": dataset.meta}
    present = {part: split for part, split in splits.items() if split is not None}
    files: list[str] = []
    for split in present.values():
        assert isinstance(split.examples, FileExamples)
        files.extend(os.path.abspath(split.examples.path(row)) for row in split.rows.tolist())
    root = os.path.commonpath([os.path.dirname(min(files)), os.path.dirname(max(files))])
    prefix = os.path.join(root, "")
    return Source(
        dataset.name,
        "images",
        root,
        tuple(file.removeprefix(prefix) for file in files),
        {part: len(split) for part, split in present.items()},
        dataset.classes,
        tuple(k for split in present.values() for k in split.y.tolist()),
        {name: tuple(t.tolist()) for name in _FACTS if (t := getattr(dataset, name, None)) is not None},
        dataset.test_is_clean,
    )


def _from_table(path: Path, text: str, label: str, classes: tuple[str, ...] | None) -> Source:
    """The texts and labels of a table, whose column of texts is called `text`."""
    columns = _read_columns(path)
    texts = _column(columns, text, path, "--text COLUMN")
    _column(columns, label, path, "--label COLUMN")
    cells = {name: normalize_labels(columns[name]) for name in (label, *LABEL_FACTS) if name in columns}
    labels = read_label_columns(
        cells, label, path, lambda row: f"{path}, row {row}", classes=classes, blank_split="train"
    )
    order = {part: labels.rows[part] for part in PARTS if part in labels.rows}
    facts = labels.facts()
    return Source(
        path.stem,
        "texts",
        None,
        tuple(texts[i] for rows in order.values() for i in rows),
        {part: len(rows) for part, rows in order.items()},
        labels.classes,
        tuple(k for part in order for k in labels.labels(part).tolist()),
        {name: tuple(facts[name].tolist()) for name in _FACTS if facts.get(name) is not None},
        facts["test_is_clean"],
    )


def _read_columns(path: Path) -> dict[str, list[str]]:
    """The columns of a table as text, '' for a missing cell."""
    if path.suffix.lower() == ".parquet" or is_saved(path):
        frame = read_saved_table(path, simple_only=True) if is_saved(path) else read_parquet(path)
        values = (column.to_pylist() for column in frame.columns)
        texts = [["" if cell is None or cell != cell else str(cell) for cell in cells] for cells in values]
        return dict(zip(check_column_names(path, frame.column_names), texts, strict=True))
    names, rows, _ = read_cells(path, find_separator(path))
    return {name: [row[j] for row in rows] for j, name in enumerate(check_column_names(path, names))}


def _column(columns: Mapping[str, list[str]], name: str, path: Path, flag: str) -> list[str]:
    if name not in columns:
        raise UserError(f"{path} has no column {name!r}; its columns are {shorten_list(columns)}; choose with {flag}")
    return columns[name]


def _has_texts(path: Path) -> bool:
    """Whether a folder contains more .txt files than other files."""
    counts = Counter(Path(name).suffix.lower() for _, _, names in os.walk(path) for name in names if name[0] != ".")
    return counts[".txt"] > sum(counts.values()) / 2


def _find_texts(path: Path) -> list[str]:
    """The .txt files below a folder, relative to it."""
    with reading(path):
        files = [str(file.relative_to(path)) for file in path.rglob("*.txt") if file.is_file()]
    check_links(path, files, (path,))
    return files


def _from_text_folder(path: Path, classes: tuple[str, ...] | None) -> Source:
    """The .txt files of a folder with one folder per class, or with such folders in train, test and trusted."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    folders = {part: path / part for part in PARTS if part in names} if "train" in names else {"train": path}
    files = {part: sorted(_find_texts(folder)) for part, folder in folders.items()}
    classes = classes or tuple(sorted({Path(file).parts[0] for file in files["train"] if os.sep in file}))
    if len(classes) < 2:
        raise UserError(f"{folders['train']} must contain at least two folders of .txt files, one per class")
    texts: list[str] = []
    y: list[int] = []
    for part, folder in folders.items():
        for file in files[part]:
            name = Path(file).parts[0]
            if name not in classes:
                raise unknown(f"class ({folder / file}):", name, classes)
            texts.append(_read_text(folder / file))
            y.append(classes.index(name))
    counts = {part: len(listed) for part, listed in files.items()}
    return Source(path.resolve().name, "texts", None, tuple(texts), counts, classes, tuple(y))


def _read_text(path: Path) -> str:
    with reading(path):
        return path.read_text(encoding="utf-8").strip()
