"""`find_duplicates`: copies, near copies, outliers and broken images in data, before anything is trained."""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from warpi.audit.duplicates.neighbors import OUTLIER, Floats, Ints, Pairs, find_close_vectors, find_similar_images
from warpi.audit.duplicates.thumbnails import make_thumbnails, mark_blank, read_thumbnails
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.image_files import PHOTO, FileExamples
from warpi.data.numeric import Embedded
from warpi.data.overlap import comparable_inputs, hash_files
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split
from warpi.datasets.image_folders import read_folder, read_manifest
from warpi.datasets.load import has_images
from warpi.errors import UserError
from warpi.runs.spec import DataSpec, load
from warpi.utils.files import write_csv

PARTS = ("train", "trusted", "test")


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
        }

    def describe(self) -> list[str]:
        """The counts in sentences."""
        return describe_counts(self.summary())

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
    return lines


def find_duplicates(
    data: str | Path | Dataset,
    *,
    trusted: str | Path | Dataset | None = None,
    test: str | Path | Dataset | None = None,
    near: bool = True,
    **settings: Any,
) -> Duplicates:
    """Find exact and near copies within and between the training, trusted and test rows, outliers and broken images.

    Parameters:
        data: a name or path as for `fit`, or a `Dataset`. Its own trusted and test rows are compared too.
        trusted: more trusted rows: a path, or a `Dataset`.
        test: more test rows, in the same way.
        near: whether to search for near copies and outliers; False finds exact copies and broken images only.
        settings: how to read the data: root, label, drop, types, text, missing, unknown.
    """
    given: list[str | Path | Dataset | None] = [data, trusted, test]
    sets: list[Dataset | None] = [value for value in given if value is None or isinstance(value, Dataset)]
    if not isinstance(data, Dataset):
        if any(sets):
            raise UserError("give either paths or Datasets as data, trusted and test, not both")
        others = [None if path is None else str(path) for path in (trusted, test)]
        sets = _read_all(str(data), others, settings)
    elif settings or len(sets) < 3:
        raise UserError("with a Dataset, give trusted and test as Datasets too, and no settings")
    first = sets[0]
    assert first is not None
    parts = list(_split(first, *sets[1:]))
    kinds = {_kind_of(split) for _, split in parts}
    if len(kinds) > 1:
        listed = ", ".join(sorted(map(str, kinds)))
        raise UserError(f"data, trusted and test must be of one kind and shape, got {listed}")
    return _search(parts, first.classes, near)


def _read_all(data: str, others: list[str | None], settings: dict[str, Any]) -> list[Dataset | None]:
    """Read the files. Images are not decoded yet, so that broken ones are found."""
    if has_images(data, settings.get("drop", ())):
        first = _list_images(data, settings, None)
        return [first, *(None if path is None else _list_images(path, settings, first.classes) for path in others)]
    loaded = [load(DataSpec(data=data, meta_data=path, **settings)) for path in others]
    return [loaded[0].dataset, *(part.trusted for part in loaded)]


def _list_images(path: str, settings: dict[str, Any], classes: tuple[str, ...] | None) -> Dataset:
    options: dict[str, Any] = {"size": PHOTO, "classes": classes, "in_memory": False}
    if Path(path).is_dir():
        return read_folder(Path(path), **options)
    root = Path(settings["root"]) if settings.get("root") else None
    return read_manifest(Path(path), root=root, label=settings.get("label"), **options)


def _split(data: Dataset, trusted: Dataset | None = None, test: Dataset | None = None) -> Iterator[tuple[str, Split]]:
    """The rows of each part. Rows of the data that are marked as trusted belong to that part."""
    rows = torch.arange(len(data.y))
    marked = torch.zeros(len(rows), dtype=torch.bool) if data.trusted is None else data.trusted
    whole = Split(data.examples, rows, data.y)
    yield "train", whole.subset(~marked)
    for name, inner, mask, outer in (("trusted", data.meta, marked, trusted), ("test", data.test, None, test)):
        if mask is not None and mask.any():
            yield name, whole.subset(mask)
        if inner is not None:
            yield name, inner
        if outer is not None:
            yield name, Split(outer.examples, torch.arange(len(outer.y)), outer.truth)


def _kind_of(split: Split) -> object:
    if isinstance(split.examples, FileExamples):
        return "image files"
    return comparable_inputs(split)[0]


