"""`warpi predict` without the data of the run: the checkpoint describes how rows are read, and results are equal."""

import csv
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import warpi
from warpi.cli.app import main
from warpi.data.augment import Crop
from warpi.data.batch import Batch
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.placeholder import InputsNotAvailable, PlaceholderExamples, examples_from_form
from warpi.data.split import Split
from warpi.datasets.registry import DATASETS, DatasetEntry
from warpi.errors import UserError
from warpi.methods.registry import METHODS
from warpi.runs.defaults import BY_DATASET
from warpi.runs.packed_task import pack_task, unpack_task
from warpi.runs.predictions import Predictions
from warpi.runs.reopen import reopen
from warpi.runs.run import fit
from warpi.training import checkpoint
from warpi.training.method import Log, Method, descend
from warpi.training.recipe import Recipe
from warpi.training.task import Task

N = 60
FILE = "checkpoint.safetensors"


def same(a: Predictions, b: Predictions) -> None:
    """Compare predictions bit by bit."""
    assert a.probabilities.tobytes() == b.probabilities.tobytes()
    assert np.isfinite(a.probabilities).all()
    assert a.probabilities.std(0).max() > 1e-4, "predictions differ between rows"
    assert (a.classes, a.paths, a.unread, a.row.tolist()) == (b.classes, b.paths, b.unread, b.row.tolist())
    assert {name: y.tolist() for name, y in a.labels.items()} == {name: y.tolist() for name, y in b.labels.items()}


