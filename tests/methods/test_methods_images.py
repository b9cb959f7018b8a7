"""SOP, SOP+, ProMix and DISC: their steps and selections against naive loops."""

import math
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.mixup import draw_selected, mixup_selected
from warpi.methods.disc import DISC
from warpi.methods.dividemix import DivideMix
from warpi.methods.promix import ProMix
from warpi.methods.registry import make_method
from warpi.methods.sop import SOPPlus, absorb, given_loss, noise_error
from warpi.training.method import Method, add_trusted, evaluating
from warpi.training.outputs import predict_rows
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth

RECIPE = Recipe(net="conv4", epochs=6, batch_size=16, meta_batch_size=6, lr=0.05)
TaskAndTruth = tuple[Task, Truth]
M = TypeVar("M", bound=Method)


def started(method: M, task: Task, recipe: Recipe = RECIPE) -> M:
    method.start(task, recipe)
    return method


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(z: Tensor, target: Tensor) -> float:
    """Cross-entropy of one example, written out."""
    log_p = [float(a) - math.log(sum(math.exp(float(b)) for b in z)) for a in z]
    return -sum(float(t) * a for t, a in zip(target, log_p, strict=True))


# --- SOP ------------------------------------------------------------------------------------------------------------


def sop_loss(z: Tensor, y: int, u: float, v: list[float]) -> tuple[float, float]:
    """Both terms of one example's loss, written out: -log q_y, and the squared error over classes other than y."""
    p = [math.exp(float(a)) / sum(math.exp(float(b)) for b in z) for a in z]
    q = [max(1e-4, p[k] + (u**2 if k == y else -(v[k] ** 2))) for k in range(len(p))]
    predicted = max(range(len(p)), key=lambda k: p[k])
    error = sum(((k == predicted) - v[k] ** 2) ** 2 for k in range(len(p)) if k != y)
    return -math.log(max(1e-4, q[y] / sum(q))), error


def test_loss_of_sop_agrees_with_a_loop() -> None:
    z, y = 3 * random(7, 4), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    u, v = random(7, 1, seed=1), random(7, 4, seed=2)
    losses = given_loss(absorb(z, y, u, v), y), noise_error(z, y, v)
    for i in range(7):
        expected = sop_loss(z[i], int(y[i]), float(u[i]), v[i].tolist())
        assert [float(loss[i]) for loss in losses] == pytest.approx(expected)


def test_u_learns_from_the_first_term_and_v_from_the_second() -> None:
    """Against finite differences of the terms, written out."""
    z, y = 3 * random(5, 4), torch.tensor([0, 1, 2, 3, 0])
    u, v = random(5, 1, seed=1), random(5, 4, seed=2)
    wanted = u.clone().requires_grad_(), v.clone().requires_grad_()
    loss = given_loss(absorb(z, y, *wanted), y).sum() + noise_error(z, y, wanted[1]).sum()
    du, dv = torch.autograd.grad(loss, wanted)
    e = 1e-6
    for i in range(5):
        label, at_u, at_v = int(y[i]), float(u[i]), v[i].tolist()
        ends = [sop_loss(z[i], label, at_u + side * e, at_v)[0] for side in (1, -1)]
        assert float(du[i]) == pytest.approx((ends[0] - ends[1]) / (2 * e), abs=1e-6)
        for k in range(4):
            moved = [[a + side * e * (j == k) for j, a in enumerate(at_v)] for side in (1, -1)]
            ends = [sop_loss(z[i], label, at_u, each)[1] for each in moved]
            assert float(dv[i, k]) == pytest.approx((ends[0] - ends[1]) / (2 * e), abs=1e-6)


