"""Methods on fixed features, WANN and DMLP, compared with loops, closed forms and limits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from warpi.data.dataset import Dataset
from warpi.data.numeric import make_features
from warpi.functional.losses import one_hot
from warpi.methods.dmlp import DMLP, purify, to_simplex
from warpi.methods.registry import METHODS
from warpi.methods.wann import WANN, Neighbors, adaptive_sizes, class_shares
from warpi.methods.warpi import OUTPUTS, MetaNet, fit_posterior
from warpi.runs.defaults import defaults_for, defaults_of_task, resolve_defaults
from warpi.training.engine import train
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task
from warpi.utils.seeding import seeded

K = 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def blobs() -> tuple[Task, Truth]:
    """Three well separated classes in the plane; 40 % of each class carry the label of the next one."""
    y = torch.arange(240) % K
    centers = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0]])
    x = centers[y] + 0.5 * random(240, 2).float()
    data = Dataset("blobs", make_features(x), y, tuple("abc"), clean=y)
    return make_task(data, "pair:0.4", meta=15, val=0.0, test=0.25, seed=100)


def trained(method: WANN | DMLP, task: Task, **recipe: object) -> WANN | DMLP:
    method.start(task, Recipe(epochs=1, **recipe))  # type: ignore[arg-type]
    list(train(method, task))
    return method


# --- WANN -------------------------------------------------------------------------------------------------------------


def test_adaptive_sizes_equal_a_loop() -> None:
    y = torch.randint(K, (40,), generator=torch.Generator().manual_seed(1))
    near = torch.randint(K, (40, 9), generator=torch.Generator().manual_seed(2))
    wanted = []
    for label, labels in zip(y, near, strict=True):
        fits = [k for k in (3, 5, 7, 9) if int(torch.bincount(labels[:k], minlength=K).argmax()) == int(label)]
        wanted.append(fits[0] if fits else 9)
    assert adaptive_sizes(y, near, K, 3, 9).tolist() == wanted


def test_nearest_rows_are_those_of_all_distances() -> None:
    net = Neighbors(K, cosine=False)
    net.x = random(30, 4).float()
    x = random(7, 4, seed=1).float()
    assert net.find(x, 5).tolist() == torch.cdist(x, net.x).topk(5, largest=False).indices.tolist()
    others = torch.cdist(net.x, net.x).fill_diagonal_(torch.inf)
    assert net.find(net.x, 5, leave_out=True).tolist() == others.topk(5, largest=False).indices.tolist()


def test_class_shares_without_trusted_rows_are_the_votes() -> None:
    votes = random(6, K).abs()
    p = class_shares(votes, torch.zeros_like(votes), torch.eye(K, dtype=votes.dtype))
    torch.testing.assert_close(p, votes / votes.sum(1, keepdim=True), rtol=0, atol=1e-5)


def test_class_shares_maximize_the_likelihood() -> None:
    T = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.7, 0.3], [0.2, 0.0, 0.8]], dtype=torch.float64)
    votes, gold = random(1, K).abs(), 0.3 * random(1, K, seed=1).abs()

    def likelihood(p: Tensor) -> Tensor:
        return (votes * (p @ T).log()).sum(1) + (gold * p.log()).sum(1)

    best = class_shares(votes, gold, T)
    grid = torch.distributions.Dirichlet(torch.ones(K, dtype=torch.float64)).sample((2000,))
    assert float(likelihood(best)) >= float(likelihood(grid.clamp_min(1e-9)).max()) - 1e-3
    exact = class_shares(torch.tensor([[0.6, 0.4, 0.0]]).double(), torch.zeros(1, K).double(), T)
    assert float(exact[0, 0]) > 0.9  # the votes of a pure class are its row of T


def test_wann_finds_the_classes_with_few_trusted_rows(blobs: tuple[Task, Truth]) -> None:
    task, truth = blobs
    method = trained(WANN(), task)
    assert truth.test is not None
    batch = next(iter(truth.test.batches(100)))
    assert float((method.predict(batch.x).argmax(1) == batch.y).double().mean()) > 0.95
    unseen = method.out_of_sample()
    assert unseen is not None
    assert truth.clean is not None
    assert float((unseen.p.argmax(1) == truth.clean).double().mean()) > 0.95
    assert float((unseen.transition.diagonal() - 0.6).abs().max()) < 0.15
    assert len(unseen.p_trusted) == 15


def test_wann_without_trusted_rows_is_the_weighted_vote(blobs: tuple[Task, Truth]) -> None:
    task = replace(blobs[0], meta=None)
    method = trained(WANN(k_min=3, k_max=7), task)
    x = torch.cat([batch.x for batch in task.train.batches(1000)])
    point = x[:1] + 0.1
    order = torch.cdist(point, x)[0].argsort()
    others = torch.cdist(x, x).fill_diagonal_(torch.inf).topk(7, largest=False).indices
    sizes = adaptive_sizes(task.train.y, task.train.y[others], K, 3, 7)
    votes = torch.zeros(K)
    for j in order[: int(sizes[order[0]])]:
        votes[task.train.y[j]] += 1 / sizes[j]
    torch.testing.assert_close(method.predict(point)[0], votes / votes.sum(), rtol=0, atol=1e-4)


# --- DMLP -------------------------------------------------------------------------------------------------------------


def test_simplex_projection_is_the_nearest_distribution() -> None:
    Y = 2 * random(5, K)
    P = to_simplex(Y)
    torch.testing.assert_close(P.sum(1), torch.ones(5, dtype=torch.float64))
    assert bool((P >= 0).all())
    grid = torch.distributions.Dirichlet(torch.ones(K, dtype=torch.float64)).sample((3000,))
    for row, projected in zip(Y, P, strict=True):
        assert float((row - projected).norm()) <= float((row - grid).norm(dim=1).min()) + 1e-12
    inside = grid[:4]
    torch.testing.assert_close(to_simplex(inside), inside)


def test_purified_labels_take_the_exact_step_of_the_bilevel_problem() -> None:
    F, F_m = random(12, 4), random(5, 4, seed=1)
    Y = torch.full((12, K), 1 / K, dtype=torch.float64)
    Y_m = one_hot(torch.arange(5) % K, K).double()
    free = Y.clone().requires_grad_()
    gram = F.T @ F
    penalty = 0.5 * gram.diagonal().mean() * torch.eye(4, dtype=torch.float64)

    def judged(labels: Tensor) -> Tensor:
        W = torch.linalg.solve(gram + penalty, F.T @ labels)
        return (F_m @ W - Y_m).square().sum()

    (gradient,) = torch.autograd.grad(judged(free), free)
    steps = torch.linspace(0, 50, 20001, dtype=torch.float64)
    values = torch.stack([judged(Y - t * gradient) for t in steps[::100]])
    best = steps[::100][values.argmin()]
    near = torch.linspace(float(best) - 0.25, float(best) + 0.25, 501, dtype=torch.float64)
    t = near[torch.stack([judged(Y - t * gradient) for t in near]).argmin()]
    got = purify(F, Y, F_m, Y_m, ridge=0.5, rounds=1, momentum=1.0)
    torch.testing.assert_close(got.double(), to_simplex(Y - t * gradient), rtol=0, atol=5e-3)


def test_dmlp_purifies_labels(blobs: tuple[Task, Truth]) -> None:
    task, truth = blobs
    method = trained(DMLP(), task, net="linear", batch_size=16)
    assert isinstance(method, DMLP)
    assert truth.clean is not None
    before = float((task.train.y == truth.clean).double().mean())
    after = float((method.Y.argmax(1) == truth.clean).double().mean())
    assert after > before + 0.2


# --- settings of a linear head ----------------------------------------------------------------------------------------


def test_a_linear_head_takes_as_many_steps_on_few_rows_as_on_many(blobs: tuple[Task, Truth]) -> None:
    task = blobs[0]
    defaults = defaults_of_task(task, {"net": "linear"})
    steps = defaults["epochs"] * max(1, len(task.train) // defaults["batch_size"])
    assert defaults["weight_decay"] == 0.1
    assert 400 <= steps <= 500
    assert defaults_of_task(task, {"net": "linear", "epochs": 7})["epochs"] == 30  # the given number replaces it
    assert defaults_of_task(task, {})["batch_size"] != defaults["batch_size"]


def test_warpi_uses_its_parts_and_a_plain_network_on_tables_only(blobs: tuple[Task, Truth]) -> None:
    for net, wanted in (({}, "mlp_plain"), ({"net": "mlp"}, "mlp")):
        recipe, options, _ = resolve_defaults(METHODS["warpi"], defaults_of_task(blobs[0], net), net)
        assert recipe.net == wanted
        assert (options["v_start"], options["trusted_weight"]) == ("transition", 5.0)
    recipe, options, _ = resolve_defaults(METHODS["warpi"], defaults_for((3, 32, 32), 10), {})
    assert (recipe.net, options["v_start"], options["trusted_weight"]) == ("resnet18", None, 0.0)
    assert resolve_defaults(METHODS["glc"], defaults_of_task(blobs[0], {}), {})[0].net == "mlp"


def test_warpi_starts_its_rectifier_from_the_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the fit, the rectified loss nearly has the gradient of forward correction."""
    monkeypatch.setattr("warpi.methods.warpi.FIT_STEPS", 500)
    with seeded(0):
        V = MetaNet(K, 50, "one_hot", torch.nn.Tanh)
    true = torch.arange(300) % K
    y = torch.where(torch.arange(300) % 5 < 2, (true + 1) % K, true)  # 40 % carry the label of the next class
    T = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.6, 0.4], [0.4, 0.0, 0.6]])
    z = 2 * one_hot(true, K) + one_hot((true + 1) % K, K) + 0.5 * random(300, K).float()
    fit_posterior(V, OUTPUTS["tanh"], z, y, T, torch.Generator().manual_seed(0))
    p = z.softmax(1)
    q = p * T.T[y]
    target = p - q / q.sum(1, keepdim=True)
    with torch.no_grad():
        v = OUTPUTS["tanh"](V(z, y).mean)
        u = v * ((v * z).softmax(1) - one_hot(y, K))
    plain = p - one_hot(y, K)  # the gradient of cross-entropy on the given labels
    assert float((u - target).norm()) < 0.25 * float((plain - target).norm())
    assert float((u - target).norm()) < 0.35 * float(target.norm())
