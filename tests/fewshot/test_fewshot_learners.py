"""Few-shot learners: properties of every learner, and each learner compared with a naive loop."""

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
    """A learner of the table with small networks."""
    options_of = {f.name for f in fields(LEARNERS[name])}
    narrow = {
        "features": 5,
        "bases": 16,
        "proposals": 3 if name == "metavrf_evidence" else 1,
        "test_steps": 2,
        "steps": 1,
    }
    return make_learner(name, **{**{k: v for k, v in narrow.items() if k in options_of}, **options})


def started(learner: Learner, problem: Problem, seed: int = 0) -> Learner:
    """Start a learner in double precision, so that equal results are equal to many digits."""
    learner.start(problem, seed)
    learner.net.double()
    return learner


def episode(shape: tuple[int, ...], ways: int, T: int = 3, shots: int = 2, queries: int = 3, seed: int = 0) -> Episode:
    """T tasks whose classes differ in their means; for ways = 0, sinusoids of the sum of the inputs."""
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
    classification = [pytest.param(name, d, 4, id=f"{name}-{d}") for name in LEARNERS for d in ("vector", "image")]
    return classification + [pytest.param(name, "vector", 0, id=f"{name}-regression") for name in REGRESSION]


every = pytest.mark.parametrize(("name", "domain", "ways"), cases())
some = pytest.mark.parametrize(("name", "domain", "ways"), [c for c in cases() if c.values[1:] != ("vector", 4)])


def predict(learner: Learner, e: Episode) -> Tensor:
    """Log-probabilities or means, followed by the standard deviation if there is one."""
    out = learner.predict(e.support_x, e.support_y, e.query_x, e.ways)
    value = out.value.log() if e.ways else out.value
    return value if out.std is None else torch.cat([value, out.std], -1)


# -- every learner --------------------------------------------------------------------------------------------------


@every
def test_vectorized_tasks_equal_tasks_one_by_one(name: str, domain: str, ways: int) -> None:
    e = episode(SHAPES[domain], ways)
    learner = started(small(name), Problem(SHAPES[domain], ways))
    whole = predict(learner, e)
    for t in range(3):
        one = (part[t : t + 1] for part in (e.support_x, e.support_y, e.query_x, e.query_y))
        assert torch.allclose(predict(learner, Episode(*one, ways))[0], whole[t], atol=1e-6)


@some
def test_predictions_do_not_depend_on_the_order_of_the_support(name: str, domain: str, ways: int) -> None:
    e = episode(SHAPES[domain], ways, shots=3)
    learner = started(small(name), Problem(SHAPES[domain], ways))
    order = torch.randperm(e.support_x.shape[1], generator=generator(1, "order"))
    other = replace(e, support_x=e.support_x[:, order], support_y=e.support_y[:, order])
    assert torch.allclose(predict(learner, e), predict(learner, other), atol=1e-8)


@pytest.mark.parametrize(
    "name", [name for name in LEARNERS if name != "maml"]
)  # its outputs start with different weights
@pytest.mark.parametrize("domain", SHAPES)
def test_predictions_follow_a_permutation_of_the_class_numbers(name: str, domain: str) -> None:
    e = episode(SHAPES[domain], 4)
    learner = started(small(name), Problem(SHAPES[domain], 4))
    permutation = torch.tensor([2, 0, 3, 1])
    other = replace(e, support_y=permutation[e.support_y])
    assert torch.allclose(predict(learner, e), predict(learner, other)[..., permutation], atol=1e-8)


def norms(learner: Learner) -> tuple[str, ...]:
    """The normalizations that a learner can have, or `none`."""
    (hint,) = [get_type_hints(type(learner))[f.name] for f in fields(learner) if f.name == "norm"] or [None]
    return get_args(hint) or ("none",)


@pytest.mark.parametrize(
    ("name", "domain", "ways", "norm"),
    [
        pytest.param(*c.values, n, id=f"{c.id}-{n}")
        for c in cases()
        for n in norms(LEARNERS[c.values[0]])
        if c.values[1:] != ("vector", 4)
    ],
)
def test_transductive_tells_whether_queries_influence_each_other(name: str, domain: str, ways: int, norm: str) -> None:
    options = {} if norm == "none" else {"norm": norm}
    learner = started(small(name, **options), Problem(SHAPES[domain], ways))
    e = episode(SHAPES[domain], ways)
    others = e.query_x.clone()
    others[:, 1:] = 2 * others[:, 1:] + 1
    unchanged = torch.allclose(predict(learner, e)[:, 0], predict(learner, replace(e, query_x=others))[:, 0], atol=1e-9)
    assert unchanged == (not learner.transductive)
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


