"""Checks that settings, data and versions are still the same, before a run is resumed or opened again."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from warpi.data.image_files import PHOTO
from warpi.datasets.load import has_images
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError, unknown
from warpi.methods.old_names import use_current_names
from warpi.methods.registry import METHODS
from warpi.nets.registry import NETS
from warpi.noise.parse import Noise
from warpi.runs import plugins
from warpi.runs.defaults import resolve_method, to_plain_types
from warpi.runs.rerun_command import explain_missing_plugin, short_name
from warpi.runs.spec import RunSpec, flatten, later_options
from warpi.runs.stored_facts import changed_facts, differences
from warpi.training.method import Method
from warpi.utils import distributed

_COMPARED = (str, int, float, tuple)  # other values, such as modules, cannot be compared with their stored names


def restore_spec(
    stored: dict[str, Any], settings: Mapping[str, Any], method: str | Method | None, path: Path
) -> RunSpec:
    """The specification of a stored run. Settings that are passed again must be the same."""
    settings = use_current_names(stored["spec"]["method"], settings)
    name = method
    if isinstance(method, Method):
        settings = {**to_plain_types(asdict(method)), **settings}
        name = resolve_method(method)[0]
    if isinstance(settings.get("noise"), str):
        settings["noise"] = str(Noise.parse(settings["noise"]))
    spec = stored["spec"]
    flat = flatten(spec)
    if isinstance(flat.get("net"), str):
        flat["net"] = plugins.stored_net(flat["net"])
    _check_settings(flat | {"method": spec["method"]}, settings | {"method": name}, path)
    check_plugins(path, method or spec["method"], settings.get("net") or flat.get("net"))
    plugins.check_fields(path, method or spec["method"], spec["options"])
    _check_paths(flat, stored["environment"].get("folder"), path)
    replaced = {key: value for key, value in settings.items() if not isinstance(value, (*_COMPARED, type(None)))}
    if "net" in flat:
        replaced.setdefault("net", flat["net"])
    if flat["image_size"] is None and flat["data"] not in DATASETS and has_images(flat["data"], flat["drop"]):
        replaced["image_size"] = PHOTO  # the stored None stands for it
    return RunSpec.from_json(spec, method if isinstance(method, Method) else None, **replaced)


def _check_settings(stored: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> None:
    for name in given:
        if name not in stored:
            raise unknown("setting", name, stored.keys() - {"method"})
    comparable = {name: value for name, value in given.items() if isinstance(value, _COMPARED)}
    for name, before, after in differences(stored, comparable, shared=True):
        use = ""
        if name == "method" and before not in METHODS:
            use = ", or pass its file to `warpi --use` or `warpi.plugins.use`"
        raise UserError(f"{path} was started with {name} = {before!r}, not {after!r}; choose another --out{use}")


def check_plugins(path: Path, method: object, net: object) -> None:
    """Refuse a run whose custom method or network is not available by its name."""
    missing = {}
    if isinstance(method, str) and method not in METHODS:
        missing["METHODS"] = method
    if isinstance(net, str) and net not in NETS:
        missing["NETS"] = short_name(net)
    if missing:
        raise UserError(explain_missing_plugin(missing, path))


def _check_paths(flat: Mapping[str, Any], folder: str | None, path: Path) -> None:
    """Refuse relative paths that do not exist here, if the run was started in another folder."""
    if folder == current_folder():
        return
    matrix = flat.get("matrix")
    files = {name: flat.get(name) for name in ("data", "root", "meta_data", "weights")}
    files["noise"] = Noise.parse(flat.get("noise", "given")).file
    files["matrix"] = matrix if isinstance(matrix, str) else None
    for name, value in files.items():
        if not value or value in (*DATASETS, "torchvision") or os.path.isabs(value) or os.path.exists(value):
            continue
        location = f"in {folder}: cd {shlex.quote(folder)}" if folder else "in another folder: change to it"
        flag = {"meta_data": "trusted"}.get(name, name).replace("_", "-")
        raise UserError(
            f"there is no {value!r} here: --{flag} of the run in {path} is a relative path, and the run was started "
            f"{location}; its folder is {path.resolve()}"
        )


def current_folder() -> str | None:
    """The working directory; None if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


def resolve_threads(stored: dict[str, Any], threads: int | None, path: Path) -> int | None:
    """The thread count of a resumed run.

    Floating-point sums depend on the thread count, so a resumed run keeps it, unless the number of ranks has changed.
    """
    before: int | None = stored["environment"].get("threads")
    if stored["environment"].get("ranks", 1) != distributed.n_ranks():
        return threads
    if threads is not None and threads != before:
        raise UserError(f"{path} was started with threads = {before}, not {threads}; choose another --out")
    return before


def how_to_resume(path: Path, where: torch.device) -> str:
    command = ["warpi", *plugins.flags(), "fit", "--out", str(path), "--resume"]
    n = distributed.n_ranks()
    if n > 1:
        if os.environ.get("LOCAL_WORLD_SIZE") != str(n):
            return "resume with the same command and --resume"
        command += ["--devices", str(n), "--device", where.type]
    return f"resume with: {shlex.join(command)}"


def check_same_run(stored: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Refuse to resume if the stored settings no longer lead to the stored specification and facts."""
    for name, before, after in differences(comparable_spec(stored["spec"]), comparable_spec(now["spec"])):
        raise UserError(
            f"{path} was made with different defaults (version {stored.get('version')}): {name} was {before!r}, now "
            f"{after!r}; restore the old value, or train again with another --out"
        )
    for fact, old, new in changed_facts(stored["facts"], now["facts"]):
        raise UserError(
            f"{fact.subject} of the run in {path} has changed: {fact.name} was {old}, now {new}; restore it, or "
            "train again with another --out"
        )


def comparable_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a specification that two equal runs share, flat.

    Omits `changed`, which depends on the defaults, and the module of a custom network. Settings of the method and the
    recipe that are null count as absent, because older versions did not have them. Settings of the method that are
    absent have the values of the paper.
    """
    settings = {name: value for name, value in spec.items() if name not in ("options", "recipe", "changed")}
    options = {**later_options(spec), **spec["options"], **spec["recipe"]}
    known = {name: value for name, value in options.items() if value is not None}
    known["net"] = str(known.get("net")).rpartition(".")[2]
    return {**settings, **known, "image_size": spec.get("image_size") or PHOTO}
