"""Review by several people: who gets which rows, each person's decisions, and how often two people agree.

All decisions are in one log. People see only their own, so that two people judge a row independently. The last decision
about a row counts. The person who runs the review sees all of them and settles rows on which people differ.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from warpi.audit.decisions import Choice, Decision, Outcome, Store
from warpi.errors import UserError, format_count
from warpi.review.items import Items
from warpi.utils.files import format_csv, write_atomically

DISPUTES = "disputes.csv"
_SEPARATOR = ":"  # between the name of a person and that of a browser tab, in the log
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,19}")


def check_people(names: Sequence[str], overlap: float) -> None:
    """Raise an error for names that cannot be part of a link, and for an overlap outside 0 to 1."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"--people {name!r}: a name has 1 to 20 letters, digits or . _ -, and begins with a letter or digit"
            )
    if len(set(names)) < max(2, len(names)):
        raise UserError(f"--people needs two or more different names, got {', '.join(names)}")
    if not 0 <= overlap <= 1:
        raise UserError(f"--overlap must be a fraction of the rows from 0 to 1, got {overlap:g}")


class PersonStore:
    """The decisions of one person, with the methods of `Store` that a review uses."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.path = store.path
        self.prefix = name + _SEPARATOR

    def is_empty(self) -> bool:
        return not self.current_decisions()

    def random_rows(self) -> dict[int, float]:
        return self.store.random_rows()

    def current_decisions(self) -> Mapping[int, Decision]:
        """The person's last decision about each row that is not undone."""
        return self.store.decisions_of(self.prefix)

    def decide(self, choices: Iterable[Choice], tab: str, step: str) -> Outcome:
        """Store decisions. Those about rows that this person has decided elsewhere in the meantime are refused."""
        return self.store.decide(choices, self.prefix + tab, step, self.prefix)

    def undo(self, tab: str, step: str) -> dict[int, Decision | None]:
        rows = self.store.undo(self.prefix + tab, step)
        decisions = self.current_decisions()
        return {row: decisions.get(row) for row in rows}


def assign_rows(
    rows: Sequence[int], people: Sequence[str], overlap: float, deciders: Mapping[int, set[str]]
) -> dict[str, set[int]]:
    """Assign each row to one person, and a fraction `overlap` of the rows to two; return the rows of each person.

    A row stays with those who decided it (`deciders`). The others are divided evenly, in a fixed random order, so that
    the same people get the same rows if nothing was decided in the meantime.
    """
    order = sorted(rows, key=lambda row: hashlib.sha256(f"row {row}".encode()).digest())
    twice = set(order[: round(overlap * len(order))])
    assigned: dict[str, set[int]] = {name: set() for name in people}
    for row in order:
        done = deciders.get(row, set())
        for name in done & assigned.keys():
            assigned[name].add(row)
        missing = (2 if row in twice else 1) - len(done)
        free = sorted((name for name in people if name not in done), key=lambda name: len(assigned[name]))
        for name in free[: max(0, missing)]:
            assigned[name].add(row)
    return assigned


def take_rows(items: Items, rows: set[int]) -> Items:
    """The items of some rows of the data set, in the same order."""
    i = np.array([j for j, row in enumerate(items.row.tolist()) if row in rows], dtype=np.int64)
    return replace(
        items,
        row=items.row[i],
        suggested=items.suggested[i],
        wrong_probability=items.wrong_probability[i],
        uncertainty=items.uncertainty[i],
        review_first=items.review_first[i],
        probabilities=None if items.probabilities is None else items.probabilities[i],
    )


class Agreement(NamedTuple):
    """How often two people agree about the rows that both of them decided."""

    first: str
    second: str
    n: int  # rows that both decided
    same: int  # rows with the same label


class People:
    """The people of a review, their rows and what they have decided."""

    def __init__(self, names: Sequence[str], items: Items, store: Store, overlap: float = 0.0) -> None:
        check_people(names, overlap)
        self.names = tuple(names)
        self.items = items
        self.store = store
        self.stores = {name: PersonStore(store, name) for name in names}
        deciders: dict[int, set[str]] = defaultdict(set)
        for name in _people_in(store):
            for row in store.decisions_of(name + _SEPARATOR):
                deciders[row].add(name)
        self.rows = assign_rows(items.row.tolist(), names, overlap, deciders)

    def items_of(self, name: str) -> Items:
        return take_rows(self.items, self.rows[name])

    def labels(self) -> dict[int, dict[str, str]]:
        """The labels that people gave, by row and person. Rows that they skipped or left as unsure have none."""
        labels: dict[int, dict[str, str]] = defaultdict(dict)
        for name in _people_in(self.store):
            for row, decision in self.store.decisions_of(name + _SEPARATOR).items():
                if decision.label is not None and not decision.is_automatic:
                    labels[row][name] = decision.label
        return labels

    def agreements(self) -> list[Agreement]:
        """For each pair of people, how many rows both decided, and how many of these have the same label."""
        counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for given in self.labels().values():
            for first, second in combinations(sorted(given), 2):
                count = counts[first, second]
                count[0] += 1
                count[1] += given[first] == given[second]
        return [Agreement(*pair, *count) for pair, count in sorted(counts.items())]

    def disputes(self) -> dict[int, dict[str, str]]:
        """Rows that people labeled differently, unless the person who runs the review has decided them later."""
        current = self.store.current_decisions()
        return {
            row: given
            for row, given in sorted(self.labels().items())
            if len(set(given.values())) > 1 and (row not in current or _SEPARATOR in current[row].tab)
        }

    def progress(self) -> dict[str, Any]:
        """Decided rows per person, and agreement, as JSON."""
        people = [
            {"name": name, "done": len(self.stores[name].current_decisions().keys() & rows), "of": len(rows)}
            for name, rows in self.rows.items()
        ]
        pairs = [agreement._asdict() for agreement in self.agreements()]
        return {"people": people, "pairs": pairs, "disputes": len(self.disputes())}

    def describe(self) -> list[str]:
        """The progress in words, one line per person and pair."""
        people = self.progress()["people"]
        lines = [f"{each['name']}: {each['done']} of {format_count(each['of'], 'row')} decided" for each in people]
        for pair in self.agreements():
            share = f"{100 * pair.same / pair.n:.0f} %"
            n = format_count(pair.n, "row")
            lines.append(f"{pair.first} and {pair.second} agree on {pair.same} of {n} ({share})")
        return lines

    def write_disputes(self, folder: Path) -> Path | None:
        """Write the rows on which people differ as a list for `warpi review --rows`; None if there are none."""
        disputes = self.disputes()
        if not disputes:
            return None
        names = sorted({name for given in disputes.values() for name in given})
        lines = [
            [row, self.items.classes[int(self.items.given[row])], *(given.get(name, "") for name in names)]
            for row, given in disputes.items()
        ]
        file = folder / DISPUTES
        write_atomically(file, format_csv(["row", "given_label", *names], lines).encode())
        return file


def _people_in(store: Store) -> list[str]:
    """Everyone who has decided something in a review by several people."""
    return sorted({tab.split(_SEPARATOR)[0] for tab in store.tabs() if _SEPARATOR in tab})
