"""The torch modules predict what scikit-learn predicts, and can be stored without pickle."""

import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeRegressor

from warpi.auto.learners.convert import estimators_to_module
from warpi.auto.learners.forest import fit_forest, trees_to_module
from warpi.auto.learners.modules import (
    Gaps,
    Linear,
    Mixture,
    Node,
    Projected,
    Wrapped,
    build_part,
    round_down,
    store_part,
)
from warpi.auto.models import fit_neighbors, open_gaps
from warpi.errors import UserError


def make_rows(n: int = 120, d: int = 5, k: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    y = (x[:, 0] + 0.3 * rng.normal(size=n) > 0).astype(np.int64) + (x[:, 1] > 0.5) * (k > 2)
    return x, y


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    "estimator",
    [
        RandomForestClassifier(7, random_state=0),
        ExtraTreesClassifier(7, random_state=0),
        HistGradientBoostingClassifier(max_iter=5, min_samples_leaf=3),
        LogisticRegression(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_modules_equal_scikit_learn(estimator, k: int) -> None:
    x, y = make_rows(k=k)
    estimator.fit(x, y)
    new, _ = make_rows(300, seed=1)
    module = estimators_to_module([estimator], k)
    assert not isinstance(module, Wrapped)
    assert np.allclose(module(torch.as_tensor(new)).exp(), estimator.predict_proba(new), atol=1e-5)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("columns", [(0, 1), (1, 4), ()], ids=["seen in training", "one of them seen", "unseen"])
def test_boosting_sends_missing_numbers_where_scikit_learn_does(columns: tuple[int, ...], k: int) -> None:
    """`columns` have missing cells in training, and columns 0 and 1 in prediction."""
    x, y = make_rows(400, k=k)
    rng = np.random.default_rng(5)
    for column in columns:
        x[(rng.random(len(x)) < 0.3) & ((y == 0) | (column == 4)), column] = np.nan
    estimator = HistGradientBoostingClassifier(max_iter=8, min_samples_leaf=3).fit(x, y)
    new, _ = make_rows(300, seed=1)
    new[:, :2][rng.random((300, 2)) < 0.4] = np.nan
    module = estimators_to_module([estimator], k)
    assert np.allclose(module(torch.as_tensor(new)).exp(), estimator.predict_proba(new), atol=1e-5)


def make_gaps() -> tuple[HistGradientBoostingClassifier, np.ndarray, np.ndarray]:
    """A model of numbers with NaN, and the same numbers as medians and marks: column 5 marks the gaps of column 1."""
    x, y = make_rows(300)
    gaps = np.random.default_rng(6).random(len(x)) < 0.3
    mark = np.where(gaps, 1.5, -0.6).astype(np.float32)[:, None]  # standardized
    filled = np.concatenate([np.where(gaps[:, None] & (np.arange(5) == 1), 0, x), mark], axis=1).astype(np.float32)
    x[gaps, 1] = np.nan
    numbers = np.concatenate([x, mark], axis=1)
    return HistGradientBoostingClassifier(max_iter=5, min_samples_leaf=3).fit(numbers, y), numbers, filled


def test_marks_become_missing_numbers(tmp_path) -> None:
    estimator, numbers, filled = make_gaps()
    marks = np.array([-1, 5, -1, -1, -1, -1])
    np.testing.assert_array_equal(open_gaps(filled, marks), numbers)
    mixture = Mixture([Gaps(marks, estimators_to_module([estimator], 3))], [Node([0], [1.0], [1.0], smooth=0.0)])
    x = torch.as_tensor(filled)
    assert np.allclose(mixture(x).exp(), estimator.predict_proba(numbers), atol=1e-5)
    restored = Mixture()
    restored.load_state_dict(mixture.state_dict())
    assert torch.equal(restored(x), mixture(x))
    session = export(mixture, x[:4], tmp_path / "model.onnx")
    assert np.allclose(session.run(None, {"x": filled})[0], mixture(x), atol=1e-4)


def test_trees_of_older_versions_are_restored() -> None:
    estimator, _, _ = make_gaps()
    stored = store_part(estimators_to_module([estimator], 3))
    del stored["gap_right"]
    x = torch.as_tensor(make_rows(20)[0])
    x = torch.cat([x, torch.zeros(20, 1)], dim=1)
    assert torch.equal(build_part(stored)(x), estimators_to_module([estimator], 3)(x))


def test_a_class_that_the_estimator_has_not_seen_gets_no_probability() -> None:
    x, y = make_rows(k=3)
    for estimator in (RandomForestClassifier(3), LogisticRegression(), HistGradientBoostingClassifier(max_iter=2)):
        module = estimators_to_module([estimator.fit(x, 2 * (y > 0))], 4)
        p = module(torch.as_tensor(x)).exp().numpy()
        assert np.allclose(p[:, [1, 3]], 0, atol=1e-6)
        assert np.allclose(p[:, [0, 2]], estimator.predict_proba(x), atol=1e-5)


def test_tree_thresholds_are_compared_as_scikit_learn_does() -> None:
    """Neighboring float32 numbers fall on the same side as in float64."""
    x = np.repeat(np.float32(1) + np.arange(40, dtype=np.float32) * np.finfo(np.float32).eps, 2)[:, None]
    q = np.random.default_rng(0).dirichlet([1, 1], len(x))
    tree = DecisionTreeRegressor(random_state=0).fit(x, q).tree_
    p = trees_to_module([tree])(torch.as_tensor(x)).exp().numpy()
    assert np.allclose(p, tree.value[tree.apply(x)][:, :, 0], atol=1e-6)


def test_round_down_gives_the_largest_float32_below() -> None:
    exact = np.array([0.1, -0.1, 1.0, 1e30, -1e30, 0.0])
    rounded = round_down(exact)
    assert (rounded.astype(np.float64) <= exact).all()
    assert (np.nextafter(rounded, np.float32(np.inf)).astype(np.float64) > exact).all()


def test_neighbors_module_equals_a_loop() -> None:
    x, y = make_rows(40)
    q = np.eye(3)[y]
    weight = np.ones(40)
    weight[:5] = 3
    p, module = fit_neighbors(x, q, weight, k=4)
    z = (x - x.mean(0)) / x.std(0)
    for i in range(40):
        order = [j for j in np.argsort(((z - z[i]) ** 2).sum(1), kind="stable") if j != i][:4]
        votes = sum(weight[j] * q[j] for j in order)
        assert np.allclose(p[i], votes / votes.sum(), atol=1e-6)
    new, _ = make_rows(10, seed=2)
    order = np.argsort(((((new[0] - x.mean(0)) / x.std(0)) - z) ** 2).sum(1))[:4]
    votes = (weight[order, None] * q[order]).sum(0)
    assert np.allclose(module(torch.as_tensor(new))[0].exp(), votes / votes.sum(), atol=1e-5)


def make_mixture() -> tuple[Mixture, torch.Tensor]:
    x, y = make_rows()
    rng = np.random.default_rng(3)
    forest = fit_forest(x, np.eye(3)[y], np.ones(len(x)), 5, seed=0)
    linear = Linear(x.mean(0), x.std(0), rng.normal(size=(5, 3)), np.zeros(3), 6.0)
    small = Linear(np.zeros(2), np.ones(2), rng.normal(size=(2, 3)), np.zeros(3), 6.0)
    projected = Projected(rng.normal(size=(5, 2)), small)
    nodes = [Node([0, 1], [0.7, 0.3], [1.0, 2.0], geometric=True), Node([0, 2, 3], [0.2, 0.3, 0.5], [1.4, 1.0, 0.7])]
    return Mixture([forest.module(), linear, projected], nodes), torch.as_tensor(x)


def test_a_mixture_is_restored_from_its_state() -> None:
    mixture, x = make_mixture()
    restored = Mixture()
    restored.load_state_dict(mixture.state_dict())
    assert torch.equal(restored(x), mixture(x))
    assert torch.allclose(mixture(x).exp().sum(1), torch.ones(len(x)), atol=1e-5)


def test_the_state_of_a_mixture_holds_only_tensors_and_plain_values() -> None:
    def check(value) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)
        else:
            assert value is None or isinstance(value, torch.Tensor | float | int | bool | str), type(value)

    check(make_mixture()[0].state_dict())


def test_an_estimator_without_a_conversion_cannot_be_saved() -> None:
    x, y = make_rows()
    mixture = Mixture([estimators_to_module([GaussianNB().fit(x, y)], 3)], [Node([0], [1.0], [1.0])])
    assert torch.isfinite(mixture(torch.as_tensor(x))).all()
    with pytest.raises(UserError, match="contains GaussianNB cannot be saved"):
        mixture.state_dict()


def export(mixture: Mixture, x: torch.Tensor, path: Path) -> onnxruntime.InferenceSession:
    shapes = {"x": {0: torch.export.Dim("batch")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            mixture.eval(), (x,), path, dynamo=True, verbose=False, input_names=["x"], dynamic_shapes=shapes
        )
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_a_mixture_is_exported_to_onnx(tmp_path) -> None:
    mixture, x = make_mixture()
    session = export(mixture, x[:4], tmp_path / "model.onnx")
    assert np.allclose(session.run(None, {"x": x.numpy()})[0], mixture(x), atol=1e-4)


def test_a_selection_of_columns_is_an_index_with_the_same_result() -> None:
    rng = np.random.default_rng(0)
    linear = Linear(np.zeros(2), np.ones(2), rng.normal(size=(2, 3)), np.zeros(3), 6.0)
    selected = Projected(np.eye(5)[:, [3, 1]], linear)
    x = torch.as_tensor(rng.normal(size=(7, 5)), dtype=torch.float32)
    assert selected.columns is not None
    assert torch.equal(selected(x), linear(x[:, [3, 1]]))
    assert Projected(2 * np.eye(5)[:, [3, 1]], linear).columns is None
