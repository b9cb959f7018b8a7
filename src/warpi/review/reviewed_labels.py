"""The labels of all rows after a review, and the files with them: a table, and labels for `warpi fit --labels`."""

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from warpi.audit.decisions import Decision
from warpi.errors import UserError
from warpi.noise.kinds import NoisyLabels
from warpi.noise.noise_file import read_noise_file, write_noise_file
from warpi.review.items import Items
from warpi.utils.files import format_csv, write_atomically

STATES = {"keep": "kept", "change": "changed", "skip": "skipped", "unsure": "unsure"}
ACCEPTED = "accepted"  # state of a suggestion that was accepted without looking at the row
DROPPED = "dropped"  # state of a row that is omitted, because a copy of it is kept


class NameTaken(UserError):
    """A file or folder with this name exists and has different content."""

    def __init__(self, path: Path, flag: str) -> None:
        super().__init__(
            f"{path} exists with different content, on which a run may depend; choose another name for {flag}"
        )


def state_of(decision: Decision | None) -> str:
    if decision is None:
        return "open"
    if decision.is_dropped:
        return DROPPED
    return ACCEPTED if decision.is_automatic else STATES[decision.action]


def final_labels(items: Items, decisions: Mapping[int, Decision]) -> dict[int, int]:
    """The class of every row whose label is trusted, because a person decided it or it was trusted before."""
    number = {name: k for k, name in enumerate(items.classes)}
    people = {row: d for row, d in sorted(decisions.items()) if not d.is_automatic}
    decided = {row: number[d.label] for row, d in people.items() if d.label is not None}
    return items.trusted_rows | decided


def accepted_labels(items: Items, decisions: Mapping[int, Decision]) -> dict[int, int]:
    """The class of every row whose suggestion was accepted without looking at the row. Nobody has checked these."""
    automatic = {row: d.label for row, d in sorted(decisions.items()) if d.is_automatic}
    return {row: items.classes.index(label) for row, label in automatic.items() if label is not None}


def first_labels(items: Items) -> Tensor:
    """[N] the labels before an earlier audit or a person changed them."""
    first = torch.from_numpy(items.given).clone()
    for earlier in (items.before_audit, items.before_person):
        if earlier is not None:
            first = torch.where(earlier >= 0, earlier, first)
    return first


def earlier_decisions(items: Items) -> dict[int, Decision]:
    """The labels that a person changed in an earlier review, as decisions to keep them. No audit replaces them."""
    if items.before_person is None:
        return {}
    rows = (items.before_person >= 0).nonzero().flatten().tolist()
    labels = {row: items.classes[int(items.given[row])] for row in rows}
    return {row: Decision(0, row, "keep", label, "earlier", "", label) for row, label in labels.items()}


def labels_before_audit(items: Items, label: Tensor, checked: Collection[int]) -> Tensor:
    """[N] the original labels of rows whose label has changed without a check by a person; -1 for other rows."""
    first = first_labels(items)
    before = torch.where(label != first, first, -1)
    kept = [row for row in earlier_decisions(items) if label[row] == items.given[row]]
    before[[*checked, *kept]] = -1
    return before


def dropped_rows(items: Items, decisions: Mapping[int, Decision]) -> list[int]:
    """The rows that are omitted, because a copy of them is kept. Trusted rows are never omitted."""
    rows = {row for row, decision in decisions.items() if decision.is_dropped}
    restored = {row for row, decision in decisions.items() if not decision.is_dropped}
    return sorted((items.dropped_before - restored | rows) - items.trusted_rows.keys())


def write_corrected(items: Items, decisions: Mapping[int, Decision], path: Path) -> Path:
    """Write the corrected labels of all rows as .json, or as .csv with a .json next to it; return the .json.

    The .json is for `warpi fit --labels`. It is never replaced, because runs may depend on it: the file next to
    NAME.csv is NAME.json, or NAME-2.json and so on.
    """
    if path.suffix.lower() == ".csv":
        write_atomically(path, corrected_csv(items, decisions).encode(errors="surrogateescape"))
        for n in itertools.count(1):
            name = path.stem + (f"-{n}" if n > 1 else "") + ".json"
            try:
                return write_corrected(items, decisions, path.with_name(name))
            except NameTaken:
                continue
    if path.suffix != ".json":
        raise UserError(f"corrected labels must go to a .csv or .json file, got {path}")
    y = torch.from_numpy(items.given.copy())
    checked = final_labels(items, decisions)
    for row, k in {**accepted_labels(items, decisions), **checked}.items():
        y[row] = k
    before = labels_before_audit(items, y, checked)
    labels = NoisyLabels(y, None, None, before, torch.tensor(dropped_rows(items, decisions), dtype=torch.int64))
    if path.exists() and not _contains_labels(path, items, labels):
        raise NameTaken(path, "--export")
    write_noise_file(path, data=items.dataset, noise="given", seed=0, labels=labels)
    return path


def _contains_labels(path: Path, items: Items, labels: NoisyLabels) -> bool:
    """Whether a file assigns the same labels to the same rows, and omits the same rows."""
    try:
        stored = read_noise_file(path, items.dataset)
    except UserError:
        return False
    return torch.equal(stored.y, labels.y) and torch.equal(stored.dropped, labels.dropped)


def corrected_csv(items: Items, decisions: Mapping[int, Decision]) -> str:
    """A csv table with one line per row of the data set, without the rows that were dropped as copies.

    The column `label` is for training; `verified` is 1 if a person has checked it. Image files have a column `path`,
    so that the table is an image list for `warpi fit --data FILE --root FOLDER`.
    """
    trusted = final_labels(items, decisions)
    labels = accepted_labels(items, decisions) | trusted
    names = items.classes
    files = items.dataset.files
    lines = []
    dropped = set(dropped_rows(items, decisions))
    for row, k in enumerate(items.given.tolist()):
        if row in dropped:
            continue
        decision = decisions.get(row)
        given = names[k]
        state = state_of(decision)
        if decision is not None:
            given = decision.given or given
            if decision.label is not None and state != ACCEPTED:
                state = "kept" if decision.label == given else "changed"
        elif row in trusted:
            state = "trusted"
        suggested = wrong = ""
        if (i := items.position.get(row)) is not None:
            suggested = names[items.suggested[i]] if items.suggested[i] >= 0 else ""
            wrong = "" if np.isnan(items.wrong_probability[i]) else f"{items.wrong_probability[i]:.6g}"
        file = [files.paths[row]] if files else []
        label = names[labels.get(row, k)]
        lines.append([row, *file, given, label, state, int(row in trusted), suggested, wrong])
    header = ["row", *(["path"] if files else []), "given_label", "label", "state", "verified"]
    return format_csv([*header, "suggested_label", "wrong_probability"], lines)
