"""Passes that are traced, split into micro-batches, checkpointed or in bf16, compared with plain passes."""

import copy
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_bilevel import DEVICES, EXACT, NETS, TWICE, K, Residual, Setting, assert_same, perceptron
from torch import Tensor, nn

from warpi.autodiff import checked_trace, passes
from warpi.autodiff.passes import PassConfig, configure_passes, forward, forward_at, moved_names
from warpi.autodiff.trace import trace, trace_whole
from warpi.autodiff.trace_parts import Point, cut_trace
from warpi.errors import UserError
from warpi.nets.preact_resnet import stage
from warpi.nets.resnet import ResNet, _BasicBlock, conv
from warpi.training.bilevel import meta_gradient
from warpi.training.recipe import Recipe
from warpi.utils.seeding import seeded

TRACED = PassConfig(compile=True)
CONFIGS = {
    "traced": PassConfig(compile=True),
    "lean": PassConfig(compile=True, lean=True),
    "checkpointed": PassConfig(compile=True, checkpointing=True),
    "in parts": PassConfig(accumulate=3),
    "traced, in parts": PassConfig(compile=True, accumulate=3),
}
REPEATED = ("resnet32", "preact", "preact18", "dropout of channels", "attention, dropout", "weight norm, dropout")
REPEATED += ("spectral norm, dropout", "functional dropout", "attention", "lstm", "tied", "unused")
"""Networks whose operators also occur in smaller ones or in `test_a_traced_step_equals_the_plain_step`."""


def find_trace(net: nn.Module) -> passes.Passes:
    (trace,) = passes._traces[net].values()
    assert trace is not None
    return trace


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in NETS])
def test_a_traced_pass_gives_the_exact_gradient(net: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    passes._warn_once.cache_clear()
    s = Setting(net, "warpi", device)
    with seeded(3):
        wanted_value, wanted = s.reference_gradient()
    configure_passes(s.net, TRACED)
    with caplog.at_level(logging.WARNING), seeded(3):
        value, grads = s.gradient()
    draws_the_same = net != "numpy" and ("dropout" not in net or device == "cpu")  # fused kernels draw other masks
    if draws_the_same:
        assert value.item() == pytest.approx(wanted_value.item(), rel=EXACT)
        assert_same(grads, wanted)
    if net == "linear":  # its passes are written out
        assert s.net not in passes._traces
        return
    refused = all(trace is None for trace in passes._traces[s.net].values())
    assert any("cannot be traced" in r.getMessage() for r in caplog.records) == refused
    if device == "cpu" or net not in ("lstm", "attention, dropout"):  # they have other kernels on a GPU
        assert refused == (net in TWICE)


@pytest.mark.parametrize(
    ("config", "net"),
    [
        *(("traced", net) for net in ("residual", "dropout", "tied", "unused")),
        *((config, net) for config in ("lean", "checkpointed") for net in ("preact", "dropout")),
        *(pytest.param(c, "preact18", marks=pytest.mark.slow) for c in ("traced", "lean", "checkpointed")),
    ],
)
def test_a_traced_step_equals_the_plain_step(net: str, config: str) -> None:
    """Logits, gradients of the weights, running statistics and the global generator are the same."""
    plain, other = Setting(net, "warpi"), Setting(net, "warpi")
    configure_passes(other.net, CONFIGS[config])
    with seeded(1):
        forward(other.net, other.x)  # traces the network
    for p, q in zip(plain.net.buffers(), other.net.buffers(), strict=True):
        q.copy_(p)
    for s in (plain, other):
        with seeded(7):
            s.loss(s.net(s.x)).backward()
            s.drawn = torch.rand(3)
    assert torch.equal(plain.drawn, other.drawn)
    for (name, p), q in zip(plain.net.state_dict().items(), other.net.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=name)
    for p, q in zip(plain.net.parameters(), other.net.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None or not q.grad.any()
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)


class InParts(nn.Module):
    """The reference for a pass in parts: BatchNorm normalizes each part separately."""

    def __init__(self, net: nn.Module, n: int) -> None:
        super().__init__()
        self.net = net
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(part) for part in x.chunk(self.n)])


