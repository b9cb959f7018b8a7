"""Defaults that depend on the data: the method, recipes for tables, small images and photos, settings of methods.

`warpi fit` and `NoisyLabelClassifier` share them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from warpi.data.dataset import Dataset
from warpi.data.examples import Examples
from warpi.data.image_files import SMALL
from warpi.data.mapped import MOST_ROWS, MappedExamples
from warpi.data.sparse import SparseExamples
from warpi.datasets.load import read_dataset
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError, unknown
from warpi.methods.registry import METHODS
from warpi.nets.registry import VECTOR_NETS
from warpi.training.method import Method
from warpi.training.named_recipes import STRONG, is_strong
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils import distributed

_TABLE = {"net": "mlp", "epochs": 30, "batch_size": 64, "meta_batch_size": 64, "lr": 0.05}
_SPARSE = {"epochs": 20, "weight_decay": 2e-3}  # docs/estimator.md explains why
_LINEAR = {"epochs": 30, "batch_size": 256, "lr": 0.003, "weight_decay": 0.1}  # benchmarks/tables/linear_settings.py
_LINEAR_ROWS = 4000
_CIFAR = {"net": "resnet32", "epochs": 120, "batch_size": 100, "meta_batch_size": 100, "lr": 0.1, "meta": 1000}
_DIGITS = {  # a benchmark keeps the settings of its published results
    "WarPI.v_start": None,
    "WarPI.log_var_init": None,
    "WarPI.trusted_weight": 0.0,
    "WarPI.meta_lr": 3e-4,
}
_PHOTOS = {"net": "resnet50", "epochs": 10, "batch_size": 32, "meta_batch_size": 32, "lr": 0.01, "milestones": (0.5,)}
_CONVOLUTIONS_PAY = 10_000  # with fewer small images, an MLP is better (docs/data.md)
_IN_EPOCHS = (".gradual", ".warm_up", ".ramp_up")  # settings of methods that count epochs

_BENCHMARK_SPLIT = {"val": 0.1, "test": 0.25}
_NETWORK_SETTINGS = frozenset(f.name for f in fields(Recipe)) - {"seed"}

DEFAULT_METHOD = "auto"
ENOUGH_ROWS = 1000
"""With fewer training rows in a table, `adjust_for_few_rows` takes more and smaller steps."""


class ChosenMethod(NamedTuple):
    """The method of a run if the user names none, the reason, and settings of the recipe that belong to it."""

    name: str
    reason: str
    recipe: Mapping[str, Any] = MappingProxyType({})


def default_method(
    task: Task, settings: Mapping[str, Any], data: str = "", device: torch.device | None = None
) -> ChosenMethod:
    """Choose the method for a task if the user names none. `settings` are those of the recipe and of the method.

    A network is chosen if settings of its training, such as `epochs`, are set, for images on a GPU, and for millions of
    rows in a file, because `auto` needs the rows in memory. On a CPU, training a network on images takes long, so
    `auto` works on features of the images. Small images on a GPU get the strong recipe, unless the settings contain
    another network, schedule or augmentation; on a CPU only if the settings are those of that recipe. `data` is the
    name or path of the data: built-in data sets are benchmarks, which may have few rows on purpose. `device` is the
    device on which the method is trained.
    """
    asked = sorted(_NETWORK_SETTINGS & {name for name, value in settings.items() if value is not None})
    is_table = len(task.shape) == 1
    trains_on_cpu = (device or task.train.examples.device).type == "cpu"
    if len(task.shape) == 3 and task.shape[-1] <= SMALL and is_strong(settings, if_missing=not trains_on_cpu):
        where = " on a GPU" if not trains_on_cpu else ""
        return ChosenMethod("warpi_plus", f"the default for small images{where}, with --recipe strong", STRONG)
    is_large = isinstance(task.train.examples, MappedExamples) and len(task.train) > MOST_ROWS
    if not asked and not is_large and (is_table or trains_on_cpu):
        images = "on features of the images, since there is no GPU to train a network"
        return ChosenMethod("auto", "the default for tables and feature vectors" if is_table else images)
    reason = f"the default for {'millions of rows in a file' if is_large else 'images'}"
    if asked:
        reason = f"chosen because {asked[0]} is set for a network"
    if task.meta is None:
        return ChosenMethod("elr", f"{reason}, and needs no trusted examples")
    is_sparse = isinstance(task.train.examples, SparseExamples)
    if is_sparse or (is_table and len(task.train) < ENOUGH_ROWS and data not in DATASETS):
        return ChosenMethod("glc", f"{reason}, and suits few rows")
    return ChosenMethod("warpi", reason)


def default_split(data: str) -> Mapping[str, float]:
    """The fractions `val` and `test` to hold out if the user does not set them. They are zero for a user's data."""
    return _BENCHMARK_SPLIT if data in DATASETS else dict.fromkeys(_BENCHMARK_SPLIT, 0.0)


