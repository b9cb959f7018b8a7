"""Robust losses, mixup and DivideMix, compared with naive loops, closed forms and special cases."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn

from warpi.errors import UserError
from warpi.functional import losses
from warpi.functional.mixup import beta, mixup, partners, sharpen
from warpi.functional.selection import best_cut, two_gaussians
from warpi.methods.dividemix import DivideMix, published_lambda_u
from warpi.methods.mixup import Mixup
from warpi.methods.registry import make_method
from warpi.methods.robust_losses import GCE, SCE, Bootstrap, Focal, LabelSmoothing, TruncatedGCE
from warpi.runs.defaults import defaults_for
from warpi.training.engine import Record, train
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth

RECIPE = Recipe(epochs=3, batch_size=32, lr=0.05, seed=7)
TaskAndTruth = tuple[Task, Truth]
LogitLoss = Callable[[Tensor, Tensor], Tensor]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_logits(n: int = 9, k: int = 4) -> tuple[Tensor, Tensor]:
    return 3 * torch.randn(n, k, generator=rng(), dtype=torch.float64), torch.arange(n) % k


def probabilities(z: Tensor) -> list[list[float]]:
    """Softmax computed with plain Python."""
    powers = [[math.exp(value) for value in row] for row in z.tolist()]
    return [[power / sum(row) for power in row] for row in powers]


def trained(method: Method, task: Task, truth: Truth | None = None, recipe: Recipe = RECIPE) -> list[Record]:
    method.start(task, recipe)
    return [record for record in train(method, task, truth) if record is not None]


# --- losses ---------------------------------------------------------------------------------------------------------

NAIVE: dict[str, tuple[LogitLoss, Callable[[list[float], int], float]]] = {
    "absolute error": (losses.absolute_error, lambda p, y: sum(abs(p[k] - (k == y)) for k in range(len(p)))),
    "generalized": (lambda z, y: losses.generalized_cross_entropy(z, y, 0.7), lambda p, y: (1 - p[y] ** 0.7) / 0.7),
    "truncated": (
        lambda z, y: losses.truncated_cross_entropy(z, y, (torch.arange(len(y)) % 2).double(), 0.7, 0.5),
        lambda p, y: (y % 2) * ((1 - p[y] ** 0.7) / 0.7 - (1 - 0.5**0.7) / 0.7),  # y = i mod 4 here
    ),
    "symmetric": (
        lambda z, y: losses.symmetric_cross_entropy(z, y, 0.1, 2.0, math.log(1e-4)),
        lambda p, y: 0.1 * -math.log(p[y]) - 2 * sum(p[k] * math.log(1.0 if k == y else 1e-4) for k in range(len(p))),
    ),
    "focal": (lambda z, y: losses.focal(z, y, 2.0), lambda p, y: -((1 - p[y]) ** 2) * math.log(p[y])),
    "soft bootstrap": (
        lambda z, y: losses.soft_bootstrap(z, y, 0.95),
        lambda p, y: -sum((0.95 * (k == y) + 0.05 * p[k]) * math.log(p[k]) for k in range(len(p))),
    ),
    "hard bootstrap": (
        lambda z, y: losses.hard_bootstrap(z, y, 0.8),
        lambda p, y: -sum((0.8 * (k == y) + 0.2 * (p[k] == max(p))) * math.log(p[k]) for k in range(len(p))),
    ),
    "smooth": (
        lambda z, y: losses.smooth_cross_entropy(z, y, 0.1),
        lambda p, y: -sum((0.9 * (k == y) + 0.1 / len(p)) * math.log(p[k]) for k in range(len(p))),
    ),
    "entropy": (lambda z, _: losses.entropy(z), lambda p, _: -sum(v * math.log(v) for v in p)),
    "soft cross-entropy": (
        lambda z, y: losses.soft_cross_entropy(z, 0.25 + 0 * z + 0.5 * losses.one_hot(y, 4)),
        lambda p, y: -sum((0.25 + 0.5 * (k == y)) * math.log(p[k]) for k in range(len(p))),
    ),
    "squared error": (
        lambda z, y: losses.squared_error(z, losses.one_hot(y, 4)),
        lambda p, y: sum((p[k] - (k == y)) ** 2 for k in range(len(p))) / len(p),
    ),
}


@pytest.mark.parametrize("name", NAIVE)
def test_losses_agree_with_loops(name: str) -> None:
    loss, naive = NAIVE[name]
    z, y = some_logits()
    expected = [naive(p, int(label)) for p, label in zip(probabilities(z), y, strict=True)]
    torch.testing.assert_close(loss(z, y), torch.tensor(expected, dtype=torch.float64))


def test_prior_penalty_agrees_with_loops() -> None:
    z, _ = some_logits()
    p = probabilities(z)
    means = [sum(row[k] for row in p) / len(p) for k in range(4)]
    expected = sum(0.25 * math.log(0.25 / mean) for mean in means)
    assert float(losses.prior_penalty(z)) == pytest.approx(expected)
    assert float(losses.prior_penalty(torch.zeros(5, 4))) == pytest.approx(0, abs=1e-6)


IDENTITIES: dict[str, tuple[LogitLoss, LogitLoss]] = {
    "GCE with q = 0": (lambda z, y: losses.generalized_cross_entropy(z, y, 0.0), losses.cross_entropy),
    "GCE with q = 1": (
        lambda z, y: losses.generalized_cross_entropy(z, y, 1.0),
        lambda z, y: losses.absolute_error(z, y) / 2,
    ),
    "SCE with beta = 0": (lambda z, y: losses.symmetric_cross_entropy(z, y, 1, 0, -9), losses.cross_entropy),
    "SCE with alpha = 0, A = -2": (lambda z, y: losses.symmetric_cross_entropy(z, y, 0, 1, -2), losses.absolute_error),
    "focal with gamma = 0": (lambda z, y: losses.focal(z, y, 0), losses.cross_entropy),
    "soft bootstrap with beta = 1": (lambda z, y: losses.soft_bootstrap(z, y, 1), losses.cross_entropy),
    "soft bootstrap with beta = 0": (lambda z, y: losses.soft_bootstrap(z, y, 0), lambda z, _: losses.entropy(z)),
    "hard bootstrap with beta = 1": (lambda z, y: losses.hard_bootstrap(z, y, 1), losses.cross_entropy),
    "hard bootstrap with beta = 0": (
        lambda z, y: losses.hard_bootstrap(z, y, 0),
        lambda z, _: losses.cross_entropy(z, z.argmax(1)),
    ),
    "no smoothing": (lambda z, y: losses.smooth_cross_entropy(z, y, 0), losses.cross_entropy),
    "smoothed targets": (
        lambda z, y: losses.smooth_cross_entropy(z, y, 0.3),
        lambda z, y: losses.soft_cross_entropy(z, 0.7 * losses.one_hot(y, 4) + 0.3 / 4),
    ),
    "one-hot targets": (lambda z, y: losses.soft_cross_entropy(z, losses.one_hot(y, 4)), losses.cross_entropy),
    "truncated with nothing pruned": (
        lambda z, y: losses.truncated_cross_entropy(z, y, torch.ones(len(y)), 0.7, 0.5),
        lambda z, y: losses.generalized_cross_entropy(z, y, 0.7) - (1 - 0.5**0.7) / 0.7,
    ),
    "truncated at q = 0": (
        lambda z, y: losses.truncated_cross_entropy(z, y, torch.ones(len(y)), 0.0, 0.5),
        lambda z, y: losses.cross_entropy(z, y) + math.log(0.5),
    ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_special_cases_of_losses(name: str) -> None:
    """Both values and gradients agree."""
    z, y = some_logits()
    z.requires_grad_()
    results = []
    for loss in IDENTITIES[name]:
        value = loss(z, y)
        results += [value.detach(), *torch.autograd.grad(value.sum(), z)]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])


def test_generalized_cross_entropy_converges_to_cross_entropy() -> None:
    z, y = some_logits()
    gaps = [
        (losses.generalized_cross_entropy(z, y, q) - losses.cross_entropy(z, y)).abs().max() for q in (0.1, 0.01, 1e-6)
    ]
    assert gaps[0] > 5 * gaps[1] > 5 * 1000 * gaps[2]


def test_absolute_errors_of_all_labels_add_up_to_a_constant() -> None:
    """This is the paper's condition for robustness to symmetric noise."""
    z, _ = some_logits()
    total = torch.stack([losses.absolute_error(z, torch.full((len(z),), k)) for k in range(4)]).sum(0)
    torch.testing.assert_close(total, torch.full_like(total, 2 * (4 - 1)))


