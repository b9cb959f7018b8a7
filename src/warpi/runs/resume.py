"""What a run folder holds of a run: its description, and whether a run that goes on in it is still the same."""

import hashlib
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpi
from warpi.data.image_files import PHOTO
from warpi.datasets.load import has_images
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError, unknown
from warpi.methods.registry import METHODS
from warpi.nets.registry import NETS
from warpi.noise.noise import Noise
from warpi.runs import plugins as own
from warpi.runs.defaults import resolve_method, to_plain_types
from warpi.runs.fingerprints import file_sha256
from warpi.runs.schema import FORMAT, check_spec, read_json, read_record
from warpi.runs.spec import DataSpec, RunSpec
from warpi.training import checkpoint
from warpi.training.engine import Record
from warpi.training.method import Method
from warpi.training.recipe import LATER, Recipe
from warpi.training.task import Truth
from warpi.utils import distributed
from warpi.utils.files import write_atomically

MEND = "choose another folder"
_WHAT = {
    "files_sha256": "an image file",
    "labels_sha256": "what the data says about labels",
    "meta_sha256": "the set of trusted examples",
    "test_set_sha256": "the test set",
    "noise_file_sha256": "the file of --noise",
    "matrix_file_sha256": "the file of --matrix",
    "weights_sha256": "the file of --weights",
}


def read_stored(path: Path, form: str) -> dict[str, Any] | None:
    """What `spec.json` of a run folder holds, which must be of that format; None where there is none."""
    file = path / "spec.json"
    try:
        stored: dict[str, Any] = read_json(file, MEND)
    except FileNotFoundError:
        return None
    if not isinstance(stored, dict) or stored.get("format") != form:
        whose = {"warpi-run/1": "warpi fit", "warpi-fewshot/1": "warpi fewshot fit"}[form]
        raise UserError(f"{file} is not of the format {form!r}, which `{whose}` writes; {MEND}")
    return stored


def read_spec(path: Path) -> dict[str, Any] | None:
    """The specification of a run of `warpi fit`."""
    if (stored := read_stored(path, FORMAT)) is not None:
        needed = ("spec", "method", "options", "recipe", "seed", "facts", "environment")
        check_spec(stored, path / "spec.json", MEND, needed)
    return stored


def look(path: Path, file: Path) -> tuple[dict[str, Any] | None, bool, bool]:
    """What lies in a folder: its spec, whether there is a checkpoint, whether a run was begun."""
    has_checkpoint, found = checkpoint.exists(file), read_spec(path)
    if found is None and not has_checkpoint:
        check_free(path)
    return found, has_checkpoint, has_checkpoint or (path / "done").exists()


def check_free(path: Path) -> None:
    """A folder that holds anything but what a run begins with is somebody's, perhaps the data: nothing is put there."""
    own = ("sweep.json", "results.jsonl", "tensorboard", "log.txt")
    logs = (".log", ".out", ".err")  # where a shell or a queue may have put what the run prints
    try:
        with os.scandir(path) as entries:
            found = [e.name for e in entries if e.name not in own and not e.name.endswith(logs)]
        others = sorted(name for name in found if not name.startswith("."))
    except OSError:  # none is there, or it is no folder or may not be read, which is said where it is written to
        return
    if others:
        listed = ", ".join(map(repr, others[:3])) + (", ..." if len(others) > 3 else "")
        raise UserError(
            f"the folder {path} holds {listed} and no run; choose a new or empty one, such as --out "
            f"{shlex.quote(f'runs/{path.resolve().name}')}"
        )


def check_outside(path: Path, data: object) -> None:
    """A run in a folder of images would be taken for a class of them."""
    is_folder = isinstance(data, str) and data not in DATASETS and os.path.isdir(data)
    if is_folder and path.resolve().is_relative_to(Path(str(data)).resolve()):
        raise UserError(f"--out {path} lies in the folder of the data, {data}; choose one outside of it")


