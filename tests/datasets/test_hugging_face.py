"""Data sets of Hugging Face `datasets`: in, from disk and from memory, and out with an audit, by the real package."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import warpi
from warpi.audit.decisions import Choice, Store
from warpi.audit.hugging_face import save_with_audit
from warpi.audit.make_audit import audit
from warpi.audit.result import read_audit
from warpi.cli.app import main
from warpi.datasets.hugging_face import extract
from warpi.errors import UserError

hf = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")
parquet = pytest.importorskip("pyarrow.parquet")
RNG = np.random.default_rng(0)
N = 80
TRUE = np.arange(N) % 2
CLASSES = ["zebra", "ant", "never used"]  # not in alphabetical order
COUNT_LETTERS = """
import torch

def count_letters(texts):
    return torch.tensor([[len(text), text.count("a"), int(text.split()[-1])] for text in texts], dtype=torch.float32)
"""


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Any:
    hf.disable_progress_bars()
    yield
    hf.enable_progress_bars()


def make_table() -> Any:
    kinds = {"a": hf.Value("float32"), "kind": hf.Value("string"), "vec": hf.List(hf.Value("float32"))}
    kinds |= {"label": hf.ClassLabel(names=CLASSES), "key": hf.Value("string")}
    wrong = TRUE.copy()
    wrong[:6] = 1 - wrong[:6]
    columns = {"a": TRUE + RNG.normal(size=N) * 0.1, "kind": [f"k{k}" for k in TRUE], "vec": RNG.normal(size=(N, 3))}
    columns |= {"label": wrong, "key": [f"row-{i}" for i in range(N)]}
    return hf.Dataset.from_dict({name: list(values) for name, values in columns.items()}, features=hf.Features(kinds))


def make_images() -> Any:
    pixels = [RNG.integers(0, 60, (18, 16, 3)) + 150 * k for k in TRUE.tolist()]
    kinds = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["dark", "light"])})
    images = [Image.fromarray(x.astype(np.uint8)) for x in pixels]
    return hf.Dataset.from_dict({"image": images, "label": TRUE.tolist()}, features=kinds)


@pytest.fixture(scope="module")
def table() -> Any:
    return make_table()


@pytest.fixture(scope="module")
def images() -> Any:
    return make_images()


def names(dataset: warpi.Dataset) -> list[str]:
    return [dataset.classes[k] for k in dataset.y.tolist()]


class TestRead:
    @pytest.mark.parametrize("form", ["save_to_disk", "splits", "parquet"])
    def test_a_table(self, table: Any, tmp_path: Path, form: str) -> None:
        small = table.select(range(10, 20))
        if form == "save_to_disk":
            table.save_to_disk(tmp_path / "d")
        elif form == "splits":
            hf.DatasetDict(train=table, validation=small, trusted=small).save_to_disk(tmp_path / "d")
        else:
            (tmp_path / "d" / "data").mkdir(parents=True)
            for i, part in enumerate((table.select(range(30)), table.select(range(30, N)))):
                part.to_parquet(tmp_path / "d" / "data" / f"train-0000{i}-of-00002.parquet")
            small.to_parquet(tmp_path / "d" / "data" / "test-00000-of-00001.parquet")
        read, _ = warpi.load_dataset(f"hf:{tmp_path}/d", drop=["key"])
        assert names(read) == [CLASSES[k] for k in table["label"]]
        assert read.examples.shape[0] == 6  # a, two kinds, three numbers of vec
        assert (read.test is None) == (form == "save_to_disk")
        if read.test is not None:
            assert read.test.y.tolist() == read.y[10:20].tolist()
        assert (read.meta is not None) == (form == "splits")

    def test_images(self, images: Any, tmp_path: Path) -> None:
        images.save_to_disk(tmp_path / "d")
        read, _ = warpi.load_dataset(f"hf:{tmp_path}/d")
        assert names(read) == [["dark", "light"][k] for k in TRUE]
        x = read.examples.x  # type: ignore[attr-defined]
        assert x.shape == (N, 3, 16, 16)
        middle = np.stack([np.asarray(image)[1:17] for image in images["image"]])
        assert np.array_equal(x.numpy(), middle.transpose(0, 3, 1, 2))  # the center square, without a loss

    def test_texts_objects_and_selected_rows(self, table: Any) -> None:
        """Rows of a Dataset in memory that was selected and shuffled, with texts."""
        words = [f"the {('cat', 'dog')[k]} sat on mat number {i}" for i, k in enumerate(TRUE.tolist())]
        texts = table.add_column("text", words).select_columns(["text", "label"]).shuffle(seed=1).select(range(60))
        read, _ = warpi.load_dataset(texts)
        assert names(read) == [CLASSES[k] for k in texts["label"]]

    def test_a_trusted_set_with_other_class_numbers(self, table: Any, tmp_path: Path) -> None:
        table.save_to_disk(tmp_path / "d")
        other = table.select(range(20)).cast_column("label", hf.Value("string"))
        turned = other.map(lambda row: {"label": CLASSES[int(row["label"])]})
        turned = turned.cast_column("label", hf.ClassLabel(names=CLASSES[::-1]))
        turned.save_to_disk(tmp_path / "t")
        run = warpi.fit(tmp_path / "run", data=f"hf:{tmp_path}/d", trusted=f"hf:{tmp_path}/t", method="ce", epochs=1)
        assert run.task.meta is not None
        assert [run.data.dataset.classes[k] for k in run.task.meta.y.tolist()] == [
            CLASSES[k] for k in table["label"][:20]
        ]

    def test_missing_labels_and_strange_splits(self, table: Any, tmp_path: Path) -> None:
        codes = list(table["label"])
        codes[3] = -1
        blank = table.remove_columns(["label"]).add_column("label", codes)
        blank = blank.cast_column("label", hf.ClassLabel(names=CLASSES))
        with pytest.raises(UserError, match="row 3: column 'label' is empty"):
            warpi.load_dataset(blank)
        hf.DatasetDict(one=table, two=table).save_to_disk(tmp_path / "d")
        with pytest.raises(UserError, match="has the splits one, two; allowed are train, test, validation and trusted"):
            warpi.load_dataset(f"hf:{tmp_path}/d")

    def test_what_is_not_on_disk(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="nothing is downloaded"):
            warpi.load_dataset("hf:mnist")
        links = hf.Dataset.from_dict({"image": ["https://example.org/a.png"] * 2, "label": ["a", "b"]})
        links = links.cast_column("image", hf.Image())
        (tmp_path / "d").mkdir()
        parquet.write_table(links.with_format("arrow")[:], tmp_path / "d" / "train.parquet")
        with pytest.raises(UserError, match=r"row 0: https://example\.org/a\.png is not a file; .* downloaded"):
            warpi.load_dataset(f"hf:{tmp_path}/d")
        (tmp_path / "e").mkdir()
        for name in ("state.json", "dataset_info.json"):
            (tmp_path / "e" / name).write_text("{")
        with pytest.raises(UserError, match="cannot be read by datasets"):
            warpi.load_dataset(f"hf:{tmp_path}/e")


class TestRoundTrip:
    def test_a_table_loses_nothing(self, table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        other = table.select(range(4)).remove_columns(["key"]).add_column("key", list("abcd"))
        source = hf.DatasetDict(train=table, test=other.select_columns(list(table.features)))
        run = str(tmp_path / "run")
        warpi.fit(run, data=source)
        assert main(["audit", run, "--quiet", "--hf", f"{tmp_path}/audited"]) == 0
        audited = hf.load_from_disk(tmp_path / "audited")
        assert audited["test"].to_dict() == source["test"].to_dict()
        train = audited["train"]
        assert {name: train.features[name] for name in table.features} == dict(table.features)
        assert train.select_columns(list(table.features)).to_dict() == table.to_dict()
        quality, suggested = train["label_quality"], [CLASSES[k] for k in train["suggested_label"]]
        assert max(quality[:6]) < min(quality[6:])
        stored = read_audit(run)
        assert train["label_quality"] == stored.label_quality.tolist()
        assert suggested == [stored.classes[k] for k in stored.suggested]
        assert train["is_label_issue"] == stored.is_label_issue.tolist()

        store = Store(Path(run) / "review" / "decisions.sqlite", {})
        store.decide([Choice(71, 0, "change", "zebra", "ant", None)], "t", "s")
        store.close()
        capsys.readouterr()
        assert main(["correct", run, "--hf", f"{tmp_path}/fixed"]) == 0
        assert f"next: warpi fit --data {tmp_path}/fixed" in capsys.readouterr().out
        fixed = hf.load_from_disk(tmp_path / "fixed")["train"]
        expected = [stored.classes[k] for k in stored.posterior.argmax(1)]
        assert expected != [CLASSES[k] for k in table["label"]]
        expected[71] = "zebra"
        assert [CLASSES[k] for k in fixed["label"]] == expected
        assert [CLASSES[k] for k in fixed["given"]] == [CLASSES[k] for k in table["label"]]
        assert set(fixed["changed_by"]) == {"", "audit", "person"}
        again, _ = warpi.load_dataset(f"hf:{tmp_path}/fixed")
        assert names(again) == expected
        assert again.examples.shape[0] == 6, "the columns of the audit are not features"

    def test_images_lose_nothing(self, images: Any, tmp_path: Path) -> None:
        images.save_to_disk(tmp_path / "d")
        run = str(tmp_path / "run")
        flags = ["--method", "ce", "--net", "mlp", "--epochs", "2", "--quiet"]
        assert main(["fit", "--data", f"hf:{tmp_path}/d", "--out", run, *flags]) == 0
        assert json.loads((tmp_path / "run" / "spec.json").read_text())["spec"]["data"] == f"{tmp_path}/d"
        assert main(["audit", run, "--folds", "0", "--quiet", "--hf", f"{tmp_path}/audited"]) == 0
        audited = hf.load_from_disk(tmp_path / "audited")
        assert len(audited) == N
        raw = [each.cast_column("image", hf.Image(decode=False)) for each in (images, audited)]
        assert [p["bytes"] for p in raw[0]["image"]] == [p["bytes"] for p in raw[1]["image"]]
        assert list(audited["label"]) == TRUE.tolist()
        assert main(["predict", run, "--data", f"hf:{tmp_path}/d", "--csv", f"{tmp_path}/p.csv"]) == 0
        assert len((tmp_path / "p.csv").read_text().splitlines()) == N + 1

    def test_a_csv_and_an_image_folder_become_data_sets(self, tmp_path: Path) -> None:
        lines = ["size,word,label", *(f"{k + i / 100},w{k},{'ab'[k]}" for i, k in enumerate(TRUE.tolist()))]
        (tmp_path / "t.csv").write_text("\n".join(lines))
        for k, name in enumerate("ab"):
            (tmp_path / "f" / name).mkdir(parents=True)
            for i in range(20):
                Image.new("RGB", (16, 16), (100 * k + i, 0, 0)).save(tmp_path / "f" / name / f"{i:02}.png")
        flags = ["--method", "ce", "--net", "mlp", "--epochs", "2", "--quiet"]
        for data in ("t.csv", "f"):
            run = f"{tmp_path}/run-{data}"
            assert main(["fit", "--data", f"{tmp_path}/{data}", "--out", run, *flags]) == 0
            assert main(["audit", run, "--folds", "0", "--quiet", "--hf", f"{tmp_path}/out-{data}"]) == 0
        written = hf.load_from_disk(f"{tmp_path}/out-t.csv")
        assert written["size"][:2] == [0.0, 1.01]
        assert written["label"][:2] == ["a", "b"]
        assert all(0 <= q <= 1 for q in written["label_quality"])
        pictures = hf.load_from_disk(f"{tmp_path}/out-f")
        assert pictures[25]["image"].getpixel((0, 0)) == (105, 0, 0)
        assert (pictures[25]["path"], pictures[25]["label"]) == ("b/05.png", "b")

    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        run = f"{tmp_path}/run"
        warpi.fit(run, data="digits", limit=200, method="ce", net="mlp", epochs=1)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("")
        audited = audit(run, folds=0)
        with pytest.raises(UserError, match="is not empty; choose another folder for --hf"):
            save_with_audit(tmp_path / "out", audited, warpi.load_dataset("digits")[0], "digits", None)


WORDS = st.text("ab ,;'\"\n\r\té<", max_size=5)


@st.composite
def data_sets(draw: st.DrawFn) -> Any:
    """Data sets with any texts, missing cells, names of classes, and columns of several annotators."""
    n = draw(st.integers(4, 9))
    classes = draw(st.lists(WORDS.map(str.strip).filter(bool), min_size=2, max_size=4, unique_by=str.casefold))
    kinds = {"note": hf.Value("string"), "size": hf.Value("float64"), "count": hf.Value("int32")}
    kinds |= {"flag": hf.Value("bool"), "vec": hf.List(hf.Value("float32"))}
    kinds |= {name: hf.ClassLabel(names=classes) for name in ("label", "ann", "ben", "carl")}
    numbers = st.integers(0, len(classes) - 1)
    cells = {
        "note": st.none() | WORDS,
        "size": st.none() | st.floats(allow_nan=False, width=32),
        "count": st.none() | st.integers(-9, 9),
        "flag": st.none() | st.booleans(),
        "vec": st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=2),
        "label": numbers,
    }
    cells |= dict.fromkeys(("ann", "ben", "carl"), st.none() | numbers)
    columns = {name: draw(st.lists(cell, min_size=n, max_size=n)) for name, cell in cells.items()}
    columns["label"][:2] = [0, 1]
    return hf.Dataset.from_dict(columns, features=hf.Features(kinds))


@settings(max_examples=15, deadline=None)
@given(data_sets(), st.data())
def test_any_data_set_is_written_without_a_loss(
    tmp_path_factory: pytest.TempPathFactory, source: Any, choose: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    hf.DatasetDict(train=source, test=source.select(range(2))).save_to_disk(folder / "d")
    read, _ = warpi.load_dataset(f"hf:{folder}/d", drop=["note", "size", "count", "flag", "ann", "ben", "carl"])
    n = len(read.y)
    p = np.random.default_rng(n).dirichlet(np.ones(read.n_classes), n)
    full = audit(probabilities=p, labels=names(read), classes=list(read.classes))
    kept = np.array(choose.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    arrays = {name: value[kept] for name, value in vars(full).items() if isinstance(value, np.ndarray) and name != "T"}
    part = replace(full, **arrays)
    save_with_audit(folder / "out", part, read, str(folder / "d"), None)
    written = hf.load_from_disk(folder / "out")
    assert written["test"].to_dict() == source.select(range(2)).to_dict()
    train = written["train"]
    assert {name: train.features[name] for name in source.features} == dict(source.features)
    assert train.select_columns(list(source.features)).to_dict() == source.to_dict()
    assert [quality is not None for quality in train["label_quality"]] == kept.tolist()
    save_with_audit(folder / "less", part, read, str(folder / "d"), None, dropped=[n - 1])
    less = hf.load_from_disk(folder / "less")["train"]
    assert less.select_columns(list(source.features)).to_dict() == source.select(range(n - 1)).to_dict()


class TestEmbed:
    def test_images_become_files_whose_vectors_are_those_of_the_images(self, images: Any, tmp_path: Path) -> None:
        other = images.select(range(6)).cast_column("image", hf.Image(decode=False))
        jpeg = io.BytesIO()
        images[0]["image"].save(jpeg, "JPEG")
        other = other.map(
            lambda row, i: {"image": {"bytes": jpeg.getvalue()} if i == 0 else row["image"]}, with_indices=True
        )
        source = hf.DatasetDict(train=images, validation=other.cast_column("image", hf.Image()))
        source.rename_column("label", "kind").save_to_disk(tmp_path / "d")
        out = tmp_path / "features"
        assert warpi.embed(f"hf:{tmp_path}/d", out, "pixels:16", label="kind", device="cpu").computed == N + 6
        read, _ = warpi.load_dataset(str(out))
        assert names(read) == [["dark", "light"][k] for k in TRUE]
        assert read.test is not None
        assert read.test.y.tolist() == TRUE[:6].tolist()
        middle = np.stack([np.asarray(image)[1:17] for image in images["image"]]) / 255
        x = read.examples.flat(torch.arange(N)).numpy()
        assert np.allclose(x, middle.transpose(0, 3, 1, 2).reshape(N, -1), atol=1e-3)
        assert read.files is not None
        assert read.files.paths[71] == "train/0000071.png", "the name of a file is the number of its row"
        assert (out / "images" / "test" / "0000000.jpg").read_bytes() == jpeg.getvalue()
        assert main(["embed", f"hf:{tmp_path}/d", "--with", "pixels:16", "--out", str(out), "--label", "kind"]) == 0
        source["train"] = images.select(range(N - 1, -1, -1))
        source.rename_column("label", "kind").save_to_disk(tmp_path / "e")
        with pytest.raises(UserError, match="differs from the data set as it is now; choose another --out"):
            warpi.embed(f"hf:{tmp_path}/e", out, "pixels:16", label="kind")

    def test_labels_that_an_audit_replaced_are_kept(self, images: Any, tmp_path: Path) -> None:
        corrected = images.add_column("given", ["light", *(["dark", "light"][k] for k in TRUE[1:])])
        corrected.add_column("changed_by", ["audit", *[""] * (N - 1)]).save_to_disk(tmp_path / "d")
        warpi.embed(f"hf:{tmp_path}/d", tmp_path / "out", "pixels:4")
        read, _ = warpi.load_dataset(str(tmp_path / "out"))
        assert read.before_audit is not None
        assert read.before_audit.tolist() == [1, *[-1] * (N - 1)]

    def test_images_interrupted_while_they_are_written(
        self, images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images.save_to_disk(tmp_path / "d")
        out, written = tmp_path / "features", []

        def fail(path: Path, content: bytes, overwrite: bool) -> None:
            if len(written) == 10:
                raise KeyboardInterrupt
            written.append(path)
            write(path, content, overwrite)

        write = extract._write
        monkeypatch.setattr(extract, "_write", fail)
        with pytest.raises(KeyboardInterrupt):
            warpi.embed(f"hf:{tmp_path}/d", out, "pixels:4")
        monkeypatch.undo()
        assert warpi.embed(f"hf:{tmp_path}/d", out, "pixels:4").rows == N

    def test_a_run_on_features_of_images_loses_nothing(
        self, images: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        images = images.add_column("camera", [f"c{i % 3}" for i in range(N)])
        images.save_to_disk(tmp_path / "d")
        out, run = str(tmp_path / "features"), str(tmp_path / "run")
        warpi.embed(f"hf:{tmp_path}/d", out, "pixels:4")
        assert main(["fit", "--data", out, "--method", "ce", "--epochs", "2", "--quiet", "--out", run]) == 0
        assert main(["audit", run, "--folds", "0", "--quiet", "--hf", f"{tmp_path}/audited"]) == 0
        audited = hf.load_from_disk(tmp_path / "audited")
        raw = [each.cast_column("image", hf.Image(decode=False)) for each in (images, audited)]
        assert [p["bytes"] for p in raw[0]["image"]] == [p["bytes"] for p in raw[1]["image"]]
        assert list(audited["camera"]) == list(images["camera"])
        assert list(audited["label"]) == TRUE.tolist()
        assert audited["label_quality"] == read_audit(run).label_quality.tolist()
        capsys.readouterr()
        assert main(["correct", run, "--hf", f"{tmp_path}/fixed"]) == 0
        assert f"next: warpi embed hf:{tmp_path}/fixed --with pixels:4 --out FOLDER" in capsys.readouterr().out
        assert len(hf.load_from_disk(tmp_path / "fixed")) == N
        images.remove_columns(["label"]).save_to_disk(tmp_path / "new")
        new = warpi.predict(run, f"hf:{tmp_path}/new")
        assert new.paths is None
        assert np.array_equal(new.probabilities, warpi.predict(run, out).probabilities)
        assert main(["fit", "--data", out, "--trusted", f"hf:{tmp_path}/d", "--quiet", "--out", f"{tmp_path}/t"]) == 2
        assert f"embed it too (warpi embed hf:{tmp_path}/d --with pixels:4 --out FOLDER)" in capsys.readouterr().err

    def test_texts(self, images: Any, tmp_path: Path) -> None:
        """A column of texts beside one of images, which is used with `text` only."""
        words = [f"{'the cat sat' if k else 'a dog ran'} {i}" for i, k in enumerate(TRUE.tolist())]
        data = images.add_column("caption", words)
        hf.DatasetDict(train=data, test=data.select(range(70, 75))).save_to_disk(tmp_path / "d")
        data.select(range(20)).save_to_disk(tmp_path / "t")
        data.select_columns(["caption"]).save_to_disk(tmp_path / "new")

        (tmp_path / "mine.py").write_text(COUNT_LETTERS)
        embedder = f"module:{tmp_path}/mine.py:count_letters"
        out, run = tmp_path / "features", tmp_path / "run"
        assert warpi.embed(f"hf:{tmp_path}/d", out, embedder, text="caption").rows == N + 5
        read, _ = warpi.load_dataset(str(out))
        assert names(read) == [["dark", "light"][k] for k in TRUE]
        assert read.examples.flat(torch.arange(N))[:, 0].tolist() == [float(len(text)) for text in words]
        assert read.test is not None
        done = warpi.fit(run, data=out, trusted=f"hf:{tmp_path}/t", method="glc", epochs=2)
        assert done.task.meta is not None
        assert len(done.task.meta) == 20
        by_text, by_features = warpi.predict(run, f"hf:{tmp_path}/new"), warpi.predict(run, out)
        assert np.array_equal(by_text.probabilities, by_features.probabilities[:N])

    def test_files_that_are_not_images_are_not_copied(self, tmp_path: Path) -> None:
        """A data set of a stranger may name any file."""
        (tmp_path / "notes.txt").write_text("secret")
        Image.new("RGB", (9, 9)).save(tmp_path / "a.tif")
        (tmp_path / "d").mkdir()
        for name, message in (("notes.txt", "row 1: .*notes.txt is not an image"), ("a.tif", "")):
            kinds = hf.Features({"image": hf.Image(), "label": hf.Value("string")})
            paths = [str(tmp_path / file) for file in ("a.tif", name)]
            source = hf.Dataset.from_dict({"image": paths, "label": ["x", "y"]}, features=kinds)
            parquet.write_table(source.data.table, tmp_path / "d" / "train.parquet")
            if message:
                with pytest.raises(UserError, match=message):
                    warpi.embed(f"hf:{tmp_path}/d", tmp_path / name[0], "pixels:4")
                assert not list(tmp_path.glob("n/images/train/*1.*"))
            else:
                assert warpi.embed(f"hf:{tmp_path}/d", tmp_path / "out", "pixels:4").rows == 2

    def test_clear_errors(self, images: Any, tmp_path: Path) -> None:
        images.save_to_disk(tmp_path / "d")
        with pytest.raises(
            UserError, match="has no column 'kind'; columns: image, label; choose the label with --label"
        ):
            warpi.embed(f"hf:{tmp_path}/d", tmp_path / "out", "pixels:4", label="kind")
        with pytest.raises(UserError, match=r"reads data sets from disk: dataset\.save_to_disk\(FOLDER\)"):
            warpi.embed(images, tmp_path / "out", "pixels:4")
        with pytest.raises(UserError, match="nothing is downloaded"):
            warpi.embed("hf:mnist", tmp_path / "out", "pixels:4")


def test_probabilities_follow_the_order_of_the_classes(table: Any) -> None:
    p = np.full((N, 3), 0.05)
    p[np.arange(N), TRUE] = 0.9
    result = warpi.audit.audit(probabilities=p, labels=table)
    assert result.classes == tuple(CLASSES)
    assert set(np.argsort(result.label_quality)[:6]) == set(range(6))
