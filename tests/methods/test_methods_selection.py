"""Sample selection, MentorNet, SELFIE and ELR, compared with special cases and naive loops."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy
from warpi.functional.selection import (
    disagreement,
    follow_percentile,
    forget_rate,
    keep_at_random,
    selected_mean,
    self_paced,
    small_loss,
    steady_label,
)
from warpi.methods.co_teaching import CoTeaching
from warpi.methods.co_teaching_plus import CoTeachingPlus
from warpi.methods.decoupling import Decoupling
from warpi.methods.elr import ELR, ELRPlus, memory_regularizer
from warpi.methods.jocor import JoCoR, divergence
from warpi.methods.mentornet import MentorNetDD, MentorNetPD
from warpi.methods.registry import make_method
from warpi.methods.selfie import SELFIE
from warpi.training.engine import train
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth

RECIPE = Recipe(epochs=4, batch_size=32, meta_batch_size=16, lr=0.05, seed=7)
BARE = replace(RECIPE, momentum=0.0, weight_decay=0.0)  # a step is the learning rate times the gradient
TaskAndTruth = tuple[Task, Truth]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(method: Method, task: Task, recipe: Recipe = RECIPE) -> Any:
    method.start(task, recipe)
    return method


def trained(method: Method, task: Task, recipe: Recipe = RECIPE) -> Any:
    started(method, task, recipe)
    list(train(method, task))
    return method


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def train_ce(task: Task, recipe: Recipe = RECIPE, number: int = 0) -> nn.Module:
    """Network `number`, trained with cross-entropy."""
    ce = started(make_method("ce"), task, recipe)
    ce.net.load_state_dict(recipe.make_net(task.shape, task.n_classes, number).state_dict())
    list(train(ce, task))
    return ce.net


def assert_alike(net: nn.Module, other: nn.Module) -> None:
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def make_nets_equal(method: Any) -> None:
    method.nets[1].load_state_dict(method.nets[0].state_dict())


def first_batch(method: Method, t: int = 0) -> Batch:
    method.before_epoch(t)
    return next(method.loader.epoch(t))


# --- weights of examples ----------------------------------------------------------------------------------------------


def test_forget_rate_rises_to_its_final_value() -> None:
    assert [forget_rate(t, 0.4, 4) for t in range(6)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert [forget_rate(t, 0.4, 2, exponent=2) for t in range(4)] == pytest.approx([0, 0.1, 0.4, 0.4])
    assert forget_rate(0, 0.4, 0) == 0.4
    assert forget_rate(3, 0.0, 10) == 0


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("some", [False, True])
def test_small_loss_agrees_with_a_loop(rate: float, some: bool) -> None:
    for seed in range(20):
        losses = torch.rand(17, generator=rng(seed)).mul(8).round()  # with ties
        among = (torch.rand(17, generator=rng(99 + seed)) < 0.4).float() if some else torch.ones(17)
        candidates = [i for i in range(17) if among[i]]
        expected = [0.0] * 17
        for _ in range(max(1, round((1 - rate) * len(candidates)))):
            if left := [i for i in candidates if not expected[i]]:
                expected[min(left, key=lambda i: losses[i])] = 1.0
        assert small_loss(losses, torch.tensor(rate), among if some else None).tolist() == expected


def test_selection_from_an_empty_set() -> None:
    assert small_loss(torch.rand(5), torch.tensor(0.2), torch.zeros(5)).sum() == 0
    assert selected_mean(torch.rand(5), torch.zeros(5)) == 0


def test_selected_mean_and_disagreement() -> None:
    losses, w = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert selected_mean(losses, w) == 3
    assert selected_mean(losses, w, least=4) == 1.5
    assert disagreement(torch.eye(3), torch.eye(3)[[0, 2, 2]]).tolist() == [0, 1, 0]


def test_self_paced_weights() -> None:
    losses, threshold = torch.tensor([0.0, 1.0, 1.5, 2.0, 3.0, 9.0]), torch.tensor(1.0)
    for gamma in (0.0, 0.5, 2.0, math.inf):
        expected = [
            1.0 if x <= 1 or gamma == math.inf else 0.0 if gamma == 0 else max(0.0, 1 - (x - 1) / gamma)
            for x in losses.tolist()
        ]
        assert self_paced(losses, threshold, torch.tensor(gamma)).tolist() == pytest.approx(expected)
    assert self_paced(losses, threshold, torch.tensor(0.0)).tolist() == [1, 1, 0, 0, 0, 0]  # a step function


def test_follow_percentile_agrees_with_a_loop() -> None:
    average, expected = torch.tensor(-1.0), -1.0
    for seed in range(5):
        losses = torch.rand(21, generator=rng(seed))
        follow_percentile(average, losses, 0.7, 0.9)
        (new,) = (x for x in losses.tolist() if sum(y < x for y in losses.tolist()) == 14)
        expected = new if seed == 0 else 0.9 * expected + 0.1 * new
    assert average.item() == pytest.approx(expected)


def test_keep_at_random() -> None:
    generator = rng()
    drawn = torch.stack([keep_at_random(40, torch.tensor(0.25), generator) for _ in range(300)])
    assert bool((drawn.sum(1) == 30).all())
    assert bool(((drawn.mean(0) - 0.75).abs() < 0.12).all())
    assert keep_at_random(40, torch.tensor(0.0), generator).sum() == 40


def test_steady_label_agrees_with_a_loop() -> None:
    history = torch.randint(-1, 3, (200, 3), generator=rng())
    steady, unsure = steady_label(history, 4)
    for row, label, f in zip(history.tolist(), steady.tolist(), unsure.tolist(), strict=True):
        counts = Counter(row)
        if -1 in counts:
            assert f == 1
        else:
            assert counts[label] == max(counts.values())
            expected = -sum(n / 3 * math.log(n / 3) for n in counts.values()) / math.log(4)
            assert f == pytest.approx(expected, abs=1e-6)


# --- two networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        CoTeaching(forget_rate=0.0),
        JoCoR(forget_rate=0.0, agreement=0.0),
        Decoupling(warm_up=1.0),
        ELRPlus(strength=0.0, alpha=0.0),
    ],
    ids=repr,
)
def test_two_runs_of_cross_entropy_are_a_special_case(method: Method, tiny: TaskAndTruth) -> None:
    trained(method, tiny[0])
    for number, net in enumerate(method.nets):
        assert_alike(net, train_ce(tiny[0], number=number))


@pytest.mark.parametrize(
    "method", [CoTeaching(), CoTeachingPlus(warm_up=0.0), JoCoR(), SELFIE(warm_up=0.0)], ids=lambda m: type(m).__name__
)
def test_forget_rate_replaces_the_noise_rate(method: Any, tiny: TaskAndTruth) -> None:
    task = tiny[0]
    assert task.noise_rate is not None
    with pytest.raises(UserError, match="noise rate"):
        replace(method).start(replace(task, noise_rate=None), RECIPE)
    known = trained(replace(method), task)
    by_hand = trained(replace(method, forget_rate=task.noise_rate), replace(task, noise_rate=None))
    other = trained(replace(method, forget_rate=0.9), task)
    assert known.rate.item() == by_hand.rate.item() == pytest.approx(task.noise_rate)
    assert other.rate.item() == pytest.approx(0.9)
    assert all(map(torch.equal, weights(known.net), weights(by_hand.net)))
    assert not any(map(torch.equal, weights(known.net), weights(other.net)))
    with pytest.raises(UserError, match=r"forget_rate must be between 0 and 1, got 1\.5"):
        replace(method, forget_rate=1.5)


@pytest.mark.parametrize("name", ["co_teaching", "co_teaching_plus", "decoupling", "jocor"])
def test_equal_networks_are_refused(name: str, tiny: TaskAndTruth, tmp_path: Path) -> None:
    """All networks are copies of a given module, and these methods would keep them equal."""
    task, truth = tiny
    net = train_ce(task)
    save_file(net.state_dict(), tmp_path / "all.safetensors")
    for given in ({"net": net}, {"weights": str(tmp_path / "all.safetensors")}):
        method = started(make_method(name), task, replace(RECIPE, **given))
        with pytest.raises(UserError, match=r"needs 2 networks that start with different weights.*pass a function"):
            method.check_nets_differ()
        _ = [None for _ in train(method, task, truth)]
        assert_alike(*method.nets)  # the reason for the error
    for other in (
        replace(RECIPE),
        replace(RECIPE, net=lambda shape, k: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), k))),
        replace(RECIPE, net=nn.Sequential(nn.Flatten(), nn.Dropout(0.1), net)),  # dropout makes them differ
    ):
        started(make_method(name), task, other).check_nets_differ()


@pytest.mark.parametrize("name", ["dividemix", "elr_plus", "limit"])
def test_equal_networks_are_accepted_if_they_diverge(name: str, tiny: TaskAndTruth) -> None:
    task, truth = tiny
    method = started(make_method(name), task, replace(RECIPE, net=train_ce(task)))
    method.check_nets_differ()
    _ = [None for _ in train(method, task, truth)]
    with pytest.raises(AssertionError):
        assert_alike(*method.nets)


def test_share_left_out_rises(tiny: TaskAndTruth) -> None:
    method = started(CoTeaching(forget_rate=0.4), tiny[0])  # T_k is 10 epochs, capped at half of the 4 epochs
    values = []
    for t in range(4):
        method.before_epoch(t)
        values.append(method.rate.item())
    assert values == pytest.approx([0, 0.2, 0.4, 0.4])


def test_co_teaching_plus_starts_as_co_teaching(tiny: TaskAndTruth) -> None:
    methods = [started(make(forget_rate=0.4), tiny[0]) for make in (CoTeaching, CoTeachingPlus)]
    for t, same in ((0, True), (1, True), (2, False)):  # the warm-up is half of the 4 epochs
        for method in methods:
            list(method.epoch(t))
        assert all(map(torch.equal, *(weights(method.net) for method in methods))) == same


@pytest.mark.parametrize("plus", [False, True])
def test_step_of_co_teaching_agrees_with_a_loop(plus: bool, tiny: TaskAndTruth) -> None:
    """Each network is updated on the examples with the smallest losses in the other network only."""
    method: Any = CoTeachingPlus(warm_up=0.0) if plus else CoTeaching()
    started(method, tiny[0], BARE)
    list(method.epoch(0))  # so that the losses are informative
    batch = first_batch(method, 3)
    logits = [net(batch.x).detach() for net in method.nets]
    rows = [i for i in range(32) if not plus or logits[0][i].argmax() != logits[1][i].argmax()]
    keep = max(1, round((1 - method.rate.item()) * len(rows)))
    assert 0 < keep < len(rows) <= 32
    easy = [sorted(rows, key=lambda i: F.cross_entropy(z[i], batch.y[i]).item())[:keep] for z in logits]
    assert set(easy[0]) != set(easy[1])

    expected = []
    for net, chosen in zip(method.nets, reversed(easy), strict=True):
        z = net(batch.x)
        loss = sum(F.cross_entropy(z[i], batch.y[i]) for i in chosen) / keep
        grads = torch.autograd.grad(loss, list(net.parameters()))
        expected.append([p.detach() - 0.05 * g for p, g in zip(net.parameters(), grads, strict=True)])
    method.step(batch)
    for net, after in zip(method.nets, expected, strict=True):
        for p, q in zip(net.parameters(), after, strict=True):
            torch.testing.assert_close(p.detach(), q)


@pytest.mark.parametrize(
    "method", [Decoupling(warm_up=0.0), CoTeachingPlus(warm_up=0.0)], ids=lambda m: type(m).__name__
)
def test_nothing_is_learned_without_disagreement(method: Any, tiny: TaskAndTruth) -> None:
    started(method, tiny[0], BARE)
    make_nets_equal(method)
    before = weights(method.net)
    logs = list(method.epoch(0))
    assert all(log["loss"] == 0 == log["disagreement"] for log in logs)
    for net in method.nets:
        assert all(map(torch.equal, before, weights(net)))


def test_decoupling_agrees_with_a_loop(tiny: TaskAndTruth) -> None:
    method = started(Decoupling(warm_up=0.0), tiny[0], BARE)
    list(method.epoch(0))
    batch = first_batch(method, 1)
    z = [net(batch.x).detach() for net in method.nets]
    differ = [i for i in range(32) if z[0][i].argmax() != z[1][i].argmax()]
    assert 0 < len(differ) < 32
    losses = [sum(F.cross_entropy(own[i], batch.y[i]).item() for i in differ) / max(len(differ), 3.2) for own in z]
    log = method.step(batch)
    assert log["loss"].item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert log["disagreement"].item() == pytest.approx(len(differ) / 32)


def test_divergence_agrees_with_torch() -> None:
    a, b = torch.randn(2, 6, 5, generator=rng())
    p, q = (z.log_softmax(1) for z in (a, b))
    expected = F.kl_div(q, p, log_target=True, reduction="none") + F.kl_div(p, q, log_target=True, reduction="none")
    torch.testing.assert_close(divergence(a, b), expected.sum(1))
    assert divergence(a, a).abs().max() == 0


def test_step_of_jocor_descends_the_joint_loss(tiny: TaskAndTruth) -> None:
    """The reference differentiates one loss through both networks."""
    method = started(JoCoR(agreement=0.6), tiny[0], BARE)
    list(method.epoch(0))
    batch = first_batch(method, 3)
    a, b = (net(batch.x) for net in method.nets)
    joint = 0.4 * (cross_entropy(a, batch.y) + cross_entropy(b, batch.y)) + 0.6 * divergence(a, b)
    easy = sorted(range(32), key=lambda i: joint[i].item())[: round((1 - method.rate.item()) * 32)]
    assert len(easy) < 32
    loss = joint[easy].mean()
    parameters = [p for net in method.nets for p in net.parameters()]
    expected = [p.detach() - 0.05 * g for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)]
    log = method.step(batch)
    assert log["loss"].item() == pytest.approx(loss.item())
    for p, after in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), after)


def test_jocor_starts_without_the_agreement_term(tiny: TaskAndTruth) -> None:
    """With it, fresh networks on CIFAR-10 at learning rate 0.1 ended with features that are all 0."""
    recipe = replace(RECIPE, epochs=2)
    method = started(JoCoR(forget_rate=0.0), tiny[0], recipe)
    list(method.epoch(0))
    for number, net in enumerate(method.nets):
        assert_alike(net, train_ce(tiny[0], replace(recipe, epochs=1), number=number))
    method.before_epoch(1)
    assert method.weight.item() == pytest.approx(0.9)  # T_k is half of the epochs


# --- mentors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        MentorNetPD(burn_in=1.0, early_dropout=0.0),
        MentorNetPD(burn_in=0.0, dropout=0.0, share=1.0, averaging=0.0),  # no loss exceeds the largest one
        MentorNetDD(burn_in=1.0, early_dropout=0.0),
        SELFIE(warm_up=1.0),
        SELFIE(warm_up=0.0, forget_rate=0.0, history=1.0),  # the history is never full
        ELR(strength=0.0),
    ],
    ids=repr,
)
def test_cross_entropy_is_a_special_case(method: Method, tiny: TaskAndTruth) -> None:
    trained(method, tiny[0])
    assert_alike(method.net, train_ce(tiny[0]))


def test_curriculum_of_mentornet(tiny: TaskAndTruth) -> None:
    """All examples, then a step function at the percentile, then a linear decrease."""
    method = started(MentorNetPD(burn_in=0.25, linear_from=0.75, dropout=0.0), tiny[0])
    gammas, shares = [], []
    for t in range(4):
        method.before_epoch(t)
        gammas.append(method.gamma.item())
        shares.append(method.dropped.item())
    assert gammas == [math.inf, 0, 0, 1]
    assert shares == [0.5, 0, 0, 0]


@pytest.mark.parametrize("method", [MentorNetPD(), MentorNetDD()], ids=["pd", "dd"])
def test_threshold_of_mentornet_moves_half_way_to_the_percentile(method: Method, tiny: TaskAndTruth) -> None:
    """lambda <- (lambda + p-th percentile) / 2: the published scripts use 0.5."""
    mentor = started(method, tiny[0])
    list(mentor.epoch(0))
    batch, before = mentor.loader.draw(), float(mentor.average)
    losses = torch.nn.functional.cross_entropy(copy.deepcopy(mentor.net)(batch.x), batch.y, reduction="none")
    percentile = float(losses.detach().quantile(0.75, interpolation="nearest"))
    mentor.step(batch)
    assert float(mentor.average) == pytest.approx((before + percentile) / 2, rel=1e-5)


def test_mentornet_is_self_paced_learning_after_the_burn_in(tiny: TaskAndTruth) -> None:
    method = started(MentorNetPD(burn_in=0.0, dropout=0.0), tiny[0], BARE)
    batch = first_batch(method)
    losses = [F.cross_entropy(z, y).item() for z, y in zip(method.net(batch.x).detach(), batch.y, strict=True)]
    threshold = sorted(losses)[round(0.75 * 31)]
    easy = [x for x in losses if x <= threshold]
    log = method.step(batch)
    assert method.average.item() == pytest.approx(threshold)
    assert log["weight"].item() == len(easy) / 32
    assert log["loss"].item() == pytest.approx(sum(easy) / 32, rel=1e-5)


def test_mentor_is_trained_on_right_and_wrong_labels(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic wrong labels are never the true ones, and about half of the labels are right."""
    method = started(MentorNetDD(), tiny[0])
    seen: list[tuple[Tensor, Tensor]] = []
    mentor_logits = method.mentor_logits
    draw = method.meta_loader.draw
    drawn: list[Batch] = []
    monkeypatch.setattr(method.meta_loader, "draw", lambda: drawn.append(draw()) or drawn[-1])
    monkeypatch.setattr(method, "mentor_logits", lambda losses: (seen.append(losses), mentor_logits(losses))[1])
    rights = []
    for _ in range(30):
        method.teach_mentor()
        z, y = method.net(drawn[-1].x).detach(), drawn[-1].y
        own = (seen[-1] - cross_entropy(z, y)).abs() < 1e-4
        others = torch.stack([cross_entropy(z, (y + k) % 10) for k in range(1, 10)])
        assert bool((own | ((seen[-1] - others).abs() < 1e-4).any(0)).all())
        rights.append(own.float().mean().item())
    assert 0.35 < sum(rights) / 30 < 0.65