def test_examples_without_variables_have_the_plain_loss() -> None:
    z, y = random(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    u, v = torch.full((4, 1), 0.5).double(), torch.full((4, 4), 0.5).double()
    plain = torch.nn.functional.cross_entropy(z, y, reduction="none")
    torch.testing.assert_close(given_loss(absorb(z, y, u, v), y)[4:], plain[4:])
    assert not torch.allclose(given_loss(absorb(z, y, u, v), y)[:4], plain[:4])
    assert noise_error(z, y, v)[4:].tolist() == [0, 0]


@pytest.mark.parametrize("use_trusted", [False, True])
@pytest.mark.parametrize("name", ["sop", "sop_plus"])
def test_step_of_sop_moves_the_variables_of_its_batch(name: str, use_trusted: bool, pictures: TaskAndTruth) -> None:
    """By the learning rate times 300 / (128 epochs) times the gradient of the example's own terms."""
    options = {"balance": 0.0} if name == "sop_plus" else {}  # that term belongs to the whole batch
    method: Any = make_method(name, initial=0.3, lr_u=0.5, lr_v=0.7, use_trusted=use_trusted, **options)
    started(method, pictures[0])
    u, v = method.u.clone(), method.v.clone()
    batch = method.loader.draw()
    (x, *_), y = add_trusted(method, batch)
    z = method.net(torch.cat(add_trusted_again(method, batch)) if name == "sop_plus" else x).detach()[: len(y)]
    started(method, pictures[0])  # with the weights, running statistics and trusted batches of the beginning
    method.step(batch)
    others = torch.ones(len(u), dtype=torch.bool)
    others[batch.rows] = False
    assert torch.equal(method.u[others], u[others])
    assert torch.equal(method.v[others], v[others])
    for i, row in enumerate(batch.rows.tolist()):
        own_u, own_v = u[row : row + 1].clone().requires_grad_(), v[row : row + 1].clone().requires_grad_()
        at, label = z[i : i + 1], batch.y[i : i + 1]
        loss = given_loss(absorb(at, label, own_u, own_v), label).sum() + noise_error(at, label, own_v).sum()
        du, dv = torch.autograd.grad(loss, (own_u, own_v))
        torch.testing.assert_close(method.u[row], u[row] - 0.5 * 300 / (128 * 6) * du[0], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(method.v[row], v[row] - 0.7 * 300 / (128 * 6) * dv[0], rtol=1e-3, atol=1e-5)


def add_trusted_again(method: Method, batch: Batch) -> tuple[Tensor, ...]:
    """The views of a batch, with the trusted batch that the first step draws."""
    if not method.uses_trusted:
        return batch.views
    trusted = method.meta_loader.read(0)
    return tuple(torch.cat(pair) for pair in zip(batch.views, trusted.views, strict=True))


def test_variables_grow_only_if_the_network_contradicts_the_label() -> None:
    y = torch.tensor([0, 0])
    z = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])  # the first label is predicted, the second is not
    u, v = torch.full((2, 1), 1e-8), torch.full((2, 3), 1e-8)
    for _ in range(200):
        u.requires_grad_()
        v.requires_grad_()
        loss = given_loss(absorb(z, y, u, v), y).sum() + noise_error(z, y, v).sum()
        du, dv = torch.autograd.grad(loss, (u, v))
        u, v = (u - 10 / 128 * du).detach(), (v - 10 / 128 * dv).detach()
    assert u[0].abs() < 1e-6
    assert v[0].abs().max() < 1e-6
    assert u[1].square() > 0.5
    assert v[1, 1].square() > 0.5
    assert v[1, 2].abs() < 1e-6
    assert absorb(z, y, u, v).argmax(1).tolist() == [0, 0]


def test_loss_of_sop_plus_agrees_with_a_loop(pictures: TaskAndTruth) -> None:
    method = started(SOPPlus(initial=0.3, consistency=0.7, balance=0.2), pictures[0])
    batch = method.loader.draw()
    u, v = method.u[batch.rows], method.v[batch.rows]
    z, z_strong = method.net(torch.cat(batch.views)).detach().chunk(2)
    method = started(method, pictures[0])
    n, k = z.shape
    total = 0.0
    mean = [0.0] * k
    for i in range(n):
        first, second = sop_loss(z[i], int(batch.y[i]), float(u[i]), v[i].tolist())
        p = z[i].softmax(0)
        total += (first + second + 0.7 * (loss_of(z_strong[i], p) - loss_of(z[i], p))) / n
        q = absorb(z[i : i + 1], batch.y[i : i + 1], u[i : i + 1], v[i : i + 1])[0]
        mean = [a + float(b) / n for a, b in zip(mean, q, strict=True)]
    total += 0.2 * -sum(math.log(a) for a in mean) / k
    assert float(method.step(batch)["loss"]) == pytest.approx(total, rel=1e-4)


