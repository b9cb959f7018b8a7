"""A linear classifier, for features that a pretrained network has computed."""

from math import prod

from torch import Tensor, nn


class LinearHead(nn.Module):
    """z = W x + b on the flattened input. It starts at W = 0 and b = 0, so that all classes are equally likely.

    The loss is convex in W and b, so a random start would only add noise.
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(prod(shape), n_classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)  # [B, D]

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))  # [B, K]
        return z
