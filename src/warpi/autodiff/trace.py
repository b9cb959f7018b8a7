"""Trace a network once into graphs that share activations: the forward pass and its two linear maps.

    z = F(x; theta)          the pass
    u -> J^T u               the vector-Jacobian product: gradients
    g -> J g                 the Jacobian-vector product, in forward mode

If torch ran them separately, J g would repeat the pass, and BatchNorm's forward-mode rule would take about twenty small
kernels. They are traced together and then cut apart: the first graph passes on what the other two need, and
torch.compile can fuse each graph. Weights are cast to bf16 once. Random numbers are drawn in the first graph only, so
dropout needs no replay.

The python code of the network runs only while tracing. A network whose python code may act differently from step to
step (it draws from python's generators, counts, or branches on values) is refused with a reason.
"""

import gc
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from warpi.autodiff.batchnorm import forward_rules, normalize_relu
from warpi.autodiff.functional_call import detach_trainable, fixed_tensors
from warpi.autodiff.replay_rng import python_rng_state
from warpi.errors import first_line

_log = logging.getLogger("warpi.autodiff")
_SMALL = 2**12  # checkpointing stores tensors with at most that many elements


class Untraceable(Exception):
    """Why a network cannot be traced."""


class Passes(NamedTuple):
    """The graphs of a network. Each takes the values of its `inputs`, which are nodes of the common trace."""

    pass_: "_Part"  # -> z, new buffers, and what the other graphs need
    vjp: "_Part"  # -> J^T u, one tensor per parameter, None if it has no effect
    vjp_moved: "_Part"  # -> the same, only for the parameters that a virtual step moves
    jvp: "_Part"  # -> J g for g over the moved parameters
    x: fx.Node
    theta: dict[str, fx.Node]
    fixed: dict[str, fx.Node]  # frozen parameters and buffers
    u: fx.Node
    g: dict[str, fx.Node]  # one node per moved parameter
    draws: bool  # whether the network draws random numbers

    @property
    def parts(self) -> tuple["_Part", ...]:
        return self.pass_, self.vjp, self.vjp_moved, self.jvp

    def fuse(self) -> None:
        """Let torch.compile fuse the kernels of each graph."""
        for part in self.parts:
            part.run = fuse_graph(part.module, part.example_inputs)

    def holds_tensors(self) -> bool:
        """Whether a graph contains constant tensors, which belong to one network."""
        return any(_holds_tensors(part.module) for part in self.parts)


class Point:
    """The traced pass at one x and theta."""

    def __init__(self, passes: Passes, x: Tensor, theta: Mapping[str, Tensor], fixed: Mapping[str, Tensor]) -> None:
        self.passes = passes
        values: dict[fx.Node, Any] = {passes.x: x}
        values |= {node: theta[name] for name, node in passes.theta.items()}
        values |= {node: fixed[name] for name, node in passes.fixed.items()}
        outputs = passes.pass_(values)
        n = 1 + len(passes.fixed)
        self.z: Tensor = outputs[0]
        self.fixed = dict(zip(passes.fixed, outputs[1:n], strict=True))  # as the pass left them
        values |= {node: v for node, v in zip(passes.pass_.outputs[n:], outputs[n:], strict=True) if node}
        needed = {*passes.vjp.inputs, *passes.jvp.inputs}
        self.values = {node: v for node, v in values.items() if node in needed}  # the rest can be freed

    def vjp(self, u: Tensor, moved_only: bool = False) -> list[Tensor | None]:
        part = self.passes.vjp_moved if moved_only else self.passes.vjp
        return list(part({**self.values, self.passes.u: u}))

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        directions = {node: g[name] for name, node in self.passes.g.items()}
        product: Tensor = self.passes.jvp(self.values | directions)[0]
        return product


