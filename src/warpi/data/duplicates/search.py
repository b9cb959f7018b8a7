"""Search splits for copies, near copies, outliers and broken images."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from warpi.data.duplicates.near_copies import (
    EXACT,
    Floats,
    Ints,
    Pairs,
    TooManyPairs,
    find_close_vectors,
    find_similar_images,
    uses_index,
    work,
)
from warpi.data.duplicates.result import Duplicates
from warpi.data.duplicates.thumbnails import make_thumbnails, mark_blank, read_thumbnails
from warpi.data.examples import TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.numeric import Embedded
from warpi.data.overlap import comparable_inputs, hash_files
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split
from warpi.errors import UserError

# Limits of a bounded search
MOST_ROWS = 10_000
MOST_WORK = 2e11  # multiplications: ten seconds of a CPU core for all pairs, 45 with an index
MOST_FILES = 2_000  # image files that are not in memory
MOST_PAIRS = 2_000  # pairs of images that are compared pixel by pixel
MIN_SIDE = 32  # pixels; smaller images look too much alike to recognize near copies


def search(
    parts: Sequence[tuple[str, Split]], classes: tuple[str, ...], near: bool = True, bounded: bool = False
) -> Duplicates:
    """Find copies within and across the parts, outliers, and images that cannot be used.

    A bounded search skips near copies and outliers if they would take more than about a minute. It also skips parts
    whose inputs cannot be compared with those of the first one. `skipped` says why near copies were skipped.
    """
    if bounded:
        parts = [part for part in parts if _kind_of(part[1]) == _kind_of(parts[0][1])]
    splits = [split for _, split in parts]
    kinds = {_kind_of(split) for split in splits}
    if len(kinds) > 1:
        listed = ", ".join(sorted(map(str, kinds)))
        raise UserError(f"data, trusted and test must be of one kind and shape, got {listed}")
    n = sum(map(len, splits))
    problem = [""] * n
    skipped = reason_to_skip(splits[0], n, bounded) if near else ""
    near = near and not skipped
    paths = None
    inputs: Any = None
    if isinstance(splits[0].examples, FileExamples):
        paths = tuple(path for split in splits for path in _paths_of(split))
        keys = hash_files(paths)
        if near or not bounded:
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
    score = np.zeros(n)
    if near:
        usable = np.array([i for i in firsts.tolist() if not (is_image and problem[i])], dtype=np.int64)
        try:
            pairs, score[usable] = _search_near(inputs, usable, is_image, splits[0], MOST_PAIRS if bounded else None)
        except TooManyPairs:
            skipped = "too many images look alike"
        score = score[copy_of]
    group, similarity = _group(copy_of, pairs, similarity)
    label = tuple(classes[k] for split in splits for k in split.y.tolist())
    part = tuple(name for name, split in parts for _ in range(len(split)))
    row = np.concatenate([split.rows.numpy() for split in splits])
    of_data = np.concatenate([np.full(len(split), split.examples is splits[0].examples) for split in splits])
    return Duplicates(part, row, label, paths, group, similarity, score, tuple(problem), of_data, skipped)


def has_pictures(split: Split) -> bool:
    """Whether near copies of the inputs can be recognized by their pixels."""
    shape = split.examples.shape
    return len(shape) == 3 and min(shape[1:]) >= MIN_SIDE and not isinstance(split.examples, Embedded)


def reason_to_skip(split: Split, n: int, bounded: bool) -> str:
    """Why near copies are not searched for; '' if they are."""
    files = isinstance(split.examples, FileExamples)
    pictures = has_pictures(split)
    if len(split.examples.shape) == 3 and not (files or pictures):
        return f"images with fewer than {MIN_SIDE} pixels per side look too much alike"
    d = math.prod(split.examples.shape)
    is_dense = not (files or pictures or isinstance(split.examples, SparseExamples))
    is_indexed = is_dense and uses_index(n)
    advice = " without the package faiss-cpu" if is_dense and n > EXACT and not is_indexed else ""
    if bounded and n > (MOST_FILES if files else MOST_ROWS) and not is_indexed:
        return f"{n:,} rows are too many{advice}"
    if bounded and is_dense and work(n, d) > MOST_WORK:
        return f"{n:,} rows with {d:,} features are too many{advice}"
    return ""


def _kind_of(split: Split) -> object:
    if isinstance(split.examples, FileExamples):
        return "image files"
    return comparable_inputs(split)[0]


def _search_near(inputs: Any, usable: Ints, is_image: bool, split: Split, most: int | None) -> tuple[Pairs, Floats]:
    """Near copies among some positions, and their outlier scores."""
    if not len(usable):
        return Pairs(usable, usable, np.zeros(0)), np.zeros(0)
    if is_image:
        pairs = find_similar_images(inputs[torch.from_numpy(usable)], most)
        score = np.zeros(len(usable))
    else:
        pairs, score = find_close_vectors(inputs[usable], isinstance(split.examples, SparseExamples))
    return Pairs(usable[pairs.a], usable[pairs.b], np.minimum(pairs.similarity, 1 - 1e-4)), score


def _paths_of(split: Split) -> list[str]:
    examples = split.examples
    assert isinstance(examples, FileExamples)
    return [examples.path(row) for row in split.rows.tolist()]


def _vectors_or_thumbnails(splits: list[Split]) -> Any:
    """The inputs in a form whose distances are meaningful: thumbnails, unit vectors or standardized features."""
    from scipy.sparse import vstack
    from sklearn.preprocessing import StandardScaler, normalize

    first = splits[0].examples
    if isinstance(first, SparseExamples):
        return normalize(vstack([split.examples.x[split.rows.numpy()] for split in splits]).tocsr())  # type: ignore[attr-defined]
    if isinstance(first, TensorExamples) and len(first.x.shape) == 4:
        return torch.cat([make_thumbnails(split.examples.x, split.rows) for split in splits])  # type: ignore[attr-defined]
    x = torch.cat([split.examples.flat(split.rows) for split in splits]).cpu().numpy()
    if isinstance(first, Embedded):
        return normalize(x)
    return StandardScaler().fit(x[: len(splits[0])]).transform(x).astype(np.float32)


def _first_of_each(keys: list[Hashable]) -> tuple[Ints, Ints]:
    """The positions of the first row with each key, and for every row the position of the first one with its key."""
    first: dict[Hashable, int] = {}
    copy_of = np.array([first.setdefault(key, i) for i, key in enumerate(keys)], dtype=np.int64)
    return np.array(sorted(first.values()), dtype=np.int64), copy_of


def _mark_exact(copy_of: Ints) -> Floats:
    """1 for the rows with an exact copy, else 0.  [N]"""
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