def edit(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state in a checkpoint, with a valid hash."""
    state = checkpoint.load(run / FILE)
    change(state)
    checkpoint.save(run / FILE, state)


def older(run: Path, to: Path) -> Path:
    """A copy of a run folder as older versions wrote it, without the task in the checkpoint."""
    shutil.copytree(run, to)
    edit(to, lambda state: state.pop("data"))
    return to


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the data of a run is read from now on."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the data of the run is read")

    for place in ("warpi.runs.reopen.prepare", "warpi.runs.spec.read_dataset"):
        monkeypatch.setattr(place, refuse)


def digits_file(path: Path) -> Path:
    np.savez(path, x=DATASETS["digits"].load(None).examples.x[1500:1540].numpy())  # type: ignore[attr-defined]
    return path


@pytest.mark.parametrize("name", {type(method): name for name, method in METHODS.items()}.values())  # one per class
def test_every_method_predicts_without_its_data(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"model": "knn"} if name == "auto" else {}
    run = fit(tmp_path / "run", data="digits", noise="pair:0.4", meta=20, limit=150, method=name, epochs=1, **quick)
    forbid(monkeypatch)
    new = digits_file(tmp_path / "new.npz")
    before = [checkpoint.digest(net.state_dict()) for net in run.method.predictors]
    caplog.clear()
    (tmp_path / "run").rename(tmp_path / "moved")
    predictions = warpi.predict(tmp_path / "moved", new)
    (tmp_path / "moved").rename(tmp_path / "run")
    same(predictions, warpi.predict(run, new))
    assert before == [checkpoint.digest(net.state_dict()) for net in run.method.predictors]
    assert not caplog.messages


# --- every kind of data -----------------------------------------------------------------------------------------------


def write(path: Path, *rows: tuple[Any, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
    return path


def given(k: int) -> str:
    return ("cat", "dog", "eel")[k % 3]


def table(suffix: str, base: float) -> Callable[[Path, int], dict[str, Any]]:
    """Numbers (with a large `base`: in float64), categories, a column to drop, and a label column named `animal`."""

    def make(path: Path, first: int) -> dict[str, Any]:
        names = ("id", "a", "colour", "b", "animal", "clean_label")
        rows = [
            (f"x{k}", base + k % 7, ("red", "green", "no")[k % 3], np.sin(k), given(k + (k % 5 == 0)), given(k))
            for k in range(first, first + N)
        ]
        write(path / f"rows{suffix}", names, *rows)
        return {"data": path / f"rows{suffix}", "label": "animal", "drop": ["id"]}

    return make


def npz(shape: tuple[int, ...], kind: str) -> Callable[[Path, int], dict[str, Any]]:
    def make(path: Path, first: int) -> dict[str, Any]:
        x = np.random.default_rng(first).normal(120, 30, (N, *shape)).astype(kind)
        y = np.array([given(k) for k in range(N)])
        np.savez(path / "rows.npz", x=x, kind=y, y=np.zeros(N))
        return {"data": path / "rows.npz", "label": "kind"}

    return make


def npy(path: Path, first: int) -> dict[str, Any]:
    np.save(path / "rows.npy", np.random.default_rng(first).normal(3, 9, (N, 4)))
    np.save(path / "rows_labels.npy", np.arange(N) % 3)
    return {"data": path / "rows.npy"}


def picture(path: Path, k: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(k).integers(40 * (k % 3), 100 + 60 * (k % 3), (10, 13, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def folder(path: Path, first: int) -> dict[str, Any]:
    for k in range(first, first + N):
        picture(path / "photos" / given(k) / f"{k}.png", k)
    return {"data": path / "photos"}


def manifest(path: Path, first: int) -> dict[str, Any]:
    for k in range(first, first + N):
        picture(path / "photos" / f"{k}.png", k)
    write(path / "list.csv", ("path", "kind"), *((f"photos/{k}.png", given(k)) for k in range(first, first + N)))
    return {"data": path / "list.csv", "label": "kind", "image_size": 9}


def by_name(path: Path, first: int) -> dict[str, Any]:
    x = np.random.default_rng(first).integers(0, 256, (N, 32, 32, 3)).astype(np.uint8)
    np.savez(path / "rows.npz", x=x)
    return {"data": "cifar10" if first == 0 else path / "rows.npz", "net": "resnet20"}


def cifar10(_: Path | None) -> Dataset:
    """A small data set of the same form."""
    x = torch.randint(256, (N, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    scale = Scale(torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1), torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1))
    return Dataset("cifar10", TensorExamples(x, scale, Crop(32, 4)), torch.arange(N) % 3, ("cat", "dog", "eel"))


KINDS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "csv": table(".csv", 10),
    "csv in float64": table(".csv", 1e9),
    "npz": npz((5,), "float32"),
    "npz in float64": npz((5,), "float64"),
    "npz of square images": npz((9, 9), "uint8"),
    "npz of other images": npz((8, 10, 3), "uint8"),
    "npy": npy,
    "folder": folder,
    "manifest, not in memory": manifest,
    "cifar10": by_name,
}


@pytest.mark.parametrize("kind", KINDS)
def test_new_rows_are_read_like_the_data_of_the_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The predictions equal those of a run that reads its data again, although the data is gone."""
    if "not in memory" in kind:
        monkeypatch.setattr("warpi.datasets.image_folders.IN_MEMORY", 0)
    monkeypatch.setitem(DATASETS, "cifar10", DatasetEntry(cifar10, ""))
    monkeypatch.setitem(BY_DATASET, "cifar10", {"net": "resnet20"})
    (tmp_path / "here").mkdir()
    (tmp_path / "new").mkdir()
    first, new = KINDS[kind](tmp_path / "here", 0), KINDS[kind](tmp_path / "new", 1000)["data"]
    settings = {"net": "mlp", **first, "method": "ce", "epochs": 2, "meta": 0, "batch_size": 16}
    run = fit(tmp_path / "here" / "run", **settings)
    caplog.set_level("INFO")
    expected = warpi.predict(older(run.path, tmp_path / "older"), new)
    assert any("read again" in message for message in caplog.messages)
    assert len(expected) == N
    shutil.move(tmp_path / "here" / "run", tmp_path / "moved")
    shutil.rmtree(tmp_path / "here")
    monkeypatch.setitem(DATASETS, "cifar10", DatasetEntry(lambda _: 1 / 0, ""))
    caplog.clear()
    same(warpi.predict(tmp_path / "moved", new), expected)
    assert not any("read again" in message for message in caplog.messages)
    shutil.move(tmp_path / "moved", tmp_path / "here" / "run")
    same(warpi.predict(run, new), expected)
    if kind not in ("cifar10",):
        with pytest.raises(UserError, match="did not store how its data was read, so the data must be in its place"):
            warpi.predict(tmp_path / "older", new)


def test_a_moved_run_refuses_other_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the same errors as a run that has its data. Unknown values are refused only if the user asks for it."""
    (tmp_path / "here").mkdir()
    settings = KINDS["csv"](tmp_path / "here", 0)
    fit(tmp_path / "run", **settings, method="ce", epochs=1, meta=0)
    shutil.rmtree(tmp_path / "here")
    for rows, what in (
        ([("a", "b"), (1, 2)], "it lacks 'colour'"),
        ([("a", "colour", "b"), (1, "pink", 2)], "'pink'.*not in the training table"),
        ([("a", "colour", "b", "animal"), (1, "red", 2, "cow")], "unknown class in .* 'cow'"),
        ([("path",), ("x.png",)], "contains image files, but the run was trained on a table"),
    ):
        with pytest.raises(UserError, match=what):
            warpi.predict(tmp_path / "run", write(tmp_path / "new.csv", *rows), unknown="error")
    pink = write(tmp_path / "new.csv", ("a", "colour", "b"), (1, "pink", 2))
    assert len(warpi.predict(tmp_path / "run", pink)) == 1
    assert "count as unknown: 'colour' (1 row: 'pink')" in caplog.text
    np.save(tmp_path / "new.npy", np.ones((3, 5)))
    with pytest.raises(UserError, match=r"contains arrays .*, but the run was trained on a table"):
        warpi.predict(tmp_path / "run", tmp_path / "new.npy")


def test_relative_paths_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the data and the trusted examples, from any folder, even a deleted one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    table(".csv", 10)(Path(), 0)
    shutil.copy("rows.csv", "trusted.csv")
    table(".csv", 10)(Path(), 500)
    data = {"data": "rows.csv", "trusted": "trusted.csv", "label": "animal", "drop": ["id"]}
    run = fit("run", **data, method="warpi", epochs=1)
    new = table(".csv", 10)(tmp_path, 2000)["data"]
    before = warpi.predict(run, new)
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "here" / "run", moved)
    shutil.rmtree(tmp_path / "here")  # the working directory of this process
    if os.name == "posix":
        same(warpi.predict(moved, new), before)
    monkeypatch.chdir(tmp_path)
    same(warpi.predict(moved, new), before)


def test_a_relative_root_starts_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For paths of a new list that are not next to it, whatever the working directory is."""
    monkeypatch.chdir(tmp_path)
    settings = manifest(tmp_path, 0) | {
        "data": write(tmp_path / "a" / "l.csv", ("path", "kind"), *((f"{k}.png", given(k)) for k in range(N))),
        "root": "photos",
    }
    fit("run", **settings, method="ce", epochs=1, net="mlp", meta=0)
    new = write(tmp_path / "b" / "new.csv", ("path",), ("3.png",), ("4.png",))
    before = warpi.predict("run", new)
    monkeypatch.chdir(tmp_path / "a")
    same(warpi.predict(tmp_path / "run", new), before)


# --- custom methods and networks --------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10, bias)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        return z


class Prior(nn.Module):
    """A module whose tensor is not in its state dict."""

    def __init__(self, y: Tensor, rate: float | None) -> None:
        super().__init__()
        self.log = (torch.bincount(y) / len(y)).log() * (1 + (rate or 0))


@dataclass
class Custom(Method):
    """Uses labels and the noise rate when it starts, and when it predicts."""

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.prior = Prior(task.train.y, task.noise_rate)
        self.rows = task.train.rows.sum()

    def step(self, batch: Batch) -> Log:
        loss = nn.functional.cross_entropy(self.net(batch.x), batch.y)
        descend(loss, self.optimizer)
        return {"loss": loss.detach()}

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        assert self.task.meta is not None
        trusted = torch.bincount(self.task.meta.y, minlength=10)
        return (self.net(x) + self.prior.log + trusted).softmax(1)


@dataclass
class UsesInputsLater(Custom):
    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x + next(self.task.train.batches(5)).x.mean(0))


