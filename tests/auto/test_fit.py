"""`fit_auto` on small tables: it learns through noise, its parts agree with each other, and odd inputs work."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from warpi.auto import budget, candidates, fit as fit_module, models, procedure, score
from warpi.auto.fit import AutoResult, AutoSettings, fit_auto
from warpi.auto.learners.modules import Mixture
from warpi.auto.problem import Clock, Column, OutOfTimeError, pose_problem
from warpi.auto.rows import Rows
from warpi.auto.transition import bayes
from warpi.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def small_models() -> Iterator[None]:
    """Small models and few repetitions, because these tests fit many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "N_TREES", 10)
        patch.setattr(score, "N_FOLDS", 2)
        patch.setattr(models, "make_boosting", lambda _n, _k: HistGradientBoostingClassifier(max_iter=5))
        yield


QUICK = AutoSettings(models=("logistic",))


def make_rows(n: int = 150, per_class: int = 6, k: int = 3, rate: float = 0.3, seed: int = 0, d: int = 4) -> Rows:
    """Gaussian classes; noisy labels move to the next class."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % k
    trusted = np.repeat(np.arange(k), per_class)
    truth = np.concatenate([y, trusted])
    centers = 3 * rng.normal(size=(k, d))
    x = (centers[truth] + rng.normal(size=(len(truth), d))).astype(np.float32)
    given = np.where(rng.random(len(truth)) < rate, (truth + 1) % k, truth)
    return Rows(x[:n], given[:n], x[n:], trusted, given[n:], k)


def true_labels(rows: Rows) -> np.ndarray:
    return np.arange(rows.n_noisy) % rows.n_classes


def check(result: AutoResult, rows: Rows) -> None:
    """Shapes, sums and finite values of everything in a result."""
    k = rows.n_classes
    assert result.p.shape == result.posterior.shape == (rows.n_noisy, k)
    assert result.p_trusted.shape == (rows.n_trusted, k)
    for p in (result.p, result.posterior, result.p_trusted, result.transition):
        assert np.isfinite(p).all()
        assert np.allclose(p.sum(1), 1, atol=1e-6)
    assert 0 <= result.noise_rate_point <= 1
    assert result.reason
    x = rows.x.toarray() if sparse.issparse(rows.x) else rows.x
    with torch.no_grad():
        log_p = result.model(torch.as_tensor(x))
    assert log_p.shape == (rows.n_noisy, k)
    assert torch.isfinite(log_p).all()


@pytest.fixture(scope="module")
def fitted() -> tuple[Rows, AutoResult]:
    rows = make_rows()
    return rows, fit_auto(rows, AutoSettings())


def test_it_learns_through_wrong_labels(fitted: tuple[Rows, AutoResult]) -> None:
    rows, result = fitted
    check(result, rows)
    truth = true_labels(rows)
    assert (rows.given == truth).mean() < 0.8
    assert (result.p.argmax(1) == truth).mean() > 0.93
    assert (result.posterior.argmax(1) == truth).mean() > 0.93
    assert result.transition[0, 1] == pytest.approx(0.3, abs=0.12)


def test_candidates_are_listed_with_scores_and_weights(fitted: tuple[Rows, AutoResult]) -> None:
    _, result = fitted
    names = [candidate.name for candidate in result.candidates]
    assert {"forest", "logistic", "forest, trusted x10", "forest, pruned", "forest, trusted only", "gold"} <= {*names}
    assert sum(candidate.weight for candidate in result.candidates) == pytest.approx(1)
    for candidate in result.candidates:
        assert 0 <= candidate.score <= 1
        assert candidate.error >= 0
        assert candidate.seconds >= 0


def test_accuracy_and_noise_rate_have_intervals(fitted: tuple[Rows, AutoResult]) -> None:
    rows, result = fitted
    accuracy = result.trusted_score
    assert accuracy is not None
    assert accuracy.low <= accuracy.estimate <= accuracy.high
    assert accuracy.estimate == pytest.approx((result.p_trusted.argmax(1) == rows.y_trusted).mean(), abs=0.02)
    rate = result.noise_rate
    assert rate is not None
    assert rate.low <= (rows.given != true_labels(rows)).mean() <= rate.high


def test_the_same_seed_gives_the_same_model(fitted: tuple[Rows, AutoResult]) -> None:
    rows, result = fitted
    again = fit_auto(rows, AutoSettings())
    assert np.array_equal(again.p, result.p)
    assert np.array_equal(again.p_trusted, result.p_trusted)


def test_the_model_is_restored_from_its_state(fitted: tuple[Rows, AutoResult]) -> None:
    rows, result = fitted
    restored = Mixture()
    restored.load_state_dict(result.model.state_dict())
    x = torch.as_tensor(rows.x)
    assert torch.equal(restored(x), result.model(x))


def test_without_trusted_rows_it_still_beats_the_given_labels() -> None:
    rows = make_rows(per_class=0, rate=0.25)
    result = fit_auto(rows, AutoSettings())
    check(result, rows)
    truth = true_labels(rows)
    assert (result.p.argmax(1) == truth).mean() > (rows.given == truth).mean() + 0.1
    assert result.trusted_score is None
    assert result.noise_rate is None
    assert result.noise_rate_point == pytest.approx((rows.given != truth).mean(), abs=0.1)
    assert all(candidate.score is None for candidate in result.candidates)
    assert "no trusted row" in result.reason


def test_it_switches_to_trusted_rows_if_noisy_labels_are_random() -> None:
    rows = make_rows(per_class=30, k=2)
    random_labels = np.random.default_rng(0).integers(0, 2, rows.n_noisy)
    rows = Rows(rows.x, random_labels, rows.x_trusted, rows.y_trusted, None, 2)
    result = fit_auto(rows, AutoSettings())
    assert (result.p.argmax(1) == true_labels(rows)).mean() > 0.9


@pytest.mark.parametrize(
    "rows",
    [
        make_rows(per_class=1, k=2),
        make_rows(n=10, per_class=1, k=2),
        make_rows(n=3, per_class=2, k=5),
        make_rows(n=60, per_class=2, k=12),
        make_rows(n=0, per_class=5),
    ],
    ids=["one per class", "ten rows", "fewer rows than classes", "many classes", "no noisy row"],
)
@pytest.mark.parametrize("name", ["forest", "logistic"])
def test_few_rows(rows: Rows, name: str) -> None:
    check(fit_auto(rows, AutoSettings(models=(name,))), rows)


def test_one_trusted_row_gives_no_accuracy() -> None:
    rows = make_rows(per_class=1)
    rows = Rows(rows.x, rows.given, rows.x_trusted[:1], rows.y_trusted[:1], None, 3)
    result = fit_auto(rows, QUICK)
    check(result, rows)
    assert result.trusted_score is None


def test_a_class_without_trusted_rows_is_still_predicted() -> None:
    rows = make_rows(per_class=8, rate=0.2)
    keep = rows.y_trusted < 2
    part = Rows(rows.x, rows.given, rows.x_trusted[keep], rows.y_trusted[keep], rows.given_trusted[keep], 3)
    result = fit_auto(part, AutoSettings())
    check(result, part)
    members = true_labels(rows) == 2
    assert (result.p.argmax(1)[members] == 2).mean() > 0.8


def test_constant_columns_and_repeated_rows() -> None:
    rows = make_rows(n=60)
    x = np.concatenate([rows.x, np.ones((60, 2), np.float32)], axis=1)
    trusted = np.concatenate([rows.x_trusted, np.ones((rows.n_trusted, 2), np.float32)], axis=1)
    twice = Rows(np.tile(x, (2, 1)), np.tile(rows.given, 2), trusted, rows.y_trusted, None, 3)
    check(fit_auto(twice, AutoSettings()), twice)
    constant = Rows(np.ones((30, 2), np.float32), rows.given[:30], trusted[:, -2:], rows.y_trusted, None, 3)
    check(fit_auto(constant, AutoSettings()), constant)


@pytest.mark.parametrize("many", [False, True])
def test_the_accuracy_is_not_raised_by_corrections_that_know_the_trusted_rows(
    many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be learned here, but the corrected label of a row is that of its nearest trusted row."""
    monkeypatch.setattr(score, "MANY_ROWS", 0 if many else 1000)
    rng = np.random.default_rng(0)
    x_trusted = rng.normal(size=(40, 2)).astype(np.float32)
    nearest = np.arange(600) % 40
    x = (x_trusted[nearest] + 0.001 * rng.normal(size=(600, 2))).astype(np.float32)
    y_trusted, before = rng.integers(2, size=40), rng.integers(2, size=600)
    corrected = y_trusted[nearest]
    changed = np.where(corrected != before, before, -1)
    scores = {}
    for name, replaced in (("unknown", None), ("known", changed)):
        rows = Rows(x, corrected, x_trusted, y_trusted, None, 2, replaced)
        result = fit_auto(rows, AutoSettings(models=("knn",)))
        assert result.trusted_score is not None
        scores[name] = result.trusted_score.estimate
    assert scores["unknown"] > 0.9
    assert scores["known"] < 0.7