# --- mixup among selected examples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3, 7])
def test_drawn_examples_are_the_selected_ones_equally_often(n: int) -> None:
    selected = torch.zeros(7)
    selected[torch.randperm(7, generator=torch.Generator().manual_seed(n))[:n]] = 1
    drawn = draw_selected(selected, torch.Generator().manual_seed(1))
    counts = torch.bincount(drawn, minlength=7)
    assert len(drawn) == 7
    if n:
        assert (counts > 0).tolist() == (selected > 0).tolist()
        assert counts[selected > 0].max() - counts[selected > 0].min() <= 1


def test_mixtures_contain_selected_examples_only() -> None:
    generator = torch.Generator().manual_seed(0)
    selected = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    x = torch.eye(5)
    mixed, q = mixup_selected(x, x, selected, 4.0, generator, [5])
    assert torch.equal(mixed, q)
    assert not mixed[:, selected == 0].any()
    torch.testing.assert_close(mixed.sum(1), torch.ones(5))
    assert mixed.amax(1).min() >= 0.5


# --- ProMix ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_promix_selects_the_same_number_of_small_losses_in_each_class(rho: float, pictures: TaskAndTruth) -> None:
    method = started(ProMix(rho=rho), pictures[0])
    train_split = pictures[0].train
    method.select()
    number = math.ceil(rho * len(train_split) / 3)
    for i, net in enumerate(method.nets):
        rows, z = predict_rows(net, train_split)
        loss = {int(row): loss_of(z[j], torch.eye(3)[train_split.y[row]]) for j, row in enumerate(rows)}
        for k in range(3):
            members = sorted((row for row in loss if train_split.y[row] == k), key=lambda row: loss[row])
            chosen = {row for row in members if method.small_loss[i, row] > 0}
            assert chosen == set(members[:number])


def test_promix_adds_labels_that_are_predicted_with_confidence(pictures: TaskAndTruth) -> None:
    method = started(ProMix(tau=0.8, use_trusted=True), pictures[0])
    batch = method.loader.draw()
    _, y = add_trusted(method, batch)
    p = (4 * random(2, len(y), 3).float()).softmax(2)
    p[:, ::3] = torch.tensor([0.9, 0.05, 0.05])
    method.small_loss.copy_(random(2, method.small_loss.shape[1], seed=1) < 0.3)
    selected = method.match(batch, y, p)
    for k in (0, 1):
        for i in range(len(y)):
            trusted = i >= len(batch.y)
            expected = trusted or method.small_loss[k, batch.rows[i]] > 0 or p[k, i, y[i]] > 0.8
            assert bool(selected[k, i]) == bool(expected)
    assert 0 < selected[:, : len(batch.y)].mean() < 1


@pytest.mark.parametrize("most", [0.3, 0.6, 1.0])
def test_promix_guesses_labels_by_agreement(most: float, pictures: TaskAndTruth) -> None:
    method = started(ProMix(tau=0.6, most=most), pictures[0])
    n = 40
    p = (6 * random(2, n, 3).float()).softmax(2)
    p[1, ::2] = p[0, ::2] * 0.99 + 0.01 / 3
    selected = (random(2, n, seed=3) < 0.25).float()
    reliable = method.add_guesses(selected, p)
    for k in (0, 1):
        chosen = {i for i in range(n) if selected[k, i] > 0}
        agreeing = [
            i
            for i in range(n)
            if i not in chosen and p[0, i].argmax() == p[1, i].argmax() and (p[:, i].amax(1) > 0.6).all()
        ]
        agreeing.sort(key=lambda i: -float(p[:, i].amax(1).mean()))
        room = max(0, int(most * n) - len(chosen))
        assert {i for i in range(n) if reliable[k, i] > 0} == chosen | set(agreeing[:room])
        assert most < 1 or agreeing


