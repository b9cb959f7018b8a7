"""Features of the inputs of T tasks, each task normalized separately.

The source of the normalization statistics decides whether predictions are transductive:

    transductive   the set itself, support or query: the features of a query depend on the other queries
    support        the support set of the task, also for its queries
    running        all tasks of a training step; in evaluation, running means of these
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
from warpi.utils.devices import DEVICE_ERRORS
from warpi.utils.settings import setting

_log = logging.getLogger("warpi.fewshot")
Norm = Literal["transductive", "support", "running"]
Stats = list[Tensor]
"""Statistics of a support set, with which its queries are normalized: two tensors per layer, in order."""
NORM_HELP = "source of the normalization statistics"
FEATURES_HELP = "width of the network (default: 64 channels for images, 40 units for vectors)"


@dataclass
class Embedding(Learner):
    """Base class of learners that use features psi(x)."""

    norm: Norm = setting("running", NORM_HELP)
    features: int | None = setting(None, FEATURES_HELP, low=1)
    dropout: float = setting(0.0, "dropout rate of the feature network, for images", low=0, high=0.99)


class FeatureNet(nn.Module):
    """psi(x): blocks of convolution, normalization, ReLU, dropout and pooling, or two linear layers for vectors.

    With `minmax`, the features of a set are scaled to [0, 1], with one scale for the whole set. With `skip`, the
    features of a vector are appended to the vector itself.
    """

    def __init__(
        self,
        problem: Problem,
        norm: Norm,
        width: int | None = None,
        dropout: float = 0.0,
        minmax: bool = False,
        skip: bool = False,
    ) -> None:
        super().__init__()
        width = width or (64 if problem.domain == "image" else 40)
        self.norm = norm
        self.minmax = minmax
        self.body: Convolutions | LinearLayers
        if problem.domain == "image":
            self.body = Convolutions(problem.shape, width, norm, dropout)
            self.features = width * positions(problem.shape)
        else:
            self.body = LinearLayers(problem.shape, width, skip)
            self.features = width + skip * self.body.inputs

    @property
    def transductive(self) -> bool:
        return self.norm == "transductive" and (self.minmax or isinstance(self.body, Convolutions))

    def forward(self, x: Tensor, support_stats: Stats | None = None) -> tuple[Tensor, Stats]:
        """Return features [T, N, D] of inputs [T, N, ...] and the statistics that normalized them.

        For queries, `support_stats` are the statistics of their support set.
        """
        if self.norm == "transductive":
            support_stats = None
        f, stats = self.body(scale_pixels(x), support_stats)
        f = to_float32(f)
        if self.minmax:
            if support_stats:
                low, high = support_stats[-2:]
            else:
                low = f.amin((1, 2), keepdim=True)
                high = f.amax((1, 2), keepdim=True)
            f = (f - low) / (high - low).clamp_min(1e-6)
            stats = [*stats, low, high]
        return f, stats

    def fuse(self, support: Tensor, query: Tensor) -> None:
        """Fuse the convolutions with torch.compile, for training on sets of these sizes. Logs a warning if that fails.

        Sets of other sizes would be compiled again, so call `unfuse` before using them. A forward and a backward pass
        are compiled here; gradients, running statistics and the random state are restored afterwards.
        """
        body = self.body
        device = support.device
        if not isinstance(body, Convolutions) or not body.channels_last:
            return
        before = {name: value.clone() for name, value in body.named_buffers()}
        rng = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        state = rng.get_state()
        body.fused = torch.compile(Convolutions.forward_task_major, fullgraph=True, dynamic=False)
        try:
            with warnings.catch_warnings():  # the user cannot act on warnings of the compiler
                warnings.simplefilter("ignore")
                f, stats = self(support)
                (f.sum() + self(query, stats)[0].sum()).backward()
        except BaseException as error:  # a compiler may raise anything
            body.fused = None
            if isinstance(error, DEVICE_ERRORS) or not isinstance(error, Exception):
                raise
            why = " ".join(str(error).split())[:160]
            _log.warning("torch.compile failed (%s); kernels are not fused, which is slower", why)
        finally:
            rng.set_state(state)
            for name, value in body.named_buffers():
                value.copy_(before[name])
            for p in body.parameters():
                p.grad = None

    def unfuse(self) -> None:
        """Run the convolutions operator by operator again."""
        if isinstance(self.body, Convolutions):
            self.body.fused = None


class LinearLayers(nn.Module):
    """Two linear layers with ReLU."""

    def __init__(self, shape: tuple[int, ...], width: int, skip: bool) -> None:
        super().__init__()
        self.inputs = int(torch.Size(shape).numel())
        self.skip = skip
        first = nn.Linear(self.inputs, width)
        second = nn.Linear(width, width)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        for layer in (first, second):
            nn.init.xavier_normal_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-3)

    def forward(self, x: Tensor, support_stats: Stats | None) -> tuple[Tensor, Stats]:  # noqa: ARG002
        x = x.flatten(2)
        f = self.layers(x)
        return torch.cat([x, f], -1) if self.skip else f, []


class Convolutions(nn.Module):
    """Convolutions over the images of all tasks together, with separate statistics per task."""

    channels_last = True  # False under vmap, which does not support it
    # `forward_task_major`, compiled
    fused: Callable[["Convolutions", Tensor, Stats | None], tuple[Tensor, Stats]] | None = None

    def __init__(self, shape: tuple[int, ...], channels: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        sizes = [shape[0]] + [channels] * n_blocks(max(shape[1:]))
        pool = pooling(max(shape[1:]))
        self.blocks = nn.ModuleList(Block(a, b, pool, norm, dropout) for a, b in pairwise(sizes))
        self.separate_sets = norm == "transductive"  # each set is normalized with its own statistics

    def forward(self, x: Tensor, support_stats: Stats | None) -> tuple[Tensor, Stats]:
        if self.training and self.fused is not None:
            with torch._dynamo.config.patch(recompile_limit=256):  # all learners of a process count toward the limit
                return self.fused(self, x.contiguous(), support_stats)  # inputs with other strides would be recompiled
        if self.separate_sets and len(x) > 1:
            return self.forward_image_major(x), []
        return self.forward_task_major(x, support_stats)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without compiled code."""
        return {**self.__dict__, "fused": None}

    def forward_task_major(self, x: Tensor, support_stats: Stats | None) -> tuple[Tensor, Stats]:
        """Process images in the order (task, image), which is fastest for compiled code."""
        T, N = x.shape[:2]
        h = x.flatten(0, 1)  # [T N, C, H, W]
        stats: Stats = []
        if self.channels_last:  # faster on GPUs
            h = h.contiguous(memory_format=torch.channels_last)
        for i, block in enumerate(self.blocks):
            h, block_stats = block(h, T, support_stats[2 * i : 2 * i + 2] if support_stats else None)
            stats += block_stats
        return h.reshape(T, N, -1), stats

    def forward_image_major(self, x: Tensor) -> Tensor:
        """Process images in the order (image, task), which is fastest without a compiler. Returns no statistics."""
        T, N = x.shape[:2]
        h = x.transpose(0, 1).flatten(0, 1)  # [N T, C, H, W]
        for block in self.blocks:
            assert isinstance(block, Block)
            h = block.forward_image_major(h, T)
        return h.reshape(N, T, -1).transpose(0, 1)


