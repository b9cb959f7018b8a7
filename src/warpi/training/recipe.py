"""How a classifier is trained, whatever the method: the same recipe for every row of a table."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from warpi.autodiff.passes import PassConfig
from warpi.errors import UserError
from warpi.nets.registry import make_net
from warpi.utils.field_checks import at_least, check_types, setting, within
from warpi.utils.seeding import derive, seeded

LATER = ("lr_warmup", "nesterov", "decay_norms", "average", "augment", "mixup", "label_smoothing", "mirror_test")
"""Fields that older specifications lack."""
Net = str | nn.Module | Callable[[tuple[int, ...], int], nn.Module]


@dataclass(frozen=True)
class Recipe:
    """Network, length, batches, optimizer and learning rate. The flags of `warpi fit` are these fields."""

    net: Net = "mlp"  # a name of `warpi list nets`; from Python also your own nn.Module, or a function that makes one
    weights: str | None = None  # pretrained weights: a local .safetensors or .pth file, or "torchvision"
    epochs: int = 30
    batch_size: int = 64
    meta_batch_size: int = 64
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: Literal["step", "cosine", "constant"] = "step"
    milestones: tuple[float, ...] = (2 / 3, 5 / 6)  # shares of the epochs after which `step` multiplies lr by `decay`
    decay: float = 0.1
    lr_warmup: float = setting(0.0, "epochs in which the learning rate rises from 0, step by step")
    nesterov: bool = setting(False, "use Nesterov momentum")
    decay_norms: bool = setting(True, "apply weight decay to biases and normalization layers too")
    average: float = setting(0.0, "share of the averaged weights kept per step; they predict; 0: no averaging")
    augment: Literal["weak", "strong"] = setting(
        "weak", "strong: images are also rotated, sheared, recolored and partly covered"
    )
    mixup: float = setting(0.0, "parameter of mixup's Beta distribution, for methods with plain cross-entropy; 0: off")
    label_smoothing: float = setting(0.0, "label smoothing, for methods with plain cross-entropy")
    mirror_test: bool = setting(False, "predict from an image and its mirror image")
    precision: Literal["32", "bf16"] = "32"  # of the network's operators; weights and losses stay in float32
    compile: bool | None = (
        None  # trace the network once, fuse its kernels; default: for image nets on a GPU, epochs >= 10
    )
    checkpointing: bool = False  # keep the activations at block borders only and compute the others again (--compile)
    accumulate: int = 1  # parts in which a batch goes through the network, one after the other, to save memory
    meta_every: int = 1  # a meta step every that many steps
    meta_gradient: Literal["exact", "difference"] = "exact"  # difference: the product J g by a finite difference
    meta_depth: int = 0  # let the virtual step move that many last children of the network only; 0: all of it
    meta_order: Literal["virtual", "real"] = "virtual"  # real: the real step serves as the virtual one
    sync_batchnorm: bool = False  # statistics over all ranks instead of each rank's share of the batch
    seed: int = 0  # chance of training; the chance that makes the task is another number made from it

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, epochs=1, batch_size=1, meta_batch_size=1, lr=0, momentum=0, weight_decay=0, decay=0)
        at_least(self, accumulate=1, meta_every=1, meta_depth=0)
        at_least(self, lr_warmup=0, mixup=0)
        within(self, milestones=(0, 1), average=(0, 1), label_smoothing=(0, 1))
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise UserError("Nesterov momentum needs --optimizer sgd and --momentum above 0; add --no-nesterov")
        if self.checkpointing and not self.compile:
            raise UserError("checkpointing chooses among the activations of a traced network; add --compile")
        if self.meta_order == "real" and self.optimizer != "sgd":
            raise UserError(
                "the real step can serve as the virtual one if it is linear in the gradient; --optimizer sgd"
            )
        if self.meta_gradient == "difference" and self.precision != "32":
            raise UserError("a finite difference drowns in the rounding of bf16; use --precision 32")

    def stored(self) -> dict[str, Any]:
        """All fields, except later additions at their default, so that specifications equal those of older versions."""
        usual = {f.name: f.default for f in fields(self) if f.name in LATER}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    def lr_at(self, t: int, beginnings: Sequence[int] = (0,), done: float = 1.0) -> float:
        """Learning rate of epoch t, counted from 0, if a training begins in each of the epochs `beginnings`.

        During warm-up it also depends on `done`, the share of the epoch's steps that are done after this one.
        """
        borders = [b for b in sorted({0, *beginnings}) if b < self.epochs]
        first = max(b for b in borders if b <= t)
        last = min([b for b in borders if b > t] + [self.epochs])
        t, epochs = t - first, last - first
        lr = self.lr * min(1.0, (t + done) / self.lr_warmup) if self.lr_warmup else self.lr
        if self.schedule == "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * t / epochs))
        if self.schedule == "constant":
            return lr
        return lr * self.decay ** sum(t >= round(m * epochs) for m in self.milestones)

    def make_net(self, shape: tuple[int, ...], n_classes: int, number: int = 0) -> nn.Module:
        """Network `number` of a method, initialised by chance of its own."""
        with seeded(derive(self.seed, "init", number)):
            return make_net(self.net, shape, n_classes, self.weights)

    def pass_config(self, device: torch.device, meta: bool = False) -> PassConfig:
        """How the passes of a network are done. Compiling takes half a minute, which a short run does not win back.

        A meta step holds the activations of two batches at a time; on a GPU, where memory is short, it is lean.
        """
        pays = device.type == "cuda" and isinstance(self.net, str) and self.net != "mlp" and self.epochs >= 10
        pays = pays and not self.sync_batchnorm  # whose sums over ranks cannot be traced
        traced = pays if self.compile is None else self.compile
        return PassConfig(
            bf16=self.precision == "bf16",
            compile=traced,
            lean=traced and meta and device.type == "cuda",
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
    """Adam, such that a step of it can be part of a CUDA graph."""
    parameters = list(parameters)
    rate, fused = _for_device(parameters, lr)
    groups = _groups(parameters, decay_norms)
    return torch.optim.Adam(groups, rate, weight_decay=weight_decay, capturable=fused, fused=fused or None)


def _groups(parameters: list[nn.Parameter], decay_norms: bool) -> list[Any]:
    """The parameters; without `decay_norms` in two groups, of which biases and norms have no weight decay."""
    if decay_norms:
        return parameters
    filters = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    return [{"params": filters}, {"params": vectors, "weight_decay": 0.0}]


def _for_device(parameters: list[nn.Parameter], lr: float) -> tuple[float | Tensor, bool]:
    """On a GPU the learning rate is a tensor, which a captured step reads anew, and a step is one kernel."""
    on_gpu = all(p.is_cuda for p in parameters)
    return (torch.tensor(lr, device=parameters[0].device) if on_gpu else lr), on_gpu
