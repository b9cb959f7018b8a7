"""Compare the one-step meta gradient with double backward and finite differences in float64, alone and in methods."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from warpi.autodiff import passes
from warpi.autodiff.passes import forward
from warpi.data.batch import Batch
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.numeric import make_features
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy, mean_cross_entropy, one_hot, rectified_cross_entropy
from warpi.methods.mwnet import MWNet
from warpi.methods.plain import CE
from warpi.methods.warpi import MetaNet, WarPI
from warpi.nets.linear import LinearHead
from warpi.nets.preact_resnet import PreActResNet18, stage
from warpi.nets.resnet import conv, resnet32
from warpi.training.bilevel import LogitLoss, WithGradient, bilevel_step, meta_gradient
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, make_task
from warpi.utils.seeding import seeded

K, L, LR = 4, 3, 0.3
EXACT = 1e-12  # relative error in float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# --- networks -------------------------------------------------------------------------------------------------------


def perceptron(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(sizes[:-1]):
        layers += [nn.Linear(d_in, d_out), nn.BatchNorm1d(d_out), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def random_head(d: int, k: int) -> LinearHead:
    """A linear head that does not start at zero."""
    net = LinearHead((d,), k)
    nn.init.normal_(net.fc.weight)
    nn.init.normal_(net.fc.bias)
    return net


class Residual(nn.Module):
    """Two blocks, the second with a shortcut convolution; dropout of channels between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bns = nn.ModuleList(nn.BatchNorm2d(c) for c in (4, 4, 6))
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)])
        self.shortcut = nn.Conv2d(4, 6, 1, stride=2)
        self.drop = nn.Dropout2d(dropout)
        self.fc = nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bns[0](self.stem(x)))
        h = self.drop(F.relu(h + self.bns[1](self.convs[0](h))))
        h = F.relu(self.shortcut(h) + self.bns[2](self.convs[1](h)))
        z: Tensor = self.fc(h.mean((2, 3)))
        return z


class FunctionalDropout(nn.Module):
    """Draws random numbers without a dropout module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(5, 8, 8)
        self.fc = nn.Linear(8, K)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(F.dropout(self.body(x), 0.4, self.training))
        return z


class Tied(nn.Module):
    """Uses one weight matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.fc = nn.Linear(5, K)
        self.second.weight = self.first.weight
        self.bn = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.second(self.bn(self.first(x)).tanh()).tanh())
        return z


class Unused(nn.Module):
    """A frozen layer, a parameter that does not reach the logits, and one that reaches them times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 6)
        self.body = perceptron(6, 8, 8)
        self.fc = nn.Linear(8, K)
        self.frozen.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3))
        self.zero = nn.Parameter(torch.ones(K))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.body(self.frozen(x))) + 0 * self.zero
        return z


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True)
        self.bn = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, K)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.bn(self.body(x).mean(1)))
        return z


class Fused(nn.Module):
    """Calls attention as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 12)
        self.fc = nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)  # [B, 1, 3, 4]
        z: Tensor = self.fc(F.scaled_dot_product_attention(q, k, v).mean((1, 2)))
        return z


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(8, 6, batch_first=True)
        self.fc = nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.body(x)[0][:, -1])
        return z