# --- memories ---------------------------------------------------------------------------------------------------------


def test_selfie_without_a_history_is_small_loss_selection(tiny: TaskAndTruth) -> None:
    method = started(SELFIE(warm_up=0.0, history=1.0), tiny[0], BARE)
    list(method.epoch(0))
    batch = first_batch(method, 1)
    assert bool((method.predictions < 0).any(1).all())
    losses = cross_entropy(method.net(batch.x).detach(), batch.y).tolist()
    keep = round((1 - method.rate.item()) * 32)
    log = method.step(batch)
    assert log["loss"].item() == pytest.approx(sum(sorted(losses)[:keep]) / keep, rel=1e-5)
    assert log["refurbished"] == 0


def test_selfie_learns_consistent_predictions(tiny: TaskAndTruth) -> None:
    """This does not depend on the loss; and a label stays replaced if predictions become inconsistent later."""
    method = started(SELFIE(warm_up=0.0, history=0.5), tiny[0], BARE)  # q = 2
    batch = first_batch(method, 0)
    method.predictions[batch.rows] = torch.tensor([3, 4])  # inconsistent
    method.predictions[batch.rows[:10]] = 5
    z = method.net(batch.x).detach()
    given = cross_entropy(z, batch.y)
    taken = {*range(10)} | {*given.argsort()[: round((1 - method.rate.item()) * 32)].tolist()}
    losses = [F.cross_entropy(z[i], torch.tensor(5) if i < 10 else batch.y[i]).item() for i in taken]
    log = method.step(batch)
    assert log["loss"].item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert method.refurbished[batch.rows].tolist() == [5] * 10 + [-1] * 22
    assert torch.equal(method.predictions[batch.rows, 0], z.argmax(1))  # the column of this epoch
    assert method.predictions[batch.rows, 1].tolist() == [5] * 10 + [4] * 22

    method.predictions[batch.rows] = torch.tensor([3, 4])
    assert method.step(batch)["refurbished"].item() == pytest.approx(10 / 32)


