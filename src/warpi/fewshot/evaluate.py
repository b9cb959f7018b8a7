"""How well a learner does on new tasks: mean, its 95 % interval and median over many, judged many at a time."""

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

_MEMORY = {"cpu": 2**27, "cuda": 2**31}  # bytes of the largest layer of the tasks that are judged together


class Scores(NamedTuple):
    """Over tasks. Accuracy in per cent; of regression, the mean squared error of a task."""

    mean: float
    ci95: float | None  # half of the 95 % interval of the mean: 1.96 s / sqrt(N); None of one task
    median: float
    tasks: int
    episodes_per_s: float  # tasks adapted to and judged in a second
    each: Sequence[float] = ()  # [N] by task

    @classmethod
    def of(cls, values: Tensor, seconds: float) -> "Scores":
        """values [N], one a task."""
        values = values.double()
        ci95 = 1.96 * values.std().item() / math.sqrt(len(values)) if len(values) > 1 else None
        # Between the two values in the middle, as others do; torch.median takes the lower.
        median = values.quantile(0.5).item()
        speed = len(values) / seconds if seconds else 0.0
        return cls(values.mean().item(), ci95, median, len(values), speed, values.tolist())


def at_once(kind: Kind, learner: Learner) -> int:
    """How many tasks are judged together."""
    shape = learner.problem.shape
    layer = 4 * 64 * shape[-1] * shape[-2] if len(shape) == 3 else 4 * 1024  # bytes an input takes
    inputs = (kind.shots + kind.queries) * max(kind.ways, 1)
    return max(1, _MEMORY["cuda" if learner.generator.device.type == "cuda" else "cpu"] // (layer * inputs))


def judge(out: Output, episode: Episode) -> Tensor:
    """[T] accuracy in per cent, or the mean squared error, of each task; NaN where no answer came."""
    if episode.ways:
        right = (out.value.argmax(-1) == episode.query_y).double().mean(1)
        return 100 * right.masked_fill(out.value.isnan().any(-1).any(-1), torch.nan)
    return (out.value - episode.query_y).double().square().mean((1, 2))


def predictions(
    learner: Learner, tasks: Tasks, n: int, seed: int, name: str, bf16: bool = False, batch: int | None = None
) -> Iterator[tuple[Episode, Output]]:
    """The learner on the n tasks that `seed` and `name` stand for, some at a time."""
    device = learner.generator.device
    for e in tasks.fixed(n, seed, name, batch or at_once(tasks.kind, learner)):
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
    """Scores over n tasks; with `timed` the first batch is judged once before the clock starts."""
    if timed:
        first = min(n, batch or at_once(tasks.kind, learner))
        with _own_chance(learner, seed, name, tasks.kind):
            for _ in predictions(learner, tasks, first, seed, name, bf16, batch):
                _wait(learner)
    began = time.perf_counter()
    with _own_chance(learner, seed, name, tasks.kind):
        judged = [judge(out, episode) for episode, out in predictions(learner, tasks, n, seed, name, bf16, batch)]
    values = torch.cat(judged).cpu()
    return Scores.of(values, time.perf_counter() - began)


@contextmanager
def _own_chance(learner: Learner, seed: int, name: str, kind: Kind) -> Iterator[None]:
    """Scores do not depend on what the learner drew before, and training does not on how often it was judged."""
    before = learner.generator
    learner.generator = generator(seed, "judged", name, *kind, device=before.device)
    try:
        yield
    finally:
        learner.generator = before


def paired(scores: Sequence[float], first: Sequence[float]) -> dict[str, float | None]:
    """The mean over tasks of scores [N] less those of another learner on the same tasks, and half its 95 % interval.

    A task that is hard is hard for both, so that this interval is narrower than those of the two means, as a rule.
    """
    if len(scores) != len(first):
        raise UserError(f"scores of {len(scores)} tasks and of {len(first)} cannot be compared; judge both on the same")
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (scores, first))
    gap = Scores.of(a - b, 0.0)
    return {"difference": gap.mean, "difference_ci95": gap.ci95}


def _wait(learner: Learner) -> None:
    if learner.generator.device.type == "cuda":
        torch.cuda.synchronize(learner.generator.device)
