"""`Duplicates`: copies, outliers and broken images among training, trusted and test rows. Does not need torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.errors import format_count
from warpi.utils.files import write_csv

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PARTS = ("train", "trusted", "test")
OUTLIER = 5.0  # robust standard deviations
_MAIN = ("copy_group", "copy_kind", "copy_labels_differ", "copy_across_parts", "is_outlier", "problem")
_STORED = {"row": "i", "group": "i", "similarity": "f", "outlier_score": "f", "of_data": "b"}  # kinds of the dtypes


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Results for N rows of train, trusted and test. All arrays have one entry per row."""

    part: tuple[str, ...]  # [N] train, trusted or test
    row: Ints  # [N] row numbers within the part
    label: tuple[str, ...]  # [N] given labels
    path: tuple[str, ...] | None  # [N] of image files
    group: Ints  # [N] number of the group of copies, -1: the row has no copy
    similarity: Floats  # [N] to the nearest copy: 1 for an exact copy, 0 without a copy
    outlier_score: Floats  # [N] robust standard deviations; 0 for images and texts
    problem: tuple[str, ...]  # [N] why an image cannot be used: blank, or cannot be read; '' without a problem
    of_data: NDArray[np.bool_]  # [N] whether `row` is a row of the data set, and not of a separate trusted or test set
    skipped: str = ""  # why near copies and outliers were not searched for; '' if they were, or were not requested

    def __len__(self) -> int:
        return len(self.row)

    @property
    def kind(self) -> list[str]:
        """`exact`, `near` or '' for each row."""
        return ["" if s == 0 else "exact" if s == 1 else "near" for s in self.similarity.tolist()]

    @property
    def is_outlier(self) -> NDArray[np.bool_]:
        return self.outlier_score > OUTLIER

    @property
    def has_findings(self) -> bool:
        """Whether there is anything to report: a copy, an outlier, an unusable image, or a search that was skipped."""
        return bool((self.group >= 0).any() or self.is_outlier.any() or any(self.problem) or self.skipped)

    def unusual(self) -> dict[int, str]:
        """The rows of the data set that are outliers or images without content, and what each of them is."""
        columns = (self.row.tolist(), self.problem, self.is_outlier.tolist(), self.of_data.tolist())
        return {
            row: {"": "outlier", "blank": "blank image"}.get(problem, problem)
            for row, problem, is_outlier, of_data in zip(*columns, strict=True)
            if of_data and (problem or is_outlier)
        }

    def _vary(self, values: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which rows belong to a group whose rows differ in these values.  [N]"""
        seen: dict[int, set[str]] = {}
        for group, value in zip(self.group.tolist(), values, strict=True):
            seen.setdefault(group, set()).add(value)
        return np.array([group >= 0 and len(seen[group]) > 1 for group in self.group.tolist()], dtype=bool)

    @property
    def labels_differ(self) -> NDArray[np.bool_]:
        """Which rows have a copy with a different label.  [N]"""
        return self._vary(self.label)

    @property
    def across_parts(self) -> NDArray[np.bool_]:
        """Which rows have a copy in a different part.  [N]"""
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
            "copy_group": _text(["" if group < 0 else str(group) for group in self.group.tolist()]),
            "copy_kind": _text(self.kind),
            "copy_similarity": self.similarity.round(4),
            "copy_labels_differ": self.labels_differ,
            "copy_across_parts": self.across_parts,
            "outlier_score": self.outlier_score.round(3),
            "is_outlier": self.is_outlier,
        }

    def findings_of(self, rows: Ints) -> dict[str, NDArray[Any]]:
        """The main findings about some rows of the data set, as columns."""
        index = self.position_of(rows)
        columns = {**self.findings(), "problem": _text(self.problem)}
        return {name: columns[name][index] for name in _MAIN}

    def position_of(self, rows: Ints) -> Ints:
        """The positions of rows of the data set in these arrays. Raises ValueError if one is missing."""
        positions = {row: i for i, row in enumerate(self.row.tolist()) if self.of_data[i]}
        if missing := [row for row in rows.tolist() if row not in positions]:
            raise ValueError(f"row {missing[0]} was not compared")
        return np.array([positions[row] for row in rows.tolist()], dtype=np.int64)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays from which `from_arrays` restores this object, without the paths."""
        names, label = np.unique(np.array(self.label), return_inverse=True)
        arrays = {name: getattr(self, name) for name in _STORED}
        part = np.array([PARTS.index(name) for name in self.part], dtype=np.int64)
        texts = {"names": names, "problem": np.array(self.problem), "skipped": np.array(self.skipped)}
        return {"part": part, "label": label.astype(np.int64), **arrays, **texts}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "Duplicates":
        """Restore an object from the arrays of `to_arrays`. Raises ValueError if they do not fit together."""
        n = len(arrays["part"])
        for name, kind in {"part": "i", "label": "i", "problem": "U", **_STORED}.items():
            column = arrays[name]
            if column.shape != (n,) or column.dtype.kind != kind or (kind == "f" and not np.isfinite(column).all()):
                raise ValueError(f"{name} of the copies is {column.dtype} {list(column.shape)}")
        names = [str(name) for name in arrays["names"].tolist()]
        limits = {"part": (0, len(PARTS)), "label": (0, len(names)), "row": (0, 2**62), "group": (-1, n)}
        if not all(((arrays[name] >= low) & (arrays[name] < high)).all() for name, (low, high) in limits.items()):
            raise ValueError("the copies have a number that is out of range")
        part = tuple(PARTS[k] for k in arrays["part"].tolist())
        label = tuple(names[k] for k in arrays["label"].tolist())
        values = {name: arrays[name] for name in _STORED}
        problem = tuple(arrays["problem"].tolist())
        return cls(part=part, label=label, path=None, problem=problem, skipped=str(arrays["skipped"]), **values)

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
        counts = []
        for part, other in (("test", "train"), ("test", "trusted"), ("trusted", "train")):
            groups = [g for g, name in zip(self.group.tolist(), self.part, strict=True) if name == part and g >= 0]
            if n := sum(other in parts[g] for g in groups):
                counts.append((part, other, n))
        return counts

    def _parts_of_groups(self) -> dict[int, list[str]]:
        """The parts that each group has rows in, in the order of PARTS."""
        seen: dict[int, set[str]] = {}
        for group, part in zip(self.group.tolist(), self.part, strict=True):
            if group >= 0:
                seen.setdefault(group, set()).add(part)
        return {group: sorted(parts, key=PARTS.index) for group, parts in seen.items()}


def _text(words: Sequence[str]) -> NDArray[np.object_]:
    column = np.empty(len(words), dtype=object)
    column[:] = words
    return column


def describe_counts(counts: dict[str, Any]) -> list[str]:
    """The `summary` of duplicates in sentences."""
    rows = ", ".join(f"{n:,} {name}" for name, n in counts["n"].items())
    lines = [f"{rows} rows: {counts['exact']:,} with an exact copy, {counts['near']:,} with a near copy"]
    if counts["labels_differ"]:
        lines.append(f"{format_count(counts['labels_differ'], 'group')} of copies with contradicting labels")
    for parts, n in counts["across_parts"].items():
        lines.append(f"{format_count(n, 'group')} of copies in {parts}")
    if counts["outliers"]:
        lines.append(format_count(counts["outliers"], "outlier"))
    if counts["blank"] or counts["broken"]:
        lines.append(f"{format_count(counts['blank'], 'blank image')}, {counts['broken']:,} that cannot be read")
    if counts.get("skipped"):
        lines.append(f"near copies were not searched for: {counts['skipped']}")
    return lines
