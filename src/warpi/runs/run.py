"""A training run on disk: its folder, and the way back into it after a crash.

A run folder holds `spec.json` (settings, facts about the task, versions), `results.jsonl` (a line an epoch),
`checkpoint.safetensors` (all state, and what of the data new rows are read by) and, when the run is complete, `done`.
"""

import json
import os
import shlex
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from warpi.data.image_files import SMALL
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError, blame_file, missing_package
from warpi.runs import plugins as own
from warpi.runs.defaults import ENOUGH_ROWS, FEW_ROWS_METHOD, to_plain_types
from warpi.runs.packed_task import carried
from warpi.runs.resume import (
    check_outside,
    cut_results,
    describe,
    look,
    read_spec,
    same_settings,
    same_task,
    same_threads,
)
from warpi.runs.setting_names import to_stored_names
from warpi.runs.spec import RunSpec, prepare
from warpi.training import checkpoint
from warpi.training.engine import (
    Diverged,
    Record,
    TrainingState,
    average_over_ranks,
    check_batches,
    check_logs,
    check_weights,
    train,
)
from warpi.training.method import Method, evaluating
from warpi.training.progress import SHOWN, Progress
from warpi.training.task import Moved, Task, Truth
from warpi.utils import distributed
from warpi.utils.devices import Stopped, catch_signals, cpu_threads, pick_device
from warpi.utils.files import append_line, one_writer, write_atomically
from warpi.utils.seeding import RngState, derive, seeded

PATIENCE = 10  # minutes of training on a CPU from which on a run says that it will take long


@dataclass(frozen=True)
class Run:
    """A finished run: the trained method, its task, and what happened."""

    path: Path
    method: Method
    task: Task
    truth: Truth
    history: list[Record]

    def __repr__(self) -> str:
        """One line, for whoever types it at a prompt: all else is many tensors."""
        last = self.history[-1] if self.history else {}
        epochs = f"{len(self.history)} epoch{'s' * (len(self.history) != 1)}"
        noisy = "" if self.truth.test_is_clean else " (noisy labels)"
        score = f", test accuracy {last['test_acc']:.2f} %{noisy}" if "test_acc" in last else ""
        rows = f"{len(self.task.train):,} rows, {self.task.n_classes} classes"
        return f"<Run {str(self.path)!r}: {type(self.method).__name__} on {rows}; {epochs}{score}>"


