"""The transition matrix: estimates, corrected losses, and the methods that use them."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from warpi.errors import UserError
from warpi.functional.losses import cross_entropy, one_hot
from warpi.functional.transition import (
    anchors,
    backward_loss,
    cap_gradient,
    determinant_loss,
    fit_parts,
    forward_loss,
    from_anchors,
    from_given,
    from_trusted,
    importance,
    nmf,
    normalize_rows,
    reweighted_loss,
    well_conditioned,
)
from warpi.methods.dmi import DMINS
from warpi.methods.glc import GLC
from warpi.methods.lccn import LCCN
from warpi.methods.masking import Masking, soft_structure
from warpi.methods.ptd import PTD
from warpi.methods.registry import METHODS, make_method
from warpi.methods.s_model import SModel
from warpi.methods.t_revision import TRevision
from warpi.training.method import Method
from warpi.training.outputs import predict_rows
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth
from warpi.training.warmup import reset_optimizer_state, restart, warmup_epochs

TaskAndTruth = tuple[Task, Truth]
RECIPE = Recipe(epochs=2, batch_size=32, meta_batch_size=16, lr=0.05, seed=7)
NAMES = [name for name, method in METHODS.items() if method.family == "transition"]
RESTARTED = ("forward", "backward", "glc", "t_revision", "ptd", "dmi_ns")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits(n: int = 7, K: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    z = torch.randn(n, K, generator=rng(seed), dtype=torch.float64)
    return z, torch.randint(K, (n,), generator=rng(seed + 1))


def noise(K: int = 4, seed: int = 0) -> Tensor:
    """A transition matrix that keeps most labels."""
    T = torch.rand(K, K, generator=rng(seed), dtype=torch.float64) + 2 * torch.eye(K, dtype=torch.float64)
    return T / T.sum(1, keepdim=True)


# --- estimates ------------------------------------------------------------------------------------------------------


def test_estimates_recover_the_matrix_from_exact_posteriors() -> None:
    """The noisy posteriors of examples with a certain class are the rows of T."""
    T, K = noise(), 4
    clean = torch.cat([torch.full((20, K), 1 / K).double(), torch.eye(K).double()])
    torch.testing.assert_close(from_anchors(clean @ T), T)
    y = torch.arange(K).repeat(5)
    torch.testing.assert_close(from_trusted(one_hot(y, K).double() @ T, y), T)
    p = one_hot(torch.arange(K).repeat_interleave(1000), K).double()  # perfect predictions
    given = torch.cat([torch.multinomial(row, 1000, replacement=True, generator=rng(3)) for row in T])
    counted = from_given(p, given)
    assert float((counted - T).abs().max()) < 0.06  # four standard deviations of 1,000 samples


def test_anchors_agree_with_sorting() -> None:
    p = torch.rand(50, 3, generator=rng(), dtype=torch.float64)
    p[:, 2] /= 20  # a rare class
    rows_of = anchors(p, [1.0, 0.97, 0.9])
    for k in range(3):
        order = sorted(range(50), key=lambda n: -float(p[n, k]))
        rows = min(50, 15 * sum(float(p[n, k]) for n in range(50)))
        assert rows_of[:, k].tolist() == [order[math.ceil(out * rows)] for out in (0.0, 0.03, 0.1)]
    assert rows < 30
    assert torch.equal(anchors(p, [1.0])[0], p.argmax(0))
    assert anchors(p[:1], [0.5]).tolist() == [[0, 0, 0]]  # fewer rows than the quantile asks for


def test_anchors_with_many_classes_have_the_right_class() -> None:
    """With fifty classes, 3 % of all rows are more than one class has."""
    K = 50
    T = 0.6 * torch.eye(K).double() + 0.4 / K
    clean = torch.eye(K).double().repeat_interleave(20, 0).lerp(torch.full((20 * K, K), 1 / K).double(), 0.02)
    for quantile in (1.0, 0.97):
        assert float((from_anchors(clean @ T, quantile) - T).abs().max()) < 0.02


def test_confusion_matrices_agree_with_loops() -> None:
    z, y = logits(30)
    p = z.softmax(1)
    trusted, given = torch.zeros(4, 4).double(), torch.zeros(4, 4).double()
    for i in range(4):
        rows = [p[n] for n in range(30) if y[n] == i]
        trusted[i] = sum(rows) / len(rows)
        for j in range(4):
            given[i, j] = sum(p[n, i] for n in range(30) if y[n] == j) / sum(p[n, i] for n in range(30))
    torch.testing.assert_close(from_trusted(p, y), trusted)
    torch.testing.assert_close(from_given(p, y), given)


def test_rows_of_estimates_are_distributions() -> None:
    T = normalize_rows(torch.tensor([[2.0, -1.0, 2.0], [0.0, 0.0, 0.0], [-3.0, -1.0, -2.0]]))
    assert T.tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    missing = from_trusted(torch.full((3, 4), 0.25), torch.tensor([0, 0, 2]))
    assert missing[1].tolist() == [0, 1, 0, 0]  # a class without trusted examples is treated as free of noise


def test_ill_conditioned_matrix_is_mixed_with_the_identity() -> None:
    T = noise()
    assert torch.equal(well_conditioned(T), T)
    singular = torch.full((4, 4), 0.25)
    torch.testing.assert_close(well_conditioned(singular, 100.0), 0.9 * singular + 0.1 * torch.eye(4))
    mixed = well_conditioned(singular)
    torch.testing.assert_close(mixed, 0.8 * singular + 0.2 * torch.eye(4))
    torch.testing.assert_close(mixed @ torch.linalg.inv(mixed), torch.eye(4), atol=1e-5, rtol=0)


# --- losses ---------------------------------------------------------------------------------------------------------


def test_corrected_losses_with_the_identity_are_cross_entropy() -> None:
    z, y = logits()
    eye, ce = torch.eye(4).double(), cross_entropy(z, y)
    torch.testing.assert_close(forward_loss(z, y, eye), ce)
    torch.testing.assert_close(backward_loss(z, y, eye), ce)
    torch.testing.assert_close(reweighted_loss(z, y, eye.T[y]), ce)
    torch.testing.assert_close(importance(z, y, eye.T[y]), torch.ones(7).double())
    far = torch.tensor([[60.0, -60.0]])  # one probability is 0 in float32
    far.requires_grad_()
    loss = forward_loss(far, torch.tensor([1]), torch.eye(2))
    (u,) = torch.autograd.grad(loss.sum(), far)
    assert 60 < loss.item() < 121
    assert bool(u.isfinite().all())


def test_corrected_losses_agree_with_loops() -> None:
    z, y = logits()
    T, p = noise(), z.softmax(1)
    T_inverse = torch.linalg.inv(T)
    for n in range(7):
        j = int(y[n])
        noisy = sum(float(T[k, j] * p[n, k]) for k in range(4))
        assert forward_loss(z, y, T)[n].item() == pytest.approx(-math.log(noisy))
        back = sum(float(T_inverse[j, k]) * -math.log(float(p[n, k])) for k in range(4))
        assert backward_loss(z, y, T_inverse)[n].item() == pytest.approx(back)
        beta = float(p[n, j]) / noisy
        assert importance(z, y, T.T[y])[n].item() == pytest.approx(beta)
        assert reweighted_loss(z, y, T.T[y])[n].item() == pytest.approx(-beta * math.log(float(p[n, j])))


def test_backward_loss_is_unbiased() -> None:
    """Its expectation over the noisy labels of a true class is the loss of that class."""
    z, _ = logits()
    T = noise()
    T_inverse = torch.linalg.inv(T)
    every = torch.stack([backward_loss(z, torch.full((7,), j), T_inverse) for j in range(4)])  # [given, B]
    clean = torch.stack([cross_entropy(z, torch.full((7,), i)) for i in range(4)])  # [true, B]
    torch.testing.assert_close(T @ every, clean)


def test_forward_loss_is_minimal_at_the_clean_posterior() -> None:
    clean, T = torch.tensor([0.7, 0.2, 0.1, 0.0]).double(), noise()
    noisy = clean @ T
    z = torch.zeros(1, 4).double().requires_grad_()
    optimizer = torch.optim.LBFGS([z], max_iter=200)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(noisy[j] * forward_loss(z, torch.tensor([j]), T)[0] for j in range(4))
        loss.backward()
        return loss.detach()  # torch 2.8 warns if it reads a loss with a graph

    optimizer.step(closure)
    torch.testing.assert_close(z.detach().softmax(1)[0], clean, atol=2e-3, rtol=0)


def test_gradient_of_importance_reaches_the_matrix_only() -> None:
    z, y = logits()
    z.requires_grad_()
    columns = noise().T[y].requires_grad_()
    assert not importance(z, y, columns.detach()).requires_grad
    (u,) = torch.autograd.grad(reweighted_loss(z, y, columns).sum(), columns)
    assert bool((u < 0).all())  # a more likely transition lowers the weight of the label


def test_determinant_loss_agrees_with_a_loop() -> None:
    z, y = logits(40)
    U = torch.zeros(4, 4).double()
    for n in range(40):
        U[y[n]] += z.softmax(1)[n]
    expected = -math.log(abs(float(torch.linalg.det(U))) + 0.5) / 4
    assert determinant_loss(z, y, 0.5).item() == pytest.approx(expected, rel=1e-5)


def test_label_noise_adds_a_constant_to_the_determinant_loss() -> None:
    """Each example occurs ten times, with noisy labels in proportion to T, so the noise is independent of x."""
    counts = torch.tensor([[6, 2, 1, 1], [1, 7, 1, 1], [2, 2, 5, 1], [1, 3, 0, 6]])
    gaps = []
    for seed in (0, 5):
        z, _ = logits(20, seed=seed)
        y = torch.arange(4).repeat(5)
        repeated = [(n, j) for n in range(20) for j in range(4) for _ in range(int(counts[y[n], j]))]
        rows, given = (torch.tensor(part) for part in zip(*repeated, strict=True))
        clean = determinant_loss(z.repeat_interleave(10, 0), y.repeat_interleave(10), 1e-20)
        gaps.append((determinant_loss(z[rows], given, 1e-20) - clean).item())
    log_det = float(torch.linalg.slogdet(counts / 10.0)[1])
    assert gaps == pytest.approx([-log_det / 4] * 2, rel=1e-4)


@pytest.mark.parametrize("present", [[0, 1, 2, 3], [0, 2], [3]])
def test_determinant_loss_skips_classes_without_labels(present: list[int]) -> None:
    z, _ = logits(12)
    y = torch.tensor(present).repeat(12)[:12]
    z.requires_grad_()
    loss = determinant_loss(z, y)
    (u,) = torch.autograd.grad(loss, z)
    assert bool(u.isfinite().all())
    assert float(u.abs().max()) > 0
    if present == [3]:  # only the mean probability of that class remains
        expected = -math.log(12 * float(z.detach().softmax(1)[:, 3].mean()) + 1e-3) / 4
        assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_determinant_loss_with_many_classes_is_finite() -> None:
    z, y = logits(64, 500)
    z.requires_grad_()
    (u,) = torch.autograd.grad(determinant_loss(z, y), z)
    assert bool(u.isfinite().all())


def test_cap_gradient() -> None:
    z, y = logits(8)
    z.requires_grad_()
    limit = math.sqrt(2 / 8)
    for scale, norm in ((1e6, limit), (1e-6, None)):
        (u,) = torch.autograd.grad(scale * cross_entropy(cap_gradient(z), y).mean(), z)
        (plain,) = torch.autograd.grad(scale * cross_entropy(z, y).mean(), z)
        torch.testing.assert_close(u, plain if norm is None else plain / plain.norm() * norm)
    sure = torch.full((8, 4), -50.0).double()
    sure[:, 0] = 50.0  # the largest gradient that cross-entropy can have
    sure.requires_grad_()
    (u,) = torch.autograd.grad(cross_entropy(sure, torch.ones(8).long()).mean(), sure)
    assert u.norm().item() == pytest.approx(limit)


# --- parts ----------------------------------------------------------------------------------------------------------


def test_nmf_recovers_the_parts() -> None:
    W = torch.eye(3).double()[torch.arange(60) % 3]
    W[30:] = torch.rand(30, 3, generator=rng(), dtype=torch.float64)
    H = torch.block_diag(*torch.rand(3, 1, 4, generator=rng(1), dtype=torch.float64) + 0.5)  # parts without overlap
    h = nmf(W @ H, 3, 400, rng(2))
    torch.testing.assert_close(h.sum(1), torch.ones(60).double())
    assert bool((h >= 0).all())
    best = h[:3].argmax(1)
    assert sorted(best.tolist()) == [0, 1, 2]
    assert bool((h[:30].gather(1, best.repeat(10)[:, None]) > 0.95).all())  # pure rows belong to one part
    assert nmf(torch.zeros(4, 5), 2, 3, rng()).sum(1).tolist() == pytest.approx([1.0] * 4)


def test_fit_parts_recovers_the_matrices() -> None:
    r, K, n = 3, 4, 30
    P = torch.stack([noise(K, seed) for seed in range(r)])
    h = torch.rand(n, K, r, generator=rng(), dtype=torch.float64) ** 4
    h = h / h.sum(-1, keepdim=True)
    q = torch.zeros(n, K, K).double()
    for a in range(n):
        for k in range(K):
            q[a, k] = sum(h[a, k, j] * P[j, k] for j in range(r))
    fitted = fit_parts(h, q, 600, 0.02)
    torch.testing.assert_close(fitted.sum(-1), torch.ones(r, K).double())
    assert float((fitted - P).abs().max()) < 0.3 * float((P - P.mean(0)).abs().max())  # the parts differ


def test_fit_parts_stops_before_fitting_noise() -> None:
    """The anchors differ by noise only and contain almost none of the second part, which could overfit them."""
    n, K = 20, 4
    q = (noise(K) + 0.02 * torch.randn(n, K, K, generator=rng(), dtype=torch.float64)).clamp_min(0)
    q = q / q.sum(-1, keepdim=True)
    little = 0.04 * torch.rand(n, K, 1, generator=rng(1), dtype=torch.float64)
    h = torch.cat([1 - little, little], -1)  # [n, K, 2]
    moved = [float((fit_parts(h, q, 300, 0.02, enough)[1] - q.mean(0)).abs().max()) for enough in (1e-3, 0.0)]
    assert moved[0] < 1e-6
    assert moved[1] > 0.05


# --- phases ---------------------------------------------------------------------------------------------------------


def started(name: str, task: Task, recipe: Recipe = RECIPE, **options: Any) -> Method:
    method = make_method(name, **options)
    method.start(task, recipe)
    return method


def weights(method: Method) -> list[Tensor]:
    return [t.detach().clone() for t in method.net.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_warmup_epochs() -> None:
    assert [warmup_epochs(0.2, epochs) for epochs in (1, 2, 10, 30)] == [1, 1, 2, 6]


@pytest.mark.parametrize("name", ["dmi", "lccn", "masking", "s_model"])
def test_methods_that_continue_from_a_network_wait_for_the_learning_rate_to_decay(name: str) -> None:
    """Early predictions, at the high learning rate, are too poor to learn from. Uses the defaults for images."""
    recipe = replace(RECIPE, epochs=20)
    begins = warmup_epochs(METHODS[name].warmup, recipe.epochs)  # type: ignore[attr-defined]
    assert recipe.lr_at(begins) < recipe.lr
    assert begins < recipe.epochs


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_restart_equals_a_fresh_start(optimizer: str, tiny: TaskAndTruth) -> None:
    recipe = replace(RECIPE, optimizer=optimizer, lr=0.01)
    fresh, used = started("ce", tiny[0], recipe), started("ce", tiny[0], recipe)
    list(used.epoch(0))
    assert not same(weights(used), weights(fresh))
    addresses = [p.data_ptr() for p in used.net.parameters()]
    restart(used)
    assert same(weights(used), weights(fresh))
    assert [p.data_ptr() for p in used.net.parameters()] == addresses  # captured steps need it
    used.loader.count = 0
    list(used.epoch(0))
    list(fresh.epoch(0))
    assert same(weights(used), weights(fresh))


@pytest.mark.parametrize("name", ["t_revision", "ptd"])
def test_second_phase_restarts_or_continues(name: str, tiny: TaskAndTruth) -> None:
    first = weights(started(name, tiny[0]))
    for reinitialize in (True, False):
        method = started(
            name, tiny[0], replace(RECIPE, epochs=4, lr=0.0, weight_decay=0.0), warmup=0.25, reinitialize=reinitialize
        )
        with torch.no_grad():
            for p in method.net.parameters():
                p.add_(1)  # pretend that it has learned
        list(method.epoch(0))
        learned = weights(method)
        list(method.epoch(1))
        moved = [
            t for t, buffer in zip(weights(method), method.net.state_dict(), strict=True) if "running" not in buffer
        ]
        expected = [
            t
            for t, buffer in zip(first if reinitialize else learned, method.net.state_dict(), strict=True)
            if "running" not in buffer
        ]
        assert same([t for t in moved if t.is_floating_point()], [t for t in expected if t.is_floating_point()])


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_loss_correction_starts_as_cross_entropy(name: str, tiny: TaskAndTruth) -> None:
    """Also for labels with probability 0, for which the corrected loss is bounded."""
    methods = [started(n, tiny[0], replace(RECIPE, epochs=10)) for n in (name, "ce")]
    for method in methods:
        with torch.no_grad():
            list(method.net.parameters())[-1].copy_(torch.tensor([40.0] + (tiny[0].n_classes - 1) * [0.0]))
        list(method.epoch(0))
    for a, b in zip(*map(weights, methods), strict=True):
        torch.testing.assert_close(a, b)


def test_reset_optimizer_state_clears_momentum(tiny: TaskAndTruth) -> None:
    method = started("ce", tiny[0], replace(RECIPE, weight_decay=0.0))
    list(method.epoch(0))
    before = weights(method)
    reset_optimizer_state(method.optimizer)
    for p in method.net.parameters():
        p.grad = torch.zeros_like(p)
    method.optimizer.step()
    assert same(weights(method), before)


@pytest.mark.parametrize("name", NAMES)
def test_first_phase_is_cross_entropy(name: str, tiny: TaskAndTruth) -> None:
    """The second phase starts from the initial weights for the methods in RESTARTED."""
    ce, method = started("ce", tiny[0]), started(name, tiny[0])
    list(ce.epoch(0))
    list(method.epoch(0))
    for a, b in zip(weights(method), weights(ce), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    seen: list[list[Tensor]] = []
    step = type(method).step

    def first(batch: Any) -> Any:
        seen.append(weights(method))
        return step(method, batch)

    method.step = first  # type: ignore[method-assign]
    end = weights(method)
    next(iter(method.epoch(1)))
    assert same(seen[0], weights(started("ce", tiny[0])) if name in RESTARTED else end)


# --- methods --------------------------------------------------------------------------------------------------------


def flat(T: Tensor | None) -> tuple[float, ...]:
    assert T is not None
    return tuple(T.flatten().tolist())


def test_identity_matrix_gives_cross_entropy(tiny: TaskAndTruth) -> None:
    ce = started("ce", tiny[0])
    list(ce.epoch(0))
    for name in ("forward", "backward"):
        method = started(name, tiny[0], matrix=flat(torch.eye(10)))
        list(method.epoch(0))
        for a, b in zip(weights(method), weights(ce), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_loss_of_glc_agrees_with_a_loop(tiny: TaskAndTruth) -> None:
    """The noisy batch is corrected by C, the trusted one is not; they are weighted N : M."""
    method, (task, truth) = GLC(), tiny
    method.start(task, RECIPE)
    assert task.meta is not None
    assert truth.T is not None
    method.measured = True
    method.C.copy_(T := truth.T.float())
    batch, gold = method.loader.draw(), next(task.meta.batches(16))
    method.meta_loader.draw = lambda: gold  # type: ignore[method-assign]
    p = copy.deepcopy(method.net)(torch.cat([batch.x, gold.x])).detach().softmax(1)
    noisy = [-math.log(float(p[n] @ T[:, y])) for n, y in enumerate(batch.y.tolist())]
    trusted = [-math.log(float(p[len(noisy) + n, y])) for n, y in enumerate(gold.y.tolist())]
    N, M = len(task.train), len(task.meta)
    expected = (N * sum(noisy) / len(noisy) + M * sum(trusted) / len(trusted)) / (N + M)
    assert float(method.step(batch)["loss"]) == pytest.approx(expected, rel=1e-5)


def test_s_model_starts_at_the_confusion_matrix_and_learns(tiny: TaskAndTruth) -> None:
    method, task = SModel(), tiny[0]
    method.start(task, RECIPE)
    list(method.epoch(0))
    _, z = predict_rows(method.net, task.train)
    expected = from_given(z.softmax(1), task.train.y)
    steps = method.epoch(1)
    assert float(method.b.detach().abs().max()) == 0
    next(iter(steps))
    torch.testing.assert_close(method.b.detach().softmax(1), expected, atol=0.02, rtol=0)
    before = method.b.detach().clone()
    list(steps)
    assert not torch.equal(method.b.detach(), before)


@pytest.mark.parametrize("name", ["t_revision", "ptd"])
def test_delta_is_learned_in_the_last_phase_only(name: str, tiny: TaskAndTruth) -> None:
    method = started(name, tiny[0], replace(RECIPE, epochs=3), warmup=0.3, revise=0.6, revision_lr=1e-3)
    assert isinstance(method, TRevision | PTD)
    for t, phase in enumerate((0, 1, 2)):
        list(method.epoch(t))
        assert method.phase == phase
        assert bool((method.delta != 0).any()) == (phase == 2)
    assert (
        float(method.delta.detach().abs().max()) < 1e-3 * len(method.loader) * 1.1
    )  # a step of Adam is at most the learning rate


def test_ptd_has_one_matrix_per_example(tiny: TaskAndTruth) -> None:
    method, task = PTD(parts=4, enough=0.0), tiny[0]
    method.start(task, RECIPE)
    batch = next(task.train.batches(9))
    torch.testing.assert_close(method.columns(batch).detach(), one_hot(batch.y, 10))  # initially without noise
    for t in (0, 1):
        list(method.epoch(t))
    T = torch.einsum("nr,rkj->nkj", method.h, method.P)
    torch.testing.assert_close(T.sum(2), torch.ones(len(task.train), 10))
    assert float(T.std(0).max()) > 1e-3
    columns = torch.stack([T[n, :, y] for n, y in enumerate(batch.y.tolist())])
    torch.testing.assert_close(method.columns(batch).detach(), columns, atol=1e-4, rtol=0)


def test_lccn_counts_its_latent_labels(tiny: TaskAndTruth) -> None:
    method, task = LCCN(), tiny[0]
    method.start(task, RECIPE)
    list(method.epoch(0))
    assert float(method.counts.abs().sum()) == 0
    for _ in method.epoch(1):
        expected = torch.zeros(10, 10)
        for z, y in zip(method.latent.tolist(), task.train.y.tolist(), strict=True):
            expected[z, y] += 1
        assert torch.equal(method.counts, expected)
    assert bool((method.latent != task.train.y).any())


def test_lccn_samples_the_only_possible_label(tiny: TaskAndTruth) -> None:
    """If the counts allow one latent label only, it is sampled."""
    method, task = LCCN(alpha=1e-6), tiny[0]
    method.start(task, RECIPE)
    method.phase = 2
    method.latent.copy_((task.train.y - 1) % 10)  # every label comes from the previous class
    for _ in range(3):
        method._count(method.latent, task.train.y, 1.0)
    for batch in method.loader.epoch(0):
        method.step(batch)
    assert torch.equal(method.latent, (task.train.y - 1) % 10)


@pytest.mark.parametrize("phase", [1, 2])
def test_lccn_samples_from_the_posterior(phase: int, tiny: TaskAndTruth) -> None:
    """z ~ p_z phi_{z y}, over many samples for the same batch; large counts keep phi constant."""
    method, task = LCCN(), tiny[0]
    method.start(task, replace(RECIPE, lr=0.0))
    method.phase = phase
    half = torch.eye(10) + torch.eye(10).roll(1, 1)  # half of each class gets the next label
    method.counts += 1e6 * (half if phase == 2 else torch.eye(10).roll(-1, 1))  # in phase 1, T decides
    method.T.copy_((half if phase == 1 else torch.eye(10)) / 2)
    batch = method.loader.draw()
    p = copy.deepcopy(method.net)(batch.x).detach().softmax(1)
    rows, y = torch.arange(len(batch.y)), batch.y
    expected = p[rows, y] / (p[rows, y] + p[rows, (y - 1) % 10])  # the true class is the label or the previous class
    kept = torch.zeros(len(y))
    for _ in range(200):
        method.step(batch)
        z = method.latent[batch.rows]
        assert bool(((z == y) | (z == (y - 1) % 10)).float().mean() > 0.99)
        kept += (z == y) / 200
    assert float((kept - expected).abs().max()) < 0.18  # five standard deviations
    assert float(kept.std()) > 0.05


def test_lccn_starts_with_the_confusion_matrix_of_its_network(tiny: TaskAndTruth) -> None:
    """Cross-entropy, then sampling with a fixed T, then with counts: 1, 1 and 2 of 4 epochs."""
    method, (task, _) = LCCN(warmup=0.25), tiny
    method.start(task, replace(RECIPE, epochs=4))
    list(method.epoch(0))
    rows, z = predict_rows(method.net, task.train)
    phases, matrices = [method.phase], []
    for t in (1, 2, 3):
        list(method.epoch(t))
        phases.append(method.phase)
        matrices.append(method.T.clone())
    assert phases == [0, 1, 2, 2]
    expected = torch.zeros(10, 10)
    for p, y in zip(z.softmax(1), task.train.y[rows].tolist(), strict=True):
        expected[:, y] += p
    torch.testing.assert_close(matrices[0], expected / expected.sum(1, keepdim=True), atol=1e-5, rtol=0)
    assert torch.equal(matrices[0], matrices[2])


def test_student_of_dmi_ns_learns_the_predictions_of_the_teacher(tiny: TaskAndTruth) -> None:
    method, task = DMINS(), tiny[0]
    method.start(task, replace(RECIPE, epochs=4))
    for t in (0, 1):
        list(method.epoch(t))
        assert method.by_determinant == (t == 1)
    assert torch.equal(method.labels, task.train.y)
    _, z = predict_rows(method.net, task.train)
    list(method.epoch(2))
    assert torch.equal(method.labels, z.argmax(1))
    assert not method.by_determinant  # the student also starts with cross-entropy
    list(method.epoch(3))
    assert method.by_determinant


def test_masking_starts_at_the_estimate(tiny: TaskAndTruth) -> None:
    method, task = Masking(), tiny[0]
    method.start(task, RECIPE)
    list(method.epoch(0))
    _, z = predict_rows(method.net, task.train)
    expected = from_given(z.softmax(1), task.train.y)
    next(iter(method.epoch(1)))
    assert torch.equal(method.structure, (expected > 0.05).float())
    T = method.generate(200).detach()
    torch.testing.assert_close(T.sum(2), torch.ones(200, 10))
    assert float((T.mean(0) - expected).abs().max()) < 0.1
    assert float(T.std(0).max()) > 0  # samples differ
    assert all(float(p.detach().abs().max()) <= 0.01 for p in method.D.parameters())


def playing(task: Task, **options: Any) -> Masking:
    """Masking with the identity as its mask and a fixed classifier, in its second phase."""
    method = Masking(mask=flat(torch.eye(10)), **options)
    method.start(task, replace(RECIPE, lr=0.0))
    method.playing = True
    return method


def test_critic_of_masking_prefers_the_mask(tiny: TaskAndTruth) -> None:
    assert soft_structure(torch.tensor([0.0, 0.05, 1.0])).tolist() == pytest.approx([0, 0.5, 1], abs=1e-4)
    method = playing(tiny[0], game_lr=1e-3)
    for _ in range(10):
        method.step(method.loader.draw())
    with torch.no_grad():
        assert method.D(method.structure[None]).item() > method.D(soft_structure(method.generate(50))).max().item()


def test_generator_of_masking_follows_the_critic(tiny: TaskAndTruth) -> None:
    outside = []
    for harshness in (0.0, 1000.0):
        method = playing(tiny[0], game_lr=1e-3, critics=0)
        method.D = nn.Sequential(nn.Flatten(), nn.Linear(100, 1))
        with torch.no_grad():
            method.D[1].weight.copy_(harshness * (2 * torch.eye(10) - 1).reshape(1, 100))  # type: ignore[operator]
        for _ in range(60):
            method.step(method.loader.draw())
        outside.append(float(soft_structure(method.generate(50).detach())[:, ~torch.eye(10).bool()].mean()))
    assert outside[1] < 0.7 * outside[0]  # transitions outside the mask


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("forward", {"warmup": 1.5}, "warmup must be between 0 and 1"),
        ("t_revision", {"warmup": 0.5, "revise": 0.4}, "revise must be between 0.5 and 1"),
        ("dmi", {"epsilon": 0.0}, "epsilon must be at least"),
        ("lccn", {"alpha": 0.0}, "alpha must be at least"),
        ("ptd", {"parts": 0}, "parts must be at least 1"),
        ("masking", {"mask": (2.0,)}, "mask must be between 0 and 1"),
    ],
)
def test_numbers_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_method(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("forward", {"matrix": (0.5, 0.5)}, "matrix has 2 numbers, but 10 classes need 100"),
        ("backward", {"matrix": (0.2,) * 100}, "each row of matrix must be a distribution"),
        ("masking", {"mask": (1.0, 0.0)}, "mask has 2 numbers, but 10 classes need 100"),
    ],
)
def test_invalid_matrices_are_refused(name: str, options: dict[str, Any], message: str, tiny: TaskAndTruth) -> None:
    with pytest.raises(UserError, match=message):
        started(name, tiny[0], **options)
