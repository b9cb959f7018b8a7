"""Exports of a review: corrected labels and trusted sets."""

import csv
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from review_helpers import NAMES, make_decisions

from warpi.audit.decisions import AUTOMATIC, Choice, Decision, Store
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.numeric import make_features
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.noise.noise_file import read_noise_file
from warpi.review.export import fit_command, write_all, write_trusted
from warpi.review.items import Cell, Items, items_from_data
from warpi.review.reviewed_labels import corrected_csv, write_corrected
from warpi.runs.defaults import load_dataset
from warpi.training.task import make_task


def test_corrected_csv(items: Items) -> None:
    decisions = make_decisions({19: NAMES[1], 3: NAMES[2]}) | {4: Decision(9, 4, "unsure", None, "", "")}
    rows = list(csv.DictReader(corrected_csv(items, decisions).splitlines()))
    assert [int(row["row"]) for row in rows] == list(range(24))
    columns = ["row", "given_label", "label", "state", "verified", "suggested_label", "wrong_probability"]
    assert list(rows[0]) == columns
    assert list(rows[3].values()) == ["3", NAMES[0], NAMES[2], "changed", "1", NAMES[1], "0.157895"]
    assert [rows[19][c] for c in columns[1:5]] == [NAMES[1], NAMES[1], "kept", "1"]
    assert [rows[4][c] for c in columns[1:5]] == [NAMES[1], NAMES[1], "unsure", "0"]
    assert [rows[23][c] for c in columns[2:]] == [NAMES[2], "open", "0", "", ""]  # not listed


def test_original_label_is_kept(items: Items, store: Store) -> None:
    """Also if a later review shows a label that was corrected before."""
    (first,) = store.decide([Choice(3, 0, "change", NAMES[2], NAMES[1], None)], "tab", "1").done.values()
    assert first is not None
    store.decide([Choice(3, first.id, "keep", NAMES[2], NAMES[2], None)], "tab", "2")
    row = list(csv.DictReader(corrected_csv(items, store.current_decisions()).splitlines()))[3]
    assert (row["given_label"], row["label"], row["state"]) == (NAMES[1], NAMES[2], "changed")


def test_corrected_json_is_read_by_fit(items: Items, tmp_path: Path) -> None:
    write_corrected(items, make_decisions({3: NAMES[2]}), tmp_path / "c.json")
    y = read_noise_file(tmp_path / "c.json", items.dataset).y
    assert y[3] == 2
    assert torch.equal(y[4:], items.dataset.y[4:])
    write_corrected(items, make_decisions({3: NAMES[2]}), tmp_path / "c.json")
    with pytest.raises(UserError, match="on which a run may depend"):
        write_corrected(items, make_decisions({3: NAMES[1]}), tmp_path / "c.json")
    with pytest.raises(UserError, match=r"\.csv or \.json"):
        write_corrected(items, {}, tmp_path / "c.txt")


def test_corrected_labels_are_refused_for_moved_rows(photos: Path, tmp_path: Path) -> None:
    """If an image file is renamed, the rows of others change, and the labels must not move with them."""
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))

    def open_items() -> Items:
        dataset, _ = load_dataset(str(folder), image_size=8)
        return items_from_data(dataset, dataset.y)

    before = open_items()
    decisions = make_decisions({0: "red", 1: "blue"})
    path = write_corrected(before, decisions, tmp_path / "c.csv")
    read_noise_file(path, load_dataset(str(folder), image_size=16)[0])
    assert before.dataset.files is not None
    file = folder / before.dataset.files.paths[0]
    file.rename(file.with_stem("zzz"))
    with pytest.raises(UserError, match=r"moved, renamed, added.*restore them.*warpi review --export"):
        read_noise_file(path, open_items().dataset)
    content = path.read_bytes()
    assert write_corrected(open_items(), decisions, tmp_path / "c.csv") == tmp_path / "c-2.json"
    assert path.read_bytes() == content  # a run may depend on it