def trace(
    net: nn.Module,
    x: Tensor,
    n_classes: int,
    moved: Sequence[str],
    *,
    lean: bool = False,
    checkpointing: bool = False,
) -> Passes:
    """Trace the passes of a network for inputs like x. J g is needed for the parameters named `moved`.

    The tensors that the first graph passes on determine the memory. `lean` leaves out the outputs of BatchNorm and
    ReLU, which are recomputed from their input. `checkpointing` leaves out almost everything.
    """
    theta = detach_trainable(net, copy=False)
    fixed = fixed_tensors(net)
    whole = trace_whole(net, x, theta, fixed, n_classes, moved)
    return cut_trace(whole, list(theta), list(fixed), moved, lean=lean, checkpointing=checkpointing)


def cut_trace(
    whole: fx.GraphModule,
    theta: Sequence[str],
    fixed: Sequence[str],
    moved: Sequence[str],
    *,
    lean: bool = False,
    checkpointing: bool = False,
) -> Passes:
    """Cut the graph of `trace_whole` into the graphs of the pass and of its products."""
    placeholders = iter([node for node in whole.graph.nodes if node.op == "placeholder"])
    x_node = next(placeholders)
    theta_nodes = {name: next(placeholders) for name in theta}
    fixed_nodes = {name: next(placeholders) for name in fixed}
    u_node = next(placeholders)
    g_nodes = {name: next(placeholders) for name in moved}
    (outputs,) = (list(node.args[0]) for node in whole.graph.nodes if node.op == "output")
    z = outputs[0]
    new_fixed = outputs[1 : 1 + len(fixed)]
    grads = outputs[1 + len(fixed) : -1]
    jg = outputs[-1]

    pass_nodes = _with_results(_ancestors([z, *new_fixed]), whole.graph)
    recomputed = _find_normalized(pass_nodes) if lean or checkpointing else {}
    stored = _choose_stored(pass_nodes, z, x_node, checkpointing) - recomputed.keys()
    moved_grads = [grads[theta.index(name)] for name in moved]
    vjp_part, vjp_moved_part, jvp_part = (
        _Part(whole, wanted, stored, pass_nodes, recomputed) for wanted in (grads, moved_grads, [jg])
    )
    passed_on = dict.fromkeys(n for part in (vjp_part, jvp_part) for n in part.inputs if n.op != "placeholder")
    return Passes(
        _Part(whole, [z, *new_fixed, *passed_on]),
        vjp_part,
        vjp_moved_part,
        jvp_part,
        x_node,
        theta_nodes,
        fixed_nodes,
        u_node,
        g_nodes,
        draws=any(_is_random(node) for node in pass_nodes),
    )


