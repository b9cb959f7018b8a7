"""The contract of few-shot learners: a loss on episodes, and predictions for new tasks from their few examples."""

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
from warpi.utils.field_checks import check_types
from warpi.utils.seeding import derive, generator, seeded


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
        self.check_started()
        return any(getattr(module, "transductive", False) for module in self.net.modules())

    def start(self, problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> None:
        """Make all state."""
        kind = "regression" if problem.regression else "classification"
        if kind not in self.solves:
            raise UserError(
                f"{type(self).__name__} is for {self.solves[0]}, and this is {kind}; see `warpi list learners`"
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

    def adapt(self, support_x: Values, support_y: Values, ways: int | None = None) -> "Adapted":
        """This learner after the examples of one task [S, ...], or of T tasks [T, S, ...] at once.

        Tensors or arrays. Labels are class numbers 0 .. ways - 1, an example of each in every task; targets are [S] or
        [S, K] (with T before them for T tasks).
        """
        self.check_started()
        return Adapted(self, support_x, support_y, ways)

    def check_started(self) -> None:
        if not hasattr(self, "net"):
            raise UserError(
                f"this {type(self).__name__} has no networks yet; call its start(Problem(...)) and train it"
            )


class Adapted:
    """A learner that has seen the examples of a user's own task (or of several)."""

    def __init__(self, learner: Learner, x: Values, y: Values, ways: int | None) -> None:
        problem, self.learner, x, y = learner.problem, learner, as_tensor(x, "inputs"), as_tensor(y, "labels")
        self.single = x.dim() == 1 + len(problem.shape)
        like = next(learner.parameters(), x if x.is_floating_point() else torch.empty(0))
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        x, y = self._tasks(x), (y[None] if self.single else y).to(learner.generator.device)
        self.tasks = len(x)
        if y.shape[:2] != x.shape[:2]:
            raise UserError(
                f"support inputs {list(x.shape)[self.single :]} and labels {list(y.shape)[self.single :]} differ in "
                "number; give a label for each input"
            )
        if not y.numel():
            raise UserError("the support is empty; give an example of each class, or some points of the function")
        self.ways = 0 if problem.regression else _ways(y, ways)
        y = _targets(y, problem.outputs, self.dtype) if problem.regression else y.long()
        with torch.no_grad(), evaluating([learner.net]):
            self.conditioned = learner.condition(x, y, self.ways)

    def predict(self, query_x: Values) -> Tensor:
        """[Q, W] probabilities or [Q, K] means; T before them for T tasks."""
        value = self._output(query_x).value
        return value.softmax(-1) if self.ways else value

    def std(self, query_x: Values) -> Tensor:
        """The standard deviation of the predicted numbers.  [Q, K]"""
        std = self._output(query_x).std
        if std is None:
            raise UserError(
                f"{type(self.learner).__name__} gives no standard deviation; the regression of MetaVRF does"
            )
        return std

    @torch.no_grad()
    def _output(self, query_x: Values) -> Output:
        x = self._tasks(as_tensor(query_x, "inputs"))
        if len(x) != self.tasks:
            raise UserError(f"the support has {self.tasks} tasks and the queries have {len(x)}; give queries of each")
        asked = x if x.shape[1] else x.new_zeros((self.tasks, 1, *x.shape[2:]))  # no layer takes an empty set
        with evaluating([self.learner.net]):
            out = self.conditioned(asked)
        if not out.value.isfinite().all():
            raise UserError(
                "the predictions are no finite numbers: look for NaN or infinity in the inputs and the targets; a "
                "ridge that cannot be solved needs a larger floor (--floor), or float64"
            )
        which = (0, slice(x.shape[1])) if self.single else (slice(None), slice(x.shape[1]))
        return Output(out.value[which], None if out.std is None else out.std[which])

    def _tasks(self, x: Tensor) -> Tensor:
        """Inputs [T, N, ...] on the learner's device."""
        shape = self.learner.problem.shape
        form = f"[{'' if self.single else 'T, '}N, {', '.join(map(str, shape))}]"
        got, x = list(x.shape), x[None] if self.single else x
        if x.dim() != 2 + len(shape) or tuple(x.shape[2:]) != shape:
            raise UserError(f"inputs must be {form}, got {got}")
        if len(shape) == 3 and not (x.is_floating_point() or x.dtype == torch.uint8):
            raise UserError(f"images must be bytes (uint8) or floats in [0, 1], got {x.dtype}; convert them")
        return x.to(self.learner.generator.device, torch.uint8 if x.dtype == torch.uint8 else self.dtype)


def _ways(y: Tensor, ways: int | None) -> int:
    """The classes of labels [T, S], each of which must have an example in every task."""
    if y.dim() != 2 or y.is_floating_point() or y.is_complex():
        raise UserError(f"labels must be class numbers [S], got {y.dtype} of shape {tuple(y.shape[1:])}")
    y = y.long()
    low, high = int(y.min()), int(y.max())
    ways = high + 1 if ways is None else ways
    if low < 0 or high >= ways:
        raise UserError(f"labels must lie in 0 .. {ways - 1}, got {low} .. {high}; number the classes of a task from 0")
    for task, count in enumerate(F.one_hot(y, ways).sum(1).tolist()):
        if absent := [str(k) for k, n in enumerate(count) if not n]:
            where = f"task {task} of {len(y)}" if len(y) > 1 else "the support"
            raise UserError(
                f"no example of class {', '.join(absent)} in {where}: every class of 0 .. {ways - 1} needs one; number "
                "the classes of a task without gaps"
            )
    return ways


def _targets(y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    """Targets of regression as [T, S, K], of the type `dtype`."""
    y = y[..., None] if y.dim() == 2 else y
    if y.dim() != 3 or y.shape[2] != outputs:
        raise UserError(f"targets must have {outputs} numbers each, got {list(y.shape[2:])}; say Problem(outputs=...)")
    return y.to(dtype)


def fit_loss(value: Tensor, y: Tensor, ways: int) -> Tensor:
    """Cross-entropy of logits [T, Q, W], or the mean squared error of means [T, Q, K]; the mean over tasks."""
    return F.cross_entropy(value.flatten(0, 1), y.flatten()) if ways else F.mse_loss(value, y)


@torch.no_grad()
def score(value: Tensor, episode: Episode) -> Log:
    """What a person looks at: accuracy in per cent, or the mean squared error."""
    if episode.ways:
        return {"accuracy": 100 * (value.argmax(-1) == episode.query_y).float().mean()}
    return {"mse": F.mse_loss(value, episode.query_y)}
