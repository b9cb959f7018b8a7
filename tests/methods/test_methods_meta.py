"""Re-weighting and meta-learning: meta gradients against double backward in float64, limits, and what is learned."""

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
from warpi.data.dataset import Dataset
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
from warpi.methods.registry import METHODS, make_method
from warpi.methods.vri import VRI
from warpi.nets.mlp import MLP
from warpi.nets.resnet import resnet20
from warpi.training.bilevel import bilevel_step
from warpi.training.engine import TrainingState, settle, train
from warpi.training.method import Method, evaluating
from warpi.training.outputs import feature_size, last_layer, penultimate
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task

RECIPE = Recipe(epochs=2, batch_size=32, meta_batch_size=16, lr=0.05, seed=7)
ALL = ("l2rw", "mlc_wang", "mlc", "mslc", "mlnt", "gdw", "emlc", "vri")
TaskAndTruth = tuple[Task, Truth]


class Fixed:
    """A loader that gives one batch again and again."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def draw(self) -> Batch:
        return self.batch


def prepared(method: Method, task: Task) -> tuple[Any, Batch, Batch]:
    """A method in float64 after some steps, a noisy batch and the trusted one that it will draw next."""
    method.start(task, RECIPE)
    any_method: Any = method
    list(method.epoch(1))
    for value in (*vars(method).values(), *method.nets):
        if isinstance(value, nn.Module):
            value.double()
    for optimizer in (*method.optimizers, getattr(method, "meta_optimizer", method.optimizer)):
        optimizer.state.clear()
    noisy, trusted = (double(loader.draw()) for loader in (method.loader, method.meta_loader))
    any_method.meta_loader = Fixed(trusted)
    return any_method, noisy, trusted


def double(batch: Batch) -> Batch:
    return Batch((batch.x.double(),), batch.y, batch.rows)


def by_double_backward(
    net: nn.Module,
    x: Tensor,
    inner: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]],
    trusted: Batch,
    phi: Sequence[Tensor],
    lr: float,
) -> tuple[Tensor, ...]:
    """d L_meta(theta_hat(phi)) / dphi with the virtual step kept in the graph; `inner`: z, theta -> gradients."""

    def call(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        z: Tensor = functional_call(net, (theta, {name: b.clone() for name, b in net.named_buffers()}), (x,))
        return z

    theta = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    steps = inner(call(theta, x), list(theta.values()))
    hat = {name: p - lr * d for (name, p), d in zip(theta.items(), steps, strict=True)}
    return torch.autograd.grad(F.cross_entropy(call(hat, trusted.x), trusted.y), phi)


def down(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]:
    return lambda z, theta: torch.autograd.grad(loss(z), theta, create_graph=True)


def close(got: Sequence[Tensor | None], wanted: Sequence[Tensor], rel: float = 1e-10) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a is not None
        assert b.abs().max() > 0
        assert (a - b).norm() <= rel * b.norm()


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


# --- the meta gradients ---------------------------------------------------------------------------------------------


def test_weights_of_l2rw_are_those_of_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepared(L2RW(), tiny[0])
    eps = torch.zeros(len(noisy.y), dtype=torch.float64, requires_grad=True)

    def loss(z: Tensor) -> Tensor:
        return (eps * F.cross_entropy(z, noisy.y, reduction="none")).sum()

    (d,) = by_double_backward(method.net, noisy.x, down(loss), trusted, [eps], 0.3)
    wanted = torch.tensor([max(0.0, -float(e)) for e in d], dtype=torch.float64)
    w, judged = method.weigh(forward(method.net, noisy.x), noisy.y)
    close([w], [wanted / wanted.sum()])
    assert judged > 0
    assert 0 < int((w > 0).sum()) < len(w)
    assert w.sum() == pytest.approx(1)


def test_matrix_of_mlc_wang_is_that_of_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepared(MLCWang(matrix_lr=40.0), tiny[0])
    T = torch.eye(10, dtype=torch.float64, requires_grad=True)

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z @ T, noisy.y, reduction="sum")

    (d,) = by_double_backward(method.net, noisy.x, down(loss), trusted, [T], 1e-3)
    moved = (torch.eye(10, dtype=torch.float64) - 40 * d).clamp_min(0)
    got, _ = method.matrix(forward(method.net, noisy.x), noisy.y)
    close([got - torch.eye(10)], [moved / moved.sum(0) - torch.eye(10)])
    torch.testing.assert_close(got.sum(0), torch.ones(10, dtype=torch.float64))


def test_class_weights_of_gdw_are_those_of_double_backward(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    from warpi.methods import gdw

    method, noisy, trusted = prepared(GDW(), tiny[0])
    V, lr = copy.deepcopy(method.V), float(method.lr)
    z = method.net(noisy.x).detach()
    flow = (z.softmax(1) - one_hot(noisy.y, 10)) / len(z)
    w = V(F.cross_entropy(z, noisy.y, reduction="none")[:, None])
    omega = w.detach().repeat(1, 10).requires_grad_()
    (d,) = by_double_backward(
        method.net,
        noisy.x,
        lambda z, theta: torch.autograd.grad(z, theta, omega * flow, create_graph=True),
        trusted,
        [omega],
        lr,
    )

    def weighted(z: Tensor) -> Tensor:  # as Meta-Weight-Net's
        return (w[:, 0] * F.cross_entropy(z, noisy.y, reduction="none")).mean()

    wanted_V = by_double_backward(method.net, noisy.x, down(weighted), trusted, list(V.parameters()), lr)
    seen = []

    def spied(*args: Any, **options: Any) -> Any:
        seen.append(original(*args, **options))
        return seen[-1]

    original = gdw.batch_gradient
    monkeypatch.setattr(gdw, "batch_gradient", spied)
    method.step(noisy)
    close([seen[0][0]], [d])
    close(gradients(method.V), wanted_V)


def test_gradient_of_mlc_is_that_of_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepared(MLC(), tiny[0])
    n, half = len(noisy.y), len(trusted.y) // 2
    x = torch.cat([noisy.x, trusted.x[:half]])
    V, h = copy.deepcopy(method.V), copy.deepcopy(method.net).features(x)[:n].detach()

    def loss(z: Tensor) -> Tensor:
        q = V(h, noisy.y)
        soft = -(q * z[:n].log_softmax(1)).sum()
        return (soft + F.cross_entropy(z[n:], trusted.y[:half], reduction="sum")) / len(z)

    rest = Batch((trusted.x[half:],), trusted.y[half:], trusted.rows[half:])
    wanted = by_double_backward(method.net, x, down(loss), rest, list(V.parameters()), float(method.lr))
    before = copy.deepcopy(method.net.state_dict())
    method.step(noisy)
    close(gradients(method.V), wanted)
    after = method.net.state_dict()
    assert after["body.1.num_batches_tracked"] == before["body.1.num_batches_tracked"] + 1  # features leave it alone


def test_gradient_of_emlc_is_that_of_double_backward(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepared(EMLC(), tiny[0])
    n, half, lr = len(noisy.y), len(trusted.y) // 2, float(method.lr)
    teacher, V = copy.deepcopy(method.nets[1]), copy.deepcopy(method.V)
    phi = [*teacher.parameters(), *V.parameters()]

    def loss(z: Tensor) -> Tensor:
        h = teacher.features(noisy.x)
        r = torch.sigmoid(V(h, noisy.y))[:, None]
        q = r * one_hot(noisy.y, 10) + (1 - r) * teacher.fc(h).softmax(1)
        return -(q * z[:n].log_softmax(1)).sum(1).mean() + F.cross_entropy(z[n:], trusted.y[:half])

    rest = Batch((trusted.x[half:],), trusted.y[half:], trusted.rows[half:])
    x = torch.cat([noisy.x, trusted.x[:half]])
    meta = by_double_backward(method.net, x, down(loss), rest, phi, lr)
    z, h = teacher(trusted.x), teacher.features(trusted.x)
    y = swap_every_other_label(z, trusted.y)
    judge = F.binary_cross_entropy(torch.sigmoid(V(h, y)), (y == trusted.y).double())
    own = torch.autograd.grad(F.cross_entropy(z, trusted.y) + judge, phi)
    method.step(noisy)
    close([*gradients(method.nets[1]), *gradients(method.V)], [a + b for a, b in zip(meta, own, strict=True)])
    assert max(float(a.norm() / b.norm()) for a, b in zip(meta, own, strict=True)) > 1e-4  # both parts matter


@pytest.mark.parametrize("name", [*ALL, "warpi", "mwnet"])
def test_frozen_layers_stay_as_they_are(name: str, tiny: TaskAndTruth) -> None:
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


def test_gradient_of_vri_has_both_its_parts(tiny: TaskAndTruth) -> None:
    method, noisy, trusted = prepared(VRI(kl=0.1, hidden=(16, 8)), tiny[0])
    V, h = copy.deepcopy(method.V), copy.deepcopy(method.net).features(noisy.x).detach()
    chance = torch.Generator().set_state(method.generator.get_state())
    q, p = V(h, noisy.y), V(h)
    v = torch.sigmoid(q.mean + q.std * torch.randn(1, *q.mean.shape, generator=chance, dtype=torch.float64))[0]
    phi, lr = list(V.parameters()), float(method.lr)
    parts = (torch.distributions.Normal(a.mean, a.std) for a in (q, p))
    kl = torch.distributions.kl_divergence(*parts).sum(1).mean()  # type: ignore[no-untyped-call]
    own = torch.autograd.grad(0.1 * kl, phi, retain_graph=True)
    meta = by_double_backward(method.net, noisy.x, down(lambda z: F.cross_entropy(v * z, noisy.y)), trusted, phi, lr)
    method.step(noisy)
    close(gradients(method.V), [a + b for a, b in zip(meta, own, strict=True)])


@pytest.mark.parametrize("name", ["l2rw", "mlc_wang", "gdw"])
@pytest.mark.parametrize("options", [{"meta_every": 2}, {"meta_order": "real"}])
def test_weights_of_a_batch_cannot_be_made_later(name: str, options: dict[str, Any], tiny: TaskAndTruth) -> None:
    method = make_method(name)
    method.start(tiny[0], replace(RECIPE, **options))
    with pytest.raises(UserError, match="--meta-every 1 and --meta-order virtual"):
        list(method.epoch(1))


@pytest.mark.parametrize("name", ["mlc", "emlc", "vri", "mslc"])
def test_the_other_choices_of_the_recipe(name: str, tiny: TaskAndTruth) -> None:
    method = make_method(name)
    recipe = replace(RECIPE, meta_every=2, meta_order="real", compile=True)
    method.start(tiny[0], recipe)
    logs = list(method.epoch(1))
    assert ["meta_loss" in log for log in logs[:4]] == [False, True, False, True]  # from step 5


# --- what the pieces are --------------------------------------------------------------------------------------------


def test_weights_are_normalised_or_zero() -> None:
    w = torch.tensor([0.0, 1.0, 3.0])
    assert normalize_weights(w).tolist() == [0, 0.25, 0.75]
    assert normalize_weights(torch.zeros(3)).tolist() == [0, 0, 0]


def test_a_batch_that_helps_nobody_moves_nothing(tiny: TaskAndTruth) -> None:
    """Labels turned to the least likely class: every gradient points away from the trusted ones."""
    method = L2RW()
    method.start(tiny[0], replace(RECIPE, weight_decay=0.0, momentum=0.0))
    trusted = method.meta_loader.draw()
    method.meta_loader = Fixed(trusted)  # type: ignore[assignment]
    for _ in range(60):
        method.step(trusted)
    wrong = method.net(trusted.x).argmin(dim=1)
    before = [p.detach().clone() for p in method.net.parameters()]
    log = method.step(Batch(trusted.views, wrong, trusted.rows))
    assert log["used"] == 0
    assert all(map(torch.equal, before, method.net.parameters()))


def test_columns_of_a_matrix() -> None:
    T = torch.tensor([[2.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    assert normalize_columns(T).tolist() == [[0.5, 0, 0.25], [0.5, 0, 0], [0, 0, 0.75]]


def test_without_a_step_of_its_matrix_mlc_wang_is_cross_entropy(tiny: TaskAndTruth) -> None:
    a, b = MLCWang(matrix_lr=0.0), make_method("ce")
    for method in (a, b):
        method.start(tiny[0], RECIPE)
        for t in range(2):
            list(method.epoch(t))
    for p, q in zip(a.net.parameters(), b.net.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_balanced_gradients_sum_to_zero() -> None:
    chance = torch.Generator().manual_seed(0)
    sure = 20.0 * (torch.arange(6) == 5)[:, None] * one_hot(torch.arange(6) % 5, 5)  # the last row: p_y = 1 - 1e-8
    p, y = (torch.randn(6, 5, generator=chance).double() + sure).softmax(1), torch.arange(6) % 5
    omega = torch.rand(6, 5, generator=chance).double()
    got = balance_gradient(omega * (p - one_hot(y, 5)), y)
    torch.testing.assert_close(got.sum(1), torch.zeros(6).double(), atol=1e-16, rtol=0)
    for i in range(6):
        others = [k for k in range(5) if k != y[i]]
        assert torch.equal(got[i, others], omega[i, others] * p[i, others])
        at_y = sum(omega[i, k] * p[i, k] for k in others) / (1 - p[i, y[i]])  # the paper's omega_y
        assert float(got[i, y[i]]) == pytest.approx(float(at_y * (p[i, y[i]] - 1)))
    torch.testing.assert_close(balance_gradient(0.7 * (p - one_hot(y, 5)), y), 0.7 * (p - one_hot(y, 5)))


def test_without_class_weights_gdw_is_mwnet(tiny: TaskAndTruth) -> None:
    """One step: V is trained by the same gradient; the classifier steps with the weights before, not after."""
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
    got = method.corrected(z, y, before)
    with torch.no_grad():
        for i in range(4):
            a = method.V(F.cross_entropy(z[i : i + 1], y[i : i + 1])[None])
            b = method.W(F.cross_entropy(z[i : i + 1], before[i].argmax()[None])[None])
            torch.testing.assert_close(got[i], a * given[i] + (1 - a) * (b * before[i] + (1 - b) * z[i].softmax(0)))
    steps: list[Any] = []
    monkeypatch.setattr(mslc, "bilevel_step", lambda *a: steps.append(a[6]) or bilevel_step(*a))
    list(method.epoch(1))
    assert method.correcting
    assert steps == [10 * method.lr] * len(steps) != [], "the published virtual step"
    torch.testing.assert_close(method.soft.sum(1), torch.ones(len(given)))


def test_tempting_labels() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert swap_every_other_label(z, torch.tensor([0, 0, 0, 1])).tolist() == [1, 0, 2, 1]


# --- MLNT -----------------------------------------------------------------------------------------------------------


def test_synthetic_labels_are_those_of_neighbours() -> None:
    chance = torch.Generator().manual_seed(0)
    h, y = torch.randn(20, 3, generator=chance), torch.arange(20)  # a label of its own each: an index
    got = synthesize_labels(h, y, 50, 0.5, 4, chance)
    assert got.shape == (50, 20)
    assert ((got != y).sum(1) == 10).all()  # exactly the share
    for i in range(20):
        nearest = sorted((j for j in range(20) if j != i), key=lambda j: float((h[i] - h[j]).norm()))[:4]
        assert set(got[:, i].tolist()) == {i, *nearest}
    assert torch.equal(synthesize_labels(h, y, 3, 0.0, 4, chance), y.expand(3, 20))
    assert synthesize_labels(h[:3], y[:3], 2, 1.0, 10, chance).shape == (2, 3)  # fewer than so many neighbours


def test_mlnt_without_fast_steps_is_distillation(tiny: TaskAndTruth) -> None:
    """CE plus KL towards the averaged weights, step by step; and made-up labels do not matter then."""
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
            wanted = teacher(batch.x).softmax(1)
        z = net(batch.x)
        kl = F.kl_div(z.log_softmax(1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        (F.cross_entropy(z, batch.y) + kl).backward()
        optimizer.step()
        torch.testing.assert_close(torch.as_tensor(log["consistency"]), kl.detach(), rtol=1e-4, atol=1e-6)
        for p, q in zip(method.net.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    for v, u in zip(method.teacher.state_dict().values(), teacher.state_dict().values(), strict=True):
        torch.testing.assert_close(v, u, rtol=1e-4, atol=1e-6)


def test_mlnt_without_made_up_labels_needs_one_update_only(tiny: TaskAndTruth) -> None:
    runs = []
    for updates in (1, 4):
        method = MLNT(updates=updates, share=0.0)
        method.start(tiny[0], RECIPE)
        list(method.epoch(1))
        runs.append(list(method.net.parameters()))
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_mlnt_predicts_as_its_net_in_the_warm_up(tiny: TaskAndTruth) -> None:
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


def test_ranks_average_the_statistics_of_a_teacher_too(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr("warpi.utils.distributed.average", lambda tensors: seen.extend(tensors))
    method = MLNT()
    method.start(tiny[0], RECIPE)
    settle(method, TrainingState())
    wanted = [b for net in (method.net, method.teacher) for b in net.buffers() if b.is_floating_point()]
    assert len(wanted) == 4
    assert {id(b) for b in wanted} == {id(b) for b in seen}


# --- features -------------------------------------------------------------------------------------------------------


def test_features_leave_the_network_as_it_is() -> None:
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
def test_features_of_tuned_networks(how: PassConfig) -> None:
    """Precision and parts are those of the network's own passes."""
    torch.manual_seed(0)
    net, x = configure_passes(MLP((7,), 4), how), torch.randn(8, 7)
    with torch.no_grad():
        z = last_layer(net, penultimate(net, x))
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, forward(net, x).z.detach())


