"""Data sets by name, and the user's own by path."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpi.data.dataset import Dataset, NewInputs
from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import SMALL, FileExamples
from warpi.data.numeric import Features
from warpi.data.placeholder import PlaceholderExamples, are_image_files
from warpi.datasets.arrays import read_arrays, read_new_arrays
from warpi.datasets.cifar import cifar10, cifar100
from warpi.datasets.digits import digits
from warpi.datasets.image_folders import clothing1m, food101n, is_manifest, read_folder, read_manifest, read_new_images
from warpi.datasets.tables import read_new_table, read_table
from warpi.datasets.text_files import reading
from warpi.errors import UserError, unknown


@dataclass(frozen=True)
class Entry:
    """A reader, and the settings that suit what it reads (each can be overruled by a flag).

    Settings are fields of DataSpec and Recipe, and `CLASS.field` for the hyper-parameters of a method's class.
    """

    load: Callable[..., Dataset]  # of the folder of its files (or None) and, where `sized`, of `size`
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sized: bool = False  # image files, which can be read at any size


_SMALL = {
    "net": "mlp",
    "epochs": 30,
    "batch_size": 64,
    "meta_batch_size": 64,
    "lr": 0.05,
    "WarPI.output": "tanh",  # why: docs/methods/warpi.md
    "WarPI.label_input": "one_hot",
    "VRI.output": "tanh",
    "TruncatedGCE.start_prune": 1 / 3,  # why: docs/methods/gce_truncated.md
    "MLCWang.matrix_lr": 30.0,  # why: docs/methods/mlc_wang.md
    "TRevision.revision_lr": 1e-2,  # why: docs/methods/t_revision.md
    "PTD.revision_lr": 1e-2,
    "DMI.warmup": 0.2,  # why: docs/methods/dmi.md
    "DMINS.warmup": 0.2,
    "LCCN.warmup": 0.1,  # why: docs/methods/lccn.md
    "Masking.warmup": 0.1,
    "SModel.warmup": 0.1,
    "CoTeaching.gradual": 1.5,  # of 30 epochs: a network has learned a table after one
    "CoTeachingPlus.gradual": 1.5,
    "CoTeachingPlus.warm_up": 3.0,
    "JoCoR.gradual": 10.0,
    "PLC.warm_up": 1.0,
    "DivideMix.warm_up": 1.0,
    "DivideMix.ramp_up": 1.6,
}
_IN_EPOCHS = tuple(name for name in _SMALL if name.endswith((".gradual", ".warm_up", ".ramp_up")))
ENOUGH = 1000  # training rows of a table: of fewer, `finer` trains in smaller steps
WITH_FEW = "glc"  # what suits such a table with trusted examples: why, docs/data.md
_OF_FEW_CLASSES = ("TruncatedGCE.start_prune",)  # many are learned too late for that
_OF_TEN_CLASSES = {"DivideMix.lambda_u": 25.0}  # of a mean over classes, so less of fewer: docs/methods/dividemix.md
_SPARSE = {"epochs": 20, "weight_decay": 2e-3}  # why: docs/estimator.md
_FEW = 10_000  # small images from which on a network with convolutions pays: docs/data.md
_CIFAR = {"net": "resnet32", "epochs": 120, "batch_size": 100, "meta_batch_size": 100, "lr": 0.1, "meta": 1000}
_PHOTOS = {"net": "resnet50", "epochs": 10, "batch_size": 32, "meta_batch_size": 32, "lr": 0.01, "milestones": (0.5,)}

SUITED = frozenset({*_SMALL, *_CIFAR, *_PHOTOS, *_OF_TEN_CLASSES})
"""Settings whose default depends on the data."""

DATASETS: dict[str, Entry] = {
    "digits": Entry(
        digits, "1,797 handwritten digits, 8 x 8, 10 classes; ships with scikit-learn", {**_SMALL, "meta": 50}
    ),
    "cifar10": Entry(cifar10, "60,000 photos, 32 x 32, 10 classes; official files, CIFAR-N labels beside them", _CIFAR),
    "cifar100": Entry(
        cifar100, "60,000 photos, 32 x 32, 100 classes; official files, CIFAR-N labels beside them", _CIFAR
    ),
    "clothing1m": Entry(
        clothing1m, "1 million photos of clothes, 14 classes; published key files", _PHOTOS, sized=True
    ),
    "food101n": Entry(
        food101n, "Food-101N with the Food-101 test set, 101 classes; published lists", _PHOTOS, sized=True
    ),
}


def load_dataset(
    data: str,
    *,
    root: Path | None = None,
    label: str | None = None,
    drop: Sequence[str] = (),
    image_size: int | None = None,
    like: Dataset | None = None,
) -> tuple[Dataset, Mapping[str, Any]]:
    """A data set by name or path, and the settings that suit it.

    `root` is the folder of the files of a named data set or manifest, `label` the column (key, file) of the labels,
    `drop` are columns of a table that are no features, `image_size` is the side at which image files are read. `like`
    is the data set of a first file: this one shares its classes and is read in the same way.
    """
    if data in DATASETS:
        entry = DATASETS[data]
        if image_size is not None and not entry.sized:
            raise _no_size(data)
        if label is not None:
            raise UserError(f"{data} knows its own labels; --label is for tables, arrays and manifests")
        if drop:
            raise _no_columns(data)
        return entry.load(root, size=image_size) if entry.sized else entry.load(root), entry.defaults
    path = Path(data)
    with reading(data):
        found = bool(data) and path.exists()
    if not found:
        if path.suffix or "/" in data or os.sep in data:
            raise UserError(f"no file or folder {data!r}")
        raise UserError(f"{unknown('data set', data, DATASETS)}; nor is there a file or folder of that name")
    dataset = _read(path, root, label, drop, image_size, like)
    if dataset.n_classes < 2:
        raise UserError(f"{data}: every row has the label {dataset.classes[0]!r}; at least two classes are needed")
    shape, few = dataset.examples.shape, len(dataset.y) < _FEW
    return dataset, defaults_for((1,) if few and len(shape) == 3 and shape[-1] <= SMALL else shape, dataset.n_classes)


def read_new_inputs(data: str, first: Mapping[str, Any], examples: Examples, classes: tuple[str, ...]) -> NewInputs:
    """Inputs to be predicted, read as those of a run were.

    `first` are the settings of the run's data (data, root, label, drop), `examples` its inputs, of which only the form
    is looked at.
    """
    like = examples.like if isinstance(examples, PlaceholderExamples) else examples
    path, label = Path(data), first["label"]
    columns = like.columns if isinstance(like, Features) else None
    kind = _IMAGES if are_image_files(like) else _TABLE if columns else _ARRAYS
    got = _kind(os.path.abspath(data), first.get("drop", ()))  # no name of DATASETS
    if kind != got:
        raise UserError(f"{data}: got {got}, the run was trained on {kind}; give the same kind")
    if are_image_files(like):
        root = Path(first["root"]) if first["root"] and first["data"] not in DATASETS else None
        return read_new_images(path, like.shape[-1], classes, root=root, label=label)
    assert isinstance(like, TensorExamples)
    if columns:
        new = read_new_table(path, columns, classes)
        return new._replace(examples=new.examples.with_scale(like.scale))
    return read_new_arrays(path, None if str(label).endswith(".npy") else label, like, classes)


_TABLE, _IMAGES, _ARRAYS = "a table", "image files", "arrays (.npz, .npy)"


def has_images(data: str, drop: Sequence[str] = ()) -> bool:
    """Whether a path that may be there is one of image files. A list of paths that are dropped is a table."""
    path = Path(data)
    is_list = path.suffix.lower() in (".csv", ".tsv") and "path" not in map(str.lower, drop) and is_manifest(path)
    return path.is_dir() or is_list


def takes_size(data: str, drop: Sequence[str] = ()) -> bool:
    """Whether its images can be read at any size."""
    return DATASETS[data].sized if data in DATASETS else has_images(data, drop)


def _kind(data: str, drop: Sequence[str]) -> str:
    if takes_size(data, drop):
        return _IMAGES
    if data in DATASETS:
        return _ARRAYS
    suffix = Path(data).suffix.lower()
    if suffix in (".npz", ".npy"):
        return _ARRAYS
    if suffix in (".csv", ".tsv", ".parquet"):
        return _TABLE
    raise _unreadable(Path(data))


def _unreadable(path: Path) -> UserError:
    return UserError(f"cannot read {path}: allowed are .npz, .npy, .csv, .tsv, .parquet and folders of images")


def defaults_for(shape: tuple[int, ...], n_classes: int, *, sparse: bool = False) -> Mapping[str, Any]:
    """The settings that suit inputs of a shape, where nothing more is known of them but how many classes there are."""
    if sparse:
        return {**defaults_for(shape, n_classes), **_SPARSE}
    fewer = {key: value * n_classes / 10 for key, value in _OF_TEN_CLASSES.items() if n_classes < 10}
    if len(shape) == 1:
        return {k: v for k, v in _SMALL.items() if n_classes <= 20 or k not in _OF_FEW_CLASSES} | fewer
    return {**(_PHOTOS if shape[-1] > SMALL else {**_CIFAR, "net": "resnet18", "meta": None}), **fewer}


def finer(defaults: Mapping[str, Any], rows: int, settings: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """The settings of `defaults_for` for so many training rows: few are trained on as far, but in smaller steps.

    There are as many steps as ENOUGH rows would take, each in proportion smaller: epochs times learning rate stays.
    Whoever sets one of these two or another network (`settings` are those given) is left alone. Why: docs/data.md
    """
    given = settings or {}
    if given.get("net", defaults["net"]) != "mlp" or rows >= ENOUGH or "epochs" in given or "lr" in given:
        return defaults
    epochs = round(defaults["epochs"] * ENOUGH / max(rows, defaults["batch_size"]))
    more = epochs / defaults["epochs"]
    longer = {name: defaults[name] * more for name in _IN_EPOCHS}
    return {**defaults, **longer, "epochs": epochs, "lr": defaults["lr"] / more}


def _read(
    path: Path, root: Path | None, label: str | None, drop: Sequence[str], size: int | None, like: Dataset | None
) -> Dataset:
    suffix, classes = path.suffix.lower(), like.classes if like else None
    # Beside files that are read as they are needed, so are these: the crops are alike, and `overlap` can compare them.
    in_memory = False if like and isinstance(like.examples, FileExamples) else None
    side = like.examples.shape[-1] if size is None and like is not None and like.files is not None else size
    images = has_images(str(path), drop)
    if drop and like is None and (images or suffix in (".npz", ".npy")):  # what a second file is, is said by the first
        raise _no_columns(path)
    if path.is_dir():
        return read_folder(path, size=side, classes=classes, in_memory=in_memory)
    if images:
        return read_manifest(path, root=root, label=label, size=side, classes=classes, in_memory=in_memory)
    if size is not None:
        raise _no_size(path)
    match suffix:
        case ".npz":
            return read_arrays(path, label, like=like)
        case ".npy":  # its label is a file: that of the first, not of the second
            return read_arrays(path, None if like else label, like=like)
        case ".csv" | ".tsv" | ".parquet":
            return read_table(path, label, drop=drop, like=like)
    raise _unreadable(path)


def _no_size(data: object) -> UserError:
    return UserError(f"{data} cannot be read at another size; image_size is for image files, leave it out")


def _no_columns(data: object) -> UserError:
    listed = str(data).lower().endswith((".csv", ".tsv"))
    what = "is a list of images by its column 'path'" if listed else "is no table"
    table = ", or drop 'path' too to read it as a table" if listed else ""
    return UserError(f"{data} {what}; --drop is for tables (.csv, .tsv, .parquet): leave it out{table}")
