"""Numbers far from zero, or tiny ones: neither where a column begins nor its unit changes what is learned."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warpi
from warpi import NoisyLabelClassifier, make_task
from warpi.data.examples import Scale, TensorExamples
from warpi.data.numeric import Features, make_features, needs_float64
from warpi.estimator.classifier import FORMAT
from warpi.estimator.inputs import Layout
from warpi.runs.defaults import load_dataset
from warpi.runs.run import fit
from warpi.training.checkpoint import pack, unpack

N = 90
CHANCE = np.random.default_rng(0)
Y = np.arange(N) % 3
X = np.stack([CHANCE.normal(2 * Y, 1), CHANCE.normal(-Y, 1), CHANCE.normal(size=N)], axis=1)
X = np.round(X * 2**10) / 2**10  # such that sums with the offsets below are exact
FAR = np.array([2.0**31, 0, -(2.0**40)])  # the first is about as large as seconds since 1970


def model(**params: Any) -> NoisyLabelClassifier:
    return NoisyLabelClassifier("warpi", epochs=2, random_state=0, **params)


def seen(x: np.ndarray) -> torch.Tensor:
    """What a network sees of features."""
    held = make_features(torch.from_numpy(x))
    (read,) = held.with_scale(held.fit_scale(torch.arange(len(x)))).stream([(torch.arange(len(x)), 0)], augment=False)
    return read.views[0]


def test_a_column_that_never_varied_says_nothing_about_new_rows(tmp_path: Path) -> None:
    """The number of a batch, or a year, in which all training rows agree: another one used to meet weights that were
    never trained, and to make of right answers wrong ones."""
    x = np.insert(X, 1, 2025.0, axis=1)
    new = np.insert(X, 1, 3000.0, axis=1)
    fitted = model().fit(x, Y, x[:30], Y[:30])
    np.testing.assert_array_equal(fitted.predict_proba(new), fitted.predict_proba(x))
    fitted.save(tmp_path / "model")
    loaded = NoisyLabelClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict_proba(new), fitted.predict_proba(x))
    prepare = fitted.net_.prepare
    made = prepare.layout.sample(8, Scale(prepare.mean, prepare.std), torch.Generator())  # what ONNX is compared on
    assert bool(made.isfinite().all())


# --- the numbers themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "too_coarse"),
    [
        (X[:, 0], False),
        (X[:, 0] + 100, False),
        (X[:, 0] + 2.0**20, True),
        (X[:, 0] / 3 * 1e-20, False),
        (X[:, 0] / 3 * 1e-60, True),  # zero in float32
        ((X[:, 0] + 2.0**20).astype(np.float32), False),  # nothing to be saved
        (np.arange(2**24 - N, 2**24), False),
        (1_700_000_000 + np.arange(N), True),
        (np.full(N, 0.1), False),
        (np.full(N, 1.7e9 + 1), False),
        (np.where(np.arange(N) % 2, 0.3, 0.1 + 0.2), False),  # one number, but for rounding
        (np.where(np.arange(N) == 3, 1e30, X[:, 0] / 3), False),  # an outlier
        (np.zeros(0), False),
    ],
)
def test_when_float32_is_too_coarse(column: np.ndarray, too_coarse: bool) -> None:
    assert needs_float64(column) == too_coarse
    assert needs_float64(np.stack([np.zeros(len(column)), column], axis=1)) == (
        too_coarse and column.dtype != np.float32
    )


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=20),
    st.integers(-(2**40), 2**40),
    st.integers(-300, 100),
)
@settings(max_examples=100, deadline=None)
def test_neither_offset_nor_unit_changes_what_is_seen(values: list[int], offset: int, power: int) -> None:
    x = np.array(values, dtype=np.float64)[:, None]
    want = seen(x)
    assert want.dtype == torch.float32
    torch.testing.assert_close(seen(x + offset), want)
    torch.testing.assert_close(seen(x * 2.0**power), want)


def test_columns_that_never_change_are_left_at_zero() -> None:
    x = np.stack([np.full(N, 0.1), np.full(N, 1.7e9 + 0.1), np.zeros(N), 1e-20 * X[:, 0]], axis=1)
    got = seen(x)
    assert bool((got[:, :3].abs() < 1e-6).all())
    assert float(got[:, 3].std(correction=0)) == pytest.approx(1)


def test_ordinary_numbers_are_as_they_were() -> None:
    """Bit for bit what one tensor of float32 gives."""
    x = torch.from_numpy((X / 3).astype(np.float32))
    new, one = make_features(x), torch.tensor(1.0)
    old = TensorExamples(x, warpi.data.examples.Scale(0 * one, one), standardise=True)
    rows = torch.arange(5, 60)
    a, b = (held.with_scale(held.fit_scale(rows)).read(rows, torch.Generator(), augment=False) for held in (new, old))  # type: ignore[arg-type]
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
def test_a_second_file_and_new_rows_are_read_as_the_first(tmp_path: Path, write: Any, end: str) -> None:
    near, far = (write(tmp_path / f"{name}.{end}", X + shift) for name, shift in (("near", 0), ("far", FAR)))
    few = write(tmp_path / f"few.{end}", X[:9] + FAR)  # of these alone float32 might do
    first, _ = load_dataset(str(far))
    second, _ = load_dataset(str(few), like=first)
    for held in (first.examples, second.examples):
        assert isinstance(held, Features)
        assert held.x.dtype == torch.float64
    task, truth = make_task(first, meta_data=second)
    assert truth.n_repeated == 9
    assert next(task.train.batches(4)).x.dtype == torch.float32
    assert load_dataset(str(near))[0].examples.x.dtype == torch.float32  # type: ignore[attr-defined]

    runs = [fit(tmp_path / path.stem, data=path, method="ce", epochs=2) for path in (near, far)]
    write(tmp_path / f"near.{end}", X)
    want, got = (warpi.predict(run, run.path.with_name(f"{run.path.name}.{end}")) for run in runs)
    np.testing.assert_allclose(got.probabilities, want.probabilities, atol=1e-5)
    again = warpi.predict(tmp_path / "far", few)  # opened anew
    np.testing.assert_allclose(again.probabilities, got.probabilities[:9], atol=1e-6)


# --- the estimator ----------------------------------------------------------------------------------------------------


def as_frame(x: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(x, columns=["a", "b", "c"]).assign(colour=pd.Categorical(["red"] * len(x), ["red", "blue"]))


@pytest.mark.parametrize("form", [np.asarray, as_frame])
@pytest.mark.parametrize("change", [lambda x: x + FAR, lambda x: x * 2.0**-70, lambda x: x * 2.0**-180])
def test_the_same_is_learned_wherever_columns_begin(form: Any, change: Any) -> None:
    x, x_trusted, y, y_trusted = X[30:], X[:30], Y[30:], Y[:30]
    want = model().fit(form(x), y, form(x_trusted), y_trusted).predict_proba(form(X))
    got = model().fit(form(change(x)), y, form(change(x_trusted)), y_trusted).predict_proba(form(change(X)))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("form", [np.asarray, as_frame])
def test_saved_and_exported(tmp_path: Path, form: Any) -> None:
    x = form(X + FAR)
    made = model().fit(x, Y, form(X[:9] + FAR), Y[:9])
    assert made.encode(x).dtype == np.float64
    want = made.predict_proba(x)
    made.save(tmp_path / "model")
    np.testing.assert_array_equal(NoisyLabelClassifier.load(tmp_path / "model").predict_proba(x), want)
    onnxruntime = pytest.importorskip("onnxruntime")
    made.to_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(["probabilities"], {"x": made.encode(x)})
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_files_that_were_saved_before(tmp_path: Path) -> None:
    made = model().fit(X, Y, X[:9], Y[:9])
    made.save(tmp_path / "new")
    state = unpack(tmp_path / "new", FORMAT, "")
    del state["layout"]["double"]
    (tmp_path / "old").write_bytes(pack(state, FORMAT))
    old = NoisyLabelClassifier.load(tmp_path / "old")
    np.testing.assert_array_equal(old.predict_proba(X), made.predict_proba(X))
    assert old.encode(X).dtype == np.float32
    assert replace(Layout.of(X, own_net=False), double=True).numbers(X).dtype == np.float64


def test_numbers_that_are_too_large_are_refused_with_their_row() -> None:
    from scipy.sparse import csr_array

    x = X.copy()
    x[7, 1] = 1e39
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in (np.asarray, csr_array, as_frame):
            with pytest.raises(ValueError, match=r"infinity or a value too large for float32: .*row 7$"):
                model().fit(form(x), Y, X[:9], Y[:9])


def test_copies_are_told_and_each_stands_for_one_row(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of a few categories that have nothing to do with the trusted ones but look the same."""
    x = CHANCE.integers(3, size=(200, 2)).astype(float)
    y, x_trusted, y_trusted = np.arange(200) % 2, np.repeat(np.arange(3.0), 2).repeat(2).reshape(6, 2), np.arange(6) % 2
    model().fit(x, y, x_trusted, y_trusted)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "6 of 200 rows of X are also in X_trusted and are used only as trusted examples"
    ]


def test_every_row_is_trusted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            warpi.UserError, match=r"all 90 rows of X are trusted, none is left .*; trust only rows that"
        ):
            model().fit(X, Y, trusted=np.ones(N, bool))