def fit(out: Path | str, **options: Any) -> Run:
    """Train a method on data with noisy labels and leave a run folder behind.

    `method` is a name of METHODS or a Method of your own. All other options are the flags of `warpi fit` with
    underscores: `data`, `noise`, `epochs`, `seed`, the method's own, ..., and `resume`, `device`, `threads`,
    `checkpoint_seconds`, `checkpoint_epochs`, `tensorboard`, `quiet`; see `fitting`, which does the same
    a step at a time.
    """
    if "meta_data" in options:
        warnings.warn("meta_data is deprecated; use trusted", FutureWarning, stacklevel=2)
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
    checkpoint_epochs: int = 1,
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
    Of several ranks (`parallel`) all train, and rank 0 reads and writes the folder: the others need not see it.
    """
    path, settings = Path(out), to_plain_types(to_stored_names(settings))
    file, where = path / "checkpoint.safetensors", pick_device(device)
    with ExitStack() as held:
        held.enter_context(distributed.process_group(where))
        held.enter_context(_way_back(path, where))
        first = distributed.rank() == 0
        found, has_checkpoint, begun = json.loads(
            distributed.broadcast_from_rank0(lambda: json.dumps(look(path, file)).encode())
        )
        stored = found if resume or begun else None  # a run that failed before its first checkpoint is begun anew
        with distributed.raise_on_all_ranks():
            if stored is None and resume and method is None and not settings:
                raise UserError(f"there is no run in {path} to go on with")
            if stored is None and has_checkpoint:
                lost = "the spec.json it belongs to is gone"
                raise UserError(f"{path} holds a checkpoint, but {lost}; choose another --out")
            if stored is not None and not resume:
                raise UserError(f"{path} already holds a run; go on with it by --resume, or choose another --out")
            if stored is None:
                check_outside(path, settings.get("data"))
            else:
                threads = same_threads(stored, threads, path)
                settings, method = same_settings(stored, settings, method, path)
            held.enter_context(cpu_threads(threads))
            spec, task, truth = prepare(method or "warpi", **settings)
            moved = Moved()
            task, truth = task.to(where, moved), truth.to(where, moved)
            if first:
                held.enter_context(one_writer(path))
                if read_spec(path) != found:  # while this process was reading the data
                    raise UserError(f"another process has begun a run in {path}; choose another --out")
            held.enter_context(seeded(derive(spec.recipe.seed, "training")))
            learner = replace(spec.base, **spec.options)
            learner.start(task, spec.recipe)
            check_batches(learner)
            if not checkpoint.exists(file):
                learner.check_nets_differ()
            description = describe(spec, learner, truth, where)
            if stored is not None:
                same_task(stored, json.loads(json.dumps(description)), path)
        has_checkpoint = distributed.agree(None, first and checkpoint.exists(file))[
            0
        ]  # now that nobody else can write it
        at = _go_on(file, learner, where) if has_checkpoint else TrainingState()
        if distributed.ranks() > 1:
            state = {"spec": description["spec"], "facts": description["facts"], **checkpoint.state_of(learner)}
            distributed.check_same(checkpoint.digest(state).encode(), "the run (settings, data, initial weights)")
        results = path / "results.jsonl"
        history = json.loads(
            distributed.broadcast_from_rank0(lambda: json.dumps(cut_results(results, at.epoch)).encode())
        )
        steps, saved_at, taken = len(learner.loader), time.monotonic(), carried(task, description["facts"])

        def save(record: Record | None, stopping: bool) -> None:
            ends = record is None or stopping or at.epoch == spec.recipe.epochs
            average_over_ranks(learner, at)
            with distributed.raise_on_all_ranks():
                check_logs(learner, at)
                check_weights(learner, at)
                if first:
                    if record is not None:
                        append_line(results, json.dumps(record))
                    if ends or at.epoch % checkpoint_epochs == 0:
                        state = {"method": checkpoint.state_of(learner), "position": vars(at)}
                        checkpoint.save(file, {**state, "rng": RngState.capture().to_dict(), "data": taken})

        done = at.epoch * steps + at.step
        progress = Progress(spec.recipe.epochs, steps, done, quiet or not first, _names(task, truth))
        held.enter_context(progress)
        progress.print(_summary(spec, learner, truth))
        if truth.n_repeated and stored is None:
            progress.print(
                f"{truth.n_repeated} rows of the data are among the trusted examples; only there are they used"
            )
        if stored is None and spec.method == "warpi" and _few(spec, task):
            progress.print(
                f"{len(task.train)} rows are few for warpi: on such tables --method {FEW_ROWS_METHOD} and --method "
                "clean_only were better (docs/data.md)"
            )
        if not progress.quiet and where.type == "cpu":
            share = 1 - done / (spec.recipe.epochs * steps)
            if (minutes := share * _minutes(spec, learner)) > PATIENCE:
                progress.print(_slow(spec, learner, minutes))
        caught = held.enter_context(catch_signals()) if caught is None else caught
        with distributed.raise_on_all_ranks():
            board = held.enter_context(_board(path, at.epoch + 1)) if tensorboard and first else None
            if stored is None and first:
                write_atomically(path / "spec.json", (json.dumps(description, indent=1) + "\n").encode())
        late = lambda: first and time.monotonic() - saved_at >= checkpoint_seconds
        for record, signum, due in _in_step(train(learner, task, truth, at), progress, caught, late):
            if record is not None or ((signum or due) and learner.resumes_mid_epoch):
                save(record, bool(signum))
                saved_at = time.monotonic()
            if record is not None:
                history.append(record)
                progress.line(record)
                if board is not None:
                    for name, value in record.items():
                        board.add_scalar(name, value, int(record["epoch"]))
            if signum:
                raise Stopped(signum, _again(path, where))
            yield record
        with distributed.raise_on_all_ranks():
            if first:
                write_atomically(path / "done", b"")
        return Run(path, learner, task, truth, history)


def _in_step(
    training: Iterator[Record | None], progress: Progress, caught: list[int], late: Callable[[], bool]
) -> Iterator[tuple[Record | None, int, bool]]:
    """What training yields, and what all ranks agree on after it: the signal to stop at, if there was one, and whether
    rank 0 finds a checkpoint late. Where one rank diverged, all did."""
    while True:
        record, error = None, None
        try:
            record = next(training)
        except StopIteration:
            return
        except Diverged as e:
            error = e
        if record is None:
            progress.step()
        signum, due = distributed.agree(error, caught[0] if caught else 0, late())
        yield record, signum, bool(due)


def _again(path: Path, where: torch.device) -> str:
    command = ["warpi", *own.flags(), "fit", "--out", str(path), "--resume"]
    if (n := distributed.ranks()) > 1:
        if os.environ.get("LOCAL_WORLD_SIZE") != str(n):
            return "go on with the same command and --resume"
        command += ["--devices", str(n), "--device", where.type]
    return f"go on with: {shlex.join(command)}"


@contextmanager
def _way_back(path: Path, where: torch.device) -> Iterator[None]:
    try:
        yield
    except distributed.RankLostError as e:
        raise distributed.RankLostError(f"{e}; {_again(path, where)}") from e


def _summary(spec: RunSpec, learner: Method, truth: Truth) -> str:
    """What a run learns from, in a line."""
    task = learner.task
    parts = {"noisy": task.train, "trusted": task.meta, "validation": task.val, "test": truth.test}
    rows = ", ".join(f"{len(split):,} {name}" for name, split in parts.items() if split)
    wrong = "" if task.noise_rate is None else f" ({100 * task.noise_rate:.1f} % wrong)"
    inputs = "images of {1} x {2} pixels" if len(task.shape) == 3 else "inputs of " + " x ".join(map(str, task.shape))
    net, epochs = spec.to_json()["recipe"]["net"], spec.recipe.epochs
    return (
        f"{spec.data.data}, noise {spec.data.noise}{wrong}: {rows} rows; {task.n_classes} classes, "
        f"{inputs.format(*task.shape)}; {spec.method} trains {net} for {epochs} epoch{'s' * (epochs > 1)}"
    )


def _few(spec: RunSpec, task: Task) -> bool:
    """Whether this is a table of the user's own with too few rows for a meta-network."""
    return spec.data.data not in DATASETS and spec.recipe.net == "mlp" and len(task.train) < ENOUGH_ROWS


