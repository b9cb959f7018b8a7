"""The training loop, shared by all methods."""

import math
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
from warpi.training.metrics import compute_scores
from warpi.training.outputs import share_rows
from warpi.training.task import Task, Truth
from warpi.utils import distributed
from warpi.utils.devices import cpu_threads

SMALL_STEP = 2**23
"""Multiplications per forward pass; below, a second thread saves less time than it takes to wait for it."""
Record = dict[str, float]
"""Results of an epoch: means of the logs, scores, learning rate, seconds. One line of results.jsonl."""


class Diverged(UserError):
    """A log, a weight or a prediction is not finite."""


@dataclass
class TrainingState:
    """The position of a run. Together with the state of the method, it is all that a checkpoint needs."""

    epoch: int = 0
    step: int = 0  # steps done in this epoch
    seconds: float = 0.0  # time spent in this epoch
    sums: dict[str, Tensor] = field(default_factory=dict)  # sums of the logs of this epoch, on the device
    counts: dict[str, int] = field(default_factory=dict)  # number of terms; a step may log only some names

    def add(self, log: Log) -> None:
        for name, value in log.items():
            add_to_sum(self.sums, name, torch.as_tensor(value).detach())
            self.counts[name] = self.counts.get(name, 0) + 1
        self.step += 1

    def start_epoch(self, epoch: int) -> None:
        vars(self).update(vars(TrainingState(epoch)))


