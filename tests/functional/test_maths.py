"""The pure maths against closed forms, naive loops and torch's own."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from warpi.data.augment import Crop
from warpi.data.examples import Scale, TensorExamples
from warpi.data.split import Split
from warpi.functional.gaussian import DiagGaussian
from warpi.functional.losses import cross_entropy
from warpi.training.metrics import evaluate, scores

SOME = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=chance(seed), dtype=torch.float64)


# --- gaussian -------------------------------------------------------------------------------------------------------


@SOME
@given(seeds, st.integers(1, 5), st.integers(1, 4))
def test_kl_is_that_of_torch(seed: int, n: int, d: int) -> None:
    q, p = (DiagGaussian(normal(n, d, seed=seed + i), normal(n, d, seed=seed + i + 1)) for i in (0, 10))
    theirs = kl_divergence(*(Independent(Normal(g.mean, g.std), 1) for g in (q, p)))
    torch.testing.assert_close(q.kl(p), theirs, rtol=1e-10, atol=1e-10)
    assert bool((q.kl(p) >= 0).all())
    torch.testing.assert_close(q.kl(q), torch.zeros(n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_std_is_the_square_root_of_the_variance() -> None:
    log_var = normal(3, 4)
    torch.testing.assert_close(DiagGaussian(log_var, log_var).std ** 2, log_var.exp())


def test_samples_have_the_mean_and_the_variance() -> None:
    n = 200_000
    q = DiagGaussian(torch.tensor([[1.0, -2.0, 0.0]]).double(), torch.tensor([[0.0, -3.0, 1.5]]).double())
    s = q.rsample(n, chance(1))
    assert s.shape == (n, 1, 3)
    assert bool(((s.mean(0) - q.mean).abs() < 5 * q.std / math.sqrt(n)).all())
    assert bool((s.var(0) / q.std**2 - 1).abs().max() < 5 * math.sqrt(2 / n))
    r = (s - q.mean) / q.std
    assert abs(float((r[:, 0, 0] * r[:, 0, 1]).mean())) < 5 / math.sqrt(n)  # coordinates are independent


def test_samples_are_differentiable() -> None:
    """s = mean + exp(log_var / 2) eps, so ds/dmean = 1 and ds/dlog_var = (s - mean) / 2."""
    mean, log_var = normal(5, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_()
    s = DiagGaussian(mean, log_var).rsample(4, chance())  # [4, 5, 3]
    w = normal(4, 5, 3, seed=2)
    d_mean, d_log_var = torch.autograd.grad((w * s).sum(), (mean, log_var))
    torch.testing.assert_close(d_mean, w.sum(0))
    torch.testing.assert_close(d_log_var, (w * (s - mean) / 2).sum(0).detach())


def test_samples_come_from_the_generator_alone() -> None:
    q, before = DiagGaussian(normal(2, 3), normal(2, 3)), torch.get_rng_state()
    assert torch.equal(q.rsample(3, chance(7)), q.rsample(3, chance(7)))
    assert not torch.equal(q.rsample(3, chance(7)), q.rsample(3, chance(8)))
    assert torch.equal(before, torch.get_rng_state())


# --- losses ---------------------------------------------------------------------------------------------------------


@SOME
@given(seeds, st.integers(1, 6), st.integers(1, 7), st.integers(1, 4))
def test_cross_entropy(seed: int, b: int, k: int, n_samples: int) -> None:
    z = 5 * normal(n_samples, b, k, seed=seed)
    y = torch.randint(k, (b,), generator=chance(seed))
    for i in range(n_samples):
        theirs = F.cross_entropy(z[i], y, reduction="none")
        torch.testing.assert_close(cross_entropy(z[i], y), theirs)  # [B, K]
        torch.testing.assert_close(cross_entropy(z, y)[i], theirs)  # [L, B, K]
    assert cross_entropy(z, y).shape == (n_samples, b)


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    z = torch.tensor([[1e4, 0.0], [0.0, 1e4]], requires_grad=True)
    losses = cross_entropy(z, torch.tensor([0, 0]))
    assert losses.tolist() == [0.0, 1e4]
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert bool(grad.isfinite().all())


# --- evaluate -------------------------------------------------------------------------------------------------------


def naive_scores(p: Tensor, y: Tensor, bins: int) -> tuple[float, float, float, list[float]]:
    n, k = p.shape
    hits, nll = [], 0.0
    in_bin: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    per_class: list[list[bool]] = [[] for _ in range(k)]
    for row, label in zip(p.tolist(), y.tolist(), strict=True):
        top = max(row)
        hit = row.index(top) == label
        hits.append(hit)
        nll -= math.log(row[label]) / n
        per_class[label].append(hit)
        for b in range(bins):
            if b / bins < top <= (b + 1) / bins:
                in_bin[b].append((top, hit))
    ece = 0.0
    for members in filter(None, in_bin):
        accuracy = sum(hit for _, hit in members) / len(members)
        confidence = sum(top for top, _ in members) / len(members)
        ece += len(members) / n * abs(accuracy - confidence)
    by_class = [100 * sum(h) / len(h) if h else math.nan for h in per_class]
    return 100 * sum(hits) / n, nll, 100 * ece, by_class


@SOME
@given(seeds, st.integers(1, 60), st.integers(2, 5), st.integers(1, 20))
def test_scores_are_those_of_a_naive_loop(seed: int, n: int, k: int, bins: int) -> None:
    p = (3 * normal(n, k, seed=seed)).softmax(1)
    y = torch.randint(k, (n,), generator=chance(seed))
    got, wanted = scores(p, y, bins), naive_scores(p, y, bins)
    assert got[:3] == pytest.approx(wanted[:3], rel=1e-9, abs=1e-9)
    assert list(got.per_class) == pytest.approx(wanted[3], nan_ok=True)


def test_scores_by_hand() -> None:
    """Two bins. (0, .5]: confidence .5 once, wrong. (.5, 1]: confidences .6, .7, .8, two of three right."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]).double()
    s = scores(p, torch.tensor([1, 0, 0, 0]), bins=2)
    assert s.acc == pytest.approx(50)
    assert s.nll == pytest.approx(-(math.log(0.3) + math.log(0.6) + math.log(0.7) + math.log(0.1)) / 4)
    assert s.ece == pytest.approx(100 * (1 / 4 * 0.5 + 3 / 4 * abs(2 / 3 - 0.7)))
    assert s.per_class[:2] == pytest.approx((200 / 3, 0))
    assert math.isnan(s.per_class[2])  # no example of the third class


