"""The recipe: how a classifier is trained with any method. The methods in one table of results share a recipe."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from warpi.autodiff.passes import PassConfig
from warpi.errors import UserError
from warpi.nets.registry import VECTOR_NETS, make_net
from warpi.utils.seeding import derive, seeded
from warpi.utils.settings import check_types, setting

ADDED_FIELDS = (
    "lr_warmup",
    "nesterov",
    "decay_norms",
    "average",
    "augment",
    "mixup",
    "label_smoothing",
    "mirror_test",
    "shuffle",
)
"""Fields that the specifications of older runs lack."""
Net = str | nn.Module | Callable[[tuple[int, ...], int], nn.Module]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Recipe:
    """Network, length, batches, optimizer and learning rate. Each field is a flag of `warpi fit`."""

    net: Net = setting("mlp", "network, one of `warpi list nets`; in Python also a module or a function that makes it")
    weights: str | None = setting(None, 'pretrained weights: a .safetensors or .pth file, or "torchvision"')
    epochs: int = setting(30, "passes over the training rows", low=1)
    batch_size: int = setting(64, "noisy examples per step, summed over all processes", low=1)
    meta_batch_size: int = setting(64, "trusted examples per step, summed over all processes", low=1)
    optimizer: Literal["sgd", "adam"] = setting("sgd", "optimizer of the classifier")
    lr: float = setting(0.05, "initial learning rate of the classifier", low=0)
    momentum: float = setting(0.9, "momentum of sgd", low=0)
    weight_decay: float = setting(5e-4, "L2 penalty on the weights of the classifier", low=0)
    schedule: Literal["step", "cosine", "constant"] = setting("step", "how the learning rate changes over the epochs")
    milestones: tuple[float, ...] = setting(
        (2 / 3, 5 / 6), "fractions of the epochs after which the schedule `step` multiplies the rate by --decay", 0, 1
    )
    decay: float = setting(0.1, "factor of the schedule `step`", low=0)
    lr_warmup: float = setting(0.0, "epochs in which the learning rate rises from 0, step by step", low=0)
    nesterov: bool = setting(False, "use Nesterov momentum")
    decay_norms: bool = setting(True, "apply weight decay to biases and normalization layers too")
    average: float = setting(0.0, "decay rate of the averaged weights, which predict; 0: no averaging", 0, 1)
    augment: Literal["weak", "strong"] = setting("weak", "strong: also rotate, shear, recolor and partly cover images")
    mixup: float = setting(0.0, "parameter of mixup's Beta distribution, for plain cross-entropy; 0: off", low=0)
    label_smoothing: float = setting(0.0, "label smoothing, for methods with plain cross-entropy", 0, 1)
    mirror_test: bool = setting(False, "predict from an image and its mirror image")
    precision: Literal["32", "bf16"] = setting("32", "precision of the network; weights and losses stay in float32")
    compile: bool | None = setting(None, "trace and fuse the network (default: for image nets on a GPU, epochs >= 10)")
    checkpointing: bool = setting(False, "save memory: recompute activations inside blocks (needs --compile)")
    accumulate: int = setting(1, "save memory: number of micro-batches into which a batch is divided", low=1)
    shuffle: Literal["rows", "blocks"] = setting(
        "rows", "order of an epoch; blocks: mix 16 blocks of 8192 neighboring rows at a time, for files beyond memory"
    )
    meta_every: int = setting(1, "do a meta step only every N steps", low=1)
    meta_gradient: Literal["exact", "difference"] = setting("exact", "Jacobian product: exact or a finite difference")
    meta_depth: int = setting(0, "number of last child modules that the virtual step updates; 0: all", low=0)
    meta_order: Literal["virtual", "real"] = setting("virtual", "real: the real step also serves as the virtual step")
    sync_batchnorm: bool = setting(False, "compute BatchNorm statistics over all processes, not in each separately")
    seed: int = setting(0, "seed of the training; the seed of the data split is derived from it")

    def __post_init__(self) -> None:
        check_types(self)
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise UserError(
                "Nesterov momentum needs --optimizer sgd and --momentum above 0; set both, or use --no-nesterov"
            )
        if self.checkpointing and not self.compile:
            raise UserError("--checkpointing (recomputing activations) requires --compile")
        if self.meta_order == "real" and self.optimizer != "sgd":
            raise UserError("--meta-order real needs a step that is linear in the gradient; use --optimizer sgd")
        if self.meta_gradient == "difference" and self.precision != "32":
            raise UserError(
                "--meta-gradient difference needs --precision 32, because rounding errors of bf16 hide the difference"
            )

    def stored(self) -> dict[str, Any]:
        """All fields except ADDED_FIELDS with their default value, so that older runs keep their specification."""
        usual = {f.name: f.default for f in fields(self) if f.name in ADDED_FIELDS}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    def lr_at(self, t: int, schedule_starts: Sequence[int] = (0,), done: float = 1.0) -> float:
        """Learning rate of epoch t, counted from 0. The schedule starts in each of the epochs `schedule_starts`.

        During warm-up it also depends on `done`, the fraction of the epoch's steps that are done after this one.
        """
        starts = [s for s in sorted({0, *schedule_starts}) if s < self.epochs]
        first = max(s for s in starts if s <= t)
        last = min([s for s in starts if s > t] + [self.epochs])
        epochs = last - first
        t = t - first
        lr = self.lr * min(1.0, (t + done) / self.lr_warmup) if self.lr_warmup else self.lr
        if self.schedule == "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * t / epochs))
        if self.schedule == "constant":
            return lr
        return lr * self.decay ** sum(t >= round(m * epochs) for m in self.milestones)

    def make_net(self, shape: tuple[int, ...], n_classes: int, number: int = 0) -> nn.Module:
        """Build network `number` of a method, with its own initialization seed."""
        with seeded(derive(self.seed, "init", number)):
            return make_net(self.net, shape, n_classes, self.weights)

    def make_module(self, purpose: str, build: Callable[[], M]) -> M:
        """Build another module of a method, with an initialization seed for its purpose."""
        with seeded(derive(self.seed, purpose)):
            return build()

    def pass_config(self, device: torch.device, meta: bool = False) -> PassConfig:
        """How to run the passes of a network on this device.

        Compiling takes half a minute, which does not pay off in a short run. A meta step keeps the activations of two
        batches, so on a GPU, where memory is short, a traced network recomputes some of them.
        """
        compiles = self.compile
        if compiles is None:
            is_image_net = isinstance(self.net, str) and self.net not in VECTOR_NETS
            # The sums over ranks of synchronized BatchNorm cannot be traced.
            compiles = device.type == "cuda" and is_image_net and self.epochs >= 10 and not self.sync_batchnorm
        return PassConfig(
            bf16=self.precision == "bf16",
            compile=compiles,
            lean=compiles and meta and device.type == "cuda",
            checkpointing=self.checkpointing,
            accumulate=self.accumulate,
            depth=self.meta_depth,
            difference=self.meta_gradient == "difference",
        )

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        if self.optimizer == "adam":
            return adam(parameters, self.lr, self.weight_decay, self.decay_norms)
        lr, fused = _for_device(parameters, self.lr)
        return torch.optim.SGD(
            _groups(parameters, self.decay_norms),
            lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            fused=fused or None,
        )


def adam(
    parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0, decay_norms: bool = True
) -> torch.optim.Optimizer:
    """Adam whose step can be part of a CUDA graph."""
    parameters = list(parameters)
    rate, on_gpu = _for_device(parameters, lr)
    groups = _groups(parameters, decay_norms)
    fused = on_gpu or all(p.device.type == "cpu" for p in parameters)
    return torch.optim.Adam(groups, rate, weight_decay=weight_decay, capturable=on_gpu, fused=fused or None)


def _groups(parameters: list[nn.Parameter], decay_norms: bool) -> list[Any]:
    """Parameter groups. Without `decay_norms`, biases and normalization layers form a group without weight decay."""
    if decay_norms:
        return parameters
    matrices = [p for p in parameters if p.dim() > 1]  # filters of convolutions too
    vectors = [p for p in parameters if p.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _for_device(parameters: list[nn.Parameter], lr: float) -> tuple[float | Tensor, bool]:
    """Learning rate and whether to fuse. On a GPU the rate is a tensor, which a CUDA graph reads at each launch."""
    on_gpu = all(p.is_cuda for p in parameters)
    return (torch.tensor(lr, device=parameters[0].device) if on_gpu else lr), on_gpu
