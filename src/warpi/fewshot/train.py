"""The training loop of few-shot learners: a step is drawing tasks, the loss, its gradient, and Adam."""

import math
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from warpi.errors import UserError
from warpi.fewshot.data import Classes, FewShotData
from warpi.fewshot.episodes import Kind, Tasks, make_tasks
from warpi.fewshot.evaluate import evaluate
from warpi.fewshot.learner import Learner
from warpi.fewshot.learners.embedding import Psi
from warpi.training.checkpoint import state_of
from warpi.training.cuda_graph import WARM_UP, GraphedStep, NotGraphable, cudnn_search, warn_not_graphed
from warpi.training.engine import Diverged, Record
from warpi.training.method import Log
from warpi.training.recipe import adam
from warpi.utils.field_checks import at_least, check_types
from warpi.utils.seeding import generator


@dataclass(frozen=True)
class Training:
    """How a learner is trained, whatever the learner: the same for every row of a table."""

    iterations: int = 10_000  # steps
    tasks: int = 25  # of a step
    train_ways: int = 0  # classes of a training task, where more than in tests; 0: as many
    queries: int = 15  # of each class in training, or of each task of regression
    lr: float = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 0.0
    scalars: float = 1.0  # learning rate of parameters that are one number (ridge, scale of logits), in units of lr
    clip: float = 0.0  # largest norm of the gradient; 0: any
    augment: bool = False  # training images are varied: crops and mirror images, of drawings linear maps
    precision: Literal["32", "bf16"] = "32"  # of the networks' operators; weights and solutions stay in float32
    compile: bool | None = None  # fuse kernels of convolutions; default: on a GPU, for 3,000 iterations or more
    val_every: int = 500  # steps between two validations
    val_tasks: int = 300  # of a validation
    seed: int = 0  # of weights, tasks and chance; validation tasks are the same for all seeds

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, iterations=0, tasks=1, train_ways=0, queries=1, lr=0, weight_decay=0, scalars=0, clip=0)
        at_least(self, val_every=1, val_tasks=1)

    def lr_at(self, i: int) -> float:
        """Learning rate of step i, counted from 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * i / max(self.iterations, 1)))

    def compiles(self, device: torch.device) -> bool:
        """Whether kernels are fused. Compiling takes half a minute, which a short run does not win back."""
        return device.type == "cuda" and self.iterations >= 3000 if self.compile is None else self.compile


class Position:
    """How far a run has come, apart from the learner's own state: with that, all a checkpoint needs."""

    def __init__(self, learner: Learner, training: Training) -> None:
        self.optimizer = make_optimizer(list(learner.parameters()), training)
        self.generator = generator(training.seed, "training tasks", device=learner.generator.device)
        self.iteration = 0  # steps done
        self.records = 0
        self.steps = 0  # since the last record
        self.seconds = 0.0  # of these steps
        self.sums: dict[str, Tensor] = {}  # of their logs, on the device
        self.best: float | None = None  # validation score of the best weights so far


def make_optimizer(parameters: list[nn.Parameter], training: Training) -> torch.optim.Optimizer | None:
    """Adam, in which single numbers may learn at a rate of their own; None where there is nothing to learn.

    Adam moves a parameter by its learning rate at most: what must grow from 1 to 20 takes thousands of steps else.
    """
    groups = [p for p in parameters if p.numel() > 1], [p for p in parameters if p.numel() == 1]
    if training.scalars == 1 or not all(groups):
        return adam(parameters, training.lr, training.weight_decay) if parameters else None
    optimizer, other = (adam(group, training.lr, training.weight_decay) for group in groups)
    optimizer.add_param_group(other.param_groups[0])
    return optimizer


