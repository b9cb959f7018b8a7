"""Label refinement and early learning, compared with naive loops, closed forms and special cases."""

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.data.dataset import Dataset
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy, one_hot
from warpi.functional.neighbors import cluster_centers, lid, nearest, prototypes
from warpi.functional.selection import beta_posterior, two_betas
from warpi.methods.cal import CAL, covariance
from warpi.methods.cdr import CDR
from warpi.methods.cleannet import CleanNet, Embedding, similarity_loss
from warpi.methods.d2l import D2L
from warpi.methods.limit import LIMIT
from warpi.methods.m_correction import MCorrection, bootstrap_targets, loss_of_largest_posterior
from warpi.methods.noiserank import NoiseRank, label_posterior
from warpi.methods.pencil import PENCIL, divergence
from warpi.methods.plc import PLC, correct_labels
from warpi.methods.registry import make_method
from warpi.methods.smp import SMP
from warpi.training.engine import Record, train
from warpi.training.method import Method
from warpi.training.outputs import predict_rows
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task

RECIPE = Recipe(epochs=3, batch_size=32, meta_batch_size=16, lr=0.05, seed=7)
TaskAndTruth = tuple[Task, Truth]
M = TypeVar("M", bound=Method)
NEED_FEATURES = (D2L(), SMP(), NoiseRank(), CleanNet())


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed))


def started(method: M, task: Task, recipe: Recipe = RECIPE) -> M:
    method.start(task, recipe)
    return method


def trained(method: Method, task: Task, truth: Truth | None = None, recipe: Recipe = RECIPE) -> list[Record]:
    started(method, task, recipe)
    return [record for record in train(method, task, truth) if record is not None]


def weights(*nets: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for net in nets for p in net.state_dict().values()]


def assert_trains_like_ce(method: Method, task: Task) -> None:
    """Assert that training gives the same network as cross-entropy."""
    ce = make_method("ce")
    trained(method, task)
    trained(ce, task)
    for a, b in zip(weights(method.net), weights(ce.net), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- mixtures, neighbors, predictions ---------------------------------------------------------------------------------


def test_two_betas_recovers_the_mixture() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.beta(2, 9, 6000), rng.beta(8, 3, 4000)])
    weight, alpha, beta = two_betas(torch.tensor(x), steps=60)
    assert weight.tolist() == pytest.approx([0.6, 0.4], abs=0.02)
    assert alpha.tolist() == pytest.approx([2, 8], rel=0.12)
    assert beta.tolist() == pytest.approx([9, 3], rel=0.12)


def test_two_betas_orders_its_components_and_accepts_any_input() -> None:
    for x in (torch.rand(50), torch.full((20,), 0.3), torch.tensor([0.0, 1.0] * 9), torch.tensor([0.5])):
        weight, alpha, beta = two_betas(x)
        assert bool(torch.stack([weight, alpha, beta]).isfinite().all())
        means = alpha / (alpha + beta)
        assert means[0] <= means[1]
        assert bool(beta_posterior(x, torch.stack([weight, alpha, beta])).isfinite().all())


def test_beta_posterior_is_bayes_rule() -> None:
    mixture = torch.tensor([[0.3, 0.7], [2.0, 5.0], [6.0, 1.5]], dtype=torch.float64)
    x = torch.linspace(0.01, 0.99, 30)
    for xi, actual in zip(x.tolist(), beta_posterior(x, mixture).tolist(), strict=True):
        p = [w * stats.beta.pdf(xi, a, b) for w, a, b in mixture.T.tolist()]
        assert actual == pytest.approx(p[1] / sum(p), rel=1e-6)


@pytest.mark.parametrize("d", [2, 5])
def test_lid_of_a_ball_is_its_dimension(d: int) -> None:
    rng = torch.Generator().manual_seed(d)
    x = torch.randn(3000, d, generator=rng, dtype=torch.float64)
    x *= torch.rand(3000, 1, generator=rng) ** (1 / d) / x.norm(dim=1, keepdim=True)  # uniform in the unit ball
    flat = torch.cat([x, torch.zeros(3000, 7)], dim=1)  # embedded in 7 more dimensions
    inner = x.norm(dim=1) < 0.5
    assert float(lid(flat, 50)[inner].mean()) == pytest.approx(d, rel=0.1)


def test_lid_agrees_with_a_loop() -> None:
    h, k = random_tensor(12, 4).double(), 5
    for i, actual in enumerate(lid(h, k).tolist()):
        r = sorted(math.dist(h[i].tolist(), h[j].tolist()) for j in range(12) if j != i)[:k]
        assert actual == pytest.approx(-1 / (sum(math.log(rj / r[-1]) for rj in r) / k))
    assert torch.equal(lid(h, 11), lid(h, 50))  # at most all other points
    for n in (1, 2):
        assert not bool(lid(h[:n], k).isfinite().any())