class Numpy(nn.Module):
    """Drops units with numpy's generator, which is not replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(5, 8, 8)
        self.fc = nn.Linear(8, K)
        self.rng = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x)
        z: Tensor = self.fc(h * torch.as_tensor(self.rng.integers(0, 2, h.shape), device=h.device))
        return z


def normed(norm: Callable[[nn.Module], nn.Module], dropout: float) -> nn.Module:
    head = [norm(nn.Linear(5, 8)), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*head, norm(nn.Linear(8, K)))


def preact() -> nn.Module:
    """Two pre-activation blocks: BatchNorm and ReLU at the boundaries, which lean and checkpointed passes recompute."""
    body = [conv(3, 4, 3), stage(4, 4, 1, 1), stage(4, 8, 1, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, K))


FLAT, IMAGE, SEQUENCE = (5,), (3, 8, 8), (3, 8)
NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "mlp": (FLAT, lambda: perceptron(5, 8, 7, K)),
    "linear": (FLAT, lambda: random_head(5, K)),
    "residual": (IMAGE, Residual),
    "resnet32": (IMAGE, lambda: resnet32(IMAGE, K, width=4)),
    "preact": (IMAGE, preact),
    "preact18": (IMAGE, lambda: PreActResNet18(IMAGE, K, width=2)),
    "dropout": (FLAT, lambda: perceptron(5, 8, 7, K, dropout=0.3)),
    "dropout of channels": (IMAGE, lambda: Residual(0.5)),
    "functional dropout": (FLAT, FunctionalDropout),
    "tied": (FLAT, Tied),
    "unused": (FLAT, Unused),
    "attention": (SEQUENCE, Attention),
    "attention, dropout": (SEQUENCE, lambda: Attention(0.3)),
    "fused attention": (SEQUENCE, Fused),
    "lstm": (SEQUENCE, Recurrent),
    "weight norm": (FLAT, lambda: normed(weight_norm, 0.0)),
    "weight norm, dropout": (FLAT, lambda: normed(weight_norm, 0.3)),
    "spectral norm": (FLAT, lambda: normed(spectral_norm, 0.0)),
    "spectral norm, dropout": (FLAT, lambda: normed(spectral_norm, 0.3)),
    "numpy": (FLAT, Numpy),
}
TWICE = [
    "attention, dropout",
    "weight norm",
    "weight norm, dropout",
    "spectral norm",
    "spectral norm, dropout",
    "numpy",
]
"""Networks without forward mode: the graph of the real pass is differentiated twice."""


# --- losses on the logits -------------------------------------------------------------------------------------------


def make_generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def warpi_loss(V: nn.Module, y: Tensor, samples: int = L, seed: int = 5) -> LogitLoss:
    """Eq. (9) as a loop, with the same eps in every call."""

    def loss(z: Tensor) -> Tensor:
        q = V(z.detach(), y)
        eps = torch.randn(samples, *z.shape, generator=make_generator(seed, z.device.type), **like(z))
        total = torch.zeros((), **like(z))
        for j in range(samples):
            v = torch.sigmoid(q.mean + torch.exp(q.log_var / 2) * eps[j])
            total = total + F.cross_entropy(v * z, y) / samples
        return total

    return loss


def mwnet_loss(V: nn.Module, y: Tensor) -> LogitLoss:
    def loss(z: Tensor) -> Tensor:
        losses = F.cross_entropy(z, y, reduction="none")
        return (V(losses.detach()[:, None])[:, 0] * losses).sum() / len(y)

    return loss


def like(z: Tensor) -> dict[str, object]:
    return {"dtype": z.dtype, "device": z.device}


def warpi_meta_net() -> nn.Module:
    return MetaNet(K, 9, "embedding", nn.Tanh)


def mwnet_meta_net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 9), nn.ReLU(), nn.Linear(9, 1), nn.Sigmoid())


LOSSES = {"warpi": (warpi_meta_net, warpi_loss), "mwnet": (mwnet_meta_net, mwnet_loss)}


class Setting:
    """A network, a meta-network, a noisy and a trusted batch."""

    def __init__(self, net: str, loss: str, device: str = "cpu", batch: int = 6) -> None:
        shape, make_net = NETS[net]
        make_v, make_loss = LOSSES[loss]
        with seeded(1):
            self.net = make_net().double().to(device).train()
            self.V = make_v().double().to(device)
            self.x, self.x_meta = (torch.randn(batch, *shape, dtype=torch.float64).to(device) for _ in "ab")
            y, y_meta = (torch.randint(K, (batch,)).to(device) for _ in "ab")
        self.phi = list(self.V.parameters())
        self.loss: LogitLoss = make_loss(self.V, y)
        self.meta_loss: LogitLoss = lambda z: F.cross_entropy(z, y_meta)

    def gradient(self) -> tuple[Tensor, list[Tensor]]:
        self.V.zero_grad()
        noisy = forward(self.net, self.x)
        value = meta_gradient(noisy, self.loss, self.x_meta, self.meta_loss, self.phi, LR)
        return value, [grad_of(p) for p in self.phi]

    def reference_gradient(self, lr: float = LR) -> tuple[Tensor, list[Tensor]]:
        """L_meta(theta_hat(phi)) and its gradient, by double backward through the network."""
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.cudnn.flags(enabled=False),
        ):  # fused kernels are only once differentiable
            return double_backward(self.net, self.x, self.loss, self.x_meta, self.meta_loss, self.phi, lr)

    def value(self) -> float:
        return float(self.reference_gradient()[0])


def double_backward(
    net: nn.Module, x: Tensor, loss: LogitLoss, x_meta: Tensor, meta_loss: LogitLoss, phi: Sequence[Tensor], lr: float
) -> tuple[Tensor, list[Tensor]]:
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    theta = {name: p for name, p in net.named_parameters() if p.requires_grad}
    noisy = loss(functional_call(net, (theta, buffers), (x,)))
    grads = torch.autograd.grad(noisy, list(theta.values()), create_graph=True, allow_unused=True)
    theta_hat = {n: p if g is None else p - lr * g for (n, p), g in zip(theta.items(), grads, strict=True)}
    at_hat = meta_loss(functional_call(net, (theta_hat, buffers), (x_meta,)))
    d_phi = torch.autograd.grad(at_hat, list(phi), allow_unused=True)
    return at_hat.detach(), [torch.zeros_like(p) if d is None else d for p, d in zip(phi, d_phi, strict=True)]


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.clone()


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor], rtol: float = EXACT) -> None:
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        error = float((a - b).norm() / b.norm())
        assert error <= rtol, f"tensor {i} of shape {tuple(a.shape)}: relative error {error:.1e}"


# --- the gradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("net", NETS)
def test_equals_double_backward(net: str, loss: str, device: str) -> None:
    s = Setting(net, loss, device)
    with seeded(3):  # the same dropout masks for both
        wanted_value, wanted = s.reference_gradient()  # first, because it does not change the vectors of spectral norm
    if isinstance(s.net, Numpy):
        s.net.rng = np.random.default_rng(0)
    with seeded(3):
        value, grads = s.gradient()
    assert float(value) == pytest.approx(float(wanted_value), rel=EXACT)
    assert_same(grads, wanted)
    assert min(float(g.norm()) for g in wanted) > 0  # the comparison is not with zero


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("net", ["mlp", "residual"])
def test_equals_finite_differences(net: str, loss: str) -> None:
    s, h = Setting(net, loss), 1e-5
    _, grads = s.gradient()
    for seed in range(3):
        generator = make_generator(seed)
        along = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in s.phi]
        slope = float(sum((g * a).sum() for g, a in zip(grads, along, strict=True)))
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, a in zip(s.phi, along, strict=True):
                    p.add_(a, alpha=sign * h)
            ends.append(s.value())
            with torch.no_grad():
                for p, a in zip(s.phi, along, strict=True):
                    p.sub_(a, alpha=sign * h)
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-5)


def test_holds_in_evaluation_mode() -> None:
    s = Setting("mlp", "warpi")
    s.net.eval()
    (value, grads), (wanted_value, wanted) = s.gradient(), s.reference_gradient()
    assert float(value) == pytest.approx(float(wanted_value), rel=EXACT)
    assert_same(grads, wanted)


@pytest.mark.parametrize("snapshot", [False, True])
def test_written_products_of_a_linear_head_equal_the_generic_ones(snapshot: bool) -> None:
    with seeded(0):
        net = random_head(5, K).double()
        x, u = torch.randn(6, 5).double(), torch.randn(6, K).double()
        g = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    fast = forward(net, x, snapshot=snapshot)
    assert isinstance(fast.done, passes._Linear)
    generic = passes._Eager(net, x, None, snapshot)
    assert_same([fast.z.detach(), fast.done.jvp(g)], [generic.z.detach(), generic.jvp(g)])
    assert_same(fast.done.vjp(u), generic.vjp(u))
    assert_same(torch.autograd.grad(fast.z, list(net.parameters()), u), generic.vjp(u))
    at = {name: p.detach() + g[name] for name, p in net.named_parameters()}
    assert_same([passes.forward_at(net, at, x).z], [passes._Eager(net, x, at, False).z.detach()])


@pytest.mark.parametrize("net", ["mlp", "linear", "dropout"])
def test_a_loss_with_its_gradient_gives_the_meta_gradient_of_the_loss(net: str) -> None:
    s = Setting(net, "warpi")
    with seeded(1):
        y = torch.randint(K, (6,))

    def rectified(z: Tensor) -> Tensor:
        q = s.V(z.detach(), y)
        return 2 * torch.tanh(q.rsample(L, make_generator(5)) / 2)

    def as_loss(z: Tensor) -> Tensor:
        return cross_entropy(rectified(z) * z, y).mean()

    pair = WithGradient(lambda z: rectified_cross_entropy(rectified(z), z, y))
    results = []
    for loss in (as_loss, pair):
        s.V.zero_grad()
        with seeded(3):
            value = meta_gradient(forward(s.net, s.x), loss, s.x_meta, s.meta_loss, s.phi, LR)
        results.append([value, *(grad_of(p) for p in s.phi)])
    assert_same(*results)


@pytest.mark.parametrize("recipe", [{}, {"meta_order": "real"}, {"meta_every": 2}])
@pytest.mark.parametrize("written", [False, True])
def test_the_trusted_batch_is_part_of_the_real_step(recipe: dict[str, Any], written: bool) -> None:
    """theta moves along dL/dtheta + weight dL_meta/dtheta, at the same theta; phi moves as without it."""
    moved: dict[float, list[Tensor]] = {}
    for weight in (0.0, 0.7):
        method = linear_method(recipe)
        theta = [p.detach().clone() for p in method.net.parameters()]
        batch, trusted = method.loader.draw(), method.meta_loader.draw()
        w = torch.ones((), requires_grad=True)
        loss: Any = lambda z, w=w, y=batch.y: w * cross_entropy(z, y).mean()
        if written:
            loss = WithGradient(
                lambda z, w=w, y=batch.y: (cross_entropy(z, y).mean(), w * (z.softmax(1) - one_hot(y, 3)) / len(y))
            )
        optimizer = torch.optim.SGD([w], 0.0)
        options = {"trusted": trusted, "trusted_weight": weight}
        bilevel_step(method, batch, loss, mean_cross_entropy, [w], optimizer, **options)  # type: ignore[arg-type]
        moved[weight] = [p.detach() - start for p, start in zip(method.net.parameters(), theta, strict=True)]
    reference = linear_method(recipe)
    batch, trusted = reference.loader.draw(), reference.meta_loader.draw()
    value = mean_cross_entropy(reference.net(batch.x), batch.y) + 0.7 * mean_cross_entropy(
        reference.net(trusted.x), trusted.y
    )
    grads = torch.autograd.grad(value, list(reference.net.parameters()))
    torch.testing.assert_close(moved[0.7], [-0.1 * g for g in grads])
    assert not torch.allclose(moved[0.0][0], moved[0.7][0])


def linear_method(recipe: dict[str, Any]) -> Method:
    rng = make_generator(0)
    x, y = torch.randn(40, 5, generator=rng), torch.arange(40) % 3
    data = Dataset("x", make_features(x), y, tuple("abc"), clean=y)
    task, _ = make_task(data, "symmetric:0.4", meta=9, val=0.0, test=0.0)
    method = WarPI()
    method.start(
        task, Recipe(net="linear", batch_size=8, meta_batch_size=9, lr=0.1, momentum=0, weight_decay=0, **recipe)
    )
    return method


def test_adds_to_existing_gradients() -> None:
    s = Setting("mlp", "warpi")
    _, grads = s.gradient()
    for p, g in zip(s.phi, grads, strict=True):
        p.grad = 2 * g
    meta_gradient(forward(s.net, s.x), s.loss, s.x_meta, s.meta_loss, s.phi, torch.tensor(LR, dtype=torch.float64))
    assert_same([grad_of(p) for p in s.phi], [3 * g for g in grads])


def test_is_proportional_to_a_small_virtual_step() -> None:
    """d L_meta(theta_hat)/dphi -> -lr d/dphi <u, J g(theta)>: the size of the step matters only through g."""
    s = Setting("mlp", "warpi")
    scaled = []
    for lr in (1e-5, 1e-6):
        s.V.zero_grad()
        meta_gradient(forward(s.net, s.x), s.loss, s.x_meta, s.meta_loss, s.phi, lr)
        scaled.append([grad_of(p) / lr for p in s.phi])
    assert_same(*scaled, rtol=1e-3)


def test_changes_neither_the_network_nor_its_gradients() -> None:
    s = Setting("mlp", "warpi")
    noisy = forward(s.net, s.x)
    before = copy.deepcopy(s.net.state_dict())
    meta_gradient(noisy, s.loss, s.x_meta, s.meta_loss, s.phi, LR)
    assert all(torch.equal(v, before[name]) for name, v in s.net.state_dict().items())
    assert all(p.grad is None for p in s.net.parameters())


def test_the_real_step_uses_the_same_graph() -> None:
    s = Setting("residual", "warpi")
    reference = copy.deepcopy(s.net)
    noisy = forward(s.net, s.x)
    meta_gradient(noisy, s.loss, s.x_meta, s.meta_loss, s.phi, LR)
    got = torch.autograd.grad(s.loss(noisy.z), list(s.net.parameters()))
    wanted = torch.autograd.grad(s.loss(reference(s.x)), list(reference.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    "net",
    ["mlp", "residual", "dropout", "dropout of channels", "functional dropout"]
    + [net for net in TWICE if net != "numpy"],
)
def test_running_statistics_equal_those_of_one_plain_pass(net: str) -> None:
    s = Setting(net, "warpi")
    reference = copy.deepcopy(s.net)
    with seeded(3):
        s.gradient()
    with seeded(3):
        reference(s.x)
    buffers = dict(s.net.named_buffers())
    assert len(buffers) >= 3
    for name, wanted in reference.named_buffers():
        assert torch.equal(buffers[name], wanted), name
    assert {int(b) for name, b in buffers.items() if name.endswith("tracked")} == {1}


@pytest.mark.parametrize("net", NETS)
def test_the_global_generator_advances_as_in_two_plain_passes(net: str) -> None:
    """The repeated noisy pass draws its masks again, which must not advance the generator."""
    s = Setting(net, "warpi")
    with seeded(3):
        before = torch.get_rng_state()
        s.gradient()
        after = torch.get_rng_state()
    with seeded(3):
        s.net(s.x)
        s.net(s.x_meta)
        assert torch.equal(after, torch.get_rng_state())
    assert torch.equal(before, after) == ("dropout" not in net)


# --- networks without a forward-mode product ------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
def test_only_networks_that_need_it_are_differentiated_twice(net: str, caplog: pytest.LogCaptureFixture) -> None:
    passes._warn_once.cache_clear()
    for _ in "ab":  # two networks of one type with three steps each log one line
        s = Setting(net, "mwnet")
        with seeded(3):
            s.gradient()
            s.gradient()
            s.gradient()
        assert bool(passes._jvp_obstacles.get(s.net)) == (net in TWICE)
    assert [r.name for r in caplog.records] == ["warpi.autodiff"] * (net in TWICE)
    assert all("exact, but slower" in r.getMessage() and type(s.net).__name__ in r.getMessage() for r in caplog.records)


def test_a_failing_product_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    s, tried = Setting("weight norm", "warpi"), []
    real = passes.jvp
    monkeypatch.setattr(passes, "jvp", lambda *args: (tried.append(1), real(*args))[1])
    _, first = s.gradient()
    s.net.load_state_dict(s.net.state_dict())
    _, second = s.gradient()
    assert len(tried) == 1
    assert_same(second, first)  # training mode does not read running statistics


def test_a_network_is_freed_with_its_last_reference() -> None:
    gc.freeze()  # `gc.collect` then visits only new objects
    s = Setting("spectral norm", "warpi")
    s.gradient()
    net, known = weakref.ref(s.net), len(passes._jvp_obstacles)
    del s
    gc.collect()
    assert net() is None
    assert len(passes._jvp_obstacles) < known


@pytest.mark.parametrize("net", TWICE)
def test_the_real_step_works_after_double_backward(net: str) -> None:
    s = Setting(net, "warpi")
    reference = copy.deepcopy(s.net)
    with seeded(3):
        noisy = forward(s.net, s.x)
    meta_gradient(noisy, s.loss, s.x_meta, s.meta_loss, s.phi, LR)
    assert all(p.grad is None for p in s.net.parameters())
    got = torch.autograd.grad(s.loss(noisy.z), list(s.net.parameters()))
    with seeded(3):
        wanted = torch.autograd.grad(s.loss(reference(s.x)), list(reference.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_lstm_in_single_precision() -> None:
    """On a CPU only float32 has a fused kernel, without a forward-mode rule but twice differentiable."""
    s = Setting("lstm", "mwnet")  # draws no random numbers, which would depend on the precision
    wanted_value, wanted = s.reference_gradient()
    s.net = s.net.float()
    s.V = s.V.float()
    s.x = s.x.float()
    s.x_meta = s.x_meta.float()
    value, grads = s.gradient()
    assert "mkldnn_rnn_layer" in passes._jvp_obstacles[s.net]
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-5)
    assert_same([g.double() for g in grads], wanted, rtol=1e-3)


class Double(torch.autograd.Function):
    """2x without either derivative; its backward pass declares it."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(_: Any, g: Tensor) -> Tensor:
        return 2 * g


