"""`auto` as a method: run folders, predictions, audits, reports, defaults, and the labels of trusted rows."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.sparse import csr_array
from sklearn.naive_bayes import GaussianNB

import warpi
from warpi.audit.make_audit import audit
from warpi.audit.result import read_audit
from warpi.cli.app import main
from warpi.data.dataset import Dataset
from warpi.data.numeric import make_features
from warpi.data.sparse import SparseExamples
from warpi.errors import UserError
from warpi.methods.auto import Auto, parse_seconds, read_rows
from warpi.methods.registry import METHODS
from warpi.methods.warpi_plus import WarPIPlus
from warpi.runs.defaults import ENOUGH_ROWS, default_method
from warpi.runs.predictions import predict
from warpi.runs.reopen import reopen
from warpi.runs.run import Run, fitting
from warpi.runs.spec import RunSpec, prepare
from warpi.training.named_recipes import RECIPES, epochs_on_cpu
from warpi.training.task import Task, make_task
from warpi.utils.devices import Stopped

CLASSES = ("a", "b", "c")
KEYS = {"candidate", "score", "error", "seconds", "weight", "note"}


def make_rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return (rng.normal(size=(n, 4)) + 1.5 * np.eye(4)[y]).round(4), y


def write_table(path: Path, x: np.ndarray, columns: dict[str, Any]) -> None:
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["p", "q", "r", "s", *columns])
        writer.writerows([*row, *cells] for row, *cells in zip(x.tolist(), *columns.values(), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with a third of its labels wrong, and trusted rows with the labels that they had before."""
    path = tmp_path_factory.mktemp("auto")
    names = np.array(CLASSES)
    rng = np.random.default_rng(0)
    x, y = make_rows(150, 1)
    given = np.where(rng.random(150) < 0.33, (y + 1) % 3, y)
    write_table(path / "data.csv", x, {"label": names[given]})
    x, y = make_rows(30, 2)
    given = np.where(rng.random(30) < 0.33, (y + 1) % 3, y)
    write_table(path / "trusted.csv", x, {"label": names[y]})
    write_table(path / "pairs.csv", x, {"label": names[y], "given": names[given]})
    x, y = make_rows(40, 3)
    write_table(path / "new.csv", x, {"label": names[y]})
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    data = {"data": str(folder / "data.csv"), "trusted": str(folder / "trusted.csv")}
    return warpi.fit(folder / "run", **data, model="logistic", device="cpu")


def test_run_folder(run: Run) -> None:
    choice = json.loads((run.path / "choice.json").read_text())
    assert choice == run.method.choice()
    assert len(choice) > 2
    for candidate in choice:
        assert candidate.keys() == KEYS
        assert 0 <= candidate["weight"] <= 1
    (record,) = run.history
    assert 0 <= record["trusted_low"] <= record["trusted_acc"] <= record["trusted_high"] <= 100
    assert len(run.task.train) == 150, "all rows are used"
    assert run.task.val is run.truth.test is None
    assert len(run.task.meta or ()) == 30
    spec = json.loads((run.path / "spec.json").read_text())
    assert spec["spec"]["method"] == "auto"
    assert (spec["spec"]["val"], spec["spec"]["test"], spec["spec"]["recipe"]["epochs"]) == (0, 0, 1)