@pytest.mark.parametrize("size", [3, 100])
def test_nearest_agrees_with_a_loop(size: int) -> None:
    h, among = random_tensor(10, 4), torch.arange(10) != 2
    similarity, index = nearest(h, 3, among, size)
    for i in range(10):
        cos = {j: float(F.cosine_similarity(h[i], h[j], dim=0)) for j in range(10) if j not in (i, 2)}
        best = sorted(cos, key=lambda j: -cos[j])[:3]
        assert index[i].tolist() == best
        assert similarity[i].tolist() == pytest.approx([cos[j] for j in best], abs=1e-5)
    assert bool(
        (nearest(h, 20, among)[0] == -torch.inf).any(1)[among].all()
    )  # padding where there is no valid neighbor


def test_prototypes_agree_with_a_loop() -> None:
    h, n, apart = random_tensor(15, 3), 4, 0.9
    S = [[float(F.cosine_similarity(a, b, dim=0)) for b in h] for a in h]
    S_c = sorted(s for row in S for s in row)[round(0.6 * 225) - 1]
    rho = [sum((s > S_c + 1e-6) - (s < S_c - 1e-6) for s in row) for row in S]
    eta = [max((S[i][j] for j in range(15) if (-rho[j], j) < (-rho[i], i)), default=min(S[i])) for i in range(15)]
    far = sorted((i for i in range(15) if eta[i] < apart), key=lambda i: -rho[i])
    chosen = prototypes(h, n, apart).tolist()
    assert len(set(chosen)) == n <= len(far)
    assert sorted(rho[i] for i in chosen) == sorted(rho[i] for i in far[:n])
    assert all(eta[i] < apart for i in chosen)


def test_prototypes_lie_in_different_dense_regions() -> None:
    """Two bundles of directions and some outliers: one prototype in each bundle."""
    axes = torch.eye(6)
    h = torch.cat(
        [
            axes[0] + 0.05 * random_tensor(20, 6),
            axes[1] + 0.05 * random_tensor(12, 6, seed=3),
            random_tensor(4, 6, seed=5),
        ]
    )
    chosen = prototypes(h, 2, apart=0.9).tolist()
    assert {i < 20 for i in chosen} == {True, False}
    assert all(i < 32 for i in chosen)
    assert sorted(prototypes(h, 99, apart=0.9).tolist()) == list(range(36))


def test_cluster_centers_are_means() -> None:
    means = 10 * torch.eye(3)
    h = torch.cat([m + 0.1 * random_tensor(30, 3, seed=i) for i, m in enumerate(means)])
    for seed in range(5):
        centers = cluster_centers(h, 9, torch.Generator().manual_seed(seed), steps=100)
        assert centers.shape == (9, 3)
        assigned = torch.cdist(h, centers).argmin(1)
        for c in set(assigned.tolist()):  # each center is the mean of its nearest points
            torch.testing.assert_close(centers[c], h[assigned == c].mean(0))
    few = cluster_centers(h[:2], 5, torch.Generator())
    assert {tuple(c.tolist()) for c in few} == {tuple(x.tolist()) for x in h[:2]}


def test_predict_rows_covers_all_rows_and_changes_nothing(tiny: TaskAndTruth) -> None:
    task = tiny[0]
    net = started(make_method("ce"), task).net
    before = weights(net)
    rows, z = predict_rows(net, task.train, size=50)
    assert torch.equal(rows, torch.arange(len(task.train)))
    assert net.training
    assert all(map(torch.equal, before, weights(net)))
    net.eval()
    torch.testing.assert_close(z, net(next(task.train.batches(1000)).x).detach())
    assert not z.requires_grad


# --- special cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        CDR(tau=0.0),
        PLC(theta=0.0, beta=0.0),
        PENCIL(stage1=1.0, stage2=1.0),
        MCorrection(alpha=0.0, warm_up=1.0),
        D2L(settle=1.0),
        SMP(alpha=0.0),
        NoiseRank(cut=1.0),
        CleanNet(warm_up=1.0, embedding_steps=1),
        CAL(sieve_share=1.0, alpha_sieve=0.0),
    ],
    ids=lambda method: type(method).__name__,
)
def test_cross_entropy_is_a_special_case(method: Method, tiny: TaskAndTruth) -> None:
    assert_trains_like_ce(method, tiny[0])


def test_defaults_differ_from_cross_entropy(tiny: TaskAndTruth) -> None:
    """The test above does not pass merely because the methods do nothing."""
    ce = make_method("ce")
    trained(ce, tiny[0])
    for method in (
        CDR(),
        PLC(warm_up=0.0),
        PENCIL(),
        MCorrection(),
        SMP(),
        NoiseRank(),
        CleanNet(embedding_steps=2),
        CAL(),
        LIMIT(),
    ):
        trained(method, tiny[0])
        assert not torch.allclose(weights(method.net)[0], weights(ce.net)[0], atol=1e-4), type(method).__name__


