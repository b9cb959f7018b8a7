"""Numbers far from zero and tiny numbers: neither the offset nor the unit of a column matters."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st

import warpi
from warpi import NoisyLabelClassifier, make_task
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.numeric import Features, make_features, needs_float64
from warpi.estimator.inputs import Layout
from warpi.estimator.serialization import FORMAT
from warpi.runs.defaults import load_dataset
from warpi.runs.run import fit
from warpi.training.checkpoint import pack, unpack

N = 90
RNG = np.random.default_rng(0)
Y = np.arange(N) % 3
X = np.stack([RNG.normal(2 * Y, 1), RNG.normal(-Y, 1), RNG.normal(size=N)], axis=1)
X = np.round(X * 2**10) / 2**10  # so that sums with the offsets below are exact
FAR = np.array([2.0**31, 0, -(2.0**40)])  # the first is about as large as seconds since 1970


def model(**params: Any) -> NoisyLabelClassifier:
    return NoisyLabelClassifier("glc", epochs=2, random_state=0, **params)


def seen(x: np.ndarray) -> torch.Tensor:
    """The input of a network."""
    features = make_features(torch.from_numpy(x))
    rows = torch.arange(len(x))
    (read,) = features.with_scale(features.fit_scale(rows)).stream([(rows, 0)], augment=False)
    return read.views[0]


def test_constant_columns_do_not_affect_new_rows(tmp_path: Path) -> None:
    """Another value in a column that was constant in training must not meet untrained weights."""
    x = np.insert(X, 1, 2025.0, axis=1)
    new = np.insert(X, 1, 3000.0, axis=1)
    fitted = model().fit(x, Y, x[:30], Y[:30])
    np.testing.assert_array_equal(fitted.predict_proba(new), fitted.predict_proba(x))
    fitted.save(tmp_path / "model")
    loaded = NoisyLabelClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict_proba(new), fitted.predict_proba(x))
    prepare = fitted.net_.prepare
    made = prepare.layout.sample(8, Scale(prepare.mean, prepare.std), torch.Generator())  # used to check the ONNX file
    assert bool(made.isfinite().all())


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "too_coarse"),
    [
        (X[:, 0], False),
        (X[:, 0] + 100, False),
        (X[:, 0] + 2.0**20, True),
        (X[:, 0] / 3 * 1e-20, False),
        (X[:, 0] / 3 * 1e-60, True),  # becomes zero in float32
        ((X[:, 0] + 2.0**20).astype(np.float32), False),  # already float32
        (np.arange(2**24 - N, 2**24), False),
        (1_700_000_000 + np.arange(N), True),
        (np.full(N, 0.1), False),
        (np.full(N, 1.7e9 + 1), False),
        (np.where(np.arange(N) % 2, 0.3, 0.1 + 0.2), False),  # constant except for rounding
        (np.where(np.arange(N) == 3, 1e30, X[:, 0] / 3), False),  # an outlier
        (np.zeros(0), False),
    ],
)
def test_needs_float64(column: np.ndarray, too_coarse: bool) -> None:
    assert needs_float64(column) == too_coarse
    assert needs_float64(np.stack([np.zeros(len(column)), column], axis=1)) == (
        too_coarse and column.dtype != np.float32
    )


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=20),
    st.integers(-(2**40), 2**40),
    st.integers(-300, 100),
)
@settings(max_examples=25, deadline=None)
def test_offset_and_unit_do_not_matter(values: list[int], offset: int, power: int) -> None:
    x = np.array(values, dtype=np.float64)[:, None]
    expected = seen(x)
    assert expected.dtype == torch.float32
    torch.testing.assert_close(seen(x + offset), expected)
    torch.testing.assert_close(seen(x * 2.0**power), expected)


def test_constant_columns_are_zero() -> None:
    x = np.stack([np.full(N, 0.1), np.full(N, 1.7e9 + 0.1), np.zeros(N), 1e-20 * X[:, 0]], axis=1)
    actual = seen(x)
    assert bool((actual[:, :3].abs() < 1e-6).all())
    assert float(actual[:, 3].std(correction=0)) == pytest.approx(1)


def test_ordinary_numbers_stay_float32() -> None:
    """The result is exactly that of a float32 tensor."""
    x = torch.from_numpy((X / 3).astype(np.float32))
    new = make_features(x)
    rows = torch.arange(5, 60)
    used = x[rows].double()
    old = TensorExamples(x, warpi.data.examples.Scale(used.mean(0).float(), used.std(0, correction=0).float()))
    scaled = new.with_scale(new.fit_scale(rows))
    a, b = (each.read(rows, torch.Generator(), augment=False) for each in (scaled, old))
    assert torch.equal(*a, *b)
    assert new.digest() == old.digest()


# --- tables and arrays ------------------------------------------------------------------------------------------------


def table(path: Path, x: np.ndarray, y: np.ndarray = Y) -> Path:
    frame = pd.DataFrame({"a": x[:, 0], "colour": np.array(["red", "blue"])[Y[: len(x)] % 2], "b": x[:, 2]})
    frame.assign(label=y[: len(x)]).to_csv(path, index=False)
    return path


def array(path: Path, x: np.ndarray, y: np.ndarray = Y) -> Path:
    np.savez(path, x=x, y=y[: len(x)])
    return path


@pytest.mark.parametrize(("write", "end"), [(table, "csv"), (array, "npz")])
def test_second_file_and_new_rows_are_read_like_the_first(tmp_path: Path, write: Any, end: str) -> None:
    near, far = (write(tmp_path / f"{name}.{end}", X + shift) for name, shift in (("near", 0), ("far", FAR)))
    few = write(tmp_path / f"few.{end}", X[:9] + FAR)  # float32 would be enough for these alone
    first, _ = load_dataset(str(far))
    second, _ = load_dataset(str(few), like=first)
    for features in (first.examples, second.examples):
        assert isinstance(features, Features)
        assert features.x.dtype == torch.float64
    task, truth = make_task(first, meta_data=second)
    assert truth.n_repeated == 9
    assert next(task.train.batches(4)).x.dtype == torch.float32
    assert load_dataset(str(near))[0].examples.x.dtype == torch.float32  # type: ignore[attr-defined]

    runs = [fit(tmp_path / path.stem, data=path, method="ce", epochs=2) for path in (near, far)]
    write(tmp_path / f"near.{end}", X)
    expected, actual = (warpi.predict(run, run.path.with_name(f"{run.path.name}.{end}")) for run in runs)
    np.testing.assert_allclose(actual.probabilities, expected.probabilities, atol=1e-4)
    reopened = warpi.predict(tmp_path / "far", few)
    np.testing.assert_allclose(reopened.probabilities, actual.probabilities[:9], atol=1e-6)


# --- the estimator ----------------------------------------------------------------------------------------------------


def as_frame(x: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(x, columns=["a", "b", "c"]).assign(colour=pd.Categorical(["red"] * len(x), ["red", "blue"]))


@pytest.mark.parametrize("form", [np.asarray, as_frame])
@pytest.mark.parametrize("change", [lambda x: x + FAR, lambda x: x * 2.0**-70, lambda x: x * 2.0**-180])
def test_estimator_ignores_offsets(form: Any, change: Any) -> None:
    x, x_trusted, y, y_trusted = X[30:], X[:30], Y[30:], Y[:30]
    expected = model().fit(form(x), y, form(x_trusted), y_trusted).predict_proba(form(X))
    actual = model().fit(form(change(x)), y, form(change(x_trusted)), y_trusted).predict_proba(form(change(X)))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("form", [np.asarray, as_frame])
def test_saved(tmp_path: Path, form: Any) -> None:
    x = form(X + FAR)
    made = model().fit(x, Y, form(X[:9] + FAR), Y[:9])
    assert made.encode(x).dtype == np.float64
    expected = made.predict_proba(x)
    made.save(tmp_path / "model")
    np.testing.assert_array_equal(NoisyLabelClassifier.load(tmp_path / "model").predict_proba(x), expected)


def test_older_files_can_be_loaded(tmp_path: Path) -> None:
    made = model().fit(X, Y, X[:9], Y[:9])
    made.save(tmp_path / "new")
    state = unpack(tmp_path / "new", FORMAT, "")
    del state["layout"]["double"]
    (tmp_path / "old").write_bytes(pack(state, FORMAT))
    old = NoisyLabelClassifier.load(tmp_path / "old")
    np.testing.assert_array_equal(old.predict_proba(X), made.predict_proba(X))
    assert old.encode(X).dtype == np.float32
    assert replace(Layout.of(X, custom_net=False), double=True).numbers(X).dtype == np.float64


def test_too_large_numbers_are_errors() -> None:
    from scipy.sparse import csr_array

    x = X.copy()
    x[7, 1] = 1e39
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in (np.asarray, csr_array, as_frame):
            with pytest.raises(ValueError, match=r"infinity or a value too large for float32: .*row 7$"):
                model().fit(form(x), Y, X[:9], Y[:9])


def test_copies_of_trusted_rows_are_logged_and_coincidences_stay(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of few categories can equal trusted rows without being copies; a row that occurs once is a copy."""
    x = RNG.integers(3, size=(200, 2)).astype(float)
    y, x_trusted, y_trusted = np.arange(200) % 2, np.repeat(np.arange(3.0), 2).repeat(2).reshape(6, 2), np.arange(6) % 2
    x[:4] = x_trusted[:4] = RNG.normal(size=(4, 2))
    task, truth = make_task(
        Dataset("X", make_features(torch.tensor(x)), torch.tensor(y), ("a", "b")),
        meta_data=Dataset("T", make_features(torch.tensor(x_trusted)), torch.tensor(y_trusted), ("a", "b")),
        val=0.0,
        test=0.0,
    )
    assert (len(task.train), truth.n_repeated) == (196, 4)
    model().fit(x, y, x_trusted, y_trusted)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "rows of X that are also in X_trusted are used only as trusted examples: 4 of 200"
    ]


def test_all_rows_trusted_is_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            warpi.UserError, match=r"all 90 rows of X are trusted, so none is left .*; trust only rows that"
        ):
            model().fit(X, Y, trusted=np.ones(N, bool))