@pytest.mark.parametrize("net", ["mlp", "dropout", "weight norm"])
@pytest.mark.parametrize("config", ["in parts", "traced, in parts"])
def test_in_parts(net: str, config: str) -> None:
    """The meta gradient and the real step equal those of a network that gets the batch in parts."""
    s, other = Setting(net, "warpi"), Setting(net, "warpi")
    s.net = InParts(s.net, 3)
    configure_passes(other.net, CONFIGS[config])
    results = []
    for setting in (s, other):
        with seeded(3):
            noisy = forward(setting.net, setting.x)
            value = meta_gradient(noisy, setting.loss, setting.x_meta, setting.meta_loss, setting.phi, 0.3)
            setting.loss(noisy.z).backward()
        grads = [p.grad for p in setting.net.parameters()]
        results.append([value, *(p.grad for p in setting.phi), *grads, *setting.net.buffers()])
    assert_same([r.double() for r in results[1]], [r.double() for r in results[0]], 1e-11)


def test_a_batch_too_small_for_its_parts_raises() -> None:
    net = configure_passes(perceptron(5, 8, K), PassConfig(accumulate=4))
    assert net(torch.randn(9, 5)).shape == (9, K)  # parts may have different sizes
    with pytest.raises(UserError, match="batch of 7 cannot be cut into 4"):
        net(torch.zeros(7, 5))


class Remembering(nn.Module):
    """Reads a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, K)
        self.mean = nn.Buffer(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        z: Tensor = self.fc(x - self.mean)
        return z


def test_parts_that_cannot_be_repeated_raise() -> None:
    net = configure_passes(Remembering(), PassConfig(accumulate=2))
    with pytest.raises(UserError, match="cannot pass through Remembering in parts"):
        net(torch.randn(8, 5)).sum().backward()


# --- depth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True])
def test_only_the_last_children_move(compile: bool) -> None:
    """The gradient equals that of a network whose first children are frozen."""
    s, frozen = Setting("residual", "warpi"), Setting("residual", "warpi")
    configure_passes(s.net, PassConfig(depth=2, compile=compile))
    names = moved_names(s.net)
    assert {name.split(".")[0] for name in names} == {"shortcut", "fc"}
    for name, p in frozen.net.named_parameters():
        p.requires_grad_(name in names)
    value, got = s.gradient()
    wanted_value, wanted = frozen.reference_gradient()
    assert value.item() == pytest.approx(wanted_value.item(), rel=EXACT)
    assert_same(got, wanted)
    assert len(forward(s.net, s.x).done.vjp(torch.ones(6, K).double())) == len(list(s.net.parameters()))


def test_a_depth_without_weights_raises() -> None:
    net = nn.Sequential(nn.Linear(5, K), nn.Linear(K, K).requires_grad_(False))
    with pytest.raises(UserError, match="last 1 children of Sequential have no weights"):
        moved_names(configure_passes(net, PassConfig(depth=1)))


# --- finite difference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True])
def test_a_finite_difference_is_close(compile: bool) -> None:
    s = Setting("residual", "warpi")
    _, wanted = s.reference_gradient()
    configure_passes(s.net, PassConfig(difference=True, compile=compile))
    _, got = s.gradient()
    assert_same(got, wanted, 0.1)
    with pytest.raises(AssertionError):
        assert_same(got, wanted, 1e-9)  # it is not the exact product


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(UserError, match="--meta-gradient difference needs --precision 32"):
        Recipe(precision="bf16", meta_gradient="difference")
    with pytest.raises(UserError, match="requires --compile"):
        Recipe(checkpointing=True)


# --- bf16 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "compile"),
    [
        ("train", False),
        ("train", True),
        ("frozen statistics", False),
        pytest.param("frozen statistics", True, marks=pytest.mark.slow),
    ],
)
def test_bf16(compile: bool, mode: str) -> None:
    """Weights, logits and gradients are float32, and the meta gradient has almost the direction of the exact one."""
    s = Setting("residual", "warpi", batch=64)
    s.net = s.net.float()
    s.V = s.V.float()
    s.x = s.x.float()
    s.x_meta = s.x_meta.float()
    if mode != "train":
        for module in s.net.modules():
            module.training = not isinstance(module, nn.BatchNorm2d)
    _, exact = s.reference_gradient()
    configure_passes(s.net, PassConfig(bf16=True, compile=compile))
    noisy = forward(s.net, s.x)
    assert noisy.z.dtype == torch.float32
    _, grads = s.gradient()
    a, b = torch.cat([g.flatten() for g in grads]), torch.cat([g.flatten() for g in exact])
    assert F.cosine_similarity(a, b, dim=0) > 0.9
    assert {p.dtype for p in s.net.parameters()} == {torch.float32}
    with torch.no_grad():
        assert s.net.eval()(s.x).dtype == torch.float32
    if compile:
        assert all(trace is not None for trace in passes._traces[s.net].values())


@pytest.mark.parametrize("config", ["traced", "lean", "checkpointed"])
def test_bf16_traced_batchnorm_without_weights(config: str) -> None:
    """Its kernel then returns statistics with another dtype than the trace assumes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, K))
    net, x = configure_passes(copy.deepcopy(plain), replace(CONFIGS[config], bf16=True)), torch.randn(16, 5)
    g = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    wanted, got = forward(plain, x).done.jvp(g), forward(net, x).done.jvp(g)
    assert F.cosine_similarity(wanted.flatten(), got.flatten(), dim=0) > 0.99
    find_trace(net)


