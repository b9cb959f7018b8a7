"""A multi-layer perceptron for features and very small images."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear-BatchNorm-ReLU blocks on the flattened input, then a linear layer: 64-128-10 for digits.

    The linear layers before a BatchNorm have no bias, because BatchNorm subtracts the mean. `norm=False` leaves
    BatchNorm out.
    """

    def __init__(
        self, shape: tuple[int, ...], n_classes: int, hidden: Sequence[int] = (128,), *, norm: bool = True
    ) -> None:
        super().__init__()
        sizes = (prod(shape), *hidden)
        layers: list[nn.Module] = []
        for d_in, d_out in pairwise(sizes):
            layers += [nn.Linear(d_in, d_out, bias=not norm), *([nn.BatchNorm1d(d_out)] if norm else []), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(sizes[-1], n_classes)

    def features(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x.flatten(1))  # [B, D]
        return h

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))  # [B, K]
        return z


def plain_mlp(shape: tuple[int, ...], n_classes: int) -> MLP:
    """An MLP without BatchNorm."""
    return MLP(shape, n_classes, norm=False)
