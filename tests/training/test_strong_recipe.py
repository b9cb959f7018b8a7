"""The strong recipe: warm-up, weight averaging, parameter groups, augmentation, mirrored test views."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from warpi.autodiff.inference import infer
from warpi.autodiff.passes import PassConfig, configure_passes
from warpi.data.augment import Crop
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.errors import UserError
from warpi.methods.registry import CORE, METHODS, make_method
from warpi.methods.warpi_plus import WarPIPlus
from warpi.nets.fastnet import FastNet
from warpi.runs.run import fit, fitting
from warpi.training import checkpoint
from warpi.training.cuda_graph import graph_steps
from warpi.training.engine import TrainingState, train
from warpi.training.method import Method
from warpi.training.named_recipes import RECIPES, expand_recipe
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task
from warpi.training.warmup import restart

SMALL = {"net": "conv4", "epochs": 3, "batch_size": 16, "meta_batch_size": 6, "precision": "32"}
RECIPE = Recipe(**{**RECIPES["strong"], **SMALL})


def started(name: str, task: Task, recipe: Recipe = RECIPE, **options: object) -> Method:
    method = make_method(name, **options)
    method.start(task, recipe)
    return method


def untimed(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def test_learning_rate_rises_step_by_step_and_then_follows_the_schedule() -> None:
    recipe = Recipe(lr=1.0, schedule="cosine", epochs=4, lr_warmup=2.0)
    plain = replace(recipe, lr_warmup=0.0)
    assert recipe.lr_at(0, done=0.5) == pytest.approx(0.25 * plain.lr_at(0))
    assert recipe.lr_at(1, done=0.5) == pytest.approx(0.75 * plain.lr_at(1))
    assert recipe.lr_at(3) == plain.lr_at(3)
    assert recipe.lr_at(2, schedule_starts=(0, 2), done=0.5) == pytest.approx(0.25)  # a second training warms up again


def test_every_step_of_the_warm_up_has_its_rate(pictures: tuple[Task, Truth]) -> None:
    method = started("ce", pictures[0], replace(RECIPE, lr=1.0, schedule="constant", lr_warmup=1.0))
    rates: list[float] = []
    step = method.step
    method.step = lambda batch: rates.append(float(method.lr)) or step(batch)  # type: ignore[assignment, func-returns-value, method-assign]
    list(islice(train(method, *pictures), 2 * len(method.loader)))
    n = len(method.loader)
    assert rates[: n + 1] == pytest.approx([(i + 1) / n for i in range(n)] + [1.0])


def test_no_weight_decay_on_norms_and_biases() -> None:
    net = FastNet((1, 8, 8), 3, widths=(4, 4, 4))
    filters, vectors = Recipe(decay_norms=False).make_optimizer(net.parameters()).param_groups
    assert filters["weight_decay"] > 0 == vectors["weight_decay"]
    assert {p.dim() for p in filters["params"]} == {2, 4}
    assert {p.dim() for p in vectors["params"]} == {1}
    adam = Recipe(optimizer="adam", decay_norms=False).make_optimizer(net.parameters())
    assert [group["weight_decay"] for group in adam.param_groups] == [5e-4, 0.0]
    assert len(Recipe().make_optimizer(net.parameters()).param_groups) == 1


def test_nesterov_needs_momentum() -> None:
    assert Recipe(nesterov=True).make_optimizer([torch.nn.Parameter(torch.ones(2))]).param_groups[0]["nesterov"]
    with pytest.raises(UserError, match="Nesterov"):
        Recipe(nesterov=True, momentum=0.0)


def test_averaged_weights_follow_and_predict(pictures: tuple[Task, Truth]) -> None:
    method = started("ce", pictures[0], replace(RECIPE, average=0.9))
    (averaged,) = method.averaged_nets
    assert method.predictors == [averaged]
    before = [p.clone() for p in averaged.parameters()]
    with torch.no_grad():
        for p in method.net.parameters():
            p.add_(1.0)
    method.update_averages(1)  # early, a step keeps little
    for p, old in zip(averaged.parameters(), before, strict=True):
        torch.testing.assert_close(p, old + 0.9)
    method.update_averages(1000)
    for p, old in zip(averaged.parameters(), before, strict=True):
        torch.testing.assert_close(p, old + 0.91)
    assert started("ce", pictures[0], replace(RECIPE, average=0.0)).predictors != [averaged]


def test_mirrored_views_make_predictions_symmetric(pictures: tuple[Task, Truth]) -> None:
    x = next(iter(pictures[0].train.batches(5))).x
    method = started("ce", pictures[0])
    torch.testing.assert_close(method.predict(x), method.predict(x.flip(-1)))
    plain = started("ce", pictures[0], replace(RECIPE, mirror_test=False))
    assert not torch.allclose(plain.predict(x), plain.predict(x.flip(-1)))


@pytest.mark.parametrize("name", [name for name in (*CORE, "elr_plus") if METHODS[name].trains_network])
def test_core_methods_run_with_the_strong_recipe(name: str, pictures: tuple[Task, Truth]) -> None:
    """Every step can be recorded as a graph, and the averaged networks predict."""
    recipe = replace(
        RECIPE, epochs=4, precision="bf16", lr_warmup=0.0, schedule="constant"
    )  # else many graphs on a CPU
    method = started(name, pictures[0], recipe)
    with graph_steps(method, always=True) as steps:
        assert steps is not None
        for t in range(recipe.epochs):
            for _ in method.epoch(t):
                method.update_averages(10)
        assert steps.why is None
    assert method.predictors == method.averaged_nets
    x = next(iter(pictures[0].train.batches(5))).x
    torch.testing.assert_close(method.predict(x).sum(1), torch.ones(5))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("ce", {}),
    ("warpi_plus", {}),
    ("warpi_plus", {"rectifier": True}),
    ("warpi_plus", {"strong_pair": True, "alpha": 0.0}),
    ("warpi_plus", {"evidence_last": 0.0, "rho_last": 0.5}),
    ("dividemix", {"use_trusted": True}),
    ("elr_plus", {}),
    ("promix", {"use_trusted": True}),
    ("sop_plus", {"use_trusted": True}),
    ("disc", {"use_trusted": True}),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_captured_steps_equal_plain_steps(
    name: str, options: dict[str, Any], device: str, pictures: tuple[Task, Truth]
) -> None:
    """With averaged weights, both kinds of views and mixup, before and after a warm-up."""
    recipe = replace(RECIPE, lr_warmup=0.0, schedule="constant")  # else many graphs on a CPU
    found = []
    for captured in (False, True):
        method = started(name, pictures[0].to(torch.device(device)), recipe, **options)
        with graph_steps(method, always=True) if captured else nullcontext() as steps:
            logs = []
            for t in range(recipe.epochs):
                for log in method.epoch(t):
                    method.update_averages(len(logs) + 1)
                    logs.append({key: float(value) for key, value in log.items()})
            if captured:
                assert steps is not None
                assert steps.why is None
                graphs = [step.graph for step in steps.steps.values() if step.graph is not None]
                assert graphs
                assert any(graph.graph is not None for graph in graphs) == (device == "cuda")
        tensors = [p.detach() for net in (*method.nets, *method.averaged_nets) for p in net.state_dict().values()]
        found.append((logs, tensors))
    (wanted, ours), (got, theirs) = found
    close = {"rtol": 1e-3, "atol": 1e-4} if device == "cuda" else {"rtol": 0.0, "atol": 0.0}
    for a, b in zip(wanted, got, strict=True):
        assert a == pytest.approx(b, rel=close["rtol"], abs=close["atol"])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **close)


def test_a_second_training_starts_with_new_averaged_weights(pictures: tuple[Task, Truth]) -> None:
    method = started("glc", pictures[0])
    first = [p.clone() for p in method.averaged_nets[0].parameters()]
    for _ in method.epoch(0):
        method.update_averages(10)
    restart(method)
    assert all(map(torch.equal, method.averaged_nets[0].parameters(), first))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_run_resumed_within_an_epoch_ends_the_same(
    name: str, options: dict[str, Any], pictures: tuple[Task, Truth], tmp_path: Path
) -> None:
    file = tmp_path / "state"
    whole = started(name, pictures[0], **options)
    at = TrainingState()
    items = train(whole, *pictures, at)
    stop = len(whole.loader) + 3  # the second epoch, within the warm-up of the learning rate
    early = [item for item in islice(items, stop) if item]
    checkpoint.save(file, {"method": checkpoint.state_of(whole), "position": vars(at)})
    late = [item for item in items if item]

    resumed = started(name, pictures[0], **options)
    state = checkpoint.load(file)
    checkpoint.restore(resumed, state["method"])
    records = [item for item in train(resumed, *pictures, TrainingState(**state["position"])) if item]
    assert len(early) == 1
    assert untimed(records) == untimed(late)
    for a, b in zip(whole.averaged_nets[0].parameters(), resumed.averaged_nets[0].parameters(), strict=True):
        assert torch.equal(a, b)


def colored(shape: tuple[int, int, int], counts: list[int], trusted: list[int]) -> tuple[Task, Truth]:
    """Noise images whose brightness tells the class, with different numbers of images and of trusted ones per class."""
    k = len(counts)
    rng = torch.Generator().manual_seed(7)

    def make(counts: list[int]) -> Dataset:
        y = torch.repeat_interleave(torch.arange(k), torch.tensor(counts))
        x = torch.randint(256, (len(y), *shape), generator=rng) * (y[:, None, None, None] + 1) // k
        images = TensorExamples(x.to(torch.uint8), Scale(torch.tensor(64.0), torch.tensor(64.0)), Crop(shape[-1], 4))
        return Dataset("colored", images, y, tuple(f"c{i:03}" for i in range(k)), clean=y)

    return make_task(make(counts), "uniform:0.1", meta_data=make(trusted), val=0.0, test=0.0, seed=1)


@pytest.mark.parametrize(
    ("shape", "counts", "trusted"),
    [
        ((1, 28, 28), [60, 12], [5, 1]),
        ((3, 64, 64), [30, 20, 10], [3, 2, 1]),
        ((1, 28, 28), [5] * 199 + [20], [1] * 199 + [9]),
    ],
    ids=["28 px gray, 2 classes", "64 px, 3 classes", "200 classes"],
)
def test_warpi_plus_on_other_images(shape: tuple[int, int, int], counts: list[int], trusted: list[int]) -> None:
    """Gray and larger images, 2 to 200 classes of different sizes: the prior is that of the trusted examples."""
    task, truth = colored(shape, counts, trusted)

    def net(shape: tuple[int, ...], n_classes: int) -> FastNet:
        return FastNet(shape, n_classes, widths=(4, 6, 8))

    recipe = replace(RECIPE, net=net, epochs=4, batch_size=32, meta_batch_size=8)
    method = started("warpi_plus", task, recipe)
    known = torch.tensor(trusted) + 1.0
    torch.testing.assert_close(method.prior, known / known.sum())  # type: ignore[arg-type]
    records = [record for record in train(method, task, truth) if record]
    assert len(records) == 4
    assert 0 < records[-1]["selected"] < 1
    assert 0 < records[-1]["used"] <= 1
    alone = started("warpi_plus", replace(task, meta=None), recipe)
    given = torch.bincount(task.train.y, minlength=len(counts)) + 1.0
    torch.testing.assert_close(alone.prior, given / given.sum())  # type: ignore[arg-type]


def test_a_folder_of_gray_images_with_the_strong_recipe(tmp_path: Path) -> None:
    """The shipped network, 28 pixels, two classes of different sizes, trusted images in a second folder."""
    for folder, counts in (("data", (10, 4)), ("checked", (3, 1))):
        for name, n in zip("ab", counts, strict=True):
            (tmp_path / folder / name).mkdir(parents=True)
            for row in range(n):
                gray = Image.new("L", (28, 28), 40 + 120 * (name == "b") + 3 * row + (folder == "data"))
                gray.save(tmp_path / folder / name / f"{row}.png")
    run = fit(
        tmp_path / "run",
        data=str(tmp_path / "data"),
        trusted=str(tmp_path / "checked"),
        recipe="strong",
        device="cpu",
        epochs=2,
        batch_size=7,
        meta_batch_size=4,
    )
    assert isinstance(run.method, WarPIPlus)
    assert run.task.shape == (3, 28, 28), "folders are read in color"
    torch.testing.assert_close(run.method.prior, torch.tensor([4.0, 2.0]) / 6)
    assert isinstance(run.method.net, FastNet)


def test_checkpoints_of_some_epochs_only(tmp_path: Path) -> None:
    """An interrupted run resumes from the last checkpoint and ends like one that was not interrupted."""
    settings: dict[str, Any] = {"method": "ce", "data": "digits", "limit": 100, "epochs": 5, "checkpoint_epochs": 2}
    run = fitting(tmp_path / "run", **settings)
    records = 0
    while records < 3:
        records += next(run) is not None
    run.close()
    assert checkpoint.load(tmp_path / "run" / "checkpoint.safetensors")["position"]["epoch"] == 2
    resumed = fit(tmp_path / "run", resume=True).history
    assert untimed(resumed) == untimed(fit(tmp_path / "whole", **settings).history)


def test_a_named_recipe_sets_what_is_not_set() -> None:
    settings = expand_recipe({"recipe": "strong", "epochs": 7})
    assert settings["epochs"] == 7
    assert settings["average"] == RECIPES["strong"]["average"]
    assert "recipe" not in settings
    with pytest.raises(UserError, match="strong"):
        expand_recipe({"recipe": "strung"})


def test_stored_recipes_leave_out_later_fields_at_their_default() -> None:
    assert "average" not in Recipe().stored()
    assert Recipe(average=0.5).stored()["average"] == 0.5
    assert Recipe(**Recipe(average=0.5).stored()) == Recipe(average=0.5)


@pytest.mark.parametrize("compile", [False, True])
def test_infer_gives_the_logits_of_evaluation_mode(compile: bool) -> None:
    net = configure_passes(FastNet((2, 8, 8), 3, widths=(4, 4, 4)), PassConfig(compile=compile)).eval()
    x = torch.randn(5, 2, 8, 8)
    for _ in range(2):
        torch.testing.assert_close(infer(net, x), net(x).detach())
        torch.testing.assert_close(infer(net, x, features=True), net.features(x).detach())
        with torch.no_grad():
            net.fc.bias.add_(1.0)  # weights may change between two calls
    with pytest.raises(ValueError, match="evaluation mode"):
        infer(net.train(), x)
