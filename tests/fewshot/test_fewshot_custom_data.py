"""Few-shot learning on custom data: accepted and refused inputs of `adapt`, `train` and run folders."""

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from warpi.cli.app import main
from warpi.errors import UserError
from warpi.fewshot.compare import judged
from warpi.fewshot.data import Classes, FewShotData, Sines
from warpi.fewshot.episodes import Kind, make_tasks, random_affine, random_crop
from warpi.fewshot.evaluate import Scores, evaluate
from warpi.fewshot.learner import Learner, Problem
from warpi.fewshot.learners.registry import LEARNERS, make_learner
from warpi.fewshot.run import fit, load
from warpi.fewshot.spec import specify
from warpi.fewshot.train import Step, Training, train
from warpi.training import checkpoint
from warpi.utils.devices import Stopped
from warpi.utils.seeding import generator

QUICK: dict[str, Any] = {"data": "sines", "tasks": 4, "queries": 5, "val_every": 2, "val_tasks": 10, "threads": 1}
TRAINING = Training(iterations=1, tasks=2, queries=2, val_every=1, val_tasks=2)
LEARNER = "r2d2"


def started(name: str = LEARNER, shape: tuple[int, ...] = (4,), ways: int = 3) -> Learner:
    learner = replace(LEARNERS[name])
    learner.start(Problem(shape, ways))
    return learner


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=generator(seed, "numbers"))


def parts(of: Callable[[str], Classes]) -> FewShotData:
    return FewShotData("custom", of("a"), of("b"), of("c"))


def vectors(name: str, k: int = 4) -> Classes:
    return Classes.of({f"{name}{i}": numbers(6, 4, seed=i) + i for i in range(k)})


def images(name: str, shape: tuple[int, ...] = (1, 16, 16)) -> Classes:
    return Classes.of({f"{name}{i}": numbers(6, *shape, seed=i) for i in range(4)})


# --- adapt and predict ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nearest", "metavrf"])
def test_classes_without_an_example_are_refused(name: str) -> None:
    learner = started(name)
    x = numbers(4, 4)
    with pytest.raises(UserError, match=r"no example of class 1 in the support set; every class of 0 \.\. 2 needs one"):
        learner.adapt(x, torch.tensor([0, 0, 2, 2]))
    with pytest.raises(UserError, match="no example of class 2, 3 in the support"):
        learner.adapt(x, torch.tensor([0, 0, 1, 1]), ways=4)
    with pytest.raises(UserError, match="no example of class 0 in task 1 of 2"):
        learner.adapt(numbers(2, 3, 4), torch.tensor([[0, 1, 2], [1, 1, 2]]))


@pytest.mark.parametrize("name", ["nearest", "protonet", "r2d2", "metavrf"])
def test_arrays_lists_and_all_integer_types_are_accepted(name: str) -> None:
    learner = started(name)
    x = numbers(3, 4)
    q = numbers(2, 4, seed=1)
    expected = learner.adapt(x, torch.tensor([0, 1, 2])).predict(q)
    for dtype in (torch.int32, torch.uint8, torch.int16):
        assert torch.equal(learner.adapt(x, torch.tensor([0, 1, 2], dtype=dtype)).predict(q), expected)
    assert torch.equal(learner.adapt(x.numpy(), np.array([0, 1, 2])).predict(q.numpy()), expected)
    assert torch.equal(
        learner.adapt(x.numpy()[::-1], [2, 1, 0]).predict(q.flip(0).numpy()[::-1]).argmax(1), expected.argmax(1)
    )
    assert torch.allclose(learner.adapt(x.tolist(), [0, 1, 2]).predict(q.tolist()).float(), expected)
    with pytest.raises(UserError, match="inputs must be a tensor, an array or a list"):
        learner.adapt([[1.0, 2.0], [3.0]], [0, 1])
    with pytest.raises(UserError, match="inputs must be a tensor, an array or a list"):
        learner.adapt([["a"] * 4], [0])


