"""The requests of the review page and their answers as JSON."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np

from warpi.audit.decisions import ACTIONS, Choice, Decision, Store
from warpi.review.corrected_labels import ACCEPTED, STATES, state_of
from warpi.review.export import fit_command, write_all
from warpi.review.items import Items

_MAX_ITEMS = 200  # per answer
_MAX_CHOICES = 1000  # decisions per step; page.js has the same number
_ALL_STATES = ("open", *STATES.values(), ACCEPTED)

Json = dict[str, Any]


class RequestRefused(Exception):
    """A request that is not answered, with an HTTP status and the reason."""

    def __init__(self, reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


class ReviewSession:
    """Answers requests of the page. All state is in the store, so all tabs see the same."""

    def __init__(self, items: Items, store: Store, folder: Path, settings: Mapping[str, Any]) -> None:
        self.items = items
        self.store = store
        self.folder = folder
        self.settings = settings  # of the run or the data, without defaults

    def session(self) -> Json:
        """Information that the page requests once, and the progress of the review."""
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
        """Number of items by state: of all items, and of those to review first."""
        items = self.items
        total = dict.fromkeys(_ALL_STATES, 0)
        first = dict.fromkeys(_ALL_STATES, 0)
        for row, decision in self.store.current_decisions().items():
            if (i := items.position.get(row)) is not None:
                total[state_of(decision)] += 1
                first[state_of(decision)] += int(items.review_first[i])
        total["open"] = len(items) - sum(total.values())
        first["open"] = int(items.review_first.sum()) - sum(first.values())
        return {"all": total, "first": first}

    def list_items(self, query: Mapping[str, str]) -> Json:
        """Items that match the filters, after a place in the order of review."""
        items = self.items
        after = _integer(query, "after", -1)
        limit = min(max(0, _integer(query, "limit", 20)), _MAX_ITEMS)
        state = query.get("state", "all")
        scope = query.get("scope", "all")
        if state not in ("all", "decided", *_ALL_STATES) or scope not in ("all", "first"):
            raise RequestRefused("unknown state or scope")
        matches = items.review_first.copy() if scope == "first" else items.review_first | True
        for name, labels in (("given", items.given[items.row]), ("suggested", items.suggested)):
            if label := query.get(name):
                if label not in items.classes:
                    raise RequestRefused("unknown class")
                matches &= labels == items.classes.index(label)
        decisions = self.store.current_decisions()
        if state != "all":
            states = np.full(len(items), "open", dtype=object)
            for row, decision in decisions.items():
                if (i := items.position.get(row)) is not None:
                    states[i] = state_of(decision)
            matches &= np.isin(states, ["kept", "changed"] if state == "decided" else [state])
        places = matches.nonzero()[0]
        page = places[places > after][:limit].tolist()
        return {"total": len(places), "items": [self.item(i, decisions.get(int(items.row[i]))) for i in page]}

    def item(self, i: int, decision: Decision | None) -> Json:
        """One item, with everything that the page shows about it."""
        items = self.items
        row = int(items.row[i])
        p = None if items.probabilities is None else [_number(value) for value in items.probabilities[i].tolist()]
        return {
            "place": i,
            "row": row,
            "given": items.classes[int(items.given[row])],
            "suggested": self.suggested(i),
            "wrong": _number(float(items.wrong_probability[i])),
            "uncertainty": _number(float(items.uncertainty[i])),
            "first": bool(items.review_first[i]),
            "p": None if p is None or None in p else p,
            "cells": items.describe(row),
            "path": None if items.dataset.files is None else items.dataset.files.paths[row],
            **_to_json(decision),
        }

    def suggested(self, i: int) -> str | None:
        k = int(self.items.suggested[i])
        return self.items.classes[k] if k >= 0 else None

    def near(self, row: int) -> Json:
        """The trusted and decided examples nearest to a row."""
        self.place(row)
        decided = {r: d.label for r, d in self.store.current_decisions().items() if d.label is not None}
        return {"near": self.items.nearest_trusted(row, decided)}

    def decide(self, request: Json) -> Json:
        """Store the decisions of one step, each an action for a row."""
        tab = _text(request, "tab")
        step = _text(request, "step")
        choices = request.get("choices")
        if not isinstance(choices, list) or not 0 < len(choices) <= _MAX_CHOICES:
            raise RequestRefused(f"choices must be a list of 1 to {_MAX_CHOICES} objects")
        outcome = self.store.decide([self.choice(c) for c in choices], tab, step)
        return {
            "done": {row: _to_json(decision) for row, decision in outcome.done.items()},
            "refused": {row: _to_json(decision) for row, decision in outcome.refused.items()},
            "counts": self.counts(),
        }

    def choice(self, request: object) -> Choice:
        """Check a decision. The action `accept` changes the label to the suggestion."""
        if not isinstance(request, dict):
            raise RequestRefused("a choice must be an object")
        row, seen, action, label = (request.get(key) for key in ("row", "seen", "action", "label"))
        if type(row) is not int or type(seen) is not int:
            raise RequestRefused("row and seen must be integers")
        items = self.items
        suggested = self.suggested(self.place(row))
        given = items.classes[int(items.given[row])]
        if action == "accept":
            if suggested is None:
                raise RequestRefused(f"there is no suggestion for row {row}")
            action = "change"
            label = suggested
        if action == "change" and label not in items.classes:
            raise RequestRefused("unknown class")
        if action == "keep" or (action == "change" and label == given):
            action = "keep"
            label = given
        if action not in ACTIONS:
            raise RequestRefused(f"action must be one of {', '.join(ACTIONS)}, accept")
        return Choice(row, seen, action, label if action in ("keep", "change") else None, given, suggested)

    def undo(self, request: Json) -> Json:
        """Undo the last step of a tab. Its rows may be missing from the list that is reviewed now."""
        done = self.store.undo(_text(request, "tab"), _text(request, "step"))
        places = [self.items.position[row] for row in done if row in self.items.position]
        changed = [self.item(i, done[int(self.items.row[i])]) for i in sorted(places)]
        return {"items": changed, "rows": sorted(done), "counts": self.counts()}

    def export(self, request: Json) -> Json:  # noqa: ARG002
        """Write corrected labels and a trusted set into the folder of the review."""
        folder, trusted = write_all(self.items, self.store.current_decisions(), self.folder)
        corrected = {"corrected": str(folder / "corrected.csv")}
        if trusted is None:
            command = fit_command(self.items, self.settings, None, folder / "corrected.json")
            return {"size": 0, **corrected, "command": command}
        command = fit_command(self.items, self.settings, trusted.path, folder / "corrected.json")
        return {**trusted._asdict(), "path": str(trusted.path), **corrected, "command": command}

    def place(self, row: int) -> int:
        """The place of a row in the order of review."""
        if row not in self.items.position:
            raise RequestRefused("no such item", HTTPStatus.NOT_FOUND)
        return self.items.position[row]


def _to_json(decision: Decision | None) -> Json:
    if decision is None:
        return {"state": "open", "label": None, "seen": 0}
    return {"state": state_of(decision), "label": decision.label, "seen": decision.id}


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _integer(query: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(query.get(name, default))
    except ValueError:
        raise RequestRefused(f"{name} must be an integer") from None


def _text(request: Json, name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.isascii():
        raise RequestRefused(f"{name} must be text of 1 to 64 ASCII characters")
    return value