def test_scores_of_certain_predictions() -> None:
    y = torch.tensor([2, 0, 1])
    right, wrong = scores(F.one_hot(y, 3).float(), y), scores(F.one_hot((y + 1) % 3, 3).float(), y)
    assert (right.acc, right.nll, right.ece, right.per_class) == (100, 0, 0, (100, 100, 100))
    assert (wrong.acc, wrong.ece, wrong.per_class) == (0, 100, (0, 0, 0))
    assert wrong.nll == pytest.approx(-math.log(1e-12))  # a probability of zero costs much, not infinity


def test_evaluate_does_not_depend_on_the_batches() -> None:
    x, y = normal(23, 4).float(), torch.randint(4, (23,), generator=chance())
    split = Split(TensorExamples(x, Scale(torch.tensor(0.5), torch.tensor(2.0))), torch.arange(23).flip(0), y)
    whole = scores(((x.flip(0) - 0.5) / 2).softmax(1), y)
    for size in (1, 7, 23, 100):
        got = evaluate(lambda z: z.softmax(1), split, size)
        assert got[:3] == pytest.approx(whole[:3])
        assert got.per_class == pytest.approx(whole.per_class)


# --- augment --------------------------------------------------------------------------------------------------------


class Draws(NamedTuple):
    top: list[int]
    left: list[int]
    mirror: list[bool]


def draws(n: int, places: tuple[int, int], flip: bool, generator: torch.Generator) -> Draws:
    top, left = (torch.randint(p, (n, 1), generator=generator)[:, 0].tolist() for p in places)
    mirror = (torch.rand((n, 1), generator=generator)[:, 0] < 0.5).tolist() if flip else [False] * n
    return Draws(top, left, mirror)


def reflected(i: int, size: int) -> int:
    """Where pixel i of a reflected border comes from: -1 is 1, size is size - 2."""
    return -i if i < 0 else 2 * (size - 1) - i if i >= size else i


def naive_crop(image: Tensor, size: int, pad: int, top: int, left: int, mirror: bool) -> Tensor:
    channels, height, width = image.shape
    out = torch.empty(channels, size, size)
    for i in range(size):
        for j in range(size):
            column = size - 1 - j if mirror else j
            row_from, column_from = reflected(top + i - pad, height), reflected(left + column - pad, width)
            out[:, i, j] = image[:, row_from, column_from]
    return out


@SOME
@given(seeds, st.integers(2, 5), st.integers(0, 2), st.integers(0, 2), st.booleans())
def test_crop_is_that_of_a_naive_loop(seed: int, size: int, pad: int, larger: int, flip: bool) -> None:
    height, width = size + larger, size + 2 * larger
    pad = min(pad, size + larger - 1)  # a border can reflect what there is
    x = torch.randint(256, (4, 2, height, width), generator=chance(seed), dtype=torch.uint8)
    got = Crop(size, pad, flip).train(x, chance(seed))
    assert got.shape == (4, 2, size, size)
    places = (height + 2 * pad - size + 1, width + 2 * pad - size + 1)
    drawn = draws(4, places, flip, chance(seed))
    for i in range(4):
        wanted = naive_crop(x[i], size, pad, drawn.top[i], drawn.left[i], drawn.mirror[i])
        assert torch.equal(got[i].float(), wanted)


def test_crop_reaches_every_place_and_both_mirror_images() -> None:
    x = torch.arange(9.0).view(1, 1, 3, 3).expand(400, 1, 3, 3)
    corners = {tuple(c.flatten().tolist()) for c in Crop(2).train(x, chance())}
    plain = {(t * 3 + c, t * 3 + c + 1, t * 3 + c + 3, t * 3 + c + 4) for t in (0, 1) for c in (0, 1)}
    assert corners == plain | {(b, a, d, c) for a, b, c, d in plain}
    assert {tuple(c.flatten().tolist()) for c in Crop(2, flip=False).train(x, chance())} == plain


def test_crop_changes_nothing_in_place_and_depends_on_its_generator_alone() -> None:
    x, crop, before = normal(8, 3, 6, 6), Crop(6, pad=2), torch.get_rng_state()
    copy = x.clone()
    first, again, other = (crop.train(x, chance(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, copy)
    assert torch.equal(before, torch.get_rng_state())


def test_middle_crop() -> None:
    x = torch.arange(2 * 5 * 7).view(1, 2, 5, 7)
    assert torch.equal(Crop(3, pad=2).center(x), x[:, :, 1:4, 2:5])
    assert torch.equal(Crop(5).center(x[..., :5]), x[..., :5])