# --- tracing ----------------------------------------------------------------------------------------------------------


def test_the_pass_is_not_repeated() -> None:
    """The graphs of the two products contain no operator of the pass: 3 n - 1 convolutions in all, not 5 n - 1."""
    net = configure_passes(ResNet(3, K, _BasicBlock, (1, 1), 4), TRACED)
    n = sum(isinstance(m, nn.Conv2d) for m in net.modules())
    forward(net, torch.randn(4, 3, 8, 8))
    trace = find_trace(net)

    def count(part: passes.Any) -> int:
        return sum("convolution.default" in str(node.target) for node in part.module.graph.nodes)

    # x has no tangent, so the first layer needs one convolution in J g, the others two.
    assert (count(trace.pass_), count(trace.vjp), count(trace.jvp)) == (n, 0, 2 * n - 1)
    assert not [node for node in trace.jvp.module.graph.nodes if "batch_norm" in str(node.target)]


def test_lean_and_checkpointed_passes_store_less() -> None:
    net = nn.Sequential(conv(3, 8, 3), stage(8, 8, 2, 1), nn.Flatten(), nn.Linear(2048, K))
    theta, fixed = dict(net.named_parameters()), dict(net.named_buffers())
    whole = trace_whole(net, torch.randn(8, 3, 16, 16), theta, fixed, K, list(theta))

    def stored(**options: bool) -> int:
        outputs = cut_trace(
            whole, list(theta), list(fixed), list(theta), **{"lean": False, "checkpointing": False, **options}
        ).pass_.outputs
        return sum(node.meta["val"].numel() for node in outputs if node is not None and node.op != "placeholder")

    traced = stored()
    assert stored(lean=True) < 0.75 * traced
    assert stored(checkpointing=True) < 0.5 * traced


