"""Run a training step as one CUDA graph: reading the batch, augmentation, all passes, both optimizers, the log.

Launching the kernels of a small network one by one takes longer than running them. A graph is recorded once and then
launched as a whole. It repeats the recorded kernels at the same addresses, so only a step with static control flow can
be recorded. Whatever may change from step to step is in tensors: the row numbers of the batch, learning rates, weights.
The first steps run normally and are observed. A step that would not repeat itself keeps running normally, and the
reason is logged once. Graphed and plain steps draw the same random numbers.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from warpi.autodiff.replay_rng import get_python_rng_state
from warpi.autodiff.trace import python_values
from warpi.data.batch import Batch
from warpi.data.loader import Loader, Planned, Slot
from warpi.errors import first_line
from warpi.training.checkpoint import state_of
from warpi.training.method import Log, Method

log = logging.getLogger("warpi.training")
WARM_UP = 3  # plain steps: the first ones create optimizer state, traces and cuDNN's choice of algorithms
_MAX_GRAPHS = 8  # per run; a step that needs more changes too often


class NotGraphable(Exception):
    """Why a step cannot be recorded as a CUDA graph."""


class GraphedStep:
    """Record `body` as a CUDA graph; a call launches it and returns a copy of the log. On a CPU a call runs `body`.

    The body may draw from the `generators` and from torch's global generator. Raises NotGraphable if it contains an
    operation that cannot be recorded; the gradients of `parameters` are then None.
    """

    def __init__(
        self,
        body: Callable[[], Log],
        parameters: Iterable[nn.Parameter],
        generators: Iterable[Generator],
        device: torch.device,
    ) -> None:
        self.body = body
        self.graph: torch.cuda.CUDAGraph | None = None
        parameters = list(parameters)
        _clear_gradients(parameters)  # otherwise the graph would add to gradients whose memory is reused
        if device.type != "cuda":
            return
        try:
            self.graph = self._record(list(generators), device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # depends on the operator that cannot be captured
            _clear_gradients(parameters)  # they are in the memory of the failed graph
            raise NotGraphable(f"it cannot be captured ({first_line(error)})") from error

    def _record(self, generators: list[Generator], device: torch.device) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with (
            _restore_on_error([*generators, torch.cuda.default_generators[device.index or 0]]),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            self.log = self.body()
        return graph

    def __call__(self) -> Log:
        if self.graph is None:
            return self.body()
        self.graph.replay()
        # The next launch overwrites the log.
        return {name: torch.as_tensor(value).clone() for name, value in self.log.items()}


@contextmanager
def _restore_on_error(generators: list[Generator]) -> Iterator[None]:
    """Restore the generators if recording fails, because it leaves them waiting for the end of the graph."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            fresh = torch.Generator(generator.device)
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise


def _clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = None


def warn_not_graphed(name: str, why: str) -> None:
    log.warning(
        "the step of %s cannot be captured as a CUDA graph and runs kernel by kernel, which is slower: %s", name, why
    )


@contextmanager
def cudnn_search() -> Iterator[None]:
    """Let cuDNN time its algorithms once per shape inside. This pays off because the shapes stay the same."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def graph_steps(method: Method, always: bool = False) -> Iterator["GraphedMethod | None"]:
    """Context manager: calls of `method.step` on a GPU launch a graph.

    With `always`, a CPU takes the same path, except that the body of a graph is run instead of recorded.
    """
    if method.task.train.y.device.type != "cuda" and not always:
        yield None
        return
    graphed = GraphedMethod(method)
    method.step = graphed  # type: ignore[method-assign]
    with cudnn_search():
        try:
            yield graphed
        finally:
            del method.step
            for loader in graphed.loaders:
                loader.plan(False)


class GraphedMethod:
    """Replaces `method.step`: one graph for each kind of step."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.plain = method.step
        self.loaders = [v for v in vars(method).values() if isinstance(v, Loader) and v.resident]
        for loader in self.loaders:
            loader.plan(True)
        self.steps: dict[Any, _Step] = {}
        self.why: str | None = None  # the reason if steps run normally

    def __call__(self, batch: Batch) -> Log:
        if self.why is not None:
            return self.plain(batch)
        kind = self.method.is_meta_step, tuple(_describe_state(self.method).items()), _describe_batch(batch)
        if kind not in self.steps:
            if len(self.steps) >= _MAX_GRAPHS:
                return self._give_up("numbers that its step reads change too often; make them tensors", batch)
            self.steps[kind] = _Step(self.method, self.plain, self.loaders)
        step = self.steps[kind]
        if step.graph is None and step.n_observed < WARM_UP:
            log, why = step.observe(batch)
            if why:
                self._give_up(why)
            return log
        if step.graph is None:
            try:
                step.record(batch)
            except NotGraphable as error:
                return self._give_up(str(error), batch)
        return step.launch(batch)

    def _give_up(self, why: str, batch: Batch | None = None) -> Log:
        """Run all further steps normally, beginning with that of `batch`."""
        self.why = why
        self.steps.clear()
        warn_not_graphed(type(self.method).__name__, why)
        return {} if batch is None else self.plain(batch)


