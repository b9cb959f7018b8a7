"""BatchNorm with statistics over all ranks. It supports backward, forward-mode and double-backward derivatives."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from warpi.errors import UserError
from warpi.utils import distributed


class SharedBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d with the mean and variance over the batches of all ranks.

        m = S(sum x) / n,    s^2 = S(sum (x - m)^2) / n,    y = w (x - m) / sqrt(s^2 + eps) + b,    n = S(count)

    PyTorch's SyncBatchNorm supports neither forward mode nor CPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        sums_and_count = torch.cat([x.sum(dims), x.new_full((1,), x.numel() / x.shape[1])])
        sums_and_count = distributed.total(sums_and_count)  # [C + 1]
        n = sums_and_count[-1].detach()
        mean = sums_and_count[:-1] / n
        centered = x - mean.view(shape)
        var = distributed.total((centered * centered).sum(dims)) / n
        if self.training:
            self._track(mean.detach(), var.detach() * (n / (n - 1)))
        y = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics like BatchNorm: unbiased variance, and a plain mean without momentum."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            rate = 1 / self.num_batches_tracked.to(mean) if self.momentum is None else self.momentum
            self.running_mean.add_(rate * (mean.to(self.running_mean) - self.running_mean))
            self.running_var.add_(rate * (var.to(self.running_var) - self.running_var))


def synchronize_batchnorm(net: nn.Module) -> nn.Module:
    """Make the BatchNorm layers of a network share their statistics among ranks. Weights and names do not change."""
    for module in net.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = SharedBatchNorm
        elif isinstance(module, _BatchNorm) and not isinstance(module, SharedBatchNorm):
            name = type(module).__name__
            raise UserError(f"{name} cannot be synchronized; omit --sync-batchnorm, or use BatchNorm1d, 2d or 3d")
    return net
