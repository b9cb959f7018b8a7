"""Features of images and texts: embedding, resuming, reading, training, predicting, and what a reviewer sees."""

import csv
import hashlib
import io
import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from forked import Forked
from PIL import Image
from torch import nn

from warpi.audit.decisions import Decision
from warpi.cli.app import main
from warpi.data import decode as decoder
from warpi.data.mapped import MappedEmbedded
from warpi.data.numeric import Embedded
from warpi.datasets.embedding import dataset as reading, embed as embedding
from warpi.datasets.embedding.embed import embed
from warpi.datasets.embedding.folder import FeatureFolder
from warpi.datasets.image_folders import read_folder
from warpi.datasets.load import read_dataset
from warpi.errors import UserError
from warpi.review.export import trusted_name, write_trusted
from warpi.review.items import items_from_data
from warpi.runs.predictions import predict
from warpi.runs.run import fit

WORDS = {"sport": "ball team goal match", "food": "bread soup salt oven"}


def make_photos(folder, n=20, classes=("cat", "dog"), seed=0):
    """Small images; those of the second class are brighter."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        k = i % len(classes)
        path = folder / classes[k] / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(100 * k, 100 * k + 120, (16, 16, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture
def photos(tmp_path):
    return make_photos(tmp_path / "photos")


def vectors(folder):
    """Row, input hash and vector of every record in a folder of features."""
    features = FeatureFolder(folder)
    shards = features.read_shards(features.read_manifest())
    return {name: np.concatenate([shard[name] for shard in shards]) for name in ("row", "sha256", "vector")}


def brightness(x):
    """The mean of each channel: an embedder without weights."""
    return x.mean((2, 3))


def length_and_words(texts):
    return torch.tensor([[len(text), text.count(" ")] for text in texts], dtype=torch.float32)


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def make_texts(path, n=24, columns=("label",)):
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", *columns])
        for i in range(n):
            label = list(WORDS)[i % 2]
            text = ", ".join(rng.choice(WORDS[label].split(), 4))
            cells = {"label": label, "clean_label": label if i < 8 else "", "split": "test" if i >= n - 6 else "train"}
            writer.writerow([text, *(cells[name] for name in columns)])
    return path


# Embedding


def test_pixels_are_the_pixels_of_each_image_once_and_in_order(photos, tmp_path):
    result = embed(photos, tmp_path / "out", "pixels:16")
    found = vectors(tmp_path / "out")
    files = sorted(photos.rglob("*.png"))
    expected = [np.asarray(Image.open(file), np.float32).transpose(2, 0, 1).ravel() / 255 for file in files]
    assert result.rows == result.computed == 20
    assert result.dimensions == 3 * 16 * 16
    assert found["row"].tolist() == list(range(20))
    np.testing.assert_allclose(found["vector"], expected, atol=5e-4)
    assert found["vector"].dtype == np.float16
    assert found["sha256"].tobytes() == b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)


class Interrupted(Exception):
    pass


class FailsAfter:
    """An embedder that is interrupted after some batches."""

    image_size = 16

    def __init__(self, batches):
        self.left = batches

    def __call__(self, x):
        if self.left == 0:
            raise Interrupted
        self.left -= 1
        return brightness(x)


@pytest.mark.parametrize("partial_seconds", [-1.0, 1000.0])
def test_interrupted_and_continued_is_the_same_as_undisturbed(photos, tmp_path, monkeypatch, partial_seconds):
    monkeypatch.setattr(embedding, "PARTIAL_SECONDS", partial_seconds)  # -1: store a partial shard after every batch
    options = {"batch_size": 3, "shard_rows": 8}
    embed(photos, tmp_path / "whole", FailsAfter(-1), **options)
    for batches in (1, 2, 3, 1) if partial_seconds < 0 else (2, 4):  # of 8
        with pytest.raises(Interrupted):
            embed(photos, tmp_path / "parts", FailsAfter(batches), **options)
        assert not FeatureFolder(tmp_path / "parts").read_manifest()["complete"]
    result = embed(photos, tmp_path / "parts", FailsAfter(-1), **options)
    assert result.rows == 20
    assert result.computed == (1 if partial_seconds < 0 else 12)
    for name in ("features.json", "rows.json", *(f"shard-0000{k}.npy" for k in range(3))):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list((tmp_path / "parts").glob("partial-*"))
    assert embed(photos, tmp_path / "parts", FailsAfter(0), **options).computed == 0


class Slow:
    """An embedder that takes a while for each batch."""

    image_size = 16

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, x):
        time.sleep(self.seconds)
        return brightness(x)


def test_a_killed_process_leaves_a_folder_that_continues(photos, tmp_path):
    out = tmp_path / "out"
    options = {"batch_size": 2, "shard_rows": 4}
    for n_files in (1, 3):
        process = Forked(lambda: embed(photos, out, Slow(0.1), **options) and 0, tmp_path / "log")
        deadline = time.monotonic() + 60
        while len(list(out.glob("shard-*"))) < n_files and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.send(signal.SIGKILL) == -signal.SIGKILL, process.output()
    with pytest.raises(UserError, match="are not complete; continue with: warpi embed"):
        read_dataset(str(out))
    assert len(list(out.glob("shard-*"))) < 5
    assert 0 < embed(photos, out, Slow(0), **options).computed < 20
    embed(photos, tmp_path / "whole", Slow(0), **options)
    for name, values in vectors(tmp_path / "whole").items():
        np.testing.assert_array_equal(vectors(out)[name], values)
    assert vectors(out)["row"].tolist() == list(range(20))


def test_an_unreadable_image_is_left_out_and_rows_keep_their_numbers(photos, tmp_path):
    (photos / "cat" / "002.png").write_bytes(b"not an image")
    embed(photos, tmp_path / "out", "pixels:4", batch_size=1)  # a batch without any readable image
    found = vectors(tmp_path / "out")
    assert found["row"].tolist() == [0, *range(2, 20)]
    dataset = read_dataset(str(tmp_path / "out"))
    assert len(dataset.y) == 19
    assert "cat/002.png" not in dataset.files.paths
    assert dataset.y.tolist() == [0] * 9 + [1] * 10


def test_a_changed_source_or_embedder_is_refused(photos, tmp_path):
    out = tmp_path / "out"
    embed(photos, out, "pixels:4")
    with pytest.raises(UserError, match=r"contains features by pixels:4 at 4 pixels .* not by pixels:8"):
        embed(photos, out, "pixels:8")
    with pytest.raises(UserError, match="--batch-size has changed"):
        embed(photos, out, "pixels:4", batch_size=7)
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(photos / "cat" / "000.png")
    with pytest.raises(UserError, match="an image file has changed"):
        embed(photos, out, "pixels:4")
    make_photos(photos, 22)
    with pytest.raises(UserError, match="the list of rows or their labels has changed"):
        embed(photos, out, "pixels:4")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("important")
    with pytest.raises(UserError, match="contains other files"):
        embed(photos, tmp_path / "mine", "pixels:4")
    with pytest.raises(UserError, match="is inside"):
        embed(photos, photos / "out", "pixels:4")


def test_a_damaged_shard_is_found_when_it_is_read(photos, tmp_path):
    embed(photos, tmp_path / "out", "pixels:4")
    shard = tmp_path / "out" / "shard-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"shard-00000\.npy is damaged; delete it and run `warpi embed` again"):
        read_dataset(str(tmp_path / "out"))
    shard.unlink()
    with pytest.raises(UserError, match="is missing"):
        read_dataset(str(tmp_path / "out"))
    assert embed(photos, tmp_path / "out", "pixels:4").computed == 20
    assert len(read_dataset(str(tmp_path / "out")).y) == 20


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:, 0, 0, 0] / 0, r"must return one vector per input, \[20, D\], got \[20\]"),
        (lambda x: x.flatten(1) * float("nan"), "not finite"),
        (lambda x: x.flatten(1) + 1e6, "not finite in float16"),
        (lambda x: None, "got NoneType"),  # noqa: ARG005
    ],
)
def test_vectors_that_cannot_be_stored_are_refused(photos, tmp_path, function, message):
    with pytest.raises(UserError, match=message):
        embed(photos, tmp_path / "out", function, image_size=4)


# Reading as a data set


def test_labels_trusted_rows_and_splits_carry_over(tmp_path):
    make_photos(tmp_path / "photos", 20)
    files = sorted(str(file.relative_to(tmp_path)) for file in (tmp_path / "photos").rglob("*.png"))
    splits = ["train"] * 12 + ["test"] * 4 + ["trusted"] * 4
    lines = ["path,label,clean_label,trusted,split,given"]
    for i, (file, split) in enumerate(zip(files, splits, strict=True)):
        clean = "dog" if i % 3 == 0 else ""
        lines.append(f"{file},{'cat' if i % 2 else 'dog'},{clean},{int(i % 4 == 0)},{split},{'cat' if i > 15 else ''}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    embed(tmp_path / "list.csv", tmp_path / "out", "pixels:4")
    images = read_dataset(str(tmp_path / "list.csv"))
    features = read_dataset(str(tmp_path / "out"))
    assert features.classes == images.classes
    for name in ("y", "clean", "trusted", "given", "meta_given"):
        expected = getattr(images, name)
        assert (getattr(features, name) is None) == (expected is None), name
        assert expected is None or torch.equal(getattr(features, name), expected), name
    assert images.meta is not None
    assert images.test is not None
    assert torch.equal(features.meta.y, images.meta.y)
    assert torch.equal(features.test.y, images.test.y)
    assert features.test_is_clean == images.test_is_clean
    assert features.examples.shape == (48,)
    assert [os.path.join(features.files.root, path) for path in features.files.paths] == [
        str(tmp_path / file) for file in files[:12]
    ]
    assert os.path.basename(features.meta.examples.originals.values[0]) == os.path.basename(files[16])


def test_folders_train_test_and_trusted_carry_over(tmp_path):
    for k, part in enumerate(("train", "test", "trusted")):
        make_photos(tmp_path / "photos" / part, 8 - 2 * k, seed=k)
    embed(tmp_path / "photos", tmp_path / "out", "pixels:4")
    dataset = read_dataset(str(tmp_path / "out"))
    assert [len(part) for part in (dataset.y, dataset.test, dataset.meta)] == [8, 6, 4]
    assert dataset.meta.y.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("form", ["csv", "parquet", "folder"])
def test_texts_of_a_table_or_of_a_folder(tmp_path, form):
    path = make_texts(tmp_path / "texts.csv", columns=("label", "clean_label", "split"))
    rows = read_csv(path)
    if form == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        path = tmp_path / "texts.parquet"
        parquet.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), path)
    elif form == "folder":
        path = tmp_path / "texts"
        for i, row in enumerate(rows):
            file = path / row["split"] / row["label"] / f"{i:03d}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(row["text"])
    embed(path, tmp_path / "out", length_and_words)
    dataset = read_dataset(str(tmp_path / "out"))
    assert dataset.classes == ("food", "sport")
    assert len(dataset.y) == 18
    assert len(dataset.test) == 6
    texts = dataset.examples.originals.values
    assert sorted(texts) == sorted(row["text"] for row in rows if row["split"] == "train")
    assert dataset.examples.x[:, 0].tolist() == [len(text) for text in texts]
    assert (dataset.clean is not None) == (form != "folder")
    words = items_from_data(dataset, dataset.y).describe(3)
    assert [(cell.name, cell.value) for cell in words] == [("text", texts[3])]


def test_a_reviewer_sees_the_images_of_rows_and_of_trusted_examples(tmp_path):
    make_photos(tmp_path / "photos" / "train", 6)
    make_photos(tmp_path / "photos" / "trusted", 4, seed=1)
    embed(tmp_path / "photos", tmp_path / "out", "pixels:4")
    dataset = read_dataset(str(tmp_path / "out"))
    items = items_from_data(dataset, dataset.y)
    assert items.has_pictures
    kind, content = items.picture(5)
    expected = decoder.decode(str(tmp_path / "photos" / "train" / "dog" / "005.png"), 448)
    assert kind == "image/jpeg"
    assert Image.open(io.BytesIO(content)).size == expected.size
    assert items.trusted_picture(0) is not None
    assert items.trusted_picture(0) != items.picture(0)


# Training and predicting


def test_fit_reads_no_image_and_predicts_photos_and_features_alike(photos, tmp_path, monkeypatch):
    features, run = tmp_path / "features", tmp_path / "run"
    trusted = make_photos(tmp_path / "trusted", 6, seed=1)
    embed(photos, features, "pixels:8")
    embed(trusted, tmp_path / "trusted_features", "pixels:8")

    def refuse(*_, **__):
        raise AssertionError("an image was read")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "decode", refuse)
        shutil.move(photos, tmp_path / "moved")
        fit(run, data=features, trusted=tmp_path / "trusted_features", method="glc", epochs=2, test=0.0)
        shutil.move(tmp_path / "moved", photos)
    facts = json.loads((run / "spec.json").read_text())["facts"]
    assert facts["embedder"] == "pixels:8"
    assert facts["embedder_sha256"] == FeatureFolder(features).read_manifest()["embedder"]["sha256"]
    by_photos = predict(run, photos)
    by_features = predict(run, features)
    np.testing.assert_array_equal(by_photos.probabilities, by_features.probabilities)
    assert by_photos.paths[0] == "cat/000.png"
    assert by_photos.labels["folder"].tolist() == by_features.labels["label"].tolist()
    (photos / "cat" / "002.png").write_bytes(b"not an image")
    fewer = predict(run, photos)
    assert fewer.unread == 1
    assert fewer.row.tolist() == [0, *range(2, 20)]
    np.testing.assert_array_equal(fewer.probabilities, by_photos.probabilities[fewer.row])


def test_predict_refuses_other_weights_and_python_objects(photos, tmp_path, monkeypatch):
    trusted = make_photos(tmp_path / "trusted", 6, seed=1)
    for name, embedder in {"a": "pixels:4", "b": FailsAfter(-1)}.items():
        for data in (photos, trusted):
            embed(data, tmp_path / f"{name}_{data.name}", embedder)
        data = {"data": tmp_path / f"{name}_photos", "trusted": tmp_path / f"{name}_trusted"}
        fit(tmp_path / name, **data, method="glc", epochs=1)
    with pytest.raises(
        UserError, match=r"were computed by a Python object, .*FailsAfter.* pass the folder of features"
    ):
        predict(tmp_path / "b", photos)
    assert len(predict(tmp_path / "b", tmp_path / "b_photos")) == 20
    with pytest.raises(
        UserError, match="the embedder must be the same as for the first features, pixels:4, got python"
    ):
        predict(tmp_path / "a", tmp_path / "b_photos")
    with pytest.raises(UserError, match="the embedder must be the same"):
        fit(tmp_path / "c", data=tmp_path / "a_photos", trusted=tmp_path / "b_trusted", method="glc", epochs=1)
    open_embedder = reading.open_embedder

    def changed(*given):
        model = open_embedder(*given)
        return type(model)(**{**vars(model), "sha256": "0" * 64})

    monkeypatch.setattr(reading, "open_embedder", changed)
    with pytest.raises(UserError, match=r"the weights of pixels:4 have changed \(.* before, 00000000 now\)"):
        predict(tmp_path / "a", photos)


def test_trusted_images_keep_the_vectors_of_equal_images(photos, tmp_path, monkeypatch):
    embed(photos, tmp_path / "features", "pixels:4")
    trusted = tmp_path / "trusted"
    for name, other in (("000", "dog"), ("003", "dog")):  # the class of 000 was corrected
        (trusted / other).mkdir(parents=True, exist_ok=True)
        found = next(photos.rglob(f"{name}.png"))
        shutil.copy(found, trusted / other / f"{name}.png")
    first = read_dataset(str(tmp_path / "features"))
    with monkeypatch.context() as patch:
        patch.setattr(reading, "open_embedder", None)
        second = read_dataset(str(trusted), like=first)
    paths = list(first.files.paths)
    expected = first.examples.x[[paths.index("cat/000.png"), paths.index("dog/003.png")]]
    assert torch.equal(second.examples.x, expected)
    assert second.y.tolist() == [1, 1]
    make_photos(trusted, 3, seed=7)  # new images are embedded
    more = read_dataset(str(trusted), like=first)
    embed(trusted, tmp_path / "all", "pixels:4")
    assert torch.equal(more.examples.x, read_dataset(str(tmp_path / "all"), like=first).examples.x)


def test_the_commands_embed_fit_predict(photos, tmp_path, capsys):
    out, run = str(tmp_path / "features"), str(tmp_path / "run")
    trusted = str(make_photos(tmp_path / "trusted", 6, seed=1))
    assert main(["embed", str(photos), "--with", "pixels:4", "--out", out]) == 0
    assert "20 vectors of 48 numbers by pixels:4 (20 of them computed now)" in capsys.readouterr().out
    assert main(["embed", str(photos), "--with", "pixels:4", "--out", out]) == 0
    assert "nothing new" in capsys.readouterr().out
    fit_flags = ["--trusted", trusted, "--method", "glc", "--epochs", "1", "--quiet"]
    assert main(["fit", "--data", out, *fit_flags, "--out", run]) == 0
    assert main(["audit", run, "--csv", str(tmp_path / "audit.csv")]) == 0
    assert read_csv(tmp_path / "audit.csv")[0]["path"].endswith(".png")
    assert main(["predict", run, "--data", str(photos), "--csv", str(tmp_path / "predicted.csv")]) == 0
    rows = read_csv(tmp_path / "predicted.csv")
    assert [row["path"] for row in rows] == [str(file.relative_to(photos)) for file in sorted(photos.rglob("*.png"))]
    assert main(["fit", "--data", out, "--image-size", "8", *fit_flags, "--out", str(tmp_path / "other")]) == 2
    assert "cannot be read at another size" in capsys.readouterr().err


def test_features_do_not_disturb_reading_the_images(photos, tmp_path):
    embed(photos, tmp_path / "features", "pixels:4")
    assert isinstance(read_dataset(str(tmp_path / "features")).examples, Embedded)
    assert not isinstance(read_dataset(str(photos)).examples, Embedded)
    assert torch.equal(read_dataset(str(tmp_path / "features")).y, read_folder(photos).y)


def decide(items, rows):
    """Decisions that keep the labels of some rows."""
    names = items.classes
    return {row: Decision(row, row, "keep", names[items.given[row]], "", "") for row in rows}


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_a_trusted_set_of_a_review_is_read_without_the_embedder(photos, tmp_path, monkeypatch, kind):
    source = photos if kind == "images" else make_texts(tmp_path / "texts.csv")
    embed(source, tmp_path / "features", "pixels:4" if kind == "images" else length_and_words)
    dataset = read_dataset(str(tmp_path / "features"))
    items = items_from_data(dataset, dataset.y)
    out = tmp_path / trusted_name(items)
    write_trusted(items, decide(items, [0, 1, 10, 11]), out, balanced=False)
    monkeypatch.setattr(reading, "open_embedder", None)
    trusted = read_dataset(str(out), like=dataset)
    expected = {(tuple(dataset.examples.x[row].tolist()), int(dataset.y[row])) for row in (0, 1, 10, 11)}
    assert {(tuple(x), y) for x, y in zip(trusted.examples.x.tolist(), trusted.y.tolist(), strict=True)} == expected


class Tiny(nn.Module):
    image_size = 8

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * brightness(x)


def test_weights_decide_the_identity_of_a_network(photos, tmp_path):
    net = Tiny()
    embed(photos, tmp_path / "out", net)
    with torch.no_grad():
        net.scale += 1
    with pytest.raises(UserError, match="choose another --out"):
        embed(photos, tmp_path / "out", net)


def test_large_vectors_stay_in_one_file_with_the_same_results(photos, tmp_path, monkeypatch):
    features = tmp_path / "features"
    embed(photos, features, "pixels:8", shard_rows=7)
    embed(make_photos(tmp_path / "trusted", 6, seed=1), tmp_path / "trusted_features", "pixels:8")
    settings = {"trusted": tmp_path / "trusted_features", "method": "glc", "epochs": 2, "test": 0.2, "device": "cpu"}
    usual = fit(tmp_path / "usual", data=features, **settings)
    assert not list(features.glob("vectors-*.npy"))
    predicted = predict(tmp_path / "usual", photos).probabilities
    monkeypatch.setattr(reading, "LARGE", 0)
    mapped = fit(tmp_path / "mapped", data=features, **settings)
    assert isinstance(mapped.task.train.examples, MappedEmbedded)
    assert len(list(features.glob("vectors-*.npy"))) == 1
    facts = [json.loads((run.path / "spec.json").read_text())["facts"] for run in (usual, mapped)]
    assert facts[0] == facts[1]
    for a, b in zip(usual.method.net.parameters(), mapped.method.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(predict(tmp_path / "mapped", photos).probabilities, predicted, atol=1e-5)
    np.testing.assert_allclose(predict(tmp_path / "mapped", features).probabilities, predicted, atol=1e-5)