def test_trusted_digits(digits: Dataset, tmp_path: Path) -> None:
    items = items_from_data(digits, digits.y)
    rows = {row: digits.classes[int(digits.y[row])] for row in range(57)}
    written = write_trusted(items, make_decisions(rows), tmp_path / "trusted.npz", balanced=True)
    meta, _ = load_dataset(str(tmp_path / "trusted.npz"), like=digits)
    least = int(digits.y[:57].bincount().min())
    assert meta.y.bincount().tolist() == [least] * 10
    assert (written.size, written.left_out) == (10 * least, 57 - 10 * least)
    task, _ = make_task(digits, "pair:0.4", meta_data=meta, limit=None)
    assert task.meta is not None
    assert len(task.meta) == 10 * least
    x, y = task.meta.examples.flat(task.meta.rows), task.meta.y
    at = [int((digits.examples.flat(torch.arange(57)) == row).all(1).nonzero()[0]) for row in x]
    assert torch.equal(digits.y[at], y)
    write_trusted(items, make_decisions(rows), tmp_path / "all.npz")
    assert len(load_dataset(str(tmp_path / "all.npz"), like=digits)[0].y) == 57
    with pytest.raises(UserError, match=r"a \.npz file, got"):
        write_trusted(items, make_decisions(rows), tmp_path / "trusted.csv")
    with pytest.raises(UserError, match="on which a run may depend"):
        write_trusted(items, make_decisions({0: "0"}), tmp_path / "trusted.npz")


def test_trusted_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "t.csv"
    kinds = ['sa"id, so', "two\nlines", "plain"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "kind", "split", "species", "trusted"])
        for i in range(60):
            part = "test" if i % 10 == 9 else "train"
            writer.writerow(
                [repr(float(rng.normal() * 10.0 ** (i % 9 - 4))), kinds[i % 3], part, "ab"[i % 2], int(i < 4)]
            )
    dataset, _ = load_dataset(str(path), label="species")
    items = items_from_data(dataset, dataset.y, np.array([40, 30, 20]), None)
    assert items.describe(1)[1] == Cell("kind", "two\nlines")
    assert not items.has_pictures
    decisions = make_decisions({row: "b" if row % 3 else "a" for row in range(10, 30)})
    write_trusted(items, decisions, tmp_path / "trusted.csv", balanced=False)
    meta, _ = load_dataset(str(tmp_path / "trusted.csv"), label="species", like=dataset)
    assert len(meta.y) == 24  # including the four marked rows
    assert torch.equal(meta.examples.flat(torch.arange(4, 24)), dataset.examples.flat(torch.arange(10, 30)))
    task, _ = make_task(dataset, meta_data=meta)  # finds them among the rows of the data
    assert len(task.train) + len(task.val or ()) == 54 - 24
    with_file = replace(items, source=path)
    write_trusted(with_file, decisions, tmp_path / "copied.csv", balanced=False)
    cells = list(csv.DictReader((tmp_path / "copied.csv").read_text().splitlines(keepends=True)))
    assert len(cells) == 24
    path.write_text("\n".join(["size,kind,split,species,trusted", "1,plain,train,a,0"]) + "\n")
    with pytest.raises(UserError, match="has changed while it was read"):
        write_trusted(with_file, decisions, tmp_path / "copied.csv")


def test_trusted_images(photos: Path, tmp_path: Path) -> None:
    dataset, _ = load_dataset(str(photos), image_size=8)
    assert dataset.files is not None
    items = items_from_data(dataset, dataset.y)
    decisions = make_decisions({0: "red", 1: "blue", 2: "red", 5: "blue"})
    write_trusted(items, decisions, tmp_path / "trusted")
    for path, root in ((tmp_path / "trusted", None), (tmp_path / "trusted.csv", photos)):
        write_trusted(items, decisions, path)
        meta, _ = load_dataset(str(path), root=root, image_size=8, like=dataset)
        task, _ = make_task(dataset, meta_data=meta, test=0.0, val=0.0)
        assert task.meta is not None
        assert (len(task.meta), len(task.train)) == (4, len(dataset.y) - 4)
    assert "--root" in fit_command(items, {"data": "p"}, tmp_path / "trusted.csv", None)
    with pytest.raises(UserError, match="on which a run may depend"):
        write_trusted(items, make_decisions({0: "red", 5: "blue"}), tmp_path / "trusted")
    write_corrected(items, decisions, tmp_path / "c.csv")
    again, _ = load_dataset(str(tmp_path / "c.csv"), root=photos, image_size=8)
    assert again.trusted is not None
    assert again.y[[0, 1, 2, 5]].tolist() == [1, 0, 1, 0]
    assert again.trusted.nonzero().flatten().tolist() == [0, 1, 2, 5]
    assert not again.test_is_clean  # the true labels are unknown


def test_trusted_set_includes_earlier_examples(photos: Path, tmp_path: Path) -> None:
    """Trusted examples of a separate file are included, and later decisions about them count."""
    dataset, _ = load_dataset(str(photos), image_size=8)
    first = items_from_data(dataset, dataset.y)
    write_trusted(first, make_decisions({0: "red", 1: "blue"}), tmp_path / "one")
    meta, _ = load_dataset(str(tmp_path / "one"), image_size=8, like=dataset)
    later = replace(first, trusted=Split(meta.examples, torch.arange(2), meta.y))
    path, trusted = write_all(later, make_decisions({0: "blue", 4: "red", 6: "red"}), tmp_path)
    assert trusted is not None
    counts = {folder.name: len(list(folder.iterdir())) for folder in trusted.path.iterdir()}
    assert (path, counts, trusted.left_out) == (tmp_path / "export-1", {"blue": 2, "red": 2}, 0)


