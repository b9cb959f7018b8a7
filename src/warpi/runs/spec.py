"""Checked settings: `DataSpec` says what to learn from, `RunSpec` contains everything that determines the results."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch

from warpi.data.dataset import Dataset
from warpi.data.image_files import PHOTO
from warpi.datasets.columns.encode import TableOptions
from warpi.datasets.hugging_face.saved import plain_path
from warpi.datasets.load import is_resizable, read_dataset
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError, format_count, unknown
from warpi.methods.old_names import use_current_names
from warpi.methods.registry import METHODS, explain_unknown_setting
from warpi.noise.parse import Noise
from warpi.runs.defaults import (
    BY_DATASET,
    DEFAULT_METHOD,
    default_method,
    default_split,
    defaults_of_task,
    resolve_defaults,
    resolve_method,
    to_plain_types,
)
from warpi.runs.fingerprints import fingerprint_data, fingerprint_rows, stamp
from warpi.runs.schema import ADDED, DataSettings
from warpi.training.method import Method
from warpi.training.named_recipes import STRONG, epochs_on_cpu, is_strong
from warpi.training.recipe import ADDED_FIELDS, Recipe
from warpi.training.task import Task, Truth, make_task
from warpi.utils.seeding import derive, seeded
from warpi.utils.settings import check_types


class DataCache:
    """Data sets that several runs share. Each is read once and copied to a device once. Nothing changes it in place."""

    def __init__(self) -> None:
        self.read = lru_cache(maxsize=4)(read_dataset)
        self.stamp = lru_cache(maxsize=None)(stamp)  # of the files as they were when they were read


@dataclass(frozen=True)
class DataSpec(DataSettings):
    """What to learn from, and how to read it."""

    def __post_init__(self) -> None:
        check_types(self)
        self.table_options.kinds()
        for name in ("data", "meta_data"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, plain_path(value))

    @property
    def table_options(self) -> TableOptions:
        return TableOptions(self.types, self.text, self.missing, self.unknown)

    @property
    def paths(self) -> tuple[str, ...]:
        """The user's existing files and folders from which the data is read."""
        noise = Noise.parse(self.noise)
        open_set = noise.other_name if noise.kind == "open_set" else None
        names = (self.data, self.label, self.meta_data, open_set)
        return tuple(name for name in names if name and name not in DATASETS and os.path.exists(name))

    def stamps(self, cache: DataCache | None = None) -> dict[str, str]:
        """Stamps that show whether the files have changed. Take them before reading."""
        take = cache.stamp if cache else stamp
        return {path: take(path) for path in self.paths}

    def read(self, cache: DataCache | None = None) -> Dataset:
        """The data set alone, without trusted examples from a second file."""
        read = cache.read if cache else read_dataset
        root = Path(self.root) if self.root else None
        return read(
            self.data,
            root=root,
            image_size=self.image_size,
            label=self.label,
            drop=self.drop,
            options=self.table_options,
        )


@dataclass(frozen=True)
class LoadedData:
    """Everything that a run reads, and what identifies it."""

    dataset: Dataset
    trusted: Dataset | None  # from a second file
    open_set: Dataset | None  # other inputs, from which open-set noise draws
    fingerprints: Mapping[str, str | None]  # of the data as it was read
    stamps: Mapping[str, str]  # of the files from which it was read


def load(data: DataSpec, cache: DataCache | None = None) -> LoadedData:
    """Read everything that a run learns from."""
    stamps = data.stamps(cache)
    read = cache.read if cache else read_dataset
    root = Path(data.root) if data.root else None
    dataset = data.read(cache)
    side = data.image_size or unusual_size(dataset)

    def read_second(name: str, **options: Any) -> Dataset:
        size = side if is_resizable(name, options.get("drop", ())) else None
        return read(name, root=root, image_size=size, **options)

    trusted = open_set = None
    if data.meta_data:
        trusted = read_second(
            data.meta_data, label=data.label, drop=data.drop, like=dataset, options=data.table_options
        )
    if other_name := Noise.parse(data.noise).other_name:
        open_set = read_second(other_name)
    return LoadedData(dataset, trusted, open_set, fingerprint_data(dataset, trusted, open_set), stamps)


def unusual_size(dataset: Dataset) -> int | None:
    """The side at which image files were read, as `spec.json` stores it. None stands for the usual size of photos."""
    shape = dataset.examples.shape
    side = shape[-1] if dataset.files is not None and len(shape) == 3 else PHOTO
    return None if side == PHOTO else side