def _method_defaults(table: bool, n_classes: int) -> dict[str, Any]:
    """Settings of all methods that suit the data better than the paper's, as `CLASS.field`."""
    return {
        f"{cls.__name__}.{name}": value
        for cls in _CLASSES
        for name, value in cls.data_defaults(table, n_classes).items()
    }


_CLASSES = tuple(dict.fromkeys(type(method) for method in METHODS.values()))  # those of warpi: no plugin is loaded yet
BY_DATASET: dict[str, Mapping[str, Any]] = {
    "digits": {**_TABLE, **_method_defaults(True, 10), **_DIGITS, "meta": 50},
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "clothing1m": _PHOTOS,
    "food101n": _PHOTOS,
    "mini_webvision": _PHOTOS,
    "animal10n": {**_CIFAR, "net": "resnet18", "meta": None},
}
DATA_DEPENDENT = frozenset({*_TABLE, *_LINEAR, *_CIFAR, *_PHOTOS, *_method_defaults(True, 2)})
"""Settings whose default depends on the data."""


def load_dataset(data: Any, **options: Any) -> tuple[Dataset, Mapping[str, Any]]:
    """Read a data set by name or path, or a Dataset of Hugging Face; return it with the default settings that suit it.

    The options are those of `warpi.datasets.load.read_dataset`: root, label, drop, image_size, like. The settings are
    fields of DataSpec and Recipe, and `CLASS.field` for hyper-parameters of a method's class.
    """
    dataset = read_dataset(data, **options)
    return dataset, defaults_of(data if isinstance(data, str) else "", dataset)


def defaults_of(data: str, dataset: Dataset) -> Mapping[str, Any]:
    """Default settings for a data set that was read from `data`, a name or a path, for any number of rows."""
    return _defaults_of(data, dataset.examples, len(dataset.y), dataset.n_classes, {})


def defaults_of_task(task: Task, settings: Mapping[str, Any], data: str = "") -> Mapping[str, Any]:
    """Default settings for a task. `settings` are the user's, `data` is the name or path of the data."""
    defaults = _defaults_of(data, task.train.examples, len(task.train), task.n_classes, settings)
    return defaults if data in DATASETS else adjust_for_few_rows(defaults, len(task.train), settings)


def _defaults_of(
    data: str, examples: Examples, n_rows: int, n_classes: int, settings: Mapping[str, Any]
) -> Mapping[str, Any]:
    if settings.get("net") == "linear":
        return {**_defaults_of(data, examples, n_rows, n_classes, {}), **_LINEAR}
    if data in DATASETS:
        return BY_DATASET.get(data, {})
    shape = examples.shape
    small_images = len(shape) == 3 and shape[-1] <= SMALL
    if settings.get("net") in VECTOR_NETS or (small_images and n_rows < _CONVOLUTIONS_PAY):
        shape = (1,)
    return defaults_for(shape, n_classes, sparse=isinstance(examples, SparseExamples))


def defaults_for(shape: tuple[int, ...], n_classes: int, *, sparse: bool = False) -> Mapping[str, Any]:
    """Default settings for inputs of a shape, if nothing else but the number of classes is known."""
    if sparse:
        return {**defaults_for(shape, n_classes), **_SPARSE}
    table = len(shape) == 1
    if table:
        recipe: dict[str, Any] = _TABLE
    else:
        recipe = _PHOTOS if shape[-1] > SMALL else {**_CIFAR, "net": "resnet18", "meta": None}
    return {**recipe, **_method_defaults(table, n_classes)}