def train(
    learner: Learner, data: FewShotData, kind: Kind, training: Training, at: Position | None = None
) -> Iterator[Record | None]:
    """Train a started learner. Yields None after a step and a Record after a validation.

    `kind` is the kind of tasks; those of training may have more ways (`training.train_ways`). Whoever iterates may
    store the state of `learner` and of `at` between two items and go on from them later: the run will be the same, bit
    for bit on a CPU.
    """
    learner.check_started()
    problem, device = learner.problem, learner.generator.device
    if problem.shape != data.shape or problem.regression != data.regression:
        raise UserError(
            f"the learner was started for {problem}, and inputs of {data.name} are {data.shape}, for "
            f"{'regression (ways=0)' if data.regression else 'classification'}; start it with Problem(data.shape, ways)"
        )
    tasks, val = task_pair(data.to(device), kind, training, device)
    return _train(learner, data.regression, tasks, val, training, at or Position(learner, training))


def task_pair(data: FewShotData, kind: Kind, training: Training, device: torch.device | str) -> tuple[Tasks, Tasks]:
    """Tasks to train on, and those of validations."""
    data.check()
    if training.train_ways > (classes := len(data.train) if isinstance(data.train, Classes) else 0):
        raise UserError(f"there are {classes} classes to train on: give --train-ways {classes} at most")
    check_train_ways(training, kind.ways)
    harder = kind._replace(ways=training.train_ways or kind.ways)
    tasks = make_tasks(data.train, harder, device, training=True, augment=training.augment, part="training")
    val = make_tasks(data.val, validation_kind(data, kind), device, training=False, augment=False, part="validation")
    return tasks, val


def check_train_ways(training: Training, ways: int) -> None:
    if 0 < (got := training.train_ways) < ways:
        raise UserError(f"training tasks need as many ways as --ways {ways} at least, got --train-ways {got}")


def _train(
    learner: Learner, lower: bool, tasks: Tasks, val: Tasks, training: Training, at: Position
) -> Iterator[Record | None]:
    """The loop. `lower`: a lower score is better."""
    bf16 = training.precision == "bf16"
    end = training.iterations if at.optimizer is not None else 0  # nothing to learn: it is only judged
    step = Step(learner, tasks, training, at)
    with cudnn_search() if step.device.type == "cuda" else nullcontext(), closing(step):
        while at.iteration < end or at.records == 0:
            began = time.perf_counter() - at.seconds
            while at.iteration < end and at.steps < training.val_every:
                step()
                at.iteration += 1
                at.steps += 1
                at.seconds = time.perf_counter() - began
                if at.steps < training.val_every and at.iteration < end:
                    yield None
            record: Record = {"iteration": at.iteration, "lr": training.lr_at(at.iteration)}
            record |= means(at)
            at.seconds = time.perf_counter() - began  # reading the means has waited for the last step
            record |= {"seconds": at.seconds, "episodes_per_s": at.steps * training.tasks / max(at.seconds, 1e-9)}
            scores = evaluate(learner, val, training.val_tasks, name="val", bf16=bf16)
            if not math.isfinite(scores.mean):
                raise _diverged("the score on validation tasks", scores.mean, at)
            record |= {"val_mean": scores.mean, "val_median": scores.median}
            if scores.ci95 is not None:
                record["val_ci95"] = scores.ci95
            better = at.best is None or (scores.mean < at.best if lower else scores.mean > at.best)
            at.best = scores.mean if better else at.best
            record["best"] = float(better)
            at.records, at.steps, at.seconds = at.records + 1, 0, 0.0
            for total in at.sums.values():
                total.zero_()  # in place: a recorded step adds to them
            yield record


def validation_kind(data: FewShotData, kind: Kind) -> Kind:
    """Judged on the grid of 50 points, or on as many images as in training."""
    return Kind(0, kind.shots, 50) if data.regression else kind


def means(at: Position) -> Record:
    """The logs since the last record, which must be finite numbers: a sum never recovers from one that is not."""
    found = {name: total.item() / max(at.steps, 1) for name, total in at.sums.items()}
    for name, value in found.items():
        if not math.isfinite(value):
            raise _diverged(name, value, at)
    return found


