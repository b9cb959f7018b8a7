"""What tells that a run's data is the same: hashes of all that was read, and a stamp of the files it was read from."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from warpi.data.dataset import Dataset
from warpi.data.examples import Examples
from warpi.data.image_files import FileExamples
from warpi.data.split import Split
from warpi.utils.files import sha256

_LINKS = 2  # folders within the data that may be links: those of classes, and those of classes in `train`


def hashes(dataset: Dataset, meta_data: Dataset | None, other: Dataset | None) -> dict[str, str | None]:
    """Of what the runs of all seeds have in common; None where there is no such thing.

    Inputs in memory count with all they hold. Of image files that are read as they are needed it is the names and the
    sizes in bytes: what is in a million of them is not looked at, and times are those of a copy.
    """
    labels = [dataset.y, *(t for t in (dataset.clean, dataset.trusted) if t is not None)]
    trusted = _whole(meta_data) if meta_data else dataset.meta
    return {
        "inputs_sha256": dataset.examples.digest(),
        "files_sha256": sha256(_sizes(dataset.examples)) if isinstance(dataset.examples, FileExamples) else None,
        "labels_sha256": sha256(repr([t.dtype for t in labels]).encode(), *map(_bytes, labels)),
        "meta_sha256": _split(trusted),
        "test_set_sha256": _split(dataset.test),
        "other_sha256": _split(_whole(other)) if other else None,
    }


def file_sha256(file: str | None) -> str | None:
    """Of a file that labels, a matrix or weights come from: runs of two states of it are two experiments."""
    if not file:
        return None
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def stamp(place: str) -> str:
    """Of a file, or of all in a folder: how large, since when, and which file it is. Nothing is read.

    As long as it is the same, so is what is in them: no program sets the time of a change (ctime), and a file that is
    put in the place of another has another number (inode). Where it is not, what is in them has to be looked at.
    """
    content = hashlib.sha256()
    for file in _below(Path(place)):
        with suppress(OSError):  # it is gone
            found = os.stat(file)
            seen = (file, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
            content.update(repr(seen).encode())
    return content.hexdigest()


def _below(path: Path) -> Iterator[str]:
    """A file and the labels that may lie beside it, or all files of a folder."""
    if path.is_dir():
        return _walk(str(path), _LINKS)
    beside = [path.with_name(f"{path.stem}_labels.npy"), path.with_name("y.npy")] if path.suffix == ".npy" else []
    return map(str, (path, *beside))


def _walk(folder: str, links: int) -> Iterator[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=links > 0):
                yield from _walk(entry.path, links - 1)
            else:
                yield entry.path


def _whole(dataset: Dataset) -> Split:
    return Split(dataset.examples, torch.arange(len(dataset.y)), dataset.truth)


def _split(split: Split | None) -> str | None:
    if split is None:
        return None
    parts = [split.examples.digest().encode(), _bytes(split.rows), _bytes(split.y)]
    return sha256(*parts, _sizes(split.examples))


def _sizes(examples: Examples) -> bytes:
    """Of image files, in bytes; -1: it is not there. Nothing of inputs that are in memory."""
    if not isinstance(examples, FileExamples):
        return b""
    return repr([_size(os.path.join(examples.root, path)) for path in examples.paths]).encode()


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except (OSError, ValueError):  # ValueError: no name of a file
        return -1


def _bytes(t: Tensor) -> bytes:
    return t.cpu().contiguous().numpy().tobytes()
