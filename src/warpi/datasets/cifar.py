"""CIFAR-10 and CIFAR-100 from their official files, and the human labels of CIFAR-N if they are in the same folder."""

import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.augment import Crop
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.split import Split
from warpi.datasets.arrays import load_arrays
from warpi.datasets.delimited_files import data_root, reading
from warpi.datasets.safe_pickle import safe_load
from warpi.errors import UserError

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Layout:
    """The files of one of the two published formats."""

    archive: str  # the file to download
    folder: str  # the folder that it contains
    names: str  # the file of class names
    suffix: str = ""  # of the image files


@dataclass(frozen=True)
class _Kind:
    """The differences between CIFAR-10 and CIFAR-100."""

    name: str
    train: tuple[str, ...]  # image files, without suffix
    test: str
    python: _Layout
    binary: _Layout
    labels: tuple[str, ...]  # keys of a python file, in the order of the label bytes of a binary record; classes last
    names: str  # key of the class names in the python meta file
    mean: tuple[float, float, float]  # of the training images, 0..255
    std: tuple[float, float, float]
    human: tuple[str, str]  # files of CIFAR-N
    label_sets: dict[str, str]  # key in such a file -> name of the label set


_CIFAR10 = _Kind(
    name="cifar10",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test="test_batch",
    python=_Layout("cifar-10-python.tar.gz", "cifar-10-batches-py", "batches.meta"),
    binary=_Layout("cifar-10-binary.tar.gz", "cifar-10-batches-bin", "batches.meta.txt", ".bin"),
    labels=("labels",),
    names="label_names",
    mean=(125.307, 122.950, 113.865),
    std=(62.993, 62.089, 66.705),
    human=("cifar10n.npz", "CIFAR-10_human.pt"),
    label_sets={name: name for name in ("worst", "aggre", "random1", "random2", "random3")}
    | {"worse_label": "worst", "aggre_label": "aggre"}
    | {f"random_label{i}": f"random{i}" for i in (1, 2, 3)},
)
_CIFAR100 = _Kind(
    name="cifar100",
    train=("train",),
    test="test",
    python=_Layout("cifar-100-python.tar.gz", "cifar-100-python", "meta"),
    binary=_Layout("cifar-100-binary.tar.gz", "cifar-100-binary", "fine_label_names.txt", ".bin"),
    labels=("coarse_labels", "fine_labels"),
    names="fine_label_names",
    mean=(129.304, 124.070, 112.434),
    std=(68.170, 65.392, 70.418),
    human=("cifar100n.npz", "CIFAR-100_human.pt"),
    label_sets={"noisy": "noisy", "noisy_label": "noisy", "fine": "noisy"},
)


def cifar10(root: Path | None = None) -> Dataset:
    """50,000 + 10,000 images of 10 classes. Label sets of CIFAR-10N: worst, aggre, random1, random2, random3.

    `root` contains cifar-10-batches-py (or cifar-10-batches-bin) or is that folder; None: the environment variable
    WARPI_DATA. CIFAR-N files are read from `root`, `root`/cifar-n, and the same two folders one level up.
    """
    return _read(_CIFAR10, root)


def cifar100(root: Path | None = None) -> Dataset:
    """50,000 + 10,000 images of 100 classes in 20 superclasses. Label set of CIFAR-100N: noisy (its fine labels).

    `root` is as in `cifar10`, with cifar-100-python or cifar-100-binary.
    """
    return _read(_CIFAR100, root)


def _read(kind: _Kind, root: Path | None) -> Dataset:
    root = data_root(root, kind.name, _how_to_get(kind))
    folder, layout = _folder(kind, root)
    files = [name + layout.suffix for name in (*kind.train, kind.test)]
    if missing := [name for name in (*files, layout.names) if not (folder / name).is_file()]:
        raise UserError(f"{folder} has no file {missing[0]!r}; unpack {layout.archive} again, in full")
    read = _read_python if layout is kind.python else _read_binary
    *train, (x_test, labels_test) = (read(folder / name, kind) for name in files)
    x, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    classes = _class_names(folder / layout.names, kind)

    y = torch.tensor(labels[:, -1])
    y_test = torch.tensor(labels_test[:, -1])
    superclass = None
    if kind.labels[0] == "coarse_labels":
        superclass = _superclass(np.concatenate([labels, labels_test]), len(classes), folder)
    return Dataset(
        name=kind.name,
        examples=_examples(x, kind),
        y=y,
        classes=classes,
        clean=y,
        test=Split(_examples(x_test, kind), torch.arange(len(x_test)), y_test),
        test_is_clean=True,
        superclass=superclass,
        label_sets=_human_labels(kind, root, y),
    )


def _how_to_get(kind: _Kind) -> str:
    return (
        f"download {kind.python.archive} (or {kind.binary.archive}), unpack it, and set --root (or WARPI_DATA) to the "
        f"folder that contains {kind.python.folder}"
    )


def _folder(kind: _Kind, root: Path) -> tuple[Path, _Layout]:
    """The folder of the files and their format. The python format has priority."""
    with reading(root):
        for layout in (kind.python, kind.binary):
            for folder in (root / layout.folder, root):
                if any((folder / (name + layout.suffix)).is_file() for name in kind.train):
                    return folder, layout
    raise UserError(f"{kind.name} is not in {root}: {_how_to_get(kind)}")