# --- CDR --------------------------------------------------------------------------------------------------------------


def test_step_of_cdr_agrees_with_a_loop(tiny: TaskAndTruth) -> None:
    method, ce = (
        started(m, tiny[0], replace(RECIPE, momentum=0.0, weight_decay=0.01)) for m in (CDR(tau=0.4), make_method("ce"))
    )
    batch = method.loader.draw()
    cross_entropy(ce.net(batch.x), batch.y).mean().backward()  # type: ignore[no-untyped-call]
    expected = {
        name: (p.detach().clone(), p.grad.clone()) for name, p in ce.net.named_parameters() if p.grad is not None
    }
    matrices = [(w, g) for w, g in expected.values() if w.ndim > 1]
    c = sorted(
        (abs(a * b) for w, g in matrices for a, b in zip(w.flatten().tolist(), g.flatten().tolist(), strict=True))
    )
    least = c[len(c) - round(0.6 * len(c))]
    method.step(batch)
    moved = 0
    for name, p in method.net.named_parameters():
        w, g = expected[name]
        if w.ndim > 1:
            critical = (w * g).abs() >= least * (1 - 1e-5)
            moved += int(critical.sum())
            g = 0.6 * g * critical
        torch.testing.assert_close(p.detach(), w - 0.05 * (g + 0.01 * w), rtol=1e-4, atol=1e-7)
    assert moved == pytest.approx(0.6 * len(c), rel=1e-3)


def test_tau_of_cdr_replaces_the_noise_rate(tiny: TaskAndTruth) -> None:
    blind = replace(tiny[0], noise_rate=None)
    with pytest.raises(UserError, match="noise rate"):
        CDR().start(blind, RECIPE)
    guess, oracle = CDR(tau=tiny[0].noise_rate), CDR()
    trained(guess, blind)
    trained(oracle, tiny[0])
    assert all(map(torch.equal, weights(guess.net), weights(oracle.net)))


# --- PLC --------------------------------------------------------------------------------------------------------------


def test_correct_labels_agrees_with_a_loop() -> None:
    f, y = random_tensor(40, 5).softmax(1), labels(40, 5)
    for theta in (0.0, 0.3, 0.9, 1.0):
        for fi, yi, actual in zip(f.tolist(), y.tolist(), correct_labels(y, f, theta).tolist(), strict=True):
            assert actual == (max(range(5), key=fi.__getitem__) if fi[yi] / max(fi) < theta else yi)
    assert torch.equal(correct_labels(y, torch.zeros(40, 5), 0.9), y)  # rows without predictions keep their label


def test_plc_averages_a_window_and_raises_theta(tiny: TaskAndTruth) -> None:
    method = started(PLC(window=2, theta=0.0, beta=0.25, warm_up=0.0), tiny[0], replace(RECIPE, epochs=6))
    seen: list[Tensor] = []
    limits = []
    for t in range(6):
        list(method.epoch(t))
        limits.append(round(float(method.limit), 4))
        last = int((method.slot - 1) % 2)  # the epoch that has just ended
        seen.append(method.record[last].clone())
        rows = seen[-1].sum(1) > 0
        torch.testing.assert_close(seen[-1][rows].sum(1), torch.ones(int(rows.sum())))
        assert int(rows.sum()) == 32 * method.loader.steps  # the last, incomplete batch is skipped
    assert limits[0] == 0.25  # no label changes at theta = 0
    assert limits == sorted(limits)
    assert max(limits) <= 0.9
    assert bool((method.y != tiny[0].train.y).any())


def test_plc_corrects_nothing_in_the_warm_up(tiny: TaskAndTruth) -> None:
    method = started(PLC(theta=1.0), tiny[0], replace(RECIPE, epochs=4))
    changed = []
    for t in range(3):
        list(method.epoch(t))
        changed.append(int((method.y != tiny[0].train.y).sum()))
    assert changed[:2] == [0, 0]
    assert changed[2] > 0


# --- PENCIL -----------------------------------------------------------------------------------------------------------


def test_divergence_agrees_with_torch() -> None:
    z, y = random_tensor(7, 4), random_tensor(7, 4, seed=2)
    expected = F.kl_div(y.log_softmax(1), z.softmax(1), reduction="none").sum(1)
    torch.testing.assert_close(divergence(z, y), expected)
    torch.testing.assert_close(divergence(z, z + 3), torch.zeros(7), rtol=0, atol=1e-6)


