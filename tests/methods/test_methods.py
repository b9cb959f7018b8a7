"""What each method alone does: the contract that all share is in test_contract.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy
from warpi.methods.mwnet import MWNet
from warpi.methods.plain import CleanOnly, FineTune
from warpi.methods.registry import METHODS, make_method
from warpi.methods.warpi import OUTPUTS, WarPI
from warpi.training.engine import Diverged, Record, train
from warpi.training.method import Log, Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task

RECIPE = Recipe(epochs=2, batch_size=32, meta_batch_size=16, lr=0.05, seed=7)
TaskAndTruth = tuple[Task, Truth]


def trained(method: Method, task: Task, truth: Truth | None = None, recipe: Recipe = RECIPE) -> list[Record]:
    method.start(task, recipe)
    return [record for record in train(method, task, truth) if record is not None]


def weights(*nets: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for net in nets for p in net.state_dict().values()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def poisoned(task: Task) -> Task:
    """The same task with noisy rows that ruin whoever looks at them."""
    examples = task.train.examples
    assert isinstance(examples, TensorExamples)
    x = examples.x.clone()
    x[task.train.rows] = torch.nan
    examples = replace(examples, x=x)
    meta = task.meta and replace(task.meta, examples=examples)
    return replace(task, train=Split(examples, task.train.rows, (task.train.y + 3) % 10), meta=meta, val=None)


# --- plain ----------------------------------------------------------------------------------------------------------


def test_clean_only_never_looks_at_noisy_rows(tiny: TaskAndTruth) -> None:
    a, b = CleanOnly(), CleanOnly()
    trained(a, tiny[0])
    trained(b, poisoned(tiny[0]))
    assert equal(weights(a.net), weights(b.net))
    with pytest.raises(Diverged):  # the poison works
        trained(make_method("ce"), poisoned(tiny[0]))


def test_ce_never_looks_at_trusted_rows(tiny: TaskAndTruth) -> None:
    a, b = make_method("ce"), make_method("ce")
    trained(a, tiny[0])
    trained(b, replace(tiny[0], meta=None))
    assert equal(weights(a.net), weights(b.net))


def sources(method: FineTune | CleanOnly, task: Task, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For each epoch, where its batches come from and how many there are."""
    method.start(task, recipe)
    assert task.meta is not None
    trusted = {tuple(x.tolist()) for x in next(task.meta.batches(1000)).x}
    found = []

    def step(batch: Batch) -> Log:
        inside = {tuple(x.tolist()) in trusted for x in batch.x}
        assert len(inside) == 1
        found.append("trusted" if inside.pop() else "noisy")
        return {"loss": 0.0}

    monkeypatch.setattr(method, "step", step)
    epochs = []
    for t in range(recipe.epochs):
        found.clear()
        assert len(list(method.epoch(t))) == len(method.loader)
        assert len(set(found)) == 1
        epochs.append(found[0])
    return epochs


