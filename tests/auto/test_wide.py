"""Dense inputs with many columns: `auto` works on their principal directions."""

import numpy as np
import torch
from scipy.sparse import csr_array, hstack, random_array

from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.learners import softmax
from warpi.auto.learners.modules import Mixture
from warpi.auto.learners.softmax import find_span, fit_softmax
from warpi.auto.models import (
    WIDE,
    Plan,
    find_columns,
    find_directions,
    find_plain_columns,
    find_projection,
    fit_model,
)
from warpi.auto.rows import Rows, one_hot


def make_wide(n, columns=400, seed=0):
    """Three classes in five directions that many noisy columns share."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    hidden = rng.normal(size=(n, 5)) + 2.5 * np.eye(3, 5)[y]
    mix = np.random.default_rng(99).normal(size=(5, columns))
    x = hidden @ mix + rng.normal(size=(n, columns))
    return (x * np.linspace(0.1, 50, columns) + 7).astype(np.float32), y


def test_directions_are_those_of_standardized_columns():
    x, _ = make_wide(300)
    wide = find_directions(x)
    assert wide.shape == (400, WIDE)
    z = (x - x.mean(0)) / x.std(0)
    expected = np.linalg.svd(z - z.mean(0), full_matrices=False)[1][:5]  # singular values
    projected = x @ wide
    found = np.linalg.norm(projected - projected.mean(0), axis=0)[:5]
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert find_directions(x[:, :WIDE]) is None


def test_softmax_on_directions_is_softmax_on_all_standardized_columns():
    """If all directions are kept, the penalty is the same in both coordinates."""
    x, y = make_wide(150, columns=6)
    z = ((x - x.mean(0)) / x.std(0)).astype(np.float64)
    rotation = np.linalg.eigh(z.T @ z)[1]
    labels, weight, folds = np.eye(3)[y], np.ones(150), np.arange(150) % 3
    plain = fit_softmax(z, labels, weight, folds, 0.1)
    rotated = fit_softmax(z @ rotation, labels, weight, folds, 0.1, scaled=True)
    np.testing.assert_allclose(rotated.p, plain.p, atol=5e-3)


def test_softmax_on_far_more_columns_than_rows_is_the_same_in_the_span_of_the_rows(monkeypatch):
    monkeypatch.setattr(softmax, "TOLERANCE", 1e-13)
    rng = np.random.default_rng(0)
    dense = rng.random((60, 400)) * (rng.random((60, 400)) < 0.1)
    dense[5] = dense[6]  # the rows are not independent
    x, labels = csr_array(dense), np.eye(3)[rng.integers(0, 3, 60)]
    weight, folds = np.r_[np.zeros(10), np.ones(50)], np.arange(60) % 3  # some rows are only predicted
    spanned = fit_softmax(x, labels, weight, folds)
    monkeypatch.setattr(softmax, "MOST_SPANNED", 0)
    plain = fit_softmax(x, labels, weight, folds)
    np.testing.assert_allclose(spanned.p, plain.p, atol=1e-4)
    np.testing.assert_allclose(spanned.coefficients, plain.coefficients, atol=1e-4)
    np.testing.assert_allclose(spanned.predict(x[:10]), spanned.p[:10], atol=1e-6)


def test_rows_of_float32_that_depend_on_each_other_have_a_span():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 20)) @ rng.normal(size=(20, 400))  # their products are singular, up to rounding errors
    span = find_span(csr_array(rows.astype(np.float32)), np.arange(60))
    np.testing.assert_allclose(span.coordinates @ span.coordinates.T, rows @ rows.T, atol=0.01)


def test_auto_on_many_columns_corrects_labels_and_predicts_new_rows():
    x, y = make_wide(400)
    rng = np.random.default_rng(1)
    given = np.where(rng.random(400) < 0.35, (y + 1) % 3, y)
    rows = Rows(x[30:], given[30:], x[:30], y[:30], given[:30], 3)
    found = fit_auto(rows, AutoSettings())
    new, truth = make_wide(300, seed=5)
    with torch.no_grad():
        p = found.model(torch.from_numpy(new)).exp().numpy()
    assert (p.argmax(1) == truth).mean() > 0.9
    copy = Mixture()
    copy.load_state_dict(found.model.state_dict())
    with torch.no_grad():
        np.testing.assert_allclose(copy(torch.from_numpy(new)).exp().numpy(), p, atol=1e-5)


def test_tables_with_many_categories_keep_their_columns():
    """Only the most frequent categories are used, and trees still see single columns."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 500)
    numbers = rng.normal(size=(500, 3)) + 2 * y[:, None]
    words = np.eye(400)[(rng.pareto(1.0, 500) * 10).astype(int) % 400]
    x = np.concatenate([numbers, words], axis=1).astype(np.float32)
    selected = find_columns(x)
    assert selected.shape == (403, WIDE)
    assert (selected.sum(0) == 1).all()
    assert selected[:3].sum() == 3  # all numbers
    frequency = words.mean(0)
    kept = selected[3:].sum(1) > 0
    assert frequency[kept].min() >= frequency[~kept].max()
    assert find_columns(numbers) is None
    assert find_columns(make_wide(100)[0]) is None
    found = fit_auto(Rows(x[20:], y[20:], x[:20], y[:20], None, 2), AutoSettings())
    with torch.no_grad():
        p = found.model(torch.from_numpy(x)).exp().numpy()
    assert (p.argmax(1) == y).mean() > 0.9


def make_mixed(n, seed=0):
    """Words, two numbers, one of which tells the class, and two categories."""
    rng = np.random.default_rng(seed)
    words = random_array((n, 300), density=0.03, rng=rng, dtype=np.float32)
    numbers = rng.normal(size=(n, 2)).astype(np.float32)
    category = (rng.random((n, 2)) < [0.5, 0.01]).astype(np.float32)
    y = (np.abs(numbers[:, 0]) < 0.7).astype(np.int64)
    return csr_array(hstack([words, csr_array(numbers), csr_array(category)])), y


def test_forests_see_numbers_and_frequent_categories_next_to_directions_of_words():
    x, y = make_mixed(600)
    assert find_plain_columns(x).tolist() == [300, 301, 302]
    projection = find_projection(x, seed=0)
    np.testing.assert_array_equal((x @ projection)[:, :3], x[:, [300, 301, 302]].toarray())
    assert not projection[300:303, 3:].any()
    words = find_projection(x[:, :300], seed=0)
    np.testing.assert_allclose(projection[:300, 3:] @ projection[:300, 3:].T, words @ words.T, atol=0.02)
    plan = Plan(np.arange(600) % 5, n_trees=50, seed=0, projection=projection)
    forest = fit_model("forest", x, one_hot(y, 2), np.ones(600), plan)
    new, truth = make_mixed(400, seed=1)
    p = forest.module()(torch.as_tensor(new.toarray())).exp().numpy()
    np.testing.assert_allclose(p, forest.predict(new), atol=1e-5)
    assert (p.argmax(1) == truth).mean() > 0.95
    assert find_projection(x[:, 300:303], seed=0).shape == (3, 3)
