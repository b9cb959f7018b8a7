"""BatchNorm with a forward-mode rule as cheap as its backward rule.

Torch's rule takes about twenty small kernels, and in bf16 it returns float32 tangents, which the next layer rejects.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class forward_rules(TorchFunctionMode):
    """Context manager: use a forward-mode rule for BatchNorm with two sums and one formula, in the activations' dtype.

    Inputs with fewer than `least` elements use torch's rule if possible, because Python code dominates their time.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm and (args[0].numel() >= self.least or args[0].dtype == torch.bfloat16):
            func = _batch_norm
        return func(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training and mean is not None and var is not None:  # a fixed affine map
        scale = torch.rsqrt(var + eps)
        shift = -mean * scale
        if weight is not None:
            scale = scale * weight
            shift = shift * weight
        if bias is not None:
            shift = shift + bias
        return (x * over_channels(scale, x) + over_channels(shift, x)).to(x.dtype)
    y: Tensor = _BatchNorm.apply(x, weight, bias, mean, var, momentum, eps)[0]  # type: ignore[no-untyped-call]
    return y


def over_channels(t: Tensor, x: Tensor) -> Tensor:
    return t.view(1, -1, *[1] * (x.dim() - 2))


class _BatchNorm(torch.autograd.Function):
    """y = w h + b, h = r (x - m), with the mean m and the inverse standard deviation r of the batch, per channel.

    Forward mode:  dh = r (dx - mean(dx) - h mean(h dx)),  dy = w dh + dw h + db.
    """

    @staticmethod
    def forward(
        x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor | None, var: Tensor | None, mom: float, eps: float
    ) -> Any:
        return torch._batch_norm_impl_index(x, w, b, mean, var, True, mom, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, mean, var, _, ctx.eps = inputs
        _, m, r, reserve, ctx.kind = output
        ctx.affine = w is not None, b is not None
        ctx.mark_non_differentiable(m, r, reserve)
        ctx.save_for_backward(x, w, mean, var, m, r, reserve)
        ctx.save_for_forward(x, w, m, r)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        x, w, mean, var, m, r, reserve = ctx.saved_tensors
        wanted = [True, *ctx.affine]
        dx, dw, db = torch.ops.aten._batch_norm_impl_index_backward(
            ctx.kind, x, dy, w, mean, var, m, r, True, ctx.eps, wanted, reserve
        )
        return dx, dw if wanted[1] else None, db if wanted[2] else None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, db: Tensor | None, *_: Any) -> Any:
        x, w, m, r = ctx.saved_tensors
        dims = [0, *range(2, x.dim())]
        # Do not use the dtype of m: without weights, a kernel may return a different dtype than the trace assumes.
        wide = torch.promote_types(x.dtype, torch.float32)
        m = m.to(wide)
        r = r.to(wide)
        h = (x.to(wide) - over_channels(m, x)) * over_channels(r, x)
        parts = []
        if dx is not None:
            dx = dx.to(wide)
            dh = dx - over_channels(dx.mean(dims), x) - h * over_channels((h * dx).mean(dims), x)
            parts.append(over_channels(r if w is None else r * w, x) * dh)
        if dw is not None:
            parts.append(over_channels(dw, x) * h)
        if db is not None:
            parts.append(over_channels(db, x).expand_as(x))
        dy = sum(parts[1:], parts[0])
        return dy.to(x.dtype), None, None, None, None


def normalize_relu(x: Tensor, m: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """relu(w r (x - m) + b)"""
    y = (x.to(m.dtype) - over_channels(m, x)) * over_channels(r if w is None else r * w, x)
    return torch.relu(y if b is None else y + over_channels(b, x)).to(x.dtype)