def _read_python(path: Path, kind: _Kind) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A pickled dict -> images [N, 3072], labels [N, 1 or 2]."""
    record = safe_load(path)
    data = record.get("data") if isinstance(record, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (_PIXELS,):
        raise UserError(f"{path}: no uint8 array 'data' of rows of {_PIXELS} pixels; is this a file of {kind.name}?")
    columns = [_check_labels(record.get(key), f"{path}: {key!r}") for key in kind.labels]
    for key, column in zip(kind.labels, columns, strict=True):
        if len(column) != len(data):
            raise UserError(f"{path}: {len(column)} labels under {key!r} for {len(data)} images; download it again")
    return data, np.stack(columns, axis=1)


def _read_binary(path: Path, kind: _Kind) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Records of label bytes and pixels -> images [N, 3072], labels [N, 1 or 2]."""
    with reading(path):
        records = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    size = len(kind.labels) + _PIXELS
    if len(records) % size or not len(records):
        raise UserError(f"{path}: {len(records)} bytes are not a multiple of the record size {size}; download it again")
    records = records.reshape(-1, size)
    return records[:, len(kind.labels) :], records[:, : len(kind.labels)].astype(np.int64)


def _class_names(path: Path, kind: _Kind) -> tuple[str, ...]:
    if path.suffix == ".txt":
        with reading(path):
            names: Any = path.read_text(encoding="utf-8").split()
    else:
        meta = safe_load(path)
        names = meta.get(kind.names) if isinstance(meta, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: no class names; is this a file of {kind.name}?")
    return tuple(names)


def _examples(x: NDArray[np.uint8], kind: _Kind) -> TensorExamples:
    images = torch.from_numpy(np.ascontiguousarray(x)).view(-1, 3, 32, 32)  # [N, 3, 32, 32]
    scale = Scale(torch.tensor(kind.mean).view(3, 1, 1), torch.tensor(kind.std).view(3, 1, 1))
    return TensorExamples(images, scale, Crop(size=32, pad=4))


def _superclass(labels: NDArray[np.int64], n_classes: int, folder: Path) -> Tensor | None:
    """labels [N, 2] of (coarse, fine) -> [K]. None if a class has no example, as in a small sample."""
    pairs = np.unique(labels[:, ::-1], axis=0)  # [>= K, 2] of (fine, coarse)
    fine, count = np.unique(pairs[:, 0], return_counts=True)
    if (count > 1).any():
        raise UserError(f"{folder}: class {fine[count > 1][0]} has more than one superclass; download the files again")
    return torch.tensor(pairs[:, 1]) if np.array_equal(fine, np.arange(n_classes)) else None


def _human_labels(kind: _Kind, root: Path, y: Tensor) -> dict[str, Tensor]:
    """The label sets of CIFAR-N by the names in `kind.label_sets`; empty if the file does not exist."""
    label_sets: dict[str, Tensor] = {}
    names = kind.label_sets | {"clean": "clean", "clean_label": "clean"}
    for path in _human_files(kind, root):
        arrays = load_arrays(path) if path.suffix == ".npz" else _read_torch_file(path)
        if not isinstance(arrays, dict):
            raise UserError(f"{path} contains a {type(arrays).__name__}, not a dict of label arrays; download it again")
        keys = [key for key in arrays if key in names]  # the others are e.g. superclass labels
        if not keys:
            raise UserError(f"{path} has no {kind.name} labels: got {sorted(map(str, arrays))}, not {sorted(names)}")
        for key in keys:
            name = names[key]
            labels = torch.from_numpy(_check_labels(arrays[key], f"{path}: {key!r}"))
            if len(labels) != len(y):
                raise UserError(f"{path}: {len(labels)} labels under {key!r} for {len(y)} images of {kind.name}")
            expected = y if name == "clean" else label_sets.setdefault(name, labels)
            if (differ := (labels != expected).nonzero()).numel():
                other = "the official labels" if name == "clean" else f"another file's {name!r}"
                row = int(differ[0])
                raise UserError(
                    f"{path}: {key!r} differs from {other} in {len(differ)} rows, first in row {row} "
                    f"({int(labels[row])}, not {int(expected[row])}); it belongs to other images or to another order"
                )
    return label_sets


def _human_files(kind: _Kind, root: Path) -> Iterator[Path]:
    root = root.resolve()
    folders = [root, root / "cifar-n", root.parent, root.parent / "cifar-n"]
    for name in kind.human:
        yield from [folder / name for folder in folders if (folder / name).is_file()][:1]


def _read_torch_file(path: Path) -> Any:
    """An object written by torch.save: a pickle in a zip file, or (before torch 1.6) the fourth pickle."""
    with reading(path), path.open("rb") as file:
        if zipfile.is_zipfile(file):
            return safe_load(_unzip(file, path), str(path))
        file.seek(0)
        return [safe_load(file) for _ in range(4)][-1]


def _unzip(file: IO[bytes], path: Path) -> IO[bytes]:
    try:
        with zipfile.ZipFile(file) as archive:
            inner = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
            if inner is None:
                raise UserError(f"{path}: not written by torch.save (it contains no data.pkl); download it again")
            return io.BytesIO(archive.read(inner))
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as e:
        raise UserError(f"{path}: a damaged zip file ({e}); download it again") from e


def _check_labels(values: Sequence[int] | NDArray[Any] | None, what: str) -> NDArray[np.int64]:
    """Labels as int64 [N]."""
    array = np.asarray([] if values is None else values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise UserError(f"{what} is not a list of integers; download the file again")
    return array.astype(np.int64)
