"""The diagonal Gaussian that both systems amortise."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from warpi import parallel


class DiagGaussian(NamedTuple):
    """N(mean, diag(exp(log_var)))."""

    mean: Tensor  # [..., D]
    log_var: Tensor  # [..., D]

    @property
    def std(self) -> Tensor:
        return torch.exp(0.5 * self.log_var)

    def rsample(self, n: int, generator: Generator) -> Tensor:
        """n samples mean + std * eps with eps ~ N(0, I), differentiable in mean and log_var.  [n, ..., D]

        Of several ranks each draws eps for all their examples and takes its own.
        """
        size, (b, *rest) = parallel.ranks(), self.mean.shape
        shape = (n, b * size, *rest)
        eps = torch.randn(shape, generator=generator, device=self.mean.device, dtype=self.mean.dtype)
        return self.mean + self.std * eps[:, parallel.share(b * size)]

    def kl(self, other: "DiagGaussian") -> Tensor:
        """KL[self || other], summed over the last dimension.  [...]"""
        ratio = torch.exp(self.log_var - other.log_var)
        shift = (self.mean - other.mean) ** 2 / torch.exp(other.log_var)
        return 0.5 * (ratio + shift - 1 + other.log_var - self.log_var).sum(-1)
