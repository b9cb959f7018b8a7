"""The requests of the review page and their responses as JSON."""

from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.audit.decisions import ACTIONS, AUTOMATIC, COPIES, Choice, Decision, Outcome, Store
from warpi.review.copies import MOST_SHOWN, Copies, copies_of, unusual_rows
from warpi.review.export import fit_command, write_all
from warpi.review.items import Items
from warpi.review.people import People, PersonStore
from warpi.review.progress import audit_concerns, measure_progress
from warpi.review.reviewed_labels import ACCEPTED, DROPPED, STATES, dropped_rows, state_of
from warpi.review.show_input import cells_to_json, finite

_MAX_ITEMS = 200  # per response
_KEYS = 10  # classes that can be chosen with one key
_MAX_CHOICES = 1000  # decisions per step; page.js has the same number
_PREVIEW = 12  # examples of a class pair that are shown before its suggestions are accepted
_ALL_STATES = ("open", *STATES.values(), ACCEPTED, DROPPED)

Json = dict[str, Any]


class RequestRefused(Exception):
    """A rejected request, with the HTTP status and the reason."""

    def __init__(self, reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


class ReviewSession:
    """Responds to requests from the page. All state is in the store, so all tabs see the same."""

    def __init__(
        self,
        items: Items,
        store: Store | PersonStore,
        folder: Path,
        settings: Mapping[str, Any],
        blind: str | None = None,
        people: People | None = None,
        person: str = "",
    ) -> None:
        self.items = items
        self.people = people  # of a review by several people
        self.person = person  # whose part of the rows is reviewed; "": the whole review, not one person's part
        self.store = store
        self.copies = None if person else copies_of(items)
        self.folder = folder
        self.settings = settings  # of the run or the data, without defaults
        self.blind = blind or default_blind(items)  # rows whose labels are hidden until a class is chosen
        self.unusual = unusual_rows(items)
        unusual = np.isin(items.row, [*self.unusual])
        self._scopes = {"all": items.review_first | True, "first": items.review_first, "unusual": unusual}
        self._counted: tuple[Mapping[int, Decision] | None, Json] = (None, {})  # decisions and their counts

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
            "listed": items.listed,
            "orders": list(items.orders),
            "has_posterior": items.audit is not None,
            "concerns": [] if items.audit is None else [c._asdict() for c in audit_concerns(items.audit)],
            "is_new": self.store.is_empty(),
            "person": self.person,
            "people": self.people is not None,
            "copies": len(self.copies.groups) if self.copies else 0,
            "unusual": int(self._scopes["unusual"].sum()),
            "counts": self.counts(),
        }

    def counts(self) -> Json:
        """Number of items by state: of all items, of those to review first, and of the unusual ones."""
        decisions = self.store.current_decisions()
        counted, counts = self._counted
        if counted is not decisions:
            counts = self._count(decisions)
            self._counted = (decisions, counts)
        return counts

    def _count(self, decisions: Mapping[int, Decision]) -> Json:
        position = self.items.position
        decided = [(position[row], state_of(decision)) for row, decision in decisions.items() if row in position]
        counts = {}
        for scope, members in self._scopes.items():
            is_member = members[[i for i, _ in decided]].tolist()
            states = Counter(state for (_, state), inside in zip(decided, is_member, strict=True) if inside)
            counts[scope] = {**dict.fromkeys(_ALL_STATES, 0), **states, "open": int(members.sum()) - states.total()}
        return counts

    def list_items(self, query: Mapping[str, str]) -> Json:
        """Items that match the filters, starting after position `after` in the chosen order."""
        items = self.items
        after = _integer(query, "after", -1)
        limit = min(max(0, _integer(query, "limit", 20)), _MAX_ITEMS)
        state = query.get("state", "all")
        scope = query.get("scope", "all")
        if state not in ("all", "decided", *_ALL_STATES) or scope not in self._scopes:
            raise RequestRefused("unknown state or scope")
        matches = self._scopes[scope].copy()
        for name, labels in (("given", items.given[items.row]), ("suggested", items.suggested)):
            if label := query.get(name):
                matches &= labels == self.class_index(label)
        decisions = self.store.current_decisions()
        if state != "all":
            states = self.states(decisions)
            matches &= np.isin(states, ["kept", "changed"] if state == "decided" else [state])
        order = self.order(query.get("order"))
        positions = matches[order].nonzero()[0]
        next_ones = positions[positions > after][:limit].tolist()
        shown = [self.item(int(order[p]), decisions.get(int(items.row[order[p]])), place=p) for p in next_ones]
        return {"total": len(positions), "items": shown}

    def order(self, name: object) -> NDArray[np.int64]:
        """The items in the order called `name`, or in the default order if it is empty."""
        orders = self.items.orders
        if name is None or name == "":
            return np.arange(len(self.items))
        if not isinstance(name, str) or name not in orders:
            raise RequestRefused("unknown order")
        return orders[name]

    def states(self, decisions: Mapping[int, Decision]) -> NDArray[np.object_]:
        """The state of each item."""
        states = np.full(len(self.items), "open", dtype=object)
        for row, decision in decisions.items():
            if (i := self.items.position.get(row)) is not None:
                states[i] = state_of(decision)
        return states

    def item(self, i: int, decision: Decision | None, place: int | None = None) -> Json:
        """One item, with everything that the page shows about it. `place` is its position in the chosen order."""
        items = self.items
        row = int(items.row[i])
        p = None if items.probabilities is None else [finite(value) for value in items.probabilities[i].tolist()]
        sure = None if items.audit is None else finite(float(items.suggestion_probability[i]))
        files = items.dataset.files
        return {
            "place": i if place is None else place,
            "row": row,
            "id": items.name_of(row),
            "given": items.classes[int(items.given[row])],
            "suggested": self.suggested(i),
            "wrong_probability": finite(float(items.wrong_probability[i])),
            "suggestion_probability": sure,
            "uncertainty": finite(float(items.uncertainty[i])),
            "first": bool(items.review_first[i]),
            "random": row in items.random_rows,
            "unusual": self.unusual.get(row, ""),
            "becomes_trusted": items.represents_data(row),
            "blind": self.blind == "all" or (self.blind == "random" and row in items.random_rows),
            "p": None if p is None or None in p else p,
            "cells": cells_to_json(items.describe(row)),
            "path": None if files is None else files.paths[row],
            **_to_json(decision),
        }

    def class_index(self, name: str) -> int:
        if name not in self.items.classes:
            raise RequestRefused("unknown class")
        return self.items.classes.index(name)

    def pairs(self, query: Mapping[str, str]) -> Json:
        """Open items whose suggestion differs from the given label, counted by the two classes.

        Only suggestions that are right with a probability of at least `above` count.
        """
        items = self.items
        acceptable = self._acceptable(_probability(query.get("above")))
        codes = items.given[items.row[acceptable]] * len(items.classes) + items.suggested[acceptable]
        pairs = []
        for code in np.unique(codes).tolist():
            members = acceptable[codes == code]
            given, suggested = divmod(code, len(items.classes))
            sure = items.suggestion_probability[members]
            names = {"given": items.classes[given], "suggested": items.classes[suggested]}
            pairs.append({**names, "n": len(members), "expected_right": finite(float(sure.sum()))})
        return {"pairs": sorted(pairs, key=lambda pair: -pair["n"])}

    def _acceptable(self, above: float) -> NDArray[np.int64]:
        """Open items with a new label suggested that is right with a probability of at least `above`."""
        items = self.items
        differs = (items.suggested >= 0) & (items.suggested != items.given[items.row])
        is_open = self.states(self.store.current_decisions()) == "open"
        acceptable: NDArray[np.int64] = (differs & is_open & (items.suggestion_probability >= above)).nonzero()[0]
        return acceptable

    def _acceptable_of_pair(self, request: Mapping[str, Any]) -> NDArray[np.int64]:
        """The acceptable items of one pair of classes, the least probable suggestion first."""
        given, suggested = (self.class_index(str(request.get(name))) for name in ("given", "suggested"))
        items = self.items
        members = self._acceptable(_probability(request.get("above")))
        members = members[(items.given[items.row[members]] == given) & (items.suggested[members] == suggested)]
        chosen: NDArray[np.int64] = members[np.argsort(items.suggestion_probability[members], kind="stable")]
        return chosen

    def preview(self, query: Mapping[str, str]) -> Json:
        """Preview of accepting one class pair: the number of rows and the least probable suggestions."""
        chosen = self._acceptable_of_pair(query)
        right = float(self.items.suggestion_probability[chosen].sum())
        shown = [self.item(i, None) for i in chosen[:_PREVIEW].tolist()]
        return {"n": len(chosen), "expected_right": finite(right), "items": shown}

    def accept(self, request: Json) -> Json:
        """Accept the suggestions of one pair of classes, as one step that can be undone."""
        tab = _text(request, "tab")
        step = AUTOMATIC + _text(request, "step")
        items = self.items
        choices = []
        for i in self._acceptable_of_pair(request).tolist():
            row = int(items.row[i])
            given, suggested = items.classes[int(items.given[row])], self.suggested(i)
            choices.append(Choice(row, 0, "change", suggested, given, suggested))
        if not choices:
            raise RequestRefused("no open row is left", HTTPStatus.CONFLICT)
        return self._respond(self.store.decide(choices, tab, step))

    def progress(self) -> Json:
        """How many labels are right after each decision, and whether to continue."""
        audit = self.items.audit
        together = {} if self.people is None else {"together": self.people.progress()}
        if audit is None or self.person:
            return {"points": [], "hint": "", **together}
        made = measure_progress(audit, self.store.current_decisions(), self.store.random_rows())
        run = audit.facts.get("run")
        points = [[m, finite(float(made.by_people[m])), finite(float(made.with_audit[m]))] for m in made.points()]
        return {
            "points": points,
            "n_rows": made.n_rows,
            "n_random": made.n_random,
            "n_new": made.n_new,
            "can_stop": made.can_stop,
            "hint": made.hint(None if run is None else str(run)),
            **together,
        }

    def suggested(self, i: int) -> str | None:
        k = int(self.items.suggested[i])
        return self.items.classes[k] if k >= 0 else None

    def near(self, row: int, query: Mapping[str, str]) -> Json:
        """The trusted and decided examples nearest to a row.

        They include one of the given class and one of the suggested class, unless these labels are hidden.
        """
        labels = [self.suggested(self.position(row)), self.items.classes[int(self.items.given[row])]]
        known = [label for label in dict.fromkeys(labels) if label is not None]
        required = [] if query.get("hidden") == "yes" else known
        decisions = {r: d for r, d in self.store.current_decisions().items() if not d.is_automatic}
        decided = {r: d.label for r, d in decisions.items() if d.label is not None}
        near = self.items.nearest_trusted(row, decided, required=required)
        return {"near": [{**n, "cells": cells_to_json(n["cells"])} for n in near]}

    def decide(self, request: Json) -> Json:
        """Store the decisions of one step, each an action for a row."""
        tab = _text(request, "tab")
        step = _text(request, "step")
        if step.startswith((AUTOMATIC, COPIES)):
            raise RequestRefused("the name of this step is reserved")
        choices = request.get("choices")
        if not isinstance(choices, list) or not 0 < len(choices) <= _MAX_CHOICES:
            raise RequestRefused(f"'choices' must be a list of 1 to {_MAX_CHOICES} objects")
        return self._respond(self.store.decide([self.choice(c) for c in choices], tab, step))

    def _respond(self, outcome: Outcome) -> Json:
        return {
            "done": {row: _to_json(decision) for row, decision in outcome.done.items()},
            "refused": {row: _to_json(decision) for row, decision in outcome.refused.items()},
            "counts": self.counts(),
        }

    def copy_groups(self) -> Json:
        """The groups of copies, and whether each is undecided."""
        copies = self.check_copies()
        decisions = self.store.current_decisions()
        return {"groups": [{"group": group, "open": copies.is_open(group, decisions)} for group in copies.groups]}

    def copy_group(self, group: int) -> Json:
        """The rows of one group of copies."""
        copies = self.check_copies(group)
        decisions = self.store.current_decisions()
        members = copies.members(group)
        shown = [
            {
                **m._asdict(),
                "cells": cells_to_json(copies.cells(m.at)),
                **_to_json(decisions.get(m.row) if m.in_data else None),
            }
            for m in members[:MOST_SHOWN]
        ]
        return {"members": shown, "n": len(members), "open": copies.is_open(group, decisions)}

    def keep_copy(self, request: Json) -> Json:
        """Keep one of several copies and drop the others, as one step that can be undone."""
        tab = _text(request, "tab")
        step = COPIES + _text(request, "step")
        at, seen = request.get("at"), request.get("seen")
        if type(at) is not int or not isinstance(seen, dict) or not all(type(value) is int for value in seen.values()):
            raise RequestRefused("'at' must be an integer and 'seen' an object of integers")
        known = {
            int(row): decision for row, decision in seen.items() if row.isascii() and row.isdigit() and len(row) < 16
        }
        choices = self.check_copies().keep(at, known, self.store.current_decisions())
        return self._respond(self.store.decide(choices, tab, step))

    def check_copies(self, group: int | None = None) -> Copies:
        """The copies, if this person sees all rows and there is such a group."""
        self.check_sees_all()
        if self.copies is None or (group is not None and group not in self.copies.groups):
            raise RequestRefused("no such copies", HTTPStatus.NOT_FOUND)
        return self.copies

    def choice(self, request: object) -> Choice:
        """Check a decision. The action `accept` changes the label to the suggestion."""
        if not isinstance(request, dict):
            raise RequestRefused("a choice must be an object")
        row, seen, action, label = (request.get(key) for key in ("row", "seen", "action", "label"))
        if type(row) is not int or type(seen) is not int:
            raise RequestRefused("'row' and 'seen' must be integers")
        items = self.items
        suggested = self.suggested(self.position(row))
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
            raise RequestRefused(f"'action' must be one of {', '.join(ACTIONS)}, accept")
        return Choice(row, seen, action, label if action in ("keep", "change") else None, given, suggested)

    def undo(self, request: Json) -> Json:
        """Undo the last step of a tab. Its rows may be missing from the list that is reviewed now."""
        done = self.store.undo(_text(request, "tab"), _text(request, "step"))
        rank = np.argsort(self.order(request.get("order")))
        listed = [self.items.position[row] for row in done if row in self.items.position]
        listed.sort(key=lambda i: rank[i])
        rows = self.items.row
        changed = [self.item(i, done[int(rows[i])], int(rank[i])) for i in listed[:_MAX_ITEMS]]
        return {"items": changed, "rows": sorted(done), "counts": self.counts()}

    def export(self, request: Json) -> Json:  # noqa: ARG002
        """Write corrected labels and a trusted set into the folder of the review."""
        self.check_sees_all()
        folder, trusted = write_all(self.items, self.store.current_decisions(), self.folder)
        dropped = len(dropped_rows(self.items, self.store.current_decisions()))
        corrected = {"corrected": str(folder / "corrected.csv"), "dropped": dropped}
        if trusted is None:
            command = fit_command(self.items, self.settings, None, folder / "corrected.json")
            return {"size": 0, **corrected, "command": command}
        command = fit_command(self.items, self.settings, trusted.path, folder / "corrected.json")
        return {**trusted._asdict(), "path": str(trusted.path), **corrected, "command": command}

    def check_sees_all(self) -> None:
        """Refuse requests for all decisions from one of several reviewers."""
        if self.person:
            raise RequestRefused("only the person who started the review can do this", HTTPStatus.FORBIDDEN)

    def position(self, row: int) -> int:
        """The position of a row in the order of review."""
        if row not in self.items.position:
            raise RequestRefused("no such item", HTTPStatus.NOT_FOUND)
        return self.items.position[row]


def _to_json(decision: Decision | None) -> Json:
    if decision is None:
        return {"state": "open", "label": None, "seen": 0}
    return {"state": state_of(decision), "label": decision.label, "seen": decision.id}


def default_blind(items: Items) -> str:
    """Rows whose labels are hidden until a class is chosen: random ones, if every class has its own key."""
    return "random" if len(items.classes) <= _KEYS else "none"


def _probability(value: object) -> float:
    try:
        p = float(str(value))
    except ValueError:
        p = -1.0
    if not 0 <= p <= 1:
        raise RequestRefused("'above' must be a probability")
    return p


def _integer(query: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(query.get(name, default))
    except ValueError:
        raise RequestRefused(f"{name!r} must be an integer") from None


def _text(request: Json, name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.isascii():
        raise RequestRefused(f"{name!r} must be a text of 1 to 64 ASCII characters")
    return value