@pytest.mark.parametrize("most", [10_000, 60])
def test_the_model_learns_from_the_labels_before_an_audit_changed_them(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corrections only tell how many of the corrected labels are wrong."""
    monkeypatch.setattr(fit_module, "MOST_ROWS", most)
    rows = make_rows()
    corrected = np.where(np.arange(rows.n_noisy) % 10 == 0, (true_labels(rows) + 1) % 3, true_labels(rows))
    changed = np.where(corrected != rows.given, rows.given, -1)
    before = fit_auto(replace(rows, given_trusted=None), QUICK)
    after = fit_auto(replace(rows, given=corrected, given_trusted=None, before_audit=changed), QUICK)
    assert np.allclose(after.p, before.p)
    assert np.allclose(after.p_trusted, before.p_trusted)
    with torch.no_grad():
        x = torch.as_tensor(rows.x)
        same = torch.allclose(after.model(x), before.model(x))
        assert same == (most < rows.n_noisy)  # otherwise models of the corrected labels have a small share
        assert torch.allclose(after.model(x).exp(), before.model(x).exp(), atol=fit_module.CORRECTED_SHARE)
    assert before.noise_rate_point == pytest.approx((rows.given != true_labels(rows)).mean(), abs=0.05)
    assert after.noise_rate_point == pytest.approx(0.1, abs=0.04)
    assert np.allclose(after.posterior, bayes(after.p, after.transition, corrected))


def test_a_checked_row_has_its_label_and_the_weight_of_a_trusted_row() -> None:
    """A small group far from all trusted rows, most of whose labels are wrong: four checked labels are enough."""
    rows = make_rows(n=300)
    group = np.flatnonzero(true_labels(rows) == 0)[:20]
    x, given = rows.x.copy(), rows.given.copy()
    x[group] += 40
    given[group] = 1
    checked = np.zeros(300, dtype=bool)
    checked[group[:4]] = True
    given[checked] = 0
    rest = group[4:]
    found = {}
    for name, marks in (("unknown", None), ("known", checked)):
        result = fit_auto(replace(rows, x=x, given=given, checked=marks), AutoSettings(models=("forest",)))
        found[name] = result.p[rest, 0].mean()
        check(result, rows)
    assert np.array_equal(result.posterior[checked], np.eye(3)[[0] * 4])
    assert found["known"] > found["unknown"] + 0.2


def test_sparse_rows() -> None:
    rows = make_rows(d=30)
    positive = [sparse.csr_array(np.maximum(x, 0)) for x in (rows.x, rows.x_trusted)]
    wide = Rows(positive[0], rows.given, positive[1], rows.y_trusted, rows.given_trusted, 3)
    result = fit_auto(wide, AutoSettings())
    check(result, wide)
    assert (result.p.argmax(1) == true_labels(rows)).mean() > 0.9
    restored = Mixture()
    restored.load_state_dict(result.model.state_dict())


@pytest.mark.parametrize("names", [("boosting", "knn"), ("knn",)], ids=str)
def test_other_models(names: tuple[str, ...]) -> None:
    rows = make_rows(n=90)
    result = fit_auto(rows, AutoSettings(models=names))
    check(result, rows)
    assert (result.p.argmax(1) == true_labels(rows)).mean() > 0.85


@pytest.mark.parametrize(
    ("estimator", "savable"),
    [
        (LogisticRegression(), True),
        (HistGradientBoostingClassifier(max_iter=5), True),
        (KNeighborsClassifier(7), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_classifier(estimator: object, savable: bool) -> None:
    """KNeighborsClassifier takes no sample_weight, so it is fitted on drawn labels."""
    rows = make_rows(n=90)
    result = fit_auto(rows, AutoSettings(models=(estimator,)))
    check(result, rows)
    assert type(estimator).__name__ in {candidate.name for candidate in result.candidates}
    assert (result.p.argmax(1) == true_labels(rows)).mean() > 0.85
    if savable:
        result.model.state_dict()
    else:
        with pytest.raises(UserError, match="cannot be saved"):
            result.model.state_dict()


class Sighted(HistGradientBoostingClassifier):
    """Fails unless it sees a missing cell in column 1, and none elsewhere."""

    def fit(self, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None) -> "Sighted":
        assert np.isnan(X).any(axis=0).tolist() == [False, True, False, False, False]
        return super().fit(X, y, sample_weight)


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "some columns selected"])
def test_boosting_sees_missing_cells(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of column 1 are missing in most rows of class 0. Column 5 is left out if 5 columns are selected."""
    rows = make_rows(n=90, per_class=8)
    rng = np.random.default_rng(1)

    def add_gaps(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
        gaps = (labels == 0) & (rng.random(len(x)) < 0.8)
        more = np.stack([gaps, np.arange(len(x)) == 0], axis=1)
        return np.concatenate([np.where(gaps[:, None] & (np.arange(4) == 1), 0, x), more], axis=1).astype(np.float32)

    x, x_trusted = add_gaps(rows.x, true_labels(rows)), add_gaps(rows.x_trusted, rows.y_trusted)
    if wide:
        x, x_trusted = (np.concatenate([part[:, 5:], part[:, :5]], axis=1) for part in (x, x_trusted))
        monkeypatch.setattr(fit_module, "find_columns", lambda _: np.eye(6, dtype=np.float32)[:, 1:])
        marks = np.array([-1, -1, 5, 0, -1, -1])
    else:
        x, x_trusted = x[:, :5], x_trusted[:, :5]
        marks = np.array([-1, 4, -1, -1, -1])
    marked = replace(rows, x=x, x_trusted=x_trusted, marks=marks)
    boosting = Sighted(max_iter=5, min_samples_leaf=2)
    result = fit_auto(marked, AutoSettings(models=(boosting,), measure=False))
    check(result, marked)
    assert (result.p.argmax(1) == true_labels(rows)).mean() > 0.85


def test_the_smallest_budget_leaves_one_model_and_its_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FEWEST_TREES", 6)
    rows = make_rows()
    result = fit_auto(rows, AutoSettings(budget=1e-6))
    check(result, rows)
    assert [candidate.name for candidate in result.candidates if candidate.weight] == ["first stack"]
    assert {candidate.name for candidate in result.candidates if not candidate.note} == {"forest", "first stack"}
    notes = {candidate.name: candidate.note for candidate in result.candidates if candidate.note}
    expected = {"logistic", "kernel", "gold forest", "gold logistic", "gold kernel", "trees 7 to 10 of each forest"}
    assert expected <= set(notes)
    assert set(notes.values()) == {budget.NO_TIME}
    hits = result.p_trusted.argmax(1) == rows.y_trusted
    assert result.trusted_score is not None
    assert result.trusted_score.estimate == pytest.approx(hits.mean(), abs=0.1)


def test_a_budget_without_trusted_rows() -> None:
    rows = make_rows(per_class=0)
    result = fit_auto(rows, AutoSettings(budget=1e-6))
    check(result, rows)
    assert "the budget allows" in result.reason
    assert {c.name for c in result.candidates if c.note} == {
        "logistic",
        "forest, pruned",
        "gold forest",
        "gold logistic",
    }


def test_with_enough_time_a_budget_leaves_nothing_out() -> None:
    rows = make_rows()
    result = fit_auto(rows, AutoSettings(models=("logistic",), budget=1e6))
    without = fit_auto(rows, QUICK)
    assert not [candidate.note for candidate in result.candidates if candidate.note]
    assert {c.name for c in result.candidates} == {c.name for c in without.candidates}
    assert np.allclose(result.p, without.p, atol=1e-6)
    assert result.trusted_score is not None


def test_gold_has_as_many_models_as_fit_into_the_budget() -> None:
    """Gold takes twice the time of a model. The repetitions take as long again as all that they repeat."""
    problem = pose_problem(make_rows())
    plan = fit_module.make_plan(problem, 0)
    for seconds, left_out in ((100, set()), (11, {"gold kernel"}), (3, {"gold forest", "gold kernel"})):
        fitter = candidates.CandidateFitter(problem, plan, Clock(seconds), lambda _: None, repeats=1)
        fitter.columns = [Column("forest", problem.labels, 1.0), Column("kernel", problem.labels, 3.0)]
        fitter.reserve_gold(("forest", "kernel"))
        assert set(fitter.left_out) == left_out
        assert fitter.reserved == {0: 16, 1: 4, 2: 0}[len(left_out)]
        assert fitter.admits("forest, pruned", "forest") == (seconds > fitter.reserved + 2)


def test_progress_is_reported() -> None:
    seen: list[tuple[str, float]] = []
    fit_auto(make_rows(n=60), QUICK, progress=lambda name, share: seen.append((name, share)))
    assert any(name == "gold" for name, _ in seen)
    assert [share for _, share in seen] == sorted(share for _, share in seen)


def test_large_tables_are_fitted_on_a_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "MOST_CELLS", 180)
    rows = make_rows(n=200)
    seen: list[str] = []
    result = fit_auto(rows, QUICK, progress=lambda name, _share: seen.append(name))
    check(result, rows)
    assert (result.p.argmax(1) == true_labels(rows)).mean() > 0.9
    assert "gold logistic, all rows" in seen


def test_the_last_fit_uses_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class that the sample of 60 rows can hardly show is predicted by the model of all rows."""
    rows = make_rows(n=2000, rate=0.1)
    shift = np.where(np.arange(2000) % 10 == 0, 30.0, 0.0)[:, None] * np.eye(4)[0]  # a rare second group
    turned = Rows(
        (rows.x + shift).astype(np.float32),
        np.where(shift[:, 0] > 0, 0, rows.given),
        rows.x_trusted,
        rows.y_trusted,
        None,
        3,
    )
    monkeypatch.setattr(fit_module, "MOST_ROWS", 60)
    part = fit_auto(turned, QUICK).model
    monkeypatch.setattr(procedure, "REFIT_FROM", 2.0)
    without = fit_auto(turned, QUICK).model
    group = torch.as_tensor(turned.x[::10])
    with torch.no_grad():
        assert part(group).exp()[:, 0].mean() > without(group).exp()[:, 0].mean()


def test_with_many_rows_the_plain_models_are_fitted_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, int]] = []
    fit_model = candidates.fit_model

    def counted(model: Any, x: Any, q: Any, weight: Any, *args: Any, **how: Any) -> Any:
        calls.append((model, int((weight == 1).sum())))
        return fit_model(model, x, q, weight, *args, **how)

    monkeypatch.setattr(candidates, "fit_model", counted)
    monkeypatch.setattr(score, "MANY_ROWS", 100)
    rows = make_rows()
    result = fit_auto(rows, QUICK)
    assert calls.count(("logistic", rows.n_noisy + rows.n_trusted)) == 1
    assert result.trusted_score is not None
    assert result.trusted_score.estimate > 0.8


@pytest.mark.parametrize("kinds", [("forest", "logistic", "boosting"), ("kernel",), ("knn",)])
def test_fast_predictions_are_those_of_the_module(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows()
    monkeypatch.setattr(fit_module, "MOST_ROWS", 60)
    monkeypatch.setattr(procedure, "REFIT_FROM", 2.0)
    result = fit_auto(rows, AutoSettings(models=kinds, measure=False))
    chosen = fit_module.choose_rows(rows, 0, 60, 10**6)
    rest = np.setdiff1d(np.arange(rows.n_noisy), chosen)
    with torch.no_grad():
        expected = result.model(torch.as_tensor(rows.x[rest])).exp().numpy()
    assert np.allclose(result.p[rest], expected, atol=1e-4)


def test_without_time_for_gold_the_first_stack_is_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*_args: object) -> None:
        raise OutOfTimeError

    monkeypatch.setattr(procedure, "fit_gold", raise_error)
    rows = make_rows()
    result = fit_auto(rows, AutoSettings(models=("logistic",), budget=1e6))
    check(result, rows)
    notes = {candidate.name: candidate.note for candidate in result.candidates if candidate.note}
    assert "budget" in notes["gold"]


def test_an_error_in_the_progress_function_stops_a_fit_between_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "TICK", 0.0)
    seen: list[str] = []

    def stop(name: str, _share: float) -> None:
        seen.append(name)
        if seen.count("forest") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_auto(make_rows(), AutoSettings(), progress=stop)
    assert set(seen) == {"start", "forest"} or set(seen) == {"forest"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"given": np.zeros(3, np.int64)}, "150 noisy rows but 3 labels"),
        ({"given": np.full(150, 7)}, "must be 0 to 2"),
        ({"x": np.full((150, 4), np.nan, np.float32)}, "NaN"),
        ({"x_trusted": np.zeros((18, 9), np.float32)}, "4 columns, trusted rows 9"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_auto(Rows(**{**vars(make_rows()), **change}), QUICK)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'forest'"):
        fit_auto(make_rows(), AutoSettings(models=("forrest",)))