class Block(nn.Module):
    """Convolution, normalization, ReLU, dropout, pooling. Only the shift is learned: the next layer has a scale."""

    def __init__(self, channels_in: int, channels: int, pool: nn.Module, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.convolution = convolution(channels_in, channels)
        self.pool = pool
        self.dropout = dropout
        self.shift = nn.Parameter(torch.zeros(channels))
        self.running = norm == "running"
        self.momentum = 0.1
        self.eps = 1e-5
        self.mean: Tensor
        self.var: Tensor
        if self.running:
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("var", torch.ones(channels))

    def forward(self, h: Tensor, T: int, support_stats: Stats | None) -> tuple[Tensor, Stats]:
        h = self.convolution(h)
        stats = self.statistics(h, T) if support_stats is None else support_stats
        if self.training and self.dropout:
            return self.pool(F.dropout(F.relu(self.normalize(h, stats)), self.dropout)), stats
        # Pooling first gives the same result with less work: normalization and ReLU are monotonic.
        return F.relu(self.normalize(self.pool(h), stats)), stats

    def forward_image_major(self, h: Tensor, T: int) -> Tensor:
        """Like `forward`, for images [N T, C, H, W] and separate statistics per task, which are not returned.

        Viewed as [N, T C, H, W], one BatchNorm kernel normalizes all tasks.
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
        """Mean and variance per task and channel of [T N, C, H, W].  [T or 1, C]"""
        if self.running and not self.training:
            return [self.mean[None], self.var[None]]
        parts = to_float32(h).view(1 if self.running else T, -1, *h.shape[1:])  # [T, N, C, H, W]
        var, mean = torch.var_mean(parts, (1, 3, 4), correction=0)
        if self.running:
            with torch.no_grad():
                self.mean.lerp_(mean[0], self.momentum)
                self.var.lerp_(var[0], self.momentum)
        return [mean, var]

    def normalize(self, h: Tensor, stats: Stats) -> Tensor:
        mean, var = stats
        scale = torch.rsqrt(var + self.eps)
        shift = self.shift - mean * scale  # [T, C]
        parts = h.view(len(mean), -1, *h.shape[1:])
        shape = (len(mean), 1, -1, 1, 1)
        return (parts * scale.view(shape).to(h.dtype) + shift.view(shape).to(h.dtype)).flatten(0, 1)


def to_float32(x: Tensor) -> Tensor:
    """Convert half-precision results of autocast to float32; float32 and float64 stay unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scale_pixels(x: Tensor) -> Tensor:
    """Scale bytes to [0, 1]; other types stay unchanged."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def flatten_inputs(x: Tensor) -> Tensor:
    """Flatten inputs [T, N, ...] to vectors [T, N, D]."""
    return scale_pixels(x).flatten(2)


def class_means(features: Tensor, y: Tensor, ways: int) -> Tensor:
    """Mean of the features of each class: features [T, S, D], class indices [T, S] -> [T, W, D]."""
    member = F.one_hot(y, ways).to(features.dtype)  # [T, S, W]
    return member.mT @ features / member.sum(1)[..., None].clamp_min(1)


def make_calibration(problem: Problem) -> tuple[nn.Parameter, nn.Parameter]:
    """Make the learned parameters gamma and beta, which turn ridge predictions y into logits gamma y + beta.

    Ridge predictions of one-hot targets lie roughly between 0 and 1. As logits they would give nearly equal
    probabilities, and training would be slow until gamma has grown, so gamma starts at 10 in classification.
    """
    return nn.Parameter(torch.tensor(1.0 if problem.regression else 10.0)), nn.Parameter(torch.zeros(()))


def make_targets(y: Tensor, ways: int, like: Tensor) -> Tensor:
    """Make ridge targets of the type of `like`: one-hot vectors [T, S, W] of class indices, or numbers [T, S, K]."""
    return (F.one_hot(y, ways) if ways else y).to(like.dtype)