@dataclass
class UsesInputsAtStart(Custom):
    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.prior.log = self.prior.log + task.train.examples.x[:5].mean()  # type: ignore[attr-defined]


DIGITS = {"data": "digits", "noise": "pair:0.4", "limit": 300, "epochs": 1}


def test_custom_methods_and_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nets: list[Any] = [Net(), lambda shape, n_classes: nn.Linear(*shape, n_classes)]
    for k, net in enumerate(nets):
        run = fit(tmp_path / f"run{k}", **DIGITS, method=Custom(), net=net)
        new = digits_file(tmp_path / "new.npz")
        with monkeypatch.context() as patch:
            forbid(patch)
            same(warpi.predict(run.path, new, method=Custom(), net=net), warpi.predict(run, new))
        with pytest.raises(UserError, match="made with a custom method and a custom network"):
            warpi.predict(run.path, new)
        with pytest.raises(UserError, match=r"method = 'Custom', not 'UsesInputsLater'"):
            warpi.predict(run.path, new, method=UsesInputsLater(), net=net)
    with pytest.raises(UserError, match="n_parameters was 650, now 640"):
        warpi.predict(tmp_path / "run0", new, method=Custom(), net=Net(bias=False))


@pytest.mark.parametrize("method", [UsesInputsLater(), UsesInputsAtStart()])
def test_methods_that_use_inputs_read_the_data(
    method: Method, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so, and the results are the same; if the data is gone, the error gives the reason."""
    x = DATASETS["digits"].load(None)
    np.savez(tmp_path / "rows.npz", x=x.examples.flat(torch.arange(300)), y=x.y[:300], clean=x.y[:300])
    run = fit(tmp_path / "run", data=tmp_path / "rows.npz", meta=20, epochs=1, method=method)
    new = digits_file(tmp_path / "new.npz")
    with caplog.at_level("INFO"):
        same(warpi.predict(run.path, new, method=method), warpi.predict(run, new))
    assert "the data of the run is read again: the run's method uses its training inputs" in caplog.text
    (tmp_path / "rows.npz").unlink()
    with pytest.raises(
        UserError, match=r"the run's method uses its training inputs.*: there is no file or folder '.*rows\.npz'"
    ):
        warpi.predict(run.path, new, method=method)


def test_the_file_of_the_initial_weights_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    weights = tmp_path / "begin.safetensors"
    save_file(warpi.nets.make_net("mlp", (64,), 10).state_dict(), weights)
    run = fit(tmp_path / "run", **DIGITS, method="ce", weights=weights)
    forbid(monkeypatch)
    weights.unlink()
    new = digits_file(tmp_path / "new.npz")
    same(warpi.predict(run.path, new), warpi.predict(run, new))


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs on an array and on a table, and new rows in `new.npz` and `new.csv`."""
    here = tmp_path_factory.mktemp("runs")
    fit(here / "digits", **DIGITS, method="warpi")
    fit(here / "table", **table(".csv", 10)(here, 0), method="ce", epochs=1, meta=0)
    digits_file(here / "new.npz")
    (here / "rows.csv").rename(here / "new.csv")
    return here


def at(state: Any, *keys: Any) -> Callable[[Any], None]:
    """A function that sets the value at the end of some keys."""
    for key in keys[:-1]:
        state = state[key]

    def put(value: Any) -> None:
        state[keys[-1]] = value

    return put


@pytest.mark.parametrize(
    ("run", "keys", "value"),
    [
        ("digits", ("data",), []),
        ("digits", ("data",), {}),
        ("digits", ("data", "form"), None),
        ("digits", ("data", "form", "kind"), "torch.int8"),
        ("digits", ("data", "form", "shape"), [-64]),
        ("digits", ("data", "form", "shape"), "64"),
        ("digits", ("data", "form", "mean"), "0"),
        ("digits", ("data", "form", "mean"), torch.zeros(3)),
        ("digits", ("data", "form", "std"), torch.tensor(torch.nan)),
        ("digits", ("data", "form", "crop"), {"size": 4}),
        ("digits", ("data", "form", "crop"), {"width": 4}),
        ("digits", ("data", "form", "size"), 10**9),
        ("digits", ("data", "classes"), [*map(str, range(9))]),
        ("digits", ("data", "classes"), [*range(10)]),
        ("digits", ("data", "classes"), ["0"] * 10),
        ("digits", ("data", "noise_rate"), "0.4"),
        ("digits", ("data", "splits"), {}),
        ("digits", ("data", "splits", "train", "y"), torch.full((3,), 4)),
        ("digits", ("data", "splits", "meta", "y"), torch.full((50,), 10)),
        ("digits", ("data", "splits", "meta", "y"), [0] * 50),
        ("digits", ("data", "splits", "meta", "rows"), torch.full((50,), -1)),
        ("digits", ("data", "splits", "meta", "of"), None),
        ("digits", ("method", "loader"), 7),
        ("digits", ("method", "optimizers"), [{}]),
        ("digits", ("method",), 7),
        ("table", ("data", "form", "columns"), {"label": "animal"}),
        ("table", ("data", "form", "columns", "label"), 7),
        ("table", ("data", "form", "columns", "categories"), {"a": None}),
        ("table", ("data", "form", "columns", "features"), {"a": {"kind": "number"}}),
        ("table", ("data", "form", "columns", "features", "a"), {"kind": "word"}),
        ("table", ("data", "form", "columns", "features", "a", "fill"), "7"),
        ("table", ("data", "form", "columns", "features", "colour", "categories"), ("red", "green", 7)),
    ],
)
def test_invalid_values_in_a_checkpoint(
    runs: Path, tmp_path: Path, run: str, keys: tuple[str, ...], value: Any
) -> None:
    """With a valid hash, so that only the values are wrong."""
    shutil.copytree(runs / run, tmp_path / "run")
    edit(tmp_path / "run", lambda state: at(state, *keys)(value))
    new = runs / ("new.csv" if run == "table" else "new.npz")
    with pytest.raises(UserError, match=r"checkpoint.safetensors is damaged|the checkpoint does not match"):
        warpi.predict(tmp_path / "run", new)


def test_states_that_are_not_trees(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "digits", tmp_path / "run")
    for tree in ("[", "[]", '{"tensor": "99"}', '{"a": 1, "b": 2}', '{"list": 3}', "[" * 100_000):
        content = checkpoint.safetensors.torch.save(
            {}, {"format": checkpoint.FORMAT, "state": tree, "sha256": checkpoint._digest(tree, {})}
        )
        (tmp_path / "run" / FILE).write_bytes(content)
        with pytest.raises(UserError, match="is damaged"):
            warpi.predict(tmp_path / "run", runs / "new.npz")


def test_a_changed_or_truncated_checkpoint(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "digits", tmp_path / "run")
    file = tmp_path / "run" / FILE
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="checksum mismatch"):
        warpi.predict(tmp_path / "run", runs / "new.npz")
    file.write_bytes(content[:-100])
    with pytest.raises(UserError, match="not a complete checkpoint"):
        warpi.predict(tmp_path / "run", runs / "new.npz")