def describe(spec: RunSpec, learner: Method, truth: Truth, device: torch.device) -> dict[str, Any]:
    task = learner.task
    return {
        "format": FORMAT,
        "version": warpi.__version__,
        "spec": spec.to_json(),
        "facts": {
            "n_train": len(task.train),
            "n_meta": len(task.meta) if task.meta else 0,
            "n_val": len(task.val) if task.val else 0,
            "n_test": len(truth.test) if truth.test else 0,
            "test_sha256": hashlib.sha256(truth.test.rows.cpu().numpy().tobytes()).hexdigest() if truth.test else None,
            "n_classes": task.n_classes,
            "n_parameters": sum(p.numel() for p in learner.net.parameters()),
            **spec.hashes,
            "noise_sha256": truth.noise_hash,
            **{
                name: file_sha256(file)
                for name, file in files(spec.data.noise, spec.options, spec.recipe.weights).items()
            },
            "wrong_share": task.noise_rate,
            "test_labels": "clean" if truth.test_is_clean else "given",
            "needs_meta": spec.base.needs_meta,
            "needs_noise_rate": spec.base.needs_noise_rate,
        },
        "environment": {
            "date": date.today().isoformat(),
            "ranks": distributed.ranks(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "device": device.type,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "threads": torch.get_num_threads(),
            "stamps": dict(spec.stamps),  # as long as these are those of today, so is the data
            "folder": _here(),  # which relative paths of the specification begin in
        },
    }


def files(noise: str, options: Mapping[str, Any], weights: str | None) -> dict[str, str | None]:
    """The files of a run that are known by what is in them, by the names of these facts."""
    return {
        "noise_file_sha256": Noise.parse(noise).file,
        "matrix_file_sha256": matrix_file(options),
        "weights_sha256": None if weights == "torchvision" else weights,
    }


def matrix_file(options: Mapping[str, Any]) -> str | None:
    """The file that `--matrix` names; None where there is none, or the numbers themselves."""
    return matrix if isinstance(matrix := options.get("matrix"), str) else None


def same_settings(
    stored: dict[str, Any], settings: Mapping[str, Any], method: str | Method | None, path: Path
) -> tuple[dict[str, Any], str | Method]:
    """The settings of the stored run; those given again must be the same."""
    spec, again = stored["spec"], method
    if method is not None and not isinstance(method, str):
        settings, (method, _) = {**to_plain_types(asdict(method)), **settings}, resolve_method(method)
    if isinstance(settings.get("noise"), str):
        settings = {**settings, "noise": str(Noise.parse(settings["noise"]))}
    data = {f.name: spec.get(f.name, f.default) for f in fields(DataSpec)}
    later = {f.name: f.default for f in fields(Recipe) if f.name in LATER}
    flat = to_plain_types({**later, **spec["options"], **spec["recipe"], "seed": spec["seed"], **data})
    if isinstance(flat.get("net"), str):
        flat["net"] = own.stored_net(flat["net"])
    for name, value in {"method": method, **settings}.items():
        if name not in {**flat, "method": 0}:
            raise unknown("setting", name, flat)
        was = spec["method"] if name == "method" else flat[name]
        if isinstance(value, str | int | float | tuple) and was != value:
            use = "" if name != "method" or was in METHODS else ", or name its file as `warpi --use` or `own.using` do"
            raise UserError(
                f"{path} was begun with {name} = {was!r}, not {value!r}; choose another --out to change it{use}"
            )
    check_own(path, again or spec["method"], settings.get("net") or flat.get("net"))
    own.check_fields(path, again or spec["method"], spec["options"])
    _check_paths(flat, stored["environment"].get("folder"), path)
    if flat.get("image_size") is None and flat["data"] not in DATASETS and has_images(flat["data"], flat["drop"]):
        flat["image_size"] = PHOTO  # what None stands for where it is stored
    mine = {name: value for name, value in settings.items() if not isinstance(value, str | int | float | tuple | None)}
    return {**flat, **mine}, again if isinstance(again, Method) else spec["method"]


def check_own(path: Path, method: object, net: object) -> None:
    """A stored method or network of the user's own cannot be made from its name: it must be given again."""
    is_own = {
        "method": isinstance(method, str) and method not in METHODS,
        "net": isinstance(net, str) and net not in NETS,
    }
    if any(is_own.values()):
        stored = {"method": method, "net": net}
        names = {part: str(stored[part]).rpartition(".")[2] for part, mine in is_own.items() if mine}
        what = " and ".join(f"a {'network' if part == 'net' else part}" for part in names)
        again = ", ".join(f"{part}=My{part.capitalize()}()" for part in names)
        shell = ""
        if all(name.isidentifier() for name in names.values()):  # a lambda has no name
            tables = " and ".join(f"{part.upper()}S = {{{name!r}: ...}}" for part, name in names.items())
            use, here = "warpi --use FILE.py", shlex.quote(str(path))
            shell = (
                f"in the shell, where FILE.py has {tables}: {use} audit {here}, {use} predict {here} ..., and to go "
                f"on: {use} fit --out {here} --resume; "
            )
        raise UserError(
            f"the run in {path} was made with {what} of your own, which must be given again; {shell}from Python: "
            f"warpi.audit.audit({str(path)!r}, {again}), warpi.predict({str(path)!r}, data, {again}), and to go on: "
            f"warpi.fit({str(path)!r}, resume=True, {again})"
        )


def _check_paths(flat: Mapping[str, Any], folder: str | None, path: Path) -> None:
    """Relative paths of a run begin in the folder that it was begun in."""
    files = {name: flat.get(name) for name in ("data", "root", "meta_data", "weights")}
    files |= {"noise": Noise.parse(flat.get("noise", "given")).file, "matrix": matrix_file(flat)}
    if folder == _here():
        return
    for name, value in files.items():
        if not value or value in (*DATASETS, "torchvision") or os.path.isabs(value) or os.path.exists(value):
            continue
        begun = f"begun in {folder}: cd {shlex.quote(folder)}" if folder else "begun in another folder: go there"
        raise UserError(
            f"no {value!r} here: --{name.replace('_', '-')} of the run in {path} is a relative path, and the run was "
            f"{begun}; its folder is {path.resolve()}"
        )


def same_threads(stored: dict[str, Any], threads: int | None, path: Path) -> int | None:
    """Sums depend on how they are shared out: as many threads as before, unless there are other ranks anyway."""
    before: int | None = stored["environment"].get("threads")
    if stored["environment"].get("ranks", 1) != distributed.ranks():
        return threads
    if threads is not None and threads != before:
        raise UserError(f"{path} was begun with threads = {before}, not {threads}; choose another --out to change it")
    return before


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return None


def _settled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What of a specification must be the same: not which options were said to differ from defaults, nor the module
    from which a network of the user's own came. A setting that is null and one that came later are the same."""
    options, recipe = ({k: v for k, v in spec[part].items() if v is not None} for part in ("options", "recipe"))
    recipe["net"] = str(recipe.get("net")).rpartition(".")[2]
    rest = {name: value for name, value in spec.items() if name != "changed"}
    return rest | {"options": options, "recipe": recipe, "image_size": spec.get("image_size") or PHOTO}


def same_task(stored: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """What the stored settings lead to now must be what they led to then."""
    before, after = _settled(stored["spec"]), _settled(now["spec"])
    if before != after:
        absent, flat = "absent", ({**spec, **spec["options"], **spec["recipe"]} for spec in (before, after))
        was, got = ({k: v for k, v in each.items() if k not in ("options", "recipe")} for each in flat)
        name = next(k for k in {**was, **got} if was.get(k, absent) != got.get(k, absent))
        raise UserError(
            f"{path} was made by other defaults (version {stored.get('version')}): {name} was "
            f"{was.get(name, absent)!r}, is {got.get(name, absent)!r}; put it back as it was, or train again with "
            "another --out"
        )
    names = ["n_train", "n_meta", "n_val", "n_test", "n_classes", "n_parameters", "inputs_sha256", "noise_sha256"]
    names += [name for name in now["facts"] if name.endswith("_sha256") and name in stored["facts"]]  # others are newer
    for name in (*names, "matrix_file_sha256"):
        was, got = stored["facts"].get(name), now["facts"].get(name)
        if was != got:
            what = _WHAT.get(name, "the data or the network")
            raise UserError(
                f"{what} of {path} has changed: {name} was {was}, is {got}; put it back as it was, or train again with "
                "another --out"
            )


def cut_results(file: Path, epochs: int) -> list[Record]:
    """The records of the epochs that the checkpoint knows; what a crash left after them is cut off."""
    try:
        lines = file.read_bytes().splitlines(keepends=True)[:epochs] if file.exists() else []
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}; put it back as it was, or {MEND}") from e
    records = [read_record(line, file, i, f"put it back as it was, or {MEND}") for i, line in enumerate(lines, 1)]
    if len(records) < epochs:
        raise UserError(
            f"{file} has {len(records)} epochs, the checkpoint beside it {epochs}; put the lines back, "
            "or choose another --out"
        )
    write_atomically(file, b"".join(lines))
    return records
