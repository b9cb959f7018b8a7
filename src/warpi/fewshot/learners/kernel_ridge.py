"""Kernel ridge regression on learned features, with one kernel for all tasks."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from warpi.fewshot.learner import Conditioned, Problem
from warpi.fewshot.learners.embedding import (
    NORM_HELP,
    Embedding,
    FeatureNet,
    Norm,
    make_calibration,
    make_targets,
    ridge_predictor,
)
from warpi.fewshot.learners.kernels import fourier_features, gaussian_kernel, mean_distance
from warpi.fewshot.learners.ridge import fit_features, fit_kernel
from warpi.functional.gaussian import DiagGaussian
from warpi.utils.settings import setting


@dataclass
class KernelRidge(Embedding):
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

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        net: Networks = self.net
        f, stats = net.psi(support_x)  # [T, S, d]
        Y = make_targets(support_y, ways, f)
        with torch.autocast(f.device.type, enabled=False):
            lam = (net.ridge.abs() + self.floor).expand(len(f))
            bandwidth = mean_distance(f).clamp_min(1e-6)  # [T]

            def rows(g: Tensor) -> Tensor:
                """Inputs of the ridge regression: kernel rows [T, N, S], or random features [T, N, D]."""
                if self.kernel == "rbf":
                    return gaussian_kernel(g, f, bandwidth)
                q = DiagGaussian(torch.zeros_like(f[0, 0]), (2 * net.log_s).expand(f.shape[-1]))
                return fourier_features(g, q, net.eps, net.phase)

            fit = (fit_kernel if self.kernel == "rbf" else fit_features)(rows(f), Y, lam)
        return ridge_predictor(net, fit, stats, rows)


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