EXTREMES: dict[str, LogitLoss] = {
    **{name: loss for name, (loss, _) in NAIVE.items() if name != "truncated"},
    "generalized, small q": lambda z, y: losses.generalized_cross_entropy(z, y, 0.01),
    "focal, gamma below 1": lambda z, y: losses.focal(z, y, 0.5),
    "truncated": lambda z, y: losses.truncated_cross_entropy(z, y, torch.ones(len(y)), 0.7, 0.5),
    "prior": lambda z, _: losses.prior_penalty(z),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("gap", [-300.0, 300.0])
def test_losses_are_finite_if_a_probability_is_0_or_1(name: str, gap: float) -> None:
    y = torch.tensor([0, 1, 2])
    z = (gap * losses.one_hot(y, 4)).requires_grad_()  # p_y is exactly 0 or 1 in float32
    value = EXTREMES[name](z, y)
    (slope,) = torch.autograd.grad(value.sum(), z)
    assert bool(value.isfinite().all())
    assert bool(slope.isfinite().all())


# --- mixing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.001, 0.2, 1.0, 4.0, 32.0])
def test_beta_samples_have_the_right_moments(alpha: float) -> None:
    generator = rng(1)
    draws = torch.stack([beta(alpha, generator) for _ in range(1000)])
    assert bool(((draws >= 0) & (draws <= 1)).all())
    deviation = 1 / math.sqrt(4 * (2 * alpha + 1))
    assert float(draws.mean()) == pytest.approx(0.5, abs=4 * deviation / math.sqrt(1000))
    assert float(draws.std()) == pytest.approx(deviation, rel=0.1)
    assert torch.equal(beta(alpha, rng(1)), draws[0])


def test_alpha_0_turns_mixup_off() -> None:
    x, q = torch.randn(5, 3, generator=rng()), torch.eye(5)
    assert beta(0, rng()) == 1
    assert all(map(torch.equal, mixup(x, q, 0, rng()), (x, q)))


def test_partners_are_random_permutations() -> None:
    orders = [partners([6], generator) for generator in [rng(3)] for _ in range(600)]
    assert all(sorted(order.tolist()) == list(range(6)) for order in orders)
    counts = torch.stack(orders)[:, 0].bincount(minlength=6)
    assert bool((counts > 60).all())
    assert bool((counts < 140).all())


@pytest.mark.parametrize("own", [False, True])
def test_mixup_agrees_with_loops(own: bool) -> None:
    x, y = torch.randn(7, 2, 3, generator=rng()), torch.arange(7) % 4
    weights = []
    for seed in range(20):
        generator = rng(seed)
        weight = float(beta(1.0, generator))
        order = partners([7], generator).tolist()
        weight = max(weight, 1 - weight) if own else weight
        weights.append(weight)
        mixed_x, mixed_q = mixup(x, losses.one_hot(y, 4), 1.0, rng(seed), keep_own=own)
        for i, j in enumerate(order):
            torch.testing.assert_close(mixed_x[i], weight * x[i] + (1 - weight) * x[j])
            expected = [weight * float(y[i] == k) + (1 - weight) * float(y[j] == k) for k in range(4)]
            assert mixed_q[i].tolist() == pytest.approx(expected)
    assert (min(weights) >= 0.5) == own


def test_sharpen() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]])
    for T in (0.25, 0.5, 2.0):
        expected = [[v ** (1 / T) / sum(u ** (1 / T) for u in row) for v in row] for row in p.tolist()]
        torch.testing.assert_close(sharpen(p, T), torch.tensor(expected))
    torch.testing.assert_close(sharpen(p, 1), p)
    torch.testing.assert_close(sharpen(p[:2], 1e-3), torch.eye(3)[[0, 2]])
    assert bool(sharpen(torch.full((2, 1000), 1e-3), 0.01).isfinite().all())  # 0.001^100 is 0 in any float


