"""Send the records of a run to TensorBoard, MLflow or Weights & Biases as well.

Training uses only `open_trackers`. With or without a tracker, `results.jsonl` in the run folder has every record.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from warpi.errors import UserError, first_line, missing_package, unknown
from warpi.utils.files import read_json, write_json
from warpi.utils.settings import split_names
from warpi.utils.terminal import say

FILE = "tracking.json"  # the id of the run in each tool, so that a resumed run continues there
PROJECT = "warpi"  # name of the experiment (MLflow) or project (W&B), unless the environment names one
Numbers = Mapping[str, float | None]


class Tracker(Protocol):
    """One run in one tool."""

    def log(self, epoch: int, numbers: Mapping[str, float]) -> None: ...

    def close(self, done: bool) -> None: ...


class _TensorBoard:
    """Event files in `folder/tensorboard`. Records of an earlier process for this epoch and later ones are hidden."""

    def __init__(self, folder: Path, about: Mapping[str, Any], epoch: int) -> None:  # noqa: ARG002
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise missing_package("tensorboard", "--track tensorboard", "track") from e
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=epoch)

    def log(self, epoch: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, epoch)

    def close(self, done: bool) -> None:  # noqa: ARG002
        self.writer.close()


class _MLflow:
    """A run on the MLflow server, or in the database or folder, that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, about: Mapping[str, Any], epoch: int) -> None:  # noqa: ARG002
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as e:
            raise missing_package("mlflow", "--track mlflow", "mlflow") from e
        self.client: Any = MlflowClient()
        self.metric = Metric
        known = _known_id(folder, "mlflow")
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self.client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
            run = self.client.create_run(experiment_id, run_name=folder.resolve().name)
            params = [Param(key, str(value)[:6000]) for key, value in _flatten(about).items()]
            self.client.log_batch(run.info.run_id, params=params)
        else:
            run = self.client.get_run(known)
            self.client.update_run(known, status="RUNNING")
        self.id: str = run.info.run_id
        self.last = run.data.metrics.get("epoch", 0)  # epochs after the last checkpoint are trained again
        _store_id(folder, "mlflow", self.id)

    def log(self, epoch: int, numbers: Mapping[str, float]) -> None:
        if epoch > self.last:
            now = int(1000 * time.time())
            self.client.log_batch(self.id, [self.metric(name, value, now, epoch) for name, value in numbers.items()])

    def close(self, done: bool) -> None:
        self.client.set_terminated(self.id, status="FINISHED" if done else "FAILED")


class _WandB:
    """A run in Weights & Biases, stored in `folder/wandb` until it is sent. WANDB_MODE=offline sends nothing."""

    def __init__(self, folder: Path, about: Mapping[str, Any], epoch: int) -> None:  # noqa: ARG002
        try:
            import wandb
        except ImportError as e:
            raise missing_package("wandb", "--track wandb", "wandb") from e
        folder.mkdir(parents=True, exist_ok=True)
        name = folder.resolve().name
        options = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": name, "dir": str(folder)}
        known = _known_id(folder, "wandb")
        if known is not None:
            options |= {"id": known, "resume": "allow"}
        silent = wandb.Settings(console="off", silent=True)
        self.run: Any = wandb.init(config=dict(about), settings=silent, **options)  # type: ignore[arg-type]
        _store_id(folder, "wandb", self.run.id)

    def log(self, epoch: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=epoch)

    def close(self, done: bool) -> None:
        self.run.finish(exit_code=0 if done else 1)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WandB,
}


@contextmanager
def open_trackers(
    names: str | Sequence[str], folder: Path, about: Mapping[str, Any], epoch: int
) -> Iterator[Callable[[Numbers], None]]:
    """Context manager: yields a function that sends the record of an epoch to the tools with these names.

    `about` contains the settings of the run, `epoch` is the first one that will be sent. If a tool cannot be opened,
    raises an error. If one fails later, for example because its server is down, prints a warning and continues without
    it.
    """
    names = split_names(names) if isinstance(names, str) else names
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    with ExitStack() as stack:
        trackers = [stack.enter_context(_open(name, folder, about, epoch)) for name in dict.fromkeys(names)]

        def log(record: Numbers) -> None:
            for send in trackers:
                send(record)

        yield log


@contextmanager
def _open(name: str, folder: Path, about: Mapping[str, Any], epoch: int) -> Iterator[Callable[[Numbers], None]]:
    try:
        tracker = TRACKERS[name](folder, about, epoch)
    except UserError:
        raise
    except Exception as e:  # the tools have no common class of errors
        raise UserError(f"--track {name}: {first_line(e)}; correct its settings, or omit --track {name}") from e
    works = True

    def attempt(work: Callable[[], None]) -> None:
        nonlocal works
        try:
            if works:
                work()
        except Exception as e:
            works = False
            say(f"warpi: warning: {name} failed ({first_line(e)}); the run continues without it", error=True)

    def log(record: Numbers) -> None:
        numbers = {key: float(value) for key, value in record.items() if value is not None}
        attempt(lambda: tracker.log(int(numbers["epoch"]), numbers))

    done = False
    try:
        yield log
        done = True
    finally:
        attempt(lambda: tracker.close(done))


def _known_id(folder: Path, name: str) -> str | None:
    """The id of the run in a tool, if it was tracked there before."""
    try:
        stored = read_json(folder / FILE, "remove it to track the run as a new one")
    except FileNotFoundError:
        return None
    run_id = stored.get(name) if isinstance(stored, dict) else None
    return run_id if isinstance(run_id, str) else None


def _store_id(folder: Path, name: str, id: str) -> None:
    file = folder / FILE
    stored = json.loads(file.read_text()) if file.exists() else {}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, {**stored, name: id})


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings, with names such as `recipe.lr`. Settings without a value are omitted."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        elif value not in (None, "", [], ()):
            flat[prefix + name] = value
    return flat
