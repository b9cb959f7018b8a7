"""NoisyLabelClassifier: scikit-learn's checks, every kind of X, files, and training without trusted examples."""

import datetime
import json
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from scipy.sparse import csr_array, csr_matrix
from sklearn.base import clone
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import FitFailedWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict, cross_validate
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import Tensor, nn

from warpi import METHODS, Batch, Dataset, Log, Method, NoisyLabelClassifier, Recipe, UserError, WarPI, make_task, train
from warpi.data.numeric import make_features
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split
from warpi.datasets.load import read_dataset
from warpi.estimator.frames import UnknownCategories
from warpi.estimator.inputs import Layout, arrange
from warpi.estimator.pseudo_trusted import MAX_PER_CLASS, NoTrustedExamples, hold_out_pseudo_trusted
from warpi.methods.plain import CE
from warpi.methods.registry import CORE
from warpi.training.checkpoint import pack
from warpi.training.task import Task, Truth
from warpi.utils.seeding import derive, seeded

Arrays = tuple[np.ndarray, np.ndarray]


def arrays(split: Split | None) -> Arrays:
    assert split is not None
    return split.examples.flat(split.rows).numpy(), split.y.numpy()


@pytest.fixture(scope="module")
def small(digits: Dataset) -> tuple[Arrays, Arrays, Arrays]:
    """Noisy, trusted and test rows, few enough for fast tests."""
    task, truth = make_task(digits, "pair:0.3", meta=20, limit=400, val=0.0, seed=1)
    return arrays(task.train), arrays(task.meta), arrays(truth.test)


class Bare(nn.Module):
    """A network whose class takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)


def fast(method: Any = "ce", **params: Any) -> NoisyLabelClassifier:
    return NoisyLabelClassifier(method, **{"epochs": 2, "random_state": 0, **params})


# --- scikit-learn -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::warpi.estimator.pseudo_trusted.NoTrustedExamples")
@pytest.mark.parametrize("params", [{"epochs": 3, "batch_size": 16}, {"model": "logistic"}], ids=["network", "auto"])
def test_check_estimator(params: dict[str, Any]) -> None:
    """All checks pass; the one of array-API inputs needs an environment variable before scipy is imported."""
    results = check_estimator(NoisyLabelClassifier(**params), on_skip=None)
    skipped = {result["check_name"] for result in results if result["status"] != "passed"}
    assert len(results) > 40
    assert skipped <= (set() if os.environ.get("SCIPY_ARRAY_API") else {"check_array_api_input"})


def test_clone_pickle_and_cross_validation(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), _, (x_test, _) = small
    model = fast(settings={"weight_decay": 0.0})
    assert clone(model).get_params() == model.get_params()
    p = model.fit(x, y).predict_proba(x_test)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(x_test), p)
    assert len(pickle.dumps(model)) < 200_000, "no training data, no optimizer inside"
    np.testing.assert_array_equal(clone(model).fit(x, y).predict_proba(x_test), p)
    out = cross_val_predict(model, x, y, cv=StratifiedKFold(2), method="predict_proba")
    assert out.shape == (len(x), 10)


def test_pipeline_transforms_trusted_examples(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), (x_trusted, y_trusted), (x_test, _) = small
    with sklearn.config_context(enable_metadata_routing=True):
        model = fast("glc").set_fit_request(X_trusted=True, y_trusted=True)
        pipe = Pipeline([("scale", StandardScaler()), ("model", model)], transform_input=["X_trusted"])
        actual = pipe.fit(x, y, X_trusted=x_trusted, y_trusted=y_trusted).predict_proba(x_test)
    scale = StandardScaler().fit(x)
    expected = fast("glc").fit(scale.transform(x), y, scale.transform(x_trusted), y_trusted)
    np.testing.assert_allclose(actual, expected.predict_proba(scale.transform(x_test)), atol=1e-6)


def test_grid_search_routes_trusted_rows(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), (x_trusted, y_trusted), _ = small
    everything, labels = np.concatenate([x, x_trusted]), np.concatenate([y, y_trusted])
    trusted = np.arange(len(labels)) >= len(y)
    order = np.random.default_rng(0).permutation(len(labels))
    grid = GridSearchCV(fast("glc"), {"lr": [1e-6, 0.1]}, cv=[(order, order)])
    grid.fit(everything, labels, trusted=trusted)
    assert grid.best_params_ == {"lr": 0.1}
    direct = fast("glc", lr=0.1).fit(everything, labels, trusted=trusted)
    apart = fast("glc", lr=0.1).fit(x, y, x_trusted, y_trusted)
    np.testing.assert_allclose(direct.predict_proba(x), apart.predict_proba(x), atol=1e-6)
    assert (direct.label_quality_[trusted] == 1).all()
    assert (direct.label_quality_[~trusted] < 1).any()


# --- what it does -----------------------------------------------------------------------------------------------------


def test_same_networks_as_the_library(
    small: tuple[Arrays, Arrays, Arrays], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The same networks as the training loop of the library; no output, no files, unchanged global generators."""
    (x, y), (x_trusted, y_trusted), (x_test, _) = small
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7), np.random.seed(7), random.seed(7)  # noqa: NPY002
    names = np.array([f"digit {k}" for k in range(10)])
    model = fast("warpi", random_state=3).fit(x, names[y], x_trusted, names[y_trusted])
    draws = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(7), np.random.seed(7), random.seed(7)  # noqa: NPY002
    assert draws == (torch.rand(1).item(), np.random.rand(), random.random())  # noqa: NPY002
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())

    classes = tuple(map(str, range(10)))
    noisy = Dataset("x", make_features(torch.tensor(x)), torch.tensor(y), classes)
    trusted = Dataset("m", make_features(torch.tensor(x_trusted)), torch.tensor(y_trusted), classes)
    task, _ = make_task(noisy, meta_data=trusted, val=0.0, test=0.0)
    method = WarPI(**WarPI.for_tables)
    with seeded(derive(3, "training")):
        method.start(task, Recipe(net=WarPI.table_net, epochs=2, seed=3))
        records = [record for record in train(method, task) if record]
    scale = task.train.examples.scale  # type: ignore[attr-defined]
    p = method.predict((torch.tensor(x_test) - scale.mean) / scale.std).numpy()
    np.testing.assert_allclose(model.predict_proba(x_test), p, atol=1e-6)
    assert [r["loss"] for r in model.history_] == [r["loss"] for r in records]
    assert model.classes_.tolist() == sorted(names.tolist())
    assert model.n_features_in_ == 64