def test_targets_of_all_number_types_are_accepted() -> None:
    for name in ("maml", "r2d2", "metavrf"):
        learner = started(name, (1,), 0)
        x = numbers(3, 1)
        expected = learner.adapt(x, torch.tensor([0.0, 1.0, 2.0])).predict(x)
        assert torch.equal(learner.adapt(x, [0, 1, 2]).predict(x), expected)
        assert torch.equal(learner.adapt(x.double(), np.arange(3.0)).predict(x.double()), expected)
    with pytest.raises(UserError, match="targets must have 1 numbers each, got \\[2\\]"):
        learner.adapt(x, numbers(3, 2))


@pytest.mark.parametrize("name", ["nearest", "protonet", "r2d2", "metavrf"])
@pytest.mark.parametrize("shape", [(4,), (1, 16, 16)])
def test_no_queries_give_no_predictions(name: str, shape: tuple[int, ...]) -> None:
    learner = started(name, shape)
    one = learner.adapt(numbers(3, *shape), torch.arange(3))
    assert one.predict(numbers(0, *shape)).shape == (0, 3)
    two = learner.adapt(numbers(2, 3, *shape), torch.arange(3).repeat(2, 1))
    assert two.predict(numbers(2, 0, *shape)).shape == (2, 0, 3)
    with pytest.raises(UserError, match="the support set is empty"):
        learner.adapt(numbers(0, *shape), torch.arange(0))


def test_support_and_queries_must_have_equally_many_tasks() -> None:
    adapted = started().adapt(numbers(4, 3, 4), torch.arange(3).repeat(4, 1))
    assert adapted.predict(numbers(4, 2, 4)).shape == (4, 2, 3)
    with pytest.raises(UserError, match="support and queries have 4 and 3 tasks"):
        adapted.predict(numbers(3, 2, 4))
    with pytest.raises(UserError, match=r"inputs must be \[T, N, 4\], got \[2, 4\]"):
        adapted.predict(numbers(2, 4))


def test_nearest_accepts_mixed_number_types() -> None:
    learner = started("nearest")
    x = torch.arange(12).view(3, 4)
    expected = learner.adapt(x.float(), torch.arange(3)).predict(x.float())
    for a, b in ((x, x), (x.double(), x.float()), (x.half(), x.double()), (x, x.float())):
        assert torch.allclose(learner.adapt(a, torch.arange(3)).predict(b).float(), expected)


def test_images_must_be_bytes_or_floats() -> None:
    with pytest.raises(UserError, match=r"images must be bytes \(uint8\) or floats in \[0, 1\], got torch.int64"):
        started(shape=(1, 16, 16)).adapt(torch.ones(3, 1, 16, 16, dtype=torch.int64), torch.arange(3))


# --- data and training ------------------------------------------------------------------------------------------------


def test_classes_are_built_from_arrays() -> None:
    classes = Classes.of({"a": np.ones((2, 4)), "b": [[1, 2, 3, 4]]})
    assert classes.x.dtype == torch.float32
    assert classes.count.tolist() == [2, 1]
    for given, message in (
        ({}, "no classes were given"),
        ({"a": numbers(2, 1, 8, 8), "b": numbers(2, 1, 9, 9)}, r"'a' has inputs .*8, 8.* and 'b' has .*9, 9"),
        ({"a": numbers(2, 4), "b": torch.ones(2, 4, dtype=torch.uint8)}, "they must be equal"),
        ({"a": numbers(0, 4)}, r"class 'a' must have images .* got shape \(0, 4\)"),
        ({"a": torch.ones(2, 1, 8, 8, dtype=torch.int64)}, "images must be bytes"),
    ):
        with pytest.raises(UserError, match=message):
            Classes.of(given)
    with pytest.raises(UserError, match="only square images can be rotated"):
        Classes.of({"a": numbers(2, 1, 8, 9)}, rotations=4)


def test_training_accepts_float64() -> None:
    def wide(name: str) -> Classes:
        return Classes.of({f"{name}{i}": numbers(6, 4).double() + i for i in range(4)})

    (record,) = train(started(), parts(wide), Kind(3, 1, 2), TRAINING)
    assert record is not None
    assert math.isfinite(record["loss"])


