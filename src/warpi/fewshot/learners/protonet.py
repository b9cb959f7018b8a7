"""Class means as prototypes: of learned features, and of the raw inputs as a baseline without learning."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from warpi.fewshot.kernels import squared_distances
from warpi.fewshot.learner import Conditioned, Learner, Output, Problem
from warpi.fewshot.learners.embedding import Embedding, FeatureNet, class_means, flatten_inputs


@dataclass
class ProtoNet(Embedding):
    """p(y = c | x) = softmax_c(-|psi(x) - m_c|^2) with m_c the mean of psi over the support examples of c.

    Reference: Snell et al., Prototypical Networks for Few-shot Learning, NeurIPS 2017.
    """

    solves: ClassVar[tuple[str, ...]] = ("classification",)
    year: ClassVar[int | None] = 2017

    def build(self, problem: Problem) -> nn.Module:
        return FeatureNet(problem, self.norm, self.features, self.dropout)

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        f, stats = self.net(support_x)
        with torch.autocast(f.device.type, enabled=False):
            means = class_means(f, support_y, ways)  # [T, W, d]

        def predict(query_x: Tensor) -> Output:
            g = self.net(query_x, stats)[0]
            with torch.autocast(g.device.type, enabled=False):  # differences of squares lose too much in bf16
                return Output(-squared_distances(g, means))

        return predict


@dataclass
class Nearest(Learner):
    """p(y = c | x) = softmax_c(-|x - m_c|^2) with m_c the mean of the support examples of class c."""

    solves: ClassVar[tuple[str, ...]] = ("classification",)

    def build(self, problem: Problem) -> nn.Module:  # noqa: ARG002
        return nn.Identity()

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        means = class_means(flatten_inputs(support_x), support_y, ways)  # [T, W, D]
        return lambda query_x: Output(-(torch.cdist(flatten_inputs(query_x), means) ** 2))
