"""Reweighting and meta-learning: meta gradients against double backward in float64, and special cases."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from warpi.autodiff.passes import PassConfig, configure_passes, forward
from warpi.data.batch import Batch
from warpi.errors import UserError
from warpi.functional.losses import one_hot
from warpi.methods import mslc
from warpi.methods.emlc import EMLC, swap_every_other_label
from warpi.methods.gdw import GDW, balance_gradient
from warpi.methods.l2rw import L2RW, normalize_weights
from warpi.methods.mlc import MLC
from warpi.methods.mlc_wang import MLCWang, normalize_columns
from warpi.methods.mlnt import MLNT, synthesize_labels
from warpi.methods.mslc import MSLC
from warpi.methods.registry import make_method
from warpi.methods.vri import VRI
from warpi.nets.mlp import MLP
from warpi.nets.resnet import resnet20
from warpi.training.bilevel import bilevel_step
from warpi.training.engine import TrainingState, average_over_ranks
from warpi.training.method import Method, evaluating
from warpi.training.outputs import feature_size, last_layer, penultimate
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth

RECIPE = Recipe(epochs=2, batch_size=32, meta_batch_size=16, lr=0.05, seed=7)
ALL = ("l2rw", "mlc_wang", "mlc", "mslc", "mlnt", "gdw", "emlc", "vri")
TaskAndTruth = tuple[Task, Truth]


class FixedLoader:
    """A loader that always returns the same batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def draw(self) -> Batch:
        return self.batch


def prepare(method: Method, task: Task) -> tuple[Any, Batch, Batch]:
    """A method in float64 after some steps, a noisy batch, and the trusted batch that it draws next."""
    method.start(task, RECIPE)
    any_method: Any = method
    list(method.epoch(1))
    for value in (*vars(method).values(), *method.nets):
        if isinstance(value, nn.Module):
            value.double()
    for optimizer in (*method.optimizers, getattr(method, "meta_optimizer", method.optimizer)):
        optimizer.state.clear()
    noisy, trusted = (double(loader.draw()) for loader in (method.loader, method.meta_loader))
    any_method.meta_loader = FixedLoader(trusted)
    return any_method, noisy, trusted


def double(batch: Batch) -> Batch:
    return Batch((batch.x.double(),), batch.y, batch.rows)


def double_backward(
    net: nn.Module,
    x: Tensor,
    inner: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]],
    trusted: Batch,
    phi: Sequence[Tensor],
    lr: float,
) -> tuple[Tensor, ...]:
    """d L_meta(theta_hat(phi)) / dphi, through the graph of the virtual step; `inner` maps z, theta to gradients."""

    def call(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        z: Tensor = functional_call(net, (theta, {name: b.clone() for name, b in net.named_buffers()}), (x,))
        return z

    theta = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    steps = inner(call(theta, x), list(theta.values()))
    hat = {name: p - lr * d for (name, p), d in zip(theta.items(), steps, strict=True)}
    return torch.autograd.grad(F.cross_entropy(call(hat, trusted.x), trusted.y), phi)


def gradient_of(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]:
    return lambda z, theta: torch.autograd.grad(loss(z), theta, create_graph=True)


def assert_all_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor], rel: float = 1e-10) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a is not None
        assert b.abs().max() > 0
        assert (a - b).norm() <= rel * b.norm()


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


# --- the meta gradients ---------------------------------------------------------------------------------------------


def test_l2rw_weights_agree_with_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepare(L2RW(), tiny[0])
    eps = torch.zeros(len(noisy.y), dtype=torch.float64, requires_grad=True)

    def loss(z: Tensor) -> Tensor:
        return (eps * F.cross_entropy(z, noisy.y, reduction="none")).sum()

    (d,) = double_backward(method.net, noisy.x, gradient_of(loss), trusted, [eps], 0.3)
    expected = torch.tensor([max(0.0, -float(e)) for e in d], dtype=torch.float64)
    w, judged = method.weigh(forward(method.net, noisy.x), noisy.y)
    assert_all_close([w], [expected / expected.sum()])
    assert judged > 0
    assert 0 < int((w > 0).sum()) < len(w)
    assert w.sum() == pytest.approx(1)


