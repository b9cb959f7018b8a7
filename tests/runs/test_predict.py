"""`warpi predict`: new rows are read like the training rows, and predicted by a finished run."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import warpi
from warpi.cli.app import main
from warpi.datasets.image_folders import read_new_images
from warpi.errors import UserError
from warpi.runs.run import Run, fit

N = 60
RNG = np.random.default_rng(0)


def write(path: Path, *rows: tuple[Any, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def cells(k: int) -> tuple[Any, ...]:
    return round(100 + 30 * np.sin(k), 3), ("red", "green", "blue")[k % 3], k % 2 * 5 - 2.5


def given(k: int) -> str:
    return ("cat", "dog")[k % 2]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def predict_all(run: Run) -> np.ndarray:
    """The predictions of the method of a run for all rows of its data."""
    split = warpi.Split(run.task.train.examples, torch.arange(N), torch.zeros(N, dtype=torch.int64))
    return torch.cat([run.method.predict(batch.x) for batch in split.batches(7)]).numpy()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predict")


@pytest.fixture(scope="module")
def table(here: Path) -> Run:
    file = write(here / "table.csv", ("a", "colour", "b", "animal"), *((*cells(k), given(k)) for k in range(N)))
    return fit(here / "table", data=file, label="animal", method="ce", epochs=2)


def test_the_training_file_gives_the_predictions_of_the_method(
    table: Run, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = here / "out.csv"
    assert main(["predict", str(table.path), "--data", str(here / "table.csv"), "--csv", str(out)]) == 0
    rows, p = read(out), predict_all(table)
    assert list(rows[0]) == ["row", "predicted", "predicted_label", "probability", "p_cat", "p_dog"]
    assert [int(row["row"]) for row in rows] == list(range(N))
    np.testing.assert_allclose([[float(row["p_cat"]), float(row["p_dog"])] for row in rows], p, atol=1e-6)
    np.testing.assert_allclose([float(row["probability"]) for row in rows], p.max(1), atol=1e-6)
    assert [row["predicted_label"] for row in rows] == [("cat", "dog")[k] for k in p.argmax(1)]
    assert p.std(0).min() > 0.01
    agree = 100 * np.mean([row["predicted_label"] == given(k) for k, row in enumerate(rows)])
    printed = capsys.readouterr().out
    assert f"(column 'animal', {N} rows; some of these labels may be wrong): {agree:.2f} %" in printed
    assert main(["predict", str(table.path), "--data", str(here / "table.csv"), "--csv", str(out), "--quiet"]) == 0
    assert not capsys.readouterr().out


def test_new_rows_of_a_table(table: Run, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Columns in any order, a single row, no labels: scale and encoding are those of the run."""
    p = predict_all(table)
    a, colour, b = cells(5)
    predictions = warpi.predict(table.path, write(here / "new.csv", ("b", "id", "colour", "a"), (b, "x", colour, a)))
    np.testing.assert_allclose(predictions.probabilities, p[5:6], atol=1e-6)
    assert caplog.messages == [f"{here / 'new.csv'}: columns that are not in the run are not used: 'id'"]
    assert not predictions.labels
    assert not predictions.accuracy
    rows = [(*cells(k), label, clean) for k, label, clean in ((0, "", "cat"), (1, "dog", "dog"), (2, "nan", ""))]
    names = ("a", "colour", "b", "animal", "clean_label")
    predictions = warpi.predict(table, write(here / "some.csv", names, *rows))
    np.testing.assert_allclose(predictions.probabilities, p[:3], atol=1e-6)
    assert predictions.labels["animal"].tolist() == [-1, 1, -1]
    assert {name: n for name, (_, n) in predictions.accuracy.items()} == {"animal": 1, "clean_label": 2}


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([("b",), (1,)], "it lacks 'a', 'colour'"),
        (
            [("a", "colour", "b"), (1, "red", 2), (1, "pink", 2)],
            r"column 'colour' in .*row 1 \(line 3\): 'pink'.*drop them",
        ),
        ([("a", "colour", "b"), (1, "red", "x")], "column 'b' contains 'x', but is numeric in the training table"),
        ([("a", "colour", "b"), ("", "", 1)], r"missing in 'a' \(1 of 1, first row 0 \(line 2\)\), 'colour'"),
        ([("a", "colour", "b", "animal"), (1, "red", 2, "cow")], "unknown class in .* 'cow'"),
        ([("path",), ("x.png",)], r"contains image files, but the run was trained on a table"),
    ],
)
def test_invalid_tables(table: Run, tmp_path: Path, rows: list[tuple[Any, ...]], what: str) -> None:
    with pytest.raises(UserError, match=what):
        warpi.predict(table, write(tmp_path / "new.csv", *rows), missing="error", unknown="error")


