"""Evidence of columns, the curve of right labels, advice, and accepting many suggestions."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from review_helpers import make_audited_items, serve

from warpi.audit.decisions import AUTOMATIC, Decision
from warpi.audit.result import Audit, CheckedPairs
from warpi.review.progress import AHEAD, audit_concerns, measure_progress
from warpi.review.show_input import shorten_number
from warpi.review.telling_columns import ClassMeans

CLASSES = ("cat", "dog", "emu")


def decide(row: int, label: str, step: str = "1", id: int = 0) -> Decision:
    return Decision(id or row + 1, row, "change", label, "t", "", "", step)


def pairs_of(audit: Audit, positions: list[int], q: NDArray[np.float64]) -> CheckedPairs:
    """Checks of audited rows that found the suggested label. q is the posterior without them."""
    at = np.array(positions)
    ones = np.ones(len(at))
    return CheckedPairs(q, audit.given[at], audit.suggested[at], ones > 0, ones, at)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("0.30000000000000004", "0.3"),
        ("1234.5678", "1235"),
        ("12.34567", "12.35"),
        ("-0.00012345", "-0.0001234"),
        ("1.5e-07", "1.5e-07"),
        ("123456", "123456"),
        ("2024-01-05", "2024-01-05"),
        ("1.2.3", "1.2.3"),
        ("", ""),
    ],
)
def test_numbers_are_shortened_for_reading(text: str, short: str) -> None:
    assert shorten_number(text) == short


def test_evidence_of_a_column_is_a_log_likelihood_ratio() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    q = np.eye(2)[np.arange(60) % 2]
    means = ClassMeans.of(x, q)
    groups = [x[::2], x[1::2]]
    variance = np.mean([((g - g.mean(0)) ** 2).mean(0) for g in groups], axis=0)
    row = rng.normal(size=3)
    density = [-((row - g.mean(0)) ** 2) / (2 * variance) for g in groups]
    assert np.allclose(means.compare(row, 1, 0), density[1] - density[0])
    constant = ClassMeans.of(np.ones((4, 1)), np.eye(2)[[0, 1, 0, 1]])
    assert constant.compare(np.array([5.0]), 0, 1).tolist() == [0.0]


def test_columns_that_tell_come_first_and_the_given_class_is_shown() -> None:
    items = make_audited_items(30, CLASSES, is_table=True, n_trusted=9)
    cells = items.describe(4)
    assert cells[0].name == "telling"
    speaks = [cell.speaks or 0.0 for cell in cells]
    assert speaks == sorted(speaks, reverse=True)
    assert speaks[0] > 1
    for row in range(5):
        given, suggested = (items.classes[int(k)] for k in (items.given[row], items.suggested[row]))
        near = items.nearest_trusted(row, {}, n=3, required=[given, suggested])
        assert len(near) == 3
        assert {given, suggested} <= {n["label"] for n in near}


def test_curve_of_right_labels_agrees_with_a_loop() -> None:
    audit = make_audited_items(30, CLASSES).audit
    assert audit is not None
    names = audit.classes
    q = audit.posterior
    labels = {3: int(audit.suggested[3]), 7: int(audit.given[7]), 11: (int(audit.given[11]) + 1) % 3}
    decisions = {row: decide(row, names[k]) for row, k in labels.items()}
    made = measure_progress(audit, decisions, {3: 1.0})
    for m in range(len(labels) + 1):
        done = list(labels)[:m]
        people = by_audit = 0.0
        for i in range(30):
            known = labels.get(i)
            suggested = int(q[i].argmax())
            if i in done:
                people += 1
                by_audit += 1
            elif known is not None:
                people += known == audit.given[i]
                by_audit += known == suggested
            else:
                people += q[i, audit.given[i]]
                by_audit += q[i, suggested]
        assert made.by_people[m] == pytest.approx(people / 30)
        assert made.with_audit[m] == pytest.approx(by_audit / 30)
    gains = sorted((1 - q[i].max() for i in range(30) if i not in labels), reverse=True)
    assert made.next_gain == pytest.approx(sum(gains[:AHEAD]))
    assert (made.n_decided, made.n_random, made.n_new) == (3, 1, 3)
    assert made.points() == [0, 1, 2, 3]


def test_accepted_suggestions_are_no_decisions_and_known_checks_are_not_new() -> None:
    audit = make_audited_items(30, CLASSES).audit
    assert audit is not None
    name = audit.classes[int(audit.suggested[2])]
    accepted = measure_progress(audit, {2: decide(2, name, f"{AUTOMATIC}1")}, {})
    start = measure_progress(audit, {}, {})
    gain = audit.posterior[2, audit.suggested[2]] - audit.posterior[2, audit.given[2]]
    assert accepted.n_decided == 0
    assert accepted.by_people[0] == pytest.approx(start.by_people[0] + gain / 30)
    learned = audit.posterior.copy()
    learned[2] = np.eye(3)[audit.suggested[2]]  # an audit that was made after the decision
    later = replace(audit, learned_posterior=learned, pairs=pairs_of(audit, [2], audit.posterior[[2]]))
    known = measure_progress(later, {2: decide(2, name)}, {})
    assert known.n_new == 0
    assert known.with_audit.tolist() == pytest.approx(measure_progress(audit, {2: decide(2, name)}, {}).with_audit)


def test_advice_depends_on_what_is_missing() -> None:
    audit = make_audited_items(60, CLASSES).audit
    assert audit is not None
    decisions = {row: decide(row, audit.classes[int(audit.suggested[row])]) for row in range(40)}
    random = dict.fromkeys(range(40), 1.0)
    assert "Checking 20 more randomly drawn rows" in measure_progress(audit, {}, {}).hint()
    waiting = measure_progress(audit, decisions, {**random, 50: 1.0}).hint("runs/x")
    assert "1 row drawn at random is undecided" in waiting
    checked = replace(audit, facts={**audit.facts, "noise_rate": {"rate": 0.5, "low": 0.4, "high": 0.6, "level": 0.9}})
    assert "drawn at random" not in measure_progress(checked, {}, {}).hint()
    assert "warpi audit runs/x" in measure_progress(audit, decisions, random).hint("runs/x")
    unsure = replace(audit, pairs=pairs_of(audit, list(range(40)), audit.posterior[:40]))
    progress = measure_progress(unsure, decisions, random)
    steps = progress.hint(effect="None remain.").split("\n")
    assert steps[0].startswith("1. Review 20 more rows, if you have time: `warpi review RUN`, in the order “largest")
    page = resources.files("warpi.review").joinpath("assets/page.js").read_text()
    assert "“largest expected gain first”" in steps[0]  # a choice of the page
    assert 'gain: "largest expected gain first"' in page
    assert f"about {progress.next_gain:.0f} labels that would otherwise stay wrong" in steps[0]
    assert steps[1] == "2. Write the corrected data: `warpi correct RUN --out corrected.csv`. None remain."
    assert steps[2].startswith("3. Train again")
    assert progress.hint().startswith("Review 20 more rows: `warpi review RUN`")
    sure = replace(unsure, learned_posterior=np.eye(3)[audit.suggested] * 0.98 + 0.02 / 3)
    assert "You can stop" in measure_progress(sure, decisions, random).hint()
    stop = measure_progress(sure, decisions, random).hint(effect="None remain.").split("\n")
    assert [line[:9] for line in stop] == ["You can s", "1. Write ", "2. Train "]
    for checked in (unsure, sure):
        advice = measure_progress(checked, decisions, random).hint(correcting_helps=False)
        assert "Keep the labels as they are" in advice
        assert "warpi correct" not in advice
        assert "otherwise" not in advice  # the gain is that over the suggestions, which are not applied
    low = replace(audit, facts={**audit.facts, "trusted_accuracy": 0.5})
    assert "right for only 50 %" in audit_concerns(low)[0].problem
    assert "warpi pick 40 runs/x" in audit_concerns(low)[0].advice
    # Random checks that show fewer wrong labels after all corrections: the advice is about single suggestions only.
    rate = {"n": 60, "rate": 0.7, "low": 0.6, "high": 0.8, "level": 0.9, "checked": 30}
    rows = list(range(30))
    helped = replace(low, facts={**low.facts, "noise_rate": rate}, pairs=pairs_of(audit, rows, audit.posterior[rows]))
    (concern,) = audit_concerns(helped)
    assert not concern.comes_first
    assert "right for only 50 %" in concern.problem
    assert audit_concerns(low)[0].comes_first
    none = replace(audit, facts={**audit.facts, "trusted_accuracy": None})
    assert "no trusted rows" in audit_concerns(none)[0].problem
    assert audit_concerns(audit) == []
    corrected = {**audit.facts, "already_corrected": 7}
    assert "already corrected 7 labels" in audit_concerns(replace(audit, facts=corrected))[0].problem
    assert audit_concerns(replace(audit, facts={**corrected, "checked_lists": ["check.csv"]})) == []


def test_requests_to_accept_many(tmp_path: Path) -> None:
    items = make_audited_items(30, CLASSES)
    with serve(items, tmp_path) as client:
        pairs = client.ask("GET", "/api/pairs?above=0.9")[1]["pairs"]
        sure = items.suggestion_probability
        assert sum(pair["n"] for pair in pairs) == int((sure >= 0.9).sum())
        assert sum(pair["expected_right"] for pair in pairs) == pytest.approx(sure[sure >= 0.9].sum(), abs=1e-4)
        pair = pairs[0]
        query = f"given={pair['given']}&suggested={pair['suggested']}&above=0.9"
        shown = client.ask("GET", f"/api/preview?{query}")[1]
        assert shown["n"] == pair["n"]
        probabilities = [item["suggestion_probability"] for item in shown["items"]]
        assert probabilities == sorted(probabilities)
        body = {"tab": "t", "step": "1", "given": pair["given"], "suggested": pair["suggested"], "above": 0.9}
        done = client.ask("POST", "/api/accept", body)[1]
        assert (len(done["done"]), done["counts"]["all"]["accepted"]) == (pair["n"], pair["n"])
        assert client.ask("POST", "/api/accept", {**body, "step": "2"})[0] == 409  # nothing is left
        for wrong in ({"above": 2}, {"above": "x"}, {"given": "cow"}, {"step": ""}):
            assert client.ask("POST", "/api/accept", {**body, **wrong})[0] == 400
        choices = [{"row": 1, "seen": 0, "action": "keep"}]
        reserved = {"tab": "t", "step": f"{AUTOMATIC}3", "choices": choices}
        assert client.ask("POST", "/api/decide", reserved)[0] == 400
        answer = client.ask("POST", "/api/undo", {"tab": "t", "step": "4", "order": "gain"})[1]
        assert len(answer["rows"]) == pair["n"]
        assert answer["counts"]["all"]["accepted"] == 0


def test_items_in_the_order_of_expected_gain(tmp_path: Path) -> None:
    items = make_audited_items(30, CLASSES)
    with serve(items, tmp_path) as client:
        shown = client.ask("GET", "/api/items?order=gain&limit=5")[1]["items"]
        assert [item["row"] for item in shown] == np.argsort(items.suggestion_probability)[:5].tolist()
        assert [item["place"] for item in shown] == list(range(5))
        rest = client.ask("GET", "/api/items?order=gain&limit=3&after=4")[1]["items"]
        assert [item["place"] for item in rest] == [5, 6, 7]
        assert client.ask("GET", "/api/items?order=size")[0] == 400
        assert client.ask("GET", "/api/progress")[1]["points"][0][0] == 0