def test_features_see_the_parts_that_logits_see() -> None:
    """BatchNorm's sets are the parts: unequal ones must be cut alike."""
    torch.manual_seed(0)
    net, x = configure_passes(resnet20((3, 8, 8), 4, width=4), PassConfig(accumulate=8)), torch.randn(50, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(last_layer(net, penultimate(net, x)), forward(net, x).z)
        with pytest.raises(UserError, match="a batch of 15 cannot be cut into 8 parts"):
            penultimate(net, x[:15])
    assert feature_size(net, (3, 8, 8)) == 16


def test_outside_training_features_are_not_cut() -> None:
    """As logits are not: BatchNorm without running statistics looks at what it is given there, too."""
    torch.manual_seed(0)
    net, x = MLP((7,), 4), torch.randn(3, 7)
    net.body[1] = nn.BatchNorm1d(128, track_running_stats=False)
    configure_passes(net, PassConfig(accumulate=2))
    with torch.no_grad(), evaluating([net]):
        torch.testing.assert_close(last_layer(net, penultimate(net, x)), net(x))
    assert feature_size(net, (7,)) == 128


@pytest.mark.parametrize("name", ["mlc", "vri", "emlc", "mlnt"])
def test_a_network_without_features(name: str, tiny: TaskAndTruth) -> None:
    method = make_method(name)
    with pytest.raises(UserError, match=r"Sequential has no method features\(x\)"):
        method.start(tiny[0], replace(RECIPE, net=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))))


