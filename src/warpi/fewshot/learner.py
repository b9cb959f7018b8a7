"""The contract of few-shot learners: a loss on episodes, and predictions for new tasks from their few examples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.errors import UserError
from warpi.method import evaluating
from warpi.rng import derive, generator, seeded
from warpi.settings import check_types
from warpi.types import Log


class Problem(NamedTuple):
    """What all tasks of a data set have in common."""

    shape: tuple[int, ...]  # of one input: (channels, height, width) of an image, or (features,)
    ways: int = 0  # classes of a task; 0: regression
    outputs: int = 1  # numbers to predict, of regression

    @property
    def domain(self) -> Literal["image", "vector"]:
        return "image" if len(self.shape) == 3 else "vector"

    @property
    def regression(self) -> bool:
        return self.ways == 0


@dataclass(frozen=True, eq=False)
class Episode:
    """T tasks at once: a few examples of each to adapt to, and others to be judged by.

    Images are uint8 or floats in [0, 1]. The examples of a support set may come in any order; all classes have
    the same number of them.
    """

    support_x: Tensor  # [T, S, ...]
    support_y: Tensor  # [T, S] class numbers below `ways`, or [T, S, K] targets
    query_x: Tensor  # [T, Q, ...]
    query_y: Tensor  # [T, Q], or [T, Q, K]
    ways: int = 0  # classes of each task; 0: regression


class Output(NamedTuple):
    """What a learner says of queries."""

    value: Tensor  # [T, Q, W] logits within a learner, probabilities from `predict`; or [T, Q, K] means
    std: Tensor | None = None  # [T, Q, K] of the prediction, where a learner of regression has one


Conditioned = Callable[[Tensor], Output]
"""A learner that has seen the support: queries [T, Q, ...] -> Output with logits or means."""


@dataclass
class Learner(ABC):
    """One way to learn from tasks how to learn new tasks from a few examples.

    Fields are hyper-parameters with the paper's defaults. Everything made in `start` is state, all of it modules
    (with buffers), tensors, generators and numbers, so that checkpoints hold it without further ado. A learner is
    vectorised over tasks. It owns no optimizer; `loss` waits for nothing and writes state in place, so that a step
    can be one CUDA graph. A subclass says `build` and `condition`.
    """

    solves: ClassVar[tuple[str, ...]] = ("classification", "regression")
    year: ClassVar[int | None] = None  # of the paper
    any_ways: ClassVar[bool] = True  # whether tasks may have other ways than those it was started for

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def transductive(self) -> bool:
        """Whether the prediction of a query depends on the other queries: a normalisation within may say so."""
        self._check_started()
        return any(getattr(module, "transductive", False) for module in self.net.modules())

    def start(self, problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> None:
        """Make all state."""
        kind = "regression" if problem.regression else "classification"
        if kind not in self.solves:
            raise UserError(
                f"{type(self).__name__} is for {self.solves[0]}, and this is {kind}; take another learner (LEARNERS)"
            )
        self.problem = problem
        self.generator = generator(seed, "learner", device=device)
        with seeded(derive(seed, "weights")):
            self.net: Any = self.build(problem).to(device)  # a module that only its learner knows

    @abstractmethod
    def build(self, problem: Problem) -> nn.Module:
        """All modules and buffers in one; initial weights from the global torch generator."""

    @abstractmethod
    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        """Adapt to T tasks. Differentiable."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is learned over tasks; nothing for a learner that needs no training."""
        parameters: Iterator[nn.Parameter] = self.net.parameters()
        return parameters

    def loss(self, episode: Episode) -> tuple[Tensor, Log]:
        """The mean over T tasks of what is to be minimised, and numbers to look at."""
        out = self.condition(episode.support_x, episode.support_y, episode.ways)(episode.query_x)
        loss = fit_loss(out.value, episode.query_y, episode.ways)
        return loss, {"loss": loss.detach(), **score(out.value, episode)}

    @torch.no_grad()
    def predict(self, support_x: Tensor, support_y: Tensor, query_x: Tensor, ways: int | None = None) -> Output:
        """T tasks: [T, Q, W] probabilities, or [T, Q, K] means with their standard deviation where there is one."""
        ways = self.problem.ways if ways is None else ways
        with evaluating([self.net]):
            out = self.condition(support_x, support_y, ways)(query_x)
        return out if ways == 0 else Output(out.value.softmax(-1))

    def adapt(self, support_x: Tensor, support_y: Tensor, ways: int | None = None) -> "Adapted":
        """This learner after the examples of one task [S, ...], or of T tasks [T, S, ...] at once.

        Labels are class numbers 0 .. ways - 1; targets are [S] or [S, K] (with T before them for T tasks).
        """
        self._check_started()
        return Adapted(self, support_x, support_y, ways)

    def _check_started(self) -> None:
        if not hasattr(self, "net"):
            raise UserError(
                f"this {type(self).__name__} has no networks yet; call its start(Problem(...)) and train it"
            )