# --- a mixture of two Gaussians ---------------------------------------------------------------------------------------


def two_clusters(n: int = 60) -> Tensor:
    x = torch.randn(n, generator=rng(2), dtype=torch.float64)
    return torch.where(torch.arange(n) % 3 == 0, 5 + 1.5 * x, 1 + 0.5 * x)


def test_best_cut_agrees_with_all_cuts() -> None:
    for x in (two_clusters(25), two_clusters(25).flip(0), torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 2.0])):
        s, costs = sorted(x.tolist()), {}
        for n in range(1, len(s)):
            parts = s[:n], s[n:]
            costs[n] = sum((v - sum(part) / len(part)) ** 2 for part in parts for v in part)
        assert int(best_cut(x).sum()) == min(costs, key=lambda n: costs[n])
        assert x[best_cut(x)].max() < x[~best_cut(x)].min()


def test_mixture_agrees_with_loops() -> None:
    x = two_clusters()
    u = [(v - min(x.tolist())) / (max(x.tolist()) - min(x.tolist())) for v in x.tolist()]
    r = [(1.0, 0.0) if low else (0.0, 1.0) for low in best_cut(x).tolist()]
    for _ in range(10):
        n = [sum(row[c] for row in r) for c in (0, 1)]
        mean = [sum(row[c] * v for row, v in zip(r, u, strict=True)) / n[c] for c in (0, 1)]
        var = [sum(row[c] * (v - mean[c]) ** 2 for row, v in zip(r, u, strict=True)) / n[c] + 5e-4 for c in (0, 1)]
        r = []
        for v in u:
            density = [n[c] * math.exp(-((v - mean[c]) ** 2) / (2 * var[c])) / math.sqrt(var[c]) for c in (0, 1)]
            r.append((density[0] / sum(density), density[1] / sum(density)))
    torch.testing.assert_close(two_gaussians(x), torch.tensor([row[0] for row in r]))


