"""Ridge regression on learned features, in closed form: linear, or with one kernel for all tasks."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from warpi.fewshot.kernels import fourier_features, gaussian_kernel, mean_distance
from warpi.fewshot.learner import Conditioned, Output, Problem
from warpi.fewshot.learners.embedding import NORM_HELP, Embedding, FeatureNet, Norm, make_calibration, make_targets
from warpi.fewshot.learners.ridge import Fit, fit_features, fit_kernel
from warpi.functional.gaussian import DiagGaussian
from warpi.utils.settings import setting


class RidgeLearner(Embedding):
    """Base class: Y_hat = scale * (ridge regression on inputs made of psi(x)) + shift; both are learned."""

    @abstractmethod
    def solve(self, f: Tensor, Y: Tensor) -> tuple[Callable[[Tensor], Tensor], Fit]:
        """The function from features [T, N, d] to inputs of the ridge regression, and its solution for f and Y."""

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        f, stats = self.net.psi(support_x)  # [T, S, d]
        with torch.autocast(f.device.type, enabled=False):
            inputs, fit = self.solve(f, make_targets(support_y, ways, f))

        def predict(query_x: Tensor) -> Output:
            g = self.net.psi(query_x, stats)[0]
            with torch.autocast(g.device.type, enabled=False):
                return Output(self.net.scale * fit.mean(inputs(g)) + self.net.shift)

        return predict


@dataclass
class R2D2(RidgeLearner):
    """Y_hat = alpha X' W + beta,  W = X^T (X X^T + lambda I)^-1 Y,  X = [psi(support), 1].

    alpha, beta and lambda = exp(l) are learned. Targets are unit vectors of classes, or regression targets.

    Differs from the paper: its network is wider (96, 192, 384, 512 channels); here all learners share one.
    Reference: Bertinetto et al., Meta-learning with differentiable closed-form solvers, ICLR 2019.
    """

    year: ClassVar[int | None] = 2019

    def build(self, problem: Problem) -> nn.Module:
        return LinearNetworks(self, problem)

    def solve(self, f: Tensor, Y: Tensor) -> tuple[Callable[[Tensor], Tensor], Fit]:
        return with_one, fit_features(with_one(f), Y, self.net.log_ridge.exp().expand(len(f)))


class LinearNetworks(nn.Module):
    """psi and the parameters of the ridge regression."""

    def __init__(self, learner: R2D2, problem: Problem) -> None:
        super().__init__()
        self.psi = FeatureNet(problem, learner.norm, learner.features, learner.dropout)
        self.log_ridge = nn.Parameter(torch.zeros(()))
        self.scale, self.shift = make_calibration(problem)


def with_one(f: Tensor) -> Tensor:
    """Append a column of ones for the offset."""
    return torch.cat([f, torch.ones_like(f[..., :1])], -1)


@dataclass
class KernelRidge(RidgeLearner):
    """Y_hat = gamma k(x)^T (K + lambda I)^-1 Y + beta: the baselines of MetaVRF's tables.

    `rff`: z(x) = sqrt(2/D) cos(w.psi(x) + b) with w ~ N(0, s^2 I) drawn once; s is learned.
    `rbf`: k = exp(-|d|^2 / (2 r^2)) with r the mean distance of two support examples of the task.
    """

    year: ClassVar[int | None] = 2007
    kernel: Literal["rff", "rbf"] = setting("rff", "random Fourier features, or a Gaussian kernel")
    bases: int | None = setting(None, "number of random features D of rff (default: 2048, in regression 128)", low=1)
    norm: Norm = setting("transductive", NORM_HELP)
    minmax: bool = setting(True, "scale the features of a set to [0, 1]")
    floor: float = setting(0.01, "lower limit of the learned ridge penalty lambda", low=0)

    def build(self, problem: Problem) -> nn.Module:
        return Networks(self, problem)

    def solve(self, f: Tensor, Y: Tensor) -> tuple[Callable[[Tensor], Tensor], Fit]:
        net: Networks = self.net
        lam = (net.ridge.abs() + self.floor).expand(len(f))
        bandwidth = mean_distance(f).clamp_min(1e-6)  # [T]

        def rows(g: Tensor) -> Tensor:
            """Kernel rows [T, N, S], or random features [T, N, D]."""
            if self.kernel == "rbf":
                return gaussian_kernel(g, f, bandwidth)
            q = DiagGaussian(torch.zeros_like(f[0, 0]), (2 * net.log_s).expand(f.shape[-1]))
            return fourier_features(g, q, net.eps, net.phase)

        return rows, (fit_kernel if self.kernel == "rbf" else fit_features)(rows(f), Y, lam)


class Networks(nn.Module):
    """psi, the noise of the bases, and the parameters of the kernel and the ridge regression."""

    def __init__(self, learner: KernelRidge, problem: Problem) -> None:
        super().__init__()
        self.psi = FeatureNet(problem, learner.norm, learner.features, learner.dropout, learner.minmax)
        self.ridge = nn.Parameter(torch.tensor(0.1))
        self.scale, self.shift = make_calibration(problem)
        if learner.kernel == "rff":
            self.log_s = nn.Parameter(torch.zeros(()))
            D = learner.bases or (128 if problem.regression else 2048)
            self.eps: Tensor
            self.phase: Tensor
            self.register_buffer("eps", torch.randn(D, self.psi.features))
            self.register_buffer("phase", 2 * math.pi * torch.rand(D))
