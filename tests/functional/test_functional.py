"""Gaussians and losses compared with closed forms, loops and torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from random_inputs import SOME, make_generator, normal, seeds
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from warpi.functional.gaussian import DiagGaussian
from warpi.functional.intervals import wilson_interval
from warpi.functional.losses import cross_entropy, cross_entropy_gradient, rectified_cross_entropy
from warpi.functional.mixup import balanced_partners

# --- gaussian -------------------------------------------------------------------------------------------------------


@SOME
@given(seeds, st.integers(1, 5), st.integers(1, 4))
def test_kl_equals_that_of_torch(seed: int, n: int, d: int) -> None:
    q, p = (DiagGaussian(normal(n, d, seed=seed + i), normal(n, d, seed=seed + i + 1)) for i in (0, 10))
    expected = kl_divergence(*(Independent(Normal(g.mean, g.std), 1) for g in (q, p)))
    torch.testing.assert_close(q.kl(p), expected, rtol=1e-10, atol=1e-10)
    assert bool((q.kl(p) >= 0).all())
    torch.testing.assert_close(q.kl(q), torch.zeros(n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_std_is_the_square_root_of_the_variance() -> None:
    log_var = normal(3, 4)
    torch.testing.assert_close(DiagGaussian(log_var, log_var).std ** 2, log_var.exp())


def test_samples_have_the_right_mean_and_variance() -> None:
    n = 50_000
    q = DiagGaussian(torch.tensor([[1.0, -2.0, 0.0]]).double(), torch.tensor([[0.0, -3.0, 1.5]]).double())
    s = q.rsample(n, make_generator(1))
    assert s.shape == (n, 1, 3)
    assert bool(((s.mean(0) - q.mean).abs() < 5 * q.std / math.sqrt(n)).all())
    assert bool((s.var(0) / q.std**2 - 1).abs().max() < 5 * math.sqrt(2 / n))
    r = (s - q.mean) / q.std
    assert abs(float((r[:, 0, 0] * r[:, 0, 1]).mean())) < 5 / math.sqrt(n)  # coordinates are independent


def test_samples_are_differentiable() -> None:
    """s = mean + exp(log_var / 2) eps, so ds/dmean = 1 and ds/dlog_var = (s - mean) / 2."""
    mean, log_var = normal(5, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_()
    s = DiagGaussian(mean, log_var).rsample(4, make_generator())  # [4, 5, 3]
    w = normal(4, 5, 3, seed=2)
    d_mean, d_log_var = torch.autograd.grad((w * s).sum(), (mean, log_var))
    torch.testing.assert_close(d_mean, w.sum(0))
    torch.testing.assert_close(d_log_var, (w * (s - mean) / 2).sum(0).detach())


def test_samples_depend_only_on_the_generator() -> None:
    q, before = DiagGaussian(normal(2, 3), normal(2, 3)), torch.get_rng_state()
    assert torch.equal(q.rsample(3, make_generator(7)), q.rsample(3, make_generator(7)))
    assert not torch.equal(q.rsample(3, make_generator(7)), q.rsample(3, make_generator(8)))
    assert torch.equal(before, torch.get_rng_state())


# --- losses ---------------------------------------------------------------------------------------------------------


@SOME
@given(seeds, st.integers(1, 6), st.integers(1, 7), st.integers(1, 4))
def test_cross_entropy(seed: int, b: int, k: int, n_samples: int) -> None:
    z = 5 * normal(n_samples, b, k, seed=seed)
    y = torch.randint(k, (b,), generator=make_generator(seed))
    for i in range(n_samples):
        expected = F.cross_entropy(z[i], y, reduction="none")
        torch.testing.assert_close(cross_entropy(z[i], y), expected)  # [B, K]
        torch.testing.assert_close(cross_entropy(z, y)[i], expected)  # [L, B, K]
    assert cross_entropy(z, y).shape == (n_samples, b)


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    z = torch.tensor([[1e4, 0.0], [0.0, 1e4]], requires_grad=True)
    losses = cross_entropy(z, torch.tensor([0, 0]))
    assert losses.tolist() == [0.0, 1e4]
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert bool(grad.isfinite().all())


@SOME
@given(seeds, st.integers(1, 6), st.integers(2, 5), st.integers(1, 3))
def test_rectified_cross_entropy_and_its_gradients(seed: int, b: int, k: int, n_samples: int) -> None:
    """The loss, its gradient u at the logits, and the gradient of <u, w> in v equal those of autograd."""
    v = normal(n_samples, b, k, seed=seed).requires_grad_()
    z = normal(b, k, seed=seed + 1).requires_grad_()
    w = normal(b, k, seed=seed + 2)
    y = torch.randint(k, (b,), generator=make_generator(seed))
    wanted = sum(F.cross_entropy(v[j] * z, y) for j in range(n_samples)) / n_samples
    assert isinstance(wanted, Tensor)
    (wanted_u,) = torch.autograd.grad(wanted, z, create_graph=True)
    (wanted_dv,) = torch.autograd.grad(wanted_u, v, w)
    loss, u = rectified_cross_entropy(v, z.detach(), y)
    (dv,) = torch.autograd.grad(u, v, w)
    assert not loss.requires_grad
    torch.testing.assert_close([loss, u, dv], [wanted.detach(), wanted_u, wanted_dv], rtol=1e-10, atol=1e-13)


@SOME
@given(seeds, st.integers(1, 6), st.integers(2, 5))
def test_cross_entropy_gradient(seed: int, b: int, k: int) -> None:
    z = normal(b, k, seed=seed).requires_grad_()
    y = torch.randint(k, (b,), generator=make_generator(seed))
    wanted = F.cross_entropy(z, y)
    (wanted_u,) = torch.autograd.grad(wanted, z)
    actual = cross_entropy_gradient(z.detach(), y)
    torch.testing.assert_close(actual, (wanted.detach(), wanted_u), rtol=1e-10, atol=1e-13)


def test_rectified_cross_entropy_of_huge_logits_is_finite() -> None:
    v = torch.ones(1, 2, 2)
    loss, u = rectified_cross_entropy(v, torch.tensor([[1e4, -1e4], [1e4, -1e4]]), torch.tensor([0, 1]))
    torch.testing.assert_close(loss, torch.tensor(1e4))
    torch.testing.assert_close(u, torch.tensor([[0.0, 0.0], [0.5, -0.5]]))


def test_balanced_partners_are_drawn_equally_from_both_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    group = (torch.arange(400) < 40).float()  # a tenth of the examples
    partner = torch.stack([balanced_partners(group, generator, [len(group)]) for _ in range(50)])  # 20,000 draws
    assert 0.48 < group[partner].mean().item() < 0.52
    counts = torch.bincount(partner.flatten(), minlength=400).float()
    assert counts[:40].min() > 150
    assert 5 < counts[40:].min() < counts[40:].max() < 70
    for empty in (torch.zeros(8), torch.ones(8)):
        assert set(balanced_partners(empty.repeat(30), generator, [240]).tolist()) <= set(range(240))


# --- intervals ------------------------------------------------------------------------------------------------------


def test_wilson_interval() -> None:
    assert wilson_interval(0.0, 10) == pytest.approx((0, 0.2775), abs=1e-3)
    assert wilson_interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-3)
    assert wilson_interval(0.5, 0) == (0, 1)
    for limit in wilson_interval(0.8, 25, 1.7):  # it solves its equation
        assert abs(0.8 - limit) == pytest.approx(1.7 * math.sqrt(limit * (1 - limit) / 25))
