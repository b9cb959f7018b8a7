"""A training run on disk: its settings, its folder, and the way back into it after a crash.

A run folder holds `spec.json` (settings, facts about the task, versions), `results.jsonl` (a line an epoch),
`checkpoint.safetensors` (all state) and, when the run is complete, `done`.
"""

import json
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warpi
from warpi import checkpoint
from warpi.atomic import write_atomically
from warpi.data import load_dataset
from warpi.engine import Position, Record, check_finite, train
from warpi.errors import UserError, missing, unknown
from warpi.method import Method
from warpi.methods import METHODS, make_method
from warpi.noise import Noise
from warpi.progress import Progress
from warpi.recipe import Recipe
from warpi.rng import derive, seeded
from warpi.task import Task, Truth, make_task

FORMAT = "warpi-run/1"


@dataclass(frozen=True)
class DataSpec:
    """What to learn from."""

    data: str = "digits"  # a name of `warpi list datasets`, or a path: .npz .npy .csv .tsv .parquet, or an image folder
    root: str | None = None  # folder of the data set's files; default: the environment variable WARPI_DATA
    label: str | None = None  # column (or .npy file) of the labels
    image_size: int | None = None  # side of the images a folder is read at; default 224
    noise: str = "given"  # KIND:RATE of `warpi list noises`; "given" takes the labels as they are
    meta: int | None = None  # trusted examples held out of clean data, or taken of those marked as trusted
    meta_data: str | None = None  # a second file or folder with the trusted examples
    val: float = 0.1  # share of the noisy rows held out for validation
    test: float = 0.25  # share held out for testing where the data has no test set
    limit: int | None = None  # use only that many rows, for a quick try


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the numbers of a run."""

    data: DataSpec
    method: str
    options: Mapping[str, Any]  # hyper-parameters of the method that differ from its defaults
    recipe: Recipe

    def to_json(self) -> dict[str, Any]:
        recipe = asdict(self.recipe)
        if not isinstance(recipe["net"], str):
            recipe["net"] = f"{type(self.recipe.net).__module__}.{type(self.recipe.net).__qualname__}"
        seed = recipe.pop("seed")
        return {
            **asdict(self.data),
            "method": self.method,
            "options": asdict(make_method(self.method, **self.options)),
            "changed": dict(self.options),
            "recipe": recipe,
            "seed": seed,
        }


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
        super().__init__(f"stopped by {signal.Signals(signum).name}; go on with: warpi fit --out {path} --resume")
        self.signum = signum


def fit(
    out: Path | str,
    *,
    method: str = "warpi",
    resume: bool = False,
    device: str = "auto",
    threads: int | None = None,
    checkpoint_seconds: float = 300.0,
    tensorboard: bool = False,
    quiet: bool = True,
    **settings: Any,
) -> Run:
    """Train a method on data with noisy labels and leave a run folder behind.

    Settings are the fields of DataSpec, of Recipe and of the method, as they are flags of `warpi fit`; what is not
    set takes the default that suits the data. With `resume` an interrupted run goes on where its last checkpoint was,
    and ends as if it had never been interrupted.
    """
    path = Path(out)
    if threads is not None:
        torch.set_num_threads(threads)
    stored = _read_spec(path)
    if stored is not None and not resume:
        raise UserError(f"{path} already holds a run; go on with it by --resume, or choose another --out")
    if stored is not None:
        settings, method = _same_settings(stored, settings, method, path)
    spec, task, truth = prepare(method, **settings)
    where = pick_device(device)
    task, truth = task.to(where), truth.to(where)
    description = _describe(spec, task, truth, where)
    if stored is not None and stored["spec"] != json.loads(json.dumps(description["spec"])):
        raise UserError(f"{path} was made by other defaults (version {stored['version']}); choose another --out")

    with _folder(path), seeded(derive(spec.recipe.seed, "training")):
        learner = make_method(spec.method, **spec.options)
        learner.start(task, spec.recipe)
        if stored is None:
            write_atomically(path / "spec.json", (json.dumps(description, indent=1) + "\n").encode())
        at, file = Position(), path / "checkpoint.safetensors"
        if checkpoint.exists(file):
            state = checkpoint.load(file)
            checkpoint.restore(learner, state["method"])
            at = Position(**state["position"])
            checkpoint.set_global_rng(state["rng"])
        history = _cut_results(path / "results.jsonl", at.epoch)
        progress = Progress(spec.recipe.epochs, len(learner.loader), at.epoch * len(learner.loader) + at.step, quiet)
        board = _board(path) if tensorboard else None
        saved_at = time.monotonic()

        def save() -> None:
            check_finite(learner, at)
            state = {"method": checkpoint.state_of(learner), "position": vars(at), "rng": checkpoint.global_rng()}
            checkpoint.save(file, state)

        with progress, _signals() as caught:
            for record in train(learner, task, truth, at):
                if record is None:
                    progress.step()
                    due = time.monotonic() - saved_at >= checkpoint_seconds or bool(caught)
                    if not (due and learner.resumes_mid_epoch) and not caught:
                        continue
                else:
                    history.append(record)
                    _append(path / "results.jsonl", record)
                    progress.line(record)
                    if board is not None:
                        for name, value in record.items():
                            board.add_scalar(name, value, int(record["epoch"]))
                if record is not None or learner.resumes_mid_epoch:
                    save()
                    saved_at = time.monotonic()
                if caught:
                    raise Stopped(caught[0], path)
        if board is not None:
            board.close()
        write_atomically(path / "done", b"")
    return Run(path, learner, task, truth, history)


def prepare(method: str, **settings: Any) -> tuple[RunSpec, Task, Truth]:
    """Settings to a full specification and the task it describes."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    names = {cls: {f.name for f in fields(cls)} for cls in (DataSpec, Recipe, type(METHODS[method]))}
    for name in settings:
        if not any(name in group for group in names.values()):
            raise unknown("setting", name, set().union(*names.values()))
    chosen = {k: v for k, v in settings.items() if k in names[DataSpec]}
    data = DataSpec(**chosen)
    noise = Noise.parse(data.noise)
    root = Path(data.root) if data.root else None
    dataset, defaults = load_dataset(data.data, root=root, label=data.label, image_size=data.image_size)
    meta_data = None
    if data.meta_data:
        meta_data, _ = load_dataset(
            data.meta_data, root=root, label=data.label, image_size=data.image_size, like=dataset
        )
    other = load_dataset(noise.other_name, root=root)[0] if noise.other_name else None
    if data.meta is None and meta_data is None:
        chosen["meta"] = defaults.get("meta")
    data = DataSpec(**chosen)
    recipe = Recipe(**{k: v for k, v in {**defaults, **settings}.items() if k in names[Recipe]})
    options = {k: v for k, v in settings.items() if k in names[type(METHODS[method])]}
    options = {k: v for k, v in options.items() if v != getattr(METHODS[method], k)}
    task, truth = make_task(
        dataset,
        noise,
        meta=data.meta,
        val=data.val,
        test=data.test,
        limit=data.limit,
        seed=recipe.seed,
        meta_data=meta_data,
        other=other,
    )
    return RunSpec(data, method, options, recipe), task, truth


