"""The contract of few-shot learners: a loss on episodes, and predictions for new tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.errors import UserError
from warpi.fewshot.data import Values, as_tensor
from warpi.training.method import Log, evaluating
from warpi.utils.seeding import derive, generator, seeded
from warpi.utils.settings import check_types


class Problem(NamedTuple):
    """The shape that all tasks of a data set share."""

    shape: tuple[int, ...]  # shape of one input: (channels, height, width) of an image, or (features,)
    ways: int = 0  # classes per task; 0: regression
    outputs: int = 1  # numbers to predict in regression

    @property
    def domain(self) -> Literal["image", "vector"]:
        return "image" if len(self.shape) == 3 else "vector"

    @property
    def regression(self) -> bool:
        return self.ways == 0


@dataclass(frozen=True, eq=False)
class Episode:
    """A batch of T tasks: support examples to adapt to, and query examples to evaluate on.

    Images are uint8 or floats in [0, 1]. The examples of a support set may have any order; all classes have the
    same number of them.
    """

    support_x: Tensor  # [T, S, ...]
    support_y: Tensor  # [T, S] class indices below `ways`, or [T, S, K] targets
    query_x: Tensor  # [T, Q, ...]
    query_y: Tensor  # [T, Q], or [T, Q, K]
    ways: int = 0  # classes per task; 0: regression


class Output(NamedTuple):
    """Predictions for queries."""

    value: Tensor  # [T, Q, W] logits within a learner, probabilities from `predict`; or [T, Q, K] means
    std: Tensor | None = None  # [T, Q, K] standard deviation, if a regression learner has one


Conditioned = Callable[[Tensor], Output]
"""A learner after its support set: maps queries [T, Q, ...] to an Output with logits or means."""


@dataclass
class Learner(ABC):
    """Learns from many tasks how to learn a new task from a few examples.

    Fields are hyper-parameters with the paper's defaults. `start` creates all state: modules with buffers, tensors,
    generators and numbers, which checkpoints store generically. A learner is vectorized over tasks and owns no
    optimizer. `loss` never synchronizes with the device and updates state in place, so that a step can be captured as
    a CUDA graph. Subclasses define `build` and `condition`.
    """

    solves: ClassVar[tuple[str, ...]] = ("classification", "regression")
    year: ClassVar[int | None] = None  # year of the paper
    any_ways: ClassVar[bool] = True  # whether tasks may have a different number of classes than in training

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def transductive(self) -> bool:
        """Whether the prediction for a query depends on the other queries, through a normalization layer."""
        self.check_started()
        return any(getattr(module, "transductive", False) for module in self.net.modules())

    def start(self, problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> None:
        """Create all state."""
        kind = "regression" if problem.regression else "classification"
        if kind not in self.solves:
            raise UserError(
                f"{type(self).__name__} only supports {self.solves[0]}, but this is {kind}; see `warpi list learners`"
            )
        self.problem = problem
        self.generator = generator(seed, "learner", device=device)
        with seeded(derive(seed, "weights")):
            self.net: Any = self.build(problem).to(device)  # its type depends on the learner

    @abstractmethod
    def build(self, problem: Problem) -> nn.Module:
        """Build one module with all parameters and buffers, initialized from the global torch generator."""

    @abstractmethod
    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        """Adapt to T tasks; differentiable."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The meta-learned parameters; empty for a learner without training."""
        parameters: Iterator[nn.Parameter] = self.net.parameters()
        return parameters

    def loss(self, episode: Episode) -> tuple[Tensor, Log]:
        """The mean loss over T tasks, and values to log."""
        out = self.condition(episode.support_x, episode.support_y, episode.ways)(episode.query_x)
        loss = fit_loss(out.value, episode.query_y, episode.ways)
        return loss, {"loss": loss.detach(), **score(out.value, episode)}

    @torch.no_grad()
    def predict(self, support_x: Tensor, support_y: Tensor, query_x: Tensor, ways: int | None = None) -> Output:
        """Probabilities [T, Q, W], or means [T, Q, K] with their standard deviation if there is one."""
        ways = self.problem.ways if ways is None else ways
        with evaluating([self.net]):
            out = self.condition(support_x, support_y, ways)(query_x)
        return out if ways == 0 else Output(out.value.softmax(-1))

    def adapt(self, support_x: Values, support_y: Values, ways: int | None = None) -> "Adapted":
        """Adapt to the examples of one task [S, ...], or of T tasks [T, S, ...].

        Inputs are tensors or arrays. Labels are class indices 0 .. ways - 1, with at least one example of each in
        every task. Regression targets are [S] or [S, K]; for T tasks, T comes first.
        """
        self.check_started()
        return Adapted(self, support_x, support_y, ways)

    def check_started(self) -> None:
        if not hasattr(self, "net"):
            raise UserError(
                f"this {type(self).__name__} has no networks yet; call its start(Problem(...)) and train it"
            )


