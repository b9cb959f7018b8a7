"""Steps as CUDA graphs give the same numbers as plain steps; a step that cannot be a graph runs plainly with a reason.

On a CPU everything except the graph itself takes the same path (`always`).
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_contract import quick
from torch import Tensor, nn

from warpi import METHODS
from warpi.autodiff.memory_format import to_channels_last
from warpi.autodiff.passes import PassConfig, _Traced, configure_passes, forward
from warpi.data.batch import Batch
from warpi.data.loader import Loader, Planned
from warpi.data.split import Split
from warpi.methods.plain import CE, FineTune
from warpi.methods.registry import make_method
from warpi.methods.warpi import WarPI
from warpi.nets.registry import NETS, make_net
from warpi.training.cuda_graph import GraphedMethod, graph_steps
from warpi.training.method import Log, Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth
from warpi.utils.seeding import seeded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPE = Recipe(epochs=4, batch_size=32, meta_batch_size=8, net="mlp")


def started(method: Method, task: Task, device: str, recipe: Recipe = RECIPE) -> Method:
    method = replace(method)
    method.start(task.to(device), recipe)
    return method


def steps(method: Method, n: int) -> list[dict[str, float]]:
    """Logs of the first n steps, in as many epochs as needed."""
    logs: list[dict[str, float]] = []
    for t in range(100):
        for log in method.epoch(t):
            logs.append({name: float(value) for name, value in log.items()})
            if len(logs) == n:
                return logs
    raise AssertionError


def weights(method: Method) -> list[Tensor]:
    nets = [*method.nets, *(v for v in vars(method).values() if isinstance(v, nn.Module))]
    return [t.detach().cpu() for net in nets for t in net.state_dict().values()]


AUGMENTED = ("ce", "warpi", "dividemix", "cleannet")  # one method for each way of drawing batches
STEPPING = [name for name, method in METHODS.items() if method.trains_network]  # the others have no steps to record
SAME = [("digits", name) for name in STEPPING] + [("pictures", name) for name in AUGMENTED]
SAME += [pytest.param("pictures", name, marks=pytest.mark.slow) for name in STEPPING if name not in AUGMENTED]  # type: ignore[misc]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("data", "name"), SAME)
def test_graphed_steps_equal_plain_steps(
    name: str, device: str, data: str, tiny: tuple[Task, Truth], pictures: tuple[Task, Truth]
) -> None:
    """Also across the boundary of two epochs, and with augmented images."""
    (task, _), batch_size, n = (tiny, 32, 8) if data == "digits" else (pictures, 16, 12)
    recipe = replace(RECIPE, batch_size=batch_size)
    plain, other = (started(quick(name), task, device, recipe) for _ in range(2))
    wanted = steps(plain, n)
    with graph_steps(other, always=True) as step:
        assert step is not None
        got = steps(other, n)
        assert step.why is None
        graphs = [s.graph for s in step.steps.values() if s.graph is not None]
        assert graphs
        assert any(graph.graph is not None for graph in graphs) == (device == "cuda")
    for a, b in zip(wanted, got, strict=True):
        assert a == pytest.approx(b, rel=1e-5 if device == "cuda" else 0)
    for p, q in zip(weights(plain), weights(other), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5) if device == "cuda" else torch.testing.assert_close(p, q)
    assert (plain.loader.count, plain.meta_loader.count) == (other.loader.count, other.meta_loader.count)
    assert "step" not in vars(other)
    assert not other.loader.planned


@pytest.mark.parametrize("device", DEVICES)
def test_each_kind_of_step_has_a_graph(device: str, tiny: tuple[Task, Truth]) -> None:
    """Two kinds of steps are two graphs; a new learning rate needs no new graph."""
    recipe = replace(RECIPE, batch_size=16, meta_every=3)
    plain, other = (started(make_method("warpi"), tiny[0], device, recipe) for _ in range(2))
    with graph_steps(other, always=True) as step:
        logs = []
        for method in (plain, other):
            logs.append(steps(method, 11))
            for group in method.optimizer.param_groups:
                group["lr"] = group["lr"].fill_(0.01) if isinstance(group["lr"], Tensor) else 0.01
            logs[-1] += [{k: float(v) for k, v in log.items()} for log in method.epoch(1)]
        assert step is not None
        assert len(step.steps) == (2 if device == "cuda" else 4)  # on a CPU the learning rate is a python number
        assert step.why is None
    assert ["meta_loss" in log for log in logs[0][:7]] == [True, False, False, True, False, False, True]
    for a, b in zip(*logs, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@dataclass
class Counting(CE):
    """Its step changes a python number."""

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.seen = 0

    def step(self, batch: Batch) -> Log:
        self.seen += 1
        return super().step(batch)


@dataclass
class Replacing(CE):
    """Its step replaces a tensor."""

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.memory = [torch.zeros(3, device=task.train.y.device)]

    def step(self, batch: Batch) -> Log:
        self.memory[0] = self.memory[0] + 1
        return super().step(batch)


@dataclass
class Looking(WarPI):
    """Its step branches on a value after drawing random numbers."""

    def step(self, batch: Batch) -> Log:
        log = super().step(batch)
        if float(log["loss"]) > 1e9:
            raise AssertionError
        return log


class Counter(nn.Linear):
    """A network that counts its calls."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.flatten(1)) / self.calls


