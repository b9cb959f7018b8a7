"""Checked rows in an audit: decisions of a review, filled lists, and trusted rows with their earlier label."""

import csv
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpi
from warpi.audit.checked_labels import collect_row_checks
from warpi.audit.decisions import Choice, Store
from warpi.audit.label_scores import posterior
from warpi.audit.make_audit import audit
from warpi.audit.pair_model import MIN_PAIRS
from warpi.audit.rates import estimate_rate
from warpi.audit.result import Audit, CheckedPairs, read_audit
from warpi.audit.use_checks import Pairs, choose_labels, combine_with_checks, count_wrong_labels
from warpi.errors import UserError

RNG = np.random.default_rng(0)
N, K = 400, 3
P = RNG.dirichlet(np.full(K, 0.3), N)
TRUE = np.array([RNG.choice(K, p=p) for p in P])
GIVEN = np.where(RNG.random(N) < 0.3, (TRUE + 1) % K, TRUE)
T = 0.7 * np.eye(K) + 0.3 * np.roll(np.eye(K), 1, axis=1)


def pairs(rows: np.ndarray, random: bool = True) -> Pairs:
    return Pairs(P[rows], GIVEN[rows], TRUE[rows], np.full(len(rows), random), np.ones(len(rows)))


def test_few_pairs_leave_bayes_rule() -> None:
    at = np.arange(MIN_PAIRS - 1)
    result = combine_with_checks(P, GIVEN, T, at, pairs(at), pairs(at[:0]), None)
    assert not result.learned
    np.testing.assert_allclose(result.q[50:], posterior(P, GIVEN, T)[50:])
    np.testing.assert_array_equal(result.q[at].argmax(1), TRUE[at])  # what was checked is certain
    np.testing.assert_array_equal(result.checks.is_wrong, GIVEN[at] != TRUE[at])


@pytest.mark.parametrize("as_trusted", [False, True])
def test_pairs_improve_the_posterior(as_trusted: bool) -> None:
    at = np.arange(100)
    rest = np.arange(100, N)
    if as_trusted:
        result = combine_with_checks(P[100:], GIVEN[100:], T, at[:0], pairs(at[:0]), pairs(at), None)
        q = result.q
    else:
        result = combine_with_checks(P, GIVEN, T, at, pairs(at), pairs(at[:0]), None)
        q = result.q[rest]
    assert result.learned
    wrong_T = posterior(P[rest], GIVEN[rest], np.eye(K) * 0.9 + 0.1 / K)
    likelihoods = [np.log(p[np.arange(len(rest)), TRUE[rest]].clip(1e-9)).mean() for p in (q, wrong_T)]
    assert likelihoods[0] > likelihoods[1]


def test_lists_and_decisions(tmp_path: Path) -> None:
    header = ["row", "given_label", "checked_label", "part", "stratum_size", "stratum_picked"]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([header, [4, "a", "b", "random", 20, 2], [9, "a", "a", "informative", 0, 0]])
        writer.writerow([2, "b", "", "random", 20, 2])
    run = tmp_path / "run"
    with closing(Store(run / "review/decisions.sqlite", {})) as store:
        store.remember_random({1: 3.0, 5: 3.0, 6: 3.0})
        chosen = [(1, "keep", "a"), (6, "change", "b"), (7, "change", "b"), (8, "unsure", None)]
        store.decide([Choice(row, 0, action, label, "a", None) for row, action, label in chosen], "t", "1")
    row, y = np.arange(10), np.array([0, 0, 1, 0, 0, 0, 0, 0, 0, 0])  # as in the list
    checks = collect_row_checks(run, [tmp_path / "list.csv"], ("a", "b"), row, y)
    assert checks.row.tolist() == [1, 4, 6, 7, 9]
    assert checks.label.tolist() == [0, 1, 1, 1, 0]
    assert checks.random.tolist() == [True, True, False, False, False]  # row 5 was not reviewed, so row 6 may be chosen
    assert checks.weight.tolist()[:2] == [3, 10]
    with pytest.raises(UserError, match=r"unknown class in .*list.csv, row 4: 'b'; allowed: a, c"):
        collect_row_checks(None, [tmp_path / "list.csv"], ("a", "c"), row, y)
    assert len(collect_row_checks(tmp_path, [], ("a", "b"), row, y).row) == 0
    corrected = np.where(row == 4, 1, y)  # as the list says
    assert len(collect_row_checks(None, [tmp_path / "list.csv"], ("a", "b"), row, corrected).row) == 2
    with pytest.raises(UserError, match=r"row 9 is 'a' in .* but 'b' in the run; the list was made for other data"):
        collect_row_checks(run, [tmp_path / "list.csv"], ("a", "b"), row, np.where(row == 9, 1, y))
    (tmp_path / "list.csv").write_text("row,given_label,checked_label\none,a,a\n")
    with pytest.raises(UserError, match="the column row is not as"):
        collect_row_checks(None, [tmp_path / "list.csv"], ("a", "b"), row, y)