def test_suspicious_rows_only_correct_labels(digits: Dataset, tmp_path: Path) -> None:
    """Every trusted example that the user brought is kept, random rows join them, and suspicious rows do not."""
    brought = Split(digits.examples, torch.tensor([0, 1, 2]), digits.y[:3])
    outside = make_features(torch.rand(4, 64) * 16)
    for trusted in (brought, Split(outside, torch.arange(4), digits.y[[0, 0, 1, 1]])):
        items = replace(
            items_from_data(digits, digits.y),
            probabilities=np.full((len(digits.y), 10), 0.1),  # there is an audit
            random_rows=frozenset({10, 11}),
            trusted=trusted,
        )
        name = f"{len(trusted)}.npz"
        decided = make_decisions({10: "0", 11: "1", 12: "2", 13: "3"})
        written = write_trusted(items, decided, tmp_path / name)
        assert (written.size, written.corrected_only, written.left_out) == (len(trusted) + 2, 2, 0)
        meta, _ = load_dataset(str(tmp_path / name), like=digits)
        assert meta.y.tolist()[-2:] == [0, 1]
        corrected = read_noise_file(write_corrected(items, decided, tmp_path / f"{name}.json"), digits).y
        assert corrected[10:14].tolist() == [0, 1, 2, 3]


def test_export_without_trusted_examples(digits: Dataset, tmp_path: Path) -> None:
    """Decisions about suspicious rows alone give corrected labels, and a command that uses only these."""
    items = replace(items_from_data(digits, digits.y), probabilities=np.full((len(digits.y), 10), 0.1))
    with pytest.raises(UserError, match="warpi review --rows"):
        write_trusted(items, make_decisions({3: "4"}), tmp_path / "t.npz")
    folder, trusted = write_all(items, make_decisions({3: "4"}), tmp_path)
    assert trusted is None
    command = fit_command(items, {"data": "digits"}, None, folder / "corrected.json")
    assert "--labels" in command
    assert "--trusted" not in command
    with pytest.raises(UserError, match="keep or change"):
        write_all(items, {}, tmp_path)


def test_copies_of_trusted_examples_are_trusted(photos: Path, tmp_path: Path) -> None:
    """Rows with a copy in a separate trusted file are trusted, with the label from that file."""
    for size in (8, None):
        dataset, _ = load_dataset(str(photos), image_size=size)
        first = items_from_data(dataset, dataset.y)
        known = {0: "red", 1: "blue", 2: "red", 5: "blue"}
        write_trusted(first, make_decisions(known), tmp_path / "ok.csv")
        meta, _ = load_dataset(str(tmp_path / "ok.csv"), root=photos, image_size=size, like=dataset)
        later = replace(first, trusted=Split(meta.examples, torch.arange(4), meta.y))
        assert {row: dataset.classes[k] for row, k in later.trusted_rows.items()} == known
        rows = list(csv.DictReader(corrected_csv(later, make_decisions({0: "blue", 4: "red"})).splitlines()))
        assert [row["state"] for row in rows[:6]] == ["kept", "trusted", "trusted", "open", "kept", "trusted"]
        assert [rows[row]["label"] for row in (0, 1, 2, 4, 5)] == ["blue", "blue", "red", "red", "blue"]
        write_trusted(later, {}, tmp_path / "again.csv")
        same = [sorted((tmp_path / name).read_text().splitlines()) for name in ("ok.csv", "again.csv")]
        assert same[0] == same[1]


def test_each_trusted_example_matches_one_row(tmp_path: Path) -> None:
    """Among rows with the same input, one with the same label is preferred, else the first one."""
    x, y = np.zeros((9, 2)), np.arange(9) % 3
    x[6:] = np.eye(3, 2) + 1
    np.savez(tmp_path / "x.npz", x=x, y=y)
    np.savez(tmp_path / "ok.npz", x=x[[0, 0, 0, 0, 7]], y=np.array([0, 1, 1, 1, 0]))
    dataset, _ = load_dataset(str(tmp_path / "x.npz"))
    meta, _ = load_dataset(str(tmp_path / "ok.npz"), like=dataset)
    items = replace(items_from_data(dataset, dataset.y), trusted=Split(meta.examples, torch.arange(5), meta.y))
    assert items.trusted_rows == {0: 0, 1: 1, 2: 1, 4: 1, 7: 0}
    assert write_trusted(items, make_decisions({7: "2"}), tmp_path / "t.npz", balanced=False).size == 5


