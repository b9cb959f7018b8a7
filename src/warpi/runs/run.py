"""Train a method in a run folder, and resume it after an interruption (`runs.run_folder`)."""

import json
import shlex
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from warpi.data.duplicates.describe_leaks import describe_leaks
from warpi.data.image_files import SMALL
from warpi.datasets.hugging_face.saved import store_objects
from warpi.errors import UserError, blame_file, format_count
from warpi.nets.registry import VECTOR_NETS
from warpi.runs.defaults import scale_to_ranks, to_plain_types
from warpi.runs.fingerprints import file_sha256
from warpi.runs.packed_task import pack_task
from warpi.runs.rerun_command import flag
from warpi.runs.run_folder import RunFolder, check_outside, describe_run
from warpi.runs.same_run import check_same_run, current_folder, how_to_resume, resolve_threads, restore_spec
from warpi.runs.schema import FORMAT, to_stored_names, warn_of_old_names
from warpi.runs.spec import DataCache, LoadedData, PreparedRun, RunSpec, files_to_hash, prepare
from warpi.training import checkpoint
from warpi.training.engine import Diverged, Record, TrainingState, average_over_ranks, check_batches, check_state, train
from warpi.training.method import Method
from warpi.training.progress import SHOWN, Forecast, Progress
from warpi.training.task import Task, Truth
from warpi.utils import distributed
from warpi.utils.devices import Stopped, catch_signals, cpu_threads, pick_device
from warpi.utils.leases import Lease, LeaseLost
from warpi.utils.seeding import RngState
from warpi.utils.time_left import format_duration
from warpi.utils.tracking import open_trackers

PATIENCE = 10.0  # minutes: a longer training on a CPU prints a forecast and advice


@dataclass(frozen=True)
class Run:
    """A finished run: the trained method, its task and data, and one record per epoch."""

    path: Path
    method: Method
    task: Task
    truth: Truth
    history: list[Record]
    data: LoadedData

    def __repr__(self) -> str:
        """A single line, because the fields contain many tensors."""
        last = self.history[-1] if self.history else {}
        epochs = format_count(len(self.history), "epoch")
        noisy = "" if self.truth.test_is_clean else " (noisy labels)"
        score = f", test accuracy {last['test_acc']:.2f} %{noisy}" if "test_acc" in last else ""
        rows = f"{len(self.task.train):,} rows, {self.task.n_classes} classes"
        return f"<Run {str(self.path)!r}: {type(self.method).__name__} on {rows}; {epochs}{score}>"


