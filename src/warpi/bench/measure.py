"""`warpi bench meta-step`: what a training step costs, against plain SGD and against the other ways to write it.

Every variant of a (network, precision) starts from the same weights and gets the same batches of random images. A step
is all that the engine does for one: gathering and augmenting both batches, all passes, both optimizers.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from warpi.bench.other_implementations import WAYS, Peer
from warpi.data.augment import Crop
from warpi.data.examples import Scale, TensorExamples
from warpi.data.split import Split
from warpi.errors import UserError, unknown
from warpi.methods.registry import make_method
from warpi.methods.warpi import OUTPUTS, WarPI
from warpi.nets.registry import NETS
from warpi.training.cuda_graph import graph_steps
from warpi.training.engine import TrainingState
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.devices import pick_device
from warpi.utils.field_checks import at_least, check_types
from warpi.utils.seeding import generator, seeded

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What is measured. The flags of `warpi bench meta-step` are these fields."""

    net: tuple[str, ...] = ("resnet32",)  # names of `warpi list nets`
    batch: int = 100  # noisy examples a step, and as many trusted ones
    precision: tuple[str, ...] = ("32",)  # 32, bf16
    variants: tuple[str, ...] = ()  # names, or all (default: plain SGD, WarPI and the other ways to write its step)
    samples: tuple[int, ...] = (10,)  # Monte-Carlo samples of WarPI
    classes: int = 10
    image_size: int = 32  # pixels a side
    device: str = "auto"  # auto, cpu, cuda
    threads: int | None = None  # CPU threads
    repeats: int = 20  # measurements, of which the median is taken

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, batch=2, classes=2, image_size=1, threads=1, repeats=1)
        for name, allowed in (("net", NETS), ("precision", ("32", "bf16")), ("variants", (*VARIANTS, "all"))):
            for value in getattr(self, name):
                if value not in allowed:
                    raise unknown(name.removesuffix("s"), value, allowed)
        for name in ("net", "precision", "samples"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; name at least one")
        if min(self.samples) < 0:
            raise UserError(f"samples must be at least 0, got {min(self.samples)}")


class Variant(NamedTuple):
    """One way to train, as settings of a method and a recipe."""

    summary: str
    method: str = "warpi"
    way: str | None = None  # a peer's, instead of the method's own step
    recipe: Mapping[str, Any] = {}
    samples: int | None = None  # instead of those asked for
    fast: bool = True  # compiled on a GPU, and captured as a graph there
    captured: bool = False  # captured though not compiled


VARIANTS: Mapping[str, Variant] = {
    "sgd": Variant("plain training: cross-entropy, SGD", "ce"),
    "sgd_eager": Variant("the same, operator by operator", "ce", fast=False),
    "mwnet": Variant("Meta-Weight-Net, exact", "mwnet"),
    "warpi": Variant("WarPI, exact"),
    "warpi_eager": Variant("WarPI, exact, operator by operator", fast=False),
    "warpi_samples1": Variant("WarPI, one sample", samples=1),
    "warpi_samples100": Variant("WarPI, a hundred samples", samples=100),
    "warpi_difference": Variant("J g by a finite difference", recipe={"meta_gradient": "difference"}),
    "warpi_depth2": Variant("a virtual step of the last two children", recipe={"meta_depth": 2}),
    "warpi_every2": Variant("a meta step every 2 steps", recipe={"meta_every": 2}),
    "warpi_every5": Variant("a meta step every 5 steps", recipe={"meta_every": 5}),
    "warpi_real": Variant("the real step as the virtual one", recipe={"meta_order": "real"}),
    "warpi_checkpointing": Variant("fewer activations kept", recipe={"checkpointing": True, "compile": True}),
    "warpi_accumulate2": Variant("the batch in two parts", recipe={"accumulate": 2}),
    "double_backward": Variant("torch.func.grad of torch.func.grad", way="double_backward", fast=False),
    "double_backward_autograd": Variant("autograd, create_graph", way="double_backward_autograd", fast=False),
    "double_backward_graph": Variant("as one graph", way="double_backward_autograd", fast=False, captured=True),
    "double_backward_shared": Variant(
        "the same, its first pass shared with the real step", way="double_backward_shared", fast=False
    ),
    "published": Variant("a new network every step, as published", way="published", fast=False),
    "higher": Variant("with the library higher", way="higher", fast=False),
    "torchopt": Variant("with the library torchopt", way="torchopt", fast=False),
    "betty": Variant("with the library betty (finite difference)", way="betty", fast=False),
}
_DEFAULT = ("sgd", "warpi", *(name for name, v in VARIANTS.items() if v.way))


class Left(NamedTuple):
    """A variant that was not measured, and why."""

    variant: str
    why: str


def bench(spec: Bench) -> Iterator[Row | Left]:
    """A row for each network, precision and variant, as soon as it is known; `sgd` is always among them."""
    device = pick_device(spec.device)
    asked = spec.variants or _DEFAULT
    names = dict.fromkeys(("sgd", *(VARIANTS if "all" in asked else asked)))
    with seeded(0), _set_up(spec.threads):
        for net, precision in itertools.product(spec.net, spec.precision):
            cases = list[Case]()
            for name in names:
                if why := _obstacle(VARIANTS[name], precision, device, explicit=name in spec.variants):
                    yield Left(name, why)
                elif why is None:
                    cases += [Case(spec, net, precision, name, n, device) for n in _samples(VARIANTS[name], spec)]
            yield from _measure(cases)


def _samples(variant: Variant, spec: Bench) -> tuple[int, ...] | tuple[None]:
    if variant.method != "warpi":
        return (None,)
    return spec.samples if variant.samples is None else (variant.samples,)


def _obstacle(variant: Variant, precision: str, device: torch.device, explicit: bool) -> str | None:
    """Why a variant cannot be measured here; "" where nobody asked for it by name."""
    if variant.recipe.get("meta_gradient") == "difference" and precision != "32":
        return "a finite difference drowns in the rounding of bf16"
    if variant.captured and device.type != "cuda":
        return "CUDA graphs need a CUDA device" if explicit else ""
    try:
        if variant.way:
            WAYS[variant.way].check()
    except UserError as e:
        return str(e)
    return None


@dataclass(frozen=True)
class Case:
    """A variant under given circumstances."""

    spec: Bench
    net: str
    precision: str
    name: str
    samples: int | None
    device: torch.device

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.name]

    def start(self, dtype: torch.dtype = torch.float32) -> Method:
        """A started method on data of its own, the same for all cases of a network."""
        v, spec = self.variant, self.spec
        options: dict[str, Any] = {} if self.samples is None else {"samples": self.samples}
        method = Peer(**options, way=v.way) if v.way else make_method(v.method, **options)
        recipe = Recipe(
            net=self.net,
            batch_size=spec.batch,
            meta_batch_size=spec.batch,
            lr=0.1,
            schedule="constant",
            **{"precision": self.precision, "compile": v.fast, **v.recipe},
        )
        method.start(random_task(spec.batch, spec.classes, spec.image_size, self.device, dtype), recipe)
        return method


