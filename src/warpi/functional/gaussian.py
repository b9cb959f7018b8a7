"""Diagonal Gaussians, and a network that outputs them."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from warpi.utils import distributed


class DiagGaussian(NamedTuple):
    """N(mean, diag(exp(log_var)))."""

    mean: Tensor  # [..., D]
    log_var: Tensor  # [..., D]

    @property
    def std(self) -> Tensor:
        return torch.exp(0.5 * self.log_var)

    def rsample(self, n: int, generator: Generator) -> Tensor:
        """n samples mean + std * eps with eps ~ N(0, I), differentiable in mean and log_var.  [n, ..., D]"""
        b, *rest = self.mean.shape
        like = self.mean
        draw = lambda total: torch.randn((n, total, *rest), generator=generator, device=like.device, dtype=like.dtype)
        return torch.addcmul(self.mean, self.std, distributed.draw_share(b, draw, dim=1))

    def kl(self, other: "DiagGaussian") -> Tensor:
        """KL[self || other], summed over the last dimension.  [...]"""
        ratio = torch.exp(self.log_var - other.log_var)
        shift = (self.mean - other.mean) ** 2 / torch.exp(other.log_var)
        return 0.5 * (ratio + shift - 1 + other.log_var - self.log_var).sum(-1)

    def mean_kl(self, others: "DiagGaussian") -> Tensor:
        """The mean of KL[self || other] over N others [..., N, D].  [...]

        It is computed from averages over the others, where m and p = 1 / var are the mean and precision of each:
        mean(p), mean(p m), mean(p m^2) and mean(log_var).
        """
        p = torch.exp(-others.log_var)
        mean_p = p.mean(-2)  # [..., D]
        mean_pm = (p * others.mean).mean(-2)
        mean_pm2 = (p * others.mean**2).mean(-2)
        shift = self.mean**2 * mean_p - 2 * self.mean * mean_pm + mean_pm2
        spread = torch.exp(self.log_var) * mean_p + others.log_var.mean(-2) - self.log_var
        return 0.5 * (spread + shift - 1).sum(-1)


class GaussianHead(nn.Module):
    """Maps h [..., inputs] to N(mean(h), diag(exp(log_var(h)))) [..., outputs], with one three-layer network for each.

    Initial weights are drawn from the global torch generator: Xavier normal, and biases with standard deviation 1e-3.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.mean, self.log_var = (_make_network(inputs, hidden, outputs) for _ in range(2))

    def forward(self, h: Tensor) -> DiagGaussian:
        return DiagGaussian(self.mean(h), self.log_var(h))


def _make_network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    for layer in layers:
        nn.init.xavier_normal_(layer.weight)
        nn.init.normal_(layer.bias, std=1e-3)
    return nn.Sequential(layers[0], nn.ELU(), layers[1], nn.ELU(), layers[2])