class Fickle(nn.Module):
    """Its python code acts differently in every call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(5, K)
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(x)
        if self.kind == "python":
            return z * (1 + random.random())
        if self.kind == "counts":
            self.calls += 1
            return z * self.calls
        return z if z.sum() > 0 else 2 * z


@pytest.mark.parametrize(("kind", "why"), [("python", "generators"), ("counts", "numbers"), ("values", "")])
def test_networks_that_change_are_not_traced(kind: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    passes._warn_once.cache_clear()
    net = configure_passes(Fickle(kind), TRACED)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            net(torch.randn(4, 5))
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("Fickle cannot be traced (")
    assert why in message
    assert nn.Linear(5, 4)(torch.randn(2, 5)).requires_grad  # the failure has not changed the state of torch


def block(kind: str) -> nn.Module:
    """In-place operators, which overwrite what the backward pass needs; statistics that do not reach the logits."""
    if kind == "silu":
        body: list[nn.Module] = [
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(inplace=True),
            nn.Conv2d(8, 8, 3),
        ]
        return nn.Sequential(*body, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(128, K))
    if kind == "gru":
        return Gru()
    return Slices()


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(24, 6, batch_first=True)
        self.fc = nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.body(x.flatten(2))[0][:, -1])
        return z


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 16)
        self.fc = nn.Linear(16, K)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x.flatten(1))
        h[:, 0].mul_(1.2)
        z: Tensor = self.fc(h.tanh())
        return z


@pytest.mark.parametrize(
    ("config", "kind"),
    [("traced", "silu"), ("lean", "silu"), ("checkpointed", "silu"), ("traced", "gru"), ("traced", "slices")],
)
def test_in_place_operators(kind: str, config: str) -> None:
    with seeded(0):
        net, x = block(kind).double(), torch.randn(6, 3, 8, 8).double()
        if kind == "gru":
            x = x.view(6, 8, 24)[:, :2]
        u = torch.randn(6, K).double()
        g = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    plain = forward(net, x).done
    wanted = [*plain.vjp(u), plain.jvp(g)]
    done = forward(configure_passes(net, CONFIGS[config]), x).done
    assert_same([*done.vjp(u), done.jvp(g), *done.vjp(u)], [*wanted, *wanted[:-1]])


class Constant(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.fc = nn.Linear(5, K)
        self.k = scale * torch.arange(1.0, K + 1)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(x) * self.k
        return z


def test_constant_tensors_of_a_network() -> None:
    x = torch.randn(4, 5)
    for scale in (1.0, 2.0):
        net = configure_passes(Constant(scale), TRACED)
        assert_same([net(x).detach()], [(net.fc(x) * net.k).detach()], 1e-6)
        assert find_trace(net)


def test_equal_networks_share_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    x, traced = torch.randn(4, 5), []
    monkeypatch.setattr(checked_trace, "_cache", OrderedDict())
    monkeypatch.setattr(checked_trace, "trace", lambda *a, **k: traced.append(1) or trace(*a, **k))
    for wanted in (1, 1, 2):  # the third has other shapes
        layers = nn.Linear(5, 8 * wanted), nn.Tanh(), nn.Linear(8 * wanted, K)
        net = configure_passes(nn.Sequential(*layers), TRACED)
        assert_same([net(x).detach()], [layers[2](layers[1](layers[0](x))).detach()], 1e-6)
        assert len(traced) == wanted


class Either(nn.Module):
    """Applies one of two functions, which its description does not show."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(5, K)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.fc(x))


def test_networks_that_only_look_equal_do_not_share_a_trace() -> None:
    x = torch.randn(4, 5)
    for what in (torch.tanh, torch.sigmoid, torch.tanh):
        net = configure_passes(Either(what), TRACED)
        assert_same([net(x).detach()], [what(net.fc(x)).detach()], 1e-6)
        assert find_trace(net)


