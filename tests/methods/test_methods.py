"""The baselines, WarPI, Meta-Weight-Net and the registry. Properties of all methods are in test_contract.py."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.data.examples import TensorExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.methods.mwnet import MWNet
from warpi.methods.plain import CleanOnly, FineTune
from warpi.methods.registry import CORE, METHODS, make_method
from warpi.methods.warpi import OUTPUTS, WarPI
from warpi.runs.run import fit
from warpi.training.engine import Diverged, Record, train
from warpi.training.method import Log, Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth
from warpi.utils.devices import cpu_threads

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
    """The same task with NaN inputs and shifted labels in the noisy rows."""
    examples = task.train.examples
    assert isinstance(examples, TensorExamples)
    x = examples.x.clone()
    x[task.train.rows] = torch.nan
    examples = replace(examples, x=x)
    meta = task.meta and replace(task.meta, examples=examples)
    return replace(task, train=Split(examples, task.train.rows, (task.train.y + 3) % 10), meta=meta, val=None)


@pytest.mark.parametrize(("threshold", "expected"), [(2**23, 1), (0, 2)])
def test_small_networks_are_trained_by_one_thread(
    threshold: int, expected: int, tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpi.training.engine.SMALL_STEP", threshold)
    used = []
    step = WarPI.step
    monkeypatch.setattr(WarPI, "step", lambda *a: used.append(torch.get_num_threads()) or step(*a))
    method = WarPI()
    method.start(tiny[0], RECIPE)
    with cpu_threads(2):
        between = {torch.get_num_threads() for _ in train(method, tiny[0])}
    assert set(used) == {expected}
    assert between == {2}


# --- baselines ------------------------------------------------------------------------------------------------------


def test_clean_only_ignores_noisy_rows(tiny: TaskAndTruth) -> None:
    a, b = CleanOnly(), CleanOnly()
    trained(a, tiny[0])
    trained(b, poisoned(tiny[0]))
    assert equal(weights(a.net), weights(b.net))
    with pytest.raises(Diverged):  # methods that read the noisy rows fail
        trained(make_method("ce"), poisoned(tiny[0]))


def test_ce_ignores_trusted_rows(tiny: TaskAndTruth) -> None:
    a, b = make_method("ce"), make_method("ce")
    trained(a, tiny[0])
    trained(b, replace(tiny[0], meta=None))
    assert equal(weights(a.net), weights(b.net))


def sources(method: FineTune | CleanOnly, task: Task, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the batches of each epoch come from: "noisy" or "trusted"."""
    method.start(task, recipe)
    assert task.meta is not None
    trusted = {tuple(x.tolist()) for x in next(task.meta.batches(1000)).x}
    origins = []

    def step(batch: Batch) -> Log:
        inside = {tuple(x.tolist()) in trusted for x in batch.x}
        assert len(inside) == 1
        origins.append("trusted" if inside.pop() else "noisy")
        return {"loss": 0.0}

    monkeypatch.setattr(method, "step", step)
    epochs = []
    for t in range(recipe.epochs):
        origins.clear()
        assert len(list(method.epoch(t))) == len(method.loader)
        assert len(set(origins)) == 1
        epochs.append(origins[0])
    return epochs


