"""Columns of tables as features: missing and unknown values, texts, vectors, stored encodings."""

import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import warpi
from warpi.data.examples import Examples, TensorExamples
from warpi.data.numeric import CategoryColumn, Columns, DateColumn, Features, NumberColumn, TextColumn, VectorColumn
from warpi.data.placeholder import examples_from_form
from warpi.data.sparse import SparseExamples, encode_texts, fit_texts
from warpi.datasets.columns.encode import TableOptions
from warpi.datasets.columns.raw import is_text_folder
from warpi.datasets.load import read_dataset
from warpi.datasets.tables import read_new_table, read_table
from warpi.errors import UserError
from warpi.review.open import open_data
from warpi.runs.spec import DataSpec
from warpi.training import checkpoint
from warpi.utils.files import format_csv

pd = pytest.importorskip("pandas")


def write(path: Path, names: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(format_csv(names, rows))
    return path


def dense(examples: Examples) -> np.ndarray:
    return examples.x.toarray() if isinstance(examples, SparseExamples) else examples.x.numpy()  # type: ignore[attr-defined]


def columns_of(data: warpi.Dataset) -> Columns:
    assert isinstance(data.encoding, Columns)
    return data.encoding


# -- missing cells -----------------------------------------------------------------------------------------------------

ROWS = [("1", "u", "p"), ("", "", "q"), ("4", "v", "p"), ("3", "u", "q")]


def test_missing_cells_get_the_median_and_a_mark_or_a_category(tmp_path: Path, caplog: Any) -> None:
    data = read_table(write(tmp_path / "t.csv", ("a", "c", "label"), ROWS))
    #                                     a  gap  '' u  v
    np.testing.assert_array_equal(
        dense(data.examples), [[1, 0, 0, 1, 0], [3, 1, 1, 0, 0], [4, 0, 0, 0, 1], [3, 0, 0, 1, 0]]
    )
    assert columns_of(data).features == {"a": NumberColumn(3.0, marks_gaps=True), "c": CategoryColumn(("", "u", "v"))}
    (message,) = caplog.messages
    assert "cells are missing in 'a' (1 of 4), 'c' (1 of 4): missing numbers become the median" in message
    assert message.endswith("to refuse missing cells: --missing error")
    assert [cell for _, cell in sorted(columns_of(data).decode(dense(data.examples)[1]).items())] == ["", ""]
    with pytest.raises(UserError, match=r"missing in 'a' \(1 of 4, .*, 'c' .* --drop a,c, or use --missing fill$"):
        read_table(tmp_path / "t.csv", options=TableOptions(missing="error"))


def test_each_number_knows_the_mark_of_its_missing_cells(tmp_path: Path) -> None:
    """Features: a, mark of a; b; '', u, v of c; days, months and weekdays of d, mark of d."""
    rows = [("1", "1", "u", "2024-01-31", "p"), ("", "2", "", "", "q"), ("4", "3", "v", "2024-03-01", "p")] * 2
    data = read_table(write(tmp_path / "t.csv", ("a", "b", "c", "d", "label"), rows))
    assert isinstance(data.examples, Features)
    marks = data.examples.find_marks()
    assert marks is not None
    assert marks.tolist() == [1, -1, -1, -1, -1, -1, 9, 9, 9, -1]
    x = dense(data.examples)
    assert x[1, [1, 9]].tolist() == [1, 1]


def test_medians_are_those_of_the_training_rows(tmp_path: Path) -> None:
    rows = [("1", "p", "train"), ("2", "q", "train"), ("", "p", "train"), ("900", "q", "test"), ("800", "q", "test")]
    data = read_table(write(tmp_path / "t.csv", ("a", "label", "split"), rows))
    assert columns_of(data).features["a"] == NumberColumn(1.5, marks_gaps=True)


def test_gaps_where_the_training_table_has_none(tmp_path: Path, caplog: Any) -> None:
    """They get the median and no category. A gap in a column that had gaps is nothing new."""
    first = read_table(write(tmp_path / "t.csv", ("a", "b", "c", "label"), [(1, 5, "u", "p"), (3, "", "v", "q")]))
    caplog.clear()
    rows = [("", "", "", "p"), (3, 6, "w", "q")]
    second = read_table(write(tmp_path / "s.csv", ("a", "b", "c", "label"), rows), like=first)
    np.testing.assert_array_equal(dense(second.examples), [[2, 5, 1, 0, 0], [3, 6, 0, 0, 0]])
    gaps, unknown = caplog.messages
    assert "cells are missing in 'a' (1 of 2), 'c' (1 of 2), but not in the training table" in gaps
    assert "count as unknown: 'c' (1 row: 'w'); to refuse them: --unknown error" in unknown
    with pytest.raises(UserError, match=r"'w'; allowed: u, v; 1 row with values that are not in the training table"):
        read_table(tmp_path / "s.csv", like=first, options=TableOptions(unknown="error"))


def test_an_unknown_value_counts_as_missing_if_there_is_such_a_category(tmp_path: Path) -> None:
    first = read_table(write(tmp_path / "t.csv", ("a", "c", "label"), ROWS))
    new = read_new_table(write(tmp_path / "n.csv", ("c", "a"), [("new", "1")]), columns_of(first), first.classes)
    np.testing.assert_array_equal(dense(new.examples), [[1, 0, 1, 0, 0]])


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="'fil'; did you mean 'fill'"):
        TableOptions(missing="fil")
    with pytest.raises(UserError, match=r"--types takes COLUMN=KIND, where KIND is one of number, .*; got 'zip'"):
        TableOptions(types=("zip",)).kinds()
    with pytest.raises(UserError, match="omit --types and --text"):
        read_dataset("digits", options=TableOptions(text=("a",)))
    assert DataSpec(types=("a=b=date",), text=("c",)).table_options.kinds() == {"c": "text", "a=b": "date"}


