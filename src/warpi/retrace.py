"""A trace that is used only after it was compared with what the network does."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from warpi.chance import generator_state, repeated
from warpi.nets.syncbn import SharedBatchNorm
from warpi.stateless import detached, filled, others, own_parameters
from warpi.trace import Passes, Point, Untraceable, trace


def checked_trace(
    net: nn.Module, x: Tensor, along: Sequence[str], lean: bool, checkpointing: bool, tolerance: float
) -> Passes:
    """A trace that was compared with a plain pass of a copy of the network: logits, buffers, both linear maps."""
    if any(isinstance(m, SharedBatchNorm) for m in net.modules()):
        raise Untraceable("its BatchNorm sums over ranks")
    try:
        twin, other = copy.deepcopy(net), copy.deepcopy(net)
    except (RuntimeError, TypeError) as error:
        raise Untraceable(f"it cannot be copied: {str(error).partition(chr(10))[0][:160]}") from None
    chance = generator_state(x.device)
    with repeated(chance, x.device), torch.enable_grad():
        z = twin(x)
    buffers = [b.clone() for b in twin.buffers()]
    with repeated(chance, x.device), torch.no_grad():
        once_more = twin(x)
    passes = trace(other, x, z.shape[1], along, lean=lean, checkpointing=checkpointing)
    with repeated(chance, x.device):
        point = Point(passes, x, detached(net, False), others(net))

    def compare(what: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        a, b = (torch.cat([t.detach().flatten().double() for t in ts]) for ts in (got, wanted))
        if (a - b).norm() > tolerance * b.norm() + 1e-12:
            raise Untraceable(what)

    compare("called again, it gives other logits", [once_more], [z])
    compare("traced, it gives other logits", [point.z], [z])
    for (name, _), b in zip(twin.named_buffers(), buffers, strict=True):
        compare(f"traced, it gives another {name}", [point.others[name]], [b])
    own = list(own_parameters(twin).values())
    u = torch.arange(z.numel(), device=z.device).cos().view_as(z).to(z)
    grads = filled(torch.autograd.grad(z, own, u, allow_unused=True), own)
    for _ in range(2):
        compare("traced, it gives another gradient", filled(point.back(u), own), grads)
    g = {name: d for name, d in zip(own_parameters(net), grads, strict=True) if name in passes.g}
    compare(
        "traced, it gives another product",
        [(u * point.ahead(g)).sum()],
        [torch.stack([(d * d).sum() for d in g.values()]).sum()],
    )
    if x.is_cuda:
        passes.fuse()
    return passes
