"""Evaluate a learner on new tasks: mean, 95 % interval and median over tasks, in batches of tasks."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from warpi.errors import UserError
from warpi.fewshot.episodes import Kind, Tasks
from warpi.fewshot.learner import Episode, Learner, Output
from warpi.utils.seeding import generator

_MEMORY = {"cpu": 2**27, "cuda": 2**31}  # bytes for the largest layer of one batch of tasks


class Scores(NamedTuple):
    """Scores over tasks: accuracy in percent, or the mean squared error for regression."""

    mean: float
    ci95: float | None  # half-width of the 95 % interval of the mean, 1.96 s / sqrt(N); None for one task
    median: float
    tasks: int
    episodes_per_s: float  # adaptation and evaluation included
    each: Sequence[float] = ()  # [N] one score per task

    @classmethod
    def of(cls, values: Tensor, seconds: float) -> "Scores":
        """Summarize values [N], one per task."""
        values = values.double()
        ci95 = 1.96 * values.std().item() / math.sqrt(len(values)) if len(values) > 1 else None
        # The mean of the two middle values; torch.median takes the lower one.
        median = values.quantile(0.5).item()
        speed = len(values) / seconds if seconds else 0.0
        return cls(values.mean().item(), ci95, median, len(values), speed, values.tolist())


def batch_of_tasks(kind: Kind, learner: Learner) -> int:
    """Number of tasks that are evaluated together."""
    shape = learner.problem.shape
    layer = 4 * 64 * shape[-1] * shape[-2] if len(shape) == 3 else 4 * 1024  # bytes per input
    inputs = (kind.shots + kind.queries) * max(kind.ways, 1)
    return max(1, _MEMORY["cuda" if learner.generator.device.type == "cuda" else "cpu"] // (layer * inputs))


def score_tasks(out: Output, episode: Episode) -> Tensor:
    """Accuracy in percent, or mean squared error, of each task; NaN if a prediction is NaN.  [T]"""
    if episode.ways:
        right = (out.value.argmax(-1) == episode.query_y).double().mean(1)
        return 100 * right.masked_fill(out.value.isnan().any(-1).any(-1), torch.nan)
    return (out.value - episode.query_y).double().square().mean((1, 2))


def predictions(
    learner: Learner, tasks: Tasks, n: int, seed: int, name: str, bf16: bool = False, batch: int | None = None
) -> Iterator[tuple[Episode, Output]]:
    """Predict the n tasks identified by `seed` and `name`, in batches."""
    device = learner.generator.device
    for e in tasks.fixed(n, seed, name, batch or batch_of_tasks(tasks.kind, learner)):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            out = learner.predict(e.support_x, e.support_y, e.query_x, e.ways)
        yield e, out


def evaluate(
    learner: Learner,
    tasks: Tasks,
    n: int = 1000,
    *,
    seed: int = 0,
    name: str = "test",
    bf16: bool = False,
    batch: int | None = None,
    timed: bool = False,
) -> Scores:
    """Scores over n tasks. With `timed`, the first batch is evaluated once before the clock starts."""
    if timed:
        first = min(n, batch or batch_of_tasks(tasks.kind, learner))
        evaluate(learner, tasks, first, seed=seed, name=name, bf16=bf16, batch=batch)
    began = time.perf_counter()
    with _separate_generator(learner, seed, name, tasks.kind):
        scores = [score_tasks(out, episode) for episode, out in predictions(learner, tasks, n, seed, name, bf16, batch)]
    values = torch.cat(scores).cpu()
    return Scores.of(values, time.perf_counter() - began)


@contextmanager
def _separate_generator(learner: Learner, seed: int, name: str, kind: Kind) -> Iterator[None]:
    """Use another generator inside, so that training and evaluation do not change each other's random numbers."""
    before = learner.generator
    learner.generator = generator(seed, "judged", name, *kind, device=before.device)
    try:
        yield
    finally:
        learner.generator = before


def paired(scores: Sequence[float], first: Sequence[float]) -> dict[str, float | None]:
    """Mean difference of the scores [N] of two learners on the same tasks, and the half-width of its 95 % interval.

    Hard tasks are hard for both learners, so this interval is usually narrower than those of the two means.
    """
    if len(scores) != len(first):
        raise UserError(f"scores of {len(scores)} and {len(first)} tasks cannot be compared; use the same tasks")
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (scores, first))
    gap = Scores.of(a - b, 0.0)
    return {"difference": gap.mean, "difference_ci95": gap.ci95}