def test_kinds_that_the_user_chooses(tmp_path: Path) -> None:
    rows = [(8000 + k % 3, f"2024-01-0{k % 9 + 1}", f"{k % 4} rooms", "pq"[k % 2]) for k in range(30)]
    file = write(tmp_path / "t.csv", ("zip", "day", "size", "label"), rows)
    chosen = TableOptions(types=("zip=category", "day=category"), text=("size",))
    columns = columns_of(read_table(file, options=chosen)).features
    assert [column.kind for column in columns.values()] == ["category", "category", "text"]
    with pytest.raises(UserError, match=r"has no column 'zib' \(did you mean 'zip'\?\).*--types and --text"):
        read_table(file, options=TableOptions(types=("zib=category",)))
    with pytest.raises(UserError, match="column 'size' cannot be read as dates: it contains '0 rooms'"):
        read_table(file, options=TableOptions(types=("size=date",)))


# -- dates, vectors ----------------------------------------------------------------------------------------------------


def test_parquet_dates_and_vectors(tmp_path: Path) -> None:
    days = pd.to_datetime(["2024-01-31 12:00", None, "2024-02-01 00:00", "2024-02-02 00:00"])
    frame = pd.DataFrame(
        {"when": days, "took": days - days[0], "v": [[1.0, 2], [3, 4], None, [5, 9]], "label": [0, 1, 1, 0]}
    )
    frame.assign(at=days.time).to_parquet(tmp_path / "times.parquet")
    assert columns_of(read_table(tmp_path / "times.parquet")).features["at"] == NumberColumn(0.0, True, "clock")
    frame.to_parquet(tmp_path / "t.parquet")
    data = read_table(tmp_path / "t.parquet")
    features = columns_of(data).features
    assert features["when"] == DateColumn(19754.0, marks_gaps=True)
    assert features["took"] == NumberColumn(43200.0, marks_gaps=True)
    assert features["v"] == VectorColumn((3.0, 5.0))
    x = dense(data.examples)
    np.testing.assert_array_equal(x[:, :4], [[19753.5, 1, 2, 0], [19754, 2, 3, 1], [19754, 2, 3, 0], [19755, 2, 4, 0]])
    np.testing.assert_array_equal(x[:, -2:], [[1, 2], [3, 4], [3, 5], [5, 9]])
    assert columns_of(data).decode(x[0]) == {"when": "2024-01-31", "took": "0", "v": "[1, 2]"}
    frame.assign(v=[[1.0]] * 4).to_parquet(tmp_path / "s.parquet")
    with pytest.raises(UserError, match="column 'v' is a vector of 2 numbers in the training table, but not here"):
        read_table(tmp_path / "s.parquet", like=data)


