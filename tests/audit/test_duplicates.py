"""Copies, near copies, contradicting labels, leaks, outliers and broken images."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from warpi.audit import find_duplicates
from warpi.cli import main
from warpi.data.dataset import Dataset
from warpi.data.duplicates import near_copies, search
from warpi.data.duplicates.describe_leaks import describe_leaks
from warpi.data.duplicates.thumbnails import compare, make_thumbnails, mark_blank
from warpi.data.numeric import make_features
from warpi.data.overlap import count_copies
from warpi.data.split import Split
from warpi.datasets.arrays import make_images
from warpi.datasets.image_folders import read_folder
from warpi.errors import UserError

Image = pytest.importorskip("PIL.Image", reason="needs pillow")


def scene(seed: int, side: int = 72) -> Any:
    """A picture with random blobs and edges."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 200, (6, 6, 3), dtype=np.uint8)).resize((side, side), 3)
    fine = Image.fromarray(rng.integers(0, 50, (18, 18, 3), dtype=np.uint8)).resize((side, side), 3)
    return Image.fromarray(np.asarray(coarse) + np.asarray(fine))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Train images 0..7 in two classes, with copies of some in train and test, and files that show nothing."""
    for k, name in enumerate(("cat", "dog")):
        for part in ("train", "test"):
            (tmp_path / "d" / part / name).mkdir(parents=True)
        for i in range(4):
            scene(10 * k + i).save(tmp_path / "d" / "train" / name / f"{i}.png")
        scene(100 + k).save(tmp_path / "d" / "test" / name / "own.png")
    train, test = tmp_path / "d" / "train", tmp_path / "d" / "test"
    (train / "dog" / "same.png").write_bytes((train / "cat" / "0.png").read_bytes())  # exact, another label
    scene(1).crop((5, 2, 72, 70)).save(train / "cat" / "crop.png")
    scene(2).point(lambda value: min(255, value * 1.2)).save(train / "cat" / "bright.png")
    scene(11).save(test / "dog" / "leak.jpg", quality=40)
    Image.new("RGB", (40, 40), "red").save(train / "cat" / "blank.png")
    (train / "dog" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return tmp_path / "d"


def test_copies_in_a_folder_are_found(folder: Path) -> None:
    found = find_duplicates(folder)
    assert found.path is not None
    by_name = {Path(path).relative_to(folder).as_posix(): i for i, path in enumerate(found.path)}
    pairs = [("train/cat/0.png", "train/dog/same.png"), ("train/cat/1.png", "train/cat/crop.png")]
    pairs += [("train/cat/2.png", "train/cat/bright.png"), ("train/dog/1.png", "test/dog/leak.jpg")]
    groups = [{found.group[by_name[name]] for name in pair} for pair in pairs]
    assert [len(group) for group in groups] == [1] * 4, "the copies of a pair are in one group"
    assert len(set.union(*groups)) == 4 == found.group.max() + 1, "and in no other one"
    assert (found.group >= 0).sum() == 8
    assert [found.kind[by_name[pair[1]]] for pair in pairs] == ["exact", "near", "near", "near"]
    assert found.labels_differ.nonzero()[0].tolist() == sorted(by_name[name] for name in pairs[0])
    assert found.across_parts.nonzero()[0].tolist() == sorted(by_name[name] for name in pairs[3])
    assert found.problem[by_name["train/cat/blank.png"]] == "blank"
    assert found.problem[by_name["train/dog/broken.png"]].startswith("cannot be read")
    counts = found.summary()
    assert counts["across_parts"] == {"train and test": 1}
    assert (counts["exact"], counts["near"], counts["blank"], counts["broken"]) == (2, 6, 1, 1)


def test_exact_search_ignores_near_copies(folder: Path) -> None:
    assert find_duplicates(folder, near=False).summary()["near"] == 0


def test_the_command_writes_a_table_and_counts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, counts = tmp_path / "t.csv", tmp_path / "c.json"
    arguments = ["--csv", str(table), "--json", str(counts)]
    assert main(["duplicates", str(folder / "train"), "--test", str(folder / "test"), *arguments]) == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13 + 3
    leaked = [row for row in rows if row["copy_across_parts"] == "True"]
    assert {row["part"] for row in leaked} == {"train", "test"}
    assert json.loads(counts.read_text())["labels_differ"] == 1
    printed = capsys.readouterr().out
    assert "1 group of copies in train and test" in printed
    assert "leak.jpg" in printed


def write_table(path: Path, x: np.ndarray, labels: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"f{j}" for j in range(x.shape[1])), "label"])
        writer.writerows([*row, label] for row, label in zip(x.tolist(), labels, strict=True))
    return path


def test_tables_have_copies_and_outliers(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(120, 4))
    x[100] = x[3]
    x[101] = x[4] + 1e-3
    x[102] = 40.0
    labels = ["a", "b"] * 60
    data = write_table(tmp_path / "train.csv", x, labels)
    test = write_table(tmp_path / "test.csv", np.concatenate([x[7:8], x[:2] + 7.77]), ["a", "b", "a"])
    found = find_duplicates(data, test=test)
    groups = [set(np.flatnonzero(found.group == k).tolist()) for k in range(found.group.max() + 1)]
    assert sorted(map(sorted, groups)) == [[3, 100], [4, 101], [7, 120]]
    assert [found.kind[i] for i in (3, 101, 120)] == ["exact", "near", "exact"]
    assert found.across_parts.nonzero()[0].tolist() == [7, 120]
    assert found.is_outlier[102]
    assert found.is_outlier[:100].sum() <= 2


def test_rows_with_few_columns_are_not_close_copies() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 2)))
    found = find_duplicates(Dataset("two", make_features(torch.cat([x, x[:1]])), torch.zeros(501).long(), ("a",)))
    assert (found.summary()["exact"], found.summary()["near"]) == (2, 0)
    rows = torch.tensor([[float(i), 0.0] for i in range(50)] + [[1e12, 0.0]])  # equal once they are standardized
    assert find_duplicates(Dataset("two", make_features(rows), torch.zeros(51).long(), ("a",))).summary()["near"] == 0


def test_a_bounded_search_does_not_compare_many_wide_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 20)))
    split = Split(make_features(x), torch.arange(50), torch.zeros(50).long())
    assert search.search([("train", split)], ("a",), bounded=True).skipped == ""
    monkeypatch.setattr(search, "MOST_WORK", 49_999)
    found = search.search([("train", split)], ("a",), bounded=True)
    assert found.skipped == "50 rows with 20 features are too many"
    assert search.search([("train", split)], ("a",)).skipped == ""


def test_arrays_of_images_are_compared_as_images() -> None:
    x = torch.stack([torch.from_numpy(np.array(scene(i, 32))).permute(2, 0, 1) for i in range(6)])
    x = torch.cat([x, (x[:1] * 0.8).to(torch.uint8)])
    dataset = Dataset("mine", make_images(x), torch.tensor([0, 1, 0, 1, 0, 1, 0]), ("a", "b"))
    found = find_duplicates(dataset)
    assert found.group.tolist() == [0, -1, -1, -1, -1, -1, 0]
    assert found.kind[0] == "near"


def test_a_crop_beyond_the_limit_and_another_picture_do_not_match() -> None:
    whole = scene(0)
    crops = [whole, whole.crop((3, 0, 68, 72)), whole.crop((0, 0, 40, 40)), scene(1)]
    first = torch.zeros(1, dtype=torch.int64)
    x = torch.cat([make_thumbnails(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], first) for image in crops])
    near, far, other = compare(x, torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 3])).tolist()
    assert near > 0.93 > 0.8 > max(far, other)
    assert not mark_blank(x).any()


def test_mixed_arguments_are_refused(folder: Path) -> None:
    dataset = Dataset("mine", make_images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)), torch.tensor([0, 1]), ("a", "b"))
    with pytest.raises(UserError, match="either all as paths or all as Datasets"):
        find_duplicates(folder, test=dataset)
    with pytest.raises(UserError, match="settings must be omitted"):
        find_duplicates(dataset, label="y")


def test_fit_reports_exact_copies_between_train_and_test(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "test" / "cat" / "same.png").write_bytes((folder / "train" / "cat" / "3.png").read_bytes())
    for path in (folder / "train" / "cat" / "blank.png", folder / "train" / "dog" / "broken.png"):
        path.unlink()
    for in_memory in (False, True):
        dataset = read_folder(folder, size=32, in_memory=in_memory)
        assert dataset.test is not None
        train = Split(dataset.examples, torch.arange(len(dataset.y)), dataset.y)
        assert count_copies(dataset.test, train) == 1
        assert count_copies(train, dataset.test) == 1
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    y = np.arange(60) % 2
    np.savez(tmp_path / "d.npz", x=x, y=y, x_test=x[:7] + np.float32([[0]] * 5 + [[1]] * 2), y_test=y[:7])
    arguments = ["--data", str(tmp_path / "d.npz"), "--method", "ce", "--net", "linear", "--epochs", "1"]
    assert main(["fit", *arguments, "--out", str(tmp_path / "run")]) == 0
    assert "5 of 7 test rows have the same input as a training row" in " ".join(capsys.readouterr().out.split())


def test_near_copies_across_parts_are_described_before_training(folder: Path) -> None:
    for path in (folder / "train" / "cat" / "blank.png", folder / "train" / "dog" / "broken.png"):
        path.unlink()
    trusted = folder.parent / "checked"
    for name in ("cat", "dog"):
        (trusted / name).mkdir(parents=True)
        scene(50).save(trusted / name / "own.png")
    scene(12).crop((2, 2, 70, 71)).save(trusted / "dog" / "copy.png")
    for in_memory in (False, True):
        dataset = read_folder(folder, size=64, in_memory=in_memory)
        checked = read_folder(trusted, size=64, in_memory=in_memory)
        train = Split(dataset.examples, torch.arange(len(dataset.y)), dataset.y)
        meta = Split(checked.examples, torch.arange(len(checked.y)), checked.y)
        lines = describe_leaks(train, None, meta, dataset.test, dataset.classes, "warpi duplicates d")
        assert lines == [
            "1 of 3 test rows is a copy or near copy of a training row; the test accuracy may be too high",
            "1 of 3 trusted rows is a copy or near copy of a training row; the accuracy on trusted rows may be too "
            "high",
            "to list the copies, so that you can keep one of each group: warpi duplicates d",
        ]
        assert describe_leaks(train, None, None, None, dataset.classes, "x") == []


def test_a_bounded_search_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack([torch.from_numpy(np.array(scene(i, 32))).permute(2, 0, 1) for i in (0, 1, 2, 3, 0, 0, 1)])
    x[5] = (x[5] * 0.8).to(torch.uint8)
    y = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    splits = [Split(make_images(part), torch.arange(len(part)), y[: len(part)]) for part in (x[:4], x[4:])]
    arguments = (splits[0], None, None, splits[1], ("a", "b"), "C")
    assert describe_leaks(*arguments)[0].startswith("3 of 3 test rows are copies or near copies of a")
    monkeypatch.setattr(search, "MOST_PAIRS", 0)
    expected = "near copies were not searched for (too many images look alike); to search for them: C"
    assert describe_leaks(*arguments)[-1] == expected
    monkeypatch.setattr(search, "MOST_ROWS", 6)
    lines = describe_leaks(*arguments)
    assert lines[0] == "2 of 3 test rows have the same input as a training row; the test accuracy may be too high"
    assert lines[-1] == "near copies were not searched for (7 rows are too many); to search for them: C"
    small = Dataset("small", make_images(x[:, :, ::4, ::4].contiguous()), y, ("a", "b"))
    assert find_duplicates(small).describe()[-1].endswith("fewer than 32 pixels per side look too much alike")


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # of faiss, when it is imported
def test_an_index_finds_the_copies_and_outliers_of_a_comparison_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 16)).astype(np.float32)
    x[2900:2960] = x[:60] + 0.01 * rng.normal(size=(60, 16))
    x[2960:2964] = 30.0 * np.eye(4, 16)  # alone in their cells, with too few rows around them
    assert not near_copies.uses_index(3000)
    exact, scores = near_copies.find_close_vectors(x, False)
    monkeypatch.setattr(near_copies, "EXACT", 2999)
    assert near_copies.uses_index(3000)
    assert near_copies.work(3000, 16) < 3000 * 3000 * 16 / 5
    asked: list[int] = []
    search = near_copies._nearest_by_index

    def count(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        distance, index = search(x, k)
        index[7, 3] = -1
        asked.append(len(x))
        return distance, index

    monkeypatch.setattr(near_copies, "_nearest_by_index", count)
    pairs, indexed_scores = near_copies.find_close_vectors(x, False)
    assert asked == [3000]
    assert {(i, 2900 + i) for i in range(60)} == {*zip(exact.a.tolist(), exact.b.tolist(), strict=True)}
    assert {*zip(pairs.a.tolist(), pairs.b.tolist(), strict=True)} == {*zip(exact.a, exact.b, strict=True)}
    np.testing.assert_allclose(pairs.similarity, exact.similarity, atol=1e-3)
    assert (np.flatnonzero(scores > 5) == np.flatnonzero(indexed_scores > 5)).all()
    assert (scores[2960:2964] > 5).all()
    assert np.median(np.abs(indexed_scores - scores)) < 0.1
    again, _ = near_copies.find_close_vectors(x, False)
    assert (again.a == pairs.a).all()
    assert (again.similarity == pairs.similarity).all()


@pytest.mark.parametrize("installed", [False, True])
def test_a_bounded_search_among_many_rows_needs_an_index(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    split = Split(make_features(torch.zeros(4, 20)), torch.arange(4), torch.zeros(4).long())
    monkeypatch.setattr(near_copies, "find_spec", lambda _: object() if installed else None)
    expected = "" if installed else "10,001 rows are too many without the package faiss-cpu"
    assert search.reason_to_skip(split, 10_001, True) == expected
    assert search.reason_to_skip(split, 10_001, False) == ""
    wide = Split(make_features(torch.zeros(4, 2000)), torch.arange(4), torch.zeros(4).long())
    assert search.reason_to_skip(wide, 10_000, True) == ""
    assert search.reason_to_skip(wide, 100_000, True).startswith("100,000 rows ")
