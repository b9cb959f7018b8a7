"""The contract between a method and the engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from warpi.autodiff.memory_format import to_channels_last
from warpi.autodiff.passes import configure_passes
from warpi.data.batch import Batch
from warpi.data.loader import Loader
from warpi.errors import UserError, first_line
from warpi.nets.sync_batchnorm import synchronize_batchnorm
from warpi.training.recipe import Recipe
from warpi.training.task import Task, check_every_class
from warpi.utils import distributed
from warpi.utils.seeding import derive, generator
from warpi.utils.settings import check_types

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Log = Mapping[str, Tensor | float]
"""Maps names to scalars. Tensors may stay on the device; the engine reads them every few steps."""


class OutOfSample(NamedTuple):
    """Predictions by models that were not trained on the predicted rows."""

    p: Tensor  # [N, K] class probabilities of the training rows
    p_trusted: Tensor  # [n, K] class probabilities of the trusted rows
    transition: Tensor  # [K, K] estimated P(given = j | true = i)


@dataclass
class Method(ABC):
    """A method for learning from noisy labels.

    The fields are hyper-parameters with the paper's defaults. Everything created in `create_state` is state: networks,
    optimizers, generators, loaders, tensors, numbers, and lists or dicts of them. Checkpoints store it automatically.
    A method owns its networks and optimizer steps. It does not print, write files, read the clock or name a device,
    and it cannot see the true labels. The engine owns time, learning rates, evaluation and checkpoints.
    """

    family: ClassVar[str] = "baseline"  # or loss, transition, meta, selection, refinement, semi-supervised
    year: ClassVar[int | None] = None  # of the paper
    n_nets: ClassVar[int] = 1
    needs_different_nets: ClassVar[bool] = False  # its networks see the same batches, so equal weights would stay equal
    n_views: ClassVar[int] = 1  # augmented views of each training example
    n_trusted_views: ClassVar[int] = 1  # augmented views of each trusted example
    strong_views: ClassVar[tuple[int, ...]] = ()  # views that are always augmented strongly
    needs_meta: ClassVar[bool] = False  # cannot be trained without trusted examples
    needs_every_class: ClassVar[bool] = True  # each class needs a training example, and a trusted one if there are any
    least_batch: ClassVar[int] = 1  # smallest noisy batch that a step can use
    least_meta_batch: ClassVar[int] = 1  # smallest trusted batch that a step can use
    needs_noise_rate: ClassVar[bool] = False  # uses oracle knowledge; reports mark it
    noise_rate_field: ClassVar[str] = ""  # the field in which a user may set the noise rate
    resumes_mid_epoch: ClassVar[bool] = True  # False if `epoch` keeps state between steps besides that of its loaders
    trains_network: ClassVar[bool] = True  # False if `epoch` fits models without steps of gradient descent
    for_tables: ClassVar[dict[str, Any]] = {}  # hyper-parameters that suit tables better than the paper's
    table_net: ClassVar[str] = "mlp"  # network for tables and other vectors
    recipe_defaults: ClassVar[dict[str, Any]] = {}  # settings of the recipe that suit this method for all data

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def data_defaults(cls, table: bool, n_classes: int) -> dict[str, Any]:  # noqa: ARG003 (for subclasses)
        """Hyper-parameters whose default depends on the kind of data and on the number of classes."""
        return cls.for_tables if table else {}

    def start(self, task: Task, recipe: Recipe) -> None:
        """Create all state: the networks, optimizers and loaders of every method, then its own."""
        noise_rate = getattr(self, self.noise_rate_field, None)
        task = task if noise_rate is None else replace(task, noise_rate=noise_rate)
        self.check(task)
        self.task = task
        self.recipe = recipe
        device = task.train.examples.device
        seed = recipe.seed
        self.schedule_starts = [0]  # epochs in which the schedule of the learning rate starts
        nets = [to_channels_last(_build_net(recipe, task, i).to(device).train()) for i in range(self.n_nets)]
        config = recipe.pass_config(device, self.needs_meta)
        self.nets: list[nn.Module] = [configure_passes(net, config) for net in nets]
        if recipe.sync_batchnorm and distributed.n_ranks() > 1:
            self.nets = [synchronize_batchnorm(net) for net in self.nets]
        self.optimizers = [recipe.make_optimizer(net.parameters()) for net in self.nets]
        self.generator = generator(seed, "method", device=device)
        if self.average_decay:
            self.averaged_nets = [deepcopy(net).requires_grad_(False).eval() for net in self.nets]
        n_views, strong = self.plan_views(recipe.augment == "strong")
        train = task.train.with_strong_views(strong)
        self.loader = Loader(
            train, recipe.batch_size, derive(seed, "train batches"), views=n_views, in_blocks=recipe.shuffle == "blocks"
        )
        if task.meta is not None:
            trusted = task.meta.with_strong_views(strong)
            trusted_seed = derive(seed, "meta batches")
            self.meta_loader = Loader(trusted, recipe.meta_batch_size, trusted_seed, views=self.n_trusted_views)
        self.create_state()

    def start_without_steps(self, task: Task, recipe: Recipe, net: nn.Module) -> None:
        """Create the state of a method whose `epoch` fits a model, `net`, in one step."""
        self.check(task)
        self.task = task
        self.recipe = recipe
        self.schedule_starts = [0]
        self.nets = [net.to(task.device)]
        self.optimizers = []
        self.generator = generator(recipe.seed, "method", device=task.device)
        self.loader = Loader(task.train, len(task.train), derive(recipe.seed, "train batches"))
        if task.meta is not None:
            self.meta_loader = Loader(task.meta, len(task.meta), derive(recipe.seed, "meta batches"))

    def create_state(self) -> None:  # noqa: B027 (most methods have none)
        """Create the state of this method, given `self.task`, `self.recipe` and the networks. Override it."""

    def plan_views(self, strong: bool) -> tuple[int, tuple[int, ...]]:
        """The number of views of each training example, and which of them are augmented strongly.

        `strong` is true with `--augment strong`. Override it in a method that then needs weak views as well.
        """
        return self.n_views, self.strong_views or (tuple(range(self.n_views)) if strong else ())

    def check(self, task: Task) -> None:
        """Raise if the task lacks something that this method needs."""
        name = type(self).__name__
        if self.needs_meta and task.meta is None:
            raise UserError(
                f"{name} needs trusted examples, but there are none; pass checked rows with --trusted FILE, or mark "
                "them in a column 'trusted' (--meta N takes some from data with correct labels); if nobody has checked "
                "any, `warpi pick` chooses rows to check, and methods such as auto and elr do not need any"
            )
        if self.needs_every_class:
            check_every_class(task)
        if self.needs_noise_rate and task.noise_rate is None:
            flag = f"--{self.noise_rate_field.replace('_', '-')}, or " if self.noise_rate_field else ""
            raise UserError(
                f"{name} needs the noise rate (the fraction of wrong labels), which is unknown for this data; set it "
                f"with {flag}`noise_rate` of NoisyLabelClassifier, or choose a method without it (`warpi list methods`)"
            )

    def check_nets_differ(self) -> None:
        """Raise if networks that must differ start with the same weights. Call it before the first step."""
        if not self.needs_different_nets or any(isinstance(m, _DROPOUT) and m.p > 0 for m in self.net.modules()):
            return
        first, *others = ([*net.parameters()] for net in self.nets)
        if any(other and all(map(torch.equal, first, other)) for other in others):
            raise UserError(
                f"{type(self).__name__} needs {self.n_nets} networks that start with different weights, but these "
                "are equal: copies of one module, or all weights are from one file; pass a function that "
                "builds a new network, such as net=lambda shape, n_classes: Net(), and no weights"
            )

    def before_epoch(self, t: int) -> None:  # noqa: B027 (most methods need none)
        """Change what depends on the epoch. Called before the first step of epoch t, not if resumed within it."""

    def lr_factor(self, t: int) -> float:  # noqa: ARG002 (for subclasses)
        """Factor of the recipe's learning rate in epoch t."""
        return 1.0

    def epoch(self, t: int) -> Iterator[Log]:
        """Train for one epoch and yield a log after every step."""
        if self.loader.count <= t * self.loader.steps:
            self.before_epoch(t)
        for batch in self.loader.epoch(t):
            yield self.step(batch)

    @abstractmethod
    def step(self, batch: Batch) -> Log:
        """Update from one batch of noisy examples: the algorithm box of the paper."""

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities of new inputs, averaged over the networks, in evaluation mode.  [B, K]"""
        nets = self.predictors
        views = [x, x.flip(-1)] if self.recipe.mirror_test and x.dim() == 4 else [x]
        with evaluating(nets):
            return torch.stack([net(view).softmax(dim=1) for net in nets for view in views]).mean(0)

    def label_samples(self, z: Tensor, y: Tensor, n: int, generator: torch.Generator) -> Tensor | None:  # noqa: ARG002
        """Draw n samples of the log-probability of the given labels y [B] from the logits z [B, K].  [n, B]

        `audit` turns their spread into an uncertainty. None (the default): the method has nothing to sample.
        """
        return None

    def report_progress(self, what: str, share: float) -> None:  # noqa: B027 (a run replaces it)
        """Report that `share` of long work without steps is done. Methods call it between parts of that work.

        By default, it does nothing. A run replaces it by a function that shows the progress and stops after a signal.
        """

    def choice(self) -> list[dict[str, Any]] | None:
        """One entry per candidate that the method compared: candidate, score, error, seconds, weight and note.

        A run stores it as `choice.json`. None (the default): the method does not compare candidates.
        """
        return None

    def out_of_sample(self) -> OutOfSample | None:
        """Predictions of the training rows and the trusted rows by models that were not trained on them.

        `audit` prefers them to the predictions of the trained method. None (the default): there are none.
        """
        return None

    @property
    def predictors(self) -> list[nn.Module]:
        """The networks that predict: the averaged ones if weights are averaged."""
        return self.averaged_nets if self.average_decay else self.nets

    @property
    def uses_trusted(self) -> bool:
        """Whether training uses the trusted examples: always, or if there are any and `use_trusted` is set."""
        return self.needs_meta or (getattr(self, "use_trusted", False) and self.task.meta is not None)

    @property
    def average_decay(self) -> float:
        """Fraction of the averaged weights that a step keeps; 0: no weights are averaged."""
        return self.recipe.average if self.trains_network else 0.0

    @torch.no_grad()
    def update_averages(self, steps: int) -> None:
        """Move the averaged networks toward the trained ones. `steps` is the number of steps so far.

        They follow more closely in the first steps, when the weights still change quickly.
        """
        if not self.average_decay:
            return
        kept = min(self.average_decay, steps / (steps + 9))
        for net, averaged in zip(self.nets, self.averaged_nets, strict=True):
            new = [*net.parameters(), *net.buffers()]
            old = [*averaged.parameters(), *averaged.buffers()]
            pairs = list(zip(old, new, strict=True))
            torch._foreach_lerp_(
                [a for a, b in pairs if b.is_floating_point()], [b for _, b in pairs if b.is_floating_point()], 1 - kept
            )
            for a, b in pairs:
                if not b.is_floating_point():
                    a.copy_(b)  # a count of batches

    @property
    def net(self) -> nn.Module:
        return self.nets[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    @property
    def lr(self) -> float | Tensor:
        """The classifier's current learning rate; on a GPU a tensor, which a graphed step reads at each launch."""
        lr: float | Tensor = self.optimizer.param_groups[0]["lr"] if self.trains_network else 0.0
        return lr

    @property
    def is_meta_step(self) -> bool:
        """Whether meta-parameters are updated in the step on the last batch of the loader."""
        return (self.loader.count - 1) % self.recipe.meta_every == 0


