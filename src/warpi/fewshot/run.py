"""A few-shot run on disk: its folder, the way back into it after a crash, and what was learned out of it.

A run folder holds `spec.json` (settings, facts about the data, versions), `results.jsonl` (a line a validation),
`checkpoint.safetensors` (all state), `best.safetensors` (the learner as it was at its best validation) and, when the
run is complete, `done`.
"""

import json
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
from warpi.fewshot.data import Classes, FewShotData, load_fewshot
from warpi.fewshot.episodes import task_name
from warpi.fewshot.learner import Learner
from warpi.fewshot.spec import Spec, describe, read_spec, same_facts, same_settings, specify
from warpi.fewshot.train import Position, mean_logs, task_pair, train
from warpi.runs.resume import check_free, cut_results
from warpi.runs.schema import read_record
from warpi.training import checkpoint
from warpi.training.engine import Record
from warpi.training.progress import Progress
from warpi.utils.devices import Stopped, catch_signals, cpu_threads, pick_device
from warpi.utils.files import append_line, one_writer, write_atomically
from warpi.utils.seeding import RngState, derive, seeded


@dataclass(frozen=True)
class Run:
    """A run folder, read: what was asked for, the learner as it was stored, the data, what happened."""

    path: Path
    spec: Spec
    learner: Learner
    data: FewShotData
    history: list[Record]
    data_sha256: str  # of what lies in `data`, whatever its name


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
    """Train a learner on tasks of a data set, and leave a run folder behind.

    Settings are `data` (a name, or the user's own FewShotData), `learner`, `root`, `ways`, `shots`, the fields of
    Training and those of the learner. With `resume` an interrupted run goes on where its last checkpoint was, and ends
    as if it had never stopped; data of one's own must be given again for that, and be the same.
    """
    given = data if isinstance(data := settings.get("data"), FewShotData) else None
    named = {name: value for name, value in settings.items() if name != "data" or given is None}
    path, where = Path(out), pick_device(device)
    file, results = path / "checkpoint.safetensors", path / "results.jsonl"
    with ExitStack() as held:
        stored, begun = read_spec(path), checkpoint.exists(file) or (path / "done").exists()
        if stored is None and not begun:
            check_free(path)
        if begun and not resume:
            raise UserError(f"{path} already holds a run; go on with it by --resume, or choose another --out")
        if begun and stored is None:
            raise UserError(f"{path} holds a checkpoint, but its spec.json is gone; choose another --out")
        if stored is None and resume and not named:
            raise UserError(f"there is no run in {path} to go on with")
        stored = stored if resume else None  # a run that failed before its first checkpoint is begun anew
        if stored is None:
            spec = specify(**settings)
        else:
            spec, threads = same_settings(stored, named, threads, path)
        held.enter_context(cpu_threads(threads))
        data, digest = _data_of(spec, path, given, stored, where)
        task_pair(data, spec.kind, spec.training, where)  # checks the kind of tasks before anything is written
        held.enter_context(seeded(derive(spec.training.seed, "training")))
        learner = spec.started(data, where)
        description = describe(spec, learner, data, digest, where)
        if stored is not None:
            same_facts(stored["facts"], description["facts"], path)
        held.enter_context(one_writer(path))
        at = Position(learner, spec.training)
        if checkpoint.exists(file):
            with blame_file(file):
                state = checkpoint.load(file, where)
                checkpoint.restore(learner, state["learner"])
                checkpoint.restore(at, state["position"])
                RngState.from_dict(state["rng"]).restore()
        history = _records(cut_results(results, at.records), results)
        steps = train(learner, data, spec.kind, spec.training, at)
        progress = held.enter_context(Progress(1, spec.training.iterations, at.iteration, quiet))
        progress.print(_summary(spec, data))
        caught, saved_at = held.enter_context(catch_signals()), time.monotonic()
        if not begun:
            write_atomically(path / "spec.json", (json.dumps(description, indent=1) + "\n").encode())
        for record in steps:
            progress.step()
            if record is not None:
                append_line(results, json.dumps(record))
                history.append(record)
                progress.print(_line(record, spec.training.iterations))
                if record["best"]:
                    best = checkpoint.pack({"learner": checkpoint.state_of(learner)}, checkpoint.FORMAT)
                    write_atomically(path / "best.safetensors", best)
            if record is not None or caught or time.monotonic() - saved_at >= checkpoint_seconds:
                mean_logs(at)  # raises if they are not finite
                rng = RngState.capture().to_dict()
                parts = {"learner": checkpoint.state_of(learner), "position": checkpoint.state_of(at), "rng": rng}
                checkpoint.save(file, parts)
                saved_at = time.monotonic()
            if caught:
                again = shlex.join(["warpi", "fewshot", "fit", "--out", str(path), "--resume"])
                again = f"fit({str(path)!r}, resume=True, data=...)" if spec.own else again
                raise Stopped(caught[0], f"go on with: {again}")
        write_atomically(path / "done", b"")
        return Run(path, spec, learner, data, history, digest)