def test_loss_of_promix_agrees_with_a_loop(pictures: TaskAndTruth) -> None:
    """Margins, both heads and both views; without mixup, whose passes would need the drawn pairs."""
    method = started(ProMix(debias_loss=0.6, debias_labels=0.9, temperature=0.5), pictures[0])
    batch = method.loader.draw()
    n = len(batch.y)
    method.mean_p[0] = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]])
    z = method.two_heads[0](torch.cat(batch.views)).unflatten(1, (2, -1))
    selected = (torch.arange(n) % 2 == 0).float()
    reliable = (torch.arange(n) % 4 != 3).float()  # every fourth label is guessed, every fourth is unreliable
    weak, strong = z.detach().chunk(2)
    log_pi, log_other = method.mean_p[0].log()
    for w, weight_u in ((0.0, 0.0), (0.0, 0.7)):
        method.w.fill_(w)
        method.weight_u.fill_(weight_u)
        of_labels, of_others = [], []
        for i in range(n):
            if reliable[i]:
                guess = int((weak[i, 0] - 0.9 * log_pi).argmax())
                target = torch.eye(3)[batch.y[i] if selected[i] else guess]
                of_labels.append(sum(loss_of(weak[i, head] + 0.6 * log_pi, target) for head in (0, 1)))
            else:
                soft = (weak[i, 0] - 0.9 * log_other).softmax(0) ** 2
                of_others.append(loss_of(weak[i, 1] + 0.6 * log_other, soft / soft.sum()))
        expected = sum(of_labels) / len(of_labels) + weight_u * sum(of_others) / len(of_others)
        z = method.two_heads[0](torch.cat(batch.views)).unflatten(1, (2, -1))
        with torch.no_grad():
            z.copy_(torch.cat([weak, strong]))
        loss = method.learn(0, batch.x, batch.y, z, selected, reliable, [n])
        assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_strong_views_and_mixtures_of_promix_have_the_weight_w(pictures: TaskAndTruth) -> None:
    method = started(ProMix(debias_loss=0.0, alpha=0.0, lambda_u=0.0), pictures[0])
    batch = method.loader.draw()
    n = len(batch.y)
    one = torch.zeros(n)
    one[3] = 1.0  # a mixture of one example is the example itself, repeated
    method.w.fill_(0.25)
    z = method.two_heads[0](torch.cat(batch.views)).unflatten(1, (2, -1))
    weak, strong = z.detach().chunk(2)
    alone = method.two_heads[0](batch.x[3:4].expand(n, -1, -1, -1)).unflatten(1, (2, -1)).detach()[0]
    target = torch.eye(3)[batch.y[3]]
    parts = [sum(loss_of(a[head], target) for head in (0, 1)) for a in (weak[3], strong[3], alone)]
    loss = method.learn(0, batch.x, batch.y, z, one, one, [n])
    assert float(loss) == pytest.approx(parts[0] + 0.25 * (parts[1] + parts[2]), rel=1e-4)


def test_mean_predictions_of_promix_follow_each_group(pictures: TaskAndTruth) -> None:
    method = started(ProMix(follow=1.0), pictures[0])
    steps = 6 * len(method.loader)
    assert method.kept == pytest.approx(1 - 1 / steps)
    method.kept = 0.9
    p = (3 * random(2, 8, 3).float()).softmax(2)
    reliable = torch.tensor([[1.0, 0, 1, 0, 1, 0, 0, 1], [1.0] * 8])
    method.follow_means(p, reliable)
    for k in (0, 1):
        for group, wanted in ((0, 1.0), (1, 0.0)):
            members = [p[k, i] for i in range(8) if reliable[k, i] == wanted]
            mean = torch.stack(members).mean(0) if members else torch.full((3,), 1 / 3)
            torch.testing.assert_close(method.mean_p[k, group], 0.9 / 3 + 0.1 * mean)


