"""A training run on disk: its folder, and the way back into it after a crash.

A run folder holds `spec.json` (settings, facts about the task, versions), `results.jsonl` (a line an epoch),
`checkpoint.safetensors` (all state) and, when the run is complete, `done`.
"""

import json
import platform
import shlex
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

import warpi
from warpi import checkpoint
from warpi.atomic import append_line, one_writer, write_atomically
from warpi.engine import Position, Record, check_logs, check_weights, train
from warpi.errors import UserError, missing, unknown
from warpi.method import Method
from warpi.noise import Noise
from warpi.progress import Progress
from warpi.rng import derive, seeded
from warpi.spec import DataSpec, RunSpec, named, plain, prepare
from warpi.task import Moved, Task, Truth

FORMAT = "warpi-run/1"


@dataclass(frozen=True)
class Run:
    """A finished run: the trained method, its task, and what happened."""

    path: Path
    method: Method
    task: Task
    truth: Truth
    history: list[Record]


class Stopped(Exception):
    """A signal asked the run to stop; what was done is stored."""

    def __init__(self, signum: int, path: Path) -> None:
        again = shlex.join(["warpi", "fit", "--out", str(path), "--resume"])
        super().__init__(f"stopped by {signal.Signals(signum).name}; go on with: {again}")
        self.signum = signum


def fit(out: Path | str, **options: Any) -> Run:
    """Train a method on data with noisy labels and leave a run folder behind; the options are those of `fitting`."""
    run = fitting(out, **options)
    while True:
        try:
            next(run)
        except StopIteration as end:
            done: Run = end.value
            return done


def fitting(
    out: Path | str,
    *,
    method: str | Method | None = None,
    resume: bool = False,
    device: str = "auto",
    threads: int | None = None,
    checkpoint_seconds: float = 300.0,
    tensorboard: bool = False,
    quiet: bool = True,
    caught: list[int] | None = None,
    **settings: Any,
) -> Generator[Record | None, None, Run]:
    """A run of a method on data with noisy labels, a step (None) or an epoch (its record) at a time.

    Settings are the fields of DataSpec, of Recipe and of the method, as they are flags of `warpi fit`; what is not
    set takes the default that suits the data. The method is a name, or a Method of your own; `warpi` if none is given.
    With `resume` an interrupted run goes on where its last checkpoint was, and ends as if it had never stopped.
    Signals are noted and stop the run after the step; who drives several runs notes them in `caught` for all of them.
    """
    path, settings = Path(out), plain(settings)
    found, file = read_spec(path), path / "checkpoint.safetensors"
    begun = checkpoint.exists(file) or (path / "done").exists()
    stored = found if resume or begun else None  # a run that failed before its first checkpoint is begun anew
    if stored is None and resume and method is None and not settings:
        raise UserError(f"there is no run in {path} to go on with")
    if stored is None and checkpoint.exists(file):
        raise UserError(f"{path} holds a checkpoint, but the spec.json it belongs to is gone; choose another --out")
    if stored is not None and not resume:
        raise UserError(f"{path} already holds a run; go on with it by --resume, or choose another --out")
    if stored is not None:
        before = stored["environment"].get("threads")  # sums depend on how they are shared out
        if threads is not None and threads != before:
            raise UserError(
                f"{path} was begun with threads = {before}, not {threads}; choose another --out to change it"
            )
        threads = before
        settings, method = _same_settings(stored, settings, method, path)
    with ExitStack() as held:
        held.enter_context(_threads(threads))
        spec, task, truth = prepare(method or "warpi", **settings)
        where, moved = pick_device(device), Moved()
        task, truth = task.to(where, moved), truth.to(where, moved)
        held.enter_context(one_writer(path))
        held.enter_context(seeded(derive(spec.recipe.seed, "training")))
        if read_spec(path) != found:  # while this process was reading the data
            raise UserError(f"another process has begun a run in {path}; choose another --out")
        learner = replace(spec.base, **spec.options)
        learner.start(task, spec.recipe)
        _check_batches(learner)
        description = _describe(spec, learner, truth, where)
        if stored is not None:
            _same_task(stored, json.loads(json.dumps(description)), path)
        at = _go_on(file, learner, where) if checkpoint.exists(file) else Position()
        history = _cut_results(path / "results.jsonl", at.epoch)
        steps, saved_at = len(learner.loader), time.monotonic()

        def save() -> None:
            check_logs(learner, at)
            check_weights(learner, at)
            state = {"method": checkpoint.state_of(learner), "position": vars(at), "rng": checkpoint.global_rng()}
            checkpoint.save(file, state)

        progress = held.enter_context(Progress(spec.recipe.epochs, steps, at.epoch * steps + at.step, quiet))
        progress.say(_summary(spec, learner, truth))
        caught = held.enter_context(_signals()) if caught is None else caught
        board = held.enter_context(_board(path, at.epoch + 1)) if tensorboard else None
        if stored is None:
            write_atomically(path / "spec.json", (json.dumps(description, indent=1) + "\n").encode())
        for record in train(learner, task, truth, at):
            if record is None:
                progress.step()
            else:
                history.append(record)
                append_line(path / "results.jsonl", json.dumps(record))
                progress.line(record)
                if board is not None:
                    for name, value in record.items():
                        board.add_scalar(name, value, int(record["epoch"]))
            due = bool(caught) or time.monotonic() - saved_at >= checkpoint_seconds
            if record is not None or (due and learner.resumes_mid_epoch):
                save()
                saved_at = time.monotonic()
            if caught:
                raise Stopped(caught[0], path)
            yield record
        write_atomically(path / "done", b"")
        return Run(path, learner, task, truth, history)


