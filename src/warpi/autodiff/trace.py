"""Trace a network once into graphs that share activations: the forward pass and its two linear maps.

    z = F(x; theta)          the pass
    u -> J^T u               the vector-Jacobian product: gradients
    g -> J g                 the Jacobian-vector product, in forward mode

If torch ran them separately, J g would repeat the pass, and BatchNorm's forward-mode rule would take about twenty small
kernels. They are traced together and then cut apart: the first graph passes on what the other two need, and
torch.compile can fuse each graph. Weights are cast to bf16 once. Random numbers are drawn in the first graph only, so
dropout needs no replay.

The Python code of the network runs only while tracing. A network whose Python code may act differently from step to
step (it draws from python's generators, counts, or branches on values) is refused with a reason.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from warpi.autodiff.batchnorm import forward_rules
from warpi.autodiff.functional_call import Tensors, detach_trainable, fixed_tensors
from warpi.autodiff.replay_rng import get_python_rng_state
from warpi.autodiff.trace_parts import Passes, cut_trace
from warpi.errors import first_line

# Loggers to which torch writes why tracing failed. torch 2.7 uses the second and third.
_TRACING_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.recording",
)


class Untraceable(Exception):
    """Why a network cannot be traced."""


def trace(net: nn.Module, x: Tensor, n_classes: int, moved: Sequence[str], lean: bool, checkpointing: bool) -> Passes:
    """Trace the passes of a network for inputs like x. J g is needed for the parameters named `moved`.

    The tensors that the first graph passes on determine the memory. `lean` leaves out the outputs of BatchNorm and
    ReLU, which are recomputed from their input. `checkpointing` leaves out almost everything.
    """
    theta = detach_trainable(net, copy=False)
    fixed = fixed_tensors(net)
    whole = trace_whole(net, x, theta, fixed, n_classes, moved)
    return cut_trace(whole, list(theta), list(fixed), moved, lean, checkpointing)


def trace_whole(
    net: nn.Module, x: Tensor, theta: Tensors, fixed: Tensors, n_classes: int, moved: Sequence[str]
) -> fx.GraphModule:
    """One graph from (x, theta, fixed, u, g) to [z, new fixed tensors, J^T u, J g]."""
    buffers = dict(net.named_buffers())

    def everything(x: Tensor, theta: Tensors, fixed: Tensors, u: Tensor, g: Tensors) -> Any:
        def run(some: Tensors, rest: Tensors) -> tuple[Tensor, Tensors]:
            new_fixed = {name: t.clone() if name in buffers else t for name, t in fixed.items()}
            with forward_rules():
                z = functional_call(net, ({**rest, **some}, new_fixed), (x,))
            return z, new_fixed

        def with_product(theta: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            some = {name: theta[name] for name in moved}
            rest = {name: p for name, p in theta.items() if name not in some}
            z, jg, new_fixed = jvp(lambda p: run(p, rest), (some,), (g,), has_aux=True)  # type: ignore[misc]
            return z, (jg, new_fixed)

        z, pull_back, (jg, new_fixed) = vjp(with_product, theta, has_aux=True)  # type: ignore[misc]
        return [z, *new_fixed.values(), *pull_back(u)[0].values(), jg]

    u = torch.empty(len(x), n_classes, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    g = {name: torch.empty_like(theta[name]) for name in moved}
    before = _python_state(net)
    why = ""
    # A failure must not change the state of torch's dispatcher: its frames are collected before the guard ends.
    dispatch_keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*dispatch_keys), _disable_loggers(*_TRACING_LOGGERS):
        try:
            to_graph = partial(make_fx, tracing_mode="fake", _allow_non_fake_inputs=True)  # modules may hold tensors
            whole = to_graph(everything)(x, theta, fixed, u, g)
            # Trace again without in-place operators: a graph must not overwrite what it passes on to the others.
            whole = to_graph(torch.func.functionalize(whole))(x, theta, fixed, u, g)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
            why = first_line(error)
        if why:
            gc.collect()  # frames that refer to each other
    if why:
        raise Untraceable(why)
    if _python_state(net) != before:
        raise Untraceable("its Python code draws from Python's or NumPy's generators, or changes numbers it holds")
    _drop_zeros(whole.graph)
    return whole


@contextmanager
def _disable_loggers(*names: str) -> Iterator[None]:
    """Context manager: suppress torch's long log of a failure, which is reported in one line instead."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _drop_zeros(graph: fx.Graph) -> None:
    """Remove operators on zeros. The input x has no tangent, so half of the first layer's product is zero."""
    aten = torch.ops.aten
    zero = set[Any]()
    for node in graph.nodes:
        is_scalar_zero = node.target is aten.zeros.default and node.args[0] == []
        if is_scalar_zero or (node.target is aten.expand.default and node.args[0] in zero):
            zero.add(node)
        elif node.target in (aten.convolution.default, aten.mm.default) and zero.intersection(node.args[:2]):
            zero.update([node] if node.target is aten.mm.default or node.args[2] is None else [])
        elif node.target is aten.add.Tensor and len(rest := [a for a in node.args[:2] if a not in zero]) == 1:
            other = rest[0]
            if isinstance(other, fx.Node) and not node.kwargs and _same_form(other, node):
                node.replace_all_uses_with(other)


def _same_form(a: fx.Node, b: fx.Node) -> bool:
    return all(getattr(a.meta["val"], name) == getattr(b.meta["val"], name) for name in ("shape", "dtype"))


def _python_state(net: nn.Module) -> Any:
    """Changes if the Python code of a network draws random numbers or modifies its attributes."""
    return get_python_rng_state(), python_values(net)


def python_values(net: nn.Module) -> tuple[Any, ...]:
    """The Python numbers and strings that the modules of a network hold."""
    kinds = (bool, int, float, str)
    return tuple(value for m in net.modules() for value in vars(m).values() if type(value) in kinds)
