"""A network's forward pass and its two linear maps as three graphs, traced once, that share their activations.

    z = F(x; theta)          the pass
    u -> J^T u               the way back: gradients
    g -> J g                 the way forward: the product in forward mode

Run one after the other by torch, J g would compute the pass a second time, and BatchNorm's forward-mode rule would be
some twenty small kernels. Traced together and cut apart, the first graph hands on what the other two need, and each
can be fused by torch.compile. Weights are cast to bf16 once. Random numbers are drawn in the first graph only, so that
dropout needs no replay.

The python code of the network runs at tracing time only. A network whose python code does not stay the same from step
to step (it draws from python's generators, counts, or looks at values) is refused with a reason.
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

from warpi.autodiff.batchnorm import forward_rules, normalised
from warpi.autodiff.replay_rng import python_rng_state

_log = logging.getLogger(__name__)
_SMALL = 2**12  # elements: what a checkpoint of activations keeps anyway


class Untraceable(Exception):
    """Why a network cannot be traced."""


class Passes(NamedTuple):
    """The three graphs. Each takes the values of its `inputs`, which are nodes of the common trace."""

    pass_: "_Part"  # -> z, new buffers, what the others need
    vjp: "_Part"  # -> J^T u, one tensor a parameter, None where it has no effect
    vjp_some: "_Part"  # -> the same for `along` alone
    jvp: "_Part"  # -> J g for g along `along`
    x: fx.Node
    theta: dict[str, fx.Node]
    others: dict[str, fx.Node]  # frozen parameters and buffers
    u: fx.Node
    g: dict[str, fx.Node]  # along these parameters
    draws: bool  # whether the network draws random numbers

    def fuse(self) -> None:
        """Let torch.compile make fewer kernels of each graph."""
        for part in (self.pass_, self.vjp, self.vjp_some, self.jvp):
            part.fuse()

    def holds_tensors(self) -> bool:
        """Whether a graph has constants of its own, which belong to one network."""
        return any(part.holds_tensors() for part in (self.pass_, self.vjp, self.vjp_some, self.jvp))


class Point:
    """A pass at one x and theta."""

    def __init__(self, passes: Passes, x: Tensor, theta: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
        self.passes = passes
        self.known: dict[fx.Node, Any] = {passes.x: x}
        self.known |= {node: theta[name] for name, node in passes.theta.items()}
        self.known |= {node: others[name] for name, node in passes.others.items()}
        values = passes.pass_(self.known)
        self.z: Tensor = values[0]
        n = 1 + len(passes.others)
        self.others = dict(zip(passes.others, values[1:n], strict=True))  # as the pass left them
        self.known |= {node: v for node, v in zip(passes.pass_.outputs[n:], values[n:], strict=True) if node}
        wanted = {*passes.vjp.inputs, *passes.jvp.inputs}
        self.known = {node: v for node, v in self.known.items() if node in wanted}  # the rest may be freed

    def vjp(self, u: Tensor, some: bool = False) -> list[Tensor | None]:
        part = self.passes.vjp_some if some else self.passes.vjp
        return list(part({**self.known, self.passes.u: u}))

    def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
        given = {node: g[name] for name, node in self.passes.g.items()}
        product: Tensor = self.passes.jvp(self.known | given)[0]
        return product


def trace(
    net: nn.Module,
    x: Tensor,
    n_classes: int,
    along: Sequence[str],
    *,
    lean: bool = False,
    checkpointing: bool = False,
) -> Passes:
    """The passes of a network for inputs like x; J g is wanted along the parameters `along`.

    What the first graph hands on is what takes memory. `lean`: not what BatchNorm and ReLU make of a tensor, which is
    computed again from that tensor. `checkpointing`: next to nothing.
    """
    theta = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    buffers = dict(net.named_buffers())
    frozen = {name: p.detach() for name, p in net.named_parameters() if not p.requires_grad}
    others = {**frozen, **buffers}

    def everything(
        x: Tensor, theta: dict[str, Tensor], others: dict[str, Tensor], u: Tensor, g: dict[str, Tensor]
    ) -> Any:
        def run(some: dict[str, Tensor], rest: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            own = {name: t.clone() if name in buffers else t for name, t in others.items()}
            with forward_rules():
                z = functional_call(net, ({**rest, **some}, own), (x,))
            return z, own

        def with_product(theta: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            some = {name: theta[name] for name in along}
            rest = {name: p for name, p in theta.items() if name not in some}
            z, jg, own = jvp(lambda p: run(p, rest), (some,), (g,), has_aux=True)  # type: ignore[misc]
            return z, (jg, own)

        z, back, (jg, own) = vjp(with_product, theta, has_aux=True)  # type: ignore[misc]
        return [z, *own.values(), *back(u)[0].values(), jg]

    u = torch.empty(len(x), n_classes, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    g = {name: torch.empty_like(theta[name]) for name in along}
    before = python_state(net)
    # What fails half-way must not leave torch's dispatcher in a state of its own: its frames go before the guard does.
    why, tls = "", (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
    with torch._C._ForceDispatchKeyGuard(*tls), _quiet("torch._subclasses.fake_tensor"):
        try:
            trace_it = partial(make_fx, tracing_mode="fake", _allow_non_fake_inputs=True)  # a module may hold tensors
            whole = trace_it(everything)(x, theta, others, u, g)
            # once more without operators in place: one graph must not overwrite what it hands on to the others
            whole = trace_it(torch.func.functionalize(whole))(x, theta, others, u, g)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
            why = str(error).strip().partition("\n")[0][:160] or type(error).__name__
        if why:
            gc.collect()  # frames that hold one another
    if why:
        raise Untraceable(why)
    if python_state(net) != before:
        raise Untraceable("its python code draws from python's or numpy's generators, or changes numbers it holds")

    _drop_zeros(whole.graph)
    given = [node for node in whole.graph.nodes if node.op == "placeholder"]
    (x_node,), given = given[:1], given[1:]
    theta_nodes, given = dict(zip(theta, given, strict=False)), given[len(theta) :]
    other_nodes, given = dict(zip(others, given, strict=False)), given[len(others) :]
    (u_node,), g_nodes = given[:1], dict(zip(along, given[1:], strict=True))
    (result,) = (list(node.args[0]) for node in whole.graph.nodes if node.op == "output")
    z, own, grads, jg = result[0], result[1 : 1 + len(others)], result[1 + len(others) : -1], result[-1]

    of_pass = _closed(_ancestors([z, *own]), whole.graph)
    again = _normalised(of_pass) if lean or checkpointing else {}
    kept = _cuts(of_pass, z, x_node, checkpointing) - again.keys()
    some = [grads[list(theta).index(name)] for name in along]
    back, back_some, ahead = (_Part(whole, outputs, kept, of_pass, again) for outputs in (grads, some, [jg]))
    handed_on = dict.fromkeys(n for part in (back, ahead) for n in part.inputs if n.op != "placeholder")
    pass_ = _Part(whole, [z, *own, *handed_on])
    draws = any(_is_random(node) for node in of_pass)
    return Passes(pass_, back, back_some, ahead, x_node, theta_nodes, other_nodes, u_node, g_nodes, draws)


class _Part:
    """The nodes that lead from `kept` ones (and placeholders) to `outputs`, as a function of its own."""

    def __init__(
        self,
        whole: fx.GraphModule,
        outputs: Sequence[fx.Node | None],
        kept: Set[fx.Node] = frozenset(),
        of_pass: Set[fx.Node] = frozenset(),
        again: "Mapping[fx.Node, _Normalised]" = {},  # noqa: B006
    ) -> None:
        self.outputs = outputs
        inside = _ancestors([n for n in outputs if n is not None], kept, again)
        work = [n for n in whole.graph.nodes if n in inside and n.op != "placeholder" and n not in kept]
        self.inputs = [n for n in whole.graph.nodes if n in inside and n not in set(work)]
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.inputs:
            new[node] = graph.placeholder(node.name)

        def put(node: fx.Node) -> None:  # what is computed again comes right before its first use, not all at once
            waiting = [node]
            while waiting:
                for before in _inputs(waiting[-1], again):
                    if before not in new:
                        waiting.append(before)
                        break
                else:
                    done = waiting.pop()
                    if done not in new and done in again:
                        values = (None if n is None else new[n] for n in again[done])
                        new[done] = graph.call_function(normalised, tuple(values))
                    elif done not in new:
                        new[done] = graph.node_copy(done, lambda n: new[n])

        for node in work:
            if node not in of_pass:
                put(node)
        for out in outputs:
            if out is not None and out not in new:
                put(out)
        graph.output([None if n is None else new[n] for n in outputs])
        self.module = fx.GraphModule(whole, graph)
        self.run: Callable[..., Sequence[Any]] = self.module
        self.sizes = [n.meta.get("val") for n in self.inputs]

    def __call__(self, known: Mapping[fx.Node, Any]) -> Sequence[Any]:
        with torch.no_grad():
            return self.run(*(known[node] for node in self.inputs))

    def fuse(self) -> None:
        self.run = fuse_graph(self.module, self.sizes)

    def holds_tensors(self) -> bool:
        return _holds_tensors(self.module)


def fuse_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """The graph as a function with fewer kernels, by torch.compile, for inputs like these."""
    shapes = tuple((v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else v for v in inputs)
    fused = _fused.__wrapped__ if _holds_tensors(module) else _fused  # constants are not seen in the code
    return fused(module.code, shapes, _Same(module))


def _holds_tensors(module: fx.GraphModule) -> bool:
    return any(node.op == "get_attr" for node in module.graph.nodes)


class _Same:
    """A module that is equal to any other: the key of the cache is what it does, which stands beside it."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same)

    def __hash__(self) -> int:
        return 0