@pytest.mark.parametrize(
    ("epochs", "share", "trusted"),
    [(12, 1 / 12, 1), (24, 1 / 12, 2), (4, 0.5, 2), (3, 0.0, 1), (5, 1.0, 5), (1, 0.1, 1)],
)
def test_fine_tune_switches_to_trusted_rows(
    tiny: TaskAndTruth, epochs: int, share: float, trusted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ["noisy"] * (epochs - trusted) + ["trusted"] * trusted
    assert sources(FineTune(share=share), tiny[0], replace(RECIPE, epochs=epochs), monkeypatch) == expected


def test_clean_only_takes_as_many_steps_as_other_methods(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources(CleanOnly(), tiny[0], RECIPE, monkeypatch) == ["trusted", "trusted"]


def test_fine_tune_starts_as_cross_entropy(tiny: TaskAndTruth) -> None:
    task, recipe = tiny[0], replace(RECIPE, epochs=3, schedule="constant")
    method, ce = FineTune(share=1 / 3), make_method("ce")
    method.start(task, recipe)
    ce.start(task, recipe)
    for t in range(2):
        assert [log["loss"] for log in method.epoch(t)] == [log["loss"] for log in ce.epoch(t)]
    assert equal(weights(method.net), weights(ce.net))


def test_images_are_augmented_differently_in_every_batch(pictures: TaskAndTruth) -> None:
    """All images are equal here, so that batches differ by their augmentation only."""
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


# --- WarPI and Meta-Weight-Net --------------------------------------------------------------------------------------


def test_meta_networks_have_the_sizes_of_the_papers(tiny: TaskAndTruth) -> None:
    mwnet, warpi = MWNet(), WarPI()
    for method in (mwnet, warpi):
        method.start(tiny[0], RECIPE)
    assert sum(p.numel() for p in mwnet.V.parameters()) == 100 + 100 + 100 + 1  # 1-100-1
    k, h = 10, 100
    assert sum(p.numel() for p in warpi.V.parameters()) == k * k + (2 * k + 1) * h + (h + 1) * h + 2 * (h + 1) * k
    assert len(warpi.optimizer.param_groups[0]["params"]) == len(list(warpi.net.parameters()))  # without V


def test_samples_of_the_rectifying_vector(tiny: TaskAndTruth) -> None:
    z, y = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    for samples, n in ((10, 10), (3, 3), (0, 1)):
        method = WarPI(samples=samples)
        method.start(tiny[0], RECIPE)
        first = method.draw(method.V(z, y))
        assert first.shape == (n, 6, 10)
        assert bool(((first > 0) & (first < 1)).all())
        assert torch.equal(first, method.draw(method.V(z, y))) == (samples == 0)  # without samples, v is deterministic


def test_output_functions_of_warpi() -> None:
    s = torch.linspace(-6, 6, 101, dtype=torch.float64)
    assert OUTPUTS["unbounded"](torch.tensor(0.0)) == 1  # s = 0 leaves the logits unchanged
    for name, low, high in (("sigmoid", 0, 1), ("tanh", -2, 2)):
        v = OUTPUTS[name](s)
        assert bool(((v > low) & (v < high)).all())
        assert bool((v.diff() > 0).all())
    near = -1 + torch.linspace(-0.1, 0.1, 5).double()
    torch.testing.assert_close(OUTPUTS["tanh"](near), OUTPUTS["unbounded"](near), rtol=1e-2, atol=1e-9)
    assert set(OUTPUTS) == {"sigmoid", "tanh", "unbounded"}


@pytest.mark.parametrize(
    ("output", "label_input", "activation"),
    [("sigmoid", "embedding", "relu"), ("tanh", "one_hot", "tanh"), ("unbounded", "one_hot", "relu")],
)
def test_warpi_trains_with_every_option(tiny: TaskAndTruth, output: Any, label_input: Any, activation: Any) -> None:
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
def test_mean_init_zero_gives_every_example_the_same_mean(tiny: TaskAndTruth, samples: int) -> None:
    """The variance is initialized as usual, and training still moves the mean."""
    z, y = 3 * torch.randn(40, 10, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
    plain, zero = (WarPI(samples=samples, output="tanh", mean_init=init) for init in (None, "zero"))
    for method in (plain, zero):
        method.start(tiny[0], RECIPE)
    assert not zero.V(z, y).mean.any()
    assert plain.V(z, y).mean.std() > 0.1
    assert torch.equal(zero.V(z, y).std, plain.V(z, y).std), "only the mean is initialized differently"
    trained(zero, *tiny)
    assert zero.V(z, y).mean.std(0).min() > 0


def test_virtual_learning_rate(tiny: TaskAndTruth) -> None:
    """alpha of Eq. (11) is the classifier's learning rate by default; with alpha = 0, phi has no gradient."""
    runs = {alpha: WarPI(samples=2, virtual_lr=alpha) for alpha in (None, RECIPE.lr, 0.001, 0.0)}
    untrained = WarPI(samples=2)
    untrained.start(tiny[0], RECIPE)
    recipe = replace(RECIPE, schedule="constant")
    for method in runs.values():
        trained(method, tiny[0], recipe=recipe)
    assert equal(weights(runs[None].net, runs[None].V), weights(runs[RECIPE.lr].net, runs[RECIPE.lr].V))
    assert not equal(weights(runs[None].V), weights(runs[0.001].V))
    assert equal(weights(runs[0.0].V), weights(untrained.V))


def test_virtual_step_follows_the_learning_rate_schedule(tiny: TaskAndTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def spy(noisy: Any, loss: Any, x: Any, meta_loss: Any, phi: Any, lr: float) -> Tensor:  # noqa: ARG001
        seen.append(lr)
        return torch.tensor(1.0)

    monkeypatch.setattr("warpi.training.bilevel.meta_gradient", spy)
    for method in (WarPI(), MWNet()):
        seen.clear()
        trained(method, tiny[0], recipe=replace(RECIPE, epochs=3, milestones=(1 / 3, 2 / 3)))
        assert sorted(set(seen), reverse=True) == pytest.approx([0.05, 0.005, 0.0005])


# --- the registry ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["warpi", "dividemix"])
def test_fit_leaves_the_global_generators_unchanged(name: str, tmp_path: Path) -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    done = fit(tmp_path / "run", method=name, device="cpu", noise="pair:0.4", limit=150, meta=20, epochs=1)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert (done.path / "done").exists()


def test_core_methods_are_registered() -> None:
    assert len(CORE) == len(set(CORE)) == 13
    assert set(CORE) <= METHODS.keys()


def test_misspelled_names_are_reported() -> None:
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


def test_training_does_not_change_the_registry(tiny: TaskAndTruth) -> None:
    before = repr(METHODS)
    trained(make_method("warpi", samples=1), tiny[0])
    assert repr(METHODS) == before
    assert make_method("warpi_detc", meta_lr=1.0) == WarPI(samples=0, meta_lr=1.0)


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


def test_each_phase_has_the_full_learning_rate_schedule(tiny: TaskAndTruth) -> None:
    recipe = Recipe(epochs=12, batch_size=32, lr=0.1, milestones=(0.5,))
    method = make_method("forward", warmup=1 / 3)
    method.start(tiny[0], recipe)
    rates = [record["lr"] for record in train(method, *tiny) if record is not None]
    assert rates == pytest.approx([0.1] * 2 + [0.01] * 2 + [0.1] * 4 + [0.01] * 4)
    assert [recipe.lr_at(t) for t in range(12)] == pytest.approx([0.1] * 6 + [0.01] * 6)
    assert recipe.lr_at(3, [0, 3, 99]) == 0.1  # a start after the last epoch is ignored
    cosine = replace(recipe, schedule="cosine")
    assert [cosine.lr_at(t, [0, 6]) for t in range(6)] == [cosine.lr_at(t, [0, 6]) for t in range(6, 12)]


@dataclass
class CountsEpochs(Method):
    """A method that notes which epochs begin."""

    def create_state(self) -> None:
        self.begun = [self.task.n_classes]  # the task is known

    def before_epoch(self, t: int) -> None:
        self.begun.append(t)

    def step(self, batch: Batch) -> Log:  # noqa: ARG002
        return {}


def test_before_epoch_is_called_once_per_epoch_even_if_it_is_interrupted(tiny: TaskAndTruth) -> None:
    method = CountsEpochs()
    method.start(tiny[0], Recipe(epochs=3, batch_size=32))
    list(method.epoch(0))
    next(method.epoch(1))
    list(method.epoch(1))
    list(method.epoch(2))
    assert method.begun == [tiny[0].n_classes, 0, 1, 2]
