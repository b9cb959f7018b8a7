"""Groups of copies side by side: a person keeps one row of a group, and the other rows of the data are dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from warpi.audit.decisions import Choice, Decision
from warpi.data.duplicates.result import Duplicates
from warpi.data.examples import Examples
from warpi.data.image_files import FileExamples
from warpi.errors import UserError
from warpi.review.items import Items, picture_of
from warpi.review.show_input import Cell

MOST_SHOWN = 24  # rows of a group


class Member(NamedTuple):
    """A row of a group of copies."""

    at: int  # position in the arrays of `Duplicates`
    part: str
    row: int  # of the data set, or of the trusted or test set
    name: str | None  # id of the row in its table
    path: str | None
    given: str  # label
    similarity: float
    in_data: bool  # a row of the data that is not trusted, which can be dropped
    can_keep: bool  # whether the rows of the data in this group can be dropped in favor of this one


@dataclass(frozen=True, eq=False)
class Copies:
    """The groups of copies of a run with at least one row that can be dropped."""

    items: Items
    duplicates: Duplicates

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """The positions of each group: first groups with contradicting labels, then those in several parts."""
        members: dict[int, list[int]] = {}
        for i, group in enumerate(self.duplicates.group.tolist()):
            if group >= 0:
                members.setdefault(group, []).append(i)
        differ, across = self.duplicates.labels_differ, self.duplicates.across_parts
        useful = [group for group, positions in members.items() if any(map(self._in_data, positions))]
        order = sorted(useful, key=lambda g: (not differ[members[g][0]], not across[members[g][0]], g))
        return {group: sorted(members[group], key=self._in_data, reverse=True) for group in order}

    def _in_data(self, i: int) -> bool:
        row = int(self.duplicates.row[i])
        is_training = bool(self.duplicates.of_data[i]) and self.duplicates.part[i] != "trusted"
        return is_training and row not in self.items.trusted_rows

    def is_open(self, group: int, decisions: Mapping[int, Decision]) -> bool:
        """Whether no row of the group has been dropped."""
        rows = [int(self.duplicates.row[i]) for i in self.groups[group] if self._in_data(i)]
        return not any(row in decisions and decisions[row].is_dropped for row in rows)

    def members(self, group: int) -> list[Member]:
        """The rows of a group; those of the data first."""
        positions = self.groups[group]
        has_others = not all(map(self._in_data, positions))
        return [self._member(i, has_others) for i in positions]

    def _member(self, i: int, has_others: bool) -> Member:
        duplicates, inside = self.duplicates, self._in_data(i)
        row = int(duplicates.row[i])
        name = self.items.name_of(row) if duplicates.of_data[i] else None
        similarity = float(duplicates.similarity[i])
        label = self.items.classes[int(self.items.given[row])] if inside else duplicates.label[i]
        return Member(
            i, duplicates.part[i], row, name, self._path(i), label, similarity, inside, not (inside and has_others)
        )

    def keep(self, i: int, seen: Mapping[int, int], decisions: Mapping[int, Decision]) -> list[Choice]:
        """The decisions that keep the row at a position and drop the other rows of the data in its group.

        If the labels of the group differ, the label of the kept row is decided as well, unless it already is. `seen`
        are the decisions that the person saw, by row. Rows that are not shown are dropped even if they were decided.
        """
        group = int(self.duplicates.group[i]) if 0 <= i < len(self.duplicates) else -1
        members = self.members(group) if group in self.groups else []
        kept = next((member for member in members if member.at == i), None)
        if kept is None or not kept.can_keep:
            raise UserError("this row cannot be kept instead of its copies; choose another one")
        choices = []
        for rank, member in enumerate(members):
            decision = decisions.get(member.row)
            if not member.in_data:
                continue
            if member.at != i:
                action, label = "unsure", None
            elif len({other.given for other in members}) > 1 and (decision is None or decision.label is None):
                action, label = "keep", member.given
            elif decision is not None and decision.is_dropped:
                action, label = "skip", None
            else:
                continue
            known = seen.get(member.row, 0) if rank < MOST_SHOWN else decision.id if decision else 0
            choices.append(Choice(member.row, known, action, label, member.given, None))
        return choices

    def _locate(self, i: int) -> tuple[Examples, int]:
        """The examples to which a position belongs, and its row in them."""
        row = int(self.duplicates.row[i])
        if self.duplicates.of_data[i]:
            return self.items.examples, row
        split = self.items.trusted if self.duplicates.part[i] == "trusted" else self.items.test
        assert split is not None
        return split.examples, row

    def _path(self, i: int) -> str | None:
        files = self.items.dataset.files
        if self.duplicates.of_data[i]:
            return None if files is None else files.paths[int(self.duplicates.row[i])]
        examples, row = self._locate(i)
        return examples.paths[row] if isinstance(examples, FileExamples) else None

    def picture(self, i: int) -> tuple[str, bytes] | None:
        """The image at a position as (media type, content); None if it has none."""
        if not 0 <= i < len(self.duplicates):
            return None
        return picture_of(self.items, *self._locate(i))

    def cells(self, i: int) -> Sequence[Cell]:
        """The cells of the row at a position; none if it is shown as a picture."""
        return [] if self.items.has_pictures else self.items.cells_of(*self._locate(i))


def copies_of(items: Items) -> Copies | None:
    """The copies that the audit of a run has found; None if it did not search for any, or if a part is not known."""
    duplicates = None if items.audit is None else items.audit.copies
    if duplicates is None:
        return None
    for part, split in (("trusted", items.trusted), ("test", items.test)):
        is_separate = ~duplicates.of_data & (np.array(duplicates.part) == part)
        if is_separate.any() and (split is None or int(duplicates.row[is_separate].max()) >= len(split.examples)):
            return None
    return Copies(items, duplicates)


def unusual_rows(items: Items) -> dict[int, str]:
    """Outliers and blank images among the rows of the data set, as the audit of a run has found them."""
    duplicates = None if items.audit is None else items.audit.copies
    return {} if duplicates is None else duplicates.unusual()
