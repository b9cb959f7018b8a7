"""The nearest class mean of the raw inputs: a baseline without learning."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from warpi.fewshot.learner import Conditioned, Learner, Output, Problem
from warpi.fewshot.learners.embedding import class_means, flatten_inputs


@dataclass
class Nearest(Learner):
    """p(y = c | x) = softmax_c(-|x - m_c|^2) with m_c the mean of the support examples of class c."""

    solves: ClassVar[tuple[str, ...]] = ("classification",)

    def build(self, problem: Problem) -> nn.Module:  # noqa: ARG002
        return nn.Identity()

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        means = class_means(flatten_inputs(support_x), support_y, ways)  # [T, W, D]
        return lambda query_x: Output(-(torch.cdist(flatten_inputs(query_x), means) ** 2))
