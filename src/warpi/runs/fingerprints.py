"""Fingerprints of a run's data: content hashes, and a cheap stamp of the source files."""

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
from warpi.data.numeric import Embedded
from warpi.data.split import Split
from warpi.utils.files import file_size, sha256
from warpi.utils.limits import check_regular

_LINKED_LEVELS = 2  # levels of folders that may be links: `train`, and the folders of classes in it


def fingerprint_data(dataset: Dataset, trusted: Dataset | None, open_set: Dataset | None) -> dict[str, str | None]:
    """Hashes of the data that runs with all seeds share. None: the data has no such part.

    Inputs in memory are hashed completely. Image files that are read on demand are identified by their names and
    sizes in bytes, because reading a million files would take too long, and copying a file changes its times.
    """
    labels = [dataset.y, *(t for t in (dataset.clean, dataset.trusted, _earlier_labels(dataset)) if t is not None)]
    if trusted is not None:
        trusted_hash = _fingerprint_split(_all_rows(trusted), _earlier_labels(trusted))
    else:
        trusted_hash = _fingerprint_split(dataset.meta)
    in_files = isinstance(dataset.examples, FileExamples)
    embedder = dataset.examples.embedder if isinstance(dataset.examples, Embedded) else None
    return {
        **({"embedder": embedder["name"], "embedder_sha256": embedder["sha256"]} if embedder else {}),
        "inputs_sha256": dataset.examples.digest(),
        "files_sha256": sha256(_file_sizes(dataset.examples)) if in_files else None,
        "labels_sha256": sha256(repr([t.dtype for t in labels]).encode(), *map(_bytes, labels)),
        "meta_sha256": trusted_hash,
        "test_set_sha256": _fingerprint_split(dataset.test),
        "other_sha256": _fingerprint_split(_all_rows(open_set)) if open_set else None,
    }


def fingerprint_rows(rows: Tensor) -> str:
    """The hash of the row numbers of a split."""
    return sha256(_bytes(rows))


def file_sha256(file: str | None) -> str | None:
    """The hash of a file with labels, a matrix or weights; None if `file` is None."""
    if not file:
        return None
    check_regular(file)
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def stamp(path: str) -> str:
    """A stamp of a file, or of all files in a folder: sizes, modification times and inodes. No file is opened.

    If the stamp is the same, so is the content: programs cannot set the time of the last change (ctime), and a file
    that replaces another one has a different inode. If the stamp differs, compare the content.
    """
    content = hashlib.sha256()
    for file in _files_at(Path(path)):
        with suppress(OSError):  # the file was deleted
            status = os.stat(file)
            facts = (file, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            content.update(repr(facts).encode())
    return content.hexdigest()


def _files_at(path: Path) -> Iterator[str]:
    """All files in a folder, or a file and the label files that belong to it."""
    if path.is_dir():
        return _walk(str(path), _LINKED_LEVELS)
    if path.suffix != ".npy":
        return iter([str(path)])
    others = ("_labels.npy", "_clean.npy", "_trusted.npy", "_table.json")
    return map(str, (path, *(path.with_name(path.stem + other) for other in others), path.with_name("y.npy")))


def _walk(folder: str, linked_levels: int) -> Iterator[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=linked_levels > 0):
                yield from _walk(entry.path, linked_levels - 1)
            else:
                yield entry.path


def _all_rows(dataset: Dataset) -> Split:
    return Split(dataset.examples, torch.arange(len(dataset.y)), dataset.truth)


def _earlier_labels(dataset: Dataset) -> Tensor | None:
    """Labels before a check that do not follow from the other labels. Runs without them keep their fingerprints."""
    given = dataset.given
    if given is not None and dataset.clean is not None:
        given = torch.where(dataset.clean >= 0, -1, given)
    return given if given is not None and bool((given >= 0).any()) else None


def _fingerprint_split(split: Split | None, given: Tensor | None = None) -> str | None:
    if split is None:
        return None
    parts = [split.examples.digest().encode(), _bytes(split.rows), _bytes(split.y)]
    return sha256(*parts, _file_sizes(split.examples), b"" if given is None else _bytes(given))


def _file_sizes(examples: Examples) -> bytes:
    """The sizes of image files in bytes, -1 for a missing one; empty for inputs in memory."""
    if not isinstance(examples, FileExamples):
        return b""
    return repr([file_size(os.path.join(examples.root, path)) for path in examples.paths]).encode()


def _bytes(t: Tensor) -> bytes:
    return t.cpu().contiguous().numpy().tobytes()