@pytest.mark.parametrize(
    ("epochs", "share", "trusted"),
    [(12, 1 / 12, 1), (24, 1 / 12, 2), (4, 0.5, 2), (3, 0.0, 1), (5, 1.0, 5), (1, 0.1, 1)],
)
def test_fine_tune_switches(
    tiny: TaskAndTruth, epochs: int, share: float, trusted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["noisy"] * (epochs - trusted) + ["trusted"] * trusted
    assert sources(FineTune(share=share), tiny[0], replace(RECIPE, epochs=epochs), monkeypatch) == wanted


def test_clean_only_takes_as_many_steps_as_the_others(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources(CleanOnly(), tiny[0], RECIPE, monkeypatch) == ["trusted", "trusted"]


def test_fine_tune_begins_as_cross_entropy_and_ends_on_trusted_rows(tiny: TaskAndTruth) -> None:
    task, recipe = tiny[0], replace(RECIPE, epochs=3, schedule="constant")
    method, ce = FineTune(share=1 / 3), make_method("ce")
    method.start(task, recipe)
    ce.start(task, recipe)
    for t in range(2):
        assert [log["loss"] for log in method.epoch(t)] == [log["loss"] for log in ce.epoch(t)]
    assert equal(weights(method.net), weights(ce.net))


def test_images_are_augmented_anew_in_every_batch(pictures: TaskAndTruth) -> None:
    """All images made the same, so that two batches differ by their augmentation alone."""
    task = pictures[0]
    examples = task.train.examples
    assert isinstance(examples, TensorExamples)
    examples = replace(examples, x=examples.x[:1].expand_as(examples.x))
    task = replace(task, train=replace(task.train, examples=examples), meta=None, val=None)
    method = make_method("ce")
    method.start(task, replace(RECIPE, batch_size=20))
    batches = [b.x for t in range(2) for b in method.loader.epoch(t)]
    assert len(batches) == 2 * len(method.loader) > 4
    assert len({tuple(x.flatten().tolist()) for x in batches}) == len(batches)
    assert len({tuple(x.flatten().tolist()) for x in batches[0]}) > 10


# --- the meta methods -----------------------------------------------------------------------------------------------


def test_meta_networks_are_those_of_the_papers(tiny: TaskAndTruth) -> None:
    mwnet, warpi = MWNet(), WarPI()
    for method in (mwnet, warpi):
        method.start(tiny[0], RECIPE)
    assert sum(p.numel() for p in mwnet.V.parameters()) == 100 + 100 + 100 + 1  # 1-100-1
    k, h = 10, 100
    assert sum(p.numel() for p in warpi.V.parameters()) == k * k + (2 * k + 1) * h + (h + 1) * h + 2 * (h + 1) * k
    assert len(warpi.optimizer.param_groups[0]["params"]) == len(list(warpi.net.parameters()))  # V is not in there


def test_rectifying_vectors(tiny: TaskAndTruth) -> None:
    z, y = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).requires_grad_(), torch.arange(6)
    for samples, n in ((10, 10), (3, 3), (0, 1)):
        method = WarPI(samples=samples)
        method.start(tiny[0], RECIPE)
        first = method.rectify(z, y)
        assert first.shape == (n, 6, 10)
        assert bool(((first > 0) & (first < 1)).all())
        assert torch.equal(first, method.rectify(z, y)) == (samples == 0)  # Detc. draws nothing
        v_of_z = torch.autograd.grad(first.sum(), z, allow_unused=True)
        assert v_of_z == (None,)  # V's input is detached


def test_outputs() -> None:
    s = torch.linspace(-6, 6, 101, dtype=torch.float64)
    assert OUTPUTS["unbounded"](torch.tensor(0.0)) == 1  # an untrained V leaves the logits alone
    for name, low, high in (("sigmoid", 0, 1), ("tanh", -2, 2)):
        v = OUTPUTS[name](s)
        assert bool(((v > low) & (v < high)).all())
        assert bool((v.diff() > 0).all())
    near = -1 + torch.linspace(-0.1, 0.1, 5).double()
    torch.testing.assert_close(OUTPUTS["tanh"](near), OUTPUTS["unbounded"](near), rtol=1e-2, atol=1e-9)
    assert set(OUTPUTS) == {"sigmoid", "tanh", "unbounded"}


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("label_input", ["embedding", "one_hot"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_options_of_warpi(tiny: TaskAndTruth, output: Any, label_input: Any, activation: Any) -> None:
    method = WarPI(samples=2, output=output, label_input=label_input, activation=activation)
    before = None
    for record in trained(method, *tiny):
        assert record["loss"] > 0
        assert record["meta_loss"] > 0
        assert record["loss"] != before
        before = record["loss"]


def test_one_hot_labels_enter_as_unit_vectors(tiny: TaskAndTruth) -> None:
    method = WarPI(label_input="one_hot", samples=0)
    method.start(tiny[0], RECIPE)
    y = torch.tensor([3, 0, 3])
    assert torch.equal(method.V.label(y), torch.eye(10)[y])


@pytest.mark.parametrize("samples", [0, 2])
def test_the_mean_of_v_may_begin_alike(tiny: TaskAndTruth, samples: int) -> None:
    """For every class, logits and label; what is drawn around it, and what is learned from there, is not touched."""
    z, y = 3 * torch.randn(40, 10, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
    plain, zero = (WarPI(samples=samples, output="tanh", mean_init=init) for init in (None, "zero"))
    for method in (plain, zero):
        method.start(tiny[0], RECIPE)
    assert not zero.V(z, y).mean.any()
    assert plain.V(z, y).mean.std() > 0.1
    assert torch.equal(zero.V(z, y).std, plain.V(z, y).std), "all else begins as without it"
    trained(zero, *tiny)
    assert zero.V(z, y).mean.std(0).min() > 0


def test_virtual_learning_rate(tiny: TaskAndTruth) -> None:
    """alpha of Eq. (11): by default the classifier's own; with alpha = 0 phi cannot matter and does not move."""
    runs = {alpha: WarPI(samples=2, virtual_lr=alpha) for alpha in (None, RECIPE.lr, 0.001, 0.0)}
    untrained = WarPI(samples=2)
    untrained.start(tiny[0], RECIPE)
    recipe = replace(RECIPE, schedule="constant")
    for method in runs.values():
        trained(method, tiny[0], recipe=recipe)
    assert equal(weights(runs[None].net, runs[None].V), weights(runs[RECIPE.lr].net, runs[RECIPE.lr].V))
    assert not equal(weights(runs[None].V), weights(runs[0.001].V))
    assert equal(weights(runs[0.0].V), weights(untrained.V))


def test_the_virtual_step_follows_the_schedule(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def spy(noisy: Any, loss: Any, x: Any, meta_loss: Any, phi: Any, lr: float) -> Tensor:  # noqa: ARG001
        seen.append(lr)
        return torch.tensor(1.0)

    monkeypatch.setattr("warpi.training.bilevel.meta_gradient", spy)
    for method in (WarPI(), MWNet()):
        seen.clear()
        trained(method, tiny[0], recipe=replace(RECIPE, epochs=3, milestones=(1 / 3, 2 / 3)))
        assert sorted(set(seen), reverse=True) == pytest.approx([0.05, 0.005, 0.0005])


# --- the table ------------------------------------------------------------------------------------------------------


def test_mistakes_in_names() -> None:
    for make, words in (
        (lambda: make_method("warpie"), "did you mean 'warpi'"),
        (lambda: make_method("warpi", sampels=3), "did you mean 'samples'"),
        (lambda: make_method("ce", samples=3), "'samples'"),
        (lambda: make_method("warpi", output="sigmoidal"), "did you mean 'sigmoid'"),
        (lambda: make_method("warpi", activation="gelu"), "activation 'gelu'"),
        (lambda: WarPI(label_input="onehot"), "did you mean 'one_hot'"),
        (lambda: Recipe(optimizer="adamw"), "did you mean 'adam'"),
        (lambda: Recipe(schedule="cosin"), "did you mean 'cosine'"),
        (lambda: Recipe(lr=-1), "lr must be"),
        (lambda: Recipe(lr=float("nan")), "lr must be"),
        (lambda: Recipe(epochs=0), "epochs must be"),
    ):
        with pytest.raises(UserError, match=words):
            make()


def test_the_table_is_not_changed_by_use(tiny: TaskAndTruth) -> None:
    before = repr(METHODS)
    trained(make_method("warpi", samples=1), tiny[0])
    assert repr(METHODS) == before
    assert make_method("warpi_detc", meta_lr=1.0) == WarPI(samples=0, meta_lr=1.0)


# --- what is learned ------------------------------------------------------------------------------------------------


def accuracy(method: Method, task: TaskAndTruth, seed: int) -> float:
    recipe = Recipe(epochs=20, lr=0.05, seed=seed)
    return trained(method, *task, recipe=recipe)[-1]["test_acc"]


def test_warpi_is_not_fooled_by_pair_noise(digits: Dataset) -> None:
    """50 trusted examples make the noisy ones useful: better than either alone."""
    found: dict[str, float] = {}
    for seed in (0, 1):
        task = make_task(digits, "pair:0.4", meta=50, seed=seed)
        for name, options in (("ce", {}), ("clean_only", {}), ("warpi", {"output": "tanh"})):
            found[name] = found.get(name, 0) + accuracy(make_method(name, **options), task, seed) / 2
    assert found["warpi"] > found["ce"] + 20
    assert found["warpi"] > found["clean_only"] + 4


def test_mwnet_gives_wrong_labels_less_weight(digits: Dataset) -> None:
    task, truth = make_task(digits, "symmetric:0.5", meta=50, seed=1)
    method = MWNet()
    assert accuracy(method, (task, truth), 1) > accuracy(make_method("ce"), (task, truth), 1) + 10
    assert truth.clean is not None
    method.net.eval()
    batch, wrong = next(task.train.batches(len(task.train))), truth.clean != task.train.y
    with torch.no_grad():
        w = method.V(cross_entropy(method.net(batch.x), batch.y)[:, None])[:, 0]
    assert w[wrong].mean() < 0.5 * w[~wrong].mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"meta_lr": float("nan")}, "meta_lr must be at least 0 and finite, got nan"),
        ({"virtual_lr": -0.1}, "virtual_lr must be at least 0, got -0.1"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_method("warpi", **options)


def test_every_training_of_a_method_has_the_whole_schedule(tiny: TaskAndTruth) -> None:
    recipe = Recipe(epochs=12, batch_size=32, lr=0.1, milestones=(0.5,))
    method = make_method("forward", warmup=1 / 3)
    method.start(tiny[0], recipe)
    rates = [record["lr"] for record in train(method, *tiny) if record is not None]
    assert rates == pytest.approx([0.1] * 2 + [0.01] * 2 + [0.1] * 4 + [0.01] * 4)
    assert [recipe.lr_at(t) for t in range(12)] == pytest.approx([0.1] * 6 + [0.01] * 6)
    assert recipe.lr_at(3, [0, 3, 99]) == 0.1  # one that the run does not reach is none
    cosine = replace(recipe, schedule="cosine")
    assert [cosine.lr_at(t, [0, 6]) for t in range(6)] == [cosine.lr_at(t, [0, 6]) for t in range(6, 12)]