def test_train_refuses_invalid_data_before_the_first_step() -> None:
    kind = Kind(3, 1, 2)
    learner = started()

    def refused(message: str, data: FewShotData, training: Training = TRAINING, learner: Learner = learner) -> None:
        with pytest.raises(UserError, match=message):
            train(learner, data, kind, training)  # raises before the first item is requested

    refused("has no networks yet", parts(vectors), learner=replace(LEARNERS[LEARNER]))
    refused(r"only square images can be augmented, .* \(4,\)", parts(vectors), replace(TRAINING, augment=True))
    flat = parts(lambda name: images(name, (1, 16, 20)))
    wide = started(shape=(1, 16, 20))
    refused(r"only square images .* \(1, 16, 20\)", flat, replace(TRAINING, augment=True), wide)
    refused("need at least --ways 3, got --train-ways 2", parts(vectors), replace(TRAINING, train_ways=2))
    refused("train and val share classes: a0, a1", FewShotData("custom", vectors("a"), vectors("a"), vectors("c")))
    refused("train and test share classes: a0", FewShotData("custom", vectors("a"), vectors("b"), vectors("a")))
    refused(r"inputs of custom are \(4,\)", parts(vectors), learner=started(shape=(5,)))
    refused(r"regression \(ways=0\)", FewShotData("custom", Sines(), Sines(), Sines()), learner=started(shape=(1,)))
    refused("use the same type for all parts", FewShotData("custom", vectors("a"), Sines(), vectors("c")))
    refused(
        "between 2 and 2, the number of validation classes; got 3",
        FewShotData("custom", vectors("a"), vectors("b", 2), vectors("c")),
    )


def test_augmentation_of_floats_equals_that_of_bytes() -> None:
    x = torch.randint(256, (1, 2, 3, 1, 16, 16), generator=generator(0, "x")).to(torch.uint8)
    for vary in (random_crop, random_affine):
        a, b = (vary(each, generator(0, "vary")) for each in (x, x / 255))
        assert torch.allclose(a, b, atol=1e-6)


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_with_fresh_noise_depends_only_on_the_seed() -> None:
    learner = make_learner("metavrf", noise="fresh", bases=8)
    learner.start(Problem((1,)))
    tasks = make_tasks(Sines(), Kind(0, 5, 10), "cpu", training=False, augment=False)
    training_generator = learner.generator
    before = training_generator.get_state()
    first = evaluate(learner, tasks, 7, seed=1)
    assert evaluate(learner, tasks, 7, seed=1, timed=True)[:3] == first[:3]
    assert evaluate(learner, tasks, 7, seed=1, batch=2).each == pytest.approx(first.each, rel=1e-4)
    assert learner.generator is training_generator
    assert torch.equal(training_generator.get_state(), before), "evaluation changes the random numbers of training"
    assert not torch.equal(*(learner.predict(*(numbers(1, 5, 1),) * 3, 0).value for _ in range(2)))


def test_interval_uses_the_sample_standard_deviation() -> None:
    assert Scores.of(torch.tensor([1.0, 3.0]), 1.0).ci95 == pytest.approx(1.96 * math.sqrt(2) / math.sqrt(2))
    assert Scores.of(torch.tensor([1.0]), 1.0).ci95 is None


def test_one_validation_task_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = QUICK | {"learner": LEARNER, "iterations": 2, "val_tasks": 1, "quiet": False}
    assert len(fit(tmp_path / "run", **settings).history) == 1
    assert "nan" not in "".join(capsys.readouterr())


# --- run folders ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    path = tmp_path_factory.mktemp("trained") / "run"
    fit(path, learner="metavrf", iterations=2, **QUICK)
    return path


