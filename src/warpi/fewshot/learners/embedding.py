"""Inputs of T tasks to features, each task normalised by itself.

Where the statistics of a normalisation come from decides whether a prediction is transductive:

    transductive   those of the set itself, support or query: what a query gets depends on its neighbours
    support        those of the task's support, for its queries too
    running        those of all tasks of a training step; their running means afterwards
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.fewshot.learner import Learner, Problem
from warpi.nets.conv4 import convolution, n_blocks, pooling, positions
from warpi.utils.field_checks import at_least, within

_log = logging.getLogger(__name__)
Norm = Literal["transductive", "support", "running"]
Stats = list[Tensor]
"""What the support leaves behind for its queries: two tensors for each normalisation, from the input upwards."""


@dataclass
class Embedding(Learner):
    """A learner on features psi(x), and what may be said about them."""

    norm: Norm = "running"  # where the statistics of normalisations come from
    features: int | None = None  # width of psi; default: 64 channels, for vectors 40
    dropout: float = 0.0  # in psi of images

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, features=1)
        within(self, dropout=(0.0, 0.99))


class Psi(nn.Module):
    """psi(x): blocks of convolution, normalisation, ReLU, dropout, pooling; or two linear layers for vectors.

    With `minmax`, features of a set are moved and scaled to [0, 1], all numbers of the set together; with `skip`,
    a vector's features begin with the vector itself.
    """

    def __init__(
        self,
        problem: Problem,
        norm: Norm,
        width: int | None = None,  # default: 64 channels, for vectors 40
        dropout: float = 0.0,
        minmax: bool = False,
        skip: bool = False,
    ) -> None:
        super().__init__()
        width = width or (64 if problem.domain == "image" else 40)
        self.norm, self.minmax = norm, minmax
        self.body: Convolutions | Layers
        if problem.domain == "image":
            self.body = Convolutions(problem.shape, width, norm, dropout)
            self.features = width * positions(problem.shape)
        else:
            self.body = Layers(problem.shape, width, skip)
            self.features = width + skip * self.body.inputs

    @property
    def transductive(self) -> bool:
        return self.norm == "transductive" and (self.minmax or isinstance(self.body, Convolutions))

    def forward(self, x: Tensor, given: Stats | None = None) -> tuple[Tensor, Stats]:
        """Inputs [T, N, ...] -> features [T, N, D], and the set's statistics; `given` are those of the support."""
        given = None if self.norm == "transductive" else given
        f, stats = self.body(pixels(x), given)
        f = whole(f)
        if self.minmax:
            low, high = given[-2:] if given else (f.amin((1, 2), keepdim=True), f.amax((1, 2), keepdim=True))
            f, stats = (f - low) / (high - low).clamp_min(1e-6), [*stats, low, high]
        return f, stats

    def fuse(self, support: Tensor, query: Tensor) -> None:
        """Let torch.compile make fewer kernels of the convolutions in training, if it can for sets like these.

        Sets of other sizes would be compiled anew: `part` with it before they come. All of it is tried here, since the
        way back is compiled when it is first gone; the trial leaves gradients, running statistics and generators as
        they were.
        """
        body, device = self.body, support.device
        if not isinstance(body, Convolutions) or not body.channels_last:
            return
        before = {name: value.clone() for name, value in body.named_buffers()}
        chance = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        state = chance.get_state()
        body.fused = torch.compile(Convolutions.by_set, fullgraph=True, dynamic=False)
        try:
            with warnings.catch_warnings():  # of a compiler: the user can do nothing about them
                warnings.simplefilter("ignore")
                f, stats = self(support)
                (f.sum() + self(query, stats)[0].sum()).backward()
        except BaseException as error:
            body.fused = None
            if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)) or not isinstance(error, Exception):
                raise
            why = " ".join(str(error).split())[:160]  # whatever a compiler may raise
            _log.warning("torch.compile failed (%s): kernels are not fused, which is slower", why)
        finally:
            chance.set_state(state)
            for name, value in body.named_buffers():
                value.copy_(before[name])
            for p in body.parameters():
                p.grad = None

    def part(self) -> None:
        """Operator by operator again."""
        if isinstance(self.body, Convolutions):
            self.body.fused = None


class Layers(nn.Module):
    """Two linear layers with ReLU."""

    def __init__(self, shape: tuple[int, ...], width: int, skip: bool) -> None:
        super().__init__()
        self.inputs, self.skip = int(torch.Size(shape).numel()), skip
        first, second = nn.Linear(self.inputs, width), nn.Linear(width, width)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        for layer in (first, second):
            nn.init.xavier_normal_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-3)

    def forward(self, x: Tensor, given: Stats | None) -> tuple[Tensor, Stats]:  # noqa: ARG002
        x = x.flatten(2)
        f = self.layers(x)
        return torch.cat([x, f], -1) if self.skip else f, []