def test_pencil_keeps_labels_if_their_learning_rate_is_0(tiny: TaskAndTruth) -> None:
    for label_lr, keeps in ((0.0, True), (600.0, False)):
        method = PENCIL(label_lr=label_lr)
        trained(method, tiny[0])
        assert torch.equal(method.y_tilde, 10 * one_hot(tiny[0].train.y, 10)) == keeps


def test_pencil_changes_a_label_if_the_network_is_certain(tiny: TaskAndTruth) -> None:
    """alpha keeps the given label only for a while; with the published alpha of 0.4 it would be kept forever."""
    for alpha, changes in ((PENCIL.alpha, True), (0.4, False)):
        method = started(PENCIL(alpha=alpha), tiny[0])
        method.stage, y = 2, torch.tensor([3])
        z, y_tilde = 50 * one_hot(torch.tensor([7]), 10), 10 * one_hot(y, 10)
        for _ in range(1000):
            y_tilde.requires_grad_()
            (slope,) = torch.autograd.grad(method.loss(z, y_tilde, y).mean(), y_tilde)
            y_tilde = y_tilde.detach() - 20 * slope
        assert (int(y_tilde.argmax()) == 7) == changes


def test_pencil_moves_labels_along_the_gradient(tiny: TaskAndTruth) -> None:
    """Compared with central differences in float64."""
    method = started(PENCIL(label_lr=50.0), tiny[0])
    method.stage = 2
    batch = method.loader.draw()
    row, before = int(batch.rows[3]), method.y_tilde.clone()
    with torch.no_grad():
        method.net.train()
        z = started(PENCIL(), tiny[0]).net(batch.x).double()  # the same network, before its step
    method.step(batch)
    for k in (int(batch.y[3]), (int(batch.y[3]) + 1) % 10):
        sides = []
        for e in (1e-4, -1e-4):
            y_tilde = before[batch.rows].double()
            y_tilde[3, k] += e
            sides.append(float(method.loss(z, y_tilde, batch.y).mean()))
        step = 50 * (sides[0] - sides[1]) / 2e-4
        assert float(before[row, k] - method.y_tilde[row, k]) == pytest.approx(step, rel=1e-2, abs=1e-5)
    others = torch.ones(len(before), dtype=torch.bool)
    others[batch.rows] = False
    assert torch.equal(method.y_tilde[others], before[others])


def test_losses_of_pencil_agree_with_a_loop(tiny: TaskAndTruth) -> None:
    method = started(PENCIL(alpha=0.4, beta=0.2), tiny[0])
    z, y_tilde, y = random_tensor(5, 4), random_tensor(5, 4, seed=2), labels(5, 4)
    f, d = z.softmax(1).tolist(), y_tilde.softmax(1).tolist()
    for i in range(5):
        L_c = sum(a * math.log(a / b) for a, b in zip(f[i], d[i], strict=True))
        L_o = -math.log(math.exp(d[i][y[i]]) / sum(map(math.exp, d[i])))  # softmax applied twice
        L_e = -sum(a * math.log(a) for a in f[i])
        for stage, expected in ((1, -math.log(f[i][y[i]])), (2, L_c / 4 + 0.4 * L_o + 0.2 * L_e / 4), (3, L_c / 4)):
            method.stage = stage
            assert float(method.loss(z, y_tilde, y)[i]) == pytest.approx(expected, rel=1e-4)


def test_pencil_has_three_stages(tiny: TaskAndTruth) -> None:
    method = started(PENCIL(), tiny[0], replace(RECIPE, epochs=32))
    stages = []
    for t in range(32):
        next(method.epoch(t))
        stages.append(method.stage)
    assert stages == [1] * 7 + [2] * 13 + [3] * 12
    with pytest.raises(UserError, match="stage2"):
        PENCIL(stage1=0.5, stage2=0.4)


# --- M-correction -----------------------------------------------------------------------------------------------------


def test_bootstrap_targets() -> None:
    z, y, w = random_tensor(6, 4), labels(6, 4), torch.tensor([0.0, 1.0, 0.3, 0.5, 0.0, 1.0])
    targets = bootstrap_targets(y, z, w)
    for i in range(6):
        expected = [0.0] * 4
        expected[int(y[i])] += 1 - float(w[i])
        expected[int(z[i].argmax())] += float(w[i])
        assert targets[i].tolist() == pytest.approx(expected)
    assert torch.equal(bootstrap_targets(y, z, torch.zeros(6)), one_hot(y, 4))  # w = 0: cross-entropy