def load(
    path: Path | str,
    *,
    device: str = "auto",
    weights: str = "best",
    root: Path | str | None = None,
    data: FewShotData | None = None,
) -> Run:
    """The learner of a run folder as it was at its best validation, or `last`.

    `root` where the data lies now; `data`, where it is the user's own.
    """
    path, where = Path(path), pick_device(device)
    stored = read_spec(path)
    if stored is None:
        raise UserError(f"{path} holds no few-shot run (no spec.json); make one with `warpi fewshot fit --out {path}`")
    file = path / {"best": "best.safetensors", "last": "checkpoint.safetensors"}[weights]
    if not checkpoint.exists(file):
        raise UserError(f"{path} has no {file.name} yet; the run has not come to its first validation")
    spec = Spec.from_json(stored["spec"])
    if root is not None and spec.data != "sines" and not spec.own:
        spec = replace(spec, root=str(root))
    data, digest = _data_of(spec, path, data, stored, where)
    learner = spec.started(data, where)
    with blame_file(file):
        checkpoint.restore(learner, checkpoint.load(file, where)["learner"])
    return Run(path, spec, learner, data, _history(path / "results.jsonl"), digest)


def _history(file: Path) -> list[Record]:
    """The lines of a run that may be under way, or was killed while it wrote one: that one is left out."""
    try:
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}; put it back as it was") from e
    whole = [line for line in lines if line.endswith(b"\n")]
    return _records([read_record(line, file, i, "put it back as it was") for i, line in enumerate(whole, 1)], file)


def _records(found: list[Any], file: Path) -> list[Record]:
    needed = {"val_mean", "episodes_per_s"}
    for i, record in enumerate(found, 1):
        if not needed <= record.keys():
            raise UserError(f"line {i} of {file} is no record of a validation; put it back as it was")
    return found


@lru_cache(maxsize=2)
def _loaded(name: str, root: str | None) -> FewShotData:
    return load_fewshot(name, root)


def _data_of(
    spec: Spec, path: Path, given: FewShotData | None, stored: Mapping[str, Any] | None, device: torch.device
) -> tuple[FewShotData, str]:
    """The data of a run, given or read, and its hash, which must be the one that is stored."""
    if given is None and spec.own:
        raise UserError(
            f"the run in {path} was made with data of your own, {spec.data!r}, which must be given again; from Python: "
            f"load({str(path)!r}, data=...), and to go on: fit({str(path)!r}, resume=True, data=...)"
        )
    data = _loaded(spec.data, spec.root) if given is None else given
    digest = data.digest()
    if stored is not None:
        same_facts(stored["facts"], {"data_sha256": digest}, path)
    return data.to(device), digest


def _summary(spec: Spec, data: FewShotData) -> str:
    """What a run learns from, in a line."""
    task = task_name(spec.ways, spec.shots)
    if spec.train_ways != spec.ways:
        task += f" (trained with {spec.train_ways} ways)"
    parts = ((name, data.part(name)) for name in ("train", "val", "test"))
    classes = ", ".join(f"{len(part):,} {name}" for name, part in parts if isinstance(part, Classes))
    return f"{spec.label(but=None)} on {spec.data}, {task}" + (f"; classes: {classes}" if classes else "")


def _line(record: Record, iterations: int) -> str:
    shown = "  ".join(f"{name} {record[name]:.4g}" for name in ("loss", "accuracy", "mse") if name in record)
    best = "  best so far" if record["best"] else ""
    spread = f" ± {record['val_ci95']:.2g}" if "val_ci95" in record else ""  # of one task there is none
    val = f"val {record['val_mean']:.4g}{spread}"
    speed = f"  {record['episodes_per_s']:,.0f} episodes/s" if math.isfinite(record["episodes_per_s"]) else ""
    return f"step {record['iteration']:>{len(str(iterations))}.0f}/{iterations}  {shown}  {val}{best}{speed}"