def test_audit_with_a_filled_list(tmp_path: Path) -> None:
    """From the list to an interval of the noise rate, and to suggestions that agree with the checks."""
    rng = np.random.default_rng(1)
    y = np.arange(300) % 3
    x = rng.normal(size=(300, 2)) + 4 * np.eye(3, 2)[y]
    given = np.where(rng.random(300) < 0.3, (y + 1) % 3, y)
    np.savez(tmp_path / "x.npz", x=x, y=given)
    run = warpi.fit(tmp_path / "run", data=str(tmp_path / "x.npz"), method="ce", epochs=3, device="cpu")
    before = audit(run)
    assert before.facts["noise_rate"]["low"] is None
    checked = rng.choice(300, 60, replace=False)
    with (tmp_path / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "given_label", "checked_label", "part", "stratum_size", "stratum_picked"])
        writer.writerows([row, given[row], y[row], "random", 300, 60] for row in checked)
    after = audit(run, checked=[tmp_path / "list.csv"])
    rate = after.facts["noise_rate"]
    assert rate["low"] <= (given != y).mean() <= rate["high"]
    assert after.suggested[checked].tolist() == y[checked].tolist()
    stored = read_audit(run.path)
    np.testing.assert_array_equal(stored.posterior, after.posterior)
    assert (after.suggested == y).mean() >= (before.suggested == y).mean()


def test_numbers_of_wrong_labels_with_intervals() -> None:
    """The interval after the correction contains the number of labels that are wrong although the audit chose them."""
    rng = np.random.default_rng(1)
    n, covered, widths = 1500, [], []
    for draw in range(20):
        p = rng.dirichlet(np.full(K, 0.3), n)
        true = np.array([rng.choice(K, p=row) for row in p])
        given = np.where(rng.random(n) < 0.3, (true + 1) % K, true)
        at = rng.choice(n, 120, replace=False)
        random = np.arange(120) < 90
        checked = Pairs(p[at], given[at], true[at], random, np.ones(120))
        none = Pairs(p[:0], given[:0], true[:0], random[:0], np.ones(0))
        found = combine_with_checks(p, given, T, at, checked, none, None)
        rate = {**asdict(estimate_rate(found.checks)), "level": 0.9}
        result = make_result(p, given, found.q, found.pairs, rate)
        label = choose_labels(found.q, given)
        before, after = count_wrong_labels(result, label)
        numbers = (given != true).sum(), (label != true).sum()
        assert after.low is not None
        assert after.high is not None
        covered.append([r.low <= k <= r.high for r, k in zip((before, after), numbers, strict=True)])  # type: ignore[operator]
        widths.append((after.high - after.low) / n)
        assert draw or after.rate < before.rate / 2
    assert np.mean(covered) >= 0.8
    assert np.mean(widths) < 0.1


def make_result(p: np.ndarray, given: np.ndarray, q: np.ndarray, pairs: CheckedPairs, rate: dict[str, Any]) -> Audit:
    n = len(p)
    facts = {"noise_rate": rate, "trusted_accuracy": None, "probabilities": "", "uncertainty": ""}
    judged = q.argmax(1), 1 - q[np.arange(n), given], q[np.arange(n), given], q.argmax(1) != given
    return Audit(np.arange(n), given, *judged, np.zeros(n), p, T, ("a", "b", "c"), (rate,) * 3, facts, q, pairs)


def test_checked_pairs_are_stored(tmp_path: Path) -> None:
    at = np.arange(30)
    found = combine_with_checks(P, GIVEN, T, at, pairs(at), pairs(at[:0]), None)
    rate = {"n": N, "rate": 0.3, "low": 0.2, "high": 0.4, "checked": 30, "level": 0.9}
    result = make_result(P, GIVEN, found.q, found.pairs, rate)
    result.save(tmp_path)
    stored = read_audit(tmp_path)
    assert stored.pairs is not None
    for one, other in zip(stored.pairs, found.pairs, strict=True):
        np.testing.assert_array_equal(one, other)
    replace(result, pairs=found.pairs._replace(position=found.pairs.position + N)).save(tmp_path)
    with pytest.raises(UserError, match="checked rows do not fit"):
        read_audit(tmp_path)
