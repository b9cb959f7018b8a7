"""The one training loop."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from warpi.errors import UserError
from warpi.training.cuda_graph import graph_steps
from warpi.training.method import Log, Method, evaluating
from warpi.training.metrics import evaluate
from warpi.training.task import Task, Truth
from warpi.utils import distributed

Record = dict[str, float]
"""What is known after an epoch: mean of the logs, scores, learning rate, seconds. One line of results.jsonl."""


class Diverged(UserError):
    """A log, a weight or a prediction is no longer a finite number."""


@dataclass
class TrainingState:
    """How far a run has come, apart from the method's own state. All a checkpoint needs besides that."""

    epoch: int = 0
    step: int = 0  # steps done in this epoch
    seconds: float = 0.0  # time spent in this epoch
    sums: dict[str, Tensor] = field(default_factory=dict)  # of the logs of this epoch, on the device
    counts: dict[str, int] = field(default_factory=dict)  # of their terms: not every step need log everything

    def add(self, log: Log) -> None:
        for name, value in log.items():
            value = torch.as_tensor(value).detach()
            if name in self.sums:
                self.sums[name].add_(value)
            else:
                self.sums[name] = value.to(torch.float64, copy=True)
            self.counts[name] = self.counts.get(name, 0) + 1
        self.step += 1


def train(
    method: Method, task: Task, truth: Truth | None = None, at: TrainingState | None = None
) -> Iterator[Record | None]:
    """Run a started method to the end of its recipe. Yields None after a step and a Record after an epoch.

    Whoever iterates may store `method` and `at` between two items and go on from them later: the run will be the
    same, bit for bit, on the same kind of CPU.
    """
    with graph_steps(method):
        yield from _epochs(method, task, truth, at or TrainingState())


def _epochs(method: Method, task: Task, truth: Truth | None, at: TrainingState) -> Iterator[Record | None]:
    recipe = method.recipe
    for t in range(at.epoch, recipe.epochs):
        steps = len(method.loader)
        lr = _set_lr(method, recipe.lr_at(t, method.beginnings, (at.step + 1) / steps))
        began = time.perf_counter() - at.seconds
        for log in method.epoch(t):
            check_log(log, method)
            at.add(log)
            method.update_averages(t * steps + at.step)
            if recipe.lr_warmup:
                lr = _set_lr(method, recipe.lr_at(t, method.beginnings, min(at.step + 1, steps) / steps))
            at.seconds = time.perf_counter() - began
            if task.train.y.device.type == "cpu" or at.step % 50 == 0:  # reading a number makes a GPU wait
                check_logs(method, at)
            yield None
        settle(method, at)
        check_logs(method, at)
        check_weights(method, at)
        record: Record = {"epoch": t + 1, "lr": lr}
        record |= {name: total.item() / at.counts[name] for name, total in at.sums.items()}
        record |= score(method, task, truth, at)
        record["seconds"] = time.perf_counter() - began
        at.epoch, at.step, at.seconds, at.sums, at.counts = t + 1, 0, 0.0, {}, {}
        yield record


def _set_lr(method: Method, lr: float) -> float:
    """Give all optimizers of a method this learning rate, in place where a captured step reads it."""
    for optimizer in method.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
    return lr


def score(method: Method, task: Task, truth: Truth | None, at: TrainingState | None = None) -> Record:
    """Scores of the method as it is now, in evaluation mode."""

    def predict(x: Tensor) -> Tensor:
        p = method.predict(x)
        _check_finite({"a prediction": p}, method, at or TrainingState())
        if not bool(((p >= -1e-4).all(1) & ((p.sum(1) - 1).abs() < 0.01)).all()):
            name = type(method).__name__
            raise UserError(f"{name}.predict gave rows that are no probabilities; end it with .softmax(dim=1)")
        return p

    record: Record = {}
    with evaluating(method.nets):
        for name, split in (("val", task.val), ("test", truth.test if truth else None)):
            if split is not None:
                s = evaluate(predict, split)
                record |= {f"{name}_acc": s.acc, f"{name}_nll": s.nll, f"{name}_ece": s.ece}
    return record


def settle(method: Method, at: TrainingState) -> None:
    """What each rank knows of its own share, averaged: logs, and BatchNorm's running statistics.

    A mean of moving averages is the moving average of the means, so that this may be done at any time.
    """
    held = [net for v in vars(method).values() for net in (v if isinstance(v, list) else [v])]  # averaged ones too
    nets = [net for net in held if isinstance(net, nn.Module)]
    norms = [m for net in nets for m in net.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    statistics = [t for norm in norms for t in (norm.running_mean, norm.running_var) if t is not None]
    distributed.average([*at.sums.values(), *statistics])


def check_batches(method: Method) -> None:
    """Refuse batch sizes that the first step could not use. torch would only fail at that step, less clearly."""
    loaders = [method.loader, *([method.meta_loader] if method.needs_meta else [])]
    modules = [module for net in method.nets for module in net.modules()]
    n = 1 if method.recipe.sync_batchnorm else distributed.ranks()  # parts of a batch that are normalized separately
    if any(x.batch_size == n for x in loaders) and any(isinstance(m, _BatchNorm) for m in modules):
        least = f"--batch-size and --meta-batch-size >= {2 * n}" + (" or --sync-batchnorm" if n > 1 else "")
        raise UserError(f"batches of 1 example cannot be trained with BatchNorm; {least}")
    kinds = (("", "noisy", method.least_batch), ("meta-", "trusted", method.least_meta_batch))
    for loader, (prefix, kind, least_per_rank) in zip(loaders, kinds, strict=False):
        needed = least_per_rank * distributed.ranks()
        if loader.batch_size < needed:
            raise UserError(
                f"{type(method).__name__} needs {needed} {kind} examples per step, got {loader.batch_size}; use "
                f"--{prefix}batch-size >= {needed}, and as many {kind} examples"
            )


def check_log(log: Log, method: Method) -> None:
    """A step says what it did: a mistake in a method of the user's own is named where it is made."""
    name = type(method).__name__
    if not isinstance(log, Mapping):
        got = "None" if log is None else type(log).__name__
        raise UserError(f'{name}.step gave {got}, a dict of numbers is needed; end it with return {{"loss": loss}}')
    for key, value in log.items():
        if key in ("epoch", "lr", "seconds") or str(key).startswith(("val_", "test_")):
            raise UserError(f"{name}.step gave {key!r}, which is what the engine writes itself; choose another name")
        if not isinstance(value, SupportsFloat) or (isinstance(value, Tensor) and value.numel() != 1):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{name}.step gave {got} as {key!r}, one number is needed; average it, or leave it out")


def check_logs(method: Method, at: TrainingState) -> None:
    """Stop at the first log that is not a finite number: a sum never recovers from one."""
    _check_finite(at.sums, method, at)


def check_weights(method: Method, at: TrainingState) -> None:
    """A step can spoil the weights after a finite loss; such weights are neither scored nor stored."""
    for net in method.nets:
        _check_finite({f"a weight of {name}": p.detach() for name, p in net.named_parameters()}, method, at)


def _check_finite(values: Mapping[str, Tensor], method: Method, at: TrainingState) -> None:
    for name, value in values.items():
        if not value.isfinite().all():
            raise Diverged(
                f"{name} became {value[~value.isfinite()][0].item()} at epoch {at.epoch + 1}, step {at.step} "
                f"(lr {method.lr:g}); lower --lr or --meta-lr, or check the inputs"
            )
