"""Graphs cut from the trace of a network: the forward pass, and the products that use its stored values."""

import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from warpi.autodiff.batchnorm import normalize_relu
from warpi.utils.devices import DEVICE_ERRORS

_log = logging.getLogger("warpi.autodiff")
_SMALL = 2**12  # checkpointing stores tensors with at most that many elements
_MAX_FUSED = 64
_fused: dict[Any, Callable[..., Sequence[Any]]] = {}  # by code and shapes; compiling takes seconds


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


def cut_trace(
    whole: fx.GraphModule,
    theta: Sequence[str],
    fixed: Sequence[str],
    moved: Sequence[str],
    lean: bool,
    checkpointing: bool,
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
    nodes: Iterable[fx.Node], stop: Set[fx.Node] = frozenset(), recomputed: Mapping[fx.Node, _Normalized] = {}
) -> set[fx.Node]:
    """The nodes and everything they depend on, without the dependencies of the nodes in `stop`."""
    return _reachable(nodes, lambda node: [] if node in stop else _dependencies(node, recomputed))


def _reachable(nodes: Iterable[fx.Node], following: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    """The nodes, those that follow them, and so on."""
    reached = set[fx.Node]()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += following(node)
    return reached


def _with_results(nodes: set[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """Add the single results of operators that return several."""
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in nodes:
            nodes.add(node)
    return nodes


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
    varying = _reachable([x], lambda node: [user for user in node.users if user in pass_nodes])
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


def fuse_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """Compile a graph for inputs like these, with fewer kernels. Networks with equal graphs share the result."""
    if _holds_tensors(module):  # its code does not show constants
        return _compile(module)
    shapes = tuple((v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else v for v in inputs)
    key = module.code, shapes
    if key not in _fused:
        _fused[key] = _compile(module)
        if len(_fused) > _MAX_FUSED:
            del _fused[next(iter(_fused))]
    return _fused[key]


def _holds_tensors(module: fx.GraphModule) -> bool:
    """Whether a graph contains constant tensors, which belong to one network."""
    return any(node.op == "get_attr" for node in module.graph.nodes)


def _compile(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """Compile a graph with torch.compile. If that fails, use the graph itself."""
    compiled: Callable[..., Sequence[Any]] = torch.compile(module, fullgraph=True, dynamic=False)
    chosen: list[Callable[..., Sequence[Any]]] = []

    def run(*values: Any) -> Sequence[Any]:
        if chosen:
            return chosen[0](*values)
        try:
            with warnings.catch_warnings():  # the user cannot act on a compiler's warnings
                warnings.simplefilter("ignore")
                result = compiled(*values)
            chosen.append(compiled)
        except DEVICE_ERRORS:
            raise
        except Exception as error:  # a compiler may raise anything
            _log.warning("torch.compile failed (%s): kernels are not fused", " ".join(str(error).split())[:160])
            chosen.append(module)
            result = module(*values)
        return result

    return run