def random_task(
    batch: int, classes: int, size: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Task:
    """Images of random bytes with random labels, cropped out of a border of 4 pixels and mirrored, as CIFAR's are."""
    chance = generator(0, "bench")
    n = batch * min(100, max(4, 2**26 // (3 * size**2 * batch)))  # of each kind; 64 MiB or 4 batches
    x = torch.randint(256, (2 * n, 3, size, size), generator=chance, dtype=torch.uint8)
    y = torch.randint(classes, (2 * n,), generator=chance)
    scale = Scale(torch.tensor(127.5, dtype=dtype), torch.tensor(74.0, dtype=dtype))
    examples = TensorExamples(x, scale, Crop(size, pad=min(4, size - 1))).to(device)
    train, meta = (Split(examples, rows, y[rows].to(device)) for rows in torch.arange(2 * n).chunk(2))
    return Task(train, meta, None, tuple(map(str, range(classes))))


@contextmanager
def stepper(method: Method, capture: bool) -> Iterator[tuple[Callable[[], object], Callable[[], bool]]]:
    """One whole training step a call, as the engine does it; and whether it is a CUDA graph by now."""
    at = TrainingState()

    def steps() -> Iterator[None]:
        for t in itertools.count():
            for log in method.epoch(t):
                at.add(log)
                yield None

    endless = steps()
    if not capture:
        yield lambda: next(endless), lambda: False
        return
    with graph_steps(method) as step:
        yield lambda: next(endless), lambda: step is not None and step.why is None


class Running:
    """A case that is ready to be measured."""

    def __init__(self, case: Case) -> None:
        self.case, self.times, self.device = case, list[float](), case.device
        self.on_gpu = case.device.type == "cuda"
        self.period = int(case.variant.recipe.get("meta_every", 1))  # steps are alike after that many
        exact = None if case.samples is None else exact_gradient(case.spec, case.net, case.samples, case.device)
        _free(self.device)
        left = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0  # by others, such as compiled code
        self.method = case.start()
        self.before = left + _nbytes(self.method.task)
        began = time.perf_counter()
        gradient = first_step(self.method)
        self.error = None if gradient is None or exact is None else float((gradient - exact).norm() / exact.norm())
        self.stack = ExitStack()
        capture = case.variant.fast or case.variant.captured
        self.step, is_captured = self.stack.enter_context(stepper(self.method, capture))
        for _ in range(5 * self.period):  # of each kind three plain ones, one that is recorded, one more
            self.step()
        self._wait()
        self.first, self.captured = time.perf_counter() - began, is_captured()
        # on a GPU about 0.1 s a measurement, since the queue has to fill
        self.n = self.period * (math.ceil(100 / (self._time(self.period) * self.period)) if self.on_gpu else 1)

    def measure(self) -> None:
        self.times.append(self._time(self.n))

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _time(self, n: int) -> float:
        """Milliseconds a step, over n of them."""
        if not self.on_gpu:
            began = time.perf_counter()
            for _ in range(n):
                self.step()
            return 1000 * (time.perf_counter() - began) / n
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(n):
            self.step()
        torch.cuda.synchronize(self.device)  # all streams: a captured step may have its own
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / n

    def peak(self) -> float | None:
        """The most memory a step holds: weights, optimizers and activations, not the data set. MiB.

        Of an eager step, also where a graph is measured: the memory of a graph counts as free while it is replayed.
        """
        if not self.on_gpu:
            return None  # nobody counts it there
        self.stack.close()
        for optimizer in (v for v in vars(self.method).values() if isinstance(v, torch.optim.Optimizer)):
            optimizer.zero_grad()  # gradients may lie in the memory of the graph
        self.method.optimizer.zero_grad()
        _free(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(self.period):
            self.method.step(self.method.loader.draw())
        self._wait()
        return (torch.cuda.max_memory_allocated(self.device) - self.before) / 2**20


def _measure(cases: Sequence[Case]) -> Iterator[Row | Left]:
    """On a CPU in turns, so that a noisy neighbour troubles all alike; on a GPU one after the other, for the memory."""
    plain: float | None = None
    for group in [[case] for case in cases] if cases[0].device.type == "cuda" else [cases]:
        for row in _in_turns(group):
            if isinstance(row, Left):
                yield row
                continue
            plain = row["ms"] if row["variant"] == "sgd" else plain
            yield row | {"ratio_to_sgd": plain and row["ms"] / plain}


def _in_turns(cases: Sequence[Case]) -> Iterator[Row | Left]:
    runs = list[Running]()
    for case in cases:
        try:
            run = Running(case)
        except torch.OutOfMemoryError as e:
            yield Left(case.name, f"out of memory: {str(e).splitlines()[0]}")
            continue
        if case.variant.captured and not run.captured:
            run.stack.close()
            yield Left(case.name, "its step cannot be captured")
        else:
            runs.append(run)
    for _ in range(cases[0].spec.repeats):
        for run in runs:
            run.measure()
    for run in runs:
        yield _row(run)
        run.stack.close()


def _row(run: Running) -> Row:
    case, way = run.case, run.case.variant.way
    how = run.method.recipe.pass_config(case.device)
    return {
        "net": case.net,
        "precision": case.precision,
        "variant": case.name,
        "samples": case.samples,
        "ms": statistics.median(run.times),
        "peak_mib": run.peak(),
        "ratio_to_sgd": None,
        "gradient_error": run.error,
        "ms_min": min(run.times),
        "ms_max": max(run.times),
        "repeats": len(run.times),
        "steps": run.n,
        "batch": case.spec.batch,
        "classes": case.spec.classes,
        "image_size": case.spec.image_size,
        "compile": how.compile,
        "captured": run.captured,
        "compile_s": run.first if how.compile or run.captured else None,
        "summary": case.variant.summary,
        "library": WAYS[way].version if way else None,
        "device": case.device.type,
        "gpu": torch.cuda.get_device_name(case.device) if run.on_gpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


@cache
def exact_gradient(spec: Bench, net: str, samples: int, device: torch.device) -> Tensor | None:
    """What `first_step` should give: by double backward in float64. None where that needs too much memory."""
    method = Case(spec, net, "32", "double_backward_autograd", samples, device).start(torch.float64)
    for module in (method.net, *(v for v in vars(method).values() if isinstance(v, nn.Module))):
        module.double()
    try:
        return first_step(method)
    except torch.OutOfMemoryError:
        return None


def first_step(method: Method) -> Tensor | None:
    """Do the first step; the gradient by which it moves the meta-network of WarPI, as one vector in float64.

    Its noise is the same whatever the precision, and for all examples of the batch, however that is cut.
    """
    if not isinstance(method, WarPI):
        method.step(method.loader.draw())
        return None
    shape = max(method.samples, 1), 1, method.task.n_classes
    eps = torch.randn(shape, generator=generator(0, "noise"), dtype=torch.float64) * bool(method.samples)

    def rectify(z: Tensor, y: Tensor) -> Tensor:
        q = method.V(z.detach(), y)
        return OUTPUTS[method.output](q.mean + q.std * eps.to(q.mean))

    seen = list[Tensor]()

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads = (torch.zeros_like(p) if p.grad is None else p.grad for g in optimizer.param_groups for p in g["params"])
        seen.append(torch.cat([d.detach().double().flatten() for d in grads]))

    hook = method.meta_optimizer.register_step_pre_hook(look)
    method.rectify = rectify  # type: ignore[method-assign]
    try:
        method.step(method.loader.draw())
    finally:
        del method.rectify
        hook.remove()
    return seen[0]


@contextmanager
def _set_up(threads: int | None) -> Iterator[None]:
    """The same for all, as the engine has it; afterwards as it was."""
    before, trying = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(before if threads is None else threads)
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.benchmark = trying


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _nbytes(task: Task) -> int:
    """Memory of the examples, which splits share."""
    examples = task.train.examples
    assert isinstance(examples, TensorExamples)
    return examples.x.nbytes
