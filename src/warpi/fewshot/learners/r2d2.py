"""R2-D2: linear ridge regression on learned features, in closed form."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from warpi.fewshot.learner import Conditioned, Problem
from warpi.fewshot.learners.embedding import Embedding, FeatureNet, make_calibration, make_targets, ridge_predictor
from warpi.fewshot.learners.ridge import fit_features


@dataclass
class R2D2(Embedding):
    """Y_hat = alpha X' W + beta,  W = X^T (X X^T + lambda I)^-1 Y,  X = [psi(support), 1].

    alpha, beta and lambda = exp(l) are learned. Targets are unit vectors of classes, or regression targets.

    Differs from the paper: its network is wider (96, 192, 384, 512 channels); here all learners share one.
    Reference: Bertinetto et al., Meta-learning with differentiable closed-form solvers, ICLR 2019.
    """

    year: ClassVar[int | None] = 2019

    def build(self, problem: Problem) -> nn.Module:
        return Networks(self, problem)

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        net: Networks = self.net
        f, stats = net.psi(support_x)
        with torch.autocast(f.device.type, enabled=False):
            fit = fit_features(with_one(f), make_targets(support_y, ways, f), net.log_ridge.exp().expand(len(f)))
        return ridge_predictor(net, fit, stats, with_one)


class Networks(nn.Module):
    """psi and the parameters of the ridge regression."""

    def __init__(self, learner: R2D2, problem: Problem) -> None:
        super().__init__()
        self.psi = FeatureNet(problem, learner.norm, learner.features, learner.dropout)
        self.log_ridge = nn.Parameter(torch.zeros(()))
        self.scale, self.shift = make_calibration(problem)


def with_one(f: Tensor) -> Tensor:
    """Append a column of ones for the offset."""
    return torch.cat([f, torch.ones_like(f[..., :1])], -1)