@some
def test_checkpoint_restores_the_state(name: str, domain: str, ways: int, tmp_path: Path) -> None:
    problem = Problem(SHAPES[domain], ways)
    e = episode(SHAPES[domain], ways)
    learner = started(small(name), problem)
    other = started(small(name), problem, seed=1)
    learner.loss(e)  # changes running statistics and the state of an LSTM
    checkpoint.save(tmp_path / "c", checkpoint.state_of(learner))
    checkpoint.restore(other, checkpoint.load(tmp_path / "c"))
    assert torch.equal(predict(learner, e), predict(other, e))
    assert other.problem == problem


@every
def test_adapt_equals_predict(name: str, domain: str, ways: int) -> None:
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
    e = episode(SHAPES[domain], ways)
    learner = started(small(name, **options), Problem(SHAPES[domain], ways))
    other = small(name, **options)
    other.start(learner.problem, device="cuda")
    other.net.double().load_state_dict(learner.net.state_dict())
    on_gpu = Episode(*(t.cuda() for t in (e.support_x, e.support_y, e.query_x, e.query_y)), ways)
    losses = []
    for one, batch in ((learner, e), (other, on_gpu)):
        loss, _ = one.loss(batch)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1])
    for (key, p), q in zip(learner.net.named_parameters(), other.net.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad.cpu(), atol=1e-6), key
    assert torch.allclose(predict(learner, e), predict(other, on_gpu).cpu(), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "maml"])
def test_tasks_may_have_more_ways_and_shots_than_in_training(name: str) -> None:
    learner = started(small(name), Problem((6,), 4))
    assert predict(learner, episode((6,), 7, shots=5)).shape == (3, 21, 7)


def test_bytes_equal_floats_in_the_unit_interval() -> None:
    learner = small("metavrf")
    learner.start(Problem((2, 12, 10), 4))
    x = torch.randint(0, 256, (2, 4, 2, 12, 10), dtype=torch.uint8, generator=generator(0, "x"))
    y = torch.arange(4).expand(2, 4)
    parts = (learner.predict(v, y, v.flip(1)).value for v in (x, x.float() / 255))
    assert torch.equal(*parts)


def test_invalid_inputs_are_refused() -> None:
    learner = small("metavrf")
    with pytest.raises(UserError, match="has no networks yet"):
        learner.adapt(torch.zeros(4, 6), torch.arange(4))
    learner.start(Problem((6,), 4))
    for x, y, message in [
        (torch.zeros(4, 5), torch.arange(4), r"inputs must be \[N, 6\], got \[4, 5\]"),
        (torch.zeros(4, 6), torch.arange(3), "differ in number"),
        (torch.zeros(4, 6), torch.zeros(4), "class indices"),
        (torch.zeros(4, 6), torch.arange(4) - 1, r"must lie in 0 .. 2, got -1"),
    ]:
        with pytest.raises(UserError, match=message):
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


def test_images_too_small_for_pooling_are_refused() -> None:
    with pytest.raises(UserError, match="too small or too narrow to be pooled 5 times"):
        FeatureNet(Problem((3, 84, 20), 5), "transductive", 64)