class DoubleOutside(Double):
    """2x, whose backward pass leaves torch silently."""

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(2 * g.detach().numpy())


class Once(nn.Module):
    def __init__(self, twice: type[Double], place: str) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.fc = nn.Linear(6, K)
        self.twice = twice
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x).tanh()
        if self.place == "end":
            return self.twice.apply(self.fc(h))
        if self.place == "middle":
            return self.fc(self.twice.apply(h))
        return self.fc(h + self.twice.apply(h).sin())


@pytest.mark.parametrize("place", ["end", "middle", "branch"])  # except at the end, part of J^T w still depends on w
@pytest.mark.parametrize("twice", [Double, DoubleOutside])
def test_an_operator_without_either_derivative_raises(twice: type[Double], place: str) -> None:
    s = Setting("mlp", "warpi")
    s.net = Once(twice, place).double()
    for _ in "ab":
        with pytest.raises(UserError, match=r"^Once has an operator .*autograd.Function.* nor twice .* such as ce$"):
            s.gradient()


def test_out_of_memory_is_not_taken_for_a_missing_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    s = Setting("mlp", "warpi")
    monkeypatch.setattr(passes, "jvp", full)
    with pytest.raises(torch.OutOfMemoryError):
        s.gradient()
    assert s.net not in passes._jvp_obstacles