def pick_device(device: str) -> torch.device:
    """`auto` is a CUDA device where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as e:
        raise UserError(f"unknown device {device!r}; allowed: auto, cpu, cuda, cuda:0, ...") from e
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device here; use --device cpu")
    return where


def _describe(spec: RunSpec, task: Task, truth: Truth, device: torch.device) -> dict[str, Any]:
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
            "noise_sha256": truth.noise_hash,
            "wrong_share": task.noise_rate,
            "test_labels": "clean" if truth.test_is_clean else "given",
            "needs_meta": METHODS[spec.method].needs_meta,
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


def _read_spec(path: Path) -> dict[str, Any] | None:
    file = path / "spec.json"
    try:
        stored: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as e:
        raise UserError(f"cannot read {file}: {e}") from e
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise UserError(f"{file} is not of the format {FORMAT!r}; choose another --out")
    return stored


def _same_settings(
    stored: dict[str, Any], settings: Mapping[str, Any], method: str, path: Path
) -> tuple[dict[str, Any], str]:
    """The settings of the stored run; those given again must be the same."""
    spec = stored["spec"]
    if spec["method"] not in METHODS:
        raise unknown("method", spec["method"], METHODS)
    flat = {**spec["options"], **spec["recipe"], "seed": spec["seed"]}
    flat |= {f.name: spec[f.name] for f in fields(DataSpec)}
    flat["milestones"] = tuple(flat["milestones"])
    for name, value in {**settings, "method": method}.items():
        was = spec["method"] if name == "method" else flat.get(name, value)
        if value is not None and isinstance(value, str | int | float | tuple) and was != value:
            raise UserError(f"{path} was begun with {name} = {was!r}, not {value!r}; choose another --out to change it")
    own = {name: value for name, value in settings.items() if not isinstance(value, str | int | float | tuple | None)}
    return {**flat, **own}, spec["method"]


def _cut_results(file: Path, epochs: int) -> list[Record]:
    """The records of the epochs that the checkpoint knows; what a crash left after them is cut off."""
    lines = file.read_text().splitlines(keepends=True)[:epochs] if file.exists() else []
    write_atomically(file, "".join(lines).encode())
    return [json.loads(line) for line in lines]


def _append(file: Path, record: Record) -> None:
    try:
        with open(file, "a") as f:
            f.write(json.dumps(record) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {file}: {e.strerror}; the last checkpoint is intact, go on by --resume") from e


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """A folder that can be written to, and that no other process trains in."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "w")  # noqa: SIM115
    except OSError as e:
        raise UserError(f"cannot write to {path}: {e.strerror}; choose another --out") from e
    with lock:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process dies
            except OSError as e:
                raise UserError(f"another process is training in {path}; wait for it, or choose another --out") from e
        yield


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


def _board(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise missing("tensorboard", "--tensorboard", "track") from e
    return SummaryWriter(str(path / "tensorboard"))