@given(st.lists(st.datetimes(pd.Timestamp("1900-01-01"), pd.Timestamp("2100-01-01")), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_dates_of_csv_and_parquet_agree(dates: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = pd.DataFrame({"when": dates, "label": ["p"] * len(dates)})
        frame.to_parquet(f"{folder}/t.parquet")
        frame.to_csv(f"{folder}/t.csv", index=False)
        a, b = (dense(read_table(Path(f"{folder}/t.{end}")).examples) for end in ("parquet", "csv"))
    np.testing.assert_allclose(a, b, atol=1e-2)


# -- stored encodings --------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-1e6, 1e6, width=32)
CELLS = {
    "number": NUMBERS.map(repr),
    "money": st.integers(0, 10**7).map("${:,}".format),
    "word": st.sampled_from(["red", "two words", "a, b", "ü"]),
    "date": st.dates().map(str),
    "text": st.lists(st.sampled_from(["the", "big", "red", "cat", "sees", "it"]), min_size=1, max_size=8).map(" ".join),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    """Names and rows of a table in which any feature may be missing."""
    n = draw(st.integers(2, 8))
    names = draw(st.lists(st.sampled_from(list(CELLS)), min_size=1, max_size=5, unique=True))
    columns = [draw(st.lists(st.just("") | CELLS[name], min_size=n, max_size=n)) for name in names]
    labels = draw(st.lists(st.sampled_from("pq"), min_size=n, max_size=n))
    return [*names, "label"], [list(row) for row in zip(*columns, labels, strict=True)]


@given(tables(), st.data())
@settings(max_examples=25, deadline=None)
def test_any_table_with_gaps_is_read_and_read_again(
    made: tuple[list[str], list[list[str]]], data: st.DataObject
) -> None:
    """The same rows have the same features: in a second file, in another order, through the JSON form."""
    names, rows = made
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, "t.csv"), names, rows)
        first = read_table(file)
        x = dense(first.examples)
        columns = columns_of(first)
        assert x.shape == (len(rows), columns.width)
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(dense(read_table(file, like=first).examples), x)
        stored = json.loads(json.dumps(columns.form()))
        assert Columns.from_form(stored) == columns
        order = data.draw(st.permutations(range(len(rows))))
        gap = data.draw(st.sampled_from(names[:-1]))
        other = write(Path(folder, "o.csv"), names[::-1], [rows[k][::-1] for k in order])
        new = read_new_table(other, Columns.from_form(stored), first.classes)
        np.testing.assert_array_equal(dense(new.examples), x[order])
        empty = [[("" if name == gap else cell) for name, cell in zip(names, row, strict=True)] for row in rows]
        assert np.isfinite(dense(read_table(write(Path(folder, "g.csv"), names, empty), like=first).examples)).all()


def test_forms_of_older_versions() -> None:
    """They have categories or None, and no medians: then a gap is an error."""
    old = {"label": "y", "categories": {"a": None, "c": ("u", "v")}, "drop": ("id",), "double": False}
    columns = Columns.from_form(old)
    assert columns == Columns("y", {"a": NumberColumn(), "c": CategoryColumn(("u", "v"))}, ("id",))
    form = {"features": True, "shape": [3], "kind": "torch.float32", "mean": torch.zeros(3), "std": torch.ones(3)}
    examples = examples_from_form({**form, "crop": None, "columns": old})
    assert isinstance(examples, Features)
    assert examples.columns == columns
    with tempfile.TemporaryDirectory() as folder:
        new = read_new_table(write(Path(folder, "n.csv"), ("a", "c"), [(1, "u"), (2, "w")]), columns, ("p", "q"))
        np.testing.assert_array_equal(dense(new.examples), [[1, 1, 0], [2, 0, 0]])
        with pytest.raises(UserError, match="made by a version that did not store medians"):
            read_new_table(write(Path(folder, "g.csv"), ("a", "c"), [("", "u")]), columns, ("p", "q"))


# -- texts -------------------------------------------------------------------------------------------------------------

SPORT = ["football", "goal", "team", "match", "player", "coach"]
MONEY = ["stock", "market", "bank", "price", "trade", "profit"]
COMMON = ["the", "of", "in", "on", "with", "and"]


def make_texts(n: int, seed: int = 0) -> list[str]:
    """Texts about sport and money, in turns."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice([*(SPORT, MONEY)[k % 2], *COMMON], size=9)) for k in range(n)]


def test_tf_idf_against_its_definition() -> None:
    texts = ["red red car", "blue car", "red bike car", "one two"]
    column = fit_texts(texts)
    assert column is not None
    assert column.vocabulary == ("car", "red")
    assert column.idf == pytest.approx((math.log(5 / 4) + 1, math.log(5 / 3) + 1))
    weights = np.array([[1 * column.idf[0], (1 + math.log(2)) * column.idf[1]], [column.idf[0], 0]])
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    np.testing.assert_allclose(encode_texts([*texts[:2], "new words"], column).toarray(), [*weights, [0, 0]], rtol=1e-6)
    assert fit_texts(["", "x y"]) is None
    chinese = fit_texts(["红色汽车", "蓝色汽车"])
    assert chinese is not None
    assert chinese.analyzer == "char"
    assert "汽车" in chinese.vocabulary


def test_texts_next_to_other_columns(tmp_path: Path) -> None:
    """Numbers are scaled to the size of words; the vocabulary is that of the training rows."""
    texts = make_texts(40)
    rows = [(text, 1000 * k, "uv"[k % 2], "pq"[k % 2], "train" if k < 30 else "test") for k, text in enumerate(texts)]
    rows.append(("only in the test rows tested tested", 0, "u", "p", "test"))
    data = read_table(write(tmp_path / "t.csv", ("text", "n", "c", "label", "split"), rows))
    examples = data.examples
    assert isinstance(examples, SparseExamples)
    column = columns_of(data).features["text"]
    assert isinstance(column, TextColumn)
    assert "tested" not in column.vocabulary
    np.testing.assert_allclose(np.linalg.norm(dense(examples)[:, : column.width], axis=1), 1, rtol=1e-5)
    n = dense(examples)[:, column.width]
    assert abs(np.median(n)) < 1e-6
    assert n.std() == pytest.approx(1, rel=1e-5)
    assert list(examples.texts["text"]) == texts[:30]
    scaled = examples.with_scale(examples.fit_scale(torch.arange(30)))
    (batch,) = scaled.stream([(torch.arange(30), 0)], augment=False)
    np.testing.assert_allclose(batch.views[0][:, column.width].numpy(), n, rtol=1e-5)
    words = np.delete(batch.views[0].numpy(), column.width, axis=1)
    assert (words**2).mean() == pytest.approx(1, rel=1e-5)  # words and categories have one scale
    np.testing.assert_allclose(scaled.normalized(np.arange(30)).toarray(), batch.views[0].numpy(), rtol=1e-6)
    cells = columns_of(data).decode(dense(examples)[7])
    assert cells["n"] == "7000"
    assert cells["c"] == "v"
    stored = checkpoint._decode(json.loads(json.dumps(checkpoint._encode(scaled.form(), tensors := {}))), tensors)
    again = examples_from_form(stored)
    assert isinstance(again, SparseExamples)
    assert again.columns == columns_of(data)


def test_long_texts_are_recognized_and_unique_names_are_not(tmp_path: Path) -> None:
    texts = [f"{text} {k}" for k, text in enumerate(make_texts(60))]
    rows = [(text, f"key {7 * k}", k % 5, "pq"[k % 2]) for k, text in enumerate(texts)]
    columns = columns_of(read_table(write(tmp_path / "t.csv", ("remark", "name", "a", "label"), rows)))
    assert [column.kind for column in columns.features.values()] == ["text", "number"]
    assert columns.drop == ("name",)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of texts with folders of classes for training and trusted examples."""
    for part, n in (("train", 40), ("trusted", 6)):
        for k, text in enumerate(make_texts(n, seed=n)):
            file = tmp_path / "texts" / part / ("sport", "money")[k % 2] / f"{k:02}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return tmp_path / "texts"


def test_a_folder_of_texts(texts: Path, tmp_path: Path) -> None:
    data = read_dataset(str(texts))
    assert data.classes == ("money", "sport")
    assert data.y.tolist() == [0] * 20 + [1] * 20
    assert data.meta is not None
    assert data.meta.y.tolist() == [0, 0, 0, 1, 1, 1]
    plain = read_dataset(str(texts / "train"))
    assert plain.examples.digest() == data.examples.digest()
    assert is_text_folder(texts)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    (tmp_path / "photos" / "about.txt").write_text("what they show")
    assert not is_text_folder(tmp_path / "photos")
    (texts / "train" / "loose.txt").write_text("text")
    with pytest.raises(UserError, match=r"loose\.txt is not in the folder of a class"):
        read_dataset(str(texts / "train"))


def test_runs_on_texts(texts: Path, tmp_path: Path) -> None:
    """Train, predict without the data, and show the original texts in a review."""
    run = warpi.fit(tmp_path / "run", data=texts, method="glc", epochs=2)
    new = tmp_path / "new"
    new.mkdir()
    for k, text in enumerate(make_texts(4, seed=9)):
        (new / f"{k}.txt").write_text(text)
    expected = warpi.predict(run, new)
    shutil.move(texts, tmp_path / "elsewhere")
    predictions = warpi.predict(tmp_path / "run", new)
    np.testing.assert_allclose(predictions.probabilities, expected.probabilities, atol=1e-6)
    assert predictions.paths == ("0.txt", "1.txt", "2.txt", "3.txt")
    items, _ = open_data(DataSpec(data=str(tmp_path / "elsewhere")))
    first = (tmp_path / "elsewhere" / "train" / "money" / "01.txt").read_text()
    assert [(cell.name, cell.value) for cell in items.describe(0)] == [("text", first)]
    (neighbor, *_) = items.nearest_trusted(0, {})
    assert neighbor["cells"][0][1] in make_texts(6, seed=6)


def test_the_scale_of_numbers_is_unchanged(tmp_path: Path) -> None:
    """A table without gaps and texts is stored as before, so that its fingerprint is the same."""
    data = read_table(write(tmp_path / "t.csv", ("a", "c", "label"), [(1, "u", "p"), (2.5, "v", "q")]))
    assert isinstance(data.examples, TensorExamples)
    assert data.examples.x.dtype == torch.float32
    np.testing.assert_array_equal(dense(data.examples), [[1, 1, 0], [2.5, 0, 1]])
