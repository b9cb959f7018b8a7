"""What the page can ask for and have done, as JSON. All state is in the store."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np

from warpi.review.decisions import ACTIONS, Choice, Decision, Store
from warpi.review.export import STATES, fit_command, state_of, write_all
from warpi.review.items import Items

_PAGE = 200  # items an answer
_AT_ONCE = 1000  # decisions of one step; page.js knows this number

Json = dict[str, Any]


class Refused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class ReviewSession:
    """What can be asked and done. All state is in the store, so that any number of tabs see the same."""

    def __init__(self, items: Items, store: Store, folder: Path, settings: Mapping[str, Any]) -> None:
        self.items, self.store, self.folder = items, store, folder
        self.settings = settings  # how the data was read

    def session(self) -> Json:
        """What the page needs to know once, and how far the work has come."""
        items = self.items
        return {
            "name": items.dataset.name,
            "folder": str(self.folder),
            "classes": items.classes,
            "pictures": items.has_pictures,
            "small": items.is_small,
            "audited": items.probabilities is not None,
            "counts": self.counts(),
        }

    def counts(self) -> Json:
        """Items by state, all and of those to be reviewed first; trusted examples by class."""
        items, standing = self.items, self.store.current_decisions()
        every, first = dict.fromkeys(("open", *STATES.values()), 0), dict.fromkeys(("open", *STATES.values()), 0)
        at = items.position
        for row, decision in standing.items():
            if (i := at.get(row)) is not None:
                every[state_of(decision)] += 1
                first[state_of(decision)] += int(items.review_first[i])
        every["open"] = len(items) - sum(every.values())
        first["open"] = int(items.review_first.sum()) - sum(first.values())
        return {"all": every, "first": first}

    def listed(self, query: Mapping[str, str]) -> Json:
        """Items after a place in the order of review, those that the filters let through."""
        items, names = self.items, {name: k for k, name in enumerate(self.items.classes)}
        after, limit = _whole(query, "after", -1), min(max(0, _whole(query, "limit", 20)), _PAGE)
        state, scope = query.get("state", "all"), query.get("scope", "all")
        if state not in ("all", "open", "decided", *STATES.values()) or scope not in ("all", "first"):
            raise Refused(HTTPStatus.BAD_REQUEST, "unknown state or scope")
        wanted = {side: query[side] for side in ("given", "suggested") if query.get(side)}
        if not set(wanted.values()) <= set(names):
            raise Refused(HTTPStatus.BAD_REQUEST, "unknown class")
        fits = items.review_first.copy() if scope == "first" else items.review_first | True
        if "given" in wanted:
            fits &= items.given[items.row] == names[wanted["given"]]
        if "suggested" in wanted:
            fits &= items.suggested == names[wanted["suggested"]]
        standing, at = self.store.current_decisions(), items.position
        known = ("open", *STATES.values())
        states = np.zeros(len(items), dtype=np.int8)  # places in `known`
        for row, decision in standing.items():
            if (i := at.get(row)) is not None:
                states[i] = known.index(state_of(decision))
        if state != "all":
            chosen = ("kept", "changed") if state == "decided" else (state,)
            fits &= np.isin(states, [known.index(name) for name in chosen])
        found = fits.nonzero()[0]
        shown = found[found > after][:limit].tolist()
        return {"total": len(found), "items": [self.item(i, standing.get(int(items.row[i]))) for i in shown]}

    def item(self, i: int, decision: Decision | None) -> Json:
        items, row = self.items, int(self.items.row[i])
        k, s = int(items.given[row]), int(items.suggested[i])
        p = None if items.probabilities is None else [_number(value) for value in items.probabilities[i].tolist()]
        return {
            "place": i,
            "row": row,
            "given": items.classes[k],
            "suggested": items.classes[s] if s >= 0 else None,
            "wrong": _number(float(items.wrong_probability[i])),
            "uncertainty": _number(float(items.uncertainty[i])),
            "first": bool(items.review_first[i]),
            "p": None if p is None or None in p else p,
            "words": items.describe(row),
            "path": None if items.dataset.files is None else items.dataset.files.paths[row],
            **_shown(decision),
        }

    def near(self, row: int) -> Json:
        """The nearest trusted examples of a row."""
        self.place(row)
        decided = {r: d.label for r, d in self.store.current_decisions().items() if d.label is not None}
        return {"near": self.items.nearest_trusted(row, decided)}

    def decide(self, asked: Json) -> Json:
        """Note what a person decided: an action for each of some rows. `accept` takes the suggestion."""
        tab, step, wanted = _text(asked, "tab"), _text(asked, "step"), asked.get("choices")
        if (
            not isinstance(wanted, list)
            or not 0 < len(wanted) <= _AT_ONCE
            or not all(isinstance(c, dict) for c in wanted)
        ):
            raise Refused(HTTPStatus.BAD_REQUEST, f"choices must be 1 to {_AT_ONCE} objects")
        outcome = self.store.decide([self.choice(c) for c in wanted], tab, step)
        return {
            "done": {row: _shown(decision) for row, decision in outcome.done.items()},
            "refused": {row: _shown(decision) for row, decision in outcome.refused.items()},
            "counts": self.counts(),
        }

    def choice(self, asked: Json) -> Choice:
        row, seen, action, label = (asked.get(key) for key in ("row", "seen", "action", "label"))
        if type(row) is not int or type(seen) is not int:
            raise Refused(HTTPStatus.BAD_REQUEST, "row and seen must be whole numbers")
        items, i = self.items, self.place(row)
        given, s = items.classes[int(items.given[row])], int(items.suggested[i])
        suggested = items.classes[s] if s >= 0 else None
        if action == "accept":
            if suggested is None:
                raise Refused(HTTPStatus.BAD_REQUEST, f"there is no suggestion for row {row}")
            action, label = "change", suggested
        if action == "change" and label not in items.classes:
            raise Refused(HTTPStatus.BAD_REQUEST, "unknown class")
        if action == "keep" or (action == "change" and label == given):
            action, label = "keep", given
        if action not in ACTIONS:
            raise Refused(HTTPStatus.BAD_REQUEST, f"action must be one of {', '.join(ACTIONS)}, accept")
        return Choice(row, seen, action, label if action in ("keep", "change") else None, given, suggested)

    def undo(self, asked: Json) -> Json:
        """Take back the last step of a tab. Its rows may be on another list than the one that is reviewed now."""
        done = self.store.undo(_text(asked, "tab"), _text(asked, "step"))
        places = [self.items.position[row] for row in done if row in self.items.position]
        changed = [self.item(i, done[int(self.items.row[i])]) for i in sorted(places)]
        return {"items": changed, "rows": sorted(done), "counts": self.counts()}

    def export(self, asked: Json) -> Json:  # noqa: ARG002
        """Write everything into the folder of the review."""
        folder, trusted = write_all(self.items, self.store.current_decisions(), self.folder)
        command = fit_command(self.items, self.settings, trusted.path, folder / "corrected.json")
        paths = {"path": str(trusted.path), "corrected": str(folder / "corrected.csv")}
        return {**trusted._asdict(), **paths, "command": command}

    def place(self, row: int) -> int:
        if row not in self.items.position:
            raise Refused(HTTPStatus.NOT_FOUND, "no such item")
        return self.items.position[row]


def _shown(decision: Decision | None) -> Json:
    if decision is None:
        return {"state": "open", "label": None, "seen": 0}
    return {"state": state_of(decision), "label": decision.label, "seen": decision.id}


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _whole(query: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(query.get(name, default))
    except ValueError:
        raise Refused(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number") from None


def _text(asked: Json, name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.isascii():
        raise Refused(HTTPStatus.BAD_REQUEST, f"{name} must be text of 1 to 64 ASCII characters")
    return value
