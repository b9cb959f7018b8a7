"""The training loop of few-shot learners: draw tasks, compute the loss and its gradient, take an Adam step."""

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
from warpi.fewshot.learners.embedding import FeatureNet
from warpi.training.checkpoint import state_of
from warpi.training.cuda_graph import WARM_UP, GraphedStep, NotGraphable, cudnn_search, warn_not_graphed
from warpi.training.engine import Diverged, Record, add_to_sum
from warpi.training.method import Log
from warpi.training.recipe import adam
from warpi.utils.seeding import generator
from warpi.utils.settings import check_types, setting


@dataclass(frozen=True)
class Training:
    """Training settings that do not depend on the learner."""

    iterations: int = setting(10_000, "number of training steps", low=0)
    tasks: int = setting(25, "number of tasks per step", low=1)
    train_ways: int = setting(0, "classes per training task, if more than in tests; 0: as many as in tests", low=0)
    queries: int = setting(15, "training queries per class, or per regression task", low=1)
    lr: float = setting(1e-3, "initial learning rate of Adam", low=0)
    schedule: Literal["cosine", "constant"] = setting("cosine", "learning rate schedule")
    weight_decay: float = setting(0.0, "weight decay of Adam", low=0)
    scalars: float = setting(
        1.0, "learning rate of scalar parameters (ridge penalty, logit scale), in units of --lr", low=0
    )
    clip: float = setting(0.0, "largest norm of the gradient; 0: no limit", low=0)
    augment: bool = setting(False, "augment training images: crops and mirrored photographs, affine maps of drawings")
    precision: Literal["32", "bf16"] = setting("32", "precision of the networks; weights and solvers stay in float32")
    compile: bool | None = setting(
        None, "fuse the convolutions with torch.compile (default: on a GPU, for 3,000 iterations or more)"
    )
    val_every: int = setting(500, "steps between two validations", low=1)
    val_tasks: int = setting(300, "number of tasks per validation", low=1)
    seed: int = setting(0, "seed of weights, tasks and noise; validation tasks are the same for all seeds")

    def __post_init__(self) -> None:
        check_types(self)

    def lr_at(self, i: int) -> float:
        """Learning rate of step i, counted from 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * i / max(self.iterations, 1)))

    def compiles(self, device: torch.device) -> bool:
        """Whether to fuse kernels. Compiling takes half a minute, too long for a short run."""
        return device.type == "cuda" and self.iterations >= 3000 if self.compile is None else self.compile


class Position:
    """The training state that is not part of the learner. A checkpoint stores both."""

    def __init__(self, learner: Learner, training: Training) -> None:
        self.optimizer = make_optimizer(list(learner.parameters()), training)
        self.generator = generator(training.seed, "training tasks", device=learner.generator.device)
        self.iteration = 0  # finished steps
        self.records = 0
        self.steps = 0  # since the last record
        self.seconds = 0.0  # duration of these steps
        self.sums: dict[str, Tensor] = {}  # sums of their logs, on the device
        self.best: float | None = None  # validation score of the best weights so far


def make_optimizer(parameters: list[nn.Parameter], training: Training) -> torch.optim.Optimizer | None:
    """Adam, with a separate learning rate for scalar parameters; None without parameters.

    Adam changes a parameter by at most its learning rate per step, so a scalar that must grow from 1 to 20 would take
    thousands of steps.
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

    Training tasks may have more ways than `kind` (`training.train_ways`). The caller may store the states of `learner`
    and `at` between two items and resume from them later; on a CPU the run is then the same bit for bit.
    """
    learner.check_started()
    problem = learner.problem
    device = learner.generator.device
    if problem.shape != data.shape or problem.regression != data.regression:
        raise UserError(
            f"the learner was started for {problem}, but inputs of {data.name} are {data.shape}, for "
            f"{'regression (ways=0)' if data.regression else 'classification'}; start it with Problem(data.shape, ways)"
        )
    tasks, val = task_pair(data.to(device), kind, training, device)
    return _train(learner, data.regression, tasks, val, training, at or Position(learner, training))


def task_pair(data: FewShotData, kind: Kind, training: Training, device: torch.device | str) -> tuple[Tasks, Tasks]:
    """The tasks for training and for validation."""
    data.check()
    if training.train_ways > (classes := len(data.train) if isinstance(data.train, Classes) else 0):
        raise UserError(f"there are only {classes} training classes; give at most --train-ways {classes}")
    if 0 < training.train_ways < kind.ways:
        raise UserError(f"training tasks need at least --ways {kind.ways}, got --train-ways {training.train_ways}")
    harder = kind._replace(ways=training.train_ways or kind.ways)
    tasks = make_tasks(data.train, harder, device, training=True, augment=training.augment, part="training")
    val = make_tasks(data.val, validation_kind(data, kind), device, training=False, augment=False, part="validation")
    return tasks, val


def _train(
    learner: Learner, lower: bool, tasks: Tasks, val: Tasks, training: Training, at: Position
) -> Iterator[Record | None]:
    """The training loop. `lower` means that a lower score is better."""
    bf16 = training.precision == "bf16"
    end = training.iterations if at.optimizer is not None else 0  # without parameters it is only evaluated
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
            record |= mean_logs(at)
            at.seconds = time.perf_counter() - began  # reading the means has waited for the device
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
            at.records += 1
            at.steps = 0
            at.seconds = 0.0
            for total in at.sums.values():
                total.zero_()  # in place: a captured step adds to them
            yield record


def validation_kind(data: FewShotData, kind: Kind) -> Kind:
    """The kind of validation tasks: a grid of 50 points, or as many images as in training."""
    return Kind(0, kind.shots, 50) if data.regression else kind


def mean_logs(at: Position) -> Record:
    """Means of the logs since the last record. Raises if one is not finite: a sum never recovers from that."""
    logs = {name: total.item() / max(at.steps, 1) for name, total in at.sums.items()}
    for name, value in logs.items():
        if not math.isfinite(value):
            raise _diverged(name, value, at)
    return logs


def _diverged(name: str, value: float, at: Position) -> Diverged:
    return Diverged(f"{name} became {value} before step {at.iteration}; lower --lr, set --clip 1, or --precision 32")


class Step:
    """One training step. On a GPU, after a few steps, it replays a CUDA graph."""

    def __init__(self, learner: Learner, tasks: Tasks, training: Training, at: Position) -> None:
        self.learner = learner
        self.tasks = tasks
        self.training = training
        self.at = at
        self.device = learner.generator.device
        self.n_observed = 0
        self.why = "" if self.device.type == "cuda" else "only GPUs have CUDA graphs"  # the reason to run plain steps
        self.graph: GraphedStep | None = None
        pays = training.compiles(self.device) and at.optimizer is not None and at.iteration < training.iterations
        self.fused = [module for module in learner.net.modules() if isinstance(module, FeatureNet) and pays]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=training.precision == "bf16"):
            for psi in self.fused:
                psi.fuse(*self._example_inputs(psi))

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
            self._give_up(f"its loss puts a new tensor into {moved[0]}; write into it in place instead")

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
            add_to_sum(at.sums, name, value)
        return {}

    def close(self) -> None:
        """Undo the fusion, so that the learner accepts tasks of any size."""
        for psi in self.fused:
            psi.unfuse()

    def _example_inputs(self, psi: FeatureNet) -> list[Tensor]:
        """Random inputs with the sizes of support and query sets."""
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
