"""Few-shot learners: properties that every one of them has, and each against its naive loop."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from warpi.errors import UserError
from warpi.fewshot.learner import Episode, Learner, Problem
from warpi.fewshot.learners.embedding import FeatureNet, class_means
from warpi.fewshot.learners.kernel_ridge import KernelRidge
from warpi.fewshot.learners.maml import MAML
from warpi.fewshot.learners.metavrf import MetaVRF, attend
from warpi.fewshot.learners.protonet import ProtoNet
from warpi.fewshot.learners.registry import LEARNERS, make_learner
from warpi.functional.gaussian import DiagGaussian
from warpi.training import checkpoint
from warpi.utils.seeding import generator, seeded

SHAPES = {"vector": (6,), "image": (2, 12, 10)}
REGRESSION = [name for name, learner in LEARNERS.items() if "regression" in learner.solves]


def small(name: str, **options: Any) -> Learner:
    """A learner of the table, made narrow."""
    had = {f.name for f in fields(LEARNERS[name])}
    narrow = {"features": 5, "bases": 16, "proposals": 3 if name == "metavrf_evidence" else 1, "test_steps": 2}
    return make_learner(name, **{**{k: v for k, v in narrow.items() if k in had}, **options})


def started(learner: Learner, problem: Problem, seed: int = 0) -> Learner:
    """In double precision, so that what is equal is equal to many digits."""
    learner.start(problem, seed)
    learner.net.double()
    return learner


def episode(shape: tuple[int, ...], ways: int, T: int = 3, shots: int = 2, queries: int = 3, seed: int = 0) -> Episode:
    """T tasks whose classes differ by their means; ways 0: sinusoids of the sum of the inputs."""
    g = generator(seed, "episode")
    n = max(ways, 1)
    x = torch.rand(T, n, shots + queries, *shape, generator=g, dtype=torch.float64)
    if ways:
        x = x + 2 * torch.rand(T, n, 1, *shape, generator=g, dtype=torch.float64)
        y = torch.arange(ways)[None, :, None].expand(x.shape[:3])
    else:
        amplitude = 1 + torch.rand(T, 1, 1, generator=g, dtype=torch.float64)
        y = (amplitude * x.flatten(3).sum(-1).mul(2).sin())[..., None]
    part = lambda a, b: (x[:, :, a:b].flatten(1, 2), y[:, :, a:b].flatten(1, 2))
    return Episode(*part(0, shots), *part(shots, shots + queries), ways)


def cases() -> list[Any]:
    found = [pytest.param(name, d, 4, id=f"{name}-{d}") for name in LEARNERS for d in ("vector", "image")]
    return found + [pytest.param(name, "vector", 0, id=f"{name}-regression") for name in REGRESSION]


every = pytest.mark.parametrize(("name", "domain", "ways"), cases())


def said(learner: Learner, e: Episode) -> Tensor:
    """Log-probabilities or numbers; with their standard deviation behind them."""
    out = learner.predict(e.support_x, e.support_y, e.query_x, e.ways)
    value = out.value.log() if e.ways else out.value
    return value if out.std is None else torch.cat([value, out.std], -1)


# -- every learner --------------------------------------------------------------------------------------------------


@every
def test_tasks_at_once_are_tasks_one_by_one(name: str, domain: str, ways: int) -> None:
    e = episode(SHAPES[domain], ways)
    learner = started(small(name), Problem(SHAPES[domain], ways))
    whole = said(learner, e)
    for t in range(3):
        one = (part[t : t + 1] for part in (e.support_x, e.support_y, e.query_x, e.query_y))
        assert torch.allclose(said(learner, Episode(*one, ways))[0], whole[t], atol=1e-6)


@every
def test_the_order_of_the_support_does_not_matter(name: str, domain: str, ways: int) -> None:
    e = episode(SHAPES[domain], ways, shots=3)
    learner = started(small(name), Problem(SHAPES[domain], ways))
    order = torch.randperm(e.support_x.shape[1], generator=generator(1, "order"))
    other = replace(e, support_x=e.support_x[:, order], support_y=e.support_y[:, order])
    assert torch.allclose(said(learner, e), said(learner, other), atol=1e-8)


@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "maml"])  # whose outputs begin unlike
@pytest.mark.parametrize("domain", SHAPES)
def test_other_class_numbers_give_the_same_classes(name: str, domain: str) -> None:
    e = episode(SHAPES[domain], 4)
    learner = started(small(name), Problem(SHAPES[domain], 4))
    names = torch.tensor([2, 0, 3, 1])
    other = replace(e, support_y=names[e.support_y])
    assert torch.allclose(said(learner, e), said(learner, other)[..., names], atol=1e-8)


def norms(learner: Learner) -> tuple[str, ...]:
    """Those that a learner has; a learner without any is as it is."""
    (hint,) = [get_type_hints(type(learner))[f.name] for f in fields(learner) if f.name == "norm"] or [None]
    return get_args(hint) or ("none",)


@pytest.mark.parametrize(
    ("name", "domain", "ways", "norm"),
    [pytest.param(*c.values, n, id=f"{c.id}-{n}") for c in cases() for n in norms(LEARNERS[c.values[0]])],
)
def test_a_learner_says_whether_queries_see_each_other(name: str, domain: str, ways: int, norm: str) -> None:
    options = {} if norm == "none" else {"norm": norm}
    learner = started(small(name, **options), Problem(SHAPES[domain], ways))
    e = episode(SHAPES[domain], ways)
    others = e.query_x.clone()
    others[:, 1:] = 2 * others[:, 1:] + 1
    alike = torch.allclose(said(learner, e)[:, 0], said(learner, replace(e, query_x=others))[:, 0], atol=1e-9)
    assert alike == (not learner.transductive)
    if norm != "transductive":
        assert not learner.transductive
    elif domain == "image" and name != "nearest":
        assert learner.transductive


@every
def test_gradients_reach_every_parameter(name: str, domain: str, ways: int) -> None:
    learner = started(small(name), Problem(SHAPES[domain], ways))
    loss, log = learner.loss(episode(SHAPES[domain], ways))
    assert loss.shape == ()
    assert log["loss"] == loss
    assert set(log) >= ({"accuracy"} if ways else {"mse"})
    if name == "nearest":
        assert not list(learner.parameters())
        return
    loss.backward()
    for key, p in learner.net.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key


@every
def test_state_goes_through_a_checkpoint(name: str, domain: str, ways: int, tmp_path: Path) -> None:
    problem, e = Problem(SHAPES[domain], ways), episode(SHAPES[domain], ways)
    learner, other = started(small(name), problem), started(small(name), problem, seed=1)
    learner.loss(e)  # moves running statistics and the state of an LSTM
    checkpoint.save(tmp_path / "c", checkpoint.state_of(learner))
    checkpoint.restore(other, checkpoint.load(tmp_path / "c"))
    assert torch.equal(said(learner, e), said(other, e))
    assert other.problem == problem


@every
def test_adapting_to_a_task_of_ones_own(name: str, domain: str, ways: int) -> None:
    e = episode(SHAPES[domain], ways)
    learner = started(small(name), Problem(SHAPES[domain], ways))
    out = learner.predict(e.support_x, e.support_y, e.query_x, e.ways)
    assert torch.equal(learner.adapt(e.support_x, e.support_y).predict(e.query_x), out.value)
    one = learner.adapt(e.support_x[1], e.support_y[1])
    assert torch.allclose(one.predict(e.query_x[1]), out.value[1])
    if ways:
        assert torch.allclose(out.value.sum(-1), torch.ones(3, 4 * 3, dtype=torch.float64))
    elif out.std is not None:
        assert torch.allclose(one.std(e.query_x[1]), out.std[1])
        assert (out.std > 0).all()
    else:
        with pytest.raises(UserError, match="has no standard deviation"):
            one.std(e.query_x[1])


@pytest.mark.gpu
@every
def test_gpu_and_cpu_agree(name: str, domain: str, ways: int) -> None:
    options = {"dropout": 0.0} if hasattr(LEARNERS[name], "dropout") else {}
    e, learner = episode(SHAPES[domain], ways), started(small(name, **options), Problem(SHAPES[domain], ways))
    other = small(name, **options)
    other.start(learner.problem, device="cuda")
    other.net.double().load_state_dict(learner.net.state_dict())
    there = Episode(*(t.cuda() for t in (e.support_x, e.support_y, e.query_x, e.query_y)), ways)
    losses = []
    for one, batch in ((learner, e), (other, there)):
        loss, _ = one.loss(batch)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1])
    for (key, p), q in zip(learner.net.named_parameters(), other.net.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad.cpu(), atol=1e-6), key
    assert torch.allclose(said(learner, e), said(other, there).cpu(), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "maml"])
def test_more_ways_and_shots_than_in_training(name: str) -> None:
    learner = started(small(name), Problem((6,), 4))
    assert said(learner, episode((6,), 7, shots=5)).shape == (3, 21, 7)


def test_bytes_are_pixels() -> None:
    learner = small("metavrf")
    learner.start(Problem((2, 12, 10), 4))
    x = torch.randint(0, 256, (2, 4, 2, 12, 10), dtype=torch.uint8, generator=generator(0, "x"))
    y = torch.arange(4).expand(2, 4)
    parts = (learner.predict(v, y, v.flip(1)).value for v in (x, x.float() / 255))
    assert torch.equal(*parts)


def test_mistakes_are_told() -> None:
    learner = small("metavrf")
    with pytest.raises(UserError, match="has no networks yet"):
        learner.adapt(torch.zeros(4, 6), torch.arange(4))
    learner.start(Problem((6,), 4))
    for x, y, says in [
        (torch.zeros(4, 5), torch.arange(4), r"inputs must be \[N, 6\], got \[4, 5\]"),
        (torch.zeros(4, 6), torch.arange(3), "differ in number"),
        (torch.zeros(4, 6), torch.zeros(4), "class numbers"),
        (torch.zeros(4, 6), torch.arange(4) - 1, r"must lie in 0 .. 2, got -1"),
    ]:
        with pytest.raises(UserError, match=says):
            learner.adapt(x, y)
    with pytest.raises(UserError, match="ProtoNet only supports classification"):
        ProtoNet().start(Problem((6,)))
    maml = small("maml")
    maml.start(Problem((6,), 4))
    with pytest.raises(UserError, match="trained for 4 ways"):
        maml.adapt(torch.zeros(3, 6), torch.arange(3))
    with pytest.raises(UserError, match="did you mean 'metavrf'"):
        make_learner("metavfr")
    with pytest.raises(UserError, match="option of metavrf"):
        make_learner("metavrf", base=3)
    with pytest.raises(UserError, match="unknown context"):
        MetaVRF(context="gru")  # type: ignore[arg-type]
    regression = small("metavrf")
    regression.start(Problem((1,)))
    with pytest.raises(UserError, match="must have 1 numbers"):
        regression.adapt(torch.zeros(4, 1), torch.zeros(4, 2))
    assert regression.adapt(torch.zeros(4, 1), torch.zeros(4)).predict(torch.zeros(7, 1)).shape == (7, 1)
    with pytest.raises(UserError, match="are not finite; look for NaN"):
        regression.adapt(torch.zeros(4, 1), torch.tensor([0, 0, 0, torch.nan])).predict(torch.zeros(7, 1))


# -- psi ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 84, 84)])
def test_convolutions_end_in_256_features(shape: tuple[int, ...]) -> None:
    psi = FeatureNet(Problem(shape, 5), "transductive", 64)
    f, _ = psi(torch.rand(1, 2, *shape))
    assert f.shape == (1, 2, psi.features) == (1, 2, 256)


def test_images_that_cannot_be_pooled_are_refused() -> None:
    with pytest.raises(UserError, match="too small or too narrow to be pooled 5 times"):
        FeatureNet(Problem((3, 84, 20), 5), "transductive", 64)


def by_hand(psi: FeatureNet, x: Tensor, stats: list[tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Any]:
    """One set of images [N, C, H, W] in the order of the paper: normalise, ReLU, then pool."""
    seen = []
    for i, block in enumerate(psi.body.blocks):
        x = F.conv2d(x, block.convolution.weight, padding=1)
        seen.append((x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)))
        mean, var = seen[-1] if stats is None else stats[i]
        x = F.relu((x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt() + block.shift[:, None, None])
        x = F.max_pool2d(x, 2, ceil_mode=True)
    return x.flatten(1), seen


@pytest.mark.parametrize("norm", ["transductive", "support"])
def test_each_task_is_normalised_by_itself(norm: Any) -> None:
    with seeded(0):
        psi = FeatureNet(Problem((2, 12, 10), 5), norm, 5).double()
        for block in psi.body.blocks:
            nn.init.normal_(block.shift)
    e = episode((2, 12, 10), 4)
    support, stats = psi(e.support_x)
    query, _ = psi(e.query_x, stats)
    for t in range(3):
        f, own = by_hand(psi, e.support_x[t])
        assert torch.allclose(support[t], f)
        assert torch.allclose(query[t], by_hand(psi, e.query_x[t], own if norm == "support" else None)[0])


@pytest.mark.parametrize("norm", ["transductive", "support", "running"])
def test_fused_kernels_compute_the_same(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU; the graph is then run operator by operator."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x, q = torch.rand(2, 3, 4, 2, 12, 10, generator=generator(0, "x"), dtype=torch.float64)
    found = []
    for fused in (False, True):
        with seeded(0):
            psi = FeatureNet(Problem(SHAPES["image"], 4), norm, 5, minmax=True).double()
            before = torch.get_rng_state()
            if fused:
                psi.fuse(torch.ones_like(x), torch.ones_like(q))
                assert psi.body.fused is not None
            assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in psi.parameters())
        f, stats = psi(x)
        g, _ = psi(q, stats)
        (f.sin().sum() + g.cos().sum()).backward()
        buffers = [b.clone() for b in psi.buffers()]
        with torch.no_grad():
            seen = psi.eval()(q, psi(x)[1])[0]  # judged operator by operator
        found.append((f, g, seen, *buffers, *(p.grad for p in psi.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_compiler_that_fails_leaves_kernels_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    psi = FeatureNet(Problem(SHAPES["image"], 4), "running", 5)
    x, mean = torch.rand(3, 4, 2, 12, 10), [b.clone() for b in psi.buffers()]
    psi.fuse(x, x)
    assert "no compiler here" in caplog.text
    assert "not fused" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(mean, psi.buffers(), strict=True))
    assert psi(x)[0].isfinite().all()


def test_an_interrupted_compiler_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(body: Any, x: Tensor, given: Any) -> Any:
        body.forward_task_major(x, given)
        torch.rand(3)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "compile", lambda *_, **__: interrupted)
    psi = FeatureNet(Problem(SHAPES["image"], 4), "running", 5)
    x, before, chance = torch.rand(3, 4, 2, 12, 10), [b.clone() for b in psi.buffers()], torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        psi.fuse(x, x)
    assert psi.body.fused is None
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(a, b) for a, b in zip(before, psi.buffers(), strict=True))


def test_a_copy_of_fused_kernels_has_weights_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_: lambda *given: f(*given))
    psi = FeatureNet(Problem(SHAPES["image"], 4), "support", 5)
    x = torch.rand(3, 4, 2, 12, 10)
    psi.fuse(x, x)
    assert psi.body.fused is not None
    for copied in (copy.deepcopy(psi), pickle.loads(pickle.dumps(psi))):
        assert copied.body.fused is None
        for p in copied.parameters():
            p.data.zero_()
        assert not torch.equal(copied(x)[0], psi(x)[0])
        copied(x)[0].sum().backward()
        assert all(p.grad is None for p in psi.parameters())


def test_running_statistics() -> None:
    """Of all tasks in training, their running means afterwards: what BatchNorm does."""
    with seeded(0):
        psi = FeatureNet(Problem((2, 12, 10), 5), "running", 5).double()
    block, x = psi.body.blocks[0], episode((2, 12, 10), 4).support_x
    norm = nn.BatchNorm2d(5, affine=False).double()
    h = block.convolution(x.flatten(0, 1))
    plain = F.max_pool2d(F.relu(norm(h)), 2, ceil_mode=True)
    assert torch.allclose(block(x.flatten(0, 1), 3, None)[0], plain)
    assert torch.allclose(block.mean, norm.running_mean)
    psi.eval()
    before = block.var.clone()
    assert not torch.allclose(block(x.flatten(0, 1), 3, None)[0], plain)
    assert torch.equal(before, block.var)


def test_minmax_and_dropout() -> None:
    with seeded(0):
        psi = FeatureNet(Problem((2, 12, 10), 5), "transductive", 5, dropout=0.5, minmax=True).double()
        x = episode((2, 12, 10), 4).support_x
        once, twice = psi(x)[0], psi(x)[0]
    assert torch.equal(once.amin((1, 2)), torch.zeros(3).double())
    assert torch.equal(once.amax((1, 2)), torch.ones(3).double())
    assert not torch.equal(once, twice)
    psi.eval()
    assert torch.equal(psi(x)[0], psi(x)[0])


def test_class_means() -> None:
    f, y = torch.rand(2, 6, 3), torch.tensor([[0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 0]])
    means = class_means(f, y, 3)
    for t in range(2):
        for c in range(3):
            assert torch.allclose(means[t, c], f[t][y[t] == c].mean(0))


# -- MetaVRF --------------------------------------------------------------------------------------------------------


def metavrf(e: Episode, **options: Any) -> Any:
    return started(replace(MetaVRF(bases=16, features=5), **options), Problem(tuple(e.support_x.shape[2:]), e.ways))


@pytest.mark.parametrize("ways", [4, 0])
def test_metavrf_is_a_ridge_on_sampled_bases(ways: int) -> None:
    """The whole prediction, task by task, with bases and inverses written down."""
    e = episode((6,), ways, shots=3)
    learner = metavrf(e)
    net, value = learner.net, learner.condition(e.support_x, e.support_y, ways)(e.query_x).value
    for t in range(3):
        f, g = (net.psi.body.layers(x[t]) for x in (e.support_x, e.query_x))
        f, g = ((v - v.min()) / (v.max() - v.min()) for v in (f, g))
        h = torch.stack([f[e.support_y[t] == c].mean(0) for c in range(ways)]).mean(0) if ways else f.mean(0)
        bases = net.posterior.mean(h) + torch.exp(0.5 * net.posterior.log_var(h)) * net.eps  # [D, d]
        z = lambda v: (2 / 16) ** 0.5 * torch.cos(v @ bases.T + net.phase)
        Y = F.one_hot(e.support_y[t], ways).double() if ways else e.support_y[t]
        A = torch.linalg.inv(z(f) @ z(f).T + (0.1 + 0.01) * torch.eye(len(f)).double()) @ Y
        assert torch.allclose(value[t], learner.net.scale * (z(g) @ z(f).T @ A), atol=1e-9)


@pytest.mark.parametrize("kl", ["true", "released"])
@pytest.mark.parametrize("ways", [4, 0])
def test_metavrf_loss(kl: Any, ways: int) -> None:
    """Likelihood, divergence from the prior of each query, and alignment, written out."""
    e = episode((6,), ways, shots=3)
    learner = metavrf(e, kl=kl, kl_weight=0.3, alignment=0.5, dropout=0.0)
    loss, log = learner.loss(e)
    task = learner.infer(e.support_x, e.support_y, ways, sequence=True)
    f = learner.net.psi(e.query_x)[0]
    value = learner.respond(task, f).value
    total = 0.0
    for t in range(3):
        fit = F.cross_entropy(value[t], e.query_y[t]) if ways else F.mse_loss(value[t], e.query_y[t])
        q = DiagGaussian(task.q.mean[t, 0], task.q.log_var[t, 0])
        divergences = []
        for x in f[t]:
            weights = torch.softmax(-(x - task.keys[t]).abs().sum(1) / 5**0.5, 0)
            p = learner.net.prior(weights @ task.keys[t])
            if kl == "true":
                torchs = (Independent(Normal(g.mean, g.std), 1) for g in (q, p))
                divergences.append(kl_divergence(*torchs))
            else:
                above = torch.exp(4 * q.log_var) + (q.mean - p.mean) ** 2
                divergences.append((2 * (p.log_var - q.log_var) + above / (2 * torch.exp(4 * p.log_var)) - 0.5).sum())
        all_of_them = torch.stack(divergences)
        Y = F.one_hot(e.support_y[t], ways).double() if ways else e.support_y[t]
        K, target = (task.points[t, 0] @ task.points[t, 0].T).flatten(), (0.99 * (Y @ Y.T + 0.01)).flatten()
        likeness = (K @ target / (K.norm() * target.norm())).clamp_min(1e-6).sqrt()
        divergence = all_of_them.mean() if kl == "true" else all_of_them.sum()
        total += (fit + 0.3 * divergence - 0.5 * likeness).item() / 3
    assert loss.item() == pytest.approx(total)
    assert set(log) >= {"loss", "kl"}


def test_attention_is_a_softmax_of_distances() -> None:
    query, keys = torch.rand(2, 3, 5), torch.rand(2, 4, 5)
    far = torch.tensor([[1e6] * 5])
    assert torch.allclose(attend(keys * 1e4, keys * 1e4), keys * 1e4)  # each finds itself
    assert torch.allclose(attend(query[:1, :1] * 0 + far, keys[:1, :1]), keys[:1, :1])
    assert attend(query, keys).shape == (2, 3, 5)


def test_many_bases_give_the_exact_kernel() -> None:
    e = episode((6,), 4)
    exact, few, many = (metavrf(e, exact=x, bases=n) for x, n in ((True, 1), (False, 100), (False, 40_000)))
    for learner in (few, many):
        state = {k: v for k, v in exact.net.state_dict().items() if k not in ("eps", "phase")}
        learner.net.load_state_dict(state, strict=False)
    answer = exact.condition(e.support_x, e.support_y, 4)(e.query_x).value
    errors = [(x.condition(e.support_x, e.support_y, 4)(e.query_x).value - answer).abs().max() for x in (few, many)]
    assert errors[1] < 0.2 < errors[0]  # of logits that are ten times what the ridge says


def test_fixed_noise_is_state_and_fresh_noise_is_chance() -> None:
    e = episode((6,), 4)
    fixed, fresh = metavrf(e), metavrf(e, noise="fresh")
    assert torch.equal(said(fixed, e), said(fixed, e))
    assert {"eps", "phase"} <= set(fixed.net.state_dict())
    first = said(fresh, e)
    assert not torch.equal(first, said(fresh, e))
    assert torch.equal(first, said(metavrf(e, noise="fresh"), e)), "the same seed, the same noise"


@pytest.mark.parametrize("both", [False, True])
def test_the_context_goes_on_from_task_to_task(both: bool) -> None:
    """A meta-batch is one sequence; its last forward state is where the next one begins, in both directions."""
    e, after = episode((6,), 4), episode((6,), 4, seed=1)
    learner = metavrf(e, context="bilstm" if both else "lstm")
    context, d = learner.net.context, 5
    cells = []
    for suffix in ("", "_reverse")[: 1 + both]:
        cell = nn.LSTMCell(d, d).double()
        for name, p in cell.named_parameters():
            p.data = getattr(context.lstm, f"{name}_l0{suffix}").data
        cells.append(cell)
    assert all(cell.bias_ih[d : 2 * d].eq(1).all() for cell in cells), "forget gates begin open"
    state = (torch.zeros(1, d).double(), torch.zeros(1, d).double())

    def run(cell: nn.LSTMCell, summary: Tensor, first: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Any]:
        outs, at = [], first
        for one in summary:
            at = cell(one[None], at)
            outs.append(at[0])
        return outs, at

    for batch in (e, after):
        f = learner.net.psi(batch.support_x)[0]
        summary = class_means(f, batch.support_y, 4).mean(1)
        outs, last = run(cells[0], summary, state)
        if both:
            back = run(cells[1], summary.flip(0), state)[0][::-1]
            outs = [torch.cat(pair, 1) for pair in zip(outs, back, strict=True)]
        q = learner.infer(batch.support_x, batch.support_y, 4, sequence=True).q
        assert torch.allclose(q.mean[:, 0], learner.net.posterior(torch.cat(outs)).mean)
        state = last
        assert torch.allclose(context.state, torch.cat(state))
    assert not context.state.requires_grad


def test_predicting_leaves_the_context_where_it_is() -> None:
    e = episode((6,), 4)
    learner = metavrf(e, context="lstm")
    learner.loss(e)
    before, where = learner.net.context.state.clone(), learner.net.context.state.data_ptr()
    assert before.abs().max() > 0
    said(learner, e)
    assert torch.equal(before, learner.net.context.state)
    loss, _ = learner.loss(e)
    loss.backward()  # the state that was written over is not the one that the backward pass needs
    assert not torch.equal(before, learner.net.context.state)
    assert learner.net.context.state.data_ptr() == where, "a captured step writes there for ever"


def test_evidence_picks_the_kernel_that_explains_the_labels() -> None:
    """Three frequencies are proposed, one is right: it gets the weight, and the sine is recovered."""
    learner = MetaVRF(exact=True, proposals=3, floor=1e-4, minmax=False, skip=True, features=2)
    learner.start(Problem((1,)))
    net = learner.net
    with torch.no_grad():
        for p in (*net.posterior.parameters(), net.ridge):
            p.zero_()
        mean = net.posterior.mean[-1].bias.view(3, 3)  # of the input and of two features
        mean[:, 0] = torch.tensor([0.8, 1.0, 1.2])
        net.posterior.log_var[-1].bias.fill_(-20)
    x = 10 * torch.rand(20, 5, 1, generator=generator(0, "x")) - 5
    y, grid = 3 * torch.sin(x + 0.7), torch.linspace(-5, 5, 30)[None, :, None].expand(20, 30, 1)
    weight = learner.infer(x, y, 0, sequence=False).weight
    assert (weight.argmax(1) == 1).float().mean() >= 0.9
    out = learner.predict(x, y, grid)
    error = (out.value - 3 * torch.sin(grid + 0.7)).square().mean((1, 2))
    assert error.median() < 1e-3
    twice = learner.predict(x, 2 * y, grid)
    assert torch.allclose(twice.value, 2 * out.value, atol=1e-3), "the unit of the labels does not matter"
    alike = replace(learner, weigh="alike")
    alike.start(Problem((1,)))
    assert torch.equal(alike.infer(x, y, 0, sequence=False).weight, torch.full((20, 3), 1 / 3))


def test_the_band_is_narrow_at_the_support_and_wide_away_from_it() -> None:
    learner = small("metavrf", exact=True, minmax=False, skip=True, floor=1e-4, norm="support")
    learner.start(Problem((1,)))
    with torch.no_grad():
        learner.net.ridge.zero_()
    x = torch.tensor([[-1.0], [0.0], [1.0]])
    adapted = learner.adapt(x, x.sin())
    near, far = adapted.std(x), adapted.std(torch.tensor([[3.0], [-4.0]]))
    assert near.max() < 0.2 * far.min()


@pytest.mark.parametrize("ways", [4, 0])
def test_labels_inform_the_posterior(ways: int) -> None:
    e = episode((6,), ways)
    learner = metavrf(e, labels=True)
    q = learner.infer(e.support_x, e.support_y, ways, sequence=False).q
    other = e.support_y.flip(1) if not ways else e.support_y.roll(1, 1)
    changed = learner.infer(e.support_x, other, ways, sequence=False).q
    assert not torch.allclose(q.mean, changed.mean)
    blind = metavrf(e)
    q, changed = (blind.infer(e.support_x, y, ways, sequence=False).q for y in (e.support_y, other))
    assert ways or torch.equal(q.mean, changed.mean)


# -- others ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("domain", "ways"), [("vector", 0), ("vector", 4), ("image", 4)])
def test_maml_is_gradient_descent_task_by_task(domain: str, ways: int) -> None:
    """Loss and second-order gradient of all tasks at once against a loop with the graph of each step kept."""
    e = episode(SHAPES[domain], ways)
    learner = started(MAML(features=3, steps=2, inner_lr=0.1), Problem(SHAPES[domain], ways))
    net, total = learner.net, torch.zeros(()).double()
    lossy: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(out, y) if ways else F.mse_loss(out, y)
    for t in range(3):
        theta = dict(net.named_parameters())
        for _ in range(2):
            out = torch.func.functional_call(net, theta, (e.support_x[t : t + 1],))[0]
            slopes = torch.autograd.grad(lossy(out, e.support_y[t]), [*theta.values()], create_graph=True)
            theta = {k: p - 0.1 * g for (k, p), g in zip(theta.items(), slopes, strict=True)}
        out = torch.func.functional_call(net, theta, (e.query_x[t : t + 1],))[0]
        total = total + lossy(out, e.query_y[t]) / 3
    loss, _ = learner.loss(e)
    assert torch.allclose(loss, total)
    naive = torch.autograd.grad(total, [*net.parameters()])
    for ours, theirs in zip(torch.autograd.grad(loss, [*net.parameters()]), naive, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9)
    first = replace(learner, first_order=True)
    first.start(learner.problem)
    first.net.double()
    assert torch.allclose(first.loss(e)[0], loss)
    slope = torch.autograd.grad(first.loss(e)[0], [*first.parameters()])
    assert not all(torch.allclose(a, b) for a, b in zip(slope, naive, strict=True))


def test_prototypes_and_raw_means() -> None:
    e = episode((6,), 4)
    learner = started(small("protonet"), Problem((6,), 4))
    f, g = (learner.net(x)[0] for x in (e.support_x, e.query_x))
    for net, a, b in ((learner, f, g), (started(small("nearest"), Problem((6,), 4)), e.support_x, e.query_x)):
        logits = -((b[:, :, None] - class_means(a, e.support_y, 4)[:, None]) ** 2).sum(-1)
        assert torch.allclose(said(net, e), logits.log_softmax(-1))


def test_distances_of_prototypes_are_in_full_precision_under_bf16() -> None:
    e = episode((6,), 4)
    learner = small("protonet", features=40)
    learner.start(Problem((6,), 4))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        f, g = (learner.net(x.float())[0] for x in (e.support_x, e.query_x))
        got = learner.condition(e.support_x.float(), e.support_y, 4)(e.query_x.float()).value
    logits = -((g[:, :, None] - class_means(f, e.support_y, 4)[:, None]) ** 2).sum(-1)
    assert torch.allclose(got, logits, rtol=1e-4, atol=1e-4)


def test_r2d2_is_a_linear_ridge() -> None:
    e = episode((6,), 4)
    learner = started(small("r2d2"), Problem((6,), 4))
    f, g = (F.pad(learner.net.psi(x)[0], (0, 1), value=1.0) for x in (e.support_x, e.query_x))
    W = torch.linalg.solve(f.mT @ f + torch.eye(6).double(), f.mT @ F.one_hot(e.support_y, 4).double())
    assert torch.allclose(said(learner, e), (10 * g @ W).log_softmax(-1))


def test_rbf_takes_its_width_from_the_support() -> None:
    """Features that are all 10 times as far apart make no difference."""
    e = episode((6,), 4)
    learner = started(KernelRidge(kernel="rbf", minmax=False), Problem((6,), 4))
    before = said(learner, e)
    with torch.no_grad():
        learner.net.psi.body.layers[2].weight.mul_(10)
        learner.net.psi.body.layers[2].bias.mul_(10)
    assert torch.allclose(before, said(learner, e))


@pytest.mark.parametrize(("name", "limit"), [("metavrf_evidence", 0.6), ("metavrf_bilstm", 4.0)])
def test_sines_are_learned(name: str, limit: float) -> None:
    """A few steps on sinusoids; the error of predicting zero is 4.3."""
    learner = small(name, features=20, bases=64) if name != "metavrf_evidence" else make_learner(name, proposals=8)
    learner.start(Problem((1,)))
    optimizer, g = torch.optim.Adam(learner.parameters(), 3e-3), generator(0, "sines")

    def tasks(T: int) -> Episode:
        a, w, b = torch.rand(3, T, 1, 1, generator=g)
        x = 10 * torch.rand(T, 15, 1, generator=g) - 5
        y = (0.1 + 4.9 * a) * torch.sin((0.8 + 0.4 * w) * x + torch.pi * b)
        return Episode(x[:, :5], y[:, :5], x[:, 5:], y[:, 5:])

    test = tasks(200)
    error = lambda: F.mse_loss(learner.predict(test.support_x, test.support_y, test.query_x).value, test.query_y).item()
    before = error()
    for _ in range(40):
        loss, _ = learner.loss(tasks(25))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert error() < min(limit, 0.8 * before)


@pytest.mark.parametrize("name", ["metavrf_bilstm", "rff", "r2d2"])
def test_logits_of_a_ridge_begin_large_enough_to_learn_from(name: str) -> None:
    learner = started(small(name), Problem(SHAPES["image"], 4))
    assert learner.net.scale == 10
    assert started(small(name), Problem(SHAPES["vector"])).net.scale == 1  # numbers are not logits
