"""A training run on disk: its settings, its folder, and the way back into it after a crash.

A run folder holds `spec.json` (settings, facts about the task, versions), `results.jsonl` (a line an epoch),
`checkpoint.safetensors` (all state) and, when the run is complete, `done`.
"""

import json
import platform
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

import warpi
from warpi import checkpoint
from warpi.atomic import append_line, one_writer, write_atomically
from warpi.data import load_dataset
from warpi.data.split import Loader
from warpi.engine import Position, Record, check_logs, check_weights, train
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

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit must be at least 1, got {self.limit}")


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the numbers of a run."""

    data: DataSpec
    method: str
    options: Mapping[str, Any]  # hyper-parameters of the method that differ from its defaults
    recipe: Recipe

    def to_json(self) -> dict[str, Any]:
        recipe = {f.name: getattr(self.recipe, f.name) for f in fields(Recipe)}
        if not isinstance(net := recipe["net"], str):
            named = net if hasattr(net, "__qualname__") else type(net)
            recipe["net"] = f"{named.__module__}.{named.__qualname__}"
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
        again = shlex.join(["warpi", "fit", "--out", str(path), "--resume"])
        super().__init__(f"stopped by {signal.Signals(signum).name}; go on with: {again}")
        self.signum = signum


def fit(
    out: Path | str,
    *,
    method: str | None = None,
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
    set takes the default that suits the data; the method is `warpi` unless one is named. With `resume` an interrupted
    run goes on where its last checkpoint was, and ends as if it had never been interrupted.
    """
    path, settings = Path(out), _plain(settings)
    if threads is not None:
        if threads < 1:
            raise UserError(f"threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    stored = read_spec(path)
    if stored is not None and not resume:
        raise UserError(f"{path} already holds a run; go on with it by --resume, or choose another --out")
    file = path / "checkpoint.safetensors"
    if stored is None and checkpoint.exists(file):
        raise UserError(f"{path} holds a checkpoint, but the spec.json it belongs to is gone; choose another --out")
    if stored is not None:
        settings, method = _same_settings(stored, settings, method, path)
    spec, task, truth = prepare(method or "warpi", **settings)
    where = pick_device(device)
    task, truth = task.to(where), truth.to(where)
    description = _describe(spec, task, truth, where)
    if stored is not None:
        _same_task(stored, json.loads(json.dumps(description)), path)

    with one_writer(path), seeded(derive(spec.recipe.seed, "training")):
        if read_spec(path) != stored:  # while this process was reading the data
            raise UserError(f"another process has begun a run in {path}; choose another --out")
        learner = make_method(spec.method, **spec.options)
        learner.start(task, spec.recipe)
        _check_batches(learner)
        at = _go_on(file, learner, where) if checkpoint.exists(file) else Position()
        history = _cut_results(path / "results.jsonl", at.epoch)
        progress = Progress(spec.recipe.epochs, len(learner.loader), at.epoch * len(learner.loader) + at.step, quiet)
        saved_at = time.monotonic()

        def save() -> None:
            check_logs(learner, at)
            check_weights(learner, at)
            state = {"method": checkpoint.state_of(learner), "position": vars(at), "rng": checkpoint.global_rng()}
            checkpoint.save(file, state)

        with progress, _signals() as caught, _board(path, at.epoch + 1) if tensorboard else nullcontext() as board:
            if stored is None:
                write_atomically(path / "spec.json", (json.dumps(description, indent=1) + "\n").encode())
            for record in train(learner, task, truth, at):
                if record is None:
                    progress.step()
                    due = time.monotonic() - saved_at >= checkpoint_seconds or bool(caught)
                    if not (due and learner.resumes_mid_epoch) and not caught:
                        continue
                else:
                    history.append(record)
                    append_line(path / "results.jsonl", json.dumps(record))
                    progress.line(record)
                    if board is not None:
                        for name, value in record.items():
                            board.add_scalar(name, value, int(record["epoch"]))
                if record is not None or learner.resumes_mid_epoch:
                    save()
                    saved_at = time.monotonic()
                if caught:
                    raise Stopped(caught[0], path)
        write_atomically(path / "done", b"")
    return Run(path, learner, task, truth, history)


def prepare(method: str, **settings: Any) -> tuple[RunSpec, Task, Truth]:
    """Settings to a full specification and the task it describes."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    settings = _plain(settings)
    names = {cls: {f.name for f in fields(cls)} for cls in (DataSpec, Recipe, type(METHODS[method]))}
    for name in settings:
        if not any(name in group for group in names.values()):
            raise unknown("setting", name, set().union(*names.values()))
    for cls, group in names.items():
        _check_types(cls, {name: settings[name] for name in group & settings.keys()})
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
    if where.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}; allowed: auto, cpu, cuda, cuda:0, ...")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there are {torch.cuda.device_count()} CUDA devices here, got {device!r}; use --device cpu")
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
            "needs_noise_rate": METHODS[spec.method].needs_noise_rate,
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
    parts = {**spec, "facts": stored.get("facts")} if isinstance(spec, dict) else {}
    for name, kind in (("method", str), ("options", dict), ("recipe", dict), ("seed", int), ("facts", dict)):
        if not isinstance(parts.get(name), kind):
            raise UserError(f"{file} is garbled: {name} is {parts.get(name)!r}; choose another --out")
    return stored


def _same_settings(
    stored: dict[str, Any], settings: Mapping[str, Any], method: str | None, path: Path
) -> tuple[dict[str, Any], str]:
    """The settings of the stored run; those given again must be the same."""
    spec = stored["spec"]
    flat = _plain({**spec["options"], **spec["recipe"], "seed": spec["seed"]})
    flat |= {f.name: spec[f.name] for f in fields(DataSpec) if f.name in spec}
    for name, value in {"method": method, **settings}.items():
        if name not in {**flat, "method": 0}:
            raise unknown("setting", name, flat)
        was = spec["method"] if name == "method" else flat[name]
        if isinstance(value, str | int | float | tuple) and was != value:
            raise UserError(f"{path} was begun with {name} = {was!r}, not {value!r}; choose another --out to change it")
    own = {name: value for name, value in settings.items() if not isinstance(value, str | int | float | tuple | None)}
    return {**flat, **own}, spec["method"]


def _same_task(stored: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """What the stored settings lead to now must be what they led to then."""
    if stored["spec"] != now["spec"]:
        raise UserError(f"{path} was made by other defaults (version {stored.get('version')}); choose another --out")
    for name in ("n_train", "n_meta", "n_val", "n_test", "n_classes", "noise_sha256"):
        was, got = stored["facts"].get(name), now["facts"][name]
        if was != got:
            raise UserError(f"the data of {path} has changed: {name} was {was}, is {got}; choose another --out")


def _go_on(file: Path, learner: Method, device: torch.device) -> Position:
    """Put a started method where the last checkpoint was."""
    state = checkpoint.load(file, device)
    checkpoint.restore(learner, state["method"])
    checkpoint.set_global_rng(state["rng"])
    return Position(**state["position"])


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they look when read from a flag: paths are text, lists are tuples, numbers are python's own."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, np.generic):
            return value.item()
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else value

    return {name: plain(value) for name, value in settings.items()}


def _check_types(cls: type, values: Mapping[str, Any]) -> None:
    """Settings from python must be of the types that their flags would give."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not _fits(value, hint := hints[name]):
            if get_origin(hint) is Literal and isinstance(value, str):
                raise unknown(name, value, map(str, get_args(hint)))
            raise UserError(f"{name} must be {hint if get_origin(hint) else hint.__name__}, got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(part, args[0]) for part in value)
    if hint in (int, float) and isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _check_batches(learner: Method) -> None:
    """A batch of one cannot be normalised; torch says so only at the first step, and in other words."""
    loaders = [value for value in vars(learner).values() if isinstance(value, Loader)]
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