@pytest.fixture
def run(tmp_path: Path, trained: Path) -> Path:
    """A copy of the finished run, which a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("options"), "no 'options'"),
        (lambda s: s.pop("learner"), "no 'learner'"),
        (lambda s: s["training"].update(pace=3), "pace"),
        (lambda s: s["options"].update(pace=3), "pace"),
        (lambda s: s.update(pace=3), "pace"),
        (lambda s: s.update(shots="five"), "shots must be int, got 'five'"),
        (lambda s: s.update(learner=["metavrf"]), "learner must be str"),
        (lambda s: s.update(learner="metavr"), "did you mean 'metavrf'?"),
        (lambda s: s.update(data="sinus"), "did you mean 'sines'?"),
        (lambda s: s.update(training=[]), "training"),
        (lambda s: s.update(options=3), "options"),
        (lambda s: s.update(changed=3), "changed"),
        (lambda s: s.update(root=3), "root"),
        (lambda s: s.update(own=3), "own must be bool"),
    ],
)
def test_invalid_spec_is_reported(run: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    file = run / "spec.json"
    stored = json.loads(file.read_text())
    change(stored["spec"])
    file.write_text(json.dumps(stored))
    for read in (partial(load, run, device="cpu"), partial(fit, run, resume=True)):
        with pytest.raises(UserError, match=r"spec\.json does not describe a run: .*; restore it") as e:
            read()
        assert message in str(e.value)
    file.write_text(json.dumps(stored | {"version": "99.0"}))
    with pytest.raises(UserError, match=r"spec\.json .* it was written by warpi 99\.0, and this is"):
        load(run, device="cpu")


def test_invalid_results_are_reported(run: Path) -> None:
    (run / "results.jsonl").write_text("{}\n")
    for read in (partial(load, run, device="cpu"), partial(fit, run, resume=True)):
        with pytest.raises(UserError, match=r"line 1 of .*results\.jsonl is not the record of a validation"):
            read()


def test_relative_root_is_stored_as_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = []

    def read(name: str, root: str | None) -> FewShotData:
        roots.append(root)
        return parts(images)._replace(name=name)

    monkeypatch.setattr("warpi.fewshot.run._read_builtin", read)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = {**QUICK, "data": "cifar_fs", "learner": "nearest", "ways": 2, "queries": 2, "root": "files"}
    fit("run", **settings)
    monkeypatch.chdir(tmp_path / "elsewhere")
    load("../run", device="cpu")
    fit("../run", resume=True)
    fit("../run", resume=True, **settings | {"root": "../files"})
    assert roots == [str(tmp_path / "files")] * 4
    assert specify(data="cifar_fs").root is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "sines", "ways": 5}, "sines are regression"),
        ({"data": "sines", "augment": True}, "only images can be augmented"),
        ({"data": "sines", "shots": 0}, "shots and queries must be at least 1"),
        ({"data": "sines", "learner": "nearest"}, "Nearest only supports classification"),
        ({"data": "cifar_fs", "ways": 5, "learner": "nearest"}, "the number of training classes; got 5"),
    ],
)
def test_impossible_tasks_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    if settings["data"] != "sines":
        monkeypatch.setattr("warpi.fewshot.run._read_builtin", lambda *_: parts(images))
    with pytest.raises(UserError, match=message):
        fit(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_saved_weights_restore_the_predictions(tmp_path: Path) -> None:
    learner = started("metavrf_bilstm")
    list(train(learner, parts(vectors), Kind(3, 1, 2), TRAINING))
    torch.save(learner.net.state_dict(), tmp_path / "weights.pt")
    other = replace(LEARNERS["metavrf_bilstm"])
    other.start(Problem((4,), 3), seed=7)
    other.net.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert checkpoint.digest(other.net.state_dict()) == checkpoint.digest(learner.net.state_dict())
    x = numbers(3, 4)
    assert torch.equal(*(each.adapt(x, [0, 1, 2]).predict(x) for each in (learner, other)))


# --- run folders of custom data ---------------------------------------------------------------------------------------

CUSTOM: dict[str, Any] = QUICK | {
    "learner": "protonet",
    "ways": 3,
    "queries": 2,
    "iterations": 4,
    "features": 8,
    "device": "cpu",
}


def test_run_on_custom_data_is_stored_and_loaded(tmp_path: Path) -> None:
    data = parts(vectors)
    finished = fit(tmp_path / "run", **CUSTOM | {"data": data})
    stored = json.loads((tmp_path / "run" / "spec.json").read_text())
    assert (stored["spec"]["data"], stored["spec"]["own"], stored["spec"]["root"]) == ("custom", True, None)
    assert stored["facts"]["data_sha256"] == data.digest()
    run = load(tmp_path / "run", weights="last", device="cpu", data=parts(vectors))
    assert checkpoint.digest(checkpoint.state_of(run.learner)) == checkpoint.digest(
        checkpoint.state_of(finished.learner)
    )
    assert [record["iteration"] for record in run.history] == [2, 4]
    assert (row := judged(run, 20))["data"] == "custom"
    assert row["mean"] == judged(finished, 20)["mean"]
    assert specify(data=data).learner == "metavrf_bilstm"


def test_run_on_custom_data_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit(tmp_path / "whole", **CUSTOM | {"data": parts(images)})
    calls = [0]
    plain = Step.body

    def body(step: Step) -> None:
        plain(step)
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Step, "body", body)
    with pytest.raises(Stopped, match=r"resume with: fit\('.*parts', resume=True, data=\.\.\.\)"):
        fit(tmp_path / "parts", **CUSTOM | {"data": parts(images)})
    resumed = fit(tmp_path / "parts", resume=True, data=parts(images)._replace(name="renamed"), device="cpu", ways=3)
    assert calls[0] == 4
    assert checkpoint.digest(checkpoint.state_of(resumed.learner)) == checkpoint.digest(
        checkpoint.state_of(whole.learner)
    )
    assert resumed.spec == whole.spec


def test_changed_custom_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    data = parts(vectors)
    fit(path, **CUSTOM | {"data": data, "iterations": 1})
    (path / "done").unlink()
    one = data.val.x.clone()  # type: ignore[union-attr]
    one[0, 0] += 1
    changed = data._replace(val=replace(data.val, x=one))  # type: ignore[type-var]
    for other in (
        changed,
        parts(images),
        parts(partial(vectors, k=5)),
        FewShotData("custom", Sines(), Sines(), Sines()),
    ):
        for read in (partial(load, path, device="cpu"), partial(fit, path, resume=True)):
            with pytest.raises(UserError, match=r"data_sha256 was .*, now .*; use the original, or choose"):
                read(data=other)
    for read in (partial(load, path, device="cpu"), partial(fit, path, resume=True)):
        with pytest.raises(UserError, match=r"trained on data passed from Python, 'custom'; pass it again: "):
            read()
    with pytest.raises(UserError, match="started with data = 'custom', not 'sines'"):
        fit(path, resume=True, data="sines")
    with pytest.raises(UserError, match="no run in"):
        fit(tmp_path / "typo", resume=True, data=data)
    for argv in (["evaluate", str(path)], ["fit", "--out", str(path), "--resume"], ["plot", str(path), "--out=x.png"]):
        assert main(["fewshot", *argv]) == 2
        output = capsys.readouterr().err
        assert f"load({str(path)!r}, data=...)" in output
        assert output.count("\n") == 1


def test_custom_data_may_have_the_name_of_built_in_data(tmp_path: Path) -> None:
    data = parts(images)._replace(name="sines")
    row = judged(fit(tmp_path / "run", **CUSTOM | {"data": data, "iterations": 1}), 5)
    assert (row["data"], row["ways"], row["metric"]) == ("sines", 3, "accuracy")
    with pytest.raises(UserError, match="data passed from Python, 'sines'"):
        load(tmp_path / "run", device="cpu")
    assert load(tmp_path / "run", device="cpu", data=data, root="elsewhere").data.name == "sines"


def test_custom_sines_are_regression(tmp_path: Path) -> None:
    slow = Sines(frequency=(0.1, 0.2))
    run = fit(tmp_path / "run", **QUICK | {"data": FewShotData("slow", slow, slow, slow), "iterations": 1, "tasks": 1})
    assert (run.spec.learner, run.spec.ways, run.spec.shots) == ("metavrf_evidence", 0, 5)
    assert judged(load(tmp_path / "run", data=run.data), 5)["metric"] == "mse"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"root": "files"}, "the data 'custom' is passed as an object, not read: leave out root='files'"),
        ({"data": vectors("a")}, "data must be one of sines, .*, or a FewShotData, got a Classes"),
        ({"data": FewShotData("custom", vectors("a"), vectors("a"), vectors("b"))}, "train and val share classes: "),
        ({"ways": 5}, "ways must be between 2 and 4"),
        ({"learner": "mamel"}, "did you mean 'maml'"),
    ],
)
def test_invalid_custom_data_leaves_no_folder(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit(tmp_path / "run", **CUSTOM | {"data": parts(vectors)} | settings)
    assert not (tmp_path / "run").exists()