class Convolutions(nn.Module):
    """All images of all tasks in one convolution; statistics a task."""

    channels_last = True  # not possible under vmap
    fused: Callable[["Convolutions", Tensor, Stats | None], tuple[Tensor, Stats]] | None = None  # `by_set`, compiled

    def __init__(self, shape: tuple[int, ...], channels: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        sizes = [shape[0]] + [channels] * n_blocks(max(shape[1:]))
        pool = pooling(max(shape[1:]))
        self.blocks = nn.ModuleList(Block(a, b, pool, norm, dropout) for a, b in pairwise(sizes))
        self.alone = norm == "transductive"  # no set needs the statistics of another

    def forward(self, x: Tensor, given: Stats | None) -> tuple[Tensor, Stats]:
        if self.training and self.fused is not None:
            with torch._dynamo.config.patch(recompile_limit=256):  # one for all learners of a process
                return self.fused(self, x.contiguous(), given)  # other strides would be compiled anew
        if self.alone and len(x) > 1:
            return self.by_task(x), []
        return self.by_set(x, given)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles get: compiled code stays where it was made."""
        return {**self.__dict__, "fused": None}

    def by_set(self, x: Tensor, given: Stats | None) -> tuple[Tensor, Stats]:
        """Images in the order (task, image): what compiled code does fastest."""
        (T, N), h = x.shape[:2], x.flatten(0, 1)  # [T N, C, H, W]
        stats: Stats = []
        if self.channels_last:  # how GPUs like it
            h = h.contiguous(memory_format=torch.channels_last)
        for i, block in enumerate(self.blocks):
            h, own = block(h, T, given[2 * i : 2 * i + 2] if given else None)
            stats += own
        return h.reshape(T, N, -1), stats

    def by_task(self, x: Tensor) -> Tensor:
        """Images in the order (image, task), without statistics to give away: fastest operator by operator."""
        T, N = x.shape[:2]
        h = x.transpose(0, 1).flatten(0, 1)  # [N T, C, H, W]
        for block in self.blocks:
            assert isinstance(block, Block)
            h = block.by_task(h, T)
        return h.reshape(N, T, -1).transpose(0, 1)


class Block(nn.Module):
    """Convolution, normalisation with a learned shift (no scale: the next layer has one), ReLU, dropout, pooling."""

    def __init__(self, channels_in: int, channels: int, pool: nn.Module, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.convolution, self.pool, self.dropout = convolution(channels_in, channels), pool, dropout
        self.shift = nn.Parameter(torch.zeros(channels))
        self.running, self.momentum, self.eps = norm == "running", 0.1, 1e-5
        self.mean: Tensor
        self.var: Tensor
        if self.running:
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("var", torch.ones(channels))

    def forward(self, h: Tensor, T: int, given: Stats | None) -> tuple[Tensor, Stats]:
        h = self.convolution(h)
        stats = self.statistics(h, T) if given is None else given
        if self.training and self.dropout:
            return self.pool(F.dropout(F.relu(self.normalised(h, stats)), self.dropout)), stats
        # the same, and less to do: neither normalisation nor ReLU turns an order around
        return F.relu(self.normalised(self.pool(h), stats)), stats

    def by_task(self, h: Tensor, T: int) -> Tensor:
        """The same for images [N T, C, H, W], each task with its own statistics, which are not kept.

        A channel of a task is then a channel of [N, T C, H, W], and normalising those is one kernel there and one back.
        """
        h = self.convolution(h)
        parts = h.reshape(-1, T * h.shape[1], *h.shape[2:])
        h = F.batch_norm(parts, None, None, training=True, eps=self.eps).reshape(h.shape)
        shift = self.shift[:, None, None].to(h.dtype)
        if self.training and self.dropout:
            pooled: Tensor = self.pool(F.dropout(F.relu(h + shift), self.dropout))
            return pooled
        return F.relu(self.pool(h) + shift)

    def statistics(self, h: Tensor, T: int) -> Stats:
        """Mean and variance of channels of T tasks [T N, C, H, W], each task's own: [T or 1, C]."""
        if self.running and not self.training:
            return [self.mean[None], self.var[None]]
        parts = whole(h).view(1 if self.running else T, -1, *h.shape[1:])  # [T, N, C, H, W]
        var, mean = torch.var_mean(parts, (1, 3, 4), correction=0)
        if self.running:
            with torch.no_grad():
                self.mean.lerp_(mean[0], self.momentum)
                self.var.lerp_(var[0], self.momentum)
        return [mean, var]

    def normalised(self, h: Tensor, stats: Stats) -> Tensor:
        mean, var = stats
        scale = torch.rsqrt(var + self.eps)
        shift = self.shift - mean * scale  # [T, C]
        parts, form = h.view(len(mean), -1, *h.shape[1:]), (len(mean), 1, -1, 1, 1)
        return (parts * scale.view(form).to(h.dtype) + shift.view(form).to(h.dtype)).flatten(0, 1)


def whole(x: Tensor) -> Tensor:
    """In float32 where autocast has left less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pixels(x: Tensor) -> Tensor:
    """Bytes to [0, 1]; numbers as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def flat(x: Tensor) -> Tensor:
    """Inputs [T, N, ...] as vectors [T, N, D]."""
    return pixels(x).flatten(2)


def class_means(features: Tensor, y: Tensor, ways: int) -> Tensor:
    """The mean of each class: features [T, S, D], class numbers [T, S] -> [T, W, D]."""
    member = F.one_hot(y, ways).to(features.dtype)  # [T, S, W]
    return member.mT @ features / member.sum(1)[..., None].clamp_min(1)


def calibration(problem: Problem) -> tuple[nn.Parameter, nn.Parameter]:
    """gamma and beta of predictions gamma y + beta of a ridge, learned from their first values on.

    Unit vectors fitted by a ridge lie between 0 and 1: as logits they say next to nothing, and little is learned
    until gamma has grown. So it begins at 10.
    """
    return nn.Parameter(torch.tensor(1.0 if problem.regression else 10.0)), nn.Parameter(torch.zeros(()))


def targets(y: Tensor, ways: int, like: Tensor) -> Tensor:
    """What a ridge fits: unit vectors [T, S, W] of class numbers, or numbers [T, S, K]; of the type of `like`."""
    return (F.one_hot(y, ways) if ways else y).to(like.dtype)