def test_mlc_wang_matrix_agrees_with_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepare(MLCWang(matrix_lr=40.0), tiny[0])
    T = torch.eye(10, dtype=torch.float64, requires_grad=True)

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z @ T, noisy.y, reduction="sum")

    (d,) = double_backward(method.net, noisy.x, gradient_of(loss), trusted, [T], 1e-3)
    moved = (torch.eye(10, dtype=torch.float64) - 40 * d).clamp_min(0)
    actual, _ = method.matrix(forward(method.net, noisy.x), noisy.y)
    assert_all_close([actual - torch.eye(10)], [moved / moved.sum(0) - torch.eye(10)])
    torch.testing.assert_close(actual.sum(0), torch.ones(10, dtype=torch.float64))


def test_gdw_class_weights_agree_with_double_backward(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    from warpi.methods import gdw

    method, noisy, trusted = prepare(GDW(), tiny[0])
    V, lr = copy.deepcopy(method.V), float(method.lr)
    z = method.net(noisy.x).detach()
    flow = (z.softmax(1) - one_hot(noisy.y, 10)) / len(z)
    w = V(F.cross_entropy(z, noisy.y, reduction="none")[:, None])
    omega = w.detach().repeat(1, 10).requires_grad_()
    (d,) = double_backward(
        method.net,
        noisy.x,
        lambda z, theta: torch.autograd.grad(z, theta, omega * flow, create_graph=True),
        trusted,
        [omega],
        lr,
    )

    def weighted(z: Tensor) -> Tensor:  # as in Meta-Weight-Net
        return (w[:, 0] * F.cross_entropy(z, noisy.y, reduction="none")).mean()

    expected_V = double_backward(method.net, noisy.x, gradient_of(weighted), trusted, list(V.parameters()), lr)
    seen = []

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(original(*args, **options))
        return seen[-1]

    original = gdw.batch_gradient
    monkeypatch.setattr(gdw, "batch_gradient", spy)
    method.step(noisy)
    assert_all_close([seen[0][0]], [d])
    assert_all_close(gradients(method.V), expected_V)


def test_class_learning_rate_of_gdw_grows_with_the_number_of_classes(
    tiny: TaskAndTruth, pictures: TaskAndTruth
) -> None:
    ten, three, given = GDW(), GDW(), GDW(class_lr=7.0)
    for method, task in ((ten, tiny[0]), (three, pictures[0]), (given, tiny[0])):
        method.start(task, replace(RECIPE, net="mlp"))
    assert (ten.eta, three.eta, given.eta) == (100, 30, 7)


def test_mlc_gradient_agrees_with_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepare(MLC(), tiny[0])
    n = len(noisy.y)
    x = torch.cat([noisy.x, trusted.x[1::2]])
    V, h = copy.deepcopy(method.V), copy.deepcopy(method.net).features(x)[:n].detach()

    def loss(z: Tensor) -> Tensor:
        q = V(h, noisy.y)
        soft = -(q * z[:n].log_softmax(1)).sum()
        return (soft + F.cross_entropy(z[n:], trusted.y[1::2], reduction="sum")) / len(z)

    rest = Batch((trusted.x[::2],), trusted.y[::2], trusted.rows[::2])
    expected = double_backward(method.net, x, gradient_of(loss), rest, list(V.parameters()), float(method.lr))
    before = copy.deepcopy(method.net.state_dict())
    method.step(noisy)
    assert_all_close(gradients(method.V), expected)
    after = method.net.state_dict()
    assert (
        after["body.1.num_batches_tracked"] == before["body.1.num_batches_tracked"] + 1
    )  # `features` does not update it


def test_emlc_gradient_agrees_with_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepare(EMLC(), tiny[0])
    n, lr = len(noisy.y), float(method.lr)
    teacher, V = copy.deepcopy(method.nets[1]), copy.deepcopy(method.V)
    phi = [*teacher.parameters(), *V.parameters()]

    def loss(z: Tensor) -> Tensor:
        h = teacher.features(noisy.x)
        r = torch.sigmoid(V(h, noisy.y))[:, None]
        q = r * one_hot(noisy.y, 10) + (1 - r) * teacher.fc(h).softmax(1)
        return -(q * z[:n].log_softmax(1)).sum(1).mean() + F.cross_entropy(z[n:], trusted.y[1::2])

    rest = Batch((trusted.x[::2],), trusted.y[::2], trusted.rows[::2])
    x = torch.cat([noisy.x, trusted.x[1::2]])
    meta = double_backward(method.net, x, gradient_of(loss), rest, phi, lr)
    z, h = teacher(trusted.x), teacher.features(trusted.x)
    y = swap_every_other_label(z, trusted.y)
    judge = F.binary_cross_entropy(torch.sigmoid(V(h, y)), (y == trusted.y).double())
    own = torch.autograd.grad(F.cross_entropy(z, trusted.y) + judge, phi)
    method.step(noisy)
    assert_all_close(
        [*gradients(method.nets[1]), *gradients(method.V)], [a + b for a, b in zip(meta, own, strict=True)]
    )
    assert max(float(a.norm() / b.norm()) for a, b in zip(meta, own, strict=True)) > 1e-4  # neither part is negligible


@pytest.mark.parametrize("name", [*ALL, "warpi", "mwnet"])
def test_frozen_layers_do_not_change(name: str, tiny: TaskAndTruth) -> None:
    def build(shape: tuple[int, ...], n_classes: int) -> nn.Module:
        net = MLP(shape, n_classes)
        next(net.parameters()).requires_grad_(False)
        return net

    method = make_method(name)
    method.start(tiny[0], replace(RECIPE, net=build))
    before = [[p.clone() for p in net.parameters()] for net in method.nets]
    for t in range(RECIPE.epochs):
        list(method.epoch(t))
    for net, (frozen, *others) in zip(method.nets, before, strict=True):
        first, *rest = net.parameters()
        assert torch.equal(first, frozen)
        assert not any(map(torch.equal, rest, others))


def test_vri_gradient_agrees_with_double_backward_plus_kl(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepare(VRI(kl=0.1, hidden=(16, 8)), tiny[0])
    V, h = copy.deepcopy(method.V), copy.deepcopy(method.net).features(noisy.x).detach()
    rng = torch.Generator().set_state(method.generator.get_state())
    q, p = V(h, noisy.y), V(h)
    v = torch.sigmoid(q.mean + q.std * torch.randn(1, *q.mean.shape, generator=rng, dtype=torch.float64))[0]
    phi, lr = list(V.parameters()), float(method.lr)
    parts = (torch.distributions.Normal(a.mean, a.std) for a in (q, p))
    kl = torch.distributions.kl_divergence(*parts).sum(1).mean()  # type: ignore[no-untyped-call]
    own = torch.autograd.grad(0.1 * kl, phi, retain_graph=True)
    meta = double_backward(
        method.net, noisy.x, gradient_of(lambda z: F.cross_entropy(v * z, noisy.y)), trusted, phi, lr
    )
    method.step(noisy)
    assert_all_close(gradients(method.V), [a + b for a, b in zip(meta, own, strict=True)])


@pytest.mark.parametrize("name", ["l2rw", "mlc_wang", "gdw"])
@pytest.mark.parametrize("options", [{"meta_every": 2}, {"meta_order": "real"}])
def test_per_batch_weights_need_a_virtual_step_in_every_step(
    name: str, options: dict[str, Any], tiny: TaskAndTruth
) -> None:
    method = make_method(name)
    method.start(tiny[0], replace(RECIPE, **options))
    with pytest.raises(UserError, match="--meta-every 1 and --meta-order virtual"):
        list(method.epoch(1))


@pytest.mark.parametrize("name", ["mlc", "emlc", "vri", "mslc"])
def test_meta_every_and_real_order(name: str, tiny: TaskAndTruth) -> None:
    method = make_method(name)
    recipe = replace(RECIPE, meta_every=2, meta_order="real", compile=True)
    method.start(tiny[0], recipe)
    logs = list(method.epoch(1))
    assert ["meta_loss" in log for log in logs[:4]] == [False, True, False, True]  # counted from step 5


# --- building blocks --------------------------------------------------------------------------------------------


def test_normalize_weights() -> None:
    w = torch.tensor([0.0, 1.0, 3.0])
    assert normalize_weights(w).tolist() == [0, 0.25, 0.75]
    assert normalize_weights(torch.zeros(3)).tolist() == [0, 0, 0]


def test_l2rw_ignores_a_harmful_batch(tiny: TaskAndTruth) -> None:
    """Each label is the least likely class, so every gradient opposes that of the trusted examples."""
    method = L2RW()
    method.start(tiny[0], replace(RECIPE, weight_decay=0.0, momentum=0.0))
    trusted = method.meta_loader.draw()
    method.meta_loader = FixedLoader(trusted)  # type: ignore[assignment]
    for _ in range(60):
        method.step(trusted)
    wrong = method.net(trusted.x).argmin(dim=1)
    before = [p.detach().clone() for p in method.net.parameters()]
    log = method.step(Batch(trusted.views, wrong, trusted.rows))
    assert log["used"] == 0
    assert all(map(torch.equal, before, method.net.parameters()))


def test_normalize_columns() -> None:
    T = torch.tensor([[2.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    assert normalize_columns(T).tolist() == [[0.5, 0, 0.25], [0.5, 0, 0], [0, 0, 0.75]]


def test_mlc_wang_with_a_fixed_matrix_is_cross_entropy(tiny: TaskAndTruth) -> None:
    a, b = MLCWang(matrix_lr=0.0), make_method("ce")
    for method in (a, b):
        method.start(tiny[0], RECIPE)
        for t in range(2):
            list(method.epoch(t))
    for p, q in zip(a.net.parameters(), b.net.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_balanced_gradients_sum_to_zero() -> None:
    rng = torch.Generator().manual_seed(0)
    sure = 20.0 * (torch.arange(6) == 5)[:, None] * one_hot(torch.arange(6) % 5, 5)  # p_y of the last row is 1 - 1e-8
    p, y = (torch.randn(6, 5, generator=rng).double() + sure).softmax(1), torch.arange(6) % 5
    omega = torch.rand(6, 5, generator=rng).double()
    actual = balance_gradient(omega * (p - one_hot(y, 5)), y)
    torch.testing.assert_close(actual.sum(1), torch.zeros(6).double(), atol=1e-16, rtol=0)
    for i in range(6):
        others = [k for k in range(5) if k != y[i]]
        assert torch.equal(actual[i, others], omega[i, others] * p[i, others])
        at_y = sum(omega[i, k] * p[i, k] for k in others) / (1 - p[i, y[i]])  # the paper's omega_y
        assert float(actual[i, y[i]]) == pytest.approx(float(at_y * (p[i, y[i]] - 1)))
    torch.testing.assert_close(balance_gradient(0.7 * (p - one_hot(y, 5)), y), 0.7 * (p - one_hot(y, 5)))


def test_gdw_without_class_weights_is_mwnet(tiny: TaskAndTruth) -> None:
    """After one step V is equal; the classifiers differ, because GDW uses the weights before the update of V."""
    gdw, mwnet = GDW(clip=0.0), make_method("mwnet")
    for method in (gdw, mwnet):
        method.start(tiny[0], RECIPE)
        method.step(method.loader.draw())
    for p, q in zip(gdw.V.parameters(), vars(mwnet)["V"].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_mslc_mixes_labels(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    method = MSLC()
    method.start(tiny[0], RECIPE)
    given = one_hot(tiny[0].train.y, 10)
    assert torch.equal(method.soft, given)
    list(method.epoch(0))
    assert not method.correcting
    before, z = method.soft[:4].clone(), torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    y = tiny[0].train.y[:4]
    actual = method.correct_labels(z, y, before)
    with torch.no_grad():
        for i in range(4):
            a = method.V(F.cross_entropy(z[i : i + 1], y[i : i + 1])[None])
            b = method.W(F.cross_entropy(z[i : i + 1], before[i].argmax()[None])[None])
            torch.testing.assert_close(actual[i], a * given[i] + (1 - a) * (b * before[i] + (1 - b) * z[i].softmax(0)))
    steps: list[Any] = []
    monkeypatch.setattr(mslc, "bilevel_step", lambda *a: steps.append(a[6]) or bilevel_step(*a))
    list(method.epoch(1))
    assert method.correcting
    assert steps == [10 * method.lr] * len(steps) != [], "the published virtual step"
    torch.testing.assert_close(method.soft.sum(1), torch.ones(len(given)))


def test_swap_every_other_label() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert swap_every_other_label(z, torch.tensor([0, 0, 0, 1])).tolist() == [1, 0, 2, 1]


# --- MLNT -----------------------------------------------------------------------------------------------------------


def test_synthetic_labels_come_from_neighbors() -> None:
    rng = torch.Generator().manual_seed(0)
    h, y = torch.randn(20, 3, generator=rng), torch.arange(20)  # all labels differ
    actual = synthesize_labels(h, y, 50, 0.5, 4, rng)
    assert actual.shape == (50, 20)
    assert ((actual != y).sum(1) == 10).all()  # exactly half of the labels
    for i in range(20):
        nearest = sorted((j for j in range(20) if j != i), key=lambda j: float((h[i] - h[j]).norm()))[:4]
        assert set(actual[:, i].tolist()) == {i, *nearest}
    assert torch.equal(synthesize_labels(h, y, 3, 0.0, 4, rng), y.expand(3, 20))
    assert synthesize_labels(h[:3], y[:3], 2, 1.0, 10, rng).shape == (2, 3)  # fewer than 10 neighbors


def test_mlnt_without_fast_steps_is_distillation(tiny: TaskAndTruth) -> None:
    """Each step is cross-entropy plus the KL divergence to the averaged weights; synthetic labels do not matter."""
    recipe = replace(RECIPE, schedule="constant")
    method = MLNT(updates=3, fast_lr=0.0, warm_up=0.0, ramp=0.0, averaging=(0.9,))
    method.start(tiny[0], recipe)
    net, teacher = copy.deepcopy(method.net), copy.deepcopy(method.net)
    optimizer = recipe.make_optimizer(net.parameters())
    batches = [method.loader.draw() for _ in range(4)]
    method.loader.load_state_dict({"count": 0})
    for batch, log in zip(batches, method.epoch(0), strict=False):
        with torch.no_grad():
            for v, p in zip(teacher.parameters(), net.parameters(), strict=True):
                v.mul_(0.9).add_(0.1 * p)
            expected = teacher(batch.x).softmax(1)
        z = net(batch.x)
        kl = F.kl_div(z.log_softmax(1), expected, reduction="batchmean")
        optimizer.zero_grad()
        (F.cross_entropy(z, batch.y) + kl).backward()
        optimizer.step()
        torch.testing.assert_close(torch.as_tensor(log["consistency"]), kl.detach(), rtol=1e-4, atol=1e-6)
        for p, q in zip(method.net.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    for v, u in zip(method.teacher.state_dict().values(), teacher.state_dict().values(), strict=True):
        torch.testing.assert_close(v, u, rtol=1e-4, atol=1e-6)


def test_number_of_updates_of_mlnt_is_irrelevant_without_synthetic_labels(tiny: TaskAndTruth) -> None:
    runs = []
    for updates in (1, 4):
        method = MLNT(updates=updates, share=0.0)
        method.start(tiny[0], RECIPE)
        list(method.epoch(1))
        runs.append(list(method.net.parameters()))
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_mlnt_predicts_with_its_net_in_the_warm_up(tiny: TaskAndTruth) -> None:
    method = MLNT(warm_up=0.5)
    method.start(tiny[0], RECIPE)
    list(method.epoch(0))
    assert method.warm
    x = next(tiny[0].train.batches(20)).x
    with evaluating(method.nets):
        assert torch.equal(method.predict(x), method.net(x).softmax(dim=1))
    list(method.epoch(1))
    with evaluating(method.nets), torch.no_grad():
        assert not torch.equal(method.predict(x), method.net(x).softmax(dim=1))


def test_ranks_average_batch_norm_statistics_of_the_teacher(
    tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr("warpi.utils.distributed.average", lambda tensors: seen.extend(tensors))
    method = MLNT()
    method.start(tiny[0], RECIPE)
    average_over_ranks(method, TrainingState())
    expected = [b for net in (method.net, method.teacher) for b in net.buffers() if b.is_floating_point()]
    assert len(expected) == 4
    assert {id(b) for b in expected} == {id(b) for b in seen}


# --- features -------------------------------------------------------------------------------------------------------


def test_features_do_not_change_the_network() -> None:
    torch.manual_seed(0)
    net, x = resnet20((3, 8, 8), 5, width=4), torch.randn(6, 3, 8, 8)
    before = copy.deepcopy(net.state_dict())
    h = penultimate(net, x)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    torch.testing.assert_close(h, copy.deepcopy(net).features(x))
    torch.testing.assert_close(last_layer(net, h), net(x))
    assert torch.autograd.grad(h.sum(), net.conv1.weight)[0].abs().sum() > 0
    assert feature_size(net, (3, 8, 8)) == 16
    assert net.training


@pytest.mark.parametrize("how", [PassConfig(bf16=True), PassConfig(accumulate=2), PassConfig(compile=True)])
def test_features_use_the_pass_config_of_the_network(how: PassConfig) -> None:
    """Precision, micro-batches and compilation are those of the network's passes."""
    torch.manual_seed(0)
    net, x = configure_passes(MLP((7,), 4), how), torch.randn(8, 7)
    with torch.no_grad():
        z = last_layer(net, penultimate(net, x))
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, forward(net, x).z.detach())


def test_features_and_logits_use_the_same_micro_batches() -> None:
    """BatchNorm normalizes within micro-batches, so features and logits must be split alike."""
    torch.manual_seed(0)
    net, x = configure_passes(resnet20((3, 8, 8), 4, width=4), PassConfig(accumulate=8)), torch.randn(50, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(last_layer(net, penultimate(net, x)), forward(net, x).z)
        with pytest.raises(UserError, match="a batch of 15 cannot be cut into 8 parts"):
            penultimate(net, x[:15])
    assert feature_size(net, (3, 8, 8)) == 16


def test_features_are_not_split_in_evaluation_mode() -> None:
    """Logits are not split either; this matters for BatchNorm without running statistics."""
    torch.manual_seed(0)
    net, x = MLP((7,), 4), torch.randn(3, 7)
    net.body[1] = nn.BatchNorm1d(128, track_running_stats=False)
    configure_passes(net, PassConfig(accumulate=2))
    with torch.no_grad(), evaluating([net]):
        torch.testing.assert_close(last_layer(net, penultimate(net, x)), net(x))
    assert feature_size(net, (7,)) == 128


@pytest.mark.parametrize("name", ["mlc", "vri", "emlc", "mlnt"])
def test_network_without_features_is_refused(name: str, tiny: TaskAndTruth) -> None:
    method = make_method(name)
    with pytest.raises(UserError, match=r"Sequential has no method features\(x\)"):
        method.start(tiny[0], replace(RECIPE, net=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))))


def test_network_without_a_last_layer_is_refused(tiny: TaskAndTruth) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

        def features(self, x: Tensor) -> Tensor:
            h: Tensor = self.body(x.flatten(1))
            return h

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.head(self.features(x))
            return z

    with pytest.raises(UserError, match="Whole has no `fc`"):
        EMLC().start(tiny[0], replace(RECIPE, net=Whole()))
    with pytest.raises(UserError, match=r"not \(2, D\)"):
        feature_size(FlatFeatures(), (3, 4))


class FlatFeatures(nn.Module):
    """A network whose features are not two-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("averaging", [(), (0.9, 0.99, 0.999)])
def test_mlnt_takes_one_or_two_averaging_fractions(averaging: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="averaging must be one or two fractions"):
        MLNT(averaging=averaging)


def test_vri_without_hidden_layers_is_linear(tiny: TaskAndTruth) -> None:
    method = VRI(hidden=())
    method.start(tiny[0], RECIPE)
    assert [tuple(p.shape) for p in method.V.mean.parameters()] == [(10, 128 + 64), (10,)]
    assert all(float(log["loss"]) > 0 for log in method.epoch(0))
    with pytest.raises(UserError, match="hidden must be between 1 and"):
        VRI(hidden=(8, 0))