@lru_cache(64)
def _fused(code: str, shapes: tuple[Any, ...], source: _Same) -> Callable[..., Sequence[Any]]:  # noqa: ARG001
    """torch.compile, once for all networks whose graphs are the same: six runs of a sweep compile once."""
    quick: Callable[..., Sequence[Any]] = torch.compile(source.module, fullgraph=True, dynamic=False)
    use: list[Callable[..., Sequence[Any]]] = []

    def run(*values: Any) -> Sequence[Any]:
        if use:
            return use[0](*values)
        try:
            with warnings.catch_warnings():  # of a compiler: the user can do nothing about them
                warnings.simplefilter("ignore")
                result = quick(*values)
            use.append(quick)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # whatever a compiler may raise
            _log.warning("torch.compile failed (%s): kernels are not fused", " ".join(str(error).split())[:160])
            use.append(source.module)
            result = source.module(*values)
        return result

    return run


class _Normalised(NamedTuple):
    """A node that is relu(BatchNorm(x)), by what it can be computed from again."""

    x: fx.Node
    m: fx.Node  # mean
    r: fx.Node  # 1 / deviation
    w: fx.Node | None
    b: fx.Node | None


def _normalised(of_pass: Set[fx.Node]) -> dict[fx.Node, _Normalised]:
    """The activations that follow a BatchNorm. Computing them again is one kernel that reads one tensor."""
    found = {}
    for relu in of_pass:
        y = relu.args[0] if relu.target is torch.ops.aten.relu.default else None
        norm = y.args[0] if isinstance(y, fx.Node) and y.target is operator.getitem and y.args[1] == 0 else None
        if isinstance(norm, fx.Node) and "batch_norm" in str(norm.target):
            m, r = ([n for n in norm.users if n.args[1:] == (i,)] for i in (1, 2))
            x, w, b = norm.args[:3]
            if m and r and isinstance(x, fx.Node):
                found[relu] = _Normalised(x, m[0], r[0], w, b)  # type: ignore[arg-type]
    return found