@dataclass(frozen=True)
class RunSpec:
    """Everything that determines the results of a run. `prepare` sets the defaults that depend on the data."""

    data: DataSpec
    method: str  # its name
    base: Method  # the instance with its defaults
    given: Mapping[str, Any]  # settings of the recipe and of the method that the user set
    recipe: Recipe
    options: Mapping[str, Any]  # all hyper-parameters of the method
    changed: Mapping[str, Any]  # those that the user set to other values than their defaults; reports print them
    names_method: bool = True  # False: `prepare` chooses the method by the data

    @classmethod
    def from_settings(cls, method: str | Method | None, **settings: Any) -> Self:
        """Check settings before any file is read.

        Settings are fields of DataSpec, of Recipe and of the method. A method is a name in METHODS or a custom Method,
        whose hyper-parameters then count as settings. If it is None, settings of `auto` are allowed.
        """
        name, base = resolve_method(method or DEFAULT_METHOD)
        custom = asdict(method) if isinstance(method, Method) else {}
        settings = to_plain_types({**custom, **use_current_names(name, settings)})
        names = [{f.name for f in fields(kind)} for kind in (DataSpec, Recipe, base)]
        for key in settings:
            if not any(key in group for group in names):
                error = explain_unknown_setting(f"setting {key!r}", name, key)
                raise error or unknown("setting", key, set().union(*names))
        data = DataSpec(**{key: value for key, value in settings.items() if key in names[0]})
        given = {key: value for key, value in settings.items() if key not in names[0]}
        model = given.get("model")
        if not isinstance(model, str | None):
            raise UserError(
                f"a run folder cannot store the model {type(model).__name__}; use NoisyLabelClassifier(model=...), or "
                "the name of a model: forest, boosting, logistic, kernel, knn"
            )
        names_method = method is not None or bool(given.keys() & names[2])
        data = replace(data, noise=str(Noise.parse(data.noise)))
        return cls(data, name, base, given, Recipe(), {}, {}, names_method).with_defaults({})

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], method: Method | None = None, **settings: Any) -> Self:
        """Restore what `to_json` wrote. `settings` replace stored values. Custom networks are not stored."""
        absent = later_options(stored) if method is None else {}
        return cls.from_settings(method or stored["method"], **{**absent, **flatten(stored), **settings})

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """This specification with the given defaults for settings that the user did not set."""
        recipe, options, changed = resolve_defaults(self.base, defaults, self.given)
        replace(self.base, **options)  # checks the values
        return replace(self, recipe=recipe, options=options, changed=changed)

    def make_method(self) -> Method:
        return replace(self.base, **self.options)

    def to_json(self) -> dict[str, Any]:
        recipe = self.recipe.stored()
        net = recipe["net"]
        if not isinstance(net, str):
            kind = net if hasattr(net, "__qualname__") else type(net)
            recipe["net"] = f"{kind.__module__}.{kind.__qualname__}"
        seed = recipe.pop("seed")
        data = asdict(self.data)
        for f in fields(DataSpec):
            if f.name in ADDED and data[f.name] == f.default:
                del data[f.name]
        return {
            **data,
            "method": self.method,
            "options": dict(self.options),
            "changed": dict(self.changed),
            "recipe": recipe,
            "seed": seed,
        }


