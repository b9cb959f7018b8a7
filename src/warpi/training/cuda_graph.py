"""A method's step as one CUDA graph: reading the batch, augmentation, every pass, both optimizers, the log.

Launching the kernels of a small network one by one takes longer than running them. A graph is recorded once and then
launched as a whole; it does what was recorded, at the same addresses, so that only a step whose control flow is static
can be captured. What may change from step to step lies in tensors: the numbers of the batch, learning rates, weights.
The first steps are run as they are, and looked at; a step that would not repeat itself stays as it is, and the reason
is said once. Captured and plain steps draw the same random numbers.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from warpi.autodiff.replay_rng import python_rng_state
from warpi.autodiff.trace import numbers_of
from warpi.data.batch import Batch
from warpi.data.loader import Loader, Planned, Slot
from warpi.training.checkpoint import state_of
from warpi.training.method import Log, Method

_log = logging.getLogger(__name__)
_WARM_UP = 3  # plain steps: the first make optimizer state, traces and cuDNN's choices
_MOST = 8  # graphs of one run; a step that asks for more changes too often


@contextmanager
def captured(method: Method, always: bool = False) -> Iterator["Captured | None"]:
    """Inside, calls of `method.step` on a GPU are launches of a graph.

    With `always` they go the same way on a CPU, where what a graph would hold is run as it is.
    """
    if method.task.train.y.device.type != "cuda" and not always:
        yield None
        return
    step = Captured(method)
    method.step = step  # type: ignore[method-assign]
    with searching():
        try:
            yield step
        finally:
            del method.step
            for loader in step.loaders:
                loader.plan(False)


_searches: list[bool] = []  # what cuDNN was told before the first of several runs began


@contextmanager
def searching() -> Iterator[None]:
    """cuDNN tries all its algorithms once: shapes stay the same, so that this pays."""
    _searches.append(torch.backends.cudnn.benchmark)
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        before = _searches.pop()
        torch.backends.cudnn.benchmark = before or bool(_searches)


class Captured:
    """`method.step`, recorded."""

    def __init__(self, method: Method) -> None:
        self.method, self.plain = method, method.step
        self.loaders = [v for v in vars(method).values() if isinstance(v, Loader) and v.resident]
        for loader in self.loaders:
            loader.plan(True)
        self.steps: dict[Any, _Step] = {}
        self.why: str | None = None  # it is not captured

    def __call__(self, batch: Batch) -> Log:
        if self.why is not None:
            return self.plain(batch)
        kind = self.method.is_meta_step, tuple(_anatomy(self.method).items()), _form(batch)
        if kind not in self.steps:
            if len(self.steps) >= _MOST:
                self._give_up("numbers that its step reads change too often; make them tensors")
                return self.plain(batch)
            self.steps[kind] = _Step(self.method, self.plain, self.loaders)
        step = self.steps[kind]
        if step.ready:
            return step.launch(batch)
        if step.warm < _WARM_UP:
            log, why = step.watched(batch)
            if why:
                self._give_up(why)
            return log
        try:
            step.record(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever an operator that cannot be captured raises
            self._give_up(f"it cannot be captured ({str(error).strip().partition(chr(10))[0][:160]})")
            step.forget_gradients()  # they lie in the memory of the graph that has failed
            return self.plain(batch)
        return step.launch(batch)

    def _give_up(self, why: str) -> None:
        self.why = why
        self.steps.clear()
        _log.warning("the step of %s runs kernel by kernel, which is slower: %s", type(self.method).__name__, why)


class _Step:
    """One kind of step."""

    def __init__(self, method: Method, plain: Callable[[Batch], Log], loaders: list[Loader]) -> None:
        self.method, self.plain, self.loaders = method, plain, loaders
        self.warm, self.ready = 0, False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.draws: dict[int, int] = {}  # batches that the step draws of each loader

    def watched(self, batch: Batch) -> tuple[Log, str]:
        """A plain step, and why it could not be recorded, if so."""
        before, counts, chance = _anatomy(self.method, deep=True), [x.count for x in self.loaders], python_rng_state()
        files = [v for v in vars(self.method).values() if isinstance(v, Loader) and not v.resident]
        read = [loader.count for loader in files]
        log = self.plain(batch)
        self.draws = {i: x.count - n for i, (x, n) in enumerate(zip(self.loaders, counts, strict=True))}
        self.warm += 1
        after, why = _anatomy(self.method, deep=True), ""
        if [loader.count for loader in files] != read:
            why = "it reads files"
        if python_rng_state() != chance:
            why = "it draws from python's or numpy's generators, which a graph would not"
        for name, (kind, value) in after.items():
            if name in before and before[name] != (kind, value):
                what = "puts another tensor into" if kind == "tensor" else "changes"
                why = f"its step {what} {name}; write into a tensor in place instead"
        return log, why

    def _parameters(self) -> Iterator[nn.Parameter]:
        for value in (*vars(self.method).values(), *self.method.nets, *self.method.optimizers):
            if isinstance(value, nn.Module):
                yield from value.parameters()
            elif isinstance(value, torch.optim.Optimizer):
                yield from (p for group in value.param_groups for p in group["params"])

    def forget_gradients(self) -> None:
        for p in self._parameters():
            p.grad = None

    def record(self, batch: Batch) -> None:
        """Everything the device does in a step, once, without doing it."""
        self.slots = [(x, Slot(x)) for i, x in enumerate(self.loaders) for _ in range(self.draws.get(i, 0))]
        self.input = Slot(batch.loader) if Planned.is_one(batch) else Batch(*_static(batch))
        self.forget_gradients()  # else the graph would add to some whose memory others will have
        device = self.method.task.train.y.device
        if device.type == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            own = [slot.generator for _, slot in self.slots]
            own += [self.input.generator] if isinstance(self.input, Slot) else []
            generators = _generators(self.method)
            for generator in [*generators, *own]:
                self.graph.register_generator_state(generator)
            chance = kept(*generators, torch.cuda.default_generators[device.index or 0])
            # On the stream of the run, if it has one: cuBLAS has a workspace a stream, and two graphs that were
            # recorded on one stream and run side by side on others would write into the same.
            own_stream = torch.cuda.current_stream(device)
            stream = own_stream if own_stream != torch.cuda.default_stream(device) else None
            with chance, torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.log = self._body()
        self.ready = True

    def _body(self) -> Log:
        for loader, slot in self.slots:
            loader.capturing.append(slot)
        try:
            return self.plain(self.input.read() if isinstance(self.input, Slot) else self.input)
        finally:
            for loader in self.loaders:
                loader.capturing.clear()

    def launch(self, batch: Batch) -> Log:
        if isinstance(self.input, Slot):
            assert Planned.is_one(batch)
            self.input.fill(batch.k)
        else:
            for own, new in zip(_tensors(self.input), _tensors(batch), strict=True):
                own.copy_(new)
        for loader, slot in self.slots:
            slot.fill(loader.count)
            loader.count += 1
        if self.graph is None:
            return self._body()
        self.graph.replay()
        return {name: torch.as_tensor(value).clone() for name, value in self.log.items()}  # the next will overwrite it


def _anatomy(method: Method, deep: bool = False) -> dict[str, tuple[str, Any]]:
    """Every number of a method's state, which a graph would keep as it was, and where every tensor lies.

    With `deep` also those of its networks, which takes longer.
    """
    found: dict[str, tuple[str, Any]] = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[name] = "tensor", (value.data_ptr(), value.shape)
        elif isinstance(value, bool | int | float | str):
            found[name] = "number", value
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                look(f"{name}[{i}]", v)
        elif isinstance(value, dict):
            for k, v in value.items():
                look(f"{name}[{k!r}]", v)
        elif isinstance(value, torch.optim.Optimizer):
            for i, group in enumerate(value.param_groups):
                look(f"{name}[{i}]", {k: v for k, v in group.items() if k != "params"})
        elif deep and isinstance(value, nn.Module):
            look(f"numbers of {name}", numbers_of(value))
            look(f"buffers of {name}", dict(value.named_buffers()))

    for name, value in state_of(method).items():
        look(name, value)
    return found


@contextmanager
def kept(*generators: Generator) -> Iterator[None]:
    """Generators as they were, should a capture fail: it leaves them waiting for its end."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            fresh = torch.Generator(generator.device)
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise


def _generators(method: Method) -> list[Generator]:
    return [v for v in vars(method).values() if isinstance(v, Generator) and v.device.type == "cuda"]


def _form(batch: Batch) -> Any:
    """What a recorded step expects: a batch of one of its loaders, or tensors of these shapes."""
    if Planned.is_one(batch):
        return id(batch.loader)
    return tuple((tuple(t.shape), t.dtype) for t in _tensors(batch))


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.views, batch.y, batch.rows]


def _static(batch: Batch) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    return tuple(v.clone() for v in batch.views), batch.y.clone(), batch.rows.clone()