def test_files_of_two_runs(runs: Path, tmp_path: Path) -> None:
    """Checkpoint and spec.json both store the hashes of the inputs and the labels."""
    fit(tmp_path / "other", **DIGITS, method="warpi", seed=1)
    shutil.copytree(runs / "digits", tmp_path / "run")
    shutil.copy(tmp_path / "other" / FILE, tmp_path / "run" / FILE)
    with pytest.raises(UserError, match=r"belong to different runs: noise_sha256 is '.*' in the checkpoint and '"):
        warpi.predict(tmp_path / "run", runs / "new.npz")
    shutil.copy(runs / "table" / FILE, tmp_path / "run" / FILE)
    with pytest.raises(UserError, match=r"belong to different runs: n_train is "):
        warpi.predict(tmp_path / "run", runs / "new.npz")


def test_other_defaults_are_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "digits", tmp_path / "run")
    file = tmp_path / "run" / "spec.json"
    spec = json.loads(file.read_text())
    del spec["spec"]["recipe"]["decay"]
    file.write_text(json.dumps(spec))
    with pytest.raises(UserError, match="made with different defaults"):
        warpi.predict(tmp_path / "run", runs / "new.npz")


def test_a_resumed_run_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be moved afterwards, and its result is the same."""
    path = tmp_path / "run"
    new = digits_file(tmp_path / "new.npz")
    run = fit(path, **{**DIGITS, "epochs": 2}, method="warpi")
    before = warpi.predict(run, new)
    end = checkpoint.digest(checkpoint.load(path / FILE)["method"])
    (path / FILE).unlink()  # the previous one is from the end of the first epoch
    (path / "done").unlink()
    edit(path, lambda state: state.pop("data"))
    fit(path, resume=True)
    assert checkpoint.digest(checkpoint.load(path / FILE)["method"]) == end
    forbid(monkeypatch)
    same(warpi.predict(path, new), before)


def test_a_checkpoint_of_an_earlier_epoch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    new = digits_file(tmp_path / "new.npz")
    fit(path, **{**DIGITS, "epochs": 2}, method="ce")
    (path / FILE).unlink()  # the previous one is from the end of the first epoch
    for open_run in (lambda: warpi.predict(path, new), lambda: reopen(path)):
        with pytest.raises(UserError, match="is from epoch 1 of 2"):
            open_run()


def test_an_older_run_does_not_need_its_results(runs: Path, tmp_path: Path) -> None:
    old = older(runs / "digits", tmp_path / "old")
    (old / "results.jsonl").unlink()
    same(warpi.predict(old, runs / "new.npz"), warpi.predict(runs / "digits", runs / "new.npz"))


def test_a_run_of_another_kind_of_device(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The generator of a GPU has 16 bytes of state. A finished run does not use it, so there is no warning."""
    shutil.copytree(runs / "digits", tmp_path / "run")
    edit(tmp_path / "run", lambda state: state["method"].update(generator=torch.zeros(16, dtype=torch.uint8)))
    same(warpi.predict(tmp_path / "run", runs / "new.npz"), warpi.predict(runs / "digits", runs / "new.npz"))
    assert not caplog.messages


