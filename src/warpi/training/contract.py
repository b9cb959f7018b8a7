"""Check that a method keeps the contract of `Method`, on small generated data. Meant for methods outside warpi.

A method passes if it trains, predicts probabilities, depends on its seed only, resumes exactly, and states what it
needs.
"""

import copy
import inspect
import logging
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import islice
from math import isfinite, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from warpi.data.augment import Crop
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.errors import UserError, first_line
from warpi.training import checkpoint
from warpi.training.cuda_graph import graph_steps
from warpi.training.engine import Record, TrainingState, check_batches, train
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task
from warpi.utils.seeding import RngState, seeded


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    result: Literal["ok", "skipped", "failed"]
    note: str = ""


class _Skipped(Exception):
    """Why a check does not apply."""


class _Failed(Exception):
    """What is wrong."""


class _Dropout(nn.Module):
    """A small network that draws from torch's global generator."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(prod(shape), 16)
        self.last = nn.Linear(16, n_classes)

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.first(x.flatten(1)).relu(), 0.2, self.training)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(self.features(x))
        return z


_UNSCALED = Scale(torch.tensor(0.0), torch.tensor(1.0))
_RECIPE = Recipe(epochs=2, batch_size=16, meta_batch_size=8, lr=0.05, seed=100)


@dataclass(frozen=True)
class _Run:
    """A trained method."""

    method: Method
    records: list[Record]
    state: dict[str, Any]


def check_method(method: Method) -> Iterator[Finding]:
    """Run all checks on copies of a method that was never started. Each takes about a second for a small method."""
    for name, check in _CHECKS.items():
        try:
            with _quiet():
                check(method)
        except _Skipped as reason:
            yield Finding(name, "skipped", str(reason))
        except _Failed as problem:
            yield Finding(name, "failed", str(problem))
        except Exception as error:  # user code may raise anything
            yield Finding(name, "failed", _locate(error, method))
        else:
            yield Finding(name, "ok")


def _check_help(method: Method) -> None:
    for f in fields(method):
        if len(f.metadata.get("help", "").split()) < 3:
            raise _Failed(f"{f.name} has no help text; write {f.name}: ... = setting(default, 'what it does')")
        if not isinstance(getattr(method, f.name), str | int | float | bool | tuple | None):
            raise _Failed(f"{f.name} must be a number, text, bool, tuple or None, because it becomes a flag")


def _check_training(method: Method) -> None:
    for task in (_vectors(), _images()):
        before = _data_of(task[0])
        run = _train(method, task)
        if not _same(before, _data_of(task[0])):
            raise _Failed("training changes the data; copy a batch before you change it")
        if method.trains_network and "loss" not in run.records[0]:
            raise _Failed('step does not log a loss; end it with return {"loss": loss.detach()}')
        if not all(isfinite(value) for record in run.records for value in record.values()):
            raise _Failed("a log is not finite")
        fresh = _start(method, task[0])
        weights = [(p, q) for p, q in zip(_weights(fresh), _weights(run.method), strict=True)]
        if method.trains_network and all(torch.equal(p, q) for p, q in weights):
            raise _Failed("no weight has changed; step must update the networks, for example by `descend`")


def _check_prediction(method: Method) -> None:
    task, truth = _vectors()
    run = _train(method, (task, truth))
    assert truth.test is not None
    x = next(iter(truth.test.batches(30))).x
    p = run.method.predict(x)
    if p.shape != (len(x), task.n_classes):
        raise _Failed(f"predict returned the shape {tuple(p.shape)} for {len(x)} rows and {task.n_classes} classes")
    if p.requires_grad:
        raise _Failed("predict returned a tensor that requires a gradient; decorate it with @torch.no_grad()")
    if not (bool((p >= 0).all()) and torch.allclose(p.sum(1), torch.ones(len(x)), atol=1e-4)):
        raise _Failed("predict returned rows that are not probabilities; end it with .softmax(dim=1)")
    if not torch.equal(run.method.predict(x), p):
        raise _Failed("two predictions of the same rows differ; use `evaluating(nets)`, and no random numbers")
    if not torch.allclose(run.method.predict(x[:7]), p[:7], atol=1e-5):
        raise _Failed("a prediction depends on the other rows of the batch; use `evaluating(nets)`")


def _check_logs(method: Method) -> None:
    for log in islice(_start(method, _vectors()[0]).epoch(0), 2):
        for name, value in log.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise _Failed(f"step logs {name!r} with its graph, which fills the memory; log {name}.detach()")


def _check_seed(method: Method) -> None:
    task = _vectors()
    first, again = _train(method, task, seed=1), _train(method, task, seed=2)
    if not _same(first.state, again.state):
        raise _Failed("two runs with the same seed differ; draw random numbers from self.generator only")
    other = _start(method, task[0], replace(_RECIPE, seed=101))
    if any(torch.equal(p, q) for p, q in _matrices(_start(method, task[0]), other)):
        raise _Failed("another seed starts with the same weights; build networks by recipe.make_net or make_module")
    blind = replace(task[0], val=None, noise_rate=task[0].noise_rate if method.needs_noise_rate else None)
    if not _same(_train(method, (blind, task[1])).state, first.state):
        raise _Failed(
            "it uses the validation rows or the true noise rate; if it must know the rate, set needs_noise_rate"
        )


def _check_resume(method: Method) -> None:
    task = _vectors()
    recipe = replace(_RECIPE, net=_Dropout)
    with seeded(1):
        whole = _start(method, task[0], recipe)
        items = len(whole.loader) + 1  # one per step, and the record
        at = TrainingState()
        cuts: dict[str, dict[str, Any]] = {}
        for i, _ in enumerate(train(whole, *task, at), 1):
            if i == items // 2 and method.resumes_mid_epoch and method.trains_network:
                cuts["within an epoch"] = _store(whole, at)
            if i == items:
                cuts["after an epoch"] = _store(whole, at)
        end = _store(whole)
    for when, state in cuts.items():
        with seeded(2):
            resumed = _start(method, task[0], recipe)
            checkpoint.restore(resumed, copy.deepcopy(state["method"]))
            RngState.from_dict(state["rng"]).restore()
            for _ in train(resumed, *task, TrainingState(**copy.deepcopy(state["position"]))):
                pass
            differ = [k for k, v in _store(resumed)["method"].items() if not _same(v, end["method"].get(k))]
        if differ:
            raise _Failed(
                f"a run resumed {when} ends with a different state ({', '.join(differ)}); create all state in "
                "create_state, as tensors, numbers, networks, optimizers, or lists and dicts of them"
            )


def _check_without_trusted(method: Method) -> None:
    task = replace(_vectors()[0], meta=None)
    if not method.needs_meta:
        try:
            list(islice(_start(method, task).epoch(0), 2))
        except Exception as error:  # user code may raise anything
            why = _locate(error, method)
            raise _Failed(f"it cannot be trained without trusted rows; set needs_meta = True ({why})") from error
        return
    try:
        _start(method, task)
    except UserError:
        return
    raise _Failed("needs_meta is True, but it starts without trusted rows; call super().start or super().check")


def _check_tiny(method: Method) -> None:
    """Four training rows either train or are refused with a `UserError`."""
    x = torch.arange(16.0).reshape(8, 2) % 5
    y = torch.arange(8) % 2
    data = Dataset("tiny", TensorExamples(x, _UNSCALED), y, ("a", "b"), clean=y)
    task, truth = make_task(data, "pair:0.2", meta=2, val=0.0, test=0.25, seed=3)
    try:
        _train(method, (task, truth), replace(_RECIPE, batch_size=64, meta_batch_size=64, epochs=1))
    except UserError:
        return


def _check_captured(method: Method) -> None:
    """Steps as a CUDA graph would run them. A CPU runs the body of the graph, from the same planned batches."""
    if not method.trains_network:
        raise _Skipped("it has no training steps")
    task = _vectors()
    with seeded(1):
        captured = _start(method, task[0])
        with graph_steps(captured, always=True) as graphed:
            for _ in train(captured, *task):
                pass
        state = _store(captured)
    assert graphed is not None
    if graphed.why:
        raise _Skipped(f"steps cannot be recorded and run one by one on a GPU: {graphed.why}")
    if not graphed.steps:
        raise _Skipped("its epochs do not call step")
    if not _same(state["method"], _train(method, task).state):
        raise _Failed("recorded steps give different results; keep what changes from step to step in tensors")


_CHECKS: dict[str, Callable[[Method], None]] = {
    "settings have help texts": _check_help,
    "trains on vectors and images": _check_training,
    "predicts probabilities": _check_prediction,
    "logs do not keep the graph": _check_logs,
    "depends on its seed only": _check_seed,
    "resumes exactly": _check_resume,
    "states whether it needs trusted rows": _check_without_trusted,
    "trains on tiny data or refuses it": _check_tiny,
    "captured steps equal plain steps": _check_captured,
}


def _vectors() -> tuple[Task, Truth]:
    rng = torch.Generator().manual_seed(5)
    y = torch.arange(180) % 3
    x = torch.randn(180, 6, generator=rng) + 2 * nn.functional.one_hot(y, 6)
    data = Dataset("vectors", TensorExamples(x, _UNSCALED), y, ("a", "b", "c"), clean=y)
    return make_task(data, "pair:0.3", meta=12, seed=3)


def _images() -> tuple[Task, Truth]:
    rng = torch.Generator().manual_seed(5)
    y = torch.arange(120) % 3
    x = torch.randint(256, (120, 3, 6, 6), generator=rng, dtype=torch.uint8)
    x[torch.arange(120), y] //= 2  # one channel per class is darker
    images = TensorExamples(x, Scale(torch.tensor(127.0), torch.tensor(64.0)), Crop(6, pad=2))
    return make_task(Dataset("images", images, y, ("a", "b", "c"), clean=y), "pair:0.3", meta=12, seed=3)


def _start(method: Method, task: Task, recipe: Recipe = _RECIPE) -> Method:
    started = replace(method)
    started.start(task, recipe)
    check_batches(started)
    return started


def _train(method: Method, task: tuple[Task, Truth], recipe: Recipe = _RECIPE, seed: int = 1) -> _Run:
    with seeded(seed):
        started = _start(method, task[0], recipe)
        records = [record for record in train(started, *task) if record is not None]
        return _Run(started, records, _store(started)["method"])


def _store(method: Method, at: TrainingState | None = None) -> dict[str, Any]:
    """The state of a method, written to a checkpoint and read again."""
    state = {
        "method": checkpoint.state_of(method),
        "position": vars(at or TrainingState()),
        "rng": RngState.capture().to_dict(),
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "state", state)
        return checkpoint.load(Path(folder) / "state")


def _same(a: Any, b: Any) -> bool:
    """Whether nested values are equal bit by bit, except for times."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a if k != "seconds")
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _weights(method: Method) -> list[Tensor]:
    return [p.detach().clone() for net in method.nets for p in net.parameters()]


def _matrices(a: Method, b: Method) -> list[tuple[Tensor, Tensor]]:
    """The weights of two methods, without biases, which may start at zero."""
    return [(p, q) for p, q in zip(_weights(a), _weights(b), strict=True) if p.ndim > 1]


def _data_of(task: Task) -> list[Tensor]:
    splits = [split for split in (task.train, task.meta) if split is not None]
    return [t.clone() for split in splits for t in (split.y, next(iter(split.batches(1000))).x)]


def _locate(error: Exception, method: Method) -> str:
    """The message of an error, preceded by the line of the method's file that caused it."""
    file = inspect.getfile(type(method))
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    location = f"{Path(file).name}:{frames[-1]}: " if frames else ""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{location}{kind}{first_line(error)}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: suppress warnings about the generated data."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