class Assigning(nn.Linear):
    """A network that replaces a buffer."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x.flatten(1))


@dataclass
class Restless(CE):
    """A number that the step reads changes between steps."""

    def epoch(self, t: int) -> Iterator[Log]:
        for i, batch in enumerate(self.loader.epoch(t)):
            self.weight = 1.0 + i
            yield self.step(batch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("method", "why"),
    [
        (Counting(), "its step changes seen"),
        (Replacing(), "puts a new tensor into memory[0]"),
        (Restless(), "change too often"),
        (Looking(), "cannot be captured"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Method) else "",
)
def test_a_step_that_cannot_be_captured_logs_the_reason(
    method: Method, why: str, device: str, tiny: tuple[Task, Truth], caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(method, Looking) and device == "cpu":
        pytest.skip("needs a graph")
    recipe = replace(RECIPE, batch_size=16)  # eleven steps per epoch
    plain, other = (started(method, tiny[0], device, recipe) for _ in range(2))
    wanted = steps(plain, 12)
    with caplog.at_level(logging.WARNING), graph_steps(other, always=True) as step:
        got = steps(other, 12)
        assert step is not None
        assert why in str(step.why)
    for a, b in zip(wanted, got, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith(
        f"the step of {type(method).__name__} cannot be captured as a CUDA graph and runs kernel by kernel"
    )
    assert other.loader.count == plain.loader.count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("net", "why"), [(Counter(), "changes numbers of nets"), (Assigning(), "buffers of nets")])
def test_networks_that_change_are_not_captured(net: nn.Module, why: str, device: str, tiny: tuple[Task, Truth]) -> None:
    plain, other = (started(CE(), tiny[0], device, replace(RECIPE, net=net)) for _ in range(2))
    wanted = steps(plain, 8)
    with graph_steps(other, always=True) as step:
        got = steps(other, 8)
        assert step is not None
        assert why in str(step.why)
    for a, b in zip(wanted, got, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_a_step_that_reads_files_is_not_captured(tiny: tuple[Task, Truth]) -> None:
    """Its trusted examples are not on the device, so reading them cannot be part of a graph."""

    method = started(make_method("warpi"), tiny[0], "cpu")
    method.meta_loader.__class__ = type("FileLoader", (Loader,), {"resident": False})
    with graph_steps(method, always=True) as step:
        assert step is not None
        logs = steps(method, 6)
        assert step.why == "it reads files"
    assert logs == steps(started(make_method("warpi"), tiny[0], "cpu"), 6)


def test_a_replaced_planned_batch_is_an_ordinary_batch(tiny: tuple[Task, Truth]) -> None:
    loader = Loader(tiny[0].train, 8, 0)
    loader.planned = True
    batch = next(loader.epoch(0))
    other = replace(batch, y=batch.y * 0)
    assert Planned.is_one(batch)
    assert not Planned.is_one(other)
    assert other.y.sum() == 0
    assert torch.equal(other.x, batch.x)


@dataclass
class Relabeling(CE):
    """Passes batches that it creates itself to its step."""

    def epoch(self, t: int) -> Iterator[Log]:
        for batch in self.loader.epoch(t):
            yield self.step(Batch(batch.views, (batch.y + 1) % self.task.n_classes, batch.rows))


@pytest.mark.parametrize("device", DEVICES)
def test_batches_created_by_the_method(device: str, tiny: tuple[Task, Truth]) -> None:
    plain, other = (started(Relabeling(), tiny[0], device) for _ in range(2))
    wanted = steps(plain, 12)
    with graph_steps(other, always=True) as step:
        got = steps(other, 12)
        assert step is not None
        assert any(s.graph is not None for s in step.steps.values())
    for a, b in zip(wanted, got, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_each_loader_has_a_graph(tiny: tuple[Task, Truth]) -> None:
    """Batches of another loader need another graph."""
    method = started(FineTune(share=0.5), tiny[0], "cpu")
    with graph_steps(method, always=True) as step:
        assert step is not None
        for t in range(4):
            list(method.epoch(t))
        assert len(step.steps) == 2
        assert step.why is None


def test_nothing_is_captured_on_a_cpu(tiny: tuple[Task, Truth]) -> None:
    method = started(CE(), tiny[0], "cpu")
    with graph_steps(method) as step:
        assert step is None
        assert "step" not in vars(method)


# --- planned batches --------------------------------------------------------------------------------------------------


def test_planned_batches_equal_ordinary_batches(pictures: tuple[Task, Truth]) -> None:
    split: Split = pictures[0].train
    plain, planned = (Loader(split, 7, 3, views=2) for _ in range(2))
    planned.planned = True

    def drawn(loader: Loader) -> list[Batch]:
        return [loader.draw(), *loader.epoch(0), *loader.epoch(1), loader.draw()]

    for a, b in zip(drawn(plain), drawn(planned), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.rows, b.rows)
        assert torch.equal(a.x, b.x)
    assert plain.count == planned.count


def test_a_planned_batch_is_read_on_first_access(pictures: tuple[Task, Truth], monkeypatch: Any) -> None:
    loader = Loader(pictures[0].train, 7, 3)
    loader.planned = True
    batch = next(loader.epoch(0))
    assert isinstance(batch, Planned)
    reads: list[int] = []
    real: Callable[[int], Batch] = loader.read
    monkeypatch.setattr(loader, "read", lambda k: (reads.append(k), real(k))[1])
    assert not reads
    assert len(batch.y) == 7
    assert len(batch.x) == 7
    assert reads == [0]
    with pytest.raises(AttributeError, match="z"):
        _ = batch.z


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("compile", [False, True])
def test_an_image_network_in_a_graph(precision: str, compile: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Eager or traced and fused passes, graphed or not, are close to the plain step in float32."""
    from benchmarks.meta_step.measure import random_task

    task = random_task(50, 10, 32)
    recipe = Recipe(net="resnet32", batch_size=50, meta_batch_size=50, epochs=1, lr=0.01)
    logs = {}
    for name, settings in {"plain": {}, "fast": {"precision": precision, "compile": compile}}.items():
        method = make_method("warpi")
        method.start(
            task.to("cuda"), replace(recipe, compile=False) if name == "plain" else replace(recipe, **settings)
        )
        if name == "plain":
            logs[name] = steps(method, 8)
        else:
            with graph_steps(method) as step:
                logs[name] = steps(method, 8)
                assert isinstance(step, GraphedMethod)
                assert step.why is None
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    for a, b in zip(logs["plain"], logs["fast"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02 if precision == "32" else 0.1)
        assert a["meta_loss"] == pytest.approx(b["meta_loss"], rel=0.02 if precision == "32" else 0.1)


def run_pass(name: str, config: PassConfig, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """The results of a pass and its products. Weights, images and directions do not depend on config and dtype."""
    with seeded(0):
        net = make_net(name, (3, 32, 32), 10).train()
        x = torch.randn(16, 3, 32, 32).to("cuda", dtype)
        u = torch.randn(16, 10).to("cuda", dtype)
        g = {name: torch.randn_like(p).to("cuda", dtype) for name, p in net.named_parameters()}
    net = configure_passes(to_channels_last(net.to("cuda", dtype)), config)
    forward(net, x).z.logsumexp(1).sum().backward()
    done = forward(net, x).done
    assert isinstance(done, _Traced) == config.compile
    jg, jtu = done.jvp(g), done.vjp(u)
    along_g = sum((a.double() * b.double()).sum() for a, b in zip(jtu, g.values(), strict=True))
    return {
        "z": [done.z.detach().double()],
        "buffers": [b.double() for b in net.buffers()],
        "J g": [jg.double()],
        "gradients": [p.grad.double() for p in net.parameters() if p.grad is not None],
        "<u, J g> - <J^T u, g>": [((u.double() * jg.double()).sum() - along_g) / (u.norm() * jg.norm())],
    }


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("net", [n for n in NETS if n not in ("mlp", "resnet50")])
def test_fused_passes_leave_the_right_statistics(
    net: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compare running statistics, gradients and products of the compiled graphs with plain torch in float64.

    In float64 they are equal. In float32 a few of the 10^7 inputs of ReLUs are within rounding of zero: two correct
    implementations, such as two memory formats of plain torch, differ in their signs, and each changes J g and the
    gradients by about 1e-3. Continuous results must be as close to float64 as those of plain torch, and the two
    products, which share their activations, must be each other's transpose.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    wanted = run_pass(net, PassConfig(), torch.float64)
    exact, fused, plain = (
        run_pass(net, config, dtype)
        for config, dtype in (
            (PassConfig(compile=True), torch.float64),
            (PassConfig(compile=True), torch.float32),
            (PassConfig(), torch.float32),
        )
    )
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]  # all kernels were fused
    for name, tensors in wanted.items():
        for a, b in zip(exact[name], tensors, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm() + 1e-8, name
    for name in ("z", "buffers"):
        error, least = (max(map(relative_error, made[name], wanted[name])) for made in (fused, plain))
        assert error <= 10 * least + 1e-5, name
    for name in ("J g", "gradients"):
        a, b = (torch.cat([t.flatten() for t in made[name]]) for made in (fused, wanted))
        assert relative_error(a, b) <= 0.03, name
    assert abs(fused["<u, J g> - <J^T u, g>"][0]) <= 1e-4