# --- the folder -------------------------------------------------------------------------------------------------------


def test_in_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fit, move, delete, predict: only three files are needed."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    data = table(".csv", 10)(tmp_path / "here", 0)["data"]
    argv = ["fit", "--data", str(data), "--label", "animal", "--drop", "id", "--method", "ce", "--epochs", "2"]
    assert main([*argv, "--out", str(tmp_path / "here" / "run"), "--quiet"]) == 0
    new = table(".csv", 10)(tmp_path, 777)["data"]
    argv = ["predict", str(tmp_path / "here" / "run"), "--data", str(new), "--csv"]
    assert main([*argv, str(tmp_path / "before.csv")]) == 0
    before = capsys.readouterr().out
    assert "(column 'animal', 60 rows" in before
    for name in ("spec.json", FILE, "done"):
        shutil.copy(tmp_path / "here" / "run" / name, tmp_path / "there" / name)
    shutil.rmtree(tmp_path / "here")
    argv = ["predict", str(tmp_path / "there"), "--data", str(new), "--csv"]
    assert main([*argv, str(tmp_path / "after.csv")]) == 0
    assert capsys.readouterr().out == before.replace("before.csv", "after.csv")
    assert (tmp_path / "after.csv").read_bytes() == (tmp_path / "before.csv").read_bytes()