def test_phases_of_promix(pictures: TaskAndTruth) -> None:
    method = started(
        ProMix(warm_up=2.0, ramp_up=0.4, guessing=0.3, lambda_u=0.1), pictures[0], replace(RECIPE, epochs=10)
    )
    seen = []
    for t in range(10):
        method.before_epoch(t)
        seen.append((method.warming, method.is_guessing, float(method.w), float(method.weight_u)))
    assert [s[0] for s in seen] == [True] * 2 + [False] * 8
    assert [s[1] for s in seen] == [False] * 7 + [True] * 3
    assert [s[2] for s in seen] == pytest.approx([0, 0.25, 0.5, 0.75] + [1.0] * 6)
    assert [s[3] for s in seen] == pytest.approx([0.1 * t / 8 for t in range(8)] + [0, 0])


def test_primary_heads_of_promix_predict(pictures: TaskAndTruth) -> None:
    method = started(ProMix(), pictures[0])
    x = next(iter(pictures[0].train.batches(5))).x
    with torch.no_grad(), evaluating(method.two_heads):
        for net, module in zip(method.nets, method.two_heads, strict=True):
            torch.testing.assert_close(module(x)[:, :3], net(x))
            assert not torch.allclose(module(x)[:, 3:], net(x))
    before = method.predict(x)
    with torch.no_grad():
        method.two_heads[0].head.weight.add_(1.0)
    assert torch.equal(method.predict(x), before)


# --- DISC -----------------------------------------------------------------------------------------------------------


def test_sets_of_disc_agree_with_a_loop(pictures: TaskAndTruth) -> None:
    method = started(DISC(memory=0.8, sigma=0.2, cap=0.7), pictures[0], replace(RECIPE, epochs=200))
    y = pictures[0].train.y
    n = len(y)
    assert method.thresholds.allclose(torch.tensor(1 / n))
    method.p.copy_((4 * random(2, n, 3)).softmax(2))
    method.thresholds.copy_(0.2 + 0.5 * random(2, n, seed=1))
    tau = method.thresholds.clone()
    method.divide()
    seen = set()
    for i in range(n):
        passes = [bool(method.p[h, i, y[i]] > tau[h, i]) for h in (0, 1)]
        mean = method.p[:, i].mean(0)
        kind = {2: "clean", 1: "hard", 0: ""}[sum(passes)]
        if not kind and mean.max() > min(float(tau[:, i].mean()) + 0.2, 0.7):
            kind = "purified"
        seen.add(kind)
        for name in ("clean", "hard", "purified"):
            assert bool(getattr(method, name)[i]) == (name == kind)
        assert int(method.labels[i]) == (int(mean.argmax()) if kind == "purified" else int(y[i]))
        for h in (0, 1):
            assert float(method.thresholds[h, i]) == pytest.approx(
                0.8 * float(tau[h, i]) + 0.2 * float(method.p[h, i].max())
            )
    assert seen == {"clean", "hard", "purified", ""}


def test_loss_of_disc_agrees_with_a_loop(pictures: TaskAndTruth) -> None:
    """Without mixup: with alpha 0 a mixture is one example; here nothing but the trusted batch could be mixed."""
    method = started(DISC(lambda_h=0.5, q=0.7), pictures[0])
    batch = method.loader.draw()
    method.warming = False
    method.clean[batch.rows[::3]] = 1
    method.hard[batch.rows[1::3]] = 1
    weak, strong = method.net(torch.cat(batch.views)).detach().chunk(2)
    method = started(method, pictures[0])
    method.warming = False
    method.clean[batch.rows[::3]] = 1
    method.hard[batch.rows[1::3]] = 1
    method.mixed_loss = lambda *_: torch.zeros(())  # type: ignore[method-assign]
    total = 0.0
    for i, label in enumerate(batch.y.tolist()):
        ce = [loss_of(z[i], torch.eye(3)[label]) for z in (weak, strong)]
        total += sum(ce) if i % 3 == 0 else 0.0
        total += 0.5 * sum((1 - math.exp(-a) ** 0.7) / 0.7 for a in ce) if i % 3 == 1 else 0.0
    log = method.step(batch)
    assert float(log["loss"]) == pytest.approx(total / len(batch.y), rel=1e-4)
    for h, z in enumerate((weak, strong)):
        torch.testing.assert_close(method.p[h, batch.rows], z.softmax(1), rtol=1e-4, atol=1e-5)