def test_loss_of_m_correction_agrees_with_a_loop(tiny: TaskAndTruth) -> None:
    """Without mixup: losses in evaluation mode, guesses in training mode, and the penalty on uneven classes."""
    method, same = (started(MCorrection(alpha=0.0, reg=0.5, warm_up=0.0), tiny[0]) for _ in range(2))
    next(same.epoch(0))  # fits the mixture
    method.correcting = True
    for name in ("mixture", "low", "high", "peak"):
        getattr(method, name).copy_(getattr(same, name))
    batch, fresh = method.loader.draw(), started(make_method("ce"), tiny[0]).net
    with torch.no_grad():
        guess = fresh.train()(batch.x)
        seen = fresh.eval()(batch.x)
        z = fresh.train()(batch.x).log_softmax(1)
    x = (cross_entropy(seen, batch.y) - same.low) / (same.high - same.low + 1e-6)
    assert not torch.equal(guess.argmax(1), seen.argmax(1))
    targets = bootstrap_targets(batch.y, guess, beta_posterior(torch.minimum(x, same.peak), same.mixture))
    penalty = sum(0.1 * math.log(0.1 / float(p)) for p in z.exp().mean(0))
    expected = float(-(targets * z).sum(1).mean()) + 0.5 * penalty
    assert float(method.step(batch)["loss"]) == pytest.approx(expected, rel=1e-4)