class _Step:
    """One kind of step: first observed, then recorded as a graph."""

    def __init__(self, method: Method, plain: Callable[[Batch], Log], loaders: list[Loader]) -> None:
        self.method = method
        self.plain = plain
        self.loaders = loaders
        self.n_observed = 0
        self.graph: GraphedStep | None = None
        self.draws: dict[int, int] = {}  # number of batches that the step draws from each loader

    def observe(self, batch: Batch) -> tuple[Log, str]:
        """Run a plain step. Also returns the reason if the step cannot be recorded, else an empty string."""
        file_loaders = [v for v in vars(self.method).values() if isinstance(v, Loader) and not v.resident]
        before = _describe_state(self.method, deep=True)
        counts = [loader.count for loader in self.loaders]
        file_counts = [loader.count for loader in file_loaders]
        rng_state = get_python_rng_state()
        log = self.plain(batch)
        self.n_observed += 1
        self.draws = {i: x.count - n for i, (x, n) in enumerate(zip(self.loaders, counts, strict=True))}
        why = ""
        if [loader.count for loader in file_loaders] != file_counts:
            why = "it reads files"
        if get_python_rng_state() != rng_state:
            why = "it draws from python's or numpy's generators, which a graph would not"
        for name, (kind, value) in _describe_state(self.method, deep=True).items():
            if name in before and before[name] != (kind, value):
                change = "puts a new tensor into" if kind == "tensor" else "changes"
                why = f"its step {change} {name}; write into a tensor in place instead"
        return log, why

    def record(self, batch: Batch) -> None:
        """Record the step as a graph, without running it."""
        self.slots = [(x, Slot(x)) for i, x in enumerate(self.loaders) for _ in range(self.draws.get(i, 0))]
        generators = [v for v in vars(self.method).values() if isinstance(v, Generator) and v.device.type == "cuda"]
        generators += [slot.generator for _, slot in self.slots]
        self.input: Slot | Batch
        if Planned.is_one(batch):
            self.input = Slot(batch.loader)
            generators.append(self.input.generator)
        else:
            self.input = Batch(tuple(v.clone() for v in batch.views), batch.y.clone(), batch.rows.clone())
        self.graph = GraphedStep(self._body, self._parameters(), generators, self.method.task.train.y.device)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for value in (*vars(self.method).values(), *self.method.nets, *self.method.optimizers):
            if isinstance(value, nn.Module):
                yield from value.parameters()
            elif isinstance(value, torch.optim.Optimizer):
                yield from (p for group in value.param_groups for p in group["params"])

    def _body(self) -> Log:
        for loader, slot in self.slots:
            loader.capturing.append(slot)
        try:
            return self.plain(self.input.read() if isinstance(self.input, Slot) else self.input)
        finally:
            for loader in self.loaders:
                loader.capturing.clear()

    def launch(self, batch: Batch) -> Log:
        assert self.graph is not None
        if isinstance(self.input, Slot):
            assert Planned.is_one(batch)
            self.input.fill(batch.k)
        else:
            for static, new in zip(_tensors(self.input), _tensors(batch), strict=True):
                static.copy_(new)
        for loader, slot in self.slots:
            slot.fill(loader.count)
            loader.count += 1
        return self.graph()


def _describe_state(method: Method, deep: bool = False) -> dict[str, tuple[str, Any]]:
    """Every number in the state of a method, which a graph would freeze, and the address of every tensor.

    With `deep`, also describes the numbers and buffers inside its networks, which takes longer.
    """
    description: dict[str, tuple[str, Any]] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            description[name] = "tensor", (value.data_ptr(), value.shape)
        elif isinstance(value, bool | int | float | str):
            description[name] = "number", value
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                add(f"{name}[{i}]", v)
        elif isinstance(value, dict):
            for k, v in value.items():
                add(f"{name}[{k!r}]", v)
        elif isinstance(value, torch.optim.Optimizer):
            for i, group in enumerate(value.param_groups):
                add(f"{name}[{i}]", {k: v for k, v in group.items() if k != "params"})
        elif deep and isinstance(value, nn.Module):
            add(f"numbers of {name}", python_values(value))
            add(f"buffers of {name}", dict(value.named_buffers()))

    for name, value in state_of(method).items():
        add(name, value)
    return description


def _describe_batch(batch: Batch) -> Any:
    """What a recorded step expects: the loader of the batch, or the shapes of its tensors."""
    if Planned.is_one(batch):
        return id(batch.loader)
    return tuple((tuple(t.shape), t.dtype) for t in _tensors(batch))


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.views, batch.y, batch.rows]