def test_finds_wrong_labels(digits: Dataset) -> None:
    task, truth = make_task(digits, "pair:0.4", meta=50, val=0.0, seed=5)
    (x, y), trusted, (x_test, y_test) = arrays(task.train), arrays(task.meta), arrays(truth.test)
    model = NoisyLabelClassifier(random_state=3, epochs=8).fit(x, y, *trusted)
    assert model.method_ == "warpi"
    assert model.score(x_test, y_test) > 0.85
    assert truth.clean is not None
    assert roc_auc_score(truth.clean.numpy() == y, model.label_quality_) > 0.9
    assert ((model.label_quality_ >= 0) & (model.label_quality_ <= 1)).all()
    np.testing.assert_allclose(model.transition_.sum(1), 1)
    assert truth.T is not None
    assert np.abs(model.transition_ - truth.T.numpy()).mean() < 0.06


def test_old_names_of_trusted_examples(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), (x_trusted, y_trusted), _ = small
    with pytest.warns(FutureWarning, match="X_meta and y_meta are deprecated; use X_trusted and y_trusted"):
        old = fast("glc").fit(x, y, X_meta=x_trusted, y_meta=y_trusted)
    new = fast("glc").fit(x, y, x_trusted, y_trusted)
    np.testing.assert_array_equal(old.predict_proba(x), new.predict_proba(x))
    with pytest.warns(FutureWarning), pytest.raises(UserError, match="pass only one pair"):
        fast().fit(x, y, x_trusted, y_trusted, X_meta=x_trusted, y_meta=y_trusted)


@pytest.mark.parametrize(
    "name", [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_every_method(name: str, small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), (x_trusted, y_trusted), _ = small
    settings = {"epochs": None, "model": "knn"} if name == "auto" else {}
    model = fast(name, noise_rate=0.3, **settings).fit(x[:60], y[:60], x_trusted, y_trusted)
    assert model.method_ == name
    assert len(model.history_) == (1 if name == "auto" else 2)
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1, atol=1e-6)


def test_method_by_name_and_by_value_agree(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), trusted, _ = small
    x, y = x[:80], y[:80]
    by_name = fast("warpi", settings={"samples": 2, "meta_lr": 1e-3, "momentum": 0.5}).fit(x, y, *trusted)
    value = WarPI(**(WarPI.for_tables | {"samples": 2, "meta_lr": 1e-3}))
    by_value = fast(value, settings={"momentum": 0.5}).fit(x, y, *trusted)
    np.testing.assert_array_equal(by_name.predict_proba(x), by_value.predict_proba(x))
    plain = fast("warpi").fit(x, y, *trusted)
    assert np.abs(plain.predict_proba(x) - by_name.predict_proba(x)).max() > 1e-4


@dataclass
class Custom(CE):
    """A custom method that does the same as CE."""

    def step(self, batch: Batch) -> Log:
        return super().step(batch)


class Guessing(Custom):
    def predict(self, x: Tensor) -> Tensor:
        return torch.full((len(x), self.task.n_classes), 1 / self.task.n_classes)


def test_random_state(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), _, _ = small
    state = np.random.RandomState(4)
    first, second = (fast(random_state=state).fit(x, y).predict_proba(x) for _ in range(2))
    again = fast(random_state=np.random.RandomState(4)).fit(x, y).predict_proba(x)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - second).max() > 1e-4
    np.random.seed(0)  # noqa: NPY002
    free = [fast(random_state=None).fit(x, y).predict_proba(x) for _ in range(2)]
    assert np.abs(free[0] - free[1]).max() > 1e-4


def test_fits_in_threads_agree(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), trusted, _ = small

    def p(_: int) -> np.ndarray:
        return fast("warpi").fit(x[:80], y[:80], *trusted).predict_proba(x)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(p, range(2)))
    for other in results:
        np.testing.assert_array_equal(other, p(0))


# --- kinds of X -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> tuple[pd.DataFrame, np.ndarray]:
    """The class depends on a number and on two kinds of categories."""
    rng = np.random.default_rng(0)
    truth = rng.integers(3, size=240)
    frame = pd.DataFrame(
        {
            "size": 2.0**31 + 50 * truth + 10 * rng.normal(size=240),  # needs float64
            "colour": pd.Categorical.from_codes(truth, ["red", "green", "blue", "never seen"]),
            "place": np.array(["north", "south", "west"])[(truth + rng.integers(2, size=240)) % 3],
            "old": rng.random(240) < 0.5,
        }
    )
    return frame, np.array(["a", "b", "c"], dtype=object)[truth]


def test_object_columns_of_numbers_are_numeric(table: tuple[pd.DataFrame, np.ndarray]) -> None:
    """They must not become categories, because new rows with other numbers would be rejected."""
    frame, y = table
    loose = frame.astype({"size": object, "old": object})
    model = fast(epochs=2).fit(loose, y)
    np.testing.assert_array_equal(model.predict_proba(frame), fast(epochs=2).fit(frame, y).predict_proba(frame))
    assert model.predict(loose.assign(size=loose["size"] + 1)).shape == y.shape
    numbers = frame[["size"]]
    only = fast(epochs=2).fit(numbers.astype(object), y).predict_proba(numbers)
    np.testing.assert_array_equal(only, fast(epochs=2).fit(numbers, y).predict_proba(numbers))
    with pytest.raises(ValueError, match=r"infinity or a value too large for float32: column 'size', row 3"):
        fast().fit(loose.assign(size=loose["size"].where(loose.index != 3, np.inf)), y)


