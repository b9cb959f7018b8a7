"""Prototypical networks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from warpi.fewshot.embed import Norm, Psi, class_means
from warpi.fewshot.learner import Conditioned, Learner, Output, Problem
from warpi.kernels import squared_distances
from warpi.settings import at_least, within


@dataclass
class ProtoNet(Learner):
    """p(y = c | x) = softmax_c(-|psi(x) - m_c|^2) with m_c the mean of psi over class c's support.

    Reference: Snell et al., Prototypical Networks for Few-shot Learning, NeurIPS 2017.
    """

    solves: ClassVar[tuple[str, ...]] = ("classification",)
    year: ClassVar[int | None] = 2017
    norm: Norm = "running"  # where the statistics of normalisations come from
    features: int | None = None  # width of psi; default: 64 channels, for vectors 40
    dropout: float = 0.0  # in psi of images

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, features=1)
        within(self, dropout=(0.0, 0.99))

    def build(self, problem: Problem) -> nn.Module:
        return Psi(problem, self.norm, self.features, self.dropout)

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        f, stats = self.net(support_x)
        with torch.autocast(f.device.type, enabled=False):
            means = class_means(f, support_y, ways)  # [T, W, d]

        def predict(query_x: Tensor) -> Output:
            g = self.net(query_x, stats)[0]
            with torch.autocast(g.device.type, enabled=False):  # bf16 would leave little of a difference of squares
                return Output(-squared_distances(g, means))

        return predict
