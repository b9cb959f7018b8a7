"""The columns of tables and manifests that describe labels: the class, the true class, trusted rows, the split."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpi.datasets.delimited_files import warn_once
from warpi.datasets.labels import (
    MARK_NAMES,
    blank_missing,
    check_allowed,
    check_label,
    encode_labels,
    parse_marks,
    sort_classes,
)
from warpi.errors import UserError, format_count

LABEL_COLUMNS = ("clean_label", "trusted", "verified", "split")  # other than the label itself
PARTS = ("train", "test", "trusted")
GIVEN = ("given", "given_label")  # the label before a person checked it; `warpi review` writes it
CORRECTION_COLUMNS = ("changed_by", "label_probability")  # `warpi correct` writes them; they are not features
LABEL_FACTS = (*LABEL_COLUMNS, *GIVEN, *CORRECTION_COLUMNS)  # what `read_label_columns` reads besides the label
BY_AUDIT = ("audit", "accepted")  # values of `changed_by`, and of `state` in an export of `warpi review`
BY_PERSON = ("person",)
AUDIT_COLUMNS = ("label_quality", "suggested_label", "is_label_issue")  # an export of an audit; they are not features
OLD_NAMES = {"verified": "trusted", "meta": "trusted", "x_meta": "x_trusted", "y_meta": "y_trusted"}
"""Deprecated names of columns, parts and arrays, which still work."""


def warn_old_name(where: object, name: str) -> None:
    warn_once(f"{where}: the name {name!r} is deprecated; use {OLD_NAMES[name]!r}")


def find_trusted_column(columns: Collection[str], where: object) -> str | None:
    """The column that marks the rows a person has checked: `trusted`, or `verified`, its old name.

    Warns about other columns that may be meant to mark them.
    """
    if {"trusted", "verified"} <= {*columns}:
        raise UserError(f"{where}: 'trusted' and 'verified' have the same meaning; remove or rename one of them")
    for name in sorted(MARK_NAMES.intersection(columns)):
        warn_once(f"{where}: {name!r} is not used; if it marks rows that a person has checked, rename it to 'trusted'")
    if "verified" in columns:
        if "state" not in columns:  # `warpi review` writes both
            warn_old_name(where, "verified")
        return "verified"
    return "trusted" if "trusted" in columns else None


class LabelColumns(NamedTuple):
    """The labels of the rows of a table or manifest, and what each row is used for."""

    classes: tuple[str, ...]
    y: Tensor  # [N] given labels
    clean: Tensor  # [N] true labels, -1 unknown
    trusted: Tensor | None  # [N] bool, rows that a person has checked; None: the data has no such column
    given: Tensor  # [N] labels before a person checked them, -1 unknown
    before_audit: Tensor  # [N] labels that an audit replaced, -1 for other rows
    before_person: Tensor  # [N] labels that a person has checked, as they were before, -1 for other rows
    rows: dict[str, list[int]]  # of each part; 'train' is not empty

    def labels(self, part: str) -> Tensor:
        """The given labels of training rows; of other parts the true labels, if known."""
        labels = self.y if part == "train" else torch.where(self.clean >= 0, self.clean, self.y)
        return labels[self.rows[part]]

    def facts(self) -> dict[str, Any]:
        """The arguments of `Dataset.from_parts` that describe the labels."""
        train, test, trusted = self.rows["train"], self.rows.get("test"), self.rows.get("trusted")
        return {
            "given": self.given[train],
            "before_audit": self.before_audit[train],
            "before_person": self.before_person[train],
            "meta_given": None if trusted is None else self.given[trusted],
            "clean": self.clean[train],
            "trusted": None if self.trusted is None else self.trusted[train],
            "test_is_clean": test is not None and bool((self.clean[test] >= 0).all()),
        }


def read_label_columns(
    columns: Mapping[str, Sequence[str]],
    label: str,
    path: Path,
    at: Callable[[int], str],
    *,
    classes: tuple[str, ...] | None = None,
    blank_split: str = "",
) -> LabelColumns:
    """Interpret the columns `label`, `clean_label`, `trusted` and `split`, given as normalized texts.

    The classes are `classes` if given, otherwise those of both label columns. `blank_split` replaces a blank split. The
    label of a row before it was checked is in the column `given` (or `given_label`). If a row has a `clean_label`, it
    is in the label column.
    """
    given = list(columns[label])
    if "" in given:
        row, n = given.index(""), given.count("")
        rows = format_count(n, "such row")
        raise UserError(f"{at(row)}: column {label!r} is empty ({rows} in total); label such rows or drop them")
    check_label(given, label, path, named=classes is not None)
    true = blank_missing(columns.get("clean_label", [""] * len(given)), given)
    classes = classes or sort_classes({*given, *true} - {""})
    marks = find_trusted_column(columns.keys() - {label}, path)
    y = encode_labels(given, classes, at)
    clean = encode_labels(true, classes, at)
    earlier = _earlier_labels(columns, label, classes)
    by_audit = _changed_by(BY_AUDIT, columns)
    by_person = _changed_by(BY_PERSON, columns) | _certain(columns) & ~by_audit
    return LabelColumns(
        classes,
        y,
        clean,
        parse_marks(columns[marks], at, marks) if marks else None,
        torch.where(clean >= 0, y, earlier),
        torch.where(by_audit, earlier, -1),
        torch.where(by_person, earlier, -1),
        _split_rows([text or blank_split for text in columns.get("split", ["train"] * len(given))], path, at),
    )


def _earlier_labels(columns: Mapping[str, Sequence[str]], label: str, classes: tuple[str, ...]) -> Tensor:
    """[N] labels of the column `given`, -1 if it is absent, blank or not a class."""
    name = next((name for name in GIVEN if name in columns and name != label), None)
    if name is None:
        return torch.full((len(columns[label]),), -1)
    index = {text: k for k, text in enumerate(classes)}
    return torch.tensor([index.get(text, -1) for text in columns[name]], dtype=torch.int64)


def _changed_by(who: Collection[str], columns: Mapping[str, Sequence[str]]) -> Tensor:
    """[N] whether an audit (and nobody else), or a person, has changed the label; [1] if no column tells."""
    if CORRECTION_COLUMNS[0] in columns:
        changes = columns[CORRECTION_COLUMNS[0]]
    else:
        changes = columns["state"] if {"state", "verified"} <= columns.keys() else ("",)
    return torch.tensor([change in who for change in changes])


def _certain(columns: Mapping[str, Sequence[str]]) -> Tensor:
    """[N] whether the column `label_probability` is 1, which stands for a checked label; [1] if there is no column."""
    texts = columns.get(CORRECTION_COLUMNS[1], ("",))
    return torch.tensor([text in ("1", "1.0") for text in texts])


def _split_rows(parts: Sequence[str], path: Path, at: Callable[[int], str]) -> dict[str, list[int]]:
    """The rows of each part that the column `split` names."""
    parts = [part.lower() for part in parts]
    check_allowed(parts, (*PARTS, "meta"), at, "value of 'split'")
    if "meta" in parts:
        warn_old_name(f"{path}, column 'split'", "meta")
    rows: dict[str, list[int]] = {}
    for row, part in enumerate(parts):
        rows.setdefault(OLD_NAMES.get(part, part), []).append(row)
    if "train" not in rows:
        raise UserError(f"{path}: there are no training rows; the column 'split' must be 'train' in some rows")
    return rows
