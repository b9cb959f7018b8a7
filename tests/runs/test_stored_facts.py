"""The table of facts, and comparisons of settings and facts."""

from typing import Any

import pytest

from warpi.runs.stored_facts import ABSENT, FACTS, PACKED_FACTS, changed_facts, data_hashes, differences, same_test_set

RUN: dict[str, Any] = {fact.name: 7 if fact.kind is int else fact.name[:3] * 9 for fact in FACTS}


def test_differences_of_settings() -> None:
    before, after = {"lr": 1, "seed": 0, "gone": 2}, {"lr": 3, "seed": 0, "new": None}
    assert differences(before, after) == [("lr", 1, 3), ("gone", 2, ABSENT), ("new", ABSENT, None)]
    assert differences(before, after, shared=True) == [("lr", 1, 3)]
    assert differences(before, after, ignore=("lr", "new")) == [("gone", 2, ABSENT)]
    assert f"{ABSENT!r}" == "absent"


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_a_changed_fact_is_detected_unless_an_older_run_does_not_store_it(fact: Any) -> None:
    assert changed_facts(RUN, RUN) == []
    changed = {**RUN, fact.name: None}
    assert changed_facts(RUN, changed) == [(fact, RUN[fact.name], None)]
    older = {name: value for name, value in RUN.items() if name != fact.name}
    assert bool(changed_facts(older, RUN)) is not fact.newer
    assert same_test_set(RUN, changed, trusted=False) is not fact.decides_test


def test_the_trusted_set_counts_if_asked_for() -> None:
    other = {**RUN, "meta_sha256": "x"}
    assert same_test_set(RUN, other, trusted=False)
    assert not same_test_set(RUN, other, trusted=True)
    assert not same_test_set({}, {}, trusted=False), "runs that store nothing cannot be compared"


def test_names() -> None:
    assert "inputs" in data_hashes(RUN)
    assert "test" not in data_hashes(RUN), "these are row numbers, not data"
    assert set(PACKED_FACTS) == {"n_train", "n_meta", "n_val", "n_classes", "inputs_sha256", "noise_sha256"}