def later_options(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the method that are missing in a specification of an older version, with the paper's values."""
    method = METHODS.get(stored["method"])
    known = {f.name: f.default for f in fields(method) if f.default is not MISSING} if method else {}
    return {name: value for name, value in known.items() if name not in stored["options"]}


def flatten(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored specification in one mapping: data, recipe, seed and hyper-parameters."""
    data = {f.name: stored.get(f.name, f.default) for f in fields(DataSpec)}
    later = {f.name: f.default for f in fields(Recipe) if f.name in ADDED_FIELDS}  # older runs did not have these
    return to_plain_types({**later, **stored["options"], **stored["recipe"], "seed": stored["seed"], **data})


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start: its full specification, its data and its task."""

    spec: RunSpec
    data: LoadedData
    task: Task
    truth: Truth
    reason: str = ""  # why this method was chosen; empty if the user named one
    is_shortened: bool = False  # the strong recipe has fewer epochs on a CPU

    def to(self, device: torch.device) -> Self:
        return replace(self, task=self.task.to(device), truth=self.truth.to(device))

    def with_recipe(self, **values: Any) -> Self:
        """The same run with other values in its recipe."""
        return replace(self, spec=replace(self.spec, recipe=replace(self.spec.recipe, **values)))

    def start(self) -> Method:
        """Create the method with its initial state. Call this in the context of `seed`."""
        method = self.spec.make_method()
        method.start(self.task, self.spec.recipe)
        return method

    def seed(self) -> AbstractContextManager[None]:
        """Context manager: the global random state with which a training starts."""
        return seeded(derive(self.spec.recipe.seed, "training"))

    def facts(self) -> dict[str, Any]:
        """Facts about the data and the task, the same for all methods (see `runs.stored_facts`)."""
        splits = {"train": self.task.train, "meta": self.task.meta, "val": self.task.val, "test": self.truth.test}
        return {
            **{f"n_{name}": len(split) if split else 0 for name, split in splits.items()},
            "n_classes": self.task.n_classes,
            **self.data.fingerprints,
            "noise_sha256": self.truth.noise_hash,
            "test_sha256": fingerprint_rows(self.truth.test.rows) if self.truth.test else None,
            "wrong_share": self.task.noise_rate,
            "test_labels": "clean" if self.truth.test_is_clean else "given",
        }

    def summarize(self) -> str:
        """One line: the data, its rows and classes, the method and the network."""
        spec, task = self.spec, self.task
        splits = {"noisy": task.train, "trusted": task.meta, "validation": task.val, "test": self.truth.test}
        rows = ", ".join(f"{len(split):,} {name}" for name, split in splits.items() if split)
        wrong = "" if task.noise_rate is None else f" ({100 * task.noise_rate:.1f} % wrong)"
        inputs = "inputs of " + " x ".join(map(str, task.shape))
        if len(task.shape) == 1:
            inputs = format_count(task.shape[0], "feature")
        elif len(task.shape) == 3:
            inputs = f"images of {task.shape[1]} x {task.shape[2]} pixels"
        epochs = format_count(spec.recipe.epochs, "epoch")
        work = f"{spec.method} trains {spec.to_json()['recipe']['net']} for {epochs}"
        if not spec.base.trains_network:
            work = f"{spec.method} compares models"
        if self.is_shortened:
            work += f" instead of {STRONG['epochs']}, because there is no GPU"
        notes = ["--epochs N sets another number"] if self.is_shortened else []
        notes += [f"{self.reason}; --method NAME sets another"] if self.reason else []
        if notes:
            work += f" ({'; '.join(notes)})"
        noise = "" if spec.data.noise == "given" else f", noise {spec.data.noise}"
        return f"{spec.data.data}{noise}{wrong}: {rows} rows; {task.n_classes} classes, {inputs}; {work}"


def files_to_hash(spec: RunSpec) -> dict[str, str | None]:
    """The files of a run that are identified by their content, by the name of the fact with their hash."""
    matrix = spec.options.get("matrix")
    weights = spec.recipe.weights
    return {
        "noise_file_sha256": Noise.parse(spec.data.noise).file,
        "matrix_file_sha256": matrix if isinstance(matrix, str) else None,  # otherwise it is the numbers themselves
        "weights_sha256": None if weights == "torchvision" else weights,
    }


def prepare(spec: RunSpec, cache: DataCache | None = None, device: torch.device | None = None) -> PreparedRun:
    """Read the data of a run, make its task, and set the defaults that suit the data and the device."""
    loaded = load(spec.data, cache)
    data = spec.data
    split = default_split(data.data)
    val = split["val"] if data.val is None else data.val
    test = split["test"] if data.test is None else data.test
    data = replace(data, val=val, test=test)
    if data.image_size is None:
        data = replace(data, image_size=unusual_size(loaded.dataset))
    if data.meta is None and loaded.trusted is None:
        data = replace(data, meta=BY_DATASET.get(data.data, {}).get("meta"))
    task, truth = make_task(
        loaded.dataset,
        Noise.parse(data.noise),
        meta=data.meta,
        val=val,
        test=test,
        limit=data.limit,
        seed=spec.recipe.seed,
        meta_data=loaded.trusted,
        other=loaded.open_set,
    )
    defaults = defaults_of_task(task, spec.given, data.data)
    reason = ""
    if not spec.names_method:
        chosen = default_method(task, spec.given, data.data, device)
        spec = replace(spec, method=chosen.name, base=METHODS[chosen.name], names_method=True)
        reason, defaults = chosen.reason, {**defaults, **chosen.recipe}
    epochs = STRONG["epochs"]
    if is_strong(spec.given, if_missing=False) and "epochs" not in spec.given:
        if len(task.shape) == 3 and (device or task.train.examples.device).type == "cpu":
            epochs = epochs_on_cpu(len(task.train), task.shape)
        defaults = {**defaults, "epochs": epochs}
    spec = replace(spec.with_defaults(defaults), data=data)
    return PreparedRun(spec, loaded, task, truth, reason, is_shortened=epochs < STRONG["epochs"])


def settings_to_repeat(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored specification that differ from those of a new run on its data, flat."""
    method = stored.get("method", DEFAULT_METHOD)
    base = METHODS.get(method, METHODS[DEFAULT_METHOD])
    usual = {**asdict(DataSpec()), **default_split(stored["data"]), **vars(resolve_defaults(base, defaults, {})[0])}
    usual["method"] = DEFAULT_METHOD
    del usual["data"]
    settings = {name: value for name, value in stored.items() if name in usual or name == "data"}
    flat = to_plain_types({**settings, **stored.get("recipe", {}), "seed": stored.get("seed", 0)})
    unusual = {name: value for name, value in flat.items() if name not in usual or value != usual[name]}
    return unusual | to_plain_types(stored.get("changed", {}))
