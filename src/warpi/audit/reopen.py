"""A finished run, as it was when it ended: its data read again, its networks from the checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from warpi import checkpoint
from warpi.errors import UserError
from warpi.folder import describe, read_spec, same_settings, same_task
from warpi.rng import derive, seeded
from warpi.run import Run, pick_device
from warpi.spec import prepare
from warpi.task import Moved


def reopen(path: Path | str, device: str = "auto", own: Mapping[str, Any] | None = None) -> Run:
    """The run in a folder, with its trained method; nothing is trained and nothing written.

    `own` are a method or a net of the user's own that the run was made with (`method=...`, `net=...`). Data that has
    changed since is refused.
    """
    path, settings = Path(path), dict(own or {})
    stored, where = read_spec(path), pick_device(device)
    if stored is None:
        raise UserError(f"there is no run in {path}; give the folder that `warpi fit --out` made")
    if not (path / "done").exists():
        results = path / "results.jsonl"
        done = len(results.read_text().splitlines()) if results.exists() else 0
        at = f"{done} of {stored['spec']['recipe'].get('epochs')} epochs are done"
        raise UserError(f"the run in {path} is not finished, {at}; go on with: warpi fit --out {path} --resume")
    again = settings.pop("method", None)
    settings, method = same_settings(stored, settings, again, path)
    spec, task, truth = prepare(method, **settings)
    moved = Moved()
    task, truth = task.to(where, moved), truth.to(where, moved)
    with seeded(derive(spec.recipe.seed, "training")):
        learner = replace(spec.base, **spec.options)
        learner.start(task, spec.recipe)
    same_task(stored, json.loads(json.dumps(describe(spec, learner, truth, where))), path)
    checkpoint.restore(learner, checkpoint.load(path / "checkpoint.safetensors", where)["method"])
    lines = (path / "results.jsonl").read_text().splitlines()
    return Run(path, learner, task, truth, [json.loads(line) for line in lines])