def test_m_correction_treats_the_largest_losses_as_wrong(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second component is the narrower one, its posterior falls beyond its peak, but w does not."""
    narrow = torch.tensor([[0.51, 0.49], [0.85, 3.31], [1.54, 2.01]], dtype=torch.float64)
    monkeypatch.setattr("warpi.methods.m_correction.two_betas", lambda _: narrow)
    method = started(MCorrection(warm_up=0.0), tiny[0])
    next(method.epoch(0))  # fits the mixture
    losses = torch.linspace(float(method.low), float(method.high) + 1, 200)
    w = method.wrong(losses)
    assert bool((w.diff() > -1e-6).all())
    assert float(w[-1]) == pytest.approx(float(w.max()))
    assert float(w[-1]) > 0.7
    assert float(beta_posterior(torch.ones(1), narrow)) < 0.2
    wide = torch.tensor([[0.5, 0.5], [2.0, 0.9], [4.0, 0.6]], dtype=torch.float64)  # the posterior also rises towards 0
    assert float(beta_posterior(torch.zeros(1), wide)) > 0.9
    assert float(loss_of_largest_posterior(wide)) == 1


def test_m_correction_finds_wrong_labels(digits: Dataset) -> None:
    task, truth = make_task(digits, "symmetric:0.5", meta=20, seed=1)
    method = MCorrection()
    trained(method, task, recipe=Recipe(epochs=10))
    rows, z = predict_rows(method.net, task.train)
    w = method.wrong(cross_entropy(z, task.train.y))
    assert truth.clean is not None
    wrong = truth.clean != task.train.y
    assert w[wrong].mean() > w[~wrong].mean() + 0.4
    assert len(rows) == len(wrong)


# --- D2L --------------------------------------------------------------------------------------------------------------


def test_d2l_restores_the_weights_before_the_turning_point(tiny: TaskAndTruth) -> None:
    lids = [9.0, 7.0, 5.0, 4.0, 4.2, 30.0, 8.0, 3.0]
    method = started(D2L(), tiny[0], replace(RECIPE, epochs=8))
    begins, alphas = [], []
    for t in range(8):
        method.lids[t] = lids[t]
        measured = weights(method.net)
        method.pace(t)
        begins.append((measured, weights(method.net)))
        alphas.append(float(method.alpha))
        for batch in method.loader.epoch(t):
            method.step(batch)
    expected = [1.0] * 5 + [math.exp(-t / 8 * lids[t] / min(lids[: t + 1])) for t in (5, 6, 7)]
    assert alphas == pytest.approx(expected)
    for t, (measured, continued_with) in enumerate(begins):
        assert all(
            map(torch.equal, continued_with, begins[4][1] if t == 5 else measured)
        )  # the turning point restores the previous epoch
    assert not all(map(torch.equal, *begins[5]))


def test_target_of_d2l(tiny: TaskAndTruth) -> None:
    method = started(D2L(), tiny[0])
    method.alpha.fill_(0.3)
    other = started(make_method("ce"), tiny[0])
    batch = method.loader.draw()
    z = other.net(batch.x)
    target = 0.3 * one_hot(batch.y, 10) + 0.7 * one_hot(z.argmax(1), 10)
    expected = -(target * z.log_softmax(1)).sum(1).mean().detach()
    assert float(method.step(batch)["loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_d2l_measures_the_dimensionality_of_features(tiny: TaskAndTruth) -> None:
    method = started(D2L(points=100, k=10), tiny[0])
    first = method.dimension(0)
    assert first == method.dimension(0)
    assert 2 < first < 64
    assert first != method.dimension(1)  # other points
    one = replace(tiny[0].train, rows=tiny[0].train.rows[:1], y=tiny[0].train.y[:1])
    method.task = replace(tiny[0], train=one)
    assert method.dimension(0) == 1


def test_d2l_has_no_turning_point_in_the_first_epochs(tiny: TaskAndTruth) -> None:
    method = started(D2L(), tiny[0], replace(RECIPE, epochs=3))
    method.lids[:2] = torch.tensor([5.0, 6.0])  # with one earlier LID, any rise would count
    method.pace(1)
    assert not method.turned


def test_d2l_skips_a_last_batch_with_few_points(monkeypatch: pytest.MonkeyPatch, tiny: TaskAndTruth) -> None:
    """With three points, each has two neighbors only, and the estimate has no mean."""
    method, sizes = started(D2L(points=131), tiny[0]), list[int]()
    monkeypatch.setattr("warpi.methods.d2l.lid", lambda h, _: sizes.append(len(h)) or h[:, 0])
    method.dimension(0)
    assert sizes == [128]


# --- LIMIT ------------------------------------------------------------------------------------------------------------


class KnownLabels(nn.Module):
    """A network whose logits are the labels of one batch."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.z = nn.Parameter(100 * one_hot(y, 10))

    def forward(self, _: Tensor) -> Tensor:
        return self.z


def test_limit_with_known_labels_is_cross_entropy(tiny: TaskAndTruth) -> None:
    method, ce = started(LIMIT(), tiny[0]), started(make_method("ce"), tiny[0])
    batch = method.loader.draw()
    method.nets[1] = KnownLabels(batch.y)
    method.optimizers[1] = torch.optim.SGD(method.nets[1].parameters(), 0.0)
    method.step(batch)
    ce.step(batch)
    for a, b in zip(weights(method.nets[0]), weights(ce.net), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dist", ["gaussian", "laplace"])
def test_loss_of_limit_agrees_with_a_loop(dist: Any, tiny: TaskAndTruth) -> None:
    method, same = (started(LIMIT(dist=dist, beta=0.5), tiny[0]) for _ in range(2))
    batch = method.loader.draw()
    with torch.no_grad():
        p, q = (net(batch.x).softmax(1) for net in same.nets)
    total = 0.0
    for pi, qi, yi in zip(p.tolist(), q.tolist(), batch.y.tolist(), strict=True):
        for k in range(10):
            g, mu = pi[k] - (k == yi), pi[k] - qi[k]
            total += ((g - mu) ** 2 if dist == "gaussian" else abs(g - mu)) + 0.5 * mu**2
    assert float(method.step(batch)["q_loss"]) == pytest.approx(total / len(batch.y), rel=1e-4)


def test_classifier_of_limit_never_sees_labels(tiny: TaskAndTruth) -> None:
    a, b = started(LIMIT(), tiny[0]), started(LIMIT(), tiny[0])
    batch = a.loader.draw()
    a.step(batch)
    b.step(Batch(batch.views, (batch.y + 3) % 10, batch.rows))
    assert all(map(torch.equal, weights(a.nets[0]), weights(b.nets[0])))
    assert not all(map(torch.equal, weights(a.nets[1]), weights(b.nets[1])))


# --- SMP, NoiseRank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.7, 0.0])
@pytest.mark.parametrize("valid", [8, 3])
def test_label_posterior_agrees_with_a_loop(gamma: float, valid: int) -> None:
    """Also with fewer valid neighbors than k, and with equal votes (gamma = 0)."""
    h, y, among = F.normalize(random_tensor(9, 3), dim=1), labels(9, 3), torch.arange(9) < valid
    p = label_posterior(h, y, 3, 4, gamma, among)
    for i in range(9):
        near = sorted((float((h[i] - h[j]).square().sum()), j) for j in range(valid) if j != i)[:4]
        votes = [sum(math.exp(-gamma * d) for d, j in near if y[j] == c) for c in range(3)]
        total = sum(map(math.exp, votes))
        assert p[i].tolist() == pytest.approx([math.exp(v) / total for v in votes], rel=1e-4)


def test_noiserank_ranks_in_rounds(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    for rounds, expected in ((1, [5]), (3, [5, 13, 21]), (100, list(range(5, 30)))):
        method, ranked = started(NoiseRank(rounds=rounds), tiny[0], replace(RECIPE, epochs=30)), [0]
        monkeypatch.setattr(method, "rank", lambda n=ranked: n.append(n.pop() + 1))
        epochs = []
        for t in range(30):
            before = ranked[0]
            method.loader.count = t * method.loader.steps
            next(method.epoch(t))
            epochs += [t] * (ranked[0] - before)
        assert epochs == expected


# --- CleanNet ---------------------------------------------------------------------------------------------------------


def test_similarity_loss() -> None:
    cos = torch.tensor([0.9, -0.2, 0.05, 0.5])
    assert similarity_loss(cos, torch.ones(4).bool(), 5, 0.1).tolist() == pytest.approx([0.1, 1.2, 0.95, 0.5])
    assert similarity_loss(cos, torch.zeros(4).bool(), 5, 0.1).tolist() == pytest.approx([4.0, 0.0, 0.0, 2.0])


def test_embedding_of_a_class_is_invariant_to_the_order_of_references() -> None:
    """The references themselves matter, and each class has one embedding."""
    torch.manual_seed(0)
    net, v, V = Embedding(6), random_tensor(4, 6), random_tensor(3, 5, 6, seed=2)
    y = torch.tensor([0, 1, 2, 1])
    cos, back = net(v, y, V)
    assert cos.shape == back.shape == (4,)
    torch.testing.assert_close(net(v, y, V.flip(1))[0], cos)
    assert not torch.allclose(net(v, y, V.roll(1, 0))[0], cos)
    phi_s = net.classes(V)
    for i in range(4):
        torch.testing.assert_close(cos[i], F.cosine_similarity(net.query(v[i]), phi_s[y[i]], dim=0))


def test_cleannet_gives_wrong_labels_less_weight(digits: Dataset) -> None:
    task, truth = make_task(digits, "pair:0.4", meta=50, seed=1, limit=600)
    method = CleanNet(references=8, warm_up=0.5)
    trained(method, task, recipe=Recipe(epochs=6))
    assert truth.clean is not None
    wrong = truth.clean != task.train.y
    assert method.w[wrong].mean() < 0.6 * method.w[~wrong].mean()
    assert bool(((method.w >= 0) & (method.w <= 1)).all())
    method.weighting = "hard"
    method.embedding_steps = 1
    method.verify(6)
    assert method.w[wrong].mean() < 0.9 * method.w[~wrong].mean()
    assert set(method.w.tolist()) == {0.0, 1.0}


# --- CAL --------------------------------------------------------------------------------------------------------------


def test_covariance_agrees_with_a_loop() -> None:
    B, K = 30, 3
    losses, y, cluster = random_tensor(B, K).abs(), labels(B, K), labels(B, K, seed=4)
    T, mean, prior = (
        random_tensor(K, K, seed=5).softmax(1),
        random_tensor(K, K, seed=6).abs(),
        torch.tensor([0.2, 0.3, 0.5]),
    )
    expected = 0.0
    for i in range(K):
        inside = [b for b in range(B) if cluster[b] == i]
        for j in range(K):
            products = [(float(y[b] == j) - float(T[i, j])) * float(losses[b, j] - mean[i, j]) for b in inside]
            expected += float(prior[i]) * sum(products) / len(inside)
    assert float(covariance(losses, y, cluster, T, mean, prior)) == pytest.approx(expected, rel=1e-4)
    one = torch.zeros(B, dtype=torch.long)
    assert (
        float(covariance(losses, y, one, T, mean, torch.ones(K)))
        == pytest.approx(  # empty clusters are ignored
            sum(float(covariance(losses[b : b + 1], y[b : b + 1], one[:1], T, mean, torch.ones(K))) for b in range(B))
            / B,
            rel=1e-4,
        )
    )


def test_sieve_of_cal_keeps_or_replaces_labels(tiny: TaskAndTruth) -> None:
    for sieve, kept in ((-1e9, False), (1e9, True)):
        method = started(CAL(sieve=sieve), tiny[0])
        batch = method.loader.draw()
        predicted = deepcopy(method.net)(batch.x).argmax(1)  # in training mode, on the augmented batch
        method.step(batch)
        assert torch.equal(method.cluster[batch.rows], batch.y if kept else predicted)
        method.distil()
        for k in range(10):
            inside = method.cluster == k
            assert float(method.prior[k]) == pytest.approx(inside.float().mean().item())
            if inside.any():
                shares = torch.bincount(tiny[0].train.y[inside], minlength=10) / inside.sum()
                torch.testing.assert_close(method.T[k], shares)


def test_phases_of_cal(tiny: TaskAndTruth) -> None:
    method = started(CAL(alpha_sieve=3.0, alpha=0.5, sieve_share=0.5), tiny[0], replace(RECIPE, epochs=26))
    alphas, second = [], []
    for t in range(26):
        method.loader.count = t * method.loader.steps
        next(method.epoch(t))
        alphas.append(float(method.weight))
        assert method.lr_factor(t) == pytest.approx(1 / (1 + alphas[-1]))
        second.append(method.second)
    ramp = [3 * min(1, max(0, (t * 5 - 10) / 30)) for t in range(13)]  # 13 epochs for 65
    ramp += [0.5 * min(1, max(0, (t * 100 / 13 - 10) / 30)) for t in range(13)]  # 13 for 100
    assert alphas == pytest.approx(ramp)
    assert second == [False] * 13 + [True] * 13


def test_cal_restarts_after_the_sieve(tiny: TaskAndTruth) -> None:
    recipe = replace(RECIPE, epochs=2, lr=0.0, weight_decay=0.0)
    method, fresh = (started(CAL(sieve_share=0.5), tiny[0], recipe) for _ in range(2))
    with torch.no_grad():
        for p in method.net.parameters():
            p.add_(1)  # pretend that it has learned
    list(method.epoch(0))
    cluster = method.cluster.clone()
    list(method.epoch(1))
    assert torch.equal(method.cluster, cluster)  # by the network of the first phase
    assert all(map(torch.equal, method.net.parameters(), fresh.net.parameters()))
    assert method.recipe.lr_at(1, method.schedule_starts) == recipe.lr


# --- losses of single steps -------------------------------------------------------------------------------------------


def test_losses_of_smp_noiserank_cleannet_and_cal_agree_with_loops(tiny: TaskAndTruth) -> None:
    n, expected = len(tiny[0].train), 0.0
    rng = torch.Generator().manual_seed(0)
    smp, rank, clean, cal = (started(m, tiny[0]) for m in (SMP(alpha=0.3), NoiseRank(), CleanNet(), CAL()))
    batch = smp.loader.draw()
    ell = -started(make_method("ce"), tiny[0]).net(batch.x).detach().log_softmax(1)  # the same network before its step
    pairs = list(zip(ell.tolist(), batch.y.tolist(), batch.rows.tolist(), strict=True))
    ce = [losses[y] for losses, y, _ in pairs]

    smp.y_hat.copy_(torch.randint(10, (n,), generator=rng))
    expected = sum(0.7 * losses[y] + 0.3 * losses[smp.y_hat[row]] for losses, y, row in pairs) / 32
    assert float(smp.step(batch)["loss"]) == pytest.approx(expected, rel=1e-4)

    rank.kept.copy_(torch.randint(2, (n,), generator=rng))
    kept = [loss for loss, (_, _, row) in zip(ce, pairs, strict=True) if rank.kept[row]]
    assert 0 < len(kept) < 32
    assert float(rank.step(batch)["loss"]) == pytest.approx(sum(kept) / len(kept), rel=1e-4)

    clean.w.copy_(torch.rand(n, generator=rng))
    expected = sum(float(clean.w[row]) * loss for loss, (_, _, row) in zip(ce, pairs, strict=True)) / 32
    assert float(clean.step(batch)["loss"]) == pytest.approx(expected, rel=1e-4)

    cal.second = True
    cal.weight.fill_(0.4)
    cal.cluster.copy_(torch.randint(10, (n,), generator=rng))
    cal.T.copy_(random_tensor(10, 10).softmax(1))
    cal.mean.copy_(random_tensor(10, 10, seed=1).abs())
    floors = -(ell.neg().exp() + 1e-5).log()
    peer = sum(float(cal.P[k]) * float(losses[k]) for losses in floors for k in range(10)) / 32
    cov = covariance(floors, batch.y, cal.cluster[batch.rows], cal.T, cal.mean, cal.prior)
    expected = sum(ce) / 32 - 0.4 * peer - float(cov)
    assert float(cal.step(batch)["loss"]) == pytest.approx(expected, rel=1e-4)
    assert cal.counts.tolist() == torch.bincount(cal.cluster[batch.rows], minlength=10).tolist()
    for c in range(10):
        torch.testing.assert_close(cal.sums[c], floors[cal.cluster[batch.rows] == c].sum(0), rtol=1e-4, atol=1e-5)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", NEED_FEATURES, ids=lambda m: type(m).__name__)
def test_network_without_features_is_refused(method: Method, tiny: TaskAndTruth) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(UserError, match="Sequential has no method features"):
        trained(replace(method), tiny[0], recipe=replace(RECIPE, net=plain))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CDR(tau=1.2), "tau must be between 0 and 1, got 1.2"),
        (lambda: PLC(window=0), "window must be at least 1"),
        (lambda: PLC(theta=-0.1), "theta must be between"),
        (lambda: PENCIL(label_lr=-1.0), "label_lr must be at least 0"),
        (lambda: MCorrection(reg=float("nan")), "reg must be at least 0"),
        (lambda: D2L(k=1), "k must be at least 2"),
        (lambda: LIMIT(dist="normal"), "dist 'normal'"),
        (lambda: SMP(alpha=2.0), "alpha must be between"),
        (lambda: NoiseRank(rounds=0), "rounds must be at least 1"),
        (lambda: CleanNet(weighting="weak"), "weighting 'weak'"),
        (lambda: CAL(sieve_share=1.1), "sieve_share must be between"),
    ],
)
def test_numbers_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
