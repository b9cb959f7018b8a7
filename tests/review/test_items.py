"""The items of a review: images, order and neighbors."""

import csv
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from review_helpers import Client, serve

from warpi.audit.result import Audit
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale
from warpi.data.image_files import FileExamples
from warpi.data.numeric import Embedded, Originals
from warpi.data.split import Split
from warpi.nets.registry import make_net
from warpi.review import show_input as render
from warpi.review.items import items_from_data, items_from_run
from warpi.review.reviewed_labels import corrected_csv
from warpi.runs.defaults import load_dataset
from warpi.training.task import Task, Truth


def test_links_out_of_the_folder_are_not_shown(photos: Path, tmp_path: Path) -> None:
    dataset, _ = load_dataset(str(photos), image_size=8)
    assert dataset.files is not None
    last = dataset.files.paths.index("red/9.png")
    with serve(items_from_data(dataset, dataset.y), tmp_path) as client:
        assert client.ask("GET", f"/picture/{last}")[0] == 404
        status, content, headers = client.ask("GET", "/picture/0")
    assert (status, headers["Content-Type"], content[:3]) == (200, "image/jpeg", b"\xff\xd8\xff")


def test_files_that_are_not_in_memory(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of a large data set are read from their files when they are needed."""
    monkeypatch.setattr("warpi.datasets.image_folders.IN_MEMORY", 0)
    (tmp_path / "data").mkdir()
    for name in ("blue", "red"):
        shutil.copytree(photos / name, tmp_path / "data" / name)
    (tmp_path / "data" / "red" / "5.png").write_bytes(b"broken")
    dataset, _ = load_dataset(str(tmp_path / "data"), image_size=8)
    assert isinstance(dataset.examples, FileExamples)
    with serve(items_from_data(dataset, dataset.y), tmp_path / "review") as client:
        assert client.ask("GET", "/picture/0")[2]["Content-Type"] == "image/jpeg"
        assert client.ask("GET", "/picture/5")[0] == 404
        for row in (1, 3, 5, 7):
            client.decide(row, "keep")
        near = client.ask("GET", "/api/near/0")[1]["near"]
        assert [n["row"] for n in near] == [1, 3, 7]  # the nearest in color, without unreadable files
        assert client.ask("GET", "/api/near/5")[1]["near"] == []
        made = client.ask("POST", "/api/export", {})[1]
    meta, _ = load_dataset(made["path"], image_size=8, like=dataset)
    assert len(meta.y) == 4


def test_paths_of_image_files(client: Client, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "blue", tmp_path / "x" / "blue")
    shutil.copytree(photos / "blue", tmp_path / "x" / "<i>")
    last = os.fsencode(tmp_path / "x" / "blue") + b"/\xff.png"  # not valid UTF-8
    os.rename(tmp_path / "x" / "blue" / "0.png", last)
    dataset, _ = load_dataset(str(tmp_path / "x"), image_size=8)
    assert dataset.files is not None
    with serve(items_from_data(dataset, dataset.y), tmp_path) as files:
        paths = [item["path"] for item in files.ask("GET", "/api/items")[1]["items"]]
        row = paths.index("blue/\udcff.png")
        assert paths == list(dataset.files.paths)
        assert "<i>/0.png" in paths
        files.decide(row, "keep")
        files.decide(0, "keep")
        made = files.ask("POST", "/api/export", {})[1]
    assert b"\n%d,blue/\xff.png,blue,blue,kept," % row in Path(made["corrected"]).read_bytes()
    assert len(load_dataset(made["path"], image_size=8, like=dataset)[0].y) == made["size"] == 2
    assert client.ask("GET", "/api/items")[1]["items"][0]["path"] is None  # arrays have no files


def test_path_inside(photos: Path, tmp_path: Path) -> None:
    os.symlink(photos / "red", tmp_path / "class")
    assert render.path_inside(str(tmp_path), "class/5.png") == os.path.realpath(photos / "red" / "5.png")
    os.symlink(photos / "red" / "5.png", tmp_path / "file.png")
    for path in ("class/9.png", "file.png", "../x.png", "/etc/passwd", "class/../../x.png", "."):
        assert render.path_inside(str(tmp_path), path) is None


def test_broken_image_file(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"<svg onload=alert(1)>")
    assert render.photo(str(tmp_path), "x.png") is None


def test_order_labels_and_neighbors(tiny: tuple[Task, Truth], digits: Dataset) -> None:
    task, _ = tiny
    rows, n = task.train.rows.numpy(), len(task.train)
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(10), n)
    wrong = rng.random(n)
    given, guess = task.train.y.numpy(), p.argmax(1)
    audit = Audit(rows, given, guess, wrong, 1 - wrong, wrong > 0.5, wrong, p, np.eye(10), task.classes, (), {})
    items = items_from_run(digits, task, make_net("mlp", task.shape, 10), audit)
    assert np.array_equal(items.row, rows[np.argsort(-wrong)])
    assert np.array_equal(items.given[items.row], given[np.argsort(-wrong)])
    assert items.has_pictures
    assert items.is_small
    assert task.meta is not None
    assert items.trusted_rows == dict(zip(task.meta.rows.tolist(), task.meta.y.tolist(), strict=True))
    near = items.nearest_trusted(int(rows[0]), {})
    assert len(near) == 5
    assert all(n["label"] == str(int(task.meta.y[n["trusted"]])) for n in near)
    assert items.trusted_picture(near[0]["trusted"]) is not None
    listed = items_from_run(
        digits, task, make_net("mlp", task.shape, 10), audit, np.array([rows[3], task.meta.rows[0]])
    )
    assert listed.review_first.all()
    assert listed.suggested.tolist() == [guess[3], -1]
    state = {row["state"] for row in csv.DictReader(corrected_csv(items, {}).splitlines())}
    assert state == {"open", "trusted"}


def test_trusted_images_that_are_links_to_the_data(photos: Path, tmp_path: Path) -> None:
    """A trusted set that a review wrote consists of links; its images are shown, those of other places are not."""
    data, trusted = tmp_path / "photos", tmp_path / "trusted"
    for name in ("blue", "red"):
        shutil.copytree(photos / name, data / name)
    (data / "red" / "9.png").unlink()
    (trusted / "red").mkdir(parents=True)
    os.symlink(data / "red" / "5.png", trusted / "red" / "a.png")
    os.symlink(photos / "red" / "5.png", trusted / "red" / "b.png")
    dataset, _ = load_dataset(str(data), image_size=8)
    paths = Originals(("red/a.png", "red/b.png"), str(trusted))
    vectors = Embedded(torch.zeros(2, 3), Scale(torch.zeros(3), torch.ones(3)), originals=paths)
    items = items_from_data(dataset, dataset.y)
    items = replace(items, trusted=Split(vectors, torch.arange(2), torch.zeros(2, dtype=torch.int64)))
    assert items.trusted_picture(0) is not None
    assert items.trusted_picture(1) is None