def _names(task: Task, truth: Truth) -> dict[str, str]:
    """What the columns of a run's lines are called: accuracy against labels that may be wrong says so."""
    noisy = {"val_acc": task.noise_rate != 0, "test_acc": not truth.test_is_clean}
    return {name: f"{label} (noisy)" if noisy.get(name) else label for name, label in SHOWN.items()}


def _minutes(spec: RunSpec, learner: Method) -> float:
    """How long a training takes on this CPU, roughly: by the time of a pass, and what a method costs on digits."""
    x, times = torch.zeros(2, *learner.task.shape), list[float]()
    with evaluating(learner.nets), torch.no_grad(), seeded(0):
        for _ in range(2):  # the first one prepares
            began = time.perf_counter()
            learner.net(x)
            times.append(time.perf_counter() - began)
    costs = json.loads((resources.files("warpi.methods") / "costs.json").read_text())
    passes = 3 * (costs.get(spec.method) or 1)  # a backward pass is as long as two forward
    return passes * min(times) / len(x) * len(learner.task.train) * spec.recipe.epochs / 60


def _slow(spec: RunSpec, learner: Method, minutes: float) -> str:
    shape, net, helps = learner.task.shape, spec.recipe.net, ["a GPU"]
    if shape[-1] > SMALL and len(shape) == 3 and not spec.data.data.lower().endswith((".npz", ".npy")):
        helps.append(f"--image-size {SMALL}")
    if isinstance(net, str) and net not in ("mlp", "resnet20"):
        helps.append(f"--net {'resnet20' if len(shape) == 3 else 'mlp'}")
    helps += ["--epochs", "--limit for a first try"]
    long = f"{minutes / 60:.0f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"
    return f"this will take about {long} on this CPU; what helps: {', '.join(helps)}"


def _go_on(file: Path, learner: Method, device: torch.device) -> TrainingState:
    """Put a started method where the last checkpoint was. Ranks other than 0 may not see that: they get a copy."""
    with TemporaryDirectory() as folder:
        if distributed.ranks() > 1:
            content = distributed.broadcast_from_rank0(checkpoint.newest(file).read_bytes)
            if distributed.rank() > 0:
                file = Path(folder) / file.name
                file.write_bytes(content)
        with distributed.raise_on_all_ranks(), blame_file(file):
            state = checkpoint.load(file, device)
            at = TrainingState(**checkpoint.restore_into(vars(TrainingState()), state["position"]))
            checkpoint.restore(learner, state["method"])
            RngState.from_dict(state["rng"]).restore()
            if device.type == "cuda" and distributed.ranks() > 1 and "cuda" in state["rng"]:
                torch.cuda.set_rng_state(state["rng"]["cuda"][0], device)  # that of the first rank's device
    return at


def _board(path: Path, epoch: int) -> Any:
    """A writer for tensorboard; what an earlier process wrote of this epoch and later ones is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise missing_package("tensorboard", "--tensorboard", "track") from e
    return SummaryWriter(str(path / "tensorboard"), purge_step=epoch)