def _search(parts: list[tuple[str, Split]], classes: tuple[str, ...], near: bool) -> Duplicates:
    splits = [split for _, split in parts]
    problem = [""] * sum(map(len, splits))
    paths = None
    inputs: Any = None
    if isinstance(splits[0].examples, FileExamples):
        paths = tuple(path for split in splits for path in _paths_of(split))
        keys = hash_files(paths)
        inputs, broken = read_thumbnails(paths)
        for i, reason in broken.items():
            problem[i] = f"cannot be read: {reason}"
    else:
        keys = [key for split in splits for key in comparable_inputs(split)[1]]
        if near:
            inputs = _vectors_or_thumbnails(splits)
    is_image = isinstance(inputs, Tensor) and inputs.dtype == torch.uint8
    if is_image:
        for i in mark_blank(inputs).nonzero()[:, 0].tolist():
            problem[i] = problem[i] or "blank"
    firsts, copy_of = _first_of_each(keys)
    similarity = _mark_exact(copy_of)
    pairs = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    score = np.zeros(len(keys))
    if near:
        usable = np.array([i for i in firsts.tolist() if not (is_image and problem[i])], dtype=np.int64)
        pairs, score[usable] = _search_near(inputs, usable, is_image, splits[0])
        score = score[copy_of]
    group, similarity = _group(copy_of, pairs, similarity)
    label = tuple(classes[k] for split in splits for k in split.y.tolist())
    part = tuple(name for name, split in parts for _ in range(len(split)))
    row = np.concatenate([split.rows.numpy() for split in splits])
    return Duplicates(part, row, label, paths, group, similarity, score, tuple(problem))


def _search_near(inputs: Any, usable: Ints, is_image: bool, split: Split) -> tuple[Pairs, Floats]:
    """Near copies among some positions, and their outlier scores."""
    if not len(usable):
        return Pairs(usable, usable, np.zeros(0)), np.zeros(0)
    if is_image:
        pairs, score = find_similar_images(inputs[torch.from_numpy(usable)]), np.zeros(len(usable))
    else:
        pairs, score = find_close_vectors(inputs[usable], isinstance(split.examples, SparseExamples))
    return Pairs(usable[pairs.a], usable[pairs.b], np.minimum(pairs.similarity, 1 - 1e-4)), score


def _paths_of(split: Split) -> list[str]:
    examples = split.examples
    assert isinstance(examples, FileExamples)
    return [examples.path(row) for row in split.rows.tolist()]


def _vectors_or_thumbnails(splits: list[Split]) -> Any:
    """The inputs in a form whose distances mean something: thumbnails, unit vectors, or standardized features."""
    from scipy.sparse import vstack
    from sklearn.preprocessing import StandardScaler, normalize

    first = splits[0].examples
    if isinstance(first, SparseExamples):
        return normalize(vstack([split.examples.x[split.rows.numpy()] for split in splits]).tocsr())  # type: ignore[attr-defined]
    if isinstance(first, TensorExamples) and len(first.x.shape) == 4:
        return torch.cat([make_thumbnails(split.examples.x[split.rows]) for split in splits])  # type: ignore[attr-defined]
    x = torch.cat([split.examples.flat(split.rows) for split in splits]).cpu().numpy()
    if isinstance(first, Embedded):
        return normalize(x)
    return StandardScaler().fit(x[: len(splits[0])]).transform(x).astype(np.float32)


def _first_of_each(keys: list[Hashable]) -> tuple[Ints, Ints]:
    """The positions of the first row with each key, and for every row the first one with its key."""
    first: dict[Hashable, int] = {}
    copy_of = np.array([first.setdefault(key, i) for i, key in enumerate(keys)], dtype=np.int64)
    return np.array(sorted(first.values()), dtype=np.int64), copy_of


def _mark_exact(copy_of: Ints) -> Floats:
    """1 for the rows that share their first row with another one, else 0.  [N]"""
    counts = np.bincount(copy_of, minlength=len(copy_of))
    marks: Floats = (counts[copy_of] > 1).astype(np.float64)
    return marks


def _group(copy_of: Ints, pairs: Pairs, similarity: Floats) -> tuple[Ints, Floats]:
    """Number the connected groups of copies, in the order of their first rows, and add the near similarities."""
    n = len(copy_of)
    a = np.concatenate([np.arange(n), pairs.a])
    b = np.concatenate([copy_of, pairs.b])
    component = connected_components(coo_array((np.ones(len(a)), (a, b)), shape=(n, n)), directed=False)[1]
    for ends in (pairs.a, pairs.b):
        np.maximum.at(similarity, ends, pairs.similarity)
    large = np.bincount(component)[component] > 1
    order: dict[int, int] = {}
    group = [order.setdefault(c, len(order)) if big else -1 for c, big in zip(component.tolist(), large, strict=True)]
    return np.array(group, dtype=np.int64), similarity
