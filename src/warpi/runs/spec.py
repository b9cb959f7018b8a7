"""Settings to a full specification: the flags of `warpi fit`, checked, with the defaults that suit the data."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from warpi.data.dataset import Dataset
from warpi.data.image_files import PHOTO
from warpi.datasets.load import takes_size
from warpi.datasets.registry import DATASETS
from warpi.errors import unknown
from warpi.methods.registry import METHODS, explain_unknown_setting
from warpi.noise.noise import Noise
from warpi.runs.defaults import adjust_for_few_rows, load_dataset, resolve_defaults, resolve_method, to_plain_types
from warpi.runs.fingerprints import hashes, stamp
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task
from warpi.utils.field_checks import at_least, check_types, setting

_load: Callable[..., tuple[Dataset, Mapping[str, Any]]] = load_dataset
_stamp: Callable[[str], str] = stamp


@dataclass(frozen=True)
class DataSpec:
    """What to learn from."""

    data: str = setting("digits", "name from `warpi list datasets`, or path of a table, arrays or an image folder")
    root: str | None = setting(None, "folder with the files of a named data set (default: $WARPI_DATA)")
    label: str | None = setting(None, "column (or .npy file) with the labels (default: label)")
    drop: tuple[str, ...] = setting((), "columns of a table that are not features, such as an id (default: none)")
    image_size: int | None = setting(
        None, "side in pixels at which image files are read (default: their own up to 64, else 224)"
    )
    noise: str = setting(
        "given", "label noise to add, see `warpi list noises` (default: given, the labels as they are)"
    )
    meta: int | None = setting(
        None, "number of trusted examples to hold out from clean data, or to take from the rows marked as trusted"
    )
    meta_data: str | None = setting(None, "second file or folder, with examples whose labels were checked")
    val: float = setting(0.1, "share of the noisy rows held out for validation")
    test: float = setting(0.25, "share of the rows held out for testing if the data has no test set")
    limit: int | None = setting(None, "use only this many rows, for a quick try")

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, limit=1)

    @classmethod
    def stored(cls, spec: Mapping[str, Any]) -> Self:
        """How the data of a stored specification is read."""
        return cls(**{name: value for name, value in to_plain_types(spec).items() if name in READ})

    @property
    def places(self) -> tuple[str, ...]:
        """Files and folders of the user's own that the data is read from, as far as they are there."""
        noise = Noise.parse(self.noise)
        other = noise.other_name if noise.kind == "open_set" else None
        named = (self.data, self.label, self.meta_data, other)
        return tuple(place for place in named if place and place not in DATASETS and os.path.exists(place))

    def stamps(self) -> dict[str, str]:
        """What tells that these are as they were; to be taken before they are read."""
        return {place: _stamp(place) for place in self.places}

    def read(self) -> tuple[Dataset, Mapping[str, Any]]:
        """The data, and the settings that suit it."""
        root = Path(self.root) if self.root else None
        return _load(self.data, root=root, image_size=self.image_size, label=self.label, drop=self.drop)