def fit(out: Path | str, **options: Any) -> Run:
    """Train a method on data with noisy labels, and write a run folder.

    `method` is a name of METHODS or a custom Method (default: `auto`, or a network for images). All other options are
    the flags of `warpi fit` with underscores: `data`, `noise`, `epochs`, `seed`, the settings of the method, ..., and
    `resume`, `device`, `threads`, `checkpoint_seconds`, `checkpoint_epochs`, `track`, `quiet`. See `fitting`,
    which does the same step by step.
    """
    warn_of_old_names(options)
    if "tensorboard" in options:
        options["track"] = "tensorboard" if options.pop("tensorboard") else ()
    steps = fitting(out, **options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            run: Run = end.value
            return run


def fitting(
    out: Path | str,
    *,
    method: str | Method | None = None,
    resume: bool = False,
    device: str = "auto",
    threads: int | None = None,
    batch_per_rank: bool = False,
    checkpoint_seconds: float = 300.0,
    checkpoint_epochs: int = 1,
    track: str | Sequence[str] = (),
    quiet: bool = True,
    caught: list[int] | None = None,
    cache: DataCache | None = None,
    lease: Lease | None = None,
    **settings: Any,
) -> Generator[Record | None, None, Run]:
    """Train a method on data with noisy labels; yields None after a step and a record after an epoch.

    Settings are the fields of DataSpec, of Recipe and of the method, like the flags of `warpi fit`. Those that are not
    set have defaults that suit the data. The method is a name or a custom Method; if it is None, `default_method`
    chooses it. With `resume`, an interrupted run continues from its last checkpoint, and ends as if it had never
    stopped. Signals stop the run after the current step. A caller that catches signals itself passes its list as
    `caught`; one that holds the lease of the folder passes it as `lease`. If there are several ranks
    (`utils.distributed`), all train, and only rank 0 reads and writes the folder.
    """
    has_epochs = settings.get("recipe") != "strong" or settings.get("epochs") is not None
    settings = to_plain_types(store_objects(to_stored_names(settings), Path(out)))
    if not has_epochs:
        del settings["epochs"]  # `prepare` chooses them by the device
    folder = RunFolder(Path(out))
    where = pick_device(device)
    with ExitStack() as stack:
        stack.enter_context(distributed.process_group(where))
        stack.enter_context(_add_advice(folder.path, where))
        started = _start(stack, folder, where, method, resume, threads, batch_per_rank, settings, cache, lease)
        _restore(started)
        if distributed.n_ranks() > 1:
            state = {**started.description, **checkpoint.state_of(started.method), "environment": None}
            distributed.check_same(checkpoint.digest(state).encode(), "the run (settings, data, initial weights)")
        progress = stack.enter_context(_make_progress(started, quiet))
        _announce(started, progress)
        caught = stack.enter_context(catch_signals()) if caught is None else caught
        _watch(started, progress, caught)
        with distributed.raise_on_all_ranks():
            log = None
            if started.writes:
                settings = started.description["spec"]
                log = stack.enter_context(open_trackers(track, folder.path, settings, started.state.epoch + 1))
                if started.is_new:
                    folder.write_spec(started.description)
        for record, signum, is_late in _steps(started, progress, caught, checkpoint_seconds):
            if record is not None or ((signum or is_late) and started.method.resumes_mid_epoch):
                started.save(record, checkpoint_epochs, bool(signum))
            if record is not None:
                if started.method.trains_network:
                    progress.line(record)
                if log is not None:
                    log(record)
            if signum:
                raise Stopped(signum, how_to_resume(folder.path, where))
            yield record
        with distributed.raise_on_all_ranks():
            if started.writes:
                choice = started.method.choice()
                if choice is not None:
                    folder.save_choice(choice)
                folder.finish()
        data = started.prepared
        return Run(folder.path, started.method, data.task, data.truth, started.history, data.data)


@dataclass
class _StartedRun:
    """A run whose method has been started: everything the training loop needs."""

    folder: RunFolder
    device: torch.device
    prepared: PreparedRun
    method: Method
    description: dict[str, Any]  # the content of spec.json
    is_new: bool  # not resumed
    writes: bool  # this is rank 0
    lease: Lease | None  # of the folder, on rank 0
    state: TrainingState = field(default_factory=TrainingState)
    history: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saved_at = time.monotonic()
        self.packed_task = pack_task(self.prepared.task, self.description["facts"])

    @property
    def steps_done(self) -> int:
        return self.state.epoch * len(self.method.loader) + self.state.step

    def save(self, record: Record | None, checkpoint_epochs: int, stopping: bool) -> None:
        """Append the record of an epoch, if there is one, and write a checkpoint.

        Most epochs end without a checkpoint if `checkpoint_epochs` is larger than 1, but not the last one.
        """
        is_last = stopping or self.state.epoch == self.prepared.spec.recipe.epochs
        is_due = record is None or is_last or self.state.epoch % checkpoint_epochs == 0
        average_over_ranks(self.method, self.state)
        with distributed.raise_on_all_ranks():
            check_state(self.method, self.state)
            if self.writes:
                if record is not None:
                    self.folder.append(record)
                if is_due:
                    self.folder.save(
                        {
                            "method": checkpoint.state_of(self.method),
                            "position": vars(self.state),
                            "rng": RngState.capture().to_dict(),
                            "data": self.packed_task,
                        }
                    )
        if record is not None:
            self.history.append(record)
        self.saved_at = time.monotonic()


def _start(
    stack: ExitStack,
    folder: RunFolder,
    where: torch.device,
    method: str | Method | None,
    resume: bool,
    threads: int | None,
    batch_per_rank: bool,
    settings: dict[str, Any],
    cache: DataCache | None,
    lease: Lease | None,
) -> _StartedRun:
    """Check the folder and the settings, read the data, lock the folder and start the method."""
    state = folder.state_on_all_ranks()
    is_first = distributed.rank() == 0
    with distributed.raise_on_all_ranks():
        stored = folder.spec_to_resume(state, resume, has_settings=method is not None or bool(settings))
        if stored is None:
            check_outside(folder.path, settings.get("data"))
            spec = RunSpec.from_settings(method, **settings)
        else:
            threads = resolve_threads(stored, threads, folder.path)
            if batch_per_rank:
                settings |= scale_to_ranks({**stored["spec"]["recipe"], **settings}, settings)
            spec = restore_spec(stored, settings, method, folder.path)
        stack.enter_context(cpu_threads(threads))
        prepared = prepare(spec, cache, where).to(where)
        if batch_per_rank and stored is None:
            recipe = vars(prepared.spec.recipe)
            prepared = prepared.with_recipe(**scale_to_ranks(recipe, recipe))
        if is_first:
            lease = lease or stack.enter_context(folder.lock())
            if folder.read_spec() != state.spec:  # changed while this process was reading the data
                raise UserError(f"another process has started a run in {folder.path}; choose another --out")
        stack.enter_context(prepared.seed())
        learner = prepared.start()
        check_batches(learner)
        if not folder.has_checkpoint:
            learner.check_nets_differ()
        description = describe_training(prepared, learner, where)
        if stored is not None:
            check_same_run(stored, json.loads(json.dumps(description)), folder.path)
    return _StartedRun(folder, where, prepared, learner, description, stored is None, is_first, lease)


def describe_training(prepared: PreparedRun, method: Method, device: torch.device) -> dict[str, Any]:
    """The content of `spec.json` of a training run."""
    facts = {
        **prepared.facts(),
        **{name: file_sha256(file) for name, file in files_to_hash(prepared.spec).items()},
        "n_parameters": sum(p.numel() for p in method.net.parameters()),
        "needs_meta": method.needs_meta or (method.uses_trusted and prepared.task.meta is not None),
        "needs_noise_rate": method.needs_noise_rate,
    }
    return describe_run(
        FORMAT,
        prepared.spec.to_json(),
        facts,
        device,
        ranks=distributed.n_ranks(),
        numpy=np.__version__,
        stamps=dict(prepared.data.stamps),  # while these are the same, so is the data
        folder=current_folder(),  # relative paths of the specification start there
    )


def _restore(started: _StartedRun) -> None:
    """Continue from the last checkpoint, if there is one. Ranks other than 0 may not see it and receive a copy."""
    folder = started.folder
    if distributed.agree(None, started.writes and folder.has_checkpoint)[0]:  # no other process can write it now
        with TemporaryDirectory() as copies:
            file = folder.checkpoint
            if distributed.n_ranks() > 1:
                content = distributed.broadcast_from_rank0(checkpoint.newest(file).read_bytes)
                if distributed.rank() > 0:
                    file = Path(copies) / file.name
                    file.write_bytes(content)
            with distributed.raise_on_all_ranks(), blame_file(file):
                stored = checkpoint.load(file, started.device)
                position = checkpoint.restore_into(vars(TrainingState()), stored["position"])
                started.state = TrainingState(**position)
                checkpoint.restore(started.method, stored["method"])
                RngState.from_dict(stored["rng"]).restore()
                if started.device.type == "cuda" and distributed.n_ranks() > 1 and "cuda" in stored["rng"]:
                    torch.cuda.set_rng_state(stored["rng"]["cuda"][0], started.device)  # that of rank 0's device
    epoch = started.state.epoch
    records = distributed.broadcast_from_rank0(lambda: json.dumps(folder.cut_history(epoch)).encode())
    started.history = json.loads(records)


def _steps(
    started: _StartedRun, progress: Progress, caught: list[int], checkpoint_seconds: float
) -> Iterator[tuple[Record | None, int, bool]]:
    """Train. After each step, all ranks agree on whether a signal arrived and on whether a checkpoint is due.

    Yields the record of an epoch or None, the number of the signal or 0, and whether a checkpoint is due. If training
    diverged on one rank, or another process has taken over the folder, all ranks raise.
    """
    prepared = started.prepared
    training = train(started.method, prepared.task, prepared.truth, started.state)
    forecast = None
    if not progress.quiet and started.device.type == "cpu" and started.method.trains_network:
        forecast = Forecast(prepared.spec.recipe.epochs * len(started.method.loader) - started.steps_done)
    while True:
        record, error = None, None
        try:
            record = next(training)
            if started.lease is not None and started.lease.lost:
                started.lease.check()
        except StopIteration:
            return
        except (Diverged, LeaseLost) as e:
            error = e
        if record is None:
            progress.step()
            minutes = None if forecast is None else forecast.after_step()
            if minutes is not None and minutes > PATIENCE:
                progress.print(_advise(prepared, minutes))
        elif forecast is not None:
            minutes = forecast.after_epoch()
            if minutes is not None and minutes > PATIENCE:
                progress.print(f"about {format_duration(60 * minutes)} left")
        is_late = started.writes and time.monotonic() - started.saved_at >= checkpoint_seconds
        signum, any_late = distributed.agree(error, caught[0] if caught else 0, is_late)
        yield record, signum, bool(any_late)


def _watch(started: _StartedRun, progress: Progress, caught: list[int]) -> None:
    """Let a method without steps show its progress, and stop it after a signal."""

    def report(what: str, share: float) -> None:
        progress.describe(what, share)
        if caught and distributed.n_ranks() == 1:
            raise Stopped(caught[0], how_to_resume(started.folder.path, started.device))

    started.method.report_progress = report  # type: ignore[method-assign]


@contextmanager
def _add_advice(path: Path, where: torch.device) -> Iterator[None]:
    """Context manager: if another rank is lost, the error says how to resume."""
    try:
        yield
    except distributed.RankLostError as e:
        raise distributed.RankLostError(f"{e}; {how_to_resume(path, where)}") from e


def _make_progress(started: _StartedRun, quiet: bool) -> Progress:
    """The progress display. Accuracies against labels that may be wrong are marked as noisy."""
    prepared = started.prepared
    noisy = {"val_acc": prepared.task.noise_rate != 0, "test_acc": not prepared.truth.test_is_clean}
    labels = {name: f"{label} (noisy)" if noisy.get(name) else label for name, label in SHOWN.items()}
    epochs = prepared.spec.recipe.epochs
    return Progress(epochs, len(started.method.loader), started.steps_done, quiet or not started.writes, labels)


def _announce(started: _StartedRun, progress: Progress) -> None:
    """Print what the run learns from, and advice for a new or a slow run."""
    prepared = started.prepared
    progress.print(prepared.summarize())
    if started.is_new:
        n = prepared.truth.n_repeated
        if n:
            progress.print(f"rows that also appear in the trusted set are used only as trusted examples: {n}")
        _announce_copies(prepared, progress)


def _announce_copies(prepared: PreparedRun, progress: Progress) -> None:
    """Print how many trusted and test rows are copies of other rows, which make accuracies too high."""
    if progress.quiet:
        return
    task, data = prepared.task, vars(prepared.spec.data)
    settings = {
        "root": data["root"],
        "label": data["label"],
        "trusted": data["meta_data"],
        "drop": data["drop"] or None,
    }
    flags = [word for name, value in settings.items() for word in flag(name, value)]
    command = shlex.join(["warpi", "duplicates", data["data"], *flags])
    for line in describe_leaks(task.train, task.val, task.meta, prepared.truth.test, task.classes, command):
        progress.print(line)


def _advise(prepared: PreparedRun, minutes: float) -> str:
    """How long a training takes, and what would make it faster."""
    shape, net = prepared.task.shape, prepared.spec.recipe.net
    is_image = len(shape) == 3
    advice = ["use a GPU"]
    if is_image and shape[-1] > SMALL and not prepared.spec.data.data.lower().endswith((".npz", ".npy")):
        advice.append(f"--image-size {SMALL}")
    if isinstance(net, str) and net not in (*VECTOR_NETS, "resnet20"):
        advice.append(f"--net {'resnet20' if is_image else 'mlp'}")
    advice += ["fewer --epochs", "--limit for a first try"]
    return f"this will take about {format_duration(60 * minutes)} on this CPU; to make it faster: {', '.join(advice)}"