def adjust_for_few_rows(
    defaults: Mapping[str, Any], rows: int, settings: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Adjust the defaults for a small training set: the same total learning-rate budget, in more and smaller steps.

    There are as many steps as for ENOUGH_ROWS rows, and epochs times learning rate stays the same. Nothing changes if
    the user's `settings` contain one of these two or another network. docs/data.md explains why.
    """
    given = settings or {}
    net = given.get("net", defaults["net"])
    if net == "linear" and "epochs" not in given:  # as many steps as in the measurement of its settings
        epochs = defaults["epochs"] * _LINEAR_ROWS / max(rows, defaults["batch_size"])
        return {**defaults, "epochs": max(round(epochs), defaults["epochs"])}
    is_mlp = net in ("mlp", "mlp_plain")
    if not is_mlp or rows >= ENOUGH_ROWS or "epochs" in given or "lr" in given:
        return defaults
    epochs = round(defaults["epochs"] * ENOUGH_ROWS / max(rows, defaults["batch_size"]))
    factor = epochs / defaults["epochs"]
    longer = {name: value * factor for name, value in defaults.items() if name.endswith(_IN_EPOCHS)}
    return {**defaults, **longer, "epochs": epochs, "lr": defaults["lr"] / factor}


def resolve_defaults(
    base: Method, defaults: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Recipe, dict[str, Any], dict[str, Any]]:
    """The recipe, all hyper-parameters of the method, and those that the user changed from their defaults."""
    recipe_fields = {f.name for f in fields(Recipe)}
    is_table = defaults.get("net") == _TABLE["net"] and defaults not in BY_DATASET.values()  # not a benchmark
    net = {"net": base.table_net} if is_table else {}
    values = {**defaults, **net, **base.recipe_defaults, **settings}
    recipe = Recipe(**{name: value for name, value in values.items() if name in recipe_fields})
    options = asdict(base)
    if type(base) in _CLASSES:  # a custom class may have the name of a built-in one
        prefix = type(base).__name__ + "."
        papers = asdict(type(base)())
        for key, value in defaults.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and options[name] == papers[name]:  # a variant keeps the values that it sets
                options[name] = value
    changed = {name: value for name, value in settings.items() if name in options and value != options[name]}
    return recipe, options | changed, changed


def scale_to_ranks(recipe: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the batch sizes and the learning rate from one rank to all ranks. Returns those that are in `values`.

    The rate is multiplied by the number of ranks with sgd (Goyal et al., Accurate, Large Minibatch SGD, 2017), and by
    its square root with adam.
    """
    n = distributed.n_ranks()
    factors = {"batch_size": n, "meta_batch_size": n, "lr": n if recipe["optimizer"] == "sgd" else math.sqrt(n)}
    return {name: factor * values[name] for name, factor in factors.items() if name in values}


def resolve_method(method: str | Method) -> tuple[str, Method]:
    """The name of a method and the instance with its defaults."""
    if isinstance(method, str):
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        return method, METHODS[method]
    check_is_method(method, "method", "a name from `warpi list methods` or a warpi.Method")
    for name, default in METHODS.items():
        if type(default) is type(method):
            return name, default
    try:
        return type(method).__name__, type(method)()
    except TypeError as e:
        raise UserError(
            f"the method {type(method).__name__} cannot be created without arguments ({e}); make it a @dataclass whose "
            "fields, its hyper-parameters, all have defaults"
        ) from e


def check_is_method(method: object, what: str, allowed: str = "a warpi.Method") -> None:
    """Raise if an object is not a Method. `what` names it in the message."""
    if isinstance(method, type) and issubclass(method, Method):
        raise UserError(f"{what} is the class {method.__name__}, but an instance is needed; use {method.__name__}()")
    if not isinstance(method, Method):
        kind = f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
        raise UserError(f"{what} must be {allowed}, got {kind}; derive your class from warpi.Method and define `step`")


def to_plain_types(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to the types of flags: paths to strings, lists to tuples, NumPy numbers to Python numbers."""

    def convert(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, np.generic):
            return value.item()
        return tuple(map(convert, value)) if isinstance(value, list | tuple) else value

    return {name: convert(value) for name, value in settings.items()}