# --- tasks without inputs ---------------------------------------------------------------------------------------------


def test_placeholder_inputs(digits: Dataset) -> None:
    form = digits.examples.form()
    assert form is not None
    placeholder = PlaceholderExamples(examples_from_form(form), 7).to("cpu")
    assert (len(placeholder), placeholder.shape, placeholder.device.type) == (7, (64,), "cpu")
    uses: list[Callable[[], object]] = [
        placeholder.digest,
        lambda: next(placeholder.stream([], augment=False)),
        lambda: placeholder.flat(torch.arange(1)),
        lambda: placeholder.fit_scale(torch.arange(1)),
        lambda: placeholder.x,
        lambda: getattr(placeholder, "paths", None),
        lambda: hasattr(placeholder, "crop"),
    ]
    for use in uses:
        with pytest.raises(InputsNotAvailable, match="uses its training inputs"):
            use()


def test_a_packed_task_is_complete_and_small(tmp_path: Path) -> None:
    """Labels of 300 classes need two bytes each, 40,000 row numbers four."""
    n = 40_000
    generator = torch.Generator().manual_seed(0)
    examples = TensorExamples(torch.zeros(n, 2), Scale(torch.tensor(0.0), torch.tensor(1.0)))
    rows = torch.randperm(n, generator=generator)
    parts = [
        Split(examples, part, torch.randint(300, (len(part),), generator=generator)) for part in rows.split(15_000)
    ]
    task = Task(*parts, tuple(map(str, range(300))), 0.25)  # type: ignore[arg-type]
    facts = {"n_train": 15_000, "n_meta": 15_000, "n_val": 10_000, "n_classes": 300}
    facts |= {"inputs_sha256": "a", "noise_sha256": "b"}  # type: ignore[dict-item]
    checkpoint.save(tmp_path / FILE, {"data": pack_task(task, facts)})
    assert (tmp_path / FILE).stat().st_size < n * (2 + 4) + 10_000
    unpacked = unpack_task(checkpoint.load(tmp_path / FILE)["data"], facts, torch.device("cpu"), FILE)
    assert (unpacked.shape, unpacked.classes, unpacked.noise_rate) == (task.shape, task.classes, task.noise_rate)
    for a, b in zip((unpacked.train, unpacked.meta, unpacked.val), parts, strict=True):
        assert a is not None
        assert len(a.examples) == n
        assert torch.equal(a.rows, b.rows)
        assert torch.equal(a.y, b.y)
        assert a.y.dtype == a.rows.dtype == torch.int64