class Bounded(nn.Module):
    """Has bounds that the first batch does not reach."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.fc = nn.Linear(5, K)
        self.bounds = (low, high)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).clamp(*self.bounds)


def test_values_that_do_not_affect_the_first_batch_count() -> None:
    x = torch.randn(4, 5)
    for bound in (100.0, 10.0):
        net = configure_passes(Bounded(-bound, bound), TRACED)
        net(x)
        with torch.no_grad():
            net.fc.weight.mul_(50)
        assert_same([net(x).detach()], [net.fc(x).clamp(-bound, bound).detach()], 1e-6)


def test_a_trace_that_gives_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotANumber(Point):
        def jvp(self, g: Mapping[str, Tensor]) -> Tensor:
            return super().jvp(g) * torch.nan

    monkeypatch.setattr(checked_trace, "Point", NotANumber)
    net = configure_passes(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, K)), TRACED)
    net(torch.randn(4, 5))
    assert list(passes._traces[net].values()) == [None]


def test_numbers_that_change_later_count() -> None:
    net = configure_passes(nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.1), nn.Linear(8, K)), TRACED)
    x = torch.randn(4, 5)
    before = net(x)
    net[1].negative_slope = 0.9  # type: ignore[index]
    assert not torch.equal(net(x), before)


def test_a_difference_needs_the_same_masks() -> None:
    s = Setting("dropout", "warpi")
    with seeded(3):
        _, wanted = s.reference_gradient()
    configure_passes(s.net, PassConfig(compile=True, difference=True))
    with seeded(3):
        _, got = s.gradient()
    assert_same(got, wanted, 0.1)


def test_a_configured_network_behaves_like_the_original(tmp_path: Path) -> None:
    net = configure_passes(Residual(), PassConfig(bf16=True, compile=True))
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    (d,) = torch.autograd.grad(net(x).sum(), x)  # inputs also have gradients
    assert d.abs().sum() > 0
    torch.save(net, tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    assert type(loaded).__name__ == "Residual"
    assert passes.pass_config(loaded) == PassConfig(bf16=True, compile=True)
    (g,) = torch.autograd.grad(net(x.detach()).sum(), [net.fc.weight], create_graph=True)
    with pytest.raises(RuntimeError):  # instead of a silent zero
        torch.autograd.grad(g.sum(), [net.fc.weight])


def test_each_shape_has_its_trace() -> None:
    net = configure_passes(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, K)), TRACED)
    for n in (4, 6, 4):
        assert net(torch.randn(n, 5)).shape == (n, K)
    assert len(passes._traces[net]) == 2


def test_too_many_shapes_run_plainly_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    passes._warn_once.cache_clear()
    net = configure_passes(nn.Linear(5, K), TRACED)
    with caplog.at_level(logging.WARNING):
        for n in range(2, 14):
            assert net(torch.randn(n, 5)).shape == (n, K)
    (message,) = [r.getMessage() for r in caplog.records]
    assert "too many shapes" in message


def test_a_copy_of_a_configured_network_is_independent() -> None:
    net = configure_passes(Residual(), TRACED)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    x = torch.randn(4, 3, 8, 8)
    assert net(x).abs().sum() > 0
    assert other(x).abs().sum() == 0
    assert isinstance(net, Residual)
    assert list(net.state_dict()) == list(Residual().state_dict())


def test_a_pass_with_other_parameters_changes_nothing() -> None:
    for config in (CONFIGS["traced"], CONFIGS["in parts"]):
        s = Setting("mlp", "warpi")
        before = {name: t.clone() for name, t in s.net.state_dict().items()}
        configure_passes(s.net, config)
        done = forward_at(s.net, {name: p + 1 for name, p in s.net.named_parameters()}, s.x)
        assert any(d.abs().sum() > 0 for d in done.vjp(torch.ones_like(done.z)))
        assert all(torch.equal(before[name], t) for name, t in s.net.state_dict().items())
        assert all(p.grad is None for p in s.net.parameters())


@pytest.mark.parametrize("config", [PassConfig(), *CONFIGS.values()], ids=["plain", *CONFIGS])
def test_jvp_after_the_weights_have_changed(config: PassConfig) -> None:
    """With a snapshot, the Jacobian is that of the pass, whatever happens to the weights later."""
    s = Setting("mlp", "warpi")
    configure_passes(s.net, config)
    g = {name: torch.randn_like(p) for name, p in s.net.named_parameters()}
    wanted = forward(s.net, s.x).done.jvp(g)
    noisy = forward(s.net, s.x, snapshot=True)
    with torch.no_grad():
        for p in s.net.parameters():
            p.mul_(1.1)
    assert_same([noisy.done.jvp(g)], [wanted])