class Adapted:
    """A learner that has seen the examples of a user's own task (or of several)."""

    def __init__(self, learner: Learner, x: Tensor, y: Tensor, ways: int | None) -> None:
        problem, self.learner = learner.problem, learner
        self.single = x.dim() == 1 + len(problem.shape)
        x, y = self._tasks(x), (y[None] if self.single else y).to(learner.generator.device)
        if y.shape[:2] != x.shape[:2]:
            raise UserError(f"support inputs {tuple(x.shape)} and labels {tuple(y.shape)} differ in number")
        if problem.regression:
            y = y[..., None] if y.dim() == 2 else y
            if y.shape[2] != problem.outputs:
                raise UserError(f"targets must have {problem.outputs} numbers each, got {y.shape[2]}")
            self.ways = 0
        else:
            if y.dim() != 2 or y.is_floating_point():
                raise UserError(f"labels must be class numbers [S], got {y.dtype} of shape {tuple(y.shape[1:])}")
            self.ways = int(y.max()) + 1 if ways is None else ways
            if int(y.min()) < 0 or int(y.max()) >= self.ways:
                raise UserError(f"labels must lie in 0 .. {self.ways - 1}, got {int(y.min())} .. {int(y.max())}")
        with torch.no_grad(), evaluating([learner.net]):
            self.conditioned = learner.condition(x, y, self.ways)

    def predict(self, query_x: Tensor) -> Tensor:
        """[Q, W] probabilities or [Q, K] means; T before them for T tasks."""
        value = self._output(query_x).value
        return value.softmax(-1) if self.ways else value

    def std(self, query_x: Tensor) -> Tensor:
        """The standard deviation of the predicted numbers.  [Q, K]"""
        std = self._output(query_x).std
        if std is None:
            raise UserError(
                f"{type(self.learner).__name__} gives no standard deviation; the regression of MetaVRF does"
            )
        return std

    @torch.no_grad()
    def _output(self, query_x: Tensor) -> Output:
        with evaluating([self.learner.net]):
            out = self.conditioned(self._tasks(query_x))
        if not out.value.isfinite().all():
            raise UserError(
                "the predictions are no finite numbers: look for NaN or infinity in the inputs and the targets; a "
                "ridge that cannot be solved needs a larger floor (--floor), or float64"
            )
        if not self.single:
            return out
        return Output(out.value[0], None if out.std is None else out.std[0])

    def _tasks(self, x: Tensor) -> Tensor:
        """Inputs [T, N, ...] on the learner's device."""
        shape = self.learner.problem.shape
        x = x[None] if self.single else x
        if x.dim() != 2 + len(shape) or tuple(x.shape[2:]) != shape:
            raise UserError(f"inputs must be [N, {', '.join(map(str, shape))}], got {list(x.shape)[self.single :]}")
        like = next(self.learner.parameters(), x)
        return x.to(self.learner.generator.device, None if x.dtype == torch.uint8 else like.dtype)


def fit_loss(value: Tensor, y: Tensor, ways: int) -> Tensor:
    """Cross-entropy of logits [T, Q, W], or the mean squared error of means [T, Q, K]; the mean over tasks."""
    return F.cross_entropy(value.flatten(0, 1), y.flatten()) if ways else F.mse_loss(value, y)


@torch.no_grad()
def score(value: Tensor, episode: Episode) -> Log:
    """What a person looks at: accuracy in per cent, or the mean squared error."""
    if episode.ways:
        return {"accuracy": 100 * (value.argmax(-1) == episode.query_y).float().mean()}
    return {"mse": F.mse_loss(value, episode.query_y)}
