"""A finished run, as it was when it ended: its networks from the checkpoint, with its data or without."""

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Generator

from warpi.data.image_files import PHOTO
from warpi.data.placeholder import InputsNotAvailable
from warpi.errors import UserError, blame_file
from warpi.runs.defaults import resolve_method
from warpi.runs.packed_task import task_of
from warpi.runs.plugins import flags
from warpi.runs.resume import describe, read_spec, same_settings, same_task
from warpi.runs.run import Run
from warpi.runs.schema import read_record
from warpi.runs.spec import DataSpec, RunSpec, prepare
from warpi.training import checkpoint
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Moved
from warpi.utils.devices import pick_device
from warpi.utils.seeding import derive, seeded


def reopen(path: Path | str, device: str = "auto", own: Mapping[str, Any] | None = None) -> Run:
    """The run in a folder, with its trained method; nothing is trained and nothing written.

    `own` are a method or a net of the user's own that the run was made with (`method=...`, `net=...`). Data that has
    changed since is refused.
    """
    path, settings = Path(path), dict(own or {})
    stored, where = _finished(path), pick_device(device)
    again = settings.pop("method", None)
    settings, method = same_settings(stored, settings, again, path)
    spec, task, truth = prepare(method, **settings)
    moved = Moved()
    task, truth = task.to(where, moved), truth.to(where, moved)
    with seeded(derive(spec.recipe.seed, "training")):
        learner = replace(spec.base, **spec.options)
        learner.start(task, spec.recipe)
    same_task(stored, json.loads(json.dumps(describe(spec, learner, truth, where))), path)
    file, results = path / "checkpoint.safetensors", path / "results.jsonl"
    with blame_file(file):
        checkpoint.restore(learner, _last(checkpoint.load(file, where), spec.recipe.epochs, file)["method"])
    lines = results.read_bytes().splitlines() if results.is_file() else ()  # prediction does without
    history = [read_record(line, results, i, "mend or remove the line") for i, line in enumerate(lines, 1)]
    return Run(path, learner, task, truth, history)


def without_data(path: Path | str, device: str = "auto", own: Mapping[str, Any] | None = None) -> Method:
    """The trained method of the run in a folder, made without a look at its data, which may be gone.

    Its task has everything but inputs. Raises `InputsNotAvailable` if they must be read (`reopen`): the checkpoint was
    made before it held such a task, or a custom method looks at inputs, now or in `predict`.
    """
    path, settings = Path(path), dict(own or {})
    stored, where = _finished(path), pick_device(device)
    again, cwd = settings.pop("method", None), None
    with suppress(OSError):
        cwd = os.getcwd()
    size = stored["spec"].get("image_size") or PHOTO  # which None stands for; nor is the data looked at for it
    here = {"spec": {**stored["spec"], "image_size": size}, "environment": {**stored["environment"], "folder": cwd}}
    settings, method = same_settings({**stored, **here}, settings, again, path)  # paths of data are not followed
    file = path / "checkpoint.safetensors"
    with blame_file(file):
        state = _last(checkpoint.load(file, where), settings.get("epochs"), file)
        data, held = state.get("data"), dict(state["method"])
    if data is None:
        raise InputsNotAvailable(
            f"the run in {path} is of a version that did not store how its data was read, so this must be there, "
            "unchanged"
        )
    task, (name, base) = task_of(data, stored["facts"], where, file), resolve_method(method)
    of_data, of_method, of_recipe = (
        {f.name: settings[f.name] for f in fields(cls) if f.name in settings} for cls in (DataSpec, base, Recipe)
    )
    learner, recipe = replace(base, **of_method), Recipe(**of_recipe)
    with seeded(derive(recipe.seed, "training")):
        learner.start(task, replace(recipe, weights=None))  # the weights that it began with are not needed
    options = {f.name: getattr(learner, f.name) for f in fields(learner)}
    spec = RunSpec(DataSpec(**of_data), name, base, options, {}, recipe, {})
    facts = {"n_test": None, **stored["facts"], "n_parameters": sum(p.numel() for p in learner.net.parameters())}
    same_task(stored, json.loads(json.dumps({"spec": spec.to_json(), "facts": facts})), path)
    with blame_file(file):
        for part, value in checkpoint.state_of(learner).items():
            if isinstance(value, Generator) and part in held and len(held[part]) != len(value.get_state()):
                held[part] = value.get_state()  # of another kind of device; training is over, and draws no more
        checkpoint.restore(learner, held)
    return learner


def _last(state: dict[str, Any], epochs: Any, file: Path) -> dict[str, Any]:
    """The state after the last epoch. Another, such as a copy made on the way, is not what the run came to."""
    if (at := state["position"]["epoch"]) != epochs:
        raise UserError(
            f"{file} is of epoch {at} of {epochs}, which are done; put the last checkpoint of the run there"
        )
    return state


def _finished(path: Path) -> dict[str, Any]:
    """The specification of a run that has ended."""
    stored = read_spec(path)
    if stored is None:
        raise UserError(f"there is no run in {path}; give the folder that `warpi fit --out` made")
    if not (path / "done").exists():
        results = path / "results.jsonl"
        done = len(results.read_bytes().splitlines()) if results.is_file() else 0
        at = f"{done} of {stored['spec']['recipe'].get('epochs')} epochs are done"
        again = shlex.join(["warpi", *flags(), "fit", "--out", str(path), "--resume"])
        raise UserError(f"the run in {path} is not finished, {at}; go on with: {again}")
    return stored