def test_predictions_of_the_stored_run(run: Run, folder: Path, tmp_path: Path) -> None:
    before = warpi.predict(run, folder / "new.csv")
    after = warpi.predict(run.path, folder / "new.csv")
    np.testing.assert_allclose(after.probabilities, before.probabilities, atol=1e-6)
    np.testing.assert_allclose(after.probabilities.sum(1), 1, atol=1e-5)
    assert after.accuracy["label"][0] > 60
    assert main(["predict", str(run.path), "--data", str(folder / "new.csv"), "--csv", str(tmp_path / "p.csv")]) == 0
    with (tmp_path / "p.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [row["predicted"] for row in rows] == [CLASSES[k] for k in before.predicted]
    assert [row["predicted_label"] for row in rows] == [row["predicted"] for row in rows]


def test_a_run_that_was_stopped_gives_the_same_result(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "stopped"
    data = {"data": str(folder / "data.csv"), "trusted": str(folder / "trusted.csv"), "model": "logistic"}
    caught: list[int] = []

    def stop(what: str, share: float) -> None:  # noqa: ARG001
        caught.append(15)

    monkeypatch.setattr("warpi.training.progress.Progress.describe", lambda _, *done: stop(*done))
    with pytest.raises(Stopped, match="resume with: warpi fit --out"):
        for _ in warpi.runs.run.fitting(out, **data, device="cpu", caught=caught):
            pass
    monkeypatch.undo()
    assert not (out / "choice.json").exists()
    again = warpi.fit(out, resume=True, device="cpu")
    first = run.method.out_of_sample()
    second = again.method.out_of_sample()
    assert first is not None
    assert second is not None
    assert torch.equal(first.p, second.p)
    assert torch.equal(first.p_trusted, second.p_trusted)
    assert {**again.history[0], "seconds": 0} == {**run.history[0], "seconds": 0}


def test_audit_uses_the_out_of_sample_predictions(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    result = audit(run.path, folds=0, device="cpu")
    own = run.method.out_of_sample()
    assert own is not None
    np.testing.assert_allclose(result.probabilities, own.p.numpy())
    np.testing.assert_allclose(result.T, own.transition.numpy())
    assert result.facts["probabilities"].startswith("out of sample")
    assert result.facts["noise_rate"]["low"] is None, "no label before the check is known"
    assert "used for training" not in caplog.text
    assert read_audit(run.path).facts["noise_rate"] == result.facts["noise_rate"]


def test_labels_before_the_check_give_an_interval(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(folder / "data.csv"), "--trusted", str(folder / "pairs.csv"), "--model", "logistic"]
    assert main(["fit", *flags, "--out", str(folder / "pairs"), "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "on 30 trusted rows, each predicted by models that were not trained on it" in output
    assert "with about 120 trusted rows in total, this interval" in output
    assert "of the labels are wrong (90 % interval" in output
    method = reopen(folder / "pairs", "cpu").method
    assert method.task.meta_given is not None
    assert method.task.meta is not None
    wrong = (method.task.meta_given != method.task.meta.y).double().mean()
    assert 0.1 < wrong < 0.6
    assert main(["audit", str(folder / "pairs"), "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "90 % interval" in output
    assert "from 30 checked rows" in output
    rate = read_audit(folder / "pairs").facts["noise_rate"]
    assert rate["low"] < 0.33 < rate["high"]


def test_report(run: Run, tmp_path: Path) -> None:
    assert main(["report", str(run.path), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "model accuracy on 30 trusted rows" in page
    assert re.search(r"90 % interval \d+ to \d+ %. .* With about 120 trusted rows in total, this interval", page)
    assert "<h3>Candidates</h3>" in page


def test_without_trusted_rows(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(folder / "data.csv"), "--model", "logistic", "--device", "cpu"]
    assert main(["fit", *flags, "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr()
    assert "five rows per class with `warpi pick`" in output.err
    assert "trusted rows, each" not in output.out
    assert all(c["score"] is None for c in json.loads((tmp_path / "run" / "choice.json").read_text()))


def test_one_trusted_row(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (folder / "trusted.csv").read_text().splitlines(keepends=True)[:2]
    (tmp_path / "one.csv").write_text("".join(first))
    flags = ["--data", str(folder / "data.csv"), "--trusted", str(tmp_path / "one.csv"), "--model", "knn"]
    assert main(["fit", *flags, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert "one trusted row is too few to measure the accuracy" in capsys.readouterr().err


def make_small_task(n: int = 60, trusted: int = 9, shape: tuple[int, ...] = (4,)) -> Task:
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % 3
    marks = torch.arange(n) < trusted if trusted else None
    return make_task(Dataset("x", make_features(x), y, CLASSES, trusted=marks), val=0.0, test=0.0)[0]


@pytest.mark.parametrize(
    ("task", "settings", "name"),
    [
        (make_small_task(), {}, "auto"),
        (make_small_task(), {"seed": 3}, "auto"),
        (make_small_task(trusted=0), {}, "auto"),
        (make_small_task(), {"epochs": 3}, "glc"),
        (make_small_task(ENOUGH_ROWS + 30), {"lr": 0.1}, "warpi"),
        (make_small_task(trusted=0), {"net": "mlp"}, "elr"),
        (make_small_task(shape=(1, 8, 8)), {}, "auto"),
    ],
)
def test_default_method(task: Task, settings: dict[str, Any], name: str) -> None:
    assert default_method(task, settings).name == name
    assert default_method(task, settings).reason


def test_images_on_a_gpu_train_a_network() -> None:
    gpu = torch.device("cuda")
    small = make_small_task(shape=(1, 8, 8))
    assert default_method(make_small_task(shape=(1, 66, 66)), {}, device=gpu).name == "warpi"
    assert default_method(make_small_task(trusted=0, shape=(1, 66, 66)), {}, device=gpu).name == "elr"
    assert default_method(make_small_task(), {}, device=gpu).name == "auto"
    for settings in ({}, {"epochs": 3}, RECIPES["strong"]):
        chosen = default_method(small, settings, device=gpu)
        assert (chosen.name, chosen.recipe) == ("warpi_plus", RECIPES["strong"])
    for settings in (RECIPES["paper"], {"net": "resnet18"}):
        assert default_method(small, settings, device=gpu)[::2] == ("warpi", {})
    cpu = torch.device("cpu")
    assert default_method(small, RECIPES["strong"], device=cpu)[::2] == ("warpi_plus", RECIPES["strong"])
    assert default_method(small, {**RECIPES["strong"], "net": "resnet18"}, device=cpu).name == "warpi"


def test_a_run_on_a_gpu_has_the_settings_of_the_strong_recipe(small_photos: Path) -> None:
    data = {"data": str(small_photos), "epochs": 7}
    prepared = prepare(RunSpec.from_settings(None, **data), device=torch.device("cuda"))
    assert (prepared.spec.method, prepared.spec.recipe.net, prepared.spec.recipe.epochs) == ("warpi_plus", "fastnet", 7)
    assert prepared.spec.recipe.average == RECIPES["strong"]["average"]
    paper = prepare(RunSpec.from_settings(None, **data, **RECIPES["paper"]), device=torch.device("cuda"))
    assert (paper.spec.method, paper.spec.recipe.augment) == ("elr", "weak")


def test_the_strong_recipe_on_a_cpu_has_the_method_that_it_has_on_a_gpu(small_photos: Path, tmp_path: Path) -> None:
    given = {"data": str(small_photos), "recipe": "strong", "device": "cpu"}
    short = {"epochs": 1, "batch_size": 4, "limit": 4}
    run = warpi.fit(tmp_path / "named", **given, **short)
    assert isinstance(run.method, WarPIPlus)
    assert len(run.history) == 1
    assert run.method.recipe.average == RECIPES["strong"]["average"]


def test_epochs_of_the_strong_recipe_on_a_cpu(monkeypatch: pytest.MonkeyPatch, small_photos: Path) -> None:
    assert epochs_on_cpu(1_000, (3, 32, 32)) == RECIPES["strong"]["epochs"]
    assert epochs_on_cpu(5_000, (1, 28, 28)) == 52
    assert epochs_on_cpu(5_000, (3, 64, 64)) == epochs_on_cpu(20_000, (3, 32, 32)) == 10
    assert epochs_on_cpu(1_000_000, (3, 64, 64)) == 10, "at least"
    monkeypatch.setattr("warpi.training.named_recipes._CPU_IMAGES", 20)
    settings = {name: value for name, value in RECIPES["strong"].items() if name != "epochs"}
    shortened = prepare(RunSpec.from_settings(None, data=str(small_photos), **settings), device=torch.device("cpu"))
    assert shortened.spec.recipe.epochs == 40
    assert (
        "fastnet for 40 epochs instead of 100, because there is no GPU (--epochs N sets another number; the"
        in shortened.summarize()
    )
    for changed, device in (({"epochs": 100}, "cpu"), ({}, "cuda")):
        spec = RunSpec.from_settings(None, data=str(small_photos), **settings, **changed)
        whole = prepare(spec, device=torch.device(device))
        assert whole.spec.recipe.epochs == 100
        assert "instead of" not in whole.summarize()


def test_a_shortened_run_is_resumed_by_the_same_command(
    monkeypatch: pytest.MonkeyPatch, small_photos: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("warpi.training.named_recipes._CPU_IMAGES", 0)
    monkeypatch.setattr("warpi.training.named_recipes._LEAST_EPOCHS", 3)
    given = {"data": str(small_photos), "recipe": "strong", "device": "cpu", "batch_size": 4, "precision": "32"}
    steps = fitting(tmp_path / "run", **given)
    while next(steps) is None:
        pass
    steps.close()
    monkeypatch.setattr("warpi.training.named_recipes._LEAST_EPOCHS", 5)  # of another version
    assert len(warpi.fit(tmp_path / "run", resume=True, **given).history) == 3


@pytest.fixture
def small_photos(tmp_path: Path) -> Path:
    for row in range(8):
        file = tmp_path / "photos" / "ab"[row % 2] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * row, 0, 0)).save(file)
    return tmp_path / "photos"


def test_settings_of_a_network_choose_a_network(folder: Path, tmp_path: Path) -> None:
    data = {"data": str(folder / "data.csv"), "trusted": str(folder / "trusted.csv"), "device": "cpu"}
    run = warpi.fit(tmp_path / "net", **data, epochs=1)
    assert type(run.method) is type(METHODS["glc"])
    with pytest.raises(UserError, match="a run folder cannot store the model GaussianNB"):
        warpi.fit(tmp_path / "nb", **data, model=GaussianNB())


def test_labels_of_trusted_rows_before_the_check() -> None:
    """They come from `given`, from rows that are also in the data, or are unknown."""
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 2] * 4)
    wrong = y.clone()
    wrong[0] = 2
    data = Dataset("data", make_features(x), wrong, CLASSES)
    checked = Dataset("trusted", make_features(x[:6]), y[:6], CLASSES)

    def given(data: Dataset, trusted: Dataset | None, noise: str = "given", **options: Any) -> list[int] | None:
        task, _ = make_task(data, noise, meta_data=trusted, val=0.0, test=0.0, **options)
        return None if task.meta_given is None else task.meta_given.tolist()

    assert given(data, replace(checked, given=torch.full((6,), 1))) == [1] * 6
    assert given(data, checked) == [2, 1, 2, 0, 1, 2], "the rows are also in the data"
    assert given(replace(data, y=y), checked) is None, "the labels in the data may have been corrected"
    other = replace(checked, examples=make_features(x[:6] + 9))
    assert given(data, other) is None
    marks = torch.arange(12) < 6
    assert given(replace(data, clean=y, trusted=marks), None) == [2, 1, 2, 0, 1, 2]
    assert given(replace(data, clean=y, trusted=marks), None, "symmetric:0.2") is None
    assert given(replace(data, trusted=marks), None) is None


def test_sparse_rows_stay_sparse() -> None:
    dense = np.random.default_rng(0).random((30, 5)).astype(np.float32)
    dense[dense < 0.6] = 0
    y = torch.arange(30) % 3
    task, _ = make_task(Dataset("x", SparseExamples.of(csr_array(dense)), y, CLASSES), val=0.0, test=0.0)
    rows, labels = read_rows(task.train)
    assert isinstance(rows, csr_array)
    batch = next(task.train.batches(30))
    np.testing.assert_allclose(rows.toarray(), batch.x.numpy(), rtol=1e-6)
    assert labels.tolist() == y.tolist()


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("5m", 300), (" 1.5 H ", 5400), (30, 30), (None, None)])
def test_budget(text: Any, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds
    assert Auto(budget=text).budget == text


@pytest.mark.parametrize("text", ["soon", "-5s", "0", "5 days", ""])
def test_wrong_budget(text: str) -> None:
    with pytest.raises(UserError, match="budget must be a time such as 60s"):
        Auto(budget=text)


def test_images_become_patch_features(tmp_path: Path) -> None:
    """Horizontal and vertical lines at random places, which no model tells apart by single pixels."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 30, (160, 1, 16, 16), dtype=np.uint8)
    y = np.arange(160) % 2
    for i, at in enumerate(rng.integers(16, size=160)):
        x[i, 0, at if y[i] else slice(None), slice(None) if y[i] else at] += 150
    np.savez(tmp_path / "x.npz", x=x[:120], y=np.where(np.arange(120) % 5 == 0, 1 - y[:120], y[:120]))
    np.savez(tmp_path / "trusted.npz", x=x[100:120], y=y[100:120])
    np.savez(tmp_path / "new.npz", x=x[120:], y=y[120:])
    data = {"data": str(tmp_path / "x.npz"), "trusted": str(tmp_path / "trusted.npz")}
    run = warpi.fit(tmp_path / "run", **data, model="forest", device="cpu")
    assert type(run.method) is Auto
    predictions = predict(tmp_path / "run", tmp_path / "new.npz")  # from the stored patches and models
    assert (predictions.predicted == y[120:]).mean() > 0.9
    np.testing.assert_array_equal(predictions.probabilities, predict(run, tmp_path / "new.npz").probabilities)