def test_gaps_and_unknown_values(table: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They get the medians of the training table, and no category; a warning lists the columns."""
    rows = [("a", "colour", "b"), ("", "red", 1), (2, "pink", 1), (3, "", 1)]
    predictions = warpi.predict(table, write(tmp_path / "new.csv", *rows))
    assert np.isfinite(predictions.probabilities).all()
    gaps, unknown = caplog.messages
    assert "cells are missing in 'a' (1 of 3), 'colour' (1 of 3), but not in the training table" in gaps
    assert "count as unknown: 'colour' (1 row: 'pink'); to refuse them: --unknown error" in unknown


def test_runs_that_cannot_predict(table: Run, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = here / "table.csv"
    with pytest.raises(UserError, match=r"no file or folder '.*absent\.csv'"):
        warpi.predict(table, here / "absent.csv")
    with pytest.raises(UserError, match="there is no run in"):
        warpi.predict(tmp_path, data)
    assert main(["predict", str(table.path), "--data", str(data), "--csv", str(tmp_path / "no" / "out.csv")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (table.path / "done").rename(tmp_path / "done")
    try:
        with pytest.raises(UserError, match=r"is not finished \(2 of 2 epochs\); resume with: warpi fit"):
            warpi.predict(table.path, data)
    finally:
        (tmp_path / "done").rename(table.path / "done")


@pytest.fixture(scope="module")
def dropped(table: Run, here: Path) -> Run:
    """A run on the same table with additional columns that are dropped; `path` would make it a list of images."""
    names = ("path", "a", "colour", "checked, when", "b", "animal")
    rows = [(f"x/{k}.png", *cells(k)[:2], "" if k % 3 else f"on day {k}", cells(k)[2], given(k)) for k in range(N)]
    file = write(here / "wide.csv", names, *rows)
    out = here / "wide"
    argv = ["fit", "--data", str(file), "--label", "animal", "--drop", 'path,"checked, when"', "--out", str(out)]
    assert main([*argv, "--method", "ce", "--epochs", "2", "--quiet"]) == 0
    run = fit(out, resume=True)
    facts = [json.loads((each.path / "spec.json").read_text())["facts"] for each in (table, run)]
    assert facts[0] == facts[1]
    return run


def test_dropped_columns_are_optional_in_new_rows(
    table: Run, dropped: Run, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The probabilities are those of the run whose table does not have these columns."""
    p = predict_all(table)
    for file in (here / "wide.csv", here / "table.csv"):
        predictions = warpi.predict(dropped.path, file)
        np.testing.assert_array_equal(
            predictions.probabilities, warpi.predict(table.path, here / "table.csv").probabilities
        )
        np.testing.assert_allclose(predictions.probabilities, p, atol=1e-6)
    a, colour, b = cells(5)
    odd = write(here / "odd.csv", ("checked, when", "b", "colour", "a"), (12.5, b, colour, a))
    np.testing.assert_allclose(warpi.predict(dropped, odd).probabilities, p[5:6], atol=1e-6)
    assert not caplog.messages
    with pytest.raises(UserError, match="contains image files, but the run was trained on a table"):
        warpi.predict(table, here / "wide.csv")


def test_every_command_drops_the_columns(dropped: Run, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, path = json.loads((dropped.path / "spec.json").read_text())["spec"], str(dropped.path)
    assert stored["drop"] == ["path", "checked, when"]
    assert main(["fit", "--out", path, "--resume", "--drop", 'path,"checked, when"', "--quiet"]) == 0
    assert main(["fit", "--out", path, "--resume", "--drop", "path"]) == 2
    assert "was started with drop = ('path', 'checked, when'), not ('path',)" in capsys.readouterr().err
    assert main(["audit", path, "--csv", str(here / "audit.csv"), "--quiet"]) == 0
    assert len(read(here / "audit.csv")) == N
    assert main(["pick", "6", path, "--csv", str(here / "check.csv")]) == 0
    assert main(["report", path, "--out", str(here / "report")]) == 0
    page = (here / "report" / "report.html").read_text()
    assert "without the columns path,&#34;checked, when&#34;" in page
    assert "--drop &#39;path,&#34;checked, when&#34;&#39;" in page
    assert main(["review", path, "--export", str(here / "corrected.json")]) == 0
    data = ["--data", str(here / "wide.csv"), "--label", "animal", "--drop", 'path,"checked, when"']
    assert main(["pick", "6", *data, "--csv", str(here / "check.csv")]) == 0
    checked = [{**row, "checked_label": row["given_label"]} for row in read(here / "check.csv")]
    write(here / "check.csv", tuple(checked[0]), *(tuple(row.values()) for row in checked))
    trusted = here / "trusted.csv"
    assert main(["pick", "--estimate", str(here / "check.csv"), *data, "--trusted", str(trusted)]) == 0
    assert list(read(trusted)[0]) == [*read(here / "wide.csv")[0], "given"], (
        "all columns, so that rows can be predicted"
    )
    assert main(["corrupt", *data, "--noise", "instance:0.2", "--out", str(here / "noise.json")]) == 0
    argv = ["fit", *data, "--trusted", str(trusted), "--labels", str(here / "noise.json"), "--epochs", "1"]
    assert main([*argv, "--out", str(here / "meta"), "--quiet"]) == 0
    assert len(warpi.predict(here / "meta", here / "wide.csv")) == N
    reviewed = ["review", *data, "--out", str(here / "reviewed"), "--export", str(here / "labels.csv")]
    assert main(reviewed) == 0


def test_runs_without_dropped_columns(table: Run, tmp_path: Path) -> None:
    """Their specification has no such field, like that of older runs."""
    assert "drop" not in json.loads((table.path / "spec.json").read_text())["spec"]
    assert fit(table.path, resume=True, drop=[]).history == table.history
    with pytest.raises(UserError, match=r"was started with drop = \(\), not \('a',\)"):
        fit(table.path, resume=True, drop=["a"])
    run = fit(tmp_path / "none", data=table.path.with_suffix(".csv"), label="animal", method="ce", epochs=1, drop=[])
    assert "drop" not in json.loads((run.path / "spec.json").read_text())["spec"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        return z


def test_a_custom_network(table: Run, tmp_path: Path) -> None:
    data, net = table.path.with_suffix(".csv"), Net()
    run = fit(tmp_path / "own", data=data, label="animal", method="ce", epochs=1, net=net)
    with pytest.raises(UserError, match=r"made with a custom network, .*warpi\.predict\(.*, data, net=MyNet\(\)\)"):
        warpi.predict(run.path, data)
    np.testing.assert_allclose(warpi.predict(run.path, data, net=net).probabilities, predict_all(run), atol=1e-6)


def test_arrays(tmp_path: Path) -> None:
    x, y = RNG.normal(50, 9, (N, 3)), np.arange(N) % 2
    np.savez(tmp_path / "first.npz", x=x, y=y, classes=np.array(["cat", "dog"]))
    run = fit(tmp_path / "run", data=tmp_path / "first.npz", method="ce", epochs=1)
    p = predict_all(run)
    predictions = warpi.predict(run.path, tmp_path / "first.npz")
    np.testing.assert_allclose(predictions.probabilities, p, atol=1e-6)
    assert predictions.labels["y"].tolist() == y.tolist()
    np.savez(tmp_path / "new.npz", x=x[3:4])
    np.save(tmp_path / "new.npy", x[3:4])
    for name in ("new.npz", "new.npy"):
        predictions = warpi.predict(run, tmp_path / name)
        np.testing.assert_allclose(predictions.probabilities, p[3:4], atol=1e-6)
        assert not predictions.labels
    np.save(tmp_path / "new_labels.npy", np.array(["dog"]))
    assert warpi.predict(run, tmp_path / "new.npy").labels["y"].tolist() == [1]
    np.save(tmp_path / "wide.npy", np.ones((2, 4)))
    with pytest.raises(UserError, match=r"an input is float32 \[4\], expected float32 \[3\]"):
        warpi.predict(run, tmp_path / "wide.npy")
    np.save(tmp_path / "pictures.npy", np.ones((2, 8, 8), np.uint8))
    with pytest.raises(UserError, match=r"an input is uint8 \[1, 8, 8\], expected float32 \[3\]"):
        warpi.predict(run, tmp_path / "pictures.npy")


def test_many_rows_have_float32_and_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=x, y=(x[:, 0] > 0).astype(int))
    run = fit(tmp_path / "run", data=str(tmp_path / "train.npz"), method="ce", epochs=2, quiet=True)
    np.save(tmp_path / "new.npy", x[:25])
    usual = warpi.predict(run, tmp_path / "new.npy")
    usual.to_csv(tmp_path / "usual.csv")
    monkeypatch.setattr("warpi.runs.predictions.MOST_DOUBLE", 10)
    monkeypatch.setattr("warpi.runs.predictions._ROWS_AT_ONCE", 7)
    many = warpi.predict(run, tmp_path / "new.npy")
    assert (usual.probabilities.dtype, many.probabilities.dtype) == (np.float64, np.float32)
    many.to_csv(tmp_path / "many.csv")
    assert (tmp_path / "many.csv").read_text() == (tmp_path / "usual.csv").read_text()


def test_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = sorted(f"{given(k)}/{k}.png" for k in range(N))
    for place in places:
        (tmp_path / "photos" / place).parent.mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / place)
    run = fit(tmp_path / "run", data=tmp_path / "photos", image_size=8, net="resnet20", method="ce", epochs=1)
    p = predict_all(run)
    predictions = warpi.predict(run.path, tmp_path / "photos")
    np.testing.assert_allclose(predictions.probabilities, p, atol=1e-6)
    assert predictions.paths == tuple(places)
    assert [("cat", "dog")[k] for k in predictions.labels["folder"]] == [place[:3] for place in places]

    flat = tmp_path / "flat"
    for k in (4, 2):
        (flat / f"deep{k}").mkdir(parents=True)
        (flat / f"deep{k}" / "x.png").write_bytes((tmp_path / "photos" / places[k]).read_bytes())
    predictions = warpi.predict(run, flat)
    np.testing.assert_allclose(predictions.probabilities, p[[2, 4]], atol=1e-6)
    assert predictions.paths == ("deep2/x.png", "deep4/x.png")
    assert not predictions.labels
    (flat / "bad.png").write_bytes(b"no image")
    predictions = warpi.predict(run, flat)
    assert (predictions.row.tolist(), predictions.unread) == ([1, 2], 1)
    assert "skipped an unreadable image" in caplog.text
    predictions.to_csv(tmp_path / "out.csv")
    assert read(tmp_path / "out.csv")[0].items() >= {"row": "1", "path": "deep2/x.png"}.items()

    listed = write(
        tmp_path / "list.csv", ("path", "label"), (f"photos/{places[7]}", "dog"), (f"photos/{places[1]}", "")
    )
    predictions = warpi.predict(run, listed)
    np.testing.assert_allclose(predictions.probabilities, p[[7, 1]], atol=1e-6)
    assert predictions.labels["label"].tolist() == [1, -1]
    listed = write(tmp_path / "list.csv", ("path",), (f"photos/{places[7]}",))
    assert not warpi.predict(run, listed).labels


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (["train/cat/1.png", "test/cat/1.png"], "contains test, train; pass one of them"),
        (["cat/1.png", "2.png"], "images outside the folders of classes, such as 2.png"),
        (["cat/1.png", "cow/2.png"], "unknown class .* 'cow'"),
        (["x/readme.txt"], "contains no images"),
    ],
)
def test_invalid_folders(tmp_path: Path, files: list[str], what: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(UserError, match=what):
        read_new_images(tmp_path, 8, ("cat", "dog"))


def image(path: Path, grey: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), grey).save(path)
    return path


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on a list of images in another folder."""
    here = tmp_path_factory.mktemp("listed")
    for k in range(N):
        image(here / "photos" / f"{k}.png", 100 * (k % 2) + k)
    rows = [(f"{k}.png", given(k)) for k in range(N)]
    file = write(here / "lists" / "train.csv", ("path", "label"), *rows)
    return fit(here / "run", data=file, root=here / "photos", method="ce", epochs=1)


def test_paths_in_a_list_are_relative_to_the_list(listed: Run, tmp_path: Path) -> None:
    """Not to the training images, which may have the same names; absolute paths may lead anywhere."""
    new = image(tmp_path / "new" / "0.png", 250)
    folder = warpi.predict(listed, new.parent).probabilities
    assert not np.allclose(folder, predict_all(listed)[:1], atol=1e-6)
    for cell in ("0.png", new, "../new/0.png"):
        predictions = warpi.predict(listed, write(new.parent / "list.csv", ("path",), (cell,)))
        np.testing.assert_allclose(predictions.probabilities, folder, atol=1e-6)
        assert predictions.paths == (str(cell),)
    predictions = warpi.predict(listed, write(tmp_path / "elsewhere" / "list.csv", ("path",), ("7.png",)))
    np.testing.assert_allclose(predictions.probabilities, predict_all(listed)[7:8], atol=1e-6)
    with pytest.raises(UserError, match="line 2: the path is empty"):
        warpi.predict(listed, write(tmp_path / "list.csv", ("path", "label"), ("", "cat")))


def test_a_folder_that_has_the_name_of_a_data_set(listed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(tmp_path / "digits" / "0.png", 3)
    monkeypatch.chdir(tmp_path)
    assert len(warpi.predict(listed, "digits")) == 1


def test_small_images_of_a_run_that_read_them_as_photos(
    listed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a stored run has no image size, it is 224, whatever the default is now."""
    monkeypatch.setattr("warpi.datasets.image_folders.default_size", lambda _: 224)
    photos = listed.path.parent / "photos"
    data = {"data": listed.path.parent / "lists" / "train.csv", "root": photos, "net": "mlp"}
    run = fit(tmp_path / "run", **data, method="ce", epochs=1, limit=20)
    new = image(tmp_path / "new" / "0.png", 30).parent
    before = warpi.predict(run, new).probabilities
    monkeypatch.undo()
    assert '"image_size": null' in (run.path / "spec.json").read_text()
    np.testing.assert_allclose(warpi.predict(run.path, new).probabilities, before, atol=1e-6)
    assert fit(run.path, resume=True).task.shape == (3, 224, 224)