def test_a_network_without_a_last_layer(tiny: TaskAndTruth) -> None:
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

    with pytest.raises(UserError, match="Whole has no last layer `fc`"):
        EMLC().start(tiny[0], replace(RECIPE, net=Whole()))
    with pytest.raises(UserError, match=r"allowed is \(2, D\)"):
        feature_size(Flat(), (3, 4))


class Flat(nn.Module):
    """Features that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        return x


# --- what is learned ------------------------------------------------------------------------------------------------


def accuracy(method: Method, task: TaskAndTruth) -> float:
    method.start(task[0], Recipe(epochs=12, lr=0.05, milestones=(0.75,)))
    return [record for record in train(method, *task) if record][-1]["test_acc"]


@pytest.mark.parametrize("averaging", [(), (0.9, 0.99, 0.999)])
def test_mlnt_averages_at_one_pace_or_two(averaging: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=r"averaging takes two shares .* or one, got"):
        MLNT(averaging=averaging)


def test_vri_without_hidden_layers_is_linear(tiny: TaskAndTruth) -> None:
    method = VRI(hidden=())
    method.start(tiny[0], RECIPE)
    assert [tuple(p.shape) for p in method.V.mean.parameters()] == [(10, 128 + 64), (10,)]
    assert all(float(log["loss"]) > 0 for log in method.epoch(0))
    with pytest.raises(UserError, match="hidden must be between 1 and"):
        VRI(hidden=(8, 0))


@pytest.fixture(scope="module")
def half_wrong(digits: Dataset) -> tuple[TaskAndTruth, float]:
    task = make_task(digits, "symmetric:0.5", meta=50, seed=1)
    return task, accuracy(make_method("ce"), task)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("l2rw", {}),
        ("mlc_wang", {"matrix_lr": 30.0}),
        ("mlc", {}),
        ("mslc", {}),
        ("mlnt", {"updates": 3}),
        ("gdw", {}),
        ("emlc", {}),
        ("vri", {"hidden": (128, 64), "output": "tanh"}),
    ],
)
def test_beats_cross_entropy_where_its_paper_says_so(
    name: str, options: dict[str, Any], half_wrong: tuple[TaskAndTruth, float]
) -> None:
    assert set(ALL) <= METHODS.keys()
    task, ce = half_wrong
    assert accuracy(make_method(name, **options), task) > ce + 3


def test_l2rw_gives_wrong_labels_less_weight(digits: Dataset) -> None:
    task, truth = make_task(digits, "pair:0.4", meta=50, seed=1)
    method = L2RW()
    accuracy(method, (task, truth))
    assert truth.clean is not None
    wrong, right = [], []
    for _ in range(10):
        batch = method.loader.draw()
        w, _ = method.weigh(forward(method.net, batch.x), batch.y)
        bad = truth.clean[batch.rows] != batch.y
        wrong.append(float(w[bad].mean()))
        right.append(float(w[~bad].mean()))
    assert sum(wrong) < 0.3 * sum(right)