def _inputs(node: fx.Node, again: Mapping[fx.Node, _Normalised]) -> list[fx.Node]:
    return [n for n in again[node] if n is not None] if node in again else node.all_input_nodes


def _ancestors(
    nodes: Iterable[fx.Node],
    stop: Set[fx.Node] = frozenset(),
    again: Mapping[fx.Node, _Normalised] = {},
) -> set[fx.Node]:
    """The nodes and all they are made of; not what the nodes of `stop` are made of."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                waiting += _inputs(node, again)
    return found


def _closed(nodes: set[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """With the single results of operators that have several."""
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in nodes:
            nodes.add(node)
    return nodes


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """What torch logs of a failure, with its frames, is said here in a line."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _drop_zeros(graph: fx.Graph) -> None:
    """x does not move, so that half of the first layer's product is an operator on zeros: leave it out."""
    aten, zero = torch.ops.aten, set[Any]()
    for node in graph.nodes:
        nothing = node.target is aten.zeros.default and node.args[0] == []
        if nothing or (node.target is aten.expand.default and node.args[0] in zero):
            zero.add(node)
        elif node.target in (aten.convolution.default, aten.mm.default) and zero.intersection(node.args[:2]):
            zero.update([node] if node.target is aten.mm.default or node.args[2] is None else [])
        elif node.target is aten.add.Tensor and len(rest := [a for a in node.args[:2] if a not in zero]) == 1:
            other = rest[0]
            if isinstance(other, fx.Node) and not node.kwargs and _alike(other, node):
                node.replace_all_uses_with(other)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return all(getattr(a.meta["val"], name) == getattr(b.meta["val"], name) for name in ("shape", "dtype"))


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _cuts(of_pass: set[fx.Node], z: fx.Node, x: fx.Node, checkpointing: bool) -> set[fx.Node]:
    """The nodes of the pass whose values are handed on; all the others are computed again where they are needed.

    All of them, or with `checkpointing` those at which everything the pass still needs hangs on one tensor (the
    borders of residual blocks), thinned out to about the square root of their number.
    """
    tensors = {n for n in of_pass if isinstance(n.meta.get("val"), Tensor)}
    if not checkpointing:
        return tensors
    order = [n for n in z.graph.nodes if n in _ancestors([z])]
    place = {n: i for i, n in enumerate(order)}
    varies = _users_of(x, of_pass)
    last = {n: max((place[user] for user in n.users if user in place), default=-1) for n in order}
    alive, borders = set[fx.Node](), []
    for i, n in enumerate(order):
        if n in varies:
            alive.add(n)
        alive = {a for a in alive if last[a] > i}
        if alive == {n} and n in tensors and n.target is not operator.getitem:
            borders.append(n)
    step = max(1, round(len(borders) ** 0.5))
    buffers = {n for n in of_pass if n.target is torch.ops.aten.clone.default and n.args[0].op == "placeholder"}  # type: ignore[union-attr]
    cheap = {n for n in tensors if n not in varies or n.meta["val"].numel() <= _SMALL or _is_random(n)}
    return {*borders[::step], *(cheap - buffers), *(n for n in tensors if n.op == "placeholder")}


def _users_of(x: fx.Node, among: set[fx.Node]) -> set[fx.Node]:
    found, waiting = set[fx.Node](), [x]
    while waiting:
        node = waiting.pop()
        if node not in found and node in among:
            found.add(node)
            waiting += list(node.users)
    return found


def python_state(net: nn.Module) -> Any:
    """What would tell that the python code of a network did not leave things as they were."""
    return python_rng_state(), python_values(net)


def python_values(net: nn.Module) -> tuple[Any, ...]:
    """The python numbers that the modules of a network hold."""
    kinds = (bool, int, float, str)
    return tuple(value for m in net.modules() for value in vars(m).values() if type(value) in kinds)
