"""Train a few-shot learner in a run folder, resume it, and load what it learned (`runs.run_folder`).

The learner at its best validation is in `best.safetensors`. `results.jsonl` has one line per validation.
"""

import math
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from warpi.errors import UserError, blame_file
from warpi.fewshot.data import Classes, FewShotData
from warpi.fewshot.datasets import load_fewshot
from warpi.fewshot.episodes import task_name
from warpi.fewshot.learner import Learner
from warpi.fewshot.spec import Spec, check_facts, describe, fewshot_folder, restore_spec, specify
from warpi.fewshot.train import Position, mean_logs, task_pair, train
from warpi.runs.run_folder import RunFolder
from warpi.runs.schema import BEST, CHECKPOINT
from warpi.training import checkpoint
from warpi.training.engine import Record
from warpi.training.progress import Progress
from warpi.utils.devices import Stopped, catch_signals, cpu_threads, pick_device
from warpi.utils.seeding import RngState, derive, seeded


@dataclass(frozen=True)
class Run:
    """A run read from its folder: settings, learner, data and results."""

    path: Path
    spec: Spec
    learner: Learner
    data: FewShotData
    history: list[Record]
    data_sha256: str  # hash of the content, without the name of the data


def fit(
    out: Path | str,
    *,
    resume: bool = False,
    device: str = "auto",
    threads: int | None = None,
    checkpoint_seconds: float = 300.0,
    quiet: bool = True,
    **settings: Any,
) -> Run:
    """Train a learner on tasks of a data set, and write a run folder.

    Settings are `data` (a name or a FewShotData), `learner`, `root`, `ways`, `shots`, the fields of Training and those
    of the learner. With `resume`, an interrupted run continues from its last checkpoint and ends as if it had never
    stopped. If its data was a FewShotData, the same data must be passed again.
    """
    passed = settings.get("data")
    passed = passed if isinstance(passed, FewShotData) else None
    named = {name: value for name, value in settings.items() if name != "data" or passed is None}
    folder = fewshot_folder(Path(out))
    where = pick_device(device)
    with ExitStack() as stack:
        stored = folder.spec_to_resume(folder.state(), resume, bool(named))
        if stored is None:
            spec = specify(**settings)
        else:
            spec, threads = restore_spec(stored, named, threads, folder.path)
        stack.enter_context(cpu_threads(threads))
        data, digest = _read_data(spec, folder.path, passed, stored, where)
        task_pair(data, spec.kind, spec.training, where)  # checks the kind of tasks before anything is written
        stack.enter_context(seeded(derive(spec.training.seed, "training")))
        learner = spec.start_learner(data, where)
        description = describe(spec, learner, data, digest, where)
        if stored is not None:
            check_facts(stored["facts"], description["facts"], folder.path)
        stack.enter_context(folder.lock())
        at = Position(learner, spec.training)
        if folder.has_checkpoint:
            _restore(folder, learner, at, where)
        history = _check_records(folder.cut_history(at.records), folder.results)
        progress = stack.enter_context(Progress(1, spec.training.iterations, at.iteration, quiet))
        progress.print(_summary(spec, data))
        caught = stack.enter_context(catch_signals())
        if stored is None:
            folder.write_spec(description)
        run = Run(folder.path, spec, learner, data, history, digest)
        _train(run, folder, at, progress, caught, checkpoint_seconds)
        folder.finish()
        return run


def _restore(folder: RunFolder, learner: Learner, at: Position, device: torch.device) -> None:
    """Continue from the checkpoint."""
    with blame_file(folder.checkpoint):
        state = checkpoint.load(folder.checkpoint, device)
        checkpoint.restore(learner, state["learner"])
        checkpoint.restore(at, state["position"])
        RngState.from_dict(state["rng"]).restore()