@pytest.mark.parametrize(
    ("epochs", "history", "expected"), [(100, 15.0, 15), (20, 15.0, 5), (4, 15.0, 2), (20, 0.15, 3), (20, 1.0, 20)]
)
def test_number_of_predictions_that_selfie_compares(
    epochs: int, history: float, expected: int, tiny: TaskAndTruth
) -> None:
    """15 as published, at most the warm-up, a quarter of the epochs; up to 1 it is a fraction, as in older runs."""
    method = started(SELFIE(history=history), tiny[0], replace(RECIPE, epochs=epochs))
    assert method.predictions.shape[1] == expected


def test_selfie_stores_the_predictions_of_the_last_epochs(tiny: TaskAndTruth) -> None:
    method = started(SELFIE(history=0.5), tiny[0])  # q = 2
    seen: list[list[int]] = [[] for _ in range(len(tiny[0].train))]
    for t in range(4):
        method.before_epoch(t)
        for batch in method.loader.epoch(t):
            for row, k in zip(batch.rows.tolist(), method.net(batch.x).argmax(1).tolist(), strict=True):
                seen[row].append(k)
            method.step(batch)
    always = [row for row, classes in enumerate(seen) if len(classes) == 4]  # incomplete batches are skipped
    assert len(always) > 50
    assert method.predictions[always].tolist() == [seen[row][2:] for row in always]