class Adapted:
    """A learner that is adapted to the examples of one or several tasks."""

    def __init__(self, learner: Learner, x: Values, y: Values, ways: int | None) -> None:
        problem = learner.problem
        self.learner = learner
        x = as_tensor(x, "inputs")
        y = as_tensor(y, "labels")
        self.single = x.dim() == 1 + len(problem.shape)
        like = next(learner.parameters(), x if x.is_floating_point() else torch.empty(0))
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        x = self._tasks(x)
        y = (y[None] if self.single else y).to(learner.generator.device)
        self.tasks = len(x)
        if y.shape[:2] != x.shape[:2]:
            raise UserError(
                f"support inputs {list(x.shape)[self.single :]} and labels {list(y.shape)[self.single :]} differ in "
                "number; give one label per input"
            )
        if not y.numel():
            raise UserError("the support set is empty; give examples of each class, or points of the function")
        self.ways = 0 if problem.regression else _ways(y, ways)
        y = _targets(y, problem.outputs, self.dtype) if problem.regression else y.long()
        with torch.no_grad(), evaluating([learner.net]):
            self.conditioned = learner.condition(x, y, self.ways)

    def predict(self, query_x: Values) -> Tensor:
        """Probabilities [Q, W] or means [Q, K]; for T tasks, T comes first."""
        value = self._output(query_x).value
        return value.softmax(-1) if self.ways else value

    def std(self, query_x: Values) -> Tensor:
        """Standard deviation of the predictions.  [Q, K]"""
        std = self._output(query_x).std
        if std is None:
            raise UserError(f"{type(self.learner).__name__} has no standard deviation; MetaVRF for regression has one")
        return std

    @torch.no_grad()
    def _output(self, query_x: Values) -> Output:
        x = self._tasks(as_tensor(query_x, "inputs"))
        if len(x) != self.tasks:
            raise UserError(f"support and queries have {self.tasks} and {len(x)} tasks; give queries for each task")
        asked = x if x.shape[1] else x.new_zeros((self.tasks, 1, *x.shape[2:]))  # layers do not accept an empty set
        with evaluating([self.learner.net]):
            out = self.conditioned(asked)
        if not out.value.isfinite().all():
            raise UserError(
                "the predictions are not finite; look for NaN or infinity in the inputs and targets. A ridge "
                "regression that cannot be solved needs a larger --floor, or float64"
            )
        which = (0, slice(x.shape[1])) if self.single else (slice(None), slice(x.shape[1]))
        return Output(out.value[which], None if out.std is None else out.std[which])

    def _tasks(self, x: Tensor) -> Tensor:
        """Inputs [T, N, ...] on the learner's device."""
        shape = self.learner.problem.shape
        form = f"[{'' if self.single else 'T, '}N, {', '.join(map(str, shape))}]"
        given = list(x.shape)
        x = x[None] if self.single else x
        if x.dim() != 2 + len(shape) or tuple(x.shape[2:]) != shape:
            raise UserError(f"inputs must be {form}, got {given}")
        if len(shape) == 3 and not (x.is_floating_point() or x.dtype == torch.uint8):
            raise UserError(f"images must be bytes (uint8) or floats in [0, 1], got {x.dtype}; convert them")
        return x.to(self.learner.generator.device, torch.uint8 if x.dtype == torch.uint8 else self.dtype)


def _ways(y: Tensor, ways: int | None) -> int:
    """Number of classes of labels [T, S]; raises if a class has no example in some task."""
    if y.dim() != 2 or y.is_floating_point() or y.is_complex():
        raise UserError(f"labels must be class indices [S], got {y.dtype} of shape {tuple(y.shape[1:])}")
    y = y.long()
    low, high = int(y.min()), int(y.max())
    ways = high + 1 if ways is None else ways
    if low < 0 or high >= ways:
        raise UserError(f"labels must lie in 0 .. {ways - 1}, got {low} .. {high}; number the classes of a task from 0")
    for task, count in enumerate(F.one_hot(y, ways).sum(1).tolist()):
        missing = [str(k) for k, n in enumerate(count) if not n]
        if missing:
            where = f"task {task} of {len(y)}" if len(y) > 1 else "the support set"
            raise UserError(
                f"no example of class {', '.join(missing)} in {where}; every class of 0 .. {ways - 1} needs one, so "
                "number the classes of a task without gaps"
            )
    return ways


def _targets(y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    """Regression targets as [T, S, K] of type `dtype`."""
    y = y[..., None] if y.dim() == 2 else y
    if y.dim() != 3 or y.shape[2] != outputs:
        raise UserError(f"targets must have {outputs} numbers each, got {list(y.shape[2:])}; set Problem(outputs=...)")
    return y.to(dtype)


def fit_loss(value: Tensor, y: Tensor, ways: int) -> Tensor:
    """Mean over tasks of the cross-entropy of logits [T, Q, W], or of the squared error of means [T, Q, K]."""
    return F.cross_entropy(value.flatten(0, 1), y.flatten()) if ways else F.mse_loss(value, y)


@torch.no_grad()
def score(value: Tensor, episode: Episode) -> Log:
    """Accuracy in percent, or the mean squared error, for the log."""
    if episode.ways:
        return {"accuracy": 100 * (value.argmax(-1) == episode.query_y).float().mean()}
    return {"mse": F.mse_loss(value, episode.query_y)}