def _train(
    run: Run, folder: RunFolder, at: Position, progress: Progress, caught: list[int], checkpoint_seconds: float
) -> None:
    """Train to the end, or until a signal is caught. Checkpoints are written after validations and in between."""
    training = run.spec.training
    saved_at = time.monotonic()
    for record in train(run.learner, run.data, run.spec.kind, training, at):
        progress.step()
        if record is not None:
            folder.append(record)
            run.history.append(record)
            progress.print(_line(record, training.iterations))
            if record["best"]:
                folder.save_best({"learner": checkpoint.state_of(run.learner)})
        if record is not None or caught or time.monotonic() - saved_at >= checkpoint_seconds:
            mean_logs(at)  # raises if they are not finite
            state = {"learner": checkpoint.state_of(run.learner), "position": checkpoint.state_of(at)}
            folder.save({**state, "rng": RngState.capture().to_dict()})
            saved_at = time.monotonic()
        if caught:
            command = shlex.join(["warpi", "fewshot", "fit", "--out", str(run.path), "--resume"])
            how = f"fit({str(run.path)!r}, resume=True, data=...)" if run.spec.own else command
            raise Stopped(caught[0], f"resume with: {how}")


def load(
    path: Path | str,
    *,
    device: str = "auto",
    weights: str = "best",
    root: Path | str | None = None,
    data: FewShotData | None = None,
) -> Run:
    """Load a run folder, with the weights of its `best` validation or the `last` ones.

    Pass `root` if the files of the data have moved, and `data` if the run was trained on a FewShotData.
    """
    path = Path(path)
    where = pick_device(device)
    folder = fewshot_folder(path)
    stored = folder.read_spec()
    if stored is None:
        raise UserError(
            f"{path} contains no few-shot run (no spec.json); train one with `warpi fewshot fit --out {path}`"
        )
    file = path / {"best": BEST, "last": CHECKPOINT}[weights]
    if not checkpoint.exists(file):
        raise UserError(f"{path} has no {file.name} yet; the run has not reached its first validation")
    spec = Spec.from_json(stored["spec"])
    if root is not None and spec.data != "sines" and not spec.own:
        spec = replace(spec, root=str(root))
    data, digest = _read_data(spec, path, data, stored, where)
    learner = spec.start_learner(data, where)
    with blame_file(file):
        checkpoint.restore(learner, checkpoint.load(file, where)["learner"])
    history = folder.read_history("restore it", skip_unfinished=True)  # the run may still be writing
    return Run(path, spec, learner, data, _check_records(history, folder.results), digest)


def _check_records(records: list[Record], file: Path) -> list[Record]:
    for i, record in enumerate(records, 1):
        if not {"val_mean", "episodes_per_s"} <= record.keys():
            raise UserError(f"line {i} of {file} is not the record of a validation; restore it")
    return records


_read_builtin = lru_cache(maxsize=2)(load_fewshot)


def _read_data(
    spec: Spec, path: Path, passed: FewShotData | None, stored: Mapping[str, Any] | None, device: torch.device
) -> tuple[FewShotData, str]:
    """The data of a run, passed or read, and its hash. Raises if the stored hash is different."""
    if passed is None and spec.own:
        raise UserError(
            f"the run in {path} was trained on data passed from Python, {spec.data!r}; pass it again: "
            f"load({str(path)!r}, data=...), or to resume: fit({str(path)!r}, resume=True, data=...)"
        )
    data = _read_builtin(spec.data, spec.root) if passed is None else passed
    digest = data.digest()
    if stored is not None:
        check_facts(stored["facts"], {"data_sha256": digest}, path)
    return data.to(device), digest


def _summary(spec: Spec, data: FewShotData) -> str:
    """The learner, the data and the tasks of a run, on one line."""
    task = task_name(spec.ways, spec.shots)
    if spec.train_ways != spec.ways:
        task += f" (trained with {spec.train_ways} ways)"
    parts = ((name, data.part(name)) for name in ("train", "val", "test"))
    classes = ", ".join(f"{len(part):,} {name}" for name, part in parts if isinstance(part, Classes))
    return f"{spec.label(without=None)} on {spec.data}, {task}" + (f"; classes: {classes}" if classes else "")


def _line(record: Record, iterations: int) -> str:
    shown = "  ".join(f"{name} {record[name]:.4g}" for name in ("loss", "accuracy", "mse") if name in record)
    best = "  best so far" if record["best"] else ""
    spread = f" ± {record['val_ci95']:.2g}" if "val_ci95" in record else ""  # one task has no interval
    val = f"val {record['val_mean']:.4g}{spread}"
    speed = f"  {record['episodes_per_s']:,.0f} episodes/s" if math.isfinite(record["episodes_per_s"]) else ""
    return f"step {record['iteration']:>{len(str(iterations))}.0f}/{iterations}  {shown}  {val}{best}{speed}"
