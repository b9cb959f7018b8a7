"""Open a finished run again: its trained method from the checkpoint, with or without its data."""

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from warpi.data.image_files import PHOTO
from warpi.data.placeholder import InputsNotAvailable
from warpi.datasets.delimited_files import read_before
from warpi.errors import UserError, blame_file, no_path
from warpi.runs import plugins
from warpi.runs.packed_task import unpack_task
from warpi.runs.plugins import flags
from warpi.runs.run import Run, describe_training
from warpi.runs.run_folder import RunFolder
from warpi.runs.same_run import check_same_run, current_folder, restore_spec
from warpi.runs.spec import DataCache, prepare
from warpi.training import checkpoint
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.devices import pick_device
from warpi.utils.seeding import derive, seeded


def reopen(
    path: Path | str, device: str = "auto", custom: Mapping[str, Any] | None = None, cache: DataCache | None = None
) -> Run:
    """The run in a folder, with its trained method and its data. Nothing is trained or written.

    `custom` are the custom method or network that the run was made with (`method=...`, `net=...`). Raises a UserError
    if the data has changed.
    """
    folder = RunFolder(Path(path))
    stored = _read_finished(folder)
    settings = dict(custom or {})
    spec = restore_spec(stored, settings, settings.pop("method", None), folder.path)
    where = pick_device(device)
    with read_before():
        prepared = prepare(spec, cache).to(where)
    with prepared.seed():
        method = prepared.start()
    description = describe_training(prepared, method, where)
    check_same_run(stored, json.loads(json.dumps(description)), folder.path)
    with blame_file(folder.checkpoint):
        checkpoint.restore(method, _read_last_state(folder, where, spec.recipe.epochs)["method"])
    history = folder.read_history("fix or remove the line")
    return Run(folder.path, method, prepared.task, prepared.truth, history, prepared.data)


def reopen_without_data(path: Path | str, device: str = "auto", custom: Mapping[str, Any] | None = None) -> Method:
    """The trained method of the run in a folder, without reading its data, which may be gone.

    Its task has everything but inputs. Raises `InputsNotAvailable` if `reopen` must read them, because an older version
    did not store the task in the checkpoint, or because a custom method uses inputs, now or in `predict`.
    """
    folder = RunFolder(Path(path))
    stored = _read_finished(folder)
    settings = dict(custom or {})
    # The paths of the data are not used: pretend that the run was started here, and that the size of images is known.
    size = stored["spec"].get("image_size") or PHOTO
    environment = {**stored["environment"], "folder": current_folder()}
    moved = {**stored, "spec": {**stored["spec"], "image_size": size}, "environment": environment}
    spec = restore_spec(moved, settings, settings.pop("method", None), folder.path)
    where = pick_device(device)
    with blame_file(folder.checkpoint):
        state = _read_last_state(folder, where, spec.recipe.epochs)
        packed = state.get("data")
        weights = dict(state["method"])
    if packed is None:
        raise InputsNotAvailable(
            f"the run in {folder.path} was made by a version that did not store how its data was read, so the data "
            "must be in its place, unchanged"
        )
    task = unpack_task(packed, stored["facts"], where, folder.checkpoint)
    method = spec.make_method()
    recipe = replace(spec.recipe, weights=None)  # its initial weights are not needed
    if method.trains_network:
        _check_network_size(recipe, task, checkpoint.newest(folder.checkpoint))
    with seeded(derive(recipe.seed, "training")):
        method.start(task, recipe)
    facts = {"n_test": None, **stored["facts"], "n_parameters": sum(p.numel() for p in method.net.parameters())}
    now = json.loads(json.dumps({"spec": spec.to_json(), "facts": facts}))
    check_same_run(stored, now, folder.path)
    with blame_file(folder.checkpoint):
        for name, value in checkpoint.state_of(method).items():
            if isinstance(value, Generator) and name in weights and len(weights[name]) != len(value.get_state()):
                weights[name] = value.get_state()  # from another kind of device; a finished run draws nothing anyway
        checkpoint.restore(method, weights)
    return method


def _check_network_size(recipe: Recipe, task: Task, file: Path) -> None:
    """Refuse a checkpoint that claims inputs for which the network would be larger than the checkpoint itself."""
    if not isinstance(recipe.net, str) or recipe.net in plugins.NET_PLUGINS:
        return
    with torch.device("meta"):  # allocates nothing
        net = recipe.make_net(task.shape, task.n_classes, 0)
    needed = sum(p.numel() * p.element_size() for p in net.parameters())
    stored = os.path.getsize(file)
    if needed > stored:
        raise UserError(
            f"{file} is damaged: it has {stored:,} bytes, but a network for the inputs {list(task.shape)} that it "
            f"claims needs {needed:,}; copy it again from where the run was made"
        )


def read_run_spec(path: Path) -> dict[str, Any]:
    """The specification of the run in a folder. Raises a UserError if the folder has none."""
    advice = "pass the folder that `warpi fit --out` created"
    if path.is_file():
        raise UserError(f"{path} is a file, not a run folder; {advice}")
    stored = RunFolder(path).read_spec()
    if stored is None:
        raise UserError(f"there is no run in {path}; {advice}") if path.exists() else no_path(path, "run in", advice)
    return stored


def _read_last_state(folder: RunFolder, device: torch.device, epochs: int) -> dict[str, Any]:
    """The state after the last epoch. Refuses any other, such as a copy made during training."""
    state = checkpoint.load(folder.checkpoint, device, "copy it again from where the run was made, or repeat the run")
    epoch = state["position"]["epoch"]
    if epoch != epochs:
        raise UserError(
            f"{folder.checkpoint} is from epoch {epoch} of {epochs}, but the run is complete; copy its last checkpoint"
        )
    return state


def _read_finished(folder: RunFolder) -> dict[str, Any]:
    """The specification of a complete run. Raises a UserError if the run is not finished."""
    stored = read_run_spec(folder.path)
    if not folder.is_done:
        done = len(folder.results.read_bytes().splitlines()) if folder.results.is_file() else 0
        epochs = stored["spec"]["recipe"].get("epochs")
        command = shlex.join(["warpi", *flags(), "fit", "--out", str(folder.path), "--resume"])
        raise UserError(f"the run in {folder.path} is not finished ({done} of {epochs} epochs); resume with: {command}")
    return stored
