"""Kernels, ridge regression and Gaussians compared with naive loops, closed forms and limits."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from warpi.fewshot.kernels import (
    alignment,
    fourier_features,
    gaussian_kernel,
    mean_distance,
    spectral_kernels,
    squared_distances,
)
from warpi.fewshot.learners.ridge import fit_features, fit_kernel
from warpi.functional.gaussian import DiagGaussian, GaussianHead
from warpi.utils.seeding import generator, seeded


def spectral_kernel(x: Tensor, y: Tensor, q: DiagGaussian) -> Tensor:
    """The limit of infinitely many bases: x [..., N, d], y [..., M, d], q [..., d] -> [..., N, M]."""
    std, mean = q.std[..., None, :], q.mean[..., None, :]
    angle = (x * mean).sum(-1)[..., :, None] - (y * mean).sum(-1)[..., None, :]
    return torch.exp(-0.5 * squared_distances(x * std, y * std)) * torch.cos(angle)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "test"), dtype=torch.float64)


def gaussian(*shape: int, seed: int = 1) -> DiagGaussian:
    return DiagGaussian(0.5 * draw(*shape, seed=seed), 0.3 * draw(*shape, seed=seed + 1) - 1)


def noise(bases: int, d: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    g = generator(seed, "noise")
    eps = torch.randn(bases, d, generator=g, dtype=torch.float64)
    return eps, 2 * math.pi * torch.rand(bases, generator=g, dtype=torch.float64)


# -- kernels --------------------------------------------------------------------------------------------------------


def test_fourier_features_are_cosines_of_sampled_bases() -> None:
    x, q, (eps, phase) = draw(3, 4, 5), gaussian(3, 5), noise(7, 5)
    z = fourier_features(x, q, eps, phase)  # [3, 4, 7]
    for t in range(3):
        for i in range(4):
            for j in range(7):
                basis = q.mean[t] + q.std[t] * eps[j]
                assert z[t, i, j] == pytest.approx(math.sqrt(2 / 7) * torch.cos(basis @ x[t, i] + phase[j]).item())


def test_sampled_kernel_converges_to_the_exact_one() -> None:
    """The error falls as 1 / sqrt(D): 10 times as many bases divide it by sqrt(10)."""
    x, q = draw(6, 5), gaussian(5)
    exact = spectral_kernel(x, x, q)

    def error(bases: int) -> float:
        parts = (fourier_features(x, q, *noise(bases, 5, seed)) for seed in range(20))
        return math.sqrt(sum(((z @ z.mT - exact) ** 2).mean().item() for z in parts) / 20)

    few, more, many = error(50), error(500), error(5000)
    assert few / more == pytest.approx(math.sqrt(10), rel=0.3)
    assert more / many == pytest.approx(math.sqrt(10), rel=0.3)
    assert many < 0.02


def test_exact_kernel_equals_its_formula() -> None:
    x, y, q = draw(2, 3, 5), draw(2, 4, 5, seed=3), gaussian(2, 5)
    k = spectral_kernel(x, y, q)
    for t in range(2):
        for i in range(3):
            for j in range(4):
                d = x[t, i] - y[t, j]
                expected = torch.exp(-0.5 * (q.std[t] ** 2 * d**2).sum()) * torch.cos(q.mean[t] @ d)
                assert k[t, i, j] == pytest.approx(expected.item(), abs=1e-12)
    gram = spectral_kernel(x, x, q)
    assert torch.allclose(gram.diagonal(dim1=-2, dim2=-1), torch.ones(2, 3, dtype=torch.float64))
    assert torch.linalg.eigvalsh(gram).min() > -1e-10


def test_batched_exact_kernels_equal_single_ones() -> None:
    x, y, q = draw(2, 3, 5), draw(2, 4, 5, seed=3), gaussian(2, 6, 5)
    each = [spectral_kernel(x, y, DiagGaussian(q.mean[:, m], q.log_var[:, m])) for m in range(6)]
    assert torch.allclose(spectral_kernels(x, y, q), torch.stack(each, 1))


def test_exact_kernel_with_zero_mean_equals_the_gaussian_kernel() -> None:
    x, s = draw(2, 6, 3), torch.tensor([0.7, 1.9], dtype=torch.float64)
    q = DiagGaussian(torch.zeros(2, 3, dtype=torch.float64), (-2 * s.log())[:, None].expand(2, 3))
    assert torch.allclose(spectral_kernel(x, x, q), gaussian_kernel(x, x, s))


def test_distances() -> None:
    x, y = draw(2, 4, 3), draw(2, 5, 3, seed=9)
    assert torch.allclose(squared_distances(x, y).sqrt(), torch.cdist(x, y))
    naive = [torch.pdist(part).mean() for part in x]
    assert torch.allclose(mean_distance(x), torch.stack(naive))
    assert mean_distance(x[:, :1]).tolist() == [1, 1]
    equal = torch.zeros(3, 2, requires_grad=True)  # equal vectors: the gradient is not NaN
    mean_distance(equal).backward()
    assert equal.grad is not None
    assert equal.grad.isfinite().all()


def test_alignment() -> None:
    Y = torch.eye(4, dtype=torch.float64)[torch.tensor([0, 1, 1, 3])]
    assert alignment(3 * (Y @ Y.mT + 0.01), Y) == pytest.approx(1)
    assert alignment(1 - Y @ Y.mT, Y) < 0.1


# -- ridge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(4, 9), (9, 4), (5, 5)])
def test_ridge_satisfies_its_equation_in_either_space(n: int, d: int) -> None:
    Z, Y, lam = draw(3, n, d), draw(3, n, 2, seed=1), torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    K, eye = Z @ Z.mT, torch.eye(n, dtype=torch.float64)
    dual, other = fit_kernel(K, Y, lam), fit_features(Z, Y, lam)
    system = K + lam[:, None, None] * eye
    assert torch.allclose(system @ dual.weights, Y)
    primal = torch.linalg.inv(Z.mT @ Z + lam[:, None, None] * torch.eye(d, dtype=torch.float64)) @ Z.mT @ Y
    assert torch.allclose(other.weights, primal)
    query = draw(3, 6, d, seed=4)
    assert torch.allclose(dual.mean(query @ Z.mT), other.mean(query))
    for fit in (dual, other):
        assert torch.allclose(fit.quad, (Y * torch.linalg.solve(system, Y)).sum((1, 2)))
        assert torch.allclose(fit.log_det, torch.logdet(system))
    k = query @ Z.mT
    expected = (query**2).sum(-1) - (k * torch.linalg.solve(system, k.mT).mT).sum(-1)
    assert torch.allclose(dual.variance(k, (query**2).sum(-1)), expected)
    assert torch.allclose(other.variance(query), expected)


@pytest.mark.parametrize("n", [4, 9])
def test_failed_factorization_gives_nan(n: int) -> None:
    """Only the task whose matrix cannot be factorized is NaN."""
    Z = torch.randn(2, n, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fit = fit_features(Z, torch.ones(2, n, 1).double(), torch.tensor([0.1, -50.0]).double())
    assert fit.weights[0].isfinite().all()
    assert fit.weights[1].isnan().all()


def test_evidence_equals_that_of_a_gaussian_process_at_its_best_scale() -> None:
    Z, Y = draw(2, 5, 3), draw(2, 5, 1, seed=1)
    lam = torch.tensor(0.3, dtype=torch.float64)
    system = Z @ Z.mT + lam * torch.eye(5, dtype=torch.float64)
    fit = fit_kernel(Z @ Z.mT, Y, lam.expand(2))
    best = fit.quad / 5
    naive = torch.stack(
        [MultivariateNormal(torch.zeros(5).double(), best[t] * system[t]).log_prob(Y[t, :, 0]) for t in (0, 1)]
    )
    evidence = fit.log_evidence(5, 1)
    assert torch.allclose(evidence[0] - evidence[1], naive[0] - naive[1])
    for factor in (0.8, 1.25):  # another scale makes the labels less likely
        other = MultivariateNormal(torch.zeros(5).double(), factor * best[0] * system[0]).log_prob(Y[0, :, 0])
        assert other < naive[0]


@pytest.mark.parametrize("n", [3, 6])
def test_gradients_of_kernel_and_ridge(n: int) -> None:
    x, Y, query, lam = draw(1, n, 4), draw(1, n, 2, seed=1), draw(1, 2, 4, seed=2), torch.tensor([0.4]).double()
    mean, log_var = (part.requires_grad_() for part in gaussian(1, 4))
    eps, phase = noise(5, 4)

    def sampled(x: Tensor, mean: Tensor, log_var: Tensor, lam: Tensor) -> Tensor:
        q = DiagGaussian(mean, log_var)
        fit = fit_features(fourier_features(x, q, eps, phase), Y, lam)
        return fit.mean(fourier_features(query, q, eps, phase)) + fit.log_evidence(n, 2)

    def exact(x: Tensor, mean: Tensor, log_var: Tensor, lam: Tensor) -> Tensor:
        q = DiagGaussian(mean, log_var)
        return fit_kernel(spectral_kernel(x, x, q), Y, lam).mean(spectral_kernel(query, x, q))

    for function in (sampled, exact):
        assert torch.autograd.gradcheck(function, (x.requires_grad_(), mean, log_var, lam.requires_grad_()))


# -- Gaussians ------------------------------------------------------------------------------------------------------


def test_kl_equals_that_of_torch() -> None:
    p, q = gaussian(3, 4), gaussian(3, 4, seed=7)
    other = kl_divergence(*(Independent(Normal(g.mean, g.std), 1) for g in (p, q)))
    assert torch.allclose(p.kl(q), other)
    assert torch.allclose(p.kl(p), torch.zeros(3, dtype=torch.float64))


def test_mean_kl_equals_the_mean_of_kls() -> None:
    q, others = gaussian(3, 2, 4), gaussian(3, 1, 5, 4, seed=7)
    each = [q.kl(DiagGaussian(others.mean[:, :, j], others.log_var[:, :, j])) for j in range(5)]
    assert torch.allclose(q.mean_kl(others), torch.stack(each).mean(0))


def test_head_has_separate_networks_for_mean_and_log_variance() -> None:
    with seeded(0):
        head = GaussianHead(3, 8, 2)
        h = torch.randn(5, 4, 3)
    q = head(h)
    assert q.mean.shape == q.log_var.shape == (5, 4, 2)
    assert not torch.allclose(q.mean, q.log_var)
    q.mean.sum().backward()
    assert all(p.grad is None for p in head.log_var.parameters())