def test_frames_with_categories_in_memory_and_in_files(
    table: tuple[pd.DataFrame, np.ndarray], tmp_path: Path, monkeypatch: Any
) -> None:
    frame, y = table
    model = fast(epochs=10, batch_size=16).fit(frame, y)
    assert model.feature_names_in_.tolist() == list(frame.columns)
    assert model.n_features_in_ == 4
    assert model.score(frame, y) > 0.95
    p = model.predict_proba(frame)
    wide = np.concatenate(
        [frame[["size"]], pd.get_dummies(frame["colour"]), pd.get_dummies(frame["place"]), frame[["old"]]], axis=1
    )
    np.testing.assert_allclose(fast(epochs=10, batch_size=16).fit(wide, y).predict_proba(wide), p, atol=1e-6)

    with pytest.warns(UnknownCategories, match=r"treated as unknown: 'place' \(240 rows, such as 'east'\)"):
        unknown = model.predict_proba(frame.assign(place="east"))
    assert (unknown.argmax(1) == p.argmax(1)).mean() > 0.9, "the other columns still predict"
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["colour", "size", "place", "old"]])
    with pytest.raises(UserError, match="must be a data frame with the columns"):
        model.predict(np.zeros((2, 4)))
    with pytest.raises(UserError, match=r"column 'when' of X contains values of type Period"):
        fast().fit(frame.assign(when=pd.Period("2026-01")), y)

    model.save(tmp_path / "model.warpi")
    loaded = NoisyLabelClassifier.load(tmp_path / "model.warpi")
    np.testing.assert_array_equal(loaded.predict_proba(frame), p)
    assert loaded.predict(frame).tolist() == model.predict(frame).tolist()
    for name in ("label_quality_", "transition_", "feature_names_in_", "classes_"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(model, name))
    assert loaded.get_params() == model.get_params()
    assert loaded.history_ == model.history_

    onnxruntime = pytest.importorskip("onnxruntime")
    difference = model.to_onnx(tmp_path / "model.onnx")
    assert difference is not None
    assert difference < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"x": model.encode(frame)})
    np.testing.assert_allclose(theirs, p, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["classes"] == '["a", "b", "c"]'
    assert "never seen" in session.get_modelmeta().custom_metadata_map["categories"]

    before = (tmp_path / "model.onnx").read_bytes()  # an exporter that writes other weights
    monkeypatch.setattr("torch.onnx.export", lambda _net, _x, file, **_: file.write_bytes(before))
    with torch.no_grad():
        loaded.net_.nets[0].fc.bias[0] += 0.1
    with pytest.raises(UserError, match=r"probabilities of onnxruntime differ .* by up to .* more than 1e-05"):
        loaded.to_onnx(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == before


def test_frame_with_many_categories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names and other words that differ in almost every row are no reason to refuse a table."""
    n = 1200
    y = np.arange(n) % 2
    code = [f"c{k % 2}" if k < 100 else f"rare {k}" for k in range(n)]
    frame = pd.DataFrame({"name": [f"n{k}" for k in range(n)], "code": code, "size": y + np.arange(n) / n})
    model = fast().fit(frame, y)
    assert "column 'code' of X has 1102 categories; 2 are kept, the others are treated as unknown" in caplog.text
    assert model.net_.prepare.layout.categories == ((), ("c0", "c1"), None)
    assert model.score(frame, y) > 0.9
    p = model.predict_proba(frame)
    np.testing.assert_array_equal(model.predict_proba(frame.assign(name="new")), p)
    model.save(tmp_path / "model.warpi")
    np.testing.assert_array_equal(NoisyLabelClassifier.load(tmp_path / "model.warpi").predict_proba(frame), p)
    with pytest.raises(UserError, match="every column of X has different categories in almost every row"):
        fast().fit(frame[["name"]], y)
    few = frame[:120]
    declared = few["name"].astype("category")
    for names, n_kept in ((few["name"], 0), (declared, 120)):  # as in a file, unless the user declares the categories
        layout = fast().fit(few.assign(name=names), y[:120]).net_.prepare.layout
        assert [len(kept or ()) for kept in layout.categories] == [n_kept, 22, 0]


@pytest.fixture(scope="module")
def dated() -> pd.DataFrame:
    """A label that depends on a month; dates, numbers and codes as people write them; cells are missing."""
    rng = np.random.default_rng(0)
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1500, 120), unit="D")
    frame = pd.DataFrame(
        {
            "when": days.strftime("%d.%m.%Y"),
            "stamp": days + pd.to_timedelta(rng.integers(0, 86400, 120), unit="s"),
            "price": [f"${value:,}" for value in rng.integers(1, 10**6, 120)],
            "code": rng.choice(["1", "2", "3"], 120),
            "took": pd.to_timedelta(rng.integers(1, 1000, 120), unit="s"),
        }
    )
    gaps = pd.DataFrame(rng.random(frame.shape) < 0.1, columns=frame.columns).assign(code=False)
    return frame.mask(gaps).assign(label=np.where(days.month <= 6, "early", "late"))


def test_dates_and_numbers_as_text_are_read_as_in_a_file(dated: pd.DataFrame, tmp_path: Path) -> None:
    X = dated.drop(columns="label")
    layout = Layout.of(X, custom_net=False)
    dated.to_parquet(tmp_path / "table.parquet")
    expected = read_dataset(str(tmp_path / "table.parquet")).examples
    np.testing.assert_array_equal(arrange(torch.tensor(layout.numbers(X)), layout), expected.x)
    assert [None if how is None else how.kind for how in layout.parsed] == ["date", "date", "number", None, "number"]
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    dates = X.assign(when=pd.to_datetime(X["when"], dayfirst=True))
    np.testing.assert_array_equal(layout.numbers(dates), layout.numbers(X), "another type, the same dates")

    typos = X.assign(when=X["when"].where(X.index > 3, "soon"))
    with pytest.warns(UnknownCategories, match=r"not dates count as missing: 'when' \(4 rows, such as 'soon'\)"):
        read = layout.numbers(typos)
    np.testing.assert_array_equal(read, layout.numbers(X.assign(when=X["when"].where(X.index > 3))))
    with pytest.raises(UserError, match=r"'when' of X must contain dates, as in fit, got 120 other cells, such as 'x'"):
        layout.numbers(X.assign(when="x"))
    with pytest.raises(UserError, match=r"'price' of X contained numbers in fit, but is datetime64"):
        layout.numbers(X.assign(price=dates["when"]))
    with pytest.raises(UserError, match=r"'stamp' of X contained dates in fit, but is int64"):
        layout.numbers(X.assign(stamp=1))


@pytest.mark.parametrize("gap", [None, np.nan, pd.NaT])
def test_a_column_that_was_read_may_have_no_value_later(dated: pd.DataFrame, gap: Any) -> None:
    X = dated.drop(columns="label")
    layout = Layout.of(X, custom_net=False)
    one = X[X.notna().all(axis=1)].iloc[:1]
    numbers = layout.numbers(one.assign(when=gap, stamp=gap, price=gap, took=gap))
    texts = layout.numbers(one.assign(when="", stamp="", price="", took=""))
    np.testing.assert_array_equal(numbers, texts)


def test_times_and_columns_of_numbers_and_words() -> None:
    times = [datetime.time(k % 24, 5) for k in range(40)]
    texts = [time.strftime("%H:%M:%S") for time in times]
    numbers = [k if k % 2 else str(k) for k in range(40)]  # as pandas reads a file in parts
    codes: list[Any] = [1, "x", 2.5, None] * 10
    X = pd.DataFrame({"time": times, "text": texts, "number": numbers, "code": codes, "word": ["u", "v"] * 20})
    layout = Layout.of(X, custom_net=False)
    assert layout.categories == (None, None, None, (1, 2.5, "x", None), ("u", "v"))
    seconds = [3600 * (k % 24) + 300 for k in range(40)]
    np.testing.assert_array_equal(layout.numbers(X)[:, :3], np.transpose([seconds, seconds, range(40)]))
    assert layout.numbers(X)[:4, 3].tolist() == [0, 2, 1, 3]


def test_dates_in_a_fitted_classifier(dated: pd.DataFrame, tmp_path: Path) -> None:
    X, y = dated.drop(columns="label"), dated["label"]
    model = NoisyLabelClassifier(model="knn", random_state=0).fit(X, y, X[:40], y[:40])
    assert model.n_features_in_ == 5
    p = model.predict_proba(X)
    model.save(tmp_path / "model.warpi")
    np.testing.assert_array_equal(NoisyLabelClassifier.load(tmp_path / "model.warpi").predict_proba(X), p)


# --- auto -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def messy() -> tuple[pd.DataFrame, np.ndarray]:
    """A table whose cells are partly missing: the class depends on a number and on a category."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=200)
    number = np.where(rng.random(200) < 0.2, np.nan, 3 * y + rng.normal(size=200))
    colour = np.where(y == 0, "red", "blue").astype(object)
    colour[rng.random(200) < 0.2] = None
    kind = pd.Categorical.from_codes(np.where(rng.random(200) < 0.3, -1, y), ["x", "y"])
    frame = pd.DataFrame({"number": number, "whole": pd.array(y * 2, dtype="Int64"), "colour": colour, "kind": kind})
    return frame.assign(whole=frame["whole"].mask(frame.index < 9)), y


def test_auto_keeps_its_choice_in_a_file(small: tuple[Arrays, Arrays, Arrays], tmp_path: Path) -> None:
    (x, y), trusted, (x_test, y_test) = small
    model = NoisyLabelClassifier(model="knn", random_state=0).fit(x, y, *trusted)
    assert model.method_ == "auto"
    assert {"candidate", "score", "error", "seconds", "weight", "note"} == {*model.choice_[0]}
    score = model.trusted_score_
    assert 0 <= score.low <= score <= score.high <= 1
    assert model.score(x_test, y_test) > 0.7
    assert model.label_quality_.shape == y.shape
    np.testing.assert_allclose(model.transition_.sum(1), 1)
    model.save(tmp_path / "model.warpi")
    loaded = NoisyLabelClassifier.load(tmp_path / "model.warpi")
    np.testing.assert_allclose(loaded.predict_proba(x_test), model.predict_proba(x_test), atol=1e-6)
    assert loaded.choice_ == model.choice_
    assert (loaded.trusted_score_, loaded.trusted_score_.low) == (score, score.low)
    assert loaded.get_params() == model.get_params()
    again = pickle.loads(pickle.dumps(model))
    assert again.trusted_score_.high == score.high
    assert repr(score).endswith(f"to {score.high:.3f})")


def test_auto_accepts_a_class_that_only_trusted_rows_have(
    small: tuple[Arrays, Arrays, Arrays], caplog: pytest.LogCaptureFixture
) -> None:
    (x, y), (x_trusted, y_trusted), (x_test, _) = small
    others = y != 9
    model = NoisyLabelClassifier(model="knn", random_state=0).fit(x[others], y[others], x_trusted, y_trusted)
    assert "classes that occur in y_trusted, but not in y: 9; they are rarely predicted; correct" in caplog.text
    assert model.classes_.tolist() == list(range(10))
    assert model.predict_proba(x_test)[:, 9].min() > 0
    assert model.transition_.shape == (10, 10)
    given = np.where(y_trusted == 9, 1, y_trusted)
    model.fit(x[others], y[others], x_trusted, y_trusted, given_trusted=given)
    assert model.classes_.tolist() == list(range(10))

    whole, labels = np.concatenate([x[others], x_trusted]), np.concatenate([y[others], y_trusted])
    marks = np.arange(len(labels)) >= others.sum()  # all rows of class 9 are trusted
    assert model.fit(whole, labels, trusted=marks).classes_.tolist() == list(range(10))
    names = np.array([f"class {k}" for k in range(10)])
    for wrong in (np.char.upper(names[y_trusted]), y_trusted, np.where(y_trusted == 9, np.nan, y_trusted)):
        with pytest.raises(ValueError, match=r"y_trusted, row .*: (the class .* does not occur in y|the label is)"):
            model.fit(x, names[y], x_trusted, wrong)
    with pytest.raises(UserError, match="1 of 10 classes without an example in the training rows: '9'"):
        fast("ce").fit(whole, labels, trusted=marks)


def test_auto_with_a_model_of_scikit_learn(small: tuple[Arrays, Arrays, Arrays], tmp_path: Path) -> None:
    (x, y), trusted, (x_test, _) = small
    x, y = x[:120], y[:120]
    forest = RandomForestClassifier(8, random_state=0)
    model = NoisyLabelClassifier(model=forest, random_state=0)
    assert clone(model).get_params()["model__n_estimators"] == 8
    model.fit(x, y, *trusted).save(tmp_path / "forest.warpi")
    loaded = NoisyLabelClassifier.load(tmp_path / "forest.warpi", model=forest)
    np.testing.assert_allclose(loaded.predict_proba(x_test), model.predict_proba(x_test), atol=1e-6)
    model = NoisyLabelClassifier(model=GaussianNB(), random_state=0).fit(x, y, *trusted)
    assert model.predict(x_test).shape == (len(x_test),)
    with pytest.raises(UserError, match="GaussianNB cannot be saved"):
        model.save(tmp_path / "bayes.warpi")
    for method, given, message in (
        ("ce", "forest", "model can only be used with method='auto'"),
        ("auto", "tree", r"model must be 'forest' \| .* \| a scikit-learn classifier \| None, got 'tree'"),
    ):
        with pytest.raises(UserError, match=message):
            NoisyLabelClassifier(method, model=given).fit(x, y, *trusted)


def test_labels_before_the_check(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), (x_trusted, y_trusted), _ = small
    x, y = x[:120], y[:120]
    given = y_trusted.astype(object)
    given[::3] = (y_trusted[::3] + 1) % 10
    given[1] = None
    model = NoisyLabelClassifier(model="knn", random_state=0)
    with_given = model.fit(x, y, x_trusted, y_trusted, given_trusted=given).transition_
    assert np.abs(with_given - model.fit(x, y, x_trusted, y_trusted).transition_).max() > 1e-4
    with pytest.raises(UserError, match="one label per row of X_trusted, got 3"):
        model.fit(x, y, x_trusted, y_trusted, given_trusted=[1, 2, 3])
    with pytest.raises(UserError, match="given_trusted are labels of the rows of X_trusted"):
        model.fit(x, y, given_trusted=given)


@pytest.mark.parametrize("params", [{"model": "knn"}, {"method": "ce", "epochs": 5}], ids=["auto", "network"])
@pytest.mark.filterwarnings("ignore::warpi.estimator.pseudo_trusted.NoTrustedExamples")
def test_missing_numbers_and_categories(
    params: dict[str, Any], messy: tuple[pd.DataFrame, np.ndarray], tmp_path: Path
) -> None:
    frame, y = messy
    model = NoisyLabelClassifier(random_state=0, **params).fit(frame, y)
    assert model.score(frame, y) > 0.9
    p = model.predict_proba(frame)
    assert np.isfinite(p).all()
    model.save(tmp_path / "model.warpi")
    np.testing.assert_allclose(NoisyLabelClassifier.load(tmp_path / "model.warpi").predict_proba(frame), p, atol=1e-6)
    prepared = model.net_.prepare(torch.tensor(model.encode(frame)))
    names = ["number", "whole", "red", "blue", "no colour", "x", "y", "no kind", "missing number", "missing whole"]
    assert prepared.shape == (200, len(names))
    marks = model.net_.prepare.layout.find_marks()
    assert marks.tolist() == [names.index(f"missing {name}") if name in ("number", "whole") else -1 for name in names]
    missing = frame["number"].isna().to_numpy(copy=True)
    assert len(set(prepared[missing, 0].tolist())) == 1
    median = frame["number"].median()
    at_median = (median - float(model.net_.prepare.mean[0])) / float(model.net_.prepare.std[0])
    assert float(prepared[missing, 0][0]) == pytest.approx(at_median, abs=1e-5)
    assert ((prepared[:, 8] > 0).numpy() == missing).all()


@pytest.mark.filterwarnings("ignore::warpi.estimator.pseudo_trusted.NoTrustedExamples")
def test_missing_numbers_in_arrays(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), _, _ = small
    complete = fast("ce").fit(x, y)
    assert np.isfinite(complete.predict_proba(np.full_like(x[:2], np.nan))).all(), "new rows may miss any number"
    gaps = x.copy()
    gaps[::7, 3] = np.nan
    model = NoisyLabelClassifier(model="knn", random_state=0).fit(gaps, y, gaps[:100], y[:100])
    assert model.net_.prepare.layout.indicated == (3,)
    assert np.flatnonzero(model.net_.prepare.layout.find_marks() >= 0).tolist() == [3]
    with pytest.raises(ValueError, match="infinity"):
        fast().fit(np.where(np.isnan(gaps), np.inf, gaps), y)


@pytest.mark.slow  # networks are exported below, and the module of `auto` in tests/auto/test_modules.py
@pytest.mark.parametrize("model", ["logistic", "forest"])
def test_auto_as_onnx(model: str, small: tuple[Arrays, Arrays, Arrays], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (x, y), trusted, _ = small
    fitted = NoisyLabelClassifier(model=model, random_state=0).fit(x[:100], y[:100], *trusted)
    difference = fitted.to_onnx(tmp_path / "model.onnx")
    assert difference is not None
    assert difference < 1e-5


TEXTS = {
    "sport": "goal match team coach league player score season stadium referee",
    "food": "bread soup oven salt recipe butter kitchen dinner garlic spoon",
    "space": "orbit rocket moon star planet launch comet engine crew gravity",
}


def test_text_stays_sparse(monkeypatch: Any) -> None:
    rng = np.random.default_rng(3)
    y = rng.integers(3, size=600)
    names, words = list(TEXTS), [text.split() for text in TEXTS.values()]
    filler = [f"word{k}" for k in range(60)]
    texts = [" ".join([*rng.choice(words[c], 5), *rng.choice(filler, 3)]) for c in y]
    true, y = np.array(names)[y], np.where(rng.random(600) < 0.2, (y + 1) % 3, y)
    labels = np.array(names)[y]
    sizes: list[int] = []
    flat = SparseExamples.flat
    monkeypatch.setattr(SparseExamples, "flat", lambda self, rows: (sizes.append(len(rows)), flat(self, rows))[1])
    pipe = make_pipeline(TfidfVectorizer(), fast("gce", epochs=6, batch_size=32)).fit(texts[:400], labels[:400])
    assert max(sizes) == 32, "only one batch is made dense at a time"
    assert np.mean(pipe.predict(texts[400:]) == true[400:]) > 0.9
    model, x = pipe[-1], pipe[:-1].transform(texts[400:])
    np.testing.assert_allclose(model.predict_proba(x.toarray()), model.predict_proba(csr_matrix(x)), atol=1e-6)


def test_sparse_examples_agree_with_dense_ones() -> None:
    dense = np.array([[0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 3], [1, 0, 0, 0]], dtype=np.float32)
    examples = SparseExamples.of(csr_array(dense))
    rows = torch.tensor([2, 0])
    examples = examples.with_scale(examples.fit_scale(rows))
    rms = ((9 + 4) / 8) ** 0.5
    (read,) = examples.stream([(torch.tensor([3, 2]), 0)], augment=True, views=2, part=slice(1, None))
    assert read.kept is None
    for view in read.views:
        np.testing.assert_allclose(view.numpy(), dense[2:3] / rms, rtol=1e-6)
    assert (examples.shape, len(examples), examples.to("cpu").device.type) == ((4,), 4, "cpu")
    assert examples.digest() == SparseExamples.of(dense).digest() != SparseExamples.of(2 * dense).digest()
    contents = list(examples.contents(torch.arange(4)))
    assert [contents.index(content) for content in contents] == [0, 1, 2, 1]
    with pytest.raises(UserError, match="open_set noise"):
        examples.replace_inputs(rows, examples, rows)


def test_long_sparse_rows_lose_entries_in_training() -> None:
    rng = np.random.default_rng(0)
    dense = (rng.random((40, 400)) + 1) * (rng.random((40, 400)) < 0.1)  # 40 entries per row
    long, rows = SparseExamples.of(dense, augment=True), torch.arange(40)

    def read(examples: SparseExamples, seed: int, part: slice = slice(None), augment: bool = True) -> list[Any]:
        (read,) = examples.stream([(rows, seed)], augment=augment, views=2, part=part)
        return [view.numpy() for view in read.views]

    one, two = read(long, 0)
    assert (one != two).any(), "each view is drawn separately"
    np.testing.assert_array_equal(one, read(long, 0)[0])
    np.testing.assert_array_equal(read(long, 0, slice(5, 9))[1], two[5:9])
    kept = one != 0
    assert kept.sum() == pytest.approx(0.3 * (dense != 0).sum(), rel=0.1)
    np.testing.assert_allclose(one[kept], dense[kept] / 0.3, rtol=1e-5)
    np.testing.assert_allclose(read(long, 0, augment=False)[0], dense, rtol=1e-6)
    medium, short = (SparseExamples.of(csr_array(dense[:, :n]), augment=True) for n in (160, 60))
    assert medium.dropped == pytest.approx(1 - 8 * 40 / np.count_nonzero(dense[:, :160]))
    assert 0 < medium.dropped < 0.7
    assert short.dropped == SparseExamples.of(dense).dropped == 0


def test_settings_of_sparse_inputs(monkeypatch: Any) -> None:
    """The defaults differ from those of tables, and settings of the user have priority."""
    seen: list[tuple[Any, float]] = []
    start = Method.start

    def record_start(self: Method, task: Any, recipe: Any) -> None:
        seen.append((recipe.weight_decay, task.train.examples.dropped if recipe.weight_decay != 5e-4 else 0))
        start(self, task, recipe)

    monkeypatch.setattr(Method, "start", record_start)
    monkeypatch.setattr("warpi.runs.defaults.ENOUGH_ROWS", 1)  # so that no defaults for few rows apply
    rng = np.random.default_rng(1)
    x, y = rng.random((60, 40)), np.arange(60) % 2
    auto = [
        NoisyLabelClassifier(epochs=1, random_state=0).fit(form(x), y, x[:6], y[:6]) for form in (csr_array, np.array)
    ]
    assert [model.method_ for model in auto] == ["glc", "warpi"]
    assert seen == [(2e-3, 0.7), (5e-4, 0)]
    model = NoisyLabelClassifier("ce", augment=False, settings={"weight_decay": 0.1}, random_state=0).fit(
        csr_array(x), y
    )
    assert seen[2:] == [(0.1, 0.0)]
    assert len(model.history_) == 20


def test_sparse_trusted_rows_are_not_also_trained_on(caplog: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = csr_array(rng.random((40, 6)) * (rng.random((40, 6)) < 0.5)), np.arange(40) % 2
    fast("glc").fit(x, y, x[:6], y[:6])
    assert "rows of X that are also in X_trusted are used only as trusted examples: 6 of 40" in caplog.messages


def test_sparse_input_is_not_modified() -> None:
    """Unsorted columns, a stored zero, and read-only memory, as joblib passes it to workers."""
    parts = np.array([1, 2, 0, 4], np.float32), np.array([3, 0, 1, 2], np.int32), np.array([0, 2, 4], np.int32)
    for part in parts:
        part.flags.writeable = False
    x = csr_matrix(parts, shape=(2, 4))
    rows = SparseExamples.of(x)
    assert rows.flat(torch.arange(2)).tolist() == [[2, 0, 0, 1], [0, 0, 4, 0]]
    assert x.indices.tolist() == [3, 0, 1, 2]
    same = SparseExamples.of(x.toarray())
    assert list(rows.contents(torch.arange(2))) == list(same.contents(torch.arange(2)))


class Spots(nn.Module):
    """A small custom convolutional network."""

    def __init__(self, channels: int, n_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, n_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return z


def test_image_layouts_and_custom_networks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = rng.integers(256, size=(90, 3, 8, 8), dtype=np.uint8)
    x[np.arange(90), y] //= 2  # one darker channel per class
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Spots(3, 3)
    settings = {"epochs": 12, "batch_size": 16, "lr": 0.05}
    first = fast(net=net, **settings).fit(x, y)
    assert first.score(x, y) > 0.9
    last = fast(net=net, **settings).fit(x.transpose(0, 2, 3, 1), y)
    np.testing.assert_array_equal(first.predict_proba(x), last.predict_proba(x.transpose(0, 2, 3, 1)))
    floats = (x / 255).astype(np.float64)
    np.testing.assert_allclose(
        fast(net=net, **settings).fit(floats, y).predict_proba(floats), first.predict_proba(x), atol=1e-3
    )
    still = fast(net=net, augment=False, **settings).fit(x, y)
    assert np.abs(still.predict_proba(x) - first.predict_proba(x)).max() > 1e-3
    with pytest.raises(UserError, match="X contains float64, but the classifier was fitted on uint8"):
        first.predict(floats)
    with pytest.raises(UserError, match=r"X has the shape \['N', 3, 8, 9\], but the classifier was fitted on"):
        first.predict(np.zeros((2, 3, 8, 9), dtype=np.uint8))
    with pytest.raises(UserError, match=r"\['N', 8, 8, 4\], which looks like \[N, H, W, C\] with C 4"):
        fast().fit(np.zeros((90, 8, 8, 4), dtype=np.uint8), y)  # not eight channels of 8 x 4 pixels
    four = np.concatenate([x, x[:, :1]], axis=1)
    assert fast(epochs=1).fit(four, y).predict(four).shape == y.shape

    grey = fast(net=lambda shape, k: Spots(shape[0], k), epochs=1).fit(x[:, 0], y)
    assert grey.shape_ == (1, 8, 8)
    assert fast(net="resnet20", epochs=1, batch_size=45).fit(x, y).predict(x[:4]).shape == (4,)
    series = fast(net=nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), epochs=1).fit(floats[:, :, :, 0], y)
    assert series.shape_ == (3, 8)

    first.save(tmp_path / "spots")
    with pytest.raises(UserError, match=r"contains the weights of .*Spots, not the network"):
        NoisyLabelClassifier.load(tmp_path / "spots")
    np.testing.assert_array_equal(
        NoisyLabelClassifier.load(tmp_path / "spots", net=Spots(3, 3)).predict_proba(x), first.predict_proba(x)
    )
    with pytest.raises(UserError, match="the network does not match the one in"):
        NoisyLabelClassifier.load(tmp_path / "spots", net=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))


# --- files ------------------------------------------------------------------------------------------------------------


def test_damaged_files_raise_errors(small: tuple[Arrays, Arrays, Arrays], tmp_path: Path) -> None:
    (x, y), trusted, _ = small
    value = replace(METHODS["warpi"], samples=1)
    model = fast(value, random_state=np.random.RandomState(0)).fit(x, y, *trusted)
    path = tmp_path / "model"
    model.save(path)
    loaded = NoisyLabelClassifier.load(path)
    assert loaded.method == value
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    np.testing.assert_array_equal(clone(loaded).fit(x, y, *trusted).predict_proba(x), model.predict_proba(x))
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(20):
        place = rng.randrange(8, len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        with pytest.raises(UserError, match=str(path)):
            NoisyLabelClassifier.load(path)
    for other, why in (
        (content[:-1], "not a complete classifier"),
        (pickle.dumps(model), "not a complete classifier"),
        (pack({}, "warpi-checkpoint/1"), "not a classifier of this version"),
    ):
        path.write_bytes(other)
        with pytest.raises(UserError, match=why):
            NoisyLabelClassifier.load(path)
    for name in ("nothing", ""):  # the second is a folder
        with pytest.raises(UserError, match=r"there is no file .*; pass one that NoisyLabelClassifier.save wrote"):
            NoisyLabelClassifier.load(tmp_path / name)
    path.write_text("age,income\n" * 50)
    with pytest.raises(
        UserError, match=r"not a complete classifier.*pass an unchanged file that NoisyLabelClassifier.save wrote"
    ):
        NoisyLabelClassifier.load(path)


def test_custom_method(small: tuple[Arrays, Arrays, Arrays], tmp_path: Path) -> None:
    (x, y), _, _ = small
    model = fast(Custom()).fit(x, y)
    np.testing.assert_array_equal(model.predict_proba(x), fast("ce").fit(x, y).predict_proba(x))
    model.save(tmp_path / "model")
    loaded = NoisyLabelClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict_proba(x), model.predict_proba(x))
    with pytest.raises(UserError, match=r"unknown method 'test_estimator.Custom'"):
        loaded.fit(x, y)
    with pytest.raises(UserError, match="Guessing redefines `predict`"):
        fast(Guessing()).fit(x, y)


# --- without trusted examples -----------------------------------------------------------------------------------------


def test_warns_without_trusted_examples(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), _, _ = small
    with pytest.warns(NoTrustedExamples, match="so auto is trained without any.*Five checked rows per class"):
        plain = NoisyLabelClassifier(model="knn", random_state=0).fit(x, y)
    assert plain.method_ == "auto"
    assert plain.trusted_score_ is None
    with pytest.warns(NoTrustedExamples, match="so elr is trained without any"):
        assert fast("auto").fit(x, y).method_ == "elr"
    with pytest.warns(NoTrustedExamples, match="glc needs trusted examples, but there are none"):
        assert fast("glc", epochs=1).fit(x, y).method_ == "glc"
    fast("elr").fit(x, y)  # chosen explicitly and needs none, so there is no warning
    with pytest.warns(NoTrustedExamples), pytest.raises(UserError, match="7 rows are too few to choose"):
        fast("glc").fit(x[:7], np.arange(7) % 2)


def test_few_rows(small: tuple[Arrays, Arrays, Arrays], monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y), trusted, _ = small
    assert fast("auto").fit(x, y, *trusted).method_ == "glc"
    monkeypatch.setattr("warpi.runs.defaults.ENOUGH_ROWS", 2 * len(x))
    history = fast("ce", epochs=None).fit(x, y).history_
    assert (len(history), history[0]["lr"]) == (60, pytest.approx(0.05 / 2))
    monkeypatch.setattr("warpi.runs.defaults.ENOUGH_ROWS", len(x))
    assert fast("auto").fit(x, y, *trusted).method_ == "warpi"


class Oracle:
    """Predicts the true label of unseen rows, and the given label of seen ones."""

    def __init__(self, task: Task, clean: dict[bytes, int]) -> None:
        self.seen = dict(zip(map(_key, _inputs(task.train)), task.train.y.tolist(), strict=True))
        self.clean, self.k = clean, task.n_classes

    def predict(self, x: Tensor) -> Tensor:
        labels = [self.seen.get(_key(row), self.clean[_key(row)]) for row in x]
        return torch.eye(self.k)[labels]


def _key(row: Tensor) -> bytes:
    return bytes(row.numpy().tobytes())


def _inputs(split: Split) -> Tensor:
    return torch.cat([batch.x for batch in split.batches(1000)])


def test_pseudo_trusted_rows_are_chosen_out_of_fold(tiny: tuple[Task, Truth]) -> None:
    task, truth = tiny
    assert truth.clean is not None
    clean = dict(zip(map(_key, _inputs(task.train)), truth.clean.tolist(), strict=True))
    learn: Any = lambda part: Oracle(part, clean)
    chosen = hold_out_pseudo_trusted(replace(task, meta=None), learn, seed=0)
    assert chosen.meta is not None
    right = [clean[_key(x)] == y for x, y in zip(_inputs(chosen.meta), chosen.meta.y.tolist(), strict=True)]
    assert all(right)
    counts, whole = torch.bincount(chosen.meta.y), torch.bincount(task.train.y)
    assert counts.tolist() == (whole // 4).clamp(1, MAX_PER_CLASS).tolist()
    assert not set(chosen.meta.rows.tolist()) & set(chosen.train.rows.tolist())
    assert len(chosen.meta) + len(chosen.train) == len(task.train)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "extra", "message"),
    [
        ({"method": "warpy"}, {}, "unknown method 'warpy'; did you mean 'warpi'"),
        ({"settings": {"lrr": 1}}, {}, "unknown setting 'lrr'; did you mean 'lr'"),
        ({"settings": {"seed": 1}}, {}, "unknown setting 'seed'"),
        ({"settings": {"meta_lr": 1}}, {}, "unknown setting 'meta_lr': ce has no such .* method with it: .*warpi"),
        ({"net": "resnet"}, {}, "unknown net 'resnet'"),
        ({"epochs": 0}, {}, "epochs must be at least 1"),
        ({"batch_size": 1}, {}, "BatchNorm needs at least 2 examples per batch"),
        ({"method": "co_teaching"}, {}, "needs the noise rate .*`noise_rate` of NoisyLabelClassifier"),
        ({"noise_rate": 1.2}, {}, r"noise_rate must be in \[0, 1\), got 1.2"),
        ({"device": "tpu"}, {}, "unknown device 'tpu'"),
        ({}, {"X_trusted": np.zeros((3, 64))}, "X_trusted and y_trusted must be passed together"),
        (
            {},
            {"X_trusted": np.zeros((3, 64)), "y_trusted": [0, 1, 77]},
            "y_trusted, row 2: the class 77 does not occur in y",
        ),
        ({}, {"X_trusted": np.zeros((1, 64)), "y_trusted": ["7"]}, "the class '7' does not occur in y; classes: 0, 1"),
        (
            {},
            {"X_trusted": np.zeros((2, 64)), "y_trusted": [0, 1]},
            "8 of 10 classes without an example in the trusted",
        ),
        ({}, {"trusted": np.arange(5)}, "`trusted` must be 300 booleans"),
        (
            {},
            {"trusted": np.zeros(300, bool)},
            r"marks none of the 300 rows.* this fold has no trusted rows.*shuffle=True",
        ),
        ({"net": nn.Linear(64, 10).requires_grad_(False)}, {}, "Linear has no trainable parameters"),
        ({"net": lambda shape, K: nn.Flatten()}, {}, "Flatten has no trainable parameters"),  # noqa: ARG005
        ({"net": Bare}, {}, r"net=Bare cannot be called with \(shape, n_classes\).*the module itself, net=Bare\("),
        ({"net": lambda: None}, {}, r"cannot be called with.*define it as f\(shape, n_classes\)"),
        ({}, {"trusted": np.ones(300, bool), "X_trusted": np.zeros((1, 64)), "y_trusted": [0]}, "got both"),
    ],
)
def test_mistakes(params: Any, extra: Any, message: str, small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), _, _ = small
    x, y = (np.tile(a, (2, 1)[: a.ndim])[:300] for a in (x, y))
    with pytest.raises(UserError, match=message):
        fast(**params).fit(x, y, **extra)


def test_trusted_rows_of_a_frame_must_be_a_frame(table: tuple[pd.DataFrame, np.ndarray]) -> None:
    frame, y = table
    with pytest.raises(UserError, match="X_trusted must be a data frame with the columns of the X in fit, got ndarray"):
        fast().fit(frame, y, frame.to_numpy()[:9], y[:9])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.linspace(0, 1, 30), "Unknown label type"),
        (np.where(np.arange(30) == 4, np.nan, 1.0), "NaN"),
        (np.array(["a", None, "b"] * 10, dtype=object), r"y, row 1: the label is missing \(None\)"),
        (["a", "b", None] * 10, r"y, row 2: the label is missing \(None\)"),
        (pd.Series(["a", "b", pd.NA] * 10), r"y, row 2: the label is missing"),
        (pd.Series(["a", None] * 15, dtype="string"), r"y, row 1: the label is missing \(<NA>\)"),
        (pd.Series([1, 2, None] * 10, dtype="Int64"), "y, row 2: the label is missing|Input y contains NaN"),
        (np.array(["a", "b", np.nan] * 10, dtype=object), r"y, row 2: the label is missing \(nan\)"),
        (["a"] * 30, "one class"),
        (np.zeros(30, np.int64), "y contains one class, 0;"),
        (["a", "b"], "inconsistent numbers of samples"),
    ],
)
def test_missing_and_invalid_labels(y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fast().fit(np.random.default_rng(0).random((30, 2)), y)


def test_texts_and_missing_trusted_labels() -> None:
    texts = [f"word{i % 7} thing" for i in range(30)]
    for X in (texts, np.array(texts), pd.Series(texts, index=range(5, 35))):
        with pytest.raises(ValueError, match=r"X contains texts.*TfidfVectorizer"):
            fast().fit(X, ["a", "b"] * 15)
    x = np.random.default_rng(0).random((30, 2))
    with pytest.raises(ValueError, match="y_trusted, row 1: the label is missing"):
        fast().fit(x, ["a", "b"] * 15, x[:2] + 1, ["a", None])


def test_fold_without_trusted_rows_fails(small: tuple[Arrays, Arrays, Arrays]) -> None:
    (x, y), (x_trusted, y_trusted), _ = small
    everything, labels = np.concatenate([x, x_trusted]), np.concatenate([y, y_trusted])
    trusted = np.arange(len(labels)) >= len(y)
    folds = [(np.flatnonzero(~trusted), np.flatnonzero(trusted)), (np.arange(len(labels)), np.arange(20))]
    with pytest.warns(FitFailedWarning, match="this fold has no trusted rows"):
        scores = cross_validate(fast("glc"), everything, labels, cv=folds, params={"trusted": trusted})
    assert np.isnan(scores["test_score"]).tolist() == [True, False]


def test_warns_if_the_network_returns_probabilities(small: tuple[Arrays, Arrays, Arrays], recwarn: Any) -> None:
    (x, y), trusted, _ = small
    own = nn.Sequential(nn.Linear(64, 10), nn.Softmax(1))
    with pytest.warns(UserWarning, match=r"the network Sequential returns probabilities.*remove the Softmax"):
        fast(net=own).fit(x, y, *trusted)
    recwarn.clear()
    fast(net=nn.Sequential(nn.Linear(64, 10), nn.LogSoftmax(1))).fit(
        x, y, *trusted
    )  # log-probabilities are valid logits
    assert not recwarn.list


def test_no_method_redefines_predict() -> None:
    """Only `predictors` determines which networks predict; the estimator rejects methods that redefine `predict`."""
    assert all(type(method).predict is Method.predict for method in METHODS.values())
