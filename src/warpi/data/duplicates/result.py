"""`Duplicates`: what was found about each row of training, trusted and test data. Does not need torch."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.utils.files import write_csv

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PARTS = ("train", "trusted", "test")
OUTLIER = 5.0  # robust standard deviations


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Results for N rows of train, trusted and test. The arrays are parallel."""

    part: tuple[str, ...]  # [N] train, trusted or test
    row: Ints  # [N] rows of the part
    label: tuple[str, ...]  # [N] given labels
    path: tuple[str, ...] | None  # [N] of image files
    group: Ints  # [N] number of the group of copies, -1: the row has no copy
    similarity: Floats  # [N] 1: the row has an exact copy; else that of its nearest copy, 0 without one
    outlier_score: Floats  # [N] robust standard deviations; 0 for images and texts
    problem: tuple[str, ...]  # [N] why an image cannot be used: blank, or cannot be read; '' without a problem
    of_data: NDArray[np.bool_]  # [N] whether `row` is a row of the data set, and not of a separate trusted or test set
    skipped: str = ""  # why near copies and outliers were not searched; '' if they were, or nobody asked for them

    def __len__(self) -> int:
        return len(self.row)

    @property
    def kind(self) -> list[str]:
        """`exact`, `near` or '' for each row."""
        return ["" if s == 0 else "exact" if s == 1 else "near" for s in self.similarity.tolist()]

    @property
    def is_outlier(self) -> NDArray[np.bool_]:
        return self.outlier_score > OUTLIER

    def _vary(self, values: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which rows belong to a group whose rows differ in these values.  [N]"""
        seen: dict[int, set[str]] = {}
        for group, value in zip(self.group.tolist(), values, strict=True):
            seen.setdefault(group, set()).add(value)
        return np.array([group >= 0 and len(seen[group]) > 1 for group in self.group.tolist()], dtype=bool)

    @property
    def labels_differ(self) -> NDArray[np.bool_]:
        """Which rows have a copy with another label.  [N]"""
        return self._vary(self.label)

    @property
    def across_parts(self) -> NDArray[np.bool_]:
        """Which rows have a copy in another part.  [N]"""
        return self._vary(self.part)

    def columns(self) -> dict[str, Any]:
        """The columns of the table."""
        table: dict[str, Any] = {"part": list(self.part), "row": self.row.tolist(), "label": list(self.label)}
        table |= {name: values.tolist() for name, values in self.findings().items()}
        table["problem"] = list(self.problem)
        if self.path is not None:
            table["path"] = [path.encode(errors="backslashreplace").decode() for path in self.path]
        return table

    def findings(self) -> dict[str, NDArray[Any]]:
        """What was found about each row, as columns [N]."""
        return {
            "copy_group": np.array(["" if group < 0 else str(group) for group in self.group.tolist()], dtype=object),
            "copy_kind": np.array(self.kind, dtype=object),
            "copy_similarity": self.similarity.round(4),
            "copy_labels_differ": self.labels_differ,
            "copy_across_parts": self.across_parts,
            "outlier_score": self.outlier_score.round(3),
            "is_outlier": self.is_outlier,
        }

    def to_csv(self, path: Path | str) -> None:
        """Write the table, one line per row."""
        columns = self.columns()
        write_csv(Path(path), list(columns), map(list, zip(*columns.values(), strict=True)))

    def summary(self) -> dict[str, Any]:
        """Counts, ready for JSON."""
        kinds = Counter(self.kind)
        spans = Counter(" and ".join(parts) for parts in self._parts_of_groups().values() if len(parts) > 1)
        return {
            "n": {name: n for name in PARTS if (n := self.part.count(name))},
            "groups": int(self.group.max(initial=-1)) + 1,
            "exact": kinds["exact"],
            "near": kinds["near"],
            "labels_differ": len(set(self.group[self.labels_differ].tolist())),
            "across_parts": dict(spans),
            "outliers": int(self.is_outlier.sum()),
            "blank": self.problem.count("blank"),
            "broken": sum(problem not in ("", "blank") for problem in self.problem),
            "skipped": self.skipped,
        }

    def describe(self) -> list[str]:
        """The counts in sentences."""
        return describe_counts(self.summary())

    def leaks(self) -> list[tuple[str, str, int]]:
        """(part, other part, number of rows of the first with a copy in the second), without zeros."""
        parts = self._parts_of_groups()
        found = []
        for part, other in (("test", "train"), ("test", "trusted"), ("trusted", "train")):
            groups = [g for g, name in zip(self.group.tolist(), self.part, strict=True) if name == part and g >= 0]
            if n := sum(other in parts[g] for g in groups):
                found.append((part, other, n))
        return found

    def _parts_of_groups(self) -> dict[int, list[str]]:
        """The parts that each group has rows in, in the order of PARTS."""
        seen: dict[int, set[str]] = {}
        for group, part in zip(self.group.tolist(), self.part, strict=True):
            if group >= 0:
                seen.setdefault(group, set()).add(part)
        return {group: sorted(parts, key=PARTS.index) for group, parts in seen.items()}


def describe_counts(counts: dict[str, Any]) -> list[str]:
    """The `summary` of duplicates in sentences."""
    rows = ", ".join(f"{n:,} {name}" for name, n in counts["n"].items())
    lines = [f"{rows} rows: {counts['exact']:,} have an exact copy, {counts['near']:,} a near copy"]
    if counts["labels_differ"]:
        lines.append(f"{counts['labels_differ']:,} groups of copies have contradicting labels")
    for parts, n in counts["across_parts"].items():
        lines.append(f"{n:,} groups of copies are in {parts}")
    if counts["outliers"]:
        lines.append(f"{counts['outliers']:,} rows are outliers")
    if counts["blank"] or counts["broken"]:
        lines.append(f"{counts['blank']:,} images are blank, {counts['broken']:,} cannot be read")
    if counts.get("skipped"):
        lines.append(f"near copies were not searched: {counts['skipped']}")
    return lines
