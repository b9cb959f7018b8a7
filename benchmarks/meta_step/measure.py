"""Measure a training step of WarPI, of plain SGD, and of other implementations of WarPI's step.

All variants of a network and a precision start from the same weights and get the same batches of random images. A step
is everything that the engine does: gathering and augmenting both batches, all passes, both optimizers.
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

from benchmarks.meta_step.other_implementations import IMPLEMENTATIONS, ReferenceWarPI
from warpi.data.augment import Crop
from warpi.data.examples import Scale, TensorExamples
from warpi.data.split import Split
from warpi.errors import UserError, unknown
from warpi.functional.gaussian import DiagGaussian
from warpi.methods.registry import make_method
from warpi.methods.warpi import OUTPUTS, WarPI
from warpi.nets.registry import NETS
from warpi.training.cuda_graph import graph_steps
from warpi.training.engine import TrainingState
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.devices import pick_device
from warpi.utils.seeding import generator, seeded
from warpi.utils.settings import check_types, setting

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """What is measured. The flags of the command are these fields."""

    net: tuple[str, ...] = setting(("resnet32",), "names of `warpi list nets`")
    batch: int = setting(100, "number of noisy examples per step, and of trusted ones", low=2)
    precision: tuple[str, ...] = setting(("32",), "32, bf16 or both")
    variants: tuple[str, ...] = setting((), "names, or all (default: sgd, warpi and its other implementations)")
    samples: tuple[int, ...] = setting((10,), "Monte-Carlo samples of WarPI")
    classes: int = setting(10, "number of classes of the random images", low=2)
    image_size: int = setting(32, "width and height of the random images in pixels", low=1)
    device: str = setting("auto", "device to measure on: auto, cpu or cuda")
    threads: int | None = setting(None, "number of CPU threads", low=1)
    repeats: int = setting(20, "number of measurements, of which the median is reported", low=1)

    def __post_init__(self) -> None:
        check_types(self)
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
    implementation: str | None = None  # replaces the step of the method
    recipe: Mapping[str, Any] = {}
    samples: int | None = None  # replaces the requested numbers
    fast: bool = True  # on a GPU: compiled, and recorded as a CUDA graph
    captured: bool = False  # recorded as a CUDA graph, but not compiled


VARIANTS: Mapping[str, Variant] = {
    "sgd": Variant("plain training: cross-entropy, SGD", "ce"),
    "sgd_eager": Variant("plain training, operator by operator", "ce", fast=False),
    "mwnet": Variant("Meta-Weight-Net, exact", "mwnet"),
    "warpi": Variant("WarPI, exact"),
    "warpi_eager": Variant("WarPI, exact, operator by operator", fast=False),
    "warpi_samples1": Variant("WarPI, one sample", samples=1),
    "warpi_samples100": Variant("WarPI, a hundred samples", samples=100),
    "warpi_difference": Variant("J g by a finite difference", recipe={"meta_gradient": "difference"}),
    "warpi_depth2": Variant("a virtual step of the last two modules only", recipe={"meta_depth": 2}),
    "warpi_every2": Variant("a meta step every 2 steps", recipe={"meta_every": 2}),
    "warpi_every5": Variant("a meta step every 5 steps", recipe={"meta_every": 5}),
    "warpi_real": Variant("the real step as the virtual one", recipe={"meta_order": "real"}),
    "warpi_checkpointing": Variant("fewer activations kept", recipe={"checkpointing": True, "compile": True}),
    "warpi_accumulate2": Variant("the batch in two parts", recipe={"accumulate": 2}),
    "double_backward": Variant("torch.func.grad of torch.func.grad", implementation="double_backward", fast=False),
    "double_backward_autograd": Variant(
        "autograd, create_graph", implementation="double_backward_autograd", fast=False
    ),
    "double_backward_graph": Variant(
        "autograd, recorded as one CUDA graph", implementation="double_backward_autograd", fast=False, captured=True
    ),
    "double_backward_shared": Variant(
        "autograd, the first pass shared with the real step", implementation="double_backward_shared", fast=False
    ),
    "published": Variant("a new network every step, as published", implementation="published", fast=False),
    "higher": Variant("with the library higher", implementation="higher", fast=False),
    "torchopt": Variant("with the library torchopt", implementation="torchopt", fast=False),
    "betty": Variant("with the library betty (finite difference)", implementation="betty", fast=False),
}
_DEFAULT = ("sgd", "warpi", *(name for name, v in VARIANTS.items() if v.implementation))


class Skipped(NamedTuple):
    """A variant that was not measured, and the reason."""

    variant: str
    reason: str


def measure(spec: Measurement) -> Iterator[Row | Skipped]:
    """Yield one row per network, precision and variant, as soon as it is known. `sgd` is always measured."""
    device = pick_device(spec.device)
    asked = spec.variants or _DEFAULT
    names = dict.fromkeys(("sgd", *(VARIANTS if "all" in asked else asked)))
    with seeded(0), _set_up(spec.threads):
        for net, precision in itertools.product(spec.net, spec.precision):
            cases = list[Case]()
            for name in names:
                if reason := _obstacle(VARIANTS[name], precision, device, explicit=name in spec.variants):
                    yield Skipped(name, reason)
                elif reason is None:
                    cases += [Case(spec, net, precision, name, n, device) for n in _samples(VARIANTS[name], spec)]
            yield from _measure(cases)


def _samples(variant: Variant, spec: Measurement) -> tuple[int, ...] | tuple[None]:
    if variant.method != "warpi":
        return (None,)
    return spec.samples if variant.samples is None else (variant.samples,)


def _obstacle(variant: Variant, precision: str, device: torch.device, explicit: bool) -> str | None:
    """The reason why a variant cannot be measured here, None if it can; "" if it was not requested by name."""
    if variant.recipe.get("meta_gradient") == "difference" and precision != "32":
        return "the rounding of bf16 is larger than a finite difference"
    if variant.captured and device.type != "cuda":
        return "CUDA graphs need a CUDA device" if explicit else ""
    try:
        if variant.implementation:
            IMPLEMENTATIONS[variant.implementation].check()
    except UserError as e:
        return str(e)
    return None


@dataclass(frozen=True)
class Case:
    """A variant with a network, a precision, a device and a number of samples."""

    spec: Measurement
    net: str
    precision: str
    name: str
    samples: int | None
    device: torch.device

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.name]

    def start(self, dtype: torch.dtype = torch.float32) -> Method:
        """Start the method on random data, which is the same for all cases of a network."""
        v, spec = self.variant, self.spec
        options: dict[str, Any] = {} if self.samples is None else {"samples": self.samples}
        method = (
            ReferenceWarPI(**options, implementation=v.implementation)
            if v.implementation
            else make_method(v.method, **options)
        )
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
    """Random images with random labels, with the crops and flips of CIFAR."""
    rng = generator(0, "bench")
    n = batch * min(100, max(4, 2**26 // (3 * size**2 * batch)))  # noisy and trusted examples each: 64 MiB or 4 batches
    x = torch.randint(256, (2 * n, 3, size, size), generator=rng, dtype=torch.uint8)
    y = torch.randint(classes, (2 * n,), generator=rng)
    scale = Scale(torch.tensor(127.5, dtype=dtype), torch.tensor(74.0, dtype=dtype))
    examples = TensorExamples(x, scale, Crop(size, pad=min(4, size - 1))).to(device)
    train, meta = (Split(examples, rows, y[rows].to(device)) for rows in torch.arange(2 * n).chunk(2))
    return Task(train, meta, None, tuple(map(str, range(classes))))


@contextmanager
def stepper(method: Method, capture: bool) -> Iterator[tuple[Callable[[], object], Callable[[], bool]]]:
    """A function that does one training step as the engine does, and one that tells whether it is a CUDA graph."""
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
    """A started case: compiled, warmed up and ready to be measured."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = case.device
        self.times: list[float] = []
        self.on_gpu = case.device.type == "cuda"
        self.period = int(case.variant.recipe.get("meta_every", 1))  # the kinds of steps repeat after this many
        exact = None if case.samples is None else exact_gradient(case.spec, case.net, case.samples, case.device)
        _free(self.device)
        used = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0  # for example by compiled code
        self.method = case.start()
        self.before = used + _nbytes(self.method.task)
        began = time.perf_counter()
        gradient = first_step(self.method)
        self.error = None if gradient is None or exact is None else float((gradient - exact).norm() / exact.norm())
        self.stack = ExitStack()
        capture = case.variant.fast or case.variant.captured
        self.step, is_captured = self.stack.enter_context(stepper(self.method, capture))
        for _ in range(5 * self.period):  # per kind: three plain steps, the recorded one, one more
            self.step()
        self._wait()
        self.first = time.perf_counter() - began
        self.captured = is_captured()
        # On a GPU a measurement takes about 0.1 s, so that the queue fills.
        self.n = self.period * (math.ceil(100 / (self._time(self.period) * self.period)) if self.on_gpu else 1)

    def measure(self) -> None:
        self.times.append(self._time(self.n))

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _time(self, n: int) -> float:
        """Milliseconds per step, over n steps."""
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
        torch.cuda.synchronize(self.device)  # all streams: a recorded step may use another one
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / n

    def peak(self) -> float | None:
        """Peak memory of a step in MiB: weights, optimizers and activations, without the data set.

        It is always that of an eager step, since the memory of a CUDA graph counts as free during a replay.
        """
        if not self.on_gpu:
            return None  # not counted on a CPU
        self.stack.close()
        for optimizer in (v for v in vars(self.method).values() if isinstance(v, torch.optim.Optimizer)):
            optimizer.zero_grad()  # gradients may be in the memory of the graph
        self.method.optimizer.zero_grad()
        _free(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(self.period):
            self.method.step(self.method.loader.draw())
        self._wait()
        return (torch.cuda.max_memory_allocated(self.device) - self.before) / 2**20


def _measure(cases: Sequence[Case]) -> Iterator[Row | Skipped]:
    """On a CPU the cases take turns, so that other load affects all of them; on a GPU they run one after the other."""
    plain: float | None = None
    for group in [[case] for case in cases] if cases[0].device.type == "cuda" else [cases]:
        for row in _in_turns(group):
            if isinstance(row, Skipped):
                yield row
                continue
            plain = row["ms"] if row["variant"] == "sgd" else plain
            yield row | {"ratio_to_sgd": plain and row["ms"] / plain}


def _in_turns(cases: Sequence[Case]) -> Iterator[Row | Skipped]:
    runs = list[Running]()
    for case in cases:
        try:
            run = Running(case)
        except torch.OutOfMemoryError as e:
            yield Skipped(case.name, f"out of memory: {str(e).splitlines()[0]}")
            continue
        if case.variant.captured and not run.captured:
            run.stack.close()
            yield Skipped(case.name, "its step cannot be recorded as a CUDA graph")
        else:
            runs.append(run)
    for _ in range(cases[0].spec.repeats):
        for run in runs:
            run.measure()
    for run in runs:
        yield _row(run)
        run.stack.close()


def _row(run: Running) -> Row:
    case = run.case
    implementation = case.variant.implementation
    config = run.method.recipe.pass_config(case.device)
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
        "compile": config.compile,
        "captured": run.captured,
        "compile_s": run.first if config.compile or run.captured else None,
        "summary": case.variant.summary,
        "library": IMPLEMENTATIONS[implementation].version if implementation else None,
        "device": case.device.type,
        "gpu": torch.cuda.get_device_name(case.device) if run.on_gpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


@cache
def exact_gradient(spec: Measurement, net: str, samples: int, device: torch.device) -> Tensor | None:
    """The gradient of `first_step` by double backward in float64; None if that needs too much memory."""
    method = Case(spec, net, "32", "double_backward_autograd", samples, device).start(torch.float64)
    for module in (method.net, *(v for v in vars(method).values() if isinstance(v, nn.Module))):
        module.double()
    try:
        return first_step(method)
    except torch.OutOfMemoryError:
        return None


def first_step(method: Method) -> Tensor | None:
    """Do the first step and return the meta gradient of WarPI as one vector in float64.

    The noise does not depend on the precision and is the same for all examples, so that micro-batches do not matter.
    """
    if not isinstance(method, WarPI):
        method.step(method.loader.draw())
        return None
    shape = max(method.samples, 1), 1, method.task.n_classes
    eps = torch.randn(shape, generator=generator(0, "noise"), dtype=torch.float64) * bool(method.samples)

    def draw(q: DiagGaussian) -> Tensor:
        return OUTPUTS[method.output](q.mean + q.std * eps.to(q.mean))

    gradients: list[Tensor] = []

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads = (torch.zeros_like(p) if p.grad is None else p.grad for g in optimizer.param_groups for p in g["params"])
        gradients.append(torch.cat([d.detach().double().flatten() for d in grads]))

    hook = method.meta_optimizer.register_step_pre_hook(record)
    method.draw = draw  # type: ignore[method-assign]
    try:
        method.step(method.loader.draw())
    finally:
        del method.draw
        hook.remove()
    return gradients[0]


@contextmanager
def _set_up(threads: int | None) -> Iterator[None]:
    """Set threads and cuDNN as the engine does, and restore them afterwards."""
    before = torch.get_num_threads()
    benchmark = torch.backends.cudnn.benchmark
    torch.set_num_threads(before if threads is None else threads)
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.benchmark = benchmark


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _nbytes(task: Task) -> int:
    """Memory of the examples, which the splits share."""
    examples = task.train.examples
    assert isinstance(examples, TensorExamples)
    return examples.x.nbytes