def _diverged(name: str, value: float, at: Position) -> Diverged:
    return Diverged(f"{name} became {value} before step {at.iteration}; lower --lr, set --clip 1, or --precision 32")


class Step:
    """One step of training; on a GPU, after a few, the launch of a graph of all its kernels."""

    def __init__(self, learner: Learner, tasks: Tasks, training: Training, at: Position) -> None:
        self.learner, self.tasks, self.training, self.at = learner, tasks, training, at
        self.device = learner.generator.device
        self.n_observed = 0
        self.why = "" if self.device.type == "cuda" else "it is for GPUs"  # the reason if steps run normally
        self.graph: GraphedStep | None = None
        pays = training.compiles(self.device) and at.optimizer is not None and at.iteration < training.iterations
        self.fused = [module for module in learner.net.modules() if isinstance(module, Psi) and pays]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=training.precision == "bf16"):
            for psi in self.fused:
                psi.fuse(*self._like(psi))

    def __call__(self) -> None:
        self._set_lr()
        if self.graph is None and not self.why and self.n_observed == WARM_UP:
            self._record()
        if self.graph is not None:
            self.graph()
        elif self.why:
            self.body()
        else:
            self._observe()

    def _observe(self) -> None:
        """Run a plain step and check that it keeps all tensors in place."""
        before = _addresses(self.learner)
        self.body()
        self.n_observed += 1
        moved = [name for name, address in _addresses(self.learner).items() if before.get(name) != address]
        if moved and self.n_observed > 1:
            self._give_up(f"its loss puts another tensor into {moved[0]}; write into it in place instead")

    def body(self) -> Log:
        """Draw tasks, descend the gradient of the loss and add up the logs, in place."""
        at, training = self.at, self.training
        assert at.optimizer is not None
        episode = self.tasks.draw(training.tasks, at.generator)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=training.precision == "bf16"):
            loss, log = self.learner.loss(episode)
        at.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if training.clip:
            torch.nn.utils.clip_grad_norm_(self.learner.parameters(), training.clip)
        at.optimizer.step()
        for name, value in log.items():
            value = value.detach() if isinstance(value, Tensor) else torch.full((), value, device=loss.device)
            if name in at.sums:
                at.sums[name].add_(value)
            else:
                at.sums[name] = value.to(torch.float64, copy=True)
        return {}

    def close(self) -> None:
        """The learner as it was: it may see tasks of any size now."""
        for psi in self.fused:
            psi.unfuse()

    def _like(self, psi: Psi) -> list[Tensor]:
        """Inputs of the size of the support and of the queries."""
        ways, *numbers = self.tasks.kind
        sizes = [(self.training.tasks, max(ways, 1) * n, *self.learner.problem.shape) for n in numbers]
        weight = next(psi.parameters())
        return [torch.rand(size, generator=generator(0, "like")).to(weight) for size in sizes]

    def _set_lr(self) -> None:
        assert self.at.optimizer is not None
        for i, group in enumerate(self.at.optimizer.param_groups):
            lr = self.training.lr_at(self.at.iteration) * (self.training.scalars if i else 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _record(self) -> None:
        generators = [self.at.generator, *(v for v in vars(self.learner).values() if isinstance(v, torch.Generator))]
        try:
            self.graph = GraphedStep(self.body, self.learner.parameters(), generators, self.device)
        except NotGraphable as e:
            self._give_up(str(e))

    def _give_up(self, why: str) -> None:
        self.why = why
        warn_not_graphed(type(self.learner).__name__, why)


def _addresses(learner: Learner) -> dict[str, int]:
    """The address of every tensor in a learner's state: a graph keeps reading and writing there."""
    addresses = {name: v.data_ptr() for name, v in state_of(learner).items() if isinstance(v, Tensor)}
    return addresses | {f"net.{name}": v.data_ptr() for name, v in learner.net.state_dict().items()}