# --- the methods ----------------------------------------------------------------------------------------------------


def double_task(n: int = 60) -> Task:
    x = torch.randn(n, 5, generator=make_generator(2), dtype=torch.float64)
    y = torch.arange(n) % K
    examples = TensorExamples(x, Scale(torch.tensor(0.0).double(), torch.tensor(1.0).double()))
    dataset = Dataset("doubles", examples, y, tuple(map(str, range(K))), clean=y)
    return make_task(dataset, "pair:0.3", meta=12, val=0, seed=1)[0]


def started(method: Method, dropout: float = 0.0, **settings: Any) -> Method:
    """A started method in float64."""
    net = lambda shape, n_classes: perceptron(shape[0], 8, 7, n_classes, dropout=dropout).double()
    method.start(double_task(), Recipe(net=net, batch_size=10, meta_batch_size=6, lr=LR, **settings))
    if isinstance(method, WarPI | MWNet):
        method.V.double()
    return method


def noisy_batch(method: Method) -> Batch:
    return next(method.loader.epoch(0))


def meta_gradients(method: WarPI | MWNet, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[Tensor]]:
    """The meta loss and the gradients that a step passes to the meta-optimizer."""
    seen: list[Tensor] = []
    monkeypatch.setattr(
        method.meta_optimizer,
        "step",
        lambda: seen.extend(grad_of(p) for p in method.V.parameters() if p.grad is not None),
    )
    log = method.step(noisy_batch(method))
    return torch.as_tensor(log["meta_loss"]), seen