def naive_psi(psi: FeatureNet, x: Tensor, stats: list[tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Any]:
    """Features of one set of images [N, C, H, W] in the order of the paper: normalize, ReLU, then pool."""
    computed = []
    for i, block in enumerate(psi.body.blocks):
        x = F.conv2d(x, block.convolution.weight, padding=1)
        computed.append((x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)))
        mean, var = computed[-1] if stats is None else stats[i]
        x = F.relu((x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt() + block.shift[:, None, None])
        x = F.max_pool2d(x, 2, ceil_mode=True)
    return x.flatten(1), computed


@pytest.mark.parametrize("norm", ["transductive", "support"])
def test_each_task_is_normalized_separately(norm: Any) -> None:
    with seeded(0):
        psi = FeatureNet(Problem((2, 12, 10), 5), norm, 5).double()
        for block in psi.body.blocks:
            nn.init.normal_(block.shift)
    e = episode((2, 12, 10), 4)
    support, stats = psi(e.support_x)
    query, _ = psi(e.query_x, stats)
    for t in range(3):
        f, task_stats = naive_psi(psi, e.support_x[t])
        assert torch.allclose(support[t], f)
        assert torch.allclose(query[t], naive_psi(psi, e.query_x[t], task_stats if norm == "support" else None)[0])


@pytest.mark.parametrize("norm", ["transductive", "support", "running"])
def test_fused_kernels_equal_plain_kernels(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is traced as for a GPU and then run operator by operator."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x, q = torch.rand(2, 3, 4, 2, 12, 10, generator=generator(0, "x"), dtype=torch.float64)
    results = []
    for fused in (False, True):
        with seeded(0):
            psi = FeatureNet(Problem(SHAPES["image"], 4), norm, 5, minmax=True).double()
            psi.body.blocks = psi.body.blocks[:1]  # faster to compile
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
            evaluated = psi.eval()(q, psi(x)[1])[0]  # evaluation is not compiled
        results.append((f, g, evaluated, *buffers, *(p.grad for p in psi.parameters())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_failing_compiler_leaves_plain_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    psi = FeatureNet(Problem(SHAPES["image"], 4), "running", 5)
    psi.body.blocks = psi.body.blocks[:1]
    x = torch.rand(3, 4, 2, 12, 10)
    before = [b.clone() for b in psi.buffers()]
    psi.fuse(x, x)
    assert "no compiler here" in caplog.text
    assert "not fused" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, psi.buffers(), strict=True))
    assert psi(x)[0].isfinite().all()


def test_interrupted_compiler_restores_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(body: Any, x: Tensor, given: Any) -> Any:
        body.forward_task_major(x, given)
        torch.rand(3)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "compile", lambda *_, **__: interrupted)
    psi = FeatureNet(Problem(SHAPES["image"], 4), "running", 5)
    x = torch.rand(3, 4, 2, 12, 10)
    before = [b.clone() for b in psi.buffers()]
    rng_state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        psi.fuse(x, x)
    assert psi.body.fused is None
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(torch.equal(a, b) for a, b in zip(before, psi.buffers(), strict=True))


def test_copies_of_fused_kernels_do_not_share_weights(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Statistics of all tasks in training, running means in evaluation, as in BatchNorm."""
    with seeded(0):
        psi = FeatureNet(Problem((2, 12, 10), 5), "running", 5).double()
    block = psi.body.blocks[0]
    x = episode((2, 12, 10), 4).support_x
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
def test_metavrf_equals_ridge_regression_on_sampled_bases(ways: int) -> None:
    """The prediction, task by task, with explicit bases and inverses."""
    e = episode((6,), ways, shots=3)
    learner = metavrf(e)
    net = learner.net
    value = learner.condition(e.support_x, e.support_y, ways)(e.query_x).value
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
    """Likelihood, divergence from the prior of each query, and alignment, in explicit loops."""
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
                gaussians = (Independent(Normal(g.mean, g.std), 1) for g in (q, p))
                divergences.append(kl_divergence(*gaussians))
            else:
                above = torch.exp(4 * q.log_var) + (q.mean - p.mean) ** 2
                divergences.append((2 * (p.log_var - q.log_var) + above / (2 * torch.exp(4 * p.log_var)) - 0.5).sum())
        stacked = torch.stack(divergences)
        Y = F.one_hot(e.support_y[t], ways).double() if ways else e.support_y[t]
        K, target = (task.points[t, 0] @ task.points[t, 0].T).flatten(), (0.99 * (Y @ Y.T + 0.01)).flatten()
        likeness = (K @ target / (K.norm() * target.norm())).clamp_min(1e-6).sqrt()
        divergence = stacked.mean() if kl == "true" else stacked.sum()
        total += (fit + 0.3 * divergence - 0.5 * likeness).item() / 3
    assert loss.item() == pytest.approx(total)
    assert set(log) >= {"loss", "kl"}


def test_attention_is_a_softmax_of_distances() -> None:
    query, keys = torch.rand(2, 3, 5), torch.rand(2, 4, 5)
    far = torch.tensor([[1e6] * 5])
    assert torch.allclose(attend(keys * 1e4, keys * 1e4), keys * 1e4)  # each attends to itself
    assert torch.allclose(attend(query[:1, :1] * 0 + far, keys[:1, :1]), keys[:1, :1])
    assert attend(query, keys).shape == (2, 3, 5)


def test_many_bases_give_the_exact_kernel() -> None:
    e = episode((6,), 4)
    exact, few, many = (metavrf(e, exact=x, bases=n) for x, n in ((True, 1), (False, 100), (False, 40_000)))
    for learner in (few, many):
        state = {k: v for k, v in exact.net.state_dict().items() if k not in ("eps", "phase")}
        learner.net.load_state_dict(state, strict=False)
    expected = exact.condition(e.support_x, e.support_y, 4)(e.query_x).value
    errors = [(x.condition(e.support_x, e.support_y, 4)(e.query_x).value - expected).abs().max() for x in (few, many)]
    assert errors[1] < 0.2 < errors[0]  # of logits, which are ten times the ridge predictions


def test_fixed_noise_is_stored_and_fresh_noise_is_drawn_again() -> None:
    e = episode((6,), 4)
    fixed, fresh = metavrf(e), metavrf(e, noise="fresh")
    assert torch.equal(predict(fixed, e), predict(fixed, e))
    assert {"eps", "phase"} <= set(fixed.net.state_dict())
    first = predict(fresh, e)
    assert not torch.equal(first, predict(fresh, e))
    assert torch.equal(first, predict(metavrf(e, noise="fresh"), e)), "another noise with the same seed"


@pytest.mark.parametrize("both", [False, True])
def test_context_carries_its_state_from_batch_to_batch(both: bool) -> None:
    """A meta-batch is one sequence; its last forward state is the initial state of the next, in both directions."""
    e, after = episode((6,), 4), episode((6,), 4, seed=1)
    learner = metavrf(e, context="bilstm" if both else "lstm")
    context, d = learner.net.context, 5
    cells = []
    for suffix in ("", "_reverse")[: 1 + both]:
        cell = nn.LSTMCell(d, d).double()
        for name, p in cell.named_parameters():
            p.data = getattr(context.lstm, f"{name}_l0{suffix}").data
        cells.append(cell)
    assert all(cell.bias_ih[d : 2 * d].eq(1).all() for cell in cells), "forget gates do not start open"
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


def test_predict_does_not_change_the_context() -> None:
    e = episode((6,), 4)
    learner = metavrf(e, context="lstm")
    learner.loss(e)
    before = learner.net.context.state.clone()
    address = learner.net.context.state.data_ptr()
    assert before.abs().max() > 0
    predict(learner, e)
    assert torch.equal(before, learner.net.context.state)
    loss, _ = learner.loss(e)
    loss.backward()  # the backward pass does not need the overwritten state
    assert not torch.equal(before, learner.net.context.state)
    assert learner.net.context.state.data_ptr() == address, "a CUDA graph keeps writing to the old address"


def test_evidence_weights_the_kernel_that_explains_the_labels() -> None:
    """Of three proposed frequencies, the correct one gets the weight, and the sine is recovered."""
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
    assert torch.allclose(twice.value, 2 * out.value, atol=1e-3), "predictions depend on the unit of the labels"
    equal = replace(learner, weigh="alike")
    equal.start(Problem((1,)))
    assert torch.equal(equal.infer(x, y, 0, sequence=False).weight, torch.full((20, 3), 1 / 3))


def test_std_is_small_at_the_support_and_large_elsewhere() -> None:
    learner = small("metavrf", exact=True, minmax=False, skip=True, floor=1e-4, norm="support")
    learner.start(Problem((1,)))
    with torch.no_grad():
        learner.net.ridge.zero_()
    x = torch.tensor([[-1.0], [0.0], [1.0]])
    adapted = learner.adapt(x, x.sin())
    near, far = adapted.std(x), adapted.std(torch.tensor([[3.0], [-4.0]]))
    assert near.max() < 0.2 * far.min()


@pytest.mark.parametrize("ways", [4, 0])
def test_posterior_depends_on_labels_if_asked(ways: int) -> None:
    e = episode((6,), ways)
    learner = metavrf(e, labels=True)
    q = learner.infer(e.support_x, e.support_y, ways, sequence=False).q
    other = e.support_y.flip(1) if not ways else e.support_y.roll(1, 1)
    changed = learner.infer(e.support_x, other, ways, sequence=False).q
    assert not torch.allclose(q.mean, changed.mean)
    without = metavrf(e)
    q, changed = (without.infer(e.support_x, y, ways, sequence=False).q for y in (e.support_y, other))
    assert ways or torch.equal(q.mean, changed.mean)


# -- others ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("domain", "ways"), [("vector", 0), ("vector", 4), ("image", 4)])
def test_maml_equals_gradient_descent_task_by_task(domain: str, ways: int) -> None:
    """Loss and second-order gradient of all tasks, compared with a loop that keeps the graph of each step."""
    e = episode(SHAPES[domain], ways)
    learner = started(MAML(features=3, steps=2, inner_lr=0.1), Problem(SHAPES[domain], ways))
    net = learner.net
    total = torch.zeros(()).double()
    loss_of: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(out, y) if ways else F.mse_loss(out, y)
    for t in range(3):
        theta = dict(net.named_parameters())
        for _ in range(2):
            out = torch.func.functional_call(net, theta, (e.support_x[t : t + 1],))[0]
            slopes = torch.autograd.grad(loss_of(out, e.support_y[t]), [*theta.values()], create_graph=True)
            theta = {k: p - 0.1 * g for (k, p), g in zip(theta.items(), slopes, strict=True)}
        out = torch.func.functional_call(net, theta, (e.query_x[t : t + 1],))[0]
        total = total + loss_of(out, e.query_y[t]) / 3
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


def test_protonet_and_nearest_are_softmaxes_of_squared_distances() -> None:
    e = episode((6,), 4)
    learner = started(small("protonet"), Problem((6,), 4))
    f, g = (learner.net(x)[0] for x in (e.support_x, e.query_x))
    for net, a, b in ((learner, f, g), (started(small("nearest"), Problem((6,), 4)), e.support_x, e.query_x)):
        logits = -((b[:, :, None] - class_means(a, e.support_y, 4)[:, None]) ** 2).sum(-1)
        assert torch.allclose(predict(net, e), logits.log_softmax(-1))


def test_protonet_computes_distances_in_float32_under_bf16() -> None:
    e = episode((6,), 4)
    learner = small("protonet", features=40)
    learner.start(Problem((6,), 4))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        f, g = (learner.net(x.float())[0] for x in (e.support_x, e.query_x))
        value = learner.condition(e.support_x.float(), e.support_y, 4)(e.query_x.float()).value
    logits = -((g[:, :, None] - class_means(f, e.support_y, 4)[:, None]) ** 2).sum(-1)
    assert torch.allclose(value, logits, rtol=1e-4, atol=1e-4)


def test_r2d2_equals_linear_ridge_regression() -> None:
    e = episode((6,), 4)
    learner = started(small("r2d2"), Problem((6,), 4))
    f, g = (F.pad(learner.net.psi(x)[0], (0, 1), value=1.0) for x in (e.support_x, e.query_x))
    W = torch.linalg.solve(f.mT @ f + torch.eye(6).double(), f.mT @ F.one_hot(e.support_y, 4).double())
    assert torch.allclose(predict(learner, e), (10 * g @ W).log_softmax(-1))


def test_width_of_rbf_comes_from_the_support() -> None:
    """Features scaled by 10 give the same predictions."""
    e = episode((6,), 4)
    learner = started(KernelRidge(kernel="rbf", minmax=False), Problem((6,), 4))
    before = predict(learner, e)
    with torch.no_grad():
        learner.net.psi.body.layers[2].weight.mul_(10)
        learner.net.psi.body.layers[2].bias.mul_(10)
    assert torch.allclose(before, predict(learner, e))


def test_metavrf_evidence_learns_sines() -> None:
    """A few steps on sinusoids; predicting zero has an error of 4.3."""
    learner = make_learner("metavrf_evidence", proposals=8)
    learner.start(Problem((1,)))
    optimizer = torch.optim.Adam(learner.parameters(), 3e-3)
    g = generator(0, "sines")

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
    assert error() < min(0.6, 0.8 * before)


@pytest.mark.parametrize("name", ["metavrf_bilstm", "rff", "r2d2"])
def test_ridge_predictions_are_scaled_to_logits(name: str) -> None:
    learner = started(small(name), Problem(SHAPES["image"], 4))
    assert learner.net.scale == 10
    assert started(small(name), Problem(SHAPES["vector"])).net.scale == 1  # regression has no logits