def test_mixtures_of_disc_have_corrected_labels(pictures: TaskAndTruth) -> None:
    method = started(DISC(alpha=0.0), pictures[0])
    batch = method.loader.draw()
    one = torch.zeros(len(batch.y))
    one[2] = 1.0
    labels = (batch.y + 1) % 3
    x = [view[2:3].expand(len(one), -1, -1, -1) for view in batch.views]
    z = method.net(torch.cat(x)).detach().chunk(2)
    expected = sum(loss_of(a[0], torch.eye(3)[labels[2]]) for a in z)
    method = started(method, pictures[0])
    assert float(method.mixed_loss(batch.views, labels, one, [len(one)]).detach()) == pytest.approx(expected, rel=1e-4)


def test_thresholds_of_disc_follow_faster_in_shorter_runs(pictures: TaskAndTruth) -> None:
    """A twentieth of a run moves them by the same amount, whatever its length."""
    ends = []
    for epochs in (20, 200):
        method = started(DISC(memory=0.9), pictures[0], replace(RECIPE, epochs=epochs))
        method.p.fill_(0.4)
        for _ in range(epochs // 20):
            method.divide()
        ends.append(method.thresholds)
    torch.testing.assert_close(*ends)


# --- all ------------------------------------------------------------------------------------------------------------

NAMES = ["sop", "sop_plus", "promix", "disc"]


@pytest.mark.parametrize("name", [*NAMES, "dividemix"])
@pytest.mark.parametrize("augment", ["weak", "strong"])
@pytest.mark.parametrize("use_trusted", [False, True])
def test_trusted_examples_are_used_only_if_wanted(
    name: str, augment: Any, use_trusted: bool, pictures: TaskAndTruth
) -> None:
    recipe = replace(RECIPE, epochs=2, augment=augment)
    method = started(make_method(name, use_trusted=use_trusted), pictures[0], recipe)
    for t in (0, 1):
        list(method.epoch(t))
    assert (method.meta_loader.count > 0) == use_trusted
    assert method.uses_trusted == use_trusted
    alone = started(make_method(name, use_trusted=use_trusted), replace(pictures[0], meta=None))
    assert len(list(alone.epoch(0))) == len(alone.loader)
    assert not alone.uses_trusted


def test_trusted_examples_of_dividemix_keep_their_labels(
    pictures: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = started(DivideMix(use_trusted=True), pictures[0])
    method.clean.fill_(0.2)
    method.warming = False
    batch, trusted = method.loader.draw(), method.meta_loader.read(0)
    seen: list[Any] = []
    match = method.match
    monkeypatch.setattr(method, "match", lambda *given: seen.append(given) or match(*given))
    log = method.step(batch)
    n = len(batch.y)
    for _, weak, _, y, w, *_, parts in seen:
        assert [len(view) for view in weak] == [len(y)] * 2
        assert y.argmax(1).tolist() == [*batch.y.tolist(), *trusted.y.tolist()]
        torch.testing.assert_close(weak[1][n:], trusted.views[1])
        assert w.tolist() == pytest.approx([0.2] * n + [1.0] * len(trusted.y))
        assert parts == [n, len(trusted.y)]
    assert len(seen) == 2
    assert log["labelled"] == 0, "trusted examples do not count"


def first_losses(name: str, task: Task, **settings: Any) -> list[float]:
    """The losses of the first steps after the warm-up, which is left out."""
    method = started(make_method(name), task, replace(RECIPE, epochs=2, **settings))
    method.before_epoch(1)
    return [float(method.step(method.loader.draw())["loss"]) for _ in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_losses_in_bf16_are_close(name: str, pictures: TaskAndTruth) -> None:
    wanted = first_losses(name, pictures[0])
    assert first_losses(name, pictures[0], precision="bf16") == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("precision", ["32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_passes_with_two_heads_can_be_traced(precision: str, pictures: TaskAndTruth) -> None:
    wanted = first_losses("promix", pictures[0], precision=precision)
    got = first_losses("promix", pictures[0], precision=precision, compile=True)
    assert got == pytest.approx(wanted, rel=1e-4 if precision == "32" else 0.02)