READ = ("data", "root", "label", "drop", "image_size", "noise")
"""Fields that say which rows there are, and with which labels: those of commands that do not train."""
NOT_READ = tuple(f.name for f in fields(DataSpec) if f.name not in READ)


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the numbers of a run."""

    data: DataSpec
    method: str  # its name
    base: Method  # whose hyper-parameters `options` replaces
    options: Mapping[str, Any]  # all hyper-parameters of the method
    changed: Mapping[str, Any]  # those that were set, and differ from what suits the data; reports print them
    recipe: Recipe
    hashes: Mapping[str, str | None]  # of the data as it was read
    stamps: Mapping[str, str] = field(default_factory=dict)  # of the files it was read from

    def to_json(self) -> dict[str, Any]:
        recipe = self.recipe.stored()
        if not isinstance(net := recipe["net"], str):
            named = net if hasattr(net, "__qualname__") else type(net)
            recipe["net"] = f"{named.__module__}.{named.__qualname__}"
        seed, data = recipe.pop("seed"), asdict(self.data)
        if not self.data.drop:  # as specifications were before there was such a field
            del data["drop"]
        return {
            **data,
            "method": self.method,
            "options": dict(self.options),
            "changed": dict(self.changed),
            "recipe": recipe,
            "seed": seed,
        }


def prepare(method: str | Method, **settings: Any) -> tuple[RunSpec, Task, Truth]:
    """Settings to a full specification and the task it describes.

    A method is a name of METHODS, or a Method of the user's own, whose hyper-parameters then count as settings.
    """
    name, base = resolve_method(method)
    settings = to_plain_types({**(asdict(method) if isinstance(method, Method) else {}), **settings})
    names = {cls: {f.name for f in fields(cls)} for cls in (DataSpec, Recipe, type(base))}
    for key in settings:
        if not any(key in group for group in names.values()):
            error = explain_unknown_setting(f"setting {key!r}", name, key)
            raise error or unknown("setting", key, set().union(*names.values()))
    chosen = {cls: {k: v for k, v in settings.items() if k in group} for cls, group in names.items()}
    data = DataSpec(**chosen[DataSpec])
    Recipe(**chosen[Recipe]), replace(base, **chosen[type(base)])  # what is wrong is said before anything is read

    noise, stamps = Noise.parse(data.noise), data.stamps()
    data, dataset, defaults, meta_data, other = read_all(data)
    meta = defaults.get("meta") if data.meta is None and meta_data is None else data.meta
    data = replace(data, noise=str(noise), meta=meta)
    task, truth = make_task(
        dataset,
        noise,
        meta=data.meta,
        val=data.val,
        test=data.test,
        limit=data.limit,
        seed=settings.get("seed", Recipe.seed),
        meta_data=meta_data,
        other=other,
    )
    if data.data not in DATASETS:
        defaults = adjust_for_few_rows(defaults, len(task.train), settings)
    recipe, options, changed = resolve_defaults(base, defaults, settings)
    return RunSpec(data, name, base, options, changed, recipe, hashes(dataset, meta_data, other), stamps), task, truth


def read_all(data: DataSpec) -> tuple[DataSpec, Dataset, Mapping[str, Any], Dataset | None, Dataset | None]:
    """The data with the side of its images, the settings that suit it, trusted examples, and what noise draws from."""
    noise, root = Noise.parse(data.noise), Path(data.root) if data.root else None
    dataset, defaults = data.read()
    if data.image_size is None and dataset.files is not None and (side := dataset.examples.shape[-1]) != PHOTO:
        data = replace(data, image_size=side)

    def read(name: str, **more: Any) -> Dataset:
        size = data.image_size if takes_size(name, more.get("drop", ())) else None
        return _load(name, root=root, image_size=size, **more)[0]

    meta_data = read(data.meta_data, label=data.label, drop=data.drop, like=dataset) if data.meta_data else None
    return data, dataset, defaults, meta_data, read(noise.other_name) if noise.other_name else None


def not_default(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored specification that differ from what would be taken if nobody said anything, flat."""
    usual = {**asdict(DataSpec()), "method": "warpi", **vars(resolve_defaults(METHODS["warpi"], defaults, {})[0])}
    del usual["data"]
    recipe, seed = stored.get("recipe", {}), stored.get("seed", 0)
    flat = to_plain_types(
        {**{name: stored[name] for name in stored if name in usual or name == "data"}, **recipe, "seed": seed}
    )
    return {k: v for k, v in flat.items() if k not in usual or v != usual[k]} | to_plain_types(
        stored.get("changed", {})
    )


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, data that several runs share is read once, and lies on a device once: nothing changes it in place."""
    global _load, _stamp
    before = _load, _stamp
    _load = lru_cache(maxsize=4)(_load)
    _stamp = lru_cache(_stamp)  # of what was read, not of what is there now
    try:
        yield
    finally:
        _load, _stamp = before