def _build_net(recipe: Recipe, task: Task, number: int) -> nn.Module:
    """Build the network. If a user-supplied function fails, the error shows the arguments it was called with."""
    try:
        return recipe.make_net(task.shape, task.n_classes, number)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as e:
        if isinstance(e, UserError) or isinstance(recipe.net, str | nn.Module):
            raise
        name = getattr(recipe.net, "__name__", type(recipe.net).__name__)
        raise UserError(
            f"the network cannot be built: {name}(shape, n_classes) was called as {name}({task.shape}, "
            f"{task.n_classes}) ({first_line(e)}); pass the module itself, such as net=Net(), or a function of "
            "these two arguments that builds it"
        ) from e


@contextmanager
def evaluating(nets: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager: put networks into evaluation mode, and restore their modes at the end."""
    modules = [(module, module.training) for net in nets for module in net.modules()]
    for module, _ in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in modules:
            module.training = training


def add_trusted(method: Method, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
    """Views and labels of a batch, followed by those of a trusted batch if the method uses trusted examples."""
    if not method.uses_trusted:
        return batch.views, batch.y
    trusted = method.meta_loader.draw()
    views = tuple(torch.cat(pair) for pair in zip(batch.views, trusted.views, strict=True))
    return views, torch.cat([batch.y, trusted.y])


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Take one step of an optimizer along the gradient of a loss, averaged over the ranks; return the detached loss.

    Only the parameters of the optimizer get gradients, not a meta-network that contributed to the loss.
    """
    optimizer.zero_grad()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loss.backward(inputs=[p for p in parameters if p.requires_grad])  # type: ignore[no-untyped-call]
    distributed.average(p.grad for p in parameters if p.grad is not None)
    optimizer.step()
    return loss.detach()
