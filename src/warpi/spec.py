"""Settings to a full specification: the flags of `warpi fit`, checked, with the defaults that suit the data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from warpi.data import load_dataset
from warpi.errors import unknown
from warpi.methods import METHODS
from warpi.noise import Noise
from warpi.recipe import Recipe
from warpi.settings import check_types
from warpi.task import Task, Truth, make_task


@dataclass(frozen=True)
class DataSpec:
    """What to learn from."""

    data: str = "digits"  # a name of `warpi list datasets`, or a path: .npz .npy .csv .tsv .parquet, or an image folder
    root: str | None = None  # folder of the data set's files; default: the environment variable WARPI_DATA
    label: str | None = None  # column (or .npy file) of the labels
    image_size: int | None = None  # side of the images a folder is read at; default 224
    noise: str = "given"  # KIND:RATE of `warpi list noises`; "given" takes the labels as they are
    meta: int | None = None  # trusted examples held out of clean data, or taken of those marked as trusted
    meta_data: str | None = None  # a second file or folder with the trusted examples
    val: float = 0.1  # share of the noisy rows held out for validation
    test: float = 0.25  # share held out for testing where the data has no test set
    limit: int | None = None  # use only that many rows, for a quick try


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the numbers of a run."""

    data: DataSpec
    method: str
    options: Mapping[str, Any]  # all hyper-parameters of the method
    changed: Mapping[str, Any]  # those that were set, and differ from what suits the data; reports print them
    recipe: Recipe

    def to_json(self) -> dict[str, Any]:
        recipe = {f.name: getattr(self.recipe, f.name) for f in fields(Recipe)}
        if not isinstance(net := recipe["net"], str):
            named = net if hasattr(net, "__qualname__") else type(net)
            recipe["net"] = f"{named.__module__}.{named.__qualname__}"
        seed = recipe.pop("seed")
        return {
            **asdict(self.data),
            "method": self.method,
            "options": dict(self.options),
            "changed": dict(self.changed),
            "recipe": recipe,
            "seed": seed,
        }


def prepare(method: str, **settings: Any) -> tuple[RunSpec, Task, Truth]:
    """Settings to a full specification and the task it describes."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    settings = plain(settings)
    names = {cls: {f.name for f in fields(cls)} for cls in (DataSpec, Recipe, type(METHODS[method]))}
    for name in settings:
        if not any(name in group for group in names.values()):
            raise unknown("setting", name, set().union(*names.values()))
    for cls, group in names.items():
        check_types(cls, {name: settings[name] for name in group & settings.keys()})
    chosen = {k: v for k, v in settings.items() if k in names[DataSpec]}
    data = DataSpec(**chosen)
    noise = Noise.parse(data.noise)
    root = Path(data.root) if data.root else None
    dataset, defaults = load_dataset(data.data, root=root, label=data.label, image_size=data.image_size)
    meta_data = None
    if data.meta_data:
        meta_data, _ = load_dataset(
            data.meta_data, root=root, label=data.label, image_size=data.image_size, like=dataset
        )
    other = load_dataset(noise.other_name, root=root, image_size=data.image_size)[0] if noise.other_name else None
    if data.meta is None and meta_data is None:
        chosen["meta"] = defaults.get("meta")
    data = DataSpec(**chosen)
    recipe = Recipe(**{k: v for k, v in {**defaults, **settings}.items() if k in names[Recipe]})
    kind = type(METHODS[method])
    suits = asdict(METHODS[method]) | {
        k: defaults[f"{kind.__name__}.{k}"] for k in names[kind] if f"{kind.__name__}.{k}" in defaults
    }
    changed = {k: v for k, v in settings.items() if k in suits and v != suits[k]}
    task, truth = make_task(
        dataset,
        noise,
        meta=data.meta,
        val=data.val,
        test=data.test,
        limit=data.limit,
        seed=recipe.seed,
        meta_data=meta_data,
        other=other,
    )
    return RunSpec(data, method, suits | changed, changed, recipe), task, truth


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they look when read from a flag: paths are text, lists are tuples, numbers are python's own."""

    def one(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, np.generic):
            return value.item()
        return tuple(map(one, value)) if isinstance(value, list | tuple) else value

    return {name: one(value) for name, value in settings.items()}