def elr_step(z: Tensor, y: Tensor, memory: list[float], kept: float, strength: float) -> tuple[float, list[float]]:
    """The loss of one example and its new memory, in plain Python."""
    exps = [math.exp(x) for x in z.tolist()]
    p = [min(max(e / sum(exps), 1e-4), 1 - 1e-4) for e in exps]
    t = [kept * m + (1 - kept) * x / sum(p) for m, x in zip(memory, p, strict=True)]
    inner = sum(a * b for a, b in zip(p, t, strict=True))
    return F.cross_entropy(z, y).item() + strength * math.log(1 - inner), t


def test_elr_agrees_with_a_loop(tiny: TaskAndTruth) -> None:
    task = tiny[0]
    method = started(ELR(beta=0.6, strength=2.0), task)
    memory = [[0.0] * 10 for _ in range(len(task.train))]
    for t in range(3):
        for batch in method.loader.epoch(t):
            z, losses = method.net(batch.x).detach(), []
            for i, row in enumerate(batch.rows.tolist()):
                loss, memory[row] = elr_step(z[i], batch.y[i], memory[row], 0.6, 2.0)
                losses.append(loss)
            assert method.step(batch)["loss"].item() == pytest.approx(sum(losses) / 32, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(method.memory, torch.tensor(memory))
    assert bool((method.memory.sum(1) < 1).all())


def test_elr_weakens_labels_that_contradict_the_memory() -> None:
    """The gradient on the predicted class shrinks if the memory is certain of it."""
    z = torch.tensor([[3.0, 0.0, 0.0]], requires_grad=True)
    y, t = torch.tensor([1]), torch.tensor([[0.95, 0.02, 0.02]])
    (ce,) = torch.autograd.grad(cross_entropy(z, y).sum(), z)
    (elr,) = torch.autograd.grad((cross_entropy(z, y) + 3 * memory_regularizer(z, t)).sum(), z)
    assert ce[0, 0] > 0.9
    assert elr[0, 0] < 0.5 * ce[0, 0]
    extreme = memory_regularizer(torch.tensor([[1e4, 0.0]]), torch.tensor([[1.0, 0.0]]))
    assert extreme.item() == pytest.approx(math.log(1e-4), rel=1e-2)


def test_step_of_elr_plus_agrees_with_a_loop(tiny: TaskAndTruth) -> None:
    """Without mixup: the averaged weights of the other network, before the step, fill the memory of each."""
    method = started(ELRPlus(alpha=0.0, averaging=0.9, ramp_up=0.0), tiny[0])
    list(method.epoch(0))
    batch = next(method.loader.epoch(1))
    z = [net(batch.x).detach() for net in method.nets]
    seen = [net(batch.x).detach() for net in method.averages]
    before, averages = method.memories.clone(), [weights(net) for net in method.averages]
    expected = []
    for k in (0, 1):
        for i, row in enumerate(batch.rows.tolist()):
            _, t = elr_step(seen[1 - k][i], batch.y[i], before[k, row].tolist(), 0.7, 3.0)
            p = z[k][i].softmax(0).clamp(1e-4, 1 - 1e-4)
            before[k, row] = torch.tensor(t)
            expected.append(F.cross_entropy(z[k][i], batch.y[i]) + 3 * torch.log(1 - (p * torch.tensor(t)).sum()))
    assert method.step(batch)["loss"].item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)
    torch.testing.assert_close(method.memories, before)
    for net, averaged, old in zip(method.nets, method.averages, averages, strict=True):
        for w, v, previous in zip(net.parameters(), averaged.parameters(), old, strict=True):
            torch.testing.assert_close(v, 0.9 * previous + 0.1 * w.detach())