def add_to_sum(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add a value to a sum in place, as CUDA graphs require."""
    if name in sums:
        sums[name].add_(value)
    else:
        sums[name] = value.to(torch.float64, copy=True)


def train(
    method: Method, task: Task, truth: Truth | None = None, at: TrainingState | None = None
) -> Iterator[Record | None]:
    """Run a started method to the end of its recipe. Yields None after each step and a Record after each epoch.

    The caller may store `method` and `at` between two items. Training resumed from them gives bitwise the same
    results on the same kind of CPU.
    """
    with graph_steps(method):
        yield from _epochs(method, task, truth, at or TrainingState())


def _epochs(method: Method, task: Task, truth: Truth | None, at: TrainingState) -> Iterator[Record | None]:
    recipe = method.recipe
    for t in range(at.epoch, recipe.epochs):
        steps = len(method.loader)
        factor = method.lr_factor(t)
        lr = _set_lr(method, factor * recipe.lr_at(t, method.schedule_starts, (at.step + 1) / steps))
        began = time.perf_counter() - at.seconds
        synced = method.loader.count
        for log in _one_thread(method.epoch(t)) if _has_small_steps(method) else method.epoch(t):
            check_log(log, method)
            sync_rows(method, synced)
            synced = method.loader.count
            at.add(log)
            method.update_averages(t * steps + at.step)
            if recipe.lr_warmup:
                lr = _set_lr(method, factor * recipe.lr_at(t, method.schedule_starts, min(at.step + 1, steps) / steps))
            at.seconds = time.perf_counter() - began
            if task.train.y.device.type == "cpu" or at.step % 50 == 0:  # reading a number waits for the GPU
                _check_finite(at.sums, method, at)
            yield None
        average_over_ranks(method, at)
        check_state(method, at)
        record: Record = {"epoch": t + 1, "lr": lr}
        record |= {name: total.item() / at.counts[name] for name, total in at.sums.items()}
        record |= score(method, task, truth, at)
        record["seconds"] = time.perf_counter() - began
        at.start_epoch(t + 1)
        yield record


def _has_small_steps(method: Method) -> bool:
    """Whether threads would wait for each other longer than they compute: a small network of dense layers on a CPU."""
    weights = [p for net in method.nets for p in net.parameters()]
    is_dense = len(method.task.shape) == 1 and all(p.dim() <= 2 for p in weights)  # others use a weight several times
    products = sum(p.numel() for p in weights) * method.loader.batch_size
    return method.task.device.type == "cpu" and method.trains_network and is_dense and products <= SMALL_STEP


def _one_thread(logs: Iterator[Log]) -> Iterator[Log]:
    """The same steps, computed by one CPU thread."""
    while True:
        with cpu_threads(1):
            try:
                log = next(logs)
            except StopIteration:
                return
        yield log


def _set_lr(method: Method, lr: float) -> float:
    """Set the learning rate of all optimizers of a method, in place if a graphed step reads it."""
    for optimizer in method.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
    return lr


def score(method: Method, task: Task, truth: Truth | None, at: TrainingState | None = None) -> Record:
    """Validation and test scores of the method, in evaluation mode."""
    record: Record = {}
    with evaluating(method.nets):
        for name, split in (("val", task.val), ("test", truth.test if truth else None)):
            if split is not None:
                rows, p = share_rows(method.predict, split)
                _check_finite({"a prediction": p}, method, at or TrainingState())
                if not bool(((p >= -1e-4).all(1) & ((p.sum(1) - 1).abs() < 0.01)).all()):
                    raise UserError(
                        f"{type(method).__name__}.predict returned rows that are not probabilities; end it with "
                        ".softmax(dim=1)"
                    )
                s = compute_scores(p, split.y[rows])
                record |= {f"{name}_acc": s.acc, f"{name}_nll": s.nll, f"{name}_ece": s.ece}
    return record


def average_over_ranks(method: Method, at: TrainingState) -> None:
    """Average the logs and BatchNorm's running statistics, which each rank has for its share only.

    The mean of moving averages is the moving average of the means, so the result does not depend on when this is done.
    """
    values = [v for value in vars(method).values() for v in (value if isinstance(value, list) else [value])]
    nets = [value for value in values if isinstance(value, nn.Module)]
    norms = [m for net in nets for m in net.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    statistics = [t for norm in norms for t in (norm.running_mean, norm.running_var) if t is not None]
    distributed.average([*at.sums.values(), *statistics])


def sync_rows(method: Method, first: int) -> None:
    """Share what each rank has stored about its examples, in the batches from number `first` on, with all ranks.

    This concerns every tensor of the method with one entry per training example, such as a memory of predictions. A
    tensor that is already the same on all ranks does not change.
    """
    if distributed.n_ranks() == 1:
        return
    loader, n = method.loader, len(method.task.train)
    for k in range(first, loader.count):
        rows = loader.index(k)
        for value in vars(method).values():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor) and n in tensor.shape[:2]:
                    dim = tensor.shape.index(n)
                    every = rows.to(tensor.device)
                    with torch.no_grad():
                        stored = tensor.index_select(dim, every[loader.share])
                        tensor.index_copy_(dim, every, distributed.gather(stored, dim))


def check_batches(method: Method) -> None:
    """Refuse batch sizes that the first step could not use. torch would only fail at that step, less clearly."""
    loaders = [method.loader, *([method.meta_loader] if method.needs_meta else [])]
    modules = [module for net in method.nets for module in net.modules()]
    n = 1 if method.recipe.sync_batchnorm else distributed.n_ranks()  # parts of a batch that are normalized separately
    if any(x.batch_size == n for x in loaders) and any(isinstance(m, _BatchNorm) for m in modules):
        unit = "process and batch" if n > 1 else "batch"
        least = f"--batch-size and --meta-batch-size >= {2 * n}" + (" or --sync-batchnorm" if n > 1 else "")
        raise UserError(f"BatchNorm needs at least 2 examples per {unit}; use {least}")
    kinds = (("", "noisy", method.least_batch), ("meta-", "trusted", method.least_meta_batch))
    for loader, (prefix, kind, least_per_rank) in zip(loaders, kinds, strict=False):
        needed = least_per_rank * distributed.n_ranks()
        if loader.batch_size < needed:
            raise UserError(
                f"{type(method).__name__} needs {needed} {kind} examples per step, got {loader.batch_size}; use "
                f"--{prefix}batch-size >= {needed}, and at least {needed} {kind} examples"
            )


def check_log(log: Log, method: Method) -> None:
    """Validate the log returned by `step`, so that mistakes in a custom method are reported at their source."""
    name = type(method).__name__
    if not isinstance(log, Mapping):
        got = "None" if log is None else type(log).__name__
        raise UserError(f'{name}.step returned {got}, not a dict of numbers; end it with return {{"loss": loss}}')
    for key, value in log.items():
        if key in ("epoch", "lr", "seconds") or str(key).startswith(("val_", "test_")):
            raise UserError(f"{name}.step returned {key!r}, which the engine also logs; choose another name")
        # Tensors are checked first, because a check of the protocol takes long.
        if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{name}.step returned {got} for {key!r}, expected a single number; average it or omit it")


def check_state(method: Method, at: TrainingState) -> None:
    """Raise if a log or a weight is not finite. A weight can overflow after a finite loss, and must not be stored."""
    _check_finite(at.sums, method, at)
    for net in method.nets:
        _check_finite({f"a weight of {name}": p.detach() for name, p in net.named_parameters()}, method, at)


def _check_finite(values: Mapping[str, Tensor], method: Method, at: TrainingState) -> None:
    for name, value in values.items():
        if not (math.isfinite(value.item()) if value.numel() == 1 else value.isfinite().all()):
            raise Diverged(
                f"{name} became {value[~value.isfinite()][0].item()} at epoch {at.epoch + 1}, step {at.step} "
                f"(lr {method.lr:g}); lower --lr or --meta-lr, or check the inputs"
            )