def pick_device(device: str) -> torch.device:
    """`auto` is a CUDA device where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as e:
        raise UserError(f"unknown device {device!r}; allowed: auto, cpu, cuda, cuda:0, ...") from e
    if where.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}; allowed: auto, cpu, cuda, cuda:0, ...")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there are {torch.cuda.device_count()} CUDA devices here, got {device!r}; use --device cpu")
    return where


def _summary(spec: RunSpec, learner: Method, truth: Truth) -> str:
    """What a run learns from, in a line."""
    task = learner.task
    parts = {"noisy": task.train, "trusted": task.meta, "validation": task.val, "test": truth.test}
    rows = ", ".join(f"{len(split):,} {name}" for name, split in parts.items() if split)
    wrong = "" if task.noise_rate is None else f" ({100 * task.noise_rate:.1f} % wrong)"
    shape = " x ".join(map(str, task.shape))
    return f"{spec.data.data}, noise {spec.data.noise}{wrong}: {rows} rows; {task.n_classes} classes, inputs of {shape}"


def _describe(spec: RunSpec, learner: Method, truth: Truth, device: torch.device) -> dict[str, Any]:
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
            "n_classes": task.n_classes,
            "n_parameters": sum(p.numel() for p in learner.net.parameters()),
            "inputs_sha256": spec.inputs_sha256,
            "noise_sha256": truth.noise_hash,
            "wrong_share": task.noise_rate,
            "test_labels": "clean" if truth.test_is_clean else "given",
            "needs_meta": spec.base.needs_meta,
            "needs_noise_rate": spec.base.needs_noise_rate,
        },
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "device": device.type,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "threads": torch.get_num_threads(),
        },
    }


def read_spec(path: Path) -> dict[str, Any] | None:
    """What `spec.json` of a run folder holds; None where there is none."""
    file = path / "spec.json"
    try:
        stored: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}; choose another --out") from e
    except ValueError as e:
        raise UserError(f"{file} is not JSON ({e}); choose another --out") from e
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError(f"{file} is not of the format {FORMAT!r}; choose another --out")
    spec = stored.get("spec")
    parts = {**stored, **spec} if isinstance(spec, dict) else {}
    kinds = {"method": str, "options": dict, "recipe": dict, "seed": int, "facts": dict, "environment": dict}
    for name, kind in kinds.items():
        if not isinstance(parts.get(name), kind):
            raise UserError(f"{file} is garbled: {name} is {parts.get(name)!r}; choose another --out")
    return stored


def _same_settings(
    stored: dict[str, Any], settings: Mapping[str, Any], method: str | Method | None, path: Path
) -> tuple[dict[str, Any], str | Method]:
    """The settings of the stored run; those given again must be the same."""
    spec, again = stored["spec"], method
    if isinstance(method, Method):
        settings, (method, _) = {**plain(asdict(method)), **settings}, named(method)
    if isinstance(settings.get("noise"), str):
        settings = {**settings, "noise": str(Noise.parse(settings["noise"]))}
    flat = plain({**spec["options"], **spec["recipe"], "seed": spec["seed"]})
    flat |= {f.name: spec[f.name] for f in fields(DataSpec) if f.name in spec}
    for name, value in {"method": method, **settings}.items():
        if name not in {**flat, "method": 0}:
            raise unknown("setting", name, flat)
        was = spec["method"] if name == "method" else flat[name]
        if isinstance(value, str | int | float | tuple) and was != value:
            raise UserError(f"{path} was begun with {name} = {was!r}, not {value!r}; choose another --out to change it")
    own = {name: value for name, value in settings.items() if not isinstance(value, str | int | float | tuple | None)}
    return {**flat, **own}, again if isinstance(again, Method) else spec["method"]


def _same_task(stored: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """What the stored settings lead to now must be what they led to then."""
    if stored["spec"] != now["spec"]:
        raise UserError(f"{path} was made by other defaults (version {stored.get('version')}); choose another --out")
    for name in ("n_train", "n_meta", "n_val", "n_test", "n_classes", "n_parameters", "inputs_sha256", "noise_sha256"):
        was, got = stored["facts"].get(name), now["facts"][name]
        if was != got:
            raise UserError(
                f"the data or the network of {path} has changed: {name} was {was}, is {got}; choose another --out"
            )


def _go_on(file: Path, learner: Method, device: torch.device) -> Position:
    """Put a started method where the last checkpoint was."""
    state = checkpoint.load(file, device)
    checkpoint.restore(learner, state["method"])
    checkpoint.set_global_rng(state["rng"])
    return Position(**state["position"])


def _check_batches(learner: Method) -> None:
    """A batch of one cannot be normalised; torch says so only at the first step, and in other words."""
    loaders = [learner.loader, *([learner.meta_loader] if learner.needs_meta else [])]
    modules = [module for net in learner.nets for module in net.modules()]
    if any(x.batch_size == 1 for x in loaders) and any(isinstance(m, _BatchNorm) for m in modules):
        raise UserError(
            "batches of 1 example cannot be trained with BatchNorm; --batch-size and --meta-batch-size >= 2"
        )


def _cut_results(file: Path, epochs: int) -> list[Record]:
    """The records of the epochs that the checkpoint knows; what a crash left after them is cut off."""
    try:
        lines = file.read_bytes().splitlines(keepends=True)[:epochs] if file.exists() else []
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {file}: {e}; put it back as it was, or choose another --out") from e
    if len(records) < epochs:
        raise UserError(
            f"{file} has {len(records)} epochs, the checkpoint beside it {epochs}; put the lines back, "
            "or choose another --out"
        )
    write_atomically(file, b"".join(lines))
    return records


@contextmanager
def _threads(n: int | None) -> Iterator[None]:
    """That many CPU threads inside, and as many as there were afterwards."""
    if n is not None and not 1 <= n <= 1024:
        raise UserError(f"threads must be at least 1 and at most 1024, got {n}")
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted, not obeyed at once, so that a checkpoint can be written first."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda signum, _: caught.append(signum)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _board(path: Path, epoch: int) -> Any:
    """A writer for tensorboard; what an earlier process wrote of this epoch and later ones is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise missing("tensorboard", "--tensorboard", "track") from e
    return SummaryWriter(str(path / "tensorboard"), purge_step=epoch)