def test_trusted_folder_does_not_depend_on_the_location_of_the_data(photos: Path, tmp_path: Path) -> None:
    """File names determine the order of the rows, and this affects the training."""
    names = []
    for place in ("one", "two"):
        shutil.copytree(photos, tmp_path / place, symlinks=True)
        dataset, _ = load_dataset(str(tmp_path / place), image_size=8)
        items = items_from_data(dataset, dataset.y)
        write_trusted(items, make_decisions({0: "red", 1: "blue", 2: "red", 5: "blue"}), tmp_path / f"of-{place}")
        names.append(sorted(str(p.relative_to(tmp_path / f"of-{place}")) for p in tmp_path.glob(f"of-{place}/*/*")))
    assert names[0] == names[1]
    assert len(names[0]) == 4
    targets = [os.readlink(link) for link in tmp_path.glob("of-one/*/*") if link.is_symlink()]
    assert targets
    assert not any(map(os.path.isabs, targets)), "data and set can be moved together"
    (tmp_path / "moved").mkdir()
    for name in ("one", "of-one"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert all(link.exists() for link in (tmp_path / "moved" / "of-one").glob("*/*"))


def test_empty_trusted_set_is_refused(items: Items, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no example is trusted yet"):
        write_trusted(items, {}, tmp_path / "t.npz")


def test_failed_export_leaves_no_files(items: Items, tmp_path: Path) -> None:
    """Otherwise the first successful export would go to export-2."""
    with pytest.raises(UserError, match="no example is trusted yet"):
        write_all(items, {}, tmp_path)
    assert list(tmp_path.rglob("*.json")) == []
    name = items.classes[int(items.given[3]) - 1]
    assert write_all(items, make_decisions({3: name}), tmp_path)[0] == tmp_path / "export-1"


def test_trusted_images_outside_the_folder_and_odd_class_names(photos: Path, tmp_path: Path) -> None:
    dataset, _ = load_dataset(str(photos), image_size=8)
    items = items_from_data(dataset, dataset.y)
    write_trusted(items, make_decisions({0: "red", 1: "blue"}), tmp_path / "first")
    earlier, _ = load_dataset(str(tmp_path / "first"), image_size=8, like=dataset)
    changed = TensorExamples(earlier.examples.x + 1, earlier.examples.scale)  # type: ignore[attr-defined, operator]
    later = replace(items, trusted=Split(changed, torch.arange(2), earlier.y))
    decisions = make_decisions({4: "red", 5: "blue"})
    paths = tuple(f"{i}\udcff.png" for i in range(9))  # not valid UTF-8
    bytes_names = replace(items, dataset=replace(dataset, files=dataset.files._replace(paths=paths)))  # type: ignore[union-attr]
    with pytest.raises(UserError, match="not UTF-8; export a folder"):
        write_trusted(bytes_names, make_decisions({4: "red", 0: "blue"}), tmp_path / "list.csv")
    with pytest.raises(UserError, match=r"some images are outside .* export a folder"):
        write_trusted(later, decisions, tmp_path / "list.csv")
    write_trusted(later, decisions, tmp_path / "second")
    assert sum(path.suffix == ".png" and not path.is_symlink() for path in tmp_path.glob("second/*/*")) == 2
    odd = replace(items, dataset=replace(dataset, classes=("a/b", "c")))
    with pytest.raises(UserError, match=r"class 'a/b' cannot be a folder name; export a file"):
        write_trusted(odd, make_decisions({4: "c"}), tmp_path / "third")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_trusted(items, decisions, tmp_path / "file" / "trusted")
    with pytest.raises(UserError, match="choose another --out"):
        write_all(items, decisions, tmp_path / "file")


def test_accepted_suggestions_correct_labels_but_are_not_verified(items: Items, tmp_path: Path) -> None:
    decisions = {3: Decision(1, 3, "change", NAMES[1], "t", "", NAMES[0], f"{AUTOMATIC}1")}
    lines = list(csv.DictReader(corrected_csv(items, decisions).splitlines()))
    row = lines[3]
    assert (row["given_label"], row["label"], row["state"], row["verified"]) == (NAMES[0], NAMES[1], "accepted", "0")
    folder, trusted = write_all(items, decisions, tmp_path)
    assert trusted is None  # row 3 was drawn at random, but nobody has checked it
    labels = read_noise_file(folder / "corrected.json", items.dataset).y
    assert labels[3] == 1
    assert (labels != torch.from_numpy(items.given)).sum() == 1