def trace_whole(
    net: nn.Module,
    x: Tensor,
    theta: dict[str, Tensor],
    fixed: dict[str, Tensor],
    n_classes: int,
    moved: Sequence[str],
) -> fx.GraphModule:
    """One graph from (x, theta, fixed, u, g) to [z, new fixed tensors, J^T u, J g]."""
    buffers = dict(net.named_buffers())

    def everything(
        x: Tensor, theta: dict[str, Tensor], fixed: dict[str, Tensor], u: Tensor, g: dict[str, Tensor]
    ) -> Any:
        def run(some: dict[str, Tensor], rest: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            new_fixed = {name: t.clone() if name in buffers else t for name, t in fixed.items()}
            with forward_rules():
                z = functional_call(net, ({**rest, **some}, new_fixed), (x,))
            return z, new_fixed

        def with_product(theta: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
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
    with torch._C._ForceDispatchKeyGuard(*dispatch_keys), _disable_logger("torch._subclasses.fake_tensor"):
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
        raise Untraceable("its python code draws from python's or numpy's generators, or changes numbers it holds")
    _drop_zeros(whole.graph)
    return whole


class _Part:
    """A part of a trace as a function: from `stored` nodes and placeholders to `outputs`.

    Nodes of the pass that are not stored are computed again, right before their first use.
    """

    def __init__(
        self,
        whole: fx.GraphModule,
        outputs: Sequence[fx.Node | None],
        stored: Set[fx.Node] = frozenset(),
        pass_nodes: Set[fx.Node] = frozenset(),
        recomputed: "Mapping[fx.Node, _Normalized]" = {},  # noqa: B006
    ) -> None:
        self.outputs = outputs
        inside = _ancestors([n for n in outputs if n is not None], stored, recomputed)
        work = [n for n in whole.graph.nodes if n in inside and n.op != "placeholder" and n not in stored]
        self.inputs = [n for n in whole.graph.nodes if n in inside and n not in set(work)]
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in self.inputs}

        def copy(node: fx.Node) -> None:
            """Copy a node after all nodes it depends on."""
            waiting = [node]
            while waiting:
                for dependency in _dependencies(waiting[-1], recomputed):
                    if dependency not in copies:
                        waiting.append(dependency)
                        break
                else:
                    ready = waiting.pop()
                    if ready not in copies and ready in recomputed:
                        values = (None if n is None else copies[n] for n in recomputed[ready])
                        copies[ready] = graph.call_function(normalize_relu, tuple(values))
                    elif ready not in copies:
                        copies[ready] = graph.node_copy(ready, lambda n: copies[n])

        for node in work:
            if node not in pass_nodes:
                copy(node)
        for out in outputs:
            if out is not None and out not in copies:
                copy(out)
        graph.output([None if n is None else copies[n] for n in outputs])
        self.module = fx.GraphModule(whole, graph)
        self.run: Callable[..., Sequence[Any]] = self.module
        self.example_inputs = [n.meta.get("val") for n in self.inputs]

    def __call__(self, values: Mapping[fx.Node, Any]) -> Sequence[Any]:
        with torch.no_grad():
            return self.run(*(values[node] for node in self.inputs))


def fuse_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """Compile a graph into a function with fewer kernels, for inputs like these."""
    shapes = tuple((v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else v for v in inputs)
    fused = _fused.__wrapped__ if _holds_tensors(module) else _fused  # its code does not show constants
    return fused(module.code, shapes, _Same(module))


def _holds_tensors(module: fx.GraphModule) -> bool:
    return any(node.op == "get_attr" for node in module.graph.nodes)


class _Same:
    """Wraps a module so that all compare equal. The other arguments of `_fused` are the key of its cache."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same)

    def __hash__(self) -> int:
        return 0


@lru_cache(64)
def _fused(code: str, shapes: tuple[Any, ...], source: _Same) -> Callable[..., Sequence[Any]]:  # noqa: ARG001
    """torch.compile, once for all networks with the same graph."""
    compiled: Callable[..., Sequence[Any]] = torch.compile(source.module, fullgraph=True, dynamic=False)
    chosen: list[Callable[..., Sequence[Any]]] = []

    def run(*values: Any) -> Sequence[Any]:
        if chosen:
            return chosen[0](*values)
        try:
            with warnings.catch_warnings():  # the user cannot act on a compiler's warnings
                warnings.simplefilter("ignore")
                result = compiled(*values)
            chosen.append(compiled)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # a compiler may raise anything
            _log.warning("torch.compile failed (%s): kernels are not fused", " ".join(str(error).split())[:160])
            chosen.append(source.module)
            result = source.module(*values)
        return result

    return run


class _Normalized(NamedTuple):
    """The nodes from which relu(BatchNorm(x)) can be recomputed."""

    x: fx.Node
    m: fx.Node  # mean
    r: fx.Node  # 1 / deviation
    w: fx.Node | None
    b: fx.Node | None


def _find_normalized(pass_nodes: Set[fx.Node]) -> dict[fx.Node, _Normalized]:
    """The ReLUs that follow a BatchNorm. Recomputing one takes one kernel that reads one tensor."""
    normalized = {}
    for relu in pass_nodes:
        y = relu.args[0] if relu.target is torch.ops.aten.relu.default else None
        norm = y.args[0] if isinstance(y, fx.Node) and y.target is operator.getitem and y.args[1] == 0 else None
        if isinstance(norm, fx.Node) and "batch_norm" in str(norm.target):
            m, r = ([n for n in norm.users if n.args[1:] == (i,)] for i in (1, 2))
            x, w, b = norm.args[:3]
            if m and r and isinstance(x, fx.Node):
                normalized[relu] = _Normalized(x, m[0], r[0], w, b)  # type: ignore[arg-type]
    return normalized


def _dependencies(node: fx.Node, recomputed: Mapping[fx.Node, _Normalized]) -> list[fx.Node]:
    return [n for n in recomputed[node] if n is not None] if node in recomputed else node.all_input_nodes


def _ancestors(
    nodes: Iterable[fx.Node],
    stop: Set[fx.Node] = frozenset(),
    recomputed: Mapping[fx.Node, _Normalized] = {},
) -> set[fx.Node]:
    """The nodes and everything they depend on, without the dependencies of the nodes in `stop`."""
    ancestors = set[fx.Node]()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in ancestors:
            ancestors.add(node)
            if node not in stop:
                waiting += _dependencies(node, recomputed)
    return ancestors


def _with_results(nodes: set[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """Add the single results of operators that return several."""
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in nodes:
            nodes.add(node)
    return nodes


@contextmanager
def _disable_logger(name: str) -> Iterator[None]:
    """Context manager: suppress torch's long log of a failure, which is reported in one line instead."""
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


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


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _choose_stored(pass_nodes: set[fx.Node], z: fx.Node, x: fx.Node, checkpointing: bool) -> set[fx.Node]:
    """The nodes of the pass whose values are passed on. All others are recomputed when needed.

    These are all tensors. With `checkpointing`, they are the nodes on which alone the rest of the pass depends (the
    boundaries of residual blocks), reduced to about the square root of their number, and small tensors.
    """
    tensors = {n for n in pass_nodes if isinstance(n.meta.get("val"), Tensor)}
    if not checkpointing:
        return tensors
    on_path = _ancestors([z])
    order = [n for n in z.graph.nodes if n in on_path]
    position = {n: i for i, n in enumerate(order)}
    last_use = {n: max((position[user] for user in n.users if user in position), default=-1) for n in order}
    varying = _descendants(x, pass_nodes)
    alive = set[fx.Node]()
    boundaries = []
    for i, n in enumerate(order):
        if n in varying:
            alive.add(n)
        alive = {a for a in alive if last_use[a] > i}
        if alive == {n} and n in tensors and n.target is not operator.getitem:
            boundaries.append(n)
    step = max(1, round(len(boundaries) ** 0.5))
    buffers = {n for n in pass_nodes if n.target is torch.ops.aten.clone.default and n.args[0].op == "placeholder"}  # type: ignore[union-attr]
    cheap = {n for n in tensors if n not in varying or n.meta["val"].numel() <= _SMALL or _is_random(n)}
    return {*boundaries[::step], *(cheap - buffers), *(n for n in tensors if n.op == "placeholder")}


def _descendants(x: fx.Node, among: set[fx.Node]) -> set[fx.Node]:
    """The nodes among some that depend on x, and x."""
    descendants = set[fx.Node]()
    waiting = [x]
    while waiting:
        node = waiting.pop()
        if node not in descendants and node in among:
            descendants.add(node)
            waiting += list(node.users)
    return descendants


def _python_state(net: nn.Module) -> Any:
    """Changes if the python code of a network draws random numbers or modifies its attributes."""
    return python_rng_state(), python_values(net)


def python_values(net: nn.Module) -> tuple[Any, ...]:
    """The python numbers and strings that the modules of a network hold."""
    kinds = (bool, int, float, str)
    return tuple(value for m in net.modules() for value in vars(m).values() if type(value) in kinds)
