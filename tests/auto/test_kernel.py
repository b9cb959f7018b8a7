"""Kernel ridge regression against naive loops and closed forms."""

import numpy as np
import pytest
import torch
from scipy import sparse

from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.learners import kernel
from warpi.auto.learners.kernel import fit_kernel, fit_ridge, gaussian
from warpi.auto.learners.modules import build_part, store_part
from warpi.auto.rows import Rows, one_hot
from warpi.errors import UserError


def make_rows(n: int = 60, d: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, soft labels, and positive weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    q = rng.dirichlet([0.5, 0.5, 0.5], n)
    return x, q, rng.uniform(0.5, 4.0, n)


def ridge(features: np.ndarray, y: np.ndarray, weight: np.ndarray, penalty: float) -> np.ndarray:
    """The normal equations."""
    curvature = (features * weight[:, None]).T @ features + penalty * np.eye(features.shape[1])
    return np.linalg.solve(curvature, features.T @ (weight[:, None] * y))


def test_leave_one_out_predictions_are_those_of_fits_without_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    x, q, weight = make_rows(25)
    features = np.concatenate([x.astype(np.float64), np.ones((len(x), 1))], axis=1)
    for penalty in (0.1, 5.0):
        monkeypatch.setattr(kernel, "PENALTIES", (penalty,))
        beta, left_out = fit_ridge(features, q, weight)
        assert np.allclose(beta, ridge(features, q, weight, penalty))
        for i in range(len(x)):
            others = np.arange(len(x)) != i
            expected = features[i] @ ridge(features[others], q[others], weight[others], penalty)
            assert np.allclose(left_out[i], expected)


def test_the_penalty_has_the_smallest_leave_one_out_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x, q, weight = make_rows(40)
    features = x.astype(np.float64)
    errors = {}
    for penalty in kernel.PENALTIES:
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "PENALTIES", (penalty,))
            _, left_out = fit_ridge(features, q, weight)
        errors[penalty] = weight @ np.square(q - left_out).sum(1)
    best = min(errors, key=lambda penalty: errors[penalty])
    assert np.allclose(fit_ridge(features, q, weight)[0], ridge(features, q, weight, best))


def test_with_all_rows_as_landmarks_it_is_kernel_ridge_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """f = K (K + penalty / w)^-1 y, where K has a constant added for the intercept."""
    monkeypatch.setattr(kernel, "PENALTIES", (1.0,))
    x, q, weight = make_rows()
    fitted = fit_kernel(x, q, weight, seed=0)
    z = np.clip((x - fitted.mean) / fitted.scale, -6, 6).astype(np.float64)
    gram = gaussian(z, z, np.sqrt(3)) + 1
    w = weight / weight.mean()
    prior = w @ q / w.sum()
    f = prior + gram @ np.linalg.solve(gram + np.diag(1 / w), q - prior)
    p = np.maximum(f, kernel.LEAST)
    assert np.allclose(fitted.predict(x), p / p.sum(1, keepdims=True), atol=1e-4)


def test_gaussian_kernel_equals_a_loop() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=(5, 3))
    expected = [[np.exp(-sum((u - v) ** 2) / (2 * 1.5**2)) for v in b] for u in a]
    assert np.allclose(gaussian(a, b, 1.5), expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_module_predicts_the_same_also_after_it_was_stored(scaled: bool) -> None:
    x, q, weight = make_rows(80)
    weight[::4] = 0
    fitted = fit_kernel(x, q, weight, 0, scaled)
    new = 3 * make_rows(50, seed=1)[0]  # some cells lie beyond the limit
    module = build_part(store_part(fitted.module()))
    assert np.allclose(module(torch.as_tensor(new)).exp().numpy(), fitted.predict(new), atol=1e-5)
    assert np.allclose(fitted.p[::4], fitted.predict(x[::4]))
    assert np.allclose(fitted.p.sum(1), 1)


def test_rows_do_not_see_their_own_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that are pure noise cannot be predicted, although the function itself fits them."""
    monkeypatch.setattr(kernel, "PENALTIES", (0.1,))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(700, 4)).astype(np.float32)  # more rows than landmarks
    y = rng.integers(2, size=700)
    fitted = fit_kernel(x, one_hot(y, 2), np.ones(700), 0)
    assert len(fitted.points) == kernel.LANDMARKS
    assert (fitted.p.argmax(1) == y).mean() < 0.55
    assert (fitted.predict(x).argmax(1) == y).mean() > 0.6


def test_equal_rows_and_constant_columns() -> None:
    x = np.repeat(np.array([[0.0, 5.0], [1.0, 5.0]], dtype=np.float32), 20, axis=0)
    q = one_hot(np.repeat([0, 1], 20), 2)
    fitted = fit_kernel(x, q, np.ones(40), 0)
    assert np.isfinite(fitted.p).all()
    assert (fitted.p.argmax(1) == np.repeat([0, 1], 20)).all()


def test_sparse_rows_are_refused_with_the_models_that_take_them() -> None:
    x, q, _ = make_rows(30)
    rows = Rows(sparse.csr_array(x), q.argmax(1), sparse.csr_array(x[:6]), q[:6].argmax(1), None, 3)
    with pytest.raises(UserError, match="model 'kernel' needs dense columns; choose forest or logistic"):
        fit_auto(rows, AutoSettings(models=("kernel",)))


def test_the_default_has_a_kernel_only_for_dense_rows_with_trusted_ones() -> None:
    x, q, _ = make_rows(90)
    y = q.argmax(1)
    trusted = Rows(x, y, x[:9], y[:9], None, 3)
    untrusted = Rows(x, y, x[:0], y[:0], None, 3)
    sparse_rows = Rows(sparse.csr_array(x), y, sparse.csr_array(x[:9]), y[:9], None, 3)
    quick = AutoSettings(measure=False)
    assert "kernel" in {candidate.name for candidate in fit_auto(trusted, quick).candidates}
    assert "kernel" not in {candidate.name for candidate in fit_auto(untrusted, quick).candidates}
    assert "kernel" not in {candidate.name for candidate in fit_auto(sparse_rows, quick).candidates}