def test_averaging_of_elr_plus_ramps_up(tiny: TaskAndTruth) -> None:
    method = started(ELRPlus(averaging=0.0), tiny[0])
    list(method.epoch(0))
    for net, averaged in zip(method.nets, method.averages, strict=True):
        assert all(map(torch.equal, weights(net), weights(averaged)))
    method = started(ELRPlus(ramp_up=0.5), tiny[0])
    steps = method.loader.steps
    for t in range(4):
        list(method.epoch(t))
        assert method.progress.item() == pytest.approx(min(1.0, (t + 1) * steps / (2 * steps)))


def test_elr_plus_uses_the_averaged_weights_of_the_recipe(pictures: TaskAndTruth) -> None:
    """With the strong recipe, a weak view fills the memory, and the recipe's averages replace its own."""
    recipe = replace(RECIPE, net="conv4", batch_size=16, average=0.9, augment="strong")
    method = ELRPlus()
    method.start(pictures[0], recipe)
    assert method.averages == []
    batch = next(method.loader.epoch(0))
    assert len(batch.views) == 2
    for k in (0, 1):
        torch.nn.init.normal_(method.averaged_nets[k].fc.weight)  # type: ignore[arg-type, union-attr]
    p = [net(batch.views[0]).detach().softmax(1).clamp(1e-4, 1 - 1e-4) for net in method.averaged_nets]
    method.step(batch)
    for k in (0, 1):
        expected = 0.3 * p[1 - k] / p[1 - k].sum(1, keepdim=True)
        torch.testing.assert_close(method.memories[k][batch.rows], expected)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CoTeaching(gradual=-2.0), "gradual must be at least 0, got -2.0"),
        (lambda: CoTeaching(exponent=-1.0), "exponent must be at least 0"),
        (lambda: CoTeachingPlus(warm_up=-0.1), "warm_up must be at least 0"),
        (lambda: JoCoR(agreement=1.1), "agreement must be between 0 and 1"),
        (lambda: Decoupling(least=0.0), "least must be between"),
        (lambda: MentorNetPD(share=70.0), "share must be between 0 and 1"),
        (lambda: MentorNetPD(softness=-1.0), "softness must be at least 0"),
        (lambda: MentorNetDD(hidden=0), "hidden must be at least 1"),
        (lambda: SELFIE(unsure=2.0), "unsure must be between 0 and 1"),
        (lambda: ELR(beta=1.5), "beta must be between 0 and 1"),
        (lambda: ELRPlus(strength=-1.0), "strength must be at least 0"),
    ],
)
def test_numbers_out_of_range(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
