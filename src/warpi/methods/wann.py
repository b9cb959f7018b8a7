"""WANN: weighted adaptive nearest neighbors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import one_hot
from warpi.functional.transition import from_given, from_trusted
from warpi.training.method import Log, Method, OutOfSample
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.settings import setting

_CHUNK = 1024  # rows whose distances to all others are in memory at once
_EM_STEPS = 30


@dataclass
class WANN(Method):
    """Nearest neighbors vote with weights that say how reliable their labels are.

        k_i   = the smallest odd k in [k_min, k_max] at which the k neighbors of x_i vote for its given label y_i
        eta_i = 1 / k_i, or 1 / k_max if there is none                     the reliability of the label y_i
        x     : k = k_n of the nearest row n;  n_c(x) = sum of eta_j over the k nearest j with y_j = c

    Without trusted rows, p(c | x) is proportional to n_c(x). With them, the noisy votes are corrected:

        T_k   = mean of n(x) / |n(x)| over the trusted x of class k, counting noisy neighbors only
        p(x)  = argmax_p  sum_j n_j(x) log (T^T p)_j + sum_c m_c(x) log p_c        by EM

    where m_c counts the trusted rows of class c among the k nearest, each with the weight `trusted_weight` / k_min.
    Nothing is learned by gradients, so the inputs must be features in which neighbors mean something.

    Differs from the paper, which has no trusted rows: docs/methods/wann.md.
    Reference: Di Salvo et al., An Embedding is Worth a Thousand Noisy Labels, TMLR 2025.
    """

    family = "refinement"
    year = 2025
    resumes_mid_epoch = False
    trains_network = False
    recipe_defaults: ClassVar[dict[str, Any]] = {"epochs": 1}

    k_min: int = setting(11, "smallest number of neighbors", low=1)
    k_max: int = setting(51, "largest number of neighbors", low=1)
    distance: Literal["euclidean", "cosine"] = setting("euclidean", "distance between feature vectors")
    trusted_weight: float = setting(3.0, "votes of a trusted row, relative to the most reliable noisy row", low=0)

    def start(self, task: Task, recipe: Recipe) -> None:
        self.start_without_steps(task, recipe, Neighbors(task.n_classes, self.distance == "cosine"))
        self.p = torch.zeros(0, task.n_classes)
        self.p_trusted = torch.zeros(0, task.n_classes)

    def epoch(self, t: int) -> Iterator[Log]:  # noqa: ARG002 (it fits only once)
        if not len(self.p):
            self._fit()
        right = self.p.gather(1, self.task.train.y.cpu()[:, None])
        yield {"agreement": right.mean()}

    def step(self, batch: Batch) -> Log:
        raise NotImplementedError("wann has no steps; `epoch` finds all neighbors")

    @torch.no_grad()
    def _fit(self) -> None:
        net = self.net
        assert isinstance(net, Neighbors)
        splits = [self.task.train, *([self.task.meta] if self.task.meta is not None else [])]
        n = len(self.task.train)
        net.x = net.embed(torch.cat([split.to_vectors() for split in splits]))
        net.y = torch.cat([split.y for split in splits])
        net.trusted = torch.arange(len(net.y), device=net.y.device) >= n
        near = net.find(net.x, self.k_max, leave_out=True)
        net.k = adaptive_sizes(net.y, net.y[near], net.n_classes, self.k_min, self.k_max)
        net.weight = torch.where(net.trusted, self.trusted_weight / self.k_min, 1 / net.k)
        noisy, gold = net.votes(near)
        if n < len(net.y):
            shares = noisy / noisy.sum(1, keepdim=True).clamp_min(1e-12)
            net.T = from_trusted(shares[n:], net.y[n:])
        p = class_shares(noisy, gold, net.T).cpu()
        self.p, self.p_trusted = p[:n], p[n:]

    def out_of_sample(self) -> OutOfSample | None:
        """Probabilities of each row from its neighbors without itself."""
        if not len(self.p):
            return None
        T = from_given(self.p.double(), self.task.train.y.cpu())
        return OutOfSample(self.p.double(), self.p_trusted.double(), T)

    @property
    def uses_trusted(self) -> bool:
        return True


def adaptive_sizes(y: Tensor, near: Tensor, n_classes: int, k_min: int, k_max: int) -> Tensor:
    """The smallest of k_min, k_min + 2, ... at which the nearest labels [N, k_max] vote for y [N]; else k_max.  [N]"""
    k = torch.full_like(y, k_max)
    for size in range(k_max if (k_max - k_min) % 2 == 0 else k_max - 1, k_min - 1, -2):
        votes = one_hot(near[:, :size], n_classes).sum(1)  # [N, K]
        k = torch.where(votes.argmax(1) == y, size, k)
    return k


def class_shares(noisy: Tensor, gold: Tensor, T: Tensor) -> Tensor:
    """argmax_p sum_j noisy_j log (T^T p)_j + sum_c gold_c log p_c, by EM from the uniform distribution.  [B, K]"""
    p = torch.full_like(noisy, 1 / noisy.shape[1])
    for _ in range(_EM_STEPS):
        expected = p * ((noisy / (p @ T).clamp_min(1e-12)) @ T.T) + gold
        p = expected / expected.sum(1, keepdim=True).clamp_min(1e-12)
    p = p + 1e-6
    return p / p.sum(1, keepdim=True)


class Neighbors(nn.Module):
    """Votes of the nearest rows. All rows are buffers, so that the state is complete."""

    x: Tensor  # [R, D] noisy rows, then trusted ones
    y: Tensor  # [R] given labels, true ones for trusted rows
    k: Tensor  # [R] number of neighbors of a point whose nearest row is this one
    weight: Tensor  # [R] eta
    trusted: Tensor  # [R]
    T: Tensor  # [K, K] share of noisy votes per true class; the identity without trusted rows

    def __init__(self, n_classes: int, cosine: bool) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.cosine = cosine
        self.register_buffer("x", torch.zeros(0, 0))
        for name in ("y", "k"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64))
        self.register_buffer("weight", torch.zeros(0))
        self.register_buffer("trusted", torch.zeros(0, dtype=torch.bool))
        self.register_buffer("T", torch.eye(n_classes))

    def embed(self, x: Tensor) -> Tensor:
        x = x.flatten(1).float()
        return F.normalize(x, dim=1) if self.cosine else x

    def find(self, x: Tensor, k: int, leave_out: bool = False) -> Tensor:
        """Rows nearest to embedded points, nearest first. With `leave_out`, x are the rows, not their own neighbors."""
        found = []
        squares = self.x.square().sum(1)
        for start in range(0, len(x), _CHUNK):
            d = squares - 2 * x[start : start + _CHUNK] @ self.x.T  # squared distances, up to a constant per point
            if leave_out:
                d.diagonal(start).fill_(torch.inf)
            found.append(d.topk(min(k, len(self.x) - leave_out), largest=False).indices)
        return torch.cat(found)

    def votes(self, near: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted votes of the noisy and of the trusted rows among the k nearest.  [B, k_max] -> [B, K], [B, K]"""
        k = self.k[near[:, :1]]  # [B, 1]
        counted = torch.arange(near.shape[1], device=near.device) < k
        weight = torch.where(counted, self.weight[near], 0)
        labels = self.y[near]
        zeros = weight.new_zeros(len(near), self.n_classes)
        gold = zeros.scatter_add(1, labels, torch.where(self.trusted[near], weight, 0))
        return zeros.scatter_add(1, labels, weight) - gold, gold

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities [B, K]."""
        near = self.find(self.embed(x), int(self.k.max()))
        return class_shares(*self.votes(near), self.T).log()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, torch.empty_like(state_dict[prefix + name], device=buffer.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)