def test_mixture_agrees_with_scikit_learn() -> None:
    x = two_clusters(600)
    u = ((x - x.min()) / (x.max() - x.min())).numpy()[:, None]
    reference = GaussianMixture(2, max_iter=500, tol=1e-8, reg_covar=5e-4, random_state=0).fit(u)
    expected = reference.predict_proba(u)[:, reference.means_.argmin()]
    torch.testing.assert_close(
        two_gaussians(x, steps=500).double(), torch.tensor(expected, dtype=torch.float64), atol=1e-3, rtol=0
    )


def test_mixture_recovers_the_cluster_of_small_losses() -> None:
    x = two_clusters(600)
    w, low = two_gaussians(x), torch.arange(600) % 3 != 0
    assert ((w > 0.5) == low).float().mean() > 0.95
    order = torch.randperm(600, generator=rng(4))
    torch.testing.assert_close(two_gaussians(x[order]), w[order])
    torch.testing.assert_close(two_gaussians(10 * x + 3), w)
    for odd in (torch.ones(5), torch.tensor([2.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 1e30])):
        w = two_gaussians(odd)
        assert bool(((w >= 0) & (w <= 1)).all())
    assert two_gaussians(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([1.0, 0.0])


# --- methods that contain cross-entropy -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        GCE(q=0.0),
        SCE(alpha=1.0, beta=0.0),
        Focal(gamma=0.0),
        Bootstrap(beta=1.0),
        Bootstrap(hard=True, beta=1.0),
        LabelSmoothing(smoothing=0.0),
        Mixup(alpha=0.0),
        TruncatedGCE(q=0.0, start_prune=1.0),
    ],
    ids=repr,
)
def test_cross_entropy_is_a_special_case(method: Method, tiny: TaskAndTruth) -> None:
    ce = make_method("ce")
    trained(ce, tiny[0])
    trained(method, tiny[0])
    for p, q in zip(ce.net.parameters(), method.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_gce_with_q_1_is_half_the_absolute_error(tiny: TaskAndTruth) -> None:
    mae, gce = make_method("mae"), GCE(q=1.0)
    recipe = replace(RECIPE, weight_decay=0.0, momentum=0.0)
    trained(mae, tiny[0], recipe=recipe)
    trained(gce, tiny[0], recipe=replace(recipe, lr=2 * recipe.lr))
    for p, q in zip(mae.net.parameters(), gce.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_registered_bootstrap_variants() -> None:
    assert make_method("bootstrap_soft") == Bootstrap(hard=False, beta=0.95)
    assert make_method("bootstrap_hard") == Bootstrap(hard=True, beta=0.8)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gce", "q", 1.5),
        ("gce_truncated", "k", 0.0),
        ("sce", "beta", -1.0),
        ("sce", "clip", 0.0),
        ("focal", "gamma", -0.5),
        ("bootstrap_soft", "beta", 2.0),
        ("label_smoothing", "smoothing", -0.1),
        ("mixup", "alpha", -1.0),
        ("dividemix", "tau", 1.1),
        ("dividemix", "temperature", 0.0),
    ],
)
def test_numbers_out_of_range(name: str, option: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{option} must be"):
        make_method(name, **{option: value})


# --- truncated --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "expected"), [(1, []), (2, [1]), (12, [8, 9, 10, 11]), (24, [17, 19, 21, 23])])
def test_epochs_in_which_examples_are_pruned(
    epochs: int, expected: list[int], tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = TruncatedGCE()
    pruned: list[int] = []
    method.start(tiny[0], replace(RECIPE, epochs=epochs))
    monkeypatch.setattr(method, "prune", lambda: pruned.append(method.loader.count // method.loader.steps))
    for t in range(epochs):
        for _ in method.epoch(t):
            pass
    assert pruned == expected


# --- DivideMix --------------------------------------------------------------------------------------------------------


def test_warm_up_of_dividemix_is_cross_entropy(tiny: TaskAndTruth) -> None:
    method, ce = DivideMix(), make_method("ce")
    for each in (method, ce):
        each.start(tiny[0], RECIPE)
        list(each.epoch(0))
    assert isinstance(method, DivideMix)
    assert method.warming
    for p, q in zip(ce.net.parameters(), method.net.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(("epochs", "warm_up", "expected"), [(2, 10.0, 1), (60, 10.0, 10), (4, 2.0, 2), (3, 0.0, 1)])
def test_length_of_the_warm_up_of_dividemix(
    epochs: int, warm_up: float, expected: int, tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DivideMix(warm_up=warm_up)
    method.start(tiny[0], replace(RECIPE, epochs=epochs))
    divided: list[int] = []
    monkeypatch.setattr(method, "divide", lambda: divided.append(t))
    monkeypatch.setattr(method, "step", lambda _: {})
    for t in range(epochs):
        list(method.epoch(t))
        assert method.warming == (t < expected)
    assert divided == list(range(expected, epochs))


def test_each_network_of_dividemix_divides_for_the_other(tiny: TaskAndTruth) -> None:
    task = tiny[0]
    method = DivideMix()
    method.start(task, RECIPE)
    list(method.epoch(0))
    assert bool((method.clean == 1).all())
    method.divide()
    batch = next(task.train.batches(len(task.train)))
    for k in (0, 1):
        other = method.nets[1 - k].eval()
        expected = two_gaussians(losses.cross_entropy(other(batch.x), batch.y).detach())
        torch.testing.assert_close(method.clean[k], expected)
    assert not torch.equal(method.clean[0], method.clean[1])


def test_weight_of_unlabeled_examples_rises(tiny: TaskAndTruth) -> None:
    method = DivideMix(warm_up=1.0, lambda_u=10.0)
    recipe = replace(RECIPE, epochs=4)  # one of warm-up, two of the ramp (at most half), one after it
    method.start(tiny[0], recipe)
    values = []
    for t in range(4):
        for _ in method.epoch(t):
            values.append(float(method.weight_u))
    n = len(method.loader)
    expected = [0.0] * n + [10 * (i + 1) / (2 * n) for i in range(2 * n)] + [10.0] * n
    assert values == pytest.approx(expected, rel=1e-4)


def test_weight_of_unlabeled_examples_depends_on_the_number_of_classes() -> None:
    """The published error is a mean over the classes: a completely wrong guess costs 2 / K."""

    def cost(lambda_u: float, n_classes: int) -> float:
        z, guess = 100 * losses.one_hot(torch.tensor([0]), n_classes), losses.one_hot(torch.tensor([1]), n_classes)
        return lambda_u * float(losses.squared_error(z, guess)[0])

    for table in (True, False):
        for k in (2, 3, 9, 10):
            lambda_u = defaults_for((4,), k)["DivideMix.lambda_u"] if table else published_lambda_u(0.5, k)
            assert cost(lambda_u, k) == pytest.approx(5)
    assert [published_lambda_u(0.2, k) for k in (2, 10, 100)] == [0, 0, 25]
    assert [published_lambda_u(0.5, k) for k in (10, 100)] == [25, 150]


@pytest.mark.parametrize("noisy", [0.1, 0.6])
def test_weight_of_unlabeled_examples_follows_their_fraction(
    noisy: float, tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DivideMix(warm_up=1.0)
    method.start(tiny[0], replace(RECIPE, epochs=4))
    n = method.clean.shape[1]
    monkeypatch.setattr(method, "divide", lambda: method.clean.copy_((torch.arange(n) > noisy * n).float()))
    for t in range(3):
        method.before_epoch(t)
    method.step(method.loader.draw())
    assert float(method.full_weight_u) == (0 if noisy == 0.1 else 25)
    assert (float(method.weight_u) > 0) == (noisy == 0.6)


def test_dividemix_with_the_strong_recipe_guesses_with_averaged_networks_from_weak_views(
    pictures: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DivideMix(warm_up=1.0)
    recipe = replace(RECIPE, net="conv4", average=0.9, augment="strong", batch_size=16)
    method.start(pictures[0], recipe)
    assert method.loader.split.examples.strong_views == (1,)  # type: ignore[attr-defined]
    for _ in method.epoch(0):
        method.update_averages(5)
    method.before_epoch(1)
    batch = next(method.loader.epoch(1))
    seen: list[torch.Tensor] = []
    match = method.match
    monkeypatch.setattr(method, "match", lambda k, *others: seen.append(others[4]) or match(k, *others))
    expected = [net(batch.views[0]).softmax(1) for net in method.averaged_nets]
    method.step(batch)
    for p, own in zip(expected, seen, strict=True):
        torch.testing.assert_close(own, p.detach())


def test_strong_views_of_dividemix_are_learned_without_mixup(
    pictures: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss with strong views is that of the weak ones plus the weighted cross-entropy with the same targets."""
    method = DivideMix(alpha=0.0, lambda_u=0.0, lambda_r=0.0, tau=0.5)
    method.start(pictures[0], replace(RECIPE, net="conv4", average=0.9, augment="strong", batch_size=16))
    method.warming = False
    method.clean.copy_(torch.rand(method.clean.shape, generator=rng(4)))
    batch = method.loader.draw()
    p = [net(batch.views[0]).softmax(1).detach() for net in method.averaged_nets]
    logits = [deepcopy(net)(torch.cat(batch.views)).detach().chunk(2) for net in method.nets]
    seen: list[float] = []
    monkeypatch.setattr("warpi.methods.dividemix.descend", lambda loss, _: seen.append(loss.item()) or loss.detach())
    method.step(batch)
    for k in (0, 1):
        weak, strong, used = [], 0.0, 0
        for i, row in enumerate(batch.rows.tolist()):
            w = float(method.clean[k, row])
            y = losses.one_hot(batch.y[i], 3)
            target = (w * y + (1 - w) * p[k][i] if w >= 0.5 else (p[0][i] + p[1][i]) / 2) ** 2
            target = target / target.sum()
            used += w >= 0.5
            weak += [float(F.cross_entropy(logits[k][0][i], target))] if w >= 0.5 else []
            strong += (1.0 if w >= 0.5 else float(target.max())) * float(F.cross_entropy(logits[k][1][i], target)) / 16
        assert 0 < used < 16
        assert seen[k] == pytest.approx(sum(weak) / used + strong, rel=1e-4)


def test_step_of_dividemix_without_mixup_agrees_with_loops(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    """With alpha = 0, lambda is 1, and a step consists of the targets and the three loss terms."""
    method = DivideMix(alpha=0.0, tau=0.6, warm_up=1.0)
    method.start(tiny[0], RECIPE)
    list(method.epoch(0))
    list(method.epoch(1))
    method.weight_u.fill_(3.0)
    generator = rng(5)
    method.clean.copy_(torch.rand(method.clean.shape, generator=generator))
    batch = next(method.loader.epoch(2))
    for net in method.nets:
        net.eval()
    p = [probabilities(net(batch.x)) for net in method.nets]
    w = method.clean[:, batch.rows].tolist()
    seen: list[float] = []
    monkeypatch.setattr("warpi.methods.dividemix.descend", lambda loss, _: seen.append(loss.item()) or loss.detach())
    log = method.step(batch)
    weight_u = float(method.weight_u)

    def sharp(row: list[float]) -> list[float]:
        return [v**2 / sum(u**2 for u in row) for v in row]

    for k in (0, 1):
        terms: dict[bool, list[float]] = {True: [], False: []}
        for i, y in enumerate(batch.y.tolist()):
            own = p[k][i]
            both = [(a + b) / 2 for a, b in zip(p[0][i], p[1][i], strict=True)]
            labeled = w[k][i] >= 0.6
            if labeled:
                target = sharp([w[k][i] * (j == y) + (1 - w[k][i]) * v for j, v in enumerate(own)])
                terms[labeled].append(-sum(q * math.log(v) for q, v in zip(target, own, strict=True)))
            else:
                target = sharp(both)
                terms[labeled].append(sum((q - v) ** 2 for q, v in zip(target, own, strict=True)) / len(own))
        means = [sum(row[j] for row in p[k]) / len(p[k]) for j in range(10)]
        penalty = sum(0.1 * math.log(0.1 / mean) for mean in means)
        x, u = (sum(v) / len(v) for v in (terms[True], terms[False]))
        assert seen[k] == pytest.approx(x + weight_u * u + penalty, rel=1e-4)
    assert float(log["loss"]) == pytest.approx(sum(seen) / 2, rel=1e-5)
    assert float(log["labelled"]) == pytest.approx(sum(v >= 0.6 for row in w for v in row) / 64)


def test_batch_norm_of_dividemix_sees_unmixed_examples(tiny: TaskAndTruth) -> None:
    method = DivideMix(alpha=1e9)  # lambda = 1/2: a mixed batch has half the variance
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 10))  # averages all batches
    method.start(tiny[0], replace(RECIPE, net=net))
    method.warming = False
    batch = method.loader.draw()
    method.step(batch)
    (own,) = (m for m in method.nets[0].modules() if isinstance(m, nn.BatchNorm1d))
    assert own.running_var is not None
    share = float(own.running_var.sum() / batch.x.flatten(1).var(0).sum())
    assert 0.75 < share < 0.9, "the mean of two plain batches and a mixed one"


def test_dividemix_accepts_batches_without_labeled_or_unlabeled_examples(tiny: TaskAndTruth) -> None:
    for clean in (0.0, 1.0):
        method = DivideMix()
        method.start(tiny[0], RECIPE)
        method.warming = False
        method.clean.fill_(clean)
        log = method.step(method.loader.draw())
        assert log["labelled"] == clean
        assert math.isfinite(float(log["loss"]))
        assert all(bool(p.isfinite().all()) for net in method.nets for p in net.parameters())