def paper_loss(method: Method, y: Tensor) -> LogitLoss:
    """The loss of a method on the logits, implemented from its paper."""

    def loss(z: Tensor) -> Tensor:
        if isinstance(method, MWNet):
            return mwnet_loss(method.V, y)(z)
        assert isinstance(method, WarPI)
        q = method.V(z.detach(), y)
        eps = torch.zeros(1, *z.shape, dtype=z.dtype)
        if method.samples:
            eps = torch.randn(method.samples, *z.shape, generator=method.generator, dtype=z.dtype)
        s = q.mean + q.log_var.exp().sqrt() * eps
        v = {"sigmoid": s.sigmoid(), "tanh": 2 * ((1 + s) / 2).tanh(), "unbounded": 1 + s}[method.output]
        return torch.stack([F.cross_entropy(v_j * z, y) for v_j in v]).mean()

    return loss


META_METHODS = [MWNet(), WarPI(samples=3), WarPI(samples=0), WarPI(samples=2, output="tanh", label_input="one_hot")]
META_METHODS += [WarPI(samples=2, output="unbounded", activation="relu")]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("method", META_METHODS, ids=repr)
def test_methods_use_the_exact_gradient(method: MWNet | WarPI, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    method, reference = started(copy.copy(method), dropout), started(copy.copy(method), dropout)
    assert isinstance(reference, WarPI | MWNet)
    batch, meta = noisy_batch(reference), reference.meta_loader.draw()
    with seeded(3):
        wanted_value, wanted = double_backward(
            reference.net,
            batch.x,
            paper_loss(reference, batch.y),
            meta.x,
            lambda z: F.cross_entropy(z, meta.y),
            list(reference.V.parameters()),
            LR,
        )
    with seeded(3):
        value, grads = meta_gradients(method, monkeypatch)
    assert float(value) == pytest.approx(float(wanted_value), rel=EXACT)
    assert_same(grads, [w for w in wanted if float(w.norm()) > 0])
    unused = 2 if isinstance(method, WarPI) and method.samples == 0 else 0  # the variance head of WarPI (Detc.)
    assert len(grads) == len(wanted) - unused


@pytest.mark.parametrize("method", [MWNet(), WarPI(samples=3)], ids=repr)
def test_three_steps_equal_those_of_the_algorithm(method: Method) -> None:
    """Algorithm 1 by double backward: virtual step, meta step, real step with the new phi and new samples of v."""
    method, reference = started(copy.copy(method)), started(copy.copy(method))
    assert isinstance(reference, WarPI | MWNet)
    for batch, same in zip(method.loader.epoch(0), reference.loader.epoch(0), strict=True):
        method.step(batch)
        meta, loss = reference.meta_loader.draw(), paper_loss(reference, same.y)
        phi = list(reference.V.parameters())
        _, d_phi = double_backward(reference.net, same.x, loss, meta.x, lambda z: F.cross_entropy(z, meta.y), phi, LR)
        for p, d in zip(phi, d_phi, strict=True):
            p.grad = d
        reference.meta_optimizer.step()
        reference.optimizer.zero_grad()
        loss(reference.net(same.x)).backward()
        reference.optimizer.step()
    assert method.loader.count == 3
    for a, b in ((method.net, reference.net), (method.V, reference.V)):
        assert_same([p.detach() for p in a.parameters()], [p.detach() for p in b.parameters()], rtol=1e-8)


@pytest.mark.parametrize("method", [MWNet(), WarPI(samples=3)], ids=repr)
def test_a_step_updates_running_statistics_once_and_uses_no_global_generator(method: Method) -> None:
    started(method)
    reference, batch = copy.deepcopy(method.net), noisy_batch(method)
    before = torch.get_rng_state()
    method.step(batch)
    assert torch.equal(before, torch.get_rng_state())
    reference(batch.x)
    for (name, got), wanted in zip(method.net.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("method", [MWNet(), WarPI(samples=3)], ids=repr)
def test_no_graph_is_kept(method: Method) -> None:
    """Memory is freed immediately, without the garbage collector."""
    started(method, dropout=0.2)
    assert isinstance(method, MWNet | WarPI)
    method.loader.steps = 12
    counts = {}
    gc.freeze()  # `gc.get_objects` then lists only new objects
    gc.disable()
    try:
        with seeded(3):
            for n, log in enumerate(method.epoch(0), 1):
                assert not any(torch.as_tensor(value).requires_grad for value in log.values())
                assert all(
                    p.grad is not None and p.grad.grad_fn is None
                    for net in (method.net, method.V)
                    for p in net.parameters()
                )
                if n in (5, 12):
                    counts[n] = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    finally:
        gc.enable()
    assert counts[12] <= counts[5]


def test_warpi_with_v_equal_to_one_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    warpi, ce = started(WarPI()), started(CE())
    monkeypatch.setattr(warpi, "draw", lambda q: 1 + 0 * q.mean[None])
    before = copy.deepcopy(ce.net.state_dict())
    for a, b in zip(warpi.loader.epoch(0), ce.loader.epoch(0), strict=True):
        assert float(warpi.step(a)["loss"]) == pytest.approx(float(ce.step(b)["loss"]), rel=EXACT)
    for name, wanted in ce.net.state_dict().items():
        torch.testing.assert_close(warpi.net.state_dict()[name], wanted, rtol=1e-10, atol=1e-13)
    assert not torch.equal(before["0.weight"], ce.net.state_dict()["0.weight"])


def test_without_variance_the_number_of_samples_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for samples in (0, 1, 7):
        method = started(WarPI(samples=samples))
        assert isinstance(method, WarPI)
        with torch.no_grad():
            method.V.log_var.weight.zero_()
            method.V.log_var.bias.fill_(-60)
        value, grads = meta_gradients(method, monkeypatch)
        results.append(
            (float(value), grads[: len(list(method.V.parameters())) - 2])
        )  # without the variance head, which is last
    (mean_only, wanted), *others = results
    for value, grads in others:
        assert value == pytest.approx(mean_only, rel=1e-11)
        assert_same(grads, wanted, rtol=1e-10)


def test_the_meta_gradient_is_an_average_over_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spread of gradients over different draws decreases like 1 / sqrt(L)."""
    spread = []
    for samples in (4, 400):
        draws = []
        for seed in range(8):
            method = started(WarPI(samples=samples, virtual_lr=1e-4))  # small enough that no ReLU switches
            method.generator.manual_seed(seed)
            _, grads = meta_gradients(method, monkeypatch)
            draws.append(torch.cat([g.flatten() for g in grads]))
        spread.append(float(torch.stack(draws).std(0).norm()))
    assert 5 < spread[0] / spread[1] < 20


# --- the order of the steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("method", [MWNet(), WarPI(samples=3)], ids=repr)
def test_the_real_step_as_the_virtual_step(
    method: WarPI | MWNet, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """theta moves first, with momentum and weight decay; phi follows the gradient of L_meta at the new theta."""
    method, reference = (started(copy.copy(method), meta_order="real", compile=c) for c in (compile, False))
    recipe = method.recipe
    for m in (method, reference):
        m.step(noisy_batch(m))  # builds up momentum
        m.loader.count = 0
    batch, meta = noisy_batch(reference), reference.meta_loader.draw()
    theta, lr = dict(reference.net.named_parameters()), float(reference.lr)
    buffers = {name: b.clone() for name, b in reference.net.named_buffers()}
    z = functional_call(reference.net, (theta, buffers), (batch.x,))
    grads = torch.autograd.grad(paper_loss(reference, batch.y)(z), list(theta.values()), create_graph=True)
    new = {}
    for (name, p), grad in zip(theta.items(), grads, strict=True):
        momentum = reference.optimizer.state[p]["momentum_buffer"]
        new[name] = p - lr * (recipe.momentum * momentum + grad + recipe.weight_decay * p)
    wanted_value = F.cross_entropy(functional_call(reference.net, (new, buffers), (meta.x,)), meta.y)
    wanted = torch.autograd.grad(wanted_value, list(reference.V.parameters()))

    value, got = meta_gradients(method, monkeypatch)
    assert value.item() == pytest.approx(wanted_value.item(), rel=EXACT)
    assert_same(got, wanted, 1e-11)
    assert_same([p.detach() for p in method.net.parameters()], [p.detach() for p in new.values()])


@pytest.mark.parametrize("every", [2, 3])
def test_meta_steps_at_intervals(every: int) -> None:
    """In between, theta descends the loss with the old phi, and no trusted batch is drawn."""
    method = started(WarPI(samples=2), meta_every=every)
    before = [p.clone() for p in method.V.parameters()]
    for i, batch in enumerate(method.loader.epoch(0)):
        theta = [p.clone() for p in method.net.parameters()]
        log = method.step(batch)
        learns = i % every == 0
        assert ("meta_loss" in log) == learns
        assert any(not torch.equal(p, q) for p, q in zip(before, method.V.parameters(), strict=True)) == learns
        assert all(not torch.equal(p, q) for p, q in zip(theta, method.net.parameters(), strict=True))
        assert method.meta_loader.count == i // every + 1
        before = [p.clone() for p in method.V.parameters()]
